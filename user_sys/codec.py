"""Packets: records and arrays as bytes, in one format for the local socket, the tunnel and the store.

A *packet* is one contiguous buffer::

    magic 'USP2' | u32 record length | u32 layout length | record | layout | padding to 64 | arrays, each padded to 64

The record is a `msgspec.Struct` in msgpack. The layout is a msgpack list of ``[name, dtype, shape]``, one for each
array. It alone determines the place of each array, so that arrays cannot overlap; the packet ends with the last one.
All chunks of a robot have the same layout, so the parsed layout is cached. Padding is zero; numbers are little-endian.
Nothing is ever pickled. The module also has the checksum of arrays in memory, and the size check of JPEG files.
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
    """CRC-32C of contiguous bytes. It holds the GIL for up to `GIL_HELD_MAX_BYTES`, which takes at most 0.1 ms.

    `crc32c` by default releases the GIL from 32 KiB on. If another thread is busy, it then waits milliseconds for the
    GIL after microseconds of work. For larger inputs, which may be mapped files, it releases the GIL.
    """
    return crc32c(body, 0, 0 if len(body) <= GIL_HELD_MAX_BYTES else -1)


MAX_JPEG_PIXELS = 1 << 25  # 8K; a header of a few bytes can claim 65,535 x 65,535 pixels, which need 13 GB


def jpeg_size(file: bytes | memoryview) -> tuple[int, int]:
    """Height and width in pixels from the header of a JPEG file, without decoding it.

    Raises:
        WireError: not a JPEG file, or a picture of more than `MAX_JPEG_PIXELS`.
    """
    import simplejpeg  # optional: robots without cameras do not install it

    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(file)
    except (ValueError, KeyError) as error:  # KeyError: an unknown colour subsampling, for example 4:4:1
        raise WireError(f"a frame is not a readable JPEG file: {error!r}") from None
    check_jpeg_size(height, width)
    return height, width


def check_jpeg_size(height: int, width: int) -> None:
    """Raises WireError for a picture of more than `MAX_JPEG_PIXELS`."""
    if height * width > MAX_JPEG_PIXELS:
        raise WireError(f"a frame of {width} x {height} pixels; the limit is {MAX_JPEG_PIXELS} pixels")


Array = np.ndarray[Any, np.dtype[Any]]
Record = TypeVar("Record", bound=msgspec.Struct)

MAGIC = b"USP2"
BF16 = np.dtype([("bfloat16", "<u2")])
"""numpy has no bfloat16. A named field holds its bits, so that they are not mistaken for integers."""
ALIGN_BYTES = 64
MAX_HEADER_BYTES = 1 << 20  # of record and of layout, each
MAX_PACKET_BYTES = 1 << 30
MAX_DIMENSIONS = 8
MAX_CACHED_LAYOUTS = 256
MAX_CACHED_LAYOUT_BYTES = 4096  # longer layouts are not cached, so that a peer cannot fill the memory
DTYPES = frozenset("bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64".split())

_PREFIX = struct.Struct("<4sII")


class _LayoutEntry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


_LAYOUT_DECODER = msgspec.msgpack.Decoder(tuple[_LayoutEntry, ...])


class ArrayEntry(NamedTuple):
    """One array of a layout; `offset` counts from the start of the first array."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class PacketLayout:
    """The entries of a packet's arrays. Compared by identity; packets with equal layouts mostly share the object.

    Attributes:
        arrays: in order, with unique names.
        size_bytes: of all arrays and their padding.
        fingerprint: CRC32C of the layout's bytes.
    """

    arrays: tuple[ArrayEntry, ...]
    size_bytes: int
    fingerprint: int


class ParsedPacket(NamedTuple):
    """A packet with checked lengths. Its arrays are within `view`; its record is not decoded yet."""

    view: memoryview
    record: memoryview
    layout: PacketLayout
    arrays_offset: int

    def array(self, entry: ArrayEntry) -> Array:
        """A read-only view of one array of the layout."""
        return np.ndarray(entry.shape, entry.dtype, self.view, self.arrays_offset + entry.offset)

    def array_bytes(self, entry: ArrayEntry) -> bytes:
        """A copy of the bytes of one array. For few bytes, methods of `bytes` are faster than numpy."""
        start = self.arrays_offset + entry.offset
        return bytes(self.view[start : start + math.prod(entry.shape) * entry.dtype.itemsize])

    def arrays(self) -> dict[str, Array]:
        """Read-only views of all arrays by name."""
        return {entry.name: self.array(entry) for entry in self.layout.arrays}


def _aligned(n: int) -> int:
    return -(-n // ALIGN_BYTES) * ALIGN_BYTES


def encode_packet(record: msgspec.Struct, arrays: Mapping[str, Array]) -> bytes:
    """Packs a typed record and named C-contiguous (or copyable) arrays into one buffer.

    Raises:
        WireError: an array's dtype is not one of `DTYPES`.
    """
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise WireError(f"{name}: dtype {array.dtype} is not supported; use one of {sorted(DTYPES)}")
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
    """Locates record and arrays in `packet`. Checks every length before its use; copies no array.

    Raises:
        WireError: bad magic, a layout that does not decode, or one that does not end where the packet ends.
    """
    view = memoryview(packet) if type(packet) is bytes else memoryview(packet).cast("B").toreadonly()
    if not _PREFIX.size <= len(view) <= MAX_PACKET_BYTES:
        raise WireError(f"a packet has {len(view)} bytes; it must have {_PREFIX.size} to {MAX_PACKET_BYTES}")
    magic, record, layout = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise WireError(f"not a packet: it starts with {bytes(magic)!r}")
    middle, end = _PREFIX.size + record, _PREFIX.size + record + layout
    if max(record, layout) > MAX_HEADER_BYTES or end > len(view):
        raise WireError(f"a packet of {len(view)} bytes has a record of {record} and a layout of {layout} bytes")
    raw = bytes(view[middle:end])
    found = _parse_layout_cached(raw) if layout <= MAX_CACHED_LAYOUT_BYTES else _parse_layout(raw)
    start = _aligned(end)
    if start + found.size_bytes != len(view):
        raise WireError(f"a packet of {len(view)} bytes has arrays of {found.size_bytes} bytes from {start} on")
    return ParsedPacket(view, view[_PREFIX.size : middle], found, start)


def decode_packet(packet: bytes | memoryview, kind: type[Record]) -> tuple[Record, dict[str, Array]]:
    """The record and read-only views of its arrays, which share memory with `packet`.

    Raises:
        WireError: as `parse_packet`, or a record that does not decode as `kind`.
    """
    parts = parse_packet(packet)
    return decode_packet_record(parts, kind), parts.arrays()


def decode_packet_record(parts: ParsedPacket, kind: type[Record]) -> Record:
    """The record of a parsed packet. Raises WireError if it does not decode as `kind`."""
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
        decoded = _LAYOUT_DECODER.decode(raw)
    except DECODE_ERRORS as error:
        raise WireError(f"packet layout does not decode: {error}") from None
    entries, offset = list[ArrayEntry](), 0
    for each in decoded:
        entries.append(_array_entry(each, offset))
        offset += _aligned(math.prod(each.shape) * entries[-1].dtype.itemsize)
    if offset > MAX_PACKET_BYTES or len({entry.name for entry in entries}) < len(entries):
        raise WireError(f"packet layout of {len(entries)} arrays and {offset} bytes: too long, or a duplicate name")
    return PacketLayout(tuple(entries), offset, crc32c(raw))


_parse_layout_cached = lru_cache(maxsize=MAX_CACHED_LAYOUTS)(_parse_layout)


def _array_entry(entry: _LayoutEntry, offset: int) -> ArrayEntry:
    if entry.dtype not in DTYPES:
        raise WireError(f"{entry.name[:80]!r}: dtype {entry.dtype[:80]!r} is not allowed")
    if len(entry.shape) > MAX_DIMENSIONS or any(not 0 <= n <= MAX_PACKET_BYTES for n in entry.shape):
        raise WireError(f"{entry.name[:80]!r}: shape {entry.shape[:9]} is not allowed")
    dtype = np.dtype(entry.dtype)
    size_if_not_empty = math.prod(n or 1 for n in entry.shape) * dtype.itemsize
    if size_if_not_empty > MAX_PACKET_BYTES:  # numpy rejects such empty arrays too
        raise WireError(f"{entry.name[:80]!r}: shape {entry.shape} is too large, also for an empty array")
    return ArrayEntry(entry.name, dtype, entry.shape, offset)
