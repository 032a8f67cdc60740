"""The one place that decides what a robot is allowed to do.

The kernel stands in the driver process, between whoever proposes actions and ``Robot.command``. It is a software guard
and not safety-rated: it does not replace the robot's own limits, its brakes or a hardware e-stop.

A proposed action is either applied, reduced to the nearest action within all limits, or answered by a stop. Limits are
intervals for each element of the action; every interval holds the element's neutral value, so they always intersect:

- the action spec's bounds, as float32;
- ``action_rate_max`` around the last applied action. Going back to neutral is never limited, because a stop does the
  same: a robot may always brake. The first gripper command after `settle` is free, since nobody knows where it stands;
- the workspace: the tool's position plus its step stays in the box. A tool outside may come back and not go farther.

Limits that cannot be met by reducing the action (a joint at its limit or too fast, a reading that is stale or broken)
lead to a stop: HOLD, and SAFE once the holding has lasted ``safe_stop_after_s``. Applied values meet the limits up to
one rounding to float32.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from hal.durable import remove_durably, replace_durably
from hal.errors import SpecError
from hal.robot import Observation, StopLevel
from hal.spec import STATE, Array, RobotSpec

logger = logging.getLogger(__name__)

_NS = 1_000_000_000
_UNSET = np.nan  # an element without a neutral value, or never applied


class Reason(enum.IntFlag):
    """Why the applied action differs from the proposed one; fits uint16. 0 where they are equal."""

    SHAPE = 1
    DTYPE = 2
    NOT_FINITE = 4
    BOUND = 8
    RATE = 16
    WORKSPACE = 32
    JOINT_POSITION = 64
    JOINT_VELOCITY = 128
    STALE = 256
    WATCHDOG = 512
    ESTOP = 1024
    TOKEN = 2048


NO_REASON = Reason(0)


def _nothing() -> str:
    return ""


@dataclass(frozen=True)
class Verdict:
    """What becomes of one proposed action: exactly one of `applied` and `stop` is set.

    Attributes:
        applied: float32, the action spec's shape, owned by the receiver; hand it to ``Robot.command``.
        stop: hand it to ``Robot.stop`` instead.
        reasons: why `applied` differs from the proposal, or why the robot stops.
        explain: makes `text`; kept apart because most texts are never read.
    """

    applied: Array | None
    stop: StopLevel | None
    reasons: Reason = NO_REASON
    explain: Callable[[], str] = field(default=_nothing, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The reasons in words, with the values; empty where there are none."""
        return self.explain()


class EmergencyStop(msgspec.Struct, frozen=True, kw_only=True):
    """Who pressed the e-stop, when and why."""

    by: str
    why: str
    unix_ns: int


class SafetyKernel:
    """Filters the actions of one robot. One thread calls it; `filter`, `hold` and `tick` never block and never raise.

    A driver's loop: `settle` once the robot stands still (after connect, after a task's reset); then, every period,
    `filter` where an action came in, `hold` where the session asks for that, and `tick` where nothing came.
    """

    def __init__(
        self, spec: RobotSpec, clock: Callable[[], int] = time.monotonic_ns, latch_path: Path | None = None
    ) -> None:
        """Args:
            spec: of the robot that is guarded.
            clock: nanoseconds on the clock of the observations' ``t_capture_ns``.
            latch_path: where the e-stop's latch survives a restart; None keeps it in memory only.

        Raises:
            SpecError: the limits contradict the specs, so that nothing could be enforced.
        """
        self.spec = spec
        self._clock = clock
        self._latch_path = latch_path
        self._action = _ActionLimits(spec)
        self._joints = _JointLimits(spec)
        self._stale_ns = round(spec.limits.stale_after_s * _NS)
        self._watchdog_ns = round(spec.limits.watchdog_periods * spec.period_s * _NS)
        self._safe_ns = round(spec.limits.safe_stop_after_s * _NS)
        self._counts = dict.fromkeys(Reason, 0)
        self._stopped: EmergencyStop | None = _read_latch(latch_path)
        self.settle()

    def settle(self) -> None:
        """Tells the kernel that the robot stands still now: rate limits and the watchdog start afresh."""
        self._action.forget()
        self._last_applied_ns = self._clock()

    def filter(self, action: object, observation: Observation | None) -> Verdict:
        """Judges `action`, proposed for the state in `observation` (None: nothing was sensed yet).

        Returns:
            The nearest action within all limits, or a stop where there is none. Only an applied action feeds the
            watchdog.
        """
        now = self._clock()
        if self._stopped is not None:
            return self._refuse(Reason.ESTOP, now, self._explain_estop)
        proposed, reason = self._action.check(action)
        if proposed is None:
            return self._refuse(reason, now, lambda: _describe_misfit(action, self.spec))
        state, reason = self._read_state(observation, now)
        if reason:
            return self._refuse(reason, now, lambda: _describe_reading(reason, observation, now, self._stale_ns))
        reason = self._joints.check(state)
        if reason:
            return self._refuse(reason, now, lambda: self._joints.explain(state))
        applied, reason = self._action.limit(proposed, state)
        self._last_applied_ns = now
        self._count(reason)
        return Verdict(applied, None, reason, lambda: _describe_change(reason, proposed, applied) if reason else "")

    def tick(self) -> Verdict | None:
        """None while commands are fresh (or due); else the stop that is due, because of the e-stop or the watchdog."""
        now = self._clock()
        if self._stopped is not None:
            return self._refuse(Reason.ESTOP, now, self._explain_estop)
        silent_ns = now - self._last_applied_ns
        if silent_ns <= self._watchdog_ns:
            return None
        return self._refuse(Reason.WATCHDOG, now, lambda: f"no command was applied for {silent_ns / _NS:.3f} s")

    def hold(self) -> Verdict:
        """The stop that answers a session that asks the robot to hold: HOLD, or SAFE under a latched e-stop.

        It feeds the watchdog as an action does, and motion starts afresh from rest.
        """
        now = self._clock()
        if self._stopped is not None:
            return self._refuse(Reason.ESTOP, now, self._explain_estop)
        self._action.hold()
        self._last_applied_ns = now
        return Verdict(None, StopLevel.HOLD)

    def correct(self, applied: Array) -> None:
        """Tells the kernel what ``Robot.command`` reported, where the hardware clipped further than the kernel."""
        self._action.remember(applied)

    def count(self, reason: Reason) -> None:
        """Counts a refusal that was decided elsewhere, e.g. a stale fencing token."""
        self._count(reason)

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each reason was given since the start, by its lower-case name."""
        return {str(reason.name).lower(): n for reason, n in self._counts.items()}

    @property
    def emergency(self) -> EmergencyStop | None:
        """The latched e-stop, or None where the robot is armed."""
        return self._stopped

    def emergency_stop(self, by: str, why: str = "") -> None:
        """Latches the e-stop; pressing it again keeps the first record. Takes effect before anything can fail."""
        if self._stopped is not None:
            return
        self._stopped = EmergencyStop(by=by, why=why, unix_ns=time.time_ns())
        logger.warning("estop.latched by=%s why=%s", by, why)
        if self._latch_path is None:
            return
        try:
            replace_durably(self._latch_path, msgspec.json.encode(self._stopped))
        except OSError as error:  # the robot is stopped all the same; only a restart would forget it
            logger.error("estop.not_persisted path=%s error=%s", self._latch_path, error)

    def rearm(self, person: str) -> None:
        """Lifts the e-stop in the name of `person`; harmless where none is latched.

        Raises:
            SpecError: no person is named.
            OSError: the latch could not be removed from the disk; the robot stays stopped.
        """
        if not person.strip():
            raise SpecError("only a named person can re-arm a robot: give the name")
        if self._latch_path is not None and self._latch_path.exists():
            remove_durably(self._latch_path)
        self._stopped = None
        self.settle()
        logger.warning("estop.rearmed by=%s", person)

    def _read_state(self, observation: Observation | None, now: int) -> tuple[Array, Reason]:
        """The state vector as float64, and why it cannot be used."""
        if observation is None or abs(now - observation.t_capture_ns) > self._stale_ns:
            return _EMPTY, Reason.STALE
        if not self._action.needs_state and not self._joints.needs_state:
            return _EMPTY, NO_REASON
        state = observation.arrays.get(STATE)
        if not isinstance(state, np.ndarray) or state.shape != self.spec.feature(STATE).shape:
            return _EMPTY, Reason.SHAPE
        if state.dtype.kind != "f":
            return _EMPTY, Reason.DTYPE
        return state.astype(np.float64), NO_REASON if np.isfinite(state).all() else Reason.NOT_FINITE

    def _refuse(self, reason: Reason, now: int, explain: Callable[[], str]) -> Verdict:
        self._count(reason)
        self._action.hold()
        held_ns = now - self._last_applied_ns
        urgent = reason is Reason.ESTOP or held_ns > self._watchdog_ns + self._safe_ns
        return Verdict(None, StopLevel.SAFE if urgent else StopLevel.HOLD, reason, explain)

    def _count(self, reasons: Reason) -> None:
        if reasons:
            for reason in reasons:
                self._counts[reason] += 1

    def _explain_estop(self) -> str:
        stopped = self._stopped
        return f"the e-stop was pressed by {stopped.by}; a person must re-arm the robot" if stopped else "e-stop"


class _ActionLimits:
    """The intervals for each element of an action, and the last applied action."""

    def __init__(self, spec: RobotSpec) -> None:
        size, limits = len(spec.action.labels), spec.limits
        if spec.action.dtype != "float32":
            raise SpecError(f"{spec.model}: actions are float32; the spec says {spec.action.dtype}")
        self._shape = (size,)
        self._low: Array = np.array(spec.action.low, np.float32).astype(np.float64)
        self._high: Array = np.array(spec.action.high, np.float32).astype(np.float64)
        self._neutral = _neutral(spec)
        self._last: Array = self._neutral.copy()
        self._rate = _vector(limits.action_rate_max or (np.inf,) * size, size, "action_rate_max")
        self._box_low, self._box_high = _box(spec)
        self.needs_state = bool(limits.tool_position)
        self._tool = _indices(limits.tool_position, _state_size(spec), "tool_position")
        self._delta = _indices(spec.tool_delta, size, "tool_delta")
        if not (self._low <= self._high).all() or np.isnan(self._rate).any() or (self._rate < 0).any():
            raise SpecError(f"{spec.model}: the action's bounds or rates are not in order")
        if ((self._neutral < self._low) | (self._neutral > self._high)).any():
            raise SpecError(f"{spec.model}: the neutral action is out of the action's bounds")

    def check(self, action: object) -> tuple[Array | None, Reason]:
        """A private float64 copy of `action`, or None and the reason why it is not an action."""
        if type(action) is not np.ndarray or action.dtype != np.float32:
            return None, Reason.DTYPE
        if action.shape != self._shape:
            return None, Reason.SHAPE
        proposed = action.astype(np.float64)
        return (proposed, NO_REASON) if np.isfinite(proposed).all() else (None, Reason.NOT_FINITE)

    def limit(self, proposed: Array, state: Array) -> tuple[Array, Reason]:
        """The nearest action within all limits as float32, and which limits changed it."""
        low = np.fmin(self._last - self._rate, self._neutral)
        high = np.fmax(self._last + self._rate, self._neutral)
        reasons = Reason.BOUND if _outside(proposed, self._low, self._high) else NO_REASON
        within = np.clip(proposed, self._low, self._high)
        if _outside(within, low, high):
            reasons |= Reason.RATE
            within = np.fmax(np.fmin(within, high), low)
        if self.needs_state:
            step, tool = within[self._delta], state[self._tool]
            reachable = np.clip(step, np.fmin(self._box_low - tool, 0.0), np.fmax(self._box_high - tool, 0.0))
            if (reachable != step).any():
                reasons |= Reason.WORKSPACE
                within[self._delta] = reachable
        self._last = within
        applied = within.astype(np.float32)
        return applied, NO_REASON if (applied == proposed).all() else reasons

    def remember(self, applied: Array) -> None:
        if applied.shape == self._shape and np.isfinite(applied).all():
            self._last = np.clip(applied.astype(np.float64), self._low, self._high)

    def hold(self) -> None:
        """The robot was stopped: moving elements are neutral, the others stay where they were."""
        self._last = np.where(np.isnan(self._neutral), self._last, self._neutral)

    def forget(self) -> None:
        self._last = self._neutral.copy()


class _JointLimits:
    """Position and velocity limits of the joints, checked on the last reading."""

    def __init__(self, spec: RobotSpec) -> None:
        limits, size = spec.limits, _state_size(spec)
        self._labels = spec.feature(STATE).labels if size else ()
        self._position = _indices(limits.joint_position, size, "joint_position")
        self._low = _vector(limits.joint_low, len(self._position), "joint_low")
        self._high = _vector(limits.joint_high, len(self._position), "joint_high")
        self._velocity = _indices(limits.joint_velocity, size, "joint_velocity")
        self._fastest = _vector(limits.joint_velocity_max, len(self._velocity), "joint_velocity_max")
        self.needs_state = bool(limits.joint_position or limits.joint_velocity)

    def check(self, state: Array) -> Reason:
        if not self.needs_state:
            return NO_REASON
        reasons = NO_REASON
        angles = state[self._position]
        if not ((angles > self._low) & (angles < self._high)).all():
            reasons |= Reason.JOINT_POSITION
        if not (np.abs(state[self._velocity]) <= self._fastest).all():
            reasons |= Reason.JOINT_VELOCITY
        return reasons

    def explain(self, state: Array) -> str:
        angles, speeds = state[self._position], np.abs(state[self._velocity])
        at_limit = zip(self._position, angles, self._low, self._high, strict=True)
        parts = [
            f"{self._labels[i]} is at {angle:.4f} rad; it may be between {low:.4f} and {high:.4f}"
            for i, angle, low, high in at_limit
            if not low < angle < high
        ]
        parts += [
            f"{self._labels[i]} moves at {speed:.3f} rad/s; it may reach {fastest:.3f}"
            for i, speed, fastest in zip(self._velocity, speeds, self._fastest, strict=True)
            if not speed <= fastest
        ]
        return "; ".join(parts)


_EMPTY: Array = np.empty(0)


def _outside(value: Array, low: Array, high: Array) -> bool:
    """True where an element is out of its interval; a bound that is NaN is no bound."""
    return bool(((value < low) | (value > high)).any())


def _state_size(spec: RobotSpec) -> int:
    return next((len(s.labels) for s in spec.observation if s.name == STATE), 0)


def _neutral(spec: RobotSpec) -> Array:
    """Each element's value that keeps the robot still; NaN where that depends on where it is."""
    size = len(spec.action.labels)
    neutral = _vector(spec.neutral or (_UNSET,) * size, size, "neutral")
    if spec.gripper >= 0:
        _indices((spec.gripper,), size, "gripper")
        neutral[spec.gripper] = _UNSET
    for element in _indices(spec.tool_delta, size, "tool_delta"):
        if neutral[element] != 0.0 and not np.isnan(neutral[element]):
            raise SpecError(f"{spec.model}: element {element} is a step of the tool; its neutral value must be 0")
        neutral[element] = 0.0
    return neutral


def _box(spec: RobotSpec) -> tuple[Array, Array]:
    limits, axes = spec.limits, len(spec.limits.tool_position)
    if axes != len(spec.tool_delta) and axes:
        raise SpecError(f"{spec.model}: tool_position names {axes} axes and tool_delta {len(spec.tool_delta)}")
    low = _vector(limits.workspace_low or (-np.inf,) * axes, axes, "workspace_low")
    high = _vector(limits.workspace_high or (np.inf,) * axes, axes, "workspace_high")
    if not (low <= high).all():
        raise SpecError(f"{spec.model}: the workspace is empty: {low.tolist()} to {high.tolist()}")
    return low, high


def _vector(values: tuple[float, ...], size: int, name: str) -> Array:
    if len(values) != size:
        raise SpecError(f"{name} has {len(values)} elements; it must have {size}")
    return np.array(values, dtype=np.float64)


def _indices(values: tuple[int, ...], size: int, name: str) -> Array:
    if not all(0 <= i < size for i in values):
        raise SpecError(f"{name} is {values}; the vector that it points into has {size} elements")
    return np.array(values, dtype=np.intp)


def _read_latch(path: Path | None) -> EmergencyStop | None:
    """The latch on the disk. A file that cannot be read is a latch too: it is there because someone pressed."""
    if path is None or not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=EmergencyStop)
    except (OSError, msgspec.MsgspecError) as error:
        logger.error("estop.latch_unreadable path=%s error=%s", path, error)
        return EmergencyStop(by="unknown", why=f"the latch in {path} cannot be read", unix_ns=0)


def _describe_misfit(action: object, spec: RobotSpec) -> str:
    wanted = f"the action must be float32 {spec.action.shape} and finite"
    if not isinstance(action, np.ndarray):
        return f"{wanted}; got {type(action).__name__}"
    return f"{wanted}; got {action.dtype} {action.shape} {np.array2string(action, threshold=16)}"


def _describe_reading(reason: Reason, observation: Observation | None, now: int, stale_ns: int) -> str:
    if observation is None:
        return "nothing was sensed yet"
    if reason is Reason.STALE:
        age_s = (now - observation.t_capture_ns) / _NS
        return f"the observation is {age_s:.3f} s old; at most {stale_ns / _NS:.3f} s are allowed"
    return f"{STATE} is unusable ({str(reason.name).lower()})"


def _describe_change(reason: Reason, proposed: Array, applied: Array) -> str:
    names = ", ".join(str(r.name).lower() for r in reason)
    return f"{names}: {np.round(proposed, 5).tolist()} became {np.round(applied, 5).tolist()}"
