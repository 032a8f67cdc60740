"""Demonstrations by the scripted expert of a task, on the robot's own computer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hal.driver import ExpertPolicy, RobotSetup
from user_sys.compose import RobotConfig, build_robot_setup
from user_sys.edge.agents import ScriptedAgent
from user_sys.edge.local_environment import StopCheck, never_stop, open_local_environment, raise_if_stopped
from user_sys.edge.loop import EpisodeResult, run_episode
from user_sys.edge.recorder import Recorder, RecorderConfig
from user_sys.episode import EpisodeSource
from user_sys.errors import ConfigError

MAX_ATTEMPTS_PER_DEMONSTRATION = 5
DEMONSTRATION_SEED = 7_000_000  # starts apart from those of acting and evaluation
SEEDS_PER_ROBOT = 100  # robots of one fleet show different things


@dataclass(frozen=True)
class DemonstrationConfig:
    """`episodes` of the scripted expert, for each robot, come before any that the policy drives.

    `noise` spreads them: the standard deviation of what is added to the expert's action, as a share of its bounds.
    """

    episodes: int = 20
    noise: float = 0.1


def get_expert(station: RobotSetup, task: str) -> Callable[[int, float], ExpertPolicy]:
    """The scripted expert of `station`, which was built for `task`. Raises ConfigError: there is none."""
    if station.make_expert is None:
        raise ConfigError(
            f"robot {station.name}: no scripted expert knows the task {task!r}: say --demonstrations.episodes=0, and "
            "show it by hand in the run, or bring demonstrations from elsewhere (docs/people.md)"
        )
    return station.make_expert


def check_demonstrable(config: RobotConfig, requested: DemonstrationConfig) -> None:
    """Looks, before anything is made, whether the robot's station can be built and, where demonstrations are wanted,
    has an expert for them; connects nothing. Raises ConfigError."""
    station = build_robot_setup(config, cameras=False)
    if requested.episodes > 0:
        get_expert(station, config.task)


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
    """Has the expert show what is missing of `wanted`, and yields each success, after `keep` has taken its chunks.

    Args:
        there: how many there are already; an interrupted recording is simply repeated.
        keep: makes the chunks of one whole episode durable before it returns. Demonstrations that fail are not kept.
        attend: called in each control period, as `hal.robot.Robot.attend` is on the way to a start; what it raises ends
            the demonstration.
        locked: see `local_driver`.

    Raises:
        ConfigError: the task has no scripted expert, or the expert fails too often.
        HalError: as `local_driver`; the robot was lost or stopped.
    """
    missing = requested.episodes - existing
    if missing <= 0:
        return
    station = build_robot_setup(config)
    expert_of = get_expert(station, config.task)
    with open_local_environment(station, config, config.frame_stride, check_stop=check_stop, locked=locked) as driver:
        listeners = [raise_if_stopped, lambda tick, decision: check_stop()]
        chunks: list[bytes] = []
        task = station.task
        record = Recorder(driver.spec, config.name, task.name, task.instruction, chunks.append, recorder)
        for attempt in range(missing * MAX_ATTEMPTS_PER_DEMONSTRATION):
            start = DEMONSTRATION_SEED + 1000 * seed + existing + attempt
            pilot = ScriptedAgent(expert_of(start, requested.noise), task.max_steps)
            summary = run_episode(driver, pilot, record, source=EpisodeSource.DEMO, seed=start, listeners=listeners)
            if summary.success:
                persist(chunks)
                missing -= 1
                yield summary
            chunks.clear()
            if missing == 0:
                return
    raise ConfigError(f"the scripted expert of {config.task!r} failed too often; {missing} demonstrations are missing")
