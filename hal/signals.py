"""Signals that end a process, as an event that its threads may wait for."""

from __future__ import annotations

import _thread
import signal
import threading
from types import FrameType


def stop_on_signals(stop: threading.Event) -> None:
    """Has SIGTERM and SIGINT set `stop`. The main thread calls it.

    A signal interrupts the main thread anywhere: also on its way into a wait for `stop`, with the event's lock in hand,
    where setting it would be to wait for oneself for ever. So another thread sets it.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        try:
            _thread.start_new_thread(stop.set, ())  # not `threading`, whose own locks may be held as well
        except RuntimeError:  # no room for a thread
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
