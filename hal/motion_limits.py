"""How axes move within speed, acceleration and jerk, and how they come to rest.

An *axis* is a direction of the tool or a joint. All values are per control period: a *step* is the way that an axis
moves in one, a *change* is the difference of two consecutive steps, and jerk limits the difference of two changes.

To come to rest within a way, an axis brakes at full jerk until a velocity damper takes over (Faverjon and Tournassoud,
1987): the step is at most a share of the way that is left. The share is the largest for which the damper itself is
within acceleration and jerk. So a change is allowed if the damper's bound holds after it, and after each further period
of full jerk: these bounds are linear in the change, and their minimum is exact for this way of braking.

Where a tool may go, and against what force.

The limits on a robot's motion, as the safety kernel (`hal.safety`) applies them.

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

from hal.errors import SpecError
from hal.spec import STATE, Array, RobotSpec

ROUNDING = 3e-7  # m or rad: a position of up to 4, rounded to float32


class AxisMotion:
    """The steps of n axes, and the limits on the next ones.

    Attributes:
        step, change: of the last period, (n,).
        least, most: the changes that acceleration and jerk allow in the next period, (n,).
        braking_change: the change among them that leads to rest.
        acceleration, jerk: (n,); at most what the speeds can use.
        stopping_distance_bound: a way within which an axis can come to rest whatever it does in the next period, (n,).
    """

    def __init__(self, speed: Array, acceleration: Array, jerk: Array) -> None:
        """`speed` (n,) is the greatest step of each axis in either direction, finite. All are above 0."""
        self._speed: Array = speed
        self.acceleration: Array = np.minimum(acceleration, 2 * speed)
        self.jerk: Array = np.minimum(jerk, 4 * speed)
        greatest = np.minimum(self.acceleration, self.change_towards(2 * speed))
        periods = int(np.ceil((2 * greatest / self.jerk).max(initial=0.0))) + 2  # of full jerk, until the damper holds
        self._times: Array = np.arange(1.0, periods + 1)
        self._sums: Array = self._times * (self._times - 1) / 2
        self._slowed: Array = self.jerk[:, None] * self._sums
        self._shortened: Array = self._slowed * (self._times - 2) / 3
        damping = self._damping(speed)
        self.stopping_distance_bound: Array = speed + self._way(speed, self.acceleration, damping)
        self.reset()

    def reset(self) -> None:
        """All axes stand still."""
        still = np.zeros(len(self._speed))
        self._prepare(still, still)
        self._before = still, self.min_change, self.max_change

    def advance(self, step: Array) -> None:
        """`step` is that of the next period. A change that exceeds acceleration or jerk counts as 0 afterwards."""
        self._before = self.step, self.min_change, self.max_change
        self.replace_last_step(step)

    def replace_last_step(self, step: Array) -> None:
        """`step` replaces that of the last period."""
        before, least, most = self._before
        change = step - before
        self._prepare(step, np.where((change >= least - ROUNDING) & (change <= most + ROUNDING), change, 0.0))

    def _prepare(self, step: Array, change: Array) -> None:
        self.step, self.change = step, change
        self.min_change: Array = np.maximum(change - self.jerk, -self.acceleration)
        self.max_change: Array = np.minimum(change + self.jerk, self.acceleration)
        self.braking_change: Array = self.clip_change(self.change_towards(-step))

    def clip_change(self, change: Array) -> Array:
        """`change` within acceleration and jerk."""
        found: Array = np.minimum(np.maximum(change, self.min_change), self.max_change)
        return found

    def change_towards(self, gap: Array) -> Array:
        """The greatest change that closes the `gap` to a step and does not pass it while it falls to 0 at full jerk.

        It solves c + (c - jerk) + (c - 2 jerk) + ... = gap over the positive terms. `gap` may be (n,) or (k, n).
        """
        size = np.abs(gap)
        falls = np.floor((np.sqrt(1 + 8 * size / self.jerk) - 1) / 2)
        found: Array = np.copysign((size + self.jerk * falls * (falls + 1) / 2) / (falls + 1), gap)
        return found

    def peak_steps(self, change: Array) -> Array:
        """The greatest size of each step from after `change` until that has fallen to 0 at full jerk."""
        after = self.step + change
        found: Array = np.maximum(np.abs(after), np.abs(after + self._gained(change)))
        return found

    def change_limit(self, distance: Array, side: Array) -> Array:
        """The outermost change (k, n) after which an axis can still come to rest within `distance` (>= 0).

        It is at least `braking_change`, and infinite in a row in which every distance is large. A distance of 0 moves
        along with the axis, as for one that is out of its place: the way that it returns in this period is not open to
        it in the next. So the step may not pass 0, and only `braking_change` is left.

        Args:
            side: (k, n), the direction of the distance: 1 is up, -1 is down.
        """
        far = (distance >= self.stopping_distance_bound).all(axis=-1)
        if far.all():
            return side * np.inf
        most = np.where(side > 0, self.max_change, -self.min_change)
        room = self._room_for(distance, side * self.step, side * self.change, most)
        room[distance <= 0.0] = -np.inf
        found: Array = side * np.maximum(room, side * self.braking_change)
        found[far] = side[far] * np.inf
        return found

    def stopping_distances(self) -> Array:
        """The ways (2, n) up and down that each axis needs to come to rest."""
        found = []
        for step, change in ((self.step, self.min_change), (-self.step, -self.max_change)):
            found.append(self._way(step, change, self._damping(step + change + self._gained(change))))
        return np.stack(found)

    def _gained(self, change: Array) -> Array:
        """How much a step goes on changing while `change` falls to 0 at full jerk."""
        size = np.abs(change)
        falls = np.floor(size / self.jerk)
        found: Array = np.copysign(falls * size - self.jerk * falls * (falls + 1) / 2, change)
        return found

    def _damping(self, fastest: Array) -> Array:
        """The share of the way left that a step may take in each period, if no step is above `fastest`.

        A damper with the share c has changes of c * step and differences of these of c * c * step.
        """
        fastest = np.minimum(np.maximum(fastest, 1e-12), self._speed)
        found: Array = np.minimum(np.minimum(self.acceleration / fastest, np.sqrt(self.jerk / fastest)), 1.0)
        return found

    def _room_for(self, way: Array, step: Array, change: Array, most: Array) -> Array:
        """The damping is that of the greatest step that can follow. If the axis must brake, it is that of the motion as
        it is; so the damping is steady while the axis comes to rest."""
        room = self._room(way, step, self._damping(step + most + self._gained(most)))
        enough = (room >= most).all(axis=-1)
        if enough.all():
            return room
        slower = np.maximum(change - self.jerk, 0.0)  # changes up to this one do not lead to greater steps
        braking = self._room(way, step, self._damping(step + self._gained(np.maximum(change, 0.0))))
        found: Array = np.maximum(room, np.minimum(braking, slower))
        found[enough] = room[enough]
        return found

    def _room(self, way: Array, step: Array, damping: Array) -> Array:
        share, speed = damping[..., None], step[..., None]
        left = way[..., None] - speed * (self._times - 1) + self._shortened
        found: Array = ((share * left - speed + self._slowed) / (self._times + share * self._sums)).min(axis=-1)
        return found

    def _way(self, step: Array, change: Array, damping: Array) -> Array:
        """The `way` for which `_room` is `change`."""
        speed, first = step[:, None], change[:, None]
        behind = speed * (self._times - 1) + first * self._sums - self._shortened
        found: Array = ((speed + first * self._times - self._slowed) / damping[:, None] + behind).max(axis=1)
        return found


UNLIMITED = 1e6  # m or rad in a period


class ToolLimits:
    """The steps of the tool that its limits of place and force allow."""

    def __init__(self, spec: RobotSpec) -> None:
        """Raises SpecError if the limits contradict the specs."""
        limits, state, axes = spec.limits, state_size(spec), len(spec.tool_delta)
        self._tool = checked_indices(limits.tool_position, state, "tool_position")
        self._force = checked_indices(limits.tool_force, state, "tool_force")
        if axes and len(self._tool) not in (0, axes):
            raise SpecError(f"{spec.model}: tool_position and tool_delta differ in length")
        self._box_low, self._box_high = workspace_box(spec)
        self._bars_low: Array = np.array([box.low for box in limits.keep_out], np.float64).reshape(-1, 3)
        self._bars_high: Array = np.array([box.high for box in limits.keep_out], np.float64).reshape(-1, 3)
        if len(self._bars_low) and len(self._tool) != 3:
            raise SpecError(f"{spec.model}: keep_out needs the three indices of the tool in tool_position")
        if not (self._bars_low + ROUNDING < self._bars_high).all():
            raise SpecError(f"{spec.model}: a keep_out box is empty")
        if len(self._force) not in (0, 3) or (limits.tool_force_max is not None and len(self._force) != 3):
            raise SpecError(f"{spec.model}: tool_force_max needs three indices in tool_force")
        self._push = np.inf if limits.tool_force_max is None else limits.tool_force_max
        if not self._push > 0:
            raise SpecError(f"{spec.model}: tool_force_max is {limits.tool_force_max}; it is above 0")
        self._presses = axes > 0 and len(self._force) == axes and bool(np.isfinite(self._push))
        self.needs_state = len(self._tool) > 0 or self._presses

    def step_interval(self, state: Array, wish: Array, motion: AxisMotion | None = None) -> tuple[Array, Array]:
        """The lowest and the highest step of each of the tool's axes; 0 is always between them.

        Args:
            wish: the step (3,) that is wished.
            motion: its first axes are those of the tool; None for a tool that can stop at once.
        """
        if not len(self._tool):
            return np.full(len(wish), -UNLIMITED), np.full(len(wish), UNLIMITED)
        tool = state[self._tool]
        low = np.maximum(np.minimum(self._box_low - tool, 0.0), -UNLIMITED)
        high = np.minimum(np.maximum(self._box_high - tool, 0.0), UNLIMITED)
        if len(self._bars_low):
            gaps = np.concatenate([self._bars_low - tool, tool - self._bars_high], axis=1)  # (boxes, 6): going up, down
            near = gaps.max(axis=1) < (UNLIMITED if motion is None else motion.stopping_distance_bound[:3].max())
            if near.any():
                self._avoid(
                    gaps[near], wish, 0.0 if motion is None else motion.stopping_distances()[:, :3].ravel(), low, high
                )
        return low, high

    def _avoid(self, gaps: Array, wish: Array, ways: Array | float, low: Array, high: Array) -> None:
        """Narrows `low` and `high`, in place, by one face of each forbidden box: the tool stays on its outer side.

        Of the faces before which the tool can come to rest, the one that limits the wish the least. A tool that is in a
        box may not go farther away from its nearest face.
        """
        slack = gaps - np.maximum(ways, 0.0)
        left = gaps - np.maximum(np.concatenate([wish, -wish]), 0.0)
        avoidable = slack >= -ROUNDING
        worse = np.where(gaps.max(axis=1, keepdims=True) < 0, gaps, slack)
        score = np.where(avoidable.any(axis=1, keepdims=True), np.where(avoidable, left, -np.inf), worse)
        for gap, face in zip(gaps, score.argmax(axis=1), strict=True):
            way, axis = max(0.0, gap[face]), face % 3
            if face < 3:
                high[axis] = min(high[axis], way)
            else:
                low[axis] = max(low[axis], -way)

    def blocked_directions(self, state: Array) -> tuple[Array, Array] | None:
        """The axes on which a step down, and those on which a step up, goes against a force above the limit, (3,) bool
        each; None without such a force."""
        if not self._presses:
            return None
        force = state[self._force]
        if math.hypot(*force.tolist()) <= self._push:
            return None
        return force > 0, force < 0


def workspace_box(spec: RobotSpec) -> tuple[Array, Array]:
    """The workspace's lowest and highest corner, m in the base frame; infinite where there is none."""
    limits, axes = spec.limits, len(spec.limits.tool_position)
    low = checked_vector(limits.workspace_low or (-np.inf,) * axes, axes, "workspace_low")
    high = checked_vector(limits.workspace_high or (np.inf,) * axes, axes, "workspace_high")
    if not (low <= high).all():
        raise SpecError(f"{spec.model}: the workspace is empty: {low.tolist()} to {high.tolist()}")
    return low, high


def state_size(spec: RobotSpec) -> int:
    return next((len(s.labels) for s in spec.observation if s.name == STATE), 0)


def checked_vector(values: tuple[float, ...], size: int, name: str) -> Array:
    if len(values) != size:
        raise SpecError(f"{name} has {len(values)} elements; it must have {size}")
    return np.array(values, dtype=np.float64)


def checked_indices(values: tuple[int, ...], size: int, name: str) -> Array:
    if not all(0 <= i < size for i in values):
        raise SpecError(f"{name} is {values}; the vector that it points into has {size} elements")
    return np.array(values, dtype=np.intp)


_UNSET = np.nan  # an element without a neutral value, or never applied
MAX_TARGET_LEAD_S = (
    0.5  # a joint's target may be so far ahead of the joint, at its greatest speed; two control periods at least
)


class SafetyReason(enum.IntFlag):
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


NO_REASON = SafetyReason(0)


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
        self._neutral = _neutral_action(spec)
        self._last: Array = self._neutral.copy()
        rate = checked_vector(limits.action_rate_max or (np.inf,) * size, size, "action_rate_max")
        if not (self._low <= self._high).all() or np.isnan(rate).any() or (rate < 0).any():
            raise SpecError(f"{spec.model}: the action's bounds or rates are not in order")
        if ((self._neutral < self._low) | (self._neutral > self._high)).any():
            raise SpecError(f"{spec.model}: the neutral action is out of the action's bounds")
        self._speeds = _commanded_speeds(spec)
        self._axes = _AxisLimits(spec, rate)
        self._rate = rate.copy()
        self._rate[self._axes.elements] = np.inf  # that of an axis limits its motion
        self.needs_state = self._axes.needs_state

    def validate(self, action: object) -> tuple[Array | None, SafetyReason]:
        """A private float64 copy of `action`, or None and the reason why it is not an action."""
        if type(action) is not np.ndarray or action.dtype != np.float32:
            return None, SafetyReason.DTYPE
        if action.shape != self._shape:
            return None, SafetyReason.SHAPE
        proposed = action.astype(np.float64)
        return (proposed, NO_REASON) if np.isfinite(proposed).all() else (None, SafetyReason.NOT_FINITE)

    def limit(self, proposed: Array, state: Array, share: float = 1.0) -> tuple[Array, SafetyReason]:
        """The action within all limits as float32, and which limits changed it. One within all limits is not changed.

        `share` in (0, 1] of the speed limits is allowed.
        """
        reasons = SafetyReason.BOUND if _exceeds(proposed, self._low, self._high) else NO_REASON
        within: Array = np.minimum(np.maximum(proposed, self._low), self._high)
        low = np.fmin(self._last - self._rate, self._neutral)
        high = np.fmax(self._last + self._rate, self._neutral)
        if _exceeds(within, low, high):
            reasons |= SafetyReason.RATE
            within = np.fmax(np.fmin(within, high), low)
        reasons |= self._slow_down(within, share)
        reasons |= self._axes.limit(within, self._last, state, share)
        self._last = within
        applied = within.astype(np.float32)
        return applied, NO_REASON if (applied == proposed).all() else reasons

    def _slow_down(self, within: Array, share: float) -> SafetyReason:
        """Reduces, in place, the elements that are speeds themselves."""
        if share >= 1.0 or not len(self._speeds):
            return NO_REASON
        wanted = within[self._speeds]
        within[self._speeds] = np.clip(wanted, share * self._low[self._speeds], share * self._high[self._speeds])
        return NO_REASON if (within[self._speeds] == wanted).all() else SafetyReason.SPEED

    def set_applied(self, applied: Array) -> None:
        """`applied` is the part of the last limited action that the hardware carried out. It may be out of the bounds
        if a joint stands out of them and comes back."""
        if applied.shape != self._shape or not np.isfinite(applied).all():
            return
        if not (applied == self._last.astype(np.float32)).all():
            low, high = np.fmin(self._low, self._last), np.fmax(self._high, self._last)
            self._last = np.clip(applied.astype(np.float64), low, high)
            self._axes.set_applied(self._last)

    def on_stop(self) -> None:
        """The robot was stopped: axes are at rest, other elements stay as they were."""
        self._last = np.where(np.isnan(self._neutral), self._last, self._neutral)
        self._last[self._axes.targets] = _UNSET
        self._axes.reset()

    def reset(self) -> None:
        self._last = self._neutral.copy()
        self._axes.reset()


class _AxisLimits:
    """The axes of an action: those of the tool first, then the joints. All values are per control period."""

    def __init__(self, spec: RobotSpec, rate: Array) -> None:
        limits, size = spec.limits, len(spec.action.labels)
        if spec.joint_target and spec.joint_delta:
            raise SpecError(f"{spec.model}: an action moves its joints by joint_target or by joint_delta, not by both")
        deltas = checked_indices(spec.tool_delta, size, "tool_delta")
        turns = checked_indices(spec.joint_target or spec.joint_delta, size, "joint_delta")
        self.targets = checked_indices(spec.joint_target, size, "joint_target")
        self.elements = np.concatenate([deltas, turns])
        self._tools, self._joints = slice(0, len(deltas)), slice(len(deltas), None)
        self._angles = checked_indices(limits.joint_position if len(turns) else (), state_size(spec), "joint_position")
        if len(turns) != len(self._angles):
            raise SpecError(f"{spec.model}: the action moves {len(turns)} joints, joint_position has no index of each")
        self._place = ToolLimits(spec)
        self._far = UNLIMITED if limits.tool_speed_max is None else limits.tool_speed_max * spec.period_s
        self.needs_state = len(turns) > 0 or (len(deltas) > 0 and self._place.needs_state)
        self._bound(spec, rate)
        self._base: Array = np.zeros(len(self.elements))
        self._sides: Array = np.repeat([[-1.0], [1.0]], len(self.elements), axis=1)
        self.reset()

    def _bound(self, spec: RobotSpec, rate: Array) -> None:
        limits, period_s, tools, joints = spec.limits, spec.period_s, self._tools.stop, len(self._angles)
        low, high = np.array(spec.action.low, np.float32), np.array(spec.action.high, np.float32)
        low, high, rate = (each.astype(np.float64)[self.elements] for each in (low, high, rate))
        speed = _axis_limits(None, tools, limits.joint_velocity_max, joints, "joint_velocity_max") * period_s
        acceleration = _axis_limits(
            limits.tool_acceleration_max, tools, limits.joint_acceleration_max, joints, "joint_acceleration_max"
        )
        jerk = _axis_limits(limits.tool_jerk_max, tools, limits.joint_jerk_max, joints, "joint_jerk_max")
        acceleration, jerk = acceleration * period_s**2, jerk * period_s**3
        self._reach_low = checked_vector(limits.joint_low, joints, "joint_low") if joints else _EMPTY
        self._reach_high = checked_vector(limits.joint_high, joints, "joint_high") if joints else _EMPTY
        self._lead = speed[self._joints] * max(MAX_TARGET_LEAD_S / period_s, 2.0)
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
        self._motion = AxisMotion(greatest, acceleration, jerk)

    def reset(self) -> None:
        """The robot stands still."""
        self._motion.reset()
        self._follows = np.ones(len(self.elements), bool)  # since it was last at rest, or has caught up

    def set_applied(self, applied: Array) -> None:
        """`applied` is what became of the last limited action."""
        self._motion.replace_last_step(applied[self.elements] - self._base)

    def limit(self, within: Array, last: Array, state: Array, share: float) -> SafetyReason:
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
        room = self._change_limits(low, high, wanted)
        *speed, towards = motion.change_towards(
            np.array([share * self._slowest, share * self._fastest, wish]) - motion.step
        )
        if len(self.targets):
            towards[self._joints] = room[2, self._joints]
        change = self._change(
            wanted, wish, towards, np.maximum(room[0], speed[0]), np.minimum(room[1], speed[1]), share
        )
        smooth = motion.step + change
        step, held_up = self._limit_lead(np.minimum(np.maximum(smooth, low), high), angle, measured)
        exact, before = wish - motion.step, motion.change
        motion.advance(step)
        changed = step != wanted
        if not changed.any():
            return NO_REASON
        within[self.elements[changed]] = (self._base + step)[changed]
        reasons = held_up | self._hastes(exact, before)
        if (wish != wanted).any() or _exceeds(exact, speed[0], speed[1], ROUNDING):
            reasons |= SafetyReason.SPEED
        placed = (exact < room[0] - ROUNDING) | (exact > room[1] + ROUNDING)
        if pressed is not None and (placed & pressed).any():
            reasons |= SafetyReason.FORCE
            placed &= ~pressed
        if placed[self._tools].any():
            reasons |= SafetyReason.WORKSPACE
        return reasons | SafetyReason.JOINT_POSITION if placed[self._joints].any() else reasons or SafetyReason.SPEED

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
            low[self._tools], high[self._tools] = self._place.step_interval(state, wish[self._tools], self._motion)
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

    def _change_limits(self, low: Array, high: Array, wanted: Array) -> Array:
        """The lowest and the highest change after which each axis can come to rest in its place, (2, n); for targets
        also the change that leads to the target, (3, n)."""
        if not len(self.targets):
            return self._motion.change_limit(np.array([-low, high]), self._sides)
        sides = np.array([*self._sides, np.where(wanted >= 0, 1.0, -1.0)])
        return self._motion.change_limit(np.array([-low, high, np.abs(wanted)]), sides)

    def _change(self, wanted: Array, wish: Array, towards: Array, down: Array, up: Array, share: float) -> Array:
        """The change of each step. An axis follows its wish for as long as the limits allow that. If they do not, it
        goes there as fast as they allow without passing it: a target as a place, a step as a speed."""
        motion, exact = self._motion, wish - self._motion.step
        down, up = motion.clip_change(down), motion.clip_change(up)
        ahead, followed = exact >= 0, self._follows
        if len(self.targets):
            ahead, followed = wanted >= 0, followed & (wish == wanted)
        allowed = (exact >= down - ROUNDING) & (exact <= up + ROUNDING)
        short = np.where(ahead, exact <= towards, exact >= towards)
        self._follows = allowed & (followed | short)
        change: Array = np.minimum(np.maximum(np.where(self._follows, exact, towards), down), up)
        tools, far = self._tools, self._far * share
        if tools.stop and far < UNLIMITED * share:
            peak = _length(motion.peak_steps(change)[tools])
            if peak > far:  # that is convex in the changes: a mixture with braking is within the limit
                braked = _length(motion.peak_steps(motion.braking_change)[tools])
                mixed = max(0.0, far - braked) / (peak - braked) if peak > braked else 0.0
                change[tools] = motion.braking_change[tools] + mixed * (change[tools] - motion.braking_change[tools])
        return change

    def _limit_lead(self, step: Array, angle: Array, measured: Array) -> tuple[Array, SafetyReason]:
        """`step` without what leads targets away from joints that are held up."""
        if not len(self.targets):
            return step, NO_REASON
        low, high = np.minimum(measured - self._lead - angle, 0.0), np.maximum(measured + self._lead - angle, 0.0)
        kept = step.copy()
        kept[self._joints] = np.minimum(np.maximum(step[self._joints], low), high)
        return kept, NO_REASON if (kept == step).all() else SafetyReason.SPEED

    def _hastes(self, exact: Array, before: Array) -> SafetyReason:
        hasty = np.abs(exact) > self._motion.acceleration + ROUNDING
        reasons = SafetyReason.JERK if (np.abs(exact - before) > self._motion.jerk + ROUNDING).any() else NO_REASON
        if (hasty & self._by_rate).any():
            reasons |= SafetyReason.RATE
        return reasons | SafetyReason.ACCELERATION if (hasty & ~self._by_rate).any() else reasons


class StateLimits:
    """What no action can mend, seen in the last reading: joints out of range or too fast, a misplaced tool."""

    def __init__(self, spec: RobotSpec) -> None:
        """Raises SpecError where the limits contradict the specs."""
        limits, size = spec.limits, state_size(spec)
        self._labels = spec.feature(STATE).labels if size else ()
        self._position = checked_indices(limits.joint_position, size, "joint_position")
        self._low = checked_vector(limits.joint_low, len(self._position), "joint_low")
        self._high = checked_vector(limits.joint_high, len(self._position), "joint_high")
        if not (self._low <= self._high).all():
            raise SpecError(f"{spec.model}: joint_low and joint_high are not in order: {self._low} to {self._high}")
        self._may_come_back = bool(spec.joint_target or spec.joint_delta)
        self._velocity = checked_indices(limits.joint_velocity, size, "joint_velocity")
        measured = limits.joint_velocity_max if limits.joint_velocity else ()
        self._fastest = checked_vector(measured, len(self._velocity), "joint_velocity_max")
        self._place = (
            None if spec.tool_delta or not limits.tool_position + limits.tool_force else _ToolStateLimits(spec)
        )
        self.needs_state = bool(limits.joint_position or limits.joint_velocity or self._place)

    def check(self, state: Array) -> SafetyReason:
        if not self.needs_state:
            return NO_REASON
        reasons = NO_REASON
        angles = state[self._position]
        if not self._may_come_back and not ((angles > self._low) & (angles < self._high)).all():
            reasons |= SafetyReason.JOINT_POSITION
        if not (np.abs(state[self._velocity]) <= self._fastest).all():
            reasons |= SafetyReason.JOINT_VELOCITY
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


class _ToolStateLimits:
    """Where the tool is, and what presses on it, for a robot whose action does not say how its tool will move."""

    def __init__(self, spec: RobotSpec) -> None:
        limits = spec.limits
        self._tool = checked_indices(limits.tool_position, state_size(spec), "tool_position")
        self._low, self._high = workspace_box(spec)
        self._keep_out = limits.keep_out
        self._force = checked_indices(limits.tool_force, state_size(spec), "tool_force")
        self._push = np.inf if limits.tool_force_max is None else limits.tool_force_max

    def check(self, state: Array) -> SafetyReason:
        tool, force = state[self._tool], state[self._force]
        forbidden = any(((tool > box.low) & (tool < box.high)).all() for box in self._keep_out)
        inside = bool(((tool >= self._low) & (tool <= self._high)).all()) and not forbidden
        pressed = float(np.sqrt(force @ force)) > self._push
        return (NO_REASON if inside else SafetyReason.WORKSPACE) | (SafetyReason.FORCE if pressed else NO_REASON)

    def explain(self, state: Array) -> str:
        return f"the tool is at {np.round(state[self._tool], 4).tolist()} m, under {state[self._force].tolist()} N"


_EMPTY: Array = np.empty(0)


def _length(vector: Array) -> float:
    return math.sqrt(float(vector @ vector))


def _exceeds(value: Array, low: Array, high: Array, slack: float = 0.0) -> bool:
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


def _neutral_action(spec: RobotSpec) -> Array:
    """Each element's value that keeps the robot still; NaN where that depends on where it is."""
    size = len(spec.action.labels)
    neutral = checked_vector(spec.neutral or (_UNSET,) * size, size, "neutral")
    if spec.gripper >= 0:
        checked_indices((spec.gripper,), size, "gripper")
        neutral[spec.gripper] = _UNSET
    neutral[checked_indices(spec.joint_target, size, "joint_target")] = _UNSET
    for element in checked_indices(spec.tool_delta + spec.joint_delta, size, "tool_delta or joint_delta"):
        if neutral[element] != 0.0 and not np.isnan(neutral[element]):
            raise SpecError(f"{spec.model}: element {element} is a step; its neutral value must be 0")
        neutral[element] = 0.0
    return neutral


def _axis_limits(tool: float | None, tools: int, each: tuple[float, ...], joints: int, name: str) -> Array:
    """A limit of each axis; infinite if there is none. That of joints counts only if the action moves them."""
    of_tool = np.full(tools, np.inf if tool is None else tool)
    return np.concatenate([of_tool, checked_vector((each if joints else ()) or (np.inf,) * joints, joints, name)])
