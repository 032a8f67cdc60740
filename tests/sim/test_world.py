"""The physics from a robot's view: motion, grip, hold, and reproducibility."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.errors import HardwareLost, SpecError
from sim.arms import panda
from sim.robot import PHYSICS_STEP_S
from sim.world import DOWN, MujocoWorld

LOW, HIGH = np.array([0.34, -0.20, 0.015]), np.array([0.64, 0.20, 0.30])
STILL, UP = np.zeros(3), np.array([0.0, 0.0, 0.04])
CUBE = np.array([0.5, 0.03, 0.02])


@pytest.fixture(scope="module")
def world() -> MujocoWorld:
    return MujocoWorld(panda.ARM, "lift", 0.1)


def _grip(world: MujocoWorld, yaw: float = 0.0) -> None:
    world.reset(np.array([0.5, 0.03, 0.02]), CUBE, yaw)
    for _ in range(8):
        world.move_tool(STILL, 0.0, LOW, HIGH)


def _tilt_rad(world: MujocoWorld) -> float:
    rotation = world.data.site("tool").xmat.reshape(3, 3)
    return float(np.arccos(np.clip((np.trace(rotation.T @ DOWN) - 1) / 2, -1, 1)))


@settings(max_examples=50, deadline=None)
@given(share=st.tuples(*[st.floats(0, 1)] * 3))
def test_reset_reaches_the_whole_workspace(world: MujocoWorld, share: tuple[float, float, float]) -> None:
    goal = LOW + np.array(share) * (HIGH - LOW)
    world.reset(goal, np.array([0.85, 0.45, 0.02]))
    assert np.linalg.norm(world.read_sensors().tool_position - goal) < 1e-3
    assert _tilt_rad(world) < 0.01


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_any_actions_keep_speed_tilt_and_workspace(world: MujocoWorld, seed: int) -> None:
    rng = np.random.default_rng(seed)
    world.reset(np.array([0.48, 0.0, 0.2]), np.array([0.85, 0.45, 0.02]))
    for _ in range(30):
        step = rng.choice([-0.04, 0.0, 0.04], 3)
        applied, _ = world.move_tool(step, rng.uniform(0, 0.08), LOW, HIGH)
        now = world.read_sensors()
        assert (np.abs(applied) <= 0.04 + 1e-9).all()
        assert (np.abs(now.joint_velocity) < panda.JOINT_SPEED_MAX_RAD_S).all()
        assert (now.tool_position > LOW - 0.01).all() and (now.tool_position < HIGH + 0.01).all()
        assert _tilt_rad(world) < 0.03


def test_step_moves_tool_by_its_length(world: MujocoWorld) -> None:
    world.reset(np.array([0.45, 0.0, 0.2]), np.array([0.85, 0.45, 0.02]))
    applied, _ = world.move_tool(np.array([0.02, 0.03, -0.04]), 0.08, LOW, HIGH)
    for _ in range(3):
        world.move_tool(STILL, 0.08, LOW, HIGH)
    np.testing.assert_allclose(applied, (0.02, 0.03, -0.04))
    np.testing.assert_allclose(world.read_sensors().tool_position, (0.47, 0.03, 0.16), atol=1.5e-3)


def test_same_actions_give_same_numbers(world: MujocoWorld) -> None:
    def run(w: MujocoWorld) -> np.ndarray:
        rng = np.random.default_rng(7)
        w.reset(np.array([0.5, 0.0, 0.05]), np.array([0.5, 0.01, 0.02]), 0.2)
        for _ in range(40):
            w.move_tool(rng.uniform(-0.04, 0.04, 3), rng.uniform(0, 0.08), LOW, HIGH)
        return w.data.qpos.copy()

    first = run(world)
    assert (first == run(world)).all()
    assert (first == run(MujocoWorld(panda.ARM, "lift", 0.1))).all()


@pytest.mark.parametrize("yaw", [0.0, 0.25, -0.25])
def test_gripped_cube_survives_shaking(world: MujocoWorld, yaw: float) -> None:
    _grip(world, yaw)
    for _ in range(4):
        world.move_tool(UP, 0.0, LOW, HIGH)
    before = world.read_sensors()
    rng = np.random.default_rng(0)
    for _ in range(40):
        world.move_tool(rng.choice([-0.04, 0.04], 3), 0.0, LOW + (0, 0, 0.1), HIGH)
    now = world.read_sensors()
    slip = (now.object_position - now.tool_position) - (before.object_position - before.tool_position)
    assert np.linalg.norm(slip) < 0.01
    assert 0.037 < now.gripper_width < 0.046, "the fingers squeezed through the cube"


def test_hold_keeps_the_grip(world: MujocoWorld) -> None:
    _grip(world)
    for _ in range(4):
        world.move_tool(UP, 0.0, LOW, HIGH)
    for _ in range(50):
        world.move_tool(STILL, None, LOW, HIGH)
    for _ in range(50):
        world.hold_pose()
    assert world.read_sensors().object_position[2] > 0.12


def test_single_stray_opening_keeps_the_cube(world: MujocoWorld) -> None:
    _grip(world)
    for width in (0.0, 0.0, 0.08, 0.0, 0.0):
        world.move_tool(UP, width, LOW, HIGH)
    assert world.read_sensors().object_position[2] > 0.12
    for _ in range(8):
        world.move_tool(STILL, 0.08, LOW, HIGH)
    assert world.read_sensors().object_position[2] == pytest.approx(0.02, abs=2e-3)


def test_empty_gripper_moves_at_published_speed(world: MujocoWorld) -> None:
    world.reset(np.array([0.45, 0.0, 0.2]), np.array([0.85, 0.45, 0.02]))
    for _ in range(4):
        world.move_tool(STILL, 0.0, LOW, HIGH)
    assert world.read_sensors().gripper_width == pytest.approx(0.04, abs=5e-3)
    for _ in range(6):
        world.move_tool(STILL, 0.0, LOW, HIGH)
    assert world.read_sensors().gripper_width < 1e-3


def test_pushing_on_cube_does_not_wind_up(world: MujocoWorld) -> None:
    world.reset(np.array([0.5, 0.03, 0.08]), CUBE)
    for _ in range(10):
        world.move_tool(STILL, 0.0, LOW, HIGH)
    for _ in range(20):
        world.move_tool(-UP, 0.0, LOW, HIGH)
        assert np.abs(world.data.qvel).max() < 10
    for _ in range(2):
        world.move_tool(UP, 0.0, LOW, HIGH)
    assert world.read_sensors().tool_position[2] > 0.05


def test_diverged_simulation_raises_until_reset(world: MujocoWorld, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warning to a file in the current folder
    world.reset(np.array([0.45, 0.0, 0.2]), CUBE)
    world.data.qvel[0] = np.nan
    with pytest.raises(HardwareLost, match="diverged"):
        world.move_tool(STILL, 0.0, LOW, HIGH)
    world.reset(np.array([0.45, 0.0, 0.2]), CUBE)
    world.move_tool(STILL, 0.0, LOW, HIGH)


def test_unknown_scene_and_uneven_period_are_refused() -> None:
    with pytest.raises(SpecError, match="no scene 'kitchen'"):
        MujocoWorld(panda.ARM, "kitchen", 0.1)
    assert MujocoWorld(panda.ARM, "reach", 0.1).model.opt.timestep == PHYSICS_STEP_S
    with pytest.raises(SpecError, match="whole number"):
        MujocoWorld(panda.ARM, "lift", 1 / 30)
