"""Driver for Franka arms (Panda, FR3), by franky and the robot's own interface (FCI), without ROS.

Steps of the tool or of the joints add to the last commanded target, see `robots.delta_actions`. Each command replaces
franky's motion by one to the new target. franky's online trajectory generator joins them smoothly, within the share
`dynamics` of the arm's limits. The driver does not change load, end effector and impedances, which are set in Desk.

A reflex, the user stop, guiding or any error makes the robot lost; the message has the reason. The driver never
recovers from errors by itself. The user stop and guiding latch the e-stop too.

The force in the state is that of the environment on the tool, as `SafetyLimits.tool_force` says: the negative of
libfranka's `O_F_ext_hat_K`.

Safe stop and hold: franky's stop motion brakes the arm, and the arm's controller holds it. If this process dies or
hangs during a motion, the arm misses its 1 kHz packets and stops by its reflex (`communication_constraints_violation`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from msgspec import Meta

from hal.driver import RobotSetup, RobotSetupRequest, read_options
from hal.errors import HardwareLost, StoppedAtRobot
from hal.robot import Observation, Robot, StopLevel
from hal.settings import Positive
from hal.spec import STATE, Array, RobotSpec
from robots.cameras import make_cameras
from robots.delta_actions import DeltaArm, DeltaArmConfig, DeltaTarget
from robots.device import DeviceLock, DeviceThread, age_s, import_library, require_fresh
from robots.homing import build_judged_task

JOINTS = 7
CONNECT_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 3.0
LOST_AFTER_S = 1.0  # without a new reading; the arm sends a thousand a second

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

STOPPED_BY_PERSON = ("UserStopped", "Guiding")

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class FrankaConfig(DeltaArmConfig):
    """Attributes:
    host: the arm's address; FCI must be active.
    dynamics: share of the arm's limits of velocity, acceleration and jerk for its motions.
    torque_threshold, force_threshold: of the arm's collision reflex, Nm and N; franky sets them when it connects.
    realtime: require a real-time kernel.
    answer_within_s: timeout of a call, after which the robot is lost; default: two control periods.
    """

    model: Literal["fr3", "panda"] = "fr3"
    dynamics: Annotated[float, Meta(gt=0, le=1)] = 0.2
    torque_threshold: Positive = 20.0
    force_threshold: Positive = 30.0
    realtime: bool = True
    answer_within_s: Positive | None = None


def franka_spec(config: FrankaConfig) -> RobotSpec:
    """The spec of the configured arm."""
    arm = DeltaArm(
        model=config.model,
        joints=tuple(f"joint_{number}" for number in range(1, JOINTS + 1)),
        low=JOINT_LOW[config.model],
        high=JOINT_HIGH[config.model],
        speed=5.3,  # of the fastest joint
        reach=1.2,
        force=200.0,
        safe_stop="brakes; the arm's own controller holds it",
    )
    return arm.spec(config)


class FrankaRobot(Robot):
    """One arm. A separate thread waits for franky."""

    def __init__(self, config: FrankaConfig) -> None:
        self.config = config
        self.spec = franka_spec(config)
        self._target = DeltaTarget(self.spec, config)
        self._device_lock = DeviceLock(config.host)
        self._thread: DeviceThread | None = None
        self._franky: Any = None
        self._arm: Any = None
        self._rotation: Array = np.zeros(4)  # of the tool, a quaternion, which a motion keeps
        self._stamp_s, self._captured_ns = -1.0, 0

    def connect(self) -> None:
        """See `hal.robot.Robot`.

        Raises:
            HardwareLost: also if the arm is in a reflex, or another process has locked it. StoppedAtRobot if the arm is
                stopped or guided by a person.
            SpecError: franky is not installed.
        """
        if self._thread is not None:
            return
        self._franky = import_library("franky", "franka")
        self._device_lock.acquire()
        self._thread, self._target.value = DeviceThread(self._name), None
        try:
            self._arm = self._thread.call("connecting", self._open, CONNECT_TIMEOUT_S, self.check_stop)
            self._read(CONNECT_TIMEOUT_S)
        except BaseException:
            self._disconnect()
            raise

    def observe(self) -> Observation:
        state, stale_after_s = self._read(), self.spec.limits.stale_after_s
        if (silent_s := age_s(self._captured_ns)) > max(
            LOST_AFTER_S, stale_after_s
        ):  # franky tells during a motion only
            raise HardwareLost(f"{self._name}: no new reading for {silent_s:.1f} s")
        require_fresh(self._name, self._captured_ns, stale_after_s)
        pose = state.O_T_EE
        numbers = (state.q, state.dq, pose.translation, pose.matrix[:3, 0], pose.matrix[:3, 1], force_on_tool(state))
        vector = np.concatenate([np.ravel(each) for each in numbers]).astype(np.float32)
        return Observation({STATE: vector}, self._captured_ns)

    def command(self, action: Array) -> Array:
        self.spec.action.validate(action)
        state = self._read()
        if self._target.value is None:
            self._rotation = np.ravel(state.O_T_EE.quaternion).copy()
        measured = np.ravel(state.q if self.config.moves_joints else state.O_T_EE.translation)
        self._target.withdraw(measured, force_on_tool(state))
        target, applied = self._target.next(action, measured)
        self._call("commanding", lambda: self._arm.move(self._motion(target), asynchronous=True))
        self._target.value = target
        return applied

    def stop(self, level: StopLevel) -> None:
        """See `hal.robot.Robot`. An arm without a motion gets no command: its own controller holds it."""
        if self._target.value is None:
            self._call("looking", lambda: None)
            return
        self._target.value = None
        stopping = self._franky.JointStopMotion if self.config.moves_joints else self._franky.CartesianStopMotion
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
        if self.config.moves_joints:
            return self._franky.JointMotion(target)
        return self._franky.CartesianMotion(self._franky.Affine(target, self._rotation))

    def _read(self, timeout_s: float | None = None) -> Any:
        """franky's newest state; `_captured_ns` is its capture time. Raises HardwareLost if the arm is stopped."""
        state = self._call("reading", self._sense, timeout_s)
        if reason := stop_reason(state):
            kind = StoppedAtRobot if state.robot_mode.name in STOPPED_BY_PERSON else HardwareLost
            raise kind(f"{self._name}: {reason}")
        if state.time.to_sec() != self._stamp_s:  # a new stamp is a new packet; a frozen arm repeats the last one
            self._stamp_s, self._captured_ns = state.time.to_sec(), time.monotonic_ns()
        return state

    def _sense(self) -> Any:
        """The newest state. Raises franky's exception if an error ended the motion, and not a person."""
        try:
            self._arm.poll_motion()
        except Exception:  # of franky
            if self._arm.state.robot_mode.name not in STOPPED_BY_PERSON:
                raise
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


def force_on_tool(state: Any) -> Array:
    """(3,), in the base frame, N. libfranka gives the tool's force on the environment, in `state` of franky."""
    force: Array = -np.ravel(state.O_F_ext_hat_K)[:3]
    return force


def stop_reason(state: Any) -> str:
    """Why the arm cannot be driven, in words; empty if it can. `state` is franky's robot state."""
    mode = state.robot_mode.name
    if mode in ("Idle", "Move"):
        return ""
    errors = f"{state.last_motion_errors or state.current_errors}".strip("[]")
    return (
        f"{ROBOT_MODES.get(mode, mode)}{f' ({errors})' if errors else ''}; a person must clear it in Desk or at the arm"
    )


def make_robot_setup(request: RobotSetupRequest) -> RobotSetup:
    """A `hal.driver.RobotSetupFactory`; options: `FrankaConfig`. A person judges every task."""
    config = read_options(FrankaConfig, request)
    robot = FrankaRobot(config)
    task = build_judged_task(request, robot, config.sentence, config.max_steps)
    return RobotSetup(request.name, robot, task, make_cameras(config.cameras, request))
