"""The hot cache of decoded observations, and the threads that fill it.

The cache is set-associative: observation k can be in any of the `WAYS` slots of set k mod sets. Lookup of a batch
is a few numpy operations, memory is fixed for any size of store, and adjacent observations are cached together.

Replacement: new experience always enters. It takes an empty slot, otherwise one that was not drawn since the last
pass of the clock hand (second chance, as in CLOCK), otherwise the lowest. Rows that are drawn often therefore
stay: demonstrations, high priorities, recent experience. With uniform draws every policy has the hit rate
cache / store. A row that was read after a miss enters on probation and is replaced first.

Threads: any number may look up, copy and fill. A slot is filled only after its tag was removed and its stamp
incremented; a copying thread checks the stamps again and treats changed slots as misses.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from user_sys.codec import Array
from user_sys.errors import ConfigError, StoreError, WireError
from user_sys.replay.batches import ObservationFeatures

WAYS = 8
FEW_HITS = 0.25  # below this hit rate, rows are copied one by one
EMPTY, BUSY = 0, -1  # tags; other tags are an observation's number plus one
SLOT_BYTES = 8 + 4 + 1  # tag, stamp, mark
STOP_DEADLINE_S = 30.0
NICENESS = 10  # added to the process's, so that a waiting learner runs first
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotClaim:
    """Slots that only the claimant may fill.

    Attributes:
        taken: which of the requested observations to fill; the others are cached already or have no slot.
        slots: their slots.
        tags: their tags after filling.
    """

    taken: Array
    slots: Array
    tags: Array


class HotCache:
    """Rows of some columns for the most drawn observations. See the module.

    Attributes:
        tables: name to (capacity, ...); fill claimed slots only.
        capacity: number of rows.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], str]], budget_bytes: int) -> None:
        """Takes at most `budget_bytes` of memory with tags and marks; untouched pages are not resident yet.

        Args:
            shapes: column to the shape and dtype of a row.

        Raises:
            ConfigError: the budget is too small for one set.
        """
        row = SLOT_BYTES + sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())
        self._sets = budget_bytes // (row * WAYS)
        if self._sets < 1:
            raise ConfigError(
                f"a cache of {budget_bytes} bytes is too small for {WAYS} rows of {row} bytes; increase cache_bytes"
            )
        self.capacity = self._sets * WAYS
        self.tables = {name: np.empty((self.capacity, *shape), dtype) for name, (shape, dtype) in shapes.items()}
        self._tags = np.zeros((WAYS, self._sets), np.int64)
        self._marks = np.zeros((WAYS, self._sets), np.uint8)  # 1: drawn, or new, since the last pass of the clock hand
        self._stamps = np.zeros(self.capacity, np.uint32)
        self._held = 0
        self._lock = threading.Lock()  # guards changes of tags, marks and stamps

    @classmethod
    def of_vectors(cls, features: ObservationFeatures, budget_bytes: int) -> HotCache:
        """A cache of observation vectors and actions. Raises as the constructor."""
        return cls(
            {name: (table.shape[1:], "float32") for name, table in features.vector_tables(1).items()}, budget_bytes
        )

    @classmethod
    def of_frames(cls, features: ObservationFeatures, budget_bytes: int) -> HotCache:
        """A cache of decoded frames of all cameras. Raises as the constructor."""
        return cls(_rows(features.frame_tables(1)), budget_bytes)

    def __len__(self) -> int:
        """Number of cached observations."""
        return self._held

    def copy(self, numbers: Array, out: Mapping[str, Array]) -> Array:
        """Copies the rows of observations `numbers`, int64 (n,), into the arrays of `out`, each (n, ...).

        Returns the misses, bool (n,); their places in `out` are undefined.
        """
        sets, tags = numbers % self._sets, numbers + 1
        held = self._tags[:, sets] == tags
        slots = held.argmax(0) * self._sets + sets
        stamps = self._stamps[slots]
        hit = self._tags.reshape(-1)[slots] == tags
        hits = np.flatnonzero(hit)
        for name, target in out.items():
            if len(hits) > len(numbers) * FEW_HITS:
                # With mode="raise", numpy fills a copy of `out` first; every slot is in range. Misses copy anything.
                np.take(self.tables[name], slots, axis=0, out=target, mode="clip")
            else:
                for place, slot in zip(hits.tolist(), slots[hits].tolist(), strict=True):
                    target[place] = self.tables[name][slot]
        hit &= self._stamps[slots] == stamps
        self._marks.reshape(-1)[slots[hit]] = 1
        missed: Array = ~hit
        return missed

    @contextmanager
    def filling(self, numbers: Array, *, fresh: bool, only_empty: bool = False) -> Iterator[SlotClaim]:
        """Claims slots for uncached `numbers`; the body fills them.

        They become visible when the body ends normally, and empty when it raises.

        Args:
            fresh: new experience; otherwise on probation.
            only_empty: displace nothing.
        """
        claim = self._claim(np.asarray(numbers, np.int64), only_empty)
        filled = False
        try:
            yield claim
            filled = True
        finally:
            with self._lock:
                self._tags.reshape(-1)[claim.slots] = claim.tags if filled else EMPTY
                self._marks.reshape(-1)[claim.slots] = fresh
                self._held += len(claim.slots) if filled else 0

    def _claim(self, numbers: Array, only_empty: bool) -> SlotClaim:
        sets, tags = numbers % self._sets, numbers + 1
        taken = np.zeros(len(numbers), bool)
        taken[np.unique(sets, return_index=True)[1]] = True  # one per set, otherwise two would get the same slot
        with self._lock:
            tags_here, marks = self._tags[:, sets], self._marks[:, sets]
            cost = np.where(tags_here == BUSY, 3, np.where(tags_here == EMPTY, 0, 1 + marks))
            way = cost.argmin(0)
            cost = cost[way, np.arange(len(numbers))]
            taken &= ~(tags_here == tags).any(0) & (cost <= (0 if only_empty else 2))
            self._marks[:, sets[taken & (cost == 2)]] = 0
            slots = (way * self._sets + sets)[taken]
            self._tags.reshape(-1)[slots] = BUSY
            self._stamps[slots] += 1
            self._held -= int((cost[taken] > 0).sum())
        return SlotClaim(np.flatnonzero(taken), slots, tags[taken])


def _rows(tables: Mapping[str, Array]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (table.shape[1:], table.dtype.name) for name, table in tables.items()}


LoadChunk = Callable[[int, bool], bool]
"""Loads the chunk of a row; True marks new experience. Returns whether the cache may have room for older chunks.

Raises StoreError, WireError: the chunk is unusable; the loader counts it.
"""


class CacheWarmer:
    """Loads chunks into the cache in the background: new experience first, then older chunks, newest first.

    At most `most` chunks wait; older ones are dropped and read when drawn.
    """

    def __init__(self, load: LoadChunk, threads: int, most: int) -> None:
        self._load, self._most = load, most
        self._new, self._old = np.empty(0, np.int32), np.empty(0, np.int32)  # newest last
        self._busy = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"replay-fill-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pending(self) -> int:
        """Chunks still to be loaded, with those in progress."""
        with self._changed:
            return len(self._new) + len(self._old) + self._busy

    def add(self, chunks: Array, fresh: bool) -> None:
        """Queues the chunks of these rows, in storage order; returns at once."""
        with self._changed:
            if fresh:
                self._new = np.append(self._new, chunks)[-self._most :]
            else:
                self._old = np.append(self._old, chunks)[-self._most :]
            self._changed.notify_all()

    def close(self) -> None:
        """Stops the threads and waits at most `STOP_DEADLINE_S` for their current chunks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(STOP_DEADLINE_S)

    def _run(self) -> None:
        os.nice(NICENESS)  # on Linux, only this thread
        while (task := self._next()) is not None:
            room = True
            try:
                room = self._load(*task)
            except (StoreError, WireError) as error:
                _logger.debug("replay.not_cached chunk=%d: %s", task[0], error)
            with self._changed:
                self._busy -= 1
                if not room:
                    self._old = self._old[:0]

    def _next(self) -> tuple[int, bool] | None:
        with self._changed:
            while not self._closed and not len(self._new) and not len(self._old):
                self._changed.wait(1.0)
            if self._closed:
                return None
            self._busy += 1
            if len(self._new):
                chunk, self._new = int(self._new[-1]), self._new[:-1]
                return chunk, True
            chunk, self._old = int(self._old[-1]), self._old[:-1]
            return chunk, False
