"""Signals that end a process, as an event that its threads may wait for."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from types import FrameType


def ending() -> tuple[signal.Signals, ...]:
    """Those that ask a process to end: Ctrl-C, SIGTERM, and the end of its terminal unless it is to outlive that, as
    under ``nohup``."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if outlives else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_on_signals(stop: threading.Event) -> None:
    """Has each of `ending` set `stop`. The main thread calls it.

    A signal interrupts the main thread anywhere: also on its way into a wait for `stop`, with the event's lock in hand,
    where setting it would be to wait for oneself for ever. So another thread sets it.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        leave_terminal(number)
        try:
            _thread.start_new_thread(stop.set, ())  # not `threading`, whose own locks may be held as well
        except RuntimeError:  # no room for a thread
            stop.set()

    for number in ending():
        signal.signal(number, on_signal)


@contextlib.contextmanager
def asked_to_end(tell: Callable[[], object]) -> Iterator[threading.Event]:
    """Each of `ending` sets the event instead of raising, once; a second one raises KeyboardInterrupt, unless it is the
    end of the terminal. The main thread alone enters it.

    Each calls `tell` too, from another thread, and at once: no handler runs while the main thread is in a library that
    does not return to Python, as Ray does not before its cluster answers.
    """
    asked = threading.Event()

    def on_signal(number: int, _: object) -> None:
        leave_terminal(number)
        if asked.is_set() and number != signal.SIGHUP:
            raise KeyboardInterrupt
        asked.set()

    def listen() -> None:
        while number := inbox.recv(1):
            if number[0] in ends:
                tell()

    ends = ending()
    inbox, outbox = socket.socketpair()
    outbox.setblocking(False)
    listener = threading.Thread(target=listen, name="signals", daemon=True)
    listener.start()
    before_fd = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, on_signal) for number in ends}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        outbox.close()
        listener.join()
        inbox.close()


def leave_terminal(number: int) -> None:
    """Where the signal `number` says that the terminal is gone, has what is still printed go nowhere: writing to it
    would raise, and keep robots from being stopped in good order."""
    if number != signal.SIGHUP:
        return
    for handle in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            if stat.S_ISCHR(os.fstat(handle).st_mode):  # a terminal that is gone is told to be none by `isatty`
                os.dup2(os.open(os.devnull, os.O_WRONLY), handle)
