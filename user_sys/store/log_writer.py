"""The log's writer: append, group commit, rotation, sealing, recovery."""

from __future__ import annotations

import concurrent.futures
import errno
import functools
import logging
import os
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
from crc32c import crc32c

from user_sys.errors import StoreError, StoreFull
from user_sys.store import compaction
from user_sys.store.files import NO_SPACE, REAL, Buffer, Files, consume, next_buffers, write_all
from user_sys.store.frame import (
    MAX_PAYLOAD_BYTES,
    MAX_SEGMENT_BYTES,
    RECORD_HEADER_BYTES,
    RESERVED_KINDS,
    SEGMENT_HEADER_BYTES,
    RecordRef,
    SegmentHeader,
    encode_record_header,
    record_bytes,
)
from user_sys.store.manifest import LOG_ID_BYTES, Catalog, Entry, Manifest
from user_sys.store.recovery import recover
from user_sys.store.sealing import Finished, Summarise, seal
from user_sys.store.segments import (
    TEMPORARY,
    SegmentName,
    WriterLock,
)

SEGMENT_BYTES = 64 << 20
MAX_PENDING_BYTES = 8 << 20  # appended records are written out once this many wait, synced or not
JOIN_BELOW_BYTES = 16 << 10  # copying a smaller payload beside its header costs less than two more buffers
CLOSE_TIMEOUT_S = 60.0
TOO_MANY_OPEN = frozenset({errno.EMFILE, errno.ENFILE})

_logger = logging.getLogger(__name__)


class Ticket(NamedTuple):
    """A place in the log: all that was appended before it has been written, and waits for its sync."""

    segment: int
    end: int


class LogWriter:
    """The one writer of a log. Obtain it with `open`.

    One thread calls it, but for `sync` with a ticket, `rewrite`, `drop_before` and `sealed`, which any thread may call
    beside it.

    Attributes:
        sequence: the number that the next record gets; it only grows, over restarts too.
        cut_bytes: the length of the unfinished append that `open` cut off the log's end.
    """

    def __init__(
        self,
        path: Path,
        files: Files,
        lock: WriterLock,
        segment_bytes: int,
        summarise: Summarise | None,
        background: bool,
    ) -> None:
        self._path, self._files, self._lock, self._segment_bytes = path, files, lock, segment_bytes
        self._summarise = summarise
        self._catalog = Catalog(files, path, Manifest(secrets.token_bytes(LOG_ID_BYTES)))
        self._fd = -1
        self._segment = self._first_sequence = self._end = self._written = self._synced = self._pending_bytes = 0
        self._flat = array("q")
        self._pending: deque[Buffer] = deque()
        self._syncing = threading.Lock()  # the descriptor is neither closed nor reused while a sync is under way
        self._finished: deque[Finished] = deque()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="store-seal") if background else None
        self._sealings: list[concurrent.futures.Future[None]] = []
        self._failure = ""
        self.sequence = self.cut_bytes = 0

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        summarise: Summarise | None = None,
        background: bool = True,
        files: Files = REAL,
    ) -> Self:
        """Opens or creates the log at `path`. All that a reader sees is durable when it returns.

        Args:
            segment_bytes: a record that would make a segment longer begins the next one.
            summarise: makes what a sealed segment's footer holds for its owner, of all its records and payloads in
                order. Called by the sealing thread. An exception in it ends the writer.
            background: seal in a thread. Else an append that begins a new segment waits until the old one is sealed.

        Raises:
            StoreLocked: another process writes it.
            StoreVersion: another format version wrote it.
            StoreFull: no space for a new segment.
            StoreError: the folder cannot be used.
        """
        if not SEGMENT_HEADER_BYTES <= segment_bytes <= MAX_SEGMENT_BYTES:
            raise StoreError(f"segments of {segment_bytes} bytes; at most {MAX_SEGMENT_BYTES} can be")
        try:
            files.make_folder(path)
            lock = WriterLock(path, files)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        writer = cls(path, files, lock, segment_bytes, summarise, background)
        try:
            writer._recover()
        except BaseException as error:
            writer._release()
            if isinstance(error, OSError):
                raise StoreError(f"cannot recover {path}: {error.strerror}") from error
            raise
        return writer

    # A writer's life: recover once, then append, sync and rotate.

    def _recover(self) -> None:
        found = recover(self._files, self._path, self._catalog.manifest)
        self._catalog.manifest = found.manifest
        self._finished.extend(found.finished)
        self.sequence, self.cut_bytes, self._end = found.sequence, found.cut_bytes, found.last_bytes
        if found.tail is None:
            self._create_segment(found.next_number)
        else:
            self._resume(found.tail)
        self._catalog.switch(functools.partial(_with_entries, entries=[], tail=self._segment))
        self._start_sealing()

    def _resume(self, tail: Finished) -> None:
        self._fd, self._segment, self._flat = tail.fd, tail.name.number, tail.flat
        self._first_sequence = tail.sequences.start
        self._end = self._written = self._synced = tail.end

    def _create_segment(self, number: int) -> None:
        """Begins segment `number`; the one before ends at `_end` and is durable.

        The header is synced before the file gets its name, so that no segment is ever without one; the folder is synced
        before a record goes in, since a record is acknowledged by a sync of its file only.
        """
        target = self._path / str(SegmentName(number))
        temporary = target.with_suffix(TEMPORARY)
        header = SegmentHeader(number, self.sequence, self._end, time.time_ns(), self._catalog.manifest.log_id).encode()
        fd = -1
        try:
            fd = self._files.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            write_all(self._files, fd, [header], 0)
            self._files.fsync(fd)
            self._files.rename(temporary, target)
            self._files.sync_folder(self._path)
        except OSError as error:
            if fd >= 0:
                self._files.close(fd)
            raise self._failed(error, f"create segment {number}") from error
        self._fd, self._segment, self._first_sequence, self._flat = fd, number, self.sequence, array("q")
        self._end = self._written = self._synced = SEGMENT_HEADER_BYTES

    def append(self, kind: int, payload: Buffer, *, schema: int = 0) -> RecordRef:
        """Adds a record; it counts only once `sync` has returned. Readers see it between the two.

        `kind` (0 to 0xFEFF) and `schema` (a 32-bit fingerprint, 0 for none) are the caller's. Blocks for the disk when
        a segment is full or `MAX_PENDING_BYTES` wait.

        Raises:
            StoreFull: no space, and this record was not taken. Those before it are kept and will be written.
            StoreError: the record cannot be one, or the writer is closed or has failed, or too many files are open.
        """
        self._check()
        if len(payload) > MAX_PAYLOAD_BYTES or not 0 <= kind < RESERVED_KINDS:
            raise StoreError(f"a record of kind {kind} and {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} fit")
        body = bytes(payload)
        size = record_bytes(len(body))
        if self._end > SEGMENT_HEADER_BYTES and self._end + size > self._segment_bytes:
            self._rotate()
        elif self._pending_bytes and self._pending_bytes + size > MAX_PENDING_BYTES:
            self.flush()
        ref = RecordRef(self._segment, self._end, len(body), kind, self.sequence, schema)
        self._enqueue(encode_record_header(ref, crc32c(body)), body, size)
        self._flat.extend(ref)
        return ref

    def _enqueue(self, header: bytes, body: bytes, size: int) -> None:
        padding = bytes(size - RECORD_HEADER_BYTES - len(body))
        if len(body) < JOIN_BELOW_BYTES:
            self._pending.append(b"".join((header, body, padding)))
        else:
            self._pending.extend(part for part in (header, body, padding) if part)
        self._pending_bytes += size
        self._end += size
        self.sequence += 1

    def flush(self) -> Ticket:
        """Writes out all that was appended. `sync` with the ticket makes it durable, also from another thread.

        So the next group can be appended while the disk syncs this one. Raises as `append`.
        """
        self._check()
        while self._pending:
            try:
                count = self._files.pwritev(self._fd, next_buffers(self._pending), self._written)
                consume(self._pending, count)
            except OSError as error:
                raise self._failed(error, "write") from error
            self._written += count
            self._pending_bytes -= count
        return Ticket(self._segment, self._written)

    def sync(self, ticket: Ticket | None = None) -> None:
        """Makes durable what was flushed by the time of `ticket`, or everything appended. Blocks for the disk.

        Costs nothing when nothing is new.

        Raises:
            StoreFull: no space; nothing is lost and nothing is acknowledged. Call it again once there is space.
            StoreError: the disk failed. The writer is of no more use: what the disk holds is unknown, so a retry could
                acknowledge what is not there. Open the log anew.
        """
        if ticket is None:
            ticket = self.flush()
        with self._syncing:
            self._check()
            if (self._segment, self._synced) >= ticket:
                return
            try:
                self._files.fdatasync(self._fd)
            except OSError as error:
                raise self._poison(f"sync failed: {error.strerror}") from error
            self._synced = max(self._synced, ticket.end)

    def rotate(self) -> None:
        """Begins a new segment where the present one holds anything; the old one is then sealed. Raises as `append`."""
        self._check()
        if self._end > SEGMENT_HEADER_BYTES:
            self._rotate()

    def _rotate(self) -> None:
        self.sync()
        sequences = range(self._first_sequence, self.sequence)
        finished = Finished(SegmentName(self._segment), self._fd, self._end, self._flat, sequences)
        with self._syncing:
            self._create_segment(self._segment + 1)
        self._finished.append(finished)
        self._start_sealing()

    # Sealing

    def _start_sealing(self) -> None:
        if self._pool is None:
            self._seal_finished()
        elif self._finished:
            running = [sealing for sealing in self._sealings if not sealing.done()]
            self._sealings = [*running, self._pool.submit(self._seal_finished)]

    def _seal_finished(self) -> None:
        """Seals what waits for it. Without space for a footer it goes on waiting, for the next one or the next open."""
        try:
            while self._finished and not self._failure:
                finished = self._finished[0]
                entry = seal(self._files, finished, self._summarise)
                self._catalog.switch(functools.partial(_with_entries, entries=[entry], tail=self._segment))
                self._finished.popleft()
                self._files.close(finished.fd)
        except OSError as error:
            if error.errno not in NO_SPACE | TOO_MANY_OPEN:
                self._poison(f"sealing failed: {error.strerror}")
            _logger.warning("store.seal-failed path=%s: %s", self._path, error)
        except Exception as error:
            self._poison(f"sealing failed: {error!r}")
            _logger.exception("store.seal-failed path=%s", self._path)

    def sealed(self) -> tuple[Entry, ...]:
        """The segments that are sealed by now, in order."""
        return self._catalog.manifest.segments

    # Giving space back

    def rewrite(self, segments: Sequence[int], keep: Callable[[RecordRef], bool]) -> Entry:
        """Puts the records that `keep` wants of some neighbouring sealed segments into one new segment in their place.

        Sequence numbers stay. Blocks for as long as it reads and writes those segments; appends go on meanwhile. A
        crash at any point leaves the old ones or the new one, and the next writer deletes what is left over.

        Raises:
            StoreCorrupt: a record that should be kept is damaged and not quarantined; nothing was changed.
            StoreFull: no space for the new segment; nothing was changed.
            StoreError: they are no neighbours, or not all sealed; or the disk failed.
        """
        try:
            with self._catalog.maintenance:
                self._check()
                return compaction.rewrite(self._files, self._path, self._catalog, segments, keep, self._summarise)
        except OSError as error:
            raise self._failed(error, "rewrite") from error

    def drop_before(self, segment: int) -> None:
        """Deletes the segments that lie wholly below number `segment`; never the one being written.

        The manifest says so first, and durably: a power cut leaves no segment that is listed and missing.

        Raises:
            StoreError: the disk failed, or a file cannot be deleted.
        """
        try:
            with self._catalog.maintenance:
                self._check()
                compaction.drop_before(self._files, self._path, self._catalog, min(segment, self._segment))
        except OSError as error:
            raise self._failed(error, "drop old segments") from error

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not yet synced."""
        return self._pending_bytes + self._written - self._synced

    def _failed(self, error: OSError, what: str) -> StoreError:
        if error.errno in NO_SPACE:
            free = "free some space and go on: nothing that was acknowledged is lost"
            return StoreFull(f"{self._path}: {error.strerror} ({what}); {free}")
        if error.errno in TOO_MANY_OPEN:
            return StoreError(f"{self._path}: {error.strerror} ({what}): raise the limit (ulimit -n) or close some")
        return self._poison(f"{what} failed: {error.strerror}")

    def _poison(self, why: str) -> StoreError:
        self._failure = f"{self._path}: {why}; open it anew, do not retry"
        return StoreError(self._failure)

    def _check(self) -> None:
        if self._failure:
            raise StoreError(self._failure)

    def close(self) -> None:
        """Syncs and lets go of the log, which it does even where the sync fails. Calling it twice is harmless.

        Waits at most `CLOSE_TIMEOUT_S` for a segment that is being sealed or rewritten; what is not sealed the next
        writer seals.

        Raises:
            StoreError: as `sync`, or that time has passed; then the log stays locked until this process ends.
        """
        if not self._catalog.maintenance.acquire(timeout=CLOSE_TIMEOUT_S):
            raise StoreError(f"{self._path}: a compaction goes on after {CLOSE_TIMEOUT_S:.0f} s; the log stays open")
        try:
            if not self._failure:
                self.sync()
                self._finish_sealing()
                self._settle()
        finally:
            self._failure = self._failure or f"{self._path} is closed"
            self._release()
            self._catalog.maintenance.release()

    def _finish_sealing(self) -> None:
        self._start_sealing()
        self._wait_for_sealing()
        self._check()

    def _wait_for_sealing(self) -> None:
        if concurrent.futures.wait(self._sealings, CLOSE_TIMEOUT_S).not_done:
            raise StoreError(f"{self._path}: sealing goes on after {CLOSE_TIMEOUT_S:.0f} s; the log stays open")

    def _settle(self) -> None:
        try:
            self._catalog.settle()
        except OSError as error:
            raise self._failed(error, "write the manifest") from error

    def _close_segment(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)

    def _release(self) -> None:
        if self._pool is not None:
            self._wait_for_sealing()
            self._pool.shutdown()
        while self._finished:
            self._files.close(self._finished.popleft().fd)
        self._close_segment()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _with_entries(old: Manifest, entries: Sequence[Entry], tail: int) -> Manifest:
    for entry in entries:
        if entry.number >= old.first:  # else it was dropped before it was sealed
            old = old.with_entry(entry)
    return msgspec.structs.replace(old, tail=max(old.tail, tail))
