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

from hal.signals import ends_in_time
from user_sys.compose import RobotConfig, robot_spec
from user_sys.config import load
from user_sys.edge.demonstrations import SEEDS_PER_ROBOT, DemonstrationConfig, demonstrate, require_shown
from user_sys.edge.local import Attend, ending_between_periods, nobody_calls
from user_sys.edge.loop import EpisodeSummary
from user_sys.edge.recorder import RecorderConfig
from user_sys.endings import END_WITHIN_S, end_at_once
from user_sys.episode import Source
from user_sys.robot_cards import CARDS, keep_card
from user_sys.store.log import segment_numbers
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.topology import RunConfig

log = logging.getLogger(__name__)


def count_demonstrations(store: Path, robot: str) -> int:
    """Complete, successful demonstrations of `robot` in the store at `store`; 0 where there is no store yet."""
    if not segment_numbers(store):
        return 0
    with StoreReader.open(store) as reader:
        reader.refresh()
        episodes = reader.episodes()
    return sum(e.source is Source.DEMO and e.robot == robot and bool(e.success) for e in episodes)


def record_demonstrations(
    config: RobotConfig,
    store: Path,
    wanted: DemonstrationConfig,
    recorder: RecorderConfig,
    *,
    seed: int,
    attend: Attend = nobody_calls,
    locked: bool = False,
) -> Iterator[EpisodeSummary]:
    """Tops the store up to the `wanted` successful demonstrations, yielding each one that is durable.

    `attend` and `locked`: see `demonstrate`.

    Raises:
        ConfigError: the task has no scripted expert, or the expert fails too often.
        HalError: the robot cannot be driven now.
    """
    there = count_demonstrations(store, config.name)
    if there >= wanted.episodes:
        return
    with StoreWriter.open(store) as writer:

        def keep(chunks: Sequence[bytes]) -> None:
            for chunk in chunks:
                writer.append(chunk)
            writer.sync()

        yield from demonstrate(config, wanted, there, keep, recorder, seed=seed, attend=attend, locked=locked)


def demonstrate_all(config: RunConfig, store: Path, console: Console, locked: frozenset[str]) -> None:
    """`locked`: the robots that the run has the locks of, until its driver processes take them over."""
    wanted = config.demonstrations
    with ending_between_periods() as attend:
        for number, robot in enumerate(config.robots):
            seed = config.seed + number * SEEDS_PER_ROBOT
            recorded = record_demonstrations(
                robot, store, wanted, config.recorder, seed=seed, attend=attend, locked=robot.name in locked
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
        require_shown(robot, wanted)
    abandon = partial(end_at_once, "ended at once; each demonstration that was told is kept")
    with ends_in_time(END_WITHIN_S, abandon), ending_between_periods() as attend:
        for number, robot in enumerate(config.robots):
            seed = config.seed + number * SEEDS_PER_ROBOT
            keep_card(output / CARDS, robot.name, robot_spec(robot))
            recorded = record_demonstrations(robot, output, wanted, config.recorder, seed=seed, attend=attend)
            steps = [s.steps for s in track(recorded, f"recording {robot.name}", total=args.episodes)]
            Console().print(f"{robot.name}: {len(steps)} new demonstrations, {sum(steps)} steps, in {output}")
    return 0
