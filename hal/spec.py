"""The spec of a robot: its observations, actions, cameras and limits, known before it is connected.

Specs are frozen, serialisable records. Feature names follow LeRobot's data sets (``observation.state``,
``observation.environment_state``, ``observation.images.<camera>``, ``action``, ``task``), so that recorded data needs
no translation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Self

import msgspec
import numpy as np

from hal.errors import SpecError

STATE = "observation.state"
ENVIRONMENT_STATE = "observation.environment_state"
IMAGES = "observation.images."
ACTION = "action"

ANGLE_UNITS = ("rad", "rad/s")

Array = np.ndarray[Any, np.dtype[Any]]


class ArraySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One named vector.

    Attributes:
        name: feature name in LeRobot's style.
        labels: one label for each element; their number is the vector's length.
        units: SI unit of each element, e.g. ``rad``, ``m``, ``m/s``; ``1`` for a dimensionless element.
        low, high: inclusive bounds of each element, in its unit.
        frame: coordinate frame of the Cartesian elements, e.g. ``base``.
        dtype: numpy dtype name.
    """

    name: str
    labels: tuple[str, ...]
    units: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    frame: str = "base"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        sizes = {len(self.labels), len(self.units), len(self.low), len(self.high)}
        if len(sizes) != 1:
            raise SpecError(f"{self.name}: labels, units, low and high differ in length: {sorted(sizes)}")
        if not all(a <= b for a, b in zip(self.low, self.high, strict=True)):
            raise SpecError(f"{self.name}: a lower bound exceeds its upper bound")

    @classmethod
    def from_rows(cls, name: str, rows: Iterable[tuple[str, str, float, float]], frame: str = "base") -> Self:
        """The spec of a float32 vector with an element for each row: label, unit, low and high."""
        labels, units, low, high = zip(*rows, strict=True) if (rows := tuple(rows)) else ((),) * 4
        return cls(name=name, labels=labels, units=units, low=low, high=high, frame=frame)

    @property
    def shape(self) -> tuple[int]:
        return (len(self.labels),)

    def validate(self, value: Array) -> Array:
        """Returns `value` unchanged.

        Raises:
            SpecError: wrong shape or dtype, or an element that is not finite. The safety kernel checks bounds.
        """
        if value.shape != self.shape:
            raise SpecError(f"{self.name} has shape {value.shape}; the spec requires {self.shape}")
        if value.dtype != np.dtype(self.dtype):
            raise SpecError(f"{self.name} has dtype {value.dtype}; the spec requires {self.dtype}")
        if (found := self.find_not_finite(value)) is not None:
            raise SpecError(f"{self.name}: {found}, which is not finite")
        return value

    def find_not_finite(self, value: Array) -> str | None:
        """The first element of `value`, (n,), that is not finite, such as ``tool.x is nan``; None if there is none."""
        if np.isfinite(value).all():
            return None
        element = int(np.flatnonzero(~np.isfinite(value))[0])
        return f"{self.labels[element]} is {value[element]}"

    @property
    def degrees_per_unit(self) -> Array:
        """Of each element: 180 / pi if its unit is rad or rad/s, else 1; float64 (n,)."""
        return np.array([180 / math.pi if unit in ANGLE_UNITS else 1.0 for unit in self.units])

    def find_far_angle(self, lowest: Array, highest: Array) -> str | None:
        """The first angle whose values, from `lowest` to `highest`, (n,) each, go over a full turn beyond its bounds.

        It is named such as ``pan is -60, and its bound -3.14159 rad``; None if there is none. It may be in degrees.
        """
        for index in np.flatnonzero(self.degrees_per_unit != 1.0).tolist():
            least, most = self.low[index], self.high[index]
            for value, bound in ((float(lowest[index]), least), (float(highest[index]), most)):
                if max(least - value, value - most) > 2 * math.pi:
                    return f"{self.labels[index]} is {value:g}, and its bound {bound:g} {self.units[index]}"
        return None


class CameraSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One camera: frames are uint8 arrays of shape (height, width, 3), RGB, at `rate_hz`."""

    name: str
    height: int
    width: int
    rate_hz: float

    def __post_init__(self) -> None:
        if not (self.height > 0 and self.width > 0 and 0 < self.rate_hz < math.inf):
            size = f"{self.width}x{self.height} pixels at {self.rate_hz:g} Hz"
            raise SpecError(f"camera {self.name} has {size}: give a size and a rate above 0")

    @property
    def feature(self) -> str:
        return IMAGES + self.name

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.height, self.width, 3)


class Box(msgspec.Struct, frozen=True):
    """An axis-aligned box in the base frame, m."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]


class SafetyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that the safety kernel enforces on a Cartesian or joint action, besides the action spec's own bounds.

    Attributes:
        workspace_low, workspace_high: box for the tool centre point, metres in the base frame; empty if unknown.
        keep_out: boxes that the tool centre point may not enter.
        tool_position: indices of the tool's x, y, z in ``observation.state``; empty without a tool.
        tool_speed_max: limit of the tool's commanded speed (Euclidean norm), m/s.
        tool_acceleration_max, tool_jerk_max: limits of the tool's commanded motion along each axis, m/s^2 and m/s^3.
        tool_force: indices of the external force on the tool, x, y, z in the base frame, in ``observation.state``;
            empty if it is not measured.
        tool_force_max: limit of that force (Euclidean norm), N. Above it, no axis of the tool moves against the force.
            One period's step can raise the force above the limit. A driver that integrates steps then moves its target
            back to the tool on these axes.
        joint_position: indices of the joint angles in ``observation.state``.
        joint_low, joint_high: joint limits, rad.
        joint_velocity: indices of the joint velocities in ``observation.state``; empty if they are not measured.
        joint_velocity_max: limit of each joint's speed, rad/s: of the measured speed if `joint_velocity` is set, and of
            the commanded speed if the action has `RobotSpec.joint_target`, which needs it, or `joint_delta`.
        joint_acceleration_max, joint_jerk_max: limits of each joint's commanded motion, rad/s^2 and rad/s^3; empty for
            none, and only with `RobotSpec.joint_target` or `joint_delta`.
        action_rate_max: the largest change of each action element between two control periods, in its own unit. For a
            step it also limits the acceleration, for a joint target the speed.
        reduced_speed: allowed share in (0, 1] of the commanded speed while a person teleoperates or is near. It also
            scales the bounds of action elements whose unit is a speed.
        stale_after_s: the kernel refuses to act on an observation older than this.
        watchdog_periods: control periods from a command to a hold, if no other command follows; at least 2.
        safe_stop_after_s: seconds of holding before the robot's documented safe stop.

    Limits of acceleration and jerk apply while an axis speeds up and while it brakes. Limits of place take precedence,
    see `hal.motion_limits`. A stop is not limited.
    """

    workspace_low: tuple[float, ...] = ()
    workspace_high: tuple[float, ...] = ()
    keep_out: tuple[Box, ...] = ()
    tool_position: tuple[int, ...] = ()
    tool_speed_max: float | None = None
    tool_acceleration_max: float | None = None
    tool_jerk_max: float | None = None
    tool_force: tuple[int, ...] = ()
    tool_force_max: float | None = None
    joint_position: tuple[int, ...] = ()
    joint_low: tuple[float, ...] = ()
    joint_high: tuple[float, ...] = ()
    joint_velocity: tuple[int, ...] = ()
    joint_velocity_max: tuple[float, ...] = ()
    joint_acceleration_max: tuple[float, ...] = ()
    joint_jerk_max: tuple[float, ...] = ()
    action_rate_max: tuple[float, ...] = ()
    reduced_speed: float = 1.0
    stale_after_s: float = 0.5
    watchdog_periods: int = 2
    safe_stop_after_s: float = 5.0


class RobotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a robot for policies, the store and the console.

    Attributes:
        tool_delta: action elements that move the tool by a Cartesian step (x, y, z), m.
        joint_delta: action elements that move the joints by a step, rad, in the order of ``limits.joint_position``. A
            driver that integrates steps keeps the sum close to a blocked joint and reports the part that it cut off.
        joint_target: action elements that are the joint angles at the end of the control period, in that order; in
            rad, or in the unit of the action spec and of the joint limits. The safety kernel keeps them within half a
            second's motion of the measured joints. Excludes `joint_delta`.
        gripper: index of the action's gripper element; -1 without a gripper.
        neutral: the action that does not move the robot. Its gripper element is the caller's choice; its joint targets
            have no meaning, see `rest_action`.
        safe_stop: for people: the robot's behaviour in its safe stop.
    """

    model: str
    rate_hz: float
    observation: tuple[ArraySpec, ...]
    action: ArraySpec
    cameras: tuple[CameraSpec, ...] = ()
    limits: SafetyLimits = SafetyLimits()
    neutral: tuple[float, ...] = ()
    tool_delta: tuple[int, ...] = ()
    joint_delta: tuple[int, ...] = ()
    joint_target: tuple[int, ...] = ()
    gripper: int = -1
    safe_stop: str = "holds its position"

    def __post_init__(self) -> None:
        if not 0 < self.rate_hz < math.inf:
            raise SpecError(f"{self.model} has a control rate of {self.rate_hz:g} Hz: give a rate above 0")

    @property
    def period_s(self) -> float:
        return 1.0 / self.rate_hz

    @property
    def embodiment(self) -> str:
        """Fingerprint of what a policy depends on: 16 hex digits that are equal exactly if the specs are equal apart
        from `limits` and `safe_stop`, which a person may change while a policy is trained.
        """
        return msgspec.structs.replace(self, limits=SafetyLimits(), safe_stop="").fingerprint

    @property
    def fingerprint(self) -> str:
        """Of the whole spec: 16 hex digits that are equal exactly if the specs are equal."""
        same = msgspec.convert(msgspec.to_builtins(self), RobotSpec)  # a driver may give 50 where others read 50.0
        return hashlib.blake2b(msgspec.json.encode(same, order="deterministic"), digest_size=8).hexdigest()

    def rest_action(self, observation: Mapping[str, Array]) -> Array:
        """The action that keeps the robot at `observation`: a new float32 array with the action's shape.

        Raises:
            SpecError: the spec has no neutral action.
        """
        if len(self.neutral) != len(self.action.labels):
            raise SpecError(f"{self.model}: the spec has no neutral action")
        action: Array = np.array(self.neutral, np.float32)
        if self.joint_target:
            action[list(self.joint_target)] = observation[STATE][list(self.limits.joint_position)]
        return action

    def feature(self, name: str) -> ArraySpec:
        """The observation spec called `name`; raises SpecError with the known names."""
        for spec in self.observation:
            if spec.name == name:
                return spec
        raise SpecError(f"no observation {name!r}; {self.model} has {[s.name for s in self.observation]}")

    def validate(self, arrays: Mapping[str, Array]) -> None:
        """Raises SpecError unless every observation of the spec is in `arrays` and fits."""
        for spec in self.observation:
            if spec.name not in arrays:
                raise SpecError(f"observation {spec.name!r} is missing; got {sorted(arrays)}")
            spec.validate(arrays[spec.name])
