"""A thread that waits for a device in our stead, for libraries whose calls may hang."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from hal.errors import HardwareLost

STOP_CHECK_INTERVAL_S = 0.1
EXIT_TIMEOUT_S = 2.0  # for a call that hangs while the process ends; libfranka gives up after one

T = TypeVar("T")


class DeviceThread:
    """Carries out a device's calls one after the other, each with a deadline, so that a library that hangs is noticed.

    After a call that missed its deadline, or was not waited for any longer, the device is lost: every later call is
    refused.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._hung = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(
        self, operation: str, function: Callable[[], T], timeout_s: float, check_stop: Callable[[], None] | None = None
    ) -> T:
        """What `function` returns.

        Args:
            attend: called all the while, where the call may take long; what it raises ends the waiting.

        Raises:
            HardwareLost: it raised, whatever it was, or did not return in time; the message says which.
        """
        if self._hung:
            raise HardwareLost(f"{self._name} has hung since {self._hung}")
        future: Future[T] = Future()
        self._calls.put((future, function))
        if check_stop is not None:
            self._attend(operation, future, time.monotonic() + timeout_s, check_stop)
        try:
            return future.result(timeout_s if check_stop is None else 0.0)
        except Exception as error:  # of the device; and of the deadline, which is no error of the device
            if not future.done():
                self._leave_hanging(operation)
                raise HardwareLost(f"{self._name}: {operation} took longer than {timeout_s:g} s") from None
            raise HardwareLost(f"{self._name}: {operation} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Lets the thread end once it is idle."""
        self._calls.put(None)

    def _attend(self, deed: str, future: Future[T], until_s: float, attend: Callable[[], None]) -> None:
        while time.monotonic() < until_s and not wait([future], STOP_CHECK_INTERVAL_S).done:
            try:
                attend()
            except BaseException:
                self._leave_hanging(deed)
                raise

    def _leave_hanging(self, deed: str) -> None:
        self._hung = deed
        # a thread that came back from C++ while Python is being torn down would abort the process
        atexit.register(self._thread.join, EXIT_TIMEOUT_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:  # handed over to whoever waits
                future.set_exception(error)
