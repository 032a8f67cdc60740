"""Sums of many weights that change, for drawing in proportion to them."""

from __future__ import annotations

import numpy as np

from user_sys.codec import Array

FAN = 16


class SumTree:
    """Weights in a tree of fan-out `FAN`: setting and finding m of N costs O(m log N), whole arrays at a time.

    Each sum is always added up anew from what it sums, so that the tree is a function of its weights alone, and errors
    never add up. Memory: 4 bytes a weight and half a byte for the sums.
    """

    def __init__(self) -> None:
        self._levels: list[Array] = [np.zeros(FAN, np.float32), np.zeros(1)]  # weights first, the total last

    def __len__(self) -> int:
        """How many weights there is room for; those never set are 0."""
        return len(self._levels[0])

    @property
    def total(self) -> float:
        return float(self._levels[-1][0])

    def grow(self, size: int) -> None:
        """Makes room for `size` weights at least, by doubling."""
        if size <= len(self):
            return
        leaves = np.zeros(-(-max(size, 2 * len(self)) // FAN) * FAN, np.float32)
        leaves[: len(self)] = self._levels[0]
        self._levels = [leaves]
        while len(self._levels[-1]) > 1:
            below = self._levels[-1]
            if len(below) % FAN:  # only where one node is left above
                below = self._levels[-1] = np.append(below, np.zeros(-len(below) % FAN))
            self._levels.append(below.reshape(-1, FAN).sum(1, dtype=np.float64))

    def __getitem__(self, places: Array | slice) -> Array:
        """Weights, float32."""
        weights: Array = self._levels[0][places]
        return weights

    def set(self, places: Array, weights: Array) -> None:
        """Sets weights, none below 0; of equal places the last counts."""
        self._levels[0][places] = weights
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            places = np.unique(places // FAN)
            above[places] = below.reshape(-1, FAN)[places].sum(1, dtype=np.float64)

    def find(self, heights: Array) -> Array:
        """For each height in [0, total) the place at which the weights so far add up beyond it, int64.

        It is a place whose weight is above 0, whatever the rounding.
        """
        places = np.zeros(len(heights), np.int64)
        heights = heights.copy()
        for level in reversed(self._levels[:-1]):
            weights = level.reshape(-1, FAN)[places].astype(np.float64)
            ends = np.cumsum(weights, axis=1)
            last = FAN - 1 - (weights[:, ::-1] > 0).argmax(1)
            child = np.minimum((ends <= heights[:, None]).sum(1), last)
            rows = np.arange(len(child))
            heights -= ends[rows, child] - weights[rows, child]
            places = places * FAN + child
        return places
