"""A small vision-language-action policy: pictures, a sentence and the robot's state in, a chunk of actions out.

Its structure is that of pi0 (Black et al., "pi0: A Vision-Language-Action Flow Model for General Robot Control", 2024,
arXiv 2410.24164) and SmolVLA (Shukor et al. 2025, arXiv 2506.01844), with 1.6 million parameters:

    summary = [keypoints of each camera + its age; sentence; state]
    prefix  = transformer([keypoints and patches of each camera + its age; words of the sentence; state])
    F       = expert(x_t, t, condition, summary; keys and values of the prefix)
    v       = ((t s^2 - (1 - t)) x_t + s d F) / d^2,     d^2 = (1 - t)^2 + t^2 s^2

The expert is a smaller transformer over the actions of a chunk. Its blocks attend to the chunk and to the prefix. It is
the velocity of a flow (`user_sys.policies.flow`), so that one prefix serves all steps of a chunk: its keys and values
are computed once. F has the scale of its inputs and targets (Karras et al., "Elucidating the Design Space of
Diffusion-Based Generative Models", 2022, arXiv 2206.00364) if actions have the deviation s. Patches are convolved, as
early convolutions help small transformers (Xiao et al. 2021, arXiv 2106.14881).

State and action are padded to `max_state` and `max_action`, each with a mask, and what scales them is no part of the
weights. So robots of several embodiments have weights of the same shapes, and one can start from another's policy.

With `gated` the flow is that of `user_sys.policies.gated_flow`, which SAC-Flow trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from hal.errors import SpecError
from hal.settings import Count, Limit
from hal.spec import IMAGES, ArraySpec, CameraSpec, RobotSpec
from user_sys.errors import ConfigError
from user_sys.policies.flow import (
    TIME_FREQUENCIES,
    FlowMatching,
    FlowPolicy,
    Velocity,
    condition_embedding,
    time_embedding,
)
from user_sys.policies.gated_flow import GATE_BIAS, INITIAL_LOG_STD, GatedFlow, constant_head, draw_rollout
from user_sys.policies.networks import ObservationNetwork, random_shift
from user_sys.policies.policy import AGE_SUFFIX, SENTENCE
from user_sys.policies.rtc import RtcSettings
from user_sys.policies.scaling import LOG_STD_MAX, LOG_STD_MIN, camera_specs, feature_specs
from user_sys.policies.sentences import HASHED_WORDS, VOCABULARY, hash_words, load_text_encoder
from user_sys.policies.torch_policy import PromisedActions
from user_sys.policies.trainable import TrainSettings

PATCH_WIDTHS = (32, 64)  # of the convolutions before the patches
PATCH_PIXELS = 16
ACTION_STD_MIN = 0.1  # of scaled actions in a batch, by which errors are divided
ACTION_STD = 0.5  # of scaled actions, about
MLP_RATIO = 2
INITIAL_EMBEDDING_STD = 0.02


@dataclass(frozen=True)
class VlaSettings(RtcSettings):
    """The settings of the policy `vla`.

    Attributes:
        cameras: that it reads; empty for all of the robot.
        text_encoder: a pretrained encoder of sentences, which stays as it is: its folder, an installed package with a
            folder `model`, or a name on the Hugging Face hub. It needs the extra `vla`. Empty: words are learned.
        max_state, max_action: elements to which state and action are padded.
        width: of each token, a multiple of `heads`.
        heads: of each attention.
        prefix_layers, expert_layers: blocks of the two transformers.
        shift: pixels by which pictures move at random in training; 0 for none.
        chunk_length: actions of a chunk.
        execute: actions of a chunk that the robot executes before the next one is drawn; 0 for all.
        flow_steps: Euler steps from noise to a chunk.
        flow_draws: how many times and noises train the expert on each observation.
        gated: a gated flow with noise between its steps, for sac_flow.
        conditions: number of conditions that an algorithm trains, besides none.
        condition, guidance: the condition under which the policy acts, and its weight.
        pretrain_updates: updates at the start of an actor-critic that clone the demonstrations.
        train: which parameters train.
    """

    cameras: tuple[str, ...] = ()
    text_encoder: str = ""
    max_state: Count = 32
    max_action: Count = 16
    width: Count = 128
    heads: Count = 4
    prefix_layers: Count = 1
    expert_layers: Count = 3
    shift: Annotated[int, Meta(ge=0, le=64)] = 2
    chunk_length: Count = 8
    execute: Limit = 0
    flow_steps: Count = 5
    flow_draws: Count = 2
    gated: bool = False
    conditions: Limit = 0
    condition: Limit = 0
    guidance: Annotated[float, Meta(ge=0)] = 1.0
    pretrain_updates: Limit = 0
    train: TrainSettings = field(default_factory=TrainSettings)

    def __post_init__(self) -> None:
        self.check_prefix(self.chunk_length)
        if self.execute > self.chunk_length:
            raise ConfigError(f"execute is {self.execute}; a chunk has only {self.chunk_length} actions (chunk_length)")
        if self.condition > self.conditions:
            raise ConfigError(f"condition is {self.condition}; set it to at most conditions={self.conditions}")
        if self.width % self.heads:
            raise ConfigError(f"width is {self.width}; set it to a multiple of heads={self.heads}")


class VlaNetwork(FlowMatching, ObservationNetwork):
    """See the module; a `user_sys.algorithms.algorithm.ChunkPolicy` that reads sentences.

    `encode` returns the summary, which critics read (`observation_size`), and then all tokens of the prefix.

    Attributes:
        chunk_length, flow_steps: see `FlowMatching`.
        condition: under which the policy acts; 0 for none.
        expert: the velocity.
        conditions: embeddings of conditions, of which 0 is none; None without.
        reads_ages: `encode` reads the ages of pictures, so that batches hold them.
    """

    reads_ages = True

    def __init__(
        self,
        specs: Sequence[ArraySpec],
        action: ArraySpec,
        settings: VlaSettings,
        cameras: Sequence[CameraSpec],
    ) -> None:
        """Raises SpecError if state or action of the robot is longer than its padding."""
        state_size, action_size = padded_sizes(specs, action, settings)
        super().__init__(specs, action, pretrain_updates=settings.pretrain_updates, saves_constants=False)
        self.chunk_length, self.flow_steps = settings.chunk_length, settings.flow_steps
        self.prefix_max, self.condition = settings.prefix_max, settings.condition
        self.cameras, self.observation_size = (
            tuple(camera.name for camera in cameras),
            (len(cameras) + 2) * settings.width,
        )
        self._draws, self._width = settings.flow_draws, settings.width
        self._text = load_text_encoder(settings.text_encoder) if settings.text_encoder else None
        prefix = Prefix(state_size, cameras, settings, 0 if self._text is None else self._text.size)
        self.encoder = nn.ModuleDict({"prefix": prefix})
        self.expert = Expert(action_size, self.observation_size, settings)
        self.conditions = condition_embedding(settings.conditions, settings.width) if settings.conditions else None

    def encode_sentences(self, sentences: Sequence[str]) -> Tensor:
        """Returns the feature `SENTENCE` of each sentence: int64 (m, words), or float32 (m, k) if pretrained."""
        return hash_words(sentences) if self._text is None else self._text.encode(sentences)

    def encode(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Returns the encoded observation, float32 (n, k); see the class.

        A camera's picture is `IMAGES` + its name, uint8 (n, h, w, 3), shifted at random in training mode. Its age,
        float32 (n, 1), s, counts as 0 if it is missing.
        """
        encoded: Tensor = self.encoder["prefix"](observation, self.scale_vectors(observation))
        return encoded

    def velocity_given(self, context: Tensor) -> Velocity:
        """See `FlowMatching.velocity_given`. It takes any multiple of the observations: their places repeat."""
        hidden = self._hidden_given(context)

        def velocity(x_t: Tensor, t: Tensor, condition: Tensor | None) -> Tensor:
            at = t.view(len(t), -1, 1)
            variance = (1 - at).square() + (ACTION_STD * at).square()  # of x_t
            out = variance.sqrt() * self.expert.head(hidden(x_t, t, condition))
            return ((at * ACTION_STD**2 - (1 - at)) * x_t + ACTION_STD * out) / variance

        return velocity

    def _hidden_given(self, context: Tensor) -> Velocity:
        observation = self.expert.observation(context[:, : self.observation_size])
        cached = self.expert.keys_values(context[:, self.observation_size :].reshape(len(context), -1, self._width))

        def hidden(x_t: Tensor, t: Tensor, condition: Tensor | None) -> Tensor:
            times = len(x_t) // len(context)
            prefix = cached if times == 1 else [(k.repeat(times, 1, 1, 1), v.repeat(times, 1, 1, 1)) for k, v in cached]
            given = observation.repeat(times, 1)
            if self.conditions is not None:
                index = torch.zeros(len(t), dtype=torch.int64, device=t.device) if condition is None else condition
                given = given + self.conditions(index)
            return self.expert.hidden(x_t, t, given, prefix)

        return hidden

    def imitation_loss(
        self, context: Tensor, action: Tensor, mask: Tensor | None = None, condition: Tensor | None = None
    ) -> Tensor:
        """See `FlowMatching.imitation_loss`; the mean over `flow_draws` times and noises."""
        draws = self._draws
        if mask is not None:
            mask = mask.repeat(draws, 1)
        if condition is not None:
            condition = condition.repeat(draws)
        losses = super().imitation_loss(context, action.repeat(draws, 1, 1), mask, condition)
        return losses.view(draws, -1).mean(0)

    def weigh_error(self, error: Tensor, left: Tensor, action: Tensor, exists: Tensor) -> Tensor:
        """See `FlowMatching.weigh_error`: that of the predicted action, (1 - t) times as large.

        Elements of the action count alike, however little they vary: each is divided by its deviation in the batch.
        """
        count = exists.sum().clamp(min=1)
        shown = exists[..., None].to(action.dtype)
        mean = (action * shown).sum((0, 1)) / count
        variance = ((action - mean).square() * shown).sum((0, 1)) / count
        return error * left / (variance + ACTION_STD_MIN**2).sqrt()


class GatedVlaNetwork(GatedFlow, VlaNetwork):
    """The network with a gated flow; see `user_sys.policies.gated_flow`."""

    def __init__(
        self,
        specs: Sequence[ArraySpec],
        action: ArraySpec,
        settings: VlaSettings,
        cameras: Sequence[CameraSpec],
    ) -> None:
        """See `VlaNetwork`."""
        super().__init__(specs, action, settings, cameras)
        self.gate = constant_head(settings.width, settings.max_action, GATE_BIAS)
        self.log_std = constant_head(self.observation_size, settings.max_action, INITIAL_LOG_STD)

    def velocity_given(self, context: Tensor) -> Velocity:
        """See `FlowMatching.velocity_given`."""
        hidden = self._hidden_given(context)

        def velocity(x_t: Tensor, t: Tensor, condition: Tensor | None) -> Tensor:
            h = hidden(x_t, t, condition)
            gate: Tensor = self.gate(h).sigmoid()[..., : self.action_size]
            return gate * (self.expert.head(h) - x_t)

        return velocity

    def deviation(self, context: Tensor) -> Tensor:
        """See `GatedFlow.deviation`; equal for all actions of a chunk."""
        log_std: Tensor = self.log_std(context[:, : self.observation_size])[:, : self.action_size]
        return log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)[:, None].expand(-1, self.chunk_length, -1)


# Layers ---------------------------------------------------------------------------------------------------------------

KeysValues = list[tuple[Tensor, Tensor]]
"""Keys and values of the prefix in each block of the expert, each (n, heads, tokens, width / heads)."""


def embedding(count: int, width: int) -> nn.Parameter:
    """Returns learned vectors, (count, width)."""
    return nn.Parameter(INITIAL_EMBEDDING_STD * torch.randn(count, width))


class PaddedLinear(nn.Module):
    """A linear layer over `size` elements that are padded to `most`, with a mask of those that exist."""

    exists: Tensor

    def __init__(self, size: int, most: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * most, width)
        self._pad, exists = most - size, torch.arange(most) < size
        self.register_buffer("exists", exists.float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, self._pad))
        out: Tensor = self.linear(torch.cat([padded, self.exists.expand(padded.shape)], -1))
        return out


class Patches(nn.Module):
    """Pictures uint8 (n, height, width, 3) to tokens: one of keypoints, and one for each 16x16 pixels.

    The sentence scales and shifts the channels of each convolution (FiLM, Perez et al. 2018, arXiv 1709.07871). A
    keypoint is the expected place of a channel's softmax (Levine et al. 2016, arXiv 1504.00702): with few
    demonstrations it says where the object of the sentence is, which patches alone learn slowly.
    """

    grid: Tensor

    def __init__(self, height: int, width: int, size: int) -> None:
        super().__init__()
        channels = (3, *PATCH_WIDTHS, PATCH_WIDTHS[-1])
        strides = (*(2 for _ in PATCH_WIDTHS), 1)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride, 1)
            for (before, after), stride in zip(pairwise(channels), strides, strict=True)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, after) for after in channels[1:])
        self.film = nn.ModuleList(nn.Linear(size, 2 * after) for after in channels[1:])
        stride = prod(strides)
        self.project = nn.Conv2d(channels[-1], size, PATCH_PIXELS // stride, PATCH_PIXELS // stride)
        rows, columns = -(-height // PATCH_PIXELS), -(-width // PATCH_PIXELS)
        self._padding = (0, columns * PATCH_PIXELS - width, 0, rows * PATCH_PIXELS - height)
        self.places = embedding(rows * columns, size)
        self.age = nn.Linear(1, size, bias=False)
        nn.init.zeros_(self.age.weight)
        down, across = (torch.linspace(-1, 1, n * PATCH_PIXELS // stride) for n in (rows, columns))
        grid = torch.cartesian_prod(down, across)
        self.register_buffer("grid", grid, persistent=False)
        self.keypoints = nn.Linear(3 * channels[-1], size)

    def forward(self, pictures: Tensor, age_s: Tensor | None, sentence: Tensor) -> Tensor:
        x = pictures.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)  # channels stay last in memory, which is fast
        x = F.pad(x, self._padding) if any(self._padding) else x
        for convolution, norm, film in zip(self.convolutions, self.norms, self.film, strict=True):
            scale, shift = film(sentence)[..., None, None].chunk(2, 1)
            x = F.silu(norm(convolution(x)) * (1 + scale) + shift)
        tokens: Tensor = self.project(x).flatten(2).transpose(1, 2) + self.places
        flat = x.flatten(2)
        keypoints = self.keypoints(torch.cat([(flat.softmax(-1) @ self.grid).flatten(1), flat.amax(-1)], -1))
        tokens = torch.cat([keypoints[:, None], tokens], 1)
        return tokens if age_s is None else tokens + self.age(age_s)[:, None]


class Prefix(nn.Module):
    """A transformer over pictures, the sentence, and the state."""

    def __init__(self, state_size: int, cameras: Sequence[CameraSpec], settings: VlaSettings, text_size: int) -> None:
        """`text_size`: of pretrained vectors of sentences; 0 if words are learned."""
        super().__init__()
        width = settings.width
        self._shift = settings.shift
        self.cameras = nn.ModuleDict({each.name: Patches(each.height, each.width, width) for each in cameras})
        self.words: nn.Module = (
            nn.Linear(text_size, width) if text_size else nn.Embedding(VOCABULARY, width, padding_idx=0)
        )
        self.places = embedding(1 if text_size else HASHED_WORDS, width)
        self.state = PaddedLinear(state_size, settings.max_state, width)
        self.blocks = nn.ModuleList(Block(width, settings.heads) for _ in range(settings.prefix_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, observation: Mapping[str, Tensor], state: Tensor) -> Tensor:
        """See `VlaNetwork.encode`; `state`: scaled, (n, s)."""
        words = self.words(observation[SENTENCE])
        words = words if words.ndim == 3 else words[:, None]
        sentence = F.layer_norm(words.mean(1), words.shape[-1:])
        parts = []
        for camera, patches in self.cameras.items():
            picture = observation[IMAGES + camera]
            if self.training and self._shift:
                picture = random_shift(picture, self._shift)
            parts.append(patches(picture, observation.get(IMAGES + camera + AGE_SUFFIX), sentence))
        own = self.state(state)
        summary = torch.cat([*(part[:, 0] for part in parts), sentence, own], -1)
        tokens = torch.cat([*parts, words + self.places, own[:, None]], 1)
        for block in self.blocks:
            tokens = block(tokens)
        tokens = self.norm(tokens)
        return torch.cat([summary, tokens.flatten(1)], -1)


class Attention(nn.Module):
    """Multi-head attention; queries of one sequence, keys and values of the same or of another."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of `x` (n, tokens, width), each (n, heads, tokens, width / heads)."""
        key, value = self.key_value(x).chunk(2, -1)
        return self._split(key), self._split(value)

    def forward(self, x: Tensor, keys_values: tuple[Tensor, Tensor]) -> Tensor:
        found = F.scaled_dot_product_attention(self._split(self.query(x)), *keys_values)
        out: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self._heads, -1).transpose(1, 2)


class Block(nn.Module):
    """Self-attention and a perceptron, each after a norm and next to a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, MLP_RATIO * width), nn.Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        return self.perceptron(x + self.attention(h, self.attention.keys_values(h)))

    def perceptron(self, x: Tensor) -> Tensor:
        """Adds the perceptron's output to `x`."""
        out: Tensor = x + self.down(F.silu(self.up(self.norms[1](x))))
        return out


class ExpertBlock(Block):
    """A block that also attends to the prefix."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.cross_norm, self.cross = nn.LayerNorm(width), Attention(width, heads)

    def forward(self, x: Tensor, prefix: tuple[Tensor, Tensor] | None = None) -> Tensor:
        assert prefix is not None  # as the expert gives it
        h = self.norms[0](x)
        x = x + self.attention(h, self.attention.keys_values(h))
        return self.perceptron(x + self.cross(self.cross_norm(x), prefix))


class Expert(nn.Module):
    """The velocity of a chunk, given the prefix's keys and values."""

    def __init__(self, action_size: int, observation_size: int, settings: VlaSettings) -> None:
        super().__init__()
        width = settings.width
        self._action_size = action_size
        self.action = PaddedLinear(action_size, settings.max_action, width)
        self.time = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.observation = nn.Sequential(
            nn.Linear(observation_size, 2 * width),
            nn.LayerNorm(2 * width),
            nn.SiLU(),
            nn.Linear(2 * width, 2 * width),
            nn.SiLU(),
            nn.Linear(2 * width, width),
        )
        self.places = embedding(settings.chunk_length, width)
        self._blocks = [ExpertBlock(width, settings.heads) for _ in range(settings.expert_layers)]
        self.blocks = nn.ModuleList(self._blocks)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, settings.max_action)

    def keys_values(self, prefix: Tensor) -> KeysValues:
        """Returns what the blocks read of the `prefix` (n, tokens, width)."""
        return [block.cross.keys_values(prefix) for block in self._blocks]

    def hidden(self, x_t: Tensor, t: Tensor, given: Tensor, prefix: KeysValues) -> Tensor:
        """Returns hidden values (n, H, width) for `head`. `t`: (n,), or (n, H); `given`: (n, width)."""
        times = self.time(time_embedding(t.flatten())).view(len(t), -1, self.places.shape[-1])
        hidden = self.action(x_t) + self.places + times + given[:, None]
        for block, keys_values in zip(self._blocks, prefix, strict=True):
            hidden = block(hidden, keys_values)
        normed: Tensor = self.norm(hidden)
        return normed

    def head(self, hidden: Tensor) -> Tensor:
        """Returns (n, H, a) of the result of `hidden`."""
        out: Tensor = self.out(hidden)[..., : self._action_size]
        return out


def padded_sizes(specs: Sequence[ArraySpec], action: ArraySpec, settings: VlaSettings) -> tuple[int, int]:
    """Returns the elements of state and action. Raises SpecError if one is longer than its padding."""
    sizes = {"state": sum(prod(spec.shape) for spec in specs), "action": prod(action.shape)}
    for (name, size), most in zip(sizes.items(), (settings.max_state, settings.max_action), strict=True):
        if size > most:
            raise SpecError(
                f"policy.options.max_{name} is {most}, too little for the {name} of {size} elements; set it to {size}"
            )
    return sizes["state"], sizes["action"]


class VlaPolicy(FlowPolicy):
    """See the module; acts in chunks."""

    settings = VlaSettings

    @classmethod
    def reads_files(cls, settings: VlaSettings) -> bool:
        """See `TrainablePolicy.reads_files`."""
        return bool(settings.text_encoder)

    @classmethod
    def check_robot(cls, spec: RobotSpec, settings: Any, features: Sequence[str] = ()) -> None:
        """See `TrainablePolicy.check_robot`."""
        padded_sizes(feature_specs(spec, features), spec.action, settings)

    @classmethod
    def make_module(cls, spec: RobotSpec, *, settings: Any = None, features: Sequence[str] = ()) -> nn.Module:
        """See `TrainablePolicy.make_module`; a `user_sys.algorithms.algorithm.ChunkPolicy`."""
        options = settings or VlaSettings()
        kind = GatedVlaNetwork if options.gated else VlaNetwork
        cameras = camera_specs(spec, cls.select_cameras(spec, options))
        return kind(feature_specs(spec, features), spec.action, options, cameras)

    def draw(
        self, observation: Mapping[str, Tensor], *, deterministic: bool, promised: PromisedActions | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `FlowPolicy.draw`."""
        draw = draw_rollout if self.options.gated else FlowPolicy.draw
        return draw(self, observation, deterministic=deterministic, promised=promised)
