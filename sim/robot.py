"""The simulated Panda as a robot of the hardware layer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hal.errors import HardwareLost, SpecError
from hal.robot import Observation, Robot, StopLevel
from hal.spec import ACTION, ENVIRONMENT_STATE, STATE, Array, ArraySpec, CameraSpec, RobotSpec, SafetyLimits
from sim import panda

if TYPE_CHECKING:
    from sim.world import World

OBJECT = {"lift": "cube", "reach": "target"}
"""The thing that each scene is about; a tracker tells where it is."""

TOOL_POSITION = slice(14, 17)
TOOL_VELOCITY = slice(17, 20)
GRIPPER_WIDTH = 20
GRIPPER_SET_WIDTH = 21
"""Where to find things in ``observation.state``."""


@dataclass(frozen=True)
class SimRobotConfig:
    """A simulated Panda in a scene.

    Attributes:
        scene: ``lift`` (a cube on a table) or ``reach`` (a target in the air).
        rate_hz: control periods a second of simulated time; a period is a whole number of 2 ms physics steps.
        step_max_m: the longest step of the tool along each axis in one control period.
        workspace_low_m, workspace_high_m: box for the tool centre point in the base frame; the table's top is z = 0.
        cameras: of ``front`` and ``wrist``, those that the robot has.
        image_height, image_width: pixels of each camera.
    """

    scene: str = "lift"
    rate_hz: float = 10.0
    step_max_m: float = 0.04
    workspace_low_m: tuple[float, float, float] = (0.34, -0.20, 0.015)
    workspace_high_m: tuple[float, float, float] = (0.64, 0.20, 0.30)
    cameras: tuple[str, ...] = ("front", "wrist")
    image_height: int = 128
    image_width: int = 128


class SimRobot(Robot):
    """A Panda in MuJoCo; its world moves only in `command` and `stop`, by one control period, as fast as it can.

    The action is a step of the tool's target (dx, dy, dz), m in the base frame, and the gripper's opening, m. The
    gripper points down throughout. An opening smaller than what lies between the fingers grips it. Fingers move at the
    maker's 0.1 m/s, so a grip survives a single stray opening command. A hold keeps the grip.
    """

    def __init__(self, config: SimRobotConfig | None = None) -> None:
        """Raises SpecError when the scene or a camera is unknown."""
        self.config = config or SimRobotConfig()
        self.spec = robot_spec(self.config)
        self._world: World | None = None

    @property
    def world(self) -> World:
        """The physics, for tasks and cameras; raises HardwareLost before `connect` and after `close`."""
        if self._world is None:
            raise HardwareLost("the simulated robot is not connected; call connect() first")
        return self._world

    def connect(self) -> None:
        if self._world is None:
            from sim.world import World

            self._world = World(self.config.scene, self.spec.period_s)

    def observe(self) -> Observation:
        """The present state; readings saturate at the spec's bounds, as a sensor's do."""
        now = self.world.readings()
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
        arrays = {s.name: _saturated(s, v) for s, v in zip(self.spec.observation, vectors, strict=True)}
        return Observation(arrays=arrays, t_capture_ns=time.monotonic_ns())

    def command(self, action: Array) -> Array:
        self.spec.action.validate(action)
        low, high = self._workspace
        bounded = np.clip(action, self.spec.action.low, self.spec.action.high)
        step, width = self.world.advance(bounded[:3], float(bounded[3]), low, high)
        return np.array([*step, width], dtype=np.float32)

    def stop(self, level: StopLevel) -> None:
        if level is StopLevel.SAFE:
            self.world.freeze()
        else:
            self.world.advance(np.zeros(3), None, *self._workspace)

    def close(self) -> None:
        self._world = None

    @property
    def _workspace(self) -> tuple[Array, Array]:
        return np.array(self.config.workspace_low_m), np.array(self.config.workspace_high_m)


def in_scene(robot: Robot, scene: str) -> SimRobot:
    """`robot`, known to be a simulated one in `scene`, for a task that places objects; raises SpecError otherwise."""
    if not isinstance(robot, SimRobot):
        raise SpecError(f"the task {scene!r} places objects, so it needs a simulated robot, not {robot.spec.model}")
    if robot.config.scene != scene:
        raise SpecError(f"the task {scene!r} needs the scene {scene!r}; the robot is in {robot.config.scene!r}")
    return robot


def robot_spec(config: SimRobotConfig) -> RobotSpec:
    """What the robot of `config` senses and takes; needs no MuJoCo. Raises SpecError on an unknown scene or camera."""
    if config.scene not in OBJECT:
        raise SpecError(f"no scene {config.scene!r}; there are {sorted(OBJECT)}")
    unknown = sorted(set(config.cameras) - {"front", "wrist"})
    if unknown:
        raise SpecError(f"no cameras {unknown}; there are ['front', 'wrist']")
    return RobotSpec(
        model="panda-sim",
        rate_hz=config.rate_hz,
        observation=(_state_spec(config), _tracker_spec(config)),
        action=_action_spec(config),
        cameras=tuple(_camera_spec(name, config) for name in config.cameras),
        limits=_limits(config),
        neutral=(0.0, 0.0, 0.0, panda.GRIPPER_WIDTH_MAX_M),
        tool_delta=(0, 1, 2),
        gripper=3,
        safe_stop="stops where it is and holds that pose; the gripper keeps its grip",
    )


def _state_spec(config: SimRobotConfig) -> ArraySpec:
    speed = tuple(1.2 * v for v in panda.JOINT_SPEED_MAX_RAD_S)
    reach = 0.05
    tool_low = tuple(v - reach for v in config.workspace_low_m)
    tool_high = tuple(v + reach for v in config.workspace_high_m)
    joints = tuple(f"{j}.position" for j in panda.JOINTS) + tuple(f"{j}.velocity" for j in panda.JOINTS)
    tool = ("tool.x", "tool.y", "tool.z", "tool.vx", "tool.vy", "tool.vz")
    return ArraySpec(
        name=STATE,
        labels=(*joints, *tool, "gripper.width", "gripper.set_width"),
        units=("rad",) * 7 + ("rad/s",) * 7 + ("m",) * 3 + ("m/s",) * 3 + ("m",) * 2,
        low=(*(v - 0.05 for v in panda.JOINT_LOW_RAD), *(-v for v in speed), *tool_low, -1.0, -1.0, -1.0, -0.01, 0.0),
        high=(*(v + 0.05 for v in panda.JOINT_HIGH_RAD), *speed, *tool_high, 1.0, 1.0, 1.0, 0.09, 0.08),
    )


def _tracker_spec(config: SimRobotConfig) -> ArraySpec:
    name = OBJECT[config.scene]
    return ArraySpec(
        name=ENVIRONMENT_STATE,
        labels=tuple(f"{name}.{axis}" for axis in "xyz") + tuple(f"{name}_from_tool.{axis}" for axis in "xyz"),
        units=("m",) * 6,
        low=(0.2, -0.4, -0.1, -0.4, -0.4, -0.4),
        high=(0.8, 0.4, 0.4, 0.4, 0.4, 0.4),
    )


def _action_spec(config: SimRobotConfig) -> ArraySpec:
    step = config.step_max_m
    return ArraySpec(
        name=ACTION,
        labels=("tool.dx", "tool.dy", "tool.dz", "gripper.width"),
        units=("m",) * 4,
        low=(-step, -step, -step, 0.0),
        high=(step, step, step, panda.GRIPPER_WIDTH_MAX_M),
    )


def _camera_spec(name: str, config: SimRobotConfig) -> CameraSpec:
    return CameraSpec(name=name, height=config.image_height, width=config.image_width, rate_hz=config.rate_hz)


def _limits(config: SimRobotConfig) -> SafetyLimits:
    """Joint targets stay below 80% of the maker's speeds, so the kernel's speed limit bites only on a fault.

    The action may swing from bound to bound: acceleration is limited by the arm's own dynamics.
    """
    swing = 2 * config.step_max_m
    return SafetyLimits(
        workspace_low=config.workspace_low_m,
        workspace_high=config.workspace_high_m,
        tool_position=tuple(range(TOOL_POSITION.start, TOOL_POSITION.stop)),
        joint_position=tuple(range(7)),
        joint_low=panda.JOINT_LOW_RAD,
        joint_high=panda.JOINT_HIGH_RAD,
        joint_velocity=tuple(range(7, 14)),
        joint_velocity_max=panda.JOINT_SPEED_MAX_RAD_S,
        action_rate_max=(swing, swing, swing, panda.GRIPPER_WIDTH_MAX_M),
    )


def _saturated(spec: ArraySpec, value: Array) -> Array:
    return np.clip(value, spec.low, spec.high).astype(np.float32)
