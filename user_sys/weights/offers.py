"""What an offer says: the manifests of a version, and of what leads there as much as one message holds.

The record of a message is bounded (`TunnelLimits.max_record_bytes`). The parcels that lead from nothing to the version
are always named; of the differences for receivers that have an earlier one, the newest, as far as they fit. A receiver
for which there is no room starts from a full parcel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from user_sys.codec import Array
from user_sys.errors import ConfigError
from user_sys.messages import WeightsOffer
from user_sys.tunnel.limits import TunnelLimits
from user_sys.weights.catalogue import cheapest
from user_sys.weights.forms import SCALES, is_scaled
from user_sys.weights.records import (
    CRC_BYTES,
    DIGEST_BYTES,
    MAX_GRAINS,
    NO_VERSION,
    Form,
    ParcelInfo,
    Signed,
    TensorEntry,
)
from user_sys.weights.state import dtype_name

MAX_OFFER_BYTES = TunnelLimits.max_record_bytes - (8 << 10)
MAX_CHAIN = 32
"""At most so many differences follow a full parcel: a latecomer fetches and applies them all."""
MAX_CHAIN_GRAINS = 2048
"""... and of so many grains, each of which has its checksum in the offer."""
INFO_BYTES = 160  # of a parcel's description without its checksums, at most
MANIFEST_BYTES = 512  # of a manifest without its tensors, and of its signature, at most
WAY_BYTES = (MAX_CHAIN + 1) * INFO_BYTES + (MAX_GRAINS + MAX_CHAIN_GRAINS) * CRC_BYTES
"""What leads from nothing to one form of a version, at most."""


def fitting_offer(
    manifests: Collection[Signed],
    infos: Iterable[ParcelInfo],
    forms: Iterable[Form],
    version: int,
    *,
    signer: bytes,
    order: Signed | None = None,
    greeting: bool = False,
) -> WeightsOffer:
    """An offer of `version` in `forms`, with those of `infos` that are of use and have room."""
    of_use = [info for info in infos if info.version <= version]
    named = {info.id: info for form in forms for info in _way(of_use, form, version)}
    signed = [*manifests, *([] if order is None else [order])]
    room = MAX_OFFER_BYTES - sum(len(each.body) + MANIFEST_BYTES for each in signed)
    room -= sum(map(_size, named.values()))
    others = (info for info in of_use if info.base != NO_VERSION and info.id not in named)
    for info in sorted(others, key=lambda info: info.version, reverse=True):
        room -= _size(info)
        if room < 0:
            break
        named[info.id] = info
    return WeightsOffer(
        manifests=tuple(manifests), parcels=tuple(named.values()), signer=signer, order=order, greeting=greeting
    )


def require_room(arrays: Mapping[str, Array], forms: Collection[Form]) -> None:
    """Whether versions of such weights can be offered at all.

    Raises:
        ConfigError: they are so many tensors that their descriptions, in these forms, do not fit one offer.
        WireError: a dtype that does not travel.
    """
    needed = sum(_described_bytes(arrays, form) + MANIFEST_BYTES + WAY_BYTES for form in forms)
    if needed > MAX_OFFER_BYTES:
        raise ConfigError(
            f"learner.publish: {len(arrays)} tensors in the forms {', '.join(forms)} take {needed} bytes to describe, "
            f"and an offer has {MAX_OFFER_BYTES}; name fewer forms, or give the policy fewer, larger tensors"
        )


def _way(infos: Iterable[ParcelInfo], form: Form, version: int) -> tuple[ParcelInfo, ...]:
    way = cheapest(infos, form, version, {})
    return () if way is None else way.parcels


def _size(info: ParcelInfo) -> int:
    return INFO_BYTES + len(info.crcs)


def _described_bytes(arrays: Mapping[str, Array], form: Form) -> int:
    entries = [TensorEntry(name, dtype_name(a.dtype), a.shape, bytes(DIGEST_BYTES)) for name, a in arrays.items()]
    if form == "int8":
        scaled = [(name, a.shape[-1:]) for name, a in arrays.items() if is_scaled(a)]
        entries += [TensorEntry(name + SCALES, "float32", shape, bytes(DIGEST_BYTES)) for name, shape in scaled]
    return len(msgspec.msgpack.encode(entries))
