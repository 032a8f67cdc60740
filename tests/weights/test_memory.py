"""Memory for large parcels is used again, and never while anybody still looks at it."""

from __future__ import annotations

import numpy as np

from user_sys.weights.memory import LARGE_BYTES, SpareMemory


def address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def test_a_buffer_comes_back_when_nothing_looks_at_it_any_more() -> None:
    memory = SpareMemory()
    first = memory.take(LARGE_BYTES)
    where, tensor = address(first), np.frombuffer(first, np.uint8)[64:128].view(np.float32).reshape(4, 4)
    first[64:128] = bytes(range(64))
    kept = tensor.copy()
    del first
    second = memory.take(LARGE_BYTES)
    assert address(second) != where, "a tensor still looks at the first one"
    second[:] = bytes(LARGE_BYTES)
    assert np.array_equal(tensor, kept)
    del tensor
    assert address(memory.take(LARGE_BYTES)) == where


def test_a_buffer_of_another_size_is_not_handed_out() -> None:
    memory = SpareMemory()
    memory.take(LARGE_BYTES)
    other = memory.take(2 * LARGE_BYTES)
    assert len(other) == 2 * LARGE_BYTES and not other.readonly
    assert len(memory.take(5)) == 5
