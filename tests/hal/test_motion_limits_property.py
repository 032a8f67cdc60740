"""All limits of motion, checked by a second implementation (`benchmarks.limits`), with and without disturbances."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.limits import Limits
from hal.robot import Observation
from hal.safety import SafetyKernel
from hal.spec import STATE, Array, ArraySpec, Box, RobotSpec, SafetyLimits

WIDE = (9.0, 9.0, 9.0)
LOW = (-9.0, -9.0, -9.0)
WISHES = st.lists(
    st.tuples(st.tuples(*[st.floats(-1.5, 1.5)] * 3), st.integers(1, 30), st.booleans()), min_size=1, max_size=25
)
"""Proposals in shares of the greatest step or of the range, each with its periods and whether speed is reduced."""


def robot(rate_hz: float, kind: str, acceleration: float, jerk: float) -> RobotSpec:
    """Three axes: of a tool with two forbidden boxes, or joints."""
    tool, step = kind == "tool_delta", 0.5 / rate_hz
    bound = (step,) * 3 if tool else WIDE
    place = ArraySpec(name=STATE, labels=("x", "y", "z"), units=("m",) * 3, low=LOW, high=WIDE)
    action = ArraySpec(
        name="action", labels=("a", "b", "c"), units=("m",) * 3, low=tuple(-each for each in bound), high=bound
    )
    of_tool = SafetyLimits(
        tool_position=(0, 1, 2),
        workspace_low=(-0.5,) * 3,
        workspace_high=(0.5,) * 3,
        tool_speed_max=0.4,
        tool_acceleration_max=acceleration,
        tool_jerk_max=jerk,
        keep_out=(Box((0.3, -0.1, -0.1), (0.4, 0.1, 0.1)), Box((-0.4, -0.1, -0.1), (-0.2, 0.1, 0.1))),
        reduced_speed=0.3,
    )
    of_joints = SafetyLimits(
        joint_position=(0, 1, 2),
        joint_low=(-2.0, -1.0, -0.5),
        joint_high=(2.0, 1.0, 0.5),
        joint_velocity_max=(2.0, 1.0, 0.5),
        joint_acceleration_max=(acceleration,) * 3,
        joint_jerk_max=(jerk,) * 3,
        reduced_speed=0.3,
    )
    return RobotSpec(
        model=kind,
        rate_hz=rate_hz,
        observation=(place,),
        action=action,
        limits=of_tool if tool else of_joints,
        neutral=(0.0,) * 3,
        **{kind: (0, 1, 2)},  # type: ignore[arg-type]
    )


def felt(spec: RobotSpec) -> RobotSpec:
    """`spec` with a force sensor on the tool and a limit of 20 N."""
    (place,) = spec.observation
    state = ArraySpec(
        name=STATE,
        labels=(*place.labels, "fx", "fy", "fz"),
        units=(*place.units, *("N",) * 3),
        low=(*LOW, *(-99.0,) * 3),
        high=(*WIDE, *(99.0,) * 3),
    )
    limits = msgspec.structs.replace(spec.limits, tool_force=(3, 4, 5), tool_force_max=20.0)
    return msgspec.structs.replace(spec, observation=(state,), limits=limits)


class World:
    """A robot with its kernel and the second implementation. It carries out `share` of each step."""

    def __init__(self, spec: RobotSpec) -> None:
        self.spec, self.limits = spec, Limits(spec)
        self.kernel = SafetyKernel(spec, clock=lambda: 0)
        self.at: Array = np.zeros(3)
        self.force_n: Array = np.zeros(3 if spec.limits.tool_force else 0)

    def command(self, action: Array) -> set[str]:
        state = np.concatenate([self.at, self.force_n]).astype(np.float32)
        verdict = self.kernel.filter(action.astype(np.float32), Observation({STATE: state}, 0))
        assert verdict.applied is not None, verdict.text
        broken = self.limits.check(verdict.applied, state)
        applied = verdict.applied.astype(np.float64)
        self.at = applied if self.spec.joint_target else self.at + applied
        return broken


@pytest.mark.parametrize("kind", ["tool_delta", "joint_delta", "joint_target"])
@given(
    wishes=WISHES,
    rate_hz=st.sampled_from([10.0, 50.0, 125.0]),
    acceleration=st.floats(1.0, 20.0),
    jerk=st.floats(20.0, 400.0),
)
def test_robot_that_moves_as_commanded_exceeds_no_limit(
    kind: str, wishes: list[tuple[tuple[float, ...], int, bool]], rate_hz: float, acceleration: float, jerk: float
) -> None:
    world = World(robot(rate_hz, kind, acceleration, jerk))
    scale = 2.0 if kind == "joint_target" else 0.5 / rate_hz
    for wish, periods, reduced in wishes:
        world.kernel.is_speed_reduced = reduced
        for _ in range(periods):
            assert not world.command(np.array(wish) * scale)
    assert world.limits.exceeded == 0


@pytest.mark.parametrize("kind", ["tool_delta", "joint_target"])
@given(wishes=WISHES, pushes=st.lists(st.tuples(*[st.floats(-0.6, 0.6)] * 3), min_size=1, max_size=20))
def test_pushed_robot_exceeds_only_limits_that_conflict_with_its_place(
    kind: str, wishes: list[tuple[tuple[float, ...], int, bool]], pushes: list[tuple[float, ...]]
) -> None:
    world = World(robot(10.0, kind, 3.0, 40.0))
    scale = 2.0 if kind == "joint_target" else 0.05
    for number, (wish, periods, _) in enumerate(wishes):
        for _ in range(periods):
            assert not world.command(np.array(wish) * scale)
        world.at = np.array(pushes[number % len(pushes)])


@pytest.mark.parametrize("speed", [0.0004, 0.0016, 0.004])
@pytest.mark.parametrize("periods", [3, 5, 9])
def test_axis_outside_its_place_returns_within_limits(speed: float, periods: int) -> None:
    world = World(robot(100.0, "tool_delta", 3.0, 40.0))
    world.at = np.array((0.55, 0.0, 0.0))  # an external push
    for x in [-speed] * periods + [0.004] * 20:  # it may come back, and stop on its way, and not go out again
        assert not world.command(np.array((x, 0.0, 0.0)))
    assert world.at[0] < 0.55
    assert world.limits.exceeded == 0


@pytest.mark.parametrize("pushed_n", [-30.0, 30.0])
def test_axis_under_force_reverses_within_limits(pushed_n: float) -> None:
    world = World(felt(robot(100.0, "tool_delta", 3.0, 40.0)))
    world.force_n = np.array((pushed_n, 0.0, 0.0))
    away = np.sign(pushed_n) * 0.0016
    for x in [away] * 5 + [-away] * 20:
        assert not world.command(np.array((x, 0.0, 0.0)))
    assert abs(world.at[0]) > 0.0
    assert world.limits.exceeded == 0


def test_reference_tolerates_rounding() -> None:
    """At 100 Hz, jerk 40 m/s3 (4e-5 m): the step to 0 exceeds the jerk by 3.4e-7 m, which the kernel sees, and counts
    the acceleration as 0 then. Of 1,000,000 hostile actions two met that, and one that exceeded it by 1.0e-6 m."""
    limits, at, broken = Limits(robot(100.0, "tool_delta", 3.0, 40.0)), 0.55, set[str]()
    steps = [-4e-5, -9.98e-5, -1.39657e-4, -1.59657e-4, -1.59657e-4, -1.19657e-4, -3.9657e-5, 0.0, -4e-5]
    for step in steps:
        broken |= limits.check(np.array((step, 0, 0)), np.array((at, 0, 0)))
        at += step
    assert not broken


@pytest.mark.parametrize(
    ("steps", "limit"),
    [
        ([0.01, 0.05], "acceleration"),
        ([0.02, 0.05, 0.05], "jerk"),
        ([0.03, 0.06], "velocity"),
        ([0.03, 0.03, 0.0], "jerk"),
        ([-0.03, -0.04, -0.04, -0.04, -0.04, -0.02], "forbidden box"),
    ],
)
def test_reference_detects_each_violation(steps: list[float], limit: str) -> None:
    limits, at, broken = Limits(robot(10.0, "tool_delta", 3.0, 25.0)), 0.0, set[str]()
    for step in steps:
        broken |= limits.check(np.array((step, 0, 0)), np.array((at, 0, 0)))
        at += step
    assert limit in broken
