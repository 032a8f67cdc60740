"""``user-sys store stats``: statistics of a store."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from hal.spec import RobotSpec
from user_sys.codec import Array
from user_sys.commands.episode_detail import VECTORS, element_names
from user_sys.commands.output import EXIT_DAMAGED, Advance, bytes_bar, print_json, print_line, size_text
from user_sys.episode import Chunk, EpisodeSource
from user_sys.errors import StoreCorrupt, StoreRecordGone
from user_sys.interchange.episodes import is_camera_column, load_robot_specs
from user_sys.interchange.statistics import RunningStatistics, column_statistics
from user_sys.store.index import EpisodeSummary
from user_sys.store.maintenance import disk_bytes, record_bytes_of
from user_sys.store.store import StoreReader
from user_sys.store.verify import QUARANTINE

PERIODS = 10  # parts of the online episodes for the trend of interventions
WIDE_COLUMNS = 110
_BLOCKS = " ▁▂▃▄▅▆▇█"


class GroupStats(msgspec.Struct, frozen=True, kw_only=True):
    """The episodes of one task, source and robot, without deleted ones.

    Attributes:
        judged: episodes with known success.
        steps_min, steps_mean, steps_max, return_mean: of complete episodes; 0 without any.
    """

    task: str
    source: EpisodeSource
    robot: str
    episodes: int
    complete: int
    judged: int
    successes: int
    steps: int
    steps_min: int
    steps_mean: float
    steps_max: int
    return_mean: float
    intervention_steps: int
    size_bytes: int


class ElementRange(msgspec.Struct, frozen=True, kw_only=True):
    """One element of a vector over all steps of an embodiment; `name` is the spec's, or its number."""

    embodiment: str
    feature: str
    name: str
    unit: str
    min: float
    max: float
    mean: float
    std: float


class DiskUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Disk use in bytes; `rest` is the log's own headers, footers and labels."""

    frames: int
    columns: int
    deleted: int
    rest: int
    quarantine: int


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a store.

    Attributes:
        intervention_share: share of the steps in online episodes, per tenth of these episodes in order of start.
        disk: None, with `ranges` empty, unless all chunks were read.
        unreadable: damaged chunks, not included in ranges and disk.
    """

    path: str
    episodes: int
    deleted: int
    groups: tuple[GroupStats, ...]
    intervention_share: tuple[float, ...]
    ranges: tuple[ElementRange, ...] = ()
    disk: DiskUsage | None = None
    unreadable: int = 0


def count_episodes(path: Path, episodes: Sequence[EpisodeSummary]) -> StoreStats:
    """Statistics from the index alone."""
    alive = [episode for episode in episodes if not episode.deleted]
    groups: dict[tuple[str, EpisodeSource, str], list[EpisodeSummary]] = {}
    for episode in alive:
        groups.setdefault((episode.task, episode.source, episode.robot), []).append(episode)
    return StoreStats(
        path=str(path),
        episodes=len(alive),
        deleted=len(episodes) - len(alive),
        groups=tuple(_group(key, groups[key]) for key in sorted(groups)),
        intervention_share=_interventions(alive),
    )


def _group(key: tuple[str, EpisodeSource, str], episodes: Sequence[EpisodeSummary]) -> GroupStats:
    whole = [episode for episode in episodes if episode.complete]
    lengths = [episode.steps for episode in whole] or [0]
    returns = [episode.episode_return for episode in whole] or [0.0]
    return GroupStats(
        task=key[0],
        source=key[1],
        robot=key[2],
        episodes=len(episodes),
        complete=len(whole),
        judged=sum(episode.success is not None for episode in episodes),
        successes=sum(episode.success is True for episode in episodes),
        steps=sum(episode.steps for episode in episodes),
        steps_min=min(lengths),
        steps_mean=float(np.mean(lengths)),
        steps_max=max(lengths),
        return_mean=float(np.mean(returns)),
        intervention_steps=sum(episode.intervention_steps for episode in episodes),
        size_bytes=sum(episode.size_bytes for episode in episodes),
    )


def _interventions(episodes: Sequence[EpisodeSummary]) -> tuple[float, ...]:
    online = sorted((e for e in episodes if e.source is EpisodeSource.ONLINE), key=lambda e: e.started_unix_ns)
    parts = [online[len(online) * n // PERIODS : len(online) * (n + 1) // PERIODS] for n in range(PERIODS)]
    return tuple(sum(e.intervention_steps for e in part) / sum(e.steps for e in part) for part in parts if part)


class _ChunkStatistics:
    """Statistics that need every chunk."""

    def __init__(self, specs: Mapping[str, RobotSpec]) -> None:
        self.frames = self.unreadable = 0
        self._specs = specs
        self._running: dict[tuple[str, str], RunningStatistics] = {}

    def read(self, reader: StoreReader, advance: Advance) -> None:
        chunks = reader.index.chunks
        for row in np.flatnonzero(chunks.alive).tolist():
            try:
                self._take(reader.read_packed(row).unpack())
            except StoreRecordGone:
                continue  # dropped by the store's writer in the meantime
            except StoreCorrupt:
                self.unreadable += 1
            finally:
                advance(int(chunks.length[row]))

    def _take(self, chunk: Chunk) -> None:
        for name, column in chunk.columns.items():
            if is_camera_column(name):
                self.frames += column.nbytes
            elif name.startswith(VECTORS) and column.ndim == 2:
                found = column_statistics(column)
                if found is not None:
                    self._running.setdefault((chunk.header.embodiment, name), RunningStatistics()).add(found)

    def ranges(self) -> tuple[ElementRange, ...]:
        return tuple(
            element
            for (embodiment, feature), running in sorted(self._running.items())
            for element in _elements(embodiment, feature, running.result(), self._specs.get(embodiment))
        )


def _elements(embodiment: str, feature: str, found: Mapping[str, Array], spec: RobotSpec | None) -> list[ElementRange]:
    names, units = element_names(feature, len(found["min"]), spec)
    return [
        ElementRange(
            embodiment=embodiment,
            feature=feature,
            name=names[n],
            unit=units[n],
            **{key: float(found[key][n]) for key in ("min", "max", "mean", "std")},
        )
        for n in range(len(names))
    ]


def stats_main(args: argparse.Namespace) -> int:
    """Runs ``stats``; status 1 if a chunk is damaged.

    Raises:
        StoreError: there is no store, or it cannot be read.
    """
    with StoreReader.open(args.path) as reader:
        reader.refresh()
        found = count_episodes(args.path, reader.episodes())
        if not args.no_ranges:
            found = _with_ranges(found, reader, args.path)
        damaged = bool(reader.damaged or found.unreadable)
    if args.json:
        print_json(found)
    else:
        _show(found)
        if damaged:
            print_line(f"the store has damage; `user-sys store verify {args.path}` lists it")
    return EXIT_DAMAGED if damaged else 0


def _with_ranges(found: StoreStats, reader: StoreReader, path: Path) -> StoreStats:
    chunks, reading = reader.index.chunks, _ChunkStatistics(load_robot_specs(path))
    with bytes_bar("reading", int(chunks.length[chunks.alive].sum())) as advance:
        reading.read(reader, advance)
    records = record_bytes_of(reader.index)
    alive, dead = int(records[chunks.alive].sum()), int(records[~chunks.alive & ~chunks.gone].sum())
    disk = DiskUsage(
        frames=reading.frames,
        columns=alive - reading.frames,
        deleted=dead,
        rest=disk_bytes(path) - alive - dead,
        quarantine=sum(file.stat().st_size for file in (path / QUARANTINE).glob("*.bytes")),
    )
    return msgspec.structs.replace(found, ranges=reading.ranges(), disk=disk, unreadable=reading.unreadable)


def _show(found: StoreStats) -> None:
    console = Console()
    deleted = f" ({found.deleted} more deleted)" if found.deleted else ""
    print_line(f"{found.path}: {found.episodes} episodes{deleted}")
    console.print(_groups(found.groups, wide=console.width >= WIDE_COLUMNS))
    if found.intervention_share:
        bars = "".join(_BLOCKS[min(8, int(np.ceil(8 * share)))] for share in found.intervention_share)
        first, last = found.intervention_share[0], found.intervention_share[-1]
        print_line(f"steps by a person in online episodes, over time: |{bars}| {first:.0%} first, {last:.0%} last")
    if found.disk is not None:
        print_line(
            "disk: "
            + ", ".join(f"{name} {size_text(getattr(found.disk, name))}" for name in DiskUsage.__struct_fields__)
        )
    _show_ranges(found.ranges, console)


def _groups(groups: Sequence[GroupStats], wide: bool) -> Table:
    """One row per group; a narrow terminal gets fewer columns."""
    columns = ["task", "source", "robot", "episodes", "success", "length", "return"]
    columns += ["steps", "by hand", "size"] if wide else []
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None, header_style="bold")
    for each in groups:
        row = _row(each)
        table.add_row(*(Text(row[name]) for name in columns))
    return table


def _row(group: GroupStats) -> dict[str, str]:
    not_ended = group.episodes - group.complete
    return {
        "task": group.task,
        "source": str(group.source),
        "robot": group.robot,
        "episodes": f"{group.episodes}" + (f" ({not_ended} open)" if not_ended else ""),
        "success": f"{group.successes / group.judged:.0%} of {group.judged}" if group.judged else "?",
        "length": f"{group.steps_mean:.3g} ({group.steps_min} to {group.steps_max})",
        "return": f"{group.return_mean:.3g}",
        "steps": f"{group.steps:,}",
        "by hand": f"{group.intervention_steps / max(1, group.steps):.0%}",
        "size": size_text(group.size_bytes),
    }


def _show_ranges(ranges: Sequence[ElementRange], console: Console) -> None:
    for (embodiment, feature), elements in groupby(ranges, key=lambda each: (each.embodiment, each.feature)):
        table = Table(box=None, title=Text(f"{feature} (embodiment {embodiment[:8]})"), title_justify="left")
        for name, width in (("element", 22), ("unit", 6), ("min", 10), ("max", 10), ("mean", 10), ("std", 10)):
            table.add_column(name, no_wrap=True, min_width=width)
        for each in elements:
            numbers = (f"{value:.4g}" for value in (each.min, each.max, each.mean, each.std))
            table.add_row(Text(each.name), each.unit, *numbers)
        console.print(table)
