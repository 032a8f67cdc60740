"""A simulated arm with the hardware layer's robot interface."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from msgspec import Meta

from hal.errors import HardwareLost, SpecError
from hal.robot import Observation, Robot, StopLevel
from hal.settings import Count, Positive, Share
from hal.spec import ACTION, ENVIRONMENT_STATE, STATE, Array, ArraySpec, Box, CameraSpec, RobotSpec, SafetyLimits
from sim.arms import ARMS, ArmModel
from sim.objects import DISTRACTORS, make_objects, scene_objects

if TYPE_CHECKING:
    from sim.scene import Motion, Pose
    from sim.world import MujocoWorld

EGL_MISSING = (
    "cannot render without a screen, because EGL is missing or broken ({cause}); "
    "on Debian or Ubuntu: apt-get install libegl1 libegl-mesa0 libopengl0"
)

PHYSICS_STEP_S = 0.002
FORCE_MAX_N, TORQUE_MAX_NM = 200.0, 20.0  # of the readings

TOOL_POSITION = slice(-8, -5)
TOOL_VELOCITY = slice(-5, -2)
GRIPPER_WIDTH = -2
GRIPPER_SET_WIDTH = -1
"""Indices into ``observation.state``, which begins with the joints' positions and velocities."""

FORCE = slice(-14, -11)
"""Likewise, if the wrench is measured."""


@dataclass(frozen=True)
class SimRobotConfig:
    """A simulated arm in a scene.

    Attributes:
        model: ``panda``, ``so101`` or ``ur5e`` (with a 2F-85).
        scene: the tasks (or objects) that the scene has the objects of; one of its tasks places its own, and the others
            are out of sight. Default: the robot's task.
        wrench: whether the state has the force and the torque on the gripper, and its force is limited; None: if
            something is to be inserted.
        rate_hz: control periods per second of simulated time; a period is a whole number of 2 ms physics steps.
        step_max_m: the longest step of the tool along each axis per control period; None for the model's default.
        workspace_low_m, workspace_high_m: box for the tool centre point in the base frame, None for the model's
            default; the table's top is z = 0.
        cameras: a selection of ``front`` and ``wrist``.
        camera_hz: images per second of simulated time, at most; an image is rendered at the end of a control period.
        image_height, image_width: pixels of each camera.
        randomise: how much lights, colours, camera positions and the objects' masses vary between episodes; see
            `sim.scene.Scene.randomise`.
        distractors: objects on the table that no task needs.
    """

    model: str = "panda"
    scene: tuple[str, ...] = ("lift",)
    wrench: bool | None = None
    rate_hz: float = 10.0
    step_max_m: Positive | None = None
    workspace_low_m: tuple[float, float, float] | None = None
    workspace_high_m: tuple[float, float, float] | None = None
    cameras: tuple[str, ...] = ("front", "wrist")
    camera_hz: Positive = 30.0
    image_height: Count = 128
    image_width: Count = 128
    randomise: Share = 0.0
    distractors: Annotated[int, Meta(ge=0, le=len(DISTRACTORS))] = 0

    def __post_init__(self) -> None:
        steps = 1 / (self.rate_hz * PHYSICS_STEP_S) if self.rate_hz > 0 else 0.0
        if not steps > 0.5 or abs(steps - round(steps)) > 1e-6:
            raise ValueError(
                f"rate_hz is {self.rate_hz:g}; a control period must be a whole number of physics steps of 2 ms"
            )

    @property
    def arm(self) -> ArmModel:
        """Raises SpecError on an unknown model."""
        if self.model not in ARMS:
            raise SpecError(f"no simulated arm {self.model!r}; choose one of {sorted(ARMS)}")
        return ARMS[self.model]

    @property
    def objects(self) -> tuple[str, ...]:
        """The tracked objects; raises SpecError on an unknown name."""
        return scene_objects(self.scene)

    @property
    def has_wrench(self) -> bool:
        """Whether the state has the wrench."""
        known = make_objects(1.0)
        return any(known[name].seat_m for name in self.objects) if self.wrench is None else self.wrench

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
            from sim.scene import Scene
            from sim.world import MujocoWorld

            scene = Scene(self.config.arm, self.config.objects, self.config.distractors)
            self._world = MujocoWorld(self.config.arm, scene, self.spec.period_s)

    def observe(self) -> Observation:
        """The current state; readings saturate at the spec's bounds, as a sensor's do."""
        now = self.world.read_sensors()
        state = np.concatenate(
            (
                now.joint_position,
                now.joint_velocity,
                now.wrench if self.config.has_wrench else (),
                now.tool_position,
                now.tool_velocity,
                (now.gripper_width, now.gripper_set_width),
            )
        )
        places = [now.object_position[name] for name in self.config.objects]
        tracked = np.concatenate([row for place in places for row in (place, place - now.tool_position)])
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

    def reset(
        self,
        rng: np.random.Generator,
        tool_position: Array,
        poses: Mapping[str, Pose],
        motion: Motion | None = None,
    ) -> None:
        """Put arm and objects in place (`sim.world.MujocoWorld.reset`), and randomise the scene as configured."""
        if self.config.randomise:
            self.world.scene.randomise(rng, self.config.randomise)
        if self.config.distractors:
            poses = self.world.scene.scatter(rng, poses)
        self.world.reset(tool_position, poses, motion)

    @property
    def _workspace(self) -> tuple[Array, Array]:
        box = self.config.workspace
        return np.array(box.low), np.array(box.high)


def require_objects(robot: Robot, task: str, objects: tuple[str, ...], arm: ArmModel) -> SimRobot:
    """Check that `robot` is `arm` simulated with `objects`, for a task that places them. Raises SpecError."""
    if not isinstance(robot, SimRobot):
        raise SpecError(f"the task {task!r} places objects, so it needs a simulated robot, not {robot.spec.model}")
    if missing := sorted(set(objects) - set(robot.config.objects)):
        raise SpecError(f"the task {task!r} needs {missing} in the scene; the robot has {list(robot.config.objects)}")
    if robot.config.arm != arm:
        raise SpecError(f"this task {task!r} is for the model {arm.name!r}; the robot is {robot.config.model!r}")
    return robot


def tracked_places(observation: Observation, objects: tuple[str, ...]) -> dict[str, Array]:
    """The (3,) position of each object of the scene, m, float64; `objects` are `SimRobotConfig.objects`."""
    tracked = observation.arrays[ENVIRONMENT_STATE].astype(float)
    return {name: tracked[6 * i : 6 * i + 3] for i, name in enumerate(objects)}


def sim_robot_spec(config: SimRobotConfig) -> RobotSpec:
    """The spec of the configured robot; does not need MuJoCo. Raises SpecError on an unknown name."""
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
    arm, box, width = config.arm, config.workspace, config.arm.gripper.width_max_m
    margin = 0.05  # beyond the joints' ranges (rad) and the workspace (m), so that readings show an overshoot
    ranges = zip(arm.joints, arm.joint_low_rad, arm.joint_high_rad, strict=True)
    speeds = zip(arm.joints, (1.2 * v for v in arm.joint_speed_max_rad_s), strict=True)
    rows = [(f"{joint}.position", "rad", low - margin, high + margin) for joint, low, high in ranges]
    rows += [(f"{joint}.velocity", "rad/s", -speed, speed) for joint, speed in speeds]
    if config.has_wrench:
        rows += [(f"force.{axis}", "N", -FORCE_MAX_N, FORCE_MAX_N) for axis in "xyz"]
        rows += [(f"torque.{axis}", "N m", -TORQUE_MAX_NM, TORQUE_MAX_NM) for axis in "xyz"]
    places = zip("xyz", box.low, box.high, strict=True)
    rows += [(f"tool.{axis}", "m", low - margin, high + margin) for axis, low, high in places]
    rows += [(f"tool.v{axis}", "m/s", -1.0, 1.0) for axis in "xyz"]
    rows += [("gripper.width", "m", -0.01, width + 0.01), ("gripper.set_width", "m", 0.0, width)]
    return ArraySpec.from_rows(STATE, rows)


def _tracker_spec(config: SimRobotConfig) -> ArraySpec:
    tracked, far = config.arm.tracker_box, config.arm.tracker_range_m
    places = list(zip("xyz", tracked.low, tracked.high, strict=True))
    rows: list[tuple[str, str, float, float]] = []
    for name in config.objects:
        rows += [(f"{name}.{axis}", "m", low, high) for axis, low, high in places]
        rows += [(f"{name}_from_tool.{axis}", "m", -far, far) for axis in "xyz"]
    return ArraySpec.from_rows(ENVIRONMENT_STATE, rows)


def _action_spec(config: SimRobotConfig) -> ArraySpec:
    step = config.step_max_m or config.arm.step_max_m
    rows = [(f"tool.d{axis}", "m", -step, step) for axis in "xyz"]
    return ArraySpec.from_rows(ACTION, [*rows, ("gripper.width", "m", 0.0, config.arm.gripper.width_max_m)])


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
    tool = 2 * n + (6 if config.has_wrench else 0)
    return SafetyLimits(
        workspace_low=box.low,
        workspace_high=box.high,
        tool_position=tuple(range(tool, tool + 3)),
        tool_force=tuple(range(2 * n, 2 * n + 3)) if config.has_wrench else (),
        tool_force_max=arm.force_max_n if config.has_wrench else None,
        joint_position=tuple(range(n)),
        joint_low=arm.joint_low_rad,
        joint_high=arm.joint_high_rad,
        joint_velocity=tuple(range(n, 2 * n)),
        joint_velocity_max=arm.joint_speed_max_rad_s,
        action_rate_max=(swing, swing, swing, more * arm.gripper.width_max_m),
    )


def _saturate(spec: ArraySpec, value: Array) -> Array:
    return np.clip(value, spec.low, spec.high).astype(np.float32)
