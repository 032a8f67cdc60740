"""The processes of a run: which there are, with their commands, log files and Ray resources."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hal.ray_cluster import PlacementSlot
from hal.ray_nodes import ROBOT_CLAIM, ROBOT_RESOURCE_PREFIX
from user_sys.compose import emulated_link_command
from user_sys.config import as_dict
from user_sys.edge.robot_processes import module_argv, robot_process_argv
from user_sys.inference.protocol import POLICY_NODE
from user_sys.robot_records import learner_process_name
from user_sys.run.config import RunConfig, RunFolder
from user_sys.tunnel.keys import GATEWAY_NAME

LOOPBACK = "127.0.0.1"
CONSOLE, REWARD_PROCESS = "console", "reward"
SHARE_OF_COMPUTER = 0.01  # of the resource that stands for a computer: binds a process to it, and counts no cores


@dataclass(frozen=True)
class ProcessSpec:
    """One process: its command, the Ray resources that place it, and what its environment has in addition."""

    name: str
    argv: tuple[str, ...]
    resources: dict[str, float]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)


def topology(
    config: RunConfig, folder: RunFolder, local_resource: str, is_declared: Callable[[str], bool]
) -> tuple[ProcessSpec, ...]:
    """The gateway, console, reward's process if there is one, and the processes of each robot, in order of starting.

    The processes of a robot share its Ray resource, so they run on the robot's computer, and no other processes do.

    Args:
        local_resource: the Ray resource that stands for this computer.
        is_declared: whether a node of the cluster declares a resource. A simulated robot that none declares runs here.
    """
    local = {local_resource: SHARE_OF_COMPUTER}
    folder = RunFolder(folder.path.resolve())  # Ray nodes have working directories of their own
    gateway = ProcessSpec(
        GATEWAY_NAME, module_argv("user_sys.gateway", "--run", folder.path), local, folder.log(GATEWAY_NAME)
    )
    argv = module_argv("user_sys.run.reward_process", folder.path)
    reward = ProcessSpec(REWARD_PROCESS, argv, local, folder.log(REWARD_PROCESS))
    argv = module_argv("user_sys.run.console_process", folder.path)
    console = ProcessSpec(CONSOLE, argv, local, folder.log(CONSOLE))
    edges = [*[console] * config.console.enabled, *[reward] * bool(config.rewards.kind)]
    for robot in config.robots:
        state = folder.edge(robot.name)
        resource = f"{ROBOT_RESOURCE_PREFIX}{robot.name}"
        processes = robot_process_argv(robot.name, state)
        if robot.link:
            processes = ((f"{robot.name}-link", emulated_link_command(folder.link(robot.name))), *processes)
        share = {resource: round((1 - ROBOT_CLAIM) / len(processes), 2)}
        resources = share if is_declared(resource) or not robot.simulated else local
        edges += [ProcessSpec(name, argv, resources, folder.log(name)) for name, argv in processes]
    return (gateway, *edges)


@dataclass(frozen=True)
class ProcessSlot:
    """Where one process of a learner, or the policy server, runs.

    Attributes:
        placement: reserved on the cluster; None on the launcher's computer.
        address: at which the processes that use it reach it.
        gpus: UUIDs of its visible GPUs if there is no placement.
        gpu_index: of its own GPU among the visible ones.
    """

    placement: PlacementSlot | None = None
    address: str = LOOPBACK
    gpus: tuple[str, ...] = ()
    gpu_index: int = 0


def policy_process(
    folder: RunFolder, config: RunConfig, slot: ProcessSlot, local_resource: str, gateway: str
) -> ProcessSpec:
    """The policy server. It listens on its slot's address, which it announces in the run's folder.

    Args:
        local_resource: the Ray resource that stands for the launcher's computer.
        gateway: the gateway's endpoint as the server reaches it.
    """
    folder = RunFolder(folder.path.resolve())
    resources = {} if slot.placement else {local_resource: SHARE_OF_COMPUTER}
    options = {
        "listen": f"tcp://{slot.address}:0",
        "gateway": gateway,
        "keys": folder.keys,
        "policy": json.dumps(as_dict(config.policy)),
        "announce": folder.policy_address,
        "weights": json.dumps(as_dict(config.weights)),
        "tunnel": json.dumps(as_dict(config.tunnel)),
    }
    argv = module_argv("user_sys.inference", *(f"--{key}={value}" for key, value in options.items()))
    return ProcessSpec(POLICY_NODE, argv, resources, folder.log(POLICY_NODE))


def local_slots(number: int, processes: int, gpus: Sequence[str]) -> tuple[ProcessSlot, ...]:
    """Slots on the launcher's computer for the run's learner of that `number`; learners take the GPUs in turns.

    Args:
        gpus: UUIDs; if empty, each process sees the launcher's GPUs.
    """
    if not gpus:
        return tuple(ProcessSlot(gpu_index=rank) for rank in range(processes))
    firsts = [(number * processes + rank) % len(gpus) for rank in range(processes)]
    return tuple(ProcessSlot(gpus=(*gpus[first:], *gpus[:first])) for first in firsts)


def cluster_slots(
    placements: Sequence[PlacementSlot], number: int, processes: int, address_from_node: Mapping[str, str]
) -> tuple[ProcessSlot, ...]:
    """Slots on the cluster for the run's learner of that `number`; learners take the `placements` in turns.

    Returns:
        Empty if a node of these placements has left the cluster.
    """
    if not placements:
        return ()
    chosen = [placements[(number * processes + rank) % len(placements)] for rank in range(processes)]
    nodes = [placement.node for placement in chosen]
    if not all(node in address_from_node for node in nodes):
        return ()
    on_one_computer = len({address_from_node[node] for node in nodes}) == 1
    return tuple(
        ProcessSlot(
            placement=placement,
            address=LOOPBACK if on_one_computer else address_from_node[placement.node],
            gpu_index=0 if placement.bundle.is_gpu else nodes[:rank].count(placement.node),
        )
        for rank, placement in enumerate(chosen)
    )


def learner_processes(
    folder: RunFolder, name: str, slots: Sequence[ProcessSlot], local_resource: str, endpoint: str, port: int
) -> tuple[tuple[ProcessSpec, ProcessSlot], ...]:
    """The processes of one learner (`user_sys.robot_records`), one for each of its `slots`, rank 0 first.

    They read the gateway's store by its files, so they run on computers that see the run's folder.

    Args:
        local_resource: the Ray resource that stands for the launcher's computer.
        endpoint: at which rank 0 reaches the gateway.
        port: at which the other processes reach rank 0.
    """
    folder = RunFolder(folder.path.resolve())
    argv = module_argv("user_sys.run.learner_process", folder.path, name, endpoint)
    found = []
    for rank, slot in enumerate(slots):
        env = {  # as torchrun sets it
            "RANK": str(rank),
            "LOCAL_RANK": str(slot.gpu_index),
            "WORLD_SIZE": str(len(slots)),
            "MASTER_ADDR": slots[0].address,
            "MASTER_PORT": str(port),
        }
        process = learner_process_name(name, rank)
        resources = {} if slot.placement else {local_resource: SHARE_OF_COMPUTER}
        found.append((ProcessSpec(process, argv, resources, folder.log(process), env), slot))
    return tuple(found)
