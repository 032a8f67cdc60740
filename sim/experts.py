"""Scripted experts for demonstrations; they use the observation only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from hal.errors import SpecError
from hal.robot import Observation
from hal.spec import STATE, Array
from sim.objects import BIN_HEIGHT_EDGES, CUBE_COLOURS, TASK_OBJECTS, SceneObject, is_in_bin, make_objects
from sim.robot import FORCE, GRIPPER_SET_WIDTH, GRIPPER_WIDTH, TOOL_POSITION, TOOL_VELOCITY, SimRobot, tracked_places

_CLOSED_M = 0.0
_UP = np.array([0.0, 0.0, 1.0])  # more than a period allows: full speed
_TARGET_LAG_S = 0.03  # the tool lags behind its target by this much times its speed
_ALIGNED_EDGES = 0.12
_FINE_SHARE = 0.1  # of the noise, while an object is being inserted


class Plan(NamedTuple):
    """The desired step of the tool (3,), m, unbounded; the gripper's opening, m; and a factor of the noise."""

    step: Array
    width_m: float
    noise: float = 1.0


class View:
    """An observation by names; positions (3,) in m.

    Attributes:
        tool: of the tool.
        lag: (3,) the way that the tool still goes after its last step.
        places: of the objects.
        force: (3,) on the gripper, N; 0 if it is not measured.
    """

    def __init__(self, observation: Observation, robot: SimRobot) -> None:
        state = observation.arrays[STATE].astype(float)
        self.tool, self.lag = state[TOOL_POSITION], _TARGET_LAG_S * state[TOOL_VELOCITY]
        self.width_m, self.set_width_m = float(state[GRIPPER_WIDTH]), float(state[GRIPPER_SET_WIDTH])
        self.places = tracked_places(observation, robot.config.objects)
        self.force = state[FORCE] if robot.config.has_wrench else np.zeros(3)


class ScriptedExpert(ABC):
    """A controller without memory: apart from noise, the action is a function of the observation.

    `noise` is the standard deviation of the disturbance of the tool's step, as a share of its bound. It spreads the
    demonstrations around the straight path, so that the learner sees how to return to it.
    """

    def __init__(self, task: str, robot: SimRobot, noise: float = 0.0, seed: int = 0) -> None:
        self._robot, self._action, self._arm = robot, robot.spec.action, robot.config.arm
        self._edge, self._open_m = self._arm.cube_edge_m, self._arm.gripper.width_max_m
        objects = make_objects(self._edge)
        self._objects = [objects[name] for name in TASK_OBJECTS[task]]
        self._noise = noise
        self._rng = np.random.default_rng(seed)

    def __call__(self, observation: Observation) -> Array:
        """float32 action within the action spec's bounds."""
        plan = self.plan(View(observation, self._robot))
        low, high = np.array(self._action.low), np.array(self._action.high)
        noise = self._rng.normal(0.0, 1.0, 3) * self._noise * plan.noise * high[:3]
        step = np.clip(plan.step, low[:3], high[:3]) + noise
        action: Array = np.clip(np.array([*step, plan.width_m]), low, high).astype(np.float32)
        return action

    @abstractmethod
    def plan(self, view: View) -> Plan:
        """What to do next."""

    def grasp(self, view: View, thing: SceneObject) -> Plan | None:
        """Above the object, down around it, and grip; None once it is gripped."""
        edge, way = self._edge, view.places[thing.name] - view.tool - view.lag
        aside = float(np.hypot(way[0], way[1]))
        squeezed = view.width_m - view.set_width_m > 0.15 * thing.grip_m
        if squeezed and 0.75 < view.width_m / thing.grip_m < 1.3 and aside < 0.75 * edge and abs(way[2]) < 0.75 * edge:
            return None
        if aside < 0.35 * edge and abs(way[2]) < 0.35 * edge:
            return Plan(way, _CLOSED_M)
        hover = min(1.5 * edge, max(0.0, 4.0 * (aside - 0.3 * edge)))
        return Plan(way + hover * _UP, self._open_m)

    def carry(self, way: Array, rise: float) -> Plan:
        """First up by `rise`, m, then across by `way` (2,), m."""
        return Plan(np.array([*(way if rise < 0.5 * self._edge else (0.0, 0.0)), rise]), _CLOSED_M)


class ReachExpert(ScriptedExpert):
    """Straight to the target."""

    def plan(self, view: View) -> Plan:
        return Plan(view.places["target"] - view.tool - view.lag, self._open_m)


class LiftExpert(ScriptedExpert):
    """Grip the task's first object, and up."""

    def plan(self, view: View) -> Plan:
        return self.grasp(view, self._objects[0]) or Plan(_UP, _CLOSED_M)


class TidyExpert(ScriptedExpert):
    """For each object: grip it, carry it above the bin's walls, lower it, and let go."""

    def plan(self, view: View) -> Plan:
        edge, goal = self._edge, view.places["bin"]
        pieces = self._objects[:-1]
        spread = np.linspace(-0.9, 0.9, len(pieces)) * edge if len(pieces) > 1 else (0.0,)
        for piece, offset in zip(pieces, spread, strict=True):
            place = view.places[piece.name]
            way, step = place - view.tool, self.grasp(view, piece)
            if not is_in_bin(place, goal, edge) or (step is None and place[2] > 1.2 * edge):
                return step or self._drop(view, goal + (offset, 0.0, 0.0))
            if np.linalg.norm(way) < 1.5 * edge:
                released = view.width_m > 1.3 * piece.grip_m
                return Plan(_UP if released else 0.0 * _UP, self._open_m)
        return Plan(_UP, self._open_m)

    def _drop(self, view: View, goal: Array) -> Plan:
        edge, way = self._edge, goal - view.tool - view.lag
        aside, height = float(np.hypot(way[0], way[1])), -float(way[2])
        if aside > 0.5 * edge:
            return self.carry(way[:2], (BIN_HEIGHT_EDGES + 1.5) * edge - height)
        lowered = (BIN_HEIGHT_EDGES + 0.3) * edge - height
        return Plan(np.array([*way[:2], lowered]), self._open_m if lowered > -0.3 * edge else _CLOSED_M)


class InsertExpert(ScriptedExpert):
    """Grip the object, carry it above its seat, and press it in gently; where it is blocked, search around."""

    def plan(self, view: View) -> Plan:
        piece, fixture = self._objects
        if (step := self.grasp(view, piece)) is not None:
            return step
        edge, seat = self._edge, view.places[fixture.name] + (0.0, 0.0, piece.seat_m)
        way = seat - view.places[piece.name] - view.lag
        aside, height = float(np.hypot(way[0], way[1])), -float(way[2])
        touches_m = fixture.top_m + piece.rest_m - piece.seat_m  # height above the seat at the first touch
        if aside > _ALIGNED_EDGES * edge:
            return self.carry(way[:2], touches_m + 0.6 * edge - height)
        if height > touches_m + 0.2 * edge:
            return Plan(np.array([*way[:2], touches_m + 0.1 * edge - height]), _CLOSED_M, _FINE_SHARE)
        return Plan(self._press(view, way), _CLOSED_M, _FINE_SHARE)

    def _press(self, view: View, way: Array) -> Array:
        """A step down that keeps the force on the object near a quarter of the limit, and a step aside to its seat."""
        edge, wanted = self._edge, 0.25 * self._arm.force_max_n
        push = float(view.force[2]) / wanted
        down = 0.1 * edge if push < 0.3 else 0.03 * edge * (1.0 - push)
        search = self._rng.normal(0.0, 0.02 * edge, 2) if push > 0.6 else np.zeros(2)
        return np.array([*(0.5 * way[:2] + search), -down])


EXPERTS: dict[str, type[ScriptedExpert]] = {
    "lift": LiftExpert,
    "reach": ReachExpert,
    "follow": ReachExpert,
    "place": TidyExpert,
    "tidy": TidyExpert,
    "peg": InsertExpert,
    "plug": InsertExpert,
    "cap": InsertExpert,
    **{f"lift_{colour}": LiftExpert for colour in CUBE_COLOURS},
}


def make_expert(task: str, robot: SimRobot, noise: float = 0.0, seed: int = 0) -> ScriptedExpert:
    """Make the expert of `robot` for the task called `task`. Raises SpecError if there is none."""
    if task not in EXPERTS:
        raise SpecError(f"no scripted expert for the task {task!r}; choose one of {sorted(EXPERTS)}")
    return EXPERTS[task](task, robot, noise, seed)
