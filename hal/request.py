"""What a job asks for: so many resources of one sort, and which of them are to be near each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from hal.resource import Kind, ResourceRecord


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """`count` resources of one sort. Empty fields ask for nothing in particular.

    Attributes:
        name: this very resource.
        memory_bytes: of each GPU or computer, at least.
        cores: processors of a computer. A computer is shared: several requests may get parts of the same.
        labels: that the record must have with these values, e.g. ``{"site": "lab"}``.
        near: a name that the job makes up; requests with the same one get resources of one place.
        near_by: what a place is: a computer, or a site (the label; a computer without it is a site of its own).
    """

    kind: Kind
    count: int = 1
    name: str = ""
    model: str = ""
    memory_bytes: int = 0
    cores: int = 0
    capabilities: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    near: str = ""
    near_by: Literal["node", "site"] = "node"

    def admits(self, record: ResourceRecord) -> bool:
        """True where the record is what is asked for, whatever its health and its place."""
        return all(fits(record) for fits in self.demands())

    def demands(self) -> Iterator[Callable[[ResourceRecord], bool]]:
        """What the record must be, one test each, from the most telling to the least."""
        yield lambda record: record.kind is self.kind
        yield lambda record: self.name in ("", record.name)
        yield lambda record: self.model in ("", record.model)
        yield lambda record: set(self.capabilities) <= set(record.capabilities)
        yield lambda record: self.labels.items() <= record.labels.items()
        yield lambda record: record.memory_bytes >= self.memory_bytes
        yield lambda record: record.cores >= self.cores

    def place_of(self, record: ResourceRecord) -> str:
        """The place in the sense of `near_by`."""
        return record.labels.get("site", record.node) if self.near_by == "site" else record.node
