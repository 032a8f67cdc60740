"""Control authority: take-over, input timeout, hand-back, e-stop, one operator at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from wait_kit import Clock

from hal.errors import SpecError
from hal.robot import Observation
from hal.safety import SafetyKernel
from hal.spec import STATE, ArraySpec, RobotSpec, SafetyLimits
from hal.teleoperator import TeleopInput
from user_sys.edge.control_authority import CONTROL_REQUEST_S, INPUT_TIMEOUT_S, ControlAuthority, ControlState
from user_sys.episode import Phase
from user_sys.errors import AuthorityError
from user_sys.messages import OperatorCommand, OperatorReply

SPEC = RobotSpec(
    model="bench-arm",
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


class AuthorityBench:
    """A control authority and its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.authority = ControlAuthority("panda-0", SPEC, self.clock)
        self.sequence = 0

    def order(self, operator: str, order: Any, twist: tuple[float, ...] = (), robot: str = "panda-0") -> OperatorReply:
        self.sequence += 1
        command = OperatorCommand(robot=robot, operator=operator, order=order, twist=twist, sequence=self.sequence)
        return self.authority.apply(command)

    def wait(self, seconds: float) -> ControlState:
        self.clock.now_s += seconds
        return self.authority.update()


@pytest.fixture
def bench() -> AuthorityBench:
    return AuthorityBench()


def test_operator_takes_over_drives_and_hands_back(bench: AuthorityBench) -> None:
    assert bench.authority.phase is Phase.POLICY
    assert bench.order("alice", "take-over").accepted
    assert bench.order("alice", "drive", (1.0, -0.5, 0.0, 0.0)).accepted
    assert (bench.authority.state, bench.authority.operator) == (ControlState.HUMAN, "alice")
    np.testing.assert_array_equal(bench.authority.twist(), np.array([1.0, -0.5, 0.0, 0.0], np.float32))
    assert bench.order("alice", "hand-back").accepted
    assert (bench.authority.state, bench.authority.operator) == (ControlState.POLICY, "")
    assert not bench.authority.twist().any()


def test_second_operator_is_refused_with_the_drivers_name(bench: AuthorityBench) -> None:
    bench.order("alice", "take-over")
    for order in ("take-over", "hand-back", "success", "reset"):
        reply = bench.order("bob", order)
        assert not reply.accepted and "alice" in reply.reason
    assert not bench.order("bob", "drive", (1.0, 0.0, 0.0, 0.0)).accepted
    assert bench.authority.operator == "alice" and not bench.authority.twist().any()
    assert bench.authority.take_label() is None and not bench.authority.take_reset_request()


def test_input_timeout_holds_until_a_new_take_over(bench: AuthorityBench) -> None:
    bench.order("alice", "take-over")
    bench.order("alice", "drive", (1.0, 0.0, 0.0, -1.0))
    assert bench.wait(0.9 * INPUT_TIMEOUT_S) is ControlState.HUMAN
    assert bench.wait(0.2 * INPUT_TIMEOUT_S) is ControlState.HOLD
    np.testing.assert_array_equal(bench.authority.twist(), np.array([0, 0, 0, -1], np.float32))  # the grip stays
    assert "take over" in bench.order("alice", "drive", (1.0, 0.0, 0.0, 0.0)).reason
    assert bench.order("alice", "take-over").accepted and bench.authority.state is ControlState.HUMAN


def test_expired_input_moves_nothing(bench: AuthorityBench) -> None:
    """The last control period with the input ends within 0.2 s of it."""
    bench.order("alice", "take-over")
    bench.order("alice", "drive", (1.0, 0.0, 0.0, -1.0))
    bench.wait(0.9 * (0.2 - SPEC.period_s))
    assert bench.authority.twist()[0] == 1.0
    bench.wait(0.2 * (0.2 - SPEC.period_s))
    assert bench.authority.twist()[0] == 0.0 and bench.authority.twist()[3] == -1.0  # the grip stays
    assert bench.authority.state is ControlState.HUMAN
    bench.order("alice", "drive", (1.0, 0.0, 0.0, -1.0))
    assert bench.authority.twist()[0] == 1.0


def test_new_input_after_a_busy_loop_is_no_timeout(bench: AuthorityBench) -> None:
    bench.order("alice", "take-over")
    bench.clock.now_s += 3.0  # during a reset
    assert bench.order("alice", "drive", (1.0, 0.0, 0.0, -1.0)).accepted
    assert bench.wait(0.0) is ControlState.HUMAN


def test_release_holds_at_once(bench: AuthorityBench) -> None:
    bench.order("alice", "take-over")
    bench.order("alice", "drive", (1.0, 0.0, 0.0, -1.0))
    assert not bench.order("bob", "release").accepted
    assert bench.order("alice", "release").accepted
    assert (bench.authority.state, bench.authority.operator) == (ControlState.HOLD, "alice")
    assert bench.order("alice", "release").accepted and bench.authority.state is ControlState.HOLD


def test_any_operator_takes_over_from_a_hold(bench: AuthorityBench) -> None:
    bench.order("alice", "take-over")
    bench.clock.now_s += INPUT_TIMEOUT_S + 0.1  # the command itself applies the timeout, without an update
    assert bench.order("bob", "take-over").accepted
    assert bench.authority.operator == "bob"
    assert "bob" in bench.order("alice", "drive", (1.0, 0.0, 0.0, 0.0)).reason


def test_consoles_number_their_inputs_independently(bench: AuthorityBench) -> None:
    bench.sequence = 10**18
    bench.order("alice", "take-over")
    bench.order("alice", "hand-back")
    bench.sequence = 5
    assert bench.order("bob", "take-over").accepted
    assert bench.order("bob", "drive", (0.0, 1.0, 0.0, 0.0)).accepted


def test_superseded_input_changes_nothing(bench: AuthorityBench) -> None:
    bench.order("alice", "take-over")
    bench.order("alice", "drive", (0.5, 0.0, 0.0, 0.0))
    bench.sequence -= 1
    assert not bench.order("alice", "drive", (-1.0, 0.0, 0.0, 0.0)).accepted
    assert bench.authority.twist()[0] == 0.5


@pytest.mark.parametrize(
    "twist", [(), (0.0,) * 3, (0.0,) * 5, (1.01, 0.0, 0.0, 0.0), (float("nan"), 0.0, 0.0, 0.0), (float("-inf"),) * 4]
)
def test_invalid_twist_is_refused_and_does_not_extend_the_input(
    bench: AuthorityBench, twist: tuple[float, ...]
) -> None:
    bench.order("alice", "take-over")
    bench.wait(0.4)
    assert not bench.order("alice", "drive", twist).accepted
    assert bench.wait(0.2) is ControlState.HOLD


def test_e_stop_latches_until_a_named_operator_re_arms(bench: AuthorityBench) -> None:
    bench.order("alice", "take-over")
    bench.order("alice", "drive", (1.0, 0.0, 0.0, 0.0))
    bench.order("alice", "reset")
    assert bench.order("bob", "e-stop").accepted  # any operator may press it
    assert bench.authority.state is ControlState.STOPPED and not bench.authority.twist().any()
    for order in ("take-over", "hand-back", "reset"):
        assert "stopped by bob" in bench.order("alice", order).reason
    assert not bench.order("", "re-arm").accepted
    assert bench.order("carol", "re-arm").accepted and bench.authority.state is ControlState.HOLD
    assert bench.authority.operator == ""
    assert not bench.authority.take_reset_request()  # the stop discards it
    assert bench.order("carol", "hand-back").accepted and bench.authority.state is ControlState.POLICY


def test_e_stop_needs_no_name_and_may_be_repeated(bench: AuthorityBench) -> None:
    assert bench.order("", "e-stop").accepted and bench.order("x" * 500, "e-stop").accepted
    assert bench.authority.state is ControlState.STOPPED


def test_stop_by_the_driver_is_latched(bench: AuthorityBench) -> None:
    bench.authority.emergency_stop("driver", cause="button")
    assert "stopped by driver" in bench.order("alice", "take-over").reason


@pytest.mark.parametrize("order", ["hand-back", "re-arm"])
def test_command_that_is_illegal_in_this_state_is_refused(bench: AuthorityBench, order: str) -> None:
    reply = bench.order("alice", order)
    assert not reply.accepted and reply.reason and (reply.operator, reply.order) == ("alice", order)
    assert bench.authority.state is ControlState.POLICY


@pytest.mark.parametrize("operator", ["", "   ", "x" * 65])
def test_command_without_a_name_is_refused(bench: AuthorityBench, operator: str) -> None:
    assert "name" in bench.order(operator, "take-over").reason


def test_twist_becomes_an_action_in_the_robots_units(bench: AuthorityBench) -> None:
    previous = np.array([0.0, 0.0, 0.0, 0.03], np.float32)
    bench.order("alice", "take-over")
    bench.order("alice", "drive", (1.0, -0.5, -1.0, 0.0))
    action = bench.authority.action(previous)
    assert action.dtype == np.float32
    np.testing.assert_allclose(action, [0.02, -0.01, -0.01, 0.03], rtol=1e-6)  # a gripper without input stays
    bench.order("alice", "drive", (0.0, 0.0, 1.0, -1.0))
    np.testing.assert_allclose(bench.authority.action(previous), [0, 0, 0.03, 0.0], rtol=1e-6)
    bench.order("alice", "drive", (0.0, 0.0, 0.0, 1.0))
    bench.wait(1.0)
    np.testing.assert_allclose(bench.authority.action(previous), [0, 0, 0, 0.08], rtol=1e-6)  # held, still open


def test_motion_is_reduced_as_the_safety_kernel_does_it() -> None:
    labels, bounds = ("base.x", "base.yaw", "joint", "lamp"), (0.3, 1.5, 0.1, 1.0)
    spec = RobotSpec(
        model="rover",
        rate_hz=10.0,
        observation=(ArraySpec(name=STATE, labels=("joint",), units=("rad",), low=(-3.0,), high=(3.0,)),),
        action=ArraySpec(
            name="action",
            labels=labels,
            units=("m/s", "rad/s", "rad", "1"),
            low=tuple(-each for each in bounds),
            high=bounds,
        ),
        limits=SafetyLimits(joint_position=(0,), joint_low=(-3.0,), joint_high=(3.0,), reduced_speed=0.3),
        neutral=(0.0,) * 4,
        joint_delta=(2,),
    )
    authority, kernel = ControlAuthority("rover-0", spec), SafetyKernel(spec, clock=lambda: 0)
    kernel.is_speed_reduced = True
    authority.apply_local_input(TeleopInput(np.array([1.0, -0.5, 0.9, 1.0], np.float32), engaged=True))
    action = authority.action(np.zeros(4, np.float32))
    np.testing.assert_allclose(action, [0.09, -0.225, 0.027, 1.0], rtol=1e-6)
    decision = kernel.filter(action, Observation({STATE: np.zeros(1, np.float32)}, 0))
    assert decision.applied is not None and not decision.reasons, decision.text
    np.testing.assert_array_equal(decision.applied, action)


@pytest.mark.parametrize("direction", [(1.0, 0.0, 0.0), (1.0, -1.0, 0.0), (0.31, 1.0, -0.83)])
def test_slanted_drive_makes_its_shares_up_to_the_tools_greatest_speed(direction: tuple[float, ...]) -> None:
    step = tuple([0.01] * 3)
    spec = RobotSpec(
        model="franka",
        rate_hz=20.0,
        observation=(),
        action=ArraySpec(
            name="action", labels=("dx", "dy", "dz"), units=("m",) * 3, low=tuple(-each for each in step), high=step
        ),
        limits=SafetyLimits(tool_speed_max=0.2, reduced_speed=0.25),
        neutral=(0.0,) * 3,
        tool_delta=(0, 1, 2),
    )
    authority, kernel = ControlAuthority("arm-0", spec), SafetyKernel(spec, clock=lambda: 0)
    kernel.is_speed_reduced = True
    for share in (0.1, 0.5, 0.72, 0.9, 1.0):
        twist = share * np.array(direction, np.float32)
        authority.apply_local_input(TeleopInput(twist, engaged=True))
        action = authority.action(np.zeros(3, np.float32))
        expected = 0.0025 * twist / max(1.0, np.linalg.norm(twist))
        np.testing.assert_allclose(action, expected, rtol=1e-5)
        decision = kernel.filter(action, Observation({}, 0))
        assert decision.applied is not None and not decision.reasons, decision.text
        np.testing.assert_array_equal(decision.applied, action)


def test_robot_without_a_neutral_action_raises() -> None:
    spec = RobotSpec(model="walker", rate_hz=10.0, observation=(), action=SPEC.action)
    with pytest.raises(SpecError, match="neutral"):
        ControlAuthority("w", spec).action(np.zeros(4, np.float32))


@pytest.mark.parametrize("accepted", [True, False])
def test_driver_answers_a_request_for_control(bench: AuthorityBench, accepted: bool) -> None:
    assert "take over" in bench.order("bob", "request-control").reason
    bench.order("alice", "take-over")
    assert bench.order("bob", "request-control").accepted and bench.authority.requested_by == "bob"
    assert bench.order("carol", "request-control").reason == "bob requests control already"
    answer = "accept" if accepted else "decline"
    assert not bench.order("bob", answer).accepted
    assert bench.order("alice", answer).accepted and not bench.authority.requested_by
    state = bench.authority.state, bench.authority.operator
    assert state == ((ControlState.HOLD, "bob") if accepted else (ControlState.HUMAN, "alice"))
    assert bench.order("bob", "take-over").accepted is accepted, "the robot stands until then"


def test_request_for_control_ends_with_its_time_or_the_drive(bench: AuthorityBench) -> None:
    bench.order("alice", "take-over")
    bench.order("bob", "request-control")
    for _ in range(int(CONTROL_REQUEST_S / 0.1)):
        bench.wait(0.1)
        assert bench.order("alice", "drive", (0.0,) * 4).accepted
    bench.wait(0.1)
    assert not bench.authority.requested_by
    assert bench.order("alice", "accept").reason == "no operator requests control"
    bench.order("bob", "request-control")
    bench.order("alice", "hand-back")
    assert not bench.authority.requested_by


def test_help_holds_until_a_person_acts_or_its_time_passes(bench: AuthorityBench) -> None:
    bench.authority.request_help("it slipped", wait_s=10.0)
    assert bench.wait(9.9) is ControlState.REQUESTING and bench.authority.help_reason == "it slipped"
    assert not bench.order("bob", "drive", (1.0, 0.0, 0.0, 0.0)).accepted
    assert bench.wait(0.2) is ControlState.POLICY and not bench.authority.help_reason
    bench.authority.request_help("it slipped")
    assert bench.wait(1e6) is ControlState.REQUESTING, "without a limit"
    assert bench.order("bob", "take-over").accepted
    with pytest.raises(AuthorityError, match="no transition from human to requesting"):
        bench.authority.request_help("again")


def test_pause_holds_whoever_drives(bench: AuthorityBench) -> None:
    bench.order("alice", "take-over")
    assert bench.order("ada", "pause").accepted
    assert (bench.authority.state, bench.authority.operator) == (ControlState.HOLD, "ada")
    assert not bench.order("alice", "drive", (1.0, 0.0, 0.0, 0.0)).accepted
    assert bench.order("ada", "pause").reason == "panda-0 holds already"
    bench.order("ada", "e-stop")
    assert "re-arm" in bench.order("ada", "pause").reason


class Operators(RuleBasedStateMachine):
    """Three operators send random commands."""

    people = st.sampled_from(["alice", "bob", "carol"])

    def __init__(self) -> None:
        super().__init__()
        self.bench = AuthorityBench()
        self.driver = ""  # the operator who took over last
        self.heard_s = 0.0

    def order(self, operator: str, order: str, twist: tuple[float, ...] = ()) -> OperatorReply:
        return self.bench.order(operator, order, twist)

    @rule(operator=people)
    def take_over(self, operator: str) -> None:
        silent = self.bench.clock.now_s - self.heard_s > INPUT_TIMEOUT_S
        free = not self.driver or self.driver == operator or silent
        stopped = self.bench.authority.state is ControlState.STOPPED
        reply = self.order(operator, "take-over")
        assert reply.accepted == (free and not stopped)
        if reply.accepted:
            self.driver, self.heard_s = operator, self.bench.clock.now_s

    @rule(operator=people, share=st.floats(-1, 1, width=32))
    def drive(self, operator: str, share: float) -> None:
        before = self.bench.authority.twist()
        reply = self.order(operator, "drive", (share, 0.0, 0.0, 0.0))
        if reply.accepted:
            assert operator == self.driver
            self.heard_s = self.bench.clock.now_s
            assert self.bench.authority.twist()[0] == np.float32(share)
        elif self.bench.authority.state is ControlState.HUMAN:
            np.testing.assert_array_equal(self.bench.authority.twist(), before)

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
        stopped = self.bench.authority.state is ControlState.STOPPED
        assert self.order(operator, "re-arm").accepted == stopped

    @rule(operator=people, order=st.sampled_from(["request-control", "accept", "decline"]))
    def pass_on(self, operator: str, order: str) -> None:
        if self.order(operator, order).accepted and order == "accept":
            assert operator == self.driver and self.bench.authority.state is ControlState.HOLD
            self.driver = ""

    @rule(operator=people)
    def pause(self, operator: str) -> None:
        if self.order(operator, "pause").accepted:
            self.driver = ""

    @precondition(lambda self: self.bench.authority.state is ControlState.POLICY)
    @rule(wait_s=st.sampled_from([0.0, 0.5]))
    def request_help(self, wait_s: float) -> None:
        self.bench.authority.request_help("lost", wait_s)

    @rule(operator=people, order=st.sampled_from(["success", "failure", "reset"]))
    def mark(self, operator: str, order: str) -> None:
        state = self.bench.authority.state
        self.order(operator, order)
        help_ended = {ControlState.POLICY} if state is ControlState.REQUESTING else set()
        assert self.bench.authority.state in {state, ControlState.HOLD} | help_ended

    @rule(seconds=st.floats(0.01, 1.0))
    def time_passes(self, seconds: float) -> None:
        self.bench.wait(seconds)

    @precondition(lambda self: self.bench.authority.state is ControlState.STOPPED)
    @rule(operator=people)
    def nothing_moves_a_stopped_robot(self, operator: str) -> None:
        for order in ("take-over", "hand-back", "reset", "pause", "request-control", "accept"):
            assert not self.order(operator, order).accepted
        assert not self.order(operator, "drive", (1.0, 0.0, 0.0, 0.0)).accepted
        assert self.bench.authority.state is ControlState.STOPPED

    @invariant()
    def one_driver_and_none_while_stopped(self) -> None:
        authority = self.bench.authority
        if authority.state is ControlState.HUMAN:
            assert authority.operator == self.driver
            assert self.bench.clock.now_s - self.heard_s <= INPUT_TIMEOUT_S + 1e-9
        else:
            assert not authority.twist()[:3].any()


TestCrowd = Operators.TestCase
TestCrowd.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
