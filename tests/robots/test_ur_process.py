"""A UR in a driver process: the arm after the process was killed, and the process after the arm's loss."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from peer_kit import REPLY_S, eventually
from ur_kit import SimulatedController, simulated_controller

from hal.errors import StoppedAtRobot
from user_sys.compose import RobotConfig
from user_sys.config import save
from user_sys.edge.driver_client import DriverClient
from user_sys.edge.driver_server import EXIT_ROBOT_LOST

pytest.importorskip("rtde_control")
SERVOJ = 11
EMERGENCY_STOP = 7
STEP = np.array([0, 0, 0, 0, 0, 0.05], np.float32)


@pytest.fixture
def controller() -> Iterator[SimulatedController]:
    with simulated_controller() as simulated:
        yield simulated


@pytest.fixture
def folder(controller: SimulatedController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the computer, with the arm's settings."""
    monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(tmp_path))
    options = {"host": controller.host, "action": "joint_delta", "rate_hz": 10.0, "silence_s": 5.0}
    options["stale_after_s"] = 30.0  # a busy machine is late by seconds
    save(RobotConfig(name="ur-0", driver="ur", task="free", options=options), tmp_path / "robot.yaml")
    return tmp_path


@contextlib.contextmanager
def driver_process(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = ["-m", "user_sys.edge.driver_server", str(folder / "robot.yaml"), str(folder / "state")]
    process = subprocess.Popen([sys.executable, *command])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def running(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with driver_process(folder) as process:
        yield process


def under_way(session: DriverClient, controller: SimulatedController) -> None:
    session.attach(REPLY_S)
    session.reset(0)
    session.step(STEP)
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


def require_still_until_re_armed(controller: SimulatedController, session: DriverClient) -> None:
    begun = controller.begun(SERVOJ)
    session.attach(REPLY_S)
    for time_step in (session.hold(), session.reset(0), session.step(STEP)):
        assert time_step.stopped and time_step.applied is None
        assert "the robot's emergency stop" in time_step.stopped_why
    assert controller.begun(SERVOJ) == begun, "the arm moved by itself"
    assert session.rearm("ada")
    assert session.step(STEP).applied is not None
    eventually(lambda: controller.begun(SERVOJ) > begun, "the arm did not move again")


@pytest.mark.parametrize("is_driven", [False, True])
def test_arm_stopped_at_its_own_button_moves_only_after_re_arm(
    controller: SimulatedController, folder: Path, is_driven: bool
) -> None:
    with DriverClient("ur-0", token=1) as session:
        with driver_process(folder) as process:
            under_way(session, controller)
            controller.set("safety_mode", EMERGENCY_STOP)
            with pytest.raises(StoppedAtRobot) if is_driven else contextlib.nullcontext():
                while is_driven:
                    session.step(STEP)
            assert process.wait(REPLY_S) == EXIT_ROBOT_LOST
        controller.set("safety_mode", 1)
        with driver_process(folder):
            require_still_until_re_armed(controller, session)


def test_arm_stopped_before_the_connection_moves_only_after_re_arm(
    controller: SimulatedController, folder: Path
) -> None:
    controller.set("safety_mode", EMERGENCY_STOP)
    with driver_process(folder) as process:
        assert process.wait(REPLY_S) == EXIT_ROBOT_LOST
    controller.set("safety_mode", 1)
    with DriverClient("ur-0", token=1) as session, driver_process(folder):
        require_still_until_re_armed(controller, session)
