"""Weights from a GPU to the host: packed by few thread blocks, copied by the copy engines, beside the training.

Of a version three things are made, each in the order of its stream: a copy in the GPU's memory, on the caller's own
stream, so that the next update may change the weights at once (900 MB take a millisecond there); a packed form of it,
where one is asked for, by a kernel of a bounded number of thread blocks; and a copy in pinned host memory, in chunks,
by the copy engines. The last two run on a stream of the lowest priority. Without a GPU the same calls work in host
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from user_sys.codec import Array
from user_sys.weights.gpu.packing import narrow_tensor
from user_sys.weights.state import BF16, Breathe, at_once

CHUNK_BYTES = 32 << 20
"""One copy of the copy engines; between two the push may rest."""
Pack = Literal["exact", "bf16"]


class Budget(Protocol):
    """What a push may take of a GPU. `user_sys.weights.governor.Governor` is one."""

    @property
    def ctas(self) -> int:
        """Thread blocks of a packing kernel, so at most as many multiprocessors."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one copy."""

    def breathe(self, done_bytes: int) -> None:
        """See `state.Breathe`."""


@dataclass(frozen=True)
class Unbounded:
    """As fast as it goes, with `ctas` thread blocks."""

    ctas: int = 32
    chunk_bytes: int = CHUNK_BYTES
    breathe: Breathe = at_once


class HostCopies:
    """Takes copies of the tensors of one device. One thread calls `snapshot`, and it or another one what that returns.

    Args:
        pack: ``bf16`` rounds float32 tensors on the device, as `forms.narrow` does, and halves what is copied.
    """

    def __init__(self, device: torch.device, budget: Budget | None = None, pack: Pack = "exact") -> None:
        self._device, self._pack = device, pack
        self._budget: Budget = budget or Unbounded()
        # 0 is the lowest priority there is, and the default: who wants to be ahead of pushes takes a stream below 0.
        stream = torch.cuda.Stream
        self._stream = stream(device, priority=0) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def snapshot(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, Array]]:
        """Copies `tensors`, on their device, and returns at once; what it returns brings them to the host, and blocks.

        The caller may change them as soon as this has returned: what its stream does next comes after the copy.
        """
        with torch.no_grad():
            copies = {
                name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
            }
        if self._stream is None:
            return lambda: {name: as_array(self._packed(copy)) for name, copy in copies.items()}
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return lambda: self._fetch(copies, self._stream)

    def _packed(self, copy: torch.Tensor) -> torch.Tensor:
        return narrow_tensor(copy, self._budget.ctas) if self._wants_packing(copy) else copy

    def _wants_packing(self, copy: torch.Tensor) -> bool:
        return self._pack == "bf16" and copy.dtype == torch.float32

    def _fetch(self, copies: Mapping[str, torch.Tensor], stream: torch.cuda.Stream | None) -> dict[str, Array]:
        found: dict[str, Array] = {}
        with torch.cuda.stream(stream):
            for name, copy in copies.items():
                packed = self._packed(copy)
                host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
                self._copy_chunks(host.view(-1), packed.view(-1))
                found[name] = as_array(host)
        return found

    def _copy_chunks(self, host: torch.Tensor, source: torch.Tensor) -> None:
        step = max(1, self._budget.chunk_bytes // source.element_size())
        for start in range(0, source.numel(), step):
            host[start : start + step].copy_(source[start : start + step], non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()
            self._budget.breathe(min(step, source.numel() - start) * source.element_size())


def as_array(tensor: torch.Tensor) -> Array:
    """The same memory as an array; bfloat16 as `state.BF16`, which numpy lacks."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BF16)
    return tensor.numpy()
