"""Mixtures, weights and priorities, and their state in checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_kit import Store, chunk, seen

from user_sys.episode import EpisodeSource, Phase
from user_sys.errors import ConfigError, WireError
from user_sys.replay.batches import TransitionBatch, TransitionBuilder
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.prioritized import PrioritizedSelector, SumTree
from user_sys.replay.sampler import Sampler
from user_sys.replay.selectors import (
    DemoOnlineSelector,
    InterventionWeightedSelector,
    MixtureSelector,
    Selector,
    StepFilter,
    UniformSelector,
)
from user_sys.replay.task_balanced import TaskBalancedSelector
from user_sys.store.labels import DeleteLabel

POLICY, TELEOP = Phase.POLICY, Phase.TELEOP
DEMO, ONLINE = (
    StepFilter(sources=frozenset({EpisodeSource.DEMO})),
    StepFilter(sources=frozenset({EpisodeSource.ONLINE})),
)


def sampler(replay: ReplayBuffer, selector: Selector, n: int = 101, seed: int = 0) -> Sampler[TransitionBatch]:
    return Sampler(replay, selector, TransitionBuilder(), n, seed=seed)


def test_mixture_draws_exact_share_of_demonstrations_and_interventions(store: Store) -> None:
    store.put(chunk(1, 0, 4, end=True, source=EpisodeSource.DEMO))
    with store.replay() as replay:
        mix = DemoOnlineSelector("e1")
        drawing = sampler(replay, mix)
        assert seen(drawing.sample()) == {(1, step) for step in range(4)}, "online is empty: all from demonstrations"
        store.put(
            chunk(2, 0, 4, end=True, phase=[POLICY, TELEOP, POLICY, POLICY]),
            chunk(3, 0, 4, end=True, source=EpisodeSource.EVALUATION),
            chunk(4, 0, 4, end=True, embodiment="e2"),
        )
        replay.refresh()
        assert len(mix.demo) == 5 and len(mix.online) == 4
        batch = drawing.sample()
        assert seen(batch.part(0, 50)) == {(1, 0), (1, 1), (1, 2), (1, 3), (2, 1)}
        assert seen(batch.part(50, 101)) == {(2, step) for step in range(4)}


@pytest.mark.parametrize(("shares", "counts"), [((0.3, 0.3, 0.4), [30, 30, 41]), ((1.0, 0.0, 0.0), [101, 0, 0])])
def test_shares_are_exact_and_remainder_goes_to_last(
    store: Store, shares: tuple[float, ...], counts: list[int]
) -> None:
    store.put(chunk(1, 0, 3, end=True))
    with store.replay() as replay:
        mix = MixtureSelector([(UniformSelector(), share) for share in shares])
        drawn = sampler(replay, mix).sample().group
        assert np.bincount(drawn, minlength=3).tolist() == counts == mix.counts(101)
    with pytest.raises(ConfigError, match="add up"):
        MixtureSelector([(UniformSelector(), 0.5)])


def test_interventions_are_drawn_by_weight(store: Store) -> None:
    store.put(chunk(1, 0, 10, end=True, phase=[TELEOP] + [POLICY] * 9))
    with store.replay() as replay:
        drawn = sampler(replay, InterventionWeightedSelector(weight=4.0), 26_000).sample().row
        counts = np.bincount(drawn, minlength=10)
        np.testing.assert_allclose(counts, [8000] + [2000] * 9, rtol=0.1)


class TestPrioritized:
    def test_rows_are_drawn_by_priority_and_weights_correct_it(self, store: Store) -> None:
        store.put(chunk(1, 0, 4, end=True), chunk(2, 0, 4))
        with store.replay() as replay:
            drawing = sampler(replay, PrioritizedSelector(alpha=0.5, beta=1.0), 9_000)
            batch = drawing.sample()
            assert (batch.weight == 1).all(), "nothing is known yet: all are alike"
            first = batch.part(0, 7)
            first.row[:] = np.arange(7)
            drawing.feedback(first, np.array([16.0, -16.0, 4.0, 1.0, 1.0, 1.0, np.nan]))
            batch = drawing.sample()
            powers = np.array([4, 4, 2, 1, 1, 1, 1])  # a TD error that is no number changes nothing
            np.testing.assert_allclose(np.bincount(batch.row, minlength=7), 9_000 * powers / powers.sum(), rtol=0.1)
            np.testing.assert_allclose(batch.weight, 1.0 / powers[batch.row], rtol=1e-4)

    def test_new_rows_get_maximum_priority_and_deleted_rows_none(self, store: Store) -> None:
        store.put(chunk(1, 0, 4, end=True))
        with store.replay() as replay:
            drawing = sampler(replay, PrioritizedSelector(alpha=1.0), 1_000)
            batch = drawing.sample()
            drawing.feedback(batch, np.full(len(batch), 9.0))
            store.put(chunk(2, 0, 4, end=True))
            replay.refresh()
            counts = np.bincount(drawing.sample().row, minlength=8)
            np.testing.assert_allclose(counts, 125, rtol=0.1)
            store.put(DeleteLabel(episode="ep-1", labeller="a", at_unix_ns=1))
            replay.refresh()
            drawing.feedback(batch, np.full(len(batch), 99.0))  # rows that were deleted in the meantime
            assert {episode for episode, _ in seen(drawing.sample())} == {2}

    def test_beta_anneals_to_one(self, store: Store) -> None:
        store.put(chunk(1, 0, 2, end=True))
        with store.replay() as replay:
            drawing = sampler(replay, PrioritizedSelector(alpha=1.0, beta=0.0, beta_draws=100), 100)
            drawing.feedback(drawing.sample(), np.full(100, 1.0))
            batch = drawing.sample()
            batch.row[:2] = [0, 1]
            drawing.feedback(batch.part(0, 2), np.array([1.0, 4.0]))
            weight = drawing.sample().weight
            np.testing.assert_allclose(sorted(set(weight.tolist())), [0.25, 1.0], rtol=1e-3)

    def test_priorities_survive_checkpoint_with_new_row_numbers(self, store: Store) -> None:
        store.put(chunk(1, 0, 3, end=True), chunk(2, 0, 3, end=True))
        with store.replay() as replay:
            drawing = sampler(replay, PrioritizedSelector())
            batch = drawing.sample()
            drawing.feedback(batch, np.random.default_rng(0).random(len(batch)))
            saved, expected = drawing.state_dict(), drawing.sample()
        with store.replay() as again:
            rebuilt = sampler(again, PrioritizedSelector(), seed=9)
            rebuilt.load_state_dict(saved)
            got = rebuilt.sample()
            np.testing.assert_array_equal(got.row, expected.row)
            np.testing.assert_array_equal(got.weight, expected.weight)
            with pytest.raises(WireError, match="another sampler"):
                rebuilt.load_state_dict({name: value for name, value in saved.items() if "powers" not in name})


@settings(max_examples=50, deadline=None)
@given(data=st.data(), size=st.integers(1, 400))
def test_sum_tree_equals_cumulative_sum(data: st.DataObject, size: int) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    weights, tree = np.zeros(size, np.float32), SumTree()
    for grown in sorted(rng.integers(1, size + 1, 3).tolist()) + [size]:
        tree.grow(grown)
        places = rng.integers(0, grown, 20)
        weights[places] = new = np.where(rng.random(20) < 0.3, 0, rng.random(20)).astype(np.float32)
        weights[places] = new
        tree.set(places, new)
    np.testing.assert_array_equal(tree[np.arange(size)], weights)
    np.testing.assert_allclose(tree.total, weights.sum(dtype=np.float64), rtol=1e-12)
    if tree.total > 0:
        heights = rng.random(300) * tree.total
        ends = np.cumsum(weights, dtype=np.float64)
        found = tree.find(heights)
        assert (weights[found] > 0).all()
        assert (heights <= ends[found] + 1e-9).all() and (heights >= ends[found] - weights[found] - 1e-9).all()


class TestTaskBalanced:
    def fill(self, store: Store) -> None:
        store.put(
            chunk(1, 0, 30, end=True, task="lift"),
            chunk(2, 0, 5, end=True, task="lift", source=EpisodeSource.DEMO),
            chunk(3, 0, 4, end=True, task="stack"),
        )

    def test_tasks_are_equal_and_sides_even_without_losses(self, store: Store) -> None:
        self.fill(store)
        with store.replay() as replay:
            selector = TaskBalancedSelector()
            groups = np.bincount(sampler(replay, selector, 400).sample().group, minlength=4)
            assert groups.tolist() == [100, 100, 0, 200], "lift offline and online; stack has no demonstrations"

    def test_online_share_follows_recent_losses_within_bounds(self, store: Store) -> None:
        self.fill(store)
        with store.replay() as replay:
            selector = TaskBalancedSelector(alpha=1.0, window=1)
            drawing = sampler(replay, selector, 400)
            for online, expected in ((1.0, 1 / (1 + np.exp(-0.5))), (9.0, 0.8), (-9.0, 0.2)):
                batch = drawing.sample()
                drawing.feedback(batch, np.where(batch.group == 1, online, 0.5))
                assert selector.online_share("lift") == pytest.approx(expected)
                assert selector.online_share("stack") == 1.0
            counts = np.bincount(drawing.sample().group, minlength=4)
            assert counts[1] in (40, 41) and counts[0] + counts[1] == 200
            saved = drawing.state_dict()
        with store.replay() as again:
            rebuilt = TaskBalancedSelector(alpha=1.0, window=1)
            sampler(again, rebuilt, 400).load_state_dict(saved)
            assert rebuilt.online_share("lift") == pytest.approx(0.2)
            with pytest.raises(WireError, match="another window"):
                sampler(again, TaskBalancedSelector(window=3), 400).load_state_dict(saved)

    def test_task_or_source_filter_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="sets tasks and sources itself"):
            TaskBalancedSelector(StepFilter(tasks=frozenset({"lift"})))
