"""What the learner wants of each observation and action."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from hal.spec import RobotSpec
from user_sys.codec import Array
from user_sys.errors import ConfigError

ACTION = "action"  # the name under which the applied action stands beside observation vectors

Allocate = Callable[[tuple[int, ...], str], Array]
"""Makes an uninitialised C-contiguous array of a shape and dtype."""


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

    def vector_tables(self, rows: int, allocate: Allocate = np.empty) -> dict[str, Array]:
        """Uninitialised float32 columns of `rows` rows: the observation vectors and `ACTION`."""
        sizes = {**self.vectors, ACTION: self.action_size}
        return {name: allocate((rows, size), "float32") for name, size in sizes.items()}

    def frame_tables(self, rows: int, allocate: Allocate = np.empty) -> dict[str, Array]:
        """Uninitialised uint8 columns of `rows` rows, one for each camera."""
        return {name: allocate((rows, *shape), "uint8") for name, shape in self.cameras.items()}

    def observations(self, lead: tuple[int, ...], allocate: Allocate = np.empty) -> dict[str, Array]:
        """Uninitialised arrays for observations, `lead` being their first axes."""
        vectors = {name: allocate((*lead, size), "float32") for name, size in self.vectors.items()}
        return vectors | {name: allocate((*lead, *shape), "uint8") for name, shape in self.cameras.items()}
