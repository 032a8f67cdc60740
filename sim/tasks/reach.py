"""Reach the target: bring the tool within two centimetres of a place in the air."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hal.robot import Observation, Robot
from hal.spec import ENVIRONMENT_STATE
from hal.task import Outcome, Task
from sim.robot import in_scene


@dataclass(frozen=True)
class ReachConfig:
    """Where an episode starts, in the base frame, and when it is over.

    Attributes:
        target_low_m, target_high_m: the target is drawn uniformly between them.
        tool_low_m, tool_high_m: the tool starts uniformly between them, gripper open.
        near_m: success within this distance.
        max_steps: control periods.
    """

    target_low_m: tuple[float, float, float] = (0.38, -0.16, 0.05)
    target_high_m: tuple[float, float, float] = (0.60, 0.16, 0.26)
    tool_low_m: tuple[float, float, float] = (0.43, -0.06, 0.15)
    tool_high_m: tuple[float, float, float] = (0.53, 0.06, 0.21)
    near_m: float = 0.02
    max_steps: int = 30


class Reach(Task):
    """Reward 1 and the end when the tool is at the target."""

    name = "reach"
    sentence = "reach the green target"

    def __init__(self, config: ReachConfig | None = None) -> None:
        self.config = config or ReachConfig()
        self.max_steps = self.config.max_steps

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        """Draws the tool's place, then the target's. Raises SpecError when the robot is not in the reach scene."""
        sim, config = in_scene(robot, "reach"), self.config
        tool = rng.uniform(config.tool_low_m, config.tool_high_m)
        sim.world.reset(tool, rng.uniform(config.target_low_m, config.target_high_m))

    def evaluate(self, observation: Observation) -> Outcome:
        near = float(np.linalg.norm(observation.arrays[ENVIRONMENT_STATE][3:6])) <= self.config.near_m
        return Outcome(reward=float(near), terminated=near, success=True if near else None)
