"""The base class of objects that work in a thread of their own."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod

from hal.context import StartedAtEntry
from user_sys.errors import TunnelError

logger = logging.getLogger(__name__)


class ThreadedService(StartedAtEntry):
    """Works in a thread from `start` to `close`.

    Attributes:
        failure: the exception that ended the thread, or None.
    """

    def __init__(self, name: str, stop_timeout_s: float, stuck: str = "the disk is stuck") -> None:
        """`stuck`: why the thread may not end within `stop_timeout_s`, for the error."""
        self.failure: Exception | None = None
        self._name, self._stop_timeout_s, self._stuck = name, stop_timeout_s, stuck
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name=name, daemon=True)

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after its current work. Raises TunnelError if that takes longer than its limit."""
        self._stopping.set()
        if not self.started:
            return
        self._wake()
        self._thread.join(self._stop_timeout_s)
        if self._thread.is_alive():
            raise TunnelError(f"the thread {self._name} did not end within {self._stop_timeout_s:g} s: {self._stuck}")

    def raise_failure(self) -> None:
        """Raises the error that ended the thread, if there is one. Any thread may call it."""
        if self.failure is not None:
            raise self.failure

    def _wake(self) -> None:  # noqa: B027  # most threads wait for a short time only
        """Ends the thread's wait, after `_stopping` was set."""

    @abstractmethod
    def _work(self) -> None:
        """Works until `_stopping` is set."""

    def _run_thread(self) -> None:
        try:
            self._work()
        except Exception as error:  # of any type: the owner raises `failure`
            logger.exception("%s.failed", self._name)
            self.failure = error.with_traceback(None)  # which would keep the memory of all that the thread used
