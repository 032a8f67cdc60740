"""Rounding weights to bfloat16 on the GPU that holds them, by a stated number of thread blocks.

The kernel is persistent: a grid of so many programs walks over all blocks of the tensor, so a push occupies no more
multiprocessors than it was given, however large the tensor is. Elsewhere the same arithmetic runs in torch. All ways
agree bit for bit with `forms.narrow`: to nearest, ties to even, and a finite value beyond the range becomes its
largest. The error that this makes is measured on the way, by the kernel in float32.

Weights from a GPU to the host: packed by few thread blocks, copied by the copy engines, beside the training.

Of a version two things are made, each in the order of its stream: a copy in the GPU's memory, on the caller's own
stream, so that the next update may change the weights at once (900 MB take a millisecond there); and, piece by piece, a
copy in page-locked host memory by the copy engines, packed before by a kernel of a bounded number of thread blocks
where that is asked for. The latter runs on a stream of the lowest priority, or on one of a green context: on a few
multiprocessors that are set aside. Without a GPU the same calls work in host memory.
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
    """float32 as bfloat16, on the same device; on a GPU by at most `ctas` thread blocks, on the current stream, which
    is waited for.
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
    """The same by torch's own operations, which take as many thread blocks as they like."""
    rounded = source.to(torch.bfloat16)
    overflown = rounded.isinf() & source.isfinite()
    return torch.where(overflown, torch.finfo(torch.bfloat16).max * source.sign(), rounded).to(torch.bfloat16)


def launch_bf16_kernel(source: torch.Tensor, target: torch.Tensor, ctas: int) -> torch.Tensor:
    """Rounds float32 (n,) into bfloat16 (n,), 0 < n < 2^31, by a grid of `ctas` programs. Needs Triton.

    Returns:
        float32 (programs, 3): of what each rounded the largest error, the sum of its squares, and that of the values'.
    """
    from user_sys.weights.gpu_kernel import bf16_kernel

    blocks = -(-source.numel() // BLOCK_VALUES)
    programs = max(1, min(ctas, blocks))
    errors = torch.empty((programs, 3), dtype=torch.float32, device=source.device)
    wide, narrowed = source.view(torch.int32), target.view(torch.int16)
    # A Triton that is about to change its default for fused additions warns of it where nobody says which is wanted.
    bf16_kernel[(programs,)](wide, narrowed, errors, source.numel(), blocks, BLOCK=BLOCK_VALUES, enable_fp_fusion=True)
    return errors


def _rounding_stats_of(wide: torch.Tensor, packed: torch.Tensor) -> RoundingStats:
    values = wide.double()
    errors = packed.double() - values
    return RoundingStats(float(errors.abs().max()), float(errors.square().sum()), float(values.square().sum()))


CopyPrecision = Literal["exact", "bf16"]
PROBE_SIZES = (2 * BLOCK_VALUES, 2 * BLOCK_VALUES - 1)  # Triton compiles apart what has a multiple of 16 values


class HostCopier:
    """Takes copies of the tensors of one device, which are brought to the host one after the other.

    One thread takes them; it or another one fetches.
    """

    def __init__(self, device: torch.device, pack: CopyPrecision = "exact", green_sms: int = 0) -> None:
        """Blocks for the device where a green context is to be made.

        Args:
            pack: ``bf16`` rounds float32 tensors on the device, as `forms.narrow` does, and halves what is copied.
            green_sms: multiprocessors of the green context in which packing and copying run; 0 for none.

        Raises:
            ConfigError: there is no green context of so many multiprocessors; or the device cannot round.
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
        """The page-locked memory goes before the green context: as torch takes it back it has an event recorded on the
        stream that used it, which is no more once its context has gone."""
        self._staging = None

    def snapshot(self, tensors: Mapping[str, torch.Tensor]) -> DeviceSnapshot:
        """Copies `tensors`, on their device, and returns at once: what the caller's stream does next comes after."""
        with torch.no_grad():
            copies = {
                name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
            }
        made = None if self._stream is None else _record_event(torch.cuda.current_stream(self._device))
        return DeviceSnapshot(copies, made, self)

    def layout(self, tensors: Mapping[str, torch.Tensor]) -> TensorLayout:
        """In which `tensors` come to the host."""
        kinds = {dtype: as_array(torch.empty(0, dtype=dtype)).dtype for dtype in {t.dtype for t in tensors.values()}}
        return {name: (BF16 if self._packs(t) else kinds[t.dtype], (*t.shape,)) for name, t in tensors.items()}

    def fetch(
        self, tensors: Mapping[str, torch.Tensor], into: Mapping[str, Array], budget: CopyBudget
    ) -> RoundingStats:
        """See `snapshot.DeviceWeights.fetch`; of `tensors` that `snapshot` took and the device has made."""
        rounding = NO_ROUNDING
        with torch.no_grad(), on_stream(self._stream):
            for name, tensor in tensors.items():
                target = into[name].reshape(-1)  # the same memory
                for part, piece in self._pieces(tensor, budget):
                    packed, more = round_to_bf16(piece, budget.ctas) if self._packs(piece) else (piece, NO_ROUNDING)
                    target[part] = as_array(self._hosted(packed))
                    rounding = rounding.merge(more)
                    budget.yield_cpu(packed.nbytes)
        return rounding

    def _pieces(self, tensor: torch.Tensor, budget: CopyBudget) -> Iterator[tuple[slice, torch.Tensor]]:
        """Of what one copy may have; the budget is asked before each."""
        flat, start = tensor.view(-1), 0
        itemsize = BF16.itemsize if self._packs(tensor) else flat.element_size()
        while start < flat.numel():
            count = max(1, min(budget.chunk_bytes, MAX_COPY_BYTES) // itemsize)
            count -= (
                count % BLOCK_VALUES if count > BLOCK_VALUES else 0
            )  # one that begins elsewhere is loaded value by value
            part = slice(start, min(start + count, flat.numel()))
            yield part, flat[part]
            start = part.stop

    def _packs(self, tensor: torch.Tensor) -> bool:
        return self._pack == "bf16" and tensor.dtype == torch.float32

    def _hosted(self, piece: torch.Tensor) -> torch.Tensor:
        """`piece` in host memory, until the next call."""
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
    """A `snapshot.DeviceWeights`. Nobody changes its `tensors`, which are contiguous."""

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
    """How weights come to the host from what torch calls `device`; None where they lie there.

    Raises:
        ConfigError: `publish` asks for a green context that cannot be made.
    """
    place = torch.device(device)
    if place.type == "cpu" and not publish.green_sms:
        return None
    return HostCopier(place, copy_precision(publish.forms), publish.green_sms)


def copy_precision(forms: Collection[Precision]) -> CopyPrecision:
    """Whether weights that are published in `forms` may be rounded on their device: where nothing needs exact ones."""
    return "bf16" if set(forms) == {"bf16"} else "exact"


def green_stream(device: torch.device, sms: int) -> tuple[object, torch.cuda.Stream]:
    """A CUDA green context, and a stream whose work runs on its multiprocessors alone; the context is to live as long.

    Args:
        sms: how many multiprocessors; the driver rounds up to what the GPU hands out together.

    Raises:
        ConfigError: not a GPU, or this torch, driver or GPU makes none of so many.
    """
    what = f"learner.publish.green_sms is {sms}"
    if device.type != "cuda":
        raise ConfigError(f"{what}, and the learner trains on the processor: leave it 0, or train on a GPU")
    try:
        from torch.cuda.green_contexts import GreenContext

        torch.cuda.synchronize(device)  # the GPU's own context is to be there before
        index = torch.cuda.current_device() if device.index is None else device.index
        context: Any = GreenContext.create(num_sms=sms, device_id=index)
        return context, context.Stream()  # the first torch that had green contexts had no streams of theirs
    except (ImportError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"{what}, and torch {torch.__version__} makes no such green context on this GPU: {error}; it takes a torch "
            "and a driver for CUDA 12.8 or newer, and no more multiprocessors than the GPU has"
        ) from error


def _check_packing(device: torch.device) -> None:
    """Has the kernel compiled, so that no training waits for that, and run.

    Raises:
        ConfigError: it cannot be.
    """
    try:
        for count in PROBE_SIZES:
            round_to_bf16(torch.zeros(count, device=device), 1)
    except Exception as error:  # of any kind: Triton's are its compiler's, the C compiler's and the driver's
        raise ConfigError(
            "learner.publish.forms is bf16 alone, to which the GPU itself rounds, by a kernel of Triton's. That fails "
            f"here: {type(error).__name__}: {error}; it takes the Triton that comes with torch, and a C "
            "compiler. With exact beside bf16 the processor rounds"
        ) from error


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What this thread has a GPU do inside of it is done on `stream`; without one it changes nothing."""
    if stream is None:
        yield
        return
    # A new thread's GPU is the first one. Leaving another's stream alone would turn to that again, and so take hundreds
    # of megabytes there, where this process may have nothing else.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def as_array(tensor: torch.Tensor) -> Array:
    """The same memory as an array; bfloat16 as `state.BF16`, which numpy lacks."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BF16)
    return tensor.numpy()


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    # 0 is the lowest priority there is, and the default: who wants to be ahead of pushes takes a stream below 0.
    return torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]


def _record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Of all that `stream` has to do now; whoever waits for it sleeps meanwhile."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
