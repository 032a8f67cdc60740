"""The way home at a reset, of robots whose joints are told where to be.

A way goes straight through joint space, at the speed that is allowed while a person is near, and every target passes a
safety kernel of its own: the limits of the robot's spec hold here as they do for a policy. The targets wait for a robot
that lags behind, so that one that is held up is not pressed on, but does not get home.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hal.errors import EmergencyStopped, HardwareLost, SpecError, StaleObservation
from hal.robot import Robot, StopLevel
from hal.safety import SafetyKernel
from hal.spec import STATE, Array, RobotSpec
from robots.delta_actions import add_step

HOMING_TIMEOUT_S = 60.0  # beyond what the way takes
MAX_TARGET_LEAD_S = 0.5  # at the speed of the way
STANDSTILL_STEP_SHARE = 0.25  # share of a step; joints that moved less are where they were
SETTLE_S = 0.2  # joints that were there so long stand
STOP_CHECK_INTERVAL_S = 0.01
RANGE_TOLERANCE_S = (
    0.1  # joints may be as far out of their range as they move in it at their greatest speed, or in a period
)


def validate_home(spec: RobotSpec, home: Sequence[float], low: Array, high: Array) -> None:
    """Raises SpecError unless `home` is empty or has a position for each of the spec's `joint_target`.

    Args:
        low, high: of the whole action, (a,).
    """
    joints = list(spec.joint_target)
    labels = [spec.action.labels[joint] for joint in joints]
    if home and len(home) != len(joints):
        raise SpecError(f"home has {len(home)} positions; {spec.model} has the joints {labels}")
    for label, position, least, most in zip(labels, home, low[joints], high[joints], strict=False):
        if not least <= position <= most:
            raise SpecError(f"home: {label} is {position:g}; it may be between {least:g} and {most:g}")


def require_joints_in_range(spec: RobotSpec, measured: Array, low: Array, high: Array) -> None:
    """Raises HardwareLost: a joint is so far out of its range that a command, cut off at the range's end, is a leap.

    Args:
        measured: of the spec's `joint_target`, in that order.
        low, high: of the whole action, (a,).
    """
    joints = list(spec.joint_target)
    fastest = np.array(spec.limits.joint_velocity_max or (np.inf,) * len(joints))
    slack = fastest * max(RANGE_TOLERANCE_S, spec.period_s)
    out = np.flatnonzero((measured < low[joints] - slack) | (measured > high[joints] + slack))
    if len(out):
        joint = joints[out[0]]
        raise HardwareLost(
            f"{spec.model}: {spec.action.labels[joint]} is at {measured[out[0]]:.4g}; it may be between {low[joint]:g} "
            f"and {high[joint]:g}: a person must bring it back there, or widen its limits"
        )


def clip_to_range(spec: RobotSpec, action: Array, measured: Array, low: Array, high: Array) -> Array:
    """`action` within `low` and `high`, (a,) each. A joint that stands out of its range is told to be between there and
    the range, so that it does not leap back into it.

    Args:
        measured: of the spec's `joint_target`, in that order.
    """
    joints, least, most = list(spec.joint_target), low.copy(), high.copy()
    least[joints], most[joints] = np.minimum(low[joints], measured), np.maximum(high[joints], measured)
    within: Array = np.clip(action, least, most).astype(np.float32)
    return within


def move_home(robot: Robot, home: Sequence[float], last_action: Array) -> None:
    """Moves the robot's joints to `home` and lets it stand there. Blocks, and calls `Robot.attend` all the while.

    Args:
        home: as `validate_home` wants it, and not empty.
        told: the action that the robot was told last, (a,); whatever else it has than joints stays so.

    Raises:
        EmergencyStopped: it is not there `HOMING_TIMEOUT_S` after it could have been; the message says what held it up.
            It is for a person to look at it then: tried again it would be held up again.
        SpecError: the joints have no greatest speed, which the way goes by.
    """
    way = _JointPath(robot, home, last_action)
    begun_s = time.monotonic()
    while not way.advance():
        if (late_s := time.monotonic() - begun_s) > way.duration_s + HOMING_TIMEOUT_S:
            raise EmergencyStopped(
                f"{robot.spec.model} did not get home within {late_s:.3g} s: {way.problem}; a person must look at it"
            )
        _wait_one_period(robot)


class _JointPath:
    """Where the robot is on its way.

    Attributes:
        duration_s: how long the way takes from where the robot was seen first.
        problem: what holds it up.
    """

    def __init__(self, robot: Robot, home: Sequence[float], told: Array) -> None:
        spec = robot.spec
        self._robot, self._home, self._told = robot, np.array(home, np.float64), told
        self._turns, self._angles = list(spec.joint_target), list(spec.limits.joint_position)
        self._kernel = SafetyKernel(spec)
        self._kernel.is_speed_reduced = True
        fastest = spec.limits.joint_velocity_max
        if len(fastest) != len(self._turns) or len(self._home) != len(self._turns):
            raise SpecError(
                f"{spec.model}: the way home needs a position and a greatest speed (joint_velocity_max) of each of "
                f"{len(self._turns)} joints; there are {len(self._home)} and {len(fastest)}"
            )
        speed = np.array(fastest) * spec.limits.reduced_speed
        self._longest, self._lead = speed * spec.period_s, speed * MAX_TARGET_LEAD_S
        self._target: Array | None = None
        self._measured = self._stood = np.full(len(self._home), np.inf)
        self._stood_ns = 0
        self.duration_s, self.problem = 0.0, ""

    def advance(self) -> bool:
        """One control period on; True once the robot is told to be at home and stands."""
        try:
            seen = self._robot.observe()
        except StaleObservation as error:
            self._wait(StopLevel.HOLD, str(error))
            return False
        self._measured = seen.arrays[STATE][self._angles].astype(np.float64)
        if not self.duration_s:
            self.duration_s = self._periods(self._home - self._measured) * self._robot.spec.period_s
        stands = self._stands(seen.t_capture_ns)
        if stands and self._target is not None and self._near(self._target, self._home):
            return True
        verdict = self._kernel.filter(self._next(), seen)
        if verdict.applied is None:
            self._wait(verdict.stop or StopLevel.HOLD, verdict.text)
            return False
        self.problem = f"its joints are at {np.round(self._measured, 3).tolist()}"
        applied = self._robot.command(verdict.applied)
        self._kernel.set_applied(applied)
        self._target = applied[self._turns].astype(np.float64)
        return False

    def _next(self) -> Array:
        """The action that leads on: all joints arrive together."""
        left = self._home - (self._measured if self._target is None else self._target)
        target, _ = add_step(self._target, self._measured, left / self._periods(left), self._lead)
        action: Array = self._told.astype(np.float32)
        action[self._turns] = target
        return action

    def _periods(self, left: Array) -> float:
        """How many control periods so much of a way takes, at least one."""
        return max(1.0, float((np.abs(left) / self._longest).max()))

    def _stands(self, captured_ns: int) -> bool:
        if not self._near(self._measured, self._stood):
            self._stood, self._stood_ns = self._measured, captured_ns
        return captured_ns - self._stood_ns >= SETTLE_S * 1e9

    def _wait(self, level: StopLevel, trouble: str) -> None:
        self._target, self.problem = None, trouble
        self._robot.stop(level)

    def _near(self, one: Array, other: Array) -> bool:
        return bool((np.abs(one - other) <= STANDSTILL_STEP_SHARE * self._longest).all())


def _wait_one_period(robot: Robot) -> None:
    end_s = time.monotonic() + robot.spec.period_s
    robot.check_stop()
    while (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(left_s, STOP_CHECK_INTERVAL_S))
        robot.check_stop()
