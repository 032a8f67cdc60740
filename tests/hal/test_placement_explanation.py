"""The explanation of a job that cannot be placed."""

from __future__ import annotations

import msgspec
import pytest

from hal.errors import PlacementError
from hal.placement import place
from hal.resource import Health, Kind, ResourceRecord, ResourceRequest

GB = 1_000_000_000


def robot(name: str, model: str = "panda", **facts: object) -> ResourceRecord:
    return msgspec.structs.replace(ResourceRecord(kind=Kind.ROBOT, name=name, model=model, node="desk"), **facts)


def gpu(name: str, gigabytes: int, node: str = "desk") -> ResourceRecord:
    return ResourceRecord(kind=Kind.GPU, name=name, model="NVIDIA T4", node=node, memory_bytes=gigabytes * GB)


FLEET = [
    robot("panda-0"),
    robot("panda-1", health=Health.LEASED, note="by run demo"),
    robot("panda-2", health=Health.QUARANTINED, note="by ana: the gripper sticks"),
    robot("ur-0", "ur5e", health=Health.LOST, trouble="nothing answers at 10.0.0.5:30004: timed out"),
    gpu("desk/gpu-0", 16),
]
PANDA = ResourceRequest(kind=Kind.ROBOT, model="panda")


def why(*requests: ResourceRequest, fleet: list[ResourceRecord] | None = None) -> str:
    with pytest.raises(PlacementError) as refusal:
        place(requests, FLEET if fleet is None else fleet)
    return str(refusal.value)


def test_too_few_free_resources_are_explained() -> None:
    assert why(msgspec.structs.replace(PANDA, count=2)) == (
        "The job asks for two robots of model panda. Only one is free, panda-0: panda-1 is driven by run demo and "
        "panda-2 is quarantined (by ana: the gripper sticks). It would fit if panda-1 or panda-2 were free."
    )


def test_too_few_existing_resources_are_explained() -> None:
    three = msgspec.structs.replace(PANDA, count=3)
    assert why(three, fleet=[robot("a"), robot("b")]) == (
        "The job asks for three robots of model panda. There are only two, a and b."
    )
    assert why(three, fleet=[robot("a"), robot("b", health=Health.LEASED, note="by run demo")]) == (
        "The job asks for three robots of model panda. There are only two, of which only a is free: "
        "b is driven by run demo."
    )
    assert why(three, fleet=[robot("b", health=Health.LEASED, note="by run demo")]) == (
        "The job asks for three robots of model panda. There is only one, and it is not free: b is driven by run demo."
    )


def test_unavailable_named_resource_is_explained() -> None:
    assert why(ResourceRequest(kind=Kind.ROBOT, name="panda-1")) == (
        "The job asks for the robot panda-1. panda-1 is driven by run demo. It would fit if panda-1 were free."
    )
    assert why(ResourceRequest(kind=Kind.ROBOT, name="ur-0")) == (
        "The job asks for the robot ur-0. ur-0 is not there (nothing answers at 10.0.0.5:30004: timed out). "
        "It would fit if ur-0 were there."
    )
    assert why(ResourceRequest(kind=Kind.ROBOT, name="panda0")) == (
        "The job asks for the robot panda0. There is no robot called panda0; did you mean panda-0?"
    )


def test_unknown_kind_or_model_is_explained() -> None:
    large = ResourceRequest(kind=Kind.GPU, memory_bytes=24 * GB)
    assert why(PANDA, large) == (
        "The job asks for one robot of model panda and one GPU with at least 24 GB. "
        "The largest GPU here, desk/gpu-0 (NVIDIA T4), has 16 GB."
    )
    assert why(large, fleet=[robot("a")]) == "The job asks for one GPU with at least 24 GB. No GPU is known here."
    assert why(ResourceRequest(kind=Kind.ROBOT, model="so101"), fleet=[robot("a"), robot("b", "ur5e")]) == (
        "The job asks for one robot of model so101. There is no robot of model so101: a is a panda and b is a ur5e."
    )


def test_closest_resources_are_named() -> None:
    fleet = [robot("a", labels={"site": "lab"}, capabilities=("camera:front",)), robot("b", labels={"site": "hall"})]
    seeing = ResourceRequest(kind=Kind.ROBOT, capabilities=("camera:front", "camera:wrist"))
    assert why(seeing, fleet=fleet) == (
        "The job asks for one robot with a front camera and a wrist camera. "
        "None has all capabilities: a lacks a wrist camera and b lacks a front camera and a wrist camera."
    )
    assert why(ResourceRequest(kind=Kind.ROBOT, labels={"site": "plant"}), fleet=fleet) == (
        "The job asks for one robot at site plant. None is at site plant: a is at site lab and b is at site hall."
    )


def test_unmet_colocation_and_competition_are_explained() -> None:
    pair = {"colocate": "pair"}
    wanted = [ResourceRequest(kind=Kind.ROBOT, **pair), ResourceRequest(kind=Kind.GPU, **pair)]
    assert why(*wanted, fleet=[robot("a"), gpu("rack/gpu-0", 16, "rack")]) == (
        "The job asks for one robot and one GPU, the robot and GPU on one computer. Each of them is there, but not "
        "near each other (robots: a on desk; GPUs: rack/gpu-0 on rack)."
    )
    named = [ResourceRequest(kind=Kind.ROBOT, name="a", **pair), wanted[1]]
    assert why(*named, fleet=[robot("a"), gpu("rack/gpu-0", 16, "rack")]).endswith(
        "the robot and GPU on one computer. Each of them is there, but not near each other (a on desk; GPUs: "
        "rack/gpu-0 on rack)."
    )
    assert why(PANDA, ResourceRequest(kind=Kind.ROBOT), fleet=[robot("a")]) == (
        "The job asks for one robot of model panda and one robot. "
        "Each of them is there alone, but there are not enough for all at the same time."
    )


def test_too_small_computer_is_explained() -> None:
    desk = ResourceRecord(kind=Kind.COMPUTE, name="desk/cpu", model="x86_64", node="desk", cores=4)
    assert why(ResourceRequest(kind=Kind.COMPUTE, cores=8), fleet=[desk]) == (
        "The job asks for one computer with 8 processors. The largest computer here, desk/cpu, has 4 processors."
    )
