"""Mixtures, weights and priorities, and their state in checkpoints."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_kit import Store, chunk, seen

from user_sys.episode import APPLIED_ACTION, EpisodeSource, Phase
from user_sys.errors import ConfigError, WireError
from user_sys.replay.batches import Batch, BatchSpec
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.sampler import Sampler, SamplerConfig, SelectorKind
from user_sys.replay.selectors import (
    DemoOnlineSelector,
    MixturePart,
    MixturePartConfig,
    MixtureSelector,
    PrioritizedConfig,
    PrioritizedSelector,
    Selector,
    StepFilter,
    SumTree,
    TaskBalancedSelector,
    TasksConfig,
    UniformSelector,
)
from user_sys.store.labels import DeleteLabel, PhaseLabel, SuccessLabel

POLICY, TELEOP = Phase.POLICY, Phase.TELEOP


def part(batch: Batch, start: int, stop: int) -> Batch:
    """Samples `start` to `stop` of a batch."""
    arrays = {each.name: getattr(batch, each.name) for each in fields(batch)}
    cut = {
        name: {key: array[start:stop] for key, array in value.items()} if isinstance(value, dict) else value[start:stop]
        for name, value in arrays.items()
    }
    return Batch(**cut)


def sampler(replay: ReplayBuffer, selector: Selector, n: int = 101, seed: int = 0) -> Sampler:
    return Sampler(replay, selector, BatchSpec(), n, seed=seed)


def test_mixture_draws_exact_share_of_demonstrations_and_interventions(store: Store) -> None:
    store.put(chunk(1, 0, 4, end=True, source=EpisodeSource.DEMO))
    with store.replay() as replay:
        mix = DemoOnlineSelector(("e1",))
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
        assert seen(part(batch, 0, 50)) == {(1, 0), (1, 1), (1, 2), (1, 3), (2, 1)}
        assert seen(part(batch, 50, 100)) == {(2, step) for step in range(4)}


def test_failed_attempts_by_hand_are_no_demonstrations_but_their_corrections_are(store: Store) -> None:
    def demo_rows(mix: DemoOnlineSelector) -> set[int]:
        return {int(row) // 4 + 1 for row in mix.demo.rows}

    with store.replay() as replay:
        mix = DemoOnlineSelector(("e1",))
        replay.subscribe(mix.update)
        store.put(chunk(1, 0, 4, phase=TELEOP))
        store.put(chunk(2, 0, 4, end=True, phase=TELEOP, success=False))
        store.put(chunk(3, 0, 4, end=True, phase=[POLICY, POLICY, Phase.CORRECTION, POLICY], success=False))
        store.put(chunk(4, 0, 4, end=True, phase=TELEOP, success=None))
        replay.refresh()
        assert demo_rows(mix) == {1, 3, 4}, "one goes on, one is a correction, one is without a label"
        store.put(chunk(1, 4, 4, index=1, end=True, phase=TELEOP, success=False))
        replay.refresh()
        assert demo_rows(mix) == {3, 4} and len(mix.online) == 20, "critics learn from failures"
        store.put(SuccessLabel(episode="ep-2", labeller="ana", at_unix_ns=1, success=True))
        store.put(chunk(5, 0, 4, phase=TELEOP, version=-1))
        store.put(chunk(5, 4, 4, index=1, end=True, phase=POLICY, version=-1, success=False))
        replay.refresh()
        assert demo_rows(mix) == {2, 3, 4}, "a person's failure may end with a rest after the hand-back"


def test_what_a_person_shows_in_an_episode_that_the_policy_fails_is_a_demonstration(store: Store) -> None:
    with store.replay() as replay:
        mix = DemoOnlineSelector(("e1",))
        replay.subscribe(mix.update)
        store.put(chunk(1, 0, 4, end=True, phase=[TELEOP, TELEOP, POLICY, POLICY], success=False))
        store.put(chunk(2, 0, 4, end=True, phase=POLICY, success=False))
        store.put(PhaseLabel(episode="ep-2", labeller="ana", at_unix_ns=1, first_step=1, steps=2, phase=TELEOP))
        store.put(chunk(3, 0, 4, phase=TELEOP))
        store.put(SuccessLabel(episode="ep-3", labeller="ana", at_unix_ns=1, success=False))
        replay.refresh()
        assert mix.demo.rows.tolist() == [0, 1, 5, 6], "also what a label makes a person's"
        store.put(chunk(3, 4, 4, index=1, end=True, phase=POLICY, success=False))
        replay.refresh()
        assert mix.demo.rows.tolist() == [0, 1, 5, 6, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("shares", "n"),
    [
        ((0.3, 0.3, 0.4), 101),
        ((0.3, 0.3, 0.4), 100),
        ((1.0, 0.0, 0.0), 101),
        ((0.5, 0.5), 1),
        ((1 / 3,) * 3, 2),
        ((0.1,) * 10, 8),
        ((0.1, 0.9), 8),
    ],
)
def test_shares_hold_on_average_and_in_each_batch_up_to_one_sample(
    store: Store, shares: tuple[float, ...], n: int
) -> None:
    store.put(chunk(1, 0, 3, end=True))
    with store.replay() as replay:
        mix, rng = MixtureSelector([(StepFilter(), share) for share in shares]), np.random.default_rng(0)
        replay.subscribe(mix.update)
        drawn = [np.bincount(mix.select(n, rng).groups, minlength=len(shares)) for _ in range(1000)]
        exact = n * np.array(shares)
        assert (np.abs(drawn - exact) < 1 - 1e-6).all() and (np.sum(drawn, axis=1) == n).all()
        np.testing.assert_allclose(np.mean(drawn, axis=0), exact, atol=0.06)


def test_shares_that_do_not_add_up_to_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="add up"):
        MixtureSelector([(StepFilter(), 0.5)])


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        (SamplerConfig(), {1, 3}),
        (SamplerConfig(mixture=(MixturePartConfig(tasks=("lift",)),)), {1, 3}),
        (SamplerConfig(kind="uniform"), {1, 3}),
        (SamplerConfig(kind="prioritized"), {1, 3}),
        (SamplerConfig(kind="tasks"), {1, 3}),
        (SamplerConfig(kind="uniform", only=StepFilter(phases=("recovery",))), {0, 2}),
    ],
)
@pytest.mark.parametrize("mixture", [(), (MixturePart((StepFilter(),)),)])
def test_what_an_algorithm_trains_on_applies_to_each_kind_of_sampler(
    store: Store, config: SamplerConfig, mixture: tuple[MixturePart, ...], numbers: set[int]
) -> None:
    phases = [Phase.RECOVERY, POLICY, Phase.RECOVERY, TELEOP]
    store.put(chunk(1, 0, 4, end=True, phase=phases, success=True), chunk(2, 0, 4))  # 2 is not finished
    selector = config.make_selector(("e1",), 0.5, mixture, finished=True, phases=("policy", "teleop"))
    with store.replay() as replay:
        assert seen(sampler(replay, selector).sample()) == {(1, step) for step in numbers}


class TestPrioritized:
    def test_rows_are_drawn_by_priority_and_weights_correct_it(self, store: Store) -> None:
        store.put(chunk(1, 0, 4, end=True), chunk(2, 0, 4))
        with store.replay() as replay:
            drawing = sampler(replay, PrioritizedSelector(config=PrioritizedConfig(alpha=0.5, beta=1.0)), 9_000)
            batch = drawing.sample()
            assert (batch.weight == 1).all(), "nothing is known yet: all are alike"
            first = part(batch, 0, 7)
            first.row[:] = np.arange(7)
            drawing.feedback(first, np.array([16.0, -16.0, 4.0, 1.0, 1.0, 1.0, np.nan]))
            batch = drawing.sample()
            powers = np.array([4, 4, 2, 1, 1, 1, 1])  # a TD error that is no number changes nothing
            np.testing.assert_allclose(np.bincount(batch.row, minlength=7), 9_000 * powers / powers.sum(), rtol=0.1)
            np.testing.assert_allclose(batch.weight, 1.0 / powers[batch.row], rtol=1e-4)

    def test_new_rows_get_maximum_priority_and_deleted_rows_none(self, store: Store) -> None:
        store.put(chunk(1, 0, 4, end=True))
        with store.replay() as replay:
            drawing = sampler(replay, PrioritizedSelector(config=PrioritizedConfig(alpha=1.0)), 1_000)
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
            drawing = sampler(
                replay, PrioritizedSelector(config=PrioritizedConfig(alpha=1.0, beta=0.0, beta_draws=100)), 100
            )
            drawing.feedback(drawing.sample(), np.full(100, 1.0))
            batch = drawing.sample()
            batch.row[:2] = [0, 1]
            drawing.feedback(part(batch, 0, 2), np.array([1.0, 4.0]))
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
            with pytest.raises(WireError, match="alpha 0.6; this sampler has alpha 1"):
                sampler(again, PrioritizedSelector(config=PrioritizedConfig(alpha=1.0))).load_state_dict(saved)


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
            selector = TaskBalancedSelector(config=TasksConfig(alpha=1.0, window=1))
            drawing = sampler(replay, selector, 400)
            for online, expected in ((1.0, 1 / (1 + np.exp(-0.5))), (9.0, 0.8), (-9.0, 0.2)):
                batch = drawing.sample()
                drawing.feedback(batch, np.where(batch.group == 1, online, 0.5))
                counts = np.bincount(drawing.sample().group, minlength=4)
                assert counts[1] == pytest.approx(200 * expected, abs=1) and counts[0] + counts[1] == 200
                assert counts[3] == 200, "stack has online steps only"
            saved = drawing.state_dict()
        with store.replay() as again:
            rebuilt = TaskBalancedSelector(config=TasksConfig(alpha=1.0, window=1))
            drawing = sampler(again, rebuilt, 400)
            drawing.load_state_dict(saved)
            assert np.bincount(drawing.sample().group)[1] in (40, 41)

    def test_task_or_source_filter_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="sets tasks and sources itself"):
            TaskBalancedSelector(StepFilter(tasks=("lift",)))


def test_mixture_of_an_algorithm_draws_its_parts_within_the_filter(store: Store) -> None:
    demo, online, by_person = EpisodeSource.DEMO, EpisodeSource.ONLINE, [Phase.TELEOP, Phase.POLICY, Phase.POLICY]
    store.put(chunk(1, 0, 3, end=True, source=demo), chunk(2, 0, 3, end=True, source=online, phase=by_person))
    store.put(chunk(3, 0, 3, end=True, source=online), chunk(4, 0, 3, end=True, source=demo, robot="other"))
    people = StepFilter(sources=(online,), phases=("teleop", "correction"))
    mixture = (MixturePart((StepFilter(sources=(demo,)),), 0.25), MixturePart((people,), 0.75))
    config = SamplerConfig(only=StepFilter(robots=("panda-0",)))
    with store.replay() as replay:
        batch = sampler(replay, config.make_selector(("e1",), 0.5, mixture), 100).sample()
        assert seen(part(batch, 0, 25)) == {(1, 0), (1, 1), (1, 2)}
        assert seen(part(batch, 25, 100)) == {(2, 0)}


def test_mixture_of_a_config_gives_roles_and_tasks_their_shares(store: Store) -> None:
    store.put(
        chunk(1, 0, 2, end=True, source=EpisodeSource.DEMO, task="old"),
        chunk(2, 0, 2, end=True, source=EpisodeSource.DEMO, task="new"),
        chunk(3, 0, 2, end=True, task="new", phase=[POLICY, TELEOP]),
        chunk(4, 0, 2, end=True, task="new", success=False),
        chunk(5, 0, 2, end=True, task="old", success=None),
        chunk(6, 0, 2, end=True, source=EpisodeSource.EVALUATION),
    )
    config = SamplerConfig(
        mixture=(
            MixturePartConfig(("demonstrations", "successes"), ("old",), share=2.0),
            MixturePartConfig(("interventions",)),
            MixturePartConfig(("failures",)),
            MixturePartConfig(tasks=("new",), share=4.0),
        )
    )
    assert not config.is_unfiltered_mixture
    with store.replay() as replay:
        batch = sampler(replay, config.make_selector(("e1",), 0.5, [MixturePart((StepFilter(),))]), 80).sample()
    parts = [seen(part(batch, *bounds)) for bounds in ((0, 20), (20, 30), (30, 40), (40, 80))]
    rows = {number: {(number, 0), (number, 1)} for number in range(1, 6)}
    assert parts == [rows[1], {(3, 1)}, rows[4], rows[2] | rows[3] | rows[4]]


@pytest.mark.parametrize("kind", ["uniform", "tasks"])
def test_mixture_of_another_kind_is_refused(kind: SelectorKind) -> None:
    with pytest.raises(ConfigError, match="mixture does not apply"):
        SamplerConfig(kind=kind, mixture=(MixturePartConfig(),))


def test_steps_without_an_action_have_no_weight_and_no_mask(store: Store) -> None:
    film = chunk(2, 0, 3, end=True, source=EpisodeSource.DEMO)
    for name in ("action", APPLIED_ACTION):
        del film.columns[name]
    store.put(chunk(1, 0, 3, end=True), film)
    with store.replay() as replay:
        batch = Sampler(replay, UniformSelector(), BatchSpec(chunk_length=2), 64).sample()
    filmed = batch.observation["observation.state"][:, 0] == 2
    assert 0 < filmed.sum() < 64
    assert not batch.weight[filmed].any() and (batch.weight[~filmed] == 1).all()
    assert not batch.mask[filmed].any() and batch.mask[~filmed, 0].all()
    assert (
        not batch.action[filmed].any()
        and (batch.reward[filmed] == batch.observation["observation.state"][filmed, 1]).all()
    )
