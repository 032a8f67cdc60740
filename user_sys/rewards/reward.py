"""The interface of a reward: a stored episode in, its success and the rewards of its steps out.

Rewards of this kind become labels in the store, so that recorded data stays as it is. A task's own reward
(`hal.task.Task.evaluate`) is recorded by the robot, and a person's label has precedence over both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from hal.decode_errors import DECODE_ERRORS
from user_sys.codec import Array
from user_sys.episode import IMAGE_PREFIX, EpisodeSource
from user_sys.errors import ConfigError, DataSetError
from user_sys.interchange.episodes import StoredEpisode, is_camera
from user_sys.interchange.frames import decode_frame

FORMAT = 1  # of a reward's file


@dataclass(frozen=True)
class RewardConfig:
    """Which reward labels the episodes of a run as they end.

    Attributes:
        kind: classifier, progress, rule, vlm, or that of a package; empty: the task's own reward and people's labels.
        options: settings of the reward.
        sources: of the episodes; with demo, demonstrations get this reward too.
    """

    kind: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    sources: tuple[EpisodeSource, ...] = (EpisodeSource.ONLINE,)

    def require_replay(self, algorithm: str) -> None:
        """Raises ConfigError if it labels online episodes, of which `algorithm` uses each step once, before its label.

        Args:
            algorithm: name of one with `TrainingData.once`.
        """
        if self.kind and EpisodeSource.ONLINE in self.sources:
            raise ConfigError(
                f"rewards.kind is {self.kind}, which labels an episode after its end, and learner.algorithm is "
                f"{algorithm}, which uses each step once, before its label: remove rewards, or choose an algorithm "
                "that replays steps, such as rlpd"
            )


@dataclass(frozen=True)
class EpisodeReward:
    """What a reward finds in an episode of T steps.

    Attributes:
        success: whether it succeeded; None leaves that as it is.
        rewards: float32 (T,), of its steps; None: the last one becomes 1 for a success and 0 for a failure, if
            `success` is known, and the others stay.
        probability: that it succeeded, in [0, 1]; None if the reward has no such estimate.
        progress: float32 (T + 1,), of each observation since the first, the final one included: 0 none, 1 all of it;
            None if the reward has no such estimate.
    """

    success: bool | None
    rewards: Array | None = None
    probability: float | None = None
    progress: Array | None = None


class Reward(ABC):
    """A kind of reward that a config selects (`user_sys.plugins`). One thread calls it.

    Attributes:
        settings: the dataclass of its settings, `rewards.options`; all fields have defaults.
        is_dense: it values each step. Then it also evaluates episodes whose success a person has judged, and leaves
            their success and their last reward as they are.
    """

    settings: ClassVar[type[Any]]
    is_dense: bool = False

    @abstractmethod
    def __init__(self, settings: Any) -> None:
        """Args:
            settings: of the class `settings`.

        Raises:
            ConfigError: a setting names what cannot be used, such as a missing file.
        """

    @abstractmethod
    def evaluate(self, episode: StoredEpisode) -> EpisodeReward:
        """Evaluates a complete episode, and does not change it. Equal episodes give equal results.

        Raises:
            DataSetError: the episode lacks what the reward reads; the message names it.
        """


def cameras_of(episode: StoredEpisode) -> tuple[str, ...]:
    """The names of all cameras. Raises DataSetError: there are none."""
    names = tuple(sorted(name.removeprefix(IMAGE_PREFIX) for name in episode.frames if is_camera(name)))
    if not names:
        raise DataSetError(f"episode {episode.header.episode} has no pictures; record with cameras")
    return names


def final_pictures(episode: StoredEpisode, cameras: Sequence[str]) -> dict[str, Array]:
    """The newest picture of each camera after the last step, uint8 (h, w, 3), by the camera's name.

    Raises:
        DataSetError: the episode has no picture of a camera, or it cannot be decoded.
    """
    pictures = {}
    for camera in cameras:
        last = episode.final.get(IMAGE_PREFIX + camera)
        frame = last.tobytes() if last is not None and last.ndim == 1 else last
        if frame is None:
            frame = next((f for f in reversed(episode.frames.get(IMAGE_PREFIX + camera, ())) if f is not None), None)
        if frame is None:
            raise DataSetError(f"episode {episode.header.episode} has no picture of the camera {camera!r}")
        pictures[camera] = decode_frame(frame)
    return pictures


def side_by_side(pictures: Mapping[str, Array]) -> Array:
    """One picture, uint8 (h, w, 3), of several in order of their names; lower ones are black below."""
    height = max(picture.shape[0] for picture in pictures.values())
    padded = [np.pad(p, ((0, height - p.shape[0]), (0, 0), (0, 0))) for _, p in sorted(pictures.items())]
    return np.concatenate(padded, axis=1)


def clip_pictures(episode: StoredEpisode, cameras: Sequence[str], places: Sequence[int]) -> Iterator[dict[str, Array]]:
    """The newest picture of each camera, as `final_pictures`, before each of the steps `places`, in ascending order.

    The place `episode.steps` is after the last step.

    Raises:
        DataSetError: a camera has no picture yet at one of them, or it cannot be decoded.
    """
    newest: dict[str, Array] = {}
    first = 0
    for place in places:
        if place == episode.steps:
            yield final_pictures(episode, cameras)
            return
        for camera in cameras:
            new = [f for f in episode.frames.get(IMAGE_PREFIX + camera, ())[first : place + 1] if f is not None]
            if new:
                newest[camera] = decode_frame(new[-1])
            elif camera not in newest:
                step = (episode.first_step or 0) + place
                where = f"episode {episode.header.episode} has no picture of the camera {camera!r} at step {step}"
                raise DataSetError(where)
        first = place + 1
        yield dict(newest)


class RewardMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward's file has besides its tensors.

    Attributes:
        cameras: names of the cameras that it reads, in this order.
        tasks: names of the tasks that it was trained on; a progress model needs a success of each. Episodes of others
            stay as they are.
        temperature: divides the network's logits.
        successes, failures: episodes that it was trained on.
    """

    format: int
    cameras: tuple[str, ...]
    tasks: tuple[str, ...]
    temperature: float
    successes: int
    failures: int

    def probability(self, logit: float) -> float:
        return float(1 / (1 + np.exp(-logit / self.temperature)))


def read_metadata(path: Path, kind: str) -> RewardMetadata:
    """Reads what a reward's file has besides its tensors. Imports no torch.

    Raises ConfigError: there is no such file, or it holds no reward of this kind and version.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        how = f"user-sys reward train RUN --kind {kind} --output {path}"
        raise ConfigError(f"{path}: no such file; train a {kind}: {how}")
    try:
        with safe_open(path, framework="np") as file:
            metadata = msgspec.json.decode((file.metadata() or {})[kind], type=RewardMetadata)
    except (SafetensorError, KeyError, *DECODE_ERRORS) as error:
        raise ConfigError(f"{path} holds no {kind}: {type(error).__name__}; train it again") from None
    if metadata.format != FORMAT:
        raise ConfigError(f"{path} has {kind} format {metadata.format}, not {FORMAT}; train it again")
    return metadata
