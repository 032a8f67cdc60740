"""Placement: which resources a job gets. All that it asks for or nothing, the same for the same records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from hal.errors import PlacementError
from hal.placement_words import explain
from hal.request import Request
from hal.resource import Health, Kind, ResourceRecord

MAX_COMBINATIONS = 10_000
"""Of places for groups that are to be near each other, and of ways to share out processors: beyond them it is given up.
A fleet of a hundred nodes and a job with two groups stay within it."""


@dataclass(frozen=True)
class Placement:
    """For each request, in its order, the records that it gets."""

    assigned: tuple[tuple[ResourceRecord, ...], ...]


def place(requests: Sequence[Request], records: Sequence[ResourceRecord]) -> Placement:
    """Finds ready records for all `requests`, if that is possible at all; only computers are given out more than once.

    Among the free records that fit, the one with the least memory and then the first by name is preferred.

    Raises:
        PlacementError: not all can be met at once; says why as a colleague would.
    """
    found = _search(requests, records)
    if found is None:
        raise PlacementError(_explain(requests, records))
    return found


def _search(requests: Sequence[Request], records: Sequence[ResourceRecord]) -> Placement | None:
    pool = sorted((record for record in records if record.health is Health.READY), key=_preferred)
    groups = sorted({(request.near, request.near_by) for request in requests if request.near})
    places = [_places(group, requests, pool) for group in groups]
    for chosen in itertools.islice(itertools.product(*places), MAX_COMBINATIONS):
        where = {group: place for (group, _), place in zip(groups, chosen, strict=True)}
        if (placement := _match(requests, pool, where)) is not None:
            return placement
    return None


def _preferred(record: ResourceRecord) -> tuple[int, str]:
    return record.memory_bytes, record.name


def _places(group: tuple[str, str], requests: Sequence[Request], pool: Sequence[ResourceRecord]) -> list[str]:
    """Where every request of the group finds something, by name."""
    members = [request for request in requests if (request.near, request.near_by) == group]
    each = [{member.place_of(record) for record in pool if member.admits(record)} for member in members]
    return sorted(set.intersection(*each))


def _match(requests: Sequence[Request], pool: Sequence[ResourceRecord], where: Mapping[str, str]) -> Placement | None:
    """Whole resources and shares of computers are independent of each other once the places are chosen."""
    slots = [index for index, request in enumerate(requests) for _ in range(request.count)]

    def fits(slot: int, record: ResourceRecord) -> bool:
        request = requests[slots[slot]]
        return request.admits(record) and (not request.near or request.place_of(record) == where[request.near])

    whole = [slot for slot, index in enumerate(slots) if requests[index].kind is not Kind.COMPUTE]
    shared = [slot for slot, index in enumerate(slots) if requests[index].kind is Kind.COMPUTE]
    taker: dict[int, int] = {}  # position in the pool -> slot
    if not all(_assign(slot, pool, fits, taker, set()) for slot in whole):
        return None
    shares = _share_out(shared, [requests[slots[slot]] for slot in shared], pool, fits)
    if shares is None:
        return None
    chosen = {slot: pool[position] for position, slot in taker.items()} | shares
    rows = ((chosen[slot] for slot, owner in enumerate(slots) if owner == index) for index in range(len(requests)))
    return Placement(tuple(tuple(sorted(row, key=_preferred)) for row in rows))


Fits = Callable[[int, ResourceRecord], bool]


def _assign(slot: int, pool: Sequence[ResourceRecord], fits: Fits, taker: dict[int, int], tried: set[int]) -> bool:
    """One augmenting path of Kuhn's algorithm: where no record is free, one may move to another slot that it fits."""
    for position in sorted(range(len(pool)), key=taker.__contains__):
        if position in tried or not fits(slot, pool[position]):
            continue
        tried.add(position)
        if position not in taker or _assign(taker[position], pool, fits, taker, tried):
            taker[position] = slot
            return True
    return False


def _share_out(
    slots: Sequence[int], requests: Sequence[Request], pool: Sequence[ResourceRecord], fits: Fits
) -> dict[int, ResourceRecord] | None:
    """A computer for each slot, none beyond its processors and memory: the hungriest first, by trial."""
    order = sorted(range(len(slots)), key=lambda i: (-requests[i].cores, -requests[i].memory_bytes, i))
    free = {record.name: (record.cores, record.memory_bytes) for record in pool if record.kind is Kind.COMPUTE}
    left = itertools.count()

    def fill(depth: int) -> dict[int, ResourceRecord] | None:
        if depth == len(order):
            return {}
        request, slot = requests[order[depth]], slots[order[depth]]
        for record in pool:
            if not fits(slot, record) or next(left) > MAX_COMBINATIONS:
                continue
            cores, memory_bytes = free[record.name]
            if cores < request.cores or memory_bytes < request.memory_bytes:
                continue
            free[record.name] = (cores - request.cores, memory_bytes - request.memory_bytes)
            if (rest := fill(depth + 1)) is not None:
                return {slot: record, **rest}
            free[record.name] = (cores, memory_bytes)
        return None

    return fill(0)


def _explain(requests: Sequence[Request], records: Sequence[ResourceRecord]) -> str:
    alone = [_search([request], records) is not None for request in requests]
    missing = [request for request, possible in zip(requests, alone, strict=True) if not possible]
    return explain(requests, missing or requests, records, together=not missing, relief=_relief(requests, records))


def _relief(requests: Sequence[Request], records: Sequence[ResourceRecord]) -> list[ResourceRecord]:
    """The resources each of which, were it free alone, would make the whole job possible."""
    found = []
    for number, record in enumerate(records):
        if record.health is Health.READY or not any(request.admits(record) for request in requests):
            continue
        freed = msgspec.structs.replace(record, health=Health.READY)
        if _search(requests, [*records[:number], freed, *records[number + 1 :]]) is not None:
            found.append(record)
    return sorted(found, key=lambda record: record.name)
