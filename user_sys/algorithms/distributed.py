"""Training in several processes: data parallelism with `torch.distributed`, on one computer or several.

Every process holds the whole algorithm and updates it with its part of the batch. Gradients are averaged as soon as a
backward pass has computed them, so the parts count as one batch and all processes keep the same weights. Processes
communicate through gloo and GPUs through NCCL, without encryption or authentication: on the loopback interface if all
are on one computer, else on that of the host name, or of ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``. Each
collective has a deadline.

A large policy can be divided among the processes (`divide`), with FSDP2 of torch (Zhao et al., "PyTorch FSDP", 2023,
arXiv 2304.11277): each holds a part of the weights of linear layers, of their gradients and of Adam's moments. A layer
gathers its weights for its own forward and backward pass. Blocks are not units, as FSDP2's own examples have them:
policies such as SmolVLA and pi0 call the layers of a block, and never the block.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch documents it there

from user_sys.codec import Array
from user_sys.errors import LinkDown, RunError

COLLECTIVE_TIMEOUT_S = 300.0
"""Longer than rank 0 may wait for its disk, a batch and a slot of the publisher process in one step."""
LOOPBACK_NET = "127."
OWN_FAILURES = ("CUDA error", "ncclSystemError", "ncclInvalidUsage", "ncclUnhandledCudaError")  # in a message of torch
DIVIDED_ELEMENTS = 1 << 16  # of the smallest weight that is divided: gathering a smaller one costs more than it saves


class TrainingGroup:
    """The processes that train a policy together. Without arguments it is a single process. One thread calls it.

    Every method but `average_gradients` blocks until all processes call it, and raises LinkDown if one has ended.

    Attributes:
        rank: the number of this process; the process of rank 0 decides.
        world: the number of processes.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    def average_gradients(self, module: nn.Module) -> None:
        """Averages the gradients of `module` in each later backward pass, before the optimizers use them."""
        if self.world > 1:
            for parameter in module.parameters():
                if parameter.requires_grad and not is_divided(parameter):  # FSDP2 averages these
                    parameter.register_post_accumulate_grad_hook(self._average_gradient)  # type: ignore[no-untyped-call]

    def _average_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is None:  # it is kept for the next part of the batch
            return
        with _collective():
            dist.all_reduce(parameter.grad)
        parameter.grad.div_(self.world)

    def broadcast(self, value: int) -> int:
        """Returns the `value` of rank 0."""
        if self.world == 1:
            return value
        shared = torch.tensor(value)
        with _collective():
            dist.broadcast(shared, 0)
        return int(shared)

    def all_true(self, value: bool) -> bool:
        """Returns whether `value` is true in all processes."""
        if self.world == 1:
            return value
        every = torch.tensor(int(value))
        with _collective():
            dist.all_reduce(every, dist.ReduceOp.MIN)
        return bool(every)

    def gather(self, arrays: Mapping[str, Array]) -> list[Mapping[str, Array]]:
        """Returns the arrays of each process, by rank."""
        if self.world == 1:
            return [arrays]
        encoded = save({name: np.asarray(value, order="C") for name, value in arrays.items()})
        own = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        sizes = [torch.empty((), dtype=torch.int64) for _ in range(self.world)]
        with _collective():
            dist.all_gather(sizes, torch.tensor(len(own)))
            padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
            padded[: len(own)] = own
            pieces = [torch.empty_like(padded) for _ in range(self.world)]
            dist.all_gather(pieces, padded)
        return [load(piece[: int(size)].numpy().tobytes()) for piece, size in zip(pieces, sizes, strict=True)]

    def barrier(self) -> None:
        """Waits for all processes."""
        self.all_true(True)


@contextmanager
def _collective() -> Iterator[None]:
    """Translates the failure of a collective operation.

    Raises:
        LinkDown: another process has ended.
        OutOfMemoryError: the GPU of this process has too little memory.
        RunError: the GPU of this process failed, or NCCL cannot use it.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if any(each in str(error) for each in OWN_FAILURES):
            raise RunError(
                f"the GPU of this process failed, or NCCL cannot use it: {' '.join(str(error).split())}; each process "
                "needs a GPU of its own, and in a container a larger /dev/shm (docker run --shm-size=1g)"
            ) from error
        reason = str(error).partition(". ")[0]
        raise LinkDown(f"another process of this learner has ended; see its log ({reason})") from error


@contextmanager
def training_group(rank: int, world: int, host: str, port: int, device: str = "cpu") -> Iterator[TrainingGroup]:
    """Joins the processes that train together. Blocks until all have joined.

    Args:
        host, port: where rank 0 listens; the address of its computer.
        device: torch device of this process.

    Raises:
        RunError: not all processes joined within `COLLECTIVE_TIMEOUT_S`, or the address is unusable.
    """
    if world == 1:
        yield TrainingGroup()
        return
    timeout, is_gpu = timedelta(seconds=COLLECTIVE_TIMEOUT_S), device.startswith("cuda")
    if host.startswith(LOOPBACK_NET):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    try:
        listener = socket.create_server((host, port)).detach() if rank == 0 else None  # on this network only
        store = TCPStore(host, port, world, is_master=rank == 0, timeout=timeout, master_listen_fd=listener)
        backend = "cpu:gloo,cuda:nccl" if is_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except (OSError, RuntimeError) as error:
        raise RunError(f"the {world} processes of the learner cannot meet at {host}:{port}: {error}") from error
    try:
        yield TrainingGroup(rank, world)
    finally:
        if not is_gpu:
            dist.destroy_process_group()  # on GPUs this would wait for processes that have ended


def mean_over_processes(value: Tensor) -> Tensor:
    """Returns the mean of `value` over all processes that train together, or `value` if this is the only one.

    Blocks until all of them call it.

    Raises:
        LinkDown: another process has ended.
    """
    if not dist.is_initialized():
        return value
    total = value.detach().clone()
    with _collective():
        dist.all_reduce(total)
    return total / dist.get_world_size()


# Divided policies -----------------------------------------------------------------------------------------------------


def divide(module: nn.Module, device: str, least: int = DIVIDED_ELEMENTS) -> None:
    """Divides the linear layers of `module` that train, and have weights of `least` elements, among all processes.

    It replaces their parameters: call it before an optimizer is made. All processes call it, with equal weights on
    `device`. A divided module cannot be copied. What one process needs whole, all processes gather (`whole`).
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(dist.distributed_c10d._get_default_group(), torch.device(device).type)
    for each in _divided_layers(module, least):
        fully_shard(each, mesh=mesh, reshard_after_forward=True)
        # FSDP2's hook in the result of a layer is lost if that is a view and the policy adds to it in place.
        each.register_forward_hook(lambda layer, given, result: result.clone(), prepend=True)


def mark_divided(module: nn.Module) -> None:
    """Makes `is_divided` true of what `divide` would divide, to see without other processes what refuses that."""
    for each in _divided_layers(module, DIVIDED_ELEMENTS):
        vars(each.weight)["full_tensor"] = None


def _divided_layers(module: nn.Module, least: int) -> list[nn.Linear]:
    counts = Counter(id(each) for _, each in module.named_parameters(remove_duplicate=False))
    linear = (each for each in module.modules() if type(each) is nn.Linear)
    trained = (each for each in linear if each.weight.requires_grad and each.weight.numel() >= least)
    # Others are tied to an embedding, which reads them too.
    return [each for each in trained if counts[id(each.weight)] == 1]


def is_divided(tensor: Tensor) -> bool:
    """Whether this process has a part of the tensor only: a `DTensor`, whose import takes a second."""
    return hasattr(tensor, "full_tensor")


def own_part(tensor: Any) -> Tensor:
    """Returns this process's part of a divided tensor; another one as it is."""
    part: Tensor = tensor.to_local() if is_divided(tensor) else tensor
    return part


def whole(tensor: Any) -> Tensor:
    """Returns a divided tensor as a whole, for which all processes must call it; another one as it is.

    Raises LinkDown: another process has ended.
    """
    with _collective():
        found: Tensor = tensor.full_tensor() if is_divided(tensor) else tensor
    return found


def divided_like(tensor: Tensor, like: Any) -> Tensor:
    """Returns the `tensor`, which each process has as a whole, divided as `like` is; without communication."""
    if not is_divided(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def clip_gradients(parameters: Sequence[Tensor], norm_max: float) -> None:
    """Scales the gradients so that the norm of all of them is at most `norm_max`; all processes call it."""
    if not any(map(is_divided, parameters)):
        torch.nn.utils.clip_grad_norm_(parameters, norm_max)
        return
    gradients = [each.grad for each in parameters if each.grad is not None]
    kinds = [[each for each in gradients if is_divided(each) is divided] for divided in (False, True)]
    with _collective():
        norms = [whole(torch.nn.utils.get_total_norm(kind)) for kind in kinds if kind]
    if norms:
        scale = (norm_max / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0)
        for each in gradients:
            own_part(each).mul_(scale)
