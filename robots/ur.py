"""Driver for arms of Universal Robots over RTDE, optionally with a Robotiq gripper.

The action is a step of the tool (`tool_delta`: x, y, z in the base frame; the tool keeps its rotation) or of the joints
(`joint_delta`). Steps add to the last commanded target, which is at most `MAX_TARGET_LEAD_S` ahead of the arm. The
driver does not change payload, tool centre point, speed slider and safety settings, which are set at the pendant.

A protective stop, emergency stop or safeguard stop, or the end of the program, makes the robot lost; the message has
the reason. The driver never unlocks the arm: after a person has, connecting works again.

Safe stop: the arm brakes, the program on the controller ends, and the controller holds the arm. If this process dies,
hangs or is disconnected for two control periods (`silence_s`), the controller's watchdog does the same. A gripper keeps
its grip.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hal.driver import RobotSetup, RobotSetupRequest, read_options
from hal.errors import HardwareLost, SpecError, StaleObservation
from hal.robot import Observation, Robot, StopLevel
from hal.spec import ACTION, STATE, Array, ArraySpec, Box, RobotSpec, SafetyLimits
from robots.cameras import CameraConfig, camera_specs, make_cameras
from robots.delta_actions import add_step, make_step_limiter
from robots.device_lock import DeviceLock
from robots.manual_task import HumanJudgedTask
from robots.robotiq import RobotiqConfig, RobotiqGripper
from robots.ur_connection import UrConnection, UrConnectionConfig

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
JOINT_RANGE_RAD = 2 * np.pi  # range of every joint, to either side
MAX_TARGET_LEAD_S = 0.5  # at full speed; servoj lags by its lookahead, 0.03 to 0.2 s
REACH_M = 2.0  # more than the reach of the largest arm
FORCE_RANGE_N = 1000.0
HOMING_TIMEOUT_S = 60.0  # in addition to the expected duration
REDUCED_SPEED = 0.25  # while a person teleoperates or is near

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UrConfig:
    """Attributes:
    host: the controller's address. It must be in remote control.
    model: for display and placement, e.g. ``ur5e``.
    action: ``tool_delta`` or ``joint_delta``.
    tool_speed: m/s, for a tool_delta.
    joint_speed: rad/s: of a joint_delta; with a tool_delta, the measured speed above which the arm holds, e.g. near a
    singularity.
    joint_low, joint_high: rad; default: the joints' whole range.
    workspace_low, workspace_high: box for the tool, m in the base frame; keep_out: boxes that it may not enter.
    force_max: N; above it the tool does not move further against the force. None for no limit.
    gripper: settings of a Robotiq gripper; None for none.
    cameras: by name.
    home: joint angles, rad: target of a reset, by moveJ at `home_speed`. If empty, a person moves the robot.
    silence_s, stale_after_s: default: two control periods.
    lookahead_s, gain: of the controller's servoj: 0.03 to 0.2 s, 100 to 2000.
    sentence: the instruction for the policy.
    """

    host: str
    model: str = "ur5e"
    action: Literal["tool_delta", "joint_delta"] = "tool_delta"
    rate_hz: float = 20.0
    tool_speed: float = 0.25
    joint_speed: float = 1.0
    joint_low: tuple[float, ...] = (-JOINT_RANGE_RAD,) * 6
    joint_high: tuple[float, ...] = (JOINT_RANGE_RAD,) * 6
    workspace_low: tuple[float, ...] = ()
    workspace_high: tuple[float, ...] = ()
    keep_out: tuple[Box, ...] = ()
    force_max: float | None = 50.0
    gripper: RobotiqConfig | None = None
    cameras: dict[str, CameraConfig] = field(default_factory=dict)
    home: tuple[float, ...] = ()
    home_speed: float = 0.3
    silence_s: float | None = None
    stale_after_s: float | None = None
    lookahead_s: float = 0.1
    gain: float = 300.0
    rtde_hz: float = 125.0
    reduced_speed: float = REDUCED_SPEED
    sentence: str = ""
    max_steps: int = 3000

    def __post_init__(self) -> None:
        if not all(0 < x < np.inf for x in (self.rate_hz, self.tool_speed, self.joint_speed, self.home_speed)):
            raise ValueError("rate_hz, tool_speed, joint_speed and home_speed must be above 0")
        if any(given is not None and not given > 0 for given in (self.silence_s, self.stale_after_s, self.rtde_hz)):
            raise ValueError("silence_s, stale_after_s and rtde_hz must be above 0")
        if not (0.03 <= self.lookahead_s <= 0.2 and 100 <= self.gain <= 2000):
            raise ValueError("servoj needs a lookahead_s of 0.03 to 0.2 and a gain of 100 to 2000")
        if len(self.home) not in (0, 6):
            raise ValueError(f"home has {len(self.home)} joint angles; it needs 6")
        for name, low, at, high in zip(JOINTS, self.joint_low, self.home, self.joint_high, strict=False):
            if not low <= at <= high:  # homing does not pass the safety kernel
                raise ValueError(f"home: {name} is {at:g}; it must be between {low:g} and {high:g}")

    @property
    def two_periods_s(self) -> float:
        return 2 / self.rate_hz

    @property
    def connection_config(self) -> UrConnectionConfig:
        return UrConnectionConfig(
            host=self.host,
            silence_s=self.silence_s or self.two_periods_s,
            rtde_hz=self.rtde_hz,
            lookahead_s=self.lookahead_s,
            gain=self.gain,
            joint_speed=self.home_speed,
        )


def ur_spec(config: UrConfig) -> RobotSpec:
    """The spec of the configured arm."""
    joints = config.action == "joint_delta"
    moves = tuple(f"d_{name}" for name in JOINTS) if joints else ("dx", "dy", "dz")
    step = (config.joint_speed if joints else config.tool_speed) / config.rate_hz
    grip = config.gripper
    action = ArraySpec(
        name=ACTION,
        labels=(*moves, *(("width",) if grip else ())),
        units=(("rad",) if joints else ("m",)) * len(moves) + (("m",) if grip else ()),
        low=(-step,) * len(moves) + ((0.0,) if grip else ()),
        high=(step,) * len(moves) + ((grip.stroke_m,) if grip else ()),
    )
    return RobotSpec(
        model=config.model,
        rate_hz=config.rate_hz,
        observation=(_state_spec(config),),
        action=action,
        cameras=camera_specs(config.cameras),
        limits=_limits(config),
        neutral=(0.0,) * len(moves) + ((grip.stroke_m,) if grip else ()),
        tool_delta=() if joints else (0, 1, 2),
        joint_delta=tuple(range(6)) if joints else (),
        gripper=len(moves) if grip else -1,
        safe_stop="brakes, then ends the program on the controller, which holds the arm; the gripper keeps its grip",
    )


def _state_spec(config: UrConfig) -> ArraySpec:
    parts = [
        *((f"{name}.pos", "rad", JOINT_RANGE_RAD) for name in JOINTS),
        *((f"{name}.vel", "rad/s", JOINT_RANGE_RAD) for name in JOINTS),
        *((f"tool_{axis}", "m", REACH_M) for axis in "xyz"),
        *((f"tool_{of}{axis}", "1", 1.0) for of in "xy" for axis in "xyz"),
        *((f"force_{axis}", "N", FORCE_RANGE_N) for axis in "xyz"),
    ]
    low, high = [-bound for _, _, bound in parts], [bound for _, _, bound in parts]
    if config.gripper:
        parts.append(("width", "m", config.gripper.stroke_m))
        low, high = [*low, 0.0], [*high, config.gripper.stroke_m]
    labels, units, _ = zip(*parts, strict=True)
    return ArraySpec(name=STATE, labels=labels, units=units, low=tuple(low), high=tuple(high))


def _limits(config: UrConfig) -> SafetyLimits:
    joints = config.action == "joint_delta"
    return SafetyLimits(
        workspace_low=config.workspace_low,
        workspace_high=config.workspace_high,
        keep_out=config.keep_out,
        tool_position=(12, 13, 14),
        tool_speed_max=None if joints else config.tool_speed,
        tool_force=(21, 22, 23),
        tool_force_max=config.force_max,
        joint_position=tuple(range(6)),
        joint_low=config.joint_low,
        joint_high=config.joint_high,
        joint_velocity=() if joints else tuple(range(6, 12)),
        joint_velocity_max=(config.joint_speed,) * 6,
        reduced_speed=config.reduced_speed,
        stale_after_s=config.stale_after_s or config.two_periods_s,
    )


class UrRobot(Robot):
    """One arm. `connect` uploads a program to its controller and ends the program that ran there."""

    def __init__(self, config: UrConfig) -> None:
        self.config = config
        self.spec = ur_spec(config)
        self._joints = config.action == "joint_delta"
        self._motion_size = 6 if self._joints else 3
        self._low = np.array(self.spec.action.low, np.float32)
        self._high = np.array(self.spec.action.high, np.float32)
        self._max_lead = MAX_TARGET_LEAD_S * (config.joint_speed if self._joints else config.tool_speed)
        self._step_limiter = make_step_limiter(self.spec)
        self._device_lock = DeviceLock(config.host)
        self._connection: UrConnection | None = None
        self.target: Array | None = None  # joint angles or pose, float64 (6,); unused while the arm is stopped
        self._gripper = RobotiqGripper(config.host, config.gripper) if config.gripper else None

    def connect(self) -> None:
        """See `hal.robot.Robot`.

        Raises:
            HardwareLost: also if the arm is stopped, off or not in remote control, the gripper is not activated, or
                another process of this machine has locked the arm.
            SpecError: ur_rtde is not installed.
        """
        if self._connection is not None:
            return
        self._device_lock.acquire()
        self._connection, self.target = UrConnection(self.config.connection_config), None
        try:
            self._connection.open()
            if self._gripper:
                self._gripper.connect()
        except (HardwareLost, SpecError):
            self.close()
            raise

    def observe(self) -> Observation:
        reading = self._connected.read()
        age_s = (time.monotonic_ns() - reading.t_capture_ns) / 1e9
        if age_s > self.spec.limits.stale_after_s:
            raise StaleObservation(f"UR at {self.config.host}: the newest reading is {age_s:.3f} s old")
        width = [self._gripper.width_m] if self._gripper else []
        place = (reading.pose[:3], tool_axes(reading.pose[3:]))
        state = np.concatenate([reading.q, reading.qd, *place, reading.force, width]).astype(np.float32)
        return Observation({STATE: state}, reading.t_capture_ns)

    def command(self, action: Array) -> Array:
        """See `hal.robot.Robot`. After a safe stop it blocks until the program is uploaded again."""
        self.spec.action.validate(action)
        connection = self._connected
        if connection.is_program_stopped:
            connection.restart_program()
        applied = np.clip(action, self._low, self._high)
        reading = connection.read()
        measured = reading.q if self._joints else reading.pose
        base, step = self.target if connection.continues_servo() else None, applied[: self._motion_size]
        target, applied[: self._motion_size] = add_step(base, measured, step, self._max_lead, self._step_limiter)
        connection.servo(target, self.spec.period_s, self._joints)
        self.target = target
        if self._gripper:
            applied[-1] = self._gripper.move_to_width(float(applied[-1]))
        within: Array = np.clip(applied, self._low, self._high)
        return within

    def stop(self, level: StopLevel) -> None:
        connection = self._connected
        self.target = None
        if level is StopLevel.SAFE:
            connection.stop_program()
        else:
            connection.hold()

    def go_home(self) -> None:
        """See `robots.manual_task.SupportsHoming`."""
        self.stop(StopLevel.HOLD)
        if self.config.home:
            connection = self._connected
            if connection.is_program_stopped:
                connection.restart_program()
            home = np.array(self.config.home)
            takes_s = float(np.abs(home - connection.read().q).max()) / self.config.home_speed
            connection.move_joints(home, takes_s + HOMING_TIMEOUT_S, self.check_stop)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if self._gripper:
            self._gripper.close()
        self._device_lock.release()

    @property
    def _connected(self) -> UrConnection:
        if self._connection is None:
            raise HardwareLost(f"UR at {self.config.host} is not connected")
        return self._connection


def tool_axes(rotation: Array) -> Array:
    """The directions of the tool's x and y axis, (6,), from its rotation vector (3,).

    They change continuously. A rotation vector jumps to its opposite near half a turn, as for tools that point down.
    """
    angle = float(np.linalg.norm(rotation))
    axis = rotation / angle if angle > 0 else np.zeros(3)
    turned = [  # Rodrigues' formula
        unit * np.cos(angle) + np.cross(axis, unit) * np.sin(angle) + axis * (axis @ unit) * (1 - np.cos(angle))
        for unit in np.eye(3)[:2]
    ]
    axes: Array = np.concatenate(turned)
    return axes


def make_robot_setup(request: RobotSetupRequest) -> RobotSetup:
    """A `hal.driver.RobotSetupFactory`; options: `UrConfig`. A person judges every task."""
    config = read_options(UrConfig, request)
    task = HumanJudgedTask(request.task, config.sentence or request.task, config.max_steps)
    return RobotSetup(request.name, UrRobot(config), task, make_cameras(config.cameras, request))
