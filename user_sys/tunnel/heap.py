"""What the C library does with memory that was freed."""

from __future__ import annotations

import ctypes

LARGEST_BYTES = 32 << 20  # glibc comes to this by itself, with the first block of as much that is freed
KEPT_BYTES = 16 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> bool:
    """Has the process keep up to `KEPT_BYTES` of freed memory for each of its heaps, instead of some 100 kB.

    Messages of bulk are allocated by libzmq's thread and freed by whoever reads them. Otherwise their memory goes back
    to the kernel several times in each push of weights, and to be given it anew takes a tenth of the time that
    decrypting does. Only glibc can be asked; elsewhere this does nothing. Returns whether it was asked.
    """
    ask = getattr(ctypes.CDLL(None), "mallopt", None)
    if ask is None:
        return False
    return bool(ask(_M_MMAP_THRESHOLD, LARGEST_BYTES) and ask(_M_TRIM_THRESHOLD, KEPT_BYTES))
