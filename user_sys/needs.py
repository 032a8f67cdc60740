"""What a run needs besides the robots that it names, in a config's words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hal.request import Request
from hal.resource import Kind
from user_sys.errors import ConfigError


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
        if self.count < 1 or self.cores < 0 or self.memory_gb < 0:
            raise ConfigError("needs: count must be at least 1, cores and memory_gb at least 0")

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
