"""Which processes of a run are given up: those that fail at every start, and no other."""

from __future__ import annotations

from hal.process_supervisor import ProcessState, ProcessStatus
from user_sys.run.processes import MAX_FAILED_STARTS, CrashLoopDetector


def ended(restarts: int, last_exit: int | None = 2) -> ProcessStatus:
    return ProcessStatus(state=ProcessState.RUNNING, restarts=restarts, last_exit=last_exit)


def test_a_process_that_fails_at_each_start_is_in_vain() -> None:
    starts = CrashLoopDetector()
    assert [starts.is_crash_looping("learner", ended(count)) for count in range(MAX_FAILED_STARTS + 1)] == [
        False
    ] * MAX_FAILED_STARTS + [True]


def test_one_that_was_killed_as_often_is_not() -> None:
    starts = CrashLoopDetector()
    assert not starts.is_crash_looping("learner", ended(MAX_FAILED_STARTS + 5, -9))


def test_one_that_worked_since_begins_to_be_counted_anew() -> None:
    starts = CrashLoopDetector()
    assert starts.is_crash_looping("learner", ended(MAX_FAILED_STARTS))
    starts.mark_healthy("learner")
    assert not starts.is_crash_looping("learner", ended(MAX_FAILED_STARTS))
    assert not starts.is_crash_looping("learner", ended(2 * MAX_FAILED_STARTS - 1))
    assert starts.is_crash_looping("learner", ended(2 * MAX_FAILED_STARTS))


def test_one_that_was_moved_to_another_computer_begins_anew_too() -> None:
    starts = CrashLoopDetector()
    starts.mark_healthy("learner")
    assert not starts.is_crash_looping("learner", ended(9))
    assert not starts.is_crash_looping("learner", ended(0, None))
    assert starts.is_crash_looping("learner", ended(MAX_FAILED_STARTS))


def test_each_restart_is_told_once() -> None:
    starts = CrashLoopDetector()
    assert [starts.was_restarted("learner", ended(count)) for count in (0, 1, 1, 3, 3)] == [
        False,
        True,
        False,
        True,
        False,
    ]
