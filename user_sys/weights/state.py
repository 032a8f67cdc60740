"""One version's tensors in memory, with their digests; never changed once they are there.

Tensors are shared between versions in which they are equal, so a policy of which only an adapter is trained costs its
frozen part once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from blake3 import blake3
from msgspec.structs import replace

from hal.decode_errors import DECODE_ERRORS
from user_sys.codec import DTYPES, Array
from user_sys.errors import UserSysError, WireError
from user_sys.messages import (
    INLINE_TABLE_BYTES,
    MAX_TABLE_BYTES,
    MAX_TENSORS,
    NO_EPOCH,
    Precision,
    PublisherEpoch,
    TensorEntry,
    WeightsManifest,
)

SLICE_BYTES = 4 << 20
"""Bulk work is done in slices of this size: some hundred microseconds, after which it can make room for others."""
BF16 = np.dtype([("bfloat16", "<u2")])
"""numpy has no bfloat16: its bits, under a name, so that nothing takes them for integers."""

_TensorTable = tuple[Precision, Annotated[tuple[TensorEntry, ...], msgspec.Meta(max_length=MAX_TENSORS)]]
YieldHook = Callable[[int], None]
"""Told after each slice how many bytes were worked on; may wait, to leave the machine to others."""


def no_yield(done_bytes: int) -> None:
    """A `YieldHook` that never waits."""


class NotFinite(UserSysError):
    """Weights hold NaN or infinity; they are kept at the source. The message names the arrays."""


@dataclass(frozen=True, eq=False)
class TensorSet:
    """`tensors` are C-contiguous and read-only; `entries` describe them, in the order of their names."""

    form: Precision
    entries: tuple[TensorEntry, ...]
    tensors: Mapping[str, Array]
    digest: bytes

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def build_tensor_set(
    arrays: Mapping[str, Array],
    form: Precision = "exact",
    former: TensorSet | None = None,
    breathe: YieldHook = no_yield,
) -> TensorSet:
    """Takes `arrays` over, without copying those that are contiguous; the caller changes none of them any more.

    An array that is read-only and the very one that `former` holds is known to be equal and not looked at.

    Raises:
        NotFinite: an array of floats holds NaN or infinity.
        WireError: a dtype that does not travel, or more tensors than `MAX_TENSORS`.
    """
    entries, tensors = [], {}
    spoiled: list[str] = []
    known = {entry.name: entry for entry in former.entries} if former is not None else {}
    for name in sorted(arrays):
        given = np.asarray(arrays[name], order="C")
        if former is not None and not given.flags.writeable and former.tensors.get(name) is given:
            entries.append(known[name])
            tensors[name] = given
            continue
        digest, finite = _digest_and_check_finite(given, breathe)
        if not finite:
            spoiled.append(name)
        given.flags.writeable = False
        entries.append(TensorEntry(name, dtype_name(given.dtype), given.shape, digest))
        tensors[name] = given
    if spoiled:
        raise NotFinite(f"weights are not finite in {spoiled[:4]}: they are not published")
    table = encode_tensor_table(form, tuple(entries))
    if len(entries) > MAX_TENSORS or len(table) > MAX_TABLE_BYTES:
        raise WireError(
            f"weights of {len(entries)} tensors with a table of {len(table)} bytes: at most {MAX_TENSORS} and "
            f"{MAX_TABLE_BYTES} travel; give the policy fewer, larger tensors, with shorter names"
        )
    return TensorSet(form, tuple(entries), tensors, blake3(table).digest())


def verify_tensor_set(
    manifest: WeightsManifest, tensors: Mapping[str, Array], known: Mapping[str, bytes], breathe: YieldHook = no_yield
) -> TensorSet:
    """`tensors` as the state that `manifest` describes.

    Args:
        known: digests, by name, of tensors that were verified before and have not been touched since.

    Raises:
        WireError: names, dtypes, shapes or digests are not the manifest's, or it contradicts itself.
    """
    if blake3(encode_tensor_table(manifest.form, manifest.tensors)).digest() != manifest.digest:
        raise WireError(f"the manifest of version {manifest.version} has another digest than its tensors")
    found = {name: (dtype_name(tensor.dtype), tensor.shape) for name, tensor in tensors.items()}
    if found != {entry.name: (entry.dtype, entry.shape) for entry in manifest.tensors}:
        raise WireError(f"weights {manifest.version}: names, dtypes or shapes are not those of the manifest")
    for entry in manifest.tensors:
        digest = known.get(entry.name) or _digest(tensors[entry.name], breathe)
        if digest != entry.digest:
            raise WireError(f"weights {manifest.version}: the digest of {entry.name!r} is not the manifest's")
        tensors[entry.name].flags.writeable = False
    return TensorSet(manifest.form, manifest.tensors, dict(tensors), manifest.digest)


def build_manifest(
    state: TensorSet,
    version: int,
    updates: int,
    unix_ns: int,
    errors: tuple[float, float],
    life: PublisherEpoch = NO_EPOCH,
) -> WeightsManifest:
    """The manifest of `state`, without its tensors where their table is long; `errors` are of rounding."""
    table_bytes = len(encode_tensor_table(state.form, state.entries))
    apart = table_bytes > INLINE_TABLE_BYTES
    return WeightsManifest(
        version=version,
        updates=updates,
        form=state.form,
        tensors=() if apart else state.entries,
        digest=state.digest,
        size_bytes=state.size_bytes,
        published_unix_ns=unix_ns,
        table_bytes=table_bytes if apart else 0,
        max_error=errors[0],
        rms_error=errors[1],
        run=life.run,
        life=life.number,
    )


def with_tensor_table(manifest: WeightsManifest, table: bytes | memoryview) -> WeightsManifest:
    """`manifest` with its tensors, which travelled apart. Raises WireError: `table` does not have its digest."""
    if blake3(table).digest() != manifest.digest:
        raise WireError(f"the table of version {manifest.version} has not the digest of the manifest")
    try:
        _, entries = msgspec.msgpack.decode(table, type=_TensorTable)
    except DECODE_ERRORS as error:
        raise WireError(f"the table of version {manifest.version} is none: {str(error)[:200]}") from None
    return replace(manifest, tensors=entries)


def encode_tensor_table(form: Precision, entries: tuple[TensorEntry, ...]) -> bytes:
    """What a manifest's digest is of: what the tensors are, and the digests of their bytes."""
    return msgspec.msgpack.encode((form, entries))


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Raises WireError: a dtype that does not travel."""
    name = "bfloat16" if dtype == BF16 else dtype.name
    if name != "bfloat16" and name not in DTYPES:
        raise WireError(f"dtype {dtype} does not travel; use one of {sorted(DTYPES)} or {BF16}")
    return name


def dtype_of(name: str) -> np.dtype[Any]:
    """Raises WireError: no dtype that travels."""
    if name != "bfloat16" and name not in DTYPES:
        raise WireError(f"dtype {name!r} does not travel")
    return BF16 if name == "bfloat16" else np.dtype(name)


def raw_bytes(tensor: Array) -> Array:
    """The bytes of a C-contiguous array, uint8 (n,), in the same memory."""
    return tensor.reshape(-1).view(np.uint8)


def slices(size: int, step: int = SLICE_BYTES) -> Iterator[slice]:
    """Consecutive slices of at most `step` that cover `size`."""
    return (slice(start, min(size, start + step)) for start in range(0, size, step))


def _digest_and_check_finite(tensor: Array, breathe: YieldHook) -> tuple[bytes, bool]:
    """(BLAKE3 of the bytes, whether all values are finite), in one pass over the memory."""
    hasher, finite = blake3(), True
    flat = tensor.reshape(-1)
    for part in slices(flat.size, SLICE_BYTES // max(1, tensor.itemsize)):
        piece = flat[part]
        hasher.update(piece.view(np.uint8).data)
        finite = finite and bool(_is_finite(piece))
        breathe(piece.nbytes)
    return hasher.digest(), finite


def _digest(tensor: Array, breathe: YieldHook) -> bytes:
    hasher, content = blake3(), raw_bytes(tensor)
    for part in slices(content.size):
        hasher.update(content[part].data)
        breathe(part.stop - part.start)
    return hasher.digest()


def _is_finite(values: Array) -> bool:
    if values.dtype == BF16:
        exponents = values.view(np.uint16) & np.uint16(0x7F80)
        return not (exponents == 0x7F80).any()
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())
