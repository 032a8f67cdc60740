"""A progress bar over steps, for exports and imports.

Whole episodes out of a store: which are chosen, what they hold, one in memory at a time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hal.spec import RobotSpec
from user_sys.codec import Array
from user_sys.episode import CAPTURE_TIME_SUFFIX, FRAME_SUFFIXES, IMAGE_PREFIX, ChunkHeader, EpisodeSource
from user_sys.errors import DataSetError
from user_sys.interchange.frames import Frame, frame_size, frames_of
from user_sys.robot_records import robot_records_of_store
from user_sys.store.index import LABELLED_COLUMNS, EpisodeSummary
from user_sys.store.store import StoreReader

Advance = Callable[[int], object]  # told how many more steps are done


@contextmanager
def step_bar(what: str, steps: int) -> Iterator[Advance]:
    """Shows a bar on standard error while the body runs; where that is no terminal, nothing moves."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=steps)
        yield lambda done: progress.advance(task, done)


class ControlledBy(enum.StrEnum):
    """Who drove an episode, by its steps' phases: in TELEOP and CORRECTION a person did, or the scripted expert."""

    POLICY = "policy"
    PERSON = "person"
    BOTH = "both"

    @classmethod
    def of(cls, episode: EpisodeSummary) -> ControlledBy:
        if not episode.intervention_steps:
            return cls.POLICY
        return cls.PERSON if episode.intervention_steps == episode.steps else cls.BOTH


class EpisodeFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which episodes leave the store; an empty tuple, or None, does not choose.

    Attributes:
        incomplete: take also episodes that never ended, up to their first missing chunk.
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
    """What each step of an episode holds.

    Attributes:
        columns: name, dtype and shape a step.
        cameras: feature name, height and width in pixels.
    """

    columns: tuple[tuple[str, str, tuple[int, ...]], ...]
    cameras: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class StoredEpisode:
    """An episode of T steps, whole in memory.

    Attributes:
        header: of its last chunk, so that ``header.end`` is set where the episode is complete.
        chunk_steps: how many steps each of its chunks had.
        columns: (T, ...) each; cameras left out.
        final: the observation after the last step; empty where the episode never ended.
        frames: a camera's feature name to T frames, None where the frame before still stands.
        captured_ns: a camera's feature name to int64 (T,): when the frame that stands was captured; 0 where none does.
    """

    header: ChunkHeader
    chunk_steps: tuple[int, ...]
    columns: Mapping[str, Array]
    final: Mapping[str, Array]
    frames: Mapping[str, list[Frame | None]]
    captured_ns: Mapping[str, Array]

    @property
    def steps(self) -> int:
        return sum(self.chunk_steps)


class EpisodeReader:
    """The episodes of a store as it was when this was made, with what labels say of them. One thread uses it."""

    def __init__(self, store: StoreReader) -> None:
        store.refresh()
        self._store, self._index = store, store.index
        chunks = self._index.chunks
        self._order = np.lexsort((chunks.index, chunks.episode))
        self._starts = np.searchsorted(chunks.episode[self._order], np.arange(len(self._index.episodes) + 1))

    def select(self, selection: EpisodeFilter) -> list[EpisodeSummary]:
        """What `selection` takes, in the order of storage.

        Raises:
            DataSetError: an episode that is named does not exist, or nothing is left.
        """
        known = [episode for episode in self._store.episodes() if not episode.deleted]
        missing = set(selection.episodes) - {episode.episode for episode in known}
        if missing:
            raise DataSetError(f"the store has no episode {min(missing)!r}; `user-sys store inspect` lists what it has")
        chosen = [episode for episode in known if selection.matches(episode) and self.steps(episode.episode)]
        if not chosen:
            raise DataSetError(f"none of the store's {len(known)} episodes is chosen; loosen the filters")
        return chosen

    def steps(self, episode: str) -> int:
        """How many steps `read` gives."""
        return int(self._index.chunks.steps[self._whole(episode)].sum())

    def sentence(self, episode: str) -> str:
        """What the robot was told to do; the task's name where there were no words."""
        episodes = self._index.episodes
        row = episodes.find(episode)
        said: str = episodes.sentences.names[episodes.sentence[row]] or episodes.tasks.names[episodes.task[row]]
        return said

    def layout(self, episode: str) -> StepLayout:
        """What a step of `episode` holds; reads no further than the first frame of each camera."""
        cameras: dict[str, tuple[int, int]] = {}
        columns: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
        for row in self._whole(episode):
            chunk = self._store.read(row)
            columns = columns or tuple(
                (name, array.dtype.name, array.shape[1:]) for name, array in chunk.columns.items() if not _visual(name)
            )
            names = [name for name in chunk.columns if _camera(name)]
            for name in names:
                first = next((frame for frame in frames_of(chunk, name) if frame is not None), None)
                if name not in cameras and first is not None:
                    cameras[name] = frame_size(first)
            if len(cameras) == len(names):
                break
        return StepLayout(columns, tuple((name, *size) for name, size in sorted(cameras.items())))

    def read(self, episode: str) -> StoredEpisode:
        """All of `episode` up to its first missing chunk.

        Raises:
            DataSetError: its chunks hold unlike columns.
            StoreError: it can no longer be read.
        """
        rows = self._whole(episode)
        chunks = [self._store.read(row) for row in rows]
        names = [name for name in chunks[0].columns if not _visual(name)]
        cameras = [name for name in chunks[0].columns if _camera(name)]
        if any(chunk.columns.keys() != chunks[0].columns.keys() for chunk in chunks):
            raise DataSetError(f"episode {episode}: its columns change on the way, which a data set cannot express")
        columns = {name: np.concatenate([chunk.columns[name] for chunk in chunks]) for name in names}
        return StoredEpisode(
            header=chunks[-1].header,
            chunk_steps=tuple(chunk.header.steps for chunk in chunks),
            columns=columns | self._labelled(rows, columns),
            final=chunks[-1].final,
            frames={name: [frame for chunk in chunks for frame in frames_of(chunk, name)] for name in cameras},
            captured_ns={
                n: np.concatenate([chunk.columns[n + CAPTURE_TIME_SUFFIX] for chunk in chunks]) for n in cameras
            },
        )

    def _labelled(self, chunk_rows: Array, columns: Mapping[str, Array]) -> dict[str, Array]:
        """The columns that labels may have changed."""
        chunks, steps = self._index.chunks, self._index.steps
        first, count = chunks.first_row[chunk_rows], chunks.steps[chunk_rows]
        rows = np.concatenate([np.arange(start, start + n) for start, n in zip(first, count, strict=True)])
        return {name: getattr(steps, name)[rows] for name in LABELLED_COLUMNS if name in columns}

    def _whole(self, episode: str) -> Array:
        """The rows of the chunks before the first one that is missing."""
        row = self._index.episodes.find(episode)
        rows = self._order[self._starts[row] : self._starts[row + 1]]
        chunks = self._index.chunks
        there = (chunks.index[rows] == np.arange(len(rows))) & ~chunks.gone[rows]
        whole: Array = rows[np.logical_and.accumulate(there)]
        return whole


def _visual(name: str) -> bool:
    return name.startswith(IMAGE_PREFIX)


def _camera(name: str) -> bool:
    return _visual(name) and not name.endswith(FRAME_SUFFIXES)


def load_robot_specs(store: Path) -> dict[str, RobotSpec]:
    """The specs of the robots that are known beside `store`, by embodiment."""
    return {card.spec.embodiment: card.spec for card in robot_records_of_store(store)}
