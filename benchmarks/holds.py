"""Where a robot's watchdog held it: in the midst of an episode, or between two of them, where nobody commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

EVENT = "watchdog.hold"


@dataclass(frozen=True)
class Holds:
    """How many there were.

    Attributes:
        within: from an episode's first observation to its last command: a command came late, and cut the episode off.
        between: after an episode's last command, until the next one's first observation.
    """

    within: int
    between: int


def count_holds(
    driver_log: Path, episodes: Sequence[tuple[float, float]], counts: Callable[[float], bool] = lambda at: True
) -> Holds:
    """Counts them from the first to the last of `episodes`: unix times of their first observation and last command.

    Args:
        counts: whether a hold at that unix time is one to count.
    """
    begin, end = min(first for first, _ in episodes), max(last for _, last in episodes)
    held = [at for at in _stamps(driver_log) if begin < at < end and counts(at)]
    within = sum(any(first < at < last for first, last in episodes) for at in held)
    return Holds(within, len(held) - within)


def _stamps(log: Path) -> list[float]:
    """Unix times of the log's lines that tell of a hold."""
    lines = [line for line in log.read_text().splitlines() if EVENT in line]
    return [datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp() for line in lines]
