"""A task: from a random pose, stand upright. Its scripted expert records demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from msgspec import Meta

from hal.robot import Observation, Robot
from hal.spec import STATE, Array
from hal.task import ExpertPolicy, Task, TaskOutcome
from robots.homing import move_home

START_RAD = 0.8


@dataclass(frozen=True)
class UprightSettings:
    """`tolerance_rad`: greatest angle of an upright joint."""

    tolerance_rad: Annotated[float, Meta(gt=0, lt=1)] = 0.1


class Upright(Task):
    """Reward 1 and the end of the episode when both joints are at 0."""

    name, instruction, max_steps = "upright", "stand upright", 60
    sentences = ("straighten both joints",)
    settings = UprightSettings
    has_expert = True

    def __init__(self, settings: UprightSettings) -> None:
        self._settings = settings

    @classmethod
    def for_robot(cls, robot: Robot, settings: UprightSettings) -> Self:
        return cls(settings)

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        """Move the robot to a start pose drawn from `rng`; a real cell also resets its objects here."""
        start = rng.uniform(-START_RAD, START_RAD, 2)
        move_home(robot, start.tolist(), robot.observe().arrays[STATE])

    def evaluate(self, observation: Observation) -> TaskOutcome:
        done = bool(np.abs(observation.arrays[STATE]).max() < self._settings.tolerance_rad)
        return TaskOutcome(reward=float(done), terminated=done, success=True if done else None)

    def make_expert(self, robot: Robot, seed: int, noise: float) -> ExpertPolicy:
        """An expert whose joint targets are 0, with normal noise."""
        rng, bounds = np.random.default_rng(seed), robot.spec.action

        def expert(observation: Mapping[str, Array]) -> Array:
            targets = noise * rng.standard_normal(2) * np.asarray(bounds.high)
            clipped: Array = np.clip(targets, bounds.low, bounds.high).astype(np.float32)
            return clipped

        return expert
