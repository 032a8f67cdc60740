"""The limits on a robot's motion, as the safety kernel (`hal.safety`) applies them.

An *axis* is an element of the action that moves the tool or a joint. Its *step* is the way that it moves in one control
period. Speed, acceleration and jerk limit the step, its change from one period to the next, and the change of that.

**Order of the limits**, for each axis by itself:

1. Place: workspace, forbidden boxes, range of the joint, force, and how far a target may be ahead of its joint. They
   leave an interval of steps, which always contains 0: an axis that is outside may come back and not go farther.
2. Speed, acceleration and jerk. They hold while an axis speeds up and while it brakes.

**What an axis may exceed.** An axis exceeds its acceleration or jerk only in a period in which every step within these
limits would leave its place. It then takes the nearest step that does not, and its acceleration counts as 0 in the next
period. The other axes are not affected. A step is taken only if the axis can still come to rest in its place within all
limits. So a robot that moves as commanded exceeds nothing, except if a force appears or a joint is held up. A reduced
speed that begins in motion is reached within the limits too.

A stop (`hal.robot.Robot.stop`) is not limited here: the driver brakes as its robot can. Motion then starts from rest.

**How.** A velocity damper (Faverjon and Tournassoud, 1987) keeps the step below a share of the way that is left. The
share is the largest that braking within acceleration and jerk can follow. The damper must hold now, and at every moment
of the braking at full jerk that could follow.
"""

from __future__ import annotations

import enum
import math

import numpy as np

from hal.braking import ROUNDED, Motion
from hal.errors import SpecError
from hal.spec import STATE, Array, RobotSpec
from hal.tool_place import UNLIMITED, ToolPlace, indices, state_size, tool_box, vector

_UNSET = np.nan  # an element without a neutral value, or never applied
LEAD_S = 0.5  # a joint's target may be so far ahead of the joint, at its greatest speed; two control periods at least


class Reason(enum.IntFlag):
    """Why the applied action differs from the proposed one; fits uint16. 0 if they are equal.

    SPEED is also the reason if a joint does not keep up: its target may not run away from it.
    """

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
    SPEED = 4096
    ACCELERATION = 8192
    JERK = 16384
    FORCE = 32768


NO_REASON = Reason(0)


class ActionLimits:
    """The limits that are met by changing an action, and the motion that they build upon."""

    def __init__(self, spec: RobotSpec) -> None:
        """Raises SpecError if the limits contradict the specs."""
        size, limits = len(spec.action.labels), spec.limits
        if spec.action.dtype != "float32":
            raise SpecError(f"{spec.model}: actions are float32; the spec says {spec.action.dtype}")
        self._shape = (size,)
        self._low: Array = np.array(spec.action.low, np.float32).astype(np.float64)
        self._high: Array = np.array(spec.action.high, np.float32).astype(np.float64)
        self._neutral = _neutral(spec)
        self._last: Array = self._neutral.copy()
        rate = vector(limits.action_rate_max or (np.inf,) * size, size, "action_rate_max")
        if not (self._low <= self._high).all() or np.isnan(rate).any() or (rate < 0).any():
            raise SpecError(f"{spec.model}: the action's bounds or rates are not in order")
        if ((self._neutral < self._low) | (self._neutral > self._high)).any():
            raise SpecError(f"{spec.model}: the neutral action is out of the action's bounds")
        self._speeds = _commanded_speeds(spec)
        self._axes = _Axes(spec, rate)
        self._rate = rate.copy()
        self._rate[self._axes.elements] = np.inf  # that of an axis limits its motion
        self.needs_state = self._axes.needs_state

    def check(self, action: object) -> tuple[Array | None, Reason]:
        """A private float64 copy of `action`, or None and the reason why it is not an action."""
        if type(action) is not np.ndarray or action.dtype != np.float32:
            return None, Reason.DTYPE
        if action.shape != self._shape:
            return None, Reason.SHAPE
        proposed = action.astype(np.float64)
        return (proposed, NO_REASON) if np.isfinite(proposed).all() else (None, Reason.NOT_FINITE)

    def limit(self, proposed: Array, state: Array, share: float = 1.0) -> tuple[Array, Reason]:
        """The action within all limits as float32, and which limits changed it. One within all limits is not changed.

        `share` in (0, 1] of the speed limits is allowed.
        """
        reasons = Reason.BOUND if _outside(proposed, self._low, self._high) else NO_REASON
        within: Array = np.minimum(np.maximum(proposed, self._low), self._high)
        low = np.fmin(self._last - self._rate, self._neutral)
        high = np.fmax(self._last + self._rate, self._neutral)
        if _outside(within, low, high):
            reasons |= Reason.RATE
            within = np.fmax(np.fmin(within, high), low)
        reasons |= self._slow_down(within, share)
        reasons |= self._axes.limit(within, self._last, state, share)
        self._last = within
        applied = within.astype(np.float32)
        return applied, NO_REASON if (applied == proposed).all() else reasons

    def _slow_down(self, within: Array, share: float) -> Reason:
        """Reduces, in place, the elements that are speeds themselves."""
        if share >= 1.0 or not len(self._speeds):
            return NO_REASON
        wanted = within[self._speeds]
        within[self._speeds] = np.clip(wanted, share * self._low[self._speeds], share * self._high[self._speeds])
        return NO_REASON if (within[self._speeds] == wanted).all() else Reason.SPEED

    def remember(self, applied: Array) -> None:
        """`applied` is the part of the last limited action that the hardware carried out. It may be out of the bounds
        if a joint stands out of them and comes back."""
        if applied.shape != self._shape or not np.isfinite(applied).all():
            return
        if not (applied == self._last.astype(np.float32)).all():
            low, high = np.fmin(self._low, self._last), np.fmax(self._high, self._last)
            self._last = np.clip(applied.astype(np.float64), low, high)
            self._axes.correct(self._last)

    def hold(self) -> None:
        """The robot was stopped: axes are at rest, other elements stay as they were."""
        self._last = np.where(np.isnan(self._neutral), self._last, self._neutral)
        self._last[self._axes.targets] = _UNSET
        self._axes.rest()

    def forget(self) -> None:
        self._last = self._neutral.copy()
        self._axes.rest()


class _Axes:
    """The axes of an action: those of the tool first, then the joints. All values are per control period."""

    def __init__(self, spec: RobotSpec, rate: Array) -> None:
        limits, size = spec.limits, len(spec.action.labels)
        if spec.joint_target and spec.joint_delta:
            raise SpecError(f"{spec.model}: an action moves its joints by joint_target or by joint_delta, not by both")
        deltas = indices(spec.tool_delta, size, "tool_delta")
        turns = indices(spec.joint_target or spec.joint_delta, size, "joint_delta")
        self.targets = indices(spec.joint_target, size, "joint_target")
        self.elements = np.concatenate([deltas, turns])
        self._tools, self._joints = slice(0, len(deltas)), slice(len(deltas), None)
        self._angles = indices(limits.joint_position if len(turns) else (), state_size(spec), "joint_position")
        if len(turns) != len(self._angles):
            raise SpecError(f"{spec.model}: the action moves {len(turns)} joints, joint_position has no index of each")
        self._place = ToolPlace(spec)
        self._far = UNLIMITED if limits.tool_speed_max is None else limits.tool_speed_max * spec.period_s
        self.needs_state = len(turns) > 0 or (len(deltas) > 0 and self._place.needs_state)
        self._bound(spec, rate)
        self._base: Array = np.zeros(len(self.elements))
        self.rest()

    def _bound(self, spec: RobotSpec, rate: Array) -> None:
        limits, period_s, tools, joints = spec.limits, spec.period_s, self._tools.stop, len(self._angles)
        low, high = np.array(spec.action.low, np.float32), np.array(spec.action.high, np.float32)
        low, high, rate = (each.astype(np.float64)[self.elements] for each in (low, high, rate))
        speed = _of_joints(None, tools, limits.joint_velocity_max, joints, "joint_velocity_max") * period_s
        acceleration = _of_joints(
            limits.tool_acceleration_max, tools, limits.joint_acceleration_max, joints, "joint_acceleration_max"
        )
        jerk = _of_joints(limits.tool_jerk_max, tools, limits.joint_jerk_max, joints, "joint_jerk_max")
        acceleration, jerk = acceleration * period_s**2, jerk * period_s**3
        self._reach_low = vector(limits.joint_low, joints, "joint_low") if joints else _EMPTY
        self._reach_high = vector(limits.joint_high, joints, "joint_high") if joints else _EMPTY
        self._lead = speed[self._joints] * max(LEAD_S / period_s, 2.0)
        if len(self.targets):  # bounds of a target bound the place, and its rate the speed
            self._reach_low = np.maximum(self._reach_low, low[self._joints])
            self._reach_high = np.minimum(self._reach_high, high[self._joints])
            low[self._joints], high[self._joints] = -rate[self._joints], rate[self._joints]
            rate[self._joints] = np.inf
        self._slowest: Array = np.maximum(np.maximum(low, -speed), -UNLIMITED)
        self._fastest: Array = np.minimum(np.minimum(high, speed), UNLIMITED)
        self._by_rate = rate < acceleration
        greatest, acceleration = np.maximum(-self._slowest, self._fastest), np.minimum(acceleration, rate)
        if not self._far > 0 or not all((each > 0).all() for each in (greatest, acceleration, jerk)):
            raise SpecError(f"{spec.model}: limits of speed, acceleration, jerk and rate are above 0")
        self._motion = Motion(greatest, acceleration, jerk)

    def rest(self) -> None:
        """The robot stands still."""
        self._motion.rest()
        self._follows = np.ones(len(self.elements), bool)  # since it was last at rest, or has caught up

    def correct(self, applied: Array) -> None:
        """`applied` is what became of the last limited action."""
        self._motion.correct(applied[self.elements] - self._base)

    def limit(self, within: Array, last: Array, state: Array, share: float) -> Reason:
        """Changes the axes of `within` in place."""
        if not len(self.elements):
            return NO_REASON
        measured = angle = state[self._angles] if len(self._angles) else _EMPTY
        if len(self.targets):
            target = last[self.targets]
            angle = self._base[self._joints] = np.where(np.isnan(target), measured, target)
        wanted, motion = within[self.elements] - self._base, self._motion
        wish = self._wish(wanted, share)
        low, high = self._places(angle, state, wish)
        pressed = self._block(low, high, state)
        room = motion.room_down(-low), motion.room_up(high)
        *speed, towards = motion.towards(np.stack([share * self._slowest, share * self._fastest, wish]) - motion.step)
        change = self._change(
            wanted, wish, towards, np.maximum(room[0], speed[0]), np.minimum(room[1], speed[1]), share
        )
        smooth = motion.step + change
        step, held_up = self._limit_lead(np.minimum(np.maximum(smooth, low), high), angle, measured)
        exact, before = wish - motion.step, motion.change
        motion.take(step)
        changed = step != wanted
        if not changed.any():
            return NO_REASON
        within[self.elements[changed]] = (self._base + step)[changed]
        reasons = held_up | self._hastes(exact, before)
        if (wish != wanted).any() or _outside(exact, speed[0], speed[1], ROUNDED):
            reasons |= Reason.SPEED
        placed = (exact < room[0] - ROUNDED) | (exact > room[1] + ROUNDED)
        if pressed is not None and (placed & pressed).any():
            reasons |= Reason.FORCE
            placed &= ~pressed
        if placed[self._tools].any():
            reasons |= Reason.WORKSPACE
        return reasons | Reason.JOINT_POSITION if placed[self._joints].any() else reasons or Reason.SPEED

    def _wish(self, wanted: Array, share: float) -> Array:
        """`wanted` within the limits of speed."""
        wish: Array = np.minimum(np.maximum(wanted, self._slowest * share), self._fastest * share)
        length = _length(wish[self._tools])
        if length > self._far * share:
            wish[self._tools] *= self._far * share / length
        return wish

    def _places(self, angle: Array, state: Array, wish: Array) -> tuple[Array, Array]:
        """The lowest and highest steps with which each axis stays where it may be; 0 is always between them."""
        low, high = np.full(len(wish), -UNLIMITED), np.full(len(wish), UNLIMITED)
        if len(angle):
            low[self._joints] = np.maximum(np.minimum(self._reach_low - angle, 0.0), -UNLIMITED)
            high[self._joints] = np.minimum(np.maximum(self._reach_high - angle, 0.0), UNLIMITED)
        if self._tools.stop and self._place.needs_state:
            low[self._tools], high[self._tools] = self._place.interval(state, wish[self._tools], self._motion)
        return low, high

    def _block(self, low: Array, high: Array, state: Array) -> Array | None:
        """Takes out of the intervals, in place, the steps against a force above its limit. Returns the axes (bool) that
        such a force acts on, if there is one."""
        pressed = self._place.blocked_directions(state) if self._tools.stop else None
        if pressed is None:
            return None
        down, up = pressed
        low[self._tools][down], high[self._tools][up] = 0.0, 0.0
        blocked = np.zeros(len(low), bool)
        blocked[self._tools] = down | up
        return blocked

    def _change(self, wanted: Array, wish: Array, towards: Array, down: Array, up: Array, share: float) -> Array:
        """The change of each step. An axis follows its wish for as long as the limits allow that. If they do not, it
        goes there as fast as they allow without passing it: a target as a place, a step as a speed."""
        motion, exact = self._motion, wish - self._motion.step
        down, up = motion.within(down), motion.within(up)
        ahead, followed = exact >= 0, self._follows
        if len(self.targets):
            ahead, followed, joints = wanted >= 0, followed & (wish == wanted), self._joints
            goal = np.where(ahead, motion.room_up(np.maximum(wanted, 0.0)), motion.room_down(np.maximum(-wanted, 0.0)))
            towards[joints] = goal[joints]
        allowed = (exact >= down - ROUNDED) & (exact <= up + ROUNDED)
        short = np.where(ahead, exact <= towards, exact >= towards)
        self._follows = allowed & (followed | short)
        change: Array = np.minimum(np.maximum(np.where(self._follows, exact, towards), down), up)
        tools, far = self._tools, self._far * share
        if tools.stop and far < UNLIMITED * share:
            peak = _length(motion.peaks(change)[tools])
            if peak > far:  # that is convex in the changes: a mixture with braking is within the limit
                braked = _length(motion.peaks(motion.brake)[tools])
                mixed = max(0.0, far - braked) / (peak - braked) if peak > braked else 0.0
                change[tools] = motion.brake[tools] + mixed * (change[tools] - motion.brake[tools])
        return change

    def _limit_lead(self, step: Array, angle: Array, measured: Array) -> tuple[Array, Reason]:
        """`step` without what leads targets away from joints that are held up."""
        if not len(self.targets):
            return step, NO_REASON
        low, high = np.minimum(measured - self._lead - angle, 0.0), np.maximum(measured + self._lead - angle, 0.0)
        kept = step.copy()
        kept[self._joints] = np.minimum(np.maximum(step[self._joints], low), high)
        return kept, NO_REASON if (kept == step).all() else Reason.SPEED

    def _hastes(self, exact: Array, before: Array) -> Reason:
        hasty = np.abs(exact) > self._motion.acceleration + ROUNDED
        reasons = Reason.JERK if (np.abs(exact - before) > self._motion.jerk + ROUNDED).any() else NO_REASON
        if (hasty & self._by_rate).any():
            reasons |= Reason.RATE
        return reasons | Reason.ACCELERATION if (hasty & ~self._by_rate).any() else reasons


class StateLimits:
    """What no action can mend, seen in the last reading: joints out of range or too fast, a misplaced tool."""

    def __init__(self, spec: RobotSpec) -> None:
        """Raises SpecError where the limits contradict the specs."""
        limits, size = spec.limits, state_size(spec)
        self._labels = spec.feature(STATE).labels if size else ()
        self._position = indices(limits.joint_position, size, "joint_position")
        self._low = vector(limits.joint_low, len(self._position), "joint_low")
        self._high = vector(limits.joint_high, len(self._position), "joint_high")
        if not (self._low <= self._high).all():
            raise SpecError(f"{spec.model}: joint_low and joint_high are not in order: {self._low} to {self._high}")
        self._may_come_back = bool(spec.joint_target or spec.joint_delta)
        self._velocity = indices(limits.joint_velocity, size, "joint_velocity")
        measured = limits.joint_velocity_max if limits.joint_velocity else ()
        self._fastest = vector(measured, len(self._velocity), "joint_velocity_max")
        self._place = None if spec.tool_delta or not limits.tool_position + limits.tool_force else _Place(spec)
        self.needs_state = bool(limits.joint_position or limits.joint_velocity or self._place)

    def check(self, state: Array) -> Reason:
        if not self.needs_state:
            return NO_REASON
        reasons = NO_REASON
        angles = state[self._position]
        if not self._may_come_back and not ((angles > self._low) & (angles < self._high)).all():
            reasons |= Reason.JOINT_POSITION
        if not (np.abs(state[self._velocity]) <= self._fastest).all():
            reasons |= Reason.JOINT_VELOCITY
        return reasons | (self._place.check(state) if self._place else NO_REASON)

    def explain(self, state: Array) -> str:
        angles, speeds = state[self._position], np.abs(state[self._velocity])
        at_limit = zip(self._position, angles, self._low, self._high, strict=True)
        parts = [
            f"{self._labels[i]} is at {angle:.4f} rad; it may be between {low:.4f} and {high:.4f}"
            for i, angle, low, high in at_limit
            if not self._may_come_back and not low < angle < high
        ]
        parts += [
            f"{self._labels[i]} moves at {speed:.3f} rad/s; it may reach {fastest:.3f}"
            for i, speed, fastest in zip(self._velocity, speeds, self._fastest, strict=True)
            if not speed <= fastest
        ]
        return "; ".join(parts + ([self._place.explain(state)] if self._place and self._place.check(state) else []))


class _Place:
    """Where the tool is, and what presses on it, for a robot whose action does not say how its tool will move."""

    def __init__(self, spec: RobotSpec) -> None:
        limits = spec.limits
        self._tool = indices(limits.tool_position, state_size(spec), "tool_position")
        self._low, self._high = tool_box(spec)
        self._keep_out = limits.keep_out
        self._force = indices(limits.tool_force, state_size(spec), "tool_force")
        self._push = np.inf if limits.tool_force_max is None else limits.tool_force_max

    def check(self, state: Array) -> Reason:
        tool, force = state[self._tool], state[self._force]
        forbidden = any(((tool > box.low) & (tool < box.high)).all() for box in self._keep_out)
        inside = bool(((tool >= self._low) & (tool <= self._high)).all()) and not forbidden
        pressed = float(np.sqrt(force @ force)) > self._push
        return (NO_REASON if inside else Reason.WORKSPACE) | (Reason.FORCE if pressed else NO_REASON)

    def explain(self, state: Array) -> str:
        return f"the tool is at {np.round(state[self._tool], 4).tolist()} m, under {state[self._force].tolist()} N"


_EMPTY: Array = np.empty(0)


def _length(vector: Array) -> float:
    return math.sqrt(float(vector @ vector))


def _outside(value: Array, low: Array, high: Array, slack: float = 0.0) -> bool:
    """True if an element is out of its interval by more than `slack`; a bound that is NaN is no bound."""
    return bool(((value < low - slack) | (value > high + slack)).any())


def _commanded_speeds(spec: RobotSpec) -> Array:
    """The action elements that are speeds, by their unit, and may be 0; as of a base on wheels."""
    action = spec.action
    return np.array(
        [
            i
            for i, (unit, low, high) in enumerate(zip(action.units, action.low, action.high, strict=True))
            if unit.endswith("/s") and low <= 0 <= high
        ],
        dtype=np.intp,
    )


def _neutral(spec: RobotSpec) -> Array:
    """Each element's value that keeps the robot still; NaN where that depends on where it is."""
    size = len(spec.action.labels)
    neutral = vector(spec.neutral or (_UNSET,) * size, size, "neutral")
    if spec.gripper >= 0:
        indices((spec.gripper,), size, "gripper")
        neutral[spec.gripper] = _UNSET
    neutral[indices(spec.joint_target, size, "joint_target")] = _UNSET
    for element in indices(spec.tool_delta + spec.joint_delta, size, "tool_delta or joint_delta"):
        if neutral[element] != 0.0 and not np.isnan(neutral[element]):
            raise SpecError(f"{spec.model}: element {element} is a step; its neutral value must be 0")
        neutral[element] = 0.0
    return neutral


def _of_joints(tool: float | None, tools: int, each: tuple[float, ...], joints: int, name: str) -> Array:
    """A limit of each axis; infinite if there is none. That of joints counts only if the action moves them."""
    of_tool = np.full(tools, np.inf if tool is None else tool)
    return np.concatenate([of_tool, vector((each if joints else ()) or (np.inf,) * joints, joints, name)])
