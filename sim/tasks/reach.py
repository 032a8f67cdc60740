"""Reach the target: bring the tool within two centimetres of a place in the air."""

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
class ReachConfig:
    """When an episode is over; where it starts, is the arm's (`sim.arm.Arm`).

    Attributes:
        near_m: success within this distance.
        max_steps: control periods.
    """

    near_m: float = 0.02
    max_steps: int = 30


class Reach(Task):
    """Reward 1 and the end when the tool is at the target."""

    name = "reach"
    sentence = "reach the green target"

    def __init__(self, arm: Arm = panda.ARM, config: ReachConfig | None = None) -> None:
        self.arm = arm
        self.config = config or ReachConfig()
        self.max_steps = self.config.max_steps

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        """Draws the tool's place, then the target's. Raises SpecError when the robot is not in the reach scene."""
        sim, arm = in_scene(robot, "reach", self.arm), self.arm
        tool = rng.uniform(arm.tool_starts.low, arm.tool_starts.high)
        sim.world.reset(tool, rng.uniform(arm.targets.low, arm.targets.high))

    def evaluate(self, observation: Observation) -> Outcome:
        near = float(np.linalg.norm(observation.arrays[ENVIRONMENT_STATE][3:6])) <= self.config.near_m
        return Outcome(reward=float(near), terminated=near, success=True if near else None)
