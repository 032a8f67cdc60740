"""``user-sys store inspect PATH``: what a store holds, for a person or, with ``--json``, for another program."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from user_sys.store.frame import Damage
from user_sys.store.log import segment_numbers, segment_path
from user_sys.store.store import StoreReader
from user_sys.store.summary import EpisodeSummary

WIDE_COLUMNS = 120
LAST_EPISODES = 20


class StoreSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A store in numbers; `last` are the newest episodes, oldest first."""

    path: str
    episodes: int
    complete: int
    successes: int
    failures: int
    steps: int
    intervention_steps: int
    chunks: int
    segments: int
    size_bytes: int
    sources: dict[str, int]
    embodiments: dict[str, int]
    damaged: list[Damage]
    last: list[EpisodeSummary]


def summarise(path: Path, last: int = LAST_EPISODES) -> StoreSummary:
    """Reads all of the store at `path`, which another process may be writing.

    Raises:
        StoreError: there is no store at `path`, or it cannot be read.
    """
    with StoreReader.open(path) as reader:
        chunks = len(reader.refresh().chunks)
        episodes, damaged = reader.episodes(), reader.damaged
    segments = segment_numbers(path)
    return StoreSummary(
        path=str(path),
        episodes=len(episodes),
        complete=sum(episode.complete for episode in episodes),
        successes=sum(episode.success is True for episode in episodes),
        failures=sum(episode.success is False for episode in episodes),
        steps=sum(episode.steps for episode in episodes),
        intervention_steps=sum(episode.intervention_steps for episode in episodes),
        chunks=chunks,
        segments=len(segments),
        size_bytes=sum(segment_path(path, number).stat().st_size for number in segments),
        sources=_count([str(episode.source) for episode in episodes]),
        embodiments=_count([episode.embodiment for episode in episodes]),
        damaged=damaged,
        last=episodes[-last:] if last > 0 else [],
    )


def _count(names: Sequence[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}


def _size(n_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"


def _totals(summary: StoreSummary) -> Table:
    table = Table(show_header=False, box=None, title=Text(summary.path), title_justify="left")
    known = f"{summary.successes} succeeded, {summary.failures} failed, {summary.complete} complete"
    table.add_row("episodes", f"{summary.episodes} ({known})")
    table.add_row("steps", f"{summary.steps} ({summary.intervention_steps} by a person), in {summary.chunks} chunks")
    table.add_row("size", f"{_size(summary.size_bytes)} in {summary.segments} segments")
    table.add_row("sources", ", ".join(f"{name} {n}" for name, n in summary.sources.items()) or "none")
    table.add_row(
        "embodiments", ", ".join(f"{name} ({n} episodes)" for name, n in summary.embodiments.items()) or "none"
    )
    table.add_row("damaged", f"{len(summary.damaged)} records" if summary.damaged else "none")
    return table


def _episodes(episodes: Sequence[EpisodeSummary], wide: bool) -> Table:
    """One row each; a terminal that is not `wide` gets what people look for first."""
    columns = ["episode", "source", "steps", "success", "by hand", "state"]
    columns += ["task", "return", "policy versions", "robot"] if wide else []
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None, header_style="bold")
    for episode in episodes:
        row = _row(episode)
        table.add_row(*(Text(row[name]) for name in columns))
    return table


def _row(episode: EpisodeSummary) -> dict[str, str]:
    low, high = episode.policy_versions
    success = {None: "?", True: "yes", False: "no"}[episode.success]
    return {
        "episode": episode.episode,
        "source": str(episode.source),
        "steps": str(episode.steps),
        "success": success + (f" ({episode.labelled_by})" if episode.labelled_by else ""),
        "by hand": str(episode.intervention_steps),
        "state": "deleted" if episode.deleted else "complete" if episode.complete else "open",
        "task": episode.task,
        "return": f"{episode.episode_return:.2f}",
        "policy versions": "" if high < 0 else f"{low} to {high}",
        "robot": episode.robot,
    }


def _damage(damaged: Sequence[Damage]) -> Table:
    table = Table("segment", "offset", "bytes", "what is wrong", title="damaged", title_justify="left")
    for each in damaged:
        table.add_row(str(each.segment), str(each.offset), str(each.length), Text(each.reason))
    return table


def inspect(path: Path, last: int = LAST_EPISODES, width: int = 140) -> str:
    """The store at `path` as text. Raises as `summarise`."""
    target = io.StringIO()
    _show(summarise(path, last), Console(file=target, width=width))
    return target.getvalue()


def _show(summary: StoreSummary, console: Console) -> None:
    parts = [_totals(summary)]
    parts += [_damage(summary.damaged)] if summary.damaged else []
    parts += [_episodes(summary.last, wide=console.width >= WIDE_COLUMNS)] if summary.last else []
    console.print(Group(*parts))


def inspect_main(args: argparse.Namespace) -> int:
    """Runs the verb on ``args.path`` and ``args.json``. Raises as `summarise`."""
    summary = summarise(Path(args.path))
    if args.json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    else:
        _show(summary, Console())
    return 0
