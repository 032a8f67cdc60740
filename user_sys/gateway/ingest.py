"""From chunks that arrive to chunks that are durable and acknowledged.

Takes labels that people post while the gateway writes the store (`user_sys.store.labels`) into it.

Keeps the store within its bound while robots write to it: labels what goes, then rewrites segments.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from user_sys.episode import PackedChunk, parse_chunk
from user_sys.errors import StoreError, StoreFull, TunnelError, WireError, disk_full_message
from user_sys.gateway.config import GatewayConfig
from user_sys.messages import ChunkAck, ChunkOffer, ChunkRefusal
from user_sys.store.files import free_bytes
from user_sys.store.labels import Label, queued_files, read_queued_labels, remove_queued
from user_sys.store.maintenance import DEAD_SHARE, Retention, deletion_labels, disk_bytes, plan_eviction, reclaim_space
from user_sys.store.segment_writer import SyncPoint
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.tunnel.protocol import Payload
from user_sys.tunnel.server import Peer

logger = logging.getLogger(__name__)

MAX_CLOCK_AHEAD_S = 86_400.0  # of a chunk's times before this computer's clock
INGEST_STOP_TIMEOUT_S = 30.0
QUEUE_POLL_S = 0.5

Result = TypeVar("Result")
SendReply = Callable[[Peer, ChunkAck | ChunkRefusal], object]
"""Tells the session that sent a chunk, and no later one: sequences may start anew with each."""
ReleaseCredit = Callable[[Peer, int, int], None]
"""Gives a peer credit back for so many chunks and bytes."""


@dataclass(frozen=True)
class _PendingChunk:
    peer: Peer
    sequence: int
    packet: Payload


@dataclass
class IngestTotals:
    """What the committer has done since it started; `disk_full` while the disk has no room."""

    chunks: int = 0
    steps: int = 0
    size_bytes: int = 0
    duplicates: int = 0
    rejected: int = 0
    disk_full: bool = False


@dataclass(frozen=True)
class _PendingLabels:
    labels: Sequence[Label]
    durable: Future[None]


@dataclass(eq=False)
class _CommitGroup:
    """What shares one sync."""

    newest: dict[Peer, int] = field(default_factory=dict)
    chunks: list[_PendingChunk] = field(default_factory=list)
    labels_durable: list[Future[None]] = field(default_factory=list)
    size_bytes: int = 0
    sync_point: SyncPoint | None = None


class ChunkIngester:
    """Appends chunks to the store, syncs once a group, and then acknowledges.

    Two threads in turn: one checks, appends and writes out a group while the other waits for the disk to sync the group
    before. Who appended a group also syncs it: a thread that it was handed to would first wait for the interpreter,
    which appending the next group keeps busy.

    The queue is bounded by the window of each connected robot, which opens again as its chunks are settled. While the
    disk is full nothing is acknowledged and it keeps trying; robots then stop sending by themselves when their windows
    are used up, and spool to their outboxes.
    """

    def __init__(self, writer: StoreWriter, answer: SendReply, release: ReleaseCredit, config: GatewayConfig) -> None:
        self.totals = IngestTotals()
        self.failure: BaseException | None = None
        self._writer = writer
        self._answer = answer
        self._release = release
        self._config = config
        self._queue: deque[_PendingChunk | _PendingLabels] = deque()
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
        """Commits what has arrived, then ends. Raises TunnelError when the disk takes longer than
        `INGEST_STOP_TIMEOUT_S`.
        """
        self._stopping.set()
        with self._changed:
            self._changed.notify()
        deadline = time.monotonic() + INGEST_STOP_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise TunnelError(f"the commit thread did not end within {INGEST_STOP_TIMEOUT_S} s: the disk is stuck")

    def put_chunk(self, peer: Peer, offer: ChunkOffer, packet: Payload) -> None:
        """Queues a chunk; never blocks. The tunnel sees to it that no peer sends more than its window allows."""
        with self._changed:
            self._queue.append(_PendingChunk(peer, offer.sequence, packet))
            self._changed.notify()

    def append_labels(self, labels: Sequence[Label]) -> Future[None]:
        """Queues labels; never blocks. The result comes once they are durable, and never if the disk fails."""
        saying = _PendingLabels(labels, Future())
        with self._changed:
            self._queue.append(saying)
            self._changed.notify()
        return saying.durable

    def discard_session(self, peer: Peer) -> None:
        """Drops what a session that is over had queued: it will be sent again under the next one."""
        with self._changed:
            self._queue = deque(
                item for item in self._queue if isinstance(item, _PendingLabels) or item.peer is not peer
            )

    @property
    def queued_bytes(self) -> int:
        with self._changed:
            return sum(len(item.packet) for item in self._queue if isinstance(item, _PendingChunk))

    def disk_shortage(self) -> dict[str, float]:
        """For the metrics: what is to be written and what the disk has room for; 0 while it is not full."""
        if not self.totals.disk_full:
            return {"disk_needed_bytes": 0.0, "disk_free_bytes": 0.0}
        needed = max(1, self.queued_bytes + self._writer.pending_bytes)
        return {"disk_needed_bytes": float(needed), "disk_free_bytes": float(free_bytes(self._writer.path))}

    # The threads

    def _run(self) -> None:
        try:
            while (group := self._appended()) is not None:
                try:
                    self._patiently(partial(self._writer.sync, group.sync_point))
                    self._settle(group)
                finally:
                    self._syncing.release()
        except Exception as error:
            logger.exception("commit.failed")
            self.failure = self.failure or error

    def _appended(self) -> _CommitGroup | None:
        """The next group, written out, the caller having the turn to sync it; None once stopped, or failed."""
        if not self._turn(self._appending):
            return None
        try:
            group = self._next_group()
            if group is None:
                return None
            group.sync_point = self._patiently(self._writer.flush)
            return group if self._turn(self._syncing) else None
        finally:
            self._appending.release()

    def _turn(self, lock: threading.Lock) -> bool:
        """Takes `lock`; False once a commit has failed."""
        while self.failure is None:
            if lock.acquire(timeout=QUEUE_POLL_S):
                return True
        return False

    def _next_group(self) -> _CommitGroup | None:
        """Appends what has arrived, up to `commit_bytes`; None once stopped and empty, or failed."""
        with self._changed:
            while not self._queue and not self._stopping.is_set() and self.failure is None:
                self._changed.wait(QUEUE_POLL_S)
            if not self._queue or self.failure is not None or (self._stopping.is_set() and self.totals.disk_full):
                return None
        group = _CommitGroup()
        while group.size_bytes < self._config.commit_bytes and (item := self._next_item()) is not None:
            if isinstance(item, _PendingLabels):
                self._append_labels(item, group)
            else:
                self._append(item, group)
        return group

    def _next_item(self) -> _PendingChunk | _PendingLabels | None:
        with self._changed:
            return self._queue.popleft() if self._queue else None

    def _append_labels(self, saying: _PendingLabels, group: _CommitGroup) -> None:
        for label in saying.labels:
            self._patiently(partial(self._writer.append_label, label))
        group.labels_durable.append(saying.durable)

    def _append(self, arrival: _PendingChunk, group: _CommitGroup) -> None:
        totals = self.totals
        group.chunks.append(arrival)
        group.newest[arrival.peer] = arrival.sequence
        group.size_bytes += len(arrival.packet)
        try:
            chunk = parse_chunk(arrival.packet)
            if chunk.header.robot != arrival.peer.name:
                raise WireError(f"{arrival.peer.name} sent a chunk of {chunk.header.robot[:80]!r}")
            _require_not_in_future(chunk)
            if self._patiently(lambda: self._writer.append(arrival.packet, chunk)):
                totals.chunks += 1
                totals.steps += chunk.header.steps
                totals.size_bytes += len(arrival.packet)
            else:
                totals.duplicates += 1
        except WireError as error:
            totals.rejected += 1
            logger.warning("commit.refused peer=%s sequence=%d: %s", arrival.peer.name, arrival.sequence, error)
            self._answer(arrival.peer, ChunkRefusal(sequence=arrival.sequence, reason=str(error)))

    def _patiently(self, attempt: Callable[[], Result]) -> Result:
        """Tries until the disk has room. Raises StoreFull only when the gateway stops meanwhile."""
        while True:
            try:
                done = attempt()
                if self.totals.disk_full:
                    logger.warning("commit.space_again")
                self.totals.disk_full = False
                return done
            except StoreFull:
                if not self.totals.disk_full:
                    self.totals.disk_full = True
                    shortage = self.disk_shortage().values()
                    logger.error("commit.disk_full %s", disk_full_message(self._writer.path, *shortage))
                if self._stopping.wait(self._config.retry_s):
                    raise

    def _settle(self, group: _CommitGroup) -> None:
        for peer, sequence in group.newest.items():
            self._answer(peer, ChunkAck(sequence=sequence))
            packets = [arrival.packet for arrival in group.chunks if arrival.peer is peer]
            self._release(peer, len(packets), sum(map(len, packets)))
        for durable in group.labels_durable:
            durable.set_result(None)


def _require_not_in_future(chunk: PackedChunk) -> None:
    """Raises WireError: it was recorded in the future. Samplers by age would take no other step any more."""
    captured = chunk.column("t_capture_ns")
    newest_ns = chunk.header.started_unix_ns
    if captured is not None and len(captured):
        newest_ns = max(newest_ns, int(captured.max()) + chunk.header.unix_offset_ns)
    ahead_s = (newest_ns - time.time_ns()) / 1e9
    if ahead_s > MAX_CLOCK_AHEAD_S:
        raise WireError(
            f"recorded {ahead_s:.0f} s from now; set the clock of the robot's computer, or of the gateway's"
        )


AppendLabels = Callable[[Sequence[Label]], Future[None]]


class LabelImporter:
    """One thread calls `poll`, which never waits for the disk's syncs of the log."""

    def __init__(self, store: Path, say: AppendLabels) -> None:
        self._store, self._say = store, say
        self._said: dict[Path, Future[None]] = {}
        self._refused: set[Path] = set()

    def poll(self) -> None:
        """Hands on what is new, and removes what is durable by now. Raises OSError."""
        for file in queued_files(self._store):
            if file not in self._said and file not in self._refused:
                self._take(file)
        for file in [file for file, said in self._said.items() if said.done()]:
            self._said.pop(file).result()
            remove_queued(file)

    def _take(self, file: Path) -> None:
        try:
            labels = read_queued_labels(file)
        except StoreError as error:
            self._refused.add(file)
            logger.warning("gateway.post_refused %s", error)
            return
        self._said[file] = self._say(labels)
        logger.info("gateway.labels_taken labels=%d by=%s", len(labels), labels[0].labeller if labels else "nobody")


LABELS_TIMEOUT_S = 60.0  # a full disk delays labels; the next round tries again
RETENTION_STOP_TIMEOUT_S = 60.0
LABELS_POLL_S = 0.2


@dataclass
class RetentionTotals:
    """What was given up since the start, and how the store stands.

    Attributes:
        shortfall_bytes: how much it is above its bound although all of it is to be kept.
    """

    episodes_dropped: int = 0
    store_bytes: int = 0
    shortfall_bytes: int = 0


class RetentionWorker:
    """One thread that looks after the store every `interval_s`. It follows the store only where there is work to do."""

    def __init__(
        self, path: Path, writer: StoreWriter, committer: ChunkIngester, retention: Retention, interval_s: float
    ) -> None:
        self.totals = RetentionTotals()
        self.failure: BaseException | None = None
        self._path, self._writer, self._committer = path, writer, committer
        self._retention, self._interval_s = retention, interval_s
        self._reader: StoreReader | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def close(self) -> None:
        """Ends after the round under way. Raises TunnelError when that takes longer than `RETENTION_STOP_TIMEOUT_S`."""
        self._stopping.set()
        self._thread.join(RETENTION_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise TunnelError(f"the upkeep of {self._path} did not end within {RETENTION_STOP_TIMEOUT_S} s")
        if self._reader is not None:
            self._reader.close()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._interval_s):
                self._round()
        except Exception as error:
            logger.exception("upkeep.failed")
            self.failure = error

    def _round(self) -> None:
        self.totals.store_bytes = size = disk_bytes(self._path)
        too_large = 0 < self._retention.max_bytes < size
        if not too_large:
            self.totals.shortfall_bytes = 0
            if not self._writer.deleted_episodes:
                return
        if self._reader is None:
            self._reader = StoreReader.open(self._path)
        self._reader.refresh()
        if not too_large or self._give_up(self._reader, size):
            self._compact(self._reader, 0.0 if too_large else DEAD_SHARE)

    def _give_up(self, reader: StoreReader, size: int) -> bool:
        """Deletes what retention does not keep; False while the labels are not durable."""
        choice = plan_eviction(reader.index, self._retention, size)
        if choice.shortfall_bytes and not self.totals.shortfall_bytes:
            missing = choice.shortfall_bytes
            logger.warning("upkeep.too_large bytes=%d above=%d: all that is left is to be kept", size, missing)
        self.totals.shortfall_bytes = choice.shortfall_bytes
        if not choice.episodes:
            return True
        if not self._is_durable(self._committer.append_labels(deletion_labels(choice))):
            logger.warning("upkeep.not_durable episodes=%d", len(choice.episodes))
            return False
        self.totals.episodes_dropped += len(choice.episodes)
        logger.info("upkeep.gave_up episodes=%d bytes=%d", len(choice.episodes), choice.freed_bytes)
        reader.refresh()
        return True

    def _is_durable(self, said: Future[None]) -> bool:
        deadline = time.monotonic() + LABELS_TIMEOUT_S
        while time.monotonic() < deadline and not self._stopping.is_set():
            if wait([said], LABELS_POLL_S).done:
                return True
        return False

    def _compact(self, reader: StoreReader, least_share: float) -> None:
        started = time.monotonic()
        try:
            for _ in reclaim_space(self._writer, reader.index, min_dead_share=least_share):
                if self._stopping.wait(time.monotonic() - started):  # half of the time the disk is left to ingestion
                    break
                started = time.monotonic()
        except StoreFull as error:
            logger.warning("upkeep.no_room_to_compact %s", error)
        reader.refresh()
        self.totals.store_bytes = disk_bytes(self._path)
