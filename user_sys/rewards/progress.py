"""A progress model: how much nearer to its goal a robot is in one picture than in another, given the sentence.

It has the form of VLAC (Zhai et al., "A Vision-Language-Action-Critic Model for Robotic Real-World Reinforcement
Learning", arXiv 2509.15937): from pairs of pictures of one successful episode, a network learns

    c(o_i, o_j, sentence) = (j - i) / T,

signed: pairs in reverse order are negative. Pairs of one picture, and pairs with the sentence of another task, have
c = 0. A second head learns whether o_j shows the goal reached; failed episodes and wrong sentences are its negatives.

A step's reward is the progress that it adds, c(o_0, o_t+1) - c(o_0, o_t), and 1 more at the end of a success.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from user_sys.policies.sentences import VOCABULARY, hash_words
from user_sys.rewards.networks import (
    SIZE,
    LabelledClips,
    RewardNetwork,
    load_network,
    read_clip,
    resized,
    shifted,
    to_tensor,
)
from user_sys.rewards.reward import EpisodeReward, Reward

WIDTH, CONVOLUTIONS, ENCODED = 32, 4, 128
BATCH = 64  # pairs
STATIC, WRONG, FROM_START, TO_END = 0.1, 0.25, 0.3, 0.25  # shares of pairs in a batch
FAILED = 0.3  # share of pairs of failed episodes, if there are any
WATCHES = 8  # evaluations in the steps that `ProgressWatch` compares


@dataclass(frozen=True)
class ProgressSettings:
    """Settings of the progress model.

    Attributes:
        model: the file that `user-sys reward train --kind progress` wrote.
        threshold: least probability of a success.
        dense: reward each step by the progress that it adds; otherwise only the last step's reward changes.
    """

    model: Path = Path("reward.safetensors")
    threshold: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    dense: bool = True


class ProgressNet(RewardNetwork):
    """Encodes pictures with a sentence, and compares two. Words scale and shift features (FiLM, Perez et al., 2018)."""

    kind, pictures, needs_failures = "progress", 24, False

    def __init__(self, cameras: int) -> None:
        super().__init__(cameras)
        widths = (3, *[WIDTH] * CONVOLUTIONS)
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.scales = nn.Linear(WIDTH, 2 * WIDTH * CONVOLUTIONS)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1) for before, after in zip(widths, widths[1:], strict=False)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, WIDTH) for _ in range(CONVOLUTIONS))
        self.join = nn.Linear(cameras * WIDTH * (SIZE >> CONVOLUTIONS) ** 2, ENCODED)
        self.progress = nn.Sequential(nn.Linear(3 * ENCODED, ENCODED), nn.ReLU(), nn.Linear(ENCODED, 1), nn.Tanh())
        self.done = nn.Sequential(nn.ReLU(), nn.Dropout(0.2), nn.Linear(ENCODED, 1))

    def encode(self, pictures: Tensor, words: Tensor) -> Tensor:
        """Pictures, float32 (n, C, 3, SIZE, SIZE) in [0, 1], and `hash_words` of their sentences, to (n, ENCODED)."""
        n, cameras = pictures.shape[:2]
        scales = self.scales(self.words(words).sum(1)).repeat_interleave(cameras, 0)
        scales = scales.view(n * cameras, CONVOLUTIONS, 2, WIDTH, 1, 1)
        x = pictures.flatten(0, 1) - 0.5
        for layer, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = functional.relu(norm(convolution(x)) * (1 + scales[:, layer, 0]) + scales[:, layer, 1])
        encoded: Tensor = self.join(x.reshape(n, -1))
        return encoded

    def compare(self, before: Tensor, after: Tensor) -> Tensor:
        """The signed progress from one encoded picture to another, (n,) in (-1, 1)."""
        progress: Tensor = self.progress(torch.cat([before, after, after - before], -1)).squeeze(-1)
        return progress

    def logits(self, encoded: Tensor) -> Tensor:
        """Of the goal reached in encoded pictures, (n,)."""
        logits: Tensor = self.done(encoded).squeeze(-1)
        return logits

    def loss(self, data: LabelledClips, rows: Sequence[int], rng: np.random.Generator) -> Tensor:
        """Of `BATCH` random pairs: squared error of progress, and cross-entropy of the goal reached."""
        failed = [row for row in rows if not data.success[row]]
        count = round(FAILED * BATCH) if failed else 0
        succeeded = rng.choice([row for row in rows if data.success[row]], BATCH - count)
        chosen = np.concatenate([succeeded, rng.choice(failed, count) if failed else succeeded[:0]])
        length = np.array([len(data.pictures[row]) - 1 for row in chosen])  # at least 1: an episode has a step
        draw = rng.random((4, BATCH))
        before = np.where(draw[0] < FROM_START, 0, rng.integers(0, length + 1))
        after = np.where(draw[1] < TO_END, length, rng.integers(0, length + 1))
        after = np.where(draw[2] < STATIC, before, after)
        others = [
            [other for other in rows if data.tasks[other] != task and data.sentences[other] != sentence]
            for task, sentence in ((data.tasks[row], data.sentences[row]) for row in chosen)
        ]
        wrong = np.array([bool(each) for each in others]) & (draw[3] < WRONG)
        sentences = [
            data.sentences[rng.choice(other) if is_wrong else row]
            for row, other, is_wrong in zip(chosen, others, wrong, strict=True)
        ]
        pairs = np.stack([data.pictures[row][[b, a]] for row, b, a in zip(chosen, before, after, strict=True)], 1)
        words = hash_words(sentences)
        pictures = shifted(to_tensor(pairs), rng)
        first, second = self.encode(pictures.flatten(0, 1), torch.cat([words, words])).chunk(2)
        success = data.success[chosen]
        known = torch.from_numpy(success | wrong | (before == after))  # the progress of a failure is not
        target = torch.from_numpy(np.where(wrong, 0.0, (after - before) / length)).float()
        error = ((self.compare(first, second) - target).square() * known).mean()
        reached = success & ~wrong & (after == length)
        clear = (after != length - 1) | ~success | wrong  # the picture before the last one may show it
        done = functional.binary_cross_entropy_with_logits(
            self.logits(second), torch.from_numpy(reached).float(), reduction="none"
        )
        return 4.0 * error + (done * torch.from_numpy(clear)).mean()

    def logit(self, clip: Array, sentence: str) -> float:
        return self.clip(clip, sentence)[1]

    @torch.no_grad()
    def clip(self, pictures: Array, sentence: str) -> tuple[Array, float]:
        """The progress of each picture since the first, float32 (k,), and the logit of success at the end.

        Args:
            pictures: uint8 (k, C, SIZE, SIZE, 3) in the order of time.
        """
        words = hash_words([sentence])
        parts = np.array_split(pictures, -(-len(pictures) // 256))
        encoded = torch.cat([self.encode(to_tensor(part), words.expand(len(part), -1)) for part in parts])
        progress = self.compare(encoded[:1].expand_as(encoded), encoded)
        return progress.numpy(), float(self.logits(encoded[-1:]))


class ProgressReward(Reward):
    """Progress and success by the model in a file."""

    settings = ProgressSettings

    def __init__(self, settings: ProgressSettings) -> None:
        self._settings, self.is_dense = settings, settings.dense
        self.metadata, self._net = load_network(settings.model, ProgressNet)

    def evaluate(self, episode: StoredEpisode) -> EpisodeReward:
        metadata = self.metadata
        if episode.header.task not in metadata.tasks:
            return EpisodeReward(None)
        pictures = read_clip(episode, metadata.cameras, episode.steps + 1)
        progress, logit = self._net.clip(pictures, episode.header.sentence)
        probability = metadata.probability(logit)
        success = probability >= self._settings.threshold
        rewards = np.diff(progress) + success * (np.arange(episode.steps) == episode.steps - 1)
        dense = rewards.astype(np.float32) if self._settings.dense else None
        return EpisodeReward(success, dense, probability, progress)


class ProgressWatch:
    """The progress that a running episode makes, by the model in a file. One thread calls it; no call waits.

    A thread of its own evaluates the newest pictures, a few times in `steps` control periods.

    Attributes:
        cameras: names of those that the model reads.
    """

    def __init__(self, model: Path, steps: int) -> None:
        """`steps`: over which progress is compared. Raises ConfigError: the file holds no progress model."""
        metadata, self._net = load_network(model, ProgressNet)
        self.cameras, self._tasks, self._steps = metadata.cameras, metadata.tasks, steps
        self._pool = ThreadPoolExecutor(1, "progress", lambda: torch.set_num_threads(1))
        self.begin_episode("", "")

    def begin_episode(self, task: str, sentence: str) -> None:
        self._sentence, self._is_known = sentence, task in self._tasks
        self._first: dict[str, Array] = {}
        self._found: list[tuple[int, float]] = []  # the progress since the episode's first picture, by step
        self._running: Future[tuple[int, float]] | None = None

    def gain(self, step: int, images: Mapping[str, Array]) -> float | None:
        """The progress from about `steps` steps before to now; None while it is not known, or for an unknown task.

        Args:
            step: grows from 0; smaller than in the call before, it begins anew.
            images: the newest of each camera, uint8 (h, w, 3).
        """
        if not self._is_known or any(camera not in images for camera in self.cameras):
            return None
        if self._found and step < self._found[-1][0]:
            self._found, self._running = [], None
        self._first = self._first or self._copies(images)
        if self._running is not None and self._running.done():
            self._found.append(self._running.result())
            self._running = None
        if self._running is None and (not self._found or step - self._found[-1][0] >= self._steps / WATCHES):
            pair = self._first, self._copies(images)
            self._running = self._pool.submit(self._evaluate, step, pair, self._sentence)
        before = [progress for at, progress in self._found if at <= self._found[-1][0] - self._steps]
        return self._found[-1][1] - before[-1] if before else None

    def _copies(self, images: Mapping[str, Array]) -> dict[str, Array]:
        return {camera: images[camera].copy() for camera in self.cameras}

    def _evaluate(self, step: int, pair: Sequence[Mapping[str, Array]], sentence: str) -> tuple[int, float]:
        clip = np.stack([np.stack([resized(images[camera]) for camera in self.cameras]) for images in pair])
        return step, float(self._net.clip(clip, sentence)[0][1])
