"""Memory for large parcels, used again: to be given fresh pages takes longer than what is then written to them."""

from __future__ import annotations

import threading
import weakref

import numpy as np

from user_sys.codec import Array

LARGE_BYTES = 4 << 20
"""Smaller ones come from the allocator's own heap, which does the same for them."""


class SpareMemory:
    """Hands out buffers, and keeps one that came back for the next of the same size. Any thread may call it.

    A buffer comes back when nothing refers to it any more: neither its parcel, nor a tensor that is a view of it.
    """

    def __init__(self) -> None:
        self._spare: Array | None = None
        self._lock = threading.RLock()  # a buffer may come back in the midst of `take`, when the interpreter tidies up

    def take(self, size_bytes: int) -> memoryview:
        """A writable buffer of so many bytes, of whatever content."""
        if size_bytes < LARGE_BYTES:
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
