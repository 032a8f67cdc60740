"""The suite that a driver's own tests inherit may be run on a real arm."""

from __future__ import annotations

import time

import numpy as np

from hal.conformance import RobotConformance
from hal.errors import HardwareLost
from hal.robot import Observation, Robot, StopLevel
from hal.spec import ACTION, STATE, Array, ArraySpec, RobotSpec, SafetyLimits

POSE = np.array([0.5, -0.7], np.float32)
BOUNDS = {"units": ("rad", "rad"), "low": (-2.0, -2.0), "high": (2.0, 2.0)}


class Arm(Robot):
    """Two joints, far from 0, that note where they are told to be."""

    def __init__(self) -> None:
        self.spec = RobotSpec(
            model="arm",
            rate_hz=10.0,
            observation=(ArraySpec(name=STATE, labels=("a", "b"), **BOUNDS),),  # type: ignore[arg-type]
            action=ArraySpec(name=ACTION, labels=("b", "a"), **BOUNDS),  # type: ignore[arg-type]
            limits=SafetyLimits(joint_position=(1, 0), joint_low=(-2.0, -2.0), joint_high=(2.0, 2.0)),
            neutral=(0.0, 0.0),
            joint_target=(0, 1),
        )
        self.told: list[Array] = []
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
        self.told.append(applied)
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
        return [told for arm in self.arms for told in arm.told]


def test_the_suite_sends_no_joint_away_from_where_it_is() -> None:
    told = Suite().run()
    assert len(told) > 5
    for each in told:
        np.testing.assert_array_equal(each, POSE[::-1])


def test_joints_that_may_leap_are_sent_beyond_their_bounds_too() -> None:
    suite = Suite()
    suite.allows_large_steps = True
    assert any((each == 2.0).any() for each in suite.run())
