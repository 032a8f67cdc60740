"""The log's writer: append, group commit, rotation, sealing, recovery."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from user_sys.errors import StoreError, StoreFull
from user_sys.store import compaction
from user_sys.store.files import NO_SPACE, REAL, Buffer, Files
from user_sys.store.frame import (
    MAX_PAYLOAD_BYTES,
    MAX_SEGMENT_BYTES,
    RESERVED_KINDS,
    SEGMENT_HEADER_BYTES,
    RecordRef,
    record_bytes,
)
from user_sys.store.manifest import LOG_ID_BYTES, Catalog, Entry, Manifest
from user_sys.store.recovery import recover
from user_sys.store.sealing import Finished, Summarise, seal
from user_sys.store.segments import WriterLock
from user_sys.store.tail import Tail, Ticket

SEGMENT_BYTES = 64 << 20
MAX_PENDING_BYTES = 8 << 20  # appended records are written out once this many wait, synced or not
CLOSE_TIMEOUT_S = 60.0
TOO_MANY_OPEN = frozenset({errno.EMFILE, errno.ENFILE})

_logger = logging.getLogger(__name__)


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
        self._tail = Tail(0, 0)
        self._syncing = threading.Lock()  # held during a sync, and while the next segment gets its file
        self._finished: deque[Finished] = deque()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="store-seal") if background else None
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
            background: begin and seal segments in a thread. Else an append that begins a segment waits until its file
                is there and the old one is sealed.

        Raises:
            StoreLocked: another process writes it.
            StoreVersion: another format version wrote it.
            StoreFull: no space for a manifest or a new segment; try again when there is some.
            StoreError: the folder cannot be used.
        """
        if not SEGMENT_HEADER_BYTES <= segment_bytes <= MAX_SEGMENT_BYTES:
            raise StoreError(f"segments of {segment_bytes} bytes; at most {MAX_SEGMENT_BYTES} can be")
        try:
            files.make_folder(path)
            lock = WriterLock(path, files)
        except OSError as error:
            raise _unusable(error)(f"cannot write {path}: {error.strerror}") from error
        writer = cls(path, files, lock, segment_bytes, summarise, background)
        try:
            writer._recover()
        except BaseException as error:
            writer._release()
            if isinstance(error, OSError):
                raise _unusable(error)(f"cannot recover {path}: {error.strerror}") from error
            raise
        return writer

    # A writer's life: recover once, then append, sync and rotate.

    def _recover(self) -> None:
        found = recover(self._files, self._path, self._catalog.manifest)
        self._catalog.manifest = found.manifest
        self._finished.extend(found.finished)
        self.sequence, self.cut_bytes = found.sequence, found.cut_bytes
        if found.tail is None:
            self._tail = Tail(found.next_number, self.sequence)
            with self._translated(f"create segment {found.next_number}"):
                self._tail.create(self._files, self._path, found.manifest.log_id, found.last_bytes)
        else:
            self._tail = Tail.resumed(found.tail)
        self._catalog.switch(functools.partial(_with_entries, entries=[], tail=self._present))
        self._start_sealing()

    @property
    def _present(self) -> int:
        """The highest segment number of which there is a file."""
        tail = self._tail
        return (tail.before or tail).number

    def append(self, kind: int, payload: Buffer, *, schema: int = 0) -> RecordRef:
        """Adds a record; it counts only once `sync` has returned. Readers see it between the two.

        `kind` (0 to 0xFEFF) and `schema` (a 32-bit fingerprint, 0 for none) are the caller's. Blocks for the disk when
        `MAX_PENDING_BYTES` wait, and without a background thread when a segment is full.

        Raises:
            StoreFull: no space, and this record was not taken. Those before it are kept and will be written.
            StoreError: the record cannot be one, or the writer is closed or has failed, or too many files are open.
        """
        self._check()
        if len(payload) > MAX_PAYLOAD_BYTES or not 0 <= kind < RESERVED_KINDS:
            raise StoreError(f"a record of kind {kind} and {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} fit")
        tail, size = self._tail, record_bytes(len(payload))
        if tail.end > SEGMENT_HEADER_BYTES and tail.end + size > self._segment_bytes:
            tail = self._rotate()
        elif tail.pending_bytes and tail.pending_bytes + size > MAX_PENDING_BYTES:
            self.flush()
        ref = tail.add(kind, payload, self.sequence, schema)
        self.sequence += 1
        return ref

    def flush(self) -> Ticket:
        """Writes out all that was appended. `sync` with the ticket makes it durable, also from another thread.

        So the next group can be appended while the disk syncs this one. Raises as `append`.
        """
        self._check()
        tail = self._tail
        if tail.pending_bytes and tail.before is not None:
            with self._syncing:
                self._begin(tail)
        try:
            tail.write(self._files)
        except OSError as error:
            raise self._failed(error, "write") from error
        return Ticket(tail.number, tail.written)

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
            tail = self._tail  # looked at once: an append may begin the next segment at any time
            self._begin(tail)
            if (tail.number, tail.synced) < ticket:
                self._make_durable(tail, ticket.end)

    def _make_durable(self, tail: Tail, end: int) -> None:
        try:
            self._files.fdatasync(tail.fd)
        except OSError as error:
            raise self._poison(f"sync failed: {error.strerror}") from error
        tail.synced = max(tail.synced, end)

    def rotate(self) -> None:
        """Begins a new segment where the present one holds anything; the old one is then sealed. Raises as `append`."""
        self._check()
        if self._tail.end > SEGMENT_HEADER_BYTES:
            self._rotate()

    def _rotate(self) -> Tail:
        """Later records go to a new segment, whose file a thread makes; without one it is there on return."""
        self.flush()
        old = self._tail
        self._tail = new = Tail(old.number + 1, self.sequence, before=old)
        if self._pool is not None:
            self._pool.submit(self._begin_early)
            return new
        try:
            with self._syncing:
                self._begin(new)
        except StoreError:
            self._tail = old
            raise
        return new

    def _begin_early(self) -> None:
        """Spares whoever needs the segment's file next the wait; what fails here fails again there."""
        try:
            with self._syncing:
                if not self._failure:
                    self._begin(self._tail)
        except StoreError as error:
            _logger.warning("store.segment-late path=%s: %s", self._path, error)

    def _begin(self, tail: Tail) -> None:
        """Makes the segment before `tail` durable, then the file of `tail`, where that is still to be done.

        The caller holds `_syncing`. No record of `tail` is written before, nor is anything acknowledged.
        """
        old = tail.before
        if old is None:
            return
        if old.synced < old.end:
            self._make_durable(old, old.end)
        with self._translated(f"create segment {tail.number}"):
            tail.create(self._files, self._path, self._catalog.manifest.log_id, old.end)
        tail.before = None
        self._finished.append(old.finished(tail.first_sequence))
        self._start_sealing()

    # Sealing

    def _start_sealing(self) -> None:
        if self._pool is None:
            self._seal_finished()
        elif self._finished:
            self._pool.submit(self._seal_finished)

    def _seal_finished(self) -> None:
        """Seals what waits for it. Without space for a footer it goes on waiting, for the next one or the next open."""
        try:
            while self._finished and not self._failure:
                finished = self._finished[0]
                entry = seal(self._files, self._path, finished, self._summarise)
                self._catalog.switch(functools.partial(_with_entries, entries=[entry], tail=self._present))
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
        with self._translated("rewrite"), self._catalog.maintenance:
            self._check()
            return compaction.rewrite(self._files, self._path, self._catalog, segments, keep, self._summarise)

    def drop_before(self, segment: int) -> None:
        """Deletes the segments that lie wholly below number `segment`; never the one being written.

        The manifest says so first, and durably: a power cut leaves no segment that is listed and missing.

        Raises:
            StoreError: the disk failed, or a file cannot be deleted.
        """
        with self._translated("drop old segments"), self._catalog.maintenance:
            self._check()
            compaction.drop_before(self._files, self._path, self._catalog, min(segment, self._present))

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not yet synced."""
        tail = self._tail
        before = tail.before
        return tail.end - tail.synced + (before.end - before.synced if before else 0)

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(error, what) from error

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
                with self._translated("write the manifest"):
                    self._catalog.settle()
        finally:
            self._failure = self._failure or f"{self._path} is closed"
            self._release()
            self._catalog.maintenance.release()

    def _finish_sealing(self) -> None:
        self._start_sealing()
        self._wait_for_sealing()
        self._check()

    def _wait_for_sealing(self) -> None:
        if self._pool is None:
            return
        try:
            self._pool.submit(bool).result(CLOSE_TIMEOUT_S)  # it has one thread: what was asked of it before is done
        except TimeoutError:
            raise StoreError(
                f"{self._path}: sealing goes on after {CLOSE_TIMEOUT_S:.0f} s; the log stays open"
            ) from None

    def _release(self) -> None:
        if self._pool is not None:
            self._wait_for_sealing()
            self._pool.shutdown()
            self._pool = None
        while self._finished:
            self._files.close(self._finished.popleft().fd)
        for tail in (self._tail, self._tail.before):
            if tail is not None:
                tail.close(self._files)
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


def _unusable(error: OSError) -> type[StoreError]:
    return StoreFull if error.errno in NO_SPACE else StoreError
