"""The state of a run for operators, which the tunnel updates and pages read. Also sends operators' orders."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from hal.spec import RobotSpec
from user_sys.codec import jpeg_size
from user_sys.episode import EpisodeSource
from user_sys.errors import AuthorityError, WireError
from user_sys.messages import (
    EpisodeReport,
    MetricsReport,
    OperatorCommand,
    OperatorReply,
    Preview,
    PreviewRequest,
    RobotStatus,
)

MAX_POINTS = 240
SUCCESS_WINDOW = 20
STATUS_TIMEOUT_S = 3.0
MAX_ROBOTS = 64
MAX_CAMERAS_PER_ROBOT = 8  # of one robot
MAX_NODES = 64
MAX_CURVES = 64
MAX_JPEG_BYTES = 4 << 20
LEARNER_PREFIX = "learner"  # of the names of nodes whose count is the number of updates

OperatorOrder = Literal["take-over", "drive", "release", "hand-back", "success", "failure", "reset", "e-stop", "re-arm"]
HubMessage = RobotStatus | EpisodeReport | MetricsReport | OperatorReply

_log = logging.getLogger(__name__)


class CurveView(msgspec.Struct, frozen=True):
    """A curve at one moment: points in order of x."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


class Curve:
    """At most `max_points` points (x, y) with ascending x. A full curve averages pairs of neighbours.

    The newest point is always in the view. One thread calls it at a time.
    """

    def __init__(self, name: str, max_points: int = MAX_POINTS) -> None:
        self.name = name
        self._max_points = max_points
        self._points: list[tuple[float, float]] = []
        self._stride = 1
        self._pending: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        self._pending.append((x, y))
        if len(self._pending) < self._stride:
            return
        self._points.append(_mean(self._pending))
        self._pending.clear()
        if len(self._points) >= self._max_points:
            self._points = [_mean(self._points[i : i + 2]) for i in range(0, len(self._points), 2)]
            self._stride *= 2

    def view(self) -> CurveView:
        points = self._points + self._pending[-1:]
        return CurveView(self.name, tuple(x for x, _ in points), tuple(y for _, y in points))


class MovingAverage:
    """The share of True among the newest `size` values."""

    def __init__(self, size: int = SUCCESS_WINDOW) -> None:
        self._values: deque[bool] = deque(maxlen=size)

    def add(self, value: bool) -> None:
        self._values.append(value)

    @property
    def value(self) -> float | None:
        """None before the first value."""
        return sum(self._values) / len(self._values) if self._values else None


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    n = len(points)
    return sum(x for x, _ in points) / n, sum(y for _, y in points) / n


class RobotView(msgspec.Struct, frozen=True):
    """One robot at one moment.

    Attributes:
        status: None before its first report.
        lost: it has reported, but not within `STATUS_TIMEOUT_S`.
        last: the report of its newest finished episode.
        silent_s: time since its newest report, or since the hub was created if it has not reported.
    """

    name: str
    status: RobotStatus | None
    lost: bool
    cameras: tuple[str, ...]
    last: EpisodeReport | None
    silent_s: float


class RunView(msgspec.Struct, frozen=True):
    """The run at one moment.

    Attributes:
        elapsed_s: duration of the run, earlier launches included.
        training_s, budget_s: training time of the first learner, by its newest report, and its limit.
        env_steps, episodes, interventions: of online episodes; an intervention is an episode with steps of a person.
        updates: of the learner.
        success: share of successes among the newest online episodes without a person's steps; None before the first.
        helped: share of the newest online episodes with a person's steps; None before the first.
        metrics: newest scalars by node.
        warning: a problem that a person should fix; empty if there is none.
    """

    run: str
    elapsed_s: float
    training_s: float
    budget_s: float
    env_steps: int
    episodes: int
    interventions: int
    updates: int
    success: float | None
    helped: float | None
    robots: tuple[RobotView, ...]
    metrics: dict[str, dict[str, float]]
    warning: str


@dataclass(frozen=True)
class PreviewImage:
    """A camera's newest frame. `serial` grows with each frame of the hub."""

    robot: str
    camera: str
    step: int
    serial: int
    jpeg: bytes


@dataclass
class _Robot:
    name: str
    spec: RobotSpec | None
    status: RobotStatus | None = None
    last_seen_s: float = -math.inf
    last: EpisodeReport | None = None
    pictures: dict[str, PreviewImage] = field(default_factory=dict)


class _RunStatistics:
    """Counts and curves of a run's episodes and metrics. The hub's lock guards it."""

    def __init__(self) -> None:
        self.env_steps = self.episodes = self.interventions = self.updates = 0
        self.success, self.helped = MovingAverage(), MovingAverage()
        self.metrics: dict[str, dict[str, float]] = {}
        self.curves: dict[str, Curve] = {}
        self._evaluation = MovingAverage()

    def add_episode(self, episode: EpisodeReport, elapsed_s: float) -> None:
        if episode.source == EpisodeSource.EVALUATION and episode.success is not None:
            self._evaluation.add(episode.success)
            self._add_point("evaluation", elapsed_s, self._evaluation.value or 0.0)
        if episode.source != EpisodeSource.ONLINE:
            return
        self.episodes += 1
        self.env_steps += episode.steps
        helped = episode.intervention_steps > 0
        self.interventions += helped
        self.helped.add(helped)
        self._add_point("helped", elapsed_s, self.helped.value or 0.0)
        if not helped:
            self.success.add(episode.success is True)
            self._add_point("success", elapsed_s, self.success.value or 0.0)

    def add_metrics(self, report: MetricsReport) -> None:
        if report.node not in self.metrics and len(self.metrics) >= MAX_NODES:
            raise WireError(f"{report.node[:80]!r} is one node too many: the console shows {MAX_NODES}")
        self.metrics.setdefault(report.node, {}).update(report.scalars)
        if report.node.startswith(LEARNER_PREFIX):
            self.updates = max(self.updates, report.count)
            for name, value in report.scalars.items():
                self._add_loss(f"{report.node}/{name}", report.count, value)

    def _add_loss(self, name: str, updates: int, value: float) -> None:
        if "loss" in name and (name in self.curves or len(self.curves) < MAX_CURVES):  # the metrics files have all
            self._add_point(name, updates, value)

    def _add_point(self, name: str, x: float, y: float) -> None:
        if math.isfinite(y):
            self.curves.setdefault(name, Curve(name)).add(x, y)


Listener = Callable[[HubMessage | PreviewImage], None]


class ConsoleHub:
    """The state of a run, for operators. Any thread may call any method; each returns at once."""

    def __init__(
        self,
        run: str,
        send: Callable[[OperatorCommand | PreviewRequest], object],
        robots: Mapping[str, RobotSpec] | None = None,
        budget_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        run: name of the run.
        send: passes an order to the tunnel. It must be thread-safe and must not block. It returns False if the order
            cannot be sent now. Its errors reach the caller.
        robots: the expected robots and their specs; other robots are added when they report.
        budget_s: the learners' limit of training time; 0 if there is none.
        clock: monotonic seconds.
        """
        self._run, self._send, self._budget_s, self._clock = run, send, budget_s, clock
        self._started_s = clock()
        self._previous_s = 0.0  # duration of earlier launches
        self._lock = threading.Lock()
        self._robots = {name: _Robot(name, spec) for name, spec in (robots or {}).items()}
        self._listeners: list[Listener] = []
        self._serial = 0
        # Starts at the wall clock, so that a restarted console's sequence continues above the earlier one's.
        self._sequence = itertools.count(time.time_ns())
        self._statistics = _RunStatistics()
        self._warning = ""

    def restore_history(self, episodes: int, env_steps: int, interventions: int, elapsed_s: float) -> None:
        """Sets the counts and the duration of earlier launches of a resumed run. Call it before any update."""
        with self._lock:
            statistics = self._statistics
            statistics.episodes, statistics.env_steps = episodes, env_steps
            statistics.interventions = interventions
            self._previous_s = elapsed_s

    def update(self, message: HubMessage) -> None:
        """Applies one message, and calls the listeners in the caller's thread."""
        with self._lock:
            match message:
                case RobotStatus():
                    robot = self._robot(message.robot)
                    robot.status, robot.last_seen_s = message, self._clock()
                case EpisodeReport():
                    self._add_episode(message)
                case MetricsReport():
                    self._statistics.add_metrics(message)
        self._notify(message)

    def set_warning(self, warning: str) -> None:
        """Shows a problem that a person should fix, in place of the previous one; empty shows none."""
        self._warning = warning

    def add_robot(self, robot: str) -> None:
        """Adds an expected robot without a spec. Raises WireError: too many robots."""
        with self._lock:
            self._robot(robot)

    def set_robot_spec(self, robot: str, spec: RobotSpec) -> None:
        """Sets the spec of a robot that the run did not expect. Raises WireError: too many robots."""
        with self._lock:
            self._robot(robot).spec = spec

    def update_preview(self, preview: Preview, jpeg: bytes) -> None:
        """Replaces a camera's frame.

        Raises:
            WireError: the frame is too large, declares too large a size, or is not a JPEG file; or too many cameras.
                The frame is then not stored, as browsers would decode it.
        """
        if len(jpeg) > MAX_JPEG_BYTES:
            raise WireError(f"a picture of {len(jpeg)} bytes; at most {MAX_JPEG_BYTES} are shown")
        jpeg_size(jpeg)
        with self._lock:
            pictures = self._robot(preview.robot).pictures
            if preview.camera not in pictures and len(pictures) >= MAX_CAMERAS_PER_ROBOT:
                raise WireError(f"{preview.robot} sends pictures of more than {MAX_CAMERAS_PER_ROBOT} cameras")
            self._serial += 1
            picture = PreviewImage(preview.robot, preview.camera, preview.step, self._serial, jpeg)
            pictures[preview.camera] = picture
        self._notify(picture)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with each later message, in the updating thread. Returns the function that unsubscribes."""
        with self._lock:
            self._listeners = [*self._listeners, listener]

        def unsubscribe() -> None:
            with self._lock:
                self._listeners = [other for other in self._listeners if other is not listener]

        return unsubscribe

    def view(self) -> RunView:
        with self._lock:
            now_s, statistics = self._clock(), self._statistics
            return RunView(
                run=self._run,
                elapsed_s=self._elapsed_s(),
                training_s=statistics.metrics.get(LEARNER_PREFIX, {}).get("training_s", 0.0),
                budget_s=self._budget_s,
                env_steps=statistics.env_steps,
                episodes=statistics.episodes,
                interventions=statistics.interventions,
                updates=statistics.updates,
                success=statistics.success.value,
                helped=statistics.helped.value,
                robots=tuple(self._robot_view(robot, now_s) for robot in self._robots.values()),
                metrics={node: dict(scalars) for node, scalars in statistics.metrics.items()},
                warning=self._warning,
            )

    def curves(self) -> tuple[CurveView, ...]:
        """``success``, ``helped`` and ``evaluation`` against seconds; ``<learner>/<loss>`` against its updates."""
        with self._lock:
            return tuple(curve.view() for curve in self._statistics.curves.values())

    def preview(self, robot: str, camera: str) -> PreviewImage | None:
        with self._lock:
            found = self._robots.get(robot)
            return found.pictures.get(camera) if found else None

    def send_order(
        self,
        robot: str,
        operator: str,
        order: OperatorOrder,
        twist: tuple[float, ...] = (),
        press: int = 0,
        address: str = "",
    ) -> None:
        """Sends an operator's order to a robot. The reply arrives as an `OperatorReply`.

        Args:
            press: identifies one press of the e-stop; a repeat has the same number.
            address: of the operator's browser, for the audit log.

        Raises:
            AuthorityError: there is no such robot, or no connection to the gateway.
        """
        self._require_robot(robot)
        if order not in ("drive", "e-stop"):
            _log.info("console.order robot=%s operator=%r order=%s", robot, operator, order)
        command = OperatorCommand(
            robot=robot,
            operator=operator,
            order=order,
            twist=twist,
            sequence=next(self._sequence),
            press=press,
            address=address,
        )
        if self._send(command) is False:
            raise AuthorityError("the console has no connection to the gateway")

    def send_drive(self, robot: str, operator: str, move: tuple[float, float, float], gripper: float) -> None:
        """Sends shares in [-1, 1]: of the tool's range along x, y, z; of the gripper's, +1 open, -1 closed, 0 same.

        Raises:
            AuthorityError: there is no such robot, or its tool cannot be moved along x, y and z.
        """
        self.send_order(robot, operator, "drive", _twist(self._require_robot(robot).spec, move, gripper))

    def request_previews(self, rate_hz: float, ttl_s: float) -> None:
        """Requests previews from every robot, for the next `ttl_s` seconds."""
        with self._lock:
            names = list(self._robots)
        for name in names:
            self._send(PreviewRequest(robot=name, rate_hz=rate_hz, ttl_s=ttl_s))

    def _require_robot(self, robot: str) -> _Robot:
        with self._lock:
            if robot not in self._robots:
                raise AuthorityError(f"no robot {robot[:80]!r} in this run; there are {sorted(self._robots)}")
            return self._robots[robot]

    def _notify(self, message: HubMessage | PreviewImage) -> None:  # without the lock: a listener may call the hub
        for listener in self._listeners:
            listener(message)

    # The lock is held from here on.

    def _elapsed_s(self) -> float:
        return self._previous_s + self._clock() - self._started_s

    def _robot(self, name: str) -> _Robot:
        if name not in self._robots and len(self._robots) >= MAX_ROBOTS:
            raise WireError(f"{name[:80]!r} is one robot too many: the console shows {MAX_ROBOTS}")
        return self._robots.setdefault(name, _Robot(name, None))

    def _robot_view(self, robot: _Robot, now_s: float) -> RobotView:
        lost = robot.status is not None and now_s - robot.last_seen_s > STATUS_TIMEOUT_S
        silent_s = now_s - max(robot.last_seen_s, self._started_s)
        return RobotView(robot.name, robot.status, lost, tuple(robot.pictures), robot.last, round(silent_s, 1))

    def _add_episode(self, episode: EpisodeReport) -> None:
        if episode.source == EpisodeSource.ONLINE and (robot := self._robots.get(episode.robot)):
            robot.last = episode
        self._statistics.add_episode(episode, self._elapsed_s())


def _twist(spec: RobotSpec | None, move: tuple[float, float, float], gripper: float) -> tuple[float, ...]:
    """One element for each action element; without a spec: x, y, z, gripper."""
    if spec is None:
        return (*move, gripper)
    if len(spec.tool_delta) != len(move):
        raise AuthorityError(f"{spec.model} has no tool that moves along x, y and z")
    twist = [0.0] * len(spec.action.labels)
    for index, share in zip(spec.tool_delta, move, strict=True):
        twist[index] = share
    if spec.gripper >= 0:
        twist[spec.gripper] = gripper
    return tuple(twist)
