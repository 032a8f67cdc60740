"""The segment files that a reader has open: the ones used last, mapped and by descriptor.

The log's reader: follows the log while another process writes, rotates, seals, compacts and drops.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from crc32c import crc32c

from user_sys.errors import StoreCorrupt, StoreError, StoreRecordGone
from user_sys.store import manifest
from user_sys.store.files import OS_FILES, Files
from user_sys.store.manifest import LogManifest
from user_sys.store.record_format import (
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
    read_footer_copy,
    read_segment_header,
    resolve_generations,
)

MAX_OPEN_SEGMENTS = 64  # each holds two file descriptors, one of them for its mapping


class SegmentFile:
    """A segment's file: its bytes as a mapping, and a descriptor that is closed with the last reference to this."""

    def __init__(self, files: Files, fd: int, view: memoryview) -> None:
        self.fd, self.view = fd, view
        weakref.finalize(self, files.close, fd)


class SegmentFileCache:
    """At most `MAX_OPEN_SEGMENTS` of a log's files. Any thread may call it."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path, self._files = path, files
        self._lock = threading.Lock()
        self._opened: OrderedDict[SegmentName, SegmentFile] = OrderedDict()

    def get(self, name: SegmentName, end: int) -> SegmentFile:
        """The segment's file, of which at least the bytes up to `end` are mapped.

        Raises:
            StoreCorrupt: it is shorter than that.
            OSError: it cannot be opened.
        """
        with self._lock:
            opened = self._opened.get(name)
            if opened is None or len(opened.view) < end:
                opened = self._opened[name] = self._map(name, end)
            self._opened.move_to_end(name)
            if len(self._opened) > MAX_OPEN_SEGMENTS:
                self._opened.popitem(last=False)  # unmapped once the last view of it is gone
            return opened

    def _map(self, name: SegmentName, end: int) -> SegmentFile:
        fd = self._files.open(self._path / str(name), os.O_RDONLY)
        try:
            size = self._files.size(fd)
            if size < end:
                raise StoreCorrupt(f"{self._path / str(name)} is cut off at byte {size}")
            return SegmentFile(self._files, fd, self._files.map(fd, size))
        except BaseException:
            self._files.close(fd)
            raise

    def clear(self) -> None:
        """Lets go of all of them; what was handed out stays valid."""
        with self._lock:
            self._opened.clear()


ATTEMPTS = 8  # the writer may replace or delete files between a look at the folder and a look into them

_NONE: Column = np.empty(0, np.int64)
_logger = logging.getLogger(__name__)
Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class RecordBatch:
    """What `refresh` found new in one segment.

    Attributes:
        records: those not reported before, ascending.
        summary: what the segment's owner wrote of all its records when it was sealed; None where `records` are not all
            that it holds or it is not sealed.
        dropped: sequence numbers, ascending, of records that were reported before and are there no more.
    """

    segment: int
    records: RecordTable
    summary: bytes | None = None
    dropped: Column = field(default_factory=lambda: _NONE)


@dataclass(eq=False)
class _FollowedSegment:
    """What was reported of one file, and where its scan stands. `scan` is None once nothing more can come."""

    name: SegmentName
    parts: list[RecordTable] = field(default_factory=list)
    scan: SegmentScan | None = None
    fd: int = -1

    def sequences(self) -> Column:
        return np.concatenate([part.sequence for part in self.parts]) if self.parts else _NONE


@dataclass(frozen=True, eq=False)
class _SegmentLocation:
    """The file in which a segment's records are by now, and their index where compaction has moved them."""

    name: SegmentName
    records: RecordTable | None = None

    def offset(self, ref: RecordRef) -> int | None:
        """Where the record is; None where it was dropped."""
        if self.records is None:
            return ref.offset
        moved = self.records.find(ref.sequence)
        return None if moved is None else moved.offset


class LogReader:
    """Reads a log by mmap and follows it while another process writes. Obtain it with `open`.

    `read`, `read_range` and `read_into` may be called by any number of threads, `refresh` by one at a time.

    Attributes:
        damaged: what `refresh` found so far that is not what was written, and is not quarantined. A record that is
            still being appended is not damage, and neither is an append that a crash cut short at the log's end.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self._path, self._files = path, files
        self.damaged: list[Damage] = []
        self._chosen: list[SegmentName] = []
        self._known: dict[int, _FollowedSegment] = {}
        self._manifest: LogManifest | None = None
        self._log_id = b""
        self._sequence = 0
        self._lock = threading.Lock()
        self._places: dict[int, _SegmentLocation] = {}
        self._opened = SegmentFileCache(path, files)

    def quarantined_ranges(self, segment: int) -> list[range]:
        """The byte ranges of a segment's file that a repair has set aside."""
        known, manifest_ = self._known.get(segment), self._manifest
        if known is None or manifest_ is None:
            return []
        place = (known.name.number, known.name.generation)
        ranges = (each for each in manifest_.quarantined if (each.number, each.generation) == place)
        return [range(each.offset, each.offset + each.length) for each in ranges]

    @classmethod
    def open(cls, path: Path, *, files: Files = OS_FILES) -> Self:
        """A reader that stands at the log's beginning.

        Raises:
            StoreError: there is no log at `path`.
            StoreVersion: another format version wrote it.
        """
        names = resolve_generations(list_segments(path, files))[0]
        if not names:
            raise StoreError(f"{path} is no store: it has no segment (*{SEGMENT_SUFFIX})")
        reader = cls(path, files)
        try:
            reader._header(names[-1])
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        return reader

    # Following

    def refresh(self) -> list[RecordBatch]:
        """What appeared since the last call, and what was dropped, in order. Never waits.

        Of a sealed segment that is seen for the first time, the footer is read and nothing else; records of others are
        whole and their checksums right.

        Raises:
            StoreVersion: a segment in another format version.
            StoreError: a file cannot be read.
        """
        found: list[RecordBatch] = []
        try:
            for _ in range(ATTEMPTS):
                try:
                    self._follow(found)
                    return found
                except FileNotFoundError as error:
                    self._chosen, gone = [], error
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {error.strerror}") from error
        raise StoreError(f"{self._path} changes too fast to be read: {gone.filename} is gone")

    def records(self) -> list[RecordRef]:
        """The records of `refresh`, one by one, for logs that are small. Raises as `refresh`."""
        return [ref for batch in self.refresh() for ref in batch.records]

    def _follow(self, found: list[RecordBatch]) -> None:
        chosen = self._look()
        if chosen != self._chosen:
            self._report_missing(chosen)
            self._forget_vanished(chosen, found)
            todo = chosen
        else:
            todo = chosen[-1:]
        for name, following in zip(todo, [*todo[1:], None], strict=True):
            known = self._known.get(name.number)
            if known is None or known.name != name:
                self._enter(name, found)
            self._go_on(self._known[name.number], following, found)
        self._chosen = chosen

    def _look(self) -> list[SegmentName]:
        """The files that count now. Where they have changed, the manifest is read again, until both fit together."""
        chosen: list[SegmentName] = []
        for _ in range(ATTEMPTS):
            first = self._manifest.first_number if self._manifest else 0
            chosen = resolve_generations(
                name for name in list_segments(self._path, self._files) if name.number >= first
            )[0]
            if chosen == self._chosen:
                return chosen
            before, self._manifest = self._manifest, self._load_manifest()
            if self._manifest == before:
                return chosen
        return chosen

    def _load_manifest(self) -> LogManifest | None:
        try:
            return manifest.load(self._files, self._path)
        except StoreCorrupt as error:
            self._report(Damage(-1, 0, 0, str(error)))
            return None

    def _report_missing(self, chosen: list[SegmentName]) -> None:
        if self._manifest is None:
            return
        covered = {number for name in chosen for number in range(name.number, name.stop)}
        for number in range(self._manifest.first_number, self._manifest.last_number + 1):
            if number not in covered:
                self._report(Damage(number, 0, 0, "the segment's file is missing"))

    def _forget_vanished(self, chosen: list[SegmentName], found: list[RecordBatch]) -> None:
        """Reports the records of segments that are there no more, and not in the file of another either."""
        covered = {number for name in chosen for number in range(name.number, name.stop)}
        for number in [number for number in self._known if number not in covered]:
            known = self._known.pop(number)
            self._close(known)
            with self._lock:
                self._places.pop(number, None)
            if known.parts:
                found.append(RecordBatch(number, RecordTable.of(number, []), dropped=known.sequences()))

    def _enter(self, name: SegmentName, found: list[RecordBatch]) -> None:
        """Begins with a file that was not seen before, or that has taken the place of others."""
        fd = self._files.open(self._path / str(name), os.O_RDONLY)
        known = _FollowedSegment(name, fd=fd)
        try:
            if self._belongs(header := read_segment_header(self._files, fd), name):
                footer = self._footer(fd, name) or (self._scanned(fd, name) if name.generation else None)
                if footer is None:
                    first = max(self._sequence, header.first_sequence) if header else self._sequence
                    known.scan = SegmentScan(self._files, fd, name.number, name.generation, sequence=first)
                else:
                    self._take_footer(known, footer, found)
        finally:
            if known.scan is None:
                self._close(known)
        self._settle(known)

    def _settle(self, known: _FollowedSegment) -> None:
        name = known.name
        for number in range(name.number, name.stop):
            old = self._known.pop(number, None)
            if old is not None:
                self._close(old)
            self._known[number] = known
        records = known.parts[0] if name.generation and known.parts else None
        with self._lock:
            self._places.update({number: _SegmentLocation(name, records) for number in range(name.number, name.stop)})

    def _belongs(self, header: SegmentHeader | None, name: SegmentName) -> bool:
        whole = Damage(name.number, 0, SEGMENT_HEADER_BYTES, "the segment's header is damaged", -1, name.generation)
        if header is None:
            self._report(whole)
            return True
        self._log_id = self._manifest.log_id if self._manifest else (self._log_id or header.log_id)
        if header.belongs_to(name, self._log_id):
            return True
        other = "another log" if header.log_id != self._log_id else f"segment {header.number}"
        self._report(Damage(name.number, 0, 0, f"the file is that of {other}", -1, name.generation))
        return False

    def _footer(self, fd: int, name: SegmentName) -> Footer | None:
        try:
            footer = read_footer(self._files, fd, name)
            reason = "it is sealed and has no trailer"
        except StoreCorrupt as error:
            footer, reason = None, str(error)
        if footer is not None:
            return footer
        copy = read_footer_copy(self._files, self._path, name)
        if copy is not None and self._sealed_meanwhile(fd, name):
            return copy
        if copy is not None or self._is_listed(name):
            size = self._files.size(fd)
            self._report(Damage(name.number, size, 0, f"the footer: {reason}", -1, name.generation))
        return copy

    def _sealed_meanwhile(self, fd: int, name: SegmentName) -> bool:
        """Whether the file has the footer that it lacked a moment ago: the writer writes the copy after it."""
        try:
            return read_footer(self._files, fd, name) is not None
        except StoreCorrupt:
            return False

    def _scanned(self, fd: int, name: SegmentName) -> Footer:
        """What stands in for the damaged footer of a rewritten segment."""
        scan = SegmentScan(self._files, fd, name.number, name.generation)
        found = list(scan)
        for damage in found:
            if isinstance(damage, Damage):
                self._report(damage)
        records = RecordTable.of(name.number, (ref for ref in found if isinstance(ref, RecordRef)))
        return Footer(records, None, scan.end, 0, scan.sequence, self._files.size(fd))

    def _is_listed(self, name: SegmentName) -> bool:
        return self._manifest is not None and any(entry.name == name for entry in self._manifest.segments)

    def _take_footer(self, known: _FollowedSegment, footer: Footer, found: list[RecordBatch]) -> None:
        """Reports what a sealed segment holds that was not reported, and what it no longer holds."""
        name = known.name
        for damage in footer.gaps(name) if footer.summary is not None else ():
            self._report(damage)
        replaced = {id(old): old for number in range(name.number, name.stop) if (old := self._known.get(number))}
        before = np.concatenate([_NONE, *(old.sequences() for old in replaced.values())])
        known.parts = [footer.records]
        self._sequence = max(self._sequence, footer.next_sequence)
        if not len(before):
            found.append(RecordBatch(name.number, footer.records, footer.summary))
            return
        fresh = footer.records.select(~np.isin(footer.records.sequence, before, assume_unique=True))
        dropped = np.setdiff1d(before, footer.records.sequence, assume_unique=True)
        if len(fresh) or len(dropped):
            found.append(RecordBatch(name.number, fresh, dropped=dropped))

    def _go_on(self, known: _FollowedSegment, following: SegmentName | None, found: list[RecordBatch]) -> None:
        """Scans what was appended to a segment; with a successor the writer is done with it."""
        scan = known.scan
        if scan is None:
            return
        if following is not None:
            header = self._header(following)
            scan.stop = header.previous_bytes if header and header.previous_bytes else scan.stop
        refs = []
        for item in scan:
            if isinstance(item, Damage):
                self._report(item)
            else:
                refs.append(item)
        self._sequence = max(self._sequence, scan.sequence)
        if refs:
            records = RecordTable.of(known.name.number, refs)
            known.parts.append(records)
            found.append(RecordBatch(known.name.number, records))
        if following is not None:
            self._report_rest(known, scan)
            known.scan = None
            self._close(known)

    def _header(self, name: SegmentName) -> SegmentHeader | None:
        fd = self._files.open(self._path / str(name), os.O_RDONLY)
        try:
            return read_segment_header(self._files, fd)
        finally:
            self._files.close(fd)

    def _report_rest(self, known: _FollowedSegment, scan: SegmentScan) -> None:
        stop = scan.stop if scan.stop < sys.maxsize else self._files.size(known.fd)
        if stop > scan.end and not scan.at_footer:
            self._report(scan.damage(stop, "no whole record up to the segment's end"))

    def _report(self, damage: Damage) -> None:
        quarantined = self._manifest.quarantined if self._manifest else ()
        if damage in self.damaged or any(range_.covers(damage) for range_ in quarantined):
            return
        _logger.warning("store.damaged path=%s %s", self._path, damage)
        self.damaged.append(damage)

    # Reading

    def read(self, ref: RecordRef) -> memoryview:
        """The payload, read-only and without a copy; its checksum is verified at each call.

        It stays valid for as long as it is referenced, also when the reader is closed or the segment deleted. A record
        that compaction has moved is found by its sequence number.

        Raises:
            StoreGone: the record was dropped, or its segment's file is gone.
            StoreCorrupt: the bytes are no longer what was appended.
            StoreError: the file cannot be read.
        """
        payload, expected, file = self._locate(ref, self._payload)
        if crc32c(payload) != expected:
            raise StoreCorrupt(f"{file}: the payload of record {ref.sequence} (found at {ref.offset}) is damaged")
        return payload

    def read_range(self, ref: RecordRef, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop` of the payload, as `read` but unverified: for payloads with checksums of their own.

        Raises:
            StoreError: the range lies outside the payload. Else as `read`.
        """
        if not 0 <= start <= stop <= ref.length:
            raise StoreError(f"bytes {start} to {stop} of a record of {ref.length}")
        return self._locate(ref, self._bytes)[start:stop]

    def read_into(self, ref: RecordRef, start: int, out: Sequence[memoryview], *, wait: bool = True) -> bool:
        """Fills the buffers, at most `MAX_BUFFERS`, one after the other with the payload's bytes from `start` on.

        As `read_range`, but by one read of the file: the disk is asked for all of it at once, and no page faults.

        Args:
            wait: for the disk. Else False where it would have to; the disk begins to read then.

        Raises:
            StoreError: as `read_range`.
        """
        size = sum(map(len, out))
        if not 0 <= start <= start + size <= ref.length:
            raise StoreError(f"bytes {start} to {start + size} of a record of {ref.length}")
        return self._locate(ref, partial(self._fill, start=start, size=size, out=out, wait=wait))

    def _locate(self, ref: RecordRef, take: Callable[[SegmentName, RecordRef, int], Found]) -> Found:
        """What `take` makes of a record and the offset at which it is now."""
        error: StoreError | None = None
        for look in (self._places.get, self._relocate):
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
                raise StoreError(f"cannot read segment {ref.segment} of {self._path}: {failed.strerror}") from failed
        gone = f"{self._path}: record {ref.sequence} was dropped, or segment {ref.segment} is gone"
        raise error or StoreRecordGone(gone)

    def _bytes(self, name: SegmentName, ref: RecordRef, offset: int) -> memoryview:
        """A record's payload; not even its header is looked at, which may lie on a page that nobody needs."""
        start = offset + RECORD_HEADER_BYTES
        return self._opened.get(name, start + ref.length).view[start : start + ref.length]

    def _fill(
        self,
        name: SegmentName,
        ref: RecordRef,
        offset: int,
        *,
        start: int,
        size: int,
        out: Sequence[memoryview],
        wait: bool,
    ) -> bool:
        at = offset + RECORD_HEADER_BYTES + start
        opened = self._opened.get(name, at + size)  # held until the read is done, or its descriptor might be closed
        if not wait:
            return self._files.pread_cached(opened.fd, out, at)
        if self._files.pread_into(opened.fd, out, at) < size:
            raise StoreCorrupt(f"{self._path / str(name)} ends within record {ref.sequence}")
        return True

    def _payload(self, name: SegmentName, ref: RecordRef, offset: int) -> tuple[memoryview, int, str]:
        """A record's payload, unverified, the CRC that its header gives, and the file's name."""
        start = offset + RECORD_HEADER_BYTES
        view = self._opened.get(name, start + ref.length).view
        found = decode_record_header(view[offset:start], name.number, name.generation, offset)
        if found is None or found[0].length != ref.length or found[0].sequence != ref.sequence:
            raise StoreCorrupt(f"{self._path / str(name)}: the header of record {ref.sequence} at {offset} is damaged")
        return view[start : start + ref.length], found[1], str(name)

    def _relocate(self, segment: int) -> _SegmentLocation | None:
        """Looks at the folder again for the file in which the records of `segment` are now."""
        for _ in range(ATTEMPTS):
            chosen = resolve_generations(list_segments(self._path, self._files))[0]
            name = next((name for name in chosen if name.number <= segment < name.stop), None)
            if name is None:
                return None
            try:
                place = _SegmentLocation(name, self._index(name) if name.generation else None)
            except FileNotFoundError:
                continue
            with self._lock:
                self._places.update(dict.fromkeys(range(name.number, name.stop), place))
            return place
        return None

    def _index(self, name: SegmentName) -> RecordTable:
        fd = self._files.open(self._path / str(name), os.O_RDONLY)
        try:
            return (manifest.read_footer_or_copy(self._files, self._path, fd, name) or self._scanned(fd, name)).records
        finally:
            self._files.close(fd)

    # The end

    def _close(self, known: _FollowedSegment) -> None:
        fd, known.fd = known.fd, -1
        if fd >= 0:
            self._files.close(fd)

    def close(self) -> None:
        """Lets go of the files; views that were handed out stay valid. Calling it twice is harmless."""
        for known in self._known.values():
            self._close(known)
            known.scan = None
        self._opened.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
