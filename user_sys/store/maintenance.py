"""Which episodes to give up when a store has grown too large. A pure function of the index; nothing is deleted here.

A store's upkeep after the fact: labels, retention, compaction. For a store that nobody writes at the time.

A running gateway does the same from inside (`user_sys.gateway.ingest`), with the same functions.

Giving up an episode takes two steps. First it is deleted by a label, which is durable and which every reader sees; then
compaction rewrites the segments that it lay in. The label stays for ever, so that a chunk of the episode that a robot
sends once more is recognised. A crash in between leaves an episode that is deleted and still takes space.

Several stores into one.
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
from user_sys.store.log import SEGMENT_BYTES, segment_numbers
from user_sys.store.record_format import ALIGN_BYTES, RECORD_HEADER_BYTES
from user_sys.store.store import StoreReader, StoreWriter

NO_LIMIT = 0


@dataclass(frozen=True)
class Retention:
    """How much is kept, and what before all else.

    Attributes:
        max_bytes: the store should take no more on disk; 0 for no limit.
        slack: when it takes more, it is brought below ``(1 - slack) * max_bytes``, lest it be full again at once.
        keep_sources: episodes of these sources are never chosen.
        keep_interventions: neither are episodes in which a person showed how it is done.
        failure_share: unsuccessful autonomous episodes may hold this share of the steps of all that are left; where
            they hold more they go first.
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
                f"{self.failure_share} must be shares of 1"
            )


@dataclass(frozen=True)
class EvictionPlan:
    """Episodes to give up, by name, in the order in which they lose their place.

    Attributes:
        freed_bytes: what they take on disk.
        shortfall_bytes: what would have to go besides, had it not to be kept.
    """

    episodes: tuple[str, ...]
    freed_bytes: int
    shortfall_bytes: int


def plan_eviction(index: Index, retention: Retention, disk_bytes: int) -> EvictionPlan:
    """The least useful episodes, as many as must go.

    First evaluations, then episodes that broke off, then autonomous ones: of the unsuccessful and the successful
    whichever hold more than their share, so that the learner goes on seeing both. Within each of these the oldest go
    first. Episodes that may still be running are left alone.

    Args:
        disk_bytes: what the store takes on disk now; what is deleted and not yet compacted away counts as gone.
    """
    sizes = _episode_bytes(index, disk_bytes)
    excess = int(sizes.sum()) - retention.max_bytes if retention.max_bytes else 0
    if excess <= 0:
        return EvictionPlan((), 0, 0)
    wanted = int(sizes.sum() - (1 - retention.slack) * retention.max_bytes)
    chosen: list[str] = []
    freed = 0
    for row in _candidates(index, retention):
        if freed >= wanted:
            break
        chosen.append(index.episodes.ids.names[row])
        freed += int(sizes[row])
    return EvictionPlan(tuple(chosen), freed, max(0, excess - freed))


def _episode_bytes(index: Index, disk_bytes: int) -> Array:
    """What each episode takes on disk, its share of indexes and headers included: int64."""
    chunks = index.chunks
    sizes = record_bytes_of(index) * ~chunks.gone
    alive = np.bincount(chunks.episode, sizes * chunks.alive, len(index.episodes))
    total: Array = (alive * (disk_bytes / max(1, int(sizes.sum())))).astype(np.int64)
    return total


def record_bytes_of(index: Index) -> Array:
    """What the record of each chunk row takes in its segment: int64."""
    taken: Array = RECORD_HEADER_BYTES + -(-index.chunks.length // ALIGN_BYTES) * ALIGN_BYTES
    return taken


def _candidates(index: Index, retention: Retention) -> Iterator[int]:
    """Episode rows that may go, least useful first."""
    episodes = index.episodes
    age_order = np.argsort(episodes.started_unix_ns, kind="stable")
    eligible = age_order[_may_go(index, retention)[age_order]]
    evaluation = episodes.source[eligible] == episodes.sources.find(EpisodeSource.EVALUATION)
    broken = ~evaluation & ~episodes.complete[eligible]
    yield from eligible[evaluation].tolist()
    yield from eligible[broken].tolist()
    rest = eligible[~evaluation & ~broken]
    good = episodes.success[rest] == 1
    yield from _balanced(rest[~good], rest[good], episodes.steps, retention.failure_share)


def _may_go(index: Index, retention: Retention) -> Array:
    episodes, chunks = index.episodes, index.chunks
    kept = np.isin(episodes.source, [episodes.sources.find(source) for source in retention.keep_sources])
    if retention.keep_interventions:
        by_hand = index.episode_of(np.flatnonzero(is_intervention(index.steps.phase)))
        kept[by_hand] = True
    alive = np.zeros(len(episodes), bool)
    alive[chunks.episode[chunks.alive]] = True
    newest = np.zeros(len(episodes.robots), np.int64)
    np.maximum.at(newest, episodes.robot, episodes.started_unix_ns)
    running = ~episodes.complete & (episodes.started_unix_ns >= newest[episodes.robot])
    may_go: Array = alive & ~kept & ~running
    return may_go


def _balanced(failures: Array, successes: Array, steps: Array, failure_share: float) -> Iterator[int]:
    """Both in turn, oldest first, from the side that holds more than its share of the steps that are left."""
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


RETENTION_LABELLER = "retention"  # the labeller of what retention gives up
DEAD_SHARE = 0.25  # a segment is rewritten once so much of it is not wanted any more
SMALL_SHARE = 0.25  # neighbours that fill less than this share of a segment are put together
KEEP_ALL = Retention()

_logger = logging.getLogger(__name__)


class CompactionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a compaction did.

    Attributes:
        dropped: episodes that retention gave up.
        freed_bytes, size_bytes: how much smaller the store's files became, and what they take now.
        shortfall_bytes: how much more than allowed is left, because all of it must be kept.
        damaged: why a segment could not be rewritten, one line each; its bytes are as they were.
    """

    dropped: tuple[str, ...]
    freed_bytes: int
    size_bytes: int
    shortfall_bytes: int
    damaged: tuple[str, ...]


def add_labels(path: Path, labels: Iterable[Label]) -> None:
    """Adds labels to the store at `path`, durably, behind those that wait in its inbox (`user_sys.store.labels`).

    Raises:
        StoreLocked: a gateway writes the store; ask that one.
        StoreError: there is no store, or it cannot be written.
        WireError: one of them says what no label may.
    """
    require_store(path)
    with StoreWriter.open(path) as writer:
        taken = list(_take_posts(path, writer))
        for each in labels:
            writer.append_label(each)
    for file in taken:
        remove_queued(file)


def _take_posts(path: Path, writer: StoreWriter) -> Iterator[Path]:
    """Appends the labels that wait for a writer; yields each file that held them, once they are appended."""
    for file in queued_files(path):
        try:
            waiting = read_queued_labels(file)
        except StoreError as error:
            _logger.warning("store.post-refused %s", error)
            continue
        for each in waiting:
            writer.append_label(each)
        yield file


def compact_store(
    path: Path, retention: Retention = KEEP_ALL, *, advance: Callable[[int], object] | None = None
) -> CompactionReport:
    """Gives back what deleted episodes take, after giving up those that `retention` does not keep. Blocks.

    Args:
        advance: told 1 for each file that was rewritten.

    Raises:
        StoreLocked: a gateway writes the store; it compacts by itself.
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


# What a gateway shares


def deletion_labels(choice: EvictionPlan) -> list[Label]:
    """The labels that give up what was chosen."""
    now = time.time_ns()
    return [DeleteLabel(episode=name, labeller=RETENTION_LABELLER, at_unix_ns=now) for name in choice.episodes]


def disk_bytes(path: Path) -> int:
    """What the store's segments take on disk; those that another process just replaced count as gone."""
    total = 0
    for file in path.glob("*.seg"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            _logger.debug("store.replaced %s", file)
    return total


class SegmentUsage(NamedTuple):
    """A sealed segment: its number, its size, and how much of that nobody wants any more, in bytes."""

    number: int
    size_bytes: int
    dead_bytes: int


def reclaim_space(writer: StoreWriter, index: Index, *, min_dead_share: float = DEAD_SHARE) -> Iterator[str]:
    """Rewrites the sealed segments in which deleted episodes take at least `least_share`, and joins small ones.

    Call it only once the deletions in `index` are durable. It goes on as it is iterated, and blocks for as long as it
    copies; appends go on meanwhile, and readers find what moved.

    Yields after each rewriting: nothing, or why it could not be done and the segments are as they were.

    Raises:
        StoreFull: no space for a new segment; what was rewritten until then stays so.
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
            _logger.warning("store.not-compacted segments=%s: %s", numbers, error)
            yield str(error)
        else:
            yield ""


def plan_rewrites(loads: Sequence[SegmentUsage], full_bytes: int, min_dead_share: float) -> list[list[int]]:
    """Which segments to rewrite, each list into one segment: neighbours, of at most `full_bytes` together.

    Every segment in which at least `least_share` is dead (and not nothing) is among them; of the others those that are
    small and have a small or dead neighbour.
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
    """Raises StoreError where there is no store at `path`; none is made."""
    if not segment_numbers(path):
        raise StoreError(f"{path} is no store: it has no segment")


SYNC_BYTES = 8 << 20
MAX_RENAMED_LENGTH = 128 - 9  # of an episode that gets a suffix


class MergeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a merge brought.

    Attributes:
        chunks, labels: that were new.
        duplicates: chunks that were there already.
        damaged: chunks that could not be read, or lay in an episode of another robot, and were left out.
        renamed: the new names of episodes whose names other episodes have.
    """

    chunks: int
    duplicates: int
    labels: int
    damaged: int
    renamed: tuple[str, ...]


def merge_stores(paths: Sequence[Path], into: Path, *, advance: Callable[[int], object] | None = None) -> MergeReport:
    """Copies what other stores hold into the store at `into`, which is created if need be. May be repeated.

    Chunks that `into` has are left out, and so are deleted episodes; labels come with their episodes. An episode whose
    name belongs to another one in `into` (another robot, start or seed) gets a suffix that depends on what it is alone,
    so that repeating the merge recognises it. Blocks. The others may be written meanwhile.

    Args:
        advance: told 1 for each chunk that was looked at.

    Raises:
        StoreLocked: another process writes `into`.
        StoreFull, StoreError: `into` cannot be written or is among `paths`, or there is no store at one of them.
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
                names = _names(source.index, present.index)
                _copy_chunks(source, writer, names, counts, advance)
                _copy_labels(source, present, writer, names, counts)
            writer.sync()
            renamed += names.values()
    counted = {name: counts[name] for name in ("chunks", "duplicates", "labels", "damaged")}
    return MergeReport(**counted, renamed=tuple(renamed))


def _names(source: Index, present: Index) -> dict[str, str]:
    """New names for episodes of `source` whose names other episodes of `present` have."""
    new = {}
    for row, name in enumerate(source.episodes.ids.names):
        there = present.episodes.find(name)
        if there >= 0 and _identity(source, row) != _identity(present, there):
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
            counts["chunks" if _append(writer, source.read_packed(row), names) else "duplicates"] += 1
        except StoreRecordGone:
            continue  # given up meanwhile by the source's own writer
        except (StoreCorrupt, WireError) as error:
            _logger.warning("store.merge-skipped %s", error)
            counts["damaged"] += 1
            continue
        if writer.pending_bytes > SYNC_BYTES:
            writer.sync()


def _append(writer: StoreWriter, found: PackedChunk, names: Mapping[str, str]) -> bool:
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
        known = present.index.labels(name)
        for said in source.index.labels(old):
            if (said := msgspec.structs.replace(said, episode=name)) not in known:
                writer.append_label(said)
                counts["labels"] += 1
