"""The conformance suite is safe to run on a real arm."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hal.conformance import RobotConformance, TaskConformance
from hal.driver import RobotSetup
from hal.errors import HalError, HardwareLost
from hal.robot import Observation, Robot, StopLevel
from hal.spec import ACTION, STATE, Array, ArraySpec, RobotSpec, SafetyLimits
from hal.task import Task, TaskOutcome

POSE = np.array([0.5, -0.7], np.float32)
BOUNDS = {"units": ("rad", "rad"), "low": (-2.0, -2.0), "high": (2.0, 2.0)}


class Arm(Robot):
    """Two joints, far from 0, that record their commands."""

    def __init__(self) -> None:
        self.spec = RobotSpec(
            model="arm",
            rate_hz=10.0,
            observation=(ArraySpec(name=STATE, labels=("a", "b"), **BOUNDS),),  # type: ignore[arg-type]
            action=ArraySpec(name=ACTION, labels=("b", "a"), **BOUNDS),  # type: ignore[arg-type]
            limits=SafetyLimits(
                joint_position=(1, 0), joint_low=(-2.0, -2.0), joint_high=(2.0, 2.0), joint_velocity_max=(1.0, 1.0)
            ),
            neutral=(0.0, 0.0),
            joint_target=(0, 1),
        )
        self.commands: list[Array] = []
        self._open = False

    def connect(self) -> None:
        self._open = True

    def observe(self) -> Observation:
        self._require_open()
        return Observation({STATE: POSE.copy()}, time.monotonic_ns())

    def command(self, action: Array) -> Array:
        self.spec.action.validate(action)
        self._require_open()
        applied: Array = np.clip(action, np.float32(-2), np.float32(2))
        self.commands.append(applied)
        return applied.copy()

    def stop(self, level: StopLevel) -> None:
        self._require_open()

    def close(self) -> None:
        self._open = False

    def _require_open(self) -> None:
        if not self._open:
            raise HardwareLost("closed")


class Suite(RobotConformance):
    def __init__(self) -> None:
        self.arms: list[Arm] = []

    def make_robot(self) -> Robot:
        self.arms.append(Arm())
        return self.arms[-1]

    def run(self) -> list[Array]:
        for name in dir(self):
            if name.startswith("test_"):
                getattr(self, name)()
        return [command for arm in self.arms for command in arm.commands]


def test_suite_commands_measured_joints_only() -> None:
    commands = Suite().run()
    assert len(commands) > 5
    for each in commands:
        np.testing.assert_array_equal(each, POSE[::-1])


def test_suite_with_large_steps_commands_beyond_bounds() -> None:
    suite = Suite()
    suite.allows_large_steps = True
    assert any((each == 2.0).any() for each in suite.run())


class DeafTask(Task):
    """Moves in five control periods; `deaf`: also after a stop."""

    name, instruction, max_steps = "deaf", "move", 9

    def __init__(self, *, deaf: bool) -> None:
        self._deaf = deaf

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        for _ in range(5):
            try:
                robot.check_stop()
            except HalError:
                if not self._deaf:
                    raise
            robot.command(POSE[::-1].copy())

    def evaluate(self, observation: Observation) -> TaskOutcome:
        return TaskOutcome(0.0, terminated=False)


class TaskSuite(TaskConformance):
    def __init__(self, *, deaf: bool) -> None:
        self._deaf = deaf

    def make_setup(self) -> RobotSetup:
        return RobotSetup("arm", Arm(), DeafTask(deaf=self._deaf))


def test_suite_refuses_a_task_that_moves_on_after_a_stop() -> None:
    TaskSuite(deaf=False).test_stop_during_a_reset_passes_through()
    with pytest.raises(AssertionError, match="the reset goes on after `check_stop` raised"):
        TaskSuite(deaf=True).test_stop_during_a_reset_passes_through()
