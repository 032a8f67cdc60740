"""Temporal ensembling: each action is the weighted mean of all chunks that hold one for its control period.

Zhao et al., "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware", RSS 2023 (arXiv 2304.13705): the i-th
oldest chunk has the weight exp(-m i), with m the setting `ensemble_decay`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hal.spec import Array
from user_sys.execution.chunk import RunningChunk
from user_sys.execution.switch import Switch


class Ensemble(Switch):
    """See the module."""

    requests_always = True

    def take(self, chunks: Sequence[RunningChunk], taken: RunningChunk, executed: int) -> list[RunningChunk]:
        """See `Switch.take`."""
        return [*chunks, taken]

    def action(
        self,
        chunks: Sequence[RunningChunk],
        current: RunningChunk,
        executed: int,
        observe: Callable[[], Mapping[str, Array]],
    ) -> tuple[Array, float]:
        """See `Switch.action`. The mean has no density."""
        if len(chunks) == 1:
            return super().action(chunks, current, executed, observe)
        weights = np.exp(-self.config.ensemble_decay * np.arange(len(chunks)))
        actions = [each.chunk.actions[each.place(executed)] for each in chunks]
        return np.average(actions, axis=0, weights=weights).astype(np.float32), math.nan
