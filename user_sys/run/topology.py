"""The processes of a run's learners: where each goes, and as which node it is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hal.ray_cluster import PlacementSlot
from user_sys.edge.robot_processes import module_argv
from user_sys.robot_records import learner_folder, learner_process_name
from user_sys.run.config import ProcessSpec, RunFolder
from user_sys.run.prepare import LOOPBACK


@dataclass(frozen=True)
class ProcessSlot:
    """Where one process of a learner goes.

    Attributes:
        placement: of the run's compute half; None beside the run's folder.
        address: where the learner's other processes find it.
        gpus: the UUIDs of those that it is to see, where no seat says so.
        gpu_index: which of the GPUs that it sees is its own.
    """

    placement: PlacementSlot | None = None
    address: str = LOOPBACK
    gpus: tuple[str, ...] = ()
    gpu_index: int = 0


def local_slots(number: int, processes: int, gpus: Sequence[str]) -> tuple[ProcessSlot, ...]:
    """Those of the run's learner of that `number` on the run's own computer, with its GPUs in turns.

    Args:
        gpus: UUIDs; none where each process sees what whoever started the run sees.
    """
    if not gpus:
        return tuple(ProcessSlot(gpu_index=rank) for rank in range(processes))
    firsts = [(number * processes + rank) % len(gpus) for rank in range(processes)]
    return tuple(ProcessSlot(gpus=(*gpus[first:], *gpus[:first])) for first in firsts)


def cluster_slots(
    placements: Sequence[PlacementSlot], number: int, processes: int, addresses: Mapping[str, str]
) -> tuple[ProcessSlot, ...]:
    """Those of the run's learner of that `number` in the run's `seats`, in turns; none where a seat's computer is gone.

    Args:
        addresses: of each computer, by its name.
    """
    taken = (
        [placements[(number * processes + rank) % len(placements)] for rank in range(processes)] if placements else []
    )
    nodes = [seat.node for seat in taken]
    if not all(node in addresses for node in nodes):
        return ()
    near = len({addresses[node] for node in nodes}) == 1
    return tuple(
        ProcessSlot(
            placement=seat,
            address=LOOPBACK if near else addresses[seat.node],
            gpu_index=0 if seat.bundle.is_gpu else nodes[:rank].count(seat.node),
        )
        for rank, seat in enumerate(taken)
    )


def learner_processes(
    folder: RunFolder, name: str, slots: Sequence[ProcessSlot], local_resource: str, endpoint: str
) -> tuple[tuple[ProcessSpec, ProcessSlot], ...]:
    """A learner (`user_sys.robot_records`), a node for each of its processes, in the order of its `posts`.

    They read the gateway's store by mmap, so they run where the run's folder is seen.

    Args:
        here: the resource that stands for the computer with the run's folder.
        endpoint: where the first of them reaches the gateway.
    """
    folder = RunFolder(folder.path.resolve())
    checkpoints = learner_folder(folder.checkpoints, name)
    found = []
    for rank, post in enumerate(slots):
        argv = module_argv("user_sys.learner", folder.path, name, endpoint, post.address, post.gpu_index)
        if rank:
            module = "user_sys.learner.worker_process"
            argv = module_argv(module, checkpoints, rank, post.address, post.gpu_index)
        process = learner_process_name(name, rank)
        node = ProcessSpec(process, argv, {} if post.placement else {local_resource: 0.01}, folder.log(process))
        found.append((node, post))
    return tuple(found)
