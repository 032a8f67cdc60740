"""A power cut at any moment loses nothing acknowledged; without any one sync it would."""

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
    return all(map(kept, verdict.scenarios.values()))


@pytest.mark.parametrize(("scenario", "check_every"), [("appending", 3), ("compacting", 6)])
def test_power_cut_in_sampled_states_loses_nothing(scenario: str, check_every: int) -> None:
    result = examine(scenario, kill_every=0, chances=0, check_every=check_every)
    assert kept(result) and result.states > 150


def test_every_sync_of_a_repair_is_needed() -> None:
    verdict = judge(0, 0, ["repairing"])
    assert caught(verdict) and len(verdict.caught) > 4


@pytest.mark.slow
def test_power_cut_loses_nothing_and_every_sync_is_needed() -> None:
    verdict = judge(0, 0, ["appending", "repairing"])
    assert caught(verdict) and verdict.states > 500 and len(verdict.caught) > 14


@pytest.mark.slow
def test_power_cut_during_compaction_loses_nothing() -> None:
    assert kept(examine("compacting", kill_every=0, chances=0))


@pytest.mark.slow
def test_power_cut_in_ten_thousand_states() -> None:
    verdict = judge(2, 2)
    assert caught(verdict) and verdict.states >= 10_000
