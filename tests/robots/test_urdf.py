from __future__ import annotations

import math

import numpy as np
import pytest

from hal.errors import SpecError
from robots.ros2_spec import Urdf

ARM = """<robot name="two">
  <link name="world"/>
  <joint name="mount" type="fixed"><parent link="world"/><child link="base"/>
    <origin xyz="0 0 1" rpy="0 0 1.5707963267948966"/></joint>
  <joint name="turn" type="revolute"><parent link="base"/><child link="arm"/><axis xyz="0 0 2"/>
    <limit lower="-1" upper="2" velocity="3" effort="1"/></joint>
  <joint name="slide" type="prismatic"><parent link="arm"/><child link="tool"/>
    <origin xyz="0.5 0 0"/><axis xyz="1 0 0"/>
    <limit lower="0" upper="0.2" velocity="0.1" effort="1"/></joint>
  <joint name="spin" type="continuous"><parent link="tool"/><child link="tip"/></joint>
</robot>"""


def test_limits_match_description() -> None:
    urdf = Urdf(ARM)
    turn, spin = urdf.joint("turn"), urdf.joint("spin")
    assert (turn.low, turn.high, turn.speed_max) == (-1, 2, 3)
    assert (spin.low, spin.high) == (-2 * math.pi, 2 * math.pi) and math.isnan(spin.speed_max)


def test_chain_pose_matches_joint_values() -> None:
    chain = Urdf(ARM).chain("tool")
    assert chain.movable_joints == ("turn", "slide")
    pose = chain.pose({"turn": math.pi / 2, "slide": 0.1})
    np.testing.assert_allclose(pose[:3, 3], [-0.6, 0, 1], atol=1e-12)
    np.testing.assert_allclose(pose[:3, :3] @ pose[:3, :3].T, np.eye(3), atol=1e-12)
    near = Urdf(ARM).chain("tool", "base").pose({"turn": 0.0, "slide": 0.0})
    np.testing.assert_allclose(near[:3, 3], [0.5, 0, 0], atol=1e-12)


def test_rpy_rotates_about_fixed_axes() -> None:
    text = ARM.replace('rpy="0 0 1.5707963267948966"', 'rpy="0.1 0.2 0.3"')
    turned = Urdf(text).chain("base").pose({})[:3, :3]
    roll, pitch, yaw = math.atan2(turned[2, 1], turned[2, 2]), -math.asin(turned[2, 0]), math.atan2(*turned[1::-1, 0])
    np.testing.assert_allclose([roll, pitch, yaw], [0.1, 0.2, 0.3], atol=1e-12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not a URDF"),
        ("<robot/>", "0 joints"),
        ("<!DOCTYPE robot [<!ENTITY a 'aaaa'>]><robot>&a;</robot>", "DOCTYPE"),
        (ARM.replace('xyz="0 0 1"', 'xyz="0 0"'), "not three numbers"),
        (ARM.replace('upper="2"', 'upper="two"'), "not a URDF"),
        (ARM.replace('<parent link="base"/>', ""), "without link"),
    ],
)
def test_invalid_description_is_explained(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Urdf(text)


def test_unknown_names_are_refused_with_alternatives() -> None:
    urdf = Urdf(ARM)
    with pytest.raises(SpecError, match=r"no movable joint 'mount'; choose one of \['turn', 'slide', 'spin'\]"):
        urdf.joint("mount")
    with pytest.raises(SpecError, match="is not connected to 'arm'"):
        urdf.chain("base", "arm")
