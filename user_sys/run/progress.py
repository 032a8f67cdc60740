"""The progress of a run in the terminal, as a live panel or plain lines. `user_sys.console.progress` counts."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from hal.registry import OVERRIDDEN
from user_sys.console.progress import RobotView, RunView
from user_sys.episode import EpisodeSource
from user_sys.messages import EpisodeReport, MetricsReport
from user_sys.robot_records import LEARNER
from user_sys.run.config import RunFolder
from user_sys.run.metrics import METRICS, RUN, read_metrics
from user_sys.run.report import by_run_time, wilson_interval
from user_sys.store.index import EpisodeSummary

PLAIN_INTERVAL_S = 10.0  # between lines without a terminal
REFRESH_HZ = 4.0
_CONTROL_STYLES = {
    "policy": "green",
    "human": "bold yellow",
    "hold": "yellow",
    "requesting": "bold yellow",
    "stopped": "bold white on red",
}


class ProgressDisplay:
    """Shows the newest `RunView`: redrawn in place on a terminal, else a line at each new stage and every 10 s.

    One thread calls it. Leaving the context restores the terminal.

    Attributes:
        address: of the web page; empty while there is none.
    """

    def __init__(
        self, console: Console | None = None, address: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`address`: of the web page, or empty. `clock`: monotonic seconds."""
        self._console, self.address, self._clock = console or Console(), address, clock
        self._live: Live | None = None
        self._stage, self._next_line_s = "", -1.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=REFRESH_HZ, auto_refresh=False)
            errors = sys.stderr
            self._live.start()  # replaces sys.stderr by a proxy that prints above the display
            _redirect_logs(errors, sys.stderr)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            proxy = sys.stderr
            self._live.stop()
            _redirect_logs(proxy, sys.stderr)
            self._live = None

    def show_address(self, address: str) -> None:
        """The web page can be opened at `address` from now on."""
        self.address, self._next_line_s = address, -1.0

    def show(self, run: RunView, stage: str) -> None:
        """Shows `run` in its `stage`, such as ``training``; may be called a few times a second."""
        if self._live:
            self._live.update(render(run, stage, self.address), refresh=True)
            return
        now_s = self._clock()
        if stage != self._stage or now_s >= self._next_line_s:
            self._stage, self._next_line_s = stage, now_s + PLAIN_INTERVAL_S
            self.print_line(plain_line(run, stage, self.address))

    def print_line(self, line: str) -> None:
        """Prints a lasting line above the live display, such as a restarted process."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _redirect_logs(before: TextIO, after: TextIO) -> None:
    """Moves log handlers to another stream; on the old one their lines would tear the display."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.setStream(after)


def plain_line(run: RunView, stage: str, address: str = "") -> str:
    """`run` in one line."""
    left_s = _left_s(run)
    parts = [
        f"{run.run}: {stage} {format_duration(run.elapsed_s)}",
        run.warning,
        f"left {format_duration(left_s)}" if left_s is not None else "",
        f"episodes {run.episodes:,} ({run.interventions:,} with help)",
        f"success {_share(run.success_20)} of last 20 without help, {_share(run.success_50)} of last 50",
        ", ".join(f"{task} {_share(share)}" for task, share in run.tasks.items()),
        f"steps {run.env_steps:,} ({run.env_steps_per_s:.0f}/s)",
        f"updates {run.updates:,} ({run.updates_per_s:.0f}/s)",
        f"policy {run.policy_version} ({run.staleness} behind)",
        *(f"{robot.name} {_control(robot)}{f' ({note})' if (note := _note(robot)) else ''}" for robot in run.robots),
        address,
    ]
    return " | ".join(part for part in parts if part)


def render(run: RunView, stage: str, address: str = "") -> Panel:
    """`run` as a panel for a terminal of at least 60 columns."""
    rows: list[Table | Text] = [Text(run.warning, style="bold white on red")] if run.warning else []
    if address:
        rows.append(Text.assemble("watch and take over  ", (address, "underline cyan")))
    if run.budget_s > 0:
        bar = Table.grid(expand=True)  # the bar itself does not end its line
        done = min(run.training_s, run.budget_s)
        bar.add_row(ProgressBar(total=run.budget_s, completed=done, complete_style="green"))
        rows.append(bar)
    rows += [_figures(run), robots_table(run, is_wide=False)] if run.robots else [_figures(run)]
    left = f", {format_duration(left_s)} left" if (left_s := _left_s(run)) is not None else ""
    title = Text.assemble((run.run, "bold"), f"  {stage}  {format_duration(run.elapsed_s)}{left}")
    return Panel(Group(*rows), title=title, title_align="left", subtitle="Ctrl-C stops cleanly", subtitle_align="right")


def format_duration(seconds: float) -> str:
    """``m:ss``, from an hour on ``h:mm:ss``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _left_s(run: RunView) -> float | None:
    """Training time until the end; None before the first update."""
    return max(0.0, run.budget_s - run.training_s) if run.updates else None


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _figures(run: RunView) -> Table:
    table = Table.grid(padding=(0, 2))
    for style in ("dim", "bold", "dim", "bold"):
        table.add_column(style=style)
    behind = f"{run.policy_version:,}" + (f" ({run.staleness} behind)" if run.staleness else "")
    table.add_row("success alone, last 20", _success(run.success_20), "last 50", _success(run.success_50, 50))
    for task, share in run.tasks.items():
        table.add_row(f"success alone, {task}", _success(share), "", "")
    table.add_row("episodes", f"{run.episodes:,}", "with help", f"{run.interventions:,}")
    table.add_row("steps", f"{run.env_steps:,}", "steps/s", f"{run.env_steps_per_s:.0f}")
    table.add_row("updates", f"{run.updates:,}", "updates/s", f"{run.updates_per_s:.0f}")
    table.add_row("policy version", behind, "", "")
    return table


def _success(share: float | None, episodes: int = 0) -> Text:
    """A share; of so many `episodes`, with its 95% interval."""
    style = "dim" if share is None else "green" if share >= 0.95 else "yellow" if share >= 0.5 else "red"
    text = Text(_share(share), style=f"bold {style}")
    if share is not None and episodes:
        low, high = wilson_interval(round(share * episodes), episodes)
        text.append(f" ({100 * low:.0f}-{high:.0%})", style="not bold dim")
    return text


def robots_table(run: RunView, is_wide: bool = True) -> Table:
    """Its robots, one a row; `is_wide` adds the steps that were limited, and the episode."""
    figures = ("phase", "Hz", "version", "outbox", *(("limited", "episode") if is_wide else ()))
    columns = (Column(name, no_wrap=is_wide) for name in ("robot", "control", *figures, ""))
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for robot in run.robots:
        status, shown, style = robot.status, [""] * len(figures), "dim"
        if status is not None and not robot.lost:
            version = str(status.policy_version) if status.policy_version >= 0 else "-"
            waiting, limited = str(status.outbox_chunks), str(status.safety_interventions)
            every = [status.phase, f"{status.control_hz:.1f}", version, waiting, limited, status.episode]
            shown = every[: len(figures)]
            style = _CONTROL_STYLES.get(status.authority, "dim")
        table.add_row(robot.name, Text(_control(robot), style=style), *shown, Text(_note(robot), style="yellow"))
    return table


def _control(robot: RobotView) -> str:
    """Who controls the robot, with the operator's name; or ``missing`` before its first report, or ``lost``.

    The health of one that is out of use: its session waits for its lease and sends no report.
    """
    if robot.lost:
        return robot.health.value if robot.health in OVERRIDDEN else "lost"
    if robot.status is None:
        return "missing"
    operator = robot.status.operator
    return f"{robot.status.authority} ({operator})" if operator else robot.status.authority


def _note(robot: RobotView) -> str:
    if robot.lost:
        return robot.health_note if robot.health in OVERRIDDEN else f"silent for {format_duration(robot.silent_s)}"
    if robot.status is None:
        return f"not connected yet, for {format_duration(robot.silent_s)}"
    return robot.status.note


def previous_elapsed_s(metrics: Path) -> float:
    """How long earlier launches of the run took, from the run's metrics file; 0 if there are none."""
    elapsed = (line.get("elapsed_s") for line in read_metrics(metrics))
    return max((each for each in elapsed if each is not None), default=0.0)


def previous_episodes(folder: RunFolder, stored: Sequence[EpisodeSummary]) -> tuple[int, int, int]:
    """Complete online episodes of earlier launches, their steps, and how many of them had interventions as recorded.

    Those that the store has lost to retention count by the run's reports. `stored`: of `run_episodes`.
    """
    online = [e for e in stored if e.source == EpisodeSource.ONLINE and e.complete]
    counts = {
        "episodes": len(online),
        "env_steps": sum(e.steps for e in online),
        "interventions": sum(e.recorded_intervention_steps > 0 for e in online),
    }
    for report in read_metrics(folder.path / METRICS / f"{RUN}.jsonl"):
        counts = {name: max(count, int(report.get(name) or 0)) for name, count in counts.items()}
    return counts["episodes"], counts["env_steps"], counts["interventions"]


def previous_outcomes(folder: RunFolder, stored: Sequence[EpisodeSummary]) -> list[tuple[float, EpisodeReport]]:
    """The finished online and evaluation episodes as reported, without later labels; each with its second of the run.

    `stored`: of `run_episodes`.
    """
    finished = [each for each in stored if each.complete and each.source != EpisodeSource.DEMO]
    return [(at_s, _report(episode)) for at_s, episode in by_run_time(folder, finished)]


def _report(episode: EpisodeSummary) -> EpisodeReport:
    return EpisodeReport(
        robot=episode.robot,
        episode=episode.episode,
        source=episode.source.value,
        steps=episode.steps,
        success=episode.recorded_success,
        intervention_steps=episode.recorded_intervention_steps,
        episode_return=episode.episode_return,
        policy_version=episode.policy_versions[1],
        task=episode.task,
    )


def previous_losses(folder: RunFolder) -> Iterator[MetricsReport]:
    """The losses in the metrics files of the run's learners."""
    for path in sorted((folder.path / METRICS).glob(f"{LEARNER}*.jsonl")):
        for line in read_metrics(path):
            losses = {name: value for name, value in line.items() if "loss" in name and value is not None}
            if losses and (count := line.get("count")) is not None:
                yield MetricsReport(node=path.stem, count=int(count), scalars=losses)


def run_scalars(run: RunView) -> dict[str, float]:
    """The run's own metrics."""
    scalars = {
        "elapsed_s": run.elapsed_s,
        "episodes": run.episodes,
        "env_steps": run.env_steps,
        "env_steps_per_s": run.env_steps_per_s,
        "interventions": run.interventions,
        "staleness": run.staleness,
        "success_20": run.success_20,
        "success_50": run.success_50,
        **{f"success/{task}": share for task, share in run.tasks.items()},
    }
    return {name: value for name, value in scalars.items() if value is not None}
