"""Where the processes of a run's learners go."""

from __future__ import annotations

from pathlib import Path

import pytest

from hal.ray_bridge import Reservation, Seat
from hal.ray_places import Bundle
from user_sys.crew import Post, learner_nodes, posts_here, posts_in
from user_sys.topology import RunFolder

ADDRESSES = {"rack": "10.0.0.2", "tower": "10.0.0.3"}


def seats(*bundles: tuple[str, str | None]) -> tuple[Seat, ...]:
    """One for each node and its GPU's UUID; None where it has no GPU."""
    found = [Bundle(node=node, resources={}, gpu=uuid is not None, uuid=uuid or "") for node, uuid in bundles]
    return Reservation(None, tuple(found)).seats()


def test_each_process_has_a_seat_and_a_gpu_of_its_own_and_is_found_where_its_computer_is() -> None:
    four = seats(("rack", "GPU-0"), ("rack", "GPU-1"), ("tower", "GPU-2"), ("tower", "GPU-3"))
    posts = posts_in(four, 0, 4, ADDRESSES)
    assert [post.seat for post in posts] == list(four)
    assert [post.address for post in posts] == ["10.0.0.2", "10.0.0.2", "10.0.0.3", "10.0.0.3"]
    assert [(post.seat.gpus[post.card], post.gpus) for post in posts if post.seat] == [
        (f"GPU-{number}", ()) for number in range(4)
    ]


def test_several_learners_take_the_seats_in_turns() -> None:
    three = seats(("rack", None), ("rack", None), ("tower", None))
    first, second = (posts_in(three, number, 2, ADDRESSES) for number in (0, 1))
    assert [post.seat for post in (*first, *second)] == [three[0], three[1], three[2], three[0]]
    assert {post.address for post in first} == {"127.0.0.1"}, "nobody of the first is far"
    assert [post.address for post in second] == ["10.0.0.3", "10.0.0.2"]


def test_processes_of_one_computer_without_gpus_of_the_runs_own_each_count_on_from_the_other() -> None:
    posts = posts_in(seats(("rack", None), ("tower", None)), 0, 4, ADDRESSES)
    assert [post.card for post in posts] == [0, 0, 1, 1]
    assert [post.card for post in posts_here(1, 3, ())] == [0, 1, 2]


@pytest.mark.parametrize("there", [(), ("rack",)])
def test_without_all_of_its_seats_a_learner_has_none(there: tuple[str, ...]) -> None:
    taken = seats(("rack", None), ("tower", None)) if there else ()
    assert posts_in(taken, 0, 2, {node: ADDRESSES[node] for node in there}) == ()


def test_on_one_computer_each_process_sees_its_own_gpu_first() -> None:
    first, second = (posts_here(number, 2, ("A", "B", "C")) for number in (0, 1))
    assert [post.gpus for post in (*first, *second)] == [
        ("A", "B", "C"),
        ("B", "C", "A"),
        ("C", "A", "B"),
        ("A", "B", "C"),
    ]
    assert {(post.card, post.seat, post.address) for post in first} == {(0, None, "127.0.0.1")}


def test_the_first_process_is_the_learner_and_the_others_look_for_it_among_its_checkpoints(tmp_path: Path) -> None:
    posts = (Post(address="10.0.0.2"), Post(address="10.0.0.3", card=1))
    nodes = learner_nodes(RunFolder(tmp_path), "learner-x-012345", posts, "here", "tcp://10.0.0.9:1")
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
    assert follower[2:] == ("user_sys.learner.follower_process", str(checkpoints), "1", "10.0.0.3", "1")
