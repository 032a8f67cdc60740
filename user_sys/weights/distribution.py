"""What publisher and receiver need of a transport.

How old the weights are with which each robot acts: a histogram of the seconds since they were overtaken.

What an offer says: the manifests of a version, and of what leads there as much as one message holds.

The record of a message is bounded (`TunnelLimits.max_record_bytes`). The parcels that lead from nothing to the version
are always named, with the tables of tensors that are too long for their manifests; of the differences for receivers
that have an earlier one, the newest, as far as they fit. A receiver for which there is no room starts from a full
parcel. What is always named takes 190 KB at most: in each of three forms a manifest of `records.INLINE_TABLE_BYTES`,
and checksums of `records.MAX_GRAINS` and `MAX_CHAIN_BLOCKS` grains.

The answers to a request for grains, the same at the learner, the gateway and a relay.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from user_sys.messages import (
    NO_VERSION,
    TENSOR_TABLE,
    PatchInfo,
    Precision,
    SignedRecord,
    WeightsApplied,
    WeightsBlocks,
    WeightsGone,
    WeightsMessage,
    WeightsOffer,
    WeightsRequest,
)
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import Envelope, Payload
from user_sys.weights.fetcher import MESSAGE_BYTES, REQUEST_BYTES
from user_sys.weights.patches import (
    Patch,
    UpdatePath,
    VersionIndex,
    cheapest_path,
    find_table,
    is_block_intact,
    without_superseded,
)


class WeightsChannel(Protocol):
    """A channel for messages about weights. `user_sys.tunnel.client.TunnelClient` is one."""

    def send_weights(self, message: WeightsMessage, payload: Payload | None = None) -> bool:
        """Queues a message and returns at once; False when it cannot be sent now."""

    def receive_weights(self, timeout_s: float) -> Envelope | None:
        """The next message, or None after `timeout_s`."""


STALENESS_BOUNDS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
MAX_TRACKED_VERSIONS = 4096  # of which the time of publication is remembered


class StalenessHistogram:
    """Counts one sample a robot at each `sample`. One thread calls it, or its caller locks."""

    def __init__(self) -> None:
        self._offered: deque[tuple[int, float]] = deque(maxlen=MAX_TRACKED_VERSIONS)
        self._acting: dict[str, int] = {}
        self._counts: dict[str, list[int]] = {}
        self._newest_s: dict[str, float] = {}

    def set_newest(self, version: int, now_s: float) -> None:
        """From now on robots should act with `version`."""
        if not self._offered or self._offered[-1][0] != version:
            self._offered.append((version, now_s))

    def set_version(self, robot: str, version: int) -> None:
        self._acting[robot] = version

    def remove(self, robot: str) -> None:
        """The robot is not connected; what was counted of it stays."""
        self._acting.pop(robot, None)
        self._newest_s.pop(robot, None)

    @property
    def oldest_in_use(self) -> int:
        """The oldest version with which a robot acts; -1 where none does with any."""
        return min(self._acting.values(), default=-1)

    def sample(self, now_s: float) -> None:
        for robot, version in self._acting.items():
            age_s = self._age_s(version, now_s)
            self._newest_s[robot] = age_s
            self._counts.setdefault(robot, [0] * (len(STALENESS_BOUNDS_S) + 1))[
                bisect.bisect_left(STALENESS_BOUNDS_S, age_s)
            ] += 1

    def scalars(self) -> dict[str, float]:
        """Of each robot: the newest sample, and the share of samples up to each bound."""
        found = {f"staleness_s/{robot}": age_s for robot, age_s in self._newest_s.items()}
        for robot, counts in self._counts.items():
            total, below = sum(counts), 0
            for bound, count in zip(STALENESS_BOUNDS_S, counts, strict=False):
                below += count
                found[f"staleness_s/{robot}/up_to_{bound:g}"] = below / total
        return found

    def _age_s(self, version: int, now_s: float) -> float:
        """Seconds since another version took the place of `version`; 0 while it is the newest offered."""
        overtaken_s = now_s
        for offered, at_s in reversed(self._offered):
            if offered == version:
                return now_s - overtaken_s
            overtaken_s = at_s
        return now_s - overtaken_s


MAX_OFFER_BYTES = TunnelLimits.max_record_bytes - (8 << 10)
MAX_CHAIN_LENGTH = 32
"""At most so many differences follow a full parcel: a latecomer fetches and applies them all."""
MAX_CHAIN_BLOCKS = 2048
"""... and of so many grains, each of which has its checksum in the offer."""
MAX_UNANSWERED_OFFERS = 2
"""So many offers go to a peer that says nothing; the next one, the newest by then, when it has said something. An offer
is some kilobytes, and twenty a second would leave a slow link no room for weights."""
UNANSWERED_TIMEOUT_S = 1.0
"""... or has said nothing for so long: it may not want what was offered."""
MAX_INFO_BYTES = 160  # of a parcel's description without its checksums, at most
MAX_MANIFEST_BYTES = 512  # of a manifest without its tensors, and of its signature, at most


@dataclass
class OfferThrottle:
    """When one peer is to be told of the newest version.

    Attributes:
        is_pending: it has not been told.
    """

    is_pending: bool = False
    _offers: int = 0  # since it said something
    _told_s: float = 0.0

    def is_due(self, now_s: float) -> bool:
        return self.is_pending and (
            self._offers < MAX_UNANSWERED_OFFERS or now_s - self._told_s >= UNANSWERED_TIMEOUT_S
        )

    def on_peer_message(self) -> None:
        """The peer has said something."""
        self._offers = 0

    def on_offer_sent(self, now_s: float) -> None:
        self.is_pending, self._told_s = False, now_s
        self._offers += 1


def build_offer(
    manifests: Collection[SignedRecord],
    infos: Iterable[PatchInfo],
    forms: Iterable[Precision],
    version: int,
    *,
    signer: bytes,
    pin: SignedRecord | None = None,
    greeting: bool = False,
) -> WeightsOffer:
    """An offer of `version` in `forms`, with those of `infos` that are of use and have room."""
    of_use, forms = [info for info in infos if info.version <= version], tuple(forms)
    named = {
        info.id: info
        for info in of_use
        if info.codec == TENSOR_TABLE and info.version == version and info.form in forms
    }
    named |= {info.id: info for form in forms for info in _path_from_nothing(of_use, form, version)}
    signed = [*manifests, *([] if pin is None else [pin])]
    room = MAX_OFFER_BYTES - sum(len(each.body) + MAX_MANIFEST_BYTES for each in signed)
    room -= sum(map(_info_bytes, named.values()))
    for info in without_superseded(of_use):
        if info.base == NO_VERSION or info.id in named:
            continue
        room -= _info_bytes(info)
        if room < 0:
            break
        named[info.id] = info
    return WeightsOffer(
        manifests=tuple(manifests),
        parcels=tuple(named.values()),
        signer=signer,
        order=pin,
        greeting=greeting,
    )


def _path_from_nothing(infos: Iterable[PatchInfo], form: Precision, version: int) -> tuple[PatchInfo, ...]:
    way = cheapest_path(infos, form, version, {})
    return () if way is None else way.patches


def _info_bytes(info: PatchInfo) -> int:
    return MAX_INFO_BYTES + len(info.crcs)


DOWNLOAD_TIMEOUT_S = 120.0  # without a request: whoever was fetching a version has given it up, or left
OFFER_PIN_S = 2.0  # after which whoever has not asked for what was offered wants something newer
MAX_PREFETCH_BYTES = 1 << 20
"""So much follows an offer unasked, at most."""

BlockReply = tuple[WeightsBlocks, memoryview] | tuple[WeightsGone, None]


def read_blocks(catalogue: VersionIndex, request: WeightsRequest) -> list[BlockReply]:
    """The grains that were asked for, in messages one after the other, or word that they are gone.

    They are of at most `fetch.MESSAGE_BYTES` each and `fetch.REQUEST_BYTES` in sum, but one grain at least. Copies
    nothing.
    """
    parcel = catalogue.patches.get(request.parcel)
    if parcel is None or not (asked := _requested_blocks(parcel, request)):
        return [(WeightsGone(parcel=request.parcel), None)]
    step = max(1, MESSAGE_BYTES // parcel.info.block_bytes)
    return [
        (WeightsBlocks(parcel=request.parcel, first=first), parcel.blocks(first, min(step, asked.stop - first)))
        for first in asked[::step]
    ]


class ActiveDownloads:
    """What peers are fetching that no newer version needs: who had to begin anew, on a slow link, would never end.

    Of each peer, its full parcels, and in each form the ``parts`` that it asked for last; and ``parts`` that peers may
    be about to ask for: where versions follow faster than a request upon an offer, these would always be gone.

    Args:
        most: of either are remembered, those that were begun first.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._asked: dict[tuple[str, bytes], tuple[PatchInfo, float]] = {}
        self._offered_s: dict[bytes, float] = {}

    def add_offered(self, fresh: Iterable[PatchInfo]) -> None:
        """Peers are about to be told of these."""
        self._offered_s |= {info.id: self._clock() for info in fresh if info.codec == "parts"}

    def on_request(self, peer: str, request: WeightsRequest, known: PatchInfo) -> None:
        """`peer` asks for grains of a parcel; whoever asks for the last one has it soon."""
        key = peer, known.id
        if request.first + request.count >= known.block_count:
            self._asked.pop(key, None)
            return
        if known.codec == "parts":
            now = peer, known.form, known.codec
            former = [of for of, (info, _) in self._asked.items() if (of[0], info.form, info.codec) == now]
            for other in set(former) - {key}:
                del self._asked[other]
        if known.codec in ("full", "parts"):
            self._asked[key] = known, self._clock()

    def pinned_ids(self) -> set[bytes]:
        since_s = self._clock() - OFFER_PIN_S
        self._offered_s = {parcel: at_s for parcel, at_s in self._offered_s.items() if at_s >= since_s}
        return self.requested_ids() | self._offered_s.keys()

    def requested_ids(self) -> set[bytes]:
        """Those that a peer has begun to ask for."""
        since_s = self._clock() - DOWNLOAD_TIMEOUT_S
        self._asked = {begun: (info, at_s) for begun, (info, at_s) in self._asked.items() if at_s >= since_s}
        infos = [info for info, _ in self._asked.values()]
        fulls, parts = ([info.id for info in infos if info.codec == codec] for codec in ("full", "parts"))
        return {*fulls[: self._most], *parts[: self._most]}


@dataclass(frozen=True)
class _DownloadTarget:
    """At a version. `pinned_ids` leads there from nothing: ids of parcels that were offered when others were gone."""

    version: int = NO_VERSION
    asked_s: float = 0.0
    missed_s: float = -math.inf
    pinned_ids: frozenset[bytes] = frozenset()


class DownloadTargets:
    """The versions that peers are at: without them these would begin anew, and one on a slow link never end.

    What leads to an aim is of no newer version. A peer that asks for what is gone hears of the newest, and then that it
    is gone: so it turns to that, and what it was offered stays for it.

    Args:
        most: are remembered, the oldest, which will be reached first.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._aims: dict[str, _DownloadTarget] = {}

    def on_request(self, peer: str, known: PatchInfo, newest: int) -> None:
        """`peer` asks for grains of a parcel that is here."""
        aim = self._aims.get(peer, _DownloadTarget())
        if known.version > aim.version:
            aim = _DownloadTarget(max(newest, known.version))
        self._aims[peer] = replace(aim, asked_s=self._clock(), missed_s=-math.inf)

    def on_missing(self, peer: str, newest: int, offer: Callable[[], Iterable[PatchInfo]]) -> None:
        """`peer` asks for what is gone, and is about to be told. `offer` has it hear of `newest`, and returns by what.

        What it asks of the same version until it has heard comes here as well, and changes nothing.
        """
        now, aim = self._clock(), self._aims.get(peer, _DownloadTarget())
        if now - aim.missed_s > OFFER_PIN_S and (infos := tuple(offer())):
            ways = (cheapest_path(infos, form, newest, {}) or UpdatePath() for form in {info.form for info in infos})
            promised = {info.id for way in ways for info in way.patches} | {
                i.id for i in infos if i.codec == TENSOR_TABLE
            }
            aim = _DownloadTarget(newest, missed_s=now, pinned_ids=frozenset(promised))
        self._aims[peer] = replace(aim, asked_s=now)

    def versions(self) -> set[int]:
        return {aim.version for aim in self._oldest()}

    def pinned_ids(self) -> set[bytes]:
        return {parcel for aim in self._oldest() for parcel in aim.pinned_ids}

    def _oldest(self) -> list[_DownloadTarget]:
        since_s = self._clock() - DOWNLOAD_TIMEOUT_S
        self._aims = {peer: aim for peer, aim in self._aims.items() if aim.asked_s >= since_s}
        versions = sorted({aim.version for aim in self._aims.values()})[: self._most]
        return [aim for aim in self._aims.values() if aim.version in versions]


class PrefetchPlanner:
    """What follows an offer of a version unasked. Robots that hold the same have their way looked for once."""

    def __init__(self, catalogue: VersionIndex, version: int) -> None:
        self._infos, self._version = catalogue.patch_infos(), version
        self._manifests = catalogue.manifests
        self._ways: dict[tuple[Precision, int, bytes], tuple[PatchInfo, ...]] = {}

    def requests(self, applied: WeightsApplied) -> tuple[WeightsRequest, ...]:
        """What a robot that said `applied` would ask for first, as far as it lets that come unasked."""
        left, found = min(applied.ahead_bytes, MAX_PREFETCH_BYTES), list[WeightsRequest]()
        for info in self._way(applied.form, applied.version, applied.digest) if left > 0 else ():
            count = info.block_count if info.size_bytes <= left else left // info.block_bytes
            if count == 0:
                break
            found.append(WeightsRequest(parcel=info.id, first=0, count=count))
            left -= min(info.size_bytes, count * info.block_bytes)
        return tuple(found)

    def _way(self, form: Precision, held: int, digest: bytes) -> tuple[PatchInfo, ...]:
        if (form, held, digest) not in self._ways:
            self._ways[form, held, digest] = self._smallest(form, {held: digest})
        return self._ways[form, held, digest]

    def _smallest(self, form: Precision, held: dict[int, bytes]) -> tuple[PatchInfo, ...]:
        """The smallest parcels that lead to the version, with the table of its tensors first, where that is apart."""
        way, known = cheapest_path(self._infos, form, self._version, held), self._manifests.get((form, self._version))
        if way is None or known is None:
            return ()
        table = None if known[0].has_tensors else find_table(self._infos, known[0])
        return way.patches if table is None else (table, *way.patches)


def is_corrupt(catalogue: VersionIndex, request: WeightsRequest) -> bool:
    """Whether a grain that `read_blocks` would hand out is not what was described: what lies on a disk may rot."""
    parcel = catalogue.patches.get(request.parcel)
    return parcel is not None and not all(
        is_block_intact(parcel.blocks(grain, 1), parcel.info, grain) for grain in _requested_blocks(parcel, request)
    )


def _requested_blocks(parcel: Patch, request: WeightsRequest) -> range:
    """The grains that one request brings; none where it asks for what is not there."""
    if not 0 <= request.first < parcel.info.block_count:
        return range(0)
    most = max(1, REQUEST_BYTES // parcel.info.block_bytes)
    return range(request.first, min(request.first + min(request.count, most), parcel.info.block_count))
