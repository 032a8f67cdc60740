"""Reader of a log: follows it while another process appends, rotates, seals, compacts and drops."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import numpy as np
from crc32c import crc32c

from hal.context import ClosedAtExit
from user_sys.errors import StoreCorrupt, StoreError, StoreRecordGone
from user_sys.store import manifest
from user_sys.store.files import OS_FILES, Files
from user_sys.store.manifest import LogManifest
from user_sys.store.record_format import (
    RECORD_DTYPE,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    SEGMENT_SUFFIX,
    Column,
    Damage,
    Footer,
    RecordRef,
    RecordTable,
    SegmentHeader,
    SegmentName,
    SegmentScan,
    decode_record_header,
    list_segments,
    read_footer,
    read_segment_header,
    read_sound_footer,
    refs_of,
    resolve_generations,
)

MAX_OPEN_SEGMENTS = 64
TICK_S = 0.1  # a file system's clock advances more often
LIST_S = 1.0  # a folder is listed at least so often: its time may be cached or coarse, or its clock be set back
ATTEMPTS = 8  # the writer may replace or delete files between listing and opening
Result = TypeVar("Result")
_NO_SEQUENCES: Column = np.empty(0, np.int64)
_logger = logging.getLogger(__name__)


class SegmentFile:
    """The descriptor of a segment's file, which is closed with the last reference to this object."""

    def __init__(self, files: Files, path: Path) -> None:
        self.fd = files.open(path, os.O_RDONLY)
        weakref.finalize(self, files.close, self.fd)


class SegmentFileCache:
    """The last `MAX_OPEN_SEGMENTS` used files of a log. Thread-safe."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path, self._files = path, files
        self._lock = threading.Lock()
        self._opened: OrderedDict[SegmentName, SegmentFile] = OrderedDict()

    def read(self, name: SegmentName, offset: int, count: int) -> bytes:
        """`count` bytes of the segment's file.

        Raises:
            StoreCorrupt: it is shorter than that, or the disk cannot read this part (EIO).
            OSError: it cannot be opened or read.
        """
        with self._lock:
            opened = self._opened.get(name) or SegmentFile(self._files, self._path / str(name))
            self._opened[name] = opened
            self._opened.move_to_end(name)
            if len(self._opened) > MAX_OPEN_SEGMENTS:
                self._opened.popitem(last=False)
        try:
            found = self._files.pread(opened.fd, count, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise StoreCorrupt(
                f"{self._path / str(name)}: {count} bytes at {offset} cannot be read: {error.strerror}"
            ) from None
        if len(found) < count:
            raise StoreCorrupt(f"{self._path / str(name)} ends at byte {offset + len(found)}")
        return found

    def clear(self) -> None:
        """Closes the files after the reads in progress."""
        with self._lock:
            self._opened.clear()


@dataclass(frozen=True, eq=False)
class RecordBatch:
    """New records of one segment since the previous `refresh`.

    Attributes:
        records: those not reported before, ascending.
        summary: the owner's summary of the sealed segment; None if it is not sealed or `records` are only a part of it.
        dropped: ascending sequence numbers of reported records that no longer exist.
    """

    segment: int
    records: RecordTable
    summary: bytes | None = None
    dropped: Column = field(default_factory=lambda: _NO_SEQUENCES)


@dataclass(eq=False)
class _FollowedSegment:
    """Reported records and scan position of one file.

    Attributes:
        reported: sequence numbers of the reported records. One array grows: thousands of small ones, which stay among
            the large short-lived arrays of a learner, would keep malloc from using the memory of these again.
        scan: None once no more records can come.
    """

    name: SegmentName
    reported: array[int] = field(default_factory=lambda: array("q"))
    scan: SegmentScan | None = None
    fd: int = -1

    def sequences(self) -> Column:
        return np.array(self.reported, np.int64)


@dataclass(frozen=True, eq=False)
class _SegmentLocation:
    """The current file of a segment's records, and their index if compaction moved them."""

    name: SegmentName
    records: RecordTable | None = None

    def offset(self, ref: RecordRef) -> int | None:
        """Offset of the record; None if it was dropped."""
        if self.records is None:
            return ref.offset
        at = int(np.searchsorted(self.records["sequence"], ref.sequence))
        is_kept = at < len(self.records) and self.records["sequence"][at] == ref.sequence
        return int(self.records["offset"][at]) if is_kept else None


class _Listing(NamedTuple):
    """When a folder was listed, its `Files.modified_ns` just before that, and since when it has had that.

    A name that changes at least `TICK_S` after `since_s`, and so after the listing, changes `modified_ns`.
    """

    at_s: float = 0.0
    modified_ns: int = -1
    since_s: float = 0.0

    def next(self, at_s: float, modified_ns: int) -> _Listing:
        """The listing of a folder that has that time now."""
        return _Listing(at_s, modified_ns, self.since_s if modified_ns == self.modified_ns else at_s)

    def is_current(self, now_s: float, modified_ns: int) -> bool:
        """Whether the folder has the same names now."""
        is_settled = self.at_s - self.since_s >= TICK_S
        return modified_ns == self.modified_ns and is_settled and now_s - self.at_s < LIST_S


class LogReader(ClosedAtExit):
    """Reads a log and follows it while another process writes. Create it with `open`.

    `read` and `read_range` are thread-safe; `refresh` is called by one thread at a time.

    Attributes:
        path: the log's folder.
        damaged: damage that `refresh` found and that is not quarantined. Appends in progress, and appends that a crash
            interrupted at the log's end, are not damage.
        log_id: see `SegmentHeader`; empty before the first `refresh`.
    """

    def __init__(self, path: Path, files: Files, clock: Callable[[], float]) -> None:
        self.path, self._files, self._clock = path, files, clock
        self.damaged: list[Damage] = []
        self._current: list[SegmentName] = []
        self._listing = _Listing()
        self._found: list[RecordBatch] = []  # not returned yet
        self._segments: dict[int, _FollowedSegment] = {}
        self._manifest: LogManifest | None = None
        self.log_id = b""
        self._sequence = 0
        self._lock = threading.Lock()
        self._locations: dict[int, _SegmentLocation] = {}
        self._opened = SegmentFileCache(path, files)

    def quarantined_ranges(self, segment: int) -> list[range]:
        """The byte ranges of a segment's file that a repair quarantined."""
        followed, manifest_ = self._segments.get(segment), self._manifest
        if followed is None or manifest_ is None:
            return []
        place = (followed.name.number, followed.name.generation)
        ranges = (each for each in manifest_.quarantined if (each.number, each.generation) == place)
        return [range(each.offset, each.offset + each.length) for each in ranges]

    @classmethod
    def open(cls, path: Path, *, files: Files = OS_FILES, clock: Callable[[], float] = time.monotonic) -> Self:
        """A reader at the start of the log.

        Raises:
            StoreError: there is no log at `path`, or it cannot be read.
            StoreVersionMismatch: it has another format version.
        """
        reader = cls(path, files, clock)
        try:
            names = resolve_generations(list_segments(path, files))[0]
            if not names:
                raise StoreError(f"{path} is not a store: it has no segment (*{SEGMENT_SUFFIX})")
            reader._header(names[-1])
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        return reader

    # Following

    def refresh(self) -> list[RecordBatch]:
        """New and dropped records since the last call, in order. Never blocks for a writer.

        Records of a new segment come at most `LIST_S` late, if the folder's time does not show it.
        For a sealed segment seen for the first time, only the footer is read. Records of other segments are whole and
        have valid checksums.

        Raises:
            StoreVersionMismatch: a segment has another format version.
            StoreError: a file cannot be read. The next call returns what this one has found.
        """
        try:
            for _ in range(ATTEMPTS):
                try:
                    self._follow(self._found)
                    found, self._found = self._found, []
                    return found
                except FileNotFoundError as error:
                    self._current, self._listing, missing = [], _Listing(), error
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror}") from error
        raise StoreError(f"{self.path} changes too fast to be read: {missing.filename} disappeared")

    def return_again(self, batches: Sequence[RecordBatch]) -> None:
        """The next `refresh` returns these batches of the last one again, first."""
        self._found[:0] = batches

    def records(self) -> list[RecordRef]:
        """The records of `refresh` as a list, for small logs. Raises as `refresh`."""
        return [ref for batch in self.refresh() for ref in refs_of(batch.records)]

    def _follow(self, found: list[RecordBatch]) -> None:
        now_s, modified_ns = self._clock(), self._files.modified_ns(self.path)
        listing, chosen = self._listing, self._current
        if not listing.is_current(now_s, modified_ns):
            listing, chosen = listing.next(now_s, modified_ns), self._list_current()
        if chosen != self._current:
            self._report_missing(chosen)
            self._report_dropped(chosen, found)
            todo = chosen
        else:
            todo = chosen[-1:]
        for name, following in zip(todo, [*todo[1:], None], strict=True):
            try:
                followed = self._segments.get(name.number)
                if followed is None or followed.name != name:
                    self._start_segment(name, found)
                self._scan_appended(self._segments[name.number], following, found)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise StoreError(f"cannot read {self.path / str(name)}: {error.strerror}") from error
        self._current, self._listing = chosen, listing

    def _list_current(self) -> list[SegmentName]:
        """The current files. If they changed, reloads the manifest until both are consistent."""
        chosen: list[SegmentName] = []
        for _ in range(ATTEMPTS):
            chosen = resolve_generations(list_segments(self.path, self._files))[0]
            if chosen == self._current:
                return chosen
            before, self._manifest = self._manifest, self._load_manifest()
            if self._manifest == before:
                return chosen
        return chosen

    def _load_manifest(self) -> LogManifest | None:
        try:
            return manifest.load(self._files, self.path)
        except StoreCorrupt as error:
            self._report(Damage(-1, 0, 0, str(error)))
            return None

    def _report_missing(self, chosen: list[SegmentName]) -> None:
        if self._manifest is None:
            return
        covered = {number for name in chosen for number in range(name.number, name.stop)}
        listed = {e.number: (e.first_sequence, e.next_sequence - 1) for e in self._manifest.segments}
        for number in range(self._manifest.first_number, self._manifest.last_number + 1):
            if number not in covered:
                first, last = listed.get(number, (-1, -1))
                self._report(Damage(number, 0, 0, "the segment's file is missing", first, last_sequence=last))

    def _report_dropped(self, chosen: list[SegmentName], found: list[RecordBatch]) -> None:
        """Reports dropped records of segments that are in no current file."""
        covered = {number for name in chosen for number in range(name.number, name.stop)}
        for number in [number for number in self._segments if number not in covered]:
            followed = self._segments.pop(number)
            self._close(followed)
            with self._lock:
                self._locations.pop(number, None)
            if followed.reported:
                found.append(RecordBatch(number, np.empty(0, RECORD_DTYPE), dropped=followed.sequences()))

    def _start_segment(self, name: SegmentName, found: list[RecordBatch]) -> None:
        """Starts following a new file or one that replaced others."""
        fd = self._files.open(self.path / str(name), os.O_RDONLY)
        followed, records = _FollowedSegment(name, fd=fd), None
        try:
            if self._check_header(header := read_segment_header(self._files, fd), name):
                footer = self._footer(fd, name) or (self._scan_as_footer(fd, name) if name.generation else None)
                if footer is None:
                    first = max(self._sequence, header.first_sequence) if header else self._sequence
                    followed.scan = SegmentScan(self._files, fd, name.number, name.generation, sequence=first)
                else:
                    self._take_footer(followed, footer, found)
                    records = footer.records if name.generation else None
        finally:
            if followed.scan is None:
                self._close(followed)
        self._register(followed, records)

    def _register(self, followed: _FollowedSegment, records: RecordTable | None) -> None:
        name = followed.name
        for number in range(name.number, name.stop):
            old = self._segments.pop(number, None)
            if old is not None:
                self._close(old)
            self._segments[number] = followed
        with self._lock:
            self._locations.update(
                {number: _SegmentLocation(name, records) for number in range(name.number, name.stop)}
            )

    def _check_header(self, header: SegmentHeader | None, name: SegmentName) -> bool:
        whole = Damage(name.number, 0, SEGMENT_HEADER_BYTES, "the segment's header is damaged", -1, name.generation)
        if header is None:
            self._report(whole)
            return True
        self.log_id = self._manifest.log_id if self._manifest else (self.log_id or header.log_id)
        if header.belongs_to(name, self.log_id):
            return True
        other = "another log" if header.log_id != self.log_id else f"segment {header.number}"
        self._report(Damage(name.number, 0, 0, f"the file belongs to {other}", -1, name.generation))
        return False

    def _footer(self, fd: int, name: SegmentName) -> Footer | None:
        try:
            footer = read_footer(self._files, fd, name)
            reason = "the sealed segment has no trailer"
        except StoreCorrupt as error:
            footer, reason = None, str(error)
        if footer is None and self._is_listed(name):
            size = self._files.size(fd)
            self._report(Damage(name.number, size, 0, f"the footer: {reason}", -1, name.generation))
        return footer

    def _scan_as_footer(self, fd: int, name: SegmentName) -> Footer:
        """A substitute for the damaged footer of a rewritten segment."""
        scan = SegmentScan(self._files, fd, name.number, name.generation)
        found = list(scan)
        for damage in found:
            if isinstance(damage, Damage):
                self._report(damage)
        records = np.array([ref for ref in found if isinstance(ref, RecordRef)], RECORD_DTYPE)
        return Footer(records, None, scan.end, 0, scan.sequence, self._files.size(fd))

    def _is_listed(self, name: SegmentName) -> bool:
        return self._manifest is not None and any(entry.name == name for entry in self._manifest.segments)

    def _take_footer(self, followed: _FollowedSegment, footer: Footer, found: list[RecordBatch]) -> None:
        """Reports new and dropped records of a sealed segment."""
        name = followed.name
        for damage in footer.gaps(name) if footer.summary is not None else ():
            self._report(damage)
        replaced = {id(old): old for number in range(name.number, name.stop) if (old := self._segments.get(number))}
        before = np.concatenate([_NO_SEQUENCES, *(old.sequences() for old in replaced.values())])
        followed.reported = array("q", footer.records["sequence"].tobytes())
        self._sequence = max(self._sequence, footer.next_sequence)
        if not len(before):
            found.append(RecordBatch(name.number, footer.records, footer.summary))
            return
        fresh = footer.records[~np.isin(footer.records["sequence"], before, assume_unique=True)]
        dropped = np.setdiff1d(before, footer.records["sequence"], assume_unique=True)
        if len(fresh) or len(dropped):
            found.append(RecordBatch(name.number, fresh, dropped=dropped))

    def _scan_appended(
        self, followed: _FollowedSegment, following: SegmentName | None, found: list[RecordBatch]
    ) -> None:
        """Scans records appended to a segment; a segment with a successor is complete."""
        scan = followed.scan
        if scan is None:
            return
        if following is not None:
            header = self._header(following)
            scan.stop = header.previous_bytes if header and header.previous_bytes else scan.stop
        refs = list[RecordRef]()
        try:
            for item in scan:
                if isinstance(item, Damage):
                    self._report(item)
                else:
                    refs.append(item)
        finally:  # the scan continues after an error
            self._sequence = max(self._sequence, scan.sequence)
            if refs:
                followed.reported.extend(ref.sequence for ref in refs)
                found.append(RecordBatch(followed.name.number, np.array(refs, RECORD_DTYPE)))
        if following is not None:
            self._report_unscanned(followed, scan)
            followed.scan = None
            self._close(followed)

    def _header(self, name: SegmentName) -> SegmentHeader | None:
        with self._files.opened(self.path / str(name)) as fd:
            return read_segment_header(self._files, fd)

    def _report_unscanned(self, followed: _FollowedSegment, scan: SegmentScan) -> None:
        stop = scan.stop if scan.stop < sys.maxsize else self._files.size(followed.fd)
        if stop > scan.end and not scan.at_footer:
            self._report(scan.damage(stop, "no whole record before the segment's end"))

    def _report(self, damage: Damage) -> None:
        if damage in self.damaged or (self._manifest and self._manifest.is_quarantined(damage)):
            return
        _logger.warning("store.damaged path=%s %s", self.path, damage)
        self.damaged.append(damage)

    # Reading

    def read(self, ref: RecordRef) -> memoryview:
        """The payload; each call verifies its checksum.

        A record that compaction moved is found by its sequence number.

        Raises:
            StoreRecordGone: the record was dropped, or its segment's file is missing.
            StoreCorrupt: the bytes changed, or the disk cannot read them.
            StoreError: the file cannot be read.
        """
        return self._locate(ref, self._verified)

    def read_range(self, ref: RecordRef, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of the payload, as `read` without verification, for payloads with own checksums.

        Raises:
            StoreError: the range exceeds the payload. Otherwise as `read`.
        """
        if not 0 <= start <= stop <= ref.length:
            raise StoreError(f"bytes {start} to {stop} of a record of {ref.length}")

        def take(name: SegmentName, ref: RecordRef, offset: int) -> bytes:
            return self._opened.read(name, offset + RECORD_HEADER_BYTES + start, stop - start)

        return self._locate(ref, take)

    def _locate(self, ref: RecordRef, take: Callable[[SegmentName, RecordRef, int], Result]) -> Result:
        """Calls `take` with the current file and offset of a record."""
        error: StoreError | None = None
        for look in (self._locations.get, self._relocate):
            place = look(ref.segment)
            offset = place.offset(ref) if place is not None else None
            error = None
            if place is None or offset is None:
                continue
            try:
                return take(place.name, ref, offset)
            except FileNotFoundError:
                continue
            except StoreCorrupt as damaged:
                error = damaged
            except OSError as failed:
                raise StoreError(f"cannot read segment {ref.segment} of {self.path}: {failed.strerror}") from failed
        reason = f"{self.path}: record {ref.sequence} was dropped, or segment {ref.segment} is missing"
        raise error or StoreRecordGone(reason)

    def _verified(self, name: SegmentName, ref: RecordRef, offset: int) -> memoryview:
        raw = memoryview(self._opened.read(name, offset, RECORD_HEADER_BYTES + ref.length))
        found = decode_record_header(raw[:RECORD_HEADER_BYTES], name.number, name.generation, offset)
        if found is None or found[0].length != ref.length or found[0].sequence != ref.sequence:
            raise StoreCorrupt(f"{self.path / str(name)}: the header of record {ref.sequence} at {offset} is damaged")
        if crc32c(raw[RECORD_HEADER_BYTES:]) != found[1]:
            raise StoreCorrupt(f"{self.path / str(name)}: the payload of record {ref.sequence} at {offset} is damaged")
        return raw[RECORD_HEADER_BYTES:]

    def _relocate(self, segment: int) -> _SegmentLocation | None:
        """Lists the folder again to find the current file of a segment's records."""
        for _ in range(ATTEMPTS):
            chosen = resolve_generations(list_segments(self.path, self._files))[0]
            name = next((name for name in chosen if name.number <= segment < name.stop), None)
            if name is None:
                return None
            try:
                place = _SegmentLocation(name, self._index(name) if name.generation else None)
            except FileNotFoundError:
                continue
            with self._lock:
                self._locations.update(dict.fromkeys(range(name.number, name.stop), place))
            return place
        return None

    def _index(self, name: SegmentName) -> RecordTable:
        with self._files.opened(self.path / str(name)) as fd:
            return (read_sound_footer(self._files, fd, name) or self._scan_as_footer(fd, name)).records

    # Closing

    def _close(self, followed: _FollowedSegment) -> None:
        fd, followed.fd = followed.fd, -1
        if fd >= 0:
            self._files.close(fd)

    def close(self) -> None:
        """Releases the files. Idempotent."""
        for followed in self._segments.values():
            self._close(followed)
            followed.scan = None
        self._opened.clear()
