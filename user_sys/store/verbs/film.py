"""An episode as a video: its cameras side by side, who was in control on the border, how far it is below."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hal.spec import RobotSpec
from user_sys.codec import Array
from user_sys.episode import Phase
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import StoredEpisode
from user_sys.interchange.frames import Frame, decode
from user_sys.store.summary import EpisodeSummary
from user_sys.store.verbs.drawing import colour_of, standing

HEIGHT, BORDER, BAR = 240, 6, 6  # pixels
MAX_RATE_HZ = 60.0
DEFAULT_RATE_HZ = 10.0


def film_episode(summary: EpisodeSummary, episode: StoredEpisode, spec: RobotSpec | None, folder: Path) -> Path:
    """Writes ``<episode>.mp4`` into `folder`, a frame a step. At the control rate, since a simulated clock may run
    faster. Where no `spec` tells the rate it is that of the recorded times.

    Raises:
        DataSetError: it has no camera, a frame is no picture, or the encoder refuses.
        OSError: the folder cannot be written.
    """
    from user_sys.interchange.video import VideoWriter

    cameras = [list(standing(frames)) for frames in episode.frames.values()]
    if not cameras:
        raise DataSetError(f"episode {summary.episode} has no camera to make a video of")
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
        video.abandon()
        raise
    video.close()
    return path


def _rate_hz(episode: StoredEpisode, spec: RobotSpec | None) -> float:
    """In bounds that players take."""
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
    height, width = decode(first).shape[:2]
    return max(1, round(int(width) * HEIGHT / int(height)))


def _scaled(frame: Frame | None, width: int) -> Array:
    """uint8 (HEIGHT, width, 3); black where there is no frame yet."""
    from PIL import Image

    if frame is None:
        return np.zeros((HEIGHT, width, 3), np.uint8)
    return np.asarray(Image.fromarray(decode(frame)).resize((width, HEIGHT), Image.Resampling.BILINEAR))


def _framed(picture: Array, size: tuple[int, int], phase: int, done: float) -> Array:
    code = colour_of(phase).lstrip("#")
    colour = [int(code[n : n + 2], 16) for n in (0, 2, 4)]
    framed = np.empty((*size, 3), np.uint8)
    framed[:] = colour
    framed[BORDER : BORDER + HEIGHT, BORDER : BORDER + picture.shape[1]] = picture
    framed[-BAR:] = 32
    framed[-BAR:, : round(done * size[1])] = 230
    return framed


def _even(number: int) -> int:
    return number + number % 2
