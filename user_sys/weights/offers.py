"""What an offer says: the manifests of a version, and of what leads there as much as one message holds.

The record of a message is bounded (`TunnelLimits.max_record_bytes`). The parcels that lead from nothing to the version
are always named, with the tables of tensors that are too long for their manifests; of the differences for receivers
that have an earlier one, the newest, as far as they fit. A receiver for which there is no room starts from a full
parcel. What is always named takes 190 KB at most: in each of three forms a manifest of `records.INLINE_TABLE_BYTES`,
and checksums of `records.MAX_GRAINS` and `MAX_CHAIN_GRAINS` grains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from user_sys.messages import WeightsOffer
from user_sys.tunnel.limits import TunnelLimits
from user_sys.weights.catalogue import cheapest, up_to_date
from user_sys.weights.records import NO_VERSION, TABLE, Form, ParcelInfo, Signed

MAX_OFFER_BYTES = TunnelLimits.max_record_bytes - (8 << 10)
MAX_CHAIN = 32
"""At most so many differences follow a full parcel: a latecomer fetches and applies them all."""
MAX_CHAIN_GRAINS = 2048
"""... and of so many grains, each of which has its checksum in the offer."""
UNANSWERED = 2
"""So many offers go to a peer that says nothing; the next one, the newest by then, when it has said something. An offer
is some kilobytes, and twenty a second would leave a slow link no room for weights."""
SILENT_S = 1.0
"""... or has said nothing for so long: it may not want what was offered."""
INFO_BYTES = 160  # of a parcel's description without its checksums, at most
MANIFEST_BYTES = 512  # of a manifest without its tensors, and of its signature, at most


@dataclass
class OfferPace:
    """When one peer is to be told of the newest version.

    Attributes:
        behind: it has not been told.
    """

    behind: bool = False
    _offers: int = 0  # since it said something
    _told_s: float = 0.0

    def due(self, now_s: float) -> bool:
        return self.behind and (self._offers < UNANSWERED or now_s - self._told_s >= SILENT_S)

    def heard(self) -> None:
        """The peer has said something."""
        self._offers = 0

    def told(self, now_s: float) -> None:
        self.behind, self._told_s = False, now_s
        self._offers += 1


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
    of_use, forms = [info for info in infos if info.version <= version], tuple(forms)
    named = {info.id: info for info in of_use if info.codec == TABLE and info.version == version and info.form in forms}
    named |= {info.id: info for form in forms for info in _way(of_use, form, version)}
    signed = [*manifests, *([] if order is None else [order])]
    room = MAX_OFFER_BYTES - sum(len(each.body) + MANIFEST_BYTES for each in signed)
    room -= sum(map(_size, named.values()))
    for info in up_to_date(of_use):
        if info.base == NO_VERSION or info.id in named:
            continue
        room -= _size(info)
        if room < 0:
            break
        named[info.id] = info
    return WeightsOffer(
        manifests=tuple(manifests),
        parcels=tuple(named.values()),
        signer=signer,
        order=order,
        greeting=greeting,
    )


def _way(infos: Iterable[ParcelInfo], form: Form, version: int) -> tuple[ParcelInfo, ...]:
    way = cheapest(infos, form, version, {})
    return () if way is None else way.parcels


def _size(info: ParcelInfo) -> int:
    return INFO_BYTES + len(info.crcs)
