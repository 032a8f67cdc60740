"""Maintenance of a store: labels, retention, compaction, merging.

These functions need a store that no process writes. A gateway calls the shared parts (`plan_eviction`,
`deletion_labels`, `reclaim_space`) on its own store.

An episode is removed in two steps. A label deletes it, durably and visibly to all readers; then compaction
rewrites its segments. The label stays, so that a chunk of the episode that arrives again is recognised. A crash
in between leaves a deleted episode that still takes space.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from hal.settings import Limit
from user_sys.codec import Array
from user_sys.episode import EpisodeSource
from user_sys.errors import StoreCorrupt, StoreError, StoreRecordGone, WireError
from user_sys.store.index import Index, is_intervention
from user_sys.store.index_block import CHUNK_KIND, LABEL_KIND, IndexBlockBuilder
from user_sys.store.labels import (
    RETENTION_LABELLER,
    DeleteLabel,
    Label,
    encode_label,
    queued_files,
    read_queued_labels,
    remove_queued,
)
from user_sys.store.log_writer import SEGMENT_BYTES
from user_sys.store.record_format import ALIGN_BYTES, RECORD_HEADER_BYTES, RecordRef, segment_numbers
from user_sys.store.store import StoreReader, StoreWriter

NO_LIMIT = 0
DEAD_SHARE = 0.25  # dead share at which a segment is rewritten
SMALL_SHARE = 0.25  # neighbours below this share of a segment are joined
SYNC_BYTES = 8 << 20
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Size limit of a store, and the episodes that are never evicted.

    Attributes:
        max_bytes: limit on disk; 0 for none.
        slack: above the limit, the store is reduced to ``(1 - slack) * max_bytes``, which leaves room for new episodes.
        keep_sources: episodes of these sources are never evicted.
        keep_interventions: episodes with interventions are never evicted.
    """

    max_bytes: Limit = NO_LIMIT
    slack: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    keep_sources: tuple[EpisodeSource, ...] = (EpisodeSource.DEMO,)
    keep_interventions: bool = True


@dataclass(frozen=True)
class EvictionPlan:
    """Episodes to evict, by name, in order.

    Attributes:
        freed_bytes: their size on disk.
        shortfall_bytes: excess that remains because the rest is protected.
    """

    episodes: tuple[str, ...]
    freed_bytes: int
    shortfall_bytes: int


def plan_eviction(index: Index, retention: Retention, disk_bytes: int) -> EvictionPlan:
    """The least useful episodes, as many as must go. Changes nothing.

    Order: evaluations; episodes that never ended; others. Within each group the first stored go first: a robot's clock
    may be wrong or set back. So merged and imported episodes are as new as the merge. Possibly running episodes stay.

    Args:
        disk_bytes: current size of the store on disk; deleted episodes that still take space count as gone.
    """
    sizes = _episode_bytes(index, disk_bytes)
    excess = int(sizes.sum()) - retention.max_bytes if retention.max_bytes else 0
    if excess <= 0:
        return EvictionPlan((), 0, 0)
    target = int(sizes.sum() - (1 - retention.slack) * retention.max_bytes)
    chosen: list[str] = []
    freed = 0
    for row in _candidates(index, retention):
        if freed >= target:
            break
        chosen.append(index.episodes.ids.names[row])
        freed += int(sizes[row])
    return EvictionPlan(tuple(chosen), freed, max(0, excess - freed))


def _episode_bytes(index: Index, disk_bytes: int) -> Array:
    """Size of each episode on disk, with its share of indexes and headers, int64."""
    chunks = index.chunks
    sizes = record_bytes_of(index) * ~chunks.gone
    alive = np.bincount(chunks.episode, sizes * chunks.alive, len(index.episodes))
    total: Array = (alive * (disk_bytes / max(1, int(sizes.sum())))).astype(np.int64)
    return total


def record_bytes_of(index: Index) -> Array:
    """Size of each chunk row's record in its segment, int64."""
    taken: Array = RECORD_HEADER_BYTES + -(-index.chunks.length // ALIGN_BYTES) * ALIGN_BYTES
    return taken


def _candidates(index: Index, retention: Retention) -> list[int]:
    """Episode rows that may go, least useful first."""
    episodes = index.episodes
    rows = np.flatnonzero(_may_evict(index, retention))
    is_evaluation = episodes.source[rows] == episodes.sources.find(EpisodeSource.EVALUATION)
    order = np.lexsort((rows, episodes.complete[rows], ~is_evaluation))
    return [int(row) for row in rows[order]]


def _may_evict(index: Index, retention: Retention) -> Array:
    episodes, chunks = index.episodes, index.chunks
    protected = np.isin(episodes.source, [episodes.sources.find(source) for source in retention.keep_sources])
    if retention.keep_interventions:
        by_hand = index.episode_of(np.flatnonzero(is_intervention(index.steps.phase)))
        protected[by_hand] = True
    alive = np.zeros(len(episodes), bool)
    alive[chunks.episode[chunks.alive]] = True
    newest = np.zeros(len(episodes.robots), np.int64)
    np.maximum.at(newest, episodes.robot, episodes.started_unix_ns)
    last = np.full(len(episodes.robots), -1, np.int64)  # each robot's last stored chunk, also if its clock was set back
    np.maximum.at(last, episodes.robot[chunks.episode], np.arange(len(chunks)))
    has_last = np.zeros(len(episodes), bool)
    has_last[chunks.episode[last[last >= 0]]] = True
    running = ~episodes.complete & (has_last | (episodes.started_unix_ns >= newest[episodes.robot]))
    may_go: Array = alive & ~protected & ~running
    return may_go


KEEP_ALL = Retention()


class CompactionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a compaction.

    Attributes:
        dropped: episodes that retention evicted.
        freed_bytes, size_bytes: reduction of the store's size, and its size now.
        shortfall_bytes: excess over the limit that remains because the rest is protected.
        damaged: reasons why segments could not be rewritten, one line each; their bytes are unchanged.
    """

    dropped: tuple[str, ...]
    freed_bytes: int
    size_bytes: int
    shortfall_bytes: int
    damaged: tuple[str, ...]


def add_labels(path: Path, labels: Iterable[Label]) -> None:
    """Adds labels to the store at `path`, durably, after those in its queue.

    Raises:
        StoreLocked: a gateway writes the store; queue the labels instead.
        StoreError: there is no store, or it cannot be written.
        WireError: a label is invalid.
    """
    require_store(path)
    with StoreWriter.open(path) as writer:
        _take_queued(path, writer)
        for each in labels:
            writer.append_label(each)


def _take_queued(path: Path, writer: StoreWriter) -> None:
    """Moves queued labels into the log, durably.

    A caller appends newer labels only afterwards: a kill before the removal repeats the queued ones behind all others.
    """
    taken = []
    for file, waiting in _queued(path):
        for each in waiting:
            writer.append_label(each)
        taken.append(file)
    writer.sync()
    for file in taken:
        remove_queued(file)


def _queued(path: Path) -> Iterator[tuple[Path, tuple[Label, ...]]]:
    """Each queued file with its labels, oldest first, without those that are invalid or taken in the meantime."""
    for file in queued_files(path):
        try:
            yield file, read_queued_labels(file)
        except FileNotFoundError:
            _logger.debug("store.queued_labels_taken %s", file)
        except StoreError as error:
            _logger.warning("store.queued_labels_invalid %s", error)


def compact_store(
    path: Path, retention: Retention = KEEP_ALL, *, advance: Callable[[int], object] | None = None
) -> CompactionReport:
    """Takes queued labels, evicts episodes by `retention`, then frees the space of deleted episodes. Blocks.

    Args:
        advance: called with 1 for each rewritten file.

    Raises:
        StoreLocked: a gateway writes the store and compacts it itself.
        StoreFull: no space to rewrite a segment; nothing is lost.
        StoreError: there is no store, or it cannot be written.
    """
    require_store(path)
    before = disk_bytes(path)
    with StoreWriter.open(path) as writer, StoreReader.open(path) as reader:
        _take_queued(path, writer)
        reader.refresh()
        choice = plan_eviction(reader.index, retention, before)
        for name in deletion_labels(choice):
            writer.append_label(name)
        if not reader.index.chunks.alive.all() or choice.episodes:
            writer.rotate()  # syncs the labels, and seals all earlier records
        reader.refresh()
        damaged = []
        for reason in reclaim_space(writer, reader.index, min_dead_share=0.0):
            damaged += [reason] if reason else []
            if advance is not None:
                advance(1)
    after = disk_bytes(path)
    return CompactionReport(
        dropped=choice.episodes,
        freed_bytes=before - after,
        size_bytes=after,
        shortfall_bytes=max(0, after - retention.max_bytes) if retention.max_bytes else 0,
        damaged=tuple(damaged),
    )


# Shared with the gateway


def deletion_labels(choice: EvictionPlan) -> list[Label]:
    """Labels that delete the episodes of the plan."""
    now = time.time_ns()
    return [DeleteLabel(episode=name, labeller=RETENTION_LABELLER, at_unix_ns=now) for name in choice.episodes]


def disk_bytes(path: Path) -> int:
    """Size of the store's segments on disk; segments replaced during the call count as gone."""
    return sum(status.st_size for status in _segment_statuses(path))


def newest_segment_unix_s(path: Path) -> float:
    """When a segment of the store was last written, by the clock of that time; 0 without segments."""
    return max((status.st_mtime for status in _segment_statuses(path)), default=0.0)


def _segment_statuses(path: Path) -> Iterator[os.stat_result]:
    for file in path.glob("*.seg"):
        try:
            yield file.stat()
        except FileNotFoundError:
            _logger.debug("store.segment_replaced %s", file)


class SegmentUsage(NamedTuple):
    """A sealed segment: number, size, and size of its deleted records, in bytes."""

    number: int
    size_bytes: int
    dead_bytes: int


def reclaim_space(writer: StoreWriter, index: Index, *, min_dead_share: float = DEAD_SHARE) -> Iterator[str]:
    """Rewrites sealed segments in which deleted episodes take at least `min_dead_share`, and joins small ones.

    The deletions in `index` must be durable. A generator: each step blocks for one rewrite. Appends continue, and
    readers find moved records.

    Yields after each rewrite: an empty string, or the reason why the segments are unchanged.

    Raises:
        StoreFull: no space for a new segment; earlier rewrites stay.
        StoreError: the disk failed.
    """
    chunks = index.chunks
    dead = ~chunks.alive & ~chunks.gone
    sequences = chunks.sequence[dead]
    unwanted = frozenset(sequences.tolist())
    taken = np.r_[0, np.cumsum(record_bytes_of(index)[dead])]
    loads = []
    lost = writer.lost_segments()
    for entry in writer.sealed_segments():
        if entry.name in lost:  # no rewrite across its place
            loads.append(SegmentUsage(entry.number, SEGMENT_BYTES, 0))
            continue
        low, high = np.searchsorted(sequences, [entry.first_sequence, entry.next_sequence])
        loads.append(SegmentUsage(entry.number, entry.size_bytes, int(taken[high] - taken[low])))
    for numbers in plan_rewrites(loads, SEGMENT_BYTES, min_dead_share):
        try:
            writer.rewrite(numbers, lambda ref: ref.kind != CHUNK_KIND or ref.sequence not in unwanted)
        except StoreCorrupt as error:
            _logger.warning("store.rewrite_failed segments=%s: %s", numbers, error)
            yield str(error)
        else:
            yield ""


def plan_rewrites(loads: Sequence[SegmentUsage], full_bytes: int, min_dead_share: float) -> list[list[int]]:
    """Groups of neighbouring segments to rewrite into one each, of at most `full_bytes`.

    Every segment with a dead share of at least `min_dead_share` (and above 0) is in a group, and small segments that
    have a small or dead neighbour.
    """
    groups: list[list[SegmentUsage]] = [[]]
    for load in loads:
        alive = load.size_bytes - load.dead_bytes
        held = sum(each.size_bytes - each.dead_bytes for each in groups[-1])
        if groups[-1] and held + alive > full_bytes:
            groups.append([])
        if _is_dead(load, min_dead_share) or alive < SMALL_SHARE * full_bytes:
            groups[-1].append(load)
        elif groups[-1]:
            groups.append([])
    return [
        [load.number for load in group]
        for group in groups
        if len(group) > 1 or any(_is_dead(load, min_dead_share) for load in group)
    ]


def _is_dead(load: SegmentUsage, least_share: float) -> bool:
    return load.dead_bytes > 0 and load.dead_bytes >= least_share * load.size_bytes


def require_store(path: Path) -> None:
    """Raises StoreError if there is no store at `path`; creates none."""
    if not segment_numbers(path):
        raise StoreError(f"{path} is not a store: it has no segment")


class MergeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a merge.

    Attributes:
        chunks, labels: added.
        duplicates: chunks that were already stored.
        damaged: chunks that were unreadable, or belong to another robot's episode, and were skipped.
    """

    chunks: int
    duplicates: int
    labels: int
    damaged: int


def merge_stores(paths: Sequence[Path], into: Path, *, advance: Callable[[int], object] | None = None) -> MergeReport:
    """Copies other stores into the store at `into`, which is created if needed. Repeatable. Blocks.

    Skips chunks that `into` has, and deleted episodes. Labels are copied with their episodes. A deletion in a source
    follows if `into` has the episode, unless retention made it. Queued labels count as stored ones. The sources may be
    written during the merge.

    Args:
        advance: called with 1 for each visited chunk.

    Raises:
        StoreLocked: another process writes `into`.
        StoreFull, StoreError: `into` cannot be written or is in `paths`, a path has no store, or two stores have
            different episodes with one id.
    """
    for path in paths:
        require_store(path)
        if into.exists() and into.samefile(path):
            raise StoreError(f"{path} cannot be merged into itself")
    counts: Counter[str] = Counter()
    with StoreWriter.open(into) as writer, StoreReader.open(into) as present:
        _take_queued(into, writer)
        for path in paths:
            present.refresh()
            with StoreReader.open(path) as source:
                waiting = [label for _, labels in _queued(path) for label in labels]  # before a gateway moves them
                source.refresh()
                _apply_queued(source.index, waiting)
                counts["damaged"] += len(source.damaged)
                _require_equal_identities(path, source.index, present.index)
                _copy_chunks(source, writer, counts, advance)
                _copy_labels(source, present, writer, counts)
            writer.sync()
    counted = {name: counts[name] for name in MergeReport.__struct_fields__}
    return MergeReport(**counted)


def _apply_queued(index: Index, waiting: Iterable[Label]) -> None:
    """Applies queued labels to `index` as if they were stored; skips those that it has."""
    builder = IndexBlockBuilder()
    for label in waiting:
        if label not in index.labels(label.episode):
            builder.add(RecordRef(0, 0, 0, LABEL_KIND, 0), encode_label(label))
    index.apply([builder.build()])


def _require_equal_identities(path: Path, source: Index, present: Index) -> None:
    """Raises StoreError: an episode of `source` has the id of another one in `present`."""
    for row, name in enumerate(source.episodes.ids.names):
        found = present.episodes.find(name)
        if found >= 0 and _identity(source, row) != _identity(present, found):
            raise StoreError(f"{path}: its episode {name} is not the one that the target has; nothing of it was added")


def _identity(index: Index, row: int) -> tuple[str, str, str, int, int]:
    e = index.episodes
    names = (e.robots.names[e.robot[row]], e.embodiments.names[e.embodiment[row]], e.tasks.names[e.task[row]])
    return (*names, int(e.seed[row]), int(e.started_unix_ns[row]))


def _copy_chunks(
    source: StoreReader, writer: StoreWriter, counts: Counter[str], advance: Callable[[int], object] | None
) -> None:
    for row in np.flatnonzero(source.index.chunks.alive).tolist():
        if advance is not None:
            advance(1)
        try:
            found = source.read_packed(row)
            counts["chunks" if writer.append(found.packet.view, found) else "duplicates"] += 1
        except StoreRecordGone:
            continue  # evicted by the source's writer in the meantime
        except (StoreCorrupt, WireError) as error:
            _logger.warning("store.merge_skipped %s", error)
            counts["damaged"] += 1
            continue
        if writer.pending_bytes > SYNC_BYTES:
            writer.sync()


def _copy_labels(source: StoreReader, present: StoreReader, writer: StoreWriter, counts: Counter[str]) -> None:
    episodes = source.index.episodes
    copied = dict.fromkeys(episodes.ids.names[row] for row in np.flatnonzero(~episodes.deleted).tolist())
    for name in [*copied, *(name for name in present.index.episodes.ids.names if name not in copied)]:
        existing = list(dict.fromkeys(reversed(present.index.labels(name))))[::-1]  # the last of equal ones counts
        missing = [label for label in source.index.labels(name) if label not in existing]
        if name not in copied:  # deleted, and maybe compacted; or the source never had it, and no label of it
            missing = [label for label in missing if label.labeller != RETENTION_LABELLER]
        # The last label in the log wins: those of the target from the first one that is newer than an added one on
        # follow it again. Both keep their order, which counts if a clock was set back.
        oldest_ns = min((label.at_unix_ns for label in missing), default=math.inf)
        newer = itertools.dropwhile(lambda label: label.at_unix_ns <= oldest_ns, existing)  # noqa: B023
        for label in heapq.merge(missing, newer, key=lambda label: label.at_unix_ns):
            writer.append_label(label)
        counts["labels"] += len(missing)
