"""Stores whose successful episodes end with a bright patch in the picture of the camera ``front``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import simplejpeg
from episode_kit import chunk_header

from user_sys.codec import Array
from user_sys.episode import IMAGE_PREFIX, Chunk, EpisodeEnd, EpisodeSource, frame_columns
from user_sys.store.store import StoreWriter

STEPS, SIDE = 3, 64
FRONT = IMAGE_PREFIX + "front"


def picture(rng: np.random.Generator, success: bool) -> Array:
    image = rng.integers(0, 90, (SIDE, SIDE, 3)).astype(np.uint8)
    if success:
        image[20:44, 20:44] = 230
    return image


def episode(
    name: str,
    label: bool | None,
    *,
    looks: bool | None = None,
    task: str = "lift",
    index: int = 0,
    source: EpisodeSource = EpisodeSource.ONLINE,
) -> bytes:
    """A complete episode. `label`: its recorded success; `looks`: how its last picture looks (default: as labelled)."""
    rng = np.random.default_rng(list(name.encode()))
    shown = [picture(rng, False) for _ in range(STEPS)]
    files = [bytes(simplejpeg.encode_jpeg(image, quality=90, colorspace="RGB")) for image in shown]
    last = simplejpeg.encode_jpeg(picture(rng, bool(label) if looks is None else looks), quality=90, colorspace="RGB")
    header = chunk_header(
        name,
        STEPS,
        index=index,
        robot="arm",
        embodiment="e",
        task=task,
        source=source,
        started_unix_ns=1_700_000_000_000_000_000,
        end=EpisodeEnd(steps=STEPS, success=label),
    )
    columns = {
        "observation.state": rng.standard_normal((STEPS, 2)).astype(np.float32),
        "action": np.zeros((STEPS, 2), np.float32),
        "reward": np.array([0, 0, label or False], np.float32),
        "terminated": np.array([False, False, label or False]),
        "truncated": np.array([False, False, not label]),
        "phase": np.zeros(STEPS, np.uint8),
        "policy_version": np.zeros(STEPS, np.int64),
    } | frame_columns(FRONT, files, [1] * STEPS)
    return Chunk(header, columns, {FRONT: np.frombuffer(last, np.uint8)}).encode()


def make_store(path: Path, episodes: Sequence[bytes]) -> Path:
    with StoreWriter.open(path) as writer:
        for chunk in episodes:
            writer.append(chunk)
        writer.sync()
    return path


def labelled_store(path: Path, count: int = 60) -> Path:
    """Every second of `count` episodes succeeded."""
    return make_store(path, [episode(f"e{number:03d}", number % 2 == 0) for number in range(count)])


def rising(name: str, task: str, success: bool = True, steps: int = 8) -> bytes:
    """An episode of the task ``red`` or ``green`` in which the bar of this colour grows, to the top in a success."""
    rng = np.random.default_rng(list(name.encode()))
    channels = {"red": 0, "green": 1}
    other = int(rng.integers(0, SIDE))

    def bars(share: float) -> bytes:
        image = rng.integers(0, 60, (SIDE, SIDE, 3)).astype(np.uint8)
        for colour, channel in channels.items():
            height = round(SIDE * share) if colour == task else other
            columns = slice(channel * SIDE // 2, (channel + 1) * SIDE // 2)
            image[SIDE - height :, columns, channel] = 240
        return bytes(simplejpeg.encode_jpeg(image, quality=90, colorspace="RGB"))

    top = 1.0 if success else 0.5
    shown = [bars(top * step / steps) for step in range(steps)]
    header = chunk_header(
        name,
        steps,
        robot="arm",
        embodiment="e",
        task=task,
        sentence=f"raise the {task} bar",
        end=EpisodeEnd(steps=steps, success=success),
    )
    last = np.arange(steps) == steps - 1
    columns = {
        "observation.state": np.zeros((steps, 2), np.float32),
        "action": np.zeros((steps, 2), np.float32),
        "reward": np.zeros(steps, np.float32),
        "terminated": last & success,
        "truncated": last & (not success),
        "phase": np.zeros(steps, np.uint8),
        "policy_version": np.zeros(steps, np.int64),
    } | frame_columns(FRONT, shown, [1] * steps)
    return Chunk(header, columns, {FRONT: np.frombuffer(bars(top), np.uint8)}).encode()


def rising_store(path: Path, count: int = 60) -> Path:
    """Episodes of both tasks; every fourth one failed."""
    return make_store(path, [rising(f"r{n:03d}", "red" if n % 2 else "green", success=n % 4 < 3) for n in range(count)])
