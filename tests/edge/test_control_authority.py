"""Control authority: take-over, input timeout, hand-back, e-stop, one operator at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hal.errors import SpecError
from hal.spec import ArraySpec, RobotSpec
from user_sys.edge.control_authority import INPUT_TIMEOUT_S, ControlAuthority, ControlState
from user_sys.episode import Phase
from user_sys.errors import AuthorityError
from user_sys.messages import OperatorCommand, OperatorReply

SPEC = RobotSpec(
    model="desk-arm",
    rate_hz=10.0,
    observation=(),
    action=ArraySpec(
        name="action",
        labels=("dx", "dy", "dz", "gripper"),
        units=("m", "m", "m", "m"),
        low=(-0.02, -0.02, -0.01, 0.0),
        high=(0.02, 0.02, 0.03, 0.08),
    ),
    neutral=(0.0, 0.0, 0.0, 0.0),
    tool_delta=(0, 1, 2),
    gripper=3,
)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Desk:
    """A control authority and its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.authority = ControlAuthority("panda-0", SPEC, self.clock, unix_ns=lambda: int(self.clock.now_s * 1e9))
        self.sequence = 0

    def order(self, operator: str, order: Any, twist: tuple[float, ...] = (), robot: str = "panda-0") -> OperatorReply:
        self.sequence += 1
        command = OperatorCommand(robot=robot, operator=operator, order=order, twist=twist, sequence=self.sequence)
        return self.authority.apply(command)

    def wait(self, seconds: float) -> ControlState:
        self.clock.now_s += seconds
        return self.authority.update()


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_operator_takes_over_drives_and_hands_back(desk: Desk) -> None:
    assert desk.authority.phase is Phase.POLICY
    assert desk.order("alice", "take-over").accepted
    assert desk.order("alice", "drive", (1.0, -0.5, 0.0, 0.0)).accepted
    assert (desk.authority.state, desk.authority.operator) == (ControlState.HUMAN, "alice")
    np.testing.assert_array_equal(desk.authority.twist(), np.array([1.0, -0.5, 0.0, 0.0], np.float32))
    assert desk.order("alice", "hand-back").accepted
    assert (desk.authority.state, desk.authority.operator) == (ControlState.POLICY, "")
    assert not desk.authority.twist().any()


def test_audit_records_each_transition(desk: Desk) -> None:
    desk.order("alice", "take-over")
    desk.wait(INPUT_TIMEOUT_S + 0.1)
    desk.order("bob", "hand-back")
    assert [(t.operator, t.cause, t.after) for t in desk.authority.audit] == [
        ("alice", "take-over", ControlState.HUMAN),
        ("alice", "silence", ControlState.HOLD),
        ("bob", "hand-back", ControlState.POLICY),
    ]
    assert desk.authority.audit[0].unix_ns == 100_000_000_000


def test_second_operator_is_refused_with_the_drivers_name(desk: Desk) -> None:
    desk.order("alice", "take-over")
    for order in ("take-over", "hand-back", "success", "reset"):
        reply = desk.order("bob", order)
        assert not reply.accepted and "alice" in reply.reason
    assert not desk.order("bob", "drive", (1.0, 0.0, 0.0, 0.0)).accepted
    assert desk.authority.operator == "alice" and not desk.authority.twist().any()
    assert desk.authority.take_label() is None and not desk.authority.take_reset_request()


def test_input_timeout_holds_until_a_new_take_over(desk: Desk) -> None:
    desk.order("alice", "take-over")
    desk.order("alice", "drive", (1.0, 0.0, 0.0, -1.0))
    assert desk.wait(0.9 * INPUT_TIMEOUT_S) is ControlState.HUMAN
    assert desk.wait(0.2 * INPUT_TIMEOUT_S) is ControlState.HOLD
    np.testing.assert_array_equal(desk.authority.twist(), np.array([0, 0, 0, -1], np.float32))  # the grip stays
    assert "take over" in desk.order("alice", "drive", (1.0, 0.0, 0.0, 0.0)).reason
    assert desk.order("alice", "take-over").accepted and desk.authority.state is ControlState.HUMAN


def test_expired_input_moves_nothing(desk: Desk) -> None:
    """The last control period with the input ends within 0.2 s of it."""
    desk.order("alice", "take-over")
    desk.order("alice", "drive", (1.0, 0.0, 0.0, -1.0))
    desk.wait(0.9 * (0.2 - SPEC.period_s))
    assert desk.authority.twist()[0] == 1.0
    desk.wait(0.2 * (0.2 - SPEC.period_s))
    assert desk.authority.twist()[0] == 0.0 and desk.authority.twist()[3] == -1.0  # the grip stays
    assert desk.authority.state is ControlState.HUMAN
    desk.order("alice", "drive", (1.0, 0.0, 0.0, -1.0))
    assert desk.authority.twist()[0] == 1.0


def test_new_input_after_a_busy_loop_is_no_timeout(desk: Desk) -> None:
    desk.order("alice", "take-over")
    desk.clock.now_s += 3.0  # during a reset
    assert desk.order("alice", "drive", (1.0, 0.0, 0.0, -1.0)).accepted
    assert desk.wait(0.0) is ControlState.HUMAN


def test_release_holds_at_once(desk: Desk) -> None:
    desk.order("alice", "take-over")
    desk.order("alice", "drive", (1.0, 0.0, 0.0, -1.0))
    assert not desk.order("bob", "release").accepted
    assert desk.order("alice", "release").accepted
    assert (desk.authority.state, desk.authority.operator) == (ControlState.HOLD, "alice")
    assert desk.order("alice", "release").accepted and desk.authority.state is ControlState.HOLD


def test_any_operator_takes_over_from_a_hold(desk: Desk) -> None:
    desk.order("alice", "take-over")
    desk.clock.now_s += INPUT_TIMEOUT_S + 0.1  # the command itself applies the timeout, without an update
    assert desk.order("bob", "take-over").accepted
    assert desk.authority.operator == "bob"
    assert "bob" in desk.order("alice", "drive", (1.0, 0.0, 0.0, 0.0)).reason


def test_consoles_number_their_inputs_independently(desk: Desk) -> None:
    desk.sequence = 10**18
    desk.order("alice", "take-over")
    desk.order("alice", "hand-back")
    desk.sequence = 5
    assert desk.order("bob", "take-over").accepted
    assert desk.order("bob", "drive", (0.0, 1.0, 0.0, 0.0)).accepted


def test_superseded_input_changes_nothing(desk: Desk) -> None:
    desk.order("alice", "take-over")
    desk.order("alice", "drive", (0.5, 0.0, 0.0, 0.0))
    desk.sequence -= 1
    assert not desk.order("alice", "drive", (-1.0, 0.0, 0.0, 0.0)).accepted
    assert desk.authority.twist()[0] == 0.5


@pytest.mark.parametrize(
    "twist", [(), (0.0,) * 3, (0.0,) * 5, (1.01, 0.0, 0.0, 0.0), (float("nan"), 0.0, 0.0, 0.0), (float("-inf"),) * 4]
)
def test_invalid_twist_is_refused_and_does_not_extend_the_input(desk: Desk, twist: tuple[float, ...]) -> None:
    desk.order("alice", "take-over")
    desk.wait(0.4)
    assert not desk.order("alice", "drive", twist).accepted
    assert desk.wait(0.2) is ControlState.HOLD


def test_e_stop_latches_until_a_named_operator_re_arms(desk: Desk) -> None:
    desk.order("alice", "take-over")
    desk.order("alice", "drive", (1.0, 0.0, 0.0, 0.0))
    desk.order("alice", "reset")
    assert desk.order("bob", "e-stop").accepted  # any operator may press it
    assert desk.authority.state is ControlState.STOPPED and not desk.authority.twist().any()
    for order in ("take-over", "hand-back", "reset"):
        assert "stopped by bob" in desk.order("alice", order).reason
    assert not desk.order("", "re-arm").accepted
    assert desk.order("carol", "re-arm").accepted and desk.authority.state is ControlState.HOLD
    assert desk.authority.operator == "" and desk.authority.audit[-1].operator == "carol"
    assert not desk.authority.take_reset_request()  # the stop discards it
    assert desk.order("carol", "hand-back").accepted and desk.authority.state is ControlState.POLICY


def test_e_stop_needs_no_name_and_may_be_repeated(desk: Desk) -> None:
    assert desk.order("", "e-stop").accepted and desk.order("x" * 500, "e-stop").accepted
    assert len(desk.authority.audit) == 1


def test_stop_by_the_driver_is_latched(desk: Desk) -> None:
    desk.authority.emergency_stop("driver", cause="button")
    assert desk.authority.audit[-1].cause == "button"
    assert "stopped by driver" in desk.order("alice", "take-over").reason


@pytest.mark.parametrize("order", ["hand-back", "re-arm"])
def test_command_that_is_illegal_in_this_state_is_refused(desk: Desk, order: str) -> None:
    reply = desk.order("alice", order)
    assert not reply.accepted and reply.reason and (reply.operator, reply.order) == ("alice", order)
    assert desk.authority.state is ControlState.POLICY


@pytest.mark.parametrize("operator", ["", "   ", "x" * 65])
def test_command_without_a_name_is_refused(desk: Desk, operator: str) -> None:
    assert "name" in desk.order(operator, "take-over").reason


def test_command_for_another_robot_is_refused(desk: Desk) -> None:
    assert not desk.order("alice", "e-stop", robot="panda-1").accepted
    assert desk.authority.state is ControlState.POLICY


def test_label_and_reset_request_are_taken_once(desk: Desk) -> None:
    desk.order("alice", "failure")
    desk.order("bob", "success")
    mark = desk.authority.take_label()
    assert mark is not None and mark.success and mark.operator == "bob"
    assert desk.authority.take_label() is None
    desk.order("bob", "reset")
    assert desk.authority.take_reset_request() and not desk.authority.take_reset_request()


def test_label_is_discarded_at_the_next_episode(desk: Desk) -> None:
    desk.order("alice", "success")
    desk.order("alice", "reset")
    desk.authority.begin_episode()
    assert desk.authority.take_label() is None and not desk.authority.take_reset_request()


def test_phase_is_correction_or_teleop(desk: Desk) -> None:
    desk.authority.begin_episode()
    desk.order("alice", "take-over")
    assert desk.authority.phase is Phase.CORRECTION
    desk.authority.begin_episode()  # she keeps the robot across a reset
    assert desk.authority.phase is Phase.TELEOP
    desk.order("alice", "hand-back")
    assert desk.authority.phase is Phase.POLICY
    desk.order("alice", "take-over")
    assert desk.authority.phase is Phase.CORRECTION


def test_twist_becomes_an_action_in_the_robots_units(desk: Desk) -> None:
    previous = np.array([0.0, 0.0, 0.0, 0.03], np.float32)
    desk.order("alice", "take-over")
    desk.order("alice", "drive", (1.0, -0.5, -1.0, 0.0))
    action = desk.authority.action(previous)
    assert action.dtype == np.float32
    np.testing.assert_allclose(action, [0.02, -0.01, -0.01, 0.03], rtol=1e-6)  # a gripper without input stays
    desk.order("alice", "drive", (0.0, 0.0, 1.0, -1.0))
    np.testing.assert_allclose(desk.authority.action(previous), [0, 0, 0.03, 0.0], rtol=1e-6)
    desk.order("alice", "drive", (0.0, 0.0, 0.0, 1.0))
    desk.wait(1.0)
    np.testing.assert_allclose(desk.authority.action(previous), [0, 0, 0, 0.08], rtol=1e-6)  # held, still open


def test_robot_without_a_neutral_action_raises() -> None:
    spec = RobotSpec(model="walker", rate_hz=10.0, observation=(), action=SPEC.action)
    with pytest.raises(SpecError, match="neutral"):
        ControlAuthority("w", spec).action(np.zeros(4, np.float32))


def test_illegal_transition_raises(desk: Desk) -> None:
    with pytest.raises(AuthorityError, match="policy to hold"):
        desk.authority._move(ControlState.HOLD, "alice", "test")


class Crowd(RuleBasedStateMachine):
    """Three operators send random commands."""

    people = st.sampled_from(["alice", "bob", "carol"])

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk()
        self.driver = ""  # the operator who took over last
        self.heard_s = 0.0

    def order(self, operator: str, order: str, twist: tuple[float, ...] = ()) -> OperatorReply:
        return self.desk.order(operator, order, twist)

    @rule(operator=people)
    def take_over(self, operator: str) -> None:
        silent = self.desk.clock.now_s - self.heard_s > INPUT_TIMEOUT_S
        free = not self.driver or self.driver == operator or silent
        stopped = self.desk.authority.state is ControlState.STOPPED
        reply = self.order(operator, "take-over")
        assert reply.accepted == (free and not stopped)
        if reply.accepted:
            self.driver, self.heard_s = operator, self.desk.clock.now_s

    @rule(operator=people, share=st.floats(-1, 1, width=32))
    def drive(self, operator: str, share: float) -> None:
        before = self.desk.authority.twist()
        reply = self.order(operator, "drive", (share, 0.0, 0.0, 0.0))
        if reply.accepted:
            assert operator == self.driver
            self.heard_s = self.desk.clock.now_s
            assert self.desk.authority.twist()[0] == np.float32(share)
        elif self.desk.authority.state is ControlState.HUMAN:
            np.testing.assert_array_equal(self.desk.authority.twist(), before)

    @rule(operator=people)
    def hand_back(self, operator: str) -> None:
        if self.order(operator, "hand-back").accepted:
            self.driver = ""

    @rule(operator=people)
    def stop(self, operator: str) -> None:
        assert self.order(operator, "e-stop").accepted
        self.driver = ""

    @rule(operator=people)
    def re_arm(self, operator: str) -> None:
        stopped = self.desk.authority.state is ControlState.STOPPED
        assert self.order(operator, "re-arm").accepted == stopped

    @rule(operator=people, order=st.sampled_from(["success", "failure", "reset"]))
    def mark(self, operator: str, order: str) -> None:
        state = self.desk.authority.state
        self.order(operator, order)
        assert self.desk.authority.state in (state, ControlState.HOLD)

    @rule(seconds=st.floats(0.01, 1.0))
    def time_passes(self, seconds: float) -> None:
        self.desk.wait(seconds)

    @precondition(lambda self: self.desk.authority.state is ControlState.STOPPED)
    @rule(operator=people)
    def nothing_moves_a_stopped_robot(self, operator: str) -> None:
        for order in ("take-over", "hand-back", "reset"):
            assert not self.order(operator, order).accepted
        assert not self.order(operator, "drive", (1.0, 0.0, 0.0, 0.0)).accepted
        assert self.desk.authority.state is ControlState.STOPPED

    @invariant()
    def one_driver_and_none_while_stopped(self) -> None:
        authority = self.desk.authority
        if authority.state is ControlState.HUMAN:
            assert authority.operator == self.driver
            assert self.desk.clock.now_s - self.heard_s <= INPUT_TIMEOUT_S + 1e-9
        else:
            assert not authority.twist()[:3].any()

    @invariant()
    def the_audit_is_one_unbroken_path(self) -> None:
        audit = list(self.desk.authority.audit)
        assert all(a.after == b.before for a, b in zip(audit, audit[1:], strict=False))
        assert (audit[-1].after if audit else ControlState.POLICY) == self.desk.authority.state


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
