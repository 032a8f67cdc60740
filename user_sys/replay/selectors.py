"""Which steps are wanted: conditions, and the rows that meet them.

Which steps a batch starts at. Choosers are small and are put together: filters within them, mixes over them.

Batches put together from several choosers.
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


@dataclass(frozen=True)
class StepFilter:
    """Steps that meet every condition given; None means any. Several are joined by ``|``.

    Attributes:
        robots, embodiments, tasks, sources, success: of the episode, labels counted in.
        phases: of the step, labels counted in.
        max_age_s: captured at most so many seconds before the newest step stored.
        max_age_versions: acted by weights at most so many versions older than the newest that acted in `embodiments`;
            steps that no weights acted do not meet it.
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
        """Whether steps that met it may cease to do so as others come."""
        return self.max_age_s is not None or self.max_age_versions is not None

    def narrowed(
        self, sources: frozenset[EpisodeSource] | None = None, phases: frozenset[Phase] | None = None
    ) -> StepFilter:
        """Of the steps that meet it those that are of `sources` and `phases` too; None says nothing."""
        return replace(self, sources=_both(self.sources, sources), phases=_both(self.phases, phases))

    def matches(self, timeline: ObservationIndex, low: int) -> Array:
        """Which of the rows from `low` on meet it, bool."""
        steps, chunks = timeline.index.steps, timeline.index.chunks
        chunk = steps.chunk[low:]
        if not len(chunk):
            return np.empty(0, bool)
        first = int(chunk[0])
        by_chunk = self._episodes(timeline.index.episodes)[chunks.episode[first:]]
        fits: Array = by_chunk[chunk - first] & steps.alive[low:]
        if self.phases is not None:
            fits &= np.isin(steps.phase[low:], [int(phase) for phase in self.phases])
        if self.max_age_s is not None:
            fits &= steps.time_unix_ns[low:] >= steps.time_unix_ns.max() - round(self.max_age_s * 1e9)
        if self.max_age_versions is not None:
            newest = self._newest_version(timeline)
            fits &= steps.policy_version[low:] >= max(newest - self.max_age_versions, 0)
        return fits

    def _newest_version(self, timeline: ObservationIndex) -> int:
        """Each embodiment has a learner of its own, which counts its versions for itself."""
        steps, chunks, episodes = timeline.index.steps, timeline.index.chunks, timeline.index.episodes
        if self.embodiments is None:
            return int(steps.policy_version.max())
        of_kin = np.isin(episodes.embodiment, _codes(episodes.embodiments, self.embodiments))
        return int(steps.policy_version.max(where=of_kin[chunks.episode][steps.chunk], initial=-1))

    def _episodes(self, episodes: EpisodeTable) -> Array:
        fits = np.ones(len(episodes), bool)
        for names, wanted, codes in (
            (episodes.robots, self.robots, episodes.robot),
            (episodes.embodiments, self.embodiments, episodes.embodiment),
            (episodes.tasks, self.tasks, episodes.task),
            (episodes.sources, self.sources, episodes.source),
        ):
            if wanted is not None:
                fits &= np.isin(codes, _codes(names, wanted))
        if self.success is not None:
            fits &= episodes.success == int(self.success)
        return fits


@dataclass(frozen=True)
class StepFilterUnion:
    """Steps that meet at least one of `parts`."""

    parts: tuple[StepFilter, ...]

    def __or__(self, other: StepFilter | StepFilterUnion) -> StepFilterUnion:
        return StepFilterUnion(self.parts + (other.parts if isinstance(other, StepFilterUnion) else (other,)))

    @property
    def has_age_limit(self) -> bool:
        """As `StepFilter.aged`."""
        return any(part.has_age_limit for part in self.parts)

    def matches(self, timeline: ObservationIndex, low: int) -> Array:
        """As `StepFilter.fits`."""
        met: Array = np.any([part.matches(timeline, low) for part in self.parts], axis=0)
        return met


AnyStepFilter = StepFilter | StepFilterUnion


def _both(one: frozenset[T] | None, other: frozenset[T] | None) -> frozenset[T] | None:
    return other if one is None else one if other is None else one & other


def _codes(names: StringTable, wanted: Iterable[str]) -> list[int]:
    return [names.find(str(name)) for name in wanted if names.find(str(name)) >= 0]


class EligibleSteps:
    """The rows that meet a filter and whose next observation is stored, ascending; 4 bytes each.

    What they are depends on the store's content alone, and not on how often `update` was called. An update costs as
    much as there are rows from the lowest change on, which is little where experience is appended.
    """

    def __init__(self, step_filter: AnyStepFilter) -> None:
        self.step_filter = step_filter
        self._rows = np.empty(1024, np.int32)
        self._count = self._judged = 0
        self._waiting = np.empty(0, np.int64)  # rows that meet the filter and whose next observation is still to come

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Array:
        """int32; a view that the next update changes."""
        return self._rows[: self._count]

    def update(self, timeline: ObservationIndex, change: IndexChange) -> int:
        """Takes in a change of the index; returns the lowest row about which the answer may differ from before."""
        low = self._lowest(timeline, change)
        total = len(timeline.index.steps)
        if low >= total:
            return total
        fitting = low + np.flatnonzero(self.step_filter.matches(timeline, low))
        complete = timeline.observation_after(fitting) >= 0
        self._waiting = np.append(self._waiting[self._waiting < low], fitting[~complete])
        self._replace(low, fitting[complete])
        self._judged = total
        return low

    def _lowest(self, timeline: ObservationIndex, change: IndexChange) -> int:
        lows = [self._judged]
        lows += [int(rows.min()) for rows in (change.relabelled, change.dropped, change.revived) if len(rows)]
        arrived = self._waiting[timeline.observation_after(self._waiting) >= 0]
        lows += arrived[:1].tolist()
        if self.step_filter.has_age_limit and self._count and len(change.rows):
            lows.append(int(self._rows[0]))  # what is older has aged out for good
        return min(lows)

    def _replace(self, low: int, rows: Array) -> None:
        """Puts `rows` in the place of all candidates from row `low` on."""
        kept = int(np.searchsorted(self.rows, low))
        needed = kept + len(rows)
        if needed > len(self._rows):
            grown = np.empty(max(needed, 2 * len(self._rows)), np.int32)
            grown[:kept] = self._rows[:kept]
            self._rows = grown
        self._rows[kept:needed] = rows
        self._count = needed


SelectorState = dict[str, Array]


class Selection(NamedTuple):
    """Rows of the index, int64 (n,); weights, float32 (n,); and the part that chose each, int32 (n,)."""

    rows: Array
    weights: Array
    groups: Array


class Selector(ABC):
    """Chooses rows. One thread calls it.

    What it chooses depends on the store's content, its own state and the generator alone.

    Attributes:
        uses_feedback: whether `feedback` changes what it chooses.
    """

    uses_feedback = False

    @abstractmethod
    def update(self, timeline: ObservationIndex, change: IndexChange) -> None:
        """Takes in a change of the index; the first one that it gets tells of everything."""

    @abstractmethod
    def __len__(self) -> int:
        """How many rows it chooses from."""

    @abstractmethod
    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """`n` rows, with replacement. There is at least one to choose from."""

    def redraw(self, group: int, rng: np.random.Generator) -> Selection:
        """One row in place of another, which belonged to `group` and cannot be used."""
        return self.select(1, rng)

    def feedback(self, rows: Array, groups: Array, losses: Array) -> None:  # noqa: B027  # most have no use for it
        """Hears how rows that it chose did: TD errors or losses, float (n,)."""

    def state_dict(self, timeline: ObservationIndex) -> SelectorState:
        """Copies of everything that determines later choices and is not in the store."""
        return {}

    def load_state_dict(self, state: Mapping[str, Array], timeline: ObservationIndex) -> None:  # noqa: B027  # as `state_dict`
        """Takes up where `state` was taken. Raises WireError: it is another chooser's."""


class UniformSelector(Selector):
    """Every row that meets a filter is as likely."""

    def __init__(self, step_filter: AnyStepFilter = StepFilter()) -> None:  # noqa: B008  # frozen
        self._candidates = EligibleSteps(step_filter)

    def __len__(self) -> int:
        return len(self._candidates)

    def update(self, timeline: ObservationIndex, change: IndexChange) -> None:
        """See `Selector.update`."""
        self._candidates.update(timeline, change)

    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.choose`."""
        return unweighted_selection(self._candidates.rows[rng.integers(0, len(self), n)])


class InterventionWeightedSelector(Selector):
    """Steps that a person controlled are `weight` times as likely as others; a bias that is wanted, not corrected."""

    def __init__(self, step_filter: StepFilter = StepFilter(), weight: float = 4.0) -> None:  # noqa: B008  # frozen
        """Raises ConfigError unless `weight` is at least 1."""
        if not 1.0 <= weight < math.inf:
            raise ConfigError(f"interventions are weighted by {weight}; give at least 1")
        self._weight = weight
        self._all = EligibleSteps(step_filter)
        self._persons = EligibleSteps(step_filter.narrowed(phases=INTERVENTION_PHASES))

    def __len__(self) -> int:
        return len(self._all)

    def update(self, timeline: ObservationIndex, change: IndexChange) -> None:
        """See `Selector.update`."""
        self._all.update(timeline, change)
        self._persons.update(timeline, change)

    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.choose`."""
        # A mix of "any row" and, for what weight 1 does not give already, "a person's row".
        extra = (self._weight - 1.0) * len(self._persons)
        draw = rng.random(n) * (len(self) + extra)
        rows = self._all.rows[np.minimum(draw, len(self) - 1).astype(np.int64)]
        of_person = draw >= len(self)
        if of_person.any():
            place = ((draw[of_person] - len(self)) / (self._weight - 1.0)).astype(np.int64)
            rows[of_person] = self._persons.rows[np.minimum(place, len(self._persons) - 1)]
        return unweighted_selection(rows)


def unweighted_selection(rows: Array) -> Selection:
    """`rows` with weight 1, in group 0."""
    return Selection(rows.astype(np.int64), np.ones(len(rows), np.float32), np.zeros(len(rows), np.int32))


def state_column(state: Mapping[str, Array], name: str) -> Array:
    """A column of a state. Raises WireError: there is none of that name."""
    if name not in state:
        raise WireError(f"this is the state of another sampler: it lacks {name!r}")
    return state[name]


class MixtureSelector(Selector):
    """Fixed shares of each batch from several choosers, e.g. RLPD's half and half (Ball et al. 2023, section 4.1).

    The shares are exact in every batch; what does not divide goes to the last. While one has nothing, the others take
    its place, in proportion to their shares. In a batch the parts stand one after the other.
    """

    def __init__(self, parts: Sequence[tuple[Selector, float]]) -> None:
        """Raises ConfigError unless the shares are positive and add up to 1."""
        self._choosers = [chooser for chooser, _ in parts]
        self._shares = np.array([share for _, share in parts], float)
        if (self._shares < 0).any() or abs(self._shares.sum() - 1.0) > 1e-6:
            raise ConfigError(f"shares of {self._shares.tolist()}: they must add up to 1")

        self.uses_feedback = any(chooser.uses_feedback for chooser in self._choosers)

    def __len__(self) -> int:
        return sum(map(len, self._choosers))

    def update(self, timeline: ObservationIndex, change: IndexChange) -> None:
        """See `Selector.update`."""
        for chooser in self._choosers:
            chooser.update(timeline, change)

    def counts(self, n: int) -> list[int]:
        """How many of `n` samples come from each part now."""
        open_ = np.array([len(chooser) > 0 for chooser in self._choosers])
        shares = np.where(open_, self._shares, 0.0)
        if shares.sum() == 0.0:  # only parts of share 0 have anything
            shares = open_.astype(float)
        counts = (n * shares / shares.sum() + 1e-9).astype(np.int64)
        counts[np.flatnonzero(shares)[-1]] += n - counts.sum()
        return [int(count) for count in counts]

    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.choose`."""
        chosen = [
            self._of_part(part, self._choosers[part].select(count, rng))
            for part, count in enumerate(self.counts(n))
            if count
        ]
        return Selection(*(np.concatenate(column) for column in zip(*chosen, strict=True)))

    def redraw(self, group: int, rng: np.random.Generator) -> Selection:
        """See `Selector.redraw`: the part stays the same."""
        part, inner = group % len(self._choosers), group // len(self._choosers)
        return self._of_part(part, self._choosers[part].redraw(inner, rng))

    def _of_part(self, part: int, choice: Selection) -> Selection:
        return choice._replace(groups=choice.groups * len(self._choosers) + part)

    def feedback(self, rows: Array, groups: Array, losses: Array) -> None:
        """See `Selector.feedback`: each part hears of its own."""
        for part, chooser in enumerate(self._choosers):
            mine = groups % len(self._choosers) == part
            if mine.any():
                chooser.feedback(rows[mine], groups[mine] // len(self._choosers), losses[mine])

    def state_dict(self, timeline: ObservationIndex) -> SelectorState:
        """See `Selector.state_dict`."""
        return {
            f"{part}.{name}": value
            for part, chooser in enumerate(self._choosers)
            for name, value in chooser.state_dict(timeline).items()
        }

    def load_state_dict(self, state: Mapping[str, Array], timeline: ObservationIndex) -> None:
        """See `Selector.load_state_dict`."""
        for part, chooser in enumerate(self._choosers):
            prefix = f"{part}."
            inner = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            chooser.load_state_dict(inner, timeline)


class DemoOnlineSelector(MixtureSelector):
    """RLPD's two halves for one embodiment.

    Online: every step of online episodes. Demo: every step of demonstrations, and the steps of online episodes in which
    a person had the robot (phase TELEOP or CORRECTION), as in HIL-SERL (Luo et al. 2024). Evaluations are in neither.
    Either side holds only what meets `only`; its ages are for the online side, what a person showed does not age.

    Attributes:
        demo, online: the two sides.
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
