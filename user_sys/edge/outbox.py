"""The edge's durable queue of chunks: what was recorded here waits here until the gateway has it on disk.

Same log format as the store. What survives: a chunk counts as recorded once `append` (or, for several, the `sync` after
them) has returned, and then survives ``kill -9`` and a power cut until it is acknowledged. The position up to which
chunks are acknowledged survives ``kill -9``; after a power cut it may be an older one, and what lies between is sent
again, which the gateway recognises. Segments are deleted once all that they hold is acknowledged.

When the outbox is full nothing is dropped: `append` raises, and the session pauses recording where people see it.
"""

from __future__ import annotations

import bisect
import logging
import os
import re
import secrets
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from crc32c import crc32c

from hal.durable import replace_durably
from user_sys.codec import decode_packet
from user_sys.episode import ChunkHeader
from user_sys.errors import StoreCorrupt, StoreFull, WireError
from user_sys.store.log import LogReader, LogWriter, RecordRef, segment_numbers, segment_path
from user_sys.tunnel.uplink import PendingChunk

logger = logging.getLogger(__name__)

CHUNK = 1
MAX_BYTES = 4 << 30
MAX_SEGMENT_BYTES = 16 << 20
SEGMENTS_PER_OUTBOX = 8
STREAM_BYTES = 16
_STREAM = re.compile(f"[0-9a-f]{{{2 * STREAM_BYTES}}}")
_POSITION = struct.Struct("<qI")  # newest acknowledged sequence, CRC32C of its 8 bytes


class OutboxFull(StoreFull):
    """The outbox or its disk is full; the chunk was not recorded. Wait for the link, or free some space."""


class Outbox:
    """One writer thread appends; the tunnel's thread sends and acknowledges, and never waits for the disk's sync.

    Attributes:
        stream: names this outbox for good: sequence numbers never start anew within a stream.
        damaged: chunks that could not be read back; they are reported and skipped, their neighbours are sent.
    """

    def __init__(self, path: Path, writer: LogWriter, reader: LogReader, max_bytes: int) -> None:
        self.path, self.max_bytes, self.damaged = path, max_bytes, 0
        self.stream = _read_or_make_stream(path / "stream")
        self._writer, self._reader = writer, reader
        self._write_lock, self._lock = threading.Lock(), threading.Lock()
        self._position = os.open(path / "acknowledged", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._acknowledged = _read_position(self._position)
        self._refs = [ref for ref in reader.records() if ref.sequence > self._acknowledged]
        self._unsynced: list[RecordRef] = []
        self._last_unsynced: bytes | None = None
        self._sealed_bytes = {number: segment_path(path, number).stat().st_size for number in segment_numbers(path)}
        self._appended: Callable[[], None] | None = None

    @classmethod
    def open(cls, path: Path, *, max_bytes: int = MAX_BYTES) -> Self:
        """Opens or creates the outbox at `path` and finds what a predecessor, killed or not, left to be sent.

        Raises:
            StoreLocked: another session of this robot has it.
            StoreFull, StoreVersion, StoreError: as `LogWriter.open`.
        """
        segment_bytes = max(1 << 16, min(MAX_SEGMENT_BYTES, max_bytes // SEGMENTS_PER_OUTBOX))
        writer = LogWriter.open(path, segment_bytes=segment_bytes, background=False)
        try:
            return cls(path, writer, LogReader.open(path), max_bytes)
        except BaseException:
            writer.close()
            raise

    # The recording thread

    @property
    def next_sequence(self) -> int:
        """The number that the next chunk gets; it only grows, over restarts too."""
        return self._writer.sequence

    def append(self, packet: bytes, *, sync: bool = True) -> int:
        """Records an encoded chunk and returns its sequence number. Durable on return, or after `sync`.

        Raises:
            OutboxFull: no room; the chunk was not recorded. It may be appended again.
            StoreError: the disk failed.
        """
        with self._write_lock:
            if (
                packet != self._last_unsynced
            ):  # else a sync had failed for want of space, and this is the second attempt
                self._make_room(len(packet))
                try:
                    self._unsynced.append(self._writer.append(CHUNK, packet))
                except StoreFull as error:
                    raise OutboxFull(str(error)) from error
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
                raise OutboxFull(str(error)) from error
            with self._lock:
                self._refs += self._unsynced
                for ref in self._unsynced:
                    self._sealed_bytes[ref.segment] = ref.offset + ref.length
            self._unsynced, self._last_unsynced = [], None
        appended = self._appended
        if appended is not None:
            appended()

    def _make_room(self, size: int) -> None:
        """Deletes what is acknowledged; raises OutboxFull if `size` bytes more would still be too many."""
        with self._lock:
            keep_from = self._refs[0].segment if self._refs else max(self._sealed_bytes)
            if self._unsynced:
                keep_from = min(keep_from, self._unsynced[0].segment)
            doomed = [number for number in self._sealed_bytes if number < keep_from]
        if doomed:
            self._writer.drop_before(keep_from)
            for number in doomed:
                del self._sealed_bytes[number]
        used = sum(self._sealed_bytes.values())
        if used + size > self.max_bytes:
            raise OutboxFull(
                f"{self.path} holds {len(self)} unsent chunks ({used >> 20} MiB of {self.max_bytes >> 20}): "
                "recording pauses until the gateway takes some"
            )

    # The tunnel's thread

    def __len__(self) -> int:
        """Chunks that are durable here and not yet acknowledged."""
        return len(self._refs)

    @property
    def used_bytes(self) -> int:
        """Bytes on disk."""
        with self._lock:
            return sum(self._sealed_bytes.values())

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
            return self._refs[at] if at < len(self._refs) else None

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
            body = struct.pack("<q", sequence)
            os.pwrite(self._position, _POSITION.pack(sequence, crc32c(body)), 0)

    def set_aside(self, sequence: int, reason: str) -> None:
        """Keeps a chunk that the gateway will never take in ``refused/``, where a person finds it."""
        chunk = next(self.pending(sequence - 1), None)
        if chunk is None or chunk.sequence != sequence:
            return
        kept = self.path / "refused" / f"{sequence:012d}.chunk"
        replace_durably(kept, bytes(chunk.packet))
        logger.error("outbox.refused sequence=%d episode=%s kept=%s: %s", sequence, chunk.episode, kept, reason)

    def listen(self, appended: Callable[[], None] | None) -> None:
        """Calls `appended` after each sync, from the recording thread; None ends that."""
        self._appended = appended

    # The end

    def close(self) -> None:
        """Lets go of the files; what was not acknowledged stays. Calling it twice is harmless."""
        with self._write_lock:
            if self._position < 0:
                return
            self._writer.close()
            self._reader.close()
            os.close(self._position)
            self._position = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _read_position(descriptor: int) -> int:
    """The acknowledged sequence; -1 where none was written whole."""
    raw = os.pread(descriptor, _POSITION.size, 0)
    if len(raw) < _POSITION.size:
        return -1
    sequence, checksum = _POSITION.unpack(raw)
    return int(sequence) if crc32c(raw[:8]) == checksum else -1


def _read_or_make_stream(path: Path) -> str:
    """The outbox's name; one that is torn or gone is replaced, which only means that chunks may be sent twice."""
    name = path.read_text("ascii", "replace").strip() if path.exists() else ""
    if not _STREAM.fullmatch(name):
        name = secrets.token_hex(STREAM_BYTES)
        replace_durably(path, name.encode() + b"\n")
    return name
