"""The replay buffer: all observations of a store, from the hot cache or from disk."""

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
VECTORS_SHARE = 0.25  # of the cache, with cameras; vectors are much smaller than frames

ChangeListener = Callable[[ObservationIndex, IndexChange], None]


class CacheReport(NamedTuple):
    """Cache statistics.

    Attributes:
        observations, misses: observations read so far; those of them that were not cached.
        damaged: unusable chunks and frames.
        cached: observations in the cache now (with their frames, if there are cameras).
        pending: chunks still to be loaded into it.
    """

    observations: int
    misses: int
    damaged: int
    cached: int
    pending: int


class ReplayBuffer:
    """A store's experience for learners: follows the store, caches it, and reads observations.

    One thread refreshes and closes it; `read` is thread-safe. Memory: `cache_bytes`, 12 bytes per chunk and, with
    cameras, 16 bytes per observation and camera, in addition to the index and the selectors.

    Attributes:
        features: contents of an observation.
        observation_index: the stored steps as of the last refresh.
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
        """Follows `reader`, which no other object may refresh; the caller closes it.

        Args:
            cache_bytes: memory of the hot cache, allocated here.
            step_filter: chunks without a matching step are not cached and are read when drawn.
            fill_threads, cold_threads: threads that fill the cache, and that read misses.

        Raises:
            ConfigError: the cache is too small for a few rows, or a number of threads is below 1.
        """
        if min(fill_threads, cold_threads) < 1:
            raise ConfigError("fill_threads and cold_threads must be at least 1")
        self.features, self._reader, self._step_filter = features, reader, step_filter
        self.observation_index = ObservationIndex(reader.index)
        of_vectors = int(cache_bytes * VECTORS_SHARE) if features.cameras else cache_bytes
        self._vectors = HotCache.of_vectors(features, of_vectors)
        self._frames = HotCache.of_frames(features, cache_bytes - of_vectors) if features.cameras else None
        self._disk = DiskReader(reader, self.observation_index, features, self._vectors, self._frames, cold_threads)
        self._warmer = CacheWarmer(self._load, fill_threads, most=self._rows.capacity)
        self._listeners: list[ChangeListener] = []
        self._refreshed = False
        self._fetched = self._missed = 0
        self._count_lock = threading.Lock()

    @property
    def _rows(self) -> HotCache:
        """The cache that limits the number of observations."""
        return self._vectors if self._frames is None else self._frames

    def subscribe(self, listener: ChangeListener) -> None:
        """Calls `listener` with all current content, and then with each change."""
        index, nothing = self.observation_index.index, np.empty(0, np.int64)
        listener(
            self.observation_index,
            IndexChange(range(len(index.steps)), range(len(index.chunks)), nothing, nothing, nothing),
        )
        self._listeners.append(listener)

    def refresh(self) -> IndexChange:
        """Adds new content of the store; never waits.

        Raises:
            StoreError: the store cannot be read.
        """
        change = self._reader.refresh()
        self.observation_index.extend()
        self._disk.extend()
        self._queue_new_chunks(change)
        for listener in self._listeners:
            listener(self.observation_index, change)
        return change

    def _queue_new_chunks(self, change: IndexChange) -> None:
        if len(change.rows):
            matching = self._step_filter.matches(self.observation_index, change.rows.start)
            chunks = np.unique(self.observation_index.index.steps.chunk[change.rows.start :][matching])
            self._warmer.add(chunks, fresh=self._refreshed)
        self._refreshed = True

    def _load(self, chunk: int, fresh: bool) -> bool:
        if not fresh and len(self._rows) >= self._rows.capacity:
            return False
        return self._disk.load(chunk, fresh=fresh) > 0 or fresh

    def read(self, plans: Sequence[ReadPlan]) -> list[Array]:
        """Reads observations; blocks for misses. Thread-safe.

        Returns the unreadable places of each plan: damaged, dropped, or without the features.
        """
        vectors, frames = [], []
        for plan in plans:
            images = {name: out for name, out in plan.out.items() if name in self.features.cameras}
            others = {name: out for name, out in plan.out.items() if name not in images}
            vectors.append(_copy(self._vectors, plan.numbers, others))
            frames.append(_copy(self._frames, plan.numbers, images))
        self._count(plans, vectors, frames)
        bad = [self._disk.vectors(each) if len(each.places) else each.places for each in vectors]
        if any(len(each.places) for each in frames):
            bad = [np.union1d(*both) for both in zip(bad, self._disk.frames(frames), strict=True)]
        return bad

    def _count(self, plans: Sequence[ReadPlan], *missing: Sequence[CacheMiss]) -> None:
        misses = 0
        if any(len(each.places) for part in missing for each in part):
            misses = sum(len(np.union1d(*(each.places for each in both))) for both in zip(*missing, strict=True))
        with self._count_lock:
            self._fetched += sum(len(plan.numbers) for plan in plans)
            self._missed += misses

    def report(self) -> CacheReport:
        """Current cache statistics."""
        return CacheReport(self._fetched, self._missed, self._disk.damaged, len(self._rows), self._warmer.pending)

    def close(self) -> None:
        """Stops the threads. Idempotent."""
        self._warmer.close()
        self._disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _copy(cache: HotCache | None, numbers: Array, out: dict[str, Array]) -> CacheMiss:
    """Copies the cached ones of the observations `numbers`; returns the misses."""
    places = np.flatnonzero(cache.copy(numbers, out)) if cache is not None and out else np.empty(0, np.int64)
    return CacheMiss(numbers[places], places, out)
