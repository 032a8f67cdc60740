"""Crash loops: processes that fail at every start."""

from __future__ import annotations

from hal.process_supervisor import ProcessState, ProcessStatus
from user_sys.run.processes import MAX_FAILED_STARTS, CrashLoopDetector


def ended(restarts: int, last_exit: int | None = 2) -> ProcessStatus:
    return ProcessStatus(state=ProcessState.RUNNING, restarts=restarts, last_exit=last_exit)


def test_process_that_fails_at_each_start_is_crash_looping() -> None:
    starts = CrashLoopDetector()
    assert [starts.is_crash_looping("learner", ended(count)) for count in range(MAX_FAILED_STARTS + 1)] == [
        False
    ] * MAX_FAILED_STARTS + [True]


def test_process_killed_as_often_is_not_crash_looping() -> None:
    starts = CrashLoopDetector()
    assert not starts.is_crash_looping("learner", ended(MAX_FAILED_STARTS + 5, -9))


def test_healthy_process_resets_the_count() -> None:
    starts = CrashLoopDetector()
    assert starts.is_crash_looping("learner", ended(MAX_FAILED_STARTS))
    starts.mark_healthy("learner")
    assert not starts.is_crash_looping("learner", ended(MAX_FAILED_STARTS))
    assert not starts.is_crash_looping("learner", ended(2 * MAX_FAILED_STARTS - 1))
    assert starts.is_crash_looping("learner", ended(2 * MAX_FAILED_STARTS))


def test_moved_process_resets_the_count() -> None:
    starts = CrashLoopDetector()
    starts.mark_healthy("learner")
    assert not starts.is_crash_looping("learner", ended(9))
    assert not starts.is_crash_looping("learner", ended(0, None))
    assert starts.is_crash_looping("learner", ended(MAX_FAILED_STARTS))


def test_each_restart_is_reported_once() -> None:
    starts = CrashLoopDetector()
    assert [starts.was_restarted("learner", ended(count)) for count in (0, 1, 1, 3, 3)] == [
        False,
        True,
        False,
        True,
        False,
    ]
