"""Several processes that train one policy, on one computer or several: what they have of it, and what they say to each
other.

Rank 0 decides what is done next and says so (`tell`, `hear`); then all of them make the same collectives in the same
order. Networks are sharded with FSDP2: parameters, gradients, and whatever follows their shape. Each collective has a
deadline; one that another process left, or never came to, raises torch's RuntimeError.

What passes between processes goes through gloo, what passes between GPUs through NCCL: both on the interface that has
the process's address, and neither encrypted nor authenticated. Weights are gathered for publishing through a group of
their own, which on GPUs may use a few thread blocks only and has no priority over training.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch documents them there

from user_sys.algorithms.gathering import Gathering, own_rows
from user_sys.algorithms.interface import interface_of
from user_sys.algorithms.network import Network
from user_sys.codec import Array
from user_sys.errors import RunError

COLLECTIVE_S = 300.0
"""Longer than rank 0 may wait for its disk, for a batch and for a slot of its envoy, all in one turn."""


def open_meeting(address: str, world: int) -> TCPStore:
    """Where `world` processes come together: kept by rank 0, which listens on `address` alone, at a free port.

    Raises:
        RunError: this computer has no such address, or torch cannot listen there.
    """
    try:
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            return TCPStore(
                address,
                port,
                world,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=COLLECTIVE_S),
                master_listen_fd=server.detach(),
            )
    except (OSError, RuntimeError) as error:
        raise RunError(f"the processes of the learner cannot meet at {address}: {error}") from error


def find_meeting(address: str, port: int, world: int) -> TCPStore:
    """What `open_meeting` has opened elsewhere. Raises RunError: it is not to be reached."""
    try:
        return TCPStore(address, port, world, is_master=False, timeout=timedelta(seconds=COLLECTIVE_S))
    except RuntimeError as error:
        raise RunError(f"the learner's first process is not to be reached at {address}:{port}: {error}") from error


class Ranks:
    """One process among those that train one policy; all of them make theirs at the same time. One thread calls it.

    Attributes:
        rank: this process's number; 0 decides.
        world: how many there are.
        device: what this one trains on.
        publishing: gathers weights; another thread may call it, the same one each time.
    """

    def __init__(self, rank: int, world: int, device: str, meeting: Store, address: str, collective_ctas: int) -> None:
        """Blocks until all have come.

        Args:
            device: torch's name of what this process alone trains on.
            meeting: where they come together.
            address: where the others find this process; of this computer.
            collective_ctas: thread blocks of a GPU that gathering weights may use.

        Raises:
            RunError: not all came within `COLLECTIVE_S`, they cannot reach one another, or `address` is not this
                computer's.
        """
        self.rank, self.world = rank, world
        self.device = torch.device(device)
        interface = interface_of(address)  # nobody beyond its network takes part
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # this one, and not all that begin like it
        try:
            self._join(meeting)
            self.publishing = Gathering(rank, world, self.device, self._publishing_group(collective_ctas))
            # NCCL connects when it is first used. Beside the training's own collectives that might wait for ever.
            shares = {"": self.own(torch.zeros(world, device=self.device))}
            self.publishing.gather(shares, {"": np.zeros(world, np.float32)})
        except RuntimeError as error:
            raise RunError(f"the {world} processes of the learner did not come together: {error}") from error
        self._gathering = Gathering(rank, world, self.device, None)

    def _join(self, meeting: Store) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        on_gpus = self.device.type == "cuda"
        if on_gpus:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            store=meeting,
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
        everybody = dist.group.WORLD
        assert everybody is not None  # it was just made
        # Of torch's own making it would have another group, where this computer has a GPU and whatever the others have.
        self._mesh = DeviceMesh.from_group(everybody, self.device.type)

    def _publishing_group(self, collective_ctas: int) -> dist.ProcessGroup:
        timeout = timedelta(seconds=COLLECTIVE_S)
        if self.device.type == "cpu":
            return cast(dist.ProcessGroup, dist.new_group(timeout=timeout, backend="gloo"))
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=False)
        options._timeout = timeout  # torch takes it from here, and warns where the two differ
        options.config.max_ctas = collective_ctas
        return cast(dist.ProcessGroup, dist.new_group(timeout=timeout, backend="nccl", pg_options=options))

    def leave(self) -> None:
        """Ends the groups. Among GPUs it blocks until all processes of this computer leave."""
        dist.destroy_process_group()

    # What is done next

    def tell(self, turn: int, detail: int = 0) -> None:
        """Rank 0 says what all do next."""
        dist.broadcast(torch.tensor([turn, detail]), 0)

    def hear(self) -> tuple[int, int]:
        """What rank 0 says next: a turn and its detail. Blocks for `COLLECTIVE_S` at most."""
        said = torch.empty(2, dtype=torch.int64)
        dist.broadcast(said, 0)
        turn, detail = said.tolist()
        return turn, detail

    def agree(self, mine: bool) -> bool:
        """Whether it is so with all of them."""
        every = torch.tensor([int(mine)])
        dist.all_reduce(every, dist.ReduceOp.MIN)
        return bool(every.item())

    def collect(self, content: bytes) -> list[bytes]:
        """Everybody's `content` by rank, at rank 0; nothing elsewhere."""
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(content)]))
        if self.rank:
            if content:
                dist.send(torch.from_numpy(np.frombuffer(content, np.uint8).copy()), 0)
            return []
        found = [content]
        for rank in range(1, self.world):
            piece = torch.empty(int(sizes[rank]), dtype=torch.uint8)
            if len(piece):
                dist.recv(piece, rank)
            found.append(piece.numpy().tobytes())
        return found

    # Tensors in shares

    def shard(self, network: Network) -> None:
        """Leaves this process its share of a network that all of them have made alike."""
        from torch.distributed.fsdp import fully_shard

        sharded = fully_shard(network, mesh=self._mesh, reshard_after_forward=True)
        if self.device.type == "cpu":
            sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no average: torch divides
        network.was_sharded()

    def average(self, tensor: Tensor) -> None:
        """Makes `tensor` the mean of everybody's."""
        dist.all_reduce(tensor)
        tensor.div_(self.world)

    def norm(self, shares: Sequence[Tensor]) -> Tensor:
        """The Euclidean norm, as one vector, of tensors of which each process has a share."""
        squared = torch.nn.utils.get_total_norm(shares).square()
        dist.all_reduce(squared)
        return squared.sqrt()

    def own(self, whole: Tensor) -> Tensor:
        """This process's share of a whole tensor, in the same memory. A single number is everybody's."""
        return own_rows(whole, self.rank, self.world)

    def gather(self, shares: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
        """Whole tensors of `shapes` in rank 0's host memory; nothing elsewhere. See `Gathering.gather`."""
        found = {}
        if self.rank == 0:
            found = {name: torch.empty(shapes[name], dtype=share.dtype).numpy() for name, share in shares.items()}
        self._gathering.gather(shares, found)
        return found
