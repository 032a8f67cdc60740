"""The spec of an arm behind ros2_control from its config. This test does not need ROS."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hal.driver import RobotSetupRequest
from hal.errors import SpecError
from hal.safety import SafetyKernel
from robots.ros2 import make_robot_setup

URDF = """<robot name="two">
  <joint name="a" type="revolute"><parent link="base"/><child link="arm"/><axis xyz="0 0 1"/>
    <limit lower="-1" upper="2" velocity="2" effort="1"/></joint>
  <joint name="b" type="revolute"><parent link="arm"/><child link="hand"/><origin xyz="0.5 0 0"/>
    <limit lower="-3" upper="3" velocity="4" effort="1"/></joint>
</robot>"""
STATED = {"*": {"low": -1.5, "high": 1.5, "speed_max": 0.5}}


def setup(task: str = "free", **options: object) -> object:
    return make_robot_setup(RobotSetupRequest("arm-0", task, {"joints": ["a", "b"], **options}))


def spec_of(**options: object):  # type: ignore[no-untyped-def]
    return setup(**options).robot.spec  # type: ignore[attr-defined]


def described(folder: Path) -> str:
    path = folder / "two.urdf"
    path.write_text(URDF)
    return str(path)


def test_config_limits_override_description(tmp_path: Path) -> None:
    limits = spec_of(description=described(tmp_path), limits={"b": {"high": 1.0}}).limits
    assert limits.joint_low == (-1.0, -3.0) and limits.joint_high == (2.0, 1.0)
    assert limits.joint_velocity_max == (0.5, 1.0), "a quarter of what the description allows"


def test_speed_limits_do_not_change_the_embodiment(tmp_path: Path) -> None:
    description = described(tmp_path)
    specs = [
        spec_of(description=description, **changes)
        for changes in ({}, {"speed_share": 0.1}, {"limits": {"b": {"speed_max": 0.3}}}, {"reduced_speed": 0.1})
    ]
    assert len({spec.embodiment for spec in specs}) == 1
    assert specs[1].observation[0].high[2:] == (2.0, 4.0), "the description's speeds"
    slow, fast = (spec_of(limits={"*": {**STATED["*"], "speed_max": speed}}) for speed in (0.2, 0.5))
    assert slow.embodiment == fast.embodiment and slow.limits != fast.limits


def test_state_layout_follows_config(tmp_path: Path) -> None:
    spec = spec_of(
        description=described(tmp_path),
        tool="hand",
        wrench={"force_max": 30.0},
        gripper={"joint": "finger", "low": 0.0, "high": 0.08},
        workspace={"low": [0, -1, -1], "high": [1, 1, 1]},
        stale_after_s=0.3,
    )
    labels = spec.observation[0].labels
    assert labels[:5] == ("a.pos", "b.pos", "finger.pos", "a.vel", "b.vel")
    assert [labels[i] for i in spec.limits.tool_position] == ["tool_x", "tool_y", "tool_z"]
    assert [labels[i] for i in spec.limits.tool_force] == ["force_x", "force_y", "force_z"]
    assert (spec.joint_target, spec.gripper, spec.action.labels[2]) == ((0, 1), 2, "finger.pos")
    assert spec.limits.stale_after_s == 0.3
    SafetyKernel(spec)


def test_stale_limit_defaults_to_two_periods() -> None:
    assert spec_of(limits=STATED, rate_hz=50.0).limits.stale_after_s == pytest.approx(0.04)


def test_reach_task_is_available() -> None:
    reach = setup("reach", limits=STATED, reach={"max_steps": 7})
    assert reach.task.max_steps == 7 and reach.task.has_expert  # type: ignore[attr-defined]
    assert reach.robot.spec.joint_delta == (0, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"joint a has no usable limits .*; set `limits"),
        ({"limits": STATED, "jionts": []}, "joints"),
        ({"limits": STATED, "joints": ["a", "a"]}, "each joint once"),
        ({"limits": STATED, "kind": "velocity"}, "kind"),
        ({"limits": STATED, "kind": "position", "manager": ""}, "needs its `manager`"),
        ({"limits": {"*": {**STATED["*"], "speed_max": float("inf")}}}, "speed_max"),
        ({"limits": STATED, "stale_after_s": 0.0}, "stale_after_s"),
        ({"limits": STATED, "cameras": {"top": {"topic": "/t", "width": 64, "height": 48, "rate_hz": 0.0}}}, "rate_hz"),
        ({"limits": STATED, "reach": {"tolerance": 0.0}}, "tolerance"),
        ({"limits": STATED, "tool": "hand"}, "a link of the description"),
        ({"limits": STATED, "workspace": {"low": [0, 0, 0], "high": [1, 1, 1]}}, "set `tool` to its link"),
        ({"description": "/nowhere/arm.urdf"}, "cannot be read"),
    ],
)
def test_invalid_options_are_explained(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        setup(**options)


@pytest.mark.skipif(importlib.util.find_spec("rclpy") is not None, reason="ROS 2 is here")
def test_missing_ros_names_the_package() -> None:
    with pytest.raises(SpecError, match=r"pip install -e '\.\[ros2\]' in a checkout"):
        setup(limits=STATED).robot.connect()  # type: ignore[attr-defined]
