"""Fetches patches block by block: a window of requests, a checksum per block, and no request twice after a reconnect.

Independent of the transport: the caller sends the requests and hands in the replies. One thread calls it.
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
"""The allocator reuses smaller buffers by itself."""


class BufferPool:
    """Provides buffers and reuses one released buffer of the same size. Any thread may call it.

    Fresh pages from the system take longer to get than to fill. A buffer is released when its patch and all tensors
    that
    view it are gone.
    """

    def __init__(self) -> None:
        self._spare_buffer: Array | None = None
        self._lock = threading.RLock()  # garbage collection may release a buffer during `acquire`

    def acquire(self, size_bytes: int) -> memoryview:
        """Returns a writable buffer with arbitrary content."""
        if size_bytes < MIN_POOLED_BYTES:
            return np.empty(size_bytes, np.uint8).data
        with self._lock:
            spare, self._spare_buffer = self._spare_buffer, None
        owner = spare if spare is not None and spare.size == size_bytes else np.empty(size_bytes, np.uint8)
        lease = owner[:]  # a memoryview of the buffer keeps this array alive
        weakref.finalize(lease, self._release, owner).atexit = False
        return lease.data

    def _release(self, owner: Array) -> None:
        with self._lock:
            self._spare_buffer = owner


MESSAGE_BYTES = 512 << 10
"""Blocks travel in messages of this size, unless one block is larger. Smaller messages suit the cache during
encryption; each message costs some hundred microseconds of Python at both ends.
"""
REQUEST_BYTES = 2 << 20
"""One request fetches at most this much, in several messages."""
MAX_WINDOW_BYTES = 8 << 20
WINDOW_S = 0.25  # in flight at the link's rate, or two round trips if these are longer
REQUEST_PERIOD_S = 0.03  # per request, at the link's rate
INITIAL_RATE_BYTES_PER_S = 4e6  # before the first measurement
RATE_SMOOTHING = 0.7
RATE_SAMPLE_S = 0.002
MAX_ROUND_TRIP_SAMPLES = 8  # the shortest counts
STALL_TIMEOUT_S = 2.0
MAX_DAMAGED_ATTEMPTS = 5
"""A block that arrives damaged this often is damaged at its source: the patch is dropped."""

RequestBlocks = Callable[[bytes, int, int], bool]
"""Requests blocks of a patch (id, first block, count). Returns False if the request cannot be sent now."""


class PartialPatch:
    """A patch of which some blocks have arrived."""

    def __init__(self, info: PatchInfo, pool: BufferPool) -> None:
        """Raises WireError if the description is invalid."""
        check_patch(info)
        self.info = info
        self.buffer = pool.acquire(info.size_bytes)
        self._received = np.zeros(info.block_count, np.bool_)
        self._requested = np.zeros(info.block_count, np.bool_)
        self._missing_bytes = info.size_bytes
        self._contiguous = 0  # blocks that have arrived from the first on, without a gap
        self._failures = np.zeros(
            info.block_count, np.uint8
        )  # damaged arrivals of each block, up to `MAX_DAMAGED_ATTEMPTS`
        self.is_unrecoverable = False  # a block has reached `MAX_DAMAGED_ATTEMPTS`

    @property
    def missing_bytes(self) -> int:
        return self._missing_bytes

    @property
    def contiguous_bytes(self) -> int:
        """The size of the prefix that has arrived without a gap. It does not change any more."""
        while self._contiguous < self.info.block_count and self._received[self._contiguous]:
            self._contiguous += 1
        return min(self._contiguous * self.info.block_bytes, self.info.size_bytes)

    def next_request(self, max_blocks: int) -> tuple[int, int] | None:
        """Returns (first, count) of at most `max_blocks` consecutive blocks that are neither received nor requested."""
        open_grains = ~(self._received | self._requested)
        first = int(open_grains.argmax())
        if not open_grains[first]:
            return None
        ahead = open_grains[first : first + max_blocks]
        count = len(ahead) if ahead.all() else int(ahead.argmin())
        self._requested[first : first + count] = True
        return first, count

    def mark_requested(self, first: int, count: int) -> int:
        """Marks blocks as requested. Returns the bytes of those that are neither received nor requested before."""
        seen = self._received | self._requested
        missing = [
            block for block in range(max(0, first), min(first + count, self.info.block_count)) if not seen[block]
        ]
        self._requested[missing] = True
        return sum(map(self._size, missing))

    def clear_requests(self, first: int = 0, count: int = MAX_BLOCKS) -> None:
        """Marks blocks as not requested."""
        self._requested[first : first + count] = False

    def write_blocks(self, first: int, payload: memoryview) -> tuple[int, int]:
        """Stores blocks. Returns the bytes that answer a request, and the number of damaged blocks."""
        info, answered, damaged = self.info, 0, 0
        for offset in range(0, len(payload), info.block_bytes):
            block, piece = first + offset // info.block_bytes, payload[offset : offset + info.block_bytes]
            if not 0 <= block < info.block_count:
                return answered, damaged + 1
            if len(piece) != self._size(block):
                self._count_failure(block)
                return answered, damaged + 1
            answered += len(piece) * bool(self._requested[block])
            self._requested[block] = False
            if self._received[block]:
                continue
            if not is_block_intact(piece, info, block):
                self._count_failure(block)
                damaged += 1
                continue
            start = block * info.block_bytes
            self.buffer[start : start + len(piece)] = piece
            self._received[block] = True
            self._missing_bytes -= len(piece)
        return answered, damaged

    def _count_failure(self, block: int) -> None:
        self._failures[block] = min(MAX_DAMAGED_ATTEMPTS, int(self._failures[block]) + 1)
        self.is_unrecoverable = self.is_unrecoverable or bool(self._failures[block] == MAX_DAMAGED_ATTEMPTS)

    def _size(self, block: int) -> int:
        return min(self.info.block_bytes, self.info.size_bytes - block * self.info.block_bytes)


@dataclass(frozen=True)
class LinkRate:
    """The measured rate; `INITIAL_RATE_BYTES_PER_S` before the first measurement."""

    bytes_per_s: float = INITIAL_RATE_BYTES_PER_S
    is_measured: bool = False

    def with_sample(self, sample: float) -> LinkRate:
        weight = RATE_SMOOTHING if self.is_measured else 0.0
        return LinkRate(weight * self.bytes_per_s + (1 - weight) * sample, True)


class PatchFetcher:
    """Fetches the target patches in order.

    Args:
        request_blocks: sends a request.
        clock: monotonic seconds.
        limit: bytes/s that the governor allows; infinite without a governor.
    """

    def __init__(
        self, request_blocks: RequestBlocks, clock: Callable[[], float], limit: Callable[[], float] = lambda: math.inf
    ) -> None:
        self.rate = LinkRate()
        self.damaged_blocks = 0
        self._request_blocks, self._clock, self._limit = request_blocks, clock, limit
        self._pool = BufferPool()
        self._partials: dict[bytes, PartialPatch] = {}
        self._targets: tuple[PatchInfo, ...] = ()
        self._in_flight: dict[bytes, int] = {}  # bytes of each patch that are requested and have not arrived
        self._sampled_s, self._sampled_bytes = clock(), 0
        self._round_trip_started_s: float | None = (
            None  # when a request was sent on an idle link, until a reply arrives
        )
        self._round_trips: deque[tuple[float, int]] = deque(
            maxlen=MAX_ROUND_TRIP_SAMPLES
        )  # duration and size of the replies on an idle link
        self._last_received_s = clock()
        self._next_request_s = 0.0  # when the limit allows the next request

    @property
    def targets(self) -> tuple[PatchInfo, ...]:
        return self._targets

    def set_targets(self, patches: Sequence[PatchInfo], offered: Collection[bytes] = ()) -> None:
        """Sets the patches to fetch. Keeps the received blocks of other patches that are still `offered` (ids).

        Raises:
            WireError: a description is invalid; the targets stay as they were.
        """
        targets = {info.id: self._partials.get(info.id) or PartialPatch(info, self._pool) for info in patches}
        for patch in targets.keys() - self._partials.keys():
            self._in_flight.pop(patch, None)  # left from an earlier target; its blocks are requested again
        self._partials = {i: p for i, p in self._partials.items() if i in offered} | targets
        self._targets = tuple(patches)

    def expect_blocks(self, patch: bytes, first: int, count: int) -> None:
        """Counts unrequested blocks that are on their way. Ignores those of a patch that is not a target."""
        if any(info.id == patch for info in self._targets) and (
            size := self._partials[patch].mark_requested(first, count)
        ):
            self._restart_sampling()
            self._round_trip_started_s = None
            self._count_request(patch, size)

    def wasted_bytes(self, infos: Collection[PatchInfo], others: Collection[PatchInfo]) -> int:
        """Returns the bytes of `infos` that were requested and would be wasted if the targets became `others`."""
        remaining = {info.id for info in others}
        return sum(self._in_flight.get(info.id, 0) for info in infos if info.id not in remaining)

    def missing_bytes(self, info: PatchInfo) -> int:
        """Returns the number of bytes of a patch that have not arrived."""
        partial = self._partials.get(info.id)
        return info.size_bytes if partial is None else partial.missing_bytes

    @property
    def is_complete(self) -> bool:
        return all(not self.missing_bytes(info) for info in self._targets)

    def contiguous_bytes(self, info: PatchInfo) -> int:
        """Returns the size of the prefix of a target patch that has arrived; `payload` holds it."""
        return self._partials[info.id].contiguous_bytes

    def payload(self, info: PatchInfo) -> memoryview:
        """Returns the buffer of a target patch. The part that has arrived does not change any more."""
        return self._partials[info.id].buffer

    def drop(self, infos: Sequence[PatchInfo]) -> None:
        """Drops these patches and their received blocks."""
        for info in infos:
            self._partials.pop(info.id, None)
        dropped = {info.id for info in infos}
        self._targets = tuple(info for info in self._targets if info.id not in dropped)

    def remove_patch(self, patch: bytes) -> None:
        """Drops a patch that the peer no longer has, with its outstanding requests."""
        self._in_flight.pop(patch, None)
        self.drop([info for info in self._targets if info.id == patch])

    def reset_requests(self) -> None:
        """Forgets all outstanding requests, after a reconnect."""
        self._in_flight.clear()
        self._round_trips.clear()
        self._round_trip_started_s = None
        for partial in self._partials.values():
            partial.clear_requests()

    def receive_blocks(self, patch: bytes, first: int, payload: memoryview) -> None:
        """Stores received blocks. Requests damaged ones again, and ignores those of unknown patches.

        Outstanding blocks of a dropped patch count in the window until they arrive.
        """
        now = self._clock()
        self._last_received_s = now
        partial = self._partials.get(patch)
        if partial is None and patch not in self._in_flight:
            return
        answered, damaged = (len(payload), 0) if partial is None else partial.write_blocks(first, payload)
        self._count_received(patch, answered)
        self.damaged_blocks += damaged
        self._measure(now, len(payload))

    def is_unrecoverable(self, patch: bytes) -> bool:
        """Whether a block of this patch has arrived damaged `MAX_DAMAGED_ATTEMPTS` times."""
        partial = self._partials.get(patch)
        return partial is not None and partial.is_unrecoverable

    def send_requests(self) -> float:
        """Sends the requests that fit the window. Returns the seconds after which to call it again at the latest."""
        now = self._clock()
        if self._in_flight and now - self._last_received_s > self._stall_timeout_s():
            self.reset_requests()
        self._restart_sampling()
        rate = min(self.rate.bytes_per_s, self._limit())
        window = min(MAX_WINDOW_BYTES, rate * max(WINDOW_S, 2 * self.round_trip_s))
        while (not self._in_flight or self._in_flight_bytes < window) and now >= self._next_request_s:
            if not self._request_next(rate):
                break
        return STALL_TIMEOUT_S if now >= self._next_request_s else self._next_request_s - now

    @property
    def round_trip_s(self) -> float:
        """The time to answer a request on an idle link, without the transfer of the answer; 0 before the first
        measurement.
        """
        if not self.rate.is_measured:
            return 0.0
        return min(
            (max(0.0, duration_s - size / self.rate.bytes_per_s) for duration_s, size in self._round_trips), default=0.0
        )

    @property
    def prefetch_budget_bytes(self) -> int:
        """How much may arrive unrequested: one window at the link's rate, or one block before the first measurement."""
        limit_bytes = MAX_WINDOW_BYTES if self.rate.is_measured else BLOCK_BYTES
        return int(min(limit_bytes, WINDOW_S * min(self.rate.bytes_per_s, self._limit())))

    def _restart_sampling(self) -> None:
        """Restarts the measurement and the stall timeout if nothing is in flight: an idle link has no rate."""
        if not self._in_flight:
            self._sampled_s, self._sampled_bytes, self._last_received_s = self._clock(), 0, self._clock()

    def _measure(self, now: float, size: int) -> None:
        """Measures the link's rate, from one reply to the next or from the end of a round trip."""
        if self._round_trip_started_s is not None:
            self._round_trips.append((now - self._round_trip_started_s, size))
            self._sampled_s, self._sampled_bytes = min(now, self._round_trip_started_s + self.round_trip_s), 0
            self._round_trip_started_s = None
            if not self.rate.is_measured:
                self._sampled_s = now
                return
        self._sampled_bytes += size
        if self._sampled_bytes and now - self._sampled_s >= RATE_SAMPLE_S:
            self.rate = self.rate.with_sample(self._sampled_bytes / (now - self._sampled_s))
            self._sampled_s, self._sampled_bytes = now, 0

    def _count_request(self, patch: bytes, size: int) -> None:
        self._in_flight[patch] = self._in_flight.get(patch, 0) + size
        if math.isfinite(limit := self._limit()):
            self._next_request_s = max(self._clock(), self._next_request_s) + size / limit

    def _request_next(self, rate: float) -> bool:
        """Sends the next request. Returns False if there is none, or if it cannot be sent now."""
        for info in self._targets:
            partial = self._partials[info.id]
            blocks = max(1, int(min(REQUEST_BYTES, rate * REQUEST_PERIOD_S)) // info.block_bytes)
            found = partial.next_request(blocks)
            if found is not None:
                if not self._request_blocks(info.id, *found):
                    partial.clear_requests(*found)
                    return False
                if not self._in_flight:
                    self._round_trip_started_s = self._clock()
                self._count_request(
                    info.id, min(found[1] * info.block_bytes, info.size_bytes - found[0] * info.block_bytes)
                )
                return True
        return False

    def _count_received(self, patch: bytes, size: int) -> None:
        left = self._in_flight.pop(patch, 0) - size
        if left > 0:
            self._in_flight[patch] = left

    @property
    def _in_flight_bytes(self) -> int:
        return sum(self._in_flight.values())

    def _stall_timeout_s(self) -> float:
        return STALL_TIMEOUT_S + 4 * self._in_flight_bytes / max(1.0, self.rate.bytes_per_s)
