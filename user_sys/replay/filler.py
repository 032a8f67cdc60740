"""The threads that bring experience into the hot cache, before somebody asks for it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import numpy as np

from user_sys.codec import Array
from user_sys.errors import StoreError, WireError

STOP_DEADLINE_S = 30.0
NICENESS = 10  # of the threads, beside the process's: a learner that waits for a batch goes first

Load = Callable[[int, bool], bool]
"""Loads the chunk of a row; True says that it is new experience. Returns whether there may be room for more old ones.

Raises StoreError, WireError: it cannot be used; what loads counts it.
"""

_logger = logging.getLogger(__name__)


class Filler:
    """Loads chunks in the background: new experience first, then what was there before, the newest of it first.

    At most `most` chunks wait; the oldest are forgotten, they are read when they are drawn.
    """

    def __init__(self, load: Load, threads: int, most: int) -> None:
        self._load, self._most = load, most
        self._new, self._old = np.empty(0, np.int32), np.empty(0, np.int32)  # the newest last
        self._busy = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"replay-fill-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Chunks that are still to be loaded, those in work included."""
        with self._changed:
            return len(self._new) + len(self._old) + self._busy

    def add(self, chunks: Array, fresh: bool) -> None:
        """Has the chunks of these rows loaded, in order of storage; returns at once."""
        with self._changed:
            if fresh:
                self._new = np.append(self._new, chunks)[-self._most :]
            else:
                self._old = np.append(self._old, chunks)[-self._most :]
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads and waits for the chunk that each is at, at most `STOP_DEADLINE_S`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(STOP_DEADLINE_S)

    def _run(self) -> None:
        os.nice(NICENESS)  # Linux: of this thread alone
        while (task := self._next()) is not None:
            room = True
            try:
                room = self._load(*task)
            except (StoreError, WireError) as error:
                _logger.debug("replay.not_cached chunk=%d: %s", task[0], error)
            with self._changed:
                self._busy -= 1
                if not room:
                    self._old = self._old[:0]

    def _next(self) -> tuple[int, bool] | None:
        with self._changed:
            while not self._closed and not len(self._new) and not len(self._old):
                self._changed.wait(1.0)
            if self._closed:
                return None
            self._busy += 1
            if len(self._new):
                chunk, self._new = int(self._new[-1]), self._new[:-1]
                return chunk, True
            chunk, self._old = int(self._old[-1]), self._old[:-1]
            return chunk, False
