"""An SO-101 in a driver process: its servos during silence, and after the process was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from lerobot_kit import FeetechArmSimulator, feetech_arm_simulator

from user_sys.compose import RobotConfig
from user_sys.config import save
from user_sys.edge.driver_client import DriverClient
from user_sys.edge.driver_server import EXIT_ROBOT_LOST

pytestmark = pytest.mark.lerobot
TORQUE, GOAL = 40, 42  # registers
START_S = 60.0
# LeRobot imports torchvision, which fails on some machines without `allow_torchvision_import`
RUN = """
import sys
from lerobot_kit import allow_torchvision_import
from user_sys.edge.driver_server import main
allow_torchvision_import()
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def arm(tmp_path: Path) -> Iterator[FeetechArmSimulator]:
    with feetech_arm_simulator(tmp_path) as simulated:
        yield simulated


@pytest.fixture
def running(
    arm: FeetechArmSimulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[bytes]]:
    monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(tmp_path))
    options = {"type": "so101_follower", "settings": arm.settings, "rate_hz": 10.0}
    save(RobotConfig(name="arm-0", driver="lerobot", task="free", options=options), tmp_path / "robot.yaml")
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path / "robot.yaml"), str(tmp_path / "state")],
        env={**os.environ, "PYTHONPATH": path},
    )
    yield process
    process.kill()
    process.wait()


def far_away(session: DriverClient) -> None:
    session.attach(START_S)
    session.reset(0)
    session.real_time = True
    for _ in range(5):
        tick = session.step(np.array([1.5, 0, 0, 0, 0, 50], np.float32))
        assert tick.applied is not None


def test_killed_driver_leaves_arm_under_torque(arm: FeetechArmSimulator, running: subprocess.Popen[bytes]) -> None:
    with DriverClient("arm-0", token=1) as session:
        far_away(session)
        running.send_signal(signal.SIGKILL)
        running.wait()
    pose = arm.word("shoulder_pan", GOAL)
    assert 2048 < pose < 2048 + 0.9 / 6.28 * 4096, "the safety kernel let it go no faster"
    assert arm.registers("shoulder_pan")[TORQUE] == 1


def test_silent_session_holds_and_unplugging_ends_the_process(
    arm: FeetechArmSimulator, running: subprocess.Popen[bytes]
) -> None:
    with DriverClient("arm-0", token=1) as session:
        far_away(session)
        held, deadline = -1, time.monotonic() + 60
        while held != (held := arm.word("shoulder_pan", GOAL)) and time.monotonic() < deadline:
            time.sleep(0.3)  # three control periods without a command: nothing may change
        assert held < 2048 + 1.4 / 6.28 * 4096
        arm.unplug()
        assert running.wait(60) == EXIT_ROBOT_LOST
