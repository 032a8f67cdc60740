"""How every process of a run logs: one line an event, to standard error, of which its supervisor keeps a file."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

TAIL_BYTES = 4096
FORMAT = "%(asctime)s %(levelname).1s %(name)s %(message)s"
MAX_REPEATS = 100  # lines of one message within
REPEAT_WINDOW_S = 10.0
MAX_MESSAGES = 4096


class RepeatFilter(logging.Filter):
    """Of each message (a format, whatever its arguments) `MAX_REPEATS` lines pass within `REPEAT_WINDOW_S`. The first
    line after that tells how many were left out. Any thread may log."""

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
                record.msg = f"{record.msg} ({count - MAX_REPEATS} lines like it were left out)"
            since, count = now, 0
        self._seen[key] = (since, count + 1)
        return count < MAX_REPEATS


def configure_logging(level: int = logging.INFO) -> None:
    """Sets the root logger up once; later calls change its level only."""
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(format=FORMAT)
        for handler in root.handlers:
            handler.addFilter(RepeatFilter())
    root.setLevel(level)


def last_log_message(path: Path) -> str:
    """The message of the last line of a process's log; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[-1].split(" ", 4)[-1] if lines else ""
