"""Whole tensors of which several processes have shares, brought to one's host memory: never whole on its device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from user_sys.codec import Array
from user_sys.weights.forms import NOTHING_ROUNDED, Rounding
from user_sys.weights.gpu.device import DeviceCopy, as_array, on_stream
from user_sys.weights.snapshot import Budget, Layout
from user_sys.weights.state import Breathe, at_once

BUCKET_BYTES = 8 << 20
"""Tensors come to rank 0 in pieces of this size at most: one piece is on its GPU besides its own share."""


class Gathering:
    """Gathers over a process group that nothing else uses at the same time. One thread of each process calls it."""

    def __init__(self, rank: int, world: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """`group` is torch's own for None."""
        self._rank, self._world, self._device, self._group = rank, world, device, group
        # The lowest priority, which is the default's too: training has a stream of its own kind.
        stream = torch.cuda.Stream
        self._stream = stream(device, priority=0) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def gather(self, shares: Mapping[str, Tensor], into: Mapping[str, Array], breathe: Breathe = at_once) -> None:
        """Blocks until rank 0 has the whole tensors, and here until this process has given what it has to give.

        Args:
            shares: this process's rows of each tensor, by name, in the same order everywhere. Of a single number rank 0
                takes its own.
            into: at rank 0, C-contiguous arrays of the whole tensors' shapes; elsewhere not looked at.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), on_stream(self._stream):
            for name, share in shares.items():
                if self._rank == 0:
                    self._assemble(share, torch.from_numpy(into[name]), breathe)
                elif share.ndim:
                    for piece in _pieces(share):
                        dist.send(piece, 0, group=self._group)
            if self._stream is not None:
                self._stream.synchronize()  # who gave it away may let the shares go

    def _assemble(self, share: Tensor, whole: Tensor, breathe: Breathe) -> None:
        for target, source in zip(_pieces(own_rows(whole, 0, self._world)), _pieces(share), strict=True):
            self._bring(source, target)
            breathe(target.nbytes)
        for rank in range(1, self._world) if whole.ndim else ():
            for target in _pieces(own_rows(whole, rank, self._world)):
                self._receive(target, rank)
                breathe(target.nbytes)

    def _receive(self, target: Tensor, rank: int) -> None:
        if self._stream is None:
            dist.recv(target, rank, group=self._group)
            return
        bucket = torch.empty(target.shape, dtype=target.dtype, device=self._device)
        dist.recv(bucket, rank, group=self._group)
        self._bring(bucket, target)

    def _bring(self, source: Tensor, target: Tensor) -> None:
        """Into host memory; from a GPU by way of page-locked memory, so that the copy engines do it alone."""
        if self._stream is None:
            target.copy_(source)
            return
        staged = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)  # torch keeps such memory for the next
        staged.copy_(source, non_blocking=True)
        self._stream.synchronize()
        target.copy_(staged)


@dataclass(frozen=True, eq=False)
class GatheredWeights:
    """A `snapshot.DeviceWeights` of which each process has a share: all of them fetch, and rank 0 gets the whole.

    Attributes:
        shares: of this process.
        shapes: of the whole tensors, by name.
        rest: what follows them, and everybody has.
    """

    shares: DeviceCopy
    shapes: Mapping[str, tuple[int, ...]]
    rest: Mapping[str, Array]
    gathering: Gathering

    @property
    def layout(self) -> Layout:
        """See `snapshot.DeviceWeights.layout`: as they are, never rounded on the way."""
        kinds = {name: as_array(torch.empty(0, dtype=share.dtype)).dtype for name, share in self.shares.tensors.items()}
        whole = {name: (kinds[name], shape) for name, shape in self.shapes.items()}
        return {**whole, **{name: (array.dtype, array.shape) for name, array in self.rest.items()}}

    def wait(self) -> None:
        """See `snapshot.DeviceWeights.wait`."""
        self.shares.wait()

    def fetch(self, into: Mapping[str, Array], budget: Budget) -> Rounding:
        """See `snapshot.DeviceWeights.fetch`. At other ranks than 0 `into` stays as it is; it may be empty."""
        self.gathering.gather(self.shares.tensors, into, budget.breathe)
        for name, array in self.rest.items() if into else ():
            into[name][...] = array
        return NOTHING_ROUNDED


def rows(count: int, rank: int, world: int) -> tuple[int, int]:
    """Which of `count` rows are a rank's, from and to: dealt out as FSDP2 does it, so the last ranks may have none."""
    each = -(-count // world)
    return min(count, rank * each), min(count, (rank + 1) * each)


def own_rows(whole: Tensor, rank: int, world: int) -> Tensor:
    """A rank's share of a whole tensor, in the same memory. A single number is everybody's."""
    return whole[slice(*rows(len(whole), rank, world))] if whole.ndim else whole


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A contiguous tensor in flat pieces of `BUCKET_BYTES` at most, in the same memory; none of an empty one."""
    flat, step = tensor.view(-1), BUCKET_BYTES // tensor.element_size()
    return (flat[start : start + step] for start in range(0, flat.numel(), step))
