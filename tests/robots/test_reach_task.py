from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from hal.conformance import RobotConformance
from hal.driver import RobotSetup
from hal.errors import EmergencyStopped, HardwareLost, SpecError
from hal.robot import Observation, Robot, StopLevel
from hal.safety import SafetyKernel
from hal.spec import ACTION, ENVIRONMENT_STATE, STATE, Array, ArraySpec, RobotSpec, SafetyLimits
from robots.fake import FakeRobot
from robots.homing import HumanJudgedTask
from robots.reach_task import ReachConfig, ReachRobotWrapper, ReachTask, add_reach_task

LOW, HIGH, SPEED = (-2.0, -1.0), (2.0, 1.0), 0.5


class Arm(Robot):
    """Two joints that reach their targets at once, and a gripper."""

    def __init__(self) -> None:
        labels = ("a", "b", "grip")
        self.spec = RobotSpec(
            model="arm",
            rate_hz=10.0,
            observation=(
                ArraySpec(name=STATE, labels=labels, units=("rad", "rad", "m"), low=(-3.0,) * 3, high=(3.0,) * 3),
            ),
            action=ArraySpec(
                name=ACTION, labels=("grip", "b", "a"), units=("m", "rad", "rad"), low=(0, -1, -2), high=(0.1, 1, 2)
            ),
            limits=SafetyLimits(
                joint_position=(1, 0),
                joint_low=LOW[::-1],
                joint_high=HIGH[::-1],
                joint_velocity_max=(SPEED, SPEED),
            ),
            neutral=(0.1, 0.0, 0.0),
            joint_target=(1, 2),
            gripper=0,
        )
        self.state: Array = np.zeros(3, np.float32)
        self.stuck = self.open = False
        self.sag = 0.0
        self.t_ns = 0

    def connect(self) -> None:
        self.open = True

    def observe(self) -> Observation:
        self._require_open()
        self.t_ns += 1
        return Observation({STATE: self.state.copy()}, self.t_ns)

    def command(self, action: Array) -> Array:
        self.spec.action.validate(action)
        self._require_open()
        applied = np.clip(action, np.float32(self.spec.action.low), np.float32(self.spec.action.high))
        if not self.stuck:
            self.state[[2, 1, 0]] = applied - np.float32(self.sag)
        self.sent = applied
        return applied

    def stop(self, level: StopLevel) -> None:
        self._require_open()

    def close(self) -> None:
        self.open = False

    def _require_open(self) -> None:
        if not self.open:
            raise HardwareLost("closed")


class TestReachingRobot(RobotConformance):
    def make_robot(self) -> Robot:
        return ReachRobotWrapper(Arm(), ReachConfig())


def reaching(**config: object) -> tuple[Arm, ReachRobotWrapper]:
    arm = Arm()
    robot = ReachRobotWrapper(arm, ReachConfig(**config))  # type: ignore[arg-type]
    robot.connect()
    return arm, robot


def step(b: float, a: float, grip: float = 0.1) -> Array:
    return np.array([grip, b, a], np.float32)


def test_wrapped_robot_calls_the_stop_check_that_was_set_last() -> None:
    def press() -> None:
        raise EmergencyStopped("pressed by ada")

    robot = ReachRobotWrapper(Arm(), ReachConfig())
    robot.connect()
    robot.check_stop = press  # after the connection, by the driver process
    with pytest.raises(EmergencyStopped):
        robot.robot.check_stop()


def test_stop_reaches_the_robot_that_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    arm, robot = reaching()
    asked = []
    robot.check_stop = lambda: asked.append(True)
    monkeypatch.setattr(arm, "connect", lambda: arm.check_stop())
    robot.connect()
    assert asked


def test_step_starts_at_the_last_target() -> None:
    arm, robot = reaching()
    robot.observe()
    np.testing.assert_allclose(robot.command(step(0.02, 0.05)), [0.1, 0.02, 0.05], rtol=1e-5)
    robot.observe()
    np.testing.assert_allclose(robot.command(step(0.02, 9.0)), [0.1, 0.02, SPEED / 10], rtol=1e-5)
    np.testing.assert_allclose(arm.sent, [0.1, 0.04, 0.1], rtol=1e-5)


def test_applied_step_excludes_clipped_part_and_blocked_joint_limits_lead() -> None:
    arm, robot = reaching()
    arm.state[1] = 0.99
    robot.observe()
    assert robot.command(step(0.05, 0))[1] == pytest.approx(0.01, abs=1e-6)
    robot.stop(StopLevel.HOLD)
    arm.state[1] = 0.0
    arm.stuck = True
    for _ in range(50):
        robot.observe()
        robot.command(step(0.05, 0))
    assert arm.sent[1] <= 4 * SPEED / 10 + 1e-6


def test_sagging_arm_does_not_sink_by_itself() -> None:
    arm, robot = reaching(step_max=0.01)
    arm.sag = 0.035  # more than three steps
    robot.observe()
    robot.command(step(0, 0))
    for _ in range(20):
        robot.observe()
        assert robot.command(step(0, 0)).tolist() == pytest.approx([0.1, 0, 0], abs=1e-6)
    np.testing.assert_allclose(arm.sent, [0.1, 0, 0], atol=1e-6)


def test_steps_start_at_measured_position_after_stop() -> None:
    arm, robot = reaching()
    robot.observe()
    robot.command(step(0.05, 0.05))
    robot.stop(StopLevel.HOLD)
    arm.state[1] = 0.5
    robot.observe()
    robot.command(step(0.01, 0))
    assert arm.sent[1] == pytest.approx(0.51, abs=1e-6)


def test_observation_has_goal_and_seed_is_reproducible() -> None:
    _, robot = reaching()
    task = ReachTask(robot, HumanJudgedTask("x", "x", 9), "", 9)
    task.reset(robot, np.random.default_rng(3))
    goal = robot.goal.copy()
    assert (np.abs(goal) <= np.array([0.5, 1.0])).all(), "the inner half of each joint's range"
    seen = robot.observe().arrays[ENVIRONMENT_STATE]
    np.testing.assert_allclose(seen, [*goal, *goal], rtol=1e-5)
    assert robot.spec.feature(ENVIRONMENT_STATE).labels == ("goal_b", "goal_a", "to_goal_b", "to_goal_a")
    task.reset(robot, np.random.default_rng(3))
    np.testing.assert_array_equal(robot.goal, goal)


def test_goal_covers_named_joints_only() -> None:
    setup = add_reach_task(RobotSetup("arm-0", Arm(), HumanJudgedTask("x", "x", 9)), ReachConfig(joints=("a",)))
    robot, task = setup.robot, setup.task
    assert isinstance(robot, ReachRobotWrapper) and task.has_expert
    assert robot.spec.feature(ENVIRONMENT_STATE).labels == ("goal_a", "to_goal_a")
    with robot:
        task.reset(robot, np.random.default_rng(3))
        steps = task.make_expert(robot, 0, 0.0)(robot.observe().arrays)
        assert (steps[1], abs(steps[2])) == (0.0, pytest.approx(SPEED / 10)), "b stays where it is"
        arm = robot.robot
        assert isinstance(arm, Arm)
        arm.state[:2] = robot.goal[0], -1.0
        assert task.evaluate(robot.observe()).success
    with pytest.raises(SpecError, match="no joint 'c'; choose from \\['b', 'a'\\]"):
        ReachRobotWrapper(Arm(), ReachConfig(joints=("c",)))


def test_expert_reaches_goals_through_safety_kernel() -> None:
    setup = add_reach_task(
        RobotSetup("arm-0", Arm(), HumanJudgedTask("x", "x", 9)), ReachConfig(max_steps=60), "go there"
    )
    robot, task = setup.robot, setup.task
    assert (task.name, task.instruction, task.max_steps) == ("reach", "go there", 60)
    expert, kernel = task.make_expert(robot, 0, 0.0), SafetyKernel(robot.spec, clock=lambda: 0)
    with robot:
        for seed in range(10):
            task.reset(robot, np.random.default_rng(seed))
            kernel.reset()
            for _ in range(task.max_steps):
                seen = replace(robot.observe(), t_capture_ns=0)
                verdict = kernel.filter(expert(seen.arrays), seen)
                assert verdict.applied is not None, verdict.text
                kernel.set_applied(robot.command(verdict.applied))
                outcome = task.evaluate(robot.observe())
                if outcome.terminated:
                    break
            assert (outcome.reward, outcome.success) == (1.0, True)


def test_unreachable_goals_are_explained() -> None:
    with pytest.raises(SpecError, match="the action of fake has no joint targets"):
        ReachRobotWrapper(FakeRobot(), ReachConfig())
    with pytest.raises(SpecError, match=r"out of reach: the range of arm is \[-1.0, -2.0\] to \[1.0, 2.0\]"):
        ReachRobotWrapper(Arm(), ReachConfig(low=(-0.5, -1.0), high=(0.5, 2.5)))
    with pytest.raises(SpecError, match="2 bounds each"):
        ReachRobotWrapper(Arm(), ReachConfig(low=(0.0,)))
    slow = Arm()
    slow.spec = msgspec.structs.replace(
        slow.spec, limits=msgspec.structs.replace(slow.spec.limits, joint_velocity_max=())
    )
    with pytest.raises(SpecError, match="step_max"):
        ReachRobotWrapper(slow, ReachConfig())
