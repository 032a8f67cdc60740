"""Exports a store as LeRobot datasets, one per embodiment and layout of steps.

Statistics are exact but for quantiles of several episodes, which are count-weighted means, as in LeRobot.
``meta/info.json`` is written last, when all other files are durable; readers refuse a dataset without it. A broken
export is deleted and started again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hal.durable import replace_durably, sync_folder
from hal.spec import RobotSpec
from user_sys.codec import Array
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import EpisodeReader, StepLayout, StoredEpisode, convert_angles, is_camera
from user_sys.interchange.frames import Frame, decode_frame, encode_png
from user_sys.interchange.lerobot_format import (
    DATA_FILE_MB,
    DATA_PATH,
    DONE,
    EPISODES_PATH,
    FILES_PER_CHUNK,
    FINAL_PREFIX,
    IN_DEGREES,
    INDEX_FEATURES,
    INFO,
    LEROBOT_NAMES,
    LEROBOT_VERSION,
    STATS,
    SUCCESS,
    TASK_INDEX_NAME,
    TASKS,
    TEXT_FEATURES,
    USER_PREFIX,
    VIDEO_PATH,
    DatasetFeature,
    DatasetInfo,
    capture_feature,
    features_of,
    file_path,
)
from user_sys.store.index import EpisodeSummary
from user_sys.video import VideoWriter

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
STATISTIC_NAMES = ("min", "max", "mean", "std", "count", *QUANTILES)
MAX_FRAMES = 24  # of an episode, for its statistics
MAX_PIXELS = 96  # per side of such a frame

Statistics = Mapping[str, Array]

_USER_COLUMNS: Mapping[str, tuple[pa.DataType, Callable[[StoredEpisode], object]]] = {
    "episode": (pa.string(), lambda episode: episode.exported_id),
    "task": (pa.string(), lambda episode: episode.header.task),
    "sentence": (pa.string(), lambda episode: episode.header.sentence),
    "seed": (pa.int64(), lambda episode: episode.header.seed),
    "started_unix_ns": (pa.int64(), lambda episode: episode.header.started_unix_ns),
    "unix_offset_ns": (pa.int64(), lambda episode: episode.header.unix_offset_ns),
    "complete": (pa.bool_(), lambda episode: episode.header.end is not None),
    "success": (pa.bool_(), lambda episode: episode.header.end and episode.header.end.success),
    "reward_source": (pa.string(), lambda episode: episode.header.end.reward_source if episode.header.end else ""),
    "chunk_steps": (pa.list_(pa.int64()), lambda episode: list(episode.chunk_steps)),
}
"""Of the episodes' table, besides LeRobot's own: type and value."""


def column_statistics(column: Array) -> Statistics | None:
    """Of a column (T, d) or (T,); None if a value is not finite, such as a missing log-probability."""
    values = np.ascontiguousarray(column.reshape(len(column), -1).T, np.float64)  # contiguous sums
    if not np.isfinite(values).all():
        return None
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=1)
    return {
        "min": values.min(axis=1),
        "max": values.max(axis=1),
        "mean": values.mean(axis=1),
        "std": values.std(axis=1),
        "count": np.array([len(column)]),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }


def frame_statistics(frames: Sequence[Frame]) -> Statistics:
    """Of evenly spaced, subsampled `frames`; needs at least one."""
    chosen = np.unique(np.linspace(0, len(frames) - 1, MAX_FRAMES).round().astype(int))
    thinned = []
    for number in chosen:
        picture = decode_frame(frames[number])
        stride = -(-max(picture.shape[:2]) // MAX_PIXELS)
        thinned.append(picture[::stride, ::stride].reshape(-1, 3))
    statistics = column_statistics(np.concatenate(thinned))
    assert statistics is not None  # bytes are finite
    shaped = {name: (value / 255.0).reshape(3, 1, 1) for name, value in statistics.items() if name != "count"}
    return {**shaped, "count": np.array([len(chosen)])}


def merged(one: Statistics | None, other: Statistics) -> Statistics:
    """Statistics of both parts together; `one` may be missing.

    Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983.
    """
    if one is None:
        return other
    count = one["count"] + other["count"]
    share = other["count"][0] / count[0]
    away = other["mean"] - one["mean"]
    variance = one["std"] ** 2 * (1 - share) + other["std"] ** 2 * share + away**2 * share * (1 - share)
    return {
        "min": np.minimum(one["min"], other["min"]),
        "max": np.maximum(one["max"], other["max"]),
        "mean": one["mean"] + away * share,
        "std": np.sqrt(variance),
        "count": count,
        **{name: one[name] + (other[name] - one[name]) * share for name in QUANTILES},
    }


@dataclass(frozen=True)
class DatasetPlan:
    """One dataset: `files` are lists of its episodes in order.

    Attributes:
        folder: its path in the output; empty for a single dataset.
        video: store frames as video, otherwise as images (JPEG files unchanged, raw frames as PNG).
        spec: of the robot, if the store has it.
        use_degrees: the angles of `spec` are written in degrees; otherwise as recorded.
    """

    folder: str
    embodiment: str
    robot_type: str | None
    fps: float
    video: bool
    features: dict[str, DatasetFeature]
    tasks: list[str]
    files: list[list[str]]
    steps: int
    spec: RobotSpec | None = None
    use_degrees: bool = False

    @property
    def episodes(self) -> int:
        return sum(map(len, self.files))


def plan_export(
    reader: EpisodeReader,
    episodes: Iterable[EpisodeSummary],
    specs: Mapping[str, RobotSpec],
    *,
    video: bool = False,
    fps: float | None = None,
    file_mb: float = DATA_FILE_MB,
    use_degrees: bool = False,
) -> list[DatasetPlan]:
    """Divides episodes into datasets of one embodiment and layout, and these into files.

    Args:
        specs: by embodiment; they give names and rates.
        fps: control rate in Hz; None takes it from the specs or, without these, from the recorded times.
        file_mb: approximate size of the experience per file.
        use_degrees: write angles in degrees, as LeRobot's arms with that setting have them.

    Raises:
        DataSetError: a column has no place in the format, or `specs` lacks the embodiment whose angles are converted.
    """
    groups: dict[tuple[str, StepLayout], list[EpisodeSummary]] = {}
    for episode in episodes:
        groups.setdefault((episode.embodiment, reader.layout(episode.episode)), []).append(episode)
    plans, names = [], list[str]()
    for (embodiment, layout), group in groups.items():
        spec = specs.get(embodiment)
        if use_degrees and spec is None:
            raise DataSetError(
                f"--use-degrees needs the spec of embodiment {embodiment}, which the store lacks; export the store of "
                "the run that recorded it"
            )
        rate = fps or (spec.rate_hz if spec else _recorded_rate(reader, group[0].episode))
        names.append(embodiment)
        number = names.count(embodiment)
        plan = DatasetPlan(
            folder="" if len(groups) == 1 else embodiment if number == 1 else f"{embodiment}-{number}",
            embodiment=embodiment,
            robot_type=spec.model if spec else None,
            fps=float(rate),
            video=video,
            features=features_of(layout, video, rate, spec),
            tasks=list(dict.fromkeys(reader.sentence(episode.episode) for episode in group)),
            files=list(_files(group, file_mb * 1e6)),
            steps=sum(reader.steps(episode.episode) for episode in group),
            spec=spec,
            use_degrees=use_degrees,
        )
        plans.append(plan)
    return plans


def _recorded_rate(reader: EpisodeReader, episode: str) -> float:
    """Steps per second by capture times, rounded to integers; 1 if unknown."""
    times = reader.read(episode).columns.get("t_capture_ns")
    if times is None or len(times) < 2:
        return 1.0
    period_ns = float(np.median(np.diff(times)))
    return max(1.0, round(1e9 / period_ns)) if period_ns > 0 else 1.0


def _files(episodes: Sequence[EpisodeSummary], file_bytes: float) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for episode in episodes:
        if names and held + episode.size_bytes > file_bytes:
            yield names
            names, held = [], 0
        names.append(episode.episode)
        held += episode.size_bytes
    yield names


def export_lerobot(
    reader: EpisodeReader, plans: Sequence[DatasetPlan], output: Path, advance: Callable[[int], object]
) -> None:
    """Writes the datasets into `output`; holds at most one episode in memory.

    `advance` is called with the number of steps of each finished episode.

    Raises:
        DataSetError: `output` is not empty, or an episode does not fit.
        StoreError: the store cannot be read. OSError: the output cannot be written.
    """
    if output.exists() and any(output.iterdir()):
        raise DataSetError(f"{output} is not empty; remove it, or choose another --output")
    for plan in plans:
        writer = _DatasetWriter(output / plan.folder, plan)
        for number, names in enumerate(plan.files):
            with _FileWriter(writer, number) as file:
                for name in names:
                    episode = reader.read(name)
                    file.add(episode)
                    advance(episode.steps)
        writer.finish()


class _DatasetWriter:
    """One dataset: its counters and the statistics of its features."""

    def __init__(self, root: Path, plan: DatasetPlan) -> None:
        self.root, self.plan = root, plan
        self.episodes = self.rows = 0
        self._statistics: dict[str, Statistics] = {}

    def add_statistics(self, found: Mapping[str, Statistics | None]) -> None:
        for name, each in found.items():
            if each is not None:
                self._statistics[name] = merged(self._statistics.get(name), each)

    def finish(self) -> None:
        """Writes statistics and tasks, and ``meta/info.json`` last."""
        plan = self.plan
        stats = {name: {key: v.tolist() for key, v in each.items()} for name, each in self._statistics.items()}
        replace_durably(self.root / STATS, json.dumps(stats, indent=1).encode())
        sink = pa.BufferOutputStream()
        pq.write_table(_tasks(plan.tasks), sink)
        replace_durably(self.root / TASKS, sink.getvalue().to_pybytes())
        info = DatasetInfo(
            codebase_version=LEROBOT_VERSION,
            robot_type=plan.robot_type,
            fps=int(plan.fps) if plan.fps.is_integer() else plan.fps,
            features=plan.features,
            total_episodes=plan.episodes,
            total_frames=plan.steps,
            total_tasks=len(plan.tasks),
            splits={"train": f"0:{plan.episodes}"},
        )
        fields = msgspec.to_builtins(info)
        for feature in fields["features"].values():
            feature.setdefault("names", None)  # LeRobot requires the key
        if not plan.video:
            fields["video_path"] = None
        replace_durably(self.root / INFO, json.dumps(fields, indent=1).encode())


class _FileWriter:
    """Writes file number `number` of a dataset; it is durable when the context exits without an error."""

    def __init__(self, dataset: _DatasetWriter, number: int) -> None:
        self._dataset, self._number, self._plan = dataset, number, dataset.plan
        self._features, self._fps = dataset.plan.features, dataset.plan.fps
        self._episodes: list[dict[str, object]] = []
        self._video_steps = 0
        self._paths: list[Path] = []
        self._schema = data_schema(self._features)
        texts = [name for name, feature in self._features.items() if feature.dtype == "string"]
        self._writer = pq.ParquetWriter(self._path(DATA_PATH), self._schema, use_dictionary=texts)
        self._videos = {
            name: VideoWriter(self._path(VIDEO_PATH, name), each.shape[0], each.shape[1], self._fps)
            for name, each in self._features.items()
            if self._plan.video and each.is_visual
        }

    def _path(self, template: str, feature: str = "") -> Path:
        path = self._dataset.root / file_path(template, self._number, feature)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._paths.append(path)
        return path

    def add(self, episode: StoredEpisode) -> None:
        """Adds a whole episode. Raises DataSetError: a frame has another size, or a vector than in the spec."""
        if self._plan.use_degrees and (spec := self._plan.spec) is not None:
            vectors, final = (convert_angles(each, spec, to_degrees=True) for each in (episode.columns, episode.final))
            episode = replace(episode, columns=vectors, final=final)
        columns = self._numeric(episode)
        self._writer.write_table(self._table(episode, columns))
        stats = {name: column_statistics(column) for name, column in columns.items()}
        for name, frames in _displayed_frames(episode, self._features):
            stats[name] = frame_statistics([frame for frame in episode.frames[name] if frame is not None] or frames)
            if name in self._videos:
                for frame in frames:
                    self._videos[name].write(decode_frame(frame))
        self._dataset.add_statistics(stats)
        self._episodes.append(self._episode_row(episode) | _flat_statistics(stats))
        self._dataset.episodes += 1
        self._dataset.rows += episode.steps
        self._video_steps += episode.steps

    def _numeric(self, episode: StoredEpisode) -> dict[str, Array]:
        header, steps = episode.header, episode.steps
        frame_index = np.arange(steps)
        counters: dict[str, Array] = {
            "timestamp": (frame_index / self._fps).astype(np.float32),
            "frame_index": frame_index,
            "episode_index": np.full(steps, self._dataset.episodes),
            "index": self._dataset.rows + frame_index,
            "task_index": np.full(steps, self._plan.tasks.index(header.sentence or header.task)),
        }
        last = frame_index == steps - 1
        never = np.zeros(steps, bool)
        over = episode.columns.get("terminated", never) | episode.columns.get("truncated", never)
        success = header.end is not None and header.end.success is True
        columns = {LEROBOT_NAMES.get(name, name): column for name, column in episode.columns.items()}
        columns |= {capture_feature(n): times for n, times in episode.captured_ns.items() if n in self._features}
        return {**columns, DONE: over, SUCCESS: last & success, **{name: counters[name] for name in INDEX_FEATURES}}

    def _table(self, episode: StoredEpisode, columns: Mapping[str, Array]) -> pa.Table:
        texts = dict(
            zip(TEXT_FEATURES, (episode.header.source, episode.header.robot, episode.header.embodiment), strict=True)
        )
        arrays: dict[str, pa.Array] = {name: _vector(column) for name, column in columns.items()}
        arrays |= {name: pa.repeat(str(text), episode.steps) for name, text in texts.items()}
        if not self._videos:
            arrays |= {name: _images(frames) for name, frames in _displayed_frames(episode, self._features)}
        return pa.table({name: arrays[name] for name in self._schema.names}, schema=self._schema)

    def _episode_row(self, episode: StoredEpisode) -> dict[str, object]:
        header, first = episode.header, self._dataset.rows
        chunk, file = divmod(self._number, FILES_PER_CHUNK)
        row: dict[str, object] = {
            "episode_index": self._dataset.episodes,
            "tasks": [header.sentence or header.task],
            "length": episode.steps,
            "data/chunk_index": chunk,
            "data/file_index": file,
            "dataset_from_index": first,
            "dataset_to_index": first + episode.steps,
            "meta/episodes/chunk_index": chunk,
            "meta/episodes/file_index": file,
        }
        for name in self._videos:
            row |= {f"videos/{name}/chunk_index": chunk, f"videos/{name}/file_index": file}
            row[f"videos/{name}/from_timestamp"] = self._video_steps / self._fps
            row[f"videos/{name}/to_timestamp"] = (self._video_steps + episode.steps) / self._fps
        in_degrees = self._plan.use_degrees if self._plan.spec else None  # without a spec their unit is not known
        return row | {IN_DEGREES: in_degrees} | _user_columns(episode)

    def __enter__(self) -> _FileWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()
        for video in self._videos.values():
            video.close() if error[0] is None else video.abort()
        if error[0] is None:
            table = pa.Table.from_pylist(self._episodes, episodes_schema(self._features))
            pq.write_table(table, self._path(EPISODES_PATH))
            for path in self._paths:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                sync_folder(path.parent)


def data_schema(features: Mapping[str, DatasetFeature]) -> pa.Schema:
    """Columns of a data file: every feature except videos."""
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    fields: list[tuple[str, Any]] = []
    for name, feature in features.items():
        if feature.dtype == "video":
            continue
        scalar = pa.type_for_alias(feature.dtype) if not feature.is_visual else image
        vector = not feature.is_visual and feature.shape != (1,)
        fields.append((name, pa.list_(scalar, feature.shape[0]) if vector else scalar))
    return pa.schema(fields)


def _vector(column: Array) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(column).reshape(-1))
    width = column.size // len(column)
    return flat if width == 1 else pa.FixedSizeListArray.from_arrays(flat, width)


def _displayed_frames(
    episode: StoredEpisode, features: Mapping[str, DatasetFeature]
) -> Iterator[tuple[str, list[Frame]]]:
    """Each camera's frame at every step: the newest one, and black before the first."""
    for name, feature in features.items():
        if feature.is_visual:
            standing: Frame = np.zeros(feature.shape, np.uint8)
            frames = []
            for frame in episode.frames[name]:
                standing = standing if frame is None else frame
                frames.append(standing)
            yield name, frames


def _images(frames: Sequence[Frame]) -> pa.Array:
    files: list[bytes] = []
    for number, frame in enumerate(frames):
        again = number > 0 and frame is frames[number - 1]
        files.append(files[-1] if again else frame if isinstance(frame, bytes) else encode_png(frame))
    suffix = ["jpg" if isinstance(frame, bytes) else "png" for frame in frames]
    paths = [f"frame-{number:06d}.{kind}" for number, kind in enumerate(suffix)]
    return pa.StructArray.from_arrays([pa.array(files, pa.binary()), pa.array(paths)], ["bytes", "path"])


def _user_columns(episode: StoredEpisode) -> dict[str, object]:
    values: dict[str, object] = {USER_PREFIX + name: value(episode) for name, (_, value) in _USER_COLUMNS.items()}
    return values | {FINAL_PREFIX + name: _final_value(name, value) for name, value in episode.final.items()}


def _final_value(name: str, value: Array) -> object:
    """A vector as a list; a picture as an image file."""
    if not is_camera(name):
        return value.tolist()
    return value.tobytes() if value.ndim == 1 else encode_png(value.reshape(value.shape[-3:]))


def _flat_statistics(stats: Mapping[str, Statistics | None]) -> dict[str, object]:
    return {
        f"stats/{feature}/{name}": None if each is None else each[name].tolist()
        for feature, each in stats.items()
        for name in STATISTIC_NAMES
    }


def episodes_schema(features: Mapping[str, DatasetFeature]) -> pa.Schema:
    """Columns of the episodes table."""
    whole, text, vector = pa.int64(), pa.string(), pa.list_(pa.float64())
    counters = ("length", *(f"{kind}_index" for kind in ("data/chunk", "data/file", "dataset_from", "dataset_to")))
    fields: list[tuple[str, Any]] = [("episode_index", whole), ("tasks", pa.list_(text))]
    fields += [(name, whole) for name in (*counters, "meta/episodes/chunk_index", "meta/episodes/file_index")]
    for name, feature in features.items():
        if feature.dtype == "video":
            fields += [(f"videos/{name}/{kind}_index", whole) for kind in ("chunk", "file")]
            fields += [(f"videos/{name}/{kind}_timestamp", pa.float64()) for kind in ("from", "to")]
    fields += [(IN_DEGREES, pa.bool_()), *((USER_PREFIX + name, kind) for name, (kind, _) in _USER_COLUMNS.items())]
    for name, feature in features.items():
        if name.startswith("observation."):
            fields.append((FINAL_PREFIX + name, pa.binary() if feature.is_visual else pa.list_(pa.float32())))
    for name, feature in features.items():
        if feature.dtype != "string":
            shaped = pa.list_(pa.list_(vector)) if feature.is_visual else vector
            fields += [(f"stats/{name}/{each}", shaped) for each in STATISTIC_NAMES if each != "count"]
            fields.append((f"stats/{name}/count", pa.list_(whole)))
    return pa.schema(fields)


def _tasks(tasks: list[str]) -> pa.Table:
    """A table that pandas reads with the sentences as its index."""
    text = {"name": None, "field_name": TASK_INDEX_NAME, "pandas_type": "unicode", "numpy_type": "object"}
    number = {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    pandas = {
        "index_columns": [TASK_INDEX_NAME],
        "column_indexes": [],
        "columns": [{**number, "metadata": None}, {**text, "metadata": None}],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.0.0",
    }
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), TASK_INDEX_NAME: tasks})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})
