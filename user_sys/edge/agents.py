"""Agents: a scripted expert, a policy, and a policy whose actions an operator may override."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from hal.camera import CameraFrame, default_stale_after_s
from hal.errors import HalError, HardwareLost, LeaseError, SpecError
from hal.motion_limits import SafetyReason, commanded_speeds
from hal.spec import STATE, Array, RobotSpec
from user_sys.edge.chunk_executor import ActingPolicy, ChunkExecutor
from user_sys.edge.control_authority import MOVING_ORDERS, ControlAuthority, ControlState, OperatorLabel
from user_sys.edge.environment import TaskInfo, TimeStep
from user_sys.edge.help_requests import InterventionConfig, InterventionRules
from user_sys.edge.recorder import SelectedAction, StepOutcome
from user_sys.episode import Phase
from user_sys.errors import PolicyUnavailable
from user_sys.logs import order_id
from user_sys.messages import OperatorCommand, OperatorReply
from user_sys.policies.policy import AGE_SUFFIX, ActionChunk, ExecutionConfig, Policy, PolicyQuery
from user_sys.tunnel.flow_control import CoalescingQueue

MAX_HUMAN_S = 600.0  # of an operator's motion in one episode
GRIPPER_SETTLE_STEPS = 5  # steps that are recorded after an operator toggled the gripper
MAX_PENDING_COMMANDS = 256
CLOCK_TOLERANCE_NS = 5_000_000_000  # of clocks that agree
MAX_HELD_PERIODS = 100
INTERRUPTIONS = SafetyReason.ESTOP | SafetyReason.STALE | SafetyReason.TOKEN | SafetyReason.WATCHDOG
MAX_POINTS = 20_000  # half an hour at 10 Hz; older points are forgotten
TOLERANCE = 0.02  # share of the action's range within which a point counts as reached


def task_outcome(after: TimeStep, *, late: bool) -> StepOutcome:
    """The outcome by the task's own rule. The episode is truncated by the task, if it is `late`, or if the driver held
    the robot.

    Success is False if an episode without a verdict was late, was ended by the task or stopped by the safety kernel. It
    stays unknown after an e-stop or an outage.
    """
    outcome = after.outcome
    late = late or outcome.truncated
    stopped = after.applied is None and bool(after.safety_reasons & ~INTERRUPTIONS)
    broken = after.held_periods > 0 or after.applied is None
    return StepOutcome(
        reward=outcome.reward,
        terminated=outcome.terminated,
        truncated=not outcome.terminated and (broken or late),
        success=False if outcome.success is None and (late or stopped or outcome.terminated) else outcome.success,
        source=outcome.source,
    )


class ScriptedAgent:
    """Acts by a scripted expert. Its steps are recorded as teleoperation."""

    def __init__(self, expert: Callable[[Mapping[str, Array]], Array]) -> None:
        self._expert, self._max_steps = expert, 0

    def begin_episode(self, time_step: TimeStep, task: TaskInfo) -> None:
        self._max_steps = task.max_steps

    def select_action(self, time_step: TimeStep) -> SelectedAction | None:
        """Raises SpecError: the expert's action is not finite."""
        action = np.asarray(self._expert(time_step.observation), np.float32)
        if not np.isfinite(action).all():
            raise SpecError(f"the scripted expert gives the action {action.tolist()}, which is not finite")
        return SelectedAction(action=action, phase=Phase.TELEOP)

    def evaluate_step(self, after: TimeStep, steps: int) -> StepOutcome:
        return task_outcome(after, late=steps >= self._max_steps)


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy of this process, with the weights of one version."""

    policy: Policy
    version: int = 0

    @property
    def cameras(self) -> tuple[str, ...]:
        return self.policy.cameras

    def act(self, query: PolicyQuery) -> ActionChunk:
        return self.policy.act(
            query.observation, query.sentence, deterministic=query.deterministic, context=query.context
        )


class NewestFrames:
    """The newest frame of each camera in an episode, as policies read them.

    Attributes:
        newest: by camera.
    """

    def __init__(self, spec: RobotSpec) -> None:
        self._specs = {camera.name: camera for camera in spec.cameras}
        self._period_s = spec.period_s
        self.newest: dict[str, CameraFrame] = {}

    def begin_episode(self) -> None:
        """Drops the frames from before the reset."""
        self.newest.clear()

    def update(self, time_step: TimeStep) -> None:
        """Call it with each time step of the episode."""
        self.newest.update(time_step.frames)

    def observation(self, time_step: TimeStep, cameras: Sequence[str]) -> Mapping[str, Array]:
        """The observation of `time_step` with the newest frames of `cameras` and their ages, see `Policy.act`.

        A frame may be as old as three frames of its camera and a control period take, and 0.1 s.

        Raises:
            PolicyUnavailable: a camera has delivered no frame in this episode, or its newest frame is older.
        """
        found = dict(time_step.observation)
        for name in cameras:
            frame = self.newest.get(name)
            if frame is None:
                raise PolicyUnavailable(f"camera {name} has delivered no frame in this episode; the robot holds")
            age_s = max(0, time_step.t_capture_ns - frame.t_capture_ns) / 1e9
            bound_s = default_stale_after_s(self._specs[name].rate_hz) + self._period_s
            if age_s > bound_s:
                raise PolicyUnavailable(
                    f"the newest frame of camera {name} is {age_s:.3g} s old, and {bound_s:.3g} s is the limit; the "
                    "robot holds"
                )
            feature = self._specs[name].feature
            found |= {feature: frame.image, feature + AGE_SUFFIX: np.array([age_s], np.float32)}
        return found


class PolicyAgent:
    """Executes a policy's action chunks, one action in each control period.

    Attributes:
        chunks: executes them. Discard them after another source has moved the robot.
        frames: update them with each time step in which another source has the robot.
    """

    def __init__(
        self,
        policy: ActingPolicy,
        spec: RobotSpec,
        execution: ExecutionConfig | None = None,
        *,
        deterministic: bool,
        follows_clock: bool = False,
    ) -> None:
        """`follows_clock`: see `ChunkExecutor`."""
        self._policy = policy
        self._task = TaskInfo(name="", sentence="", max_steps=0)
        self.frames = NewestFrames(spec)
        self.chunks = ChunkExecutor(
            policy,
            spec.action,
            execution or ExecutionConfig(),
            deterministic=deterministic,
            follows_clock=follows_clock,
            period_s=spec.period_s,
        )

    def begin_episode(self, time_step: TimeStep, task: TaskInfo) -> None:
        self._task = task
        self.chunks.begin_episode()
        self.frames.begin_episode()

    def select_action(self, time_step: TimeStep) -> SelectedAction:
        """Raises PolicyUnavailable: there is no action now."""
        self.frames.update(time_step)
        return self.chunks.next_action(
            lambda: self.frames.observation(time_step, self._policy.cameras),
            time_step.t_capture_ns,
            self._task.sentence,
        )

    def evaluate_step(self, after: TimeStep, steps: int) -> StepOutcome:
        return task_outcome(after, late=steps >= self._task.max_steps)


class HoldingAgent(PolicyAgent):
    """A `PolicyAgent` whose robot holds while asynchronous execution has no action, for `MAX_HELD_PERIODS` at most."""

    def begin_episode(self, time_step: TimeStep, task: TaskInfo) -> None:
        super().begin_episode(time_step, task)
        self._held_periods = 0

    def select_action(self, time_step: TimeStep) -> SelectedAction | None:  # type: ignore[override]  # it may hold
        """Raises PolicyUnavailable: there has been no action for `MAX_HELD_PERIODS`."""
        try:
            selected = super().select_action(time_step)
        except PolicyUnavailable:
            self._held_periods += 1
            if self._held_periods > MAX_HELD_PERIODS:
                raise
            return None
        self._held_periods = 0
        return selected


class Judge(Protocol):
    """A person who judges episodes."""

    def ask(self, text: str) -> None:
        """Shows a question, and forgets what was answered before. Never blocks."""

    def answer(self) -> str | None:
        """The next answer; None if there is none yet. Never blocks."""


class JudgedAgent:
    """A policy's agent whose episodes a person judges.

    The robot holds until the person has reset the scene, and after the task's last step until the answer. The answer
    ends the episode at any time, with one step at rest.
    """

    def __init__(self, agent: PolicyAgent, spec: RobotSpec, judge: Judge) -> None:
        self._agent, self._judge, self._applied = agent, judge, _AppliedAction(spec)
        self._has_begun = self._is_late = False
        self._success: bool | None = None

    def begin_episode(self, time_step: TimeStep, task: TaskInfo) -> None:
        self._agent.begin_episode(time_step, task)
        self._applied.reset(time_step)
        self._has_begun = self._is_late = False
        self._success = None
        self._judge.ask("reset the scene, then press Enter: the policy drives")

    def select_action(self, time_step: TimeStep) -> SelectedAction | None:
        """Raises PolicyUnavailable: there is no action now."""
        self._applied.update(time_step)
        answer = self._judge.answer()
        if self._has_begun and answer in ("y", "n"):
            self._success = answer == "y"
            return SelectedAction(action=self._applied.rest_action(), phase=Phase.POLICY)
        if answer is not None:
            self._has_begun = True
            self._judge.ask("success? type y or n, and Enter; then the robot moves to its start")
        return self._agent.select_action(time_step) if self._has_begun and not self._is_late else None

    def evaluate_step(self, after: TimeStep, steps: int) -> StepOutcome:
        outcome = self._agent.evaluate_step(after, steps)
        if self._success is not None:
            return replace(outcome, terminated=True, truncated=False, success=self._success, source="person")
        self._is_late |= outcome.truncated
        return outcome if outcome.terminated else replace(outcome, truncated=False, success=None)


class UpdatingPolicy(ActingPolicy, Protocol):
    """A policy whose weights change while the robot runs, in this process or in a policy server."""

    @property
    def awaits_weights(self) -> bool:
        """No learned weights have arrived, and the policy may not explore."""

    def begin_episode(self) -> None:
        """A new episode begins, so weights may be swapped."""

    def pause(self) -> None:
        """The policy does not act in this control period, so weights may be swapped."""


class _PendingCommand(NamedTuple):
    """An operator's command, its e-stop sequence, and when it was received; a moving order when it was forwarded."""

    command: OperatorCommand
    estop_sequence: int
    received_s: float


class OperatorCommandQueue:
    """Operators' commands on their way to the control loop. Any thread may `submit`; the control loop takes.

    An operator's newest input replaces an older one. Commands beyond `MAX_PENDING_COMMANDS` are rejected.
    """

    def __init__(self, clock: Callable[[], float], send_reply: Callable[[OperatorReply], object]) -> None:
        """Args:
        clock: monotonic seconds.
        send_reply: sends the reply to a command; called in the thread that submits it, or in the control loop's.
        """
        self._clock, self.send_reply = clock, send_reply
        self._queue: CoalescingQueue[_PendingCommand] = CoalescingQueue(MAX_PENDING_COMMANDS)
        self._estop: OperatorCommand | None = None  # an e-stop that the control loop has not taken
        self._newest_estop: OperatorCommand | None = None  # with the greatest `sequence`
        self._estop_s = 0.0  # when an e-stop arrived last

    def submit(
        self, command: OperatorCommand, estop_sequence: int = 0, waited_s: float = 0.0, *, is_local: bool = False
    ) -> None:
        """Queues a command. Rejects a re-arm that is older than the newest e-stop, which arrives on a faster channel.

        The consoles' clocks decide between orders of different consoles. An e-stop of a clock that is ahead counts as
        pressed at its arrival, for another person whose clock agrees with this computer's. A local order needs no
        clock: it is not delayed, so it is newer than each e-stop that has arrived.

        Args:
            estop_sequence: see `driver_client.DriverRequest`; it grows with each e-stop and re-arm.
            waited_s: how long it was on its way. Only orders of `MOVING_ORDERS` count from then.
            is_local: it comes from a console on this computer.
        """
        if command.order == "re-arm" and not is_local and self._is_older_than_estop(command):
            self.send_reply(command.reply(accepted=False, reason="the e-stop was pressed again since"))
            return
        key = ("drive", command.operator) if command.order == "drive" else None
        received_s = self._clock() - (waited_s if command.order in MOVING_ORDERS else 0.0)
        if not self._queue.put(_PendingCommand(command, estop_sequence, received_s), key):
            self.send_reply(command.reply(accepted=False, reason="busy"))

    def note_estop(self, command: OperatorCommand) -> None:
        """Notes an e-stop that is on its way to the driver. Never blocks and never rejects it."""
        if self._newest_estop is None or command.sequence >= self._newest_estop.sequence:
            self._newest_estop = command
        self._estop, self._estop_s = command, self._clock()

    def _is_older_than_estop(self, rearm: OperatorCommand) -> bool:
        estop = self._newest_estop
        if estop is None or rearm.sequence >= estop.sequence:
            return False
        latest_ns = time.time_ns() + CLOCK_TOLERANCE_NS
        pressed_ns = latest_ns - round((self._clock() - self._estop_s) * 1e9)
        return rearm.operator == estop.operator or not pressed_ns <= rearm.sequence <= latest_ns

    def take_estop(self) -> OperatorCommand | None:
        """The newest e-stop since the last call."""
        estop, self._estop = self._estop, None
        return estop

    def get_nowait(self) -> _PendingCommand | None:
        """Removes and returns the oldest command."""
        return self._queue.get_nowait()


class SessionControl(Protocol):
    """The session functions that its agent calls."""

    @property
    def episode(self) -> str:
        """The running or last episode; empty before the first."""

    def rearm(self, person: str, estop_sequence: int) -> bool:
        """Releases the driver's e-stop; False if it was pressed again since."""

    def is_stopping(self) -> bool:
        """Whether the session ends, so that the episode must end."""

    def has_lease(self) -> bool:
        """Whether the session may move the robot."""

    def set_driver_mode(self, *, suspended: bool, policy_error: str) -> None:
        """Sets speed limit and pace of the control period that follows, see the agent's properties of these names."""


class _AppliedAction:
    """The action that was applied last, and the action that keeps the robot at rest after it."""

    def __init__(self, spec: RobotSpec) -> None:
        self._spec = spec
        self._neutral = np.array(spec.neutral, np.float32)
        self.value: Array = self._neutral.copy()
        self._has_acted, self._measured_grip = False, _measured_grip(spec)

    def reset(self, time_step: TimeStep) -> None:
        """The gripper's element stays, since a reset may leave the gripper closed. Before any action it is the measured
        one; neutral if the state has none."""
        self.value = self._at_rest(time_step)
        if not self._has_acted and self._measured_grip >= 0:
            grip, action = self._spec.gripper, self._spec.action
            measured = time_step.observation[STATE][self._measured_grip]
            self.value[grip] = np.clip(measured, action.low[grip], action.high[grip])

    def update(self, time_step: TimeStep) -> None:
        self._has_acted |= time_step.applied is not None
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


def _measured_grip(spec: RobotSpec) -> int:
    """The index of the gripper's position in the state, by its label in the action; -1 if there is none."""
    labels = next((each.labels for each in spec.observation if each.name == STATE), ())
    name = spec.action.labels[spec.gripper] if spec.gripper >= 0 and spec.neutral else ""
    return labels.index(name) if name in labels else -1


class SharedControlAgent:
    """A policy that operators may override.

    The robot holds while the session has no lease, and while the policy is unavailable.

    While an operator drives, a control period is a step only if the operator moves something. An arm at rest is held
    and nothing is recorded. An operator's label ends the episode with one neutral step. An operator who rewinds moves
    the robot back along its path of the episode, at most to the start. So does the robot itself, before it requests
    help, if the settings say so. After `MAX_HUMAN_S` of an operator's motion the robot holds, and only goes back.

    An e-stop that is latched at a reset leaves the robot where it is. Then a person may drive it, the policy may not: a
    hand-back leads to the next reset, as an order to reset does.
    """

    def __init__(
        self,
        spec: RobotSpec,
        authority: ControlAuthority,
        policy: UpdatingPolicy,
        commands: OperatorCommandQueue,
        session: SessionControl,
        intervention: InterventionConfig | None = None,
        execution: ExecutionConfig | None = None,
        *,
        follows_clock: bool = False,
    ) -> None:
        self.authority = authority
        self._rules = InterventionRules(intervention or InterventionConfig(), spec)
        self._path, self._retraces = TravelledPath(spec), False
        self._policy, self._commands, self._session = policy, commands, session
        self._max_human_steps = round(MAX_HUMAN_S * spec.rate_hz)
        self._policy_agent = PolicyAgent(policy, spec, execution, deterministic=False, follows_clock=follows_clock)
        self._unavailable = ""  # why the policy gave no action last; of a suspended one `stopped_why`
        self._applied = _AppliedAction(spec)
        self._label: OperatorLabel | None = None
        self._reset = False
        self._policy_steps = self._human_steps = self._settling_steps = 0

    @property
    def chunks(self) -> ChunkExecutor:
        """The policy's."""
        return self._policy_agent.chunks

    @property
    def is_policy_suspended(self) -> bool:
        """An operator drives, or the robot holds or is stopped. Control periods then follow the clock."""
        return self.authority.state is not ControlState.POLICY

    @property
    def policy_error(self) -> str:
        """Why the policy gives no action, for operators; empty if it does, or if the policy is suspended."""
        return "" if self.is_policy_suspended else self._unavailable

    @property
    def stopped_why(self) -> str:
        """For operators: why the robot latched its own e-stop, or holds although one drives; empty if it does not."""
        return self._unavailable if self.is_policy_suspended else ""

    def begin_episode(self, time_step: TimeStep, task: TaskInfo) -> None:
        self.authority.mark_no_episode()  # labels that were given during the reset are refused
        self._update_authority(time_step)
        self._policy.begin_episode()
        self._policy_agent.begin_episode(time_step, task)
        self.authority.begin_episode()
        if time_step.stopped:
            self.authority.mark_no_episode()
        elif self._rules.reset_instructions and self.authority.state is not ControlState.HUMAN:
            self.authority.request_help(self._rules.reset_instructions, for_reset=True)
            self.authority.mark_policy_idle()
        self._applied.reset(time_step)
        self._path.begin(self._applied.rest_action())
        self._rules.begin_episode(task)
        self._label = None
        self._reset = False
        self._policy_steps = self._human_steps = self._settling_steps = 0

    def select_action(self, time_step: TimeStep) -> SelectedAction | None:
        selected = self._select_action(time_step)
        self._session.set_driver_mode(suspended=self.is_policy_suspended, policy_error=self.policy_error)
        return selected

    def awaits_person(self, time_step: TimeStep) -> bool:
        """Applies what operators did since the last control period, in which the robot held outside of an episode.

        False if the policy may drive or an operator requested a reset, so that an episode may begin. A reset that was
        requested before the call is discarded: an error or an e-stop has come in between.
        """
        self.authority.mark_no_episode()
        self._reset = False
        self._update_authority(time_step)
        self._session.set_driver_mode(suspended=self.is_policy_suspended, policy_error=self.policy_error)
        if self.is_policy_suspended:
            self._policy.pause()
        return self.is_policy_suspended and not self._reset

    def answer_orders(self, refusal: str) -> None:
        """Applies orders while no control period passes, as the robot cannot be reached or may not be moved.

        Args:
            refusal: why an order of `MOVING_ORDERS` is refused meanwhile.
        """
        self.authority.mark_no_episode()
        self._apply_commands(refusal)
        self.authority.update()
        self._session.set_driver_mode(suspended=self.is_policy_suspended, policy_error=self.policy_error)

    def _select_action(self, time_step: TimeStep) -> SelectedAction | None:
        self._applied.update(time_step)
        if time_step.applied is not None:
            (self._path.retrace if self._retraces else self._path.advance)(time_step.applied)
        self._retraces = False
        self._policy_agent.frames.update(time_step)
        state = self._update_authority(time_step)
        if state is ControlState.POLICY and not self.authority.runs_episode:
            self._reset = True
        if self._label or self._reset or self._session.is_stopping():
            return SelectedAction(action=self._applied.rest_action(), phase=self._last_phase(state))
        if not self._session.has_lease():
            self.chunks.discard()
            return None
        if state is ControlState.POLICY:
            return self._return_action() or self._policy_action(time_step)
        self._rules.end_return()
        self.chunks.discard()
        self._policy.pause()  # no chunk is in progress: a learner that waits for the robots need not wait for operators
        if state is not ControlState.HUMAN:
            return None
        self._policy_steps = 0
        return self._operator_action(time_step)

    def _last_phase(self, state: ControlState) -> Phase:
        """Of the last step, in which the robot rests: a person's only if one drives, or has driven from the start.

        Else learners would imitate a person who stands still there.
        """
        phase = self.authority.phase
        is_persons = state is ControlState.HUMAN or (phase is Phase.TELEOP and self._human_steps > 0)
        return phase if is_persons else Phase.POLICY

    def evaluate_step(self, after: TimeStep, steps: int) -> StepOutcome:
        if self._label:
            reward = float(self._label.success)
            return StepOutcome(reward, terminated=True, truncated=False, success=self._label.success, source="person")
        ends = self._reset or self._session.is_stopping()
        if not self.authority.runs_episode or self.authority.awaits_reset:
            return StepOutcome(0.0, False, ends, None, after.outcome.source)
        if ends:
            outcome = task_outcome(after, late=False)
            return replace(outcome, truncated=not outcome.terminated)
        return self._policy_agent.evaluate_step(after, self._policy_steps)

    def _update_authority(self, time_step: TimeStep) -> ControlState:
        """Applies e-stops, commands and local input to the authority; returns the state for this control period."""
        if (estop := self._commands.take_estop()) is not None:
            self.authority.emergency_stop(estop.operator)
        if time_step.stopped and self.authority.state is not ControlState.STOPPED:
            self.authority.emergency_stop(time_step.stopped_by, "latched")
        self._apply_commands()  # after the e-stop: a queued re-arm is newer than the time step
        was_held = self.authority.is_held_by_person and not self.authority.awaits_reset
        self.authority.apply_local_input(time_step.local_input)
        state = self.authority.update()
        if state is not ControlState.POLICY:
            self._unavailable = time_step.stopped_why
        if was_held and state is ControlState.POLICY and self._rules.ends_episode:  # a device handed back
            self._reset = True
        self._label = self.authority.take_label() or self._label
        self._reset = self.authority.take_reset_request() or self._reset
        return state

    def _apply_commands(self, refusal: str = "") -> None:
        """`refusal`: why an order of `MOVING_ORDERS` is refused; empty if it is not."""
        while (pending := self._commands.get_nowait()) is not None:
            command = pending.command
            order_id.set(f"{command.operator}/{command.sequence}")
            prepares_scene = self.authority.awaits_reset
            if refusal and command.order in MOVING_ORDERS:
                reply = command.reply(accepted=False, reason=refusal)
            elif command.episode not in ("", self._session.episode):
                reply = command.reply(accepted=False, reason="its episode has ended; label it on the Episodes page")
            else:
                reply = self.authority.apply(command, pending.received_s)
            rearms = reply.accepted and command.order == "re-arm"
            if rearms and (why := self._rearm(command.operator, pending.estop_sequence)):
                self.authority.emergency_stop("the driver", why)
                reply = command.reply(accepted=False, reason=why)
            if reply.accepted and command.order == "hand-back":
                self._policy_steps = 0
                self._reset = self._reset or (self._rules.ends_episode and not prepares_scene)
            if command.order != "drive":
                self._commands.send_reply(reply)
        order_id.set("")

    def _rearm(self, person: str, estop_sequence: int) -> str:
        """Re-arms the driver. Returns why it remains stopped; empty if it does not."""
        try:
            done = self._session.rearm(person, estop_sequence)
        except (LeaseError, HardwareLost):
            raise
        except HalError as error:
            return f"the driver cannot re-arm: {error}"
        return "" if done else "the e-stop was pressed again since"

    def _policy_action(self, time_step: TimeStep) -> SelectedAction | None:
        if self._policy.awaits_weights and not self.chunks.has_acted:
            self.authority.mark_policy_idle()
        try:
            selected = self._policy_agent.select_action(time_step)
        except PolicyUnavailable as error:
            self._unavailable = "" if self.chunks.counts_delay else str(error)
            if self.chunks.is_idle:
                self._policy.pause()
            return None
        self._unavailable = ""
        disagreement, frames = self.chunks.counters.disagreement, self._policy_agent.frames.newest
        if reason := self._rules.help_reason(self._policy_steps, time_step.outcome, disagreement, frames):
            self.chunks.discard()
            if self._rules.begin_return():
                self._policy_steps = 0
                return self._return_action()
            self.authority.request_help(reason, self._rules.wait_s)
            return None
        self._policy_steps += 1
        return selected

    def _return_action(self) -> SelectedAction | None:
        """The next action of the robot's own return to an earlier state; None if it does not return."""
        if not self._rules.take_step_back():
            return None
        self.chunks.discard()
        self._policy.pause()
        if (back := self._action_back()) is None:
            self._rules.end_return()
        return back

    def _action_back(self) -> SelectedAction | None:
        """The action back along the path; None at its start."""
        if (back := self._path.step_back()) is None:
            return None
        self._retraces = True
        return SelectedAction(action=back, phase=Phase.RECOVERY)

    def _operator_action(self, time_step: TimeStep) -> SelectedAction | None:
        """The operator's action; None if it moves nothing."""
        if self.authority.is_rewinding:
            return self._action_back()
        if self._human_steps >= self._max_human_steps and self.authority.runs_episode:
            self._unavailable = f"holds: a person has moved it for {MAX_HUMAN_S:g} s; label this episode, or hand back"
            return None
        action = self.authority.action(self._applied.value, time_step.observation)
        rest = self._applied.rest_action()
        if np.array_equal(action, rest) and not self._settling_steps:
            return None
        toggled = self._applied.toggles_gripper(action, rest)
        self._settling_steps = GRIPPER_SETTLE_STEPS if toggled else max(0, self._settling_steps - 1)
        self._human_steps += 1
        return SelectedAction(action=action, phase=self.authority.phase)


class TravelledPath:
    """The points of one episode, in the space of actions, and the actions that retrace them. One thread calls it.

    A person who corrects a failing policy first moves the robot back to a state that the policy knows, and then shows
    what to do (RaC, Hu et al., 2025, "RaC: Robot learning for long-horizon tasks by scaling recovery and correction").

    A point has the sum of the applied steps in the elements of `RobotSpec.tool_delta` and `joint_delta`. In joint
    targets and the gripper it has the applied value. A speed, such as that of a mobile base, is no place: it has the
    neutral value, so that the base stands while the arm is moved back.
    """

    def __init__(self, spec: RobotSpec) -> None:
        self._neutral = np.array(spec.neutral or (0.0,) * len(spec.action.labels), np.float64)
        self._low, self._high = (np.array(bound, np.float64) for bound in (spec.action.low, spec.action.high))
        self._deltas = np.zeros(len(self._neutral), bool)
        self._deltas[[*spec.tool_delta, *spec.joint_delta]] = True
        self._speeds = commanded_speeds(spec)
        self._tolerance = TOLERANCE * np.where(np.isfinite(self._high - self._low), self._high - self._low, 1.0)
        self._here: Array = self._neutral
        self._points: deque[Array] = deque(maxlen=MAX_POINTS)
        self._has_gone_back = False

    def begin(self, rest: Array) -> None:
        """An episode begins; `rest` is the action that keeps the robot where it is."""
        self._here = np.where(self._deltas, 0.0, rest)
        self._points.clear()
        self._points.append(self._here)

    def advance(self, applied: Array) -> None:
        """The robot has moved on by `applied` (a,)."""
        if self._has_gone_back:
            self._points.append(self._here)
            self._has_gone_back = False
        self._move(applied)
        if not self._points or (np.abs(self._here - self._points[-1]) > self._tolerance / 2).any():
            self._points.append(self._here)

    def retrace(self, applied: Array) -> None:
        """The robot has moved back by `applied`, the action that `step_back` gave as the safety kernel limited it."""
        self._move(applied)
        self._has_gone_back = True

    def step_back(self) -> Array | None:
        """The action towards the last point that the robot is not at, float32 (a,); None at the start of the path."""
        while self._points and (np.abs(self._here - self._points[-1]) <= self._tolerance).all():
            self._points.pop()
        if not self._points:
            return None
        goal = self._points[-1]
        action = np.where(self._deltas, self._neutral + goal - self._here, goal)
        within: Array = np.clip(action, self._low, self._high).astype(np.float32)
        return within

    def _move(self, applied: Array) -> None:
        self._here = np.where(self._deltas, self._here + applied - self._neutral, applied)
        self._here[self._speeds] = self._neutral[self._speeds]
