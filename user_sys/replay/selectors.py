"""Selectors: which steps a batch starts at.

Step filters restrict selectors; a mixture gives each of several filters a share of the batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from hal.settings import Positive
from user_sys.codec import Array
from user_sys.episode import EpisodeSource, Phase
from user_sys.errors import ConfigError, WireError
from user_sys.store.index import EpisodeTable, Index, IndexChange, StringTable, spans

SelectorState = dict[str, Array]
PhaseName = Literal["policy", "teleop", "correction", "recovery"]
INTERVENTION_PHASES: tuple[PhaseName, ...] = ("teleop", "correction")
MAX_AGE_S = 1e9  # thirty years
MAX_AGE_VERSIONS = 1 << 62

EPSILON = 1e-6

OFFLINE, ONLINE = 0, 1
SOURCES = (EpisodeSource.DEMO, EpisodeSource.ONLINE)  # evaluations only if a filter lists them
MAX_WINDOW = 1_000_000


@dataclass(frozen=True)
class StepFilter:
    """Conditions that a drawn step must meet, all of them; an empty list and null do not restrict.

    Attributes:
        robots, embodiments, tasks, sources, success: of the episode, with labels applied.
        finished: of episodes that have ended and are completely stored.
        phases: of the step, with labels applied.
        max_age_s: captured at most so long before the newest step of the same robot, by its clock; before its last
            online one if its clock was set back during the run.
        max_age_versions: acted by the newest version in `embodiments`, or one of so many before it. Versions that never
            acted do not count. Steps that no policy acted do not match.
    """

    robots: tuple[str, ...] = ()
    embodiments: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    sources: tuple[EpisodeSource, ...] = ()
    phases: tuple[PhaseName, ...] = ()
    success: bool | None = None
    finished: bool = False
    max_age_s: float | None = None
    max_age_versions: int | None = None

    def __post_init__(self) -> None:
        if self.max_age_s is not None and not 0 < self.max_age_s <= MAX_AGE_S:
            raise ConfigError(f"max_age_s is {self.max_age_s}; it must be above 0 and at most {MAX_AGE_S:g}")
        if self.max_age_versions is not None and not 0 <= self.max_age_versions <= MAX_AGE_VERSIONS:
            raise ConfigError(f"max_age_versions is {self.max_age_versions}; it must not be negative")

    @property
    def has_age_limit(self) -> bool:
        """Whether matching steps may cease to match as new ones arrive."""
        return self.max_age_s is not None or self.max_age_versions is not None

    @property
    def depends_on_end(self) -> bool:
        """Whether steps may match only when their episode ends."""
        return self.success is not None or self.finished

    def matches(self, index: Index, low: int) -> Array:
        """Which of the rows from `low` on match and are alive, bool."""
        steps, chunks = index.steps, index.chunks
        chunk = steps.chunk[low:]
        if not len(chunk):
            return np.empty(0, bool)
        met: Array = self._episodes(index.episodes)[chunks.episode[chunk]] & steps.alive[low:]
        if self.phases:
            met &= np.isin(steps.phase[low:], [Phase[name.upper()] for name in self.phases])
        if self.max_age_s is not None:
            newest_ns = index.newest_steps().time_unix_ns[index.episodes.robot[chunks.episode[chunk]]]
            met &= steps.time_unix_ns[low:] >= newest_ns - round(self.max_age_s * 1e9)
        if self.max_age_versions is not None:
            met &= steps.policy_version[low:] >= self._oldest_version(index, self.max_age_versions)
        return met

    def _oldest_version(self, index: Index, age: int) -> int:
        names = index.episodes.embodiments
        oldest = index.newest_steps().oldest_version(_codes(names, self.embodiments or names.names), age)
        return MAX_AGE_VERSIONS if oldest is None else oldest

    def _episodes(self, episodes: EpisodeTable) -> Array:
        met = np.ones(len(episodes), bool)
        for names, allowed, codes in (
            (episodes.robots, self.robots, episodes.robot),
            (episodes.embodiments, self.embodiments, episodes.embodiment),
            (episodes.tasks, self.tasks, episodes.task),
            (episodes.sources, self.sources, episodes.source),
        ):
            if allowed:
                met &= np.isin(codes, _codes(names, allowed))
        if self.success is not None:
            met &= episodes.success == int(self.success)
        if self.finished:
            met &= episodes.complete
        return met


@dataclass(frozen=True)
class ExampleFilter(StepFilter):
    """A `StepFilter` of steps that show what to do: without `Index.failed_by_hand`.

    The corrections of a failed episode match: each shows what the policy lacks, as in HG-DAgger.
    """

    @property
    def depends_on_end(self) -> bool:
        """See `StepFilter.depends_on_end`."""
        return True

    def matches(self, index: Index, low: int) -> Array:
        """See `StepFilter.matches`."""
        return super().matches(index, low) & ~index.failed_by_hand(slice(low, None))


@dataclass(frozen=True)
class StepFilterUnion:
    """Steps that match all filters of at least one of `groups`."""

    groups: tuple[tuple[StepFilter, ...], ...]

    @property
    def has_age_limit(self) -> bool:
        """As `StepFilter.has_age_limit`."""
        return any(each.has_age_limit for group in self.groups for each in group)

    @property
    def depends_on_end(self) -> bool:
        """As `StepFilter.depends_on_end`."""
        return any(each.depends_on_end for group in self.groups for each in group)

    def matches(self, index: Index, low: int) -> Array:
        """As `StepFilter.matches`."""
        met: Array = np.any([np.all([f.matches(index, low) for f in group], axis=0) for group in self.groups], axis=0)
        return met


AnyStepFilter = StepFilter | StepFilterUnion

Role = Literal["demonstrations", "interventions", "successes", "failures"]
ROLES: Mapping[Role, StepFilter] = {
    "demonstrations": ExampleFilter(sources=(EpisodeSource.DEMO,)),
    "interventions": ExampleFilter(sources=(EpisodeSource.ONLINE,), phases=INTERVENTION_PHASES),
    "successes": StepFilter(sources=(EpisodeSource.ONLINE,), success=True),
    "failures": StepFilter(sources=(EpisodeSource.ONLINE,), success=False),
}
"""The roles of data in training; successes and failures are of online episodes."""


def _codes(names: StringTable, strings: Iterable[str]) -> list[int]:
    return [names.find(str(name)) for name in strings if names.find(str(name)) >= 0]


class EligibleSteps:
    """Ascending rows that match a filter and have a stored next observation; 4 bytes each.

    They depend only on the store's content, not on the sequence of updates, unless a clock was set back
    (`NewestSteps`). An update costs time in proportion to the rows after the lowest change, which are few during
    ingestion.
    """

    def __init__(self, step_filter: AnyStepFilter) -> None:
        self.step_filter = step_filter
        self._rows = np.empty(1024, np.int32)
        self._count = self._evaluated = 0
        self._incomplete = np.empty(0, np.int64)  # matching rows without a next observation yet
        self._newest_ns = np.empty(0, np.int64)  # `NewestSteps.time_unix_ns` of the last update

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Array:
        """int32; a view that the next update changes."""
        return self._rows[: self._count]

    def update(self, index: Index, change: IndexChange) -> int:
        """Applies an index change; returns the lowest row whose eligibility may have changed."""
        low = self._lowest(index, change)
        total = len(index.steps)
        if low >= total:
            return total
        fitting = low + np.flatnonzero(self.step_filter.matches(index, low))
        complete = index.observation_after(fitting) >= 0
        self._incomplete = np.append(self._incomplete[self._incomplete < low], fitting[~complete])
        self._replace(low, fitting[complete])
        self._evaluated = total
        return low

    def _lowest(self, index: Index, change: IndexChange) -> int:
        lows = [self._evaluated]
        lows += [int(rows.min()) for rows in (change.relabelled, change.dropped, change.revived) if len(rows)]
        arrived = self._incomplete[index.observation_after(self._incomplete) >= 0]
        lows += arrived[:1].tolist()
        if len(change.dropped):  # the step before a lost one has no next observation any more
            lows += self.rows[index.observation_after(self.rows) < 0][:1].tolist()
        if self.step_filter.depends_on_end and len(change.ended):
            lows.append(int(change.ended.min()))
        if self.step_filter.has_age_limit:
            lows += self._lowest_of_age(index, change)
        return min(lows)

    def _lowest_of_age(self, index: Index, change: IndexChange) -> list[int]:
        before_ns, self._newest_ns = self._newest_ns, index.newest_steps().time_unix_ns
        if len(change.dropped) or (self._newest_ns[: len(before_ns)] < before_ns).any():
            return [0]  # the newest step may be gone, or a clock was set back, so that older ones match again
        has_new = len(change.rows) or len(change.revived)
        return self._rows[: min(1, self._count)].tolist() if has_new else []  # older rows do not match again

    def _replace(self, low: int, rows: Array) -> None:
        """Replaces all eligible rows from `low` on by `rows`."""
        kept = int(np.searchsorted(self.rows, low))
        needed = kept + len(rows)
        if needed > len(self._rows):
            grown = np.empty(max(needed, 2 * len(self._rows)), np.int32)
            grown[:kept] = self._rows[:kept]
            self._rows = grown
        self._rows[kept:needed] = rows
        self._count = needed

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """`n` rows, with replacement, each equally likely; int64. At least one row is eligible."""
        return self.rows[rng.integers(0, self._count, n)].astype(np.int64)


class Selection(NamedTuple):
    """Rows of the index, int64 (n,); weights, float32 (n,); and the selecting part of each, int32 (n,)."""

    rows: Array
    weights: Array
    groups: Array

    @classmethod
    def unweighted(cls, rows: Array, group: int = 0) -> Selection:
        """`rows` with weight 1, all in one group."""
        return cls(rows, np.ones(len(rows), np.float32), np.full(len(rows), group, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[Selection]) -> Selection:
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class Selector(ABC):
    """Selects rows. One thread calls it.

    The selection depends only on the store's content, the selector's state and the generator.

    Attributes:
        uses_feedback: whether `feedback` changes later selections.
    """

    uses_feedback = False

    @abstractmethod
    def update(self, index: Index, change: IndexChange) -> None:
        """Applies an index change; the first one contains all rows."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of eligible rows."""

    def is_ready(self, n: int) -> bool:
        """Whether `n` rows can be selected."""
        return len(self) > 0

    @abstractmethod
    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """`n` rows, with replacement unless the selector says otherwise; `is_ready(n)` is true."""

    def select_again(self, places: Array, n: int, rng: np.random.Generator) -> Selection:
        """Replacements for those at `places` of a selection of `n` rows, from about the same parts of a mixture."""
        return Selection(*(column[places] for column in self.select(n, rng)))

    def feedback(self, rows: Array, groups: Array, losses: Array) -> None:  # noqa: B027  # most have no use for it
        """Receives TD errors or losses of selected rows, float (n,)."""

    def state_dict(self, index: Index) -> SelectorState:
        """Copies of all state that determines later selections and is not in the store."""
        return {}

    def load_state_dict(self, state: Mapping[str, Array], index: Index) -> None:  # noqa: B027  # as `state_dict`
        """Restores a state. Raises WireError: it belongs to another kind of selector."""


class UniformSelector(Selector):
    """Every matching row is equally likely."""

    def __init__(self, step_filter: AnyStepFilter = StepFilter()) -> None:  # noqa: B008  # frozen
        self._eligible = EligibleSteps(step_filter)

    def __len__(self) -> int:
        return len(self._eligible)

    def update(self, index: Index, change: IndexChange) -> None:
        """See `Selector.update`."""
        self._eligible.update(index, change)

    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.select`."""
        return Selection.unweighted(self._eligible.draw(n, rng))


def state_column(state: Mapping[str, Array], name: str) -> Array:
    """A column of a state. Raises WireError: it is missing."""
    if name not in state:
        raise WireError(f"the state belongs to another sampler: it has no {name!r}")
    return state[name]


class MixtureSelector(Selector):
    """Fixed shares of each batch for several step filters, e.g. RLPD's half and half (Ball et al. 2023, section 4.1).

    Within a part, every step is equally likely. The shares are exact in every batch up to one sample a part, and on
    average: the remainder is drawn (systematic sampling). If a part is empty, the others replace it in proportion to
    their shares. The parts are contiguous in a batch.
    """

    def __init__(self, parts: Sequence[tuple[AnyStepFilter, float]]) -> None:
        """Raises ConfigError unless the shares are positive and add up to 1."""
        self._parts = [EligibleSteps(step_filter) for step_filter, _ in parts]
        self._shares = np.array([share for _, share in parts], float)
        if (self._shares < 0).any() or abs(self._shares.sum() - 1.0) > 1e-6:
            raise ConfigError(f"shares of {self._shares.tolist()}: they must add up to 1")

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def update(self, index: Index, change: IndexChange) -> None:
        """See `Selector.update`."""
        for part in self._parts:
            part.update(index, change)

    @property
    def empty_parts(self) -> list[int]:
        """Places of the parts without a step."""
        return [place for place, part in enumerate(self._parts) if not len(part)]

    def _counts(self, n: int, rng: np.random.Generator) -> list[int]:
        """Number of samples per part out of `n`."""
        nonempty = np.array([len(part) > 0 for part in self._parts])
        shares = np.where(nonempty, self._shares, 0.0)
        if shares.sum() == 0.0:  # all nonempty parts have share 0
            shares = nonempty.astype(float)
        ends = (n * shares.cumsum() / shares.sum()).round(9)  # whole numbers stay whole
        counts: list[int] = np.diff(np.floor(ends + rng.random()), prepend=0).astype(int).tolist()
        return counts

    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.select`."""
        counts = enumerate(self._counts(n, rng))
        return Selection.joined(
            [Selection.unweighted(self._parts[place].draw(count, rng), place) for place, count in counts if count]
        )


class MixturePart(NamedTuple):
    """Steps that match at least one of `filters`, and their share of each batch."""

    filters: tuple[StepFilter, ...]
    share: float = 1.0


@dataclass(frozen=True)
class MixturePartConfig:
    """One part of each batch.

    Attributes:
        roles: of its steps: demonstrations; interventions of people; successes and failures, which are online
            episodes. Empty: demonstrations and all online steps.
        tasks: names of their tasks; empty for all.
        share: of each batch, as a ratio to the shares of the other parts. They replace a part without steps.
    """

    roles: tuple[Role, ...] = ()
    tasks: tuple[str, ...] = ()
    share: Positive = 1.0

    def to_part(self, total: float, interventions: tuple[PhaseName, ...]) -> MixturePart:
        """`total`: of the shares of all parts. `interventions`: phases of that role."""
        roles = {**ROLES, "interventions": replace(ROLES["interventions"], phases=interventions)}
        chosen = [roles[role] for role in self.roles] or [StepFilter(sources=SOURCES)]
        return MixturePart(tuple(replace(each, tasks=self.tasks) for each in chosen), self.share / total)


class DemoOnlineSelector(MixtureSelector):
    """RLPD's two halves for one embodiment, by its names.

    Online: all steps of online episodes. Demo: all steps of demonstrations, and the interventions in online episodes,
    as in HIL-SERL (Luo et al. 2024): see `ROLES`. Evaluations are in neither half. `step_filter` restricts both; its
    age limits apply to the online half only.

    Attributes:
        demo, online: the two halves.
    """

    def __init__(
        self,
        embodiments: tuple[str, ...],
        demo_fraction: float = 0.5,
        step_filter: StepFilter = StepFilter(),  # noqa: B008  # frozen
    ) -> None:
        """Raises ConfigError unless `demo_fraction` lies in [0, 1]."""
        only = replace(step_filter, embodiments=embodiments)
        ageless = replace(only, max_age_s=None, max_age_versions=None)
        demo, online = StepFilter(sources=(EpisodeSource.DEMO,)), StepFilter(sources=(EpisodeSource.ONLINE,))
        demo_half = StepFilterUnion(((ageless, demo), (ageless, ROLES["interventions"])))
        super().__init__([(demo_half, demo_fraction), (StepFilterUnion(((only, online),)), 1.0 - demo_fraction)])
        self.demo, self.online = self._parts


class SumTree:
    """Weights in a binary tree of sums: setting and finding m of N costs O(m log N), vectorised.

    Node k has the children 2k and 2k + 1; node 1 is the root. Each sum is recomputed from its children, so the tree is
    a function of its weights and rounding errors do not accumulate. Memory: 16 bytes a weight.
    """

    def __init__(self) -> None:
        self._nodes = np.zeros(2)

    def __len__(self) -> int:
        """Capacity in weights, a power of two; weights never set are 0."""
        return len(self._nodes) // 2

    @property
    def total(self) -> float:
        return float(self._nodes[1])

    def grow(self, size: int) -> None:
        """Increases the capacity to at least `size`."""
        if size > len(self):
            old = self._nodes[len(self) :]
            self._nodes = np.zeros(2 << (size - 1).bit_length())
            self.set(np.arange(len(old)), old)

    def __getitem__(self, places: Array) -> Array:
        """Weights, float64."""
        weights: Array = self._nodes[len(self) + places]
        return weights

    def set(self, places: Array, weights: Array) -> None:
        """Sets non-negative weights; of equal places the last counts."""
        nodes = places + len(self)
        self._nodes[nodes] = weights
        while len(nodes) and nodes[0] > 1:
            nodes = np.unique(nodes // 2)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, heights: Array) -> Array:
        """For each height in [0, total), the place at which the cumulative weight exceeds it, int64.

        The weight at that place is above 0 despite rounding.
        """
        nodes, heights = np.ones(len(heights), np.int64), heights.copy()
        while nodes[0] < len(self):
            left = self._nodes[2 * nodes]
            goes_right = (heights >= left) & (self._nodes[2 * nodes + 1] > 0)
            heights -= left * goes_right
            nodes = 2 * nodes + goes_right
        return nodes - len(self)


@dataclass(frozen=True)
class PrioritizedConfig:
    """See `user_sys.replay.selectors`."""

    alpha: float = 0.6
    beta: float = 0.4
    beta_draws: int = 100_000

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1 or not 0 <= self.beta <= 1 or self.beta_draws < 1:
            raise ConfigError(
                f"alpha {self.alpha} and beta {self.beta} must lie in 0..1, beta_draws {self.beta_draws} be at least 1"
            )


class PrioritizedSelector(Selector):
    """Prioritized sampling after Schaul, Quan, Antonoglou and Silver, "Prioritized Experience Replay", ICLR 2016
    (arXiv 1511.05952), the proportional variant:

        p_i  = |delta_i| + epsilon                      (the maximum p so far until a row is drawn)
        P(i) = p_i^alpha / sum_k p_k^alpha
        w_i  = (N P(i))^-beta / max_j w_j               (the maximum over the batch)

    beta rises from `beta` to 1 over `beta_draws` draws. A batch is stratified: one draw from each of n equal shares.
    Memory is about 20 bytes per row of the store.
    """

    uses_feedback = True

    def __init__(
        self,
        step_filter: AnyStepFilter = StepFilter(),  # noqa: B008  # frozen
        config: PrioritizedConfig = PrioritizedConfig(),  # noqa: B008  # frozen
    ) -> None:
        self._eligible = EligibleSteps(step_filter)
        self._alpha, self._beta, self._beta_draws = config.alpha, config.beta, config.beta_draws
        self._powers = np.empty(0, np.float32)  # p^alpha of each row, eligible or not
        self._tree = SumTree()
        self._maximum, self._draws = 1.0, 0

    def __len__(self) -> int:
        return len(self._eligible)

    def update(self, index: Index, change: IndexChange) -> None:
        """See `Selector.update`."""
        total = len(index.steps)
        if total > len(self._powers):
            self._tree.grow(total)
            self._powers = np.append(self._powers, np.empty(len(self._tree) - len(self._powers), np.float32))
        self._powers[change.rows.start : change.rows.stop] = self._maximum**self._alpha
        low = self._eligible.update(index, change)
        if low < total:
            self._set_powers(low, total)

    def _set_powers(self, low: int, total: int) -> None:
        """Sets the powers of rows `low` to `total` in the tree; rows that are not eligible get 0."""
        rows = self._eligible.rows
        rows = rows[np.searchsorted(rows, low) :]
        powers = np.zeros(total - low, np.float32)
        powers[rows - low] = self._powers[rows]
        self._tree.set(np.arange(low, total), powers)

    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.select`."""
        total = self._tree.total
        rows = self._tree.find((np.arange(n) + rng.random(n)) * (total / n))
        beta = min(1.0, self._beta + (1.0 - self._beta) * self._draws / self._beta_draws)
        self._draws += n
        weights = (len(self) / total * self._tree[rows]) ** -beta
        return Selection.unweighted(rows)._replace(weights=(weights / weights.max()).astype(np.float32))

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

    def state_dict(self, index: Index) -> SelectorState:
        """See `Selector.state_dict`. Priorities are keyed by the permanent sequence number of their chunk's record."""
        return {
            "alpha": np.array([self._alpha]),
            "greatest": np.array([self._maximum]),
            "draws": np.array([self._draws], np.int64),
            "sequence": index.chunks.sequence.copy(),
            "steps": index.chunks.steps.astype(np.int32),
            "powers": self._powers[: len(index.steps)].copy(),
        }

    def load_state_dict(self, state: Mapping[str, Array], index: Index) -> None:
        """See `Selector.load_state_dict`; another alpha is refused. Rows that are unknown to the state count as new."""
        if (alpha := float(state.get("alpha", [self._alpha])[0])) != self._alpha:  # older states have none
            raise WireError(f"the state has priorities of alpha {alpha:g}; this sampler has alpha {self._alpha:g}")
        sequence, steps, powers = (state_column(state, name) for name in ("sequence", "steps", "powers"))
        if len(sequence) != len(steps) or int(steps.sum()) != len(powers):
            raise WireError("the priorities of the sampler's state are inconsistent")
        self._maximum = float(state_column(state, "greatest")[0])
        self._draws = int(state_column(state, "draws")[0])
        total = len(index.steps)
        self._powers[:total] = self._maximum**self._alpha
        _, current, saved = np.intersect1d(index.chunks.sequence, sequence, return_indices=True)
        counts = index.chunks.steps[current]
        rows = spans(index.chunks.first_row[current], counts)
        of_state = spans((np.cumsum(steps, dtype=np.int64) - steps)[saved], counts)
        self._powers[rows] = powers[of_state]
        self._set_powers(0, total)


class _Task:
    """One task's rows and recent losses, offline first."""

    def __init__(self, name: str, step_filter: StepFilter, window: int) -> None:
        self.name = name
        self.sides = [EligibleSteps(replace(step_filter, tasks=(name,), sources=(source,))) for source in SOURCES]
        self.losses = [deque[float](maxlen=window) for _ in SOURCES]

    def __len__(self) -> int:
        return sum(map(len, self.sides))


@dataclass(frozen=True)
class TasksConfig:
    """See `user_sys.replay.selectors`; `low` and `high` limit the share of online steps."""

    alpha: float = 1.5
    low: float = 0.2
    high: float = 0.8
    window: int = 200

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1 or not 1 <= self.window <= MAX_WINDOW or not 0 < self.alpha < math.inf:
            raise ConfigError(
                f"bounds ({self.low}, {self.high}), window {self.window} and alpha {self.alpha}: the bounds must be"
                f" within 0 and 1, window lie in 1..{MAX_WINDOW} and alpha be above 0"
            )


class TaskBalancedSelector(Selector):
    """SOP's adaptive sampler, after Pan et al., "SOP: A Scalable Online Post-Training System for Vision-Language-Action
    Models", 2026 (arXiv 2601.03044): tasks are drawn evenly, and within a task the share of online experience follows
    the recent losses on either side,

        w_on = exp(alpha l_on) / (exp(alpha l_on) + exp(l_off)),     clipped to [0.2, 0.8]

    l_on and l_off are means over the last 200 learner steps of the losses of the task's online and offline samples;
    alpha > 1 favours the online side. Not from the paper: the value of alpha, and that a side without losses counts as
    equal to the other. A sample's group is 2 x (its task's place) + (1 if it is online).
    """

    uses_feedback = True

    def __init__(
        self,
        step_filter: StepFilter = StepFilter(),  # noqa: B008  # frozen
        config: TasksConfig = TasksConfig(),  # noqa: B008  # frozen
    ) -> None:
        """`step_filter` must not restrict tasks or sources. Raises ConfigError: it does."""
        if step_filter.tasks or step_filter.sources:
            raise ConfigError("a task-balanced sampler sets tasks and sources itself; remove them from the filter")
        self._filter, self._config = step_filter, config
        self._tasks: list[_Task] = []

    def __len__(self) -> int:
        return sum(map(len, self._tasks))

    def update(self, index: Index, change: IndexChange) -> None:
        """See `Selector.update`. Tasks are in the order of their first episodes in the store."""
        for name in index.episodes.tasks.names[len(self._tasks) :]:
            self._tasks.append(_Task(name, self._filter, self._config.window))
        for task in self._tasks:
            for side in task.sides:
                side.update(index, change)

    def _share(self, task: _Task) -> float:
        if not len(task.sides[OFFLINE]) or not len(task.sides[ONLINE]):
            return float(len(task.sides[ONLINE]) > 0)
        means = [sum(losses) / len(losses) for losses in task.losses if losses]
        share = 0.5
        if means:
            exponent = means[0] - self._config.alpha * means[-1]
            share = 1.0 / (1.0 + math.exp(min(max(exponent, -700.0), 700.0)))
        return min(max(share, self._config.low), self._config.high)

    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.select`."""
        nonempty = [place for place, task in enumerate(self._tasks) if len(task)]
        counts = np.full(len(nonempty), n // len(nonempty))
        counts[rng.permutation(len(nonempty))[: n % len(nonempty)]] += 1
        parts = []
        for place, count in zip(nonempty, counts.tolist(), strict=True):
            online = int(count * self._share(self._tasks[place]) + rng.random())
            for side, of_side in ((OFFLINE, count - online), (ONLINE, online)):
                if of_side:
                    rows = self._tasks[place].sides[side].draw(of_side, rng)
                    parts.append(Selection.unweighted(rows, 2 * place + side))
        return Selection.joined(parts)

    def feedback(self, rows: Array, groups: Array, losses: Array) -> None:
        """See `Selector.feedback`: the losses of one learner step; non-finite ones are ignored."""
        losses = np.asarray(losses, np.float64)
        for group in np.unique(groups).tolist():
            of_group = losses[(groups == group) & np.isfinite(losses)]
            if len(of_group):
                self._tasks[group // 2].losses[group % 2].append(float(of_group.mean()))

    def state_dict(self, index: Index) -> SelectorState:
        """See `Selector.state_dict`."""
        return {
            f"{side}.{task.name}": np.array(losses) for task in self._tasks for side, losses in enumerate(task.losses)
        }

    def load_state_dict(self, state: Mapping[str, Array], index: Index) -> None:
        """See `Selector.load_state_dict`. Tasks that the state lacks have no losses yet."""
        for task in self._tasks:
            for side, losses in enumerate(task.losses):
                losses.extend(state.get(f"{side}.{task.name}", np.empty(0)).tolist())
