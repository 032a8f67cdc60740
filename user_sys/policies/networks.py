"""The torch modules of the built-in policies: how they read observations, and a squashed Gaussian over actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hal.spec import IMAGES, Array, ArraySpec
from user_sys.errors import ConfigError
from user_sys.policies.correction import INPUT_CLIP
from user_sys.policies.scaling import (
    LOG_STD_MAX,
    LOG_STD_MIN,
    action_affine,
    bounds_affine,
    encoded_feature,
)

Pooling = Literal["softmax", "embedding"]
GROUPS = 4  # of a group norm
EMBEDDINGS = 8  # of a spatial embedding, for each channel
SMALL_WIDTH = 32
RESNET_WIDTHS = (64, 128, 256, 512)
IMITATED_MAX = 0.97  # a deviation is fitted to actions at most this far from the centre: atanh(1) is infinite
DENSITY_MAX = 1.0 - 1e-6


class PictureEncoder(nn.Module):
    """Pictures uint8 (n, height, width, 3) to float32 (n, size) in [-1, 1].

    The vector ends with a layer norm and tanh, as the trunk of DrQ-v2 (Yarats et al. 2021, arXiv 2107.09645).

    Attributes:
        size: k, the length of the vector.
    """

    def __init__(
        self,
        height: int,
        width: int,
        *,
        backbone: nn.Module,
        pooling: Pooling = "softmax",
        size: int,
        shift: int,
    ) -> None:
        """Args:
        backbone: scaled pictures (n, 3, height, width) to maps of features (n, c, h, w).
        shift: in training mode each picture is moved by up to so many pixels; see `random_shift`.

        Raises:
            ConfigError: the pictures are too small for the pooling.
        """
        super().__init__()
        self.size, self._shift = size, shift
        self.backbone = backbone
        with torch.no_grad():
            channels, rows, columns = self.backbone(torch.zeros(1, 3, height, width)).shape[1:]
        if pooling == "softmax" and rows * columns == 1:
            raise ConfigError(
                f"policy.options.pooling is softmax, which needs several places, and pictures of {width}x{height} give "
                "one: set embedding, or larger pictures"
            )
        self.pool = SpatialSoftmax(rows, columns) if pooling == "softmax" else SpatialEmbedding(channels, rows, columns)
        self.project = nn.Linear(channels * (2 if pooling == "softmax" else EMBEDDINGS), size)
        self.norm = nn.LayerNorm(size)

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self._shift:
            images = random_shift(images, self._shift)
        return self.encode(images)

    def encode(self, images: Tensor) -> Tensor:
        """As `forward`, without random shift."""
        x = images.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)  # channels stay last in memory, which is fast
        return torch.tanh(self.norm(self.project(self.pool(self.backbone(x)))))


def random_shift(images: Tensor, pixels: int) -> Tensor:
    """Moves each of `images`, uint8 (n, h, w, c), by up to `pixels` along both axes; edge pixels repeat.

    The augmentation of DrQ (Kostrikov et al. 2020, arXiv 2004.13649).
    """
    n, height, width = images.shape[:3]
    dy, dx = torch.randint(-pixels, pixels + 1, (2, n, 1), device=images.device)
    rows = (torch.arange(height, device=images.device) + dy).clamp_(0, height - 1)
    columns = (torch.arange(width, device=images.device) + dx).clamp_(0, width - 1)
    return images[torch.arange(n, device=images.device)[:, None, None], rows[:, :, None], columns[:, None, :]]


class SpatialSoftmax(nn.Module):
    """Returns the expected place (x, y) of each channel's activation, (n, 2c), each in [-1, 1] (Levine et al. 2016)."""

    grid: Tensor

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        y, x = torch.meshgrid(torch.linspace(-1, 1, rows), torch.linspace(-1, 1, columns), indexing="ij")
        self.register_buffer("grid", torch.stack([x.flatten(), y.flatten()], -1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(2).softmax(-1) @ self.grid).flatten(1)


class SpatialEmbedding(nn.Module):
    """Weighs each channel by learned maps of places, (n, EMBEDDINGS * c), as in SERL (Luo et al. 2024)."""

    def __init__(self, channels: int, rows: int, columns: int) -> None:
        super().__init__()
        self.maps = nn.Parameter(torch.randn(channels, rows * columns, EMBEDDINGS) / (rows * columns) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ncp,cpe->nce", x.flatten(2), self.maps).flatten(1)


def small_backbone() -> nn.Module:
    """Four convolutions; pictures (n, 3, h, w) to (n, 32, h/4, w/4)."""
    layers: list[nn.Module] = []
    before = 3
    for stride in (2, 2, 1, 1):
        layers += [nn.Conv2d(before, SMALL_WIDTH, 3, stride, 1), nn.ReLU()]
        before = SMALL_WIDTH
    return nn.Sequential(*layers[:-1])


def resnet10() -> nn.Module:
    """ResNet-10 with group norm: pictures (n, 3, h, w) to (n, 512, h/32, w/32) (He et al. 2016; Wu and He 2018)."""
    first = RESNET_WIDTHS[0]
    layers = [nn.Conv2d(3, first, 7, 2, 3, bias=False), nn.GroupNorm(GROUPS, first), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = first
    for stage, width in enumerate(RESNET_WIDTHS):
        layers.append(ResidualBlock(before, width, 2 if stage else 1))
        before = width
    return nn.Sequential(*layers)


class ResidualBlock(nn.Module):
    """Two convolutions next to a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.GroupNorm(GROUPS, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.GroupNorm(GROUPS, width),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and before == width
            else nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.GroupNorm(GROUPS, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.residual(x) + self.shortcut(x))


class Affine(nn.Module):
    """Constants that scale a vector."""

    def __init__(self, *, persistent: bool = True, **buffers: Array) -> None:
        """`persistent`: whether they are part of the weights."""
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, torch.from_numpy(value), persistent=persistent)


class ObservationNetwork(nn.Module):
    """Reads vectors and pictures, and scales actions: what the modules of all policies share.

    Attributes:
        features, cameras: names of the vectors and of the cameras that `encode` reads.
        observation_size: width of `encode`.
        action_size: elements of an action.
        encoder: the encoders of pictures, by camera.
        pretrain_updates: updates at the start that clone the demonstrations.
        frozen_from: number of the update from which the encoder of pictures never changes; -1: always trained.
    """

    input: Any
    action: Any

    def __init__(
        self,
        specs: Sequence[ArraySpec],
        action: ArraySpec,
        pictures: Mapping[str, PictureEncoder] | None = None,
        *,
        pretrain_updates: int = 0,
        frozen_from: int = -1,
        saves_constants: bool = True,
    ) -> None:
        """Args:
        pictures: an encoder for each camera; none for a policy of vectors.
        saves_constants: what scales vectors and actions is part of the weights.
        """
        super().__init__()
        pictures = pictures or {}
        self.features, self.cameras = tuple(each.name for each in specs), tuple(pictures)
        self.pretrain_updates, self.frozen_from = pretrain_updates, frozen_from
        (offset, scale), (centre, half) = bounds_affine(specs), action_affine(action)
        self.input = Affine(persistent=saves_constants, offset=offset, scale=scale)
        self.action = Affine(persistent=saves_constants, centre=centre, scale=half)
        self.encoder = nn.ModuleDict(pictures)
        self.observation_size = len(offset) + sum(encoder.size for encoder in pictures.values())
        self.action_size = len(centre)

    def encode(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Returns the scaled vectors with the encoded pictures, float32 (n, observation_size).

        A camera's picture is `IMAGES` + its name, uint8 (n, h, w, 3), shifted at random while the module is in training
        mode. If the observation has `encoded_feature` of the camera, (n, k), that replaces the picture.
        """
        x = self.scale_vectors(observation)
        return torch.cat([x, *(self._encoded(camera, observation) for camera in self.cameras)], -1)

    def scale_vectors(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Returns the scaled vectors, float32 (n, k); k is 0 for a policy that reads only pictures."""
        if not self.features:
            none: Tensor = self.input.offset.new_empty(len(next(iter(observation.values()))), 0)
            return none
        x = torch.cat([observation[name] for name in self.features], -1)
        return x.sub_(self.input.offset).mul_(self.input.scale).clamp_(-INPUT_CLIP, INPUT_CLIP)

    def _encoded(self, camera: str, observation: Mapping[str, Tensor]) -> Tensor:
        encoded = observation.get(encoded_feature(camera))
        return self.encoder[camera](observation[IMAGES + camera]) if encoded is None else encoded

    @torch.no_grad()
    def encode_images(self, camera: str, images: Tensor) -> Tensor:
        """Returns the encoded pictures, float32 (n, k), of `images`, uint8 (n, h, w, 3), without random shift."""
        encoder = self.encoder[camera]
        assert isinstance(encoder, PictureEncoder)
        return encoder.encode(images)

    def scale_action(self, action: Tensor) -> Tensor:
        """Maps actions (..., a) from the spec's units to [-1, 1]."""
        scaled: Tensor = (action - self.action.centre) / self.action.scale
        return scaled.clamp_(-1.0, 1.0)

    def unscale_action(self, scaled: Tensor) -> Tensor:
        """Maps actions (..., a) from [-1, 1] to the spec's units."""
        action: Tensor = self.action.centre + self.action.scale * scaled
        return action


class GaussianNetwork(ObservationNetwork):
    """A squashed Gaussian over actions; a `user_sys.algorithms.algorithm.GaussianPolicy`.

    A discrete gripper is at -1 or 1, the sign of its Gaussian of deviation 1, so that P(1) = Phi(mean).
    """

    def __init__(
        self,
        specs: Sequence[ArraySpec],
        action: ArraySpec,
        hidden: Sequence[int],
        pictures: Mapping[str, PictureEncoder] | None = None,
        *,
        pretrain_updates: int = 0,
        frozen_from: int = -1,
        gripper: int = -1,
    ) -> None:
        """Args:
        hidden: widths of the layers after `encode`; see `ObservationNetwork` for the others.
        gripper: index of the action's discrete gripper element; -1 for none.
        """
        super().__init__(specs, action, pictures, pretrain_updates=pretrain_updates, frozen_from=frozen_from)
        self._gripper = gripper
        widths = (self.observation_size, *hidden)
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in zip(widths, widths[1:], strict=False))
        self.mean, self.log_std = (nn.Linear(widths[-1], self.action_size) for _ in range(2))
        for layer in (*self.hidden, self.mean, self.log_std):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (mean, log_std) before squashing, each (n, a), for encoded observations `x`."""
        x = self._trunk(x)
        return self.mean(x), self._log_std(x)

    def _log_std(self, h: Tensor) -> Tensor:
        log_std: Tensor = self.log_std(h).clamp(LOG_STD_MIN, LOG_STD_MAX)
        return self._with_gripper(log_std, lambda: torch.zeros_like(log_std))

    def _with_gripper(self, values: Tensor, discrete: Callable[[], Tensor]) -> Tensor:
        """Returns `values` (n, a); those of a discrete gripper are from `discrete`, (n, a)."""
        if self._gripper < 0:
            return values
        at = torch.arange(self.action_size, device=values.device) == self._gripper
        return torch.where(at, discrete(), values)

    def _trunk(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return x

    def draw(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns scaled actions (n, a) at encoded observations `x`, and their log density (n,).

        Differentiable; the gradient of a discrete gripper is that of its squashed Gaussian ("straight through"), and
        that of its log density is by `drawn_log_probit`.
        """
        mean, log_std = self(x)
        action, log_prob = squash_elements(mean, log_std, noise)
        log_prob = self._with_gripper(log_prob, lambda: drawn_log_probit(mean, action))
        decided = self._with_gripper(action, lambda: action + (torch.where(action < 0, -1.0, 1.0) - action).detach())
        return decided, log_prob.sum(-1)

    def log_prob(self, x: Tensor, action: Tensor) -> Tensor:
        """Returns the log density (n,) of scaled actions (n, a) at encoded observations `x`.

        Actions beyond `DENSITY_MAX` count as there, because the density at the bounds is infinite.
        """
        mean, log_std = self(x)
        u = torch.atanh(action.clamp(-DENSITY_MAX, DENSITY_MAX))
        _, log_prob = squash_elements(mean, log_std, (u - mean) / log_std.exp())
        return self._with_gripper(log_prob, lambda: log_probit(mean, action)).sum(-1)

    def entropy(self, x: Tensor) -> Tensor:
        """Returns the entropy (n,) before squashing, in nats, at encoded observations `x`."""
        mean, log_std = self(x)
        entropy = log_std + 0.5 * math.log(2 * math.pi * math.e)
        return self._with_gripper(entropy, lambda: -expected_log_probit(mean)).sum(-1)

    def imitation_loss(self, x: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the loss (n,) that clones scaled actions (n, a) at encoded observations `x`; `mask` has no effect.

        The mean is fitted by least squares after squashing. The deviation is fitted by its likelihood around that mean,
        without effect on it (Stirn et al., "Faithful Heteroscedastic Regression with Neural Networks", AISTATS 2023).
        A discrete gripper is fitted by its likelihood alone.
        """
        h = self._trunk(x)
        mean, log_std = self.mean(h), self._log_std(h.detach())
        u = torch.atanh(action.clamp(-IMITATED_MAX, IMITATED_MAX))
        likelihood = 0.5 * ((u - mean.detach()) / log_std.exp()).square() + log_std
        loss = (torch.tanh(mean) - action).square() + likelihood
        return self._with_gripper(loss, lambda: -log_probit(mean, action)).sum(-1)


def log_probit(mean: Tensor, action: Tensor) -> Tensor:
    """Returns log Phi(mean) where `action` is positive, and else log Phi(-mean); float32, as torch has no bfloat16."""
    log_prob: Tensor = torch.special.log_ndtr(torch.where(action < 0, -mean, mean).float())
    return log_prob


def expected_log_probit(mean: Tensor) -> Tensor:
    """Returns P log P + (1 - P) log (1 - P), with P = Phi(mean): the negated entropy of a discrete gripper."""
    chances: Tensor = torch.special.log_ndtr(torch.stack([mean, -mean]).float())
    return (chances.exp() * chances).sum(0)


def drawn_log_probit(mean: Tensor, action: Tensor) -> Tensor:
    """As `log_probit`, for an `action` that was drawn at `mean`, with the gradient of its expectation over actions.

    The sign of an action passes no gradient, so that of `log_probit` lacks the change of P = Phi(mean): its own
    expectation is 0, since P + (1 - P) is constant.
    """
    expected = expected_log_probit(mean)
    return log_probit(mean, action).detach() + (expected - expected.detach())


def squash(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the action tanh(mean + std noise), (n, a), and its log density, (n,)."""
    action, log_prob = squash_elements(mean, log_std, noise)
    return action, log_prob.sum(-1)


def squash_elements(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """As `squash`, with the log density of each element, (n, a) (Haarnoja et al. 2018, appendix C)."""
    u = mean + log_std.exp() * noise
    gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    # log(1 - tanh(u)^2), in the form that stays finite for large |u|.
    log_slope = 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
    return torch.tanh(u), gaussian - log_slope
