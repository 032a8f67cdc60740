"""Records and bundles of a Ray cluster, from the data that Ray returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from hal.errors import PlacementError
from hal.placement import Assigned, plan
from hal.ray_nodes import cluster_records, make_bundles, ray_labels, ray_resources
from hal.resource import Health, Kind, ResourceRecord, ResourceRequest

GB = 1_000_000_000
TRAINING = ResourceRequest(kind=Kind.GPU, memory_bytes=24 * GB)
ARM = ResourceRequest(kind=Kind.ROBOT, name="panda-0")


def gpu(number: int, model: str = "NVIDIA L4", gigabytes: int = 24) -> ResourceRecord:
    """The record on its own computer."""
    name, labels = f"its-own-name/gpu-{number}", {"uuid": f"GPU-{number}-{gigabytes}"}
    return ResourceRecord(
        kind=Kind.GPU, name=name, model=model, node="its-own-name", labels=labels, memory_bytes=gigabytes * GB
    )


def node(
    key: str, host: str, address: str, *gpus: ResourceRecord, alive: bool = True, **resources: float
) -> dict[str, Any]:
    """A node in the form of ``ray.nodes``."""
    own = {f"node:{address}": 1.0, "memory": 64e9, **resources, **ray_resources(gpus)}
    return {
        "NodeID": key, "NodeManagerHostname": host, "NodeManagerAddress": address, "Alive": alive, "Resources": own,
        "Labels": {"ray.io/node-id": key, **ray_labels(gpus, {})},
    }  # fmt: skip


DESK = {**node("a", "desk", "10.0.0.2", CPU=4.0), "Labels": {"site": "lab"}}
DESK["Resources"]["robot:panda-0"] = 1.0
RACK = node("b", "rack", "10.0.0.3", gpu(0), gpu(1), CPU=16.0)
DEMO = {
    "name": "run demo#1a2b",
    "state": "CREATED",
    "bundles": {0: {"card:gpu-0": 1.0}, 1: {"card:gpu-1": 1.0}, 2: {"CPU": 6.0}},
    "bundles_to_node_id": {0: "b", 1: "b", 2: "b"},
}
TAKEN = {"b": {"CPU": 10.0, "memory": 64e9}}


def place(requests: Sequence[ResourceRequest], records: Sequence[ResourceRecord]) -> Assigned:
    return plan(requests, records).require()


def why(*requests: ResourceRequest, nodes: tuple[dict[str, Any], ...] = (DESK, RACK)) -> str:
    return plan(requests, cluster_records(nodes, TAKEN, [DEMO])).reason


def test_records_are_computers_gpus_and_declared_robots() -> None:
    records = {record.name: record for record in cluster_records([DESK, RACK], {}, [])}
    assert sorted(records) == ["desk", "panda-0", "rack", "rack/gpu-0", "rack/gpu-1"]
    assert (records["panda-0"].model, records["panda-0"].node, records["panda-0"].labels) == (
        "robot",
        "desk",
        {"site": "lab"},
    )
    found = records["rack/gpu-1"]
    assert (found.model, found.memory_bytes, found.node, found.health) == ("NVIDIA L4", 24 * GB, "rack", Health.READY)
    assert (records["rack"].cores, records["rack"].memory_bytes) == (16, 64 * GB)
    assert records["rack"].labels == {}, "what a GPU is, is no fact of its computer"


UNLIKE = node("b", "rack", "10.0.0.3", gpu(0, "NVIDIA T1000", 8), gpu(1), gpu(2, "NVIDIA T1000", 8), CPU=16.0)


def test_job_gets_requested_gpu_of_several_models() -> None:
    for request in (TRAINING, ResourceRequest(kind=Kind.GPU, model="NVIDIA L4")):
        (chosen,) = place([request], cluster_records([UNLIKE], {}, []))
        (bundle,) = make_bundles([request], [chosen], {"rack": "10.0.0.3"})
        assert bundle.resources == {"node:10.0.0.3": 0.001, "card:gpu-1": 1.0} and bundle.uuid == "GPU-1-24"
    (modest,) = place([ResourceRequest(kind=Kind.GPU)], cluster_records([UNLIKE], {}, []))
    assert modest[0].name == "rack/gpu-0", "what suffices, so that the large one stays free"


def test_free_small_gpu_does_not_meet_request_for_large_one() -> None:
    large = {**DEMO, "bundles": {0: {"card:gpu-1": 1.0}}, "bundles_to_node_id": {0: "b"}}
    free = {"b": {"CPU": 16.0, "card:gpu-0": 1.0, "card:gpu-2": 1.0}}
    with pytest.raises(PlacementError, match="rack/gpu-1 leased by run demo"):
        place([TRAINING], cluster_records([UNLIKE], free, [large]))
    with pytest.raises(PlacementError, match="rack/gpu-1 has 24 GB"):
        place([msgspec.structs.replace(TRAINING, memory_bytes=25 * GB)], cluster_records([UNLIKE], {}, []))


def test_nodes_of_one_computer_are_named_by_address() -> None:
    records = cluster_records([DESK, node("c", "desk", "10.0.0.4", CPU=1.0)], {}, [])
    assert {record.node for record in records} == {"10.0.0.2", "10.0.0.4"}


def test_leased_gpu_names_its_user() -> None:
    assert why(ARM, TRAINING) == ("gpu, 24 GB: missing (rack/gpu-0 leased by run demo; rack/gpu-1 leased by run demo)")


def test_reserved_robot_is_leased() -> None:
    other = {**DEMO, "name": "run two", "bundles": {0: {"robot:panda-0": 0.6}}, "bundles_to_node_id": {0: "a"}}
    free = {"a": {"CPU": 4.0}}
    with pytest.raises(PlacementError, match="panda-0 leased by run two"):
        place([ARM], cluster_records([DESK], free, [other]))


def test_resources_of_dead_node_are_lost_until_it_returns() -> None:
    dead = {**RACK, "Alive": False}
    lost = "rack/gpu-0 lost (its Ray node is gone); rack/gpu-1 lost (its Ray node is gone)"
    assert why(TRAINING, nodes=(DESK, dead)) == f"gpu, 24 GB: missing ({lost})"
    again = {**RACK, "NodeID": "z"}
    (chosen,) = place([TRAINING], cluster_records([DESK, dead, again], {}, []))
    assert chosen[0].name == "rack/gpu-0"


def test_removed_reservation_uses_nothing() -> None:
    for state in ("REMOVED", "PENDING"):
        records = cluster_records([RACK], {}, [{**DEMO, "state": state}])
        assert all(record.health is Health.READY and not record.note for record in records)


def test_placement_becomes_bundles_on_chosen_computers() -> None:
    asked = [ARM, TRAINING, ResourceRequest(kind=Kind.COMPUTE, cores=8, memory_bytes=16 * GB)]
    assigned = place(asked, cluster_records([DESK, RACK], {}, []))
    robot, card, share = make_bundles(asked, assigned, {"desk": "10.0.0.2", "rack": "10.0.0.3"})
    assert (robot.node, robot.resources) == ("desk", {"robot:panda-0": 0.6})
    assert (card.node, card.resources) == ("rack", {"node:10.0.0.3": 0.001, "card:gpu-0": 1.0})
    assert share.resources == {"node:10.0.0.3": 0.001, "CPU": 8.0, "memory": 16.0 * GB}
