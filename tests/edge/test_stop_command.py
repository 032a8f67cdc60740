"""The e-stop from another terminal or a console, for any program that drives the robot."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from edge_kit import STILL, RecordingRobot, driver_process, until

from hal.driver import RobotSetup
from hal.errors import EmergencyStopped, HardwareLost
from hal.estop import EmergencyStop, EstopLatch
from hal.lease import MachineLock, robot_lock
from hal.machine_folder import robot_files, shared_file
from hal.robot import StopLevel
from hal.state_database import machine_state_path, read_audit_log
from robots.fake import FakeTask
from user_sys.commands.main import main
from user_sys.compose import RobotConfig
from user_sys.edge import local_estop
from user_sys.edge.driver_client import DriverClient
from user_sys.edge.local_environment import open_local_environment
from user_sys.edge.local_estop import ConsoleMessage, LocalEstops, with_local_estop
from user_sys.messages import OperatorCommand, OperatorReply, PreviewRequest

pytestmark = pytest.mark.usefixtures("runtime")

REAL = RobotConfig(name="arm-0", driver="ur")
FAKE = RobotConfig(name="fake-0", driver="fake", task="reach")
E_STOP = OperatorCommand(robot="arm-0", operator="ada", order="e-stop", sequence=1, press=7)


def latched(robot: str, *, simulated: bool = False) -> EmergencyStop | None:
    return EstopLatch(robot_files(robot, simulated=simulated).latch_path).read()


class Driving:
    """A program that drives the real robot arm-0 without a session, as `record` does, in a thread."""

    def __init__(self) -> None:
        self.robot, self.over, self.begun = RecordingRobot(), threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._drive)

    def _drive(self) -> None:
        with open_local_environment(RobotSetup("arm-0", self.robot, FakeTask()), REAL) as driver:
            while not self.over.is_set():
                driver.step(STILL)
                self.begun.set()

    def __enter__(self) -> Driving:
        self.thread.start()
        assert self.begun.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()


def test_stop_reaches_a_program_without_a_session(capsys: pytest.CaptureFixture[str]) -> None:
    with MachineLock(shared_file("device.video0.lock")), Driving() as driving:
        assert main(["stop", "--by", "ada", "--reason", "smoke"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("arm-0: stopped; its driver acknowledged (pid ") and "driven by pid " in line
        commanded = len(driving.robot.commands)
        assert driving.robot.stops[-1] is StopLevel.SAFE
        assert main(["stop", "arm-0", "--by", "bob"]) == 0, "a second press is acknowledged too"
        assert len(driving.robot.commands) == commanded
        stopped = latched("arm-0")
        assert stopped is not None and (stopped.by, stopped.presses) == ("ada", 2)
    with (
        pytest.raises(EmergencyStopped, match="arm-0 was stopped by ada"),
        open_local_environment(RobotSetup("arm-0", RecordingRobot(), FakeTask()), REAL),
    ):
        pass


def test_unknown_name_fails_and_lists_the_driven_robots(capsys: pytest.CaptureFixture[str]) -> None:
    with Driving():
        assert main(["stop", "arm-1"]) == 1
        output = capsys.readouterr().err
        assert "arm-1: NOT STOPPED" in output and "Driven here: arm-0" in output
        assert latched("arm-0") is None and latched("arm-1") is None
        assert main(["stop", "arm-1", "arm-0"]) == 1
        captured = capsys.readouterr()
        assert "arm-0: stopped" in captured.out and "arm-1: NOT STOPPED" in captured.err, "the others are stopped"


def test_unresponsive_driver_fails_and_its_successor_is_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_estop, "ACKNOWLEDGE_TIMEOUT_S", 0.2)
    with robot_lock("arm-0", "for runs/demo", simulated=False):
        assert main(["stop", "arm-0", "--by", "ada"]) == 1
        output = capsys.readouterr().err
        assert "arm-0: NO ANSWER within 0.2 s from pid " in output and "press the robot's own e-stop" in output
    with (
        pytest.raises(EmergencyStopped),
        open_local_environment(RobotSetup("arm-0", RecordingRobot(), FakeTask()), REAL),
    ):
        pass


def test_stop_reaches_a_driver_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with driver_process(tmp_path / "state", FAKE) as running, DriverClient("fake-0") as session:
        until(lambda: _answers(session), "the driver is there")
        assert main(["stop", "fake-0", "--by", "ada"]) == 0
        running.wait_for_log("estop.latched by=ada")
        assert "fake-0 (simulated by user " in capsys.readouterr().out
        running.process.send_signal(signal.SIGKILL)
        running.process.wait(60)
    assert main(["stop", "fake-0"]) == 1, "a simulated robot that nothing drives is not known"
    with driver_process(tmp_path / "other", FAKE, "other.log"), DriverClient("fake-0", token=1) as session:
        until(lambda: _answers(session), "the driver is there")
        assert not session.hold().stopped, "another run begins again"
    with driver_process(tmp_path / "state", FAKE, "again.log"), DriverClient("fake-0", token=1) as session:
        until(lambda: _answers(session), "the driver is there")
        assert session.hold().stopped, "the same run does not"


def _answers(driver: DriverClient) -> bool:
    try:
        driver.describe(1.0)
    except HardwareLost:
        return False
    return True


def test_idle_robot_stays_stopped_until_a_person_re_arms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop"]) == 1
    assert "no robot is driven on this computer" in capsys.readouterr().err
    assert main(["stop", "arm-0"]) == 1, "it was never driven here"
    robot = RecordingRobot()
    with open_local_environment(RobotSetup("arm-0", robot, FakeTask()), REAL):
        assert main(["rearm", "arm-0"]) == 2 and "is driven on this machine by pid" in capsys.readouterr().err
    assert main(["stop", "arm-0", "--by", "ada"]) == 0
    assert "latched for its next start, until a person re-arms it" in capsys.readouterr().out
    robot = RecordingRobot()
    with pytest.raises(EmergencyStopped), open_local_environment(RobotSetup("arm-0", robot, FakeTask()), REAL):
        pass
    assert robot.commands == []
    assert main(["rearm", "arm-0", "--by", "bob"]) == 0
    assert "re-armed by bob; it was stopped by ada" in capsys.readouterr().out
    with open_local_environment(RobotSetup("arm-0", robot, FakeTask()), REAL) as driver:
        assert driver.step(STILL).applied is not None
    assert main(["rearm", "arm-0"]) == 2 and "no e-stop is latched" in capsys.readouterr().err
    assert main(["stop", "../arm-0"]) == 2 and "is not a robot's name" in capsys.readouterr().err


def test_press_during_a_re_arm_stands() -> None:
    with Driving() as driving:
        kernel_latch = EstopLatch(robot_files("arm-0", simulated=False).latch_path)
        first = kernel_latch.press(EmergencyStop(by="ada", why="", unix_ns=1))
        second = kernel_latch.press(EmergencyStop(by="bob", why="", unix_ns=2))
        assert not kernel_latch.clear(first) and latched("arm-0") is not None
        until(lambda: driving.robot.stops, "it is stopped")
        assert kernel_latch.clear(second) and latched("arm-0") is None


def test_console_e_stop_reaches_programs_outside_its_run() -> None:
    sent: list[ConsoleMessage] = []
    answers: list[OperatorReply] = []
    order = with_local_estop(sent.append, {"arm-0": "for /runs/demo/edge/arm-0"}, answers.append)
    order(E_STOP)
    assert latched("arm-0") is None, "nothing drives it here"
    with robot_lock("arm-0", "for /runs/demo/edge/arm-0", simulated=False):
        order(E_STOP)
        assert latched("arm-0") is None and not _pressing(), "its own driver gets it from its session"
    with Driving():
        watch = PreviewRequest(robot="arm-0", rate_hz=1.0, ttl_s=1.0)
        take_over = OperatorCommand(robot="arm-0", operator="ada", order="take-over", sequence=2)
        for other in (watch, take_over):
            order(other)
        assert not _pressing()
        for _ in range(3):  # the page repeats it
            order(E_STOP)
        assert _pressing() <= 1
        until(lambda: (stop := latched("arm-0")) is not None and stop.acknowledged, "it is stopped")
        until(lambda: answers, "the page gets the reply")
        order(E_STOP)
        until(lambda: not _pressing(), "it is done")
        assert [(reply.accepted, reply.press) for reply in answers] == [(True, E_STOP.press)] * 2
        stop = latched("arm-0")
        assert stop is not None and stop.presses == 1, "a repeat of a confirmed press does nothing"
    assert sent == [E_STOP, E_STOP, watch, take_over, *[E_STOP] * 3]


@pytest.mark.parametrize("simulated", [False, True])
def test_console_e_stop_that_no_gateway_takes_reaches_a_driver_on_this_computer(simulated: bool) -> None:
    run, answers = "for /runs/demo/edge/arm-0", list[OperatorReply]()
    order = with_local_estop(lambda message: False, {"arm-0": run}, answers.append, {"arm-0"} if simulated else ())
    assert order(E_STOP) is False and not _pressing(), "nothing drives it here"
    with robot_lock("arm-0", run, simulated=simulated):
        assert order(E_STOP) is True
        until(lambda: latched("arm-0", simulated=simulated), "the latch is pressed")
    until(lambda: answers, "the page gets the reply")
    assert answers[-1].accepted and answers[-1].press == E_STOP.press


def test_console_e_stop_of_a_simulated_robot_leaves_that_of_another_run_alone() -> None:
    order = with_local_estop(lambda message: True, {"arm-0": "for /runs/demo/edge/arm-0"}, print, {"arm-0"})
    with robot_lock("arm-0", "for /runs/other/edge/arm-0", simulated=True):
        order(E_STOP)
        assert not _pressing() and latched("arm-0", simulated=True) is None


def test_console_e_stop_of_a_real_robot_leaves_a_simulated_one_of_its_name_alone() -> None:
    sent, answers = list[ConsoleMessage](), list[OperatorReply]()
    order = with_local_estop(sent.append, {"arm-0": "for /runs/demo/edge/arm-0"}, answers.append)
    with robot_lock("arm-0", "for /runs/other/edge/arm-0", simulated=True):
        for _ in range(2):  # the page repeats it until the robot's own driver confirms
            order(E_STOP)
            until(lambda: not _pressing(), "no press is in progress")
    assert sent == [E_STOP] * 2 and not answers
    assert latched("arm-0") is None and latched("arm-0", simulated=True) is None


def test_console_e_stop_of_a_robot_elsewhere_is_not_confirmed_by_one_of_its_name() -> None:
    sent, answers = list[ConsoleMessage](), list[OperatorReply]()
    order = with_local_estop(sent.append, {"arm-0": "for /runs/demo/edge/arm-0"}, answers.append, elsewhere={"arm-0"})
    with Driving():
        for count in (1, 2):
            order(E_STOP)
            until(lambda count=count: len(answers) == count and not _pressing(), "the page gets the reply")
    assert latched("arm-0") is not None, "this one is stopped too"
    assert sent == [E_STOP] * 2, "the gateway gets every repeat"
    assert not any(reply.accepted for reply in answers) and "on another computer" in answers[-1].reason


def test_local_e_stop_without_a_driver_is_no_confirmation() -> None:
    answers: list[OperatorReply] = []
    estops = LocalEstops(answers.append, ())
    estops.press(E_STOP)
    until(lambda: answers, "the page gets the reply")
    assert not answers[0].accepted and "no program of this computer drives it" in answers[0].reason
    assert latched("arm-0") is not None and not estops.confirms(E_STOP)


def _pressing() -> int:
    return sum(thread.name == "e-stop arm-0" for thread in threading.enumerate())


def test_stop_and_re_arm_are_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    EstopLatch(robot_files("arm-7", simulated=False).latch_path).prepare()
    assert main(["stop", "arm-7", "--by", "ana", "--reason", "smoke"]) == 0
    assert main(["stop", "arm-8", "--by", "ana"]) == 1
    assert main(["rearm", "arm-7", "--by", "bob"]) == 0
    capsys.readouterr()
    output = [(e.person, e.order, e.robot, e.reason, e.address) for e in read_audit_log(machine_state_path())]
    assert output == [
        ("ana", "e-stop", "arm-7", "smoke", "this computer"),
        ("ana", "e-stop", "arm-8", "", "this computer"),
        ("bob", "re-arm", "arm-7", "", "this computer"),
    ]
