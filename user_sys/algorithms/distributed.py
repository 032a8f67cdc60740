"""Training in several processes, on one computer or several: sharded modules, collectives, and gathering of weights.

Rank 0 broadcasts a command; then all ranks make the same collectives in the same order. Modules are sharded with FSDP2:
each rank holds some rows of every parameter, gradient and moment. Each collective has a deadline; if a rank has left
it, torch raises RuntimeError. Processes communicate through gloo and GPUs through NCCL, on the network interface of the
rank's address, without encryption or authentication. Weights are gathered through a group of their own, which on GPUs
uses few thread blocks and a low priority.
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

_SIOCGIFCONF = 0x8912  # linux/sockios.h: all IPv4 addresses, as pairs of a name (16 bytes) and a sockaddr (24 bytes)
_RECORD = struct.Struct("16s4x4s16x")
_MAX_ADDRESSES = 256
_LOOPBACK_NET = "127."


def interface_from_address(address: str) -> str:
    """Returns the name of the network interface with an IPv4 address; 127.0.0.0/8 belongs to the loopback interface.

    Raises:
        RunError: no interface of this computer has the address.
    """
    has = list(_interface_addresses())
    for name, own in has:
        if own == address or (address.startswith(_LOOPBACK_NET) and own.startswith(_LOOPBACK_NET)):
            return name
    there = ", ".join(sorted(own for _, own in has))
    raise RunError(f"no network interface of {local_node()} has the address {address}; it has {there}")


def _interface_addresses() -> Iterator[tuple[str, str]]:
    """Yields names and addresses. A name ``NAME:LABEL`` belongs to the interface NAME."""
    room = array.array("B", bytes(_MAX_ADDRESSES * _RECORD.size))
    where, size = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _SIOCGIFCONF, struct.pack("iP", size, where))
    used, _ = struct.unpack("iP", answer)
    for name, address in _RECORD.iter_unpack(room.tobytes()[:used]):
        yield name.partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(address)


BUCKET_BYTES = 8 << 20
"""Size of the pieces that rank 0 receives: its GPU holds one piece besides its own shard."""


class ShardGather:
    """Gathers whole tensors at rank 0, over a process group of its own. One thread of each process calls it."""

    def __init__(self, rank: int, world: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """`group` None selects torch's default group."""
        self._rank, self._world, self._device, self._group = rank, world, device, group
        # Priority 0 is the lowest and the default; training uses a stream of a higher priority.
        stream = torch.cuda.Stream
        self._stream = stream(device, priority=0) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def gather(self, shares: Mapping[str, Tensor], into: Mapping[str, Array], yield_cpu: YieldHook = no_yield) -> None:
        """Blocks until rank 0 has the whole tensors, or until this rank has sent its shards.

        Args:
            shares: this rank's rows of each tensor, by name, in the same order on all ranks. A scalar is taken from
                rank 0.
            into: at rank 0, C-contiguous arrays of the whole tensors' shapes; unused elsewhere.
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
                self._stream.synchronize()  # the caller may free the shards

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
        """Copies to host memory; from a GPU through page-locked memory, so that the copy engines do it."""
        if self._stream is None:
            target.copy_(source)
            return
        staged = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)  # torch caches page-locked memory
        staged.copy_(source, non_blocking=True)
        self._stream.synchronize()
        target.copy_(staged)


@dataclass(frozen=True, eq=False)
class ShardedWeights:
    """A `snapshot.DeviceWeights` in shards: all ranks fetch it, and rank 0 gets the whole.

    Attributes:
        local: shards of this rank.
        shapes: shapes of the whole tensors, by name.
        replicated: further arrays, equal on all ranks.
    """

    local: DeviceSnapshot
    shapes: Mapping[str, tuple[int, ...]]
    replicated: Mapping[str, Array]
    gather: ShardGather

    @property
    def layout(self) -> TensorLayout:
        """See `snapshot.DeviceWeights.layout`; never rounded."""
        kinds = {name: as_array(torch.empty(0, dtype=share.dtype)).dtype for name, share in self.local.tensors.items()}
        whole = {name: (kinds[name], shape) for name, shape in self.shapes.items()}
        return {**whole, **{name: (array.dtype, array.shape) for name, array in self.replicated.items()}}

    def wait(self) -> None:
        """See `snapshot.DeviceWeights.wait`."""
        self.local.wait()

    def fetch(self, into: Mapping[str, Array], budget: CopyBudget) -> RoundingStats:
        """See `snapshot.DeviceWeights.fetch`. At other ranks than 0 `into` is unused and may be empty."""
        self.gather.gather(self.local.tensors, into, budget.yield_cpu)
        for name, value in self.replicated.items() if into else ():
            into[name][...] = value
        return NO_ROUNDING


def shard_rows(count: int, rank: int, world: int) -> tuple[int, int]:
    """Returns the first row and the end of a rank's rows, divided as by FSDP2: the last ranks may have none."""
    each = -(-count // world)
    return min(count, rank * each), min(count, (rank + 1) * each)


def local_shard(whole: Tensor, rank: int, world: int) -> Tensor:
    """Returns a view of a rank's rows of a whole tensor; a scalar belongs to all ranks."""
    return whole[slice(*shard_rows(len(whole), rank, world))] if whole.ndim else whole


def _buckets(tensor: Tensor) -> Iterator[Tensor]:
    """Yields flat views of a contiguous tensor, of at most `BUCKET_BYTES`."""
    flat, step = tensor.view(-1), BUCKET_BYTES // tensor.element_size()
    return (flat[start : start + step] for start in range(0, flat.numel(), step))


Parameters = dict[str, Tensor]


class FunctionalModule(nn.Module):
    """A module of named parameters and a function: `compute` takes the parameters by name, then the call's arguments.

    After `TrainingGroup.shard` the whole parameters exist only during a call and its backward pass.

    Attributes:
        shapes: shapes of the whole parameters, by name.
        is_sharded: several processes hold shards of it.
    """

    def __init__(self, parameters: Mapping[str, Tensor], compute: Callable[..., Any], *, trained: bool = True) -> None:
        """Takes ownership of the parameters. `trained`: they get gradients."""
        super().__init__()
        self._compute = compute
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.is_sharded = False
        for name, p in parameters.items():  # torch does not allow a dot in a name
            self.register_parameter(name.replace(".", "/"), nn.Parameter(p.detach(), requires_grad=trained))
        self._whole = self._named()

    def mark_sharded(self) -> None:
        """Releases the whole parameters; each rank holds a shard from now on."""
        self.is_sharded, self._whole = True, {}

    def frozen_copy(self) -> FunctionalModule:
        """Returns a module with copies of the parameters without gradients. Call it before sharding."""
        return FunctionalModule(
            {name: p.detach().clone() for name, p in self._named().items()}, self._compute, trained=False
        )

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Calls `compute` directly if nothing is sharded: the overhead of a module's call costs a small network one
        percent.
        """
        return super().__call__(*args, **options) if self.is_sharded else self._compute(self._whole, *args, **options)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self._compute(self._named(), *args, **options)

    def local_parameters(self) -> Parameters:
        """Returns this rank's shards in the trained memory; whole parameters if nothing is sharded."""
        if not self.is_sharded:
            return self._whole
        with torch.no_grad():  # this gives the memory itself, without a node of the graph
            return {name: cast(Any, p).to_local().detach() for name, p in self._named().items()}

    def move_gradients_to(self, shares: Parameters) -> None:
        """Moves the gradients, averaged over all ranks, to the `local_parameters`."""
        with torch.no_grad():
            for name, p in self._named().items():
                shares[name].grad = None if p.grad is None else cast(Any, p.grad).to_local()
                p.grad = None

    def _named(self) -> Parameters:
        return dict(zip(self.shapes, cast(Mapping[str, Tensor], self._parameters).values(), strict=True))


COLLECTIVE_TIMEOUT_S = 300.0
"""Longer than rank 0 may wait for its disk, a batch and a slot of the publisher process in one step."""


def create_rendezvous(address: str, world: int) -> TCPStore:
    """Creates the store at which `world` processes meet. Rank 0 keeps it, at a free port of `address`.

    Raises:
        RunError: this computer lacks the address, or torch cannot listen there.
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
    """Connects to the store of `create_rendezvous`. Raises RunError if it cannot be reached."""
    try:
        return TCPStore(address, port, world, is_master=False, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    except RuntimeError as error:
        raise RunError(f"rank 0 of the learner cannot be reached at {address}:{port}: {error}") from error


class TrainingGroup:
    """One rank of the processes that train a policy. All of them construct it at the same time. One thread calls it.

    Attributes:
        rank: the number of this process.
        world: the number of processes.
        device: the device of this rank.
        weights_gather: gathers weights; one other thread may call it.
    """

    def __init__(self, rank: int, world: int, device: str, store: Store, address: str, collective_ctas: int) -> None:
        """Blocks until all ranks have joined.

        Args:
            device: torch device of this rank.
            store: the rendezvous.
            address: an address of this computer at which the other ranks reach it.
            collective_ctas: maximum number of thread blocks of a GPU for gathering weights.

        Raises:
            RunError: not all ranks joined within `COLLECTIVE_TIMEOUT_S`, they cannot connect, or this computer lacks
                `address`.
        """
        self.rank, self.world = rank, world
        self.device = torch.device(device)
        interface = interface_from_address(address)  # listen on this network only
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault(
            "NCCL_SOCKET_IFNAME", f"={interface}"
        )  # "=" selects this name and not all with this prefix
        try:
            self._join(store)
            self.weights_gather = ShardGather(rank, world, self.device, self._publishing_group(collective_ctas))
            # NCCL connects at its first use, which could deadlock next to a collective of the training.
            shares = {"": self.local_shard(torch.zeros(world, device=self.device))}
            self.weights_gather.gather(shares, {"": np.zeros(world, np.float32)})
        except RuntimeError as error:
            raise RunError(f"the {world} processes of the learner could not connect: {error}") from error
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
        assert everybody is not None  # `init_process_group` has made it
        # DeviceMesh would create another group if this computer had a GPU, whatever the others have.
        self._mesh = DeviceMesh.from_group(everybody, self.device.type)

    def _publishing_group(self, collective_ctas: int) -> dist.ProcessGroup:
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        if self.device.type == "cpu":
            return cast(dist.ProcessGroup, dist.new_group(timeout=timeout, backend="gloo"))
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=False)
        options._timeout = timeout  # torch reads the timeout here, and warns if the two differ
        options.config.max_ctas = collective_ctas
        return cast(dist.ProcessGroup, dist.new_group(timeout=timeout, backend="nccl", pg_options=options))

    def destroy(self) -> None:
        """Destroys the groups. On GPUs it blocks until all processes of this computer do."""
        dist.destroy_process_group()

    # Commands

    def broadcast_command(self, turn: int, detail: int = 0) -> None:
        """Broadcasts the next command and its argument; for rank 0."""
        dist.broadcast(torch.tensor([turn, detail]), 0)

    def receive_command(self) -> tuple[int, int]:
        """Receives the next command and its argument. Blocks for at most `COLLECTIVE_TIMEOUT_S`."""
        said = torch.empty(2, dtype=torch.int64)
        dist.broadcast(said, 0)
        turn, detail = said.tolist()
        return turn, detail

    def all_true(self, mine: bool) -> bool:
        """Returns whether `mine` is true on all ranks."""
        every = torch.tensor([int(mine)])
        dist.all_reduce(every, dist.ReduceOp.MIN)
        return bool(every.item())

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Returns the `content` of each rank at rank 0, an empty list elsewhere."""
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

    # Sharded tensors

    def shard(self, network: FunctionalModule) -> None:
        """Shards a module that is equal on all ranks."""
        from torch.distributed.fsdp import fully_shard

        sharded = fully_shard(network, mesh=self._mesh, reshard_after_forward=True)
        if self.device.type == "cpu":
            sharded.set_force_sum_reduction_for_comms(True)  # gloo has no average, so torch divides
        network.mark_sharded()

    def all_reduce_mean(self, tensor: Tensor) -> None:
        """Replaces `tensor` by the mean over all ranks."""
        dist.all_reduce(tensor)
        tensor.div_(self.world)

    def global_norm(self, shares: Sequence[Tensor]) -> Tensor:
        """Returns the Euclidean norm of sharded tensors, taken as one vector."""
        squared = torch.nn.utils.get_total_norm(shares).square()
        dist.all_reduce(squared)
        return squared.sqrt()

    def local_shard(self, whole: Tensor) -> Tensor:
        """Returns a view of this rank's rows of a whole tensor; a scalar belongs to all ranks."""
        return local_shard(whole, self.rank, self.world)

    def gather_tensors(self, shares: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
        """Returns the whole tensors of `shapes` in host memory at rank 0, an empty dict elsewhere."""
        found = {}
        if self.rank == 0:
            found = {name: torch.empty(shapes[name], dtype=share.dtype).numpy() for name, share in shares.items()}
        self._gathering.gather(shares, found)
        return found
