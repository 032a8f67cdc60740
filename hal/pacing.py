"""The pause between attempts, and the limit of a rate."""

from __future__ import annotations

import random
import time
from collections.abc import Callable


class Backoff:
    """Exponential back-off with full jitter: each pause is uniform between zero and a bound, which then doubles.

    So the reconnects of many clients that lost one server at the same time are spread evenly
    (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/). Without `jitter` a pause is the bound.
    """

    def __init__(self, min_s: float, max_s: float, rng: random.Random | None = None, *, jitter: bool = True) -> None:
        self._min_s, self._max_s, self._jitter = min_s, max_s, jitter
        self._rng = rng or random.Random()
        self.bound_s = min_s

    def next_s(self) -> float:
        """The next pause. Doubles the bound of the one after it."""
        pause_s = self._rng.uniform(0.0, self.bound_s) if self._jitter else self.bound_s
        self.bound_s = min(2 * self.bound_s, self._max_s)
        return pause_s

    def reset(self) -> None:
        """Resets the bound after an attempt that succeeded."""
        self.bound_s = self._min_s


class TokenBucket:
    """A rate limit: `burst` tokens at first, and `per_s` more each second, up to `burst`. One thread calls it.

    A use may take more tokens than there are; later uses then wait until the debt is paid. A rate of 0 limits nothing.
    """

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds and must be monotonic."""
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._tokens, self._at_s = burst, clock()

    def wait_s(self, tokens: float = 0.0) -> float:
        """Seconds until the bucket holds `tokens`; 0 if it does now."""
        if self._per_s <= 0:
            return 0.0
        now_s = self._clock()
        self._tokens = min(self._burst, self._tokens + self._per_s * (now_s - self._at_s))
        self._at_s = now_s
        missing = tokens - self._tokens
        return missing / self._per_s if missing > 1e-6 * self._burst else 0.0  # rounding leaves a little debt

    def consume(self, tokens: float = 1.0) -> None:
        """Takes `tokens`, also if there are fewer."""
        if self._per_s > 0:
            self._tokens -= tokens
