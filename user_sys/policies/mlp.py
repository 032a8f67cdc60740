"""A squashed Gaussian policy as a small multilayer perceptron, in plain numpy.

numpy is faster than torch for one observation of a few dozen numbers, and a robot's computer needs no torch. The
learner has the same network in torch, `user_sys.algorithms.rlpd.actor_forward`; a test compares the two.

Weights (all float32; `n` inputs, `a` action elements, layers numbered from 0)::

    input.offset (n,)   input.scale (n,)      x = clip((concatenated features - offset) * scale, +-INPUT_CLIP)
    hidden.<i>.weight (in, out)   .bias (out,)      x = relu(x @ weight + bias)
    mean.weight (h, a)  .bias (a,)   log_std.weight (h, a)  .bias (a,)      u ~ N(mean, exp(clip(log_std))^2)
    action.centre (a,)  action.scale (a,)     action = centre + scale * tanh(u)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hal.errors import SpecError
from hal.spec import Array, ArraySpec, RobotSpec
from user_sys.errors import WireError
from user_sys.policies.policy import ActionChunk, Policy

INPUT_CLIP = 5.0
LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0
EXPLORATION_CORRELATION = 0.7
"""Correlation of an untrained policy's actions from step to step: white noise would not move the robot."""


def bounds_affine(specs: Sequence[ArraySpec]) -> tuple[Array, Array]:
    """Returns (offset, scale) that map the concatenated `specs` from their bounds to [-1, 1].

    An element without finite bounds, or with equal bounds, gets offset 0 and scale 1.
    """
    low = np.concatenate([np.asarray(s.low, np.float64) for s in specs])
    high = np.concatenate([np.asarray(s.high, np.float64) for s in specs])
    usable = np.isfinite(low) & np.isfinite(high) & (high > low)
    centre = np.where(usable, 0.5 * (np.where(usable, low, 0.0) + np.where(usable, high, 0.0)), 0.0)
    half = np.where(usable, 0.5 * (np.where(usable, high, 1.0) - np.where(usable, low, -1.0)), 1.0)
    return centre.astype(np.float32), (1.0 / half).astype(np.float32)


def action_affine(spec: ArraySpec) -> tuple[Array, Array]:
    """Returns (centre, scale) that map [-1, 1] to the bounds of the action `spec`.

    Raises:
        SpecError: a bound is not finite; a squashed policy cannot cover it.
    """
    low, high = np.asarray(spec.low, np.float32), np.asarray(spec.high, np.float32)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise SpecError(f"{spec.name}: a squashed policy needs finite bounds, got {spec.low} to {spec.high}")
    return (low + high) / 2, (high - low) / 2


def feature_specs(spec: RobotSpec, features: Sequence[str] = ()) -> tuple[ArraySpec, ...]:
    """Returns the observations that a policy reads, in order: `features`, or all vectors of the robot."""
    return tuple(spec.feature(name) for name in features) if features else spec.observation


def require_features(specs: Sequence[ArraySpec], observation: Mapping[str, Array]) -> None:
    """Raises SpecError if one of `specs` is missing in the observation or has another shape there."""
    for spec in specs:
        if spec.name not in observation:
            raise SpecError(f"the policy reads {spec.name!r}; the observation has {sorted(observation)}")
        if observation[spec.name].shape != spec.shape:
            raise SpecError(f"{spec.name} has shape {observation[spec.name].shape}; the spec says {spec.shape}")


class MlpPolicy(Policy):
    """Draws actions. Until the first `load` it explores uniformly within the action bounds, smoothly over time."""

    precisions = ("exact", "bf16", "int8")

    def __init__(self, spec: RobotSpec, *, features: Sequence[str] = (), seed: int = 0) -> None:
        """Builds a policy for `spec` that reads `features` (default: all vectors) and draws with `seed`."""
        self._specs = feature_specs(spec, features)
        self._inputs = sum(len(s.labels) for s in self._specs)
        self._centre, self._scale = action_affine(spec.action)
        self._low, self._high = (np.asarray(b, np.float32) for b in (spec.action.low, spec.action.high))
        self._rng = np.random.default_rng(seed)
        self._wander = self._rng.standard_normal(self._centre.size)
        self._weights: dict[str, Array] | None = None
        self._hidden: list[tuple[Array, Array]] = []

    def act(self, observation: Mapping[str, Array], sentence: str, *, deterministic: bool) -> ActionChunk:
        """See `Policy.act`; the chunk has one action. Takes some tens of microseconds."""
        x = self._concatenate(observation)
        if self._weights is None:
            return self._explore(deterministic)
        mean, log_std = self._gaussian(x)
        noise = np.zeros_like(mean) if deterministic else self._rng.standard_normal(mean.size, np.float32)
        squashed = np.tanh(mean + np.exp(log_std) * noise)
        log_prob = np.nan if deterministic else squashed_log_prob(noise, log_std, squashed)
        return self._chunk(self._weights["action.centre"] + self._weights["action.scale"] * squashed, log_prob)

    def load(self, weights: Mapping[str, Array]) -> None:
        """See `Policy.load`; the arrays are copied."""
        copied = {name: np.array(value, np.float32) for name, value in weights.items()}
        hidden = _checked_layers(copied, self._inputs, self._centre.size)
        self._weights, self._hidden = copied, hidden

    def _concatenate(self, observation: Mapping[str, Array]) -> Array:
        require_features(self._specs, observation)
        return np.concatenate([observation[spec.name] for spec in self._specs])

    def _gaussian(self, x: Array) -> tuple[Array, Array]:
        assert self._weights is not None
        w = self._weights
        x = np.clip((x - w["input.offset"]) * w["input.scale"], -INPUT_CLIP, INPUT_CLIP)
        for weight, bias in self._hidden:
            x = np.maximum(x @ weight + bias, 0.0)
        log_std = np.clip(x @ w["log_std.weight"] + w["log_std.bias"], LOG_STD_MIN, LOG_STD_MAX)
        return x @ w["mean.weight"] + w["mean.bias"], log_std

    def _explore(self, deterministic: bool) -> ActionChunk:
        if deterministic:
            return self._chunk(self._centre, np.nan)
        # A stationary Gaussian walk, mapped through its own distribution function, is uniform at every step.
        fresh = self._rng.standard_normal(self._centre.size)
        self._wander = EXPLORATION_CORRELATION * self._wander + np.sqrt(1 - EXPLORATION_CORRELATION**2) * fresh
        return self._chunk(self._centre + self._scale * _gaussian_to_uniform(self._wander), np.nan)

    def _chunk(self, action: Array, log_prob: float) -> ActionChunk:
        within = np.clip(action, self._low, self._high).astype(np.float32)  # rounding may exceed a bound
        return ActionChunk(within[None], np.array([log_prob], np.float32))


def squashed_log_prob(noise: Array, log_std: Array, squashed: Array) -> float:
    """Returns the log density of ``squashed = tanh(mean + exp(log_std) * noise)`` (Haarnoja et al. 2018, appendix
    C).
    """
    gaussian = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    return float(np.sum(gaussian - np.log1p(1e-6 - squashed**2)))


def _gaussian_to_uniform(z: Array) -> Array:
    """Maps standard normal `z` to uniform in [-1, 1]; the error function by Abramowitz and Stegun 7.1.26 (1.5e-7)."""
    x = np.abs(z) / np.sqrt(2.0)
    t = 1.0 / (1.0 + 0.3275911 * x)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.asarray(np.sign(z) * (1.0 - poly * np.exp(-x * x)))


def _checked_layers(weights: Mapping[str, Array], inputs: int, actions: int) -> list[tuple[Array, Array]]:
    depth = sum(1 for name in weights if name.startswith("hidden.") and name.endswith(".weight"))
    width = inputs
    expected: dict[str, tuple[int, ...]] = {"input.offset": (inputs,), "input.scale": (inputs,)}
    for i in range(depth):
        out = weights[f"hidden.{i}.weight"].shape[-1:] if f"hidden.{i}.weight" in weights else ()
        expected |= {f"hidden.{i}.weight": (width, *out), f"hidden.{i}.bias": out}
        width = out[0] if out else 0
    for head in ("mean", "log_std"):
        expected |= {f"{head}.weight": (width, actions), f"{head}.bias": (actions,)}
    expected |= {"action.centre": (actions,), "action.scale": (actions,)}
    found = {name: value.shape for name, value in weights.items()}
    if found != expected:
        wrong = sorted(set(found.items()) ^ set(expected.items()))
        raise WireError(f"weights do not fit a policy of {inputs} inputs and {actions} actions; they differ in {wrong}")
    return [(weights[f"hidden.{i}.weight"], weights[f"hidden.{i}.bias"]) for i in range(depth)]
