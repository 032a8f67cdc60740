"""The writer thread runs all tasks in order and raises their errors."""

from __future__ import annotations

import threading

import pytest

from user_sys.edge.recorder import MAX_QUEUED_TASKS, WriterThread
from user_sys.errors import StoreError


def never() -> None:
    raise AssertionError("it should not have to wait")


def test_tasks_run_in_order_before_the_exit() -> None:
    done: list[int] = []
    with WriterThread(never) as writer:
        for number in range(MAX_QUEUED_TASKS):
            writer.put(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == list(range(MAX_QUEUED_TASKS))


def test_full_queue_blocks_and_reports() -> None:
    free, reported = threading.Event(), threading.Event()

    def blocked() -> None:
        reported.set()
        free.set()

    done: list[int] = []
    with WriterThread(blocked) as writer:
        writer.put(lambda: done.append(int(free.wait(60))))
        for _ in range(MAX_QUEUED_TASKS + 1):
            writer.put(lambda: done.append(1))
    assert reported.is_set() and done == [1] * (MAX_QUEUED_TASKS + 2)


def test_task_error_is_raised_by_put_and_ends_the_tasks() -> None:
    def fail() -> None:
        raise StoreError("the disk failed")

    done: list[int] = []
    with pytest.raises(StoreError, match="the disk failed"), WriterThread(lambda: None) as writer:
        writer.put(fail)
        while True:
            writer.put(lambda: done.append(1))
    assert done == []


def test_error_of_the_last_task_is_raised_at_the_exit() -> None:
    with pytest.raises(StoreError, match="full"), WriterThread(never) as writer:
        writer.put(lambda: (_ for _ in ()).throw(StoreError("full")))
