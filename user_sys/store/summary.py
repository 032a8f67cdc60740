"""What an index says about each episode as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from user_sys.codec import Array
from user_sys.episode import Phase, Source
from user_sys.store.index import Index
from user_sys.store.labels import Label, SuccessLabel, in_effect


class EpisodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One episode as far as it is stored.

    Attributes:
        success: what a person said last, else what the episode's end says; None where nobody knows.
        episode_return: sum of the rewards stored.
        intervention_steps: steps in phase TELEOP or CORRECTION.
        policy_versions: lowest and highest version that acted; (-1, -1) where no policy did.
        complete: its end and all chunks before it are stored.
        labelled_by: the person whose label decided `success`; empty where none did.
        deleted: a label says that it is not to be used; its space may be taken.
    """

    episode: str
    robot: str
    embodiment: str
    task: str
    source: Source
    started_unix_ns: int
    steps: int
    chunks: int
    size_bytes: int
    success: bool | None
    episode_return: float
    intervention_steps: int
    policy_versions: tuple[int, int]
    complete: bool
    labelled_by: str = ""
    deleted: bool = False


def summarise_episodes(index: Index) -> list[EpisodeSummary]:
    """Every episode of `index`, in the order of their first chunks. Looks at each step once."""
    episodes, steps = index.episodes, index.steps
    owner = index.episode_of(np.arange(len(steps)))
    returns = np.bincount(owner, steps.reward, len(episodes))
    by_hand = np.bincount(owner, intervened(steps.phase), len(episodes))
    low, high = _version_range(owner, steps.policy_version, len(episodes))
    return [
        EpisodeSummary(
            episode=name,
            robot=episodes.robots.names[episodes.robot[row]],
            embodiment=episodes.embodiments.names[episodes.embodiment[row]],
            task=episodes.tasks.names[episodes.task[row]],
            source=Source(episodes.sources.names[episodes.source[row]]),
            started_unix_ns=int(episodes.started_unix_ns[row]),
            steps=int(episodes.steps[row]),
            chunks=int(episodes.chunks[row]),
            size_bytes=int(episodes.size_bytes[row]),
            success=None if episodes.success[row] < 0 else bool(episodes.success[row]),
            episode_return=float(returns[row]),
            intervention_steps=int(by_hand[row]),
            policy_versions=(int(low[row]), int(high[row])),
            complete=bool(episodes.complete[row]),
            labelled_by=_labeller(index.labels(name)),
            deleted=bool(episodes.deleted[row]),
        )
        for row, name in enumerate(episodes.ids.names)
    ]


def intervened(phase: Array) -> Array:
    """Whether a person had the robot to show how it is done: bool, as `phase`."""
    shown: Array = np.isin(phase, (Phase.TELEOP, Phase.CORRECTION))
    return shown


def _version_range(owner: Array, versions: Array, episodes: int) -> tuple[Array, Array]:
    acted = versions >= 0
    low, high = np.full(episodes, np.iinfo(np.int64).max), np.full(episodes, -1)
    np.minimum.at(low, owner[acted], versions[acted])
    np.maximum.at(high, owner[acted], versions[acted])
    return np.minimum(low, high), high


def _labeller(labels: Sequence[Label]) -> str:
    return next((label.labeller for label in reversed(in_effect(labels)) if isinstance(label, SuccessLabel)), "")
