"""Input of a device on the robot's own computer takes over and yields as an operator's does."""

from __future__ import annotations

import numpy as np
import pytest
from wait_kit import Clock

from hal.spec import ACTION, STATE, ArraySpec, RobotSpec, SafetyLimits
from hal.teleoperator import TeleopInput
from user_sys.edge.control_authority import INPUT_TIMEOUT_S, LOCAL_OPERATOR, ControlAuthority, ControlState
from user_sys.messages import OperatorCommand, OperatorReply

ARM = RobotSpec(
    model="two-joints",
    rate_hz=10.0,
    observation=(ArraySpec(name=STATE, labels=("a", "b"), units=("rad",) * 2, low=(-3, -3), high=(3, 3)),),
    action=ArraySpec(name=ACTION, labels=("a", "b"), units=("rad",) * 2, low=(-3, -3), high=(3, 3)),
    limits=SafetyLimits(joint_position=(0, 1), joint_low=(-3, -3), joint_high=(3, 3), joint_velocity_max=(1.0, 2.0)),
    neutral=(0.0, 0.0),
    joint_target=(0, 1),
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def authority(clock: Clock) -> ControlAuthority:
    return ControlAuthority("arm-0", ARM, clock)


def hand(*twist: float, target: tuple[float, ...] = ()) -> TeleopInput:
    return TeleopInput(np.array(twist, np.float32), True, np.array(target, np.float32) if target else None)


def order(authority: ControlAuthority, what: str, operator: str = "ada") -> OperatorReply:
    return authority.apply(OperatorCommand(robot="arm-0", operator=operator, order=what))  # type: ignore[arg-type]


def test_local_input_takes_over_and_its_end_holds(authority: ControlAuthority, clock: Clock) -> None:
    previous = np.array([0.5, 0.5], np.float32)
    authority.apply_local_input(hand(1.0, -0.5))
    assert (authority.update(), authority.operator) == (ControlState.HUMAN, LOCAL_OPERATOR)
    np.testing.assert_allclose(authority.action(previous), [0.6, 0.4], rtol=1e-6)
    authority.apply_local_input(None)
    np.testing.assert_array_equal(authority.action(previous), previous)
    clock.now_s += INPUT_TIMEOUT_S + 0.01
    assert authority.update() is ControlState.HOLD
    authority.apply_local_input(hand(0.0, 0.0))
    assert authority.update() is ControlState.HUMAN
    assert order(authority, "hand-back").accepted is False, "the hand is still on it"


def test_leader_arm_gives_position_targets(authority: ControlAuthority) -> None:
    authority.apply_local_input(hand(0.0, 0.0, target=(1.5, -1.0)))
    assert authority.action(np.zeros(2, np.float32)).tolist() == [1.5, -1.0]
    authority.apply_local_input(None)
    assert authority.action(np.array([1.5, -1.0], np.float32)).tolist() == [1.5, -1.0]


def test_local_input_yields_to_operators_and_the_e_stop(authority: ControlAuthority) -> None:
    assert order(authority, "take-over").accepted
    authority.apply_local_input(hand(1.0, 0.0))
    assert authority.operator == "ada" and not authority.twist().any()
    authority.emergency_stop("ada")
    authority.apply_local_input(hand(1.0, 0.0))
    assert authority.state is ControlState.STOPPED


@pytest.mark.parametrize("what", ["pause", "re-arm"])
def test_engaged_device_does_not_undo_an_operators_hold(authority: ControlAuthority, what: str) -> None:
    authority.apply_local_input(hand(1.0, 0.0))
    if what == "re-arm":
        authority.emergency_stop("ada")
    assert order(authority, what).accepted
    for _ in range(3):
        authority.apply_local_input(hand(1.0, 0.0))
        assert authority.update() is ControlState.HOLD
    authority.apply_local_input(None)
    authority.apply_local_input(hand(1.0, 0.0))
    assert authority.update() is ControlState.HUMAN


def test_local_operators_name_is_reserved(authority: ControlAuthority) -> None:
    reply = order(authority, "take-over", operator=LOCAL_OPERATOR)
    assert not reply.accepted and "reserved for" in reply.reason


def test_hand_back_at_the_device_gives_the_robot_to_the_policy(authority: ControlAuthority, clock: Clock) -> None:
    authority.apply_local_input(hand(1.0, 0.0))
    clock.now_s += INPUT_TIMEOUT_S + 0.01
    assert authority.update() is ControlState.HOLD
    authority.apply_local_input(TeleopInput(np.zeros(2, np.float32), True, hands_back=True))
    assert authority.update() is ControlState.POLICY
    assert order(authority, "take-over").accepted
    authority.apply_local_input(TeleopInput(np.zeros(2, np.float32), True, hands_back=True))
    assert authority.update() is ControlState.HUMAN, "another person drives"
