"""Pictures for people, made beside the control loop: the newest of each camera, never an older one.

Tells the console what a robot is doing: its status a few times a second, and pictures while somebody watches.

What a session tells the `user-sys edge` that looks after it: a small file in the runtime folder, once a second.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.machine_folder import runtime_folder
from hal.safety import SafetyReason
from hal.spec import Array
from user_sys.edge.control_authority import ControlAuthority, ControlState
from user_sys.edge.environment import TimeStep
from user_sys.edge.outbox import Outbox
from user_sys.edge.recorder import SelectedAction, encode_jpeg
from user_sys.episode import Phase
from user_sys.messages import NO_VERSION, MetricsReport, Preview, PreviewRequest, RobotStatus
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.flow_control import CoalescingQueue

MAX_CAMERAS = 64
POLL_S = 0.5
ENCODER_CLOSE_TIMEOUT_S = 5.0


class PreviewEncoder:
    """Encodes in a thread of its own and offers what it made. The control loop's thread alone calls `submit`.

    Args:
        offer: sends a JPEG picture or drops it; never blocks.
    """

    def __init__(self, send: Callable[[Preview, bytes], object]) -> None:
        self._offer = send
        self._waiting: CoalescingQueue[tuple[Preview, Array]] = CoalescingQueue(MAX_CAMERAS)
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="previews", daemon=True)

    def submit(self, preview: Preview, image: Array) -> None:
        """Takes a picture over, copied; one of its camera that still waits is dropped. Raises what went wrong."""
        if self._failure is not None:
            raise self._failure
        self._waiting.put((preview, image.copy()), key=preview.camera)

    def _run(self) -> None:
        while not self._stopping.is_set() and self._failure is None:
            if (found := self._waiting.get(POLL_S)) is None:
                continue
            preview, image = found
            try:
                self._offer(preview, encode_jpeg(image))
            except Exception as error:  # of any kind: the next `submit` raises it
                self._failure = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """What still waits is dropped."""
        self._stopping.set()
        self._thread.join(ENCODER_CLOSE_TIMEOUT_S)


STATUS_PERIOD_S = 0.2
METRICS_PERIOD_S = 5.0
RATE_SMOOTHING = 0.6


class SafetyCounter:
    """How many control periods the safety kernel stepped in since the session started, by reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, tick: TimeStep) -> None:
        if tick.safety_reasons:
            self._counts.update(str(reason.name).lower() for reason in SafetyReason(tick.safety_reasons))
        self._counts["watchdog"] += tick.held_periods

    def scalars(self) -> dict[str, float]:
        """E.g. ``safety_workspace``; none for what never happened."""
        return {f"safety_{name}": float(count) for name, count in sorted(self._counts.items()) if count}


class StatusPublisher:
    """A subscriber of the episode loop; costs nothing between two due messages.

    `enable_previews` may be called from another thread than `on_step`. Enter `previews` to have pictures made.
    """

    def __init__(
        self,
        robot: str,
        client: TunnelClient,
        outbox: Outbox,
        authority: ControlAuthority,
        episode: Callable[[], str],
        note: Callable[[], str],
        refused_realtime: str,
        weights: Callable[[], dict[str, float]],
    ) -> None:
        self._robot, self._client, self._outbox, self._authority = robot, client, outbox, authority
        self.faults = 0  # of the hardware, in this session
        self._running_episode, self._note, self._refused_realtime = episode, note, refused_realtime
        self.previews = PreviewEncoder(client.send_preview)
        self._weights_scalars = weights
        self._lock = threading.Lock()
        self._watched_until = self._picture_period_s = 0.0
        self._next_picture: dict[str, float] = {}
        self._next_status = self._next_link = 0.0
        self._state: ControlState | None = None
        self._episode, self._step, self._version, self._interventions = "", 0, NO_VERSION, 0
        self._phase = Phase.POLICY
        self._hz, self._counted, self._counted_at = 0.0, 0, time.monotonic()
        self._safety = SafetyCounter()

    def enable_previews(self, request: PreviewRequest) -> None:
        """Somebody wants pictures for a while."""
        with self._lock:
            self._watched_until = time.monotonic() + min(request.ttl_s, 60.0)
            self._picture_period_s = 1.0 / min(max(request.rate_hz, 0.1), 60.0)

    def on_step(self, tick: TimeStep, decision: SelectedAction | None) -> None:
        """One control period has passed; `decision` is None where the robot held."""
        if (episode := self._running_episode()) != self._episode:
            self._episode, self._step = episode, 0
        self._safety.add(tick)
        if decision is not None:
            self._step += 1
            self._counted += 1
            self._phase = decision.phase
            if decision.policy_version != NO_VERSION:
                self._version = decision.policy_version
            self._interventions += tick.safety_reasons != 0
        now = time.monotonic()
        if now >= self._next_status or self._authority.state is not self._state:
            self._next_status = now + STATUS_PERIOD_S
            self.publish(real_time=decision is None or decision.phase is not Phase.POLICY)
        if now >= self._next_link:
            self._next_link = now + METRICS_PERIOD_S
            scalars = self._client.scalars() | self._outbox.scalars() | self._weights_scalars() | self._safety.scalars()
            self._client.send(MetricsReport(node=self._robot, count=self._step, scalars=scalars))
        if tick.frames and now < self._watched_until:
            self._show(tick, now)

    def publish(self, real_time: bool = False) -> None:
        """Sends the status now."""
        self._state = self._authority.state
        self._client.send(
            RobotStatus(
                robot=self._robot,
                authority=self._authority.state.value,
                operator=self._authority.operator,
                phase=self._phase.name.lower(),
                episode=self._episode,
                step=self._step,
                policy_version=self._version,
                real_time=real_time,
                outbox_chunks=len(self._outbox),
                control_hz=round(self._rate(), 1),
                safety_interventions=self._interventions,
                dropped_episodes=self._outbox.dropped.episodes,
                refused_realtime=self._refused_realtime,
                faults=self.faults,
                note=self._note(),
            )
        )

    def _rate(self) -> float:
        now = time.monotonic()
        if (passed_s := now - self._counted_at) >= 2 * STATUS_PERIOD_S:
            rate = self._counted / passed_s
            self._hz = rate if self._hz == 0 else RATE_SMOOTHING * self._hz + (1 - RATE_SMOOTHING) * rate
            self._counted, self._counted_at = 0, now
        return self._hz

    def _show(self, tick: TimeStep, now: float) -> None:
        for camera, frame in tick.frames.items():
            if now >= self._next_picture.get(camera, 0.0):
                self._next_picture[camera] = now + self._picture_period_s
                self.previews.submit(Preview(robot=self._robot, camera=camera, step=self._step), frame.image)


log = logging.getLogger(__name__)

REPORT_PERIOD_S = 1.0
SessionActivity = Literal[
    "waiting for its lease", "waiting for weights", "driving", "held without a lease", "delivering"
]


class SessionReport(msgspec.Struct, frozen=True, kw_only=True):
    """A session at one moment.

    Attributes:
        link: a `TunnelState`'s value.
        reason: why the tunnel is not open; empty before the first attempt has failed.
    """

    pid: int
    link: str
    reason: str
    doing: SessionActivity
    waiting_chunks: int
    waiting_bytes: int
    dropped_episodes: int


class SessionReporter:
    """Writes the report from a thread of its own. Set `activity` from any thread."""

    def __init__(self, robot: str, client: TunnelClient, outbox: Outbox) -> None:
        self.activity: SessionActivity = "waiting for its lease"
        self._path, self._client, self._outbox = session_report_path(robot), client, outbox
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(2 * REPORT_PERIOD_S)

    def _run(self) -> None:
        try:
            self._write()
            while not self._over.is_set():
                self._over.wait(REPORT_PERIOD_S)
                self._write()  # the last time when all is over: what is left in the outbox
        except OSError as error:
            log.warning("session.unreported %s", error)

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
    """What the session that runs as `pid` said last; None where it has not said anything yet."""
    try:
        report = msgspec.json.decode(session_report_path(robot).read_bytes(), type=SessionReport)
    except (FileNotFoundError, *DECODE_ERRORS):
        return None
    return report if report.pid == pid else None


def session_report_path(robot: str) -> Path:
    return runtime_folder() / f"{robot}.session.json"
