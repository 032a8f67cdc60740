"""Patches: bytes that turn one version of the weights into another, exactly.

A delta holds the changed tensors only. A tensor with few changes is a list of gaps and changed bits (old XOR new); a
tensor with many changes is stored whole. Streams are compressed with zstd if that makes them smaller. A patch travels
in blocks, each with its own checksum. `VersionIndex` holds manifests and patches, and `cheapest_path` finds the patches
that lead to a version.
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
"""A tensor with a larger fraction of changed values is stored whole."""
ZSTD_LEVEL = 1
MAX_COMPRESSED_FRACTION = 0.95  # of the uncompressed size
_SAMPLE_BYTES = 64 << 10  # compressed first, to test whether compression helps
_GAPS: tuple[np.dtype[Any], ...] = (np.dtype("<u1"), np.dtype("<u2"))


class _TensorChange(msgspec.Struct, frozen=True, array_like=True):
    """The change of one tensor. `changes` counts the entries of a ``sparse`` one; `compressed` lists the compressed
    streams.
    """

    name: str
    kind: Literal["sparse", "whole"]
    dtype: str
    shape: tuple[int, ...]
    changes: int = 0
    gap_bytes: int = 1
    compressed: tuple[str, ...] = ()


class _DeltaHeader(msgspec.Struct, frozen=True, array_like=True):
    parts: tuple[_TensorChange, ...]


def encode_delta(
    base: TensorSet, new: TensorSet, max_bytes: int, yield_cpu: YieldHook = no_yield
) -> tuple[PatchCodec, bytes] | None:
    """Encodes the change from `base` to `new`; the codec is ``parts`` if every changed tensor is stored whole.

    Returns:
        None if names, dtypes or shapes differ, if the delta exceeds a packet, or if it exceeds `max_bytes`. A tensor
        that
        is stored whole counts with its uncompressed size, as in a full patch.
    """
    previous = {entry.name: entry for entry in base.entries}
    if [(e.name, e.dtype, e.shape) for e in base.entries] != [(e.name, e.dtype, e.shape) for e in new.entries]:
        return None
    max_bytes = min(max_bytes, MAX_PACKET_BYTES)
    parts: list[_TensorChange] = []
    streams: dict[str, Array] = {}
    for entry in new.entries:
        if entry.digest != previous[entry.name].digest:
            part, found = _encode_tensor(entry.name, base.tensors[entry.name], new.tensors[entry.name], yield_cpu)
            streams |= {f"{len(parts)}.{stream}": content for stream, content in found.items()}
            parts.append(part)
            max_bytes -= new.tensors[entry.name].nbytes if part.kind == "whole" else _stream_bytes(found)
            if max_bytes < 0:
                return None
    codec: PatchCodec = "delta" if any(part.kind == "sparse" for part in parts) else "parts"
    packet = _encode_packet(parts, streams)
    return None if packet is None else (codec, packet)


def encode_subset(new: TensorSet, names: Collection[str], yield_cpu: YieldHook = no_yield) -> bytes | None:
    """Encodes the tensors `names` of `new`, whole. Returns None if they exceed a packet."""
    parts: list[_TensorChange] = []
    streams: dict[str, Array] = {}
    for name in sorted(names):
        part, found = _encode_whole(name, new.tensors[name])
        streams[f"{len(parts)}.whole"] = found["whole"]
        parts.append(part)
        yield_cpu(new.tensors[name].nbytes)
    return _encode_packet(parts, streams)


def _encode_packet(parts: Sequence[_TensorChange], streams: Mapping[str, Array]) -> bytes | None:
    """Returns None if the content exceeds the size limit of a packet."""
    packet = encode_packet(_DeltaHeader(tuple(parts)), streams)
    try:
        parse_packet(packet)
    except WireError:
        return None
    return packet


def apply_delta(
    tensors: Mapping[str, Array], payload: bytes | memoryview, yield_cpu: YieldHook = no_yield
) -> tuple[dict[str, Array], set[str]]:
    """Applies a delta to `tensors`, which stay unchanged. Returns the new tensors and the names of the changed ones.

    Raises:
        WireError: `payload` is not a delta, or belongs to other tensors. No allocation exceeds the size of a tensor.
    """
    header, streams = decode_packet(payload, _DeltaHeader)
    names = {part.name for part in header.parts}
    if len(names) < len(header.parts) or any(s.dtype != np.uint8 or s.ndim != 1 for s in streams.values()):
        raise WireError("a delta repeats a tensor name, or has a stream that is not a byte vector")
    changed = dict(tensors)
    for index, part in enumerate(header.parts):
        base = changed.get(part.name)
        if base is None or (dtype_name(base.dtype), base.shape) != (part.dtype, part.shape):
            raise WireError(f"a delta changes {part.name!r} ({part.dtype} {part.shape}), which the base does not have")
        found = {name: streams.get(f"{index}.{name}", np.empty(0, np.uint8)) for name in ("gaps", "bits", "whole")}
        changed[part.name] = (
            _apply_sparse(base, part, found) if part.kind == "sparse" else _decode_whole(part, found["whole"])
        )
        yield_cpu(base.nbytes)
    return changed, names


def changed_values(base: Array, new: Array, max_count: int, yield_cpu: YieldHook = no_yield) -> Array | None:
    """Returns the ascending indices of the values whose bits differ, or None if there are more than `max_count`.

    Args:
        base, new: contiguous, of one dtype and size; values of 1, 2, 4 or 8 bytes.
    """
    width = base.itemsize
    bits = np.dtype(f"<u{width}")
    old, fresh = base.reshape(-1).view(bits), new.reshape(-1).view(bits)
    found: list[Array] = []
    count = 0
    for part in slices(old.size, SLICE_BYTES // width):
        indices = _changed_in_slice(old[part], fresh[part], 8 // width)
        count += indices.size
        if count > max_count:
            return None
        if indices.size:
            found.append(indices + part.start)
        yield_cpu((part.stop - part.start) * width)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _changed_in_slice(old: Array, new: Array, per_word: int) -> Array:
    """Compares 64-bit words first, because most of them are equal."""
    whole = old.size - old.size % per_word
    words = np.flatnonzero(old[:whole].view(np.uint64) != new[:whole].view(np.uint64))
    candidates = (words[:, None] * per_word + np.arange(per_word)).reshape(-1)
    if whole < old.size:
        candidates = np.concatenate((candidates, np.arange(whole, old.size)))
    differ: Array = old[candidates] != new[candidates]
    return np.asarray(candidates[differ])


def _encode_tensor(name: str, base: Array, new: Array, yield_cpu: YieldHook) -> tuple[_TensorChange, dict[str, Array]]:
    indices = changed_values(base, new, int(MAX_CHANGED_FRACTION * base.size), yield_cpu)
    sparse = None if indices is None else _encode_sparse(name, base, new, indices)
    if sparse is not None and _stream_bytes(sparse[1]) < MAX_COMPRESSED_FRACTION * new.nbytes:
        return sparse
    return _encode_whole(name, new)


def _encode_whole(name: str, new: Array) -> tuple[_TensorChange, dict[str, Array]]:
    whole = raw_bytes(new)
    sample, compressed = whole[:_SAMPLE_BYTES], ()
    if len(_compress(sample)) < MAX_COMPRESSED_FRACTION * sample.size:
        whole, compressed = _compress(whole), ("whole",)  # type: ignore[assignment]
    return _TensorChange(name, "whole", dtype_name(new.dtype), new.shape, compressed=compressed), {"whole": whole}


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
    compressed = {stream: _compress(content) for stream, content in streams.items()}
    smaller = tuple(
        stream for stream in streams if compressed[stream].size < MAX_COMPRESSED_FRACTION * streams[stream].size
    )
    part = _TensorChange(name, "sparse", dtype_name(new.dtype), new.shape, gaps.size, gap.itemsize, smaller)
    return part, streams | {stream: compressed[stream] for stream in smaller}


def _best_gap(advances: Array, width: int) -> np.dtype[Any]:
    """Returns the dtype of gaps that makes the list shortest."""

    def size(gap: np.dtype[Any]) -> int:
        fillers = int(((advances - 1) >> (8 * gap.itemsize)).sum())
        return (fillers + advances.size) * (gap.itemsize + width)

    return min(_GAPS, key=size)


def _with_fillers(advances: Array, gap: np.dtype[Any]) -> tuple[Array, Array]:
    """Encodes distances as gaps of a small dtype. Returns the gaps and the positions of the changes among them.

    An entry advances by its gap + 1. Entries without a changed bit bridge a distance that is too large for the dtype.
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
        raise WireError(f"{part.name!r}: {part.changes} changes are invalid for a tensor of {base.size} values")
    gaps = _read_stream(part, "gaps", streams, part.changes * part.gap_bytes).view(f"<u{part.gap_bytes}")
    planes = _read_stream(part, "bits", streams, part.changes * width)
    bits = np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1).view(f"<u{width}")
    indices = np.cumsum(gaps, dtype=np.int64) + np.arange(part.changes)
    if indices.size and indices[-1] >= base.size:
        raise WireError(f"{part.name!r}: a change lies beyond its {base.size} values")
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
    if stream in part.compressed:
        content = _decompress(part.name, content, size)
    if content.size != size:
        raise WireError(f"{part.name!r}: stream {stream!r} has {content.size} bytes, expected {size}")
    return content


def _decompress(name: str, content: Array, size: int) -> Array:
    try:
        # zstandard allocates the size that a frame states, even beyond max_output_size. So this checks the stated size
        # first.
        stated = zstandard.frame_content_size(content.data)
        if stated != size:
            raise WireError(f"{name!r}: a stream states {stated} bytes, expected {size}")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(content.data, max_output_size=size), np.uint8)
    except zstandard.ZstdError as error:
        raise WireError(f"{name!r}: a stream is damaged: {error}") from None


BLOCK_BYTES = 64 << 10
TARGET_BLOCKS = 1024
"""A larger patch gets larger blocks, up to `LARGE_BLOCK_BYTES`, and only then more blocks."""
LARGE_BLOCK_BYTES = 256 << 10
MAX_DELTA_FRACTION = 0.9
"""A delta above this fraction of a full patch is not used."""


@dataclass(frozen=True, eq=False)
class Patch:
    """A patch: its description and its immutable bytes."""

    info: PatchInfo
    payload: memoryview

    def blocks(self, first: int, count: int) -> memoryview:
        start = first * self.info.block_bytes
        return self.payload[start : start + count * self.info.block_bytes]


def full_patch(state: TensorSet, version: int, yield_cpu: YieldHook = no_yield) -> Patch:
    """Makes a patch of every tensor's bytes, in the order of the manifest, each padded to 64 bytes."""
    total = sum(_pad_to_alignment(tensor.nbytes) for tensor in state.tensors.values())
    payload, offset = np.zeros(max(1, total), np.uint8), 0
    for entry in state.entries:
        content = raw_bytes(state.tensors[entry.name])
        for part in slices(content.size):
            np.copyto(payload[offset + part.start : offset + part.stop], content[part])
            yield_cpu(part.stop - part.start)
        offset += _pad_to_alignment(content.size)
    return _make_patch(state, version, NO_VERSION, b"", "full", payload, yield_cpu)


def delta_patch(
    base_version: int, base: TensorSet, version: int, new: TensorSet, yield_cpu: YieldHook = no_yield
) -> Patch | None:
    """Makes a patch from `base` to `new`. Returns None if a full patch is about as small."""
    encoded = encode_delta(base, new, int(MAX_DELTA_FRACTION * new.size_bytes), yield_cpu)
    if encoded is None:
        return None
    codec, payload = encoded
    return _make_patch(new, version, base_version, base.digest, codec, np.frombuffer(payload, np.uint8), yield_cpu)


def subset_patch(
    base_version: int,
    base_digest: bytes,
    version: int,
    new: TensorSet,
    names: Collection[str],
    yield_cpu: YieldHook = no_yield,
) -> Patch | None:
    """Makes a patch of the tensors `names`, all that changed since `base_version`. Returns None if no packet holds
    them.
    """
    payload = encode_subset(new, names, yield_cpu)
    if payload is None:
        return None
    return _make_patch(new, version, base_version, base_digest, "parts", np.frombuffer(payload, np.uint8), yield_cpu)


def table_patch(state: TensorSet, version: int) -> Patch:
    """Makes a patch with the list of tensors and digests, for a manifest without them."""
    table = np.frombuffer(encode_tensor_table(state.form, state.entries), np.uint8)
    return _make_patch(state, version, NO_VERSION, b"", TENSOR_TABLE, table, no_yield)


def apply_patches(
    manifest: WeightsManifest,
    patches: Sequence[tuple[PatchInfo, memoryview]],
    base: TensorSet | None,
    yield_cpu: YieldHook = no_yield,
    known_digests: Mapping[str, bytes] | None = None,
) -> TensorSet:
    """Applies `patches` in order and returns the tensors that `manifest` describes.

    Args:
        base: the tensors that the first patch changes; they stay unchanged. None if the first patch is a full one. If
            the
            first patch is ``parts``, the version of `base` is not checked: the manifest's digests decide.
        known_digests: digests by name of the tensors in the first patch, if it is a full one (`IncrementalDigests`).

    Raises:
        WireError: the patches do not fit each other, or the result does not match the manifest.
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
            raise WireError(f"a delta needs base version {info.base}, but the base is version {at}, or differs from it")
        else:
            tensors, touched = apply_delta(tensors, payload, yield_cpu)
            known = {name: digest for name, digest in known.items() if name not in touched}
        at, at_digest = info.version, b""
    return verify_tensor_set(manifest, tensors, known, yield_cpu)


def block_size_bytes(size_bytes: int) -> int:
    """Returns the block size for a patch: a multiple of `BLOCK_BYTES` that gives at most `MAX_BLOCKS` blocks."""
    preferred, required = (
        -(-size_bytes // (blocks * BLOCK_BYTES)) * BLOCK_BYTES for blocks in (TARGET_BLOCKS, MAX_BLOCKS)
    )
    return min(preferred, max(LARGE_BLOCK_BYTES, required))


def is_block_intact(payload: memoryview, info: PatchInfo, block: int) -> bool:
    """Whether one block has the checksum of the description."""
    expected = int.from_bytes(info.crcs[CRC_BYTES * block : CRC_BYTES * (block + 1)], "little")
    return checksum(payload) == expected


def _make_patch(
    state: TensorSet,
    version: int,
    base: int,
    base_digest: bytes,
    codec: PatchCodec,
    payload: Array,
    yield_cpu: YieldHook,
) -> Patch:
    block_bytes = block_size_bytes(payload.size)
    crcs = bytearray()
    for part in slices(payload.size, block_bytes):
        crcs += checksum(payload[part].data).to_bytes(CRC_BYTES, "little")
        yield_cpu(part.stop - part.start)
    payload.flags.writeable = False
    name = blake3(msgspec.msgpack.encode((state.digest, version, base, base_digest, codec, payload.size))).digest()
    info = PatchInfo(name, state.form, version, base, base_digest, codec, payload.size, block_bytes, bytes(crcs))
    return Patch(info, payload.data)


class IncrementalDigests:
    """Digests of the tensors in a full patch, computed while it arrives and its bytes are still in the CPU cache."""

    def __init__(self, manifest: WeightsManifest, payload: memoryview) -> None:
        """Raises WireError if the size of `payload` does not match `manifest`."""
        self.digests: dict[str, bytes] = {}
        self._payload = payload
        self._spans = deque(_tensor_slices(manifest, len(payload)))
        self._hasher, self._at = blake3(), 0

    def update(self, end: int, yield_cpu: YieldHook = no_yield) -> None:
        """Hashes `payload` up to `end`, which has arrived."""
        while self._spans:
            entry, span = self._spans[0]
            self._hash(slice(max(self._at, span.start), min(end, span.stop)), yield_cpu)
            if end < span.stop:
                return
            self.digests[entry.name] = self._hasher.digest()
            self._spans.popleft()
            self._hasher = blake3()

    def _hash(self, span: slice, yield_cpu: YieldHook) -> None:
        for start in range(span.start, span.stop, SLICE_BYTES):
            self._at = min(span.stop, start + SLICE_BYTES)
            self._hasher.update(self._payload[start : self._at])
            yield_cpu(self._at - start)


def _unpack_full(manifest: WeightsManifest, payload: memoryview) -> dict[str, Array]:
    """Returns views into the bytes of a full patch."""
    content = np.frombuffer(payload, np.uint8)
    return {
        entry.name: content[span].view(dtype_of(entry.dtype)).reshape(entry.shape)
        for entry, span in _tensor_slices(manifest, content.size)
    }


def _tensor_slices(manifest: WeightsManifest, total: int) -> list[tuple[TensorEntry, slice]]:
    """Returns the position of each tensor in a full patch of `total` bytes."""
    spans, offset = [], 0
    for entry in manifest.tensors:
        size = math.prod(entry.shape) * dtype_of(entry.dtype).itemsize
        if min((*entry.shape, 0)) < 0 or offset + size > total:
            raise WireError(f"weights {manifest.version}: {entry.name!r} lies outside its patch of {total} bytes")
        spans.append((entry, slice(offset, offset + size)))
        offset += _pad_to_alignment(size)
    if max(1, offset) != total:
        raise WireError(f"weights {manifest.version}: a full patch has {total} bytes, expected {offset}")
    return spans


def _pad_to_alignment(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


PatchCost = Callable[[PatchInfo], float]


@dataclass(frozen=True)
class UpdatePath:
    """Patches that lead to a version, in order, with their cost. Empty if the version is present already."""

    patches: tuple[PatchInfo, ...] = ()
    cost: float = 0.0


def patch_size(info: PatchInfo) -> float:
    """The cost of a patch by its size alone."""
    return float(info.size_bytes)


def cheapest_path(
    patches: Iterable[PatchInfo],
    form: Precision,
    target: int,
    held: Mapping[int, bytes],
    cost: PatchCost = patch_size,
) -> UpdatePath | None:
    """Returns the cheapest path to version `target` in precision `form`, or None if there is none.

    Args:
        held: digest of each version that the receiver has, in this precision and of the target's epoch. A delta from
            any
            other base is unusable. Without a held version the path uses the newest ``parts`` instead of deltas.
    """
    usable = _by_version(p for p in patches if p.form == form and p.version <= target)
    short = None if held else _shortest_path(_without_subsumed_deltas(usable), target, held, cost)
    return short or _shortest_path(usable, target, held, cost)


def _shortest_path(
    usable: Iterable[PatchInfo], target: int, held: Mapping[int, bytes], cost: PatchCost
) -> UpdatePath | None:
    paths: dict[int, UpdatePath] = {version: UpdatePath() for version in held}
    for info in usable:
        before = _path_to_base(info, paths)
        if before is None or held.get(info.base, info.base_digest) != info.base_digest:
            continue
        total = before.cost + cost(info)
        if total < paths.get(info.version, UpdatePath(cost=math.inf)).cost:
            paths[info.version] = UpdatePath((*before.patches, info), total)
    return paths.get(target)


def _without_subsumed_deltas(usable: Sequence[PatchInfo]) -> list[PatchInfo]:
    """Drops the deltas up to the newest ``parts`` patch that applies to a full patch."""
    full = [info.version for info in usable if info.codec == "full"]
    anchors = (p for p in reversed(usable) if p.codec == "parts" and any(p.base <= v < p.version for v in full))
    if (anchor := next(anchors, None)) is None:
        return list(usable)
    return [p for p in usable if p.base == NO_VERSION or p.id == anchor.id or p.version > anchor.version]


def _path_to_base(info: PatchInfo, paths: Mapping[int, UpdatePath]) -> UpdatePath | None:
    """Returns the cheapest of `paths` to a base of the patch."""
    if info.codec == "parts":
        fitting = (path for version, path in paths.items() if info.base <= version < info.version)
        return min(fitting, key=lambda path: path.cost, default=None)
    return UpdatePath() if info.base == NO_VERSION else paths.get(info.base)


def reachable_versions(patches: Iterable[PatchInfo], form: Precision) -> set[int]:
    """Returns the versions that patches reach without a base."""
    found: set[int] = set()
    for info in _by_version(p for p in patches if p.form == form):
        bases = range(info.base, info.version if info.codec == "parts" else info.base + 1)
        if info.base == NO_VERSION or any(version in bases for version in found):
            found.add(info.version)
    return found


def without_superseded(patches: Iterable[PatchInfo]) -> list[PatchInfo]:
    """Drops each ``parts`` patch that a newer one replaces: the newer one changes a superset and leads further."""
    found, oldest = list[PatchInfo](), dict[Precision, int]()
    for info in sorted(patches, key=lambda info: info.version, reverse=True):
        if info.codec == "parts":
            if info.base >= oldest.get(info.form, info.version):
                continue
            oldest[info.form] = info.base
        found.append(info)
    return found


def thin_versions(versions: list[int], max_count: int) -> list[int]:
    """Returns at most `max_count` of the ascending `versions`: dense at the newest, sparse at the oldest."""
    remaining = list(versions)
    while len(remaining) > max(1, max_count):
        if max_count < 3:
            remaining.pop(0)
            continue
        spans = [
            (remaining[i + 1] - remaining[i - 1]) / (remaining[-1] - remaining[i] + 1)
            for i in range(1, len(remaining) - 1)
        ]
        remaining.pop(1 + spans.index(min(spans)))
    return remaining


def find_table(patches: Iterable[PatchInfo], manifest: WeightsManifest) -> PatchInfo | None:
    """Returns the table patch for `manifest`, or None."""
    return next(
        (info for info in patches if info.codec == TENSOR_TABLE and _table_key(info) == _table_key(manifest)), None
    )


def _table_key(described: PatchInfo | WeightsManifest) -> tuple[Precision, int, int]:
    size_bytes = described.table_bytes if isinstance(described, WeightsManifest) else described.size_bytes
    return described.form, described.version, size_bytes


def _by_version(patches: Iterable[PatchInfo]) -> list[PatchInfo]:
    return sorted((info for info in patches if info.codec != TENSOR_TABLE), key=lambda info: info.version)


@dataclass
class VersionIndex:
    """Signed manifests by precision and version, and patches by id. One thread changes it; others may read patches."""

    manifests: dict[tuple[Precision, int], tuple[WeightsManifest, SignedRecord]] = field(default_factory=dict)
    patches: dict[bytes, Patch] = field(default_factory=dict)

    def patch_infos(self) -> list[PatchInfo]:
        return [patch.info for patch in list(self.patches.values())]

    def complete_versions(self) -> list[int]:
        """Returns the versions that are complete in at least one precision, ascending."""
        return sorted({version for _, version in self._complete()})

    def complete_precisions(self, version: int) -> list[Precision]:
        """Returns the precisions in which `version` is complete."""
        return [form for form, of in self._complete() if of == version]

    def retain(self, versions: Iterable[int], since: int, patches: Iterable[bytes] = ()) -> list[Patch]:
        """Drops every patch that neither `versions` nor a receiver of version `since` or newer needs.

        Keeps `patches` (ids) and the tables that belong to them. Returns the dropped patches.
        """
        infos, needed = self.patch_infos(), set(patches)
        wanted = set(versions)
        described = wanted | {info.version for info in infos if info.id in needed}
        for form, version in list(self.manifests):
            if version in wanted and (path := cheapest_path(infos, form, version, {})) is not None:
                needed |= {info.id for info in path.patches}
        needed |= {info.id for info in without_superseded(infos) if info.base >= since and info.base != NO_VERSION}
        needed |= {info.id for info in infos if info.codec == TENSOR_TABLE and info.version in described}
        dropped = [self.patches.pop(info.id) for info in infos if info.id not in needed]
        for form, version in list(self.manifests):
            if version not in wanted and version < since:
                del self.manifests[form, version]
        return dropped

    def _complete(self) -> list[tuple[Precision, int]]:
        """Returns each complete (precision, version)."""
        infos = self.patch_infos()
        reachable = {form: reachable_versions(infos, form) for form in {form for form, _ in self.manifests}}
        tables = {_table_key(info) for info in infos if info.codec == TENSOR_TABLE}
        return [
            (form, version)
            for (form, version), (manifest, _) in self.manifests.items()
            if version in reachable[form] and (manifest.has_tensors or _table_key(manifest) in tables)
        ]
