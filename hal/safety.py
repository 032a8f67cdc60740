"""The safety kernel: the single filter between proposed actions and ``Robot.command``, in the driver process.

The kernel is a software guard and not safety-rated. It does not replace the robot's own limits, its brakes or a
hardware e-stop.

Each proposed action is applied, changed to one within all limits, or answered by a stop.
`hal.motion_limits.ActionLimits` changes it to meet:

- the action spec's bounds, as float32, and ``action_rate_max`` relative to the last applied action;
- speed, acceleration and jerk of the tool and of joints;
- the lead of a joint's target over a blocked joint: half a second at the joint's greatest speed;
- the workspace, forbidden boxes, joint ranges and the force on the tool.

`hal.motion_limits` defines the order of the limits, and the cases in which an axis may exceed one. A stop is not
limited: motion starts from rest after it. A tool or a joint outside its range may come back and not go farther. The
first gripper command after `reset` is free, since the gripper's position is unknown.

Violations that no action can correct (a measured joint at its limit or too fast, a stale or invalid reading, and for an
arm that moves by its joints a tool out of place or under too much force) lead to a stop: HOLD, and SAFE after
``safe_stop_after_s`` of holding. Applied values meet the limits up to one rounding to float32.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hal.errors import LeaseError, SpecError
from hal.estop import EmergencyStop, EstopLatch, new_emergency_stop
from hal.motion_limits import NO_REASON, ActionLimits, SafetyReason, StateLimits
from hal.robot import Observation, StopLevel
from hal.spec import STATE, Array, RobotSpec

__all__ = ["EmergencyStop", "SafetyReason", "SafetyKernel", "SafetyDecision"]

logger = logging.getLogger(__name__)

WATCHDOG_LEAD_S = 0.008  # the hold starts this much before its deadline, at most a fifth of a control period

PERSIST_RETRY_S = 1.0  # an e-stop that could not be written is written again

_NS = 1_000_000_000
_EMPTY: Array = np.empty(0)


def _no_text() -> str:
    return ""


@dataclass(frozen=True)
class SafetyDecision:
    """The kernel's answer to one proposed action: exactly one of `applied` and `stop` is set.

    Attributes:
        applied: float32, with the action spec's shape, owned by the receiver; the argument for ``Robot.command``.
        stop: the argument for ``Robot.stop``.
        reasons: why `applied` differs from the proposal, or why the robot stops.
        explain: makes `text` on demand, since most texts are never read.
    """

    applied: Array | None
    stop: StopLevel | None
    reasons: SafetyReason = NO_REASON
    explain: Callable[[], str] = field(default=_no_text, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The reasons in words, with the values; empty without reasons."""
        return self.explain()


class SafetyKernel:
    """Filters the actions of one robot. One thread calls it; `filter`, `hold` and `check_watchdog` never block and
    never raise.

    A driver calls `reset` once the robot stands still (after connect, after a task's reset). Then it calls one method
    in every period: `filter` for an action, `hold` if the session requests it, `check_watchdog` without a command.

    Attributes:
        is_speed_reduced: a person teleoperates or is near: ``limits.reduced_speed`` scales the allowed speeds.
        hold_after_ns: the age of the last command at which `check_watchdog` holds: ``watchdog_periods`` less
            `WATCHDOG_LEAD_S`, so that the hold is done within them.
    """

    def __init__(
        self,
        spec: RobotSpec,
        clock: Callable[[], int] = time.monotonic_ns,
        latch_path: Path | None = None,
        shared_latch: Path | None = None,
    ) -> None:
        """Args:
            spec: of the guarded robot.
            clock: nanoseconds on the clock of the observations' ``t_capture_ns``.
            latch_path: the e-stop's file, which survives a restart; with None for both, the latch is in memory only.
            shared_latch: the latch that all programs of this computer share (`RobotFiles.latch_path`). The kernel
                notices a press there, and the next driver finds the robot stopped.

        Raises:
            SpecError: the limits contradict the specs, so that the kernel cannot enforce them.
        """
        self.spec, self.is_speed_reduced = spec, False
        self._clock = clock
        self._shared = EstopLatch(shared_latch) if shared_latch is not None else None
        own = EstopLatch(latch_path) if latch_path is not None else None
        self._latches = tuple(latch for latch in (own, self._shared) if latch is not None)
        self._seen: EmergencyStop | None = None  # the last reading of the shared latch
        self._action = ActionLimits(spec)
        self._joints = StateLimits(spec)
        if not 0 < spec.limits.reduced_speed <= 1:
            raise SpecError(f"{spec.model}: reduced_speed is {spec.limits.reduced_speed}; give a share in (0, 1]")
        _require_times(spec)
        self._stale_ns = round(spec.limits.stale_after_s * _NS)
        self._watchdog_ns = round(spec.limits.watchdog_periods * spec.period_s * _NS)
        self.hold_after_ns = self._watchdog_ns - round(min(WATCHDOG_LEAD_S, spec.period_s / 5) * _NS)
        self._safe_ns = round(spec.limits.safe_stop_after_s * _NS)
        self._counts = dict.fromkeys(SafetyReason, 0)
        self._stopped: EmergencyStop | None = None
        self._persist_again_ns = math.inf
        self.load_latched_estop()
        self.reset()

    def reset(self) -> None:
        """The robot stands still now: rate limits and the watchdog start again."""
        self._action.reset()
        self._last_applied_ns = self._clock()

    def filter(self, action: object, observation: Observation | None) -> SafetyDecision:
        """Filters `action`, proposed for the state in `observation` (None: there is no observation yet).

        Returns:
            An action within all limits, or a stop if there is none. Only an applied action resets the watchdog.
        """
        now = self._clock()
        if self._stopped is not None:
            return self._refuse(SafetyReason.ESTOP, now, self._explain_estop)
        proposed, reason = self._action.validate(action)
        if proposed is None:
            return self._refuse(reason, now, lambda: _describe_misfit(action, self.spec))
        state, reason = self._read_state(observation, now)
        if reason:
            return self._refuse(reason, now, lambda: _describe_reading(reason, observation, now, self._stale_ns))
        reason = self._joints.check(state)
        if reason:
            return self._refuse(reason, now, lambda: self._joints.explain(state))
        share = self.spec.limits.reduced_speed if self.is_speed_reduced else 1.0
        applied, reason = self._action.limit(proposed, state, share)
        self._last_applied_ns = now
        self._count(reason)
        return SafetyDecision(
            applied, None, reason, lambda: _describe_change(reason, proposed, applied) if reason else ""
        )

    def is_stale(self, observation: Observation) -> bool:
        """Whether `filter` would refuse `observation` as too old."""
        return abs(self._clock() - observation.t_capture_ns) > self._stale_ns

    def check_watchdog(self) -> SafetyDecision | None:
        """The stop that the e-stop or the watchdog requires; None while commands are recent."""
        now = self._clock()
        if self._stopped is not None:
            return self._refuse(SafetyReason.ESTOP, now, self._explain_estop)
        silent_ns = now - self._last_applied_ns
        if silent_ns < self.hold_after_ns:
            return None
        return self._refuse(SafetyReason.WATCHDOG, now, lambda: f"no command was applied for {silent_ns / _NS:.3f} s")

    def hold(self) -> SafetyDecision:
        """The stop for a session that requests a hold: HOLD, or SAFE under a latched e-stop.

        It resets the watchdog as an action does. Motion starts from rest afterwards.
        """
        now = self._clock()
        if self._stopped is not None:
            return self._refuse(SafetyReason.ESTOP, now, self._explain_estop)
        self._action.on_stop()
        self._last_applied_ns = now
        return SafetyDecision(None, StopLevel.HOLD)

    def set_applied(self, applied: Array) -> None:
        """Corrects the last applied action to the one that ``Robot.command`` returned, if the hardware clipped it."""
        self._action.set_applied(applied)

    def count_refusal(self, reason: SafetyReason) -> None:
        """Counts a refusal that another part decided, e.g. for a stale fencing token."""
        self._count(reason)

    @property
    def reason_counts(self) -> Mapping[str, int]:
        """The number of each reason since the start, by its lower-case name."""
        return {str(reason.name).lower(): n for reason, n in self._counts.items()}

    @property
    def latched_estop(self) -> EmergencyStop | None:
        """The latched e-stop, or None if the robot is armed."""
        return self._stopped

    def emergency_stop(self, by: str, why: str = "") -> None:
        """Latches the e-stop; a second press keeps the first record. It takes effect before anything can fail.

        A file that cannot be written is logged. The next press and `retry_latch` try again.
        """
        if self._stopped is None:
            self._stopped = new_emergency_stop(by, why)
            logger.warning("estop.latched by=%s why=%s", by, why)
        self._persist(self._stopped)

    def retry_latch(self) -> None:
        """Writes an e-stop that a file lacks, `PERSIST_RETRY_S` after the last attempt. Call it in each period."""
        if self._stopped is not None and self._clock() >= self._persist_again_ns:
            self._persist(self._stopped)

    def has_new_press(self) -> bool:
        """Whether another program has pressed in the shared latch since the last look. `load_latched_estop` applies it.

        It takes microseconds, so it may run in each control period.
        """
        if self._shared is None or (found := self._shared.read()) is None:
            return False
        return self._seen is None or not found.is_same_press(self._seen)

    def load_latched_estop(self) -> None:
        """Applies an e-stop that is latched in a file: from before the start, or by another program since."""
        readings = [latch.read() for latch in self._latches]  # once each: a press that is seen is applied
        self._seen = readings[-1] if self._shared is not None else None
        found = [stop for stop in readings if stop is not None]
        if self._stopped is None and found:
            self._stopped = found[0]
            logger.warning("estop.latched by=%s why=%s", found[0].by, found[0].why)
            self._persist(found[0])

    def acknowledge(self, driver: str) -> None:
        """Records in the shared latch that `driver` has stopped the robot, for the program that pressed there."""
        if self._shared is None or self._seen is None or self._seen.acknowledged:
            return
        try:
            self._seen = self._shared.acknowledge(self._seen, driver)
        except (OSError, LeaseError) as error:  # the robot is stopped; `user-sys stop` reports a missing answer
            logger.error("estop.not_acknowledged path=%s error=%s", self._shared.path, error)

    def _persist(self, stopped: EmergencyStop) -> None:
        """Writes the latch to each file without one."""
        self._persist_again_ns = math.inf
        for latch in self._latches:
            try:
                latched = latch.read() or latch.press(stopped)
            except (OSError, LeaseError) as error:  # the robot is stopped; only a restart would lose the latch
                logger.error("estop.not_persisted path=%s error=%s", latch.path, error)
                self._persist_again_ns = self._clock() + PERSIST_RETRY_S * _NS
            else:  # another program's press stays new: the robot must stop for it, and it awaits an answer
                is_known = latched == stopped or (self._seen is not None and latched.is_same_press(self._seen))
                self._seen = latched if latch is self._shared and is_known else self._seen

    def rearm(self, person: str) -> None:
        """Clears the e-stop in the name of `person`; harmless if none is latched. A press by another program that this
        kernel has not seen yet remains latched, see `latched_estop`.

        Raises:
            SpecError: `person` is empty.
            OSError, LeaseError: the latch's file cannot be cleared; the robot stays stopped.
        """
        if not person.strip():
            raise SpecError("re-arming needs the name of a person: give it")
        if self._shared is not None and self.has_new_press():
            self._stopped = None
            self.load_latched_estop()
            return
        for latch in self._latches:
            latch.clear(self._seen if latch is self._shared else latch.read())
        self._stopped = None
        self.load_latched_estop()  # another press may have arrived while the latch was being cleared
        if self._stopped is None:
            self.reset()
            logger.warning("estop.rearmed by=%s", person)

    def _read_state(self, observation: Observation | None, now: int) -> tuple[Array, SafetyReason]:
        """The state vector as float64, and the reason if it is unusable."""
        if observation is None or abs(now - observation.t_capture_ns) > self._stale_ns:
            return _EMPTY, SafetyReason.STALE
        if not self._action.needs_state and not self._joints.needs_state:
            return _EMPTY, NO_REASON
        state = observation.arrays.get(STATE)
        if not isinstance(state, np.ndarray) or state.shape != self.spec.feature(STATE).shape:
            return _EMPTY, SafetyReason.SHAPE
        if state.dtype.kind != "f":
            return _EMPTY, SafetyReason.DTYPE
        return state.astype(np.float64), NO_REASON if np.isfinite(state).all() else SafetyReason.NOT_FINITE

    def _refuse(self, reason: SafetyReason, now: int, explain: Callable[[], str]) -> SafetyDecision:
        self._count(reason)
        self._action.on_stop()
        held_ns = now - self._last_applied_ns
        urgent = reason is SafetyReason.ESTOP or held_ns > self._watchdog_ns + self._safe_ns
        return SafetyDecision(None, StopLevel.SAFE if urgent else StopLevel.HOLD, reason, explain)

    def _count(self, reasons: SafetyReason) -> None:
        if reasons:
            for reason in reasons:
                self._counts[reason] += 1

    def _explain_estop(self) -> str:
        stopped = self._stopped
        return f"{stopped.by} pressed the e-stop; a person must re-arm the robot" if stopped else "e-stop"


def _require_times(spec: RobotSpec) -> None:
    limits = spec.limits
    if not (0 < limits.stale_after_s < math.inf and 0 <= limits.safe_stop_after_s < math.inf):
        raise SpecError(
            f"{spec.model}: stale_after_s is {limits.stale_after_s:g}, safe_stop_after_s {limits.safe_stop_after_s:g}; "
            "give finite times, the first above 0"
        )
    if limits.watchdog_periods < 2:  # the first is the command's own
        raise SpecError(f"{spec.model}: watchdog_periods is {limits.watchdog_periods}; give at least 2")


def _describe_misfit(action: object, spec: RobotSpec) -> str:
    required = f"the action must be float32 {spec.action.shape} and finite"
    if not isinstance(action, np.ndarray):
        return f"{required}; got {type(action).__name__}"
    return f"{required}; got {action.dtype} {action.shape} {np.array2string(action, threshold=16)}"


def _describe_reading(reason: SafetyReason, observation: Observation | None, now: int, stale_ns: int) -> str:
    if observation is None:
        return "there is no observation yet"
    if reason is SafetyReason.STALE:
        age_s = (now - observation.t_capture_ns) / _NS
        return f"the observation is {age_s:.3f} s old; at most {stale_ns / _NS:.3f} s is allowed"
    return f"{STATE} is unusable ({str(reason.name).lower()})"


def _describe_change(reason: SafetyReason, proposed: Array, applied: Array) -> str:
    names = ", ".join(str(r.name).lower() for r in reason)
    return f"{names}: {np.round(proposed, 5).tolist()} became {np.round(applied, 5).tolist()}"
