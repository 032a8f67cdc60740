"""What a run needs besides the robots that it names, in a config's words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hal.request import Request
from hal.resource import Kind
from user_sys.errors import ConfigError

MAX_COUNT = 256


@dataclass(frozen=True)
class NeedConfig:
    """`count` resources of one sort (`hal.request.Request`).

    Attributes:
        memory_gb: of each GPU or computer, at least.
        near: needs with the same word are met in one place: on one computer, or at one site (`near_by`).
    """

    kind: Literal["robot", "gpu", "compute"]
    count: int = 1
    name: str = ""
    model: str = ""
    memory_gb: float = 0.0
    cores: int = 0
    capabilities: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    near: str = ""
    near_by: Literal["node", "site"] = "node"

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_COUNT or self.cores < 0 or not 0 <= self.memory_gb < math.inf:
            raise ConfigError(f"needs: count must be at least 1, at most {MAX_COUNT}; cores and memory_gb at least 0")
        if self.name and self.count > 1:
            raise ConfigError(f"needs: there is one {self.name}; leave out count, or name each")
        if (self.cores and self.kind != "compute") or (self.memory_gb and self.kind == "robot"):
            what = "cores" if self.cores else "memory_gb"
            raise ConfigError(f"needs: a {self.kind} has no {what}; ask for them apart")

    def request(self) -> Request:
        return Request(
            kind=Kind(self.kind),
            count=self.count,
            name=self.name,
            model=self.model,
            memory_bytes=round(self.memory_gb * 1e9),
            cores=self.cores,
            capabilities=self.capabilities,
            labels=self.labels,
            near=self.near,
            near_by=self.near_by,
        )


def require_one_place(needs: Sequence[NeedConfig]) -> None:
    """Raises ConfigError where one word of `near` means a computer in one need and a site in another."""
    meant: dict[str, str] = {}
    for need in needs:
        if need.near and meant.setdefault(need.near, need.near_by) != need.near_by:
            raise ConfigError(f"needs: near {need.near!r} is by node in one and by site in another; use two words")


def require_whole_learners(needs: Sequence[NeedConfig], processes: int) -> None:
    """Raises ConfigError where GPUs are asked for, and not as many on one computer as a learner has `processes`."""
    together: Counter[str] = Counter()
    for need in needs:
        if need.kind == "gpu":
            together[need.near if need.near_by == "node" else ""] += need.count
    if together and processes > 1 and max((n for near, n in together.items() if near), default=0) < processes:
        raise ConfigError(
            f"learner.processes is {processes}, and each needs a GPU of one computer: "
            f"needs: [{{kind: gpu, count: {processes}, near: learner}}]"
        )
