"""A policy acts chunk by chunk until a person steps in; what the person does is told apart and ends as they say."""

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
from user_sys.edge.agents import GRIPPER_SETTLE_STEPS, MAX_PENDING_COMMANDS, PolicyAgent, SharedControlAgent
from user_sys.edge.control_authority import INPUT_TIMEOUT_S, ControlAuthority, ControlState
from user_sys.edge.environment import NO_OUTCOME, RobotEnvironment, TimeStep
from user_sys.edge.recorder import SelectedAction, StepOutcome
from user_sys.episode import Phase
from user_sys.errors import PolicyUnavailable
from user_sys.messages import OperatorCommand, OperatorReply
from user_sys.policies.policy import ActionChunk, Policy
from user_sys.weights.double_buffer import DoubleBufferedPolicy

LENGTH = 3
FAR = 0.01  # a policy's step along x: its version times this, plus a tenth of it for each step in the chunk


class Marching(Policy):
    """Chunks of three steps along x whose size tells which weights and which step of the chunk they are."""

    def __init__(self) -> None:
        self.size = 0.0
        self.asked = 0

    def act(self, observation: Mapping[str, Array], sentence: str, *, deterministic: bool) -> ActionChunk:
        self.asked += 1
        actions = np.zeros((LENGTH, 4), np.float32)
        actions[:, 0] = self.size + FAR / 10 * np.arange(LENGTH)
        actions[:, 3] = GRIPPER_M
        return ActionChunk(actions, -np.arange(LENGTH, dtype=np.float32))

    def load(self, weights: Mapping[str, Array]) -> None:
        self.size = float(weights["size"][0])


def publish(swapper: DoubleBufferedPolicy, version: int) -> None:
    """Loads weights that may be swapped in then."""
    swapper.load(version, {"size": np.array([version * FAR], np.float32)})


@dataclass
class Session:
    """A fake robot, its pilot and the people at it; time moves when it is told to."""

    robot: RecordingRobot
    driver: RobotEnvironment
    swapper: DoubleBufferedPolicy
    max_steps: int = 50
    now_s: float = 100.0
    leaving: bool = False
    pressed: int = 0  # the driver's newest e-stop
    sequence: int = 0
    steps: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    replies: list[OperatorReply] = field(default_factory=list)
    decisions: list[SelectedAction | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.authority = ControlAuthority("fake-0", self.robot.spec, clock=lambda: self.now_s)
        self.pilot = SharedControlAgent(
            self.robot.spec,
            self.authority,
            self.swapper,
            "go",
            self.max_steps,
            reply=self.replies.append,
            rearm=self.rearm,
            leaving=lambda: self.leaving,
            **self.options,
        )
        self.begin()

    def rearm(self, person: str, turn: int) -> bool:
        if turn < self.pressed:
            return False
        self.driver.kernel.rearm(person)
        return True

    def begin(self) -> None:
        self.tick: TimeStep = self.driver.reset(seed=0)
        self.steps = 0
        self.pilot.begin_episode(self.tick)

    def order(self, order: Any, twist: tuple[float, ...] = (), operator: str = "ada") -> None:
        self.sequence += 1
        self.pilot.submit(
            OperatorCommand(robot="fake-0", operator=operator, order=order, twist=twist, sequence=self.sequence)
        )

    def period(self) -> tuple[SelectedAction | None, StepOutcome | None]:
        """One control period as the loop makes it."""
        decision = self.pilot.select_action(self.tick)
        self.decisions.append(decision)
        if decision is None:
            self.tick = self.driver.hold()
            return None, None
        self.tick = self.driver.step(decision.action)
        self.steps += 1
        return decision, self.pilot.evaluate_step(self.tick, self.steps)

    def acted(self) -> SelectedAction:
        decision, _ = self.period()
        assert decision is not None
        return decision


@pytest.fixture
def make() -> Callable[..., Session]:
    def session(
        max_steps: int = 50, learned: bool = True, policy: Callable[[], Policy] = Marching, **options: Any
    ) -> Session:
        swapper = DoubleBufferedPolicy(policy)
        if learned:
            publish(swapper, 1)
        robot = RecordingRobot()
        driver = RobotEnvironment(robot, FakeTask(radius_m=1e-9), SafetyKernel(robot.spec))
        driver.connect()
        return Session(robot, driver, swapper, max_steps, options=options)

    return session


@pytest.fixture
def session(make: Callable[..., Session]) -> Session:
    return make()


def test_a_chunk_is_executed_to_its_end_before_new_weights_come_in(session: Session) -> None:
    first = session.acted()
    publish(session.swapper, 2)
    decisions = [first, *(session.acted() for _ in range(5))]
    assert [d.policy_version for d in decisions] == [1, 1, 1, 2, 2, 2]
    np.testing.assert_allclose([d.action[0] / FAR for d in decisions], [1.0, 1.1, 1.2, 2.0, 2.1, 2.2], rtol=1e-5)
    assert [d.log_prob for d in decisions] == [0.0, -1.0, -2.0] * 2
    assert {d.phase for d in decisions} == {Phase.POLICY}


def test_a_chunk_does_not_outlive_its_episode() -> None:
    policy = Marching()
    tick = TimeStep({STATE: np.zeros(7, np.float32)}, {}, 0, None, 0, 0, NO_OUTCOME, 0, False)
    pilot = PolicyAgent(lambda: (policy, 7), "go", 50, deterministic=True)
    for _ in range(2):
        pilot.begin_episode(tick)
        decision = pilot.select_action(tick)
        assert decision is not None and decision.log_prob == 0.0 and decision.policy_version == 7
    assert policy.asked == 2


def test_a_take_over_in_the_middle_is_a_correction_and_a_hand_back_asks_the_policy_anew(session: Session) -> None:
    session.acted()
    session.order("take-over")
    session.order("drive", (0.5, 0, 0, 0))
    corrected = session.acted()
    assert (corrected.phase, corrected.policy_version) == (Phase.CORRECTION, -1)
    np.testing.assert_allclose(corrected.action, [STEP_M / 2, 0, 0, GRIPPER_M], rtol=1e-6)
    assert np.isnan(corrected.log_prob)
    session.order("hand-back")
    again = session.acted()
    assert again.phase is Phase.POLICY and again.log_prob == 0.0  # a new chunk: somebody else had moved the robot
    assert [reply.order for reply in session.replies] == ["take-over", "hand-back"]
    assert all(reply.accepted for reply in session.replies)


class Elsewhere(Marching):
    """As `Marching`, in another process, which is away while it is told to be."""

    why = ""

    def act(self, observation: Mapping[str, Array], sentence: str, *, deterministic: bool) -> ActionChunk:
        if self.why:
            raise PolicyUnavailable(self.why)
        return super().act(observation, sentence, deterministic=deterministic)


def elsewhere(session: Session, why: str) -> None:
    """Sets whether the acting policy is away."""
    policy = session.swapper.policy
    assert isinstance(policy, Elsewhere)
    policy.why = why


def test_a_robot_holds_while_a_policy_elsewhere_is_away_and_its_time_does_not_run_out(
    make: Callable[..., Session],
) -> None:
    session = make(max_steps=4, policy=Elsewhere)
    assert session.acted().policy_version == 1
    elsewhere(session, "it does not answer")
    rest_of_the_chunk = [session.acted().log_prob for _ in range(2)]
    assert rest_of_the_chunk == [-1.0, -2.0]
    for _ in range(9):
        assert session.period() == (None, None)
    assert session.pilot.policy_error == "it does not answer" and session.authority.state is ControlState.POLICY
    elsewhere(session, "")
    decision, verdict = session.period()
    assert decision is not None and decision.log_prob == 0.0 and decision.policy_version == 1
    assert verdict is not None and verdict.truncated and session.pilot.policy_error == ""  # its fourth step


def test_people_take_over_from_a_policy_that_is_away(make: Callable[..., Session]) -> None:
    session = make(policy=Elsewhere)
    for _ in range(3):
        session.acted()
    elsewhere(session, "it does not answer")
    assert session.period() == (None, None) and session.pilot.policy_error
    session.order("take-over")
    session.order("drive", (0.5, 0, 0, 0))
    assert session.acted().phase is Phase.CORRECTION and not session.pilot.policy_error
    session.order("hand-back")
    assert session.period() == (None, None) and session.pilot.policy_error
    session.driver.kernel.emergency_stop("ada")
    session.order("e-stop")
    assert (
        session.period() == (None, None) and session.authority.state is ControlState.STOPPED and not session.pilot.away
    )


def test_an_episode_that_a_person_begins_is_teleoperation(session: Session) -> None:
    session.order("take-over")
    session.period()
    session.begin()
    session.order("drive", (0, 1, 0, 0))
    assert session.acted().phase is Phase.TELEOP
    session.order("hand-back")
    assert session.acted().phase is Phase.POLICY
    session.order("take-over")
    session.order("drive", (0, 1, 0, 0))
    assert session.acted().phase is Phase.CORRECTION


def test_a_hand_at_rest_holds_the_robot_and_is_no_step(session: Session) -> None:
    session.order("take-over")
    for _ in range(3):
        session.order("drive", (0, 0, 0, 0))
        assert session.period() == (None, None)
    assert session.robot.commands == [] and session.robot.stops == [StopLevel.HOLD] * 3
    session.order("drive", (0, 0, -1, 0))
    assert session.acted().action[2] == np.float32(-STEP_M)


def test_closing_the_gripper_is_recorded_while_it_settles(session: Session) -> None:
    session.order("take-over")
    session.order("drive", (0, 0, 0, -1))
    decisions = [session.period()[0] for _ in range(GRIPPER_SETTLE_STEPS + 3)]
    assert [d is not None for d in decisions] == [True] * (GRIPPER_SETTLE_STEPS + 1) + [False] * 2
    assert all(d.action[3] == 0 for d in decisions if d)


@pytest.mark.parametrize("order", ["success", "failure"])
def test_a_verdict_ends_the_episode_with_one_neutral_step(session: Session, order: Any) -> None:
    session.acted()
    session.order("take-over")
    session.order("drive", (1, 0, 0, -1))
    session.acted()
    session.order(order)
    decision, verdict = session.period()
    assert decision is not None and verdict == StepOutcome(
        reward=float(order == "success"),
        terminated=True,
        truncated=False,
        success=order == "success",
        source="person",
    )
    np.testing.assert_array_equal(decision.action, [0, 0, 0, 0])  # the gripper stays as the person left it
    session.begin()
    session.order("drive", (1, 0, 0, 0))
    assert session.period()[1] is not None and not session.period()[1].is_last  # type: ignore[union-attr]


def test_a_person_may_judge_while_the_policy_drives(session: Session) -> None:
    session.acted()
    session.order("success")
    decision, verdict = session.period()
    assert decision is not None and decision.policy_version == -1 and decision.phase is Phase.POLICY
    assert verdict is not None and verdict.success and verdict.source == "person"


def test_a_reset_cuts_the_episode_off_without_a_verdict(session: Session) -> None:
    session.acted()
    session.order("reset")
    _, verdict = session.period()
    assert verdict is not None and (verdict.truncated, verdict.terminated, verdict.success) == (True, False, None)


def test_silence_holds_until_somebody_takes_over_or_hands_back(session: Session) -> None:
    session.order("take-over")
    session.order("drive", (1, 0, 0, 0))
    session.acted()
    session.now_s += INPUT_TIMEOUT_S + 0.1
    assert session.period() == (None, None) and session.authority.state is ControlState.HOLD
    session.order("drive", (1, 0, 0, 0))
    assert session.period() == (None, None)  # input alone does not resume
    session.order("hand-back", operator="bob")
    assert session.acted().phase is Phase.POLICY


def test_the_policys_step_limit_starts_anew_at_a_hand_back(make: Callable[..., Session]) -> None:
    session = make(max_steps=4)
    for _ in range(3):
        assert not session.period()[1].is_last  # type: ignore[union-attr]
    session.order("take-over")
    for _ in range(5):
        session.order("drive", (0, 1, 0, 0))
        assert not session.period()[1].is_last  # type: ignore[union-attr]
    session.order("hand-back")
    verdicts = [session.period()[1] for _ in range(4)]
    assert [v.truncated for v in verdicts if v] == [False, False, False, True]
    assert verdicts[-1] is not None and verdicts[-1].success is False


def test_a_re_arm_leads_from_a_stop_to_a_hold_at_once(session: Session) -> None:
    session.acted()
    session.driver.kernel.emergency_stop("ada")
    session.order("e-stop")
    assert session.period() == (None, None) and session.authority.state is ControlState.STOPPED
    assert session.robot.stops[-1] is StopLevel.SAFE
    session.order("hand-back")
    assert session.period() == (None, None) and not session.replies[-1].accepted
    session.order("re-arm")
    assert session.period() == (None, None) and session.authority.state is ControlState.HOLD
    assert session.driver.kernel.emergency is None and not session.tick.stopped
    session.order("hand-back")
    assert session.acted().phase is Phase.POLICY


def test_a_re_arm_lifts_no_stop_that_was_pressed_after_it(session: Session) -> None:
    session.acted()
    session.driver.kernel.emergency_stop("ada")
    session.order("e-stop")
    session.period()
    session.order("re-arm")
    session.pressed = 1  # once more, and the driver has heard of it before the loop takes the order
    assert session.period() == (None, None) and session.authority.state is ControlState.STOPPED
    assert session.driver.kernel.latched_estop is not None
    assert not session.replies[-1].accepted and "pressed again" in session.replies[-1].reason


def test_an_input_that_waited_while_the_robot_was_busy_moves_nothing(session: Session) -> None:
    session.order("take-over")
    session.period()
    session.order("drive", (1, 0, 0, 0))
    session.now_s += INPUT_TIMEOUT_S + 0.1  # a reset, say
    session.order("take-over")
    assert session.period() == (None, None) and session.authority.state is ControlState.HUMAN
    assert session.robot.commands == []


def test_of_a_persons_inputs_the_newest_counts_and_no_order_is_refused_for_them(session: Session) -> None:
    session.order("take-over")
    for _ in range(MAX_PENDING_COMMANDS):
        session.order("drive", (1, 0, 0, 0))
    session.order("drive", (0, -0.5, 0, 0))
    np.testing.assert_allclose(session.acted().action, [0, -STEP_M / 2, 0, GRIPPER_M], rtol=1e-6)
    assert [reply.accepted for reply in session.replies] == [True]


def test_a_latch_that_only_the_driver_knows_of_stops_the_session_too(session: Session) -> None:
    session.acted()
    session.driver.kernel.emergency_stop("the button")
    _, verdict = session.period()  # this command meets the latch
    assert verdict is not None and verdict.truncated and verdict.success is None
    session.begin()
    assert session.period() == (None, None) and session.authority.state is ControlState.STOPPED


def test_leaving_ends_the_episode_with_one_neutral_step(session: Session) -> None:
    session.acted()
    session.leaving = True
    decision, verdict = session.period()
    assert decision is not None and not decision.action[:3].any()
    assert verdict is not None and verdict.truncated and verdict.success is None


def test_a_flood_of_orders_is_refused_and_not_kept(session: Session) -> None:
    for _ in range(MAX_PENDING_COMMANDS + 1):
        session.order("reset")
    assert [(reply.accepted, reply.reason) for reply in session.replies] == [(False, "busy")]


def test_weights_may_wait_for_the_next_episode(make: Callable[..., Session]) -> None:
    session = make(swap_at="episode")
    publish(session.swapper, 2)
    assert {session.acted().policy_version for _ in range(3 * LENGTH)} == {1}
    session.begin()
    assert session.acted().policy_version == 2


@pytest.mark.parametrize(("swap_at", "version"), [("chunk", 2), ("episode", 1)])
def test_new_weights_come_in_while_a_person_has_the_robot(
    make: Callable[..., Session], swap_at: str, version: int
) -> None:
    """A learner that waits for the robots would otherwise wait for the person."""
    session = make(swap_at=swap_at)
    assert session.acted().policy_version == 1
    session.order("take-over")
    session.period()
    publish(session.swapper, 2)
    session.period()
    assert session.swapper.version == version


def test_with_weights_that_are_too_old_the_robot_holds_until_newer_ones_come(make: Callable[..., Session]) -> None:
    newest = [1]
    session = make(too_old=lambda: newest[0] - session.swapper.version > 1)
    assert session.acted().policy_version == 1
    newest[0] = 3
    assert session.period() == (None, None) and session.period() == (None, None)
    publish(session.swapper, 3)
    assert session.period() == (None, None), "they come in while it holds"
    assert session.acted().policy_version == 3


def test_each_inference_is_timed(make: Callable[..., Session]) -> None:
    times: list[float] = []
    session = make(observe=times.append)
    for _ in range(2 * LENGTH):
        session.acted()
    assert len(times) == 2 and min(times) > 0


def test_a_robot_holds_until_something_was_learned(make: Callable[..., Session]) -> None:
    session = make(learned=False)
    assert session.pilot.awaits_weights
    assert [session.period() for _ in range(3)] == [(None, None)] * 3
    assert session.robot.commands == [] and set(session.robot.stops) == {StopLevel.HOLD}
    session.order("take-over")
    session.order("drive", (0.5, 0, 0, 0))
    assert session.acted().phase is Phase.TELEOP, "the policy has done nothing that could be corrected"
    session.order("hand-back")
    assert session.period() == (None, None), "nothing was learned of it yet"
    publish(session.swapper, 1)
    assert session.period() == (None, None), "they come in while it holds"
    assert session.acted().policy_version == 1 and not session.pilot.awaits_weights


def test_a_robot_that_may_explore_does_so_before_anything_was_learned(make: Callable[..., Session]) -> None:
    session = make(learned=False, explore=True)
    assert not session.pilot.awaits_weights
    assert session.acted().policy_version == -1 and len(session.robot.commands) == 1


@pytest.mark.parametrize(
    ("driver", "explore", "explores"),
    [("sim", "auto", True), ("sim", "off", False), ("ur", "auto", False), ("ur", "on", True), ("point", "auto", False)],
)
def test_only_what_is_simulated_explores_unasked(driver: str, explore: Any, explores: bool) -> None:
    assert RobotConfig(driver=driver, explore=explore).explores is explores
