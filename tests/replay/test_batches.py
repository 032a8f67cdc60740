"""Batches of every shape: n-step returns, action chunks, extras and pictures, never across an episode's end."""

from __future__ import annotations

import numpy as np
import pytest
from replay_kit import CAMERA, PICTURES, SHAPE, STATE, Store, chunk, grey, raw, state

from hal.spec import ArraySpec, CameraSpec, RobotSpec
from user_sys.codec import Array
from user_sys.episode import Phase
from user_sys.errors import ConfigError
from user_sys.replay.batches import Batch, BatchSpec, ObservationFeatures
from user_sys.replay.sampler import Sampler
from user_sys.replay.selectors import UniformSelector
from user_sys.store.labels import column_labels

NOISE = ObservationFeatures(STATE.vectors, STATE.action_size, {}, {"log_prob": (), "noise": (2,)})


def drawn(store: Store, spec: BatchSpec, features: ObservationFeatures = STATE, n: int = 300) -> Batch:
    with store.replay(features) as replay:
        return Sampler(replay, UniformSelector(), spec, n).sample()


def numbers(batch: Batch) -> tuple[Array, Array]:
    """Episode and number of each sample's first step."""
    return batch.observation["observation.state"][:, 0], batch.observation["observation.state"][:, 1]


def test_n_step_returns_stop_at_episode_end(store: Store) -> None:
    store.put(chunk(1, 0, 3), chunk(1, 3, 3, index=1, end=True), chunk(2, 0, 4))
    batch = drawn(store, BatchSpec(n_step=3, discount=0.5))
    then = batch.next_observation["observation.state"]
    for episode, step, after, reward, discount, terminated in zip(
        *numbers(batch), then.tolist(), batch.reward, batch.discount, batch.terminated, strict=True
    ):
        last = 5 if episode == 1 else 2  # the observation after step 3 of episode 2 is not stored yet
        taken = min(3, last - int(step) + 1)
        assert after[:2] == [episode, step + taken]
        assert reward == sum(0.5**k * (step + k) for k in range(taken))
        assert discount == 0.5**taken
        assert terminated == (episode == 1 and step + taken == 6)


def test_action_chunks_have_masks_rewards_and_next_observations(store: Store) -> None:
    store.put(chunk(1, 0, 2), chunk(1, 2, 2, index=1, end=True), chunk(2, 0, 9, end=True))
    batch = drawn(store, BatchSpec(n_step=3, discount=0.5, chunk_length=3))
    episode, step = numbers(batch)
    last = np.where(episode == 1, 3, 8)
    wanted = np.minimum(step[:, None] + np.arange(3), last[:, None])
    np.testing.assert_array_equal(batch.action[:, :, 0], wanted)
    np.testing.assert_array_equal(batch.action[:, :, 1], np.broadcast_to(episode[:, None], (300, 3)))
    mask = step[:, None] + np.arange(3) <= last[:, None]
    np.testing.assert_array_equal(batch.mask, mask)
    np.testing.assert_array_equal(batch.reward, (wanted * mask * 0.5 ** np.arange(3)).sum(1))
    taken = mask.sum(1)
    np.testing.assert_array_equal(batch.discount, 0.5**taken)
    np.testing.assert_array_equal(batch.terminated, step + taken > last)
    np.testing.assert_array_equal(batch.next_observation["observation.state"], state_of(episode, step + taken))
    assert batch.phase.shape == batch.policy_version.shape == (300, 3)


def state_of(episode: Array, step: Array) -> Array:
    return np.concatenate([state(int(e), np.array([s])) for e, s in zip(episode, step, strict=True)])


def test_chunk_and_return_may_have_different_lengths(store: Store) -> None:
    store.put(chunk(1, 0, 9, end=True))
    batch = drawn(store, BatchSpec(n_step=1, chunk_length=4))
    _, step = numbers(batch)
    np.testing.assert_array_equal(batch.reward, step)
    np.testing.assert_array_equal(batch.next_observation["observation.state"][:, 1], step + 1)
    np.testing.assert_array_equal(batch.mask.sum(1), np.minimum(4, 9 - step))


def test_sequences_have_observation_and_reward_of_each_step(store: Store) -> None:
    pictures = {step: grey(25 * step) for step in range(6)}
    store.put(chunk(1, 0, 2, frames=pictures), chunk(1, 2, 3, index=1, end=True, frames=pictures))
    batch = drawn(store, BatchSpec(n_step=3, discount=0.5, chunk_length=3, sequence=True), PICTURES, 40)
    first = batch.observation["observation.state"][:, 0, 1]
    wanted = np.minimum(first[:, None] + np.arange(3), 4)
    np.testing.assert_array_equal(batch.observation["observation.state"][:, :, 1], wanted)
    np.testing.assert_allclose(batch.observation[CAMERA].mean((2, 3, 4)), 25 * wanted, atol=2)
    np.testing.assert_array_equal(batch.action[:, :, 0], wanted)
    np.testing.assert_array_equal(batch.reward, wanted * batch.mask)
    np.testing.assert_array_equal(batch.next_observation["observation.state"][:, 1], first + batch.mask.sum(1))
    np.testing.assert_array_equal(batch.terminated, first >= 2)
    with pytest.raises(ConfigError, match="set both equal"):
        BatchSpec(n_step=1, chunk_length=3, sequence=True)


def test_ages_of_frames_are_vectors_on_request(store: Store) -> None:
    vector = ArraySpec(name="observation.state", labels=("a", "b", "c"), units=("1",) * 3, low=(-9,) * 3, high=(9,) * 3)
    action = ArraySpec(name="action", labels=("x", "y"), units=("m", "m"), low=(0, 0), high=(1, 1))
    camera = CameraSpec(name=CAMERA.rpartition(".")[2], height=SHAPE[0], width=SHAPE[1], rate_hz=10)
    spec = RobotSpec(model="toy", rate_hz=10, observation=(vector,), action=action, cameras=(camera,))
    features = ObservationFeatures.of(spec, (camera.name,), ages=True)
    recorded = chunk(1, 0, 4, end=True, frames={step: grey(step) for step in range(5)}, at_s=2.0)
    recorded.columns["t_capture_ns"] += np.arange(4) * 50_000_000  # the robot is sensed more often than the camera
    store.put(recorded)
    batch = drawn(store, BatchSpec(), features)
    _, step = numbers(batch)
    np.testing.assert_allclose(batch.observation[CAMERA + ".age"][:, 0], 0.05 * step, atol=1e-6)


def test_vectors_of_each_step_of_a_chunk_on_request(store: Store) -> None:
    store.put(chunk(1, 0, 2), chunk(1, 2, 3, index=1, end=True))
    batch = drawn(store, BatchSpec(chunk_length=3, step_vectors=True))
    episode, step = numbers(batch)
    for place in range(3):
        wanted = np.minimum(step + place, 4)
        np.testing.assert_array_equal(batch.steps["observation.state"][:, place], state_of(episode, wanted))
    assert drawn(store, BatchSpec(chunk_length=3)).steps == {}
    with pytest.raises(ConfigError, match="set chunk_length"):
        BatchSpec(step_vectors=True)


@pytest.mark.parametrize("within_phase", [False, True])
def test_window_ends_at_a_change_of_phase_on_request(store: Store, within_phase: bool) -> None:
    phases = [Phase.POLICY] * 3 + [Phase.TELEOP] * 3
    store.put(chunk(1, 0, 6, end=True, phase=[int(phase) for phase in phases]))
    batch = drawn(store, BatchSpec(n_step=4, chunk_length=4, within_phase=within_phase))
    _, step = numbers(batch)
    last = np.where((step < 3) & within_phase, 2, 5)
    np.testing.assert_array_equal(batch.mask.sum(1), np.minimum(4, last - step + 1))
    assert not within_phase or (batch.phase == batch.phase[:, :1]).all()


@pytest.mark.parametrize("length", [0, 2])
def test_extras_follow_their_steps(store: Store, length: int) -> None:
    at = np.arange(5)
    extras = {"log_prob": -at.astype(np.float32), "noise": np.stack([at, at * 10], axis=1).astype(np.float32)}
    store.put(chunk(1, 0, 5, end=True, extras=extras), chunk(2, 0, 5, end=True))
    batch = drawn(store, BatchSpec(chunk_length=length), NOISE)
    episode, step = numbers(batch)
    wanted = np.minimum(step[:, None] + np.arange(max(1, length)), 4)
    log_prob = batch.extras["log_prob"].reshape(300, -1)
    recorded = episode == 1
    np.testing.assert_array_equal(log_prob[recorded], -wanted[recorded])
    np.testing.assert_array_equal(batch.extras["noise"].reshape(300, -1, 2)[recorded][:, :, 1], wanted[recorded] * 10)
    assert np.isnan(log_prob[~recorded]).all(), "the second episode has no such column"


def test_sentence_names_the_instruction(store: Store) -> None:
    store.put(chunk(1, 0, 2, end=True))
    with store.replay() as replay:
        batch = Sampler(replay, UniformSelector(), BatchSpec(), 4).sample()
        assert {replay.index.episodes.sentences.names[code] for code in batch.sentence} == {"lift the cube"}


@pytest.mark.parametrize("kind", [grey, raw])
def test_last_next_observation_has_its_own_picture(store: Store, kind: object) -> None:
    assert callable(kind)
    store.put(chunk(1, 0, 4, end=True, frames={step: kind(50 * step) for step in range(5)}))
    batch = drawn(store, BatchSpec(n_step=2, chunk_length=2), PICTURES, 40)
    _, step = numbers(batch)
    after = np.minimum(step + 2, 4)
    np.testing.assert_allclose(batch.observation[CAMERA].mean((1, 2, 3)), 50 * step, atol=2)
    np.testing.assert_allclose(batch.next_observation[CAMERA].mean((1, 2, 3)), 50 * after, atol=2)


def test_invalid_shapes_and_columns_are_refused() -> None:
    for wrong in ({"n_step": 0}, {"chunk_length": -1}, {"discount": 1.5}):
        with pytest.raises(ConfigError):
            BatchSpec(**wrong)  # type: ignore[arg-type]
    vector = ArraySpec(name="observation.state", labels=("a",), units=("1",), low=(0,), high=(1,))
    other = ArraySpec(name="observation.goal", labels=("x", "y"), units=("m", "m"), low=(0, 0), high=(1, 1))
    action = ArraySpec(name="action", labels=("x", "y"), units=("m", "m"), low=(0, 0), high=(1, 1))
    camera = CameraSpec(name="front", height=16, width=24, rate_hz=10)
    spec = RobotSpec(model="toy", rate_hz=10, observation=(vector, other), action=action, cameras=(camera,))
    found = ObservationFeatures.of(spec, ("front",), columns=("observation.goal",), extras={"noise": (3,)})
    assert found == ObservationFeatures({"observation.goal": 2}, 2, {CAMERA: (16, 24, 3)}, {"noise": (3,)})
    assert ObservationFeatures.of(spec).vectors == {"observation.state": 1, "observation.goal": 2}
    for wrong_names in ({"cameras": ("wrist",)}, {"columns": ("observation.x",)}):
        with pytest.raises(ConfigError, match="no (camera|vector)"):
            ObservationFeatures.of(spec, **wrong_names)


@pytest.mark.parametrize("length", [0, 2])
def test_column_labels_replace_recorded_values_and_last(store: Store, length: int) -> None:
    recorded = {"log_prob": np.full(5, -7, np.float32)}
    store.put(chunk(1, 0, 5, end=True, extras=recorded), chunk(2, 0, 5, end=True, extras=recorded))
    columns = ObservationFeatures(STATE.vectors, STATE.action_size, {}, {"log_prob": (), "advantage": ()})
    spec = BatchSpec(chunk_length=length)
    with store.replay(columns) as replay:
        sampler = Sampler(replay, UniformSelector(), spec, 100)
        assert np.isnan(sampler.sample().extras["advantage"]).all()
        found = {"advantage": np.arange(4) / 4, "log_prob": np.arange(4)}
        store.put(*column_labels("ep-1", found, "recap", first_step=1))
        for later in (False, True):
            if later:  # the rows of a chunk that is stored afterwards have no labels
                store.put(chunk(3, 0, 5, end=True, extras=recorded))
            replay.refresh()
            batch = sampler.sample()
            episode, step = numbers(batch)
            step = np.minimum(step[:, None] + np.arange(max(1, length)), 4)
            labelled = (episode[:, None] == 1) & (step > 0)
            advantage, log_prob = (batch.extras[name].reshape(100, -1) for name in ("advantage", "log_prob"))
            np.testing.assert_array_equal(advantage, np.where(labelled, (step - 1) / 4, np.nan))
            np.testing.assert_array_equal(log_prob, np.where(labelled, step - 1, -7))
    with store.replay(columns) as again:
        values = again.index.labelled_column("advantage", np.arange(5))
        assert values is not None and values[1:].tolist() == [0, 0.25, 0.5, 0.75] and np.isnan(values[0])
