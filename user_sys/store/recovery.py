"""What a writer does first: it finds the log's end, and removes what a crash left behind.

When it is done, all that a reader sees is durable. A kill in the middle of it leaves what the next one finds in turn.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from user_sys.errors import StoreCorrupt
from user_sys.store import manifest
from user_sys.store.files import Files
from user_sys.store.frame import MAX_SEGMENT_BYTES, RECORD_HEADER_BYTES, Damage, SegmentHeader, SegmentScan, aligned
from user_sys.store.manifest import Entry, Manifest, footer_or_none
from user_sys.store.sealing import Finished, find_finished
from user_sys.store.segments import (
    FOOTER_SUFFIX,
    SUFFIX,
    TEMPORARY,
    SegmentName,
    choose,
    list_segments,
    parse_name,
    read_header,
)

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Recovered:
    """Where a log stands.

    Attributes:
        tail: the last segment, open, which takes the next record; None where a new one must be created.
        finished: segments that wait to be sealed, open.
        sequence: the number that the next record gets.
        next_number: of the segment to be created.
        last_bytes: where the records of the segment before that one end; 0 where that is not known.
        cut_bytes: the length of the unfinished append that was cut off.
    """

    manifest: Manifest
    tail: Finished | None = None
    finished: list[Finished] = field(default_factory=list)
    sequence: int = 0
    next_number: int = 0
    last_bytes: int = 0
    cut_bytes: int = 0


def recover(files: Files, path: Path, fresh: Manifest) -> Recovered:
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


def _needless_copies(there: Iterable[str], chosen: Sequence[SegmentName], first: int) -> Iterator[str]:
    """Copies of the footers of files that were dropped or rewritten; that of a missing file tells what it held."""
    covered = {number for name in chosen for number in range(name.number, name.stop)}
    for file in there:
        name = parse_name(file.removesuffix(FOOTER_SUFFIX) + SUFFIX) if file.endswith(FOOTER_SUFFIX) else None
        if name is not None and name not in chosen and (name.number < first or name.number in covered):
            yield file


class _Recovery:
    def __init__(self, files: Files, path: Path, fresh: Manifest) -> None:
        self._files, self._path, self._fresh, self.found = files, path, fresh, Recovered(fresh)

    def close(self) -> None:
        for open_one in [*self.found.finished, *([self.found.tail] if self.found.tail else [])]:
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
            found.next_number = max([found.manifest.tail + 1, *(name.stop for name in names[-1:])])

    def _clean(self, names: list[SegmentName]) -> list[SegmentName]:
        """Reads or rebuilds the manifest; returns the files that count, and deletes the leftovers of a crash."""
        known = self._load_manifest()
        if known is None and names:
            known = manifest.rebuild(self._files, self._path, choose(names)[0])
        self.found.manifest = known or self.found.manifest
        first = self.found.manifest.first
        chosen, leftovers = choose(name for name in names if name.number >= first)
        leftovers += [name for name in names if name.number < first]
        # A rename that a killed process had not made durable must be, before anything relies on it: what it replaced
        # is deleted here, and what is appended is acknowledged by a sync of the file, not of its name.
        self._files.sync_folder(self._path)
        there = self._files.listdir(self._path)
        temporaries = [name for name in there if name.endswith(TEMPORARY)]
        for doomed in [*map(str, leftovers), *temporaries, *_needless_copies(there, chosen, first)]:
            self._files.unlink(self._path / doomed)
        return chosen

    def _load_manifest(self) -> Manifest | None:
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
        self.found.sequence = max(sealed.values(), default=0)
        for name, following in zip(names, names[1:], strict=False):
            if name not in sealed:
                self._take_unsealed(name, following)
        if names[-1] not in sealed:
            self._open_last(names[-1])
        if self.found.manifest.tail >= names[-1].stop:
            _logger.warning("store.tail-missing path=%s segment=%d", self._path, self.found.manifest.tail)
            self._skip_numbers()

    def _skip_numbers(self) -> None:
        """Gives none of the numbers again that a segment may have held which cannot be looked into."""
        self.found.sequence += MAX_SEGMENT_BYTES // RECORD_HEADER_BYTES

    def _unlisted_entry(self, name: SegmentName) -> Entry | None:
        """The entry of a segment that was sealed and not listed; None where it is not sealed."""
        fd = self._files.open(self._path / str(name), os.O_RDWR)
        try:
            footer = footer_or_none(self._files, self._path, fd, name)
            if footer is None:
                return None
            self._files.fsync(fd)  # its writer may have been killed before the sync that a manifest's entry relies on
            return Entry.of(name, footer)
        finally:
            self._files.close(fd)

    def _take_unsealed(self, name: SegmentName, following: SegmentName) -> None:
        """Finds the records of a segment that has a successor and no footer, to be sealed."""
        next_header, header = self._header(following), self._header(name)
        if self._is_foreign(header, name):
            return
        end = next_header.previous_bytes if next_header else 0
        finished = find_finished(self._files, self._path, name, end)
        self.found.finished.append(finished)
        self.found.sequence = max(self.found.sequence, finished.sequences.stop)

    def _header(self, name: SegmentName) -> SegmentHeader | None:
        fd = self._files.open(self._path / str(name), os.O_RDONLY)
        try:
            return read_header(self._files, fd)
        finally:
            self._files.close(fd)

    def _is_foreign(self, header: SegmentHeader | None, name: SegmentName) -> bool:
        """Whether the file is another segment's or another log's, and so must be left alone."""
        if header is None or header.belongs(name, self.found.manifest.log_id):
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
        self.found.last_bytes = last.end
        if whole and header is not None and self.found.manifest.tail < name.stop:
            self.found.tail = last
        else:
            self.found.finished.append(last)

    def _scan_last(self, fd: int, name: SegmentName, header: SegmentHeader | None) -> tuple[Finished, bool]:
        files, first = self._files, header.first_sequence if header else self.found.sequence
        scan, flat = SegmentScan(files, fd, name.number, name.generation, sequence=first), array("q")
        for item in scan:
            if isinstance(item, Damage):
                _logger.warning("store.damaged %s", item)
            else:
                flat.extend(item)
        whole = self._cut(fd, scan)
        # The numbers of records that may have been in what is kept are not given again.
        lost = 0 if whole else (files.size(fd) - scan.end) // RECORD_HEADER_BYTES
        self.found.sequence = max(self.found.sequence, scan.sequence + lost)
        files.fsync(fd)
        return Finished(name, fd, aligned(files.size(fd)), flat, range(first, self.found.sequence)), whole

    def _cut(self, fd: int, scan: SegmentScan) -> bool:
        """Cuts off an append that was never finished; False where what follows the last record may be more."""
        size = self._files.size(fd)
        if size <= scan.end:
            return True
        place = f"segment={scan.number} offset={scan.end} bytes={size - scan.end}"
        if not scan.unfinished():
            _logger.warning("store.damaged path=%s %s: kept", self._path, place)
            return False
        self.found.cut_bytes = size - scan.end
        _logger.warning("store.cut path=%s %s", self._path, place)
        self._files.ftruncate(fd, scan.end)
        return True
