"""Recovery: what a writer does before it appends to a log that an earlier writer left, killed or not."""

from __future__ import annotations

import logging
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from user_sys.errors import StoreCorrupt
from user_sys.store import manifest
from user_sys.store.files import WRITE_BYTES, Files, write_all
from user_sys.store.index_block import IndexBlockBuilder
from user_sys.store.manifest import LogManifest, SegmentEntry
from user_sys.store.record_format import (
    MAX_SEGMENT_BYTES,
    RECORD_HEADER_BYTES,
    TEMPORARY_SUFFIX,
    Damage,
    SegmentHeader,
    SegmentName,
    SegmentScan,
    align_up,
    list_segments,
    read_segment_header,
    read_sound_footer,
    record_table,
    refs_of,
    resolve_generations,
)
from user_sys.store.segment_writer import OpenSegment

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RecoveredLog:
    """State of a log after recovery.

    Attributes:
        active: the last segment, open, which takes the next record; None if a new one must be created.
        unsealed: open segments to be sealed.
        next_sequence: number of the next record.
        next_number: number of the segment to create.
        last_segment_end: end of the records in the segment before that one; 0 if unknown.
    """

    manifest: LogManifest
    active: OpenSegment | None = None
    unsealed: list[OpenSegment] = field(default_factory=list)
    next_sequence: int = 0
    next_number: int = 0
    last_segment_end: int = 0


def recover_log(files: Files, path: Path, fresh: LogManifest) -> RecoveredLog:
    """Recovers the log at `path`, which the caller has locked; returns `fresh` if there is none.

    Afterwards all that readers can see is durable. A kill during recovery leaves a log that the next call recovers.

    Raises:
        StoreVersionMismatch: it has another format version.
        OSError: it cannot be read or written; no file stays open.
    """
    recovery = _Recovery(files, path, fresh)
    try:
        recovery.run(fresh)
    except BaseException:
        for fd in recovery.opened:
            files.close(fd)
        raise
    return recovery.found


class _Recovery:
    def __init__(self, files: Files, path: Path, fresh: LogManifest) -> None:
        self._files, self._path = files, path
        self.found, self.opened = RecoveredLog(fresh), list[int]()

    def run(self, fresh: LogManifest) -> None:
        """Finds the end of the log and syncs all that a killed writer had written and readers have seen."""
        found = self.found
        names = self._remove_leftovers(list_segments(self._path, self._files))
        if names:
            self._take_segments(names)
        if names or found.manifest is not fresh:
            found.next_number = max([found.manifest.last_number + 1, *(name.stop for name in names[-1:])])

    def _remove_leftovers(self, names: list[SegmentName]) -> list[SegmentName]:
        """Loads or rebuilds the manifest, deletes leftovers of a crash, and returns the current files."""
        try:
            loaded = manifest.load(self._files, self._path)
        except StoreCorrupt as error:
            _logger.warning("store.manifest_damaged path=%s: %s", self._path, error)
            loaded = None
        if loaded is None and names:
            loaded = manifest.rebuild(self._files, self._path, resolve_generations(names)[0])
        self.found.manifest = loaded or self.found.manifest
        chosen, leftovers = resolve_generations(names)
        # A killed process may have renamed a file without a sync. Sync now, because the replaced file is deleted below,
        # and later syncs acknowledge records by the file and not by its name.
        self._files.sync_folder(self._path)
        folder = self._files.listdir(self._path)
        unused = [name for name in folder if name.endswith(TEMPORARY_SUFFIX)]
        for leftover in [*map(str, leftovers), *unused]:
            self._files.unlink(self._path / leftover)
        return chosen

    def _take_segments(self, names: list[SegmentName]) -> None:
        """Lists sealed segments and scans the others. The last segment stays open if it can take records."""
        found = self.found
        listed = {entry.name for entry in found.manifest.segments}
        for name in names:
            if name not in listed and (entry := self._unlisted_entry(name)) is not None:
                found.manifest = found.manifest.with_entry(entry)
        sealed = {entry.name: entry.next_sequence for entry in found.manifest.segments}
        found.next_sequence = max(sealed.values(), default=0)
        for name, following in zip(names, names[1:], strict=False):
            if name not in sealed:
                with self._files.opened(self._path / str(following)) as fd:
                    header = read_segment_header(self._files, fd)
                self._scan(name, header.previous_bytes if header else 0)
        if names[-1] not in sealed:
            self._open_last(names[-1])
        if found.manifest.last_number >= names[-1].stop:
            _logger.warning("store.last_segment_missing path=%s segment=%d", self._path, found.manifest.last_number)
            self._skip_numbers()

    def _skip_numbers(self) -> None:
        """Skips all sequence numbers that an unreadable segment may have used."""
        self.found.next_sequence += MAX_SEGMENT_BYTES // RECORD_HEADER_BYTES

    def _unlisted_entry(self, name: SegmentName) -> SegmentEntry | None:
        """The entry of a segment that is sealed and not listed; None if it is not sealed."""
        with self._files.opened(self._path / str(name), os.O_RDWR) as fd:
            footer = read_sound_footer(self._files, fd, name)
            if footer is None:
                return None
            self._files.fsync(fd)  # its writer may have been killed before that sync
            return SegmentEntry.of(name, footer)

    def _open(self, name: SegmentName) -> tuple[int, SegmentHeader | None] | None:
        """A descriptor and the header; None for the file of another segment or log, which must not be changed."""
        fd = self._files.open(self._path / str(name), os.O_RDWR)
        self.opened.append(fd)
        header = read_segment_header(self._files, fd)
        if header is None or header.belongs_to(name, self.found.manifest.log_id):
            return fd, header
        _logger.warning("store.foreign_segment path=%s segment=%s: not changed", self._path, name)
        self.opened.remove(fd)
        self._files.close(fd)
        return None

    def _scan(self, name: SegmentName, records_end: int) -> None:
        """Scans a segment that has a successor and no footer, so that it gets sealed.

        Args:
            records_end: end of its records by the header of the next segment; 0 if unknown.
        """
        opened = self._open(name)
        if opened is None:
            return
        fd, header = opened
        first = header.first_sequence if header else 0
        scan = SegmentScan(self._files, fd, name.number, name.generation, sequence=first)
        scan.stop = records_end or scan.stop
        flat = self._records(scan)
        # Bytes after the last whole record may be a damaged record. They stay, and the index shows the gap.
        end = scan.end if scan.at_footer else max(scan.end, records_end or align_up(self._files.size(fd)))
        first = next(iter(flat[4::6]), first) if header is None else first  # the sequence number of the first record
        self._finished(name, fd, end, flat, range(first, scan.sequence))
        self.found.next_sequence = max(self.found.next_sequence, scan.sequence)

    def _open_last(self, name: SegmentName) -> None:
        """Opens the last segment at its end, after removing an unfinished append.

        The segment is left to be sealed if damage must stay in it, its header is damaged, or its successor is missing.
        """
        opened = self._open(name)
        if opened is None:
            self._skip_numbers()
            return
        fd, header = opened
        first = header.first_sequence if header else self.found.next_sequence
        scan = SegmentScan(self._files, fd, name.number, name.generation, sequence=first)
        flat = self._records(scan)
        whole = self._truncate_append(fd, scan)
        # Kept bytes may hold records; their sequence numbers are not reused.
        lost = 0 if whole else (self._files.size(fd) - scan.end) // RECORD_HEADER_BYTES
        self.found.next_sequence = max(self.found.next_sequence, scan.sequence + lost)
        # After a failed sync the kernel may hold pages that are not on the disk and that no later sync writes.
        # Write them again.
        for offset in range(0, self._files.size(fd), WRITE_BYTES):
            write_all(self._files, fd, [self._files.pread(fd, WRITE_BYTES, offset)], offset)
        self._files.fsync(fd)
        end = align_up(self._files.size(fd))
        self._finished(name, fd, end, flat, range(first, self.found.next_sequence))
        self.found.last_segment_end = end
        if whole and header is not None and self.found.manifest.last_number < name.stop:
            self.found.active = self.found.unsealed.pop()

    def _records(self, scan: SegmentScan) -> array[int]:
        flat = array("q")
        for item in scan:
            if isinstance(item, Damage):
                _logger.warning("store.damaged path=%s %s", self._path, item)
            else:
                flat.extend(item)
        return flat

    def _finished(self, name: SegmentName, fd: int, end: int, flat: array[int], sequences: range) -> None:
        summary = IndexBlockBuilder()
        for ref in refs_of(record_table(flat)):
            summary.add(ref, self._files.pread(fd, ref.length, ref.offset + RECORD_HEADER_BYTES))
        self.found.unsealed.append(OpenSegment.durable(name, fd, end, flat, sequences, summary))

    def _truncate_append(self, fd: int, scan: SegmentScan) -> bool:
        """Truncates an unfinished append. Returns False if the bytes after the last record may be more than that."""
        size = self._files.size(fd)
        if size <= scan.end:
            return True
        self._files.pread(fd, size - scan.end, scan.end)  # raises OSError: bytes that cannot be read may be a record
        place = f"path={self._path} segment={scan.number} offset={scan.end} bytes={size - scan.end}"
        if not scan.is_unfinished():
            _logger.warning("store.damaged %s: kept", place)
            return False
        _logger.warning("store.truncated %s", place)
        self._files.ftruncate(fd, scan.end)
        return True
