"""Writes segment files: the active segment, sealing, and rewriting by compaction.

A sealed segment ends in index, summary and trailer and never changes. A crash during sealing leaves durable
records and bytes that are not a trailer; the next writer truncates those bytes and seals the segment.

Nothing is deleted before its replacement is durable. A rewritten file is synced before it gets its name, and the
folder is synced before the old files are deleted. From the rename on, the higher generation counts, so any name
that a power cut leaves has whole content. The manifest is updated in between and decides nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crc32c import crc32c

from user_sys.codec import checksum
from user_sys.errors import StoreCorrupt, StoreError
from user_sys.store.files import (
    CREATE,
    NO_SPACE_ERRNOS,
    Buffer,
    Files,
    drop_written,
    next_buffers,
    pread_readable,
    write_all,
)
from user_sys.store.index_block import IndexBlockBuilder
from user_sys.store.manifest import LogManifest, ManifestFile, SegmentEntry
from user_sys.store.record_format import (
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    TEMPORARY_SUFFIX,
    Damage,
    Footer,
    RecordRef,
    SegmentHeader,
    SegmentName,
    decode_record_header,
    encode_footer,
    encode_record_header,
    list_segments,
    read_segment_header,
    read_sound_footer,
    record_bytes,
    record_table,
    refs_of,
    resolve_generations,
)

JOIN_BELOW_BYTES = 16 << 10  # copying a smaller payload to its header is cheaper than two more buffers
MAX_GENERATION = (1 << 16) - 1
MAX_SPAN = (1 << 16) - 1
_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class OpenSegment:
    """A segment that takes records or waits to be sealed: appended, written and durable offsets.

    Attributes:
        first_sequence, next_sequence: from its first number to the first number after it.
        summary: of its records.
        fd: open for reading and writing; -1 before the file exists.
        end, written, synced: end offset of the appended, written and durable records, a multiple of 8.
        flat_refs: concatenated fields of its records' references.
    """

    name: SegmentName
    first_sequence: int
    next_sequence: int
    summary: IndexBlockBuilder
    fd: int = -1
    end: int = SEGMENT_HEADER_BYTES
    written: int = SEGMENT_HEADER_BYTES
    synced: int = SEGMENT_HEADER_BYTES
    flat_refs: array[int] = field(default_factory=lambda: array("q"))
    _pending: deque[Buffer] = field(default_factory=deque)

    @classmethod
    def durable(
        cls, name: SegmentName, fd: int, end: int, flat_refs: array[int], sequences: range, summary: IndexBlockBuilder
    ) -> OpenSegment:
        """A segment whose records are on the disk up to `end`."""
        return cls(name, sequences.start, sequences.stop, summary, fd, end, end, end, flat_refs)

    def create(self, files: Files, path: Path, log_id: bytes, previous_bytes: int) -> None:
        """Creates its file in the log at `path`; the previous segment ends durably at `previous_bytes`. Raises OSError.

        The file has a temporary name until `publish`. The header is synced before, so no segment lacks a header.
        """
        header = SegmentHeader(self.name.number, self.first_sequence, previous_bytes, time.time_ns(), log_id)
        fd = files.open(self._temporary(path), CREATE)
        try:
            write_all(files, fd, [header.encode()], 0)
            files.fsync(fd)
        except OSError:
            files.close(fd)
            raise
        self.fd = fd

    def publish(self, files: Files, path: Path) -> None:
        """Gives the created file its name; until then it takes no record.

        The folder is synced before any record is written, because a sync of the file alone acknowledges the record.
        Raises OSError: the name may exist. The segment before it is then complete for readers and takes no record.
        """
        files.rename(self._temporary(path), path / str(self.name))
        files.sync_folder(path)

    def _temporary(self, path: Path) -> Path:
        return (path / str(self.name)).with_suffix(TEMPORARY_SUFFIX)

    def append(self, kind: int, payload: Buffer, schema: int, parsed: object) -> RecordRef:
        """Queues the record with the next sequence number. A mutable payload is copied."""
        body = bytes(payload)
        ref = RecordRef(self.name.number, self.end, len(body), kind, self.next_sequence, schema)
        header = encode_record_header(ref, checksum(body))
        size = record_bytes(len(body))
        padding = bytes(size - RECORD_HEADER_BYTES - len(body))
        if len(body) < JOIN_BELOW_BYTES:
            self._pending.append(b"".join((header, body, padding)))
        else:
            self._pending.extend(part for part in (header, body, padding) if part)
        self.flat_refs.extend(ref)
        self.summary.add(ref, body, parsed)
        self.end += size
        self.next_sequence += 1
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

    def seal(self, files: Files) -> SegmentEntry:
        """Writes the footer and makes it durable, so that the manifest may list the segment.

        Without the sync, a power cut could leave a listed segment without a footer.

        Raises:
            OSError: the footer could not be written. Retry unless the sync failed.
        """
        records, summary = record_table(self.flat_refs), self.summary.encode()
        sequences = range(self.first_sequence, self.next_sequence)
        if files.size(self.fd) > self.end:
            files.ftruncate(self.fd, self.end)
        encoded = encode_footer(self.name, records, summary, self.end, sequences)
        size = write_all(files, self.fd, encoded, self.end)
        files.fdatasync(self.fd)
        footer = Footer(records, summary, self.end, sequences.start, sequences.stop, size)
        return SegmentEntry.of(self.name, footer)

    def close(self, files: Files) -> None:
        """Closes its file, if open."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            files.close(fd)


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
    summary: IndexBlockBuilder,
) -> SegmentEntry:
    """See `LogWriter.rewrite`. The caller holds ``manifest_file.maintenance_lock``."""
    names = _neighbours(path, files, manifest_file, segments)
    target = SegmentName(names[0].number, names[-1].stop - names[0].number, 1 + max(name.generation for name in names))
    if target.generation > MAX_GENERATION or target.span > MAX_SPAN:
        raise StoreError(f"{path}: segment {target} exceeds the maximum generation or span")
    temporary = path / f"{target}{TEMPORARY_SUFFIX}"
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(_SealedSource.opened(files, path, name)) for name in names]
        fd = stack.enter_context(files.opened(temporary, CREATE))
        try:
            copied = _copy_records(files, fd, target, sources, keep, manifest_file.manifest, summary)
            entry = copied.seal(files)
        except BaseException:
            files.unlink(temporary)
            raise
    files.rename(temporary, path / str(target))
    _update_or_defer(manifest_file, lambda old: old.with_entry(entry))
    files.sync_folder(path)
    for name in names:
        files.unlink(path / str(name))
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
        self._files, self._fd = files, fd

    @classmethod
    @contextlib.contextmanager
    def opened(cls, files: Files, path: Path, name: SegmentName) -> Iterator[_SealedSource]:
        with files.opened(path / str(name)) as fd:
            footer = read_sound_footer(files, fd, name)
            if footer is None:
                raise StoreCorrupt(f"{path / str(name)} has no sound footer; run `user-sys store verify`")
            yield cls(files, fd, name, footer)

    def payload(self, ref: RecordRef) -> tuple[bytes, int] | None:
        """A record's payload and its CRC; None if it is damaged. Raises StoreCorrupt: the disk cannot read it."""
        try:
            raw = pread_readable(self._files, self._fd, RECORD_HEADER_BYTES + ref.length, ref.offset)
        except OSError as error:
            raise StoreCorrupt(f"segment {self.name}: record {ref.sequence} cannot be read: {error.strerror}") from None
        decoded = decode_record_header(raw[:RECORD_HEADER_BYTES], self.name.number, self.name.generation, ref.offset)
        payload = raw[RECORD_HEADER_BYTES:]
        if decoded is None or decoded[0] != ref or crc32c(payload) != decoded[1]:
            return None
        return payload, decoded[1]

    def wanted(
        self, keep: Callable[[RecordRef], bool], manifest: LogManifest
    ) -> Iterator[tuple[RecordRef, bytes, int]]:
        """The records to keep, with payload and CRC. Raises StoreCorrupt for damage that is not quarantined."""
        for damage in self.footer.gaps(self.name):
            self._require_quarantined(damage, manifest)
        for ref in filter(keep, refs_of(self.footer.records)):
            found = self.payload(ref)
            if found is None:
                place = (ref.segment, ref.offset, record_bytes(ref.length))
                self._require_quarantined(Damage(*place, "payload", ref.sequence, self.name.generation), manifest)
            else:
                yield ref, *found

    def _require_quarantined(self, damage: Damage, manifest: LogManifest) -> None:
        if not manifest.is_quarantined(damage):
            raise StoreCorrupt(
                f"segment {self.name}: {damage.length} bytes at {damage.offset} hold no whole record; "
                "run `user-sys store repair` first"
            )


def _copy_records(
    files: Files,
    fd: int,
    target: SegmentName,
    sources: Sequence[_SealedSource],
    keep: Callable[[RecordRef], bool],
    manifest: LogManifest,
    summary: IndexBlockBuilder,
) -> OpenSegment:
    """Writes the wanted records of `sources` into the new segment's file."""
    first, flat = sources[0], array("q")
    sequences = range(first.footer.first_sequence, sources[-1].footer.next_sequence)
    before = first.header.previous_bytes if first.header else 0
    place = (target.generation, target.span)
    header = SegmentHeader(target.number, sequences.start, before, time.time_ns(), manifest.log_id, *place)
    end = write_all(files, fd, [header.encode()], 0)
    for source in sources:
        for ref, payload, crc in source.wanted(keep, manifest):
            moved = ref._replace(segment=target.number, offset=end)
            padding = bytes(record_bytes(ref.length) - RECORD_HEADER_BYTES - ref.length)
            end = write_all(files, fd, [encode_record_header(moved, crc, target.generation), payload, padding], end)
            flat.extend(moved)
            summary.add(moved, payload)
    return OpenSegment.durable(target, fd, end, flat, sequences, summary)
