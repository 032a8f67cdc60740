"""The state of a run for operators, which the tunnel updates and pages read. Also sends operators' orders."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from hal.registry import LOSS_TIMEOUT_S, OVERRIDDEN
from hal.resource import Health, Kind, ResourceRecord
from hal.spec import RobotSpec
from user_sys.codec import jpeg_size
from user_sys.console.progress import RobotView, RunProgress, RunView
from user_sys.episode import EpisodeSource
from user_sys.errors import AuthorityError, WireError
from user_sys.messages import (
    ControlPeriod,
    EpisodeReport,
    MetricsReport,
    OperatorCommand,
    OperatorOrder,
    OperatorReply,
    Preview,
    PreviewRequest,
    RobotStatus,
)
from user_sys.operator_overrides import overrides_of_run

MAX_ROBOTS = 64
MAX_CAMERAS_PER_ROBOT = 8  # of one robot
MAX_JPEG_BYTES = 4 << 20
MAX_PERIODS = 600  # of one robot, for traces
POSE_RATE_HZ = 10.0
LARGE_RATE_HZ, THUMBNAIL_RATE_HZ = 30.0, 10.0  # of a camera's pictures
MAX_PHASES = 200  # changes of phase in one episode
CAMERA_STALE_S = 5.0  # without a new picture for so long, though a page requests them

OverrideOrder = Literal["quarantine", "drain", "restore"]
HubMessage = RobotStatus | EpisodeReport | MetricsReport | OperatorReply

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShownCameras:
    """The cameras that a page shows.

    Attributes:
        large: the robots of which it shows all cameras; None for all robots.
        thumbnails: it shows the first camera of each other robot.
    """

    large: frozenset[str] | None = None
    thumbnails: bool = False

    def is_large(self, robot: str) -> bool:
        return self.large is None or robot in self.large


@dataclass(frozen=True)
class PreviewImage:
    """A camera's newest frame. `serial` grows with each frame of the hub; `captured_s` is by the hub's clock."""

    robot: str
    camera: str
    step: int
    captured_s: float
    serial: int
    jpeg: bytes


class RobotPose(msgspec.Struct, frozen=True):
    """See `RobotStatus.state` and `RobotStatus.promised`."""

    state: tuple[float, ...]
    promised: tuple[tuple[float, ...], ...]


@dataclass
class _Robot:
    name: str
    spec: RobotSpec | None
    status: RobotStatus | None = None
    record: ResourceRecord | None = None
    last_seen_s: float = -math.inf
    last: EpisodeReport | None = None
    pictures: dict[str, PreviewImage] = field(default_factory=dict)
    pictured_s: dict[str, float] = field(default_factory=dict)
    requested_s: dict[str, tuple[float, float]] = field(default_factory=dict)  # the first of a series, and the newest
    phases: list[tuple[int, str]] = field(default_factory=list)
    periods: deque[ControlPeriod] = field(default_factory=lambda: deque(maxlen=MAX_PERIODS))
    periods_seen: int = 0
    pose: RobotPose | None = None
    posed_s: float = -math.inf

    def set_status(self, status: RobotStatus, now_s: float) -> None:
        """Applies a status. Its control periods and its pose are kept apart, since it is shown many times."""
        if self.status is None or status.episode != self.status.episode or status.step < self.status.step:
            self.phases = []
        if not self.phases or self.phases[-1][1] != status.phase:
            since = 0 if not self.phases or self.status is None else min(self.status.step + 1, status.step)
            self.phases = [*self.phases[-MAX_PHASES:], (since, status.phase)]
        self.periods.extend(status.periods)
        self.periods_seen += len(status.periods)
        if status.state:
            self.pose, self.posed_s = RobotPose(state=status.state, promised=status.promised), now_s
        if status.resets:  # this time does not count as the age of a picture
            passed_s = now_s - self.last_seen_s
            self.pictured_s = {camera: min(at_s + passed_s, now_s) for camera, at_s in self.pictured_s.items()}
        self.status, self.last_seen_s = replace(status, periods=(), state=(), promised=()), now_s

    @property
    def cameras(self) -> tuple[str, ...]:
        """Those with a picture, in the spec's order: the first is the thumbnail."""
        order = [] if self.spec is None else [camera.name for camera in self.spec.cameras]
        return tuple(sorted(self.pictures, key=lambda name: order.index(name) if name in order else len(order)))

    @property
    def thumbnail(self) -> tuple[str, ...]:
        """The camera of the thumbnail; none if it is not known."""
        known = () if self.spec is None else tuple(camera.name for camera in self.spec.cameras)
        return (known or self.cameras)[:1]

    def request_pictures(self, cameras: tuple[str, ...], now_s: float) -> None:
        for camera in cameras or self.pictures:
            first_s, newest_s = self.requested_s.get(camera, (now_s, now_s))
            self.requested_s[camera] = (now_s if now_s - newest_s > CAMERA_STALE_S else first_s, now_s)


Listener = Callable[[HubMessage | PreviewImage], None]


class ConsoleHub:
    """The state of a run, for operators. Any thread may call any method; each returns at once.

    Attributes:
        progress: of the run, from the messages of `update`.
    """

    def __init__(
        self,
        run: str,
        send: Callable[[OperatorCommand | PreviewRequest], object],
        robots: Mapping[str, RobotSpec] | None = None,
        budget_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        folder: Path = Path(),
    ) -> None:
        """Args:
        run: name of the run.
        send: passes an order to the tunnel. It must be thread-safe and must not block. It returns False if the order
            cannot be sent now. Its errors reach the caller.
        robots: the expected robots and their specs; other robots are added when they report.
        budget_s: the learners' limit of training time; 0 if there is none.
        clock: monotonic seconds.
        folder: the run's, for messages and for orders about the use of robots.
        """
        self._run, self._send, self._budget_s, self._clock = run, send, budget_s, clock
        self._started_s, self._folder = clock(), folder
        self._lock = threading.Lock()
        self._robots = {name: _Robot(name, spec) for name, spec in (robots or {}).items()}
        self._listeners: list[Listener] = []
        self._serial = 0
        self._sequence = 0  # of the newest order
        self.progress = RunProgress(folder, clock)

    def update(self, message: HubMessage) -> None:
        """Applies one message, and calls the listeners in the caller's thread."""
        with self._lock:
            match message:
                case RobotStatus():
                    self._robot(message.robot).set_status(message, self._clock())
                case EpisodeReport():
                    self._add_episode(message)
                case MetricsReport():
                    self.progress.add_metrics(message)
        self._notify(message)

    def update_resource(self, record: ResourceRecord) -> None:
        """A robot or device was lost or found, or a person's order took a robot out of use or brought it back."""
        with self._lock:
            if record.kind is not Kind.ROBOT:
                self.progress.add_device(record)
            elif (robot := self._robots.get(record.name)) is not None:
                robot.record = record

    def add_robot(self, robot: str) -> None:
        """Adds an expected robot without a spec. Raises WireError: too many robots."""
        with self._lock:
            self._robot(robot)

    def set_robot_spec(self, robot: str, spec: RobotSpec) -> None:
        """Sets the spec of a robot that the run did not expect. Raises WireError: too many robots."""
        with self._lock:
            self._robot(robot).spec = spec

    def update_preview(self, preview: Preview, jpeg: bytes, age_s: float = 0.0) -> None:
        """Replaces a camera's frame by one that was captured `age_s` ago.

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
            now_s = self._clock()
            picture = PreviewImage(preview.robot, preview.camera, preview.step, now_s - age_s, self._serial, jpeg)
            pictures[preview.camera] = picture
            self._robot(preview.robot).pictured_s[preview.camera] = now_s
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
            now_s = self._clock()
            robots = tuple(self._robot_view(robot, now_s) for robot in self._robots.values())
            return self.progress.view(self._run, self._budget_s, robots, self._alarms(robots, now_s))

    def periods(self, robot: str, after: int) -> tuple[int, tuple[ControlPeriod, ...]]:
        """The control periods of a robot after the first `after` ones, and the number of all that it has reported.

        At most the newest `MAX_PERIODS`. Raises AuthorityError: there is no such robot.
        """
        found = self._require_robot(robot)
        with self._lock:
            newer = min(found.periods_seen - after, len(found.periods))
            return found.periods_seen, tuple(itertools.islice(found.periods, len(found.periods) - newer, None))

    def robot_spec(self, robot: str) -> RobotSpec | None:
        """None if it is not known. Raises AuthorityError: there is no such robot."""
        return self._require_robot(robot).spec

    def pose(self, robot: str) -> RobotPose | None:
        """The newest pose; None if it is older than `LOSS_TIMEOUT_S`. Raises AuthorityError: there is no such robot."""
        found = self._require_robot(robot)
        with self._lock:
            return found.pose if self._clock() - found.posed_s <= LOSS_TIMEOUT_S else None

    def request_pose(self, robot: str, ttl_s: float) -> None:
        """Requests poses of the robot, for the next `ttl_s` seconds. Raises AuthorityError: there is no such robot."""
        self._require_robot(robot)
        self._send(PreviewRequest(robot=robot, rate_hz=POSE_RATE_HZ, ttl_s=ttl_s, pose=True))

    def send_order(
        self,
        robot: str,
        operator: str,
        order: OperatorOrder,
        twist: tuple[float, ...] = (),
        tool: tuple[float, ...] = (),
        press: int = 0,
        address: str = "",
        rewind: bool = False,
        episode: str = "",
    ) -> None:
        """Sends an operator's order to a robot. The reply arrives as an `OperatorReply`.

        Args:
            twist, tool, rewind: of the order ``drive``.
            press: identifies one press of the e-stop; a repeat has the same number.
            address: of the operator's browser, for the audit log.
            episode: see `OperatorCommand`.

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
            tool=tool,
            rewind=rewind,
            sequence=self._next_sequence(),
            press=press,
            address=address,
            episode=episode,
        )
        if self._send(command) is False:
            raise AuthorityError("the console has no connection to the gateway")

    def _next_sequence(self) -> int:
        """The wall clock, so that robots can compare orders of different consoles; higher if it is set back."""
        with self._lock:
            self._sequence = max(self._sequence + 1, time.time_ns())
            return self._sequence

    def send_drive(
        self,
        robot: str,
        operator: str,
        move: tuple[float, float, float],
        gripper: float,
        *,
        rewind: bool = False,
        joint: int = -1,
    ) -> None:
        """Sends shares in [-1, 1]: of the tool's range along x, y, z; of the gripper's, +1 open, -1 closed, 0 same.

        With `rewind` the robot retraces its path of the episode, whatever the shares. With `joint` from 0 on, the first
        share moves that joint.

        Raises:
            AuthorityError: there is no such robot or joint, or its tool cannot be moved along x, y and z.
        """
        found = self._require_robot(robot)
        spec = found.spec
        twist: tuple[float, ...]
        tool: tuple[float, ...] = ()
        if rewind and spec is not None:
            twist = (0.0,) * len(spec.action.labels)
        elif joint >= 0:
            twist = _joint_twist(spec, joint, move[0], gripper)
        elif spec is not None and found.status is not None and found.status.tool_speed > 0:
            twist, tool = _still_twist(spec, gripper), move
        else:
            twist = _twist(spec, move, gripper)
        self.send_order(robot, operator, "drive", twist, tool, rewind=rewind)

    def override(self, robot: str, order: OverrideOrder, person: str, reason: str = "") -> None:
        """Quarantines, drains or restores a robot of the run; a running gateway applies it at once. Blocks for a sync.

        Raises:
            AuthorityError: there is no such robot.
            HalError: there is nothing to restore, or the overrides cannot be written.
        """
        self._require_robot(robot)
        overrides = overrides_of_run(self._folder)
        if order == "restore":
            overrides.clear_override(robot, person)
        else:
            overrides.set_override(robot, "quarantined" if order == "quarantine" else "draining", person, reason)

    def previews(self, shown: ShownCameras) -> list[PreviewImage]:
        """The newest frame of each camera that a page shows."""
        with self._lock:
            return [
                robot.pictures[camera]
                for robot in self._robots.values()
                for camera in (robot.cameras if shown.is_large(robot.name) else robot.thumbnail * shown.thumbnails)
                if camera in robot.pictures
            ]

    def newest(self, picture: PreviewImage) -> PreviewImage:
        """The newest frame of the same camera."""
        with self._lock:
            return self._robots[picture.robot].pictures[picture.camera]

    def age_s(self, picture: PreviewImage) -> float:
        """Seconds since its capture."""
        return self._clock() - picture.captured_s

    def request_previews(self, pages: Sequence[ShownCameras], ttl_s: float) -> None:
        """Requests previews of the cameras that pages show, for the next `ttl_s` seconds."""
        requests = []
        with self._lock:
            for robot in self._robots.values():
                if is_large := any(page.is_large(robot.name) for page in pages):
                    cameras: tuple[str, ...] = ()
                elif any(page.thumbnails for page in pages):
                    cameras = robot.thumbnail
                else:
                    continue
                robot.request_pictures(cameras, self._clock())
                rate_hz = LARGE_RATE_HZ if is_large else THUMBNAIL_RATE_HZ
                requests.append(PreviewRequest(robot=robot.name, rate_hz=rate_hz, ttl_s=ttl_s, cameras=cameras))
        for request in requests:
            self._send(request)

    def _require_robot(self, robot: str) -> _Robot:
        with self._lock:
            if robot not in self._robots:
                raise AuthorityError(f"no robot {robot[:80]!r} in this run; there are {sorted(self._robots)}")
            return self._robots[robot]

    def _notify(self, message: HubMessage | PreviewImage) -> None:  # without the lock: a listener may call the hub
        for listener in self._listeners:
            listener(message)

    # The lock is held from here on.

    def _robot(self, name: str) -> _Robot:
        if name not in self._robots and len(self._robots) >= MAX_ROBOTS:
            raise WireError(f"{name[:80]!r} is one robot too many: the console shows {MAX_ROBOTS}")
        return self._robots.setdefault(name, _Robot(name, None))

    def _alarms(self, robots: tuple[RobotView, ...], now_s: float) -> Iterator[str]:
        """Lost robots, and cameras without new pictures while a page requests them.

        The session of a robot that is out of use waits for its lease and sends no report.
        """
        if lost := [robot.name for robot in robots if robot.lost and robot.health not in OVERRIDDEN]:
            yield f"no report from {', '.join(lost)}: check the robot's computer and its network"
        for robot in robots:
            found = self._robots[robot.name]
            for camera, at_s in found.pictured_s.items():
                first_s, newest_s = found.requested_s.get(camera, (now_s, now_s))
                age_s = now_s - max(at_s, first_s)
                if age_s > CAMERA_STALE_S >= now_s - newest_s and not robot.lost:
                    yield f"no new picture of {robot.name}'s camera {camera} for {age_s:.0f} s"

    def _robot_view(self, robot: _Robot, now_s: float) -> RobotView:
        silent_s = now_s - max(robot.last_seen_s, self._started_s)
        lost = robot.status is not None and silent_s > LOSS_TIMEOUT_S
        if robot.status is None and robot.record is not None and robot.record.seen_unix_s:  # it was lost earlier
            lost, silent_s = True, max(silent_s, time.time() - robot.record.seen_unix_s)
        tool_speed = 0.0 if robot.status is None else robot.status.tool_speed
        return RobotView(
            name=robot.name,
            status=robot.status,
            lost=lost,
            cameras=robot.cameras,
            last=robot.last,
            silent_s=round(silent_s, 1),
            joints=() if robot.spec is None else tuple(robot.spec.action.labels[each] for each in _joints(robot.spec)),
            moves_tool=robot.spec is None or len(robot.spec.tool_delta) == 3 or tool_speed > 0,
            tool_speed=tool_speed or (0.0 if robot.spec is None else _tool_speed(robot.spec)),
            expects_cameras=None if robot.spec is None else bool(robot.spec.cameras),
            health=Health.READY if robot.record is None else robot.record.health,
            health_note="" if robot.record is None else robot.record.note,
            phases=tuple(robot.phases),
            latency_ms=robot.periods[-1].act_ms + robot.periods[-1].apply_ms if robot.periods else None,
        )

    def _add_episode(self, episode: EpisodeReport) -> None:
        if episode.source == EpisodeSource.ONLINE and (robot := self._robots.get(episode.robot)):
            robot.last = episode
        self.progress.add_episode(episode)


def _twist(spec: RobotSpec | None, move: tuple[float, float, float], gripper: float) -> tuple[float, ...]:
    """One element for each action element; without a spec: x, y, z, gripper."""
    if spec is None:
        return (*move, gripper)
    if len(spec.tool_delta) != len(move):
        raise AuthorityError(f"{spec.model} has no tool that moves along x, y and z")
    twist = list(_still_twist(spec, gripper))
    for index, share in zip(spec.tool_delta, move, strict=True):
        twist[index] = share
    return tuple(twist)


def _still_twist(spec: RobotSpec, gripper: float) -> tuple[float, ...]:
    """One element for each action element: only the gripper's is not 0."""
    return tuple(gripper if index == spec.gripper else 0.0 for index in range(len(spec.action.labels)))


def _tool_speed(spec: RobotSpec) -> float:
    """At the full share along the slowest axis while a person drives, m/s; 0 if its tool is not driven by steps."""
    slowest = min((spec.action.high[axis] for axis in spec.tool_delta), default=0.0)
    return slowest * spec.rate_hz * spec.limits.reduced_speed


def _joints(spec: RobotSpec) -> tuple[int, ...]:
    """The action's elements that move one joint each."""
    return spec.joint_target or spec.joint_delta


def _joint_twist(spec: RobotSpec | None, joint: int, share: float, gripper: float) -> tuple[float, ...]:
    """One element for each action element: `share` for the joint, and the gripper."""
    if spec is None or joint >= len(_joints(spec)):
        count = 0 if spec is None else len(_joints(spec))
        raise AuthorityError(f"the robot has {count} joints that can be driven one by one, and no joint {joint}")
    twist = list(_still_twist(spec, gripper))
    twist[_joints(spec)[joint]] = share
    return tuple(twist)
