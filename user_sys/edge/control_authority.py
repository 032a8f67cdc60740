"""Control authority over one robot: an explicit state machine in the robot's session on the edge.

::

    POLICY --take-over--> HUMAN --hand-back--> POLICY
    HUMAN --silence, release--> HOLD --take-over--> HUMAN,  HOLD --hand-back--> POLICY
    any --e-stop--> STOPPED --re-arm--> HOLD

One operator drives at a time: in HUMAN, commands of every other operator are refused, and the refusal names the
operator. In HOLD any operator may take over or hand back; input alone does not resume. Every operator may press the
e-stop at any time.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hal.errors import SpecError
from hal.spec import Array, RobotSpec
from hal.teleoperator import TeleopInput
from user_sys.episode import Phase
from user_sys.errors import AuthorityError
from user_sys.messages import OperatorCommand, OperatorReply

INPUT_TIMEOUT_S = 0.2
MAX_AUDIT_ENTRIES = 4096
MAX_OPERATOR_CHARS = 64
LOCAL_OPERATOR = "a person at the robot"
"""The operator whose input comes from a device on the robot's own computer."""

_log = logging.getLogger(__name__)


class ControlState(enum.StrEnum):
    """Who controls the robot. The values are those of ``RobotStatus.authority``."""

    POLICY = "policy"
    HUMAN = "human"
    HOLD = "hold"
    STOPPED = "stopped"


_LEGAL_TRANSITIONS = frozenset(
    {
        (ControlState.POLICY, ControlState.HUMAN),
        (ControlState.HUMAN, ControlState.POLICY),
        (ControlState.HUMAN, ControlState.HOLD),
        (ControlState.HOLD, ControlState.HUMAN),
        (ControlState.HOLD, ControlState.POLICY),
        (ControlState.POLICY, ControlState.STOPPED),
        (ControlState.HUMAN, ControlState.STOPPED),
        (ControlState.HOLD, ControlState.STOPPED),
        (ControlState.STOPPED, ControlState.HOLD),
    }
)


@dataclass(frozen=True)
class AuthorityTransition:
    """One change of authority: its time, its operator, and the command that caused it (``silence`` for a timeout)."""

    unix_ns: int
    operator: str
    cause: str
    before: ControlState
    after: ControlState


@dataclass(frozen=True)
class OperatorLabel:
    """An operator's success label of the running episode."""

    success: bool
    operator: str


class ControlAuthority:
    """Decides for each control period whether the policy acts, an operator drives, or the robot holds.

    One thread calls it. Nothing blocks. An operator's input is valid for `input_timeout_s`, less the control period in
    which it is executed. Then the robot stands still, and `input_timeout_s` after the input the state becomes HOLD. At
    slow control rates an input is valid for half of `input_timeout_s`.

    An operator's *twist* has one element for each action element, in [-1, 1]: the share of the way from
    ``spec.neutral`` to the action's bound. The gripper's element is +1 for open (upper bound) and -1 for closed (lower
    bound). It is 0 until the operator first changes it, which keeps the gripper as it is: a take-over drops nothing. A
    joint with position targets moves on from its last target, at that share of its maximum speed.
    """

    def __init__(
        self,
        robot: str,
        spec: RobotSpec,
        clock: Callable[[], float] = time.monotonic,
        unix_ns: Callable[[], int] = time.time_ns,
        input_timeout_s: float = INPUT_TIMEOUT_S,
    ) -> None:
        """`clock`: monotonic seconds."""
        self.robot = robot
        self.state = ControlState.POLICY
        self.operator = ""  # who drives, whose timeout led to HOLD, or who stopped the robot; else empty
        self.audit: deque[AuthorityTransition] = deque(maxlen=MAX_AUDIT_ENTRIES)
        self._spec = spec
        self.clock = clock
        self._unix_ns = unix_ns
        self._input_timeout_s = input_timeout_s
        self._input_valid_s = max(input_timeout_s / 2, input_timeout_s - spec.period_s)
        self._last_input_s = -math.inf
        self._sequence = 0
        self._twist = np.zeros(spec.action.shape, np.float32)
        self._target: Array | None = None  # of a device that gives positions instead of a twist
        self._policy_acted = True
        self._label: OperatorLabel | None = None
        self._reset = False

    @property
    def phase(self) -> Phase:
        """POLICY; or CORRECTION from a take-over to the hand-back; or TELEOP if an operator began the episode."""
        if self.state is ControlState.POLICY:
            return Phase.POLICY
        return Phase.CORRECTION if self._policy_acted else Phase.TELEOP

    def update(self) -> ControlState:
        """Applies the input timeout, and returns the state for this control period."""
        if self.state is ControlState.HUMAN and self.clock() - self._last_input_s > self._input_timeout_s:
            self._move(ControlState.HOLD, self.operator, "silence")
        return self.state

    def twist(self) -> Array:
        """The newest input, float32 (a,). Without valid input it is zero except for the gripper's element."""
        return self._twist.copy() if self._has_valid_input else self._still()

    @property
    def _has_valid_input(self) -> bool:
        """An operator drives, and the input is valid to the end of the control period."""
        return self.state is ControlState.HUMAN and self.clock() - self._last_input_s <= self._input_valid_s

    def action(self, previous: Array) -> Array:
        """The action of the newest input, float32 (a,) in the action spec's units.

        Args:
            previous: the action that was applied last; its gripper element stays until the operator changes it.

        Raises:
            SpecError: the robot's spec has no neutral action, so a twist has no meaning.
        """
        spec, twist = self._spec, self.twist()
        if self._target is not None and self._has_valid_input:
            return self._target.copy()
        if len(spec.neutral) != len(twist):
            raise SpecError(f"{spec.model}: a robot without `neutral` in its spec cannot be driven by hand; add it")
        neutral, low, high = (np.asarray(v, np.float32) for v in (spec.neutral, spec.action.low, spec.action.high))
        action: Array = neutral + twist * np.where(twist > 0, high - neutral, neutral - low)
        if joints := list(spec.joint_target):
            fastest = np.array(spec.limits.joint_velocity_max, np.float32) * np.float32(spec.period_s)
            action[joints] = np.clip(previous[joints] + twist[joints] * fastest, low[joints], high[joints])
        if spec.gripper >= 0:
            action[spec.gripper] = self._gripper(twist[spec.gripper], previous[spec.gripper])
        return action

    def take_label(self) -> OperatorLabel | None:
        """The label since the last call."""
        label, self._label = self._label, None
        return label

    def take_reset_request(self) -> bool:
        """Whether an operator requested a reset since the last call."""
        requested, self._reset = self._reset, False
        return requested

    def begin_episode(self) -> None:
        """A new episode begins in the present state. Discards a label or reset request of the previous episode."""
        self._policy_acted = self.state is ControlState.POLICY
        self._label, self._reset = None, False

    def mark_policy_idle(self) -> None:
        """The policy has not acted in this episode, so an operator's steps are not corrections."""
        self._policy_acted = False

    def apply(self, command: OperatorCommand, received_s: float | None = None) -> OperatorReply:
        """Executes a command, or refuses it with a reason. Never raises for an operator's message.

        Args:
            received_s: time of arrival, by `clock`; None is now. An input that waited too long is refused.
        """
        if command.order != "drive":  # a new input ends the silence, however long the caller was busy
            self.update()
        try:
            self._execute(command, self.clock() if received_s is None else received_s)
        except AuthorityError as error:
            if command.order != "drive":
                operator = command.operator[:MAX_OPERATOR_CHARS]
                _log.info("authority.refused robot=%s operator=%r %s: %s", self.robot, operator, command.order, error)
            return self._reply(command, accepted=False, reason=str(error))
        return self._reply(command, accepted=True)

    def apply_local_input(self, local_input: TeleopInput | None) -> None:
        """Applies the input of a device on the robot's own computer in this control period; None without input.

        Input takes over from the policy and out of a hold, as any operator's does. It takes over neither from another
        operator nor from an e-stop. When it ends the robot stands still and soon holds; the console hands back.
        """
        is_driving = self.state is ControlState.HUMAN and self.operator == LOCAL_OPERATOR
        if local_input is None:
            if is_driving:
                self._twist, self._target = self._still(), None
            return
        if not is_driving:
            if self.state in (ControlState.STOPPED, ControlState.HUMAN):
                return
            self._move(ControlState.HUMAN, LOCAL_OPERATOR, "take-over")
        self._twist, self._target = np.asarray(local_input.twist, np.float32), local_input.target
        self._last_input_s = self.clock()

    def emergency_stop(self, person: str, cause: str = "e-stop") -> None:
        """Latches the stop, also for a stop of the driver. Discards a reset request. A repeat does nothing."""
        self._twist = self._still()
        self._reset = False
        if self.state is not ControlState.STOPPED:
            self._move(ControlState.STOPPED, person, cause)

    def _execute(self, command: OperatorCommand, received_s: float) -> None:
        operator = command.operator
        if command.robot != self.robot:
            raise AuthorityError(f"this is {self.robot}, not {command.robot[:MAX_OPERATOR_CHARS]}")
        if command.order == "e-stop":
            return self.emergency_stop(operator[:MAX_OPERATOR_CHARS])
        if not operator.strip() or len(operator) > MAX_OPERATOR_CHARS:
            raise AuthorityError(f"a command needs an operator's name of 1 to {MAX_OPERATOR_CHARS} characters")
        self._require_no_other_operator(operator)
        match command.order:
            case "take-over":
                self._take_over(command)
            case "drive":
                self._drive(command, received_s)
            case "release":
                if self.state is ControlState.HUMAN:
                    self._move(ControlState.HOLD, operator, "release")
            case "hand-back":
                self._hand_back(operator)
            case "re-arm":
                self._re_arm(operator)
            case "reset":
                self._require_armed()
                self._reset = True
            case "success" | "failure":
                self._label = OperatorLabel(command.order == "success", operator)

    def _take_over(self, command: OperatorCommand) -> None:
        self._require_armed()
        if self.state is not ControlState.HUMAN:
            self._twist, self._target = np.zeros_like(self._twist), None
            self._move(ControlState.HUMAN, command.operator, "take-over")
        self._sequence = command.sequence  # consoles number independently; earlier inputs of this one are void
        self._last_input_s = self.clock()

    def _drive(self, command: OperatorCommand, received_s: float) -> None:
        self._require_armed()
        if self.clock() - received_s > self._input_timeout_s:
            raise AuthorityError("the input waited too long")
        if self.state is not ControlState.HUMAN:
            policy = self.state is ControlState.POLICY
            raise AuthorityError("take over first" if policy else "the robot holds: take over to continue")
        twist = command.twist
        if len(twist) != len(self._twist) or not all(-1.0 <= share <= 1.0 for share in twist):
            raise AuthorityError(f"a twist of {self.robot} has {len(self._twist)} elements in [-1, 1]")
        if command.sequence <= self._sequence:
            raise AuthorityError("superseded by a newer input")
        self._sequence = command.sequence
        self._twist = np.asarray(twist, np.float32)
        self._last_input_s = received_s

    def _hand_back(self, operator: str) -> None:
        self._require_armed()
        if self.state is ControlState.POLICY:
            raise AuthorityError("the policy drives already")
        self._policy_acted = True
        self._move(ControlState.POLICY, operator, "hand-back")

    def _re_arm(self, operator: str) -> None:
        if self.state is not ControlState.STOPPED:
            raise AuthorityError("not stopped")
        self._move(ControlState.HOLD, operator, "re-arm")

    def _require_no_other_operator(self, operator: str) -> None:
        if operator == LOCAL_OPERATOR:
            raise AuthorityError(f"the name {LOCAL_OPERATOR!r} is reserved for devices on the robot's own computer")
        if self.state is ControlState.HUMAN and operator != self.operator:
            raise AuthorityError(f"{self.operator} drives {self.robot}")

    def _require_armed(self) -> None:
        if self.state is ControlState.STOPPED:
            raise AuthorityError(f"stopped by {self.operator or 'an unnamed operator'}: re-arm first")

    def _move(self, after: ControlState, operator: str, cause: str) -> None:
        before = self.state
        if (before, after) not in _LEGAL_TRANSITIONS:
            raise AuthorityError(f"{self.robot}: no transition from {before} to {after} ({cause})")
        self.state = after
        self.operator = "" if after is ControlState.POLICY or before is ControlState.STOPPED else operator
        self.audit.append(AuthorityTransition(self._unix_ns(), operator, cause, before, after))
        _log.info(
            "authority.changed robot=%s operator=%r cause=%s %s -> %s", self.robot, operator, cause, before, after
        )

    def _reply(self, command: OperatorCommand, accepted: bool, reason: str = "") -> OperatorReply:
        return OperatorReply(
            robot=self.robot,
            operator=command.operator,
            order=command.order,
            accepted=accepted,
            reason=reason,
            press=command.press,
        )

    def _still(self) -> Array:
        still = np.zeros_like(self._twist)
        if self._spec.gripper >= 0:
            still[self._spec.gripper] = self._twist[self._spec.gripper]
        return still

    def _gripper(self, share: float, previous: float) -> float:
        """The gripper's action for a share of its range, -1 closed to +1 open; 0 keeps `previous`."""
        low, high = self._spec.action.low[self._spec.gripper], self._spec.action.high[self._spec.gripper]
        return previous if share == 0 else low + (share + 1) / 2 * (high - low)
