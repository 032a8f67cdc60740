"""The limits on a robot's motion, as the safety kernel (`hal.safety`) applies them.

Limits on an action are intervals for each of its elements. Every interval holds the value that means *rest* (no step of
the tool, the joint's present angle), so they always intersect, and scaling a motion towards rest leaves none of them.
That is how limits on vectors are met: on the tool's speed, on entering a forbidden box, on pressing against something.
"""

from __future__ import annotations

import enum

import numpy as np

from hal.errors import SpecError
from hal.spec import STATE, Array, RobotSpec

_UNSET = np.nan  # an element without a neutral value, or never applied
_SKIN_M = 1e-6  # a way ends this far before a forbidden box, so that a step, rounded to float32, does not end in it
_ROUNDED_M = 2e-7  # a tool this deep in one is at its face: a position of up to 2 m, rounded to float32
LEAD_S = 0.5  # a joint's target may be so far ahead of the joint, at its greatest speed; two control periods at least


class Reason(enum.IntFlag):
    """Why the applied action differs from the proposed one; fits uint16. 0 where they are equal.

    SPEED is also said of a joint that does not keep up: its target may not run away from it.
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
    """The limits that are met by reducing an action, and the motion that they build upon."""

    def __init__(self, spec: RobotSpec) -> None:
        """Raises SpecError where the limits contradict the specs."""
        size, limits = len(spec.action.labels), spec.limits
        if spec.action.dtype != "float32":
            raise SpecError(f"{spec.model}: actions are float32; the spec says {spec.action.dtype}")
        self._shape = (size,)
        self._low: Array = np.array(spec.action.low, np.float32).astype(np.float64)
        self._high: Array = np.array(spec.action.high, np.float32).astype(np.float64)
        self._neutral = _neutral(spec)
        self._last: Array = self._neutral.copy()
        self._rate = _vector(limits.action_rate_max or (np.inf,) * size, size, "action_rate_max")
        self._speeds = _commanded_speeds(spec)
        self._motion = _Motion(spec, size)
        self._tool = ToolLimits(spec, size)
        self.needs_state = self._motion.needs_state or self._tool.needs_state
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

    def limit(self, proposed: Array, state: Array, share: float = 1.0) -> tuple[Array, Reason]:
        """The nearest action within all limits as float32, and which limits changed it.

        `share` in (0, 1] of the speed limits is allowed.
        """
        reasons = Reason.BOUND if _outside(proposed, self._low, self._high) else NO_REASON
        within = np.clip(proposed, self._low, self._high)
        low = np.fmin(self._last - self._rate, self._neutral)
        high = np.fmax(self._last + self._rate, self._neutral)
        if _outside(within, low, high):
            reasons |= Reason.RATE
            within = np.fmax(np.fmin(within, high), low)
        reasons |= self._slow_down(within, share)
        reasons |= self._motion.limit(within, self._last, state, share)
        reasons |= self._tool.limit(within, state, share)
        self._remember(within)
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
        """`applied` is what the hardware made of the last limited action, itself out of the bounds where a joint stands
        out of them and comes back."""
        if applied.shape == self._shape and np.isfinite(applied).all():
            low, high = np.fmin(self._low, self._last), np.fmax(self._high, self._last)
            self._remember(np.clip(applied.astype(np.float64), low, high))

    def _remember(self, within: Array) -> None:
        self._motion.remember(within)
        self._last = within

    def hold(self) -> None:
        """The robot was stopped: moving elements are at rest, the others stay where they were."""
        self._last = np.where(np.isnan(self._neutral), self._last, self._neutral)
        self._last[self._motion.targets] = _UNSET
        self._motion.rest()

    def forget(self) -> None:
        self._last = self._neutral.copy()
        self._motion.rest()


class _Motion:
    """How fast, and how abruptly faster, the moving elements may move: steps of tool or joints, and joint targets.

    A *step* is what an element moves in one control period: its value for a step, the way from the last target (at
    first, from the measured angle) for a joint target.
    """

    def __init__(self, spec: RobotSpec, size: int) -> None:
        limits, period_s = spec.limits, spec.period_s
        deltas = _indices(spec.tool_delta, size, "tool_delta")
        self.targets = _indices(spec.joint_target, size, "joint_target")
        self._angles = _indices(limits.joint_position, _state_size(spec), "joint_position")
        turns = _indices(spec.joint_target or spec.joint_delta, size, "joint_delta")
        joints = len(turns)
        if spec.joint_target and spec.joint_delta:
            raise SpecError(f"{spec.model}: an action moves its joints by joint_target or by joint_delta, not by both")
        if joints and joints != len(self._angles):
            raise SpecError(f"{spec.model}: the action moves {joints} joints, joint_position has {len(self._angles)}")
        self.needs_state = joints > 0
        self._moving: Array = np.concatenate([deltas, turns])
        self._first_joint = len(deltas)
        self._reach_low = _vector(limits.joint_low, joints, "joint_low") if joints else _EMPTY
        self._reach_high = _vector(limits.joint_high, joints, "joint_high") if joints else _EMPTY
        self._speed, self._acceleration, self._jerk = (
            np.concatenate([_each(tool, len(deltas)), _of_joints(values, joints, name)]) * period_s**order
            for order, tool, values, name in (
                (1, None, limits.joint_velocity_max if joints else (), "joint_velocity_max"),
                (2, limits.tool_acceleration_max, limits.joint_acceleration_max, "joint_acceleration_max"),
                (3, limits.tool_jerk_max, limits.joint_jerk_max, "joint_jerk_max"),
            )
        )
        self._lead = self._speed[self._first_joint :] * max(LEAD_S / period_s, 2.0)
        bounds = np.maximum(np.abs(spec.action.low), np.abs(spec.action.high))
        self._speed[: self._first_joint] = bounds[deltas]
        if not (self._speed > 0).all() or not (self._acceleration > 0).all() or not (self._jerk > 0).all():
            raise SpecError(f"{spec.model}: limits of speed, acceleration and jerk are above 0")
        self._base: Array = np.zeros(len(self._moving))
        self.rest()

    def rest(self) -> None:
        """The robot stands still."""
        self._step: Array = np.zeros(len(self._moving))
        self._change: Array = np.zeros(len(self._moving))
        self._earlier = self._step

    def limit(self, within: Array, last: Array, state: Array, share: float) -> Reason:
        """Reduces the moving elements of `within` in place."""
        if not len(self._moving):
            return NO_REASON
        self._earlier = self._step
        measured = angle = state[self._angles] if self.needs_state else _EMPTY
        if len(self.targets):
            target = last[self.targets]
            angle = self._base[self._first_joint :] = np.where(np.isnan(target), measured, target)
        wanted = within[self._moving] - self._base
        step, reasons = wanted, NO_REASON
        for reason, low, high in self._intervals(share, angle, measured):
            if _outside(step, low, high):
                reasons |= reason
                step = np.clip(step, low, high)
        changed = step != wanted
        within[self._moving[changed]] = (self._base + step)[changed]
        return reasons

    def _intervals(self, share: float, angle: Array, measured: Array) -> list[tuple[Reason, Array, Array]]:
        """For each limit, the steps that it allows from joints at `angle`; 0 is always among them.

        `measured` is where the joints are, which `angle` is not where they lag behind their targets.
        """
        fastest, goes_on = self._speed * share, self._step + self._change
        found = [
            (Reason.SPEED, -fastest, fastest),
            (
                Reason.ACCELERATION,
                np.minimum(self._step - self._acceleration, 0.0),
                np.maximum(self._step + self._acceleration, 0.0),
            ),
            (Reason.JERK, np.minimum(goes_on - self._jerk, 0.0), np.maximum(goes_on + self._jerk, 0.0)),
        ]
        if self.needs_state:  # a joint beyond its limit may come back, and not go farther
            low, high = np.full(len(self._moving), -np.inf), np.full(len(self._moving), np.inf)
            low[self._first_joint :] = np.minimum(self._reach_low - angle, 0.0)
            high[self._first_joint :] = np.maximum(self._reach_high - angle, 0.0)
            found.append((Reason.JOINT_POSITION, low, high))
        if len(self.targets):  # one that is held up is not pressed on; nor is its target drawn back by its giving way
            low, high = np.full(len(self._moving), -np.inf), np.full(len(self._moving), np.inf)
            low[self._first_joint :] = np.minimum(measured - self._lead - angle, 0.0)
            high[self._first_joint :] = np.maximum(measured + self._lead - angle, 0.0)
            found.append((Reason.SPEED, low, high))
        return found

    def remember(self, applied: Array) -> None:
        """`applied` is what became of the last limited action; said again, it replaces what was said before."""
        self._step = applied[self._moving] - self._base
        # Braking is free, and what follows builds up from there as from a constant speed.
        self._change = np.where(np.abs(self._step) > np.abs(self._earlier), self._step - self._earlier, 0.0)


class ToolLimits:
    """Where the tool may go, how fast, and against what force. The steps of the tool are scaled towards rest."""

    def __init__(self, spec: RobotSpec, size: int) -> None:
        limits, state = spec.limits, _state_size(spec)
        self._delta = _indices(spec.tool_delta, size, "tool_delta")
        self._tool = _indices(limits.tool_position, state, "tool_position")
        self._force = _indices(limits.tool_force, state, "tool_force")
        steps = len(self._delta) > 0
        if steps and len(self._tool) not in (0, len(self._delta)):
            raise SpecError(f"{spec.model}: tool_position and tool_delta differ in length")
        self._box_low, self._box_high = tool_box(spec)
        self._bars_low: Array = np.array([box.low for box in limits.keep_out], np.float64).reshape(-1, 3)
        self._bars_high: Array = np.array([box.high for box in limits.keep_out], np.float64).reshape(-1, 3)
        if len(self._bars_low) and len(self._tool) != 3:
            raise SpecError(f"{spec.model}: keep_out needs the three indices of the tool in tool_position")
        self._bars_low += _ROUNDED_M
        self._bars_high -= _ROUNDED_M
        if not (self._bars_low < self._bars_high).all():
            raise SpecError(f"{spec.model}: a keep_out box is empty")
        self._near_low, self._near_high = self._bars_low - _SKIN_M, self._bars_high + _SKIN_M
        if len(self._force) not in (0, 3) or (limits.tool_force_max is not None and len(self._force) != 3):
            raise SpecError(f"{spec.model}: tool_force_max needs three indices in tool_force")
        self._push = np.inf if limits.tool_force_max is None else limits.tool_force_max
        self._far = np.inf if limits.tool_speed_max is None else limits.tool_speed_max * spec.period_s
        if not (self._far > 0 and self._push > 0):
            raise SpecError(f"{spec.model}: limits of the tool's speed and force are above 0")
        self._presses = steps and len(self._force) == len(self._delta) and bool(np.isfinite(self._push))
        self._steps = steps
        self.needs_state = steps and (len(self._tool) > 0 or self._presses)

    def limit(self, within: Array, state: Array, share: float) -> Reason:
        """Reduces the steps of the tool in `within` in place."""
        if not self._steps:
            return NO_REASON
        wanted = within[self._delta]
        step, reasons = wanted, NO_REASON
        length = float(np.sqrt(step @ step))
        if length > self._far * share:
            step, reasons = step * (self._far * share / length), Reason.SPEED
        if len(self._tool):
            tool = state[self._tool]
            reachable = np.clip(step, np.fmin(self._box_low - tool, 0.0), np.fmax(self._box_high - tool, 0.0))
            if len(self._bars_low):
                reachable = reachable * self._free_share(tool, reachable)
            if (reachable != step).any():
                step, reasons = reachable, reasons | Reason.WORKSPACE
        if self._presses:
            force = state[self._force]
            if float(np.sqrt(force @ force)) > self._push and float(step @ force) < 0:
                step, reasons = np.zeros_like(step), reasons | Reason.FORCE
        if reasons:
            within[self._delta] = step
        return reasons

    def _free_share(self, tool: Array, step: Array) -> float:
        """The share of `step` that enters no forbidden box; out of one that the tool is in, it may only come out."""
        inside = ((tool > self._bars_low) & (tool < self._bars_high)).all(axis=1)
        if inside.any():
            low, high = self._bars_low[inside], self._bars_high[inside]
            return 1.0 if (_depth(tool + step, low, high) < _depth(tool, low, high)).all() else 0.0
        near = ((tool > self._near_low) & (tool < self._near_high)).all(axis=1, keepdims=True)  # it may slide along
        low = np.where(near, self._bars_low, self._near_low)
        high = np.where(near, self._bars_high, self._near_high)
        with np.errstate(divide="ignore", invalid="ignore"):
            one, other = (low - tool) / step, (high - tool) / step
        enters, leaves = np.fmin(one, other).max(axis=1), np.fmax(one, other).min(axis=1)
        hits = (enters < leaves) & (enters >= 0.0) & (enters <= 1.0)
        return float(enters[hits].min()) if hits.any() else 1.0


def _depth(point: Array, low: Array, high: Array) -> Array:
    """How deep `point` is in each box, m; negative outside."""
    depth: Array = np.minimum(point - low, high - point).min(axis=1)
    return depth


class StateLimits:
    """What no action can mend, seen in the last reading: joints out of range or too fast, a misplaced tool."""

    def __init__(self, spec: RobotSpec) -> None:
        """Raises SpecError where the limits contradict the specs."""
        limits, size = spec.limits, _state_size(spec)
        self._labels = spec.feature(STATE).labels if size else ()
        self._position = _indices(limits.joint_position, size, "joint_position")
        self._low = _vector(limits.joint_low, len(self._position), "joint_low")
        self._high = _vector(limits.joint_high, len(self._position), "joint_high")
        if not (self._low <= self._high).all():
            raise SpecError(f"{spec.model}: joint_low and joint_high are not in order: {self._low} to {self._high}")
        self._may_come_back = bool(spec.joint_target or spec.joint_delta)
        self._velocity = _indices(limits.joint_velocity, size, "joint_velocity")
        measured = limits.joint_velocity_max if limits.joint_velocity else ()
        self._fastest = _vector(measured, len(self._velocity), "joint_velocity_max")
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
        self._tool = _indices(limits.tool_position, _state_size(spec), "tool_position")
        self._low, self._high = tool_box(spec)
        self._keep_out = limits.keep_out
        self._force = _indices(limits.tool_force, _state_size(spec), "tool_force")
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


def _outside(value: Array, low: Array, high: Array) -> bool:
    """True where an element is out of its interval; a bound that is NaN is no bound."""
    return bool(((value < low) | (value > high)).any())


def _state_size(spec: RobotSpec) -> int:
    return next((len(s.labels) for s in spec.observation if s.name == STATE), 0)


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
    neutral = _vector(spec.neutral or (_UNSET,) * size, size, "neutral")
    if spec.gripper >= 0:
        _indices((spec.gripper,), size, "gripper")
        neutral[spec.gripper] = _UNSET
    neutral[_indices(spec.joint_target, size, "joint_target")] = _UNSET
    for element in _indices(spec.tool_delta + spec.joint_delta, size, "tool_delta or joint_delta"):
        if neutral[element] != 0.0 and not np.isnan(neutral[element]):
            raise SpecError(f"{spec.model}: element {element} is a step; its neutral value must be 0")
        neutral[element] = 0.0
    return neutral


def tool_box(spec: RobotSpec) -> tuple[Array, Array]:
    """The workspace's lowest and highest corner, m in the base frame; infinite where there is none."""
    limits, axes = spec.limits, len(spec.limits.tool_position)
    low = _vector(limits.workspace_low or (-np.inf,) * axes, axes, "workspace_low")
    high = _vector(limits.workspace_high or (np.inf,) * axes, axes, "workspace_high")
    if not (low <= high).all():
        raise SpecError(f"{spec.model}: the workspace is empty: {low.tolist()} to {high.tolist()}")
    return low, high


def _each(value: float | None, size: int) -> Array:
    return np.full(size, np.inf if value is None else value)


def _of_joints(values: tuple[float, ...], joints: int, name: str) -> Array:
    return _vector(values or (np.inf,) * joints, joints, name)


def _vector(values: tuple[float, ...], size: int, name: str) -> Array:
    if len(values) != size:
        raise SpecError(f"{name} has {len(values)} elements; it must have {size}")
    return np.array(values, dtype=np.float64)


def _indices(values: tuple[int, ...], size: int, name: str) -> Array:
    if not all(0 <= i < size for i in values):
        raise SpecError(f"{name} is {values}; the vector that it points into has {size} elements")
    return np.array(values, dtype=np.intp)
