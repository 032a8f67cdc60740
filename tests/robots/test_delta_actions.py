"""Integrated targets stay within the robot's limits, however far the robot lags behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.robot import Observation
from hal.safety import SafetyKernel
from hal.spec import STATE, Array, Box
from robots import ur_connection
from robots.delta_actions import DeltaTarget, add_step, make_step_limiter
from robots.ur import ur_spec
from robots.ur_connection import ServoCommand, UrConfig, UrConnection

HIGH = (0.5, 0.3, 0.4)
POST = Box((0.2, -0.1, 0.0), (0.3, 0.1, 0.4))
PLACE = (0.1, 0.0, 0.2)
SKIN_M = 1e-6
NOW_NS = 10**9


def tool_config(**limits: object) -> UrConfig:
    return UrConfig(host="x", workspace_low=(-0.5, -0.3, 0.0), workspace_high=HIGH, **limits)  # type: ignore[arg-type]


class Lagging:
    """An arm behind the safety kernel that covers a share of the way to its target in each control period."""

    def __init__(self, config: UrConfig, place: tuple[float, ...], share: float, lead: float = 10.0) -> None:
        self.spec = ur_spec(config)
        self.measured: Array = np.array(place)
        self._share, self._lead = share, lead
        self._within = make_step_limiter(self.spec)
        self._kernel = SafetyKernel(self.spec, clock=lambda: NOW_NS)
        self.target: Array | None = None

    def command(self, step: Array) -> None:
        limits, state = self.spec.limits, np.zeros(len(self.spec.feature(STATE).labels), np.float32)
        state[list(limits.tool_position if self.spec.tool_delta else limits.joint_position)] = self.measured
        verdict = self._kernel.filter(step.astype(np.float32), Observation({STATE: state}, NOW_NS))
        assert verdict.applied is not None
        self.target, made = add_step(self.target, self.measured, verdict.applied, self._lead, self._within)
        self._kernel.set_applied(made.astype(np.float32))
        self.measured = self.measured + self._share * (self.target - self.measured)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_lagging_tool_target_stays_in_workspace(share: float) -> None:
    arm = Lagging(tool_config(), PLACE, share)
    for _ in range(200):
        arm.command(np.array([0.0, 0.007, 0.007]))
        assert arm.target is not None and (arm.target <= np.array(HIGH) + SKIN_M).all()
    np.testing.assert_allclose(arm.target, [PLACE[0], HIGH[1], HIGH[2]], atol=1e-5)


def test_lagging_tool_target_stays_out_of_forbidden_box() -> None:
    arm = Lagging(tool_config(keep_out=(POST,)), PLACE, share=0.1)
    for _ in range(100):
        arm.command(np.array([0.012, 0.0, 0.0]))
        assert arm.target is not None and arm.target[0] <= POST.low[0]
    assert arm.target[0] > POST.low[0] - 0.001


@given(st.lists(st.tuples(*[st.floats(-0.02, 0.02)] * 3), max_size=60), st.floats(0, 1))
def test_any_steps_keep_tool_target_within_limits(steps: list[tuple[float, ...]], share: float) -> None:
    arm = Lagging(tool_config(keep_out=(POST,)), PLACE, share)
    for step in steps:
        arm.command(np.array(step))
        assert arm.target is not None and (np.abs(arm.target[:2]) <= np.array(HIGH[:2]) + SKIN_M).all()
        inside = (arm.target > np.array(POST.low) + SKIN_M) & (arm.target < np.array(POST.high) - SKIN_M)
        assert not inside.all()


def test_lagging_joint_targets_stay_within_limits() -> None:
    action: Literal["joint_delta"] = "joint_delta"
    arm = Lagging(UrConfig(host="x", action=action, joint_low=(-1.0,) * 6, joint_high=(0.5,) * 6), (0.0,) * 6, 0.1)
    for _ in range(60):
        arm.command(np.full(6, 0.05))
        assert arm.target is not None and (arm.target <= 0.5 + SKIN_M).all()
    np.testing.assert_allclose(arm.target, np.full(6, 0.5), atol=1e-5)


def test_out_of_range_target_may_only_return() -> None:
    arm = Lagging(tool_config(), (0.1, 0.0, 0.5), share=1.0)
    arm.command(np.array([0.0, 0.0, 0.01]))
    assert arm.target is not None and arm.target[2] == pytest.approx(0.5)
    arm.command(np.array([0.0, 0.0, -0.01]))
    assert arm.target[2] == pytest.approx(0.49)


def test_blocked_robot_limits_target_lead() -> None:
    target, step = add_step(np.array([0.4]), np.array([0.0]), np.array([0.3]), max_lead=0.5)
    assert (target.tolist(), step.tolist()) == ([0.5], pytest.approx([0.1]))


@pytest.mark.parametrize(("step", "target"), [(0.0, 0.4), (0.1, 0.4), (-0.1, 0.3)])
def test_target_of_a_sagging_joint_does_not_sink_by_itself(step: float, target: float) -> None:
    following, made = add_step(np.array([0.4]), np.array([0.0]), np.array([step]), max_lead=0.2)
    assert (following.tolist(), made.tolist()) == (pytest.approx([target]), pytest.approx([target - 0.4]))


LAG_S, STIFFNESS_N_PER_M, TABLE_M = 0.1, 20_000.0, 0.1


class Pressing:
    """A compliant arm that follows its servo path with a lag, above a table, behind the safety kernel."""

    def __init__(self, config: UrConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec, self._now_s = ur_spec(config), 1.0
        self.pose: Array = np.array([*PLACE[:2], TABLE_M + 0.01, 0.0, 0.0, 0.0])
        clock = SimpleNamespace(monotonic=lambda: self._now_s, monotonic_ns=lambda: round(self._now_s * 1e9))
        monkeypatch.setattr(ur_connection, "time", clock)
        self._target = DeltaTarget(self.spec, config)
        self._connection = UrConnection(config, self._receive())
        self._kernel = SafetyKernel(self.spec, clock=clock.monotonic_ns)

    @property
    def force(self) -> Array:
        return np.array([0.0, 0.0, STIFFNESS_N_PER_M * max(0.0, TABLE_M - float(self.pose[2]))])

    def command(self, step: tuple[float, float, float]) -> Array:
        """Runs one control period; returns the applied action."""
        state = np.zeros(len(self.spec.feature(STATE).labels), np.float32)
        state[list(self.spec.limits.tool_position)] = self.pose[:3]
        state[list(self.spec.limits.tool_force)] = self.force
        seen = Observation({STATE: state}, round(self._now_s * 1e9))
        decision = self._kernel.filter(np.array(step, np.float32), seen)
        assert decision.applied is not None, decision.text
        shift = self._target.withdraw(self.pose, self.force)
        target, applied = self._target.next(decision.applied, self.pose)
        self._connection.servo(target, self.spec.period_s, joints=False, shift=shift)
        self._target.value = target
        self._kernel.set_applied(applied)
        for _ in range(50):
            self._now_s += self.spec.period_s / 50
            path = self._connection.current_command()
            assert isinstance(path, ServoCommand)
            self.pose[:3] += (path.at(self._now_s)[:3] - self.pose[:3]) * self.spec.period_s / 50 / LAG_S
        return applied

    def _receive(self) -> Any:
        return SimpleNamespace(
            getTimestamp=lambda: self._now_s,
            getActualQ=lambda: [0.0] * 6,
            getActualQd=lambda: [0.0] * 6,
            getActualTCPPose=lambda: self.pose.tolist(),
            getActualTCPForce=lambda: [*self.force, 0.0, 0.0, 0.0],
            isConnected=lambda: True,
            getSafetyMode=lambda: 1,
            getRobotMode=lambda: 7,
        )


@pytest.mark.parametrize("tool_speed", [0.05, 0.1, 0.25])
def test_blocked_tool_does_not_press_on_by_its_lag(tool_speed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    config = UrConfig("nowhere", tool_speed=tool_speed, force_max=30.0)
    arm, down = Pressing(config, monkeypatch), (0.0, 0.0, -tool_speed / config.rate_hz)
    while np.linalg.norm(arm.force) <= 30.0:
        assert arm.command(down)[2] < 0
    pressed = arm.force[2]
    for _ in range(20):
        applied = arm.command((-down[2], 0.0, down[2]))
        assert applied[2] == 0 and arm.force[2] <= pressed
    assert arm.pose[0] - PLACE[0] > 0.9 * 18 * applied[0], "the tool slides along the table"
    for _ in range(20):
        assert arm.command((0.0, 0.0, -down[2]))[2] > 0
    assert arm.force[2] == 0
