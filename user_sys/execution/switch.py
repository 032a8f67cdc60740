"""Plain switching: a new chunk replaces the old one from the present control period on. The base of other methods.

Real-time chunking and training-time RTC switch in this way too: their policies make the new chunk begin as the old one
goes on (`user_sys.policies.rtc`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hal.spec import Array
from user_sys.execution.chunk import RunningChunk
from user_sys.policies.policy import ChunkContext, ExecutionConfig


class Switch:
    """See the module.

    Attributes:
        requests_always: a chunk is requested in each control period, whether or not the last one has enough actions.
    """

    requests_always = False

    def __init__(self, config: ExecutionConfig) -> None:
        self.config = config

    def first_period(self, executed: int, context: ChunkContext) -> int:
        """Count of executed actions at which the first action of a chunk is due that is requested now."""
        return executed

    def take(self, chunks: Sequence[RunningChunk], taken: RunningChunk, executed: int) -> list[RunningChunk]:
        """Returns the chunks that are still needed when `taken` arrives, the newest last."""
        return [taken] if taken.place(executed) >= 0 else [*chunks[-1:], taken]

    def action(
        self,
        chunks: Sequence[RunningChunk],
        current: RunningChunk,
        executed: int,
        observe: Callable[[], Mapping[str, Array]],
    ) -> tuple[Array, float]:
        """The action for this control period, float32 (a,), and its log density.

        Args:
            chunks: at least one, the newest last.
            current: the newest one that has an action for this period.
            observe: returns the present observation; it may raise PolicyUnavailable.
        """
        place = current.place(executed)
        return current.chunk.actions[place], float(current.chunk.log_prob[place])
