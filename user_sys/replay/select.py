"""Which steps of a chunk a replay buffer takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from user_sys.codec import Array
from user_sys.episode import Chunk, Phase, Source

INTERVENTIONS = frozenset({Phase.TELEOP, Phase.CORRECTION})

Selector = Callable[[Chunk], Array]
"""Maps a chunk of T steps to bool (T,): the steps that may be sampled."""


@dataclass(frozen=True)
class Select:
    """Steps that fit every condition given; None means any.

    Attributes:
        embodiments, sources, tasks: of the chunk.
        phases: of the step.
    """

    embodiments: frozenset[str] | None = None
    sources: frozenset[Source] | None = None
    tasks: frozenset[str] | None = None
    phases: frozenset[Phase] | None = None

    def __call__(self, chunk: Chunk) -> Array:
        header = chunk.header
        fits = (
            (self.embodiments is None or header.embodiment in self.embodiments)
            and (self.sources is None or header.source in self.sources)
            and (self.tasks is None or header.task in self.tasks)
        )
        if fits and self.phases is not None:
            return np.isin(chunk.columns["phase"], [int(phase) for phase in self.phases])
        return np.full(header.steps, fits)


@dataclass(frozen=True)
class AnyOf:
    """Steps that at least one of `selectors` takes."""

    selectors: tuple[Selector, ...]

    def __call__(self, chunk: Chunk) -> Array:
        taken: Array = np.any([selector(chunk) for selector in self.selectors], axis=0)
        return taken
