"""``user-sys store verify``, ``repair``, ``compact`` and ``merge``."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from user_sys.commands.options import PATH, SOURCES, json_option, parse_size, store_argument
from user_sys.commands.output import EXIT_DAMAGED, Advance, print_json, print_line, progress_bar, size_text
from user_sys.episode import EpisodeSource
from user_sys.errors import StoreCorrupt, StoreError, StoreLocked
from user_sys.robot_records import copy_robot_records, robot_records_of_store
from user_sys.store import manifest
from user_sys.store.files import OS_FILES
from user_sys.store.maintenance import (
    DEAD_SHARE,
    CompactionReport,
    Retention,
    compact_store,
    disk_bytes,
    merge_stores,
    plan_eviction,
    record_bytes_of,
    require_store,
)
from user_sys.store.record_format import Damage, list_segments, resolve_generations
from user_sys.store.store import StoreReader
from user_sys.store.verify import (
    QUARANTINE,
    DamageReport,
    MissingChunks,
    find_missing_chunks,
    quarantine_damage,
    report_damage,
    verify_log,
)

INTERVENTIONS, NO_PROTECTION = "interventions", "nothing"  # values of --keep in addition to the sources
MAX_LINES = 20


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of reading all of a store.

    Attributes:
        episodes, chunks, steps: readable ones.
        findings: damage that is not quarantined, in order of position.
        gaps: missing chunks within episodes, lost or never received.
        copies: files that `repair` wrote to quarantine.
    """

    path: str
    size_bytes: int
    seconds: float
    episodes: int
    chunks: int
    steps: int
    findings: tuple[DamageReport, ...]
    gaps: tuple[MissingChunks, ...]
    copies: tuple[str, ...] = ()


def verify_store(path: Path, advance: Advance) -> tuple[VerifyReport, list[Damage]]:
    """Reads all of the store at `path`, which another process may be writing; returns the report and the damage.

    Raises:
        StoreError: there is no store, or it cannot be read.
        StoreVersionMismatch: it has another format version.
    """
    started = time.monotonic()
    found = verify_log(path, advance=advance)
    seconds = time.monotonic() - started
    with StoreReader.open(path) as reader:
        reader.refresh()
        index = reader.index
        found += _undecodable(path, reader.damaged, found)
        findings = report_damage(path, index, found)
        lost = {chunk for each in findings if each.surely and each.length for chunk in each.chunks}
        report = VerifyReport(
            path=str(path),
            size_bytes=disk_bytes(path),
            seconds=seconds,
            episodes=len(index.episodes),
            chunks=int((~index.chunks.gone).sum()) - len(lost),
            steps=int(index.chunks.steps[~index.chunks.gone].sum()) - sum(chunk.steps for chunk in lost),
            findings=tuple(findings),
            gaps=tuple(find_missing_chunks(index)),
        )
    return report, found


def _undecodable(path: Path, damaged: Sequence[Damage], found: Sequence[Damage]) -> list[Damage]:
    """Records that are valid for the log and do not decode, unless they are quarantined."""
    try:
        log_manifest = manifest.load(OS_FILES, path)
    except StoreCorrupt:
        log_manifest = None  # `verify_log` has reported it
    generations = {name.number: name.generation for name in resolve_generations(list_segments(path))[0]}
    places = {(each.segment, each.offset) for each in found}
    left = []
    for each in damaged:
        if each.segment < 0 or (each.segment, each.offset) in places:
            continue
        placed = replace(each, generation=generations.get(each.segment, 0))
        if log_manifest is None or not log_manifest.is_quarantined(placed):
            left.append(placed)
    return left


@click.command()
@store_argument
@json_option
def verify(path: Path, as_json: bool) -> int:
    """Read each byte of the store PATH and list each damaged record. It changes nothing.

    Another process may write at the same time. Exit status 1: damage found.
    """
    report, _ = _verify_with_bar(path)
    if as_json:
        print_json(report)
    else:
        _show_report(report)
        if report.findings:
            print_line(f"`user-sys store repair {path}` quarantines it; other records stay unchanged")
    return EXIT_DAMAGED if report.findings else 0


def _verify_with_bar(path: Path) -> tuple[VerifyReport, list[Damage]]:
    logger = logging.getLogger("user_sys.store")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the report covers its warnings
    try:
        with progress_bar("reading", disk_bytes(path), is_bytes=True) as advance:
            return verify_store(path, advance)
    finally:
        logger.setLevel(level)


@click.command()
@store_argument
@json_option
def repair(path: Path, as_json: bool) -> None:
    """Verify the store PATH, copy damaged bytes into its folder quarantine/, and list them in the manifest.

    They are not reported again, and compaction can continue. Nothing is rewritten in place.
    """
    report, found = _verify_with_bar(path)
    if found:
        copies = quarantine_damage(path, found)
        report = msgspec.structs.replace(report, copies=tuple(str(copy) for copy in copies))
    if as_json:
        print_json(report)
        return
    _show_report(report)
    if found:
        print_line(f"quarantined: {len(found)} ranges, {len(report.copies)} copies in {path / QUARANTINE}")


def _show_report(report: VerifyReport) -> None:
    speed = report.size_bytes / max(report.seconds, 1e-9)
    print_line(
        f"{report.path}: {size_text(report.size_bytes)} read in {report.seconds:.3g} s ({speed / 1e9:.2f} GB/s): "
        f"{report.episodes} episodes, {report.chunks} chunks, {report.steps} steps"
    )
    if not report.findings:
        print_line("no damage found")
    for found in report.findings:
        _show_finding(found)
    named = {chunk.episode for finding in report.findings for chunk in finding.chunks}
    for gap in report.gaps:
        last = gap.first_step + gap.steps - 1
        cause = "" if gap.episode in named else " (never received, or lost before)"
        print_line(f"{gap.episode} lacks steps {gap.first_step} to {last}{cause}")


def _show_finding(found: DamageReport) -> None:
    place = "the manifest" if found.segment < 0 else f"segment {found.segment}, offset {found.offset}"
    last = f" to {found.last_sequence}" if found.last_sequence > found.sequence else ""
    record = "" if found.sequence < 0 else f", record {found.sequence}{last}"
    print_line(f"{place}, {found.length} bytes{record}: {found.reason}")
    for chunk in found.chunks[:MAX_LINES]:
        print_line(f"  {chunk}{'' if found.surely else ' (by its header)'}")
    if len(found.chunks) > MAX_LINES:
        print_line(f"  and {len(found.chunks) - MAX_LINES} more chunks; --json lists all")


def plan_compaction(path: Path, retention: Retention) -> dict[str, Any]:
    """The sizes in bytes, and the episodes to evict in order. It changes nothing; another process may be writing."""
    size = disk_bytes(path)
    with StoreReader.open(path) as reader:
        reader.refresh()
        index, choice = reader.index, plan_eviction(reader.index, retention, size)
        dead = ~index.chunks.alive & ~index.chunks.gone
        by_name = {episode.episode: episode for episode in reader.episodes()}
        return {
            "size_bytes": size,
            "deleted_bytes": int(record_bytes_of(index)[dead].sum()),
            "leaving": [by_name[name] for name in choice.episodes],
            "leaving_bytes": choice.freed_bytes,
            "shortfall_bytes": choice.shortfall_bytes,
        }


@click.command()
@store_argument
@click.option("--max-bytes", type=parse_size, default="0", metavar="SIZE", help="such as 20GB (default: no limit)")
@click.option(
    "--keep",
    multiple=True,
    type=click.Choice((*SOURCES, INTERVENTIONS, NO_PROTECTION)),
    help="never evict these; repeatable (default: demo and interventions)",
)
@click.option("--dry-run", is_flag=True, help="only list the episodes to evict, with reasons")
@json_option
def compact(path: Path, max_bytes: int, keep: Sequence[str], dry_run: bool, as_json: bool) -> int:
    """Free the space of deleted episodes of the store PATH.

    With --max-bytes it first evicts the least useful episodes: evaluations, episodes that never ended, then autonomous
    ones, oldest first. A running gateway does this itself (gateway.retention), except for deleted episodes that take
    little of their segment.

    Exit status 1: damage prevented a rewrite.
    """
    retention = _retention(max_bytes, keep)
    if dry_run:
        planned = plan_compaction(path, retention)
        print_json(planned) if as_json else _show_plan(planned, retention)
        return 0
    with progress_bar("rewriting segments", None) as advance:
        report = _compacted(path, retention, advance)
    print_json(report) if as_json else _show_compaction(report, path)
    return EXIT_DAMAGED if report.damaged else 0


def _compacted(path: Path, retention: Retention, advance: Advance) -> CompactionReport:
    try:
        return compact_store(path, retention, advance=advance)
    except StoreLocked as locked:
        rule = f"segments of 64 MiB of which deleted episodes take {DEAD_SHARE:.0%}"
        own = f"a gateway itself frees only {rule}, and what exceeds gateway.retention.max_bytes"
        raise StoreLocked(f"{locked}; {own}. --dry-run works while it writes") from None


def _retention(max_bytes: int, keep: Sequence[str]) -> Retention:
    if not keep:
        return Retention(max_bytes=max_bytes)
    if not max_bytes:
        raise StoreError("--keep requires --max-bytes, such as --max-bytes 20GB")
    if NO_PROTECTION in keep and len(keep) > 1:
        raise StoreError("--keep nothing excludes other --keep options")
    sources = tuple(EpisodeSource(name) for name in keep if name not in (INTERVENTIONS, NO_PROTECTION))
    return Retention(max_bytes=max_bytes, keep_sources=sources, keep_interventions=INTERVENTIONS in keep)


def _show_plan(planned: dict[str, Any], retention: Retention) -> None:
    bound = f"; the limit is {size_text(retention.max_bytes)}" if retention.max_bytes else ""
    print_line(f"the store takes {size_text(planned['size_bytes'])}{bound}")
    print_line(f"deleted episodes take {size_text(planned['deleted_bytes'])} of that; compaction frees it")
    if retention.max_bytes:
        print_line(f"{len(planned['leaving'])} more episodes would be evicted, {size_text(planned['leaving_bytes'])}:")
    for each in planned["leaving"]:
        state = {True: "succeeded", False: "failed", None: "of unknown success"}[each.success]
        state = state if each.complete else "never ended"
        print_line(f"  {each.episode}: {each.source}, {each.steps} steps, {size_text(each.size_bytes)}, {state}")
    _show_shortfall(planned["shortfall_bytes"])


def _show_compaction(report: CompactionReport, path: Path) -> None:
    evicted = f"{len(report.dropped)} episodes evicted, " if report.dropped else ""
    change = f"{size_text(report.freed_bytes)} freed" if report.freed_bytes > 0 else "nothing to free"
    print_line(f"{path}: {evicted}{change}; it takes {size_text(report.size_bytes)} now")
    _show_shortfall(report.shortfall_bytes)
    for reason in report.damaged:
        print_line(f"not rewritten: {reason}")


def _show_shortfall(missing: int) -> None:
    if missing:
        print_line(f"{size_text(missing)} above the limit remain, because all other episodes are protected (--keep)")


@click.command()
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option("--into", type=PATH, required=True, metavar="STORE", help="store to add to; created if needed")
@json_option
def merge(paths: Sequence[Path], into: Path, as_json: bool) -> int:
    """Copy episodes and labels of the stores PATH into another one. The stores PATH are not changed.

    It skips existing chunks and deleted episodes, so the command can be repeated. Exit status 1: damage was skipped.
    """
    for path in paths:
        require_store(path)
    with progress_bar("merging chunks", None) as advance:
        report = merge_stores(paths, into, advance=advance)
    copy_robot_records((record for path in paths for record in robot_records_of_store(path)), into)
    if as_json:
        print_json(report)
    else:
        duplicates = f", {report.duplicates} already existed" if report.duplicates else ""
        print_line(f"{into}: {report.chunks} chunks and {report.labels} labels added{duplicates}")
        if report.damaged:
            print_line(f"{report.damaged} damaged chunks were skipped; `user-sys store verify` lists them")
    return EXIT_DAMAGED if report.damaged else 0
