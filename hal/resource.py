"""Resource records: what can be given to a job, one record for each thing that is given as a whole."""

from __future__ import annotations

import enum
import socket

import msgspec


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
