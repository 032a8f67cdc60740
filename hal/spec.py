"""What a robot is, said before it is connected.

Specs are frozen, serialisable records. Feature names follow LeRobot's data sets (``observation.state``,
``observation.environment_state``, ``observation.images.<camera>``, ``action``, ``task``), so that recorded data needs
no translation.
"""

from __future__ import annotations

import hashlib
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

    @property
    def feature(self) -> str:
        return IMAGES + self.name

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.height, self.width, 3)


class SafetyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the safety kernel enforces on a Cartesian or joint action, besides the action spec's own bounds.

    Attributes:
        workspace_low, workspace_high: box for the tool centre point, metres in the base frame; empty where unknown.
        tool_position: indices of the tool's x, y, z in ``observation.state``; empty where it has none.
        joint_position: indices of the joint angles in ``observation.state``.
        joint_low, joint_high: joint limits, rad.
        joint_velocity: indices of the joint velocities in ``observation.state``; empty where it has none.
        joint_velocity_max: limit of each joint's speed, rad/s.
        action_rate_max: the largest change of each action element between two control periods, in its own unit. Going
            back towards the neutral action is not limited: a robot may always brake.
        stale_after_s: an observation older than this is not acted upon.
        watchdog_periods: control periods without a command before the robot holds.
        safe_stop_after_s: seconds of holding before the robot's documented safe stop.
    """

    workspace_low: tuple[float, ...] = ()
    workspace_high: tuple[float, ...] = ()
    tool_position: tuple[int, ...] = ()
    joint_position: tuple[int, ...] = ()
    joint_low: tuple[float, ...] = ()
    joint_high: tuple[float, ...] = ()
    joint_velocity: tuple[int, ...] = ()
    joint_velocity_max: tuple[float, ...] = ()
    action_rate_max: tuple[float, ...] = ()
    stale_after_s: float = 0.5
    watchdog_periods: int = 2
    safe_stop_after_s: float = 5.0


class RobotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a policy, a store or a console needs to know about a robot.

    `tool_delta` names the action elements that move the tool by a Cartesian step (x, y, z) and `neutral` is the action
    that keeps the robot where it is, with the gripper element (index `gripper`, -1 where there is none) left to the
    caller. `safe_stop` says in words what the robot does in its safe stop.
    """

    model: str
    rate_hz: float
    observation: tuple[ArraySpec, ...]
    action: ArraySpec
    cameras: tuple[CameraSpec, ...] = ()
    limits: SafetyLimits = SafetyLimits()
    neutral: tuple[float, ...] = ()
    tool_delta: tuple[int, ...] = ()
    gripper: int = -1
    safe_stop: str = "holds its position"

    @property
    def period_s(self) -> float:
        return 1.0 / self.rate_hz

    @property
    def embodiment(self) -> str:
        """Fingerprint of the specs: 16 hex digits that are equal exactly where the specs are."""
        return hashlib.blake2b(msgspec.json.encode(self, order="deterministic"), digest_size=8).hexdigest()

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
