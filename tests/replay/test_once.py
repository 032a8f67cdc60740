"""Selection for on-policy algorithms: each window once, in order, and none of an old version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from replay_kit import STATE, Store, chunk

from user_sys.codec import Array
from user_sys.episode import Chunk, EpisodeSource, Phase
from user_sys.errors import StoreCorrupt
from user_sys.replay.batches import BatchSpec
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.once import OnceSelector
from user_sys.replay.sampler import Sampler
from user_sys.replay.selectors import SelectorState, StepFilter
from user_sys.store.labels import DeleteLabel


class Drawing:
    """A sampler of `batch_size` windows."""

    def __init__(
        self,
        replay: ReplayBuffer,
        staleness: int | None,
        length: int,
        batch_size: int,
        rank: int,
        world: int,
        within_phase: bool,
    ) -> None:
        only = StepFilter(sources=("online",))
        self.selector = OnceSelector(only, staleness, length, rank, world, within_phase=within_phase)
        spec = BatchSpec(n_step=length, discount=0.5, chunk_length=length, sequence=True, within_phase=within_phase)
        self.replay, self.sampler = replay, Sampler(replay, self.selector, spec, batch_size)

    def refresh(self, *versions: int) -> None:
        for version in versions:
            self.selector.add_version(version, self.replay.index)
        self.replay.refresh()

    def windows(self) -> list[tuple[int, int, int]]:
        """Episode, first step and steps of each window that can be drawn now."""
        found = []
        while self.sampler.is_ready:
            batch = self.sampler.sample()
            first = batch.observation["observation.state"][:, 0, :2].astype(int).tolist()
            found += [(*start, steps) for start, steps in zip(first, batch.mask.sum(1).tolist(), strict=True)]
        return found

    def state(self) -> SelectorState:
        return self.sampler.state_dict()


@contextmanager
def drawing(
    store: Store,
    staleness: int | None = None,
    length: int = 2,
    batch_size: int = 1,
    rank: int = 0,
    world: int = 1,
    within_phase: bool = False,
) -> Iterator[Drawing]:
    with store.replay(STATE) as replay:
        yield Drawing(replay, staleness, length, batch_size, rank, world, within_phase)


def test_windows_come_once_in_order_as_they_get_complete(store: Store) -> None:
    with drawing(store) as made:
        store.put(chunk(1, 0, 3), chunk(2, 0, 4))
        made.refresh()
        assert made.windows() == [(1, 0, 2), (2, 0, 2)], "the others lack a step, or the observation after them"
        store.put(chunk(1, 3, 2, index=1, end=True), chunk(2, 4, 1, index=1, end=True))
        made.refresh()
        assert made.windows() == [(1, 2, 2), (2, 2, 2), (1, 4, 1), (2, 4, 1)] and not made.windows()
        assert (made.selector.used, made.selector.stale) == (6, 0)


@pytest.mark.parametrize("again", [False, True])
def test_windows_start_again_where_the_policy_gets_control_back(store: Store, again: bool) -> None:
    person = {2: Phase.CORRECTION, 3: Phase.CORRECTION, 4: Phase.RECOVERY, 12: Phase.CORRECTION}
    with drawing(store, within_phase=True) as made:
        for index in range(5):
            steps = range(3 * index, 3 * index + 3)
            found = chunk(1, steps.start, 3, index=index, end=index == 4, phase=[person.get(n, 0) for n in steps])
            found.columns["policy_version"][[n in person for n in steps]] = -1
            store.put(found, chunk(2 + index, 0, 2, end=True))
            if again:
                made.refresh()
        made.refresh()
        windows = [each for each in made.windows() if each[0] == 1]
        assert windows == [(1, 0, 2), (1, 5, 2), (1, 7, 2), (1, 9, 2), (1, 11, 1), (1, 13, 2)]


@pytest.mark.parametrize("version", [-1, 0])
@pytest.mark.parametrize("terminated", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_step_of_a_label_after_a_window_counts_there(store: Store, length: int, terminated: bool, version: int) -> None:
    """The robot rests in the label's step, so that no policy acts in it."""
    labelled = chunk(1, 0, 5, end=True)
    labelled.columns["policy_version"][-1] = version
    labelled.columns["terminated"][-1], labelled.columns["truncated"] = terminated, np.zeros(5, bool)
    labelled.columns["truncated"][-1] = not terminated
    with drawing(store, length=length, within_phase=True) as made:
        store.put(labelled)
        made.refresh()
        while made.sampler.is_ready:
            last = made.sampler.sample()
    joins = version < 0 and length < 3
    first = 3 if length == 3 else 4 if not joins else 4 - length
    steps = int(last.mask.sum())
    assert (last.observation["observation.state"][0, 0, 1], bool(last.terminated[0])) == (first, terminated)
    wanted = [*range(first, first + steps)]
    np.testing.assert_array_equal(last.reward[0, :steps], [*wanted[:-1], wanted[-1] + 0.5 * 4 * joins])


def test_batch_waits_until_it_is_full(store: Store) -> None:
    with drawing(store, batch_size=3) as made:
        store.put(chunk(1, 0, 4, end=True))
        made.refresh()
        assert not made.sampler.is_ready and len(made.sampler) == 2
        store.put(chunk(2, 0, 4, end=True))
        made.refresh()
        assert made.windows() == [(1, 0, 2), (1, 2, 2), (2, 0, 2)] and len(made.sampler) == 1


def test_old_versions_people_and_deleted_episodes_are_left_out(store: Store) -> None:
    with drawing(store, staleness=1) as made:
        made.refresh(1, 2)
        store.put(*(chunk(n, 0, 2, end=True, version=n) for n in range(1, 5)), chunk(5, 0, 2, end=True, version=-1))
        made.refresh()
        assert made.windows() == [(1, 0, 2), (2, 0, 2)] and made.selector.stale == 2, "3 and 4 are of a lost course"
        store.put(*(chunk(10 + n, 0, 2, end=True, version=n) for n in range(1, 5)))
        store.put(DeleteLabel(episode="ep-13", labeller="ada", at_unix_ns=0))
        made.refresh(3, 4)
        assert made.windows() == [(14, 0, 2)] and made.selector.stale == 4


def test_window_whose_next_record_is_lost_is_left_out(store: Store) -> None:
    with drawing(store) as made:
        store.put(*(chunk(1, 3 * index, 3, index=index, end=index == 2) for index in range(3)))
        made.refresh()
        change = made.replay.index.apply([], [made.replay.index.chunks.sequence[1:2]])
        made.selector.update(made.replay.index, change)
        assert made.windows() == [(1, 0, 2), (1, 6, 2), (1, 8, 1)]


def unreadable(episode: int, steps: int = 4) -> Chunk:
    """An episode of one chunk; one value that is not finite makes all of it unusable."""
    found = chunk(episode, 0, steps, end=True)
    found.columns["observation.state"][1] = np.nan
    return found


def test_batch_without_a_readable_window_is_an_error(store: Store) -> None:
    with drawing(store, batch_size=2) as made:
        store.put(chunk(1, 0, 4, end=True, source=EpisodeSource.DEMO, version=-1), unreadable(2))
        made.refresh()
        with pytest.raises(StoreCorrupt, match="none of 2 windows can be read"):
            made.sampler.sample()
        assert not made.sampler.is_ready
        store.put(chunk(3, 0, 4, end=True))
        made.refresh()
        assert made.windows() == [(3, 0, 2), (3, 2, 2)]


def test_unreadable_windows_of_earlier_rounds_are_not_drawn_again(store: Store) -> None:
    with drawing(store, batch_size=3) as made:
        store.put(unreadable(1), chunk(2, 0, 2, end=True), unreadable(3, 2), chunk(4, 0, 2, end=True))
        made.refresh()
        batch = made.sampler.sample()
        assert batch.observation["observation.state"][:, 0, 0].tolist() == [4, 4, 2]
        assert made.sampler.redrawn == 2 + 1, "by the windows of 3 and 4, and then by a readable one"


def test_any_version_counts_without_a_bound(store: Store) -> None:
    with drawing(store) as made:
        store.put(*(chunk(n, 0, 2, end=True, version=n) for n in range(4)))
        made.refresh(100)
        assert len(made.windows()) == 4


def test_resumption_repeats_and_loses_nothing(store: Store) -> None:
    with drawing(store, staleness=3) as made:
        made.refresh(0, 3)
        store.put(chunk(1, 0, 3), chunk(2, 0, 8, end=True, version=3))
        made.refresh()
        first = [made.sampler.sample().row.item() for _ in range(2)]
        state = made.state()
    store.put(chunk(1, 3, 3, index=1, end=True), chunk(3, 0, 2, end=True))
    with drawing(store, staleness=3) as resumed:
        resumed.refresh()
        resumed.sampler.load_state_dict(state)
        assert first == [0, 3]
        assert resumed.windows() == [(1, 2, 2), (2, 2, 2), (2, 4, 2), (2, 6, 2), (1, 4, 2), (3, 0, 2)]
        assert resumed.selector.used == 8
        resumed.refresh(4, 5, 6)
        store.put(chunk(4, 0, 2, end=True, version=0), chunk(5, 0, 2, end=True, version=3))
        resumed.refresh()
        assert resumed.windows() == [(5, 0, 2)], "the versions before the resumption count too"


def test_ranks_share_the_episodes(store: Store) -> None:
    store.put(*(chunk(n, 0, 4, end=True) for n in range(6)))
    drawn: list[Array] = []
    for rank in range(2):
        with drawing(store, rank=rank, world=2) as made:
            made.refresh()
            drawn.append(np.array(made.windows()))
    together = np.concatenate(drawn)
    assert len(together) == 12 == len(np.unique(together, axis=0)) and len(drawn[0]) == len(drawn[1])


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_gets_windows_if_each_nth_episode_is_an_evaluation(store: Store, world: int) -> None:
    for number in range(1, 20 * world + 1):
        is_evaluation = number % world == 0
        source = EpisodeSource.EVALUATION if is_evaluation else EpisodeSource.ONLINE
        store.put(chunk(number, 0, 4, end=True, source=source))
    ready = []
    for rank in range(world):
        with drawing(store, rank=rank, world=world) as made:
            made.refresh()
            ready.append(len(made.sampler))
    assert sum(ready) == 2 * 20 * (world - 1) and min(ready) > 0.5 * max(ready)


def test_each_rank_gets_windows_of_one_long_episode(store: Store) -> None:
    with drawing(store, rank=0, world=2) as first, drawing(store, rank=1, world=2) as second:
        store.put(*(chunk(1, 10 * index, 10, index=index) for index in range(5)))
        for made in (first, second):
            made.refresh()
        windows = [made.windows() for made in (first, second)]
    assert sorted(len(each) for each in windows) == [12, 12]
    assert sorted(windows[0] + windows[1]) == [(1, step, 2) for step in range(0, 48, 2)]


def test_another_number_of_ranks_repeats_nothing(store: Store) -> None:
    store.put(chunk(1, 0, 4, end=True))
    with drawing(store) as made:
        made.refresh()
        read = int(made.replay.index.chunks.sequence.max())
        store.put(chunk(2, 0, 4, end=True))
        made.refresh()
        made.selector.skip(read, made.replay.index)
        assert made.windows() == [(2, 0, 2), (2, 2, 2)]
