"""The tensors of one version in memory, their digests, their rounding to bfloat16, and a learner's snapshot of them.

Versions share tensors that are equal, so the frozen part of a policy is held once. Weights in host memory are arrays,
which the publisher copies before the next update. Weights on a device: see `user_sys.weights.gpu_copy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from blake3 import blake3

from hal.decode_errors import DECODE_ERRORS
from user_sys.codec import BF16, DTYPES, Array
from user_sys.errors import UserSysError, WireError
from user_sys.messages import (
    BLOB_BYTES,
    MAX_TABLE_BYTES,
    MAX_TENSORS,
    MAX_VERSION_BYTES,
    Precision,
    TensorEntry,
    WeightsManifest,
)

VALUES_PER_SLICE = 1 << 20  # rounded at a time, so that temporary arrays stay small and the CPU is yielded in between

Entries = tuple[TensorEntry, ...]
_TABLE_DECODER = msgspec.msgpack.Decoder(Annotated[Entries, msgspec.Meta(max_length=MAX_TENSORS)])
YieldHook = Callable[[int], None]
"""Called after each slice of bulk work with the bytes processed; may block to leave the CPU to others."""

TensorLayout: TypeAlias = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Dtype and shape of each array, by name, in order."""


def no_yield(done_bytes: int) -> None:
    """A `YieldHook` that never blocks."""


class NotFinite(UserSysError):
    """Weights hold NaN or infinity and are not published. The message names the arrays."""


@dataclass(frozen=True, eq=False)
class TensorSet:
    """The tensors of a version. They are C-contiguous and read-only; `entries` describe them, sorted by name.

    Attributes:
        table: the encoded `entries`; `digest` is its BLAKE3.
    """

    entries: Entries
    tensors: Mapping[str, Array]
    table: bytes
    digest: bytes

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def blobs(self) -> Iterator[tuple[bytes, memoryview]]:
        """Yields the digest and the bytes of each blob of the tensors."""
        for entry in self.entries:
            content = raw_bytes(self.tensors[entry.name]).data
            for index, digest in enumerate(entry.blobs):
                yield digest, content[index * BLOB_BYTES : (index + 1) * BLOB_BYTES]


def build_tensor_set(
    arrays: Mapping[str, Array], previous: TensorSet | None = None, yield_cpu: YieldHook = no_yield
) -> TensorSet:
    """Builds a `TensorSet` from `arrays`, without copying contiguous ones. The caller must not change them afterwards.

    A read-only array that `previous` holds as the same object is equal and is not hashed again.

    Raises:
        NotFinite: an array of floats holds NaN or infinity.
        WireError: a dtype is unsupported, or the tensors exceed a limit.
    """
    if len(arrays) > MAX_TENSORS:
        raise WireError(
            f"{len(arrays)} tensors exceed the limits of {MAX_TENSORS} tensors; give the policy larger ones"
        )
    entries, tensors = list[TensorEntry](), dict[str, Array]()
    not_finite: list[str] = []
    known = {entry.name: entry for entry in previous.entries} if previous is not None else {}
    for name in sorted(arrays):
        given = np.asarray(arrays[name], order="C")
        if previous is not None and not given.flags.writeable and previous.tensors.get(name) is given:
            entries.append(known[name])
            tensors[name] = given
            continue
        digests, is_finite = _hash_and_check_finite(given, yield_cpu)
        if not is_finite:
            not_finite.append(name)
        given.flags.writeable = False
        entries.append(TensorEntry(name, dtype_name(given.dtype), given.shape, digests))
        tensors[name] = given
    if not_finite:
        raise NotFinite(
            f"weights are not finite in {not_finite[:4]} and are not published; "
            "lower the learning rate or check the rewards"
        )
    table, size_bytes = msgspec.msgpack.encode(entries), sum(tensor.nbytes for tensor in tensors.values())
    if len(table) > MAX_TABLE_BYTES or size_bytes > MAX_VERSION_BYTES:
        raise WireError(
            f"weights have {size_bytes} bytes and a table of {len(table)} bytes, and the limits are "
            f"{MAX_VERSION_BYTES} and {MAX_TABLE_BYTES}; give the policy fewer tensors, with shorter names"
        )
    return TensorSet(tuple(entries), tensors, table, blake3(table).digest())


def decode_table(manifest: WeightsManifest, table: bytes | memoryview) -> Entries:
    """Returns the tensors of a version.

    Raises:
        WireError: the table is not that of `manifest`, cannot be decoded, or contradicts the manifest.
    """
    if len(table) != manifest.table_bytes or blake3(table).digest() != manifest.digest:
        raise WireError(f"the table of tensors of version {manifest.version} is not the one that its manifest names")
    try:
        entries: Entries = _TABLE_DECODER.decode(table)
    except DECODE_ERRORS as error:
        text = str(error)[:200]
        raise WireError(f"the table of tensors of version {manifest.version} cannot be decoded: {text}") from None
    sizes = [entry_bytes(entry) for entry in entries]
    is_cut = all(len(e.blobs) == -(-size // BLOB_BYTES) for e, size in zip(entries, sizes, strict=True))
    if not is_cut or sum(sizes) != manifest.size_bytes or len({e.name for e in entries}) < len(entries):
        raise WireError(f"the table of tensors of version {manifest.version} contradicts its manifest")
    return entries


def entry_bytes(entry: TensorEntry) -> int:
    """Returns the size of a tensor. Raises WireError if its dtype is unsupported."""
    return math.prod(entry.shape) * dtype_of(entry.dtype).itemsize


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Raises WireError if the dtype is unsupported."""
    name = "bfloat16" if dtype == BF16 else dtype.name
    if name != "bfloat16" and name not in DTYPES:
        raise WireError(f"dtype {dtype} is unsupported; use one of {sorted(DTYPES)} or {BF16}")
    return name


def dtype_of(name: str) -> np.dtype[Any]:
    """Raises WireError if the dtype is unsupported."""
    if name != "bfloat16" and name not in DTYPES:
        raise WireError(f"dtype {name!r} is unsupported; use one of {sorted(DTYPES)} or bfloat16")
    return BF16 if name == "bfloat16" else np.dtype(name)


def raw_bytes(tensor: Array) -> Array:
    """Returns a view of the bytes of a C-contiguous array, uint8 (n,)."""
    return tensor.reshape(-1).view(np.uint8)


def quantize(arrays: Mapping[str, Array], precision: Precision, yield_cpu: YieldHook = no_yield) -> Mapping[str, Array]:
    """Converts `arrays` to a precision; other arrays than floats stay the same objects."""
    if precision == "exact":
        return arrays
    return {name: to_bf16(array, yield_cpu) if array.dtype.kind == "f" else array for name, array in arrays.items()}


def dequantize(arrays: Mapping[str, Array], precision: Precision) -> dict[str, Array]:
    """Returns the arrays that a policy loads: rounded floats as float32. Exact bfloat16 stays `BF16`."""
    if precision == "exact":
        return dict(arrays)
    return {name: from_bf16(array) if array.dtype == BF16 else array for name, array in arrays.items()}


def to_bf16(array: Array, yield_cpu: YieldHook = no_yield) -> Array:
    """Rounds floats to `BF16`, to nearest, ties to even. A finite value beyond the range becomes the largest finite
    one.

    NaN stays NaN: rounding up would turn a NaN with all bits set, as GPUs produce, into zero.
    """
    bits = np.empty(array.size, np.uint16)
    flat = array.reshape(-1)
    for start in range(0, flat.size, VALUES_PER_SLICE):
        part = slice(start, start + VALUES_PER_SLICE)
        wide = np.ascontiguousarray(flat[part], np.float32).view(np.uint32)
        rounded = (wide + (np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
        unbounded = (wide & np.uint32(0x7F800000)) == 0x7F800000
        overflown = ((rounded & np.uint32(0x7F80)) == 0x7F80) & ~unbounded
        rounded[unbounded] = (wide[unbounded] >> np.uint32(16)) | ((wide[unbounded] & np.uint32(0xFFFF)) != 0)
        bits[part] = rounded - overflown
        yield_cpu(wide.nbytes)
    return bits.view(BF16).reshape(array.shape)


def from_bf16(array: Array) -> Array:
    """Returns `BF16` as float32, without loss."""
    return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _hash_and_check_finite(tensor: Array, yield_cpu: YieldHook) -> tuple[tuple[bytes, ...], bool]:
    """Returns the digests of the blobs, and whether all values are finite, in one pass."""
    digests, is_finite = list[bytes](), True
    flat, count = tensor.reshape(-1), BLOB_BYTES // max(1, tensor.itemsize)
    for start in range(0, flat.size, count):
        piece = flat[start : start + count]
        digests.append(blake3(piece.view(np.uint8).data).digest())
        is_finite = is_finite and _is_finite(piece)
        yield_cpu(piece.nbytes)
    return tuple(digests), is_finite


def _is_finite(values: Array) -> bool:
    if values.dtype == BF16:
        exponents = values.view(np.uint16) & np.uint16(0x7F80)
        return not (exponents == 0x7F80).any()
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())
