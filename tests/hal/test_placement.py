from __future__ import annotations

import random
from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import PlacementError
from hal.placement import Placement, Request, place
from hal.resource import Health, Kind, ResourceRecord

GB = 1_000_000_000


def robot(name: str, model: str = "panda", health: Health = Health.READY, **labels: str) -> ResourceRecord:
    return ResourceRecord(kind=Kind.ROBOT, name=name, model=model, node="desk", health=health, labels=labels)


def gpu(name: str, gigabytes: int) -> ResourceRecord:
    return ResourceRecord(kind=Kind.GPU, name=name, model="gpu", node="desk", memory_bytes=gigabytes * GB)


def names(placement: Placement) -> list[list[str]]:
    return [[record.name for record in row] for row in placement.assigned]


def test_a_job_gets_two_robots_and_the_smallest_gpu_that_suffices() -> None:
    records = [gpu("big", 80), gpu("fits", 24), gpu("small", 8), robot("b"), robot("a"), robot("u", "ur5e")]
    wanted = [Request(kind=Kind.ROBOT, model="panda", count=2), Request(kind=Kind.GPU, memory_bytes=24 * GB)]
    assert names(place(wanted, records)) == [["a", "b"], ["fits"]]


def test_a_modest_request_does_not_take_what_only_it_could_spare() -> None:
    wanted = [Request(kind=Kind.ROBOT), Request(kind=Kind.ROBOT, model="panda")]
    assert names(place(wanted, [robot("a"), robot("z", "ur5e")])) == [["z"], ["a"]]


def test_capabilities_and_labels_are_demanded() -> None:
    seeing = msgspec.structs.replace(robot("b", site="lab"), capabilities=("camera:front",))
    wanted = [Request(kind=Kind.ROBOT, capabilities=("camera:front",), labels={"site": "lab"})]
    assert names(place(wanted, [robot("a", site="lab"), seeing])) == [["b"]]


def test_what_cannot_be_met_is_explained_and_nothing_is_given() -> None:
    records = [robot("a"), robot("b", health=Health.LEASED), robot("c", health=Health.LOST)]
    wanted = [Request(kind=Kind.ROBOT, model="panda", count=2), Request(kind=Kind.GPU, memory_bytes=24 * GB)]
    with pytest.raises(PlacementError) as refusal:
        place(wanted, records)
    assert str(refusal.value) == (
        "asked for 2 x robot panda and 1 x gpu with 24.0 GB; "
        "there is robot panda: a (ready), b (leased), c (lost); gpu with 24.0 GB: none; "
        "missing 1 x robot panda and 1 x gpu with 24.0 GB"
    )


def test_asking_for_nothing_gives_nothing() -> None:
    assert place([], [robot("a")]) == Placement(())


fleet = st.lists(st.tuples(st.sampled_from("pu"), st.sampled_from("xy"), st.sampled_from([*Health])), max_size=5)
jobs = st.lists(st.tuples(st.sampled_from(["", "p", "u"]), st.sampled_from(["", "x"])), max_size=4)


@given(fleet, jobs, st.integers())
def test_a_placement_is_found_whenever_there_is_one_and_in_any_order_the_same(
    fleet: list[tuple[str, str, Health]], jobs: list[tuple[str, str]], seed: int
) -> None:
    records = [robot(f"r{i}", model, health, site=site) for i, (model, site, health) in enumerate(fleet)]
    wanted = [Request(kind=Kind.ROBOT, model=m, labels={"site": s} if s else {}) for m, s in jobs]
    ready = [record for record in records if record.health is Health.READY]
    possible = any(
        all(request.admits(record) for request, record in zip(wanted, chosen, strict=True))
        for chosen in permutations(ready, len(wanted))
    )
    try:
        placement = place(wanted, records)
    except PlacementError:
        assert not possible
        return
    flat = [record for row in placement.assigned for record in row]
    assert possible and len({record.name for record in flat}) == len(wanted)
    assert all(q.admits(r) and r.health is Health.READY for q, r in zip(wanted, flat, strict=True))
    random.Random(seed).shuffle(records)
    assert place(wanted, records) == placement
