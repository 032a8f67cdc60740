"""Lift the cube: hold it ten centimetres above the table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hal.robot import Observation, Robot
from hal.spec import ENVIRONMENT_STATE
from hal.task import Outcome, Task
from sim import panda
from sim.arm import Arm
from sim.robot import in_scene


@dataclass(frozen=True)
class LiftConfig:
    """How an episode starts and when it is over; where, is the arm's (`sim.arm.Arm`).

    Attributes:
        cube_yaw_rad: the cube is turned by up to this much either way; the fingers straighten it.
        height_m: the cube counts as lifted when it is this far above where it lies on the table.
        grasp_m: ... and its centre this near to the tool, so that a throw does not count.
        max_steps: control periods.
    """

    cube_yaw_rad: float = 0.25
    height_m: float = 0.10
    grasp_m: float = 0.04
    max_steps: int = 50


class Lift(Task):
    """Reward 1 and the end when the cube is held high; 0 and the end when it has left the reach of the arm."""

    name = "lift"
    sentence = "lift the cube"

    def __init__(self, arm: Arm = panda.ARM, config: LiftConfig | None = None) -> None:
        self.arm = arm
        self.config = config or LiftConfig()
        self.max_steps = self.config.max_steps

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        """Draws the tool's place, the cube's place and its turn, in this order. Raises SpecError off the simulation."""
        sim, arm = in_scene(robot, "lift", self.arm), self.arm
        tool = rng.uniform(arm.tool_starts.low, arm.tool_starts.high)
        x, y = rng.uniform(*arm.cube_places)
        yaw = rng.uniform(-self.config.cube_yaw_rad, self.config.cube_yaw_rad)
        sim.world.reset(tool, np.array([x, y, arm.cube_edge_m / 2]), yaw)

    def evaluate(self, observation: Observation) -> Outcome:
        tracked = observation.arrays[ENVIRONMENT_STATE]
        lifted = float(tracked[2]) >= self.arm.cube_edge_m / 2 + self.config.height_m
        if lifted and float(np.linalg.norm(tracked[3:6])) <= self.config.grasp_m:
            return Outcome(reward=1.0, terminated=True, success=True)
        place, (low, high) = tracked[:2], self.arm.cube_lost
        lost = bool((place < low).any() or (place > high).any() or tracked[2] < 0.0)
        return Outcome(reward=0.0, terminated=lost, success=False if lost else None)
