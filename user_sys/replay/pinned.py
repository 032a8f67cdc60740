"""Memory that a GPU copies from without a detour."""

from __future__ import annotations

import torch

from user_sys.codec import Array


def allocate_pinned(shape: tuple[int, ...], dtype: str) -> Array:
    """An uninitialised page-locked array. Needs a GPU: torch raises RuntimeError without one."""
    return torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=True).numpy()
