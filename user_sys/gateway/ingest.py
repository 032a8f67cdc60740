"""What peers send: chunks and labels are written to the store, within its retention limit; reports are validated.

The gateway drops a report with an impossible value, and metrics that are not finite or too many. It counts and logs
them at a limited rate; the session continues.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from hal.discovery import DEVICE_KINDS
from hal.resource import Health, ResourceRecord
from hal.state_database import AuditEntry, AuditSink
from user_sys.edge.control_authority import ControlState
from user_sys.episode import EpisodeSource, PackedChunk, Phase, parse_chunk
from user_sys.errors import StoreError, StoreFull, WireError, disk_full_message
from user_sys.gateway.config import GatewayConfig
from user_sys.messages import (
    FOREIGN_RUN,
    LATENCY_BOUNDS_S,
    MAX_POSE_VALUES,
    NO_VERSION,
    ChunkAck,
    ChunkOffer,
    ChunkRefusal,
    ControlPeriod,
    EpisodeReport,
    Histogram,
    MetricsReport,
    OperatorCommand,
    OperatorOrder,
    OperatorReply,
    RobotStatus,
    WeightsApplied,
)
from user_sys.store.files import free_bytes
from user_sys.store.labels import queue_labels, queued_files, read_queued_labels, remove_queued
from user_sys.store.maintenance import (
    DEAD_SHARE,
    Retention,
    deletion_labels,
    disk_bytes,
    newest_segment_unix_s,
    plan_eviction,
    reclaim_space,
)
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.threads import ThreadedService
from user_sys.trace import span
from user_sys.tunnel.keys import Role
from user_sys.tunnel.protocol import Payload
from user_sys.tunnel.server import Peer

if TYPE_CHECKING:
    from user_sys.gateway.traces import EpisodeTraces

logger = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 5.0
LATE_REPLY_S = 60.0  # an e-stop may be accepted after it was refused or had no answer
MAX_PENDING = 1024
ACCEPTED_OUTCOME = "done"

MAX_COUNT = 1 << 53
MAX_STEPS = 10_000_000  # of an episode
MAX_HZ = 10_000.0
MAX_VALUE = 1e15
MAX_METRICS = 256  # names of one robot, in the lifetime of a gateway
MAX_DEVICES = 256  # names of one peer, in the lifetime of a gateway
MAX_DEVICE_FIELDS = 64
MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 1000
MAX_PERIODS = 64  # in one status
MAX_PERIOD_VALUES = 256
MAX_LIMITS = 64
MAX_APPLY_S = 1e9  # from an offer to its use

_AUTHORITIES = frozenset(str(state) for state in ControlState)
_PHASES = frozenset(phase.name.lower() for phase in Phase)
_SOURCES = frozenset(str(source) for source in EpisodeSource)
_ORDERS = frozenset(order for orders in get_args(OperatorOrder) for order in get_args(orders))

Report = RobotStatus | EpisodeReport | MetricsReport | OperatorReply | WeightsApplied
_Key = tuple[str, str, str, int]  # robot, person, command, press of the e-stop

FILE_CLOCK_TOLERANCE_S = 60.0  # a file server's clock may differ
MAX_CLOCK_AHEAD_S = 86_400.0  # a chunk's times may be this far ahead of this computer's clock
MAX_CLOCK_BEHIND_S = 366 * 86_400.0  # or this far ahead of the newest file, while the clock is behind it
INSTALLED_UNIX_S = Path(__file__).stat().st_mtime
INGEST_STOP_TIMEOUT_S = 30.0
LABELS_POLL_S = 0.5
LABELS_PER_FILE = 1000
RETENTION_STOP_TIMEOUT_S = 60.0

Result = TypeVar("Result")
SendReply = Callable[[Peer, ChunkAck | ChunkRefusal], object]
"""Replies to the session that sent a chunk, and to no later one: its sequence numbers may differ."""
ReleaseCredit = Callable[[Peer, int, int], None]
"""Returns credit to a peer: the number of chunks, and their bytes."""
MAX_ROBOTS = 64
CAPTURE_TO_INFERENCE, INFERENCE_TO_COMMAND = "capture_to_inference", "inference_to_command"
RECORDED_TO_DURABLE, OFFERED_TO_APPLIED = "recorded_to_durable", "offered_to_applied"


class OperatorAudit:
    """Writes one audit entry for each operator command, with the robot's reply. Any thread may call it.

    It ignores ``drive`` inputs, and replies without a command of the last `LATE_REPLY_S`: a robot's key may not write
    orders of people. The audit log counts the repeats of one press of the e-stop.
    """

    def __init__(self, audit: AuditSink, clock: Callable[[], float] = time.monotonic) -> None:
        self._audit, self._clock = audit, clock
        self._lock = threading.Lock()
        self._pending: dict[_Key, tuple[float, str]] = {}  # since when, and from which address
        self._audited: dict[_Key, tuple[float, str]] = {}  # likewise, of the newest commands that have an entry
        self._authority: dict[str, tuple[str, str]] = {}

    def on_command(self, command: OperatorCommand, address: str) -> None:
        """A console at `address` sent a command, which may contain the address of the person's browser."""
        if command.order == "drive":
            return
        key, address = (command.robot, command.operator, command.order, command.press), command.address or address
        with self._lock:
            if awaits_reply := len(self._pending) < MAX_PENDING:
                self._pending.setdefault(key, (self._clock(), address))
        if not awaits_reply:
            self._write(key, (self._clock(), address), "passed on")

    def on_reply(self, reply: OperatorReply) -> None:
        """A robot accepted or refused an order."""
        key = (reply.robot, reply.operator, reply.order, reply.press)
        with self._lock:
            command = self._pending.pop(key, None) or self._audited.get(key)
        if command is not None:
            self._write(key, command, ACCEPTED_OUTCOME if reply.accepted else f"refused: {reply.reason}")

    def on_status(self, status: RobotStatus) -> None:
        """Audits a change of the control authority over a robot, also by a device at the robot."""
        now = (status.authority, status.operator)
        if now == self._authority.get(status.robot, ("policy", "")):
            return
        self._authority[status.robot] = now
        self._audit(AuditEntry(event="authority", robot=status.robot, person=status.operator, order=status.authority))

    def expire(self) -> None:
        """Audits the commands without a reply within `REPLY_TIMEOUT_S`."""
        now = self._clock()
        with self._lock:
            late = {key: each for key, each in self._pending.items() if now - each[0] > REPLY_TIMEOUT_S}
            for key in late:
                del self._pending[key]
            self._audited = {key: each for key, each in self._audited.items() if now - each[0] <= LATE_REPLY_S}
        for key, command in late.items():
            self._write(key, command, f"no answer within {REPLY_TIMEOUT_S:g} s")

    def _write(self, key: _Key, command: tuple[float, str], outcome: str) -> None:
        robot, person, order, _ = key
        _, address = command
        with self._lock:
            self._audited[key] = command
            if len(self._audited) > MAX_PENDING:
                del self._audited[next(iter(self._audited))]
        self._audit(
            AuditEntry(event="order", robot=robot, person=person, address=address, order=order, outcome=outcome)
        )


class ReportValidator:
    """Drops impossible values from the reports of peers. One thread calls it.

    Attributes:
        rejected: the number of dropped reports and values.
    """

    def __init__(self) -> None:
        self.rejected = 0
        self._names: dict[str, set[str]] = {}
        self._devices: dict[str, set[str]] = {}

    def validate(self, report: Report, role: Role) -> Report | None:
        """The report without invalid values; None if nothing remains. A learner may report any metric."""
        match report:
            case RobotStatus():
                return self._unless(_status_error(report), report.robot, report)
            case EpisodeReport():
                return self._unless(_episode_error(report), report.robot, report)
            case OperatorReply():
                if len(report.reason) > MAX_TEXT_CHARS:
                    report = msgspec.structs.replace(report, reason=report.reason[:MAX_TEXT_CHARS])
                return self._unless(_reply_error(report), report.robot, report)
            case WeightsApplied():
                return self._unless(_applied_error(report), report.robot, report)
            case MetricsReport():
                return report if role == "learner" else self._metrics(report)

    def validate_devices(self, peer: str, records: Iterable[ResourceRecord]) -> tuple[ResourceRecord, ...]:
        """The valid devices in `records`: of a device kind, and named after the peer's computer."""
        names, found = self._devices.setdefault(peer, set()), []
        for record in records:
            if record.name not in names and (len(names) >= MAX_DEVICES or not _is_device(record)):
                self._refuse(peer, f"device {record.name[:80]!r}: at most {MAX_DEVICES}, named NODE/DEVICE, are kept")
            elif _is_device(record):
                names.add(record.name)
                found.append(record)
        return tuple(found)

    def _unless(self, objection: str, robot: str, report: Report) -> Report | None:
        if not objection:
            return report
        self._refuse(robot, f"{type(report).__name__} with {objection}")
        return None

    def _metrics(self, report: MetricsReport) -> MetricsReport | None:
        if not 0 <= report.count <= MAX_COUNT:
            self._refuse(report.node, f"MetricsReport with count {report.count}")
            return None
        names = self._names.setdefault(report.node, set())
        scalars = {}
        for name, value in report.scalars.items():
            if not abs(value) <= MAX_VALUE:  # nor is a NaN
                self._refuse(report.node, f"metric {name[:80]!r} with value {value}")
            elif name not in names and (len(names) >= MAX_METRICS or not _is_short_text(name)):
                self._refuse(report.node, f"metric {name[:80]!r}: at most {MAX_METRICS} printable names are kept")
            else:
                names.add(name)
                scalars[name] = value
        return msgspec.structs.replace(report, scalars=scalars, histograms={}) if scalars else None

    def _refuse(self, robot: str, what: str) -> None:
        self.rejected += 1
        logger.warning("gateway.report_refused robot=%s %s", robot, what)


def _is_device(record: ResourceRecord) -> bool:
    words = (record.name, record.model, record.node, record.found_by, *record.capabilities, *record.labels)
    notes = (record.trouble, record.note, *record.labels.values())
    return (
        record.kind in DEVICE_KINDS
        and record.name.startswith(f"{record.node}/")
        and len(words) <= MAX_DEVICE_FIELDS
        and all(map(_is_short_text, words))
        and all(len(note) <= MAX_TEXT_CHARS for note in notes)
        and min(record.memory_bytes, record.sm_count, record.cores) >= 0
        and math.isfinite(record.load)
        and record.health is Health.READY
    )


def _status_error(status: RobotStatus) -> str:
    counts = {
        name: getattr(status, name)
        for name in ("step", "outbox_chunks", "safety_interventions", "dropped_episodes", "faults")
    }
    pose_values = len(status.state) + sum(map(len, status.promised)) + len(status.promised)
    return (
        _count_error(counts, MAX_COUNT)
        or _count_error({"policy_version": status.policy_version - NO_VERSION}, MAX_COUNT)
        or _choice_error("authority", status.authority, _AUTHORITIES)
        or _choice_error("phase", status.phase, _PHASES)
        or ("" if 0 <= status.control_hz <= MAX_HZ else f"control_hz {status.control_hz}")
        or _text_error(
            operator=status.operator, episode=status.episode, requested_by=status.requested_by, task=status.task
        )
        or _text_error(**{f"limits[{number}]": name for number, name in enumerate(status.limits[: MAX_LIMITS + 1])})
        or ("" if len(status.limits) <= MAX_LIMITS else f"{len(status.limits)} limits")
        or ("" if max(len(status.note), len(status.help)) <= MAX_TEXT_CHARS else "too long a note or request")
        or ("" if len(status.tool_refusal) <= MAX_TEXT_CHARS else "too long a tool_refusal")
        or ("" if abs(status.tool_speed) <= MAX_VALUE else f"tool_speed {status.tool_speed}")
        or ("" if len(status.refused_realtime) <= MAX_TEXT_CHARS else "too long a refused_realtime")
        or next(filter(None, map(_period_error, status.periods[: MAX_PERIODS + 1])), "")
        or ("" if len(status.periods) <= MAX_PERIODS else f"{len(status.periods)} control periods")
        or ("" if pose_values <= MAX_POSE_VALUES else f"{pose_values} values of its pose")
    )


def _reply_error(reply: OperatorReply) -> str:
    return _choice_error("order", reply.order, _ORDERS) or _text_error(operator=reply.operator)


def _applied_error(report: WeightsApplied) -> str:
    return _count_error({"version": report.version - FOREIGN_RUN}, MAX_COUNT) or (
        "" if abs(report.seconds) <= MAX_APPLY_S else f"seconds {report.seconds}"
    )


def _period_error(period: ControlPeriod) -> str:
    values = (period.t_s, period.act_ms, period.apply_ms, *period.requested, *period.applied)
    if len(values) > MAX_PERIOD_VALUES or not 0 <= period.limits <= MAX_COUNT:
        return f"a control period of {len(values)} values and limits {period.limits}"
    return "" if all(abs(value) <= MAX_VALUE for value in values) else "a control period that is not finite"


def _episode_error(report: EpisodeReport) -> str:
    return (
        _count_error({"steps": report.steps}, MAX_STEPS)
        or _count_error({"intervention_steps": report.intervention_steps}, report.steps)
        or _count_error({"policy_version": report.policy_version - NO_VERSION}, MAX_COUNT)
        or ("" if abs(report.episode_return) <= MAX_VALUE else f"episode_return {report.episode_return}")
        or _choice_error("source", report.source, _SOURCES)
        or _text_error(episode=report.episode, task=report.task)
    )


def _count_error(counts: dict[str, int], most: int) -> str:
    return next((f"{name} {count}" for name, count in counts.items() if not 0 <= count <= most), "")


def _choice_error(name: str, value: str, known: frozenset[str]) -> str:
    return "" if value in known else f"{name} {value[:80]!r}"


def _text_error(**words: str) -> str:
    return next((f"{name} {word[:80]!r}" for name, word in words.items() if word and not _is_short_text(word)), "")


def _is_short_text(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME_CHARS and text.isprintable()


@dataclass(frozen=True)
class _PendingChunk:
    peer: Peer
    sequence: int
    packet: Payload


@dataclass
class IngestTotals:
    """Counters since the start; `disk_full` while the disk has no space."""

    chunks: int = 0
    size_bytes: int = 0
    duplicates: int = 0
    rejected: int = 0
    disk_full: bool = False


@dataclass(eq=False)
class _CommitGroup:
    """Chunks and labels that share one sync. `newest` is the last sequence number of each session."""

    newest: dict[Peer, int] = field(default_factory=dict)
    chunks: list[_PendingChunk] = field(default_factory=list)
    stored: list[PackedChunk] = field(default_factory=list)
    label_files: list[Path] = field(default_factory=list)
    size_bytes: int = 0


class ChunkIngester(ThreadedService):
    """Appends chunks and queued labels to the store, syncs them in groups, and acknowledges them, in a thread.

    Labels come from files (`user_sys.store.labels.queue_labels`), which are removed once the labels are durable.
    The credit of the connected robots bounds the queue. While the disk is full, the thread retries and acknowledges
    nothing; robots then run out of credit and record to their outboxes.
    """

    def __init__(
        self, writer: StoreWriter, send_reply: SendReply, release: ReleaseCredit, config: GatewayConfig
    ) -> None:
        super().__init__("ingest", INGEST_STOP_TIMEOUT_S)
        self.totals, self.latencies = IngestTotals(), LatencyHistograms()
        self._writer = writer
        self._send_reply = send_reply
        self._release = release
        self._config = config
        self._queue: deque[_PendingChunk] = deque()
        self._next_label_poll_s = 0.0
        self._skipped_files: set[Path] = set()  # of labels: unreadable ones, and stored ones that cannot be deleted
        self._changed = threading.Condition()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def put_chunk(self, peer: Peer, offer: ChunkOffer, packet: Payload) -> None:
        """Queues a chunk; never blocks. The tunnel's flow control bounds the queue."""
        with self._changed:
            self._queue.append(_PendingChunk(peer, offer.sequence, packet))
            self._changed.notify()

    def discard_session(self, peer: Peer) -> None:
        """Drops the queued chunks of an ended session. The peer resends them in its next session."""
        with self._changed:
            self._queue = deque(pending for pending in self._queue if pending.peer is not peer)

    @property
    def queued_bytes(self) -> int:
        with self._changed:
            return sum(len(pending.packet) for pending in self._queue)

    def disk_shortage(self) -> dict[str, float]:
        """Metrics: the bytes to write and the free bytes of the disk; both 0 while the disk is not full."""
        if not self.totals.disk_full:
            return {"disk_needed_bytes": 0.0, "disk_free_bytes": 0.0}
        needed = max(1, self.queued_bytes + self._writer.pending_bytes)
        return {"disk_needed_bytes": float(needed), "disk_free_bytes": float(free_bytes(self._writer.path))}

    # The thread

    def _work(self) -> None:
        """Commits until the queue is empty after `close`."""
        while (group := self._next_group()) is not None:
            with span("sync"):
                self._retry_while_full(self._writer.sync)
            self._acknowledge(group)

    def _next_group(self) -> _CommitGroup | None:
        """Appends queued chunks, up to `commit_bytes`, and labels; None once stopped and empty."""
        group = _CommitGroup()
        while not group.chunks and not group.label_files:
            if time.monotonic() >= self._next_label_poll_s:
                self._append_labels(group)
                self._next_label_poll_s = time.monotonic() + LABELS_POLL_S
            while group.size_bytes < self._config.commit_bytes and (pending := self._next_chunk()) is not None:
                with span("ingest"):
                    self._append(pending, group)
            with self._changed:
                if not self._queue and not group.chunks and not group.label_files:
                    if self._stopping.is_set():
                        return None
                    self._changed.wait(LABELS_POLL_S)
        return group

    def _next_chunk(self) -> _PendingChunk | None:
        with self._changed:
            return self._queue.popleft() if self._queue else None

    def _append_labels(self, group: _CommitGroup) -> None:
        """Appends the labels of queued files. Raises StoreError: the disk failed."""
        for file in queued_files(self._writer.path):
            if file in self._skipped_files:
                continue
            try:
                labels = read_queued_labels(file)
            except FileNotFoundError:  # a person has deleted it in the meantime
                continue
            except StoreError as error:
                self._skipped_files.add(file)
                logger.warning("ingest.labels_damaged %s", error)
                continue
            for label in labels:
                self._retry_while_full(partial(self._writer.append_label, label))
            group.label_files.append(file)
            logger.info("ingest.labels labels=%d labeller=%s", len(labels), labels[0].labeller if labels else "")

    def _append(self, pending: _PendingChunk, group: _CommitGroup) -> None:
        totals, peer = self.totals, pending.peer
        group.chunks.append(pending)
        group.newest[peer] = pending.sequence
        group.size_bytes += len(pending.packet)
        try:
            chunk = parse_chunk(pending.packet)
            if chunk.header.robot != peer.name:
                raise WireError(f"{peer.name} sent a chunk of {chunk.header.robot[:80]!r}")
            _require_not_in_future(chunk, self._writer.path)
            if self._retry_while_full(lambda: self._writer.append(pending.packet, chunk)):
                group.stored.append(chunk)
                totals.chunks += 1
                totals.size_bytes += len(pending.packet)
            else:
                totals.duplicates += 1
        except WireError as error:
            totals.rejected += 1
            reason = str(error)[:MAX_TEXT_CHARS]
            logger.warning("ingest.refused peer=%s sequence=%d: %s", peer.name, pending.sequence, reason)
            self._send_reply(peer, ChunkRefusal(sequence=pending.sequence, reason=reason))

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
        durable_unix_ns = time.time_ns()
        for peer, sequence in group.newest.items():
            self._send_reply(peer, ChunkAck(sequence=sequence))
            packets = [pending.packet for pending in group.chunks if pending.peer is peer]
            self._release(peer, len(packets), sum(map(len, packets)))
        for file in group.label_files:
            try:
                remove_queued(file)
            except OSError as error:
                self._skipped_files.add(file)
                logger.error("ingest.labels_not_removed %s: %s; its labels are stored, delete it", file, error.strerror)
        for chunk in group.stored:
            self.latencies.add_chunk(chunk, durable_unix_ns)


def _require_not_in_future(chunk: PackedChunk, store: Path) -> None:
    """Raises WireError for a chunk from the future: a sampler that prefers new steps would draw no other step.

    One from before 1970 raises it too: its times may exceed the index's 64 bits, which makes them times of the future.
    While this computer's clock is behind the segments of the store or this program's installation, as after a power cut
    without a battery, a chunk may be a year newer than they are: the robot would not send a refused chunk again. It is
    not left waiting: chunks of a robot whose clock was ahead would keep all later ones back for as long.
    """
    captured = chunk.column("t_capture_ns")
    newest_ns = chunk.header.started_unix_ns
    if captured is not None and len(captured):
        oldest_ns, latest_ns = (int(each) + chunk.header.unix_offset_ns for each in (captured.min(), captured.max()))
        if oldest_ns < 0:
            raise WireError("recorded before 1970; set the clock of the robot's computer")
        newest_ns = max(newest_ns, latest_ns)
    ahead_s = (newest_ns - time.time_ns()) / 1e9
    if ahead_s > MAX_CLOCK_AHEAD_S and ahead_s > _clock_lag_s(store):
        raise WireError(
            f"recorded {ahead_s:.0f} s from now; set the clock of the robot's computer, or of the gateway's; "
            "if the robot's was ahead, this can be sent again once that time has passed"
        )


def _clock_lag_s(store: Path) -> float:
    """How far this computer's clock may be behind, at most; 0 if neither a segment nor this program is newer."""
    behind_s = max(newest_segment_unix_s(store), INSTALLED_UNIX_S) - time.time_ns() / 1e9
    return behind_s + MAX_CLOCK_BEHIND_S if behind_s > FILE_CLOCK_TOLERANCE_S else 0.0


@dataclass
class RetentionTotals:
    """Counters since the start, and the size of the store.

    Attributes:
        shortfall_bytes: the size above the limit that retention rules protect from deletion.
    """

    episodes_dropped: int = 0
    store_bytes: int = 0
    shortfall_bytes: int = 0


class RetentionWorker(ThreadedService):
    """Deletes episodes beyond the retention limit and compacts the store, in a thread, every `interval_s`.

    It queues labels that delete episodes, and compacts the store once they are stored. It opens the store for reading
    only after the first deletion or overrun.
    """

    def __init__(self, path: Path, writer: StoreWriter, retention: Retention, interval_s: float) -> None:
        super().__init__("retention", RETENTION_STOP_TIMEOUT_S)
        self.totals = RetentionTotals()
        self._path, self._writer = path, writer
        self._retention, self._interval_s = retention, interval_s
        self._reader: StoreReader | None = None
        self._queued: list[Path] = []  # files of labels that are not stored yet

    def close(self) -> None:
        """See `ThreadedService.close`."""
        super().close()
        if self._reader is not None:
            self._reader.close()

    def _work(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self._apply()
            except StoreError as error:  # a file that cannot be read; the next round tries again
                logger.error("retention.failed %s", error)

    def _apply(self) -> None:
        self.totals.store_bytes = size = disk_bytes(self._path)
        too_large = 0 < self._retention.max_bytes < size
        if not too_large:
            self.totals.shortfall_bytes = 0
            if not self._writer.deleted_episodes:
                return
        self._queued = [file for file in self._queued if file.exists()]
        if self._queued:
            return
        if self._reader is None:
            self._reader = StoreReader.open(self._path)
        self._reader.refresh()
        if not too_large or self._is_within_rules(self._reader, size):
            self._compact(self._reader, 0.0 if too_large else DEAD_SHARE)

    def _is_within_rules(self, reader: StoreReader, size: int) -> bool:
        """Queues the deletion of the episodes that retention evicts. Returns False if there are any."""
        plan = plan_eviction(reader.index, self._retention, size)
        if plan.shortfall_bytes and not self.totals.shortfall_bytes:
            excess = plan.shortfall_bytes
            logger.warning("retention.too_large bytes=%d above=%d: the rules protect all other episodes", size, excess)
        self.totals.shortfall_bytes = plan.shortfall_bytes
        labels = deletion_labels(plan)
        try:
            for first in range(0, len(labels), LABELS_PER_FILE):
                self._queued.append(queue_labels(self._path, labels[first : first + LABELS_PER_FILE]))
        except OSError as error:  # a full disk; the next round tries again
            logger.warning("retention.labels_not_queued episodes=%d: %s", len(plan.episodes), error)
            return False
        if labels:
            self.totals.episodes_dropped += len(plan.episodes)
            logger.info("retention.deleted episodes=%d bytes=%d", len(plan.episodes), plan.freed_bytes)
        return not labels

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
        self._retention = RetentionWorker(path, writer, config.retention, config.upkeep_s)

    def start(self) -> None:
        self.ingester.start()
        self._retention.start()

    @property
    def failure(self) -> BaseException | None:
        return self.ingester.failure or self._retention.failure

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
        """Ends the threads; the queued chunks are committed."""
        self._retention.close()
        self.ingester.close()

    def close(self) -> None:
        """Closes the store. Call it after the server has closed."""
        self._writer.close()


class LatencyHistograms:
    """Counts delays in the buckets of `LATENCY_BOUNDS_S` since the start of the gateway. Any thread may call it.

    Attributes:
        traces: gets the same times; None without a collector.
    """

    def __init__(self) -> None:
        self.traces: EpisodeTraces | None = None
        self._lock = threading.Lock()
        self._robots: set[str] = set()
        self._counts: dict[str, npt.NDArray[np.int64]] = {}
        self._sums_s: dict[str, float] = {}
        self._applied: dict[str, int] = {}  # by robot: the version that it used last

    def add_chunk(self, chunk: PackedChunk, durable_unix_ns: int) -> None:
        """Adds the delays of the steps of a chunk that became durable at that time, by this computer's clock."""
        captured, inferred, commanded = map(chunk.column, ("t_capture_ns", "t_inference_ns", "t_command_ns"))
        if captured is None or inferred is None or commanded is None:
            return
        robot, offset_ns = chunk.header.robot, chunk.header.unix_offset_ns
        self.add(robot, CAPTURE_TO_INFERENCE, (inferred - captured) / 1e9)
        self.add(robot, INFERENCE_TO_COMMAND, (commanded - inferred) / 1e9)
        if offset_ns:
            self.add(robot, RECORDED_TO_DURABLE, (durable_unix_ns - offset_ns - commanded) / 1e9)
            if self.traces is not None:
                self.traces.add_chunk(chunk.header, captured, inferred, commanded, durable_unix_ns)

    def on_applied(self, robot: str, version: int, seconds: float) -> None:
        """`robot` uses this version, `seconds` after its offer; -1 is none, as while a person drives it.

        A repeated report of a version counts once.
        """
        with self._lock:
            if version in (NO_VERSION, self._applied.get(robot)):
                return
            self._applied[robot] = version
        self.add(robot, OFFERED_TO_APPLIED, seconds)
        if self.traces is not None:
            self.traces.on_applied(robot, version, seconds)

    def add(self, robot: str, name: str, delays_s: npt.ArrayLike) -> None:
        """Adds delays in seconds. Negative ones, of clocks that disagree, count as 0.

        Robots from the 65th on are ignored.
        """
        delays = np.maximum(np.atleast_1d(np.asarray(delays_s, np.float64)), 0.0)
        counts = np.bincount(np.searchsorted(LATENCY_BOUNDS_S, delays), minlength=len(LATENCY_BOUNDS_S) + 1)
        key = f"{name}/{robot}"
        with self._lock:
            if robot not in self._robots and len(self._robots) >= MAX_ROBOTS:
                return
            self._robots.add(robot)
            self._counts[key] = self._counts.get(key, 0) + counts
            self._sums_s[key] = self._sums_s.get(key, 0.0) + float(delays.sum())

    def report(self) -> dict[str, Histogram]:
        """Each distribution under ``<name>/<robot>``."""
        with self._lock:
            return {key: Histogram(tuple(counts.tolist()), self._sums_s[key]) for key, counts in self._counts.items()}
