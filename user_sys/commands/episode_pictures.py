"""Pictures and videos of episodes.

A picture has frames with the phase as border colour, rewards, and each element of the action. A video has the
cameras side by side, the phase as border colour, and a progress bar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hal.spec import ACTION, RobotSpec
from user_sys.codec import Array
from user_sys.commands.episode_detail import element_names, phase_name, phase_spans
from user_sys.episode import APPLIED_ACTION, Phase
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import StoredEpisode
from user_sys.interchange.frames import Frame, decode_frame
from user_sys.store.index import EpisodeSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PHASE_COLOURS = {"policy": "#1f5fa8", "teleop": "#d9662b", "correction": "#c0392b", "recovery": "#7d3c98"}
OTHER_COLOUR = "#6b7280"
FRAMES = 8  # per row of pictures
MAX_ELEMENTS = 16  # of an action; more would be illegible
WIDTH_IN, FRAME_IN, CURVE_IN, HEAD_IN = 13.0, 1.72, 1.25, 0.75
DPI = 100
HEIGHT, BORDER, BAR = 240, 6, 6  # pixels
MAX_RATE_HZ = 60.0
DEFAULT_RATE_HZ = 10.0


def draw_episode(summary: EpisodeSummary, episode: StoredEpisode, spec: RobotSpec | None, folder: Path) -> Path:
    """Writes ``<episode>.png`` into `folder`: frames of every camera, rewards, and each element of the action.

    Raises:
        DataSetError: a frame cannot be decoded.
        OSError: the folder cannot be written.
    """
    cameras = {name: frames for name, frames in episode.frames.items() if any(f is not None for f in frames)}
    action = episode.columns.get(ACTION, np.zeros((episode.steps, 0), np.float32))
    elements = min(action.shape[1], MAX_ELEMENTS)
    curves = 1 + -(-elements // 2)
    heights = [FRAME_IN] * len(cameras) + [CURVE_IN] * curves
    figure = _figure(sum(heights) + HEAD_IN)
    top = 1 - HEAD_IN / (sum(heights) + HEAD_IN)
    grid = figure.add_gridspec(
        len(heights),
        FRAMES,
        height_ratios=heights,
        left=0.06,
        right=0.985,
        top=top,
        bottom=0.05,
        wspace=0.08,
        hspace=0.42,
    )
    for row, (name, frames) in enumerate(cameras.items()):
        places = [figure.add_subplot(grid[row, n]) for n in range(FRAMES)]
        _strip(places, frames, _phases(episode), name.rpartition(".")[2])
    _rewards(figure.add_subplot(grid[len(cameras), :]), episode)
    names, units = element_names(ACTION, action.shape[1], spec)
    applied = episode.columns.get(APPLIED_ACTION, action)
    for n in range(elements):
        pair = grid[len(cameras) + 1 + n // 2, :].subgridspec(1, 2, wspace=0.1)
        axes = figure.add_subplot(pair[0, n % 2])
        _element(axes, episode, action[:, n], applied[:, n], f"{names[n]} {units[n]}".strip(), legend=n == 0)
    _title(figure, summary, episode)
    return _save(figure, folder / f"{summary.episode}.png")


def draw_overview(episodes: Sequence[tuple[EpisodeSummary, StoredEpisode]], folder: Path) -> Path | None:
    """Writes ``episodes.png``: one row of frames per episode, of its first camera; None if no episode has a camera.

    Raises as `draw_episode`.
    """
    rows = [(summary, episode, *found) for summary, episode in episodes if (found := _first_camera(episode))]
    if not rows:
        return None
    height = len(rows) * (FRAME_IN + 0.28) + HEAD_IN
    figure = _figure(height)
    grid = figure.add_gridspec(
        len(rows), FRAMES, left=0.02, right=0.985, top=1 - HEAD_IN / height, bottom=0.02, wspace=0.08, hspace=0.5
    )
    for row, (summary, episode, camera, frames) in enumerate(rows):
        places = [figure.add_subplot(grid[row, n]) for n in range(FRAMES)]
        _strip(places, frames, _phases(episode), "")
        places[0].text(
            0, 1.24, f"{summary.episode}   {summary.source}, {_outcome(summary)}, camera {camera}",
            transform=places[0].transAxes, fontsize=9, color=_outcome_colour(summary), weight="bold",
        )  # fmt: skip
    phases = {name for _, episode, *_ in rows for name in map(phase_name, np.unique(_phases(episode)).tolist())}
    _legend(figure, phases)
    return _save(figure, folder / "episodes.png")


def _first_camera(episode: StoredEpisode) -> tuple[str, list[Frame | None]] | None:
    for name, frames in episode.frames.items():
        if any(frame is not None for frame in frames):
            return name.rpartition(".")[2], frames
    return None


def displayed_frames(frames: Sequence[Frame | None]) -> Iterator[Frame | None]:
    """The newest frame at each step; None before the first one."""
    last: Frame | None = None
    for frame in frames:
        last = frame if frame is not None else last
        yield last


def phase_colour(phase: int) -> str:
    return PHASE_COLOURS.get(phase_name(phase), OTHER_COLOUR)


def _phases(episode: StoredEpisode) -> Array:
    return episode.columns.get("phase", np.full(episode.steps, Phase.POLICY, np.uint8))


def _strip(places: Sequence[Axes], frames: Sequence[Frame | None], phase: Array, name: str) -> None:
    """Draws evenly spaced frames, including the first and the last."""
    seen = list(displayed_frames(frames))
    steps = np.unique(np.linspace(0, len(seen) - 1, len(places)).round().astype(int)).tolist()
    for axes in places:
        axes.set_axis_off()
    for axes, step in zip(places, steps, strict=False):
        frame = seen[step]
        if frame is None:
            continue
        axes.set_axis_on()
        axes.imshow(decode_frame(frame), aspect="equal")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(f"step {step}", fontsize=8, pad=4, color=OTHER_COLOUR)
        for spine in axes.spines.values():
            spine.set_color(phase_colour(int(phase[step])))
            spine.set_linewidth(3.5)
    places[0].set_ylabel(name, fontsize=9)


def _rewards(axes: Axes, episode: StoredEpisode) -> None:
    reward = episode.columns.get("reward", np.zeros(episode.steps, np.float32))
    steps = np.arange(episode.steps)
    axes.bar(steps, reward, width=0.9, color="#2e7d5b", label="reward")
    axes.plot(steps, np.cumsum(reward), color="#111827", lw=1.2, drawstyle="steps-mid", label="sum so far")
    _phase_bands(axes, episode)
    axes.set_ylabel("reward", fontsize=8)
    axes.legend(fontsize=7, loc="upper left", frameon=False, ncols=2)


def _element(axes: Axes, episode: StoredEpisode, requested: Array, applied: Array, name: str, *, legend: bool) -> None:
    steps = np.arange(episode.steps)
    axes.plot(steps, requested, color="#9ca3af", lw=2.2, drawstyle="steps-mid", label="requested")
    axes.plot(steps, applied, color="#111827", lw=0.9, drawstyle="steps-mid", label="applied")
    _phase_bands(axes, episode)
    axes.set_title(name, fontsize=8, pad=2, loc="left", color="#374151")
    if legend:
        axes.legend(fontsize=7, loc="lower right", frameon=False, ncols=2, bbox_to_anchor=(1, 0.96), borderpad=0)


def _phase_bands(axes: Axes, episode: StoredEpisode) -> None:
    """Marks the phases behind the curves."""
    phase = _phases(episode)
    for stretch in phase_spans(phase, np.arange(episode.steps)):
        colour = PHASE_COLOURS.get(stretch.phase, OTHER_COLOUR)
        axes.axvspan(stretch.first_step - 0.5, stretch.last_step + 0.5, color=colour, alpha=0.10, lw=0, zorder=0)
    axes.set_xlim(-0.5, episode.steps - 0.5)
    axes.tick_params(labelsize=7, colors=OTHER_COLOUR)
    axes.margins(y=0.15)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _title(figure: Figure, summary: EpisodeSummary, episode: StoredEpisode) -> None:
    height = figure.get_figheight()
    sentence = episode.header.sentence or summary.task
    figure.text(0.06, 1 - 0.22 / height, summary.episode, fontsize=11, weight="bold", va="center")
    figure.text(
        0.06, 1 - 0.45 / height, f"{summary.robot}: {sentence}   {summary.source}, {summary.steps} steps",
        fontsize=9, va="center", color="#374151",
    )  # fmt: skip
    figure.text(
        0.985, 1 - 0.22 / height, _outcome(summary),
        fontsize=11, weight="bold", va="center", ha="right", color=_outcome_colour(summary),
    )  # fmt: skip
    _legend(figure, {phase_name(int(phase)) for phase in np.unique(_phases(episode))})


def _legend(figure: Figure, phases: set[str]) -> None:
    from matplotlib.patches import Patch

    colours: Mapping[str, str] = {**PHASE_COLOURS, **dict.fromkeys(phases - PHASE_COLOURS.keys(), OTHER_COLOUR)}
    patches = [Patch(color=colour, label=name) for name, colour in colours.items() if name in phases]
    figure.legend(
        handles=patches, loc="upper right", fontsize=8, frameon=False, ncols=4,
        bbox_to_anchor=(0.99, 1 - 0.3 / figure.get_figheight()),
    )  # fmt: skip


def _outcome(summary: EpisodeSummary) -> str:
    verdict = {True: "succeeded", False: "failed", None: "success unknown"}[summary.success]
    deleted = ", deleted" if summary.deleted else ""
    return f"{verdict}, return {summary.episode_return:.3g}{deleted}" + (
        f" ({summary.labelled_by})" if summary.labelled_by else ""
    )


def _outcome_colour(summary: EpisodeSummary) -> str:
    return {True: "#2e7d5b", False: "#c0392b", None: OTHER_COLOUR}[summary.success]


def _figure(height_in: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", facecolor="white")
    return path


def write_episode_video(summary: EpisodeSummary, episode: StoredEpisode, spec: RobotSpec | None, folder: Path) -> Path:
    """Writes ``<episode>.mp4`` into `folder`, one frame per step at the control rate of `spec`.

    Without a `spec` the rate comes from the recorded times. A simulated clock may run faster than either.

    Raises:
        DataSetError: there is no camera, a frame cannot be decoded, or the encoder fails.
        OSError: the folder cannot be written.
    """
    from user_sys.interchange.video import VideoWriter

    cameras = [list(displayed_frames(frames)) for frames in episode.frames.values()]
    if not cameras:
        raise DataSetError(f"episode {summary.episode} has no camera for a video")
    phase = episode.columns.get("phase", np.full(episode.steps, Phase.POLICY, np.uint8))
    widths = [_width(frames) for frames in cameras]
    size = (HEIGHT + 2 * BORDER + BAR, _even(sum(widths) + 2 * BORDER))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{summary.episode}.mp4"
    video = VideoWriter(path, *size, _rate_hz(episode, spec), "h264")
    try:
        for step in range(episode.steps):
            pictures = [_scaled(frames[step], width) for frames, width in zip(cameras, widths, strict=True)]
            video.write(_framed(np.concatenate(pictures, axis=1), size, int(phase[step]), (step + 1) / episode.steps))
    except DataSetError:
        video.abort()
        raise
    video.close()
    return path


def _rate_hz(episode: StoredEpisode, spec: RobotSpec | None) -> float:
    """The video's rate, within limits that players support."""
    if spec is not None:
        return min(MAX_RATE_HZ, max(1.0, spec.rate_hz))
    times = episode.columns.get("t_capture_ns")
    pauses = np.diff(times) if times is not None else np.empty(0)
    pause_s = float(np.median(pauses)) / 1e9 if len(pauses) else 0.0
    return min(MAX_RATE_HZ, max(1.0, 1 / pause_s)) if pause_s > 0 else DEFAULT_RATE_HZ


def _width(frames: list[Frame | None]) -> int:
    first = next((frame for frame in frames if frame is not None), None)
    if first is None:
        return HEIGHT
    height, width = decode_frame(first).shape[:2]
    return max(1, round(int(width) * HEIGHT / int(height)))


def _scaled(frame: Frame | None, width: int) -> Array:
    """uint8 (HEIGHT, width, 3); black before the first frame."""
    from PIL import Image

    if frame is None:
        return np.zeros((HEIGHT, width, 3), np.uint8)
    return np.asarray(Image.fromarray(decode_frame(frame)).resize((width, HEIGHT), Image.Resampling.BILINEAR))


def _framed(picture: Array, size: tuple[int, int], phase: int, done: float) -> Array:
    code = phase_colour(phase).lstrip("#")
    colour = [int(code[n : n + 2], 16) for n in (0, 2, 4)]
    framed = np.empty((*size, 3), np.uint8)
    framed[:] = colour
    framed[BORDER : BORDER + HEIGHT, BORDER : BORDER + picture.shape[1]] = picture
    framed[-BAR:] = 32
    framed[-BAR:, : round(done * size[1])] = 230
    return framed


def _even(number: int) -> int:
    return number + number % 2
