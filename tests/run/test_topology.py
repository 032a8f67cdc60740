"""Slots and commands of the learners' processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hal.ray_cluster import PlacementSlot, Reservation
from hal.ray_nodes import Bundle
from user_sys.run.config import RunFolder
from user_sys.run.topology import ProcessSlot, cluster_slots, learner_processes, local_slots

ADDRESSES = {"rack": "10.0.0.2", "tower": "10.0.0.3"}


def placements(*bundles: tuple[str, str | None]) -> tuple[PlacementSlot, ...]:
    """One placement for each node, with its GPU's UUID or None."""
    found = [Bundle(node=node, resources={}, is_gpu=uuid is not None, uuid=uuid or "") for node, uuid in bundles]
    return Reservation(None, tuple(found)).slots()


def test_each_process_has_its_own_slot_gpu_and_address() -> None:
    four = placements(("rack", "GPU-0"), ("rack", "GPU-1"), ("tower", "GPU-2"), ("tower", "GPU-3"))
    slots = cluster_slots(four, 0, 4, ADDRESSES)
    assert [slot.placement for slot in slots] == list(four)
    assert [slot.address for slot in slots] == ["10.0.0.2", "10.0.0.2", "10.0.0.3", "10.0.0.3"]
    assert [(slot.placement.gpu_uuids[slot.gpu_index], slot.gpus) for slot in slots if slot.placement] == [
        (f"GPU-{number}", ()) for number in range(4)
    ]


def test_learners_take_slots_in_turns() -> None:
    three = placements(("rack", None), ("rack", None), ("tower", None))
    first, second = (cluster_slots(three, number, 2, ADDRESSES) for number in (0, 1))
    assert [slot.placement for slot in (*first, *second)] == [three[0], three[1], three[2], three[0]]
    assert {slot.address for slot in first} == {"127.0.0.1"}, "all on one computer"
    assert [slot.address for slot in second] == ["10.0.0.3", "10.0.0.2"]


@pytest.mark.parametrize("there", [(), ("rack",)])
def test_learner_without_all_slots_has_none(there: tuple[str, ...]) -> None:
    taken = placements(("rack", None), ("tower", None)) if there else ()
    assert cluster_slots(taken, 0, 2, {node: ADDRESSES[node] for node in there}) == ()


def test_each_local_process_sees_its_own_gpu_first() -> None:
    first, second = (local_slots(number, 2, ("A", "B", "C")) for number in (0, 1))
    assert [slot.gpus for slot in (*first, *second)] == [
        ("A", "B", "C"),
        ("B", "C", "A"),
        ("C", "A", "B"),
        ("A", "B", "C"),
    ]
    assert {(slot.gpu_index, slot.placement, slot.address) for slot in first} == {(0, None, "127.0.0.1")}


def test_processes_of_a_learner_get_the_environment_of_torchrun(tmp_path: Path) -> None:
    slots = (ProcessSlot(address="10.0.0.2"), ProcessSlot(address="10.0.0.3", gpu_index=1))
    nodes = learner_processes(RunFolder(tmp_path), "learner-x-012345", slots, "here", "tcp://10.0.0.9:1", 4000)
    assert [node.name for node, _ in nodes] == ["learner-x-012345", "learner-x-012345-rank-1"]
    assert [node.log.name for node, _ in nodes] == ["learner-x-012345.log", "learner-x-012345-rank-1.log"]
    argv = ("user_sys.run.learner_process", str(tmp_path), "learner-x-012345", "tcp://10.0.0.9:1")
    assert [node.argv[2:] for node, _ in nodes] == [argv, argv]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "4000"}
    assert [node.env for node, _ in nodes] == [
        {"RANK": "0", "LOCAL_RANK": "0", **shared},
        {"RANK": "1", "LOCAL_RANK": "1", **shared},
    ]
