"""Logging of every process: one line for each event, to standard error, which its supervisor writes to a file."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

TAIL_BYTES = 4096
FORMAT = "%(asctime)s %(levelname).1s %(name)s %(message)s"
MAX_REPEATS = 100  # lines of one message within `REPEAT_WINDOW_S`
REPEAT_WINDOW_S = 10.0
MAX_MESSAGES = 4096


class RepeatFilter(logging.Filter):
    """Limits each message (a format string) to `MAX_REPEATS` lines within `REPEAT_WINDOW_S`.

    The next line after the window has the number of dropped lines. Any thread may log.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = (record.name, str(record.msg)), self._clock()
        if len(self._seen) > MAX_MESSAGES:
            self._seen.clear()
        since, count = self._seen.get(key, (now, 0))
        if now - since >= REPEAT_WINDOW_S:
            if count > MAX_REPEATS:
                record.msg = f"{record.msg} ({count - MAX_REPEATS} similar lines were dropped)"
            since, count = now, 0
        self._seen[key] = (since, count + 1)
        return count < MAX_REPEATS


def configure_logging(level: int = logging.INFO) -> None:
    """Configures the root logger once; later calls change only its level."""
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(format=FORMAT)
        for handler in root.handlers:
            handler.addFilter(RepeatFilter())
    root.setLevel(level)


def last_log_message(path: Path) -> str:
    """The message in the last line of a process's log; empty if the log is empty or missing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[-1].split(" ", 4)[-1] if lines else ""
