from __future__ import annotations

import random
from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import PlacementError
from hal.placement import Placement, place
from hal.resource import Health, Kind, ResourceRecord, ResourceRequest

GB = 1_000_000_000


def robot(name: str, model: str = "panda", health: Health = Health.READY, **labels: str) -> ResourceRecord:
    return ResourceRecord(kind=Kind.ROBOT, name=name, model=model, node="desk", health=health, labels=labels)


def gpu(name: str, gigabytes: int) -> ResourceRecord:
    return ResourceRecord(kind=Kind.GPU, name=name, model="gpu", node="desk", memory_bytes=gigabytes * GB)


def computer(name: str, cores: int, **labels: str) -> ResourceRecord:
    return ResourceRecord(kind=Kind.COMPUTE, name=name, model="x86_64", node=name, cores=cores, labels=labels)


def names(placement: Placement) -> list[list[str]]:
    return [[record.name for record in row] for row in placement.assigned]


def test_job_gets_robots_and_smallest_sufficient_gpu() -> None:
    records = [gpu("big", 80), gpu("fits", 24), gpu("small", 8), robot("b"), robot("a"), robot("u", "ur5e")]
    wanted = [
        ResourceRequest(kind=Kind.ROBOT, model="panda", count=2),
        ResourceRequest(kind=Kind.GPU, memory_bytes=24 * GB),
    ]
    assert names(place(wanted, records)) == [["a", "b"], ["fits"]]


def test_flexible_request_leaves_resource_to_specific_request() -> None:
    wanted = [ResourceRequest(kind=Kind.ROBOT), ResourceRequest(kind=Kind.ROBOT, model="panda")]
    assert names(place(wanted, [robot("a"), robot("z", "ur5e")])) == [["z"], ["a"]]


def test_capabilities_and_labels_are_required() -> None:
    seeing = msgspec.structs.replace(robot("b", site="lab"), capabilities=("camera:front",))
    wanted = [ResourceRequest(kind=Kind.ROBOT, capabilities=("camera:front",), labels={"site": "lab"})]
    assert names(place(wanted, [robot("a", site="lab"), seeing])) == [["b"]]


def test_unmet_request_gets_nothing() -> None:
    records = [robot("a"), robot("b", health=Health.LEASED), robot("c", health=Health.LOST)]
    with pytest.raises(PlacementError, match="Only one is free, a"):
        place([ResourceRequest(kind=Kind.ROBOT, model="panda", count=2)], records)


def test_colocated_requests_share_computer_or_site() -> None:
    records = [
        computer("rack", 8, site="cloud"),
        computer("desk", 16, site="lab"),
        computer("shelf", 16, site="hall"),
        msgspec.structs.replace(gpu("desk/gpu", 24), node="desk", labels={"site": "lab"}),
        msgspec.structs.replace(gpu("rack/gpu", 16), node="rack", labels={"site": "cloud"}),
        msgspec.structs.replace(robot("a"), node="cart", labels={"site": "lab"}),
    ]
    wanted = [
        ResourceRequest(kind=Kind.COMPUTE, cores=4, colocate="store"),
        ResourceRequest(kind=Kind.COMPUTE, cores=8, colocate="store"),
        ResourceRequest(kind=Kind.ROBOT, colocate="site", colocate_by="site"),
        ResourceRequest(kind=Kind.GPU, colocate="site", colocate_by="site"),
    ]
    assert names(place(wanted, records)) == [["desk"], ["desk"], ["a"], ["desk/gpu"]]


def test_computer_is_shared_within_its_capacity() -> None:
    records = [computer("big", 8), computer("little", 4)]
    wanted = [ResourceRequest(kind=Kind.COMPUTE, cores=4, count=2), ResourceRequest(kind=Kind.COMPUTE, cores=4)]
    assert sorted(sum(names(place(wanted, records)), [])) == ["big", "big", "little"]
    with pytest.raises(PlacementError, match="not enough for all"):
        place([*wanted, ResourceRequest(kind=Kind.COMPUTE, cores=4)], records)


def test_empty_request_gets_nothing() -> None:
    assert place([], [robot("a")]) == Placement(())


fleet = st.lists(st.tuples(st.sampled_from("pu"), st.sampled_from("xy"), st.sampled_from([*Health])), max_size=5)
jobs = st.lists(st.tuples(st.sampled_from(["", "p", "u"]), st.sampled_from(["", "x"])), max_size=4)


@given(fleet, jobs, st.integers())
def test_placement_is_complete_and_independent_of_order(
    fleet: list[tuple[str, str, Health]], jobs: list[tuple[str, str]], seed: int
) -> None:
    records = [robot(f"r{i}", model, health, site=site) for i, (model, site, health) in enumerate(fleet)]
    wanted = [ResourceRequest(kind=Kind.ROBOT, model=m, labels={"site": s} if s else {}) for m, s in jobs]
    ready = [record for record in records if record.health is Health.READY]
    possible = any(
        all(request.matches(record) for request, record in zip(wanted, chosen, strict=True))
        for chosen in permutations(ready, len(wanted))
    )
    try:
        placement = place(wanted, records)
    except PlacementError:
        assert not possible
        return
    flat = [record for row in placement.assigned for record in row]
    assert possible and len({record.name for record in flat}) == len(wanted)
    assert all(q.matches(r) and r.health is Health.READY for q, r in zip(wanted, flat, strict=True))
    random.Random(seed).shuffle(records)
    assert place(wanted, records) == placement
