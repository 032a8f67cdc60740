"""The answers to a request for grains, the same at the learner, the gateway and a relay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from user_sys.messages import WeightsApplied, WeightsGone, WeightsGrains, WeightsRequest
from user_sys.weights.catalogue import Catalogue, Way, cheapest, table_of
from user_sys.weights.fetch import MESSAGE_BYTES, REQUEST_BYTES
from user_sys.weights.parcel import Parcel, crc_of
from user_sys.weights.records import NO_VERSION, TABLE, Form, ParcelInfo

FETCHED_S = 120.0  # without a request: whoever was fetching a version has given it up, or left
OFFERED_S = 2.0  # after which whoever has not asked for what was offered wants something newer
AHEAD_BYTES = 1 << 20
"""So much follows an offer unasked, at most."""

Answer = tuple[WeightsGrains, memoryview] | tuple[WeightsGone, None]


def answers(catalogue: Catalogue, request: WeightsRequest) -> list[Answer]:
    """The grains that were asked for, in messages one after the other, or word that they are gone.

    They are of at most `fetch.MESSAGE_BYTES` each and `fetch.REQUEST_BYTES` in sum, but one grain at least. Copies
    nothing.
    """
    parcel = catalogue.parcels.get(request.parcel)
    if parcel is None or not (asked := _asked(parcel, request)):
        return [(WeightsGone(parcel=request.parcel), None)]
    step = max(1, MESSAGE_BYTES // parcel.info.grain_bytes)
    return [
        (WeightsGrains(parcel=request.parcel, first=first), parcel.grains(first, min(step, asked.stop - first)))
        for first in asked[::step]
    ]


class Begun:
    """What peers are fetching that no newer version needs: who had to begin anew, on a slow link, would never end.

    Of each peer, its full parcels, and in each form the ``parts`` that it asked for last; and ``parts`` that peers may
    be about to ask for: where versions follow faster than a request upon an offer, these would always be gone.

    Args:
        most: of either are remembered, those that were begun first.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._asked: dict[tuple[str, bytes], tuple[ParcelInfo, float]] = {}
        self._offered_s: dict[bytes, float] = {}

    def offer(self, fresh: Iterable[ParcelInfo]) -> None:
        """Peers are about to be told of these."""
        self._offered_s |= {info.id: self._clock() for info in fresh if info.codec == "parts"}

    def note(self, peer: str, request: WeightsRequest, known: ParcelInfo) -> None:
        """`peer` asks for grains of a parcel; whoever asks for the last one has it soon."""
        key = peer, known.id
        if request.first + request.count >= known.grains:
            self._asked.pop(key, None)
            return
        if known.codec == "parts":
            now = peer, known.form, known.codec
            former = [of for of, (info, _) in self._asked.items() if (of[0], info.form, info.codec) == now]
            for other in set(former) - {key}:
                del self._asked[other]
        if known.codec in ("full", "parts"):
            self._asked[key] = known, self._clock()

    def ids(self) -> set[bytes]:
        since_s = self._clock() - OFFERED_S
        self._offered_s = {parcel: at_s for parcel, at_s in self._offered_s.items() if at_s >= since_s}
        return self.fetched() | self._offered_s.keys()

    def fetched(self) -> set[bytes]:
        """Those that a peer has begun to ask for."""
        since_s = self._clock() - FETCHED_S
        self._asked = {begun: (info, at_s) for begun, (info, at_s) in self._asked.items() if at_s >= since_s}
        infos = [info for info, _ in self._asked.values()]
        fulls, parts = ([info.id for info in infos if info.codec == codec] for codec in ("full", "parts"))
        return {*fulls[: self._most], *parts[: self._most]}


@dataclass(frozen=True)
class _Aim:
    """At a version. `promised` leads there from nothing: ids of parcels that were offered when others were gone."""

    version: int = NO_VERSION
    asked_s: float = 0.0
    missed_s: float = -math.inf
    promised: frozenset[bytes] = frozenset()


class Aims:
    """The versions that peers are at: without them these would begin anew, and one on a slow link never end.

    What leads to an aim is of no newer version. A peer that asks for what is gone hears of the newest, and then that it
    is gone: so it turns to that, and what it was offered stays for it.

    Args:
        most: are remembered, the oldest, which will be reached first.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._aims: dict[str, _Aim] = {}

    def asks(self, peer: str, known: ParcelInfo, newest: int) -> None:
        """`peer` asks for grains of a parcel that is here."""
        aim = self._aims.get(peer, _Aim())
        if known.version > aim.version:
            aim = _Aim(max(newest, known.version))
        self._aims[peer] = replace(aim, asked_s=self._clock(), missed_s=-math.inf)

    def misses(self, peer: str, newest: int, offer: Callable[[], Iterable[ParcelInfo]]) -> None:
        """`peer` asks for what is gone, and is about to be told. `offer` has it hear of `newest`, and returns by what.

        What it asks of the same version until it has heard comes here as well, and changes nothing.
        """
        now, aim = self._clock(), self._aims.get(peer, _Aim())
        if now - aim.missed_s > OFFERED_S and (infos := tuple(offer())):
            ways = (cheapest(infos, form, newest, {}) or Way() for form in {info.form for info in infos})
            promised = {info.id for way in ways for info in way.parcels} | {i.id for i in infos if i.codec == TABLE}
            aim = _Aim(newest, missed_s=now, promised=frozenset(promised))
        self._aims[peer] = replace(aim, asked_s=now)

    def versions(self) -> set[int]:
        return {aim.version for aim in self._oldest()}

    def promised(self) -> set[bytes]:
        return {parcel for aim in self._oldest() for parcel in aim.promised}

    def _oldest(self) -> list[_Aim]:
        since_s = self._clock() - FETCHED_S
        self._aims = {peer: aim for peer, aim in self._aims.items() if aim.asked_s >= since_s}
        versions = sorted({aim.version for aim in self._aims.values()})[: self._most]
        return [aim for aim in self._aims.values() if aim.version in versions]


class Ahead:
    """What follows an offer of a version unasked. Robots that hold the same have their way looked for once."""

    def __init__(self, catalogue: Catalogue, version: int) -> None:
        self._infos, self._version = catalogue.infos(), version
        self._manifests = catalogue.manifests
        self._ways: dict[tuple[Form, int, bytes], tuple[ParcelInfo, ...]] = {}

    def requests(self, applied: WeightsApplied) -> tuple[WeightsRequest, ...]:
        """What a robot that said `applied` would ask for first, as far as it lets that come unasked."""
        left, found = min(applied.ahead_bytes, AHEAD_BYTES), list[WeightsRequest]()
        for info in self._way(applied.form, applied.version, applied.digest) if left > 0 else ():
            count = info.grains if info.size_bytes <= left else left // info.grain_bytes
            if count == 0:
                break
            found.append(WeightsRequest(parcel=info.id, first=0, count=count))
            left -= min(info.size_bytes, count * info.grain_bytes)
        return tuple(found)

    def _way(self, form: Form, held: int, digest: bytes) -> tuple[ParcelInfo, ...]:
        if (form, held, digest) not in self._ways:
            self._ways[form, held, digest] = self._smallest(form, {held: digest})
        return self._ways[form, held, digest]

    def _smallest(self, form: Form, held: dict[int, bytes]) -> tuple[ParcelInfo, ...]:
        """The smallest parcels that lead to the version, with the table of its tensors first, where that is apart."""
        way, known = cheapest(self._infos, form, self._version, held), self._manifests.get((form, self._version))
        if way is None or known is None:
            return ()
        table = None if known[0].entire else table_of(self._infos, known[0])
        return way.parcels if table is None else (table, *way.parcels)


def is_rotten(catalogue: Catalogue, request: WeightsRequest) -> bool:
    """Whether a grain that `answers` would hand out is not what was described: what lies on a disk may rot."""
    parcel = catalogue.parcels.get(request.parcel)
    return parcel is not None and not all(
        crc_of(parcel.grains(grain, 1), parcel.info, grain) for grain in _asked(parcel, request)
    )


def _asked(parcel: Parcel, request: WeightsRequest) -> range:
    """The grains that one request brings; none where it asks for what is not there."""
    if not 0 <= request.first < parcel.info.grains:
        return range(0)
    most = max(1, REQUEST_BYTES // parcel.info.grain_bytes)
    return range(request.first, min(request.first + min(request.count, most), parcel.info.grains))
