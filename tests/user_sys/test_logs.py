"""Logging: limits, lines of supervised processes, rotation; and traces of spans."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hal.process_supervisor import LOG_COPIES, shift_copies
from user_sys import logs
from user_sys.logs import MAX_REPEATS, REPEAT_WINDOW_S, LogFile, RepeatFilter, last_log_message, log_environment
from user_sys.trace import child_environment, merge_trace, prepare_trace, span, trace_environment

WORK = """
import os
from user_sys.trace import span
with span("outer"):
    with span("inner"):
        pass
os._exit(0)
"""


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


def run_logging(program: str, **environment: str) -> str:
    program = (
        "import logging\nfrom user_sys.logs import add_log_ids, configure_logging\nconfigure_logging()\n" + program
    )
    env = os.environ | environment
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=60).stderr


def test_supervised_processes_log_json_with_ids(tmp_path: Path) -> None:
    program = (
        "add_log_ids(lambda: {'episode': 'e-1', 'order': ''})\n"
        "logging.getLogger('user_sys.edge').warning('command.late robot=%s', 'arm\\n\"quoted\"')\n"
        "try: 1 / 0\nexcept ZeroDivisionError: logging.getLogger('x').exception('session.failed')\n"
    )
    ids = {"run": "demo-1", "process": "arm-session", "robot": "arm"}
    first, second = run_logging(program, **log_environment(**ids)).splitlines()
    line = json.loads(first)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "message": 'command.late robot=arm\n"quoted"',
        "logger": "user_sys.edge",
        **ids,
        "episode": "e-1",
    }
    assert "Traceback" in json.loads(second)["exception"]
    assert run_logging(program).startswith("20") and " W user_sys.edge command.late" in run_logging(program)
    log = tmp_path / "a.log"
    log.write_text(second + "\n")
    assert last_log_message(log) == "session.failed: ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2026-11-23 09:16:42,026 I hal.lease lease.ended robot=a b c", "lease.ended robot=a b c"),
        ("ValueError: no such arm here at all", "ValueError: no such arm here at all"),
        ("[1, 2]", "[1, 2]"),
    ],
)
def test_last_message_of_any_line(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(f"older\n{line}\n")
    assert last_log_message(tmp_path / "a.log") == message
    assert last_log_message(tmp_path / "missing.log") == ""


def test_log_file_is_rotated_and_leaves_the_terminal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 2000)
    logger, level = logging.getLogger("user_sys.test"), logging.getLogger().level
    with LogFile(tmp_path / "logs" / "launcher.log", run="demo-1"):
        for number in range(200):
            logger.info(f"event.number{number} {'x' * 40}")
    logger.info("event.after")
    files = sorted((tmp_path / "logs").iterdir())
    assert len(files) == LOG_COPIES + 1 and all(file.stat().st_size <= 2000 for file in files)
    newest = json.loads((tmp_path / "logs" / "launcher.log").read_text().splitlines()[-1])
    assert newest["message"].startswith("event.number199") and newest["run"] == "demo-1"
    assert logging.getLogger().level == level


def test_oldest_copy_of_a_log_is_replaced(tmp_path: Path) -> None:
    for number in range(1, LOG_COPIES + 1):
        (tmp_path / f"a.log.{number}").write_text(str(number))
    shift_copies(tmp_path / "a.log")
    left = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert left == {f"a.log.{number}": str(number - 1) for number in range(2, LOG_COPIES + 1)}


def test_spans_of_processes_are_merged(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    prepare_trace(folder, wanted=True)
    for process in ("learner", "gateway"):
        variables = {**child_environment("unused"), **trace_environment(folder, process)}
        subprocess.run([sys.executable, "-c", WORK], env=variables, check=True)
    with next(folder.glob("gateway-*")).open("a") as torn:
        torn.write('{"name": "torn by a kill')
    count = merge_trace(folder, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == count == 8 and not folder.exists()
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["gateway", "learner"]
    for pid in names:
        inner, outer = (event for event in events if event["pid"] == pid and event["ph"] == "X")
        assert (inner["name"], outer["name"]) == ("inner", "outer") and inner["tid"] == outer["tid"] == pid
        assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_without_the_variable_nothing_is_written(tmp_path: Path) -> None:
    prepare_trace(tmp_path / "trace", wanted=False)
    assert not trace_environment(tmp_path / "trace", "learner") and span("a") is span("b")
