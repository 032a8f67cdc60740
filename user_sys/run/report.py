"""The report of a run: summary, plot of success, video and the link `runs/latest`; and its history of episodes."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hal.spec import Array
from user_sys.console.progress import SUCCESS_WINDOWS
from user_sys.episode import EpisodeSource
from user_sys.errors import DataSetError, RunError
from user_sys.robot_records import LEARNER, learner_from_robot, read_robot_records
from user_sys.run.config import RunFolder, read_run_metadata
from user_sys.run.metrics import METRICS, RUN, read_metrics, rows_in_order
from user_sys.store.index import EpisodeSummary
from user_sys.store.record_format import segment_numbers
from user_sys.store.store import StoreReader

Z_95 = 1.959964  # two-sided 95% of the normal distribution
SUMMARY, PLOT, VIDEO, FAILURES = "summary.json", "success.png", "evaluation.mp4", "failures.mp4"
NEWEST = 100  # autonomous training episodes in the summary
CLOCK_TOLERANCE_S = 300.0  # so far may a robot's clock be behind

_BLUE, _PALE, _ORANGE, _GREY = "#1f5fa8", "#a9c6e6", "#d9662b", "#6b7280"


@cache
def _version() -> str:
    from importlib.metadata import version

    return version("user-sys")


@dataclass(frozen=True)
class RunSummary:
    """The results of a run.

    Attributes:
        successes, episodes: evaluation episodes that succeeded, and all of them; the policy acts without a person.
        tasks: of an evaluation of several tasks: successes and episodes of each.
        control_s: control time of the evaluation: its steps times the control period, without resets.
        policy_version, policy_updates: the version that acted in the evaluation, which an operator or the run may have
            pinned, and its updates; None before there was one.
        training_s: time that the learner trained or waited for robots.
        env_steps, updates: control steps acted and gradient steps taken.
        interventions: training episodes with an intervention.
        target_reached: training ended because the run's target was reached; None if the run has none.
    """

    run: str
    successes: int
    episodes: int
    training_s: float
    env_steps: int
    updates: int
    interventions: int
    seed: int
    target_reached: bool | None = None
    control_s: float = 0.0
    tasks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    policy_version: int | None = None
    policy_updates: int | None = None
    version: str = field(default_factory=_version)

    @property
    def success(self) -> float:
        """Share of the evaluation episodes that succeeded; NaN before there was one."""
        return self.successes / self.episodes if self.episodes else math.nan

    @property
    def ci95(self) -> tuple[float, float]:
        return wilson_interval(self.successes, self.episodes)

    @property
    def successes_per_hour(self) -> float:
        """Successes in an hour of the evaluation's control time; NaN before there was one."""
        return 3600.0 * self.successes / self.control_s if self.control_s else math.nan

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "success": self.success if self.episodes else None,
            "ci95": [round(bound, 4) for bound in self.ci95],
            "successes_per_hour": round(self.successes_per_hour, 1) if self.control_s else None,
            "control_s": round(self.control_s, 1),
            "training_s": round(self.training_s, 1),
        }


def wilson_interval(successes: int, episodes: int) -> tuple[float, float]:
    """The 95% score interval of a share (Wilson 1927), which stays within [0, 1] and holds at 0% and 100%."""
    if not 0 <= successes <= episodes:
        raise ValueError(f"{successes} successes of {episodes} episodes")
    if episodes == 0:
        return 0.0, 1.0
    share, z2 = successes / episodes, Z_95**2
    centre = (share + z2 / (2 * episodes)) / (1 + z2 / episodes)
    half = Z_95 / (1 + z2 / episodes) * math.sqrt(share * (1 - share) / episodes + z2 / (4 * episodes**2))
    low = centre - half if successes else 0.0  # exact in spite of rounding
    return low, centre + half if successes < episodes else 1.0


def success_text(successes: int, episodes: int) -> str:
    """A share with its 95% interval, such as ``98.0% (95% interval 93.0% to 99.4%)``; ``-`` without an episode."""
    if not episodes:
        return "-"
    low, high = wilson_interval(successes, episodes)
    return f"{successes / episodes:.1%} (95% interval {low:.1%} to {high:.1%})"


def write_report(
    run_dir: Path, summary: RunSummary, episodes: Sequence[EpisodePoint], console: Console | None = None
) -> None:
    """Writes ``summary.json`` and ``success.png`` into the run folder and prints the summary as a table.

    Raises:
        RunError: a file could not be written.
    """
    content = {**summary.as_json(), **_training_counts(episodes)}
    with _atomic_replace(run_dir / SUMMARY) as temporary:
        temporary.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    figure = new_figure()
    _plot(figure, summary, episodes)
    save_figure(figure, run_dir / PLOT)
    (console or Console()).print(_table(run_dir, summary, episodes))


def _training_counts(episodes: Sequence[EpisodePoint]) -> dict[str, Any]:
    """Of the newest autonomous training episodes, and of all those with a person's steps."""
    alone = sorted(autonomous(episodes), key=lambda episode: episode.number)[-NEWEST:]
    assisted = [episode for episode in episodes if episode.assisted]
    successes = sum(bool(episode.success) for episode in alone)
    interval = [round(bound, 4) for bound in wilson_interval(successes, len(alone))]
    return {
        "autonomous": {"episodes": len(alone), "successes": successes, "ci95": interval},
        "assisted": {"episodes": len(assisted), "successes": sum(bool(episode.success) for episode in assisted)},
    }


def write_video(path: Path, frames: Sequence[np.ndarray[Any, np.dtype[np.uint8]]], fps: float) -> None:
    """Writes uint8 (h, w, 3) RGB `frames` of one shape as an MP4 that browsers play (H.264, yuv420p).

    An odd height or width, which the format does not know, is padded by repeating the last row or column. Blocks while
    it encodes.

    Raises:
        RunError: the file could not be written.
    """
    from user_sys.video import VideoWriter  # imports PyAV

    height, width, _ = frames[0].shape
    padding = ((0, height % 2), (0, width % 2), (0, 0))
    with _atomic_replace(path) as temporary:
        try:
            writer = VideoWriter(temporary, height + height % 2, width + width % 2, fps)
            with closing(writer):
                for frame in frames:
                    writer.write(np.pad(frame, padding, mode="edge"))
        except DataSetError as error:
            raise RunError(f"{path}: cannot be written: {error}") from None


def link_latest(run_dir: Path) -> Path:
    """Points the symbolic link ``latest`` next to `run_dir` to it, atomically, and returns the link.

    Raises:
        RunError: a file or folder has this name, or the link cannot be made.
    """
    link = run_dir.parent / "latest"
    if link.exists() and not link.is_symlink():
        raise RunError(f"{link} is a file or folder, not a link; move it away")
    with _atomic_replace(link) as temporary:
        temporary.symlink_to(run_dir.name)
    return link


def set_aside_results(run_dir: Path) -> None:
    """Renames the results of the run's earlier end to ``earlier-NAME``, so that none seems to be of its newest one."""
    for name in (SUMMARY, PLOT, VIDEO, FAILURES):
        with suppress(FileNotFoundError):
            (run_dir / name).replace(run_dir / f"earlier-{name}")


@contextmanager
def _atomic_replace(path: Path) -> Generator[Path]:
    """A temporary path in the same folder, which replaces `path` at the end, or is removed after an error."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _table(run_dir: Path, summary: RunSummary, episodes: Sequence[EpisodePoint]) -> Table:
    table = Table(title=f"Run {summary.run}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    counts = _training_counts(episodes)
    alone, assisted = counts["autonomous"], counts["assisted"]
    rows = {
        "success": success_text(summary.successes, summary.episodes) if summary.episodes else "not evaluated",
        **{f"success, {task}": success_text(*counts) for task, counts in summary.tasks.items()},
        "evaluation episodes": f"{summary.episodes:,}",
        "evaluated version": _version_text(summary),
        "successes per hour": f"{summary.successes_per_hour:,.0f}" if summary.control_s else "-",
        f"training, alone, newest {alone['episodes']}": success_text(alone["successes"], alone["episodes"]),
        "training, with help": f"{assisted['successes']:,} of {assisted['episodes']:,} succeeded",
        "training time": f"{summary.training_s / 60:.1f} min",
        "environment steps": f"{summary.env_steps:,}",
        "updates": f"{summary.updates:,}",
        "seed": str(summary.seed),
        "version": summary.version,
        "folder": str(run_dir),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _version_text(summary: RunSummary) -> str:
    number, updates = summary.policy_version, summary.policy_updates
    return "-" if number is None else f"{number:,} (after {updates:,} updates)"


def new_figure() -> Any:
    """A matplotlib figure of 1200 by 675 pixels, without pyplot: no global state, no window system."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Writes it as a PNG, atomically. Raises RunError: the file could not be written."""
    with _atomic_replace(path) as temporary:
        figure.savefig(temporary, format="png", facecolor="white")


def _plot(figure: Any, summary: RunSummary, episodes: Sequence[EpisodePoint]) -> None:
    axes, alone = figure.subplots(), autonomous(episodes)
    minutes = [e.training_s / 60 for e in alone]
    for window, colour, width in zip(SUCCESS_WINDOWS, (_PALE, _BLUE), (1.4, 2.4), strict=True):
        shares = [100 * share for share in moving_success(alone, window)]
        axes.plot(minutes, shares, color=colour, lw=width, label=f"last {window} episodes alone")
    if helped := [e.training_s / 60 for e in episodes if e.assisted]:
        axes.plot(helped, [-3] * len(helped), "|", color=_ORANGE, ms=7, label="a person took over", clip_on=False)
    if summary.episodes:
        _draw_evaluation(axes, summary, max([summary.training_s, *(e.training_s for e in episodes)]))
    style_axes(axes, f"{summary.run} (seed {summary.seed})")


def _draw_evaluation(axes: Any, summary: RunSummary, end_s: float) -> None:
    low, high = summary.ci95
    below, above = max(0.0, summary.success - low), max(0.0, high - summary.success)
    axes.errorbar(
        [end_s / 60],
        [100 * summary.success],
        yerr=[[100 * below], [100 * above]],
        fmt="o",
        color=_ORANGE,
        ms=7,
        capsize=4,
        zorder=5,
        clip_on=False,
        label=f"evaluation: {summary.success:.0%} of {summary.episodes} episodes",
    )


def style_axes(axes: Any, title: str) -> None:
    """Labels axes of success in percent against training time in minutes."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("training time (minutes)")
    axes.set_ylabel("success (% of episodes)")
    axes.set_ylim(-6, 104)
    axes.set_yticks(range(0, 101, 20))
    axes.set_xlim(left=0)
    axes.grid(axis="y", color="#e5e7eb", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_GREY)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.07), frameon=False, fontsize=9)  # clear of the marks below 0


@dataclass(frozen=True)
class EpisodePoint:
    """A training episode that began at `training_s` of its learner, after `updates`; `assisted` by a person's steps.

    The time in which the learner waited for robots counts, and training that was lost, such as after a restart from the
    beginning. `success` is None if it was cut off without a label. `number` is its place among the run's episodes.
    """

    training_s: float
    success: bool | None
    assisted: bool = False
    updates: int = 0
    number: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Reached:
    """What a run needed until its success reached a share: training time, episodes of all kinds, and updates."""

    training_s: float
    episodes: int
    updates: int


def stored_episodes(store: Path) -> list[EpisodeSummary]:
    """The episodes in the store at `store`, in the order of their first chunks; none if there is no store yet."""
    if not segment_numbers(store):
        return []
    with StoreReader.open(store) as reader:
        reader.refresh()
        return reader.episodes()


def run_episodes(folder: RunFolder) -> list[EpisodeSummary]:
    """Those in the run's store that began in this run, and not those that were merged from an earlier one.

    Raises RunError: the run's metadata cannot be read.
    """
    if not (stored := stored_episodes(folder.store)):
        return []
    reports = read_metrics(folder.path / METRICS / f"{RUN}.jsonl")
    reported_s = [at_s for report in reports if (at_s := report.get("time_unix_s")) is not None]
    began_s = min([read_run_metadata(folder.path).started_unix_s, *reported_s])  # the clock may have been set back
    earliest_ns = 1e9 * (began_s - CLOCK_TOLERANCE_S)
    return [episode for episode in stored if episode.started_unix_ns >= earliest_ns]


def by_run_time(folder: RunFolder, episodes: Iterable[EpisodeSummary]) -> list[tuple[float, EpisodeSummary]]:
    """The episodes in the order in which they began, also if the clock was set back; each with its second of the run.

    The second is 0 if the run has no report.
    """
    reports = read_metrics(folder.path / METRICS / f"{RUN}.jsonl")
    rows = [(report.get("time_unix_s"), report.get("elapsed_s")) for report in reports]
    known = [row for row in rows if None not in row] or [(0.0, 0.0)]
    times_s, run_s = rows_in_order(np.array(known, np.float64)).T
    ordered = sorted(episodes, key=lambda episode: episode.started_unix_ns)
    seconds = np.interp([episode.started_unix_ns / 1e9 for episode in ordered], times_s, run_s).tolist()
    return sorted(zip(seconds, ordered, strict=True), key=lambda pair: pair[0])


def training_history(folder: RunFolder) -> list[EpisodePoint]:
    """The complete online episodes of the run, with their newest labels, in the order of training time.

    Episodes that a label deletes are left out. The robots' clocks place episodes among the learner's reports.
    """
    online = [e for e in run_episodes(folder) if e.source == EpisodeSource.ONLINE and e.complete and not e.deleted]
    learners = learner_from_robot(read_robot_records(folder.robots))
    by_learner = defaultdict[str, list[tuple[int, EpisodeSummary]]](list)
    for number, (_, episode) in enumerate(by_run_time(folder, online)):
        by_learner[learners.get(episode.robot, LEARNER)].append((number, episode))
    points: list[EpisodePoint] = []
    for learner, episodes in by_learner.items():
        training_s, updates = _progress_at(folder, learner, np.array([e.started_unix_ns for _, e in episodes]) / 1e9)
        points += [
            EpisodePoint(float(seconds), episode.success, episode.intervention_steps > 0, int(count), number)
            for (number, episode), seconds, count in zip(episodes, training_s, updates, strict=True)
        ]
    return sorted(points, key=lambda point: (point.training_s, point.number))


def reported_episodes(folder: RunFolder) -> int:
    """How many online episodes the run has counted, also those that its store no longer has."""
    reports = read_metrics(folder.path / METRICS / f"{RUN}.jsonl")
    return max((int(report.get("episodes") or 0) for report in reports), default=0)


def _progress_at(folder: RunFolder, learner: str, unix_s: Array) -> tuple[Array, Array]:
    """Training time with waiting, and updates, of a learner at the times `unix_s`; 0 before its first report.

    A learner that begins again, or at an older checkpoint, adds to what it did before.
    """
    reports = read_metrics(folder.path / METRICS / f"{learner}.jsonl")
    names = ("time_unix_s", "training_s", "waited_s", "count")
    rows = [(0.0, 0.0, 0.0, 0.0), *(tuple(report.get(name) for name in names) for report in reports)]
    known = np.array([row for row in rows if None not in row], np.float64)
    known[:1, 0] = known[1:2, 0] - 1e-3 if len(known) > 1 else 0.0  # at 0 until just before the first report
    known[:, 1:] = np.cumsum(np.maximum(np.diff(known[:, 1:], axis=0, prepend=0.0), 0.0), axis=0)
    times_s, trained_s, waited_s, count = rows_in_order(known).T
    return np.interp(unix_s, times_s, trained_s + waited_s), np.interp(unix_s, times_s, count)


def moving_success(episodes: Sequence[EpisodePoint], window: int) -> list[float]:
    """The share of successes among each episode and the ``window - 1`` before it."""
    newest = deque[bool](maxlen=window)
    shares = []
    for episode in episodes:
        newest.append(bool(episode.success))
        shares.append(sum(newest) / len(newest))
    return shares


def autonomous(episodes: Sequence[EpisodePoint]) -> list[EpisodePoint]:
    """Those without a person's steps that were not cut off without a label."""
    return [episode for episode in episodes if not episode.assisted and episode.success is not None]


def reached(episodes: Sequence[EpisodePoint], share: float, window: int) -> Reached | None:
    """When `share` of the newest `window` autonomous episodes had succeeded for the first time; None if never."""
    newest = deque[bool](maxlen=window)
    for number, episode in enumerate(episodes, 1):
        if episode.assisted or episode.success is None:
            continue
        newest.append(episode.success)
        if len(newest) == window and sum(newest) >= share * window:
            return Reached(episode.training_s, number, episode.updates)
    return None
