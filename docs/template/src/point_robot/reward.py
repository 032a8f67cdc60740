"""A reward: an episode succeeded if the joints were close to upright after its last step; each step costs a little."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hal.spec import STATE
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import StoredEpisode
from user_sys.rewards.reward import EpisodeReward, Reward


@dataclass(frozen=True)
class SwiftSettings:
    """`upright_rad`: greatest angle of a success. `cost`: of each step."""

    upright_rad: float = 0.1
    cost: float = 0.01


class SwiftReward(Reward):
    """See the module."""

    settings = SwiftSettings

    def __init__(self, settings: SwiftSettings) -> None:
        self._settings = settings

    def evaluate(self, episode: StoredEpisode) -> EpisodeReward:
        if STATE not in episode.final:
            raise DataSetError(f"episode {episode.header.episode} has no {STATE} after its last step")
        success = bool(np.abs(episode.final[STATE]).max() <= self._settings.upright_rad)
        rewards = np.full(episode.steps, -self._settings.cost, np.float32)
        rewards[-1] += success
        return EpisodeReward(success, rewards)
