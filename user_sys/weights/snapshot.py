"""A snapshot of a policy's weights, on its way from the trainer to the publisher process.

Weights in host memory are arrays, which the publisher copies before the next update. A device makes a copy in its own
memory first (`DeviceWeights`). Another thread then fetches that copy while training continues, within a `CopyBudget`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from user_sys.codec import Array
from user_sys.weights.governor import MAX_COPY_BYTES
from user_sys.weights.precision import RoundingStats
from user_sys.weights.state import YieldHook, no_yield

TensorLayout: TypeAlias = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Dtype and shape of each array, by name, in order."""


class CopyBudget(Protocol):
    """How much of a GPU a push may use, such as `user_sys.weights.governor.GovernedBudget`."""

    @property
    def ctas(self) -> int:
        """Thread blocks of a kernel, and so its maximum number of multiprocessors."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one copy."""

    def yield_cpu(self, done_bytes: int) -> None:
        """See `state.YieldHook`."""


@dataclass(frozen=True)
class UnlimitedBudget:
    """A budget without limits, with `ctas` thread blocks."""

    ctas: int = 32
    chunk_bytes: int = MAX_COPY_BYTES
    yield_cpu: YieldHook = no_yield


class DeviceWeights(Protocol):
    """A snapshot of weights in device memory; later updates do not change it. One thread, any one, calls it."""

    @property
    def layout(self) -> TensorLayout:
        """The layout of the arrays on the host."""

    def wait(self) -> None:
        """Blocks until the device has made the copy, which may be some steps after the call that requested it."""

    def fetch(self, into: Mapping[str, Array], budget: CopyBudget) -> RoundingStats:
        """Copies the weights to the C-contiguous arrays `into`, which have `layout`. Blocks until they have arrived.

        Returns:
            The errors of values that the device rounded.
        """


PolicySnapshot: TypeAlias = Mapping[str, Array] | DeviceWeights
"""Arrays in host memory, which the next update may change, or device weights to fetch later."""


def layout_of(weights: PolicySnapshot) -> TensorLayout:
    """Returns the layout of `weights` on the host."""
    if isinstance(weights, Mapping):
        return {name: (array.dtype, array.shape) for name, array in weights.items()}
    return weights.layout
