"""The session's writing thread: encodes what was recorded and waits for the disk, so that the control loop does not."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

MAX_WAITING = 50  # steps; what a kill can take beside the chunk that is being collected
LOOK_EVERY_S = 0.5
CLOSE_TIMEOUT_S = 30.0
Work = Callable[[], None]


class Scribe:
    """Does works one after the other. The control loop's thread alone calls it."""

    def __init__(self, blocked: Callable[[], None]) -> None:
        """`blocked` is called now and then by a `put` that waits."""
        self._blocked = blocked
        self._queue: queue.Queue[Work | None] = queue.Queue(MAX_WAITING)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="scribe", daemon=True)

    def put(self, work: Work) -> None:
        """Takes `work` over; blocks while `MAX_WAITING` wait. Raises what an earlier work raised; none follows it."""
        while True:
            self._raise_failure()
            try:
                self._queue.put(work, timeout=LOOK_EVERY_S)
                return
            except queue.Full:
                self._blocked()

    def _run(self) -> None:
        while self._failure is None:
            try:
                work = self._queue.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                continue
            if work is None:
                return
            try:
                work()
            except Exception as error:  # of any kind: `put` or the end of the session raises it
                self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Waits until all is written, `CLOSE_TIMEOUT_S` at most. Raises what a work raised, unless the body did."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._failure is None and time.monotonic() < deadline:
            try:
                self._queue.put(None, timeout=LOOK_EVERY_S)
                break
            except queue.Full:
                continue
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if unwritten := sum(work is not None for work in self._queue.queue):
            log.error("recording.unwritten steps=%d", unwritten)
        if kind is None:
            self._raise_failure()
