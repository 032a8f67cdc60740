"""What is said about weights: manifests of versions, parcels that carry them, and people's orders.

A *version* is what the learner published under one number. Each *form* of it (exact, or rounded) has a manifest with
the digest of every tensor, signed by the learner. *Parcels* are the bytes that lead to a form: a full one from nothing,
others from an earlier version of the same form. They need no signature: what comes of them must have the manifest's
digests.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, TypeVar

import msgspec

from hal.undecodable import UNDECODABLE
from user_sys.errors import WireError

Form: TypeAlias = Literal["exact", "bf16", "int8"]
Codec: TypeAlias = Literal["full", "delta", "parts", "table"]

NO_VERSION = -1
OTHER_RUN = -2
"""In the place of a version of another run, or of one not known to be of this: its number would say nothing here."""
MAX_PARCEL_BYTES = 1 << 34
MAX_GRAINS = 4096
MAX_TENSORS = 1 << 15
"""of a version, in each of its forms; the scales of integers count."""
MAX_TABLE_BYTES = 16 << 20
INLINE_TABLE_BYTES = 32 << 10
"""A manifest whose table of tensors is longer is without it; the table travels as a parcel of its own."""
TABLE: Literal["table"] = "table"
CRC_BYTES = 4
DIGEST_BYTES = 32

Record = TypeVar("Record", bound=msgspec.Struct)


class Life(msgspec.Struct, frozen=True):
    """Of which run, and in which of its lives, a learner publishes; see `Manifest` and `user_sys.weights.runs`."""

    run: bytes = b""
    number: int = 0


UNNAMED = Life()


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """`digest` is the BLAKE3 of the tensor's bytes, little-endian, in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One form of a version: policy and normalizers, complete.

    Attributes:
        version: grows with each publication of a run, and over restarts of its learner.
        updates: how many updates the learner had made.
        form: ``exact``; or ``bf16`` / ``int8`` for inference, rounded at the source.
        tensors: in the order of their names; none where their table travels apart, as a parcel of `table_bytes`.
        digest: of `form` and `tensors`, so of every byte.
        size_bytes: of all tensors.
        published_unix_ns: the learner's clock.
        max_error, rms_error: of rounding: the largest, in the tensors' unit, and relative to their root mean square.
        run: identifies the run whose numbers these are; see `user_sys.weights.runs`.
        life: of the learner; of two runs the later has the greater ones.
    """

    version: int
    updates: int
    form: Form
    tensors: tuple[TensorEntry, ...]
    digest: bytes
    size_bytes: int
    published_unix_ns: int
    table_bytes: int = 0
    max_error: float = 0.0
    rms_error: float = 0.0
    run: bytes = b""
    life: int = 0

    @property
    def entire(self) -> bool:
        """Whether `tensors` are there."""
        return bool(self.tensors) or not self.table_bytes


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A person's word: from now on every robot acts with `version`, or again with the newest (`NO_VERSION`).

    It says nothing of versions of another run than `run`. `serial` grows with each order; receivers obey only one that
    is newer than the last of its run that they obeyed.
    """

    serial: int
    version: int
    by: str
    reason: str
    given_unix_ns: int
    run: bytes = b""


class Signed(msgspec.Struct, frozen=True, array_like=True):
    """An encoded `Manifest` or `Order`, and its Ed25519 signature."""

    body: bytes
    signature: bytes


class ParcelInfo(msgspec.Struct, frozen=True, array_like=True):
    """One parcel: what it leads to, from where, and how to check its pieces as they come.

    Attributes:
        id: BLAKE3 of what it leads to, from where and how: a parcel is the same wherever it lies.
        base: the version that it changes; of ``parts``, the oldest of those that it changes; `NO_VERSION` for a full
            one.
        base_digest: of that version's manifest; empty for a full one.
        codec: ``full``: every tensor; ``parts``: whole tensors, all that changed since `base`, so that it changes any
            version of the same life from there on; ``delta``: changed bits too.
            ``table``: no tensor, but what they are and their digests, for a manifest that is without.
        grain_bytes: it is checked, and asked for, in grains of so many bytes; the last one may be shorter.
        crcs: CRC32C of each grain, little-endian, one after the other.
    """

    id: bytes
    form: Form
    version: int
    base: int
    base_digest: bytes
    codec: Codec
    size_bytes: int
    grain_bytes: int
    crcs: bytes

    @property
    def grains(self) -> int:
        return -(-self.size_bytes // self.grain_bytes)


def decode_record(raw: bytes, kind: type[Record]) -> Record:
    """Raises WireError: not a record of this kind."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except UNDECODABLE as error:
        raise WireError(f"not a {kind.__name__}: {str(error)[:200]}") from None


def check_parcel(info: ParcelInfo) -> None:
    """Whether a parcel's description is within its bounds, before anything is allocated for it. Raises WireError."""
    sound = (
        0 < info.size_bytes <= (MAX_TABLE_BYTES if info.codec == TABLE else MAX_PARCEL_BYTES)
        and 0 < info.grain_bytes
        and info.grains <= MAX_GRAINS
        and len(info.crcs) == CRC_BYTES * info.grains
        and len(info.id) == DIGEST_BYTES
        and (info.base == NO_VERSION) == (info.codec in ("full", TABLE)) == (not info.base_digest)
        and NO_VERSION <= info.base < info.version
    )
    if not sound:
        raise WireError(
            f"the description of a parcel to version {info.version} of {info.size_bytes} bytes is not sound"
        )
