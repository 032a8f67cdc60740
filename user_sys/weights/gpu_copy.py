"""Copies weights from a GPU to the host while training continues, rounded to bfloat16 on request.

A snapshot is a copy in GPU memory on the caller's stream, so the next update may change the weights at once (900 MB
take a millisecond). The copy engines then transfer it piece by piece to page-locked host memory, on a stream of the
lowest priority. A kernel may round each piece first. It is persistent: a grid with a bounded number of programs covers
a tensor of any size. All roundings equal `state.to_bf16` bit for bit. Without a GPU the same calls work in host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from user_sys.codec import BF16, Array
from user_sys.errors import ConfigError
from user_sys.messages import Precision
from user_sys.weights.governor import MAX_COPY_BYTES, GovernedBudget
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.state import TensorLayout

BLOCK_VALUES = 4096  # values that a program converts at a time


def round_to_bf16(source: torch.Tensor, ctas: int) -> torch.Tensor:
    """Rounds float32 to bfloat16 on the same device; a finite value beyond the range becomes the largest finite one.

    On a GPU a Triton kernel rounds on the current stream, with at most `ctas` thread blocks.
    """
    flat = source.contiguous().view(-1)
    if source.device.type != "cuda" or not flat.numel():
        rounded = flat.to(torch.bfloat16)
        overflown = rounded.isinf() & flat.isfinite()
        largest = torch.finfo(torch.bfloat16).max * flat.sign()
        return torch.where(overflown, largest, rounded).to(torch.bfloat16).view(source.shape)
    from user_sys.weights.gpu_kernel import bf16_kernel

    packed = torch.empty(flat.shape, dtype=torch.bfloat16, device=source.device)
    blocks = -(-flat.numel() // BLOCK_VALUES)
    grid = (max(1, min(ctas, blocks)),)
    # enable_fp_fusion is explicit because some Triton versions warn that its default will change.
    wide, narrowed = flat.view(torch.int32), packed.view(torch.int16)
    bf16_kernel[grid](wide, narrowed, flat.numel(), blocks, BLOCK=BLOCK_VALUES, enable_fp_fusion=True)
    return packed.view(source.shape)


CopyPrecision = Literal["exact", "bf16"]
PROBE_SIZES = (2 * BLOCK_VALUES, 2 * BLOCK_VALUES - 1)  # Triton compiles separately for counts that are multiples of 16


class HostCopier:
    """Takes snapshots of the tensors of one device and copies them to the host, one after the other.

    One thread takes snapshots; it or another one fetches them.
    """

    def __init__(self, device: torch.device, pack: CopyPrecision = "exact") -> None:
        """
        Args:
            pack: ``bf16`` rounds float32 tensors on the device and so halves the transfer.

        Raises:
            ConfigError: the device cannot round.
        """
        self._device, self._pack = device, pack
        self._staging: torch.Tensor | None = None
        self._stream = _stream(device)
        if pack == "bf16":
            _check_packing(device)

    def snapshot(
        self, tensors: Mapping[str, torch.Tensor], frozen: Collection[str] = (), owned: Collection[str] = ()
    ) -> DeviceSnapshot:
        """Copies `tensors` on their device and returns at once, ordered before later work on the caller's stream.

        Those that are `frozen` never change, and nobody else has those that are `owned`: both are not copied on the
        device.
        """
        with torch.no_grad():
            copies = {
                name: tensor.detach()
                if name in frozen or name in owned
                else tensor.detach().clone(memory_format=torch.contiguous_format)
                for name, tensor in tensors.items()
            }
        made = None if self._stream is None else _record_event(torch.cuda.current_stream(self._device))
        return DeviceSnapshot(copies, frozenset(frozen), made, self)

    def layout(self, tensors: Mapping[str, torch.Tensor]) -> TensorLayout:
        """Returns the layout of `tensors` on the host."""
        kinds = {dtype: as_array(torch.empty(0, dtype=dtype)).dtype for dtype in {t.dtype for t in tensors.values()}}
        return {name: (BF16 if self._packs(t) else kinds[t.dtype], (*t.shape,)) for name, t in tensors.items()}

    def fetch(self, tensors: Mapping[str, torch.Tensor], into: Mapping[str, Array], budget: GovernedBudget) -> None:
        """See `DeviceSnapshot.fetch`; `tensors` come from a completed `snapshot`."""
        with torch.no_grad(), on_stream(self._stream):
            for name, tensor in tensors.items():
                target = into[name].reshape(-1)  # a view
                for part, piece in self._pieces(tensor, budget):
                    packed = round_to_bf16(piece, budget.ctas) if self._packs(piece) else piece
                    target[part] = as_array(self._hosted(packed))
                    budget.yield_cpu(packed.nbytes)

    def _pieces(self, tensor: torch.Tensor, budget: GovernedBudget) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields the pieces of one copy each; asks the budget before each."""
        flat, start = tensor.reshape(-1), 0
        itemsize = BF16.itemsize if self._packs(tensor) else flat.element_size()
        while start < flat.numel():
            count = max(1, min(budget.chunk_bytes, MAX_COPY_BYTES) // itemsize)
            count -= (
                count % BLOCK_VALUES if count > BLOCK_VALUES else 0
            )  # an unaligned piece would be loaded value by value
            part = slice(start, min(start + count, flat.numel()))
            yield part, flat[part]
            start = part.stop

    def _packs(self, tensor: torch.Tensor) -> bool:
        return self._pack == "bf16" and tensor.dtype == torch.float32

    def _hosted(self, piece: torch.Tensor) -> torch.Tensor:
        """Returns `piece` in host memory, valid until the next call."""
        if self._stream is None:
            return piece
        if self._staging is None:
            self._staging = torch.empty(MAX_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        staged = self._staging[: piece.nbytes].view(piece.dtype)
        staged.copy_(piece, non_blocking=True)
        _record_event(self._stream).synchronize()
        return staged


@dataclass(frozen=True, eq=False)
class DeviceSnapshot:
    """A snapshot of weights in device memory; later updates do not change it. One thread, any one, calls it.

    Attributes:
        tensors: contiguous.
        frozen: the names of the tensors that are equal in all snapshots.
    """

    tensors: Mapping[str, torch.Tensor]
    frozen: frozenset[str]
    _made: torch.cuda.Event | None
    _copies: HostCopier

    @property
    def layout(self) -> TensorLayout:
        """The layout of the arrays on the host."""
        return self._copies.layout(self.tensors)

    def wait(self) -> None:
        """Blocks until the device has made the copy, which may be some steps after the call that requested it."""
        if self._made is not None:
            self._made.synchronize()

    def fetch(self, into: Mapping[str, Array], budget: GovernedBudget) -> None:
        """Copies the weights that `into` names to its C-contiguous arrays, by `layout`. Blocks until they arrived."""
        self._copies.fetch({name: self.tensors[name] for name in into}, into, budget)


PolicySnapshot: TypeAlias = Mapping[str, Array] | DeviceSnapshot
"""Arrays in host memory, which the next update may change unless they are read-only, or device weights to fetch
later."""


def layout_of(weights: PolicySnapshot) -> TensorLayout:
    """Returns the layout of `weights` on the host."""
    if isinstance(weights, Mapping):
        return {name: (array.dtype, array.shape) for name, array in weights.items()}
    return weights.layout


def make_host_copier(device: str, publish: PublishConfig) -> HostCopier | None:
    """Returns a copier for a torch device, or None if the weights lie in host memory.

    Raises:
        ConfigError: the device cannot round to a precision that `publish` requests.
    """
    place = torch.device(device)
    if place.type == "cpu":
        return None
    return HostCopier(place, copy_precision(publish.precisions))


def copy_precision(forms: Collection[Precision]) -> CopyPrecision:
    """Returns the precision of copies: rounding on the device is allowed only if nothing needs exact weights."""
    return "bf16" if set(forms) == {"bf16"} else "exact"


def _check_packing(device: torch.device) -> None:
    """Compiles and runs the kernel, so that training does not wait for the compiler.

    Raises:
        ConfigError: it fails.
    """
    try:
        for count in PROBE_SIZES:
            round_to_bf16(torch.zeros(count, device=device), 1)
    except Exception as error:  # of any type: from Triton, the C compiler or the driver
        raise ConfigError(
            "learner.publish.precisions is bf16 alone, so the GPU rounds with a Triton kernel, which fails here: "
            f"{type(error).__name__}: {error}; install the Triton that torch depends on and a C compiler, "
            "or add exact to precisions, so that the CPU rounds"
        ) from error


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Runs this thread's GPU work on `stream`; without a stream it has no effect."""
    if stream is None:
        yield
        return
    # A new thread's current device is GPU 0. Leaving a stream of another GPU would select GPU 0 and allocate hundreds
    # of megabytes there.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def as_array(tensor: torch.Tensor) -> Array:
    """Returns a view as an array; bfloat16 as `codec.BF16`, which numpy lacks."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BF16)
    return tensor.numpy()


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    # 0 is the lowest priority and the default; training uses a stream below 0 to run first.
    return torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]


def _record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Records an event after the current work of `stream`; waiting for it sleeps."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
