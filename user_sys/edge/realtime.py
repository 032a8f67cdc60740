"""Real-time scheduling of driver and control loop: enabled if the system permits it, reported if not."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Sequence

from user_sys.tunnel.connection import request_short_time_slice

DRIVER_PRIORITY = 20  # above every ordinary thread, below the kernel's interrupt threads (50)
CONTROL_LOOP_PRIORITY = 10  # below the driver, which times the control periods
THREAD_SWITCH_INTERVAL_S = 0.0005  # how long another thread may keep the interpreter from the loop
_PR_SET_TIMERSLACK = 29
_MCL_CURRENT, _MCL_FUTURE = 1, 2


def enable_realtime(cpus: Sequence[int]) -> str:
    """Gives the calling thread, and threads that it starts later, real-time priority, and locks the process's memory.

    Args:
        cpus: the CPUs to run on; empty for all.

    Returns:
        The refused settings and why; empty if all were granted.
    """
    gc.freeze()  # excludes the objects so far from later collections
    if sys.platform != "linux":
        return f"real-time scheduling is not supported on {sys.platform}"
    if no_priority := _set_fifo_priority(DRIVER_PRIORITY):
        request_short_time_slice()
    refused = [*_pin_to_cpus(cpus), *no_priority, *_lock_memory()]
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # no effect under FIFO; needs no permission
    return "; ".join(refused)


def reset_priority_of_new_threads() -> None:
    """Later threads of the calling thread get the ordinary priority. Does nothing if real time was refused."""
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_FIFO:
        _set_fifo_priority(DRIVER_PRIORITY, os.SCHED_RESET_ON_FORK)


def _pin_to_cpus(cpus: Sequence[int]) -> list[str]:
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
    except OSError as error:
        return [f"CPUs {list(cpus)}: {error.strerror}"]
    return []


def start_with_realtime_priority(priority: int, start: Callable[[], object]) -> str:
    """Gives real-time priority to the calling thread and the threads that `start` starts, but to no later ones.

    Returns:
        Why it was refused; `start` was then not called. Empty if it was granted.
    """
    if sys.platform != "linux":
        return f"real-time scheduling is not supported on {sys.platform}"
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
