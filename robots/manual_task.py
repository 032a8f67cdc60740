"""The task of a robot that nothing but a person watches: somebody else says what was done, and puts the scene right."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from hal.robot import Observation, Robot, StopLevel
from hal.task import Task, TaskOutcome


@runtime_checkable
class SupportsHoming(Protocol):
    """A robot that knows a pose to start from."""

    def go_home(self) -> None:
        """Moves there where one is configured, and holds. Blocks, and calls `Robot.attend` meanwhile.

        Raises EmergencyStopped where it does not get there: a person is to look at it.
        """


class HumanJudgedTask(Task):
    """Goes on until a person marks success or failure, asks for a reset, or `max_steps` have passed; rewards nothing.

    A reset brings a robot home that can go there, and lets any other hold where it is: a person brings robot and scene
    to their start.
    """

    def __init__(self, name: str, instruction: str, max_steps: int) -> None:
        self.name, self.instruction, self.max_steps = name, instruction, max_steps

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        if isinstance(robot, SupportsHoming):
            robot.go_home()
        else:
            robot.stop(StopLevel.HOLD)

    def evaluate(self, observation: Observation) -> TaskOutcome:
        return TaskOutcome(reward=0.0, terminated=False)
