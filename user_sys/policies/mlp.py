"""A squashed Gaussian policy as a small multilayer perceptron: a torch module trains it, numpy acts with its weights.

numpy is faster than torch for one observation of a few dozen numbers, and a robot's computer needs no torch. Both forms
read the weights of `MlpPolicy.make_module` (float32; `n` inputs, `a` action elements, layers numbered from 0)::

    input.offset (n,)   input.scale (n,)      x = clip((concatenated features - offset) * scale, +-INPUT_CLIP)
    hidden.<i>.weight (out, in)   .bias (out,)      x = relu(weight @ x + bias)
    mean.weight (a, h)  .bias (a,)   log_std.weight (a, h)  .bias (a,)      u ~ N(mean, exp(clip(log_std))^2)
    action.centre (a,)  action.scale (a,)     action = centre + scale * tanh(u)

A discrete gripper has u ~ N(mean, 1), and sign(u) instead of tanh(u).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hal.settings import Limit
from hal.spec import Array, RobotSpec
from user_sys.errors import ConfigError, WireError
from user_sys.policies.correction import INPUT_CLIP
from user_sys.policies.policy import ActionChunk, ChunkContext, TrainablePolicy
from user_sys.policies.scaling import (
    LOG_STD_MAX,
    LOG_STD_MIN,
    ActionBounds,
    Gripper,
    RandomExploration,
    discrete_gripper,
    feature_specs,
    require_features,
    require_vectors,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MlpSettings:
    """The settings of the policy `mlp`.

    Attributes:
        hidden: widths of the hidden layers.
        pretrain_updates: updates at the start that clone the demonstrations, for actor-critics.
        gripper: continuous, or discrete: the policy opens or closes it fully.
    """

    hidden: tuple[int, ...] = (256, 256)
    pretrain_updates: Limit = 0
    gripper: Gripper = "continuous"

    def __post_init__(self) -> None:
        if not self.hidden or min(self.hidden) < 1:
            raise ConfigError(f"hidden is {list(self.hidden)}; list one or more widths above 0")


class MlpPolicy(TrainablePolicy):
    """Draws actions. Until the first `load` it explores uniformly within the action bounds, smoothly over time."""

    settings = MlpSettings
    acts_without_torch = True
    precisions = ("exact", "bf16")

    def __init__(
        self,
        spec: RobotSpec,
        *,
        settings: MlpSettings | None = None,
        features: Sequence[str] = (),
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        """See `TrainablePolicy`; the weights give the widths, and `device` has no effect."""
        self.check_robot(spec, settings, features)
        self._gripper = discrete_gripper(spec, (settings or MlpSettings()).gripper)
        self._specs = feature_specs(spec, features)
        self._bounds = ActionBounds(spec.action)
        self._seed(seed)
        self._weights: dict[str, Array] | None = None
        self._layers: list[tuple[Array, Array]] = []  # the heads are the last

    def _seed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._exploration = RandomExploration(self._bounds, self._rng)

    def copy(self) -> Self:
        """See `Policy.copy`."""
        copied = super().copy()
        copied._seed(int(self._rng.integers(2**62)))
        return copied

    def act(
        self,
        observation: Mapping[str, Array],
        sentence: str,
        *,
        deterministic: bool,
        context: ChunkContext | None = None,
    ) -> ActionChunk:
        """See `Policy.act`; the chunk has one action. Takes some tens of microseconds."""
        require_features(self._specs, observation)
        if self._weights is None:
            return self._exploration.act(deterministic)
        mean, log_std = self._gaussian(
            np.concatenate([observation[spec.name] for spec in self._specs], dtype=np.float32)
        )
        noise = np.zeros_like(mean) if deterministic else self._rng.standard_normal(mean.size, np.float32)
        scaled = np.tanh(mean + np.exp(log_std) * noise)
        log_prob = squashed_log_prob(noise, log_std, scaled)
        if (g := self._gripper) >= 0:
            scaled[g] = -1.0 if scaled[g] < 0 else 1.0
            log_prob[g] = math.log(max(0.5 * math.erfc(-scaled[g] * mean[g] / math.sqrt(2.0)), sys.float_info.min))
        action = self._weights["action.centre"] + self._weights["action.scale"] * scaled
        return self._bounds.chunk(action[None], np.nan if deterministic else log_prob.sum())

    def load(self, weights: Mapping[str, Array]) -> None:
        """See `Policy.load`; the arrays are copied."""
        copied = {name: np.array(value, np.float32) for name, value in weights.items()}
        self._layers = _checked_layers(copied, sum(len(s.labels) for s in self._specs), self._bounds.centre.size)
        self._weights = copied

    def _gaussian(self, observed: Array) -> tuple[Array, Array]:
        assert self._weights is not None  # `act` has checked
        w = self._weights
        x = np.clip((observed - w["input.offset"]) * w["input.scale"], -INPUT_CLIP, INPUT_CLIP)
        for weight, bias in self._layers[:-1]:
            x = np.maximum(weight @ x + bias, 0.0)
        weight, bias = self._layers[-1]
        mean, log_std = np.split(weight @ x + bias, 2)
        log_std = np.clip(log_std, LOG_STD_MIN, LOG_STD_MAX)
        if self._gripper >= 0:
            log_std[self._gripper] = 0.0
        return mean, log_std

    @classmethod
    def check_robot(cls, spec: RobotSpec, settings: Any, features: Sequence[str] = ()) -> None:
        """See `TrainablePolicy.check_robot`."""
        require_vectors(spec, features, "the policy mlp", "set policy.kind to one that reads pictures, such as cnn")

    @classmethod
    def make_module(
        cls, spec: RobotSpec, *, settings: MlpSettings | None = None, features: Sequence[str] = ()
    ) -> torch.nn.Module:
        """See `TrainablePolicy.make_module`; a `user_sys.algorithms.algorithm.GaussianPolicy`."""
        from user_sys.policies.networks import GaussianNetwork  # torch, which only learners and policy servers have

        options = settings or MlpSettings()
        cls.check_robot(spec, options, features)
        return GaussianNetwork(
            feature_specs(spec, features),
            spec.action,
            options.hidden,
            pretrain_updates=options.pretrain_updates,
            gripper=discrete_gripper(spec, options.gripper),
        )


def squashed_log_prob(noise: Array, log_std: Array, squashed: Array) -> Array:
    """Returns the log density of each element of ``squashed = tanh(mean + exp(log_std) * noise)`` (Haarnoja et al.
    2018, appendix C).
    """
    gaussian: Array = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    return gaussian - np.log1p(1e-6 - squashed**2)


def _checked_layers(weights: Mapping[str, Array], inputs: int, actions: int) -> list[tuple[Array, Array]]:
    """Returns weight and bias of each layer, with both heads as the last one. Raises WireError if they do not fit."""
    depth = sum(1 for name in weights if name.startswith("hidden.") and name.endswith(".weight"))
    width = inputs
    expected: dict[str, tuple[int, ...]] = {"input.offset": (inputs,), "input.scale": (inputs,)}
    for i in range(depth):
        out = weights[f"hidden.{i}.weight"].shape[:1] if f"hidden.{i}.weight" in weights else ()
        expected |= {f"hidden.{i}.weight": (*out, width), f"hidden.{i}.bias": out}
        width = out[0] if out else 0
    for head in ("mean", "log_std"):
        expected |= {f"{head}.weight": (actions, width), f"{head}.bias": (actions,)}
    expected |= {"action.centre": (actions,), "action.scale": (actions,)}
    found = {name: value.shape for name, value in weights.items()}
    if found != expected:
        wrong = sorted(set(found.items()) ^ set(expected.items()))
        raise WireError(f"weights do not fit a policy of {inputs} inputs and {actions} actions; they differ in {wrong}")
    heads = [np.concatenate([weights[f"{head}.{part}"] for head in ("mean", "log_std")]) for part in ("weight", "bias")]
    hidden = [(weights[f"hidden.{i}.weight"], weights[f"hidden.{i}.bias"]) for i in range(depth)]
    return [*hidden, (heads[0], heads[1])]
