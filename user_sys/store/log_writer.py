"""What a writer does first: it finds the log's end, and removes what a crash left behind.

When it is done, all that a reader sees is durable. A kill in the middle of it leaves what the next one finds in turn.

The log's writer: append, group commit, rotation, sealing, recovery.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import logging
import os
import secrets
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from user_sys.errors import StoreCorrupt, StoreError, StoreFull
from user_sys.store import manifest, segment_writer
from user_sys.store.files import NO_SPACE_ERRNOS, OS_FILES, Buffer, Files
from user_sys.store.manifest import LOG_ID_BYTES, LogManifest, ManifestFile, SegmentEntry, read_footer_or_copy
from user_sys.store.record_format import (
    FOOTER_SUFFIX,
    MAX_PAYLOAD_BYTES,
    MAX_SEGMENT_BYTES,
    RECORD_HEADER_BYTES,
    RESERVED_KINDS,
    SEGMENT_HEADER_BYTES,
    SEGMENT_SUFFIX,
    TEMPORARY_SUFFIX,
    Damage,
    RecordRef,
    SegmentHeader,
    SegmentName,
    SegmentScan,
    WriterLock,
    align_up,
    list_segments,
    parse_segment_name,
    read_segment_header,
    record_bytes,
    resolve_generations,
)
from user_sys.store.segment_writer import (
    ActiveSegment,
    FinishedSegment,
    Summarise,
    SyncPoint,
    scan_unsealed,
    seal_segment,
)

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RecoveredLog:
    """Where a log stands.

    Attributes:
        active: the last segment, open, which takes the next record; None where a new one must be created.
        unsealed: segments that wait to be sealed, open.
        next_sequence: the number that the next record gets.
        next_number: of the segment to be created.
        last_segment_end: where the records of the segment before that one end; 0 where that is not known.
        truncated_bytes: the length of the unfinished append that was cut off.
    """

    manifest: LogManifest
    active: FinishedSegment | None = None
    unsealed: list[FinishedSegment] = field(default_factory=list)
    next_sequence: int = 0
    next_number: int = 0
    last_segment_end: int = 0
    truncated_bytes: int = 0


def recover_log(files: Files, path: Path, fresh: LogManifest) -> RecoveredLog:
    """Takes up the log at `path`, which the caller has locked, or `fresh` where there is none.

    Raises:
        StoreVersion: another format version wrote it.
        OSError: it cannot be read or written; no file is left open.
    """
    recovery = _Recovery(files, path, fresh)
    try:
        recovery.run()
    except BaseException:
        recovery.close()
        raise
    return recovery.found


def _stale_footer_copies(there: Iterable[str], chosen: Sequence[SegmentName], first: int) -> Iterator[str]:
    """Copies of the footers of files that were dropped or rewritten; that of a missing file tells what it held."""
    covered = {number for name in chosen for number in range(name.number, name.stop)}
    for file in there:
        name = (
            parse_segment_name(file.removesuffix(FOOTER_SUFFIX) + SEGMENT_SUFFIX)
            if file.endswith(FOOTER_SUFFIX)
            else None
        )
        if name is not None and name not in chosen and (name.number < first or name.number in covered):
            yield file


class _Recovery:
    def __init__(self, files: Files, path: Path, fresh: LogManifest) -> None:
        self._files, self._path, self._fresh, self.found = files, path, fresh, RecoveredLog(fresh)

    def close(self) -> None:
        for open_one in [*self.found.unsealed, *([self.found.active] if self.found.active else [])]:
            self._files.close(open_one.fd)

    def run(self) -> None:
        """Finds the log's end, and makes durable what a killed writer had written and readers have seen."""
        found = self.found
        names = self._clean(list_segments(self._path, self._files))
        if names:
            self._adopt(names)
        else:
            self._files.sync_folder(self._path.parent)  # the log's folder may be new
        if names or found.manifest is not self._fresh:
            found.next_number = max([found.manifest.last_number + 1, *(name.stop for name in names[-1:])])

    def _clean(self, names: list[SegmentName]) -> list[SegmentName]:
        """Reads or rebuilds the manifest; returns the files that count, and deletes the leftovers of a crash."""
        known = self._load_manifest()
        if known is None and names:
            known = manifest.rebuild(self._files, self._path, resolve_generations(names)[0])
        self.found.manifest = known or self.found.manifest
        first = self.found.manifest.first_number
        chosen, leftovers = resolve_generations(name for name in names if name.number >= first)
        leftovers += [name for name in names if name.number < first]
        # A rename that a killed process had not made durable must be, before anything relies on it: what it replaced
        # is deleted here, and what is appended is acknowledged by a sync of the file, not of its name.
        self._files.sync_folder(self._path)
        there = self._files.listdir(self._path)
        temporaries = [name for name in there if name.endswith(TEMPORARY_SUFFIX)]
        for doomed in [*map(str, leftovers), *temporaries, *_stale_footer_copies(there, chosen, first)]:
            self._files.unlink(self._path / doomed)
        return chosen

    def _load_manifest(self) -> LogManifest | None:
        try:
            return manifest.load(self._files, self._path)
        except StoreCorrupt as error:
            _logger.warning("store.manifest-damaged path=%s: %s", self._path, error)
            return None

    def _adopt(self, names: list[SegmentName]) -> None:
        """Takes up the log that is there. The last segment stays open unless it can take no more records."""
        listed = {entry.name for entry in self.found.manifest.segments}
        for name in names:
            if name not in listed and (entry := self._unlisted_entry(name)) is not None:
                self.found.manifest = self.found.manifest.with_entry(entry)
        sealed = {entry.name: entry.next_sequence for entry in self.found.manifest.segments}
        self.found.next_sequence = max(sealed.values(), default=0)
        for name, following in zip(names, names[1:], strict=False):
            if name not in sealed:
                self._take_unsealed(name, following)
        if names[-1] not in sealed:
            self._open_last(names[-1])
        if self.found.manifest.last_number >= names[-1].stop:
            _logger.warning("store.tail-missing path=%s segment=%d", self._path, self.found.manifest.last_number)
            self._skip_numbers()

    def _skip_numbers(self) -> None:
        """Gives none of the numbers again that a segment may have held which cannot be looked into."""
        self.found.next_sequence += MAX_SEGMENT_BYTES // RECORD_HEADER_BYTES

    def _unlisted_entry(self, name: SegmentName) -> SegmentEntry | None:
        """The entry of a segment that was sealed and not listed; None where it is not sealed."""
        fd = self._files.open(self._path / str(name), os.O_RDWR)
        try:
            footer = read_footer_or_copy(self._files, self._path, fd, name)
            if footer is None:
                return None
            self._files.fsync(fd)  # its writer may have been killed before the sync that a manifest's entry relies on
            return SegmentEntry.of(name, footer)
        finally:
            self._files.close(fd)

    def _take_unsealed(self, name: SegmentName, following: SegmentName) -> None:
        """Finds the records of a segment that has a successor and no footer, to be sealed."""
        next_header, header = self._header(following), self._header(name)
        if self._is_foreign(header, name):
            return
        end = next_header.previous_bytes if next_header else 0
        finished = scan_unsealed(self._files, self._path, name, end)
        self.found.unsealed.append(finished)
        self.found.next_sequence = max(self.found.next_sequence, finished.sequences.stop)

    def _header(self, name: SegmentName) -> SegmentHeader | None:
        fd = self._files.open(self._path / str(name), os.O_RDONLY)
        try:
            return read_segment_header(self._files, fd)
        finally:
            self._files.close(fd)

    def _is_foreign(self, header: SegmentHeader | None, name: SegmentName) -> bool:
        """Whether the file is another segment's or another log's, and so must be left alone."""
        if header is None or header.belongs_to(name, self.found.manifest.log_id):
            return False
        _logger.warning("store.foreign-segment path=%s segment=%s: left alone", self._path, name)
        return True

    def _open_last(self, name: SegmentName) -> None:
        """Opens the last segment at its end, having cut off an unfinished append.

        Where damage must stay behind, or its header is damaged, or its successor is missing, it is left to be sealed.
        """
        header = self._header(name)
        if self._is_foreign(header, name):
            self._skip_numbers()
            return
        fd = self._files.open(self._path / str(name), os.O_RDWR)
        try:
            last, whole = self._scan_last(fd, name, header)
        except BaseException:
            self._files.close(fd)
            raise
        self.found.last_segment_end = last.end
        if whole and header is not None and self.found.manifest.last_number < name.stop:
            self.found.active = last
        else:
            self.found.unsealed.append(last)

    def _scan_last(self, fd: int, name: SegmentName, header: SegmentHeader | None) -> tuple[FinishedSegment, bool]:
        files, first = self._files, header.first_sequence if header else self.found.next_sequence
        scan, flat = SegmentScan(files, fd, name.number, name.generation, sequence=first), array("q")
        for item in scan:
            if isinstance(item, Damage):
                _logger.warning("store.damaged %s", item)
            else:
                flat.extend(item)
        whole = self._cut(fd, scan)
        # The numbers of records that may have been in what is kept are not given again.
        lost = 0 if whole else (files.size(fd) - scan.end) // RECORD_HEADER_BYTES
        self.found.next_sequence = max(self.found.next_sequence, scan.sequence + lost)
        files.fsync(fd)
        return FinishedSegment(name, fd, align_up(files.size(fd)), flat, range(first, self.found.next_sequence)), whole

    def _cut(self, fd: int, scan: SegmentScan) -> bool:
        """Cuts off an append that was never finished; False where what follows the last record may be more."""
        size = self._files.size(fd)
        if size <= scan.end:
            return True
        place = f"segment={scan.number} offset={scan.end} bytes={size - scan.end}"
        if not scan.is_unfinished():
            _logger.warning("store.damaged path=%s %s: kept", self._path, place)
            return False
        self.found.truncated_bytes = size - scan.end
        _logger.warning("store.cut path=%s %s", self._path, place)
        self._files.ftruncate(fd, scan.end)
        return True


SEGMENT_BYTES = 64 << 20
MAX_PENDING_BYTES = 8 << 20  # appended records are written out once this many wait, synced or not
CLOSE_TIMEOUT_S = 60.0
TOO_MANY_OPEN_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})


class LogWriter:
    """The one writer of a log. Obtain it with `open`.

    One thread calls it, but for `sync` with a ticket, `rewrite`, `drop_before` and `sealed_segments`, which any thread
    may call beside it.

    Attributes:
        next_sequence: the number that the next record gets; it only grows, over restarts too.
        truncated_bytes: the length of the unfinished append that `open` cut off the log's end.
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
        self._catalog = ManifestFile(files, path, LogManifest(secrets.token_bytes(LOG_ID_BYTES)))
        self._tail = ActiveSegment(0, 0)
        self._syncing = threading.Lock()  # held during a sync, and while the next segment gets its file
        self._finished: deque[FinishedSegment] = deque()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="store-seal") if background else None
        self._failure = ""
        self.next_sequence = self.truncated_bytes = 0

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        summarise: Summarise | None = None,
        background: bool = True,
        files: Files = OS_FILES,
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
        found = recover_log(self._files, self._path, self._catalog.manifest)
        self._catalog.manifest = found.manifest
        self._finished.extend(found.unsealed)
        self.next_sequence, self.truncated_bytes = found.next_sequence, found.truncated_bytes
        if found.active is None:
            self._tail = ActiveSegment(found.next_number, self.next_sequence)
            with self._translated(f"create segment {found.next_number}"):
                self._tail.create(self._files, self._path, found.manifest.log_id, found.last_segment_end)
        else:
            self._tail = ActiveSegment.resumed(found.active)
        self._catalog.update(functools.partial(_with_entries, entries=[], tail=self._present))
        self._start_sealing()

    @property
    def _present(self) -> int:
        """The highest segment number of which there is a file."""
        tail = self._tail
        return (tail.previous or tail).number

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
        ref = tail.append(kind, payload, self.next_sequence, schema)
        self.next_sequence += 1
        return ref

    def flush(self) -> SyncPoint:
        """Writes out all that was appended. `sync` with the ticket makes it durable, also from another thread.

        So the next group can be appended while the disk syncs this one. Raises as `append`.
        """
        self._check()
        tail = self._tail
        if tail.pending_bytes and tail.previous is not None:
            with self._syncing:
                self._begin(tail)
        try:
            tail.write(self._files)
        except OSError as error:
            raise self._failed(error, "write") from error
        return SyncPoint(tail.number, tail.written)

    def sync(self, ticket: SyncPoint | None = None) -> None:
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

    def _make_durable(self, tail: ActiveSegment, end: int) -> None:
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

    def _rotate(self) -> ActiveSegment:
        """Later records go to a new segment, whose file a thread makes; without one it is there on return."""
        self.flush()
        old = self._tail
        self._tail = new = ActiveSegment(old.number + 1, self.next_sequence, previous=old)
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

    def _begin(self, tail: ActiveSegment) -> None:
        """Makes the segment before `tail` durable, then the file of `tail`, where that is still to be done.

        The caller holds `_syncing`. No record of `tail` is written before, nor is anything acknowledged.
        """
        old = tail.previous
        if old is None:
            return
        if old.synced < old.end:
            self._make_durable(old, old.end)
        with self._translated(f"create segment {tail.number}"):
            tail.create(self._files, self._path, self._catalog.manifest.log_id, old.end)
        tail.previous = None
        self._finished.append(old.finish(tail.first_sequence))
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
                entry = seal_segment(self._files, self._path, finished, self._summarise)
                self._catalog.update(functools.partial(_with_entries, entries=[entry], tail=self._present))
                self._finished.popleft()
                self._files.close(finished.fd)
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS | TOO_MANY_OPEN_ERRNOS:
                self._poison(f"sealing failed: {error.strerror}")
            _logger.warning("store.seal-failed path=%s: %s", self._path, error)
        except Exception as error:
            self._poison(f"sealing failed: {error!r}")
            _logger.exception("store.seal-failed path=%s", self._path)

    def sealed_segments(self) -> tuple[SegmentEntry, ...]:
        """The segments that are sealed by now, in order."""
        return self._catalog.manifest.segments

    # Giving space back

    def rewrite(self, segments: Sequence[int], keep: Callable[[RecordRef], bool]) -> SegmentEntry:
        """Puts the records that `keep` wants of some neighbouring sealed segments into one new segment in their place.

        Sequence numbers stay. Blocks for as long as it reads and writes those segments; appends go on meanwhile. A
        crash at any point leaves the old ones or the new one, and the next writer deletes what is left over.

        Raises:
            StoreCorrupt: a record that should be kept is damaged and not quarantined; nothing was changed.
            StoreFull: no space for the new segment; nothing was changed.
            StoreError: they are no neighbours, or not all sealed; or the disk failed.
        """
        with self._translated("rewrite"), self._catalog.maintenance_lock:
            self._check()
            return segment_writer.rewrite_segments(
                self._files, self._path, self._catalog, segments, keep, self._summarise
            )

    def drop_before(self, segment: int) -> None:
        """Deletes the segments that lie wholly below number `segment`; never the one being written.

        The manifest says so first, and durably: a power cut leaves no segment that is listed and missing.

        Raises:
            StoreError: the disk failed, or a file cannot be deleted.
        """
        with self._translated("drop old segments"), self._catalog.maintenance_lock:
            self._check()
            segment_writer.drop_segments_before(self._files, self._path, self._catalog, min(segment, self._present))

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not yet synced."""
        tail = self._tail
        before = tail.previous
        return tail.end - tail.synced + (before.end - before.synced if before else 0)

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(error, what) from error

    def _failed(self, error: OSError, what: str) -> StoreError:
        if error.errno in NO_SPACE_ERRNOS:
            free = "free some space and go on: nothing that was acknowledged is lost"
            return StoreFull(f"{self._path}: {error.strerror} ({what}); {free}")
        if error.errno in TOO_MANY_OPEN_ERRNOS:
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
        if not self._catalog.maintenance_lock.acquire(timeout=CLOSE_TIMEOUT_S):
            raise StoreError(f"{self._path}: a compaction goes on after {CLOSE_TIMEOUT_S:.0f} s; the log stays open")
        try:
            if not self._failure:
                self.sync()
                self._finish_sealing()
                with self._translated("write the manifest"):
                    self._catalog.flush()
        finally:
            self._failure = self._failure or f"{self._path} is closed"
            self._release()
            self._catalog.maintenance_lock.release()

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
        for tail in (self._tail, self._tail.previous):
            if tail is not None:
                tail.close(self._files)
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _with_entries(old: LogManifest, entries: Sequence[SegmentEntry], tail: int) -> LogManifest:
    for entry in entries:
        if entry.number >= old.first_number:  # else it was dropped before it was sealed
            old = old.with_entry(entry)
    return msgspec.structs.replace(old, last_number=max(old.last_number, tail))


def _unusable(error: OSError) -> type[StoreError]:
    return StoreFull if error.errno in NO_SPACE_ERRNOS else StoreError
