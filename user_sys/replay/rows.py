"""What a row of the replay buffer holds, and the batches that are drawn from its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from hal.spec import RobotSpec
from user_sys.codec import Array
from user_sys.episode import APPLIED, Chunk
from user_sys.errors import ConfigError, WireError

SCALARS: Mapping[str, str] = {
    "reward": "float32",
    "terminated": "bool",
    "phase": "uint8",
    "policy_version": "int64",
}


@dataclass(frozen=True)
class Features:
    """What the learner wants of each step.

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
        """All vectors of `spec`, and the cameras named.

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

    @property
    def row_bytes(self) -> int:
        """Memory that one row takes in a `ReplayBuffer`, its index included."""
        return sum(table.nbytes for table in self.tables(1).values()) + 3 * np.dtype(np.int64).itemsize

    def observation_tables(self, rows: int) -> dict[str, Array]:
        """Uninitialised observation columns of `rows` rows, C-contiguous."""
        vectors = {name: np.empty((rows, size), np.float32) for name, size in self.vectors.items()}
        return vectors | {name: np.empty((rows, *shape), np.uint8) for name, shape in self.cameras.items()}

    def tables(self, rows: int) -> dict[str, Array]:
        """Uninitialised columns of `rows` rows: observations, ``action`` and `SCALARS`."""
        scalars = {name: np.empty(rows, dtype) for name, dtype in SCALARS.items()}
        return self.observation_tables(rows) | {"action": np.empty((rows, self.action_size), np.float32)} | scalars


@dataclass(frozen=True)
class Batch:
    """`n` transitions, column by column; every array is C-contiguous and its first axis is n.

    Attributes:
        observation, next_observation: feature to float32 (n, d), or uint8 (n, height, width, 3) for a camera.
        action: float32 (n, a): the action that was applied, in the action spec's units.
        reward: float32 (n,).
        terminated: bool (n,): do not bootstrap from `next_observation`.
        phase: uint8 (n,): `user_sys.episode.Phase`.
        policy_version: int64 (n,): the weights that acted; -1 where none did.
        index: int64 (n,): the row's slot in the buffer that it came from.
    """

    observation: dict[str, Array]
    next_observation: dict[str, Array]
    action: Array
    reward: Array
    terminated: Array
    phase: Array
    policy_version: Array
    index: Array

    @classmethod
    def empty(cls, features: Features, n: int) -> Self:
        """Uninitialised arrays, to be handed to ``sample(out=...)`` again and again."""
        scalars = {name: np.empty(n, dtype) for name, dtype in SCALARS.items()}
        return cls(
            observation=features.observation_tables(n),
            next_observation=features.observation_tables(n),
            action=np.empty((n, features.action_size), np.float32),
            index=np.empty(n, np.int64),
            **scalars,
        )

    def __len__(self) -> int:
        return len(self.index)

    def part(self, start: int, stop: int) -> Batch:
        """Transitions `start` to `stop`, sharing memory with this batch."""
        return Batch(
            observation={name: array[start:stop] for name, array in self.observation.items()},
            next_observation={name: array[start:stop] for name, array in self.next_observation.items()},
            action=self.action[start:stop],
            reward=self.reward[start:stop],
            terminated=self.terminated[start:stop],
            phase=self.phase[start:stop],
            policy_version=self.policy_version[start:stop],
            index=self.index[start:stop],
        )


def check_features(chunk: Chunk, features: Features) -> None:
    """Raises WireError unless `chunk` has every column that `features` asks for, in the right shape and dtype."""
    wanted: dict[str, tuple[tuple[int, ...], str]] = {
        name: ((size,), "float32") for name, size in features.vectors.items()
    }
    final = dict(wanted) if chunk.header.end is not None else {}
    wanted[APPLIED] = ((features.action_size,), "float32")
    wanted |= {name: ((), dtype) for name, dtype in SCALARS.items()}
    wanted |= {f"{name}.length": ((), "int32") for name in features.cameras}
    for name, (shape, dtype) in wanted.items():
        column = chunk.columns.get(name)
        if column is None or column.shape[1:] != shape or column.dtype != dtype:
            raise WireError(f"{name!r} is absent or not {dtype} of shape {shape} a step")
    for name, (shape, dtype) in final.items():
        value = chunk.final.get(name)
        if value is None or value.size != shape[0] or value.dtype != dtype:
            raise WireError(f"the final {name!r} is absent or not {dtype} of shape {shape}")
    for name in features.cameras:
        joined, lengths = chunk.columns.get(name), chunk.columns[f"{name}.length"]
        if (
            joined is None
            or joined.dtype != np.uint8
            or (lengths < 0).any()
            or lengths.sum(dtype=np.int64) != joined.size
        ):
            raise WireError(f"{name!r} is absent, or its frames' lengths do not add up")
