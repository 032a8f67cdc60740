"""What stands at a sealed segment's end: the index of its records, its owner's summary, and the trailer."""

from __future__ import annotations

import logging
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from user_sys.errors import StoreCorrupt
from user_sys.store.files import Buffer, Files, write_all
from user_sys.store.frame import (
    FORMAT_VERSION,
    INDEX_KIND,
    MAX_PAYLOAD_BYTES,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    SUMMARY_KIND,
    Damage,
    RecordRef,
    check_version,
    decode_record_header,
    encode_record_header,
    place_crc,
    record_bytes,
)
from user_sys.store.segments import SegmentName

TRAILER_MAGIC = b"USEREND\n"
TRAILER_BYTES = 64
# magic, version, records, index at, summary at, first sequence, next sequence, bytes of the file, zero
_TRAILER = struct.Struct("<8sIIQQQQQI")
_CRC = struct.Struct("<I")
_COLUMNS = (("offset", "<u8"), ("sequence", "<u8"), ("length", "<u4"), ("schema", "<u4"), ("kind", "<u2"))
_ROW_BYTES = sum(np.dtype(code).itemsize for _, code in _COLUMNS)

Column = npt.NDArray[np.int64]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Records:
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

    def select(self, mask: npt.NDArray[np.bool_]) -> Records:
        """Those where `mask` is true."""
        columns = (self.offset, self.length, self.kind, self.sequence, self.schema)
        return Records(self.segment, *(column[mask] for column in columns))

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

    records: Records
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


def encode_footer(name: SegmentName, records: Records, summary: bytes, end: int, sequences: range) -> list[Buffer]:
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
    crc = place_crc(body, name.number, name.generation, size - TRAILER_BYTES)
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


def copy_footer(files: Files, path: Path, name: SegmentName, footer: Sequence[Buffer]) -> None:
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
    """What `copy_footer` kept for the segment; None where that is missing, torn or damaged. Raises OSError."""
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
        if at < 0 or place_crc(raw[: _TRAILER.size], name.number, name.generation, at) != checksum:
            raise StoreCorrupt("the trailer is damaged")
        check_version(version, f"segment {name.number}")
        if not SEGMENT_HEADER_BYTES <= trailer.end <= trailer.summary_at <= at:
            raise StoreCorrupt("the trailer does not fit the file")
        return trailer

    def footer(self, name: SegmentName, block: memoryview) -> Footer:
        """`block`: what stands between the records and the trailer. Raises StoreCorrupt: it is damaged."""
        records = Records.decode(name.number, _unframed(name, INDEX_KIND, block, 0, self.end), self.records)
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
