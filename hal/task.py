"""The interface of a task: reset the scene, and evaluate each step. A robot may have several (`TaskMix`).

A run's config names a robot's tasks. A driver has tasks of its own, and an installed package adds one by an entry point
of the group ``user_sys.tasks`` that names a subclass of `Task`, with typed settings (`build_task`).
`hal.conformance` has the test suite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from hal.errors import SpecError
from hal.robot import Observation, Robot
from hal.settings import is_plugin, load_plugin, read_settings
from hal.spec import Array

TASK_GROUP = "user_sys.tasks"

ExpertPolicy = Callable[[Mapping[str, Array]], Array]
"""A scripted expert: maps the observation's arrays to an action."""


@dataclass(frozen=True)
class TaskOutcome:
    """The evaluation of one step.

    Attributes:
        reward: of the step that led to the observation.
        terminated: the task has ended, by success or by failure; its value is not bootstrapped.
        success: True or False once known, else None.
        source: of the evaluation: ``rule``, ``person``, ``classifier``.
        truncated: the task has ended by its own limit of steps or time; its value is bootstrapped.
        help: why the robot needs a person, e.g. ``the cube has left the table``; in a run it then holds and shows this.
    """

    reward: float
    terminated: bool
    success: bool | None = None
    source: str = "rule"
    truncated: bool = False
    help: str = ""


@dataclass(frozen=True)
class NoTaskSettings:
    """The settings of a task without any."""


class Task(ABC):
    """One task on one robot, in the driver process.

    Attributes:
        name: short, of letters, digits and ``._-``, e.g. ``lift``.
        instruction: the text for a language-conditioned policy.
        max_steps: the episode is truncated after this many control periods.
        sentences: other texts that mean the same as `instruction`.
        settings: the dataclass of its options; all fields have defaults.
        has_expert: whether `make_expert` gives a scripted expert.
        reads_observation: whether the observations of an episode decide what `evaluate` returns.
        is_judged: whether a person decides on success, so that `evaluate` never does.
    """

    name: str
    instruction: str
    max_steps: int
    sentences: tuple[str, ...] = ()
    settings: ClassVar[type[Any]] = NoTaskSettings
    has_expert: bool = False
    reads_observation: bool = True
    is_judged: bool = False

    @classmethod
    def for_robot(cls, robot: Robot, settings: Any) -> Self:
        """Builds the task that a config names for `robot`, which is not connected. `settings` are of `settings`' class.

        Raises:
            SpecError: the task does not suit the robot.
        """
        return cls()

    @property
    def parts(self) -> tuple[Task, ...]:
        """The tasks of which each reset draws one: itself, or those of a `TaskMix`, also of a wrapped one."""
        return (self,)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tasks of which each reset draws one."""
        return tuple(part.name for part in self.parts)

    def drawn_name(self, seed: int) -> str:
        """The name of the task that a reset with ``numpy.random.default_rng(seed)`` draws."""
        return self.name

    @abstractmethod
    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        """Moves robot and scene to a start state drawn from `rng`. Blocks during the motion.

        During the motion it calls `robot.check_stop` in each control period and lets its errors pass.
        """

    @abstractmethod
    def evaluate(self, observation: Observation) -> TaskOutcome:
        """The outcome of the step that led to `observation`; never blocks."""

    def make_expert(self, robot: Robot, seed: int, noise: float) -> ExpertPolicy:
        """A scripted expert for the episode after the next reset.

        Args:
            noise: standard deviation of the noise on its actions, as a share of the action's bounds.

        Raises:
            SpecError: there is none.
        """
        raise SpecError(f"the task {self.name!r} has no scripted expert")


@dataclass(frozen=True)
class TaskRequest:
    """One of a robot's tasks, as a run's config names it.

    Attributes:
        name: of the driver's tasks, or of an installed package's.
        options: of the task.
        sentence: the instruction; empty for the task's own.
        paraphrase: the instruction is drawn in each episode from the task's `sentences` and its `instruction`.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    sentence: str = ""
    paraphrase: bool = False


def drawn_task(seed: int, tasks: int) -> int:
    """Which of so many tasks of a `TaskMix` a reset with ``numpy.random.default_rng(seed)`` draws, counted from 0."""
    return int(np.random.default_rng(seed).integers(tasks))


class TaskMix(Task):
    """Several tasks of one robot, of which each reset draws one.

    `name`, `instruction` and `max_steps` are those of the task that was drawn last. The draw is the reset's first use
    of its random generator, so the episode's seed decides it.
    """

    def __init__(self, tasks: Sequence[Task], paraphrased: Sequence[Task] = ()) -> None:
        """`paraphrased`: those of `tasks` whose instruction is drawn too."""
        self.tasks, self._paraphrased = tuple(tasks), tuple(paraphrased)
        self.has_expert = all(task.has_expert for task in self.tasks)
        self.is_judged = any(task.is_judged for task in self.tasks)
        self._select(self.tasks[0], self.tasks[0].instruction)

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        task = self.tasks[int(rng.integers(len(self.tasks)))]
        texts = [task.instruction]
        if task in self._paraphrased:
            texts = list(dict.fromkeys((task.instruction, *task.sentences)))
        self._select(task, texts[int(rng.integers(len(texts)))])
        task.reset(robot, rng)

    @property
    def parts(self) -> tuple[Task, ...]:
        """See `Task.parts`."""
        return self.tasks

    def drawn_name(self, seed: int) -> str:
        """See `Task.drawn_name`."""
        return self.names[drawn_task(seed, len(self.tasks))]

    def evaluate(self, observation: Observation) -> TaskOutcome:
        return self._task.evaluate(observation)

    def make_expert(self, robot: Robot, seed: int, noise: float) -> ExpertPolicy:
        """Acts by the expert of the task that the reset draws. Raises SpecError: a task has none."""
        experts = {id(task): task.make_expert(robot, seed, noise) for task in self.tasks}
        return lambda arrays: experts[id(self._task)](arrays)

    def _select(self, task: Task, instruction: str) -> None:
        self._task = task
        self.name, self.instruction, self.max_steps = task.name, instruction, task.max_steps


def build_task(
    requests: Sequence[TaskRequest],
    robot: Robot,
    built_in: Mapping[str, type[Task]],
    otherwise: Callable[[TaskRequest], Task] | None = None,
) -> Task:
    """Builds the tasks that a config names, for `robot`, which is not connected; a `TaskMix` if they vary.

    Args:
        built_in: the driver's own tasks by name.
        otherwise: builds a task for any other name, e.g. one that a person judges. It takes no options.

    Raises:
        SpecError: a task is unknown (the message has the nearest name), cannot be imported, does not suit the robot,
            or has no such option; or two have one name.
    """
    tasks = [_build(request, robot, built_in, otherwise) for request in requests]
    names = [task.name for task in tasks]
    if not tasks:
        raise SpecError("task: the list is empty; name a task")
    if twice := {name for name in names if names.count(name) > 1}:
        raise SpecError(f"task: {min(twice)!r} is named twice; remove one")
    paraphrased = [task for task, request in zip(tasks, requests, strict=True) if request.paraphrase]
    return TaskMix(tasks, paraphrased) if len(tasks) > 1 or paraphrased else tasks[0]


def _build(
    request: TaskRequest,
    robot: Robot,
    built_in: Mapping[str, type[Task]],
    otherwise: Callable[[TaskRequest], Task] | None,
) -> Task:
    task: Task
    if otherwise is not None and request.name not in built_in and not is_plugin(TASK_GROUP, request.name):
        read_settings(NoTaskSettings, request.options)
        task = otherwise(request)
    else:
        kind = load_task(request.name, built_in)
        task = kind.for_robot(robot, _settings(request, kind))
    if request.sentence:
        task.instruction = request.sentence
    return task


def load_task(name: str, built_in: Mapping[str, type[Task]]) -> type[Task]:
    """The class of a task: one of the driver's own, or of an installed package. Raises SpecError as `build_task`."""
    if name in built_in:
        return built_in[name]
    found = load_plugin(TASK_GROUP, name, {known: "" for known in built_in})
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise SpecError(f"the task {name!r} is not a subclass of hal.task.Task")
    return found


def _settings(request: TaskRequest, kind: type[Task]) -> Any:
    try:
        return read_settings(kind.settings, request.options)
    except SpecError as error:
        raise SpecError(f"the task {request.name!r}: options: {error}") from None
