"""A store as LeRobot data sets, one for each embodiment.

What is to be done is written down first (`Plan`): which episode goes into which file. Each file is then written aside
and put in its place whole, its row in the episodes' table last, so that an export that was killed goes on behind the
last file that is whole and ends with the same bytes as one that was not. ``meta/info.json`` comes at the very end: a
data set without it is unfinished, and no reader takes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hal.durable import replace_durably
from hal.spec import RobotSpec
from hal.undecodable import UNDECODABLE
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import EpisodeReader, Layout, Selection, specs_beside
from user_sys.interchange.lerobot_format import (
    DATA_FILE_MB,
    EPISODES_PATH,
    INFO,
    STATS,
    TASK_INDEX_NAME,
    TASKS,
    VERSION,
    Feature,
    Info,
    features_of,
    place,
)
from user_sys.interchange.lerobot_part import ROWS_HELD, PartWriter, statistics_name
from user_sys.interchange.progress import Advance
from user_sys.interchange.statistics import NAMES, RunningStatistics
from user_sys.interchange.video import ENCODERS
from user_sys.store.store import StoreReader
from user_sys.store.summary import EpisodeSummary

PLAN = "export.json"


class LerobotOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to export.

    Attributes:
        codec: ``h264`` or ``av1`` for video; None keeps each frame as an image: its own JPEG file, or PNG if it is raw.
        fps: control rate of the robots in Hz; None: as their specs or, failing that, the recorded times say.
        file_mb: about how much experience goes into one file.
    """

    selection: Selection = Selection()
    codec: str | None = None
    fps: float | None = None
    file_mb: float = DATA_FILE_MB


class PlannedEpisode(msgspec.Struct, frozen=True, array_like=True):
    episode: str
    steps: int


class DataSetPlan(msgspec.Struct, frozen=True):
    """One data set: `parts` are its files, each with the episodes that it holds, in order."""

    folder: str
    embodiment: str
    robot_type: str | None
    fps: float
    features: dict[str, Feature]
    tasks: list[str]
    parts: list[list[PlannedEpisode]]

    @property
    def episodes(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def steps(self) -> int:
        return sum(each.steps for part in self.parts for each in part)


class Plan(msgspec.Struct, frozen=True):
    """What an export was asked for and how it is divided; ``export.json`` in the output folder."""

    store: str
    options: LerobotOptions
    data_sets: list[DataSetPlan]

    @property
    def steps(self) -> int:
        return sum(data_set.steps for data_set in self.data_sets)


def open_plan(store: Path, output: Path, options: LerobotOptions) -> Plan:
    """The plan that `output` has from an earlier, interrupted run; otherwise a new one, which is written down.

    Raises:
        DataSetError: `output` holds something else, or nothing is chosen.
        StoreError: the store cannot be read.
    """
    if options.codec not in (None, *ENCODERS):
        raise DataSetError(f"no codec {options.codec!r}; there are {', '.join(ENCODERS)}")
    path = output / PLAN
    if path.exists():
        return _earlier_plan(path, store, options)
    if output.exists() and any(output.iterdir()):
        raise DataSetError(f"{output} is not empty and holds no export to go on with; choose another --output")
    with StoreReader.open(store) as reader:
        plan = make_plan(EpisodeReader(reader), store, options, specs_beside(store))
    replace_durably(path, msgspec.json.encode(plan))
    return plan


def _earlier_plan(path: Path, store: Path, options: LerobotOptions) -> Plan:
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=Plan)
    except UNDECODABLE as error:
        raise DataSetError(f"{path} is damaged ({error}); remove {path.parent} and export anew") from None
    if plan.options != options or plan.store != str(store.resolve()):
        raise DataSetError(
            f"{path.parent} holds an export of {plan.store} with other options; choose another --output, or remove it"
        )
    return plan


def make_plan(reader: EpisodeReader, store: Path, options: LerobotOptions, specs: Mapping[str, RobotSpec]) -> Plan:
    """Divides what is chosen into data sets of one embodiment and one layout, and those into files."""
    groups: dict[tuple[str, Layout], list[EpisodeSummary]] = {}
    for episode in reader.select(options.selection):
        groups.setdefault((episode.embodiment, reader.layout(episode.episode)), []).append(episode)
    folders = _folders([embodiment for embodiment, _ in groups])
    return Plan(
        store=str(store.resolve()),
        options=options,
        data_sets=[
            _plan_data_set(reader, folder, layout, episodes, options, specs.get(embodiment))
            for folder, ((embodiment, layout), episodes) in zip(folders, groups.items(), strict=True)
        ],
    )


def _folders(embodiments: list[str]) -> list[str]:
    """A folder each, named by the embodiment; the output folder itself where there is but one data set."""
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
    layout: Layout,
    episodes: list[EpisodeSummary],
    options: LerobotOptions,
    spec: RobotSpec | None,
) -> DataSetPlan:
    fps = options.fps or (spec.rate_hz if spec else _recorded_rate(reader, episodes[0].episode))
    return DataSetPlan(
        folder=folder,
        embodiment=episodes[0].embodiment,
        robot_type=spec.model if spec else None,
        fps=float(fps),
        features=features_of(layout, options.codec, fps, spec),
        tasks=list(dict.fromkeys(reader.sentence(episode.episode) for episode in episodes)),
        parts=list(_parts(reader, episodes, options.file_mb * 1e6)),
    )


def _recorded_rate(reader: EpisodeReader, episode: str) -> float:
    """Steps a second, rounded to whole ones, by the times of capture; 1 where nothing tells."""
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


def export_lerobot(plan: Plan, output: Path, advance: Advance) -> None:
    """Carries `plan` out in `output`, going on behind what is there whole; never more than an episode in memory.

    `advance` is told the steps that are done, those of earlier runs included.

    Raises:
        DataSetError: an episode does not fit, or is no longer what it was.
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


def _write_parts(reader: EpisodeReader, data_set: DataSetPlan, root: Path, codec: str | None, advance: Advance) -> None:
    first_episode = first_row = 0
    for number, part in enumerate(data_set.parts):
        steps = sum(each.steps for each in part)
        if (root / place(EPISODES_PATH, number)).exists():
            advance(steps)
        else:
            with PartWriter(root, number, data_set.features, data_set.tasks, data_set.fps, codec) as writer:
                writer.start(first_episode, first_row)
                for each in part:
                    writer.add(reader.read(each.episode), each.steps)
                    advance(each.steps)
        first_episode += len(part)
        first_row += steps


def _finish(data_set: DataSetPlan, root: Path) -> None:
    """Statistics over all episodes, tasks, and at last the file that makes the folder a data set."""
    statistics = _merged(data_set.features, (root / place(EPISODES_PATH, n) for n in range(len(data_set.parts))))
    replace_durably(root / STATS, json.dumps(statistics, indent=1).encode())
    sink = pa.BufferOutputStream()
    pq.write_table(_tasks(data_set.tasks), sink)
    replace_durably(root / TASKS, sink.getvalue().to_pybytes())
    video = any(feature.dtype == "video" for feature in data_set.features.values())
    info = Info(
        codebase_version=VERSION,
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
        feature.setdefault("names", None)  # LeRobot wants it told
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
        names = [statistics_name(feature, name) for name in NAMES]
        if names[0] not in batch.schema.names:
            continue
        for values in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
            if values[0] is not None:
                new = {name: np.array(value) for name, value in zip(NAMES, values, strict=True)}
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
