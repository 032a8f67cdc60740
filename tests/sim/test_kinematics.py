"""Inverse kinematics and drawings of arms: simulated ones, and those of files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import mujoco
import numpy as np
import pytest
from joint_arm_kit import joint_spec
from msgspec.structs import replace

from hal.errors import SpecError
from hal.spec import STATE, Array, ArraySpec, RobotSpec
from sim.arms import ARMS
from sim.kinematics import ArmDrawing, ArmKinematics
from sim.robot import SimRobot, SimRobotConfig
from sim.scene import Scene

TWO_LINKS = """<robot name="two">
  <link name="base"/><link name="upper"><visual><geometry><mesh filename="package://not/here.dae"/></geometry></visual>
  </link><link name="lower"/><link name="flange"/>
  <joint name="shoulder" type="revolute"><parent link="base"/><child link="upper"/><axis xyz="0 0 1"/>
    <limit lower="-3" upper="3" effort="1" velocity="1"/></joint>
  <joint name="elbow" type="revolute"><parent link="upper"/><child link="lower"/><origin xyz="0.4 0 0"/>
    <axis xyz="0 0 1"/><limit lower="-3" upper="3" effort="1" velocity="1"/></joint>
  <joint name="mount" type="fixed"><parent link="lower"/><child link="flange"/><origin xyz="0.3 0 0"/></joint>
</robot>"""
URDF = """<robot name="two"><link name="base"/><link name="upper"/><link name="fore"/>
<joint name="a" type="revolute"><parent link="base"/><child link="upper"/><axis xyz="0 0 1"/>
<limit lower="-3" upper="3" effort="1" velocity="1"/></joint>
<joint name="b" type="revolute"><parent link="upper"/><child link="fore"/><origin xyz="1 0 0"/><axis xyz="0 0 1"/>
<limit lower="-3" upper="3" effort="1" velocity="1"/></joint></robot>"""


def two_joints(unit: str) -> RobotSpec:
    state = ArraySpec(
        name=STATE, labels=("shoulder.pos", "elbow.pos"), units=(unit,) * 2, low=(-180.0,) * 2, high=(180.0,) * 2
    )
    spec = joint_spec("joint_target")
    return replace(spec, observation=(state,), limits=replace(spec.limits, joint_position=(0, 1)))


def tool_position(arm: str, joints: Array) -> Array:
    model = Scene(ARMS[arm], ()).model
    data = mujoco.MjData(model)
    data.qpos[: len(joints)] = joints
    mujoco.mj_kinematics(model, data)
    return np.array(data.site("tool").xpos)


@pytest.mark.parametrize("arm", sorted(ARMS))
@pytest.mark.parametrize("velocity", [(0.1, 0.0, 0.0), (0.0, 0.1, 0.0), (0.0, 0.0, 0.1)], ids=["x", "y", "z"])
def test_tool_moves_along_an_axis(arm: str, velocity: tuple[float, ...]) -> None:
    kinematics, joints = ArmKinematics(arm, joint_spec("joint_target", arm)), np.array(ARMS[arm].home_rad)
    start = tool_position(arm, joints)
    for _ in range(20):
        joints = joints + 0.01 * kinematics.joint_velocities(joints, np.array(velocity))
    np.testing.assert_allclose(tool_position(arm, joints) - start, 0.2 * np.array(velocity), atol=0.003)


def test_speeds_are_bounded_at_a_singularity() -> None:
    kinematics = ArmKinematics("ur5e", joint_spec("joint_target"))
    stretched = np.zeros(6)
    speeds = kinematics.joint_velocities(stretched, np.array([0.1, 0.1, 0.1]))
    assert np.isfinite(speeds).all() and np.abs(speeds).max() < 0.1 / 0.02


@pytest.mark.parametrize(("unit", "scale"), [("rad", 1.0), ("deg", 180 / np.pi)])
def test_urdf_without_its_meshes_moves_its_last_link(tmp_path: Path, unit: str, scale: float) -> None:
    file = tmp_path / "two.urdf"
    file.write_text(TWO_LINKS)
    kinematics = ArmKinematics(str(file), two_joints(unit))
    bent = scale * np.array([0.0, np.pi / 2])  # the flange is at x 0.4, y 0.3
    speeds = kinematics.joint_velocities(bent, np.array([0.03, 0.0, 0.0]))
    np.testing.assert_allclose(speeds, scale * np.array([0.0, -0.1]), atol=0.003 * scale)


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        ("nonsense", two_joints("rad"), "name an MJCF or URDF file"),
        (TWO_LINKS, joint_spec("joint_target"), "has 2 joints from the base to the tool, and the robot has 6"),
        (TWO_LINKS, two_joints("tick"), "'tick', not in rad"),
    ],
)
def test_description_that_does_not_fit_is_explained(tmp_path: Path, text: str, spec: RobotSpec, message: str) -> None:
    file = tmp_path / "arm.urdf"
    file.write_text(text)
    with pytest.raises(SpecError, match=message):
        ArmKinematics(str(file), spec)


@pytest.mark.parametrize("model", ["panda", "so101", "ur5e"])
def test_simulated_arm_is_drawn_where_it_is(model: str) -> None:
    robot = SimRobot(SimRobotConfig(model=model))
    robot.connect()
    state = robot.observe().arrays[STATE].astype(float)
    tool = state[list(robot.spec.limits.tool_position)]
    drawing = ArmDrawing(model, robot.spec)
    actions = np.array([[0.01, 0.0, 0.02, 0.05]] * 3)
    path = drawing.path(state, actions)
    assert np.allclose(path, tool + np.outer(range(4), (0.01, 0.0, 0.02)), atol=1e-4)
    positions, rotations = drawing.move(state)
    bodies = [robot.world.model.body(name).id for name in ("link0", "link1") if model == "panda"]
    assert np.allclose(positions[bodies], robot.world.data.xpos[bodies], atol=1e-5)
    assert np.allclose(np.linalg.norm(rotations, axis=1), 1) and len(list(drawing.shapes())) > 10


def joint_robot(labels: tuple[str, ...], unit: str) -> RobotSpec:
    spec = SimRobot().spec
    n = len(labels)
    vector = msgspec.structs.replace(
        spec.action, labels=labels, units=(unit,) * n, low=(-180.0,) * n, high=(180.0,) * n
    )
    return msgspec.structs.replace(
        spec,
        observation=(msgspec.structs.replace(vector, name=STATE),),
        action=vector,
        limits=msgspec.structs.replace(spec.limits, joint_position=tuple(range(n))),
        tool_delta=(),
        joint_target=tuple(range(n)),
    )


def test_urdf_joints_are_found_by_name_and_targets_become_a_path(tmp_path: Path) -> None:
    file = tmp_path / "two.urdf"
    file.write_text(URDF)
    drawing = ArmDrawing(str(file), joint_robot(("b.pos", "a.pos"), "deg"))
    path = drawing.path(np.array([0.0, 90.0]), np.array([[0.0, 0.0], [0.0, 180.0]]))
    assert np.allclose(path, [[0, 1, 0], [1, 0, 0], [-1, 0, 0]], atol=1e-6)


def test_description_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "two.urdf"
    file.write_text(URDF)
    with pytest.raises(SpecError, match="has 2 joints from the base to the tool, and the robot has 3"):
        ArmDrawing(str(file), joint_robot(("x", "y", "z"), "rad"))
    with pytest.raises(SpecError, match="joint positions in '%'"):
        ArmDrawing(str(file), joint_robot(("a", "b"), "%"))
    with pytest.raises(SpecError, match="absent.xml: "):
        ArmDrawing(str(tmp_path / "absent.xml"), joint_robot(("a", "b"), "rad"))
