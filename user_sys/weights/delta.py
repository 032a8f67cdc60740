"""The difference of two states, exact: which bits of which values changed.

A tensor that did not change costs nothing, so of a policy of which only an adapter or a head is trained only that part
travels. One with few changed values is a list of gaps and of the changed bits (old XOR new); one with many travels
whole. The streams are compressed with zstd where that pays. On the wire a difference is a packet (`user_sys.codec`).

Changed values are found by comparing 64 bits at a time, slice by slice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import zstandard

from user_sys.codec import MAX_PACKET_BYTES, Array, decode_packet, encode_packet, open_packet
from user_sys.errors import WireError
from user_sys.weights.records import Codec
from user_sys.weights.state import SLICE_BYTES, Breathe, State, at_once, dtype_name, dtype_of, raw_bytes, slices

MOST_CHANGED = 0.5
"""A tensor of which a larger share of values changed travels whole."""
ZSTD_LEVEL = 1
PAYS_BELOW = 0.95  # of the size without compression
_SAMPLE_BYTES = 64 << 10  # of a whole tensor, to see whether compressing it pays
_GAPS: tuple[np.dtype[Any], ...] = (np.dtype("<u1"), np.dtype("<u2"))


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. `changes` counts the entries of a ``sparse`` one; `zipped` names the streams that are compressed."""

    name: str
    kind: Literal["sparse", "whole"]
    dtype: str
    shape: tuple[int, ...]
    changes: int = 0
    gap_bytes: int = 1
    zipped: tuple[str, ...] = ()


class _Header(msgspec.Struct, frozen=True, array_like=True):
    parts: tuple[_Part, ...]


def encode_delta(base: State, new: State, most_bytes: int, breathe: Breathe = at_once) -> tuple[Codec, bytes] | None:
    """What makes `new` of `base`, and whether it is ``parts`` only.

    None when names, dtypes or shapes differ, when no packet holds it, or as soon as it is clear that it takes more than
    `most_bytes`. Tensors that travel whole count with their full size, as they do in a full parcel, however well they
    compress.
    """
    former = {entry.name: entry for entry in base.entries}
    if [(e.name, e.dtype, e.shape) for e in base.entries] != [(e.name, e.dtype, e.shape) for e in new.entries]:
        return None
    most_bytes = min(most_bytes, MAX_PACKET_BYTES)
    parts: list[_Part] = []
    streams: dict[str, Array] = {}
    for entry in new.entries:
        if entry.digest != former[entry.name].digest:
            part, found = _encode_tensor(entry.name, base.tensors[entry.name], new.tensors[entry.name], breathe)
            streams |= {f"{len(parts)}.{stream}": content for stream, content in found.items()}
            parts.append(part)
            most_bytes -= new.tensors[entry.name].nbytes if part.kind == "whole" else _size(found)
            if most_bytes < 0:
                return None
    codec: Codec = "delta" if any(part.kind == "sparse" for part in parts) else "parts"
    packet = _packet(parts, streams)
    return None if packet is None else (codec, packet)


def encode_parts(new: State, names: Collection[str], breathe: Breathe = at_once) -> bytes | None:
    """The tensors `names` of `new`, whole; None when no packet holds them."""
    parts: list[_Part] = []
    streams: dict[str, Array] = {}
    for name in sorted(names):
        part, found = _encode_whole(name, new.tensors[name])
        streams[f"{len(parts)}.whole"] = found["whole"]
        parts.append(part)
        breathe(new.tensors[name].nbytes)
    return _packet(parts, streams)


def _packet(parts: Sequence[_Part], streams: Mapping[str, Array]) -> bytes | None:
    """None where it is more than a packet may be: nobody could apply it."""
    packet = encode_packet(_Header(tuple(parts)), streams)
    try:
        open_packet(packet)
    except WireError:
        return None
    return packet


def apply_delta(
    tensors: Mapping[str, Array], payload: bytes | memoryview, breathe: Breathe = at_once
) -> tuple[dict[str, Array], set[str]]:
    """`tensors` changed as `payload` says, and the names of those that it touched; the given ones stay as they are.

    Raises:
        WireError: not a difference, or of other tensors. Nothing is allocated beyond the size of a tensor.
    """
    header, streams = decode_packet(payload, _Header)
    names = {part.name for part in header.parts}
    if len(names) < len(header.parts) or any(s.dtype != np.uint8 or s.ndim != 1 for s in streams.values()):
        raise WireError("a difference that names a tensor twice, or whose streams are no bytes")
    changed = dict(tensors)
    for index, part in enumerate(header.parts):
        base = changed.get(part.name)
        if base is None or (dtype_name(base.dtype), base.shape) != (part.dtype, part.shape):
            raise WireError(f"a difference of {part.name!r}, {part.dtype} {part.shape}, which the base does not have")
        found = {name: streams.get(f"{index}.{name}", np.empty(0, np.uint8)) for name in ("gaps", "bits", "whole")}
        changed[part.name] = _patched(base, part, found) if part.kind == "sparse" else _whole(part, found["whole"])
        breathe(base.nbytes)
    return changed, names


def changed_values(base: Array, new: Array, most: int, breathe: Breathe = at_once) -> Array | None:
    """Indices, ascending, of the values whose bits differ in two arrays of one dtype; None: they are more than `most`.

    Two contiguous arrays of the same size; values of 1, 2, 4 or 8 bytes.
    """
    width = base.itemsize
    bits = np.dtype(f"<u{width}")
    old, fresh = base.reshape(-1).view(bits), new.reshape(-1).view(bits)
    found: list[Array] = []
    count = 0
    for part in slices(old.size, SLICE_BYTES // width):
        indices = _changed_in(old[part], fresh[part], 8 // width)
        count += indices.size
        if count > most:
            return None
        if indices.size:
            found.append(indices + part.start)
        breathe((part.stop - part.start) * width)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _changed_in(old: Array, new: Array, per_word: int) -> Array:
    """Compares whole words first: most of them are equal."""
    whole = old.size - old.size % per_word
    words = np.flatnonzero(old[:whole].view(np.uint64) != new[:whole].view(np.uint64))
    candidates = (words[:, None] * per_word + np.arange(per_word)).reshape(-1)
    if whole < old.size:
        candidates = np.concatenate((candidates, np.arange(whole, old.size)))
    differ: Array = old[candidates] != new[candidates]
    return np.asarray(candidates[differ])


def _encode_tensor(name: str, base: Array, new: Array, breathe: Breathe) -> tuple[_Part, dict[str, Array]]:
    indices = changed_values(base, new, int(MOST_CHANGED * base.size), breathe)
    sparse = None if indices is None else _encode_sparse(name, base, new, indices)
    if sparse is not None and _size(sparse[1]) < PAYS_BELOW * new.nbytes:
        return sparse
    return _encode_whole(name, new)


def _encode_whole(name: str, new: Array) -> tuple[_Part, dict[str, Array]]:
    whole = raw_bytes(new)
    sample, zipped = whole[:_SAMPLE_BYTES], ()
    if len(_zip(sample)) < PAYS_BELOW * sample.size:
        whole, zipped = _zip(whole), ("whole",)  # type: ignore[assignment]
    return _Part(name, "whole", dtype_name(new.dtype), new.shape, zipped=zipped), {"whole": whole}


def _size(streams: Mapping[str, Array]) -> int:
    return sum(stream.size for stream in streams.values())


def _encode_sparse(name: str, base: Array, new: Array, indices: Array) -> tuple[_Part, dict[str, Array]]:
    bits = np.dtype(f"<u{base.itemsize}")
    flipped = base.reshape(-1).view(bits)[indices] ^ new.reshape(-1).view(bits)[indices]
    advances = np.diff(indices, prepend=-1)
    gap = _best_gap(advances, base.itemsize)
    gaps, positions = _with_fillers(advances, gap)
    full = np.zeros(gaps.size, bits)
    full[positions] = flipped
    planes = np.ascontiguousarray(full.view(np.uint8).reshape(-1, base.itemsize).T).reshape(-1)
    streams = {"gaps": gaps.view(np.uint8), "bits": planes}
    zipped = {stream: _zip(content) for stream, content in streams.items()}
    pays = tuple(stream for stream in streams if zipped[stream].size < PAYS_BELOW * streams[stream].size)
    part = _Part(name, "sparse", dtype_name(new.dtype), new.shape, gaps.size, gap.itemsize, pays)
    return part, streams | {stream: zipped[stream] for stream in pays}


def _best_gap(advances: Array, width: int) -> np.dtype[Any]:
    """The dtype of gaps that makes the list the shortest."""

    def size(gap: np.dtype[Any]) -> int:
        fillers = int(((advances - 1) >> (8 * gap.itemsize)).sum())
        return (fillers + advances.size) * (gap.itemsize + width)

    return min(_GAPS, key=size)


def _with_fillers(advances: Array, gap: np.dtype[Any]) -> tuple[Array, Array]:
    """Gaps of one small dtype, and where among them the changes are.

    An entry moves on by its gap + 1. A distance too large for the dtype is bridged by entries in which no bit changes.
    """
    reach = 1 << (8 * gap.itemsize)
    fillers = (advances - 1) // reach
    positions = np.cumsum(fillers + 1) - 1
    gaps = np.full(int(positions[-1]) + 1 if positions.size else 0, reach - 1, gap)
    gaps[positions] = advances - reach * fillers - 1
    return gaps, positions


def _patched(base: Array, part: _Part, streams: Mapping[str, Array]) -> Array:
    width = base.itemsize
    if not 0 <= part.changes <= base.size or part.gap_bytes not in (1, 2):
        raise WireError(f"{part.name!r}: {part.changes} changes of {base.size} values")
    gaps = _unzip(part, "gaps", streams, part.changes * part.gap_bytes).view(f"<u{part.gap_bytes}")
    planes = _unzip(part, "bits", streams, part.changes * width)
    bits = np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1).view(f"<u{width}")
    indices = np.cumsum(gaps, dtype=np.int64) + np.arange(part.changes)
    if indices.size and indices[-1] >= base.size:
        raise WireError(f"{part.name!r}: a change beyond its {base.size} values")
    patched = base.copy()
    patched.reshape(-1).view(f"<u{width}")[indices] ^= bits
    return patched


def _whole(part: _Part, stream: Array) -> Array:
    dtype = dtype_of(part.dtype)
    size = int(np.prod(part.shape, dtype=np.int64)) * dtype.itemsize
    content = _unzip(part, "whole", {"whole": stream}, size)
    return np.array(content).view(dtype).reshape(part.shape)


def _zip(content: Array) -> Array:
    return np.frombuffer(zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(content.data), np.uint8)


def _unzip(part: _Part, stream: str, streams: Mapping[str, Array], size: int) -> Array:
    content = streams[stream]
    if stream in part.zipped:
        content = _inflated(part.name, content, size)
    if content.size != size:
        raise WireError(f"{part.name!r}: {content.size} bytes of {stream}; there must be {size}")
    return content


def _inflated(name: str, content: Array, size: int) -> Array:
    try:
        # zstandard trusts the size that a frame states over its own limit: look at it before anything is allocated.
        stated = zstandard.frame_content_size(content.data)
        if stated != size:
            raise WireError(f"{name!r}: a stream of {stated} bytes; there must be {size}")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(content.data, max_output_size=size), np.uint8)
    except zstandard.ZstdError as error:
        raise WireError(f"{name!r}: a damaged stream: {error}") from None
