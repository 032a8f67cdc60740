"""The multilayer perceptron of `user_sys.policies.mlp` in torch, for example on a GPU.

It inherits features, exploration, draws, squashing, densities and bounds from the numpy policy. With one seed both draw
the same noise, and differ only by the rounding of the network.
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
    """CUDA streams: acting has priority over other work on the GPU, and does not wait for a load."""

    acting: torch.cuda.Stream | None = None
    loading: torch.cuda.Stream | None = None


class TorchMlpPolicy(MlpPolicy):
    """See `MlpPolicy`; `act` takes two transfers and one or two kernel launches per layer.

    All policies of a process share one stream for acting and one for loading on a GPU.
    """

    def __init__(self, spec: RobotSpec, device: str, *, features: Sequence[str] = (), seed: int = 0) -> None:
        super().__init__(spec, features=features, seed=seed)
        self._device = torch.device(device)
        self._streams = _streams(self._device)
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def load(self, weights: Mapping[str, Array]) -> None:
        """See `Policy.load`."""
        super().load(weights)
        assert self._weights is not None  # `super().load` has set them
        w = self._weights
        heads = [
            np.concatenate([w[f"{head}.{part}"] for head in ("mean", "log_std")], -1) for part in ("weight", "bias")
        ]
        layers = [*self._hidden, (heads[0], heads[1])]
        loading = self._streams.loading
        with torch.cuda.stream(loading):  # has no effect on a CPU
            self._layers = [(self._on_device(weight), self._on_device(bias)) for weight, bias in layers]
            if loading is not None:
                loading.synchronize()

    @torch.inference_mode()
    def _gaussian(self, x: Array) -> tuple[Array, Array]:
        assert self._weights is not None  # `act` has checked
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
    """Prepares matrix products for the calling thread, which will act. Returns False without a GPU."""
    if not torch.cuda.is_available():
        return False
    device = torch.device("cuda")
    with torch.cuda.stream(_streams(device).acting):
        some = torch.zeros(8, 8, device=device)
        torch.addmm(some[0], some, some).cpu()
    return True


@cache
def _streams(device: torch.device) -> CudaStreams:
    """Returns the shared streams: on each stream the matrix library starts slowly and keeps 8 to 32 MB."""
    if device.type != "cuda":
        return CudaStreams()
    return CudaStreams(torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
