"""The writer of the store's append-only log: recovery, append, group commit, rotation, sealing.

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
- opening a log: the parent folder, and those of all folders that it creates; the folder; the last segment, whose bytes
  are written again first. A killed process may have renamed and written without a sync, readers have seen the result,
  and later records rely on it. After a failed sync the kernel may hold bytes that are not on the disk, and no later
  sync writes them.

Deletions are not synced. A file that returns after a power cut has a lower generation than its replacement, and the
next writer deletes it again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import msgspec

from hal.context import ClosedAtExit
from user_sys.errors import StoreError, StoreFull
from user_sys.store import segment_writer
from user_sys.store.files import NO_SPACE_ERRNOS, OS_FILES, Buffer, Files
from user_sys.store.index_block import IndexBlockBuilder
from user_sys.store.manifest import LOG_ID_BYTES, LogManifest, ManifestFile, SegmentEntry
from user_sys.store.record_format import (
    MAX_PAYLOAD_BYTES,
    MAX_SEGMENT_BYTES,
    RESERVED_KINDS,
    SEGMENT_HEADER_BYTES,
    RecordRef,
    SegmentName,
    WriterLock,
    list_segments,
    record_bytes,
    resolve_generations,
)
from user_sys.store.recovery import recover_log
from user_sys.store.segment_writer import OpenSegment

_logger = logging.getLogger(__name__)
SEGMENT_BYTES = 64 << 20
MAX_PENDING_BYTES = 8 << 20  # appended records are written when more are pending
CLOSE_TIMEOUT_S = 60.0
TOO_MANY_OPEN_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})


class LogWriter(ClosedAtExit):
    """The only writer of a log. Create it with `open`.

    One thread calls it, except `rewrite` and `sealed_segments`, which are thread-safe.
    """

    def __init__(self, path: Path, files: Files, lock: WriterLock, segment_bytes: int) -> None:
        self.path, self._files, self._lock, self._segment_bytes = path, files, lock, segment_bytes
        self._manifest_file = ManifestFile(files, path, LogManifest(secrets.token_bytes(LOG_ID_BYTES)))
        self._active = OpenSegment(SegmentName(0), 0, 0, IndexBlockBuilder())
        self._unsealed: deque[OpenSegment] = deque()
        self._failure = ""

    @classmethod
    def open(cls, path: Path, *, segment_bytes: int = SEGMENT_BYTES, files: Files = OS_FILES) -> Self:
        """Opens or creates the log at `path`. All that readers can see is durable when it returns.

        Args:
            segment_bytes: a record that would exceed this size starts a new segment.

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
        writer = cls(path, files, lock, segment_bytes)
        try:
            writer._recover()
        except BaseException as error:
            writer._release()
            if isinstance(error, OSError):
                raise _error_class(error)(f"cannot recover {path}: {error.strerror}") from error
            raise
        return writer

    @property
    def next_sequence(self) -> int:
        """Number of the next record; it only grows, also over restarts."""
        return self._active.next_sequence

    # Recovery, append, sync, rotation

    def _recover(self) -> None:
        found = recover_log(self._files, self.path, self._manifest_file.manifest)
        self._manifest_file.manifest = found.manifest
        self._unsealed.extend(found.unsealed)
        if found.active is None:
            self._start_segment(found.next_number, found.next_sequence, found.last_segment_end)
        else:
            self._active = found.active
        self._update_manifest([])
        self._seal()

    def append_record(self, kind: int, payload: Buffer, *, schema: int = 0, parsed: object = None) -> RecordRef:
        """Appends a record, which is acknowledged by the next `sync`. Readers can see it earlier.

        The caller assigns `kind` (0 to 0xFEFF) and `schema` (a 32-bit fingerprint, 0 for none); the index block
        gets `parsed`. Blocks for the disk when `MAX_PENDING_BYTES` are pending, and when a segment is full.

        Raises:
            StoreFull: no space; this record was not taken. Earlier records are kept and will be written.
            StoreError: the record is invalid, the writer is closed or has failed, or too many files are open.
        """
        self._check()
        if len(payload) > MAX_PAYLOAD_BYTES or not 0 <= kind < RESERVED_KINDS:
            raise StoreError(f"a record of kind {kind} and {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} fit")
        active, size = self._active, record_bytes(len(payload))
        if active.end > SEGMENT_HEADER_BYTES and active.end + size > self._segment_bytes:
            self._rotate()
            active = self._active
        elif active.pending_bytes and active.pending_bytes + size > MAX_PENDING_BYTES:
            self._write()
        return active.append(kind, payload, schema, parsed)

    def _write(self) -> None:
        with self._translated_errors("write"):
            self._active.write(self._files)

    def sync(self) -> None:
        """Makes all appended records durable. Blocks for the disk.

        Returns at once if there is nothing new.

        Raises:
            StoreFull: no space; nothing is lost and nothing is acknowledged. Retry when there is some.
            StoreError: the disk failed and the writer is unusable. The disk's content is unknown, so a retry could
                acknowledge lost records. Open the log again.
        """
        self._check()
        self._write()
        active = self._active
        if active.synced < active.end:
            try:
                self._files.fdatasync(active.fd)
            except OSError as error:
                raise self._fail_permanently(f"sync failed: {error.strerror}") from error
            active.synced = active.end

    def rotate(self) -> None:
        """Starts a new segment if the current one holds records; the old one is then sealed. Raises as `append`."""
        self._check()
        if self._active.end > SEGMENT_HEADER_BYTES:
            self._rotate()

    def _rotate(self) -> None:
        """Makes the segment durable, starts the next one, and seals the old one."""
        self.sync()
        old = self._active
        self._start_segment(old.name.number + 1, old.next_sequence, old.end)
        self._unsealed.append(old)
        self._seal()

    def _start_segment(self, number: int, sequence: int, previous_bytes: int) -> None:
        segment = OpenSegment(SegmentName(number), sequence, sequence, IndexBlockBuilder())
        with self._translated_errors(f"create segment {number}"):
            segment.create(self._files, self.path, self._manifest_file.manifest.log_id, previous_bytes)
        try:
            segment.publish(self._files, self.path)
        except OSError as error:
            segment.close(self._files)
            raise self._fail_permanently(f"create segment {number} failed: {error.strerror}") from error
        self._active = segment

    def _seal(self) -> None:
        """Seals finished segments. Without space for a footer they wait for the next attempt or the next open."""
        try:
            while self._unsealed:
                entry = self._unsealed[0].seal(self._files)
                self._files.close(self._unsealed.popleft().fd)  # sealed also if the manifest cannot be written now
                self._update_manifest([entry])
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS | TOO_MANY_OPEN_ERRNOS:
                raise self._fail_permanently(f"sealing failed: {error.strerror}") from error
            _logger.warning("store.seal_failed path=%s: %s", self.path, error)

    def _update_manifest(self, entries: Sequence[SegmentEntry]) -> None:
        last = self._active.name.number
        self._manifest_file.update(functools.partial(_with_entries, entries=entries, last_number=last))

    def sealed_segments(self) -> tuple[SegmentEntry, ...]:
        """The sealed segments, in order."""
        return self._manifest_file.manifest.segments

    def lost_segments(self) -> set[SegmentName]:
        """The sealed segments whose files are missing. Raises OSError."""
        present = resolve_generations(list_segments(self.path, self._files))[0]
        return {entry.name for entry in self.sealed_segments()}.difference(present)

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
                self._files, self.path, self._manifest_file, segments, keep, IndexBlockBuilder()
            )

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not yet synced."""
        return self._active.end - self._active.synced

    @contextlib.contextmanager
    def _translated_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(error, what) from error

    def _failed(self, error: OSError, what: str) -> StoreError:
        if error.errno in NO_SPACE_ERRNOS:
            free = "free some space and retry; acknowledged records are safe"
            return StoreFull(f"{self.path}: {error.strerror} ({what}); {free}")
        if error.errno in TOO_MANY_OPEN_ERRNOS:
            return StoreError(f"{self.path}: {error.strerror} ({what}): raise the limit (ulimit -n) or close files")
        return self._fail_permanently(f"{what} failed: {error.strerror}")

    def _fail_permanently(self, why: str) -> StoreError:
        self._failure = f"{self.path}: {why}; open it again; do not retry"
        return StoreError(self._failure)

    def _check(self) -> None:
        if self._failure:
            raise StoreError(self._failure)

    def close(self) -> None:
        """Syncs and releases the log, also if the sync fails. Idempotent.

        Waits at most `CLOSE_TIMEOUT_S` for a rewrite; without disk space the next writer seals the rest.

        Raises:
            StoreError: as `sync`, or on timeout; the log then stays locked until this process exits.
        """
        if not self._manifest_file.maintenance_lock.acquire(timeout=CLOSE_TIMEOUT_S):
            raise StoreError(
                f"{self.path}: a compaction is still running after {CLOSE_TIMEOUT_S:.0f} s; the log stays open"
            )
        try:
            if not self._failure:
                self.sync()
                self._seal()
                with self._translated_errors("write the manifest"):
                    self._manifest_file.flush()
        finally:
            self._failure = self._failure or f"{self.path} is closed"
            self._release()
            self._manifest_file.maintenance_lock.release()

    def _release(self) -> None:
        while self._unsealed:
            self._files.close(self._unsealed.popleft().fd)
        self._active.close(self._files)
        self._lock.release()


def _with_entries(old: LogManifest, entries: Sequence[SegmentEntry], last_number: int) -> LogManifest:
    for entry in entries:
        old = old.with_entry(entry)
    return msgspec.structs.replace(old, last_number=max(old.last_number, last_number))


def _error_class(error: OSError) -> type[StoreError]:
    return StoreFull if error.errno in NO_SPACE_ERRNOS else StoreError
