"""How often a peer may ask for something: a rate with a burst."""

from __future__ import annotations

import time
from collections.abc import Callable


class Turns:
    """Each name has `at_once` turns, and gets one back every `every_s`. One thread at a time calls it."""

    def __init__(self, at_once: int, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that only grow."""
        self._at_once, self._every_s, self._clock = at_once, every_s, clock
        self._all_back_s: dict[str, float] = {}

    def wait_s(self, name: str) -> float:
        """Seconds until `name` has a turn; 0 where it has one."""
        owed_s = self._all_back_s.get(name, 0.0) - self._clock()
        return max(0.0, owed_s - (self._at_once - 1) * self._every_s)

    def take(self, name: str) -> None:
        """Uses a turn up, which there must be."""
        self._all_back_s[name] = max(self._all_back_s.get(name, 0.0), self._clock()) + self._every_s
