"""The options of an arm behind ros2_control, and the robot spec made from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from hal.camera import default_stale_after_s
from hal.errors import HardwareLost, SpecError
from hal.spec import ACTION, STATE, ArraySpec, Box, CameraSpec, RobotSpec, SafetyLimits
from robots.reach_task import ReachConfig
from robots.ros2_controllers import ControllerKind, read_parameters
from robots.ros2_node import RosNode
from robots.ros2_readings import StampClock
from robots.urdf import KinematicChain, Urdf

DESCRIPTION_TIMEOUT_S = 10.0
XYZ = ("x", "y", "z")
TOOL_RANGE_M, FORCE_RANGE_N = 2.0, 200.0  # bounds of the state's elements, not limits


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


@dataclass(frozen=True)
class RosCameraConfig:
    """A camera topic. `kind`: ``raw`` is sensor_msgs/msg/Image, ``compressed`` sensor_msgs/msg/CompressedImage.

    `stale_after_s` defaults to three frame times plus 0.1 s.
    """

    topic: str
    height: int
    width: int
    rate_hz: float = 30.0
    kind: Literal["raw", "compressed"] = "raw"
    stale_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.stale_after_s is not None and not self.stale_after_s > 0:
            raise ValueError(f"a camera's stale_after_s is {self.stale_after_s:g}; it must be above 0")

    @property
    def stale_s(self) -> float:
        return default_stale_after_s(self.rate_hz) if self.stale_after_s is None else self.stale_after_s


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
    activate: connecting activates an inactive controller; otherwise a person does.
    instead_of: controllers that are deactivated when this one is activated.
    estop_topic: std_msgs/msg/Bool, true while a stop button of the cell is pressed. The publisher is transient local or
    repeats it.
    estop_timeout_s: the robot is lost after this time without a message on `estop_topic`; needs a publisher that
    repeats it. 0 for no timeout. Without a publisher the robot is lost in any case.
    stop_service: std_srvs/srv/Trigger, also called by a safe stop.
    clock: the meaning of message stamps; see `robots.ros2_readings.StampClock`.
    domain: ROS 2 domain; default: ``ROS_DOMAIN_ID``.
    connect_s: timeout for connecting.
    stale_after_s: default: two control periods.
    lost_after_s: the robot is lost after this time without a joint state.
    """

    joints: tuple[str, ...]
    controller: str = "joint_trajectory_controller"
    kind: ControllerKind = "trajectory"
    model: str = "ros2_arm"
    rate_hz: float = 20.0
    description: str = ""
    limits: dict[str, JointLimits] = field(default_factory=dict)
    speed_share: float = 0.25
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
    estop_timeout_s: float = 0.0
    stop_service: str = ""
    clock: StampClock = "shared"
    domain: int | None = None
    connect_s: float = 10.0
    stale_after_s: float | None = None
    lost_after_s: float = 1.0
    reduced_speed: float = 0.25
    sentence: str = ""
    max_steps: int = 3000
    reach: ReachConfig = field(default_factory=ReachConfig)

    def __post_init__(self) -> None:
        if not self.joints or len(set(self.joints)) != len(self.joints):
            raise ValueError(f"joints must name each joint once; they are {list(self.joints)}")
        if self.rate_hz <= 0 or not 0 < self.speed_share <= 1:
            raise ValueError(
                f"rate_hz must be above 0 and speed_share in (0, 1]; they are {self.rate_hz} and {self.speed_share}"
            )
        if self.estop_timeout_s < 0 or (self.estop_timeout_s and not self.estop_topic):
            raise ValueError("estop_timeout_s must be 0 or a time above 0, and needs an estop_topic")
        times = (self.connect_s, self.lost_after_s, self.stale_after_s)
        if any(given is not None and not given > 0 for given in times):
            raise ValueError(f"connect_s, lost_after_s and stale_after_s must be above 0; they are {times}")
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
    with RosNode(f"describe_{name}", config.domain) as ros_node:
        return Urdf(_from_topic(ros_node, place) if source == "topic" else _from_parameter(ros_node, place))


def _from_topic(ros_node: RosNode, topic: str) -> str:
    messages: list[Any] = []
    ros_node.wait_until(
        lambda: ros_node.rclpy_node.count_publishers(topic) > 0,
        DESCRIPTION_TIMEOUT_S,
        f"there is no publisher on {topic}",
    )
    ros_node.subscribe_state("std_msgs/msg/String", topic, messages.append)
    ros_node.wait_until(lambda: bool(messages), DESCRIPTION_TIMEOUT_S, f"no message on {topic}")
    return str(messages[0].data)


def _from_parameter(ros_node: RosNode, node: str) -> str:
    text = read_parameters(ros_node, node, ["robot_description"], DESCRIPTION_TIMEOUT_S).get("robot_description")
    if not isinstance(text, str):
        raise HardwareLost(f"{node} has no parameter robot_description")
    return text


def make_layout(config: Ros2Config, urdf: Urdf | None) -> Ros2Layout:
    """Make the spec of the configured arm from its description.

    Raises:
        SpecError: a joint without limits, or a joint or link that the description lacks.
    """
    tool = urdf.chain(config.tool, config.base) if urdf is not None and config.tool else None
    if tool is not None and (unknown := set(tool.movable_joints) - set(config.commanded_joints)):
        raise SpecError(f"there are joints between base and tool that are missing in the config: {sorted(unknown)}")
    bounds = [_bounds(name, config, urdf) for name in config.joints]
    low, high, speed = (tuple(each) for each in zip(*bounds, strict=True))
    units = tuple(_unit(name, urdf) for name in config.commanded_joints)
    state, tool_at, force_at = _state(config, units, (low, high, speed), tool is not None)
    grip = config.gripper
    action = ArraySpec(
        name=ACTION,
        labels=tuple(f"{name}.pos" for name in config.commanded_joints),
        units=units,
        low=low + (() if grip is None else (grip.low,)),
        high=high + (() if grip is None else (grip.high,)),
    )
    joints = tuple(range(len(config.joints)))
    limits = SafetyLimits(
        workspace_low=() if config.workspace is None else config.workspace.low,
        workspace_high=() if config.workspace is None else config.workspace.high,
        keep_out=config.keep_out,
        tool_position=tool_at,
        tool_force=force_at,
        tool_force_max=None if config.wrench is None else config.wrench.force_max,
        joint_position=joints,
        joint_low=low,
        joint_high=high,
        joint_velocity_max=speed,
        joint_acceleration_max=() if config.acceleration_max is None else (config.acceleration_max,) * len(joints),
        reduced_speed=config.reduced_speed,
        stale_after_s=config.stale_s,
    )
    if (config.workspace or config.keep_out) and tool is None:
        raise SpecError("workspace and keep_out bound the tool: set `tool` to its link")
    spec = RobotSpec(
        model=config.model,
        rate_hz=config.rate_hz,
        observation=(state,),
        action=action,
        cameras=tuple(_camera(name, each) for name, each in config.cameras.items()),
        limits=limits,
        neutral=tuple(min(max(0.0, a), b) for a, b in zip(action.low, action.high, strict=True)),
        joint_target=joints,
        gripper=-1 if grip is None else len(joints),
        safe_stop=_safe_stop(config),
    )
    return Ros2Layout(spec, urdf, tool)


def _state(
    config: Ros2Config, units: tuple[str, ...], bounds: tuple[tuple[float, ...], ...], has_tool: bool
) -> tuple[ArraySpec, tuple[int, ...], tuple[int, ...]]:
    """The state's spec, and the state indices of the tool's position and the force."""
    grip, (low, high, speed) = config.gripper, bounds
    arm = list(zip(config.joints, units, low, high, speed, strict=False))
    rows = [(f"{name}.pos", unit, a, b) for name, unit, a, b, _ in arm]
    if grip is not None:
        rows.append((f"{grip.joint}.pos", units[-1], grip.low, grip.high))
    if config.velocities:
        rows += [(f"{name}.vel", f"{unit}/s", -fastest, fastest) for name, unit, _, _, fastest in arm]
    tool_at = tuple(range(len(rows), len(rows) + 3)) if has_tool else ()
    rows += [(f"tool_{XYZ[i]}", "m", -TOOL_RANGE_M, TOOL_RANGE_M) for i in range(len(tool_at))]
    force_at = tuple(range(len(rows), len(rows) + 3)) if config.wrench is not None else ()
    rows += [(f"force_{XYZ[i]}", "N", -FORCE_RANGE_N, FORCE_RANGE_N) for i in range(len(force_at))]
    names, of_what, lows, highs = zip(*rows, strict=True)
    return ArraySpec(name=STATE, labels=names, units=of_what, low=lows, high=highs), tool_at, force_at


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


def _unit(joint: str, urdf: Urdf | None) -> str:
    """Joints without a description count as revolute."""
    return "m" if urdf is not None and joint in urdf.joints and urdf.joints[joint].kind == "prismatic" else "rad"


def _camera(name: str, config: RosCameraConfig) -> CameraSpec:
    return CameraSpec(name=name, height=config.height, width=config.width, rate_hz=config.rate_hz)


def _safe_stop(config: Ros2Config) -> str:
    text = "holds the measured position"
    if config.manager:
        text += ", then deactivates its controllers, so that the hardware holds"
    return text + (f", and calls {config.stop_service}" if config.stop_service else "")
