"""The replay buffer: no transition that never happened is ever drawn, and every one that did can be."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.spec import ArraySpec, CameraSpec, RobotSpec
from user_sys.codec import Array
from user_sys.episode import APPLIED, Chunk, ChunkHeader, EpisodeEnd, Phase, Source, frame_columns
from user_sys.errors import ConfigError
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.mix import DemoOnlineMix, ReplayMix
from user_sys.replay.rows import Batch, Features
from user_sys.replay.select import INTERVENTIONS, Select
from user_sys.store.store import StoreReader, StoreWriter

CAMERA = "observation.images.front"
STATE = Features(vectors={"observation.state": 3}, action_size=2, cameras={})
PICTURES = Features(vectors={"observation.state": 3}, action_size=2, cameras={CAMERA: (16, 24, 3)})


def state(episode: int, step: Array | int) -> Array:
    """An observation that says which episode and step it is of, and repeats itself so that a mixed row is noticed."""
    step = np.asarray(step)
    return np.stack([np.full(step.shape, episode), step, step + 1000 * episode], axis=-1).astype(np.float32)


def chunk(
    episode: int,
    first: int,
    steps: int,
    *,
    index: int = 0,
    end: bool = False,
    source: Source = Source.ONLINE,
    phase: int | list[int] = Phase.POLICY,
    frames: Mapping[int, bytes] | None = None,
    embodiment: str = "e1",
) -> Chunk:
    at = np.arange(first, first + steps)
    columns: dict[str, Array] = {
        "observation.state": state(episode, at),
        "action": np.full((steps, 2), -1, np.float32),
        APPLIED: np.stack([at, np.full(steps, episode)], axis=-1).astype(np.float32),
        "reward": at.astype(np.float32),
        "terminated": (at == first + steps - 1) & end,
        "phase": np.broadcast_to(np.asarray(phase, np.uint8), steps).copy(),
        "policy_version": at.astype(np.int64),
    }
    if frames is not None:
        columns |= frame_columns(CAMERA, [frames.get(int(step)) for step in at])
    header = ChunkHeader(
        episode=f"ep-{episode}",
        index=index,
        first_step=first,
        steps=steps,
        robot="panda-0",
        embodiment=embodiment,
        task="lift",
        sentence="lift the cube",
        source=source,
        seed=0,
        started_unix_ns=1,
        end=EpisodeEnd(steps=first + steps, success=True) if end else None,
    )
    return Chunk(header, columns, {"observation.state": state(episode, first + steps)} if end else {})


def grey(level: int) -> bytes:
    return simplejpeg.encode_jpeg(np.full((16, 24, 3), level, np.uint8), quality=95)


def seen(batch: Batch) -> set[tuple[int, int]]:
    """The (episode, step) pairs in a batch, after checking that each transition is one that happened."""
    now, then = batch.observation["observation.state"], batch.next_observation["observation.state"]
    np.testing.assert_array_equal(now[:, 2], now[:, 1] + 1000 * now[:, 0])
    np.testing.assert_array_equal(then, now + [0, 1, 1])
    np.testing.assert_array_equal(batch.action, now[:, 1::-1])
    np.testing.assert_array_equal(batch.reward, now[:, 1])
    np.testing.assert_array_equal(batch.policy_version, now[:, 1])
    return {(int(a), int(b)) for a, b, _ in now}


def everything(buffer: ReplayBuffer | DemoOnlineMix) -> set[tuple[int, int]]:
    return seen(buffer.sample(40 * len(buffer), np.random.default_rng(0))) if len(buffer) else set()


def test_a_whole_episode_gives_each_of_its_transitions_and_no_other() -> None:
    buffer = ReplayBuffer(STATE, capacity_rows=64)
    assert buffer.add(chunk(1, 0, 5, end=True)) == 5
    assert everything(buffer) == {(1, step) for step in range(5)}
    batch = buffer.sample(100)
    np.testing.assert_array_equal(batch.terminated, batch.reward == 4)


def test_the_newest_step_of_a_running_episode_waits_for_its_successor() -> None:
    buffer = ReplayBuffer(STATE, capacity_rows=64)
    assert buffer.add(chunk(1, 0, 3)) == 2
    assert buffer.add(chunk(1, 3, 1, index=1)) == 1
    assert everything(buffer) == {(1, 0), (1, 1), (1, 2)}
    buffer.add(chunk(1, 4, 1, index=2, end=True))
    assert everything(buffer) == {(1, step) for step in range(5)}


def test_episodes_that_stream_at_the_same_time_do_not_mix() -> None:
    buffer = ReplayBuffer(STATE, capacity_rows=64)
    for index in range(3):
        for episode in (1, 2):
            buffer.add(chunk(episode, 2 * index, 2, index=index, end=index == 2))
    assert everything(buffer) == {(episode, step) for episode in (1, 2) for step in range(6)}


def test_an_episode_cut_short_never_reaches_into_the_next() -> None:
    buffer = ReplayBuffer(STATE, capacity_rows=64)
    buffer.add(chunk(1, 0, 3))
    buffer.add(chunk(2, 0, 3, end=True))
    assert everything(buffer) == {(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)}


def test_a_missing_chunk_breaks_the_episode_in_two() -> None:
    buffer = ReplayBuffer(STATE, capacity_rows=64)
    buffer.add(chunk(1, 0, 3))
    buffer.add(chunk(1, 6, 3, index=2, end=True))
    assert everything(buffer) == {(1, 0), (1, 1), (1, 6), (1, 7), (1, 8)}


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(2, 40),
    plan=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans(), st.booleans()), max_size=25),
)
def test_whatever_streams_in_only_true_transitions_come_out(
    capacity: int, plan: list[tuple[int, int, bool, bool]]
) -> None:
    """`plan`: for each chunk the robot, its steps, whether the episode ends, whether the chunk gets lost."""
    buffer = ReplayBuffer(STATE, capacity_rows=capacity)
    at = {robot: (robot, 0, 0) for robot in range(4)}  # episode, next step, next index
    for robot, steps, end, lost in plan:
        episode, first, index = at[robot]
        if not lost:
            buffer.add(chunk(episode, first, steps, index=index, end=end))
        at[robot] = (episode + 4, 0, 0) if end else (episode, first + steps, index + 1)
        assert len(buffer) < capacity
        everything(buffer)


def test_the_ring_keeps_the_newest() -> None:
    buffer = ReplayBuffer(STATE, capacity_rows=12)
    for episode in range(10):
        buffer.add(chunk(episode, 0, 5, end=True))
    assert everything(buffer) == {(episode, step) for episode in (8, 9) for step in range(5)}


def test_sampling_while_another_thread_fills_sees_no_mixed_row() -> None:
    buffer = ReplayBuffer(STATE, capacity_rows=32)
    buffer.add(chunk(0, 0, 5, end=True))
    done = threading.Event()

    def fill() -> None:
        for episode in range(1, 400):
            buffer.add(chunk(episode, 0, 5, end=True))
        done.set()

    filler = threading.Thread(target=fill)
    filler.start()
    while not done.is_set():
        seen(buffer.sample(64))
    filler.join(10)


def test_a_batch_can_be_filled_again_and_has_the_length_asked_for() -> None:
    buffer = ReplayBuffer(STATE, capacity_rows=64)
    with pytest.raises(ValueError, match="holds no transition"):
        buffer.sample(4)
    buffer.add(chunk(1, 0, 5, end=True))
    batch = buffer.empty_batch(8)
    assert buffer.sample(8, out=batch) is batch
    with pytest.raises(ValueError, match="length 8"):
        buffer.sample(9, out=batch)


def test_frames_are_decoded_and_stand_until_the_next_one() -> None:
    buffer = ReplayBuffer(PICTURES, capacity_rows=64)
    buffer.add(chunk(1, 0, 3, frames={0: grey(0), 2: grey(200)}))
    buffer.add(chunk(1, 3, 2, index=1, end=True, frames={4: grey(90)}))
    batch = buffer.sample(200)
    level = np.array([0, 0, 200, 200, 90, 90])
    step = batch.reward.astype(int)
    np.testing.assert_allclose(batch.observation[CAMERA].mean((1, 2, 3)), level[step], atol=2)
    np.testing.assert_allclose(batch.next_observation[CAMERA].mean((1, 2, 3)), level[step + 1], atol=2)


def test_a_step_of_which_no_frame_is_known_is_not_sampled() -> None:
    buffer = ReplayBuffer(PICTURES, capacity_rows=64)
    buffer.add(chunk(1, 6, 4, index=2, end=True, frames={8: grey(50)}))
    assert everything(buffer) == {(1, 8), (1, 9)}


@pytest.mark.parametrize("frame", [b"\xff\xd8 not a picture", simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8))])
def test_a_frame_that_does_not_fit_costs_its_chunk_only(frame: bytes) -> None:
    buffer = ReplayBuffer(PICTURES, capacity_rows=64)
    buffer.add(chunk(1, 0, 2, frames={0: grey(10)}))
    buffer.add(chunk(1, 2, 2, index=1, frames={2: frame}))
    buffer.add(chunk(1, 4, 2, index=2, end=True, frames={4: grey(10)}))
    assert buffer.skipped == 1
    assert everything(buffer) == {(1, 0), (1, 4), (1, 5)}


def test_a_chunk_without_the_features_is_skipped_and_counted() -> None:
    buffer = ReplayBuffer(PICTURES, capacity_rows=64)
    assert buffer.add(chunk(1, 0, 3)) == 0
    assert buffer.skipped == 1


def test_selectors_take_by_embodiment_source_and_phase() -> None:
    online = Select(embodiments=frozenset({"e1"}), sources=frozenset({Source.ONLINE}))
    buffer = ReplayBuffer(STATE, capacity_rows=64, select=online)
    buffer.add(chunk(1, 0, 2, end=True))
    buffer.add(chunk(2, 0, 2, end=True, source=Source.DEMO))
    buffer.add(chunk(3, 0, 2, end=True, embodiment="e2"))
    assert everything(buffer) == {(1, 0), (1, 1)}


def test_interventions_are_taken_with_their_successors_over_chunk_ends() -> None:
    buffer = ReplayBuffer(STATE, capacity_rows=64, select=Select(phases=INTERVENTIONS))
    teleop, policy = Phase.TELEOP, Phase.POLICY
    buffer.add(chunk(1, 0, 4, phase=[policy, teleop, policy, teleop]))
    buffer.add(chunk(1, 4, 3, index=1, phase=policy))
    buffer.add(chunk(1, 7, 2, index=2, phase=[policy, Phase.CORRECTION], end=True))
    assert everything(buffer) == {(1, 1), (1, 3), (1, 8)}


def test_a_budget_in_bytes_bounds_the_rows() -> None:
    buffer = ReplayBuffer(PICTURES, budget_bytes=100 * PICTURES.row_bytes)
    assert buffer.capacity == 100
    for wrong in ({}, {"capacity_rows": 8, "budget_bytes": 8}, {"capacity_rows": 1}):
        with pytest.raises(ConfigError):
            ReplayBuffer(STATE, **wrong)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[StoreWriter, StoreReader]]:
    with StoreWriter.open(tmp_path / "store") as writer, StoreReader.open(tmp_path / "store") as reader:
        yield writer, reader


def put(writer: StoreWriter, *chunks: Chunk) -> None:
    for each in chunks:
        writer.append(each.encode())
    writer.sync()


def test_the_mix_draws_its_share_from_demonstrations_and_interventions(store: tuple[StoreWriter, StoreReader]) -> None:
    writer, reader = store
    mix = ReplayMix(STATE, "e1", demo_rows=64, online_rows=64)
    put(writer, chunk(1, 0, 4, end=True, source=Source.DEMO))
    assert mix.follow(reader) == 0
    assert everything(mix) == {(1, step) for step in range(4)}, "online is empty: all from demonstrations"
    policy, teleop = Phase.POLICY, Phase.TELEOP
    put(
        writer,
        chunk(2, 0, 4, end=True, phase=[policy, teleop, policy, policy]),
        chunk(3, 0, 4, end=True, source=Source.EVALUATION),
    )
    assert mix.follow(reader) == 4
    batch = mix.sample(101)
    assert seen(batch.part(0, 50)) == {(1, 0), (1, 1), (1, 2), (1, 3), (2, 1)}
    assert seen(batch.part(50, 101)) == {(2, step) for step in range(4)}


def test_a_rebuilt_replay_draws_the_same_batches(store: tuple[StoreWriter, StoreReader], tmp_path: Path) -> None:
    writer, reader = store
    mix = ReplayMix(STATE, "e1", demo_rows=32, online_rows=20, seed=3)
    for episode in range(8):
        put(writer, chunk(episode, 0, 5, end=True, source=Source.DEMO if episode < 2 else Source.ONLINE))
        mix.follow(reader)
    mix.sample(16)
    saved = mix.state_dict()
    expected = mix.sample(64)
    with StoreReader.open(tmp_path / "store") as again:
        rebuilt = ReplayMix(STATE, "e1", demo_rows=32, online_rows=20, seed=99)
        while rebuilt.follow(again, max_chunks=3) or len(rebuilt.online) == 0:
            pass
        rebuilt.load_state_dict(saved)
        got = rebuilt.sample(64)
    np.testing.assert_array_equal(got.observation["observation.state"], expected.observation["observation.state"])
    np.testing.assert_array_equal(got.index, expected.index)
    with pytest.raises(ConfigError, match="no state of a sampler"):
        rebuilt.load_state_dict({"rng": "{}"})


def test_features_come_from_the_robots_spec() -> None:
    vector = ArraySpec(name="observation.state", labels=("a",), units=("1",), low=(0,), high=(1,))
    action = ArraySpec(name="action", labels=("x", "y"), units=("m", "m"), low=(0, 0), high=(1, 1))
    camera = CameraSpec(name="front", height=16, width=24, rate_hz=10)
    spec = RobotSpec(model="toy", rate_hz=10, observation=(vector,), action=action, cameras=(camera,))
    assert Features.of(spec).cameras == {}
    assert Features.of(spec, ("front",)) == Features({"observation.state": 1}, 2, {CAMERA: (16, 24, 3)})
    with pytest.raises(ConfigError, match="front"):
        Features.of(spec, ("wrist",))
