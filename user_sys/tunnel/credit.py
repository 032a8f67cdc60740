"""Flow control of one direction of one channel: the receiver grants, the sender spends.

A grant says how many messages and bytes may have been sent since the session began, all in all (as QUIC's MAX_DATA,
RFC 9000 §4.1): a grant that is repeated changes nothing, and a newer one contains the older.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from user_sys.errors import WireError
from user_sys.messages import Grant
from user_sys.tunnel.limits import ChannelLimits

BURST_S = 0.25
MIN_BURST_BYTES = 64 << 10
GRANTS_PER_WINDOW = 4


class Purse:
    """The sender's side. One thread at a time."""

    def __init__(self) -> None:
        self._may_messages = self._may_bytes = 0
        self.messages = self.size_bytes = 0

    def grant(self, grant: Grant) -> None:
        self._may_messages = max(self._may_messages, grant.messages)
        self._may_bytes = max(self._may_bytes, grant.size_bytes)

    def can_pay(self) -> bool:
        """Whether one more message, of whatever size, may be sent."""
        return self.messages < self._may_messages and self.size_bytes < self._may_bytes

    def pay(self, size_bytes: int) -> None:
        self.messages += 1
        self.size_bytes += size_bytes


class Window:
    """The receiver's side: what came and what was taken in. Any thread may call it."""

    def __init__(self, limits: ChannelLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._came = [0, 0]
        self._taken = [0, 0]
        self._granted = [0, 0]

    @property
    def open_bytes(self) -> int:
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
        return self.is_due

    @property
    def is_due(self) -> bool:
        """Whether a grant should be sent: at first, and whenever a fourth of the window has become free."""
        limits = self._limits
        return (
            GRANTS_PER_WINDOW * (self._taken[0] + limits.window_messages - self._granted[0]) >= limits.window_messages
            or GRANTS_PER_WINDOW * (self._taken[1] + limits.window_bytes - self._granted[1]) >= limits.window_bytes
        )

    def due(self) -> Grant | None:
        """The grant to be sent now, or None."""
        if not self.is_due:
            return None
        with self._lock:
            messages, size = self._taken
        return Grant(messages=messages + self._limits.window_messages, size_bytes=size + self._limits.window_bytes)

    def granted(self, grant: Grant) -> None:
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

    def spend(self, size_bytes: int) -> None:
        if self._rate > 0:
            self._tokens -= size_bytes
