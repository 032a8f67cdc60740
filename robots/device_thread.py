"""A thread for the calls of a device library that may hang."""

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
EXIT_TIMEOUT_S = 2.0  # for a call that hangs at exit; libfranka gives up after 1 s

T = TypeVar("T")


class DeviceThread:
    """Runs the calls of a device one at a time, each with a timeout.

    After a call that timed out or was abandoned, the device is lost and every later call is refused.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._abandoned_operation = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(
        self, operation: str, function: Callable[[], T], timeout_s: float, check_stop: Callable[[], None] | None = None
    ) -> T:
        """Call `function` on the thread and return its result.

        Args:
            check_stop: called periodically while waiting; an exception from it ends the wait.

        Raises:
            HardwareLost: `function` raised any exception, or timed out; the message says which.
        """
        if self._abandoned_operation:
            raise HardwareLost(f"{self._name} has hung since {self._abandoned_operation}")
        future: Future[T] = Future()
        self._calls.put((future, function))
        if check_stop is not None:
            self._wait(operation, future, time.monotonic() + timeout_s, check_stop)
        try:
            return future.result(timeout_s if check_stop is None else 0.0)
        except Exception as error:  # from the device, or the timeout of `result`
            if not future.done():
                self._abandon(operation)
                raise HardwareLost(f"{self._name}: {operation} took longer than {timeout_s:g} s") from None
            raise HardwareLost(f"{self._name}: {operation} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the thread after its current call."""
        self._calls.put(None)

    def _wait(self, operation: str, future: Future[T], until_s: float, check_stop: Callable[[], None]) -> None:
        while time.monotonic() < until_s and not wait([future], STOP_CHECK_INTERVAL_S).done:
            try:
                check_stop()
            except BaseException:
                self._abandon(operation)
                raise

    def _abandon(self, operation: str) -> None:
        self._abandoned_operation = operation
        # a thread that returns from C++ during Python's shutdown would abort the process
        atexit.register(self._thread.join, EXIT_TIMEOUT_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:  # `call` raises it
                future.set_exception(error)
