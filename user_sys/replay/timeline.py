"""How the steps of a store follow one another, and numbers for its observations.

An episode of T steps has T + 1 observations: one before each step and the final one. Observations are numbered in order
of storage, chunk by chunk, a chunk's final observation after those of its steps. So "the observation after step r" is a
number too, no frame is kept twice, and numbers that follow one another were stored together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from user_sys.codec import Array
from user_sys.store.index import Index

NONE = -1


class Place(NamedTuple):
    """Where observations are stored: the chunk's row, and the step within it; its count of steps for the final one."""

    chunk: Array
    step: Array


class Timeline:
    """An index and the numbers of its observations. The thread that refreshes the index calls `extend`.

    `locate` may be called by any thread, for numbers that it was told of.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._behind = np.zeros(1024, np.int64)
        self._first = self._behind[:1]  # a chunk's first observation; behind the last chunk: how many there are
        self.extend()

    @property
    def observations(self) -> int:
        """How many observations are stored; their numbers lie below."""
        return int(self._first[-1])

    def extend(self) -> None:
        """Numbers the observations of chunks that are new in the index."""
        chunks, known = self.index.chunks, len(self._first) - 1
        if len(chunks) == known:
            return
        if len(chunks) >= len(self._behind):
            grown = np.empty(2 * len(chunks), np.int64)
            grown[: known + 1] = self._first
            self._behind = grown
        counts = chunks.steps[known:].astype(np.int64) + chunks.has_final[known:]
        self._behind[known + 1 : len(chunks) + 1] = self._first[-1] + np.cumsum(counts)
        self._first = self._behind[: len(chunks) + 1]

    def observation(self, rows: Array) -> Array:
        """The number of the observation before each step, int64."""
        chunk = self.index.steps.chunk[rows]
        found: Array = self._first[chunk] + (rows - self.index.chunks.first_row[chunk])
        return found

    def following(self, rows: Array) -> Array:
        """The number of the observation after each step, int64; -1 where none is stored (yet)."""
        chunks, chunk = self.index.chunks, self.index.steps.chunk[rows]
        step = rows - chunks.first_row[chunk]
        within = (step < chunks.steps[chunk] - 1) | chunks.has_final[chunk]
        continued = chunks.next_chunk[chunk]
        after: Array = np.where(continued >= 0, self._first[continued], NONE)
        return np.where(within, self._first[chunk] + step + 1, after)

    def successor(self, rows: Array) -> Array:
        """The row of the next step of the same episode, int64; -1 where none is stored (yet)."""
        return self.index.successor(rows)

    def locate(self, numbers: Array) -> Place:
        """Where observations are stored."""
        first = self._first
        chunk = np.searchsorted(first, numbers, "right") - 1
        return Place(chunk, numbers - first[chunk])

    def span(self, chunk: int) -> range:
        """The numbers of a chunk's observations."""
        return range(int(self._first[chunk]), int(self._first[chunk + 1]))
