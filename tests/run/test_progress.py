"""Progress in a terminal or as plain lines, and what is printed about processes that end."""

from __future__ import annotations

import io
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from episode_kit import chunk_header
from rich.console import Console
from run_folder_kit import STARTED_S, episode, make_run, merge_earlier_run

from hal.process_supervisor import ProcessState, ProcessStatus
from user_sys.compose import RobotConfig
from user_sys.console.hub import ConsoleHub
from user_sys.console.progress import RobotView, RunView
from user_sys.episode import Chunk, Phase
from user_sys.messages import RobotStatus
from user_sys.run.allocation import LocalAllocation, Use
from user_sys.run.config import RunConfig, RunFolder, create_run_folder
from user_sys.run.metrics import MetricsWriter
from user_sys.run.processes import RunProcesses
from user_sys.run.progress import (
    PLAIN_INTERVAL_S,
    ProgressDisplay,
    plain_line,
    previous_elapsed_s,
    previous_episodes,
    previous_losses,
    previous_outcomes,
    render,
    run_scalars,
)
from user_sys.run.report import run_episodes
from user_sys.run.topology import ProcessSlot
from user_sys.store.labels import RETENTION_LABELLER, DeleteLabel, PhaseLabel, SuccessLabel
from user_sys.store.maintenance import add_labels, compact_store
from user_sys.store.store import StoreWriter

STARTED = RunView("demo-1")
ADDRESS = "http://127.0.0.1:8088/?token=abc"
SHOWN = ["demo-1", "training", "1:35", "3:25", "token=abc", "1,200", "55%", "40%", "53,000", "101", "26,000", "51"]


def test_restarted_console_shows_the_earlier_curves(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "earlier", [False] * 40 + [True] * 60)
    with MetricsWriter(folder.path, "learner") as metrics:
        metrics.write(7, {"critic_loss": 0.5, "step_ms": 3.0}, STARTED_S + 99.0)
    with MetricsWriter(folder.path, "run") as metrics:
        for second in range(0, 110, 10):
            metrics.write(0, {"elapsed_s": 30.0 + second}, STARTED_S + second)
    hub = ConsoleHub("earlier", lambda order: True)
    hub.progress.restore_history(100, 200, 0, elapsed_s=130.0)
    hub.progress.restore_curves(previous_outcomes(folder, run_episodes(folder)), previous_losses(folder))
    curves = {curve.name: curve for curve in hub.progress.curves()}
    assert set(curves) == {"success", "helped", "learner/critic_loss"} and curves["learner/critic_loss"].y == (0.5,)
    success = curves["success"]
    assert (success.x[0], success.y[0]) == (30.0, 0.0) and (success.x[-1], success.y[-1]) == (129.0, 1.0)
    assert hub.view().episodes == 100 and hub.view().success_50 == 1.0
    assert hub.progress.success_rate(50) is None, "the target counts episodes of this launch"
    none = RunFolder(tmp_path / "none")
    assert list(previous_losses(none)) == previous_outcomes(none, []) == []


def test_earlier_success_is_what_robots_reported_and_not_later_labels(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "earlier", [False] * 3)
    with MetricsWriter(folder.path, "run") as metrics:
        metrics.write(0, {"elapsed_s": 9.0})
    label = SuccessLabel(episode="0001", labeller="reward:classifier", at_unix_ns=1, success=True)
    add_labels(folder.store, [label])
    stored = run_episodes(folder)
    assert [each.success for each in stored[1:]] == [False, True, False]
    assert [report.success for _, report in previous_outcomes(folder, stored)] == [False, False, False]


def test_earlier_help_is_what_robots_reported_and_not_later_labels(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "earlier", [True] * 3)
    with StoreWriter.open(folder.store) as writer:
        writer.append(episode("helped", 3.0, True, assisted=True))
        writer.sync()
    label = partial(PhaseLabel, labeller="ana", at_unix_ns=1, first_step=0, steps=2)
    add_labels(folder.store, [label(episode="0001", phase=Phase.TELEOP), label(episode="helped", phase=Phase.POLICY)])
    stored = run_episodes(folder)
    assert [each.intervention_steps for each in stored[1:]] == [0, 2, 0, 0]
    assert [report.intervention_steps for _, report in previous_outcomes(folder, stored)] == [0, 0, 0, 1]
    assert previous_episodes(folder, stored) == (4, 8, 1)


def test_episode_under_way_is_not_counted_among_the_earlier_ones(tmp_path: Path) -> None:
    """Its report counts it when it has ended."""
    folder = make_run(tmp_path, "earlier", [True] * 3)
    with StoreWriter.open(folder.store) as writer:
        writer.append(Chunk(chunk_header("open", 2), {"reward": np.zeros(2, np.float32)}, {}).encode())
        writer.sync()
    assert previous_episodes(folder, run_episodes(folder)) == (3, 6, 0)


def test_episodes_that_were_merged_from_an_earlier_run_are_not_of_earlier_launches(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", [True] * 3)
    with MetricsWriter(folder.path, "run") as metrics:
        metrics.write(0, {"elapsed_s": 5.0}, STARTED_S + 1.0)
    merge_earlier_run(folder)
    stored = run_episodes(folder)
    assert previous_episodes(folder, stored) == (3, 6, 0) and len(previous_outcomes(folder, stored)) == 3


def test_earlier_episodes_that_retention_has_deleted_still_count(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", [True] * 3)
    with MetricsWriter(folder.path, "run") as metrics:
        metrics.write(6, {"episodes": 3, "env_steps": 6, "interventions": 1})
        metrics.write(6, {"elapsed_s": 9.0})
    evicted = [DeleteLabel(episode=f"{n:04d}", labeller=RETENTION_LABELLER, at_unix_ns=1) for n in range(2)]
    add_labels(folder.store, evicted)
    compact_store(folder.store)
    assert previous_episodes(folder, run_episodes(folder)) == (3, 6, 1)


def test_earlier_curves_keep_their_order_after_the_clock_was_set_back(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "earlier", [])
    with StoreWriter.open(folder.store) as writer:
        for number, second in enumerate((10, 20, 40 - 3600, 50 - 3600)):
            writer.append(episode(f"{number}", second, number > 1))
        writer.sync()
    with MetricsWriter(folder.path, "run") as metrics:
        for second in range(0, 61, 5):
            metrics.write(0, {"elapsed_s": second}, STARTED_S + second - 3600 * (second > 30))
    assert [(at_s, report.episode) for at_s, report in previous_outcomes(folder, run_episodes(folder))] == [
        (10.0, "0"), (20.0, "1"), (40.0, "2"), (50.0, "3"),
    ]  # fmt: skip


def robot(name: str, **changes: Any) -> RobotView:
    status = RobotStatus(
        robot=name, authority="policy", operator="", phase="policy", episode="e", step=4, policy_version=3,
        real_time=False, outbox_chunks=2, control_hz=10.0, safety_interventions=0,
    )  # fmt: skip
    return RobotView(name, msgspec.structs.replace(status, **changes), False, (), None, 0.0)


RUN = RunView(
    "demo-1",
    elapsed_s=95,
    training_s=95,
    budget_s=300,
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
    robots=(robot("panda-0"), robot("panda-1", authority="human", operator="alice", note="[outbox] grows")),
)


def _text(width: int, run: RunView) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(run, "training", ADDRESS))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_panel_shows_the_run() -> None:
    text = _text(100, RUN)
    missing = [part for part in [*SHOWN, "41 (1 behind)", "human (alice)", "[outbox] grows"] if part not in text]
    assert missing == []


def test_warning_is_in_panel_and_line() -> None:
    warned = msgspec.structs.replace(RUN, warning="the disk is full")
    assert "the disk is full" in _text(100, warned) and "the disk is full" in plain_line(warned, "training")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_panel_fits_its_terminal(width: int) -> None:
    assert max(map(len, _text(width, RUN).splitlines())) <= width
    assert "success" in _text(width, STARTED)


def test_without_terminal_prints_a_line_every_ten_seconds_and_at_each_stage() -> None:
    now = [100.0]
    console = Console(file=io.StringIO(), width=80)
    with ProgressDisplay(console, ADDRESS, clock=lambda: now[0]) as display:
        for _ in range(25):
            display.show(RUN, "training")
            now[0] += PLAIN_INTERVAL_S / 10
        display.show(RUN, "stopping")
        display.print_line("learner was restarted [1]")
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["training"] * 3 + ["stopping", "was"]
    assert [part for part in SHOWN if part not in lines[0]] == []


def test_on_terminal_redraws_in_place_and_keeps_printed_lines() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": "xterm"})
    with ProgressDisplay(console) as display:
        display.show(RUN, "training")
        display.print_line("learner was restarted")
        display.show(RUN, "training")
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
            display.show(RUN, "training")
            logging.getLogger("robots").warning("robot-lost")
        logging.getLogger("robots").warning("robot-back")
    finally:
        logging.getLogger().removeHandler(handler)
    assert isinstance(console.file, io.StringIO)
    assert "robot-lost" in console.file.getvalue()
    assert errors.getvalue() == "robot-back\n"


def test_missing_and_lost_robots_are_named() -> None:
    far = RobotView("far", None, False, (), None, 65.0)
    left = msgspec.structs.replace(robot("left"), lost=True, silent_s=125.0)
    line = plain_line(RunView("demo-1", robots=(far, left)), "training")
    assert "far missing (not connected yet, for 1:05)" in line and "left lost (silent for 2:05)" in line


def test_elapsed_time_of_earlier_launches_is_read_from_the_metrics(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, "run") as metrics:
        assert previous_elapsed_s(metrics.path) == 0.0
        metrics.write(500, run_scalars(RUN))
        metrics.write(500, run_scalars(STARTED))
    assert previous_elapsed_s(metrics.path) == 95.0 and "success_20" not in run_scalars(STARTED)


def test_robot_process_that_ends_again_and_again_is_printed_once_a_minute(tmp_path: Path) -> None:
    config = RunConfig(robots=(RobotConfig(name="arm", driver="fake"),), runs=tmp_path)
    folder, metadata = create_run_folder(config, "run", "tcp://127.0.0.1:5999")
    processes, lines = RunProcesses(config, folder, metadata, LocalAllocation(config, "run")), list[str]()

    def report(restarts: int, *driven: str) -> None:
        status = ProcessStatus(state=ProcessState.WAITING, restarts=restarts, last_exit=4)
        processes.report_failures({"arm-driver": status}, lines.append, driven)

    report(1)
    assert not lines, "a robot that was never driven has a line of its own"
    for restarts in (1, 2, 3, 3):
        report(restarts, "arm")
    assert lines == [
        f"arm-driver has ended 2 times, last with exit status 4, and is restarted; the robot holds meanwhile; "
        f"its log is {folder.log('arm-driver')}"
    ]
    assert not processes.failed, "the robot may be switched on again at any time"


def test_compute_that_is_lost_again_at_once_is_no_error(tmp_path: Path) -> None:
    class Flapping(LocalAllocation):
        """Its node returns, and leaves before the learner starts."""

        def reacquire(self, use: Use) -> str | None:
            return ""

        def learner_slots(self, number: int, processes: int) -> tuple[ProcessSlot, ...]:
            return ()

    config = RunConfig(robots=(RobotConfig(name="arm", driver="fake"),), runs=tmp_path)
    folder, metadata = create_run_folder(config, "run", "tcp://127.0.0.1:5999")
    processes, lines = RunProcesses(config, folder, metadata, Flapping(config, "run")), list[str]()
    processes.learners.append("learner")
    processes.poll_compute(lines.append)
    assert not lines
