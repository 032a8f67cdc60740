"""Tells the console what a robot is doing: its status a few times a second, and pictures while somebody watches."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from hal.safety import Reason
from user_sys.edge.authority import Authority, State
from user_sys.edge.driver import Tick
from user_sys.edge.outbox import Outbox
from user_sys.edge.previews import Previews
from user_sys.edge.recorder import Decision
from user_sys.episode import Phase
from user_sys.messages import MetricsReport, Preview, RobotStatus, WatchRequest
from user_sys.tunnel.client import TunnelClient
from user_sys.weights.records import NO_VERSION

STATUS_PERIOD_S = 0.2
LINK_PERIOD_S = 5.0
RATE_SMOOTHING = 0.6


class SafetyCounts:
    """How many control periods the safety kernel stepped in since the session started, by reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, tick: Tick) -> None:
        if tick.reasons:
            self._counts.update(str(reason.name).lower() for reason in Reason(tick.reasons))
        self._counts["watchdog"] += tick.held

    def scalars(self) -> dict[str, float]:
        """E.g. ``safety_workspace``; none for what never happened."""
        return {f"safety_{name}": float(count) for name, count in sorted(self._counts.items()) if count}


class StatusPublisher:
    """A subscriber of the episode loop; costs nothing between two due messages.

    `watch` may be called from another thread than `on_step`. Enter `previews` to have pictures made.
    """

    def __init__(
        self,
        robot: str,
        client: TunnelClient,
        outbox: Outbox,
        authority: Authority,
        episode: Callable[[], str],
        note: Callable[[], str],
        refused_realtime: str,
        weights: Callable[[], dict[str, float]],
    ) -> None:
        self._robot, self._client, self._outbox, self._authority = robot, client, outbox, authority
        self.faults = 0  # of the hardware, in this session
        self._running_episode, self._note, self._refused_realtime = episode, note, refused_realtime
        self.previews = Previews(client.offer_preview)
        self._weights_scalars = weights
        self._lock = threading.Lock()
        self._watched_until = self._picture_period_s = 0.0
        self._next_picture: dict[str, float] = {}
        self._next_status = self._next_link = 0.0
        self._state: State | None = None
        self._episode, self._step, self._version, self._interventions = "", 0, NO_VERSION, 0
        self._phase = Phase.POLICY
        self._hz, self._counted, self._counted_at = 0.0, 0, time.monotonic()
        self._safety = SafetyCounts()

    def watch(self, request: WatchRequest) -> None:
        """Somebody wants pictures for a while."""
        with self._lock:
            self._watched_until = time.monotonic() + min(request.ttl_s, 60.0)
            self._picture_period_s = 1.0 / min(max(request.rate_hz, 0.1), 60.0)

    def on_step(self, tick: Tick, decision: Decision | None) -> None:
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
            self._interventions += tick.reasons != 0
        now = time.monotonic()
        if now >= self._next_status or self._authority.state is not self._state:
            self._next_status = now + STATUS_PERIOD_S
            self.publish(real_time=decision is None or decision.phase is not Phase.POLICY)
        if now >= self._next_link:
            self._next_link = now + LINK_PERIOD_S
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

    def _show(self, tick: Tick, now: float) -> None:
        for camera, frame in tick.frames.items():
            if now >= self._next_picture.get(camera, 0.0):
                self._next_picture[camera] = now + self._picture_period_s
                self.previews.show(Preview(robot=self._robot, camera=camera, step=self._step), frame.image)
