"""Distributes weights to peers: offers, replies to block requests, prefetching, and the staleness of each robot.

The publisher, the gateway and a relay share it. The size of an offer is bounded (`TunnelLimits.max_record_bytes`). An
offer always lists the patches that lead to the version without a base, and the table of tensors if the manifest lacks
it. It lists the newest deltas as far as they fit. A receiver whose delta is not listed fetches a full patch. The part
that is always listed takes at most 190 KB: per precision a manifest of `messages.INLINE_TABLE_BYTES`, and the checksums
of `messages.MAX_BLOCKS` and `MAX_CHAIN_BLOCKS` blocks.
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
    """A channel for messages about weights, such as `user_sys.tunnel.client.TunnelClient`."""

    def send_weights(self, message: WeightsMessage, payload: Payload | None = None) -> bool:
        """Queues a message and returns at once. Returns False if the message cannot be sent now."""

    def receive_weights(self, timeout_s: float) -> Envelope | None:
        """Returns the next message, or None after `timeout_s`."""


STALENESS_BOUNDS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
MAX_TRACKED_VERSIONS = 4096  # whose time of publication is kept


class StalenessHistogram:
    """How long the version of each robot has been outdated. One thread calls it, or its caller locks."""

    def __init__(self) -> None:
        self._offered: deque[tuple[int, float]] = deque(maxlen=MAX_TRACKED_VERSIONS)
        self._acting_versions: dict[str, int] = {}
        self._counts: dict[str, list[int]] = {}
        self._newest_s: dict[str, float] = {}

    def set_newest(self, version: int, now_s: float) -> None:
        """Records that `version` is the newest from `now_s` on."""
        if not self._offered or self._offered[-1][0] != version:
            self._offered.append((version, now_s))

    def set_version(self, robot: str, version: int) -> None:
        self._acting_versions[robot] = version

    def remove(self, robot: str) -> None:
        """Removes a disconnected robot; its samples stay."""
        self._acting_versions.pop(robot, None)
        self._newest_s.pop(robot, None)

    @property
    def oldest_in_use(self) -> int:
        """The oldest version in use by a robot; -1 if there is none."""
        return min(self._acting_versions.values(), default=-1)

    def sample(self, now_s: float) -> None:
        for robot, version in self._acting_versions.items():
            age_s = self._age_s(version, now_s)
            self._newest_s[robot] = age_s
            self._counts.setdefault(robot, [0] * (len(STALENESS_BOUNDS_S) + 1))[
                bisect.bisect_left(STALENESS_BOUNDS_S, age_s)
            ] += 1

    def scalars(self) -> dict[str, float]:
        """Returns for each robot the newest sample, and the fraction of samples up to each bound."""
        found = {f"staleness_s/{robot}": age_s for robot, age_s in self._newest_s.items()}
        for robot, counts in self._counts.items():
            total, below = sum(counts), 0
            for bound, count in zip(STALENESS_BOUNDS_S, counts, strict=False):
                below += count
                found[f"staleness_s/{robot}/up_to_{bound:g}"] = below / total
        return found

    def _age_s(self, version: int, now_s: float) -> float:
        """Returns the seconds since a newer version replaced `version`; 0 for the newest."""
        overtaken_s = now_s
        for offered, at_s in reversed(self._offered):
            if offered == version:
                return now_s - overtaken_s
            overtaken_s = at_s
        return now_s - overtaken_s


MAX_OFFER_BYTES = TunnelLimits.max_record_bytes - (8 << 10)
MAX_CHAIN_LENGTH = 32
"""Maximum number of deltas after a full patch: a late receiver fetches and applies them all."""
MAX_CHAIN_BLOCKS = 2048
"""Maximum number of blocks in these deltas: each has its checksum in the offer."""
MAX_UNANSWERED_OFFERS = 2
"""Maximum number of offers to a peer that does not reply. The next offer, with the newest version, follows its reply.
Twenty offers of some kilobytes per second would fill a slow link.
"""
UNANSWERED_TIMEOUT_S = 1.0
"""A peer without a reply gets the next offer after this time."""
MAX_INFO_BYTES = 160  # of a patch's description without its checksums
MAX_MANIFEST_BYTES = 512  # of a manifest without its tensors, with its signature


@dataclass
class OfferThrottle:
    """Decides when one peer gets the next offer.

    Attributes:
        is_pending: the newest version has not been offered.
    """

    is_pending: bool = False
    _unanswered: int = 0  # since the last message of the peer
    _sent_s: float = 0.0

    def is_due(self, now_s: float) -> bool:
        return self.is_pending and (
            self._unanswered < MAX_UNANSWERED_OFFERS or now_s - self._sent_s >= UNANSWERED_TIMEOUT_S
        )

    def on_peer_message(self) -> None:
        """Resets the count of unanswered offers."""
        self._unanswered = 0

    def on_offer_sent(self, now_s: float) -> None:
        self.is_pending, self._sent_s = False, now_s
        self._unanswered += 1


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
    """Builds an offer of `version` in the precisions `forms`, with the useful patches of `infos` that fit."""
    usable, forms = [info for info in infos if info.version <= version], tuple(forms)
    included = {
        info.id: info
        for info in usable
        if info.codec == TENSOR_TABLE and info.version == version and info.form in forms
    }
    included |= {info.id: info for form in forms for info in _path_from_nothing(usable, form, version)}
    signed = [*manifests, *([] if pin is None else [pin])]
    room = MAX_OFFER_BYTES - sum(len(each.body) + MAX_MANIFEST_BYTES for each in signed)
    room -= sum(map(_info_bytes, included.values()))
    for info in without_superseded(usable):
        if info.base == NO_VERSION or info.id in included:
            continue
        room -= _info_bytes(info)
        if room < 0:
            break
        included[info.id] = info
    return WeightsOffer(
        manifests=tuple(manifests),
        parcels=tuple(included.values()),
        signer=signer,
        order=pin,
        greeting=greeting,
    )


def _path_from_nothing(infos: Iterable[PatchInfo], form: Precision, version: int) -> tuple[PatchInfo, ...]:
    path = cheapest_path(infos, form, version, {})
    return () if path is None else path.patches


def _info_bytes(info: PatchInfo) -> int:
    return MAX_INFO_BYTES + len(info.crcs)


DOWNLOAD_TIMEOUT_S = 120.0  # without a request; the peer has given up or left
OFFER_PIN_S = 2.0  # without a request; the peer prefers something newer
MAX_PREFETCH_BYTES = 1 << 20
"""How much may follow an offer unrequested."""

BlockReply = tuple[WeightsBlocks, memoryview] | tuple[WeightsGone, None]


def read_blocks(index: VersionIndex, request: WeightsRequest) -> list[BlockReply]:
    """Returns the requested blocks as messages, or `WeightsGone`. Copies nothing.

    Each message has at most `MESSAGE_BYTES` and all of them `REQUEST_BYTES`, but at least one block.
    """
    patch = index.patches.get(request.parcel)
    if patch is None or not (requested := _requested_blocks(patch, request)):
        return [(WeightsGone(parcel=request.parcel), None)]
    step = max(1, MESSAGE_BYTES // patch.info.block_bytes)
    return [
        (WeightsBlocks(parcel=request.parcel, first=first), patch.blocks(first, min(step, requested.stop - first)))
        for first in requested[::step]
    ]


class ActiveDownloads:
    """Patches that peers are fetching and no newer version needs. They are kept so that peers on slow links complete.

    Keeps the full patches of each peer, and the ``parts`` patch that it requested last in each precision. Also keeps
    ``parts`` patches that were offered lately: versions may follow faster than requests arrive.

    Args:
        max_count: how many full patches and how many ``parts`` patches are kept, the oldest first.
    """

    def __init__(self, max_count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_count, self._clock = max_count, clock
        self._requested: dict[tuple[str, bytes], tuple[PatchInfo, float]] = {}
        self._offered_s: dict[bytes, float] = {}

    def add_offered(self, infos: Iterable[PatchInfo]) -> None:
        """Records patches that are about to be offered."""
        self._offered_s |= {info.id: self._clock() for info in infos if info.codec == "parts"}

    def on_request(self, peer: str, request: WeightsRequest, known: PatchInfo) -> None:
        """Records a request. A request for the last block ends the download."""
        key = peer, known.id
        if request.first + request.count >= known.block_count:
            self._requested.pop(key, None)
            return
        if known.codec == "parts":
            kind = peer, known.form, known.codec
            previous = [of for of, (info, _) in self._requested.items() if (of[0], info.form, info.codec) == kind]
            for other in set(previous) - {key}:
                del self._requested[other]
        if known.codec in ("full", "parts"):
            self._requested[key] = known, self._clock()

    def pinned_ids(self) -> set[bytes]:
        since_s = self._clock() - OFFER_PIN_S
        self._offered_s = {patch: at_s for patch, at_s in self._offered_s.items() if at_s >= since_s}
        return self.requested_ids() | self._offered_s.keys()

    def requested_ids(self) -> set[bytes]:
        """Returns the patches that a peer has begun to request."""
        since_s = self._clock() - DOWNLOAD_TIMEOUT_S
        self._requested = {key: (info, at_s) for key, (info, at_s) in self._requested.items() if at_s >= since_s}
        infos = [info for info, _ in self._requested.values()]
        fulls, parts = ([info.id for info in infos if info.codec == codec] for codec in ("full", "parts"))
        return {*fulls[: self._max_count], *parts[: self._max_count]}


@dataclass(frozen=True)
class _DownloadTarget:
    """The version that a peer fetches. `pinned_ids` are offered patches that lead there without a base."""

    version: int = NO_VERSION
    requested_s: float = 0.0
    missed_s: float = -math.inf
    pinned_ids: frozenset[bytes] = frozenset()


class DownloadTargets:
    """The versions that peers are fetching. They are kept so that peers on slow links complete.

    A peer that requests a missing patch first gets an offer of the newest version and then `WeightsGone`. So it
    switches
    at once, and the offered patches are pinned until it has fetched them.

    Args:
        max_count: how many versions are kept, the oldest first: peers complete them first.
    """

    def __init__(self, max_count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_count, self._clock = max_count, clock
        self._targets: dict[str, _DownloadTarget] = {}

    def on_request(self, peer: str, known: PatchInfo, newest: int) -> None:
        """Records that `peer` requests blocks of an existing patch."""
        target = self._targets.get(peer, _DownloadTarget())
        if known.version > target.version:
            target = _DownloadTarget(max(newest, known.version))
        self._targets[peer] = replace(target, requested_s=self._clock(), missed_s=-math.inf)

    def on_missing(self, peer: str, newest: int, offer: Callable[[], Iterable[PatchInfo]]) -> None:
        """Handles a request of `peer` for a missing patch. `offer` sends the newest version and returns its patches.

        Further requests of the peer before it receives the offer have no effect.
        """
        now, target = self._clock(), self._targets.get(peer, _DownloadTarget())
        if now - target.missed_s > OFFER_PIN_S and (infos := tuple(offer())):
            paths = (cheapest_path(infos, form, newest, {}) or UpdatePath() for form in {info.form for info in infos})
            pinned = {info.id for path in paths for info in path.patches} | {
                i.id for i in infos if i.codec == TENSOR_TABLE
            }
            target = _DownloadTarget(newest, missed_s=now, pinned_ids=frozenset(pinned))
        self._targets[peer] = replace(target, requested_s=now)

    def versions(self) -> set[int]:
        return {target.version for target in self._oldest()}

    def pinned_ids(self) -> set[bytes]:
        return {patch for target in self._oldest() for patch in target.pinned_ids}

    def _oldest(self) -> list[_DownloadTarget]:
        since_s = self._clock() - DOWNLOAD_TIMEOUT_S
        self._targets = {peer: target for peer, target in self._targets.items() if target.requested_s >= since_s}
        versions = sorted({target.version for target in self._targets.values()})[: self._max_count]
        return [target for target in self._targets.values() if target.version in versions]


class PrefetchPlanner:
    """Plans the blocks that follow an offer unrequested. Computes the path once for robots with the same version."""

    def __init__(self, index: VersionIndex, version: int) -> None:
        self._infos, self._version = index.patch_infos(), version
        self._manifests = index.manifests
        self._paths: dict[tuple[Precision, int, bytes], tuple[PatchInfo, ...]] = {}

    def requests(self, applied: WeightsApplied) -> tuple[WeightsRequest, ...]:
        """Returns the requests that a robot would send first, within the budget in `applied`."""
        left, found = min(applied.ahead_bytes, MAX_PREFETCH_BYTES), list[WeightsRequest]()
        for info in self._path(applied.form, applied.version, applied.digest) if left > 0 else ():
            count = info.block_count if info.size_bytes <= left else left // info.block_bytes
            if count == 0:
                break
            found.append(WeightsRequest(parcel=info.id, first=0, count=count))
            left -= min(info.size_bytes, count * info.block_bytes)
        return tuple(found)

    def _path(self, form: Precision, held: int, digest: bytes) -> tuple[PatchInfo, ...]:
        if (form, held, digest) not in self._paths:
            self._paths[form, held, digest] = self._find_path(form, {held: digest})
        return self._paths[form, held, digest]

    def _find_path(self, form: Precision, held: dict[int, bytes]) -> tuple[PatchInfo, ...]:
        """Returns the smallest path to the version, preceded by the table of tensors if the manifest lacks it."""
        path, known = cheapest_path(self._infos, form, self._version, held), self._manifests.get((form, self._version))
        if path is None or known is None:
            return ()
        table = None if known[0].has_tensors else find_table(self._infos, known[0])
        return path.patches if table is None else (table, *path.patches)


def is_corrupt(index: VersionIndex, request: WeightsRequest) -> bool:
    """Whether a requested block fails its checksum, for example after disk corruption."""
    patch = index.patches.get(request.parcel)
    return patch is not None and not all(
        is_block_intact(patch.blocks(block, 1), patch.info, block) for block in _requested_blocks(patch, request)
    )


def _requested_blocks(patch: Patch, request: WeightsRequest) -> range:
    """Returns the blocks that one request delivers; empty if the request is out of range."""
    if not 0 <= request.first < patch.info.block_count:
        return range(0)
    max_blocks = max(1, REQUEST_BYTES // patch.info.block_bytes)
    return range(request.first, min(request.first + min(request.count, max_blocks), patch.info.block_count))
