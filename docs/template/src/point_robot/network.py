"""The networks of the policies, in torch: an algorithm trains them, and they act in a policy server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hal.spec import IMAGES, ArraySpec, CameraSpec
from user_sys.policies.scaling import action_affine
from user_sys.policies.sentences import VOCABULARY, hash_words


class ScaledNetwork(nn.Module):
    """Maps actions (..., a) between the robot's units and [-1, 1]."""

    centre: Tensor
    half_range: Tensor

    def __init__(self, observation: Sequence[ArraySpec], action: ArraySpec) -> None:
        super().__init__()
        self.features = tuple(spec.name for spec in observation)
        for name, value in zip(("centre", "half_range"), action_affine(action), strict=True):
            self.register_buffer(name, torch.from_numpy(value))

    def scale_action(self, action: Tensor) -> Tensor:
        return (action - self.centre) / self.half_range

    def unscale_action(self, scaled: Tensor) -> Tensor:
        return self.centre + self.half_range * scaled


class TanhNetwork(ScaledNetwork):
    """Observation vectors to an action scaled to [-1, 1], float32 (n, a)."""

    def __init__(self, observation: Sequence[ArraySpec], action: ArraySpec, hidden: int) -> None:
        super().__init__(observation, action)
        inputs = sum(len(spec.labels) for spec in observation)
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, len(action.labels)))

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        scaled: Tensor = self.layers(torch.cat([observation[name] for name in self.features], -1))
        return torch.tanh(scaled)


class VlaNetwork(ScaledNetwork):
    """Pictures, a sentence and vectors to a chunk of actions: a `user_sys.algorithms.algorithm.ImitationPolicy`.

    Put your model, such as one of transformers, in the place of `encoders`, `words` and `head`.
    """

    frozen_from = -1  # no encoder of pictures ever stops to train

    def __init__(
        self,
        observation: Sequence[ArraySpec],
        cameras: Sequence[CameraSpec],
        action: ArraySpec,
        length: int,
        width: int,
    ) -> None:
        super().__init__(observation, action)
        self.cameras, self.chunk_length = tuple(camera.name for camera in cameras), length
        self.encoders = nn.ModuleDict(
            {
                name: nn.Sequential(
                    nn.Conv2d(3, 16, 5, 4, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, width)
                )
                for name in self.cameras
            }
        )
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=0)
        inputs = sum(len(spec.labels) for spec in observation) + width * (1 + len(self.cameras))
        outputs = length * len(action.labels)
        self.head = nn.Sequential(nn.Linear(inputs, 2 * width), nn.ReLU(), nn.Linear(2 * width, outputs))

    def forward(self, observation: Mapping[str, Tensor], sentences: Sequence[str]) -> Tensor:
        """Scaled chunks, float32 (n, H, a), of pictures uint8 (n, height, width, 3) and float32 vectors."""
        read = [observation[name] for name in self.features]
        read += [self.words(hash_words(sentences).to(self.centre.device)).mean(1)]
        for name, encoder in self.encoders.items():
            read.append(encoder(observation[IMAGES + name].permute(0, 3, 1, 2) / 255))
        chunks: Tensor = self.head(torch.cat(read, -1)).view(len(sentences), self.chunk_length, -1)
        return chunks

    def batch_loss(
        self, observation: Mapping[str, Tensor], sentences: Sequence[str], action: Tensor, mask: Tensor
    ) -> Tensor:
        """The loss of each sample, (n,), over the steps of its chunk that exist."""
        error = (self(observation, sentences) - self.scale_action(action)).square().mean(-1)
        return (error * mask).sum(-1) / mask.sum(-1).clamp(min=1)
