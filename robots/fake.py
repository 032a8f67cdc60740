"""A robot without hardware: a point with a gripper that moves exactly as commanded.

It is deterministic, has no dependencies, and fails on demand like hardware. Tests use it. It is also the pattern for a
driver: config and spec first, then the robot, its camera, its input device and its task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hal.camera import Camera, CameraFrame
from hal.driver import RobotSetup, RobotSetupRequest, read_options
from hal.errors import HardwareLost, SpecError, StaleObservation
from hal.robot import Observation, Robot, StopLevel
from hal.spec import ACTION, ENVIRONMENT_STATE, STATE, Array, ArraySpec, CameraSpec, RobotSpec, SafetyLimits
from hal.task import ExpertPolicy, Task, TaskOutcome, build_task
from hal.teleoperator import Teleoperator, TeleopInput

HALF_RANGE_M = 0.5  # half the edge of the cube around the base in which the point moves
STEP_M = 0.1
GRIPPER_M = 0.08


@dataclass(frozen=True)
class FaultPlan:
    """When the robot fails, as a count of commands and stops since its creation; None means never.

    Attributes:
        drop_out_at: the connection breaks until the next `connect`.
        stale_at: readings freeze; commands still take effect.
        nan_at: the state contains a NaN from here on.
    """

    drop_out_at: int | None = None
    stale_at: int | None = None
    nan_at: int | None = None


@dataclass(frozen=True)
class FakeTable:
    """A table that acts like a spring, and a sensor for the contact force on the point.

    Attributes:
        height_m: of its top, in the base frame.
        stiffness_n_per_m: contact force per metre below the top.
        force_max: N; above it the point does not move further against the force.
    """

    height_m: float = -0.3
    stiffness_n_per_m: float = 500.0
    force_max: float = 20.0


@dataclass(frozen=True)
class FakeRobotConfig:
    """Attributes:
    cameras: names of its cameras, each `image_size` pixels square.
    camera_hz: their rate, by the clock; 0 for a new picture at each reading.
    table: None for no table; with a table, the state includes the force on the point.
    """

    rate_hz: float = 10.0
    table: FakeTable | None = None
    cameras: tuple[str, ...] = ()
    image_size: int = 64
    camera_hz: float = 0.0
    faults: FaultPlan = field(default_factory=FaultPlan)


def fake_spec(config: FakeRobotConfig) -> RobotSpec:
    """The spec of the configured robot."""
    far, speed, table, size = HALF_RANGE_M, STEP_M * config.rate_hz, config.table, config.image_size
    state = [*((axis, "m", -far, far) for axis in "xyz"), ("width", "m", 0.0, GRIPPER_M)]
    state += [(f"v{axis}", "m/s", -speed, speed) for axis in "xyz"]
    if table:
        most_n = 2 * HALF_RANGE_M * table.stiffness_n_per_m
        state += [(f"f{axis}", "N", -most_n, most_n) for axis in "xyz"]
    goal = [(f"goal_{axis}", "m", -far, far) for axis in "xyz"]
    goal += [(f"to_goal_{axis}", "m", -2 * far, 2 * far) for axis in "xyz"]
    action = [*((f"d{axis}", "m", -STEP_M, STEP_M) for axis in "xyz"), ("width", "m", 0.0, GRIPPER_M)]
    return RobotSpec(
        model="fake",
        rate_hz=config.rate_hz,
        observation=(ArraySpec.from_rows(STATE, state), ArraySpec.from_rows(ENVIRONMENT_STATE, goal)),
        action=ArraySpec.from_rows(ACTION, action),
        cameras=tuple(
            CameraSpec(name=n, height=size, width=size, rate_hz=config.camera_hz or config.rate_hz)
            for n in config.cameras
        ),
        limits=SafetyLimits(
            workspace_low=(-far,) * 3,
            workspace_high=(far,) * 3,
            tool_position=(0, 1, 2),
            tool_force=(7, 8, 9) if table else (),
            tool_force_max=table.force_max if table else None,
            reduced_speed=0.25,
        ),
        neutral=(0.0, 0.0, 0.0, GRIPPER_M),
        tool_delta=(0, 1, 2),
        gripper=3,
        safe_stop="holds its position, as in HOLD",
    )


class FakeRobot(Robot):
    """The point. It moves at once when commanded; `clock` is used for capture times only."""

    def __init__(self, config: FakeRobotConfig | None = None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.config = config or FakeRobotConfig()
        self.spec = fake_spec(self.config)
        self._clock = clock
        self._low = np.array(self.spec.action.low, np.float32)
        self._high = np.array(self.spec.action.high, np.float32)
        self._connected = False
        self._dropped_out = False
        self._periods = 0
        self.set_state(np.zeros(3), np.full(3, HALF_RANGE_M / 2))

    @property
    def position(self) -> Array:
        """The position of the point: float64 (3,), metres in the base frame."""
        return self._position.copy()

    @property
    def goal(self) -> Array:
        """The position of the goal: float64 (3,), metres in the base frame."""
        return self._goal.copy()

    def set_state(self, position: Array, goal: Array) -> None:
        """Set point and goal, at rest with an open gripper; for `FakeTask.reset`. Clips to the range."""
        self._position: Array = np.clip(position, -HALF_RANGE_M, HALF_RANGE_M).astype(np.float64)
        self._goal: Array = np.clip(goal, -HALF_RANGE_M, HALF_RANGE_M).astype(np.float64)
        self._velocity: Array = np.zeros(3)
        self._width = GRIPPER_M
        self._reading = self._sense()

    def connect(self) -> None:
        if not self._connected:
            self._connected, self._dropped_out = True, False
            self._reading = self._sense()

    def observe(self) -> Observation:
        self._require_link()
        if not self._reached(self.config.faults.stale_at):
            self._reading = self._sense()
        age_s = (self._clock() - self._reading.t_capture_ns) / 1e9
        if age_s > self.spec.limits.stale_after_s:
            raise StaleObservation(f"the newest reading is {age_s:.3f} s old")
        return self._reading

    def command(self, action: Array) -> Array:
        self.spec.action.validate(action)
        self._require_link()
        applied = np.clip(action, self._low, self._high)
        before = self._position
        self._position = np.clip(before + applied[:3], -HALF_RANGE_M, HALF_RANGE_M)
        self._velocity = (self._position - before) * self.spec.rate_hz
        self._width = float(applied[3])
        self._pass_period()
        return applied

    def stop(self, level: StopLevel) -> None:
        self._require_link()
        self._velocity = np.zeros(3)
        self._pass_period()

    def close(self) -> None:
        self._connected = False

    def _pass_period(self) -> None:
        self._periods += 1
        if self._periods == self.config.faults.drop_out_at:
            self._dropped_out = True

    def _reached(self, count: int | None) -> bool:
        return count is not None and self._periods >= count

    def _require_link(self) -> None:
        if self._dropped_out or not self._connected:
            raise HardwareLost("the fake robot dropped out" if self._connected else "the fake robot is not connected")

    def _force(self) -> tuple[float, ...]:
        table = self.config.table
        if table is None:
            return ()
        return (0.0, 0.0, table.stiffness_n_per_m * max(0.0, table.height_m - float(self._position[2])))

    def _sense(self) -> Observation:
        state = np.array([*self._position, self._width, *self._velocity, *self._force()], np.float32)
        if self._reached(self.config.faults.nan_at):
            state[0] = np.nan
        goal = np.concatenate([self._goal, self._goal - self._position]).astype(np.float32)
        return Observation({STATE: state, ENVIRONMENT_STATE: goal}, self._clock())


class FakeCamera(Camera):
    """A view from above: the point in red, its goal in green."""

    def __init__(self, robot: FakeRobot, spec: CameraSpec) -> None:
        self.spec, self._robot = spec, robot
        self._connected = False
        self._newest: CameraFrame | None = None

    def connect(self) -> None:
        self._connected = True

    def read(self) -> CameraFrame:
        if not self._connected:
            raise HardwareLost(f"the fake camera {self.spec.name} is not connected")
        now_ns, rate_hz = time.monotonic_ns(), self._robot.config.camera_hz
        if self._newest is None or rate_hz == 0 or now_ns - self._newest.t_capture_ns >= 1e9 / rate_hz:
            self._newest = self._draw()
        return self._newest

    def _draw(self) -> CameraFrame:
        image = np.zeros(self.spec.shape, np.uint8)
        height, width, _ = self.spec.shape
        for channel, place in ((1, self._robot.goal), (0, self._robot.position)):
            column, row = ((place[:2] / (2 * HALF_RANGE_M) + 0.5) * (width - 1, height - 1)).astype(int)
            image[max(0, row - 2) : row + 3, max(0, column - 2) : column + 3, channel] = 255
        return CameraFrame(image, time.monotonic_ns())

    def close(self) -> None:
        self._connected = False


class FakeTeleoperator(Teleoperator):
    """Returns the inputs of `script` one per reading, then repeats the last."""

    def __init__(self, script: Sequence[TeleopInput]) -> None:
        """Raises SpecError if the script is empty."""
        if not script:
            raise SpecError("a fake teleoperator needs at least one input")
        self._script = tuple(script)
        self._next = 0
        self._connected = False

    def connect(self) -> None:
        self._connected = True

    def read(self) -> TeleopInput:
        if not self._connected:
            raise HardwareLost("the fake teleoperator is not connected")
        reading = self._script[min(self._next, len(self._script) - 1)]
        self._next += 1
        return reading

    def close(self) -> None:
        self._connected = False


class FakeTask(Task):
    """Reach the goal: success and reward 1 within `radius_m` of it."""

    name = "reach"
    instruction = "move to the goal"
    sentences = ("go to the green spot", "bring the red point to the green one")
    has_expert = True

    def __init__(self, radius_m: float = 0.05, max_steps: int = 50) -> None:
        self.radius_m = radius_m
        self.max_steps = max_steps

    def make_expert(self, robot: Robot, seed: int, noise: float) -> ExpertPolicy:
        """`fake_expert`, without noise."""
        return fake_expert

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        """Draw start and goal from the inner 80% of the range. Raises SpecError if the robot is not a `FakeRobot`."""
        if not isinstance(robot, FakeRobot):
            raise SpecError(f"the fake task needs a fake robot, not a {robot.spec.model}")
        start, goal = rng.uniform(-0.8 * HALF_RANGE_M, 0.8 * HALF_RANGE_M, (2, 3))
        robot.set_state(start, goal)

    def evaluate(self, observation: Observation) -> TaskOutcome:
        distance_m = float(np.linalg.norm(observation.arrays[ENVIRONMENT_STATE][3:]))
        done = distance_m <= self.radius_m
        return TaskOutcome(reward=float(done), terminated=done, success=True if done else None)


def fake_expert(arrays: Mapping[str, Array]) -> Array:
    """The action straight towards the goal: float32 (4,), gripper open."""
    step = np.clip(arrays[ENVIRONMENT_STATE][3:], -STEP_M, STEP_M)
    return np.array([*step, GRIPPER_M], np.float32)


def make_robot_setup(request: RobotSetupRequest) -> RobotSetup:
    """A `hal.driver.RobotSetupFactory`; options: `FakeRobotConfig`. Any name that no package has is `FakeTask`."""
    robot = FakeRobot(read_options(FakeRobotConfig, request))
    views = tuple(FakeCamera(robot, spec) for spec in robot.spec.cameras) if request.cameras else ()
    return RobotSetup(request.name, robot, build_task(request.tasks, robot, {}, lambda each: FakeTask()), views)
