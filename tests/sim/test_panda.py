"""The Panda model matches the published table and an independent model."""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np
import pytest

from sim.arms import panda
from sim.world import compile_scene

gym_hil = pytest.importorskip("gym_hil", reason="the independent model comes with gym-hil (extra: dev)")
LINKS = [f"link{i}" for i in range(8)]


@pytest.fixture(scope="module")
def ours() -> mujoco.MjModel:
    return compile_scene(panda.ARM, "lift")


@pytest.fixture(scope="module")
def theirs() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_path(str(Path(gym_hil.__file__).parent / "assets" / "panda.xml"))


def test_links_match_independent_model(ours, theirs) -> None:
    a, b = mujoco.MjData(ours), mujoco.MjData(theirs)
    rng = np.random.default_rng(0)
    for _ in range(1000):
        joints = rng.uniform(panda.JOINT_LOW_RAD, panda.JOINT_HIGH_RAD)
        a.qpos[:7] = b.qpos[:7] = joints
        mujoco.mj_kinematics(ours, a)
        mujoco.mj_kinematics(theirs, b)
        flange_theirs = b.body("link7").xpos + b.body("link7").xmat.reshape(3, 3) @ (0.0, 0.0, 0.107)
        assert np.linalg.norm(a.site("flange").xpos - flange_theirs) < 1e-3
        for link in LINKS:
            assert np.linalg.norm(a.body(link).xpos - b.body(link).xpos) < 1e-3
            np.testing.assert_allclose(a.body(link).xmat, b.body(link).xmat, atol=1e-6)


def test_joint_limits_match(ours, theirs) -> None:
    for i, name in enumerate(panda.JOINTS):
        published = (panda.JOINT_LOW_RAD[i], panda.JOINT_HIGH_RAD[i])
        np.testing.assert_allclose(ours.joint(name).range, published)
        np.testing.assert_allclose(theirs.joint(name).range, published)


def test_masses_and_inertias_match(ours, theirs) -> None:
    for link in LINKS:
        assert ours.body(link).mass == pytest.approx(theirs.body(link).mass)
        np.testing.assert_allclose(ours.body(link).ipos, theirs.body(link).ipos, atol=1e-6)
        np.testing.assert_allclose(ours.body(link).inertia, theirs.body(link).inertia, rtol=1e-2)


def test_actuators_respect_published_limits(ours) -> None:
    for i, name in enumerate(panda.JOINTS):
        actuator = ours.actuator(name)
        np.testing.assert_allclose(actuator.ctrlrange, np.array([-1, 1]) * panda.JOINT_SPEED_MAX_RAD_S[i])
        np.testing.assert_allclose(actuator.forcerange, np.array([-1, 1]) * panda.JOINT_TORQUE_MAX_NM[i])
    gripper = ours.actuator("gripper")
    np.testing.assert_allclose(gripper.ctrlrange, np.array([-1, 1]) * panda.GRIPPER_SPEED_MAX_M_S)
    np.testing.assert_allclose(gripper.actrange, (0.0, panda.GRIPPER_WIDTH_MAX_M))


def test_home_is_the_ready_pose(ours) -> None:
    data = mujoco.MjData(ours)
    data.qpos[:7] = panda.HOME_RAD
    mujoco.mj_kinematics(ours, data)
    tool = data.site("tool")
    np.testing.assert_allclose(tool.xpos, (0.307, 0.0, 0.487), atol=1e-3)  # the maker's example pose, without the hand
    assert tool.xmat.reshape(3, 3)[2, 2] == pytest.approx(-1.0, abs=1e-4)
