"""A UR in a driver process: the arm after the process was killed, and the process after the arm's loss."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from peer_kit import REPLY_S, eventually
from ur_kit import SimulatedController, simulated_controller

from user_sys.compose import RobotConfig
from user_sys.config import save
from user_sys.edge.driver_client import DriverClient
from user_sys.edge.driver_server import EXIT_ROBOT_LOST

pytest.importorskip("rtde_control")
SERVOJ = 11


@pytest.fixture
def controller() -> Iterator[SimulatedController]:
    with simulated_controller() as simulated:
        yield simulated


@pytest.fixture
def running(
    controller: SimulatedController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[bytes]]:
    monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(tmp_path))
    options = {"host": controller.host, "action": "joint_delta", "rate_hz": 10.0, "silence_s": 5.0}
    options["stale_after_s"] = 30.0  # a busy machine is late by seconds
    save(RobotConfig(name="ur-0", driver="ur", task="free", options=options), tmp_path / "robot.yaml")
    command = ["-m", "user_sys.edge.driver_server", str(tmp_path / "robot.yaml"), str(tmp_path / "state")]
    process = subprocess.Popen([sys.executable, *command])
    yield process
    process.kill()
    process.wait()


def under_way(session: DriverClient, controller: SimulatedController) -> None:
    session.attach(REPLY_S)
    session.reset(0)
    session.step(np.array([0, 0, 0, 0, 0, 0.05], np.float32))
    eventually(lambda: controller.begun(SERVOJ) > 0, "the arm did not start")


def test_killed_driver_triggers_controller_watchdog(
    controller: SimulatedController, running: subprocess.Popen[bytes]
) -> None:
    with DriverClient("ur-0", token=1) as session:
        under_way(session, controller)
        running.send_signal(signal.SIGKILL)
        running.wait()
    eventually(lambda: controller.state["watchdog_stops"] == 1, "the watchdog did not stop the arm")
    assert not controller.state["program"] and controller.state["servo"] is None


def test_silent_session_holds_and_protective_stop_ends_the_process(
    controller: SimulatedController, running: subprocess.Popen[bytes]
) -> None:
    with DriverClient("ur-0", token=1) as session:
        under_way(session, controller)
        eventually(lambda: controller.state["servo"] is None, "the arm did not hold")
        controller.set("safety_mode", 3)
        assert running.wait(REPLY_S) == EXIT_ROBOT_LOST
