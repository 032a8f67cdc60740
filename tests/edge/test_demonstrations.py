from __future__ import annotations

import threading
from pathlib import Path

import pytest

import user_sys.commands.edge
from user_sys.commands.edge import EdgeConfig, record_missing_demonstrations
from user_sys.compose import RobotConfig
from user_sys.edge.demonstrations import DemonstrationConfig
from user_sys.edge.outbox import Outbox


def test_a_robot_that_drops_out_while_demonstrations_are_shown_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_sys.commands.edge, "ROBOT_RETRY_S", 0.0)
    monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(tmp_path / "r"))
    robot = RobotConfig(name="fake-0", driver="fake", task="reach", options={"faults": {"drop_out_at": 30}})
    config = EdgeConfig(robots=(robot,), demonstrations=DemonstrationConfig(episodes=12))
    said: list[str] = []
    record_missing_demonstrations(config, 0, robot, tmp_path, said.append, threading.Event())
    assert said == [
        "fake-0: the scripted expert shows 12 demonstrations",
        "fake-0 is awaited: the fake robot dropped out",
    ]
    with Outbox.open(tmp_path / "outbox") as outbox:
        assert len(outbox) >= 12
    record_missing_demonstrations(config, 0, robot, tmp_path, said.append, threading.Event())
    assert said[2:] == [
        "fake-0: 12 demonstrations were shown before, to the same run or another, so none now; without the file "
        f"{tmp_path / 'demonstrations'} they would be shown again"
    ]


def test_whoever_stops_it_does_not_wait_for_a_robot_that_is_away(tmp_path: Path) -> None:
    robot = RobotConfig(name="fake-0", driver="fake", task="reach", options={"faults": {"drop_out_at": 1}})
    config = EdgeConfig(robots=(robot,), demonstrations=DemonstrationConfig(episodes=1))
    stop = threading.Event()
    record_missing_demonstrations(
        config, 0, robot, tmp_path, lambda line: stop.set() if "awaited" in line else None, stop
    )
    assert stop.is_set()


class Countdown(threading.Event):
    """It is set once it was asked that often."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._left = times

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


def test_whoever_stops_it_does_not_wait_for_the_end_of_a_demonstration(tmp_path: Path) -> None:
    robot = RobotConfig(name="fake-0", driver="fake", task="reach")
    config = EdgeConfig(robots=(robot,), demonstrations=DemonstrationConfig(episodes=50))
    record_missing_demonstrations(config, 0, robot, tmp_path, lambda line: None, Countdown(3))
    with Outbox.open(tmp_path / "outbox") as outbox:
        assert len(outbox) == 0, "what was given up half-way is not kept"
