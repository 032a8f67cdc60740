"""Sampling from demonstrations and online experience at once."""

from __future__ import annotations

import numpy as np

from user_sys.episode import Source
from user_sys.errors import ConfigError
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.rng import SamplerRng
from user_sys.replay.rows import Batch, Features
from user_sys.replay.select import INTERVENTIONS, AnyOf, Select
from user_sys.store.store import StoreReader


class DemoOnlineMix:
    """RLPD's symmetric sampling (Ball et al. 2023, section 4.1): a fixed share of each batch from demonstrations.

    While one side holds nothing, the whole batch comes from the other. The shares are exact in every batch; an odd
    transition goes to the online side. In a batch, demonstrations stand first.
    """

    def __init__(self, demo: ReplayBuffer, online: ReplayBuffer, demo_fraction: float = 0.5, seed: int = 0) -> None:
        """Raises ConfigError unless `demo_fraction` lies in [0, 1] and both sides hold the same features."""
        if not 0.0 <= demo_fraction <= 1.0:
            raise ConfigError(f"demo_fraction is {demo_fraction}; it must lie between 0 and 1")
        if demo.features != online.features:
            raise ConfigError("demonstrations and online experience must have the same features")
        self.demo, self.online, self.demo_fraction = demo, online, demo_fraction
        self._rng = SamplerRng(seed)

    def __len__(self) -> int:
        """How many transitions can be sampled now, both sides together."""
        return len(self.demo) + len(self.online)

    def demo_share(self, n: int) -> int:
        """How many of `n` transitions come from demonstrations now."""
        if not len(self.online):
            return n
        return int(n * self.demo_fraction) if len(self.demo) else 0

    def empty_batch(self, n: int) -> Batch:
        """Arrays for a batch of `n`, to be given to `sample` again and again."""
        return Batch.empty(self.demo.features, n)

    def sample(self, n: int, rng: np.random.Generator | None = None, out: Batch | None = None) -> Batch:
        """Draws `n` transitions; as `ReplayBuffer.sample`, which says what it raises."""
        batch = self.empty_batch(n) if out is None else out
        if len(batch) != n:
            raise ValueError(f"the batch to fill has length {len(batch)}; {n} were asked for")
        generator, share = rng or self._rng.generator, self.demo_share(n)
        if share:
            self.demo.sample(share, generator, batch.part(0, share))
        if share < n:
            self.online.sample(n - share, generator, batch.part(share, n))
        return batch

    def state_dict(self) -> dict[str, str]:
        """The state of the mix's own generator; rows are rebuilt from the store."""
        return self._rng.state_dict()

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Continues the generator where `state` was taken. Raises ConfigError when it is no such state."""
        self._rng.load_state_dict(state)


class ReplayMix(DemoOnlineMix):
    """A `DemoOnlineMix` that feeds itself from a store, for one embodiment.

    Online: every step of online episodes. Demo: every step of demonstrations, and the steps of online episodes in which
    a person had the robot (phase TELEOP or CORRECTION), as in HIL-SERL (Luo et al. 2024). Evaluations are in neither.
    """

    def __init__(
        self,
        features: Features,
        embodiment: str,
        *,
        demo_rows: int = 50_000,
        online_rows: int = 500_000,
        demo_fraction: float = 0.5,
        seed: int = 0,
    ) -> None:
        """Allocates both sides. Raises ConfigError as they do."""
        robot, online = frozenset({embodiment}), frozenset({Source.ONLINE})
        interventions = Select(embodiments=robot, sources=online, phases=INTERVENTIONS)
        demonstrations = Select(embodiments=robot, sources=frozenset({Source.DEMO}))
        super().__init__(
            demo=ReplayBuffer(features, capacity_rows=demo_rows, select=AnyOf((demonstrations, interventions))),
            online=ReplayBuffer(features, capacity_rows=online_rows, select=Select(embodiments=robot, sources=online)),
            demo_fraction=demo_fraction,
            seed=seed,
        )

    def follow(self, reader: StoreReader, max_chunks: int | None = None) -> int:
        """Takes in what is new in the store, at most `max_chunks` chunks. Returns the online transitions gained.

        Raises:
            StoreError: the store cannot be read.
        """
        self.demo.follow(reader, max_chunks)
        return self.online.follow(reader, max_chunks)
