"""The options of an arm behind ros2_control, and the robot spec made from them and the robot description (URDF)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal
from xml.etree import ElementTree

import numpy as np
from msgspec import Meta

from hal.errors import HardwareLost, SpecError
from hal.settings import Positive
from hal.spec import ACTION, STATE, Array, ArraySpec, Box, RobotSpec, SafetyLimits
from robots.cameras import FrameConfig, camera_specs
from robots.reach_task import ReachConfig
from robots.ros2_node import RosNode

MAX_DESCRIPTION_BYTES = 8 << 20
_ROTARY, _LINEAR = ("revolute", "continuous"), ("prismatic",)
_FULL_TURN_RAD = 2 * math.pi  # either way, for a joint without end stops

DESCRIPTION_TIMEOUT_S = 10.0
TOOL_RANGE_M, FORCE_RANGE_N = 2.0, 200.0  # bounds of the state's elements, not limits
SPEED_RANGE = 3.0  # rad/s or m/s, of a joint whose description has no speed

ControllerKind = Literal["trajectory", "position"]
StampClock = Literal["shared", "robot", "arrival"]
"""The meaning of a header's stamp.

``shared``: the clocks of the robot and this computer are synchronised, as ROS expects. ``robot``: another clock, such
as that of an unsynchronised computer or a real-time simulation; its offset is that of the fastest recent message.
``arrival``: the stamp is ignored, and the arrival time counts.
"""


@dataclass(frozen=True)
class UrdfJoint:
    """One joint. `low`, `high` and `speed_max` are in rad and rad/s, or m and m/s for a prismatic joint. A missing
    limit is NaN.

    Attributes:
        kind: URDF's type: ``revolute``, ``continuous``, ``prismatic``, ``fixed``, ...
        origin: (4, 4), the joint's frame in its parent link's frame.
        axis: (3,), unit vector in the joint's frame.
    """

    name: str
    kind: str
    parent: str
    child: str
    origin: Array
    axis: Array
    low: float
    high: float
    speed_max: float

    @property
    def is_movable(self) -> bool:
        return self.kind in _ROTARY + _LINEAR

    def transform(self, value: float) -> Array:
        """(4, 4): the child link's frame in the parent link's frame, with the joint at `value`."""
        moved = np.eye(4)
        if self.kind in _ROTARY:
            moved[:3, :3] = _rotation(self.axis, value)
        elif self.kind in _LINEAR:
            moved[:3, 3] = self.axis * value
        result: Array = self.origin @ moved
        return result


class Urdf:
    """A parsed description.

    Attributes:
        joints: by name, in the description's order.
        root: the link without a parent joint.
    """

    def __init__(self, text: str) -> None:
        """Raises SpecError: not XML, not a URDF, too long, or with a DOCTYPE (entities are not expanded)."""
        if len(text) > MAX_DESCRIPTION_BYTES:
            raise SpecError(
                f"the robot's description has {len(text)} characters; at most {MAX_DESCRIPTION_BYTES} are allowed"
            )
        if "<!DOCTYPE" in text:
            raise SpecError("the robot's description has a DOCTYPE; remove it, a URDF has none")
        try:
            robot = ElementTree.fromstring(text)
            self.joints = {joint.name: joint for joint in map(_read_joint, robot.findall("joint"))}
        except (ElementTree.ParseError, ValueError) as error:
            raise SpecError(f"the robot's description is not a URDF: {error}") from None
        if robot.tag != "robot" or not self.joints:
            raise SpecError(f"the robot's description is not a URDF: <{robot.tag}> with {len(self.joints)} joints")
        self._above = {joint.child: joint for joint in self.joints.values()}
        self.root = next((j.parent for j in self.joints.values() if j.parent not in self._above), "")

    def joint(self, name: str) -> UrdfJoint:
        """Raises SpecError for an unknown joint, or one that does not move."""
        if name not in self.joints or not self.joints[name].is_movable:
            movable = [joint.name for joint in self.joints.values() if joint.is_movable]
            raise SpecError(f"the robot's description has no movable joint {name!r}; choose one of {movable}")
        return self.joints[name]

    def chain(self, link: str, base: str = "") -> KinematicChain:
        """The joints between `base` (default: the root) and `link`.

        Raises:
            SpecError: there is no such link, or it is not connected to the base.
        """
        base = base or self.root
        joints: list[UrdfJoint] = []
        at = link
        while at != base:
            if at not in self._above or len(joints) > len(self.joints):
                raise SpecError(f"link {link!r} is not connected to {base!r}; the links are {sorted(self._above)}")
            joints.append(self._above[at])
            at = joints[-1].parent
        return KinematicChain(tuple(reversed(joints)))


@dataclass(frozen=True)
class KinematicChain:
    """The joints from a base to a link, including fixed ones."""

    joints: tuple[UrdfJoint, ...]

    @property
    def movable_joints(self) -> tuple[str, ...]:
        return tuple(joint.name for joint in self.joints if joint.is_movable)

    def pose(self, values: Mapping[str, float]) -> Array:
        """(4, 4) float64: the link's frame in the base's frame. `values` has every movable joint's position, in rad or
        m."""
        pose: Array = np.eye(4)
        for joint in self.joints:
            pose = pose @ joint.transform(values[joint.name] if joint.is_movable else 0.0)
        return pose


def _read_joint(element: ElementTree.Element) -> UrdfJoint:
    def text(tag: str, attribute: str, otherwise: str | None = None) -> str:
        found = element if not tag else element.find(tag)
        given = otherwise if found is None else found.get(attribute, otherwise)
        if not given:
            raise ValueError(f"a joint without {attribute}")
        return given

    def vector(tag: str, attribute: str, otherwise: str) -> Array:
        values = tuple(map(float, text(tag, attribute, otherwise).split()))
        if len(values) != 3 or not all(map(math.isfinite, values)):
            raise ValueError(f"{attribute}={values} is not three numbers")
        return np.array(values)

    kind, axis, transform = text("", "type"), vector("axis", "xyz", "1 0 0"), np.eye(4)
    roll, pitch, yaw = vector("origin", "rpy", "0 0 0")  # about the fixed x, then y, then z axis
    x, y, z = np.eye(3)
    transform[:3, :3] = _rotation(z, yaw) @ _rotation(y, pitch) @ _rotation(x, roll)
    transform[:3, 3] = vector("origin", "xyz", "0 0 0")
    # URDF's default for a missing bound of a limit is 0; a joint without a limit gets NaN
    absent, endless = "nan" if element.find("limit") is None else "0", kind == "continuous"
    return UrdfJoint(
        name=text("", "name"),
        kind=kind,
        parent=text("parent", "link"),
        child=text("child", "link"),
        origin=transform,
        axis=axis / max(float(np.linalg.norm(axis)), 1e-12),
        low=-_FULL_TURN_RAD if endless else float(text("limit", "lower", absent)),
        high=_FULL_TURN_RAD if endless else float(text("limit", "upper", absent)),
        speed_max=float(text("limit", "velocity", "nan")),
    )


def _rotation(axis: Array, angle_rad: float) -> Array:
    """Rodrigues' formula."""
    x, y, z = axis
    cross: Array = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    result: Array = np.eye(3) + math.sin(angle_rad) * cross + (1 - math.cos(angle_rad)) * (cross @ cross)
    return result


@dataclass(frozen=True)
class JointLimits:
    """rad and rad/s (m and m/s for a prismatic joint); None: the description's limit, the speed times `speed_share`."""

    low: float | None = None
    high: float | None = None
    speed_max: float | None = None


@dataclass(frozen=True)
class GripperConfig:
    """A gripper with one joint and its own controller; `low` and `high` bound its position, m or rad."""

    joint: str
    low: float
    high: float
    controller: str = "gripper_controller"
    kind: ControllerKind = "position"


@dataclass(frozen=True)
class WrenchConfig:
    """Attributes:
    topic: of type geometry_msgs/msg/WrenchStamped.
    force_max: N; above it the safety kernel stops the arm.
    of_tool: the sensor measures the tool's force on the environment; the state has the opposite force.
    """

    topic: str = "/force_torque_sensor_broadcaster/wrench"
    force_max: float | None = None
    of_tool: bool = False


@dataclass(frozen=True, kw_only=True)
class RosCameraConfig(FrameConfig):
    """A camera topic. `kind`: ``raw`` is sensor_msgs/msg/Image, ``compressed`` sensor_msgs/msg/CompressedImage."""

    topic: str
    kind: Literal["raw", "compressed"] = "raw"


@dataclass(frozen=True)
class Ros2Config:
    """Attributes:
    joints: the arm's joints in the order of the policy; ROS messages are matched by name.
    controller: its name, including a namespace.
    kind: ``trajectory`` is a joint trajectory controller, ``position`` a forward controller of positions.
    description: source of the URDF: a file, ``topic:/robot_description``, or ``parameter:/NODE``. The latter two are
    read from the ROS graph when the robot is made.
    limits: by joint name or pattern; they override the description.
    speed_share: share of the description's speed limits for commands.
    acceleration_max: of each joint, rad/s^2.
    tool, base: links of the description; with `tool` the state has its position in the base's frame (default: the
    root).
    workspace, keep_out: boxes for the tool, m in the base frame; the safety kernel stops an arm that leaves or enters
    them.
    velocities: the joint states have velocities.
    home: target of a reset, one position for each of `joints`; if empty, a person moves the robot.
    manager: the controller manager. If empty, no service is used: controllers are not queried, switched or monitored.
    activate: the first command activates an inactive controller; otherwise a person does, before the connection.
    instead_of: controllers that are deactivated when this one is activated.
    estop_topic: std_msgs/msg/Bool, true while a stop button of the cell is pressed. The publisher is transient local or
    repeats it.
    estop_timeout_s: the robot is lost after this time without a message on `estop_topic`; needs a publisher that
    repeats it. 0 for no timeout. Without a publisher the robot is lost in any case.
    stop_service: std_srvs/srv/Trigger, also called by a safe stop.
    clock: the meaning of message stamps, see `StampClock`.
    domain: ROS 2 domain; default: ``ROS_DOMAIN_ID``.
    connect_s: timeout for connecting.
    stale_after_s: default: two control periods.
    lost_after_s: the robot is lost after this time without a joint state.
    """

    joints: tuple[str, ...]
    controller: str = "joint_trajectory_controller"
    kind: ControllerKind = "trajectory"
    model: str = "ros2_arm"
    rate_hz: Positive = 20.0
    description: str = ""
    limits: dict[str, JointLimits] = field(default_factory=dict)
    speed_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
    acceleration_max: float | None = None
    tool: str = ""
    base: str = ""
    workspace: Box | None = None
    keep_out: tuple[Box, ...] = ()
    gripper: GripperConfig | None = None
    wrench: WrenchConfig | None = None
    cameras: dict[str, RosCameraConfig] = field(default_factory=dict)
    joint_states: str = "/joint_states"
    velocities: bool = True
    home: tuple[float, ...] = ()
    manager: str = "/controller_manager"
    activate: bool = True
    instead_of: tuple[str, ...] = ()
    estop_topic: str = ""
    estop_timeout_s: Annotated[float, Meta(ge=0)] = 0.0
    stop_service: str = ""
    clock: StampClock = "shared"
    domain: int | None = None
    connect_s: Positive = 10.0
    stale_after_s: Positive | None = None
    lost_after_s: Positive = 1.0
    reduced_speed: float = 0.25
    sentence: str = ""
    max_steps: int = 3000
    reach: ReachConfig = field(default_factory=ReachConfig)

    def __post_init__(self) -> None:
        if not self.joints or len(set(self.joints)) != len(self.joints):
            raise ValueError(f"joints must name each joint once; they are {list(self.joints)}")
        if self.estop_timeout_s and not self.estop_topic:
            raise ValueError("estop_timeout_s needs an estop_topic")
        kinds = {self.kind} | ({self.gripper.kind} if self.gripper else set())
        if not self.manager and "position" in kinds:
            raise ValueError("a forward controller needs its `manager`, which returns the order of its joints")
        if self.tool and not self.description:
            raise ValueError("tool is a link of the description: set `description`")

    @property
    def stale_s(self) -> float:
        return self.stale_after_s or 2 / self.rate_hz

    @property
    def commanded_joints(self) -> tuple[str, ...]:
        """All commanded joints: the arm's, then the gripper's."""
        return self.joints if self.gripper is None else (*self.joints, self.gripper.joint)


@dataclass(frozen=True)
class Ros2Layout:
    """The spec, and what the driver needs to fill its state.

    Attributes:
        tool: the joints from the base to the tool; None if the state has no tool position.
    """

    spec: RobotSpec
    urdf: Urdf | None
    tool: KinematicChain | None


def read_description(config: Ros2Config, name: str) -> Urdf | None:
    """Read the robot's description, if the config names one. Blocks up to `DESCRIPTION_TIMEOUT_S` if it is in the ROS
    graph.

    Raises:
        SpecError: the file cannot be read, or the text is not a URDF.
        HardwareLost: the ROS graph has none.
    """
    source, _, place = config.description.partition(":")
    if not config.description:
        return None
    if source not in ("topic", "parameter"):
        try:
            return Urdf(Path(config.description).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"robot {name}: the description cannot be read: {error}") from None
    ros_node, texts = RosNode(f"describe_{name}", config.domain), list[Any]()
    ros_node.open()
    try:
        if source == "parameter":
            texts.append(ros_node.read_parameters(place, ["robot_description"], DESCRIPTION_TIMEOUT_S))
            if "robot_description" not in texts[0]:
                raise HardwareLost(f"{place} has no parameter robot_description")
            return Urdf(str(texts[0]["robot_description"]))
        absent, silent = f"there is no publisher on {place}", f"no message on {place}"
        ros_node.wait_until(lambda: ros_node.has_publisher(place), DESCRIPTION_TIMEOUT_S, absent)
        ros_node.subscribe("std_msgs/msg/String", place, texts.append, sensor=False)
        ros_node.wait_until(lambda: bool(texts), DESCRIPTION_TIMEOUT_S, silent)
        return Urdf(str(texts[0].data))
    finally:
        ros_node.close()


def make_layout(config: Ros2Config, urdf: Urdf | None) -> Ros2Layout:
    """Make the spec of the configured arm from its description.

    Raises:
        SpecError: a joint without limits, or a joint or link that the description lacks.
    """
    tool = urdf.chain(config.tool, config.base) if urdf is not None and config.tool else None
    if tool is not None and (unknown := set(tool.movable_joints) - set(config.commanded_joints)):
        raise SpecError(f"there are joints between base and tool that are missing in the config: {sorted(unknown)}")
    if (config.workspace or config.keep_out) and tool is None:
        raise SpecError("workspace and keep_out bound the tool: set `tool` to its link")
    grip, wrench, box = config.gripper, config.wrench, config.workspace
    low, high, speed = zip(*(_bounds(name, config, urdf) for name in config.joints), strict=True)
    prismatic = {name for name, each in urdf.joints.items() if each.kind == "prismatic"} if urdf is not None else set()
    units = ["m" if name in prismatic else "rad" for name in config.commanded_joints]
    places = zip(config.joints, units, low, high, strict=False)
    rows = [(f"{name}.pos", unit, least, most) for name, unit, least, most in places]
    if grip is not None:
        rows.append((f"{grip.joint}.pos", units[-1], grip.low, grip.high))
    action = ArraySpec.from_rows(ACTION, rows)
    if config.velocities:
        ranges = [_speed_range(name, urdf) for name in config.joints]
        speeds = zip(config.joints, units, ranges, strict=False)
        rows += [(f"{name}.vel", f"{unit}/s", -fastest, fastest) for name, unit, fastest in speeds]
    tool_at = tuple(range(len(rows), len(rows) + 3)) if tool is not None else ()
    rows += [(f"tool_{axis}", "m", -TOOL_RANGE_M, TOOL_RANGE_M) for axis, _ in zip("xyz", tool_at, strict=False)]
    force_at = tuple(range(len(rows), len(rows) + 3)) if wrench is not None else ()
    rows += [(f"force_{axis}", "N", -FORCE_RANGE_N, FORCE_RANGE_N) for axis, _ in zip("xyz", force_at, strict=False)]
    joints = tuple(range(len(config.joints)))
    limits = SafetyLimits(
        workspace_low=() if box is None else box.low,
        workspace_high=() if box is None else box.high,
        keep_out=config.keep_out,
        tool_position=tool_at,
        tool_force=force_at,
        tool_force_max=None if wrench is None else wrench.force_max,
        joint_position=joints,
        joint_low=low,
        joint_high=high,
        joint_velocity_max=speed,
        joint_acceleration_max=() if config.acceleration_max is None else (config.acceleration_max,) * len(joints),
        reduced_speed=config.reduced_speed,
        stale_after_s=config.stale_s,
    )
    stops = ", then deactivates its controllers, so that the hardware holds" if config.manager else ""
    spec = RobotSpec(
        model=config.model,
        rate_hz=config.rate_hz,
        observation=(ArraySpec.from_rows(STATE, rows),),
        action=action,
        cameras=camera_specs(config.cameras),
        limits=limits,
        neutral=tuple(min(max(0.0, a), b) for a, b in zip(action.low, action.high, strict=True)),
        joint_target=joints,
        gripper=-1 if grip is None else len(joints),
        safe_stop=f"holds the measured position{stops}"
        + (f", and calls {config.stop_service}" if config.stop_service else ""),
    )
    return Ros2Layout(spec, urdf, tool)


def _bounds(joint: str, config: Ros2Config, urdf: Urdf | None) -> tuple[float, float, float]:
    """The lowest and highest position, and the speed limit."""
    stated = next((each for name, each in config.limits.items() if fnmatchcase(joint, name)), JointLimits())
    described = (math.nan,) * 3
    if urdf is not None:
        found = urdf.joint(joint)
        described = (found.low, found.high, found.speed_max * config.speed_share)
    chosen = (stated.low, stated.high, stated.speed_max)
    low, high, speed = (b if a is None else a for a, b in zip(chosen, described, strict=True))
    if not (-math.inf < low < high < math.inf and 0 < speed < math.inf):
        raise SpecError(
            f"joint {joint} has no usable limits ({low:g} to {high:g} at {speed:g} per second); set "
            f"`limits: {{{joint}: {{low: -3.1, high: 3.1, speed_max: 0.5}}}}` or `description`"
        )
    return low, high, speed


def _speed_range(joint: str, urdf: Urdf | None) -> float:
    """The bound of a joint's speed in the state: no limit, which a person may change while a policy is trained."""
    described = math.nan if urdf is None else urdf.joint(joint).speed_max
    return described if 0 < described < math.inf else SPEED_RANGE
