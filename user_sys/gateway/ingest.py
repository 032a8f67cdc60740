"""Writes to the store: ingests chunks, imports people's labels, and deletes episodes beyond the retention limit."""

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

MAX_CLOCK_AHEAD_S = 86_400.0  # a chunk's times may be this far ahead of this computer's clock
INGEST_STOP_TIMEOUT_S = 30.0
QUEUE_POLL_S = 0.5
LABELS_TIMEOUT_S = 60.0  # a full disk delays labels; the next round tries again
LABELS_POLL_S = 0.2
RETENTION_STOP_TIMEOUT_S = 60.0

Result = TypeVar("Result")
SendReply = Callable[[Peer, ChunkAck | ChunkRefusal], object]
"""Replies to the session that sent a chunk, and to no later one: its sequence numbers may differ."""
ReleaseCredit = Callable[[Peer, int, int], None]
"""Returns credit to a peer: the number of chunks, and their bytes."""
AppendLabels = Callable[[Sequence[Label]], Future[None]]


@dataclass(frozen=True)
class _PendingChunk:
    peer: Peer
    sequence: int
    packet: Payload


@dataclass
class IngestTotals:
    """Counters since the start; `disk_full` while the disk has no space."""

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
    """Chunks and labels that share one sync. `newest` is the last sequence number of each session."""

    newest: dict[Peer, int] = field(default_factory=dict)
    chunks: list[_PendingChunk] = field(default_factory=list)
    labels_durable: list[Future[None]] = field(default_factory=list)
    size_bytes: int = 0
    sync_point: SyncPoint | None = None


class ChunkIngester:
    """Appends chunks to the store, syncs them in groups, and then acknowledges them.

    Two threads alternate: one checks, appends and writes a group while the other syncs the group before. The thread
    that appended a group also syncs it. A handover would wait for the interpreter, which the next group keeps busy.

    The credit of the connected robots bounds the queue. While the disk is full, the threads retry and acknowledge
    nothing; robots then run out of credit and record to their outboxes.
    """

    def __init__(
        self, writer: StoreWriter, send_reply: SendReply, release: ReleaseCredit, config: GatewayConfig
    ) -> None:
        self.totals = IngestTotals()
        self.failure: BaseException | None = None
        self._writer = writer
        self._send_reply = send_reply
        self._release = release
        self._config = config
        self._queue: deque[_PendingChunk | _PendingLabels] = deque()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._appending = threading.Lock()
        self._syncing = threading.Lock()  # acquired while `_appending` is held, so that groups are synced in order
        self._threads = [threading.Thread(target=self._run, name=f"commit-{n}", daemon=True) for n in range(2)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def started(self) -> bool:
        return self._threads[0].ident is not None

    def close(self) -> None:
        """Commits the queued chunks and ends. Raises TunnelError if the disk takes over `INGEST_STOP_TIMEOUT_S`."""
        self._stopping.set()
        with self._changed:
            self._changed.notify()
        deadline = time.monotonic() + INGEST_STOP_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise TunnelError(f"the ingest thread did not end within {INGEST_STOP_TIMEOUT_S} s: the disk is stuck")

    def put_chunk(self, peer: Peer, offer: ChunkOffer, packet: Payload) -> None:
        """Queues a chunk; never blocks. The tunnel's flow control bounds the queue."""
        with self._changed:
            self._queue.append(_PendingChunk(peer, offer.sequence, packet))
            self._changed.notify()

    def append_labels(self, labels: Sequence[Label]) -> Future[None]:
        """Queues labels; never blocks. The future completes when they are durable, and never if the disk fails."""
        pending = _PendingLabels(labels, Future())
        with self._changed:
            self._queue.append(pending)
            self._changed.notify()
        return pending.durable

    def discard_session(self, peer: Peer) -> None:
        """Drops the queued chunks of an ended session. The peer resends them in its next session."""
        with self._changed:
            self._queue = deque(
                item for item in self._queue if isinstance(item, _PendingLabels) or item.peer is not peer
            )

    @property
    def queued_bytes(self) -> int:
        with self._changed:
            return sum(len(item.packet) for item in self._queue if isinstance(item, _PendingChunk))

    def disk_shortage(self) -> dict[str, float]:
        """Metrics: the bytes to write and the free bytes of the disk; both 0 while the disk is not full."""
        if not self.totals.disk_full:
            return {"disk_needed_bytes": 0.0, "disk_free_bytes": 0.0}
        needed = max(1, self.queued_bytes + self._writer.pending_bytes)
        return {"disk_needed_bytes": float(needed), "disk_free_bytes": float(free_bytes(self._writer.path))}

    # The threads

    def _run(self) -> None:
        try:
            while (group := self._write_next_group()) is not None:
                try:
                    self._retry_while_full(partial(self._writer.sync, group.sync_point))
                    self._acknowledge(group)
                finally:
                    self._syncing.release()
        except Exception as error:
            logger.exception("ingest.failed")
            self.failure = self.failure or error

    def _write_next_group(self) -> _CommitGroup | None:
        """Writes the next group and acquires `_syncing` for the caller; None once stopped or failed."""
        if not self._acquire(self._appending):
            return None
        try:
            group = self._next_group()
            if group is None:
                return None
            group.sync_point = self._retry_while_full(self._writer.flush)
            return group if self._acquire(self._syncing) else None
        finally:
            self._appending.release()

    def _acquire(self, lock: threading.Lock) -> bool:
        """Acquires `lock`. Returns False after a failure."""
        while self.failure is None:
            if lock.acquire(timeout=QUEUE_POLL_S):
                return True
        return False

    def _next_group(self) -> _CommitGroup | None:
        """Appends queued chunks and labels, up to `commit_bytes`; None once stopped and empty, or failed."""
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

    def _append_labels(self, pending: _PendingLabels, group: _CommitGroup) -> None:
        for label in pending.labels:
            self._retry_while_full(partial(self._writer.append_label, label))
        group.labels_durable.append(pending.durable)

    def _append(self, pending: _PendingChunk, group: _CommitGroup) -> None:
        totals, peer = self.totals, pending.peer
        group.chunks.append(pending)
        group.newest[peer] = pending.sequence
        group.size_bytes += len(pending.packet)
        try:
            chunk = parse_chunk(pending.packet)
            if chunk.header.robot != peer.name:
                raise WireError(f"{peer.name} sent a chunk of {chunk.header.robot[:80]!r}")
            _require_not_in_future(chunk)
            if self._retry_while_full(lambda: self._writer.append(pending.packet, chunk)):
                totals.chunks += 1
                totals.steps += chunk.header.steps
                totals.size_bytes += len(pending.packet)
            else:
                totals.duplicates += 1
        except WireError as error:
            totals.rejected += 1
            logger.warning("ingest.refused peer=%s sequence=%d: %s", peer.name, pending.sequence, error)
            self._send_reply(peer, ChunkRefusal(sequence=pending.sequence, reason=str(error)))

    def _retry_while_full(self, attempt: Callable[[], Result]) -> Result:
        """Retries until the disk has space. Raises StoreFull if the gateway stops before."""
        while True:
            try:
                done = attempt()
                if self.totals.disk_full:
                    logger.warning("ingest.disk_has_space")
                self.totals.disk_full = False
                return done
            except StoreFull:
                if not self.totals.disk_full:
                    self.totals.disk_full = True
                    shortage = self.disk_shortage().values()
                    logger.error("ingest.disk_full %s", disk_full_message(self._writer.path, *shortage))
                if self._stopping.wait(self._config.retry_s):
                    raise

    def _acknowledge(self, group: _CommitGroup) -> None:
        for peer, sequence in group.newest.items():
            self._send_reply(peer, ChunkAck(sequence=sequence))
            packets = [pending.packet for pending in group.chunks if pending.peer is peer]
            self._release(peer, len(packets), sum(map(len, packets)))
        for durable in group.labels_durable:
            durable.set_result(None)


def _require_not_in_future(chunk: PackedChunk) -> None:
    """Raises WireError for a chunk from the future: a sampler that prefers new steps would draw no other step."""
    captured = chunk.column("t_capture_ns")
    newest_ns = chunk.header.started_unix_ns
    if captured is not None and len(captured):
        newest_ns = max(newest_ns, int(captured.max()) + chunk.header.unix_offset_ns)
    ahead_s = (newest_ns - time.time_ns()) / 1e9
    if ahead_s > MAX_CLOCK_AHEAD_S:
        raise WireError(
            f"recorded {ahead_s:.0f} s from now; set the clock of the robot's computer, or of the gateway's"
        )


class LabelImporter:
    """Imports labels that people queue while the gateway writes the store (`user_sys.store.labels`).

    One thread calls `poll`, which does not wait for syncs of the log.
    """

    def __init__(self, store: Path, append_labels: AppendLabels) -> None:
        self._store, self._append_labels = store, append_labels
        self._pending: dict[Path, Future[None]] = {}
        self._damaged: set[Path] = set()

    def poll(self) -> None:
        """Appends the labels of new files, and removes files whose labels are durable. Raises OSError."""
        for file in queued_files(self._store):
            if file not in self._pending and file not in self._damaged:
                self._import(file)
        for file in [file for file, durable in self._pending.items() if durable.done()]:
            self._pending.pop(file).result()
            remove_queued(file)

    def _import(self, file: Path) -> None:
        try:
            labels = read_queued_labels(file)
        except StoreError as error:
            self._damaged.add(file)
            logger.warning("ingest.labels_damaged %s", error)
            return
        self._pending[file] = self._append_labels(labels)
        labeller = labels[0].labeller if labels else ""
        logger.info("ingest.labels_imported labels=%d labeller=%s", len(labels), labeller)


@dataclass
class RetentionTotals:
    """Counters since the start, and the size of the store.

    Attributes:
        shortfall_bytes: the size above the limit that retention rules protect from deletion.
    """

    episodes_dropped: int = 0
    store_bytes: int = 0
    shortfall_bytes: int = 0


class RetentionWorker:
    """Deletes episodes beyond the retention limit and compacts the store, in a thread, every `interval_s`.

    It opens the store for reading only after the first deletion or overrun.
    """

    def __init__(
        self, path: Path, writer: StoreWriter, ingester: ChunkIngester, retention: Retention, interval_s: float
    ) -> None:
        self.totals = RetentionTotals()
        self.failure: BaseException | None = None
        self._path, self._writer, self._ingester = path, writer, ingester
        self._retention, self._interval_s = retention, interval_s
        self._reader: StoreReader | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="retention", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def close(self) -> None:
        """Ends after the current round. Raises TunnelError if that takes over `RETENTION_STOP_TIMEOUT_S`."""
        self._stopping.set()
        self._thread.join(RETENTION_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise TunnelError(f"the retention of {self._path} did not end within {RETENTION_STOP_TIMEOUT_S} s")
        if self._reader is not None:
            self._reader.close()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._interval_s):
                self._apply()
        except Exception as error:
            logger.exception("retention.failed")
            self.failure = error

    def _apply(self) -> None:
        self.totals.store_bytes = size = disk_bytes(self._path)
        too_large = 0 < self._retention.max_bytes < size
        if not too_large:
            self.totals.shortfall_bytes = 0
            if not self._writer.deleted_episodes:
                return
        if self._reader is None:
            self._reader = StoreReader.open(self._path)
        self._reader.refresh()
        if not too_large or self._evict(self._reader, size):
            self._compact(self._reader, 0.0 if too_large else DEAD_SHARE)

    def _evict(self, reader: StoreReader, size: int) -> bool:
        """Deletes the episodes that retention evicts. Returns False while the deletion labels are not durable."""
        plan = plan_eviction(reader.index, self._retention, size)
        if plan.shortfall_bytes and not self.totals.shortfall_bytes:
            excess = plan.shortfall_bytes
            logger.warning("retention.too_large bytes=%d above=%d: the rules protect all other episodes", size, excess)
        self.totals.shortfall_bytes = plan.shortfall_bytes
        if not plan.episodes:
            return True
        if not self._wait_durable(self._ingester.append_labels(deletion_labels(plan))):
            logger.warning("retention.labels_not_durable episodes=%d", len(plan.episodes))
            return False
        self.totals.episodes_dropped += len(plan.episodes)
        logger.info("retention.deleted episodes=%d bytes=%d", len(plan.episodes), plan.freed_bytes)
        reader.refresh()
        return True

    def _wait_durable(self, durable: Future[None]) -> bool:
        deadline = time.monotonic() + LABELS_TIMEOUT_S
        while time.monotonic() < deadline and not self._stopping.is_set():
            if wait([durable], LABELS_POLL_S).done:
                return True
        return False

    def _compact(self, reader: StoreReader, min_dead_share: float) -> None:
        started = time.monotonic()
        try:
            for _ in reclaim_space(self._writer, reader.index, min_dead_share=min_dead_share):
                if self._stopping.wait(time.monotonic() - started):  # ingestion gets half of the disk's time
                    break
                started = time.monotonic()
        except StoreFull as error:
            logger.warning("retention.no_space_to_compact %s", error)
        reader.refresh()
        self.totals.store_bytes = disk_bytes(self._path)


class StoreService:
    """The store of a gateway, and the threads that write to it.

    Attributes:
        ingester: takes chunks and labels.
    """

    def __init__(self, path: Path, writer: StoreWriter, ingester: ChunkIngester, config: GatewayConfig) -> None:
        self.ingester = ingester
        self._writer = writer
        self._retention = RetentionWorker(path, writer, ingester, config.retention, config.upkeep_s)
        self._label_importer = LabelImporter(path, ingester.append_labels)
        self._steps_at_start = writer.steps

    def start(self) -> None:
        self.ingester.start()
        self._retention.start()

    @property
    def failure(self) -> BaseException | None:
        return self.ingester.failure or self._retention.failure

    def import_labels(self) -> None:
        """See `LabelImporter.poll`."""
        self._label_importer.poll()

    @property
    def steps(self) -> int:
        """Steps in the store, including earlier starts of the gateway."""
        return self._steps_at_start + self.ingester.totals.steps

    def scalars(self) -> dict[str, float]:
        totals, retention = self.ingester.totals, self._retention.totals
        return {
            "chunks": totals.chunks,
            "bytes": totals.size_bytes,
            "duplicates": totals.duplicates,
            "chunks_refused": totals.rejected,
            "queued_bytes": self.ingester.queued_bytes,
            **self.ingester.disk_shortage(),
            "store_bytes": retention.store_bytes,
            "store_shortfall_bytes": retention.shortfall_bytes,
            "episodes_dropped": retention.episodes_dropped,
        }

    def stop(self) -> None:
        """Ends the threads that were started."""
        for worker in (self._retention, self.ingester):
            if worker.started:
                worker.close()

    def close(self) -> None:
        """Closes the store. Call it after the server has closed."""
        self._writer.close()
