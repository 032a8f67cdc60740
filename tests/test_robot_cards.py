"""Robots' cards: what lies in a folder that others may have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from robots.fake import FakeRobot
from user_sys.robot_cards import keep_card, read_cards

NESTED = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", NESTED, b" " * (2 << 20)], ids=len)
def test_a_card_that_is_none_is_left_out(content: bytes, tmp_path: Path) -> None:
    keep_card(tmp_path, "left", FakeRobot().spec)
    (tmp_path / "right.json").write_bytes(content)
    assert [card.robot for card in read_cards(tmp_path)] == ["left"]


def test_a_card_with_the_name_of_another_robot_is_left_out(tmp_path: Path) -> None:
    keep_card(tmp_path, "left", FakeRobot().spec)
    (tmp_path / "left.json").rename(tmp_path / "right.json")
    assert read_cards(tmp_path) == ()
