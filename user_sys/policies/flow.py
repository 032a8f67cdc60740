"""Chunks of actions by flow matching, conditioned on state vectors and, by setting, on pictures.

Conditional flow matching with straight paths (Lipman et al., "Flow Matching for Generative Modeling", ICLR 2023). For a
chunk x_1, noise x_0 ~ N(0, 1) and time t in [0, 1]::

    x_t = (1 - t) x_0 + t x_1        L = || v(x_t, t, context) - (x_1 - x_0) ||^2

A chunk is drawn by Euler steps of v from noise. Conditions are learned tokens, of which 0 is none; guidance w steers by
v = v_0 + w (v_c - v_0) (Ho and Salimans, "Classifier-Free Diffusion Guidance", 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor, nn

from hal.errors import SpecError
from hal.settings import Count, Limit
from hal.spec import STATE, Array, ArraySpec, RobotSpec
from user_sys.errors import ConfigError
from user_sys.policies.a2c2 import TRAINED_ROWS, CorrectionNetwork
from user_sys.policies.cnn import PictureSettings
from user_sys.policies.correction import INPUT_CLIP
from user_sys.policies.networks import ObservationNetwork, PictureEncoder
from user_sys.policies.policy import ActionChunk, ChunkContext, ExecutionMethod
from user_sys.policies.rtc import ChunkPrefix, RtcSettings, draw_prefix_lengths, sample_given, sample_guided
from user_sys.policies.scaling import feature_specs, require_vectors
from user_sys.policies.torch_policy import PromisedActions, TorchPolicy
from user_sys.policies.vlash import OFFSET, StateForecast

TIME_FREQUENCIES = 8
CONDITION_SIZE = 16
NONE = 0  # the condition of no condition


@dataclass(frozen=True)
class FlowSettings(RtcSettings, PictureSettings):
    """The settings of the policy `flow`. The last two train it for methods of asynchronous execution; 0 or empty: no.

    Attributes:
        pictures: whether it reads cameras; other settings of pictures than pretrain_updates need it.
        chunk_length: actions of a chunk.
        execute: actions of a chunk that the robot executes before the next one is drawn; 0 for all.
        flow_steps: Euler steps from noise to a chunk.
        hidden: widths of the velocity's hidden layers.
        conditions: number of conditions that an algorithm trains, besides none.
        condition, guidance: the condition under which the policy acts, and its weight.
        offset_max: for vlash: most control periods by which a chunk begins after its observation.
        correction_hidden: for a2c2: widths of the correcting network's hidden layers, such as [64, 64].
    """

    pictures: bool = False
    chunk_length: Count = 8
    execute: Limit = 0
    flow_steps: Count = 10
    hidden: tuple[int, ...] = (256, 256, 256)
    conditions: Limit = 0
    condition: Limit = NONE
    guidance: Annotated[float, Meta(ge=0)] = 1.0
    offset_max: Limit = 0
    correction_hidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_prefix(self.chunk_length)
        if self.offset_max and self.correction_hidden:
            raise ConfigError("offset_max is for vlash and correction_hidden for a2c2: set one of them only")
        if self.execute > self.chunk_length:
            raise ConfigError(f"execute is {self.execute}; a chunk has only {self.chunk_length} actions (chunk_length)")
        if self.condition > self.conditions:
            raise ConfigError(f"condition is {self.condition}; set it to at most conditions={self.conditions}")
        if not self.hidden or min(self.hidden) < 1:
            raise ConfigError(f"hidden is {list(self.hidden)}; list one or more widths above 0")


Velocity = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""The velocity of a flow for fixed observations: dx/dt, (n, H, a), at x (n, H, a), time t (n,) and conditions (n,)."""


class FlowMatching:
    """Samples and losses of a flow, given its velocity: what the modules of all flow policies share.

    Attributes:
        chunk_length: H, actions of a chunk.
        flow_steps: Euler steps of `sample`.
        prefix_max: most given actions at the start of a chunk that `imitation_loss` trains (`user_sys.policies.rtc`).
            With it the velocity takes a time for each action, (n, H), 1 for a given one, in place of (n,).
    """

    chunk_length: int
    flow_steps: int
    prefix_max: int = 0

    def velocity_given(self, context: Tensor) -> Velocity:
        """Returns the velocity for observations with this `context`, as `encode` returns it; abstract.

        What depends on the observations alone is computed once.
        """
        raise NotImplementedError

    def velocity(self, x_t: Tensor, t: Tensor, context: Tensor, condition: Tensor | None = None) -> Tensor:
        """Returns dx/dt, (n, H, a), at `x_t` (n, H, a) and time `t` (n,).

        Args:
            context: `encode` of the observation.
            condition: int64 (n,), 0 for none; None is 0 for all.
        """
        return self.velocity_given(context)(x_t, t, condition)

    def sample(
        self,
        context: Tensor,
        noise: Tensor,
        steps: int | None = None,
        condition: Tensor | None = None,
        guidance: float = 1.0,
    ) -> Tensor:
        """Returns chunks (n, H, a), scaled to [-1, 1], from `noise` (n, H, a) by Euler steps. Differentiable."""
        return self.integrate(context, noise, steps, condition, guidance).clamp(-1.0, 1.0)

    def integrate(
        self, context: Tensor, noise: Tensor, steps: int | None, condition: Tensor | None, guidance: float
    ) -> Tensor:
        """Returns x_1, (n, H, a), which may lie beyond [-1, 1]; arguments as in `sample`."""
        steps, x, velocity = steps or self.flow_steps, noise, self.steered_velocity(context, condition, guidance)
        for step in range(steps):
            x = x + velocity(x, torch.full((len(x),), step / steps, device=x.device)) / steps
        return x

    def steered_velocity(
        self, context: Tensor, condition: Tensor | None, guidance: float
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns the velocity as a function of x and t, steered to `condition`; arguments as in `sample`."""
        velocity_at = self.velocity_given(context)

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            found = velocity_at(x, t, condition)
            if condition is not None and guidance != 1.0:
                free = velocity_at(x, t, None)
                found = free + guidance * (found - free)
            return found

        return velocity

    def imitation_loss(
        self, context: Tensor, action: Tensor, mask: Tensor | None = None, condition: Tensor | None = None
    ) -> Tensor:
        """Returns the flow-matching loss (n,) of scaled chunks `action` (n, H, a), averaged over the steps in `mask`.

        Args:
            mask: bool (n, H), which steps of a chunk exist; None for all.
        """
        noise, t = torch.randn_like(action), torch.rand(len(action), device=action.device)
        exists = torch.ones(action.shape[:2], dtype=torch.bool, device=action.device) if mask is None else mask
        at = t[:, None, None]
        if self.prefix_max:
            lengths = draw_prefix_lengths(exists, self.prefix_max)
            given = torch.arange(exists.shape[1], device=t.device) < lengths[:, None]
            t, exists = torch.where(given, 1.0, t[:, None]), exists & ~given
            at = t[..., None]
        velocity = self.velocity((1 - at) * noise + at * action, t, context, condition)
        error = self.weigh_error(velocity - (action - noise), 1 - at, action, exists).square().mean(-1)
        return (error * exists).sum(-1) / exists.sum(-1).clamp(min=1)  # steps without an action do not exist

    def weigh_error(self, error: Tensor, left: Tensor, action: Tensor, exists: Tensor) -> Tensor:
        """Returns the `error` of the velocity, (n, H, a), by which it trains; here as it is.

        `left`: 1 - t, (n, 1 or H, 1). `action`, `exists`: as in `imitation_loss`.
        """
        return error


class FlowNetwork(FlowMatching, ObservationNetwork):
    """A flow whose velocity is a multilayer perceptron; a `user_sys.algorithms.algorithm.ChunkPolicy`.

    `bc` and `hg_dagger` also train it for asynchronous execution, by VLASH or A2C2.

    Attributes:
        window_length: steps of a window of its batches: the chunk and the longest offset.
        condition: under which the policy acts; 0 for none.
        correction: A2C2's network, which needs `BatchSpec.step_vectors`; None without.
    """

    def __init__(
        self,
        specs: Sequence[ArraySpec],
        action: ArraySpec,
        settings: FlowSettings,
        encoders: Mapping[str, PictureEncoder] | None = None,
        forecast: StateForecast | None = None,
    ) -> None:
        """`encoders`: one for each camera that it reads. `forecast`: of the robot's state, for `offset_max`."""
        updates, frozen_from = settings.pretrain_updates, settings.frozen_from if encoders else -1
        super().__init__(specs, action, encoders, pretrain_updates=updates, frozen_from=frozen_from)
        self.chunk_length, self.flow_steps = settings.chunk_length, settings.flow_steps
        self.prefix_max, self.forecast = settings.prefix_max, forecast
        self.condition = settings.condition
        self.window_length = settings.chunk_length + (settings.offset_max if forecast else 0)
        self.observation_size += forecast is not None  # the offset
        self.conditions = condition_embedding(settings.conditions, CONDITION_SIZE) if settings.conditions else None
        width = self.chunk_length * self.action_size
        given = self.chunk_length if self.prefix_max else 0
        inputs = width + given + 2 * TIME_FREQUENCIES + self.observation_size
        widths = (inputs + (CONDITION_SIZE if settings.conditions else 0), *settings.hidden)
        layers: list[nn.Module] = []
        for pair in zip(widths, widths[1:], strict=False):
            layers += [nn.Linear(*pair), nn.LayerNorm(pair[1]), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], width))
        sizes = len(self.input.offset), self.action_size
        hidden = settings.correction_hidden
        self.correction = CorrectionNetwork(*sizes, hidden) if hidden else None

    def encode(self, observation: Mapping[str, Tensor]) -> Tensor:
        """See `ObservationNetwork.encode`; with `offset_max`, the offset of the state is the last column."""
        encoded = super().encode(observation)
        if self.forecast is None:
            return encoded
        offset = observation.get(OFFSET, encoded.new_zeros(len(encoded), 1))
        return torch.cat([encoded, offset / (self.window_length - self.chunk_length)], -1)

    def velocity_given(self, context: Tensor) -> Velocity:
        """See `FlowMatching.velocity_given`."""
        return lambda x_t, t, condition: self.layers(self.inputs(x_t, t, context, condition)).view(x_t.shape)

    def inputs(self, x_t: Tensor, t: Tensor, context: Tensor, condition: Tensor | None) -> Tensor:
        """Returns what `layers` reads, (n, width); arguments as in `velocity`."""
        if self.conditions is not None:
            index = torch.zeros(len(t), dtype=torch.int64, device=t.device) if condition is None else condition
            context = torch.cat([context, self.conditions(index)], -1)
        if not self.prefix_max:
            return torch.cat([x_t.flatten(1), time_embedding(t), context], -1)
        given = t == 1 if t.ndim == 2 else torch.zeros(x_t.shape[:2], device=t.device)
        now = t[:, -1] if t.ndim == 2 else t  # the last action is never given
        return torch.cat([x_t.flatten(1), given.float(), time_embedding(now), context], -1)

    def imitated(
        self, observation: Mapping[str, Tensor], action: Tensor, mask: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor, Tensor]:
        """Returns observation, chunk (n, H, a) and mask (n, H) to imitate, of a window (n, window_length, a)."""
        if self.forecast is None:
            return observation, action, mask
        return self.forecast.offset(observation, action, mask, self.chunk_length)

    def correction_loss(self, steps: Mapping[str, Tensor], context: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        """Returns the loss of `correction` for some samples, (m,).

        Args:
            steps: vectors at each step of the chunks, (n, H, d).
            context: `encode` of the observations.
            action, mask: scaled chunks (n, H, a), and which of their steps exist.
        """
        assert self.correction is not None  # `reads_steps`
        count = min(len(action), TRAINED_ROWS)
        rows = torch.arange(count, device=action.device) * len(action) // count  # of all parts of a mixture
        context, action, mask = context[rows].detach(), action[rows], mask[rows]
        vectors = torch.cat([steps[name][rows] for name in self.features], -1)
        newest = ((vectors - self.input.offset) * self.input.scale).clamp(-INPUT_CLIP, INPUT_CLIP)
        with torch.no_grad():
            spread = torch.rand(len(context), 1, 1, device=context.device) < 0.5  # else as a deterministic chunk
            chunk = self.sample(context, torch.randn_like(action) * spread)
        return self.correction.loss(newest, newest[:, 0], chunk, action, mask)


def condition_embedding(count: int, size: int) -> nn.Embedding:
    """Returns the vectors of conditions 0 to `count`. Each starts as that of none, which stays 0.

    A policy that was trained without conditions so acts alike under all of them, until training tells them apart.
    """
    found = nn.Embedding(count + 1, size, padding_idx=NONE)
    nn.init.zeros_(found.weight)
    return found


def time_embedding(t: Tensor) -> Tensor:
    """Returns sines and cosines of times (n,) in [0, 1] at doubling frequencies, (n, 2 * TIME_FREQUENCIES)."""
    angles = torch.pi * t[:, None] * 2.0 ** torch.arange(TIME_FREQUENCIES, device=t.device)
    return torch.cat([angles.sin(), angles.cos()], -1)


class FlowPolicy(TorchPolicy):
    """Acts in chunks; deterministic chunks start from zero noise. Its density is unknown, so log_prob is NaN."""

    settings: ClassVar[type[Any]] = FlowSettings
    network: type[FlowNetwork] = FlowNetwork
    is_gated: ClassVar[bool] = False

    @classmethod
    def select_cameras(cls, spec: RobotSpec, settings: Any) -> tuple[str, ...]:
        """See `TrainablePolicy.select_cameras`; no camera without the setting `pictures`."""
        return super().select_cameras(spec, settings) if getattr(settings, "pictures", True) else ()

    @classmethod
    def check_robot(cls, spec: RobotSpec, settings: Any, features: Sequence[str] = ()) -> None:
        """See `TrainablePolicy.check_robot`: with `offset_max` the actions must move a state that the policy reads."""
        if not getattr(settings, "pictures", True):
            require_vectors(spec, features, "the policy without policy.options.pictures", "set pictures: true")
        if getattr(settings, "correction_hidden", ()):
            require_vectors(spec, features, "the network of policy.options.correction_hidden", "leave it out")
        if not getattr(settings, "offset_max", 0):
            return
        read = [each.name for each in feature_specs(spec, features)]
        if STATE not in read:
            raise SpecError(
                f"policy.options.offset_max is {settings.offset_max}, and the policy reads "
                f"{', '.join(read) or 'only pictures'}: add {STATE} to policy.features, or leave out offset_max"
            )
        if not StateForecast(spec).is_possible:
            raise SpecError(
                f"policy.options.offset_max is {settings.offset_max}, and no action of {spec.model} sets or steps a "
                "joint or the tool: leave out offset_max, and choose another policy.execution.method than vlash"
            )

    @classmethod
    def make_module(cls, spec: RobotSpec, *, settings: Any = None, features: Sequence[str] = ()) -> nn.Module:
        """See `TrainablePolicy.make_module`; a `user_sys.algorithms.algorithm.ChunkPolicy`.

        Raises SpecError as `check_robot`.
        """
        options = settings or cls.settings()
        cls.check_robot(spec, options, features)
        encoders = options.make_encoders(spec, cls.select_cameras(spec, options))
        forecast = StateForecast(spec) if options.offset_max else None
        return cls.network(feature_specs(spec, features), spec.action, options, encoders, forecast)

    @classmethod
    def execution_delays(cls, settings: Any) -> dict[ExecutionMethod, int]:
        """See `TrainablePolicy.execution_delays`; some methods need settings of their own, and none a gated flow."""
        found, length = super().execution_delays(settings), settings.chunk_length
        if cls.is_gated or getattr(settings, "gated", False):
            return found
        found["rtc"] = length // 2
        if settings.prefix_max:
            found["training_rtc"] = min(settings.prefix_max, length // 2)
        if offset_max := getattr(settings, "offset_max", 0):
            found["vlash"] = min(offset_max, length)
        if getattr(settings, "correction_hidden", ()):
            found["a2c2"] = length // 2
        return found

    def act_batch(
        self,
        observations: Sequence[Mapping[str, Array]],
        sentences: Sequence[str],
        *,
        deterministic: bool,
        contexts: Sequence[ChunkContext | None] = (),
    ) -> list[ActionChunk]:
        """See `Policy.act_batch`; with A2C2 each chunk has its correction."""
        chunks = super().act_batch(observations, sentences, deterministic=deterministic, contexts=contexts)
        if any(contexts):
            bridged = map(self.bridged, contexts)
            chunks = [replace(chunk, bridged=count) for chunk, count in zip(chunks, bridged, strict=True)]
        correction = getattr(self.module, "correction", None)
        if correction is None or not any(context and context.method == "a2c2" for context in contexts):
            return chunks
        with self._acting():
            found = correction.corrections(self.module, observations, self.module.chunk_length)
        return [replace(chunk, correction=each) for chunk, each in zip(chunks, found, strict=True)]

    def bridged(self, context: ChunkContext | None) -> int:
        """See `ActionChunk.bridged`."""
        setting = {"vlash": "offset_max", "training_rtc": "prefix_max"}.get("" if context is None else context.method)
        return 0 if context is None or setting is None else min(context.assured, getattr(self.options, setting, 0))

    def draw(
        self, observation: Mapping[str, Tensor], *, deterministic: bool, promised: PromisedActions | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `TorchPolicy.draw`."""
        module, options = self.module, self.options
        method = "switch" if promised is None else promised.method
        if promised is not None and method == "vlash":
            count = torch.minimum(promised.delay, promised.count).clamp(max=options.offset_max)
            observation = module.forecast.roll(observation, promised.actions, count)
        context = module.encode(observation)
        n = len(context)
        noise = options.noise_scale * self.noise(
            (n, module.chunk_length, module.action_size), deterministic=deterministic
        )
        condition = torch.full((n,), options.condition, device=context.device) if options.condition else None
        explored: Tensor | float = 1.0  # share of the exploration that each action gets
        if promised is not None and method in ("rtc", "training_rtc"):
            scaled = module.scale_action(promised.actions)
            prefix = ChunkPrefix.of(scaled, promised.count, promised.delay, module.chunk_length)
            velocity = module.steered_velocity(context, condition, options.guidance)
            if method == "rtc":
                chunk = sample_guided(velocity, noise, module.flow_steps, prefix, options)
            else:
                chunk = sample_given(velocity, noise, module.flow_steps, prefix, module.prefix_max)
            explored = 1 - prefix.weights()[..., None]
        else:
            chunk = module.sample(context, noise, condition=condition, guidance=options.guidance)
        if options.exploration:
            added = self.noise((n, 1, module.action_size), deterministic=deterministic)
            chunk = chunk + options.exploration * added * explored
        actions = module.unscale_action(chunk.clamp(-1.0, 1.0))
        return actions, torch.full(actions.shape[:2], float("nan"))
