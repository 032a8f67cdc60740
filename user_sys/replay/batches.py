"""Batches: what an algorithm asks for, and the arrays that it gets.

One mechanism makes every kind of batch. A sample is a *window* of steps from a drawn step on. The window ends with the
episode, or, on request, with the phase. `BatchSpec` gives its length; `ObservationFeatures` names the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Self

import numpy as np

from hal.spec import RobotSpec
from user_sys.codec import Array
from user_sys.episode import APPLIED_ACTION
from user_sys.errors import ConfigError
from user_sys.policies.policy import AGE_SUFFIX
from user_sys.store.index import Index

Allocate = Callable[[tuple[int, ...], str], Array]
"""Makes an uninitialised C-contiguous array of a shape and dtype."""


class EncodedColumn(NamedTuple):
    """The encoded pictures of a camera, float32 (n, size), and the function that encodes pictures (n, h, w, 3)."""

    name: str
    size: int
    encode: Callable[[Array], Array]


@dataclass(frozen=True)
class ObservationFeatures:
    """The recorded columns that a learner uses.

    Attributes:
        vectors: observation feature to its length; float32.
        action_size: length of the applied action.
        cameras: observation feature (``observation.images.<camera>``) to (height, width, 3); uint8, decoded.
        extras: other numeric column of a step, such as ``log_prob`` or the requested ``action``, to its shape; float32.
            NaN if a chunk lacks the column.
        encoded: feature of a camera to the column that replaces it in batches.
    """

    vectors: Mapping[str, int]
    action_size: int
    cameras: Mapping[str, tuple[int, int, int]]
    extras: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    encoded: Mapping[str, EncodedColumn] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        spec: RobotSpec,
        cameras: tuple[str, ...] = (),
        *,
        columns: tuple[str, ...] = (),
        extras: Mapping[str, tuple[int, ...]] | None = None,
        ages: bool = False,
    ) -> Self:
        """The vectors `columns` of `spec`, all of them by default, the named cameras, and `extras`.

        With `ages`, the age of each camera's frame is a vector too, as policies read it when they act.

        Raises:
            ConfigError: the robot has no camera or vector of that name.
        """
        by_name = {camera.name: camera for camera in spec.cameras}
        vectors = {feature.name: feature.shape[0] for feature in spec.observation}
        for kind, known, names in (("camera", by_name, cameras), ("vector", vectors, columns)):
            for name in names:
                if name not in known:
                    raise ConfigError(f"no {kind} {name!r}; {spec.model} has {sorted(known)}")
        of_frames = {by_name[name].feature + AGE_SUFFIX: 1 for name in cameras} if ages else {}
        return cls(
            vectors={name: vectors[name] for name in columns or vectors} | of_frames,
            action_size=spec.action.shape[0],
            cameras={by_name[name].feature: by_name[name].shape for name in cameras},
            extras=extras or {},
        )

    def step_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the float32 columns of a step that are no observation: `APPLIED_ACTION` and the extras."""
        return {APPLIED_ACTION: (self.action_size,), **self.extras}

    def vector_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all float32 columns."""
        return {name: (size,) for name, size in self.vectors.items()} | self.step_shapes()

    def observations(self, lead: tuple[int, ...], allocate: Allocate) -> dict[str, Array]:
        """Uninitialised arrays for observations; `lead` are their first axes."""
        sizes = {**self.vectors, **{column.name: column.size for column in self.encoded.values()}}
        vectors = {name: allocate((*lead, size), "float32") for name, size in sizes.items()}
        pictures = {name: shape for name, shape in self.cameras.items() if name not in self.encoded}
        return vectors | {name: allocate((*lead, *shape), "uint8") for name, shape in pictures.items()}


@dataclass(frozen=True)
class Batch:
    """`n` samples as columns; every array is C-contiguous with first axis n.

    With a `BatchSpec.chunk_length` of H, a column marked * has shape (n, H, ...). Its value repeats where `mask` is
    false. With `BatchSpec.sequence`, `observation` and `reward` are of each step too, and the reward is 0 where `mask`
    is false.

    Attributes:
        row: int64 (n,): row of the sample's first step in the store's index.
        group: int32 (n,): part of the selector that selected it, for its `feedback`.
        weight: float32 (n,): factor of its loss; 1 if the selector corrects nothing.
        observation: feature to float32 (n, d), or uint8 (n, height, width, 3) for a camera, before the first step.
        next_observation: as `observation`, after the last rewarded step.
        steps: with `BatchSpec.step_vectors`, vector feature to float32 (n, H, d), before each step; else empty.
        action: * float32 (n, a): applied, in the action spec's units.
        extras: * column to float32 (n, ...).
        phase: * uint8 (n,): `user_sys.episode.Phase`.
        failed_by_hand: * bool (n,): see `Index.failed_by_hand`.
        policy_version: * int64 (n,): version of the policy that acted; -1 if none did.
        mask: bool (n, H), H at least 1: which steps of the window exist and have an action.
        reward: float32 (n,): discounted sum over at most `n_step` steps.
        discount: float32 (n,): factor of the value of `next_observation`, regardless of `terminated`.
        terminated: bool (n,): do not bootstrap from `next_observation`.
        sentence: int64 (n,): place of the instruction in ``index.episodes.sentences.names``.
    """

    row: Array
    group: Array
    weight: Array
    observation: dict[str, Array]
    next_observation: dict[str, Array]
    action: Array
    extras: dict[str, Array]
    phase: Array
    failed_by_hand: Array
    policy_version: Array
    mask: Array
    reward: Array
    discount: Array
    terminated: Array
    sentence: Array
    steps: dict[str, Array]

    def __len__(self) -> int:
        return len(self.row)

    def arrays(self) -> Iterator[Array]:
        """Every array, in the same order for every batch of a spec."""
        for each in fields(self):
            value = getattr(self, each.name)
            yield from value.values() if isinstance(value, dict) else (value,)


class ReadPlan(NamedTuple):
    """Observations to read into a batch.

    Attributes:
        numbers: int64 (m,); equally many for each sample, sample after sample.
        out: feature, `APPLIED_ACTION` or extra to (m, ...).
        labelled: extra to labelled values, float32 (m,), which replace those that were read; NaN replaces none.
    """

    numbers: Array
    out: dict[str, Array]
    labelled: Mapping[str, Array]


@dataclass(frozen=True)
class BatchSpec:
    """The shape of a batch. Thread-safe.

    Attributes:
        n_step: steps of a transition, fewer if the episode ends earlier or later steps are not stored yet. The reward
            is sum_k discount^k r_k; the batch's discount is discount^(number of steps).
        discount: of one step.
        chunk_length: steps of an action chunk; 0 for one action without a chunk axis.
        sequence: the batch has the observation and reward of each step of the chunk; n_step is chunk_length. If only
            the step of an operator's label follows a window, in which no policy acts, its reward and end count there.
        within_phase: a window ends where the source of control changes.
        step_vectors: the batch has the vectors of each step of the chunk, see `Batch.steps`.
    """

    n_step: int = 1
    discount: float = 1.0
    chunk_length: int = 0
    sequence: bool = False
    within_phase: bool = False
    step_vectors: bool = False

    def __post_init__(self) -> None:
        if self.n_step < 1 or self.chunk_length < 0 or not 0.0 <= self.discount <= 1.0:
            raise ConfigError(
                f"n_step {self.n_step} must be at least 1, chunk_length {self.chunk_length} not negative, "
                f"discount {self.discount} between 0 and 1"
            )
        if self.step_vectors and not self.chunk_length:
            raise ConfigError("a batch without chunks has no vectors of their steps: set chunk_length")
        if self.sequence and self.n_step != self.chunk_length:
            raise ConfigError(f"a sequence of {self.chunk_length} steps has rewards of {self.n_step}: set both equal")

    def empty(self, features: ObservationFeatures, n: int, allocate: Allocate = np.empty) -> Batch:
        """Uninitialised arrays for `n` samples."""
        lead = (n, self.chunk_length) if self.chunk_length else (n,)
        of_steps = {name: allocate((*lead, *shape), "float32") for name, shape in features.step_shapes().items()}
        return Batch(
            row=np.empty(n, np.int64),
            group=np.empty(n, np.int32),
            weight=allocate((n,), "float32"),
            observation=features.observations(lead if self.sequence else (n,), allocate),
            next_observation=features.observations((n,), allocate),
            action=of_steps.pop(APPLIED_ACTION),
            extras=of_steps,
            phase=allocate(lead, "uint8"),
            failed_by_hand=allocate(lead, "bool"),
            policy_version=allocate(lead, "int64"),
            mask=allocate((n, max(1, self.chunk_length)), "bool"),
            reward=allocate(lead if self.sequence else (n,), "float32"),
            discount=allocate((n,), "float32"),
            terminated=allocate((n,), "bool"),
            sentence=allocate((n,), "int64"),
            steps={
                name: allocate((*lead, size), "float32") for name, size in features.vectors.items() if self.step_vectors
            },
        )

    def plan_reads(self, index: Index, batch: Batch) -> list[ReadPlan]:
        """Fills the columns known from the index for the samples at ``batch.row``; returns the reads."""
        steps, length = index.steps, max(1, self.chunk_length)
        rows, exists = self._windows(index, batch.row, max(self.n_step, length))
        batch.mask[:] = exists[:, :length]
        acted = rows[:, :length] if self.chunk_length else batch.row
        batch.phase[:], batch.policy_version[:] = steps.phase[acted], steps.policy_version[acted]
        batch.failed_by_hand[:] = index.failed_by_hand(acted)
        rewarded, exists = rows[:, : self.n_step], exists[:, : self.n_step]
        discounts = np.float32(self.discount) ** np.arange(self.n_step, dtype=np.float32)
        rewards = steps.reward[rewarded] * exists
        batch.reward[:] = rewards if self.sequence else (rewards * discounts).sum(1)
        batch.discount[:] = np.float32(self.discount) ** exists.sum(1, dtype=np.float32)
        last = rewarded[:, -1]
        batch.terminated[:] = steps.terminated[last]
        if self.sequence:
            self._join_label(index, batch, last)
        batch.sentence[:] = index.episodes.sentence[index.episode_of(batch.row)]
        of_steps = {APPLIED_ACTION: batch.action, **batch.extras, **batch.steps}
        before, after = index.observation_before(batch.row), index.observation_after(last)
        labelled = _labelled_columns(index, acted.reshape(-1), batch.extras)
        following = ReadPlan(after, batch.next_observation, {})
        if not self.chunk_length:
            return [ReadPlan(before, {**batch.observation, **of_steps}, labelled), following]
        if self.sequence:
            of_steps |= batch.observation
        flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in of_steps.items()}
        plans = [following, ReadPlan(index.observation_before(acted.reshape(-1)), flat, labelled)]
        return plans if self.sequence else [ReadPlan(before, batch.observation, {}), *plans]

    def _join_label(self, index: Index, batch: Batch, last: Array) -> None:
        """Gives the `last` steps of windows the reward and end of the step of an operator's label that follows them."""
        steps, following = index.steps, index.successor(last)
        acted = (steps.policy_version[last] >= 0) & ~steps.terminated[last] & ~steps.truncated[last]
        joins = np.flatnonzero(acted & (following >= 0))
        label, before = following[joins], last[joins]
        is_label = (steps.terminated[label] | steps.truncated[label]) & (steps.policy_version[label] < 0)
        is_label &= steps.phase[label] == steps.phase[before]
        joins, label = joins[is_label], label[is_label]
        batch.reward[joins, batch.mask[joins].sum(1) - 1] += np.float32(self.discount) * steps.reward[label]
        batch.terminated[joins] = steps.terminated[label]

    def _windows(self, index: Index, rows: Array, length: int) -> tuple[Array, Array]:
        """The steps from `rows` (n,) on, int64 (n, length), and which exist, bool; the last existing one repeats.

        Each step has a stored next observation.
        """
        windows = np.repeat(rows[:, None], length, axis=1)
        exists = np.zeros(windows.shape, bool)
        exists[:, 0] = True
        going, steps = np.arange(len(rows)), index.steps
        for step in range(1, length):
            current = windows[going, step]
            following = index.successor(current)
            goes_on = (following >= 0) & ~steps.terminated[current] & ~steps.truncated[current]
            goes_on[goes_on] = index.observation_after(following[goes_on]) >= 0
            if self.within_phase:
                goes_on &= steps.phase[following] == steps.phase[current]
            going = going[goes_on]
            windows[going, step:] = following[goes_on, None]
            exists[going, step] = True
        return windows, exists


def _labelled_columns(index: Index, rows: Array, extras: Mapping[str, Array]) -> dict[str, Array]:
    """The labelled values of those `extras` that have labels."""
    found = {name: index.labelled_column(name, rows) for name in extras}
    return {name: values for name, values in found.items() if values is not None}
