"""Reads whole episodes from a store, one in memory at a time, and filters them."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from hal.spec import ArraySpec, RobotSpec
from user_sys.codec import Array
from user_sys.episode import (
    APPLIED_ACTION,
    CAPTURE_TIME_SUFFIX,
    FRAME_SUFFIXES,
    IMAGE_PREFIX,
    Chunk,
    ChunkHeader,
    EpisodeSource,
)
from user_sys.errors import DataSetError
from user_sys.interchange.frames import Frame, frame_size, frames_of
from user_sys.robot_records import robot_records_of_store
from user_sys.store.index import LABELLED_COLUMNS, EpisodeSummary, newest_trim
from user_sys.store.labels import effective_labels
from user_sys.store.store import StoreReader

UNFINISHED_SUFFIX = ".unfinished"  # of an exported file until it is complete


class ControlledBy(enum.StrEnum):
    """Who controlled an episode, by its steps' phases. All but POLICY mean a person or the scripted expert."""

    POLICY = "policy"
    PERSON = "person"
    BOTH = "both"

    @classmethod
    def of(cls, episode: EpisodeSummary) -> ControlledBy:
        if not episode.intervention_steps:
            return cls.POLICY
        return cls.PERSON if episode.intervention_steps == episode.steps else cls.BOTH


class EpisodeFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which episodes to export; an empty tuple, or None, does not restrict.

    Attributes:
        incomplete: include episodes that never ended, up to their first missing chunk.
    """

    episodes: tuple[str, ...] = ()
    sources: tuple[EpisodeSource, ...] = ()
    tasks: tuple[str, ...] = ()
    driven: tuple[ControlledBy, ...] = ()
    success: bool | None = None
    incomplete: bool = False

    def matches(self, episode: EpisodeSummary) -> bool:
        return (
            (not self.episodes or episode.episode in self.episodes)
            and (not self.sources or episode.source in self.sources)
            and (not self.tasks or episode.task in self.tasks)
            and (not self.driven or ControlledBy.of(episode) in self.driven)
            and (self.success is None or episode.success is self.success)
            and (self.incomplete or episode.complete)
        )


class StepLayout(msgspec.Struct, frozen=True):
    """Contents of each step of an episode.

    Attributes:
        columns: name, dtype and shape per step.
        cameras: feature name, height and width in pixels.
    """

    columns: tuple[tuple[str, str, tuple[int, ...]], ...]
    cameras: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class StoredEpisode:
    """An episode of T steps in memory.

    Attributes:
        header: of its last chunk; ``header.end`` is set if the episode is complete.
        chunk_steps: number of steps of each chunk.
        columns: (T, ...) each, without cameras.
        final: the observation after the last step; empty if the episode never ended.
        frames: a camera's feature name to T frames; None repeats the previous frame.
        captured_ns: a camera's feature name to int64 (T,), capture time of the shown frame; 0 without one.
        first_step: of a part, the number of its first step in the recorded episode; None for a whole episode.
    """

    header: ChunkHeader
    chunk_steps: tuple[int, ...]
    columns: Mapping[str, Array]
    final: Mapping[str, Array]
    frames: Mapping[str, list[Frame | None]]
    captured_ns: Mapping[str, Array]
    first_step: int | None = None

    @property
    def steps(self) -> int:
        return sum(self.chunk_steps)

    @property
    def exported_id(self) -> str:
        """Its id; of a part ``<id>-<first>-<end>``, because the chunks of a part are no chunks of the episode."""
        first = self.first_step
        return self.header.episode + ("" if first is None else f"-{first}-{first + self.steps}")

    def part(self, first: int, end: int) -> StoredEpisode:
        """The steps from `first` to before `end`. The observation of step `end`, if it exists, becomes the final one.

        The first step has each camera's newest earlier frame. Id, times and outcome are those of the episode.
        """
        rows, ends = slice(first, end), np.cumsum(self.chunk_steps)
        kept = np.minimum(ends, end) - np.maximum(ends - self.chunk_steps, first)
        frames = {name: each[rows] for name, each in self.frames.items()}
        for name, each in frames.items():
            each[0] = next((frame for frame in reversed(self.frames[name][: first + 1]) if frame is not None), None)
        final = self.final
        if end < self.steps:
            final = {name: column[end] for name, column in self.columns.items() if name.startswith("observation.")}
            shown = {name: each[end] for name, each in self.frames.items()}
            final |= {
                n: np.frombuffer(f, np.uint8) if isinstance(f, bytes) else f for n, f in shown.items() if f is not None
            }
        outcome = self.header.end
        return StoredEpisode(
            header=replace(self.header, end=None if outcome is None else replace(outcome, steps=end - first)),
            chunk_steps=tuple(int(steps) for steps in kept if steps > 0),
            columns={name: column[rows] for name, column in self.columns.items()},
            final=final,
            frames=frames,
            captured_ns={name: times[rows] for name, times in self.captured_ns.items()},
            first_step=first,
        )


class EpisodeReader:
    """The labelled episodes of a store as of construction. Not thread-safe.

    Args:
        trimmed: episodes have only the steps that their trims keep.
    """

    def __init__(self, store: StoreReader, trimmed: bool = False) -> None:
        store.refresh()
        self._store, self._index, self._trimmed = store, store.index, trimmed
        chunks = self._index.chunks
        self._order = np.lexsort((chunks.index, chunks.episode))
        self._starts = np.searchsorted(chunks.episode[self._order], np.arange(len(self._index.episodes) + 1))

    def select(self, selection: EpisodeFilter) -> list[EpisodeSummary]:
        """The matching episodes in storage order.

        Raises:
            DataSetError: a named episode does not exist, or no episode matches.
        """
        episodes = [episode for episode in self._store.episodes() if not episode.deleted]
        missing = set(selection.episodes) - {episode.episode for episode in episodes}
        if missing:
            raise DataSetError(
                f"the store has no episode {min(missing)!r}; `user-sys store inspect` lists its episodes"
            )
        chosen = [episode for episode in episodes if selection.matches(episode) and self.steps(episode.episode)]
        if not chosen:
            raise DataSetError(f"none of the store's {len(episodes)} episodes matches; change the filters")
        return chosen

    def steps(self, episode: str) -> int:
        """Number of steps that `read` returns."""
        first, end = self._kept(episode, int(self._index.chunks.steps[self._complete_chunks(episode)].sum()))
        return max(0, end - first)

    def label_count(self, episode: str) -> int:
        """Number of its labels, with those that others revert."""
        return len(self._index.labels(episode))

    def sentence(self, episode: str) -> str:
        """The episode's instruction, or the task's name without one."""
        episodes = self._index.episodes
        row = episodes.find(episode)
        text: str = episodes.sentences.names[episodes.sentence[row]] or episodes.tasks.names[episodes.task[row]]
        return text

    def layout(self, episode: str) -> StepLayout:
        """Contents of a step of `episode`; reads up to the first frame of each camera."""
        cameras: dict[str, tuple[int, int]] = {}
        columns: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
        for row in self._complete_chunks(episode):
            chunk = self._store.read(row)
            columns = columns or tuple(
                (name, array.dtype.name, array.shape[1:])
                for name, array in chunk.columns.items()
                if not is_camera_column(name)
            )
            names = [name for name in chunk.columns if is_camera(name)]
            for name in names:
                first = next((frame for frame in frames_of(chunk, name) if frame is not None), None)
                if name not in cameras and first is not None:
                    cameras[name] = frame_size(first)
            if len(cameras) == len(names):
                break
        return StepLayout(columns, tuple((name, *size) for name, size in sorted(cameras.items())))

    def read(self, episode: str) -> StoredEpisode:
        """All of `episode` up to its first missing chunk, or what its trim keeps of that.

        Raises:
            DataSetError: its first chunk is missing, or all steps that its trim keeps; its chunks have different
                columns, or its final picture has no valid shape.
            StoreError: it can no longer be read.
        """
        rows = self._complete_chunks(episode)
        if not len(rows):
            raise DataSetError(f"episode {episode}: its first chunk is not stored; choose another episode")
        chunks = [self._store.read(row) for row in rows]
        names = [name for name in chunks[0].columns if not is_camera_column(name)]
        cameras = [name for name in chunks[0].columns if is_camera(name)]
        if any(_column_types(chunk) != _column_types(chunks[0]) for chunk in chunks):
            raise DataSetError(f"episode {episode}: its chunks have different columns, which a dataset cannot store")
        columns = {name: np.concatenate([chunk.columns[name] for chunk in chunks]) for name in names}
        whole = StoredEpisode(
            header=chunks[-1].header,
            chunk_steps=tuple(chunk.header.steps for chunk in chunks),
            columns=columns | self._labelled(rows, columns),
            final=_final_observation(chunks[-1]),
            frames={name: [frame for chunk in chunks for frame in frames_of(chunk, name)] for name in cameras},
            captured_ns={
                n: np.concatenate([chunk.columns[n + CAPTURE_TIME_SUFFIX] for chunk in chunks]) for n in cameras
            },
        )
        kept = self._kept(episode, whole.steps)
        if kept[0] >= kept[1]:
            raise DataSetError(f"episode {episode}: no step that its trim keeps is stored; choose another episode")
        return whole if kept == (0, whole.steps) else whole.part(*kept)

    def _kept(self, episode: str, steps: int) -> tuple[int, int]:
        """The first step, and the one after the last, of so many recorded ones."""
        trim = newest_trim(effective_labels(self._index.labels(episode))) if self._trimmed else None
        return (0, steps) if trim is None else (trim.first_step, min(steps, trim.first_step + trim.steps))

    def _labelled(self, chunk_rows: Array, columns: Mapping[str, Array]) -> dict[str, Array]:
        """The columns that labels may have changed."""
        chunks, steps = self._index.chunks, self._index.steps
        first, count = chunks.first_row[chunk_rows], chunks.steps[chunk_rows]
        rows = np.concatenate([np.arange(start, start + n) for start, n in zip(first, count, strict=True)])
        labelled = {name: getattr(steps, name)[rows] for name in LABELLED_COLUMNS if name in columns}
        for name, recorded in columns.items():
            values = self._index.labelled_column(name, rows)
            if values is not None and recorded.ndim == 1:
                labelled[name] = np.where(np.isnan(values), recorded, values).astype(recorded.dtype)
        return labelled

    def _complete_chunks(self, episode: str) -> Array:
        """Rows of the chunks before the first missing one."""
        row = self._index.episodes.find(episode)
        rows = self._order[self._starts[row] : self._starts[row + 1]]
        chunks = self._index.chunks
        present = (chunks.index[rows] == np.arange(len(rows))) & ~chunks.gone[rows]
        prefix: Array = rows[np.logical_and.accumulate(present)]
        return prefix


def _column_types(chunk: Chunk) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]] | None]:
    """The dtype and the shape of a step of each column; None for a camera's, whose frames may differ."""
    return {n: None if is_camera_column(n) else (column.dtype, column.shape[1:]) for n, column in chunk.columns.items()}


def _final_observation(chunk: Chunk) -> dict[str, Array]:
    """The final observation, its raw pictures uint8 (h, w, 3). Raises DataSetError for pictures of another shape."""
    final = dict(chunk.final)
    for name, value in final.items():
        if not is_camera(name) or value.ndim == 1:
            continue
        if value.shape not in ((*value.shape[-3:-1], 3), (1, *value.shape[-3:-1], 3)) or not value.size:
            raise DataSetError(f"episode {chunk.header.episode}: its final {name!r} has the shape {value.shape}")
        final[name] = value.reshape(value.shape[-3:])
    return final


def is_camera_column(name: str) -> bool:
    """Whether a column holds a camera's frames or their metadata."""
    return name.startswith(IMAGE_PREFIX)


def is_camera(name: str) -> bool:
    """Whether a column holds a camera's frames."""
    return is_camera_column(name) and not name.endswith(FRAME_SUFFIXES)


def load_robot_specs(store: Path) -> dict[str, RobotSpec]:
    """Robot specs stored next to `store`, by the names of the embodiment."""
    return {name: card.spec for card in robot_records_of_store(store) for name in card.embodiments}


def element_labels(spec: RobotSpec | None) -> dict[str, Sequence[str]]:
    """Names of the elements of each vector, by feature; empty without a spec."""
    return {} if spec is None else {name: each.labels for name, each in vectors_of(spec).items()}


def vectors_of(spec: RobotSpec) -> dict[str, ArraySpec]:
    """The vectors of a step, by their column in a store."""
    observations = {each.name: each for each in spec.observation}
    return observations | {spec.action.name: spec.action, APPLIED_ACTION: spec.action}


def convert_angles(columns: Mapping[str, Array], spec: RobotSpec, *, to_degrees: bool) -> dict[str, Array]:
    """Returns `columns`, (..., n) each, with the angles of `spec` in degrees instead of rad, or the reverse.

    Raises DataSetError: a vector has another size than in `spec`.
    """
    converted = dict(columns)
    for name, each in vectors_of(spec).items():
        if name in converted:
            if (shape := converted[name].shape[-1:]) != each.shape:
                raise DataSetError(f"{name!r} has {shape[0]} elements, and that of {spec.model} {each.shape[0]}")
            scale = each.degrees_per_unit if to_degrees else 1 / each.degrees_per_unit
            converted[name] = (converted[name] * scale).astype(converted[name].dtype)
    return converted
