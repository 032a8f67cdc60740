"""Which steps a batch starts at. Choosers are small and are put together: filters within them, mixes over them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from user_sys.codec import Array
from user_sys.errors import ConfigError, WireError
from user_sys.replay.timeline import Timeline
from user_sys.replay.where import INTERVENTIONS, Candidates, Filter, Where
from user_sys.store.index import Change

State = dict[str, Array]


class Choice(NamedTuple):
    """Rows of the index, int64 (n,); weights, float32 (n,); and the part that chose each, int32 (n,)."""

    rows: Array
    weights: Array
    groups: Array


class Chooser(ABC):
    """Chooses rows. One thread calls it.

    What it chooses depends on the store's content, its own state and the generator alone.

    Attributes:
        hears: whether `feedback` changes what it chooses.
    """

    hears = False

    @abstractmethod
    def update(self, timeline: Timeline, change: Change) -> None:
        """Takes in a change of the index; the first one that it gets tells of everything."""

    @abstractmethod
    def __len__(self) -> int:
        """How many rows it chooses from."""

    @abstractmethod
    def choose(self, n: int, rng: np.random.Generator) -> Choice:
        """`n` rows, with replacement. There is at least one to choose from."""

    def redraw(self, group: int, rng: np.random.Generator) -> Choice:
        """One row in place of another, which belonged to `group` and cannot be used."""
        return self.choose(1, rng)

    def feedback(self, rows: Array, groups: Array, losses: Array) -> None:  # noqa: B027  # most have no use for it
        """Hears how rows that it chose did: TD errors or losses, float (n,)."""

    def state_dict(self, timeline: Timeline) -> State:
        """Copies of everything that determines later choices and is not in the store."""
        return {}

    def load_state_dict(self, state: Mapping[str, Array], timeline: Timeline) -> None:  # noqa: B027  # as `state_dict`
        """Takes up where `state` was taken. Raises WireError: it is another chooser's."""


class Uniform(Chooser):
    """Every row that meets a filter is as likely."""

    def __init__(self, where: Filter = Where()) -> None:  # noqa: B008  # frozen
        self._candidates = Candidates(where)

    def __len__(self) -> int:
        return len(self._candidates)

    def update(self, timeline: Timeline, change: Change) -> None:
        """See `Chooser.update`."""
        self._candidates.update(timeline, change)

    def choose(self, n: int, rng: np.random.Generator) -> Choice:
        """See `Chooser.choose`."""
        return plain_choice(self._candidates.rows[rng.integers(0, len(self), n)])


class InterventionWeighted(Chooser):
    """Steps that a person controlled are `weight` times as likely as others; a bias that is wanted, not corrected."""

    def __init__(self, where: Where = Where(), weight: float = 4.0) -> None:  # noqa: B008  # frozen
        """Raises ConfigError unless `weight` is at least 1."""
        if not 1.0 <= weight < math.inf:
            raise ConfigError(f"interventions are weighted by {weight}; give at least 1")
        self._weight = weight
        self._all = Candidates(where)
        self._persons = Candidates(where.narrowed(phases=INTERVENTIONS))

    def __len__(self) -> int:
        return len(self._all)

    def update(self, timeline: Timeline, change: Change) -> None:
        """See `Chooser.update`."""
        self._all.update(timeline, change)
        self._persons.update(timeline, change)

    def choose(self, n: int, rng: np.random.Generator) -> Choice:
        """See `Chooser.choose`."""
        # A mix of "any row" and, for what weight 1 does not give already, "a person's row".
        extra = (self._weight - 1.0) * len(self._persons)
        draw = rng.random(n) * (len(self) + extra)
        rows = self._all.rows[np.minimum(draw, len(self) - 1).astype(np.int64)]
        of_person = draw >= len(self)
        if of_person.any():
            place = ((draw[of_person] - len(self)) / (self._weight - 1.0)).astype(np.int64)
            rows[of_person] = self._persons.rows[np.minimum(place, len(self._persons) - 1)]
        return plain_choice(rows)


def plain_choice(rows: Array) -> Choice:
    """`rows` with weight 1, in group 0."""
    return Choice(rows.astype(np.int64), np.ones(len(rows), np.float32), np.zeros(len(rows), np.int32))


def column(state: Mapping[str, Array], name: str) -> Array:
    """A column of a state. Raises WireError: there is none of that name."""
    if name not in state:
        raise WireError(f"this is the state of another sampler: it lacks {name!r}")
    return state[name]
