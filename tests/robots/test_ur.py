"""The UR driver with ur_rtde, unmodified, on a simulated controller in another process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from ur_kit import SimulatedController, simulated_controller

from hal.conformance import RobotConformance
from hal.driver import RobotSetupRequest
from hal.errors import EmergencyStopped, HardwareLost, SpecError, StaleObservation
from hal.robot import Observation, Robot, StopLevel
from hal.safety import SafetyKernel
from hal.spec import STATE, Array
from robots import ur_connection
from robots.robotiq import RobotiqConfig
from robots.ur import UrConfig, UrRobot, make_robot_setup, tool_axes
from robots.ur_connection import (
    ControllerClock,
    HoldCommand,
    MoveCommand,
    ServoCommand,
    UrConnection,
    UrConnectionConfig,
)
from user_sys.compose import RobotConfig, build_robot_setup

pytest.importorskip("rtde_control")
pytestmark = pytest.mark.long(45)

DEADLINE_S = 60.0
PATIENT = {"rate_hz": 10.0, "silence_s": 30.0, "stale_after_s": 30.0}  # a busy machine is late by seconds
SERVOJ, SERVOL, SERVO_STOP, STOP_SCRIPT = 11, 24, 16, 255
PROTECTIVE_STOP, SAFEGUARD_STOP = 3, 5


@pytest.fixture(scope="module", autouse=True)
def threads_end() -> Iterator[None]:
    """Wait for ur_rtde's remaining threads: one that returns while Python ends would abort pytest."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("ur "):
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


def eventually(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s, what
        time.sleep(0.02)


def state(robot: UrRobot) -> Array:
    return robot.observe().arrays[STATE]


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
        assert controller.begun(SERVOL) > 0


def test_joint_steps_add_up(controller: SimulatedController) -> None:
    with arm(controller, action="joint_delta") as robot:
        before, step = state(robot)[:6], np.array([0, 0, 0, 0, 0, 0.1], np.float32)
        for _ in range(4):
            assert robot.command(step) == pytest.approx(step)
        eventually(lambda: abs(state(robot)[5] - before[5] - 0.4) < 2e-3, "the joint did not arrive")
        assert np.abs(state(robot)[:5] - before[:5]).max() < 1e-3


def test_blocked_arm_limits_target_lead(controller: SimulatedController) -> None:
    with arm(controller, action="joint_delta") as robot:
        controller.freeze()
        full = np.full(6, 0.1, np.float32)
        applied = [robot.command(full) for _ in range(10)]
        controller.thaw()
        assert sum(applied) == pytest.approx(np.full(6, 0.5), abs=1e-3)
        assert applied[-1] == pytest.approx(np.zeros(6), abs=1e-3)


def test_safe_stop_ends_program_until_next_command(controller: SimulatedController) -> None:
    with arm(controller, action="joint_delta") as robot:
        step = np.array([0, 0, 0, 0, 0, 0.1], np.float32)
        robot.command(step)
        eventually(lambda: controller.begun(SERVOJ) > 0, "the arm did not start")
        robot.stop(StopLevel.HOLD)
        eventually(lambda: controller.begun(SERVO_STOP) == 1, "the arm did not brake")
        assert controller.state["servo"] is None and controller.state["program"]
        robot.command(step)
        robot.stop(StopLevel.SAFE)
        eventually(lambda: not controller.state["program"], "the program did not end")
        held = state(robot)[5]
        robot.command(step)
        eventually(lambda: state(robot)[5] - held > 0.09, "the arm did not move again")
        assert (controller.state["uploads"], controller.state["watchdog_hz"]) == (2, pytest.approx(1 / 29.98))
    assert not controller.state["program"]


def test_watchdog_fires_within_two_periods(
    controller: SimulatedController,
) -> None:
    with arm(controller, rate_hz=4.0, silence_s=None):
        assert controller.state["watchdog_hz"] == pytest.approx(1 / 0.48)


def test_silent_driver_makes_the_arm_hold(controller: SimulatedController) -> None:
    with arm(controller, silence_s=0.2, action="joint_delta") as robot:
        robot.command(np.array([0, 0, 0, 0, 0, 0.1], np.float32))
        eventually(lambda: controller.begun(SERVO_STOP) == 1, "the arm did not brake")
        robot.observe()


def test_arm_does_not_jump_after_silence(
    controller: SimulatedController,
) -> None:
    with arm(controller, silence_s=1.0, action="joint_delta", joint_speed=3.0) as robot:
        robot.command(np.array([0, 0, 0, 0, 0, 0.3], np.float32))
        eventually(lambda: controller.begun(SERVO_STOP) == 1, "the arm did not brake")
        stands = controller.state["q"][5]
        eventually(lambda: abs(state(robot)[5] - stands) < 1e-6, "no reading of the arm")
        assert robot.command(np.zeros(6, np.float32)).tolist() == [0.0] * 6
        assert robot.target is not None and robot.target[5] == pytest.approx(stands, abs=1e-6)


def test_servo_target_survives_while_the_next_command_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    still = StillArm(monkeypatch, silent_s=np.inf)
    connection = still.connection
    connection.servo(np.zeros(6), 0.1, joints=True)
    still.now_s += 0.9
    assert connection.continues_servo()
    still.now_s += 0.9
    assert isinstance(connection.current_command(), ServoCommand)
    still.now_s += 0.2
    assert not connection.continues_servo() and isinstance(connection.current_command(), HoldCommand)


def test_lagging_tool_stays_in_workspace(controller: SimulatedController) -> None:
    with arm(controller) as robot:
        height = float(state(robot)[14])
    with arm(controller, workspace_low=(-2, -2, height - 0.03), workspace_high=(2, 2, 2)) as robot:
        kernel, observation = SafetyKernel(robot.spec), robot.observe()
        controller.freeze()
        verdicts = [kernel.filter(np.array([0, 0, -0.02], np.float32), observation) for _ in range(6)]
        applied = [robot.command(verdict.applied) for verdict in verdicts if verdict.applied is not None]
        controller.thaw()
        assert len(applied) == 6 and sum(applied)[2] == pytest.approx(-0.03, abs=1e-3)


@pytest.mark.parametrize(
    ("mode", "words"), [(PROTECTIVE_STOP, "a protective stop"), (SAFEGUARD_STOP, "a safeguard stop")]
)
def test_controller_stop_is_reported_and_not_unlocked(controller: SimulatedController, mode: int, words: str) -> None:
    robot = arm(controller)
    with robot:
        robot.command(np.array([0.01, 0, 0], np.float32))
        controller.set("safety_mode", mode)
        with pytest.raises(HardwareLost, match=f"{words}; a person must clear it"):
            eventually(lambda: robot.observe() is None, "no stop was reported")
        with pytest.raises(HardwareLost, match=words):
            robot.command(np.zeros(3, np.float32))
    with pytest.raises(HardwareLost, match=words):
        robot.connect()
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


def test_frozen_controller_makes_readings_stale(
    mortal: SimulatedController,
) -> None:
    robot = arm(mortal, rate_hz=20.0, stale_after_s=None, silence_s=5.0)
    with robot:
        robot.command(np.array([0.01, 0, 0], np.float32))
        mortal.freeze()
        with pytest.raises((StaleObservation, HardwareLost)):
            eventually(lambda: robot.observe() is None, "nothing was reported")
    with pytest.raises(HardwareLost, match="timed out"):
        robot.connect()
    mortal.thaw()


def test_reset_moves_arm_to_configured_home(controller: SimulatedController) -> None:
    home = (0.2, -1.4, 1.4, -1.5, -1.5, 0.1)
    options = {"host": controller.host, "home": list(home), **PATIENT}
    setup = build_robot_setup(RobotConfig(name="ur-0", driver="ur", task="tidy up", options=options))
    with setup.robot as robot:
        setup.task.reset(robot, np.random.default_rng(0))
        assert np.abs(robot.observe().arrays[STATE][:6] - home).max() < 3e-3
        robot.stop(StopLevel.SAFE)
        setup.task.reset(robot, np.random.default_rng(0))
    assert setup.task.instruction == "tidy up"


def test_stop_ends_homing(controller: SimulatedController) -> None:
    with arm(controller, home=(0.2, -1.4, 1.4, -1.5, -1.5, 0.1)) as robot:
        begun = state(robot)[:6]

        def press() -> None:
            robot.stop(StopLevel.SAFE)
            raise EmergencyStopped("pressed by ada")

        robot.check_stop = press
        with pytest.raises(EmergencyStopped, match="pressed by ada"):
            robot.go_home()
        assert np.abs(state(robot)[:6] - begun).max() < 1e-3


class StillArm:
    """A connection without a controller, with its own clock. The arm does not move; readings end at `silent_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, silent_s: float) -> None:
        self.now_s, numbers = 100.0, [0.0] * 6
        receive = SimpleNamespace(
            getTimestamp=lambda: min(self.now_s, silent_s),
            getActualQ=lambda: numbers,
            getActualQd=lambda: numbers,
            getActualTCPPose=lambda: numbers,
            getActualTCPForce=lambda: numbers,
            isConnected=lambda: True,
            getSafetyMode=lambda: 1,
            getRobotMode=lambda: 7,
        )
        self.connection = UrConnection(UrConnectionConfig("nowhere", silence_s=1.0), receive)
        monkeypatch.setattr(ur_connection, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_homing_timeout_needs_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    still = StillArm(monkeypatch, silent_s=np.inf)
    with pytest.raises(
        EmergencyStopped, match=r"did not get home within 60 s: its joints are at \[0.*a person must look"
    ):
        still.connection.move_joints(np.ones(6), 60.0, lambda: None)
    assert still.now_s == pytest.approx(160.0, abs=0.1)
    assert isinstance(still.connection.current_command(), HoldCommand)


def test_missing_readings_hold_during_homing(monkeypatch: pytest.MonkeyPatch) -> None:
    still = StillArm(monkeypatch, silent_s=101.0)
    commands = []

    def check_stop() -> None:
        commands.append((still.now_s, type(still.connection.current_command())))
        if still.now_s > 103.0:
            raise EmergencyStopped("pressed by ada")

    with pytest.raises(EmergencyStopped, match="pressed by ada"):
        still.connection.move_joints(np.ones(6), 60.0, check_stop)
    moved = [when_s for when_s, command in commands if command is MoveCommand]
    assert (moved[0], moved[-1]) == (pytest.approx(100.0, abs=0.02), pytest.approx(102.0, abs=0.02))
    assert commands[-1][1] is HoldCommand


def test_gripper_follows_width_and_keeps_grip(controller: SimulatedController) -> None:
    with arm(controller, gripper=RobotiqConfig()) as robot:
        assert robot.command(np.array([0, 0, 0, 0.02], np.float32))[-1] == pytest.approx(0.02, abs=3e-4)
        eventually(lambda: abs(state(robot)[-1] - 0.02) < 1e-3, "the gripper did not close")
        robot.stop(StopLevel.SAFE)
    assert controller.state["gripper_target"] == round(255 * (1 - 0.02 / 0.085))


def test_inactive_gripper_is_not_activated(controller: SimulatedController) -> None:
    controller.set("gripper_active", 0)
    with pytest.raises(HardwareLost, match="not activated; a person must activate it"):
        arm(controller, gripper=RobotiqConfig()).connect()


def test_lost_gripper_activation_is_reported(controller: SimulatedController) -> None:
    with arm(controller, gripper=RobotiqConfig()) as robot:
        robot.command(np.array([0, 0, 0, 0.02], np.float32))
        controller.set("gripper_active", 0)
        with pytest.raises(HardwareLost, match="no longer activated; a person must activate it at the pendant"):
            eventually(lambda: robot.observe() is None, "nothing was reported")


def test_local_control_or_power_off_is_refused(controller: SimulatedController) -> None:
    controller.set("robot_mode", 3)
    with pytest.raises(HardwareLost, match="powered off; a person must start it"):
        arm(controller).connect()
    controller.set("robot_mode", 7)
    controller.set("remote", 0)
    with pytest.raises(HardwareLost, match="remote control"):
        arm(controller).connect()
    assert controller.state["uploads"] == 0


def test_safety_kernel_stops_motion_against_measured_force(
    controller: SimulatedController,
) -> None:
    controller.set("force", [0.0, 0.0, 80.0, 0.0, 0.0, 0.0])
    with arm(controller) as robot:
        kernel = SafetyKernel(robot.spec)
        observation = robot.observe()
        assert observation.arrays[STATE][21:24].tolist() == [0, 0, 80]
        down, up = (kernel.filter(np.array([0, 0, dz], np.float32), observation) for dz in (-0.01, 0.01))
        assert down.applied is not None and down.applied[2] == 0
        assert up.applied is not None and up.applied[2] > 0


def test_invalid_options_are_explained() -> None:
    with pytest.raises(SpecError, match="did you mean 'host'"):
        make_robot_setup(RobotSetupRequest("ur-0", "free", {"hots": "10.0.0.2"}))
    with pytest.raises(SpecError, match="home has 3 joint angles; it needs 6"):
        make_robot_setup(RobotSetupRequest("ur-0", "free", {"host": "10.0.0.2", "home": [0, 0, 0]}))
    elbow = [0.0, 0.0, 2.0, 0.0, 0.0, 0.0]
    for wrong, message in (
        ({"silence_s": 0.0}, "silence_s"),
        ({"gain": 5000.0}, "gain of 100 to 2000"),
        ({"tool_speed": float("inf")}, "above 0"),
        ({"home": elbow, "joint_high": [1.5] * 6}, "home: elbow is 2; it must be between -6.28319 and 1.5"),
        ({"home": [0.0, float("nan"), 0.0, 0.0, 0.0, 0.0]}, "home: shoulder_lift is nan"),
        ({"gripper": {"stroke_m": 0.0}}, "stroke_m is 0; it must be above 0"),
        ({"gripper": {"force": 300}}, "0 to 255; they are 128 and 300"),
    ):
        with pytest.raises(SpecError, match=message):
            make_robot_setup(RobotSetupRequest("ur-0", "free", {"host": "10.0.0.2", **wrong}))


def test_setup_has_configured_cameras() -> None:
    cameras = {"wrist": {"kind": "opencv", "device": "/dev/video4", "width": 320, "height": 240}}
    setup = make_robot_setup(RobotSetupRequest("ur-0", "free", {"host": "10.0.0.2", "cameras": cameras}))
    assert [each.spec for each in setup.cameras] == list(setup.robot.spec.cameras)
    with pytest.raises(SpecError, match=r"cameras\.wrist: unknown option 'with'; did you mean 'width'"):
        make_robot_setup(RobotSetupRequest("ur-0", "free", {"host": "10.0.0.2", "cameras": {"wrist": {"with": 1}}}))


def test_tool_axes_are_continuous_near_half_a_turn() -> None:
    down = tool_axes(np.array([np.pi - 1e-6, 0.0, 0.0]))
    assert down == pytest.approx([1, 0, 0, 0, -1, 0], abs=1e-5)
    assert tool_axes(np.array([-np.pi + 1e-6, 0.0, 0.0])) == pytest.approx(down, abs=1e-5)
    assert tool_axes(np.zeros(3)).tolist() == [1, 0, 0, 0, 1, 0]


def test_capture_times_follow_controller_clock() -> None:
    clock = ControllerClock()
    assert clock.local_s(0.0, 100.0) == 100.0
    assert clock.local_s(1.0, 101.5) == 101.0, "half a second late"
    assert clock.local_s(1.0, 103.0) == 101.0, "the same reading, again"
    for second in range(2, 60):
        newest = clock.local_s(float(second), 100.0 + second * 1.01)
    assert 159.0 < newest <= 100 + 59 * 1.01
