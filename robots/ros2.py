"""Driver for any arm behind ros2_control, with ROS topics as cameras and force sensor.

Sensor subscriptions are best effort. Commands are reliable and expire. Joints are matched by name. The capture time of
a reading comes from its header's stamp and is never later than its arrival.

Safe stop: the target is the measured position; then the controllers are deactivated, and the hardware keeps its last
command. The next command activates them again. A controller that a fault or a person deactivated makes the robot lost.
If this process dies, a controller moves to its last target, at most one control period ahead, and stays there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from hal.camera import Camera, CameraFrame
from hal.driver import RobotSetup, RobotSetupRequest, read_options
from hal.errors import EmergencyStopped, HalError, HardwareLost, SpecError, StaleObservation
from hal.robot import Observation, Robot, StopLevel
from hal.spec import STATE, Array, CameraSpec
from robots.device_lock import DeviceLock
from robots.homing import clip_to_range, move_home, require_joints_in_range, validate_home
from robots.manual_task import HumanJudgedTask
from robots.reach_task import REACH_TASK, add_reach_task
from robots.ros2_controllers import RESPONSE_TIMEOUT_S, ControllerManager, RosController, values_by_joint
from robots.ros2_node import RosNode, RosServiceClient
from robots.ros2_readings import CaptureTimes, ForceReading, JointReadings, StopButton
from robots.ros2_spec import Ros2Config, Ros2Layout, RosCameraConfig, make_layout, read_description
from robots.urdf import KinematicChain

log = logging.getLogger(__name__)

CHANNELS_FROM_ENCODING = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1, "8UC1": 1, "8UC3": 3}
"""The supported encodings of sensor_msgs/msg/Image, with their bytes per pixel."""


class RosCamera(Camera):
    """One camera topic on a node of its own, so that images do not delay other messages."""

    def __init__(self, node: str, spec: CameraSpec, topic: RosCameraConfig, config: Ros2Config) -> None:
        """`node`: the name of the node."""
        self.spec, self._topic, self._config = spec, topic, config
        self._node = RosNode(node, config.domain)
        self._newest: tuple[Any, int] | None = None
        self._decoded: CameraFrame | None = None
        self._times = CaptureTimes(config.clock)

    def connect(self) -> None:
        """Block until the first image. Raises HardwareLost if none arrives, or if it does not match the config."""
        if self._node.is_connected:
            return
        kind = "Image" if self._topic.kind == "raw" else "CompressedImage"
        self._times = CaptureTimes(self._config.clock)
        self._node.open()
        try:
            self._node.subscribe_sensor(f"sensor_msgs/msg/{kind}", self._topic.topic, self._on_image)
            silent = f"no image on {self._topic.topic}"
            self._node.wait_until(lambda: self._newest is not None, self._config.connect_s, silent, self.check_stop)
            if (newest := self._newest) is not None:
                self._decode(newest[0])
        except HalError:
            self.close()
            raise

    def read(self) -> CameraFrame:
        """Raises StaleObservation if the newest image is older than `RosCameraConfig.stale_s`."""
        newest = self._newest
        if not self._node.is_connected or newest is None:
            raise HardwareLost(f"camera {self.spec.name} is not connected")
        message, captured_ns = newest
        age_s = (time.monotonic_ns() - captured_ns) / 1e9
        if age_s > self._topic.stale_s:
            raise StaleObservation(f"camera {self.spec.name}: the newest image is {age_s:.3f} s old")
        if self._decoded is None or self._decoded.t_capture_ns != captured_ns:
            self._decoded = CameraFrame(self._decode(message), captured_ns)
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


def header_stamp_ns(header: Any) -> int:
    """A header's stamp in nanoseconds."""
    return int(header.stamp.sec) * 1_000_000_000 + int(header.stamp.nanosec)


def decode_raw_image(message: Any) -> Array:
    """Decode a sensor_msgs/msg/Image to uint8 (height, width, 3) RGB.

    Raises:
        HardwareLost: the encoding is not supported, or bytes are missing.
    """
    channels = CHANNELS_FROM_ENCODING.get(message.encoding)
    if channels is None:
        raise HardwareLost(
            f"the image encoding {message.encoding!r} is not supported; use one of {sorted(CHANNELS_FROM_ENCODING)}"
        )
    height, row = int(message.height), int(message.width) * channels
    if message.step < row or len(message.data) < height * message.step:
        raise HardwareLost(
            f"an image of {message.width}x{height} {message.encoding} has only {len(message.data)} bytes"
        )
    rows = np.frombuffer(message.data, np.uint8, count=height * message.step).reshape(height, message.step)
    pixels = rows[:, :row].reshape(height, message.width, channels)
    if channels == 1:
        return np.repeat(pixels, 3, axis=2)
    first = pixels[..., 2::-1] if message.encoding.startswith(("bgr", "8UC3")) else pixels[..., :3]
    return np.ascontiguousarray(first)


def jpeg_image_size(content: bytes) -> tuple[int, int]:
    """Read height and width from a JPEG's header without decoding: they may claim gigabytes. Raises HardwareLost."""
    import simplejpeg

    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(content)
    except (ValueError, KeyError) as error:  # KeyError: an unknown chroma subsampling
        raise HardwareLost(f"a compressed image is not a readable JPEG: {error!r}") from error
    return int(height), int(width)


def decode_jpeg_image(content: bytes) -> Array:
    """Decode a JPEG to uint8 (height, width, 3) RGB. Raises HardwareLost for anything else."""
    import simplejpeg

    try:
        image: Array = simplejpeg.decode_jpeg(content, colorspace="RGB")
    except ValueError as error:
        raise HardwareLost(f"a compressed image is not a readable JPEG: {error}") from error
    return image


class _RobotTopics:
    """The state that the robot publishes: joint states, and optionally a force and a stop button. For one connection.

    Attributes:
        button: the stop button.
    """

    def __init__(self, config: Ros2Config, layout: Ros2Layout) -> None:
        self._config, self._layout = config, layout
        self._readings = JointReadings(config.commanded_joints, config.clock)
        self._force: ForceReading | None = None
        self._sensor: KinematicChain | None = None
        self.button = StopButton()

    def subscribe(self, node: RosNode) -> None:
        """Subscribe, and block until every topic of the config has delivered a message."""
        config = self._config
        node.subscribe_sensor("sensor_msgs/msg/JointState", config.joint_states, self._on_joint_state)
        if config.wrench is not None:
            times = CaptureTimes(config.clock)
            node.subscribe_sensor(
                "geometry_msgs/msg/WrenchStamped", config.wrench.topic, lambda m: self._on_wrench(m, times)
            )
        if config.estop_topic:
            there = f"there is no publisher on {config.estop_topic}"
            node.wait_until(lambda: node.rclpy_node.count_publishers(config.estop_topic) > 0, config.connect_s, there)
            node.subscribe_state("std_msgs/msg/Bool", config.estop_topic, self._on_stop_button)
        try:
            node.wait_until(lambda: not self._missing_inputs(), config.connect_s, "some topics delivered nothing")
        except HardwareLost as error:
            raise HardwareLost(f"{error}: {self._missing_inputs()}") from None
        if self._force is not None and self._layout.urdf is not None:
            self._sensor = self._layout.urdf.chain(self._force.frame, config.base)

    def joints(self) -> tuple[Array, Array, int]:
        """Positions and velocities of all commanded joints, float64 (n,), and the capture time of the oldest."""
        return self._readings.latest(self._config.commanded_joints)

    def state(self) -> tuple[Array, int]:
        """The state as in the robot's spec, and the capture time of its oldest part."""
        positions, velocities, captured_ns = self.joints()
        parts = [positions]
        if self._config.velocities:
            parts.append(velocities[: len(self._config.joints)])
        values = values_by_joint(self._config.commanded_joints, positions)
        if self._layout.tool is not None:
            parts.append(self._layout.tool.pose(values)[:3, 3])
        if self._force is not None:
            parts.append(self._force_on_tool(self._force, values))
            captured_ns = min(captured_ns, self._force.t_capture_ns)
        return np.concatenate(parts).astype(np.float32), captured_ns

    def _missing_inputs(self) -> list[str]:
        """The topics and joints of the config without a message, or with an outdated one."""
        config, readings = self._config, self._readings
        missing = [f"{name} on {config.joint_states}" for name in readings.missing(config.commanded_joints)]
        if not missing and (age_s := _age_s(readings.latest(config.commanded_joints)[2])) > config.stale_s:
            missing.append(f"a recent joint state: the newest is {age_s:.3f} s old")
        if readings.clock_error or (
            missing and config.clock == "shared" and not readings.missing(config.commanded_joints)
        ):
            missing.append(f"{readings.clock_error or 'old stamps'}: synchronise the clocks, or set `clock`")
        if not readings.missing(config.commanded_joints) and (silent := self._joints_without_velocity()):
            missing.append(f"velocities of {silent} on {config.joint_states}: publish them, or set `velocities: false`")
        if config.wrench is not None and self._force is None:
            missing.append(config.wrench.topic)
        if config.estop_topic and not self.button.was_received:
            missing.append(config.estop_topic)
        return missing

    def _joints_without_velocity(self) -> list[str]:
        """The arm's joints without a velocity, if the state needs velocities."""
        joints = self._config.joints if self._config.velocities else ()
        velocities = self._readings.latest(self._config.commanded_joints)[1]
        return [name for name, velocity in zip(joints, velocities, strict=False) if not np.isfinite(velocity)]

    def _force_on_tool(self, reading: ForceReading, values: Mapping[str, float]) -> Array:
        assert self._config.wrench is not None
        force = -reading.force if self._config.wrench.of_tool else reading.force
        turned: Array = force if self._sensor is None else self._sensor.pose(values)[:3, :3] @ force
        return turned

    def _on_joint_state(self, message: Any) -> None:
        self._readings.update(message.name, message.position, message.velocity, header_stamp_ns(message.header))

    def _on_wrench(self, message: Any, times: CaptureTimes) -> None:
        captured_ns, force = times.captured_ns(header_stamp_ns(message.header)), message.wrench.force
        if captured_ns is not None:
            self._force = ForceReading(np.array([force.x, force.y, force.z]), message.header.frame_id, captured_ns)

    def _on_stop_button(self, message: Any) -> None:
        self.button.update(bool(message.data))


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
        self._controllers = _make_controllers(config)
        self._manager: ControllerManager | None = None
        self._stop_client: RosServiceClient | None = None
        self._topics = _RobotTopics(config, self._layout)
        self._target: Array | None = None
        self._connected = self._moving = self._deactivated = False

    def connect(self) -> None:
        """See `hal.robot.Robot`. Activates inactive controllers. After a hardware fault the controller manager refuses,
        and the fault is not cleared.

        Raises:
            EmergencyStopped: a stop button of the cell is pressed; no controller was activated.
            HardwareLost: also if another process of this machine has locked the controller.
            SpecError: ROS 2 or a message package is not installed.
        """
        if self._connected:
            return
        self._device_lock.acquire()
        try:
            self._node.open()
            self._topics = _RobotTopics(self.config, self._layout)
            self._topics.subscribe(self._node)
            if self.config.stop_service:
                self._stop_client = RosServiceClient(self._node, "std_srvs/srv/Trigger", self.config.stop_service)
            if self._topics.button.is_pressed:
                raise EmergencyStopped(f"a stop button of the cell is pressed ({self.config.estop_topic})")
            self._require_in_range(self._topics.joints()[0])
            self._find_controllers()
            self._connected, self._moving, self._deactivated = True, True, False
            self._hold()
        except (EmergencyStopped, HardwareLost, SpecError):
            self._disconnect()
            raise

    def observe(self) -> Observation:
        self._require_link()
        state, captured_ns = self._topics.state()
        self._require_fresh(captured_ns)
        return Observation({STATE: state}, captured_ns)

    def command(self, action: Array) -> Array:
        """See `hal.robot.Robot`. After a safe stop it first activates the controllers, which takes longer.

        Raises:
            EmergencyStopped: a stop button of the cell is pressed, or was since the last command. Nothing was
                commanded.
        """
        self.spec.action.validate(action)
        self._require_link()
        self._require_button_released()
        positions, _, captured_ns = self._topics.joints()
        self._require_alive(captured_ns)
        self._require_in_range(positions)
        if self._deactivated:
            self._activate()
            self._deactivated = False
        self._check_controllers()
        self._moving = True
        joints = positions[: len(self.config.joints)]
        return self._send(clip_to_range(self.spec, action, joints, self._low, self._high))

    def stop(self, level: StopLevel) -> None:
        """See `hal.robot.Robot`. The arm holds the position measured at the start of the stop, a gripper its target."""
        self._require_link()
        if self._deactivated:
            return
        if self._moving:
            self._hold()
        elif self._target is not None:
            self._send(self._target)
        if level is StopLevel.SAFE:
            self._deactivate()
        else:
            self._check_controllers()

    def go_home(self) -> None:
        """See `robots.manual_task.SupportsHoming`. A gripper keeps its target."""
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

    def _find_controllers(self) -> None:
        config = self.config
        if config.manager:
            manager = self._manager = ControllerManager(self._node, config.manager)
            self._node.wait_until(
                lambda: manager.is_ready, config.connect_s, f"there is no controller manager {config.manager}"
            )
            if config.activate:
                self._activate()
            self._manager.require_active([each.name for each in self._controllers])
        stamped, ask = config.clock == "shared", bool(config.manager)
        for controller in self._controllers:
            controller.open(self._node, stamped=stamped, query_parameters=ask, timeout_s=config.connect_s)

    def _activate(self) -> None:
        if self._manager is not None:
            self._manager.switch(activate=[each.name for each in self._controllers], deactivate=self.config.instead_of)

    def _hold(self) -> None:
        """Make the measured pose the target; if the readings are outdated, keep the last target."""
        positions, _, captured_ns = self._topics.joints()
        goal = positions.astype(np.float32)
        if self._target is not None:
            grip = len(self.config.joints)
            fresh = _age_s(captured_ns) <= self.config.stale_s
            goal = np.concatenate([goal[:grip] if fresh else self._target[:grip], self._target[grip:]])
        self._send(goal)  # unclipped: clipping to a limit would make the joint jump
        self._moving = False

    def _send(self, action: Array) -> Array:
        targets = values_by_joint(self.config.commanded_joints, action)
        for controller in self._controllers:
            controller.send(targets)
        self._target = action
        return action.copy()

    def _deactivate(self) -> None:
        """The second part of a safe stop, after holding; runs once."""
        self._deactivated = True
        try:
            if self._manager is not None:
                self._manager.switch(deactivate=[each.name for each in self._controllers])
        finally:
            self._call_stop_service()

    def _call_stop_service(self) -> None:
        if self._stop_client is not None:
            answer = self._stop_client.call({}, RESPONSE_TIMEOUT_S)
            if not answer.success:
                raise HardwareLost(f"{self.config.stop_service} did not stop the robot: {answer.message}")

    def _disconnect(self) -> None:
        self._node.close()
        self._device_lock.release()
        self._connected, self._manager, self._stop_client, self._target = False, None, None, None

    def _check_controllers(self) -> None:
        if self._manager is not None:
            self._manager.check_active([each.name for each in self._controllers])

    def _require_link(self) -> None:
        if not self._connected:
            raise HardwareLost(f"{self.config.model} is not connected")
        _ = self._node.rclpy_node

    def _require_button_released(self) -> None:
        topic = self.config.estop_topic
        if topic and self._node.rclpy_node.count_publishers(topic) == 0:
            raise HardwareLost(f"there is no publisher on {topic} any more: the state of the stop button is unknown")
        silent_s = self._topics.button.silence_s
        if 0 < self.config.estop_timeout_s < silent_s:
            raise HardwareLost(f"no message on {topic} for {silent_s:.3f} s: the state of the stop button is unknown")
        if self._topics.button.take_pressed():
            raise EmergencyStopped(f"a stop button of the cell is pressed, or was just now ({topic})")

    def _require_in_range(self, positions: Array) -> None:
        require_joints_in_range(self.spec, positions[: len(self.config.joints)], self._low, self._high)

    def _require_alive(self, captured_ns: int) -> None:
        age_s = _age_s(captured_ns)
        if age_s > max(self.config.lost_after_s, self.config.stale_s):
            raise HardwareLost(f"{self.config.model} has sent no joint state for {age_s:.3f} s")

    def _require_fresh(self, captured_ns: int) -> None:
        self._require_alive(captured_ns)
        age_s, allowed_s = _age_s(captured_ns), self.config.stale_s
        if age_s > allowed_s:
            raise StaleObservation(f"the newest reading is {age_s:.3f} s old; at most {allowed_s:g} s are allowed")


def _age_s(captured_ns: int) -> float:
    return (time.monotonic_ns() - captured_ns) / 1e9


def _make_controllers(config: Ros2Config) -> tuple[RosController, ...]:
    period_s, grip = 1 / config.rate_hz, config.gripper
    arm = RosController(config.controller, config.kind, config.joints, period_s)
    return (arm,) if grip is None else (arm, RosController(grip.controller, grip.kind, [grip.joint], period_s))


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
    task = HumanJudgedTask(request.task, config.sentence or request.task, config.max_steps)
    setup = RobotSetup(request.name, robot, task, cameras if request.cameras else ())
    return add_reach_task(setup, config.reach, config.sentence) if request.task == REACH_TASK else setup
