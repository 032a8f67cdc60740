from __future__ import annotations

import re
import time
from typing import Any

import msgspec
import numpy as np
import pytest

import robots.homing
from hal.driver import RobotSetup
from hal.errors import EmergencyStopped, HardwareLost, SpecError, StaleObservation
from hal.robot import Observation, Robot, StopLevel
from hal.safety import SafetyKernel
from hal.spec import ACTION, STATE, Array, ArraySpec, Box, RobotSpec, SafetyLimits
from robots.homing import HumanJudgedTask, clip_to_range, move_home, require_joints_in_range, validate_home
from robots.reach_task import ReachConfig, ReachRobotWrapper, add_reach_task
from user_sys.edge.environment import RobotEnvironment

HOME, START = (0.3, -0.2), (-0.5, 0.4)
SPEED, REDUCED, RATE_HZ = 20.0, 0.25, 200.0
STEP = SPEED * REDUCED / RATE_HZ


class Arm(Robot):
    """Two joints and a gripper that reach their targets at once, unless `stuck`; records its commands.

    `farthest`: joint a is blocked there. `sag`: joint b stays below its target by this.
    """

    def __init__(self, **limits: Any) -> None:
        labels, units, low, high = ("a", "b", "grip"), ("rad", "rad", "m"), (-1.0, -1.0, 0.0), (1.0, 1.0, 0.1)
        shape = {"labels": labels, "units": units, "low": low, "high": high}
        self.spec = RobotSpec(
            model="arm",
            rate_hz=RATE_HZ,
            observation=(ArraySpec(name=STATE, **shape),),
            action=ArraySpec(name=ACTION, **shape),
            limits=SafetyLimits(
                joint_position=(0, 1),
                joint_low=low[:2],
                joint_high=high[:2],
                joint_velocity_max=(SPEED, SPEED),
                reduced_speed=REDUCED,
                stale_after_s=60.0,
                **limits,
            ),
            neutral=(0.0, 0.0, 0.1),
            joint_target=(0, 1),
            gripper=2,
        )
        self.state: Array = np.array([*START, 0.04], np.float32)
        self.commanded: list[Array] = []
        self.stops: list[StopLevel] = []
        self.stuck, self.farthest, self.sag = False, np.inf, 0.0
        self.stale = 0

    def connect(self) -> None:
        """Always connected."""

    def observe(self) -> Observation:
        self.stale -= 1
        if self.stale >= 0:
            raise StaleObservation("the newest reading is old")
        return Observation({STATE: self.state.copy()}, robots.homing.time.monotonic_ns())

    def command(self, action: Array) -> Array:
        self.spec.action.validate(action)
        self.commanded.append(action)
        if not self.stuck:
            self.state = np.minimum(action - np.float32([0, self.sag, 0]), np.float32([self.farthest, np.inf, np.inf]))
        return action.copy()

    def stop(self, level: StopLevel) -> None:
        self.stops.append(level)

    def go_home(self) -> None:
        move_home(self, HOME, self.state)

    def close(self) -> None:
        """Nothing to close."""


def test_homing_is_straight_and_slow_and_keeps_the_grip() -> None:
    arm = Arm()
    checks = []
    arm.check_stop = lambda: checks.append(len(arm.commanded))
    arm.go_home()
    np.testing.assert_allclose(arm.state, [*HOME, 0.04], atol=0.3 * STEP)
    way = np.array([START, *(each[:2] for each in arm.commanded)])
    steps = np.diff(way, axis=0)
    assert np.abs(steps).max() <= STEP * 1.001, "as fast as is allowed while a person is near"
    span = np.subtract(HOME, START)
    np.testing.assert_allclose(steps[:, 0] * span[1], steps[:, 1] * span[0], atol=1e-6)
    assert set(checks) == set(range(1, len(arm.commanded) + 1)), "check_stop runs in every control period"


def test_homing_respects_spec_limits_and_needs_speeds() -> None:
    arm = Arm(joint_acceleration_max=(100.0, 100.0))
    arm.go_home()
    first = arm.commanded[0][:2] - START
    assert np.abs(first).max() <= 100.0 / RATE_HZ**2 * 1.001 < STEP
    np.testing.assert_allclose(arm.state[:2], HOME, atol=0.3 * STEP)
    arm.spec = msgspec.structs.replace(arm.spec, limits=msgspec.structs.replace(arm.spec.limits, joint_velocity_max=()))
    with pytest.raises(SpecError, match="arm: joint_target needs a finite joint_velocity_max of each joint"):
        arm.go_home()


def test_estop_ends_homing() -> None:
    setup = add_reach_task(RobotSetup("arm-0", Arm(), HumanJudgedTask("x", "x", 9)), ReachConfig())
    robot = setup.robot
    assert isinstance(robot, ReachRobotWrapper) and isinstance(arm := robot.robot, Arm)
    driver = RobotEnvironment(robot, setup.task, SafetyKernel(robot.spec))
    driver.connect()

    def pressed_after_five() -> None:
        """Raises like the driver process after an e-stop."""
        if len(arm.commanded) == 5:
            driver.emergency_stop("ada")
            raise EmergencyStopped("pressed by ada")

    robot.check_stop = pressed_after_five
    assert driver.reset(0).stopped
    assert len(arm.commanded) == 5 and arm.stops[-1] is StopLevel.SAFE
    driver.kernel.rearm("ada")
    robot.check_stop = lambda: None
    assert not driver.reset(0).stopped
    np.testing.assert_allclose(arm.state[:2], HOME, atol=0.3 * STEP)


def test_blocked_arm_times_out_without_pushing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arm = Arm()
    arm.stuck = True
    monkeypatch.setattr(robots.homing, "HOMING_TIMEOUT_S", 0.2)
    monkeypatch.setattr(robots.homing, "MAX_TARGET_LEAD_S", 0.02)
    monkeypatch.setattr(robots.homing, "HOME_TOLERANCE_S", 0.002)
    driver = RobotEnvironment(arm, HumanJudgedTask("x", "x", 9), SafetyKernel(arm.spec))
    driver.connect()
    begun_s = time.monotonic()
    assert driver.reset(0).stopped and driver.kernel.latched_estop is not None
    took_s = time.monotonic() - begun_s
    why = re.match(
        r"arm did not get home within (\S+) s: its joints are at \[-0.5, 0.4\]", driver.kernel.latched_estop.why
    )
    assert why and 0.2 < float(why[1]) < 1.01 * took_s, "the time that homing took, to three digits"
    commanded = len(arm.commanded)
    assert driver.reset(1).stopped and len(arm.commanded) == commanded, "no attempt before a person has looked"
    assert np.abs(np.array(arm.commanded)[:, :2] - START).max() <= SPEED * REDUCED * 0.02 * 1.001


def test_joint_blocked_just_before_home_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = Arm()
    monkeypatch.setattr(robots.homing, "HOMING_TIMEOUT_S", 1.0)
    monkeypatch.setattr(robots.homing, "HOME_TOLERANCE_S", 0.0025)
    arm.farthest = HOME[0] - 1.6 * SPEED * 0.0025
    with pytest.raises(EmergencyStopped, match=r"its joints are at \[0.22, -0.2\], not at \[0.3, -0.2\]"):
        arm.go_home()
    np.testing.assert_allclose(arm.commanded[-1][:2], HOME, atol=0.3 * STEP, err_msg="the lead does not show it")
    arm.farthest = HOME[0] - 0.8 * SPEED * 0.0025
    arm.go_home()


@pytest.mark.parametrize("start", [-0.25, -0.15])
def test_sagging_arm_gets_home_at_a_low_reduced_speed(monkeypatch: pytest.MonkeyPatch, start: float) -> None:
    monkeypatch.setattr(robots.homing, "HOMING_TIMEOUT_S", 1.0)
    monkeypatch.setattr(robots.homing, "HOME_TOLERANCE_S", 0.0025)
    arm = Arm()
    arm.spec = msgspec.structs.replace(arm.spec, limits=msgspec.structs.replace(arm.spec.limits, reduced_speed=0.005))
    arm.state[:2], arm.sag = (HOME[0], start), 0.04
    arm.go_home()
    np.testing.assert_allclose(arm.commanded[-1][:2], HOME, atol=1e-3)


def test_arm_outside_of_its_workspace_gets_home() -> None:
    arm = Arm(tool_position=(0, 1, 2), workspace_low=(-0.4, -1.0, -1.0), workspace_high=(1.0, 1.0, 1.0))
    arm.go_home()
    np.testing.assert_allclose(arm.state[:2], HOME, atol=0.3 * STEP)
    assert arm.stops == []


def test_homing_stops_in_a_forbidden_box_and_may_leave_it_after_a_person_has_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arm = Arm(tool_position=(0, 1, 2), keep_out=(Box((-0.2, -1.0, -1.0), (0.1, 1.0, 1.0)),))
    with monkeypatch.context() as patch, pytest.raises(EmergencyStopped, match="the tool is at .*; a person must look"):
        patch.setattr(robots.homing, "HOMING_TIMEOUT_S", 0.2)
        arm.go_home()
    assert arm.state[0] < -0.2 + 2 * STEP
    arm.go_home()
    np.testing.assert_allclose(arm.state[:2], HOME, atol=0.3 * STEP)


@pytest.mark.parametrize(
    "limits",
    [
        {"workspace_low": (-1.0, -1.0, -1.0), "workspace_high": (0.0, 1.0, 1.0)},
        {"keep_out": (Box((0.2, -1.0, -1.0), (0.4, 1.0, 1.0)),)},
    ],
)
def test_tool_out_of_its_place_at_home_latches_the_estop(limits: dict[str, Any]) -> None:
    arm = Arm(tool_position=(0, 1, 2), **limits)
    arm.state[:2] = HOME
    driver = RobotEnvironment(arm, HumanJudgedTask("x", "x", 9), SafetyKernel(arm.spec))
    driver.connect()
    for _ in range(2):
        assert driver.reset(0).stopped and (latched := driver.kernel.latched_estop) is not None
        assert "at home the tool is at [0.3, -0.2, 0.04] m, outside the workspace or in a forbidden box" in latched.why
        assert arm.stops[-1] is StopLevel.SAFE
        driver.kernel.rearm("ada")


def test_stale_readings_pause_homing() -> None:
    arm = Arm()
    arm.stale = 3
    arm.go_home()
    assert arm.stops == [StopLevel.HOLD] * 3
    np.testing.assert_allclose(arm.state[:2], HOME, atol=0.3 * STEP)


@pytest.mark.parametrize(
    ("home", "why"),
    [
        ((0.0,), r"home has 1 positions; arm needs one for each of its joints \['a', 'b'\]"),
        ((0.0, 1.5), "home: b is 1.5; it must be between -1 and 1"),
    ],
)
def test_invalid_home_is_explained(home: tuple[float, ...], why: str) -> None:
    spec = Arm().spec
    low, high = np.array(spec.action.low), np.array(spec.action.high)
    validate_home(spec, (), low, high)
    validate_home(spec, HOME, low, high)
    with pytest.raises(SpecError, match=why):
        validate_home(spec, home, low, high)


def test_far_out_of_range_joint_is_refused() -> None:
    spec = Arm().spec
    low, high = np.array(spec.action.low), np.array(spec.action.high)
    slack = SPEED * robots.homing.RANGE_TOLERANCE_S
    for measured in (START, (1.0 + 0.9 * slack, -1.0 - 0.9 * slack)):
        require_joints_in_range(spec, np.array(measured), low, high)
    with pytest.raises(HardwareLost, match="arm: b is at -3.2; it must be between -1 and 1: a person must move it"):
        require_joints_in_range(spec, np.array([0.0, -1.0 - 1.1 * slack]), low, high)


def test_clipping_does_not_make_a_joint_jump() -> None:
    spec = Arm().spec
    low, high = np.array(spec.action.low, np.float32), np.array(spec.action.high, np.float32)
    for wanted, stands, commanded in (
        (1.4, 1.5, 1.4),
        (1.6, 1.5, 1.5),
        (0.5, 1.5, 0.5),
        (1.4, 0.5, 1.0),
        (-1.4, 1.5, -1.0),
    ):
        action = np.array([wanted, 0.0, 0.2], np.float32)
        cut = clip_to_range(spec, action, np.array([stands, 0.0]), low, high)
        np.testing.assert_allclose(cut, [commanded, 0.0, 0.1], atol=1e-6)
