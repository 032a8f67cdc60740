"""The index: permanent rows, links between chunks in any order, and labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from episode_kit import chunk_header
from hypothesis import given, settings
from hypothesis import strategies as st

from user_sys.episode import Chunk, EpisodeEnd, Phase
from user_sys.errors import WireError
from user_sys.store.index import EpisodeSummary, Index, summarise_episodes
from user_sys.store.index_block import CHUNK_KIND, IndexBlock, IndexBlockBuilder, decode_block
from user_sys.store.labels import (
    DeleteLabel,
    Label,
    PhaseLabel,
    RewardLabel,
    SuccessLabel,
    TrimLabel,
    UndoLabel,
    encode_label,
)
from user_sys.store.record_format import RecordRef

LABEL = 2


def chunk(episode: str, index: int, steps: int = 3, *, last: bool = False) -> Chunk:
    """Chunk `index` of an episode whose chunks all have `steps` steps; the reward of a step is its number."""
    at = np.arange(index * steps, (index + 1) * steps)
    header = chunk_header(
        episode,
        steps,
        index=index,
        first_step=index * steps,
        seed=7,
        started_unix_ns=1000,
        end=EpisodeEnd(steps=int(at[-1]) + 1, success=True) if last else None,
        unix_offset_ns=50,
    )
    columns = {"reward": at.astype(np.float32), "policy_version": at.astype(np.int64), "t_capture_ns": at * 10}
    return Chunk(header, columns, {})


def block(*records: Chunk | Label, first: int = 0) -> IndexBlock:
    """A block of these records, numbered from `first` on, decoded as from a segment's footer."""
    builder = IndexBlockBuilder()
    for n, record in enumerate(records):
        payload = record.encode() if isinstance(record, Chunk) else encode_label(record)
        kind = CHUNK_KIND if isinstance(record, Chunk) else LABEL
        builder.add(RecordRef(0, 100 * (first + n), len(payload), kind, first + n), payload)
    return decode_block(builder.build().encode())


def indexed(*blocks: IndexBlock) -> Index:
    index = Index()
    index.apply(blocks)
    return index


def walk(index: Index, row: int) -> list[int]:
    """The step numbers reached from a row."""
    numbers = []
    while row >= 0:
        numbers.append(int(index.step_of(np.array([row]))[0]))
        row = int(index.successor(np.array([row]))[0])
    return numbers


def label(kind: type[Label], **fields: object) -> Label:
    return kind(episode="a", labeller="ada", at_unix_ns=1, **fields)  # type: ignore[arg-type]


def label_at(at: int, kind: type[Label], **what: object) -> Label:
    return kind(episode="a", labeller="ada", at_unix_ns=at, **what)  # type: ignore[arg-type]


def test_steps_have_recorded_values_and_unix_times() -> None:
    index = indexed(block(chunk("a", 0), chunk("b", 0), chunk("a", 1, last=True)))
    assert index.steps.reward.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert index.steps.time_unix_ns[:3].tolist() == [50, 60, 70]
    assert index.steps.chunk.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert index.step_of(np.arange(9)).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert index.successor(np.arange(9)).tolist() == [1, 2, 6, 4, 5, -1, 7, 8, -1]
    assert index.observation_before(np.arange(9)).tolist() == list(range(9))
    assert index.observation_after(np.arange(9)).tolist() == [1, 2, 6, 4, 5, -1, 7, 8, 9]
    a, b = index.episodes.find("a"), index.episodes.find("b")
    assert index.episodes.complete[[a, b]].tolist() == [True, False]
    assert index.episodes.success[[a, b]].tolist() == [1, -1]
    assert index.episodes.tasks.names[index.episodes.task[a]] == "lift"
    assert index.episodes.find("c") == -1


@settings(deadline=None)
@given(order=st.permutations(range(7)), cuts=st.sets(st.integers(1, 6)), twice=st.sets(st.integers(0, 6)))
def test_episode_is_linked_in_any_chunk_order(order: list[int], cuts: set[int], twice: set[int]) -> None:
    sent: list[Chunk] = []
    for i in order:
        sent += [chunk("a", i, last=i == 6)] * (1 + (i in twice))
    index, at = Index(), 0
    for stop in [*sorted(cuts), len(sent)]:
        if stop > at:
            index.apply([block(*sent[at:stop], first=at)])
            at = stop
    assert len(index.chunks) == 7 and len(index.steps) == 21
    first = int(index.chunks.first_row[order.index(0)])
    assert walk(index, first) == list(range(21))
    assert index.episodes.complete[0] and index.episodes.steps[0] == 21


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_index_is_independent_of_block_boundaries(data: st.DataObject) -> None:
    steps = st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.integers(0, 5))
    records: list[Chunk | Label] = []
    for at, (name, i, kind) in enumerate(data.draw(st.lists(steps, max_size=25))):
        labels: list[Label] = [
            RewardLabel(episode=name, labeller="x", at_unix_ns=at, first_step=i, rewards=(9.0, float(i))),
            SuccessLabel(episode=name, labeller="x", at_unix_ns=at, success=(True, False, None)[i % 3]),
            UndoLabel(episode=name, labeller="x", at_unix_ns=at, undone_at_unix_ns=at - i),
        ]
        records.append(labels[kind] if kind < len(labels) else chunk(name, i, last=i == 4))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(records)))))
    edges = [0, *cuts, len(records)]
    parts = [block(*records[a:b], first=a) for a, b in zip(edges, edges[1:], strict=False)]
    whole, together, apart = indexed(block(*records)), indexed(*parts), Index()
    summaries = dict[int, EpisodeSummary]()
    for part in parts:
        before = apart.updates
        apart.apply([part])
        rows = apart.updated_episodes(before)
        summaries.update(zip(rows.tolist(), summarise_episodes(apart, rows), strict=True))
    assert list(summaries.values()) == summarise_episodes(whole)
    for other in (together, apart):
        for left, right in ((whole.steps, other.steps), (whole.chunks, other.chunks), (whole.episodes, other.episodes)):
            for name in left.DTYPES.keys() - {"reward_source"}:
                np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
        assert reward_sources(whole) == reward_sources(other)


def reward_sources(index: Index) -> list[str]:
    return [index.episodes.reward_sources.names[code] for code in index.episodes.reward_source.tolist()]


def test_newest_label_wins_before_and_after_steps() -> None:
    early = [label(RewardLabel, first_step=2, rewards=(5.0, 6.0)), label(SuccessLabel, success=False)]
    index = indexed(block(*early, chunk("a", 0), chunk("a", 1, last=True)))
    assert index.steps.reward.tolist() == [0, 1, 5, 6, 4, 0] and index.episodes.success[0] == 0
    change = index.apply([block(label(RewardLabel, first_step=3, rewards=(7.0,)), label(SuccessLabel, success=None))])
    assert index.steps.reward.tolist() == [0, 1, 5, 7, 4, 5] and index.episodes.success[0] == -1
    assert change.relabelled.tolist() == list(range(6)) and not change.rows and not len(change.dropped)
    index.apply([block(label(PhaseLabel, first_step=1, steps=2, phase=Phase.CORRECTION))])
    assert index.steps.phase.tolist() == [0, 2, 2, 0, 0, 0]
    assert [label.labeller for label in index.labels("a")] == ["ada"] * 5


def test_success_label_sets_last_reward_and_terminates() -> None:
    index = indexed(block(label(SuccessLabel, success=False), chunk("a", 0)))
    assert index.steps.reward.tolist() == [0, 1, 2], "no end is stored yet"
    index.apply([block(chunk("a", 1, last=True))])
    assert index.steps.reward.tolist() == [0, 1, 2, 3, 4, 0] and not index.steps.terminated.any()
    index.apply([block(label(SuccessLabel, success=True))])
    assert index.steps.reward.tolist() == [0, 1, 2, 3, 4, 1]
    assert index.steps.terminated.tolist() == [False] * 5 + [True] and not index.steps.truncated.any()
    index.apply([block(label(SuccessLabel, success=None))])
    assert index.steps.reward[5] == 5 and not index.steps.terminated.any() and index.episodes.success[0] == -1
    index.apply([block(label(SuccessLabel, success=False, keep_reward=True))])
    assert index.steps.reward[5] == 5 and index.episodes.success[0] == 0
    index.apply([block(label(SuccessLabel, success=True), label(RewardLabel, first_step=5, rewards=(0.25,)))])
    assert index.steps.reward[5] == 0.25 and index.steps.terminated[5]


def test_undo_removes_newest_labels_first() -> None:
    index = indexed(block(chunk("a", 0), chunk("a", 1, last=True)))
    before = index.steps.reward.tolist(), index.steps.phase.tolist()
    index.apply([block(label_at(1, SuccessLabel, success=False), label_at(2, SuccessLabel, success=True))])
    both = [label_at(3, PhaseLabel, first_step=0, steps=2, phase=Phase.RECOVERY), label_at(3, DeleteLabel)]
    index.apply([block(*both)])
    assert index.steps.reward[5] == 1 and index.episodes.deleted[0]
    change = index.apply([block(label_at(4, UndoLabel, undone_at_unix_ns=3))])
    assert index.steps.phase.tolist() == before[1] and not index.episodes.deleted[0]
    assert change.revived.tolist() == list(range(6)) and index.steps.reward[5] == 1
    index.apply([block(label_at(5, UndoLabel, undone_at_unix_ns=2))])
    assert index.steps.reward[5] == 0 and index.episodes.success[0] == 0 and not index.steps.terminated.any()
    index.apply([block(label_at(6, UndoLabel, undone_at_unix_ns=1))])
    assert index.steps.reward.tolist() == before[0] and index.episodes.success[0] == 1
    assert index.episodes.reward_sources.names[index.episodes.reward_source[0]] == "rule"


def test_newest_step_that_is_lost_leaves_the_one_before_it() -> None:
    index = indexed(block(chunk("a", 0)))
    before = index.newest_steps().time_unix_ns.tolist()
    index.apply([block(chunk("a", 1), first=1)])
    after = index.newest_steps().time_unix_ns.tolist()
    assert (before, after) == ([int(index.steps.time_unix_ns[2])], [int(index.steps.time_unix_ns[5])])
    index.mark_gone(np.array([1]))
    assert index.newest_steps().time_unix_ns.tolist() == before


def test_persons_label_wins_over_a_reward_that_is_stored_later() -> None:
    index = indexed(block(chunk("a", 0), chunk("a", 1, last=True), label_at(1, SuccessLabel, success=False)))
    common = {"episode": "a", "labeller": "reward:vlm", "at_unix_ns": 2}
    found = SuccessLabel(success=True, keep_reward=True, **common)  # type: ignore[arg-type]
    index.apply([block(found, RewardLabel(first_step=4, rewards=(0.5, 0.75), **common))])  # type: ignore[arg-type]
    (summary,) = summarise_episodes(index)
    assert (summary.success, summary.labelled_by, summary.reward_source) == (False, "ada", "person")
    assert index.steps.reward.tolist() == [0, 1, 2, 3, 0.5, 0] and not index.steps.terminated.any()
    index.apply([block(label_at(3, UndoLabel, undone_at_unix_ns=1))])
    (summary,) = summarise_episodes(index)
    assert (summary.success, summary.labelled_by, summary.reward_source) == (True, "reward:vlm", "reward:vlm")
    assert index.steps.reward[5] == 0.75


def test_success_that_keeps_the_reward_terminates() -> None:
    index = indexed(block(chunk("a", 0), chunk("a", 1, last=True)))
    index.apply([block(label(SuccessLabel, success=True, keep_reward=True))])
    assert index.steps.reward[5] == 5
    assert index.steps.terminated.tolist() == [False] * 5 + [True] and not index.steps.truncated.any()


def test_trimmed_success_ends_with_the_last_kept_step() -> None:
    index = indexed(block(chunk("a", 0), chunk("a", 1, last=True)))
    index.apply([block(label_at(1, SuccessLabel, success=True), label_at(2, TrimLabel, first_step=1, steps=3))])
    assert index.steps.alive.tolist() == [False, True, True, True, False, False]
    assert index.steps.reward[:4].tolist() == [0, 1, 2, 1] and index.steps.reward.sum() == 0 + 1 + 2 + 3 + 4 + 1
    assert index.steps.terminated[3] and not index.steps.truncated.any()
    index.apply([block(label_at(3, TrimLabel, first_step=4, steps=2))])
    assert index.steps.reward.tolist() == [0, 1, 2, 3, 4, 1], "the recorded last step is kept"
    assert np.flatnonzero(index.steps.terminated).tolist() == [5]
    index.apply([block(*(label_at(4 + at, UndoLabel, undone_at_unix_ns=at) for at in (1, 2, 3)))])
    assert index.steps.reward.tolist() == [0, 1, 2, 3, 4, 5] and not index.steps.terminated.any()


def test_trimmed_failure_is_truncated_at_the_last_kept_step() -> None:
    index = indexed(block(chunk("a", 0), chunk("a", 1, last=True), label_at(1, SuccessLabel, success=False)))
    index.apply([block(label_at(2, TrimLabel, first_step=0, steps=3))])
    assert index.steps.reward.tolist() == [0, 1, 2, 3, 4, 0] and not index.steps.terminated.any()
    assert np.flatnonzero(index.steps.truncated).tolist() == [2]


def test_gone_chunk_has_no_predecessor_link() -> None:
    index = indexed(block(chunk("a", 0), chunk("a", 1), chunk("a", 2, last=True)))
    assert index.mark_gone(np.array([1])).tolist() == [3, 4, 5]
    assert index.mark_gone(np.array([1])).tolist() == []
    assert walk(index, 0) == [0, 1, 2] and walk(index, 6) == [6, 7, 8]
    index.apply([block(label(DeleteLabel)), block(label(DeleteLabel, deleted=False))])
    assert index.chunks.alive.tolist() == [True, False, True] and index.steps.alive.sum() == 6


@settings(deadline=None)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_damaged_block_is_refused_or_consistent(position: int, value: int) -> None:
    raw = bytearray(_encoded((chunk("a", 0), chunk("b", 0, last=True), label(DeleteLabel))))
    raw[position % len(raw)] = value
    try:
        found = decode_block(bytes(raw))
    except WireError:
        return
    assert found.chunks["steps"].sum() == len(found.steps["reward"])
    assert (found.chunks["episode"] < len(found.episodes)).all()


def _encoded(records: Sequence[Chunk | Label]) -> bytes:
    return block(*records).encode()
