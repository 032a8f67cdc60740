"""Simulations of edges, gateway, store and learner, and their detection of broken invariants."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from unittest import mock

import pytest
from simulate import Tally, simulate_all

from user_sys.store.store import IngestedChunks, StoreWriter
from user_sys.tunnel.connection import ChunkSender
from user_sys.tunnel.flow_control import ReceiveWindow

FEW_SEEDS = 60
SEEDS = 500
MANY_SEEDS = 10_000


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def hold(tally: Tally) -> None:
    again = [f"{why}; again: python tests/tunnel/simulate.py --seed {seed} -v" for seed, why in tally.failed]
    assert not again
    assert tally.chunks > 20 * tally.seeds
    assert min(tally.faults.values()) > tally.seeds / 20


def test_simulation_loses_and_duplicates_no_chunk() -> None:
    hold(simulate_all(range(FEW_SEEDS)))


@pytest.mark.slow
def test_many_simulations_lose_and_duplicate_no_chunk() -> None:
    hold(simulate_all(range(FEW_SEEDS, SEEDS + MANY_SEEDS)))


def test_seed_determines_the_simulation() -> None:
    first, second = simulate_all([7]), simulate_all([7])
    assert first == second


RESUME = ChunkSender.resume


@pytest.mark.parametrize(
    "of, name, instead, noticed",
    [
        (StoreWriter, "sync", lambda writer, ticket=None: None, "not in the store"),
        (IngestedChunks, "has", lambda known, episode, index: False, "twice"),
        (ChunkSender, "resume", lambda sender, resume_after: RESUME(sender, -1), "resent"),
        (ReceiveWindow, "release", lambda window, messages, size_bytes: False, "not at rest"),
    ],
    ids=["acknowledged before it is synced", "no deduplication", "the resume position is dropped",
         "credit never comes back"],
)  # fmt: skip
def test_simulation_detects_a_broken_invariant(of: type, name: str, instead: object, noticed: str) -> None:
    with mock.patch.object(of, name, instead):
        tally = simulate_all(range(SEEDS))
    assert tally.failed and noticed in tally.failed[0][1], tally.failed
