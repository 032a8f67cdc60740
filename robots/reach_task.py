"""The task `reach` for any robot that moves its joints or tool: a random goal, shown to the policy, has to be reached.

`ReachRobotWrapper` adds the goal to a robot's observations. It replaces joint targets by steps
(`RobotSpec.joint_delta`), so that an untrained policy stays near its start and learning carries over between places.
The safety kernel checks actions before the wrapper, with the wrapped robot's limits.
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
GOAL_RANGE_SHARE = 0.5  # share of each joint's range, around its middle, for goals
MAX_LEAD_STEPS = 3.0  # the target of a blocked joint is at most this many steps ahead of its measured position


@dataclass(frozen=True)
class ReachConfig:
    """Attributes:
    space: of the goal: joints, or tool for a robot with the tool's position in its state.
    joints: labels, in the state, of the joints that must reach the goal; empty for all. The others may be anywhere.
    low, high: bounds of the goals, in the space's units and the robot's joint order. Default: the inner half of each
    joint's range, or of the workspace.
    tolerance: of each joint (default: 5% of the range of goals) or of the tool (0.03 m).
    step_max: longest step of a joint per control period. Default: its speed limit.
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
            raise ValueError("reach: tolerance and step_max must be above 0")


class ReachRobotWrapper(Robot):
    """A robot with a goal. Other calls go to the wrapped robot."""

    def __init__(self, robot: Robot, config: ReachConfig) -> None:
        """Raises SpecError if the robot has no joints to move, no range for goals, or a goal of its own."""
        self.robot, self.config = robot, config
        inner = robot.spec
        self.goal_joints = _goal_joints(inner, config)
        self._goal_indices = _goal_state_indices(inner, config, self.goal_joints)
        self.goal_low, self.goal_high = _goal_bounds(inner, config, self.goal_joints, len(self._goal_indices))
        self.tolerance = _tolerance(config, self.goal_high - self.goal_low)
        self._joint_elements = list(inner.joint_target)
        self._state_indices = list(inner.limits.joint_position)
        self._step = _max_steps(inner, config)
        self.spec = _spec_with_goal(inner, self._goal_indices, self.goal_low, self.goal_high, self._step)
        self._low, self._high = (np.array(each, np.float32) for each in (self.spec.action.low, self.spec.action.high))
        self._target: Array | None = None
        self._last_observation: Observation | None = None
        self.goal: Array = (self.goal_low + self.goal_high) / 2

    def connect(self) -> None:
        self.robot.connect()
        self._target = None

    def observe(self) -> Observation:
        observed = self._last_observation = self.robot.observe()
        way = self.goal - observed.arrays[STATE][self._goal_indices]
        goal = np.concatenate([self.goal, way]).astype(np.float32)
        return replace(observed, arrays={**observed.arrays, ENVIRONMENT_STATE: goal})

    def command(self, action: Array) -> Array:
        self.spec.action.validate(action)
        if not self._joint_elements:
            return self.robot.command(action)
        base = self._step_start()
        wanted = action.copy()
        wanted[self._joint_elements] = base + np.clip(action[self._joint_elements], -self._step, self._step)
        applied = self.robot.command(wanted).copy()
        self._target = applied[self._joint_elements].astype(np.float64)
        applied[self._joint_elements] = np.clip(self._target - base, -self._step, self._step)
        return np.clip(applied, self._low, self._high).astype(np.float32)

    def stop(self, level: StopLevel) -> None:
        self._target = None
        self.robot.stop(level)

    def close(self) -> None:
        self.robot.close()

    def reset_with_task(self, task: Task, rng: np.random.Generator) -> None:
        """Reset the wrapped robot by its own task, see `Task.reset`. Steps start at the position after it."""
        self._target = None
        self.robot.check_stop = self.check_stop
        task.reset(self.robot, rng)

    def distance_in_tolerances(self, observation: Observation) -> float:
        """The distance to the goal in `observation`, in tolerances: at most 1 counts as reached."""
        way = observation.arrays[ENVIRONMENT_STATE][len(self._goal_indices) :]
        if self.config.space == "tool":
            return float(np.linalg.norm(way / self.tolerance))
        return float(np.abs(way / self.tolerance).max())

    def _step_start(self) -> Array:
        """The start of a step: the last target, as far as the robot keeps up with it."""
        measured = (
            (self._last_observation or self.robot.observe()).arrays[STATE][self._state_indices].astype(np.float64)
        )
        if self._target is None:
            return measured
        lead = MAX_LEAD_STEPS * self._step
        result: Array = np.clip(self._target, measured - lead, measured + lead)
        return result


class ReachTask(Task):
    """Reach the goal: reward 1 and success within its tolerance.

    A reset runs the reset of the robot's own task, which may move it home, and draws a new goal.
    """

    name = REACH_TASK

    def __init__(self, robot: ReachRobotWrapper, base_task: Task, instruction: str) -> None:
        """`base_task`: a task of the wrapped robot."""
        self._robot, self._own = robot, base_task
        self.instruction, self.max_steps = instruction or "move to the goal", robot.config.max_steps

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        self._robot.reset_with_task(self._own, rng)
        self._robot.goal = rng.uniform(self._robot.goal_low, self._robot.goal_high)

    def evaluate(self, observation: Observation) -> TaskOutcome:
        done = self._robot.distance_in_tolerances(observation) <= 1
        return TaskOutcome(reward=float(done), terminated=done, success=True if done else None)


def add_reach_task(setup: RobotSetup, config: ReachConfig, instruction: str = "") -> RobotSetup:
    """Add the task ``reach`` to a robot. Its scripted expert moves straight to the goal, if the actions have the goal's
    space.

    Raises:
        SpecError: see `ReachRobotWrapper`.
    """
    robot = ReachRobotWrapper(setup.robot, config)
    return replace(
        setup, robot=robot, task=ReachTask(robot, setup.task, instruction), make_expert=_expert_factory(robot)
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
    """The numbers of the robot's joints that must reach the goal."""
    labels = [spec.feature(STATE).labels[index] for index in spec.limits.joint_position]
    if unknown := sorted(set(config.joints) - set(labels)):
        raise SpecError(f"reach: {spec.model} has no joint {unknown[0]!r}; choose from {labels}")
    return [number for number, label in enumerate(labels) if not config.joints or label in config.joints]


def _goal_state_indices(spec: RobotSpec, config: ReachConfig, chosen: list[int]) -> list[int]:
    """The state indices of the elements that must reach the goal."""
    if any(feature.name == ENVIRONMENT_STATE for feature in spec.observation):
        raise SpecError(f"reach: {spec.model} already has an {ENVIRONMENT_STATE}")
    joints = [spec.limits.joint_position[joint] for joint in chosen]
    found = joints if config.space == "joints" else list(spec.limits.tool_position)
    if not found:
        raise SpecError(f"reach: {spec.model} has no position of its {config.space} in {spec.feature(STATE).labels}")
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
        raise SpecError(f"reach: set `low` and `high` to {size} bounds each, with low < high")
    if len(bounds[0]) == size and ((low < bounds[0]) | (high > bounds[1])).any():
        least, most = (np.round(each, 4).tolist() for each in bounds)
        raise SpecError(
            f"reach: goals from `low` to `high` are out of reach: the range of {spec.model} is {least} to {most}"
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
    """The longest step of each joint with a target."""
    if not spec.joint_target:
        return np.empty(0)
    none = (np.inf,) * len(spec.joint_target)
    longest: Array = np.array(spec.limits.joint_velocity_max or none) * spec.period_s
    if spec.limits.action_rate_max:
        longest = np.minimum(longest, np.array(spec.limits.action_rate_max)[list(spec.joint_target)])
    if config.step_max is not None:
        longest = np.minimum(longest, config.step_max)
    if not np.isfinite(longest).all():
        raise SpecError(f"reach: {spec.model} has no speed limit for its joints; set `step_max`")
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
    """The same robot with joint steps instead of joint targets."""
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
