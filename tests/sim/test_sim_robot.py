"""The simulated Panda as a driver: conformance, tasks and cameras."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from hal.conformance import RobotConformance
from hal.errors import HardwareLost, SpecError
from hal.robot import StopLevel
from hal.safety import SafetyKernel, SafetyReason
from hal.spec import ENVIRONMENT_STATE, STATE
from sim.driver import make_task
from sim.experts import make_expert
from sim.robot import GRIPPER_WIDTH, TOOL_POSITION, SimRobot, SimRobotConfig


class TestSimRobot(RobotConformance):
    def make_robot(self) -> SimRobot:
        return SimRobot()


class TestSimRobotInReach(RobotConformance):
    def make_robot(self) -> SimRobot:
        return SimRobot(SimRobotConfig(scene="reach"))


def _connected(task: str = "lift") -> SimRobot:
    robot = SimRobot(SimRobotConfig(scene=task, cameras=()))
    robot.connect()
    return robot


def _episode(robot: SimRobot, task_name: str, seed: int, act) -> tuple[bool, int]:
    task = make_task(task_name)
    task.reset(robot, np.random.default_rng(seed))
    for step in range(task.max_steps):
        robot.command(act(robot.observe()))
        outcome = task.evaluate(robot.observe())
        if outcome.terminated:
            assert outcome.reward == float(outcome.success is True)
            return outcome.success is True, step + 1
        assert outcome.reward == 0.0 and outcome.success is None
    return False, task.max_steps


def test_specs_need_no_mujoco() -> None:
    code = "import sys; from sim.robot import SimRobot; SimRobot(); assert 'mujoco' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("camera_hz", [0.0, -30.0, float("nan")])
def test_invalid_camera_rate_is_refused(camera_hz: float) -> None:
    with pytest.raises(ValueError, match="camera_hz is .*; it must be above 0"):
        SimRobotConfig(camera_hz=camera_hz)


def test_scene_sets_embodiment_and_unknown_names_are_refused() -> None:
    assert SimRobot().spec.embodiment != SimRobot(SimRobotConfig(scene="reach")).spec.embodiment
    with pytest.raises(SpecError, match="kitchen"):
        SimRobot(SimRobotConfig(scene="kitchen"))
    with pytest.raises(SpecError, match="ceiling"):
        SimRobot(SimRobotConfig(cameras=("front", "ceiling")))
    with pytest.raises(SpecError, match="needs the scene 'reach'"):
        make_task("reach").reset(_connected("lift"), np.random.default_rng(0))
    with pytest.raises(SpecError, match="juggle"):
        make_task("juggle")
    with pytest.raises(SpecError, match="juggle"):
        make_expert("juggle", SimRobot())


def test_unconnected_robot_raises() -> None:
    with pytest.raises(HardwareLost, match="not connected"):
        SimRobot().observe()


def test_command_returns_step_clipped_to_workspace() -> None:
    robot = _connected()
    make_task("lift").reset(robot, np.random.default_rng(0))
    down = np.array([0.0, 0.0, -0.04, 0.08], np.float32)
    applied = [robot.command(down)[2] for _ in range(10)]
    assert applied[0] == pytest.approx(-0.04)
    assert applied[-1] == pytest.approx(0.0, abs=1e-6)
    assert robot.observe().arrays[STATE][TOOL_POSITION][2] == pytest.approx(0.015, abs=2e-3)


@pytest.mark.parametrize("level", list(StopLevel))
def test_stop_keeps_pose_and_gripper(level: StopLevel) -> None:
    robot = _connected()
    make_task("lift").reset(robot, np.random.default_rng(0))
    for _ in range(3):
        robot.command(np.array([0.0, 0.0, 0.0, 0.05], np.float32))
    before = robot.observe().arrays[STATE]
    for _ in range(20):
        robot.stop(level)
    after = robot.observe().arrays[STATE]
    np.testing.assert_allclose(after[TOOL_POSITION], before[TOOL_POSITION], atol=2e-3)
    assert after[GRIPPER_WIDTH] == pytest.approx(0.05, abs=3e-3)


@pytest.mark.parametrize(("task", "noise", "longest"), [("lift", 0.0, 20), ("lift", 0.15, 50), ("reach", 0.0, 8)])
def test_scripted_expert_succeeds(task: str, noise: float, longest: int) -> None:
    robot = _connected(task)
    expert = make_expert(task, robot, noise=noise)
    results = [_episode(robot, task, seed, expert) for seed in range(60)]
    assert sum(done for done, _ in results) >= 59
    assert max(steps for done, steps in results if done) <= longest


def test_random_actions_do_not_lift_the_cube() -> None:
    robot, rng = _connected(), np.random.default_rng(0)
    low, high = robot.spec.action.low, robot.spec.action.high
    results = [_episode(robot, "lift", s, lambda _: rng.uniform(low, high).astype(np.float32)) for s in range(60)]
    assert not any(done for done, _ in results)


def test_thrown_or_unreachable_cube_is_no_success() -> None:
    robot, task = _connected(), make_task("lift")
    task.reset(robot, np.random.default_rng(0))
    robot.world.reset(np.array([0.5, 0.0, 0.15]), np.array([0.5, 0.15, 0.3]))
    assert task.evaluate(robot.observe()).reward == 0.0
    robot.world.reset(np.array([0.5, 0.0, 0.15]), np.array([0.75, 0.0, 0.02]))
    lost = task.evaluate(robot.observe())
    assert lost.terminated and lost.success is False and lost.reward == 0.0


def test_starts_follow_seed_and_cover_the_table() -> None:
    robot, task = _connected(), make_task("lift")

    def starts(seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        rows = []
        for _ in range(40):
            task.reset(robot, rng)
            arrays = robot.observe().arrays
            rows.append(np.concatenate((arrays[ENVIRONMENT_STATE], arrays[STATE])))
        return np.array(rows)

    first = starts(1)
    assert (first == starts(1)).all() and not (first == starts(2)).all()
    assert (np.ptp(first[:, :2], axis=0) > 0.15).all(), "the cube is hardly moved between episodes"


def test_safety_kernel_accepts_expert_and_random_policy() -> None:
    robot, rng = _connected(), np.random.default_rng(0)
    kernel = SafetyKernel(robot.spec)
    expert = make_expert("lift", robot)
    low, high = robot.spec.action.low, robot.spec.action.high
    seen = SafetyReason(0)

    def guarded(propose):
        def act(observation):
            nonlocal seen
            verdict = kernel.filter(propose(observation), observation)
            assert verdict.stop is None, verdict.text
            seen |= verdict.reasons
            return verdict.applied

        return act

    assert all(_episode(robot, "lift", seed, guarded(expert))[0] for seed in range(30))
    wild = guarded(lambda _: rng.choice([low, high]).astype(np.float32))
    for seed in range(10):
        _episode(robot, "lift", seed, wild)
    assert not seen & (
        SafetyReason.JOINT_POSITION | SafetyReason.JOINT_VELOCITY | SafetyReason.RATE | SafetyReason.BOUND
    )
