"""Placement: the resources that a job gets or lacks, as a table with a row for each request.

A job gets all of its requests or nothing, and the result is the same for the same records.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from hal.errors import PlacementError
from hal.resource import Health, Kind, ResourceRecord, ResourceRequest

MAX_LISTED = 6
MAX_TRIES = 10_000
"""Of a record for a slot: beyond it the search ends without a placement. A fleet of a hundred nodes and a job with two
groups stay within it."""
NOTHING = (-1, -1)  # that is left of a record which one request gets as a whole: less than any request needs

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
    ready = (record for record in records if record.health is Health.READY)
    pool = sorted(ready, key=lambda record: (record.memory_bytes, record.name))
    search = _Search(requests, pool)
    if (chosen := search.fill((), {}, {})) is None:
        return None
    by_slot = sorted(zip(search.slots, chosen, strict=True))
    return tuple(tuple(pool[position] for slot, position in by_slot if slot == index) for index in range(len(requests)))


class _Search:
    """A backtracking search: the slots with the fewest candidates first, and the slots of one place together.

    Attributes:
        slots: the index of the request of each slot; a request has `count` slots.
    """

    def __init__(self, requests: Sequence[ResourceRequest], pool: Sequence[ResourceRecord]) -> None:
        self._requests, self._pool, self._tries = requests, pool, 0
        self._fitting = [[n for n, record in enumerate(pool) if request.matches(record)] for request in requests]
        fewest: dict[str, int] = {}
        for request, fitting in zip(requests, self._fitting, strict=True):
            fewest[request.colocate] = min(len(fitting), fewest.get(request.colocate, len(fitting)))

        def urgency(index: int) -> tuple[int, str, int, int, int]:
            request, candidates = requests[index], len(self._fitting[index])
            least = fewest[request.colocate] if request.colocate else candidates
            return least, request.colocate, candidates, -request.cores, -request.memory_bytes

        order = sorted(range(len(requests)), key=urgency)
        self.slots = tuple(index for index in order for _ in range(requests[index].count))

    def fill(
        self, chosen: tuple[int, ...], left: Mapping[int, tuple[int, int]], where: Mapping[str, str]
    ) -> tuple[int, ...] | None:
        """The position in the pool for each slot, `chosen` for the first ones; None without one in `MAX_TRIES`.

        Args:
            left: processors and bytes that are left of the chosen records, by position.
            where: the places of the groups so far.
        """
        if len(chosen) == len(self.slots):
            return chosen
        index = self.slots[len(chosen)]
        request = self._requests[index]
        is_repeated = bool(chosen) and self.slots[len(chosen) - 1] == index  # then any order of its records is the same
        for position in self._fitting[index]:
            record = self._pool[position]
            cores, memory_bytes = left.get(position, (record.cores, record.memory_bytes))
            place = request.location_of(record) if request.colocate else ""
            has_room = cores >= request.cores and memory_bytes >= request.memory_bytes
            if not has_room or where.get(request.colocate, place) != place or (is_repeated and position < chosen[-1]):
                continue
            self._tries += 1
            if self._tries > MAX_TRIES:
                return None
            is_shared = request.kind is Kind.COMPUTE
            rest = (cores - request.cores, memory_bytes - request.memory_bytes) if is_shared else NOTHING
            found = self.fill((*chosen, position), {**left, position: rest}, {**where, request.colocate: place})
            if found is not None:
                return found
        return None
