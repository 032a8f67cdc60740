"""Demonstrations of a task's scripted expert, recorded on the robot's own computer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hal.driver import ExpertPolicy, RobotSetup
from user_sys.compose import RobotConfig, build_robot_setup
from user_sys.edge.agents import ScriptedAgent
from user_sys.edge.local_environment import StopCheck, never_stop, open_local_environment, raise_if_stopped
from user_sys.edge.loop import EpisodeResult, StepListener, run_episode
from user_sys.edge.recorder import Recorder, RecorderConfig
from user_sys.episode import EpisodeSource
from user_sys.errors import ConfigError

MAX_ATTEMPTS_PER_DEMONSTRATION = 5
DEMONSTRATION_SEED = 7_000_000  # differs from the seeds of online and evaluation episodes
SEEDS_PER_ROBOT = 100  # robots of one fleet demonstrate different episodes


@dataclass(frozen=True)
class DemonstrationConfig:
    """The scripted expert's demonstrations, before the policy drives.

    Attributes:
        episodes: of each robot.
        noise: standard deviation of the noise on the expert's actions, as a share of the action's bounds.
    """

    episodes: int = 20
    noise: float = 0.1


def get_expert(setup: RobotSetup, task: str) -> Callable[[int, float], ExpertPolicy]:
    """The scripted expert of `setup`, which was built for `task`. Raises ConfigError: there is none."""
    if setup.make_expert is None:
        raise ConfigError(
            f"robot {setup.name}: the task {task!r} has no scripted expert: set --demonstrations.episodes=0, and "
            "demonstrate it by hand during the run, or merge recorded demonstrations (docs/people.md)"
        )
    return setup.make_expert


def check_demonstrable(config: RobotConfig, requested: DemonstrationConfig) -> None:
    """Checks that the robot's setup can be built, and that it has an expert if demonstrations are requested.

    Connects to no device. Raises ConfigError.
    """
    setup = build_robot_setup(config, cameras=False)
    if requested.episodes > 0:
        get_expert(setup, config.task)


def generate_demonstrations(
    config: RobotConfig,
    requested: DemonstrationConfig,
    existing: int,
    persist: Callable[[Sequence[bytes]], None],
    recorder: RecorderConfig,
    *,
    seed: int,
    check_stop: StopCheck = never_stop,
    locked: bool = False,
) -> Iterator[EpisodeResult]:
    """Records the missing demonstrations, and yields each successful one after `persist` has stored its chunks.

    Args:
        existing: the number of recorded demonstrations. An interrupted one is repeated.
        persist: makes the chunks of one episode durable before it returns. Failed demonstrations are discarded.
        check_stop: called in each control period, also of a reset; an error that it raises ends the demonstration.
        locked: see `open_local_environment`.

    Raises:
        ConfigError: the task has no scripted expert, or the expert fails too often.
        HalError: as `open_local_environment`; or the robot is lost or stopped.
    """
    missing = requested.episodes - existing
    if missing <= 0:
        return
    setup = build_robot_setup(config)
    make_expert, task = get_expert(setup, config.task), setup.task
    with open_local_environment(
        setup, config, config.frame_stride, check_stop=check_stop, locked=locked
    ) as environment:
        listeners: list[StepListener] = [raise_if_stopped, lambda time_step, selected: check_stop()]
        chunks: list[bytes] = []
        record = Recorder(environment.spec, config.name, task.name, task.instruction, chunks.append, recorder)
        for attempt in range(missing * MAX_ATTEMPTS_PER_DEMONSTRATION):
            start = DEMONSTRATION_SEED + 1000 * seed + existing + attempt
            agent = ScriptedAgent(make_expert(start, requested.noise), task.max_steps)
            result = run_episode(environment, agent, record, source=EpisodeSource.DEMO, seed=start, listeners=listeners)
            if result.success:
                persist(chunks)
                missing -= 1
                yield result
            chunks.clear()
            if missing == 0:
                return
    raise ConfigError(
        f"the scripted expert of {config.task!r} failed too often; {missing} demonstrations are missing: lower "
        "demonstrations.episodes or demonstrations.noise"
    )
