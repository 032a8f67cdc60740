"""A driver for two joints of a remote controller. Replace `controller` by your device's library.

`Options` are the `options` of a run's config. `spec` describes observations, actions and limits. The other files are a
task, a policy, an algorithm and a reward of your own; a driver needs none of them but a task.
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
from hal.task import build_task
from point_robot.controller import Controller
from point_robot.task import Upright, UprightSettings
from robots.reach_task import REACH_TASK, ReachConfig, add_reach_task

JOINTS = ("shoulder", "elbow")
LIMIT_RAD, SPEED_RAD_S = math.pi / 2, 1.0


@dataclass(frozen=True)
class Options:
    """Attributes: `address` of the controller; `reach`: settings of the task of that name."""

    address: str = "127.0.0.1"
    rate_hz: float = 20.0
    reach: ReachConfig = field(default_factory=ReachConfig)


def spec(options: Options) -> RobotSpec:
    """The robot's spec; needs no hardware."""
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
    """The safety kernel checks actions before `command`, which returns the applied action or raises HardwareLost."""

    def __init__(self, options: Options) -> None:
        self.options, self.spec = options, spec(options)
        self._controller: Controller | None = None

    def connect(self) -> None:
        if self._controller is None:
            self._controller = Controller(self.options.address)  # raise HardwareLost if it does not answer
            self.stop(StopLevel.HOLD)

    def observe(self) -> Observation:
        captured_ns = time.monotonic_ns()
        return Observation({STATE: np.array(self._connected().angles(), np.float32)}, captured_ns)

    def command(self, action: Array) -> Array:
        self.spec.action.validate(action)
        controller = self._connected()
        applied = np.clip(action, self.spec.action.low, self.spec.action.high).astype(np.float32)
        controller.go_to(applied.tolist())
        return applied

    def stop(self, level: StopLevel) -> None:
        controller = self._connected()
        controller.go_to(controller.angles())

    def close(self) -> None:
        try:
            if self._controller is not None:
                self.stop(StopLevel.SAFE)
        finally:
            self._controller = None

    def _connected(self) -> Controller:
        if self._controller is None:
            raise HardwareLost(f"the point robot at {self.options.address} is not connected")
        return self._controller


def make_robot_setup(request: RobotSetupRequest) -> RobotSetup:
    """The entry point in pyproject.toml. `read_options` refuses unknown options."""
    options = read_options(Options, request)
    robot = PointRobot(options)
    if request.task == REACH_TASK:
        return add_reach_task(RobotSetup(request.name, robot, Upright(UprightSettings())), options.reach)
    return RobotSetup(request.name, robot, build_task(request.tasks, robot, {Upright.name: Upright}))
