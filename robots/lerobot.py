"""Driver for the robots and teleoperators of LeRobot and its plugins, selected by name.

The plugin's named numbers become vectors in the plugin's order, with angles in rad. The driver reads the plugin's
calibration file and never writes it; it refuses an uncalibrated robot. Every plugin call has a timeout, after which the
robot is lost.

Safe stop: the target is the measured position. With `torque_off` the safe stop also releases the motors, and an arm
without brakes sinks. If the process dies, servos keep their last goal under torque, and wheels their last speed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, TypeVar

import numpy as np
from msgspec import Meta

from hal.driver import RobotSetup, RobotSetupRequest, read_options
from hal.errors import HardwareLost, SpecError
from hal.robot import Observation, Robot, StopLevel
from hal.settings import Positive
from hal.spec import ACTION, STATE, Array, ArraySpec, RobotSpec, SafetyLimits
from hal.teleoperator import Teleoperator, TeleopInput
from robots.cameras import CameraConfig, camera_specs, make_cameras
from robots.device import run_all
from robots.homing import build_judged_task, clip_to_range, move_home, require_joints_in_range, validate_home
from robots.lerobot_plugins import CONNECT_TIMEOUT_S, PluginDevice, parts
from robots.reach_task import ReachConfig, ReachRobotWrapper, add_reach_task, wants_reach

_SI_UNITS = {"deg": ("rad", math.pi / 180), "deg/s": ("rad/s", math.pi / 180), "mm": ("m", 1e-3)}
_MISSPELT_UNITS = {"degree", "degrees", "°", "radian", "radians", "millimetres", "millimeters", "metres", "meters"}
POSITION_SUFFIX = ".pos"

TORQUE_SETTING = "disable_torque_on_disconnect"

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class FeatureConfig:
    """The unit and bounds of a feature.

    Attributes:
        unit: of LeRobot's values. ``deg``, ``deg/s`` and ``mm`` become rad, rad/s and m; the spec keeps any other unit,
            e.g. ``%`` of a calibrated range.
        low, high: bounds, in `unit`.
        speed_max: limit of a commanded position's speed, in `unit` per second; default: a quarter of the range.
    """

    unit: str
    low: float
    high: float
    speed_max: float | None = None

    def __post_init__(self) -> None:
        if self.unit.lower() in _MISSPELT_UNITS:
            raise ValueError(
                f"unit: {self.unit!r} is not known; use deg, rad, mm, m, the same with /s, or a unit of your own"
            )


_CONFIG_FROM_NORM_MODE = {
    "degrees": FeatureConfig("deg", -180, 180),
    "range_m100_100": FeatureConfig("%", -100, 100),
    "range_0_100": FeatureConfig("%", 0, 100),
}
"""By the normalization mode of a motor in LeRobot's motor bus."""


class LerobotFeatures:
    """Some features in a fixed order; converts LeRobot's dictionaries to vectors and back.

    Attributes:
        units: ours.
        low, high, speed_max: float64 (n,), in our units and per second.
        scale: float64 (n,); LeRobot's value times this is ours.
    """

    def __init__(self, names: Mapping[str, Any], configs: Mapping[str, FeatureConfig], device: Any) -> None:
        """Select the numeric features in `names` (LeRobot's ``observation_features`` or ``action_features``), in order.

        A feature's unit comes from the first matching pattern of `configs`, else from the device's motor bus.

        Raises:
            SpecError: a feature without a unit, or no numeric feature.
        """
        self.names = tuple(name for name, kind in names.items() if kind in (float, int, "float32", "float"))
        if not self.names:
            raise SpecError(f"LeRobot's device has no numeric features; it has {sorted(names)}")
        modes = {name: _norm_mode(bus, motor) for name, bus, motor in _motors(device)}
        found = {
            name: _declared_config(name, configs) or _CONFIG_FROM_NORM_MODE.get(modes.get(name, ""))
            for name in self.names
        }
        if unknown := [name for name, config in found.items() if config is None]:
            raise SpecError(
                f"the units of {unknown} are not known; set them by name or pattern: "
                f"`features: {{'{unknown[0]}': {{unit: deg, low: -180, high: 180}}}}`"
            )
        known = [config for config in found.values() if config is not None]
        self.units, scale = zip(*(_SI_UNITS.get(each.unit, (each.unit, 1.0)) for each in known), strict=True)
        self.scale: Array = np.array(scale)
        self.low, self.high = (self.scale * bounds for bounds in zip(*((c.low, c.high) for c in known), strict=True))
        speeds = [(c.high - c.low) / 4 if c.speed_max is None else c.speed_max for c in known]
        self.speed_max: Array = self.scale * speeds

    def spec(self, feature: str) -> ArraySpec:
        rows = zip(self.names, self.units, self.low.tolist(), self.high.tolist(), strict=True)
        return ArraySpec.from_rows(feature, rows)

    def to_vector(self, values: Mapping[str, Any], fallback: Array | None = None) -> Array:
        """Convert LeRobot's values to ours: float32 (n,).

        Args:
            fallback: replaces features that `values` lacks.

        Raises:
            HardwareLost: a feature is missing, and there is no fallback.
        """
        missing = [name for name in self.names if name not in values]
        if missing and fallback is None:
            raise HardwareLost(f"LeRobot's robot returned no {missing}; it returned {sorted(values)}")
        ours = [
            float(values[name]) * scale if name in values else float(fallback[index])  # type: ignore[index]
            for index, (name, scale) in enumerate(zip(self.names, self.scale, strict=True))
        ]
        return np.array(ours, np.float32)

    def to_values(self, vector: Array) -> dict[str, float]:
        """Convert our vector to LeRobot's values."""
        return dict(zip(self.names, (vector / self.scale).tolist(), strict=True))

    def index(self, name: str) -> int:
        return self.names.index(name)


def _declared_config(name: str, declared: Mapping[str, FeatureConfig]) -> FeatureConfig | None:
    return next((config for pattern, config in declared.items() if fnmatchcase(name, pattern)), None)


def _norm_mode(bus: Any, motor: str) -> str:
    return str(getattr(bus.motors[motor].norm_mode, "value", ""))


def calibrated_bounds(device: Any, features: LerobotFeatures) -> tuple[Array, Array]:
    """The lowest and highest position of each feature by the device's calibration, in our units: float64 (n,).

    Infinite without a calibration, and for values that are a share of the calibrated range.
    """
    low, high = np.full(len(features.names), -np.inf), np.full(len(features.names), np.inf)
    for name, bus, motor in _motors(device):
        calibration = getattr(bus, "calibration", {}).get(motor)
        if _norm_mode(bus, motor) == "degrees" and calibration is not None and name in features.names:
            steps, index = bus.model_resolution_table[bus.motors[motor].model] - 1, features.index(name)
            half = (calibration.range_max - calibration.range_min) / 2 * 360 / steps  # LeRobot's zero is mid-range
            low[index], high[index] = -half * features.scale[index], half * features.scale[index]
    return low, high


@dataclass(frozen=True)
class LerobotConfig:
    """Attributes:
    type: the robot's name in LeRobot, e.g. ``so101_follower``.
    settings: the plugin's settings, as on LeRobot's command line: ``port``, ``id``, ``calibration_dir``, ...
    features: units and bounds by feature name or pattern (``*.pos``); a LeRobot motor bus has its own.
    gripper: the first action feature that contains this text is the gripper. A hold keeps the goal of all of them. The
    others are joints: their targets lead by half a second at `FeatureConfig.speed_max`, which limits the squeeze, and
    after a hold start at the measured position.
    answer_within_s: timeout of a call, after which the robot is lost; default: two control periods.
    torque_off: a safe stop releases the motors, and so does closing; replaces LeRobot's `disable_torque_on_disconnect`.
    home: target of a reset: one position per joint without the gripper, in the order and units of the spec (rad for
    LeRobot's degrees). If empty, a person moves the robot.
    sentence: the instruction for the policy.
    reach: settings of the task ``reach``.
    """

    type: str
    settings: dict[str, Any] = field(default_factory=dict)
    rate_hz: Positive = 30.0
    features: dict[str, FeatureConfig] = field(default_factory=dict)
    cameras: dict[str, CameraConfig] = field(default_factory=dict)
    gripper: str = "gripper"
    answer_within_s: Positive | None = None
    torque_off: bool = False
    home: tuple[float, ...] = ()
    stale_after_s: float = 0.5
    reduced_speed: float = 0.25
    sentence: str = ""
    max_steps: int = 3000
    reach: ReachConfig = field(default_factory=ReachConfig)

    def __post_init__(self) -> None:
        if "cameras" in self.settings:
            raise ValueError("settings.cameras: use the option `cameras`, see docs/devices.md")
        if self.type == "lekiwi_client":
            raise ValueError(
                "type: lekiwi_client repeats its last reading when its host is silent; "
                "run the driver on the robot's computer, with the type lekiwi"
            )

    @property
    def deadline_s(self) -> float:
        return self.answer_within_s or 2 / self.rate_hz


class LerobotRobot(Robot):
    """A LeRobot robot. The constructor makes the plugin's device and does not open the hardware."""

    def __init__(self, config: LerobotConfig) -> None:
        """Raises SpecError: no such plugin, a feature without a unit, or a home pose out of range."""
        self.config = config
        self._plugin = _make_plugin(config)
        device = self.device
        self._state = LerobotFeatures(device.observation_features, config.features, device)
        self._action = LerobotFeatures(device.action_features, config.features, device)
        self.spec = _spec(config, self._state, self._action)
        low, high = calibrated_bounds(device, self._action)
        self._low = np.maximum(self.spec.action.low, low).astype(np.float32)
        self._high = np.minimum(self.spec.action.high, high).astype(np.float32)
        validate_home(self.spec, config.home, self._low, self._high)
        self._moving = self._released = False
        self._measured: Array = np.zeros(len(self._state.names), np.float32)

    @property
    def device(self) -> Any:
        """LeRobot's object."""
        return self._plugin.device

    def connect(self) -> None:
        """See `hal.robot.Robot`. The motors come under torque and hold. The calibration is checked, never written.

        Raises:
            HardwareLost: also if the robot is not calibrated, its motors disagree with the calibration file, or another
                process has locked its port.
        """
        if self._plugin.is_connected:
            return
        arms = parts(self.device).values()
        files = ", ".join(str(arm.calibration_fpath) for arm in arms if hasattr(arm, "calibration_fpath"))
        for arm in arms:
            if hasattr(arm, "bus") and not arm.calibration:
                raise HardwareLost(
                    f"{self.config.type} is not calibrated: there is no {arm.calibration_fpath}; run "
                    "lerobot-calibrate with the same id"
                )
        try:
            if not self._plugin.connect(self._open, self.check_stop):
                raise HardwareLost(
                    f"{self.config.type}: its motors hold another calibration than {files or 'its file'}; run "
                    "lerobot-calibrate, which can write the file's values to the motors"
                )
            self._hold()
        except BaseException:
            self._disconnect()
            raise

    def observe(self) -> Observation:
        captured_ns = time.monotonic_ns()
        self._measured = self._state.to_vector(self._call("reading", self.device.get_observation))
        return Observation({STATE: self._measured.copy()}, captured_ns)

    def command(self, action: Array) -> Array:
        self.spec.action.validate(action)
        if self._released:
            self._hold()
            self.check_stop()  # enabling the torque takes seconds
        joints = self._measured[list(self.spec.limits.joint_position)]
        require_joints_in_range(self.spec, joints, self._low, self._high)
        self._moving = True
        sent = self._send(clip_to_range(self.spec, action, joints, self._low, self._high))
        low, high = np.array(self.spec.action.low, np.float32), np.array(self.spec.action.high, np.float32)
        return clip_to_range(self.spec, sent, joints, low, high)

    def stop(self, level: StopLevel) -> None:
        """See `hal.robot.Robot`. Joints hold the position measured at the start of the stop, or before it if the
        reading fails, the gripper its goal; other commanded elements become 0.

        A motor that fails keeps no other from being held and released.
        """
        if level is StopLevel.SAFE and self._released:
            return
        releases = level is StopLevel.SAFE and self.config.torque_off
        run_all([self._stand, *([self._release] if releases else [])])

    def go_home(self) -> None:
        """See `robots.homing.SupportsHoming`. Other elements than joints, such as a gripper, keep their goal."""
        self.stop(StopLevel.HOLD)
        if self.config.home:
            move_home(self, self.config.home, self._goal)

    def require_reachable(self, reach: ReachRobotWrapper) -> None:
        """Raises SpecError for goals out of the calibrated range, which the spec, common to arms of one type, lacks."""
        for joint, least, most in zip(reach.goal_joints, reach.goal_low, reach.goal_high, strict=True):
            element = self.spec.joint_target[joint]
            low, high = self._low[element], self._high[element]
            if least < low or most > high:
                raise SpecError(
                    f"reach: {self._action.names[element]} has goals from {least:.4g} to {most:.4g}, and is calibrated "
                    f"from {low:.4g} to {high:.4g}; set `reach.low` and `reach.high` within it"
                )

    def close(self) -> None:
        if not self._plugin.is_connected:
            return
        try:
            self.stop(StopLevel.SAFE)
        except HardwareLost as error:
            log.warning("lerobot.stop_failed %s; its motors keep their last goal", error)
        self._disconnect()

    def _open(self) -> None:
        if self.device.is_connected:  # a failed attempt left it connected
            self.device.disconnect()
        for part in parts(self.device).values():
            if hasattr(config := getattr(part, "config", None), TORQUE_SETTING):
                setattr(config, TORQUE_SETTING, self.config.torque_off)
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
        for bus in _buses(self.device):
            if not hasattr(bus, "packet_handler"):
                continue  # CAN motors keep no goal while their torque is off
            try:
                bus.connect()
                bus.sync_write("Goal_Position", bus.sync_read("Present_Position", normalize=False), normalize=False)
            finally:
                if bus.is_connected:
                    bus.disconnect(disable_torque=False)

    def _stand(self) -> None:
        if self._moving or self._released:
            self._hold()
        else:
            self._send_to_each_part(self._goal)

    def _release(self) -> None:
        motors = [partial(bus.disable_torque, motor) for bus in _buses(self.device) for motor in bus.motors]
        run_all([partial(self._call, "releasing a motor", motor, CONNECT_TIMEOUT_S) for motor in motors])
        self._released = True

    def _hold(self) -> None:
        """Make the measured pose the goal; enables the torque of released motors.

        Raises:
            HardwareLost: also if the reading fails. A moving robot then has its last measured pose as the goal.
        """
        try:
            self._measured = self._state.to_vector(self._call("reading", self.device.get_observation))
        except HardwareLost:
            if self._moving:
                with contextlib.suppress(HardwareLost):
                    self._send_to_each_part(self._resting_goal())
            raise
        self._send_to_each_part(self._resting_goal())  # unclipped: clipping to a bound would make the joint jump
        if self._released:
            buses = _buses(self.device)
            self._call("enabling the torque", lambda: [bus.enable_torque() for bus in buses], CONNECT_TIMEOUT_S)
        self._moving = self._released = False

    def _resting_goal(self) -> Array:
        goal = np.array(self.spec.neutral, np.float32)
        for index, name in enumerate(self._action.names):
            if self._moving and self.config.gripper and self.config.gripper in name:
                goal[index] = self._goal[index]  # keeps its grip
            elif name.endswith(POSITION_SUFFIX) and name in self._state.names:
                goal[index] = self._measured[self._state.index(name)]
        return goal

    def _send_to_each_part(self, goal: Array) -> None:
        """Send to the whole, and if that fails to each arm of a bimanual robot: LeRobot gives up at the first arm."""
        try:
            self._send(goal)
        except HardwareLost:
            values = self._action.to_values(goal)
            for prefix, arm in parts(self.device).items():
                own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
                if prefix:
                    with contextlib.suppress(HardwareLost):
                        self._call("commanding", partial(arm.send_action, own))
            raise

    def _send(self, action: Array) -> Array:
        values = self._action.to_values(action)
        sent = self._call("commanding", lambda: self.device.send_action(values))
        applied = self._action.to_vector(sent if isinstance(sent, Mapping) else {}, fallback=action)
        self._goal: Array = applied.astype(np.float32)
        return self._goal

    def _call(self, operation: str, function: Callable[[], T], timeout_s: float | None = None) -> T:
        return self._plugin.call(operation, function, timeout_s or self.config.deadline_s)

    def _disconnect(self) -> None:
        self._plugin.disconnect()
        self._moving = self._released = False


def _buses(device: Any) -> list[Any]:
    return [part.bus for part in parts(device).values() if hasattr(part, "bus")]


def _motors(device: Any) -> Iterator[tuple[str, Any, str]]:
    """Of each motor: the name of its position's feature, its bus, and its name there."""
    for prefix, part in parts(device).items():
        bus = getattr(part, "bus", None)
        for motor in getattr(bus, "motors", {}):
            yield f"{prefix}{motor}{POSITION_SUFFIX}", bus, motor


def _make_plugin(config: LerobotConfig) -> PluginDevice:
    plugin = PluginDevice("robot", config.type, config.settings)
    buses = _buses(plugin.device)
    if config.torque_off and not (
        buses and all(hasattr(bus, "disable_torque") and hasattr(bus, "motors") for bus in buses)
    ):
        raise SpecError(
            f"torque_off: LeRobot's {config.type} has no motor bus that can release the torque; remove the option"
        )
    return plugin


def _spec(config: LerobotConfig, state: LerobotFeatures, action: LerobotFeatures) -> RobotSpec:
    gripper = next((i for i, name in enumerate(action.names) if config.gripper and config.gripper in name), -1)
    joints = [
        i
        for i, name in enumerate(action.names)
        if name.endswith(POSITION_SUFFIX) and name in state.names and i != gripper
    ]
    neutral = np.clip(0.0, action.low, action.high)
    if gripper >= 0:
        neutral[gripper] = action.high[gripper]
    return RobotSpec(
        model=config.type,
        rate_hz=config.rate_hz,
        observation=(state.spec(STATE),),
        action=action.spec(ACTION),
        cameras=camera_specs(config.cameras),
        limits=SafetyLimits(
            joint_position=tuple(state.index(action.names[joint]) for joint in joints),
            joint_low=tuple(action.low[joints].tolist()),
            joint_high=tuple(action.high[joints].tolist()),
            joint_velocity_max=tuple(action.speed_max[joints].tolist()),
            reduced_speed=config.reduced_speed,
            stale_after_s=config.stale_after_s,
        ),
        neutral=tuple(neutral.tolist()),
        joint_target=tuple(joints),
        gripper=gripper,
        safe_stop="holds its pose" + (", then releases its motors and sinks" if config.torque_off else ""),
    )


@dataclass(frozen=True)
class LeaderConfig:
    """Attributes:
    type, settings: the teleoperator's name and settings, as on LeRobot's command line.
    features: units by name or pattern, as for the robot.
    moved: the share of an element's range above which a change counts as motion, not noise.
    let_go_s: a leader without motion for this time counts as released; it has no other dead-man switch.
    answer_within_s: timeout of a call, after which the device is lost.
    """

    type: str
    settings: dict[str, Any] = field(default_factory=dict)
    features: dict[str, FeatureConfig] = field(default_factory=dict)
    moved: Annotated[float, Meta(gt=0, lt=1)] = 0.01
    let_go_s: Positive = 2.0
    answer_within_s: Positive = 0.2


class LerobotLeader(Teleoperator):
    """A LeRobot teleoperator whose action has the robot's elements, matched by name."""

    def __init__(self, config: LeaderConfig, spec: RobotSpec, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises SpecError: no such plugin, an unknown unit, or elements of the robot's action that are missing."""
        self.config, self._clock = config, clock
        self.release_s = config.let_go_s
        self._plugin = PluginDevice("teleoperator", config.type, config.settings)
        device = self._plugin.device
        self._features = LerobotFeatures(device.action_features, config.features, device)
        missing = [name for name in spec.action.labels if name not in self._features.names]
        if missing:
            raise SpecError(f"LeRobot's {config.type} lacks {missing}, which the action of {spec.model} needs")
        self._order = [self._features.index(name) for name in spec.action.labels]
        units = tuple(self._features.units[index] for index in self._order)
        if units != spec.action.units:
            raise SpecError(
                f"{config.type} has the units {units}, {spec.model} has {spec.action.units}; set `features`"
            )
        self._low, self._high = np.array(spec.action.low, np.float32), np.array(spec.action.high, np.float32)

    def connect(self) -> None:
        if self._plugin.is_connected:
            return
        self._patience_s = CONNECT_TIMEOUT_S
        try:
            if not self._plugin.connect(lambda: self._plugin.device.connect(calibrate=False), self.check_stop):
                raise HardwareLost(f"{self.config.type} is not calibrated; run lerobot-calibrate with the same id")
            self._resting: Array = self._pose()
        except BaseException:
            self.close()
            raise
        self._moved_s = -np.inf

    def read(self) -> TeleopInput:
        """See `hal.teleoperator.Teleoperator`; `target` is the leader's pose within the action's bounds."""
        pose = self._pose()
        if (np.abs(pose - self._resting) > self.config.moved * (self._high - self._low)).any():
            self._resting, self._moved_s = pose, self._clock()
        engaged = bool(self._clock() - self._moved_s < self.config.let_go_s)
        return TeleopInput(np.zeros(len(pose), np.float32), engaged, pose)

    def close(self) -> None:
        if self._plugin.is_connected:
            self._plugin.disconnect(self._patience_s)

    def _pose(self) -> Array:
        try:
            raw = self._plugin.call("reading", self._plugin.device.get_action, self.config.answer_within_s)
        except HardwareLost:
            self._patience_s = self.config.answer_within_s  # from now on `close` must not block the robot's loop
            raise
        pose: Array = np.clip(self._features.to_vector(raw)[self._order], self._low, self._high)
        return pose


def make_robot_setup(request: RobotSetupRequest) -> RobotSetup:
    """A `hal.driver.RobotSetupFactory`; options: `LerobotConfig`. ``reach`` has a success rule; a person judges other
    tasks."""
    config = read_options(LerobotConfig, request)
    robot = LerobotRobot(config)
    cameras = make_cameras(config.cameras, request)
    task = build_judged_task(request, robot, config.sentence, config.max_steps)
    setup = RobotSetup(request.name, robot, task, cameras)
    if not wants_reach(request):
        return setup
    setup = add_reach_task(setup, config.reach, request.tasks[0].sentence or config.sentence)
    assert isinstance(setup.robot, ReachRobotWrapper)
    robot.require_reachable(setup.robot)
    return setup


def make_teleoperator(request: RobotSetupRequest, spec: RobotSpec) -> Teleoperator:
    """A `hal.driver.TeleoperatorFactory`; options: `LeaderConfig`."""
    return LerobotLeader(read_options(LeaderConfig, request), spec)
