"""Rounding weights to bfloat16 on the GPU that holds them, by a stated number of thread blocks.

The kernel is persistent: a grid of so many programs walks over all blocks of the tensor, so a push occupies no more
multiprocessors than it was given, however large the tensor is. Elsewhere the same arithmetic runs in torch. All ways
agree bit for bit with `forms.narrow`: to nearest, ties to even, and a finite value beyond the range becomes its
largest.
"""

from __future__ import annotations

import torch

BLOCK = 4096  # values that a program converts at a time


def narrow_tensor(source: torch.Tensor, ctas: int) -> torch.Tensor:
    """float32 as bfloat16, on the same device; on a GPU by at most `ctas` thread blocks, on the current stream."""
    flat = source.contiguous().view(-1)
    if source.device.type != "cuda":
        return narrow_in_torch(flat).view(source.shape)
    packed = torch.empty(flat.shape, dtype=torch.bfloat16, device=source.device)
    launch(flat, packed, ctas)
    return packed.view(source.shape)


def narrow_in_torch(source: torch.Tensor) -> torch.Tensor:
    """The same by torch's own operations, which take as many thread blocks as they like."""
    rounded = source.to(torch.bfloat16)
    overflown = rounded.isinf() & source.isfinite()
    return torch.where(overflown, torch.finfo(torch.bfloat16).max * source.sign(), rounded).to(torch.bfloat16)


def launch(source: torch.Tensor, target: torch.Tensor, ctas: int) -> None:
    """Rounds float32 (n,) into bfloat16 (n,), fewer than 2^31 values, by a grid of `ctas` programs. Needs Triton."""
    from user_sys.weights.gpu.packing_kernel import narrow

    blocks = -(-source.numel() // BLOCK)
    if blocks:
        programs = max(1, min(ctas, blocks))
        narrow[(programs,)](source.view(torch.int32), target.view(torch.int16), source.numel(), blocks, BLOCK=BLOCK)
