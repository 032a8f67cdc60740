"""Selectors: which steps a batch starts at.

Selectors combine: step filters restrict them, mixtures join them. Prioritized and task-balanced selection have
modules of their own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from user_sys.codec import Array
from user_sys.episode import EpisodeSource, Phase
from user_sys.errors import ConfigError, WireError
from user_sys.replay.batches import ObservationIndex
from user_sys.store.index import EpisodeTable, IndexChange, StringTable

T = TypeVar("T")
INTERVENTION_PHASES = frozenset({Phase.TELEOP, Phase.CORRECTION})
SelectorState = dict[str, Array]


@dataclass(frozen=True)
class StepFilter:
    """Steps that meet every given condition; None means any. Filters join with ``|``.

    Attributes:
        robots, embodiments, tasks, sources, success: of the episode, with labels applied.
        phases: of the step, with labels applied.
        max_age_s: captured at most so many seconds before the newest stored step.
        max_age_versions: acted by a policy at most so many versions older than the newest one in `embodiments`. Steps
            that no policy acted do not match.
    """

    robots: frozenset[str] | None = None
    embodiments: frozenset[str] | None = None
    tasks: frozenset[str] | None = None
    phases: frozenset[Phase] | None = None
    sources: frozenset[EpisodeSource] | None = None
    max_age_s: float | None = None
    max_age_versions: int | None = None
    success: bool | None = None

    def __or__(self, other: StepFilter | StepFilterUnion) -> StepFilterUnion:
        return StepFilterUnion((self,)) | other

    @property
    def has_age_limit(self) -> bool:
        """Whether matching steps may cease to match as new ones arrive."""
        return self.max_age_s is not None or self.max_age_versions is not None

    def narrowed(
        self, sources: frozenset[EpisodeSource] | None = None, phases: frozenset[Phase] | None = None
    ) -> StepFilter:
        """The intersection with `sources` and `phases`; None does not restrict."""
        return replace(self, sources=_both(self.sources, sources), phases=_both(self.phases, phases))

    def matches(self, observations: ObservationIndex, low: int) -> Array:
        """Which of the rows from `low` on match, bool."""
        steps, chunks = observations.index.steps, observations.index.chunks
        chunk = steps.chunk[low:]
        if not len(chunk):
            return np.empty(0, bool)
        first = int(chunk[0])
        by_chunk = self._episodes(observations.index.episodes)[chunks.episode[first:]]
        met: Array = by_chunk[chunk - first] & steps.alive[low:]
        if self.phases is not None:
            met &= np.isin(steps.phase[low:], [int(phase) for phase in self.phases])
        if self.max_age_s is not None:
            met &= steps.time_unix_ns[low:] >= steps.time_unix_ns.max() - round(self.max_age_s * 1e9)
        if self.max_age_versions is not None:
            newest = self._newest_version(observations)
            met &= steps.policy_version[low:] >= max(newest - self.max_age_versions, 0)
        return met

    def _newest_version(self, observations: ObservationIndex) -> int:
        """The newest version of these embodiments; each learner numbers its own versions."""
        steps, chunks, episodes = observations.index.steps, observations.index.chunks, observations.index.episodes
        if self.embodiments is None:
            return int(steps.policy_version.max())
        of_kin = np.isin(episodes.embodiment, _codes(episodes.embodiments, self.embodiments))
        return int(steps.policy_version.max(where=of_kin[chunks.episode][steps.chunk], initial=-1))

    def _episodes(self, episodes: EpisodeTable) -> Array:
        met = np.ones(len(episodes), bool)
        for names, allowed, codes in (
            (episodes.robots, self.robots, episodes.robot),
            (episodes.embodiments, self.embodiments, episodes.embodiment),
            (episodes.tasks, self.tasks, episodes.task),
            (episodes.sources, self.sources, episodes.source),
        ):
            if allowed is not None:
                met &= np.isin(codes, _codes(names, allowed))
        if self.success is not None:
            met &= episodes.success == int(self.success)
        return met


@dataclass(frozen=True)
class StepFilterUnion:
    """Steps that match at least one of `parts`."""

    parts: tuple[StepFilter, ...]

    def __or__(self, other: StepFilter | StepFilterUnion) -> StepFilterUnion:
        return StepFilterUnion(self.parts + (other.parts if isinstance(other, StepFilterUnion) else (other,)))

    @property
    def has_age_limit(self) -> bool:
        """As `StepFilter.has_age_limit`."""
        return any(part.has_age_limit for part in self.parts)

    def matches(self, observations: ObservationIndex, low: int) -> Array:
        """As `StepFilter.matches`."""
        met: Array = np.any([part.matches(observations, low) for part in self.parts], axis=0)
        return met


AnyStepFilter = StepFilter | StepFilterUnion


def _both(one: frozenset[T] | None, other: frozenset[T] | None) -> frozenset[T] | None:
    return other if one is None else one if other is None else one & other


def _codes(names: StringTable, strings: Iterable[str]) -> list[int]:
    return [names.find(str(name)) for name in strings if names.find(str(name)) >= 0]


class EligibleSteps:
    """Ascending rows that match a filter and have a stored next observation; 4 bytes each.

    They depend only on the store's content, not on the sequence of updates. An update costs time in proportion to the
    rows after the lowest change, which are few during ingestion.
    """

    def __init__(self, step_filter: AnyStepFilter) -> None:
        self.step_filter = step_filter
        self._rows = np.empty(1024, np.int32)
        self._count = self._evaluated = 0
        self._incomplete = np.empty(0, np.int64)  # matching rows without a next observation yet

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Array:
        """int32; a view that the next update changes."""
        return self._rows[: self._count]

    def update(self, observations: ObservationIndex, change: IndexChange) -> int:
        """Applies an index change; returns the lowest row whose eligibility may have changed."""
        low = self._lowest(observations, change)
        total = len(observations.index.steps)
        if low >= total:
            return total
        fitting = low + np.flatnonzero(self.step_filter.matches(observations, low))
        complete = observations.observation_after(fitting) >= 0
        self._incomplete = np.append(self._incomplete[self._incomplete < low], fitting[~complete])
        self._replace(low, fitting[complete])
        self._evaluated = total
        return low

    def _lowest(self, observations: ObservationIndex, change: IndexChange) -> int:
        lows = [self._evaluated]
        lows += [int(rows.min()) for rows in (change.relabelled, change.dropped, change.revived) if len(rows)]
        arrived = self._incomplete[observations.observation_after(self._incomplete) >= 0]
        lows += arrived[:1].tolist()
        if self.step_filter.has_age_limit and self._count and len(change.rows):
            lows.append(int(self._rows[0]))  # older rows never match again
        return min(lows)

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


class Selection(NamedTuple):
    """Rows of the index, int64 (n,); weights, float32 (n,); and the selecting part of each, int32 (n,)."""

    rows: Array
    weights: Array
    groups: Array


class Selector(ABC):
    """Selects rows. One thread calls it.

    The selection depends only on the store's content, the selector's state and the generator.

    Attributes:
        uses_feedback: whether `feedback` changes later selections.
    """

    uses_feedback = False

    @abstractmethod
    def update(self, observations: ObservationIndex, change: IndexChange) -> None:
        """Applies an index change; the first one contains all rows."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of eligible rows."""

    @abstractmethod
    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """`n` rows, with replacement. At least one row is eligible."""

    def redraw(self, group: int, rng: np.random.Generator) -> Selection:
        """One row of `group` that replaces an unusable one."""
        return self.select(1, rng)

    def feedback(self, rows: Array, groups: Array, losses: Array) -> None:  # noqa: B027  # most have no use for it
        """Receives TD errors or losses of selected rows, float (n,)."""

    def state_dict(self, observations: ObservationIndex) -> SelectorState:
        """Copies of all state that determines later selections and is not in the store."""
        return {}

    def load_state_dict(self, state: Mapping[str, Array], observations: ObservationIndex) -> None:  # noqa: B027  # as `state_dict`
        """Restores a state. Raises WireError: it belongs to another kind of selector."""


class UniformSelector(Selector):
    """Every matching row is equally likely."""

    def __init__(self, step_filter: AnyStepFilter = StepFilter()) -> None:  # noqa: B008  # frozen
        self._eligible = EligibleSteps(step_filter)

    def __len__(self) -> int:
        return len(self._eligible)

    def update(self, observations: ObservationIndex, change: IndexChange) -> None:
        """See `Selector.update`."""
        self._eligible.update(observations, change)

    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.select`."""
        return unweighted_selection(self._eligible.rows[rng.integers(0, len(self), n)])


class InterventionWeightedSelector(Selector):
    """Steps under a person's control are `weight` times as likely. The bias is intended and not corrected."""

    def __init__(self, step_filter: StepFilter = StepFilter(), weight: float = 4.0) -> None:  # noqa: B008  # frozen
        """Raises ConfigError unless `weight` is at least 1."""
        if not 1.0 <= weight < math.inf:
            raise ConfigError(f"the weight of interventions is {weight}; it must be at least 1")
        self._weight = weight
        self._all = EligibleSteps(step_filter)
        self._under_person = EligibleSteps(step_filter.narrowed(phases=INTERVENTION_PHASES))

    def __len__(self) -> int:
        return len(self._all)

    def update(self, observations: ObservationIndex, change: IndexChange) -> None:
        """See `Selector.update`."""
        self._all.update(observations, change)
        self._under_person.update(observations, change)

    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.select`."""
        # A mixture of any row and, for the weight above 1, a row under a person's control.
        extra = (self._weight - 1.0) * len(self._under_person)
        draw = rng.random(n) * (len(self) + extra)
        rows = self._all.rows[np.minimum(draw, len(self) - 1).astype(np.int64)]
        of_person = draw >= len(self)
        if of_person.any():
            place = ((draw[of_person] - len(self)) / (self._weight - 1.0)).astype(np.int64)
            rows[of_person] = self._under_person.rows[np.minimum(place, len(self._under_person) - 1)]
        return unweighted_selection(rows)


def unweighted_selection(rows: Array) -> Selection:
    """`rows` with weight 1, in group 0."""
    return Selection(rows.astype(np.int64), np.ones(len(rows), np.float32), np.zeros(len(rows), np.int32))


def state_column(state: Mapping[str, Array], name: str) -> Array:
    """A column of a state. Raises WireError: it is missing."""
    if name not in state:
        raise WireError(f"the state belongs to another sampler: it has no {name!r}")
    return state[name]


class MixtureSelector(Selector):
    """Fixed shares of each batch from several selectors, e.g. RLPD's half and half (Ball et al. 2023, section 4.1).

    The shares are exact in every batch; the remainder goes to the last part. If a part is empty, the others replace it
    in proportion to their shares. The parts are contiguous in a batch.
    """

    def __init__(self, parts: Sequence[tuple[Selector, float]]) -> None:
        """Raises ConfigError unless the shares are positive and add up to 1."""
        self._selectors = [selector for selector, _ in parts]
        self._shares = np.array([share for _, share in parts], float)
        if (self._shares < 0).any() or abs(self._shares.sum() - 1.0) > 1e-6:
            raise ConfigError(f"shares of {self._shares.tolist()}: they must add up to 1")

        self.uses_feedback = any(selector.uses_feedback for selector in self._selectors)

    def __len__(self) -> int:
        return sum(map(len, self._selectors))

    def update(self, observations: ObservationIndex, change: IndexChange) -> None:
        """See `Selector.update`."""
        for selector in self._selectors:
            selector.update(observations, change)

    def counts(self, n: int) -> list[int]:
        """Current number of samples per part out of `n`."""
        nonempty = np.array([len(selector) > 0 for selector in self._selectors])
        shares = np.where(nonempty, self._shares, 0.0)
        if shares.sum() == 0.0:  # all nonempty parts have share 0
            shares = nonempty.astype(float)
        counts = (n * shares / shares.sum() + 1e-9).astype(np.int64)
        counts[np.flatnonzero(shares)[-1]] += n - counts.sum()
        return [int(count) for count in counts]

    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.select`."""
        selections = [
            self._in_group(part, self._selectors[part].select(count, rng))
            for part, count in enumerate(self.counts(n))
            if count
        ]
        return Selection(*(np.concatenate(column) for column in zip(*selections, strict=True)))

    def redraw(self, group: int, rng: np.random.Generator) -> Selection:
        """See `Selector.redraw`: from the same part."""
        part, inner = group % len(self._selectors), group // len(self._selectors)
        return self._in_group(part, self._selectors[part].redraw(inner, rng))

    def _in_group(self, part: int, selection: Selection) -> Selection:
        return selection._replace(groups=selection.groups * len(self._selectors) + part)

    def feedback(self, rows: Array, groups: Array, losses: Array) -> None:
        """See `Selector.feedback`: each part gets its own samples."""
        for part, selector in enumerate(self._selectors):
            own = groups % len(self._selectors) == part
            if own.any():
                selector.feedback(rows[own], groups[own] // len(self._selectors), losses[own])

    def state_dict(self, observations: ObservationIndex) -> SelectorState:
        """See `Selector.state_dict`."""
        return {
            f"{part}.{name}": value
            for part, selector in enumerate(self._selectors)
            for name, value in selector.state_dict(observations).items()
        }

    def load_state_dict(self, state: Mapping[str, Array], observations: ObservationIndex) -> None:
        """See `Selector.load_state_dict`."""
        for part, selector in enumerate(self._selectors):
            prefix = f"{part}."
            inner = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            selector.load_state_dict(inner, observations)


class DemoOnlineSelector(MixtureSelector):
    """RLPD's two halves for one embodiment.

    Online: all steps of online episodes. Demo: all steps of demonstrations, and the steps of online episodes in phase
    TELEOP or CORRECTION, as in HIL-SERL (Luo et al. 2024). Evaluations are in neither half. `step_filter` restricts
    both; its age limits apply to the online half only.

    Attributes:
        demo, online: the two halves.
    """

    def __init__(
        self,
        embodiment: str,
        demo_fraction: float = 0.5,
        step_filter: StepFilter = StepFilter(),  # noqa: B008  # frozen
    ) -> None:
        """Raises ConfigError unless `demo_fraction` lies in [0, 1]."""
        robot, online = replace(step_filter, embodiments=frozenset({embodiment})), frozenset({EpisodeSource.ONLINE})
        ageless = replace(robot, max_age_s=None, max_age_versions=None)
        persons = ageless.narrowed(online, INTERVENTION_PHASES)
        self.demo = UniformSelector(ageless.narrowed(frozenset({EpisodeSource.DEMO})) | persons)
        self.online = UniformSelector(robot.narrowed(online))
        super().__init__([(self.demo, demo_fraction), (self.online, 1.0 - demo_fraction)])
