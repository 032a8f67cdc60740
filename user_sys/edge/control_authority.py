"""Who drives one robot: an explicit state machine, kept by the robot's session on the edge.

::

    POLICY --take-over--> HUMAN --hand-back--> POLICY
    HUMAN --silence, release--> HOLD --take-over--> HUMAN,  HOLD --hand-back--> POLICY
    any --e-stop--> STOPPED --re-arm--> HOLD

One person at a time: while HUMAN, orders of anybody else are refused and the refusal names who drives. HOLD belongs to
nobody: its former operator, or anybody else, takes over or hands back; input alone does not resume. E-stop is open to
everybody, always.
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
MAX_NAME_CHARS = 64
LOCAL_OPERATOR = "a person at the robot"
"""The operator whose input comes from a device on the robot's own computer."""

_log = logging.getLogger(__name__)


class ControlState(enum.StrEnum):
    """Who drives now. The values are those of ``RobotStatus.authority``."""

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
    """One change of authority: who caused it, by which order (``silence`` for none), and when."""

    unix_ns: int
    operator: str
    cause: str
    before: ControlState
    after: ControlState


@dataclass(frozen=True)
class OperatorLabel:
    """A person's verdict on the running episode."""

    success: bool
    operator: str


class ControlAuthority:
    """Decides, for each control period, whether the policy or a person drives, or nobody.

    One thread calls it. Nothing blocks. `clock` gives monotonic seconds. A person's input counts for `silence_s`, less
    the control period in which it is carried out: then the robot stands still, and `silence_s` after the input HOLD
    begins. At slow control rates an input counts for half of `silence_s`.

    A person's *twist* has one element an action element, each in [-1, 1]: the share of the way from ``spec.neutral`` to
    the action's bound. The gripper's element is +1 for open (upper bound), -1 for closed (lower bound), and 0 until the
    person first touches it: the gripper stays as it is, so that a take-over drops nothing. A joint that is moved by
    targets goes on from its last one, at that share of its greatest speed.
    """

    def __init__(
        self,
        robot: str,
        spec: RobotSpec,
        clock: Callable[[], float] = time.monotonic,
        unix_ns: Callable[[], int] = time.time_ns,
        input_timeout_s: float = INPUT_TIMEOUT_S,
    ) -> None:
        self.robot = robot
        self.state = ControlState.POLICY
        self.operator = ""  # who drives, whose silence led to HOLD, or who stopped the robot; else empty
        self.audit: deque[AuthorityTransition] = deque(maxlen=MAX_AUDIT_ENTRIES)
        self._spec = spec
        self.clock = clock
        self._unix_ns = unix_ns
        self._silence_s = input_timeout_s
        self._fresh_s = max(input_timeout_s / 2, input_timeout_s - spec.period_s)
        self._heard_s = -math.inf
        self._sequence = 0
        self._twist = np.zeros(spec.action.shape, np.float32)
        self._target: Array | None = None  # of a device that says where to be, not which way to go
        self._policy_acted = True
        self._mark: OperatorLabel | None = None
        self._reset = False

    @property
    def phase(self) -> Phase:
        """POLICY; or, from a take-over to the hand-back, CORRECTION, and TELEOP where a person began the episode."""
        if self.state is ControlState.POLICY:
            return Phase.POLICY
        return Phase.CORRECTION if self._policy_acted else Phase.TELEOP

    def update(self) -> ControlState:
        """Notices silence, and returns the state for this control period."""
        if self.state is ControlState.HUMAN and self.clock() - self._heard_s > self._silence_s:
            self._move(ControlState.HOLD, self.operator, "silence")
        return self.state

    def twist(self) -> Array:
        """The newest input, float32 (a,): all zero unless a person drives, save for the gripper's element."""
        return self._twist.copy() if self._is_driven else self._still()

    @property
    def _is_driven(self) -> bool:
        """A person drives, by an input that lasts to the end of the control period."""
        return self.state is ControlState.HUMAN and self.clock() - self._heard_s <= self._fresh_s

    def action(self, previous: Array) -> Array:
        """The action, float32 (a,) in the action spec's units, that the newest input asks for.

        Args:
            previous: the action that was applied last; where the person has not touched the gripper, its element stays.

        Raises:
            SpecError: the robot's spec names no neutral action, so that it cannot be driven by shares of the range.
        """
        spec, twist = self._spec, self.twist()
        if self._target is not None and self._is_driven:
            return self._target.copy()
        if len(spec.neutral) != len(twist):
            raise SpecError(f"{spec.model}: a spec without `neutral` cannot be driven by hand")
        neutral, low, high = (np.asarray(v, np.float32) for v in (spec.neutral, spec.action.low, spec.action.high))
        action: Array = neutral + twist * np.where(twist > 0, high - neutral, neutral - low)
        if joints := list(spec.joint_target):
            fastest = np.array(spec.limits.joint_velocity_max, np.float32) * np.float32(spec.period_s)
            action[joints] = np.clip(previous[joints] + twist[joints] * fastest, low[joints], high[joints])
        if spec.gripper >= 0:
            action[spec.gripper] = self._gripper(twist[spec.gripper], previous[spec.gripper])
        return action

    def take_label(self) -> OperatorLabel | None:
        """The verdict given since the last call, once."""
        mark, self._mark = self._mark, None
        return mark

    def take_reset_request(self) -> bool:
        """Whether a reset was asked for since the last call."""
        asked, self._reset = self._reset, False
        return asked

    def begin_episode(self) -> None:
        """A new episode starts under whoever drives; a verdict or reset meant for the old one is forgotten."""
        self._policy_acted = self.state is ControlState.POLICY
        self._mark, self._reset = None, False

    def mark_policy_idle(self) -> None:
        """The policy could not act in this episode yet: what a person does in it corrects nothing."""
        self._policy_acted = False

    def apply(self, command: OperatorCommand, received_s: float | None = None) -> OperatorReply:
        """Carries out an order, or refuses it with a reason; never raises for what a person may send.

        Args:
            heard_s: when it came in, by `clock`; None is now. An input that had to wait for long moves nothing.
        """
        if command.order != "drive":  # a fresh input ends the silence, however long the caller was busy elsewhere
            self.update()
        try:
            self._order(command, self.clock() if received_s is None else received_s)
        except AuthorityError as error:
            if command.order != "drive":
                who = command.operator[:MAX_NAME_CHARS]
                _log.info("authority.refused robot=%s operator=%r %s: %s", self.robot, who, command.order, error)
            return self._reply(command, accepted=False, reason=str(error))
        return self._reply(command, accepted=True)

    def apply_local_input(self, local_input: TeleopInput | None) -> None:
        """What a device on the robot's own computer says in this control period; None while no hand is on it.

        A hand takes over from the policy and out of a hold, as any person does, and not from another person, nor from
        an e-stop. Once it lets go the robot stands still, and soon holds: handing back is said at the console.
        """
        mine = self.state is ControlState.HUMAN and self.operator == LOCAL_OPERATOR
        if local_input is None:
            if mine:
                self._twist, self._target = self._still(), None
            return
        if not mine:
            if self.state in (ControlState.STOPPED, ControlState.HUMAN):
                return
            self._move(ControlState.HUMAN, LOCAL_OPERATOR, "take-over")
        self._twist, self._target = np.asarray(local_input.twist, np.float32), local_input.target
        self._heard_s = self.clock()

    def emergency_stop(self, person: str, cause: str = "e-stop") -> None:
        """Latches the stop; also for the driver's own. What was asked before is forgotten. Repeating it is harmless."""
        self._twist = self._still()
        self._reset = False
        if self.state is not ControlState.STOPPED:
            self._move(ControlState.STOPPED, person, cause)

    def _order(self, command: OperatorCommand, heard_s: float) -> None:
        operator = command.operator
        if command.robot != self.robot:
            raise AuthorityError(f"this is {self.robot}, not {command.robot[:MAX_NAME_CHARS]}")
        if command.order == "e-stop":
            return self.emergency_stop(operator[:MAX_NAME_CHARS])
        if not operator.strip() or len(operator) > MAX_NAME_CHARS:
            raise AuthorityError(f"an order needs the name of a person, of at most {MAX_NAME_CHARS} characters")
        self._refuse_beside_another(operator)
        match command.order:
            case "take-over":
                self._take_over(command)
            case "drive":
                self._drive(command, heard_s)
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
                self._mark = OperatorLabel(command.order == "success", operator)

    def _take_over(self, command: OperatorCommand) -> None:
        self._require_armed()
        if self.state is not ControlState.HUMAN:
            self._twist, self._target = np.zeros_like(self._twist), None
            self._move(ControlState.HUMAN, command.operator, "take-over")
        self._sequence = command.sequence  # another console counts from elsewhere; what it sent earlier is void
        self._heard_s = self.clock()

    def _drive(self, command: OperatorCommand, heard_s: float) -> None:
        self._require_armed()
        if self.clock() - heard_s > self._silence_s:
            raise AuthorityError("it had to wait for too long")
        if self.state is not ControlState.HUMAN:
            raise AuthorityError("take over first" if self.state is ControlState.POLICY else "held: take over to go on")
        twist = command.twist
        if len(twist) != len(self._twist) or not all(-1.0 <= share <= 1.0 for share in twist):
            raise AuthorityError(f"a twist of {self.robot} has {len(self._twist)} elements in [-1, 1]")
        if command.sequence <= self._sequence:
            raise AuthorityError("overtaken by a newer input")
        self._sequence = command.sequence
        self._twist = np.asarray(twist, np.float32)
        self._heard_s = heard_s

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

    def _refuse_beside_another(self, operator: str) -> None:
        if operator == LOCAL_OPERATOR:
            raise AuthorityError("that name is kept for the devices on the robot's own computer")
        if self.state is ControlState.HUMAN and operator != self.operator:
            raise AuthorityError(f"{self.operator} drives {self.robot}")

    def _require_armed(self) -> None:
        if self.state is ControlState.STOPPED:
            raise AuthorityError(f"stopped by {self.operator or 'somebody'}: re-arm first")

    def _move(self, after: ControlState, operator: str, cause: str) -> None:
        before = self.state
        if (before, after) not in _LEGAL_TRANSITIONS:
            raise AuthorityError(f"{self.robot}: no way from {before} to {after} ({cause})")
        self.state = after
        self.operator = "" if after is ControlState.POLICY or before is ControlState.STOPPED else operator
        self.audit.append(AuthorityTransition(self._unix_ns(), operator, cause, before, after))
        _log.info("authority.moved robot=%s operator=%r cause=%s %s -> %s", self.robot, operator, cause, before, after)

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
        """The share of the whole range, -1 closed to +1 open; 0 keeps `previous`."""
        low, high = self._spec.action.low[self._spec.gripper], self._spec.action.high[self._spec.gripper]
        return previous if share == 0 else low + (share + 1) / 2 * (high - low)
