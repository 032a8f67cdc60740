"""Writes segment files: the active segment, sealing, rewriting by compaction, and dropping.

A sealed segment ends in index, summary and trailer and never changes. A crash during sealing leaves durable
records and bytes that are not a trailer; the next writer truncates those bytes and seals the segment.

Nothing is deleted before its replacement is durable. A rewritten file is synced before it gets its name, and the
folder is synced before the old files are deleted. From the rename on, the higher generation counts, so any name
that a power cut leaves has whole content. The manifest is updated in between and decides nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from user_sys.codec import checksum
from user_sys.errors import StoreCorrupt, StoreError
from user_sys.store.files import NO_SPACE_ERRNOS, Buffer, Files, drop_written, next_buffers, write_all
from user_sys.store.manifest import LogManifest, ManifestFile, SegmentEntry
from user_sys.store.record_format import (
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    TEMPORARY_SUFFIX,
    Damage,
    Footer,
    RecordRef,
    RecordTable,
    SegmentHeader,
    SegmentName,
    SegmentScan,
    align_up,
    decode_record_header,
    encode_footer,
    encode_record_header,
    list_segments,
    read_footer,
    read_footer_copy,
    read_segment_header,
    record_bytes,
    remove_segment,
    resolve_generations,
    write_footer_copy,
)

Summarise = Callable[[Iterable[tuple[RecordRef, memoryview]]], bytes]
JOIN_BELOW_BYTES = 16 << 10  # copying a smaller payload to its header is cheaper than two more buffers
MAX_GENERATION = (1 << 16) - 1
MAX_SPAN = (1 << 16) - 1
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class FinishedSegment:
    """A segment that takes no more records and is durable up to `end`, a multiple of 8.

    Attributes:
        fd: open for writing; the sealer closes it.
        flat_refs: concatenated fields of its records' references.
        sequences: from its first number to the first number after it.
    """

    name: SegmentName
    fd: int
    end: int
    flat_refs: array[int]
    sequences: range


def seal_segment(files: Files, path: Path, finished: FinishedSegment, summarise: Summarise | None) -> SegmentEntry:
    """Writes the footer and makes it durable, so that the manifest may list the segment.

    Without the sync, a power cut could leave a listed segment without a footer. If the log's owner summarises its
    records, a copy of the footer is written too.

    Raises:
        OSError: the footer could not be written. Retry unless the sync failed.
    """
    name, fd = finished.name, finished.fd
    records = RecordTable.from_flat(name.number, finished.flat_refs)
    summary = summarise_segment(files, fd, finished.end, records, summarise)
    if files.size(fd) > finished.end:
        files.ftruncate(fd, finished.end)
    encoded = encode_footer(name, records, summary, finished.end, finished.sequences)
    size = write_all(files, fd, encoded, finished.end)
    files.fdatasync(fd)
    if summarise is not None:
        write_footer_copy(files, path, name, encoded)
    footer = Footer(records, summary, finished.end, finished.sequences.start, finished.sequences.stop, size)
    return SegmentEntry.of(name, footer)


def summarise_segment(files: Files, fd: int, end: int, records: RecordTable, summarise: Summarise | None) -> bytes:
    """The owner's summary of the records in the first `end` bytes of a file; empty without `summarise`."""
    if summarise is None:
        return b""
    view = files.map(fd, min(end, files.size(fd)))
    return summarise(_payloads(view, records))


def _payloads(view: memoryview, records: RecordTable) -> Iterator[tuple[RecordRef, memoryview]]:
    for ref in records:
        start = ref.offset + RECORD_HEADER_BYTES
        yield ref, view[start : start + ref.length]


def scan_unsealed(files: Files, path: Path, name: SegmentName, records_end: int) -> FinishedSegment:
    """Scans a segment that a previous writer left unsealed.

    Args:
        records_end: end of its records by the header of the next segment; 0 if unknown.

    Raises:
        OSError: it cannot be read.
    """
    fd = files.open(path / str(name), os.O_RDWR)
    try:
        return _scan_finished(files, fd, name, records_end)
    except BaseException:
        files.close(fd)
        raise


def _scan_finished(files: Files, fd: int, name: SegmentName, records_end: int) -> FinishedSegment:
    header = read_segment_header(files, fd)
    first = header.first_sequence if header else 0
    scan = SegmentScan(files, fd, name.number, name.generation, sequence=first)
    scan.stop = records_end or scan.stop
    refs = [item for item in scan if isinstance(item, RecordRef)]
    flat = array("q")
    for ref in refs:
        flat.extend(ref)
    # Bytes after the last whole record may be a damaged record. They stay, and the index shows the gap.
    end = scan.end if scan.at_footer else max(scan.end, records_end or align_up(files.size(fd)))
    if header is None and refs:
        first = refs[0].sequence
    return FinishedSegment(name, fd, end, flat, range(first, scan.sequence))


class SyncPoint(NamedTuple):
    """A position in the log. All earlier records are written and wait for a sync."""

    segment: int
    end: int


@dataclass(eq=False)
class ActiveSegment:
    """The segment that takes records: appended, written and durable offsets.

    The appending thread changes it, except `fd`, `synced` and `previous`, which the syncing thread changes.

    Attributes:
        first_sequence: lowest possible number of its records.
        fd: open for reading and writing; -1 before the file exists.
        end, written, synced: end offset of the appended, written and durable records.
        flat_refs: concatenated fields of its records' references.
        previous: the segment before it, until that is durable and this one has a file.
    """

    number: int
    first_sequence: int
    fd: int = -1
    end: int = SEGMENT_HEADER_BYTES
    written: int = SEGMENT_HEADER_BYTES
    synced: int = SEGMENT_HEADER_BYTES
    flat_refs: array[int] = field(default_factory=lambda: array("q"))
    previous: ActiveSegment | None = None
    _pending: deque[Buffer] = field(default_factory=deque)

    @classmethod
    def resumed(cls, found: FinishedSegment) -> ActiveSegment:
        """The last segment found by recovery; all of it is durable."""
        end = found.end
        return cls(found.name.number, found.sequences.start, found.fd, end, end, end, found.flat_refs)

    def create(self, files: Files, path: Path, log_id: bytes, previous_bytes: int) -> None:
        """Creates its file in the log at `path`; the previous segment ends durably at `previous_bytes`. Raises OSError.

        The header is synced before the rename, so no segment lacks a header. The folder is synced before any record is
        written, because a sync of the file alone acknowledges the record.
        """
        target = path / str(SegmentName(self.number))
        temporary = target.with_suffix(TEMPORARY_SUFFIX)
        header = SegmentHeader(self.number, self.first_sequence, previous_bytes, time.time_ns(), log_id)
        fd = files.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(files, fd, [header.encode()], 0)
            files.fsync(fd)
            files.rename(temporary, target)
            files.sync_folder(path)
        except OSError:
            files.close(fd)
            raise
        self.fd = fd

    def append(self, kind: int, payload: Buffer, sequence: int, schema: int) -> RecordRef:
        """Queues a record. A mutable payload is copied."""
        body = bytes(payload)
        ref = RecordRef(self.number, self.end, len(body), kind, sequence, schema)
        header = encode_record_header(ref, checksum(body))
        size = record_bytes(len(body))
        padding = bytes(size - RECORD_HEADER_BYTES - len(body))
        if len(body) < JOIN_BELOW_BYTES:
            self._pending.append(b"".join((header, body, padding)))
        else:
            self._pending.extend(part for part in (header, body, padding) if part)
        self.flat_refs.extend(ref)
        self.end += size
        return ref

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not yet written to the file."""
        return self.end - self.written

    def write(self, files: Files) -> None:
        """Writes the queue. Raises OSError; unwritten records stay queued."""
        while self._pending:
            count = files.pwritev(self.fd, next_buffers(self._pending), self.written)
            drop_written(self._pending, count)
            self.written += count

    def finish(self, next_sequence: int) -> FinishedSegment:
        """The segment as input of `seal_segment`; the next record gets number `next_sequence`."""
        name, sequences = SegmentName(self.number), range(self.first_sequence, next_sequence)
        return FinishedSegment(name, self.fd, self.end, self.flat_refs, sequences)

    def close(self, files: Files) -> None:
        """Closes its file, if open."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            files.close(fd)


def drop_segments_before(files: Files, path: Path, manifest_file: ManifestFile, segment: int) -> None:
    """Deletes the segments that lie entirely below `segment`. Raises OSError.

    If there is no space for a manifest, segments are deleted first to free some; until the next update the manifest
    then lists missing files.
    """
    names = list_segments(path, files)
    # A file whose span includes `segment` stays.
    segment = min(
        [segment, *(name.number for name in resolve_generations(names)[0] if name.number < segment < name.stop)]
    )
    doomed = [name for name in names if name.stop <= segment]
    if not doomed and manifest_file.manifest.first_number >= segment:
        return
    _update_or_defer(manifest_file, lambda old: old.without_segments_below(segment))
    files.sync_folder(path)  # files are deleted only after the new manifest is durable
    for name in doomed:
        remove_segment(files, path, name)


def _update_or_defer(manifest_file: ManifestFile, change: Callable[[LogManifest], LogManifest]) -> None:
    """Updates the manifest. Without disk space the next update writes it, after space was freed."""
    try:
        manifest_file.update(change)
    except OSError as error:
        if error.errno not in NO_SPACE_ERRNOS:
            raise
        _logger.warning("store.manifest_write_deferred: %s", error)


def rewrite_segments(
    files: Files,
    path: Path,
    manifest_file: ManifestFile,
    segments: Sequence[int],
    keep: Callable[[RecordRef], bool],
    summarise: Summarise | None,
) -> SegmentEntry:
    """See `LogWriter.rewrite`. The caller holds ``manifest_file.maintenance_lock``."""
    names = _neighbours(path, files, manifest_file, segments)
    target = SegmentName(names[0].number, names[-1].stop - names[0].number, 1 + max(name.generation for name in names))
    if target.generation > MAX_GENERATION or target.span > MAX_SPAN:
        raise StoreError(f"{path}: segment {target} exceeds the maximum generation or span")
    temporary = path / f"{target}{TEMPORARY_SUFFIX}"
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(_SealedSource.opened(files, path, name)) for name in names]
        fd = files.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        stack.callback(files.close, fd)
        try:
            finished = _SegmentCopy(files, fd, target).run(sources, keep, manifest_file.manifest)
            entry = seal_segment(files, path, finished, summarise)
        except BaseException:
            files.unlink(temporary)
            raise
    files.rename(temporary, path / str(target))
    _update_or_defer(manifest_file, lambda old: old.with_entry(entry))
    files.sync_folder(path)
    for name in names:
        remove_segment(files, path, name)
    return entry


def _neighbours(path: Path, files: Files, manifest_file: ManifestFile, segments: Sequence[int]) -> list[SegmentName]:
    listed = {entry.name for entry in manifest_file.manifest.segments}
    chosen = resolve_generations(list_segments(path, files))[0]
    names = [name for name in chosen if name.number in set(segments)]
    if not names or len(names) != len(set(segments)) or not listed.issuperset(names):
        raise StoreError(f"{path}: segments {sorted(segments)} are not all sealed segments of this log")
    if any(left.stop != right.number for left, right in zip(names, names[1:], strict=False)):
        raise StoreError(f"{path}: segments {sorted(segments)} are not neighbours")
    return names


class _SealedSource:
    """A sealed segment to copy from."""

    def __init__(self, files: Files, fd: int, name: SegmentName, footer: Footer) -> None:
        self.name, self.footer, self.header = name, footer, read_segment_header(files, fd)
        self._view = files.map(fd, min(footer.end, files.size(fd)))

    @classmethod
    @contextlib.contextmanager
    def opened(cls, files: Files, path: Path, name: SegmentName) -> Iterator[_SealedSource]:
        fd = files.open(path / str(name), os.O_RDONLY)
        try:
            footer = read_footer(files, fd, name) or read_footer_copy(files, path, name)
            if footer is None:
                raise StoreCorrupt(f"{path / str(name)} has no footer; run `user-sys store verify`")
            yield cls(files, fd, name, footer)
        finally:
            files.close(fd)

    def payload(self, ref: RecordRef) -> tuple[memoryview, int] | None:
        """A record's payload and its CRC; None if it is damaged."""
        start = ref.offset + RECORD_HEADER_BYTES
        decoded = decode_record_header(
            self._view[ref.offset : start], self.name.number, self.name.generation, ref.offset
        )
        payload = self._view[start : start + ref.length]
        if decoded is None or decoded[0] != ref or crc32c(payload) != decoded[1]:
            return None
        return payload, decoded[1]


class _SegmentCopy:
    """The new segment during a rewrite."""

    def __init__(self, files: Files, fd: int, target: SegmentName) -> None:
        self._files, self._fd, self._target = files, fd, target
        self._flat = array("q")
        self._end = 0

    def run(
        self, sources: list[_SealedSource], keep: Callable[[RecordRef], bool], manifest: LogManifest
    ) -> FinishedSegment:
        first, last = sources[0], sources[-1]
        sequences = range(first.footer.first_sequence, last.footer.next_sequence)
        header = SegmentHeader(
            self._target.number,
            sequences.start,
            first.header.previous_bytes if first.header else 0,
            time.time_ns(),
            manifest.log_id,
            self._target.generation,
            self._target.span,
        )
        self._end = write_all(self._files, self._fd, [header.encode()], 0)
        for source in sources:
            _require_quarantined(source, manifest)
            for ref in filter(keep, source.footer.records):
                self._copy_record(source, ref, manifest)
        return FinishedSegment(self._target, self._fd, self._end, self._flat, sequences)

    def _copy_record(self, source: _SealedSource, ref: RecordRef, manifest: LogManifest) -> None:
        found = source.payload(ref)
        if found is None:
            damage = Damage(
                ref.segment, ref.offset, record_bytes(ref.length), "payload", ref.sequence, source.name.generation
            )
            if manifest.is_quarantined(damage):
                return
            raise StoreCorrupt(
                f"segment {source.name}: record {ref.sequence} at {ref.offset} is damaged; "
                "run `user-sys store repair` first"
            )
        payload, crc = found
        moved = ref._replace(segment=self._target.number, offset=self._end)
        padding = bytes(record_bytes(ref.length) - RECORD_HEADER_BYTES - ref.length)
        buffers: list[Buffer] = [encode_record_header(moved, crc, self._target.generation), payload, padding]
        self._end = write_all(self._files, self._fd, buffers, self._end)
        self._flat.extend(moved)


def _require_quarantined(source: _SealedSource, manifest: LogManifest) -> None:
    """Raises StoreCorrupt if damaged bytes between its records are not quarantined, since a copy would lose them."""
    for damage in source.footer.gaps(source.name):
        if not manifest.is_quarantined(damage):
            place = f"{damage.length} bytes at {damage.offset}"
            raise StoreCorrupt(
                f"segment {source.name}: {place} hold no whole record; run `user-sys store repair` first"
            )
