"""The hot cache: decoded observations in arrays that are allocated once.

It is set-associative: observation k may stand in any of the `WAYS` slots of set k mod sets, so that looking a batch up
is a handful of numpy operations, the memory is fixed whatever the store's size, and a stretch of experience that fits
is held whole.

What stays: new experience always gets in. For it the set gives up an empty slot, else one that was not drawn from since
the hand last passed (second chance, as in the CLOCK algorithm), else the lowest. So rows that are drawn more often than
others stay: demonstrations in half of each batch, high priorities, a window of recent experience. Under uniform draws
every rule hits cache / store, so nothing is lost. A row that was read cold comes in on probation: it gives way first.

Threads: any number may look up and copy while any number fill. A slot is filled only after its tag was taken away and
its stamp counted up; who copies checks the stamps again afterwards and treats what changed meanwhile as a miss.

The threads that bring experience into the hot cache, before somebody asks for it.
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
FEW_HITS = 0.25  # below this share they are copied one by one
EMPTY, BUSY = 0, -1  # tags; else an observation's number plus one
SLOT_BYTES = 8 + 4 + 1  # tag, stamp, mark


@dataclass(frozen=True)
class SlotClaim:
    """Slots that the claimant alone may fill.

    Attributes:
        taken: which of the observations asked for are to be filled; the others are there already or find no room.
        slots: their slots.
        tags: what the slots will be known by.
    """

    taken: Array
    slots: Array
    tags: Array


class HotCache:
    """Rows of some columns for the observations that are drawn most. See the module.

    Attributes:
        tables: name to (capacity, ...): fill only what was claimed.
        capacity: rows that fit.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], str]], budget_bytes: int) -> None:
        """Takes `budget_bytes` of memory at most, tags and marks counted; untouched pages are not resident yet.

        Args:
            shapes: column to the shape and dtype of a row.

        Raises:
            ConfigError: the budget leaves no room for one set.
        """
        row = SLOT_BYTES + sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())
        self._sets = budget_bytes // (row * WAYS)
        if self._sets < 1:
            raise ConfigError(f"a cache of {budget_bytes} bytes holds no {WAYS} rows of {row} bytes; give it more")
        self.capacity = self._sets * WAYS
        self.tables = {name: np.empty((self.capacity, *shape), dtype) for name, (shape, dtype) in shapes.items()}
        self._tags = np.zeros((WAYS, self._sets), np.int64)
        self._marks = np.zeros((WAYS, self._sets), np.uint8)  # 1: drawn from, or new, since the hand last passed
        self._stamps = np.zeros(self.capacity, np.uint32)
        self._held = 0
        self._lock = threading.Lock()  # tags, marks and stamps while they change

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
        """How many observations it holds."""
        return self._held

    def copy(self, numbers: Array, out: Mapping[str, Array]) -> Array:
        """Copies the rows of observations `numbers`, int64 (n,), into the arrays of `out`, each (n, ...).

        Returns bool (n,): the misses, whose places in `out` hold anything.
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
        """Claims slots for those of `numbers` that are not there; the block fills them.

        When the block ends well they can be found; when it raises they are empty.

        Args:
            fresh: new experience; else on probation.
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
        taken[np.unique(sets, return_index=True)[1]] = True  # one of each set, or two would get the same slot
        with self._lock:
            here, marks = self._tags[:, sets], self._marks[:, sets]
            cost = np.where(here == BUSY, 3, np.where(here == EMPTY, 0, 1 + marks))
            way = cost.argmin(0)
            cost = cost[way, np.arange(len(numbers))]
            taken &= ~(here == tags).any(0) & (cost <= (0 if only_empty else 2))
            self._marks[:, sets[taken & (cost == 2)]] = 0
            slots = (way * self._sets + sets)[taken]
            self._tags.reshape(-1)[slots] = BUSY
            self._stamps[slots] += 1
            self._held -= int((cost[taken] > 0).sum())
        return SlotClaim(np.flatnonzero(taken), slots, tags[taken])


def _rows(tables: Mapping[str, Array]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (table.shape[1:], table.dtype.name) for name, table in tables.items()}


STOP_DEADLINE_S = 30.0
NICENESS = 10  # of the threads, beside the process's: a learner that waits for a batch goes first

LoadChunk = Callable[[int, bool], bool]
"""Loads the chunk of a row; True says that it is new experience. Returns whether there may be room for more old ones.

Raises StoreError, WireError: it cannot be used; what loads counts it.
"""

_logger = logging.getLogger(__name__)


class CacheWarmer:
    """Loads chunks in the background: new experience first, then what was there before, the newest of it first.

    At most `most` chunks wait; the oldest are forgotten, they are read when they are drawn.
    """

    def __init__(self, load: LoadChunk, threads: int, most: int) -> None:
        self._load, self._most = load, most
        self._new, self._old = np.empty(0, np.int32), np.empty(0, np.int32)  # the newest last
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
        """Chunks that are still to be loaded, those in work included."""
        with self._changed:
            return len(self._new) + len(self._old) + self._busy

    def add(self, chunks: Array, fresh: bool) -> None:
        """Has the chunks of these rows loaded, in order of storage; returns at once."""
        with self._changed:
            if fresh:
                self._new = np.append(self._new, chunks)[-self._most :]
            else:
                self._old = np.append(self._old, chunks)[-self._most :]
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads and waits for the chunk that each is at, at most `STOP_DEADLINE_S`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(STOP_DEADLINE_S)

    def _run(self) -> None:
        os.nice(NICENESS)  # Linux: of this thread alone
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
