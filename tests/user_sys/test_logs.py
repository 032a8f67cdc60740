"""Logging: repeated messages are limited."""

from __future__ import annotations

import logging

from user_sys.logs import MAX_REPEATS, REPEAT_WINDOW_S, RepeatFilter


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("user_sys.console", logging.WARNING, "", 0, message, args, None)


def test_repeated_message_is_limited_and_counted() -> None:
    now = [0.0]
    repeats = RepeatFilter(lambda: now[0])
    passed = [repeats.filter(record("console.refused client=%s", number)) for number in range(30_000)]
    assert sum(passed) == MAX_REPEATS and repeats.filter(record("estop.latched by=%s", "ana"))
    now[0] += REPEAT_WINDOW_S
    later = record("console.refused client=%s", "10.0.0.1")
    assert repeats.filter(later)
    assert later.getMessage() == f"console.refused client=10.0.0.1 ({30_000 - MAX_REPEATS} similar lines were dropped)"
    unchanged = record("console.refused client=%s", "10.0.0.2")
    assert repeats.filter(unchanged) and unchanged.getMessage() == "console.refused client=10.0.0.2"
