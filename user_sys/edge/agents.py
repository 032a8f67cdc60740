"""Who chooses the actions: a policy alone, a scripted expert, or a policy with people who may step in."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from hal.spec import Array, RobotSpec
from user_sys.edge.control_authority import ControlAuthority, ControlState, OperatorLabel
from user_sys.edge.environment import TimeStep
from user_sys.edge.recorder import SelectedAction, StepOutcome
from user_sys.episode import Phase
from user_sys.errors import PolicyUnavailable
from user_sys.messages import NO_VERSION, OperatorCommand, OperatorReply
from user_sys.policies.policy import Policy
from user_sys.tunnel.flow_control import CoalescingQueue
from user_sys.weights.double_buffer import DoubleBufferedPolicy

MAX_HUMAN_STEPS = 6000  # ten minutes at 10 Hz: an episode that a person forgot
GRIPPER_SETTLE_STEPS = 5  # steps that are recorded after a person toggled the gripper
MAX_PENDING_COMMANDS = 256

SwapAt = Literal["chunk", "episode"]


def task_outcome(after: TimeStep, *, late: bool) -> StepOutcome:
    """The task's own verdict; the episode is cut off when it is `late`, or where the driver could not carry it on."""
    outcome = after.outcome
    broken = after.held_periods > 0 or after.applied is None
    return StepOutcome(
        reward=outcome.reward,
        terminated=outcome.terminated,
        truncated=not outcome.terminated and (broken or late),
        success=False if outcome.success is None and late else outcome.success,
        source=outcome.source,
    )


class ScriptedAgent:
    """A scripted demonstrator; its steps are recorded as teleoperation."""

    def __init__(self, expert: Callable[[Mapping[str, Array]], Array], max_steps: int) -> None:
        self._expert, self._max_steps = expert, max_steps

    def begin_episode(self, tick: TimeStep) -> None:
        pass

    def select_action(self, tick: TimeStep) -> SelectedAction | None:
        return SelectedAction(action=np.asarray(self._expert(tick.observation), np.float32), phase=Phase.TELEOP)

    def evaluate_step(self, after: TimeStep, steps: int) -> StepOutcome:
        return task_outcome(after, late=steps >= self._max_steps)


class PolicyAgent:
    """Executes a policy's action chunks; new weights come in between two chunks only.

    `policy` is asked for anew at each chunk, so that it may be swapped. `observe` is told how long each inference took.
    """

    def __init__(
        self,
        policy: Callable[[], tuple[Policy, int]],
        sentence: str,
        max_steps: int,
        *,
        deterministic: bool,
        on_inference: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._policy, self._sentence, self._max_steps = policy, sentence, max_steps
        self._deterministic, self._observe = deterministic, on_inference
        self._chunk: deque[tuple[Array, float]] = deque()
        self._version = -1

    def begin_episode(self, tick: TimeStep) -> None:
        self._chunk.clear()

    def discard_chunk(self) -> None:
        """Drops what is left of the chunk: somebody else moved the robot."""
        self._chunk.clear()

    def select_action(self, tick: TimeStep) -> SelectedAction | None:
        if not self._chunk:
            policy, self._version = self._policy()
            started_s = time.perf_counter()
            chunk = policy.act(tick.observation, self._sentence, deterministic=self._deterministic)
            self._observe(time.perf_counter() - started_s)
            self._chunk.extend(zip(chunk.actions, chunk.log_prob.tolist(), strict=True))
        action, log_prob = self._chunk.popleft()
        return SelectedAction(action=action, phase=Phase.POLICY, policy_version=self._version, log_prob=log_prob)

    def evaluate_step(self, after: TimeStep, steps: int) -> StepOutcome:
        return task_outcome(after, late=steps >= self._max_steps)


class _PendingCommand(NamedTuple):
    """What a person ordered, and when it came in."""

    command: OperatorCommand
    turn: int
    heard_s: float


def _rejection(command: OperatorCommand, reason: str) -> OperatorReply:
    return OperatorReply(
        robot=command.robot, operator=command.operator, order=command.order, accepted=False, reason=reason
    )


class SharedControlAgent:
    """A policy, and people who may take over. Orders come in through `submit` from any thread.

    New weights take over before a chunk, or with `swap_at` ``episode`` before an episode. While they are `too_old` the
    policy does not act and the robot holds; likewise before the first, unless it may `explore`, and while a policy that
    acts in another process is away. While the session may not drive, since its lease has run out, the robot holds too.

    While a person drives, a control period is a step only when the person moves something: an arm at rest is held and
    nothing is recorded. A person's verdict ends the episode with one neutral step.
    """

    def __init__(
        self,
        spec: RobotSpec,
        authority: ControlAuthority,
        swapper: DoubleBufferedPolicy,
        sentence: str,
        max_steps: int,
        reply: Callable[[OperatorReply], object],
        rearm: Callable[[str, int], bool],
        leaving: Callable[[], bool],
        swapped: Callable[[int], object] = lambda version: None,
        swap_at: SwapAt = "chunk",
        too_old: Callable[[], bool] = lambda: False,
        observe: Callable[[float], object] = lambda seconds: None,
        explore: bool = False,
        may_drive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._spec, self.authority, self._max_steps = spec, authority, max_steps
        self._reply, self._rearm, self._leaving = reply, rearm, leaving
        self._swapper, self._swapped = swapper, swapped
        self._swap_at, self._too_old, self._explore = swap_at, too_old, explore
        self._may_drive = may_drive
        self._policy = PolicyAgent(self._newest_policy, sentence, max_steps, deterministic=False, on_inference=observe)
        self._orders: CoalescingQueue[_PendingCommand] = CoalescingQueue(MAX_PENDING_COMMANDS)
        self._pressed: OperatorCommand | None = None  # an e-stop that the authority was not told of
        self._newest_press = 0  # the sequence of the newest e-stop
        self._neutral = np.array(spec.neutral, np.float32)
        self._away = ""

    @property
    def is_policy_suspended(self) -> bool:
        """A person drives, or the robot holds or is stopped: the clock is obeyed."""
        return self.authority.state is not ControlState.POLICY

    @property
    def awaits_weights(self) -> bool:
        """Nothing that was learned has come yet, and the policy may not explore."""
        return not self._explore and self._swapper.version == NO_VERSION

    @property
    def policy_error(self) -> str:
        """Why the policy gives no action now, for people; empty where it does, or somebody else drives."""
        return "" if self.is_policy_suspended else self._away

    def submit(self, command: OperatorCommand, estop_sequence: int = 0) -> None:
        """Takes an order from the console; of a person's inputs the newest alone waits. A flood beyond the bound is
        refused, and so is a re-arm that was given before the newest e-stop, which came by a shorter way.

        Args:
            turn: see `driver_wire.Request`; it grows from one e-stop or re-arm to the next.
        """
        if command.order == "re-arm" and command.sequence < self._newest_press:
            self._reply(_rejection(command, "the e-stop was pressed again since"))
            return
        key = ("drive", command.operator) if command.order == "drive" else None
        if not self._orders.put(_PendingCommand(command, estop_sequence, self.authority.clock()), key):
            self._reply(_rejection(command, "busy"))

    def note_estop(self, command: OperatorCommand) -> None:
        """Takes note of an e-stop on its way to the driver. From any thread; nothing delays or refuses it."""
        self._newest_press = max(self._newest_press, command.sequence)
        self._pressed = command

    def begin_episode(self, tick: TimeStep) -> None:
        self._swap()
        self.authority.begin_episode()
        self._policy.begin_episode(tick)
        self._applied = self._neutral.copy()
        self._applied = self._at_rest(tick)
        self._mark: OperatorLabel | None = None
        self._reset = False
        self._policy_steps = self._human_steps = self._moving = 0

    def select_action(self, tick: TimeStep) -> SelectedAction | None:
        self._applied = self._at_rest(tick) if tick.applied is None else tick.applied
        pressed, self._pressed = self._pressed, None
        if pressed is not None:
            self.authority.emergency_stop(pressed.operator)
        if tick.stopped and self.authority.state is not ControlState.STOPPED:
            self.authority.emergency_stop(tick.stopped_by, "latched")
        self._obey()  # afterwards: a re-arm is newer than the tick
        self.authority.apply_local_input(tick.local_input)
        state = self.authority.update()
        self._mark = self.authority.take_label() or self._mark
        self._reset = self.authority.take_reset_request() or self._reset
        if self._mark or self._reset or self._leaving():
            return SelectedAction(action=self._rest(), phase=self.authority.phase)
        if not self._may_drive():
            self._policy.discard_chunk()
            return None
        if state is ControlState.POLICY:
            if self.awaits_weights or self._too_old():
                self._wait_for_weights()
                return None
            return self._ask_policy(tick)
        self._policy.discard_chunk()
        self._policy_steps = 0
        if self._swap_at == "chunk":
            self._swap()  # no chunk is under way: a learner that waits for the robots need not wait for people
        return self._hand() if state is ControlState.HUMAN else None

    def _ask_policy(self, tick: TimeStep) -> SelectedAction | None:
        """Its decision, or None where it is away. It is asked again in the next control period."""
        try:
            decision = self._policy.select_action(tick)
        except PolicyUnavailable as away:
            self._away = str(away)
            return None
        self._away = ""
        self._policy_steps += 1
        return decision

    def _wait_for_weights(self) -> None:
        if self.awaits_weights:
            self.authority.mark_policy_idle()
        self._policy.discard_chunk()
        self._swap()

    def evaluate_step(self, after: TimeStep, steps: int) -> StepOutcome:
        if self._mark:
            reward = float(self._mark.success)
            return StepOutcome(reward, terminated=True, truncated=False, success=self._mark.success, source="person")
        if self._reset or self._leaving():
            return StepOutcome(after.outcome.reward, False, True, after.outcome.success, after.outcome.source)
        return task_outcome(after, late=self._policy_steps >= self._max_steps or self._human_steps >= MAX_HUMAN_STEPS)

    def _obey(self) -> None:
        while (order := self._orders.get_nowait()) is not None:
            command = order.command
            reply = self.authority.apply(command, order.heard_s)
            if reply.accepted and command.order == "re-arm" and not self._rearm(command.operator, order.turn):
                self.authority.emergency_stop("the driver", "pressed again")
                reply = _rejection(command, "the e-stop was pressed again since")
            if command.order != "drive":
                self._reply(reply)

    def _hand(self) -> SelectedAction | None:
        """The person's action, or None where the hand is still."""
        action = self.authority.action(self._applied)
        rest = self._rest()
        toggled = self._spec.gripper >= 0 and action[self._spec.gripper] != rest[self._spec.gripper]
        if np.array_equal(action, rest) and not self._moving:
            return None
        self._moving = GRIPPER_SETTLE_STEPS if toggled else max(0, self._moving - 1)
        self._human_steps += 1
        return SelectedAction(action=action, phase=self.authority.phase)

    def _newest_policy(self) -> tuple[Policy, int]:
        """Between two chunks: the safe point for new weights."""
        if self._swap_at == "chunk":
            self._swap()
        return self._swapper.policy, self._swapper.version

    def _swap(self) -> None:
        if (version := self._swapper.swap_if_ready()) is not None:
            self._swapped(version)

    def _at_rest(self, tick: TimeStep) -> Array:
        """What was applied last, with joints that are moved by targets where they stand now."""
        rest = self._applied.copy()
        if joints := list(self._spec.joint_target):
            rest[joints] = self._spec.rest_action(tick.observation)[joints]
        return rest

    def _rest(self) -> Array:
        rest = self._neutral.copy()
        if joints := list(self._spec.joint_target):
            rest[joints] = self._applied[joints]
        if self._spec.gripper >= 0:
            rest[self._spec.gripper] = self._applied[self._spec.gripper]
        return rest
