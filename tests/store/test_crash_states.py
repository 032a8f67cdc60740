"""A power cut at any moment of a store's life loses nothing acknowledged; without any one sync it would, and shows."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from crash_states import Result, Verdict, examine, judge


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def kept(result: Result) -> bool:
    assert not result.violations, result.first
    return result.states > 10


def caught(verdict: Verdict) -> bool:
    assert [site for site, how in verdict.caught.items() if not how] == []
    return all(map(kept, verdict.lives.values()))


@pytest.mark.long(25)
def test_a_power_cut_keeps_every_promise_and_no_sync_can_be_left_out_unnoticed() -> None:
    verdict = judge(0, 0, ["appending", "repairing"])
    assert caught(verdict) and verdict.states > 500 and len(verdict.caught) > 14


@pytest.mark.long(15)
@pytest.mark.parametrize("life", ["compacting", "outbox"])
def test_a_power_cut_while_space_is_given_back_keeps_every_promise(life: str) -> None:
    assert kept(examine(life, kill_every=0, chances=0))


@pytest.mark.slow
def test_ten_thousand_states_and_every_sync() -> None:
    verdict = judge(2, 2)
    assert caught(verdict) and verdict.states >= 10_000
