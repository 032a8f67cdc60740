"""What a run leaves for people: a plot of success, a summary, a video and `runs/latest`, each replaced atomically.

The end of a run: the newest policy is evaluated, and what people keep of a run is written.
"""

from __future__ import annotations

import json
import logging
import math
import os
from argparse import Namespace
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hal.signals import bounded_shutdown
from hal.spec import Array
from user_sys.compose import RobotConfig, robot_spec
from user_sys.edge.local_environment import defer_signals
from user_sys.edge.loop import EpisodeResult
from user_sys.errors import RunError
from user_sys.messages import WeightsManifest
from user_sys.process_exit import EXIT_DEADLINE_S, ExitStatus, exit_now
from user_sys.robot_records import LEARNER, assign_learners, learner_folder, read_robot_records
from user_sys.run.config import RunConfig, RunFolder, open_run_folder
from user_sys.run.evaluate import EvaluationConfig, evaluate
from user_sys.weights.precision import dequantize
from user_sys.weights.version_store import VersionStore, newest_version

WINDOWS = (20, 50)  # episodes over which success is averaged, in the plot and in the progress display
Z_95 = 1.959964  # of the normal distribution: two-sided 95%
SUMMARY, PLOT, VIDEO = "summary.json", "success.png", "evaluation.mp4"

_BLUE, _PALE, _ORANGE, _GREY = "#1f5fa8", "#a9c6e6", "#d9662b", "#6b7280"


@cache
def _version() -> str:
    from importlib.metadata import version

    return version("user-sys")


@dataclass(frozen=True)
class RunSummary:
    """A run in numbers.

    Attributes:
        successes, episodes: evaluation episodes that succeeded with no person's help, and all of them.
        training_s: time the learner trained.
        env_steps, updates: control steps acted and gradient steps taken.
        interventions: training episodes in which a person took over.
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
    version: str = field(default_factory=_version)

    @property
    def success(self) -> float:
        """Share of the evaluation episodes that succeeded; NaN before there was one."""
        return self.successes / self.episodes if self.episodes else math.nan

    @property
    def ci95(self) -> tuple[float, float]:
        return wilson_interval(self.successes, self.episodes)

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "success": self.success if self.episodes else None,
            "episodes": self.episodes,
            "ci95": [round(bound, 4) for bound in self.ci95],
            "target_reached": self.target_reached,
            "training_s": round(self.training_s, 1),
            "env_steps": self.env_steps,
            "updates": self.updates,
            "interventions": self.interventions,
            "seed": self.seed,
            "version": self.version,
        }


@dataclass(frozen=True)
class EpisodePoint:
    """A finished training episode at `training_s` of the run; `intervened` if a person had the robot in it."""

    training_s: float
    success: bool
    intervened: bool = False


def wilson_interval(successes: int, episodes: int) -> tuple[float, float]:
    """The 95% score interval of a share (Wilson 1927), which stays within [0, 1] and is honest at 0% and 100%."""
    if not 0 <= successes <= episodes:
        raise ValueError(f"{successes} successes of {episodes} episodes")
    if episodes == 0:
        return 0.0, 1.0
    share, z2 = successes / episodes, Z_95**2
    centre = (share + z2 / (2 * episodes)) / (1 + z2 / episodes)
    half = Z_95 / (1 + z2 / episodes) * math.sqrt(share * (1 - share) / episodes + z2 / (4 * episodes**2))
    low = centre - half if successes else 0.0  # exactly, where rounding would leave a trace
    return low, centre + half if successes < episodes else 1.0


def write_report(
    run_dir: Path, summary: RunSummary, episodes: Sequence[EpisodePoint], console: Console | None = None
) -> None:
    """Writes ``summary.json`` and ``success.png`` into the run folder and prints the summary as a table.

    Raises:
        RunError: a file could not be written.
    """
    with _atomic_replace(run_dir / SUMMARY) as temporary:
        temporary.write_text(json.dumps(summary.as_json(), indent=2, allow_nan=False) + "\n")
    with _atomic_replace(run_dir / PLOT) as temporary:
        _plot(temporary, summary, episodes)
    (console or Console()).print(_table(run_dir, summary))


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The contents of ``summary.json``.

    Raises:
        RunError: the run has none (it is not over), or it is damaged.
    """
    try:
        summary: dict[str, Any] = json.loads((run_dir / SUMMARY).read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{run_dir / SUMMARY}: no summary can be read from it: {error}") from None
    return summary


def moving_success(episodes: Sequence[EpisodePoint], window: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """float64 (len(episodes),): the share of successes among each episode and the ``window - 1`` before it."""
    total = np.concatenate([[0.0], np.cumsum([e.success for e in episodes], dtype=np.float64)])
    last = np.arange(1, len(episodes) + 1)
    first = np.maximum(last - window, 0)
    return np.asarray((total[last] - total[first]) / (last - first))


def write_video(path: Path, frames: Iterable[np.ndarray[Any, np.dtype[np.uint8]]], fps: float) -> int:
    """Writes uint8 (h, w, 3) RGB `frames` as an MP4 that browsers play (H.264, yuv420p), and returns their number.

    Frames are consumed one by one, so that a generator needs no memory for the whole. An odd height or width, which the
    format does not know, is padded by repeating the last row or column. Blocks while it encodes.

    Raises:
        RunError: no frames, frames of unlike or unfit shape, or a failing encoder.
    """
    from imageio_ffmpeg import write_frames

    count, shape, encoder = 0, (0, 0, 0), None
    with _atomic_replace(path) as temporary:
        try:
            for count, frame in enumerate(frames, start=1):
                if encoder is None:
                    shape = _require_frame(path, frame).shape
                    encoder = write_frames(str(temporary), _pad_to_even(frame).shape[1::-1], **_encoding(fps))
                    encoder.send(None)
                if frame.shape != shape:
                    raise RunError(f"{path}: frame {count} has the shape {frame.shape}, those before it {shape}")
                encoder.send(_pad_to_even(frame))
        finally:
            if encoder is not None:
                encoder.close()  # waits for ffmpeg to finish the file
        if not count:
            raise RunError(f"{path}: no frames to make a video of")
    return count


def link_latest(run_dir: Path) -> Path:
    """Points the symbolic link ``latest`` beside `run_dir` to it, atomically, and returns the link.

    Raises:
        RunError: something else than a link is in its place, or it cannot be made.
    """
    link = run_dir.parent / "latest"
    if link.exists() and not link.is_symlink():
        raise RunError(f"{link} is not a link; move it away")
    with _atomic_replace(link) as temporary:
        temporary.symlink_to(run_dir.name)
    return link


@contextmanager
def _atomic_replace(path: Path) -> Generator[Path]:
    """A temporary path beside `path` that takes its place at the end, or is removed if the work failed."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _require_frame(path: Path, frame: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or 0 in frame.shape:
        raise RunError(f"{path}: frames must be uint8 (h, w, 3), got {frame.dtype} {frame.shape}")
    return frame


def _pad_to_even(frame: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    height, width, _ = frame.shape
    if height % 2 or width % 2:
        frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(frame)


def _encoding(fps: float) -> dict[str, Any]:
    return {
        "fps": fps,
        "codec": "libx264",
        "pix_fmt_out": "yuv420p",
        "macro_block_size": 2,
        "quality": 8,
        "ffmpeg_log_level": "error",
        "output_params": ["-movflags", "+faststart", "-f", "mp4"],  # plays while it is still loading
    }


def _table(run_dir: Path, summary: RunSummary) -> Table:
    table = Table(title=f"Run {summary.run}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    low, high = summary.ci95
    success = f"{summary.success:.1%} (95% interval {low:.1%} to {high:.1%})" if summary.episodes else "not evaluated"
    rows = {
        "success": success,
        "evaluation episodes": f"{summary.episodes:,}",
        "training time": f"{summary.training_s / 60:.1f} min",
        "environment steps": f"{summary.env_steps:,}",
        "updates": f"{summary.updates:,}",
        "interventions": f"{summary.interventions:,}",
        "seed": str(summary.seed),
        "version": summary.version,
        "folder": str(run_dir),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


# The plot -------------------------------------------------------------------------------------------------------------


def _plot(path: Path, summary: RunSummary, episodes: Sequence[EpisodePoint]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: no global state, no window system
    axes = figure.subplots()
    _draw_training(axes, episodes)
    _draw_evaluation(axes, summary)
    _style_axes(axes, summary)
    figure.savefig(path, format="png", facecolor="white")


def _draw_training(axes: Any, episodes: Sequence[EpisodePoint]) -> None:
    minutes = [e.training_s / 60 for e in episodes]
    for window, colour, width in zip(WINDOWS, (_PALE, _BLUE), (1.4, 2.4), strict=True):
        axes.plot(
            minutes, 100 * moving_success(episodes, window), color=colour, lw=width, label=f"last {window} episodes"
        )
    helped = [e.training_s / 60 for e in episodes if e.intervened]
    if helped:
        axes.plot(helped, [-3] * len(helped), "|", color=_ORANGE, ms=7, label="a person took over", clip_on=False)


def _draw_evaluation(axes: Any, summary: RunSummary) -> None:
    if not summary.episodes:
        return
    low, high = summary.ci95
    below, above = max(0.0, summary.success - low), max(0.0, high - summary.success)
    axes.errorbar(
        [summary.training_s / 60],
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


def _style_axes(axes: Any, summary: RunSummary) -> None:
    axes.set_title(f"{summary.run} (seed {summary.seed})", loc="left", fontsize=11, fontweight="bold")
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


log = logging.getLogger(__name__)


def load_newest_weights(folder: RunFolder, learner: str = LEARNER) -> tuple[WeightsManifest, dict[str, Array]]:
    """The newest version that the gateway has kept. Raises RunError where the learner has published none."""
    kept = newest_version(VersionStore(learner_folder(folder.weights, learner)).load())
    if kept is None:
        raise RunError(f"{folder.path} has no trained policy yet: {learner} has published no weights")
    manifest, state = kept
    return manifest, dequantize(state.tensors, state.form)


def robots_to_evaluate(config: RunConfig, folder: RunFolder) -> dict[str, RobotConfig]:
    """For each learner of the run, by name, the first of the run's own simulated robots that it learns for.

    A real one is let go by a person who stands by, with `user-sys evaluate`, and not at the end of a night.
    """
    names = {plan.spec.embodiment: plan.name for plan in assign_learners(read_robot_records(folder.robots))}
    found: dict[str, RobotConfig] = {}
    for robot in config.robots:
        if not robot.simulated:
            continue
        if (learner := names.get(robot_spec(robot).embodiment)) is not None:
            found.setdefault(learner, robot)
    return found


def run_evaluation(
    config: RunConfig,
    folder: RunFolder,
    episodes: int,
    console: Console,
    learner: str = LEARNER,
    robot: RobotConfig | None = None,
) -> tuple[list[EpisodeResult], list[Array], WeightsManifest]:
    """Evaluates the newest policy of `learner` on `robot` (the first); also returns pictures of the first episodes."""
    manifest, weights = load_newest_weights(folder, learner)
    pictures: list[Array] = []
    settings = replace(config.evaluation, episodes=episodes)
    with defer_signals() as attend:
        ran = evaluate(
            robot or config.robots[0],
            config.policy,
            weights,
            settings,
            pictures.append,
            version=manifest.version,
            seed=config.seed,
            check_stop=attend,
        )
        label = f"evaluating version {manifest.version}"
        return list(track(ran, label, total=episodes, console=console, transient=True)), pictures, manifest


def evaluate_and_report(
    config: RunConfig, folder: RunFolder, points: Sequence[EpisodePoint], counts: RunSummary, console: Console
) -> RunSummary:
    """Evaluates the run's policies on its simulated robots, and writes summary, plot and video.

    A run without such a robot has nothing to evaluate on, and one may want no evaluation: its summary holds the counts
    alone.

    Args:
        points: the training episodes, for the plot.
        counts: the run's counts; the evaluation of its first learner is filled in here.

    Raises:
        RunError: there is no policy to evaluate, or a file cannot be written.
    """
    summary, pictures = counts, list[Array]()
    for learner, robot in robots_to_evaluate(config, folder).items() if config.evaluation.episodes > 0 else ():
        if learner != LEARNER:
            _report_further_learner(config, folder, learner, robot, console)
            continue
        episodes, pictures, _ = run_evaluation(config, folder, config.evaluation.episodes, console, learner, robot)
        summary = replace(counts, successes=sum(bool(e.success) for e in episodes), episodes=len(episodes))
    if config.evaluation.episodes > 0 and (real := [robot.name for robot in config.robots if not robot.simulated]):
        console.print(
            f"not evaluated, since nobody may stand by now: {', '.join(real)}; "
            f"later, with an e-stop within reach: user-sys evaluate {folder.path} --robot NAME",
            highlight=False,
        )
    if pictures:
        write_video(folder.path / VIDEO, pictures, fps=10)
    write_report(folder.path, summary, points, console)
    return summary


def exit_status(config: RunConfig, summary: RunSummary, any_result: bool, console: Console) -> ExitStatus:
    """Says which target was missed; with `any_result` that changes no exit status."""
    target, required, missed = config.target, config.evaluation.required, False
    if summary.target_reached is False:
        missed = True
        console.print(
            f"target not reached: training ended before {target.success:.0%} of {target.episodes} episodes succeeded"
        )
    if required and not summary.success >= required:  # NaN where nothing was evaluated
        missed = True
        found = f"{summary.success:.0%} of the evaluation succeeded" if summary.episodes else "nothing was evaluated"
        console.print(f"target not reached: {found}, and the configuration requires {required:.0%}")
    return ExitStatus.NOT_REACHED if missed and not any_result else ExitStatus.REACHED


def _report_further_learner(
    config: RunConfig, folder: RunFolder, learner: str, robot: RobotConfig, console: Console
) -> None:
    """One line, for an embodiment beside the run's first."""
    episodes, _, manifest = run_evaluation(
        replace(config, evaluation=replace(config.evaluation, video_episodes=0)),
        folder,
        config.evaluation.episodes,
        console,
        learner,
        robot,
    )
    share = sum(bool(e.success) for e in episodes) / len(episodes)
    console.print(
        f"{learner} on {robot.name}: {share:.0%} of {len(episodes)} episodes with version {manifest.version}",
        highlight=False,
    )


def evaluate_main(args: Namespace) -> int:
    """``user-sys evaluate RUN``: autonomous success with its confidence interval."""
    folder, config, _ = open_run_folder(Path(args.run))
    if not config.robots:
        raise RunError(
            f"{folder.path} has no robot to evaluate on: name a simulated one under robots: in {folder.config}"
        )
    console = Console(stderr=True)
    config = replace(config, evaluation=EvaluationConfig(video_episodes=0))
    learner, robot = _select_robot(config, folder, args.robot)
    with bounded_shutdown(EXIT_DEADLINE_S, partial(exit_now, "ended at once")):
        episodes, _, manifest = run_evaluation(config, folder, args.episodes, console, learner, robot)
    successes = sum(bool(e.success) for e in episodes)
    low, high = wilson_interval(successes, len(episodes))
    steps = sum(e.steps for e in episodes) / len(episodes)
    result = {
        "robot": robot.name,
        "success": successes / len(episodes),
        "episodes": len(episodes),
        "ci95": [round(low, 4), round(high, 4)],
        "mean_steps": round(steps, 1),
        "policy_version": manifest.version,
        "updates": manifest.updates,
    }
    if args.json:
        Console().print_json(json.dumps(result))
    else:
        Console().print(
            f"{folder.path.name}: policy version {manifest.version} ({manifest.updates} updates) succeeds alone in "
            f"{successes} of {len(episodes)} episodes = {successes / len(episodes):.1%} "
            f"(95% interval {low:.1%} to {high:.1%}), {steps:.1f} steps an episode"
        )
    return 0


def _select_robot(config: RunConfig, folder: RunFolder, name: str | None) -> tuple[str, RobotConfig]:
    """The robot of that name, or the first, and the learner for its embodiment. Raises RunError: there is none."""
    robot = next((robot for robot in config.robots if name in (None, robot.name)), None)
    if robot is None:
        raise RunError(f"{folder.path} has no robot {name!r}; there are {[robot.name for robot in config.robots]}")
    embodiment = robot_spec(robot).embodiment
    for plan in assign_learners(read_robot_records(folder.robots)):
        if plan.spec.embodiment == embodiment:
            return plan.name, robot
    raise RunError(f"nothing was learned for {robot.name}: its embodiment has no learner in {folder.path}")
