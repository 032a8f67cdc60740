"""Experience on its way up: chunks from a durable source, sent in order while there is credit, kept until settled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from user_sys.messages import ChunkAck, ChunkOffer, ChunkRefusal
from user_sys.tunnel.gauges import Histogram
from user_sys.tunnel.link import Line
from user_sys.tunnel.wire import Envelope


@dataclass(frozen=True)
class PendingChunk:
    """A chunk that no acknowledgement has covered yet."""

    sequence: int
    episode: str
    index: int
    packet: bytes | memoryview


class ChunkSource(Protocol):
    """Where chunks wait. Called from the tunnel's thread.

    Attributes:
        stream: names this source for good; within a stream no sequence number is ever given twice.
    """

    stream: str

    def __len__(self) -> int:
        """Durable chunks that are not acknowledged. Any thread may ask."""

    def pending(self, after_sequence: int) -> Iterator[PendingChunk]:
        """Durable chunks with a greater sequence, in order."""

    def acknowledge(self, sequence: int) -> None:
        """All chunks up to and including `sequence` are durable at the gateway, or set aside."""

    def set_aside(self, sequence: int, reason: str) -> None:
        """The gateway will never take this chunk: keep it where a person finds it."""

    def listen(self, appended: Callable[[], None] | None) -> None:
        """Calls `appended` from any thread whenever a chunk has become durable; None ends that."""


class ChunkUplink:
    """Sends a source's chunks. One thread calls it.

    Args:
        settle: takes the time from sending a chunk to its durable acknowledgement.
    """

    def __init__(self, source: ChunkSource, settle: Histogram) -> None:
        self.source = source
        self._settle = settle
        self._under_way: deque[tuple[int, float]] = deque()
        self._sent = -1

    def rewind(self, resume_after: int) -> None:
        """A new session: chunks up to `resume_after` are durable there, everything else is sent again."""
        self._under_way.clear()
        self._sent = -1
        if resume_after >= 0:
            self.source.acknowledge(resume_after)

    def pump(self, line: Line) -> bool:
        """Sends what credit and bandwidth allow; True when libzmq can take no more."""
        if not line.outlet.may_send():
            return False
        for chunk in self.source.pending(self._sent):
            offer = ChunkOffer(sequence=chunk.sequence, episode=chunk.episode, index=chunk.index)
            if not line.send_chunk(Envelope(offer, chunk.packet)):
                return True
            self._sent = chunk.sequence
            self._under_way.append((chunk.sequence, time.monotonic()))
            if not line.outlet.may_send():
                return False
        return False

    def settle(self, answer: ChunkAck | ChunkRefusal) -> None:
        """Takes the gateway's answer. A refused chunk is set aside, and goes with the next acknowledgement."""
        if isinstance(answer, ChunkRefusal):
            self.source.set_aside(answer.sequence, answer.reason)
            return
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= answer.sequence:
            self._settle.add(now - self._under_way.popleft()[1])
        self.source.acknowledge(min(answer.sequence, self._sent))
