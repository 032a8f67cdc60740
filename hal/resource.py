"""``HOST:PORT`` as people write it, an IPv6 address in brackets: ``[fd00::7]:30004``.

Resource records: what can be given to a job, one record for each thing that is given as a whole.

What a job asks for: so many resources of one sort, and which of them are to be near each other.

Which GPU is meant: each by its UUID, since CUDA counts a computer's GPUs in another order than their driver does.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from hal.errors import HalError


def parse_host_port(address: str) -> tuple[str, int] | None:
    """None where `address` is none; whether there are such a host and port is not looked at."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return (host, int(port)) if host and port.isdecimal() else None


class Kind(enum.StrEnum):
    """What sort of thing a resource is.

    A robot comes with its cameras and input devices. CAMERA, INPUT and BUS (a motor bus, an adapter) are devices of a
    computer that no robot has been configured for; a DRIVER is what an installed package could drive.
    """

    ROBOT = "robot"
    GPU = "gpu"
    COMPUTE = "compute"
    CAMERA = "camera"
    INPUT = "input"
    BUS = "bus"
    DRIVER = "driver"


class Health(enum.StrEnum):
    """Whether a resource can be given away. `hal.registry` says which changes are legal."""

    READY = "ready"
    LEASED = "leased"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    LOST = "lost"


class ResourceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest thing that can be allocated.

    Attributes:
        name: unique among all records, e.g. ``panda-0`` or ``desk/gpu-0``.
        model: what it is, e.g. ``panda`` or ``NVIDIA H200``.
        node: host name of the computer it is attached to.
        capabilities: what it can do, e.g. ``camera:front``; a request may demand any of them.
        labels: further facts, by name; ``site`` says where it stands, ``address`` how it is reached.
        memory_bytes: of a GPU or computer; 0 for a robot.
        sm_count: streaming multiprocessors of a GPU, 0 where unknown.
        cores: processors of a computer that may be used; 0 for everything else.
        load: share of it that is in use now, in [0, 1]; it changes all the time and is no news.
        found_by: the probe that found it, or ``tunnel`` where it announced itself.
        embodiment: ``RobotSpec.embodiment`` of a robot, else empty.
        trouble: for people: what is wrong with it though it is there, such as a port that may not be opened.
        note: for people: why it is quarantined or draining, and who said so.
        seen_unix_s: of what is LOST: when it was there last, in seconds since 1970; 0 where that is not known.
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
        """One line of JSON with all fields, in a fixed order."""
        return msgspec.json.encode(self, order="deterministic").decode()


def local_node() -> str:
    """The name that this computer's resources carry as `node`."""
    return socket.gethostname()


class ResourceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`count` resources of one sort. Empty fields ask for nothing in particular.

    Attributes:
        name: this very resource.
        memory_bytes: of each GPU or computer, at least.
        cores: processors of a computer. A computer is shared: several requests may get parts of the same.
        labels: that the record must have with these values, e.g. ``{"site": "lab"}``.
        colocate: a name that the job makes up; requests with the same one get resources of one place.
        colocate_by: what a place is: a computer, or a site (the label; a computer without it is a site of its own).
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
        """True where the record is what is asked for, whatever its health and its place."""
        return all(fits(record) for fits in self.criteria())

    def criteria(self) -> Iterator[Callable[[ResourceRecord], bool]]:
        """What the record must be, one test each, from the most telling to the least."""
        yield lambda record: record.kind is self.kind
        yield lambda record: self.name in ("", record.name)
        yield lambda record: self.model in ("", record.model)
        yield lambda record: set(self.capabilities) <= set(record.capabilities)
        yield lambda record: self.labels.items() <= record.labels.items()
        yield lambda record: record.memory_bytes >= self.memory_bytes
        yield lambda record: record.cores >= self.cores

    def location_of(self, record: ResourceRecord) -> str:
        """The place in the sense of `colocate_by`."""
        return record.labels.get("site", record.node) if self.colocate_by == "site" else record.node


CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
UUID_LABEL = "uuid"
"""The label of a GPU's record that has its UUID."""
_PCI_BUS_ORDER = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # with this CUDA counts as the driver does


def visible_devices_env(uuids: Iterable[str]) -> dict[str, str]:
    """The variables of a process that is to see these GPUs only, in this order; none where no UUID is known."""
    known = [uuid for uuid in uuids if uuid]
    return {CUDA_VISIBLE_DEVICES: ",".join(known)} if known else {}


def drop_hidden_gpus(records: Sequence[ResourceRecord], environment: Mapping[str, str]) -> tuple[ResourceRecord, ...]:
    """`records` without the GPUs that `environment` hides from CUDA.

    Raises:
        HalError: it shows some of several by number, or a slice of one: which GPUs these are cannot be told.
    """
    said = environment.get(CUDA_VISIBLE_DEVICES)
    gpus = sorted((r for r in records if r.kind is Kind.GPU), key=lambda gpu: (len(gpu.name), gpu.name))
    if said is None or not gpus:
        return tuple(records)
    shown: list[ResourceRecord] = []
    for word in (each.strip() for each in said.split(",")):
        found = _find_gpu(word, gpus, counted=len(gpus) == 1 or environment.get(_PCI_BUS_ORDER[0]) == _PCI_BUS_ORDER[1])
        if found is None:  # as CUDA has it: what follows one that is not there is hidden
            break
        shown.append(found)
    return tuple(record for record in records if record.kind is not Kind.GPU or record in shown)


def _find_gpu(word: str, gpus: Sequence[ResourceRecord], counted: bool) -> ResourceRecord | None:
    if word.startswith("MIG-") or (word.isdecimal() and not counted):
        raise HalError(
            f"{CUDA_VISIBLE_DEVICES} shows {word}, which does not say which GPU that is; write UUIDs there, "
            "as nvidia-smi -L tells "
            f"them, or count as it does with {'='.join(_PCI_BUS_ORDER)}"
        )
    if word.isdecimal():
        return gpus[int(word)] if int(word) < len(gpus) else None
    alike = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.labels.get(UUID_LABEL, "").startswith(word)]
    return alike[0] if len(alike) == 1 else None
