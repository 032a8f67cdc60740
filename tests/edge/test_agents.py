"""Agents: action chunks of a policy, and operators who take over, label and stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from edge_kit import RecordingRobot

from hal.robot import StopLevel
from hal.safety import SafetyKernel
from hal.spec import STATE, Array
from robots.fake import GRIPPER_M, STEP_M, FakeTask
from user_sys.compose import RobotConfig
from user_sys.edge.agents import (
    GRIPPER_SETTLE_STEPS,
    MAX_PENDING_COMMANDS,
    OperatorCommandQueue,
    PolicyAgent,
    SharedControlAgent,
    SwapAt,
    UpdatingPolicyAgent,
)
from user_sys.edge.control_authority import INPUT_TIMEOUT_S, ControlAuthority, ControlState
from user_sys.edge.environment import NO_OUTCOME, RobotEnvironment, TimeStep
from user_sys.edge.recorder import SelectedAction, StepOutcome
from user_sys.episode import Phase
from user_sys.errors import PolicyUnavailable
from user_sys.messages import OperatorCommand, OperatorReply
from user_sys.policies.policy import ActionChunk, Policy
from user_sys.weights.double_buffer import DoubleBufferedPolicy

LENGTH = 3
FAR = 0.01  # step along x: the version times this, plus a tenth of it for each step in the chunk


class MarchingPolicy(Policy):
    """Acts in chunks of three steps along x. The step size identifies the weights and the step of the chunk."""

    def __init__(self) -> None:
        self.size = 0.0
        self.calls = 0

    def act(self, observation: Mapping[str, Array], sentence: str, *, deterministic: bool) -> ActionChunk:
        self.calls += 1
        actions = np.zeros((LENGTH, 4), np.float32)
        actions[:, 0] = self.size + FAR / 10 * np.arange(LENGTH)
        actions[:, 3] = GRIPPER_M
        return ActionChunk(actions, -np.arange(LENGTH, dtype=np.float32))

    def load(self, weights: Mapping[str, Array]) -> None:
        self.size = float(weights["size"][0])


def publish(policies: DoubleBufferedPolicy, version: int) -> None:
    """Loads weights that are ready to be swapped in."""
    policies.load(version, {"size": np.array([version * FAR], np.float32)})


@dataclass
class Monitor:
    """A `WeightsMonitor` that records inference times. `newest` is the newest version that was published."""

    policies: DoubleBufferedPolicy
    max_staleness: int = 1_000_000
    newest: int = 1
    inference_s: list[float] = field(default_factory=list)

    def is_too_stale(self) -> bool:
        return self.newest - self.policies.version > self.max_staleness

    def on_swap(self, version: int) -> None:
        pass

    def on_inference(self, seconds: float) -> None:
        self.inference_s.append(seconds)


@dataclass
class Session:
    """A fake robot, its agent and its operators, with a clock that the test advances."""

    robot: RecordingRobot
    environment: RobotEnvironment
    policies: DoubleBufferedPolicy
    monitor: Monitor
    max_steps: int = 50
    swap_at: SwapAt = "chunk"
    explore: bool = False
    now_s: float = 100.0
    stopping: bool = False
    newest_estop: int = 0  # the driver's
    sequence: int = 0
    steps: int = 0
    replies: list[OperatorReply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.authority = ControlAuthority("fake-0", self.robot.spec, clock=lambda: self.now_s)
        self.commands = OperatorCommandQueue(lambda: self.now_s, self.send_reply)
        policy = UpdatingPolicyAgent(
            self.policies, "go", self.max_steps, self.monitor, swap_at=self.swap_at, explore=self.explore
        )
        self.agent = SharedControlAgent(self.robot.spec, self.authority, policy, self.commands, self, self.max_steps)
        self.begin()

    def send_reply(self, reply: OperatorReply) -> None:
        self.replies.append(reply)

    def rearm(self, person: str, estop_sequence: int) -> bool:
        if estop_sequence < self.newest_estop:
            return False
        self.environment.kernel.rearm(person)
        return True

    def is_stopping(self) -> bool:
        return self.stopping

    def has_lease(self) -> bool:
        return True

    def begin(self) -> None:
        self.time_step: TimeStep = self.environment.reset(seed=0)
        self.steps = 0
        self.agent.begin_episode(self.time_step)

    def order(self, order: Any, twist: tuple[float, ...] = (), operator: str = "ada") -> None:
        self.sequence += 1
        self.commands.submit(
            OperatorCommand(robot="fake-0", operator=operator, order=order, twist=twist, sequence=self.sequence)
        )

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
    def session(
        max_steps: int = 50,
        learned: bool = True,
        policy: Callable[[], Policy] = MarchingPolicy,
        max_staleness: int = 1_000_000,
        **options: Any,
    ) -> Session:
        policies = DoubleBufferedPolicy(policy)
        if learned:
            publish(policies, 1)
        robot = RecordingRobot()
        environment = RobotEnvironment(robot, FakeTask(radius_m=1e-9), SafetyKernel(robot.spec))
        environment.connect()
        return Session(robot, environment, policies, Monitor(policies, max_staleness), max_steps, **options)

    return session


@pytest.fixture
def session(make: Callable[..., Session]) -> Session:
    return make()


def test_new_weights_wait_for_the_end_of_a_chunk(session: Session) -> None:
    first = session.act()
    publish(session.policies, 2)
    actions = [first, *(session.act() for _ in range(5))]
    assert [d.policy_version for d in actions] == [1, 1, 1, 2, 2, 2]
    np.testing.assert_allclose([d.action[0] / FAR for d in actions], [1.0, 1.1, 1.2, 2.0, 2.1, 2.2], rtol=1e-5)
    assert [d.log_prob for d in actions] == [0.0, -1.0, -2.0] * 2
    assert {d.phase for d in actions} == {Phase.POLICY}


def test_a_new_episode_discards_the_chunk() -> None:
    policy = MarchingPolicy()
    time_step = TimeStep({STATE: np.zeros(7, np.float32)}, {}, 0, None, 0, 0, NO_OUTCOME, 0, False)
    agent = PolicyAgent(lambda: (policy, 7), "go", 50, deterministic=True)
    for _ in range(2):
        agent.begin_episode(time_step)
        selected = agent.select_action(time_step)
        assert selected is not None and selected.log_prob == 0.0 and selected.policy_version == 7
    assert policy.calls == 2


def test_take_over_is_a_correction_and_hand_back_starts_a_chunk(session: Session) -> None:
    session.act()
    session.order("take-over")
    session.order("drive", (0.5, 0, 0, 0))
    corrected = session.act()
    assert (corrected.phase, corrected.policy_version) == (Phase.CORRECTION, -1)
    np.testing.assert_allclose(corrected.action, [STEP_M / 2, 0, 0, GRIPPER_M], rtol=1e-6)
    assert np.isnan(corrected.log_prob)
    session.order("hand-back")
    again = session.act()
    assert again.phase is Phase.POLICY and again.log_prob == 0.0  # a new chunk, as the operator has moved the robot
    assert [reply.order for reply in session.replies] == ["take-over", "hand-back"]
    assert all(reply.accepted for reply in session.replies)


class UnreliablePolicy(MarchingPolicy):
    """A `MarchingPolicy` that is unavailable while `why` is set."""

    why = ""

    def act(self, observation: Mapping[str, Array], sentence: str, *, deterministic: bool) -> ActionChunk:
        if self.why:
            raise PolicyUnavailable(self.why)
        return super().act(observation, sentence, deterministic=deterministic)


def set_policy_error(session: Session, why: str) -> None:
    """Makes the acting policy unavailable, or available if `why` is empty."""
    policy = session.policies.policy
    assert isinstance(policy, UnreliablePolicy)
    policy.why = why


def test_unavailable_policy_holds_the_robot_without_using_up_steps(
    make: Callable[..., Session],
) -> None:
    session = make(max_steps=4, policy=UnreliablePolicy)
    assert session.act().policy_version == 1
    set_policy_error(session, "it does not answer")
    rest_of_chunk = [session.act().log_prob for _ in range(2)]
    assert rest_of_chunk == [-1.0, -2.0]
    for _ in range(9):
        assert session.period() == (None, None)
    assert session.agent.policy_error == "it does not answer" and session.authority.state is ControlState.POLICY
    set_policy_error(session, "")
    selected, outcome = session.period()
    assert selected is not None and selected.log_prob == 0.0 and selected.policy_version == 1
    assert outcome is not None and outcome.truncated and session.agent.policy_error == ""  # its fourth step


def test_operator_takes_over_from_an_unavailable_policy(make: Callable[..., Session]) -> None:
    session = make(policy=UnreliablePolicy)
    for _ in range(3):
        session.act()
    set_policy_error(session, "it does not answer")
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


def test_zero_input_holds_the_robot_and_is_no_step(session: Session) -> None:
    session.order("take-over")
    for _ in range(3):
        session.order("drive", (0, 0, 0, 0))
        assert session.period() == (None, None)
    assert session.robot.commands == [] and session.robot.stops == [StopLevel.HOLD] * 3
    session.order("drive", (0, 0, -1, 0))
    assert session.act().action[2] == np.float32(-STEP_M)


def test_closing_gripper_is_recorded_while_it_settles(session: Session) -> None:
    session.order("take-over")
    session.order("drive", (0, 0, 0, -1))
    actions = [session.period()[0] for _ in range(GRIPPER_SETTLE_STEPS + 3)]
    assert [d is not None for d in actions] == [True] * (GRIPPER_SETTLE_STEPS + 1) + [False] * 2
    assert all(d.action[3] == 0 for d in actions if d)


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


def test_operator_may_label_while_the_policy_drives(session: Session) -> None:
    session.act()
    session.order("success")
    selected, outcome = session.period()
    assert selected is not None and selected.policy_version == -1 and selected.phase is Phase.POLICY
    assert outcome is not None and outcome.success and outcome.source == "person"


def test_reset_truncates_the_episode_without_a_success(session: Session) -> None:
    session.act()
    session.order("reset")
    _, outcome = session.period()
    assert outcome is not None and (outcome.truncated, outcome.terminated, outcome.success) == (True, False, None)


def test_input_timeout_holds_until_take_over_or_hand_back(session: Session) -> None:
    session.order("take-over")
    session.order("drive", (1, 0, 0, 0))
    session.act()
    session.now_s += INPUT_TIMEOUT_S + 0.1
    assert session.period() == (None, None) and session.authority.state is ControlState.HOLD
    session.order("drive", (1, 0, 0, 0))
    assert session.period() == (None, None)  # input alone does not resume
    session.order("hand-back", operator="bob")
    assert session.act().phase is Phase.POLICY


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
    np.testing.assert_allclose(session.act().action, [0, -STEP_M / 2, 0, GRIPPER_M], rtol=1e-6)
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


def test_commands_beyond_the_bound_are_refused(session: Session) -> None:
    for _ in range(MAX_PENDING_COMMANDS + 1):
        session.order("reset")
    assert [(reply.accepted, reply.reason) for reply in session.replies] == [(False, "busy")]


def test_swap_at_episode_waits_for_the_next_episode(make: Callable[..., Session]) -> None:
    session = make(swap_at="episode")
    publish(session.policies, 2)
    assert {session.act().policy_version for _ in range(3 * LENGTH)} == {1}
    session.begin()
    assert session.act().policy_version == 2


@pytest.mark.parametrize(("swap_at", "version"), [("chunk", 2), ("episode", 1)])
def test_weights_are_swapped_while_an_operator_drives(make: Callable[..., Session], swap_at: str, version: int) -> None:
    """A learner that waits for the robots would otherwise wait for the operator."""
    session = make(swap_at=swap_at)
    assert session.act().policy_version == 1
    session.order("take-over")
    session.period()
    publish(session.policies, 2)
    session.period()
    assert session.policies.version == version


def test_too_stale_weights_hold_the_robot(make: Callable[..., Session]) -> None:
    session = make(max_staleness=1)
    assert session.act().policy_version == 1
    session.monitor.newest = 3
    assert session.period() == (None, None) and session.period() == (None, None)
    publish(session.policies, 3)
    assert session.period() == (None, None), "the weights are swapped in during the hold"
    assert session.act().policy_version == 3


def test_each_inference_is_timed(make: Callable[..., Session]) -> None:
    session = make()
    for _ in range(2 * LENGTH):
        session.act()
    assert len(session.monitor.inference_s) == 2 and min(session.monitor.inference_s) > 0


def test_robot_holds_until_the_first_weights(make: Callable[..., Session]) -> None:
    session = make(learned=False)
    assert session.agent.awaits_weights
    assert [session.period() for _ in range(3)] == [(None, None)] * 3
    assert session.robot.commands == [] and set(session.robot.stops) == {StopLevel.HOLD}
    session.order("take-over")
    session.order("drive", (0.5, 0, 0, 0))
    assert session.act().phase is Phase.TELEOP, "the policy has not acted in this episode"
    session.order("hand-back")
    assert session.period() == (None, None), "no weights were learned from it yet"
    publish(session.policies, 1)
    assert session.period() == (None, None), "the weights are swapped in during the hold"
    assert session.act().policy_version == 1 and not session.agent.awaits_weights


def test_exploring_robot_acts_before_the_first_weights(make: Callable[..., Session]) -> None:
    session = make(learned=False, explore=True)
    assert not session.agent.awaits_weights
    assert session.act().policy_version == -1 and len(session.robot.commands) == 1


@pytest.mark.parametrize(
    ("driver", "explore", "explores"),
    [("sim", "auto", True), ("sim", "off", False), ("ur", "auto", False), ("ur", "on", True), ("point", "auto", False)],
)
def test_only_simulated_robots_explore_by_default(driver: str, explore: Any, explores: bool) -> None:
    assert RobotConfig(driver=driver, explore=explore).explores is explores
