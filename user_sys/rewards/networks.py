"""What the networks of rewards share: the clips that they read, their training, and their files.

Temperature scaling (Guo et al., 2017, "On Calibration of Modern Neural Networks") calibrates their probabilities.
"""

from __future__ import annotations

import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hal.durable import replace_durably
from user_sys.codec import Array
from user_sys.errors import ConfigError, DataSetError, StoreError
from user_sys.interchange.episodes import EpisodeFilter, EpisodeReader, StoredEpisode
from user_sys.rewards.reward import FORMAT, RewardMetadata, cameras_of, clip_pictures, read_metadata
from user_sys.store.index import EpisodeSummary
from user_sys.store.labels import REWARD_PREFIX
from user_sys.store.store import StoreReader

SIZE = 64  # pixels of a network's input, in both directions
SHIFT = 4  # pixels: random shift while training
MIN_EACH = 5  # successes, and failures, to train on
PARTS = 10  # of the episodes, by the hash of their names: 0 and 1 for audits, 2 for the temperature, the others train
AUDIT_PARTS, TEMPERATURE_PART = (0, 1), 2

log = logging.getLogger(__name__)

Network = TypeVar("Network", bound="RewardNetwork")


@dataclass(frozen=True)
class LabelledClips:
    """n labelled episodes as pictures.

    Attributes:
        episodes, tasks, sentences: of each.
        pictures: of each, uint8 (k, C, SIZE, SIZE, 3), evenly spaced in time up to the end.
        success: bool (n,).
        cameras: names.
        unusable: other labelled episodes, that lack a picture of a camera or cannot be read.
    """

    episodes: list[str]
    tasks: list[str]
    sentences: list[str]
    pictures: list[Array]
    success: Array
    cameras: tuple[str, ...]
    unusable: int = 0

    def part(self, parts: Sequence[int]) -> list[int]:
        """The episodes that belong to these of the `PARTS`."""
        return [number for number, episode in enumerate(self.episodes) if part_of(episode) in parts]


class RewardNetwork(nn.Module, ABC):
    """A network that learns success, and maybe more, from labelled clips.

    Attributes:
        kind: of the reward.
        pictures: of an episode that it trains on, at most.
        needs_failures: whether it cannot be trained on successes alone.
    """

    kind: ClassVar[str]
    pictures: ClassVar[int]
    needs_failures: ClassVar[bool]

    def __init__(self, cameras: int) -> None:
        """`cameras`: how many it reads; subclasses build their layers."""
        super().__init__()

    @abstractmethod
    def loss(self, data: LabelledClips, rows: Sequence[int], rng: np.random.Generator) -> Tensor:
        """The loss on a random batch of the episodes `rows`."""

    @abstractmethod
    def logit(self, clip: Array, sentence: str) -> float:
        """Of success at the end of a clip, uint8 (k, C, SIZE, SIZE, 3)."""


def part_of(episode: str) -> int:
    """The part to which an episode belongs, always the same."""
    return zlib.crc32(episode.encode()) % PARTS


def labelled_episodes(reader: EpisodeReader, task: str = "") -> list[EpisodeSummary]:
    """The complete episodes whose success is known, unless a reward has labelled it.

    Args:
        task: only its episodes; by default of all tasks.

    Raises:
        DataSetError: no episode matches.
    """
    return [
        episode
        for episode in reader.select(EpisodeFilter(tasks=(task,) if task else ()))
        if episode.success is not None and not episode.reward_source.startswith(REWARD_PREFIX)
    ]


def read_clip(episode: StoredEpisode, cameras: Sequence[str], most: int) -> Array:
    """At most so many pictures of an episode, evenly spaced up to its end, uint8 (k, C, SIZE, SIZE, 3).

    Raises:
        DataSetError: the episode has no picture of a camera at one of these steps.
    """
    places = np.unique(np.linspace(episode.steps, 0, min(most, episode.steps + 1)).round().astype(int)).tolist()
    clip = clip_pictures(episode, cameras, places)
    return np.stack([np.stack([resized(pictures[camera]) for camera in cameras]) for pictures in clip])


def read_labelled_clips(store: StoreReader, most: int, cameras: Sequence[str] = (), task: str = "") -> LabelledClips:
    """The clips of the `labelled_episodes` that have pictures, each of the steps that its trim keeps.

    Args:
        most: pictures of a clip.
        cameras: by default all of the first episode that has any.
        task: only its episodes; by default of all tasks.

    Raises:
        DataSetError, StoreError: no episode matches, or none of them can be used.
    """
    reader, names, unusable = EpisodeReader(store, trimmed=True), tuple(cameras), list[DataSetError | StoreError]()
    chosen, pictures, sentences = list[EpisodeSummary](), list[Array](), list[str]()
    for summary in labelled_episodes(reader, task):
        try:
            episode = reader.read(summary.episode)
            names = names or cameras_of(episode)
            clip = read_clip(episode, names, most)
        except (DataSetError, StoreError) as error:
            unusable.append(error)
            log.warning("reward.unusable %s", error)
            continue
        chosen.append(summary)
        pictures.append(clip)
        sentences.append(episode.header.sentence)
    if unusable and not chosen:
        raise unusable[0]
    ids, tasks = [summary.episode for summary in chosen], [summary.task for summary in chosen]
    success = np.array([bool(summary.success) for summary in chosen], bool)
    return LabelledClips(ids, tasks, sentences, pictures, success, names, len(unusable))


def resized(picture: Array) -> Array:
    """`picture`, uint8 (h, w, 3), as uint8 (SIZE, SIZE, 3)."""
    if picture.shape[:2] == (SIZE, SIZE):
        return picture
    tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float()
    small = functional.interpolate(tensor, (SIZE, SIZE), mode="bilinear", antialias=True)
    resized: Array = small[0].permute(1, 2, 0).round().clamp(0, 255).byte().numpy()
    return resized


def to_tensor(pictures: Array) -> Tensor:
    """uint8 (..., SIZE, SIZE, 3) as float32 (..., 3, SIZE, SIZE) in [0, 1]."""
    return torch.from_numpy(np.array(pictures)).movedim(-1, -3).float() / 255.0


def shifted(pictures: Tensor, rng: np.random.Generator) -> Tensor:
    """Shifts the whole batch at random, with edges repeated (Kostrikov et al., 2020)."""
    x, y = rng.integers(0, 2 * SHIFT + 1, 2)
    padded = functional.pad(pictures.flatten(0, -4), [SHIFT] * 4, mode="replicate")
    return padded[..., y : y + SIZE, x : x + SIZE].reshape(pictures.shape)


def train_network(
    make: type[Network],
    data: LabelledClips,
    updates: int,
    seed: int = 0,
    advance: Callable[[int], object] = lambda done: None,
) -> tuple[Network, RewardMetadata]:
    """Trains on the episodes that are neither for audits nor for the temperature.

    Raises:
        DataSetError: there are fewer than `MIN_EACH` successes, or failures if it needs these, to train on.
    """
    kept = {*data.part((*AUDIT_PARTS, TEMPERATURE_PART))}
    rows = [number for number in range(len(data.episodes)) if number not in kept]
    successes = int(data.success[rows].sum())
    failures = len(rows) - successes
    if min(successes, failures if make.needs_failures else successes) < MIN_EACH:
        raise DataSetError(
            f"{successes} successes and {failures} failures to train on, and at least {MIN_EACH} "
            f"{'of each' if make.needs_failures else 'successes'} are needed: record and label more episodes "
            "(three tenths are kept for calibration and audits)"
        )
    torch.manual_seed(seed)
    rng, net = np.random.default_rng(seed), make(len(data.cameras))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, updates))
    net.train()
    for _ in range(updates):
        optimizer.zero_grad()
        net.loss(data, rows, rng).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        advance(1)
    metadata = RewardMetadata(
        format=FORMAT,
        cameras=data.cameras,
        tasks=tuple(sorted({data.tasks[row] for row in rows if make.needs_failures or data.success[row]})),
        temperature=_fit_temperature(net.eval(), data),
        successes=successes,
        failures=failures,
    )
    return net, metadata


def _fit_temperature(net: RewardNetwork, data: LabelledClips) -> float:
    """The divisor of logits with the least loss (Guo et al., 2017) on the episodes that are kept for it; 1 without
    a success and a failure.
    """
    rows = data.part((TEMPERATURE_PART,))
    logits, success = np.array([net.logit(data.pictures[row], data.sentences[row]) for row in rows]), data.success[rows]
    if success.all() or not success.any():
        return 1.0

    def loss(temperature: float) -> float:
        p = (1 / (1 + np.exp(-logits / temperature))).clip(1e-6, 1 - 1e-6)
        return float(-np.where(success, np.log(p), np.log(1 - p)).mean())

    return float(min(np.geomspace(1.0, 8.0, 25), key=loss))


# Files ----------------------------------------------------------------------------------------------------------------


def save_network(path: Path, net: RewardNetwork, metadata: RewardMetadata) -> None:
    """Writes a reward, atomically and durably. Raises OSError."""
    from safetensors.numpy import save

    tensors = {name: np.array(tensor.detach().numpy()) for name, tensor in net.state_dict().items()}
    replace_durably(path, save(tensors, {net.kind: msgspec.json.encode(metadata).decode()}))


def load_network(path: Path, make: type[Network]) -> tuple[RewardMetadata, Network]:
    """Reads a reward. Raises ConfigError: there is no such file, or it holds no reward of this kind and version."""
    from safetensors import SafetensorError, safe_open

    metadata = read_metadata(path, make.kind)
    try:
        with safe_open(path, framework="pt") as file:
            tensors: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        net = make(len(metadata.cameras))
        net.load_state_dict(tensors)
    except (SafetensorError, RuntimeError) as error:
        raise ConfigError(f"{path} holds no {make.kind}: {type(error).__name__}; train it again") from None
    return metadata, net.eval()
