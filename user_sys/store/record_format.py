"""The bytes of a log: segment headers, record frames, and the scan that finds every whole record.

docs/store-format.md has the layout byte by byte. The frame knows nothing of what a payload means.

A log's folder: the names of its segment files, which of them count, and its lock.

What stands at a sealed segment's end: the index of its records, its owner's summary, and the trailer.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from user_sys.errors import StoreCorrupt, StoreLocked, StoreVersionMismatch
from user_sys.store.files import NO_SPACE_ERRNOS, OS_FILES, Buffer, Files, write_all

FORMAT_VERSION = 2
SEGMENT_MAGIC = b"USERLOG\n"
RECORD_MAGIC = b"\xf5UR2"
ALIGN_BYTES = 8
SEGMENT_HEADER_BYTES = 64
RECORD_HEADER_BYTES = 32
MAX_PAYLOAD_BYTES = 1 << 30
MAX_SEGMENT_BYTES = 1 << 31  # where a segment's records end is written in 32 bits, and one record may go beyond this
READ_AHEAD_BYTES = 4 << 20

RESERVED_KINDS = 0xFF00  # from here on kinds are the log's own, and their records have no sequence number of their own
INDEX_KIND = 0xFF01
SUMMARY_KIND = 0xFF02

# magic, version, bytes of the segment before, number, first sequence, unix ns, log id, generation, span
_SEGMENT = struct.Struct("<8sIIQQQ16sHH")
_RECORD = struct.Struct("<4sHHIIQI")  # magic, kind, flags, payload bytes, payload CRC, sequence, schema
_PLACE = struct.Struct("<QQQ")  # number, generation, offset: covered by the header's CRC, so it holds in its place only
_PLACED = struct.Struct("<QQQ4sHHIIQI")  # the two in one: nothing in between is padded
_CRC = struct.Struct("<I")


class RecordRef(NamedTuple):
    """A record and where it was found. Its sequence number is what identifies it for ever.

    Attributes:
        offset: of its header in the segment, in bytes.
        length: of its payload, in bytes.
        schema: the fingerprint that its owner gave.
    """

    segment: int
    offset: int
    length: int
    kind: int = 0
    sequence: int = -1
    schema: int = 0


@dataclass(frozen=True)
class Damage:
    """Bytes that are not what was written: `length` of them from `offset` in a segment's file.

    Attributes:
        segment: its number; -1 for the manifest.
        sequence: of the record that is lost, where that is known; else -1.
        last_sequence: of the last one, if several are lost together; else -1.
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
        previous_bytes: where the records of the segment before it end; 0 where that is not known.
        log_id: 16 random bytes, the same in all segments of one log.
        generation: how often the records were rewritten by compaction.
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
        """Whether it is that of the file with this number, span and generation, in this log."""
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
    """The header, or None where it is damaged.

    Raises:
        StoreVersion: whole, but in another format version.
    """
    if len(raw) < SEGMENT_HEADER_BYTES or crc32c(raw[: _SEGMENT.size]) != _CRC.unpack_from(raw, _SEGMENT.size)[0]:
        return None
    magic, version, previous, number, first_sequence, created, log_id, generation, span = _SEGMENT.unpack_from(raw)
    if magic != SEGMENT_MAGIC:
        return None
    check_version(version, f"segment {number}")
    return SegmentHeader(number, first_sequence, previous, created, log_id, generation, span)


def check_version(version: int, what: str) -> None:
    """Raises StoreVersion where `what` was written in another format version."""
    if version != FORMAT_VERSION:
        age = "an older" if version < FORMAT_VERSION else "a newer"
        raise StoreVersionMismatch(
            f"{what} is in format {version}, written by {age} program; this one reads format {FORMAT_VERSION}: "
            "read it with the program that wrote it, and export it from there"
        )


def record_bytes(payload_bytes: int) -> int:
    """Bytes that a record takes in its segment: header, payload, padding to 8."""
    return RECORD_HEADER_BYTES + -(-payload_bytes // ALIGN_BYTES) * ALIGN_BYTES


def align_up(offset: int) -> int:
    """The first place at or after `offset` at which a record may begin."""
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def positional_crc(body: bytes | memoryview, number: int, generation: int, offset: int) -> int:
    """CRC-32C of `body` that is valid at this place only."""
    return int(crc32c(body, crc32c(_PLACE.pack(number, generation, offset))))


def encode_record_header(ref: RecordRef, payload_crc: int, generation: int = 0) -> bytes:
    """The 32 bytes that stand before the payload at ``ref.offset``."""
    segment, offset, length, kind, sequence, schema = ref
    body = _PLACED.pack(segment, generation, offset, RECORD_MAGIC, kind, 0, length, payload_crc, sequence, schema)
    return body[_PLACE.size :] + _CRC.pack(crc32c(body))  # as `positional_crc`


def decode_record_header(
    raw: bytes | memoryview, number: int, generation: int, offset: int
) -> tuple[RecordRef, int] | None:
    """The record that `raw` announces and its payload's CRC, or None where no valid header stands there."""
    if len(raw) < RECORD_HEADER_BYTES or raw[: len(RECORD_MAGIC)] != RECORD_MAGIC:
        return None
    if positional_crc(raw[: _RECORD.size], number, generation, offset) != _CRC.unpack_from(raw, _RECORD.size)[0]:
        return None
    _, kind, _, length, payload_crc, sequence, schema = _RECORD.unpack_from(raw)
    if length > MAX_PAYLOAD_BYTES:
        return None
    return RecordRef(number, offset, length, kind, sequence, schema), payload_crc


class _ReadAheadWindow:
    """Reads a file by pread with read-ahead. Not by mmap: a recovering writer may cut off the bytes being looked at."""

    def __init__(self, files: Files, fd: int) -> None:
        self._files, self._fd, self._start, self._block = files, fd, 0, b""

    def get(self, offset: int, size: int) -> memoryview:
        """The bytes at `offset`: `size` of them, fewer at the file's end."""
        low = offset - self._start
        if low < 0 or low + size > len(self._block):
            self._block = self._files.pread(self._fd, max(size, READ_AHEAD_BYTES), offset)
            self._start, low = offset, 0
        return memoryview(self._block)[low : low + size]

    def find_magic(self, offset: int) -> int:
        """The first aligned place of a record's magic at or after `offset`; -1 where there is none."""
        while True:
            block = self._files.pread(self._fd, READ_AHEAD_BYTES, offset)
            at = block.find(RECORD_MAGIC)
            while at >= 0 and (offset + at) % ALIGN_BYTES:
                at = block.find(RECORD_MAGIC, at + 1)
            if at >= 0:
                return offset + at
            if len(block) < READ_AHEAD_BYTES:
                return -1
            offset += READ_AHEAD_BYTES - ALIGN_BYTES


class SegmentScan:
    """Walks one segment from `end`, an offset at which a record may begin.

    Iterating yields each whole record in order, and a `Damage` for bytes between two of them. It stops at the last
    whole record, or where the footer of a sealed segment begins; `end` is then the offset after it. What follows may be
    an append in progress, a torn tail, a footer or damage: the caller knows which. Iterating again goes on from there
    and sees what was appended since.

    Attributes:
        sequence: the number that the next record has at least.
        stop: where the segment's records are known to end, once the caller knows it.
        at_footer: the scan has come to a footer.
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
        window = _ReadAheadWindow(self._files, self._fd)
        while self.end < self.stop and (ref := self._whole(window, self.end) or self._resynchronise(window)):
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
        """What lies from `end` to `stop`, which is known to hold no whole record."""
        return Damage(self.number, self.end, stop - self.end, reason, self.sequence, self.generation)

    def _header(self, window: _ReadAheadWindow, offset: int) -> tuple[RecordRef, int] | None:
        return decode_record_header(window.get(offset, RECORD_HEADER_BYTES), self.number, self.generation, offset)

    def _whole(self, window: _ReadAheadWindow, offset: int) -> RecordRef | None:
        """The record at `offset` if its header, its payload and its sequence number are right."""
        found = self._header(window, offset)
        if found is None or found[0].sequence < self.sequence:
            return None
        ref, payload_crc = found
        payload = window.get(offset + RECORD_HEADER_BYTES, ref.length)
        return ref if len(payload) == ref.length and crc32c(payload) == payload_crc else None

    def _resynchronise(self, window: _ReadAheadWindow) -> RecordRef | None:
        """The next whole record after damage at `end`."""
        offset = self.end
        while True:
            announced = self._header(window, offset)
            # A valid header says how far its damaged payload goes: nothing in there is mistaken for a record.
            offset = window.find_magic(offset + (record_bytes(announced[0].length) if announced else ALIGN_BYTES))
            if offset < 0:
                return None
            if ref := self._whole(window, offset):
                # A live writer may have finished the record at `end` since we looked: what is whole now is not damage.
                return self._whole(_ReadAheadWindow(self._files, self._fd), self.end) or ref

    def is_unfinished(self) -> bool:
        """Whether the bytes after `end` can only be an append that was cut short, and so were never acknowledged."""
        window, size = _ReadAheadWindow(self._files, self._fd), self._files.size(self._fd)
        raw = window.get(self.end, RECORD_HEADER_BYTES)
        if len(raw) < RECORD_HEADER_BYTES:
            return True
        announced = self._header(window, self.end)
        if announced is not None:
            return self.end + RECORD_HEADER_BYTES + announced[0].length > size
        return not any(any(window.get(at, READ_AHEAD_BYTES)) for at in range(self.end, size, READ_AHEAD_BYTES))


SEGMENT_SUFFIX = ".seg"
FOOTER_SUFFIX = ".footer"
TEMPORARY_SUFFIX = ".tmp"
_NAME = re.compile(r"(\d{10})(?:-(\d{5})\.(\d{5}))?\.seg")
_logger = logging.getLogger(__name__)


class SegmentName(NamedTuple):
    """A segment file, as its name tells: it holds the records of `span` segment numbers from `number` on."""

    number: int
    span: int = 1
    generation: int = 0

    @property
    def stop(self) -> int:
        """The number after the last that it stands for."""
        return self.number + self.span

    @property
    def footer_copy(self) -> str:
        """The name of the file that holds its footer once more."""
        return str(self).removesuffix(SEGMENT_SUFFIX) + FOOTER_SUFFIX

    def __str__(self) -> str:
        rewritten = f"-{self.span:05d}.{self.generation:05d}" if self.generation else ""
        return f"{self.number:010d}{rewritten}{SEGMENT_SUFFIX}"


def parse_segment_name(name: str) -> SegmentName | None:
    """What a file's name says; None where it is no segment's."""
    match = _NAME.fullmatch(name)
    return SegmentName(int(match[1]), int(match[2] or 1), int(match[3] or 0)) if match else None


def resolve_generations(names: Iterable[SegmentName]) -> tuple[list[SegmentName], list[SegmentName]]:
    """The files that make up the log, in order, and those whose place a later generation has taken.

    A rewritten file gets its name only once it is whole and durable, so the highest generation always counts: with the
    manifest, with an old one, and with none.
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
    """Every segment file in the folder, in no order; none where `path` is no folder."""
    try:
        names = files.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [parsed for name in names if (parsed := parse_segment_name(name)) is not None]


def remove_segment(files: Files, path: Path, name: SegmentName) -> None:
    """Deletes a segment's file and the copy of its footer. Raises OSError."""
    files.unlink(path / str(name))
    with contextlib.suppress(FileNotFoundError):
        files.unlink(path / name.footer_copy)


def segment_numbers(path: Path, files: Files = OS_FILES) -> list[int]:
    """The number of each of the log's segments, ascending; empty where `path` is no log."""
    return [name.number for name in resolve_generations(list_segments(path, files))[0]]


def segment_path(path: Path, number: int, span: int = 1, generation: int = 0) -> Path:
    """The file of a segment of the log at `path`."""
    return path / str(SegmentName(number, span, generation))


def read_segment_header(files: Files, fd: int) -> SegmentHeader | None:
    return decode_segment_header(files.pread(fd, SEGMENT_HEADER_BYTES, 0))


class WriterLock:
    """An exclusive lock on ``<log>/LOCK``, which names its holder; the kernel lets go of it when the process dies."""

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
            _logger.warning("store.lock-unnamed path=%s: %s", path, error.strerror)  # the lock itself holds

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)


def is_locked(path: Path) -> bool:
    """Whether a living process has the lock of the log at `path`. Never waits; a writer that starts within the same
    microseconds is refused."""
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


TRAILER_MAGIC = b"USEREND\n"
TRAILER_BYTES = 64
# magic, version, records, index at, summary at, first sequence, next sequence, bytes of the file, zero
_TRAILER = struct.Struct("<8sIIQQQQQI")
_COLUMNS = (("offset", "<u8"), ("sequence", "<u8"), ("length", "<u4"), ("schema", "<u4"), ("kind", "<u2"))
_ROW_BYTES = sum(np.dtype(code).itemsize for _, code in _COLUMNS)

Column = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RecordTable:
    """Some records of one segment in ascending order, as columns of n int64 each, with the meaning of `RecordRef`'s."""

    segment: int
    offset: Column
    length: Column
    kind: Column
    sequence: Column
    schema: Column

    @classmethod
    def of(cls, segment: int, refs: Iterable[RecordRef]) -> Self:
        flat = array("q")
        for ref in refs:
            flat.extend(ref)
        return cls.from_flat(segment, flat)

    @classmethod
    def from_flat(cls, segment: int, flat: array[int]) -> Self:
        """From the fields of one reference after the other."""
        table = np.array(flat, np.int64).reshape(-1, len(RecordRef._fields))
        _, offset, length, kind, sequence, schema = table.T.copy()
        return cls(segment, offset, length, kind, sequence, schema)

    def __len__(self) -> int:
        return len(self.offset)

    def __getitem__(self, index: int) -> RecordRef:
        columns = (self.offset, self.length, self.kind, self.sequence, self.schema)
        return RecordRef(self.segment, *(int(column[index]) for column in columns))

    def __iter__(self) -> Iterator[RecordRef]:
        columns = (self.offset, self.length, self.kind, self.sequence, self.schema)
        return (RecordRef(self.segment, *row) for row in zip(*(column.tolist() for column in columns), strict=True))

    def select(self, mask: npt.NDArray[np.bool_]) -> RecordTable:
        """Those where `mask` is true."""
        columns = (self.offset, self.length, self.kind, self.sequence, self.schema)
        return RecordTable(self.segment, *(column[mask] for column in columns))

    def find(self, sequence: int) -> RecordRef | None:
        """The record of that number."""
        at = int(np.searchsorted(self.sequence, sequence))
        return self[at] if at < len(self) and self.sequence[at] == sequence else None

    def encode(self) -> bytes:
        return b"".join(getattr(self, name).astype(code).tobytes() for name, code in _COLUMNS)

    @classmethod
    def decode(cls, segment: int, payload: Buffer, count: int) -> Self:
        """From what `encode` made. Raises StoreCorrupt where that is not `count` records long."""
        if len(payload) != count * _ROW_BYTES:
            raise StoreCorrupt(f"an index of {len(payload)} bytes for {count} records")
        columns, at = {}, 0
        for name, code in _COLUMNS:
            columns[name] = np.frombuffer(payload, code, count, at).astype(np.int64)
            at += columns[name].size * np.dtype(code).itemsize
        return cls(segment, **columns)


@dataclass(frozen=True, eq=False)
class Footer:
    """What a sealed segment says of itself.

    Attributes:
        summary: of its owner; None where the footer is damaged and this was made by a scan.
        end: where its records end and the index begins, in bytes.
        next_sequence: the number of the first record after it; numbers between may be missing.
        size: of the file, in bytes.
    """

    records: RecordTable
    summary: bytes | None
    end: int
    first_sequence: int
    next_sequence: int
    size: int

    def gaps(self, name: SegmentName) -> Iterator[Damage]:
        """The places between its records that hold no record."""
        starts = np.append(self.records.offset, self.end)
        padded = RECORD_HEADER_BYTES + (self.records.length + 7) // 8 * 8
        stops = np.append(SEGMENT_HEADER_BYTES, self.records.offset + padded)
        before = np.append(self.first_sequence, self.records.sequence + 1)
        for at in np.flatnonzero(starts > stops):
            start, length = int(stops[at]), int(starts[at] - stops[at])
            yield Damage(name.number, start, length, "no whole record", int(before[at]), name.generation)


def encode_footer(name: SegmentName, records: RecordTable, summary: bytes, end: int, sequences: range) -> list[Buffer]:
    """The bytes that seal a segment whose records end at `end`; the file's end is theirs.

    Args:
        sequences: from the segment's first number to the first number after it.
    """
    index = _framed(name, INDEX_KIND, records.encode(), end, sequences.stop)
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
    """The footer of a segment's file; None where it does not end in a trailer, which is to say that it is not sealed.

    Raises:
        StoreCorrupt: it is sealed, and the footer is damaged.
        OSError: it cannot be read.
    """
    size = files.size(fd)
    at = size - TRAILER_BYTES
    raw = files.pread(fd, TRAILER_BYTES, at) if at >= SEGMENT_HEADER_BYTES else b""
    if raw[:8] != TRAILER_MAGIC:
        return None
    trailer = _Trailer.decode(name, raw, at)
    if trailer.size != size:
        raise StoreCorrupt("the trailer does not fit the file")
    return trailer.footer(name, memoryview(files.pread(fd, at - trailer.end, trailer.end)))


def write_footer_copy(files: Files, path: Path, name: SegmentName, footer: Sequence[Buffer]) -> None:
    """Keeps a second footer in a file beside the segment, which tells what a segment held that has lost its end.

    It is not synced, and only logged if it cannot be written: no record depends on it.
    """
    try:
        fd = files.open(path / name.footer_copy, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(files, fd, footer, 0)
        finally:
            files.close(fd)
    except OSError as error:
        _logger.warning("store.footer-not-copied path=%s segment=%s: %s", path, name, error)


def read_footer_copy(files: Files, path: Path, name: SegmentName) -> Footer | None:
    """What `write_footer_copy` kept for the segment; None where that is missing, torn or damaged. Raises OSError."""
    try:
        fd = files.open(path / name.footer_copy, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        raw = memoryview(files.pread(fd, files.size(fd), 0))
    finally:
        files.close(fd)
    block = raw[: -TRAILER_BYTES or None]
    try:
        trailer = _Trailer.decode(name, bytes(raw[len(block) :]))
        if trailer.size - trailer.end != len(raw):
            raise StoreCorrupt("the trailer does not fit the file")
        return trailer.footer(name, block)
    except StoreCorrupt as error:
        _logger.warning("store.footer-copy-damaged path=%s segment=%s: %s", path, name, error)
        return None


class _Trailer(NamedTuple):
    records: int
    end: int
    summary_at: int
    first_sequence: int
    next_sequence: int
    size: int

    @classmethod
    def decode(cls, name: SegmentName, raw: bytes, at: int = -1) -> Self:
        """Args:
        at: where it stands in the segment's file; -1 where it says so itself.

        Raises:
            StoreCorrupt: it is damaged.
        """
        if len(raw) < TRAILER_BYTES:
            raise StoreCorrupt("the trailer is damaged")
        _, version, *fields, _ = _TRAILER.unpack_from(raw)
        trailer = cls(*fields)
        at = trailer.size - TRAILER_BYTES if at < 0 else at
        checksum = int.from_bytes(raw[_TRAILER.size :], "little")
        if at < 0 or positional_crc(raw[: _TRAILER.size], name.number, name.generation, at) != checksum:
            raise StoreCorrupt("the trailer is damaged")
        check_version(version, f"segment {name.number}")
        if not SEGMENT_HEADER_BYTES <= trailer.end <= trailer.summary_at <= at:
            raise StoreCorrupt("the trailer does not fit the file")
        return trailer

    def footer(self, name: SegmentName, block: memoryview) -> Footer:
        """`block`: what stands between the records and the trailer. Raises StoreCorrupt: it is damaged."""
        records = RecordTable.decode(name.number, _unframed(name, INDEX_KIND, block, 0, self.end), self.records)
        summary = _unframed(name, SUMMARY_KIND, block, self.summary_at - self.end, self.end)
        return Footer(records, bytes(summary), self.end, self.first_sequence, self.next_sequence, self.size)


def _unframed(name: SegmentName, kind: int, block: memoryview, at: int, start: int) -> memoryview:
    """The payload of the footer's record at `at` of `block`, which begins at `start` in the file."""
    found = decode_record_header(block[at : at + RECORD_HEADER_BYTES], name.number, name.generation, start + at)
    what = {INDEX_KIND: "index", SUMMARY_KIND: "summary"}[kind]
    if found is None or found[0].kind != kind:
        raise StoreCorrupt(f"the header of the {what} is damaged")
    payload = block[at + RECORD_HEADER_BYTES : at + RECORD_HEADER_BYTES + found[0].length]
    if len(payload) != found[0].length or crc32c(payload) != found[1]:
        raise StoreCorrupt(f"the {what} is damaged")
    return payload
