"""Move a robot with joint targets to its home pose at a reset, and the task that a person resets and judges.

The path is a straight line in joint space, at reduced speed. Every target passes a separate safety kernel, so the
limits of the robot's spec apply as for a policy. If the tool is out of the workspace or in a forbidden box at the
start, the limits of its place do not apply: with them, an arm that moves by its joints could never leave there. Targets
wait for a robot that lags behind: a blocked robot does not push harder, and homing times out, also if the robot is
blocked just before home.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from msgspec.structs import replace

from hal.driver import RobotSetupRequest
from hal.errors import EmergencyStopped, HardwareLost, SpecError, StaleObservation
from hal.motion_limits import MAX_TARGET_LEAD_S, SafetyReason, StateLimits, ToolStateLimits
from hal.robot import Observation, Robot, StopLevel
from hal.safety import SafetyKernel
from hal.spec import STATE, Array, RobotSpec
from hal.task import Task, TaskOutcome, build_task
from robots.delta_actions import add_step

HOMING_TIMEOUT_S = 60.0  # in addition to the duration of the path
STANDSTILL_STEP_SHARE = 0.25  # share of a step; joints that moved less count as standing still
HOME_TOLERANCE_S = 0.06  # of motion at greatest speed; joints that end farther from home are blocked
SETTLE_S = 0.2  # standing still for this long counts as settled
STOP_CHECK_INTERVAL_S = 0.01
# How far joints may be out of range: their path at greatest speed in this time, or in one period.
RANGE_TOLERANCE_S = 0.1


@runtime_checkable
class SupportsHoming(Protocol):
    """A robot with a home pose."""

    def go_home(self) -> None:
        """Move to the home pose, if one is configured, and hold. Blocks; calls `Robot.check_stop` periodically.

        Raises EmergencyStopped if the robot does not arrive: a person must look at it.
        """


class HumanJudgedTask(Task):
    """Runs until a person marks success or failure or requests a reset, or until `max_steps`; the reward is always 0.

    A reset moves a robot with a home pose there and holds any other. A person resets the scene, and the robot without a
    home pose.
    """

    reads_observation, is_judged = False, True

    def __init__(self, name: str, instruction: str, max_steps: int) -> None:
        self.name, self.instruction, self.max_steps = name, instruction or name, max_steps

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        if isinstance(robot, SupportsHoming):
            robot.go_home()
        else:
            robot.stop(StopLevel.HOLD)

    def evaluate(self, observation: Observation) -> TaskOutcome:
        return TaskOutcome(reward=0.0, terminated=False)


def build_judged_task(request: RobotSetupRequest, robot: Robot, instruction: str, max_steps: int) -> Task:
    """The tasks of a real robot: those of installed packages by name, and a `HumanJudgedTask` for any other name.

    Args:
        instruction: of tasks for which the config has no sentence.
    """
    return build_task(request.tasks, robot, {}, lambda each: HumanJudgedTask(each.name, instruction, max_steps))


def validate_home(spec: RobotSpec, home: Sequence[float], low: Array, high: Array) -> None:
    """Raises SpecError unless `home` is empty or has a valid position for each of the spec's `joint_target`.

    Args:
        low, high: bounds of the whole action, (a,).
    """
    joints = list(spec.joint_target)
    labels = [spec.action.labels[joint] for joint in joints]
    if home and len(home) != len(joints):
        raise SpecError(f"home has {len(home)} positions; {spec.model} needs one for each of its joints {labels}")
    for label, position, least, most in zip(labels, home, low[joints], high[joints], strict=False):
        if not least <= position <= most:
            raise SpecError(f"home: {label} is {position:g}; it must be between {least:g} and {most:g}")


def require_joints_in_range(spec: RobotSpec, measured: Array, low: Array, high: Array) -> None:
    """Raises HardwareLost if a joint is so far out of range that a command clipped to the range would make it jump.

    Args:
        measured: positions of the spec's `joint_target`, in that order.
        low, high: bounds of the whole action, (a,).
    """
    joints = list(spec.joint_target)
    fastest = np.array(spec.limits.joint_velocity_max or (np.inf,) * len(joints))
    slack = fastest * max(RANGE_TOLERANCE_S, spec.period_s)
    out = np.flatnonzero((measured < low[joints] - slack) | (measured > high[joints] + slack))
    if len(out):
        joint = joints[out[0]]
        raise HardwareLost(
            f"{spec.model}: {spec.action.labels[joint]} is at {measured[out[0]]:.4g}; it must be between "
            f"{low[joint]:g} and {high[joint]:g}: a person must move it back, or widen its limits"
        )


def clip_to_range(spec: RobotSpec, action: Array, measured: Array, low: Array, high: Array) -> Array:
    """Clip `action` to `low` and `high`, (a,) each.

    The bounds of a joint that is out of range extend to its measured position, so that it does not jump back.

    Args:
        measured: positions of the spec's `joint_target`, in that order.
    """
    joints, least, most = list(spec.joint_target), low.copy(), high.copy()
    least[joints], most[joints] = np.minimum(low[joints], measured), np.maximum(high[joints], measured)
    within: Array = np.clip(action, least, most).astype(np.float32)
    return within


def move_home(robot: Robot, home: Sequence[float], last_action: Array) -> None:
    """Move the robot's joints to `home` and wait until they stand still. Blocks; calls `Robot.check_stop` periodically.

    Args:
        home: valid by `validate_home`, and not empty.
        last_action: the last commanded action, (a,); its other elements than joints stay as they are.

    Raises:
        EmergencyStopped: the robot did not arrive within the expected duration plus `HOMING_TIMEOUT_S`; the message has
            the reason. A person must look at it, because another attempt would be blocked too. Or the tool is out of
            its place at home, see `require_tool_in_place`.
        SpecError: the joints have no speed limit, which the path needs.
    """
    path = _JointPath(robot, home, last_action)
    begun_s = time.monotonic()
    while not path.advance():
        if (late_s := time.monotonic() - begun_s) > path.duration_s + HOMING_TIMEOUT_S:
            raise EmergencyStopped(
                f"{robot.spec.model} did not get home within {late_s:.3g} s: {path.problem}; a person must look at it"
            )
        _wait_one_period(robot)
    require_tool_in_place(robot)


def require_tool_in_place(robot: Robot) -> None:
    """Raises EmergencyStopped if the tool of a robot at home is out of its workspace or in a forbidden box.

    An episode from there could leave it in the wrong direction only, e.g. through the robot's own base.
    """
    spec, state = robot.spec, robot.observe().arrays[STATE]
    if SafetyReason.WORKSPACE in ToolStateLimits(spec).check(state):
        tool = [round(float(state[index]), 3) for index in spec.limits.tool_position]
        raise EmergencyStopped(
            f"{spec.model}: at home the tool is at {tool} m, outside the workspace or in a forbidden box: correct "
            "`home` or these boxes in the config"
        )


class _JointPath:
    """The path to the home pose, and the robot's progress on it.

    Attributes:
        duration_s: expected duration of the path from the first measured position.
        problem: why the robot is not there yet.
    """

    def __init__(self, robot: Robot, home: Sequence[float], last_action: Array) -> None:
        spec = robot.spec
        self._robot, self._home, self._last_action = robot, np.array(home, np.float64), last_action
        self._joint_elements, self._state_indices = list(spec.joint_target), list(spec.limits.joint_position)
        self._kernel = _slow_kernel(spec)
        if len(self._home) != (joints := len(self._joint_elements)):
            raise SpecError(f"{spec.model}: homing needs a position for each of {joints} joints; there are {len(home)}")
        fastest = np.array(spec.limits.joint_velocity_max)
        speed = fastest * spec.limits.reduced_speed
        self._max_step, self._tolerance = speed * spec.period_s, fastest * HOME_TOLERANCE_S
        self._lead = np.maximum(speed * MAX_TARGET_LEAD_S, 2 * self._tolerance)
        self._target: Array | None = None
        self._measured = self._still_at = np.full(len(self._home), np.inf)
        self._still_since_ns = 0
        self.duration_s, self.problem = 0.0, ""

    def advance(self) -> bool:
        """Run one control period; True once target and robot are home, and the robot stands still.

        Servos sag under their load, at any speed: a joint is home within `HOME_TOLERANCE_S`.
        """
        try:
            seen = self._robot.observe()
        except StaleObservation as error:
            self._stop(StopLevel.HOLD, str(error))
            return False
        self._measured = seen.arrays[STATE][self._state_indices].astype(np.float64)
        if not self.duration_s:
            self.duration_s = self._periods_for(self._home - self._measured) * self._robot.spec.period_s
            if SafetyReason.WORKSPACE in StateLimits(self._robot.spec).check(seen.arrays[STATE]):
                self._kernel = _slow_kernel(_without_place(self._robot.spec))
        settled = self._is_settled(seen.t_capture_ns)
        arrived = bool((np.abs(self._measured - self._home) <= self._tolerance).all())
        if arrived and settled and self._target is not None and self._is_near(self._target, self._home):
            return True
        verdict = self._kernel.filter(self._next_action(), seen)
        if verdict.applied is None:
            self._stop(verdict.stop or StopLevel.HOLD, verdict.text)
            return False
        self.problem = (
            f"its joints are at {np.round(self._measured, 3).tolist()}, not at {np.round(self._home, 3).tolist()}"
        )
        applied = self._robot.command(verdict.applied)
        self._kernel.set_applied(applied)
        self._target = applied[self._joint_elements].astype(np.float64)
        return False

    def _next_action(self) -> Array:
        """The next action: all joints arrive at the same time."""
        left = self._home - (self._measured if self._target is None else self._target)
        target, _ = add_step(self._target, self._measured, left / self._periods_for(left), self._lead)
        action: Array = self._last_action.astype(np.float32)
        action[self._joint_elements] = target
        return action

    def _periods_for(self, left: Array) -> float:
        """The number of control periods for a distance, at least one."""
        return max(1.0, float((np.abs(left) / self._max_step).max()))

    def _is_settled(self, captured_ns: int) -> bool:
        if not self._is_near(self._measured, self._still_at):
            self._still_at, self._still_since_ns = self._measured, captured_ns
        return captured_ns - self._still_since_ns >= SETTLE_S * 1e9

    def _stop(self, level: StopLevel, problem: str) -> None:
        self._target, self.problem = None, problem
        self._robot.stop(level)

    def _is_near(self, one: Array, other: Array) -> bool:
        return bool((np.abs(one - other) <= STANDSTILL_STEP_SHARE * self._max_step).all())


def _slow_kernel(spec: RobotSpec) -> SafetyKernel:
    kernel = SafetyKernel(spec)
    kernel.is_speed_reduced = True
    return kernel


def _without_place(spec: RobotSpec) -> RobotSpec:
    """`spec` without the limits of the tool's place."""
    return replace(spec, limits=replace(spec.limits, workspace_low=(), workspace_high=(), keep_out=()))


def _wait_one_period(robot: Robot) -> None:
    end_s = time.monotonic() + robot.spec.period_s
    robot.check_stop()
    while (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(left_s, STOP_CHECK_INTERVAL_S))
        robot.check_stop()
