"""The interface of a task: reset the scene, and evaluate each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from hal.robot import Observation, Robot


@dataclass(frozen=True)
class TaskOutcome:
    """The evaluation of one step.

    Attributes:
        reward: of the step that led to the observation.
        terminated: the task has ended, by success or by failure; its value is not bootstrapped.
        success: True or False once known, else None.
        source: of the evaluation: ``rule``, ``person``, ``classifier``.
    """

    reward: float
    terminated: bool
    success: bool | None = None
    source: str = "rule"


class Task(ABC):
    """One task on one robot, in the driver process.

    Attributes:
        name: short, e.g. ``lift``.
        instruction: the text for a language-conditioned policy.
        max_steps: the episode is truncated after this many control periods.
    """

    name: str
    instruction: str
    max_steps: int

    @abstractmethod
    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        """Moves robot and scene to a start state drawn from `rng`. Blocks during the motion.

        During the motion it calls `robot.check_stop` in each control period and lets its errors pass.
        """

    @abstractmethod
    def evaluate(self, observation: Observation) -> TaskOutcome:
        """The outcome of the step that led to `observation`; never blocks."""
