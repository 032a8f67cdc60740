"""Where the processes of a run's learners go."""

from __future__ import annotations

from pathlib import Path

import pytest

from hal.ray_cluster import PlacementSlot, Reservation
from hal.ray_nodes import Bundle
from user_sys.run.config import RunFolder
from user_sys.run.topology import ProcessSlot, cluster_slots, learner_processes, local_slots

ADDRESSES = {"rack": "10.0.0.2", "tower": "10.0.0.3"}


def seats(*bundles: tuple[str, str | None]) -> tuple[PlacementSlot, ...]:
    """One for each node and its GPU's UUID; None where it has no GPU."""
    found = [Bundle(node=node, resources={}, is_gpu=uuid is not None, uuid=uuid or "") for node, uuid in bundles]
    return Reservation(None, tuple(found)).slots()


def test_each_process_has_a_seat_and_a_gpu_of_its_own_and_is_found_where_its_computer_is() -> None:
    four = seats(("rack", "GPU-0"), ("rack", "GPU-1"), ("tower", "GPU-2"), ("tower", "GPU-3"))
    posts = cluster_slots(four, 0, 4, ADDRESSES)
    assert [post.placement for post in posts] == list(four)
    assert [post.address for post in posts] == ["10.0.0.2", "10.0.0.2", "10.0.0.3", "10.0.0.3"]
    assert [(post.placement.gpu_uuids[post.gpu_index], post.gpus) for post in posts if post.placement] == [
        (f"GPU-{number}", ()) for number in range(4)
    ]


def test_several_learners_take_the_seats_in_turns() -> None:
    three = seats(("rack", None), ("rack", None), ("tower", None))
    first, second = (cluster_slots(three, number, 2, ADDRESSES) for number in (0, 1))
    assert [post.placement for post in (*first, *second)] == [three[0], three[1], three[2], three[0]]
    assert {post.address for post in first} == {"127.0.0.1"}, "nobody of the first is far"
    assert [post.address for post in second] == ["10.0.0.3", "10.0.0.2"]


def test_processes_of_one_computer_without_gpus_of_the_runs_own_each_count_on_from_the_other() -> None:
    posts = cluster_slots(seats(("rack", None), ("tower", None)), 0, 4, ADDRESSES)
    assert [post.gpu_index for post in posts] == [0, 0, 1, 1]
    assert [post.gpu_index for post in local_slots(1, 3, ())] == [0, 1, 2]


@pytest.mark.parametrize("there", [(), ("rack",)])
def test_without_all_of_its_seats_a_learner_has_none(there: tuple[str, ...]) -> None:
    taken = seats(("rack", None), ("tower", None)) if there else ()
    assert cluster_slots(taken, 0, 2, {node: ADDRESSES[node] for node in there}) == ()


def test_on_one_computer_each_process_sees_its_own_gpu_first() -> None:
    first, second = (local_slots(number, 2, ("A", "B", "C")) for number in (0, 1))
    assert [post.gpus for post in (*first, *second)] == [
        ("A", "B", "C"),
        ("B", "C", "A"),
        ("C", "A", "B"),
        ("A", "B", "C"),
    ]
    assert {(post.gpu_index, post.placement, post.address) for post in first} == {(0, None, "127.0.0.1")}


def test_the_first_process_is_the_learner_and_the_others_look_for_it_among_its_checkpoints(tmp_path: Path) -> None:
    posts = (ProcessSlot(address="10.0.0.2"), ProcessSlot(address="10.0.0.3", gpu_index=1))
    nodes = learner_processes(RunFolder(tmp_path), "learner-x-012345", posts, "here", "tcp://10.0.0.9:1")
    assert [node.name for node, _ in nodes] == ["learner-x-012345", "learner-x-012345-rank-1"]
    assert [node.log.name for node, _ in nodes] == ["learner-x-012345.log", "learner-x-012345-rank-1.log"]
    (learner, follower), checkpoints = (node.argv for node, _ in nodes), tmp_path / "checkpoints" / "learner-x-012345"
    assert learner[2:] == (
        "user_sys.learner",
        str(tmp_path),
        "learner-x-012345",
        "tcp://10.0.0.9:1",
        "10.0.0.2",
        "0",
    )
    assert follower[2:] == ("user_sys.learner.worker_process", str(checkpoints), "1", "10.0.0.3", "1")
