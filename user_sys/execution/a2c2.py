"""A2C2: a small network corrects each action of a chunk with the newest observation.

Sendai et al., "Leave No Observation Behind: Real-time Correction for VLA Action Chunks", 2025 (arXiv 2509.23224). The
network comes with the chunk (`user_sys.policies.correction`), so that the robot's computer evaluates it, without torch
and without waiting for a policy server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from hal.spec import Array
from user_sys.errors import PolicyUnavailable
from user_sys.execution.chunk import RunningChunk
from user_sys.execution.switch import Switch


class A2c2(Switch):
    """See the module."""

    def action(
        self,
        chunks: Sequence[RunningChunk],
        current: RunningChunk,
        executed: int,
        observe: Callable[[], Mapping[str, Array]],
    ) -> tuple[Array, float]:
        """See `Switch.action`. A corrected action has no density; without a new observation nothing is corrected."""
        action, log_prob = super().action(chunks, current, executed, observe)
        if current.chunk.correction is None:
            return action, log_prob
        try:
            observation = observe()
        except PolicyUnavailable:
            return action, log_prob
        return current.chunk.correction.correct(action, current.place(executed), observation), math.nan
