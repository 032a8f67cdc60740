"""A task that a person resets and judges."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from hal.robot import Observation, Robot, StopLevel
from hal.task import Task, TaskOutcome


@runtime_checkable
class SupportsHoming(Protocol):
    """A robot with a home pose."""

    def go_home(self) -> None:
        """Move to the home pose, if one is configured, and hold. Blocks; calls `Robot.check_stop` periodically.

        Raises EmergencyStopped if the robot does not arrive: a person must look at it.
        """


class HumanJudgedTask(Task):
    """Runs until a person marks success or failure or requests a reset, or until `max_steps`; the reward is always 0.

    A reset moves a robot with a home pose there and holds any other. A person resets the scene, and the robot without a
    home pose.
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
