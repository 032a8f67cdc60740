"""The e-stop, pressed from another terminal or at a console: it stops the robot whatever program drives it."""

from __future__ import annotations

import getpass
import threading
from pathlib import Path

import pytest
from edge_kit import STILL, WatchedRobot, driver_process, until

from hal.errors import EmergencyStopped, HardwareLost
from hal.lease import DEVICE, MachineLock
from hal.robot import StopLevel
from hal.station import Station
from robots.fake import FakeTask
from user_sys.cli import main
from user_sys.compose import RobotConfig
from user_sys.edge.driver_client import RemoteDriver
from user_sys.edge.driver_wire import shared_latch
from user_sys.edge.local import local_driver
from user_sys.edge.press import Ordered, pressing_aside
from user_sys.messages import OperatorCommand, WatchRequest

pytestmark = pytest.mark.usefixtures("runtime")

REAL = RobotConfig(name="arm-0", driver="ur")
E_STOP = OperatorCommand(robot="arm-0", operator="ada", order="e-stop", sequence=1)


def latch_of(robot: str) -> Path:
    latch = shared_latch(robot, simulated=False)
    assert latch is not None
    return latch


def test_it_stops_a_program_that_drives_the_robot_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    robot = WatchedRobot()
    with MachineLock(f"{DEVICE}video0"), local_driver(Station("arm-0", robot, FakeTask()), REAL) as driver:
        assert driver.command(STILL).applied is not None
        assert main(["stop", "--by", "ada", "--reason", "smoke"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("arm-0: the e-stop is pressed; driven by pid ")
        tick = driver.command(STILL)
        assert tick.stopped and tick.applied is None and robot.stops[-1] is StopLevel.SAFE and len(robot.commands) == 1
        assert driver.kernel.emergency is not None and driver.kernel.emergency.by == "ada"
        capsys.readouterr()
        assert main(["stop", "arm-1", "--by", "ada"]) == 0
        told = "arm-1: the e-stop is pressed; driven by nobody on this computer; driven here: arm-0\n"
        assert capsys.readouterr().out == told, "whoever mistypes a name is told which there are"
        assert main(["stop", "--by", "bob"]) == 0
    with (
        pytest.raises(EmergencyStopped, match="arm-0 was stopped by ada"),
        local_driver(Station("arm-0", robot, FakeTask()), REAL),
    ):
        pass


def test_it_stops_a_robot_that_a_driver_process_drives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RobotConfig(name="fake-0", driver="fake", task="reach")
    with driver_process(tmp_path / "state", config) as running, RemoteDriver("fake-0") as session:
        until(lambda: _answers(session), "the driver is there")
        assert main(["stop", "fake-0", "--by", "ada"]) == 0
        running.says("estop.latched by=ada")
        assert "fake-0: the e-stop is pressed; driven by pid" in capsys.readouterr().out
        assert not latch_of("fake-0").exists(), "a simulated robot has none outside of its run"


def _answers(driver: RemoteDriver) -> bool:
    try:
        driver.describe(1.0)
    except HardwareLost:
        return False
    return True


def test_a_robot_that_nobody_drives_stays_stopped_for_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop"]) == 2
    assert "no robot is driven by a program of this computer" in capsys.readouterr().err
    assert main(["stop", "arm-0", "--by", "ada"]) == 0
    assert "driven by nobody on this computer" in capsys.readouterr().out
    robot = WatchedRobot()
    with pytest.raises(EmergencyStopped), local_driver(Station("arm-0", robot, FakeTask()), REAL):
        pass
    assert robot.commands == []
    assert main(["stop", "../arm-0"]) == 2 and "is not a robot's name" in capsys.readouterr().err


def test_a_user_without_a_name_stops_robots_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert main(["stop", "arm-0"]) == 0
    assert latch_of("arm-0").exists() and capsys.readouterr().out.startswith("arm-0: the e-stop is pressed")


def test_a_console_reaches_programs_that_are_not_of_its_run() -> None:
    sent: list[Ordered] = []
    order = pressing_aside(sent.append, {"arm-0": "for /runs/demo/edge/arm-0"})
    order(E_STOP)
    assert not latch_of("arm-0").exists(), "nobody drives it here"
    with MachineLock("arm-0", "for /runs/demo/edge/arm-0"):
        order(E_STOP)
        assert not latch_of("arm-0").exists() and not _pressing(), "its own driver hears of it by its session"
    with MachineLock("arm-0", "for demonstrations or an evaluation"):
        watch = WatchRequest(robot="arm-0", rate_hz=1.0, ttl_s=1.0)
        take_over = OperatorCommand(robot="arm-0", operator="ada", order="take-over", sequence=2)
        for other in (watch, take_over):
            order(other)
        assert not _pressing()
        order(E_STOP)
        until(latch_of("arm-0").exists, "the latch is there")
        until(lambda: not _pressing(), "it is done")
    assert sent == [E_STOP, E_STOP, watch, take_over, E_STOP]


def _pressing() -> bool:
    return any(thread.name == "e-stop arm-0" for thread in threading.enumerate())
