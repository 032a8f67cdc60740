"""Fetching parcels grain by grain: a window of requests, each grain checked, nothing asked for twice after a cut.

Independent of the transport: it says what to ask for, and is given what comes. One thread calls it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from user_sys.weights.memory import SpareMemory
from user_sys.weights.parcel import GRAIN_BYTES, crc_of
from user_sys.weights.records import MAX_GRAINS, ParcelInfo, check_parcel

MESSAGE_BYTES = 512 << 10
"""Grains travel in messages of this size, where one grain is not more. Encryption likes smaller ones, for its cache;
every message costs some hundred microseconds of Python at the two ends."""
REQUEST_BYTES = 2 << 20
"""One request brings so much at most, in several messages."""
MAX_WINDOW_BYTES = 8 << 20
WINDOW_S = 0.25  # of the link's rate is under way, or two round trips where these are longer
REQUEST_S = 0.03  # of the link's rate is asked for at once
FIRST_RATE = 4e6  # bytes/s, until one was measured
RATE_SMOOTHING = 0.7
RATE_SAMPLE_S = 0.002
ROUND_TRIPS = 8  # are remembered; the shortest counts
STALL_S = 2.0
MOST_DAMAGED = 5
"""A grain that came damaged so often is no better at its source: its parcel is given up."""

Ask = Callable[[bytes, int, int], bool]
"""Asks the other end for grains of a parcel (id, first grain, count); False where that cannot be sent now."""


class Partial:
    """A parcel of which some grains may have come."""

    def __init__(self, info: ParcelInfo, memory: SpareMemory) -> None:
        """Raises WireError: the description is not sound."""
        check_parcel(info)
        self.info = info
        self.buffer = memory.take(info.size_bytes)
        self._here = np.zeros(info.grains, np.bool_)
        self._asked = np.zeros(info.grains, np.bool_)
        self._missing_bytes = info.size_bytes
        self._unbroken = 0  # grains from the first on that are here
        self._failures = np.zeros(info.grains, np.uint8)  # how often each came damaged, up to `MOST_DAMAGED`
        self.hopeless = False  # whether one came damaged so often

    @property
    def missing_bytes(self) -> int:
        return self._missing_bytes

    @property
    def unbroken_bytes(self) -> int:
        """So much is here from the beginning on, without a gap, and will not change any more."""
        while self._unbroken < self.info.grains and self._here[self._unbroken]:
            self._unbroken += 1
        return min(self._unbroken * self.info.grain_bytes, self.info.size_bytes)

    def next_range(self, most: int) -> tuple[int, int] | None:
        """(first, count) of at most `most` consecutive grains that are neither here nor asked for."""
        open_grains = ~(self._here | self._asked)
        first = int(open_grains.argmax())
        if not open_grains[first]:
            return None
        ahead = open_grains[first : first + most]
        count = len(ahead) if ahead.all() else int(ahead.argmin())
        self._asked[first : first + count] = True
        return first, count

    def expect(self, first: int, count: int) -> int:
        """Counts grains as asked for; returns the bytes of those that are neither here nor were asked for before."""
        known = self._here | self._asked
        fresh = [grain for grain in range(max(0, first), min(first + count, self.info.grains)) if not known[grain]]
        self._asked[fresh] = True
        return sum(map(self._size, fresh))

    def forget_requests(self, first: int = 0, count: int = MAX_GRAINS) -> None:
        """What was asked for will not come."""
        self._asked[first : first + count] = False

    def take(self, first: int, payload: memoryview) -> tuple[int, int]:
        """Takes grains in; returns the bytes that came in answer to a request, and how many grains were damaged."""
        info, answered, damaged = self.info, 0, 0
        for offset in range(0, len(payload), info.grain_bytes):
            grain, piece = first + offset // info.grain_bytes, payload[offset : offset + info.grain_bytes]
            if not 0 <= grain < info.grains:
                return answered, damaged + 1
            if len(piece) != self._size(grain):
                self._fail(grain)
                return answered, damaged + 1
            answered += len(piece) * bool(self._asked[grain])
            self._asked[grain] = False
            if self._here[grain]:
                continue
            if not crc_of(piece, info, grain):
                self._fail(grain)
                damaged += 1
                continue
            start = grain * info.grain_bytes
            self.buffer[start : start + len(piece)] = piece
            self._here[grain] = True
            self._missing_bytes -= len(piece)
        return answered, damaged

    def _fail(self, grain: int) -> None:
        self._failures[grain] = min(MOST_DAMAGED, int(self._failures[grain]) + 1)
        self.hopeless = self.hopeless or bool(self._failures[grain] == MOST_DAMAGED)

    def _size(self, grain: int) -> int:
        return min(self.info.grain_bytes, self.info.size_bytes - grain * self.info.grain_bytes)


@dataclass(frozen=True)
class LinkRate:
    """Measured bytes/s; `FIRST_RATE` before that."""

    bytes_per_s: float = FIRST_RATE
    measured: bool = False

    def after(self, sample: float) -> LinkRate:
        kept = RATE_SMOOTHING if self.measured else 0.0
        return LinkRate(kept * self.bytes_per_s + (1 - kept) * sample, True)


class Fetcher:
    """Fetches the wanted parcels in order.

    Args:
        ask: sends a request.
        clock: monotonic seconds.
        limit: bytes/s that the governor allows; infinite without one.
    """

    def __init__(self, ask: Ask, clock: Callable[[], float], limit: Callable[[], float] = lambda: math.inf) -> None:
        self.rate = LinkRate()
        self.damaged = 0
        self._ask, self._clock, self._limit = ask, clock, limit
        self._memory = SpareMemory()
        self._partials: dict[bytes, Partial] = {}
        self._wanted: tuple[ParcelInfo, ...] = ()
        self._under_way: dict[bytes, int] = {}  # bytes of each parcel that were asked for and are not here
        self._sampled_s, self._sampled_bytes = clock(), 0
        self._began_s: float | None = None  # when a request went while nothing was under way, until something comes
        self._firsts: deque[tuple[float, int]] = deque(maxlen=ROUND_TRIPS)  # how long that took, and how much came
        self._heard_s = clock()
        self._allowed_s = 0.0  # when the limit lets the next request go

    @property
    def wanted(self) -> tuple[ParcelInfo, ...]:
        return self._wanted

    def want(self, parcels: Sequence[ParcelInfo], offered: Collection[bytes] = ()) -> None:
        """Turns to `parcels`; keeps what it has of others as long as they are `offered` (ids).

        Raises:
            WireError: a description is not sound; what was wanted before stays wanted.
        """
        fresh = {info.id: self._partials.get(info.id) or Partial(info, self._memory) for info in parcels}
        for parcel in fresh.keys() - self._partials.keys():
            self._under_way.pop(parcel, None)  # of when it was wanted before: it is asked for anew
        self._partials = {i: p for i, p in self._partials.items() if i in offered} | fresh
        self._wanted = tuple(parcels)

    def expect(self, parcel: bytes, first: int, count: int) -> None:
        """Grains are on their way without having been asked for; those of a parcel that is not wanted are ignored."""
        if any(info.id == parcel for info in self._wanted) and (size := self._partials[parcel].expect(first, count)):
            self._sample_anew()
            self._began_s = None
            self._sent_for(parcel, size)

    def in_vain_bytes(self, infos: Collection[ParcelInfo], others: Collection[ParcelInfo]) -> int:
        """What would come of `infos` all the same if `others` were wanted in their stead: it was asked for."""
        kept = {info.id for info in others}
        return sum(self._under_way.get(info.id, 0) for info in infos if info.id not in kept)

    def missing_bytes(self, info: ParcelInfo) -> int:
        """What has not come of a parcel yet."""
        partial = self._partials.get(info.id)
        return info.size_bytes if partial is None else partial.missing_bytes

    @property
    def complete(self) -> bool:
        return all(not self.missing_bytes(info) for info in self._wanted)

    def unbroken_bytes(self, info: ParcelInfo) -> int:
        """How much of a parcel that is wanted has come from its beginning on; `payload` has it."""
        return self._partials[info.id].unbroken_bytes

    def payload(self, info: ParcelInfo) -> memoryview:
        """The bytes of a parcel that is wanted; nothing writes any more to those that have come."""
        return self._partials[info.id].buffer

    def drop(self, infos: Sequence[ParcelInfo]) -> None:
        """Forgets what came of these; they are not wanted any more."""
        for info in infos:
            self._partials.pop(info.id, None)
        gone = {info.id for info in infos}
        self._wanted = tuple(info for info in self._wanted if info.id not in gone)

    def gone(self, parcel: bytes) -> None:
        """The other end does not have it any more: nothing of it is under way, and it is not wanted."""
        self._under_way.pop(parcel, None)
        self.drop([info for info in self._wanted if info.id == parcel])

    def restart(self) -> None:
        """The connection is another one: nothing is under way."""
        self._under_way.clear()
        self._firsts.clear()
        self._began_s = None
        for partial in self._partials.values():
            partial.forget_requests()

    def take(self, parcel: bytes, first: int, payload: memoryview) -> None:
        """Grains that came. Damaged ones are counted and asked for again; those of unknown parcels are ignored.

        What is still under way of a parcel that was given up takes its share of the window until it has come.
        """
        now = self._clock()
        self._heard_s = now
        partial = self._partials.get(parcel)
        if partial is None and parcel not in self._under_way:
            return
        answered, damaged = (len(payload), 0) if partial is None else partial.take(first, payload)
        self._answered(parcel, answered)
        self.damaged += damaged
        self._measure(now, len(payload))

    def hopeless(self, parcel: bytes) -> bool:
        """Whether a parcel is not to be had from here: what comes of it is damaged, again and again."""
        partial = self._partials.get(parcel)
        return partial is not None and partial.hopeless

    def pump(self) -> float:
        """Asks for what the window has room for; returns after how many seconds to call again at the latest."""
        now = self._clock()
        if self._under_way and now - self._heard_s > self._patience_s():
            self.restart()
        self._sample_anew()
        rate = min(self.rate.bytes_per_s, self._limit())
        window = min(MAX_WINDOW_BYTES, rate * max(WINDOW_S, 2 * self.round_trip_s))
        while (not self._under_way or self._under_way_bytes < window) and now >= self._allowed_s:
            if not self._request(rate):
                break
        return STALL_S if now >= self._allowed_s else self._allowed_s - now

    @property
    def round_trip_s(self) -> float:
        """How long an answer takes that has nothing before it, but for its own bytes; 0 before that was measured."""
        if not self.rate.measured:
            return 0.0
        return min((max(0.0, took_s - size / self.rate.bytes_per_s) for took_s, size in self._firsts), default=0.0)

    @property
    def room_bytes(self) -> int:
        """What may come unasked: as much as is under way at once on this link, or a grain, until its rate is known."""
        most = MAX_WINDOW_BYTES if self.rate.measured else GRAIN_BYTES
        return int(min(most, WINDOW_S * min(self.rate.bytes_per_s, self._limit())))

    def _sample_anew(self) -> None:
        """While nothing is under way the link has no rate, and nobody is to be heard."""
        if not self._under_way:
            self._sampled_s, self._sampled_bytes, self._heard_s = self._clock(), 0, self._clock()

    def _measure(self, now: float, size: int) -> None:
        """The link's rate: how fast bytes follow upon each other, or come once a round trip is over."""
        if self._began_s is not None:
            self._firsts.append((now - self._began_s, size))
            self._sampled_s, self._sampled_bytes = min(now, self._began_s + self.round_trip_s), 0
            self._began_s = None
            if not self.rate.measured:
                self._sampled_s = now
                return
        self._sampled_bytes += size
        if self._sampled_bytes and now - self._sampled_s >= RATE_SAMPLE_S:
            self.rate = self.rate.after(self._sampled_bytes / (now - self._sampled_s))
            self._sampled_s, self._sampled_bytes = now, 0

    def _sent_for(self, parcel: bytes, size: int) -> None:
        self._under_way[parcel] = self._under_way.get(parcel, 0) + size
        if math.isfinite(limit := self._limit()):
            self._allowed_s = max(self._clock(), self._allowed_s) + size / limit

    def _request(self, rate: float) -> bool:
        """Asks for what is to come next; False where that is nothing, or cannot be asked for now."""
        for info in self._wanted:
            partial = self._partials[info.id]
            grains = max(1, int(min(REQUEST_BYTES, rate * REQUEST_S)) // info.grain_bytes)
            found = partial.next_range(grains)
            if found is not None:
                if not self._ask(info.id, *found):
                    partial.forget_requests(*found)
                    return False
                if not self._under_way:
                    self._began_s = self._clock()
                self._sent_for(info.id, min(found[1] * info.grain_bytes, info.size_bytes - found[0] * info.grain_bytes))
                return True
        return False

    def _answered(self, parcel: bytes, size: int) -> None:
        left = self._under_way.pop(parcel, 0) - size
        if left > 0:
            self._under_way[parcel] = left

    @property
    def _under_way_bytes(self) -> int:
        return sum(self._under_way.values())

    def _patience_s(self) -> float:
        return STALL_S + 4 * self._under_way_bytes / max(1.0, self.rate.bytes_per_s)
