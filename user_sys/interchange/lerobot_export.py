"""Exports a store as LeRobot datasets, one per embodiment.

The plan (`ExportPlan`) is written first and assigns episodes to files. Each file is written under a temporary name
and renamed, its rows of the episodes table last. A killed export continues after the last whole file and ends with
the same bytes. ``meta/info.json`` is written last; readers refuse a dataset without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hal.decode_errors import DECODE_ERRORS
from hal.durable import replace_durably, sync_folder
from hal.spec import RobotSpec
from user_sys.codec import Array
from user_sys.errors import DataSetError
from user_sys.interchange import statistics
from user_sys.interchange.episodes import (
    UNFINISHED_SUFFIX,
    EpisodeFilter,
    EpisodeReader,
    StepLayout,
    StoredEpisode,
    load_robot_specs,
)
from user_sys.interchange.frames import Frame, decode_frame, encode_png
from user_sys.interchange.lerobot_format import (
    DATA_FILE_MB,
    DATA_PATH,
    DONE,
    EPISODES_PATH,
    FILES_PER_CHUNK,
    FINAL_PREFIX,
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
from user_sys.interchange.statistics import STATISTIC_NAMES, RunningStatistics
from user_sys.interchange.video import ENCODERS, VideoWriter
from user_sys.store.index import EpisodeSummary
from user_sys.store.store import StoreReader

ROWS_HELD = 64  # of the episodes table, written together


_USER_COLUMNS = {
    "episode": pa.string(),
    "task": pa.string(),
    "sentence": pa.string(),
    "seed": pa.int64(),
    "started_unix_ns": pa.int64(),
    "unix_offset_ns": pa.int64(),
    "complete": pa.bool_(),
    "success": pa.bool_(),
    "reward_source": pa.string(),
    "chunk_steps": pa.list_(pa.int64()),
}
PLAN = "export.json"


def statistics_name(feature: str, statistic: str) -> str:
    """Column of the episodes table with that statistic."""
    return f"stats/{feature}/{statistic}"


class DatasetFileWriter:
    """Writes file number `number` of a dataset; the file gets its name when the context exits without an error."""

    def __init__(
        self,
        root: Path,
        number: int,
        features: Mapping[str, DatasetFeature],
        tasks: Sequence[str],
        fps: float,
        codec: str | None,
    ) -> None:
        self._root, self._number, self._features, self._fps = root, number, features, fps
        self._task_index = {task: index for index, task in enumerate(tasks)}
        self._data = root / file_path(DATA_PATH, number)
        self._episodes = root / file_path(EPISODES_PATH, number)
        self._schema = data_schema(features)
        self._rows: list[dict[str, object]] = []
        self._episode = self._row = self._video_steps = 0
        _unfinished_path(self._data).parent.mkdir(parents=True, exist_ok=True)
        texts = [name for name, feature in features.items() if feature.dtype == "string"]
        self._writer = pq.ParquetWriter(_unfinished_path(self._data), self._schema, use_dictionary=texts)
        self._episodes.parent.mkdir(parents=True, exist_ok=True)
        self._episodes_schema = episodes_schema(features)
        self._episodes_writer = pq.ParquetWriter(_unfinished_path(self._episodes), self._episodes_schema)
        self._videos = {
            name: self._open_video(name, each, codec) for name, each in features.items() if codec and each.is_visual
        }

    def _open_video(self, name: str, feature: DatasetFeature, codec: str) -> VideoWriter:
        path = _unfinished_path(self._video_path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width, _ = feature.shape
        return VideoWriter(path, height, width, self._fps, codec)

    def _video_path(self, name: str) -> Path:
        return self._root / file_path(VIDEO_PATH, self._number, name)

    def start(self, episode: int, row: int) -> None:
        """Sets the dataset numbers of the file's first episode and first step."""
        self._episode, self._row = episode, row

    def add(self, episode: StoredEpisode, steps: int) -> None:
        """Adds a whole episode of `steps` steps.

        Raises:
            DataSetError: the number of steps or a frame size differs.
        """
        if episode.steps != steps:
            raise DataSetError(
                f"episode {episode.header.episode} has {episode.steps} steps, not {steps} as planned; export again"
            )
        columns = self._numeric(episode)
        self._writer.write_table(self._table(episode, columns))
        stats = {name: statistics.column_statistics(column) for name, column in columns.items()}
        for name, frames in _displayed_frames(episode, self._features):
            stats[name] = statistics.frame_statistics(
                [frame for frame in episode.frames[name] if frame is not None] or frames
            )
            if name in self._videos:
                for frame in frames:
                    self._videos[name].write(decode_frame(frame))
        self._rows.append(self._episode_row(episode) | _flat_statistics(stats))
        if len(self._rows) == ROWS_HELD:
            self._write_rows()
        self._episode += 1
        self._row += steps
        self._video_steps += steps

    def _write_rows(self) -> None:
        self._episodes_writer.write_table(pa.Table.from_pylist(self._rows, self._episodes_schema))
        self._rows = []

    def _numeric(self, episode: StoredEpisode) -> dict[str, Array]:
        header, steps = episode.header, episode.steps
        frame_index = np.arange(steps)
        counters: dict[str, Array] = {
            "timestamp": (frame_index / self._fps).astype(np.float32),
            "frame_index": frame_index,
            "episode_index": np.full(steps, self._episode),
            "index": self._row + frame_index,
            "task_index": np.full(steps, self._task_index[header.sentence or header.task]),
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
        header = episode.header
        chunk, file = divmod(self._number, FILES_PER_CHUNK)
        row: dict[str, object] = {
            "episode_index": self._episode,
            "tasks": [header.sentence or header.task],
            "length": episode.steps,
            "data/chunk_index": chunk,
            "data/file_index": file,
            "dataset_from_index": self._row,
            "dataset_to_index": self._row + episode.steps,
            "meta/episodes/chunk_index": chunk,
            "meta/episodes/file_index": file,
        }
        for name in self._videos:
            row |= {f"videos/{name}/chunk_index": chunk, f"videos/{name}/file_index": file}
            row[f"videos/{name}/from_timestamp"] = self._video_steps / self._fps
            row[f"videos/{name}/to_timestamp"] = (self._video_steps + episode.steps) / self._fps
        return row | _user_columns(episode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None and self._rows:
            self._write_rows()
        self._writer.close()
        self._episodes_writer.close()
        for video in self._videos.values():
            video.close() if error is None else video.abort()
        if error is None:
            self._finish_files()

    def _finish_files(self) -> None:
        """Renames all files, the episodes table last: its existence shows that the others are whole."""
        for path in (self._data, *map(self._video_path, self._videos)):
            _finish_file(path)
        _finish_file(self._episodes)


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
    header = episode.header
    end = header.end
    values: dict[str, object] = {
        "episode": header.episode,
        "task": header.task,
        "sentence": header.sentence,
        "seed": header.seed,
        "started_unix_ns": header.started_unix_ns,
        "unix_offset_ns": header.unix_offset_ns,
        "complete": end is not None,
        "success": end.success if end else None,
        "reward_source": end.reward_source if end else "",
        "chunk_steps": list(episode.chunk_steps),
    }
    final = {FINAL_PREFIX + name: value.tolist() for name, value in episode.final.items()}
    return {USER_PREFIX + name: value for name, value in values.items()} | final


def _flat_statistics(stats: Mapping[str, statistics.Statistics | None]) -> dict[str, object]:
    return {
        statistics_name(feature, name): None if each is None else each[name].tolist()
        for feature, each in stats.items()
        for name in statistics.STATISTIC_NAMES
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
    fields += [(USER_PREFIX + name, kind) for name, kind in _USER_COLUMNS.items()]
    fields += [(FINAL_PREFIX + n, pa.list_(pa.float32())) for n, f in features.items() if _observed(n, f)]
    for name, feature in features.items():
        if feature.dtype != "string":
            shaped = pa.list_(pa.list_(vector)) if feature.is_visual else vector
            fields += [(statistics_name(name, each), shaped) for each in statistics.STATISTIC_NAMES if each != "count"]
            fields.append((statistics_name(name, "count"), pa.list_(whole)))
    return pa.schema(fields)


def _observed(name: str, feature: DatasetFeature) -> bool:
    return name.startswith("observation.") and not feature.is_visual


def _unfinished_path(path: Path) -> Path:
    return path.with_name(path.name + UNFINISHED_SUFFIX)


def _finish_file(path: Path) -> None:
    """Renames the temporary file, durably."""
    aside = _unfinished_path(path)
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


class LerobotExportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Export options.

    Attributes:
        codec: ``h264`` or ``av1`` for video; None stores images (JPEG files unchanged, raw frames as PNG).
        fps: control rate in Hz; None takes it from the specs or, without these, from the recorded times.
        file_mb: approximate size of the experience per file.
    """

    selection: EpisodeFilter = EpisodeFilter()
    codec: str | None = None
    fps: float | None = None
    file_mb: float = DATA_FILE_MB


class PlannedEpisode(msgspec.Struct, frozen=True, array_like=True):
    episode: str
    steps: int


class DatasetPlan(msgspec.Struct, frozen=True):
    """One dataset: `parts` are its files, each a list of episodes in order."""

    folder: str
    embodiment: str
    robot_type: str | None
    fps: float
    features: dict[str, DatasetFeature]
    tasks: list[str]
    parts: list[list[PlannedEpisode]]

    @property
    def episodes(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def steps(self) -> int:
        return sum(each.steps for part in self.parts for each in part)


class ExportPlan(msgspec.Struct, frozen=True):
    """Options of an export and its division into datasets; ``export.json`` in the output folder."""

    store: str
    options: LerobotExportOptions
    data_sets: list[DatasetPlan]

    @property
    def steps(self) -> int:
        return sum(data_set.steps for data_set in self.data_sets)


def open_plan(store: Path, output: Path, options: LerobotExportOptions) -> ExportPlan:
    """The plan of an interrupted export in `output`, or a new one, which is written.

    Raises:
        DataSetError: `output` has other content, or no episode matches.
        StoreError: the store cannot be read.
    """
    if options.codec not in (None, *ENCODERS):
        raise DataSetError(f"no codec {options.codec!r}; there are {', '.join(ENCODERS)}")
    path = output / PLAN
    if path.exists():
        return _earlier_plan(path, store, options)
    if output.exists() and any(output.iterdir()):
        raise DataSetError(f"{output} is not empty and holds no export to continue; choose another --output")
    with StoreReader.open(store) as reader:
        plan = make_plan(EpisodeReader(reader), store, options, load_robot_specs(store))
    replace_durably(path, msgspec.json.encode(plan))
    return plan


def _earlier_plan(path: Path, store: Path, options: LerobotExportOptions) -> ExportPlan:
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=ExportPlan)
    except DECODE_ERRORS as error:
        raise DataSetError(f"{path} is damaged ({error}); remove {path.parent} and export again") from None
    if plan.options != options or plan.store != str(store.resolve()):
        raise DataSetError(
            f"{path.parent} holds an export of {plan.store} with other options; choose another --output, or remove it"
        )
    return plan


def make_plan(
    reader: EpisodeReader, store: Path, options: LerobotExportOptions, specs: Mapping[str, RobotSpec]
) -> ExportPlan:
    """Divides the filtered episodes into datasets of one embodiment and layout, and these into files."""
    groups: dict[tuple[str, StepLayout], list[EpisodeSummary]] = {}
    for episode in reader.select(options.selection):
        groups.setdefault((episode.embodiment, reader.layout(episode.episode)), []).append(episode)
    folders = _folders([embodiment for embodiment, _ in groups])
    return ExportPlan(
        store=str(store.resolve()),
        options=options,
        data_sets=[
            _plan_data_set(reader, folder, layout, episodes, options, specs.get(embodiment))
            for folder, ((embodiment, layout), episodes) in zip(folders, groups.items(), strict=True)
        ],
    )


def _folders(embodiments: list[str]) -> list[str]:
    """One folder per dataset, named by the embodiment; the output folder itself for a single dataset."""
    if len(embodiments) == 1:
        return [""]
    seen: dict[str, int] = {}
    folders = []
    for name in embodiments:
        seen[name] = seen.get(name, 0) + 1
        folders.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return folders


def _plan_data_set(
    reader: EpisodeReader,
    folder: str,
    layout: StepLayout,
    episodes: list[EpisodeSummary],
    options: LerobotExportOptions,
    spec: RobotSpec | None,
) -> DatasetPlan:
    fps = options.fps or (spec.rate_hz if spec else _recorded_rate(reader, episodes[0].episode))
    return DatasetPlan(
        folder=folder,
        embodiment=episodes[0].embodiment,
        robot_type=spec.model if spec else None,
        fps=float(fps),
        features=features_of(layout, options.codec, fps, spec),
        tasks=list(dict.fromkeys(reader.sentence(episode.episode) for episode in episodes)),
        parts=list(_parts(reader, episodes, options.file_mb * 1e6)),
    )


def _recorded_rate(reader: EpisodeReader, episode: str) -> float:
    """Steps per second by capture times, rounded to integers; 1 if unknown."""
    times = reader.read(episode).columns.get("t_capture_ns")
    if times is None or len(times) < 2:
        return 1.0
    period_ns = float(np.median(np.diff(times)))
    return max(1.0, round(1e9 / period_ns)) if period_ns > 0 else 1.0


def _parts(reader: EpisodeReader, episodes: list[EpisodeSummary], part_bytes: float) -> Iterator[list[PlannedEpisode]]:
    part: list[PlannedEpisode] = []
    held = 0
    for episode in episodes:
        if part and held + episode.size_bytes > part_bytes:
            yield part
            part, held = [], 0
        part.append(PlannedEpisode(episode.episode, reader.steps(episode.episode)))
        held += episode.size_bytes
    yield part


def export_lerobot(plan: ExportPlan, output: Path, advance: Callable[[int], object]) -> None:
    """Executes `plan` in `output`, skipping whole files; holds at most one episode in memory.

    `advance` is called with the number of finished steps, including those of earlier runs.

    Raises:
        DataSetError: an episode does not fit, or changed since the plan.
        StoreError: the store cannot be read. OSError: the output cannot be written.
    """
    with StoreReader.open(Path(plan.store)) as store:
        reader = EpisodeReader(store)
        for data_set in plan.data_sets:
            root = output / data_set.folder
            if (root / INFO).exists():
                advance(data_set.steps)
                continue
            _write_parts(reader, data_set, root, plan.options.codec, advance)
            _finish(data_set, root)


def _write_parts(
    reader: EpisodeReader, data_set: DatasetPlan, root: Path, codec: str | None, advance: Callable[[int], object]
) -> None:
    first_episode = first_row = 0
    for number, part in enumerate(data_set.parts):
        steps = sum(each.steps for each in part)
        if (root / file_path(EPISODES_PATH, number)).exists():
            advance(steps)
        else:
            with DatasetFileWriter(root, number, data_set.features, data_set.tasks, data_set.fps, codec) as writer:
                writer.start(first_episode, first_row)
                for each in part:
                    writer.add(reader.read(each.episode), each.steps)
                    advance(each.steps)
        first_episode += len(part)
        first_row += steps


def _finish(data_set: DatasetPlan, root: Path) -> None:
    """Writes statistics and tasks, and ``meta/info.json`` last."""
    statistics = _merged(data_set.features, (root / file_path(EPISODES_PATH, n) for n in range(len(data_set.parts))))
    replace_durably(root / STATS, json.dumps(statistics, indent=1).encode())
    sink = pa.BufferOutputStream()
    pq.write_table(_tasks(data_set.tasks), sink)
    replace_durably(root / TASKS, sink.getvalue().to_pybytes())
    video = any(feature.dtype == "video" for feature in data_set.features.values())
    info = DatasetInfo(
        codebase_version=LEROBOT_VERSION,
        robot_type=data_set.robot_type,
        fps=int(data_set.fps) if data_set.fps.is_integer() else data_set.fps,
        features=data_set.features,
        total_episodes=data_set.episodes,
        total_frames=data_set.steps,
        total_tasks=len(data_set.tasks),
        splits={"train": f"0:{data_set.episodes}"},
    )
    fields = msgspec.to_builtins(info)
    for feature in fields["features"].values():
        feature.setdefault("names", None)  # LeRobot requires the key
    if not video:
        fields["video_path"] = None
    replace_durably(root / INFO, json.dumps(fields, indent=1).encode())


def _merged(features: Iterable[str], files: Iterable[Path]) -> dict[str, dict[str, object]]:
    running: dict[str, RunningStatistics] = {}
    for path in files:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS_HELD):
                _merge(batch, features, running)
    return {
        feature: {name: value.tolist() for name, value in each.result().items()} for feature, each in running.items()
    }


def _merge(batch: pa.RecordBatch, features: Iterable[str], running: dict[str, RunningStatistics]) -> None:
    for feature in features:
        names = [statistics_name(feature, name) for name in STATISTIC_NAMES]
        if names[0] not in batch.schema.names:
            continue
        for values in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
            if values[0] is not None:
                new = {name: np.array(value) for name, value in zip(STATISTIC_NAMES, values, strict=True)}
                running.setdefault(feature, RunningStatistics()).add(new)


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
