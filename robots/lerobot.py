"""Driver for the robots and cameras of LeRobot and its plugins, selected by name.

The plugin's named numbers become vectors in the plugin's order, with angles in rad. The driver reads the plugin's
calibration file and never writes it; it refuses an uncalibrated robot. Every plugin call has a timeout, after which the
robot is lost.

Safe stop: the target is the measured position. With `torque_off` the safe stop also releases the motors, and an arm
without brakes sinks. If the process dies, servos keep their last goal under torque.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hal.camera import Camera, CameraFrame, default_stale_after_s
from hal.driver import RobotSetup, RobotSetupRequest, read_options
from hal.errors import HardwareLost, SpecError, StaleObservation
from hal.robot import Observation, Robot, StopLevel
from hal.spec import ACTION, STATE, Array, CameraSpec, RobotSpec, SafetyLimits
from robots.device_lock import DeviceLock, device_lock_names
from robots.device_thread import DeviceThread
from robots.homing import clip_to_range, move_home, require_joints_in_range, validate_home
from robots.lerobot_features import FeatureConfig, LerobotFeatures, calibrated_bounds
from robots.lerobot_plugins import call_with_retries, has_setting, make_device
from robots.manual_task import HumanJudgedTask
from robots.reach_task import REACH_TASK, ReachConfig, add_reach_task

CONNECT_TIMEOUT_S = 30.0
REDUCED_SPEED = 0.25  # while a person teleoperates or is near
TORQUE_SETTING = "disable_torque_on_disconnect"

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class LerobotConfig:
    """Attributes:
    type: the robot's name in LeRobot, e.g. ``so101_follower``.
    settings: the plugin's settings, as on LeRobot's command line: ``port``, ``id``, ``calibration_dir``, ...
    features: units and bounds by feature name or pattern (``*.pos``); a LeRobot motor bus has its own.
    cameras: LeRobot's cameras by name: ``{type: opencv, index_or_path: 0, width: 640, height: 480, fps: 30}``.
    ``stale_after_s`` is optional; default: three frame times plus 0.1 s.
    gripper: the first action feature that contains this text is the gripper.
    answer_within_s: timeout of a call, after which the robot is lost; default: two control periods.
    torque_off: a safe stop releases the motors.
    home: target of a reset: one position per joint without the gripper, in the order and units of the spec (rad for
    LeRobot's degrees). If empty, a person moves the robot.
    sentence: the instruction for the policy.
    reach: settings of the task ``reach``.
    """

    type: str
    settings: dict[str, Any] = field(default_factory=dict)
    rate_hz: float = 30.0
    features: dict[str, FeatureConfig] = field(default_factory=dict)
    cameras: dict[str, dict[str, Any]] = field(default_factory=dict)
    gripper: str = "gripper"
    answer_within_s: float | None = None
    torque_off: bool = False
    home: tuple[float, ...] = ()
    stale_after_s: float = 0.5
    reduced_speed: float = REDUCED_SPEED
    sentence: str = ""
    max_steps: int = 3000
    reach: ReachConfig = field(default_factory=ReachConfig)

    def __post_init__(self) -> None:
        if self.rate_hz <= 0:
            raise ValueError(f"rate_hz is {self.rate_hz:g}; it must be above 0")
        if self.answer_within_s is not None and not self.answer_within_s > 0:
            raise ValueError(f"answer_within_s is {self.answer_within_s:g}; it must be above 0")

    @property
    def deadline_s(self) -> float:
        return self.answer_within_s or 2 / self.rate_hz


class LerobotRobot(Robot):
    """A LeRobot robot. The constructor makes the plugin's device and does not open the hardware."""

    def __init__(self, config: LerobotConfig) -> None:
        """Raises SpecError: no such plugin, a feature without a unit, or a home pose out of range."""
        self.config = config
        self.device = self._build()
        self._state = LerobotFeatures(self.device.observation_features, config.features, self.device)
        self._action = LerobotFeatures(self.device.action_features, config.features, self.device)
        self.spec = _spec(config, self._state, self._action, self.device.observation_features)
        low, high = calibrated_bounds(self.device, self._action)
        self._low = np.maximum(self.spec.action.low, low).astype(np.float32)
        self._high = np.minimum(self.spec.action.high, high).astype(np.float32)
        validate_home(self.spec, config.home, self._low, self._high)
        self._device_lock = DeviceLock(*device_lock_names(config.settings))
        self._thread: DeviceThread | None = None
        self._moving = self._released = False
        self._measured: Array = np.zeros(len(self._state.names), np.float32)
        self.images: dict[str, CameraFrame] = {}  # of the plugin's built-in cameras, from the newest observation

    def connect(self) -> None:
        """See `hal.robot.Robot`. The motors come under torque and hold. The calibration is checked, never written.

        Raises:
            HardwareLost: also if the robot is not calibrated, its motors disagree with the calibration file, or another
                process has locked its port.
        """
        if self._thread is not None:
            return
        self._require_calibration()
        self._device_lock.acquire()
        self._thread = DeviceThread(f"LeRobot's {self.config.type}")
        try:
            self._call_while_connecting("connecting", self._open)
            if not self._call_while_connecting("checking the calibration", lambda: self.device.is_calibrated):
                raise HardwareLost(
                    f"{self.config.type}: its motors hold another calibration than {self._calibration_file()}; "
                    "run lerobot-calibrate, which can write the file's values to the motors"
                )
            self._hold()
        except BaseException:
            self._disconnect()
            raise

    def observe(self) -> Observation:
        captured_ns = time.monotonic_ns()
        raw = self._call("reading", self.device.get_observation)
        for camera in self.spec.cameras:
            if camera.name in raw:
                self.images[camera.name] = CameraFrame(_checked_image(raw[camera.name], camera), captured_ns)
        self._measured = self._state.to_vector(raw)
        return Observation({STATE: self._measured.copy()}, captured_ns)

    def command(self, action: Array) -> Array:
        self.spec.action.validate(action)
        if self._released:
            self._hold()
        joints = self._measured[list(self.spec.limits.joint_position)]
        require_joints_in_range(self.spec, joints, self._low, self._high)
        self._moving = True
        sent = self._send(clip_to_range(self.spec, action, joints, self._low, self._high))
        low, high = np.array(self.spec.action.low, np.float32), np.array(self.spec.action.high, np.float32)
        return clip_to_range(self.spec, sent, joints, low, high)

    def stop(self, level: StopLevel) -> None:
        """See `hal.robot.Robot`. Joints hold the position measured at the start of the stop, the gripper its goal;
        other commanded elements become 0."""
        if self._released:
            if level is StopLevel.SAFE:
                return
            self._hold()
        elif self._moving:
            self._hold()
        else:
            self._send(self._goal)
        if level is StopLevel.SAFE and self.config.torque_off:
            self._call("releasing the motors", self.device.bus.disable_torque, CONNECT_TIMEOUT_S)
            self._released = True

    def go_home(self) -> None:
        """See `robots.manual_task.SupportsHoming`. Other elements than joints, such as a gripper, keep their goal."""
        self.stop(StopLevel.HOLD)
        if self.config.home:
            move_home(self, self.config.home, self._goal)

    def close(self) -> None:
        if self._thread is None:
            return
        try:
            self.stop(StopLevel.SAFE)
        except HardwareLost as error:
            log.warning("lerobot.stop_failed %s; its motors keep their last goal", error)
        self._disconnect()

    def _build(self) -> Any:
        config, settings = self.config, dict(self.config.settings)
        if has_setting("robot", config.type, TORQUE_SETTING):
            settings.setdefault(TORQUE_SETTING, config.torque_off)
        device = make_device("robot", config.type, settings)
        if config.torque_off and not hasattr(getattr(device, "bus", None), "disable_torque"):
            raise SpecError(
                f"torque_off: LeRobot's {config.type} has no motor bus that can release the torque; remove the option"
            )
        return device

    def _require_calibration(self) -> None:
        if hasattr(self.device, "bus") and not self.device.calibration:
            raise HardwareLost(
                f"{self.config.type} is not calibrated: there is no {self._calibration_file()}; run lerobot-calibrate "
                "with the same id"
            )

    def _calibration_file(self) -> str:
        return str(getattr(self.device, "calibration_fpath", "calibration file"))

    def _open(self) -> None:
        if self.device.is_connected:  # a failed attempt left it connected
            self.device.disconnect()
        try:
            self._set_goals_to_measured()
            self.device.connect(calibrate=False)
        except RuntimeError as error:  # LeRobot raises it for a motor that does not answer during the scan of the bus
            raise ConnectionError(str(error)) from error

    def _set_goals_to_measured(self) -> None:
        """Set each motor's goal to its measured position before LeRobot connects.

        LeRobot enables the torque while it connects, and motors then move to their last goal. Without this, an arm that
        was moved by hand would jump back.
        """
        bus = getattr(self.device, "bus", None)
        if bus is None or not hasattr(bus, "sync_write"):
            return
        try:
            bus.connect()
            bus.sync_write("Goal_Position", bus.sync_read("Present_Position", normalize=False), normalize=False)
        finally:
            if bus.is_connected:
                bus.disconnect(disable_torque=False)

    def _hold(self) -> None:
        """Make the measured pose the goal; enables the torque of released motors."""
        measured = self._measured = self._state.to_vector(self._call("reading", self.device.get_observation))
        goal = np.array(self.spec.neutral, np.float32)
        for index, feature in enumerate(self._action.features):
            if index == self.spec.gripper and self._moving:
                goal[index] = self._goal[index]  # keeps its grip
            elif feature.is_position and feature.name in self._state.names:
                goal[index] = measured[self._state.index(feature.name)]
        self._send(goal)  # unclipped: clipping to a bound would make the joint jump
        if self._released:
            self._call("enabling the torque", self.device.bus.enable_torque, CONNECT_TIMEOUT_S)
        self._moving = self._released = False

    def _send(self, action: Array) -> Array:
        values = self._action.to_values(action)
        sent = self._call("commanding", lambda: self.device.send_action(values))
        applied = self._action.to_vector(sent if isinstance(sent, Mapping) else {}, fallback=action)
        self._goal: Array = applied.astype(np.float32)
        return self._goal

    def _call(self, operation: str, function: Callable[[], T], deadline_s: float | None = None) -> T:
        if self._thread is None:
            raise HardwareLost(f"LeRobot's {self.config.type} is not connected")
        call = partial(call_with_retries, self.config.type, function)
        return self._thread.call(operation, call, deadline_s or self.config.deadline_s)

    def _call_while_connecting(self, operation: str, function: Callable[[], T]) -> T:
        """As `_call`, while connecting."""
        assert self._thread is not None
        return self._thread.call(
            operation, partial(call_with_retries, self.config.type, function), CONNECT_TIMEOUT_S, self.check_stop
        )

    def _disconnect(self) -> None:
        """Disconnect. The next connection starts with a new device."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            thread.call("disconnecting", self.device.disconnect, CONNECT_TIMEOUT_S)
        except HardwareLost as error:
            log.warning("lerobot.disconnect %s", error)
        thread.close()
        self._moving = self._released = False
        self._device_lock.release()
        self.device = self._build()


def _spec(
    config: LerobotConfig, state: LerobotFeatures, action: LerobotFeatures, features: Mapping[str, Any]
) -> RobotSpec:
    gripper = next((i for i, name in enumerate(action.names) if config.gripper and config.gripper in name), -1)
    joints = tuple(
        i for i, each in enumerate(action.features) if each.is_position and each.name in state.names and i != gripper
    )
    targets = [action.features[i] for i in joints]
    return RobotSpec(
        model=config.type,
        rate_hz=config.rate_hz,
        observation=(state.spec(STATE),),
        action=action.spec(ACTION),
        cameras=(*_plugin_cameras(config, features), *(_camera_spec(n, s) for n, s in config.cameras.items())),
        limits=SafetyLimits(
            joint_position=tuple(state.index(each.name) for each in targets),
            joint_low=tuple(each.low for each in targets),
            joint_high=tuple(each.high for each in targets),
            joint_velocity_max=tuple(each.speed_max for each in targets),
            reduced_speed=config.reduced_speed,
            stale_after_s=config.stale_after_s,
        ),
        neutral=tuple(
            each.high if i == gripper else min(max(0.0, each.low), each.high) for i, each in enumerate(action.features)
        ),
        joint_target=joints,
        gripper=gripper,
        safe_stop="holds its pose" + (", then releases its motors and sinks" if config.torque_off else ""),
    )


def _plugin_cameras(config: LerobotConfig, features: Mapping[str, Any]) -> tuple[CameraSpec, ...]:
    """The plugin robot's built-in cameras, whose images come with its observations."""
    shapes = {name: shape for name, shape in features.items() if isinstance(shape, tuple) and len(shape) == 3}
    if unknown := [name for name, shape in shapes.items() if not all(isinstance(size, int) for size in shape)]:
        raise SpecError(f"LeRobot's {config.type}: set width and height of its cameras {unknown}")
    return tuple(
        CameraSpec(name=name, height=shape[0], width=shape[1], rate_hz=config.rate_hz) for name, shape in shapes.items()
    )


def _camera_spec(name: str, settings: Mapping[str, Any]) -> CameraSpec:
    for key in ("width", "height", "fps"):
        if not isinstance(settings.get(key), int | float):
            raise SpecError(f"camera {name}: {key!r} is missing or not a number")
    return CameraSpec(name=name, height=settings["height"], width=settings["width"], rate_hz=settings["fps"])


class BuiltInCamera(Camera):
    """A camera that is built into a plugin's robot. Its frames come with the robot's newest observation."""

    def __init__(self, robot: LerobotRobot, spec: CameraSpec) -> None:
        self.spec, self._robot = spec, robot
        self._connected = False

    def connect(self) -> None:
        self._connected = True

    def read(self) -> CameraFrame:
        frame = self._robot.images.get(self.spec.name) if self._connected else None
        if frame is None:
            raise HardwareLost(f"camera {self.spec.name} of {self._robot.spec.model} has no frame yet")
        _require_fresh(frame, self.spec)
        return frame

    def close(self) -> None:
        self._connected = False


class LerobotCamera(Camera):
    """A LeRobot camera, read without blocking. Without a capture time from the camera, the time of the read counts."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        """Raises SpecError: no such plugin, a missing width, height or fps, or an invalid stale_after_s."""
        self.spec = _camera_spec(name, settings)
        self._settings = dict(settings)
        self._stale_s = self._settings.pop("stale_after_s", default_stale_after_s(self.spec.rate_hz))
        if not isinstance(self._stale_s, int | float) or not self._stale_s > 0:
            raise SpecError(f"camera {name}: stale_after_s is {self._stale_s!r}; it must be a number above 0")
        self._type = str(self._settings.pop("type", "opencv"))
        self.device = make_device("camera", self._type, self._settings)
        self._device_lock = DeviceLock(*device_lock_names(self._settings))
        self._thread: DeviceThread | None = None

    def connect(self) -> None:
        if self._thread is not None:
            return
        self._device_lock.acquire()
        self._thread = DeviceThread(f"camera {self.spec.name}")
        try:
            self._thread.call("connecting", self.device.connect, CONNECT_TIMEOUT_S, self.check_stop)
        except BaseException:
            self.close()
            raise

    def read(self) -> CameraFrame:
        if self._thread is None:
            raise HardwareLost(f"camera {self.spec.name} is not connected")
        captured_ns = time.monotonic_ns()
        try:
            image = _checked_image(self._thread.call("reading", self._latest, self._stale_s), self.spec)
        except HardwareLost as error:
            if isinstance(error.__cause__, TimeoutError):
                raise StaleObservation(str(error)) from error
            raise
        if getattr(getattr(self.device, "color_mode", None), "value", "rgb") == "bgr":
            image = np.ascontiguousarray(image[..., ::-1])
        if (stamp_s := getattr(self.device, "latest_timestamp", None)) is not None:
            captured_ns = min(captured_ns, int(stamp_s * 1e9))  # LeRobot's clock is the monotonic one on Linux
        return CameraFrame(image, captured_ns)

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            thread.call("disconnecting", self.device.disconnect, CONNECT_TIMEOUT_S)
        except HardwareLost as error:  # e.g. a camera that was never connected
            log.warning("lerobot.disconnect %s", error)
        thread.close()
        self._device_lock.release()

    def _latest(self) -> Array:
        image: Array = self.device.read_latest(max_age_ms=round(self._stale_s * 1000))
        return image


def _checked_image(raw: Any, spec: CameraSpec) -> Array:
    """Copy an image. Raises HardwareLost if its shape or dtype differs from the spec."""
    image: Array = np.array(raw)
    if image.shape != spec.shape or image.dtype != np.uint8:
        raise HardwareLost(
            f"camera {spec.name}: images are {image.dtype} {image.shape}, not uint8 {spec.shape}; set width and height"
        )
    return image


def _require_fresh(frame: CameraFrame, camera: CameraSpec) -> None:
    age_s = (time.monotonic_ns() - frame.t_capture_ns) / 1e9
    if age_s > default_stale_after_s(camera.rate_hz):
        raise StaleObservation(f"camera {camera.name}: the newest frame is {age_s:.3f} s old")


def make_robot_setup(request: RobotSetupRequest) -> RobotSetup:
    """A `hal.driver.RobotSetupFactory`; options: `LerobotConfig`. ``reach`` has a success rule; a person judges other
    tasks."""
    config = read_options(LerobotConfig, request)
    robot = LerobotRobot(config)
    own = tuple(BuiltInCamera(robot, each) for each in robot.spec.cameras if each.name not in config.cameras)
    cameras = (*own, *(LerobotCamera(*each) for each in config.cameras.items())) if request.cameras else ()
    task = HumanJudgedTask(request.task, config.sentence or request.task, config.max_steps)
    setup = RobotSetup(request.name, robot, task, cameras)
    return add_reach_task(setup, config.reach, config.sentence) if request.task == REACH_TASK else setup
