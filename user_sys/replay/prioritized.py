"""Sums of many weights that change, for drawing in proportion to them.

Prioritized sampling after Schaul, Quan, Antonoglou and Silver, "Prioritized Experience Replay", ICLR 2016
(arXiv 1511.05952), the proportional variant:

    p_i  = |delta_i| + epsilon                          (the greatest p so far until a row is drawn with its reward)
    P(i) = p_i^alpha / sum_k p_k^alpha
    w_i  = (N P(i))^-beta / max_j w_j                   (the maximum over the batch)

beta rises from `beta` to 1 over `beta_draws` draws. A batch is drawn stratified, one from each of n equal shares.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from user_sys.codec import Array
from user_sys.errors import ConfigError, WireError
from user_sys.replay.batches import ObservationIndex
from user_sys.replay.selectors import (
    AnyStepFilter,
    EligibleSteps,
    Selection,
    Selector,
    SelectorState,
    StepFilter,
    state_column,
)
from user_sys.store.index import Index, IndexChange

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


EPSILON = 1e-6


class PrioritizedSelector(Selector):
    """See the file's head. Memory: about 17 bytes a row of the store."""

    uses_feedback = True

    def __init__(
        self,
        step_filter: AnyStepFilter = StepFilter(),  # noqa: B008  # frozen
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_draws: int = 100_000,
    ) -> None:
        """Raises ConfigError: `alpha` or `beta` is not between 0 and 1, or `beta_draws` below 1."""
        if not 0 <= alpha <= 1 or not 0 <= beta <= 1 or beta_draws < 1:
            raise ConfigError(f"alpha {alpha} and beta {beta} must lie in 0..1, beta_draws {beta_draws} be at least 1")
        self._candidates, self._alpha, self._beta, self._beta_draws = (
            EligibleSteps(step_filter),
            alpha,
            beta,
            beta_draws,
        )
        self._powers = np.empty(0, np.float32)  # p^alpha of each row, whether it is a candidate or not
        self._rewards = np.empty(0, np.float32)  # of each row, for which its power holds
        self._tree = SumTree()
        self._greatest, self._draws = 1.0, 0

    def __len__(self) -> int:
        return len(self._candidates)

    def update(self, timeline: ObservationIndex, change: IndexChange) -> None:
        """See `Selector.update`."""
        total = len(timeline.index.steps)
        if total > len(self._powers):
            self._tree.grow(total)
            self._powers = _grown(self._powers, len(self._tree))
            self._rewards = _grown(self._rewards, len(self._tree))
        new = slice(change.rows.start, change.rows.stop)
        self._powers[new] = self._greatest**self._alpha
        self._rewards[new] = timeline.index.steps.reward[new]
        self._forget(timeline.index, change.relabelled)
        low = self._candidates.update(timeline, change)
        if low < total:
            self._lay(low, total)

    def _lay(self, low: int, total: int) -> None:
        """Puts the powers of rows `low` to `total` into the tree, of candidates only."""
        rows = self._candidates.rows
        rows = rows[np.searchsorted(rows, low) :]
        powers = np.zeros(total - low, np.float32)
        powers[rows - low] = self._powers[rows]
        self._tree.set(np.arange(low, total), powers)

    def _forget(self, index: Index, rows: Array) -> None:
        """Of `rows`, those whose reward a label changed have no TD error any more; `_lay` follows."""
        changed = rows[self._rewards[rows] != index.steps.reward[rows]]
        self._powers[changed] = self._greatest**self._alpha
        self._rewards[changed] = index.steps.reward[changed]

    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.choose`."""
        total = self._tree.total
        rows = self._tree.find((np.arange(n) + rng.random(n)) * (total / n))
        beta = min(1.0, self._beta + (1.0 - self._beta) * self._draws / self._beta_draws)
        self._draws += n
        weights = (len(self) / total * self._tree[rows].astype(np.float64)) ** -beta
        return Selection(rows, (weights / weights.max()).astype(np.float32), np.zeros(n, np.int32))

    def feedback(self, rows: Array, groups: Array, losses: Array) -> None:
        """See `Selector.feedback`: TD errors, of any sign. Those that are not finite are left out."""
        p = np.abs(np.asarray(losses, np.float64)) + EPSILON
        rows, p = rows[np.isfinite(p)], p[np.isfinite(p)]
        if not len(rows):
            return
        self._greatest = max(self._greatest, float(p.max()))
        self._powers[rows] = p**self._alpha
        inside = rows[self._tree[rows] > 0]  # others have gone meanwhile
        self._tree.set(inside, self._powers[inside])

    def state_dict(self, timeline: ObservationIndex) -> SelectorState:
        """See `Selector.state_dict`. Priorities stand by the sequence number of their chunk's record, which lasts."""
        chunks = timeline.index.chunks
        return {
            "greatest": np.array([self._greatest]),
            "draws": np.array([self._draws], np.int64),
            "sequence": chunks.sequence.copy(),
            "steps": chunks.steps.astype(np.int32),
            "powers": self._powers[: len(timeline.index.steps)].copy(),
            "rewards": self._rewards[: len(timeline.index.steps)].copy(),
        }

    def load_state_dict(self, state: Mapping[str, Array], timeline: ObservationIndex) -> None:
        """See `Selector.load_state_dict`. Rows that are new to the state, or relabelled since, count as new."""
        sequence, steps = state_column(state, "sequence"), state_column(state, "steps")
        powers, rewards = state_column(state, "powers"), state_column(state, "rewards")
        if len(sequence) != len(steps) or not int(steps.sum()) == len(powers) == len(rewards):
            raise WireError("the priorities of a sampler's state contradict one another")
        self._greatest = float(state_column(state, "greatest")[0])
        self._draws = int(state_column(state, "draws")[0])
        index, total = timeline.index, len(timeline.index.steps)
        self._powers[:total] = self._greatest**self._alpha
        rows, saved = match_rows(index, sequence, steps)
        self._powers[rows], self._rewards[rows] = powers[saved], rewards[saved]
        self._forget(index, rows)
        self._lay(0, total)


def _grown(column: Array, rows: int) -> Array:
    grown = np.full(rows, np.nan, np.float32)
    grown[: len(column)] = column
    return grown


def match_rows(index: Index, sequence: Array, steps: Array) -> tuple[Array, Array]:
    """The rows of chunks that were saved with the sequence numbers of their records and are still there.

    Args:
        sequence, steps: of the saved chunks, whose rows were saved one chunk after the other.

    Returns the rows of `index` and the places at which they were saved, both int64.
    """
    order = np.argsort(sequence)
    at = np.minimum(np.searchsorted(sequence, index.chunks.sequence, sorter=order), max(len(order) - 1, 0))
    saved = order[at] if len(order) else np.empty(0, np.int64)
    known = sequence[saved] == index.chunks.sequence if len(order) else np.zeros(len(index.chunks), bool)
    saved, counts = saved[known[: len(saved)]], index.chunks.steps[known].astype(np.int64)
    starts = (np.cumsum(steps, dtype=np.int64) - steps)[saved]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(index.chunks.first_row[known], counts) + within, np.repeat(starts, counts) + within
