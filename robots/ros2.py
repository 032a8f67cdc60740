"""A topic of pictures as a camera: raw or compressed, best effort, the newest one counts.

Any arm behind ros2_control: joint states in, targets to a controller out; pictures and force where it has them.

Sensors are subscribed to with best effort; commands are reliable, and never delivered late. Joints are told apart by
name. A reading is as old as its header's stamp says, and never younger than its arrival.

Safe stop: the joints are told to stay where they are measured; then the controllers are deactivated, which leaves the
hardware at its last command. A command after that activates them again; one that this driver did not deactivate itself,
because of a fault or by somebody else's hand, ends the connection instead. When this process dies, a controller reaches
its last target, at most one control period ahead, and stays there.
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
from robots.ros2_spec import Ros2Config, RosCameraConfig, make_layout, read_description
from robots.urdf import KinematicChain

CHANNELS_FROM_ENCODING = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1, "8UC1": 1, "8UC3": 3}
"""Encodings of sensor_msgs/msg/Image that are understood, and their bytes a pixel."""


class RosCamera(Camera):
    """One camera on a node of its own, so that its pictures keep nobody else's messages waiting."""

    def __init__(self, node: str, spec: CameraSpec, topic: RosCameraConfig, config: Ros2Config) -> None:
        """`node`: the name of its node."""
        self.spec, self._topic, self._config = spec, topic, config
        self._link = RosNode(node, config.domain)
        self._newest: tuple[Any, int] | None = None
        self._decoded: CameraFrame | None = None
        self._times = CaptureTimes(config.clock)

    def connect(self) -> None:
        """Blocks until the first picture. Raises HardwareLost where none comes, or one that the config does not fit."""
        if self._link.is_connected:
            return
        kind = "Image" if self._topic.kind == "raw" else "CompressedImage"
        self._times = CaptureTimes(self._config.clock)
        self._link.open()
        try:
            self._link.subscribe_sensor(f"sensor_msgs/msg/{kind}", self._topic.topic, self._take)
            silent = f"no picture came on {self._topic.topic}"
            self._link.wait_until(lambda: self._newest is not None, self._config.connect_s, silent, self.check_stop)
            if (newest := self._newest) is not None:
                self._decode(newest[0])
        except HalError:
            self.close()
            raise

    def read(self) -> CameraFrame:
        """Raises StaleObservation where the newest picture is older than `RosCameraConfig.stale_s`."""
        newest = self._newest
        if not self._link.is_connected or newest is None:
            raise HardwareLost(f"camera {self.spec.name} is not connected")
        message, captured_ns = newest
        age_s = (time.monotonic_ns() - captured_ns) / 1e9
        if age_s > self._topic.stale_s:
            raise StaleObservation(f"camera {self.spec.name}: the newest picture is {age_s:.3f} s old")
        if self._decoded is None or self._decoded.t_capture_ns != captured_ns:
            self._decoded = CameraFrame(self._decode(message), captured_ns)
        return self._decoded

    def close(self) -> None:
        self._link.close()
        self._newest = self._decoded = None

    def _take(self, message: Any) -> None:
        captured_ns = self._times.captured_ns(header_stamp_ns(message.header))
        if captured_ns is not None:
            self._newest = message, captured_ns

    def _decode(self, message: Any) -> Array:
        raw = self._topic.kind == "raw"
        content = b"" if raw else bytes(message.data)
        height, width = (int(message.height), int(message.width)) if raw else jpeg_image_size(content)
        if (height, width) != self.spec.shape[:2]:
            raise HardwareLost(
                f"camera {self.spec.name} gives pictures of {width}x{height}; "
                f"the config says {self.spec.width}x{self.spec.height}"
            )
        return decode_raw_image(message) if raw else decode_jpeg_image(content)


def header_stamp_ns(header: Any) -> int:
    """A header's stamp in nanoseconds."""
    return int(header.stamp.sec) * 1_000_000_000 + int(header.stamp.nanosec)


def decode_raw_image(message: Any) -> Array:
    """uint8 (height, width, 3) RGB of a sensor_msgs/msg/Image.

    Raises:
        HardwareLost: an encoding that is not understood, or fewer bytes than the picture needs.
    """
    channels = CHANNELS_FROM_ENCODING.get(message.encoding)
    if channels is None:
        raise HardwareLost(
            f"pictures are encoded as {message.encoding!r}; understood are {sorted(CHANNELS_FROM_ENCODING)}"
        )
    height, row = int(message.height), int(message.width) * channels
    if message.step < row or len(message.data) < height * message.step:
        raise HardwareLost(f"a picture of {message.width}x{height} {message.encoding} has {len(message.data)} bytes")
    rows = np.frombuffer(message.data, np.uint8, count=height * message.step).reshape(height, message.step)
    pixels = rows[:, :row].reshape(height, message.width, channels)
    if channels == 1:
        return np.repeat(pixels, 3, axis=2)
    first = pixels[..., 2::-1] if message.encoding.startswith(("bgr", "8UC3")) else pixels[..., :3]
    return np.ascontiguousarray(first)


def jpeg_image_size(content: bytes) -> tuple[int, int]:
    """Height and width that a JPEG claims, which may be gigabytes; nothing is decoded. Raises HardwareLost."""
    import simplejpeg

    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(content)
    except (ValueError, KeyError) as error:  # KeyError: colours at a resolution that it has no name for
        raise HardwareLost(f"a compressed picture is no JPEG that can be read: {error!r}") from error
    return int(height), int(width)


def decode_jpeg_image(content: bytes) -> Array:
    """uint8 (height, width, 3) RGB of a JPEG. Raises HardwareLost for anything else."""
    import simplejpeg

    try:
        image: Array = simplejpeg.decode_jpeg(content, colorspace="RGB")
    except ValueError as error:
        raise HardwareLost(f"a compressed picture is no JPEG: {error}") from error
    return image


log = logging.getLogger(__name__)


class Ros2Robot(Robot):
    """An arm behind ros2_control."""

    def __init__(self, config: Ros2Config, name: str = "arm") -> None:
        """Reads the robot's description, which waits for the graph where it is there; see `read_description`."""
        self.config = config
        self._layout = make_layout(config, read_description(config, name))
        self.spec = self._layout.spec
        self._low, self._high = (np.array(each, np.float32) for each in (self.spec.action.low, self.spec.action.high))
        validate_home(self.spec, config.home, self._low, self._high)
        self._link = RosNode(f"user_sys_{name}", config.domain)
        domain = os.environ.get("ROS_DOMAIN_ID") or "0" if config.domain is None else config.domain
        self._alone = DeviceLock(f"ros2-{domain}-{config.controller.strip('/')}")
        self._controllers = _make_controllers(config)
        self._manager: ControllerManager | None = None
        self._stopper: RosServiceClient | None = None
        self._readings = JointReadings(config.commanded_joints, config.clock)
        self._force: ForceReading | None = None
        self._sensor: KinematicChain | None = None
        self._button = StopButton()
        self._target: Array | None = None
        self._connected = self._moving = self._released = False

    def connect(self) -> None:
        """See `hal.robot.Robot`. Inactive controllers are activated; a fault of the hardware is not cleared, and makes
        the controller manager refuse.

        Raises:
            EmergencyStopped: a stop button of the cell is pressed; no controller was activated.
            HardwareLost: also where another process of this machine commands the controller.
            SpecError: ROS 2, or a package of messages, is not installed.
        """
        if self._connected:
            return
        self._alone.acquire()
        try:
            self._link.open()
            self._listen()
            self._find_sensor()
            if self._button.is_pressed:
                raise EmergencyStopped(f"a stop button of the cell is pressed ({self.config.estop_topic})")
            self._require_in_range(self._readings.latest(self.config.commanded_joints)[0])
            self._find_controllers()
            self._connected, self._moving, self._released = True, True, False
            self._hold()
        except (EmergencyStopped, HardwareLost, SpecError):
            self._let_go()
            raise

    def observe(self) -> Observation:
        self._require_link()
        positions, velocities, captured_ns = self._readings.latest(self.config.commanded_joints)
        parts = [positions]
        if self.config.velocities:
            parts.append(velocities[: len(self.config.joints)])
        values = values_by_joint(self.config.commanded_joints, positions)
        if self._layout.tool is not None:
            parts.append(self._layout.tool.pose(values)[:3, 3])
        if self._force is not None:
            parts.append(self._force_on_tool(self._force, values))
            captured_ns = min(captured_ns, self._force.t_capture_ns)
        self._require_fresh(captured_ns)
        return Observation({STATE: np.concatenate(parts).astype(np.float32)}, captured_ns)

    def command(self, action: Array) -> Array:
        """See `hal.robot.Robot`. After a safe stop it first activates the controllers again, which takes longer.

        Raises:
            EmergencyStopped: a stop button of the cell is pressed, or was since the last command. Nothing was
                commanded.
        """
        self.spec.action.validate(action)
        self._require_link()
        self._require_unpressed()
        positions, _, captured_ns = self._readings.latest(self.config.commanded_joints)
        self._require_alive(captured_ns)
        self._require_in_range(positions)
        if self._released:
            self._activate()
            self._released = False
        self._watch()
        self._moving = True
        joints = positions[: len(self.config.joints)]
        return self._send(clip_to_range(self.spec, action, joints, self._low, self._high))

    def stop(self, level: StopLevel) -> None:
        """See `hal.robot.Robot`. The arm is held where it was measured when the stop began, a gripper at its target."""
        self._require_link()
        if self._released:
            return
        if self._moving:
            self._hold()
        elif self._target is not None:
            self._send(self._target)
        if level is StopLevel.SAFE:
            self._release()
        else:
            self._watch()

    def go_home(self) -> None:
        """See `robots.manual_task.SupportsHoming`. A gripper stays at its target."""
        self.stop(StopLevel.HOLD)
        if self.config.home and self._target is not None:
            move_home(self, self.config.home, self._target)

    def close(self) -> None:
        if self._connected:
            try:
                self.stop(StopLevel.SAFE)
            except HardwareLost as error:
                log.warning("ros2.unstopped %s; its controllers stay at their last target", error)
        self._let_go()

    def _listen(self) -> None:
        """Subscribes, and waits until everything that the config names was heard once."""
        config, link = self.config, self._link
        self._readings = JointReadings(config.commanded_joints, config.clock)
        self._force, self._button = None, StopButton()
        link.subscribe_sensor("sensor_msgs/msg/JointState", config.joint_states, self._take_joints)
        if config.wrench is not None:
            times = CaptureTimes(config.clock)
            link.subscribe_sensor(
                "geometry_msgs/msg/WrenchStamped", config.wrench.topic, lambda m: self._take_force(m, times)
            )
        if config.estop_topic:
            there = f"nobody publishes {config.estop_topic}"
            link.wait_until(lambda: link.node.count_publishers(config.estop_topic) > 0, config.connect_s, there)
            link.subscribe_state("std_msgs/msg/Bool", config.estop_topic, self._take_button)
        if config.stop_service:
            self._stopper = RosServiceClient(link, "std_srvs/srv/Trigger", config.stop_service)
        try:
            link.wait_until(lambda: not self._unheard(), config.connect_s, "not everything was heard")
        except HardwareLost as error:
            raise HardwareLost(f"{error}: {self._unheard()}") from None

    def _find_sensor(self) -> None:
        """Learns where the force sensor sits, where the description has the frame that its messages name."""
        if self._force is not None and self._layout.urdf is not None:
            self._sensor = self._layout.urdf.chain(self._force.frame, self.config.base)

    def _unheard(self) -> list[str]:
        """What the config names and has not been heard, or only what is too old."""
        config, readings = self.config, self._readings
        missing = [f"{name} on {config.joint_states}" for name in readings.missing(config.commanded_joints)]
        if not missing and (age_s := self._age_s(readings.latest(config.commanded_joints)[2])) > config.stale_s:
            missing.append(f"a joint state that is not {age_s:.3f} s old")
        if readings.clock_error or (
            missing and config.clock == "shared" and not readings.missing(config.commanded_joints)
        ):
            missing.append(f"{readings.clock_error or 'old stamps'}: synchronise the clocks, or set `clock`")
        if not readings.missing(config.commanded_joints) and (silent := self._without_velocity()):
            missing.append(f"velocities of {silent} on {config.joint_states}: `velocities: false` does without")
        if config.wrench is not None and self._force is None:
            missing.append(config.wrench.topic)
        if config.estop_topic and not self._button.was_received:
            missing.append(config.estop_topic)
        return missing

    def _without_velocity(self) -> list[str]:
        """The arm's joints whose velocity the state is to have, and nobody says."""
        joints = self.config.joints if self.config.velocities else ()
        velocities = self._readings.latest(self.config.commanded_joints)[1]
        return [name for name, velocity in zip(joints, velocities, strict=False) if not np.isfinite(velocity)]

    def _find_controllers(self) -> None:
        config = self.config
        if config.manager:
            manager = self._manager = ControllerManager(self._link, config.manager)
            self._link.wait_until(lambda: manager.is_ready, config.connect_s, f"no controller manager {config.manager}")
            if config.activate:
                self._activate()
            self._manager.require_active([each.name for each in self._controllers])
        stamped, ask = config.clock == "shared", bool(config.manager)
        for controller in self._controllers:
            controller.open(self._link, stamped=stamped, query_parameters=ask, timeout_s=config.connect_s)

    def _activate(self) -> None:
        if self._manager is not None:
            self._manager.switch(activate=[each.name for each in self._controllers], deactivate=self.config.instead_of)

    def _hold(self) -> None:
        """Makes the measured pose the target, or keeps the last one where the readings are too old to go by."""
        positions, _, captured_ns = self._readings.latest(self.config.commanded_joints)
        goal = positions.astype(np.float32)
        if self._target is not None:
            grip = len(self.config.joints)
            fresh = self._age_s(captured_ns) <= self.config.stale_s
            goal = np.concatenate([goal[:grip] if fresh else self._target[:grip], self._target[grip:]])
        self._send(goal)  # wherever that is: what a limit cuts off would be leapt
        self._moving = False

    def _send(self, action: Array) -> Array:
        targets = values_by_joint(self.config.commanded_joints, action)
        for controller in self._controllers:
            controller.send(targets)
        self._target = action
        return action.copy()

    def _release(self) -> None:
        """The part of a safe stop that comes after holding; done once."""
        self._released = True
        try:
            if self._manager is not None:
                self._manager.switch(deactivate=[each.name for each in self._controllers])
        finally:
            self._call_stop_service()

    def _call_stop_service(self) -> None:
        if self._stopper is not None:
            answer = self._stopper.call({}, RESPONSE_TIMEOUT_S)
            if not answer.success:
                raise HardwareLost(f"{self.config.stop_service} did not stop the robot: {answer.message}")

    def _let_go(self) -> None:
        self._link.close()
        self._alone.release()
        self._connected, self._manager, self._stopper, self._target = False, None, None, None

    def _watch(self) -> None:
        if self._manager is not None:
            self._manager.check_active([each.name for each in self._controllers])

    def _require_link(self) -> None:
        if not self._connected:
            raise HardwareLost(f"{self.config.model} is not connected")
        _ = self._link.node

    def _require_unpressed(self) -> None:
        topic = self.config.estop_topic
        if topic and self._link.node.count_publishers(topic) == 0:
            raise HardwareLost(f"nobody says any more on {topic} whether the stop button is pressed")
        silent_s = self._button.silence_s
        if 0 < self.config.estop_timeout_s < silent_s:
            raise HardwareLost(f"{topic} has not said for {silent_s:.3f} s whether the stop button is pressed")
        if self._button.take_pressed():
            raise EmergencyStopped(f"a stop button of the cell is pressed, or was just now ({topic})")

    def _require_in_range(self, positions: Array) -> None:
        require_joints_in_range(self.spec, positions[: len(self.config.joints)], self._low, self._high)

    def _require_alive(self, captured_ns: int) -> None:
        age_s = self._age_s(captured_ns)
        if age_s > max(self.config.lost_after_s, self.config.stale_s):
            raise HardwareLost(f"{self.config.model} has said nothing for {age_s:.3f} s")

    def _require_fresh(self, captured_ns: int) -> None:
        self._require_alive(captured_ns)
        age_s, allowed_s = self._age_s(captured_ns), self.config.stale_s
        if age_s > allowed_s:
            raise StaleObservation(f"the newest reading is {age_s:.3f} s old; at most {allowed_s:g} s may pass")

    def _age_s(self, captured_ns: int) -> float:
        return (time.monotonic_ns() - captured_ns) / 1e9

    def _force_on_tool(self, reading: ForceReading, values: Mapping[str, float]) -> Array:
        assert self.config.wrench is not None
        force = -reading.force if self.config.wrench.of_tool else reading.force
        turned: Array = force if self._sensor is None else self._sensor.pose(values)[:3, :3] @ force
        return turned

    def _take_joints(self, message: Any) -> None:
        self._readings.update(message.name, message.position, message.velocity, header_stamp_ns(message.header))

    def _take_force(self, message: Any, times: CaptureTimes) -> None:
        captured_ns, force = times.captured_ns(header_stamp_ns(message.header)), message.wrench.force
        if captured_ns is not None:
            self._force = ForceReading(np.array([force.x, force.y, force.z]), message.header.frame_id, captured_ns)

    def _take_button(self, message: Any) -> None:
        self._button.update(bool(message.data))


def _make_controllers(config: Ros2Config) -> tuple[RosController, ...]:
    period_s, grip = 1 / config.rate_hz, config.gripper
    arm = RosController(config.controller, config.kind, config.joints, period_s)
    return (arm,) if grip is None else (arm, RosController(grip.controller, grip.kind, [grip.joint], period_s))


def make_robot_setup(request: RobotSetupRequest) -> RobotSetup:
    """A `hal.driver.RobotSetupFactory`; options: `Ros2Config`. ``reach`` is judged by rule, any other task by a person.

    Raises:
        HardwareLost: the robot's description is to be read from the graph, and is not there.
    """
    config = read_options(Ros2Config, request)
    robot = Ros2Robot(config, request.name)
    cameras = tuple(
        RosCamera(f"{request.name}_{spec.name}", spec, config.cameras[spec.name], config) for spec in robot.spec.cameras
    )
    task = HumanJudgedTask(request.task, config.sentence or request.task, config.max_steps)
    station = RobotSetup(request.name, robot, task, cameras if request.cameras else ())
    return add_reach_task(station, config.reach, config.sentence) if request.task == REACH_TASK else station
