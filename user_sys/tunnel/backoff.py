"""Pauses between attempts, spread so that many clients of a gateway that starts again do not come at once."""

from __future__ import annotations

import random


class Backoff:
    """Exponential with full jitter: a pause is drawn evenly from zero to a bound that doubles with each failure.

    Of many clients that lost the same gateway at the same moment, each instant of a round then sees an equal share
    (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
    """

    def __init__(self, min_s: float, max_s: float, rng: random.Random | None = None) -> None:
        self._min_s, self._max_s = min_s, max_s
        self._rng = rng or random.Random()
        self.bound_s = min_s

    def next_s(self) -> float:
        """The next pause; its successor's bound is twice as large."""
        pause_s = self._rng.uniform(0.0, self.bound_s)
        self.bound_s = min(2 * self.bound_s, self._max_s)
        return pause_s

    def reset(self) -> None:
        """A connection has proved itself: the next failure is a first one."""
        self.bound_s = self._min_s
