"""Demonstrations from a scripted expert, written straight into a store."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

from hal.signals import bounded_shutdown
from user_sys.compose import RobotConfig, robot_spec
from user_sys.config import load
from user_sys.edge.demonstrations import (
    SEEDS_PER_ROBOT,
    DemonstrationConfig,
    check_demonstrable,
    generate_demonstrations,
)
from user_sys.edge.local_environment import StopCheck, defer_signals, never_stop
from user_sys.edge.loop import EpisodeResult
from user_sys.edge.recorder import RecorderConfig
from user_sys.episode import EpisodeSource
from user_sys.process_exit import EXIT_DEADLINE_S, exit_now
from user_sys.robot_records import ROBOTS_FOLDER, save_robot_record
from user_sys.run.config import RunConfig
from user_sys.store.log import segment_numbers
from user_sys.store.store import StoreReader, StoreWriter

log = logging.getLogger(__name__)


def count_demonstrations(store: Path, robot: str) -> int:
    """Complete, successful demonstrations of `robot` in the store at `store`; 0 where there is no store yet."""
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
    """Tops the store up to the `wanted` successful demonstrations, yielding each one that is durable.

    `attend` and `locked`: see `demonstrate`.

    Raises:
        ConfigError: the task has no scripted expert, or the expert fails too often.
        HalError: the robot cannot be driven now.
    """
    there = count_demonstrations(store, config.name)
    if there >= demonstrations.episodes:
        return
    with StoreWriter.open(store) as writer:

        def keep(chunks: Sequence[bytes]) -> None:
            for chunk in chunks:
                writer.append(chunk)
            writer.sync()

        yield from generate_demonstrations(
            config, demonstrations, there, keep, recorder, seed=seed, check_stop=check_stop, locked=locked
        )


def record_all_demonstrations(config: RunConfig, store: Path, console: Console, locked: frozenset[str]) -> None:
    """`locked`: the robots that the run has the locks of, until its driver processes take them over."""
    wanted = config.demonstrations
    with defer_signals() as attend:
        for number, robot in enumerate(config.robots):
            seed = config.seed + number * SEEDS_PER_ROBOT
            recorded = record_demonstrations(
                robot, store, wanted, config.recorder, seed=seed, check_stop=attend, locked=robot.name in locked
            )
            steps = [episode.steps for episode in recorded]
            if steps:
                console.print(f"{robot.name}: {len(steps)} demonstrations by the scripted expert, {sum(steps)} steps")


def record_main(args: Namespace) -> int:
    """``user-sys record CONFIG``: demonstrations of each robot of a run's configuration."""
    config = load(RunConfig, args.config, args.overrides)
    output = Path(args.output)
    wanted = replace(config.demonstrations, episodes=args.episodes)
    for robot in config.robots:
        check_demonstrable(robot, wanted)
    abandon = partial(exit_now, "ended at once; each demonstration that was told is kept")
    with bounded_shutdown(EXIT_DEADLINE_S, abandon), defer_signals() as attend:
        for number, robot in enumerate(config.robots):
            seed = config.seed + number * SEEDS_PER_ROBOT
            save_robot_record(output / ROBOTS_FOLDER, robot.name, robot_spec(robot))
            recorded = record_demonstrations(robot, output, wanted, config.recorder, seed=seed, check_stop=attend)
            steps = [s.steps for s in track(recorded, f"recording {robot.name}", total=args.episodes)]
            Console().print(f"{robot.name}: {len(steps)} new demonstrations, {sum(steps)} steps, in {output}")
    return 0
