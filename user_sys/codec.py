"""CRC-32C of bytes that are in memory.

JPEG files from elsewhere: how large a picture claims to be is looked at before anything is made to hold it.

Arrays and records as bytes: one format for the local socket, the tunnel and the store. Nothing is ever pickled.

A *packet* is one contiguous buffer::

    magic 'USP2' | u32 record length | u32 layout length | record | layout | padding to 64 | arrays, each padded to 64

The record is a `msgspec.Struct` in msgpack. The layout is a msgpack list of ``[name, dtype, shape]``, one for each
array; it alone says where each array lies, so that no two can overlap, and the packet ends where the last one does. It
holds nothing that changes from one chunk of a robot to the next: a layout seen before costs a look-up. Padding is of
zeros, all numbers are little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from crc32c import crc32c

from hal.decode_errors import DECODE_ERRORS
from user_sys.errors import WireError

GIL_HELD_MAX_BYTES = 1 << 20


def checksum(body: bytes | bytearray | memoryview) -> int:
    """CRC-32C of contiguous bytes; keeps the interpreter for up to `GIL_HELD_MAX_BYTES` of them, which takes 0.1 ms at
    most.

    `crc32c` itself lets go of it from 32 KiB on, to have it back, beside a busy thread, only after that one's time
    slice: milliseconds for a sum of microseconds. Bytes of a file that is mapped may have to be read first; for those
    letting go is right.
    """
    return crc32c(body, 0, 0 if len(body) <= GIL_HELD_MAX_BYTES else -1)


MAX_JPEG_PIXELS = 1 << 25  # 8K; a header of a few bytes may claim 65,535 x 65,535, which is 13 GB


def jpeg_size(file: bytes | memoryview) -> tuple[int, int]:
    """Height and width in pixels that a JPEG file claims; nothing is decoded.

    Raises:
        WireError: no JPEG file, or a picture of more than `MAX_JPEG_PIXELS`.
    """
    import simplejpeg  # here, because who sees no pictures does not install it

    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(file)
    except (ValueError, KeyError) as error:  # KeyError: colours at a resolution that it has no name for, as 4:4:1
        raise WireError(f"a frame is no JPEG file that can be read: {error!r}") from None
    check_jpeg_size(height, width)
    return height, width


def check_jpeg_size(height: int, width: int) -> None:
    """Raises WireError: a picture of more than `MAX_JPEG_PIXELS`."""
    if height * width > MAX_JPEG_PIXELS:
        raise WireError(f"a frame that claims {width} x {height} pixels; the limit is {MAX_JPEG_PIXELS}")


Array = np.ndarray[Any, np.dtype[Any]]
Record = TypeVar("Record", bound=msgspec.Struct)

MAGIC = b"USP2"
ALIGN_BYTES = 64
MAX_HEADER_BYTES = 1 << 20  # of record and of layout, each
MAX_PACKET_BYTES = 1 << 30
MAX_DIMENSIONS = 8
MAX_CACHED_LAYOUTS = 256
MAX_CACHED_LAYOUT_BYTES = 4096  # longer ones are parsed each time: what strangers send cannot fill the memory
DTYPES = frozenset("bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64".split())

_PREFIX = struct.Struct("<4sII")


class _LayoutEntry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


_LAYOUT_DECODER = msgspec.msgpack.Decoder(tuple[_LayoutEntry, ...])


class ArrayEntry(NamedTuple):
    """One array of a packet; `offset` counts from the first array."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class PacketLayout:
    """Where a packet's arrays lie. Compared by identity; packets of one layout mostly share the object.

    Attributes:
        arrays: in order, names unique.
        size_bytes: of all arrays with their padding.
        fingerprint: CRC32C of the layout's bytes.
    """

    arrays: tuple[ArrayEntry, ...]
    size_bytes: int
    fingerprint: int


class ParsedPacket(NamedTuple):
    """A packet whose lengths are all checked: the record's bytes are not decoded yet, the arrays lie within `view`."""

    view: memoryview
    record: memoryview
    layout: PacketLayout
    arrays_offset: int

    def array(self, place: ArrayEntry) -> Array:
        """A read-only view of one array of the layout."""
        return np.ndarray(place.shape, place.dtype, self.view, self.arrays_offset + place.offset)

    def array_bytes(self, place: ArrayEntry) -> bytes:
        """A copy of the bytes of one array of the layout: of a few, Python's own methods are faster than numpy's."""
        start = self.arrays_offset + place.offset
        return bytes(self.view[start : start + math.prod(place.shape) * place.dtype.itemsize])

    def arrays(self) -> dict[str, Array]:
        """Read-only views of all arrays by name."""
        return {place.name: self.array(place) for place in self.layout.arrays}


def _aligned(n: int) -> int:
    return -(-n // ALIGN_BYTES) * ALIGN_BYTES


def encode_packet(record: msgspec.Struct, arrays: Mapping[str, Array]) -> bytes:
    """Packs a typed record and named C-contiguous (or copyable) arrays into one buffer.

    Raises:
        WireError: an array's dtype is not one of `DTYPES`.
    """
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise WireError(f"{name}: dtype {array.dtype} does not travel; use one of {sorted(DTYPES)}")
    raw = msgspec.msgpack.encode(record)
    layout = msgspec.msgpack.encode([(name, array.dtype.name, array.shape) for name, array in arrays.items()])
    offset = _aligned(_PREFIX.size + len(raw) + len(layout))
    packet = bytearray(offset + sum(_aligned(array.nbytes) for array in arrays.values()))
    _PREFIX.pack_into(packet, 0, MAGIC, len(raw), len(layout))
    packet[_PREFIX.size : _PREFIX.size + len(raw) + len(layout)] = raw + layout
    for array in arrays.values():
        if array.nbytes:
            np.copyto(np.ndarray(array.shape, array.dtype, packet, offset), array)
        offset += _aligned(array.nbytes)
    return bytes(packet)


def parse_packet(packet: bytes | memoryview) -> ParsedPacket:
    """Finds record and arrays in `packet`. Every length is checked before it is used; no array is copied.

    Raises:
        WireError: bad magic, a layout that does not decode, or one that does not end where the packet ends.
    """
    view = memoryview(packet) if type(packet) is bytes else memoryview(packet).cast("B").toreadonly()
    if not _PREFIX.size <= len(view) <= MAX_PACKET_BYTES:
        raise WireError(f"a packet of {len(view)} bytes; allowed are {_PREFIX.size} to {MAX_PACKET_BYTES}")
    magic, record, layout = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise WireError(f"not a packet: it starts with {bytes(magic)!r}")
    middle, end = _PREFIX.size + record, _PREFIX.size + record + layout
    if max(record, layout) > MAX_HEADER_BYTES or end > len(view):
        raise WireError(f"record of {record} and layout of {layout} bytes in a packet of {len(view)}")
    raw = bytes(view[middle:end])
    found = _parse_layout_cached(raw) if layout <= MAX_CACHED_LAYOUT_BYTES else _parse_layout(raw)
    start = _aligned(end)
    if start + found.size_bytes != len(view):
        raise WireError(f"arrays of {found.size_bytes} bytes from {start} on in a packet of {len(view)}")
    return ParsedPacket(view, view[_PREFIX.size : middle], found, start)


def decode_packet(packet: bytes | memoryview, kind: type[Record]) -> tuple[Record, dict[str, Array]]:
    """The record and read-only views of its arrays, which share memory with `packet`.

    Raises:
        WireError: as `parse_packet`, or a record that does not decode as `kind`.
    """
    parts = parse_packet(packet)
    return decode_packet_record(parts, kind), parts.arrays()


def decode_packet_record(parts: ParsedPacket, kind: type[Record]) -> Record:
    """The record of an opened packet. Raises WireError: it does not decode as `kind`."""
    try:
        record: Record = _decoder(kind).decode(parts.record)
    except DECODE_ERRORS as error:
        raise WireError(f"packet header does not decode as {kind.__name__}: {error}") from None
    return record


@lru_cache(maxsize=64)
def _decoder(kind: type[Record]) -> msgspec.msgpack.Decoder[Record]:
    return msgspec.msgpack.Decoder(kind)


def _parse_layout(raw: bytes) -> PacketLayout:
    try:
        entries = _LAYOUT_DECODER.decode(raw)
    except DECODE_ERRORS as error:
        raise WireError(f"packet layout does not decode: {error}") from None
    places, offset = [], 0
    for entry in entries:
        places.append(_array_entry(entry, offset))
        offset += _aligned(math.prod(entry.shape) * places[-1].dtype.itemsize)
    if offset > MAX_PACKET_BYTES or len({place.name for place in places}) < len(places):
        raise WireError(f"packet layout of {len(places)} arrays and {offset} bytes: too long, or a name twice")
    return PacketLayout(tuple(places), offset, crc32c(raw))


_parse_layout_cached = lru_cache(maxsize=MAX_CACHED_LAYOUTS)(_parse_layout)


def _array_entry(entry: _LayoutEntry, offset: int) -> ArrayEntry:
    if entry.dtype not in DTYPES:
        raise WireError(f"{entry.name[:80]!r}: dtype {entry.dtype[:80]!r} is not allowed")
    if len(entry.shape) > MAX_DIMENSIONS or any(not 0 <= n <= MAX_PACKET_BYTES for n in entry.shape):
        raise WireError(f"{entry.name[:80]!r}: shape {entry.shape[:9]} is not allowed")
    dtype = np.dtype(entry.dtype)
    if math.prod(n or 1 for n in entry.shape) * dtype.itemsize > MAX_PACKET_BYTES:  # numpy refuses such empty arrays
        raise WireError(f"{entry.name[:80]!r}: shape {entry.shape} is too large, were it not empty")
    return ArrayEntry(entry.name, dtype, entry.shape, offset)
