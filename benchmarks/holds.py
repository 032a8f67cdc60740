"""When a robot's watchdog held it: within an episode, or between two of them, when nothing commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

HOLD, LATE = "watchdog.hold", "command.late"
CAUSE_S = 2.0  # the cause of a hold is logged with the next command; this long after the hold at most


@dataclass(frozen=True)
class Holds:
    """How many there were.

    Attributes:
        within: from an episode's first observation to its last command: a command came late, and cut the episode off.
        between: after an episode's last command, until the next one's first observation.
        causes: of those within, as the session's log states them; empty if it states none.
    """

    within: int
    between: int
    causes: tuple[str, ...] = ()


def count_holds(
    driver_log: Path,
    episodes: Sequence[tuple[float, float]],
    counts: Callable[[float], bool] = lambda at: True,
    session_log: Path | None = None,
) -> Holds:
    """Counts them from the first to the last of `episodes`: unix times of their first observation and last command.

    Args:
        counts: whether a hold at that unix time is one to count.
        session_log: has the causes.
    """
    begin, end = min(first for first, _ in episodes), max(last for _, last in episodes)
    held = [at for at, _ in _lines(driver_log, HOLD) if begin < at < end and counts(at)]
    within = [at for at in held if any(first < at < last for first, last in episodes)]
    late = _lines(session_log, LATE) if session_log else []
    causes = (next((line for told, line in late if 0 <= told - at < CAUSE_S), "") for at in within)
    return Holds(len(within), len(held) - len(within), tuple(causes))


def _lines(log: Path, event: str) -> list[tuple[float, str]]:
    """Unix times of the log's lines with this event, and their text after the robot's name."""
    return [_read(line) for line in log.read_text().splitlines() if event in line]


def _read(line: str) -> tuple[float, str]:
    """A line of a run's log is JSON, one of a process that the benchmark started is text, see `user_sys.logs`."""
    if line.startswith("{"):
        found = json.loads(line)
        at, message = datetime.fromisoformat(found["time"]), found["message"]
    else:
        at, message = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f"), line
    return at.timestamp(), message.partition(": ")[2]
