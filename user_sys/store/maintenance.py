"""Maintenance of a store: labels, retention, compaction, merging, migration.

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
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from crc32c import crc32c
from msgspec import Meta

from hal.decode_errors import DECODE_ERRORS
from hal.settings import Limit
from user_sys.codec import Array, checksum, decode_packet_record, parse_packet
from user_sys.episode import (
    CAPTURE_TIME_SUFFIX,
    CRC_SUFFIX,
    FINAL_PREFIX,
    FRAME_SUFFIXES,
    IMAGE_PREFIX,
    LENGTH_SUFFIX,
    Chunk,
    ChunkHeader,
    EpisodeSource,
)
from user_sys.errors import StoreCorrupt, StoreError, StoreRecordGone, WireError
from user_sys.store.index import Index, is_intervention
from user_sys.store.index_block import CHUNK_KIND, LABEL_KIND, IndexBlockBuilder
from user_sys.store.labels import (
    RETENTION_LABELLER,
    DeleteLabel,
    Label,
    SuccessLabel,
    decode_label,
    encode_label,
    queued_files,
    read_queued_labels,
    remove_queued,
)
from user_sys.store.log_writer import SEGMENT_BYTES
from user_sys.store.record_format import (
    ALIGN_BYTES,
    FORMAT_VERSION,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    RecordRef,
    check_version,
    segment_numbers,
)
from user_sys.store.store import StoreReader, StoreWriter

NO_LIMIT = 0
DEAD_SHARE = 0.25  # dead share at which a segment is rewritten
SMALL_SHARE = 0.25  # neighbours below this share of a segment are joined
SYNC_BYTES = 8 << 20
_logger = logging.getLogger(__name__)
_VERSION = struct.Struct("<8sI")  # magic, version
_RECORD = struct.Struct("<4sHHIIQI")  # magic, kind, flags, payload bytes, payload CRC, sequence, schema
_PLACE = struct.Struct("<QQ")  # segment, offset
_CRC = struct.Struct("<I")
_PACKET = struct.Struct("<4sI")  # magic, header bytes
_RECORD_MAGIC, _FIRST_PACKET_MAGIC = b"\xf5UR1", b"USP1"
_RECORD_HEADER_BYTES, _ALIGN_BYTES = 32, 8
_ArrayPlace = tuple[str, str, tuple[int, ...], int, int]  # name, dtype, shape, offset, bytes


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

    Order: evaluations; episodes that never ended; others. Within each group the oldest go first. Possibly running
    episodes stay.

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
    order = np.lexsort((episodes.started_unix_ns[rows], episodes.complete[rows], ~is_evaluation))
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

    Skips chunks that `into` has, and deleted episodes; labels are copied with their episodes. Queued labels count as
    stored ones. The sources may be written during the merge.

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
    counted = {name: counts[name] for name in ("chunks", "duplicates", "labels", "damaged")}
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
    for row in np.flatnonzero(~episodes.deleted).tolist():
        name = episodes.ids.names[row]
        existing = list(dict.fromkeys(reversed(present.index.labels(name))))[::-1]  # the last of equal ones counts
        missing = [label for label in source.index.labels(name) if label not in existing]
        # The last label in the log wins: those of the target from the first one that is newer than an added one on
        # follow it again. Both keep their order, which counts if a clock was set back.
        oldest_ns = min((label.at_unix_ns for label in missing), default=math.inf)
        newer = itertools.dropwhile(lambda label: label.at_unix_ns <= oldest_ns, existing)  # noqa: B023
        for label in heapq.merge(missing, newer, key=lambda label: label.at_unix_ns):
            writer.append_label(label)
        counts["labels"] += len(missing)


def store_format(path: Path) -> int:
    """The format version of the store at `path`.

    Raises:
        StoreError: there is no store, or no segment of it has a valid header.
        StoreVersionMismatch: it is newer than this program's.
    """
    require_store(path)
    for segment in sorted(path.glob("*.seg")):
        with segment.open("rb") as file:
            header = file.read(SEGMENT_HEADER_BYTES)
        if len(header) == SEGMENT_HEADER_BYTES and crc32c(header[:-4]) == _CRC.unpack(header[-4:])[0]:
            version = int(_VERSION.unpack_from(header)[1])
            if version > FORMAT_VERSION:
                check_version(version, str(path))
            return version
    raise StoreError(f"{path}: no segment has a valid header, so its format is unknown; restore it from a backup")


def migrate_store(path: Path, into: Path) -> MergeReport:
    """Copies the chunks and labels of the store of format 1 at `path` to the new store `into`.

    Format 1 has the segment header's magic, version and CRC at today's places, and no footers. Its chunks are packets
    ``USP1`` or ``USP2``; its labels are today's, or records of success without a tag. Cameras lack the capture times.

    The report's `damaged` counts unreadable records and ranges of bytes. `path` is not changed.

    Raises:
        StoreError, StoreFull: `into` exists, or cannot be written.
    """
    if into.exists():
        raise StoreError(f"{into} exists; migrate into a new folder")
    counts: Counter[str] = Counter()
    with StoreWriter.open(into) as writer:
        segments = sorted(path.glob("*.seg"))
        for segment in segments:
            for kind, payload in _records(segment.read_bytes(), int(segment.stem), segment == segments[-1], counts):
                try:
                    if kind == CHUNK_KIND:
                        counts["chunks" if writer.append(_packet(payload)) else "duplicates"] += 1
                    elif kind == LABEL_KIND:
                        writer.append_label(_label(payload))
                        counts["labels"] += 1
                except (WireError, KeyError, TypeError, ValueError, *DECODE_ERRORS):
                    counts["damaged"] += 1
                if writer.pending_bytes > SYNC_BYTES:
                    writer.sync()
        writer.sync()
    return MergeReport(**{name: counts[name] for name in MergeReport.__struct_fields__})


def _records(raw: bytes, segment: int, is_last: bool, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
    """Kind and payload of each valid record; counts the damaged ranges between them."""
    end = offset = SEGMENT_HEADER_BYTES
    while (offset := raw.find(_RECORD_MAGIC, offset)) >= 0:
        header, payload_at = raw[offset : offset + _RECORD_HEADER_BYTES], offset + _RECORD_HEADER_BYTES
        offset += 1
        if len(header) < _RECORD_HEADER_BYTES:
            break
        _, kind, _, length, check, _, _ = _RECORD.unpack_from(header)
        place = crc32c(_PLACE.pack(segment, offset - 1))
        payload = raw[payload_at : payload_at + length]
        if (
            crc32c(header[:-4], place) != _CRC.unpack(header[-4:])[0]
            or len(payload) < length
            or crc32c(payload) != check
        ):
            continue
        counts["damaged"] += any(raw[end : offset - 1])
        yield kind, payload
        end = offset = payload_at + -(-length // _ALIGN_BYTES) * _ALIGN_BYTES
    counts["damaged"] += any(raw[end:]) and not is_last  # at the end of the log it is an unfinished append


def _packet(payload: bytes) -> bytes:
    """The chunk as a packet of today. Raises WireError or one of `DECODE_ERRORS`."""
    if payload[:4] == _FIRST_PACKET_MAGIC:
        header, arrays = _first_packet(payload)
    else:
        parsed = parse_packet(payload)
        header, arrays = decode_packet_record(parsed, ChunkHeader), parsed.arrays()
    final = {name.removeprefix(FINAL_PREFIX): array for name, array in arrays.items() if name.startswith(FINAL_PREFIX)}
    columns = {name: array for name, array in arrays.items() if not name.startswith(FINAL_PREFIX)}
    for name in [name for name in columns if name.startswith(IMAGE_PREFIX) and not name.endswith(FRAME_SUFFIXES)]:
        columns |= _frame_columns(name, columns)
    return Chunk(header, columns, final).encode()


def _first_packet(payload: bytes) -> tuple[ChunkHeader, dict[str, Array]]:
    _, length = _PACKET.unpack_from(payload)
    encoded = payload[_PACKET.size : _PACKET.size + length]
    record, places = msgspec.msgpack.decode(encoded, type=tuple[dict[str, Any], tuple[_ArrayPlace, ...]])
    header = msgspec.convert([record[name] for name in ChunkHeader.__struct_fields__ if name in record], ChunkHeader)
    return header, {
        name: np.frombuffer(payload, dtype, math.prod(shape), offset).reshape(shape)
        for name, dtype, shape, offset, _ in places
    }


def _frame_columns(camera: str, columns: Mapping[str, Array]) -> dict[str, Array]:
    """Checksums of the frames, and as their capture times those of the observations that had them first."""
    lengths = columns[camera + LENGTH_SUFFIX]
    ends = np.cumsum(lengths)
    flat = columns[camera].tobytes()
    pieces = [flat[end - length : end] for length, end in zip(lengths.tolist(), ends.tolist(), strict=True)]
    observed = columns.get("t_capture_ns", np.zeros(len(lengths), np.int64))
    return {
        camera + CRC_SUFFIX: np.array([checksum(piece) for piece in pieces], np.uint32),
        camera + CAPTURE_TIME_SUFFIX: np.maximum.accumulate(np.where(lengths > 0, observed, 0)),
    }


def _label(payload: bytes) -> Label:
    try:
        return decode_label(payload)
    except WireError:
        return SuccessLabel(**msgspec.msgpack.decode(payload, type=dict[str, Any]))
