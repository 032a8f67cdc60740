from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import PlacementError
from hal.placement import Assigned, plan
from hal.resource import Health, Kind, ResourceRecord, ResourceRequest

GB = 1_000_000_000


def robot(name: str, model: str = "panda", health: Health = Health.READY, **labels: str) -> ResourceRecord:
    return ResourceRecord(kind=Kind.ROBOT, name=name, model=model, node="desk", health=health, labels=labels)


def gpu(name: str, gigabytes: int) -> ResourceRecord:
    return ResourceRecord(kind=Kind.GPU, name=name, model="gpu", node="desk", memory_bytes=gigabytes * GB)


def computer(name: str, cores: int, **labels: str) -> ResourceRecord:
    return ResourceRecord(kind=Kind.COMPUTE, name=name, model="x86_64", node=name, cores=cores, labels=labels)


def place(requests: Sequence[ResourceRequest], records: Sequence[ResourceRecord]) -> Assigned:
    return plan(requests, records).require()


def names(assigned: Assigned) -> list[list[str]]:
    return [[record.name for record in row] for row in assigned]


def test_job_gets_robots_and_smallest_sufficient_gpu() -> None:
    records = [gpu("big", 80), gpu("fits", 24), gpu("small", 8), robot("b"), robot("a"), robot("u", "ur5e")]
    wanted = [
        ResourceRequest(kind=Kind.ROBOT, model="panda", count=2),
        ResourceRequest(kind=Kind.GPU, memory_bytes=24 * GB),
    ]
    assert names(place(wanted, records)) == [["a", "b"], ["fits"]]


def test_capabilities_and_labels_are_required() -> None:
    seeing = msgspec.structs.replace(robot("b", site="lab"), capabilities=("camera:front",))
    wanted = [ResourceRequest(kind=Kind.ROBOT, capabilities=("camera:front",), labels={"site": "lab"})]
    assert names(place(wanted, [robot("a", site="lab"), seeing])) == [["b"]]


def test_unmet_request_gets_nothing() -> None:
    records = [robot("a"), robot("b", health=Health.LEASED), robot("c", health=Health.LOST)]
    with pytest.raises(PlacementError, match=r"2 robot, model panda: 1 missing \(a free; b leased; c lost\)"):
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
    with pytest.raises(PlacementError, match="not together with the others"):
        place([*wanted, ResourceRequest(kind=Kind.COMPUTE, cores=4)], records)


@pytest.mark.parametrize(
    ("requests", "computers", "given"),
    [
        ([{"cores": 3}, {"cores": 2}, {"cores": 2}], [("a", 4), ("b", 3)], [["b"], ["a"], ["a"]]),
        ([{"cores": 8}, {"cores": 4, "labels": {"site": "lab"}}], [("a", 8, "lab"), ("b", 8)], [["b"], ["a"]]),
    ],
)
def test_processors_are_divided_in_the_only_possible_way(
    requests: list[dict[str, Any]], computers: list[tuple[str, int, str]], given: list[list[str]]
) -> None:
    records = [computer(name, cores, **({"site": site[0]} if site else {})) for name, cores, *site in computers]
    assert names(place([ResourceRequest(kind=Kind.COMPUTE, **each) for each in requests], records)) == given


def test_search_for_impossible_shares_ends() -> None:
    records = [computer(f"c{number:03}", 5) for number in range(100)]
    wanted = [ResourceRequest(kind=Kind.COMPUTE, cores=3, count=101)]
    with pytest.raises(PlacementError, match="1 missing"):
        place(wanted, records)


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
        assigned = place(wanted, records)
    except PlacementError:
        assert not possible
        return
    flat = [record for row in assigned for record in row]
    assert possible and len({record.name for record in flat}) == len(wanted)
    assert all(q.matches(r) and r.health is Health.READY for q, r in zip(wanted, flat, strict=True))
    random.Random(seed).shuffle(records)
    assert place(wanted, records) == assigned


FLEET = [
    robot("panda-0", site="lab"),
    msgspec.structs.replace(robot("panda-1", health=Health.LEASED), note="by run demo"),
    msgspec.structs.replace(robot("panda-2", health=Health.QUARANTINED), note="by ana: the gripper sticks"),
    msgspec.structs.replace(robot("ur-0", "ur5e", Health.LOST), trouble="nothing answers at 10.0.0.5:30004"),
    gpu("desk/gpu-0", 16),
    computer("desk/cpu", 4),
]
PANDA = ResourceRequest(kind=Kind.ROBOT, model="panda")
PAIR = {"colocate": "cell"}


@pytest.mark.parametrize(
    ("request_", "asked", "there", "missing"),
    [
        (PANDA, "robot, model panda", "panda-0 free", ""),
        (msgspec.structs.replace(PANDA, count=2), "2 robot, model panda", "panda-1 leased by run demo", "1 missing"),
        (
            ResourceRequest(kind=Kind.ROBOT, name="panda-2"),
            "robot panda-2",
            "panda-2 quarantined by ana: the gripper sticks",
            "missing",
        ),
        (
            ResourceRequest(kind=Kind.ROBOT, name="ur-0"),
            "robot ur-0",
            "ur-0 lost (nothing answers at 10.0.0.5:30004)",
            "missing",
        ),
        (ResourceRequest(kind=Kind.ROBOT, name="panda0"), "robot panda0", "", "missing"),
        (ResourceRequest(kind=Kind.ROBOT, model="so101"), "robot, model so101", "ur-0 has model ur5e", "missing"),
        (ResourceRequest(kind=Kind.GPU, memory_bytes=24 * GB), "gpu, 24 GB", "desk/gpu-0 has 16 GB", "missing"),
        (ResourceRequest(kind=Kind.COMPUTE, cores=8), "compute, 8 processors", "desk/cpu has 4 processors", "missing"),
        (
            ResourceRequest(kind=Kind.ROBOT, labels={"site": "hall"}),
            "robot, site=hall",
            "panda-0 has site=lab",
            "missing",
        ),
        (
            ResourceRequest(kind=Kind.ROBOT, capabilities=("camera:front",)),
            "robot, camera:front",
            "panda-0 has no camera:front",
            "missing",
        ),
    ],
)
def test_row_has_request_resources_and_lack(request_: ResourceRequest, asked: str, there: str, missing: str) -> None:
    (row,) = plan([request_], FLEET).rows
    assert (row.asked, row.missing) == (asked, missing)
    assert there in row.there if there else row.there == ()
    assert row.gets == (() if missing else ("panda-0",))


def test_requests_that_cannot_be_met_together_are_all_named() -> None:
    far = msgspec.structs.replace(gpu("rack/gpu-0", 16), node="rack")
    near = plan([ResourceRequest(kind=Kind.ROBOT, **PAIR), ResourceRequest(kind=Kind.GPU, **PAIR)], [robot("a"), far])
    assert near.assigned is None
    assert [(row.there, row.missing) for row in near.rows] == [
        (("a on desk free",), "not in one place with the others"),
        (("rack/gpu-0 on rack free",), "not in one place with the others"),
    ]
    both = plan([PANDA, ResourceRequest(kind=Kind.ROBOT)], [robot("a")])
    assert {row.missing for row in both.rows} == {"not together with the others"}


def test_reason_names_only_what_is_missing() -> None:
    wanted = [PANDA, ResourceRequest(kind=Kind.GPU, memory_bytes=24 * GB)]
    assert plan(wanted, FLEET).reason == "gpu, 24 GB: missing (desk/gpu-0 has 16 GB)"
    assert plan(wanted[:1], FLEET).reason == ""
