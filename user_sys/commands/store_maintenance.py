"""``user-sys store verify``, ``repair``, ``label``, ``compact`` and ``merge``."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from hal.audit import audit_operator_action
from hal.registry import operator_name
from user_sys.commands.output import (
    EXIT_DAMAGED,
    SUCCESS,
    Advance,
    bytes_bar,
    count_bar,
    print_json,
    print_line,
    size_text,
)
from user_sys.commands.store import INTERVENTIONS, NO_PROTECTION
from user_sys.episode import EpisodeSource, Phase
from user_sys.errors import StoreCorrupt, StoreError, StoreLocked
from user_sys.robot_records import copy_robot_records, robot_records_of_store
from user_sys.store import manifest
from user_sys.store.damage_report import (
    DamageReport,
    EpisodeLoss,
    MissingChunks,
    episode_losses,
    find_missing_chunks,
    report_damage,
)
from user_sys.store.files import OS_FILES
from user_sys.store.index import EpisodeSummary, Index
from user_sys.store.labels import (
    QUEUE_FOLDER,
    DeleteLabel,
    Label,
    NoteLabel,
    PhaseLabel,
    RewardLabel,
    SuccessLabel,
    UndoLabel,
    effective_labels,
    queue_labels,
    wait_until_stored,
)
from user_sys.store.maintenance import (
    RETENTION_LABELLER,
    CompactionReport,
    EvictionPlan,
    Retention,
    add_labels,
    compact_store,
    disk_bytes,
    merge_stores,
    plan_eviction,
    record_bytes_of,
    require_store,
)
from user_sys.store.record_format import Damage, list_segments, resolve_generations
from user_sys.store.store import StoreReader
from user_sys.store.verify import QUARANTINE, quarantine_damage, verify_log

MAX_LINES = 20
STORE_TIMEOUT_S = 30.0  # a gateway polls every few seconds


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of reading all of a store.

    Attributes:
        episodes, chunks, steps: readable ones.
        findings: damage that is not quarantined, in order of position.
        episodes_hit: losses of each episode.
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
    episodes_hit: tuple[EpisodeLoss, ...]
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
        hit = episode_losses(index, findings)
        lost = {chunk for each in findings if each.surely and each.length for chunk in each.chunks}
        report = VerifyReport(
            path=str(path),
            size_bytes=disk_bytes(path),
            seconds=seconds,
            episodes=len(index.episodes)
            - sum(each.what == "gone" and index.episodes.find(each.episode) >= 0 for each in hit),
            chunks=int((~index.chunks.gone).sum()) - len(lost),
            steps=int(index.chunks.steps[~index.chunks.gone].sum()) - sum(chunk.steps for chunk in lost),
            findings=tuple(findings),
            episodes_hit=tuple(hit),
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


def verify_main(args: argparse.Namespace) -> int:
    """Runs ``verify``; status 1 if there is damage. Raises as `verify_store`."""
    report, _ = _verify_with_bar(args.path)
    if args.json:
        print_json(report)
    else:
        _show_report(report)
        if report.findings:
            print_line(f"`user-sys store repair {args.path}` quarantines it; other records stay unchanged")
    return EXIT_DAMAGED if report.findings else 0


def _verify_with_bar(path: Path) -> tuple[VerifyReport, list[Damage]]:
    logger = logging.getLogger("user_sys.store")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the report covers its warnings
    try:
        with bytes_bar("reading", disk_bytes(path)) as advance:
            return verify_store(path, advance)
    finally:
        logger.setLevel(level)


def repair_main(args: argparse.Namespace) -> int:
    """Runs ``repair``; status 1 only if a dry run found damage.

    Raises:
        StoreLocked: another process writes the store.
        StoreFull, StoreError: as `quarantine_damage`.
    """
    if args.dry_run:
        return verify_main(args)
    report, found = _verify_with_bar(args.path)
    if found:
        copies = quarantine_damage(args.path, found)
        report = msgspec.structs.replace(report, copies=tuple(str(copy) for copy in copies))
    if args.json:
        print_json(report)
        return 0
    _show_report(report)
    if found:
        print_line(f"quarantined: {len(found)} ranges, {len(report.copies)} copies in {args.path / QUARANTINE}")
    return 0


def _show_report(report: VerifyReport) -> None:
    speed = report.size_bytes / max(report.seconds, 1e-9)
    print_line(
        f"{report.path}: {size_text(report.size_bytes)} read in {report.seconds:.3g} s ({speed / 1e9:.2f} GB/s): "
        f"{report.episodes} episodes, {report.chunks} chunks, {report.steps} steps"
    )
    if not report.findings:
        print_line("no damage found")
    else:
        Console().print(_table(report.findings))
        for line in _first_lines([str(loss) for loss in report.episodes_hit], "episodes"):
            print_line(line)
    named = {chunk.episode for finding in report.findings for chunk in finding.chunks}
    for gap in report.gaps:
        last = gap.first_step + gap.steps - 1
        cause = "" if gap.episode in named else " (never received, or lost before)"
        print_line(f"{gap.episode} lacks steps {gap.first_step} to {last}{cause}")


def _table(findings: Sequence[DamageReport]) -> Table:
    columns = [Column(name, no_wrap=True) for name in ("segment", "offset", "bytes", "record")]
    table = Table(*columns, "reason and lost chunks", box=None, header_style="bold")
    for each in findings:
        held = [f"{chunk}{'' if each.surely else ' (by its header)'}" for chunk in each.chunks]
        last = f" to {each.last_sequence}" if each.last_sequence > each.sequence else ""
        table.add_row(
            "manifest" if each.segment < 0 else str(each.segment),
            str(each.offset),
            str(each.length),
            "?" if each.sequence < 0 else f"{each.sequence}{last}",
            Text("\n".join([each.reason, *_first_lines(held, "chunks")])),
        )
    return table


def _first_lines(lines: list[str], what: str) -> list[str]:
    """The first `MAX_LINES` lines, and the number of the others."""
    more = len(lines) - MAX_LINES
    return lines if more <= 0 else [*lines[:MAX_LINES], f"and {more} more {what}; --json lists all"]


def label_main(args: argparse.Namespace) -> int:
    """Runs ``label``.

    Raises:
        StoreError: the store, an episode or the steps do not exist, or no label option was given.
    """
    with StoreReader.open(args.path) as reader:
        reader.refresh()
        _check_label_options(args)
        labels = [label for name in args.episodes for label in _labels(args, name, reader.index)]
        open_ended = [] if args.success is None or args.keep_reward else _without_end(reader.index, args.episodes)
    if not labels:
        raise StoreError("no label given: use --success, --reward, --phase, --delete, --restore, --note or --undo")
    by_gateway = _store_labels(args.path, labels)
    count = len(args.episodes)
    episodes = f"{count} episodes" if count > 1 else args.episodes[0]
    print_line(
        f"{episodes}: {len(labels)} labels stored" + (" by the process that writes the store" if by_gateway else "")
    )
    run, options = args.path.resolve().parent, ", ".join(f"{key} {value}" for key, value in _given_options(args))
    for name in args.episodes:
        action = f"label {name}: {options}"
        audit_operator_action(operator_name(args.by), action, run=run if (run / "config.yaml").exists() else None)
    for name in open_ended:
        print_line(f"{name}: its end is not stored yet; the last reward changes when it arrives")
    return 0


def _check_label_options(args: argparse.Namespace) -> None:
    """Raises StoreError: options conflict."""
    if args.keep_reward and args.success is None:
        raise StoreError("--keep-reward requires --success")
    if args.undo and (
        args.success or args.reward is not None or args.phase or args.delete or args.restore or args.steps
    ):
        raise StoreError("--undo cannot be combined with other labels; use two commands")


def _labels(args: argparse.Namespace, episode: str, index: Index) -> list[Label]:
    steps, labels = _steps(index, episode, args), list[Label]()
    common = {"episode": episode, "labeller": operator_name(args.by), "at_unix_ns": time.time_ns(), "note": args.note}
    if args.undo:
        return [UndoLabel(undone_at_unix_ns=_newest_label_time(index, episode), **common)]
    if args.success is not None:
        labels.append(SuccessLabel(success=SUCCESS[args.success], keep_reward=args.keep_reward, **common))
    if args.reward is not None:
        labels.append(RewardLabel(first_step=steps.start, rewards=(args.reward,) * len(steps), **common))
    if args.phase is not None:
        labels.append(PhaseLabel(first_step=steps.start, steps=len(steps), phase=Phase[args.phase.upper()], **common))
    if args.delete or args.restore:
        labels.append(DeleteLabel(deleted=args.delete, **common))
    return labels or ([NoteLabel(**common)] if args.note else [])


def _given_options(args: argparse.Namespace) -> list[tuple[str, object]]:
    """The given label options with their values."""
    names = ("success", "keep_reward", "reward", "phase", "steps", "delete", "restore", "undo", "note")
    given = {name: getattr(args, name) for name in names}
    return [(name, value) for name, value in given.items() if value not in (None, False, "")]


def _newest_label_time(index: Index, episode: str) -> int:
    """Time of the labels that --undo reverts. Raises StoreError: there are none."""
    valid = [label for label in effective_labels(index.labels(episode)) if label.labeller != RETENTION_LABELLER]
    if not valid:
        raise StoreError(f"{episode} has no label to undo; `user-sys store inspect --episode` shows its labels")
    return valid[-1].at_unix_ns


def _without_end(index: Index, episodes: Sequence[str]) -> list[str]:
    return [name for name in episodes if index.episodes.end_index[index.episodes.find(name)] < 0]


def _steps(index: Index, episode: str, args: argparse.Namespace) -> range:
    """The steps of the option. Raises StoreError: the store has no such episode or steps."""
    row = index.episodes.find(episode)
    if row < 0:
        raise StoreError(f"{args.path} has no episode {episode!r}; `user-sys store inspect {args.path}` lists them")
    own = index.chunks.episode == row
    total = int((index.chunks.first_step[own] + index.chunks.steps[own]).max())
    if args.steps is None:
        return range(total)
    if args.reward is None and args.phase is None:
        raise StoreError("--steps requires --reward or --phase; other labels cover the episode")
    if args.steps.stop > total:
        raise StoreError(f"{episode} has steps 0 to {total - 1}; {args.steps.start}-{args.steps.stop - 1} exceeds that")
    steps: range = args.steps
    return steps


def _store_labels(path: Path, labels: Sequence[Label]) -> bool:
    """Stores `labels` durably; True if the process that writes the store did so.

    Raises:
        StoreError: that process does not take them in time; they stay queued.
    """
    try:
        add_labels(path, labels)
    except StoreLocked as locked:
        if wait_until_stored(queue_labels(path, labels), STORE_TIMEOUT_S):
            return True
        raise StoreError(
            f"{locked}. It does not store labels, so it may not be a running gateway; "
            f"they stay queued in {path / QUEUE_FOLDER} for the next gateway"
        ) from None
    return False


class EvictedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that retention would evict, and the reason."""

    episode: str
    source: EpisodeSource
    steps: int
    size_bytes: int
    why: str


class CompactionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of a compaction.

    Attributes:
        deleted_bytes: size of episodes that labels already delete.
        leaving: episodes to evict, in order.
        shortfall_bytes: excess that remains because the rest is protected.
    """

    size_bytes: int
    deleted_bytes: int
    leaving: tuple[EvictedEpisode, ...]
    leaving_bytes: int
    shortfall_bytes: int


def plan_compaction(path: Path, retention: Retention) -> CompactionPlan:
    """Changes nothing; another process may be writing. Raises StoreError: there is no store."""
    size = disk_bytes(path)
    with StoreReader.open(path) as reader:
        reader.refresh()
        index, choice = reader.index, plan_eviction(reader.index, retention, size)
        dead = ~index.chunks.alive & ~index.chunks.gone
        deleted = int(record_bytes_of(index)[dead].sum())
        leaving = _evicted(choice, reader.episodes())
    return CompactionPlan(
        size_bytes=size,
        deleted_bytes=deleted,
        leaving=leaving,
        leaving_bytes=choice.freed_bytes,
        shortfall_bytes=choice.shortfall_bytes,
    )


def _evicted(choice: EvictionPlan, episodes: Sequence[EpisodeSummary]) -> tuple[EvictedEpisode, ...]:
    by_name = {episode.episode: episode for episode in episodes}
    return tuple(
        EvictedEpisode(
            episode=name,
            source=by_name[name].source,
            steps=by_name[name].steps,
            size_bytes=by_name[name].size_bytes,
            why=_reason(by_name[name]),
        )
        for name in choice.episodes
    )


def _reason(episode: EpisodeSummary) -> str:
    if episode.source is EpisodeSource.EVALUATION:
        return "an evaluation"
    if not episode.complete:
        return "never ended"
    verdict = {True: "successful", False: "unsuccessful", None: "of unknown success"}[episode.success]
    return verdict


def compact_main(args: argparse.Namespace) -> int:
    """Runs ``compact``; status 1 if damage prevented a rewrite. Raises as `compact_store`."""
    retention = _retention(args.max_bytes, args.keep)
    if args.dry_run:
        planned = plan_compaction(args.path, retention)
        if args.json:
            print_json(planned)
        else:
            _show_plan(planned, retention)
        return 0
    with count_bar("rewriting segments", None) as advance:
        report = _compacted(args.path, retention, advance)
    if args.json:
        print_json(report)
    else:
        _show_compaction(report, args.path)
    return EXIT_DAMAGED if report.damaged else 0


def _compacted(path: Path, retention: Retention, advance: Advance) -> CompactionReport:
    try:
        return compact_store(path, retention, advance=advance)
    except StoreLocked as locked:
        advice = "a gateway compacts every gateway.upkeep_s, to gateway.retention.max_bytes"
        raise StoreLocked(f"{locked}, or wait: {advice}; --dry-run works while it writes") from None


def _retention(max_bytes: int, keep: Sequence[str] | None) -> Retention:
    if keep is None:
        return Retention(max_bytes=max_bytes)
    if not max_bytes:
        raise StoreError("--keep requires --max-bytes, such as --max-bytes 20GB")
    if NO_PROTECTION in keep and len(keep) > 1:
        raise StoreError("--keep nothing excludes other --keep options")
    sources = tuple(EpisodeSource(name) for name in keep if name not in (INTERVENTIONS, NO_PROTECTION))
    return Retention(max_bytes=max_bytes, keep_sources=sources, keep_interventions=INTERVENTIONS in keep)


def _show_plan(planned: CompactionPlan, retention: Retention) -> None:
    if planned.leaving:
        columns = (Column(name, no_wrap=True) for name in ("to evict", "source", "steps", "bytes", "why"))
        table = Table(*columns, box=None, header_style="bold")
        for each in planned.leaving:
            size = size_text(each.size_bytes)
            table.add_row(Text(each.episode), str(each.source), str(each.steps), size, each.why)
        Console().print(table)
    bound = f"; the limit is {size_text(retention.max_bytes)}" if retention.max_bytes else ""
    print_line(f"the store takes {size_text(planned.size_bytes)}{bound}")
    print_line(f"deleted episodes take {size_text(planned.deleted_bytes)} of that; compaction frees it")
    if retention.max_bytes:
        print_line(f"{len(planned.leaving)} more episodes would be evicted,  {size_text(planned.leaving_bytes)}")
    _show_shortfall(planned.shortfall_bytes)


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


def merge_main(args: argparse.Namespace) -> int:
    """Runs ``merge``; status 1 if damaged chunks were skipped. Raises as `merge_stores`."""
    for path in args.paths:
        require_store(path)
    with count_bar("merging chunks", None) as advance:
        report = merge_stores(args.paths, args.into, advance=advance)
    copy_robot_records((card for path in args.paths for card in robot_records_of_store(path)), args.into)
    if args.json:
        print_json(report)
    else:
        duplicates = f", {report.duplicates} already existed" if report.duplicates else ""
        print_line(f"{args.into}: {report.chunks} chunks and {report.labels} labels added{duplicates}")
        for name in report.renamed:
            print_line(f"{name}: renamed, because another episode has that id")
        if report.damaged:
            print_line(f"{report.damaged} damaged chunks were skipped; `user-sys store verify` lists them")
    return EXIT_DAMAGED if report.damaged else 0
