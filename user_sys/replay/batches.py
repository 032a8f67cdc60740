"""Batches: the features of a step, the numbering of observations, batch arrays, and the builders that fill them.

An episode of T steps has T + 1 observations: one before each step and the final one. Observations are numbered in
storage order, chunk by chunk, with a chunk's final observation after those of its steps. So the observation after
step r also has a number, no frame is stored twice, and consecutive numbers were stored together.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from hal.spec import ACTION, RobotSpec
from user_sys.codec import Array
from user_sys.errors import ConfigError
from user_sys.store.index import Index

Allocate = Callable[[tuple[int, ...], str], Array]
"""Makes an uninitialised C-contiguous array of a shape and dtype."""
NO_OBSERVATION = -1


@dataclass(frozen=True)
class ObservationFeatures:
    """The features that a learner uses.

    Attributes:
        vectors: observation feature to its length; float32.
        cameras: observation feature (``observation.images.<camera>``) to (height, width, 3); uint8, decoded.
        action_size: length of the action.
    """

    vectors: Mapping[str, int]
    action_size: int
    cameras: Mapping[str, tuple[int, int, int]]

    @classmethod
    def of(cls, spec: RobotSpec, cameras: tuple[str, ...] = ()) -> Self:
        """All vectors of `spec`, and the named cameras.

        Raises:
            ConfigError: the robot has no camera of that name.
        """
        by_name = {camera.name: camera for camera in spec.cameras}
        for name in cameras:
            if name not in by_name:
                raise ConfigError(f"no camera {name!r}; {spec.model} has {sorted(by_name)}")
        return cls(
            vectors={feature.name: feature.shape[0] for feature in spec.observation},
            action_size=spec.action.shape[0],
            cameras={by_name[name].feature: by_name[name].shape for name in cameras},
        )

    def vector_tables(self, rows: int, allocate: Allocate = np.empty) -> dict[str, Array]:
        """Uninitialised float32 columns of `rows` rows: the observation vectors and `ACTION`."""
        sizes = {**self.vectors, ACTION: self.action_size}
        return {name: allocate((rows, size), "float32") for name, size in sizes.items()}

    def frame_tables(self, rows: int, allocate: Allocate = np.empty) -> dict[str, Array]:
        """Uninitialised uint8 columns of `rows` rows, one per camera."""
        return {name: allocate((rows, *shape), "uint8") for name, shape in self.cameras.items()}

    def observations(self, lead: tuple[int, ...], allocate: Allocate = np.empty) -> dict[str, Array]:
        """Uninitialised arrays for observations with leading axes `lead`."""
        vectors = {name: allocate((*lead, size), "float32") for name, size in self.vectors.items()}
        return vectors | {name: allocate((*lead, *shape), "uint8") for name, shape in self.cameras.items()}


class ObservationLocation(NamedTuple):
    """Location of observations: the chunk's row, and the step within it; its number of steps for the final one."""

    chunk: Array
    step: Array


class ObservationIndex:
    """An index and the numbers of its observations. The thread that refreshes the index calls `extend`.

    `locate` is thread-safe for numbers that the caller has been given.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._array = np.zeros(1024, np.int64)
        self._first = self._array[:1]  # first observation of each chunk, then the total
        self.extend()

    @property
    def observation_count(self) -> int:
        """Number of stored observations; their numbers are below it."""
        return int(self._first[-1])

    def extend(self) -> None:
        """Numbers the observations of new chunks."""
        chunks, numbered = self.index.chunks, len(self._first) - 1
        if len(chunks) == numbered:
            return
        if len(chunks) >= len(self._array):
            grown = np.empty(2 * len(chunks), np.int64)
            grown[: numbered + 1] = self._first
            self._array = grown
        counts = chunks.steps[numbered:].astype(np.int64) + chunks.has_final[numbered:]
        self._array[numbered + 1 : len(chunks) + 1] = self._first[-1] + np.cumsum(counts)
        self._first = self._array[: len(chunks) + 1]

    def observation_before(self, rows: Array) -> Array:
        """Number of the observation before each step, int64."""
        chunk = self.index.steps.chunk[rows]
        found: Array = self._first[chunk] + (rows - self.index.chunks.first_row[chunk])
        return found

    def observation_after(self, rows: Array) -> Array:
        """Number of the observation after each step, int64; -1 if it is not stored (yet)."""
        chunks, chunk = self.index.chunks, self.index.steps.chunk[rows]
        step = rows - chunks.first_row[chunk]
        within = (step < chunks.steps[chunk] - 1) | chunks.has_final[chunk]
        continued = chunks.next_chunk[chunk]
        after: Array = np.where(continued >= 0, self._first[continued], NO_OBSERVATION)
        return np.where(within, self._first[chunk] + step + 1, after)

    def successor(self, rows: Array) -> Array:
        """Row of the next step of the same episode, int64; -1 if it is not stored (yet)."""
        return self.index.successor(rows)

    def locate(self, numbers: Array) -> ObservationLocation:
        """Locations of observations."""
        first = self._first
        chunk = np.searchsorted(first, numbers, "right") - 1
        return ObservationLocation(chunk, numbers - first[chunk])

    def observation_range(self, chunk: int) -> range:
        """Numbers of a chunk's observations."""
        return range(int(self._first[chunk]), int(self._first[chunk + 1]))


@dataclass(frozen=True)
class Batch:
    """`n` samples as columns; every array is C-contiguous with first axis n.

    Attributes:
        row: int64 (n,): row of the sample's first step in the store's index.
        group: int32 (n,): part of the selector that selected it, for its `feedback`.
        weight: float32 (n,): factor of its loss; 1 if the selector corrects nothing.
        observation: feature to float32 (n, d), or uint8 (n, height, width, 3) for a camera, before the step.
        phase: uint8 (n,): `user_sys.episode.Phase` of the step.
        policy_version: int64 (n,): version of the policy that acted; -1 if none did.
    """

    row: Array
    group: Array
    weight: Array
    observation: dict[str, Array]
    phase: Array
    policy_version: Array

    def __len__(self) -> int:
        return len(self.row)

    def part(self, start: int, stop: int) -> Self:
        """Samples `start` to `stop`, sharing memory with this batch."""
        parts: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            whole = getattr(self, field.name)
            if isinstance(whole, dict):
                parts[field.name] = {name: array[start:stop] for name, array in whole.items()}
            else:
                parts[field.name] = whole[start:stop]
        return type(self)(**parts)


@dataclass(frozen=True)
class TransitionBatch(Batch):
    """Transitions of one or more steps.

    Attributes:
        next_observation: as `observation`, after the last step.
        action: float32 (n, a): the first applied action, in the action spec's units.
        reward: float32 (n,): discounted sum over the steps.
        discount: float32 (n,): factor of the value of `next_observation`, regardless of `terminated`.
        terminated: bool (n,): do not bootstrap from `next_observation`.
    """

    next_observation: dict[str, Array]
    action: Array
    reward: Array
    discount: Array
    terminated: Array


@dataclass(frozen=True)
class ActionChunkBatch(Batch):
    """An observation and the H actions applied from there on.

    Attributes:
        action: float32 (n, H, a); the last action repeats after the episode's end.
        mask: bool (n, H): which of them were applied.
    """

    action: Array
    mask: Array


@dataclass(frozen=True)
class SequenceBatch(Batch):
    """Sequences of L steps; `observation` is (n, L, ...). The last step repeats after the episode's end.

    Attributes:
        action: float32 (n, L, a).
        reward: float32 (n, L).
        terminated: bool (n, L).
        mask: bool (n, L): which of the steps exist.
    """

    action: Array
    reward: Array
    terminated: Array
    mask: Array


def allocate_columns(features: ObservationFeatures, n: int, length: int | None, allocate: Allocate) -> dict[str, Any]:
    """The columns of every `Batch`; observations are sequences of `length` if given."""
    return {
        "row": np.empty(n, np.int64),
        "group": np.empty(n, np.int32),
        "weight": allocate((n,), "float32"),
        "observation": features.observations((n,) if length is None else (n, length), allocate),
        "phase": allocate((n,), "uint8"),
        "policy_version": allocate((n,), "int64"),
    }


B = TypeVar("B", bound=Batch)


class ReadPlan(NamedTuple):
    """Observations to read into a batch.

    Attributes:
        numbers: int64 (m,); equally many for each sample, sample after sample.
        out: feature or `ACTION` to (m, ...).
    """

    numbers: Array
    out: dict[str, Array]


class BatchBuilder(ABC, Generic[B]):
    """Builds batches of one kind. Frozen and thread-safe."""

    @abstractmethod
    def empty(self, features: ObservationFeatures, n: int, allocate: Allocate = np.empty) -> B:
        """Uninitialised arrays for `n` samples."""

    @abstractmethod
    def plan_reads(self, observations: ObservationIndex, batch: B) -> list[ReadPlan]:
        """Fills the columns known from the index for the samples at ``batch.row``; returns the reads."""


@dataclass(frozen=True)
class TransitionBuilder(BatchBuilder[TransitionBatch]):
    """Transitions of `steps` steps, fewer if the episode ends earlier or later steps are not stored yet.

    The reward is sum_k discount^k r_k, the discount is discount^(number of steps).
    """

    steps: int = 1
    discount: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0.0 <= self.discount <= 1.0:
            raise ConfigError(f"{self.steps} steps with discount {self.discount}: at least 1, and between 0 and 1")

    def empty(self, features: ObservationFeatures, n: int, allocate: Allocate = np.empty) -> TransitionBatch:
        """See `BatchBuilder.empty`."""
        return TransitionBatch(
            **allocate_columns(features, n, None, allocate),
            next_observation=features.observations((n,), allocate),
            action=allocate((n, features.action_size), "float32"),
            reward=allocate((n,), "float32"),
            discount=allocate((n,), "float32"),
            terminated=allocate((n,), "bool"),
        )

    def plan_reads(self, observations: ObservationIndex, batch: TransitionBatch) -> list[ReadPlan]:
        """See `BatchBuilder.plan`."""
        steps, last = observations.index.steps, batch.row.copy()
        _common(observations, batch)
        batch.reward[:] = steps.reward[last]
        batch.discount[:] = self.discount
        going = np.arange(len(last))
        for _ in range(1, self.steps):
            going, successor = _with_successor(observations, going, last[going])
            last[going] = successor
            batch.reward[going] += batch.discount[going] * steps.reward[successor]
            batch.discount[going] *= np.float32(self.discount)
        batch.terminated[:] = steps.terminated[last]
        return [
            ReadPlan(observations.observation_before(batch.row), {**batch.observation, ACTION: batch.action}),
            ReadPlan(observations.observation_after(last), batch.next_observation),
        ]


@dataclass(frozen=True)
class ActionChunkBuilder(BatchBuilder[ActionChunkBatch]):
    """The observation at a step and the next `length` actions."""

    length: int

    def empty(self, features: ObservationFeatures, n: int, allocate: Allocate = np.empty) -> ActionChunkBatch:
        """See `BatchBuilder.empty`."""
        return ActionChunkBatch(
            **allocate_columns(features, n, None, allocate),
            action=allocate((n, self.length, features.action_size), "float32"),
            mask=allocate((n, self.length), "bool"),
        )

    def plan_reads(self, observations: ObservationIndex, batch: ActionChunkBatch) -> list[ReadPlan]:
        """See `BatchBuilder.plan`."""
        _common(observations, batch)
        rows = _sequence_rows(observations, batch.row, batch.mask)
        action = batch.action.reshape(-1, batch.action.shape[-1])
        return [
            ReadPlan(observations.observation_before(batch.row), batch.observation),
            ReadPlan(observations.observation_before(rows.reshape(-1)), {ACTION: action}),
        ]


@dataclass(frozen=True)
class SequenceBuilder(BatchBuilder[SequenceBatch]):
    """Sequences of `length` steps, for recurrent and video models."""

    length: int

    def empty(self, features: ObservationFeatures, n: int, allocate: Allocate = np.empty) -> SequenceBatch:
        """See `BatchBuilder.empty`."""
        return SequenceBatch(
            **allocate_columns(features, n, self.length, allocate),
            action=allocate((n, self.length, features.action_size), "float32"),
            reward=allocate((n, self.length), "float32"),
            terminated=allocate((n, self.length), "bool"),
            mask=allocate((n, self.length), "bool"),
        )

    def plan_reads(self, observations: ObservationIndex, batch: SequenceBatch) -> list[ReadPlan]:
        """See `BatchBuilder.plan`."""
        _common(observations, batch)
        steps, rows = observations.index.steps, _sequence_rows(observations, batch.row, batch.mask)
        batch.reward[:] = steps.reward[rows]
        batch.terminated[:] = steps.terminated[rows]
        flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in batch.observation.items()}
        action = batch.action.reshape(-1, batch.action.shape[-1])
        return [ReadPlan(observations.observation_before(rows.reshape(-1)), {**flat, ACTION: action})]


def _common(observations: ObservationIndex, batch: Batch) -> None:
    steps = observations.index.steps
    batch.phase[:] = steps.phase[batch.row]
    batch.policy_version[:] = steps.policy_version[batch.row]


def _with_successor(observations: ObservationIndex, places: Array, rows: Array) -> tuple[Array, Array]:
    """The `places` whose episode continues after their row with a step that has a next observation.

    Returns them and the rows of those steps.
    """
    steps, successor = observations.index.steps, observations.successor(rows)
    goes_on = (successor >= 0) & ~steps.terminated[rows] & ~steps.truncated[rows]
    goes_on[goes_on] = observations.observation_after(successor[goes_on]) >= 0
    return places[goes_on], successor[goes_on]


def _sequence_rows(observations: ObservationIndex, rows: Array, mask: Array) -> Array:
    """Row sequences from `rows` (n,), int64 (n, L), repeating the last row. Fills `mask`, bool (n, L)."""
    stretch = np.repeat(rows[:, None], mask.shape[1], axis=1)
    mask[:] = False
    mask[:, 0] = True
    going = np.arange(len(rows))
    for step in range(1, mask.shape[1]):
        going, successor = _with_successor(observations, going, stretch[going, step])
        stretch[going, step:] = successor[:, None]
        mask[going, step] = True
    return stretch
