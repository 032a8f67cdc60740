"""What a sample is, from the row that it starts at: n steps of transition, a chunk of actions, a stretch of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from user_sys.codec import Array
from user_sys.errors import ConfigError
from user_sys.replay.batch import ActionChunkBatch, Batch, SequenceBatch, TransitionBatch, columns
from user_sys.replay.features import ACTION, Allocate, Features
from user_sys.replay.timeline import Timeline

B = TypeVar("B", bound=Batch)


class Fetch(NamedTuple):
    """Observations to be fetched into a batch.

    Attributes:
        numbers: int64 (m,); as many for each sample, sample after sample.
        out: feature or `ACTION` to (m, ...).
    """

    numbers: Array
    out: dict[str, Array]


class Shape(ABC, Generic[B]):
    """Makes batches of one kind. Frozen; any thread may call it."""

    @abstractmethod
    def empty(self, features: Features, n: int, allocate: Allocate = np.empty) -> B:
        """Uninitialised arrays for `n` samples."""

    @abstractmethod
    def plan(self, timeline: Timeline, batch: B) -> list[Fetch]:
        """Fills in what the index knows about the samples at ``batch.row``; returns what is to be fetched."""


@dataclass(frozen=True)
class Transitions(Shape[TransitionBatch]):
    """Transitions of `steps` steps, fewer where the episode ends before or is not stored further yet.

    The reward is sum_k discount^k r_k and the discount to bootstrap with discount^(steps taken).
    """

    steps: int = 1
    discount: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0.0 <= self.discount <= 1.0:
            raise ConfigError(f"{self.steps} steps with discount {self.discount}: at least 1, and between 0 and 1")

    def empty(self, features: Features, n: int, allocate: Allocate = np.empty) -> TransitionBatch:
        """See `Shape.empty`."""
        return TransitionBatch(
            **columns(features, n, None, allocate),
            next_observation=features.observations((n,), allocate),
            action=allocate((n, features.action_size), "float32"),
            reward=allocate((n,), "float32"),
            discount=allocate((n,), "float32"),
            terminated=allocate((n,), "bool"),
        )

    def plan(self, timeline: Timeline, batch: TransitionBatch) -> list[Fetch]:
        """See `Shape.plan`."""
        steps, last = timeline.index.steps, batch.row.copy()
        _common(timeline, batch)
        batch.reward[:] = steps.reward[last]
        batch.discount[:] = self.discount
        going = np.arange(len(last))
        for _ in range(1, self.steps):
            going, successor = _continuing(timeline, going, last[going])
            last[going] = successor
            batch.reward[going] += batch.discount[going] * steps.reward[successor]
            batch.discount[going] *= np.float32(self.discount)
        batch.terminated[:] = steps.terminated[last]
        return [
            Fetch(timeline.observation(batch.row), {**batch.observation, ACTION: batch.action}),
            Fetch(timeline.following(last), batch.next_observation),
        ]


@dataclass(frozen=True)
class ActionChunks(Shape[ActionChunkBatch]):
    """The observation at a step and the actions of that step and those after it, `length` in all."""

    length: int

    def empty(self, features: Features, n: int, allocate: Allocate = np.empty) -> ActionChunkBatch:
        """See `Shape.empty`."""
        return ActionChunkBatch(
            **columns(features, n, None, allocate),
            action=allocate((n, self.length, features.action_size), "float32"),
            mask=allocate((n, self.length), "bool"),
        )

    def plan(self, timeline: Timeline, batch: ActionChunkBatch) -> list[Fetch]:
        """See `Shape.plan`."""
        _common(timeline, batch)
        rows = _stretch(timeline, batch.row, batch.mask)
        action = batch.action.reshape(-1, batch.action.shape[-1])
        return [
            Fetch(timeline.observation(batch.row), batch.observation),
            Fetch(timeline.observation(rows.reshape(-1)), {ACTION: action}),
        ]


@dataclass(frozen=True)
class Sequences(Shape[SequenceBatch]):
    """Stretches of `length` steps, for recurrent and video models."""

    length: int

    def empty(self, features: Features, n: int, allocate: Allocate = np.empty) -> SequenceBatch:
        """See `Shape.empty`."""
        return SequenceBatch(
            **columns(features, n, self.length, allocate),
            action=allocate((n, self.length, features.action_size), "float32"),
            reward=allocate((n, self.length), "float32"),
            terminated=allocate((n, self.length), "bool"),
            mask=allocate((n, self.length), "bool"),
        )

    def plan(self, timeline: Timeline, batch: SequenceBatch) -> list[Fetch]:
        """See `Shape.plan`."""
        _common(timeline, batch)
        steps, rows = timeline.index.steps, _stretch(timeline, batch.row, batch.mask)
        batch.reward[:] = steps.reward[rows]
        batch.terminated[:] = steps.terminated[rows]
        flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in batch.observation.items()}
        action = batch.action.reshape(-1, batch.action.shape[-1])
        return [Fetch(timeline.observation(rows.reshape(-1)), {**flat, ACTION: action})]


def _common(timeline: Timeline, batch: Batch) -> None:
    steps = timeline.index.steps
    batch.phase[:] = steps.phase[batch.row]
    batch.policy_version[:] = steps.policy_version[batch.row]


def _continuing(timeline: Timeline, places: Array, rows: Array) -> tuple[Array, Array]:
    """Those of `places` whose episode goes on after their row, with a step that is stored with what followed it.

    Returns them and the rows of those steps.
    """
    steps, successor = timeline.index.steps, timeline.successor(rows)
    goes_on = (successor >= 0) & ~steps.terminated[rows] & ~steps.truncated[rows]
    goes_on[goes_on] = timeline.following(successor[goes_on]) >= 0
    return places[goes_on], successor[goes_on]


def _stretch(timeline: Timeline, rows: Array, mask: Array) -> Array:
    """The rows from `rows` (n,) on, int64 (n, L); after the end the last one again. Fills `mask`, bool (n, L)."""
    stretch = np.repeat(rows[:, None], mask.shape[1], axis=1)
    mask[:] = False
    mask[:, 0] = True
    going = np.arange(len(rows))
    for step in range(1, mask.shape[1]):
        going, successor = _continuing(timeline, going, stretch[going, step])
        stretch[going, step:] = successor[:, None]
        mask[going, step] = True
    return stretch
