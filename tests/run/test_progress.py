"""Progress: a panel in a terminal, or plain lines."""

from __future__ import annotations

import io
import logging
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from user_sys.run.progress import (
    PLAIN_INTERVAL_S,
    Progress,
    ProgressDisplay,
    RobotProgress,
    format_duration,
    plain_line,
    render,
)

PROGRESS = Progress(
    run="demo-1",
    stage="training",
    console="http://127.0.0.1:8088/?token=abc",
    elapsed_s=95,
    left_s=205,
    done=95,
    total=300,
    episodes=1200,
    success_20=0.55,
    success_50=0.4,
    env_steps=53_000,
    env_steps_per_s=101.2,
    updates=26_000,
    updates_per_s=51.0,
    policy_version=41,
    staleness=1,
    interventions=2,
    robots=(RobotProgress("panda-0", "policy"), RobotProgress("panda-1", "human", "alice", note="[outbox] grows")),
)
SHOWN = ["demo-1", "training", "1:35", "3:25", "token=abc", "1,200", "55%", "40%", "53,000", "101", "26,000", "51"]


def _text(width: int, progress: Progress) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(progress))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_panel_shows_the_run() -> None:
    text = _text(100, PROGRESS)
    missing = [part for part in [*SHOWN, "41 (1 behind)", "human (alice)", "[outbox] grows"] if part not in text]
    assert missing == []


def test_episodes_with_intervention_are_counted_apart() -> None:
    line, panel = plain_line(PROGRESS), _text(100, PROGRESS)
    assert "episodes 1,200 (2 with help)" in line and "success 55% of last 20 without help, 40% of last 50" in line
    assert "success alone, last 20" in panel and "with help" in panel


def test_warning_is_in_panel_and_line() -> None:
    warned = replace(PROGRESS, warning="the disk is full")
    assert "the disk is full" in _text(100, warned) and "the disk is full" in plain_line(warned)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_panel_fits_its_terminal(width: int) -> None:
    assert max(map(len, _text(width, PROGRESS).splitlines())) <= width
    assert "success" in _text(width, Progress(run="demo-1", stage="starting"))


def test_without_terminal_prints_a_line_every_ten_seconds_and_at_each_stage() -> None:
    now = [100.0]
    console = Console(file=io.StringIO(), width=80)
    with ProgressDisplay(console, clock=lambda: now[0]) as display:
        for _ in range(25):
            display.show(PROGRESS)
            now[0] += PLAIN_INTERVAL_S / 10
        display.show(replace(PROGRESS, stage="evaluating"))
        display.print_line("learner was restarted [1]")
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["training"] * 3 + ["evaluating", "was"]
    assert [part for part in SHOWN if part not in lines[0]] == []


def test_on_terminal_redraws_in_place_and_keeps_printed_lines() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": "xterm"})
    with ProgressDisplay(console) as display:
        display.show(PROGRESS)
        display.print_line("learner was restarted")
        display.show(PROGRESS)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "learner was restarted" in text and "Ctrl-C" in text
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_log_lines_print_above_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    console = Console(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": "xterm"})
    try:
        with ProgressDisplay(console) as display:
            display.show(PROGRESS)
            logging.getLogger("robots").warning("robot-lost")
        logging.getLogger("robots").warning("robot-back")
    finally:
        logging.getLogger().removeHandler(handler)
    assert isinstance(console.file, io.StringIO)
    assert "robot-lost" in console.file.getvalue()
    assert errors.getvalue() == "robot-back\n"


def test_unknown_values_are_shown_as_unknown() -> None:
    line = plain_line(Progress(run="demo-1", stage="starting"))
    assert "success - of last 20" in line and "left" not in line


def test_duration_format() -> None:
    assert [format_duration(s) for s in (-1, 59.6, 61, 3600)] == ["0:00", "1:00", "1:01", "1:00:00"]
