"""Memory for large parcels, used again: to be given fresh pages takes longer than what is then written to them.

Fetching parcels grain by grain: a window of requests, each grain checked, nothing asked for twice after a cut.

Independent of the transport: it says what to ask for, and is given what comes. One thread calls it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from user_sys.codec import Array
from user_sys.messages import MAX_BLOCKS, PatchInfo, check_patch
from user_sys.weights.patches import BLOCK_BYTES, is_block_intact

MIN_POOLED_BYTES = 4 << 20
"""Smaller ones come from the allocator's own heap, which does the same for them."""


class BufferPool:
    """Hands out buffers, and keeps one that came back for the next of the same size. Any thread may call it.

    A buffer comes back when nothing refers to it any more: neither its parcel, nor a tensor that is a view of it.
    """

    def __init__(self) -> None:
        self._spare: Array | None = None
        self._lock = (
            threading.RLock()
        )  # a buffer may come back in the midst of `acquire`, when the interpreter tidies up

    def acquire(self, size_bytes: int) -> memoryview:
        """A writable buffer of so many bytes, of whatever content."""
        if size_bytes < MIN_POOLED_BYTES:
            return np.empty(size_bytes, np.uint8).data
        with self._lock:
            spare, self._spare = self._spare, None
        owner = spare if spare is not None and spare.size == size_bytes else np.empty(size_bytes, np.uint8)
        lent = owner[:]  # whatever looks at the buffer keeps this one alive, through the memoryview
        weakref.finalize(lent, self._take_back, owner).atexit = False
        return lent.data

    def _take_back(self, owner: Array) -> None:
        with self._lock:
            self._spare = owner


MESSAGE_BYTES = 512 << 10
"""Grains travel in messages of this size, where one grain is not more. Encryption likes smaller ones, for its cache;
every message costs some hundred microseconds of Python at the two ends."""
REQUEST_BYTES = 2 << 20
"""One request brings so much at most, in several messages."""
MAX_WINDOW_BYTES = 8 << 20
WINDOW_S = 0.25  # of the link's rate is under way, or two round trips where these are longer
REQUEST_PERIOD_S = 0.03  # of the link's rate is asked for at once
INITIAL_RATE_BYTES_PER_S = 4e6  # bytes/s, until one was measured
RATE_SMOOTHING = 0.7
RATE_SAMPLE_S = 0.002
MAX_ROUND_TRIP_SAMPLES = 8  # are remembered; the shortest counts
STALL_TIMEOUT_S = 2.0
MAX_DAMAGED_ATTEMPTS = 5
"""A grain that came damaged so often is no better at its source: its parcel is given up."""

RequestBlocks = Callable[[bytes, int, int], bool]
"""Asks the other end for grains of a parcel (id, first grain, count); False where that cannot be sent now."""


class PartialPatch:
    """A parcel of which some grains may have come."""

    def __init__(self, info: PatchInfo, memory: BufferPool) -> None:
        """Raises WireError: the description is not sound."""
        check_patch(info)
        self.info = info
        self.buffer = memory.acquire(info.size_bytes)
        self._here = np.zeros(info.block_count, np.bool_)
        self._asked = np.zeros(info.block_count, np.bool_)
        self._missing_bytes = info.size_bytes
        self._unbroken = 0  # grains from the first on that are here
        self._failures = np.zeros(
            info.block_count, np.uint8
        )  # how often each came damaged, up to `MAX_DAMAGED_ATTEMPTS`
        self.is_unrecoverable = False  # whether one came damaged so often

    @property
    def missing_bytes(self) -> int:
        return self._missing_bytes

    @property
    def contiguous_bytes(self) -> int:
        """So much is here from the beginning on, without a gap, and will not change any more."""
        while self._unbroken < self.info.block_count and self._here[self._unbroken]:
            self._unbroken += 1
        return min(self._unbroken * self.info.block_bytes, self.info.size_bytes)

    def next_request(self, most: int) -> tuple[int, int] | None:
        """(first, count) of at most `most` consecutive grains that are neither here nor asked for."""
        open_grains = ~(self._here | self._asked)
        first = int(open_grains.argmax())
        if not open_grains[first]:
            return None
        ahead = open_grains[first : first + most]
        count = len(ahead) if ahead.all() else int(ahead.argmin())
        self._asked[first : first + count] = True
        return first, count

    def mark_requested(self, first: int, count: int) -> int:
        """Counts grains as asked for; returns the bytes of those that are neither here nor were asked for before."""
        known = self._here | self._asked
        fresh = [grain for grain in range(max(0, first), min(first + count, self.info.block_count)) if not known[grain]]
        self._asked[fresh] = True
        return sum(map(self._size, fresh))

    def clear_requests(self, first: int = 0, count: int = MAX_BLOCKS) -> None:
        """What was asked for will not come."""
        self._asked[first : first + count] = False

    def write_blocks(self, first: int, payload: memoryview) -> tuple[int, int]:
        """Takes grains in; returns the bytes that came in answer to a request, and how many grains were damaged."""
        info, answered, damaged = self.info, 0, 0
        for offset in range(0, len(payload), info.block_bytes):
            grain, piece = first + offset // info.block_bytes, payload[offset : offset + info.block_bytes]
            if not 0 <= grain < info.block_count:
                return answered, damaged + 1
            if len(piece) != self._size(grain):
                self._fail(grain)
                return answered, damaged + 1
            answered += len(piece) * bool(self._asked[grain])
            self._asked[grain] = False
            if self._here[grain]:
                continue
            if not is_block_intact(piece, info, grain):
                self._fail(grain)
                damaged += 1
                continue
            start = grain * info.block_bytes
            self.buffer[start : start + len(piece)] = piece
            self._here[grain] = True
            self._missing_bytes -= len(piece)
        return answered, damaged

    def _fail(self, grain: int) -> None:
        self._failures[grain] = min(MAX_DAMAGED_ATTEMPTS, int(self._failures[grain]) + 1)
        self.is_unrecoverable = self.is_unrecoverable or bool(self._failures[grain] == MAX_DAMAGED_ATTEMPTS)

    def _size(self, grain: int) -> int:
        return min(self.info.block_bytes, self.info.size_bytes - grain * self.info.block_bytes)


@dataclass(frozen=True)
class LinkRate:
    """Measured bytes/s; `INITIAL_RATE_BYTES_PER_S` before that."""

    bytes_per_s: float = INITIAL_RATE_BYTES_PER_S
    is_measured: bool = False

    def with_sample(self, sample: float) -> LinkRate:
        kept = RATE_SMOOTHING if self.is_measured else 0.0
        return LinkRate(kept * self.bytes_per_s + (1 - kept) * sample, True)


class PatchFetcher:
    """Fetches the wanted parcels in order.

    Args:
        ask: sends a request.
        clock: monotonic seconds.
        limit: bytes/s that the governor allows; infinite without one.
    """

    def __init__(
        self, request_blocks: RequestBlocks, clock: Callable[[], float], limit: Callable[[], float] = lambda: math.inf
    ) -> None:
        self.rate = LinkRate()
        self.damaged_blocks = 0
        self._ask, self._clock, self._limit = request_blocks, clock, limit
        self._memory = BufferPool()
        self._partials: dict[bytes, PartialPatch] = {}
        self._wanted: tuple[PatchInfo, ...] = ()
        self._under_way: dict[bytes, int] = {}  # bytes of each parcel that were asked for and are not here
        self._sampled_s, self._sampled_bytes = clock(), 0
        self._began_s: float | None = None  # when a request went while nothing was under way, until something comes
        self._firsts: deque[tuple[float, int]] = deque(
            maxlen=MAX_ROUND_TRIP_SAMPLES
        )  # how long that took, and how much came
        self._heard_s = clock()
        self._allowed_s = 0.0  # when the limit lets the next request go

    @property
    def targets(self) -> tuple[PatchInfo, ...]:
        return self._wanted

    def set_targets(self, parcels: Sequence[PatchInfo], offered: Collection[bytes] = ()) -> None:
        """Turns to `parcels`; keeps what it has of others as long as they are `offered` (ids).

        Raises:
            WireError: a description is not sound; what was wanted before stays wanted.
        """
        fresh = {info.id: self._partials.get(info.id) or PartialPatch(info, self._memory) for info in parcels}
        for parcel in fresh.keys() - self._partials.keys():
            self._under_way.pop(parcel, None)  # of when it was wanted before: it is asked for anew
        self._partials = {i: p for i, p in self._partials.items() if i in offered} | fresh
        self._wanted = tuple(parcels)

    def expect_blocks(self, parcel: bytes, first: int, count: int) -> None:
        """Grains are on their way without having been asked for; those of a parcel that is not wanted are ignored."""
        if any(info.id == parcel for info in self._wanted) and (
            size := self._partials[parcel].mark_requested(first, count)
        ):
            self._sample_anew()
            self._began_s = None
            self._sent_for(parcel, size)

    def wasted_bytes(self, infos: Collection[PatchInfo], others: Collection[PatchInfo]) -> int:
        """What would come of `infos` all the same if `others` were wanted in their stead: it was asked for."""
        kept = {info.id for info in others}
        return sum(self._under_way.get(info.id, 0) for info in infos if info.id not in kept)

    def missing_bytes(self, info: PatchInfo) -> int:
        """What has not come of a parcel yet."""
        partial = self._partials.get(info.id)
        return info.size_bytes if partial is None else partial.missing_bytes

    @property
    def is_complete(self) -> bool:
        return all(not self.missing_bytes(info) for info in self._wanted)

    def contiguous_bytes(self, info: PatchInfo) -> int:
        """How much of a parcel that is wanted has come from its beginning on; `payload` has it."""
        return self._partials[info.id].contiguous_bytes

    def payload(self, info: PatchInfo) -> memoryview:
        """The bytes of a parcel that is wanted; nothing writes any more to those that have come."""
        return self._partials[info.id].buffer

    def drop(self, infos: Sequence[PatchInfo]) -> None:
        """Forgets what came of these; they are not wanted any more."""
        for info in infos:
            self._partials.pop(info.id, None)
        gone = {info.id for info in infos}
        self._wanted = tuple(info for info in self._wanted if info.id not in gone)

    def remove_patch(self, parcel: bytes) -> None:
        """The other end does not have it any more: nothing of it is under way, and it is not wanted."""
        self._under_way.pop(parcel, None)
        self.drop([info for info in self._wanted if info.id == parcel])

    def reset_requests(self) -> None:
        """The connection is another one: nothing is under way."""
        self._under_way.clear()
        self._firsts.clear()
        self._began_s = None
        for partial in self._partials.values():
            partial.clear_requests()

    def receive_blocks(self, parcel: bytes, first: int, payload: memoryview) -> None:
        """Grains that came. Damaged ones are counted and asked for again; those of unknown parcels are ignored.

        What is still under way of a parcel that was given up takes its share of the window until it has come.
        """
        now = self._clock()
        self._heard_s = now
        partial = self._partials.get(parcel)
        if partial is None and parcel not in self._under_way:
            return
        answered, damaged = (len(payload), 0) if partial is None else partial.write_blocks(first, payload)
        self._answered(parcel, answered)
        self.damaged_blocks += damaged
        self._measure(now, len(payload))

    def is_unrecoverable(self, parcel: bytes) -> bool:
        """Whether a parcel is not to be had from here: what comes of it is damaged, again and again."""
        partial = self._partials.get(parcel)
        return partial is not None and partial.is_unrecoverable

    def send_requests(self) -> float:
        """Asks for what the window has room for; returns after how many seconds to call again at the latest."""
        now = self._clock()
        if self._under_way and now - self._heard_s > self._patience_s():
            self.reset_requests()
        self._sample_anew()
        rate = min(self.rate.bytes_per_s, self._limit())
        window = min(MAX_WINDOW_BYTES, rate * max(WINDOW_S, 2 * self.round_trip_s))
        while (not self._under_way or self._under_way_bytes < window) and now >= self._allowed_s:
            if not self._request(rate):
                break
        return STALL_TIMEOUT_S if now >= self._allowed_s else self._allowed_s - now

    @property
    def round_trip_s(self) -> float:
        """How long an answer takes that has nothing before it, but for its own bytes; 0 before that was measured."""
        if not self.rate.is_measured:
            return 0.0
        return min((max(0.0, took_s - size / self.rate.bytes_per_s) for took_s, size in self._firsts), default=0.0)

    @property
    def prefetch_budget_bytes(self) -> int:
        """What may come unasked: as much as is under way at once on this link, or a grain, until its rate is known."""
        most = MAX_WINDOW_BYTES if self.rate.is_measured else BLOCK_BYTES
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
            if not self.rate.is_measured:
                self._sampled_s = now
                return
        self._sampled_bytes += size
        if self._sampled_bytes and now - self._sampled_s >= RATE_SAMPLE_S:
            self.rate = self.rate.with_sample(self._sampled_bytes / (now - self._sampled_s))
            self._sampled_s, self._sampled_bytes = now, 0

    def _sent_for(self, parcel: bytes, size: int) -> None:
        self._under_way[parcel] = self._under_way.get(parcel, 0) + size
        if math.isfinite(limit := self._limit()):
            self._allowed_s = max(self._clock(), self._allowed_s) + size / limit

    def _request(self, rate: float) -> bool:
        """Asks for what is to come next; False where that is nothing, or cannot be asked for now."""
        for info in self._wanted:
            partial = self._partials[info.id]
            grains = max(1, int(min(REQUEST_BYTES, rate * REQUEST_PERIOD_S)) // info.block_bytes)
            found = partial.next_request(grains)
            if found is not None:
                if not self._ask(info.id, *found):
                    partial.clear_requests(*found)
                    return False
                if not self._under_way:
                    self._began_s = self._clock()
                self._sent_for(info.id, min(found[1] * info.block_bytes, info.size_bytes - found[0] * info.block_bytes))
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
        return STALL_TIMEOUT_S + 4 * self._under_way_bytes / max(1.0, self.rate.bytes_per_s)
