"""The limits on a robot's motion, which the safety kernel (`hal.safety`) applies.

An *axis* is an element of the action that moves the tool or a joint. All values are per control period. A *step* is the
distance that an axis moves in one period. A *change* is the difference of two consecutive steps. Speed limits the step,
acceleration the change, and jerk the difference of two changes.

**Order of the limits**, for each axis separately:

1. Place: workspace, forbidden boxes, joint range, force, and the lead of a target over its joint. They leave an
   interval of steps that always contains 0: an axis outside may come back and not go farther.
2. Speed, acceleration and jerk. They apply while an axis speeds up and while it brakes.

**Exceptions.** An axis exceeds its acceleration or jerk only in a period in which every step within these limits would
leave its place. It then takes the nearest step that does not, and its acceleration counts as 0 in the next period. The
other axes are not affected. An axis takes a step only if it can still come to rest in its place within all limits. So a
robot that moves as commanded exceeds no limit, unless a force appears or a joint is blocked. A reduced speed that
begins during a motion is reached within the limits too.

A stop (`hal.robot.Robot.stop`) is not limited: the driver brakes as its robot can. Motion then starts from rest.

**Method.** To come to rest within a distance, an axis brakes at full jerk until a velocity damper takes over (Faverjon
and Tournassoud, 1987). The damper keeps the step below a share of the remaining distance, the largest share at which
the damper itself is within acceleration and jerk. A change is allowed if the damper's bound holds after it and after
each further period of full jerk. These bounds are linear in the change, and their minimum is exact for this braking.
"""

from __future__ import annotations

import enum
import math

import numpy as np

from hal.errors import SpecError
from hal.spec import STATE, Array, RobotSpec

ROUNDING = 3e-7  # m or rad: a position of up to 4, rounded to float32
UNLIMITED = 1e6  # m or rad per period
MAX_TARGET_LEAD_S = 0.5
"""The time at greatest speed that a joint's target may be ahead of the joint; at least two control periods."""
_UNSET = np.nan  # an element without a neutral value, or never applied
_EMPTY: Array = np.empty(0)


class AxisMotion:
    """The steps of n axes, and the limits on the next ones.

    Attributes:
        step, change: of the last period, (n,).
        min_change, max_change: the changes that acceleration and jerk allow in the next period, (n,).
        braking_change: the change among them that leads to rest.
        acceleration, jerk: (n,); at most the values that the speeds can use.
        stopping_distance_bound: the distance within which an axis can come to rest after any next period, (n,).
    """

    def __init__(self, speed: Array, acceleration: Array, jerk: Array) -> None:
        """`speed` (n,) is the greatest step of each axis in either direction, finite. All values are above 0."""
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
        self.stopping_distance_bound: Array = speed + self._distance_for(speed, self.acceleration, damping)
        self.reset()

    def reset(self) -> None:
        """All axes are at rest."""
        at_rest = np.zeros(len(self._speed))
        self._prepare(at_rest, at_rest)
        self._before = at_rest, self.min_change, self.max_change

    def advance(self, step: Array) -> None:
        """Sets the step of the next period. A change that exceeds acceleration or jerk counts as 0 afterwards."""
        self._before = self.step, self.min_change, self.max_change
        self.replace_last_step(step)

    def replace_last_step(self, step: Array) -> None:
        """Replaces the step of the last period."""
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
        periods = np.floor((np.sqrt(1 + 8 * size / self.jerk) - 1) / 2)
        found: Array = np.copysign((size + self.jerk * periods * (periods + 1) / 2) / (periods + 1), gap)
        return found

    def peak_steps(self, change: Array) -> Array:
        """The greatest size of each step while its `change` falls to 0 at full jerk."""
        after = self.step + change
        found: Array = np.maximum(np.abs(after), np.abs(after + self._change_to_come(change)))
        return found

    def change_limit(self, distance: Array, side: Array) -> Array:
        """The outermost change (k, n) after which an axis can still come to rest within `distance` (>= 0).

        It is at least `braking_change`, and infinite in a row in which every distance is large. A distance of 0 leaves
        only `braking_change`. Such an axis is outside its place, and the limit moves along with the axis: it may not
        use the distance of this period's return in the next period.

        Args:
            side: (k, n), the direction of the distance: 1 is up, -1 is down.
        """
        far = (distance >= self.stopping_distance_bound).all(axis=-1)
        if far.all():
            return side * np.inf
        most = np.where(side > 0, self.max_change, -self.min_change)
        room = self._damped_limit(distance, side * self.step, side * self.change, most)
        room[distance <= 0.0] = -np.inf
        found: Array = side * np.maximum(room, side * self.braking_change)
        found[far] = side[far] * np.inf
        return found

    def stopping_distances(self) -> Array:
        """The distances (2, n) up and down that each axis needs to come to rest."""
        found = []
        for step, change in ((self.step, self.min_change), (-self.step, -self.max_change)):
            found.append(self._distance_for(step, change, self._damping(step + change + self._change_to_come(change))))
        return np.stack(found)

    def _change_to_come(self, change: Array) -> Array:
        """The further change of a step while `change` falls to 0 at full jerk."""
        size = np.abs(change)
        periods = np.floor(size / self.jerk)
        found: Array = np.copysign(periods * size - self.jerk * periods * (periods + 1) / 2, change)
        return found

    def _damping(self, fastest: Array) -> Array:
        """The share of the remaining distance that a step may take in each period, if no step is above `fastest`.

        A damper with the share c has changes of c * step, and their differences are c * c * step.
        """
        fastest = np.minimum(np.maximum(fastest, 1e-12), self._speed)
        found: Array = np.minimum(np.minimum(self.acceleration / fastest, np.sqrt(self.jerk / fastest)), 1.0)
        return found

    def _damped_limit(self, distance: Array, step: Array, change: Array, most: Array) -> Array:
        """The damping is that of the greatest step that can follow. If the axis must brake, the damping is that of the
        present motion, so that it is steady until the axis is at rest."""
        room = self._damper_limit(distance, step, self._damping(step + most + self._change_to_come(most)))
        enough = (room >= most).all(axis=-1)
        if enough.all():
            return room
        slower = np.maximum(change - self.jerk, 0.0)  # changes up to this one do not lead to greater steps
        braking = self._damper_limit(
            distance, step, self._damping(step + self._change_to_come(np.maximum(change, 0.0)))
        )
        found: Array = np.maximum(room, np.minimum(braking, slower))
        found[enough] = room[enough]
        return found

    def _damper_limit(self, distance: Array, step: Array, damping: Array) -> Array:
        share, speed = damping[..., None], step[..., None]
        left = distance[..., None] - speed * (self._times - 1) + self._shortened
        found: Array = ((share * left - speed + self._slowed) / (self._times + share * self._sums)).min(axis=-1)
        return found

    def _distance_for(self, step: Array, change: Array, damping: Array) -> Array:
        """The distance for which `_damper_limit` is `change`."""
        speed, first = step[:, None], change[:, None]
        behind = speed * (self._times - 1) + first * self._sums - self._shortened
        found: Array = ((speed + first * self._times - self._slowed) / damping[:, None] + behind).max(axis=1)
        return found


class ToolLimits:
    """The steps of the tool within its limits of place and force."""

    def __init__(self, spec: RobotSpec) -> None:
        """Raises SpecError if the limits contradict the specs."""
        limits, state, axes = spec.limits, state_size(spec), len(spec.tool_delta)
        self._tool = checked_indices(limits.tool_position, state, "tool_position")
        self._force = checked_indices(limits.tool_force, state, "tool_force")
        if axes and len(self._tool) not in (0, axes):
            raise SpecError(f"{spec.model}: tool_position and tool_delta differ in length")
        self._box_low, self._box_high = workspace_box(spec)
        self._keep_out_low: Array = np.array([box.low for box in limits.keep_out], np.float64).reshape(-1, 3)
        self._keep_out_high: Array = np.array([box.high for box in limits.keep_out], np.float64).reshape(-1, 3)
        if len(self._keep_out_low) and len(self._tool) != 3:
            raise SpecError(f"{spec.model}: keep_out needs the three indices of the tool in tool_position")
        if not (self._keep_out_low + ROUNDING < self._keep_out_high).all():
            raise SpecError(f"{spec.model}: a keep_out box is empty")
        if len(self._force) not in (0, 3) or (limits.tool_force_max is not None and len(self._force) != 3):
            raise SpecError(f"{spec.model}: tool_force_max needs three indices in tool_force")
        if limits.tool_force_max is not None and axes not in (0, 3):
            raise SpecError(f"{spec.model}: tool_force_max needs three elements in tool_delta, or none; it has {axes}")
        self._force_max = np.inf if limits.tool_force_max is None else limits.tool_force_max
        if not self._force_max > 0:
            raise SpecError(f"{spec.model}: tool_force_max is {limits.tool_force_max}; give a force above 0")
        self._limits_force = axes > 0 and bool(np.isfinite(self._force_max))
        self.needs_state = len(self._tool) > 0 or self._limits_force

    def step_interval(self, state: Array, desired: Array, motion: AxisMotion | None = None) -> tuple[Array, Array]:
        """The lowest and the highest step of each of the tool's axes; 0 is always between them.

        Args:
            desired: the desired step (3,).
            motion: its first axes are those of the tool; None for a tool that can stop at once.
        """
        if not len(self._tool):
            return np.full(len(desired), -UNLIMITED), np.full(len(desired), UNLIMITED)
        tool = state[self._tool]
        low = np.maximum(np.minimum(self._box_low - tool, 0.0), -UNLIMITED)
        high = np.minimum(np.maximum(self._box_high - tool, 0.0), UNLIMITED)
        if len(self._keep_out_low):
            gaps = np.concatenate(
                [self._keep_out_low - tool, tool - self._keep_out_high], axis=1
            )  # (boxes, 6): going up, down
            near = gaps.max(axis=1) < (UNLIMITED if motion is None else motion.stopping_distance_bound[:3].max())
            if near.any():
                self._avoid(
                    gaps[near],
                    desired,
                    0.0 if motion is None else motion.stopping_distances()[:, :3].ravel(),
                    low,
                    high,
                )
        return low, high

    def _avoid(self, gaps: Array, desired: Array, distances: Array | float, low: Array, high: Array) -> None:
        """Narrows `low` and `high`, in place, by one face of each forbidden box: the tool stays on its outer side.

        It chooses, among the faces before which the tool can come to rest, the one that limits the desired step least.
        A tool inside a box may not move away from its nearest face.
        """
        slack = gaps - np.maximum(distances, 0.0)
        left = gaps - np.maximum(np.concatenate([desired, -desired]), 0.0)
        avoidable = slack >= -ROUNDING
        worse = np.where(gaps.max(axis=1, keepdims=True) < 0, gaps, slack)
        score = np.where(avoidable.any(axis=1, keepdims=True), np.where(avoidable, left, -np.inf), worse)
        for gap, face in zip(gaps, score.argmax(axis=1), strict=True):
            distance, axis = max(0.0, gap[face]), face % 3
            if face < 3:
                high[axis] = min(high[axis], distance)
            else:
                low[axis] = max(low[axis], -distance)

    def blocked_directions(self, state: Array) -> tuple[Array, Array] | None:
        """The axes on which a step down, and those on which a step up, moves against a force above the limit, (3,) bool
        each; None without such a force."""
        if not self._limits_force:
            return None
        force = state[self._force]
        if math.hypot(*force.tolist()) <= self._force_max:
            return None
        return force > 0, force < 0


def workspace_box(spec: RobotSpec) -> tuple[Array, Array]:
    """The workspace's lowest and highest corner, m in the base frame; infinite without a workspace."""
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
        raise SpecError(f"{name} has {len(values)} elements; give {size}")
    return np.array(values, dtype=np.float64)


def checked_indices(values: tuple[int, ...], size: int, name: str) -> Array:
    if not all(0 <= i < size for i in values):
        raise SpecError(f"{name} is {values}; give indices below {size}, the size of the vector")
    return np.array(values, dtype=np.intp)


def commanded_speeds(spec: RobotSpec) -> Array:
    """The action elements that are speeds by their unit and may be 0, e.g. of a mobile base."""
    action = spec.action
    return np.array(
        [
            i
            for i, (unit, low, high) in enumerate(zip(action.units, action.low, action.high, strict=True))
            if unit.endswith("/s") and low <= 0 <= high
        ],
        dtype=np.intp,
    )


class SafetyReason(enum.IntFlag):
    """Why the applied action differs from the proposed one; fits uint16. 0 if they are equal.

    SPEED is also the reason if a joint does not keep up: the lead of its target is limited.
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
    """The limits that change an action, and the motion that they depend on."""

    def __init__(self, spec: RobotSpec) -> None:
        """Raises SpecError if the limits contradict the specs."""
        size, limits = len(spec.action.labels), spec.limits
        if spec.action.dtype != "float32":
            raise SpecError(f"{spec.model}: actions must be float32; the spec has {spec.action.dtype}")
        self._shape = (size,)
        self._low: Array = np.array(spec.action.low, np.float32).astype(np.float64)
        self._high: Array = np.array(spec.action.high, np.float32).astype(np.float64)
        self._neutral: Array = _neutral_action(spec).astype(np.float32).astype(np.float64)
        self._last: Array = self._neutral.copy()
        rate = checked_vector(limits.action_rate_max or (np.inf,) * size, size, "action_rate_max")
        if not (self._low <= self._high).all() or np.isnan(rate).any() or (rate < 0).any():
            raise SpecError(f"{spec.model}: the action's bounds or rates are not in order")
        if ((self._neutral < self._low) | (self._neutral > self._high)).any():
            raise SpecError(f"{spec.model}: the neutral action exceeds the action's bounds")
        self._speeds = commanded_speeds(spec)
        self._axes = _AxisLimits(spec, rate)
        self._rate = rate.copy()
        self._rate[self._axes.elements] = np.inf  # the rate of an axis limits its motion instead
        self.needs_state = self._axes.needs_state

    def validate(self, action: object) -> tuple[Array | None, SafetyReason]:
        """A private float64 copy of `action`, or None and the reason why it is invalid."""
        if type(action) is not np.ndarray or action.dtype != np.float32:
            return None, SafetyReason.DTYPE
        if action.shape != self._shape:
            return None, SafetyReason.SHAPE
        proposed = action.astype(np.float64)
        return (proposed, NO_REASON) if np.isfinite(proposed).all() else (None, SafetyReason.NOT_FINITE)

    def limit(self, proposed: Array, state: Array, share: float = 1.0) -> tuple[Array, SafetyReason]:
        """The action within all limits as float32, and the limits that changed it. A valid action is not changed.

        `share` in (0, 1] scales the speed limits.
        """
        reasons = SafetyReason.BOUND if _exceeds(proposed, self._low, self._high) else NO_REASON
        within: Array = np.minimum(np.maximum(proposed, self._low), self._high)
        low = np.fmin(self._last - self._rate, self._neutral)
        high = np.fmax(self._last + self._rate, self._neutral)
        if _exceeds(within, low, high):
            reasons |= SafetyReason.RATE
            within = np.fmax(np.fmin(within, high), low)
        reasons |= self._reduce_speeds(within, share)
        reasons |= self._axes.limit(within, self._last, state, share)
        self._last = within
        applied = within.astype(np.float32)
        return applied, NO_REASON if (applied == proposed).all() else reasons

    def _reduce_speeds(self, within: Array, share: float) -> SafetyReason:
        """Reduces, in place, the elements that are speeds."""
        if share >= 1.0 or not len(self._speeds):
            return NO_REASON
        proposed = within[self._speeds]
        within[self._speeds] = np.clip(proposed, share * self._low[self._speeds], share * self._high[self._speeds])
        return NO_REASON if (within[self._speeds] == proposed).all() else SafetyReason.SPEED

    def set_applied(self, applied: Array) -> None:
        """Sets the last action to the part that the hardware applied. It may exceed the bounds if a joint is outside
        them and comes back."""
        if applied.shape != self._shape or not np.isfinite(applied).all():
            return
        if not (applied == self._last.astype(np.float32)).all():
            low, high = np.fmin(self._low, self._last), np.fmax(self._high, self._last)
            self._last = np.clip(applied.astype(np.float64), low, high)
            self._axes.set_applied(self._last)

    def on_stop(self) -> None:
        """The robot was stopped: axes are at rest, other elements keep their values."""
        self._last = np.where(np.isnan(self._neutral), self._last, self._neutral)
        self._last[self._axes.targets] = _UNSET
        self._axes.reset()

    def reset(self) -> None:
        """The robot is at rest, and its last action is unknown."""
        self._last = self._neutral.copy()
        self._axes.reset()


class _JointRange:
    """The range of each joint, and how far its target may lead it."""

    def __init__(self, indices: Array, low: Array, high: Array, max_lead: Array) -> None:
        """`indices` are those of the joints in the state vector."""
        self.indices, self._low, self._high, self._max_lead = indices, low, high, max_lead

    def narrow(self, low: Array, high: Array) -> None:
        """The range is also within `low` and `high`."""
        self._low, self._high = np.maximum(self._low, low), np.minimum(self._high, high)

    def step_interval(self, angle: Array) -> tuple[Array, Array]:
        """The lowest and highest steps from `angle` within the range; 0 is always between them."""
        low = np.maximum(np.minimum(self._low - angle, 0.0), -UNLIMITED)
        return low, np.minimum(np.maximum(self._high - angle, 0.0), UNLIMITED)

    def limit_lead(self, step: Array, angle: Array, measured: Array) -> Array:
        """`step` from the target `angle` without the part that moves it too far ahead of the `measured` joint."""
        low = np.minimum(measured - self._max_lead - angle, 0.0)
        high = np.maximum(measured + self._max_lead - angle, 0.0)
        within: Array = np.minimum(np.maximum(step, low), high)
        return within


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
        angles = checked_indices(limits.joint_position if len(turns) else (), state_size(spec), "joint_position")
        if len(turns) != len(angles):
            raise SpecError(f"{spec.model}: the action moves {len(turns)} joints, joint_position has no index of each")
        self._tool_limits = ToolLimits(spec)
        self._tool_step_max = UNLIMITED if limits.tool_speed_max is None else limits.tool_speed_max * spec.period_s
        self.needs_state = len(turns) > 0 or (len(deltas) > 0 and self._tool_limits.needs_state)
        self._bound(spec, rate, angles)
        self._base: Array = np.zeros(len(self.elements))
        self._sides: Array = np.repeat([[-1.0], [1.0]], len(self.elements), axis=1)
        self.reset()

    def _bound(self, spec: RobotSpec, rate: Array, angles: Array) -> None:
        limits, period_s, tools, joints = spec.limits, spec.period_s, self._tools.stop, len(angles)
        _require_axes(spec, ("tool_speed_max", "tool_acceleration_max", "tool_jerk_max"), tools, "tool_delta")
        _require_axes(spec, ("joint_acceleration_max", "joint_jerk_max"), joints, "joint_target or joint_delta")
        low, high = np.array(spec.action.low, np.float32), np.array(spec.action.high, np.float32)
        low, high, rate = (each.astype(np.float64)[self.elements] for each in (low, high, rate))
        speed = _axis_limits(None, tools, limits.joint_velocity_max, joints, "joint_velocity_max") * period_s
        acceleration = _axis_limits(
            limits.tool_acceleration_max, tools, limits.joint_acceleration_max, joints, "joint_acceleration_max"
        )
        jerk = _axis_limits(limits.tool_jerk_max, tools, limits.joint_jerk_max, joints, "joint_jerk_max")
        acceleration, jerk = acceleration * period_s**2, jerk * period_s**3
        lowest = checked_vector(limits.joint_low, joints, "joint_low") if joints else _EMPTY
        highest = checked_vector(limits.joint_high, joints, "joint_high") if joints else _EMPTY
        max_lead = speed[self._joints] * max(MAX_TARGET_LEAD_S / period_s, 2.0)
        self._joint_range = _JointRange(angles, lowest, highest, max_lead)
        if len(self.targets):  # a target's bounds limit its place, and its rate limits the speed
            if not np.isfinite(speed[self._joints]).all():
                raise SpecError(f"{spec.model}: joint_target needs a finite joint_velocity_max of each joint")
            self._joint_range.narrow(low[self._joints], high[self._joints])
            low[self._joints], high[self._joints] = -rate[self._joints], rate[self._joints]
            rate[self._joints] = np.inf
        self._slowest: Array = np.maximum(np.maximum(low, -speed), -UNLIMITED)
        self._fastest: Array = np.minimum(np.minimum(high, speed), UNLIMITED)
        self._by_rate = rate < acceleration
        greatest, acceleration = np.maximum(-self._slowest, self._fastest), np.minimum(acceleration, rate)
        if not self._tool_step_max > 0 or not all((each > 0).all() for each in (greatest, acceleration, jerk)):
            raise SpecError(f"{spec.model}: limits of speed, acceleration, jerk and rate must be above 0")
        self._motion = AxisMotion(greatest, acceleration, jerk)

    def reset(self) -> None:
        """The robot is at rest."""
        self._motion.reset()
        self._follows = np.ones(len(self.elements), bool)  # since the axis was last at rest, or has caught up

    def set_applied(self, applied: Array) -> None:
        """Sets the step of the last period to the applied action's.

        An axis that made another motion than the commanded one is at rest: something else moved it, such as a person
        before the driver activated the arm.
        """
        step, made = self._motion.step, applied[self.elements] - self._base
        self._motion.replace_last_step(np.where(np.abs(made - step) <= np.abs(step), made, 0.0))

    def limit(self, within: Array, last: Array, state: Array, share: float) -> SafetyReason:
        """Changes the axes of `within` in place."""
        if not len(self.elements):
            return NO_REASON
        indices = self._joint_range.indices
        measured = angle = state[indices] if len(indices) else _EMPTY
        if len(self.targets):
            target = last[self.targets]
            angle = self._base[self._joints] = np.where(np.isnan(target), measured, target)
        proposed, motion = within[self.elements] - self._base, self._motion
        desired = self._limit_speed(proposed, share)
        low, high = self._step_intervals(angle, state, desired)
        pressed = self._block_against_force(low, high, state)
        room = self._change_limits(low, high, proposed)
        *speed, towards = motion.change_towards(
            np.array([share * self._slowest, share * self._fastest, desired]) - motion.step
        )
        if len(self.targets):
            towards[self._joints] = room[2, self._joints]
        change = self._change(
            proposed, desired, towards, np.maximum(room[0], speed[0]), np.minimum(room[1], speed[1]), share
        )
        smooth = motion.step + change
        step, lead_reason = self._limit_lead(np.minimum(np.maximum(smooth, low), high), angle, measured)
        exact, before = desired - motion.step, motion.change
        motion.advance(step)
        changed = step != proposed
        if not changed.any():
            return NO_REASON
        within[self.elements[changed]] = (self._base + step)[changed]
        reasons = lead_reason | self._exceeded_dynamics(exact, before)
        if (desired != proposed).any() or _exceeds(exact, speed[0], speed[1], ROUNDING):
            reasons |= SafetyReason.SPEED
        out_of_place = (exact < room[0] - ROUNDING) | (exact > room[1] + ROUNDING)
        if pressed is not None and (out_of_place & pressed).any():
            reasons |= SafetyReason.FORCE
            out_of_place &= ~pressed
        if out_of_place[self._tools].any():
            reasons |= SafetyReason.WORKSPACE
        return (
            reasons | SafetyReason.JOINT_POSITION if out_of_place[self._joints].any() else reasons or SafetyReason.SPEED
        )

    def _limit_speed(self, proposed: Array, share: float) -> Array:
        """`proposed` within the limits of speed."""
        desired: Array = np.minimum(np.maximum(proposed, self._slowest * share), self._fastest * share)
        length = _length(desired[self._tools])
        if length > self._tool_step_max * share:
            desired[self._tools] *= self._tool_step_max * share / length
        return desired

    def _step_intervals(self, angle: Array, state: Array, desired: Array) -> tuple[Array, Array]:
        """The lowest and highest steps that keep each axis in its place; 0 is always between them."""
        low, high = np.full(len(desired), -UNLIMITED), np.full(len(desired), UNLIMITED)
        if len(angle):
            low[self._joints], high[self._joints] = self._joint_range.step_interval(angle)
        if self._tools.stop and self._tool_limits.needs_state:
            low[self._tools], high[self._tools] = self._tool_limits.step_interval(
                state, desired[self._tools], self._motion
            )
        return low, high

    def _block_against_force(self, low: Array, high: Array, state: Array) -> Array | None:
        """Removes from the intervals, in place, the steps against a force above its limit. Returns the axes (bool) that
        such a force acts on, if there is one."""
        pressed = self._tool_limits.blocked_directions(state) if self._tools.stop else None
        if pressed is None:
            return None
        down, up = pressed
        low[self._tools][down], high[self._tools][up] = 0.0, 0.0
        blocked = np.zeros(len(low), bool)
        blocked[self._tools] = down | up
        return blocked

    def _change_limits(self, low: Array, high: Array, proposed: Array) -> Array:
        """The lowest and the highest change after which each axis can come to rest in its place, (2, n); for targets
        also the change that leads to the target, (3, n)."""
        if not len(self.targets):
            return self._motion.change_limit(np.array([-low, high]), self._sides)
        sides = np.array([*self._sides, np.where(proposed >= 0, 1.0, -1.0)])
        return self._motion.change_limit(np.array([-low, high, np.abs(proposed)]), sides)

    def _change(self, proposed: Array, desired: Array, towards: Array, down: Array, up: Array, share: float) -> Array:
        """The change of each step. An axis follows its desired step while the limits allow that. Otherwise it moves
        there as fast as they allow without passing it: to a target as a place, to a step as a speed."""
        motion, exact = self._motion, desired - self._motion.step
        down, up = motion.clip_change(down), motion.clip_change(up)
        ahead, followed = exact >= 0, self._follows
        if len(self.targets):
            ahead, followed = proposed >= 0, followed & (desired == proposed)
        allowed = (exact >= down - ROUNDING) & (exact <= up + ROUNDING)
        short = np.where(ahead, exact <= towards, exact >= towards)
        self._follows = allowed & (followed | short)
        change: Array = np.minimum(np.maximum(np.where(self._follows, exact, towards), down), up)
        tools, far = self._tools, self._tool_step_max * share
        if tools.stop and far < UNLIMITED * share:
            peak = _length(motion.peak_steps(change)[tools])
            if peak > far:  # the peak is convex in the changes, so a mixture with braking is within the limit
                braked = _length(motion.peak_steps(motion.braking_change)[tools])
                mixed = max(0.0, far - braked) / (peak - braked) if peak > braked else 0.0
                change[tools] = motion.braking_change[tools] + mixed * (change[tools] - motion.braking_change[tools])
        return change

    def _limit_lead(self, step: Array, angle: Array, measured: Array) -> tuple[Array, SafetyReason]:
        """`step` without the part that moves targets away from blocked joints."""
        if not len(self.targets):
            return step, NO_REASON
        kept = step.copy()
        kept[self._joints] = self._joint_range.limit_lead(step[self._joints], angle, measured)
        return kept, NO_REASON if (kept == step).all() else SafetyReason.SPEED

    def _exceeded_dynamics(self, exact: Array, before: Array) -> SafetyReason:
        too_large = np.abs(exact) > self._motion.acceleration + ROUNDING
        reasons = SafetyReason.JERK if (np.abs(exact - before) > self._motion.jerk + ROUNDING).any() else NO_REASON
        if (too_large & self._by_rate).any():
            reasons |= SafetyReason.RATE
        return reasons | SafetyReason.ACCELERATION if (too_large & ~self._by_rate).any() else reasons


class StateLimits:
    """Violations in the last reading that no action can correct: joints out of range or too fast, a misplaced tool."""

    def __init__(self, spec: RobotSpec) -> None:
        """Raises SpecError if the limits contradict the specs."""
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
        self._tool_limits = (
            None if spec.tool_delta or not limits.tool_position + limits.tool_force else ToolStateLimits(spec)
        )
        self.needs_state = bool(limits.joint_position or limits.joint_velocity or self._tool_limits)

    def check(self, state: Array) -> SafetyReason:
        if not self.needs_state:
            return NO_REASON
        reasons = NO_REASON
        angles = state[self._position]
        if not self._may_come_back and not ((angles > self._low) & (angles < self._high)).all():
            reasons |= SafetyReason.JOINT_POSITION
        if not (np.abs(state[self._velocity]) <= self._fastest).all():
            reasons |= SafetyReason.JOINT_VELOCITY
        return reasons | (self._tool_limits.check(state) if self._tool_limits else NO_REASON)

    def explain(self, state: Array) -> str:
        angles, speeds = state[self._position], np.abs(state[self._velocity])
        at_limit = zip(self._position, angles, self._low, self._high, strict=True)
        parts = [
            f"{self._labels[i]} is at {angle:.4f} rad; it must be between {low:.4f} and {high:.4f}"
            for i, angle, low, high in at_limit
            if not self._may_come_back and not low < angle < high
        ]
        parts += [
            f"{self._labels[i]} moves at {speed:.3f} rad/s; the limit is {fastest:.3f}"
            for i, speed, fastest in zip(self._velocity, speeds, self._fastest, strict=True)
            if not speed <= fastest
        ]
        return "; ".join(
            parts + ([self._tool_limits.explain(state)] if self._tool_limits and self._tool_limits.check(state) else [])
        )


class ToolStateLimits:
    """The tool's place and force in the last reading, for a robot whose action does not determine the tool's motion."""

    def __init__(self, spec: RobotSpec) -> None:
        limits = spec.limits
        self._tool = checked_indices(limits.tool_position, state_size(spec), "tool_position")
        self._low, self._high = workspace_box(spec)
        self._keep_out = limits.keep_out
        self._force = checked_indices(limits.tool_force, state_size(spec), "tool_force")
        self._force_max = np.inf if limits.tool_force_max is None else limits.tool_force_max

    def check(self, state: Array) -> SafetyReason:
        tool, force = state[self._tool], state[self._force]
        forbidden = any(((tool > box.low) & (tool < box.high)).all() for box in self._keep_out)
        inside = bool(((tool >= self._low) & (tool <= self._high)).all()) and not forbidden
        pressed = float(np.sqrt(force @ force)) > self._force_max
        return (NO_REASON if inside else SafetyReason.WORKSPACE) | (SafetyReason.FORCE if pressed else NO_REASON)

    def explain(self, state: Array) -> str:
        return f"the tool is at {np.round(state[self._tool], 4).tolist()} m, under {state[self._force].tolist()} N"


def _length(vector: Array) -> float:
    return math.sqrt(float(vector @ vector))


def _exceeds(value: Array, low: Array, high: Array, slack: float = 0.0) -> bool:
    """Whether an element is outside its interval by more than `slack`; a bound of NaN does not limit."""
    return bool(((value < low - slack) | (value > high + slack)).any())


def _neutral_action(spec: RobotSpec) -> Array:
    """The value of each element that keeps the robot at rest; NaN if it depends on the robot's position."""
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


def _require_axes(spec: RobotSpec, names: tuple[str, ...], axes: int, needed: str) -> None:
    """Raises SpecError for a limit on motion that no element of the action commands."""
    for name in names:
        if getattr(spec.limits, name) not in (None, ()) and not axes:
            raise SpecError(f"{spec.model}: {name} cannot be enforced without {needed}: remove it")


def _axis_limits(tool: float | None, tools: int, each: tuple[float, ...], joints: int, name: str) -> Array:
    """A limit of each axis; infinite without one. `joint_velocity_max` may be of measured speeds only."""
    of_tool = np.full(tools, np.inf if tool is None else tool)
    return np.concatenate([of_tool, checked_vector((each if joints else ()) or (np.inf,) * joints, joints, name)])
