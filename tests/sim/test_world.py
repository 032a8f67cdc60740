"""The physics of every arm: motion, grip, hold, and reproducibility."""

from __future__ import annotations

import numpy as np
import pytest

from hal.errors import HardwareLost, SpecError
from sim.arms import ARMS, PANDA, ArmModel
from sim.objects import TASK_OBJECTS
from sim.scene import Scene
from sim.world import DOWN, MujocoWorld

STILL = np.zeros(3)


def make_world(arm: ArmModel = PANDA, task: str = "lift", period_s: float = 0.1) -> MujocoWorld:
    return MujocoWorld(arm, Scene(arm, TASK_OBJECTS[task]), period_s)


@pytest.fixture(scope="module", params=ARMS)
def world(request: pytest.FixtureRequest) -> MujocoWorld:
    return make_world(ARMS[request.param])


def box(world: MujocoWorld) -> tuple[np.ndarray, np.ndarray]:
    return np.array(world.arm.workspace.low), np.array(world.arm.workspace.high)


def grip(world: MujocoWorld, yaw: float = 0.0) -> None:
    """Grip the cube and lift it by 4 cm."""
    x, y = np.mean(world.arm.cube_start_area, axis=0)
    half = world.arm.cube_edge_m / 2
    world.reset(np.array([x, y, max(half, world.arm.workspace.low[2])]), {"cube": (x, y, half, yaw)})
    for _ in range(10):
        world.move_tool(STILL, 0.0, *box(world))
    for _ in range(4):
        world.move_tool(np.array([0.0, 0.0, 0.01]), 0.0, *box(world))


def tilt_rad(world: MujocoWorld) -> float:
    rotation = world.data.site("tool").xmat.reshape(3, 3)
    return float(np.arccos(np.clip((np.trace(rotation.T @ DOWN) - 1) / 2, -1, 1)))


def test_reset_reaches_the_whole_workspace(world: MujocoWorld) -> None:
    """An arm with five joints may lean, and miss by 2 mm, in the far corners."""
    low, high = box(world)
    full = len(world.arm.joints) > 5
    for goal in np.random.default_rng(0).uniform(low, high, (50, 3)):
        world.reset(goal, {})
        assert np.linalg.norm(world.read_sensors().tool_position - goal) < (1e-3 if full else 2.5e-3)
        assert tilt_rad(world) < 0.01 or not full


def test_any_actions_keep_speed_and_workspace(world: MujocoWorld) -> None:
    low, high = box(world)
    rng, step = np.random.default_rng(0), world.arm.step_max_m
    world.reset(0.5 * (low + high), {})
    action = np.zeros(3)
    for _ in range(600):
        if rng.random() < 0.4:  # for the others, the arm accelerates first
            action = rng.choice([-step, 0.0, step], 3)
        applied, _ = world.move_tool(action, rng.uniform(0, 0.08), low, high)
        now = world.read_sensors()
        assert (np.abs(applied) <= step + 1e-9).all()
        assert (np.abs(now.joint_velocity) < world.arm.joint_speed_max_rad_s).all()
        assert (now.tool_position > low - 0.015).all() and (now.tool_position < high + 0.015).all()


def test_step_moves_tool_by_its_length() -> None:
    world = make_world()
    world.reset(np.array([0.45, 0.0, 0.2]), {})
    applied, _ = world.move_tool(np.array([0.02, 0.03, -0.04]), 0.08, *box(world))
    for _ in range(3):
        world.move_tool(STILL, 0.08, *box(world))
    np.testing.assert_allclose(applied, (0.02, 0.03, -0.04))
    np.testing.assert_allclose(world.read_sensors().tool_position, (0.47, 0.03, 0.16), atol=1.5e-3)
    for _ in range(4):
        world.move_tool(STILL, 0.0, *box(world))
    assert world.read_sensors().gripper_width == pytest.approx(0.04, abs=5e-3), "at its published speed"


def test_same_actions_give_same_numbers() -> None:
    def run(w: MujocoWorld) -> np.ndarray:
        rng = np.random.default_rng(7)
        w.reset(np.array([0.5, 0.0, 0.05]), {"cube": (0.5, 0.01, 0.02, 0.2)})
        for _ in range(40):
            w.move_tool(rng.uniform(-0.04, 0.04, 3), rng.uniform(0, 0.08), *box(w))
        return w.data.qpos.copy()

    world = make_world()
    first = run(world)
    assert (first == run(world)).all()
    assert (first == run(make_world())).all()


@pytest.mark.parametrize("yaw", [0.0, 0.25, -0.25])
def test_gripped_cube_survives_shaking(world: MujocoWorld, yaw: float) -> None:
    grip(world, yaw)
    low, high = box(world)
    edge, step, rng = world.arm.cube_edge_m, 0.5 * world.arm.step_max_m, np.random.default_rng(0)
    for _ in range(40):
        world.move_tool(rng.choice([-step, step], 3), 0.0, low + (0, 0, 0.03), high)
    now = world.read_sensors()
    assert np.linalg.norm(now.object_position["cube"] - now.tool_position) < 0.025
    assert 0.9 * edge < now.gripper_width < 1.15 * edge, "the fingers squeezed through the cube"


def test_hold_keeps_the_grip(world: MujocoWorld) -> None:
    grip(world)
    held = world.read_sensors().object_position["cube"][2]
    for _ in range(30):
        world.move_tool(STILL, None, *box(world))
    for _ in range(30):
        world.hold_pose()
    assert held > 0.045
    assert world.read_sensors().object_position["cube"][2] == pytest.approx(held, abs=5e-3)


def test_single_stray_opening_keeps_the_cube(world: MujocoWorld) -> None:
    grip(world)
    for width in (0.0, 0.08, 0.0, 0.0):
        world.move_tool(STILL, width, *box(world))
    assert world.read_sensors().object_position["cube"][2] > 0.045
    for _ in range(8):
        world.move_tool(STILL, 0.08, *box(world))
    assert world.read_sensors().object_position["cube"][2] == pytest.approx(world.arm.cube_edge_m / 2, abs=2e-3)


def test_pushing_on_cube_does_not_wind_up() -> None:
    world = make_world()
    world.reset(np.array([0.5, 0.03, 0.08]), {"cube": (0.5, 0.03, 0.02, 0.0)})
    for _ in range(10):
        world.move_tool(STILL, 0.0, *box(world))
    for _ in range(20):
        world.move_tool(np.array([0.0, 0.0, -0.04]), 0.0, *box(world))
        assert np.abs(world.data.qvel).max() < 10
    for _ in range(2):
        world.move_tool(np.array([0.0, 0.0, 0.04]), 0.0, *box(world))
    assert world.read_sensors().tool_position[2] > 0.05


def test_diverged_simulation_raises_until_reset(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warning to a file in the current folder
    world = make_world()
    world.data.qvel[0] = np.nan
    with pytest.raises(HardwareLost, match="diverged"):
        world.move_tool(STILL, 0.0, *box(world))
    world.reset(np.array([0.45, 0.0, 0.2]), {})
    world.move_tool(STILL, 0.0, *box(world))


def test_uneven_period_is_refused() -> None:
    with pytest.raises(SpecError, match="whole number"):
        make_world(period_s=1 / 30)
