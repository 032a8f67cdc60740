"""Batches put together from several choosers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from user_sys.codec import Array
from user_sys.episode import Source
from user_sys.errors import ConfigError
from user_sys.replay.choosers import Choice, Chooser, State, Uniform
from user_sys.replay.timeline import Timeline
from user_sys.replay.where import INTERVENTIONS, Where
from user_sys.store.index import Change


class Mix(Chooser):
    """Fixed shares of each batch from several choosers, e.g. RLPD's half and half (Ball et al. 2023, section 4.1).

    The shares are exact in every batch; what does not divide goes to the last. While one has nothing, the others take
    its place, in proportion to their shares. In a batch the parts stand one after the other.
    """

    def __init__(self, parts: Sequence[tuple[Chooser, float]]) -> None:
        """Raises ConfigError unless the shares are positive and add up to 1."""
        self._choosers = [chooser for chooser, _ in parts]
        self._shares = np.array([share for _, share in parts], float)
        if (self._shares < 0).any() or abs(self._shares.sum() - 1.0) > 1e-6:
            raise ConfigError(f"shares of {self._shares.tolist()}: they must add up to 1")

        self.hears = any(chooser.hears for chooser in self._choosers)

    def __len__(self) -> int:
        return sum(map(len, self._choosers))

    def update(self, timeline: Timeline, change: Change) -> None:
        """See `Chooser.update`."""
        for chooser in self._choosers:
            chooser.update(timeline, change)

    def counts(self, n: int) -> list[int]:
        """How many of `n` samples come from each part now."""
        open_ = np.array([len(chooser) > 0 for chooser in self._choosers])
        shares = np.where(open_, self._shares, 0.0)
        if shares.sum() == 0.0:  # only parts of share 0 have anything
            shares = open_.astype(float)
        counts = (n * shares / shares.sum() + 1e-9).astype(np.int64)
        counts[np.flatnonzero(shares)[-1]] += n - counts.sum()
        return [int(count) for count in counts]

    def choose(self, n: int, rng: np.random.Generator) -> Choice:
        """See `Chooser.choose`."""
        chosen = [
            self._of_part(part, self._choosers[part].choose(count, rng))
            for part, count in enumerate(self.counts(n))
            if count
        ]
        return Choice(*(np.concatenate(column) for column in zip(*chosen, strict=True)))

    def redraw(self, group: int, rng: np.random.Generator) -> Choice:
        """See `Chooser.redraw`: the part stays the same."""
        part, inner = group % len(self._choosers), group // len(self._choosers)
        return self._of_part(part, self._choosers[part].redraw(inner, rng))

    def _of_part(self, part: int, choice: Choice) -> Choice:
        return choice._replace(groups=choice.groups * len(self._choosers) + part)

    def feedback(self, rows: Array, groups: Array, losses: Array) -> None:
        """See `Chooser.feedback`: each part hears of its own."""
        for part, chooser in enumerate(self._choosers):
            mine = groups % len(self._choosers) == part
            if mine.any():
                chooser.feedback(rows[mine], groups[mine] // len(self._choosers), losses[mine])

    def state_dict(self, timeline: Timeline) -> State:
        """See `Chooser.state_dict`."""
        return {
            f"{part}.{name}": value
            for part, chooser in enumerate(self._choosers)
            for name, value in chooser.state_dict(timeline).items()
        }

    def load_state_dict(self, state: Mapping[str, Array], timeline: Timeline) -> None:
        """See `Chooser.load_state_dict`."""
        for part, chooser in enumerate(self._choosers):
            prefix = f"{part}."
            inner = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            chooser.load_state_dict(inner, timeline)


class DemoOnline(Mix):
    """RLPD's two halves for one embodiment.

    Online: every step of online episodes. Demo: every step of demonstrations, and the steps of online episodes in which
    a person had the robot (phase TELEOP or CORRECTION), as in HIL-SERL (Luo et al. 2024). Evaluations are in neither.
    Either side holds only what meets `only`; its ages are for the online side, what a person showed does not age.

    Attributes:
        demo, online: the two sides.
    """

    def __init__(
        self,
        embodiment: str,
        demo_fraction: float = 0.5,
        only: Where = Where(),  # noqa: B008  # frozen
    ) -> None:
        """Raises ConfigError unless `demo_fraction` lies in [0, 1]."""
        robot, online = replace(only, embodiments=frozenset({embodiment})), frozenset({Source.ONLINE})
        ageless = replace(robot, max_age_s=None, max_age_versions=None)
        persons = ageless.narrowed(online, INTERVENTIONS)
        self.demo = Uniform(ageless.narrowed(frozenset({Source.DEMO})) | persons)
        self.online = Uniform(robot.narrowed(online))
        super().__init__([(self.demo, demo_fraction), (self.online, 1.0 - demo_fraction)])
