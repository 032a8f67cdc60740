"""Which steps are wanted: conditions, and the rows that meet them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from user_sys.codec import Array
from user_sys.episode import Phase, Source
from user_sys.replay.timeline import Timeline
from user_sys.store.columns import Names
from user_sys.store.index import Change, Episodes

T = TypeVar("T")
INTERVENTIONS = frozenset({Phase.TELEOP, Phase.CORRECTION})


@dataclass(frozen=True)
class Where:
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
    sources: frozenset[Source] | None = None
    max_age_s: float | None = None
    max_age_versions: int | None = None
    success: bool | None = None

    def __or__(self, other: Where | AnyOf) -> AnyOf:
        return AnyOf((self,)) | other

    @property
    def aged(self) -> bool:
        """Whether steps that met it may cease to do so as others come."""
        return self.max_age_s is not None or self.max_age_versions is not None

    def narrowed(self, sources: frozenset[Source] | None = None, phases: frozenset[Phase] | None = None) -> Where:
        """Of the steps that meet it those that are of `sources` and `phases` too; None says nothing."""
        return replace(self, sources=_both(self.sources, sources), phases=_both(self.phases, phases))

    def fits(self, timeline: Timeline, low: int) -> Array:
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

    def _newest_version(self, timeline: Timeline) -> int:
        """Each embodiment has a learner of its own, which counts its versions for itself."""
        steps, chunks, episodes = timeline.index.steps, timeline.index.chunks, timeline.index.episodes
        if self.embodiments is None:
            return int(steps.policy_version.max())
        of_kin = np.isin(episodes.embodiment, _codes(episodes.embodiments, self.embodiments))
        return int(steps.policy_version.max(where=of_kin[chunks.episode][steps.chunk], initial=-1))

    def _episodes(self, episodes: Episodes) -> Array:
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
class AnyOf:
    """Steps that meet at least one of `parts`."""

    parts: tuple[Where, ...]

    def __or__(self, other: Where | AnyOf) -> AnyOf:
        return AnyOf(self.parts + (other.parts if isinstance(other, AnyOf) else (other,)))

    @property
    def aged(self) -> bool:
        """As `Where.aged`."""
        return any(part.aged for part in self.parts)

    def fits(self, timeline: Timeline, low: int) -> Array:
        """As `Where.fits`."""
        met: Array = np.any([part.fits(timeline, low) for part in self.parts], axis=0)
        return met


Filter = Where | AnyOf


def _both(one: frozenset[T] | None, other: frozenset[T] | None) -> frozenset[T] | None:
    return other if one is None else one if other is None else one & other


def _codes(names: Names, wanted: Iterable[str]) -> list[int]:
    return [names.find(str(name)) for name in wanted if names.find(str(name)) >= 0]


class Candidates:
    """The rows that meet a filter and whose next observation is stored, ascending; 4 bytes each.

    What they are depends on the store's content alone, and not on how often `update` was called. An update costs as
    much as there are rows from the lowest change on, which is little where experience is appended.
    """

    def __init__(self, where: Filter) -> None:
        self.where = where
        self._rows = np.empty(1024, np.int32)
        self._count = self._judged = 0
        self._waiting = np.empty(0, np.int64)  # rows that meet the filter and whose next observation is still to come

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Array:
        """int32; a view that the next update changes."""
        return self._rows[: self._count]

    def update(self, timeline: Timeline, change: Change) -> int:
        """Takes in a change of the index; returns the lowest row about which the answer may differ from before."""
        low = self._lowest(timeline, change)
        total = len(timeline.index.steps)
        if low >= total:
            return total
        fitting = low + np.flatnonzero(self.where.fits(timeline, low))
        complete = timeline.following(fitting) >= 0
        self._waiting = np.append(self._waiting[self._waiting < low], fitting[~complete])
        self._replace(low, fitting[complete])
        self._judged = total
        return low

    def _lowest(self, timeline: Timeline, change: Change) -> int:
        lows = [self._judged]
        lows += [int(rows.min()) for rows in (change.relabelled, change.dropped, change.revived) if len(rows)]
        arrived = self._waiting[timeline.following(self._waiting) >= 0]
        lows += arrived[:1].tolist()
        if self.where.aged and self._count and len(change.rows):
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
