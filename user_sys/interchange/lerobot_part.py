"""One file of a LeRobot data set with what belongs to it: its steps, its videos, its rows of the episodes' table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hal.durable import sync_folder
from user_sys.codec import Array
from user_sys.errors import DataSetError
from user_sys.interchange import statistics
from user_sys.interchange.episodes import StoredEpisode
from user_sys.interchange.frames import Frame, decode, encode_png
from user_sys.interchange.lerobot_format import (
    COUNTERS,
    DATA_PATH,
    DONE,
    EPISODES_PATH,
    FILES_PER_CHUNK,
    FINAL_PREFIX,
    OURS,
    RENAMED,
    SUCCESS,
    TEXTS,
    VIDEO_PATH,
    Feature,
    capture_feature,
    place,
)
from user_sys.interchange.video import VideoWriter

ROWS_HELD = 64  # of the episodes' table, before they are written

_ASIDE = ".unfinished"  # added to the name of a file that is being written

_OUR_COLUMNS = {
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


def statistics_name(feature: str, statistic: str) -> str:
    """The column of the episodes' table that holds it."""
    return f"stats/{feature}/{statistic}"


class PartWriter:
    """Writes file number `number` of a data set; leaving the context without an error puts it in its place."""

    def __init__(
        self,
        root: Path,
        number: int,
        features: Mapping[str, Feature],
        tasks: Sequence[str],
        fps: float,
        codec: str | None,
    ) -> None:
        self._root, self._number, self._features, self._fps = root, number, features, fps
        self._task_index = {task: index for index, task in enumerate(tasks)}
        self._data = root / place(DATA_PATH, number)
        self._episodes = root / place(EPISODES_PATH, number)
        self._schema = data_schema(features)
        self._rows: list[dict[str, object]] = []
        self._episode = self._row = self._video_steps = 0
        _aside(self._data).parent.mkdir(parents=True, exist_ok=True)
        texts = [name for name, feature in features.items() if feature.dtype == "string"]
        self._writer = pq.ParquetWriter(_aside(self._data), self._schema, use_dictionary=texts)
        self._episodes.parent.mkdir(parents=True, exist_ok=True)
        self._episodes_schema = episodes_schema(features)
        self._episodes_writer = pq.ParquetWriter(_aside(self._episodes), self._episodes_schema)
        self._videos = {
            name: self._open_video(name, each, codec) for name, each in features.items() if codec and each.visual
        }

    def _open_video(self, name: str, feature: Feature, codec: str) -> VideoWriter:
        path = _aside(self._video_path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width, _ = feature.shape
        return VideoWriter(path, height, width, self._fps, codec)

    def _video_path(self, name: str) -> Path:
        return self._root / place(VIDEO_PATH, self._number, name)

    def start(self, episode: int, row: int) -> None:
        """Says which numbers the part's first episode and first step have in the data set."""
        self._episode, self._row = episode, row

    def add(self, episode: StoredEpisode, steps: int) -> None:
        """Adds a whole episode, of which `steps` are expected.

        Raises:
            DataSetError: it has another number of steps, or frames of another size.
        """
        if episode.steps != steps:
            raise DataSetError(
                f"episode {episode.header.episode} has {episode.steps} steps, not {steps} as at the start; export anew"
            )
        columns = self._numeric(episode)
        self._writer.write_table(self._table(episode, columns))
        stats = {name: statistics.of_column(column) for name, column in columns.items()}
        for name, frames in _standing(episode, self._features):
            stats[name] = statistics.of_frames([frame for frame in episode.frames[name] if frame is not None] or frames)
            if name in self._videos:
                for frame in frames:
                    self._videos[name].write(decode(frame))
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
        columns = {RENAMED.get(name, name): column for name, column in episode.columns.items()}
        columns |= {capture_feature(n): times for n, times in episode.captured_ns.items() if n in self._features}
        return {**columns, DONE: over, SUCCESS: last & success, **{name: counters[name] for name in COUNTERS}}

    def _table(self, episode: StoredEpisode, columns: Mapping[str, Array]) -> pa.Table:
        texts = dict(zip(TEXTS, (episode.header.source, episode.header.robot, episode.header.embodiment), strict=True))
        arrays: dict[str, pa.Array] = {name: _vector(column) for name, column in columns.items()}
        arrays |= {name: pa.repeat(str(text), episode.steps) for name, text in texts.items()}
        if not self._videos:
            arrays |= {name: _images(frames) for name, frames in _standing(episode, self._features)}
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
        return row | _our_row(episode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None and self._rows:
            self._write_rows()
        self._writer.close()
        self._episodes_writer.close()
        for video in self._videos.values():
            video.close() if error is None else video.abandon()
        if error is None:
            self._put_in_place()

    def _put_in_place(self) -> None:
        """The episodes' rows last: where they are, the rest is whole."""
        for path in (self._data, *map(self._video_path, self._videos)):
            _settle(path)
        _settle(self._episodes)


def data_schema(features: Mapping[str, Feature]) -> pa.Schema:
    """The columns of a data file: every feature but videos."""
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    fields: list[tuple[str, Any]] = []
    for name, feature in features.items():
        if feature.dtype == "video":
            continue
        scalar = pa.type_for_alias(feature.dtype) if not feature.visual else image
        vector = not feature.visual and feature.shape != (1,)
        fields.append((name, pa.list_(scalar, feature.shape[0]) if vector else scalar))
    return pa.schema(fields)


def _vector(column: Array) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(column).reshape(-1))
    width = column.size // len(column)
    return flat if width == 1 else pa.FixedSizeListArray.from_arrays(flat, width)


def _standing(episode: StoredEpisode, features: Mapping[str, Feature]) -> Iterator[tuple[str, list[Frame]]]:
    """Each camera with a frame for every step: the newest there was, and black before the first."""
    for name, feature in features.items():
        if feature.visual:
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


def _our_row(episode: StoredEpisode) -> dict[str, object]:
    header = episode.header
    end = header.end
    ours: dict[str, object] = {
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
    return {OURS + name: value for name, value in ours.items()} | final


def _flat_statistics(stats: Mapping[str, statistics.Statistics | None]) -> dict[str, object]:
    return {
        statistics_name(feature, name): None if each is None else each[name].tolist()
        for feature, each in stats.items()
        for name in statistics.NAMES
    }


def episodes_schema(features: Mapping[str, Feature]) -> pa.Schema:
    """The columns of the episodes' table."""
    whole, text, vector = pa.int64(), pa.string(), pa.list_(pa.float64())
    counters = ("length", *(f"{kind}_index" for kind in ("data/chunk", "data/file", "dataset_from", "dataset_to")))
    fields: list[tuple[str, Any]] = [("episode_index", whole), ("tasks", pa.list_(text))]
    fields += [(name, whole) for name in (*counters, "meta/episodes/chunk_index", "meta/episodes/file_index")]
    for name, feature in features.items():
        if feature.dtype == "video":
            fields += [(f"videos/{name}/{kind}_index", whole) for kind in ("chunk", "file")]
            fields += [(f"videos/{name}/{kind}_timestamp", pa.float64()) for kind in ("from", "to")]
    fields += [(OURS + name, kind) for name, kind in _OUR_COLUMNS.items()]
    fields += [(FINAL_PREFIX + n, pa.list_(pa.float32())) for n, f in features.items() if _observed(n, f)]
    for name, feature in features.items():
        if feature.dtype != "string":
            shaped = pa.list_(pa.list_(vector)) if feature.visual else vector
            fields += [(statistics_name(name, each), shaped) for each in statistics.NAMES if each != "count"]
            fields.append((statistics_name(name, "count"), pa.list_(whole)))
    return pa.schema(fields)


def _observed(name: str, feature: Feature) -> bool:
    return name.startswith("observation.") and not feature.visual


def _aside(path: Path) -> Path:
    return path.with_name(path.name + _ASIDE)


def _settle(path: Path) -> None:
    """Puts what was written aside in its place, durably."""
    aside = _aside(path)
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)
