"""The tensors of one version in memory, with their digests; immutable.

Versions share tensors that are equal, so the frozen part of a policy is held once.
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
"""Size of a slice of bulk work: some hundred microseconds, after which it may yield the CPU."""
BF16 = np.dtype([("bfloat16", "<u2")])
"""numpy has no bfloat16. A named field holds its bits, so that they are not mistaken for integers."""

_TensorTable = tuple[Precision, Annotated[tuple[TensorEntry, ...], msgspec.Meta(max_length=MAX_TENSORS)]]
YieldHook = Callable[[int], None]
"""Called after each slice with the bytes processed; may block to leave the CPU to others."""


def no_yield(done_bytes: int) -> None:
    """A `YieldHook` that never blocks."""


class NotFinite(UserSysError):
    """Weights hold NaN or infinity and are not published. The message names the arrays."""


@dataclass(frozen=True, eq=False)
class TensorSet:
    """The tensors of a version. They are C-contiguous and read-only; `entries` describe them, sorted by name."""

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
    previous: TensorSet | None = None,
    yield_cpu: YieldHook = no_yield,
) -> TensorSet:
    """Builds a `TensorSet` from `arrays`, without copying contiguous ones. The caller must not change them afterwards.

    A read-only array that `previous` holds as the same object is equal and is not hashed again.

    Raises:
        NotFinite: an array of floats holds NaN or infinity.
        WireError: a dtype is unsupported, or there are more tensors than `MAX_TENSORS`.
    """
    entries, tensors = [], {}
    not_finite: list[str] = []
    known = {entry.name: entry for entry in previous.entries} if previous is not None else {}
    for name in sorted(arrays):
        given = np.asarray(arrays[name], order="C")
        if previous is not None and not given.flags.writeable and previous.tensors.get(name) is given:
            entries.append(known[name])
            tensors[name] = given
            continue
        digest, finite = _digest_and_check_finite(given, yield_cpu)
        if not finite:
            not_finite.append(name)
        given.flags.writeable = False
        entries.append(TensorEntry(name, dtype_name(given.dtype), given.shape, digest))
        tensors[name] = given
    if not_finite:
        raise NotFinite(
            f"weights are not finite in {not_finite[:4]} and are not published; "
            "lower the learning rate or check the rewards"
        )
    table = encode_tensor_table(form, tuple(entries))
    if len(entries) > MAX_TENSORS or len(table) > MAX_TABLE_BYTES:
        raise WireError(
            f"{len(entries)} tensors with a table of {len(table)} bytes exceed the limits of {MAX_TENSORS} tensors and "
            f"{MAX_TABLE_BYTES} bytes; give the policy fewer, larger tensors, with shorter names"
        )
    return TensorSet(form, tuple(entries), tensors, blake3(table).digest())


def verify_tensor_set(
    manifest: WeightsManifest, tensors: Mapping[str, Array], known: Mapping[str, bytes], yield_cpu: YieldHook = no_yield
) -> TensorSet:
    """Verifies `tensors` against `manifest`.

    Args:
        known: digests, by name, of tensors that are verified already.

    Raises:
        WireError: names, dtypes, shapes or digests differ from the manifest, or it contradicts itself.
    """
    if blake3(encode_tensor_table(manifest.form, manifest.tensors)).digest() != manifest.digest:
        raise WireError(f"the manifest of version {manifest.version} has a digest that differs from its tensors")
    found = {name: (dtype_name(tensor.dtype), tensor.shape) for name, tensor in tensors.items()}
    if found != {entry.name: (entry.dtype, entry.shape) for entry in manifest.tensors}:
        raise WireError(f"weights {manifest.version}: names, dtypes or shapes differ from the manifest")
    for entry in manifest.tensors:
        digest = known.get(entry.name) or _digest(tensors[entry.name], yield_cpu)
        if digest != entry.digest:
            raise WireError(f"weights {manifest.version}: the digest of {entry.name!r} differs from the manifest")
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
    """Builds the manifest of `state`; a long table of tensors is left out. `errors` are those of rounding."""
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
    """Returns `manifest` with its tensors from `table`. Raises WireError if the digest of `table` differs."""
    if blake3(table).digest() != manifest.digest:
        raise WireError(
            f"the table of tensors of version {manifest.version} has a digest that differs from the manifest"
        )
    try:
        _, entries = msgspec.msgpack.decode(table, type=_TensorTable)
    except DECODE_ERRORS as error:
        raise WireError(
            f"the table of tensors of version {manifest.version} cannot be decoded: {str(error)[:200]}"
        ) from None
    return replace(manifest, tensors=entries)


def encode_tensor_table(form: Precision, entries: tuple[TensorEntry, ...]) -> bytes:
    """Encodes the input of a manifest's digest: the tensors and the digests of their bytes."""
    return msgspec.msgpack.encode((form, entries))


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


def slices(size: int, step: int = SLICE_BYTES) -> Iterator[slice]:
    """Yields consecutive slices of at most `step` that cover `size`."""
    return (slice(start, min(size, start + step)) for start in range(0, size, step))


def _digest_and_check_finite(tensor: Array, yield_cpu: YieldHook) -> tuple[bytes, bool]:
    """Returns the BLAKE3 digest of the bytes, and whether all values are finite, in one pass."""
    hasher, finite = blake3(), True
    flat = tensor.reshape(-1)
    for part in slices(flat.size, SLICE_BYTES // max(1, tensor.itemsize)):
        piece = flat[part]
        hasher.update(piece.view(np.uint8).data)
        finite = finite and bool(_is_finite(piece))
        yield_cpu(piece.nbytes)
    return hasher.digest(), finite


def _digest(tensor: Array, yield_cpu: YieldHook) -> bytes:
    hasher, content = blake3(), raw_bytes(tensor)
    for part in slices(content.size):
        hasher.update(content[part].data)
        yield_cpu(part.stop - part.start)
    return hasher.digest()


def _is_finite(values: Array) -> bool:
    if values.dtype == BF16:
        exponents = values.view(np.uint16) & np.uint16(0x7F80)
        return not (exponents == 0x7F80).any()
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())
