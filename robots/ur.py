"""Driver for arms of Universal Robots over RTDE, optionally with a Robotiq gripper.

Steps of the tool or of the joints add to the last commanded target, see `robots.delta_actions`. The driver does not
change payload, tool centre point, speed slider and safety settings, which are set at the pendant.

A protective stop, emergency stop or safeguard stop, or the end of the program, makes the robot lost; the message has
the reason. The driver never unlocks the arm: after a person has, connecting works again. An emergency stop and the
three-position switch latch the e-stop too.

Safe stop: the arm brakes, the program on the controller ends, and the controller holds the arm. If this process dies,
hangs or is disconnected for two control periods (`silence_s`), the controller's watchdog does the same. A gripper keeps
its grip.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from hal.driver import RobotSetup, RobotSetupRequest, read_options
from hal.errors import HalError, HardwareLost
from hal.robot import Observation, Robot, StopLevel
from hal.spec import ACTION, STATE, Array, ArraySpec, RobotSpec
from robots.cameras import make_cameras
from robots.delta_actions import DeltaArm, DeltaTarget
from robots.device import DeviceLock, require_fresh
from robots.homing import build_judged_task, move_home, require_tool_in_place, validate_home
from robots.robotiq import RobotiqGripper
from robots.ur_connection import JOINT_RANGE_RAD, JOINTS, UrConfig, UrConnection


def ur_spec(config: UrConfig) -> RobotSpec:
    """The spec of the configured arm."""
    arm = DeltaArm(
        model=config.model,
        joints=JOINTS,
        low=(-JOINT_RANGE_RAD,) * 6,
        high=(JOINT_RANGE_RAD,) * 6,
        speed=JOINT_RANGE_RAD,
        reach=2.0,  # more than that of the largest arm
        force=1000.0,
        safe_stop="brakes, then ends the program on the controller, which holds the arm; the gripper keeps its grip",
        stroke=config.gripper.stroke_m if config.gripper else None,
    )
    return arm.spec(config, config.joint_low, config.joint_high)


class UrRobot(Robot):
    """One arm. `connect` uploads a program to its controller and ends the program that ran there."""

    def __init__(self, config: UrConfig) -> None:
        """Raises SpecError: the home pose is out of range."""
        self.config = config
        self.spec = ur_spec(config)
        self._homing = _JointTargets(self)
        self._target = DeltaTarget(self.spec, config)
        self._device_lock = DeviceLock(config.host)
        self._connection: UrConnection | None = None
        self._gripper = RobotiqGripper(config.host, config.gripper) if config.gripper else None

    def connect(self) -> None:
        """See `hal.robot.Robot`.

        Raises:
            HardwareLost: also if the arm is stopped, off or not in remote control, the gripper is not activated, or
                another process of this machine has locked the arm. StoppedAtRobot if a person stopped the arm.
            SpecError: ur_rtde is not installed.
        """
        if self._connection is not None:
            return
        self._device_lock.acquire()
        self._connection, self._target.value = UrConnection(self.config), None
        try:
            self._connection.open(self.check_stop)
            if self._gripper:
                self._gripper.connect()
        except HalError:
            self.close()
            raise

    def observe(self) -> Observation:
        reading = self._connected.read()
        require_fresh(f"UR at {self.config.host}", reading.t_capture_ns, self.spec.limits.stale_after_s)
        width = [self._gripper.width_m] if self._gripper else []
        place = (reading.pose[:3], tool_axes(reading.pose[3:]))
        state = np.concatenate([reading.q, reading.qd, *place, reading.force, width]).astype(np.float32)
        return Observation({STATE: state}, reading.t_capture_ns)

    def command(self, action: Array) -> Array:
        """See `hal.robot.Robot`. After a safe stop it first uploads the program again, which blocks."""
        self.spec.action.validate(action)
        connection, joints = self._with_program(), self.config.moves_joints
        reading = connection.read()
        if not connection.continues_servo():
            self._target.value = None
        measured = reading.q if joints else reading.pose
        shift = self._target.withdraw(measured, reading.force)
        target, applied = self._target.next(action, measured)
        connection.servo(target, self.spec.period_s, joints, shift)
        self._target.value = target
        if self._gripper:
            applied[-1] = self._gripper.move_to_width(float(applied[-1]))
        return applied

    def stop(self, level: StopLevel) -> None:
        connection = self._connected
        self._target.value = None
        if level is StopLevel.SAFE:
            connection.stop_program()
        else:
            connection.hold()

    def move_joints(self, angles: Array) -> None:
        """Move straight to joint angles (6,) within one control period. Raises HardwareLost."""
        self._target.value = None
        self._with_program().servo(angles.astype(np.float64), self.spec.period_s, joints=True)

    def go_home(self) -> None:
        """See `robots.homing.SupportsHoming`."""
        self.stop(StopLevel.HOLD)
        if self.config.home:
            self._homing.check_stop = self.check_stop
            try:
                move_home(self._homing, self.config.home, np.zeros(6))
            finally:
                self.stop(StopLevel.HOLD)
            require_tool_in_place(self)

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

    def _with_program(self) -> UrConnection:
        connection = self._connected
        if connection.is_program_stopped:
            connection.restart_program(self.check_stop)
        return connection


class _JointTargets(Robot):
    """The same arm, moved to joint angles, for homing: its safety kernel limits joints and force."""

    def __init__(self, arm: UrRobot) -> None:
        config, limits, units = arm.config, arm.spec.limits, ("rad",) * 6
        self._arm = arm
        self.spec = replace(
            arm.spec,
            action=ArraySpec(name=ACTION, labels=JOINTS, units=units, low=config.joint_low, high=config.joint_high),
            limits=replace(
                limits,
                workspace_low=(),
                workspace_high=(),
                keep_out=(),
                tool_position=(),
                tool_speed_max=None,
                joint_velocity=(),
                joint_velocity_max=(config.home_speed,) * 6,
                reduced_speed=1.0,
            ),
            neutral=(),
            tool_delta=(),
            joint_delta=(),
            joint_target=tuple(range(6)),
            gripper=-1,
        )
        validate_home(self.spec, config.home, np.array(config.joint_low), np.array(config.joint_high))

    def connect(self) -> None:
        """The arm is connected."""

    def observe(self) -> Observation:
        return self._arm.observe()

    def command(self, action: Array) -> Array:
        self._arm.move_joints(action)
        return action.copy()

    def stop(self, level: StopLevel) -> None:
        self._arm.stop(level)

    def close(self) -> None:
        """The arm stays connected."""


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
    robot = UrRobot(config)
    task = build_judged_task(request, robot, config.sentence, config.max_steps)
    return RobotSetup(request.name, robot, task, make_cameras(config.cameras, request))
