"""The difference of two states, exact: which bits of which values changed.

A tensor that did not change costs nothing, so of a policy of which only an adapter or a head is trained only that part
travels. One with few changed values is a list of gaps and of the changed bits (old XOR new); one with many travels
whole. The streams are compressed with zstd where that pays. On the wire a difference is a packet (`user_sys.codec`).

Changed values are found by comparing 64 bits at a time, slice by slice.

Parcels: the bytes that lead to a version, in grains that are checked one by one.

What one end has: manifests and parcels of versions, and the cheapest way from what is held to a version.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import zstandard
from blake3 import blake3

from user_sys.codec import ALIGN_BYTES, MAX_PACKET_BYTES, Array, checksum, decode_packet, encode_packet, parse_packet
from user_sys.errors import WireError
from user_sys.messages import (
    CRC_BYTES,
    MAX_BLOCKS,
    NO_VERSION,
    TENSOR_TABLE,
    PatchCodec,
    PatchInfo,
    Precision,
    SignedRecord,
    TensorEntry,
    WeightsManifest,
)
from user_sys.weights.state import (
    SLICE_BYTES,
    TensorSet,
    YieldHook,
    dtype_name,
    dtype_of,
    encode_tensor_table,
    no_yield,
    raw_bytes,
    slices,
    verify_tensor_set,
)

MAX_CHANGED_FRACTION = 0.5
"""A tensor of which a larger share of values changed travels whole."""
ZSTD_LEVEL = 1
MAX_COMPRESSED_FRACTION = 0.95  # of the size without compression
_SAMPLE_BYTES = 64 << 10  # of a whole tensor, to see whether compressing it pays
_GAPS: tuple[np.dtype[Any], ...] = (np.dtype("<u1"), np.dtype("<u2"))


class _TensorChange(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. `changes` counts the entries of a ``sparse`` one; `zipped` names the streams that are compressed."""

    name: str
    kind: Literal["sparse", "whole"]
    dtype: str
    shape: tuple[int, ...]
    changes: int = 0
    gap_bytes: int = 1
    zipped: tuple[str, ...] = ()


class _DeltaHeader(msgspec.Struct, frozen=True, array_like=True):
    parts: tuple[_TensorChange, ...]


def encode_delta(
    base: TensorSet, new: TensorSet, most_bytes: int, breathe: YieldHook = no_yield
) -> tuple[PatchCodec, bytes] | None:
    """What makes `new` of `base`, and whether it is ``parts`` only.

    None when names, dtypes or shapes differ, when no packet holds it, or as soon as it is clear that it takes more than
    `most_bytes`. Tensors that travel whole count with their full size, as they do in a full parcel, however well they
    compress.
    """
    former = {entry.name: entry for entry in base.entries}
    if [(e.name, e.dtype, e.shape) for e in base.entries] != [(e.name, e.dtype, e.shape) for e in new.entries]:
        return None
    most_bytes = min(most_bytes, MAX_PACKET_BYTES)
    parts: list[_TensorChange] = []
    streams: dict[str, Array] = {}
    for entry in new.entries:
        if entry.digest != former[entry.name].digest:
            part, found = _encode_tensor(entry.name, base.tensors[entry.name], new.tensors[entry.name], breathe)
            streams |= {f"{len(parts)}.{stream}": content for stream, content in found.items()}
            parts.append(part)
            most_bytes -= new.tensors[entry.name].nbytes if part.kind == "whole" else _stream_bytes(found)
            if most_bytes < 0:
                return None
    codec: PatchCodec = "delta" if any(part.kind == "sparse" for part in parts) else "parts"
    packet = _encode_packet(parts, streams)
    return None if packet is None else (codec, packet)


def encode_subset(new: TensorSet, names: Collection[str], breathe: YieldHook = no_yield) -> bytes | None:
    """The tensors `names` of `new`, whole; None when no packet holds them."""
    parts: list[_TensorChange] = []
    streams: dict[str, Array] = {}
    for name in sorted(names):
        part, found = _encode_whole(name, new.tensors[name])
        streams[f"{len(parts)}.whole"] = found["whole"]
        parts.append(part)
        breathe(new.tensors[name].nbytes)
    return _encode_packet(parts, streams)


def _encode_packet(parts: Sequence[_TensorChange], streams: Mapping[str, Array]) -> bytes | None:
    """None where it is more than a packet may be: nobody could apply it."""
    packet = encode_packet(_DeltaHeader(tuple(parts)), streams)
    try:
        parse_packet(packet)
    except WireError:
        return None
    return packet


def apply_delta(
    tensors: Mapping[str, Array], payload: bytes | memoryview, breathe: YieldHook = no_yield
) -> tuple[dict[str, Array], set[str]]:
    """`tensors` changed as `payload` says, and the names of those that it touched; the given ones stay as they are.

    Raises:
        WireError: not a difference, or of other tensors. Nothing is allocated beyond the size of a tensor.
    """
    header, streams = decode_packet(payload, _DeltaHeader)
    names = {part.name for part in header.parts}
    if len(names) < len(header.parts) or any(s.dtype != np.uint8 or s.ndim != 1 for s in streams.values()):
        raise WireError("a difference that names a tensor twice, or whose streams are no bytes")
    changed = dict(tensors)
    for index, part in enumerate(header.parts):
        base = changed.get(part.name)
        if base is None or (dtype_name(base.dtype), base.shape) != (part.dtype, part.shape):
            raise WireError(f"a difference of {part.name!r}, {part.dtype} {part.shape}, which the base does not have")
        found = {name: streams.get(f"{index}.{name}", np.empty(0, np.uint8)) for name in ("gaps", "bits", "whole")}
        changed[part.name] = (
            _apply_sparse(base, part, found) if part.kind == "sparse" else _decode_whole(part, found["whole"])
        )
        breathe(base.nbytes)
    return changed, names


def changed_values(base: Array, new: Array, most: int, breathe: YieldHook = no_yield) -> Array | None:
    """Indices, ascending, of the values whose bits differ in two arrays of one dtype; None: they are more than `most`.

    Two contiguous arrays of the same size; values of 1, 2, 4 or 8 bytes.
    """
    width = base.itemsize
    bits = np.dtype(f"<u{width}")
    old, fresh = base.reshape(-1).view(bits), new.reshape(-1).view(bits)
    found: list[Array] = []
    count = 0
    for part in slices(old.size, SLICE_BYTES // width):
        indices = _changed_in_slice(old[part], fresh[part], 8 // width)
        count += indices.size
        if count > most:
            return None
        if indices.size:
            found.append(indices + part.start)
        breathe((part.stop - part.start) * width)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _changed_in_slice(old: Array, new: Array, per_word: int) -> Array:
    """Compares whole words first: most of them are equal."""
    whole = old.size - old.size % per_word
    words = np.flatnonzero(old[:whole].view(np.uint64) != new[:whole].view(np.uint64))
    candidates = (words[:, None] * per_word + np.arange(per_word)).reshape(-1)
    if whole < old.size:
        candidates = np.concatenate((candidates, np.arange(whole, old.size)))
    differ: Array = old[candidates] != new[candidates]
    return np.asarray(candidates[differ])


def _encode_tensor(name: str, base: Array, new: Array, breathe: YieldHook) -> tuple[_TensorChange, dict[str, Array]]:
    indices = changed_values(base, new, int(MAX_CHANGED_FRACTION * base.size), breathe)
    sparse = None if indices is None else _encode_sparse(name, base, new, indices)
    if sparse is not None and _stream_bytes(sparse[1]) < MAX_COMPRESSED_FRACTION * new.nbytes:
        return sparse
    return _encode_whole(name, new)


def _encode_whole(name: str, new: Array) -> tuple[_TensorChange, dict[str, Array]]:
    whole = raw_bytes(new)
    sample, zipped = whole[:_SAMPLE_BYTES], ()
    if len(_compress(sample)) < MAX_COMPRESSED_FRACTION * sample.size:
        whole, zipped = _compress(whole), ("whole",)  # type: ignore[assignment]
    return _TensorChange(name, "whole", dtype_name(new.dtype), new.shape, zipped=zipped), {"whole": whole}


def _stream_bytes(streams: Mapping[str, Array]) -> int:
    return sum(stream.size for stream in streams.values())


def _encode_sparse(name: str, base: Array, new: Array, indices: Array) -> tuple[_TensorChange, dict[str, Array]]:
    bits = np.dtype(f"<u{base.itemsize}")
    flipped = base.reshape(-1).view(bits)[indices] ^ new.reshape(-1).view(bits)[indices]
    advances = np.diff(indices, prepend=-1)
    gap = _best_gap(advances, base.itemsize)
    gaps, positions = _with_fillers(advances, gap)
    full = np.zeros(gaps.size, bits)
    full[positions] = flipped
    planes = np.ascontiguousarray(full.view(np.uint8).reshape(-1, base.itemsize).T).reshape(-1)
    streams = {"gaps": gaps.view(np.uint8), "bits": planes}
    zipped = {stream: _compress(content) for stream, content in streams.items()}
    pays = tuple(stream for stream in streams if zipped[stream].size < MAX_COMPRESSED_FRACTION * streams[stream].size)
    part = _TensorChange(name, "sparse", dtype_name(new.dtype), new.shape, gaps.size, gap.itemsize, pays)
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


def _apply_sparse(base: Array, part: _TensorChange, streams: Mapping[str, Array]) -> Array:
    width = base.itemsize
    if not 0 <= part.changes <= base.size or part.gap_bytes not in (1, 2):
        raise WireError(f"{part.name!r}: {part.changes} changes of {base.size} values")
    gaps = _read_stream(part, "gaps", streams, part.changes * part.gap_bytes).view(f"<u{part.gap_bytes}")
    planes = _read_stream(part, "bits", streams, part.changes * width)
    bits = np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1).view(f"<u{width}")
    indices = np.cumsum(gaps, dtype=np.int64) + np.arange(part.changes)
    if indices.size and indices[-1] >= base.size:
        raise WireError(f"{part.name!r}: a change beyond its {base.size} values")
    patched = base.copy()
    patched.reshape(-1).view(f"<u{width}")[indices] ^= bits
    return patched


def _decode_whole(part: _TensorChange, stream: Array) -> Array:
    dtype = dtype_of(part.dtype)
    size = int(np.prod(part.shape, dtype=np.int64)) * dtype.itemsize
    content = _read_stream(part, "whole", {"whole": stream}, size)
    return np.array(content).view(dtype).reshape(part.shape)


def _compress(content: Array) -> Array:
    return np.frombuffer(zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(content.data), np.uint8)


def _read_stream(part: _TensorChange, stream: str, streams: Mapping[str, Array], size: int) -> Array:
    content = streams[stream]
    if stream in part.zipped:
        content = _decompress(part.name, content, size)
    if content.size != size:
        raise WireError(f"{part.name!r}: {content.size} bytes of {stream}; there must be {size}")
    return content


def _decompress(name: str, content: Array, size: int) -> Array:
    try:
        # zstandard trusts the size that a frame states over its own limit: look at it before anything is allocated.
        stated = zstandard.frame_content_size(content.data)
        if stated != size:
            raise WireError(f"{name!r}: a stream of {stated} bytes; there must be {size}")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(content.data, max_output_size=size), np.uint8)
    except zstandard.ZstdError as error:
        raise WireError(f"{name!r}: a damaged stream: {error}") from None


BLOCK_BYTES = 64 << 10
TARGET_BLOCKS = 1024
"""A parcel of more grains than these has larger ones, up to `LARGE_BLOCK_BYTES`; and only then more of them."""
LARGE_BLOCK_BYTES = 256 << 10
MAX_DELTA_FRACTION = 0.9
"""A difference that is not smaller than this share of a full parcel is not worth its base."""


@dataclass(frozen=True, eq=False)
class Patch:
    """Its description, and its bytes, which are never changed."""

    info: PatchInfo
    payload: memoryview

    def blocks(self, first: int, count: int) -> memoryview:
        start = first * self.info.block_bytes
        return self.payload[start : start + count * self.info.block_bytes]


def full_patch(state: TensorSet, version: int, breathe: YieldHook = no_yield) -> Patch:
    """Every tensor's bytes, in the order of the manifest, each padded to 64 bytes."""
    total = sum(_pad_to_alignment(tensor.nbytes) for tensor in state.tensors.values())
    payload, offset = np.zeros(max(1, total), np.uint8), 0
    for entry in state.entries:
        content = raw_bytes(state.tensors[entry.name])
        for part in slices(content.size):
            np.copyto(payload[offset + part.start : offset + part.stop], content[part])
            breathe(part.stop - part.start)
        offset += _pad_to_alignment(content.size)
    return _make_patch(state, version, NO_VERSION, b"", "full", payload, breathe)


def delta_patch(
    base_version: int, base: TensorSet, version: int, new: TensorSet, breathe: YieldHook = no_yield
) -> Patch | None:
    """What changed, or None where that does not pay."""
    encoded = encode_delta(base, new, int(MAX_DELTA_FRACTION * new.size_bytes), breathe)
    if encoded is None:
        return None
    codec, payload = encoded
    return _make_patch(new, version, base_version, base.digest, codec, np.frombuffer(payload, np.uint8), breathe)


def subset_patch(
    base_version: int,
    base_digest: bytes,
    version: int,
    new: TensorSet,
    names: Collection[str],
    breathe: YieldHook = no_yield,
) -> Patch | None:
    """The tensors `names`, which are all that changed since `base_version`; None where no packet holds them."""
    payload = encode_subset(new, names, breathe)
    if payload is None:
        return None
    return _make_patch(new, version, base_version, base_digest, "parts", np.frombuffer(payload, np.uint8), breathe)


def table_patch(state: TensorSet, version: int) -> Patch:
    """What the tensors are, and their digests, for a manifest that is without."""
    table = np.frombuffer(encode_tensor_table(state.form, state.entries), np.uint8)
    return _make_patch(state, version, NO_VERSION, b"", TENSOR_TABLE, table, no_yield)


def apply_patches(
    manifest: WeightsManifest,
    patches: Sequence[tuple[PatchInfo, memoryview]],
    base: TensorSet | None,
    breathe: YieldHook = no_yield,
    known_digests: Mapping[str, bytes] | None = None,
) -> TensorSet:
    """The state that `manifest` describes, from parcels that lead to it, one after the other.

    Args:
        hashed: digests, by name, of tensors in the first parcel, where that is a full one (`IncrementalDigests`).
        base: the state that the first of them changes; it stays as it is. None where that is a full one.
            Of which version it is nobody asks where the first is ``parts``: the manifest's digests tell.

    Raises:
        WireError: they do not fit each other, or what comes of them is not what the manifest says.
    """
    tensors = dict(base.tensors) if base is not None else {}
    known = {entry.name: entry.digest for entry in base.entries} if base is not None else {}
    at, at_digest = (NO_VERSION, b"") if base is None else (patches[0][0].base if patches else NO_VERSION, base.digest)
    for info, payload in patches:
        if info.codec == "full":
            tensors, known = _unpack_full(manifest, payload), dict(known_digests or {})
        elif not (
            info.base <= at if info.codec == "parts" else info.base == at and at_digest in (b"", info.base_digest)
        ):
            raise WireError(f"a difference from version {info.base}, but the base is version {at}, or another one")
        else:
            tensors, touched = apply_delta(tensors, payload, breathe)
            known = {name: digest for name, digest in known.items() if name not in touched}
        at, at_digest = info.version, b""
    return verify_tensor_set(manifest, tensors, known, breathe)


def block_size_bytes(size_bytes: int) -> int:
    """The size of the grains of a parcel of so many bytes: a multiple of `BLOCK_BYTES`, of which `MAX_BLOCKS` do."""
    few, most = (-(-size_bytes // (grains * BLOCK_BYTES)) * BLOCK_BYTES for grains in (TARGET_BLOCKS, MAX_BLOCKS))
    return min(few, max(LARGE_BLOCK_BYTES, most))


def is_block_intact(payload: memoryview, info: PatchInfo, grain: int) -> bool:
    """Whether the bytes of one grain are those that were described."""
    expected = int.from_bytes(info.crcs[CRC_BYTES * grain : CRC_BYTES * (grain + 1)], "little")
    return checksum(payload) == expected


def _make_patch(
    state: TensorSet, version: int, base: int, base_digest: bytes, codec: PatchCodec, payload: Array, breathe: YieldHook
) -> Patch:
    grain = block_size_bytes(payload.size)
    crcs = bytearray()
    for part in slices(payload.size, grain):
        crcs += checksum(payload[part].data).to_bytes(CRC_BYTES, "little")
        breathe(part.stop - part.start)
    payload.flags.writeable = False
    name = blake3(msgspec.msgpack.encode((state.digest, version, base, base_digest, codec, payload.size))).digest()
    info = PatchInfo(name, state.form, version, base, base_digest, codec, payload.size, grain, bytes(crcs))
    return Patch(info, payload.data)


class IncrementalDigests:
    """Digests of the tensors in a full parcel, taken while it comes: what has just come is in the cache."""

    def __init__(self, manifest: WeightsManifest, payload: memoryview) -> None:
        """Raises WireError: `payload` has not the size of what `manifest` describes."""
        self.digests: dict[str, bytes] = {}
        self._payload = payload
        self._places = deque(_tensor_slices(manifest, len(payload)))
        self._hasher, self._at = blake3(), 0

    def update(self, end: int, breathe: YieldHook = no_yield) -> None:
        """`payload` is here up to `end`."""
        while self._places:
            entry, place = self._places[0]
            self._hash(slice(max(self._at, place.start), min(end, place.stop)), breathe)
            if end < place.stop:
                return
            self.digests[entry.name] = self._hasher.digest()
            self._places.popleft()
            self._hasher = blake3()

    def _hash(self, place: slice, breathe: YieldHook) -> None:
        for start in range(place.start, place.stop, SLICE_BYTES):
            self._at = min(place.stop, start + SLICE_BYTES)
            self._hasher.update(self._payload[start : self._at])
            breathe(self._at - start)


def _unpack_full(manifest: WeightsManifest, payload: memoryview) -> dict[str, Array]:
    """Views of a full parcel's bytes."""
    content = np.frombuffer(payload, np.uint8)
    return {
        entry.name: content[place].view(dtype_of(entry.dtype)).reshape(entry.shape)
        for entry, place in _tensor_slices(manifest, content.size)
    }


def _tensor_slices(manifest: WeightsManifest, total: int) -> list[tuple[TensorEntry, slice]]:
    """Where each tensor lies in a full parcel of `total` bytes."""
    places, offset = [], 0
    for entry in manifest.tensors:
        size = math.prod(entry.shape) * dtype_of(entry.dtype).itemsize
        if min((*entry.shape, 0)) < 0 or offset + size > total:
            raise WireError(f"weights {manifest.version}: {entry.name!r} lies outside its parcel")
        places.append((entry, slice(offset, offset + size)))
        offset += _pad_to_alignment(size)
    if max(1, offset) != total:
        raise WireError(f"weights {manifest.version}: a full parcel of {total} bytes instead of {offset}")
    return places


def _pad_to_alignment(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


PatchCost = Callable[[PatchInfo], float]


@dataclass(frozen=True)
class UpdatePath:
    """Parcels, one after the other, that lead to a version, and what they cost; none where it is there already."""

    patches: tuple[PatchInfo, ...] = ()
    cost: float = 0.0


def patch_size(info: PatchInfo) -> float:
    """The cost of a parcel where nothing is known but its size."""
    return float(info.size_bytes)


def cheapest_path(
    parcels: Iterable[PatchInfo],
    form: Precision,
    target: int,
    held: Mapping[int, bytes],
    cost: PatchCost = patch_size,
) -> UpdatePath | None:
    """The cheapest way to the tensors of version `target` of `form`, or None where there is none.

    Args:
        held: digest of each version of this form, and of the target's life, that the receiver has; a difference from
            another base is of no use. Who has none takes the newest ``parts``, and no differences in their stead.
    """
    usable = _by_version(p for p in parcels if p.form == form and p.version <= target)
    short = None if held else _shortest_path(_without_subsumed_deltas(usable), target, held, cost)
    return short or _shortest_path(usable, target, held, cost)


def _shortest_path(
    usable: Iterable[PatchInfo], target: int, held: Mapping[int, bytes], cost: PatchCost
) -> UpdatePath | None:
    ways: dict[int, UpdatePath] = {version: UpdatePath() for version in held}
    for info in usable:
        before = _path_to_base(info, ways)
        if before is None or held.get(info.base, info.base_digest) != info.base_digest:
            continue
        total = before.cost + cost(info)
        if total < ways.get(info.version, UpdatePath(cost=math.inf)).cost:
            ways[info.version] = UpdatePath((*before.patches, info), total)
    return ways.get(target)


def _without_subsumed_deltas(usable: Sequence[PatchInfo]) -> list[PatchInfo]:
    """`usable` without the differences up to the newest ``parts`` that change a full parcel."""
    full = [info.version for info in usable if info.codec == "full"]
    anchors = (p for p in reversed(usable) if p.codec == "parts" and any(p.base <= v < p.version for v in full))
    if (anchor := next(anchors, None)) is None:
        return list(usable)
    return [p for p in usable if p.base == NO_VERSION or p.id == anchor.id or p.version > anchor.version]


def _path_to_base(info: PatchInfo, ways: Mapping[int, UpdatePath]) -> UpdatePath | None:
    """The cheapest of `ways` that leads to what a parcel changes."""
    if info.codec == "parts":
        fitting = (way for version, way in ways.items() if info.base <= version < info.version)
        return min(fitting, key=lambda way: way.cost, default=None)
    return UpdatePath() if info.base == NO_VERSION else ways.get(info.base)


def reachable_versions(parcels: Iterable[PatchInfo], form: Precision) -> set[int]:
    """The versions of `form` to whose tensors parcels lead from nothing."""
    found: set[int] = set()
    for info in _by_version(p for p in parcels if p.form == form):
        bases = range(info.base, info.version if info.codec == "parts" else info.base + 1)
        if info.base == NO_VERSION or any(version in bases for version in found):
            found.add(info.version)
    return found


def without_superseded(parcels: Iterable[PatchInfo]) -> list[PatchInfo]:
    """`patches` but for ``parts`` that newer ones stand in for: these change all that they change, and lead further."""
    found, oldest = list[PatchInfo](), dict[Precision, int]()
    for info in sorted(parcels, key=lambda info: info.version, reverse=True):
        if info.codec == "parts":
            if info.base >= oldest.get(info.form, info.version):
                continue
            oldest[info.form] = info.base
        found.append(info)
    return found


def thin_versions(versions: list[int], most: int) -> list[int]:
    """At most `most` of ascending `versions`: the newest, and the older the further apart."""
    kept = list(versions)
    while len(kept) > max(1, most):
        if most < 3:
            kept.pop(0)
            continue
        spans = [(kept[i + 1] - kept[i - 1]) / (kept[-1] - kept[i] + 1) for i in range(1, len(kept) - 1)]
        kept.pop(1 + spans.index(min(spans)))
    return kept


def find_table(parcels: Iterable[PatchInfo], manifest: WeightsManifest) -> PatchInfo | None:
    """The parcel with the table of the tensors of `manifest`; None where there is none."""
    return next(
        (info for info in parcels if info.codec == TENSOR_TABLE and _table_key(info) == _table_key(manifest)), None
    )


def _table_key(told: PatchInfo | WeightsManifest) -> tuple[Precision, int, int]:
    size_bytes = told.table_bytes if isinstance(told, WeightsManifest) else told.size_bytes
    return told.form, told.version, size_bytes


def _by_version(parcels: Iterable[PatchInfo]) -> list[PatchInfo]:
    return sorted((info for info in parcels if info.codec != TENSOR_TABLE), key=lambda info: info.version)


@dataclass
class VersionIndex:
    """Signed manifests by form and version, and parcels by id. One thread changes it; others may look up parcels."""

    manifests: dict[tuple[Precision, int], tuple[WeightsManifest, SignedRecord]] = field(default_factory=dict)
    patches: dict[bytes, Patch] = field(default_factory=dict)

    def patch_infos(self) -> list[PatchInfo]:
        return [parcel.info for parcel in list(self.patches.values())]

    def complete_versions(self) -> list[int]:
        """Those of which everything is there, in one form at least, ascending."""
        return sorted({version for _, version in self._whole()})

    def complete_precisions(self, version: int) -> list[Precision]:
        """The forms in which everything of `version` is there."""
        return [form for form, of in self._whole() if of == version]

    def retain(self, versions: Iterable[int], since: int, parcels: Iterable[bytes] = ()) -> list[Patch]:
        """Drops what is needed neither for one of `complete_versions` nor for a receiver that has `since` or newer.

        Of the others it keeps `patches` (ids), and the tables of the tensors that these lead to.

        Returns the parcels that were dropped.
        """
        infos, needed = self.patch_infos(), set(parcels)
        wanted = set(versions)
        described = wanted | {info.version for info in infos if info.id in needed}
        for form, version in list(self.manifests):
            if version in wanted and (way := cheapest_path(infos, form, version, {})) is not None:
                needed |= {info.id for info in way.patches}
        needed |= {info.id for info in without_superseded(infos) if info.base >= since and info.base != NO_VERSION}
        needed |= {info.id for info in infos if info.codec == TENSOR_TABLE and info.version in described}
        dropped = [self.patches.pop(info.id) for info in infos if info.id not in needed]
        for form, version in list(self.manifests):
            if version not in wanted and version < since:
                del self.manifests[form, version]
        return dropped

    def _whole(self) -> list[tuple[Precision, int]]:
        """Forms of versions of which everything is there."""
        infos = self.patch_infos()
        here = {form: reachable_versions(infos, form) for form in {form for form, _ in self.manifests}}
        tables = {_table_key(info) for info in infos if info.codec == TENSOR_TABLE}
        return [
            (form, version)
            for (form, version), (manifest, _) in self.manifests.items()
            if version in here[form] and (manifest.has_tensors or _table_key(manifest) in tables)
        ]
