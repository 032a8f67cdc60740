"""The environment passes only valid actions within limits, and an e-stop holds until a person re-arms."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from edge_kit import RIGHT, STILL, RecordingRobot
from wait_kit import Clock, ClockNs

from hal.camera import CameraFrame
from hal.errors import EmergencyStopped, HardwareLost, SpecError, StaleObservation
from hal.estop import EmergencyStop, EstopLatch
from hal.robot import Observation, Robot, StopLevel
from hal.safety import SafetyKernel, SafetyReason
from hal.task import TaskOutcome
from hal.teleoperator import TeleopInput
from robots.fake import FakeCamera, FakeRobotConfig, FakeTable, FakeTask, FakeTeleoperator, FaultPlan
from user_sys.edge.driver_server import connect_unless_stopped
from user_sys.edge.environment import PeriodGrid, RobotEnvironment


@pytest.fixture
def robot() -> RecordingRobot:
    return RecordingRobot()


@pytest.fixture
def driver(robot: RecordingRobot) -> Iterator[RobotEnvironment]:
    made = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec))
    made.connect()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (np.array([np.nan, 0, 0, 0], np.float32), SafetyReason.NOT_FINITE),
        (np.zeros(3, np.float32), SafetyReason.SHAPE),
    ],
)
def test_invalid_action_never_reaches_the_robot(
    driver: RobotEnvironment, robot: RecordingRobot, action: np.ndarray, reason: SafetyReason
) -> None:
    before = robot.position
    time_step = driver.step(action)
    assert robot.commands == [] and robot.stops == [StopLevel.HOLD]
    assert time_step.applied is None and time_step.safety_reasons == reason
    np.testing.assert_array_equal(robot.position, before)
    assert driver.step(STILL).safety_reasons == 0


def test_e_stop_stops_the_robot_before_it_writes_the_latch(tmp_path: Path) -> None:
    latch = tmp_path / "e-stop.json"
    latched: list[bool] = []

    class Watching(RecordingRobot):
        def stop(self, level: StopLevel) -> None:
            latched.append(EstopLatch(latch).read() is not None)
            super().stop(level)

    robot = Watching()
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec, latch_path=latch))
    driver.connect()
    driver.emergency_stop("ada")
    assert latched[0] is False and latch.exists() and set(robot.stops) == {StopLevel.SAFE}
    driver.close()


def test_e_stop_that_could_not_be_written_is_written_while_the_robot_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(latch: EstopLatch, stop: EmergencyStop) -> EmergencyStop:
        raise OSError("input/output error")

    clock, latch = ClockNs(), EstopLatch(tmp_path / "e-stop.json")
    robot = RecordingRobot(clock=clock)
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec, clock, latch_path=latch.path))
    driver.connect()
    with monkeypatch.context() as patch:
        patch.setattr(EstopLatch, "press", fail)
        driver.emergency_stop("ada")
    clock.now_s += 1.0
    assert latch.read() is None and driver.hold().stopped and latch.read() is not None
    driver.close()


def test_e_stop_of_a_lost_robot_is_latched(tmp_path: Path) -> None:
    robot = RecordingRobot(FakeRobotConfig(faults=FaultPlan(drop_out_at=1)))
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec, latch_path=tmp_path / "e-stop.json"))
    driver.connect()
    with pytest.raises(HardwareLost, match="dropped out"):
        driver.step(RIGHT)
    with pytest.raises(HardwareLost, match="dropped out"):
        driver.emergency_stop("ada")
    assert driver.kernel.latched_estop is not None and (tmp_path / "e-stop.json").exists()
    driver.close()


def test_delayed_driver_observes_again_before_an_action() -> None:
    now_ns = [0]
    robot = RecordingRobot(clock=lambda: now_ns[0])
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec, clock=lambda: now_ns[0]))
    driver.connect()
    now_ns[0] += 10_000_000_000  # on a busy machine, or after a slow disk
    time_step = driver.step(RIGHT)
    assert time_step.safety_reasons == 0 and robot.stops == [] and len(robot.commands) == 1
    driver.close()


class ButtonRobot(RecordingRobot):
    """A robot with its own stop button."""

    pressed = False

    def connect(self) -> None:
        if self.pressed:
            raise EmergencyStopped("the button at the door is pressed")
        super().connect()

    def command(self, action: np.ndarray) -> np.ndarray:
        if self.pressed:
            raise EmergencyStopped("the button at the door is pressed")
        return super().command(action)


def test_robots_own_stop_button_latches_until_release_and_re_arm() -> None:
    robot = ButtonRobot()
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec))
    driver.connect()
    robot.pressed = True
    time_step = driver.step(RIGHT)
    assert (time_step.applied, time_step.safety_reasons, time_step.stopped) == (None, SafetyReason.ESTOP, True)
    assert robot.stops == [StopLevel.SAFE]
    assert driver.kernel.latched_estop is not None and "door" in driver.kernel.latched_estop.why
    assert time_step.stopped_why == driver.kernel.latched_estop.why
    driver.kernel.rearm("Ada")
    assert driver.step(RIGHT).stopped, "it is pressed still"
    robot.pressed = False
    assert driver.step(RIGHT).applied is None, "released, and latched"
    driver.kernel.rearm("Ada")
    assert driver.step(RIGHT).applied is not None
    driver.close()


class HeldTask(FakeTask):
    """Its reset leaves the robot, at rest, where a person has put it."""

    place = (0.1, 0.0, 0.0)

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        assert isinstance(robot, RecordingRobot)
        robot.set_state(np.array(self.place), np.zeros(3))


@pytest.mark.parametrize(
    ("changes", "limits", "why"),
    [
        ({"tool_delta": ()}, {"workspace_high": (0.05, 1.0, 1.0)}, "workspace: the tool is at [0.1, 0.0, 0.0] m"),
        ({"tool_delta": ()}, {"tool_force_max": 5.0}, "force: the tool is at"),
        ({}, {"joint_position": (0,), "joint_low": (-0.1,), "joint_high": (0.1,)}, "joint_position: x is at 0.1000"),
    ],
    ids=["out of the workspace", "pressing", "at the end of a joint's range"],
)
def test_robot_that_no_action_may_move_stops_at_the_first_step_after_a_reset(
    changes: dict[str, object], limits: dict[str, object], why: str
) -> None:
    robot, task = RecordingRobot(FakeRobotConfig(table=FakeTable(height_m=0.02))), HeldTask()
    limited = msgspec.structs.replace(robot.spec.limits, **limits)
    robot.spec = msgspec.structs.replace(robot.spec, limits=limited, **changes)
    driver = RobotEnvironment(robot, task, SafetyKernel(robot.spec))
    driver.connect()
    for _ in range(2):
        assert not driver.reset(0).stopped and not driver.hold().stopped, "a person has time to bring it back"
        time_step = driver.step(RIGHT)
        assert time_step.stopped and why in time_step.stopped_why and robot.stops[-1] is StopLevel.SAFE
        assert SafetyReason(time_step.safety_reasons) is SafetyReason.ESTOP
        driver.kernel.rearm("ada")
    driver.reset(0)
    robot.set_state(np.array([0.0, 0.0, 0.02]), np.zeros(3))
    driver.hold()
    assert driver.step(STILL).applied is not None
    robot.set_state(np.array(task.place), np.zeros(3))
    driver.hold()
    time_step = driver.step(RIGHT)
    assert time_step.applied is None and not time_step.stopped, "in the episode it has failed"
    driver.reset(0)
    time_step = driver.step(STILL)
    assert time_step.applied is None and not time_step.stopped, "it ends an episode before anybody moves the robot"
    driver.close()


def test_stop_button_pressed_before_the_connection_latches() -> None:
    robot = ButtonRobot()
    robot.pressed = True
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec))
    with pytest.raises(HardwareLost, match="the button at the door is pressed: release it, then re-arm at the console"):
        driver.connect()
    assert robot.commands == []
    robot.pressed = False
    driver.connect()
    assert driver.step(RIGHT).stopped and robot.commands == []
    driver.kernel.rearm("Ada")
    assert driver.step(RIGHT).applied is not None
    driver.close()


class AwaitedCamera(FakeCamera):
    """A camera without frames; `stop` is set during its connection."""

    stop: threading.Event

    def connect(self) -> None:
        self.stop.set()
        self.check_stop()
        raise HardwareLost("no frame came within 20 s")


def test_stopping_driver_does_not_wait_for_its_cameras() -> None:
    robot = RecordingRobot(FakeRobotConfig(cameras=("front",), image_size=16))
    camera = AwaitedCamera(robot, robot.spec.cameras[0])
    camera.stop = threading.Event()
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec), [camera])
    assert not connect_unless_stopped(driver, camera.stop)
    driver.close()
    with pytest.raises(HardwareLost, match="not connected"):
        robot.observe()


def test_frozen_observation_stops_the_robot_until_it_recovers() -> None:
    now_ns = [0]
    robot = RecordingRobot(FakeRobotConfig(faults=FaultPlan(stale_at=2)), clock=lambda: now_ns[0])
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec, clock=lambda: now_ns[0]))
    driver.connect()
    driver.step(RIGHT)
    driver.step(RIGHT)
    now_ns[0] += 1_000_000_000
    driver.run_watchdog()
    with pytest.raises(StaleObservation):
        driver.step(RIGHT)
    assert len(robot.commands) == 2 and driver.kernel.reason_counts["stale"] == 1
    driver.close()


def test_invalid_observation_names_robot_and_element() -> None:
    robot = RecordingRobot(FakeRobotConfig(faults=FaultPlan(nan_at=1)))
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec), name="arm-7")
    driver.connect()
    problem = "^robot arm-7: observation.state: x is nan, which is not finite$"
    with pytest.raises(SpecError, match=problem):
        driver.step(RIGHT)
    driver.run_watchdog()
    with pytest.raises(SpecError, match=problem):
        driver.step(RIGHT)
    assert len(robot.commands) == 1
    driver.close()


class Priceless(FakeTask):
    def evaluate(self, observation: Observation) -> TaskOutcome:
        return TaskOutcome(reward=float("inf"), terminated=True)


def test_invalid_reward_names_robot_and_task() -> None:
    robot = RecordingRobot()
    driver = RobotEnvironment(robot, Priceless(), SafetyKernel(robot.spec), name="arm-7")
    driver.connect()
    with pytest.raises(SpecError, match="^robot arm-7: the task reach gives the reward inf$"):
        driver.step(RIGHT)
    driver.close()


def test_frame_stride_applies_except_in_real_time() -> None:
    robot = RecordingRobot(FakeRobotConfig(cameras=("front",), image_size=16))
    cameras = [FakeCamera(robot, spec) for spec in robot.spec.cameras]
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec), cameras, frame_stride=3)
    driver.connect()
    ticks = [driver.reset(seed=0), *(driver.step(STILL) for _ in range(6))]
    assert [bool(time_step.frames) for time_step in ticks] == [True, False, False, True, False, False, True]
    assert ticks[0].frames["front"].image.shape == (16, 16, 3)
    driver.real_time = True
    assert all(driver.step(STILL).frames for _ in range(3))
    driver.close()


def test_step_that_ends_the_episode_has_frames_whatever_the_stride() -> None:
    robot = RecordingRobot(FakeRobotConfig(cameras=("front",), image_size=16))
    cameras = [FakeCamera(robot, spec) for spec in robot.spec.cameras]
    task = FakeTask(max_steps=3)
    driver = RobotEnvironment(robot, task, SafetyKernel(robot.spec), cameras, frame_stride=100)
    driver.connect()
    driver.reset(seed=0)
    assert [bool(driver.step(STILL).frames) for _ in range(3)] == [False, False, True]
    driver.reset(seed=0)
    assert driver.step(np.full(4, np.nan, np.float32)).frames
    task.radius_m = 10.0
    driver.reset(seed=0)
    after = driver.step(STILL)
    assert after.outcome.success and after.frames
    driver.close()


def test_camera_has_its_own_rate() -> None:
    robot = RecordingRobot(FakeRobotConfig(cameras=("front",), image_size=16, camera_hz=0.001))
    camera = FakeCamera(robot, robot.spec.cameras[0])
    camera.connect()
    assert camera.read() is camera.read() and robot.spec.cameras[0].rate_hz == 0.001


class SlowCamera(FakeCamera):
    """A camera with a new frame at every third read."""

    def __init__(self, robot: RecordingRobot) -> None:
        super().__init__(robot, robot.spec.cameras[0])
        self._looks = 0
        self._newest: CameraFrame | None = None

    def read(self) -> CameraFrame:
        if self._newest is None or self._looks % 3 == 0:
            self._newest = super().read()
        self._looks += 1
        return self._newest


class LateCamera(FakeCamera):
    """A camera that notes its robot's stops at its connection."""

    stops = -1

    def connect(self) -> None:
        super().connect()
        assert isinstance(self._robot, RecordingRobot)
        self.stops = len(self._robot.stops)


def test_latched_robot_is_stopped_when_it_is_connected() -> None:
    robot = RecordingRobot(FakeRobotConfig(cameras=("front",), image_size=16))
    camera = LateCamera(robot, robot.spec.cameras[0])
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec), [camera])
    driver.connect()
    assert camera.stops == 0
    driver.kernel.emergency_stop("ada")
    driver.connect()
    assert camera.stops == 1 and robot.stops == [StopLevel.SAFE]
    driver.close()


class GrowingCamera(FakeCamera):
    """A camera whose driver does not check its frames."""

    frame = CameraFrame(np.zeros((16, 16, 3), np.uint8), 0)

    def read(self) -> CameraFrame:
        return self.frame


@pytest.mark.parametrize("picture", [np.zeros((32, 16, 3), np.uint8), np.zeros((16, 16, 3), np.float32)])
def test_image_that_differs_from_its_spec_raises(picture: np.ndarray) -> None:
    robot = RecordingRobot(FakeRobotConfig(cameras=("front",), image_size=16))
    camera = GrowingCamera(robot, robot.spec.cameras[0])
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec), [camera])
    driver.connect()
    assert driver.reset(seed=0).frames
    camera.frame = CameraFrame(picture, 1)
    with pytest.raises(HardwareLost, match=r"camera front gives .*; its spec has uint8 \(16, 16, 3\)"):
        driver.step(STILL)
    driver.close()


def test_frame_is_returned_once_and_again_after_a_reset() -> None:
    robot = RecordingRobot(FakeRobotConfig(cameras=("front",), image_size=16))
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec), [SlowCamera(robot)])
    driver.connect()
    ticks = [driver.reset(seed=0), *(driver.step(STILL) for _ in range(4)), driver.reset(seed=1)]
    assert [bool(time_step.frames) for time_step in ticks] == [True, False, False, True, False, True]
    driver.close()


class UnclosableCamera(FakeCamera):
    """A camera that fails to close."""

    def close(self) -> None:
        super().close()
        raise HardwareLost("the camera does not let go")


def test_failed_close_of_a_camera_closes_the_other_devices() -> None:
    robot = RecordingRobot(FakeRobotConfig(cameras=("front", "wrist"), image_size=16))
    cameras = [UnclosableCamera(robot, spec) for spec in robot.spec.cameras]
    hand = FakeTeleoperator([TeleopInput(STILL, engaged=False)])
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec), cameras, teleoperators=[hand])
    driver.connect()
    with pytest.raises(HardwareLost, match="does not let go"):
        driver.close()
    for device in (robot.observe, hand.read, *(camera.read for camera in cameras)):
        with pytest.raises(HardwareLost, match="not connected"):
            device()


class UnpluggedDevice(FakeTeleoperator):
    """A device that fails to read and to close."""

    def read(self) -> TeleopInput:
        raise HardwareLost("the leader went away")

    def close(self) -> None:
        raise HardwareLost("the leader has hung since reading")


class LooseDevice(FakeTeleoperator):
    """A device whose cable may be out; its dead-man switch is pressed while `held`."""

    is_plugged, held = True, True

    def __init__(self) -> None:
        super().__init__([TeleopInput(STILL, engaged=True)])

    def connect(self) -> None:
        self.check_stop()
        if not self.is_plugged:
            raise HardwareLost("no gamepad 0")
        super().connect()

    def read(self) -> TeleopInput:
        if not self.is_plugged:
            raise HardwareLost("the gamepad 0 was disconnected")
        return replace(super().read(), engaged=self.held)


@pytest.mark.parametrize("is_plugged_at_start", [True, False])
def test_input_device_that_returns_drives_after_a_reset_and_one_release(is_plugged_at_start: bool) -> None:
    robot, pad = RecordingRobot(), LooseDevice()
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec), teleoperators=[pad])
    pad.is_plugged = is_plugged_at_start
    driver.connect()
    assert (driver.hold().local_input is not None) is is_plugged_at_start
    pad.is_plugged = False
    assert driver.hold().local_input is None and driver.reset(0).local_input is None
    pad.is_plugged = True
    assert driver.hold().local_input is None, "it is connected at a reset, while the robot stands still"
    assert driver.reset(1).local_input is None and driver.step(STILL).local_input is None, "a hand is still on it"
    pad.held = False
    assert driver.hold().local_input is None
    pad.held = True
    assert driver.hold().local_input is not None
    driver.close()


def test_device_without_a_dead_man_switch_drives_once_it_was_still_for_its_release_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader arm that has just returned is not engaged, though the hand that moves it may be on it."""
    robot, leader, clock = RecordingRobot(), LooseDevice(), Clock()
    monkeypatch.setattr(
        "user_sys.edge.environment.time", SimpleNamespace(monotonic=clock, monotonic_ns=time.monotonic_ns)
    )
    leader.release_s, leader.is_plugged, leader.held = 2.0, False, False
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec), teleoperators=[leader])
    driver.connect()
    leader.is_plugged = True
    driver.reset(0)
    for held in (False, True, False, True):
        leader.held = held
        assert driver.hold().local_input is None
        clock.now_s += 1.5
    leader.held = False
    driver.hold()
    clock.now_s += 1.0
    driver.hold()
    leader.held = True
    assert driver.hold().local_input is not None
    driver.close()


def test_stop_is_obeyed_while_an_input_device_connects_at_the_start() -> None:
    robot, pad, checks = RecordingRobot(), LooseDevice(), list[int]()
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec), teleoperators=[pad])
    robot.check_stop = lambda: checks.append(1)
    driver.connect()
    assert checks
    driver.close()


def test_estop_while_an_input_device_is_connected_again_latches() -> None:
    def press() -> None:
        raise EmergencyStopped("the e-stop was pressed by ada")

    robot, pad = RecordingRobot(), LooseDevice()
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec), teleoperators=[pad])
    pad.is_plugged = False
    driver.connect()
    pad.is_plugged, robot.check_stop = True, press
    assert driver.reset(0).stopped and robot.stops[-1] is StopLevel.SAFE
    driver.close()


def test_lost_input_device_is_removed() -> None:
    robot = RecordingRobot()
    hand = UnpluggedDevice([TeleopInput(STILL, engaged=False)])
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec), teleoperators=[hand])
    driver.connect()
    assert driver.step(RIGHT).local_input is None and len(robot.commands) == 1
    assert driver.step(RIGHT).applied is not None
    driver.close()


def test_command_after_a_late_one_waits_for_most_of_a_period() -> None:
    now_ms = [0]
    grid = PeriodGrid(100, lambda: now_ms[0])

    def wait_until(end_ms: int) -> None:
        assert end_ms >= now_ms[0]
        now_ms[0] = end_ms

    commands, ends = [], []
    for work_ms in (0, 90, 0, 0, 30, 30, 350):
        now_ms[0] += work_ms
        grid.wait_for_command(wait_until)
        commands += now_ms
        wait_until(grid.begin())
        ends += now_ms
    assert commands == [0, 190, 260, 360, 490, 590, 1010], "200 would follow 190; equal lateness does not add up"
    assert ends == [100, 200, 360, 460, 560, 660, 1110], "the last was too late for the grid; a whole period follows it"
