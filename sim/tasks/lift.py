"""Lift the cube: hold it ten centimetres above the table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hal.robot import Observation, Robot
from hal.spec import ENVIRONMENT_STATE
from hal.task import Outcome, Task
from sim.robot import in_scene

CUBE_HALF_M = 0.02


@dataclass(frozen=True)
class LiftConfig:
    """Where an episode starts, in the base frame, and when it is over.

    Attributes:
        cube_low_m, cube_high_m: the cube's centre on the table, x and y, is drawn uniformly between them.
        cube_yaw_rad: the cube is turned by up to this much either way; the fingers straighten it.
        tool_low_m, tool_high_m: the tool starts uniformly between them, gripper open.
        height_m: the cube counts as lifted when it is this far above where it lies on the table.
        grasp_m: ... and its centre this near to the tool, so that a throw does not count.
        lost_low_m, lost_high_m: the episode has failed when the cube's x and y leave this part of the table.
        max_steps: control periods.
    """

    cube_low_m: tuple[float, float] = (0.40, -0.10)
    cube_high_m: tuple[float, float] = (0.60, 0.10)
    cube_yaw_rad: float = 0.25
    tool_low_m: tuple[float, float, float] = (0.43, -0.06, 0.15)
    tool_high_m: tuple[float, float, float] = (0.53, 0.06, 0.21)
    height_m: float = 0.10
    grasp_m: float = 0.04
    lost_low_m: tuple[float, float] = (0.32, -0.22)
    lost_high_m: tuple[float, float] = (0.66, 0.22)
    max_steps: int = 50


class Lift(Task):
    """Reward 1 and the end when the cube is held high; 0 and the end when it has left the reach of the arm."""

    name = "lift"
    sentence = "lift the cube"

    def __init__(self, config: LiftConfig | None = None) -> None:
        self.config = config or LiftConfig()
        self.max_steps = self.config.max_steps

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        """Draws the tool's place, the cube's place and its turn, in this order. Raises SpecError off the simulation."""
        sim, config = in_scene(robot, "lift"), self.config
        tool = rng.uniform(config.tool_low_m, config.tool_high_m)
        x, y = rng.uniform(config.cube_low_m, config.cube_high_m)
        yaw = rng.uniform(-config.cube_yaw_rad, config.cube_yaw_rad)
        sim.world.reset(tool, np.array([x, y, CUBE_HALF_M]), yaw)

    def evaluate(self, observation: Observation) -> Outcome:
        tracked = observation.arrays[ENVIRONMENT_STATE]
        lifted = float(tracked[2]) >= CUBE_HALF_M + self.config.height_m
        if lifted and float(np.linalg.norm(tracked[3:6])) <= self.config.grasp_m:
            return Outcome(reward=1.0, terminated=True, success=True)
        place, config = tracked[:2], self.config
        lost = bool((place < config.lost_low_m).any() or (place > config.lost_high_m).any() or tracked[2] < 0.0)
        return Outcome(reward=0.0, terminated=lost, success=False if lost else None)
