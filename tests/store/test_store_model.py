"""A store against a simple model: appends, sampling, labels, retention, compaction and restarts in any order."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from episode_kit import chunk_header
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from user_sys.episode import APPLIED_ACTION, Chunk, EpisodeEnd, EpisodeSource, Phase
from user_sys.replay.batches import BatchSpec, ObservationFeatures
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.sampler import Sampler
from user_sys.replay.selectors import UniformSelector
from user_sys.store.labels import DeleteLabel, Label, PhaseLabel, RewardLabel, SuccessLabel
from user_sys.store.maintenance import Retention, deletion_labels, disk_bytes, plan_eviction, reclaim_space
from user_sys.store.store import StoreReader, StoreWriter

STEPS, CHUNKS = 3, 4  # of each chunk, of each episode
SEGMENT_BYTES = 4_000
WIDTH = 30  # of an observation, all of whose elements are the number of its chunk
FEATURES = ObservationFeatures(vectors={"observation.state": WIDTH}, action_size=1, cameras={})
EPISODES = ("demo-a", "b", "c", "d")

Key = tuple[str, int]


def rewards(index: int) -> list[float]:
    return [float(index * STEPS + step) for step in range(STEPS)]


def packet(episode: str, index: int) -> bytes:
    header = chunk_header(
        episode,
        STEPS,
        index=index,
        first_step=index * STEPS,
        sentence="lift",
        source=EpisodeSource.DEMO if episode.startswith("demo") else EpisodeSource.ONLINE,
        started_unix_ns=EPISODES.index(episode),
        end=EpisodeEnd(steps=CHUNKS * STEPS, success=True) if index == CHUNKS - 1 else None,
    )
    columns = {
        "reward": np.array(rewards(index), np.float32),
        "observation.state": np.full((STEPS, WIDTH), index, np.float32),
        APPLIED_ACTION: np.full((STEPS, 1), EPISODES.index(episode), np.float32),
    }
    final = {"observation.state": np.full(WIDTH, CHUNKS, np.float32)} if header.end else {}
    return Chunk(header, columns, final).encode()


class Model:
    """Expected content."""

    def __init__(self) -> None:
        self.records: list[Key | Label] = []
        self.compacted: set[str] = set()  # deleted before a compaction; the rest of them is not checked

    def labels(self, episode: str) -> list[Label]:
        return [r for r in self.records if not isinstance(r, tuple) and r.episode == episode]

    def chunks(self, episode: str) -> set[int]:
        return {r[1] for r in self.records if isinstance(r, tuple) and r[0] == episode}

    def deleted(self, episode: str) -> bool:
        acknowledged = [label.deleted for label in self.labels(episode) if isinstance(label, DeleteLabel)]
        return bool(acknowledged) and acknowledged[-1]

    def steps(self, episode: str) -> dict[int, tuple[float, int]]:
        """Step number to reward and phase."""
        known = {
            n: (r, 0) for i in self.chunks(episode) for n, r in zip(range(i * STEPS, 99), rewards(i), strict=False)
        }
        last = CHUNKS * STEPS - 1
        for label in self.labels(episode):
            if isinstance(label, SuccessLabel) and last in known:
                reward = rewards(CHUNKS - 1)[-1] if label.success is None else float(label.success)
                known[last] = (reward, known[last][1])
            elif isinstance(label, RewardLabel):
                for n, reward in enumerate(label.rewards, label.first_step):
                    if n in known:
                        known[n] = (reward, known[n][1])
            elif isinstance(label, PhaseLabel):
                for n in range(label.first_step, label.first_step + label.steps):
                    if n in known:
                        known[n] = (known[n][0], int(label.phase))
        return known

    def success(self, episode: str) -> bool | None:
        acknowledged = [label.success for label in self.labels(episode) if isinstance(label, SuccessLabel)]
        return acknowledged[-1] if acknowledged else (True if CHUNKS - 1 in self.chunks(episode) else None)


class StoreMachine(RuleBasedStateMachine):
    """The store and its model; after each sync an old and a new reader agree with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.model = Model()

    def teardown(self) -> None:
        self.reader.close()
        self.writer.close()
        shutil.rmtree(self.path)

    @initialize()
    def start(self) -> None:
        self.writer = StoreWriter.open(self.path, segment_bytes=SEGMENT_BYTES)
        self.reader = StoreReader.open(self.path)

    @rule(episode=st.sampled_from(EPISODES), index=st.integers(0, CHUNKS - 1), count=st.integers(1, 3))
    def append(self, episode: str, index: int, count: int) -> None:
        for each in range(index, min(CHUNKS, index + count)):
            there = each in self.model.chunks(episode)
            unwanted = self.model.deleted(episode) and not self.model.chunks(episode)
            added = self.writer.append(packet(episode, each))
            if episode not in self.model.compacted:
                assert added != (there or unwanted)
            if added and not there:
                self.model.records.append((episode, each))

    @rule(episode=st.sampled_from(EPISODES), first=st.integers(0, 11), n=st.integers(1, 9), kind=st.integers(0, 3))
    def label(self, episode: str, first: int, n: int, kind: int) -> None:
        words = {"episode": episode, "labeller": "ada", "at_unix_ns": 0}
        label: Label
        if kind == 0:
            label = RewardLabel(first_step=first, rewards=tuple(float(-n) for _ in range(n)), **words)  # type: ignore[arg-type]
        elif kind == 1:
            label = PhaseLabel(first_step=first, steps=n, phase=Phase(n % 4), **words)  # type: ignore[arg-type]
        elif kind == 2:
            label = SuccessLabel(success=(None, True, False)[n % 3], **words)  # type: ignore[arg-type]
        elif episode in self.model.compacted:
            return
        else:
            label = DeleteLabel(deleted=n % 2 == 0, **words)  # type: ignore[arg-type]
        self.writer.append_label(label)
        self.model.records.append(label)

    @rule()
    def sync(self) -> None:
        self.writer.sync()
        self.require_agreement()

    @rule(share=st.sampled_from([0.3, 0.6, 0.9]))
    def retain(self, share: float) -> None:
        self.sync()
        self.reader.refresh()
        size = disk_bytes(self.path)
        choice = plan_eviction(
            self.reader.index, Retention(max_bytes=int(share * size), keep_interventions=False), size
        )
        for label in deletion_labels(choice):
            self.writer.append_label(label)
            self.model.records.append(label)
            assert not label.episode.startswith("demo")

    @rule(rotate=st.booleans())
    def compact(self, rotate: bool) -> None:
        if rotate:
            self.writer.rotate()
        self.sync()
        self.reader.refresh()
        assert not any(reclaim_space(self.writer, self.reader.index, min_dead_share=0.0))
        self.model.compacted |= {episode for episode in EPISODES if self.model.deleted(episode)}
        self.require_agreement()

    @rule()
    def restart(self) -> None:
        self.writer.close()
        self.writer = StoreWriter.open(self.path, segment_bytes=SEGMENT_BYTES)
        self.require_agreement()

    @rule(seed=st.integers(0, 99), cache_bytes=st.sampled_from([2_500, 100_000]))
    def sample(self, seed: int, cache_bytes: int) -> None:
        """Drawn transitions exist in the model."""
        self.sync()
        with (
            StoreReader.open(self.path) as reader,
            ReplayBuffer(reader, FEATURES, cache_bytes=cache_bytes, cold_threads=1) as replay,
        ):
            sampler = Sampler(replay, UniformSelector(), BatchSpec(), 16, seed=seed)
            replay.refresh()
            if not len(sampler):
                return
            batch = sampler.sample()
            assert not sampler.redrawn
            at = reader.index.step_of(batch.row).tolist()
            for n, (row, step) in enumerate(zip(batch.row, at, strict=True)):
                name = EPISODES[int(batch.action[n, 0])]
                assert reader.index.episodes.ids.names[int(reader.index.episode_of(batch.row)[n])] == name
                assert not self.model.deleted(name), row
                assert (batch.observation["observation.state"][n] == step // STEPS).all()
                assert (batch.next_observation["observation.state"][n] == (step + 1) // STEPS).all()
                if name not in self.model.compacted:
                    assert batch.reward[n] == self.model.steps(name)[step][0]

    def require_agreement(self) -> None:
        self.reader.refresh()
        self.compare(self.reader)
        with StoreReader.open(self.path) as late:
            late.refresh()
            self.compare(late)

    def compare(self, reader: StoreReader) -> None:
        assert not reader.damaged
        index = reader.index
        for name in EPISODES:
            row = index.episodes.find(name)
            rows = np.flatnonzero(index.steps.alive & (index.episode_of(np.arange(len(index.steps))) == row))
            if self.model.deleted(name):
                assert not len(rows)
            elif name not in self.model.compacted:
                self.compare_episode(reader, name, row, rows)

    def compare_episode(self, reader: StoreReader, name: str, row: int, rows: np.ndarray) -> None:
        index, expected = reader.index, self.model.steps(name)
        acknowledged = zip(index.steps.reward[rows].tolist(), index.steps.phase[rows].tolist(), strict=True)
        assert dict(zip(index.step_of(rows).tolist(), acknowledged, strict=True)) == expected and len(rows) == len(
            expected
        )
        if not expected:
            return
        assert index.episodes.success[row] == {None: -1, True: 1, False: 0}[self.model.success(name)]
        assert index.episodes.complete[row] == (len(self.model.chunks(name)) == CHUNKS)
        after = index.successor(rows)
        follows = [number + 1 in expected for number in index.step_of(rows).tolist()]
        assert (after >= 0).tolist() == follows
        np.testing.assert_array_equal(index.step_of(after[follows]), index.step_of(rows[follows]) + 1)
        for chunk in np.unique(index.steps.chunk[rows]).tolist():
            assert (reader.read(chunk).columns["observation.state"] == index.chunks.index[chunk]).all()


TestStoreAgainstModel = StoreMachine.TestCase
TestStoreAgainstModel.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


@pytest.mark.slow
class TestStoreAgainstModelAtLength(StoreMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
