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
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from user_sys.errors import WireError
from user_sys.messages import CreditGrant
from user_sys.tunnel.limits import ChannelLimits
from user_sys.tunnel.protocol import Envelope, Payload, coalescing_key, credit_cost_bytes, encode_envelope

BUCKETS_PER_OCTAVE = 2
FIRST_BUCKET_S = 1e-6
BUCKETS = 56  # from a microsecond to three minutes in steps of 41%; the last bucket holds all longer durations
BANDWIDTH_BURST_S = 0.25
MIN_BURST_BYTES = 64 << 10
GRANTS_PER_WINDOW = 4

Item = TypeVar("Item")
SendFrames = Callable[[list[Payload]], bool]
"""Passes the frames of a message to libzmq without blocking. Returns False if libzmq accepts no more."""


class LatencyHistogram:
    """Durations in buckets of logarithmic width. One thread adds; any thread may read a recent state."""

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.max_s = 0.0

    def add(self, seconds: float) -> None:
        at = math.ceil(BUCKETS_PER_OCTAVE * math.log2(seconds / FIRST_BUCKET_S)) if seconds > FIRST_BUCKET_S else 0
        self.counts[min(at, BUCKETS - 1)] += 1
        self.max_s = max(self.max_s, seconds)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile_s(self, fraction: float) -> float:
        """The smallest bucket bound that `fraction` of all durations do not exceed; 0 without durations."""
        remaining = fraction * self.count
        for at, count in enumerate(self.counts):
            remaining -= count
            if remaining <= 0 and count:
                return min(FIRST_BUCKET_S * 2 ** (at / BUCKETS_PER_OCTAVE), self.max_s)
        return 0.0


@dataclass
class ChannelMetrics:
    """Counters and latencies of one channel at one end.

    Attributes:
        rejected: messages that found the send queue full.
        queue_latency: from the send call until libzmq has the message.
        ack_latency: from sending a chunk to its durable acknowledgement.
    """

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    rejected: int = 0
    queue_latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    ack_latency: LatencyHistogram = field(default_factory=LatencyHistogram)

    def scalars(self, channel: str) -> dict[str, float]:
        """The metrics ``<channel>/sent`` and so on. Latencies are in milliseconds and appear after the first one."""
        scalars: dict[str, float] = {
            f"{channel}/sent": self.sent,
            f"{channel}/sent_bytes": self.sent_bytes,
            f"{channel}/received": self.received,
            f"{channel}/received_bytes": self.received_bytes,
            f"{channel}/rejected": self.rejected,
        }
        for name, histogram in (("queue", self.queue_latency), ("ack", self.ack_latency)):
            if histogram.count:
                scalars[f"{channel}/{name}_p50_ms"] = 1e3 * histogram.quantile_s(0.5)
                scalars[f"{channel}/{name}_p99_ms"] = 1e3 * histogram.quantile_s(0.99)
        return scalars


class SendCredit:
    """The sender's side of flow control. One thread at a time may call it."""

    def __init__(self) -> None:
        self.granted_messages = self.granted_bytes = 0
        self.sent_messages = self.sent_bytes = 0

    def grant(self, grant: CreditGrant) -> None:
        self.granted_messages = max(self.granted_messages, grant.messages)
        self.granted_bytes = max(self.granted_bytes, grant.size_bytes)

    def is_available(self) -> bool:
        """Whether one more message of any size may be sent."""
        return self.sent_messages < self.granted_messages and self.sent_bytes < self.granted_bytes

    def consume(self, size_bytes: int) -> None:
        self.sent_messages += 1
        self.sent_bytes += size_bytes


class ReceiveWindow:
    """The receiver's side of flow control. Any thread may call it. Its pairs are (messages, bytes)."""

    def __init__(self, limits: ChannelLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._received = [0, 0]
        self._released = [0, 0]
        self._granted = [0, 0]

    @property
    def unreleased_bytes(self) -> int:
        """The bytes of received messages that are not released yet."""
        return self._received[1] - self._released[1]

    def charge(self, size_bytes: int) -> None:
        """Counts a received message. Raises WireError if its sender had no credit for it."""
        with self._lock:
            if self._received[0] >= self._granted[0] or self._received[1] >= self._granted[1]:
                raise WireError(f"sent more than its window of {self._limits.window_messages} messages allows")
            self._received[0] += 1
            self._received[1] += size_bytes

    def release(self, messages: int, size_bytes: int) -> bool:
        """Returns credit for processed messages. Returns whether a grant is due."""
        with self._lock:
            self._released[0] += messages
            self._released[1] += size_bytes
        return self.is_grant_due

    @property
    def is_grant_due(self) -> bool:
        """Whether to send a grant: at the start, and each time a quarter of the window is free again."""
        limits, released, granted = self._limits, self._released, self._granted
        return (
            GRANTS_PER_WINDOW * (released[0] + limits.window_messages - granted[0]) >= limits.window_messages
            or GRANTS_PER_WINDOW * (released[1] + limits.window_bytes - granted[1]) >= limits.window_bytes
        )

    def next_grant(self) -> CreditGrant | None:
        """The grant to send now, or None."""
        if not self.is_grant_due:
            return None
        with self._lock:
            messages, size = self._released
        return CreditGrant(
            messages=messages + self._limits.window_messages, size_bytes=size + self._limits.window_bytes
        )

    def mark_granted(self, grant: CreditGrant) -> None:
        """Records that libzmq has the grant."""
        with self._lock:
            self._granted = [grant.messages, grant.size_bytes]


class TokenBucket:
    """A bandwidth limit: a message of any size passes at once, and later messages wait for its share of time."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = bytes_per_s, clock
        self._burst = max(BANDWIDTH_BURST_S * bytes_per_s, MIN_BURST_BYTES)
        self._tokens, self._at = self._burst, clock()

    def wait_s(self) -> float:
        """Seconds until the next message may be sent; 0 if it may be sent now."""
        if self._rate <= 0:
            return 0.0
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + self._rate * (now - self._at))
        self._at = now
        return -self._tokens / self._rate if self._tokens < -1 else 0.0  # rounding leaves up to a byte of debt

    def consume(self, size_bytes: int) -> None:
        if self._rate > 0:
            self._tokens -= size_bytes


class KeyedTokenBucket:
    """A request rate limit: each name has `burst` tokens and regains one every `refill_s`.

    One thread at a time may call it.
    """

    def __init__(self, burst: int, refill_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds and must be monotonic."""
        self._burst, self._refill_s, self._clock = burst, refill_s, clock
        self._full_at_s: dict[str, float] = {}

    def wait_s(self, name: str) -> float:
        """Seconds until `name` has a token; 0 if it has one now."""
        debt_s = self._full_at_s.get(name, 0.0) - self._clock()
        return max(0.0, debt_s - (self._burst - 1) * self._refill_s)

    def consume(self, name: str) -> None:
        """Takes one token of `name`; the caller checks `wait_s` first."""
        self._full_at_s[name] = max(self._full_at_s.get(name, 0.0), self._clock()) + self._refill_s


class CoalescingQueue(Generic[Item]):
    """A bounded FIFO queue between threads. An item with a key replaces the queued item of the same key.

    A full queue rejects and counts an item; it never drops one silently. Any thread may call it; only `get` blocks.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rejected = 0
        self._items: OrderedDict[Hashable, Item] = OrderedDict()
        self._serial = 0
        self._changed = threading.Condition(threading.Lock())
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item, key: Hashable = None) -> bool:
        """Appends `item`. Returns False if the queue is full."""
        with self._changed:
            if key is not None:
                self._items.pop(key, None)
            if len(self._items) >= self.capacity:
                self.rejected += 1
                return False
            self._serial += 1
            self._items[self._serial if key is None else key] = item
            if self._waiting:
                self._changed.notify()
            return True

    def get_nowait(self) -> Item | None:
        """Removes and returns the oldest item, or None."""
        if not self._items:
            return None
        with self._changed:
            return self._items.popitem(last=False)[1] if self._items else None

    def peek(self) -> Item | None:
        """The oldest item, which stays in the queue. Only for the one thread that removes items."""
        if not self._items:
            return None
        with self._changed:
            return next(iter(self._items.values())) if self._items else None

    def discard(self, item: Item) -> None:
        """Removes `item` if the queue still holds it. A thread calls it after it has sent a peeked item."""
        with self._changed:
            for key, present in self._items.items():
                if present is item:
                    del self._items[key]
                    return

    def remove_matching(self, predicate: Callable[[Item], bool]) -> int:
        """Removes the items for which `predicate` is true. Returns their number."""
        with self._changed:
            keys = [key for key, item in self._items.items() if predicate(item)]
            for key in keys:
                del self._items[key]
            return len(keys)

    def get(self, timeout_s: float) -> Item | None:
        """Removes and returns the oldest item. Blocks for at most `timeout_s`, then returns None."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._waiting += 1
            while not self._items:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    break
            self._waiting -= 1
            return self._items.popitem(last=False)[1] if self._items else None


@dataclass(frozen=True, eq=False)
class _QueuedEnvelope:
    envelope: Envelope
    queued_s: float


class SendQueue:
    """The send side of one channel at one end: a bounded queue, the peer's credit, and a bandwidth limit.

    A state message replaces its queued predecessor (`protocol.coalescing_key`). Any thread may call `put` and
    `remove_matching`; one thread at a time may call the other methods.
    """

    def __init__(self, limits: ChannelLimits, metrics: ChannelMetrics | None = None) -> None:
        self.metrics = metrics or ChannelMetrics()
        self.credit = SendCredit()
        self._queue: CoalescingQueue[_QueuedEnvelope] = CoalescingQueue(limits.queue_messages)
        self._bucket = TokenBucket(limits.bytes_per_s)

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, envelope: Envelope) -> bool:
        """Queues a message. If the queue is full, counts it as rejected and returns False."""
        queued = _QueuedEnvelope(envelope, time.monotonic())
        if self._queue.put(queued, coalescing_key(envelope.message)):
            return True
        self.metrics.rejected += 1
        return False

    def remove_matching(self, predicate: Callable[[Envelope], bool]) -> int:
        """Removes the queued messages for which `predicate` is true. Returns their number."""
        return self._queue.remove_matching(lambda queued: predicate(queued.envelope))

    def reset_credit(self) -> None:
        """Starts a new session without credit."""
        self.credit = SendCredit()

    def add_credit(self, grant: CreditGrant) -> None:
        self.credit.grant(grant)

    def can_send(self) -> bool:
        return self.credit.is_available() and self._bucket.wait_s() <= 0

    def bandwidth_wait_s(self) -> float:
        """Seconds until the bandwidth limit allows a message; infinite if the limit does not delay messages now."""
        return self._bucket.wait_s() or math.inf

    def send(self, frames: list[Payload], send: SendFrames) -> bool:
        """Sends a message past the queue, after `can_send` has returned True. Returns False if libzmq is full."""
        if not send(frames):
            return False
        size = credit_cost_bytes(frames)
        self.credit.consume(size)
        self._bucket.consume(size)
        self.metrics.sent += 1
        self.metrics.sent_bytes += size
        return True

    def try_send_now(self, envelope: Envelope, send: SendFrames) -> bool:
        """Sends now if the queue is empty and credit and bandwidth allow. Returns False if the caller must queue."""
        if len(self._queue) or not self.can_send():
            return False
        started_s = time.monotonic()
        if not self.send(encode_envelope(envelope), send):
            return False
        self.metrics.queue_latency.add(time.monotonic() - started_s)
        return True

    def flush(self, send: SendFrames) -> bool:
        """Sends queued messages while credit and bandwidth allow. Returns True if libzmq accepts no more."""
        while (queued := self._queue.peek()) is not None and self.can_send():
            if not self.send(encode_envelope(queued.envelope), send):
                return True
            self._queue.discard(queued)
            self.metrics.queue_latency.add(time.monotonic() - queued.queued_s)
        return False
