"""Prioritized sampling after Schaul, Quan, Antonoglou and Silver, "Prioritized Experience Replay", ICLR 2016
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
from user_sys.replay.choosers import Choice, Chooser, State, column
from user_sys.replay.sum_tree import SumTree
from user_sys.replay.timeline import Timeline
from user_sys.replay.where import Candidates, Filter, Where
from user_sys.store.index import Change, Index

EPSILON = 1e-6


class Prioritized(Chooser):
    """See the file's head. Memory: about 17 bytes a row of the store."""

    hears = True

    def __init__(
        self,
        where: Filter = Where(),  # noqa: B008  # frozen
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_draws: int = 100_000,
    ) -> None:
        """Raises ConfigError: `alpha` or `beta` is not between 0 and 1, or `beta_draws` below 1."""
        if not 0 <= alpha <= 1 or not 0 <= beta <= 1 or beta_draws < 1:
            raise ConfigError(f"alpha {alpha} and beta {beta} must lie in 0..1, beta_draws {beta_draws} be at least 1")
        self._candidates, self._alpha, self._beta, self._beta_draws = Candidates(where), alpha, beta, beta_draws
        self._powers = np.empty(0, np.float32)  # p^alpha of each row, whether it is a candidate or not
        self._rewards = np.empty(0, np.float32)  # of each row, for which its power holds
        self._tree = SumTree()
        self._greatest, self._draws = 1.0, 0

    def __len__(self) -> int:
        return len(self._candidates)

    def update(self, timeline: Timeline, change: Change) -> None:
        """See `Chooser.update`."""
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

    def choose(self, n: int, rng: np.random.Generator) -> Choice:
        """See `Chooser.choose`."""
        total = self._tree.total
        rows = self._tree.find((np.arange(n) + rng.random(n)) * (total / n))
        beta = min(1.0, self._beta + (1.0 - self._beta) * self._draws / self._beta_draws)
        self._draws += n
        weights = (len(self) / total * self._tree[rows].astype(np.float64)) ** -beta
        return Choice(rows, (weights / weights.max()).astype(np.float32), np.zeros(n, np.int32))

    def feedback(self, rows: Array, groups: Array, losses: Array) -> None:
        """See `Chooser.feedback`: TD errors, of any sign. Those that are not finite are left out."""
        p = np.abs(np.asarray(losses, np.float64)) + EPSILON
        rows, p = rows[np.isfinite(p)], p[np.isfinite(p)]
        if not len(rows):
            return
        self._greatest = max(self._greatest, float(p.max()))
        self._powers[rows] = p**self._alpha
        inside = rows[self._tree[rows] > 0]  # others have gone meanwhile
        self._tree.set(inside, self._powers[inside])

    def state_dict(self, timeline: Timeline) -> State:
        """See `Chooser.state_dict`. Priorities stand by the sequence number of their chunk's record, which lasts."""
        chunks = timeline.index.chunks
        return {
            "greatest": np.array([self._greatest]),
            "draws": np.array([self._draws], np.int64),
            "sequence": chunks.sequence.copy(),
            "steps": chunks.steps.astype(np.int32),
            "powers": self._powers[: len(timeline.index.steps)].copy(),
            "rewards": self._rewards[: len(timeline.index.steps)].copy(),
        }

    def load_state_dict(self, state: Mapping[str, Array], timeline: Timeline) -> None:
        """See `Chooser.load_state_dict`. Rows that are new to the state, or relabelled since, count as new."""
        sequence, steps = column(state, "sequence"), column(state, "steps")
        powers, rewards = column(state, "powers"), column(state, "rewards")
        if len(sequence) != len(steps) or not int(steps.sum()) == len(powers) == len(rewards):
            raise WireError("the priorities of a sampler's state contradict one another")
        self._greatest = float(column(state, "greatest")[0])
        self._draws = int(column(state, "draws")[0])
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
