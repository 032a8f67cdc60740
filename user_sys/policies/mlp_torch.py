"""The multilayer perceptron of `user_sys.policies.mlp`, computed by torch on a device such as a GPU.

What surrounds the network is the numpy policy's own: features, exploration, draws, squashing, densities and bounds.
With one seed both draw the same noise, and differ by the rounding of the network alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from hal.spec import Array, RobotSpec
from user_sys.policies.mlp import INPUT_CLIP, LOG_STD_MAX, LOG_STD_MIN, MlpPolicy


class CudaStreams(NamedTuple):
    """Of a GPU: what acts goes before what others compute there, and does not queue behind a load."""

    acting: torch.cuda.Stream | None = None
    loading: torch.cuda.Stream | None = None


class TorchMlpPolicy(MlpPolicy):
    """See `MlpPolicy`; an `act` costs two transfers and one kernel launch or two a layer.

    On a GPU all policies of a process share a stream to act on, and one to load on.
    """

    def __init__(self, spec: RobotSpec, device: str, *, features: Sequence[str] = (), seed: int = 0) -> None:
        super().__init__(spec, features=features, seed=seed)
        self._device = torch.device(device)
        self._streams = _streams(self._device)
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def load(self, weights: Mapping[str, Array]) -> None:
        """See `Policy.load`."""
        super().load(weights)
        assert self._weights is not None  # they were taken
        w = self._weights
        heads = [
            np.concatenate([w[f"{head}.{part}"] for head in ("mean", "log_std")], -1) for part in ("weight", "bias")
        ]
        layers = [*self._hidden, (heads[0], heads[1])]
        loading = self._streams.loading
        with torch.cuda.stream(loading):  # on a processor this does nothing
            self._layers = [(self._on_device(weight), self._on_device(bias)) for weight, bias in layers]
            if loading is not None:
                loading.synchronize()

    @torch.inference_mode()
    def _gaussian(self, x: Array) -> tuple[Array, Array]:
        assert self._weights is not None  # `act` has looked
        w = self._weights
        scaled = np.clip((x - w["input.offset"]) * w["input.scale"], -INPUT_CLIP, INPUT_CLIP)
        with torch.cuda.stream(self._streams.acting):
            h = self._on_device(scaled.astype(np.float32))[None]
            for weight, bias in self._layers[:-1]:
                h = torch.relu_(torch.addmm(bias, h, weight))
            weight, bias = self._layers[-1]
            both = torch.addmm(bias, h, weight)[0].cpu().numpy()
        mean, log_std = np.split(both, 2)
        return mean, np.clip(log_std, LOG_STD_MIN, LOG_STD_MAX)

    def _on_device(self, array: Array) -> torch.Tensor:
        return torch.tensor(array, device=self._device)


def warm_up_gpu() -> bool:
    """Readies the calling thread, which is to act, for products of matrices. False: no GPU."""
    if not torch.cuda.is_available():
        return False
    device = torch.device("cuda")
    with torch.cuda.stream(_streams(device).acting):
        some = torch.zeros(8, 8, device=device)
        torch.addmm(some[0], some, some).cpu()
    return True


@cache
def _streams(device: torch.device) -> CudaStreams:
    """One of each: the library of matrix products takes its time to start on a stream, and 8 to 32 MB that it keeps."""
    if device.type != "cuda":
        return CudaStreams()
    return CudaStreams(torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
