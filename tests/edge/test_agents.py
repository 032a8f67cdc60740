"""Agents: action chunks of a policy, and operators who take over, label and stop."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as dataclass_replace
from typing import Any

import numpy as np
import pytest
from edge_kit import RecordingRobot
from msgspec.structs import replace

from hal.errors import HalError, HardwareLost
from hal.robot import Robot, StopLevel
from hal.safety import SafetyKernel
from hal.spec import ACTION, STATE, Array, ArraySpec, RobotSpec, SafetyLimits
from hal.teleoperator import TeleopInput
from robots.fake import GRIPPER_M, STEP_M, FakeRobot, FakeRobotConfig, FakeTask
from user_sys.compose import RobotConfig
from user_sys.edge import agents
from user_sys.edge.agents import (
    GRIPPER_SETTLE_STEPS,
    MAX_PENDING_COMMANDS,
    OperatorCommandQueue,
    PolicyAgent,
    SharedControlAgent,
    TravelledPath,
)
from user_sys.edge.control_authority import INPUT_TIMEOUT_S, MAX_ORDER_AGE_S, ControlAuthority, ControlState
from user_sys.edge.environment import NO_OUTCOME, RobotEnvironment, TaskInfo, TimeStep
from user_sys.edge.help_requests import HelpConfig, InterventionConfig
from user_sys.edge.loop import run_episode
from user_sys.edge.recorder import Recorder, SelectedAction, StepOutcome
from user_sys.episode import EpisodeSource, Phase
from user_sys.errors import PolicyUnavailable
from user_sys.logs import JsonFormatter
from user_sys.messages import EpisodeReport, OperatorCommand, OperatorReply
from user_sys.policies.policy import ActionChunk, ExecutionConfig, PolicyQuery

TASK = TaskInfo(name="reach", sentence="go", max_steps=50)
LENGTH = 3
REDUCED_M = STEP_M * FakeRobot().spec.limits.reduced_speed  # an operator's greatest step
FAR = 0.01  # step along x: the version times this, plus a tenth of it for each step in the chunk


class MarchingPolicy:
    """An `UpdatingPolicy` that acts in chunks of three steps along x. The step size identifies version and step.

    Attributes:
        version: the acting version; 0 awaits weights.
        why: why it is unavailable; empty if it is not.
        cameras: that it reads.
        seen: its newest observation.
        spoiled: the step along y that the last action of a chunk has.
        sways: each chunk moves to the other side than the one before, and one action of it is executed.
    """

    def __init__(self, version: int = 1) -> None:
        self.version, self.why = version, ""
        self.cameras, self.seen = tuple[str, ...](), dict[str, Array]()
        self.spoiled, self.sways = 0.0, False
        self.calls = self.pauses = self.episodes = 0

    @property
    def awaits_weights(self) -> bool:
        return self.version == 0

    def begin_episode(self) -> None:
        self.episodes += 1

    def pause(self) -> None:
        self.pauses += 1

    def act(self, query: PolicyQuery) -> ActionChunk:
        if self.why or self.awaits_weights:
            raise PolicyUnavailable(self.why or "waiting for weights")
        self.calls += 1
        self.seen = dict(query.observation)
        actions = np.zeros((LENGTH, 4), np.float32)
        actions[:, 0] = self.version * FAR + FAR / 10 * np.arange(LENGTH)
        actions[:, 3] = GRIPPER_M
        actions[-1, 1] = self.spoiled
        if self.sways:
            actions[:, 1] = STEP_M * (-1) ** self.calls
        return ActionChunk(actions, -np.arange(LENGTH, dtype=np.float32), execute=int(self.sways))


@dataclass
class Session:
    """A fake robot, its agent and its operators, with a clock that the test advances."""

    robot: RecordingRobot
    environment: RobotEnvironment
    policy: MarchingPolicy
    max_steps: int = 50
    intervention: InterventionConfig | None = None
    execution: ExecutionConfig | None = None
    now_s: float = 100.0
    stopping: bool = False
    newest_estop: int = 0  # the driver's
    rearm_error: HalError | None = None  # of the driver
    episode: str = ""
    sequence: int = 0
    steps: int = 0
    replies: list[OperatorReply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.authority = ControlAuthority("fake-0", self.robot.spec, clock=lambda: self.now_s)
        self.commands = OperatorCommandQueue(lambda: self.now_s, self.send_reply)
        self.agent = SharedControlAgent(
            self.robot.spec, self.authority, self.policy, self.commands, self, self.intervention, self.execution
        )
        self.begin()

    def send_reply(self, reply: OperatorReply) -> None:
        self.replies.append(reply)

    def rearm(self, person: str, estop_sequence: int) -> bool:
        if self.rearm_error:
            raise self.rearm_error
        if estop_sequence < self.newest_estop:
            return False
        self.environment.kernel.rearm(person)
        return True

    def is_stopping(self) -> bool:
        return self.stopping

    def has_lease(self) -> bool:
        return True

    def set_driver_mode(self, *, suspended: bool, policy_error: str) -> None:
        self.environment.kernel.is_speed_reduced = suspended

    def begin(self) -> None:
        self.time_step: TimeStep = self.environment.reset(seed=0)
        self.steps = 0
        self.agent.begin_episode(self.time_step, replace(TASK, max_steps=self.max_steps))

    def order(self, order: Any, twist: tuple[float, ...] = (), operator: str = "ada", **more: Any) -> None:
        """`more`: of the command."""
        self.sequence += 1
        command = OperatorCommand(
            robot="fake-0", operator=operator, order=order, twist=twist, sequence=self.sequence, **more
        )
        self.commands.submit(command)

    def period(self) -> tuple[SelectedAction | None, StepOutcome | None]:
        """One control period, as in the episode loop."""
        selected = self.agent.select_action(self.time_step)
        if selected is None:
            self.time_step = self.environment.hold()
            return None, None
        self.time_step = self.environment.step(selected.action)
        self.steps += 1
        return selected, self.agent.evaluate_step(self.time_step, self.steps)

    def act(self) -> SelectedAction:
        """One control period in which an action must be selected."""
        selected, _ = self.period()
        assert selected is not None
        return selected


@pytest.fixture
def make() -> Callable[..., Session]:
    def session(max_steps: int = 50, version: int = 1, **settings: Any) -> Session:
        robot = RecordingRobot()
        environment = RobotEnvironment(robot, FakeTask(radius_m=1e-9), SafetyKernel(robot.spec))
        environment.connect()
        return Session(robot, environment, MarchingPolicy(version), max_steps, **settings)

    return session


@pytest.fixture
def session(make: Callable[..., Session]) -> Session:
    return make()


def test_new_weights_wait_for_the_end_of_a_chunk(session: Session) -> None:
    first = session.act()
    session.policy.version = 2
    actions = [first, *(session.act() for _ in range(5))]
    assert [d.policy_version for d in actions] == [1, 1, 1, 2, 2, 2]
    np.testing.assert_allclose([d.action[0] / FAR for d in actions], [1.0, 1.1, 1.2, 2.0, 2.1, 2.2], rtol=1e-5)
    assert [d.log_prob for d in actions] == [0.0, -1.0, -2.0] * 2
    assert {d.phase for d in actions} == {Phase.POLICY}


def test_lines_of_an_order_have_its_id(session: Session) -> None:
    lines: list[dict[str, str]] = []
    handler, logger = logging.StreamHandler(), logging.getLogger("user_sys.edge.control_authority")
    formatter = JsonFormatter({"robot": "fake-0"})
    handler.emit = lambda record: lines.append(json.loads(formatter.format(record)))  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        session.order("take-over")
        session.order("hand-back", operator="bob")
        session.period()
        session.authority.emergency_stop("eve")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert [(line["message"].split()[0], line.get("order")) for line in lines] == [
        ("authority.changed", "ada/1"),
        ("authority.refused", "bob/2"),
        ("authority.changed", None),
    ]


def test_new_episode_discards_the_chunk() -> None:
    policy = MarchingPolicy(version=7)
    time_step = TimeStep({STATE: np.zeros(7, np.float32)}, {}, 0, None, 0, 0, NO_OUTCOME, 0, False)
    agent = PolicyAgent(policy, FakeRobot().spec, deterministic=True)
    for _ in range(2):
        agent.begin_episode(time_step, TASK)
        selected = agent.select_action(time_step)
        assert selected is not None and selected.log_prob == 0.0 and selected.policy_version == 7
    assert policy.calls == 2


def test_action_that_is_not_finite_holds_the_robot_and_is_no_step(session: Session) -> None:
    session.act()
    session.policy.version, session.policy.spoiled = 2, np.inf
    for _ in range(LENGTH - 1):
        session.act()  # the rest of the chunk
    commands = len(session.robot.commands)
    assert session.period() == (None, None) and len(session.robot.commands) == commands
    assert session.agent.policy_error == "version 2 of the policy gives an action in which dy is inf; the robot holds"
    session.policy.spoiled = 0.0
    assert session.act().policy_version == 2 and session.agent.policy_error == ""


def test_take_over_is_a_correction_and_hand_back_starts_a_chunk(session: Session) -> None:
    session.act()
    session.order("take-over")
    session.order("drive", (0.5, 0, 0, 0))
    corrected = session.act()
    assert (corrected.phase, corrected.policy_version) == (Phase.CORRECTION, -1)
    np.testing.assert_allclose(corrected.action, [REDUCED_M / 2, 0, 0, GRIPPER_M], rtol=1e-6)
    assert np.isnan(corrected.log_prob)
    session.order("hand-back")
    again = session.act()
    assert again.phase is Phase.POLICY and again.log_prob == 0.0  # a new chunk, as the operator has moved the robot
    assert [reply.order for reply in session.replies] == ["take-over", "hand-back"]
    assert all(reply.accepted for reply in session.replies)


def test_unavailable_policy_holds_the_robot_without_using_up_steps(
    make: Callable[..., Session],
) -> None:
    session = make(max_steps=4)
    assert session.act().policy_version == 1
    session.policy.why = "it does not answer"
    rest_of_chunk = [session.act().log_prob for _ in range(2)]
    assert rest_of_chunk == [-1.0, -2.0]
    for _ in range(9):
        assert session.period() == (None, None)
    assert session.agent.policy_error == "it does not answer" and session.authority.state is ControlState.POLICY
    session.policy.why = ""
    selected, outcome = session.period()
    assert selected is not None and selected.log_prob == 0.0 and selected.policy_version == 1
    assert outcome is not None and outcome.truncated and session.agent.policy_error == ""  # its fourth step


def test_hold_for_a_counted_delay_is_no_error_of_the_policy(make: Callable[..., Session]) -> None:
    session = make(execution=ExecutionConfig(mode="async", delay_periods=1))
    for _ in range(2):
        assert session.period() == (None, None) and session.agent.policy_error == ""
        assert session.act().policy_version == 1
        session.begin()
    session.policy.why = "it does not answer"
    session.period()
    assert session.period() == (None, None) and session.agent.policy_error == "it does not answer"


def test_operator_takes_over_from_an_unavailable_policy(session: Session) -> None:
    for _ in range(3):
        session.act()
    session.policy.why = "it does not answer"
    assert session.period() == (None, None) and session.agent.policy_error
    session.order("take-over")
    session.order("drive", (0.5, 0, 0, 0))
    assert session.act().phase is Phase.CORRECTION and not session.agent.policy_error
    session.order("hand-back")
    assert session.period() == (None, None) and session.agent.policy_error
    session.environment.kernel.emergency_stop("ada")
    session.order("e-stop")
    assert (
        session.period() == (None, None)
        and session.authority.state is ControlState.STOPPED
        and not session.agent.policy_error
    )


def test_episode_begun_by_an_operator_is_teleoperation(session: Session) -> None:
    session.order("take-over")
    session.period()
    session.begin()
    session.order("drive", (0, 1, 0, 0))
    assert session.act().phase is Phase.TELEOP
    session.order("hand-back")
    assert session.act().phase is Phase.POLICY
    session.order("take-over")
    session.order("drive", (0, 1, 0, 0))
    assert session.act().phase is Phase.CORRECTION


@pytest.mark.parametrize("order", ["success", "failure", "reset"])
@pytest.mark.parametrize("before", ["pause", "e-stop, re-arm", "correction", "help"])
def test_step_of_a_label_while_nobody_drives_is_no_correction(session: Session, before: str, order: str) -> None:
    session.act()
    if before == "correction":
        session.order("take-over")
        session.order("drive", (0.5, 0, 0, 0))
        assert session.act().phase is Phase.CORRECTION
        session.now_s += 2 * INPUT_TIMEOUT_S
    elif before == "help":
        session.authority.request_help("stuck")
    else:
        for each in before.split(", "):
            session.order(each)
    assert session.period() == (None, None) and session.authority.state is not ControlState.HUMAN
    session.order(order)
    selected, outcome = session.period()
    assert selected is not None and outcome is not None and outcome.is_last
    assert (selected.phase, selected.policy_version) == (Phase.POLICY, -1) and np.isnan(selected.log_prob)


def test_step_of_a_label_is_of_the_person_who_drives_or_has_driven_from_the_start(session: Session) -> None:
    session.act()
    session.order("take-over")
    session.order("success")
    assert session.act().phase is Phase.CORRECTION
    for drives, phase in ((True, Phase.TELEOP), (False, Phase.POLICY)):
        session.begin()
        if drives:
            session.order("drive", (0, 1, 0, 0))
            assert session.act().phase is Phase.TELEOP
        session.now_s += 2 * INPUT_TIMEOUT_S
        assert session.period() == (None, None) and session.authority.state is ControlState.HOLD
        session.order("success")
        assert session.act().phase is phase
        session.order("take-over")


def test_speed_is_reduced_from_the_first_period_of_a_take_over(session: Session) -> None:
    session.act()
    session.order("take-over")
    session.order("drive", (1.0, 0, 0, 0))
    session.act()
    assert session.time_step.applied is not None
    share = session.robot.spec.limits.reduced_speed
    assert session.time_step.applied[0] == pytest.approx(STEP_M * share) and share < 1
    session.order("hand-back")
    session.act()
    assert not session.environment.kernel.is_speed_reduced


@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
def test_reduced_speed_keeps_an_operators_direction_and_share(session: Session, share: float) -> None:
    session.order("take-over")
    session.order("drive", (share, -share / 2, 0, 0))
    requested = session.act().action
    np.testing.assert_array_equal(session.time_step.applied, requested)
    np.testing.assert_allclose(requested[:3], [share * REDUCED_M, -share / 2 * REDUCED_M, 0], rtol=1e-6)


def test_robot_outside_of_an_episode_awaits_the_person_who_has_it(session: Session) -> None:
    def waits(*orders: str) -> bool:
        for order in orders:
            session.order(order)
        return session.agent.awaits_person(session.environment.hold())

    assert not waits() and waits("pause") and waits() and waits("take-over") and not waits("hand-back")
    assert waits("pause") and not waits("reset")
    session.begin()
    assert waits(), "the reset is done, and the robot holds still"
    session.begin()
    session.order("reset")
    session.act()
    assert waits(), "a reset from before an error"


@pytest.mark.parametrize(("age_s", "accepted"), [(MAX_ORDER_AGE_S - 0.1, True), (MAX_ORDER_AGE_S + 0.1, False)])
@pytest.mark.parametrize("order", ["hand-back", "reset", "re-arm"])
def test_order_that_lets_the_robot_move_is_refused_if_it_waited_too_long(
    session: Session, order: Any, age_s: float, accepted: bool
) -> None:
    before = ControlState.STOPPED if order == "re-arm" else ControlState.HOLD
    session.order("e-stop" if order == "re-arm" else "pause")
    session.agent.awaits_person(session.environment.hold())
    session.order(order)
    session.now_s += age_s
    moves = not session.agent.awaits_person(session.environment.hold())
    assert session.replies[-1].accepted is accepted
    if not accepted:
        assert not moves and session.authority.state is before
        assert session.replies[-1].reason == "it waited too long; give it again if it still applies"


@pytest.mark.parametrize("order", ["pause", "take-over"])
def test_order_towards_a_hold_takes_effect_however_late(session: Session, order: Any) -> None:
    session.act()
    session.order(order)
    session.now_s += 600.0  # of a reset
    session.begin()
    assert session.replies[-1].accepted and session.agent.is_policy_suspended


def test_session_that_cannot_move_its_robot_answers_orders(session: Session) -> None:
    session.order("pause")
    session.agent.answer_orders("the robot is lost")
    assert session.replies[-1].accepted and session.authority.state is ControlState.HOLD
    for order in ("hand-back", "reset", "re-arm"):
        session.order(order)
        session.agent.answer_orders("the robot is lost")
        assert not session.replies[-1].accepted and session.replies[-1].reason == "the robot is lost"
    session.order("success")
    session.agent.answer_orders("the robot is lost")
    assert not session.replies[-1].accepted and "no episode runs" in session.replies[-1].reason
    assert session.agent.awaits_person(session.environment.hold()), "it holds when it can be reached again"


def test_weights_are_swapped_while_a_person_has_the_robot_outside_of_an_episode(session: Session) -> None:
    session.agent.awaits_person(session.environment.hold())
    assert session.policy.pauses == 0
    session.order("pause")
    session.agent.awaits_person(session.environment.hold())
    assert session.policy.pauses == 1


def test_zero_input_holds_the_robot_and_is_no_step(session: Session) -> None:
    session.order("take-over")
    for _ in range(3):
        session.order("drive", (0, 0, 0, 0))
        assert session.period() == (None, None)
    assert session.robot.commands == [] and session.robot.stops == [StopLevel.HOLD] * 3
    session.order("drive", (0, 0, -1, 0))
    assert session.act().action[2] == np.float32(-REDUCED_M)


def test_closing_gripper_is_recorded_while_it_settles(session: Session) -> None:
    session.order("take-over")
    session.order("drive", (0, 0, 0, -1))
    actions = [session.period()[0] for _ in range(GRIPPER_SETTLE_STEPS + 3)]
    assert [d is not None for d in actions] == [True] * (GRIPPER_SETTLE_STEPS + 1) + [False] * 2
    assert all(d.action[3] == 0 for d in actions if d)


def test_take_over_after_a_reset_keeps_a_closed_gripper(session: Session) -> None:
    session.order("take-over")
    session.order("drive", (0, 0, 0, -1))
    session.act()
    session.order("release")
    session.period()
    session.begin()
    session.order("take-over")
    session.order("drive", (0.1, 0, 0, 0))
    assert session.act().action[3] == 0


class LeavingTask(FakeTask):
    """Its reset leaves the robot as it is."""

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        pass


@pytest.mark.parametrize("is_taken_over", [True, False])
def test_first_action_of_a_session_keeps_the_measured_grip(is_taken_over: bool) -> None:
    robot = RecordingRobot()
    environment = RobotEnvironment(robot, LeavingTask(), SafetyKernel(robot.spec))
    environment.connect()
    environment.step(np.array([0, 0, 0, 0.02], np.float32))
    session = Session(robot, environment, MarchingPolicy(version=0))
    if is_taken_over:
        session.order("take-over")
        session.order("drive", (0.1, 0, 0, 0))
    else:
        session.stopping = True
    assert session.act().action[3] == np.float32(0.02) < GRIPPER_M


@pytest.mark.parametrize("order", ["success", "failure"])
def test_label_of_an_episode_that_has_ended_leaves_the_next_one_alone(session: Session, order: Any) -> None:
    session.episode = "first"
    session.act()
    session.order(order, episode="first")
    assert session.period()[1] is not None and session.replies[-1].accepted
    session.begin()
    session.episode = "second"
    session.order(order, episode="first")  # the second click of a double click
    _, outcome = session.period()
    assert outcome is not None and not outcome.is_last
    assert session.replies[-1].reason == "its episode has ended; label it on the Episodes page"
    session.order(order)
    _, outcome = session.period()
    assert outcome is not None and outcome.is_last


@pytest.mark.parametrize("order", ["success", "failure"])
def test_label_ends_the_episode_with_one_neutral_step(session: Session, order: Any) -> None:
    session.act()
    session.order("take-over")
    session.order("drive", (1, 0, 0, -1))
    session.act()
    session.order(order)
    selected, outcome = session.period()
    assert selected is not None and outcome == StepOutcome(
        reward=float(order == "success"),
        terminated=True,
        truncated=False,
        success=order == "success",
        source="person",
    )
    np.testing.assert_array_equal(selected.action, [0, 0, 0, 0])  # except for the gripper, which stays closed
    session.begin()
    session.order("drive", (1, 0, 0, 0))
    assert session.period()[1] is not None and not session.period()[1].is_last  # type: ignore[union-attr]


@pytest.mark.parametrize("order", ["success", "failure", "reset"])
def test_label_that_was_given_during_a_reset_ends_no_episode(session: Session, order: Any) -> None:
    session.act()
    session.order(order)
    session.begin()
    assert session.replies[-1].accepted is (order == "reset")
    _, outcome = session.period()
    assert outcome is not None and not outcome.is_last


def test_reset_truncates_the_episode_without_a_success(session: Session) -> None:
    session.act()
    session.order("reset")
    _, outcome = session.period()
    assert outcome is not None and (outcome.truncated, outcome.terminated, outcome.success) == (True, False, None)


def test_hand_back_restarts_the_policys_step_limit(make: Callable[..., Session]) -> None:
    session = make(max_steps=4)
    for _ in range(3):
        assert not session.period()[1].is_last  # type: ignore[union-attr]
    session.order("take-over")
    for _ in range(5):
        session.order("drive", (0, 1, 0, 0))
        assert not session.period()[1].is_last  # type: ignore[union-attr]
    session.order("hand-back")
    outcomes = [session.period()[1] for _ in range(4)]
    assert [v.truncated for v in outcomes if v] == [False, False, False, True]
    assert outcomes[-1] is not None and outcomes[-1].success is False


def test_re_arm_leads_from_stopped_to_hold(session: Session) -> None:
    session.act()
    session.environment.kernel.emergency_stop("ada")
    session.order("e-stop")
    assert session.period() == (None, None) and session.authority.state is ControlState.STOPPED
    assert session.robot.stops[-1] is StopLevel.SAFE
    session.order("hand-back")
    assert session.period() == (None, None) and not session.replies[-1].accepted
    session.order("re-arm")
    assert session.period() == (None, None) and session.authority.state is ControlState.HOLD
    assert session.environment.kernel.latched_estop is None and not session.time_step.stopped
    session.order("hand-back")
    assert session.act().phase is Phase.POLICY


def test_operators_see_why_a_robot_stopped_itself_until_the_re_arm(session: Session) -> None:
    session.act()
    assert session.agent.stopped_why == ""
    session.environment.kernel.emergency_stop("the robot fake", "outside the workspace: correct `home`")
    for _ in range(2):  # the stop is seen in a time step
        session.period()
    assert session.authority.state is ControlState.STOPPED
    assert session.agent.stopped_why == "outside the workspace: correct `home`"
    session.order("re-arm")
    session.period()
    session.period()
    assert session.authority.state is ControlState.HOLD and session.agent.stopped_why == ""
    session.order("hand-back")
    session.act()
    assert session.agent.policy_error == ""


def test_re_arm_that_the_driver_cannot_write_is_refused_with_the_reason(session: Session) -> None:
    session.act()
    session.order("e-stop")
    session.period()
    session.rearm_error = HalError("[Errno 30] Read-only file system: 'fake-0.stop'")
    session.order("re-arm")
    session.period()
    assert not session.replies[-1].accepted and "Read-only file system" in session.replies[-1].reason
    assert session.authority.state is ControlState.STOPPED
    session.rearm_error = HardwareLost("the driver is gone")
    session.order("re-arm")
    with pytest.raises(HardwareLost):
        session.period()


def test_re_arm_keeps_an_e_stop_pressed_after_it(session: Session) -> None:
    session.act()
    session.environment.kernel.emergency_stop("ada")
    session.order("e-stop")
    session.period()
    session.order("re-arm")
    session.newest_estop = 1  # pressed again, before the loop takes the re-arm
    assert session.period() == (None, None) and session.authority.state is ControlState.STOPPED
    assert session.environment.kernel.latched_estop is not None
    assert not session.replies[-1].accepted and "pressed again" in session.replies[-1].reason


def test_robot_that_an_e_stop_kept_from_its_reset_is_reset_by_the_hand_back(make: Callable[..., Session]) -> None:
    """Until then a person may drive it, and nothing is recorded."""
    session = make()
    session.environment.task = FakeTask(radius_m=10.0)  # every step is a success
    session.environment.kernel.emergency_stop("ada")
    orders = iter(["", "re-arm", "take-over", "drive", "", "success", "hand-back"])
    phases, packets = [], []
    recorder = Recorder(session.robot.spec, "fake-0", packets.append)

    def person(time_step: TimeStep, selected: SelectedAction | None) -> None:
        phases.append(selected and selected.phase)
        if order := next(orders, ""):
            session.order(order, (1, 0, 0, 0) if order == "drive" else ())

    def episode() -> EpisodeReport:
        source = EpisodeSource.EVALUATION
        return run_episode(session.environment, session.agent, recorder, source=source, seed=7, listeners=[person])

    assert episode().episode == "" and packets == []
    assert [reply.accepted for reply in session.replies] == [True, True, False, True]
    assert Phase.TELEOP in phases and phases[-1] is Phase.POLICY and phases.count(Phase.POLICY) == 1
    assert not session.robot.commands[-1][:3].any(), "the one step of the policy's turn moves nothing"
    assert episode().success and packets


def test_outdated_input_moves_nothing(session: Session) -> None:
    session.order("take-over")
    session.period()
    session.order("drive", (1, 0, 0, 0))
    session.now_s += INPUT_TIMEOUT_S + 0.1  # for example during a reset
    session.order("take-over")
    assert session.period() == (None, None) and session.authority.state is ControlState.HUMAN
    assert session.robot.commands == []


def test_newest_input_replaces_earlier_ones(session: Session) -> None:
    session.order("take-over")
    for _ in range(MAX_PENDING_COMMANDS):
        session.order("drive", (1, 0, 0, 0))
    session.order("drive", (0, -0.5, 0, 0))
    np.testing.assert_allclose(session.act().action, [0, -REDUCED_M / 2, 0, GRIPPER_M], rtol=1e-6)
    assert [reply.accepted for reply in session.replies] == [True]


def test_e_stop_latched_at_the_driver_stops_the_session(session: Session) -> None:
    session.act()
    session.environment.kernel.emergency_stop("the button")
    _, outcome = session.period()  # the driver refuses this command
    assert outcome is not None and outcome.truncated and outcome.success is None
    session.begin()
    assert session.period() == (None, None) and session.authority.state is ControlState.STOPPED


def test_shutdown_ends_the_episode_with_one_neutral_step(session: Session) -> None:
    session.act()
    session.stopping = True
    selected, outcome = session.period()
    assert selected is not None and not selected.action[:3].any()
    assert outcome is not None and outcome.truncated and outcome.success is None


def succeed_and_end(session: Session, is_reset: bool) -> StepOutcome | None:
    """The outcome of a step that satisfies the task's rule and in which the episode ends, by a reset or a shutdown."""
    if is_reset:
        session.order("reset")
    else:
        session.stopping = True
    assert isinstance(session.environment.task, FakeTask)
    session.environment.task.radius_m = 10.0
    return session.period()[1]


@pytest.mark.parametrize("is_reset", [True, False])
def test_success_in_the_step_that_a_shutdown_or_reset_ends_terminates_the_episode(
    session: Session, is_reset: bool
) -> None:
    session.act()
    outcome = succeed_and_end(session, is_reset)
    assert outcome is not None and outcome.success and outcome.terminated and not outcome.truncated


@pytest.mark.parametrize("is_reset", [True, False])
def test_rule_that_holds_while_a_person_prepares_the_scene_is_no_success(
    make: Callable[..., Session], is_reset: bool
) -> None:
    session = make(intervention=InterventionConfig(reset_instructions="put the cube on the mark"))
    session.period()
    outcome = succeed_and_end(session, is_reset)
    assert outcome is not None and outcome.truncated and not outcome.terminated and outcome.success is None


def test_commands_beyond_the_bound_are_refused(session: Session) -> None:
    for _ in range(MAX_PENDING_COMMANDS + 1):
        session.order("reset")
    assert [(reply.accepted, reply.reason) for reply in session.replies] == [(False, "busy")]


def test_robot_holds_until_the_first_weights(make: Callable[..., Session]) -> None:
    session = make(version=0)
    assert [session.period() for _ in range(3)] == [(None, None)] * 3
    assert session.robot.commands == [] and set(session.robot.stops) == {StopLevel.HOLD}
    pauses = session.policy.pauses
    session.order("take-over")
    session.order("drive", (0.5, 0, 0, 0))
    assert session.act().phase is Phase.TELEOP, "the policy has not acted in this episode"
    assert session.policy.pauses == pauses + 1, "weights may be swapped while a person drives"
    session.order("hand-back")
    assert session.period() == (None, None), "no weights were learned from it yet"
    session.policy.version = 1
    assert session.act().policy_version == 1


def test_person_who_takes_over_while_a_server_fetches_its_weights_again_corrects(session: Session) -> None:
    for _ in range(LENGTH):
        assert session.act().phase is Phase.POLICY
    session.policy.version = 0  # as after a restart of the policy server
    assert session.period() == (None, None)
    session.order("take-over")
    session.order("drive", (0.5, 0, 0, 0))
    assert session.act().phase is Phase.CORRECTION


def test_policy_is_paused_while_it_gives_no_action(session: Session) -> None:
    session.act()
    session.policy.why = "it does not answer"
    for _ in range(LENGTH - 1):
        session.act()
    assert session.policy.pauses == 0, "the robot executes its promised actions"
    assert session.period() == (None, None)
    assert session.policy.pauses == 1, "a learner need not wait for it"


@pytest.mark.parametrize(
    ("driver", "explore", "explores"),
    [("sim", "auto", True), ("sim", "off", False), ("ur", "auto", False), ("ur", "on", True), ("point", "auto", False)],
)
def test_only_simulated_robots_explore_by_default(driver: str, explore: Any, explores: bool) -> None:
    assert RobotConfig(driver=driver, explore=explore).explores is explores


def test_operator_rewinds_along_the_path_and_then_corrects(session: Session) -> None:
    start = session.time_step.observation[STATE].copy()
    for _ in range(6):
        session.act()
    session.order("take-over")
    session.order("drive", (0.0, 1.0, 0.0, -1.0))
    session.act()
    far = session.time_step.observation[STATE].copy()
    assert far[0] > start[0] + 5 * FAR and far[1] > start[1]
    phases = []
    for _ in range(20):
        session.order("drive", (0.0,) * 4, rewind=True)
        selected, _ = session.period()
        if selected is None:  # the start is reached
            break
        phases.append(selected.phase)
    np.testing.assert_allclose(session.time_step.observation[STATE][:3], start[:3], atol=0.02 * 2 * STEP_M)
    assert set(phases) == {Phase.RECOVERY} and 6 <= len(phases) <= 8
    session.order("drive", (0.0, -1.0, 0.0, 0.0))
    assert session.act().phase is Phase.CORRECTION
    session.order("drive", (0.0,) * 4, rewind=True)
    assert session.act().action[1] > 0, "the correction is retraced too"


@pytest.mark.parametrize("rate_hz", [10.0, 30.0])
@pytest.mark.parametrize("order", ["success", "hand-back"])
def test_long_demonstration_holds_the_robot_until_its_label(
    monkeypatch: pytest.MonkeyPatch, rate_hz: float, order: Any
) -> None:
    monkeypatch.setattr(agents, "MAX_HUMAN_S", 2.0)
    robot = RecordingRobot(FakeRobotConfig(rate_hz=rate_hz))
    environment = RobotEnvironment(robot, FakeTask(radius_m=1e-9), SafetyKernel(robot.spec))
    environment.connect()
    session = Session(robot, environment, MarchingPolicy())
    session.order("take-over")
    for number in range(round(2.0 * rate_hz)):
        session.order("drive", (0.0, (-1.0) ** number, 0.0, 0.0))
        _, outcome = session.period()
        assert outcome is not None and not outcome.is_last and outcome.success is None
    session.order("drive", (0.0, 1.0, 0.0, 0.0))
    assert session.period() == (None, None) and robot.stops[-1] is StopLevel.HOLD
    assert session.agent.stopped_why == "holds: a person has moved it for 2 s; label this episode, or hand back"
    session.order("drive", (0.0,) * 4, rewind=True)
    assert session.act().phase is Phase.RECOVERY and not session.agent.stopped_why
    session.order(order)
    selected, outcome = session.period()
    assert selected is not None and outcome is not None
    if order == "hand-back":
        assert selected.phase is Phase.POLICY and not outcome.is_last and not session.agent.policy_error
        return
    assert outcome.terminated and outcome.success
    session.begin()
    session.order("drive", (0.0, 1.0, 0.0, 0.0))
    assert session.act().phase is Phase.TELEOP


def test_rewind_of_a_mobile_arm_leaves_its_base_standing() -> None:
    rows = [("lift.pos", "rad", -3.0, 3.0), ("x.vel", "m/s", -0.3, 0.3)]
    spec = RobotSpec(
        model="lekiwi",
        rate_hz=10.0,
        observation=(ArraySpec.from_rows(STATE, rows),),
        action=ArraySpec.from_rows(ACTION, rows),
        limits=SafetyLimits(joint_position=(0,), joint_low=(-3.0,), joint_high=(3.0,)),
        neutral=(0.0, 0.0),
        joint_target=(0,),
    )
    path = TravelledPath(spec)
    path.begin(np.zeros(2, np.float32))
    for lift, speed in ((0.5, 0.3), (1.0, -0.3), (1.0, 0.0), (1.0, 0.3)):
        path.advance(np.array([lift, speed], np.float32))
    back = []
    while (action := path.step_back()) is not None and len(back) < 10:
        back.append(action.tolist())
        path.retrace(action)
    assert back == [[0.5, 0.0], [0.0, 0.0]]


def test_hand_back_ends_the_episode_if_the_settings_say_so(make: Callable[..., Session]) -> None:
    for ends in (False, True):
        session = make(intervention=InterventionConfig(ends_episode=ends))
        session.act()
        session.order("take-over")
        session.order("drive", (1.0, 0.0, 0.0, 0.0))
        session.act()
        session.order("hand-back")
        _, outcome = session.period()
        assert outcome is not None and outcome.truncated is ends


def test_hand_back_by_a_device_ends_the_episode_if_the_settings_say_so(make: Callable[..., Session]) -> None:
    session, still = make(intervention=InterventionConfig(ends_episode=True)), np.zeros(4, np.float32)
    session.act()
    session.time_step = dataclass_replace(session.time_step, local_input=TeleopInput(still, True))
    session.period()
    assert session.authority.state is ControlState.HUMAN
    session.time_step = dataclass_replace(session.time_step, local_input=TeleopInput(still, False, hands_back=True))
    _, outcome = session.period()
    assert session.authority.state is ControlState.POLICY and outcome is not None and outcome.truncated


def test_policy_without_success_requests_help_and_goes_on_after_its_time(make: Callable[..., Session]) -> None:
    session = make(intervention=InterventionConfig(help=HelpConfig(after_steps=4, wait_s=10.0)))
    for _ in range(4):
        session.act()
    assert session.period() == (None, None)
    assert session.authority.state is ControlState.REQUESTING
    assert session.authority.help_reason == "no success after 4 steps"
    assert session.agent.is_policy_suspended and session.period() == (None, None)
    session.now_s += 10.1
    assert session.act().phase is Phase.POLICY
    for _ in range(8):
        assert session.act().phase is Phase.POLICY, "once in an episode"
    session.begin()
    for _ in range(4):
        session.act()
    session.period()
    session.order("take-over")
    session.order("drive", (1.0, 0.0, 0.0, 0.0))
    assert session.act().phase is Phase.CORRECTION


@pytest.mark.parametrize(("answers", "left"), [(False, 2), (True, 10)], ids=["nobody-answers", "person-answers"])
def test_only_a_person_who_answers_a_request_for_help_gives_the_policy_its_steps_again(
    make: Callable[..., Session], answers: bool, left: int
) -> None:
    session = make(max_steps=10, intervention=InterventionConfig(help=HelpConfig(after_steps=8, wait_s=10.0)))
    for _ in range(8):
        session.act()
    for _ in range(3):
        assert session.period() == (None, None)
    if answers:
        session.order("hand-back")
    else:
        session.now_s += 10.1
    outcomes = [session.period()[1] for _ in range(left)]
    assert [outcome and outcome.is_last for outcome in outcomes] == [False] * (left - 1) + [True]
    assert outcomes[-1] is not None and outcomes[-1].success is False


@pytest.mark.parametrize("order", ["failure", "success", "reset"])
def test_request_for_help_ends_with_its_episode(make: Callable[..., Session], order: str) -> None:
    session = make(intervention=InterventionConfig(help=HelpConfig(after_steps=4, wait_s=0.0)))
    for _ in range(5):
        session.period()
    assert session.authority.help_reason == "no success after 4 steps"
    session.order(order)
    _, outcome = session.period()
    assert outcome is not None and outcome.is_last
    session.begin()
    assert session.authority.state is ControlState.POLICY and session.act().phase is Phase.POLICY
    session.order("take-over")
    session.order("drive", (1.0, 0.0, 0.0, 0.0))
    assert session.act().phase is Phase.CORRECTION


def test_episode_after_a_request_for_help_waits_for_its_scene(make: Callable[..., Session]) -> None:
    help_ = HelpConfig(after_steps=4, wait_s=60.0)
    session = make(intervention=InterventionConfig(reset_instructions="put the cube on the mark", help=help_))
    session.order("hand-back")  # "Reset done"
    for _ in range(6):
        session.period()
    assert session.authority.help_reason == "no success after 4 steps"
    session.order("failure")
    session.period()
    session.begin()
    session.now_s += 100.0
    assert session.authority.awaits_reset and session.period() == (None, None)


def test_robot_returns_along_its_path_and_tries_again_before_it_requests_help(make: Callable[..., Session]) -> None:
    config = HelpConfig(after_steps=6, returns=2, return_steps=4)
    session = make(intervention=InterventionConfig(help=config), max_steps=8)
    start = session.time_step.observation[STATE][0]
    for attempt in range(3):
        session.policy.version = attempt + 1
        assert [session.act().phase for _ in range(6)] == [Phase.POLICY] * 6
        far = session.time_step.observation[STATE][0]
        if attempt < 2:
            assert [session.act().phase for _ in range(4)] == [Phase.RECOVERY] * 4
            assert start < session.time_step.observation[STATE][0] < far - 3 * FAR
    assert session.period() == (None, None) and session.authority.help_reason == "no success after 6 steps"


def test_person_ends_a_return_and_the_start_of_the_path_too(make: Callable[..., Session]) -> None:
    session = make(intervention=InterventionConfig(help=HelpConfig(after_steps=4, returns=2, return_steps=100)))
    phases = [session.act().phase for _ in range(6)]
    assert phases[4:] == [Phase.RECOVERY] * 2
    session.order("take-over")
    session.order("drive", (1.0, 0.0, 0.0, 0.0))
    assert session.act().phase is Phase.CORRECTION
    session.order("hand-back")
    assert [session.act().phase for _ in range(4)] == [Phase.POLICY] * 4
    back = 0
    while session.act().phase is Phase.RECOVERY:
        back += 1
    assert 4 <= back < 12 and session.act().phase is Phase.POLICY


@pytest.mark.parametrize("sways", [True, False])
def test_robot_requests_help_if_successive_chunks_differ(make: Callable[..., Session], sways: bool) -> None:
    session = make(intervention=InterventionConfig(help=HelpConfig(disagreement=0.05, wait_s=10.0)))
    session.policy.sways = sways
    session.act()
    assert (session.period() == (None, None)) is sways
    assert session.authority.help_reason.startswith("successive action chunks differ by ") is sways
    session.now_s += 10.1
    assert session.act().phase is Phase.POLICY, "it goes on if no person comes"


def test_task_requests_help(make: Callable[..., Session]) -> None:
    session = make()
    session.act()
    outcome = dataclass_replace(session.time_step.outcome, help="the cube has left the table")
    session.time_step = dataclass_replace(session.time_step, outcome=outcome)
    assert session.period() == (None, None)
    assert session.authority.help_reason == "the cube has left the table"
    session.order("hand-back")
    assert session.act().phase is Phase.POLICY


def test_episode_waits_for_a_person_who_prepares_the_scene(make: Callable[..., Session]) -> None:
    session = make(intervention=InterventionConfig(reset_instructions="put the cube on the mark"))
    assert session.period() == (None, None)
    session.now_s += 1e6
    assert session.period() == (None, None)
    assert session.authority.awaits_reset and session.authority.help_reason == "put the cube on the mark"
    session.order("hand-back")
    assert session.act().phase is Phase.POLICY
    session.begin()
    assert session.authority.awaits_reset, "before each episode"
    session.order("success")
    assert session.period() == (None, None), "no episode has begun that could be a success"
    assert session.replies[-1].reason == "no episode runs; label a recorded one on the Episodes page"


@pytest.mark.parametrize("orders", [("e-stop", "re-arm"), ("pause",)], ids=["stopped", "paused"])
def test_scene_is_still_to_be_prepared_after_a_stop_or_a_pause(
    make: Callable[..., Session], orders: tuple[str, ...]
) -> None:
    session = make(intervention=InterventionConfig(ends_episode=True, reset_instructions="put the cube on the mark"))
    session.period()
    for order in orders:
        session.order(order)
        assert session.period() == (None, None)
        assert session.authority.awaits_reset and session.authority.help_reason == "put the cube on the mark"
    session.order("success")
    assert session.period() == (None, None), "no episode has begun that could be a success"
    assert session.replies[-1].reason == "no episode runs; label a recorded one on the Episodes page"
    session.order("hand-back")
    selected, outcome = session.period()
    assert selected is not None and selected.phase is Phase.POLICY and outcome is not None and not outcome.is_last
    assert not session.authority.awaits_reset and not session.authority.help_reason


def test_scene_of_the_next_episode_is_to_be_prepared_too_if_a_person_holds_the_robot(
    make: Callable[..., Session],
) -> None:
    session = make(intervention=InterventionConfig(reset_instructions="put the cube on the mark"))
    session.period()
    session.order("pause")
    session.order("reset")
    _, outcome = session.period()
    assert outcome is not None and outcome.is_last
    session.begin()
    assert session.authority.state is ControlState.HOLD and session.authority.awaits_reset
    session.order("take-over")
    session.period()
    assert not session.authority.awaits_reset, "the person who drives has the scene"


def test_policy_acts_after_a_prepared_scene_though_a_hand_back_ends_the_episode(make: Callable[..., Session]) -> None:
    session = make(intervention=InterventionConfig(ends_episode=True, reset_instructions="put the cube on the mark"))
    session.period()
    session.order("hand-back")
    _, outcome = session.period()
    assert outcome is not None and not outcome.is_last


def test_person_who_drives_from_a_prepared_scene_on_teleoperates(make: Callable[..., Session]) -> None:
    session = make(intervention=InterventionConfig(reset_instructions="put the cube on the mark"))
    session.period()
    session.order("take-over")
    session.order("drive", (1.0, 0.0, 0.0, 0.0))
    assert session.act().phase is Phase.TELEOP


HOUR_NS = 3_600_000_000_000


def test_local_rearm_is_accepted_while_the_robots_clock_is_behind() -> None:
    """Its clock stamps the orders of a console on this computer; the e-stop has another console's time."""
    now_ns, replies = time.time_ns(), list[OperatorReply]()
    commands = OperatorCommandQueue(time.monotonic, replies.append)
    commands.note_estop(OperatorCommand(robot="r", operator="ada", order="e-stop", sequence=now_ns + HOUR_NS))
    commands.submit(OperatorCommand(robot="r", operator="ada", order="re-arm", sequence=now_ns), is_local=True)
    assert commands.get_nowait() is not None and not replies


@pytest.mark.parametrize(
    ("operator", "at_s", "robot_ahead_s", "accepted"),
    [
        ("bob", 9.0, 0.0, True),
        ("bob", 3.0, 0.0, False),  # the clocks may differ by that
        ("bob", -1.0, 0.0, False),
        ("ada", 3609.0, 0.0, True),
        ("ada", 3599.0, 0.0, False),
        ("bob", 9.0, -86_400.0, False),  # the robot's clock is no judge
        ("bob", -1.0, -86_400.0, False),
    ],
)
def test_rearm_of_another_person_is_accepted_after_an_e_stop_of_a_clock_that_is_ahead(
    monkeypatch: pytest.MonkeyPatch, operator: str, at_s: float, robot_ahead_s: float, accepted: bool
) -> None:
    """Ada's clock is an hour ahead. The re-arm arrives 10 s after her e-stop; `at_s` is its console's time."""
    now_s, now_ns, replies = [100.0], time.time_ns(), list[OperatorReply]()
    commands = OperatorCommandQueue(lambda: now_s[0], replies.append)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + round((robot_ahead_s + now_s[0] - 100.0) * 1e9))
    stop = OperatorCommand(robot="r", operator="ada", order="e-stop", sequence=now_ns + HOUR_NS)
    commands.note_estop(stop)
    now_s[0] += 10.0
    sequence = now_ns + round(at_s * 1e9)
    commands.submit(OperatorCommand(robot="r", operator=operator, order="re-arm", sequence=sequence))
    assert (commands.get_nowait() is not None) is accepted and bool(replies) is not accepted
