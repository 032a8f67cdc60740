"""Memory for large patches is used again, and never while anybody still looks at it.

How fast a patch comes over links of all kinds, on a clock of the test's own.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from user_sys.weights.fetcher import (
    MAX_WINDOW_BYTES,
    MESSAGE_BYTES,
    MIN_POOLED_BYTES,
    WINDOW_S,
    BufferPool,
    PatchFetcher,
)
from user_sys.weights.patches import BLOCK_BYTES, Patch, full_patch
from user_sys.weights.state import build_tensor_set


def address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def test_a_buffer_comes_back_when_nothing_looks_at_it_any_more() -> None:
    memory = BufferPool()
    first = memory.acquire(MIN_POOLED_BYTES)
    where, tensor = address(first), np.frombuffer(first, np.uint8)[64:128].view(np.float32).reshape(4, 4)
    first[64:128] = bytes(range(64))
    kept = tensor.copy()
    del first
    second = memory.acquire(MIN_POOLED_BYTES)
    assert address(second) != where, "a tensor still looks at the first one"
    second[:] = bytes(MIN_POOLED_BYTES)
    assert np.array_equal(tensor, kept)
    del tensor
    assert address(memory.acquire(MIN_POOLED_BYTES)) == where


def test_a_buffer_of_another_size_is_not_handed_out() -> None:
    memory = BufferPool()
    memory.acquire(MIN_POOLED_BYTES)
    other = memory.acquire(2 * MIN_POOLED_BYTES)
    assert len(other) == 2 * MIN_POOLED_BYTES and not other.readonly
    assert len(memory.acquire(5)) == 5


class SimulatedServer:
    """A source that answers at once, behind a link that takes half a round trip each way and sends byte after byte."""

    def __init__(self, patch: Patch, bytes_per_s: float, round_trip_s: float) -> None:
        self.parcel, self.bytes_per_s, self.round_trip_s = patch, bytes_per_s, round_trip_s
        self.now_s = self.free_s = 0.0
        self.coming: deque[tuple[float, int, memoryview]] = deque()
        self.most_under_way = self.under_way = 0
        self.fetcher = PatchFetcher(self.ask, lambda: self.now_s)

    def ask(self, patch: bytes, first: int, count: int) -> bool:
        step = MESSAGE_BYTES // self.parcel.info.block_bytes
        for block in range(first, first + count, step):
            payload = self.parcel.blocks(block, min(step, first + count - block))
            self.free_s = max(self.free_s, self.now_s + self.round_trip_s / 2) + len(payload) / self.bytes_per_s
            self.coming.append((self.free_s + self.round_trip_s / 2, block, payload))
            self.under_way += len(payload)
        self.most_under_way = max(self.most_under_way, self.under_way)
        return True

    def fetch(self, patch: Patch | None = None) -> float:
        """Fetches the patch, or another one, from its beginning; how long that takes in seconds."""
        self.parcel = patch or self.parcel
        started_s, info = self.now_s, self.parcel.info
        self.fetcher.set_targets([])
        self.fetcher.set_targets([info])
        while not self.fetcher.is_complete:
            self.fetcher.send_requests()
            self.now_s, block, payload = self.coming.popleft()
            self.under_way -= len(payload)
            self.fetcher.receive_blocks(info.id, block, payload)
        return self.now_s - started_s


def parcel_of(size_bytes: int) -> Patch:
    values = np.random.default_rng(0).integers(0, 1 << 32, size_bytes // 4, np.uint32)
    return full_patch(build_tensor_set({"w": values}), 1)


@pytest.mark.parametrize("round_trip_s", [0.001, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("bytes_per_s", [500e3, 2e6, 12e6])
def test_a_link_is_kept_busy_however_long_its_round_trip(bytes_per_s: float, round_trip_s: float) -> None:
    link = SimulatedServer(parcel_of(int(6 * bytes_per_s)), bytes_per_s, round_trip_s)
    ideal_s = 6 + round_trip_s
    assert link.fetch() < 1.25 * ideal_s
    link.most_under_way = 0
    assert link.fetch() < 1.1 * ideal_s
    assert link.fetcher.rate.bytes_per_s == pytest.approx(bytes_per_s, rel=0.1)
    assert link.fetcher.round_trip_s == pytest.approx(round_trip_s, abs=0.02 + 0.1 * round_trip_s)
    most_bytes = min(MAX_WINDOW_BYTES, bytes_per_s * max(WINDOW_S, 2 * round_trip_s))
    assert link.most_under_way <= 1.3 * most_bytes + BLOCK_BYTES, "little of a version that is given up is in vain"


def test_a_link_is_not_taken_for_a_slow_one_where_little_travels() -> None:
    """A small difference takes a round trip, and next to no time of the link."""
    link = SimulatedServer(parcel_of(20 << 20), bytes_per_s=10e6, round_trip_s=0.2)
    link.fetch()
    for size_bytes in (5_000, 50_000, 100_000, 400_000) * 10:
        link.fetch(parcel_of(size_bytes))
        assert link.fetcher.rate.bytes_per_s == pytest.approx(10e6, rel=0.2)


def test_a_link_that_has_become_slower_is_noticed_by_what_little_travels() -> None:
    link = SimulatedServer(parcel_of(20 << 20), bytes_per_s=10e6, round_trip_s=0.1)
    link.fetch()
    link.bytes_per_s = 1e6
    for size_bytes in (50_000, 100_000, 400_000) * 4:
        link.fetch(parcel_of(size_bytes))
    assert link.fetcher.rate.bytes_per_s == pytest.approx(1e6, rel=0.3)


def test_a_round_trip_that_has_become_longer_leaves_the_link_busy() -> None:
    link = SimulatedServer(parcel_of(10 << 20), bytes_per_s=2e6, round_trip_s=0.01)
    for _ in range(10):
        link.fetch()
    link.round_trip_s = 0.6
    for _ in range(8):
        link.fetch()
    assert link.fetch() < 1.1 * (5.25 + 0.6)


def test_messages_without_a_grain_are_no_rate() -> None:
    """Nothing can be divided by that of a gateway which sends them."""
    link = SimulatedServer(parcel_of(1 << 20), bytes_per_s=1e6, round_trip_s=0.1)
    link.fetcher.set_targets([link.parcel.info])
    link.fetcher.send_requests()
    for _ in range(3):
        link.now_s += 1.0
        link.fetcher.receive_blocks(link.parcel.info.id, 0, memoryview(b""))
    assert link.fetcher.rate.bytes_per_s > 0
