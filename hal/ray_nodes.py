"""Computers as nodes of a Ray cluster: the command that starts Ray there, and Ray's resources as resource records.

Ray learns custom resources and labels only when a node starts. So a node declares every robot of its configuration,
switched on or not; the driver process waits for the robot. The file of a run, not its node, describes a robot.

Ray's own resource ``GPU`` is a count, and Ray chooses any of the GPUs. So a node declares each GPU as its own resource,
with labels that describe it, and tells Ray that it has none to choose from. The GPUs of a node that was started in
another way than by `node_argv` are not used.

This module does not call Ray. `cluster_records` converts Ray's nodes (``ray.nodes``), their free resources and the
placement groups into records; `make_bundles` converts a job's resources into bundles for a reservation.
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

DEFAULT_OBJECT_STORE_BYTES = 150_000_000
NODE_SETTINGS = {"RAY_worker_niceness": "0", "RAY_kill_child_processes_on_worker_exit": "false"}
"""By default Ray gives its processes, robots' drivers included, the niceness 15, and it kills drivers with their
actors. The drivers end by themselves after they have stopped their robots."""
ROBOT_RESOURCE_PREFIX, GPU_RESOURCE_PREFIX = "robot:", "card:"
GPU_LABEL_PREFIX = "card-"
ROBOT_CLAIM = 0.6
"""The reserved share of a robot's resource: above half, so that one run has it. The rest is for its processes."""
MAX_LABEL_CHARS = 63
NODE_GONE = "its Ray node is gone"
NODE_AFFINITY_SHARE = 0.001  # of a node's own resource: it names the node and leaves room for many bundles
GROUP_NAME_SEPARATOR = "#"
"""In a placement group's name it separates the user's name from a unique suffix."""
_TOKEN, _TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")
_RAY_LABEL_PREFIX = "ray.io/"
_ACTIVE_GROUP_STATES = ("CREATED", "RESCHEDULING")
_RESOURCE_LABEL = "card"
"""The label of a GPU's record with the suffix of its Ray resource."""

RayNode = Mapping[str, Any]
"""A node in the form of ``ray.nodes``."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that are reserved together on one node.

    Attributes:
        node: the name in the node's records.
        resources: Ray's resources.
        is_gpu: the bundle is a GPU.
        uuid: the GPU's; empty if it is unknown.
    """

    node: str
    resources: dict[str, float]
    is_gpu: bool = False
    uuid: str = ""


def ray_resources(records: Iterable[ResourceRecord]) -> dict[str, float]:
    """The resources that a Ray node declares for these robots and GPUs, e.g. ``robot:panda-0`` and ``card:gpu-0``. Ray
    counts processors by itself."""
    given = list(records)
    found = {f"{ROBOT_RESOURCE_PREFIX}{record.name}": 1.0 for record in given if record.kind is Kind.ROBOT}
    return found | {f"{GPU_RESOURCE_PREFIX}{gpu}": 1.0 for gpu in _gpu_records(given)}


def ray_labels(records: Iterable[ResourceRecord], labels: Mapping[str, str]) -> dict[str, str]:
    """`labels`, and labels that describe the computer's GPUs, in the characters that Ray allows."""
    found: dict[str, str] = {}
    for name, gpu in _gpu_records(records).items():
        found |= {
            gpu_label(name, "model"): sanitize_label(gpu.model.replace(" ", "_")),
            gpu_label(name, "memory-mb"): str(gpu.memory_bytes // 10**6),
            gpu_label(name, UUID_LABEL): sanitize_label(gpu.labels.get(UUID_LABEL, "")),
        }
    return {name: value for name, value in found.items() if value} | {
        sanitize_label(n): sanitize_label(v) for n, v in labels.items()
    }


def gpu_label(gpu: str, fact: str) -> str:
    """The label of a GPU's ``model`` (with ``_`` for each space), ``memory-mb`` or ``uuid``."""
    return sanitize_label(f"{GPU_LABEL_PREFIX}{gpu}-{fact}")


def node_argv(
    records: Iterable[ResourceRecord], labels: Mapping[str, str], *, head_port: int = 0, address: str = "", ip: str = ""
) -> list[str]:
    """The command line of a Ray node, which runs until SIGTERM.

    Args:
        records: the computer's resources.
        labels: further labels, such as the site.
        head_port: start a cluster whose other nodes join at this port; 0 joins the one at `address`.
        ip: this node's own address; empty lets Ray find it.
    """
    found = list(records)
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    argv += ["--dashboard-agent-listen-port=0"]  # else two nodes on one machine use the same port
    argv += ["--head", f"--port={head_port}", "--include-dashboard=false"] if head_port else [f"--address={address}"]
    argv += [f"--node-ip-address={ip}"] * bool(ip)
    argv += ["--num-gpus=0"]  # else Ray would choose among the GPUs that it counts
    argv += [f"--resources={json.dumps(ray_resources(found))}"]
    argv += [f"--object-store-memory={DEFAULT_OBJECT_STORE_BYTES}"]
    chosen = ray_labels(found, labels)
    return [*argv, f"--labels={','.join(f'{k}={v}' for k, v in chosen.items())}"] if chosen else argv


def node_environment(token: Path | None) -> dict[str, str]:
    """This process's environment with the settings of a node. `token` is the file of the cluster's token.

    Raises:
        HalError: there is no token, neither in `token` nor as Ray documents it.
    """
    known = {name: os.environ[name] for name in (_TOKEN, _TOKEN_PATH) if os.environ.get(name)}
    if token is not None:
        if not token.exists():
            raise HalError(f"there is no token at {token}: copy the cluster's token from the computer that started it")
        known = {_TOKEN_PATH: str(token.resolve())}
    if not known:
        raise HalError("the cluster's token is missing: give --token FILE, or set RAY_AUTH_TOKEN_PATH")
    rest = {name: value for name, value in os.environ.items() if name != _TOKEN}  # Ray would prefer it to the file
    return {**rest, "RAY_AUTH_MODE": "token", **NODE_SETTINGS, **known}


def ensure_token_file(path: Path) -> None:
    """Writes a new cluster token to `path`, readable for this user only, unless the file exists."""
    if not path.exists():
        before = os.umask(0o077)
        try:
            replace_durably(path, secrets.token_hex(32).encode())
        finally:
            os.umask(before)


def sanitize_label(text: str) -> str:
    """`text` in the characters and the length of a Ray label."""
    return _UNSAFE_CHARACTERS.sub("-", text)[:MAX_LABEL_CHARS].strip("-_.")


def _gpu_records(records: Iterable[ResourceRecord]) -> dict[str, ResourceRecord]:
    """The working GPUs, by their names on their own computer, e.g. ``gpu-0``."""
    working = [record for record in records if record.kind is Kind.GPU and record.health is not Health.LOST]
    return {sanitize_label(record.name.rpartition("/")[2]): record for record in working}


def cluster_records(
    nodes: Sequence[RayNode], available: Mapping[str, Mapping[str, float]], groups: Iterable[Mapping[str, Any]]
) -> tuple[ResourceRecord, ...]:
    """The cluster's computers, GPUs and declared robots. A dead node's resources are LOST until a node with its name
    is alive again. A computer's record has its free processors and memory.

    Args:
        available: unreserved resources by node id; a missing node is all free.
        groups: the cluster's placement groups, whose names begin with their users' names.
    """
    users = _reserved_by_user(groups)
    names = node_names(nodes)
    found: dict[str, ResourceRecord] = {}
    for node in sorted(nodes, key=lambda node: bool(node["Alive"])):  # a living node's records replace a dead one's
        key = node["NodeID"]
        for record in _node_records(
            node, names[key], _unreserved(node["Resources"], available.get(key), users[key]), users[key]
        ):
            found[record.name] = record
    return tuple(found[name] for name in sorted(found))


def node_names(nodes: Sequence[RayNode]) -> dict[str, str]:
    """Each node's name by its id: its host name, or its address if several addresses have that host name."""
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

    def resources_of(request: ResourceRequest, record: ResourceRecord) -> dict[str, float]:
        if record.kind is Kind.ROBOT:
            return {f"{ROBOT_RESOURCE_PREFIX}{record.name}": ROBOT_CLAIM}
        amounts = {"CPU": float(request.cores), "memory": float(request.memory_bytes)}
        if record.kind is Kind.GPU:
            amounts = {f"{GPU_RESOURCE_PREFIX}{record.labels[_RESOURCE_LABEL]}": 1.0}
        used = {name: amount for name, amount in amounts.items() if amount}
        return {f"node:{addresses[record.node]}": NODE_AFFINITY_SHARE, **used}

    return tuple(
        Bundle(
            node=record.node,
            resources=resources_of(request, record),
            is_gpu=record.kind is Kind.GPU,
            uuid=record.labels.get(UUID_LABEL, ""),
        )
        for request, records in zip(requests, assigned, strict=True)
        for record in records
    )


def _reserved_by_user(groups: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Counter[str]]]:
    """Reserved amounts: node id -> resource -> user -> amount."""
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
    """Free amounts. Ray's own counts of processors and memory include unreserved processes, but lag behind the newest
    reservations; robots and GPUs of our own are used by reservations only."""
    unreserved = {r: max(0.0, amount - sum(users.get(r, Counter()).values())) for r, amount in total.items()}
    counted = {} if free is None else {r: free.get(r, 0.0) for r in ("CPU", "memory")}
    return {r: min(amount, counted.get(r, amount)) for r, amount in unreserved.items()}


def _node_records(
    node: RayNode, name: str, free: Mapping[str, float], users: Mapping[str, Counter[str]]
) -> Iterator[ResourceRecord]:
    total, labels = node["Resources"], node.get("Labels") or {}
    facts = {key: value for key, value in labels.items() if not key.startswith((_RAY_LABEL_PREFIX, GPU_LABEL_PREFIX))}
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
    for resource in total:
        if resource.startswith(ROBOT_RESOURCE_PREFIX):
            robot = resource.removeprefix(ROBOT_RESOURCE_PREFIX)
            record = msgspec.structs.replace(blank, kind=Kind.ROBOT, name=robot, model="robot")
        elif resource.startswith(GPU_RESOURCE_PREFIX):
            record = _gpu_record(blank, resource.removeprefix(GPU_RESOURCE_PREFIX), labels)
        else:
            continue
        taken = free.get(resource, 0.0) < 1.0
        yield _as_leased(record, users.get(resource, Counter())) if taken else record


def _gpu_record(blank: ResourceRecord, gpu: str, labels: Mapping[str, str]) -> ResourceRecord:
    memory_mb = labels.get(gpu_label(gpu, "memory-mb"), "")
    return msgspec.structs.replace(
        blank,
        kind=Kind.GPU,
        name=f"{blank.node}/{gpu}",
        model=labels.get(gpu_label(gpu, "model"), "GPU").replace("_", " "),
        labels={**blank.labels, _RESOURCE_LABEL: gpu, UUID_LABEL: labels.get(gpu_label(gpu, UUID_LABEL), "")},
        memory_bytes=int(memory_mb) * 10**6 if memory_mb.isdecimal() else 0,
    )


def _as_leased(record: ResourceRecord, users: Counter[str]) -> ResourceRecord:
    if record.health is not Health.READY:
        return record
    by = f"by {format_list(sorted(users))}" if users else ""
    return msgspec.structs.replace(record, health=Health.LEASED, note=by)


def _describe_shares(users: Counter[str], cores: int) -> str:
    uses = [f"{user} uses {amount:g}" for user, amount in sorted(users.items())]
    return f"{format_list(uses)} of its {cores}" if uses else ""
