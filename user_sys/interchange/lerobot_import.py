"""Reads LeRobot datasets v3 and imports them into a store, one episode at a time.

Our own datasets are restored step by step under the same names. Foreign datasets become demonstrations;
`ImportOptions` supplies missing values. An episode keeps its id, or gets one derived from its content and the options
that differ from their defaults, so repeated and resumed imports add nothing twice.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hal.decode_errors import DECODE_ERRORS
from hal.spec import ACTION, RobotSpec
from user_sys.codec import DTYPES, Array
from user_sys.episode import (
    APPLIED_ACTION,
    IMAGE_PREFIX,
    SCALAR_DTYPES,
    Chunk,
    ChunkHeader,
    EpisodeEnd,
    EpisodeSource,
    Phase,
    frame_columns,
)
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import convert_angles, load_robot_specs, vectors_of
from user_sys.interchange.frames import Frame, decode_frame, decode_image_file, encode_jpeg, frame_size, same_frame
from user_sys.interchange.lerobot_format import (
    DONE,
    FINAL_PREFIX,
    IN_DEGREES,
    INDEX_FEATURES,
    INFO,
    STORE_NAMES,
    SUCCESS,
    TASKS,
    TEXT_FEATURES,
    USER_PREFIX,
    DatasetFeature,
    DatasetInfo,
    capture_feature,
)
from user_sys.store.index import EpisodeSummary
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.video import VideoReader

_BROKEN = (pa.ArrowException, OSError)  # pyarrow's exceptions
_FIELD = re.compile(r"\{(chunk_index|file_index|video_key)(?::0?(\d)?d)?\}")  # in a path
MAX_VIDEO_S = 1e9
UNKNOWN_START_NS = 0  # of foreign episodes: before any run, and the same at all sites, whose stores are merged
CHUNK_STEPS = 32  # of episodes without a recorded division
# Defaults of columns that a dataset lacks; otherwise 0.
UNKNOWN: Mapping[str, float] = {"policy_version": -1, "log_prob": float("nan")}
LEFT_OUT_IF_UNKNOWN = {"action_chunk", "action_chunk_step", "action_delay", "t_observation_ns"}


@dataclass(frozen=True)
class LerobotEpisode:
    """An episode of T steps in a dataset.

    Attributes:
        metadata: its row of the episodes table, without statistics.
        columns: numeric features, (T,) for scalars, otherwise (T, ...).
        texts: text features, T each.
        sentence: its task.
    """

    metadata: Mapping[str, Any]
    columns: Mapping[str, Array]
    texts: Mapping[str, list[str]]
    sentence: str
    _table: pa.Table
    _source: LerobotDataset

    @property
    def steps(self) -> int:
        return int(self._table.num_rows)

    @property
    def index(self) -> int:
        return int(self.metadata["episode_index"])

    def frames(self, feature: str) -> Iterator[Frame]:
        """T frames of a camera, each decoded on demand; JPEG files stay files. Raises DataSetError."""
        return self._source.frames(feature, self._table, self.metadata)


class LerobotDataset:
    """The dataset in folder `root`. One thread reads it, in order of the episodes."""

    def __init__(self, root: Path, info: DatasetInfo, tasks: Mapping[int, str]) -> None:
        self._root, self.info, self._tasks = root, info, tasks
        self._rows: _RowReader | None = None
        self._videos: dict[str, tuple[Path, VideoReader]] = {}

    @classmethod
    def open(cls, root: Path) -> LerobotDataset:
        """Reads the metadata.

        Raises:
            DataSetError: `root` is not a dataset, or has another version.
        """
        info = _read_info(root)
        if not info.codebase_version.startswith("v3."):
            raise DataSetError(
                f"{root} is a LeRobot dataset {info.codebase_version}; v3 is required. {_conversion(root.resolve())}"
            )
        if info.fps <= 0:
            raise DataSetError(f"{root / INFO} says {info.fps} frames a second")
        return cls(root, info, _read_tasks(root / TASKS))

    def specs(self) -> dict[str, RobotSpec]:
        """The specs of robots that it holds, as our exports do, by embodiment."""
        return load_robot_specs(self._root / "meta")

    def cameras(self) -> list[str]:
        """The features with colour pictures."""
        return [name for name, feature in self.info.features.items() if feature.colour_size is not None]

    def episodes(self, left_out: Collection[str] = ()) -> Iterator[LerobotEpisode]:
        """Every episode in order, without the features `left_out`, each valid until the next.

        Raises:
            DataSetError: a file is missing or broken, or contradicts ``meta/info.json``; an episode has several tasks.
        """
        features = {name: feature for name, feature in self.info.features.items() if name not in left_out}
        stored = [name for name, feature in features.items() if feature.dtype != "video"]
        for facts in self._facts():
            table = self._rows_of(facts, stored)
            yield LerobotEpisode(
                metadata=facts,
                columns={n: _numeric(n, f, table[n]) for n, f in features.items() if not (f.is_visual or f.is_text)},
                texts={n: table[n].to_pylist() for n, f in features.items() if f.is_text},
                sentence=self._sentence(facts, table),
                _table=table,
                _source=self,
            )

    def close(self) -> None:
        for _, video in self._videos.values():
            video.close()

    def _facts(self) -> Iterator[dict[str, Any]]:
        files = sorted((self._root / "meta/episodes").glob("*/*.parquet"))
        if not files:
            raise DataSetError(f"{self._root / 'meta/episodes'} has no file; the dataset is incomplete")
        for path in files:
            try:
                names = [n for n in pq.read_schema(path).names if not n.startswith("stats/")]
                rows = pq.read_table(path, columns=names).to_pylist()
            except _BROKEN as error:
                raise _broken(path, error) from None
            for row in rows:
                missing = {"episode_index", "length", "data/chunk_index", "data/file_index"} - row.keys()
                if missing:
                    raise DataSetError(f"{path} has no column {min(missing)!r}; the dataset is not v3 or incomplete")
                if not row["length"] or row["length"] < 1:
                    raise DataSetError(f"{path}: episode {row['episode_index']} has {row['length']} steps")
                yield row

    def _rows_of(self, facts: Mapping[str, Any], features: list[str]) -> pa.Table:
        numbers = {"chunk_index": facts["data/chunk_index"], "file_index": facts["data/file_index"]}
        path = self._inside(self.info.data_path, numbers | {"video_key": ""})
        if self._rows is None or self._rows.path != path:
            self._rows = _RowReader(path, features)
        return self._rows.take(facts["episode_index"], facts["length"])

    def _sentence(self, facts: Mapping[str, Any], table: pa.Table) -> str:
        numbers = table["task_index"].unique().to_pylist() if "task_index" in table.column_names else [0]
        unknown = [number for number in numbers if number not in self._tasks]
        if unknown:
            raise DataSetError(f"episode {facts['episode_index']} has task {unknown[0]}, which {TASKS} does not list")
        first, *others = dict.fromkeys(self._tasks[number] for number in numbers)
        if others:
            raise DataSetError(
                f"episode {facts['episode_index']} has several tasks: {first!r}, then {others[0]!r}; an episode in a "
                "store has one: divide it where the task changes, or give all its steps one task_index"
            )
        return first

    def frames(self, feature: str, table: pa.Table, facts: Mapping[str, Any]) -> Iterator[Frame]:
        """As `LerobotEpisode.frames`."""
        declared = self.info.features[feature]
        video, size = declared.dtype == "video", declared.colour_size
        frames: Iterator[Frame] = (
            self._video_frames(feature, table.num_rows, facts) if video else _images(feature, table[feature])
        )
        previous: Frame | None = None
        for frame in frames:
            if frame is not previous and frame_size(frame) != size:
                raise DataSetError(
                    f"episode {facts['episode_index']}: {feature!r} has a frame of {frame_size(frame)}; "
                    f"meta/info.json declares {size}"
                )
            previous = frame
            yield frame

    def _video_frames(self, feature: str, count: int, facts: Mapping[str, Any]) -> Iterator[Array]:
        try:
            numbers = {kind: facts[f"videos/{feature}/{kind}"] for kind in ("chunk_index", "file_index")}
            path = self._inside(str(self.info.video_path), numbers | {"video_key": feature})
            start_s = facts[f"videos/{feature}/from_timestamp"]
        except KeyError as error:
            raise DataSetError(f"the episodes' table of {self._root} has no column {error}") from None
        if not isinstance(start_s, int | float) or not 0 <= start_s <= MAX_VIDEO_S:
            raise DataSetError(
                f"episode {facts['episode_index']}: its video of {feature!r} starts at {start_s} s; "
                "download or export the dataset again"
            )
        opened = self._videos.get(feature)
        if opened is None or opened[0] != path:
            if opened is not None:
                opened[1].close()
            opened = self._videos[feature] = (path, VideoReader(path))
        return opened[1].read(start_s, count, self.info.fps)

    def _inside(self, template: str, fields: Mapping[str, Any]) -> Path:
        """The file that `template` names. Raises DataSetError: it lies outside the dataset, or is no template."""

        def value(match: re.Match[str]) -> str:
            found = fields[match[1]]
            return str(found) if match[2] is None else f"{int(found):0{match[2]}d}"

        try:
            path = Path(_FIELD.sub(value, template))
        except (ValueError, TypeError, KeyError) as error:
            raise DataSetError(f"{self._root / INFO}: {template!r} is no valid path for {fields}: {error!r}") from None
        if path.is_absolute() or ".." in path.parts or any(each in str(path) for each in "\0{}"):
            raise DataSetError(f"{self._root / INFO}: {str(path)!r} is outside the dataset, or has an unknown field")
        return self._root / path


class _RowReader:
    """The rows of one data file in order."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        self.path = path
        try:
            missing = set(columns) - set(pq.read_schema(path).names)
            if missing:
                raise DataSetError(f"{path} has no column {min(missing)!r}, which meta/info.json declares")
            self._rows = pq.read_table(path, columns=columns)
        except _BROKEN as error:
            raise _broken(path, error) from None
        self._episodes = self._rows["episode_index"].to_numpy()

    def take(self, episode: int, steps: int) -> pa.Table:
        """The `steps` rows of `episode`."""
        found = np.flatnonzero(self._episodes == episode)
        if len(found) < steps or (np.diff(found[:steps]) != 1).any():
            raise DataSetError(f"{self.path} holds fewer than the {steps} steps of episode {episode}")
        return self._rows.slice(found[0], steps).combine_chunks()


def recorded_units(root: Path) -> set[bool]:
    """Whether angles are in degrees, by the marks of our exports; empty for a dataset without a mark.

    Raises DataSetError: a table of episodes cannot be read.
    """
    found: set[bool | None] = set()
    for path in sorted((root / "meta/episodes").glob("*/*.parquet")):
        try:
            if IN_DEGREES in pq.read_schema(path).names:
                found |= {*pq.read_table(path, columns=[IN_DEGREES])[IN_DEGREES].to_pylist()}
        except _BROKEN as error:
            raise _broken(path, error) from None
    return {each for each in found if each is not None}


def _read_info(root: Path) -> DatasetInfo:
    path = root / INFO
    try:
        return msgspec.json.decode(path.read_bytes(), type=DatasetInfo)
    except FileNotFoundError:
        inside = sorted(each.parent.parent.name for each in root.glob(f"*/{INFO}"))
        hint = f"; it holds the datasets {', '.join(inside)}: import each" if inside else ""
        raise DataSetError(f"{root} is not a LeRobot dataset, or an unfinished one: it has no {INFO}{hint}") from None
    except DECODE_ERRORS as error:
        raise DataSetError(f"{path} is not valid for LeRobot v3: {error}") from None


def _read_tasks(path: Path) -> dict[int, str]:
    """Numbers to sentences; the column of sentences has no fixed name."""
    try:
        table = pq.read_table(path)
        names = [name for name in table.column_names if name != "task_index"]
        return dict(zip(table["task_index"].to_pylist(), table[names[0]].to_pylist(), strict=True))
    except (*_BROKEN, KeyError, IndexError, TypeError) as error:
        raise _broken(path, error) from None


def _conversion(root: Path) -> str:
    """How to convert a dataset v2.1 in place, without an upload; `root` is absolute."""
    named = f"convert_dataset_v21_to_v30 --push-to-hub false --repo-id {root.name} --root"
    return (
        f"Convert it in place with LeRobot 0.6: python -m lerobot.scripts.{named} {root}; "
        f"or with LeRobot 0.4: python -m lerobot.datasets.v30.{named} {root.parent}"
    )


def _broken(path: Path, error: Exception) -> DataSetError:
    reason = "it is missing" if isinstance(error, FileNotFoundError) else error
    return DataSetError(f"{path} cannot be read: {reason}; download or export the dataset again")


def _numeric(name: str, feature: DatasetFeature, column: pa.ChunkedArray) -> Array:
    array: Any = column.combine_chunks()
    while hasattr(array, "storage") or hasattr(array, "flatten") and pa.types.is_nested(array.type):
        array = array.storage if hasattr(array, "storage") else array.flatten()
    if array.null_count:
        raise DataSetError(f"feature {name!r} has missing values")
    if feature.dtype not in DTYPES:
        raise DataSetError(f"feature {name!r} has the dtype {feature.dtype!r}; a store accepts {sorted(DTYPES)}")
    shape = (len(column),) if feature.shape == (1,) else (len(column), *feature.shape)
    try:
        return np.asarray(array.to_numpy(zero_copy_only=False), feature.dtype).reshape(shape)
    except (ValueError, TypeError):
        raise DataSetError(
            f"feature {name!r} does not hold {feature.dtype} {feature.shape} per step, as meta/info.json declares"
        ) from None


def _images(feature: str, column: pa.ChunkedArray) -> Iterator[Frame]:
    files = pc.struct_field(column, "bytes").to_pylist() if pa.types.is_struct(column.type) else []
    if len(files) != len(column) or None in files:
        raise DataSetError(f"feature {feature!r} has no embedded images; save the dataset with LeRobot again")
    previous = b""
    frame: Frame = b""
    for content in files:
        frame = frame if content == previous else decode_image_file(content)
        previous = content
        yield frame


class ImportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Values for missing data.

    Attributes:
        source: of every episode; None as recorded, or ``demo``.
        robot, task, embodiment: names for datasets without them; empty derives them.
        success: of episodes without it; None is unknown.
        frames: ``auto`` keeps JPEG files, stores videos as JPEG and lossless images raw; ``jpeg`` and ``raw`` force
            one form, except that JPEG files stay.
        use_degrees: angles are in degrees, as of LeRobot's arms with that setting. An export of ours has its own mark.
    """

    source: EpisodeSource | None = None
    robot: str = ""
    task: str = ""
    embodiment: str = ""
    success: bool | None = True
    frames: str = "auto"
    use_degrees: bool = False


class ImportReport(msgspec.Struct, kw_only=True):
    """Result of an import; `skipped_features` have no column in a store.

    Attributes:
        episodes, steps: of which the import stored something.
        deleted: episodes that labels delete in the store.
    """

    episodes: int = 0
    steps: int = 0
    already_stored: int = 0
    deleted: int = 0
    skipped_features: tuple[str, ...] = ()


def import_lerobot(
    data_set: LerobotDataset, store: Path, options: ImportOptions, advance: Callable[[int], object]
) -> ImportReport:
    """Adds the episodes of `data_set` to the store at `store`, each durable before the next.

    Raises:
        DataSetError: the dataset is broken, or its angles have another unit; earlier episodes stay in the store, and a
            later call continues after them.
        WireError: an episode belongs to another robot in the store.
        StoreError: the store cannot be written.
    """
    convert = _Converter(data_set.info, options, data_set.specs() | load_robot_specs(store))
    done = ImportReport(skipped_features=convert.left_out)
    with StoreWriter.open(store) as writer:
        known = _known_episodes(store)
        for episode in data_set.episodes(convert.left_out):
            header = convert.header(episode)
            stored = known.get(header.episode)
            as_recorded = known.get(header.episode.removesuffix(f"-as-{header.source}"))
            if as_recorded is not None and not as_recorded.deleted:
                stored = as_recorded  # with the source that it was recorded with
            is_whole = stored is not None and (stored.complete or stored.deleted)
            chunks = () if is_whole else convert.chunks(episode, header)
            if sum(writer.append(each.encode()) for each in chunks):
                writer.sync()
                done.episodes += 1
                done.steps += episode.steps
            elif stored is not None and not stored.deleted:
                done.already_stored += 1
            else:
                done.deleted += 1
            advance(episode.steps)
    return done


def _known_episodes(store: Path) -> dict[str, EpisodeSummary]:
    """By their ids. Those that are deleted and compacted are unknown."""
    with StoreReader.open(store) as reader:
        reader.refresh()
        return {episode.episode: episode for episode in reader.episodes()}


class _Converter:
    """Converts a dataset's episodes into chunks."""

    def __init__(self, info: DatasetInfo, options: ImportOptions, specs: Mapping[str, RobotSpec]) -> None:
        self._info, self._options, self._specs = info, options, specs
        described = {name: [f.dtype, f.shape] for name, f in info.features.items() if name not in INDEX_FEATURES}
        description = msgspec.json.encode([info.robot_type, info.fps, described], order="deterministic")
        self._fingerprint = hashlib.blake2b(description, digest_size=8).hexdigest()
        self._is_our_export = info.features.keys() >= {
            *TEXT_FEATURES,
            "phase",
        }  # in foreign datasets these names have other meanings
        kept = {SUCCESS, DONE, *INDEX_FEATURES, *STORE_NAMES, "reward", ACTION}
        numeric = [name for name, feature in info.features.items() if not (feature.is_visual or feature.is_text)]
        self._observations = [name for name in numeric if name.startswith("observation.")]
        cameras = [name for name, feature in info.features.items() if feature.colour_size is not None]
        self._cameras = {name: IMAGE_PREFIX + _camera_name(name) for name in cameras}
        if self._is_our_export:
            kept |= {*TEXT_FEATURES, *SCALAR_DTYPES, *map(capture_feature, self._cameras.values())}
        self.left_out = tuple(n for n in info.features if n not in {*kept, *self._observations, *self._cameras})

    def header(self, episode: LerobotEpisode) -> ChunkHeader:
        """The header of the episode's first chunk."""
        facts, options = episode.metadata, self._options
        texts = episode.texts if self._is_our_export else {}
        robot = _first(texts, "robot") or valid_name(options.robot or self._info.robot_type or "imported")
        embodiment = _first(texts, "embodiment") or options.embodiment or self._fingerprint
        task = facts.get(USER_PREFIX + "task") or valid_name(options.task or episode.sentence)
        recorded = _first(texts, "source")
        source = options.source or _source(recorded or EpisodeSource.DEMO)
        told: list[str] = [embodiment, task, source]
        told += ["degrees"] if options.use_degrees else []
        told += [f"success {options.success}"] if options.success is not True else []
        told += [options.frames] if options.frames != "auto" else []
        name = facts.get(USER_PREFIX + "episode")
        if name and options.source not in (None, recorded):
            name += f"-as-{source}"  # so that a wrong import can be deleted and repeated
        return ChunkHeader(
            episode=name or f"{robot}-{episode.index:06d}-{_digest(episode, self._cameras, told)}",
            index=0,
            first_step=0,
            steps=episode.steps,
            robot=robot,
            embodiment=embodiment,
            task=task,
            sentence=facts.get(USER_PREFIX + "sentence", episode.sentence),
            source=source,
            seed=facts.get(USER_PREFIX + "seed", 0),
            started_unix_ns=facts.get(USER_PREFIX + "started_unix_ns", UNKNOWN_START_NS),
            unix_offset_ns=facts.get(USER_PREFIX + "unix_offset_ns", UNKNOWN_START_NS),
        )

    def chunks(self, episode: LerobotEpisode, header: ChunkHeader) -> Iterator[Chunk]:
        """The episode as chunks, divided as recorded or into `CHUNK_STEPS`."""
        end = self._end(episode)
        columns = self._in_units(episode, header, self._columns(episode, end, header.source))
        captured_ns = {name: self._captured_ns(episode, name, columns) for name in self._cameras.values()}
        frames = {
            name: self._frames(episode, theirs, (captured_ns[name] != 0) | (columns["t_capture_ns"] == 0))
            for theirs, name in self._cameras.items()
        }
        division = episode.metadata.get(USER_PREFIX + "chunk_steps") or _even_division(episode.steps)
        if sum(division) != episode.steps:
            raise DataSetError(f"episode {episode.index}: its chunks {division} do not add up to {episode.steps} steps")
        first = 0
        for index, steps in enumerate(division):
            rows = slice(first, first + steps)
            last = index == len(division) - 1
            part = {name: column[rows] for name, column in columns.items()}
            for name, all_frames in frames.items():
                part |= frame_columns(name, _without_repeats(all_frames[rows]), captured_ns[name][rows])
            yield Chunk(
                msgspec.structs.replace(header, index=index, first_step=first, steps=steps, end=end if last else None),
                part,
                self._in_units(episode, header, self._final(episode)) if last and end else {},
            )
            first += steps

    def _end(self, episode: LerobotEpisode) -> EpisodeEnd | None:
        facts = episode.metadata
        if USER_PREFIX + "complete" in facts:
            if not facts[USER_PREFIX + "complete"]:
                return None
            return EpisodeEnd(
                steps=episode.steps,
                success=facts.get(USER_PREFIX + "success"),
                reward_source=facts.get(USER_PREFIX + "reward_source", "import"),
            )
        recorded = episode.columns.get(SUCCESS)
        success = self._options.success if recorded is None else bool(recorded.any())
        return EpisodeEnd(steps=episode.steps, success=success, reward_source="import")

    def _columns(self, episode: LerobotEpisode, end: EpisodeEnd | None, source: EpisodeSource) -> dict[str, Array]:
        found = {STORE_NAMES.get(n, n): column for n, column in episode.columns.items()}
        columns = {name: _as_vectors(found[name]) for name in self._observations}
        if ACTION in found:
            columns[ACTION] = _as_vectors(found[ACTION])
            columns[APPLIED_ACTION] = _as_vectors(found.get(APPLIED_ACTION, found[ACTION]))
        defaults = _defaults(episode, found, end, source)
        for name, dtype in SCALAR_DTYPES.items():
            column = found.get(name, defaults.get(name))
            if column is None:
                if name in LEFT_OUT_IF_UNKNOWN:
                    continue
                column = np.full(episode.steps, UNKNOWN.get(name, 0))
            columns[name] = column.astype(dtype)
        return columns

    def _in_units(
        self, episode: LerobotEpisode, header: ChunkHeader, columns: Mapping[str, Array]
    ) -> Mapping[str, Array]:
        """`columns` in the units of the robot's spec. Raises DataSetError: they do not seem to be in the named ones."""
        spec = self._specs.get(header.embodiment)
        recorded: bool | None = episode.metadata.get(IN_DEGREES)
        if recorded is False and self._options.use_degrees:
            raise DataSetError(
                f"episode {episode.index}: {IN_DEGREES} is false in meta/episodes, so its angles are in the units of "
                "the robot's spec: leave out --use-degrees; if the exported store had no spec, export it again"
            )
        in_degrees = self._options.use_degrees if recorded is None else recorded
        if spec is None:
            if in_degrees:
                raise DataSetError(
                    f"--use-degrees needs the spec of embodiment {header.embodiment}: import into the store of a run "
                    "that has the robot, with its --embodiment"
                )
            return columns
        columns = convert_angles(columns, spec, to_degrees=False) if in_degrees else columns
        for name, each in vectors_of(spec).items() if recorded is None else ():
            values = np.atleast_2d(columns.get(name, ()))
            if values.shape[1:] == each.shape and (far := each.find_far_angle(values.min(0), values.max(0))):
                hint = "import a dataset of this robot" if in_degrees else "if it is in degrees, give --use-degrees"
                raise DataSetError(f"episode {episode.index}: in {name}, {far}; {hint}")
        return columns

    def _final(self, episode: LerobotEpisode) -> dict[str, Array]:
        """The observation after the last step; without one, the last observation."""
        recorded = {
            name.removeprefix(FINAL_PREFIX): value
            for name, value in episode.metadata.items()
            if name.startswith(FINAL_PREFIX) and value is not None
        }
        if recorded:
            return {name: _final_value(value) for name, value in recorded.items()}
        return {name: _as_vectors(episode.columns[name])[-1] for name in self._observations}

    def _captured_ns(self, episode: LerobotEpisode, camera: str, columns: Mapping[str, Array]) -> Array:
        """Capture times of the frames; without these, the times of the observations."""
        recorded = episode.columns.get(capture_feature(camera)) if self._is_our_export else None
        return columns["t_capture_ns"] if recorded is None else recorded

    def _frames(self, episode: LerobotEpisode, feature: str, has_frame: Array) -> list[Frame | None]:
        """The camera's frame at each step; None before the first one, where our exports show a black picture."""
        form = self._options.frames
        if form == "auto":
            form = "jpeg" if self._info.features[feature].dtype == "video" else "raw"
        shown = (frame if has else None for frame, has in zip(episode.frames(feature), has_frame, strict=True))
        if form == "jpeg":
            return [None if frame is None else _as_jpeg(frame) for frame in shown]
        frames = list(shown)
        if len({type(frame) for frame in frames if frame is not None}) > 1:  # all frames of a camera have one form
            return [None if frame is None else decode_frame(frame) for frame in frames]
        return frames


def _final_value(value: list[float] | bytes) -> Array:
    """A vector, or a picture: a JPEG file's bytes, or uint8 (h, w, 3)."""
    if not isinstance(value, bytes):
        return np.array(value, np.float32)
    frame = decode_image_file(value)
    return np.frombuffer(frame, np.uint8) if isinstance(frame, bytes) else frame


def _defaults(
    episode: LerobotEpisode, found: Mapping[str, Array], end: EpisodeEnd | None, source: EpisodeSource
) -> dict[str, Array]:
    """Defaults for a foreign dataset: times by its frame rate, an end, a reward for a success at the end."""
    last = np.arange(episode.steps) == episode.steps - 1
    success = end is not None and end.success is True
    times = np.round(found["timestamp"].astype(np.float64) * 1e9) if "timestamp" in found else np.zeros(episode.steps)
    phase = Phase.TELEOP if source is EpisodeSource.DEMO else Phase.POLICY
    ended = end is not None
    return {
        "reward": last * np.float32(success),
        "terminated": last & success,
        "truncated": last & (ended and not success),
        "phase": np.full(episode.steps, phase),
        "t_capture_ns": times,
        "t_inference_ns": times,
        "t_command_ns": times,
    }


def _first(texts: Mapping[str, Sequence[str]], name: str) -> str:
    return texts[name][0] if name in texts else ""


def _source(text: str) -> EpisodeSource:
    try:
        return EpisodeSource(text)
    except ValueError:
        raise DataSetError(
            f"the dataset has the unknown source {text!r}; give --source {'|'.join(EpisodeSource)}"
        ) from None


def valid_name(text: str) -> str:
    """`text` as a valid name: letters, digits and hyphens; with a digest if it loses other letters or its end."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")
    name = plain[:60] or "imported"
    if name != (plain or "imported") or any(letter.isalnum() and not letter.isascii() for letter in text):
        name += "-" + hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return name


def _camera_name(feature: str) -> str:
    return feature.removeprefix(IMAGE_PREFIX).removeprefix("observation.")


def _digest(episode: LerobotEpisode, cameras: Collection[str], names: Sequence[str]) -> str:
    """Digest of the episode's content, independent of its path and step numbers; of frames only without columns.

    Args:
        names: what options give to the episode. A second import with others adds it again, which corrects them.
    """
    content = hashlib.blake2b(msgspec.json.encode([episode.sentence, *names]), digest_size=6)
    columns = sorted(episode.columns.keys() - INDEX_FEATURES)
    for name in columns:
        content.update(name.encode() + np.ascontiguousarray(episode.columns[name]).tobytes())
    for camera in () if columns else sorted(cameras):
        for frame in episode.frames(camera):
            content.update(frame if isinstance(frame, bytes) else np.ascontiguousarray(frame).data)
    return content.hexdigest()


def _as_vectors(column: Array) -> Array:
    """float32 with at least one element a step."""
    return (column[:, None] if column.ndim == 1 else column).astype(np.float32)


def _as_jpeg(frame: Frame) -> Frame:
    return frame if isinstance(frame, bytes) else encode_jpeg(frame)


def _even_division(steps: int) -> list[int]:
    return [min(CHUNK_STEPS, steps - first) for first in range(0, steps, CHUNK_STEPS)]


def _without_repeats(frames: Sequence[Frame | None]) -> list[Frame | None]:
    """A chunk's frames; None replaces a repeated frame."""
    pairs = zip((None, *frames), frames, strict=False)
    return [None if old is not None and new is not None and same_frame(old, new) else new for old, new in pairs]
