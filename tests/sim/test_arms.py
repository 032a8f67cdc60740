"""Properties of every simulated arm, for any number of joints and fingers."""

from __future__ import annotations

import numpy as np
import pytest

from hal.conformance import RobotConformance
from hal.driver import RobotSetupRequest
from hal.errors import SpecError
from hal.robot import StopLevel
from hal.safety import SafetyKernel, SafetyReason
from hal.spec import STATE
from sim.driver import make_robot_setup, make_task
from sim.experts import make_expert
from sim.rendering import make_cameras
from sim.robot import ARMS, GRIPPER_WIDTH, TOOL_POSITION, SimRobot, SimRobotConfig
from sim.world import MujocoWorld

NEW = ("so101", "ur5e")


class TestUr5e(RobotConformance):
    def make_robot(self) -> SimRobot:
        return SimRobot(SimRobotConfig(model="ur5e"))


class TestSo101(RobotConformance):
    def make_robot(self) -> SimRobot:
        return SimRobot(SimRobotConfig(model="so101"))


@pytest.fixture(scope="module", params=ARMS)
def world(request: pytest.FixtureRequest) -> MujocoWorld:
    return MujocoWorld(ARMS[request.param], "lift", 0.1)


def _connected(model: str, task: str = "lift") -> SimRobot:
    robot = SimRobot(SimRobotConfig(model=model, scene=task, cameras=()))
    robot.connect()
    return robot


def _box(world: MujocoWorld) -> tuple[np.ndarray, np.ndarray]:
    return np.array(world.arm.workspace.low), np.array(world.arm.workspace.high)


def _grip(world: MujocoWorld, yaw: float = 0.0) -> None:
    """Grip the cube and lift it by 4 cm."""
    x, y = np.mean(world.arm.cube_start_area, axis=0)
    half = world.arm.cube_edge_m / 2
    world.reset(np.array([x, y, max(half, world.arm.workspace.low[2])]), np.array([x, y, half]), yaw)
    for _ in range(10):
        world.move_tool(np.zeros(3), 0.0, *_box(world))
    for _ in range(4):
        world.move_tool(np.array([0.0, 0.0, 0.01]), 0.0, *_box(world))


def test_each_model_is_an_embodiment() -> None:
    specs = [SimRobot(SimRobotConfig(model=name)).spec for name in ARMS]
    assert [s.model for s in specs] == ["panda-sim", "so101-sim", "ur5e-sim"]
    assert len({s.embodiment for s in specs}) == 3
    with pytest.raises(SpecError, match=r"no simulated arm 'abb'; choose one of \['panda', 'so101', 'ur5e'\]"):
        make_robot_setup(RobotSetupRequest("abb-0", "lift", {"model": "abb"}))
    with pytest.raises(SpecError, match="is for the model 'ur5e'; the robot is 'panda'"):
        make_task("lift", ARMS["ur5e"]).reset(_connected("panda"), np.random.default_rng(0))


@pytest.mark.parametrize("model", NEW)
@pytest.mark.parametrize(("task", "longest"), [("lift", 25), ("reach", 8)])
def test_scripted_expert_succeeds(model: str, task: str, longest: int) -> None:
    robot = _connected(model, task)
    place, expert = make_task(task, ARMS[model]), make_expert(task, robot, noise=0.1)
    observation = robot.observe()
    kernel = SafetyKernel(robot.spec, clock=lambda: observation.t_capture_ns)
    steps, seen = [], SafetyReason(0)
    for seed in range(100):
        place.reset(robot, np.random.default_rng(seed))
        taken = 0
        for _ in range(place.max_steps):
            taken += 1
            observation = robot.observe()
            verdict = kernel.filter(expert(observation), observation)
            seen |= verdict.reasons
            robot.command(verdict.applied)
            outcome = place.evaluate(robot.observe())
            if outcome.terminated:
                break
        steps += [taken] if outcome.success else []
    assert len(steps) >= 95
    assert max(steps) <= longest
    assert not seen & (
        SafetyReason.JOINT_POSITION | SafetyReason.JOINT_VELOCITY | SafetyReason.RATE | SafetyReason.BOUND
    )


@pytest.mark.parametrize("model", NEW)
def test_random_actions_do_not_lift_the_cube(model: str) -> None:
    robot, rng = _connected(model), np.random.default_rng(0)
    task, action = make_task("lift", ARMS[model]), robot.spec.action
    for seed in range(20):
        task.reset(robot, np.random.default_rng(seed))
        for _ in range(task.max_steps):
            robot.command(rng.uniform(action.low, action.high).astype(np.float32))
            outcome = task.evaluate(robot.observe())
            assert not outcome.success
            if outcome.terminated:
                break


def test_reset_reaches_the_whole_workspace(world: MujocoWorld) -> None:
    """An arm with five joints may lean, and miss by 2 mm, in the far corners."""
    low, high = _box(world)
    near = 1e-3 if len(world.arm.joints) > 5 else 2.5e-3
    for goal in np.random.default_rng(0).uniform(low, high, (50, 3)):
        world.reset(goal, np.array([0.85, 0.45, 0.02]))
        assert np.linalg.norm(world.read_sensors().tool_position - goal) < near


def test_any_actions_keep_speed_and_workspace(world: MujocoWorld) -> None:
    low, high = _box(world)
    rng, step = np.random.default_rng(0), world.arm.step_max_m
    world.reset(0.5 * (low + high), np.array([0.85, 0.45, 0.02]))
    action = np.zeros(3)
    for _ in range(600):
        if rng.random() < 0.4:  # for the others, the arm accelerates first
            action = rng.choice([-step, 0.0, step], 3)
        world.move_tool(action, rng.uniform(0, 0.08), low, high)
        now = world.read_sensors()
        assert (np.abs(now.joint_velocity) < world.arm.joint_speed_max_rad_s).all()
        assert (now.tool_position > low - 0.015).all() and (now.tool_position < high + 0.015).all()


@pytest.mark.parametrize("yaw", [0.0, 0.25, -0.25])
def test_gripped_cube_survives_shaking(world: MujocoWorld, yaw: float) -> None:
    _grip(world, yaw)
    low, high = _box(world)
    edge, step, rng = world.arm.cube_edge_m, 0.5 * world.arm.step_max_m, np.random.default_rng(0)
    for _ in range(40):
        world.move_tool(rng.choice([-step, step], 3), 0.0, low + (0, 0, 0.03), high)
    now = world.read_sensors()
    assert np.linalg.norm(now.object_position - now.tool_position) < 0.025
    assert 0.9 * edge < now.gripper_width < 1.15 * edge, "the fingers squeezed through the cube"


def test_hold_keeps_the_grip(world: MujocoWorld) -> None:
    _grip(world)
    held = world.read_sensors().object_position[2]
    for _ in range(30):
        world.move_tool(np.zeros(3), None, *_box(world))
    for _ in range(30):
        world.hold_pose()
    assert held > 0.045
    assert world.read_sensors().object_position[2] == pytest.approx(held, abs=5e-3)


def test_single_stray_opening_keeps_the_cube(world: MujocoWorld) -> None:
    _grip(world)
    for width in (0.0, 0.08, 0.0, 0.0):
        world.move_tool(np.zeros(3), width, *_box(world))
    assert world.read_sensors().object_position[2] > 0.045
    for _ in range(8):
        world.move_tool(np.zeros(3), 0.08, *_box(world))
    assert world.read_sensors().object_position[2] == pytest.approx(world.arm.cube_edge_m / 2, abs=2e-3)


@pytest.mark.parametrize("model", NEW)
@pytest.mark.parametrize("level", list(StopLevel))
def test_stop_keeps_pose_and_gripper(model: str, level: StopLevel) -> None:
    robot = _connected(model)
    make_task("lift", ARMS[model]).reset(robot, np.random.default_rng(0))
    for _ in range(5):
        robot.command(np.array([0.0, 0.0, 0.0, 0.05], np.float32))
    before = robot.observe().arrays[STATE]
    for _ in range(20):
        robot.stop(level)
    after = robot.observe().arrays[STATE]
    np.testing.assert_allclose(after[TOOL_POSITION], before[TOOL_POSITION], atol=4e-3)
    assert after[GRIPPER_WIDTH] == pytest.approx(0.05, abs=3e-3)


@pytest.mark.parametrize("model", NEW)
def test_both_cameras_show_the_cube(model: str) -> None:
    robot = SimRobot(SimRobotConfig(model=model))
    robot.connect()
    make_task("lift", ARMS[model]).reset(robot, np.random.default_rng(3))
    for camera in make_cameras(robot).values():
        camera.connect()
        red, green, blue = (camera.read().image[..., i].astype(int) for i in range(3))
        assert ((red > 120) & (red > 2 * blue) & (red > 1.6 * green)).sum() > 20, camera.spec.name
        camera.close()
