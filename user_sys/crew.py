"""The processes of a run's learners: where each goes, and as which node it is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hal.ray_bridge import Seat
from user_sys.edge.stations import module_argv
from user_sys.learners import folder_of, process_name
from user_sys.prepare import LOOPBACK
from user_sys.topology import Node, RunFolder


@dataclass(frozen=True)
class Post:
    """Where one process of a learner goes.

    Attributes:
        seat: of the run's compute half; None beside the run's folder.
        address: where the learner's other processes find it.
        gpus: the UUIDs of those that it is to see, where no seat says so.
        card: which of the GPUs that it sees is its own.
    """

    seat: Seat | None = None
    address: str = LOOPBACK
    gpus: tuple[str, ...] = ()
    card: int = 0


def posts_here(number: int, processes: int, gpus: Sequence[str]) -> tuple[Post, ...]:
    """Those of the run's learner of that `number` on the run's own computer, with its GPUs in turns.

    Args:
        gpus: UUIDs; none where each process sees what whoever started the run sees.
    """
    if not gpus:
        return tuple(Post(card=rank) for rank in range(processes))
    firsts = [(number * processes + rank) % len(gpus) for rank in range(processes)]
    return tuple(Post(gpus=(*gpus[first:], *gpus[:first])) for first in firsts)


def posts_in(seats: Sequence[Seat], number: int, processes: int, addresses: Mapping[str, str]) -> tuple[Post, ...]:
    """Those of the run's learner of that `number` in the run's `seats`, in turns; none where a seat's computer is gone.

    Args:
        addresses: of each computer, by its name.
    """
    taken = [seats[(number * processes + rank) % len(seats)] for rank in range(processes)] if seats else []
    nodes = [seat.node for seat in taken]
    if not all(node in addresses for node in nodes):
        return ()
    near = len({addresses[node] for node in nodes}) == 1
    return tuple(
        Post(
            seat=seat,
            address=LOOPBACK if near else addresses[seat.node],
            card=0 if seat.bundle.gpu else nodes[:rank].count(seat.node),
        )
        for rank, seat in enumerate(taken)
    )


def learner_nodes(
    folder: RunFolder, name: str, posts: Sequence[Post], here: str, endpoint: str
) -> tuple[tuple[Node, Post], ...]:
    """A learner (`user_sys.learners`), a node for each of its processes, in the order of its `posts`.

    They read the gateway's store by mmap, so they run where the run's folder is seen.

    Args:
        here: the resource that stands for the computer with the run's folder.
        endpoint: where the first of them reaches the gateway.
    """
    folder = RunFolder(folder.path.resolve())
    checkpoints = folder_of(folder.checkpoints, name)
    found = []
    for rank, post in enumerate(posts):
        argv = module_argv("user_sys.learner", folder.path, name, endpoint, post.address, post.card)
        if rank:
            module = "user_sys.learner.follower_process"
            argv = module_argv(module, checkpoints, rank, post.address, post.card)
        process = process_name(name, rank)
        node = Node(process, argv, {} if post.seat else {here: 0.01}, folder.log(process))
        found.append((node, post))
    return tuple(found)
