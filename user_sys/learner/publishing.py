"""When a learner publishes, under which number, and whether it is too far ahead of the robots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from user_sys.weights.pace import PublishPace
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.snapshot import PolicySnapshot


class WeightsSink(Protocol):
    """Where versions go. `user_sys.learner.envoy.Envoy` is one."""

    def publish(self, weights: PolicySnapshot, version: int, updates: int) -> None:
        """Copies what is in host memory, has fetched what is not, and returns at once. Raises NotFinite: an earlier
        version was not.
        """

    def observe(self, seconds: float) -> None:
        """How long an update took with all that was done beside it, publishing included, for the governor."""

    @property
    def busy(self) -> bool:
        """Not now: the version before is still being made ready, or the governor has pushes pause."""

    @property
    def lead(self) -> int:
        """How many versions the slowest robot is behind."""

    def scalars(self) -> dict[str, float]:
        """For the metrics."""


class Publishing:
    """One thread calls it.

    Attributes:
        version: number of the newest version; each one gets the next.
        limit: no version gets a greater number, until a checkpoint has reserved more.
    """

    def __init__(self, config: PublishConfig, sink: WeightsSink, clock: Callable[[], float]) -> None:
        self.version = self.limit = 0
        self._config, self._sink = config, sink
        self._pace = PublishPace(config, clock)
        self._former: PolicySnapshot | None = None
        self._episodes = 0

    @property
    def out_of_numbers(self) -> bool:
        """Nothing is published before the next checkpoint."""
        return self.version >= self.limit

    @property
    def too_far_ahead(self) -> bool:
        """The learner is to wait for the robots."""
        return 0 < self._config.max_lead < self._sink.lead

    def episodes_ended(self, count: Callable[[], int]) -> None:
        """`count` tells how many episodes have ended so far; it is asked only where that matters."""
        if self._config.at_episode_ends and (episodes := count()) > self._episodes:
            self._episodes = episodes
            self._pace.episode_ended()

    def publish_if_due(
        self, updates: int, weights: Callable[[], PolicySnapshot], kl: Callable[[PolicySnapshot], float]
    ) -> None:
        """Publishes what `weights` gives, if that is due after `updates` updates and the version before is ready.

        Args:
            weights: may give the arrays that are trained: they are copied at once. A version's are asked for once.
            kl: how far the policy has moved from earlier weights: copies of such arrays, or what it gave.

        Raises:
            NotFinite: an earlier version was not.
        """

        def moved() -> float:
            return float("inf") if self._former is None else kl(self._former)

        if not self._sink.busy and self._pace.due(updates, moved):
            self.publish(updates, weights)

    def publish(self, updates: int, weights: Callable[[], PolicySnapshot]) -> None:
        """Publishes now, unless nothing was learned yet or no number is left. Raises as `publish_if_due`."""
        if not updates or self.out_of_numbers:
            return
        self.version += 1
        snapshot = weights()
        if self._config.kl > 0:
            self._former = _kept(snapshot)
        self._sink.publish(snapshot, self.version, updates)
        self._pace.published(updates)


def _kept(snapshot: PolicySnapshot) -> PolicySnapshot:
    """What the next update does not change."""
    if isinstance(snapshot, Mapping):
        return {name: array.copy() for name, array in snapshot.items()}
    return snapshot
