"""Resources that jobs can use, one record for each, and the requests for them.

`Kind`, `Health` and `ResourceRecord` describe a robot, a GPU, a computer or a device. `ResourceRequest` is one line of
a job's request. GPUs are identified by UUID, since CUDA and the driver number the GPUs of a computer differently.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Iterable
from typing import Literal

import msgspec

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
UUID_LABEL = "uuid"
"""The label that holds a GPU's UUID in its record."""


MAX_PORT = 65535


def parse_host_port(address: str) -> tuple[str, int] | None:
    """Splits ``HOST:PORT``, an IPv6 host in brackets: ``[fd00::7]:30004``. None if the syntax is wrong."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return (host, int(port)) if host and port.isdecimal() else None


class Kind(enum.StrEnum):
    """The sort of a resource.

    A robot includes its cameras and input devices. CAMERA, INPUT and BUS (a motor bus, an adapter) are devices of a
    computer that belong to no configured robot. A DRIVER is a robot that an installed package could drive.
    """

    ROBOT = "robot"
    GPU = "gpu"
    COMPUTE = "compute"
    CAMERA = "camera"
    INPUT = "input"
    BUS = "bus"
    DRIVER = "driver"


class Health(enum.StrEnum):
    """Whether a resource can be allocated. `hal.registry` defines the legal changes."""

    READY = "ready"
    LEASED = "leased"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    LOST = "lost"


class ResourceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest unit of allocation.

    Attributes:
        name: unique among all records, e.g. ``panda-0`` or ``desk/gpu-0``.
        model: e.g. ``panda`` or ``NVIDIA H200``.
        node: host name of the computer that the resource is attached to.
        capabilities: e.g. ``camera:front``; a request may require any of them.
        labels: further facts by name: ``site`` is its location, ``address`` its network address.
        memory_bytes: of a GPU or computer; 0 for a robot.
        sm_count: streaming multiprocessors of a GPU, 0 if unknown.
        cores: usable processors of a computer; 0 for everything else.
        load: used share in [0, 1]. A change of the load is no event.
        found_by: the probe that found it, or ``tunnel`` if it announced itself.
        embodiment: ``RobotSpec.embodiment`` of a robot, else empty.
        trouble: for people: a defect of a resource that is present, such as a port without read permission.
        note: for people: the reason of a quarantine or a drain, and the operator.
        seen_unix_s: of a LOST resource: when it was last present, in seconds since 1970; 0 if unknown.
    """

    kind: Kind
    name: str
    model: str
    node: str
    capabilities: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    memory_bytes: int = 0
    sm_count: int = 0
    cores: int = 0
    load: float = 0.0
    health: Health = Health.READY
    found_by: str = "config"
    embodiment: str = ""
    trouble: str = ""
    note: str = ""
    seen_unix_s: float = 0.0

    def to_json(self) -> str:
        """All fields as one line of JSON, in a fixed order."""
        return msgspec.json.encode(self, order="deterministic").decode()


def local_node() -> str:
    """The `node` of this computer's resources."""
    return socket.gethostname()


class ResourceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for `count` resources of one sort. An empty field matches everything.

    Attributes:
        name: one specific resource.
        memory_bytes: the minimum of each GPU or computer.
        cores: processors of a computer. A computer is shared: several requests may get parts of the same one.
        labels: the record must have these values, e.g. ``{"site": "lab"}``.
        colocate: a group name of the job's choice; requests of one group get resources in one place.
        colocate_by: the sort of place: a computer, or a site (the label; a computer without it is its own site).
    """

    kind: Kind
    count: int = 1
    name: str = ""
    model: str = ""
    memory_bytes: int = 0
    cores: int = 0
    capabilities: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    colocate: str = ""
    colocate_by: Literal["node", "site"] = "node"

    def matches(self, record: ResourceRecord) -> bool:
        """Whether the record meets all criteria, regardless of its health and place."""
        return record.kind is self.kind and self.name in ("", record.name) and not self.mismatch(record)

    def mismatch(self, record: ResourceRecord) -> str:
        """What the record has in place of the first criterion that it does not meet; empty if it meets all.

        Kind and name are not compared.
        """
        if self.model not in ("", record.model):
            return f"model {record.model}"
        if lacking := [each for each in self.capabilities if each not in record.capabilities]:
            return f"no {', '.join(lacking)}"
        if other := sorted(name for name, value in self.labels.items() if record.labels.get(name) != value):
            return f"{other[0]}={record.labels[other[0]]}" if other[0] in record.labels else f"no {other[0]}"
        if record.memory_bytes < self.memory_bytes:
            return f"{record.memory_bytes / 1e9:.3g} GB{f' free, {record.note}' if record.note else ''}"
        if record.cores < self.cores:
            return f"{record.cores} processors{f' free, {record.note}' if record.note else ''}"
        return ""

    def describe(self) -> str:
        """E.g. ``robot panda-0`` or ``2 gpu, 24 GB, site=lab, with cell``."""
        parts = [f"{self.count} {self.kind}" if self.count > 1 else f"{self.kind} {self.name}".strip()]
        parts += [f"model {self.model}"] * bool(self.model) + list(self.capabilities)
        parts += [f"{self.memory_bytes / 1e9:.3g} GB"] * bool(self.memory_bytes)
        parts += [f"{self.cores} processors"] * bool(self.cores)
        parts += [f"{name}={value}" for name, value in sorted(self.labels.items())]
        parts += [f"with {self.colocate} by {self.colocate_by}"] * bool(self.colocate)
        return ", ".join(parts)

    def location_of(self, record: ResourceRecord) -> str:
        """The record's place in the sense of `colocate_by`."""
        return record.labels.get("site", record.node) if self.colocate_by == "site" else record.node


def visible_devices_env(uuids: Iterable[str]) -> dict[str, str]:
    """The environment that shows a process only these GPUs, in this order; empty if no UUID is known."""
    known = [uuid for uuid in uuids if uuid]
    return {CUDA_VISIBLE_DEVICES: ",".join(known)} if known else {}
