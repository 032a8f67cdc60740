"""Which network interface of this computer has an address: gloo and NCCL are told an interface, and listen on it.

Whole tensors of which several processes have shares, brought to one's host memory: never whole on its device.

A network as FSDP2 wants it: parameters by name and what is computed with them, whole or in shares.

Where several processes train it (`ranks.Ranks.shard`), each keeps a share of every parameter: some of the rows of its
first dimension. The whole is there during a call and the backward pass that follows, and at no other time.

Several processes that train one policy, on one computer or several: what they have of it, and what they say to each
other.

Rank 0 decides what is done next and says so (`tell`, `hear`); then all of them make the same collectives in the same
order. Networks are sharded with FSDP2: parameters, gradients, and whatever follows their shape. Each collective has a
deadline; one that another process left, or never came to, raises torch's RuntimeError.

What passes between processes goes through gloo, what passes between GPUs through NCCL: both on the interface that has
the process's address, and neither encrypted nor authenticated. Weights are gathered for publishing through a group of
their own, which on GPUs may use a few thread blocks only and has no priority over training.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch documents them there

from hal.resource import local_node
from user_sys.codec import Array
from user_sys.errors import RunError
from user_sys.weights.gpu_copy import DeviceSnapshot, as_array, on_stream
from user_sys.weights.precision import NO_ROUNDING, RoundingStats
from user_sys.weights.snapshot import CopyBudget, TensorLayout
from user_sys.weights.state import YieldHook, no_yield

_SIOCGIFCONF = 0x8912  # linux/sockios.h: all IPv4 addresses, as pairs of a name of 16 bytes and a sockaddr of 24
_RECORD = struct.Struct("16s4x4s16x")
_MAX_ADDRESSES = 256
_LOOPBACK_NET = "127."


def interface_from_address(address: str) -> str:
    """The name of the interface with the IPv4 `address`. All of 127.0.0.0/8 is the loopback interface's.

    Raises:
        RunError: none of this computer has it.
    """
    has = list(_interface_addresses())
    for name, own in has:
        if own == address or (address.startswith(_LOOPBACK_NET) and own.startswith(_LOOPBACK_NET)):
            return name
    there = ", ".join(sorted(own for _, own in has))
    raise RunError(f"no network interface of {local_node()} has the address {address}; there is {there}")


def _interface_addresses() -> Iterator[tuple[str, str]]:
    """Names and addresses. A name that ends in ``:LABEL`` is the interface's before it."""
    room = array.array("B", bytes(_MAX_ADDRESSES * _RECORD.size))
    where, size = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _SIOCGIFCONF, struct.pack("iP", size, where))
    used, _ = struct.unpack("iP", answer)
    for name, address in _RECORD.iter_unpack(room.tobytes()[:used]):
        yield name.partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(address)


BUCKET_BYTES = 8 << 20
"""Tensors come to rank 0 in pieces of this size at most: one piece is on its GPU besides its own share."""


class ShardGather:
    """Gathers over a process group that nothing else uses at the same time. One thread of each process calls it."""

    def __init__(self, rank: int, world: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """`group` is torch's own for None."""
        self._rank, self._world, self._device, self._group = rank, world, device, group
        # The lowest priority, which is the default's too: training has a stream of its own kind.
        stream = torch.cuda.Stream
        self._stream = stream(device, priority=0) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def gather(self, shares: Mapping[str, Tensor], into: Mapping[str, Array], yield_cpu: YieldHook = no_yield) -> None:
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
                    self._assemble(share, torch.from_numpy(into[name]), yield_cpu)
                elif share.ndim:
                    for piece in _buckets(share):
                        dist.send(piece, 0, group=self._group)
            if self._stream is not None:
                self._stream.synchronize()  # who gave it away may let the shares go

    def _assemble(self, share: Tensor, whole: Tensor, yield_cpu: YieldHook) -> None:
        for target, source in zip(_buckets(local_shard(whole, 0, self._world)), _buckets(share), strict=True):
            self._bring(source, target)
            yield_cpu(target.nbytes)
        for rank in range(1, self._world) if whole.ndim else ():
            for target in _buckets(local_shard(whole, rank, self._world)):
                self._receive(target, rank)
                yield_cpu(target.nbytes)

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
class ShardedWeights:
    """A `snapshot.DeviceWeights` of which each process has a share: all of them fetch, and rank 0 gets the whole.

    Attributes:
        local: of this process.
        shapes: of the whole tensors, by name.
        replicated: what follows them, and everybody has.
    """

    local: DeviceSnapshot
    shapes: Mapping[str, tuple[int, ...]]
    replicated: Mapping[str, Array]
    gather: ShardGather

    @property
    def layout(self) -> TensorLayout:
        """See `snapshot.DeviceWeights.layout`: as they are, never rounded on the way."""
        kinds = {name: as_array(torch.empty(0, dtype=share.dtype)).dtype for name, share in self.local.tensors.items()}
        whole = {name: (kinds[name], shape) for name, shape in self.shapes.items()}
        return {**whole, **{name: (array.dtype, array.shape) for name, array in self.replicated.items()}}

    def wait(self) -> None:
        """See `snapshot.DeviceWeights.wait`."""
        self.local.wait()

    def fetch(self, into: Mapping[str, Array], budget: CopyBudget) -> RoundingStats:
        """See `snapshot.DeviceWeights.fetch`. At other ranks than 0 `into` stays as it is; it may be empty."""
        self.gather.gather(self.local.tensors, into, budget.yield_cpu)
        for name, value in self.replicated.items() if into else ():
            into[name][...] = value
        return NO_ROUNDING


def shard_rows(count: int, rank: int, world: int) -> tuple[int, int]:
    """Which of `count` rows are a rank's, from and to: dealt out as FSDP2 does it, so the last ranks may have none."""
    each = -(-count // world)
    return min(count, rank * each), min(count, (rank + 1) * each)


def local_shard(whole: Tensor, rank: int, world: int) -> Tensor:
    """A rank's share of a whole tensor, in the same memory. A single number is everybody's."""
    return whole[slice(*shard_rows(len(whole), rank, world))] if whole.ndim else whole


def _buckets(tensor: Tensor) -> Iterator[Tensor]:
    """A contiguous tensor in flat pieces of `BUCKET_BYTES` at most, in the same memory; none of an empty one."""
    flat, step = tensor.view(-1), BUCKET_BYTES // tensor.element_size()
    return (flat[start : start + step] for start in range(0, flat.numel(), step))


Parameters = dict[str, Tensor]


class FunctionalModule(nn.Module):
    """Called with what `compute` takes besides the parameters by name.

    Attributes:
        shapes: of the whole parameters, by name.
        is_sharded: whether several processes have it among them.
    """

    def __init__(self, parameters: Mapping[str, Tensor], compute: Callable[..., Any], *, trained: bool = True) -> None:
        """Takes the parameters' memory over. `trained`: whether they get gradients."""
        super().__init__()
        self._compute = compute
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.is_sharded = False
        for name, p in parameters.items():  # torch allows no dot in a name
            self.register_parameter(name.replace(".", "/"), nn.Parameter(p.detach(), requires_grad=trained))
        self._whole = self._named()

    def mark_sharded(self) -> None:
        """From now on each process has a share only: lets go of the whole."""
        self.is_sharded, self._whole = True, {}

    def frozen_copy(self) -> FunctionalModule:
        """One with copies of the parameters, which get no gradients. Only before it is sharded."""
        return FunctionalModule(
            {name: p.detach().clone() for name, p in self._named().items()}, self._compute, trained=False
        )

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Straight to `compute` where nothing has to be gathered: a module's call costs a small network a percent."""
        return super().__call__(*args, **options) if self.is_sharded else self._compute(self._whole, *args, **options)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self._compute(self._named(), *args, **options)

    def local_parameters(self) -> Parameters:
        """This process's share of each parameter, in the memory that is trained; all of it where it is not sharded."""
        if not self.is_sharded:
            return self._whole
        with torch.no_grad():  # then it is the very memory, and no node of a graph
            return {name: cast(Any, p).to_local().detach() for name, p in self._named().items()}

    def move_gradients_to(self, shares: Parameters) -> None:
        """Moves what a backward pass has left of gradients, the mean over all processes, to the `local_parameters`."""
        with torch.no_grad():
            for name, p in self._named().items():
                shares[name].grad = None if p.grad is None else cast(Any, p.grad).to_local()
                p.grad = None

    def _named(self) -> Parameters:
        return dict(zip(self.shapes, cast(Mapping[str, Tensor], self._parameters).values(), strict=True))


COLLECTIVE_TIMEOUT_S = 300.0
"""Longer than rank 0 may wait for its disk, for a batch and for a slot of its envoy, all in one turn."""


def create_rendezvous(address: str, world: int) -> TCPStore:
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
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
                master_listen_fd=server.detach(),
            )
    except (OSError, RuntimeError) as error:
        raise RunError(f"the processes of the learner cannot meet at {address}: {error}") from error


def join_rendezvous(address: str, port: int, world: int) -> TCPStore:
    """What `create_rendezvous` has opened elsewhere. Raises RunError: it is not to be reached."""
    try:
        return TCPStore(address, port, world, is_master=False, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    except RuntimeError as error:
        raise RunError(f"the learner's first process is not to be reached at {address}:{port}: {error}") from error


class TrainingGroup:
    """One process among those that train one policy; all of them make theirs at the same time. One thread calls it.

    Attributes:
        rank: this process's number; 0 decides.
        world: how many there are.
        device: what this one trains on.
        weights_gather: gathers weights; another thread may call it, the same one each time.
    """

    def __init__(self, rank: int, world: int, device: str, store: Store, address: str, collective_ctas: int) -> None:
        """Blocks until all have come.

        Args:
            device: torch's name of what this process alone trains on.
            meeting: where they come together.
            address: where the others find this process; of this computer.
            collective_ctas: thread blocks of a GPU that gathering weights may use.

        Raises:
            RunError: not all came within `COLLECTIVE_TIMEOUT_S`, they cannot reach one another, or `address` is not
                this computer's.
        """
        self.rank, self.world = rank, world
        self.device = torch.device(device)
        interface = interface_from_address(address)  # nobody beyond its network takes part
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # this one, and not all that begin like it
        try:
            self._join(store)
            self.weights_gather = ShardGather(rank, world, self.device, self._publishing_group(collective_ctas))
            # NCCL connects when it is first used. Beside the training's own collectives that might wait for ever.
            shares = {"": self.local_shard(torch.zeros(world, device=self.device))}
            self.weights_gather.gather(shares, {"": np.zeros(world, np.float32)})
        except RuntimeError as error:
            raise RunError(f"the {world} processes of the learner did not come together: {error}") from error
        self._gathering = ShardGather(rank, world, self.device, None)

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
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        everybody = dist.group.WORLD
        assert everybody is not None  # it was just made
        # Of torch's own making it would have another group, where this computer has a GPU and whatever the others have.
        self._mesh = DeviceMesh.from_group(everybody, self.device.type)

    def _publishing_group(self, collective_ctas: int) -> dist.ProcessGroup:
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        if self.device.type == "cpu":
            return cast(dist.ProcessGroup, dist.new_group(timeout=timeout, backend="gloo"))
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=False)
        options._timeout = timeout  # torch takes it from here, and warns where the two differ
        options.config.max_ctas = collective_ctas
        return cast(dist.ProcessGroup, dist.new_group(timeout=timeout, backend="nccl", pg_options=options))

    def destroy(self) -> None:
        """Ends the groups. Among GPUs it blocks until all processes of this computer leave."""
        dist.destroy_process_group()

    # What is done next

    def broadcast_command(self, turn: int, detail: int = 0) -> None:
        """Rank 0 says what all do next."""
        dist.broadcast(torch.tensor([turn, detail]), 0)

    def receive_command(self) -> tuple[int, int]:
        """What rank 0 says next: a turn and its detail. Blocks for `COLLECTIVE_TIMEOUT_S` at most."""
        said = torch.empty(2, dtype=torch.int64)
        dist.broadcast(said, 0)
        turn, detail = said.tolist()
        return turn, detail

    def all_true(self, mine: bool) -> bool:
        """Whether it is so with all of them."""
        every = torch.tensor([int(mine)])
        dist.all_reduce(every, dist.ReduceOp.MIN)
        return bool(every.item())

    def gather_bytes(self, content: bytes) -> list[bytes]:
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

    def shard(self, network: FunctionalModule) -> None:
        """Leaves this process its share of a network that all of them have made alike."""
        from torch.distributed.fsdp import fully_shard

        sharded = fully_shard(network, mesh=self._mesh, reshard_after_forward=True)
        if self.device.type == "cpu":
            sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no average: torch divides
        network.mark_sharded()

    def all_reduce_mean(self, tensor: Tensor) -> None:
        """Makes `tensor` the mean of everybody's."""
        dist.all_reduce(tensor)
        tensor.div_(self.world)

    def global_norm(self, shares: Sequence[Tensor]) -> Tensor:
        """The Euclidean norm, as one vector, of tensors of which each process has a share."""
        squared = torch.nn.utils.get_total_norm(shares).square()
        dist.all_reduce(squared)
        return squared.sqrt()

    def local_shard(self, whole: Tensor) -> Tensor:
        """This process's share of a whole tensor, in the same memory. A single number is everybody's."""
        return local_shard(whole, self.rank, self.world)

    def gather_tensors(self, shares: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
        """Whole tensors of `shapes` in rank 0's host memory; nothing elsewhere. See `ShardGather.gather`."""
        found = {}
        if self.rank == 0:
            found = {name: torch.empty(shapes[name], dtype=share.dtype).numpy() for name, share in shares.items()}
        self._gathering.gather(shares, found)
        return found
