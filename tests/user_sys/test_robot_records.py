"""Robots' cards: what lies in a folder that others may have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from robots.fake import FakeRobot
from user_sys.robot_records import read_robot_records, save_robot_record

NESTED = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", NESTED, b" " * (2 << 20)], ids=len)
def test_a_card_that_is_none_is_left_out(content: bytes, tmp_path: Path) -> None:
    save_robot_record(tmp_path, "left", FakeRobot().spec)
    (tmp_path / "right.json").write_bytes(content)
    assert [card.robot for card in read_robot_records(tmp_path)] == ["left"]


@pytest.mark.parametrize("rate", [b"0.0", b"-5.0"])
def test_a_card_of_a_robot_that_there_cannot_be_is_left_out(rate: bytes, tmp_path: Path) -> None:
    save_robot_record(tmp_path, "left", FakeRobot().spec)
    card = tmp_path / "left.json"
    sound = card.read_bytes()
    card.write_bytes(sound.replace(b'"rate_hz":10.0', b'"rate_hz":' + rate))
    assert card.read_bytes() != sound and read_robot_records(tmp_path) == ()


def test_a_card_with_the_name_of_another_robot_is_left_out(tmp_path: Path) -> None:
    save_robot_record(tmp_path, "left", FakeRobot().spec)
    (tmp_path / "left.json").rename(tmp_path / "right.json")
    assert read_robot_records(tmp_path) == ()
