"""Records demonstrations of scripted experts in a store."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from user_sys.compose import RobotConfig
from user_sys.edge.demonstrations import SEEDS_PER_ROBOT, DemonstrationConfig, generate_demonstrations
from user_sys.edge.local_environment import StopCheck, defer_signals, never_stop
from user_sys.edge.loop import EpisodeResult
from user_sys.edge.recorder import RecorderConfig
from user_sys.episode import EpisodeSource
from user_sys.run.config import RunConfig
from user_sys.store.record_format import segment_numbers
from user_sys.store.store import StoreReader, StoreWriter

log = logging.getLogger(__name__)


def count_demonstrations(store: Path, robot: str) -> int:
    """Complete, successful demonstrations of `robot` in the store at `store`; 0 if there is no store."""
    if not segment_numbers(store):
        return 0
    with StoreReader.open(store) as reader:
        reader.refresh()
        episodes = reader.episodes()
    return sum(e.source is EpisodeSource.DEMO and e.robot == robot and bool(e.success) for e in episodes)


def record_demonstrations(
    config: RobotConfig,
    store: Path,
    demonstrations: DemonstrationConfig,
    recorder: RecorderConfig,
    *,
    seed: int,
    check_stop: StopCheck = never_stop,
    locked: bool = False,
) -> Iterator[EpisodeResult]:
    """Records until the store has the configured number of successful demonstrations; yields each durable one.

    `check_stop` and `locked`: see `generate_demonstrations`.

    Raises:
        ConfigError: the task has no scripted expert, or the expert fails too often.
        HalError: the robot cannot be driven now.
    """
    existing = count_demonstrations(store, config.name)
    if existing >= demonstrations.episodes:
        return
    with StoreWriter.open(store) as writer:

        def persist(chunks: Sequence[bytes]) -> None:
            for chunk in chunks:
                writer.append(chunk)
            writer.sync()

        yield from generate_demonstrations(
            config, demonstrations, existing, persist, recorder, seed=seed, check_stop=check_stop, locked=locked
        )


def record_all_demonstrations(config: RunConfig, store: Path, console: Console, locked: frozenset[str]) -> None:
    """Records the demonstrations of each of the run's robots and prints their number.

    Args:
        locked: robots that the run has locked; its driver processes take these locks over later.
    """
    with defer_signals() as check_stop:
        for number, robot in enumerate(config.robots):
            recorded = record_demonstrations(
                robot,
                store,
                config.demonstrations,
                config.recorder,
                seed=config.seed + number * SEEDS_PER_ROBOT,
                check_stop=check_stop,
                locked=robot.name in locked,
            )
            steps = [episode.steps for episode in recorded]
            if steps:
                console.print(f"{robot.name}: {len(steps)} demonstrations by the scripted expert, {sum(steps)} steps")
