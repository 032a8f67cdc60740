"""An environment in this process: pace, locks, e-stops and signals."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from edge_kit import STILL, RecordingRobot

import user_sys.edge.local_environment
from hal.driver import RobotSetup, RobotSetupRequest
from hal.errors import EmergencyStopped, HardwareLost, LeaseHeld, StoppedAtRobot
from hal.estop import EstopLatch, new_emergency_stop
from hal.lease import driver_process_of, robot_lock
from hal.machine_folder import robot_files
from hal.robot import Robot, StopLevel
from hal.spec import Array
from robots.fake import FakeTask, make_robot_setup
from user_sys.compose import RobotConfig
from user_sys.edge.local_environment import defer_signals, open_local_environment, raise_if_stopped
from user_sys.errors import ConfigError

pytestmark = pytest.mark.usefixtures("runtime")


def test_real_robot_follows_the_clock_and_simulated_one_does_not() -> None:
    setup = make_robot_setup(RobotSetupRequest("arm-0", "reach", {}))
    for driver, real_time, paced in (
        ("ur", True, True),
        ("ur", None, True),
        ("an-installed-one", None, True),
        ("an-installed-one", False, False),
        ("fake", True, False),
        ("fake", None, False),
    ):
        with open_local_environment(setup, RobotConfig(name="arm-0", driver=driver, real_time=real_time)) as found:
            assert found.real_time is paced
            assert found.reset(0).observation


REAL, SIMULATED = (RobotConfig(name="arm-0", driver=driver) for driver in ("ur", "fake"))


def watched() -> tuple[RecordingRobot, RobotSetup]:
    robot = RecordingRobot()
    return robot, RobotSetup("arm-0", robot, FakeTask())


def test_locked_robot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_sys.edge.local_environment, "LOCK_TIMEOUT_S", 0.0)
    robot, setup = watched()
    with robot_lock("arm-0", "for run demo", simulated=False):
        with pytest.raises(LeaseHeld, match="by pid .* for run demo"), open_local_environment(setup, REAL):
            robot.command(STILL)
        with open_local_environment(setup, SIMULATED) as driver:
            assert driver.step(STILL).applied is not None, "another simulation of the same name is another robot"
    with open_local_environment(setup, REAL):
        assert driver_process_of("arm-0")
    assert not driver_process_of("arm-0")


def test_latched_robot_is_refused() -> None:
    robot, setup = watched()
    EstopLatch(robot_files("arm-0", simulated=False).latch_path).press(new_emergency_stop("ada", "smoke"))
    with pytest.raises(EmergencyStopped, match="stopped by ada: re-arm it at the console .* `user-sys rearm arm-0`"):
        with open_local_environment(setup, REAL):
            robot.command(STILL)
    assert robot.commands == [] and not driver_process_of("arm-0")


def test_robots_own_stop_ends_the_work_and_stays() -> None:
    robot, setup = watched()
    with (
        pytest.raises(EmergencyStopped, match="person must re-arm it: it is pressed$"),
        open_local_environment(setup, REAL) as driver,
    ):
        raise_if_stopped(driver.step(STILL), None)
        driver.kernel.emergency_stop("the button at the door", "it is pressed")
        raise_if_stopped(driver.step(STILL), None)
    with pytest.raises(EmergencyStopped, match="button at the door"), open_local_environment(setup, REAL):
        robot.command(STILL)
    assert len(robot.commands) == 1


class ButtonRobot(RecordingRobot):
    """A robot whose own stop button ends the connection."""

    def stop(self, level: StopLevel) -> None:
        raise StoppedAtRobot("the arm's button is pressed")


def test_robot_that_a_person_stopped_at_the_robot_awaits_a_re_arm() -> None:
    robot = ButtonRobot()
    setup = RobotSetup("arm-0", robot, FakeTask())
    with pytest.raises(HardwareLost, match="button"), open_local_environment(setup, REAL) as driver:
        driver.hold()
    with pytest.raises(EmergencyStopped, match="the robot fake: re-arm it"), open_local_environment(setup, REAL):
        robot.command(STILL)
    assert robot.commands == []


class PressedTask(FakeTask):
    """A reset during which a person presses the e-stop."""

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        for period in range(10):
            robot.check_stop()
            if period == 3:
                EstopLatch(robot_files("arm-0", simulated=False).latch_path).press(new_emergency_stop("ada"))
        raise AssertionError("it went on")


def test_press_of_another_program_ends_the_reset() -> None:
    robot = RecordingRobot()
    with open_local_environment(RobotSetup("arm-0", robot, PressedTask()), REAL) as driver:
        time_step = driver.reset(0)
        assert time_step.stopped and robot.stops and set(robot.stops) == {StopLevel.SAFE}
        assert driver.hold().stopped and set(robot.stops) == {StopLevel.SAFE}


class PressedOnConnect(RecordingRobot):
    """A robot whose e-stop is pressed during the connection."""

    def connect(self) -> None:
        EstopLatch(robot_files("arm-0", simulated=False).latch_path).press(new_emergency_stop("ada"))
        self.check_stop()
        assert not self.stops
        super().connect()


def test_press_during_the_connection_stops_the_robot() -> None:
    robot = PressedOnConnect()
    with open_local_environment(RobotSetup("arm-0", robot, FakeTask()), REAL) as driver:
        assert driver.reset(0).stopped and set(robot.stops) == {StopLevel.SAFE}


class Pressed(RecordingRobot):
    """A robot that sends its process a signal during the third command, and again during the stop."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self.whole, self.closed = number, 0, False

    def command(self, action: Array) -> Array:
        if self.whole == 2:
            os.kill(os.getpid(), self._number)
        applied = super().command(action)
        self.whole += 1
        return applied

    def close(self) -> None:
        os.kill(os.getpid(), self._number)
        super().close()
        self.closed = True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_program_between_control_periods(number: signal.Signals) -> None:
    robot = Pressed(number)
    before = signal.signal(number, signal.default_int_handler)  # the tests may run under nohup
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            defer_signals() as attend,
            open_local_environment(RobotSetup("arm-0", robot, FakeTask()), REAL, check_stop=attend) as driver,
        ):
            for _ in range(10):
                driver.step(STILL)
                attend()
        assert robot.whole == 3 and robot.closed
        assert signal.getsignal(number) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt), defer_signals():
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)


def test_nohup_program_ignores_the_end_of_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with defer_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("driver", ["ur", "franka", "ros2", "lerobot"])
def test_real_robot_cannot_leave_the_clock(driver: str) -> None:
    assert RobotConfig(name="arm-0", driver=driver).follows_clock
    with pytest.raises(ConfigError, match="robot arm-0: real_time: false is for simulated robots"):
        RobotConfig(name="arm-0", driver=driver, real_time=False)
