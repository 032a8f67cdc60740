"""Demonstrations from a scripted expert, written straight into a store."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import track

from user_sys.compose import RobotConfig, build_station
from user_sys.config import load
from user_sys.edge.local import local_driver
from user_sys.edge.loop import EpisodeSummary, run_episode
from user_sys.edge.pilots import ExpertPilot
from user_sys.edge.recorder import Recorder, RecorderConfig
from user_sys.episode import Source
from user_sys.errors import ConfigError
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.topology import RunConfig

log = logging.getLogger(__name__)

MAX_ATTEMPTS_PER_DEMONSTRATION = 5
DEMONSTRATION_SEED = 7_000_000  # starts apart from those of acting and evaluation
SEEDS_PER_ROBOT = 100  # robots of one fleet show different things


def count_demonstrations(store: Path, robot: str) -> int:
    """Complete, successful demonstrations of `robot` in the store at `store`; 0 where there is no store yet."""
    if not store.exists():
        return 0
    with StoreReader.open(store) as reader:
        reader.refresh()
        episodes = reader.episodes()
    return sum(e.source is Source.DEMO and e.robot == robot and bool(e.success) for e in episodes)


def record_demonstrations(
    config: RobotConfig, store: Path, episodes: int, recorder: RecorderConfig, *, seed: int, noise: float
) -> Iterator[EpisodeSummary]:
    """Tops the store up to `episodes` successful demonstrations, yielding each one that is durable.

    Demonstrations that fail are not kept. What is there already counts, so that a broken recording is simply repeated.

    Raises:
        ConfigError: the task has no scripted expert, or the expert fails too often.
    """
    missing = episodes - count_demonstrations(store, config.name)
    if missing <= 0:
        return
    station = build_station(config)
    if station.expert is None:
        raise ConfigError(
            f"no scripted expert knows the task {config.task!r}; give a store with demonstrations instead"
        )
    with StoreWriter.open(store) as writer, local_driver(station, config.frame_stride) as driver:
        chunks: list[bytes] = []
        task = station.task
        record = Recorder(driver.spec, config.name, task.name, task.sentence, chunks.append, recorder)
        for attempt in range(missing * MAX_ATTEMPTS_PER_DEMONSTRATION):
            start = DEMONSTRATION_SEED + 1000 * seed + episodes - missing + attempt
            expert = station.expert(start, noise)
            summary = run_episode(driver, ExpertPilot(expert, task.max_steps), record, source=Source.DEMO, seed=start)
            if summary.success:
                for chunk in chunks:
                    writer.append(chunk)
                writer.sync()
                missing -= 1
                yield summary
            chunks.clear()
            if missing == 0:
                return
    raise ConfigError(f"the scripted expert of {config.task!r} failed too often; {missing} demonstrations are missing")


def record_main(args: Namespace) -> int:
    """``user-sys record CONFIG``: demonstrations of each robot of a run's configuration."""
    config = load(RunConfig, args.config, args.overrides)
    output = Path(args.output)
    for number, robot in enumerate(config.robots):
        seed = config.seed + number * SEEDS_PER_ROBOT
        recorded = record_demonstrations(
            robot, output, args.episodes, config.recorder, seed=seed, noise=config.demonstrations.noise
        )
        steps = [s.steps for s in track(recorded, f"recording {robot.name}", total=args.episodes)]
        Console().print(f"{robot.name}: {len(steps)} new demonstrations, {sum(steps)} steps, in {output}")
    return 0
