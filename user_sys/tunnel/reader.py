"""Lets the thread that waits for a message read the connection itself: two thread switches fewer on the way."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from user_sys.tunnel.link import Line
from user_sys.tunnel.mailbox import Mailbox
from user_sys.tunnel.sockets import Wakeup
from user_sys.tunnel.wire import Envelope, coalescing_key

STAYS_S = 0.1  # a thread that has waited once is expected back for so long
RECHECK_S = 0.25


@dataclass(frozen=True, eq=False)
class Incoming:
    """A message in the inbox; taking it gives its charge back to the line that it came on."""

    envelope: Envelope
    line: Line
    charge: int


class Reader:
    """An inbox whose waiting thread reads the line of one channel while one is attached.

    One thread at a time waits for the line; others that wait are served from what it reads. While nobody waits, and
    nobody has waited within `STAYS_S`, whoever attached the line must read it (`drain`).

    Args:
        take_in: reads a line empty into the inbox; never raises.
    """

    def __init__(self, capacity: int, take_in: Callable[[Line], None]) -> None:
        self.inbox: Mailbox[Incoming] = Mailbox(capacity)
        self._take_in = take_in
        self._draining = threading.Lock()  # whoever reads a message also takes it in, before the next is read
        self._line: Line | None = None
        self._turn, self._polling = threading.Lock(), threading.Lock()
        self._attached = threading.Condition()
        self._ident = 0
        self._left_s = float("-inf")
        self._wakeup = Wakeup()
        self._poll: select.poll | None = None
        self._polled: Line | None = None

    @property
    def present(self) -> bool:
        """Whether a thread reads the line, or has done so just now."""
        return self._ident != 0 or time.monotonic() - self._left_s < STAYS_S

    def attach(self, line: Line) -> None:
        with self._attached:
            self._line = line
            self._attached.notify_all()

    def detach(self) -> None:
        """Nobody uses the line's file descriptor any more when this returns."""
        self._line = None
        self._wakeup.set()
        with self._polling:
            return

    def settle(self) -> None:
        """What other threads have read of a line that was detached and closed is taken in when this returns."""
        with self._draining:
            return

    def drain(self, line: Line) -> None:
        """Takes in what has arrived on `line`, in its order, whichever threads read it."""
        with self._draining:
            self._take_in(line)

    def put(self, envelope: Envelope, line: Line, charge: int) -> int:
        """Keeps a message until it is taken; returns what of its charge is to be given back at once.

        A state may be replaced by its successor before anybody takes it: only other messages wait at their own charge.
        """
        key = coalescing_key(envelope.message)
        kept = Incoming(envelope, line, charge if key is None else 0)
        if not self.inbox.put(kept, key):
            return charge
        if self._ident not in (0, threading.get_ident()):
            self._wakeup.set()
        return charge - kept.charge

    def take(self, timeout_s: float) -> Incoming | None:
        """The oldest message, or None after `timeout_s`."""
        if timeout_s <= 0:
            if self._line is not None and not len(self.inbox):
                self.drain(self._line)
            return self.inbox.take()
        deadline = time.monotonic() + timeout_s
        if not self._turn.acquire(blocking=False):
            return self.inbox.wait(timeout_s)
        try:
            self._ident = threading.get_ident()
            return self._read(deadline)
        finally:
            self._left_s = time.monotonic()
            self._ident = 0
            self._turn.release()

    def _read(self, deadline: float) -> Incoming | None:
        while (item := self.inbox.take()) is None:
            line = self._line
            if line is not None:
                self.drain(line)
                if len(self.inbox):
                    continue
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return None
            self._wait(line, min(remaining_s, RECHECK_S))
        return item

    def _wait(self, line: Line | None, timeout_s: float) -> None:
        """Until something may have come, or the line has changed. Without a line no file descriptor is touched."""
        if line is None:
            with self._attached:
                if self._line is None:
                    self._attached.wait(timeout_s)
            return
        with self._polling:
            if self._line is not line:
                return  # detached: its file descriptor may be another's by now
            if self._polled is not line or self._poll is None:
                self._poll, self._polled = select.poll(), line
                self._poll.register(self._wakeup.fileno(), select.POLLIN)
                self._poll.register(line.fd, select.POLLIN)
            if self._wakeup.fileno() in dict(self._poll.poll(1e3 * timeout_s)):
                self._wakeup.clear()

    def close(self) -> None:
        """A thread that waits goes on waiting, for what will not come, until its time is over."""
        self.detach()
        self._wakeup.close()
