"""The edge's durable queue of chunks, until the gateway has stored them. Each chunk is a file.

- **Recorded chunks.** A chunk counts as recorded when `append` returns. Its file is then durable, and survives
  ``kill -9`` and a power cut until it is acknowledged.
- **Acknowledgements** delete files, and survive ``kill -9``. After a power cut a deleted file may be back; the gateway
  recognises the chunks that are sent again.
- **Sequence numbers** of new chunks are above those of all chunks that wait. An acknowledgement holds for its session
  only, so a number that is used again deletes no other chunk.
- **A chunk that is damaged**, or that the gateway refuses for good, is not sent again. Its file stays, renamed to
  ``*.damaged`` or ``*.refused``, for a person to inspect. Renamed to ``*.chunk``, the next session sends it again.
- **A full outbox or disk.** `append` raises, and the session pauses recording and reports it. An outbox that was opened
  with ``drop_oldest_autonomous`` first drops whole episodes, oldest first, in which no person took part and of which
  this session has sent no chunk. The names of their files are durable before the first is deleted, so a kill leaves no
  part of them. What an earlier session has sent of such an episode stays in the store, as an episode without an end.

The name of a file holds all that sending and dropping need, and the CRC32C of its content (`_StoredChunk`).
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, NoReturn, Self

import msgspec
from msgspec import Meta

from hal.context import ClosedAtExit
from hal.decode_errors import DECODE_ERRORS
from user_sys.codec import checksum
from user_sys.episode import EpisodeSource, Phase, parse_chunk
from user_sys.errors import LinkDown, StoreError, StoreFull, disk_full_message
from user_sys.store.files import NO_SPACE_ERRNOS, OS_FILES, Files, free_bytes, replace_durably, replace_file
from user_sys.store.record_format import WriterLock
from user_sys.tunnel.connection import PendingChunk
from user_sys.tunnel.limits import MAX_CHUNK_BYTES

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 30
RESERVE_BYTES = 16 << 20
RESERVE_FILE = "reserve"
BLOCK_BYTES = 4096  # in which a disk allocates the space of a file
OUTBOX_RETRY_S = 0.5
CHUNK_SUFFIX, DAMAGED_SUFFIX, REFUSED_SUFFIX = ".chunk", ".damaged", ".refused"
BUSY_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of a read that may succeed later
FULL_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT)  # of a write that succeeds once files are deleted
WhenFull = Literal["pause", "drop_oldest_autonomous"]


class _StoredChunk(NamedTuple):
    """A chunk's file.

    Attributes:
        is_last: it ends its episode.
        is_kept: it is never dropped. That is every chunk except those in which a policy alone acted online:
            demonstrations, evaluations, steps of a person, and chunks without the phase of their steps.
    """

    sequence: int
    size_bytes: int
    crc: int
    chunk_index: int
    is_last: bool
    is_kept: bool
    episode: str

    @classmethod
    def of(cls, sequence: int, packet: bytes) -> Self:
        """Raises WireError: `packet` is not a chunk."""
        chunk = parse_chunk(packet)
        header, phase = chunk.header, chunk.column("phase")
        autonomous = header.source is EpisodeSource.ONLINE and phase is not None and bool((phase == Phase.POLICY).all())
        return cls(
            sequence,
            len(packet),
            checksum(packet),
            header.index,
            header.end is not None,
            not autonomous,
            header.episode,
        )

    @classmethod
    def parse(cls, name: str) -> Self:
        """The chunk of a file's name without its suffix. Raises ValueError."""
        sequence, size, crc, index, last, kept, episode = name.split("_", 6)
        return cls(int(sequence), int(size), int(crc, 16), int(index), last == "1", kept == "1", episode)

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        numbers = f"{self.sequence:012d}_{self.size_bytes}_{self.crc:08x}_{self.chunk_index}"
        return f"{numbers}_{self.is_last:d}_{self.is_kept:d}_{self.episode}"

    @property
    def disk_bytes(self) -> int:
        return -(-self.size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def droppable_episodes(
    waiting: Sequence[_StoredChunk], offered: int, recording: Set[str]
) -> Iterator[list[_StoredChunk]]:
    """The chunks of each droppable episode, the oldest first. Looks no further in `waiting` than the caller.

    An episode is droppable if all of its chunks are in `waiting`, a policy alone acted in it, and no chunk was sent.

    Args:
        waiting: in order; the chunks of an episode follow each other.
        offered: chunks up to this sequence were handed to the tunnel.
        recording: episodes whose next chunks are being recorded, which are not droppable.
    """
    unfinished = {waiting[-1].episode} if waiting and not waiting[-1].is_last else set()
    for name, group in itertools.groupby(waiting, key=lambda chunk: chunk.episode):
        chunks = list(group)
        is_whole = chunks[0].chunk_index == 0 and chunks[0].sequence > offered and name not in recording | unfinished
        if is_whole and not any(chunk.is_kept for chunk in chunks):
            yield chunks


class DropRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The chunks that an outbox has dropped since it was created.

    Attributes:
        names: of the files that were dropped last, without their suffix. Some may still be there.
    """

    episodes: int = 0
    chunks: int = 0
    size_bytes: int = 0
    names: tuple[str, ...] = ()


def read_drop_record(files: Files, path: Path) -> DropRecord:
    """The record at `path`; an empty one if it is damaged: dropped chunks whose files are left are sent then."""
    try:
        return msgspec.json.decode(_read_file(files, path), type=DropRecord)
    except FileNotFoundError:
        return DropRecord()
    except DECODE_ERRORS:
        logger.error("outbox.drop_record_damaged path=%s: dropped chunks may be sent", path)
        return DropRecord()


@dataclass(frozen=True)
class OutboxConfig:
    """The disk space of an outbox, and its behaviour when it is full.

    Attributes:
        max_bytes: of each robot.
        when_full: ``pause`` stops recording until the gateway has acknowledged some chunks;
            ``drop_oldest_autonomous`` drops whole episodes, oldest first, in which no person took part, and counts
            them.
    """

    max_bytes: Annotated[int, Meta(ge=MAX_CHUNK_BYTES)] = MAX_BYTES
    when_full: WhenFull = "pause"


class ChunkTooLarge(StoreError):
    """No gateway accepts the chunk. A retry does not help."""


class OutboxFull(StoreFull):
    """The outbox or its disk is full. The chunk was not recorded. Wait for the gateway, or free some space."""


class _ChunkQueue:
    """The durable chunks that are not acknowledged, in order. Any thread may call it.

    Attributes:
        used_bytes: of their files on disk.
        is_closed: nothing is acknowledged any more.
    """

    def __init__(self, chunks: list[_StoredChunk]) -> None:
        self._lock = threading.Lock()
        self._chunks, self.used_bytes, self.is_closed = list[_StoredChunk](), 0, False
        self._offered = -1
        self.add(chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, chunks: Sequence[_StoredChunk]) -> None:
        with self._lock:
            is_newer = not self._chunks or not chunks or chunks[0] > self._chunks[-1]
            self._chunks += chunks
            if not is_newer:
                self._chunks.sort()
            self.used_bytes += _disk_bytes(chunks)

    def next(self, after_sequence: int) -> _StoredChunk | None:
        """The first chunk after `after_sequence`, which counts as sent from now on."""
        with self._lock:
            at = self._count_to(after_sequence)
            if at == len(self._chunks):
                return None
            self._offered = max(self._offered, self._chunks[at].sequence)
            return self._chunks[at]

    def find(self, sequence: int) -> _StoredChunk | None:
        with self._lock:
            count = self._count_to(sequence)
            return next((chunk for chunk in self._chunks[count - 1 : count] if chunk.sequence == sequence), None)

    def take_droppable(self, recording: Set[str], need_bytes: int) -> list[_StoredChunk]:
        """Removes the chunks of the oldest droppable episodes, enough to free `need_bytes`, or of all."""
        with self._lock:
            chosen, freed = list[list[_StoredChunk]](), 0
            for chunks in droppable_episodes(self._chunks, self._offered, recording):
                chosen.append(chunks)
                freed += _disk_bytes(chunks)
                if freed >= need_bytes:
                    break
            return [chunk for chunks in chosen for chunk in self._take_from(chunks[0], len(chunks))]

    def take_acknowledged(self, sequence: int) -> list[_StoredChunk]:
        """Removes the chunks up to and including `sequence`."""
        with self._lock:
            return self._take(0, 0 if self.is_closed else self._count_to(sequence))

    def remove(self, chunk: _StoredChunk) -> bool:
        """Removes one chunk. Returns whether it was there."""
        with self._lock:
            return chunk in self._chunks and bool(self._take_from(chunk, 1))

    def close(self) -> None:
        with self._lock:
            self.is_closed = True

    def _take_from(self, first: _StoredChunk, count: int) -> list[_StoredChunk]:
        at = bisect.bisect_left(self._chunks, first)
        return self._take(at, at + count)

    def _take(self, start: int, stop: int) -> list[_StoredChunk]:
        taken = self._chunks[start:stop]
        del self._chunks[start:stop]
        self.used_bytes -= _disk_bytes(taken)
        return taken

    def _count_to(self, sequence: int) -> int:
        return bisect.bisect_right(self._chunks, sequence, key=lambda chunk: chunk.sequence)


class Outbox(ClosedAtExit):
    """One writer thread appends. The tunnel's thread sends and acknowledges, and never waits for the disk's sync.

    Attributes:
        next_sequence: the number of the next chunk; chunks of earlier sessions have lower ones.
        dropped: the chunks that were dropped since the outbox was created.
        paused_reason: why `append_when_free` waits; empty if it does not.
        damaged: chunks that could not be read back. They are logged and skipped; the other chunks are sent.
    """

    def __init__(self, path: Path, lock: WriterLock, max_bytes: int, when_full: WhenFull, files: Files) -> None:
        self.path, self.max_bytes, self.damaged, self.paused_reason = path, max_bytes, 0, ""
        self._files, self._writer_lock, self._when_full = files, lock, when_full
        self._write_lock = threading.Lock()
        chunks, self.next_sequence = self._recover()
        self.dropped = read_drop_record(files, path / "dropped")
        self._dropped_before = self.dropped.episodes
        interrupted = [chunk for chunk in chunks if chunk.name in self.dropped.names]
        for chunk in interrupted:
            self._unlink(self._path(chunk))
        self._queue = _ChunkQueue([chunk for chunk in chunks if chunk not in interrupted])
        self._on_append: Callable[[], None] | None = None
        self._reserve_bytes = 0

    @classmethod
    def open(
        cls, path: Path, *, max_bytes: int = MAX_BYTES, when_full: WhenFull = "pause", files: Files = OS_FILES
    ) -> Self:
        """Opens or creates the outbox at `path`. Finds the chunks of an earlier session, killed or not.

        Raises:
            StoreLocked: another session of this robot has it.
            OutboxFull: the disk has no space for its lock.
        """
        lock = None
        try:
            files.make_folder(path)
            files.sync_folder(path.parent)
            lock = WriterLock(path, files)
            return cls(path, lock, max_bytes, when_full, files)
        except BaseException as error:
            if lock is not None:
                lock.release()
            if isinstance(error, OSError) and error.errno in NO_SPACE_ERRNOS:
                raise OutboxFull(disk_full_message(path, BLOCK_BYTES, free_bytes(path))) from error
            raise

    def _recover(self) -> tuple[list[_StoredChunk], int]:
        """The chunks in order, and the next number. Deletes files of interrupted writes."""
        names = self._files.listdir(self.path)
        for name in names:
            if name.endswith(".tmp"):
                self._files.unlink(self.path / name)
        chunks, *others = (_parse_names(names, each) for each in (CHUNK_SUFFIX, DAMAGED_SUFFIX, REFUSED_SUFFIX))
        return chunks, max((chunk.sequence for found in (chunks, *others) for chunk in found), default=-1) + 1

    # For the recording thread

    def append(self, *packets: bytes) -> int:
        """Records encoded chunks, all or none, and returns the sequence number of the last. Durable on return.

        Raises:
            ChunkTooLarge: one could never be delivered.
            OutboxFull: no room. They may be appended again.
            StoreError: the disk failed.
            WireError: one is not a chunk.
        """
        if (largest := max(map(len, packets))) > MAX_CHUNK_BYTES:
            raise ChunkTooLarge(
                f"a chunk of {largest} bytes; the limit is {MAX_CHUNK_BYTES}: record fewer or smaller pictures"
            )
        with self._write_lock:
            chunks = [_StoredChunk.of(number, packet) for number, packet in enumerate(packets, self.next_sequence)]
            self._make_room(chunks)
            while not self._write(chunks, packets):
                pass
            self.next_sequence += len(chunks)
        self._notify()
        return chunks[-1].sequence

    def append_when_free(self, packet: bytes, stop: threading.Event) -> None:
        """As `append`, but waits for room. After `stop` is set it uses the reserve.

        Raises:
            OutboxFull: the reserve is full too.
        """
        while True:
            try:
                self.append(packet)
                break
            except OutboxFull as error:
                if self.paused_reason != str(error):
                    logger.error("recording.paused path=%s: %s", self.path, error)
                self.paused_reason = str(error)
                if stop.wait(OUTBOX_RETRY_S) and not self._release_reserve():
                    raise
        if self.paused_reason:
            self.paused_reason = ""
            if not stop.is_set():
                self.allocate_reserve()
            logger.warning("recording.resumed path=%s", self.path)

    def _write(self, chunks: Sequence[_StoredChunk], packets: Sequence[bytes]) -> bool:
        """Writes the files of `chunks`, all or none. False: the disk was full, and some episodes were dropped."""
        try:
            for chunk, packet in zip(chunks, packets, strict=True):
                replace_file(self._files, self._path(chunk), packet)
            self._files.sync_folder(self.path)
        except OSError as error:
            for chunk in chunks:
                with contextlib.suppress(OSError):
                    self._unlink(self._path(chunk))  # the next chunk may not share its number
            droppable = self._take_droppable(_disk_bytes(chunks), chunks) if error.errno in FULL_DISK_ERRNOS else []
            if not droppable:
                self._raise_disk_error(error, _disk_bytes(chunks))
            self._drop_on_full_disk(droppable)
            return False
        self._queue.add(chunks)
        return True

    def _drop_on_full_disk(self, dropped: list[_StoredChunk]) -> None:
        """As `_drop`. The record of what is dropped takes space of the reserve, which is allocated again."""
        has_reserve = (self.path / RESERVE_FILE).exists()
        self._unlink_reserve()
        try:
            self._drop(dropped)
        finally:
            if has_reserve:
                self.allocate_reserve()

    def _notify(self) -> None:
        on_append = self._on_append
        if on_append is not None:
            on_append()

    def _raise_disk_error(self, error: OSError, needed_bytes: int) -> NoReturn:
        if error.errno in NO_SPACE_ERRNOS:
            raise OutboxFull(disk_full_message(self.path, needed_bytes, free_bytes(self.path))) from error
        raise StoreError(f"{self.path}: {error.strerror}") from error

    def allocate_reserve(self) -> None:
        """Sets `RESERVE_BYTES` of the disk aside for a session's last chunks: all of them or none."""
        try:
            with self._files.opened(self.path / RESERVE_FILE, os.O_RDWR | os.O_CREAT) as fd:
                self._files.allocate(fd, 0, RESERVE_BYTES)
        except OSError as error:
            logger.warning("outbox.no_reserve path=%s: %s", self.path, error.strerror)
            self._unlink_reserve()

    def _release_reserve(self) -> bool:
        """Frees the reserve, for chunks beyond `max_bytes` too. False: it was freed before."""
        self._unlink_reserve()
        is_first = self._reserve_bytes == 0
        self._reserve_bytes = RESERVE_BYTES
        return is_first

    def _make_room(self, chunks: Sequence[_StoredChunk]) -> None:
        """Drops episodes if it may and must. Raises OutboxFull: still no room for `chunks`."""
        excess = self._excess_bytes(chunks)
        if excess > 0 and (droppable := self._take_droppable(excess, chunks)):
            self._drop(droppable)
            excess = self._excess_bytes(chunks)
        if excess > 0:
            raise OutboxFull(
                f"{self.path} holds {len(self)} unsent chunks ({self.used_bytes >> 20} MiB of {self.max_bytes >> 20}): "
                "recording pauses until the gateway has taken some"
            )

    def _excess_bytes(self, chunks: Sequence[_StoredChunk]) -> int:
        return self.used_bytes + _disk_bytes(chunks) - self.max_bytes - self._reserve_bytes

    def _take_droppable(self, need_bytes: int, recording: Sequence[_StoredChunk]) -> list[_StoredChunk]:
        """Takes the oldest droppable episodes out of the queue, of at least `need_bytes` if there are.

        The episodes of `recording` stay. Without `drop_oldest_autonomous` all stay.
        """
        if self._when_full == "pause":
            return []
        return self._queue.take_droppable({chunk.episode for chunk in recording}, need_bytes)

    def _drop(self, dropped: list[_StoredChunk]) -> None:
        """Deletes chunks that were taken out of the queue. Durable and counted on return."""
        size_bytes = sum(chunk.size_bytes for chunk in dropped)
        record = DropRecord(
            episodes=self.dropped.episodes + len({chunk.episode for chunk in dropped}),
            chunks=self.dropped.chunks + len(dropped),
            size_bytes=self.dropped.size_bytes + size_bytes,
            names=tuple(chunk.name for chunk in dropped),
        )
        try:
            replace_durably(self._files, self.path / "dropped", msgspec.json.encode(record))
        except OSError as error:  # nothing was dropped
            self._queue.add(dropped)
            self._raise_disk_error(error, BLOCK_BYTES)
        self.dropped = record
        logger.warning(
            "outbox.dropped episodes=%d chunks=%d bytes=%d path=%s: it is full, and these were the oldest autonomous",
            len({chunk.episode for chunk in dropped}),
            len(dropped),
            size_bytes,
            self.path,
        )
        for chunk in dropped:
            self._unlink(self._path(chunk))

    # For the tunnel's thread

    def __len__(self) -> int:
        """Chunks that are durable here and not yet acknowledged."""
        return len(self._queue)

    @property
    def used_bytes(self) -> int:
        """Bytes on disk of the chunks that are not acknowledged."""
        return self._queue.used_bytes

    @property
    def newly_dropped_episodes(self) -> int:
        """How many it has dropped since it was opened."""
        return self.dropped.episodes - self._dropped_before

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
        while (chunk := self._queue.next(after_sequence)) is not None:
            try:
                packet = self._read(chunk)
            except OSError as error:
                if error.errno in BUSY_ERRNOS:  # an acknowledgement of a later chunk would delete this one unsent
                    logger.warning("outbox.read_failed path=%s: %s; it is read again", self._path(chunk), error)
                    return
                packet = b""
            after_sequence = chunk.sequence
            if packet:
                yield PendingChunk(chunk.sequence, packet)
            else:
                self._set_damaged_aside(chunk)

    def _read(self, chunk: _StoredChunk) -> bytes:
        """The packet; empty if the file is damaged. Raises OSError."""
        packet = _read_file(self._files, self._path(chunk))
        return packet if checksum(packet) == chunk.crc and len(packet) == chunk.size_bytes else b""

    def _set_damaged_aside(self, chunk: _StoredChunk) -> None:
        self.damaged += 1
        logger.error("outbox.damaged sequence=%d path=%s: it is not sent", chunk.sequence, self._path(chunk))
        if not self._queue.remove(chunk):
            return
        with contextlib.suppress(OSError):
            self._files.rename(self._path(chunk), self._path(chunk, DAMAGED_SUFFIX))

    def acknowledge(self, sequence: int) -> None:
        """Chunks up to and including `sequence` need not be sent again. An older sequence changes nothing."""
        if not (done := self._queue.take_acknowledged(sequence)):
            return
        try:
            for chunk in done:
                self._unlink(self._path(chunk))
        except OSError as error:
            logger.warning("outbox.acknowledge_failed path=%s: %s; a restart sends them again", self.path, error)

    def set_aside(self, sequence: int, reason: str) -> None:
        """Renames a chunk that the gateway refuses for good to ``*.refused``, which a full disk permits too.

        Raises:
            LinkDown: the disk failed. The chunk stays, so the next session sends it again.
        """
        chunk = self._queue.find(sequence)
        if chunk is None:
            return
        saved = self._path(chunk, REFUSED_SUFFIX)
        try:
            self._files.rename(self._path(chunk), saved)
        except OSError as error:
            raise LinkDown(f"a refused chunk cannot be renamed to {saved}: {error.strerror}") from error
        self._queue.remove(chunk)
        logger.error(
            "outbox.refused sequence=%d saved=%s: %s; to send it once that no longer holds, rename the file to *%s",
            *(sequence, saved, reason, CHUNK_SUFFIX),
        )

    def count_session(self) -> int:
        """How often this was called before, for this folder; a lower number if the disk failed."""
        path, before = self.path / "sessions", 0
        with contextlib.suppress(OSError, ValueError):
            before = int(_read_file(self._files, path))
        with contextlib.suppress(OSError):  # a full disk must not keep the session from delivering its chunks
            replace_durably(self._files, path, str(before + 1).encode())
        return before

    def set_on_append(self, on_append: Callable[[], None] | None) -> None:
        """Calls `on_append` after each `append`, in the recording thread. None removes it."""
        self._on_append = on_append

    def close(self) -> None:
        """Closes. Unacknowledged chunks stay. A second call does nothing."""
        with self._write_lock, contextlib.ExitStack() as stack:
            if self._queue.is_closed:
                return
            stack.callback(self._writer_lock.release)
            self._queue.close()  # an acknowledgement may arrive now
            self._unlink_reserve()

    def _path(self, chunk: _StoredChunk, suffix: str = CHUNK_SUFFIX) -> Path:
        return self.path / f"{chunk.name}{suffix}"

    def _unlink_reserve(self) -> None:
        self._unlink(self.path / RESERVE_FILE)

    def _unlink(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(path)


def _disk_bytes(chunks: Sequence[_StoredChunk]) -> int:
    return sum(chunk.disk_bytes for chunk in chunks)


def _parse_names(names: Sequence[str], suffix: str) -> list[_StoredChunk]:
    """The chunks of the files with this suffix, in order. Raises StoreError: another program has put one there."""
    try:
        return sorted(_StoredChunk.parse(name.removesuffix(suffix)) for name in names if name.endswith(suffix))
    except ValueError:
        raise StoreError(f"a file *{suffix} in the outbox has a name that this release does not know") from None


def _read_file(files: Files, path: Path) -> bytes:
    fd = files.open(path, os.O_RDONLY)
    try:
        return files.pread(fd, files.size(fd), 0)
    finally:
        files.close(fd)
