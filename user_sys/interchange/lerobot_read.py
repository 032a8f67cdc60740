"""Reads LeRobot data sets v3, ours and others', an episode at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hal.undecodable import UNDECODABLE
from user_sys.codec import DTYPES, Array
from user_sys.errors import DataSetError
from user_sys.interchange.frames import Frame, decode_file, frame_size
from user_sys.interchange.lerobot_format import INFO, TASKS, Feature, Info
from user_sys.interchange.video import VideoReader

READ_ROWS = 256  # decoded from Parquet at a time
_BROKEN = (pa.ArrowException, OSError)  # what pyarrow raises
_NUMBER = re.compile(r"(0?\d?d)?")  # how a path may write a number: a width of many digits would fill the memory


@dataclass(frozen=True)
class ForeignEpisode:
    """An episode of T steps as the data set has it.

    Attributes:
        facts: its row of the episodes' table, statistics left out.
        columns: numeric features, (T,) where one number is declared, otherwise (T, ...).
        texts: text features, T each.
        sentence: its task.
    """

    facts: Mapping[str, Any]
    columns: Mapping[str, Array]
    texts: Mapping[str, list[str]]
    sentence: str
    _table: pa.Table
    _source: LerobotDataSet

    @property
    def steps(self) -> int:
        return int(self._table.num_rows)

    @property
    def index(self) -> int:
        return int(self.facts["episode_index"])

    def frames(self, feature: str) -> Iterator[Frame]:
        """T frames of a camera, each decoded only when it is drawn; JPEG files stay files. Raises DataSetError."""
        return self._source.frames(feature, self._table, self.facts)


class LerobotDataSet:
    """A data set in the folder `root`. One thread reads it, from the first episode to the last."""

    def __init__(self, root: Path, info: Info, tasks: Mapping[int, str]) -> None:
        self._root, self.info, self._tasks = root, info, tasks
        self._rows: _RowReader | None = None
        self._videos: dict[str, tuple[Path, VideoReader]] = {}

    @classmethod
    def open(cls, root: Path) -> LerobotDataSet:
        """Reads what the data set says of itself.

        Raises:
            DataSetError: `root` is no data set, or of another version.
        """
        info = _read_info(root)
        if not info.codebase_version.startswith("v3."):
            raise DataSetError(
                f"{root} is a LeRobot data set {info.codebase_version}, and v3 is needed; LeRobot converts it: "
                "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30"
            )
        if info.fps <= 0:
            raise DataSetError(f"{root / INFO} says {info.fps} frames a second")
        for template in (info.data_path, info.video_path or ""):
            _require_template(root, template)
        return cls(root, info, _read_tasks(root / TASKS))

    def cameras(self) -> list[str]:
        return [name for name, feature in self.info.features.items() if feature.visual]

    def episodes(self) -> Iterator[ForeignEpisode]:
        """Every episode in order, each valid until the next is drawn.

        Raises:
            DataSetError: a file is missing or broken, or does not hold what ``meta/info.json`` says.
        """
        for facts in self._facts():
            table = self._rows_of(facts)
            yield ForeignEpisode(
                facts=facts,
                columns=self._columns(table),
                texts={n: table[n].to_pylist() for n, f in self.info.features.items() if f.dtype == "string"},
                sentence=self._sentence(facts, table),
                _table=table,
                _source=self,
            )

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        for _, video in self._videos.values():
            video.close()

    def _facts(self) -> Iterator[dict[str, Any]]:
        files = sorted((self._root / "meta/episodes").glob("*/*.parquet"))
        if not files:
            raise DataSetError(f"{self._root / 'meta/episodes'} has no file; the data set is not whole")
        for path in files:
            try:
                names = [n for n in pq.read_schema(path).names if not n.startswith("stats/")]
                rows = pq.read_table(path, columns=names).to_pylist()
            except _BROKEN as error:
                raise _broken(path, error) from None
            for row in rows:
                missing = {"episode_index", "length", "data/chunk_index", "data/file_index"} - row.keys()
                if missing:
                    raise DataSetError(f"{path} has no column {min(missing)!r}; the data set is not v3 or not whole")
                if not row["length"] or row["length"] < 1:
                    raise DataSetError(f"{path}: episode {row['episode_index']} has {row['length']} steps")
                yield row

    def _rows_of(self, facts: Mapping[str, Any]) -> pa.Table:
        numbers = {"chunk_index": facts["data/chunk_index"], "file_index": facts["data/file_index"]}
        path = self._inside(self.info.data_path, numbers | {"video_key": ""})
        if self._rows is None or self._rows.path != path:
            if self._rows is not None:
                self._rows.close()
            self._rows = _RowReader(path, self._stored_features())
        return self._rows.take(facts["episode_index"], facts["length"])

    def _stored_features(self) -> list[str]:
        return [name for name, feature in self.info.features.items() if feature.dtype != "video"]

    def _columns(self, table: pa.Table) -> dict[str, Array]:
        return {
            name: _numeric(name, feature, table[name])
            for name, feature in self.info.features.items()
            if not feature.visual and feature.dtype != "string"
        }

    def _sentence(self, facts: Mapping[str, Any], table: pa.Table) -> str:
        number = table["task_index"][0].as_py() if "task_index" in table.column_names else 0
        if number not in self._tasks:
            raise DataSetError(f"episode {facts['episode_index']} has task {number}, which {TASKS} does not list")
        return self._tasks[number]

    def frames(self, feature: str, table: pa.Table, facts: Mapping[str, Any]) -> Iterator[Frame]:
        """As `ForeignEpisode.frames`."""
        declared = self.info.features[feature]
        video = declared.dtype == "video"
        frames: Iterator[Frame] = (
            self._video_frames(feature, table.num_rows, facts) if video else _images(feature, table[feature])
        )
        known: Frame | None = None
        for frame in frames:
            if frame is not known and frame_size(frame) != declared.shape[:2]:
                raise DataSetError(
                    f"episode {facts['episode_index']}: {feature!r} has a frame of {frame_size(frame)}; "
                    f"meta/info.json says {declared.shape[:2]}"
                )
            known = frame
            yield frame

    def _video_frames(self, feature: str, count: int, facts: Mapping[str, Any]) -> Iterator[Array]:
        try:
            numbers = {kind: facts[f"videos/{feature}/{kind}"] for kind in ("chunk_index", "file_index")}
            path = self._inside(str(self.info.video_path), numbers | {"video_key": feature})
            start_s = float(facts[f"videos/{feature}/from_timestamp"])
        except KeyError as error:
            raise DataSetError(f"the episodes' table of {self._root} has no column {error}") from None
        known = self._videos.get(feature)
        if known is None or known[0] != path:
            if known is not None:
                known[1].close()
            known = self._videos[feature] = (path, VideoReader(path))
        return known[1].read(start_s, count, self.info.fps)

    def _inside(self, template: str, fields: Mapping[str, Any]) -> Path:
        """The file that `template` names. Raises DataSetError: it would not lie in the data set."""
        try:
            path = Path(template.format(**fields))
        except (ValueError, TypeError) as error:
            raise DataSetError(f"{self._root / INFO}: {template!r} names no file for {fields}: {error}") from None
        if path.is_absolute() or ".." in path.parts or "\0" in str(path):
            raise DataSetError(f"{self._root / INFO}: {str(path)!r} lies outside the data set")
        return self._root / path


class _RowReader:
    """The rows of one data file, in order; holds little more than the episode that is asked for."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        self.path = path
        try:
            self._file = pq.ParquetFile(path)
            missing = set(columns) - set(self._file.schema_arrow.names)
            if missing:
                raise DataSetError(f"{path} has no column {min(missing)!r}, which meta/info.json declares")
            self._batches = self._file.iter_batches(READ_ROWS, columns=columns)
        except _BROKEN as error:
            raise _broken(path, error) from None
        self._left: pa.Table | None = None

    def take(self, episode: int, steps: int) -> pa.Table:
        """The next `steps` rows of `episode`; rows of episodes before it are passed over."""
        found: list[pa.Table] = []
        missing = steps
        while missing:
            rows = self._next()
            numbers = rows["episode_index"].to_numpy()
            start = int(np.argmax(numbers == episode)) if (numbers == episode).any() else len(numbers)
            taken = rows.slice(start, missing)
            if (taken["episode_index"].to_numpy() != episode).any():
                raise DataSetError(f"{self.path} holds fewer than the {steps} steps that episode {episode} should have")
            found.append(taken)
            missing -= taken.num_rows
            self._left = rows.slice(start + taken.num_rows)
        return pa.concat_tables(found).combine_chunks()

    def _next(self) -> pa.Table:
        if self._left is not None and self._left.num_rows:
            return self._left
        try:
            return pa.Table.from_batches([next(self._batches)])
        except StopIteration:
            raise DataSetError(f"{self.path} ends before the steps that meta/episodes promises") from None
        except _BROKEN as error:
            raise _broken(self.path, error) from None

    def close(self) -> None:
        self._file.close()


def _read_info(root: Path) -> Info:
    path = root / INFO
    try:
        return msgspec.json.decode(path.read_bytes(), type=Info)
    except FileNotFoundError:
        inside = sorted(each.parent.parent.name for each in root.glob(f"*/{INFO}"))
        hint = f"; it holds the data sets {', '.join(inside)}: import each" if inside else ""
        raise DataSetError(f"{root} is no LeRobot data set, or an unfinished one: it has no {INFO}{hint}") from None
    except UNDECODABLE as error:
        raise DataSetError(f"{path} is not what LeRobot v3 writes: {error}") from None


def _require_template(root: Path, template: str) -> None:
    """Raises DataSetError: more than plain numbers and names stands in the braces."""
    try:
        parts = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise DataSetError(f"{root / INFO}: the path {template!r} is none: {error}") from None
    for field, form, conversion in parts:
        if field not in ("chunk_index", "file_index", "video_key") or conversion or not _NUMBER.fullmatch(form or ""):
            raise DataSetError(f"{root / INFO}: the path {template!r} has an unknown field {field!r}")


def _read_tasks(path: Path) -> dict[int, str]:
    """Numbers to sentences; the column of sentences has no fixed name."""
    try:
        table = pq.read_table(path)
        names = [name for name in table.column_names if name != "task_index"]
        return dict(zip(table["task_index"].to_pylist(), table[names[0]].to_pylist(), strict=True))
    except (*_BROKEN, KeyError, IndexError, TypeError) as error:
        raise _broken(path, error) from None


def _broken(path: Path, error: Exception) -> DataSetError:
    reason = "it is missing" if isinstance(error, FileNotFoundError) else error
    return DataSetError(f"{path} cannot be read: {reason}; fetch or export the data set again")


def _numeric(name: str, feature: Feature, column: pa.ChunkedArray) -> Array:
    array: Any = column.combine_chunks()
    while hasattr(array, "storage") or hasattr(array, "flatten") and pa.types.is_nested(array.type):
        array = array.storage if hasattr(array, "storage") else array.flatten()
    if array.null_count:
        raise DataSetError(f"feature {name!r} has missing values")
    if feature.dtype not in DTYPES:
        raise DataSetError(f"feature {name!r} has the dtype {feature.dtype!r}; a store takes {sorted(DTYPES)}")
    shape = (len(column),) if feature.shape == (1,) else (len(column), *feature.shape)
    try:
        return np.asarray(array.to_numpy(zero_copy_only=False), feature.dtype).reshape(shape)
    except (ValueError, TypeError):
        raise DataSetError(
            f"feature {name!r} does not hold {feature.dtype} {feature.shape} a step, as meta/info.json says"
        ) from None


def _images(feature: str, column: pa.ChunkedArray) -> Iterator[Frame]:
    files = pc.struct_field(column, "bytes").to_pylist() if pa.types.is_struct(column.type) else []
    if len(files) != len(column) or None in files:
        raise DataSetError(f"feature {feature!r} does not hold its pictures; LeRobot embeds them when it saves")
    known = b""
    frame: Frame = b""
    for content in files:
        frame = frame if content == known else decode_file(content)
        known = content
        yield frame
