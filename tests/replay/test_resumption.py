"""Draws are reproducible with any cache, threads, checkpoints and number of learners."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from replay_kit import CAMERA, PICTURES, Store, chunk, raw

from user_sys.codec import Array
from user_sys.episode import EpisodeSource
from user_sys.errors import StoreCorrupt, WireError
from user_sys.replay.batches import BatchSpec
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.sampler import Prefetcher, Sampler
from user_sys.replay.selectors import DemoOnlineSelector, PrioritizedSelector, UniformSelector


def fill(store: Store, pictures: bool = False) -> None:
    for episode in range(8):
        frames = {step: raw(30 * episode + step) for step in range(6)} if pictures else None
        source = EpisodeSource.DEMO if episode < 2 else EpisodeSource.ONLINE
        store.put(chunk(episode, 0, 5, end=True, source=source, frames=frames))


def prioritized(replay: ReplayBuffer, seed: int = 3) -> Sampler:
    return Sampler(replay, PrioritizedSelector(), BatchSpec(2, 0.9), 32, seed=seed)


def train(batches: Prefetcher, sampler: Sampler, updates: int) -> list[Array]:
    """Imitates a learner; priorities follow from each batch's content."""
    drawn = []
    for _ in range(updates):
        batch = batches.next()
        drawn.append(np.concatenate([batch.row, batch.weight, batch.observation["observation.state"].ravel()]))
        sampler.feedback(batch, batch.reward * batch.weight)
    return drawn


@pytest.mark.parametrize("depth", [0, 3])
def test_resumed_sampler_draws_identically(store: Store, depth: int) -> None:
    fill(store)
    with store.replay() as replay:
        sampler = prioritized(replay)
        with Prefetcher(sampler, depth) as batches:
            train(batches, sampler, 5)
            saved = batches.state_dict()
            expected = train(batches, sampler, 6)
    with store.replay() as again:
        sampler = prioritized(again, seed=77)
        with Prefetcher(sampler, depth) as batches:
            batches.load_state_dict(saved)
            np.testing.assert_array_equal(train(batches, sampler, 6), expected)


def test_state_of_another_sampler_is_refused(store: Store) -> None:
    fill(store)
    with store.replay() as replay:
        sampler = prioritized(replay)
        saved = sampler.state_dict()
        for name in ("generator", "ahead.step", "selector.powers"):
            with pytest.raises(WireError):
                prioritized(replay).load_state_dict({key: value for key, value in saved.items() if key != name})


@pytest.mark.parametrize("depth", [0, 2])
def test_draws_are_independent_of_cache_refreshes_and_threads(store: Store, depth: int) -> None:
    drawn = []
    for cache_bytes, step_by_step in ((20_000, False), (1 << 22, True)):
        if not step_by_step:
            fill(store, pictures=True)
        with store.replay(PICTURES, cache_bytes) as replay:
            sampler = Sampler(replay, DemoOnlineSelector(("e1",)), BatchSpec(), 64, seed=5)
            for _ in range(7 if step_by_step else 0):
                replay.refresh()
            with Prefetcher(sampler, depth) as batches:
                drawn.append([batches.next().observation[CAMERA].copy() for _ in range(5)])
    np.testing.assert_array_equal(drawn[0], drawn[1])


def test_batches_are_ordered_and_valid_until_the_next(store: Store) -> None:
    fill(store)
    with store.replay() as replay:
        plain = Sampler(replay, UniformSelector(), BatchSpec(), 16, seed=1)
        expected = [plain.sample().row.copy() for _ in range(40)]
        with Prefetcher(Sampler(replay, UniformSelector(), BatchSpec(), 16, seed=1), 4) as batches:
            handed = [batches.next() for _ in range(40)]
        assert len({id(batch) for batch in handed}) <= 6, "batches are used again"
        with Prefetcher(Sampler(replay, UniformSelector(), BatchSpec(), 16, seed=1), 4) as batches:
            for row in expected:
                np.testing.assert_array_equal(batches.next().row, row)


def test_fill_errors_are_raised_by_next(store: Store) -> None:
    store.put(chunk(1, 0, 3, end=True))
    before = set(threading.enumerate())
    with store.replay(PICTURES) as replay:
        with (
            Prefetcher(Sampler(replay, UniformSelector(), BatchSpec(), 4), 2) as batches,
            pytest.raises(StoreCorrupt),
        ):
            batches.next()
    assert set(threading.enumerate()) <= before, "no thread is left behind"


def test_ranks_draw_disjoint_streams_from_one_seed(store: Store) -> None:
    fill(store)
    with store.replay() as replay:
        ranks = [Sampler(replay, UniformSelector(), BatchSpec(), 64, seed=4, rank=rank, world=3) for rank in range(3)]
        streams = [np.concatenate([rank.sample().row for _ in range(4)]) for rank in ranks]
        again = Sampler(replay, UniformSelector(), BatchSpec(), 64, seed=4, rank=1, world=3)
        np.testing.assert_array_equal(np.concatenate([again.sample().row for _ in range(4)]), streams[1])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.mean(streams[one] == streams[other]) < 0.15, "by chance one in forty is the same"
