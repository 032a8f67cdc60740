"""Signals that ask a process to end: as an event for its threads, or as an exception with a deadline."""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

SECOND_SIGNAL_AFTER_S = 1.0  # an earlier one is the same Ctrl-C, which wrappers such as make and uv pass on


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a process to end: SIGINT, SIGTERM, and SIGHUP unless it is ignored, as under ``nohup``."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if ignores_hangup else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_on_signals(*stops: threading.Event) -> None:
    """Makes each of `ending_signals` set all of `stops`. The main thread calls it.

    A signal may interrupt the main thread while it holds the lock of a `stop` that it begins to wait for. Setting the
    event there would deadlock, so another thread sets it.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        detach_terminal(number)
        for stop in stops:
            try:
                _thread.start_new_thread(stop.set, ())  # not `threading`, whose locks may be held too
            except RuntimeError:  # no thread can be started
                stop.set()

    for number in ending_signals():
        signal.signal(number, on_signal)


class TerminationRequest:
    """Whether a signal has asked this process to end, and the reaction to it; see `bounded_shutdown`.

    Attributes:
        requested: set at the first signal, by another thread.
        requested_s: the time of the first signal on ``time.monotonic``; infinite before.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.requested_s = math.inf
        self._callback: Callable[[], object] | None = None
        self._raised = False

    def defer(self, callback: Callable[[], object]) -> None:
        """From now on a signal raises nothing. It sets `requested` and calls `callback` at once, from another thread:
        no handler runs while the main thread is inside a library such as Ray.

        Raises KeyboardInterrupt if a signal has arrived already.
        """
        self._callback = callback
        if self.requested.is_set():
            raise KeyboardInterrupt

    def resume(self) -> None:
        """Ends `defer`: the first signal raises KeyboardInterrupt again."""
        self._callback = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread."""
        detach_terminal(number)
        if self._callback is None and not self._raised:
            self._raised = True  # only once: a second signal must not interrupt the clean-up
            raise KeyboardInterrupt

    def mark_requested(self) -> None:
        """The listening thread calls it at the first signal."""
        self.requested_s = time.monotonic()
        self.requested.set()
        if (callback := self._callback) is not None:
            threading.Thread(target=callback, name="ending", daemon=True).start()


@contextlib.contextmanager
def bounded_shutdown(within_s: float, abort: Callable[[], object]) -> Iterator[TerminationRequest]:
    """Bounds the time from a signal of `ending_signals` to the end of the process. Only the main thread enters it.

    The first signal raises KeyboardInterrupt in the main thread, unless that is deferred. If the context lasts longer
    than `within_s` after it, or a second signal arrives at least a second later, another thread calls `abort`, which
    must end the process. SIGHUP counts only as the first signal, since it often arrives twice.
    """
    request, ends = TerminationRequest(), ending_signals()
    inbox, outbox = socket.socketpair()
    outbox.setblocking(False)
    listener = threading.Thread(
        target=_listen, args=(inbox, frozenset(ends), request, within_s, abort), name="signals", daemon=True
    )
    listener.start()
    before_fd = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, request.on_signal) for number in ends}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        outbox.close()
        listener.join()
        inbox.close()


def _listen(
    inbox: socket.socket,
    ends: frozenset[int],
    request: TerminationRequest,
    within_s: float,
    abort: Callable[[], object],
) -> None:
    while True:
        left_s = request.requested_s + within_s - time.monotonic()
        inbox.settimeout(None if left_s == math.inf else max(0.001, left_s))
        try:
            received = inbox.recv(1)
        except TimeoutError:
            abort()
            return
        if not received:
            return
        if received[0] not in ends:
            continue
        if not request.requested.is_set():
            request.mark_requested()
        elif received[0] != signal.SIGHUP and time.monotonic() > request.requested_s + SECOND_SIGNAL_AFTER_S:
            abort()
            return


def detach_terminal(number: int) -> None:
    """If `number` is SIGHUP, redirects the terminal's outputs to nowhere: writing to a closed terminal raises, which
    would keep robots from being stopped cleanly."""
    if number != signal.SIGHUP:
        return
    for handle in (1, 2):
        with contextlib.suppress(OSError):  # the descriptor is closed
            if stat.S_ISCHR(os.fstat(handle).st_mode):  # `isatty` is false for a closed terminal
                os.dup2(os.open(os.devnull, os.O_WRONLY), handle)
