"""A session's reports: status, metrics and camera previews for consoles, and a file for ``user-sys edge``."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from hal.camera import CameraFrame
from hal.context import StartedAtEntry
from hal.decode_errors import DECODE_ERRORS
from hal.machine_folder import runtime_folder
from hal.motion_limits import SafetyReason
from hal.spec import STATE, Array
from user_sys.edge.control_authority import ControlAuthority, ControlState
from user_sys.edge.environment import TimeStep
from user_sys.edge.local_link import LocalLink
from user_sys.edge.outbox import Outbox
from user_sys.edge.recorder import SelectedAction
from user_sys.episode import Phase
from user_sys.messages import (
    MAX_POSE_VALUES,
    NO_VERSION,
    ControlPeriod,
    EpisodeReport,
    MetricsReport,
    OperatorReply,
    Preview,
    PreviewRequest,
    RobotStatus,
)
from user_sys.threads import ThreadedService
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.flow_control import CoalescingQueue

MAX_QUEUED_PREVIEWS = 64
POLL_S = 0.5
CLOSE_TIMEOUT_S = 5.0
MAX_PREVIEW_TTL_S = 60.0
MIN_PREVIEW_RATE_HZ, MAX_PREVIEW_RATE_HZ = 0.1, 60.0
MAX_EARLY = 0.4  # of the period of previews, by which one may come early after a late one
STATUS_PERIOD_S = 0.2
POSE_PERIOD_S = 0.08  # of the status while a console requests the pose: each step of a robot at 10 Hz
MAX_PROMISED = 64  # actions in a status
METRICS_PERIOD_S = 5.0
RATE_SMOOTHING = 0.6
REPORT_PERIOD_S = 1.0
MAX_PERIODS_PER_STATUS = 32
MAX_HELP_CHARS = 300
MAX_NOTE_CHARS = 1000  # of which the gateway refuses more

SessionActivity = Literal[
    "waiting for its lease", "waiting for weights", "driving", "held without a lease", "delivering"
]

log = logging.getLogger(__name__)


class PreviewSender(ThreadedService):
    """Sends camera previews at the rate that a console requested, for as long as it requested.

    Its thread encodes them; only the newest image of each camera waits, and none after `close`. The control loop's
    thread calls `on_step`.
    """

    def __init__(
        self,
        robot: str,
        send: Callable[[Preview, bytes], object],
        unix_ns: Callable[[int], int] = lambda t_ns: time.time_ns() - time.monotonic_ns() + t_ns,
    ) -> None:
        """Args:
        send: sends a JPEG image or drops it. It never blocks.
        unix_ns: from this computer's monotonic clock to the receiver's Unix time; 0 if that is unknown.
        """
        super().__init__("previews", CLOSE_TIMEOUT_S, "a picture is encoded")
        self._robot, self._send, self._unix_ns = robot, send, unix_ns
        self._queue: CoalescingQueue[tuple[Preview, CameraFrame]] = CoalescingQueue(MAX_QUEUED_PREVIEWS)
        self._enabled_until_s, self._period_s = 0.0, 1.0
        self._cameras: tuple[str, ...] = ()  # of which a console requested pictures; empty for all
        self._pose_until_s = 0.0
        self._next_s: dict[str, float] = {}

    def enable(self, request: PreviewRequest) -> None:
        """Starts or extends the previews, or the pose. Any thread may call it."""
        until_s = time.monotonic() + min(request.ttl_s, MAX_PREVIEW_TTL_S)
        if request.pose:
            self._pose_until_s = until_s
            return
        self._period_s = 1.0 / min(max(request.rate_hz, MIN_PREVIEW_RATE_HZ), MAX_PREVIEW_RATE_HZ)
        self._enabled_until_s, self._cameras = until_s, request.cameras

    def sends_pose(self, now_s: float) -> bool:
        """Whether a console requests the pose at present."""
        return now_s < self._pose_until_s

    def is_watched(self, now_s: float) -> bool:
        """Whether a console requests previews at present."""
        return now_s < self._enabled_until_s

    def on_step(self, time_step: TimeStep, step: int, now_s: float) -> None:
        """Queues the images that are due. Raises an earlier error of the thread."""
        if not time_step.frames or not self.is_watched(now_s):
            return
        self.raise_failure()
        for camera, frame in time_step.frames.items():
            due_s = self._next_s.get(camera, 0.0)
            if (not self._cameras or camera in self._cameras) and now_s >= due_s:
                # From when it was due: else 30 Hz would become 25 Hz in a control loop of 50 Hz.
                self._next_s[camera] = max(due_s, now_s - MAX_EARLY * self._period_s) + self._period_s
                self._queue.put((Preview(robot=self._robot, camera=camera, step=step), frame), key=camera)

    def _work(self) -> None:
        while not self._stopping.is_set():
            if (found := self._queue.get(POLL_S)) is not None:
                preview, frame = found
                jpeg, captured_unix_ns = frame.jpeg, self._unix_ns(frame.t_capture_ns)
                self._send(msgspec.structs.replace(preview, captured_unix_ns=captured_unix_ns), jpeg)


class _Counters:
    """The running episode and its newest step, and faults and interventions of the safety kernel in this session.

    Attributes:
        faults: outages of the hardware; errors without a control period in between are of one outage.
        is_in_outage: no control period has passed since the last fault.
        safety: control periods in which the kernel intervened, by reason.
        newest_safety: reasons of the safety kernel since the last status.
    """

    def __init__(self) -> None:
        self.episode, self.step, self.version, self.interventions = "", 0, NO_VERSION, 0
        self.phase = Phase.POLICY
        self.faults, self.is_in_outage = 0, False
        self.safety: Counter[str] = Counter()
        self.newest_safety = SafetyReason(0)
        self._hz, self._counted, self._counted_at_s = 0.0, 0, time.monotonic()

    def on_fault(self) -> None:
        self.faults += not self.is_in_outage
        self.is_in_outage = True

    def on_step(self, episode: str, time_step: TimeStep, selected: SelectedAction | None) -> None:
        self.is_in_outage = False
        self.safety.update(_names(SafetyReason(time_step.safety_reasons)))
        self.newest_safety |= SafetyReason(time_step.safety_reasons)
        self.safety["watchdog"] += time_step.held_periods
        if episode != self.episode:
            self.episode, self.step = episode, 0
        if selected is None:
            return
        self.step += 1
        self._counted += 1
        self.phase = selected.phase
        if selected.policy_version > NO_VERSION:  # also not that of another run
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


def _names(reasons: SafetyReason) -> tuple[str, ...]:
    return tuple(str(reason.name).lower() for reason in reasons)


class _NewestPeriods:
    """The newest control periods with an action, for a console's traces, and the present `state`, if it is known."""

    def __init__(self) -> None:
        self.state: Array | None = None
        self._periods: deque[ControlPeriod] = deque(maxlen=MAX_PERIODS_PER_STATUS)
        self._captured_ns = 0  # of the observation that the next action is for

    def on_step(self, time_step: TimeStep, selected: SelectedAction | None, *, is_watched: bool) -> None:
        captured_ns, self._captured_ns = self._captured_ns, time_step.t_capture_ns
        self.state = time_step.observation.get(STATE)
        if selected is None or not is_watched:
            return
        self._periods.append(
            ControlPeriod(
                t_s=round(time_step.t_command_ns / 1e9, 4),
                requested=_rounded(selected.action),
                applied=() if time_step.applied is None else _rounded(time_step.applied),
                limits=time_step.safety_reasons,
                act_ms=_milliseconds(captured_ns, selected.t_inference_ns),
                apply_ms=_milliseconds(selected.t_inference_ns, time_step.t_command_ns),
            )
        )

    def take(self) -> tuple[ControlPeriod, ...]:
        """The periods since the last call, at most `MAX_PERIODS_PER_STATUS`."""
        taken = tuple(self._periods)
        self._periods.clear()
        return taken


def _rounded(action: Array) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in action)


def _milliseconds(from_ns: int, to_ns: int) -> float:
    return round(max(0, to_ns - from_ns) / 1e6, 2) if from_ns else 0.0


class StatusSource(Protocol):
    """The session as the status publisher reads it."""

    @property
    def episode(self) -> str:
        """The running episode; empty before the first."""

    @property
    def promised(self) -> Array:
        """The predicted actions (n, a) from the next control period on."""

    @property
    def task(self) -> str:
        """The name of its task."""

    def status_note(self) -> str:
        """A sentence for operators; empty if there is nothing to report."""

    def weights_scalars(self) -> dict[str, float]:
        """Metrics of the policy, its weights and its action chunks, by name."""


class StatusPublisher(StartedAtEntry):
    """Sends a robot's status a few times a second, its metrics, and previews while a console requests them.

    It is a listener of the episode loop. Previews and the link to a console on this computer need its context.

    Attributes:
        previews, local_previews: send camera previews to the gateway, and to a console on this computer.
    """

    def __init__(
        self,
        robot: str,
        client: TunnelClient,
        outbox: Outbox,
        authority: ControlAuthority,
        source: StatusSource,
        refused_realtime: str,
        local: LocalLink | None = None,
    ) -> None:
        self._robot, self._client, self._outbox, self._authority = robot, client, outbox, authority
        self._source, self._refused_realtime = source, refused_realtime
        self.previews = PreviewSender(robot, client.send_preview, self._gateway_unix_ns)
        self._local = local or LocalLink("", lambda message, payload: None)
        self.local_previews = PreviewSender(robot, self._local.send)
        self._stack = ExitStack()
        self._steps, self._periods = _Counters(), _NewestPeriods()
        self._next_status_s = self._next_metrics_s = 0.0
        self._published_state: ControlState | None = None

    def on_step(self, time_step: TimeStep, selected: SelectedAction | None) -> None:
        """A control period has passed. `selected` is None if the robot held."""
        self._steps.on_step(self._source.episode, time_step, selected)
        now_s = time.monotonic()
        is_watched = self.previews.is_watched(now_s) or self.local_previews.is_watched(now_s)
        self._periods.on_step(time_step, selected, is_watched=is_watched)
        if now_s >= self._next_status_s or self._authority.state is not self._published_state:
            self._next_status_s = now_s + (POSE_PERIOD_S if self._sends_pose(now_s) else STATUS_PERIOD_S)
            self.publish(real_time=selected is None or selected.phase is not Phase.POLICY)
        if now_s >= self._next_metrics_s:
            self._next_metrics_s = now_s + METRICS_PERIOD_S
            self._client.send(MetricsReport(node=self._robot, scalars=self._scalars()))
        self.previews.on_step(time_step, self._steps.step, now_s)
        self.local_previews.on_step(time_step, self._steps.step, now_s)

    def on_fault(self) -> None:
        """The hardware failed. The retries of one outage count as one fault."""
        self._steps.on_fault()
        self._periods.state = None
        self.publish()

    def on_reset_wait(self) -> None:
        """The driver resets the robot, which may take long. A console shows a robot without a status as lost."""
        self._periods.state = None
        if (now_s := time.monotonic()) >= self._next_status_s:
            self._next_status_s = now_s + STATUS_PERIOD_S
            self.publish(resets=True)

    def send(self, message: RobotStatus | EpisodeReport | OperatorReply) -> None:
        """Sends a report to the gateway, and to a console on this computer."""
        self._client.send(message)
        self._local.send(message)

    def start(self) -> None:
        for each in (self.previews, self.local_previews, self._local):
            self._stack.enter_context(each)

    def close(self) -> None:
        self._stack.close()

    def publish(self, *, real_time: bool = False, resets: bool = False) -> None:
        """Sends the status now."""
        self._published_state = self._authority.state
        state = self._periods.state if self._sends_pose(time.monotonic()) else None
        self.send(
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
                faults=self._steps.faults,
                note=self._source.status_note()[:MAX_NOTE_CHARS],
                requested_by=self._authority.requested_by,
                help=self._authority.help_reason[:MAX_HELP_CHARS],
                awaits_reset=self._authority.awaits_reset,
                resets=resets,
                tool_speed=self._authority.tool_drive.speed,
                tool_refusal=self._authority.tool_drive.refusal[:MAX_HELP_CHARS],
                limits=_names(self._steps.newest_safety),
                task=self._source.task,
                periods=self._periods.take(),
                state=() if state is None else _rounded(state),
                promised=() if state is None else self._promised(MAX_POSE_VALUES - len(state)),
            )
        )
        self._steps.newest_safety = SafetyReason(0)

    def _promised(self, max_values: int) -> tuple[tuple[float, ...], ...]:
        """The next predicted actions, at most `MAX_PROMISED`; the gateway counts each of them as a value too."""
        actions = self._source.promised[:MAX_PROMISED]
        return tuple(map(_rounded, actions[: max(0, max_values) // (1 + actions.shape[-1])]))

    def _gateway_unix_ns(self, t_monotonic_ns: int) -> int:
        clock = self._client.clock
        return 0 if clock is None else clock.gateway_unix_ns(t_monotonic_ns)

    def _sends_pose(self, now_s: float) -> bool:
        return self.previews.sends_pose(now_s) or self.local_previews.sends_pose(now_s)

    def _scalars(self) -> dict[str, float]:
        safety = {f"safety_{name}": float(count) for name, count in sorted(self._steps.safety.items()) if count}
        return self._client.scalars() | self._outbox.scalars() | self._source.weights_scalars() | safety


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


class SessionReporter(ThreadedService):
    """Writes a `SessionReport` to a file in the runtime folder once a second.

    ``user-sys edge``, which supervises the session, reads it. Any thread may set `activity`. A file that cannot be
    written is logged once, and written again a second later.
    """

    def __init__(self, robot: str, client: TunnelClient, outbox: Outbox) -> None:
        super().__init__("report", CLOSE_TIMEOUT_S)
        self.activity: SessionActivity = "waiting for its lease"
        self._path, self._client, self._outbox = session_report_path(robot), client, outbox
        self._has_failed = False

    def _work(self) -> None:
        self._write()
        while not self._stopping.is_set():
            self._stopping.wait(REPORT_PERIOD_S)
            self._write()  # also after the end: it counts the chunks that are left

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
        try:
            fresh.write_bytes(msgspec.json.encode(report))
            fresh.replace(self._path)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                log.warning("session.report_failed path=%s: %s", self._path, error)
            self._has_failed = True


def read_session_report(robot: str, pid: int | None) -> SessionReport | None:
    """The newest report of the session that runs as `pid`; None before its first."""
    try:
        report = msgspec.json.decode(session_report_path(robot).read_bytes(), type=SessionReport)
    except (FileNotFoundError, *DECODE_ERRORS):
        return None
    return report if report.pid == pid else None


def session_report_path(robot: str) -> Path:
    return runtime_folder() / f"{robot}.session.json"
