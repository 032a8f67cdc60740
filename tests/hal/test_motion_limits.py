"""Speed, acceleration, jerk, forbidden boxes and force: for steps of a tool and for joint targets."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from hal.errors import SpecError
from hal.robot import Observation, StopLevel
from hal.safety import SafetyDecision, SafetyKernel, SafetyReason
from hal.spec import STATE, Array, ArraySpec, Box, RobotSpec, SafetyLimits

RATE_HZ = 10.0
ROUNDING = 1e-5
TOOL_LABELS = ("x", "y", "z", "fx", "fy", "fz")
TOOL = RobotSpec(
    model="tool",
    rate_hz=RATE_HZ,
    observation=(
        ArraySpec(name=STATE, labels=TOOL_LABELS, units=("m",) * 3 + ("N",) * 3, low=(-99.0,) * 6, high=(99.0,) * 6),
    ),
    action=ArraySpec(
        name="action", labels=("dx", "dy", "dz", "width"), units=("m",) * 4, low=(-0.1,) * 3 + (0.0,), high=(0.1,) * 4
    ),
    limits=SafetyLimits(
        tool_position=(0, 1, 2),
        keep_out=(Box((0.2, -0.1, -0.1), (0.4, 0.1, 0.1)),),
        tool_speed_max=0.8,
        tool_acceleration_max=5.0,
        tool_jerk_max=40.0,
        tool_force=(3, 4, 5),
        tool_force_max=20.0,
        reduced_speed=0.25,
    ),
    neutral=(0.0, 0.0, 0.0, 0.1),
    tool_delta=(0, 1, 2),
    gripper=3,
)
JOINTS = RobotSpec(
    model="joints",
    rate_hz=RATE_HZ,
    observation=(ArraySpec(name=STATE, labels=("q0", "q1"), units=("rad",) * 2, low=(-9.0,) * 2, high=(9.0,) * 2),),
    action=ArraySpec(name="action", labels=("q0", "q1", "grip"), units=("rad",) * 3, low=(-9.0,) * 3, high=(9.0,) * 3),
    limits=SafetyLimits(
        joint_position=(0, 1),
        joint_low=(-2.0, -1.0),
        joint_high=(2.0, 1.0),
        joint_velocity_max=(2.0, 1.0),
        joint_acceleration_max=(8.0, 8.0),
        joint_jerk_max=(60.0, 60.0),
        reduced_speed=0.5,
    ),
    neutral=(0.0, 0.0, 0.0),
    joint_target=(0, 1),
    gripper=2,
)


def filtered(kernel: SafetyKernel, action: Any, *state: float) -> SafetyDecision:
    return kernel.filter(np.array(action, np.float32), Observation({STATE: np.array(state, np.float32)}, 0))


def kernel_of(spec: RobotSpec) -> SafetyKernel:
    return SafetyKernel(spec, clock=lambda: 0)


def applied(verdict: SafetyDecision) -> Array:
    assert verdict.applied is not None, verdict.text
    return verdict.applied


def test_tool_motion_stays_within_acceleration_and_jerk() -> None:
    kernel, steps = kernel_of(TOOL), []
    for wish in (0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0):
        verdict = filtered(kernel, (wish, 0, 0, 0), 0, 0.5, 0, 0, 0, 0)
        steps.append(float(applied(verdict)[0]))
    # jerk: 40 m/s3 * (0.1 s)^3 = 0.04 m more a period; acceleration: 0.05 m; speed: 0.08 m
    np.testing.assert_allclose(steps, (0.04, 0.08, 0.08, 0.08, 0.04, 0, 0, 0), atol=ROUNDING)


def test_only_pressing_axis_stops_at_once() -> None:
    kernel = kernel_of(TOOL)
    for _ in range(4):
        filtered(kernel, (0.05, 0, -0.05, 0), 0, 0.5, 0, 0, 0, 0)
    step = applied(filtered(kernel, (0, 0, -0.05, 0), 0, 0.5, 0, 0, 0, 21))
    np.testing.assert_allclose(step[:3], (0.01, 0, 0), atol=ROUNDING)  # x brakes by its jerk
    np.testing.assert_allclose(applied(filtered(kernel, (0, 0, 0.05, 0), 0, 0.5, 0, 0, 0, 21))[2], 0.04, atol=ROUNDING)


def test_reduced_speed_is_reached_within_limits() -> None:
    kernel = kernel_of(TOOL)
    for _ in range(4):
        filtered(kernel, (0.08, 0, 0, 0), 0, 0.5, 0, 0, 0, 0)
    kernel.is_speed_reduced = True
    steps = [float(applied(filtered(kernel, (0.08, 0, 0, 0), 0, 0.5, 0, 0, 0, 0))[0]) for _ in range(4)]
    np.testing.assert_allclose(steps, (0.045, 0.02, 0.02, 0.02), atol=0.006)
    assert steps[0] >= 0.04 - ROUNDING and steps[-1] == pytest.approx(0.02, abs=ROUNDING)


def test_speed_limit_applies_to_norm_of_step() -> None:
    kernel = kernel_of(TOOL)
    for _ in range(5):
        step = applied(filtered(kernel, (0.1, 0.1, -0.1, 0), 0, 0, 0, 0, 0, 0))[:3]
    assert np.linalg.norm(step) == pytest.approx(0.08, abs=ROUNDING)
    np.testing.assert_allclose(step / step[0], (1, 1, -1), atol=ROUNDING)


@pytest.mark.parametrize(
    ("tool", "step", "reaches"),
    [
        ((0.19, 0.0, 0.0), (0.03, 0, 0), (0.01, 0, 0)),
        ((0.19, 0.0, 0.0), (-0.03, 0, 0), (-0.03, 0, 0)),
        ((0.41, 0.0, 0.05), (-0.03, 0, 0), (-0.01, 0, 0)),
        ((0.19, 0.2, 0.0), (0.03, 0, 0), (0.03, 0, 0)),
        ((0.2, 0.0, 0.0), (0, 0.03, 0), (0, 0.03, 0)),
        ((0.39, 0.0, 0.0), (0.03, 0, 0), (0.03, 0, 0)),
        ((0.39, 0.0, 0.0), (-0.03, 0, 0), (0, 0, 0)),
    ],
)
def test_tool_stays_out_of_forbidden_box_and_may_leave_it(
    tool: tuple[float, ...], step: tuple[float, ...], reaches: tuple[float, ...]
) -> None:
    verdict = filtered(kernel_of(TOOL), (*step, 0), *tool, 0, 0, 0)
    np.testing.assert_allclose(applied(verdict)[:3], reaches, atol=ROUNDING)
    assert (verdict.reasons == SafetyReason.WORKSPACE) == (step != reaches)


def test_pressed_tool_moves_with_force_only() -> None:
    kernel = kernel_of(TOOL)
    against = filtered(kernel, (0, 0, -0.03, 0.05), 0, 0, 0.5, 0, 0, 21)
    np.testing.assert_allclose(applied(against), (0, 0, 0, 0.05), atol=ROUNDING)
    assert against.reasons == SafetyReason.FORCE
    away = filtered(kernel, (0, 0, 0.03, 0.05), 0, 0, 0.5, 0, 0, 21)
    np.testing.assert_allclose(applied(away), (0, 0, 0.03, 0.05), atol=ROUNDING)


def test_joint_targets_are_reached_within_limits() -> None:
    kernel, angle, angles = kernel_of(JOINTS), 0.5, []
    for _ in range(5):
        angle = float(applied(filtered(kernel, (5, 0, 0), angle, 0))[0])
        angles.append(angle)
    # jerk: 60 * 0.001 = 0.06 rad more a period; acceleration: 0.08; speed: 0.2; the joint ends at 2 rad
    np.testing.assert_allclose(np.diff([0.5, *angles]), (0.06, 0.14, 0.2, 0.2, 0.2), atol=ROUNDING)
    for _ in range(20):
        verdict = filtered(kernel, (5, 0, 0), angle, 0)
        assert angle <= float(applied(verdict)[0]) <= 2.0 + ROUNDING, "it does not come back from its limit"
        angle = float(applied(verdict)[0])
    assert angle == pytest.approx(2.0, abs=ROUNDING) and SafetyReason.JOINT_POSITION in verdict.reasons


@pytest.mark.parametrize("rate_hz", [10.0, 100.0])
def test_target_is_reached_without_overshoot(rate_hz: float) -> None:
    kernel, angle = kernel_of(msgspec.structs.replace(JOINTS, rate_hz=rate_hz)), 0.0
    for _ in range(round(2 * rate_hz)):
        angle = float(applied(filtered(kernel, (1, 0, 0), angle, 0))[0])
        assert angle <= 1.0 + ROUNDING
    assert angle == pytest.approx(1.0, abs=1e-3)


def test_motion_within_limits_is_unchanged() -> None:
    kernel, angle = kernel_of(msgspec.structs.replace(JOINTS, rate_hz=100.0)), 0.0
    for time_s in np.arange(1, 400) / 100:
        target = 0.4 * (time_s - np.sin(2 * time_s) / 2)
        verdict = filtered(kernel, (target, 0, 0), angle, 0)
        assert verdict.reasons == 0
        angle = float(applied(verdict)[0])


def test_joint_steps_stay_within_limits_and_range() -> None:
    fields = {name: getattr(JOINTS, name) for name in JOINTS.__struct_fields__}
    kernel = kernel_of(RobotSpec(**fields | {"joint_target": (), "joint_delta": (0, 1)}))
    steps = [float(applied(filtered(kernel, (1, 0, 0), 0, 0))[0]) for _ in range(4)]
    np.testing.assert_allclose(steps, (0.06, 0.14, 0.2, 0.2), atol=ROUNDING)
    verdict = filtered(kernel, (1, -1, 0), 1.95, 1.5)
    assert applied(verdict)[0] == pytest.approx(0.05, abs=ROUNDING) and SafetyReason.JOINT_POSITION in verdict.reasons
    assert applied(verdict)[1] < 0


def test_joint_targets_start_from_measured_angles_after_stop() -> None:
    kernel = kernel_of(JOINTS)
    filtered(kernel, (1, 0, 0), 0, 0)
    kernel.hold()
    assert applied(filtered(kernel, (2, 0, 0), 0.9, 0))[0] == pytest.approx(0.96, abs=ROUNDING)


def test_target_of_blocked_joint_stays_near() -> None:
    kernel = kernel_of(JOINTS)
    targets = [applied(filtered(kernel, (2, -1, 0), 0.5, 0.25))[:2] for _ in range(30)]
    np.testing.assert_allclose(targets[-1], (0.5 + 1.0, 0.25 - 0.5), atol=ROUNDING)  # 2 and 1 rad/s for half a second
    assert filtered(kernel, (1.51, -0.26, 0), 0.5, 0.25).reasons == SafetyReason.SPEED
    given_way = filtered(kernel, (2, -1, 0), 0.4, 0.25)
    np.testing.assert_allclose(applied(given_way)[:2], targets[-1], atol=ROUNDING)
    back = filtered(kernel, (0.4, 0.25, 0), 0.4, 0.25)
    assert (applied(back)[:2] * (1, -1) < targets[-1] * (1, -1)).all(), "it may come back at once"
    free = [applied(filtered(kernel, (2, -1, 0), *targets[-1]))[0] for _ in range(5)]
    assert free[-1] > targets[-1][0], "and goes on once the joint is free"


def test_joint_outside_range_may_come_back() -> None:
    kernel = kernel_of(JOINTS)
    assert applied(filtered(kernel, (3, 0, 0), 2.5, 0))[0] == pytest.approx(2.5)
    assert applied(filtered(kernel, (0, 0, 0), 2.5, 0))[0] < 2.5


def test_joint_outside_action_bounds_returns_within_speed() -> None:
    action = msgspec.structs.replace(JOINTS.action, low=(-2.0, -1.0, -9.0), high=(2.0, 1.0, 9.0))
    kernel = kernel_of(msgspec.structs.replace(JOINTS, action=action))
    way = [2.5]
    for _ in range(6):
        told = applied(filtered(kernel, (0, 0, 0), way[-1], 0))
        kernel.set_applied(told)
        way.append(float(told[0]))
    steps = -np.diff(way)
    assert (steps > 0).all() and steps.max() <= 0.2 + ROUNDING, "2 rad/s at 10 Hz"


def test_next_target_starts_from_applied_one() -> None:
    kernel = kernel_of(JOINTS)
    filtered(kernel, (1, 0, 0), 0, 0)
    kernel.set_applied(np.array([0.01, 0, 0], np.float32))
    assert applied(filtered(kernel, (1, 0, 0), 0, 0))[0] == pytest.approx(0.01 + 0.01 + 0.01 + 0.06, abs=ROUNDING)


@pytest.mark.parametrize("asked", [-0.4, 0.0, 0.4])
@pytest.mark.parametrize("moved", [-0.3, 0.3])
def test_joint_that_a_person_moved_before_its_command_was_applied_starts_from_rest(asked: float, moved: float) -> None:
    kernel = kernel_of(JOINTS)
    filtered(kernel, (moved, 0, 0), 0, 0)
    kernel.set_applied(np.array([moved, 0, 0], np.float32))
    first = applied(filtered(kernel, (moved + asked, 0, 0), moved, 0))[0]
    assert first == pytest.approx(moved + np.sign(asked) * 0.06, abs=ROUNDING)


def test_robot_without_tool_action_stops_in_forbidden_place() -> None:
    state = ArraySpec(name=STATE, labels=TOOL_LABELS, units=("1",) * 6, low=(-99.0,) * 6, high=(99.0,) * 6)
    action = ArraySpec(name="action", labels=("u",), units=("1",), low=(-1.0,), high=(1.0,))
    limits = SafetyLimits(
        tool_position=(0, 1, 2), keep_out=TOOL.limits.keep_out, tool_force=(3, 4, 5), tool_force_max=9
    )
    kernel = kernel_of(RobotSpec(model="u", rate_hz=10, observation=(state,), action=action, limits=limits))
    assert filtered(kernel, (1,), 0, 0, 0, 0, 0, 0).stop is None
    for state_values, reason in (
        ((0.3, 0, 0, 0, 0, 0), SafetyReason.WORKSPACE),
        ((0, 0, 0, 0, 0, 10), SafetyReason.FORCE),
    ):
        verdict = filtered(kernel, (1,), *state_values)
        assert (verdict.stop, verdict.reasons) == (StopLevel.HOLD, reason) and "the tool is at" in verdict.text


def test_force_stops_robot_without_tool_position() -> None:
    state = ArraySpec(name=STATE, labels=TOOL_LABELS, units=("1",) * 6, low=(-99.0,) * 6, high=(99.0,) * 6)
    action = ArraySpec(name="action", labels=("u",), units=("1",), low=(-1.0,), high=(1.0,))
    limits = SafetyLimits(tool_force=(3, 4, 5), tool_force_max=9)
    kernel = kernel_of(RobotSpec(model="u", rate_hz=10, observation=(state,), action=action, limits=limits))
    assert filtered(kernel, (1,), 0, 0, 0, 0, 0, 8).stop is None
    assert filtered(kernel, (1,), 0, 0, 0, 0, 0, 10).reasons == SafetyReason.FORCE


def test_speed_action_is_reduced_near_people() -> None:
    action = ArraySpec(
        name="action",
        labels=("x.vel", "turn.vel", "grip"),
        units=("m/s", "rad/s", "m"),
        low=(-0.4, -2.0, 0.0),
        high=(0.4, 2.0, 0.1),
    )
    limits = SafetyLimits(reduced_speed=0.25)
    kernel = kernel_of(RobotSpec(model="base", rate_hz=10.0, observation=(), action=action, limits=limits, gripper=2))
    assert filtered(kernel, (0.4, -2.0, 0.1)).reasons == 0
    kernel.is_speed_reduced = True
    verdict = filtered(kernel, (0.4, -2.0, 0.1))
    np.testing.assert_allclose(applied(verdict), (0.1, -0.5, 0.1), rtol=1e-6)
    assert verdict.reasons == SafetyReason.SPEED
    assert filtered(kernel, (0.05, 0.5, 0.0)).reasons == 0


def test_rest_action_holds_measured_joints() -> None:
    rest = JOINTS.rest_action({STATE: np.array([0.3, -0.4], np.float32)})
    np.testing.assert_array_equal(rest, np.array([0.3, -0.4, 0.0], np.float32))


@pytest.mark.parametrize(
    "wrong",
    [
        {"limits": SafetyLimits(tool_speed_max=0.0)},
        {"limits": SafetyLimits(tool_acceleration_max=-1.0)},
        {"limits": SafetyLimits(tool_position=(0, 1, 2), keep_out=(Box((0, 0, 0), (0, 1, 1)),))},
        {"limits": SafetyLimits(keep_out=TOOL.limits.keep_out)},
        {"limits": SafetyLimits(tool_force_max=1.0)},
        {"limits": SafetyLimits(tool_force=(0,), tool_force_max=1.0)},
        {"limits": SafetyLimits(tool_force=(3, 4, 5), tool_force_max=1.0), "tool_delta": (0, 1)},
        {"limits": SafetyLimits(tool_speed_max=1.0), "tool_delta": ()},
        {"limits": SafetyLimits(tool_jerk_max=1.0), "tool_delta": ()},
        {"limits": SafetyLimits(joint_acceleration_max=(1.0, 1.0, 1.0))},
        {"limits": SafetyLimits(reduced_speed=0.0)},
        {"joint_target": (3,)},
        {"joint_target": (0,), "joint_delta": (1,)},
        {"joint_target": (9,)},
    ],
)
def test_contradictory_motion_limits_are_refused(wrong: dict[str, Any]) -> None:
    base = {name: getattr(TOOL, name) for name in TOOL.__struct_fields__}
    with pytest.raises(SpecError):
        SafetyKernel(RobotSpec(**(base | wrong)))


@pytest.mark.parametrize("fastest", [(), (1.0, np.inf), (1.0, np.nan)])
def test_joint_targets_without_a_speed_limit_are_refused(fastest: tuple[float, ...]) -> None:
    """The policy could jump through the whole range in one period, and a person could not drive at a share of it."""
    limits = msgspec.structs.replace(JOINTS.limits, joint_velocity_max=fastest)
    with pytest.raises(SpecError, match="joints: joint_target needs a finite joint_velocity_max of each joint"):
        kernel_of(msgspec.structs.replace(JOINTS, limits=limits))
