"""From chunks that arrive to chunks that are durable and acknowledged."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from user_sys.episode import PackedChunk, open_chunk
from user_sys.errors import StoreFull, TunnelError, WireError, waiting_for_space
from user_sys.gateway.config import GatewayConfig
from user_sys.messages import ChunkAck, ChunkOffer, ChunkRefusal
from user_sys.store.files import free_bytes
from user_sys.store.labels import Label
from user_sys.store.log import Ticket
from user_sys.store.store import StoreWriter
from user_sys.tunnel.server import Peer
from user_sys.tunnel.wire import Payload

logger = logging.getLogger(__name__)

MAX_AHEAD_S = 86_400.0  # of a chunk's times before this computer's clock
STOP_TIMEOUT_S = 30.0
WAIT_S = 0.5

Result = TypeVar("Result")
Answer = Callable[[Peer, ChunkAck | ChunkRefusal], object]
"""Tells the session that sent a chunk, and no later one: sequences may start anew with each."""
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


@dataclass(frozen=True)
class _Saying:
    labels: Sequence[Label]
    durable: Future[None]


@dataclass(eq=False)
class _Group:
    """What shares one sync."""

    newest: dict[Peer, int] = field(default_factory=dict)
    settled: list[_Arrival] = field(default_factory=list)
    said: list[Future[None]] = field(default_factory=list)
    size_bytes: int = 0
    ticket: Ticket | None = None


class Committer:
    """Appends chunks to the store, syncs once a group, and then acknowledges.

    Two threads in turn: one checks, appends and writes out a group while the other waits for the disk to sync the group
    before. Who appended a group also syncs it: a thread that it was handed to would first wait for the interpreter,
    which appending the next group keeps busy.

    The queue is bounded by the window of each connected robot, which opens again as its chunks are settled. While the
    disk is full nothing is acknowledged and it keeps trying; robots then stop sending by themselves when their windows
    are used up, and spool to their outboxes.
    """

    def __init__(self, writer: StoreWriter, answer: Answer, release: Release, config: GatewayConfig) -> None:
        self.totals = CommitTotals()
        self.failure: BaseException | None = None
        self._writer = writer
        self._answer = answer
        self._release = release
        self._config = config
        self._queue: deque[_Arrival | _Saying] = deque()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._appending = threading.Lock()
        self._syncing = threading.Lock()  # taken while holding the other, so that groups are synced in their order
        self._threads = [threading.Thread(target=self._run, name=f"commit-{n}", daemon=True) for n in range(2)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def started(self) -> bool:
        return self._threads[0].ident is not None

    def close(self) -> None:
        """Commits what has arrived, then ends. Raises TunnelError when the disk takes longer than `STOP_TIMEOUT_S`."""
        self._stopping.set()
        with self._changed:
            self._changed.notify()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise TunnelError(f"the commit thread did not end within {STOP_TIMEOUT_S} s: the disk is stuck")

    def offer(self, peer: Peer, offer: ChunkOffer, packet: Payload) -> None:
        """Queues a chunk; never blocks. The tunnel sees to it that no peer sends more than its window allows."""
        with self._changed:
            self._queue.append(_Arrival(peer, offer.sequence, packet))
            self._changed.notify()

    def say(self, labels: Sequence[Label]) -> Future[None]:
        """Queues labels; never blocks. The result comes once they are durable, and never if the disk fails."""
        saying = _Saying(labels, Future())
        with self._changed:
            self._queue.append(saying)
            self._changed.notify()
        return saying.durable

    def forget(self, peer: Peer) -> None:
        """Drops what a session that is over had queued: it will be sent again under the next one."""
        with self._changed:
            self._queue = deque(item for item in self._queue if isinstance(item, _Saying) or item.peer is not peer)

    @property
    def queued_bytes(self) -> int:
        with self._changed:
            return sum(len(item.packet) for item in self._queue if isinstance(item, _Arrival))

    def shortage(self) -> dict[str, float]:
        """For the metrics: what is to be written and what the disk has room for; 0 while it is not full."""
        if not self.totals.full:
            return {"disk_needed_bytes": 0.0, "disk_free_bytes": 0.0}
        needed = max(1, self.queued_bytes + self._writer.pending_bytes)
        return {"disk_needed_bytes": float(needed), "disk_free_bytes": float(free_bytes(self._writer.path))}

    # The threads

    def _run(self) -> None:
        try:
            while (group := self._appended()) is not None:
                try:
                    self._patiently(partial(self._writer.sync, group.ticket))
                    self._settle(group)
                finally:
                    self._syncing.release()
        except Exception as error:
            logger.exception("commit.failed")
            self.failure = self.failure or error

    def _appended(self) -> _Group | None:
        """The next group, written out, the caller having the turn to sync it; None once stopped, or failed."""
        if not self._turn(self._appending):
            return None
        try:
            group = self._next_group()
            if group is None:
                return None
            group.ticket = self._patiently(self._writer.flush)
            return group if self._turn(self._syncing) else None
        finally:
            self._appending.release()

    def _turn(self, lock: threading.Lock) -> bool:
        """Takes `lock`; False once a commit has failed."""
        while self.failure is None:
            if lock.acquire(timeout=WAIT_S):
                return True
        return False

    def _next_group(self) -> _Group | None:
        """Appends what has arrived, up to `commit_bytes`; None once stopped and empty, or failed."""
        with self._changed:
            while not self._queue and not self._stopping.is_set() and self.failure is None:
                self._changed.wait(WAIT_S)
            if not self._queue or self.failure is not None or (self._stopping.is_set() and self.totals.full):
                return None
        group = _Group()
        while group.size_bytes < self._config.commit_bytes and (item := self._next_item()) is not None:
            if isinstance(item, _Saying):
                self._append_labels(item, group)
            else:
                self._append(item, group)
        return group

    def _next_item(self) -> _Arrival | _Saying | None:
        with self._changed:
            return self._queue.popleft() if self._queue else None

    def _append_labels(self, saying: _Saying, group: _Group) -> None:
        for label in saying.labels:
            self._patiently(partial(self._writer.append_label, label))
        group.said.append(saying.durable)

    def _append(self, arrival: _Arrival, group: _Group) -> None:
        totals = self.totals
        group.settled.append(arrival)
        group.newest[arrival.peer] = arrival.sequence
        group.size_bytes += len(arrival.packet)
        try:
            chunk = open_chunk(arrival.packet)
            if chunk.header.robot != arrival.peer.name:
                raise WireError(f"{arrival.peer.name} sent a chunk of {chunk.header.robot[:80]!r}")
            _require_past(chunk)
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

    def _patiently(self, attempt: Callable[[], Result]) -> Result:
        """Tries until the disk has room. Raises StoreFull only when the gateway stops meanwhile."""
        while True:
            try:
                done = attempt()
                if self.totals.full:
                    logger.warning("commit.space_again")
                self.totals.full = False
                return done
            except StoreFull:
                if not self.totals.full:
                    self.totals.full = True
                    shortage = self.shortage().values()
                    logger.error("commit.disk_full %s", waiting_for_space(self._writer.path, *shortage))
                if self._stopping.wait(self._config.retry_s):
                    raise

    def _settle(self, group: _Group) -> None:
        for peer, sequence in group.newest.items():
            self._answer(peer, ChunkAck(sequence=sequence))
            packets = [arrival.packet for arrival in group.settled if arrival.peer is peer]
            self._release(peer, len(packets), sum(map(len, packets)))
        for durable in group.said:
            durable.set_result(None)


def _require_past(chunk: PackedChunk) -> None:
    """Raises WireError: it was recorded in the future. Samplers by age would take no other step any more."""
    captured = chunk.column("t_capture_ns")
    newest_ns = chunk.header.started_unix_ns
    if captured is not None and len(captured):
        newest_ns = max(newest_ns, int(captured.max()) + chunk.header.unix_offset_ns)
    ahead_s = (newest_ns - time.time_ns()) / 1e9
    if ahead_s > MAX_AHEAD_S:
        raise WireError(
            f"recorded {ahead_s:.0f} s from now; set the clock of the robot's computer, or of the gateway's"
        )
