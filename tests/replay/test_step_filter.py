"""Step filters, and their independence of the order of ingestion."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from replay_kit import Store, chunk

from user_sys.episode import MAX_STEPS_PER_CHUNK, EpisodeSource, Phase
from user_sys.replay.selectors import INTERVENTION_PHASES, AnyStepFilter, EligibleSteps, StepFilter, StepFilterUnion
from user_sys.store.index import Index
from user_sys.store.index_block import CHUNK_KIND, LABEL_KIND, IndexBlockBuilder
from user_sys.store.labels import DeleteLabel, Label, PhaseLabel, SuccessLabel, encode_label
from user_sys.store.record_format import RecordRef

POLICY, TELEOP = Phase.POLICY, Phase.TELEOP


@pytest.mark.parametrize(
    ("where", "episodes"),
    [
        (StepFilter(), {1, 2, 3, 4}),
        (StepFilter(sources=(EpisodeSource.DEMO,)), {1}),
        (StepFilter(embodiments=("e2",)), {3}),
        (
            StepFilter(
                robots=(
                    "ur-1",
                    "unheard-of",
                )
            ),
            {2},
        ),
        (StepFilter(tasks=("stack",)), {4}),
        (StepFilter(success=False), {2}),
        (StepFilter(max_age_s=5.0), {2, 3, 4}),
        (StepFilter(max_age_versions=1), {2, 4}),
        (StepFilter(embodiments=("e2",), max_age_versions=1), {3}),
        (StepFilter(embodiments=("e1",), max_age_versions=100), {2, 4}),
        (StepFilter(embodiments=("e1",), success=True), {1, 4}),
        (StepFilterUnion(((StepFilter(embodiments=("e2",)),), (StepFilter(success=False),))), {2, 3}),
        (StepFilterUnion(((StepFilter(embodiments=("e1",)), StepFilter(success=False)),)), {2}),
    ],
)
def test_filters_by_episode_age_and_version(store: Store, where: AnyStepFilter, episodes: set[int]) -> None:
    store.put(
        chunk(1, 0, 2, end=True, source=EpisodeSource.DEMO, version=-1, at_s=1.0),
        chunk(2, 0, 2, end=True, robot="ur-1", version=8, at_s=2.0, success=False),
        chunk(3, 0, 2, end=True, embodiment="e2", version=3, at_s=9.0),
        chunk(4, 0, 2, end=True, task="stack", version=9, at_s=11.0),
    )
    with store.replay() as replay:
        eligible = EligibleSteps(where)
        replay.subscribe(eligible.update)
        found = replay.index.episode_of(eligible.rows.astype(np.int64)) + 1
        assert set(found.tolist()) == episodes and len(found) == 2 * len(episodes)


def test_version_numbers_with_which_no_policy_acted_add_no_age(store: Store) -> None:
    eligible = [EligibleSteps(StepFilter(max_age_versions=each, embodiments=("e1",))) for each in (0, 1)]
    with store.replay() as replay:
        for each in eligible:
            replay.subscribe(each.update)
        store.put(
            chunk(1, 0, 4, end=True, version=8),
            chunk(2, 0, 4, end=True, version=9),
            chunk(3, 0, 4, end=True, version=2009),  # a resumed learner skips numbers
            chunk(4, 0, 4, end=True, version=2009, embodiment="e2"),
            chunk(5, 0, 4, end=True, version=2010, embodiment="e2"),
        )
        replay.refresh()
        assert [each.rows.tolist() for each in eligible] == [[*range(8, 12)], [*range(4, 12)]]


def test_age_counts_from_the_newest_living_step_of_the_same_robot(store: Store) -> None:
    eligible = EligibleSteps(StepFilter(max_age_s=60.0))
    with store.replay() as replay:
        replay.subscribe(eligible.update)
        store.put(
            chunk(1, 0, 4, end=True, at_s=100.0),
            chunk(2, 0, 4, end=True, at_s=7300.0, robot="ahead"),
            chunk(3, 0, 4, end=True, at_s=7300.0),  # before the robot's clock was set right
        )
        replay.refresh()
        assert eligible.rows.tolist() == [*range(4, 12)]
        store.put(DeleteLabel(episode="ep-3", labeller="ana", at_unix_ns=1))
        replay.refresh()
        assert eligible.rows.tolist() == [*range(8)]
        store.put(DeleteLabel(episode="ep-3", labeller="ana", at_unix_ns=2, deleted=False))
        replay.refresh()
        assert eligible.rows.tolist() == [*range(4, 12)]


def test_age_counts_from_the_last_online_step_when_the_clock_was_set_back(store: Store) -> None:
    eligible, late = EligibleSteps(StepFilter(max_age_s=60.0)), EligibleSteps(StepFilter(max_age_s=60.0))
    with store.replay() as replay:
        replay.subscribe(eligible.update)
        store.put(chunk(1, 0, 4, end=True, at_s=7300.0))
        replay.refresh()
        store.put(chunk(2, 0, 4, end=True, at_s=100.0))
        replay.refresh()
        assert eligible.rows.tolist() == [*range(8)]
        store.put(chunk(3, 0, 4, end=True, at_s=300.0))
        replay.refresh()
        assert eligible.rows.tolist() == [*range(4), *range(8, 12)]
        store.put(chunk(4, 0, 4, end=True, at_s=1.0, source=EpisodeSource.DEMO))  # imported: of another clock
        replay.refresh()
        assert eligible.rows.tolist() == [*range(4), *range(8, 12)]
        replay.subscribe(late.update)
        assert late.rows.tolist() == eligible.rows.tolist()


def test_age_counts_from_the_newest_step_of_chunks_that_were_stored_before_the_run(store: Store) -> None:
    store.put(chunk(1, 0, 4, end=True, at_s=7300.0), chunk(2, 0, 4, end=True, at_s=100.0))  # the second is merged
    eligible = EligibleSteps(StepFilter(max_age_s=60.0))
    with store.replay() as replay:
        replay.subscribe(eligible.update)
        assert eligible.rows.tolist() == [*range(4)]
        store.put(chunk(3, 0, 4, end=True, at_s=300.0))
        replay.refresh()
        assert eligible.rows.tolist() == [*range(4), *range(8, 12)]
        store.put(DeleteLabel(episode="ep-2", labeller="ana", at_unix_ns=1))
        replay.refresh()
        assert eligible.rows.tolist() == [*range(4), *range(8, 12)]


@pytest.mark.parametrize("where", [StepFilter(max_age_s=60.0), StepFilter(max_age_versions=1)])
def test_age_of_new_steps_takes_no_pass_over_the_old_ones(where: StepFilter) -> None:
    index, steps = Index(), MAX_STEPS_PER_CHUNK
    for numbers in (range(120), range(120, 121)):
        builder, first = IndexBlockBuilder(), len(index.steps)
        for number in numbers:
            payload = chunk(1, number * steps, steps, index=number).encode()
            builder.add(RecordRef(0, 0, len(payload), CHUNK_KIND, number), payload)
        index.apply([builder.build()])
        tracemalloc.start()
        try:
            assert where.matches(index, first).sum() == steps * len(numbers)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak_bytes < 60 * steps, "a pass takes at least a byte a step"


def test_phase_filter_uses_labels(store: Store) -> None:
    store.put(chunk(1, 0, 4, end=True, phase=[POLICY, TELEOP, POLICY, Phase.CORRECTION]))
    with store.replay() as replay:
        eligible = EligibleSteps(StepFilter(phases=INTERVENTION_PHASES))
        replay.subscribe(eligible.update)
        assert eligible.rows.tolist() == [1, 3]
        store.put(PhaseLabel(episode="ep-1", labeller="a", at_unix_ns=1, first_step=0, steps=2, phase=Phase.RECOVERY))
        replay.refresh()
        assert eligible.rows.tolist() == [3]


@pytest.mark.parametrize("success", [True, False])
def test_success_filter_takes_earlier_chunks_when_their_episode_ends(store: Store, success: bool) -> None:
    outcomes = [StepFilter(success=True), StepFilterUnion(((StepFilter(success=False),),))]
    with store.replay() as replay:
        found = [EligibleSteps(each) for each in outcomes]
        for each in found:
            replay.subscribe(each.update)
        for index in range(3):
            store.put(chunk(1, 4 * index, 4, index=index, end=index == 2, success=success))
            replay.refresh()
        assert [len(each) for each in found] == ([12, 0] if success else [0, 12])


def test_finished_filter_waits_for_the_end_and_for_all_chunks_before_it(store: Store) -> None:
    eligible = EligibleSteps(StepFilter(finished=True))
    counts = []
    with store.replay() as replay:
        replay.subscribe(eligible.update)
        for index in (0, 2, 1):
            store.put(chunk(1, 4 * index, 4, index=index, end=index == 2))
            replay.refresh()
            counts.append(len(eligible))
    assert counts == [0, 0, 12]


Record = tuple[int, int, bool]
records = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.booleans()), max_size=30)


def _blocks(plan: list[Record]) -> list[IndexBlockBuilder]:
    """One block per record: chunks of five robots' episodes, and labels for them."""
    at = {robot: (robot, 0, 0) for robot in range(5)}
    blocks = []
    for number, (robot, what, end) in enumerate(plan):
        episode, first, index = at[robot]
        payload, kind = b"", CHUNK_KIND
        if what < 4:
            steps = what + 1
            payload = chunk(
                episode,
                first,
                steps,
                index=index,
                end=end,
                version=number,
                at_s=float(number),
                phase=what % 2,
                robot=f"r{robot % 2}",
            ).encode()
            at[robot] = (episode + 5, 0, 0) if end else (episode, first + steps, index + 1)
        else:
            label: Label = (
                SuccessLabel(episode=f"ep-{episode}", labeller="a", at_unix_ns=1, success=end)
                if what == 4
                else DeleteLabel(episode=f"ep-{episode}", labeller="a", at_unix_ns=1, deleted=end)
            )
            payload, kind = encode_label(label), LABEL_KIND
        builder = IndexBlockBuilder()
        builder.add(RecordRef(0, 1000 * number, len(payload), kind, number), payload)
        blocks.append(builder)
    return blocks


FILTERS: list[AnyStepFilter] = [
    StepFilter(),
    StepFilter(success=True),
    StepFilter(finished=True),
    StepFilter(phases=("teleop",)),
    StepFilter(max_age_s=6.0),
    StepFilterUnion(((StepFilter(max_age_versions=9),), (StepFilter(phases=("teleop",)),))),
]


@settings(max_examples=60, deadline=None)
@given(plan=records, cuts=st.lists(st.integers(0, 30), max_size=8), which=st.integers(0, len(FILTERS) - 1))
@example(plan=[(0, 3, False), (1, 0, False), (0, 0, True)], cuts=[1, 2], which=1)
def test_eligible_steps_depend_only_on_content(plan: list[Record], cuts: list[int], which: int) -> None:
    """Incremental and complete updates give the rows that a direct check of each row finds."""
    blocks = [builder.build() for builder in _blocks(plan)]
    edges = sorted({0, len(blocks), *(cut for cut in cuts if cut < len(blocks))})
    index, whole, eligible = Index(), Index(), EligibleSteps(FILTERS[which])
    whole.apply(blocks)
    for start, stop in zip(edges, edges[1:], strict=False):
        eligible.update(index, index.apply(blocks[start:stop]))
    rows = np.arange(len(index.steps))
    plain = FILTERS[which].matches(whole, 0) & (index.observation_after(rows) >= 0)
    assert eligible.rows.tolist() == np.flatnonzero(plain).tolist()


@settings(max_examples=40, deadline=None)
@given(plan=records)
def test_observation_numbers_find_the_next_observation(plan: list[Record]) -> None:
    index = Index()
    for builder in _blocks(plan):
        index.apply([builder.build()])
    rows = np.arange(len(index.steps))
    numbers = index.observation_before(rows)
    assert len(set(numbers.tolist())) == len(rows)
    chunks, steps = index.locate_observations(numbers)
    assert (chunks == index.steps.chunk).all()
    assert (steps == rows - index.chunks.first_row[index.steps.chunk]).all()
    following, successor = index.observation_after(rows), index.successor(rows)
    for row in rows.tolist():
        if successor[row] >= 0:
            assert following[row] == numbers[successor[row]]
        else:
            assert following[row] < 0 or bool(index.chunks.has_final[index.steps.chunk[row]])
    assert index.observation_count == len(rows) + int(index.chunks.has_final.sum())
