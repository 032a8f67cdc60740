"""What a person sees in the terminal while a run goes on: a live display, or plain lines where there is no terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_INTERVAL_S = 10.0  # between lines, where there is no terminal
REFRESH_HZ = 4.0
_CONTROL_STYLES = {"policy": "green", "human": "bold yellow", "hold": "yellow", "stopped": "bold white on red"}


@dataclass(frozen=True)
class RobotProgress:
    """One robot: who is in control (``policy``, ``human``, ``hold``, ``stopped``), or ``lost``, or ``missing``.

    `operator` is the person's name where there is one, `note` what the robot wants people to know.
    """

    name: str
    control: str
    operator: str = ""
    episode_step: int = 0
    policy_version: int = -1
    outbox_chunks: int = 0
    note: str = ""


@dataclass(frozen=True)
class Progress:
    """A run at one moment.

    Attributes:
        stage: what goes on: ``starting``, ``demonstrations``, ``training``, ``evaluating``, ``stopping``.
        console: address of the web page; empty if there is none.
        elapsed_s: since the run began, without the time between its launches.
        success_20, success_50: share of successes among the last 20 and 50 training episodes without a person's help;
            None while there are fewer.
        interventions: training episodes with help.
        staleness: versions by which the policies that act are behind the newest one, at most over the robots.
        done, total: how far the stage is, in the unit of the stage (seconds of training, episodes); total 0: unknown.
        left_s: estimate of the time until the stage is over; None: unknown.
        warning: what a person should mend now; empty where there is nothing.
    """

    run: str
    stage: str
    console: str = ""
    elapsed_s: float = 0.0
    left_s: float | None = None
    done: float = 0.0
    total: float = 0.0
    episodes: int = 0
    success_20: float | None = None
    success_50: float | None = None
    env_steps: int = 0
    env_steps_per_s: float = 0.0
    updates: int = 0
    updates_per_s: float = 0.0
    policy_version: int = 0
    staleness: int = 0
    interventions: int = 0
    robots: tuple[RobotProgress, ...] = ()
    warning: str = ""


class ProgressDisplay:
    """Shows the newest `Progress`: redrawn in place on a terminal, else a line at each new stage and every 10 s.

    Call from one thread. As a context manager it restores the terminal however the run ends.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console()
        self._clock = clock
        self._live: Live | None = None
        self._stage, self._next_line_s = "", -1.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=REFRESH_HZ, auto_refresh=False)
            errors = sys.stderr
            self._live.start()  # puts a proxy in the place of sys.stderr, which prints above the display
            _redirect_logs(errors, sys.stderr)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            proxy = sys.stderr
            self._live.stop()
            _redirect_logs(proxy, sys.stderr)
            self._live = None

    def show(self, progress: Progress) -> None:
        """Shows `progress`; cheap enough to be called a few times a second."""
        if self._live:
            self._live.update(render(progress), refresh=True)
            return
        now_s = self._clock()
        if progress.stage != self._stage or now_s >= self._next_line_s:
            self._stage, self._next_line_s = progress.stage, now_s + PLAIN_INTERVAL_S
            self.say(plain_line(progress))

    def say(self, line: str) -> None:
        """Prints a line that stays, above the live display: an event such as a restarted node."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _redirect_logs(before: TextIO, after: TextIO) -> None:
    """Log handlers keep the stream that they began with; written to past the display, they would tear it."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.setStream(after)


def plain_line(progress: Progress) -> str:
    """`progress` in one line, for logs."""
    p = progress
    parts = [
        f"{p.run}: {p.stage} {clock_time(p.elapsed_s)}",
        p.warning,
        f"left {clock_time(p.left_s)}" if p.left_s is not None else "",
        f"episodes {p.episodes:,} ({p.interventions:,} with help)",
        f"success {percent(p.success_20)} of last 20 without help, {percent(p.success_50)} of last 50",
        f"steps {p.env_steps:,} ({p.env_steps_per_s:.0f}/s)",
        f"updates {p.updates:,} ({p.updates_per_s:.0f}/s)",
        f"policy {p.policy_version} ({p.staleness} behind)",
        *(f"{r.name} {_control(r)}{_note(r)}" for r in p.robots),
        p.console,
    ]
    return " | ".join(part for part in parts if part)


def render(progress: Progress) -> Panel:
    """`progress` as a panel for a terminal of at least 60 columns."""
    p = progress
    rows: list[Table | Text] = [Text(p.warning, style="bold white on red")] if p.warning else []
    if p.console:
        rows.append(Text.assemble("watch and take over  ", (p.console, "underline cyan")))
    if p.total > 0:
        rows.append(_bar(p))
    rows += [_figures(p), _robots(p)] if p.robots else [_figures(p)]
    left = f", {clock_time(p.left_s)} left" if p.left_s is not None else ""
    title = Text.assemble((p.run, "bold"), f"  {p.stage}  {clock_time(p.elapsed_s)}{left}")
    return Panel(Group(*rows), title=title, title_align="left", subtitle="Ctrl-C stops cleanly", subtitle_align="right")


def clock_time(seconds: float) -> str:
    """``m:ss``, from an hour on ``h:mm:ss``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _bar(p: Progress) -> Table:
    line = Table.grid(expand=True)  # the bar alone does not end its line
    line.add_row(ProgressBar(total=p.total, completed=min(p.done, p.total), complete_style="green"))
    return line


def _figures(p: Progress) -> Table:
    table = Table.grid(padding=(0, 2))
    for style in ("dim", "bold", "dim", "bold"):
        table.add_column(style=style)
    behind = f"{p.policy_version:,}" + (f" ({p.staleness} behind)" if p.staleness else "")
    table.add_row("success alone, last 20", _success(p.success_20), "last 50", _success(p.success_50))
    table.add_row("episodes", f"{p.episodes:,}", "with help", f"{p.interventions:,}")
    table.add_row("steps", f"{p.env_steps:,}", "steps/s", f"{p.env_steps_per_s:.0f}")
    table.add_row("updates", f"{p.updates:,}", "updates/s", f"{p.updates_per_s:.0f}")
    table.add_row("policy version", behind, "", "")
    return table


def _success(share: float | None) -> Text:
    style = "dim" if share is None else "green" if share >= 0.95 else "yellow" if share >= 0.5 else "red"
    return Text(percent(share), style=f"bold {style}")


def _robots(p: Progress) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("robot", "in control", "step", "policy", "outbox", ""):
        table.add_column(name)
    for robot in p.robots:
        control = Text(_control(robot), style=_CONTROL_STYLES.get(robot.control, "dim"))
        version = str(robot.policy_version) if robot.policy_version >= 0 else "-"
        cells = (str(robot.episode_step), version, str(robot.outbox_chunks), Text(robot.note, style="yellow"))
        table.add_row(robot.name, control, *cells)
    return table


def _control(robot: RobotProgress) -> str:
    return f"{robot.control} ({robot.operator})" if robot.operator else robot.control


def _note(robot: RobotProgress) -> str:
    return f" ({robot.note})" if robot.note else ""
