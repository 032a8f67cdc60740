"""Scripted experts for demonstrations; they use the observation only."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from hal.errors import SpecError
from hal.robot import Observation
from hal.spec import ENVIRONMENT_STATE, STATE, Array
from sim.robot import GRIPPER_SET_WIDTH, GRIPPER_WIDTH, TOOL_VELOCITY, SimRobot

_CLOSED_M = 0.0
_LIFT_STEP_M = 1.0  # more than a period allows: full speed
_TARGET_LAG_S = 0.03  # the tool lags behind its target by this much times its speed


class ScriptedExpert(ABC):
    """A controller without memory: apart from noise, the action is a function of the observation.

    `noise` is the standard deviation of the disturbance of the tool's step, as a share of its bound. It spreads the
    demonstrations around the straight path, so that the learner sees how to return to it.
    """

    def __init__(self, robot: SimRobot, noise: float = 0.0, seed: int = 0) -> None:
        self._action = robot.spec.action
        self._open_m = robot.config.arm.gripper.width_max_m
        self._cube_m = robot.config.arm.cube_edge_m
        self._noise = noise
        self._rng = np.random.default_rng(seed)

    def __call__(self, observation: Observation) -> Array:
        """float32 action within the action spec's bounds."""
        step, width = self.plan(observation)
        low, high = np.array(self._action.low), np.array(self._action.high)
        step = np.clip(step, low[:3], high[:3]) + self._rng.normal(0.0, 1.0, 3) * self._noise * high[:3]
        action: Array = np.clip(np.array([*step, width]), low, high).astype(np.float32)
        return action

    @abstractmethod
    def plan(self, observation: Observation) -> tuple[Array, float]:
        """The desired step of the tool (3,), m, unbounded, and the gripper's opening, m."""


class ReachExpert(ScriptedExpert):
    """Straight to the target."""

    def plan(self, observation: Observation) -> tuple[Array, float]:
        return _to_object(observation), self._open_m


class LiftExpert(ScriptedExpert):
    """Above the cube, down around it, grip, and up."""

    def plan(self, observation: Observation) -> tuple[Array, float]:
        way, edge = _to_object(observation), self._cube_m
        state = observation.arrays[STATE]
        aside = float(np.hypot(way[0], way[1]))
        gripped = state[GRIPPER_WIDTH] - state[GRIPPER_SET_WIDTH] > 0.15 * edge and state[GRIPPER_WIDTH] > 0.75 * edge
        if gripped and aside < 0.75 * edge and abs(way[2]) < 0.75 * edge:
            return np.array([0.0, 0.0, _LIFT_STEP_M]), _CLOSED_M
        if aside < 0.35 * edge and abs(way[2]) < 0.35 * edge:
            return way, _CLOSED_M
        hover = min(1.5 * edge, max(0.0, 4.0 * (aside - 0.3 * edge)))
        return way + np.array([0.0, 0.0, hover]), self._open_m


def make_expert(task: str, robot: SimRobot, noise: float = 0.0, seed: int = 0) -> ScriptedExpert:
    """Make the expert of `robot` for the task called `task`. Raises SpecError if there is none."""
    experts: dict[str, type[ScriptedExpert]] = {"lift": LiftExpert, "reach": ReachExpert}
    if task not in experts:
        raise SpecError(f"no scripted expert for the task {task!r}; choose one of {sorted(experts)}")
    return experts[task](robot, noise, seed)


def _to_object(observation: Observation) -> Array:
    """The vector from the tool's current target to the object, m."""
    way: Array = observation.arrays[ENVIRONMENT_STATE][3:6].astype(float)
    return way - _TARGET_LAG_S * observation.arrays[STATE][TOOL_VELOCITY]
