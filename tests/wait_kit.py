"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

END_S = 600.0  # longer than any wait on a busy machine


def until(condition: Callable[[], Any], what: str, within_s: float = END_S) -> Any:
    """Polls until `condition` gives something; fails with `what` after a deadline."""
    deadline = time.monotonic() + within_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.005)
    return result
