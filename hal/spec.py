"""What a robot is, said before it is connected.

Specs are frozen, serialisable records. Feature names follow LeRobot's data sets (``observation.state``,
``observation.environment_state``, ``observation.images.<camera>``, ``action``, ``task``), so that recorded data needs
no translation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from hal.errors import SpecError

STATE = "observation.state"
ENVIRONMENT_STATE = "observation.environment_state"
IMAGES = "observation.images."
ACTION = "action"

Array = np.ndarray[Any, np.dtype[Any]]


class ArraySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One named vector.

    Attributes:
        name: feature name in LeRobot's style.
        labels: one label an element; its length is the vector's length.
        units: SI unit of each element, e.g. ``rad``, ``m``, ``m/s``; ``1`` where there is none.
        low, high: inclusive bounds of each element, in its unit.
        frame: coordinate frame the Cartesian elements are expressed in, e.g. ``base``.
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

    @property
    def shape(self) -> tuple[int]:
        return (len(self.labels),)

    def validate(self, value: Array) -> Array:
        """Returns `value` unchanged.

        Raises:
            SpecError: wrong shape or dtype, or an element that is not finite. Bounds are the safety kernel's business.
        """
        if value.shape != self.shape:
            raise SpecError(f"{self.name} has shape {value.shape}; the spec says {self.shape}")
        if value.dtype != np.dtype(self.dtype):
            raise SpecError(f"{self.name} has dtype {value.dtype}; the spec says {self.dtype}")
        if not np.isfinite(value).all():
            raise SpecError(f"{self.name} holds values that are not finite: {value.tolist()}")
        return value


class CameraSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One camera: frames are uint8 arrays of shape (height, width, 3), RGB, at `rate_hz`."""

    name: str
    height: int
    width: int
    rate_hz: float

    def __post_init__(self) -> None:
        if not (self.height > 0 and self.width > 0 and 0 < self.rate_hz < math.inf):
            raise SpecError(f"camera {self.name}: {self.width}x{self.height} pixels at {self.rate_hz:g} Hz are none")

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
    """What the safety kernel enforces on a Cartesian or joint action, besides the action spec's own bounds.

    Attributes:
        workspace_low, workspace_high: box for the tool centre point, metres in the base frame; empty where unknown.
        keep_out: boxes that the tool centre point may not enter.
        tool_position: indices of the tool's x, y, z in ``observation.state``; empty where it has none.
        tool_speed_max: limit of the tool's commanded speed (Euclidean norm), m/s.
        tool_acceleration_max, tool_jerk_max: limits of the tool's commanded motion along each axis, m/s^2 and m/s^3.
        tool_force: indices of the force that the surroundings exert on the tool, x, y, z in the base frame, in
            ``observation.state``; empty where it is not measured.
        tool_force_max: limit of that force (Euclidean norm), N. While it is exceeded, no axis of the tool moves
            against the force; so it rises above the limit by at most what one period's step adds.
        joint_position: indices of the joint angles in ``observation.state``.
        joint_low, joint_high: joint limits, rad.
        joint_velocity: indices of the joint velocities in ``observation.state``; empty where it has none.
        joint_velocity_max: limit of each joint's speed, rad/s: of the measured one where there is `joint_velocity`, and
            of the commanded one where the action has `RobotSpec.joint_target` or `joint_delta`.
        joint_acceleration_max, joint_jerk_max: limits of each joint's commanded motion, rad/s^2 and rad/s^3; empty for
            none, and only with `RobotSpec.joint_target` or `joint_delta`.
        action_rate_max: the largest change of each action element between two control periods, in its own unit. Of a
            step it is one more limit of acceleration, of a joint target one of speed.
        reduced_speed: share of the commanded speed that is allowed while a person teleoperates or is near, in (0, 1];
            of the bounds of an action element too that is a speed by its unit.
        stale_after_s: an observation older than this is not acted upon.
        watchdog_periods: control periods from a command until the robot holds where no other follows; at least 2.
        safe_stop_after_s: seconds of holding before the robot's documented safe stop.

    Limits of acceleration and jerk hold while an axis speeds up and while it brakes. Those of place go before them, see
    `hal.motion_limits`. A stop is not limited by them.
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
    """Everything that a policy, a store or a console needs to know about a robot.

    Attributes:
        tool_delta: action elements that move the tool by a Cartesian step (x, y, z), m.
        joint_delta: action elements that move the joints by a step, rad, in the order of ``limits.joint_position``. A
            driver that adds steps up does not let the sum run away from a joint that is held up, and reports what it
            cut off: from where a step counts is its own knowledge.
        joint_target: action elements that are the joint angles to be reached at the end of the control period, in that
            order; rad, or the unit that the action spec states, the limits on joints alike. The safety kernel keeps
            them within half a second's motion of where the joints are measured. Excludes `joint_delta`.
        gripper: index of the action's gripper element; -1 where there is none.
        neutral: the action that keeps the robot where it is. What it says of the gripper is left to the caller; what
            it says of joint targets has no meaning, see `rest_action`.
        safe_stop: in words, what the robot does in its safe stop.
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
            raise SpecError(f"{self.model}: a control rate of {self.rate_hz:g} Hz is none")

    @property
    def period_s(self) -> float:
        return 1.0 / self.rate_hz

    @property
    def embodiment(self) -> str:
        """Fingerprint of the specs: 16 hex digits that are equal exactly where the specs are."""
        return hashlib.blake2b(msgspec.json.encode(self, order="deterministic"), digest_size=8).hexdigest()

    def rest_action(self, observation: Mapping[str, Array]) -> Array:
        """The action that keeps the robot where `observation` has it: float32, the action's shape, the caller's own.

        Raises:
            SpecError: the spec names no neutral action.
        """
        if len(self.neutral) != len(self.action.labels):
            raise SpecError(f"{self.model}: the spec has no neutral action")
        action: Array = np.array(self.neutral, np.float32)
        if self.joint_target:
            action[list(self.joint_target)] = observation[STATE][list(self.limits.joint_position)]
        return action

    def feature(self, name: str) -> ArraySpec:
        """The observation spec called `name`; raises SpecError and lists the names there are."""
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
