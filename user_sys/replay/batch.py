"""The batches that samplers fill: arrays that are allocated once and filled again and again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from user_sys.codec import Array
from user_sys.replay.features import Allocate, Features


@dataclass(frozen=True)
class Batch:
    """`n` samples, column by column; every array is C-contiguous and its first axis is n.

    Attributes:
        row: int64 (n,): the step's row in the store's index, where the sample starts.
        group: int32 (n,): the part of the chooser that chose it, for its `feedback`.
        weight: float32 (n,): by what its loss is to be multiplied; 1 where the chooser corrects nothing.
        observation: feature to float32 (n, d), or uint8 (n, height, width, 3) for a camera: before the step.
        phase: uint8 (n,): `user_sys.episode.Phase` of the step.
        policy_version: int64 (n,): the weights that acted; -1 where none did.
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
        next_observation: as `observation`, after the last of the steps.
        action: float32 (n, a): the first action that was applied, in the action spec's units.
        reward: float32 (n,): of the steps, discounted to the first.
        discount: float32 (n,): what a value of `next_observation` is to be multiplied by, `terminated` left aside.
        terminated: bool (n,): do not bootstrap from `next_observation`.
    """

    next_observation: dict[str, Array]
    action: Array
    reward: Array
    discount: Array
    terminated: Array


@dataclass(frozen=True)
class ActionChunkBatch(Batch):
    """An observation and the H actions that were applied from there on.

    Attributes:
        action: float32 (n, H, a); after the episode's end the last one is repeated.
        mask: bool (n, H): which of them were applied.
    """

    action: Array
    mask: Array


@dataclass(frozen=True)
class SequenceBatch(Batch):
    """Stretches of L steps; `observation` is (n, L, ...). After the episode's end the last step is repeated.

    Attributes:
        action: float32 (n, L, a).
        reward: float32 (n, L).
        terminated: bool (n, L).
        mask: bool (n, L): which of them happened.
    """

    action: Array
    reward: Array
    terminated: Array
    mask: Array


def columns(features: Features, n: int, length: int | None, allocate: Allocate) -> dict[str, Any]:
    """What every `Batch` has; observations are stretches of `length` where that is given."""
    return {
        "row": np.empty(n, np.int64),
        "group": np.empty(n, np.int32),
        "weight": allocate((n,), "float32"),
        "observation": features.observations((n,) if length is None else (n, length), allocate),
        "phase": allocate((n,), "uint8"),
        "policy_version": allocate((n,), "int64"),
    }
