"""A frozen policy of flow or diffusion whose noise a squashed Gaussian policy chooses; `dsrl` trains the latter.

Wagenmaker et al., "Steering Your Diffusion Policy with Latent Space Reinforcement Learning", CoRL 2025 (arXiv
2506.15799). For noise w of a chunk, with |w_i| <= b::

    w = b tanh(u),   u ~ N(mu(s), sigma(s)),        a = frozen policy at (s, w)

sigma starts at 1 / b, so that w is about N(0, 1), from which the frozen policy draws. The Gaussian chooses the noise of
the first actions, at most of those that the robot executes; the last noise repeats for the rest of the chunk, as in the
authors' code for pi0. Noise without effect would take up the entropy that `dsrl` asks for, and the rest would not
explore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hal.errors import SpecError
from hal.settings import Limit, Positive, load_plugin
from hal.spec import ArraySpec, RobotSpec
from user_sys.config import build
from user_sys.errors import ConfigError
from user_sys.policies.cnn import PictureSettings
from user_sys.policies.lerobot_checkpoint import LeRobotSettings, executed_actions
from user_sys.policies.networks import Affine, GaussianNetwork
from user_sys.policies.policy import SENTENCE, ExecutionMethod
from user_sys.policies.scaling import action_affine, feature_specs, require_vectors
from user_sys.policies.torch_policy import PromisedActions, TorchPolicy
from user_sys.policies.trainable import apply_train_settings

INITIAL_GAIN = 0.01
BASES = {
    "flow": "user_sys.policies.flow:FlowPolicy",
    "lerobot": "user_sys.policies.lerobot:LeRobotPolicy",
    "vla": "user_sys.policies.vla:VlaPolicy",
}
"""Built-in policies that draw chunks from noise; those of installed packages are found by their entry points."""


@dataclass(frozen=True)
class SteeredSettings(PictureSettings):
    """The settings of the policy `steered`.

    Attributes:
        base: kind of the frozen policy, such as flow, vla or lerobot. Its weights are those of
            `learner.initial_policy`, or of its own checkpoint (lerobot).
        base_options: settings of the frozen policy.
        base_features: vectors that the frozen policy reads; empty for `policy.features`.
        reads_base: the Gaussian reads what the frozen policy encodes, in place of its own vectors and pictures. A vla
            encodes the sentence too, so that the noise fits the task.
        noise_max: b.
        noise_actions: first actions whose noise is chosen; 0 for all that the robot executes. 1 suits long chunks, such
            as the 50 actions of SmolVLA and pi0.
        hidden: widths of the Gaussian's hidden layers.
        pictures: whether the Gaussian reads cameras; the settings of pictures have no effect otherwise.
        execute: actions of a chunk that the robot executes before the next one; 0 for as many as the frozen policy.
    """

    base: str = "flow"
    base_options: dict[str, Any] = field(default_factory=dict)
    base_features: tuple[str, ...] = ()
    reads_base: bool = False
    noise_max: Positive = 2.0
    noise_actions: Limit = 0
    hidden: tuple[int, ...] = (128, 128)
    pictures: bool = False
    execute: Limit = 0

    def __post_init__(self) -> None:
        if self.pretrain_updates or self.encoder == "frozen":
            raise ConfigError(
                f"pretrain_updates is {self.pretrain_updates} and encoder is {self.encoder}: no recorded action is "
                "noise that steered could clone; leave out both"
            )
        super().__post_init__()


def load_base(settings: SteeredSettings) -> tuple[Any, Any]:
    """Returns the class of the frozen policy, and its settings. Raises ConfigError: there is no such policy."""
    try:
        kind = load_plugin("user_sys.policies", settings.base, BASES)
    except (SpecError, ImportError) as error:
        raise ConfigError(f"policy.options.base: {error}") from error
    return kind, build(kind.settings, settings.base_options, "policy.options.base_options")


def _plain_spec(name: str, size: int, bound: float) -> ArraySpec:
    """A vector with elements within `bound` either way."""
    labels, units = tuple(f"{name}{index}" for index in range(size)), ("1",) * size
    return ArraySpec(name=name, labels=labels, units=units, low=(-bound,) * size, high=(bound,) * size)


class SteeredNetwork(GaussianNetwork):
    """A Gaussian over the noise of `base`; an `algorithms.algorithm.GaussianPolicy` whose action is that noise.

    Attributes:
        base: the frozen policy's module, in evaluation mode.
        executed: actions of a chunk that the robot executes.
        is_pretrained: the frozen policy has the weights of a checkpoint.
    """

    base: Any
    robot_action: Any

    def __init__(
        self, spec: RobotSpec, features: Sequence[str], settings: SteeredSettings, cameras: Sequence[str], base: Any
    ) -> None:
        """Args:
            cameras: that the Gaussian reads.
            base: the frozen policy's module.

        Raises:
            ConfigError: `base` draws no chunk from noise alone, or encodes nothing that the Gaussian could read.
        """
        if settings.reads_base and not (hasattr(base, "sample") and hasattr(base, "observation_size")):
            raise ConfigError(f"policy.options.reads_base: {settings.base} encodes nothing that can be read; remove it")
        if getattr(base, "noise_shape", None) is None and not hasattr(base, "sample"):
            raise ConfigError(
                f"policy.options.base: {settings.base} draws no actions from noise; use flow, vla or lerobot"
            )
        if getattr(base, "draws_between_steps", False):
            raise ConfigError(
                f"policy.options.base: {settings.base} adds noise in each step (DDPM), so the chosen noise steers "
                "almost nothing; set policy.options.base_options.config: {noise_scheduler_type: DDIM}"
            )
        shape = getattr(base, "noise_shape", None) or (base.chunk_length, spec.action.shape[0])
        most = int(getattr(base, "execute", 0) or base.chunk_length)
        self.executed = int(settings.execute or settings.base_options.get("execute", 0) or most)
        if self.executed > most:
            raise ConfigError(
                f"policy.options.execute is {self.executed}; {settings.base} gives {most} actions at once"
            )
        self._chosen = settings.noise_actions or self.executed
        if self._chosen > self.executed:
            raise ConfigError(
                f"policy.options.noise_actions is {self._chosen}; the robot executes {self.executed} actions of a chunk"
            )
        noise = _plain_spec("noise", self._chosen * shape[1], settings.noise_max)
        self.reads_base = settings.reads_base
        if self.reads_base:
            super().__init__((_plain_spec("summary", base.observation_size, 1.0),), noise, settings.hidden)
            self.features = ()
            if hasattr(base, "encode_sentences"):
                self.encode_sentences = base.encode_sentences
        else:
            encoders = settings.make_encoders(spec, cameras)
            super().__init__(feature_specs(spec, features), noise, settings.hidden, encoders)
        for layer in (self.mean, self.log_std):  # at first it acts about as the frozen policy does
            layer.weight.data.mul_(INITIAL_GAIN)
        self.log_std.bias.data.fill_(-math.log(settings.noise_max))
        self.reads_ages = bool(getattr(base, "reads_ages", False))
        self.base, self._noise_shape = base.eval().requires_grad_(False), shape
        options = settings.base_options
        self._condition, self._guidance = int(options.get("condition", 0)), float(options.get("guidance", 1.0))
        centre, half = action_affine(spec.action)
        self.robot_action = Affine(centre=centre, scale=half)
        self.is_pretrained = bool(getattr(base, "is_pretrained", False))

    def train(self, mode: bool = True) -> SteeredNetwork:
        """As `nn.Module.train`; the frozen policy stays in evaluation mode."""
        super().train(mode)
        self.base.eval()
        return self

    @property
    def reads(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the vectors and of the cameras that either policy reads."""
        base = self.base
        return (*dict.fromkeys((*self.features, *base.features)),), (*dict.fromkeys((*self.cameras, *base.cameras)),)

    def encode(self, observation: Mapping[str, Tensor]) -> Tensor:
        """See `ObservationNetwork.encode`; with `reads_base` all that the frozen policy encodes, the summary first."""
        if not self.reads_base:
            return super().encode(observation)
        with torch.no_grad():
            encoded: Tensor = self.base.encode(observation)
        return encoded

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `GaussianNetwork`; it reads the first `observation_size` columns."""
        return super().forward(x[:, : self.observation_size])

    @torch.no_grad()
    def chunks(
        self, observation: Mapping[str, Tensor], sentences: Sequence[str], scaled_noise: Tensor, encoded: Tensor
    ) -> Tensor:
        """Returns the executed actions (n, H, a) in the spec's units.

        Args:
            scaled_noise: (n, k), scaled to [-1, 1].
            encoded: `encode` of the observation.
        """
        base = self.base
        length, size = self._noise_shape
        noise = self.unscale_action(scaled_noise).view(-1, self._chosen, size)
        noise = torch.cat([noise, noise[:, -1:].expand(-1, length - self._chosen, -1)], 1)
        if self.reads_base:
            chunks = self._base_chunks(encoded, noise)
        elif hasattr(base, "chunks_from_noise"):
            chunks = base.chunks_from_noise(observation, sentences, noise)
        else:
            if hasattr(base, "encode_sentences"):
                observation = {**observation, SENTENCE: base.encode_sentences(sentences).to(noise.device)}
            chunks = self._base_chunks(base.encode(observation), noise)
        return chunks[:, : self.executed]

    def _base_chunks(self, encoded: Tensor, noise: Tensor) -> Tensor:
        """Returns the frozen policy's chunks (n, H, a) from `noise`, under the condition of its settings."""
        condition = torch.full((len(noise),), self._condition, device=noise.device) if self._condition else None
        chunks: Tensor = self.base.unscale_action(
            self.base.sample(encoded, noise, condition=condition, guidance=self._guidance)
        )
        return chunks

    def scale_executed(self, action: Tensor) -> Tensor:
        """Maps the robot's actions (..., a) to [-1, 1]."""
        scaled: Tensor = (action - self.robot_action.centre) / self.robot_action.scale
        return scaled.clamp(-1.0, 1.0)


class SteeredPolicy(TorchPolicy):
    """Acts with the frozen policy on the chosen noise."""

    settings = SteeredSettings

    def __init__(
        self,
        spec: RobotSpec,
        *,
        settings: SteeredSettings | None = None,
        features: Sequence[str] = (),
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        """See `TrainablePolicy`."""
        super().__init__(spec, settings=settings, features=features, seed=seed, device=device)
        self._specs = tuple(spec.feature(name) for name in self.module.reads[0])

    @classmethod
    def check_robot(cls, spec: RobotSpec, settings: Any, features: Sequence[str] = ()) -> None:
        """See `TrainablePolicy.check_robot`."""
        if not settings.pictures and not settings.reads_base:
            require_vectors(spec, features, "the policy steered without policy.options.pictures", "set pictures: true")

    @classmethod
    def select_cameras(cls, spec: RobotSpec, settings: SteeredSettings) -> tuple[str, ...]:
        """See `TrainablePolicy.select_cameras`; those of either policy."""
        kind, options = load_base(settings)
        return (*dict.fromkeys((*cls._own_cameras(spec, settings), *kind.select_cameras(spec, options))),)

    @classmethod
    def _own_cameras(cls, spec: RobotSpec, settings: SteeredSettings) -> tuple[str, ...]:
        return super().select_cameras(spec, settings) if settings.pictures else ()

    @classmethod
    def make_module(
        cls, spec: RobotSpec, *, settings: SteeredSettings | None = None, features: Sequence[str] = ()
    ) -> nn.Module:
        """See `TrainablePolicy.make_module`. Raises ConfigError: the frozen policy cannot be built or steered."""
        chosen = settings or cls.settings()
        cls.check_robot(spec, chosen, features)
        kind, options = load_base(chosen)
        try:
            plain = kind.make_module(spec, settings=options, features=chosen.base_features or features)
        except SpecError as error:
            raise SpecError(f"policy.options.base_options, of the frozen policy: {error}") from None
        base = apply_train_settings(plain, options)  # with the adapters of the run that trained it
        return SteeredNetwork(spec, features, chosen, cls._own_cameras(spec, chosen), base)

    @classmethod
    def reads_files(cls, settings: SteeredSettings) -> bool:
        """See `TrainablePolicy.reads_files`; for either policy. Raises ConfigError as `load_base`."""
        kind, options = load_base(settings)
        return super().reads_files(settings) or bool(kind.reads_files(options))

    @classmethod
    def execution_delays(cls, settings: SteeredSettings) -> dict[ExecutionMethod, int]:
        """See `TrainablePolicy.execution_delays`: half of the executed actions, as a chunk holds no others."""
        kind, options = load_base(settings)
        half: int = kind.execution_delays(options)["switch"]
        of_base = executed_actions(options) if isinstance(options, LeRobotSettings) else getattr(options, "execute", 0)
        if executed := settings.execute or of_base:
            half = min(half, executed // 2)
        return {"switch": half, "ensemble": half}

    def draw(
        self, observation: Mapping[str, Tensor], *, deterministic: bool, promised: PromisedActions | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `TorchPolicy.draw`."""
        encoded = self.module.encode(dict(observation))
        mean, log_std = self.module(encoded)
        noise = torch.tanh(mean + log_std.exp() * self.noise(tuple(mean.shape), deterministic=deterministic))
        actions = self.module.chunks(observation, self.sentences, noise, encoded)
        return actions, torch.full(actions.shape[:2], float("nan"))
