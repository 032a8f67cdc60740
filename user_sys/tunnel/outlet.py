"""One channel's way out at one end: a bounded queue, the peer's credit, a bandwidth limit, and large payloads in parts.

Newest wins where messages are states (`wire.coalescing_key`). A payload that goes in parts is overtaken by a newer one
of its kind unless more than half of it is on its way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from user_sys.messages import Grant, TransferOffset, TransferPart, TransferStart
from user_sys.tunnel.credit import Purse, TokenBucket
from user_sys.tunnel.gauges import ChannelGauges
from user_sys.tunnel.limits import ChannelLimits
from user_sys.tunnel.mailbox import Mailbox
from user_sys.tunnel.wire import RESUMABLE, Envelope, Payload, coalescing_key, encode, size_of

Send = Callable[[list[Payload]], bool]
"""Hands the frames of a message to libzmq without waiting; False when it can take no more."""

OVERTAKEN_BELOW = 0.5


@dataclass(frozen=True, eq=False)
class _Queued:
    envelope: Envelope
    at_s: float


@dataclass(eq=False)
class _Departure:
    """A payload on its way in parts. `waiting` for the receiver to say what it has."""

    queued: _Queued
    key: str
    payload: memoryview
    start: list[Payload] | None
    waiting: bool
    offset: int = 0

    @property
    def done(self) -> bool:
        return self.start is None and self.offset >= len(self.payload)


class Outlet:
    """`offer` and `drop` may be called from any thread, everything else from one at a time.

    Args:
        interrupted: key of a payload of which a former session may have sent a part.
    """

    def __init__(
        self, limits: ChannelLimits, part_bytes: int, gauges: ChannelGauges | None = None, interrupted: str = ""
    ) -> None:
        self.gauges = gauges or ChannelGauges()
        self.interrupted = interrupted
        self.purse = Purse()
        self._queue: Mailbox[_Queued] = Mailbox(limits.queue_messages)
        self._bucket = TokenBucket(limits.bytes_per_s)
        self._part_bytes = part_bytes
        self._departure: _Departure | None = None

    def __len__(self) -> int:
        return len(self._queue) + (self._departure is not None)

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
        """A new session: no credit yet, and a payload that was under way is offered again when its owner says so."""
        self.purse = Purse()
        self._departure = None

    def grant(self, grant: Grant) -> None:
        self.purse.grant(grant)

    def may_send(self) -> bool:
        return self.purse.can_pay() and self._bucket.wait_s() <= 0

    def wait_s(self) -> float:
        """When to try again because of the bandwidth limit; infinite where something else is awaited."""
        return self._bucket.wait_s() or math.inf if self.purse.can_pay() else math.inf

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

    def flush(self, send: Send) -> bool:
        """Sends what waits as far as credit and bandwidth reach; True when libzmq can take no more."""
        while True:
            queued = self._queue.peek()
            if queued is not None and self._overtakes(queued):
                self._departure = None
            if self._departure is not None:
                sent = self._send_part(self._departure, send)
            elif queued is None:
                return False
            elif self._goes_in_parts(queued.envelope):
                self._depart(queued)
                continue
            else:
                sent = self._send_queued(queued, send)
            if sent is not True:
                return sent is False

    def _send_queued(self, queued: _Queued, send: Send) -> bool | None:
        if not self.may_send():
            return None
        if not self.send(encode(queued.envelope), send):
            return False
        self._queue.discard(queued)
        self.gauges.wait.add(time.monotonic() - queued.at_s)
        return True

    # Payloads in parts

    def resume_at(self, answer: TransferOffset) -> None:
        """The receiver says what it has of the payload that is under way."""
        departure = self._departure
        if departure is not None and departure.waiting and departure.key == answer.key:
            departure.offset, departure.waiting = max(0, min(answer.offset, len(departure.payload))), False

    def _goes_in_parts(self, envelope: Envelope) -> bool:
        return (
            isinstance(envelope.message, RESUMABLE)
            and envelope.payload is not None
            and len(envelope.payload) > self._part_bytes
        )

    @property
    def overtakable(self) -> bool:
        """Whether a payload is under way that a newer one of its kind would take the place of."""
        departure = self._departure
        return departure is not None and departure.offset < OVERTAKEN_BELOW * len(departure.payload)

    def _overtakes(self, queued: _Queued) -> bool:
        departure = self._departure
        key = coalescing_key(queued.envelope.message)
        return departure is not None and key == coalescing_key(departure.queued.envelope.message) and self.overtakable

    def _depart(self, queued: _Queued) -> None:
        message, payload = queued.envelope.message, memoryview(queued.envelope.payload or b"")
        assert isinstance(message, RESUMABLE)
        resume = self.interrupted == message.digest
        start = TransferStart(
            announced=bytes(encode(Envelope(message))[0]), key=message.digest, size_bytes=len(payload), resume=resume
        )
        self._queue.discard(queued)
        self._departure = _Departure(queued, message.digest, payload, encode(Envelope(start)), waiting=resume)
        self.interrupted = message.digest

    def _send_part(self, departure: _Departure, send: Send) -> bool | None:
        """The next message of a departure: True when sent, None when it has to wait, False when libzmq is full."""
        if departure.start is None and departure.waiting or not self.may_send():
            return None
        if departure.start is not None:
            sent = self.send(departure.start, send)
            departure.start = None if sent else departure.start
            return sent
        part = departure.payload[departure.offset : departure.offset + self._part_bytes]
        if part and not self.send(
            encode(Envelope(TransferPart(key=departure.key, offset=departure.offset), part)), send
        ):
            return False
        departure.offset += len(part)
        if departure.done:
            self.gauges.wait.add(time.monotonic() - departure.queued.at_s)
            self._departure = None
        return True
