"""Control authority over one robot: an explicit state machine in the robot's session on the edge.

::

    POLICY --take-over--> HUMAN --hand-back--> POLICY
    HUMAN --silence, release--> HOLD --take-over--> HUMAN,  HOLD --hand-back--> POLICY
    POLICY --request for help--> REQUESTING --take-over--> HUMAN,  REQUESTING --hand-back, no help--> POLICY
    HUMAN --accept--> HOLD of the operator who requested control
    POLICY, HUMAN, REQUESTING --pause--> HOLD
    any --e-stop--> STOPPED --re-arm--> HOLD

One operator drives at a time: in HUMAN, commands of every other operator are refused, and the refusal names the
operator. Another operator may request control, which the driver accepts or declines. In HOLD and REQUESTING any
operator may take over or hand back; input alone does not resume. Every operator may press the e-stop at any time.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from hal.errors import SpecError
from hal.motion_limits import commanded_speeds
from hal.spec import STATE, Array, RobotSpec
from hal.teleoperator import TeleopInput
from user_sys.compose import make_joint_velocities
from user_sys.episode import Phase
from user_sys.errors import AuthorityError, ConfigError
from user_sys.messages import OperatorCommand, OperatorReply

INPUT_TIMEOUT_S = 0.2
CONTROL_REQUEST_S = 30.0
MOVING_ORDERS = ("hand-back", "reset", "re-arm")  # let the robot move, or end a stop
MAX_ORDER_AGE_S = 1.5  # of a moving order; any other may wait for the end of a reset
MAX_OPERATOR_CHARS = 64
LOCAL_OPERATOR = "a person at the robot"
"""The operator whose input comes from a device on the robot's own computer."""

_log = logging.getLogger(__name__)
TOOL_SPEED = 0.1  # m/s at the full share, if the joints are fast enough


class ControlState(enum.StrEnum):
    """Who controls the robot. The values are those of ``RobotStatus.authority``."""

    POLICY = "policy"
    HUMAN = "human"
    REQUESTING = "requesting"
    HOLD = "hold"
    STOPPED = "stopped"


_LEGAL_TRANSITIONS = {
    ControlState.POLICY: (ControlState.HUMAN, ControlState.REQUESTING, ControlState.HOLD, ControlState.STOPPED),
    ControlState.REQUESTING: (ControlState.HUMAN, ControlState.POLICY, ControlState.HOLD, ControlState.STOPPED),
    ControlState.HUMAN: (ControlState.POLICY, ControlState.HOLD, ControlState.STOPPED),
    ControlState.HOLD: (ControlState.HUMAN, ControlState.POLICY, ControlState.STOPPED),
    ControlState.STOPPED: (ControlState.HOLD,),
}


@dataclass(frozen=True)
class OperatorLabel:
    """An operator's success label of the running episode."""

    success: bool
    operator: str


class _Request(NamedTuple):
    """A pending request of an operator for control, or of the robot for help. It ends at `until_s`."""

    text: str
    until_s: float
    for_reset: bool = False


_NO_REQUEST = _Request("", math.inf)


class _Input(NamedTuple):
    """The newest input: `target` of a device that gives positions, or `tool` in shares of the tool's speed."""

    twist: Array
    target: Array | None = None
    rewinds: bool = False
    tool: tuple[float, ...] = ()


class ControlAuthority:
    """Decides for each control period whether the policy acts, an operator drives, or the robot holds.

    One thread calls it. Nothing blocks. An operator's input is valid for `input_timeout_s`, less the control period in
    which it is executed. Then the robot stands still, and `input_timeout_s` after the input the state becomes HOLD. At
    slow control rates an input is valid for half of `input_timeout_s`.

    An operator's *twist* has one element for each action element, in [-1, 1]: the share of the way from
    ``spec.neutral`` to the action's bound. Of a motion it is the share of the reduced speed. A tool's motion above that
    speed is shortened, so that the safety kernel does not change it. A joint with position targets moves on from its
    last target. The gripper's element is +1 for open (upper bound) and -1 for closed (lower bound). It is 0 until the
    operator first changes it, which keeps the gripper as it is: a take-over drops nothing.

    Attributes:
        tool_drive: moves the tool of a robot whose action moves its joints.
    """

    def __init__(
        self,
        robot: str,
        spec: RobotSpec,
        clock: Callable[[], float] = time.monotonic,
        input_timeout_s: float = INPUT_TIMEOUT_S,
        tool_drive: ToolDrive | None = None,
    ) -> None:
        """`clock`: monotonic seconds."""
        self.robot = robot
        self.state = ControlState.POLICY
        self.operator = ""  # who drives, whose timeout led to HOLD, or who stopped the robot; else empty
        self._spec = spec
        self.tool_drive = tool_drive or ToolDrive(spec)
        self.clock = clock
        self._input_timeout_s = input_timeout_s
        self._control_request = self._help_request = _NO_REQUEST
        self._last_input_s = -math.inf
        self._sequence = 0
        self._input = _Input(np.zeros(spec.action.shape, np.float32))
        self._ignores_local_input = False
        self._policy_acted: bool | None = True  # in the running episode; None if none runs
        self._label: OperatorLabel | None = None
        self._reset = False

    @property
    def phase(self) -> Phase:
        """POLICY; or CORRECTION from a take-over to the hand-back; or TELEOP if an operator began the episode.

        RECOVERY while an operator rewinds.
        """
        if self.state is ControlState.POLICY:
            return Phase.POLICY
        if self.is_rewinding:
            return Phase.RECOVERY
        return Phase.CORRECTION if self._policy_acted else Phase.TELEOP

    def update(self) -> ControlState:
        """Applies the time-outs of input and requests, and returns the state for this control period."""
        now_s = self.clock()
        if now_s > self._control_request.until_s:
            self._control_request = _NO_REQUEST
        if self.state is ControlState.REQUESTING and now_s > self._help_request.until_s:
            self._move(ControlState.POLICY, "", "no help came")
        if self.state is ControlState.HUMAN and self.clock() - self._last_input_s > self._input_timeout_s:
            self._move(ControlState.HOLD, self.operator, "silence")
        return self.state

    @property
    def requested_by(self) -> str:
        """The operator who requests control from the one who drives; empty without a request."""
        return self._control_request.text

    @property
    def help_reason(self) -> str:
        """Why the robot requests help; empty if it does not."""
        return self._help_request.text

    @property
    def awaits_reset(self) -> bool:
        """The scene is not prepared: a person prepares it and hands back; `help_reason` has the instructions.

        A pause or an e-stop does not end that. A hand-back, a take-over or the next episode does.
        """
        return self._help_request.for_reset

    def request_help(self, reason: str, wait_s: float = 0.0, *, for_reset: bool = False) -> None:
        """The robot holds until an operator acts; after `wait_s` the policy goes on, but not if it is 0.

        Args:
            for_reset: see `awaits_reset`. A robot that is held or stopped stays so.

        Raises:
            AuthorityError: the policy does not drive.
        """
        if not for_reset or self.state not in (ControlState.HOLD, ControlState.STOPPED):
            self._move(ControlState.REQUESTING, "", f"help: {reason}")
        self._help_request = _Request(reason, self.clock() + wait_s if wait_s else math.inf, for_reset)

    @property
    def is_held_by_person(self) -> bool:
        """An operator drives, or the robot holds or is stopped until an operator hands back."""
        return self.state not in (ControlState.POLICY, ControlState.REQUESTING)

    def hold_after_restart(self) -> None:
        """The robot holds until an operator acts, since an operator had it in the session before."""
        self._hold("", "restart")

    def twist(self) -> Array:
        """The newest input, float32 (a,). Without valid input it is zero except for the gripper's element."""
        return self._input.twist.copy() if self._has_valid_input else self._still()

    @property
    def is_rewinding(self) -> bool:
        """The newest valid input of the operator asks the robot to retrace its path."""
        return self._input.rewinds and self._has_valid_input

    @property
    def _has_valid_input(self) -> bool:
        """An operator drives, and the input is valid to the end of the control period."""
        valid_s = max(self._input_timeout_s / 2, self._input_timeout_s - self._spec.period_s)
        return self.state is ControlState.HUMAN and self.clock() - self._last_input_s <= valid_s

    def action(self, previous: Array, observation: Mapping[str, Array] | None = None) -> Array:
        """The action of the newest input, float32 (a,) in the action spec's units.

        Args:
            previous: the action that was applied last; its gripper element stays until the operator changes it.
            observation: the newest one, for a tool that joints move.

        Raises:
            SpecError: the robot's spec has no neutral action, so a twist has no meaning.
        """
        spec, twist = self._spec, self.twist()
        if self._input.target is not None and self._has_valid_input:
            return self._input.target.copy()
        if any(self._input.tool) and self._has_valid_input and observation is not None:
            measured = observation[STATE][list(spec.limits.joint_position)]
            twist = self.tool_drive.twist(twist, np.array(self._input.tool), measured)
        if len(spec.neutral) != len(twist):
            raise SpecError(f"{spec.model}: a robot without `neutral` in its spec cannot be driven by hand; add it")
        neutral, low, high = (np.asarray(v, np.float32) for v in (spec.neutral, spec.action.low, spec.action.high))
        moving, share = [*spec.tool_delta, *_joints(spec), *commanded_speeds(spec)], twist.astype(np.float64)
        share[moving] *= spec.limits.reduced_speed
        action: Array = (neutral + share * np.where(twist > 0, high - neutral, neutral - low)).astype(np.float32)
        tool = list(spec.tool_delta)
        if spec.limits.tool_speed_max:
            longest = spec.limits.tool_speed_max * spec.period_s * spec.limits.reduced_speed
            length = float(np.linalg.norm(action[tool]))
            action[tool] /= max(1.0, length / longest * (1 + 1e-6))  # not longer after rounding
        if joints := list(spec.joint_target):
            fastest = np.array(spec.limits.joint_velocity_max) * spec.period_s
            action[joints] = np.clip(previous[joints] + share[joints] * fastest, low[joints], high[joints])
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
        """A new episode begins in the present state. Discards what was requested in the previous one: a label, a reset,
        help."""
        if self.state is ControlState.REQUESTING:
            self._move(ControlState.POLICY, "", "a new episode")
        self._help_request = _NO_REQUEST
        self._policy_acted = self.state is ControlState.POLICY
        self._label, self._reset = None, False

    @property
    def runs_episode(self) -> bool:
        return self._policy_acted is not None

    def mark_no_episode(self) -> None:
        """No episode runs until the next `begin_episode`; labels are refused."""
        self._policy_acted = None

    def mark_policy_idle(self) -> None:
        """The policy has not acted in this episode, so an operator's steps are not corrections."""
        self._policy_acted = False

    def apply(self, command: OperatorCommand, received_s: float | None = None) -> OperatorReply:
        """Executes a command, or refuses it with a reason. Never raises for an operator's message.

        Args:
            received_s: time of arrival, by `clock`; None is now. An input and an order of `MOVING_ORDERS` that waited
                too long are refused.
        """
        if command.order != "drive":  # a new input ends the silence, however long the caller was busy
            self.update()
        try:
            self._execute(command, self.clock() if received_s is None else received_s)
        except AuthorityError as error:
            if command.order != "drive":
                operator = command.operator[:MAX_OPERATOR_CHARS]
                _log.info("authority.refused robot=%s operator=%r %s: %s", self.robot, operator, command.order, error)
            return msgspec.structs.replace(command, robot=self.robot).reply(accepted=False, reason=str(error))
        return command.reply(accepted=True)

    def apply_local_input(self, local_input: TeleopInput | None) -> None:
        """Applies the input of a device on the robot's own computer in this control period; None without input.

        Input takes over from the policy and out of a hold, as any operator's does. It takes over neither from another
        operator nor from an e-stop. When it ends the robot stands still and soon holds,
        unless the input hands back; the console can hand back too.

        After a pause, a re-arm or an accepted request for control, input has no effect until it has ended once: a hand
        that is still on the device does not undo them.
        """
        if local_input is None:
            self._ignores_local_input = False
        elif self._ignores_local_input:
            return
        if local_input is not None and local_input.hands_back:
            if self.state in (ControlState.HUMAN, ControlState.HOLD) and self.operator == LOCAL_OPERATOR:
                self._hand_back(LOCAL_OPERATOR)
            return
        is_driving = self.state is ControlState.HUMAN and self.operator == LOCAL_OPERATOR
        if local_input is None:
            if is_driving:
                self._input = _Input(self._still())
            return
        if not is_driving:
            if self.state in (ControlState.STOPPED, ControlState.HUMAN):
                return
            self._move(ControlState.HUMAN, LOCAL_OPERATOR, "take-over")
        self._input = _Input(np.asarray(local_input.twist, np.float32), local_input.target)
        self._last_input_s = self.clock()

    def emergency_stop(self, person: str, cause: str = "e-stop") -> None:
        """Latches the stop, also for a stop of the driver. Discards a reset request. A repeat does nothing."""
        self._input = _Input(self._still())
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
        if command.order == "request-control":
            return self._request_control(operator)
        if command.order == "pause":
            return self._pause(operator)
        self._require_no_other_operator(operator)
        if command.order in MOVING_ORDERS and self.clock() - received_s > MAX_ORDER_AGE_S:
            raise AuthorityError("it waited too long; give it again if it still applies")
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
            case "accept" | "decline":
                self._answer_request(operator, accepted=command.order == "accept")
            case "re-arm":
                self._re_arm(operator)
            case "reset":
                self._require_armed()
                self._reset = True
            case "success" | "failure":
                if self._policy_acted is None or self.awaits_reset:
                    raise AuthorityError("no episode runs; label a recorded one on the Episodes page")
                self._label = OperatorLabel(command.order == "success", operator)

    def _take_over(self, command: OperatorCommand) -> None:
        self._require_armed()
        if self.state is not ControlState.HUMAN:
            self._input = _Input(np.zeros_like(self._input.twist))
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
        twist, tool, size = command.twist, command.tool, len(self._input.twist)
        if len(twist) != size or not all(-1.0 <= share <= 1.0 for share in (*twist, *tool)):
            raise AuthorityError(f"a twist of {self.robot} has {size} elements in [-1, 1]")
        if tool and (len(tool) != 3 or not self.tool_drive.speed):
            raise AuthorityError(self.tool_drive.refusal or f"joints do not move the tool of {self.robot}")
        if command.sequence <= self._sequence:
            raise AuthorityError("superseded by a newer input")
        self._sequence = command.sequence
        self._input = _Input(np.asarray(twist, np.float32), rewinds=command.rewind, tool=tool)
        self._last_input_s = received_s

    def _hand_back(self, operator: str) -> None:
        self._require_armed()
        if self.state is ControlState.POLICY:
            raise AuthorityError("the policy drives already")
        if self._policy_acted is not None:
            self._policy_acted = True
        self._move(ControlState.POLICY, operator, "hand-back")

    def _request_control(self, operator: str) -> None:
        if self.state is not ControlState.HUMAN or operator == self.operator:
            raise AuthorityError(f"no other operator drives {self.robot}: take over")
        if self.requested_by not in ("", operator):
            raise AuthorityError(f"{self.requested_by} requests control already")
        self._control_request = _Request(operator, self.clock() + CONTROL_REQUEST_S)

    def _answer_request(self, operator: str, *, accepted: bool) -> None:
        if self.state is not ControlState.HUMAN or not self.requested_by:
            raise AuthorityError("no operator requests control")
        if accepted:
            self._hold(self.requested_by, f"accepted by {operator}")
        self._control_request = _NO_REQUEST

    def _pause(self, operator: str) -> None:
        self._require_armed()
        if self.state is ControlState.HOLD:
            raise AuthorityError(f"{self.robot} holds already")
        self._hold(operator, "pause")

    def _re_arm(self, operator: str) -> None:
        if self.state is not ControlState.STOPPED:
            raise AuthorityError("not stopped")
        self._hold(operator, "re-arm")

    def _hold(self, operator: str, cause: str) -> None:
        self._move(ControlState.HOLD, operator, cause)
        self._ignores_local_input = True

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
        if after not in _LEGAL_TRANSITIONS[before]:
            raise AuthorityError(f"{self.robot}: no transition from {before} to {after} ({cause})")
        self.state = after
        self._control_request = _NO_REQUEST
        if after in (ControlState.POLICY, ControlState.HUMAN) or not self.awaits_reset:
            self._help_request = _NO_REQUEST
        self.operator = "" if after is ControlState.POLICY or before is ControlState.STOPPED else operator
        _log.info(
            "authority.changed robot=%s operator=%r cause=%s %s -> %s", self.robot, operator, cause, before, after
        )

    def _still(self) -> Array:
        still = np.zeros_like(self._input.twist)
        if self._spec.gripper >= 0:
            still[self._spec.gripper] = self._input.twist[self._spec.gripper]
        return still

    def _gripper(self, share: float, previous: float) -> float:
        """The gripper's action for a share of its range, -1 closed to +1 open; 0 keeps `previous`."""
        low, high = self._spec.action.low[self._spec.gripper], self._spec.action.high[self._spec.gripper]
        return previous if share == 0 else low + (share + 1) / 2 * (high - low)


class ToolDrive:
    """Maps shares of the tool's speed to shares of the joints' speeds. The control loop's thread uses it.

    Attributes:
        speed: of the tool at the full share in the newest direction, m/s; 0 if it cannot be driven in this way.
        refusal: why it cannot be, for people; empty if it can, or if the action moves the tool itself.
    """

    def __init__(self, spec: RobotSpec, description: str = "") -> None:
        """`description`: see `sim.kinematics.ArmKinematics`; empty for none."""
        self.speed, self.refusal = 0.0, ""
        self._joints = _joints(spec)
        if not self._joints or spec.tool_delta:
            return
        if not description:
            self.refusal = "only single joints can be driven: the robot's settings name no `description`"
            return
        try:
            self._joint_velocities = make_joint_velocities(description, spec)
        except (SpecError, ConfigError) as error:
            self.refusal = f"only single joints can be driven: {error}"
            _log.warning("tool_drive.unavailable %s", self.refusal)
            return
        self._full = _full_speeds(spec)
        self.speed = TOOL_SPEED

    def twist(self, twist: Array, tool: Array, joints: Array) -> Array:
        """A copy of `twist` (a,) whose joints' elements move the tool in the direction of `tool`.

        A joint that would be too fast at full speed makes the tool slower at each share of it.

        Args:
            tool: (3,), not all 0; its length is the share of the full speed. A longer one counts as 1.
            joints: (n,) measured positions, in the units of the state.
        """
        length = float(np.linalg.norm(tool))
        full = self._joint_velocities(joints, tool / length * TOOL_SPEED) / self._full
        slower = max(1.0, float(np.abs(full).max()))
        self.speed = TOOL_SPEED / slower
        moved = twist.copy()
        moved[self._joints] = full * min(1.0, length) / slower
        return moved


def _joints(spec: RobotSpec) -> list[int]:
    """The action's elements that move one joint each."""
    return list(spec.joint_target or spec.joint_delta)


def _full_speeds(spec: RobotSpec) -> Array:
    """The joints' speeds (n,) at the full share of a twist, a second."""
    low, high = (np.array(bound)[_joints(spec)] for bound in (spec.action.low, spec.action.high))
    unreduced = spec.limits.joint_velocity_max if spec.joint_target else np.minimum(-low, high) * spec.rate_hz
    speeds: Array = np.array(unreduced) * spec.limits.reduced_speed
    return speeds
