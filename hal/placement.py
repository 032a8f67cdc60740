"""Placement: the resources that a job gets, and the explanation if it cannot get them.

A job gets all of its requests or nothing, and the result is the same for the same records.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import msgspec

from hal.errors import PlacementError
from hal.resource import Health, Kind, ResourceRecord, ResourceRequest

_GB = 1_000_000_000
_NOUNS = {Kind.ROBOT: "robot", Kind.GPU: "GPU", Kind.COMPUTE: "computer", Kind.BUS: "motor bus"}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
MAX_LISTED = 6
MAX_COMBINATIONS = 10_000
"""Of places for colocated requests, and of shares of processors: beyond it the search ends without a placement. A fleet
of a hundred nodes and a job with two groups stay within it."""


@dataclass(frozen=True)
class Placement:
    """For each request, in its order, the records that it gets."""

    assigned: tuple[tuple[ResourceRecord, ...], ...]


def place(requests: Sequence[ResourceRequest], records: Sequence[ResourceRecord]) -> Placement:
    """Finds ready records for all `requests`, if possible. Only computers serve several requests.

    Among the free records that fit, it prefers the least memory, then the first name.

    Raises:
        PlacementError: not all requests can be met together; the message explains why.
    """
    found = _find_placement(requests, records)
    if found is None:
        raise PlacementError(_explain_failure(requests, records))
    return found


def _find_placement(requests: Sequence[ResourceRequest], records: Sequence[ResourceRecord]) -> Placement | None:
    pool = sorted((record for record in records if record.health is Health.READY), key=_preference)
    groups = sorted({(request.colocate, request.colocate_by) for request in requests if request.colocate})
    places = [_candidate_places(group, requests, pool) for group in groups]
    for chosen in itertools.islice(itertools.product(*places), MAX_COMBINATIONS):
        where = {group: place for (group, _), place in zip(groups, chosen, strict=True)}
        if (placement := _match_slots(requests, pool, where)) is not None:
            return placement
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


def _match_slots(
    requests: Sequence[ResourceRequest], pool: Sequence[ResourceRecord], where: Mapping[str, str]
) -> Placement | None:
    """With the places chosen, whole resources and shares of computers are independent of each other."""
    slots = [index for index, request in enumerate(requests) for _ in range(request.count)]

    def fits(slot: int, record: ResourceRecord) -> bool:
        request = requests[slots[slot]]
        return request.matches(record) and (
            not request.colocate or request.location_of(record) == where[request.colocate]
        )

    whole = [slot for slot, index in enumerate(slots) if requests[index].kind is not Kind.COMPUTE]
    shared = [slot for slot, index in enumerate(slots) if requests[index].kind is Kind.COMPUTE]
    taker: dict[int, int] = {}  # position in the pool -> slot
    if not all(_assign_slot(slot, pool, fits, taker, set()) for slot in whole):
        return None
    shares = _assign_shares(shared, [requests[slots[slot]] for slot in shared], pool, fits)
    if shares is None:
        return None
    chosen = {slot: pool[position] for position, slot in taker.items()} | shares
    rows = ((chosen[slot] for slot, owner in enumerate(slots) if owner == index) for index in range(len(requests)))
    return Placement(tuple(tuple(sorted(row, key=_preference)) for row in rows))


SlotFits = Callable[[int, ResourceRecord], bool]


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
    slots: Sequence[int], requests: Sequence[ResourceRequest], pool: Sequence[ResourceRecord], fits: SlotFits
) -> dict[int, ResourceRecord] | None:
    """A computer for each slot, within its processors and memory: the largest request first, with backtracking."""
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


def _explain_failure(requests: Sequence[ResourceRequest], records: Sequence[ResourceRecord]) -> str:
    alone = [_find_placement([request], records) is not None for request in requests]
    missing = [request for request, possible in zip(requests, alone, strict=True) if not possible]
    return explain_failure_text(
        requests, missing or requests, records, together=not missing, relief=_blocking_records(requests, records)
    )


def _blocking_records(requests: Sequence[ResourceRequest], records: Sequence[ResourceRecord]) -> list[ResourceRecord]:
    """The resources each of which, if it alone were free, would make the whole job possible."""
    found = []
    for number, record in enumerate(records):
        if record.health is Health.READY or not any(request.matches(record) for request in requests):
            continue
        freed = msgspec.structs.replace(record, health=Health.READY)
        if _find_placement(requests, [*records[:number], freed, *records[number + 1 :]]) is not None:
            found.append(record)
    return sorted(found, key=lambda record: record.name)


def explain_failure_text(
    requests: Sequence[ResourceRequest],
    missing: Sequence[ResourceRequest],
    records: Sequence[ResourceRecord],
    *,
    together: bool,
    relief: Sequence[ResourceRecord],
) -> str:
    """A few sentences on the request, the resources, the lack and its remedies.

    Args:
        missing: the requests that cannot be met.
        together: each request could be met without the others.
        relief: the resources each of which would help if it were present and free.
    """
    sentences = [
        f"The job asks for {format_list([describe_request(request) for request in requests])}{_nearness(requests)}"
    ]
    if together:
        sentences.append(_not_together(requests, records))
    else:
        sentences += [_describe_lack(request, records) for request in missing]
    if relief:
        names = format_list([record.name for record in relief], "or")
        lost = all(record.health is Health.LOST for record in relief)
        sentences.append(f"It would fit if {names} were {'there' if lost else 'free'}")
    return " ".join(f"{sentence}{'' if sentence.endswith('?') else '.'}" for sentence in sentences)


def describe_request(request: ResourceRequest) -> str:
    """E.g. ``two robots of model panda at site lab`` or ``one GPU with at least 24 GB``."""
    if request.name:
        return f"the {_noun(request, 1)} {request.name}"
    return f"{_number(request.count)} {_describe_sort(request, request.count)}"


def describe_record(record: ResourceRecord) -> str:
    """E.g. ``panda-1 is driven by run demo``."""
    if record.health is Health.LEASED:
        verb = "driven" if record.kind is Kind.ROBOT else "used"
        return f"{record.name} is {verb} {record.note or 'by another job'}"
    words = {
        Health.READY: "is free",
        Health.LOST: f"has not been there since {format_time(seen)}"
        if (seen := record.seen_unix_s)
        else "is not there",
        Health.DRAINING: "is draining and is not given to another job",
        Health.QUARANTINED: "is quarantined",
    }[record.health]
    why = record.note or record.trouble
    return f"{record.name} {words}{f' ({why})' if why else ''}"


def format_time(unix_s: float) -> str:
    """A time by this computer's clock and time zone, e.g. ``2026-11-21 14:05``."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def format_list(parts: Sequence[str], last: str = "and") -> str:
    """E.g. ``a, b and c``; a long list is shortened."""
    shown = [*parts[:MAX_LISTED], f"{len(parts) - MAX_LISTED} more"] if len(parts) > MAX_LISTED + 1 else list(parts)
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} {last} {shown[-1]}"


def _describe_lack(request: ResourceRequest, records: Sequence[ResourceRecord]) -> str:
    fitting = [record for record in records if request.matches(record)]
    if not fitting:
        return _nothing_fits(request, records)
    free = [record for record in fitting if record.health is Health.READY]
    taken = [
        describe_record(record) for record in sorted(fitting, key=lambda r: r.name) if record.health is not Health.READY
    ]
    if request.name:
        return format_list(taken) if taken else f"{request.name} is there, but not near the rest"
    if len(fitting) < request.count and request.kind is not Kind.COMPUTE:  # several requests may share a computer
        text = _too_few(len(fitting), sorted(record.name for record in free), bool(taken))
    elif not free:
        text = f"{_number(len(fitting)).capitalize()} would do, but none is free"
    elif len(free) < request.count:
        names = format_list(sorted(record.name for record in free))
        text = f"Only {_number(len(free))} {_is_or_are(len(free))} free, {names}"
    else:
        text = f"There are enough, but not near each other: {_whereabouts(request, free)}"
    return f"{text}: {format_list(taken)}" if taken else text


def _too_few(count: int, free: Sequence[str], taken: bool) -> str:
    """There would be too few even if all were free."""
    text = f"There {_is_or_are(count)} only {_number(count)}"
    if not taken:
        return f"{text}, {format_list(free)}"
    if free:
        return f"{text}, of which only {format_list(free)} {_is_or_are(len(free))} free"
    return f"{text}, and {'it is not' if count == 1 else 'none is'} free"


def _nothing_fits(request: ResourceRequest, records: Sequence[ResourceRecord]) -> str:
    """Names the first criterion that no record meets, and the closest records."""
    closest = list(records)
    for number, fits in enumerate(request.criteria()):
        left = [record for record in closest if fits(record)]
        if not left:
            return _CAUSES[number](request, sorted(closest, key=lambda record: record.name))
        closest = left
    return f"There is no {_describe_sort(request, 1)}"


def _no_kind(request: ResourceRequest, _: Sequence[ResourceRecord]) -> str:
    return f"No {_noun(request, 1)} is known here"


def _no_name(request: ResourceRequest, closest: Sequence[ResourceRecord]) -> str:
    names = [record.name for record in closest]
    near = get_close_matches(request.name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there is {format_list(names)}"
    return f"There is no {_noun(request, 1)} called {request.name}; {hint}"


def _no_model(request: ResourceRequest, closest: Sequence[ResourceRecord]) -> str:
    models = format_list([f"{record.name} is a {record.model}" for record in closest])
    return f"There is no {_noun(request, 1)} of model {request.model}: {models}"


def _no_capability(request: ResourceRequest, closest: Sequence[ResourceRecord]) -> str:
    def lacks(record: ResourceRecord) -> str:
        lacking = [_capability(c) for c in request.capabilities if c not in record.capabilities]
        return f"{record.name} lacks {format_list(lacking)}"

    return f"None has all capabilities: {format_list([lacks(record) for record in closest])}"


def _no_label(request: ResourceRequest, closest: Sequence[ResourceRecord]) -> str:
    required = " and ".join(_label(name, value) for name, value in sorted(request.labels.items()))

    def has(record: ResourceRecord) -> str:
        facts = [_label(n, record.labels[n]) for n in sorted(request.labels) if n in record.labels]
        return f"{record.name} is {format_list(facts)}" if facts else f"{record.name} has no such label"

    return f"None is {required}: {format_list([has(record) for record in closest])}"


def _no_memory(request: ResourceRequest, closest: Sequence[ResourceRecord]) -> str:
    most = max(closest, key=lambda record: record.memory_bytes)
    if not most.memory_bytes and most.kind is Kind.GPU:
        return f"The memory of the {_noun(request, 2)} here is unknown: {format_list([r.name for r in closest])}"
    free = " free" if most.kind is Kind.COMPUTE and most.found_by == "ray" else ""
    return (
        f"The largest {_noun(request, 1)} here, {most.name} ({most.model}), has {_format_gb(most.memory_bytes)}{free}"
    )


def _no_cores(request: ResourceRequest, closest: Sequence[ResourceRecord]) -> str:
    most = max(closest, key=lambda record: record.cores)
    if not any(record.note for record in closest):
        return f"The largest computer here, {most.name}, has {most.cores} processors"
    used = [f"{record.name} has {record.cores} free ({record.note})" for record in closest if record.note]
    return f"No computer here has as many processors free: {format_list(used)}"


_CAUSES = (_no_kind, _no_name, _no_model, _no_capability, _no_label, _no_memory, _no_cores)
"""In the order of `ResourceRequest.criteria`."""


def _not_together(requests: Sequence[ResourceRequest], records: Sequence[ResourceRecord]) -> str:
    grouped = [request for request in requests if request.colocate]
    ready = [record for record in records if record.health is Health.READY]
    if grouped:
        places = [_spread(request, [record for record in ready if request.matches(record)]) for request in grouped]
        return f"Each of them is there, but not near each other ({'; '.join(places)})"
    return "Each of them is there alone, but there are not enough for all at the same time"


def _spread(request: ResourceRequest, matching: Sequence[ResourceRecord]) -> str:
    """E.g. ``GPUs: rack/gpu-0 on rack``; for a named resource, its place only."""
    places = _whereabouts(request, matching)
    return places if request.name else f"{_describe_sort(request, 2)}: {places}"


def _whereabouts(request: ResourceRequest, records: Sequence[ResourceRecord]) -> str:
    by_name = sorted(records, key=lambda record: record.name)
    return format_list([f"{record.name} on {request.location_of(record)}" for record in by_name])


def _nearness(requests: Sequence[ResourceRequest]) -> str:
    groups = {request.colocate: request.colocate_by for request in requests if request.colocate}
    words = {"node": "on one computer", "site": "at one site"}
    parts = []
    for group, by in groups.items():
        members = [_noun(request, request.count) for request in requests if request.colocate == group]
        parts.append(f", the {format_list(members)} {words[by]}")
    return "".join(parts)


def _describe_sort(request: ResourceRequest, count: int) -> str:
    """The request without its number."""
    words = [_noun(request, count)]
    if request.name:
        words.append(request.name)
    if request.model:
        words.append(f"of model {request.model}")
    have = [_capability(capability) for capability in request.capabilities]
    have += [f"at least {_format_gb(request.memory_bytes)}"] * bool(request.memory_bytes)
    have += [f"{request.cores} processor{'s' * (request.cores > 1)}"] * bool(request.cores)
    if have:
        words.append(f"with {format_list(have)}")
    words += [_label(name, value) for name, value in sorted(request.labels.items())]
    return " ".join(words)


def _noun(request: ResourceRequest, count: int) -> str:
    noun = _NOUNS.get(request.kind, request.kind.value)
    return noun if count == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"


def _capability(capability: str) -> str:
    sort, _, name = capability.partition(":")
    return f"a {name} {sort}" if name else capability


def _label(name: str, value: str) -> str:
    return f"at site {value}" if name == "site" else f"with {name}={value}"


def _number(count: int) -> str:
    return _NUMBERS[count] if count < len(_NUMBERS) else str(count)


def _is_or_are(count: int) -> str:
    return "is" if count == 1 else "are"


def _format_gb(size: int) -> str:
    gigabytes = size / _GB
    return f"{gigabytes:.3g} GB" if gigabytes < 1000 else f"{gigabytes:,.0f} GB"
