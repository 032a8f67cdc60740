"""Placement: which resources a job gets. All that it asks for or nothing, the same for the same records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hal.errors import PlacementError
from hal.resource import Health, Kind, ResourceRecord

_GB = 1_000_000_000


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """`count` resources of one sort. Empty fields ask for nothing in particular."""

    kind: Kind
    count: int = 1
    model: str = ""
    memory_bytes: int = 0
    capabilities: tuple[str, ...] = ()
    labels: dict[str, str] = {}

    def admits(self, record: ResourceRecord) -> bool:
        """True where the record is what is asked for, whatever its health."""
        return (
            record.kind is self.kind
            and self.model in ("", record.model)
            and record.memory_bytes >= self.memory_bytes
            and set(self.capabilities) <= set(record.capabilities)
            and self.labels.items() <= record.labels.items()
        )

    def __str__(self) -> str:
        """In words and without the count, e.g. ``gpu with 24.0 GB``."""
        demands = [f"{self.memory_bytes / _GB:.1f} GB"] * bool(self.memory_bytes) + list(self.capabilities)
        demands += [f"{name}={value}" for name, value in sorted(self.labels.items())]
        return f"{self.kind}{f' {self.model}' * bool(self.model)}{' with ' * bool(demands)}{', '.join(demands)}"


@dataclass(frozen=True)
class Placement:
    """For each request, in its order, the records that it gets."""

    assigned: tuple[tuple[ResourceRecord, ...], ...]


def place(requests: Sequence[Request], records: Sequence[ResourceRecord]) -> Placement:
    """Finds distinct, ready records for all `requests`, if that is possible at all.

    Among the free records that fit, the one with the least memory and then the first by name is preferred.

    Raises:
        PlacementError: not all can be met at once; says what was asked, what there is, and what is missing.
    """
    pool = sorted((r for r in records if r.health is Health.READY), key=lambda r: (r.memory_bytes, r.name))
    slots = [index for index, request in enumerate(requests) for _ in range(request.count)]
    taker: dict[int, int] = {}  # position in the pool -> slot
    unmet = [slot for slot in range(len(slots)) if not _assign(slot, requests, slots, pool, taker, set())]
    if unmet:
        raise PlacementError(_explain(requests, records, Counter(slots[slot] for slot in unmet)))
    chosen = {slot: pool[position] for position, slot in taker.items()}
    return Placement(
        tuple(tuple(chosen[s] for s, owner in enumerate(slots) if owner == index) for index in range(len(requests)))
    )


def _assign(
    slot: int,
    requests: Sequence[Request],
    slots: Sequence[int],
    pool: Sequence[ResourceRecord],
    taker: dict[int, int],
    tried: set[int],
) -> bool:
    """One augmenting path of Kuhn's algorithm: where no record is free, one may move to another slot that it fits."""
    for position in sorted(range(len(pool)), key=taker.__contains__):
        if position in tried or not requests[slots[slot]].admits(pool[position]):
            continue
        tried.add(position)
        if position not in taker or _assign(taker[position], requests, slots, pool, taker, tried):
            taker[position] = slot
            return True
    return False


def _explain(requests: Sequence[Request], records: Sequence[ResourceRecord], missing: Counter[int]) -> str:
    asked = " and ".join(f"{request.count} x {request}" for request in requests)
    there = "; ".join(f"{request}: {_inventory(request, records)}" for request in requests)
    lacking = " and ".join(f"{number} x {requests[index]}" for index, number in sorted(missing.items()))
    return f"asked for {asked}; there is {there}; missing {lacking}"


def _inventory(request: Request, records: Sequence[ResourceRecord]) -> str:
    fitting = sorted((r.name, r.health) for r in records if request.admits(r))
    return ", ".join(f"{name} ({health})" for name, health in fitting) or "none"
