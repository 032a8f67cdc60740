"""VLASH: the policy acts from the state in which the robot will be when its chunk is used.

Tang et al., "VLASH: Real-Time VLAs via Future-State-Aware Asynchronous Inference", 2025 (arXiv 2512.01031). The policy
rolls the observed state forward by the promised actions (`user_sys.policies.vlash`), so the chunk begins when they end.
"""

from __future__ import annotations

from user_sys.execution.switch import Switch
from user_sys.policies.policy import ChunkContext


class Vlash(Switch):
    """See the module. A chunk that arrives before its first period waits for it."""

    def first_period(self, executed: int, context: ChunkContext) -> int:
        """See `Switch.first_period`."""
        return executed + min(context.delay, len(context.prefix))
