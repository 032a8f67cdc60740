"""Demonstrations of a task's scripted expert, recorded on the robot's own computer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hal.settings import Amount, Limit
from user_sys.compose import RobotConfig, build_robot_setup, describe_robot
from user_sys.edge.agents import ScriptedAgent
from user_sys.edge.local_environment import StopCheck, never_stop, open_local_environment, raise_if_stopped
from user_sys.edge.loop import StepListener, derived_seed, run_episode
from user_sys.edge.recorder import Recorder, RecorderConfig
from user_sys.episode import EpisodeSource
from user_sys.errors import ConfigError
from user_sys.messages import EpisodeReport

MAX_ATTEMPTS_PER_DEMONSTRATION = 5


@dataclass(frozen=True)
class DemonstrationConfig:
    """The scripted expert's demonstrations, before the policy drives.

    Attributes:
        episodes: of each robot, shared evenly among its tasks.
        noise: standard deviation of the noise on the expert's actions, as a share of the action's bounds.
    """

    episodes: Limit = 20
    noise: Amount = 0.1


def no_expert_error(robot: str, task: str) -> ConfigError:
    return ConfigError(
        f"robot {robot}: the task {task!r} has no scripted expert: set --demonstrations.episodes=0, and demonstrate it "
        "by hand during the run, or merge recorded demonstrations (docs/people.md)"
    )


def check_demonstrable(config: RobotConfig, requested: DemonstrationConfig) -> None:
    """Checks that the robot's setup can be built, and that it has an expert if demonstrations are requested.

    Connects to no device. Raises ConfigError.
    """
    if not describe_robot(config).has_expert and requested.episodes > 0:
        raise no_expert_error(config.name, _task_names(config))


def _task_names(config: RobotConfig) -> str:
    return ", ".join(task.name for task in config.tasks)


def missing_demonstrations(
    config: RobotConfig, requested: DemonstrationConfig, existing: Mapping[str, int]
) -> list[str]:
    """The tasks of the missing demonstrations, in the order of their recording. Raises ConfigError.

    Args:
        existing: numbers of recorded demonstrations by task. Those beyond a task's share do not count.
    """
    if requested.episodes == 0:
        return []
    tasks = describe_robot(config).tasks
    places = ((number // len(tasks), tasks[number % len(tasks)]) for number in range(requested.episodes))
    return [task for place, task in places if place >= existing.get(task, 0)]


def demonstration_seeds(robot: str, seed: int, number: int) -> Iterator[int]:
    """The seeds of the attempts at a robot's demonstration `number`.

    They differ between robots and numbers, whichever attempts succeed, so a demonstration is not recorded twice.
    """
    return (derived_seed("demonstration", seed, robot, number, attempt) for attempt in itertools.count())


def generate_demonstrations(
    config: RobotConfig,
    requested: DemonstrationConfig,
    existing: Mapping[str, int],
    persist: Callable[[Sequence[bytes]], object],
    recorder: RecorderConfig,
    *,
    seed: int,
    used: Collection[int] = (),
    check_stop: StopCheck = never_stop,
) -> Iterator[EpisodeReport]:
    """Records the missing demonstrations, and yields each successful one after `persist` has stored its chunks.

    Args:
        existing: numbers of recorded demonstrations by task. An interrupted one is repeated.
        persist: makes the chunks of one episode durable before it returns. Failed demonstrations are discarded.
        used: seeds that no demonstration may have, such as those of earlier ones, with and without success.
        check_stop: called in each control period, also of a reset; an error that it raises ends the demonstration.

    Raises:
        ConfigError: the task has no scripted expert, or the expert fails too often.
        HalError: as `open_local_environment`; or the robot is lost or stopped.
    """
    if not (missing := missing_demonstrations(config, requested, existing)):
        return
    setup = build_robot_setup(config)
    task = setup.task
    if not task.has_expert:
        raise no_expert_error(config.name, _task_names(config))
    with open_local_environment(setup, config, check_stop=check_stop) as environment:
        listeners: list[StepListener] = [raise_if_stopped, lambda time_step, selected: check_stop()]
        chunks: list[bytes] = []
        record = Recorder(environment.spec, config.name, chunks.append, recorder)
        before, recorded = sum(existing.values()), 0
        starts = demonstration_seeds(config.name, seed, before)
        for _ in range(len(missing) * MAX_ATTEMPTS_PER_DEMONSTRATION):
            wanted = missing[recorded]
            start = next(each for each in starts if each not in used and task.drawn_name(each) == wanted)
            agent = ScriptedAgent(task.make_expert(setup.robot, start, requested.noise))
            result = run_episode(environment, agent, record, source=EpisodeSource.DEMO, seed=start, listeners=listeners)
            if result.success:
                persist(chunks)
                recorded += 1
                starts = demonstration_seeds(config.name, seed, before + recorded)
                yield result
            chunks.clear()
            if recorded == len(missing):
                return
    raise ConfigError(
        f"the scripted expert of {_task_names(config)} failed too often: it gave {recorded} of {len(missing)} "
        "demonstrations; lower demonstrations.episodes or demonstrations.noise"
    )
