"""Copies weights from a GPU to the host while training continues, rounded to bfloat16 on request.

A snapshot is a copy in GPU memory on the caller's stream, so the next update may change the weights at once (900 MB
take a millisecond). The copy engines then transfer it piece by piece to page-locked host memory, on a stream of the
lowest priority or in a green context of a few multiprocessors. A kernel may round each piece first. It is persistent:
a grid with a bounded number of programs covers a tensor of any size. All roundings equal `precision.to_bf16` bit for
bit. Without a GPU the same calls work in host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from user_sys.codec import Array
from user_sys.errors import ConfigError
from user_sys.messages import Precision
from user_sys.weights.governor import MAX_COPY_BYTES
from user_sys.weights.precision import NO_ROUNDING, RoundingStats
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.snapshot import CopyBudget, TensorLayout
from user_sys.weights.state import BF16

BLOCK_VALUES = 4096  # values that a program converts at a time


def round_to_bf16(source: torch.Tensor, ctas: int) -> tuple[torch.Tensor, RoundingStats]:
    """Rounds float32 to bfloat16 on the same device; returns the error too. Blocks until done.

    On a GPU it runs on the current stream with at most `ctas` thread blocks.
    """
    flat = source.contiguous().view(-1)
    if not flat.numel():
        return source.to(torch.bfloat16), NO_ROUNDING
    if source.device.type != "cuda":
        packed = round_to_bf16_in_torch(flat)
        return packed.view(source.shape), _rounding_stats_of(flat, packed)
    packed = torch.empty(flat.shape, dtype=torch.bfloat16, device=source.device)
    largest, squared, total = launch_bf16_kernel(flat, packed, ctas).cpu().double().unbind(-1)
    return packed.view(source.shape), RoundingStats(float(largest.max()), float(squared.sum()), float(total.sum()))


def round_to_bf16_in_torch(source: torch.Tensor) -> torch.Tensor:
    """Does the same by torch operations, which use any number of thread blocks."""
    rounded = source.to(torch.bfloat16)
    overflown = rounded.isinf() & source.isfinite()
    return torch.where(overflown, torch.finfo(torch.bfloat16).max * source.sign(), rounded).to(torch.bfloat16)


def launch_bf16_kernel(source: torch.Tensor, target: torch.Tensor, ctas: int) -> torch.Tensor:
    """Rounds float32 (n,) into bfloat16 (n,), 0 < n < 2^31, by a grid of `ctas` programs. Needs Triton.

    Returns:
        float32 (programs, 3): the largest error of each program, and the sums of squared errors and of squared values.
    """
    from user_sys.weights.gpu_kernel import bf16_kernel

    blocks = -(-source.numel() // BLOCK_VALUES)
    programs = max(1, min(ctas, blocks))
    errors = torch.empty((programs, 3), dtype=torch.float32, device=source.device)
    wide, narrowed = source.view(torch.int32), target.view(torch.int16)
    # enable_fp_fusion is explicit because some Triton versions warn that its default will change.
    bf16_kernel[(programs,)](wide, narrowed, errors, source.numel(), blocks, BLOCK=BLOCK_VALUES, enable_fp_fusion=True)
    return errors


def _rounding_stats_of(wide: torch.Tensor, packed: torch.Tensor) -> RoundingStats:
    values = wide.double()
    errors = packed.double() - values
    return RoundingStats(float(errors.abs().max()), float(errors.square().sum()), float(values.square().sum()))


CopyPrecision = Literal["exact", "bf16"]
PROBE_SIZES = (2 * BLOCK_VALUES, 2 * BLOCK_VALUES - 1)  # Triton compiles separately for counts that are multiples of 16


class HostCopier:
    """Takes snapshots of the tensors of one device and copies them to the host, one after the other.

    One thread takes snapshots; it or another one fetches them.
    """

    def __init__(self, device: torch.device, pack: CopyPrecision = "exact", green_sms: int = 0) -> None:
        """Blocks for the device if it creates a green context.

        Args:
            pack: ``bf16`` rounds float32 tensors on the device and so halves the transfer.
            green_sms: multiprocessors of the green context for rounding and copying; 0 for none.

        Raises:
            ConfigError: the green context cannot be created, or the device cannot round.
        """
        self._device, self._pack = device, pack
        self._staging: torch.Tensor | None = None
        self._green: object = None
        self._stream = _stream(device)
        if green_sms:
            self._green, self._stream = green_stream(device, green_sms)
        if pack == "bf16":
            _check_packing(device)

    def __del__(self) -> None:
        """Frees the page-locked memory before the green context: torch records an event on its stream at that
        moment.
        """
        self._staging = None

    def snapshot(self, tensors: Mapping[str, torch.Tensor]) -> DeviceSnapshot:
        """Copies `tensors` on their device and returns at once, ordered before later work on the caller's stream."""
        with torch.no_grad():
            copies = {
                name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
            }
        made = None if self._stream is None else _record_event(torch.cuda.current_stream(self._device))
        return DeviceSnapshot(copies, made, self)

    def layout(self, tensors: Mapping[str, torch.Tensor]) -> TensorLayout:
        """Returns the layout of `tensors` on the host."""
        kinds = {dtype: as_array(torch.empty(0, dtype=dtype)).dtype for dtype in {t.dtype for t in tensors.values()}}
        return {name: (BF16 if self._packs(t) else kinds[t.dtype], (*t.shape,)) for name, t in tensors.items()}

    def fetch(
        self, tensors: Mapping[str, torch.Tensor], into: Mapping[str, Array], budget: CopyBudget
    ) -> RoundingStats:
        """See `snapshot.DeviceWeights.fetch`; `tensors` come from a completed `snapshot`."""
        rounding = NO_ROUNDING
        with torch.no_grad(), on_stream(self._stream):
            for name, tensor in tensors.items():
                target = into[name].reshape(-1)  # a view
                for part, piece in self._pieces(tensor, budget):
                    packed, more = round_to_bf16(piece, budget.ctas) if self._packs(piece) else (piece, NO_ROUNDING)
                    target[part] = as_array(self._hosted(packed))
                    rounding = rounding.merge(more)
                    budget.yield_cpu(packed.nbytes)
        return rounding

    def _pieces(self, tensor: torch.Tensor, budget: CopyBudget) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields the pieces of one copy each; asks the budget before each."""
        flat, start = tensor.view(-1), 0
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
    """A `snapshot.DeviceWeights`. Its `tensors` are contiguous and never change."""

    tensors: Mapping[str, torch.Tensor]
    _made: torch.cuda.Event | None
    _copies: HostCopier

    @property
    def layout(self) -> TensorLayout:
        """See `snapshot.DeviceWeights.layout`."""
        return self._copies.layout(self.tensors)

    def wait(self) -> None:
        """See `snapshot.DeviceWeights.wait`."""
        if self._made is not None:
            self._made.synchronize()

    def fetch(self, into: Mapping[str, Array], budget: CopyBudget) -> RoundingStats:
        """See `snapshot.DeviceWeights.fetch`."""
        return self._copies.fetch(self.tensors, into, budget)


def make_host_copier(device: str, publish: PublishConfig) -> HostCopier | None:
    """Returns a copier for a torch device, or None if the weights lie in host memory.

    Raises:
        ConfigError: `publish` requests a green context that cannot be created.
    """
    place = torch.device(device)
    if place.type == "cpu" and not publish.green_sms:
        return None
    return HostCopier(place, copy_precision(publish.precisions), publish.green_sms)


def copy_precision(forms: Collection[Precision]) -> CopyPrecision:
    """Returns the precision of copies: rounding on the device is allowed only if nothing needs exact weights."""
    return "bf16" if set(forms) == {"bf16"} else "exact"


def green_stream(device: torch.device, sms: int) -> tuple[object, torch.cuda.Stream]:
    """Creates a CUDA green context and a stream on its multiprocessors. The caller keeps the context alive.

    Args:
        sms: number of multiprocessors; the driver rounds up to its granularity.

    Raises:
        ConfigError: `device` is not a GPU, or torch, the driver or the GPU cannot create the context.
    """
    what = f"learner.publish.green_sms is {sms}"
    if device.type != "cuda":
        raise ConfigError(f"{what}, and the learner trains on the CPU: set it to 0, or train on a GPU")
    try:
        from torch.cuda.green_contexts import GreenContext

        torch.cuda.synchronize(device)  # the primary context must exist first
        index = torch.cuda.current_device() if device.index is None else device.index
        context: Any = GreenContext.create(num_sms=sms, device_id=index)
        return context, context.Stream()  # the first torch versions with green contexts lack `Stream`
    except (ImportError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"{what}, and torch {torch.__version__} cannot create this green context: {error}; use torch and a "
            "driver for CUDA 12.8 or newer, and at most as many multiprocessors as the GPU has"
        ) from error


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
    """Returns a view as an array; bfloat16 as `state.BF16`, which numpy lacks."""
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
