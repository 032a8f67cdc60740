"""The bytes of a log: segment headers, record frames, and the scan that finds every whole record.

docs/store-format.md has the layout byte by byte. The frame knows nothing of what a payload means.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from crc32c import crc32c

from user_sys.errors import StoreVersion

FORMAT_VERSION = 1
SEGMENT_MAGIC = b"USERLOG\n"
RECORD_MAGIC = b"\xf5UR1"
ALIGN_BYTES = 8
SEGMENT_HEADER_BYTES = 64
RECORD_HEADER_BYTES = 32
MAX_PAYLOAD_BYTES = 1 << 30
READ_AHEAD_BYTES = 4 << 20

_SEGMENT = struct.Struct("<8sIIQQQ16s4x")  # magic, version, header bytes, number, first sequence, unix ns, log id
_RECORD = struct.Struct("<4sHHIIQI")  # magic, kind, flags, payload bytes, payload CRC, sequence, schema
_PLACE = struct.Struct(
    "<QQ"
)  # segment, offset: the header's CRC covers them, so that a record is valid in its place only
_CRC = struct.Struct("<I")


class RecordRef(NamedTuple):
    """Where a record is. `offset` is that of its header in the segment; `length` is the payload's, in bytes."""

    segment: int
    offset: int
    length: int
    kind: int = 0
    sequence: int = -1


@dataclass(frozen=True)
class Damage:
    """Bytes that hold no whole record: `length` of them from `offset` in `segment`."""

    segment: int
    offset: int
    length: int
    reason: str


@dataclass(frozen=True)
class SegmentHeader:
    """The first 64 bytes of a segment. `log_id` is 16 random bytes, the same in all segments of one log."""

    number: int
    first_sequence: int
    created_unix_ns: int
    log_id: bytes

    def encode(self) -> bytes:
        body = _SEGMENT.pack(
            SEGMENT_MAGIC,
            FORMAT_VERSION,
            SEGMENT_HEADER_BYTES,
            self.number,
            self.first_sequence,
            self.created_unix_ns,
            self.log_id,
        )
        return body + _CRC.pack(crc32c(body))


def decode_segment_header(raw: bytes, number: int) -> SegmentHeader | None:
    """The header of segment `number`, or None where it is damaged or belongs to another segment.

    Raises:
        StoreVersion: whole, but in another format version.
    """
    if len(raw) < SEGMENT_HEADER_BYTES or crc32c(raw[: _SEGMENT.size]) != _CRC.unpack_from(raw, _SEGMENT.size)[0]:
        return None
    magic, version, _, written, first_sequence, created, log_id = _SEGMENT.unpack_from(raw)
    if magic != SEGMENT_MAGIC:
        return None
    if version != FORMAT_VERSION:
        raise StoreVersion(f"segment {number} is in format {version}; this program reads format {FORMAT_VERSION}")
    return SegmentHeader(written, first_sequence, created, log_id) if written == number else None


def record_bytes(payload_bytes: int) -> int:
    """Bytes that a record takes in its segment: header, payload, padding to 8."""
    return RECORD_HEADER_BYTES + -(-payload_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _header_crc(body: bytes | memoryview, segment: int, offset: int) -> int:
    return int(crc32c(body, crc32c(_PLACE.pack(segment, offset))))


def encode_record_header(ref: RecordRef, payload: bytes, schema: int) -> bytes:
    """The 32 bytes that stand before `payload` at ``ref.offset``."""
    body = _RECORD.pack(RECORD_MAGIC, ref.kind, 0, len(payload), crc32c(payload), ref.sequence, schema)
    return body + _CRC.pack(_header_crc(body, ref.segment, ref.offset))


def decode_record_header(raw: bytes | memoryview, segment: int, offset: int) -> tuple[RecordRef, int] | None:
    """The record that `raw` announces and its payload's CRC, or None where no valid header stands there."""
    if len(raw) < RECORD_HEADER_BYTES or raw[: len(RECORD_MAGIC)] != RECORD_MAGIC:
        return None
    if _header_crc(raw[: _RECORD.size], segment, offset) != _CRC.unpack_from(raw, _RECORD.size)[0]:
        return None
    _, kind, _, length, payload_crc, sequence, _ = _RECORD.unpack_from(raw)
    if length > MAX_PAYLOAD_BYTES:
        return None
    return RecordRef(segment, offset, length, kind, sequence), payload_crc


class _Window:
    """Reads a file by pread with read-ahead. Not by mmap: a recovering writer may cut off the bytes being looked at."""

    def __init__(self, fd: int) -> None:
        self._fd, self._start, self._block = fd, 0, b""

    def get(self, offset: int, size: int) -> memoryview:
        """The bytes at `offset`: `size` of them, fewer at the file's end."""
        low = offset - self._start
        if low < 0 or low + size > len(self._block):
            self._block, self._start, low = os.pread(self._fd, max(size, READ_AHEAD_BYTES), offset), offset, 0
        return memoryview(self._block)[low : low + size]

    def find_magic(self, offset: int) -> int:
        """The first aligned place of a record's magic at or after `offset`; -1 where there is none."""
        while True:
            block = os.pread(self._fd, READ_AHEAD_BYTES, offset)
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
    whole record; `end` is then the offset after it. What follows may be an append in progress, a torn tail, or damage:
    the caller knows which. Iterating again goes on from there and sees what was appended since.
    """

    def __init__(self, fd: int, segment: int, end: int = SEGMENT_HEADER_BYTES, sequence: int = 0) -> None:
        self.segment, self.end, self.sequence = segment, end, sequence
        self._fd = fd

    def __iter__(self) -> Iterator[RecordRef | Damage]:
        window = _Window(self._fd)
        while (ref := self._whole(window, self.end)) or (ref := self._resynchronise(window)):
            if ref.offset > self.end:
                yield Damage(self.segment, self.end, ref.offset - self.end, "no whole record")
            self.end = ref.offset + record_bytes(ref.length)
            self.sequence = ref.sequence + 1
            yield ref

    def _whole(self, window: _Window, offset: int) -> RecordRef | None:
        """The record at `offset` if its header, its payload and its sequence number are right."""
        found = decode_record_header(window.get(offset, RECORD_HEADER_BYTES), self.segment, offset)
        if found is None or found[0].sequence < self.sequence:
            return None
        ref, payload_crc = found
        payload = window.get(offset + RECORD_HEADER_BYTES, ref.length)
        return ref if len(payload) == ref.length and crc32c(payload) == payload_crc else None

    def _resynchronise(self, window: _Window) -> RecordRef | None:
        """The next whole record after damage at `end`."""
        offset = self.end
        while True:
            announced = decode_record_header(window.get(offset, RECORD_HEADER_BYTES), self.segment, offset)
            # A valid header says how far its damaged payload goes: nothing in there is mistaken for a record.
            offset = window.find_magic(offset + (record_bytes(announced[0].length) if announced else ALIGN_BYTES))
            if offset < 0:
                return None
            if ref := self._whole(window, offset):
                # A live writer may have finished the record at `end` since we looked: what is whole now is not damage.
                return self._whole(_Window(self._fd), self.end) or ref

    def unfinished(self) -> bool:
        """Whether the bytes after `end` can only be an append that was cut short, and so were never acknowledged."""
        window = _Window(self._fd)
        raw = window.get(self.end, RECORD_HEADER_BYTES)
        if len(raw) < RECORD_HEADER_BYTES:
            return True
        size = os.fstat(self._fd).st_size
        announced = decode_record_header(raw, self.segment, self.end)
        if announced is not None:
            return self.end + RECORD_HEADER_BYTES + announced[0].length > size
        return not any(any(window.get(at, READ_AHEAD_BYTES)) for at in range(self.end, size, READ_AHEAD_BYTES))
