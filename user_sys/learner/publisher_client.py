"""The learner's envoy: a process of its own that speaks with the gateway for it, and publishes its weights.

What is heavy about publishing, and all of the tunnel, runs there, so that it takes neither the learner's interpreter
nor its thread. The learner copies its weights into shared memory and goes on; where they lie on a device a thread of
its own fetches them there. An envoy that ends is replaced by a new one, which publishes the newest version again; one
whose learner ends, however, ends at once.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
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
from user_sys.weights.snapshot import DeviceWeights, PolicySnapshot, layout_of
from user_sys.weights.state import NotFinite

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
STEP_REPORT_INTERVAL_S, MAX_PENDING_STEPS = 0.1, 256
SLOT_TIMEOUT_S = 60.0
FLUSH_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 10.0
MAX_CRASHES, CRASH_WINDOW_S = 5, 60.0
RESTART_DELAY_S = 0.2  # before an envoy that ended is replaced; longer with each that ended lately
_ERROR_FROM_NAME: Mapping[str, type[UserSysError]] = {kind.__name__: kind for kind in (NotFinite, WireError)}


@dataclass(frozen=True)
class _PublisherProcess:
    process: subprocess.Popen[bytes]
    socket: MessageSocket


@dataclass(frozen=True)
class _FetchJob:
    """Weights to be fetched into one of the `slots`."""

    weights: DeviceWeights
    version: int
    updates: int
    slots: SharedTensorSlots


class PublisherClient:
    """Works from `start` to `close`. A `publishing.WeightsSink`; one thread calls it, `stopped` comes from another.

    Args:
        stopped: called with the reason when the gateway says that the run is over.
    """

    def __init__(self, settings: PublisherSettings, on_run_stopped: Callable[[str], None]) -> None:
        self._setup, self._stopped = settings, on_run_stopped
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._child: _PublisherProcess | None = None
        self._deaths: deque[float] = deque(maxlen=MAX_CRASHES)
        self._restarts = 0
        self._slots: SharedTensorSlots | None = None
        self._lent: dict[int, int] = {}  # slots that the child was told of, with the version there, until that is ready
        self._frozen: dict[str, Array] = {}  # read-only arrays of the newest snapshot, which are not written again
        self._newest: SnapshotReady | None = None
        self._asked = NO_VERSION
        self._steps: list[tuple[float, float]] = []  # of which the child was not told since then
        self._told_steps_s = 0.0
        self._order: _FetchJob | None = None  # until its weights lie in their slot
        self._fetcher: threading.Thread | None = None  # there is one as soon as something is to be fetched
        self._fetched: dict[str, float] = {}  # what is told of the newest fetch
        self._told = self._shared = False  # whether the child knows of the newest, and of the memory
        self._earlier = 0  # versions that earlier children made ready
        self._status = PublisherStatus(NO_VERSION, NO_VERSION, NO_VERSION, 0, 0.0, {})
        self._confirmed = self._said_to_wait = NO_VERSION
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._watch, name="envoy", daemon=True)

    def start(self) -> None:
        """Raises OSError: no process can be started."""
        with self._changed:
            self._launch()
        self._thread.start()

    def close(self) -> None:
        """Has what waits fetched and sent, and ends the process; kills it where that takes longer than
        `CLOSE_TIMEOUT_S`.
        """
        with self._changed:
            self._await_fetch(CLOSE_TIMEOUT_S)
            self._closing.set()
            self._changed.notify_all()
            child = self._child
        if child is not None:
            self._end(child)
        if self._fetcher is not None:
            self._fetcher.join(KILL_TIMEOUT_S)
        if self._slots is not None:
            self._slots.close()

    def _end(self, child: _PublisherProcess) -> None:
        told = child.socket.send(ShutdownRequest(FLUSH_TIMEOUT_S), KILL_TIMEOUT_S)
        try:
            child.process.wait(CLOSE_TIMEOUT_S if told else KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.error("envoy.killed it did not end by itself")
            child.process.kill()
            child.process.wait(KILL_TIMEOUT_S)
        self._thread.join(KILL_TIMEOUT_S)
        child.socket.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # What the learner's thread calls

    def publish(self, weights: PolicySnapshot, version: int, updates: int) -> None:
        """Takes `weights` and returns, at once but where earlier ones are being fetched, or `SLOT_COUNT` wait to be
        read.

        Arrays are copied before it returns. What lies on a device is fetched by a thread of the envoy's, within what
        the governor allows; the learner is `is_busy` meanwhile. An array that is read-only and the same object each
        time is known to be unchanged, and neither copied nor looked at (frozen parts of a policy).

        Raises:
            NotFinite: an earlier snapshot held NaN or infinity; it was not published.
            WireError: a snapshot cannot travel, or has another layout than those before.
            RunError: the envoy ends again and again, or does not read; or earlier weights could not be fetched.
        """
        with self._changed:
            if not self._await_fetch(SLOT_TIMEOUT_S):
                raise RunError(f"weights could not be fetched within {SLOT_TIMEOUT_S:.0f} s")
            self._raise_failure()
            self._tell_steps(time.monotonic())  # none of them was beside this push
            layout = layout_of(weights)
            if self._slots is None:
                self._slots = SharedTensorSlots.from_layout(layout)
            if not self._slots.has_layout(layout):
                raise WireError(f"version {version}: its names, dtypes or shapes are not those of the version before")
            if isinstance(weights, Mapping):
                slot = self._free_slot(range(SLOT_COUNT))
                unchanged = self._write(self._slots.views[slot], weights)
                self._hand_over(SnapshotReady(slot, version, updates, unchanged))
            else:
                self._send_for(_FetchJob(weights, version, updates, self._slots))
            self._asked = version

    def observe(self, seconds: float) -> None:
        """How long a training step took, with all that was done to publish: the governor keeps it within its budget."""
        now = time.monotonic()
        with self._changed:
            self._catch_up()
            self._steps.append((now, seconds))
            if now - self._told_steps_s >= STEP_REPORT_INTERVAL_S or len(self._steps) >= MAX_PENDING_STEPS:
                self._tell_steps(now)

    def report(self, updates: int, scalars: dict[str, float]) -> None:
        """Sends scalars to the gateway; drops them where the envoy does not keep up."""
        with self._changed:
            if self._child is not None:
                report = MetricsReport(node=self._setup.hello.name, count=updates, scalars=scalars)
                self._child.socket.send(ScalarReport(report))

    def wait_until_stored(self, timeout_s: float) -> bool:
        """Waits until the gateway has the last version on disk; False after `timeout_s`. Raises as `publish` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._confirmed >= self.version or self._failure is not None, timeout_s)
            self._raise_failure()
            return self._confirmed >= self.version

    @property
    def version(self) -> int:
        """The newest that was given to `publish`."""
        return self._asked

    @property
    def published(self) -> int:
        """How many versions were made ready."""
        return self._earlier + self._status.published

    @property
    def is_busy(self) -> bool:
        """The newest version is not ready yet, or the governor has pushes pause."""
        status = self._status
        return self._failure is None and (
            status.ready_version < self.version or time.monotonic() < status.next_allowed_s
        )

    @property
    def versions_ahead(self) -> int:
        """How many versions the slowest robot is behind; 0 while none acts with any, and once publishing has failed:
        who waited for the robots would never call `publish` and hear of it.
        """
        if self._failure is not None or self._status.oldest_in_use == NO_VERSION:
            return 0
        return max(0, self.version - self._status.oldest_in_use)

    def scalars(self) -> dict[str, float]:
        """For the metrics."""
        own = {
            "versions_published": float(self.published),
            "versions_ahead": float(self.versions_ahead),
            "held_by_order": float(self._held_by_order),
            "envoy_restarts": float(self._restarts),
        }
        return own | self._status.scalars | self._fetched

    @property
    def _held_by_order(self) -> bool:
        """The learner waits for robots that may not go on: a person has ordered what they act with."""
        return (
            self._status.pinned_version != NO_VERSION
            and 0 < self._setup.publish.max_versions_ahead < self.versions_ahead
        )

    def _say_why_it_waits(self) -> None:
        """Once for each order that it waits for."""
        ordered = self._status.pinned_version
        if self._held_by_order and ordered != self._said_to_wait:
            self._said_to_wait = ordered
            mend = "`user-sys weights release` lets robots and training go on"
            log.warning(
                "learner.waits version=%d ordered=%d learner.publish.max_versions_ahead: %s",
                self.version,
                ordered,
                mend,
            )
        if ordered == NO_VERSION:
            self._said_to_wait = NO_VERSION

    def _tell_steps(self, now: float) -> None:
        """Each word has the child run, beside the learner; those that it has no room for are lost."""
        if self._child is not None and self._steps:
            self._child.socket.send(StepTimes(tuple(self._steps)))
        self._steps.clear()
        self._told_steps_s = now

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _free_slot(self, among: Iterable[int]) -> int:
        def free() -> list[int]:
            return [slot for slot in among if slot not in self._lent]

        self._changed.wait_for(lambda: free() or self._failure is not None, SLOT_TIMEOUT_S)
        self._raise_failure()
        if not free():
            raise RunError(f"the envoy has read no weights for {SLOT_TIMEOUT_S:.0f} s")
        return free()[0]

    def _write(self, views: Mapping[str, Array], arrays: Mapping[str, Array]) -> tuple[int, ...]:
        """Copies what may have changed; the places of the rest."""
        unchanged = []
        for place, (name, array) in enumerate(arrays.items()):
            if self._told and not array.flags.writeable and self._frozen.get(name) is array:
                unchanged.append(place)
            else:
                views[name][...] = array
        self._frozen = {name: array for name, array in arrays.items() if not array.flags.writeable}
        return tuple(unchanged)

    def _hand_over(self, snapshot: SnapshotReady) -> None:
        """Has the child know of what lies in its slot."""
        self._newest, self._told = snapshot, False
        self._catch_up()

    # Weights that lie on a device, and the thread that fetches them

    def _await_fetch(self, timeout_s: float) -> bool:
        """Whether nothing is being fetched any more, or will never be."""
        return self._changed.wait_for(lambda: self._order is None or self._failure is not None, timeout_s)

    def _send_for(self, order: _FetchJob) -> None:
        self._order = order
        if self._fetcher is None:
            self._fetcher = threading.Thread(target=self._fetch_all, name="weights-fetch", daemon=True)
            self._fetcher.start()
        self._changed.notify_all()

    def _fetch_all(self) -> None:
        while self._fetch_next():
            pass

    def _fetch_next(self) -> bool:
        """False once nothing is to be fetched any more. What was fetched is let go before it waits for the next."""
        if (order := self._next_order()) is None:
            return False
        try:
            self._fetch(order)
        except UserSysError as error:
            self._fail(error)
        except Exception as error:  # of any kind: the learner must hear of it, and does at its next call
            log.exception("weights.not_fetched")
            self._fail(RunError(f"version {order.version} could not be fetched from its device: {error}"))
        return True

    def _next_order(self) -> _FetchJob | None:
        """None once there will be none any more."""
        with self._changed:
            while self._order is None and self._failure is None and not self._closing.is_set():
                self._changed.wait(POLL_INTERVAL_S)
            return None if self._failure is not None or self._closing.is_set() else self._order

    def _fetch(self, order: _FetchJob) -> None:
        order.weights.wait()
        with self._changed:
            # Not over the newest: an envoy that has to be replaced now would be told of it again.
            slot = self._free_slot(
                [slot for slot in range(SLOT_COUNT) if self._newest is None or slot != self._newest.slot]
            )
            if self._child is not None:
                self._child.socket.send(DeviceCopyStarted())
        started, allowance = time.monotonic(), GovernedBudget(self._setup.publish.governor, lambda: self._status.share)
        rounding = order.weights.fetch(order.slots.views[slot], allowance)
        with self._changed:
            self._frozen = {}
            self._fetched = {
                "fetch_ms": 1e3 * (time.monotonic() - started),
                "fetch_worked_ms": 1e3 * allowance.worked_s,
                "governor/ctas": float(allowance.ctas),
                "governor/chunk_bytes": float(allowance.chunk_bytes),
            }
            self._hand_over(
                SnapshotReady(slot, order.version, order.updates, rounding=rounding, fetch_s=allowance.worked_s)
            )
            self._order = None
            self._changed.notify_all()

    # The child, and the thread that listens to it

    def _launch(self) -> None:
        """Starts a child that knows nothing yet."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            argv = (sys.executable, "-m", "user_sys.learner.publisher_process", str(number))
            process = subprocess.Popen(argv, pass_fds=[number], stdin=subprocess.DEVNULL)
        self._child = _PublisherProcess(process, MessageSocket(ours))
        self._child.socket.send(self._setup)
        self._lent.clear()
        self._told = self._shared = False
        self._complete_newest()
        self._catch_up()

    def _complete_newest(self) -> None:
        """Writes what the child before knew already."""
        if self._newest is not None and self._slots is not None:
            for name, array in self._frozen.items():
                self._slots.views[self._newest.slot][name][...] = array
            self._newest = replace(self._newest, unchanged=())

    def _catch_up(self) -> None:
        """Tells the child of the newest snapshot, if it does not know of it and there is room."""
        if self._child is None or self._slots is None or self._newest is None or self._told:
            return
        line = self._child.socket
        if not self._shared:
            self._shared = line.send(self._slots.memory, descriptor=self._slots.descriptor)
        if self._shared and line.send(self._newest):
            self._told = True
            self._lent[self._newest.slot] = self._newest.version

    def _watch(self) -> None:
        try:
            while (child := self._child) is not None and self._heard(child):
                pass
        except Exception as error:  # of any kind: the learner must hear of it, and does at its next call
            log.exception("envoy.not_heard")
            self._fail(error)

    def _heard(self, child: _PublisherProcess) -> bool:
        """Takes in a word of the child's, if there is one soon; False once there is nobody to listen to."""
        try:
            received = child.socket.receive(POLL_INTERVAL_S)
        except LinkDown:
            return self._replaced(child)
        if received is not None:
            self._take(received[0])
        return True

    def _take(self, word: PublisherMessage) -> None:
        if isinstance(word, RunStopped):
            self._stopped(word.reason)
            return
        with self._changed:
            if isinstance(word, PublisherStatus):
                self._status = word
                self._say_why_it_waits()
                self._lent = {slot: version for slot, version in self._lent.items() if version > word.ready_version}
                self._confirmed = max(self._confirmed, word.stored_version)
                if word.failure is not None:
                    self._failure = _ERROR_FROM_NAME.get(word.failure.kind, RunError)(word.failure.text)
            self._catch_up()
            self._changed.notify_all()

    def _replaced(self, child: _PublisherProcess) -> bool:
        """Whether there is a new one for `child`, which has ended; False where none is wanted, or none lives long."""
        try:
            status = child.process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.process.kill()
            status = child.process.wait(KILL_TIMEOUT_S)
        if self._closing.is_set():
            return False
        now = time.monotonic()
        self._deaths.append(now)
        recent = sum(now - at <= CRASH_WINDOW_S for at in self._deaths)
        log.error("envoy.ended status=%d recently=%d", status, recent)
        if recent >= MAX_CRASHES:
            self._fail(RunError(f"the learner's envoy ended {recent} times in {CRASH_WINDOW_S:.0f} s, see its log"))
            return False
        self._closing.wait(RESTART_DELAY_S * recent)
        return self._relaunched(child)

    def _relaunched(self, child: _PublisherProcess) -> bool:
        with self._changed:
            if self._closing.is_set():
                return False
            child.socket.close()
            self._child = None
            self._restarts += 1
            self._earlier += self._status.published
            self._status = replace(
                self._status, ready_version=NO_VERSION, oldest_in_use=NO_VERSION, pinned_version=NO_VERSION, published=0
            )
            try:
                self._launch()
            except OSError as error:
                self._failure = RunError(f"no new envoy of the learner can be started: {error}")
            self._changed.notify_all()
            return self._failure is None

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error  # the first one is the cause
            self._changed.notify_all()
