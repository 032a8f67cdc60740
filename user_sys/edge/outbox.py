"""What a full outbox may give up, and its durable note of what it gave up.

Each record of an outbox carries marks in its `schema`, so that episodes are told apart without reading their chunks.

The edge's durable queue of chunks: what was recorded here waits here until the gateway has it on disk.

Same log format as the store. What survives: a chunk counts as recorded once `append` (or, for several, the `sync` after
them) has returned, and then survives ``kill -9`` and a power cut until it is acknowledged. The position up to which
chunks are acknowledged survives ``kill -9``; after a power cut it may be an older one, and what lies between is sent
again, which the gateway recognises. Segments are deleted once all that they hold is acknowledged.

When the outbox is full, `append` raises and the session pauses recording where people see it. Where it was opened with
``drop_oldest_autonomous`` it first gives up the oldest episodes in which nobody took part and of which nothing was
sent, whole ones only, and says so. A note of their sequence numbers is durable before the log gives their space back,
so a kill leaves either all of an episode to be sent or none.
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

WhenFull = Literal["pause", "drop_oldest_autonomous"]
_FIRST, _LAST, _KEPT = 1, 2, 4
_FLAGS = _FIRST | _LAST | _KEPT
_CRC_BYTES = 4


def record_flags(packet: bytes) -> int:
    """What the outbox must know of a chunk: its episode's fingerprint, and the marks first, last, and to be kept.

    Everything is kept but what a policy alone did online: demonstrations, evaluations, steps in which a person took
    part, and chunks that do not say who was in control. Raises WireError for what is no chunk.
    """
    chunk = parse_chunk(packet)
    header, phase = chunk.header, chunk.column("phase")
    autonomous = header.source is EpisodeSource.ONLINE and phase is not None and bool((phase == Phase.POLICY).all())
    marks = _FIRST * (header.index == 0) | _LAST * (header.end is not None) | _KEPT * (not autonomous)
    return crc32c(header.episode.encode()) & ~_FLAGS | marks


def select_droppable(
    waiting: Sequence[RecordRef], offered: int, recording: Iterable[int], need_bytes: int
) -> list[RecordRef]:
    """The chunks of as many of the oldest episodes as free `need_bytes`, or of all that may go.

    An episode may go when it is whole in `waiting`, a policy alone acted in it, and none of it was sent.

    Args:
        waiting: in order.
        offered: chunks up to this sequence were handed to the tunnel.
        recording: marks of chunks that are being recorded; their episodes stay.
    """
    episodes: dict[int, list[RecordRef]] = {}
    for ref in waiting:
        episodes.setdefault(ref.schema & ~_FLAGS, []).append(ref)
    stay = {schema & ~_FLAGS for schema in recording}
    if waiting and not waiting[-1].schema & _LAST:
        stay.add(waiting[-1].schema & ~_FLAGS)
    found: list[RecordRef] = []
    freed = 0
    for name, chunks in episodes.items():
        whole = chunks[0].schema & _FIRST and chunks[0].sequence > offered
        if freed < need_bytes and whole and name not in stay and not any(ref.schema & _KEPT for ref in chunks):
            found += chunks
            freed += sum(ref.length for ref in chunks)
    return found


class DropRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an outbox has dropped since it was made.

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
        """With `chunks`; of those dropped before, the log still holds `unreclaimed`."""
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
    """The note at `path`. One that is damaged counts as none: what it named and is still there is sent after all."""
    try:
        fd = files.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return DropRecord()
    try:
        raw = files.pread(fd, files.size(fd), 0)
    finally:
        files.close(fd)
    body = raw[_CRC_BYTES:]
    if body and crc32c(body) == int.from_bytes(raw[:_CRC_BYTES], "little"):  # of nothing it is 0
        with contextlib.suppress(*DECODE_ERRORS):
            return msgspec.msgpack.decode(body, type=DropRecord)
    logger.error("outbox.note-damaged path=%s: chunks that were dropped may be sent", path)
    return DropRecord()


def write_drop_record(files: Files, path: Path, dropped: DropRecord) -> None:
    """Replaces the note; it is durable on return, and after a crash the old one or the new. Raises OSError."""
    body = msgspec.msgpack.encode(dropped)
    replace_durably(files, path, crc32c(body).to_bytes(_CRC_BYTES, "little") + body)


CHUNK_RECORD = 1
MAX_BYTES = 4 << 30
MAX_SEGMENT_BYTES = 16 << 20
SEGMENTS_PER_OUTBOX = 8
RESERVE_BYTES = 16 << 20
MERGE_BELOW_FRACTION = (
    16  # a rewritten segment this many times smaller than a full one is joined to the next one to be rewritten
)
MAX_MERGES = 1000
STREAM_BYTES = 16
_STREAM = re.compile(f"[0-9a-f]{{{2 * STREAM_BYTES}}}")
_POSITION = struct.Struct("<qI")  # newest acknowledged sequence, CRC32C of its 8 bytes


@dataclass(frozen=True)
class OutboxConfig:
    """What an outbox may take of the disk, and what it does then.

    Attributes:
        max_bytes: of each robot.
        when_full: ``pause`` stops recording, visibly, until the gateway takes some; ``drop_oldest_autonomous`` gives up
            whole episodes, oldest first, in which nobody took part, and says how many.
    """

    max_bytes: int = MAX_BYTES
    when_full: WhenFull = "pause"

    def __post_init__(self) -> None:
        if self.max_bytes < MAX_CHUNK_BYTES:
            raise ConfigError(f"outbox: max_bytes is {self.max_bytes}; one chunk may take {MAX_CHUNK_BYTES}")


class ChunkTooLarge(StoreError):
    """No gateway would take the chunk; trying again cannot help."""


class OutboxFull(StoreFull):
    """The outbox or its disk is full; the chunk was not recorded. Wait for the link, or free some space."""


class Outbox:
    """One writer thread appends; the tunnel's thread sends and acknowledges, and never waits for the disk's sync.

    Attributes:
        stream: names this outbox for good: sequence numbers never start anew within a stream.
        damaged: chunks that could not be read back; they are reported and skipped, their neighbours are sent.
        dropped: what was given up for want of room since the outbox was made.
    """

    def __init__(
        self, path: Path, writer: LogWriter, reader: LogReader, max_bytes: int, when_full: WhenFull, files: Files
    ) -> None:
        self.path, self.max_bytes, self.damaged = path, max_bytes, 0
        self._when_full, self._files, self._reserve = when_full, files, path / "reserve"
        self._reserved = False
        self.stream = _read_or_make_stream(files, path / "stream")
        self._writer, self._reader = writer, reader
        self._write_lock, self._lock = threading.Lock(), threading.Lock()
        self._position = files.open(path / "acknowledged", os.O_RDWR | os.O_CREAT)
        self._acknowledged = _read_position(files, self._position)
        self.dropped = read_drop_record(files, path / "dropped")
        gone, there = self.dropped.sequences(), reader.records()
        self._refs = [ref for ref in there if ref.sequence > self._acknowledged and ref.sequence not in gone]
        self._unreclaimed = {ref.sequence: ref.segment for ref in there if ref.sequence in gone}
        self._offered = -1
        self._unsynced: list[RecordRef] = []
        self._last_unsynced: bytes | None = None
        self._sizes = self._measure()
        self._appended: Callable[[], None] | None = None

    @classmethod
    def open(
        cls, path: Path, *, max_bytes: int = MAX_BYTES, when_full: WhenFull = "pause", files: Files = OS_FILES
    ) -> Self:
        """Opens or creates the outbox at `path` and finds what a predecessor, killed or not, left to be sent.

        Raises:
            StoreLocked: another session of this robot has it.
            StoreFull, StoreVersion, StoreError: as `LogWriter.open`.
        """
        writer = LogWriter.open(path, segment_bytes=_segment_bytes(max_bytes), background=False, files=files)
        try:
            return cls(path, writer, LogReader.open(path, files=files), max_bytes, when_full, files)
        except BaseException as error:
            writer.close()
            if isinstance(error, OSError) and error.errno in NO_SPACE_ERRNOS:
                raise OutboxFull(disk_full_message(path, 1 << 12, free_bytes(path))) from error
            raise

    # The recording thread

    @property
    def next_sequence(self) -> int:
        """The number that the next chunk gets; it only grows, over restarts too."""
        return self._writer.next_sequence

    def append(self, packet: bytes, *, sync: bool = True) -> int:
        """Records an encoded chunk and returns its sequence number. Durable on return, or after `sync`.

        Raises:
            ChunkTooLarge: it could never be delivered; it was not recorded.
            OutboxFull: no room; the chunk was not recorded. It may be appended again.
            StoreError: the disk failed.
            WireError: it is no chunk.
        """
        if len(packet) > MAX_CHUNK_BYTES:
            raise ChunkTooLarge(
                f"a chunk of {len(packet)} bytes; the limit is {MAX_CHUNK_BYTES}: record fewer or smaller pictures"
            )
        with self._write_lock:
            if packet != self._last_unsynced:  # else a sync had found no space, and this is the second attempt
                marks = record_flags(packet)
                try:
                    self._make_room(len(packet), marks)
                    self._unsynced.append(self._writer.append(CHUNK_RECORD, packet, schema=marks))
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
        """Makes all that was appended durable. Raises as `append`."""
        with self._write_lock:
            try:
                self._writer.sync()
            except StoreFull as error:
                raise self._disk_full(self._writer.pending_bytes) from error
            with self._lock:
                self._refs += self._unsynced
                rotated = not self._sizes.keys() >= {ref.segment for ref in self._unsynced}
                for ref in self._unsynced:
                    self._sizes[ref.segment] = ref.offset + ref.length
            self._unsynced, self._last_unsynced = [], None
            if rotated:
                self._refresh_sizes()
        appended = self._appended
        if appended is not None:
            appended()

    def _disk_full(self, needed_bytes: int) -> OutboxFull:
        return OutboxFull(disk_full_message(self.path, needed_bytes, free_bytes(self.path)))

    def allocate_reserve(self) -> None:
        """Sets `RESERVE_BYTES` of the disk aside, if it has them, for what must be recorded before a session ends."""
        try:
            fd = self._files.open(self._reserve, os.O_RDWR | os.O_CREAT)
            try:
                self._files.allocate(fd, 0, RESERVE_BYTES)
                self._reserved = True
            finally:
                self._files.close(fd)
        except OSError as error:
            logger.warning("outbox.no_reserve path=%s: %s", self._reserve, error.strerror)
            self._remove_reserve()

    def release_reserve(self) -> None:
        """Frees what `allocate_reserve` has set aside, for chunks beyond `max_bytes` too."""
        self._remove_reserve()
        self.max_bytes += RESERVE_BYTES

    def _remove_reserve(self) -> None:
        self._reserved = False
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(self._reserve)

    def _make_room(self, size: int, marks: int) -> None:
        """Deletes what is acknowledged, drops what may go; raises OutboxFull if there is still no room for `size`."""
        self._delete_acknowledged()
        if self._excess(size) > 0 and self._when_full == "drop_oldest_autonomous":
            self._reclaim()  # what an earlier attempt has dropped and could not give back
            if (excess := self._excess(size)) > 0:
                self._drop(excess + _segment_bytes(self.max_bytes), marks)
        if self._excess(size) > 0:
            raise OutboxFull(
                f"{self.path} holds {len(self)} unsent chunks ({self.used_bytes >> 20} MiB of {self.max_bytes >> 20}): "
                "recording pauses until the gateway takes some"
            )

    def _excess(self, size: int) -> int:
        return self.used_bytes + size - self.max_bytes

    def _delete_acknowledged(self) -> None:
        with self._lock:
            keep_from = self._refs[0].segment if self._refs else max(self._sizes)
            if self._unsynced:
                keep_from = min(keep_from, self._unsynced[0].segment)
            oldest = min(self._sizes)
            second = min((number for number in self._sizes if number > oldest), default=oldest)
        if second <= keep_from and second > oldest:
            self._writer.drop_before(keep_from)
            self._refresh_sizes()

    def _drop(self, need_bytes: int, marks: int) -> None:
        """Gives up the oldest episodes that may go, `need_bytes` of them at least; durable and counted on return.

        Segments are rewritten for it, so it frees one at a time rather than one chunk.
        """
        with self._lock:
            recording = [marks, *(ref.schema for ref in self._unsynced)]
            doomed = select_droppable(self._refs, self._offered, recording, need_bytes)
            gone = {ref.sequence for ref in doomed}
            self._refs = [ref for ref in self._refs if ref.sequence not in gone]
        if not doomed:
            return
        dropped = self.dropped.with_dropped(doomed, self._unreclaimed.keys())
        try:
            write_drop_record(self._files, self.path / "dropped", dropped)
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS:
                raise StoreError(f"{self.path}: cannot note what is dropped: {error.strerror}") from error
            with self._lock:
                self._refs = sorted([*self._refs, *doomed], key=lambda ref: ref.sequence)
            raise OutboxFull(f"{self.path}: {error.strerror}; nothing was dropped, recording pauses") from error
        count = dropped.episodes - self.dropped.episodes
        self.dropped = dropped
        self._unreclaimed |= {ref.sequence: ref.segment for ref in doomed}
        logger.warning(
            "outbox.dropped episodes=%d chunks=%d bytes=%d path=%s: it is full, and these were the oldest autonomous",
            count,
            len(doomed),
            sum(ref.length for ref in doomed),
            self.path,
        )
        self._reclaim()

    def _reclaim(self) -> None:
        """Gives back the space of dropped chunks. Raises StoreFull where a segment cannot be rewritten for want of it.

        A segment with a damaged chunk stays as it is.
        """
        if not self._unreclaimed:
            return
        touched = set(self._unreclaimed.values())
        if not any(max(touched) < entry.name.stop for entry in self._writer.sealed_segments()):
            self._writer.rotate()
        before: SegmentEntry | None = None
        for entry in self._writer.sealed_segments():
            numbers = range(entry.number, entry.name.stop)
            if not touched.isdisjoint(numbers):
                entry = self._rewrite(entry, before)
                self._unreclaimed = {s: n for s, n in self._unreclaimed.items() if n not in numbers}
            before = entry
        self._refresh_sizes()

    def _rewrite(self, entry: SegmentEntry, before: SegmentEntry | None) -> SegmentEntry:
        """Writes a segment anew without what nobody needs, joined to a small one before it, so that few files stay."""
        numbers = [entry.number]
        small = _segment_bytes(self.max_bytes) // MERGE_BELOW_FRACTION
        if before and before.name.stop == entry.number and before.size_bytes < small and before.generation < MAX_MERGES:
            numbers = [before.number, entry.number]
        try:
            return self._writer.rewrite(numbers, self._is_needed)
        except StoreCorrupt as error:
            logger.error("outbox.damaged path=%s: what was dropped beside it takes its room on: %s", self.path, error)
            return entry

    def _is_needed(self, ref: RecordRef) -> bool:
        return ref.sequence > self._acknowledged and ref.sequence not in self._unreclaimed

    def _refresh_sizes(self) -> None:
        sizes = self._measure()
        with self._lock:
            self._sizes = sizes

    def _measure(self) -> dict[int, int]:
        """The bytes of each segment's file."""
        names = resolve_generations(list_segments(self.path, self._files))[0]
        return {name.number: _size(self._files, self.path / str(name)) for name in names}

    # The tunnel's thread

    def __len__(self) -> int:
        """Chunks that are durable here and not yet acknowledged."""
        return len(self._refs)

    @property
    def used_bytes(self) -> int:
        """Bytes on disk."""
        with self._lock:
            return sum(self._sizes.values())

    def scalars(self) -> dict[str, float]:
        """How much waits and what was dropped, for metrics. Any thread may ask."""
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
            packet = self._reader.read(ref)
            header = decode_packet(packet, ChunkHeader)[0]
        except (StoreCorrupt, WireError) as error:
            self.damaged += 1
            logger.error("outbox.damaged sequence=%d path=%s: %s", ref.sequence, self.path, error)
            return None
        return PendingChunk(ref.sequence, header.episode, header.index, packet)

    def acknowledge(self, sequence: int) -> None:
        """Everything up to and including `sequence` need not be sent again. An older one changes nothing."""
        with self._lock:
            if sequence <= self._acknowledged:
                return
            self._acknowledged = sequence
            del self._refs[: bisect.bisect_right(self._refs, sequence, key=lambda ref: ref.sequence)]
            if self._position >= 0:  # else it is closed, and the chunk is sent and acknowledged once more
                body = struct.pack("<q", sequence)
                try:
                    write_all(self._files, self._position, [_POSITION.pack(sequence, crc32c(body))], 0)
                except OSError as error:  # likewise, should this process end before the next acknowledgement
                    if error.errno not in NO_SPACE_ERRNOS:
                        raise

    def set_aside(self, sequence: int, reason: str) -> None:
        """Keeps a chunk that the gateway will never take in ``refused/``, where a person finds it."""
        chunk = next(self.pending(sequence - 1), None)
        if chunk is None or chunk.sequence != sequence:
            return
        kept = self.path / "refused" / f"{sequence:012d}.chunk"
        replace_durably(self._files, kept, bytes(chunk.packet))
        logger.error("outbox.refused sequence=%d episode=%s kept=%s: %s", sequence, chunk.episode, kept, reason)

    def set_on_append(self, on_append: Callable[[], None] | None) -> None:
        """Calls `appended` after each sync, from the recording thread; None ends that."""
        self._appended = on_append

    # The end

    def close(self) -> None:
        """Lets go of the files; what was not acknowledged stays. Calling it twice is harmless."""
        with self._write_lock:
            if self._position < 0:
                return
            self._writer.close()
            self._reader.close()
            if self._reserved:
                self._remove_reserve()
            with self._lock:  # an acknowledgement may come at this moment
                self._files.close(self._position)
                self._position = -1

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
    """The acknowledged sequence; -1 where none was written whole."""
    raw = files.pread(fd, _POSITION.size, 0)
    if len(raw) < _POSITION.size:
        return -1
    sequence, checksum = _POSITION.unpack(raw)
    return int(sequence) if crc32c(raw[:8]) == checksum else -1


def _read_or_make_stream(files: Files, path: Path) -> str:
    """The outbox's name; one that is torn or gone is replaced, which only means that chunks may be sent twice."""
    fd = files.open(path, os.O_RDWR | os.O_CREAT)
    try:
        name = files.pread(fd, 2 * STREAM_BYTES + 1, 0).decode("ascii", "replace").strip()
    finally:
        files.close(fd)
    if not _STREAM.fullmatch(name):
        name = secrets.token_hex(STREAM_BYTES)
        replace_durably(files, path, name.encode() + b"\n")
    return name
