"""Byte format of a log: segment headers, records, footers, segment file names, and the scan that finds whole records.

Numbers are little-endian, CRC is CRC-32C, and payloads are opaque at this level:

- Segment header, 64 bytes. Another version is refused. A segment of another log or number is neither read nor changed.
- Record: header, payload, zeros up to a multiple of 8. Sequence numbers grow and are never reused. The header's CRC
  includes segment number, generation and offset, so that a misplaced record is not read. Readers skip unknown kinds.
- Footer of a sealed segment: two records and a trailer. The index has the columns `_COLUMNS` of all records; the
  summary is the store's index block. Bytes between indexed records were damaged at sealing. A sealed segment never
  changes.

A full segment is synced. The next one is written as ``.tmp``, synced and renamed, and the folder is synced. Then the
full segment gets its footer, and the manifest is replaced. An unsealed segment is scanned: after damage, the scan
resumes at the next record whose magic, CRCs and sequence number are valid.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from user_sys.errors import StoreCorrupt, StoreLocked, StoreVersionMismatch
from user_sys.store.files import NO_SPACE_ERRNOS, OS_FILES, Buffer, Files, pread_readable

FORMAT_VERSION = 2
SEGMENT_MAGIC = b"USERLOG\n"
RECORD_MAGIC = b"\xf5UR2"
ALIGN_BYTES = 8
SEGMENT_HEADER_BYTES = 64
RECORD_HEADER_BYTES = 32
MAX_PAYLOAD_BYTES = 1 << 30
MAX_SEGMENT_BYTES = 1 << 31  # the header has 32 bits for the end of the records; one record may exceed this limit

RESERVED_KINDS = 0xFF00  # from here on, kinds of the log itself, whose records have no own sequence number
INDEX_KIND = 0xFF01
SUMMARY_KIND = 0xFF02

# magic, version, bytes of the segment before, number, first sequence, unix ns, log id, generation, span
_SEGMENT = struct.Struct("<8sIIQQQ16sHH")
_RECORD = struct.Struct("<4sHHIIQI")  # magic, kind, flags, payload bytes, payload CRC, sequence, schema
_PLACE = struct.Struct("<QQQ")  # number, generation, offset: part of the header's CRC
_PLACED = struct.Struct("<QQQ4sHHIIQI")  # both without padding
_CRC = struct.Struct("<I")
SEGMENT_SUFFIX = ".seg"
TEMPORARY_SUFFIX = ".tmp"
TRAILER_MAGIC = b"USEREND\n"
TRAILER_BYTES = 64
Column = npt.NDArray[np.int64]
_NAME = re.compile(r"(\d{10})(?:-(\d{5})\.(\d{5}))?\.seg")
_logger = logging.getLogger(__name__)
# magic, version, records, index at, summary at, first sequence, next sequence, bytes of the file, zero
_TRAILER = struct.Struct("<8sIIQQQQQI")
_COLUMNS = (("offset", "<u8"), ("sequence", "<u8"), ("length", "<u4"), ("schema", "<u4"), ("kind", "<u2"))
_ROW_BYTES = sum(np.dtype(code).itemsize for _, code in _COLUMNS)


class RecordRef(NamedTuple):
    """Location of a record. The sequence number identifies the record permanently.

    Attributes:
        offset: of its header in the segment, in bytes.
        length: of its payload, in bytes.
        schema: fingerprint that the owner of the log assigned.
    """

    segment: int
    offset: int
    length: int
    kind: int = 0
    sequence: int = -1
    schema: int = 0


RECORD_DTYPE = np.dtype([(name, np.int64) for name in RecordRef._fields])
RecordTable = npt.NDArray[np.void]
"""Records of one segment in ascending order: `RECORD_DTYPE` (n,), whose fields are those of `RecordRef`."""


@dataclass(frozen=True)
class Damage:
    """A damaged range: `length` bytes from `offset` in a segment's file.

    Attributes:
        segment: its number; -1 for the manifest.
        sequence: of the lost record; -1 if unknown.
        last_sequence: of the last lost record, if several are lost together; otherwise -1.
        generation: of the segment's file.
    """

    segment: int
    offset: int
    length: int
    reason: str
    sequence: int = -1
    generation: int = 0
    last_sequence: int = -1


@dataclass(frozen=True)
class SegmentHeader:
    """The first 64 bytes of a segment.

    Attributes:
        previous_bytes: end offset of the records in the previous segment; 0 if unknown.
        log_id: 16 random bytes, equal in all segments of a log.
        generation: how often compaction rewrote the records.
        span: how many segment numbers, from `number` on, this file stands for.
    """

    number: int
    first_sequence: int
    previous_bytes: int
    created_unix_ns: int
    log_id: bytes
    generation: int = 0
    span: int = 1

    def belongs_to(self, name: tuple[int, int, int], log_id: bytes) -> bool:
        """Whether number, span, generation and log id match."""
        return (self.number, self.span, self.generation) == name and self.log_id == log_id

    def encode(self) -> bytes:
        body = _SEGMENT.pack(
            SEGMENT_MAGIC,
            FORMAT_VERSION,
            self.previous_bytes,
            self.number,
            self.first_sequence,
            self.created_unix_ns,
            self.log_id,
            self.generation,
            self.span,
        )
        return body + _CRC.pack(crc32c(body))


def decode_segment_header(raw: bytes) -> SegmentHeader | None:
    """The header, or None if it is damaged.

    Raises:
        StoreVersionMismatch: the header is valid and has another format version.
    """
    if len(raw) < SEGMENT_HEADER_BYTES or crc32c(raw[: _SEGMENT.size]) != _CRC.unpack_from(raw, _SEGMENT.size)[0]:
        return None
    magic, version, previous, number, first_sequence, created, log_id, generation, span = _SEGMENT.unpack_from(raw)
    if magic != SEGMENT_MAGIC:
        return None
    check_version(version, f"segment {number}")
    return SegmentHeader(number, first_sequence, previous, created, log_id, generation, span)


def check_version(version: int, what: str) -> None:
    """Raises StoreVersionMismatch if `version` differs from `FORMAT_VERSION`; `what` names the file in the message."""
    if version != FORMAT_VERSION:
        age = "an older" if version < FORMAT_VERSION else "a newer"
        raise StoreVersionMismatch(
            f"{what} is in format {version}, written by {age} program; this one reads format {FORMAT_VERSION}: "
            "open the store with the program that wrote it"
        )


def record_bytes(payload_bytes: int) -> int:
    """Size of a record in its segment, with header and padding to 8 bytes."""
    return RECORD_HEADER_BYTES + -(-payload_bytes // ALIGN_BYTES) * ALIGN_BYTES


def align_up(offset: int) -> int:
    """The first aligned offset at or after `offset`."""
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def positional_crc(body: bytes | memoryview, number: int, generation: int, offset: int) -> int:
    """CRC-32C of `body` combined with its position, so that it is valid at this position only."""
    return int(crc32c(body, crc32c(_PLACE.pack(number, generation, offset))))


def encode_record_header(ref: RecordRef, payload_crc: int, generation: int = 0) -> bytes:
    """The 32 header bytes for the record at ``ref.offset``."""
    segment, offset, length, kind, sequence, schema = ref
    body = _PLACED.pack(segment, generation, offset, RECORD_MAGIC, kind, 0, length, payload_crc, sequence, schema)
    return body[_PLACE.size :] + _CRC.pack(crc32c(body))  # as `positional_crc`


def decode_record_header(
    raw: bytes | memoryview, number: int, generation: int, offset: int
) -> tuple[RecordRef, int] | None:
    """The record and its payload's CRC, or None if the header is invalid at this position."""
    if len(raw) < RECORD_HEADER_BYTES or raw[: len(RECORD_MAGIC)] != RECORD_MAGIC:
        return None
    if positional_crc(raw[: _RECORD.size], number, generation, offset) != _CRC.unpack_from(raw, _RECORD.size)[0]:
        return None
    _, kind, _, length, payload_crc, sequence, schema = _RECORD.unpack_from(raw)
    if length > MAX_PAYLOAD_BYTES:
        return None
    return RecordRef(number, offset, length, kind, sequence, schema), payload_crc


class _Tail:
    """The bytes of a file from `start` on, read at once, with zeros for those that the disk cannot read.

    No mmap, because a recovering writer may truncate the file during a scan.
    """

    def __init__(self, files: Files, fd: int, start: int) -> None:
        self._start = start
        self._raw = pread_readable(files, fd, max(0, files.size(fd) - start), start)

    def __len__(self) -> int:
        return len(self._raw)

    def get(self, offset: int, size: int) -> memoryview:
        """`size` bytes at `offset` of the file; fewer at its end."""
        return memoryview(self._raw)[offset - self._start : offset - self._start + size]

    def find_magic(self, offset: int) -> int:
        """The first aligned offset of a record magic at or after `offset`; -1 if there is none."""
        at = self._raw.find(RECORD_MAGIC, offset - self._start)
        while at >= 0 and (self._start + at) % ALIGN_BYTES:
            at = self._raw.find(RECORD_MAGIC, at + 1)
        return at if at < 0 else self._start + at


class SegmentScan:
    """Iterates over the records of one segment from `end`, the offset of a possible record.

    Yields each whole record in order, and a `Damage` for bytes between two records. Stops after the last whole record
    or at the footer of a sealed segment; `end` is then the next offset. The bytes after it may be an append in
    progress, a torn append, a footer or damage; the caller distinguishes them. A second iteration continues from
    `end` and includes new records.

    Attributes:
        sequence: lowest possible sequence number of the next record.
        stop: end of the segment's records, once known.
        at_footer: the scan has reached a footer.
    """

    def __init__(
        self,
        files: Files,
        fd: int,
        number: int,
        generation: int = 0,
        *,
        end: int = SEGMENT_HEADER_BYTES,
        sequence: int = 0,
    ) -> None:
        self.number, self.generation, self.end, self.sequence = number, generation, end, sequence
        self.stop = sys.maxsize
        self.at_footer = False
        self._files, self._fd = files, fd

    def __iter__(self) -> Iterator[RecordRef | Damage]:
        tail = _Tail(self._files, self._fd, self.end)
        while self.end < self.stop and (ref := self._whole(tail, self.end) or self._resynchronise(tail)):
            upto = min(ref.offset, self.stop)
            if upto > self.end:
                yield self.damage(upto, "no whole record")
                self.end = upto
            self.at_footer = ref.kind >= RESERVED_KINDS
            if self.at_footer or upto < ref.offset:
                return
            self.end = ref.offset + record_bytes(ref.length)
            self.sequence = ref.sequence + 1
            yield ref

    def damage(self, stop: int, reason: str) -> Damage:
        """The bytes from `end` to `stop` as damage; the caller knows that they hold no whole record."""
        return Damage(self.number, self.end, stop - self.end, reason, self.sequence, self.generation)

    def _header(self, tail: _Tail, offset: int) -> tuple[RecordRef, int] | None:
        return decode_record_header(tail.get(offset, RECORD_HEADER_BYTES), self.number, self.generation, offset)

    def _whole(self, tail: _Tail, offset: int) -> RecordRef | None:
        """The record at `offset` if header, payload and sequence number are valid."""
        found = self._header(tail, offset)
        if found is None or found[0].sequence < self.sequence:
            return None
        ref, payload_crc = found
        payload = tail.get(offset + RECORD_HEADER_BYTES, ref.length)
        return ref if len(payload) == ref.length and crc32c(payload) == payload_crc else None

    def _resynchronise(self, tail: _Tail) -> RecordRef | None:
        """The next whole record after damage at `end`."""
        offset = self.end
        while True:
            announced = self._header(tail, offset)
            # A valid header gives the end of its damaged payload, so records inside it are skipped.
            offset = tail.find_magic(offset + (record_bytes(announced[0].length) if announced else ALIGN_BYTES))
            if offset < 0:
                return None
            if ref := self._whole(tail, offset):
                # A live writer may have completed the record at `end` in the meantime.
                return self._whole(_Tail(self._files, self._fd, self.end), self.end) or ref

    def is_unfinished(self) -> bool:
        """Whether the bytes after `end` can only be an interrupted append, which was never acknowledged."""
        tail = _Tail(self._files, self._fd, self.end)
        announced = self._header(tail, self.end)
        if announced is not None:
            return RECORD_HEADER_BYTES + announced[0].length > len(tail)
        return len(tail) < RECORD_HEADER_BYTES or not any(tail.get(self.end, len(tail)))


class SegmentName(NamedTuple):
    """A segment file's name. The file holds the records of `span` segment numbers from `number` on."""

    number: int
    span: int = 1
    generation: int = 0

    @property
    def stop(self) -> int:
        """The first number after its range."""
        return self.number + self.span

    def __str__(self) -> str:
        rewritten = f"-{self.span:05d}.{self.generation:05d}" if self.generation else ""
        return f"{self.number:010d}{rewritten}{SEGMENT_SUFFIX}"


def parse_segment_name(name: str) -> SegmentName | None:
    """The parsed name, or None if it is not a segment's name."""
    match = _NAME.fullmatch(name)
    return SegmentName(int(match[1]), int(match[2] or 1), int(match[3] or 0)) if match else None


def resolve_generations(names: Iterable[SegmentName]) -> tuple[list[SegmentName], list[SegmentName]]:
    """The files that make up the log, in order, and the files that a later generation replaces.

    A rewritten file gets its name only when it is whole and durable, so the highest generation always counts, with
    any manifest or without one.
    """
    owned: set[int] = set()
    chosen, shadowed = [], []
    for name in sorted(names, key=lambda name: -name.generation):
        numbers = range(name.number, name.stop)
        if owned.isdisjoint(numbers):
            owned.update(numbers)
            chosen.append(name)
        else:
            shadowed.append(name)
    return sorted(chosen), shadowed


def list_segments(path: Path, files: Files = OS_FILES) -> list[SegmentName]:
    """Every segment file in the folder, unordered; empty if `path` is not a folder."""
    try:
        names = files.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [parsed for name in names if (parsed := parse_segment_name(name)) is not None]


def segment_numbers(path: Path, files: Files = OS_FILES) -> list[int]:
    """The number of each segment, ascending; empty if `path` is not a log."""
    return [name.number for name in resolve_generations(list_segments(path, files))[0]]


def read_segment_header(files: Files, fd: int) -> SegmentHeader | None:
    return decode_segment_header(pread_readable(files, fd, SEGMENT_HEADER_BYTES, 0))


class WriterLock:
    """An exclusive lock on ``<log>/LOCK``, which contains the holder's process id. The kernel releases it on exit."""

    def __init__(self, path: Path, files: Files) -> None:
        self._files = files
        self._fd = files.open(path / "LOCK", os.O_RDWR | os.O_CREAT)
        try:
            self._take(path)
        except BaseException:
            self.release()
            raise

    def _take(self, path: Path) -> None:
        if not self._files.lock(self._fd):
            holder = self._files.pread(self._fd, 64, 0).decode(errors="replace").strip()
            raise StoreLocked(f"{path} is being written by process {holder or 'unknown'}; stop it first")
        try:
            self._files.ftruncate(self._fd, 0)
            self._files.pwritev(self._fd, [f"{os.getpid()}\n".encode()], 0)
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS:
                raise
            _logger.warning(
                "store.lock_pid_write_failed path=%s: %s", path, error.strerror
            )  # the lock is held regardless

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)


def is_locked(path: Path) -> bool:
    """Whether a live process holds the writer lock of the log at `path`. Never blocks.

    A writer that starts within the same microseconds is refused.
    """
    try:
        fd = os.open(path / "LOCK", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def record_table(flat: array[int]) -> RecordTable:
    """The table of the concatenated fields of references."""
    return np.array(flat, np.int64).view(RECORD_DTYPE)


def refs_of(records: RecordTable) -> Iterator[RecordRef]:
    """The references of a table."""
    return map(RecordRef._make, records.tolist())


def encode_records(records: RecordTable) -> bytes:
    """The index of a footer: one column after the other."""
    return b"".join(records[name].astype(code).tobytes() for name, code in _COLUMNS)


def decode_records(segment: int, payload: Buffer, count: int) -> RecordTable:
    """The inverse of `encode_records`. Raises StoreCorrupt if the payload does not hold `count` records."""
    if len(payload) != count * _ROW_BYTES:
        raise StoreCorrupt(f"an index of {len(payload)} bytes for {count} records")
    records, at = np.zeros(count, RECORD_DTYPE), 0
    records["segment"] = segment
    for name, code in _COLUMNS:
        records[name] = np.frombuffer(payload, code, count, at)
        at += count * np.dtype(code).itemsize
    return records


@dataclass(frozen=True, eq=False)
class Footer:
    """The footer of a sealed segment.

    Attributes:
        summary: bytes of the log's owner; None if the footer is damaged and was rebuilt by a scan.
        end: end of its records and start of the index, in bytes.
        next_sequence: number of the first record after it; numbers in between may be missing.
        size: of the file, in bytes.
    """

    records: RecordTable
    summary: bytes | None
    end: int
    first_sequence: int
    next_sequence: int
    size: int

    def gaps(self, name: SegmentName) -> Iterator[Damage]:
        """Byte ranges between its records that hold no record."""
        offset = self.records["offset"]
        starts = np.append(offset, self.end)
        padded = RECORD_HEADER_BYTES + (self.records["length"] + 7) // 8 * 8
        stops = np.append(SEGMENT_HEADER_BYTES, offset + padded)
        before = np.append(self.first_sequence, self.records["sequence"] + 1)
        for at in np.flatnonzero(starts > stops):
            start, length = int(stops[at]), int(starts[at] - stops[at])
            yield Damage(name.number, start, length, "no whole record", int(before[at]), name.generation)


def encode_footer(name: SegmentName, records: RecordTable, summary: bytes, end: int, sequences: range) -> list[Buffer]:
    """The bytes that seal a segment whose records end at `end`.

    Args:
        sequences: from the segment's first number to the first number after it.
    """
    index = _framed(name, INDEX_KIND, encode_records(records), end, sequences.stop)
    summary_at = end + sum(map(len, index))
    framed = _framed(name, SUMMARY_KIND, summary, summary_at, sequences.stop)
    size = summary_at + sum(map(len, framed)) + TRAILER_BYTES
    body = _TRAILER.pack(
        TRAILER_MAGIC,
        FORMAT_VERSION,
        len(records),
        end,
        summary_at,
        sequences.start,
        sequences.stop,
        size,
        0,
    )
    crc = positional_crc(body, name.number, name.generation, size - TRAILER_BYTES)
    return [*index, *framed, body + _CRC.pack(crc)]


def _framed(name: SegmentName, kind: int, payload: bytes, offset: int, sequence: int) -> list[Buffer]:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise StoreCorrupt(f"a footer of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} fit")
    ref = RecordRef(name.number, offset, len(payload), kind, sequence)
    header = encode_record_header(ref, crc32c(payload), name.generation)
    return [header, payload, bytes(record_bytes(len(payload)) - RECORD_HEADER_BYTES - len(payload))]


def read_footer(files: Files, fd: int, name: SegmentName) -> Footer | None:
    """The footer of a segment's file; None if the file has no trailer, so is not sealed.

    Raises:
        StoreCorrupt: it is sealed and the footer is damaged.
        OSError: it cannot be read.
    """
    at = files.size(fd) - TRAILER_BYTES
    raw = pread_readable(files, fd, TRAILER_BYTES, at) if at >= SEGMENT_HEADER_BYTES else b""
    if len(raw) < TRAILER_BYTES or raw[:8] != TRAILER_MAGIC:
        return None
    crc = positional_crc(raw[: _TRAILER.size], name.number, name.generation, at)
    if crc != _CRC.unpack_from(raw, _TRAILER.size)[0]:
        raise StoreCorrupt("the trailer is damaged")
    _, version, count, end, summary_at, first, following, size, _ = _TRAILER.unpack_from(raw)
    check_version(version, f"segment {name.number}")
    if not SEGMENT_HEADER_BYTES <= end <= summary_at <= at or size != at + TRAILER_BYTES:
        raise StoreCorrupt("the trailer does not fit the file")
    block = memoryview(pread_readable(files, fd, at - end, end))
    records = decode_records(name.number, _unframed(name, INDEX_KIND, block, 0, end), count)
    summary = _unframed(name, SUMMARY_KIND, block, summary_at - end, end)
    return Footer(records, bytes(summary), end, first, following, size)


def read_sound_footer(files: Files, fd: int, name: SegmentName) -> Footer | None:
    """As `read_footer`; None for a damaged footer too, which readers report."""
    try:
        return read_footer(files, fd, name)
    except StoreCorrupt as error:
        _logger.warning("store.footer_damaged segment=%s: %s", name, error)
        return None


def _unframed(name: SegmentName, kind: int, block: memoryview, at: int, start: int) -> memoryview:
    """Payload of the footer record at `at` of `block`; `start` is the offset of `block` in the file."""
    found = decode_record_header(block[at : at + RECORD_HEADER_BYTES], name.number, name.generation, start + at)
    what = {INDEX_KIND: "index", SUMMARY_KIND: "summary"}[kind]
    if found is None or found[0].kind != kind:
        raise StoreCorrupt(f"the header of the {what} is damaged")
    payload = block[at + RECORD_HEADER_BYTES : at + RECORD_HEADER_BYTES + found[0].length]
    if len(payload) != found[0].length or crc32c(payload) != found[1]:
        raise StoreCorrupt(f"the {what} is damaged")
    return payload
