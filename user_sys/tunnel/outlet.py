"""One channel's way out at one end: a bounded queue, the peer's credit, and a bandwidth limit.

Newest wins where messages are states (`wire.coalescing_key`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from user_sys.messages import Grant
from user_sys.tunnel.credit import Purse, TokenBucket
from user_sys.tunnel.gauges import ChannelGauges
from user_sys.tunnel.limits import ChannelLimits
from user_sys.tunnel.mailbox import Mailbox
from user_sys.tunnel.wire import Envelope, Payload, coalescing_key, encode, size_of

Send = Callable[[list[Payload]], bool]
"""Hands the frames of a message to libzmq without waiting; False when it can take no more."""


@dataclass(frozen=True, eq=False)
class _Queued:
    envelope: Envelope
    at_s: float


class Outlet:
    """`offer` and `drop` may be called from any thread, everything else from one at a time."""

    def __init__(self, limits: ChannelLimits, gauges: ChannelGauges | None = None) -> None:
        self.gauges = gauges or ChannelGauges()
        self.purse = Purse()
        self._queue: Mailbox[_Queued] = Mailbox(limits.queue_messages)
        self._bucket = TokenBucket(limits.bytes_per_s)

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, envelope: Envelope) -> bool:
        """Queues a message; False, and counted, when the queue is full."""
        queued = _Queued(envelope, time.monotonic())
        if self._queue.put(queued, coalescing_key(envelope.message)):
            return True
        self.gauges.refused += 1
        return False

    def drop(self, unwanted: Callable[[Envelope], bool]) -> int:
        """Removes queued messages and says how many they were."""
        return self._queue.drop(lambda queued: unwanted(queued.envelope))

    def reset(self) -> None:
        """A new session: no credit yet."""
        self.purse = Purse()

    def grant(self, grant: Grant) -> None:
        self.purse.grant(grant)

    def may_send(self) -> bool:
        return self.purse.can_pay() and self._bucket.wait_s() <= 0

    def wait_s(self) -> float:
        """When the bandwidth limit lets the next message pass; infinite where it is not what holds back."""
        return self._bucket.wait_s() or math.inf

    def send(self, frames: list[Payload], send: Send) -> bool:
        """Sends a message past the queue, for which `may_send` has said yes; False when libzmq is full."""
        if not send(frames):
            return False
        size = size_of(frames)
        self.purse.pay(size)
        self._bucket.spend(size)
        self.gauges.sent += 1
        self.gauges.sent_bytes += size
        return True

    def send_now(self, envelope: Envelope, send: Send) -> bool:
        """Sends at once if nothing is queued before it and credit and bandwidth allow; False leaves it to the queue."""
        if len(self._queue) or not self.may_send():
            return False
        asked_s = time.monotonic()
        if not self.send(encode(envelope), send):
            return False
        self.gauges.wait.add(time.monotonic() - asked_s)
        return True

    def flush(self, send: Send) -> bool:
        """Sends what waits as far as credit and bandwidth reach; True when libzmq can take no more."""
        while (queued := self._queue.peek()) is not None and self.may_send():
            if not self.send(encode(queued.envelope), send):
                return True
            self._queue.discard(queued)
            self.gauges.wait.add(time.monotonic() - queued.at_s)
        return False
