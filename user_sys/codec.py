"""Arrays and records as bytes: one format for the local socket, the tunnel and the store. Nothing is ever pickled.

A *packet* is one contiguous buffer::

    magic 'USP1' | u32 header length | msgpack header | zero padding to 64 | array bytes, each padded to 64

The header holds a typed record (a `msgspec.Struct`) and, for each array, name, dtype, shape, offset and length. Offsets
count from the start of the packet, so that arrays are read in place. All numbers are little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from user_sys.errors import WireError

Array = np.ndarray[Any, np.dtype[Any]]
Record = TypeVar("Record", bound=msgspec.Struct)

MAGIC = b"USP1"
ALIGN_BYTES = 64
MAX_HEADER_BYTES = 1 << 20
MAX_PACKET_BYTES = 1 << 30
MAX_DIMENSIONS = 8
DTYPES = frozenset("bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64".split())

_PREFIX = struct.Struct("<4sI")


class _ArrayEntry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


class _Header(msgspec.Struct, frozen=True, array_like=True):
    record: msgspec.Raw
    arrays: tuple[_ArrayEntry, ...]


def _aligned(n: int) -> int:
    return -(-n // ALIGN_BYTES) * ALIGN_BYTES


def _header(record: bytes, arrays: Mapping[str, Array], start: int) -> tuple[bytes, int]:
    entries, offset = [], start
    for name, array in arrays.items():
        entries.append(_ArrayEntry(name, array.dtype.name, array.shape, offset, array.nbytes))
        offset = _aligned(offset + array.nbytes)
    return msgspec.msgpack.encode(_Header(msgspec.Raw(record), tuple(entries))), offset


def encode_packet(record: msgspec.Struct, arrays: Mapping[str, Array]) -> bytes:
    """Packs a typed record and named C-contiguous (or copyable) arrays into one buffer.

    Raises:
        WireError: an array's dtype is not one of `DTYPES`.
    """
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise WireError(f"{name}: dtype {array.dtype} does not travel; use one of {sorted(DTYPES)}")
    raw = msgspec.msgpack.encode(record)
    # Offsets are part of the header and change its length: start from a bound that the header cannot exceed.
    start = _aligned(_PREFIX.size + len(_header(raw, arrays, MAX_PACKET_BYTES)[0]))
    header, total = _header(raw, arrays, start)
    packet = bytearray(total)
    _PREFIX.pack_into(packet, 0, MAGIC, len(header))
    packet[_PREFIX.size : _PREFIX.size + len(header)] = header
    offset = start
    for array in arrays.values():
        if array.nbytes:
            target = np.frombuffer(packet, array.dtype, array.size, offset).reshape(array.shape)
            np.copyto(target, array)
        offset = _aligned(offset + array.nbytes)
    return bytes(packet)


def decode_packet(packet: bytes | memoryview, kind: type[Record]) -> tuple[Record, dict[str, Array]]:
    """The record and read-only views of its arrays, which share memory with `packet`.

    Every length is checked before it is used; nothing is allocated for an array.

    Raises:
        WireError: bad magic, a header that does not decode as `kind`, or an array outside the packet.
    """
    view = memoryview(packet).cast("B").toreadonly()
    if not _PREFIX.size <= len(view) <= MAX_PACKET_BYTES:
        raise WireError(f"a packet of {len(view)} bytes; allowed are {_PREFIX.size} to {MAX_PACKET_BYTES}")
    magic, length = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise WireError(f"not a packet: it starts with {bytes(magic)!r}")
    if length > min(MAX_HEADER_BYTES, len(view) - _PREFIX.size):
        raise WireError(f"header of {length} bytes in a packet of {len(view)}")
    try:
        header = msgspec.msgpack.decode(view[_PREFIX.size : _PREFIX.size + length], type=_Header)
        record = msgspec.msgpack.decode(header.record, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"packet header does not decode as {kind.__name__}: {error}") from None
    return record, {entry.name: _array(view, entry) for entry in header.arrays}


def _array(view: memoryview, entry: _ArrayEntry) -> Array:
    if entry.dtype not in DTYPES:
        raise WireError(f"{entry.name!r}: dtype {entry.dtype!r} is not allowed")
    dtype = np.dtype(entry.dtype)
    if len(entry.shape) > MAX_DIMENSIONS or any(n < 0 for n in entry.shape):
        raise WireError(f"{entry.name!r}: shape {entry.shape} is not allowed")
    size = math.prod(entry.shape)
    if size * dtype.itemsize != entry.length:
        raise WireError(f"{entry.name!r}: {entry.length} bytes do not hold {entry.shape} of {dtype}")
    if entry.offset < 0 or entry.offset % ALIGN_BYTES or entry.offset + entry.length > len(view):
        raise WireError(f"{entry.name!r}: bytes {entry.offset}+{entry.length} lie outside the packet of {len(view)}")
    return np.frombuffer(view, dtype, size, entry.offset if size else 0).reshape(entry.shape)
