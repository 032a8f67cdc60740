"""The threads that fill the cache."""

from __future__ import annotations

import contextlib
import os
import queue
import threading

import numpy as np

from user_sys.replay.cache import NICENESS, CacheWarmer

DEADLINE_S = 60.0
LOWEST = 19  # of Linux


def test_threads_are_nicer_than_their_process() -> None:
    loading, found = queue.Queue[int](), queue.Queue[tuple[int, int]]()

    def load(_chunk: int, _fresh: bool) -> bool:
        loading.put(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return True

    def fill() -> None:
        ours = os.nice(NICENESS // 2)  # on Linux, for this thread and its children
        with contextlib.closing(CacheWarmer(load, 1, most=1)) as warmer:
            warmer.add(np.zeros(1, np.int32), fresh=True)
            found.put((ours, loading.get(timeout=DEADLINE_S)))

    starter = threading.Thread(target=fill)
    starter.start()
    starter.join(2 * DEADLINE_S)
    ours, its = found.get_nowait()
    assert its == min(ours + NICENESS, LOWEST)
