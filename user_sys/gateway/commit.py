"""From chunks that arrive to chunks that are durable and acknowledged."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from user_sys.episode import open_chunk
from user_sys.errors import StoreFull, TunnelError, WireError
from user_sys.gateway.config import GatewayConfig
from user_sys.messages import ChunkAck, ChunkOffer, ChunkRefusal
from user_sys.store.store import StoreWriter
from user_sys.tunnel.server import Peer
from user_sys.tunnel.wire import Payload

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0
WAIT_S = 0.5

Answer = Callable[[Peer, ChunkAck | ChunkRefusal], None]
Release = Callable[[Peer, int, int], None]
"""Gives a peer credit back for so many chunks and bytes."""


@dataclass(frozen=True)
class _Arrival:
    peer: Peer
    sequence: int
    packet: Payload


@dataclass
class CommitTotals:
    """What the committer has done since it started; `full` while the disk has no room."""

    chunks: int = 0
    steps: int = 0
    size_bytes: int = 0
    duplicates: int = 0
    refused: int = 0
    full: bool = False


@dataclass(eq=False)
class _Group:
    """Chunks that share one sync."""

    newest: dict[Peer, int] = field(default_factory=dict)
    settled: list[_Arrival] = field(default_factory=list)
    size_bytes: int = 0


class Committer:
    """One thread that appends chunks to the store, syncs once a group, and then acknowledges.

    Its queue is bounded by the window of each connected robot, which opens again as its chunks are settled. While the
    disk is full it acknowledges nothing and keeps trying; robots then stop sending by themselves when their windows are
    used up, and spool to their outboxes.
    """

    def __init__(self, writer: StoreWriter, answer: Answer, release: Release, config: GatewayConfig) -> None:
        self.totals = CommitTotals()
        self.failure: BaseException | None = None
        self._writer = writer
        self._answer = answer
        self._release = release
        self._config = config
        self._queue: deque[_Arrival] = deque()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commit", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def close(self) -> None:
        """Commits what has arrived, then ends. Raises TunnelError when the disk takes longer than `STOP_TIMEOUT_S`."""
        self._stopping.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise TunnelError(f"the commit thread did not end within {STOP_TIMEOUT_S} s: the disk is stuck")

    def offer(self, peer: Peer, offer: ChunkOffer, packet: Payload) -> None:
        """Queues a chunk; never blocks. The tunnel sees to it that no peer sends more than its window allows."""
        with self._changed:
            self._queue.append(_Arrival(peer, offer.sequence, packet))
            self._changed.notify()

    def forget(self, peer: Peer) -> None:
        """Drops what a session that is over had queued: it will be sent again under the next one."""
        with self._changed:
            self._queue = deque(arrival for arrival in self._queue if arrival.peer is not peer)

    @property
    def queued_bytes(self) -> int:
        with self._changed:
            return sum(len(arrival.packet) for arrival in self._queue)

    # The thread

    def _run(self) -> None:
        try:
            while (group := self._next_group()) is not None:
                self._patiently(self._writer.sync)
                self._settle(group)
        except Exception as error:
            logger.exception("commit.failed")
            self.failure = error

    def _next_group(self) -> _Group | None:
        """Appends what has arrived, up to `commit_bytes`; None once stopped and empty."""
        with self._changed:
            while not self._queue and not self._stopping.is_set():
                self._changed.wait(WAIT_S)
            if not self._queue or (self._stopping.is_set() and self.totals.full):
                return None
        group = _Group()
        while group.size_bytes < self._config.commit_bytes and (arrival := self._next_arrival()) is not None:
            self._append(arrival, group)
        return group

    def _next_arrival(self) -> _Arrival | None:
        with self._changed:
            return self._queue.popleft() if self._queue else None

    def _append(self, arrival: _Arrival, group: _Group) -> None:
        totals = self.totals
        group.settled.append(arrival)
        group.newest[arrival.peer] = arrival.sequence
        group.size_bytes += len(arrival.packet)
        try:
            chunk = open_chunk(arrival.packet)
            if chunk.header.robot != arrival.peer.name:
                raise WireError(f"{arrival.peer.name} sent a chunk of {chunk.header.robot[:80]!r}")
            if self._patiently(lambda: self._writer.append(arrival.packet, chunk)):
                totals.chunks += 1
                totals.steps += chunk.header.steps
                totals.size_bytes += len(arrival.packet)
            else:
                totals.duplicates += 1
        except WireError as error:
            totals.refused += 1
            logger.warning("commit.refused peer=%s sequence=%d: %s", arrival.peer.name, arrival.sequence, error)
            self._answer(arrival.peer, ChunkRefusal(sequence=arrival.sequence, reason=str(error)))

    def _patiently(self, attempt: Callable[[], bool | None]) -> bool | None:
        """Tries until the disk has room. Raises StoreFull only when the gateway stops meanwhile."""
        while True:
            try:
                done = attempt()
                if self.totals.full:
                    logger.warning("commit.space_again")
                self.totals.full = False
                return done
            except StoreFull as error:
                if not self.totals.full:
                    logger.error("commit.disk_full %s", error)
                self.totals.full = True
                if self._stopping.wait(self._config.retry_s):
                    raise

    def _settle(self, group: _Group) -> None:
        for peer, sequence in group.newest.items():
            self._answer(peer, ChunkAck(sequence=sequence))
            packets = [arrival.packet for arrival in group.settled if arrival.peer is peer]
            self._release(peer, len(packets), sum(map(len, packets)))
