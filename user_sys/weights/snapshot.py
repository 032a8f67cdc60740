"""A policy's weights of one moment, on their way from where they are trained to the envoy's memory.

Where they are trained in host memory they are arrays, to be copied before the next update. What trains on a device
takes a copy there, which costs it a moment, and hands out `DeviceWeights`: another thread fetches them, at a pace that
a `CopyBudget` sets, while training goes on.
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
"""Of each array its dtype and shape, by name, in their order."""


class CopyBudget(Protocol):
    """What a push may take of a GPU. `user_sys.weights.governor.GovernedBudget` is one."""

    @property
    def ctas(self) -> int:
        """Thread blocks of a packing kernel, so at most as many multiprocessors."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one copy."""

    def yield_cpu(self, done_bytes: int) -> None:
        """See `state.Breathe`."""


@dataclass(frozen=True)
class UnlimitedBudget:
    """As fast as it goes, with `ctas` thread blocks."""

    ctas: int = 32
    chunk_bytes: int = MAX_COPY_BYTES
    yield_cpu: YieldHook = no_yield


class DeviceWeights(Protocol):
    """Weights of one moment in a device's memory; later updates do not change them. Any one thread calls it."""

    @property
    def layout(self) -> TensorLayout:
        """In which they come to the host."""

    def wait(self) -> None:
        """Blocks until the device has made the copy: it may be some steps behind the thread that trains."""

    def fetch(self, into: Mapping[str, Array], budget: CopyBudget) -> RoundingStats:
        """Writes them to the C-contiguous arrays `into`, which are of `layout`, and blocks until they are there.

        Returns:
            The errors of what was rounded on the device on its way.
        """


PolicySnapshot: TypeAlias = Mapping[str, Array] | DeviceWeights
"""Arrays in host memory, which the next update may change; or what is fetched later."""


def layout_of(weights: PolicySnapshot) -> TensorLayout:
    """In which `weights` come, or are there already."""
    if isinstance(weights, Mapping):
        return {name: (array.dtype, array.shape) for name, array in weights.items()}
    return weights.layout
