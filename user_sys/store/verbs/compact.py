"""``user-sys store compact``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from user_sys.episode import Source
from user_sys.errors import StoreError, StoreLocked
from user_sys.store.retention import Choice, Retention, choose, record_bytes_of
from user_sys.store.store import StoreReader
from user_sys.store.summary import EpisodeSummary
from user_sys.store.upkeep import CompactionReport, compact, disk_bytes
from user_sys.store.verbs.grammar import INTERVENTIONS, NOTHING
from user_sys.store.verbs.words import EXIT_DAMAGED, Advance, count_bar, size_text, tell, tell_json


class Leaving(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that retention would give up, and why that one."""

    episode: str
    source: Source
    steps: int
    size_bytes: int
    why: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a compaction would do.

    Attributes:
        deleted_bytes: what episodes take that labels delete already.
        leaving: in the order in which they would go.
        shortfall_bytes: what would have to go besides, had it not to be kept.
    """

    size_bytes: int
    deleted_bytes: int
    leaving: tuple[Leaving, ...]
    leaving_bytes: int
    shortfall_bytes: int


def plan(path: Path, retention: Retention) -> Plan:
    """Looks, and changes nothing; another process may be writing. Raises StoreError: there is no store."""
    size = disk_bytes(path)
    with StoreReader.open(path) as reader:
        reader.refresh()
        index, choice = reader.index, choose(reader.index, retention, size)
        dead = ~index.chunks.alive & ~index.chunks.gone
        deleted = int(record_bytes_of(index)[dead].sum())
        leaving = _leaving(choice, reader.episodes())
    return Plan(
        size_bytes=size,
        deleted_bytes=deleted,
        leaving=leaving,
        leaving_bytes=choice.freed_bytes,
        shortfall_bytes=choice.shortfall_bytes,
    )


def _leaving(choice: Choice, episodes: Sequence[EpisodeSummary]) -> tuple[Leaving, ...]:
    known = {episode.episode: episode for episode in episodes}
    return tuple(
        Leaving(
            episode=name,
            source=known[name].source,
            steps=known[name].steps,
            size_bytes=known[name].size_bytes,
            why=_why(known[name]),
        )
        for name in choice.episodes
    )


def _why(episode: EpisodeSummary) -> str:
    if episode.source is Source.EVALUATION:
        return "an evaluation"
    if not episode.complete:
        return "it broke off"
    verdict = {True: "successful", False: "unsuccessful", None: "of unknown success"}[episode.success]
    return verdict


def compact_main(args: argparse.Namespace) -> int:
    """Runs ``compact``; status 1 where damage kept a segment from being rewritten. Raises as `compact`."""
    retention = _retention(args.max_bytes, args.keep)
    if args.dry_run:
        planned = plan(args.path, retention)
        if args.json:
            tell_json(planned)
        else:
            _show_plan(planned, retention)
        return 0
    with count_bar("rewriting segments", None) as advance:
        report = _compacted(args.path, retention, advance)
    if args.json:
        tell_json(report)
    else:
        _show(report, args.path)
    return EXIT_DAMAGED if report.damaged else 0


def _compacted(path: Path, retention: Retention, advance: Advance) -> CompactionReport:
    try:
        return compact(path, retention, advance=advance)
    except StoreLocked as locked:
        advice = "a gateway compacts by itself, every gateway.upkeep_s and to gateway.retention.max_bytes"
        raise StoreLocked(f"{locked}, or leave it: {advice}; --dry-run works meanwhile") from None


def _retention(max_bytes: int, keep: Sequence[str] | None) -> Retention:
    if keep is None:
        return Retention(max_bytes=max_bytes)
    if not max_bytes:
        raise StoreError("--keep says what --max-bytes may not give up: give --max-bytes, such as 20GB")
    if NOTHING in keep and len(keep) > 1:
        raise StoreError("--keep nothing goes with no other --keep")
    sources = tuple(Source(name) for name in keep if name not in (INTERVENTIONS, NOTHING))
    return Retention(max_bytes=max_bytes, keep_sources=sources, keep_interventions=INTERVENTIONS in keep)


def _show_plan(planned: Plan, retention: Retention) -> None:
    if planned.leaving:
        columns = (Column(name, no_wrap=True) for name in ("would go", "source", "steps", "bytes", "why"))
        table = Table(*columns, box=None, header_style="bold")
        for each in planned.leaving:
            size = size_text(each.size_bytes)
            table.add_row(Text(each.episode), str(each.source), str(each.steps), size, each.why)
        Console().print(table)
    bound = f"; the bound is {size_text(retention.max_bytes)}" if retention.max_bytes else ""
    tell(f"the store takes {size_text(planned.size_bytes)}{bound}")
    tell(f"deleted episodes take {size_text(planned.deleted_bytes)} of that; compacting gives it back")
    if retention.max_bytes:
        tell(f"{len(planned.leaving)} more episodes would go, {size_text(planned.leaving_bytes)}")
    _show_shortfall(planned.shortfall_bytes)


def _show(report: CompactionReport, path: Path) -> None:
    gone = f"{len(report.dropped)} episodes given up, " if report.dropped else ""
    change = f"{size_text(report.freed_bytes)} freed" if report.freed_bytes > 0 else "nothing to free"
    tell(f"{path}: {gone}{change}; it takes {size_text(report.size_bytes)} now")
    _show_shortfall(report.shortfall_bytes)
    for reason in report.damaged:
        tell(f"not rewritten: {reason}")


def _show_shortfall(missing: int) -> None:
    if missing:
        tell(f"{size_text(missing)} above the bound remain: all that is left is to be kept (--keep says what)")
