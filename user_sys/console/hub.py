"""Curves that never grow: what a run looked like from its start to now, in a bounded number of points.

What the run looks like now: fed by the tunnel, read by the page and by the terminal, and the way orders go out.
"""

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


class CurveView(msgspec.Struct, frozen=True):
    """A curve at one moment: points in order of x."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


class Curve:
    """Points (x, y), x not falling. When full, neighbours are averaged pairwise and the resolution halves.

    The newest point is always among those shown. One thread calls it at a time.
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
    """The share of True among the newest `size` verdicts; None before the first."""

    def __init__(self, size: int = SUCCESS_WINDOW) -> None:
        self._verdicts: deque[bool] = deque(maxlen=size)

    def add(self, verdict: bool) -> None:
        self._verdicts.append(verdict)

    @property
    def value(self) -> float | None:
        return sum(self._verdicts) / len(self._verdicts) if self._verdicts else None


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    n = len(points)
    return sum(x for x, _ in points) / n, sum(y for _, y in points) / n


ROBOT_TIMEOUT_S = 3.0
MAX_ROBOTS = 64
MAX_CAMERAS = 8  # of one robot
MAX_NODES = 64
MAX_CURVES = 64
MAX_JPEG_BYTES = 4 << 20
LEARNER_PREFIX = "learner"  # how the names of nodes begin whose count is the number of updates

OperatorOrder = Literal["take-over", "drive", "release", "hand-back", "success", "failure", "reset", "e-stop", "re-arm"]
HubMessage = RobotStatus | EpisodeReport | MetricsReport | OperatorReply

_log = logging.getLogger(__name__)


class RobotView(msgspec.Struct, frozen=True):
    """One robot at one moment.

    Attributes:
        status: None until it has reported.
        lost: it has reported, and is silent now.
        last: how its newest finished episode went.
        silent_s: since its newest report, or since the hub was made where there is none.
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
        elapsed_s: how long the run has gone on, earlier launches included.
        training_s, budget_s: how long its first learner has trained, as that last reported, and is to train.
        env_steps, episodes, interventions: of online episodes; an intervention is an episode a person touched.
        updates: of the learner.
        success: share of successes among the newest online episodes without a person's help; None before the first.
        helped: share of the newest online episodes that a person helped; None before the first.
        metrics: node to its newest scalars.
        warning: what a person should mend now; empty if there is nothing.
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
    """One camera's newest frame; `serial` grows with each frame that the hub was fed."""

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


Listener = Callable[[HubMessage | PreviewImage], None]


class ConsoleHub:
    """The state of a run, for people. Every method may be called from any thread and returns at once.

    Args:
        run: name of the run.
        send: hands an order to the tunnel; must be thread-safe and must not block. It returns False if the order cannot
            be sent now. What it raises reaches the caller.
        robots: the robots that the run expects, with their specs; others are added as they report.
        budget_s: for how long its learners are to train; 0 where nobody says.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        run: str,
        send: Callable[[OperatorCommand | PreviewRequest], object],
        robots: Mapping[str, RobotSpec] | None = None,
        budget_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._send = send
        self._budget_s = budget_s
        self._clock = clock
        self._started_s = clock()
        self._before_s = 0.0  # what earlier launches took
        self._lock = threading.Lock()
        self._robots = {name: _Robot(name, spec) for name, spec in (robots or {}).items()}
        self._listeners: list[Listener] = []
        self._serial = 0
        # Seeded by the wall clock: a console that restarts goes on counting above what it sent before.
        self._sequence = itertools.count(time.time_ns())
        self._env_steps = self._episodes = self._interventions = self._updates = 0
        self._success, self._helped, self._evaluation = MovingAverage(), MovingAverage(), MovingAverage()
        self._metrics: dict[str, dict[str, float]] = {}
        self._warning = ""
        self._curves: dict[str, Curve] = {}

    def restore_history(self, episodes: int, env_steps: int, interventions: int, elapsed_s: float) -> None:
        """What earlier launches of a run that is resumed did, and how long they went on; before anything is fed."""
        with self._lock:
            self._episodes, self._env_steps, self._interventions = episodes, env_steps, interventions
            self._before_s = elapsed_s

    def update(self, report: HubMessage) -> None:
        """Takes in one message and tells the listeners, in the caller's thread."""
        with self._lock:
            match report:
                case RobotStatus():
                    self._feed_status(report)
                case EpisodeReport():
                    self._feed_episode(report)
                case MetricsReport():
                    self._feed_metrics(report)
        self._tell(report)

    def set_warning(self, warning: str) -> None:
        """Shows what a person should mend now, in place of what was shown before; empty if there is nothing."""
        self._warning = warning

    def add_robot(self, robot: str) -> None:
        """Says that a robot is to come in of which nothing else is known. Raises WireError: one robot too many."""
        with self._lock:
            self._robot(robot)

    def set_robot_spec(self, robot: str, spec: RobotSpec) -> None:
        """Says what a robot is that the run did not expect. Raises WireError: one robot too many."""
        with self._lock:
            self._robot(robot).spec = spec

    def update_preview(self, preview: Preview, jpeg: bytes) -> None:
        """Takes in a camera's frame in the place of its former one.

        Raises:
            WireError: the frame is too large, claims to be, or is no JPEG file, or one camera too many; nothing was
                kept: what browsers are shown they also unpack.
        """
        if len(jpeg) > MAX_JPEG_BYTES:
            raise WireError(f"a picture of {len(jpeg)} bytes; at most {MAX_JPEG_BYTES} are shown")
        jpeg_size(jpeg)
        with self._lock:
            pictures = self._robot(preview.robot).pictures
            if preview.camera not in pictures and len(pictures) >= MAX_CAMERAS:
                raise WireError(f"{preview.robot} sends pictures of more than {MAX_CAMERAS} cameras")
            self._serial += 1
            picture = PreviewImage(preview.robot, preview.camera, preview.step, self._serial, jpeg)
            pictures[preview.camera] = picture
        self._tell(picture)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with everything fed from now on, in the feeding thread; returns the way to end it."""
        with self._lock:
            self._listeners = [*self._listeners, listener]

        def end() -> None:
            with self._lock:
                self._listeners = [other for other in self._listeners if other is not listener]

        return end

    def view(self) -> RunView:
        with self._lock:
            now_s = self._clock()
            return RunView(
                run=self._run,
                elapsed_s=self._before_s + now_s - self._started_s,
                training_s=self._metrics.get(LEARNER_PREFIX, {}).get("training_s", 0.0),
                budget_s=self._budget_s,
                env_steps=self._env_steps,
                episodes=self._episodes,
                interventions=self._interventions,
                updates=self._updates,
                success=self._success.value,
                helped=self._helped.value,
                robots=tuple(self._robot_view(robot, now_s) for robot in self._robots.values()),
                metrics={node: dict(scalars) for node, scalars in self._metrics.items()},
                warning=self._warning,
            )

    def curves(self) -> tuple[CurveView, ...]:
        """``success``, ``helped`` and ``evaluation`` against seconds; ``<learner>/<loss>`` against its updates."""
        with self._lock:
            return tuple(curve.view() for curve in self._curves.values())

    def preview(self, robot: str, camera: str) -> PreviewImage | None:
        with self._lock:
            known = self._robots.get(robot)
            return known.pictures.get(camera) if known else None

    def send_order(
        self,
        robot: str,
        operator: str,
        order: OperatorOrder,
        twist: tuple[float, ...] = (),
        press: int = 0,
        address: str = "",
    ) -> None:
        """Sends a person's order to a robot; the answer comes back as an `OperatorReply`.

        Args:
            press: names one press of the e-stop; a repeat has the same number.
            address: of the person's browser, for the audit log.

        Raises:
            AuthorityError: there is no such robot, or no connection to the gateway.
        """
        self._known(robot)
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
        """Sends shares in [-1, 1]: of the tool's range along x, y, z; of the gripper's, +1 open, -1 closed, 0 as it is.

        Raises:
            AuthorityError: there is no such robot, or it has no tool to move.
        """
        self.send_order(robot, operator, "drive", _twist(self._known(robot).spec, move, gripper))

    def request_previews(self, rate_hz: float, ttl_s: float) -> None:
        """Asks every robot for pictures, for the next `ttl_s` seconds."""
        with self._lock:
            names = list(self._robots)
        for name in names:
            self._send(PreviewRequest(robot=name, rate_hz=rate_hz, ttl_s=ttl_s))

    # From here on the lock is held, except where it says otherwise.

    def _known(self, robot: str) -> _Robot:  # takes the lock
        with self._lock:
            if robot not in self._robots:
                raise AuthorityError(f"no robot {robot[:80]!r} in this run; there are {sorted(self._robots)}")
            return self._robots[robot]

    def _tell(self, what: HubMessage | PreviewImage) -> None:  # without the lock: a listener may ask the hub
        for listener in self._listeners:
            listener(what)

    def _robot(self, name: str) -> _Robot:
        if name not in self._robots and len(self._robots) >= MAX_ROBOTS:
            raise WireError(f"{name[:80]!r} is one robot too many: the console shows {MAX_ROBOTS}")
        return self._robots.setdefault(name, _Robot(name, None))

    def _robot_view(self, robot: _Robot, now_s: float) -> RobotView:
        lost = robot.status is not None and now_s - robot.last_seen_s > ROBOT_TIMEOUT_S
        silent_s = now_s - max(robot.last_seen_s, self._started_s)
        return RobotView(robot.name, robot.status, lost, tuple(robot.pictures), robot.last, round(silent_s, 1))

    def _feed_status(self, status: RobotStatus) -> None:
        robot = self._robot(status.robot)
        robot.status, robot.last_seen_s = status, self._clock()

    def _feed_episode(self, episode: EpisodeReport) -> None:
        elapsed_s = self._before_s + self._clock() - self._started_s
        if episode.source == EpisodeSource.EVALUATION and episode.success is not None:
            self._evaluation.add(episode.success)
            self._point("evaluation", elapsed_s, self._evaluation.value or 0.0)
        if episode.source != EpisodeSource.ONLINE:
            return
        if robot := self._robots.get(episode.robot):
            robot.last = episode
        self._episodes += 1
        self._env_steps += episode.steps
        helped = episode.intervention_steps > 0
        self._interventions += helped
        self._helped.add(helped)
        self._point("helped", elapsed_s, self._helped.value or 0.0)
        if not helped:
            self._success.add(episode.success is True)
            self._point("success", elapsed_s, self._success.value or 0.0)

    def _feed_metrics(self, report: MetricsReport) -> None:
        if report.node not in self._metrics and len(self._metrics) >= MAX_NODES:
            raise WireError(f"{report.node[:80]!r} is one node too many: the console shows {MAX_NODES}")
        self._metrics.setdefault(report.node, {}).update(report.scalars)
        if report.node.startswith(LEARNER_PREFIX):
            self._updates = max(self._updates, report.count)
            for name, value in report.scalars.items():
                self._loss(f"{report.node}/{name}", report.count, value)

    def _loss(self, name: str, updates: int, value: float) -> None:
        if "loss" in name and (name in self._curves or len(self._curves) < MAX_CURVES):  # the metrics files have all
            self._point(name, updates, value)

    def _point(self, name: str, x: float, y: float) -> None:
        if math.isfinite(y):
            self._curves.setdefault(name, Curve(name)).add(x, y)


def _twist(spec: RobotSpec | None, move: tuple[float, float, float], gripper: float) -> tuple[float, ...]:
    """One element an action element; without a spec: x, y, z, gripper."""
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
