"""Placement: the resources that a job gets or lacks, as a table with a row for each request.

A job gets all of its requests or nothing, and the result is the same for the same records.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from hal.errors import PlacementError
from hal.resource import Health, Kind, ResourceRecord, ResourceRequest

MAX_LISTED = 6
MAX_COMBINATIONS = 10_000
"""Of places for colocated requests: beyond it the search ends without a placement. A fleet of a hundred nodes and a job
with two groups stay within it."""
MAX_MOVES = 100
"""Of shares between computers: beyond it the search with these places ends."""

Assigned = tuple[tuple[ResourceRecord, ...], ...]
"""For each request, in its order, the records that it gets."""


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a job.

    Attributes:
        asked: the request, e.g. ``2 robot, model panda``.
        gets: the names of its resources; empty if the job cannot be placed.
        node: the computers of these resources.
        there: the resources that meet it, each with its state; if there are none, those of its kind, with the
            criterion that they miss.
        missing: why the request cannot be met; empty if it can.
    """

    asked: str
    gets: tuple[str, ...] = ()
    node: str = ""
    there: tuple[str, ...] = ()
    missing: str = ""


class PlacementPlan(msgspec.Struct, frozen=True):
    """Whether a job can be placed now.

    Attributes:
        rows: one for each request.
        assigned: None if the requests cannot all be met.
    """

    rows: tuple[PlanRow, ...]
    assigned: Assigned | None

    def require(self) -> Assigned:
        """Raises PlacementError with the rows that cannot be met."""
        if self.assigned is None:
            raise PlacementError(self.reason)
        return self.assigned

    @property
    def reason(self) -> str:
        """The rows that cannot be met, in one line; empty if the job can be placed."""
        lacking = [row for row in self.rows if row.missing]
        texts = [f"{row.asked}: {row.missing} ({'; '.join(_shortened(row.there)) or 'none there'})" for row in lacking]
        return " | ".join(texts)


def plan(requests: Sequence[ResourceRequest], records: Sequence[ResourceRecord]) -> PlacementPlan:
    """Finds ready records for all `requests`, if possible. Only computers serve several requests.

    Among the free records that fit, it prefers the least memory, then the first name.
    """
    assigned = _find_placement(requests, records)
    if assigned is not None:
        rows = [_met_row(request, given, records) for request, given in zip(requests, assigned, strict=True)]
        return PlacementPlan(tuple(rows), assigned)
    lacks = [_lack(request, records) for request in requests]
    if not any(lacks):
        lacks = ["not in one place with the others" if r.colocate else "not together with the others" for r in requests]
    rows = [
        PlanRow(asked=request.describe(), there=_states(request, records), missing=lack)
        for request, lack in zip(requests, lacks, strict=True)
    ]
    return PlacementPlan(tuple(rows), None)


def _met_row(request: ResourceRequest, given: Sequence[ResourceRecord], records: Sequence[ResourceRecord]) -> PlanRow:
    return PlanRow(
        asked=request.describe(),
        gets=tuple(record.name for record in given),
        node=", ".join(sorted({record.node for record in given})),
        there=_states(request, records),
    )


def _lack(request: ResourceRequest, records: Sequence[ResourceRecord]) -> str:
    """Why the request alone cannot be met; empty if it can."""
    if _find_placement([request], records) is not None:
        return ""
    free = sum(request.matches(record) and record.health is Health.READY for record in records)
    if free >= request.count:
        return "not in one place" if request.colocate else "too small"
    return f"{request.count - free} missing" if request.count > 1 else "missing"


def _states(request: ResourceRequest, records: Sequence[ResourceRecord]) -> tuple[str, ...]:
    by_name = sorted(records, key=lambda record: record.name)
    place = " on {}" if request.colocate else ""
    fitting = [
        f"{r.name}{place.format(request.location_of(r))} {describe_state(r)}" for r in by_name if request.matches(r)
    ]
    others = [f"{r.name} has {request.mismatch(r)}" for r in by_name if r.kind is request.kind and not request.name]
    return tuple(fitting or others)


def describe_state(record: ResourceRecord) -> str:
    """E.g. ``leased by run demo``, ``quarantined by ana: the gripper sticks`` or ``lost since 2026-11-21 14:05``."""
    if record.health is Health.READY:
        return "free"
    since = f" since {format_time(record.seen_unix_s)}" if record.health is Health.LOST and record.seen_unix_s else ""
    why = record.note or (f"({record.trouble})" if record.trouble else "")
    return f"{record.health}{since}{f' {why}' if why else ''}"


def format_time(unix_s: float) -> str:
    """A time by this computer's clock and time zone, e.g. ``2026-11-21 14:05``."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def format_list(parts: Sequence[str], last: str = "and") -> str:
    """E.g. ``a, b and c``; a long list is shortened."""
    shown = _shortened(parts)
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} {last} {shown[-1]}"


def _shortened(parts: Sequence[str]) -> list[str]:
    return [*parts[:MAX_LISTED], f"{len(parts) - MAX_LISTED} more"] if len(parts) > MAX_LISTED + 1 else list(parts)


# The search


def _find_placement(requests: Sequence[ResourceRequest], records: Sequence[ResourceRecord]) -> Assigned | None:
    pool = sorted((record for record in records if record.health is Health.READY), key=_preference)
    groups = sorted({(request.colocate, request.colocate_by) for request in requests if request.colocate})
    places = [_candidate_places(group, requests, pool) for group in groups]
    for chosen in itertools.islice(itertools.product(*places), MAX_COMBINATIONS):
        where = {group: place for (group, _), place in zip(groups, chosen, strict=True)}
        if (assigned := _match_slots(requests, pool, where)) is not None:
            return assigned
    return None


def _preference(record: ResourceRecord) -> tuple[int, str]:
    return record.memory_bytes, record.name


def _candidate_places(
    group: tuple[str, str], requests: Sequence[ResourceRequest], pool: Sequence[ResourceRecord]
) -> list[str]:
    """The places in which every request of the group finds a record, by name."""
    members = [request for request in requests if (request.colocate, request.colocate_by) == group]
    each = [{member.location_of(record) for record in pool if member.matches(record)} for member in members]
    return sorted(set.intersection(*each))


SlotFits = Callable[[int, ResourceRecord], bool]


def _match_slots(
    requests: Sequence[ResourceRequest], pool: Sequence[ResourceRecord], where: Mapping[str, str]
) -> Assigned | None:
    """With the places chosen, whole resources and shares of computers are independent of each other."""
    slots = [index for index, request in enumerate(requests) for _ in range(request.count)]

    def fits(slot: int, record: ResourceRecord) -> bool:
        request = requests[slots[slot]]
        is_near = not request.colocate or request.location_of(record) == where[request.colocate]
        return is_near and request.matches(record)

    taker: dict[int, int] = {}  # position in the pool -> slot
    whole = [slot for slot, index in enumerate(slots) if requests[index].kind is not Kind.COMPUTE]
    if not all(_assign_slot(slot, pool, fits, taker, set()) for slot in whole):
        return None
    shared = {slot: requests[index] for slot, index in enumerate(slots) if requests[index].kind is Kind.COMPUTE}
    shares = _assign_shares(shared, pool, fits)
    if shares is None:
        return None
    chosen = {slot: pool[position] for position, slot in taker.items()} | shares
    rows = ((chosen[slot] for slot, owner in enumerate(slots) if owner == index) for index in range(len(requests)))
    return tuple(tuple(sorted(row, key=_preference)) for row in rows)


def _assign_slot(
    slot: int, pool: Sequence[ResourceRecord], fits: SlotFits, taker: dict[int, int], tried: set[int]
) -> bool:
    """One augmenting path of Kuhn's algorithm: a record in use may move to another slot that it fits."""
    for position in sorted(range(len(pool)), key=taker.__contains__):
        if position in tried or not fits(slot, pool[position]):
            continue
        tried.add(position)
        if position not in taker or _assign_slot(taker[position], pool, fits, taker, tried):
            taker[position] = slot
            return True
    return False


def _assign_shares(
    requests: Mapping[int, ResourceRequest], pool: Sequence[ResourceRecord], fits: SlotFits
) -> dict[int, ResourceRecord] | None:
    """A computer for each slot, within its processors and memory: the largest request gets the first that has room.

    A request for which there is no room moves the ones before it, `MAX_MOVES` times.
    """
    order = sorted(requests, key=lambda slot: (-requests[slot].cores, -requests[slot].memory_bytes))
    free = {record.name: (record.cores, record.memory_bytes) for record in pool}
    choices: list[Iterator[ResourceRecord]] = []
    chosen: list[ResourceRecord] = []
    moves = 0
    while len(chosen) < len(order):
        request = requests[order[len(chosen)]]
        if len(choices) == len(chosen):
            choices.append(iter(pool))
        for record in choices[-1]:
            cores, memory_bytes = free[record.name]
            has_room = cores >= request.cores and memory_bytes >= request.memory_bytes
            if has_room and fits(order[len(chosen)], record):
                free[record.name] = (cores - request.cores, memory_bytes - request.memory_bytes)
                chosen.append(record)
                break
        else:
            choices.pop()
            moves += 1
            if not chosen or moves > MAX_MOVES:
                return None
            record = chosen.pop()
            request = requests[order[len(chosen)]]
            cores, memory_bytes = free[record.name]
            free[record.name] = (cores + request.cores, memory_bytes + request.memory_bytes)
    return dict(zip(order, chosen, strict=True))
