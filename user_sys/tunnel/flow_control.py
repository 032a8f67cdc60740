"""Flow control of one channel: credit, bandwidth limits, bounded send queues, and their metrics.

The receiver grants credit and the sender consumes it. A grant names the total number of messages and bytes that the
sender may have sent since the session began (as QUIC's MAX_DATA, RFC 9000 §4.1). A repeated grant changes nothing, and
a newer grant includes the older.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from hal.pacing import TokenBucket
from user_sys.errors import WireError
from user_sys.messages import CreditGrant
from user_sys.tunnel.limits import ChannelLimits
from user_sys.tunnel.protocol import Envelope, Payload, coalescing_key, credit_cost_bytes, encode_envelope

BANDWIDTH_BURST_S = 0.25
MIN_BURST_BYTES = 64 << 10
GRANTS_PER_WINDOW = 4
MAX_QUEUED_BYTES = 64 << 20
"""Bytes in the send queue of one channel and peer, up to which it accepts payloads; up to twice as many, it accepts
messages without one. A peer determines how many: it requests weights, or sends pictures for a console."""
NO_CREDIT = CreditGrant(messages=0, size_bytes=0)

Item = TypeVar("Item")
SendFrames = Callable[[list[Payload]], bool]
"""Passes the frames of a message to libzmq without blocking. Returns False if libzmq accepts no more."""


@dataclass
class ChannelMetrics:
    """Counters of one channel at one end. `rejected`: messages that found the send queue full."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    rejected: int = 0

    def scalars(self, channel: str) -> dict[str, float]:
        """The metrics ``<channel>/sent`` and so on."""
        return {f"{channel}/{name}": float(count) for name, count in vars(self).items()}


class ReceiveWindow:
    """The receiver's side of flow control in one session. Any thread may call it. Its pairs are (messages, bytes)."""

    def __init__(self, limits: ChannelLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._received = [0, 0]
        self._released = [0, 0]
        self._granted = NO_CREDIT

    def charge(self, size_bytes: int) -> None:
        """Counts a received message. Raises WireError if its sender had no credit for it."""
        with self._lock:
            if self._received[0] >= self._granted.messages or self._received[1] >= self._granted.size_bytes:
                raise WireError(f"sent more than its window of {self._limits.window_messages} messages allows")
            self._received[0] += 1
            self._received[1] += size_bytes

    def release(self, messages: int, size_bytes: int) -> bool:
        """Returns credit for processed messages. Returns whether a grant is due."""
        with self._lock:
            self._released[0] += messages
            self._released[1] += size_bytes
        return self.next_grant() is not None

    def next_grant(self) -> CreditGrant | None:
        """The grant to send now, or None: one at the start, and one each time a quarter of the window is free again."""
        limits, granted = self._limits, self._granted
        with self._lock:
            messages, size = self._released[0] + limits.window_messages, self._released[1] + limits.window_bytes
        if (
            GRANTS_PER_WINDOW * (messages - granted.messages) < limits.window_messages
            and GRANTS_PER_WINDOW * (size - granted.size_bytes) < limits.window_bytes
        ):
            return None
        return CreditGrant(messages=messages, size_bytes=size)

    def mark_granted(self, grant: CreditGrant) -> None:
        """Records that libzmq has the grant."""
        self._granted = grant


class CoalescingQueue(Generic[Item]):
    """A bounded FIFO queue between threads. An item with a key replaces the queued item of the same key.

    A full queue rejects and counts an item; it never drops one silently. Any thread may call it; only `get` blocks.

    Args:
        capacity: the number of items.
        max_bytes: of all items together, by `size_of`; one item may exceed it.
    """

    def __init__(
        self, capacity: int, max_bytes: float = math.inf, size_of: Callable[[Item], int] = lambda item: 0
    ) -> None:
        self.rejected = 0
        self._capacity, self._max_bytes, self._size_of = capacity, max_bytes, size_of
        self._size_bytes = 0
        self._items: OrderedDict[Hashable, Item] = OrderedDict()
        self._serial = 0
        self._changed = threading.Condition(threading.Lock())

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item, key: Hashable = None) -> bool:
        """Appends `item`. Returns False if the queue is full."""
        with self._changed:
            if key is not None and key in self._items:
                self._take(key)
            size = self._size_of(item)
            is_too_large = size > 0 and self._size_bytes + size > self._limit_bytes(item)
            if len(self._items) >= self._capacity or (is_too_large and self._items):
                self.rejected += 1
                return False
            self._serial += 1
            self._size_bytes += size
            self._items[self._serial if key is None else key] = item
            self._changed.notify()
            return True

    def _limit_bytes(self, item: Item) -> float:
        return self._max_bytes

    def _take(self, key: Hashable) -> Item:
        item = self._items.pop(key)
        self._size_bytes -= self._size_of(item)
        return item

    def _take_oldest(self) -> Item | None:
        return self._take(next(iter(self._items))) if self._items else None

    def get_nowait(self) -> Item | None:
        """Removes and returns the oldest item, or None."""
        with self._changed:
            return self._take_oldest()

    def get(self, timeout_s: float) -> Item | None:
        """Removes and returns the oldest item. Blocks for at most `timeout_s`, then returns None."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._items:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    break
            return self._take_oldest()

    def peek(self) -> Item | None:
        """The oldest item, which stays in the queue until `discard`. Only for the one thread that removes items."""
        with self._changed:
            return next(iter(self._items.values()), None)

    def discard(self, item: Item) -> None:
        """Removes a peeked item, unless a newer one of its key has replaced it."""
        with self._changed:
            if next(iter(self._items.values()), None) is item:
                self._take_oldest()

    def remove_matching(self, predicate: Callable[[Item], bool]) -> int:
        """Removes the items for which `predicate` is true. Returns their number."""
        with self._changed:
            keys = [key for key, item in self._items.items() if predicate(item)]
            for key in keys:
                self._take(key)
            return len(keys)


class SendQueue(CoalescingQueue[Envelope]):
    """The send side of one channel at one end: a bounded queue, the peer's credit, and a bandwidth limit.

    A state message replaces its queued predecessor (`protocol.coalescing_key`). Any thread may call the methods of a
    queue; one thread calls the others.
    """

    def __init__(self, limits: ChannelLimits, metrics: ChannelMetrics | None = None) -> None:
        super().__init__(
            limits.queue_messages, MAX_QUEUED_BYTES, lambda item: len(item.record) + len(item.payload or b"")
        )
        self.metrics = metrics or ChannelMetrics()
        self._bucket = TokenBucket(limits.bytes_per_s, max(BANDWIDTH_BURST_S * limits.bytes_per_s, MIN_BURST_BYTES))
        self.reset_credit()

    def put(self, item: Envelope, key: Hashable = None) -> bool:
        """Queues a message. If the queue is full, counts it as rejected and returns False."""
        accepted = super().put(item, key or coalescing_key(item.message))
        self.metrics.rejected += not accepted
        return accepted

    def _limit_bytes(self, item: Envelope) -> float:
        return self._max_bytes * (1 if item.payload else 2)  # pictures and weights displace no short message

    def reset_credit(self) -> None:
        """Starts a new session without credit."""
        self._granted = NO_CREDIT
        self._sent_messages = self._sent_bytes = 0

    def add_credit(self, grant: CreditGrant) -> None:
        self._granted = CreditGrant(
            messages=max(self._granted.messages, grant.messages),
            size_bytes=max(self._granted.size_bytes, grant.size_bytes),
        )

    def can_send(self) -> bool:
        """Whether credit and bandwidth allow one more message of any size."""
        has_credit = self._sent_messages < self._granted.messages and self._sent_bytes < self._granted.size_bytes
        return has_credit and self._bucket.wait_s() <= 0

    def bandwidth_wait_s(self) -> float:
        """Seconds until the bandwidth limit allows a message; infinite if the limit does not delay messages now."""
        return self._bucket.wait_s() or math.inf

    def send(self, envelope: Envelope, send: SendFrames) -> bool:
        """Sends a message past the queue, after `can_send` has returned True. Returns False if libzmq is full."""
        frames = encode_envelope(envelope)
        if not send(frames):
            return False
        size = credit_cost_bytes(frames)
        self._sent_messages += 1
        self._sent_bytes += size
        self._bucket.consume(size)
        self.metrics.sent += 1
        self.metrics.sent_bytes += size
        return True

    def flush(self, send: SendFrames) -> bool:
        """Sends queued messages while credit and bandwidth allow. Returns True if libzmq accepts no more."""
        while (envelope := self.peek()) is not None and self.can_send():
            if not self.send(envelope, send):
                return True
            self.discard(envelope)
        return False


class ChannelFlow:
    """One channel of one session at one end: its send queue, and the window of its received payloads."""

    def __init__(self, limits: ChannelLimits, send_queue: SendQueue) -> None:
        self.send_queue, self.window = send_queue, ReceiveWindow(limits)
        send_queue.reset_credit()

    def send_grant(self, send: SendFrames) -> None:
        """Sends a grant if one is due."""
        grant = self.window.next_grant()
        if grant is not None and send(encode_envelope(Envelope(grant))):
            self.window.mark_granted(grant)

    def flush(self, send: SendFrames) -> bool:
        """Sends a due grant and the queued messages that may be sent. Returns True if libzmq accepts no more."""
        self.send_grant(send)
        return self.send_queue.flush(send)
