"""The report of a run: summary, plot of success, video and the link `runs/latest`, each replaced atomically."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from user_sys.errors import RunError

WINDOWS = (20, 50)  # episodes in each moving average of success
Z_95 = 1.959964  # two-sided 95% of the normal distribution
SUMMARY, PLOT, VIDEO = "summary.json", "success.png", "evaluation.mp4"

_BLUE, _PALE, _ORANGE, _GREY = "#1f5fa8", "#a9c6e6", "#d9662b", "#6b7280"


@cache
def _version() -> str:
    from importlib.metadata import version

    return version("user-sys")


@dataclass(frozen=True)
class RunSummary:
    """The results of a run.

    Attributes:
        successes, episodes: autonomous evaluation episodes that succeeded, and all evaluation episodes.
        training_s: time that the learner trained.
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
    """A finished training episode at `training_s` of the run; `intervened` if a person took over."""

    training_s: float
    success: bool
    intervened: bool = False


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
        RunError: the run has no summary (it has not ended), or the file is damaged.
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
        RunError: there are no frames, their shapes differ or are invalid, or the encoder fails.
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
        RunError: a file or folder has this name, or the link cannot be made.
    """
    link = run_dir.parent / "latest"
    if link.exists() and not link.is_symlink():
        raise RunError(f"{link} is a file or folder, not a link; move it away")
    with _atomic_replace(link) as temporary:
        temporary.symlink_to(run_dir.name)
    return link


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
        "output_params": ["-movflags", "+faststart", "-f", "mp4"],  # playable while it loads
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
    FigureCanvasAgg(figure)  # without pyplot: no global state, no window system
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
