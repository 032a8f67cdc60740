"""What a Ray cluster has and who uses it, as resource records; and what a job gets of it, as bundles to be reserved.

Nothing here talks to Ray: it is given what Ray tells of its nodes (``ray.nodes``), of what is free on each, and of its
placement groups. Robots and GPUs are declared as `hal.ray_nodes` has it. Of GPUs that Ray has counted by itself, on a
node that something else has started, neither model nor memory is known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hal.cards import UUID
from hal.placement_words import listed
from hal.ray_nodes import CARD, CARD_LABEL, CLAIM, ROBOT, ROBOT_LABEL, card_label, robot_facts, robot_label
from hal.request import Request
from hal.resource import Health, Kind, ResourceRecord

GONE = "its Ray node is gone"
PINCH = 0.001  # of a node's own resource: enough to name the node, and so little that all find room
GROUP_MARK = "#"
"""In a placement group's name it begins what is not the user's name."""
_RAYS_OWN = "ray.io/"
_IN_FORCE = ("CREATED", "RESCHEDULING")
_DECLARED = "card"
"""The label of a GPU's record that says as what its node has declared it."""

RayNode = Mapping[str, Any]
"""A node as ``ray.nodes`` tells of it."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """What is held together on one node.

    Attributes:
        node: the name that the node's records carry.
        resources: Ray's.
        gpu: it is a GPU.
        uuid: the GPU's; empty where it is not known.
    """

    node: str
    resources: dict[str, float]
    gpu: bool = False
    uuid: str = ""


def cluster_records(
    nodes: Sequence[RayNode], free: Mapping[str, Mapping[str, float]], groups: Iterable[Mapping[str, Any]]
) -> tuple[ResourceRecord, ...]:
    """The cluster's computers, GPUs and declared robots. What a dead node had is LOST, until a node with its address
    is there again. A computer's processors and memory are those that are free.

    Args:
        free: the resources that nobody has reserved, by the node's id; a node that is not in it is all free.
        groups: the cluster's placement groups; their names begin with those of the users.
    """
    users = _users(groups)
    names = node_names(nodes)
    found: dict[str, ResourceRecord] = {}
    for node in sorted(nodes, key=lambda node: bool(node["Alive"])):  # what lives replaces what is dead
        key = node["NodeID"]
        for record in _records(node, names[key], _left(node["Resources"], free.get(key), users[key]), users[key]):
            found[record.name] = record
    return tuple(found[name] for name in sorted(found))


def node_names(nodes: Sequence[RayNode]) -> dict[str, str]:
    """Each node's name by its id: its host's, or its address where several addresses have that host."""
    addresses: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        addresses[node["NodeManagerHostname"]].add(node["NodeManagerAddress"])
    return {
        node["NodeID"]: node["NodeManagerAddress" if len(addresses[host]) > 1 else "NodeManagerHostname"]
        for node in nodes
        for host in [node["NodeManagerHostname"]]
    }


def bundles(
    requests: Sequence[Request], assigned: Sequence[Sequence[ResourceRecord]], addresses: Mapping[str, str]
) -> tuple[Bundle, ...]:
    """One bundle for each record that a job gets (`hal.placement`), in the order of its requests.

    Args:
        addresses: Ray's address of each node, by name.
    """

    def of(request: Request, record: ResourceRecord) -> dict[str, float]:
        match record.kind:
            case Kind.ROBOT:
                return {f"{ROBOT}{record.name}": CLAIM}
            case Kind.GPU:
                card = record.labels.get(_DECLARED)
                return {f"node:{addresses[record.node]}": PINCH, f"{CARD}{card}" if card else "GPU": 1.0}
        wanted = {"CPU": float(request.cores), "memory": float(request.memory_bytes)}
        return {f"node:{addresses[record.node]}": PINCH, **{name: much for name, much in wanted.items() if much}}

    return tuple(
        Bundle(
            node=record.node,
            resources=of(request, record),
            gpu=record.kind is Kind.GPU,
            uuid=record.labels.get(UUID, ""),
        )
        for request, records in zip(requests, assigned, strict=True)
        for record in records
    )


def _users(groups: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Counter[str]]]:
    """How much of each resource who has reserved: node id -> resource -> name -> amount."""
    users: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for group in groups:
        if group["state"] not in _IN_FORCE:
            continue
        name = group["name"].partition(GROUP_MARK)[0] or "another job"
        for number, node in group["bundles_to_node_id"].items():
            for resource, amount in group["bundles"][number].items():
                users[node][resource][name] += amount
    return users


def _left(
    total: Mapping[str, float], free: Mapping[str, float] | None, users: Mapping[str, Counter[str]]
) -> dict[str, float]:
    """What can be reserved: what Ray says is free lags behind what has just been reserved."""
    reserved = {resource: sum(amounts.values()) for resource, amounts in users.items()}
    unused = total if free is None else free
    return {r: max(0.0, min(unused.get(r, 0.0), much - reserved.get(r, 0.0))) for r, much in total.items()}


def _records(
    node: RayNode, name: str, free: Mapping[str, float], users: Mapping[str, Counter[str]]
) -> Iterator[ResourceRecord]:
    total, labels = node["Resources"], node.get("Labels") or {}
    facts = {key: value for key, value in labels.items() if not key.startswith((_RAYS_OWN, ROBOT_LABEL, CARD_LABEL))}
    health, trouble = (Health.READY, "") if node["Alive"] else (Health.LOST, GONE)
    blank = ResourceRecord(
        kind=Kind.COMPUTE, name=name, model="Ray node", node=name, labels=facts, health=health, trouble=trouble,
        found_by="ray",
    )  # fmt: skip
    yield msgspec.structs.replace(
        blank,
        cores=int(free.get("CPU", 0.0)),
        memory_bytes=int(free.get("memory", 0.0)),
        note=_shares(users.get("CPU", Counter()), int(total.get("CPU", 0.0))),
    )
    yield from _counted_gpus(blank, int(total.get("GPU", 0.0)), int(free.get("GPU", 0.0)), users.get("GPU", Counter()))
    for resource in total:
        if resource.startswith(ROBOT):
            robot = resource.removeprefix(ROBOT)
            record = _robot(blank, robot, labels)
        elif resource.startswith(CARD):
            record = _card(blank, resource.removeprefix(CARD), labels)
        else:
            continue
        taken = free.get(resource, 0.0) < 1.0
        yield _leased(record, users.get(resource, Counter())) if taken else record


def _robot(blank: ResourceRecord, robot: str, labels: Mapping[str, str]) -> ResourceRecord:
    model = labels.get(robot_label(robot), "robot")
    capabilities, own = robot_facts(robot, labels)
    return msgspec.structs.replace(
        blank,
        kind=Kind.ROBOT,
        name=robot,
        model=model,
        capabilities=capabilities,
        labels={**blank.labels, **own},
    )


def _card(blank: ResourceRecord, card: str, labels: Mapping[str, str]) -> ResourceRecord:
    memory_mb = labels.get(card_label(card, "memory-mb"), "")
    return msgspec.structs.replace(
        blank,
        kind=Kind.GPU,
        name=f"{blank.node}/{card}",
        model=labels.get(card_label(card, "model"), "GPU").replace("_", " "),
        labels={**blank.labels, _DECLARED: card, UUID: labels.get(card_label(card, UUID), "")},
        memory_bytes=int(memory_mb) * 10**6 if memory_mb.isdecimal() else 0,
    )


def _counted_gpus(blank: ResourceRecord, count: int, free: int, users: Counter[str]) -> Iterator[ResourceRecord]:
    for number in range(count):
        record = msgspec.structs.replace(blank, kind=Kind.GPU, name=f"{blank.node}/gpu-{number}", model="GPU")
        yield _leased(record, users) if number < count - free else record


def _leased(record: ResourceRecord, users: Counter[str]) -> ResourceRecord:
    if record.health is not Health.READY:
        return record
    by = f"by {listed(sorted(users))}" if users else ""
    return msgspec.structs.replace(record, health=Health.LEASED, note=by)


def _shares(users: Counter[str], cores: int) -> str:
    uses = [f"{user} uses {amount:g}" for user, amount in sorted(users.items())]
    return f"{listed(uses)} of its {cores}" if uses else ""
