"""The learner's side of its publisher process: hands over weights and step times.

The publisher process does the work of publishing and owns the tunnel, so that neither takes the learner's interpreter
or its thread. The learner copies its weights into shared memory and goes on. A thread fetches weights that lie on a
device. If either process ends, the other one ends too.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping

from hal.context import StartedAtEntry
from hal.process_supervisor import exit_reason
from user_sys.codec import Array
from user_sys.errors import LinkDown, RunError, UserSysError, WireError
from user_sys.learner.publisher_protocol import (
    DeviceCopyStarted,
    MessageSocket,
    PublisherMessage,
    PublisherSettings,
    PublisherStatus,
    RunStopped,
    ScalarReport,
    SharedTensors,
    ShutdownRequest,
    SnapshotReady,
    StepTimes,
    TrainingEnded,
)
from user_sys.messages import NO_VERSION, MetricsReport
from user_sys.trace import child_environment
from user_sys.weights.governor import GovernedBudget
from user_sys.weights.gpu_copy import DeviceSnapshot, PolicySnapshot, layout_of
from user_sys.weights.state import NotFinite

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
STEP_REPORT_INTERVAL_S, MAX_PENDING_STEPS = 0.1, 256
MEMORY_TIMEOUT_S, ENCODED_BYTES_PER_S = 60.0, 100e6  # of the version before: base, and the least rate to encode it
FLUSH_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 10.0
_ERROR_FROM_NAME: Mapping[str, type[UserSysError]] = {kind.__name__: kind for kind in (NotFinite, WireError)}


class SharedSnapshot:
    """The newest version in shared memory, and whether the process has it. The caller guards it."""

    def __init__(self) -> None:
        self._memory: SharedTensors | None = None  # from the first version on
        self._frozen: dict[str, Array | None] = {}  # of all versions, and the read-only arrays of those in host memory
        self._snapshot: SnapshotReady | None = None  # in the memory
        self._is_delivered = self._is_memory_sent = False

    @property
    def size_bytes(self) -> int:
        """The size of the tensors; 0 without any."""
        return 0 if self._memory is None else self._memory.info.tensor_bytes

    @property
    def frozen_bytes(self) -> int:
        """The size of those of them that are frozen."""
        return 0 if self._memory is None else sum(self._memory.views[name].nbytes for name in self._frozen)

    def memory_for(self, weights: PolicySnapshot, version: int) -> SharedTensors:
        """The memory for `weights`. Raises WireError if they have another layout than those before."""
        if self._memory is None:
            self._memory = SharedTensors.from_layout(layout_of(weights))
        if not self._fits(weights, self._memory.views):
            raise WireError(f"version {version}: its names, dtypes or shapes differ from those of the version before")
        return self._memory

    def _fits(self, weights: PolicySnapshot, views: Mapping[str, Array]) -> bool:
        if not isinstance(weights, Mapping):
            return list(weights.layout.items()) == list(layout_of(views).items())
        return list(weights) == list(views) and all(
            self._frozen.get(name) is array or (array.shape == views[name].shape and array.dtype == views[name].dtype)
            for name, array in weights.items()
        )

    def write(self, arrays: Mapping[str, Array], memory: SharedTensors) -> tuple[int, ...]:
        """Copies the arrays that may have changed. Returns the positions of the frozen ones.

        Raises WireError: a frozen array is another object than before.
        """
        for name, array in arrays.items():
            if array.flags.writeable:
                memory.views[name][...] = array
            elif name not in self._frozen:
                memory.views[name][...] = self._frozen[name] = array
            elif self._frozen[name] is not array:
                raise WireError(f"the read-only array {name!r} is another one than before: pass the same one each time")
        return self._positions()

    def _positions(self) -> tuple[int, ...]:
        assert self._memory is not None  # as the caller has it
        return tuple(position for position, name in enumerate(self._memory.views) if name in self._frozen)

    def missing(self, frozen: Collection[str]) -> Mapping[str, Array]:
        """The memory of the tensors to fetch from a device: all but the `frozen` ones that it holds."""
        assert self._memory is not None  # as the caller has it
        return {
            name: view for name, view in self._memory.views.items() if name not in frozen or name not in self._frozen
        }

    def end_fetch(self, frozen: Collection[str]) -> tuple[int, ...]:
        """The memory holds all tensors of a device. Returns the positions of the `frozen` ones."""
        self._frozen = dict.fromkeys(frozen)
        return self._positions()

    def set_ready(self, snapshot: SnapshotReady, channel: MessageSocket) -> None:
        """The memory holds `snapshot`."""
        self._snapshot, self._is_delivered = snapshot, False
        self.deliver(channel)

    def deliver(self, channel: MessageSocket) -> None:
        """Sends the snapshot in the memory, unless that is done or the socket has no room."""
        if self._memory is None or self._snapshot is None or self._is_delivered:
            return
        if not self._is_memory_sent:
            self._is_memory_sent = channel.send(self._memory.info, descriptor=self._memory.descriptor)
        self._is_delivered = self._is_memory_sent and channel.send(self._snapshot)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()


class StepTimesBatch:
    """Step times, sent in batches: each message wakes the process next to the learner. May lose some."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, float]] = []
        self._sent_s = 0.0

    def add(self, now_s: float, seconds: float, channel: MessageSocket) -> None:
        """Adds a step that ended at `now_s` of the monotonic clock."""
        self._steps.append((now_s, seconds))
        if now_s - self._sent_s >= STEP_REPORT_INTERVAL_S or len(self._steps) >= MAX_PENDING_STEPS:
            self.send(now_s, channel)

    def send(self, now_s: float, channel: MessageSocket) -> None:
        """Sends the added messages."""
        if self._steps:
            channel.send(StepTimes(tuple(self._steps)))
        self._steps, self._sent_s = [], now_s


class PublisherProcess:
    """The process at the other end of `socket`. Construction starts it."""

    def __init__(self, settings: PublisherSettings) -> None:
        """Raises OSError if no process can be started."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            number = other.fileno()
            argv = (sys.executable, "-m", "user_sys.learner.publisher_process", str(number))
            self._process = subprocess.Popen(
                argv, pass_fds=[number], stdin=subprocess.DEVNULL, env=child_environment("publisher")
            )
        self.socket = MessageSocket(own)
        self.socket.send(settings)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float) -> int:
        """Returns the exit status; kills the process after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.error("publisher.killed it did not end by itself")
            self._process.kill()
            return self._process.wait(KILL_TIMEOUT_S)


class PublisherClient(StartedAtEntry):
    """Publishes versions in a process of its own, from `start` to `close`. One thread calls it.

    Args:
        on_run_stopped: called by another thread with the reason when the gateway ends the run, or when the process has
            ended, so that the learner can save its state; then each call raises RunError.

    Attributes:
        version: the newest that was given to `publish`.
    """

    def __init__(self, settings: PublisherSettings, on_run_stopped: Callable[[str], None]) -> None:
        self.version = NO_VERSION
        self._settings, self._on_run_stopped = settings, on_run_stopped
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._process: PublisherProcess | None = None
        self._shared, self._steps = SharedSnapshot(), StepTimesBatch()
        self._fetching: threading.Thread | None = None
        self._fetch_scalars: dict[str, float] = {}
        self._status = PublisherStatus()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._watch, name="publisher", daemon=True)

    def start(self) -> None:
        """Raises OSError if no process can be started."""
        self._process = PublisherProcess(self._settings)
        self._thread.start()

    def close(self) -> None:
        """Fetches and sends the waiting version, and ends the process; kills it after `CLOSE_TIMEOUT_S`."""
        if self._fetching is not None:
            self._fetching.join(CLOSE_TIMEOUT_S)
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        if self._process is not None:
            is_sent = self._process.socket.send(ShutdownRequest(FLUSH_TIMEOUT_S), KILL_TIMEOUT_S)
            self._process.wait(CLOSE_TIMEOUT_S if is_sent else KILL_TIMEOUT_S)
            self._thread.join(KILL_TIMEOUT_S)
            self._process.socket.close()
        self._shared.close()

    # Called by the learner's thread

    def publish(self, weights: PolicySnapshot, version: int, updates: int) -> None:
        """Publishes `weights`. Blocks only while the version before is not ready (`is_busy`).

        Arrays are copied before it returns. A thread fetches weights on a device within the governor's budget. A
        read-only array is a frozen part of the policy: it must be the same object each time, and is copied once.

        Raises:
            NotFinite: an earlier version held NaN or infinity; it was not published.
            WireError: a version cannot be encoded, or has another layout than those before.
            RunError: the process has ended or does not read, or earlier weights could not be fetched.
        """
        with self._changed:
            timeout_s = MEMORY_TIMEOUT_S + self._shared.size_bytes / ENCODED_BYTES_PER_S
            if not self._wait_for(lambda: self._status.progress.ready_version >= self.version, timeout_s):
                raise RunError(f"version {self.version} was not published within {timeout_s:.0f} s; see the log")
            self._steps.send(time.monotonic(), self._channel)  # these steps ran before this push
            memory = self._shared.memory_for(weights, version)
            self.version = version
            if isinstance(weights, Mapping):
                ready = SnapshotReady(version, updates, self._shared.write(weights, memory))
                self._shared.set_ready(ready, self._channel)
            else:
                self._fetching = threading.Thread(
                    target=self._fetch, args=(weights, version, updates, memory), name="weights-fetch", daemon=True
                )
                self._fetching.start()

    def observe(self, seconds: float) -> None:
        """Reports the time of a training step, publishing included, to the governor."""
        with self._changed:
            self._shared.deliver(self._channel)
            self._steps.add(time.monotonic(), seconds, self._channel)

    def end_training(self) -> None:
        """Later pushes, and what is left of one in progress, have the full share: no step follows.

        Raises as `publish` does.
        """
        with self._changed:
            self._raise_failure()
            self._steps.send(time.monotonic(), self._channel)
            self._channel.send(TrainingEnded(), KILL_TIMEOUT_S)

    def report(self, updates: int, scalars: dict[str, float]) -> None:
        """Sends scalars to the gateway; drops them if the process does not keep up."""
        with self._changed:
            report = MetricsReport(node=self._settings.hello.name, count=updates, scalars=scalars)
            self._channel.send(ScalarReport(report))

    def wait_until_stored(self, timeout_s: float) -> bool:
        """Waits until the gateway has stored the last version; False after `timeout_s`. Raises as `publish` does."""
        with self._changed:
            return self._wait_for(lambda: self._status.progress.stored_version >= self.version, timeout_s)

    @property
    def size_bytes(self) -> int:
        """The size of what the gateway may lack of a version: frozen tensors travel once. 0 before the first."""
        with self._changed:
            has_frozen = self._status.progress.stored_version != NO_VERSION
            return self._shared.size_bytes - has_frozen * self._shared.frozen_bytes

    @property
    def pid(self) -> int | None:
        """The id of the publisher process."""
        return None if self._process is None else self._process.pid

    @property
    def pinned_version(self) -> int:
        """The version that an operator has pinned; `NO_VERSION` if there is none."""
        return self._status.progress.pinned_version

    @property
    def published(self) -> int:
        """The number of versions that were offered."""
        return self._status.progress.published

    @property
    def is_busy(self) -> bool:
        """The newest version is not ready yet, or the governor has pushes pause."""
        progress = self._status.progress
        return self._failure is None and (
            progress.ready_version < self.version or time.monotonic() < progress.next_allowed_s
        )

    @property
    def versions_ahead(self) -> int:
        """How many versions the slowest robot is behind; 0 if no robot uses a version.

        It is 0 after a failure too, so that a learner that waits for robots calls `publish` and gets the error.
        """
        if self._failure is not None or self._status.progress.oldest_in_use == NO_VERSION:
            return 0
        return max(0, self.version - self._status.progress.oldest_in_use)

    def scalars(self) -> dict[str, float]:
        """Returns the metrics."""
        own = {"versions_published": float(self.published), "versions_ahead": float(self.versions_ahead)}
        return own | self._status.scalars | self._fetch_scalars

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits for a change; raises the failure, if there is one."""
        self._changed.wait_for(lambda: condition() or self._failure is not None, timeout_s)
        self._raise_failure()
        return condition()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    @property
    def _channel(self) -> MessageSocket:
        assert self._process is not None, "the client is started"
        return self._process.socket

    def _fetch(self, weights: DeviceSnapshot, version: int, updates: int, memory: SharedTensors) -> None:
        """Fetches weights from a device; in a thread of its own."""
        try:
            weights.wait()
            self._channel.send(DeviceCopyStarted())
            started_s = time.monotonic()
            budget = GovernedBudget(self._settings.publish.governor, lambda: self._status.share)
            weights.fetch(self._shared.missing(weights.frozen), budget)
            with self._changed:
                self._fetch_scalars = {
                    "fetch_ms": 1e3 * (time.monotonic() - started_s),
                    "fetch_worked_ms": 1e3 * budget.worked_s,
                    "governor/ctas": float(budget.ctas),
                    "governor/chunk_bytes": float(budget.chunk_bytes),
                }
                frozen = self._shared.end_fetch(weights.frozen)
                self._shared.set_ready(SnapshotReady(version, updates, frozen, budget.worked_s), self._channel)
        except Exception as error:  # of any type: the learner's next call raises it
            log.exception("weights.fetch_failed")
            failure = RunError(f"version {version} could not be fetched from its device: {error}")
            self._fail(error if isinstance(error, UserSysError) else failure)

    # The publisher process, and the thread that receives its messages

    def _watch(self) -> None:
        try:
            while self._receive():
                pass
        except Exception as error:  # of any type: the learner's next call raises it
            log.exception("publisher.receive_failed")
            self._fail(error)

    def _receive(self) -> bool:
        """Handles a message, if one arrives soon. Returns False if the process has ended."""
        try:
            received = self._channel.receive(POLL_INTERVAL_S)
        except LinkDown:
            self._on_end()
            return False
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
                if message.failure is not None:
                    self._failure = _ERROR_FROM_NAME.get(message.failure.kind, RunError)(message.failure.text)
            self._shared.deliver(self._channel)
            self._changed.notify_all()

    def _on_end(self) -> None:
        assert self._process is not None  # this thread runs from `start` on
        status = self._process.wait(KILL_TIMEOUT_S)
        if not self._closing.is_set():
            reason = f"the publisher process ended {exit_reason(status)}; see its log"
            self._on_run_stopped(reason)  # first: the learner saves its state before a call raises
            self._fail(RunError(reason))

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error  # the first error is the cause
            self._changed.notify_all()
