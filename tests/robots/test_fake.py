from __future__ import annotations

import numpy as np
import pytest

from hal.camera import Camera
from hal.conformance import CameraConformance, RobotConformance, TeleoperatorConformance
from hal.errors import HardwareLost, SpecError, StaleObservation
from hal.robot import Robot, StopLevel
from hal.safety import SafetyKernel, SafetyReason
from hal.spec import STATE
from hal.teleoperator import Teleoperator, TeleopInput
from robots.fake import FakeCamera, FakeRobot, FakeRobotConfig, FakeTask, FakeTeleoperator, FaultPlan, fake_expert

STILL = np.array([0, 0, 0, 0.08], np.float32)
CAMERA = FakeRobotConfig(cameras=("front",))


class TestFakeRobot(RobotConformance):
    def make_robot(self) -> Robot:
        return FakeRobot(CAMERA)


class TestFakeCamera(CameraConformance):
    def make_camera(self) -> Camera:
        robot = FakeRobot(CAMERA)
        return FakeCamera(robot, robot.spec.cameras[0])


class TestFakeTeleoperator(TeleoperatorConformance):
    def make_teleoperator(self) -> Teleoperator:
        return FakeTeleoperator([TeleopInput(np.full(4, 0.5, np.float32), True), TeleopInput(STILL, False)])


def faulty(**faults: float) -> FakeRobot:
    return FakeRobot(FakeRobotConfig(faults=FaultPlan(**faults)))  # type: ignore[arg-type]


def test_command_moves_and_returns_applied_action() -> None:
    with FakeRobot() as robot:
        applied = robot.command(np.array([0.1, -0.05, 9.0, 0.02], np.float32))
        np.testing.assert_allclose(applied, [0.1, -0.05, 0.1, 0.02], rtol=1e-6)
        state = robot.observe().arrays[STATE]
        np.testing.assert_allclose(state, [0.1, -0.05, 0.1, 0.02, 1.0, -0.5, 1.0], rtol=1e-6)
        robot.stop(StopLevel.HOLD)
        np.testing.assert_array_equal(robot.observe().arrays[STATE][4:], 0)


def test_planned_dropout_lasts_until_reconnect() -> None:
    with faulty(drop_out_at=3) as robot:
        for _ in range(3):
            robot.observe()
            robot.command(STILL)
        for call in (robot.observe, lambda: robot.command(STILL), lambda: robot.stop(StopLevel.SAFE)):
            with pytest.raises(HardwareLost, match="dropped out"):
                call()
        robot.close()
        robot.connect()
        robot.command(STILL)


def test_frozen_readings_become_stale() -> None:
    now_s = [0.0]
    robot = FakeRobot(FakeRobotConfig(faults=FaultPlan(stale_at=1)), clock=lambda: round(now_s[0] * 1e9))
    with robot:
        robot.command(STILL)
        captured = robot.observe().t_capture_ns
        now_s[0] += 0.4
        assert robot.observe().t_capture_ns == captured
        now_s[0] += 0.2
        with pytest.raises(StaleObservation, match=r"0\.600 s old"):
            robot.observe()


def test_safety_kernel_refuses_nan_reading() -> None:
    with faulty(nan_at=2) as robot:
        kernel = SafetyKernel(robot.spec)
        robot.command(STILL)
        assert kernel.filter(STILL, robot.observe()).applied is not None
        robot.command(STILL)
        assert kernel.filter(STILL, robot.observe()).reasons is SafetyReason.NOT_FINITE


def test_expert_succeeds_and_seed_is_reproducible() -> None:
    task = FakeTask()
    for seed in range(20):
        with FakeRobot() as robot, FakeRobot() as twin:
            task.reset(robot, np.random.default_rng(seed))
            task.reset(twin, np.random.default_rng(seed))
            np.testing.assert_array_equal(robot.goal, twin.goal)
            for _ in range(task.max_steps):
                robot.command(fake_expert(robot.observe().arrays))
                outcome = task.evaluate(robot.observe())
                if outcome.terminated:
                    break
            assert (outcome.reward, outcome.success) == (1.0, True)


def test_camera_shows_point_and_goal() -> None:
    robot = FakeRobot(CAMERA)
    camera = FakeCamera(robot, robot.spec.cameras[0])
    robot.set_state(np.array([-9.0, -9.0, 0.0]), np.array([9.0, 9.0, 0.0]))
    camera.connect()
    image = camera.read().image
    assert tuple(image[0, 0]) == (255, 0, 0) and tuple(image[-1, -1]) == (0, 255, 0)


def test_teleoperator_repeats_last_input() -> None:
    device = FakeTeleoperator([TeleopInput(STILL, True), TeleopInput(STILL, False)])
    device.connect()
    assert [device.read().engaged for _ in range(4)] == [True, False, False, False]
    with pytest.raises(SpecError):
        FakeTeleoperator([])
