"""Signals that end a process, as an event that its threads may wait for."""

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

SECOND_SIGNAL_AFTER_S = 1.0  # sooner, it is the same Ctrl-C: a wrapper such as make or uv passes it on


def ending_signals() -> tuple[signal.Signals, ...]:
    """Those that ask a process to end: Ctrl-C, SIGTERM, and the end of its terminal unless it is to outlive that, as
    under ``nohup``."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if outlives else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_on_signals(*stops: threading.Event) -> None:
    """Has each of `ending_signals` set all of `stops`. The main thread calls it.

    A signal interrupts the main thread anywhere: also on its way into a wait for `stop`, with the event's lock in hand,
    where setting it would be to wait for oneself for ever. So another thread sets it.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        detach_terminal(number)
        for stop in stops:
            try:
                _thread.start_new_thread(stop.set, ())  # not `threading`, whose own locks may be held as well
            except RuntimeError:  # no room for a thread
                stop.set()

    for number in ending_signals():
        signal.signal(number, on_signal)


class TerminationRequest:
    """Whether a signal has asked this process to end, and what the signal does; see `bounded_shutdown`.

    Attributes:
        requested: set at the first signal, by another thread.
        requested_s: when that was, on ``time.monotonic``; infinite before.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.requested_s = math.inf
        self._tell: Callable[[], object] | None = None
        self._raised = False

    def defer(self, callback: Callable[[], object]) -> None:
        """From now on a signal raises nothing: it sets `requested` and calls `tell`, from another thread and at once.
        No handler runs while the main thread is in a library that does not return to Python, such as Ray.

        Raises KeyboardInterrupt if one has come already.
        """
        self._tell = callback
        if self.requested.is_set():
            raise KeyboardInterrupt

    def resume(self) -> None:
        """Ends `defer`: the first signal raises KeyboardInterrupt again."""
        self._tell = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread."""
        detach_terminal(number)
        if self._tell is None and not self._raised:
            self._raised = True  # once: a second one must not interrupt the clean-up
            raise KeyboardInterrupt

    def mark_requested(self) -> None:
        """Called by the listening thread at the first signal."""
        self.requested_s = time.monotonic()
        self.requested.set()
        if (tell := self._tell) is not None:
            threading.Thread(target=tell, name="ending", daemon=True).start()


@contextlib.contextmanager
def bounded_shutdown(within_s: float, abandon: Callable[[], object]) -> Iterator[TerminationRequest]:
    """Has a program end within `within_s` seconds of a signal of `ending_signals`. The main thread alone enters it.

    The first signal raises KeyboardInterrupt in the main thread, unless that is deferred. A second one, a second later
    or more, or a context that lasts too long, calls `abandon` from another thread, which must end the process. The end
    of the terminal is no second signal: it often comes twice.
    """
    request, ends = TerminationRequest(), ending_signals()
    inbox, outbox = socket.socketpair()
    outbox.setblocking(False)
    listener = threading.Thread(
        target=_listen, args=(inbox, frozenset(ends), request, within_s, abandon), name="signals", daemon=True
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
    abandon: Callable[[], object],
) -> None:
    while True:
        left_s = request.requested_s + within_s - time.monotonic()
        inbox.settimeout(None if left_s == math.inf else max(0.001, left_s))
        try:
            heard = inbox.recv(1)
        except TimeoutError:
            abandon()
            return
        if not heard:
            return
        if heard[0] not in ends:
            continue
        if not request.requested.is_set():
            request.mark_requested()
        elif heard[0] != signal.SIGHUP and time.monotonic() > request.requested_s + SECOND_SIGNAL_AFTER_S:
            abandon()
            return


def detach_terminal(number: int) -> None:
    """Where the signal `number` says that the terminal is gone, has what is still printed go nowhere: writing to it
    would raise, and keep robots from being stopped in good order."""
    if number != signal.SIGHUP:
        return
    for handle in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            if stat.S_ISCHR(os.fstat(handle).st_mode):  # a terminal that is gone is told to be none by `isatty`
                os.dup2(os.open(os.devnull, os.O_WRONLY), handle)
