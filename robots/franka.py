"""Driver for Franka arms (Panda, FR3), by franky and the robot's own interface (FCI), without ROS.

The action is a step of the tool (`tool_delta`: x, y, z in the base frame; the tool keeps its rotation) or of the joints
(`joint_delta`). Steps add to the last commanded target, which is at most `MAX_TARGET_LEAD_S` ahead of the arm. Each
command replaces franky's motion by one to the new target. franky's online trajectory generator joins them smoothly,
within the share `dynamics` of the arm's limits. The driver does not change load, end effector and impedances, which are
set in Desk.

A reflex, the user stop, guiding or any error makes the robot lost; the message has the reason. The driver never
recovers from errors by itself.

Safe stop and hold: franky's stop motion brakes the arm, and the arm's controller holds it. If this process dies or
hangs during a motion, the arm misses its 1 kHz packets and stops by its reflex (`communication_constraints_violation`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, TypeVar

import numpy as np

from hal.driver import RobotSetup, RobotSetupRequest, read_options
from hal.errors import HardwareLost, SpecError, StaleObservation, install_hint
from hal.robot import Observation, Robot, StopLevel
from hal.spec import ACTION, STATE, Array, ArraySpec, Box, RobotSpec, SafetyLimits
from robots.cameras import CameraConfig, camera_specs, make_cameras
from robots.delta_actions import add_step, make_step_limiter
from robots.device_lock import DeviceLock
from robots.device_thread import DeviceThread
from robots.manual_task import HumanJudgedTask

JOINTS = 7
MAX_TARGET_LEAD_S = 0.5  # at full speed
CONNECT_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 3.0
FORCE_RANGE_N = 200.0
SPEED_RANGE = 5.3  # rad/s, of the fastest joint
REACH_M = 1.2
REDUCED_SPEED = 0.25  # while a person teleoperates or is near

# Joint limits, rad: Franka's "Robot and interface specifications"
JOINT_LOW = {
    "panda": (-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973),
    "fr3": (-2.7437, -1.7837, -2.9007, -3.0421, -2.8065, 0.5445, -3.0159),
}
JOINT_HIGH = {
    "panda": (2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973),
    "fr3": (2.7437, 1.7837, 2.9007, -0.1518, 2.8065, 4.5169, 3.0159),
}
ROBOT_MODES = {
    "Reflex": "a reflex",
    "UserStopped": "the user stop",
    "Guiding": "guiding by hand",
    "AutomaticErrorRecovery": "a recovery started by another program",
    "Other": "an unknown state",
}

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class FrankaConfig:
    """Attributes:
    host: the arm's address; FCI must be active.
    action: ``tool_delta`` or ``joint_delta``.
    tool_speed: m/s, for a tool_delta.
    joint_speed: rad/s: of a joint_delta; with a tool_delta, the measured speed above which the arm holds.
    dynamics: share of the arm's limits of velocity, acceleration and jerk for its motions, in (0, 1].
    torque_threshold, force_threshold: of the arm's collision reflex, Nm and N; franky sets them when it connects.
    realtime: require a real-time kernel.
    workspace_low, workspace_high: box for the tool, m in the base frame; keep_out: boxes that it may not enter.
    force_max: N; above it the tool does not move further against the force. None for no limit.
    answer_within_s, stale_after_s: default: two control periods.
    sentence: the instruction for the policy.
    """

    host: str
    model: Literal["fr3", "panda"] = "fr3"
    action: Literal["tool_delta", "joint_delta"] = "tool_delta"
    rate_hz: float = 20.0
    tool_speed: float = 0.2
    joint_speed: float = 1.0
    dynamics: float = 0.2
    torque_threshold: float = 20.0
    force_threshold: float = 30.0
    realtime: bool = True
    workspace_low: tuple[float, ...] = ()
    workspace_high: tuple[float, ...] = ()
    keep_out: tuple[Box, ...] = ()
    force_max: float | None = 20.0
    cameras: dict[str, CameraConfig] = field(default_factory=dict)
    answer_within_s: float | None = None
    stale_after_s: float | None = None
    reduced_speed: float = REDUCED_SPEED
    sentence: str = ""
    max_steps: int = 3000

    def __post_init__(self) -> None:
        if not all(0 < x < np.inf for x in (self.rate_hz, self.tool_speed, self.joint_speed)):
            raise ValueError("rate_hz, tool_speed and joint_speed must be above 0")
        if any(given is not None and not given > 0 for given in (self.answer_within_s, self.stale_after_s)):
            raise ValueError("answer_within_s and stale_after_s must be above 0")
        if not (self.torque_threshold > 0 and self.force_threshold > 0):
            raise ValueError("torque_threshold and force_threshold must be above 0")
        if not 0 < self.dynamics <= 1:
            raise ValueError(f"dynamics is {self.dynamics:g}; it must be in (0, 1]")

    @property
    def two_periods_s(self) -> float:
        return 2 / self.rate_hz


def franka_spec(config: FrankaConfig) -> RobotSpec:
    """The spec of the configured arm."""
    joints = config.action == "joint_delta"
    moves = tuple(f"d_joint_{number}" for number in range(1, JOINTS + 1)) if joints else ("dx", "dy", "dz")
    step = (config.joint_speed if joints else config.tool_speed) / config.rate_hz
    return RobotSpec(
        model=config.model,
        rate_hz=config.rate_hz,
        observation=(_state_spec(config),),
        action=ArraySpec(
            name=ACTION,
            labels=moves,
            units=(("rad",) if joints else ("m",)) * len(moves),
            low=(-step,) * len(moves),
            high=(step,) * len(moves),
        ),
        cameras=camera_specs(config.cameras),
        limits=_limits(config),
        neutral=(0.0,) * len(moves),
        tool_delta=() if joints else (0, 1, 2),
        joint_delta=tuple(range(JOINTS)) if joints else (),
        safe_stop="brakes; the arm's own controller holds it",
    )


def _state_spec(config: FrankaConfig) -> ArraySpec:
    low, high, numbers = JOINT_LOW[config.model], JOINT_HIGH[config.model], range(1, JOINTS + 1)
    parts = [
        *((f"joint_{number}.pos", "rad", low[number - 1], high[number - 1]) for number in numbers),
        *((f"joint_{number}.vel", "rad/s", -SPEED_RANGE, SPEED_RANGE) for number in numbers),
        *((f"tool_{axis}", "m", -REACH_M, REACH_M) for axis in "xyz"),
        *((f"tool_{of}{axis}", "1", -1.0, 1.0) for of in "xy" for axis in "xyz"),
        *((f"force_{axis}", "N", -FORCE_RANGE_N, FORCE_RANGE_N) for axis in "xyz"),
    ]
    labels, units, lows, highs = zip(*parts, strict=True)
    return ArraySpec(name=STATE, labels=labels, units=units, low=lows, high=highs)


def _limits(config: FrankaConfig) -> SafetyLimits:
    joints = config.action == "joint_delta"
    return SafetyLimits(
        workspace_low=config.workspace_low,
        workspace_high=config.workspace_high,
        keep_out=config.keep_out,
        tool_position=(14, 15, 16),
        tool_speed_max=None if joints else config.tool_speed,
        tool_force=(23, 24, 25),
        tool_force_max=config.force_max,
        joint_position=tuple(range(JOINTS)),
        joint_low=JOINT_LOW[config.model],
        joint_high=JOINT_HIGH[config.model],
        joint_velocity=() if joints else tuple(range(JOINTS, 2 * JOINTS)),
        joint_velocity_max=(config.joint_speed,) * JOINTS,
        reduced_speed=config.reduced_speed,
        stale_after_s=config.stale_after_s or config.two_periods_s,
    )


@dataclass(frozen=True)
class _FrankaState:
    """`position` (3,) and `rotation` (4,), a quaternion, of the tool in the base frame; `state` as in the spec."""

    state: Array
    position: Array
    rotation: Array
    t_capture_ns: int


class FrankaRobot(Robot):
    """One arm. A separate thread waits for franky."""

    def __init__(self, config: FrankaConfig) -> None:
        self.config = config
        self.spec = franka_spec(config)
        self._joints = config.action == "joint_delta"
        self._low = np.array(self.spec.action.low, np.float32)
        self._high = np.array(self.spec.action.high, np.float32)
        self._max_lead = MAX_TARGET_LEAD_S * (config.joint_speed if self._joints else config.tool_speed)
        self._step_limiter = make_step_limiter(self.spec)
        self._device_lock = DeviceLock(config.host)
        self._thread: DeviceThread | None = None
        self._franky: Any = None
        self._arm: Any = None
        self._target: Array | None = (
            None  # joint angles (7,) or the tool's position (3,); None while the arm is stopped
        )
        self._rotation: Array = np.zeros(4)
        self._stamp_s, self._captured_ns = -1.0, 0

    def connect(self) -> None:
        """See `hal.robot.Robot`.

        Raises:
            HardwareLost: also if the arm is in a reflex, stopped or guided, or another process has locked it.
            SpecError: franky is not installed.
        """
        if self._thread is not None:
            return
        self._franky = _import_franky()
        self._device_lock.acquire()
        self._thread, self._target = DeviceThread(self._name), None
        try:
            self._arm = self._thread.call("connecting", self._open, CONNECT_TIMEOUT_S, self.check_stop)
            self._read(CONNECT_TIMEOUT_S)
        except BaseException:
            self._disconnect()
            raise

    def observe(self) -> Observation:
        reading = self._read()
        age_s = (time.monotonic_ns() - reading.t_capture_ns) / 1e9
        if age_s > self.spec.limits.stale_after_s:
            raise StaleObservation(f"{self._name}: the newest reading is {age_s:.3f} s old")
        return Observation({STATE: reading.state.astype(np.float32)}, reading.t_capture_ns)

    def command(self, action: Array) -> Array:
        self.spec.action.validate(action)
        reading = self._read()
        if self._target is None:
            self._rotation = reading.rotation
        measured = reading.state[:JOINTS] if self._joints else reading.position
        wanted = np.clip(action, self._low, self._high)
        target, step = add_step(self._target, measured, wanted, self._max_lead, self._step_limiter)
        self._call("commanding", lambda: self._arm.move(self._motion(target), asynchronous=True))
        self._target = target
        applied: Array = np.clip(step.astype(np.float32), self._low, self._high)
        return applied

    def stop(self, level: StopLevel) -> None:
        """See `hal.robot.Robot`. An arm without a motion gets no command: its own controller holds it."""
        if self._target is None:
            self._call("looking", lambda: None)
            return
        self._target = None
        stopping = self._franky.JointStopMotion if self._joints else self._franky.CartesianStopMotion
        self._call("stopping", lambda: self._arm.move(stopping(), asynchronous=True))

    def close(self) -> None:
        if self._thread is None:
            return
        try:
            self.stop(StopLevel.SAFE)
            self._call("stopping", lambda: self._arm.join_motion(STOP_TIMEOUT_S), 2 * STOP_TIMEOUT_S)
        except HardwareLost as error:
            log.warning("franka.stop_failed %s", error)
        self._disconnect()

    @property
    def _name(self) -> str:
        return f"Franka at {self.config.host}"

    def _open(self) -> Any:
        config, realtime = self.config, self._franky.RealtimeConfig
        return self._franky.Robot(
            config.host,
            relative_dynamics_factor=config.dynamics,
            default_torque_threshold=config.torque_threshold,
            default_force_threshold=config.force_threshold,
            realtime_config=realtime.Enforce if config.realtime else realtime.Ignore,
        )

    def _motion(self, target: Array) -> Any:
        if self._joints:
            return self._franky.JointMotion(target)
        return self._franky.CartesianMotion(self._franky.Affine(target, self._rotation))

    def _read(self, timeout_s: float | None = None) -> _FrankaState:
        state = self._call("reading", self._sense, timeout_s)
        if reason := stop_reason(state):
            raise HardwareLost(f"{self._name}: {reason}")
        if state.time.to_sec() != self._stamp_s:  # a new stamp is a new packet; a frozen arm repeats the last one
            self._stamp_s, self._captured_ns = state.time.to_sec(), time.monotonic_ns()
        pose = state.O_T_EE
        numbers = (state.q, state.dq, pose.translation, pose.matrix[:3, 0], pose.matrix[:3, 1], state.O_F_ext_hat_K[:3])
        return _FrankaState(
            state=np.concatenate([np.ravel(each) for each in numbers]),
            position=np.ravel(pose.translation).copy(),
            rotation=np.ravel(pose.quaternion).copy(),
            t_capture_ns=self._captured_ns,
        )

    def _sense(self) -> Any:
        """The newest state. Raises franky's exception if an error ended the motion."""
        self._arm.poll_motion()
        return self._arm.state

    def _call(self, operation: str, function: Callable[[], T], timeout_s: float | None = None) -> T:
        if self._thread is None:
            raise HardwareLost(f"{self._name} is not connected")
        timeout_s = timeout_s or self.config.answer_within_s or self.config.two_periods_s
        return self._thread.call(operation, function, timeout_s)

    def _disconnect(self) -> None:
        thread, self._thread, self._arm = self._thread, None, None
        if thread is not None:
            thread.close()
        self._device_lock.release()


def stop_reason(state: Any) -> str:
    """Why the arm cannot be driven, in words; empty if it can. `state` is franky's robot state."""
    mode = state.robot_mode.name
    if mode in ("Idle", "Move"):
        return ""
    errors = f"{state.last_motion_errors or state.current_errors}".strip("[]")
    return (
        f"{ROBOT_MODES.get(mode, mode)}{f' ({errors})' if errors else ''}; a person must clear it in Desk or at the arm"
    )


def _import_franky() -> Any:
    try:
        return import_module("franky")
    except ImportError as error:
        raise SpecError(f"franky cannot be imported: {error}; install it with: {install_hint('franka')}") from error


def make_robot_setup(request: RobotSetupRequest) -> RobotSetup:
    """A `hal.driver.RobotSetupFactory`; options: `FrankaConfig`. A person judges every task."""
    config = read_options(FrankaConfig, request)
    task = HumanJudgedTask(request.task, config.sentence or request.task, config.max_steps)
    return RobotSetup(request.name, FrankaRobot(config), task, make_cameras(config.cameras, request))
