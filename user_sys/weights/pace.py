"""When the learner publishes."""

from __future__ import annotations

from collections.abc import Callable

from user_sys.weights.publisher import PublishConfig

KL_EVERY_UPDATES = 10  # measuring how far the policy has moved costs a forward pass


class PublishPace:
    """Says when the next version is due. One thread calls it."""

    def __init__(self, config: PublishConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._next_s = clock()
        self._updates = self._measured = 0
        self._episode_ended = False

    def episode_ended(self) -> None:
        self._episode_ended = True

    def due(self, updates: int, moved: Callable[[], float]) -> bool:
        """Whether to publish after `updates` updates in all.

        Args:
            moved: measures how far the policy has moved since the last version; called now and then, where it matters.
        """
        config, since = self._config, updates - self._updates
        if since <= 0:
            return False
        return (
            (config.every_s > 0 and self._clock() >= self._next_s)
            or 0 < config.every_updates <= since
            or (config.at_episode_ends and self._episode_ended)
            or (config.kl > 0 and self._kl_due(updates) and moved() >= config.kl)
        )

    def published(self, updates: int) -> None:
        self._updates = self._measured = updates
        self._next_s = self._clock() + self._config.every_s
        self._episode_ended = False

    def _kl_due(self, updates: int) -> bool:
        if updates - self._measured < KL_EVERY_UPDATES:
            return False
        self._measured = updates
        return True
