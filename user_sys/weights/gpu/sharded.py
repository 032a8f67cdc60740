"""Weights of a learner that is sharded over GPUs (FSDP2), gathered one tensor at a time; and capped collectives.

No rank's device ever holds all of the policy: beyond its shards, only the one tensor that is under way, on the rank
that publishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from user_sys.errors import ConfigError


def gathered(named: Iterable[tuple[str, torch.Tensor]], publisher: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor whole, on the device of rank `publisher`, one after the other; nothing on the other ranks.

    Every rank of the mesh must iterate to the end, over the same tensors in the same order. What is given is used up
    before the next comes: copy it away (`device.HostCopies`), keep it not.

    Raises:
        ConfigError: a tensor is laid out otherwise than FSDP2 does it: sharded along one dimension of a mesh of one.
    """
    for name, tensor in named:
        whole = _whole(name, tensor.detach(), publisher)
        if whole is not None:
            yield name, whole


def _whole(name: str, tensor: torch.Tensor, publisher: int) -> torch.Tensor | None:
    here = dist.get_rank() == publisher
    if not isinstance(tensor, DTensor):
        return tensor if here else None
    local, placements = tensor.to_local(), tensor.placements
    if len(placements) == 1 and isinstance(placements[0], Replicate):
        return local if here else None
    if len(placements) != 1 or not isinstance(placements[0], Shard):
        raise ConfigError(f"{name!r} lies as {placements} on its mesh; it can be gathered from one Shard only")
    dim, group = placements[0].dim, tensor.device_mesh.get_group()
    rows = -(-tensor.shape[dim] // tensor.device_mesh.size())
    padded = local.new_zeros([rows if i == dim else size for i, size in enumerate(tensor.shape)])
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    pieces = [torch.empty_like(padded) for _ in range(tensor.device_mesh.size())] if here else None
    dist.gather(padded, pieces, dst=publisher, group=group)
    return None if pieces is None else torch.cat(pieces, dim).narrow(dim, 0, tensor.shape[dim])


def capped_group(ctas: int) -> dist.ProcessGroup:
    """A group of all ranks whose NCCL collectives take at most `ctas` thread blocks; all ranks call it alike.

    Raises:
        ConfigError: torch was built without NCCL.
    """
    if not dist.is_nccl_available():
        raise ConfigError("this torch has no NCCL; collectives with a bounded number of thread blocks need it")
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas = 1, ctas
    group: dist.ProcessGroup = dist.new_group(backend="nccl", pg_options=options)
    return group
