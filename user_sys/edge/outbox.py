"""The edge's durable queue of chunks, until the gateway has stored them.

It uses the store's log format.

- **Recorded chunks.** A chunk counts as recorded when `append` returns, or the `sync` after several. It then survives
  ``kill -9`` and a power cut until it is acknowledged.
- **Acknowledgements** survive ``kill -9``. After a power cut the acknowledged position may be an older one; the gateway
  recognises the chunks that are sent again.
- **Deletion.** A segment is deleted when all of its chunks are acknowledged.
- **A full outbox.** `append` raises, and the session pauses recording and reports it. An outbox that was opened with
  ``drop_oldest_autonomous`` first drops whole episodes, oldest first, in which no person took part and of which no
  chunk was sent. The sequence numbers of dropped chunks are durable before the log frees their space, so after a kill
  either all chunks of an episode are sent or none.

Each record of the log carries flags in its `schema`, which identify its episode without its chunk.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
import re
import secrets
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec
from crc32c import crc32c

from hal.decode_errors import DECODE_ERRORS
from user_sys.codec import decode_packet
from user_sys.episode import ChunkHeader, EpisodeSource, Phase, parse_chunk
from user_sys.errors import ConfigError, StoreCorrupt, StoreError, StoreFull, WireError, disk_full_message
from user_sys.store.files import NO_SPACE_ERRNOS, OS_FILES, Files, free_bytes, replace_durably, write_all
from user_sys.store.log_reader import LogReader
from user_sys.store.log_writer import LogWriter
from user_sys.store.manifest import SegmentEntry
from user_sys.store.record_format import RecordRef, list_segments, resolve_generations
from user_sys.tunnel.connection import PendingChunk
from user_sys.tunnel.limits import MAX_CHUNK_BYTES

logger = logging.getLogger(__name__)

CHUNK_RECORD = 1
MAX_BYTES = 4 << 30
MAX_SEGMENT_BYTES = 16 << 20
SEGMENTS_PER_OUTBOX = 8
RESERVE_BYTES = 16 << 20
MERGE_BELOW_FRACTION = 16  # a rewritten segment this many times smaller than a full one is merged with the next one
MAX_MERGES = 1000
STREAM_BYTES = 16
WhenFull = Literal["pause", "drop_oldest_autonomous"]
_FIRST, _LAST, _KEPT = 1, 2, 4
_FLAGS = _FIRST | _LAST | _KEPT
_CRC_BYTES = 4
_STREAM = re.compile(f"[0-9a-f]{{{2 * STREAM_BYTES}}}")
_POSITION = struct.Struct("<qI")  # newest acknowledged sequence, CRC32C of its 8 bytes


def record_flags(packet: bytes) -> int:
    """The `schema` of a chunk's record: its episode's fingerprint, and the flags first, last and kept.

    Every chunk is kept except those in which a policy alone acted online: demonstrations, evaluations, steps of a
    person, and chunks without the phase of their steps are never dropped. Raises WireError: `packet` is not a chunk.
    """
    chunk = parse_chunk(packet)
    header, phase = chunk.header, chunk.column("phase")
    autonomous = header.source is EpisodeSource.ONLINE and phase is not None and bool((phase == Phase.POLICY).all())
    flags = _FIRST * (header.index == 0) | _LAST * (header.end is not None) | _KEPT * (not autonomous)
    return crc32c(header.episode.encode()) & ~_FLAGS | flags


def select_droppable(
    waiting: Sequence[RecordRef], offered: int, recording: Iterable[int], need_bytes: int
) -> list[RecordRef]:
    """The chunks of the oldest droppable episodes, enough to free `need_bytes`, or of all droppable episodes.

    An episode is droppable if all of its chunks are in `waiting`, a policy alone acted in it, and no chunk was sent.

    Args:
        waiting: in order.
        offered: chunks up to this sequence were handed to the tunnel.
        recording: flags of chunks that are being recorded; their episodes are not droppable.
    """
    episodes: dict[int, list[RecordRef]] = {}
    for ref in waiting:
        episodes.setdefault(ref.schema & ~_FLAGS, []).append(ref)
    excluded = {schema & ~_FLAGS for schema in recording}
    if waiting and not waiting[-1].schema & _LAST:
        excluded.add(waiting[-1].schema & ~_FLAGS)
    found: list[RecordRef] = []
    freed = 0
    for name, chunks in episodes.items():
        whole = chunks[0].schema & _FIRST and chunks[0].sequence > offered
        if freed < need_bytes and whole and name not in excluded and not any(ref.schema & _KEPT for ref in chunks):
            found += chunks
            freed += sum(ref.length for ref in chunks)
    return found


class DropRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The chunks that an outbox has dropped since it was created.

    Attributes:
        ranges: (first, last) sequence numbers of dropped chunks that its log may still hold; ascending.
    """

    episodes: int = 0
    chunks: int = 0
    size_bytes: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    def sequences(self) -> Set[int]:
        return {sequence for first, last in self.ranges for sequence in range(first, last + 1)}

    def with_dropped(self, chunks: Sequence[RecordRef], unreclaimed: Set[int]) -> Self:
        """The record after `chunks` are dropped too. `unreclaimed`: earlier drops that the log still holds."""
        return type(self)(
            episodes=self.episodes + sum(ref.schema & _FIRST for ref in chunks),
            chunks=self.chunks + len(chunks),
            size_bytes=self.size_bytes + sum(ref.length for ref in chunks),
            ranges=_ranges({ref.sequence for ref in chunks} | unreclaimed),
        )


def _ranges(sequences: Set[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for sequence in sorted(sequences):
        if found and found[-1][1] == sequence - 1:
            found[-1] = (found[-1][0], sequence)
        else:
            found.append((sequence, sequence))
    return tuple(found)


def read_drop_record(files: Files, path: Path) -> DropRecord:
    """The record at `path`; an empty one if it is damaged: dropped chunks that the log still holds are sent then."""
    try:
        fd = files.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return DropRecord()
    try:
        raw = files.pread(fd, files.size(fd), 0)
    finally:
        files.close(fd)
    body = raw[_CRC_BYTES:]
    if body and crc32c(body) == int.from_bytes(raw[:_CRC_BYTES], "little"):  # the CRC of an empty body is 0
        with contextlib.suppress(*DECODE_ERRORS):
            return msgspec.msgpack.decode(body, type=DropRecord)
    logger.error("outbox.drop_record_damaged path=%s: dropped chunks may be sent", path)
    return DropRecord()


def write_drop_record(files: Files, path: Path, dropped: DropRecord) -> None:
    """Replaces the record. It is durable on return; a crash leaves the old one or the new one. Raises OSError."""
    body = msgspec.msgpack.encode(dropped)
    replace_durably(files, path, crc32c(body).to_bytes(_CRC_BYTES, "little") + body)


@dataclass(frozen=True)
class OutboxConfig:
    """The disk space of an outbox, and its behaviour when it is full.

    Attributes:
        max_bytes: of each robot.
        when_full: ``pause`` pauses recording, visibly, until the gateway has acknowledged some chunks;
            ``drop_oldest_autonomous`` drops whole episodes, oldest first, in which no person took part, and counts
            them.
    """

    max_bytes: int = MAX_BYTES
    when_full: WhenFull = "pause"

    def __post_init__(self) -> None:
        if self.max_bytes < MAX_CHUNK_BYTES:
            raise ConfigError(
                f"outbox.max_bytes is {self.max_bytes}, less than one chunk: set it to at least {MAX_CHUNK_BYTES}"
            )


class ChunkTooLarge(StoreError):
    """No gateway accepts the chunk. A retry does not help."""


class OutboxFull(StoreFull):
    """The outbox or its disk is full. The chunk was not recorded. Wait for the gateway, or free some space."""


class _AckPosition:
    """The newest acknowledged sequence, in a file that is overwritten in place."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._fd = files.open(path, os.O_RDWR | os.O_CREAT)
        self.sequence = _read_position(files, self._fd)

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def advance(self, sequence: int) -> None:
        """Saves `sequence` unless the file is closed or the disk is full: the chunk is then sent and acknowledged again
        after a restart."""
        self.sequence = sequence
        if not self.is_open:
            return
        body = struct.pack("<q", sequence)
        try:
            write_all(self._files, self._fd, [_POSITION.pack(sequence, crc32c(body))], 0)
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS:
                raise

    def close(self) -> None:
        self._files.close(self._fd)
        self._fd = -1


class _DiskReserve:
    """A file that sets disk space aside for chunks that must be recorded before a session ends."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files, self._path = files, path
        self.is_allocated = False

    def allocate(self) -> None:
        """Allocates `RESERVE_BYTES` if the disk has them."""
        try:
            fd = self._files.open(self._path, os.O_RDWR | os.O_CREAT)
            try:
                self._files.allocate(fd, 0, RESERVE_BYTES)
                self.is_allocated = True
            finally:
                self._files.close(fd)
        except OSError as error:
            logger.warning("outbox.no_reserve path=%s: %s", self._path, error.strerror)
            self.release()

    def release(self) -> None:
        self.is_allocated = False
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(self._path)


class _ChunkLog:
    """The log's writer and reader, and the sizes of its segments. `used_bytes` and `read` are for any thread."""

    def __init__(self, path: Path, writer: LogWriter, reader: LogReader, max_bytes: int, files: Files) -> None:
        self.path, self.files, self.writer = path, files, writer
        self._reader, self._segment_bytes = reader, _segment_bytes(max_bytes)
        self._lock = threading.Lock()
        self._sizes = self._measure()

    @property
    def used_bytes(self) -> int:
        """Bytes on disk."""
        with self._lock:
            return sum(self._sizes.values())

    def records(self) -> Sequence[RecordRef]:
        return self._reader.records()

    def read(self, ref: RecordRef) -> memoryview:
        return self._reader.read(ref)

    def on_synced(self, refs: Sequence[RecordRef]) -> None:
        """Counts the bytes of records that have become durable."""
        with self._lock:
            rotated = not self._sizes.keys() >= {ref.segment for ref in refs}
            for ref in refs:
                self._sizes[ref.segment] = ref.offset + ref.length
        if rotated:
            self._refresh_sizes()

    def delete_before(self, segment: int | None) -> None:
        """Deletes the segments before `segment`; None deletes all but the newest."""
        numbers = sorted(self._sizes)
        keep_from = numbers[-1] if segment is None else min(segment, numbers[-1])
        if len(numbers) > 1 and numbers[1] <= keep_from:
            self.writer.drop_before(keep_from)
            self._refresh_sizes()

    def reclaim(self, drops: _DropLog, is_needed: Callable[[RecordRef], bool]) -> None:
        """Frees the space of dropped chunks. Raises StoreFull: the disk has no room to rewrite a segment.

        A segment with a damaged chunk stays as it is.
        """
        if not drops.unreclaimed:
            return
        touched = set(drops.unreclaimed.values())
        if not any(max(touched) < entry.name.stop for entry in self.writer.sealed_segments()):
            self.writer.rotate()
        previous: SegmentEntry | None = None
        for entry in self.writer.sealed_segments():
            numbers = range(entry.number, entry.name.stop)
            if not touched.isdisjoint(numbers):
                entry = self._rewrite(entry, previous, is_needed)
                drops.on_reclaimed(numbers)
            previous = entry
        self._refresh_sizes()

    def _rewrite(
        self, entry: SegmentEntry, previous: SegmentEntry | None, is_needed: Callable[[RecordRef], bool]
    ) -> SegmentEntry:
        """Rewrites a segment without unneeded chunks. Merges it with a small one before it, to keep few files."""
        numbers = [entry.number]
        small = self._segment_bytes // MERGE_BELOW_FRACTION
        mergeable = previous is not None and previous.size_bytes < small and previous.generation < MAX_MERGES
        if previous is not None and mergeable and previous.name.stop == entry.number:
            numbers = [previous.number, entry.number]
        try:
            return self.writer.rewrite(numbers, is_needed)
        except StoreCorrupt as error:
            logger.error("outbox.damaged path=%s: the space of its dropped chunks is not freed: %s", self.path, error)
            return entry

    def close(self) -> None:
        self.writer.close()
        self._reader.close()

    def _refresh_sizes(self) -> None:
        sizes = self._measure()
        with self._lock:
            self._sizes = sizes

    def _measure(self) -> dict[int, int]:
        """The bytes of each segment's file."""
        names = resolve_generations(list_segments(self.path, self.files))[0]
        return {name.number: _size(self.files, self.path / str(name)) for name in names}


class _DropLog:
    """The durable record of dropped chunks, and the segments that still hold them."""

    def __init__(self, files: Files, path: Path, records: Sequence[RecordRef]) -> None:
        self._files, self._path = files, path
        self.record = read_drop_record(files, path)
        gone = self.record.sequences()
        self.unreclaimed = {ref.sequence: ref.segment for ref in records if ref.sequence in gone}

    def add(self, chunks: Sequence[RecordRef]) -> int:
        """Records that `chunks` are dropped, durably, and returns the number of their episodes. Raises OSError."""
        record = self.record.with_dropped(chunks, self.unreclaimed.keys())
        write_drop_record(self._files, self._path, record)
        episodes = record.episodes - self.record.episodes
        self.record = record
        self.unreclaimed |= {ref.sequence: ref.segment for ref in chunks}
        return episodes

    def on_reclaimed(self, segments: range) -> None:
        """These segments hold no dropped chunks any more."""
        self.unreclaimed = {s: segment for s, segment in self.unreclaimed.items() if segment not in segments}


class Outbox:
    """One writer thread appends. The tunnel's thread sends and acknowledges, and never waits for the disk's sync.

    Attributes:
        stream: identifies this outbox for good: within a stream, sequence numbers never start again.
        damaged: chunks that could not be read back. They are logged and skipped; the other chunks are sent.
    """

    def __init__(self, log: _ChunkLog, max_bytes: int, when_full: WhenFull) -> None:
        self.path, files = log.path, log.files
        self.max_bytes, self.damaged = max_bytes, 0
        self._log, self._when_full = log, when_full
        self._reserve = _DiskReserve(files, self.path / "reserve")
        self.stream = _read_or_make_stream(files, self.path / "stream")
        self._write_lock, self._lock = threading.Lock(), threading.Lock()
        self._ack = _AckPosition(files, self.path / "acknowledged")
        records = log.records()
        self._drops = _DropLog(files, self.path / "dropped", records)
        dropped = self._drops.record.sequences()
        self._refs = [r for r in records if r.sequence > self._ack.sequence and r.sequence not in dropped]
        self._offered = -1
        self._unsynced: list[RecordRef] = []
        self._last_unsynced: bytes | None = None
        self._on_append: Callable[[], None] | None = None

    @classmethod
    def open(
        cls, path: Path, *, max_bytes: int = MAX_BYTES, when_full: WhenFull = "pause", files: Files = OS_FILES
    ) -> Self:
        """Opens or creates the outbox at `path`. Finds the chunks of an earlier session, killed or not.

        Raises:
            StoreLocked: another session of this robot has it.
            StoreFull, StoreVersionMismatch, StoreError: as `LogWriter.open`.
        """
        writer = LogWriter.open(path, segment_bytes=_segment_bytes(max_bytes), background=False, files=files)
        try:
            reader = LogReader.open(path, files=files)
            return cls(_ChunkLog(path, writer, reader, max_bytes, files), max_bytes, when_full)
        except BaseException as error:
            writer.close()
            if isinstance(error, OSError) and error.errno in NO_SPACE_ERRNOS:
                raise OutboxFull(disk_full_message(path, 1 << 12, free_bytes(path))) from error
            raise

    # For the recording thread

    @property
    def next_sequence(self) -> int:
        """The number of the next chunk. It only grows, across restarts too."""
        return self._log.writer.next_sequence

    def append(self, packet: bytes, *, sync: bool = True) -> int:
        """Records an encoded chunk and returns its sequence number. Durable on return, or after `sync`.

        Raises:
            ChunkTooLarge: it could never be delivered; it was not recorded.
            OutboxFull: no room; the chunk was not recorded. It may be appended again.
            StoreError: the disk failed.
            WireError: it is not a chunk.
        """
        if len(packet) > MAX_CHUNK_BYTES:
            raise ChunkTooLarge(
                f"a chunk of {len(packet)} bytes; the limit is {MAX_CHUNK_BYTES}: record fewer or smaller pictures"
            )
        with self._write_lock:
            if packet != self._last_unsynced:  # else a sync found no space, and this is the second attempt
                flags = record_flags(packet)
                try:
                    self._make_room(len(packet), flags)
                    self._unsynced.append(self._log.writer.append(CHUNK_RECORD, packet, schema=flags))
                except OutboxFull:
                    raise
                except StoreFull as error:
                    raise self._disk_full(len(packet)) from error
                self._last_unsynced = packet
            sequence = self._unsynced[-1].sequence
        if sync:
            self.sync()
        return sequence

    def sync(self) -> None:
        """Makes all appended chunks durable. Raises as `append`."""
        with self._write_lock:
            try:
                self._log.writer.sync()
            except StoreFull as error:
                raise self._disk_full(self._log.writer.pending_bytes) from error
            with self._lock:
                self._refs += self._unsynced
            synced, self._unsynced, self._last_unsynced = self._unsynced, [], None
            self._log.on_synced(synced)
        on_append = self._on_append
        if on_append is not None:
            on_append()

    def _disk_full(self, needed_bytes: int) -> OutboxFull:
        return OutboxFull(disk_full_message(self.path, needed_bytes, free_bytes(self.path)))

    def allocate_reserve(self) -> None:
        """Sets `RESERVE_BYTES` of the disk aside, if available, for the last chunks of a session."""
        self._reserve.allocate()

    def release_reserve(self) -> None:
        """Frees the reserve, for chunks beyond `max_bytes` too."""
        self._reserve.release()
        self.max_bytes += RESERVE_BYTES

    def _make_room(self, size: int, flags: int) -> None:
        """Deletes acknowledged chunks, and drops episodes if it may. Raises OutboxFull: still no room for `size`."""
        self._delete_acknowledged()
        if self._excess(size) > 0 and self._when_full == "drop_oldest_autonomous":
            self._log.reclaim(self._drops, self._is_needed)  # an earlier attempt may have freed no space
            if (excess := self._excess(size)) > 0:
                self._drop(excess + _segment_bytes(self.max_bytes), flags)
        if self._excess(size) > 0:
            raise OutboxFull(
                f"{self.path} holds {len(self)} unsent chunks ({self.used_bytes >> 20} MiB of {self.max_bytes >> 20}): "
                "recording pauses until the gateway has taken some"
            )

    def _excess(self, size: int) -> int:
        return self.used_bytes + size - self.max_bytes

    def _delete_acknowledged(self) -> None:
        with self._lock:
            needed = [ref.segment for ref in (*self._refs[:1], *self._unsynced[:1])]
        self._log.delete_before(min(needed, default=None))

    def _drop(self, need_bytes: int, flags: int) -> None:
        """Drops the oldest droppable episodes, of at least `need_bytes`. Durable and counted on return.

        It frees one segment at a time rather than one chunk, as it rewrites segments.
        """
        with self._lock:
            recording = [flags, *(ref.schema for ref in self._unsynced)]
            chunks = select_droppable(self._refs, self._offered, recording, need_bytes)
            sequences = {ref.sequence for ref in chunks}
            self._refs = [ref for ref in self._refs if ref.sequence not in sequences]
        if not chunks:
            return
        try:
            episodes = self._drops.add(chunks)
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS:
                raise StoreError(f"{self.path}: cannot record dropped chunks: {error.strerror}") from error
            with self._lock:
                self._refs = sorted([*self._refs, *chunks], key=lambda ref: ref.sequence)
            raise OutboxFull(f"{self.path}: {error.strerror}; nothing was dropped, recording pauses") from error
        logger.warning(
            "outbox.dropped episodes=%d chunks=%d bytes=%d path=%s: it is full, and these were the oldest autonomous",
            episodes,
            len(chunks),
            sum(ref.length for ref in chunks),
            self.path,
        )
        self._log.reclaim(self._drops, self._is_needed)

    def _is_needed(self, ref: RecordRef) -> bool:
        return ref.sequence > self._ack.sequence and ref.sequence not in self._drops.unreclaimed

    # For the tunnel's thread

    def __len__(self) -> int:
        """Chunks that are durable here and not yet acknowledged."""
        return len(self._refs)

    @property
    def dropped(self) -> DropRecord:
        """The chunks that were dropped since the outbox was created."""
        return self._drops.record

    @property
    def used_bytes(self) -> int:
        """Bytes on disk."""
        return self._log.used_bytes

    def scalars(self) -> dict[str, float]:
        """Metrics of waiting and dropped chunks. Any thread may call it."""
        dropped = self.dropped
        return {
            "outbox_chunks": float(len(self)),
            "outbox_bytes": float(self.used_bytes),
            "outbox_dropped_episodes": float(dropped.episodes),
            "outbox_dropped_chunks": float(dropped.chunks),
            "outbox_dropped_bytes": float(dropped.size_bytes),
        }

    def pending(self, after_sequence: int = -1) -> Iterator[PendingChunk]:
        """Durable chunks with a greater sequence that are not acknowledged, in order."""
        while (ref := self._next(after_sequence)) is not None:
            after_sequence = ref.sequence
            chunk = self._read(ref)
            if chunk is not None:
                yield chunk

    def _next(self, after_sequence: int) -> RecordRef | None:
        with self._lock:
            at = bisect.bisect_right(self._refs, after_sequence, key=lambda ref: ref.sequence)
            if at == len(self._refs):
                return None
            self._offered = max(self._offered, self._refs[at].sequence)
            return self._refs[at]

    def _read(self, ref: RecordRef) -> PendingChunk | None:
        try:
            packet = self._log.read(ref)
            header = decode_packet(packet, ChunkHeader)[0]
        except (StoreCorrupt, WireError) as error:
            self.damaged += 1
            logger.error("outbox.damaged sequence=%d path=%s: %s", ref.sequence, self.path, error)
            return None
        return PendingChunk(ref.sequence, header.episode, header.index, packet)

    def acknowledge(self, sequence: int) -> None:
        """Chunks up to and including `sequence` need not be sent again. An older sequence changes nothing."""
        with self._lock:
            if sequence <= self._ack.sequence:
                return
            del self._refs[: bisect.bisect_right(self._refs, sequence, key=lambda ref: ref.sequence)]
            self._ack.advance(sequence)

    def set_aside(self, sequence: int, reason: str) -> None:
        """Saves a chunk that the gateway refuses for good in ``refused/``, for a person to inspect."""
        chunk = next(self.pending(sequence - 1), None)
        if chunk is None or chunk.sequence != sequence:
            return
        saved = self.path / "refused" / f"{sequence:012d}.chunk"
        replace_durably(self._log.files, saved, bytes(chunk.packet))
        logger.error("outbox.refused sequence=%d episode=%s saved=%s: %s", sequence, chunk.episode, saved, reason)

    def set_on_append(self, on_append: Callable[[], None] | None) -> None:
        """Calls `on_append` after each sync, in the recording thread. None removes it."""
        self._on_append = on_append

    def close(self) -> None:
        """Closes the files. Unacknowledged chunks stay. A second call does nothing."""
        with self._write_lock:
            if not self._ack.is_open:
                return
            self._log.close()
            if self._reserve.is_allocated:
                self._reserve.release()
            with self._lock:  # an acknowledgement may arrive now
                self._ack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _segment_bytes(max_bytes: int) -> int:
    return max(1 << 16, min(MAX_SEGMENT_BYTES, max_bytes // SEGMENTS_PER_OUTBOX))


def _size(files: Files, path: Path) -> int:
    fd = files.open(path, os.O_RDONLY)
    try:
        return files.size(fd)
    finally:
        files.close(fd)


def _read_position(files: Files, fd: int) -> int:
    """The acknowledged sequence; -1 if the file holds no whole one."""
    raw = files.pread(fd, _POSITION.size, 0)
    if len(raw) < _POSITION.size:
        return -1
    sequence, checksum = _POSITION.unpack(raw)
    return int(sequence) if crc32c(raw[:8]) == checksum else -1


def _read_or_make_stream(files: Files, path: Path) -> str:
    """The outbox's identifier. A torn or missing one is replaced; the only effect is that chunks may be sent twice."""
    fd = files.open(path, os.O_RDWR | os.O_CREAT)
    try:
        name = files.pread(fd, 2 * STREAM_BYTES + 1, 0).decode("ascii", "replace").strip()
    finally:
        files.close(fd)
    if not _STREAM.fullmatch(name):
        name = secrets.token_hex(STREAM_BYTES)
        replace_durably(files, path, name.encode() + b"\n")
    return name
