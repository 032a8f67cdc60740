"""Processes and their logs: one line for each event, to standard error, which a supervisor writes to a file.

In a terminal the lines are text. A process with `LOG_VARIABLE` in its environment writes JSON, with the ids of its run,
process and robot, `order_id`, and those of `add_log_ids`. Files are rotated: `LOG_COPIES` older ones of `MAX_LOG_BYTES`
each.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from logging.handlers import RotatingFileHandler
from pathlib import Path

from hal.errors import HalError
from hal.process_supervisor import LOG_COPIES, MAX_LOG_BYTES
from hal.signals import stop_on_signals
from user_sys.errors import UserSysError

TAIL_BYTES = 65536
FORMAT = "%(asctime)s %(levelname).1s %(name)s %(message)s"
LOG_VARIABLE = "USER_SYS_LOG"
"""The ids of a process, an object in JSON."""
_TEXT_LINE = re.compile(r"[0-9-]{10} [0-9:,]+ [A-Z] \S+ ")
MAX_REPEATS = 100  # lines of one message within `REPEAT_WINDOW_S`
REPEAT_WINDOW_S = 60.0
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


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time (UTC), level, message, logger, ids, and the traceback if any."""

    def __init__(self, ids: Mapping[str, str]) -> None:
        super().__init__()
        self._ids = dict(ids)

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "logger": record.name,
            **self._ids,
        }
        for ids in _sources:
            line |= {name: value for name, value in ids().items() if value}
        if order := order_id.get():
            line["order"] = order
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


order_id: ContextVar[str] = ContextVar("order_id", default="")
"""The operator's command that this thread executes, as OPERATOR/NUMBER."""
_sources: list[Callable[[], Mapping[str, str]]] = []


def add_log_ids(ids: Callable[[], Mapping[str, str]]) -> None:
    """Adds ids, such as the present episode's, to every later line in JSON. `ids` is called from any thread."""
    _sources.append(ids)


def log_environment(**ids: str) -> dict[str, str]:
    """The environment with which a process writes its log in JSON, with these ids."""
    return {LOG_VARIABLE: json.dumps({name: value for name, value in ids.items() if value})}


def configure_logging(level: int = logging.INFO) -> None:
    """Configures the root logger once; later calls change only its level."""
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(format=FORMAT)
        for handler in root.handlers:
            handler.addFilter(RepeatFilter())
            if LOG_VARIABLE in os.environ:
                handler.setFormatter(JsonFormatter(_ids_from_environment()))
    root.setLevel(level)


def run_process(name: str, serve: Callable[[threading.Event], object]) -> int:
    """Runs a process: `serve` returns after SIGTERM or Ctrl-C has set its event.

    Returns:
        0; or 2, after a line in the log, for an error of ours or of the system.
    """
    configure_logging()
    stop = threading.Event()
    stop_on_signals(stop)
    try:
        serve(stop)
    except (UserSysError, HalError, OSError) as error:
        logging.getLogger(__name__).error("%s.failed %s: %s", name, type(error).__name__, error)
        return 2
    return 0


def _ids_from_environment() -> dict[str, str]:
    try:
        return {str(name): str(value) for name, value in json.loads(os.environ[LOG_VARIABLE]).items()}
    except (ValueError, AttributeError):
        return {}  # a person has set it; the lines have no ids


class LogFile:
    """Writes this process's log also to a file, in JSON from INFO on. A context manager.

    The terminal shows what it did before. A file that cannot be opened is logged.
    """

    def __init__(self, path: Path, **ids: str) -> None:
        self._root = logging.getLogger()
        self._handler: logging.Handler | None = None
        self._level = self._root.level
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handler = RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=LOG_COPIES, encoding="utf-8")
        except OSError as error:
            logging.getLogger(__name__).warning("logs.file_failed path=%s: %s", path, error)
            return
        handler.setFormatter(JsonFormatter(ids))
        handler.addFilter(RepeatFilter())
        for each in self._root.handlers:
            each.setLevel(max(each.level, self._level))
        self._root.addHandler(handler)
        self._root.setLevel(min(self._level or logging.INFO, logging.INFO))
        self._handler = handler

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            self._root.removeHandler(self._handler)
            self._handler.close()
            self._root.setLevel(self._level)


def last_log_message(path: Path) -> str:
    """The message in the last line of a process's log; empty if the log is empty or missing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    if not lines:
        return ""
    try:
        line = json.loads(lines[-1])
        cause = f": {line['exception'].splitlines()[-1]}" if "exception" in line else ""
        return f"{line['message']}{cause}"
    except (ValueError, TypeError, KeyError):
        return _TEXT_LINE.sub("", lines[-1], count=1)
