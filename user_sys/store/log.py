"""The append-only log under the experience store and under the edge's outbox.

A log is a folder of segments. One process writes it, any number read it, in other processes too.

What survives: a record is *acknowledged* once the `LogWriter.sync` after its `append` has returned. An acknowledged
record survives ``kill -9`` and a power cut (fdatasync; the folder is synced when a segment is created). A record that
was appended and not synced may survive or be absent, but is never seen in part. A damaged record is reported and
skipped; its neighbours stay readable.

Neither class is for several threads at once.
"""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import secrets
import time
from collections import OrderedDict, deque
from pathlib import Path
from types import TracebackType
from typing import Self

from crc32c import crc32c

from user_sys.errors import StoreCorrupt, StoreError, StoreFull
from user_sys.store.frame import (
    MAX_PAYLOAD_BYTES,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    Damage,
    RecordRef,
    SegmentHeader,
    SegmentScan,
    decode_record_header,
    encode_record_header,
    record_bytes,
)
from user_sys.store.segments import (
    NO_SPACE,
    SUFFIX,
    WriterLock,
    last_sequence,
    read_header,
    segment_numbers,
    segment_path,
    sync_folder,
)

__all__ = ["Damage", "LogReader", "LogWriter", "RecordRef", "segment_numbers", "segment_path"]

SEGMENT_BYTES = 64 << 20
MAX_PENDING_BYTES = 8 << 20  # appended records are written out once this many wait, synced or not
MAX_BUFFERS_PER_WRITE = 1024  # IOV_MAX
WRITE_BYTES = 256 << 10  # a single write of megabytes takes five times as long now and then (ext4, measured)
JOIN_BELOW_BYTES = 16 << 10  # copying a smaller payload beside its header costs less than two more buffers
MAX_MAPPED_SEGMENTS = 64  # each mapping holds a file descriptor

_logger = logging.getLogger(__name__)


class LogWriter:
    """The one writer of a log. Obtain it with `open`.

    Attributes:
        sequence: the number that the next record gets; it only grows, over restarts too.
        cut_bytes: the length of the unfinished append that `open` cut off the log's end.
    """

    def __init__(self, path: Path, lock: WriterLock, segment_bytes: int) -> None:
        self._path, self._lock, self._segment_bytes = path, lock, segment_bytes
        self._fd = -1
        self._segment = self._end = self._written = self._synced = self._pending_bytes = 0
        self._pending: deque[bytes | memoryview] = deque()
        self._failure = ""
        self._log_id = secrets.token_bytes(16)
        self.sequence = self.cut_bytes = 0

    @classmethod
    def open(cls, path: Path, *, segment_bytes: int = SEGMENT_BYTES) -> Self:
        """Opens or creates the log at `path`, recovering its end. Reads the last segment once.

        Raises:
            StoreLocked: another process writes it; the message has its id.
            StoreFull: no space to create the first segment.
            StoreVersion: another format version wrote it.
            StoreError: the folder or its files cannot be written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = WriterLock(path)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        writer = cls(path, lock, segment_bytes)
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
        for leftover in self._path.glob("*.tmp"):
            leftover.unlink()
        numbers = segment_numbers(self._path)
        if not numbers:
            self._create_segment(0)
            return
        reusable = self._open_last(numbers[-1])
        for number in reversed(numbers[:-1]):  # the last one may hold nothing that says how far numbering had gone
            if self.sequence:
                break
            self.sequence = last_sequence(self._path, number) + 1
        if not reusable:
            self._close_segment()
            self._create_segment(numbers[-1] + 1)

    def _open_last(self, number: int) -> bool:
        """Finds the end of the last segment and cuts off an unfinished append; False where damage must stay behind."""
        self._fd = os.open(segment_path(self._path, number), os.O_RDWR | os.O_CLOEXEC)
        header = read_header(self._fd, number)
        self._log_id = header.log_id if header else self._log_id
        scan = SegmentScan(self._fd, number, sequence=header.first_sequence if header else 0)
        for found in scan:
            if isinstance(found, Damage):
                _logger.warning("store.damaged %s", found)
        self.sequence = scan.sequence
        size = os.fstat(self._fd).st_size
        if size > scan.end:
            if not scan.unfinished():
                _logger.warning("store.damaged segment=%d offset=%d bytes=%d: kept", number, scan.end, size - scan.end)
                return False
            self.cut_bytes = size - scan.end
            _logger.warning(
                "store.cut path=%s segment=%d offset=%d bytes=%d", self._path, number, scan.end, size - scan.end
            )
            os.ftruncate(self._fd, scan.end)
        # What a killed writer left unsynced is readable now, and may be counted on from here.
        os.fsync(self._fd)
        self._segment = number
        self._end = self._written = self._synced = scan.end
        return header is not None

    def _create_segment(self, number: int) -> None:
        target = segment_path(self._path, number)
        temporary = target.with_suffix(".tmp")
        header = SegmentHeader(number, self.sequence, time.time_ns(), self._log_id).encode()
        fd = -1
        try:
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            if os.write(fd, header) != len(header):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
            os.rename(temporary, target)
            sync_folder(self._path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise self._failed(error, f"create segment {number}") from error
        self._fd, self._segment = fd, number
        self._end = self._written = self._synced = SEGMENT_HEADER_BYTES

    def append(self, kind: int, payload: bytes | memoryview, *, schema: int = 0) -> RecordRef:
        """Adds a record; it counts only once `sync` has returned. Readers see it between the two.

        `kind` (0 to 0xFEFF) and `schema` (a 32-bit fingerprint, 0 for none) are the caller's. Blocks for the disk when
        a segment is full or `MAX_PENDING_BYTES` wait.

        Raises:
            StoreFull: no space, and this record was not taken. Those before it are kept and will be written.
            StoreError: the payload is too large, or the writer is closed or has failed.
        """
        self._check()
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise StoreError(f"a record of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} fit")
        body = bytes(payload)
        size = record_bytes(len(body))
        if self._end > SEGMENT_HEADER_BYTES and self._end + size > self._segment_bytes:
            self._rotate()
        elif self._pending_bytes and self._pending_bytes + size > MAX_PENDING_BYTES:
            self._flush()
        ref = RecordRef(self._segment, self._end, len(body), kind, self.sequence)
        self._enqueue(encode_record_header(ref, body, schema), body, size)
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

    def sync(self) -> None:
        """Makes everything appended durable. Blocks for the disk; costs nothing when nothing is new.

        Raises:
            StoreFull: no space; nothing is lost and nothing is acknowledged. Call it again once there is space.
            StoreError: the disk failed. The writer is of no more use: what the disk holds is unknown, so a retry could
                acknowledge what is not there. Open the log anew.
        """
        self._check()
        self._flush()
        if self._synced == self._written:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise self._poison(error, "sync") from error
        self._synced = self._written

    def _flush(self) -> None:
        while self._pending:
            try:
                count = os.pwritev(self._fd, self._next_buffers(), self._written)
            except OSError as error:
                raise self._failed(error, "write") from error
            self._written += count
            self._pending_bytes -= count
            self._consume(count)

    def _next_buffers(self) -> list[bytes | memoryview]:
        buffers, size = [], 0
        for buffer in itertools.islice(self._pending, MAX_BUFFERS_PER_WRITE):
            buffers.append(buffer)
            size += len(buffer)
            if size >= WRITE_BYTES:
                break
        return buffers

    def _consume(self, count: int) -> None:
        """Takes the first `count` bytes, which are written, off the queue; a buffer written in part stays in part."""
        while count:
            head = self._pending[0]
            if len(head) > count:
                self._pending[0] = memoryview(head)[count:]
                return
            count -= len(head)
            self._pending.popleft()

    def _rotate(self) -> None:
        self.sync()
        previous = self._fd
        self._create_segment(self._segment + 1)
        os.close(previous)

    def drop_before(self, segment: int) -> None:
        """Deletes the segments numbered below `segment`, oldest first; never the one being written.

        Raises:
            StoreError: a file cannot be deleted; those after it are still there.
        """
        self._check()
        doomed = [number for number in segment_numbers(self._path) if number < min(segment, self._segment)]
        try:
            for number in doomed:
                segment_path(self._path, number).unlink()
            if doomed:
                sync_folder(self._path)
        except OSError as error:
            raise StoreError(f"cannot delete old segments of {self._path}: {error.strerror}") from error

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not yet synced."""
        return self._pending_bytes + self._written - self._synced

    def _failed(self, error: OSError, what: str) -> StoreError:
        if error.errno in NO_SPACE:
            free = "free some space and go on: nothing that was acknowledged is lost"
            return StoreFull(f"{self._path}: {error.strerror} ({what}); {free}")
        return self._poison(error, what)

    def _poison(self, error: OSError, what: str) -> StoreError:
        self._failure = f"{self._path}: {what} failed: {error.strerror}; open it anew, do not retry"
        return StoreError(self._failure)

    def _check(self) -> None:
        if self._failure:
            raise StoreError(self._failure)

    def close(self) -> None:
        """Syncs and lets go of the log, which it does even where the sync fails. Calling it twice is harmless."""
        try:
            if not self._failure:
                self.sync()
        finally:
            self._failure = self._failure or f"{self._path} is closed"
            self._release()

    def _close_segment(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _release(self) -> None:
        self._close_segment()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class LogReader:
    """Reads a log by mmap and follows it while another process writes. Obtain it with `open`.

    Attributes:
        damaged: what `refresh` found so far that holds no whole record. A record that is still being appended is not
            damage, and neither is an append that a crash cut short at the log's end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.damaged: list[Damage] = []
        self._fd = -1
        self._scan: SegmentScan | None = None
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()

    @classmethod
    def open(cls, path: Path) -> Self:
        """A reader that stands at the log's beginning.

        Raises:
            StoreError: there is no log at `path`.
            StoreVersion: another format version wrote it.
        """
        numbers = segment_numbers(path)
        if not numbers:
            raise StoreError(f"{path} is no store: it has no segment (*{SUFFIX})")
        reader = cls(path)
        reader._enter(numbers[0])
        return reader

    def refresh(self) -> list[RecordRef]:
        """The records that appeared since the last call, in order, each whole and its checksum right. Never waits.

        Raises:
            StoreVersion: a segment in another format version.
            StoreError: a file cannot be read.
        """
        found: list[RecordRef] = []
        try:
            while self._scan is not None:
                # Listed before the scan: if there is a later segment now, the writer is done with this one.
                later = [number for number in segment_numbers(self._path) if number > self._scan.segment]
                self._collect(self._scan, found)
                if not later:
                    break
                self._report_rest(self._scan)
                self._enter(later[0])
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {error.strerror}") from error
        return found

    def _collect(self, scan: SegmentScan, found: list[RecordRef]) -> None:
        for item in scan:
            if isinstance(item, Damage):
                self._report(item)
            else:
                found.append(item)

    def _report_rest(self, scan: SegmentScan) -> None:
        size = os.fstat(self._fd).st_size
        if size > scan.end:
            self._report(Damage(scan.segment, scan.end, size - scan.end, "no whole record up to the segment's end"))

    def _report(self, damage: Damage) -> None:
        _logger.warning("store.damaged path=%s %s", self._path, damage)
        self.damaged.append(damage)

    def _enter(self, number: int) -> None:
        sequence = self._scan.sequence if self._scan else 0
        self._close_scan()
        self._fd = os.open(segment_path(self._path, number), os.O_RDONLY | os.O_CLOEXEC)
        header = read_header(self._fd, number)
        if header is None:
            self._report(Damage(number, 0, SEGMENT_HEADER_BYTES, "segment header"))
        self._scan = SegmentScan(self._fd, number, sequence=max(sequence, header.first_sequence if header else 0))

    def read(self, ref: RecordRef) -> memoryview:
        """The payload, read-only and without a copy; its checksum is verified at each call.

        It stays valid for as long as it is referenced, also when the reader is closed or the segment deleted.

        Raises:
            StoreCorrupt: the bytes are no longer what was appended.
            StoreError: the segment is gone, or the reference lies outside it.
        """
        end = ref.offset + RECORD_HEADER_BYTES + ref.length
        view = memoryview(self._map(ref.segment, end)).toreadonly()
        header = view[ref.offset : ref.offset + RECORD_HEADER_BYTES]
        payload = view[ref.offset + RECORD_HEADER_BYTES : end]
        found = decode_record_header(header, ref.segment, ref.offset)
        if found is None or found[0].length != ref.length or crc32c(payload) != found[1]:
            raise StoreCorrupt(f"{segment_path(self._path, ref.segment)}: the record at {ref.offset} is damaged")
        return payload

    def _map(self, segment: int, end: int) -> mmap.mmap:
        mapped = self._maps.get(segment)
        if mapped is None or len(mapped) < end:
            mapped = self._maps[segment] = self._new_map(segment, end)
        self._maps.move_to_end(segment)
        if len(self._maps) > MAX_MAPPED_SEGMENTS:
            self._maps.popitem(last=False)  # unmapped once the last view of it is gone
        return mapped

    def _new_map(self, segment: int, end: int) -> mmap.mmap:
        try:
            with segment_path(self._path, segment).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < end:
                    raise StoreCorrupt(f"{file.name} ends at {size}; a record should reach to {end}")
                return mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        except OSError as error:
            raise StoreError(f"cannot read segment {segment} of {self._path}: {error.strerror}") from error

    def _close_scan(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Lets go of the files; views that were handed out stay valid. Calling it twice is harmless."""
        self._close_scan()
        self._scan = None
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
