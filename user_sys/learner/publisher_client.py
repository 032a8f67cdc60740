"""The learner's side of its publisher process: hands over weights and step times, and restarts the process.

The publisher process does the work of publishing and owns the tunnel, so that neither takes the learner's interpreter
or its thread. The learner copies its weights into shared memory and goes on. A thread fetches weights that lie on a
device. If the process ends, a new one publishes the newest version again. If the learner ends, the process ends too.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from user_sys.codec import Array
from user_sys.errors import LinkDown, RunError, UserSysError, WireError
from user_sys.learner.publisher_protocol import (
    SLOT_COUNT,
    DeviceCopyStarted,
    MessageSocket,
    PublisherMessage,
    PublisherSettings,
    PublisherStatus,
    RunStopped,
    ScalarReport,
    SharedTensorSlots,
    ShutdownRequest,
    SnapshotReady,
    StepTimes,
)
from user_sys.messages import NO_VERSION, MetricsReport
from user_sys.weights.governor import GovernedBudget
from user_sys.weights.snapshot import DeviceWeights, PolicySnapshot, TensorLayout, layout_of
from user_sys.weights.state import NotFinite

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
STEP_REPORT_INTERVAL_S, MAX_PENDING_STEPS = 0.1, 256
SLOT_TIMEOUT_S = 60.0
FLUSH_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 10.0
MAX_CRASHES, CRASH_WINDOW_S = 5, 60.0
RESTART_DELAY_S = 0.2  # times the number of recent crashes
_ERROR_FROM_NAME: Mapping[str, type[UserSysError]] = {kind.__name__: kind for kind in (NotFinite, WireError)}
_NO_STATUS = PublisherStatus(NO_VERSION, NO_VERSION, NO_VERSION, 0, 0.0, {})


@dataclass(frozen=True)
class _PublisherProcess:
    process: subprocess.Popen[bytes]
    socket: MessageSocket


@dataclass(frozen=True)
class _FetchJob:
    """Weights on a device that a thread fetches into one of the `slots`."""

    weights: DeviceWeights
    version: int
    updates: int
    slots: SharedTensorSlots


@dataclass
class _ProcessHistory:
    """Totals over all publisher processes of this learner."""

    crash_times_s: deque[float]
    restarts: int = 0
    published: int = 0  # by earlier processes
    stored_version: int = NO_VERSION

    def count_crash(self, now_s: float) -> int:
        """Returns the number of crashes within `CRASH_WINDOW_S`."""
        self.crash_times_s.append(now_s)
        return sum(now_s - at_s <= CRASH_WINDOW_S for at_s in self.crash_times_s)


class _StepTimesSender:
    """Sends the times of training steps in batches: each message wakes the publisher process next to the learner."""

    def __init__(self) -> None:
        self._pending: list[tuple[float, float]] = []
        self._sent_s = 0.0

    def add(self, socket: MessageSocket | None, now_s: float, seconds: float) -> None:
        self._pending.append((now_s, seconds))
        if now_s - self._sent_s >= STEP_REPORT_INTERVAL_S or len(self._pending) >= MAX_PENDING_STEPS:
            self.flush(socket, now_s)

    def flush(self, socket: MessageSocket | None, now_s: float) -> None:
        """Sends the pending times. Those without room in the socket are lost."""
        if socket is not None and self._pending:
            socket.send(StepTimes(tuple(self._pending)))
        self._pending.clear()
        self._sent_s = now_s


class _SnapshotSlots:
    """The slots of shared memory, and which of them hold versions that the process has not published.

    Attributes:
        slots: None before the first snapshot.
        newest: the newest snapshot, delivered or not.
    """

    def __init__(self) -> None:
        self.slots: SharedTensorSlots | None = None
        self.newest: SnapshotReady | None = None
        self._version_from_slot: dict[int, int] = {}  # delivered slots, until their version is ready
        self._frozen: dict[str, Array] = {}  # read-only arrays of the newest snapshot, which are not written again
        self._is_delivered = self._is_memory_sent = False

    def require(self, layout: TensorLayout, version: int) -> SharedTensorSlots:
        """Returns the slots; allocates them for the first snapshot. Raises WireError if the layout has changed."""
        if self.slots is None:
            self.slots = SharedTensorSlots.from_layout(layout)
        if not self.slots.has_layout(layout):
            raise WireError(f"version {version}: its names, dtypes or shapes differ from those of the version before")
        return self.slots

    def free(self, keep_newest: bool = False) -> list[int]:
        """Returns the free slots. `keep_newest` excludes that of the newest version: a new process reads it again."""
        newest = self.newest.slot if keep_newest and self.newest is not None else None
        return [slot for slot in range(SLOT_COUNT) if slot not in self._version_from_slot and slot != newest]

    def write(self, views: Mapping[str, Array], arrays: Mapping[str, Array]) -> tuple[int, ...]:
        """Copies the arrays that may have changed. Returns the positions of the others."""
        unchanged = []
        for position, (name, array) in enumerate(arrays.items()):
            if self._is_delivered and not array.flags.writeable and self._frozen.get(name) is array:
                unchanged.append(position)
            else:
                views[name][...] = array
        self._frozen = {name: array for name, array in arrays.items() if not array.flags.writeable}
        return tuple(unchanged)

    def set_newest(self, snapshot: SnapshotReady, is_fetched: bool = False) -> None:
        """Makes `snapshot` the next one to deliver."""
        if is_fetched:
            self._frozen = {}
        self.newest, self._is_delivered = snapshot, False

    def deliver(self, socket: MessageSocket | None) -> None:
        """Sends the newest snapshot, unless that is done or the socket has no room."""
        if socket is None or self.slots is None or self.newest is None or self._is_delivered:
            return
        if not self._is_memory_sent:
            self._is_memory_sent = socket.send(self.slots.memory, descriptor=self.slots.descriptor)
        if self._is_memory_sent and socket.send(self.newest):
            self._is_delivered = True
            self._version_from_slot[self.newest.slot] = self.newest.version

    def release(self, ready_version: int) -> None:
        """Frees the slots of versions up to `ready_version`."""
        used = self._version_from_slot
        self._version_from_slot = {slot: version for slot, version in used.items() if version > ready_version}

    def restart(self) -> None:
        """Prepares for a new process: it has nothing, so arrays that the former one had are written again."""
        self._version_from_slot.clear()
        self._is_delivered = self._is_memory_sent = False
        if self.newest is not None and self.slots is not None:
            for name, array in self._frozen.items():
                self.slots.views[self.newest.slot][name][...] = array
            self.newest = replace(self.newest, unchanged=())

    def close(self) -> None:
        if self.slots is not None:
            self.slots.close()


class PublisherClient:
    """A `WeightsPublisher` in a process of its own, from `start` to `close`. One thread calls it.

    Args:
        on_run_stopped: called by another thread with the reason when the gateway ends the run.
    """

    def __init__(self, settings: PublisherSettings, on_run_stopped: Callable[[str], None]) -> None:
        self._settings, self._on_run_stopped = settings, on_run_stopped
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._process: _PublisherProcess | None = None
        self._history = _ProcessHistory(deque(maxlen=MAX_CRASHES))
        self._snapshots = _SnapshotSlots()
        self._steps = _StepTimesSender()
        self._version = NO_VERSION
        self._job: _FetchJob | None = None  # until its weights lie in a slot
        self._fetch_thread: threading.Thread | None = None  # started by the first job
        self._fetch_scalars: dict[str, float] = {}
        self._status = _NO_STATUS
        self._warned_pin = NO_VERSION
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._watch, name="publisher", daemon=True)

    def start(self) -> None:
        """Raises OSError if no process can be started."""
        with self._changed:
            self._launch()
        self._thread.start()

    def close(self) -> None:
        """Fetches and sends the waiting version, and ends the process; kills it after `CLOSE_TIMEOUT_S`."""
        with self._changed:
            self._wait_for_fetch(CLOSE_TIMEOUT_S)
            self._closing.set()
            self._changed.notify_all()
            process = self._process
        if process is not None:
            self._end(process)
        if self._fetch_thread is not None:
            self._fetch_thread.join(KILL_TIMEOUT_S)
        self._snapshots.close()

    def _end(self, child: _PublisherProcess) -> None:
        is_sent = child.socket.send(ShutdownRequest(FLUSH_TIMEOUT_S), KILL_TIMEOUT_S)
        try:
            child.process.wait(CLOSE_TIMEOUT_S if is_sent else KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.error("publisher.killed it did not end by itself")
            child.process.kill()
            child.process.wait(KILL_TIMEOUT_S)
        self._thread.join(KILL_TIMEOUT_S)
        child.socket.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # Called by the learner's thread

    def publish(self, weights: PolicySnapshot, version: int, updates: int) -> None:
        """Publishes `weights`. Blocks only while earlier weights are fetched, or while no slot is free.

        Arrays are copied before it returns. A thread fetches weights on a device within the governor's budget;
        `is_busy` is true meanwhile. A read-only array that is the same object as before counts as unchanged, and is
        neither copied nor compared (frozen parts of a policy).

        Raises:
            NotFinite: an earlier snapshot held NaN or infinity; it was not published.
            WireError: a snapshot cannot be encoded, or has another layout than those before.
            RunError: the process crashes repeatedly or does not read, or earlier weights could not be fetched.
        """
        with self._changed:
            if not self._wait_for_fetch(SLOT_TIMEOUT_S):
                raise RunError(f"weights could not be fetched within {SLOT_TIMEOUT_S:.0f} s")
            self._raise_failure()
            self._steps.flush(self._socket, time.monotonic())  # these steps ran before this push
            slots = self._snapshots.require(layout_of(weights), version)
            if isinstance(weights, Mapping):
                slot = self._wait_for_slot()
                unchanged = self._snapshots.write(slots.views[slot], weights)
                self._snapshots.set_newest(SnapshotReady(slot, version, updates, unchanged))
                self._snapshots.deliver(self._socket)
            else:
                self._start_fetch(_FetchJob(weights, version, updates, slots))
            self._version = version

    def observe(self, seconds: float) -> None:
        """Reports the time of a training step, publishing included, to the governor."""
        now_s = time.monotonic()
        with self._changed:
            self._snapshots.deliver(self._socket)
            self._steps.add(self._socket, now_s, seconds)

    def report(self, updates: int, scalars: dict[str, float]) -> None:
        """Sends scalars to the gateway; drops them if the process does not keep up."""
        with self._changed:
            if self._socket is not None:
                report = MetricsReport(node=self._settings.hello.name, count=updates, scalars=scalars)
                self._socket.send(ScalarReport(report))

    def wait_until_stored(self, timeout_s: float) -> bool:
        """Waits until the gateway has stored the last version; False after `timeout_s`. Raises as `publish` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stored() or self._failure is not None, timeout_s)
            self._raise_failure()
            return self._is_stored()

    @property
    def version(self) -> int:
        """The newest that was given to `publish`."""
        return self._version

    @property
    def pid(self) -> int | None:
        """The id of the publisher process."""
        return None if self._process is None else self._process.process.pid

    @property
    def pinned_version(self) -> int:
        """The version that an operator has pinned; `NO_VERSION` if there is none."""
        return self._status.pinned_version

    @property
    def published(self) -> int:
        """The number of versions that were encoded."""
        return self._history.published + self._status.published

    @property
    def is_busy(self) -> bool:
        """The newest version is not ready yet, or the governor has pushes pause."""
        status = self._status
        return self._failure is None and (
            status.ready_version < self.version or time.monotonic() < status.next_allowed_s
        )

    @property
    def versions_ahead(self) -> int:
        """How many versions the slowest robot is behind; 0 if no robot uses a version.

        It is 0 after a failure too, so that a learner that waits for robots calls `publish` and gets the error.
        """
        if self._failure is not None or self._status.oldest_in_use == NO_VERSION:
            return 0
        return max(0, self.version - self._status.oldest_in_use)

    def scalars(self) -> dict[str, float]:
        """Returns the metrics."""
        own = {
            "versions_published": float(self.published),
            "versions_ahead": float(self.versions_ahead),
            "held_by_pin": float(self._is_held_by_pin),
            "publisher_restarts": float(self._history.restarts),
        }
        return own | self._status.scalars | self._fetch_scalars

    @property
    def _socket(self) -> MessageSocket | None:
        return None if self._process is None else self._process.socket

    @property
    def _is_held_by_pin(self) -> bool:
        """The learner waits for robots whose version is pinned."""
        limit = self._settings.publish.max_versions_ahead
        return self._status.pinned_version != NO_VERSION and 0 < limit < self.versions_ahead

    def _is_stored(self) -> bool:
        return self._history.stored_version >= self.version

    def _warn_if_held(self) -> None:
        """Logs once per pin that the learner waits for it."""
        pinned = self._status.pinned_version
        if self._is_held_by_pin and pinned != self._warned_pin:
            self._warned_pin = pinned
            log.warning(
                "learner.waits version=%d pinned=%d learner.publish.max_versions_ahead=%d; "
                "`user-sys weights release` ends this",
                self.version,
                pinned,
                self._settings.publish.max_versions_ahead,
            )
        if pinned == NO_VERSION:
            self._warned_pin = NO_VERSION

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait_for_slot(self, keep_newest: bool = False) -> int:
        self._changed.wait_for(lambda: self._snapshots.free(keep_newest) or self._failure is not None, SLOT_TIMEOUT_S)
        self._raise_failure()
        if not (free := self._snapshots.free(keep_newest)):
            raise RunError(f"the publisher process has read no weights for {SLOT_TIMEOUT_S:.0f} s; see its log")
        return free[0]

    # Weights on a device, and the thread that fetches them

    def _wait_for_fetch(self, timeout_s: float) -> bool:
        """Waits until no fetch is in progress. Returns False after `timeout_s`."""
        return self._changed.wait_for(lambda: self._job is None or self._failure is not None, timeout_s)

    def _start_fetch(self, job: _FetchJob) -> None:
        self._job = job
        if self._fetch_thread is None:
            self._fetch_thread = threading.Thread(target=self._fetch_all, name="weights-fetch", daemon=True)
            self._fetch_thread.start()
        self._changed.notify_all()

    def _fetch_all(self) -> None:
        while self._fetch_next():
            pass

    def _fetch_next(self) -> bool:
        """Runs one job; its weights are freed on return. Returns False after the last job."""
        if (job := self._next_job()) is None:
            return False
        try:
            self._fetch(job)
        except UserSysError as error:
            self._fail(error)
        except Exception as error:  # of any type: the learner's next call raises it
            log.exception("weights.fetch_failed")
            self._fail(RunError(f"version {job.version} could not be fetched from its device: {error}"))
        return True

    def _next_job(self) -> _FetchJob | None:
        """Waits for a job; None after the last one."""
        with self._changed:
            while self._job is None and self._failure is None and not self._closing.is_set():
                self._changed.wait(POLL_INTERVAL_S)
            return None if self._failure is not None or self._closing.is_set() else self._job

    def _fetch(self, job: _FetchJob) -> None:
        job.weights.wait()
        with self._changed:
            slot = self._wait_for_slot(keep_newest=True)
            if self._socket is not None:
                self._socket.send(DeviceCopyStarted())
        started_s, budget = (
            time.monotonic(),
            GovernedBudget(self._settings.publish.governor, lambda: self._status.share),
        )
        rounding = job.weights.fetch(job.slots.views[slot], budget)
        with self._changed:
            self._fetch_scalars = {
                "fetch_ms": 1e3 * (time.monotonic() - started_s),
                "fetch_worked_ms": 1e3 * budget.worked_s,
                "governor/ctas": float(budget.ctas),
                "governor/chunk_bytes": float(budget.chunk_bytes),
            }
            snapshot = SnapshotReady(slot, job.version, job.updates, rounding=rounding, fetch_s=budget.worked_s)
            self._snapshots.set_newest(snapshot, is_fetched=True)
            self._snapshots.deliver(self._socket)
            self._job = None
            self._changed.notify_all()

    # The publisher process, and the thread that receives its messages

    def _launch(self) -> None:
        """Starts a process."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            number = other.fileno()
            argv = (sys.executable, "-m", "user_sys.learner.publisher_process", str(number))
            process = subprocess.Popen(argv, pass_fds=[number], stdin=subprocess.DEVNULL)
        self._process = _PublisherProcess(process, MessageSocket(own))
        self._process.socket.send(self._settings)
        self._snapshots.restart()
        self._snapshots.deliver(self._socket)

    def _watch(self) -> None:
        try:
            while (child := self._process) is not None and self._receive(child):
                pass
        except Exception as error:  # of any type: the learner's next call raises it
            log.exception("publisher.receive_failed")
            self._fail(error)

    def _receive(self, child: _PublisherProcess) -> bool:
        """Handles a message, if one arrives soon. Returns False if the process has ended for good."""
        try:
            received = child.socket.receive(POLL_INTERVAL_S)
        except LinkDown:
            return self._replace(child)
        if received is not None:
            self._on_message(received[0])
        return True

    def _on_message(self, message: PublisherMessage) -> None:
        if isinstance(message, RunStopped):
            self._on_run_stopped(message.reason)
            return
        with self._changed:
            if isinstance(message, PublisherStatus):
                self._status = message
                self._warn_if_held()
                self._snapshots.release(message.ready_version)
                self._history.stored_version = max(self._history.stored_version, message.stored_version)
                if message.failure is not None:
                    self._failure = _ERROR_FROM_NAME.get(message.failure.kind, RunError)(message.failure.text)
            self._snapshots.deliver(self._socket)
            self._changed.notify_all()

    def _replace(self, child: _PublisherProcess) -> bool:
        """Starts a new process for one that has ended. Returns False while closing, or after too many crashes."""
        try:
            status = child.process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.process.kill()
            status = child.process.wait(KILL_TIMEOUT_S)
        if self._closing.is_set():
            return False
        crashes = self._history.count_crash(time.monotonic())
        log.error("publisher.exited status=%d recent_crashes=%d", status, crashes)
        if crashes >= MAX_CRASHES:
            reason = f"the publisher process ended {crashes} times in {CRASH_WINDOW_S:.0f} s; see its log"
            self._fail(RunError(reason))
            return False
        self._closing.wait(RESTART_DELAY_S * crashes)
        return self._relaunch(child)

    def _relaunch(self, child: _PublisherProcess) -> bool:
        with self._changed:
            if self._closing.is_set():
                return False
            child.socket.close()
            self._process = None
            self._history.restarts += 1
            self._history.published += self._status.published
            self._status = replace(
                self._status, ready_version=NO_VERSION, oldest_in_use=NO_VERSION, pinned_version=NO_VERSION, published=0
            )
            try:
                self._launch()
            except OSError as error:
                self._failure = RunError(f"no new publisher process can be started: {error}")
            self._changed.notify_all()
            return self._failure is None

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error  # the first error is the cause
            self._changed.notify_all()
