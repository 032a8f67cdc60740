"""Robot records in a folder that may hold damaged files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from robots.fake import FakeRobot
from user_sys.policies.conformance import example_spec
from user_sys.robot_records import read_robot_records, save_robot_record

NESTED = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", NESTED, b" " * (2 << 20)], ids=len)
def test_damaged_record_is_skipped(content: bytes, tmp_path: Path) -> None:
    save_robot_record(tmp_path, "left", FakeRobot().spec)
    (tmp_path / "right.json").write_bytes(content)
    assert [record.robot for record in read_robot_records(tmp_path)] == ["left"]


@pytest.mark.parametrize("rate", [b"0.0", b"-5.0"])
def test_record_with_invalid_spec_is_skipped(rate: bytes, tmp_path: Path) -> None:
    save_robot_record(tmp_path, "left", FakeRobot().spec)
    card = tmp_path / "left.json"
    sound = card.read_bytes()
    card.write_bytes(sound.replace(b'"rate_hz":10.0', b'"rate_hz":' + rate))
    assert card.read_bytes() != sound and read_robot_records(tmp_path) == ()


def test_misnamed_record_is_skipped(tmp_path: Path) -> None:
    save_robot_record(tmp_path, "left", FakeRobot().spec)
    (tmp_path / "left.json").rename(tmp_path / "right.json")
    assert read_robot_records(tmp_path) == ()


def test_robot_with_unbounded_elements_comes_back_as_it_was(tmp_path: Path) -> None:
    spec = example_spec()
    assert not all(np.isfinite(spec.observation[0].low)) and save_robot_record(tmp_path, "r", spec)
    (record,) = read_robot_records(tmp_path)
    assert record.spec == spec and not save_robot_record(tmp_path, "r", spec)
