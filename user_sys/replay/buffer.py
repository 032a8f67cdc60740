"""The replay buffer: everything that a store holds as decoded observations, hot where it fits and cold else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from user_sys.codec import Array
from user_sys.errors import ConfigError
from user_sys.replay.batches import ObservationFeatures, ObservationIndex, ReadPlan
from user_sys.replay.cache import CacheWarmer, HotCache
from user_sys.replay.reader import CacheMiss, DiskReader
from user_sys.replay.selectors import AnyStepFilter, StepFilter
from user_sys.store.index import IndexChange
from user_sys.store.store import StoreReader

COLD_THREADS = 16
VECTORS_SHARE = 0.25  # of the cache, where there are cameras; vectors take far less than frames

ChangeListener = Callable[[ObservationIndex, IndexChange], None]


class CacheReport(NamedTuple):
    """How the cache did so far.

    Attributes:
        observations, cold: observations that were fetched; those of them that were not in the cache.
        damaged: chunks and frames that could not be used.
        cached: observations in the cache now (with their frames, where there are cameras).
        pending: chunks that are still to come into it.
    """

    observations: int
    misses: int
    damaged: int
    cached: int
    pending: int


class ReplayBuffer:
    """A store's experience for learners: follows it, keeps it hot, fetches observations wherever they are.

    One thread refreshes and closes it; any number may fetch meanwhile. Memory: `cache_bytes`, and beside it 12 bytes a
    chunk and, with cameras, 16 bytes an observation and camera; the index and the choosers come on top of that.

    Attributes:
        features: what an observation holds.
        observation_index: the steps stored, as of the last refresh.
    """

    def __init__(
        self,
        reader: StoreReader,
        features: ObservationFeatures,
        *,
        cache_bytes: int,
        step_filter: AnyStepFilter = StepFilter(),  # noqa: B008  # frozen
        fill_threads: int = 1,
        cold_threads: int = COLD_THREADS,
    ) -> None:
        """Follows `reader`, which nobody else may refresh; closing it is the caller's.

        Args:
            cache_bytes: memory of the hot cache, all of it allocated here.
            where: what is worth caching: chunks none of whose steps meet it are read when they are drawn.
            fill_threads, cold_threads: how many fill the cache, and read what it lacks.

        Raises:
            ConfigError: the cache is too small for a few rows, or there are no threads.
        """
        if min(fill_threads, cold_threads) < 1:
            raise ConfigError("a replay buffer needs a thread to fill the cache and one to read what it lacks")
        self.features, self._reader, self._where = features, reader, step_filter
        self.observation_index = ObservationIndex(reader.index)
        of_vectors = int(cache_bytes * VECTORS_SHARE) if features.cameras else cache_bytes
        self._vectors = HotCache.of_vectors(features, of_vectors)
        self._frames = HotCache.of_frames(features, cache_bytes - of_vectors) if features.cameras else None
        self._cold = DiskReader(reader, self.observation_index, features, self._vectors, self._frames, cold_threads)
        self._filler = CacheWarmer(self._load, fill_threads, most=self._rows.capacity)
        self._listeners: list[ChangeListener] = []
        self._refreshed = False
        self._fetched = self._missed = 0
        self._counting = threading.Lock()

    @property
    def _rows(self) -> HotCache:
        """The cache that decides what fits."""
        return self._vectors if self._frames is None else self._frames

    def subscribe(self, listener: ChangeListener) -> None:
        """Has `listener` told of each change, and of everything that is there already."""
        index, nothing = self.observation_index.index, np.empty(0, np.int64)
        listener(
            self.observation_index,
            IndexChange(range(len(index.steps)), range(len(index.chunks)), nothing, nothing, nothing),
        )
        self._listeners.append(listener)

    def refresh(self) -> IndexChange:
        """Takes in what was stored since the last call; never waits.

        Raises:
            StoreError: the store cannot be read.
        """
        change = self._reader.refresh()
        self.observation_index.extend()
        self._cold.extend()
        self._have_loaded(change)
        for listener in self._listeners:
            listener(self.observation_index, change)
        return change

    def _have_loaded(self, change: IndexChange) -> None:
        if len(change.rows):
            wanted = self._where.matches(self.observation_index, change.rows.start)
            chunks = np.unique(self.observation_index.index.steps.chunk[change.rows.start :][wanted])
            self._filler.add(chunks, fresh=self._refreshed)
        self._refreshed = True

    def _load(self, chunk: int, fresh: bool) -> bool:
        if not fresh and len(self._rows) >= self._rows.capacity:
            return False
        return self._cold.load(chunk, fresh=fresh) > 0 or fresh

    def read(self, fetches: Sequence[ReadPlan]) -> list[Array]:
        """Fills in observations; blocks for those that are cold. Any thread may call it.

        Returns the places of each fetch that could not be read: damaged, dropped, or without the features wanted.
        """
        vectors, frames = [], []
        for fetch in fetches:
            pictures = {name: out for name, out in fetch.out.items() if name in self.features.cameras}
            others = {name: out for name, out in fetch.out.items() if name not in pictures}
            vectors.append(_copy(self._vectors, fetch.numbers, others))
            frames.append(_copy(self._frames, fetch.numbers, pictures))
        self._count(fetches, vectors, frames)
        bad = [self._cold.vectors(each) if len(each.places) else each.places for each in vectors]
        if any(len(each.places) for each in frames):
            bad = [np.union1d(*both) for both in zip(bad, self._cold.frames(frames), strict=True)]
        return bad

    def _count(self, fetches: Sequence[ReadPlan], *missing: Sequence[CacheMiss]) -> None:
        cold = 0
        if any(len(each.places) for part in missing for each in part):
            cold = sum(len(np.union1d(*(each.places for each in both))) for both in zip(*missing, strict=True))
        with self._counting:
            self._fetched += sum(len(fetch.numbers) for fetch in fetches)
            self._missed += cold

    def report(self) -> CacheReport:
        """How the cache did so far."""
        return CacheReport(self._fetched, self._missed, self._cold.damaged, len(self._rows), self._filler.pending)

    def close(self) -> None:
        """Ends the threads. Calling it twice is harmless."""
        self._filler.close()
        self._cold.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _copy(cache: HotCache | None, numbers: Array, out: dict[str, Array]) -> CacheMiss:
    """Copies what `cache` holds of the observations `numbers`; returns the others."""
    places = np.flatnonzero(cache.copy(numbers, out)) if cache is not None and out else np.empty(0, np.int64)
    return CacheMiss(numbers[places], places, out)
