"""Input of a device on the robot's own computer takes over and yields as an operator's does."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from edge_kit import driver_process, until

from hal.spec import ACTION, STATE, ArraySpec, RobotSpec, SafetyLimits
from hal.teleoperator import TeleopInput
from user_sys.compose import RobotConfig, build_robot_setup
from user_sys.edge.control_authority import INPUT_TIMEOUT_S, LOCAL_OPERATOR, ControlAuthority, ControlState
from user_sys.edge.driver_client import DriverClient
from user_sys.errors import ConfigError
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
PRESSED_SPACE_AND_W = b"".join(struct.pack("llHHi", 0, 0, 1, code, 1) for code in (57, 17))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


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


def test_local_operators_name_is_reserved(authority: ControlAuthority) -> None:
    reply = order(authority, "take-over", operator=LOCAL_OPERATOR)
    assert not reply.accepted and "reserved for" in reply.reason


@pytest.mark.usefixtures("runtime")
def test_keyboard_input_reaches_the_session_and_its_loss_is_ignored(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "event0")
    keys = os.open(tmp_path / "event0", os.O_RDWR | os.O_NONBLOCK)
    devices = ({"kind": "keyboard", "device": str(tmp_path / "event0")}, {"kind": "keyboard", "device": "/dev/none"})
    config = RobotConfig(name="fake-0", driver="fake", teleoperators=devices)
    with driver_process(tmp_path, config) as running, DriverClient("fake-0", token=1) as session:
        session.attach()
        assert session.hold().local_input is None
        os.write(keys, PRESSED_SPACE_AND_W)
        reported = until(lambda: session.hold().local_input, "the key press arrives")
        assert reported.engaged and reported.target is None and reported.twist.tolist() == [0.5, 0, 0, 0]
        os.close(keys)
        until(lambda: session.hold().local_input is None, "the keyboard is let go")
        assert session.hold().applied is None
        assert running.wait_for_log("teleoperator.lost", times=2)


def test_unknown_input_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown input device kind 'joystick'; use one of"):
        build_robot_setup(RobotConfig(name="fake-0", driver="fake", teleoperators=({"kind": "joystick"},)))
    with pytest.raises(ConfigError, match="did you mean 'hold'"):
        build_robot_setup(RobotConfig(name="fake-0", driver="fake", teleoperators=({"kind": "keyboard", "hodl": "w"},)))
