"""Maintenance of a store: labels, retention, compaction, merging.

These functions need a store that no process writes. A gateway calls the shared parts (`plan_eviction`,
`deletion_labels`, `reclaim_space`) on its own store.

An episode is removed in two steps. A label deletes it, durably and visibly to all readers; then compaction
rewrites its segments. The label stays, so that a chunk of the episode that arrives again is recognised. A crash
in between leaves a deleted episode that still takes space.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from crc32c import crc32c

from user_sys.codec import Array
from user_sys.episode import Chunk, EpisodeSource, PackedChunk
from user_sys.errors import ConfigError, StoreCorrupt, StoreError, StoreRecordGone, WireError
from user_sys.store.index import Index, is_intervention
from user_sys.store.index_block import CHUNK_KIND
from user_sys.store.labels import DeleteLabel, Label, queued_files, read_queued_labels, remove_queued
from user_sys.store.log_writer import SEGMENT_BYTES
from user_sys.store.record_format import ALIGN_BYTES, RECORD_HEADER_BYTES, segment_numbers
from user_sys.store.store import StoreReader, StoreWriter

NO_LIMIT = 0
RETENTION_LABELLER = "retention"  # labeller of retention's deletions
DEAD_SHARE = 0.25  # dead share at which a segment is rewritten
SMALL_SHARE = 0.25  # neighbours below this share of a segment are joined
SYNC_BYTES = 8 << 20
MAX_RENAMED_LENGTH = 128 - 9  # of an episode id before its suffix
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Size limit of a store, and the episodes that are never evicted.

    Attributes:
        max_bytes: limit on disk; 0 for none.
        slack: above the limit, the store is reduced to ``(1 - slack) * max_bytes``, which leaves room for new episodes.
        keep_sources: episodes of these sources are never evicted.
        keep_interventions: episodes with interventions are never evicted.
        failure_share: share of the remaining steps for unsuccessful autonomous episodes; above it they go first.
    """

    max_bytes: int = NO_LIMIT
    slack: float = 0.1
    keep_sources: tuple[EpisodeSource, ...] = (EpisodeSource.DEMO,)
    keep_interventions: bool = True
    failure_share: float = 0.5

    def __post_init__(self) -> None:
        if self.max_bytes < 0 or not 0 <= self.slack < 1 or not 0 <= self.failure_share <= 1:
            raise ConfigError(
                f"retention: max_bytes {self.max_bytes} must not be negative, slack {self.slack} and failure_share "
                f"{self.failure_share} must be between 0 and 1"
            )


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

    Order: evaluations; episodes that never ended; autonomous ones, alternating between failures and successes so that
    both keep their share. Within each group the oldest go first. Possibly running episodes stay.

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


def _candidates(index: Index, retention: Retention) -> Iterator[int]:
    """Episode rows that may go, least useful first."""
    episodes = index.episodes
    age_order = np.argsort(episodes.started_unix_ns, kind="stable")
    eligible = age_order[_may_evict(index, retention)[age_order]]
    evaluation = episodes.source[eligible] == episodes.sources.find(EpisodeSource.EVALUATION)
    broken = ~evaluation & ~episodes.complete[eligible]
    yield from eligible[evaluation].tolist()
    yield from eligible[broken].tolist()
    rest = eligible[~evaluation & ~broken]
    good = episodes.success[rest] == 1
    yield from _balanced(rest[~good], rest[good], episodes.steps, retention.failure_share)


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
    running = ~episodes.complete & (episodes.started_unix_ns >= newest[episodes.robot])
    may_go: Array = alive & ~protected & ~running
    return may_go


def _balanced(failures: Array, successes: Array, steps: Array, failure_share: float) -> Iterator[int]:
    """Alternates, oldest first, taking from the side that exceeds its share of the remaining steps."""
    bad, good = deque(failures.tolist()), deque(successes.tolist())
    bad_steps, good_steps = int(steps[failures].sum()), int(steps[successes].sum())
    while bad or good:
        if bad and (not good or bad_steps >= failure_share * (bad_steps + good_steps)):
            row = bad.popleft()
            bad_steps -= int(steps[row])
        else:
            row = good.popleft()
            good_steps -= int(steps[row])
        yield row


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
        taken = list(_append_queued(path, writer))
        for each in labels:
            writer.append_label(each)
    for file in taken:
        remove_queued(file)


def _append_queued(path: Path, writer: StoreWriter) -> Iterator[Path]:
    """Appends queued labels; yields each file after its labels were appended."""
    for file in queued_files(path):
        try:
            waiting = read_queued_labels(file)
        except StoreError as error:
            _logger.warning("store.queued_labels_invalid %s", error)
            continue
        for each in waiting:
            writer.append_label(each)
        yield file


def compact_store(
    path: Path, retention: Retention = KEEP_ALL, *, advance: Callable[[int], object] | None = None
) -> CompactionReport:
    """Evicts episodes by `retention`, then frees the space of deleted episodes. Blocks.

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
        reader.refresh()
        choice = plan_eviction(reader.index, retention, before)
        for name in deletion_labels(choice):
            writer.append_label(name)
        if not reader.index.chunks.alive.all() or choice.episodes:
            writer.rotate()
    with StoreWriter.open(path) as writer, StoreReader.open(path) as reader:
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
    total = 0
    for file in path.glob("*.seg"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            _logger.debug("store.segment_replaced %s", file)
    return total


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
    for entry in writer.sealed_segments():
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
        renamed: new ids of episodes whose ids were taken.
    """

    chunks: int
    duplicates: int
    labels: int
    damaged: int
    renamed: tuple[str, ...]


def merge_stores(paths: Sequence[Path], into: Path, *, advance: Callable[[int], object] | None = None) -> MergeReport:
    """Copies other stores into the store at `into`, which is created if needed. Repeatable. Blocks.

    Skips chunks that `into` has, and deleted episodes; labels are copied with their episodes. If the id belongs to a
    different episode in `into` (other robot, start or seed), the episode gets a deterministic suffix, so that a
    repeated merge recognises it. The sources may be written during the merge.

    Args:
        advance: called with 1 for each visited chunk.

    Raises:
        StoreLocked: another process writes `into`.
        StoreFull, StoreError: `into` cannot be written or is in `paths`, or a path has no store.
    """
    for path in paths:
        require_store(path)
        if into.exists() and into.samefile(path):
            raise StoreError(f"{path} cannot be merged into itself")
    counts: Counter[str] = Counter()
    renamed: list[str] = []
    with StoreWriter.open(into) as writer, StoreReader.open(into) as present:
        for path in paths:
            present.refresh()
            with StoreReader.open(path) as source:
                source.refresh()
                counts["damaged"] += len(source.damaged)
                names = _renames(source.index, present.index)
                _copy_chunks(source, writer, names, counts, advance)
                _copy_labels(source, present, writer, names, counts)
            writer.sync()
            renamed += names.values()
    counted = {name: counts[name] for name in ("chunks", "duplicates", "labels", "damaged")}
    return MergeReport(**counted, renamed=tuple(renamed))


def _renames(source: Index, present: Index) -> dict[str, str]:
    """New ids for episodes of `source` whose ids belong to other episodes of `present`."""
    new = {}
    for row, name in enumerate(source.episodes.ids.names):
        row_present = present.episodes.find(name)
        if row_present >= 0 and _identity(source, row) != _identity(present, row_present):
            new[name] = f"{name[:MAX_RENAMED_LENGTH]}.{crc32c(repr(_identity(source, row)).encode()):08x}"
    return new


def _identity(index: Index, row: int) -> tuple[str, str, str, int, int]:
    e = index.episodes
    names = (e.robots.names[e.robot[row]], e.embodiments.names[e.embodiment[row]], e.tasks.names[e.task[row]])
    return (*names, int(e.seed[row]), int(e.started_unix_ns[row]))


def _copy_chunks(
    source: StoreReader,
    writer: StoreWriter,
    names: Mapping[str, str],
    counts: Counter[str],
    advance: Callable[[int], object] | None,
) -> None:
    for row in np.flatnonzero(source.index.chunks.alive).tolist():
        if advance is not None:
            advance(1)
        try:
            counts["chunks" if _append_renamed(writer, source.read_packed(row), names) else "duplicates"] += 1
        except StoreRecordGone:
            continue  # evicted by the source's writer in the meantime
        except (StoreCorrupt, WireError) as error:
            _logger.warning("store.merge_skipped %s", error)
            counts["damaged"] += 1
            continue
        if writer.pending_bytes > SYNC_BYTES:
            writer.sync()


def _append_renamed(writer: StoreWriter, found: PackedChunk, names: Mapping[str, str]) -> bool:
    name = names.get(found.header.episode)
    if name is None:
        return writer.append(found.packet.view, found)
    chunk = found.unpack()
    return writer.append(
        Chunk(msgspec.structs.replace(chunk.header, episode=name), chunk.columns, chunk.final).encode()
    )


def _copy_labels(
    source: StoreReader, present: StoreReader, writer: StoreWriter, names: Mapping[str, str], counts: Counter[str]
) -> None:
    episodes = source.index.episodes
    for row in np.flatnonzero(~episodes.deleted).tolist():
        old = episodes.ids.names[row]
        name = names.get(old, old)
        existing = present.index.labels(name)
        for label in source.index.labels(old):
            if (label := msgspec.structs.replace(label, episode=name)) not in existing:
                writer.append_label(label)
                counts["labels"] += 1
