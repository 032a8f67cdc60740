"""Reach, on any robot that is moved by its joints: a goal is drawn, seen by the policy, and to be arrived at.

`ReachRobotWrapper` wraps a robot and adds the goal to what it observes. Joints that are told where to be are told here
how far to go instead (`RobotSpec.joint_delta`): a policy that knows nothing yet stays near where it is, and what it
learns at one place holds at another. The safety kernel stands before the wrapper, with the wrapped robot's limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from hal.driver import ExpertPolicy, RobotSetup
from hal.errors import SpecError
from hal.robot import Observation, Robot, StopLevel
from hal.spec import ENVIRONMENT_STATE, STATE, Array, ArraySpec, RobotSpec
from hal.task import Task, TaskOutcome

REACH_TASK = "reach"
JOINT_TOLERANCE, TOOL_TOLERANCE_M = 0.05, 0.03
GOAL_RANGE_SHARE = 0.5  # share of each joint's range, about its middle, that goals are drawn from
MAX_LEAD_STEPS = 3.0  # a joint that is held up is told to be at most so many steps ahead of where it is measured


@dataclass(frozen=True)
class ReachConfig:
    """Attributes:
    space: of the goal: the joints' or the tool's, for a robot that says where its tool is.
    joints: those that are to be at the goal, by their labels in the state; the others may be anywhere. By default all.
    low, high: where goals are drawn from, in the space's units, joints in the robot's own order; by default the inner
        half of each joint's range, and of the workspace.
    tolerance: how near is there: of each joint (by default 5% of that range), or of the tool (0.03 m).
    step_max: the longest step of a joint in a control period; by default what its greatest speed allows.
    """

    space: Literal["joints", "tool"] = "joints"
    joints: tuple[str, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    tolerance: float | None = None
    step_max: float | None = None
    max_steps: int = 100

    def __post_init__(self) -> None:
        if any(given is not None and not given > 0 for given in (self.tolerance, self.step_max)):
            raise ValueError("reach: tolerance and step_max are above 0")


class ReachRobotWrapper(Robot):
    """A robot with a goal. Its own calls are the wrapped robot's, but for the goal and the steps."""

    def __init__(self, robot: Robot, config: ReachConfig) -> None:
        """Raises SpecError where the robot has no joints to move, no range to draw goals from, or a goal already."""
        self.robot, self.config = robot, config
        inner = robot.spec
        self.goal_joints = _goal_joints(inner, config)
        self._where = _goal_state_indices(inner, config, self.goal_joints)
        self.goal_low, self.goal_high = _goal_bounds(inner, config, self.goal_joints, len(self._where))
        self.tolerance = _tolerance(config, self.goal_high - self.goal_low)
        self._turns = list(inner.joint_target)
        self._angles = list(inner.limits.joint_position)
        self._step = _max_steps(inner, config)
        self.spec = _spec_with_goal(inner, self._where, self.goal_low, self.goal_high, self._step)
        self._low, self._high = (np.array(each, np.float32) for each in (self.spec.action.low, self.spec.action.high))
        self._target: Array | None = None
        self._seen: Observation | None = None
        self.goal: Array = (self.goal_low + self.goal_high) / 2

    def connect(self) -> None:
        self.robot.connect()
        self._target = None

    def observe(self) -> Observation:
        seen = self._seen = self.robot.observe()
        way = self.goal - seen.arrays[STATE][self._where]
        goal = np.concatenate([self.goal, way]).astype(np.float32)
        return replace(seen, arrays={**seen.arrays, ENVIRONMENT_STATE: goal})

    def command(self, action: Array) -> Array:
        self.spec.action.validate(action)
        if not self._turns:
            return self.robot.command(action)
        base = self._base()
        wanted = action.copy()
        wanted[self._turns] = base + np.clip(action[self._turns], -self._step, self._step)
        applied = self.robot.command(wanted).copy()
        self._target = applied[self._turns].astype(np.float64)
        applied[self._turns] = np.clip(self._target - base, -self._step, self._step)
        return np.clip(applied, self._low, self._high).astype(np.float32)

    def stop(self, level: StopLevel) -> None:
        self._target = None
        self.robot.stop(level)

    def close(self) -> None:
        self.robot.close()

    def reset_with_task(self, task: Task, rng: np.random.Generator) -> None:
        """Resets the wrapped robot by a task of its own, see `Task.reset`; steps begin where it is then."""
        self._target = None
        self.robot.check_stop = self.check_stop
        task.reset(self.robot, rng)

    def distance_in_tolerances(self, observation: Observation) -> float:
        """How far the goal is in `observation`, in tolerances: at most 1 is there."""
        way = observation.arrays[ENVIRONMENT_STATE][len(self._where) :]
        if self.config.space == "tool":
            return float(np.linalg.norm(way / self.tolerance))
        return float(np.abs(way / self.tolerance).max())

    def _base(self) -> Array:
        """Where a step begins: at the last target, while the robot keeps up with it."""
        measured = (self._seen or self.robot.observe()).arrays[STATE][self._angles].astype(np.float64)
        if self._target is None:
            return measured
        lead = MAX_LEAD_STEPS * self._step
        result: Array = np.clip(self._target, measured - lead, measured + lead)
        return result


class ReachTask(Task):
    """Be at the goal: reward 1 and success within its tolerance.

    A reset is that of the robot's own task, which may bring the robot home, and draws a new goal.
    """

    name = REACH_TASK

    def __init__(self, robot: ReachRobotWrapper, base_task: Task, instruction: str) -> None:
        """`own`: a task of the robot that is wrapped."""
        self._robot, self._own = robot, base_task
        self.instruction, self.max_steps = instruction or "move to the goal", robot.config.max_steps

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        self._robot.reset_with_task(self._own, rng)
        self._robot.goal = rng.uniform(self._robot.goal_low, self._robot.goal_high)

    def evaluate(self, observation: Observation) -> TaskOutcome:
        done = self._robot.distance_in_tolerances(observation) <= 1
        return TaskOutcome(reward=float(done), terminated=done, success=True if done else None)


def add_reach_task(station: RobotSetup, config: ReachConfig, instruction: str = "") -> RobotSetup:
    """The station with the task ``reach``. Its expert goes straight to a goal in the space of its actions.

    Raises:
        SpecError: see `ReachRobotWrapper`.
    """
    robot = ReachRobotWrapper(station.robot, config)
    return replace(
        station, robot=robot, task=ReachTask(robot, station.task, instruction), make_expert=_expert_factory(robot)
    )


def _expert_factory(robot: ReachRobotWrapper) -> Callable[[int, float], ExpertPolicy] | None:
    spec = robot.spec
    joints = [spec.joint_delta[joint] for joint in robot.goal_joints] if spec.joint_delta else []
    steps = joints if robot.config.space == "joints" else list(spec.tool_delta)
    if not steps:
        return None
    low, high = np.array(spec.action.low), np.array(spec.action.high)

    def make(seed: int, noise: float) -> ExpertPolicy:
        rng = np.random.default_rng(seed)

        def expert(arrays: Mapping[str, Array]) -> Array:
            action = np.array(spec.neutral, np.float64)
            action[steps] = arrays[ENVIRONMENT_STATE][len(steps) :]
            action += noise * rng.uniform(low, high)
            clipped: Array = np.clip(action, low, high).astype(np.float32)
            return clipped

        return expert

    return make


def _goal_joints(spec: RobotSpec, config: ReachConfig) -> list[int]:
    """Which of the robot's joints are to be at the goal, by their number among them."""
    labels = [spec.feature(STATE).labels[index] for index in spec.limits.joint_position]
    if unknown := sorted(set(config.joints) - set(labels)):
        raise SpecError(f"reach: {spec.model} has no joint {unknown[0]!r}; there are {labels}")
    return [number for number, label in enumerate(labels) if not config.joints or label in config.joints]


def _goal_state_indices(spec: RobotSpec, config: ReachConfig, chosen: list[int]) -> list[int]:
    """Where in the state that is which is to be at the goal."""
    if any(feature.name == ENVIRONMENT_STATE for feature in spec.observation):
        raise SpecError(f"reach: {spec.model} has an {ENVIRONMENT_STATE} of its own")
    joints = [spec.limits.joint_position[joint] for joint in chosen]
    found = joints if config.space == "joints" else list(spec.limits.tool_position)
    if not found:
        raise SpecError(
            f"reach: {spec.model} does not say where its {config.space} is, in {spec.feature(STATE).labels}"
        )
    if not (spec.joint_target or spec.joint_delta or spec.tool_delta):
        raise SpecError(f"reach: the action of {spec.model} moves neither joints nor tool")
    return found


def _goal_bounds(spec: RobotSpec, config: ReachConfig, chosen: list[int], size: int) -> tuple[Array, Array]:
    limits = spec.limits
    bounds = (_select(limits.joint_low, chosen), _select(limits.joint_high, chosen))
    if config.space == "tool":
        bounds = (limits.workspace_low, limits.workspace_high)
    inner = () if len(bounds[0]) != size or not np.isfinite(bounds).all() else _inner_range(*bounds)
    low, high = (np.array(given or (), np.float64) for given in (config.low, config.high))
    if inner and not len(low) and not len(high):
        low, high = inner
    if len(low) != size or len(high) != size or not (low < high).all():
        raise SpecError(f"reach: `low` and `high` are {size} bounds each, from where goals are drawn")
    if len(bounds[0]) == size and ((low < bounds[0]) | (high > bounds[1])).any():
        least, most = (np.round(each, 4).tolist() for each in bounds)
        raise SpecError(
            f"reach: goals from `low` to `high` are out of reach: {spec.model} can be from {least} to {most}"
        )
    return low, high


def _select(bounds: tuple[float, ...], chosen: list[int]) -> tuple[float, ...]:
    return tuple(bounds[joint] for joint in chosen) if bounds else ()


def _inner_range(low: tuple[float, ...], high: tuple[float, ...]) -> tuple[Array, Array]:
    middle, half = (np.array(low) + high) / 2, (np.array(high) - low) / 2
    return middle - GOAL_RANGE_SHARE * half, middle + GOAL_RANGE_SHARE * half


def _tolerance(config: ReachConfig, span: Array) -> Array:
    if config.tolerance is not None:
        return np.full(len(span), config.tolerance)
    return np.full(len(span), TOOL_TOLERANCE_M) if config.space == "tool" else JOINT_TOLERANCE * span


def _max_steps(spec: RobotSpec, config: ReachConfig) -> Array:
    """The longest step of each joint that is moved by targets."""
    if not spec.joint_target:
        return np.empty(0)
    none = (np.inf,) * len(spec.joint_target)
    longest: Array = np.array(spec.limits.joint_velocity_max or none) * spec.period_s
    if spec.limits.action_rate_max:
        longest = np.minimum(longest, np.array(spec.limits.action_rate_max)[list(spec.joint_target)])
    if config.step_max is not None:
        longest = np.minimum(longest, config.step_max)
    if not np.isfinite(longest).all():
        raise SpecError(f"reach: {spec.model} has no greatest speed for its joints; give `step_max`")
    return longest


def _spec_with_goal(spec: RobotSpec, where: list[int], low: Array, high: Array, step: Array) -> RobotSpec:
    state = spec.feature(STATE)
    labels, units = [state.labels[i] for i in where], [state.units[i] for i in where]
    lowest = [min(state.low[i], a) for i, a in zip(where, low.tolist(), strict=True)]
    highest = [max(state.high[i], b) for i, b in zip(where, high.tolist(), strict=True)]
    goal = ArraySpec(
        name=ENVIRONMENT_STATE,
        labels=(*(f"goal_{label}" for label in labels), *(f"to_goal_{label}" for label in labels)),
        units=(*units, *units),
        low=(*low.tolist(), *(a - b for a, b in zip(low.tolist(), highest, strict=True))),
        high=(*high.tolist(), *(b - a for a, b in zip(lowest, high.tolist(), strict=True))),
        frame=state.frame,
    )
    with_goal = msgspec.structs.replace(spec, observation=(*spec.observation, goal))
    return _spec_with_joint_delta(with_goal, step) if spec.joint_target else with_goal


def _spec_with_joint_delta(spec: RobotSpec, step: Array) -> RobotSpec:
    """The same robot, its joints moved by steps instead of targets."""
    reach = dict(zip(spec.joint_target, step.tolist(), strict=True))
    action, each = spec.action, range(len(spec.action.labels))
    neutral, rate = spec.neutral or (0.0,) * len(each), spec.limits.action_rate_max
    return msgspec.structs.replace(
        spec,
        action=msgspec.structs.replace(
            action,
            labels=tuple(f"d_{action.labels[i]}" if i in reach else action.labels[i] for i in each),
            low=tuple(-reach[i] if i in reach else action.low[i] for i in each),
            high=tuple(reach.get(i, action.high[i]) for i in each),
        ),
        limits=msgspec.structs.replace(
            spec.limits, action_rate_max=tuple(2 * reach[i] if i in reach else rate[i] for i in each) if rate else ()
        ),
        neutral=tuple(0.0 if i in reach else neutral[i] for i in each),
        joint_target=(),
        joint_delta=spec.joint_target,
    )
