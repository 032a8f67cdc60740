"""Prioritized sampling after Schaul, Quan, Antonoglou and Silver, "Prioritized Experience Replay", ICLR 2016
(arXiv 1511.05952), the proportional variant:

    p_i  = |delta_i| + epsilon                          (the maximum p so far until a row is drawn with its reward)
    P(i) = p_i^alpha / sum_k p_k^alpha
    w_i  = (N P(i))^-beta / max_j w_j                   (the maximum over the batch)

beta rises from `beta` to 1 over `beta_draws` draws. A batch is stratified: one draw from each of n equal shares.
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
EPSILON = 1e-6


class SumTree:
    """Weights in a tree of fan-out `FAN`: setting and finding m of N costs O(m log N), vectorised.

    Each sum is recomputed from its children, so the tree is a function of its weights and rounding errors do not
    accumulate. Memory: 4 bytes a weight and half a byte for the sums.
    """

    def __init__(self) -> None:
        self._levels: list[Array] = [np.zeros(FAN, np.float32), np.zeros(1)]  # leaves first, root last

    def __len__(self) -> int:
        """Capacity in weights; weights never set are 0."""
        return len(self._levels[0])

    @property
    def total(self) -> float:
        return float(self._levels[-1][0])

    def grow(self, size: int) -> None:
        """Increases the capacity to at least `size` by doubling."""
        if size <= len(self):
            return
        leaves = np.zeros(-(-max(size, 2 * len(self)) // FAN) * FAN, np.float32)
        leaves[: len(self)] = self._levels[0]
        self._levels = [leaves]
        while len(self._levels[-1]) > 1:
            below = self._levels[-1]
            if len(below) % FAN:  # only if the level above has one node
                below = self._levels[-1] = np.append(below, np.zeros(-len(below) % FAN))
            self._levels.append(below.reshape(-1, FAN).sum(1, dtype=np.float64))

    def __getitem__(self, places: Array | slice) -> Array:
        """Weights, float32."""
        weights: Array = self._levels[0][places]
        return weights

    def set(self, places: Array, weights: Array) -> None:
        """Sets non-negative weights; of equal places the last counts."""
        self._levels[0][places] = weights
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            places = np.unique(places // FAN)
            above[places] = below.reshape(-1, FAN)[places].sum(1, dtype=np.float64)

    def find(self, heights: Array) -> Array:
        """For each height in [0, total), the place at which the cumulative weight exceeds it, int64.

        The weight at that place is above 0 despite rounding.
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


class PrioritizedSelector(Selector):
    """See the module. Memory is about 17 bytes per row of the store."""

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
        self._eligible, self._alpha, self._beta, self._beta_draws = (
            EligibleSteps(step_filter),
            alpha,
            beta,
            beta_draws,
        )
        self._powers = np.empty(0, np.float32)  # p^alpha of each row, eligible or not
        self._rewards = np.empty(0, np.float32)  # reward of each row when its power was set
        self._tree = SumTree()
        self._maximum, self._draws = 1.0, 0

    def __len__(self) -> int:
        return len(self._eligible)

    def update(self, observations: ObservationIndex, change: IndexChange) -> None:
        """See `Selector.update`."""
        total = len(observations.index.steps)
        if total > len(self._powers):
            self._tree.grow(total)
            self._powers = _grown(self._powers, len(self._tree))
            self._rewards = _grown(self._rewards, len(self._tree))
        new = slice(change.rows.start, change.rows.stop)
        self._powers[new] = self._maximum**self._alpha
        self._rewards[new] = observations.index.steps.reward[new]
        self._reset_relabelled(observations.index, change.relabelled)
        low = self._eligible.update(observations, change)
        if low < total:
            self._set_powers(low, total)

    def _set_powers(self, low: int, total: int) -> None:
        """Sets the powers of rows `low` to `total` in the tree; rows that are not eligible get 0."""
        rows = self._eligible.rows
        rows = rows[np.searchsorted(rows, low) :]
        powers = np.zeros(total - low, np.float32)
        powers[rows - low] = self._powers[rows]
        self._tree.set(np.arange(low, total), powers)

    def _reset_relabelled(self, index: Index, rows: Array) -> None:
        """Resets the priority of those `rows` whose reward a label changed; `_set_powers` follows."""
        changed = rows[self._rewards[rows] != index.steps.reward[rows]]
        self._powers[changed] = self._maximum**self._alpha
        self._rewards[changed] = index.steps.reward[changed]

    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.select`."""
        total = self._tree.total
        rows = self._tree.find((np.arange(n) + rng.random(n)) * (total / n))
        beta = min(1.0, self._beta + (1.0 - self._beta) * self._draws / self._beta_draws)
        self._draws += n
        weights = (len(self) / total * self._tree[rows].astype(np.float64)) ** -beta
        return Selection(rows, (weights / weights.max()).astype(np.float32), np.zeros(n, np.int32))

    def feedback(self, rows: Array, groups: Array, losses: Array) -> None:
        """See `Selector.feedback`: signed TD errors. Non-finite ones are ignored."""
        p = np.abs(np.asarray(losses, np.float64)) + EPSILON
        rows, p = rows[np.isfinite(p)], p[np.isfinite(p)]
        if not len(rows):
            return
        self._maximum = max(self._maximum, float(p.max()))
        self._powers[rows] = p**self._alpha
        inside = rows[self._tree[rows] > 0]  # other rows are no longer eligible
        self._tree.set(inside, self._powers[inside])

    def state_dict(self, observations: ObservationIndex) -> SelectorState:
        """See `Selector.state_dict`. Priorities are keyed by the permanent sequence number of their chunk's record."""
        chunks = observations.index.chunks
        return {
            "greatest": np.array([self._maximum]),
            "draws": np.array([self._draws], np.int64),
            "sequence": chunks.sequence.copy(),
            "steps": chunks.steps.astype(np.int32),
            "powers": self._powers[: len(observations.index.steps)].copy(),
            "rewards": self._rewards[: len(observations.index.steps)].copy(),
        }

    def load_state_dict(self, state: Mapping[str, Array], observations: ObservationIndex) -> None:
        """See `Selector.load_state_dict`. Rows that are unknown to the state, or relabelled since, count as new."""
        sequence, steps = state_column(state, "sequence"), state_column(state, "steps")
        powers, rewards = state_column(state, "powers"), state_column(state, "rewards")
        if len(sequence) != len(steps) or not int(steps.sum()) == len(powers) == len(rewards):
            raise WireError("the priorities of the sampler's state are inconsistent")
        self._maximum = float(state_column(state, "greatest")[0])
        self._draws = int(state_column(state, "draws")[0])
        index, total = observations.index, len(observations.index.steps)
        self._powers[:total] = self._maximum**self._alpha
        rows, saved = match_rows(index, sequence, steps)
        self._powers[rows], self._rewards[rows] = powers[saved], rewards[saved]
        self._reset_relabelled(index, rows)
        self._set_powers(0, total)


def _grown(column: Array, rows: int) -> Array:
    grown = np.full(rows, np.nan, np.float32)
    grown[: len(column)] = column
    return grown


def match_rows(index: Index, sequence: Array, steps: Array) -> tuple[Array, Array]:
    """Matches saved chunks with current ones by the sequence numbers of their records.

    Args:
        sequence, steps: of the saved chunks; their rows were saved chunk by chunk.

    Returns the rows of `index` and their saved places, both int64.
    """
    order = np.argsort(sequence)
    at = np.minimum(np.searchsorted(sequence, index.chunks.sequence, sorter=order), max(len(order) - 1, 0))
    saved = order[at] if len(order) else np.empty(0, np.int64)
    is_saved = sequence[saved] == index.chunks.sequence if len(order) else np.zeros(len(index.chunks), bool)
    saved, counts = saved[is_saved[: len(saved)]], index.chunks.steps[is_saved].astype(np.int64)
    starts = (np.cumsum(steps, dtype=np.int64) - steps)[saved]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(index.chunks.first_row[is_saved], counts) + within, np.repeat(starts, counts) + within
