"""A session's reports: status, metrics and camera previews for consoles, and a file for ``user-sys edge``."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.machine_folder import runtime_folder
from hal.motion_limits import SafetyReason
from hal.spec import Array
from user_sys.edge.control_authority import ControlAuthority, ControlState
from user_sys.edge.environment import TimeStep
from user_sys.edge.outbox import Outbox
from user_sys.edge.recorder import SelectedAction, encode_jpeg
from user_sys.episode import Phase
from user_sys.messages import NO_VERSION, MetricsReport, Preview, PreviewRequest, RobotStatus
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.flow_control import CoalescingQueue

MAX_QUEUED_PREVIEWS = 64
POLL_S = 0.5
ENCODER_CLOSE_TIMEOUT_S = 5.0
MAX_PREVIEW_TTL_S = 60.0
MIN_PREVIEW_RATE_HZ, MAX_PREVIEW_RATE_HZ = 0.1, 60.0
STATUS_PERIOD_S = 0.2
METRICS_PERIOD_S = 5.0
RATE_SMOOTHING = 0.6
REPORT_PERIOD_S = 1.0

SessionActivity = Literal[
    "waiting for its lease", "waiting for weights", "driving", "held without a lease", "delivering"
]

log = logging.getLogger(__name__)


class PreviewEncoder:
    """Encodes camera previews in a thread. Only the newest image of each camera waits.

    The control loop's thread alone calls `submit`.
    """

    def __init__(self, send: Callable[[Preview, bytes], object]) -> None:
        """`send` sends a JPEG image or drops it. It never blocks."""
        self._send = send
        self._queue: CoalescingQueue[tuple[Preview, Array]] = CoalescingQueue(MAX_QUEUED_PREVIEWS)
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="previews", daemon=True)

    def submit(self, preview: Preview, image: Array) -> None:
        """Queues a copy of `image`, in place of a waiting one of its camera. Raises an earlier error of the thread."""
        if self._failure is not None:
            raise self._failure
        self._queue.put((preview, image.copy()), key=preview.camera)

    def _run(self) -> None:
        while not self._stopping.is_set() and self._failure is None:
            if (found := self._queue.get(POLL_S)) is None:
                continue
            preview, image = found
            try:
                self._send(preview, encode_jpeg(image))
            except Exception as error:  # of any kind: the next `submit` raises it
                self._failure = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Drops the images that wait."""
        self._stopping.set()
        self._thread.join(ENCODER_CLOSE_TIMEOUT_S)


class PreviewSampler:
    """Sends camera previews at the rate that a console requested, for as long as it requested."""

    def __init__(self, robot: str, encoder: PreviewEncoder) -> None:
        self._robot, self._encoder = robot, encoder
        self._lock = threading.Lock()
        self._enabled_until_s = self._period_s = 0.0
        self._next_s: dict[str, float] = {}

    def enable(self, request: PreviewRequest) -> None:
        """Starts or extends the previews. Any thread may call it."""
        with self._lock:
            self._enabled_until_s = time.monotonic() + min(request.ttl_s, MAX_PREVIEW_TTL_S)
            self._period_s = 1.0 / min(max(request.rate_hz, MIN_PREVIEW_RATE_HZ), MAX_PREVIEW_RATE_HZ)

    def on_step(self, time_step: TimeStep, step: int, now_s: float) -> None:
        if not time_step.frames or now_s >= self._enabled_until_s:
            return
        for camera, frame in time_step.frames.items():
            if now_s >= self._next_s.get(camera, 0.0):
                self._next_s[camera] = now_s + self._period_s
                self._encoder.submit(Preview(robot=self._robot, camera=camera, step=step), frame.image)


class SafetyCounter:
    """Counts the control periods in which the safety kernel intervened, by reason, since the session started."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, time_step: TimeStep) -> None:
        if time_step.safety_reasons:
            reasons = SafetyReason(time_step.safety_reasons)
            self._counts.update(str(reason.name).lower() for reason in reasons)
        self._counts["watchdog"] += time_step.held_periods

    def scalars(self) -> dict[str, float]:
        """For example ``safety_workspace``. Reasons that never occurred are left out."""
        return {f"safety_{name}": float(count) for name, count in sorted(self._counts.items()) if count}


class _StepCounter:
    """The running episode, and the newest step in it."""

    def __init__(self) -> None:
        self.episode, self.step, self.version, self.interventions = "", 0, NO_VERSION, 0
        self.phase = Phase.POLICY
        self._hz, self._counted, self._counted_at_s = 0.0, 0, time.monotonic()

    def on_step(self, episode: str, time_step: TimeStep, selected: SelectedAction | None) -> None:
        if episode != self.episode:
            self.episode, self.step = episode, 0
        if selected is None:
            return
        self.step += 1
        self._counted += 1
        self.phase = selected.phase
        if selected.policy_version != NO_VERSION:
            self.version = selected.policy_version
        self.interventions += time_step.safety_reasons != 0

    def rate_hz(self) -> float:
        """Steps a second, smoothed."""
        now_s = time.monotonic()
        if (passed_s := now_s - self._counted_at_s) >= 2 * STATUS_PERIOD_S:
            rate = self._counted / passed_s
            self._hz = rate if self._hz == 0 else RATE_SMOOTHING * self._hz + (1 - RATE_SMOOTHING) * rate
            self._counted, self._counted_at_s = 0, now_s
        return self._hz


class StatusSource(Protocol):
    """The session as the status publisher reads it."""

    @property
    def episode(self) -> str:
        """The running episode; empty before the first."""

    def status_note(self) -> str:
        """A sentence for operators; empty if there is nothing to report."""

    def weights_scalars(self) -> dict[str, float]:
        """Metrics of the weights, by name."""


class StatusPublisher:
    """Sends a robot's status a few times a second, its metrics, and previews while a console requests them.

    It is a listener of the episode loop. `enable_previews` may be called from another thread than `on_step`.

    Attributes:
        faults: hardware faults in this session.
        encoder: encodes previews while it is entered.
    """

    def __init__(
        self,
        robot: str,
        client: TunnelClient,
        outbox: Outbox,
        authority: ControlAuthority,
        source: StatusSource,
        refused_realtime: str,
    ) -> None:
        self._robot, self._client, self._outbox, self._authority = robot, client, outbox, authority
        self._source, self._refused_realtime = source, refused_realtime
        self.faults = 0
        self.encoder = PreviewEncoder(client.send_preview)
        self._previews = PreviewSampler(robot, self.encoder)
        self._steps, self._safety = _StepCounter(), SafetyCounter()
        self._next_status_s = self._next_metrics_s = 0.0
        self._published_state: ControlState | None = None

    def enable_previews(self, request: PreviewRequest) -> None:
        """Sends previews for the time and at the rate of `request`."""
        self._previews.enable(request)

    def on_step(self, time_step: TimeStep, selected: SelectedAction | None) -> None:
        """A control period has passed. `selected` is None if the robot held."""
        self._steps.on_step(self._source.episode, time_step, selected)
        self._safety.add(time_step)
        now_s = time.monotonic()
        if now_s >= self._next_status_s or self._authority.state is not self._published_state:
            self._next_status_s = now_s + STATUS_PERIOD_S
            self.publish(real_time=selected is None or selected.phase is not Phase.POLICY)
        if now_s >= self._next_metrics_s:
            self._next_metrics_s = now_s + METRICS_PERIOD_S
            self._client.send(MetricsReport(node=self._robot, count=self._steps.step, scalars=self._scalars()))
        self._previews.on_step(time_step, self._steps.step, now_s)

    def publish(self, real_time: bool = False) -> None:
        """Sends the status now."""
        self._published_state = self._authority.state
        self._client.send(
            RobotStatus(
                robot=self._robot,
                authority=self._authority.state.value,
                operator=self._authority.operator,
                phase=self._steps.phase.name.lower(),
                episode=self._steps.episode,
                step=self._steps.step,
                policy_version=self._steps.version,
                real_time=real_time,
                outbox_chunks=len(self._outbox),
                control_hz=round(self._steps.rate_hz(), 1),
                safety_interventions=self._steps.interventions,
                dropped_episodes=self._outbox.dropped.episodes,
                refused_realtime=self._refused_realtime,
                faults=self.faults,
                note=self._source.status_note(),
            )
        )

    def _scalars(self) -> dict[str, float]:
        return self._client.scalars() | self._outbox.scalars() | self._source.weights_scalars() | self._safety.scalars()


class SessionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a session at one moment.

    Attributes:
        link: a `TunnelState`'s value.
        reason: why the tunnel is not open; empty before the first failed attempt.
    """

    pid: int
    link: str
    reason: str
    doing: SessionActivity
    waiting_chunks: int
    waiting_bytes: int
    dropped_episodes: int


class SessionReporter:
    """Writes a `SessionReport` to a file in the runtime folder once a second, in a thread.

    ``user-sys edge``, which supervises the session, reads it. Any thread may set `activity`.
    """

    def __init__(self, robot: str, client: TunnelClient, outbox: Outbox) -> None:
        self.activity: SessionActivity = "waiting for its lease"
        self._path, self._client, self._outbox = session_report_path(robot), client, outbox
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join(2 * REPORT_PERIOD_S)

    def _run(self) -> None:
        try:
            self._write()
            while not self._stopping.is_set():
                self._stopping.wait(REPORT_PERIOD_S)
                self._write()  # also after the end: it counts the chunks that are left
        except OSError as error:
            log.warning("session.report_failed %s", error)

    def _write(self) -> None:
        waiting = len(self._outbox)
        report = SessionReport(
            pid=os.getpid(),
            link=self._client.state.value,
            reason=self._client.reason if self._client.counters["lost"] else "",
            doing=self.activity,
            waiting_chunks=waiting,
            waiting_bytes=self._outbox.used_bytes if waiting else 0,
            dropped_episodes=self._outbox.dropped.episodes,
        )
        fresh = self._path.with_suffix(".fresh")
        fresh.write_bytes(msgspec.json.encode(report))
        fresh.replace(self._path)


def read_session_report(robot: str, pid: int | None) -> SessionReport | None:
    """The newest report of the session that runs as `pid`; None before its first."""
    try:
        report = msgspec.json.decode(session_report_path(robot).read_bytes(), type=SessionReport)
    except (FileNotFoundError, *DECODE_ERRORS):
        return None
    return report if report.pid == pid else None


def session_report_path(robot: str) -> Path:
    return runtime_folder() / f"{robot}.session.json"
