"""How often a peer may ask for what costs the gateway a sync of its disk."""

from __future__ import annotations

import time
from collections.abc import Callable

AT_ONCE = 10
EVERY_S = 0.5


class Turns:
    """Each name has `AT_ONCE` turns, and gets one back every `EVERY_S`. One thread at a time calls it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that only grow."""
        self._clock = clock
        self._all_back_s: dict[str, float] = {}

    def wait_s(self, name: str) -> float:
        """Seconds until `name` has a turn; 0 where it has one."""
        owed_s = self._all_back_s.get(name, 0.0) - self._clock()
        return max(0.0, owed_s - (AT_ONCE - 1) * EVERY_S)

    def take(self, name: str) -> None:
        """Uses a turn up, which there must be."""
        self._all_back_s[name] = max(self._all_back_s.get(name, 0.0), self._clock()) + EVERY_S
