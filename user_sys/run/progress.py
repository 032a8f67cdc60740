"""The progress of a run: folds its messages into counts and shows these in the terminal, live or as plain lines."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hal.resource import Health, Kind, ResourceRecord
from user_sys.errors import disk_full_message
from user_sys.messages import NO_VERSION, EpisodeReport, MetricsReport, RobotStatus
from user_sys.robot_records import LEARNER, learner_folder
from user_sys.run.config import RunFolder
from user_sys.run.metrics import read_metrics
from user_sys.run.report import EpisodePoint
from user_sys.store.store import StoreReader

PLAIN_INTERVAL_S = 10.0  # between lines without a terminal
REFRESH_HZ = 4.0
_CONTROL_STYLES = {"policy": "green", "human": "bold yellow", "hold": "yellow", "stopped": "bold white on red"}


@dataclass(frozen=True)
class RobotProgress:
    """The state of one robot.

    Attributes:
        control: ``policy``, ``human``, ``hold``, ``stopped``, ``lost`` or ``missing``.
        operator: name of the person in control, or empty.
        note: a remark for people, such as the reason why it holds.
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
    """A snapshot of a run.

    Attributes:
        stage: ``starting``, ``demonstrations``, ``training``, ``evaluating``, ``stopping``.
        console: address of the web page, or empty.
        elapsed_s: duration of all launches of the run.
        success_20, success_50: share of successes among the last 20 and 50 autonomous training episodes; None while
            there are fewer.
        interventions: training episodes with an intervention.
        staleness: the largest number of versions by which a robot is behind the newest one.
        done, total: progress of the stage, in its unit (seconds of training, episodes); total 0: unknown.
        left_s: estimated time until the end of the stage; None: unknown.
        warning: what a person should mend now, or empty.
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

    One thread calls it. Leaving the context restores the terminal.
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
            self._live.start()  # replaces sys.stderr by a proxy that prints above the display
            _redirect_logs(errors, sys.stderr)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            proxy = sys.stderr
            self._live.stop()
            _redirect_logs(proxy, sys.stderr)
            self._live = None

    def show(self, progress: Progress) -> None:
        """Shows `progress`; may be called a few times a second."""
        if self._live:
            self._live.update(render(progress), refresh=True)
            return
        now_s = self._clock()
        if progress.stage != self._stage or now_s >= self._next_line_s:
            self._stage, self._next_line_s = progress.stage, now_s + PLAIN_INTERVAL_S
            self.print_line(plain_line(progress))

    def print_line(self, line: str) -> None:
        """Prints a lasting line above the live display, such as a restarted process."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _redirect_logs(before: TextIO, after: TextIO) -> None:
    """Moves log handlers to another stream; on the old one their lines would tear the display."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.setStream(after)


def plain_line(progress: Progress) -> str:
    """`progress` in one line."""
    p = progress
    parts = [
        f"{p.run}: {p.stage} {format_duration(p.elapsed_s)}",
        p.warning,
        f"left {format_duration(p.left_s)}" if p.left_s is not None else "",
        f"episodes {p.episodes:,} ({p.interventions:,} with help)",
        f"success {format_share(p.success_20)} of last 20 without help, {format_share(p.success_50)} of last 50",
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
    left = f", {format_duration(p.left_s)} left" if p.left_s is not None else ""
    title = Text.assemble((p.run, "bold"), f"  {p.stage}  {format_duration(p.elapsed_s)}{left}")
    return Panel(Group(*rows), title=title, title_align="left", subtitle="Ctrl-C stops cleanly", subtitle_align="right")


def format_duration(seconds: float) -> str:
    """``m:ss``, from an hour on ``h:mm:ss``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _bar(p: Progress) -> Table:
    line = Table.grid(expand=True)  # the bar itself does not end its line
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
    return Text(format_share(share), style=f"bold {style}")


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


ROBOT_TIMEOUT_S = 5.0
RATE_WINDOW_S = 10.0
MAX_BETWEEN_REPORTS_S = 1.0
STORE_FULL_HINT = "robots keep their steps in their outboxes, and hold when these are full"
LEARNER_DISK_FULL_HINT = "training pauses until a checkpoint can be written"
PINNED_VERSION_WARNING = (
    "training waits: an older version of the weights is pinned, and robots may be at most "
    "learner.publish.max_versions_ahead behind; `user-sys weights release` unpins it"
)


@dataclass
class _Rate:
    """Increase per second of a growing count, over the last `RATE_WINDOW_S`."""

    points: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, now: float, count: int) -> None:
        self.points.append((now, count))
        while self.points[0][0] < now - RATE_WINDOW_S:
            self.points.popleft()

    @property
    def per_s(self) -> float:
        if len(self.points) < 2:
            return 0.0
        (t0, n0), (t1, n1) = self.points[0], self.points[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0


def previous_elapsed_s(metrics: Path) -> float:
    """How long earlier launches of the run took, from the run's metrics file; 0 if there are none."""
    elapsed = (line.get("elapsed_s") for line in read_metrics(metrics))
    return max((each for each in elapsed if each is not None), default=0.0)


def previous_episodes(store: Path) -> tuple[int, int, int]:
    """Online episodes of earlier launches, their steps, and how many of them had interventions."""
    if not store.exists():
        return 0, 0, 0
    with StoreReader.open(store) as reader:
        reader.refresh()
        online = [episode for episode in reader.episodes() if episode.source == "online"]
    return len(online), sum(e.steps for e in online), sum(e.intervention_steps > 0 for e in online)


class EpisodeStatistics:
    """Counts of a run's online episodes. One thread calls it.

    Attributes:
        count, env_steps, interventions: of this launch and those before it; `interventions` counts episodes.
        points: each episode of this launch against training time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._rate = clock, _Rate()
        self.count = self.env_steps = self.interventions = 0
        self.points: list[EpisodePoint] = []
        self._autonomous: list[bool] = []  # successes of episodes without a person's help

    def seed(self, count: int, env_steps: int, interventions: int) -> None:
        """Counts of earlier launches."""
        self.count, self.env_steps, self.interventions = count, env_steps, interventions

    def add(self, report: EpisodeReport, training_s: float) -> None:
        self.count += 1
        self.env_steps += report.steps
        self._rate.add(self._clock(), self.env_steps)
        intervened = report.intervention_steps > 0
        self.interventions += intervened
        self.points.append(EpisodePoint(training_s, bool(report.success), intervened))
        if not intervened:
            self._autonomous.append(bool(report.success))

    @property
    def env_steps_per_s(self) -> float:
        return self._rate.per_s

    def success_rate(self, episodes: int) -> float | None:
        """Share of successes among the newest `episodes` autonomous episodes; None while there are fewer."""
        if len(self._autonomous) < episodes:
            return None
        return sum(self._autonomous[-episodes:]) / episodes


class LearnerStatistics:
    """What the learners of a run last reported. One thread calls it.

    Attributes:
        training_s: of the run's first learner.
        unreadable_checkpoints: how many each learner has passed over.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._rate = clock, _Rate()
        self._reported_at = 0.0
        self._updates: dict[str, int] = {}
        self._newest_version: dict[str, int] = {}
        self._is_held: dict[str, bool] = {}  # by a pinned version
        self.training_s = 0.0
        self.unreadable_checkpoints: dict[str, int] = {}

    def add(self, report: MetricsReport) -> None:
        self._updates[report.node] = report.count
        self._is_held[report.node] = bool(report.scalars.get("held_by_pin", 0))
        self.unreadable_checkpoints[report.node] = int(report.scalars.get("checkpoints_unreadable", 0))
        self._rate.add(self._clock(), self.updates)
        if "policy_version" in report.scalars:
            self._newest_version[report.node] = int(report.scalars["policy_version"])
        if report.node == LEARNER:
            self.training_s = report.scalars.get("training_s", self.training_s)
            self._reported_at = self._clock()

    @property
    def updates(self) -> int:
        """Of all learners together."""
        return sum(self._updates.values())

    @property
    def updates_per_s(self) -> float:
        return self._rate.per_s

    @property
    def training_now_s(self) -> float:
        """Training time, extrapolated from the last report."""
        since_s = self._clock() - self._reported_at if self.updates else 0.0
        return self.training_s + min(since_s, MAX_BETWEEN_REPORTS_S)

    @property
    def is_held(self) -> bool:
        """Whether a learner waits because an older version is pinned."""
        return any(self._is_held.values())

    def newest_version(self, learner: str, default: int = 0) -> int:
        return self._newest_version.get(learner, default)


class RobotStatistics:
    """What the robots of a run last reported. One thread calls it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._started = clock, clock()
        self._last: dict[str, tuple[float, RobotStatus]] = {}
        self._expected: frozenset[str] = frozenset()
        self._learner_from_robot: dict[str, str] = {}

    @property
    def seen(self) -> frozenset[str]:
        """The robots that have reported in this launch."""
        return frozenset(self._last)

    @property
    def active(self) -> frozenset[str]:
        """The robots that have reported within `ROBOT_TIMEOUT_S`."""
        since = self._clock() - ROBOT_TIMEOUT_S
        return frozenset(name for name, (time_s, _) in self._last.items() if time_s >= since)

    def set_learners(self, learner_from_robot: Mapping[str, str]) -> None:
        """Sets each robot's learner. A robot that is not named here has the run's first learner."""
        self._learner_from_robot = dict(learner_from_robot)

    def expect(self, robots: Iterable[str]) -> None:
        """These robots are shown as missing until they connect."""
        self._expected = frozenset(robots)

    def add(self, status: RobotStatus) -> None:
        self._last[status.robot] = (self._clock(), status)

    def staleness(self, learners: LearnerStatistics) -> int:
        """The largest number of versions by which a robot is behind its own learner."""
        behind = [0]
        for robot, (_, status) in self._last.items():
            learner = self._learner_from_robot.get(robot, LEARNER)
            newest = learners.newest_version(learner, status.policy_version)
            behind.append(newest - max(status.policy_version, NO_VERSION))
        return max(behind)

    def rows(self) -> Iterator[RobotProgress]:
        now = self._clock()
        for name in sorted({*self._last, *self._expected}):
            if name not in self._last:
                waited = f"not connected yet, for {format_duration(now - self._started)}"
                yield RobotProgress(name=name, control="missing", note=waited)
                continue
            time_s, status = self._last[name]
            lost = now - time_s > ROBOT_TIMEOUT_S
            yield RobotProgress(
                name=name,
                control="lost" if lost else status.authority,
                operator=status.operator,
                episode_step=status.step,
                policy_version=status.policy_version,
                outbox_chunks=status.outbox_chunks,
                note=f"silent for {format_duration(now - time_s)}" if lost else status.note,
            )


class ProgressTracker:
    """Folds the messages of a run into its progress. One thread calls it.

    Attributes:
        robots_connected: as the gateway last reported.
    """

    def __init__(
        self,
        run: str,
        address: str,
        budget_s: float,
        clock: Callable[[], float] = time.monotonic,
        folder: Path = Path(),
    ) -> None:
        """Args:
        address: of the console page.
        budget_s: training time after which the run ends.
        folder: the run's folder.
        """
        self._folder = RunFolder(folder)
        self._run, self._address, self._budget_s, self._clock = run, address, budget_s, clock
        self._started = clock()
        self._previous_s = 0.0  # duration of earlier launches
        self.episodes = EpisodeStatistics(clock)
        self.learners = LearnerStatistics(clock)
        self.robots = RobotStatistics(clock)
        self.robots_connected = 0
        self._lost_devices: dict[str, ResourceRecord] = {}
        self._disk_warnings: dict[str, str] = {}  # by process

    def seed_history(self, episodes: int, env_steps: int, interventions: int, elapsed_s: float) -> None:
        """Adds the counts and the duration of earlier launches of a resumed run."""
        self.episodes.seed(episodes, env_steps, interventions)
        self._previous_s = elapsed_s

    def on_status(self, status: RobotStatus) -> None:
        self.robots.add(status)

    def on_resource(self, record: ResourceRecord) -> str:
        """A robot or device was lost or found. Returns that as a line for the terminal."""
        lost = record.health is Health.LOST
        if lost and record.kind is not Kind.ROBOT:  # robots have a row of their own
            self._lost_devices[record.name] = record
        else:
            self._lost_devices.pop(record.name, None)
        return f"{_describe(record)} is {'lost' if lost else 'available'}"

    def on_episode(self, report: EpisodeReport) -> None:
        self.episodes.add(report, self.learners.training_now_s)

    def on_metrics(self, report: MetricsReport) -> None:
        if report.node == "gateway":
            self.robots_connected = int(report.scalars.get("robots", 0))
            self._update_disk_warning(report, self._folder.store, STORE_FULL_HINT)
        if report.node.startswith(LEARNER):
            checkpoints = learner_folder(self._folder.checkpoints, report.node)
            self._update_disk_warning(report, checkpoints, LEARNER_DISK_FULL_HINT)
            self.learners.add(report)

    def _update_disk_warning(self, report: MetricsReport, path: Path, hint: str) -> None:
        self._disk_warnings.pop(report.node, None)
        if needed_bytes := report.scalars.get("disk_needed_bytes", 0):
            text = disk_full_message(path, needed_bytes, report.scalars.get("disk_free_bytes", 0))
            self._disk_warnings[report.node] = f"{text}; {hint}"

    @property
    def warning(self) -> str:
        """What a person should mend now, or an empty text."""
        lost = f"lost: {', '.join(map(_describe, self._lost_devices.values()))}" if self._lost_devices else ""
        pinned = PINNED_VERSION_WARNING if self.learners.is_held else ""
        return " | ".join(filter(None, (self.disk_warning, lost))) or pinned

    @property
    def disk_warning(self) -> str:
        """What waits for disk space, or an empty text."""
        return " | ".join(self._disk_warnings.values())

    def scalars(self) -> dict[str, float]:
        """The run's metrics."""
        shares = {f"success_{n}": self.episodes.success_rate(n) for n in (20, 50)}
        return {
            "elapsed_s": self._elapsed_s,
            "episodes": self.episodes.count,
            "env_steps": self.episodes.env_steps,
            "env_steps_per_s": self.episodes.env_steps_per_s,
            "interventions": self.episodes.interventions,
            "staleness": self.robots.staleness(self.learners),
            **{name: share for name, share in shares.items() if share is not None},
        }

    def snapshot(self, stage: str) -> Progress:
        """The run now, for the terminal."""
        episodes, learners = self.episodes, self.learners
        return Progress(
            run=self._run,
            stage=stage,
            console=self._address,
            elapsed_s=self._elapsed_s,
            left_s=max(0.0, self._budget_s - learners.training_s) if learners.updates else None,
            done=learners.training_s,
            total=self._budget_s,
            episodes=episodes.count,
            success_20=episodes.success_rate(20),
            success_50=episodes.success_rate(50),
            env_steps=episodes.env_steps,
            env_steps_per_s=episodes.env_steps_per_s,
            updates=learners.updates,
            updates_per_s=learners.updates_per_s,
            policy_version=learners.newest_version(LEARNER),
            staleness=self.robots.staleness(learners),
            interventions=episodes.interventions,
            robots=tuple(self.robots.rows()),
            warning=self.warning,
        )

    @property
    def _elapsed_s(self) -> float:
        return self._previous_s + self._clock() - self._started


def _describe(record: ResourceRecord) -> str:
    return f"{record.name} ({record.kind} {record.model})"
