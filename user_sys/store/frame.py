"""The bytes of a log: segment headers, record frames, and the scan that finds every whole record.

docs/store-format.md has the layout byte by byte. The frame knows nothing of what a payload means.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from crc32c import crc32c

from user_sys.errors import StoreVersion
from user_sys.store.files import Files

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

    def belongs(self, name: tuple[int, int, int], log_id: bytes) -> bool:
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
        raise StoreVersion(
            f"{what} is in format {version}, written by {age} program; this one reads format {FORMAT_VERSION}: "
            "read it with the program that wrote it, and export it from there"
        )


def record_bytes(payload_bytes: int) -> int:
    """Bytes that a record takes in its segment: header, payload, padding to 8."""
    return RECORD_HEADER_BYTES + -(-payload_bytes // ALIGN_BYTES) * ALIGN_BYTES


def aligned(offset: int) -> int:
    """The first place at or after `offset` at which a record may begin."""
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def place_crc(body: bytes | memoryview, number: int, generation: int, offset: int) -> int:
    """CRC-32C of `body` that is valid at this place only."""
    return int(crc32c(body, crc32c(_PLACE.pack(number, generation, offset))))


def encode_record_header(ref: RecordRef, payload_crc: int, generation: int = 0) -> bytes:
    """The 32 bytes that stand before the payload at ``ref.offset``."""
    segment, offset, length, kind, sequence, schema = ref
    body = _PLACED.pack(segment, generation, offset, RECORD_MAGIC, kind, 0, length, payload_crc, sequence, schema)
    return body[_PLACE.size :] + _CRC.pack(crc32c(body))  # as `place_crc`


def decode_record_header(
    raw: bytes | memoryview, number: int, generation: int, offset: int
) -> tuple[RecordRef, int] | None:
    """The record that `raw` announces and its payload's CRC, or None where no valid header stands there."""
    if len(raw) < RECORD_HEADER_BYTES or raw[: len(RECORD_MAGIC)] != RECORD_MAGIC:
        return None
    if place_crc(raw[: _RECORD.size], number, generation, offset) != _CRC.unpack_from(raw, _RECORD.size)[0]:
        return None
    _, kind, _, length, payload_crc, sequence, schema = _RECORD.unpack_from(raw)
    if length > MAX_PAYLOAD_BYTES:
        return None
    return RecordRef(number, offset, length, kind, sequence, schema), payload_crc


class _Window:
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
        window = _Window(self._files, self._fd)
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

    def _header(self, window: _Window, offset: int) -> tuple[RecordRef, int] | None:
        return decode_record_header(window.get(offset, RECORD_HEADER_BYTES), self.number, self.generation, offset)

    def _whole(self, window: _Window, offset: int) -> RecordRef | None:
        """The record at `offset` if its header, its payload and its sequence number are right."""
        found = self._header(window, offset)
        if found is None or found[0].sequence < self.sequence:
            return None
        ref, payload_crc = found
        payload = window.get(offset + RECORD_HEADER_BYTES, ref.length)
        return ref if len(payload) == ref.length and crc32c(payload) == payload_crc else None

    def _resynchronise(self, window: _Window) -> RecordRef | None:
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
                return self._whole(_Window(self._files, self._fd), self.end) or ref

    def unfinished(self) -> bool:
        """Whether the bytes after `end` can only be an append that was cut short, and so were never acknowledged."""
        window, size = _Window(self._files, self._fd), self._files.size(self._fd)
        raw = window.get(self.end, RECORD_HEADER_BYTES)
        if len(raw) < RECORD_HEADER_BYTES:
            return True
        announced = self._header(window, self.end)
        if announced is not None:
            return self.end + RECORD_HEADER_BYTES + announced[0].length > size
        return not any(any(window.get(at, READ_AHEAD_BYTES)) for at in range(self.end, size, READ_AHEAD_BYTES))
