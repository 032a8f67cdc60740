"""Real-time scheduling for the thread that keeps a robot's time: taken where permitted, reported where not."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Sequence

from user_sys.tunnel.sockets import request_short_time_slice

DRIVER_PRIORITY = 20  # above everything ordinary, below the kernel's interrupt threads (50)
CONTROL_LOOP_PRIORITY = 10  # of a session's control loop, which thinks: its driver keeps the time
THREAD_SWITCH_INTERVAL_S = 0.0005  # how long another thread of the process may keep the interpreter from its loop
_PR_SET_TIMERSLACK = 29
_MCL_CURRENT, _MCL_FUTURE = 1, 2


def enable_realtime(cpus: Sequence[int]) -> str:
    """Has the calling thread, and those that it starts later, run before all others, with memory that stays resident.

    Args:
        cpus: the processors to stay on; empty for all.

    Returns:
        What was refused and why, in words; empty where all was granted.
    """
    gc.freeze()  # what is there at the start is never looked at again
    if sys.platform != "linux":
        return f"real-time scheduling is not known on {sys.platform}"
    if not_first := _set_fifo_priority(DRIVER_PRIORITY):
        request_short_time_slice()
    refused = [*_pin_to_cpus(cpus), *not_first, *_lock_memory()]
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # of no effect once FIFO was granted; needs no permission
    return "; ".join(refused)


def reset_priority_of_new_threads() -> None:
    """Lets threads that the calling one starts from now on be ordinary ones. Harmless if real time was refused."""
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_FIFO:
        _set_fifo_priority(DRIVER_PRIORITY, os.SCHED_RESET_ON_FORK)


def _pin_to_cpus(cpus: Sequence[int]) -> list[str]:
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
    except OSError as error:
        return [f"processors {list(cpus)}: {error.strerror}"]
    return []


def start_with_realtime_priority(priority: int, start: Callable[[], object]) -> str:
    """Has the calling thread, and those that `start` starts, but none later, run before all ordinary ones.

    Returns:
        Why that was refused, in words, and then `start` was not called; empty where it was granted.
    """
    if sys.platform != "linux":
        return f"real-time scheduling is not known on {sys.platform}"
    if refused := _set_fifo_priority(priority):
        return "; ".join(refused)
    start()
    return "; ".join(_set_fifo_priority(priority, os.SCHED_RESET_ON_FORK))


def _set_fifo_priority(priority: int, flags: int = 0) -> list[str]:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | flags, os.sched_param(priority))
    except OSError as error:
        return [f"SCHED_FIFO: {error.strerror} (allow it with rtprio {DRIVER_PRIORITY} in limits.conf, or LimitRTPRIO)"]
    return []


def _lock_memory() -> list[str]:
    if ctypes.CDLL(None, use_errno=True).mlockall(_MCL_CURRENT | _MCL_FUTURE):
        return [f"mlockall: {os.strerror(ctypes.get_errno())} (allow it with memlock in limits.conf, or LimitMEMLOCK)"]
    return []
