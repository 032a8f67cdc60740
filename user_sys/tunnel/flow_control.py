"""What goes over a channel, counted, and how long it took: bounded in memory whatever passes.

Flow control of one direction of one channel: the receiver grants, the sender spends.

A grant says how many messages and bytes may have been sent since the session began, all in all (as QUIC's MAX_DATA,
RFC 9000 §4.1): a grant that is repeated changes nothing, and a newer one contains the older.

How often a peer may ask for something: a rate with a burst.

A bounded queue between threads in which state is coalesced and events are not.

One channel's way out at one end: a bounded queue, the peer's credit, and a bandwidth limit.

Newest wins where messages are states (`wire.coalescing_key`).
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
BUCKETS = 56  # from a microsecond to three minutes in steps of 41%; the last one takes all that is longer


class LatencyHistogram:
    """Durations in buckets of logarithmic width. One thread adds; any may read, and sees a recent state."""

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
        """The least bucket bound that `share` of all durations do not exceed; 0 where there are none."""
        left = fraction * self.count
        for at, count in enumerate(self.counts):
            left -= count
            if left <= 0 and count:
                return min(FIRST_BUCKET_S * 2 ** (at / BUCKETS_PER_OCTAVE), self.max_s)
        return 0.0


@dataclass
class ChannelMetrics:
    """One channel at one end. `queue_latency`: from the order to send until libzmq has it; `ack_latency`: from then to
    the answer.
    """

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    rejected: int = 0
    queue_latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    ack_latency: LatencyHistogram = field(default_factory=LatencyHistogram)

    def scalars(self, channel: str) -> dict[str, float]:
        """For metrics: ``<channel>/sent`` and so on; durations in milliseconds, where there were any."""
        found: dict[str, float] = {
            f"{channel}/sent": self.sent,
            f"{channel}/sent_bytes": self.sent_bytes,
            f"{channel}/received": self.received,
            f"{channel}/received_bytes": self.received_bytes,
            f"{channel}/refused": self.rejected,
        }
        for name, histogram in (("wait", self.queue_latency), ("settle", self.ack_latency)):
            if histogram.count:
                found[f"{channel}/{name}_p50_ms"] = 1e3 * histogram.quantile_s(0.5)
                found[f"{channel}/{name}_p99_ms"] = 1e3 * histogram.quantile_s(0.99)
        return found


BURST_S = 0.25
MIN_BURST_BYTES = 64 << 10
GRANTS_PER_WINDOW = 4


class SendCredit:
    """The sender's side. One thread at a time."""

    def __init__(self) -> None:
        self._may_messages = self._may_bytes = 0
        self.sent_messages = self.sent_bytes = 0

    def grant(self, grant: CreditGrant) -> None:
        self._may_messages = max(self._may_messages, grant.messages)
        self._may_bytes = max(self._may_bytes, grant.size_bytes)

    def is_available(self) -> bool:
        """Whether one more message, of whatever size, may be sent."""
        return self.sent_messages < self._may_messages and self.sent_bytes < self._may_bytes

    def consume(self, size_bytes: int) -> None:
        self.sent_messages += 1
        self.sent_bytes += size_bytes


class ReceiveWindow:
    """The receiver's side: what came and what was taken in. Any thread may call it."""

    def __init__(self, limits: ChannelLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._came = [0, 0]
        self._taken = [0, 0]
        self._granted = [0, 0]

    @property
    def unreleased_bytes(self) -> int:
        """What has come and is not taken in."""
        return self._came[1] - self._taken[1]

    def charge(self, size_bytes: int) -> None:
        """A message has come. Raises WireError when its sender had no credit for it."""
        with self._lock:
            if self._came[0] >= self._granted[0] or self._came[1] >= self._granted[1]:
                raise WireError(f"sent more than its window of {self._limits.window_messages} messages allows")
            self._came[0] += 1
            self._came[1] += size_bytes

    def release(self, messages: int, size_bytes: int) -> bool:
        """So much was taken in. Returns whether a grant is due."""
        with self._lock:
            self._taken[0] += messages
            self._taken[1] += size_bytes
        return self.is_grant_due

    @property
    def is_grant_due(self) -> bool:
        """Whether a grant should be sent: at first, and whenever a fourth of the window has become free."""
        limits = self._limits
        return (
            GRANTS_PER_WINDOW * (self._taken[0] + limits.window_messages - self._granted[0]) >= limits.window_messages
            or GRANTS_PER_WINDOW * (self._taken[1] + limits.window_bytes - self._granted[1]) >= limits.window_bytes
        )

    def next_grant(self) -> CreditGrant | None:
        """The grant to be sent now, or None."""
        if not self.is_grant_due:
            return None
        with self._lock:
            messages, size = self._taken
        return CreditGrant(
            messages=messages + self._limits.window_messages, size_bytes=size + self._limits.window_bytes
        )

    def mark_granted(self, grant: CreditGrant) -> None:
        """The grant is on its way."""
        with self._lock:
            self._granted = [grant.messages, grant.size_bytes]


class TokenBucket:
    """A bandwidth limit that lets a message of any size pass and makes the next ones wait for it."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = bytes_per_s, clock
        self._burst = max(BURST_S * bytes_per_s, MIN_BURST_BYTES)
        self._tokens, self._at = self._burst, clock()

    def wait_s(self) -> float:
        """Seconds until the next message may go; 0 is now."""
        if self._rate <= 0:
            return 0.0
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + self._rate * (now - self._at))
        self._at = now
        return -self._tokens / self._rate if self._tokens < -1 else 0.0  # a byte is no debt

    def consume(self, size_bytes: int) -> None:
        if self._rate > 0:
            self._tokens -= size_bytes


class KeyedTokenBucket:
    """Each name has `at_once` turns, and gets one back every `every_s`. One thread at a time calls it."""

    def __init__(self, burst: int, refill_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that only grow."""
        self._at_once, self._every_s, self._clock = burst, refill_s, clock
        self._all_back_s: dict[str, float] = {}

    def wait_s(self, name: str) -> float:
        """Seconds until `name` has a turn; 0 where it has one."""
        owed_s = self._all_back_s.get(name, 0.0) - self._clock()
        return max(0.0, owed_s - (self._at_once - 1) * self._every_s)

    def consume(self, name: str) -> None:
        """Uses a turn up, which there must be."""
        self._all_back_s[name] = max(self._all_back_s.get(name, 0.0), self._clock()) + self._every_s


Item = TypeVar("Item")


class CoalescingQueue(Generic[Item]):
    """First in, first out, except that an item with a key replaces a waiting one with the same key: newest wins.

    Never holds more than `capacity` items; an item that finds it full is refused and counted, never lost silently.
    Any thread may call it; only `get` blocks.
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
        """Adds `item` at the end; False when the mailbox is full."""
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
        """The oldest item, left where it is. Only for a thread that alone takes."""
        if not self._items:
            return None
        with self._changed:
            return next(iter(self._items.values())) if self._items else None

    def discard(self, item: Item) -> None:
        """Removes `item` if it is still there: what a thread calls when the item that it peeked at is away."""
        with self._changed:
            for key, present in self._items.items():
                if present is item:
                    del self._items[key]
                    return

    def remove_matching(self, predicate: Callable[[Item], bool]) -> int:
        """Removes the items that are unwanted and says how many they were."""
        with self._changed:
            keys = [key for key, item in self._items.items() if predicate(item)]
            for key in keys:
                del self._items[key]
            return len(keys)

    def get(self, timeout_s: float) -> Item | None:
        """Removes and returns the oldest item, waiting for one at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._waiting += 1
            while not self._items:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    break
            self._waiting -= 1
            return self._items.popitem(last=False)[1] if self._items else None


SendFrames = Callable[[list[Payload]], bool]
"""Hands the frames of a message to libzmq without waiting; False when it can take no more."""


@dataclass(frozen=True, eq=False)
class _QueuedEnvelope:
    envelope: Envelope
    at_s: float


class SendQueue:
    """`put` and `remove_matching` may be called from any thread, everything else from one at a time."""

    def __init__(self, limits: ChannelLimits, metrics: ChannelMetrics | None = None) -> None:
        self.metrics = metrics or ChannelMetrics()
        self.credit = SendCredit()
        self._queue: CoalescingQueue[_QueuedEnvelope] = CoalescingQueue(limits.queue_messages)
        self._bucket = TokenBucket(limits.bytes_per_s)

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, envelope: Envelope) -> bool:
        """Queues a message; False, and counted, when the queue is full."""
        queued = _QueuedEnvelope(envelope, time.monotonic())
        if self._queue.put(queued, coalescing_key(envelope.message)):
            return True
        self.metrics.rejected += 1
        return False

    def remove_matching(self, predicate: Callable[[Envelope], bool]) -> int:
        """Removes queued messages and says how many they were."""
        return self._queue.remove_matching(lambda queued: predicate(queued.envelope))

    def reset_credit(self) -> None:
        """A new session: no credit yet."""
        self.credit = SendCredit()

    def add_credit(self, grant: CreditGrant) -> None:
        self.credit.grant(grant)

    def can_send(self) -> bool:
        return self.credit.is_available() and self._bucket.wait_s() <= 0

    def bandwidth_wait_s(self) -> float:
        """When the bandwidth limit lets the next message pass; infinite where it is not what holds back."""
        return self._bucket.wait_s() or math.inf

    def send(self, frames: list[Payload], send: SendFrames) -> bool:
        """Sends a message past the queue, for which `can_send` has said yes; False when libzmq is full."""
        if not send(frames):
            return False
        size = credit_cost_bytes(frames)
        self.credit.consume(size)
        self._bucket.consume(size)
        self.metrics.sent += 1
        self.metrics.sent_bytes += size
        return True

    def try_send_now(self, envelope: Envelope, send: SendFrames) -> bool:
        """Sends at once if nothing is queued before it and credit and bandwidth allow; False leaves it to the queue."""
        if len(self._queue) or not self.can_send():
            return False
        asked_s = time.monotonic()
        if not self.send(encode_envelope(envelope), send):
            return False
        self.metrics.queue_latency.add(time.monotonic() - asked_s)
        return True

    def flush(self, send: SendFrames) -> bool:
        """Sends what waits as far as credit and bandwidth reach; True when libzmq can take no more."""
        while (queued := self._queue.peek()) is not None and self.can_send():
            if not self.send(encode_envelope(queued.envelope), send):
                return True
            self._queue.discard(queued)
            self.metrics.queue_latency.add(time.monotonic() - queued.at_s)
        return False
