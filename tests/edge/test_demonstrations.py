from __future__ import annotations

import threading
from pathlib import Path

import pytest

import user_sys.commands.edge
from user_sys.commands.edge import EdgeConfig, record_missing_demonstrations
from user_sys.compose import RobotConfig
from user_sys.edge.demonstrations import DemonstrationConfig
from user_sys.edge.outbox import Outbox


def test_lost_robot_continues_its_demonstrations_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_sys.commands.edge, "ROBOT_RETRY_S", 0.0)
    monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(tmp_path / "r"))
    robot = RobotConfig(name="fake-0", driver="fake", task="reach", options={"faults": {"drop_out_at": 30}})
    config = EdgeConfig(robots=(robot,), demonstrations=DemonstrationConfig(episodes=12))
    lines: list[str] = []
    record_missing_demonstrations(config, 0, robot, tmp_path, lines.append, threading.Event())
    assert lines == [
        "fake-0: recording 12 demonstrations of the scripted expert",
        "fake-0: waiting for the robot: the fake robot dropped out",
    ]
    with Outbox.open(tmp_path / "outbox") as outbox:
        assert len(outbox) >= 12
    record_missing_demonstrations(config, 0, robot, tmp_path, lines.append, threading.Event())
    assert lines[2:] == [
        "fake-0: 12 demonstrations were recorded before, for this run or another one; to record them again, remove the "
        f"file {tmp_path / 'demonstrations'}"
    ]


def test_stop_ends_the_wait_for_a_lost_robot(tmp_path: Path) -> None:
    robot = RobotConfig(name="fake-0", driver="fake", task="reach", options={"faults": {"drop_out_at": 1}})
    config = EdgeConfig(robots=(robot,), demonstrations=DemonstrationConfig(episodes=1))
    stop = threading.Event()
    record_missing_demonstrations(
        config, 0, robot, tmp_path, lambda line: stop.set() if "waiting for" in line else None, stop
    )
    assert stop.is_set()


class Countdown(threading.Event):
    """An event that is set after `times` checks."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._left = times

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


def test_stop_discards_the_demonstration_in_progress(tmp_path: Path) -> None:
    robot = RobotConfig(name="fake-0", driver="fake", task="reach")
    config = EdgeConfig(robots=(robot,), demonstrations=DemonstrationConfig(episodes=50))
    record_missing_demonstrations(config, 0, robot, tmp_path, lambda line: None, Countdown(3))
    with Outbox.open(tmp_path / "outbox") as outbox:
        assert len(outbox) == 0, "a discarded demonstration leaves no chunks"
