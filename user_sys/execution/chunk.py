"""A chunk of actions that a robot executes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from user_sys.policies.policy import ActionChunk


@dataclass
class RunningChunk:
    """A chunk and its place in time, which counts the actions that the robot has executed in the episode.

    Attributes:
        chunk: as the policy returned it.
        version: of the weights that acted.
        number: of the chunk in the episode.
        first: count of executed actions at which the chunk's first action is due.
        t_observation_ns: monotonic clock of the edge: capture of the observation that the chunk was computed from.
        delay: control periods in which actions were executed from that observation to the chunk's first use.
    """

    chunk: ActionChunk
    version: int
    number: int
    first: int
    t_observation_ns: int
    delay: int

    def __len__(self) -> int:
        return len(self.chunk.actions)

    def place(self, executed: int) -> int:
        """The place of the action for the next control period; negative if the chunk begins later."""
        return executed - self.first

    def is_used_up(self, executed: int) -> bool:
        return self.place(executed) >= len(self)


def current_chunk(chunks: Sequence[RunningChunk], executed: int) -> RunningChunk | None:
    """The newest chunk that has an action for the next control period."""
    for chunk in reversed(chunks):
        if 0 <= chunk.place(executed) < len(chunk):
            return chunk
    return None
