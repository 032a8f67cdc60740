"""The task `reach` for any robot with joint targets: a random goal, shown to the policy, has to be reached.

`ReachRobotWrapper` adds the goal to a robot's observations. It replaces joint targets by steps
(`RobotSpec.joint_delta`), so that an untrained policy stays near its start and learning carries over between places.
The safety kernel checks actions before the wrapper, with the wrapped robot's limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from hal.driver import RobotSetup, RobotSetupRequest
from hal.errors import SpecError
from hal.robot import Observation, Robot, StopLevel
from hal.settings import Count, Positive
from hal.spec import ENVIRONMENT_STATE, STATE, Array, ArraySpec, RobotSpec
from hal.task import ExpertPolicy, Task, TaskOutcome
from robots.delta_actions import add_step

REACH_TASK = "reach"
TOLERANCE_SHARE = 0.05  # of the range of goals
GOAL_RANGE_SHARE = 0.5  # share of each joint's range, around its middle, for goals
MAX_LEAD_STEPS = 3.0  # the target of a blocked joint is at most this many steps ahead of its measured position


@dataclass(frozen=True)
class ReachConfig:
    """Attributes:
    joints: labels, in the state, of the joints that must reach the goal; empty for all. The others may be anywhere.
    low, high: bounds of the goals, in the robot's units and joint order. Default: the inner half of each range.
    tolerance: of each joint; default: 5% of the range of goals.
    step_max: longest step of a joint per control period. Default: its speed limit, which is then in the embodiment.
    """

    joints: tuple[str, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    tolerance: Positive | None = None
    step_max: Positive | None = None
    max_steps: Count = 100


class ReachRobotWrapper(Robot):
    """A robot with a goal. Other calls go to the wrapped robot."""

    def __init__(self, robot: Robot, config: ReachConfig) -> None:
        """Raises SpecError if the robot has no joint targets, no range for goals, or a goal of its own."""
        self.robot, inner = robot, robot.spec
        robot.check_stop = lambda: self.check_stop()  # the present one: it changes
        if not inner.joint_target:
            raise SpecError(f"reach: the action of {inner.model} has no joint targets")
        if any(feature.name == ENVIRONMENT_STATE for feature in inner.observation):
            raise SpecError(f"reach: {inner.model} already has an {ENVIRONMENT_STATE}")
        self._elements, self._state_indices = list(inner.joint_target), list(inner.limits.joint_position)
        labels = [inner.feature(STATE).labels[index] for index in self._state_indices]
        if unknown := sorted(set(config.joints) - set(labels)):
            raise SpecError(f"reach: {inner.model} has no joint {unknown[0]!r}; choose from {labels}")
        self.goal_joints = [i for i, label in enumerate(labels) if not config.joints or label in config.joints]
        self._goal_indices = [self._state_indices[joint] for joint in self.goal_joints]
        self.goal_low, self.goal_high = _goal_bounds(inner, config, self.goal_joints)
        span = self.goal_high - self.goal_low
        self.tolerance = TOLERANCE_SHARE * span if config.tolerance is None else np.full(len(span), config.tolerance)
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
        """See `hal.robot.Robot`. A step starts at the last target and is shorter if the robot does not keep up."""
        self.spec.action.validate(action)
        seen = (self._last_observation or self.robot.observe()).arrays[STATE]
        measured = seen[self._state_indices].astype(np.float64)
        base = measured if self._target is None else self._target
        steps = np.clip(action[self._elements], -self._step, self._step)
        wanted = action.copy()
        wanted[self._elements], _ = add_step(base, measured, steps, MAX_LEAD_STEPS * self._step)
        applied = self.robot.command(wanted).copy()
        self._target = applied[self._elements].astype(np.float64)
        applied[self._elements] = np.clip(self._target - base, -self._step, self._step)
        return np.clip(applied, self._low, self._high).astype(np.float32)

    def stop(self, level: StopLevel) -> None:
        self._target = None
        self.robot.stop(level)

    def close(self) -> None:
        self.robot.close()

    def reset_with_task(self, task: Task, rng: np.random.Generator) -> None:
        """Reset the wrapped robot by its own task, see `Task.reset`. Steps start at the position after it."""
        self._target = None
        task.reset(self.robot, rng)


class ReachTask(Task):
    """Reach the goal: reward 1 and success within its tolerance.

    A reset runs the reset of the robot's own task, which may move it home, and draws a new goal.
    """

    name = REACH_TASK
    has_expert = True

    def __init__(self, robot: ReachRobotWrapper, base_task: Task, instruction: str, max_steps: int) -> None:
        """`base_task`: a task of the wrapped robot."""
        self._robot, self._own = robot, base_task
        self.instruction, self.max_steps = instruction or "move to the goal", max_steps

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        self._robot.reset_with_task(self._own, rng)
        self._robot.goal = rng.uniform(self._robot.goal_low, self._robot.goal_high)

    def evaluate(self, observation: Observation) -> TaskOutcome:
        way = observation.arrays[ENVIRONMENT_STATE][len(self._robot.goal) :]
        done = bool((np.abs(way) <= self._robot.tolerance).all())
        return TaskOutcome(reward=float(done), terminated=done, success=True if done else None)

    def make_expert(self, robot: Robot, seed: int, noise: float) -> ExpertPolicy:
        """Straight to the goal."""
        spec, rng = self._robot.spec, np.random.default_rng(seed)
        elements = [spec.joint_delta[joint] for joint in self._robot.goal_joints]
        low, high = np.array(spec.action.low), np.array(spec.action.high)

        def expert(arrays: Mapping[str, Array]) -> Array:
            action = np.array(spec.neutral, np.float64)
            action[elements] = arrays[ENVIRONMENT_STATE][len(elements) :]
            clipped: Array = np.clip(action + noise * rng.uniform(low, high), low, high).astype(np.float32)
            return clipped

        return expert


def wants_reach(request: RobotSetupRequest) -> bool:
    """Whether the robot's task is ``reach``. Raises SpecError if it is one of several: it changes the robot's spec."""
    names = [task.name for task in request.tasks]
    if REACH_TASK in names and len(names) > 1:
        raise SpecError(f"task: {REACH_TASK!r} adds a goal to the robot's observations; name it alone")
    return REACH_TASK in names


def add_reach_task(setup: RobotSetup, config: ReachConfig, instruction: str = "") -> RobotSetup:
    """Add the task ``reach`` to a robot. Its scripted expert moves straight to the goal.

    Raises:
        SpecError: see `ReachRobotWrapper`.
    """
    robot = ReachRobotWrapper(setup.robot, config)
    return replace(setup, robot=robot, task=ReachTask(robot, setup.task, instruction, config.max_steps))


def _goal_bounds(spec: RobotSpec, config: ReachConfig, chosen: list[int]) -> tuple[Array, Array]:
    size = len(chosen)
    least, most = np.array(spec.limits.joint_low)[chosen], np.array(spec.limits.joint_high)[chosen]
    low, high = (np.array(given or (), np.float64) for given in (config.low, config.high))
    if not len(low) and not len(high):
        middle, half = (least + most) / 2, (most - least) / 2
        low, high = middle - GOAL_RANGE_SHARE * half, middle + GOAL_RANGE_SHARE * half
    if len(low) != size or len(high) != size or not np.isfinite([low, high]).all() or not (low < high).all():
        raise SpecError(f"reach: set `low` and `high` to {size} bounds each, with low < high")
    if ((low < least) | (high > most)).any():
        reach = f"{np.round(least, 4).tolist()} to {np.round(most, 4).tolist()}"
        raise SpecError(f"reach: goals from `low` to `high` are out of reach: the range of {spec.model} is {reach}")
    return low, high


def _max_steps(spec: RobotSpec, config: ReachConfig) -> Array:
    """The longest step of each joint."""
    unlimited = (np.inf,) * len(spec.joint_target)
    longest: Array = np.array(spec.limits.joint_velocity_max or unlimited) * spec.period_s
    if spec.limits.action_rate_max:
        longest = np.minimum(longest, np.array(spec.limits.action_rate_max)[list(spec.joint_target)])
    longest = np.minimum(longest, np.inf if config.step_max is None else config.step_max)
    if not np.isfinite(longest).all():
        raise SpecError(f"reach: {spec.model} has no speed limit for its joints; set `step_max`")
    return longest


def _spec_with_goal(spec: RobotSpec, where: list[int], low: Array, high: Array, step: Array) -> RobotSpec:
    """The same robot with a goal, and with joint steps instead of joint targets."""
    state, action, limits = spec.feature(STATE), spec.action, spec.limits
    labels, units = [state.labels[i] for i in where], [state.units[i] for i in where]
    most_up = high - np.minimum([state.low[i] for i in where], low)
    most_down = low - np.maximum([state.high[i] for i in where], high)
    goals = zip((f"goal_{label}" for label in labels), units, low.tolist(), high.tolist(), strict=True)
    ways = zip((f"to_goal_{label}" for label in labels), units, most_down.tolist(), most_up.tolist(), strict=True)
    goal = ArraySpec.from_rows(ENVIRONMENT_STATE, (*goals, *ways), state.frame)
    reach, each = dict(zip(spec.joint_target, step.tolist(), strict=True)), range(len(action.labels))
    neutral, rate = spec.neutral or (0.0,) * len(each), limits.action_rate_max
    steps = msgspec.structs.replace(
        action,
        labels=tuple(f"d_{action.labels[i]}" if i in reach else action.labels[i] for i in each),
        low=tuple(-reach[i] if i in reach else action.low[i] for i in each),
        high=tuple(reach.get(i, action.high[i]) for i in each),
    )
    rates = tuple(2 * reach[i] if i in reach else rate[i] for i in each) if rate else ()
    return msgspec.structs.replace(
        spec,
        observation=(*spec.observation, goal),
        action=steps,
        limits=msgspec.structs.replace(limits, action_rate_max=rates),
        neutral=tuple(0.0 if i in reach else neutral[i] for i in each),
        joint_target=(),
        joint_delta=spec.joint_target,
    )
