"""Which processes of a run are given up: those that fail at every start, and no other."""

from __future__ import annotations

from hal.supervision import NodeState, NodeStatus
from user_sys.starts import STARTS, Starts


def ended(restarts: int, last_exit: int | None = 2) -> NodeStatus:
    return NodeStatus(state=NodeState.RUNNING, restarts=restarts, last_exit=last_exit)


def test_a_process_that_fails_at_each_start_is_in_vain() -> None:
    starts = Starts()
    assert [starts.in_vain("learner", ended(count)) for count in range(STARTS + 1)] == [False] * STARTS + [True]


def test_one_that_was_killed_as_often_is_not() -> None:
    starts = Starts()
    assert not starts.in_vain("learner", ended(STARTS + 5, -9))


def test_one_that_worked_since_begins_to_be_counted_anew() -> None:
    starts = Starts()
    assert starts.in_vain("learner", ended(STARTS))
    starts.at_work("learner")
    assert not starts.in_vain("learner", ended(STARTS))
    assert not starts.in_vain("learner", ended(2 * STARTS - 1))
    assert starts.in_vain("learner", ended(2 * STARTS))


def test_one_that_was_moved_to_another_computer_begins_anew_too() -> None:
    starts = Starts()
    starts.at_work("learner")
    assert not starts.in_vain("learner", ended(9))
    assert not starts.in_vain("learner", ended(0, None))
    assert starts.in_vain("learner", ended(STARTS))


def test_each_restart_is_told_once() -> None:
    starts = Starts()
    assert [starts.anew("learner", ended(count)) for count in (0, 1, 1, 3, 3)] == [False, True, False, True, False]
