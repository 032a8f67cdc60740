"""Experience on its way up: chunks from a durable source, sent in order within a window, kept until acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from user_sys.messages import ChunkAck, ChunkOffer, ChunkRefusal
from user_sys.tunnel.wire import Envelope, TunnelLimits


@dataclass(frozen=True)
class PendingChunk:
    """A chunk that no acknowledgement has covered yet."""

    sequence: int
    episode: str
    index: int
    packet: bytes | memoryview


class ChunkSource(Protocol):
    """Where chunks wait. Called from the tunnel's thread."""

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
    """Sends a source's chunks under a window of bytes and chunks. One thread calls it."""

    def __init__(self, source: ChunkSource, limits: TunnelLimits) -> None:
        self.source = source
        self._limits = limits
        self._under_way: deque[tuple[int, int]] = deque()
        self._bytes = 0
        self._sent = -1

    def rewind(self) -> None:
        """The connection is gone: everything without acknowledgement is sent again."""
        self._under_way.clear()
        self._bytes = 0
        self._sent = -1

    def pump(self, send: Callable[[Envelope], bool]) -> bool:
        """Sends what the window allows; True when `send` could take no more."""
        if not self._has_credit():
            return False
        for chunk in self.source.pending(self._sent):
            offer = ChunkOffer(sequence=chunk.sequence, episode=chunk.episode, index=chunk.index)
            if not send(Envelope(offer, chunk.packet)):
                return True
            self._sent = chunk.sequence
            self._under_way.append((chunk.sequence, len(chunk.packet)))
            self._bytes += len(chunk.packet)
            if not self._has_credit():
                return False
        return False

    def settle(self, answer: ChunkAck | ChunkRefusal) -> None:
        """Takes the gateway's answer. A refused chunk is set aside, and goes with the next acknowledgement."""
        if isinstance(answer, ChunkRefusal):
            self.source.set_aside(answer.sequence, answer.reason)
            return
        while self._under_way and self._under_way[0][0] <= answer.sequence:
            self._bytes -= self._under_way.popleft()[1]
        self.source.acknowledge(min(answer.sequence, self._sent))

    def _has_credit(self) -> bool:
        return self._bytes < self._limits.window_bytes and len(self._under_way) < self._limits.window_chunks
