"""The writer of an append-only log: recovery, append, group commit, rotation, sealing. The store and the outbox use it.

A log is a folder of segments. One process writes it; any number of processes read it at the same time.

A record is *acknowledged* when the `LogWriter.sync` after its `append` has returned. Acknowledged records survive
``kill -9`` and power cuts. An unsynced record may survive or be absent, but is never seen in part. A damaged record
is reported and skipped; its neighbours stay readable.

Reasons for each sync:

- commit, fdatasync: the record's bytes and the file's length, before the acknowledgement;
- creation of a segment: the file before its rename, so that no segment lacks a header; the folder before the first
  record, because a commit syncs the file and not its name;
- footer, fdatasync: before the manifest lists the segment, or before a rewritten segment gets its name;
- manifest: before its rename; the folder before any file of the old manifest is deleted;
- creation of a log: the parent folder only;
- opening a log: the folder and the last segment. A killed writer may have renamed and written without a sync,
  readers have seen the result, and later records rely on it.

Deletions are not synced. A file that returns after a power cut has a lower generation than its replacement, or a
number below the manifest's first, and the next writer deletes it again.
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
SEGMENT_BYTES = 64 << 20
MAX_PENDING_BYTES = 8 << 20  # appended records are written when more are pending
CLOSE_TIMEOUT_S = 60.0
TOO_MANY_OPEN_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})


@dataclass(eq=False)
class RecoveredLog:
    """State of a log after recovery.

    Attributes:
        active: the last segment, open, which takes the next record; None if a new one must be created.
        unsealed: open segments to be sealed.
        next_sequence: number of the next record.
        next_number: number of the segment to create.
        last_segment_end: end of the records in the segment before that one; 0 if unknown.
        truncated_bytes: length of the unfinished append that recovery removed.
    """

    manifest: LogManifest
    active: FinishedSegment | None = None
    unsealed: list[FinishedSegment] = field(default_factory=list)
    next_sequence: int = 0
    next_number: int = 0
    last_segment_end: int = 0
    truncated_bytes: int = 0


def recover_log(files: Files, path: Path, fresh: LogManifest) -> RecoveredLog:
    """Recovers the log at `path`, which the caller has locked; returns `fresh` if there is none.

    Afterwards all that readers can see is durable. A kill during recovery leaves a log that the next call recovers.

    Raises:
        StoreVersionMismatch: it has another format version.
        OSError: it cannot be read or written; no file stays open.
    """
    recovery = _Recovery(files, path, fresh)
    try:
        recovery.run()
    except BaseException:
        recovery.close()
        raise
    return recovery.found


def _stale_footer_copies(files: Iterable[str], chosen: Sequence[SegmentName], first: int) -> Iterator[str]:
    """Footer copies of dropped or rewritten files. The copy of a missing file stays; it lists the lost records."""
    covered = {number for name in chosen for number in range(name.number, name.stop)}
    for file in files:
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
        for segment in [*self.found.unsealed, *([self.found.active] if self.found.active else [])]:
            self._files.close(segment.fd)

    def run(self) -> None:
        """Finds the end of the log and syncs all that a killed writer had written and readers have seen."""
        found = self.found
        names = self._remove_leftovers(list_segments(self._path, self._files))
        if names:
            self._take_segments(names)
        else:
            self._files.sync_folder(self._path.parent)  # the log's folder may be new
        if names or found.manifest is not self._fresh:
            found.next_number = max([found.manifest.last_number + 1, *(name.stop for name in names[-1:])])

    def _remove_leftovers(self, names: list[SegmentName]) -> list[SegmentName]:
        """Loads or rebuilds the manifest, deletes leftovers of a crash, and returns the current files."""
        manifest_ = self._load_manifest()
        if manifest_ is None and names:
            manifest_ = manifest.rebuild(self._files, self._path, resolve_generations(names)[0])
        self.found.manifest = manifest_ or self.found.manifest
        first = self.found.manifest.first_number
        chosen, leftovers = resolve_generations(name for name in names if name.number >= first)
        leftovers += [name for name in names if name.number < first]
        # A killed process may have renamed a file without a sync. Sync now, because the replaced file is deleted below,
        # and later syncs acknowledge records by the file and not by its name.
        self._files.sync_folder(self._path)
        folder = self._files.listdir(self._path)
        temporaries = [name for name in folder if name.endswith(TEMPORARY_SUFFIX)]
        for leftover in [*map(str, leftovers), *temporaries, *_stale_footer_copies(folder, chosen, first)]:
            self._files.unlink(self._path / leftover)
        return chosen

    def _load_manifest(self) -> LogManifest | None:
        try:
            return manifest.load(self._files, self._path)
        except StoreCorrupt as error:
            _logger.warning("store.manifest_damaged path=%s: %s", self._path, error)
            return None

    def _take_segments(self, names: list[SegmentName]) -> None:
        """Lists sealed segments and scans the others. The last segment stays open if it can take records."""
        listed = {entry.name for entry in self.found.manifest.segments}
        for name in names:
            if name not in listed and (entry := self._unlisted_entry(name)) is not None:
                self.found.manifest = self.found.manifest.with_entry(entry)
        sealed = {entry.name: entry.next_sequence for entry in self.found.manifest.segments}
        self.found.next_sequence = max(sealed.values(), default=0)
        for name, following in zip(names, names[1:], strict=False):
            if name not in sealed:
                self._scan_unlisted(name, following)
        if names[-1] not in sealed:
            self._open_last(names[-1])
        if self.found.manifest.last_number >= names[-1].stop:
            _logger.warning(
                "store.last_segment_missing path=%s segment=%d", self._path, self.found.manifest.last_number
            )
            self._skip_numbers()

    def _skip_numbers(self) -> None:
        """Skips all sequence numbers that an unreadable segment may have used."""
        self.found.next_sequence += MAX_SEGMENT_BYTES // RECORD_HEADER_BYTES

    def _unlisted_entry(self, name: SegmentName) -> SegmentEntry | None:
        """The entry of a segment that is sealed and not listed; None if it is not sealed."""
        fd = self._files.open(self._path / str(name), os.O_RDWR)
        try:
            footer = read_footer_or_copy(self._files, self._path, fd, name)
            if footer is None:
                return None
            self._files.fsync(fd)  # its writer may have been killed before that sync
            return SegmentEntry.of(name, footer)
        finally:
            self._files.close(fd)

    def _scan_unlisted(self, name: SegmentName, following: SegmentName) -> None:
        """Scans a segment that has a successor and no footer, so that it gets sealed."""
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
        """Whether the file belongs to another segment or log and must not be changed."""
        if header is None or header.belongs_to(name, self.found.manifest.log_id):
            return False
        _logger.warning("store.foreign_segment path=%s segment=%s: not changed", self._path, name)
        return True

    def _open_last(self, name: SegmentName) -> None:
        """Opens the last segment at its end, after removing an unfinished append.

        The segment is left to be sealed if damage must stay in it, its header is damaged, or its successor is missing.
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
        whole = self._truncate_append(fd, scan)
        # Kept bytes may hold records; their sequence numbers are not reused.
        lost = 0 if whole else (files.size(fd) - scan.end) // RECORD_HEADER_BYTES
        self.found.next_sequence = max(self.found.next_sequence, scan.sequence + lost)
        files.fsync(fd)
        return FinishedSegment(name, fd, align_up(files.size(fd)), flat, range(first, self.found.next_sequence)), whole

    def _truncate_append(self, fd: int, scan: SegmentScan) -> bool:
        """Truncates an unfinished append. Returns False if the bytes after the last record may be more than that."""
        size = self._files.size(fd)
        if size <= scan.end:
            return True
        place = f"segment={scan.number} offset={scan.end} bytes={size - scan.end}"
        if not scan.is_unfinished():
            _logger.warning("store.damaged path=%s %s: kept", self._path, place)
            return False
        self.found.truncated_bytes = size - scan.end
        _logger.warning("store.truncated path=%s %s", self._path, place)
        self._files.ftruncate(fd, scan.end)
        return True


class LogWriter:
    """The only writer of a log. Create it with `open`.

    One thread calls it, except `sync` with a sync point, `rewrite`, `drop_before` and `sealed_segments`, which are
    thread-safe.

    Attributes:
        next_sequence: number of the next record; it only grows, also over restarts.
        truncated_bytes: length of the unfinished append that `open` removed.
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
        self._manifest_file = ManifestFile(files, path, LogManifest(secrets.token_bytes(LOG_ID_BYTES)))
        self._active = ActiveSegment(0, 0)
        self._sync_lock = threading.Lock()  # held during a sync and while the next segment is created
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
        """Opens or creates the log at `path`. All that readers can see is durable when it returns.

        Args:
            segment_bytes: a record that would exceed this size starts a new segment.
            summarise: makes the owner's summary for the footer of a sealed segment from all its records and payloads in
                order. The sealing thread calls it. An exception in it ends the writer.
            background: create and seal segments in a thread. Otherwise an append that starts a segment blocks for both.

        Raises:
            StoreLocked: another process writes the log.
            StoreVersionMismatch: it has another format version.
            StoreFull: no space for a manifest or a segment; retry when there is some.
            StoreError: the folder cannot be used.
        """
        if not SEGMENT_HEADER_BYTES <= segment_bytes <= MAX_SEGMENT_BYTES:
            raise StoreError(f"segments of {segment_bytes} bytes; the maximum is {MAX_SEGMENT_BYTES}")
        try:
            files.make_folder(path)
            lock = WriterLock(path, files)
        except OSError as error:
            raise _error_class(error)(f"cannot write {path}: {error.strerror}") from error
        writer = cls(path, files, lock, segment_bytes, summarise, background)
        try:
            writer._recover()
        except BaseException as error:
            writer._release()
            if isinstance(error, OSError):
                raise _error_class(error)(f"cannot recover {path}: {error.strerror}") from error
            raise
        return writer

    # Recovery, append, sync, rotation

    def _recover(self) -> None:
        found = recover_log(self._files, self._path, self._manifest_file.manifest)
        self._manifest_file.manifest = found.manifest
        self._finished.extend(found.unsealed)
        self.next_sequence, self.truncated_bytes = found.next_sequence, found.truncated_bytes
        if found.active is None:
            self._active = ActiveSegment(found.next_number, self.next_sequence)
            with self._translated_errors(f"create segment {found.next_number}"):
                self._active.create(self._files, self._path, found.manifest.log_id, found.last_segment_end)
        else:
            self._active = ActiveSegment.resumed(found.active)
        self._manifest_file.update(functools.partial(_with_entries, entries=[], last_number=self._last_file_number))
        self._start_sealing()

    @property
    def _last_file_number(self) -> int:
        """The highest segment number that has a file."""
        active = self._active
        return (active.previous or active).number

    def append(self, kind: int, payload: Buffer, *, schema: int = 0) -> RecordRef:
        """Appends a record, which is acknowledged by the next `sync`. Readers can see it earlier.

        The caller assigns `kind` (0 to 0xFEFF) and `schema` (a 32-bit fingerprint, 0 for none). Blocks for the disk
        when `MAX_PENDING_BYTES` are pending, and, without a background thread, when a segment is full.

        Raises:
            StoreFull: no space; this record was not taken. Earlier records are kept and will be written.
            StoreError: the record is invalid, the writer is closed or has failed, or too many files are open.
        """
        self._check()
        if len(payload) > MAX_PAYLOAD_BYTES or not 0 <= kind < RESERVED_KINDS:
            raise StoreError(f"a record of kind {kind} and {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} fit")
        active, size = self._active, record_bytes(len(payload))
        if active.end > SEGMENT_HEADER_BYTES and active.end + size > self._segment_bytes:
            active = self._rotate()
        elif active.pending_bytes and active.pending_bytes + size > MAX_PENDING_BYTES:
            self.flush()
        ref = active.append(kind, payload, self.next_sequence, schema)
        self.next_sequence += 1
        return ref

    def flush(self) -> SyncPoint:
        """Writes all appended records; `sync` with the returned sync point makes them durable, in any thread.

        Meanwhile the next group can be appended. Raises as `append`.
        """
        self._check()
        active = self._active
        if active.pending_bytes and active.previous is not None:
            with self._sync_lock:
                self._create_segment(active)
        try:
            active.write(self._files)
        except OSError as error:
            raise self._failed(error, "write") from error
        return SyncPoint(active.number, active.written)

    def sync(self, point: SyncPoint | None = None) -> None:
        """Makes all appended records durable, or those before the sync point. Blocks for the disk.

        Returns at once if there is nothing new.

        Raises:
            StoreFull: no space; nothing is lost and nothing is acknowledged. Retry when there is some.
            StoreError: the disk failed and the writer is unusable. The disk's content is unknown, so a retry could
                acknowledge lost records. Open the log again.
        """
        if point is None:
            point = self.flush()
        with self._sync_lock:
            self._check()
            active = self._active  # read once: an append may start the next segment at any time
            self._create_segment(active)
            if (active.number, active.synced) < point:
                self._make_durable(active, point.end)

    def _make_durable(self, active: ActiveSegment, end: int) -> None:
        try:
            self._files.fdatasync(active.fd)
        except OSError as error:
            raise self._fail_permanently(f"sync failed: {error.strerror}") from error
        active.synced = max(active.synced, end)

    def rotate(self) -> None:
        """Starts a new segment if the current one holds records; the old one is then sealed. Raises as `append`."""
        self._check()
        if self._active.end > SEGMENT_HEADER_BYTES:
            self._rotate()

    def _rotate(self) -> ActiveSegment:
        """Directs later records to a new segment. A thread creates its file; without one it exists on return."""
        self.flush()
        old = self._active
        self._active = new = ActiveSegment(old.number + 1, self.next_sequence, previous=old)
        if self._pool is not None:
            self._pool.submit(self._create_ahead)
            return new
        try:
            with self._sync_lock:
                self._create_segment(new)
        except StoreError:
            self._active = old
            raise
        return new

    def _create_ahead(self) -> None:
        """Creates the next segment's file ahead of its use. Any failure occurs again at that use."""
        try:
            with self._sync_lock:
                if not self._failure:
                    self._create_segment(self._active)
        except StoreError as error:
            _logger.warning("store.segment_create_failed path=%s: %s", self._path, error)

    def _create_segment(self, active: ActiveSegment) -> None:
        """Makes the segment before `active` durable and creates the file of `active`, if still needed.

        The caller holds `_sync_lock`. No record of `active` is written or acknowledged before that.
        """
        old = active.previous
        if old is None:
            return
        if old.synced < old.end:
            self._make_durable(old, old.end)
        with self._translated_errors(f"create segment {active.number}"):
            active.create(self._files, self._path, self._manifest_file.manifest.log_id, old.end)
        active.previous = None
        self._finished.append(old.finish(active.first_sequence))
        self._start_sealing()

    # Sealing

    def _start_sealing(self) -> None:
        if self._pool is None:
            self._seal_finished()
        elif self._finished:
            self._pool.submit(self._seal_finished)

    def _seal_finished(self) -> None:
        """Seals finished segments. Without space for a footer they wait for the next attempt or the next open."""
        try:
            while self._finished and not self._failure:
                finished = self._finished[0]
                entry = seal_segment(self._files, self._path, finished, self._summarise)
                self._manifest_file.update(
                    functools.partial(_with_entries, entries=[entry], last_number=self._last_file_number)
                )
                self._finished.popleft()
                self._files.close(finished.fd)
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS | TOO_MANY_OPEN_ERRNOS:
                self._fail_permanently(f"sealing failed: {error.strerror}")
            _logger.warning("store.seal_failed path=%s: %s", self._path, error)
        except Exception as error:
            self._fail_permanently(f"sealing failed: {error!r}")
            _logger.exception("store.seal_failed path=%s", self._path)

    def sealed_segments(self) -> tuple[SegmentEntry, ...]:
        """The sealed segments, in order."""
        return self._manifest_file.manifest.segments

    # Freeing space

    def rewrite(self, segments: Sequence[int], keep: Callable[[RecordRef], bool]) -> SegmentEntry:
        """Replaces neighbouring sealed segments by one segment with the records for which `keep` is true.

        Sequence numbers stay. Blocks while it reads and writes those segments; appends continue. A crash leaves the old
        segments or the new one; the next writer deletes leftovers.

        Raises:
            StoreCorrupt: a record to keep is damaged and not quarantined; nothing was changed.
            StoreFull: no space for the new segment; nothing was changed.
            StoreError: the segments are not neighbours or not all sealed, or the disk failed.
        """
        with self._translated_errors("rewrite"), self._manifest_file.maintenance_lock:
            self._check()
            return segment_writer.rewrite_segments(
                self._files, self._path, self._manifest_file, segments, keep, self._summarise
            )

    def drop_before(self, segment: int) -> None:
        """Deletes the segments that lie entirely below number `segment`, except the active one.

        The manifest is updated durably first, so a power cut leaves no listed segment without a file.

        Raises:
            StoreError: the disk failed, or a file cannot be deleted.
        """
        with self._translated_errors("drop old segments"), self._manifest_file.maintenance_lock:
            self._check()
            segment_writer.drop_segments_before(
                self._files, self._path, self._manifest_file, min(segment, self._last_file_number)
            )

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not yet synced."""
        active = self._active
        before = active.previous
        return active.end - active.synced + (before.end - before.synced if before else 0)

    @contextlib.contextmanager
    def _translated_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(error, what) from error

    def _failed(self, error: OSError, what: str) -> StoreError:
        if error.errno in NO_SPACE_ERRNOS:
            free = "free some space and retry; acknowledged records are safe"
            return StoreFull(f"{self._path}: {error.strerror} ({what}); {free}")
        if error.errno in TOO_MANY_OPEN_ERRNOS:
            return StoreError(f"{self._path}: {error.strerror} ({what}): raise the limit (ulimit -n) or close files")
        return self._fail_permanently(f"{what} failed: {error.strerror}")

    def _fail_permanently(self, why: str) -> StoreError:
        self._failure = f"{self._path}: {why}; open it again; do not retry"
        return StoreError(self._failure)

    def _check(self) -> None:
        if self._failure:
            raise StoreError(self._failure)

    def close(self) -> None:
        """Syncs and releases the log, also if the sync fails. Idempotent.

        Waits at most `CLOSE_TIMEOUT_S` for sealing or rewriting; the next writer seals the rest.

        Raises:
            StoreError: as `sync`, or on timeout; the log then stays locked until this process exits.
        """
        if not self._manifest_file.maintenance_lock.acquire(timeout=CLOSE_TIMEOUT_S):
            raise StoreError(
                f"{self._path}: a compaction is still running after {CLOSE_TIMEOUT_S:.0f} s; the log stays open"
            )
        try:
            if not self._failure:
                self.sync()
                self._finish_sealing()
                with self._translated_errors("write the manifest"):
                    self._manifest_file.flush()
        finally:
            self._failure = self._failure or f"{self._path} is closed"
            self._release()
            self._manifest_file.maintenance_lock.release()

    def _finish_sealing(self) -> None:
        self._start_sealing()
        self._wait_for_sealing()
        self._check()

    def _wait_for_sealing(self) -> None:
        if self._pool is None:
            return
        try:
            self._pool.submit(bool).result(CLOSE_TIMEOUT_S)  # one thread: earlier tasks are done
        except TimeoutError:
            raise StoreError(
                f"{self._path}: sealing is still running after {CLOSE_TIMEOUT_S:.0f} s; the log stays open"
            ) from None

    def _release(self) -> None:
        if self._pool is not None:
            self._wait_for_sealing()
            self._pool.shutdown()
            self._pool = None
        while self._finished:
            self._files.close(self._finished.popleft().fd)
        for segment in (self._active, self._active.previous):
            if segment is not None:
                segment.close(self._files)
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _with_entries(old: LogManifest, entries: Sequence[SegmentEntry], last_number: int) -> LogManifest:
    for entry in entries:
        if entry.number >= old.first_number:  # otherwise it was dropped before it was sealed
            old = old.with_entry(entry)
    return msgspec.structs.replace(old, last_number=max(old.last_number, last_number))


def _error_class(error: OSError) -> type[StoreError]:
    return StoreFull if error.errno in NO_SPACE_ERRNOS else StoreError
