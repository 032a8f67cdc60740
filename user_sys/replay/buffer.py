"""The replay buffer: a ring of rows in memory, fed from the store, sampled uniformly.

A row is one observation and what was done there. An episode of T steps takes T + 1 rows, the last one being its final
observation, so that no observation and no frame is kept twice: a transition is a row and its *successor*. Rows of
episodes that stream in at the same time interleave; `successor` links them. Only a row that has a successor can be
sampled, so neither the newest step of a running episode nor the last one of an episode that a crash cut short is ever
drawn, and no transition crosses from one episode into another.
"""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import dataclass

import numpy as np

from user_sys.codec import Array
from user_sys.episode import APPLIED, Chunk, ChunkHeader
from user_sys.errors import ConfigError, StoreCorrupt, WireError
from user_sys.replay.frames import decode_frames
from user_sys.replay.rng import SamplerRng
from user_sys.replay.rows import SCALARS, Batch, Features, check_features
from user_sys.replay.select import Select, Selector
from user_sys.store.store import StoreReader

__all__ = ["Batch", "Features", "ReplayBuffer"]

MAX_OPEN_EPISODES = 256
NONE = -1  # no row

_logger = logging.getLogger(__name__)


@dataclass
class _OpenEpisode:
    """An episode that may go on: what its next chunk must continue.

    `row` is the absolute number of its newest row if that waits for a successor, else NONE.
    """

    next_index: int
    next_step: int
    row: int
    frames: dict[str, Array]


class ReplayBuffer:
    """Rows of the newest experience, overwritten in a ring. Every method may be called from any thread.

    Attributes:
        features: what a row holds.
        capacity: rows that fit.
        skipped: chunks that could not be taken: damaged, or without the features asked for.
    """

    def __init__(
        self,
        features: Features,
        *,
        capacity_rows: int | None = None,
        budget_bytes: int | None = None,
        select: Selector | None = None,
        seed: int = 0,
    ) -> None:
        """Exactly one of `capacity_rows` and `budget_bytes` is given; all memory is allocated here.

        Raises:
            ConfigError: neither or both are given, or they leave no room for two rows.
        """
        if (capacity_rows is None) == (budget_bytes is None):
            raise ConfigError("give a replay buffer either capacity_rows or budget_bytes")
        self.capacity = capacity_rows if capacity_rows is not None else (budget_bytes or 0) // features.row_bytes
        if self.capacity < 2:
            raise ConfigError(f"a replay buffer needs at least 2 rows of {features.row_bytes} bytes")
        self.features, self.skipped = features, 0
        self._select: Selector = select or Select()
        self._tables = features.tables(self.capacity)
        self._successor = np.full(self.capacity, -1, np.int64)
        self._candidates = np.empty(self.capacity, np.int64)  # the slots that can be sampled, in its first _size places
        self._place = np.full(self.capacity, -1, np.int64)  # where a slot stands among the candidates; -1: nowhere
        self._size = self._head = self._cursor = 0
        self._open: dict[str, _OpenEpisode] = {}
        self._rng = SamplerRng(seed)
        self._filling = threading.RLock()  # one filler at a time; taken before _lock
        self._lock = threading.Lock()  # rows and index

    def __len__(self) -> int:
        """How many transitions can be sampled now."""
        return self._size

    # Filling.

    def follow(self, reader: StoreReader, max_chunks: int | None = None) -> int:
        """Takes in what the store has that this buffer has not seen yet, at most `max_chunks` chunks; never waits.

        One buffer follows one reader for its life. What it holds depends on the store's content alone, and not on how
        many calls it took. Returns the number of transitions that became sampleable.

        Raises:
            StoreError: the store cannot be read.
        """
        with self._filling:
            reader.refresh()
            stop = None if max_chunks is None else self._cursor + max_chunks
            gained = 0
            for row in range(self._cursor, min(len(reader.index.chunks), stop or sys.maxsize)):
                self._cursor += 1
                try:
                    gained += self.add(reader.read(row))
                except StoreCorrupt as error:
                    self._skip(f"chunk row {row}", error)
            return gained

    def add(self, chunk: Chunk) -> int:
        """Takes the steps of `chunk` that the selector wants; returns how many transitions became sampleable."""
        with self._filling:
            wanted = np.array(self._select(chunk), bool)
            if not wanted.any() and chunk.header.episode not in self._open:
                return 0
            before = self._continued(chunk)
            try:
                check_features(chunk, self.features)
                # Decoding is slow and touches no row: samplers need not wait for it.
                frames, first = decode_frames(chunk, self.features.cameras, before.frames if before else {})
            except WireError as error:
                self._skip(f"episode {chunk.header.episode} chunk {chunk.header.index}", error)
                return 0
            wanted[:first] = False
            with self._lock:
                gained, newest = self._write(chunk, wanted, frames, before.row if before else NONE)
            self._keep_open(chunk.header, newest, {name: array[-1].copy() for name, array in frames.items()})
            return gained

    def _skip(self, what: str, error: Exception) -> None:
        self.skipped += 1
        _logger.warning("replay.skipped %s: %s", what, error)

    def _continued(self, chunk: Chunk) -> _OpenEpisode | None:
        """Takes out what is open of the chunk's episode; None unless the chunk goes on exactly where that stopped."""
        before = self._open.pop(chunk.header.episode, None)
        here = (chunk.header.index, chunk.header.first_step)
        return before if before is not None and here == (before.next_index, before.next_step) else None

    def _keep_open(self, header: ChunkHeader, newest: int, frames: dict[str, Array]) -> None:
        if header.end is None:
            self._open[header.episode] = _OpenEpisode(
                header.index + 1, header.first_step + header.steps, newest, frames
            )
            if len(self._open) > MAX_OPEN_EPISODES:  # episodes that a crash cut short never end
                del self._open[next(iter(self._open))]

    def _write(self, chunk: Chunk, wanted: Array, frames: dict[str, Array], waiting: int) -> tuple[int, int]:
        """Writes the wanted steps and their successors.

        `waiting` is the absolute row that waits for this chunk's first step, or NONE. Returns the number of transitions
        gained, and the absolute row that waits for the next chunk, or NONE.
        """
        rows = len(wanted) + (chunk.header.end is not None)
        kept = np.zeros(rows, bool)
        kept[: len(wanted)] = wanted
        kept[1:] |= wanted[: rows - 1]
        kept[0] |= waiting != NONE
        steps = np.flatnonzero(kept)[-self.capacity :]
        slots = self._allot(len(steps))
        self._fill(chunk, steps, slots, frames)
        linked = np.append(wanted, False)[steps[:-1]]  # whatever follows a wanted step was kept too
        sources, targets = slots[:-1][linked], slots[1:][linked]
        if waiting != NONE and waiting >= self._head - self.capacity and steps[0] == 0:
            sources, targets = np.append(waiting % self.capacity, sources), np.append(slots[0], targets)
        self._link(sources, targets)
        return len(sources), self._head - 1 if chunk.header.end is None and wanted[-1] else NONE

    def _allot(self, count: int) -> Array:
        """The next `count` slots of the ring, with what they held forgotten."""
        slots: Array = np.arange(self._head, self._head + count, dtype=np.int64) % self.capacity
        self._head += count
        for slot in slots[self._place[slots] >= 0].tolist():
            self._size -= 1
            hole, last = self._place[slot], self._candidates[self._size]
            self._candidates[hole], self._place[last] = last, hole
            self._place[slot] = -1
        # A row is forgotten before its successor, which is younger: no link points to a new row by mistake.
        self._successor[slots] = -1
        return slots

    def _fill(self, chunk: Chunk, steps: Array, slots: Array, frames: dict[str, Array]) -> None:
        columns = {name: chunk.columns[name] for name in (*self.features.vectors, *SCALARS)}
        body = steps[steps < chunk.header.steps]
        for name, column in (columns | {"action": chunk.columns[APPLIED]}).items():
            self._tables[name][slots[: len(body)]] = column[body]
        if len(body) < len(steps):
            for name in self.features.vectors:
                self._tables[name][slots[-1]] = chunk.final[name].reshape(-1)
        for name, pictures in frames.items():
            self._tables[name][slots] = pictures[steps]

    def _link(self, sources: Array, targets: Array) -> None:
        self._successor[sources] = targets
        places = np.arange(self._size, self._size + len(sources))
        self._candidates[places] = sources
        self._place[sources] = places
        self._size += len(sources)

    # Sampling.

    def empty_batch(self, n: int) -> Batch:
        """Arrays for a batch of `n`, to be given to `sample` again and again."""
        return Batch.empty(self.features, n)

    def sample(self, n: int, rng: np.random.Generator | None = None, out: Batch | None = None) -> Batch:
        """Draws `n` transitions uniformly, with replacement, by `rng` or else the buffer's own generator.

        Fills and returns `out` where it is given, which must be of length `n` and allocates nothing of size.

        Raises:
            ValueError: nothing can be sampled yet (see `len`), or `out` has another length.
        """
        batch = self.empty_batch(n) if out is None else out
        if len(batch) != n:
            raise ValueError(f"the batch to fill has length {len(batch)}; {n} were asked for")
        with self._lock:
            if not self._size:
                raise ValueError("the replay buffer holds no transition yet")
            picks = (rng or self._rng.generator).integers(0, self._size, n)
            # With mode="raise", numpy fills a copy of `out` first; every index is in range.
            np.take(self._candidates, picks, out=batch.index, mode="clip")
            self._gather(batch)
        return batch

    def _gather(self, batch: Batch) -> None:
        successors = np.take(self._successor, batch.index)
        for name, target in batch.observation.items():
            table = self._tables[name]
            np.take(table, batch.index, axis=0, out=target, mode="clip")
            np.take(table, successors, axis=0, out=batch.next_observation[name], mode="clip")
        for name in ("action", *SCALARS):
            np.take(self._tables[name], batch.index, axis=0, out=getattr(batch, name), mode="clip")

    def state_dict(self) -> dict[str, str]:
        """The state of the buffer's own generator; its rows are rebuilt from the store."""
        return self._rng.state_dict()

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Continues the generator where `state` was taken. Raises ConfigError when it is no such state."""
        self._rng.load_state_dict(state)
