"""What a robot is asked to do, and how one knows that it was done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from hal.robot import Observation, Robot


@dataclass(frozen=True)
class TaskOutcome:
    """The verdict on one step.

    Attributes:
        reward: of the step that led to the observation.
        terminated: the task has ended (done, or failed for good); its value is not bootstrapped.
        success: True or False once known, else None.
        source: who said so: ``rule``, ``person``, ``classifier``.
    """

    reward: float
    terminated: bool
    success: bool | None = None
    source: str = "rule"


class Task(ABC):
    """One task on one robot; lives in the driver process beside the robot.

    Attributes:
        name: short, e.g. ``lift``.
        instruction: the instruction that a language-conditioned policy is given.
        max_steps: the episode is truncated after this many control periods.
    """

    name: str
    instruction: str
    max_steps: int

    @abstractmethod
    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        """Brings robot and scene to a start drawn from `rng`. Blocks while the robot moves there.

        While it does, `robot.attend` is called, or the e-stop would wait; what that raises passes through.
        """

    @abstractmethod
    def evaluate(self, observation: Observation) -> TaskOutcome:
        """Judges the step that led to `observation`; never blocks."""
