"""An image classifier of success: a small convolutional network on the pictures after an episode's last step.

It is trained on episodes whose success is labelled, by a rule or by a person.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional

from user_sys.codec import Array
from user_sys.interchange.episodes import StoredEpisode
from user_sys.rewards.networks import SIZE, LabelledClips, RewardNetwork, load_network, read_clip, shifted, to_tensor
from user_sys.rewards.reward import EpisodeReward, Reward

CHANNELS = 32
BATCH = 64


@dataclass(frozen=True)
class ClassifierSettings:
    """Settings of the classifier.

    Attributes:
        model: the file that `user-sys reward train` wrote.
        threshold: least probability of a success.
        unsure: an episode whose probability differs less from the threshold stays as it is, for a person.
    """

    model: Path = Path("reward.safetensors")
    threshold: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    unsure: Annotated[float, Meta(ge=0, lt=1)] = 0.0


class SuccessNet(RewardNetwork):
    """Pictures of C cameras, float32 (n, C, 3, SIZE, SIZE) in [0, 1], to the logit of success, (n,)."""

    kind, pictures, needs_failures = "classifier", 1, True

    def __init__(self, cameras: int) -> None:
        super().__init__(cameras)
        widths = (3, *[CHANNELS] * 4)
        layers: list[nn.Module] = []
        for before, after in zip(widths, widths[1:], strict=False):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Sequential(
            nn.Linear(cameras * CHANNELS * (SIZE // 16) ** 2, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)
        )

    def forward(self, pictures: Tensor) -> Tensor:
        n, cameras = pictures.shape[:2]
        features = self.features(pictures.flatten(0, 1) - 0.5).view(n, -1)
        logit: Tensor = self.head(features).squeeze(-1)
        return logit

    def loss(self, data: LabelledClips, rows: Sequence[int], rng: np.random.Generator) -> Tensor:
        chosen = rng.choice(rows, min(BATCH, len(rows)), replace=False)
        pictures = shifted(to_tensor(np.stack([data.pictures[row][-1] for row in chosen])), rng)
        target = torch.from_numpy(data.success[chosen]).float()
        return functional.binary_cross_entropy_with_logits(self(pictures), target)

    @torch.no_grad()
    def logit(self, clip: Array, sentence: str) -> float:
        return float(self(to_tensor(clip[-1:]))[0])


class ClassifierReward(Reward):
    """Success by the classifier in a file."""

    settings = ClassifierSettings

    def __init__(self, settings: ClassifierSettings) -> None:
        self._settings = settings
        self.metadata, self._net = load_network(settings.model, SuccessNet)

    def evaluate(self, episode: StoredEpisode) -> EpisodeReward:
        if episode.header.task not in self.metadata.tasks:
            return EpisodeReward(None)
        clip = read_clip(episode, self.metadata.cameras, 1)
        probability = self.metadata.probability(self._net.logit(clip, episode.header.sentence))
        distance = probability - self._settings.threshold
        success = None if abs(distance) < self._settings.unsure else distance >= 0
        return EpisodeReward(success, probability=probability)
