"""A simulated arm with the hardware layer's robot interface."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hal.errors import HardwareLost, SpecError
from hal.robot import Observation, Robot, StopLevel
from hal.spec import ACTION, ENVIRONMENT_STATE, STATE, Array, ArraySpec, Box, CameraSpec, RobotSpec, SafetyLimits
from sim.arms import panda, so101, ur5e
from sim.arms.arm import ArmModel

if TYPE_CHECKING:
    from sim.world import MujocoWorld

ARMS: dict[str, ArmModel] = {arm.name: arm for arm in (panda.ARM, so101.ARM, ur5e.ARM)}

PHYSICS_STEP_S = 0.002

OBJECT_FROM_SCENE = {"lift": "cube", "reach": "target"}
"""The tracked object of each scene."""

TOOL_POSITION = slice(-8, -5)
TOOL_VELOCITY = slice(-5, -2)
GRIPPER_WIDTH = -2
GRIPPER_SET_WIDTH = -1
"""Indices into ``observation.state``, which begins with the joints' positions and velocities."""


@dataclass(frozen=True)
class SimRobotConfig:
    """A simulated arm in a scene.

    Attributes:
        model: ``panda``, ``so101`` or ``ur5e`` (with a 2F-85).
        scene: ``lift`` (a cube on a table) or ``reach`` (a target in the air).
        rate_hz: control periods per second of simulated time; a period is a whole number of 2 ms physics steps.
        step_max_m: the longest step of the tool along each axis per control period; None for the model's default.
        workspace_low_m, workspace_high_m: box for the tool centre point in the base frame, None for the model's
            default; the table's top is z = 0.
        cameras: a selection of ``front`` and ``wrist``.
        camera_hz: images per second of simulated time, at most; an image is rendered at the end of a control period.
        image_height, image_width: pixels of each camera.
    """

    model: str = "panda"
    scene: str = "lift"
    rate_hz: float = 10.0
    step_max_m: float | None = None
    workspace_low_m: tuple[float, float, float] | None = None
    workspace_high_m: tuple[float, float, float] | None = None
    cameras: tuple[str, ...] = ("front", "wrist")
    camera_hz: float = 30.0
    image_height: int = 128
    image_width: int = 128

    def __post_init__(self) -> None:
        steps = 1 / (self.rate_hz * PHYSICS_STEP_S) if self.rate_hz > 0 else 0.0
        if not steps > 0.5 or abs(steps - round(steps)) > 1e-6:
            raise ValueError(
                f"rate_hz is {self.rate_hz:g}; a control period must be a whole number of physics steps of 2 ms"
            )
        if self.step_max_m is not None and not self.step_max_m > 0:
            raise ValueError(f"step_max_m is {self.step_max_m:g}; it must be above 0")
        if not self.camera_hz > 0:
            raise ValueError(f"camera_hz is {self.camera_hz:g}; it must be above 0")

    @property
    def arm(self) -> ArmModel:
        """Raises SpecError on an unknown model."""
        if self.model not in ARMS:
            raise SpecError(f"no simulated arm {self.model!r}; choose one of {sorted(ARMS)}")
        return ARMS[self.model]

    @property
    def workspace(self) -> Box:
        """The box for the tool; raises SpecError on an unknown model."""
        own = self.arm.workspace
        return Box(self.workspace_low_m or own.low, self.workspace_high_m or own.high)


class SimRobot(Robot):
    """An arm in MuJoCo. Its world moves only in `command` and `stop`, by one control period each, as fast as possible.

    The action is a step of the tool's target (dx, dy, dz), m in the base frame, and the gripper's opening, m. The
    gripper points down as far as the arm's joints allow. An opening smaller than an object between the fingers grips
    it. The fingers are so slow that a grip survives a single stray opening command. A hold keeps the grip.
    """

    def __init__(self, config: SimRobotConfig | None = None) -> None:
        """Raises SpecError if the model, the scene or a camera is unknown."""
        self.config = config or SimRobotConfig()
        self.spec = sim_robot_spec(self.config)
        self._world: MujocoWorld | None = None

    @property
    def world(self) -> MujocoWorld:
        """The physics, for tasks and cameras; raises HardwareLost before `connect` and after `close`."""
        if self._world is None:
            raise HardwareLost("the simulated robot is not connected; call connect() first")
        return self._world

    def connect(self) -> None:
        if self._world is None:
            from sim.world import MujocoWorld

            self._world = MujocoWorld(self.config.arm, self.config.scene, self.spec.period_s)

    def observe(self) -> Observation:
        """The current state; readings saturate at the spec's bounds, as a sensor's do."""
        now = self.world.read_sensors()
        state = np.concatenate(
            (
                now.joint_position,
                now.joint_velocity,
                now.tool_position,
                now.tool_velocity,
                (now.gripper_width, now.gripper_set_width),
            )
        )
        tracked = np.concatenate((now.object_position, now.object_position - now.tool_position))
        vectors = (state, tracked)
        arrays = {s.name: _saturate(s, v) for s, v in zip(self.spec.observation, vectors, strict=True)}
        return Observation(arrays=arrays, t_capture_ns=time.monotonic_ns())

    def command(self, action: Array) -> Array:
        self.spec.action.validate(action)
        low, high = self._workspace
        bounded = np.clip(action, self.spec.action.low, self.spec.action.high)
        step, width = self.world.move_tool(bounded[:3], float(bounded[3]), low, high)
        return np.array([*step, width], dtype=np.float32)

    def stop(self, level: StopLevel) -> None:
        if level is StopLevel.SAFE:
            self.world.hold_pose()
        else:
            self.world.move_tool(np.zeros(3), None, *self._workspace)

    def close(self) -> None:
        self._world = None

    @property
    def _workspace(self) -> tuple[Array, Array]:
        box = self.config.workspace
        return np.array(box.low), np.array(box.high)


def require_scene(robot: Robot, scene: str, arm: ArmModel) -> SimRobot:
    """Check that `robot` is `arm` simulated in `scene`, for a task that places objects. Raises SpecError."""
    if not isinstance(robot, SimRobot):
        raise SpecError(f"the task {scene!r} places objects, so it needs a simulated robot, not {robot.spec.model}")
    if robot.config.scene != scene:
        raise SpecError(f"the task {scene!r} needs the scene {scene!r}; the robot is in {robot.config.scene!r}")
    if robot.config.arm != arm:
        raise SpecError(f"this task {scene!r} is for the model {arm.name!r}; the robot is {robot.config.model!r}")
    return robot


def sim_robot_spec(config: SimRobotConfig) -> RobotSpec:
    """The spec of the configured robot; does not need MuJoCo. Raises SpecError on an unknown name."""
    if config.scene not in OBJECT_FROM_SCENE:
        raise SpecError(f"no scene {config.scene!r}; choose one of {sorted(OBJECT_FROM_SCENE)}")
    unknown = sorted(set(config.cameras) - {"front", "wrist"})
    if unknown:
        raise SpecError(f"no cameras {unknown}; choose from ['front', 'wrist']")
    arm = config.arm
    return RobotSpec(
        model=f"{arm.name}-sim",
        rate_hz=config.rate_hz,
        observation=(_state_spec(config), _tracker_spec(config)),
        action=_action_spec(config),
        cameras=tuple(_camera_spec(name, config) for name in config.cameras),
        limits=_limits(config),
        neutral=(0.0, 0.0, 0.0, arm.gripper.width_max_m),
        tool_delta=(0, 1, 2),
        gripper=3,
        safe_stop="stops and holds its pose; the gripper keeps its grip",
    )


def _state_spec(config: SimRobotConfig) -> ArraySpec:
    arm, box = config.arm, config.workspace
    n, width = len(arm.joints), arm.gripper.width_max_m
    speed = tuple(1.2 * v for v in arm.joint_speed_max_rad_s)
    margin = 0.05  # beyond the joints' ranges (rad) and the workspace (m), so that readings show an overshoot
    joints = tuple(f"{j}.position" for j in arm.joints) + tuple(f"{j}.velocity" for j in arm.joints)
    tool = ("tool.x", "tool.y", "tool.z", "tool.vx", "tool.vy", "tool.vz")
    joint_low, joint_high = (v - margin for v in arm.joint_low_rad), (v + margin for v in arm.joint_high_rad)
    tool_low, tool_high = (v - margin for v in box.low), (v + margin for v in box.high)
    return ArraySpec(
        name=STATE,
        labels=(*joints, *tool, "gripper.width", "gripper.set_width"),
        units=("rad",) * n + ("rad/s",) * n + ("m",) * 3 + ("m/s",) * 3 + ("m",) * 2,
        low=(*joint_low, *(-v for v in speed), *tool_low, -1.0, -1.0, -1.0, -0.01, 0.0),
        high=(*joint_high, *speed, *tool_high, 1.0, 1.0, 1.0, width + 0.01, width),
    )


def _tracker_spec(config: SimRobotConfig) -> ArraySpec:
    name, tracked, far = OBJECT_FROM_SCENE[config.scene], config.arm.tracker_box, config.arm.tracker_range_m
    return ArraySpec(
        name=ENVIRONMENT_STATE,
        labels=tuple(f"{name}.{axis}" for axis in "xyz") + tuple(f"{name}_from_tool.{axis}" for axis in "xyz"),
        units=("m",) * 6,
        low=(*tracked.low, -far, -far, -far),
        high=(*tracked.high, far, far, far),
    )


def _action_spec(config: SimRobotConfig) -> ArraySpec:
    step = config.step_max_m or config.arm.step_max_m
    return ArraySpec(
        name=ACTION,
        labels=("tool.dx", "tool.dy", "tool.dz", "gripper.width"),
        units=("m",) * 4,
        low=(-step, -step, -step, 0.0),
        high=(step, step, step, config.arm.gripper.width_max_m),
    )


def _camera_spec(name: str, config: SimRobotConfig) -> CameraSpec:
    rate_hz = min(config.rate_hz, config.camera_hz)
    return CameraSpec(name=name, height=config.image_height, width=config.image_width, rate_hz=rate_hz)


def _limits(config: SimRobotConfig) -> SafetyLimits:
    """Joint targets stay well below the maker's speeds, so the kernel's speed limit acts only on a fault.

    The action may change from bound to bound: the arm's dynamics limit the acceleration.
    """
    arm, box = config.arm, config.workspace
    n, more = len(arm.joints), 1.001  # float32 may round a change from bound to bound up
    swing = more * 2 * (config.step_max_m or arm.step_max_m)
    return SafetyLimits(
        workspace_low=box.low,
        workspace_high=box.high,
        tool_position=tuple(range(2 * n, 2 * n + 3)),
        joint_position=tuple(range(n)),
        joint_low=arm.joint_low_rad,
        joint_high=arm.joint_high_rad,
        joint_velocity=tuple(range(n, 2 * n)),
        joint_velocity_max=arm.joint_speed_max_rad_s,
        action_rate_max=(swing, swing, swing, more * arm.gripper.width_max_m),
    )


def _saturate(spec: ArraySpec, value: Array) -> Array:
    return np.clip(value, spec.low, spec.high).astype(np.float32)
