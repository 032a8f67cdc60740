"""Agents: a scripted expert, a policy, and a policy whose actions an operator may override."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

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

MAX_HUMAN_STEPS = 6000  # ten minutes at 10 Hz: bounds an episode that an operator left open
GRIPPER_SETTLE_STEPS = 5  # steps that are recorded after an operator toggled the gripper
MAX_PENDING_COMMANDS = 256

SwapAt = Literal["chunk", "episode"]


def task_outcome(after: TimeStep, *, late: bool) -> StepOutcome:
    """The outcome by the task's own rule. The episode is truncated if it is `late`, or if the driver held the robot."""
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
    """Acts by a scripted expert. Its steps are recorded as teleoperation."""

    def __init__(self, expert: Callable[[Mapping[str, Array]], Array], max_steps: int) -> None:
        self._expert, self._max_steps = expert, max_steps

    def begin_episode(self, time_step: TimeStep) -> None:
        pass

    def select_action(self, time_step: TimeStep) -> SelectedAction | None:
        return SelectedAction(action=np.asarray(self._expert(time_step.observation), np.float32), phase=Phase.TELEOP)

    def evaluate_step(self, after: TimeStep, steps: int) -> StepOutcome:
        return task_outcome(after, late=steps >= self._max_steps)


class PolicyAgent:
    """Executes a policy's action chunks, one action in each control period."""

    def __init__(
        self,
        policy: Callable[[], tuple[Policy, int]],
        instruction: str,
        max_steps: int,
        *,
        deterministic: bool,
        on_inference: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """Args:
        policy: returns the policy and its version. It is called before each chunk, so the policy may change there.
        on_inference: called with the seconds that each inference took.
        """
        self._policy, self._instruction, self._max_steps = policy, instruction, max_steps
        self._deterministic, self._on_inference = deterministic, on_inference
        self._chunk: deque[tuple[Array, float]] = deque()
        self._version = -1

    def begin_episode(self, time_step: TimeStep) -> None:
        self._chunk.clear()

    def discard_chunk(self) -> None:
        """Drops the rest of the chunk. Call it after another source has moved the robot."""
        self._chunk.clear()

    def select_action(self, time_step: TimeStep) -> SelectedAction | None:
        if not self._chunk:
            policy, self._version = self._policy()
            started_s = time.perf_counter()
            chunk = policy.act(time_step.observation, self._instruction, deterministic=self._deterministic)
            self._on_inference(time.perf_counter() - started_s)
            self._chunk.extend(zip(chunk.actions, chunk.log_prob.tolist(), strict=True))
        action, log_prob = self._chunk.popleft()
        return SelectedAction(action=action, phase=Phase.POLICY, policy_version=self._version, log_prob=log_prob)

    def evaluate_step(self, after: TimeStep, steps: int) -> StepOutcome:
        return task_outcome(after, late=steps >= self._max_steps)


class WeightsMonitor(Protocol):
    """The staleness and the reports of a policy whose weights change."""

    def is_too_stale(self) -> bool:
        """Whether the robot must hold until newer weights arrive."""

    def on_swap(self, version: int) -> None:
        """Weights of `version` act from now on."""

    def on_inference(self, seconds: float) -> None:
        """An inference took so long."""


class UpdatingPolicyAgent(PolicyAgent):
    """A policy whose weights are swapped while the robot runs.

    New weights are swapped in before a chunk, or with `swap_at` ``episode`` before an episode. The agent selects no
    action while its weights are too stale, before the first weights (unless it may `explore`), and while a policy
    server is unavailable.

    Attributes:
        error: why the policy server gave no action last; empty if it did.
    """

    def __init__(
        self,
        policies: DoubleBufferedPolicy,
        instruction: str,
        max_steps: int,
        monitor: WeightsMonitor,
        *,
        swap_at: SwapAt = "chunk",
        explore: bool = False,
    ) -> None:
        super().__init__(
            self._policy_for_chunk, instruction, max_steps, deterministic=False, on_inference=monitor.on_inference
        )
        self._policies, self._monitor, self._swap_at, self._explore = policies, monitor, swap_at, explore
        self.error = ""

    @property
    def awaits_weights(self) -> bool:
        """No learned weights have arrived, and the policy may not explore."""
        return not self._explore and self._policies.version == NO_VERSION

    def begin_episode(self, time_step: TimeStep) -> None:
        self.swap()
        super().begin_episode(time_step)

    def select_action(self, time_step: TimeStep) -> SelectedAction | None:
        if self.awaits_weights or self._monitor.is_too_stale():
            self.discard_chunk()
            self.swap()
            return None
        try:
            selected = super().select_action(time_step)
        except PolicyUnavailable as error:
            self.error = str(error)
            return None
        self.error = ""
        return selected

    def pause(self) -> None:
        """Call it in each control period in which an operator has the robot. Weights are swapped meanwhile."""
        self.discard_chunk()
        if self._swap_at == "chunk":
            self.swap()  # no chunk is in progress: a learner that waits for the robots need not wait for operators

    def swap(self) -> None:
        """Swaps in new weights if some are ready."""
        if (version := self._policies.swap_if_ready()) is not None:
            self._monitor.on_swap(version)

    def _policy_for_chunk(self) -> tuple[Policy, int]:
        if self._swap_at == "chunk":
            self.swap()
        return self._policies.policy, self._policies.version


class _PendingCommand(NamedTuple):
    """An operator's command, its e-stop sequence, and when it was received."""

    command: OperatorCommand
    estop_sequence: int
    received_s: float


def _rejection(command: OperatorCommand, reason: str) -> OperatorReply:
    return OperatorReply(
        robot=command.robot, operator=command.operator, order=command.order, accepted=False, reason=reason
    )


class OperatorCommandQueue:
    """Operators' commands on their way to the control loop. Any thread may `submit`; the control loop takes.

    An operator's newest input replaces an older one. Commands beyond `MAX_PENDING_COMMANDS` are rejected.
    """

    def __init__(self, clock: Callable[[], float], send_reply: Callable[[OperatorReply], object]) -> None:
        """Args:
        clock: monotonic seconds.
        send_reply: sends the rejection of a command; called in the thread that submits it.
        """
        self._clock, self._send_reply = clock, send_reply
        self._queue: CoalescingQueue[_PendingCommand] = CoalescingQueue(MAX_PENDING_COMMANDS)
        self._estop: OperatorCommand | None = None  # an e-stop that the control loop has not taken
        self._newest_estop = 0  # the `sequence` of the newest e-stop

    def submit(self, command: OperatorCommand, estop_sequence: int = 0) -> None:
        """Queues a command. Rejects a re-arm that is older than the newest e-stop, which arrives on a faster channel.

        Args:
            estop_sequence: see `driver_client.DriverRequest`; it grows with each e-stop and re-arm.
        """
        if command.order == "re-arm" and command.sequence < self._newest_estop:
            self._send_reply(_rejection(command, "the e-stop was pressed again since"))
            return
        key = ("drive", command.operator) if command.order == "drive" else None
        if not self._queue.put(_PendingCommand(command, estop_sequence, self._clock()), key):
            self._send_reply(_rejection(command, "busy"))

    def note_estop(self, command: OperatorCommand) -> None:
        """Notes an e-stop that is on its way to the driver. Never blocks and never rejects it."""
        self._newest_estop = max(self._newest_estop, command.sequence)
        self._estop = command

    def take_estop(self) -> OperatorCommand | None:
        """The newest e-stop since the last call."""
        estop, self._estop = self._estop, None
        return estop

    def get_nowait(self) -> _PendingCommand | None:
        """Removes and returns the oldest command."""
        return self._queue.get_nowait()


class SessionControl(Protocol):
    """The session functions that its agent calls."""

    def send_reply(self, reply: OperatorReply) -> None:
        """Sends the reply to an operator's command."""

    def rearm(self, person: str, estop_sequence: int) -> bool:
        """Releases the driver's e-stop; False if it was pressed again since."""

    def is_stopping(self) -> bool:
        """Whether the session ends, so that the episode must end."""

    def has_lease(self) -> bool:
        """Whether the session may move the robot."""


class _AppliedAction:
    """The action that was applied last, and the action that keeps the robot at rest after it."""

    def __init__(self, spec: RobotSpec) -> None:
        self._spec = spec
        self._neutral = np.array(spec.neutral, np.float32)
        self.value: Array = self._neutral.copy()

    def reset(self, time_step: TimeStep) -> None:
        self.value = self._neutral.copy()
        self.value = self._at_rest(time_step)

    def update(self, time_step: TimeStep) -> None:
        self.value = self._at_rest(time_step) if time_step.applied is None else time_step.applied

    def rest_action(self) -> Array:
        """The neutral action, with joint targets and gripper as they were applied last."""
        rest = self._neutral.copy()
        if joints := list(self._spec.joint_target):
            rest[joints] = self.value[joints]
        if self._spec.gripper >= 0:
            rest[self._spec.gripper] = self.value[self._spec.gripper]
        return rest

    def toggles_gripper(self, action: Array, rest: Array) -> bool:
        return self._spec.gripper >= 0 and bool(action[self._spec.gripper] != rest[self._spec.gripper])

    def _at_rest(self, time_step: TimeStep) -> Array:
        """The last action, with joint targets at the present joint positions."""
        rest = self.value.copy()
        if joints := list(self._spec.joint_target):
            rest[joints] = self._spec.rest_action(time_step.observation)[joints]
        return rest


class SharedControlAgent:
    """A policy that operators may override.

    The robot holds while the session has no lease, and while the policy selects no action (`UpdatingPolicyAgent`).

    While an operator drives, a control period is a step only if the operator moves something. An arm at rest is held
    and nothing is recorded. An operator's label ends the episode with one neutral step.
    """

    def __init__(
        self,
        spec: RobotSpec,
        authority: ControlAuthority,
        policy: UpdatingPolicyAgent,
        commands: OperatorCommandQueue,
        session: SessionControl,
        max_steps: int,
    ) -> None:
        self.authority = authority
        self._policy, self._commands, self._session, self._max_steps = policy, commands, session, max_steps
        self._applied = _AppliedAction(spec)
        self._label: OperatorLabel | None = None
        self._reset = False
        self._policy_steps = self._human_steps = self._settling_steps = 0

    @property
    def is_policy_suspended(self) -> bool:
        """An operator drives, or the robot holds or is stopped. Control periods then follow the clock."""
        return self.authority.state is not ControlState.POLICY

    @property
    def awaits_weights(self) -> bool:
        """See `UpdatingPolicyAgent.awaits_weights`."""
        return self._policy.awaits_weights

    @property
    def policy_error(self) -> str:
        """Why the policy server gives no action, for operators; empty if it does, or if the policy is suspended."""
        return "" if self.is_policy_suspended else self._policy.error

    def begin_episode(self, time_step: TimeStep) -> None:
        self._policy.begin_episode(time_step)
        self.authority.begin_episode()
        self._applied.reset(time_step)
        self._label = None
        self._reset = False
        self._policy_steps = self._human_steps = self._settling_steps = 0

    def select_action(self, time_step: TimeStep) -> SelectedAction | None:
        self._applied.update(time_step)
        state = self._update_authority(time_step)
        if self._label or self._reset or self._session.is_stopping():
            return SelectedAction(action=self._applied.rest_action(), phase=self.authority.phase)
        if not self._session.has_lease():
            self._policy.discard_chunk()
            return None
        if state is ControlState.POLICY:
            return self._policy_action(time_step)
        self._policy.pause()
        self._policy_steps = 0
        return self._operator_action() if state is ControlState.HUMAN else None

    def evaluate_step(self, after: TimeStep, steps: int) -> StepOutcome:
        if self._label:
            reward = float(self._label.success)
            return StepOutcome(reward, terminated=True, truncated=False, success=self._label.success, source="person")
        if self._reset or self._session.is_stopping():
            return StepOutcome(after.outcome.reward, False, True, after.outcome.success, after.outcome.source)
        return task_outcome(after, late=self._policy_steps >= self._max_steps or self._human_steps >= MAX_HUMAN_STEPS)

    def _update_authority(self, time_step: TimeStep) -> ControlState:
        """Applies e-stops, commands and local input to the authority; returns the state for this control period."""
        if (estop := self._commands.take_estop()) is not None:
            self.authority.emergency_stop(estop.operator)
        if time_step.stopped and self.authority.state is not ControlState.STOPPED:
            self.authority.emergency_stop(time_step.stopped_by, "latched")
        self._apply_commands()  # after the e-stop: a queued re-arm is newer than the time step
        self.authority.apply_local_input(time_step.local_input)
        state = self.authority.update()
        self._label = self.authority.take_label() or self._label
        self._reset = self.authority.take_reset_request() or self._reset
        return state

    def _apply_commands(self) -> None:
        while (pending := self._commands.get_nowait()) is not None:
            command = pending.command
            reply = self.authority.apply(command, pending.received_s)
            rearms = reply.accepted and command.order == "re-arm"
            if rearms and not self._session.rearm(command.operator, pending.estop_sequence):
                self.authority.emergency_stop("the driver", "pressed again")
                reply = _rejection(command, "the e-stop was pressed again since")
            if command.order != "drive":
                self._session.send_reply(reply)

    def _policy_action(self, time_step: TimeStep) -> SelectedAction | None:
        if self._policy.awaits_weights:
            self.authority.mark_policy_idle()
        selected = self._policy.select_action(time_step)
        self._policy_steps += selected is not None
        return selected

    def _operator_action(self) -> SelectedAction | None:
        """The operator's action; None if it moves nothing."""
        action = self.authority.action(self._applied.value)
        rest = self._applied.rest_action()
        if np.array_equal(action, rest) and not self._settling_steps:
            return None
        toggled = self._applied.toggles_gripper(action, rest)
        self._settling_steps = GRIPPER_SETTLE_STEPS if toggled else max(0, self._settling_steps - 1)
        self._human_steps += 1
        return SelectedAction(action=action, phase=self.authority.phase)
