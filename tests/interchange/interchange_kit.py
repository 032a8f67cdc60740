"""Stores to export: episodes with several cameras of different sizes, tasks, people and endings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from episode_kit import chunk_header

from user_sys.codec import Array
from user_sys.episode import IMAGE_PREFIX, Chunk, EpisodeEnd, EpisodeSource, Phase, frame_columns
from user_sys.interchange.episodes import EpisodeFilter, EpisodeReader, StoredEpisode, load_robot_specs
from user_sys.interchange.frames import Frame, decode_frame
from user_sys.interchange.lerobot_export import DatasetPlan, export_lerobot, plan_export
from user_sys.interchange.lerobot_import import ImportOptions, ImportReport, LerobotDataset, import_lerobot
from user_sys.store.store import StoreReader, StoreWriter

CAMERAS = {"wrist": (32, 48), "front": (24, 24)}
CAMERA_DELAY_NS = {"wrist": 7_000_000, "front": 30_000_000}
CHUNK_STEPS = 4
CAPTURE_PERIOD_NS = 100_000_000
STARTED_UNIX_NS = 1_700_000_000_000_000_000


def picture(camera: str, number: int) -> Array:
    """A smooth picture, which compresses well in video, different at each step."""
    height, width = CAMERAS[camera]
    rows, columns = np.mgrid[0:height, 0:width]
    red = (rows * 4 + number * 7) % 160
    return np.stack([red, columns * 3 % 160, np.full_like(red, 30 + number * 5 % 100)], axis=-1).astype(np.uint8)


def frame(camera: str, number: int, raw: bool) -> Frame | None:
    """Every third step except the first repeats the previous frame."""
    if number and number % 3 == 2:
        return None
    image = picture(camera, number)
    return image if raw else bytes(simplejpeg.encode_jpeg(image, quality=90, colorspace="RGB"))


def capture_ns(camera: str, steps: int) -> Array:
    """Capture time of the shown frame at each step, shortly before the step at which it was new."""
    newest = np.array([number for number in range(steps) if frame(camera, number, raw=True) is not None])
    shown = newest[np.searchsorted(newest, np.arange(steps), side="right") - 1]
    return 5_000_000_123 + shown * CAPTURE_PERIOD_NS - CAMERA_DELAY_NS[camera]


def episode_chunks(
    name: str,
    steps: int = 10,
    *,
    robot: str = "panda-0",
    embodiment: str = "e1",
    task: str = "lift",
    source: EpisodeSource = EpisodeSource.ONLINE,
    success: bool | None = True,
    cameras: tuple[str, ...] = tuple(CAMERAS),
    raw: bool = False,
    size: int = 3,
    ends: bool = True,
    phases: Sequence[Phase] = (),
) -> list[bytes]:
    """An episode as encoded chunks of `CHUNK_STEPS`; its numbers follow from `name`. `phases` has one per step."""
    rng = np.random.default_rng(list(name.encode()))
    columns: dict[str, Array] = {
        "observation.state": rng.standard_normal((steps, size)).astype(np.float32),
        "action": rng.standard_normal((steps, 2)).astype(np.float32),
        "action.applied": rng.standard_normal((steps, 2)).astype(np.float32),
        "reward": rng.random(steps, np.float32),
        "terminated": (np.arange(steps) == steps - 1) & (success is True) & ends,
        "truncated": (np.arange(steps) == steps - 1) & (success is not True) & ends,
        "phase": rng.choice([Phase.POLICY, Phase.CORRECTION, Phase.RECOVERY], steps).astype(np.uint8),
        "safety": rng.integers(0, 9, steps).astype(np.uint16),
        "policy_version": rng.integers(-1, 50, steps),
        "log_prob": np.where(rng.random(steps) < 0.5, np.nan, rng.standard_normal(steps)).astype(np.float32),
        "t_capture_ns": 5_000_000_123 + np.arange(steps) * CAPTURE_PERIOD_NS,
    }
    if phases:
        columns["phase"] = np.array(phases, np.uint8)
    columns["t_inference_ns"] = columns["t_capture_ns"] + 2_000_000
    columns["t_command_ns"] = columns["t_capture_ns"] + 3_000_000
    frames = {camera: [frame(camera, number, raw) for number in range(steps)] for camera in cameras}
    chunks = []
    for index, first in enumerate(range(0, steps, CHUNK_STEPS)):
        rows = slice(first, first + CHUNK_STEPS)
        last = first + CHUNK_STEPS >= steps and ends
        part = {column: values[rows] for column, values in columns.items()}
        for camera in cameras:
            part |= frame_columns(IMAGE_PREFIX + camera, frames[camera][rows], capture_ns(camera, steps)[rows])
        header = chunk_header(
            name,
            len(part["reward"]),
            index=index,
            first_step=first,
            robot=robot,
            embodiment=embodiment,
            task=task,
            sentence=f"{task} the cube",
            source=source,
            seed=11,
            started_unix_ns=STARTED_UNIX_NS,
            unix_offset_ns=STARTED_UNIX_NS - 5_000_000_123,
            end=EpisodeEnd(steps=steps, success=success, reward_source="rule") if last else None,
        )
        final = {"observation.state": rng.standard_normal(size).astype(np.float32)}
        for camera in cameras[:1]:  # the other one has no new frame after the last step
            shown = frame(camera, 3 * steps, raw)
            assert shown is not None
            final[IMAGE_PREFIX + camera] = np.frombuffer(shown, np.uint8) if isinstance(shown, bytes) else shown
        chunks.append(Chunk(header, part, final if last else {}).encode())
    return chunks


def make_store(path: Path, *episodes: list[bytes]) -> Path:
    with StoreWriter.open(path) as writer:
        for chunks in episodes:
            for chunk in chunks:
                writer.append(chunk)
        writer.sync()
    return path


def usual_store(path: Path) -> Path:
    """Three complete episodes of two tasks."""
    return make_store(
        path,
        episode_chunks("a", 10),
        episode_chunks("b", 7, task="push", source=EpisodeSource.DEMO, success=False),
        episode_chunks("c", 5, success=None),
    )


def plan(store: Path, selection: EpisodeFilter = EpisodeFilter(), **options: Any) -> list[DatasetPlan]:  # noqa: B008
    with StoreReader.open(store) as opened:
        reader = EpisodeReader(opened)
        return plan_export(reader, reader.select(selection), load_robot_specs(store), **options)


def export(store: Path, output: Path, selection: EpisodeFilter = EpisodeFilter(), **options: Any) -> list[DatasetPlan]:  # noqa: B008
    plans = plan(store, selection, **options)
    with StoreReader.open(store) as opened:
        export_lerobot(EpisodeReader(opened), plans, output, lambda steps: None)
    return plans


def bring_in(root: Path, store: Path, options: ImportOptions | None = None) -> ImportReport:
    data_set = LerobotDataset.open(root)
    return import_lerobot(data_set, store, options or ImportOptions(), lambda steps: None)


def read_store(path: Path) -> dict[str, StoredEpisode]:
    with StoreReader.open(path) as store:
        reader = EpisodeReader(store)
        return {each.episode: reader.read(each.episode) for each in reader.select(EpisodeFilter(incomplete=True))}


def pictures(episode: StoredEpisode, camera: str) -> list[Array]:
    """The camera's picture at each step."""
    shown: list[Array] = []
    for each in episode.frames[IMAGE_PREFIX + camera]:
        shown.append(shown[-1] if each is None else decode_frame(each))
    return shown


def assert_same(a: StoredEpisode, b: StoredEpisode, *, frames_within: float = 0.0) -> None:
    """Compares step by step; shown frames may differ by a mean of `frames_within` grey levels."""
    assert a.header == b.header and a.chunk_steps == b.chunk_steps
    _assert_columns(a.columns, b.columns)
    _assert_columns(a.final, b.final)
    _assert_columns(a.captured_ns, b.captured_ns)
    assert a.frames.keys() == b.frames.keys()
    for feature in a.frames:
        camera = feature.removeprefix(IMAGE_PREFIX)
        for mine, theirs in zip(pictures(a, camera), pictures(b, camera), strict=True):
            assert np.abs(mine.astype(float) - theirs).mean() <= frames_within


def _assert_columns(a: Mapping[str, Array], b: Mapping[str, Array]) -> None:
    assert a.keys() == b.keys()
    for name, column in a.items():
        assert b[name].dtype == column.dtype, name
        np.testing.assert_array_equal(b[name], column, err_msg=name)
