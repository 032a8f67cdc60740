"""Rounding weights to bfloat16 on the GPU that holds them, by a stated number of thread blocks.

The kernel is persistent: a grid of so many programs walks over all blocks of the tensor, so a push occupies no more
multiprocessors than it was given, however large the tensor is. Elsewhere the same arithmetic runs in torch. All ways
agree bit for bit with `forms.narrow`: to nearest, ties to even, and a finite value beyond the range becomes its
largest. The error that this makes is measured on the way, by the kernel in float32.
"""

from __future__ import annotations

import torch

from user_sys.weights.forms import NOTHING_ROUNDED, Rounding

BLOCK = 4096  # values that a program converts at a time


def narrow_tensor(source: torch.Tensor, ctas: int) -> tuple[torch.Tensor, Rounding]:
    """float32 as bfloat16, on the same device; on a GPU by at most `ctas` thread blocks, on the current stream, which
    is waited for.
    """
    flat = source.contiguous().view(-1)
    if not flat.numel():
        return source.to(torch.bfloat16), NOTHING_ROUNDED
    if source.device.type != "cuda":
        packed = narrow_in_torch(flat)
        return packed.view(source.shape), _measured(flat, packed)
    packed = torch.empty(flat.shape, dtype=torch.bfloat16, device=source.device)
    largest, squared, total = launch(flat, packed, ctas).cpu().double().unbind(-1)
    return packed.view(source.shape), Rounding(float(largest.max()), float(squared.sum()), float(total.sum()))


def narrow_in_torch(source: torch.Tensor) -> torch.Tensor:
    """The same by torch's own operations, which take as many thread blocks as they like."""
    rounded = source.to(torch.bfloat16)
    overflown = rounded.isinf() & source.isfinite()
    return torch.where(overflown, torch.finfo(torch.bfloat16).max * source.sign(), rounded).to(torch.bfloat16)


def launch(source: torch.Tensor, target: torch.Tensor, ctas: int) -> torch.Tensor:
    """Rounds float32 (n,) into bfloat16 (n,), 0 < n < 2^31, by a grid of `ctas` programs. Needs Triton.

    Returns:
        float32 (programs, 3): of what each rounded the largest error, the sum of its squares, and that of the values'.
    """
    from user_sys.weights.gpu.packing_kernel import narrow

    blocks = -(-source.numel() // BLOCK)
    programs = max(1, min(ctas, blocks))
    errors = torch.empty((programs, 3), dtype=torch.float32, device=source.device)
    wide, narrowed = source.view(torch.int32), target.view(torch.int16)
    # A Triton that is about to change its default for fused additions warns of it where nobody says which is wanted.
    narrow[(programs,)](wide, narrowed, errors, source.numel(), blocks, BLOCK=BLOCK, enable_fp_fusion=True)
    return errors


def _measured(wide: torch.Tensor, packed: torch.Tensor) -> Rounding:
    values = wide.double()
    errors = packed.double() - values
    return Rounding(float(errors.abs().max()), float(errors.square().sum()), float(values.square().sum()))
