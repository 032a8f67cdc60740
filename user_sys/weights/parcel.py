"""Parcels: the bytes that lead to a version, in grains that are checked one by one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from blake3 import blake3

from user_sys.checksum import checksum
from user_sys.codec import ALIGN_BYTES, Array
from user_sys.errors import WireError
from user_sys.weights.delta import apply_delta, encode_delta, encode_parts
from user_sys.weights.records import (
    CRC_BYTES,
    MAX_GRAINS,
    NO_VERSION,
    TABLE,
    Codec,
    Manifest,
    ParcelInfo,
    TensorEntry,
)
from user_sys.weights.state import (
    SLICE_BYTES,
    Breathe,
    State,
    at_once,
    dtype_of,
    encode_table,
    raw_bytes,
    slices,
    verified_state,
)

GRAIN_BYTES = 64 << 10
EASY_GRAINS = 1024
"""A parcel of more grains than these has larger ones, up to `LARGE_GRAIN_BYTES`; and only then more of them."""
LARGE_GRAIN_BYTES = 256 << 10
DELTA_PAYS_BELOW = 0.9
"""A difference that is not smaller than this share of a full parcel is not worth its base."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """Its description, and its bytes, which are never changed."""

    info: ParcelInfo
    payload: memoryview

    def grains(self, first: int, count: int) -> memoryview:
        start = first * self.info.grain_bytes
        return self.payload[start : start + count * self.info.grain_bytes]


def full_parcel(state: State, version: int, breathe: Breathe = at_once) -> Parcel:
    """Every tensor's bytes, in the order of the manifest, each padded to 64 bytes."""
    total = sum(_padded(tensor.nbytes) for tensor in state.tensors.values())
    payload, offset = np.zeros(max(1, total), np.uint8), 0
    for entry in state.entries:
        content = raw_bytes(state.tensors[entry.name])
        for part in slices(content.size):
            np.copyto(payload[offset + part.start : offset + part.stop], content[part])
            breathe(part.stop - part.start)
        offset += _padded(content.size)
    return _parcel(state, version, NO_VERSION, b"", "full", payload, breathe)


def delta_parcel(base_version: int, base: State, version: int, new: State, breathe: Breathe = at_once) -> Parcel | None:
    """What changed, or None where that does not pay."""
    encoded = encode_delta(base, new, int(DELTA_PAYS_BELOW * new.size_bytes), breathe)
    if encoded is None:
        return None
    codec, payload = encoded
    return _parcel(new, version, base_version, base.digest, codec, np.frombuffer(payload, np.uint8), breathe)


def parts_parcel(
    base_version: int, base_digest: bytes, version: int, new: State, names: Collection[str], breathe: Breathe = at_once
) -> Parcel | None:
    """The tensors `names`, which are all that changed since `base_version`; None where no packet holds them."""
    payload = encode_parts(new, names, breathe)
    if payload is None:
        return None
    return _parcel(new, version, base_version, base_digest, "parts", np.frombuffer(payload, np.uint8), breathe)


def table_parcel(state: State, version: int) -> Parcel:
    """What the tensors are, and their digests, for a manifest that is without."""
    table = np.frombuffer(encode_table(state.form, state.entries), np.uint8)
    return _parcel(state, version, NO_VERSION, b"", TABLE, table, at_once)


def assemble(
    manifest: Manifest,
    parcels: Sequence[tuple[ParcelInfo, memoryview]],
    base: State | None,
    breathe: Breathe = at_once,
    hashed: Mapping[str, bytes] | None = None,
) -> State:
    """The state that `manifest` describes, from parcels that lead to it, one after the other.

    Args:
        hashed: digests, by name, of tensors in the first parcel, where that is a full one (`RunningDigests`).
        base: the state that the first of them changes; it stays as it is. None where that is a full one.
            Of which version it is nobody asks where the first is ``parts``: the manifest's digests tell.

    Raises:
        WireError: they do not fit each other, or what comes of them is not what the manifest says.
    """
    tensors = dict(base.tensors) if base is not None else {}
    known = {entry.name: entry.digest for entry in base.entries} if base is not None else {}
    at, at_digest = (NO_VERSION, b"") if base is None else (parcels[0][0].base if parcels else NO_VERSION, base.digest)
    for info, payload in parcels:
        if info.codec == "full":
            tensors, known = _unpacked(manifest, payload), dict(hashed or {})
        elif not (
            info.base <= at if info.codec == "parts" else info.base == at and at_digest in (b"", info.base_digest)
        ):
            raise WireError(f"a difference from version {info.base}, but the base is version {at}, or another one")
        else:
            tensors, touched = apply_delta(tensors, payload, breathe)
            known = {name: digest for name, digest in known.items() if name not in touched}
        at, at_digest = info.version, b""
    return verified_state(manifest, tensors, known, breathe)


def grain_bytes(size_bytes: int) -> int:
    """The size of the grains of a parcel of so many bytes: a multiple of `GRAIN_BYTES`, of which `MAX_GRAINS` do."""
    few, most = (-(-size_bytes // (grains * GRAIN_BYTES)) * GRAIN_BYTES for grains in (EASY_GRAINS, MAX_GRAINS))
    return min(few, max(LARGE_GRAIN_BYTES, most))


def crc_of(payload: memoryview, info: ParcelInfo, grain: int) -> bool:
    """Whether the bytes of one grain are those that were described."""
    expected = int.from_bytes(info.crcs[CRC_BYTES * grain : CRC_BYTES * (grain + 1)], "little")
    return checksum(payload) == expected


def _parcel(
    state: State, version: int, base: int, base_digest: bytes, codec: Codec, payload: Array, breathe: Breathe
) -> Parcel:
    grain = grain_bytes(payload.size)
    crcs = bytearray()
    for part in slices(payload.size, grain):
        crcs += checksum(payload[part].data).to_bytes(CRC_BYTES, "little")
        breathe(part.stop - part.start)
    payload.flags.writeable = False
    name = blake3(msgspec.msgpack.encode((state.digest, version, base, base_digest, codec, payload.size))).digest()
    info = ParcelInfo(name, state.form, version, base, base_digest, codec, payload.size, grain, bytes(crcs))
    return Parcel(info, payload.data)


class RunningDigests:
    """Digests of the tensors in a full parcel, taken while it comes: what has just come is in the cache."""

    def __init__(self, manifest: Manifest, payload: memoryview) -> None:
        """Raises WireError: `payload` has not the size of what `manifest` describes."""
        self.found: dict[str, bytes] = {}
        self._payload = payload
        self._places = deque(_places(manifest, len(payload)))
        self._hasher, self._at = blake3(), 0

    def advance(self, end: int, breathe: Breathe = at_once) -> None:
        """`payload` is here up to `end`."""
        while self._places:
            entry, place = self._places[0]
            self._hash(slice(max(self._at, place.start), min(end, place.stop)), breathe)
            if end < place.stop:
                return
            self.found[entry.name] = self._hasher.digest()
            self._places.popleft()
            self._hasher = blake3()

    def _hash(self, place: slice, breathe: Breathe) -> None:
        for start in range(place.start, place.stop, SLICE_BYTES):
            self._at = min(place.stop, start + SLICE_BYTES)
            self._hasher.update(self._payload[start : self._at])
            breathe(self._at - start)


def _unpacked(manifest: Manifest, payload: memoryview) -> dict[str, Array]:
    """Views of a full parcel's bytes."""
    content = np.frombuffer(payload, np.uint8)
    return {
        entry.name: content[place].view(dtype_of(entry.dtype)).reshape(entry.shape)
        for entry, place in _places(manifest, content.size)
    }


def _places(manifest: Manifest, total: int) -> list[tuple[TensorEntry, slice]]:
    """Where each tensor lies in a full parcel of `total` bytes."""
    places, offset = [], 0
    for entry in manifest.tensors:
        size = math.prod(entry.shape) * dtype_of(entry.dtype).itemsize
        if min((*entry.shape, 0)) < 0 or offset + size > total:
            raise WireError(f"weights {manifest.version}: {entry.name!r} lies outside its parcel")
        places.append((entry, slice(offset, offset + size)))
        offset += _padded(size)
    if max(1, offset) != total:
        raise WireError(f"weights {manifest.version}: a full parcel of {total} bytes instead of {offset}")
    return places


def _padded(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
