"""Driver for any arm behind ros2_control, with ROS topics as cameras and force sensor.

Sensor subscriptions are best effort. Commands are reliable and expire. Joints are matched by name. The capture time of
a reading comes from its header's stamp and is never later than its arrival.

A joint trajectory controller receives trajectories of one point, due at the end of the control period, with joints by
name. Since ros2_controllers 4.2 it refuses an empty trajectory, so a hold is a trajectory to the measured
position. A forward controller receives positions in the order of its parameter ``joints``.

Safe stop: the target is the measured position; then the controllers are deactivated, and the hardware keeps its last
command. The next command activates them again, and the arm holds for its control period. Connecting activates nothing.
A controller that a fault or a person deactivated makes the robot lost, and the e-stop latches.
If this process dies, a controller moves to its last target, at most one control period ahead, and stays there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from hal.camera import Camera, CameraFrame
from hal.driver import RobotSetup, RobotSetupRequest, read_options
from hal.errors import EmergencyStopped, HalError, HardwareLost, SpecError, StoppedAtRobot
from hal.robot import Observation, Robot, StopLevel
from hal.spec import STATE, Array, CameraSpec
from robots.device import DeviceLock, age_s, require_fresh, run_all
from robots.homing import build_judged_task, clip_to_range, move_home, require_joints_in_range, validate_home
from robots.reach_task import add_reach_task, wants_reach
from robots.ros2_node import (
    COMMAND_TOPIC,
    IMAGE_TYPES,
    JOINT_STATE_TYPE,
    POSITIONS_TYPE,
    TRAJECTORY_TYPE,
    WRENCH_TYPE,
    RosNode,
    RosServiceClient,
    message_type,
)
from robots.ros2_readings import (
    CaptureTimes,
    DamagedImage,
    JointReadings,
    StopButton,
    decode_jpeg_image,
    decode_raw_image,
    header_stamp_ns,
    jpeg_image_size,
)
from robots.ros2_spec import (
    ControllerKind,
    KinematicChain,
    Ros2Config,
    Ros2Layout,
    RosCameraConfig,
    make_layout,
    read_description,
)

RESPONSE_TIMEOUT_S = 2.0
STATE_CHECK_INTERVAL_S = 0.5
JOINT_STATE = "joint state"
ACTIVE, INACTIVE = "active", "inactive"
_STRICT = 2  # controller_manager_msgs/srv/SwitchController

log = logging.getLogger(__name__)


class RosController:
    """One controller of some joints; it receives targets for the end of a control period."""

    def __init__(self, name: str, kind: ControllerKind, joints: Sequence[str], period_s: float) -> None:
        self.name, self.kind, self.joints = name, kind, tuple(joints)
        self._period_s, self._order = period_s, self.joints
        self._publisher: Any = None

    def open(self, ros_node: RosNode, *, stamped: bool, query_parameters: bool, timeout_s: float) -> None:
        """Connect to the controller. Blocks.

        Args:
            stamped: its clock is synchronised with this computer's.
            query_parameters: read its joints and interface; otherwise use those of the config.

        Raises:
            HardwareLost: it does not answer, moves other joints, or does not command positions.
        """
        self._ros_node, self._stamped = ros_node, stamped
        node = self.name if self.name.startswith("/") else f"/{self.name}"
        if query_parameters:
            self._check(ros_node.read_parameters(node, ["joints", "interface_name"], timeout_s))
        kind = TRAJECTORY_TYPE if self.kind == "trajectory" else POSITIONS_TYPE
        topic = node + COMMAND_TOPIC[kind][0]
        self._message = message_type(kind)
        self._publisher = ros_node.create_command_publisher(kind, topic, 2 * self._period_s if stamped else None)
        ros_node.wait_until(self._publisher.get_subscription_count, timeout_s, f"there is no subscriber on {topic}")

    def send(self, targets: Mapping[str, float]) -> None:
        """Start the motion to `targets` (rad or m, by joint name), due at the end of a control period.

        Raises:
            HardwareLost: the controller is gone.
        """
        if not self._publisher.get_subscription_count():
            raise HardwareLost(f"controller {self.name} is gone: its commands have no subscriber")
        values = [float(targets[name]) for name in self._order]
        trajectory = self.kind == "trajectory"
        self._publisher.publish(self._trajectory(values) if trajectory else self._message(data=values))

    def _check(self, parameters: Mapping[str, Any]) -> None:
        order = parameters.get("joints", [])
        if set(order) != set(self.joints):
            raise HardwareLost(
                f"controller {self.name} moves {order}; the config says {list(self.joints)}: correct `joints` or "
                "`controller`"
            )
        self._order = tuple(order)
        commanded = parameters.get("interface_name", "position")
        if self.kind == "position" and commanded != "position":  # it would move on if this process died
            raise HardwareLost(
                f"controller {self.name} commands {commanded}; use one that commands positions, which stops if "
                "this process dies"
            )

    def _trajectory(self, values: list[float]) -> Any:
        seconds, rest = divmod(round(self._period_s * 1e9), 1_000_000_000)
        point = message_type("trajectory_msgs/msg/JointTrajectoryPoint")(positions=values)
        point.time_from_start.sec, point.time_from_start.nanosec = seconds, rest
        message = self._message(joint_names=list(self._order), points=[point])
        if self._stamped:  # a late trajectory has less time left; an expired one is refused
            message.header.stamp = self._ros_node.rclpy_node.get_clock().now().to_msg()
        return message


class ControllerManager:
    """Activates and deactivates some controllers, and checks that they stay active."""

    def __init__(self, ros_node: RosNode, name: str, controllers: Sequence[str], timeout_s: float) -> None:
        """Block until the manager's services are available.

        Args:
            controllers: their names, with or without the manager's namespace.

        Raises:
            SpecError: ROS 2 lacks the package controller_manager_msgs.
            HardwareLost: there is no such manager.
        """
        messages = "controller_manager_msgs/srv"
        self._list = RosServiceClient(ros_node, f"{messages}/ListControllers", f"{name}/list_controllers")
        self._switch = RosServiceClient(ros_node, f"{messages}/SwitchController", f"{name}/switch_controller")
        self.name, self._controllers = name, _listed_names(controllers)
        self._asked: Any = None
        self._asked_s = time.monotonic()
        ros_node.wait_until(
            lambda: self._list.is_ready and self._switch.is_ready, timeout_s, f"there is no controller manager {name}"
        )

    def require_active(self) -> None:
        """Raises HardwareLost if one of the controllers is not active. Blocks."""
        self._require_active(self._list.call({}, RESPONSE_TIMEOUT_S), HardwareLost)

    def is_active(self) -> bool:
        """Whether all the controllers are active. Blocks. Raises HardwareLost, as `activate`."""
        return not self._inactive(_states(self._list.call({}, RESPONSE_TIMEOUT_S)))

    def activate(self, instead_of: Sequence[str] = ()) -> None:
        """Activate the controllers and deactivate `instead_of`, in one cycle of the control loop, or none of them.
        Blocks.

        Raises:
            HardwareLost: the manager does not answer or refuses; a controller is not loaded or not configured.
        """
        states = _states(self._list.call({}, RESPONSE_TIMEOUT_S))
        stop = [name for name in _listed_names(instead_of) if states.get(name) == ACTIVE]
        self._request(self._inactive(states), stop)

    def deactivate(self) -> None:
        """Deactivate the active controllers. Blocks. Raises HardwareLost, as `activate`."""
        states = _states(self._list.call({}, RESPONSE_TIMEOUT_S))
        self._request([], [name for name in self._controllers if states.get(name) == ACTIVE])

    def check_active(self) -> None:
        """Check periodically, without blocking, that the controllers are active. Call it in each control period.

        Raises:
            HardwareLost: one is not active, or the manager has not answered for `RESPONSE_TIMEOUT_S`. StoppedAtRobot if
                one is inactive.
        """
        now_s = time.monotonic()
        if self._asked is None:
            if now_s - self._asked_s >= STATE_CHECK_INTERVAL_S and self._list.is_ready:
                self._asked, self._asked_s = self._list.call_async({}), now_s
        elif self._asked.done():
            response, self._asked = self._asked.result(), None
            self._require_active(response, StoppedAtRobot)
            return  # it did answer, however late it is looked at
        if now_s - self._asked_s > STATE_CHECK_INTERVAL_S + RESPONSE_TIMEOUT_S:
            raise HardwareLost(f"{self.name} has not answered for {now_s - self._asked_s:.1f} s")

    def _request(self, start: list[str], stop: list[str]) -> None:
        self._asked = None
        if not start and not stop:
            return
        request = {"activate_controllers": start, "deactivate_controllers": stop, "strictness": _STRICT}
        response = self._switch.call(request, RESPONSE_TIMEOUT_S)
        if not response.ok:
            why = getattr(response, "message", "") or "its log has the reason"
            raise HardwareLost(f"{self.name} did not activate {start} and deactivate {stop}: {why}")

    def _inactive(self, states: Mapping[str, str]) -> list[str]:
        found = {name: states.get(name, "not loaded") for name in self._controllers}
        if unknown := {name: state for name, state in found.items() if state not in (ACTIVE, INACTIVE)}:
            raise HardwareLost(f"{self.name}: cannot activate {unknown}; the controllers are {states}")
        return [name for name, state in found.items() if state == INACTIVE]

    def _require_active(self, response: Any, if_inactive: type[HardwareLost]) -> None:
        states = _states(response)
        stopped = {name: states.get(name, "not loaded") for name in self._controllers if states.get(name) != ACTIVE}
        if stopped:
            kind = if_inactive if INACTIVE in stopped.values() else HardwareLost
            raise kind(f"{self.name}: not active: {stopped}; a person or a fault stopped them")


def _listed_names(controllers: Sequence[str]) -> list[str]:
    """The names by which the manager lists and switches controllers: without its namespace."""
    return [name.rpartition("/")[2] for name in controllers]


def _states(response: Any) -> dict[str, str]:
    """The state of each loaded controller."""
    return {each.name: each.state for each in response.controller}


class RosCamera(Camera):
    """One camera topic on a node of its own, so that images do not delay other messages."""

    def __init__(self, node: str, spec: CameraSpec, topic: RosCameraConfig, config: Ros2Config) -> None:
        """`node`: the name of the node."""
        self.spec, self._topic, self._config = spec, topic, config
        self._node = RosNode(node, config.domain)
        self._newest: tuple[Any, int] | None = None
        self._decoded: CameraFrame | None = None
        self._damaged_ns = 0  # the capture time of the last damaged image
        self._times = CaptureTimes(config.clock)

    def connect(self) -> None:
        """Block until the first image. Raises HardwareLost if none arrives, or if it does not match the config."""
        if self._node.is_connected:
            return
        self._times = CaptureTimes(self._config.clock)
        self._node.open()
        try:
            self._node.subscribe(IMAGE_TYPES[self._topic.kind == "compressed"], self._topic.topic, self._on_image)
            silent = f"no image on {self._topic.topic}"
            try:
                self._node.wait_until(lambda: self._newest is not None, self._config.connect_s, silent, self.check_stop)
            except HardwareLost as error:
                raise HardwareLost(f"{error}{_clock_hint(self._times.clock_error)}") from None
            if (newest := self._newest) is not None:
                self._decoded = CameraFrame(self._decode(newest[0]), newest[1])
        except HalError:
            self.close()
            raise

    def read(self) -> CameraFrame:
        """The newest image; while it is damaged, the last one before. Raises StaleObservation if that is older than
        `RosCameraConfig.stale_s`."""
        newest = self._newest
        if not self._node.is_connected or newest is None or self._decoded is None:
            raise HardwareLost(f"camera {self.spec.name} is not connected")
        message, captured_ns = newest
        if captured_ns not in (self._decoded.t_capture_ns, self._damaged_ns):
            try:
                self._decoded = CameraFrame(self._decode(message), captured_ns)
            except DamagedImage as error:
                level = logging.INFO if self._damaged_ns else logging.WARNING  # warns once
                log.log(level, "ros2.image camera=%s %s", self.spec.name, error)
                self._damaged_ns = captured_ns
        require_fresh(f"camera {self.spec.name}", self._decoded.t_capture_ns, self._topic.stale_s)
        return self._decoded

    def close(self) -> None:
        self._node.close()
        self._newest = self._decoded = None

    def _on_image(self, message: Any) -> None:
        captured_ns = self._times.captured_ns(header_stamp_ns(message.header))
        if captured_ns is not None:
            self._newest = message, captured_ns

    def _decode(self, message: Any) -> Array:
        raw = self._topic.kind == "raw"
        content = b"" if raw else bytes(message.data)
        height, width = (int(message.height), int(message.width)) if raw else jpeg_image_size(content)
        if (height, width) != self.spec.shape[:2]:
            raise HardwareLost(
                f"camera {self.spec.name} sends images of {width}x{height}; "
                f"the config says {self.spec.width}x{self.spec.height}"
            )
        return decode_raw_image(message) if raw else decode_jpeg_image(content)


def _clock_hint(clock_error: str) -> str:
    """The end of a message about missing readings; empty without a `CaptureTimes.clock_error`."""
    return clock_error and f": {clock_error}: synchronise the clocks, or set `clock`"


class _RobotTopics:
    """The state that the robot publishes: joint states, and optionally a force and a stop button. For one connection.

    Attributes:
        joints: the commanded joints.
        button: the stop button.
    """

    def __init__(self, config: Ros2Config, layout: Ros2Layout) -> None:
        self._config, self._layout = config, layout
        self.joints = JointReadings(config.commanded_joints, config.clock)
        self._force: tuple[Array, str, int] | None = None  # N, in the frame of that link, and its capture time
        self._force_times = CaptureTimes(config.clock)
        self._sensor: KinematicChain | None = None
        self.button = StopButton()

    def subscribe(self, node: RosNode, check_stop: Callable[[], None]) -> None:
        """Subscribe, and block until every topic of the config has delivered a message.

        Raises SpecError if the force's frame moves by joints that the config lacks.
        """
        config, button = self._config, self._config.estop_topic
        node.subscribe(JOINT_STATE_TYPE, config.joint_states, self._on_joint_state)
        if config.wrench is not None:
            node.subscribe(WRENCH_TYPE, config.wrench.topic, self._on_wrench)
        if button:
            absent = f"there is no publisher on {button}"
            node.wait_until(lambda: node.has_publisher(button), config.connect_s, absent, check_stop)
            node.subscribe(
                "std_msgs/msg/Bool", button, lambda message: self.button.update(bool(message.data)), sensor=False
            )
        try:
            silent = "some topics delivered nothing"
            node.wait_until(lambda: not self._missing_inputs(), config.connect_s, silent, check_stop)
        except HardwareLost as error:
            raise HardwareLost(f"{error}: {self._missing_inputs()}") from None
        if self._force is not None and self._layout.urdf is not None:
            frame = self._force[1]
            self._sensor = self._layout.urdf.chain(frame, config.base)
            if unknown := set(self._sensor.movable_joints) - set(config.commanded_joints):
                raise SpecError(
                    f"wrench: the way from base to {frame} has joints that are missing in the config: "
                    f"{sorted(unknown)}; add them to `joints`"
                )

    def state(self) -> tuple[Array, int, str]:
        """The state as in the robot's spec, the capture time of its oldest part, and what that part is."""
        config, tool = self._config, self._layout.tool
        positions, velocities, captured_ns = self.joints.latest()
        values = dict(zip(config.commanded_joints, positions.tolist(), strict=True))
        parts, oldest = [positions], JOINT_STATE
        if config.velocities:
            parts.append(velocities[: len(config.joints)])
        if tool is not None:
            parts.append(tool.pose(values)[:3, 3])
        if self._force is not None and config.wrench is not None:
            force, _, felt_ns = self._force
            turned = force if self._sensor is None else self._sensor.pose(values)[:3, :3] @ force
            parts.append(-turned if config.wrench.of_tool else turned)
            if felt_ns < captured_ns:
                captured_ns, oldest = felt_ns, f"force on {config.wrench.topic}"
        return np.concatenate(parts).astype(np.float32), captured_ns, oldest

    @property
    def clock_hint(self) -> str:
        """See `_clock_hint`."""
        return _clock_hint(self.joints.clock_error or self._force_times.clock_error)

    def _missing_inputs(self) -> list[str]:
        """The topics and joints of the config without a message, or with an outdated one."""
        config, absent, clock_error = self._config, self.joints.missing(), self.joints.clock_error
        missing = [f"{name} on {config.joint_states}" for name in absent]
        if not absent:
            _, velocities, captured_ns = self.joints.latest()
            if (old_s := age_s(captured_ns)) > config.stale_s:
                missing.append(f"a recent joint state: the newest is {old_s:.3f} s old")
                clock_error = clock_error or ("old stamps" if config.clock == "shared" else "")
            arm = zip(config.joints, velocities, strict=False)
            if config.velocities and (silent := [name for name, velocity in arm if not np.isfinite(velocity)]):
                topic = config.joint_states
                missing.append(f"velocities of {silent} on {topic}: publish them, or set `velocities: false`")
        if clock_error:
            missing.append(_clock_hint(clock_error).removeprefix(": "))
        if config.wrench is not None and self._force is None:
            missing.append(config.wrench.topic + _clock_hint(self._force_times.clock_error))
        if config.estop_topic and not self.button.was_received:
            missing.append(config.estop_topic)
        return missing

    def _on_joint_state(self, message: Any) -> None:
        self.joints.update(message.name, message.position, message.velocity, header_stamp_ns(message.header))

    def _on_wrench(self, message: Any) -> None:
        captured_ns, force = self._force_times.captured_ns(header_stamp_ns(message.header)), message.wrench.force
        if captured_ns is not None:
            self._force = np.array([force.x, force.y, force.z]), message.header.frame_id, captured_ns


class Ros2Robot(Robot):
    """An arm behind ros2_control."""

    def __init__(self, config: Ros2Config, name: str = "arm") -> None:
        """Read the robot's description; blocks if it is in the ROS graph, see `read_description`."""
        self.config = config
        self._layout = make_layout(config, read_description(config, name))
        self.spec = self._layout.spec
        self._low, self._high = (np.array(each, np.float32) for each in (self.spec.action.low, self.spec.action.high))
        validate_home(self.spec, config.home, self._low, self._high)
        self._node = RosNode(f"user_sys_{name}", config.domain)
        domain = os.environ.get("ROS_DOMAIN_ID") or "0" if config.domain is None else config.domain
        self._device_lock = DeviceLock(f"ros2-{domain}-{config.controller.strip('/')}")
        period_s, grip = self.spec.period_s, config.gripper
        self._controllers = [RosController(config.controller, config.kind, config.joints, period_s)]
        if grip is not None:
            self._controllers.append(RosController(grip.controller, grip.kind, [grip.joint], period_s))
        self._manager: ControllerManager | None = None
        self._stop_client: RosServiceClient | None = None
        self._topics = _RobotTopics(config, self._layout)
        self._target: Array | None = None
        self._connected = self._moving = self._active = self._stopped = False

    def connect(self) -> None:
        """See `hal.robot.Robot`. Inactive controllers stay so until the first command: a person may guide the arm by
        another one.

        Raises:
            EmergencyStopped: a stop button of the cell is pressed.
            HardwareLost: also if another process of this machine has locked the controller, or if it is inactive and
                the config does not activate it.
            SpecError: ROS 2 or a message package is not installed, or the config lacks a joint of the force's frame.
        """
        if self._connected:
            return
        config = self.config
        self._device_lock.acquire()
        try:
            self._node.open()
            self._topics = _RobotTopics(config, self._layout)
            self._topics.subscribe(self._node, self.check_stop)
            if config.stop_service:
                self._stop_client = RosServiceClient(self._node, "std_srvs/srv/Trigger", config.stop_service)
            if self._topics.button.is_pressed:
                raise EmergencyStopped(f"a stop button of the cell is pressed ({config.estop_topic})")
            self._require_in_range(self._topics.joints.latest()[0])
            if config.manager:
                names = [each.name for each in self._controllers]
                self._manager = ControllerManager(self._node, config.manager, names, config.connect_s)
                self.check_stop()
                if not config.activate:
                    self._manager.require_active()
            self._active = self._manager is None or self._manager.is_active()
            stamped, ask = config.clock == "shared", bool(config.manager)
            for controller in self._controllers:
                controller.open(self._node, stamped=stamped, query_parameters=ask, timeout_s=config.connect_s)
            self._connected, self._stopped = True, False
            self._hold()  # an inactive controller ignores it
        except HalError:
            self._disconnect()
            raise

    def observe(self) -> Observation:
        self._require_link()
        state, captured_ns, oldest = self._topics.state()
        self._require_alive(captured_ns, oldest)
        require_fresh(self.config.model, captured_ns, self.config.stale_s)
        return Observation({STATE: state}, captured_ns)

    def command(self, action: Array) -> Array:
        """See `hal.robot.Robot`. It first activates inactive controllers, which takes longer; the applied action then
        holds the arm. After a hardware fault the controller manager refuses, and the fault is not cleared.

        Raises:
            EmergencyStopped: a stop button of the cell is pressed, or was since the last command; or the e-stop was
                pressed during the activation. Nothing was commanded.
        """
        self.spec.action.validate(action)
        self._require_link()
        self._require_button_released()
        positions, _, captured_ns = self._topics.joints.latest()
        self._require_alive(captured_ns, JOINT_STATE)
        self._require_in_range(positions)
        if not self._active:
            return self._activate()
        self._check_controllers()
        self._moving = True
        joints = positions[: len(self.config.joints)]
        return self._send(clip_to_range(self.spec, action, joints, self._low, self._high))

    def stop(self, level: StopLevel) -> None:
        """See `hal.robot.Robot`. The arm holds the position measured at the start of the stop, a gripper its target.

        A safe stop takes every step, also after one that failed.
        """
        self._require_link()
        if level is StopLevel.SAFE and not self._stopped:
            run_all([self._stand, self._deactivate, self._call_stop_service])
            self._active, self._stopped = False, True
        elif self._active:
            self._stand()
            self._check_controllers()

    def go_home(self) -> None:
        """See `robots.homing.SupportsHoming`. A gripper keeps its target."""
        self.stop(StopLevel.HOLD)
        if self.config.home and self._target is not None:
            move_home(self, self.config.home, self._target)

    def close(self) -> None:
        if self._connected:
            try:
                self.stop(StopLevel.SAFE)
            except HardwareLost as error:
                log.warning("ros2.stop_failed %s; its controllers keep their last target", error)
        self._disconnect()

    def _stand(self) -> None:
        if self._moving:
            self._hold()
        elif self._target is not None:
            self._send(self._target)

    def _activate(self) -> Array:
        """Takes seconds, in which the arm may move: by a person's hand, or by the controller that is replaced."""
        self._target, self._stopped = self._pose(), False
        if self._manager is not None:
            self._manager.activate(self.config.instead_of)
        self._active = self._moving = True
        self.check_stop()
        self._require_button_released()
        return self._hold()

    def _deactivate(self) -> None:
        if self._manager is not None:
            self._manager.deactivate()

    def _call_stop_service(self) -> None:
        if self._stop_client is not None:
            answer = self._stop_client.call({}, RESPONSE_TIMEOUT_S)
            if not answer.success:
                raise HardwareLost(f"{self.config.stop_service} did not stop the robot: {answer.message}")

    def _hold(self) -> Array:
        """Make the measured pose the target, unclipped: clipping to a limit would make the joint jump."""
        applied = self._send(self._pose())
        self._moving = False
        return applied

    def _pose(self) -> Array:
        """The measured pose, with the gripper's target; if the readings are outdated, the last target."""
        positions, _, captured_ns = self._topics.joints.latest()
        goal = positions.astype(np.float32)
        if self._target is not None:
            grip = len(self.config.joints)
            fresh = age_s(captured_ns) <= self.config.stale_s
            goal = np.concatenate([goal[:grip] if fresh else self._target[:grip], self._target[grip:]])
        return goal

    def _send(self, action: Array) -> Array:
        targets = dict(zip(self.config.commanded_joints, action.tolist(), strict=True))
        run_all([partial(controller.send, targets) for controller in self._controllers])
        self._target = action
        return action.copy()

    def _disconnect(self) -> None:
        self._node.close()
        self._device_lock.release()
        self._connected, self._manager, self._stop_client, self._target = False, None, None, None

    def _check_controllers(self) -> None:
        if self._manager is not None:
            self._manager.check_active()

    def _require_link(self) -> None:
        if not self._connected:
            raise HardwareLost(f"{self.config.model} is not connected")
        _ = self._node.rclpy_node

    def _require_button_released(self) -> None:
        topic, timeout_s = self.config.estop_topic, self.config.estop_timeout_s
        if topic and not self._node.has_publisher(topic):
            raise HardwareLost(f"there is no publisher on {topic} any more: the state of the stop button is unknown")
        if 0 < timeout_s < (silent_s := self._topics.button.silence_s):
            raise HardwareLost(f"no message on {topic} for {silent_s:.3f} s: the state of the stop button is unknown")
        if self._topics.button.take_pressed():
            raise EmergencyStopped(f"a stop button of the cell is pressed, or was just now ({topic})")

    def _require_in_range(self, positions: Array) -> None:
        require_joints_in_range(self.spec, positions[: len(self.config.joints)], self._low, self._high)

    def _require_alive(self, captured_ns: int, reading: str) -> None:
        if (silent_s := age_s(captured_ns)) > max(self.config.lost_after_s, self.config.stale_s):
            silence = f"{self.config.model} has sent no {reading} for {silent_s:.3f} s"
            raise HardwareLost(f"{silence}{self._topics.clock_hint}")


def make_robot_setup(request: RobotSetupRequest) -> RobotSetup:
    """A `hal.driver.RobotSetupFactory`; options: `Ros2Config`. ``reach`` has a success rule; a person judges other
    tasks.

    Raises:
        HardwareLost: the config reads the robot's description from the ROS graph, and it is missing.
    """
    config = read_options(Ros2Config, request)
    robot = Ros2Robot(config, request.name)
    cameras = tuple(
        RosCamera(f"{request.name}_{spec.name}", spec, config.cameras[spec.name], config) for spec in robot.spec.cameras
    )
    task = build_judged_task(request, robot, config.sentence, config.max_steps)
    setup = RobotSetup(request.name, robot, task, cameras if request.cameras else ())
    sentence = request.tasks[0].sentence or config.sentence
    return add_reach_task(setup, config.reach, sentence) if wants_reach(request) else setup
