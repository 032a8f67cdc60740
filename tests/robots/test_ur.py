"""The UR driver with ur_rtde, unmodified, on a simulated controller in another process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from peer_kit import eventually
from ur_kit import SimulatedController, simulated_controller

from hal.conformance import RobotConformance
from hal.driver import RobotSetupRequest
from hal.errors import EmergencyStopped, HardwareLost, SpecError, StaleObservation, StoppedAtRobot
from hal.robot import Observation, Robot, StopLevel
from hal.safety import SafetyKernel
from hal.spec import STATE, Array
from robots import homing, ur_connection
from robots.robotiq import RobotiqConfig
from robots.ur import UrRobot, make_robot_setup, tool_axes
from robots.ur_connection import Rest, ServoCommand, UrConfig, UrConnection
from user_sys.compose import RobotConfig, build_robot_setup

pytest.importorskip("rtde_control")
pytestmark = pytest.mark.long(45)

PATIENT = {"rate_hz": 10.0, "silence_s": 30.0, "stale_after_s": 30.0}  # a busy machine is late by seconds
SERVOJ, SERVO_STOP = 11, 16
PROTECTIVE_STOP, EMERGENCY_STOP = 3, 7
HOME = (0.2, -1.4, 1.4, -1.5, -1.5, 0.1)


@pytest.fixture(scope="module", autouse=True)
def threads_end() -> Iterator[None]:
    """Wait for ur_rtde's remaining threads: one that returns while Python ends would abort pytest."""
    yield
    await_threads("ur ")


def await_threads(prefix: str) -> None:
    for thread in threading.enumerate():
        if thread.name.startswith(prefix):
            thread.join(120)
            assert not thread.is_alive(), f"{thread.name}: ur_rtde does not return"


@pytest.fixture(scope="module")
def shared() -> Iterator[SimulatedController]:
    with simulated_controller() as simulated:
        yield simulated


@pytest.fixture
def controller(shared: SimulatedController) -> SimulatedController:
    """A controller with a reset arm."""
    shared.reset()
    return shared


@pytest.fixture
def mortal() -> Iterator[SimulatedController]:
    """A controller that only this test uses, so that it may be killed."""
    with simulated_controller() as simulated:
        yield simulated


def arm(controller: SimulatedController, **options: object) -> UrRobot:
    return UrRobot(UrConfig(host=controller.host, **{**PATIENT, **options}))  # type: ignore[arg-type]


def state(robot: UrRobot) -> Array:
    return robot.observe().arrays[STATE]


def last_joint(step: float) -> Array:
    return np.array([0, 0, 0, 0, 0, step], np.float32)


class TestArmByToolSteps(RobotConformance):
    @pytest.fixture(autouse=True)
    def _controller(self, controller: SimulatedController) -> None:
        self.controller = controller

    def make_robot(self) -> Robot:
        return arm(self.controller, gripper=RobotiqConfig())

    def has_not_moved(self, before: Observation, after: Observation) -> bool:
        return bool(np.abs(before.arrays[STATE] - after.arrays[STATE]).max() < 1e-3)


def test_tool_steps_are_straight_and_keep_rotation(controller: SimulatedController) -> None:
    with arm(controller) as robot:
        before = state(robot)
        applied = sum(robot.command(np.array([0.01, -0.005, 0.02], np.float32)) for _ in range(3))
        goal = before[12:15] + applied
        eventually(lambda: bool(np.abs(state(robot)[12:15] - goal).max() < 1e-3), "the tool did not get there")
        assert np.abs(state(robot)[15:21] - before[15:21]).max() < 1e-3


def test_joint_steps_add_up_and_blocked_arm_limits_target_lead(controller: SimulatedController) -> None:
    with arm(controller, action="joint_delta") as robot:
        before = state(robot)[:6]
        for _ in range(4):
            assert robot.command(last_joint(0.1)) == pytest.approx(last_joint(0.1))
        eventually(lambda: abs(state(robot)[5] - before[5] - 0.4) < 2e-3, "the joint did not arrive")
        assert np.abs(state(robot)[:5] - before[:5]).max() < 1e-3
        controller.freeze()
        applied = [robot.command(np.full(6, 0.1, np.float32)) for _ in range(10)]
        controller.thaw()
        assert sum(applied)[:5] == pytest.approx(np.full(5, 0.5), abs=3e-3)
        assert applied[-1] == pytest.approx(np.zeros(6), abs=1e-3)


def test_safe_stop_ends_program_until_next_command(controller: SimulatedController) -> None:
    with arm(controller, action="joint_delta") as robot:
        robot.command(last_joint(0.1))
        eventually(lambda: controller.begun(SERVOJ) > 0, "the arm did not start")
        robot.stop(StopLevel.HOLD)
        eventually(lambda: controller.begun(SERVO_STOP) == 1, "the arm did not brake")
        assert controller.state["servo"] is None and controller.state["program"]
        robot.command(last_joint(0.1))
        robot.stop(StopLevel.SAFE)
        eventually(lambda: not controller.state["program"], "the program did not end")
        held = state(robot)[5]
        robot.command(last_joint(0.1))
        eventually(lambda: state(robot)[5] - held > 0.09, "the arm did not move again")
        assert (controller.state["uploads"], controller.state["watchdog_hz"]) == (2, pytest.approx(1 / 29.98))
    assert not controller.state["program"]


def test_e_stop_while_the_program_is_uploaded_again_moves_nothing(controller: SimulatedController) -> None:
    with arm(controller, action="joint_delta", home=HOME) as robot:
        robot.stop(StopLevel.SAFE)
        eventually(lambda: not controller.state["program"], "the program did not end")
        held, begun = state(robot)[:6], controller.begun(SERVOJ)

        def press() -> None:
            robot.stop(StopLevel.SAFE)
            raise EmergencyStopped("pressed by ada")

        robot.check_stop = press
        for motion in (lambda: robot.command(last_joint(0.1)), lambda: robot.move_joints(np.array(HOME))):
            with pytest.raises(EmergencyStopped, match="ada"):
                motion()
        eventually(lambda: not controller.state["program"], "the program did not end again")
        assert controller.begun(SERVOJ) == begun and np.abs(state(robot)[:6] - held).max() < 1e-3


def test_watchdog_fires_within_two_periods(controller: SimulatedController) -> None:
    with arm(controller, rate_hz=4.0, silence_s=None):
        assert controller.state["watchdog_hz"] == pytest.approx(1 / 0.48)


def test_arm_holds_and_does_not_jump_after_silence(controller: SimulatedController) -> None:
    with arm(controller, silence_s=1.0, action="joint_delta", joint_speed=3.0) as robot:
        robot.command(last_joint(0.3))
        eventually(lambda: controller.begun(SERVO_STOP) == 1, "the arm did not brake")
        stands = controller.state["q"][5]
        eventually(lambda: abs(state(robot)[5] - stands) < 1e-6, "no reading of the arm")
        assert robot.command(np.zeros(6, np.float32)).tolist() == [0.0] * 6
        eventually(lambda: controller.state["servo"] is not None, "the arm got no target")
        assert controller.state["servo"][5] == pytest.approx(stands, abs=1e-6)


def test_servo_target_survives_while_the_next_command_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, numbers = [100.0], [0.0] * 6
    names = ("getActualQ", "getActualQd", "getActualTCPPose", "getActualTCPForce")
    receive = SimpleNamespace(
        **{name: lambda: numbers for name in names},
        getTimestamp=lambda: now_s[0],
        isConnected=lambda: True,
        getSafetyMode=lambda: 1,
        getRobotMode=lambda: 7,
    )
    connection = UrConnection(UrConfig("nowhere", silence_s=1.0), receive)
    clock = SimpleNamespace(monotonic=lambda: now_s[0], monotonic_ns=lambda: round(now_s[0] * 1e9))
    monkeypatch.setattr(ur_connection, "time", clock)
    connection.servo(np.zeros(6), 0.1, joints=True)
    now_s[0] += 0.9
    assert connection.continues_servo()
    now_s[0] += 0.9
    assert isinstance(connection.current_command(), ServoCommand)
    now_s[0] += 0.2
    assert not connection.continues_servo() and connection.current_command() is Rest.HOLD


def test_stop_ends_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, (controller, dashboard) = threading.Event(), socket.socketpair()

    def receive_late(*_: object) -> None:
        answers.wait(30.0)
        raise ConnectionError("too late")

    def press() -> None:
        raise EmergencyStopped("pressed by ada")

    library = SimpleNamespace(RTDEReceiveInterface=receive_late)
    monkeypatch.setattr(ur_connection, "import_library", lambda *_: library)
    monkeypatch.setattr(ur_connection, "socket", SimpleNamespace(create_connection=lambda *_: dashboard))
    monkeypatch.setattr(ur_connection, "CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(ur_connection, "OPEN_TIMEOUT_S", 3.0)
    robot = UrRobot(UrConfig("127.0.0.9"))
    robot.check_stop = press
    with controller, pytest.raises(EmergencyStopped):
        controller.send(b"Connected: Universal Robots Dashboard Server\n")
        robot.connect()
    with pytest.raises(HardwareLost, match="is not connected"):
        robot.observe()
    answers.set()


@pytest.mark.parametrize(
    ("mode", "words", "kind"),
    [
        (PROTECTIVE_STOP, "a protective stop", HardwareLost),
        (EMERGENCY_STOP, "the robot's emergency stop", StoppedAtRobot),
    ],
)
def test_controller_stop_is_reported_and_not_unlocked(
    controller: SimulatedController, mode: int, words: str, kind: type[HardwareLost]
) -> None:
    robot = arm(controller)
    with robot:
        robot.command(np.array([0.01, 0, 0], np.float32))
        controller.set("safety_mode", mode)
        with pytest.raises(HardwareLost, match=f"{words}; a person must clear it") as caught:
            eventually(lambda: robot.observe() is None, "no stop was reported")
        for call in (lambda: robot.command(np.zeros(3, np.float32)), robot.observe):
            with pytest.raises(HardwareLost, match=words) as again:
                call()
            assert type(caught.value) is type(again.value) is kind
    with pytest.raises(HardwareLost, match=words) as refused:
        robot.connect()
    assert type(refused.value) is kind
    assert (controller.state["safety_mode"], controller.state["uploads"]) == (mode, 1)
    controller.set("safety_mode", 1)
    with robot:
        robot.command(np.zeros(3, np.float32))


def test_program_ended_at_pendant_loses_robot(controller: SimulatedController) -> None:
    with arm(controller) as robot:
        controller.set("program", False)
        with pytest.raises(HardwareLost, match="the controller ended the program"):
            eventually(lambda: robot.observe() is None, "no end was reported")


@pytest.mark.parametrize("fate", ["kill", pytest.param("unplug", marks=pytest.mark.slow)])
def test_disconnected_controller_is_lost_and_reconnects(mortal: SimulatedController, fate: str) -> None:
    robot = arm(mortal)
    with robot:
        robot.command(np.array([0.01, 0, 0], np.float32))
        getattr(mortal, fate)()
        with pytest.raises(HardwareLost, match=mortal.host):
            eventually(lambda: robot.observe() is None, "no loss was reported")
    with pytest.raises(HardwareLost, match="no answer on port 29999"):
        robot.connect()
    mortal.restart()
    with robot:
        robot.command(np.zeros(3, np.float32))


def test_frozen_controller_makes_readings_stale(mortal: SimulatedController) -> None:
    """In a process of its own: on a busy machine ur_rtde waits for this controller's first state without an end."""
    process = multiprocessing.get_context("spawn").Process(
        target=drive_until_frozen, args=(mortal.host, mortal.process.pid)
    )
    process.start()
    process.join(300)
    process.kill()
    process.join()
    assert process.exitcode == 0


def drive_until_frozen(host: str, controller_pid: int) -> None:
    """Freezes the controller under a driven arm; ends this process with status 0 if the driver reports it."""
    try:
        robot = UrRobot(UrConfig(host=host, rate_hz=20.0, stale_after_s=None, silence_s=5.0))
        with robot:
            robot.command(np.array([0.01, 0, 0], np.float32))
            os.kill(controller_pid, signal.SIGSTOP)
            with pytest.raises((StaleObservation, HardwareLost)):
                eventually(lambda: robot.observe() is None, "nothing was reported")
        with pytest.raises(HardwareLost, match="timed out"):
            robot.connect()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def test_reset_moves_arm_to_configured_home(controller: SimulatedController) -> None:
    options = {"host": controller.host, "home": list(HOME), **PATIENT}
    setup = build_robot_setup(RobotConfig(name="ur-0", driver="ur", task="tidy", options=options))
    with setup.robot as robot:
        robot.stop(StopLevel.SAFE)
        setup.task.reset(robot, np.random.default_rng(0))
        assert np.abs(robot.observe().arrays[STATE][:6] - HOME).max() < 5e-3
        robot.command(np.array([0.01, 0, 0], np.float32))
    assert setup.task.instruction == "tidy"


@pytest.mark.parametrize("action", ["tool_delta", "joint_delta"])
def test_home_out_of_the_workspace_is_refused_at_home(controller: SimulatedController, action: str) -> None:
    place = {"workspace_low": (0.3, -0.2, 0.1), "workspace_high": (0.6, 0.2, 0.5)}
    with arm(controller, action=action, home=controller.state["q"], **place) as robot:
        begun = state(robot)[:6]
        with pytest.raises(EmergencyStopped, match=r"at home the tool is at \[-0.492, -0.133, 0.488\] m, outside the"):
            robot.go_home()
        assert np.abs(state(robot)[:6] - begun).max() < 1e-3


def test_stop_ends_homing_and_force_prevents_it(
    controller: SimulatedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    with arm(controller, home=HOME) as robot:
        begun = state(robot)[:6]

        def press() -> None:
            robot.stop(StopLevel.SAFE)
            raise EmergencyStopped("pressed by ada")

        robot.check_stop = press
        with pytest.raises(EmergencyStopped, match="pressed by ada"):
            robot.go_home()
        assert np.abs(state(robot)[:6] - begun).max() < 0.05
        robot.check_stop = lambda: None
        begun = state(robot)[:6]
        controller.set("force", [0.0, 0.0, 80.0, 0.0, 0.0, 0.0])
        eventually(lambda: state(robot)[23] == 80, "no force was reported")
        monkeypatch.setattr(homing, "HOMING_TIMEOUT_S", 0.3)
        with pytest.raises(EmergencyStopped, match="did not get home within .*under .* N; a person must look"):
            robot.go_home()
        assert np.abs(state(robot)[:6] - begun).max() < 1e-3


def test_gripper_follows_width_keeps_grip_and_reports_lost_activation(controller: SimulatedController) -> None:
    with arm(controller, gripper=RobotiqConfig()) as robot:
        assert robot.command(np.array([0, 0, 0, 0.02], np.float32))[-1] == pytest.approx(0.02, abs=3e-4)
        eventually(lambda: abs(state(robot)[-1] - 0.02) < 1e-3, "the gripper did not close")
        robot.stop(StopLevel.SAFE)
        assert controller.state["gripper_target"] == round(255 * (1 - 0.02 / 0.085))
        controller.set("gripper_active", 0)
        with pytest.raises(HardwareLost, match="no longer activated; a person must activate it at the pendant"):
            eventually(lambda: robot.observe() is None, "nothing was reported")
    with pytest.raises(HardwareLost, match="not activated; a person must activate it"):
        arm(controller, gripper=RobotiqConfig()).connect()


def test_local_control_or_power_off_is_refused(controller: SimulatedController) -> None:
    controller.set("robot_mode", 3)
    with pytest.raises(HardwareLost, match="powered off; a person must start it"):
        arm(controller).connect()
    controller.set("robot_mode", 7)
    controller.set("remote", 0)
    with pytest.raises(HardwareLost, match="remote control"):
        arm(controller).connect()
    assert controller.state["uploads"] == 0


def test_safety_kernel_stops_motion_against_measured_force(controller: SimulatedController) -> None:
    controller.set("force", [0.0, 0.0, 80.0, 0.0, 0.0, 0.0])
    with arm(controller) as robot:
        kernel, observation = SafetyKernel(robot.spec), robot.observe()
        assert observation.arrays[STATE][21:24].tolist() == [0, 0, 80]
        down, up = (kernel.filter(np.array([0, 0, dz], np.float32), observation) for dz in (-0.01, 0.01))
        assert down.applied is not None and down.applied[2] == 0
        assert up.applied is not None and up.applied[2] > 0


def test_target_of_a_blocked_tool_returns_to_it_under_too_much_force(controller: SimulatedController) -> None:
    with arm(controller) as robot:
        controller.set("lag_s", 1e9)
        x, _, z = controller.state["tool"][:3]

        def target_is(place: tuple[float, float]) -> bool:
            servo = controller.state["servo"]
            return servo is not None and (servo[0], servo[2]) == pytest.approx(place, abs=1e-6)

        for _ in range(3):
            robot.command(np.array([0.01, 0, -0.01], np.float32))
        eventually(lambda: target_is((x + 0.03, z - 0.03)), "the target does not lead")
        controller.set("force", [0.0, 0.0, 80.0, 0.0, 0.0, 0.0])
        eventually(lambda: state(robot)[23] == 80, "no force was reported")
        assert robot.command(np.zeros(3, np.float32)).tolist() == [0.0] * 3
        eventually(lambda: target_is((x + 0.03, z)), "the tool presses on, or the other axes lose their target")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hots": "10.0.0.2"}, "hots"),
        ({"home": [0, 0, 0]}, "home has 3 positions; ur5e needs one for each of its joints"),
        ({"silence_s": 0.0}, "silence_s"),
        ({"gain": 5000.0}, "gain"),
        ({"tool_speed": float("inf")}, "tool_speed"),
        (
            {"home": [0.0, 0.0, 2.0, 0.0, 0.0, 0.0], "joint_high": [1.5] * 6},
            "home: elbow is 2; it must be between -6.28319 and 1.5",
        ),
        ({"gripper": {"stroke_m": 0.0}}, "stroke_m"),
        ({"gripper": {"force": 300}}, "force"),
        ({"cameras": {"wrist": {"device": 0, "with": 1}}}, "width"),
    ],
)
def test_invalid_options_are_explained(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_robot_setup(RobotSetupRequest("ur-0", "free", {"host": "10.0.0.2", **wrong}))


def test_tool_axes_are_continuous_near_half_a_turn() -> None:
    down = tool_axes(np.array([np.pi - 1e-6, 0.0, 0.0]))
    assert down == pytest.approx([1, 0, 0, 0, -1, 0], abs=1e-5)
    assert tool_axes(np.array([-np.pi + 1e-6, 0.0, 0.0])) == pytest.approx(down, abs=1e-5)
    assert tool_axes(np.zeros(3)).tolist() == [1, 0, 0, 0, 1, 0]
