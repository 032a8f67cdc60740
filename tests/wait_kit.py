"""Waiting for a condition, with a deadline, and clocks that a test sets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

END_S = 600.0  # longer than any wait on a busy machine


def until(condition: Callable[[], Any], what: str = "the condition", within_s: float = END_S) -> Any:
    """Polls until `condition` gives something, less often the longer it takes; fails with `what` after a deadline."""
    began_s = time.monotonic()
    while not (result := condition()):
        waited_s = time.monotonic() - began_s
        assert waited_s < within_s, f"not within {within_s} s: {what}"
        time.sleep(min(max(waited_s / 20, 0.005), 0.02))
    return result


class Clock:
    """Seconds that a test sets."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class ClockNs:
    """The same as nanoseconds."""

    now_s = 1000.0

    def __call__(self) -> int:
        return round(self.now_s * 1e9)
