"""What policies share: which observations they read, how values are scaled, and how they explore before any weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Literal

import numpy as np

from hal.errors import SpecError
from hal.spec import Array, ArraySpec, CameraSpec, RobotSpec
from user_sys.errors import ConfigError
from user_sys.policies.policy import AGE_SUFFIX, ActionChunk, require_order

Gripper = Literal["continuous", "discrete"]
LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0  # of a Gaussian over actions in [-1, 1], before squashing
EXPLORATION_CORRELATION = 0.7
"""Correlation of an untrained policy's actions from step to step: white noise would not move the robot."""
MAX_SHARE = 1 - 1e-6  # of an action's bound: a Gaussian reaches the bound at infinity
_NORMAL = NormalDist()


def encoded_feature(camera: str) -> str:
    """Returns the name under which a batch has the encoded pictures of `camera`, float32 (n, k)."""
    return f"observation.encoded.{camera}"


def bounds_affine(specs: Sequence[ArraySpec]) -> tuple[Array, Array]:
    """Returns (offset, scale) that map the concatenated `specs` from their bounds to [-1, 1].

    An element without finite bounds, or with equal bounds, gets offset 0 and scale 1. Both are empty without `specs`.
    """
    low = np.array([bound for spec in specs for bound in spec.low], np.float64)
    high = np.array([bound for spec in specs for bound in spec.high], np.float64)
    usable = np.isfinite(low) & np.isfinite(high) & (high > low)
    centre = np.where(usable, 0.5 * (np.where(usable, low, 0.0) + np.where(usable, high, 0.0)), 0.0)
    half = np.where(usable, 0.5 * (np.where(usable, high, 1.0) - np.where(usable, low, -1.0)), 1.0)
    return centre.astype(np.float32), (1.0 / half).astype(np.float32)


def action_affine(spec: ArraySpec) -> tuple[Array, Array]:
    """Returns (centre, scale) that map [-1, 1] to the bounds of the action `spec`; scale 1 where they are equal.

    Raises:
        SpecError: a bound is not finite; a squashed policy cannot cover it.
    """
    low, high = np.asarray(spec.low, np.float32), np.asarray(spec.high, np.float32)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise SpecError(f"{spec.name}: a squashed policy needs finite bounds, got {spec.low} to {spec.high}")
    return (low + high) / 2, np.where(high > low, (high - low) / 2, np.float32(1.0))


def discrete_gripper(spec: RobotSpec, gripper: Gripper) -> int:
    """Returns the index of the action's discrete gripper element; -1 if it is continuous.

    Raises ConfigError: the robot has no gripper.
    """
    if gripper == "discrete" and spec.gripper < 0:
        raise ConfigError(f"policy.options.gripper is discrete, and the action of {spec.model} has no gripper")
    return spec.gripper if gripper == "discrete" else -1


def feature_specs(spec: RobotSpec, features: Sequence[str] = ()) -> tuple[ArraySpec, ...]:
    """Returns the observations that a policy reads: `features`, or all vectors of the robot.

    Raises SpecError: the robot lacks one of `features`, or has them in another order.
    """
    chosen = tuple(spec.feature(name) for name in features)
    require_order("policy.features", features, [each.name for each in spec.observation])
    return chosen or spec.observation


def require_vectors(spec: RobotSpec, features: Sequence[str], reader: str, instead: str) -> None:
    """Raises SpecError: the robot has only pictures, and `reader` reads no picture; `instead` says what to change."""
    if not feature_specs(spec, features):
        raise SpecError(f"{reader} reads vectors, and {spec.model} has only pictures: {instead}")


def camera_specs(spec: RobotSpec, cameras: Sequence[str]) -> tuple[CameraSpec, ...]:
    """Returns the specs of `cameras`, in order."""
    by_name = {camera.name: camera for camera in spec.cameras}
    return tuple(by_name[name] for name in cameras)


def require_features(specs: Sequence[ArraySpec], observation: Mapping[str, Array]) -> None:
    """Raises SpecError if one of `specs` is missing in the observation, or has another shape or dtype there."""
    for spec in specs:
        if spec.name not in observation:
            raise SpecError(f"the policy reads {spec.name!r}; the observation has {sorted(observation)}")
        if observation[spec.name].shape != spec.shape:
            raise SpecError(f"{spec.name} has shape {observation[spec.name].shape}; the spec says {spec.shape}")
        if observation[spec.name].dtype != np.dtype(spec.dtype):
            raise SpecError(f"{spec.name} has dtype {observation[spec.name].dtype}; the spec says {spec.dtype}")


def require_pictures(cameras: Sequence[CameraSpec], observation: Mapping[str, Array]) -> None:
    """Raises SpecError if a camera's picture is missing in the observation, or is not uint8 of the spec's shape.

    The picture's age may be missing, and is float32 (1,).
    """
    for camera in cameras:
        if (picture := observation.get(camera.feature)) is None:
            raise SpecError(f"the policy reads {camera.feature!r}; the observation has {sorted(observation)}")
        if picture.shape != camera.shape or picture.dtype != np.uint8:
            raise SpecError(
                f"{camera.feature} is {picture.dtype} of shape {picture.shape}; the spec says uint8 of {camera.shape}"
            )
        age = observation.get(camera.feature + AGE_SUFFIX)
        if age is not None and (age.shape != (1,) or age.dtype != np.float32):
            raise SpecError(f"{camera.feature}{AGE_SUFFIX} is {age.dtype} of shape {age.shape}; it needs float32 (1,)")


class ActionBounds:
    """The finite bounds of an action, float32 (a,).

    Attributes:
        centre, half: map an action in [-1, 1] to its units: ``centre + half * scaled``.
    """

    def __init__(self, spec: ArraySpec) -> None:
        """Raises SpecError if a bound is not finite."""
        self.centre, self.half = action_affine(spec)
        self._low, self._high = (np.asarray(bound, np.float32) for bound in (spec.low, spec.high))

    def chunk(self, actions: Array, log_prob: Array | float, execute: int = 0) -> ActionChunk:
        """Returns the chunk of `actions`, (H, a) in the spec's units, whose log density is `log_prob`, (H,) or one.

        `execute`: see `ActionChunk`.
        """
        within = np.clip(actions, self._low, self._high).astype(np.float32)  # rounding may exceed a bound
        return ActionChunk(within, np.broadcast_to(np.asarray(log_prob, np.float32), len(within)).copy(), execute)


class RandomExploration:
    """Acts before the first weights: uniformly within the action bounds, smoothly over time."""

    def __init__(self, bounds: ActionBounds, rng: np.random.Generator) -> None:
        self._bounds, self._rng = bounds, rng
        self._walk = rng.standard_normal(bounds.centre.size)

    def resume(self, action: Array) -> None:
        """The walk goes on from `action`, (a,), of one of the robots that use it."""
        share = np.clip((action - self._bounds.centre) / self._bounds.half, -MAX_SHARE, MAX_SHARE)
        self._walk = np.array([_NORMAL.inv_cdf((1 + each) / 2) for each in share.tolist()])

    def act(
        self, deterministic: bool, length: int = 1, promised: Sequence[Array] = (), execute: int = 0
    ) -> ActionChunk:
        """Returns a chunk of `length` actions: the next ones of the walk, or the centre of the bounds.

        Args:
            promised: float32 (a,) each, actions with which the chunk begins; see `resume`.
            execute: see `ActionChunk`.
        """
        scaled = np.zeros((max(0, length - len(promised)), self._walk.size))
        for row in () if deterministic else scaled:
            # A stationary Gaussian walk, mapped through its own distribution function, is uniform at every step.
            fresh = self._rng.standard_normal(self._walk.size)
            self._walk = EXPLORATION_CORRELATION * self._walk + np.sqrt(1 - EXPLORATION_CORRELATION**2) * fresh
            row[:] = [2 * _NORMAL.cdf(each) - 1 for each in self._walk.tolist()]
        actions = [*promised, *(self._bounds.centre + self._bounds.half * scaled)]
        return self._bounds.chunk(np.array(actions[:length]), np.nan, execute)
