"""A computer as a node of a Ray cluster: the command that starts Ray there, with what the computer has.

Ray learns of custom resources and labels when a node starts, and never after. So every robot that a configuration names
is declared, whether or not it is switched on: its driver process waits for it.

Ray's own resource ``GPU`` says how many there are, and chooses one by itself. So each GPU is declared as a resource of
its own, with labels that say what it is, and Ray is told that there are none to choose from.

What a Ray cluster has and who uses it, as resource records; and what a job gets of it, as bundles to be reserved.

Nothing here talks to Ray: it is given what Ray tells of its nodes (``ray.nodes``), of what is free on each, and of its
placement groups. Robots and GPUs are declared as `hal.ray_nodes` has it. Of GPUs that Ray has counted by itself, on a
node that something else has started, neither model nor memory is known.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hal.durable import replace_durably
from hal.errors import HalError
from hal.placement import format_list
from hal.resource import UUID_LABEL, Health, Kind, ResourceRecord, ResourceRequest

DEFAULT_PORT = 6379
DEFAULT_OBJECT_STORE_BYTES = 150_000_000
NODE_SETTINGS = {"RAY_worker_niceness": "0", "RAY_kill_child_processes_on_worker_exit": "false"}
"""Else all that runs under Ray, robots' drivers too, gives way to everybody: Ray's own default is 15. And Ray would
kill drivers with their actors; they end by themselves, once they have stopped their robots."""
ROBOT_RESOURCE_PREFIX, GPU_RESOURCE_PREFIX = "robot:", "card:"
"""How the resources begin by which a node declares a robot, and a GPU."""
ROBOT_CLAIM = 0.6
"""Of a robot's resource, what a run reserves: more than half, so that one run has it. The rest is for its processes."""
ROBOT_LABEL_PREFIX, GPU_LABEL_PREFIX = "robot-", "card-"
"""How the labels begin that say what a robot is, and a GPU."""
CAPABILITY_PREFIX = "can."
"""How those of a robot's facts begin that are capabilities, as in ``robot-panda-0.can.camera.front``."""
_TOKEN, _TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")
MAX_LABEL_CHARS = 63


def ray_resources(records: Iterable[ResourceRecord]) -> dict[str, float]:
    """What a Ray node must declare so that jobs can ask for these robots and GPUs, e.g. ``robot:panda-0``,
    ``robot_model:panda`` and ``card:gpu-0``. Ray counts processors by itself.
    """
    there = list(records)
    robots = [record for record in there if record.kind is Kind.ROBOT]
    models = Counter(f"robot_model:{robot.model}" for robot in robots)
    found = {f"{ROBOT_RESOURCE_PREFIX}{robot.name}": 1.0 for robot in robots} | {
        model: float(n) for model, n in models.items()
    }
    return found | {f"{GPU_RESOURCE_PREFIX}{card}": 1.0 for card in _gpu_records(there)}


def ray_labels(records: Iterable[ResourceRecord], labels: Mapping[str, str]) -> dict[str, str]:
    """`labels`, and what is known of the computer's robots and GPUs, in the characters that Ray allows."""
    there = list(records)
    found: dict[str, str] = {}
    for robot in (record for record in there if record.kind is Kind.ROBOT):
        found |= {robot_label(robot.name): sanitize_label(robot.model), **_robot_labels(robot)}
    for card, gpu in _gpu_records(there).items():
        found |= {
            gpu_label(card, "model"): sanitize_label(gpu.model.replace(" ", "_")),
            gpu_label(card, "memory-mb"): str(gpu.memory_bytes // 10**6),
            gpu_label(card, UUID_LABEL): sanitize_label(gpu.labels.get(UUID_LABEL, "")),
        }
    return {name: value for name, value in found.items() if value} | {
        sanitize_label(n): sanitize_label(v) for n, v in labels.items()
    }


def robot_label(robot: str) -> str:
    """The label that says of what model a robot is."""
    return sanitize_label(f"{ROBOT_LABEL_PREFIX}{robot}")


def parse_robot_labels(robot: str, labels: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The capabilities and the labels that a node's `labels` say `robot` has."""
    mark = f"{ROBOT_LABEL_PREFIX}{robot}."
    own = {label.removeprefix(mark): value for label, value in labels.items() if label.startswith(mark)}
    can = tuple(sorted(_capability_from_label(fact) for fact in own if fact.startswith(CAPABILITY_PREFIX)))
    return can, {fact: value for fact, value in own.items() if not fact.startswith(CAPABILITY_PREFIX)}


def _robot_labels(robot: ResourceRecord) -> dict[str, str]:
    """What `parse_robot_labels` reads. A fact that Ray would not take as it is, is left out."""
    can = {f"{CAPABILITY_PREFIX}{each.replace(':', '.', 1)}": each for each in robot.capabilities}
    facts = {fact: "yes" for fact, each in can.items() if _capability_from_label(fact) == each} | robot.labels
    named = {f"{ROBOT_LABEL_PREFIX}{robot.name}.{fact}": value for fact, value in facts.items()}
    return {
        label: value
        for label, value in named.items()
        if sanitize_label(label) == label and sanitize_label(value) == value
    }


def _capability_from_label(fact: str) -> str:
    return fact.removeprefix(CAPABILITY_PREFIX).replace(".", ":", 1)


def gpu_label(card: str, fact: str) -> str:
    """The label that says of a GPU its ``model``, with ``_`` for each space, its ``memory-mb``, or its ``uuid``."""
    return sanitize_label(f"{GPU_LABEL_PREFIX}{card}-{fact}")


def node_argv(
    records: Iterable[ResourceRecord], labels: Mapping[str, str], *, head_port: int = 0, address: str = "", ip: str = ""
) -> list[str]:
    """The command line that keeps a Ray node going until SIGTERM.

    Args:
        records: what the computer has.
        labels: further labels, such as the site.
        head_port: begins a cluster whose others join at this port; 0 joins the one at `address`.
        ip: this node's own address; empty lets Ray find it.
    """
    found = list(records)
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    argv += ["--dashboard-agent-listen-port=0"]  # or a second node of one machine would want the first one's
    argv += ["--head", f"--port={head_port}", "--include-dashboard=false"] if head_port else [f"--address={address}"]
    argv += [f"--node-ip-address={ip}"] * bool(ip)
    argv += ["--num-gpus=0"]  # or Ray would choose from what it counts
    argv += [f"--resources={json.dumps(ray_resources(found))}"]
    argv += [f"--object-store-memory={DEFAULT_OBJECT_STORE_BYTES}"]
    chosen = ray_labels(found, labels)
    return [*argv, f"--labels={','.join(f'{k}={v}' for k, v in chosen.items())}"] if chosen else argv


def node_environment(token: Path | None) -> dict[str, str]:
    """This process's variables, and those that a node needs. `token` is the file of the cluster's token.

    Raises:
        HalError: no token is known, neither by `token` nor as Ray documents it.
    """
    known = {name: os.environ[name] for name in (_TOKEN, _TOKEN_PATH) if os.environ.get(name)}
    if token is not None:
        if not token.exists():
            raise HalError(f"there is no cluster's token at {token}; copy it from the computer that began the cluster")
        known = {_TOKEN_PATH: str(token.resolve())}
    if not known:
        raise HalError("which token does the cluster have? Give --token FILE, or set RAY_AUTH_TOKEN_PATH")
    rest = {name: value for name, value in os.environ.items() if name != _TOKEN}  # which to Ray counts more than a file
    return {**rest, "RAY_AUTH_MODE": "token", **NODE_SETTINGS, **known}


def ensure_token_file(path: Path) -> None:
    """Draws a cluster's token into `path`, for this user's eyes, where there is none."""
    if not path.exists():
        before = os.umask(0o077)
        try:
            replace_durably(path, secrets.token_hex(32).encode())
        finally:
            os.umask(before)


def sanitize_label(text: str) -> str:
    """`text` in the characters, and of the length, that Ray allows in a label."""
    return _UNSAFE_CHARACTERS.sub("-", text)[:MAX_LABEL_CHARS].strip("-_.")


def _gpu_records(records: Iterable[ResourceRecord]) -> dict[str, ResourceRecord]:
    """The GPUs that work, by what they are called on their own computer, e.g. ``gpu-0``."""
    there = [record for record in records if record.kind is Kind.GPU and record.health is not Health.LOST]
    return {sanitize_label(record.name.rpartition("/")[2]): record for record in there}


NODE_GONE = "its Ray node is gone"
NODE_AFFINITY_SHARE = 0.001  # of a node's own resource: enough to name the node, and so little that all find room
GROUP_NAME_SEPARATOR = "#"
"""In a placement group's name it begins what is not the user's name."""
_RAY_LABEL_PREFIX = "ray.io/"
_ACTIVE_GROUP_STATES = ("CREATED", "RESCHEDULING")
_RESOURCE_LABEL = "card"
"""The label of a GPU's record that says as what its node has declared it."""

RayNode = Mapping[str, Any]
"""A node as ``ray.nodes`` tells of it."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """What is held together on one node.

    Attributes:
        node: the name that the node's records carry.
        resources: Ray's.
        is_gpu: it is a GPU.
        uuid: the GPU's; empty where it is not known.
    """

    node: str
    resources: dict[str, float]
    is_gpu: bool = False
    uuid: str = ""


def cluster_records(
    nodes: Sequence[RayNode], available: Mapping[str, Mapping[str, float]], groups: Iterable[Mapping[str, Any]]
) -> tuple[ResourceRecord, ...]:
    """The cluster's computers, GPUs and declared robots. What a dead node had is LOST, until a node with its address
    is there again. A computer's processors and memory are those that are free.

    Args:
        free: the resources that nobody has reserved, by the node's id; a node that is not in it is all free.
        groups: the cluster's placement groups; their names begin with those of the users.
    """
    users = _reserved_by_user(groups)
    names = node_names(nodes)
    found: dict[str, ResourceRecord] = {}
    for node in sorted(nodes, key=lambda node: bool(node["Alive"])):  # what lives replaces what is dead
        key = node["NodeID"]
        for record in _node_records(
            node, names[key], _unreserved(node["Resources"], available.get(key), users[key]), users[key]
        ):
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


def make_bundles(
    requests: Sequence[ResourceRequest], assigned: Sequence[Sequence[ResourceRecord]], addresses: Mapping[str, str]
) -> tuple[Bundle, ...]:
    """One bundle for each record that a job gets (`hal.placement`), in the order of its requests.

    Args:
        addresses: Ray's address of each node, by name.
    """

    def of(request: ResourceRequest, record: ResourceRecord) -> dict[str, float]:
        match record.kind:
            case Kind.ROBOT:
                return {f"{ROBOT_RESOURCE_PREFIX}{record.name}": ROBOT_CLAIM}
            case Kind.GPU:
                card = record.labels.get(_RESOURCE_LABEL)
                return {
                    f"node:{addresses[record.node]}": NODE_AFFINITY_SHARE,
                    f"{GPU_RESOURCE_PREFIX}{card}" if card else "GPU": 1.0,
                }
        wanted = {"CPU": float(request.cores), "memory": float(request.memory_bytes)}
        return {
            f"node:{addresses[record.node]}": NODE_AFFINITY_SHARE,
            **{name: much for name, much in wanted.items() if much},
        }

    return tuple(
        Bundle(
            node=record.node,
            resources=of(request, record),
            is_gpu=record.kind is Kind.GPU,
            uuid=record.labels.get(UUID_LABEL, ""),
        )
        for request, records in zip(requests, assigned, strict=True)
        for record in records
    )


def _reserved_by_user(groups: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Counter[str]]]:
    """How much of each resource who has reserved: node id -> resource -> name -> amount."""
    users: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for group in groups:
        if group["state"] not in _ACTIVE_GROUP_STATES:
            continue
        name = group["name"].partition(GROUP_NAME_SEPARATOR)[0] or "another job"
        for number, node in group["bundles_to_node_id"].items():
            for resource, amount in group["bundles"][number].items():
                users[node][resource][name] += amount
    return users


def _unreserved(
    total: Mapping[str, float], free: Mapping[str, float] | None, users: Mapping[str, Counter[str]]
) -> dict[str, float]:
    """What can be reserved: what Ray says is free lags behind what has just been reserved."""
    reserved = {resource: sum(amounts.values()) for resource, amounts in users.items()}
    unused = total if free is None else free
    return {r: max(0.0, min(unused.get(r, 0.0), much - reserved.get(r, 0.0))) for r, much in total.items()}


def _node_records(
    node: RayNode, name: str, free: Mapping[str, float], users: Mapping[str, Counter[str]]
) -> Iterator[ResourceRecord]:
    total, labels = node["Resources"], node.get("Labels") or {}
    facts = {
        key: value
        for key, value in labels.items()
        if not key.startswith((_RAY_LABEL_PREFIX, ROBOT_LABEL_PREFIX, GPU_LABEL_PREFIX))
    }
    health, trouble = (Health.READY, "") if node["Alive"] else (Health.LOST, NODE_GONE)
    blank = ResourceRecord(
        kind=Kind.COMPUTE, name=name, model="Ray node", node=name, labels=facts, health=health, trouble=trouble,
        found_by="ray",
    )  # fmt: skip
    yield msgspec.structs.replace(
        blank,
        cores=int(free.get("CPU", 0.0)),
        memory_bytes=int(free.get("memory", 0.0)),
        note=_describe_shares(users.get("CPU", Counter()), int(total.get("CPU", 0.0))),
    )
    yield from _counted_gpus(blank, int(total.get("GPU", 0.0)), int(free.get("GPU", 0.0)), users.get("GPU", Counter()))
    for resource in total:
        if resource.startswith(ROBOT_RESOURCE_PREFIX):
            robot = resource.removeprefix(ROBOT_RESOURCE_PREFIX)
            record = _robot_record(blank, robot, labels)
        elif resource.startswith(GPU_RESOURCE_PREFIX):
            record = _gpu_record(blank, resource.removeprefix(GPU_RESOURCE_PREFIX), labels)
        else:
            continue
        taken = free.get(resource, 0.0) < 1.0
        yield _as_leased(record, users.get(resource, Counter())) if taken else record


def _robot_record(blank: ResourceRecord, robot: str, labels: Mapping[str, str]) -> ResourceRecord:
    model = labels.get(robot_label(robot), "robot")
    capabilities, own = parse_robot_labels(robot, labels)
    return msgspec.structs.replace(
        blank,
        kind=Kind.ROBOT,
        name=robot,
        model=model,
        capabilities=capabilities,
        labels={**blank.labels, **own},
    )


def _gpu_record(blank: ResourceRecord, card: str, labels: Mapping[str, str]) -> ResourceRecord:
    memory_mb = labels.get(gpu_label(card, "memory-mb"), "")
    return msgspec.structs.replace(
        blank,
        kind=Kind.GPU,
        name=f"{blank.node}/{card}",
        model=labels.get(gpu_label(card, "model"), "GPU").replace("_", " "),
        labels={**blank.labels, _RESOURCE_LABEL: card, UUID_LABEL: labels.get(gpu_label(card, UUID_LABEL), "")},
        memory_bytes=int(memory_mb) * 10**6 if memory_mb.isdecimal() else 0,
    )


def _counted_gpus(blank: ResourceRecord, count: int, free: int, users: Counter[str]) -> Iterator[ResourceRecord]:
    for number in range(count):
        record = msgspec.structs.replace(blank, kind=Kind.GPU, name=f"{blank.node}/gpu-{number}", model="GPU")
        yield _as_leased(record, users) if number < count - free else record


def _as_leased(record: ResourceRecord, users: Counter[str]) -> ResourceRecord:
    if record.health is not Health.READY:
        return record
    by = f"by {format_list(sorted(users))}" if users else ""
    return msgspec.structs.replace(record, health=Health.LEASED, note=by)


def _describe_shares(users: Counter[str], cores: int) -> str:
    uses = [f"{user} uses {amount:g}" for user, amount in sorted(users.items())]
    return f"{format_list(uses)} of its {cores}" if uses else ""
