"""Why a job does not get what it asks for, in sentences that a colleague would say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from difflib import get_close_matches

from hal.request import Request
from hal.resource import Health, Kind, ResourceRecord

_GB = 1_000_000_000
_NOUNS = {Kind.ROBOT: "robot", Kind.GPU: "GPU", Kind.COMPUTE: "computer", Kind.BUS: "motor bus"}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
MAX_LISTED = 6


def explain(
    requests: Sequence[Request],
    missing: Sequence[Request],
    records: Sequence[ResourceRecord],
    *,
    together: bool,
    relief: Sequence[ResourceRecord],
) -> str:
    """A few sentences: what was asked, what there is, what is missing and what would help.

    Args:
        missing: the requests that cannot be met.
        together: each could be met if it were alone.
        relief: the resources each of which would help if it were there and free.
    """
    sentences = [f"The job asks for {listed([asked(request) for request in requests])}{_nearness(requests)}"]
    if together:
        sentences.append(_not_together(requests, records))
    else:
        sentences += [_lack(request, records) for request in missing]
    if relief:
        names = listed([record.name for record in relief], "or")
        lost = all(record.health is Health.LOST for record in relief)
        sentences.append(f"It would fit if {names} were {'there' if lost else 'free'}")
    return " ".join(f"{sentence}{'' if sentence.endswith('?') else '.'}" for sentence in sentences)


def asked(request: Request) -> str:
    """E.g. ``two robots of model panda at site lab`` or ``one GPU with at least 24 GB``."""
    if request.name:
        return f"the {_noun(request, 1)} {request.name}"
    return f"{_number(request.count)} {_sort(request, request.count)}"


def state(record: ResourceRecord) -> str:
    """E.g. ``panda-1 is driven by run demo``."""
    if record.health is Health.LEASED:
        verb = "driven" if record.kind is Kind.ROBOT else "used"
        return f"{record.name} is {verb} {record.note or 'by another job'}"
    words = {
        Health.READY: "is free",
        Health.LOST: f"has not been there since {when(seen)}" if (seen := record.seen_unix_s) else "is not there",
        Health.DRAINING: "is to be given back and goes to nobody else",
        Health.QUARANTINED: "is quarantined",
    }[record.health]
    why = record.note or record.trouble
    return f"{record.name} {words}{f' ({why})' if why else ''}"


def when(unix_s: float) -> str:
    """When that was, by this computer's clock and time zone, e.g. ``2026-11-21 14:05``."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def listed(parts: Sequence[str], last: str = "and") -> str:
    """E.g. ``a, b and c``; a long list is cut."""
    shown = [*parts[:MAX_LISTED], f"{len(parts) - MAX_LISTED} more"] if len(parts) > MAX_LISTED + 1 else list(parts)
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} {last} {shown[-1]}"


def _lack(request: Request, records: Sequence[ResourceRecord]) -> str:
    fitting = [record for record in records if request.admits(record)]
    if not fitting:
        return _nothing_fits(request, records)
    free = [record for record in fitting if record.health is Health.READY]
    taken = [state(record) for record in sorted(fitting, key=lambda r: r.name) if record.health is not Health.READY]
    if request.name:
        return listed(taken) if taken else f"{request.name} is there, but not near the rest"
    if len(fitting) < request.count and request.kind is not Kind.COMPUTE:  # of a computer, several may have parts
        there = _too_few(len(fitting), sorted(record.name for record in free), bool(taken))
    elif not free:
        there = f"{_number(len(fitting)).capitalize()} would do, but none is free"
    elif len(free) < request.count:
        names = listed(sorted(record.name for record in free))
        there = f"Only {_number(len(free))} {_is(len(free))} free, {names}"
    else:
        there = f"There are enough, but not near each other: {_whereabouts(request, free)}"
    return f"{there}: {listed(taken)}" if taken else there


def _too_few(there: int, free: Sequence[str], taken: bool) -> str:
    """Even if all of them were free."""
    text = f"There {_is(there)} only {_number(there)}"
    if not taken:
        return f"{text}, {listed(free)}"
    if free:
        return f"{text}, of which only {listed(free)} {_is(len(free))} free"
    return f"{text}, and {'it is not' if there == 1 else 'none is'} free"


def _nothing_fits(request: Request, records: Sequence[ResourceRecord]) -> str:
    """Names the first demand that nothing meets, and what comes closest."""
    closest = list(records)
    for number, fits in enumerate(request.demands()):
        left = [record for record in closest if fits(record)]
        if not left:
            return _CAUSES[number](request, sorted(closest, key=lambda record: record.name))
        closest = left
    return f"There is no {_sort(request, 1)}"


def _no_kind(request: Request, _: Sequence[ResourceRecord]) -> str:
    return f"No {_noun(request, 1)} is known here"


def _no_name(request: Request, there: Sequence[ResourceRecord]) -> str:
    names = [record.name for record in there]
    near = get_close_matches(request.name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there is {listed(names)}"
    return f"There is no {_noun(request, 1)} called {request.name}; {hint}"


def _no_model(request: Request, there: Sequence[ResourceRecord]) -> str:
    models = listed([f"{record.name} is a {record.model}" for record in there])
    return f"There is no {_noun(request, 1)} of model {request.model}: {models}"


def _no_capability(request: Request, there: Sequence[ResourceRecord]) -> str:
    def lacks(record: ResourceRecord) -> str:
        lacking = [_capability(c) for c in request.capabilities if c not in record.capabilities]
        return f"{record.name} lacks {listed(lacking)}"

    return f"None has all that is wanted: {listed([lacks(record) for record in there])}"


def _no_label(request: Request, there: Sequence[ResourceRecord]) -> str:
    wanted = " and ".join(_label(name, value) for name, value in sorted(request.labels.items()))

    def has(record: ResourceRecord) -> str:
        facts = [_label(n, record.labels[n]) for n in sorted(request.labels) if n in record.labels]
        return f"{record.name} is {listed(facts)}" if facts else f"{record.name} does not say"

    return f"None is {wanted}: {listed([has(record) for record in there])}"


def _no_memory(request: Request, there: Sequence[ResourceRecord]) -> str:
    most = max(there, key=lambda record: record.memory_bytes)
    if not most.memory_bytes and most.kind is Kind.GPU:
        return f"No {_noun(request, 1)} here says how much memory it has: {listed([record.name for record in there])}"
    free = " free" if most.kind is Kind.COMPUTE and most.found_by == "ray" else ""
    return f"The largest {_noun(request, 1)} here, {most.name} ({most.model}), has {_gb(most.memory_bytes)}{free}"


def _no_cores(request: Request, there: Sequence[ResourceRecord]) -> str:
    most = max(there, key=lambda record: record.cores)
    if not any(record.note for record in there):
        return f"The largest computer here, {most.name}, has {most.cores} processors"
    used = [f"{record.name} has {record.cores} free ({record.note})" for record in there if record.note]
    return f"No computer here has as many processors free: {listed(used)}"


_CAUSES = (_no_kind, _no_name, _no_model, _no_capability, _no_label, _no_memory, _no_cores)
"""In the order of `Request.demands`."""


def _not_together(requests: Sequence[Request], records: Sequence[ResourceRecord]) -> str:
    near = [request for request in requests if request.near]
    ready = [record for record in records if record.health is Health.READY]
    if near:
        where = [_spread(request, [record for record in ready if request.admits(record)]) for request in near]
        return f"Each of them is there, but not near each other ({'; '.join(where)})"
    return "Each of them is there alone, but there are not enough for all at the same time"


def _spread(request: Request, there: Sequence[ResourceRecord]) -> str:
    """E.g. ``GPUs: rack/gpu-0 on rack``; of one that is named, its place."""
    places = _whereabouts(request, there)
    return places if request.name else f"{_sort(request, 2)}: {places}"


def _whereabouts(request: Request, there: Sequence[ResourceRecord]) -> str:
    return listed([f"{record.name} on {request.place_of(record)}" for record in sorted(there, key=lambda r: r.name)])


def _nearness(requests: Sequence[Request]) -> str:
    groups = {request.near: request.near_by for request in requests if request.near}
    words = {"node": "on one computer", "site": "at one site"}
    parts = []
    for near, by in groups.items():
        members = [_noun(request, request.count) for request in requests if request.near == near]
        parts.append(f", the {listed(members)} {words[by]}")
    return "".join(parts)


def _sort(request: Request, count: int) -> str:
    """The request without its number."""
    words = [_noun(request, count)]
    if request.name:
        words.append(request.name)
    if request.model:
        words.append(f"of model {request.model}")
    have = [_capability(capability) for capability in request.capabilities]
    have += [f"at least {_gb(request.memory_bytes)}"] * bool(request.memory_bytes)
    have += [f"{request.cores} processor{'s' * (request.cores > 1)}"] * bool(request.cores)
    if have:
        words.append(f"with {listed(have)}")
    words += [_label(name, value) for name, value in sorted(request.labels.items())]
    return " ".join(words)


def _noun(request: Request, count: int) -> str:
    noun = _NOUNS.get(request.kind, request.kind.value)
    return noun if count == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"


def _capability(capability: str) -> str:
    sort, _, name = capability.partition(":")
    return f"a {name} {sort}" if name else capability


def _label(name: str, value: str) -> str:
    return f"at site {value}" if name == "site" else f"with {name}={value}"


def _number(count: int) -> str:
    return _NUMBERS[count] if count < len(_NUMBERS) else str(count)


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _gb(size: int) -> str:
    gigabytes = size / _GB
    return f"{gigabytes:.3g} GB" if gigabytes < 1000 else f"{gigabytes:,.0f} GB"
