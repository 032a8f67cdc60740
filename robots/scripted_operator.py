"""A scripted operator: an input device that drives a simulated robot by its task's expert, as a person would.

It takes over when an episode is late, and hands back at the episode's end, or if its expert fails for long. So
benchmarks and examples of corrections run without a person::

    robots: [{name: panda-0, task: lift, teleoperators: [{kind: scripted, after_steps: 25}]}]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hal.driver import RobotSetup
from hal.errors import SpecError
from hal.robot import Observation, Robot
from hal.settings import Count, read_settings
from hal.task import ExpertPolicy, Task, TaskOutcome
from hal.teleoperator import Teleoperator, TeleopInput

MAX_STEPS = 3000  # of one attempt


@dataclass(frozen=True)
class ScriptedOperatorConfig:
    """`after_steps`: of an episode, before the operator takes over."""

    after_steps: Count = 25


def with_scripted_operator(setup: RobotSetup, options: Mapping[str, Any]) -> RobotSetup:
    """`setup` with a scripted operator as its last input device. Raises SpecError: no expert, or an unknown option."""
    if not setup.task.has_expert:
        raise SpecError(
            f"teleoperators: the kind scripted needs a task with a scripted expert, and {setup.task.name!r} has none"
        )
    operator = ScriptedOperator(setup.robot, setup.task, read_settings(ScriptedOperatorConfig, options))
    return replace(setup, task=_OperatedTask(setup.task, operator), teleoperators=(*setup.teleoperators, operator))


class ScriptedOperator(Teleoperator):
    """See the module. Its input is the expert's action for the present observation."""

    def __init__(self, robot: Robot, task: Task, config: ScriptedOperatorConfig) -> None:
        self._robot, self._task, self._after_steps = robot, task, config.after_steps
        self._episodes = self._steps = 0
        self._drives = False
        self._expert: ExpertPolicy | None = None

    def connect(self) -> None:
        """There is no device."""

    def close(self) -> None:
        """There is no device."""

    def begin_episode(self) -> None:
        """An episode has begun."""
        self._expert = self._task.make_expert(self._robot, self._episodes, 0.0)
        self._episodes, self._steps = self._episodes + 1, 0

    def count_step(self) -> None:
        """A step was made, by any driver of the robot."""
        self._steps += 1

    def read(self) -> TeleopInput:
        """See `Teleoperator.read`."""
        still = np.zeros(self._robot.spec.action.shape, np.float32)
        if self._expert is None or not 0 <= self._steps - self._after_steps < MAX_STEPS:
            hands_back, self._drives = self._drives, False
            return TeleopInput(still, engaged=False, hands_back=hands_back)
        self._drives = True
        action = np.asarray(self._expert(self._robot.observe().arrays), np.float32)
        return TeleopInput(still, engaged=True, target=action)


class _OperatedTask(Task):
    """A task that tells the operator of its episodes and steps."""

    def __init__(self, task: Task, operator: ScriptedOperator) -> None:
        self._task, self._operator = task, operator
        self.has_expert, self.reads_observation = task.has_expert, task.reads_observation
        self.is_judged = task.is_judged
        self._describe()

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        self._task.reset(robot, rng)
        self._describe()
        self._operator.begin_episode()

    def evaluate(self, observation: Observation) -> TaskOutcome:
        self._operator.count_step()
        return self._task.evaluate(observation)

    @property
    def parts(self) -> tuple[Task, ...]:
        return self._task.parts

    def drawn_name(self, seed: int) -> str:
        return self._task.drawn_name(seed)

    def make_expert(self, robot: Robot, seed: int, noise: float) -> ExpertPolicy:
        return self._task.make_expert(robot, seed, noise)

    def _describe(self) -> None:
        task = self._task
        self.name, self.instruction, self.max_steps = task.name, task.instruction, task.max_steps
        self.sentences: tuple[str, ...] = task.sentences
