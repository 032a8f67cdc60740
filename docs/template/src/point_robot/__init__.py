"""A robot of your own: two joints that a controller somewhere moves. Replace `controller` by your device's library.

What a run's config calls `options` is `Options`; what a person or a policy may ask of the robot is `SPEC`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from hal.driver import RobotSetup, RobotSetupRequest, read_options
from hal.errors import HardwareLost
from hal.robot import Observation, Robot, StopLevel
from hal.spec import ACTION, STATE, Array, ArraySpec, RobotSpec, SafetyLimits
from hal.task import Task, TaskOutcome
from point_robot.controller import Controller
from robots.reach_task import REACH_TASK, ReachConfig, add_reach_task

JOINTS = ("shoulder", "elbow")
LIMIT_RAD, SPEED_RAD_S = math.pi / 2, 1.0


@dataclass(frozen=True)
class Options:
    """Attributes: `address` is where the controller is; `reach` is of the task of that name."""

    address: str = "127.0.0.1"
    rate_hz: float = 20.0
    reach: ReachConfig = field(default_factory=ReachConfig)


def spec(options: Options) -> RobotSpec:
    """Everything that the rest of the system needs to know; nothing is asked of the hardware."""
    bounds = {"low": (-LIMIT_RAD,) * 2, "high": (LIMIT_RAD,) * 2}
    return RobotSpec(
        model="point",
        rate_hz=options.rate_hz,
        observation=(ArraySpec(name=STATE, labels=JOINTS, units=("rad",) * 2, **bounds),),
        action=ArraySpec(name=ACTION, labels=JOINTS, units=("rad",) * 2, **bounds),
        limits=SafetyLimits(
            joint_position=(0, 1),
            joint_low=bounds["low"],
            joint_high=bounds["high"],
            joint_velocity_max=(SPEED_RAD_S,) * 2,
            reduced_speed=0.25,
        ),
        neutral=(0.0, 0.0),
        joint_target=(0, 1),
        safe_stop="holds its pose",
    )


class PointRobot(Robot):
    """The safety kernel stands before `command`; the driver says what was applied, and HardwareLost when it is gone."""

    def __init__(self, options: Options) -> None:
        self.options, self.spec = options, spec(options)
        self._controller: Controller | None = None

    def connect(self) -> None:
        if self._controller is None:
            self._controller = Controller(self.options.address)  # raise HardwareLost where it does not answer
            self.stop(StopLevel.HOLD)

    def observe(self) -> Observation:
        captured_ns = time.monotonic_ns()
        return Observation({STATE: np.array(self._link().angles(), np.float32)}, captured_ns)

    def command(self, action: Array) -> Array:
        self.spec.action.validate(action)
        controller = self._link()
        applied = np.clip(action, self.spec.action.low, self.spec.action.high).astype(np.float32)
        controller.go_to(applied.tolist())
        return applied

    def stop(self, level: StopLevel) -> None:
        controller = self._link()
        controller.go_to(controller.angles())

    def close(self) -> None:
        try:
            if self._controller is not None:
                self.stop(StopLevel.SAFE)
        finally:
            self._controller = None

    def _link(self) -> Controller:
        if self._controller is None:
            raise HardwareLost(f"the point robot at {self.options.address} is not connected")
        return self._controller


class Upright(Task):
    """Both joints at 0."""

    name, sentence, max_steps = "upright", "stand upright", 200

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        """Somebody, or something, has to bring the robot to a start; this one starts from where it is."""
        robot.stop(StopLevel.HOLD)

    def evaluate(self, observation: Observation) -> TaskOutcome:
        done = bool(np.abs(observation.arrays[STATE]).max() < 0.05)
        return TaskOutcome(reward=float(done), terminated=done, success=True if done else None)


def make_robot_setup(request: RobotSetupRequest) -> RobotSetup:
    """What the entry point in pyproject.toml names. Unknown options are refused by `read_options`."""
    options = read_options(Options, request)
    setup = RobotSetup(request.name, PointRobot(options), Upright())
    return add_reach_task(setup, options.reach) if request.task == REACH_TASK else setup
