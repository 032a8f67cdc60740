"""Uniform transitions: only true ones are drawn, and all of them can be."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_kit import CAMERA, PICTURES, STATE, Store, chunk, grey, odd, raw, seen

from user_sys.errors import ConfigError, StoreCorrupt, StoreError
from user_sys.replay.batches import BatchSpec, ObservationFeatures, ReadPlan
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.sampler import Sampler
from user_sys.replay.selectors import UniformSelector
from user_sys.store.labels import DeleteLabel, RewardLabel, SuccessLabel, UndoLabel
from user_sys.store.log_reader import SegmentFileCache
from user_sys.store.maintenance import add_labels, compact_store
from user_sys.store.record_format import SegmentName
from user_sys.store.store import StoreWriter


def sampler(replay: ReplayBuffer, n: int = 400, seed: int = 0) -> Sampler:
    return Sampler(replay, UniformSelector(), BatchSpec(), n, seed=seed)


def everything(replay: ReplayBuffer) -> set[tuple[int, int]]:
    drawing = sampler(replay)
    return seen(drawing.sample()) if len(drawing) else set()


def test_complete_episode_yields_each_transition(store: Store) -> None:
    store.put(chunk(1, 0, 5, end=True))
    with store.replay() as replay:
        assert everything(replay) == {(1, step) for step in range(5)}
        batch = sampler(replay).sample()
        np.testing.assert_array_equal(batch.terminated, batch.reward == 4)
        assert (batch.weight == 1).all() and (batch.discount == 1).all()


def test_newest_step_waits_for_its_next_observation(store: Store) -> None:
    store.put(chunk(1, 0, 3))
    with store.replay() as replay:
        drawing = sampler(replay)
        assert seen(drawing.sample()) == {(1, 0), (1, 1)}
        store.put(chunk(1, 3, 1, index=1))
        replay.refresh()
        assert seen(drawing.sample()) == {(1, 0), (1, 1), (1, 2)}
        store.put(chunk(1, 4, 1, index=2, end=True))
        replay.refresh()
        assert seen(drawing.sample()) == {(1, step) for step in range(5)}


plans = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans(), st.booleans()), max_size=25)


@settings(max_examples=25, deadline=None)
@given(plan=plans, cache_rows=st.integers(1, 30), refreshes=st.integers(1, 5))
def test_only_true_transitions_with_any_input_and_cache(
    plan: list[tuple[int, int, bool, bool]], cache_rows: int, refreshes: int
) -> None:
    """`plan` has for each chunk: robot, number of steps, end of the episode, loss of the chunk."""
    at = {robot: (robot, 0, 0) for robot in range(4)}  # episode, next step, next index
    known, expected = set(), set()
    with tempfile.TemporaryDirectory() as folder, StoreWriter.open(Path(folder) / "store") as writer:
        store = Store(Path(folder) / "store", writer)
        with store.replay(cache_bytes=cache_rows * 64) as replay:
            drawing = sampler(replay)
            for number, (robot, steps, end, lost) in enumerate(plan):
                episode, first, index = at[robot]
                if not lost:
                    store.put(chunk(episode, first, steps, index=index, end=end))
                    observed = range(first, first + steps + end)
                    acted = {(episode, step) for step in range(first, first + steps)}
                    known |= {(episode, step) for step in observed}
                    expected |= acted
                at[robot] = (episode + 4, 0, 0) if end else (episode, first + steps, index + 1)
                if number % refreshes == 0:
                    replay.refresh()
                    if len(drawing):
                        seen(drawing.sample())
            replay.refresh()
            expected = {(episode, step) for episode, step in expected if (episode, step + 1) in known}
            assert len(drawing) == len(expected)
            if expected:
                assert seen(drawing.sample()) <= expected


def test_sampling_during_ingestion_sees_no_mixed_row(store: Store) -> None:
    store.put(chunk(0, 0, 5, end=True))
    done = threading.Event()

    def write() -> None:
        for episode in range(1, 150):
            store.put(chunk(episode, 0, 5, end=True))
        done.set()

    with store.replay(cache_bytes=8 * 8 * 64) as replay:
        drawing, writer = sampler(replay, 64), threading.Thread(target=write)
        writer.start()
        while not done.is_set():
            replay.refresh()
            seen(drawing.sample())
        writer.join(120)


@pytest.mark.parametrize("kind", [grey, raw])
@pytest.mark.parametrize("cached", [True, False])
def test_frame_is_repeated_until_the_next_one(store: Store, kind: object, cached: bool) -> None:
    assert callable(kind)
    store.put(chunk(1, 0, 3, frames={0: kind(0), 2: kind(200)}))
    store.put(chunk(1, 3, 2, index=1, frames={4: kind(90)}))
    store.put(chunk(1, 5, 2, index=2, end=True, frames={7: kind(30)}))
    with store.replay(PICTURES, cache_bytes=ROOM_FOR_PICTURES if cached else 20_000) as replay:
        drawing = sampler(replay, 200)
        batch, misses = drawing.sample(), replay.report().misses
        if cached:
            batch = drawing.sample()
            assert 0 < misses == replay.report().misses
        level = np.array([0, 0, 200, 200, 90, 90, 90, 30])
        step = batch.reward.astype(int)
        np.testing.assert_allclose(batch.observation[CAMERA].mean((1, 2, 3)), level[step], atol=2)
        np.testing.assert_allclose(batch.next_observation[CAMERA].mean((1, 2, 3)), level[step + 1], atol=2)


ROOM_FOR_PICTURES = 1 << 20


def test_step_without_frame_is_redrawn(store: Store) -> None:
    store.put(chunk(1, 6, 4, index=2, end=True, frames={8: grey(50)}))
    with store.replay(PICTURES) as replay:
        drawing = sampler(replay, 100)
        assert {step for _, step in seen(drawing.sample())} == {8, 9}
        assert drawing.redrawn > 0


@pytest.mark.parametrize("frame", [b"\xff\xd8 not a picture", np.zeros((8, 8, 3), np.uint8), grey(3)[:100], odd(3)])
def test_invalid_frame_excludes_only_its_steps(store: Store, frame: object) -> None:
    store.put(chunk(1, 0, 2, frames={0: grey(10)}))
    store.put(chunk(1, 2, 2, index=1, frames={2: frame, 3: frame}))  # type: ignore[dict-item]
    store.put(chunk(1, 4, 2, index=2, end=True, frames={4: grey(10)}))
    with store.replay(PICTURES) as replay:
        assert {step for _, step in seen(sampler(replay, 100).sample())} == {0, 4, 5}


@pytest.mark.parametrize("name", ["observation.state", "action.applied"])
def test_non_finite_step_is_excluded(store: Store, name: str) -> None:
    spoiled = chunk(1, 2, 2, index=1)
    values = spoiled.columns[name].copy()
    values[1, 0] = np.nan
    store.put(chunk(1, 0, 2), replace(spoiled, columns={**spoiled.columns, name: values}))
    store.put(chunk(1, 4, 2, index=2, end=True))
    with store.replay() as replay:
        batch = sampler(replay, 100).sample()
        assert {step for _, step in seen(batch)} == {0, 4, 5}
        assert np.isfinite(batch.action).all() and replay.report().damaged == 1


def test_step_before_a_lost_record_is_not_drawn(store: Store) -> None:
    store.put(*(chunk(1, 5 * index, 5, index=index, end=index == 2) for index in range(3)))
    with store.replay() as replay:
        selector = UniformSelector()
        replay.subscribe(selector.update)
        selector.update(replay.index, replay.index.apply([], [replay.index.chunks.sequence[1:2]]))
        drawn = seen(Sampler(replay, selector, BatchSpec(), 400).sample())
        assert drawn == {(1, step) for step in (*range(4), *range(10, 15))}


@pytest.mark.parametrize("features", [STATE, PICTURES])
def test_observation_that_is_not_stored_is_unreadable(store: Store, features: ObservationFeatures) -> None:
    pictures = {step: grey(step) for step in range(3)} if features is PICTURES else None
    store.put(chunk(1, 0, 2, end=True, frames=pictures))
    with store.replay(features) as replay:
        out = features.observations((2,), np.zeros)
        for _ in range(2):
            assert replay.read([ReadPlan(np.array([-1, 0]), out, {})])[0].tolist() == [0]


def test_unreadable_store_raises_store_corrupt(store: Store) -> None:
    store.put(chunk(1, 0, 3))  # no camera at all
    with store.replay(PICTURES) as replay, pytest.raises(StoreCorrupt, match="none is readable"):
        sampler(replay, 4).sample()
    assert replay.report().damaged >= 1


def test_bit_rot_is_redrawn_and_counted(store: Store) -> None:
    for episode in range(6):
        store.put(chunk(episode, 0, 4, end=True, frames={step: raw(episode * 40) for step in range(5)}))
    with store.replay(PICTURES, cache_bytes=20_000) as replay:
        drawing = sampler(replay, 300)
        assert {episode for episode, _ in seen(drawing.sample())} == set(range(6))
        segment = next(store.path.glob("*.seg*"))
        content = bytearray(segment.read_bytes())
        size = raw(160).size
        first = content.index(bytes([160]) * size)  # of episode 4; the cache holds some of its frames at most
        with segment.open("r+b") as file:
            for at in range(first, first + 4 * size, size):
                file.seek(at)
                file.write(bytes([161]))
        for _ in range(5):
            batch = drawing.sample()
            for name in ("observation", "next_observation"):
                picture = getattr(batch, name)[CAMERA]
                np.testing.assert_array_equal(picture, np.broadcast_to(picture[:, :1, :1, :1], picture.shape))
            seen(batch)
        assert replay.report().damaged >= 1 and drawing.redrawn >= 1


def test_chunk_is_read_again_after_an_error_of_the_file_server(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(chunk(1, 0, 2, frames={0: grey(10)}), chunk(1, 2, 2, index=1, end=True, frames={}))
    read = SegmentFileCache.read
    with store.replay(PICTURES) as replay:
        out = PICTURES.observations((4,), np.zeros)
        plan, unreadable = ReadPlan(np.arange(4), out, {}), replay.index.record_ref(0).offset

        def read_or_fail(cache: SegmentFileCache, name: SegmentName, offset: int, count: int) -> bytes:
            if offset == unreadable:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return read(cache, name, offset, count)

        monkeypatch.setattr(SegmentFileCache, "read", read_or_fail)
        assert replay.read([plan])[0].tolist() == [0, 1, 2, 3], "the second chunk repeats a frame"
        assert replay.report().damaged
        monkeypatch.setattr(SegmentFileCache, "read", read)
        assert replay.read([plan])[0].tolist() == [] and not replay.report().damaged
        assert (abs(out[CAMERA].astype(int) - 10) <= 2).all()


def test_part_of_a_chunk_counts_and_is_logged_until_it_can_be_read(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(chunk(1, 0, 5, frames={step: raw(100 + step) for step in range(5)}))
    bad, size = raw(102).tobytes(), raw(102).size
    unreadable = next(store.path.glob("*.seg*")).read_bytes().index(bad)
    read = SegmentFileCache.read

    def read_or_fail(cache: SegmentFileCache, name: SegmentName, offset: int, count: int) -> bytes:
        if offset <= unreadable < offset + count <= offset + 5 * size:  # not the whole record
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(cache, name, offset, count)

    with store.replay(PICTURES) as replay:

        def failed_of(*steps: int) -> list[int]:
            out = PICTURES.observations((len(steps),), np.zeros)
            return list(replay.read([ReadPlan(np.array(steps), out, {})])[0].tolist())

        monkeypatch.setattr(SegmentFileCache, "read", read_or_fail)
        for steps, failed in (((0, 1, 2), [0, 1, 2]), ((0, 1), []), ((2, 3), [0, 1]), ((4,), []), ((2,), [0])):
            assert failed_of(*steps) == failed and replay.report().damaged
        assert caplog.text.count("replay.unusable") == 1
        monkeypatch.setattr(SegmentFileCache, "read", read)
        assert failed_of(2, 3) == [] and not replay.report().damaged


def test_redraws_of_a_slow_disk_end_at_the_deadline(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(chunk(1, 0, 3))  # no camera at all
    monkeypatch.setattr("user_sys.replay.sampler.FILL_DEADLINE_S", -1.0)
    with store.replay(PICTURES) as replay, pytest.raises(StoreError, match="the disk took longer"):
        sampler(replay, 4).sample()


def test_labels_take_effect_at_next_refresh(store: Store) -> None:
    store.put(chunk(1, 0, 3, end=True), chunk(2, 0, 3, end=True))
    with store.replay() as replay:
        drawing = sampler(replay)
        store.put(
            RewardLabel(episode="ep-1", labeller="ada", at_unix_ns=1, first_step=1, rewards=(7.0,)),
            DeleteLabel(episode="ep-2", labeller="ada", at_unix_ns=2),
        )
        replay.refresh()
        batch = drawing.sample()
        assert set(batch.reward.tolist()) == {0.0, 7.0, 2.0}
        assert set(batch.observation["observation.state"][:, 0].tolist()) == {1.0}
        store.put(DeleteLabel(episode="ep-2", labeller="ada", at_unix_ns=3, deleted=False))
        replay.refresh()
        assert set(drawing.sample().observation["observation.state"][:, 0].tolist()) == {1.0, 2.0}


def test_corrected_success_changes_drawn_reward(store: Store) -> None:
    store.put(chunk(1, 0, 3, end=True))
    with store.replay() as replay:
        ones = sampler(replay)
        twos = Sampler(replay, UniformSelector(), BatchSpec(2, 0.5), 32, seed=1)
        store.put(SuccessLabel(episode="ep-1", labeller="ada", at_unix_ns=1, success=False))
        replay.refresh()
        assert set(ones.sample().reward.tolist()) == {0.0, 1.0}
        assert set(twos.sample().reward.tolist()) == {0.5, 1.0, 0.0}
        store.put(UndoLabel(episode="ep-1", labeller="ada", at_unix_ns=2, undone_at_unix_ns=1))
        replay.refresh()
        assert set(ones.sample().reward.tolist()) == {0.0, 1.0, 2.0}


def test_invalid_replay_settings_are_refused(store: Store) -> None:
    store.put(chunk(1, 0, 3, end=True))
    with pytest.raises(ConfigError, match="too small for"), store.replay(cache_bytes=10):
        pass
    with store.replay() as replay:
        for wrong in ({"batch_size": 0}, {"batch_size": 1, "rank": 2, "world": 2}):
            with pytest.raises(ConfigError):
                Sampler(replay, UniformSelector(), BatchSpec(), **wrong)
    assert STATE.cameras == {}


def test_compaction_removes_only_deleted_rows(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with StoreWriter.open(path, segment_bytes=1 << 14) as writer:
        store = Store(path, writer)
        for episode in range(8):
            store.put(chunk(episode, 0, 4, end=True, frames={step: raw(20 * episode + step) for step in range(5)}))
    with store.replay(PICTURES, cache_bytes=20_000) as replay:
        drawing = sampler(replay, 200)
        assert {episode for episode, _ in seen(drawing.sample())} == set(range(8))
        add_labels(path, [DeleteLabel(episode=f"ep-{n}", labeller="ada", at_unix_ns=1) for n in (0, 2, 3)])
        compact_store(path)
        for _ in range(3):
            batch = drawing.sample()
            seen(batch)
            now = batch.observation["observation.state"]
            level = 20 * now[:, 0] + now[:, 1]
            np.testing.assert_array_equal(batch.observation[CAMERA][:, 0, 0, 0], level)
        replay.refresh()
        assert {episode for episode, _ in seen(drawing.sample())} == {1, 4, 5, 6, 7}
