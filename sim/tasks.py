"""The tasks of the simulation: lift a cube by 10 cm, or bring the tool to a target in the air."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hal.robot import Observation, Robot
from hal.spec import ENVIRONMENT_STATE
from hal.task import Task, TaskOutcome
from sim.arms import panda
from sim.arms.arm import ArmModel
from sim.robot import require_scene


@dataclass(frozen=True)
class LiftConfig:
    """The limits of an episode; the areas are those of the arm (`sim.arms.arm.ArmModel`).

    Attributes:
        cube_yaw_rad: the cube is rotated by up to this much either way; the fingers straighten it.
        height_m: the cube counts as lifted at this height above its place on the table.
        grasp_m: greatest distance of the tool from the cube's centre, so that a throw does not count.
        max_steps: control periods.
    """

    cube_yaw_rad: float = 0.25
    height_m: float = 0.10
    grasp_m: float = 0.04
    max_steps: int = 50


class LiftTask(Task):
    """Reward 1 and the end of the episode when the cube is lifted; 0 and the end when it is out of the arm's reach."""

    name = "lift"
    instruction = "lift the cube"

    def __init__(self, arm: ArmModel = panda.ARM, config: LiftConfig | None = None) -> None:
        self.arm = arm
        self.config = config or LiftConfig()
        self.max_steps = self.config.max_steps

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        """Draw the tool's position, the cube's position and its yaw, in this order. Raises SpecError if the robot is
        not simulated."""
        sim, arm = require_scene(robot, "lift", self.arm), self.arm
        tool = rng.uniform(arm.tool_start_box.low, arm.tool_start_box.high)
        x, y = rng.uniform(*arm.cube_start_area)
        yaw = rng.uniform(-self.config.cube_yaw_rad, self.config.cube_yaw_rad)
        sim.world.reset(tool, np.array([x, y, arm.cube_edge_m / 2]), yaw)

    def evaluate(self, observation: Observation) -> TaskOutcome:
        tracked = observation.arrays[ENVIRONMENT_STATE]
        lifted = float(tracked[2]) >= self.arm.cube_edge_m / 2 + self.config.height_m
        if lifted and float(np.linalg.norm(tracked[3:6])) <= self.config.grasp_m:
            return TaskOutcome(reward=1.0, terminated=True, success=True)
        place, (low, high) = tracked[:2], self.arm.cube_reachable_area
        lost = bool((place < low).any() or (place > high).any() or tracked[2] < 0.0)
        return TaskOutcome(reward=0.0, terminated=lost, success=False if lost else None)


@dataclass(frozen=True)
class SimReachConfig:
    """The limits of an episode; the areas are those of the arm (`sim.arms.arm.ArmModel`).

    Attributes:
        near_m: success within this distance.
        max_steps: control periods.
    """

    near_m: float = 0.02
    max_steps: int = 30


class SimReachTask(Task):
    """Reward 1 and the end of the episode when the tool is at the target."""

    name = "reach"
    instruction = "reach the green target"

    def __init__(self, arm: ArmModel = panda.ARM, config: SimReachConfig | None = None) -> None:
        self.arm = arm
        self.config = config or SimReachConfig()
        self.max_steps = self.config.max_steps

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        """Draw the tool's position, then the target's. Raises SpecError if the robot is not in the reach scene."""
        sim, arm = require_scene(robot, "reach", self.arm), self.arm
        tool = rng.uniform(arm.tool_start_box.low, arm.tool_start_box.high)
        sim.world.reset(tool, rng.uniform(arm.target_box.low, arm.target_box.high))

    def evaluate(self, observation: Observation) -> TaskOutcome:
        near = float(np.linalg.norm(observation.arrays[ENVIRONMENT_STATE][3:6])) <= self.config.near_m
        return TaskOutcome(reward=float(near), terminated=near, success=True if near else None)
