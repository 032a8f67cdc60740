"""n-step returns, action chunks and sequences within an episode, never across its end."""

from __future__ import annotations

import numpy as np
from replay_kit import CAMERA, PICTURES, Store, chunk, raw

from user_sys.replay.batches import ActionChunkBuilder, SequenceBuilder, TransitionBuilder
from user_sys.replay.sampler import Sampler
from user_sys.replay.selectors import UniformSelector


def test_n_step_returns_stop_at_episode_end(store: Store) -> None:
    store.put(chunk(1, 0, 3), chunk(1, 3, 3, index=1, end=True), chunk(2, 0, 4))
    with store.replay() as replay:
        batch = Sampler(replay, UniformSelector(), TransitionBuilder(steps=3, discount=0.5), 300).sample()
    now, then = batch.observation["observation.state"], batch.next_observation["observation.state"]
    for (episode, step, _), after, reward, discount, terminated in zip(
        now.tolist(), then.tolist(), batch.reward, batch.discount, batch.terminated, strict=True
    ):
        last = 5 if episode == 1 else 2  # the observation after step 3 of episode 2 is not stored yet
        taken = min(3, last - int(step) + 1)
        assert after[:2] == [episode, step + taken]
        assert reward == sum(0.5**k * (step + k) for k in range(taken))
        assert discount == 0.5**taken
        assert terminated == (episode == 1 and step + taken == 6)


def test_action_chunks_mask_steps_after_episode_end(store: Store) -> None:
    store.put(chunk(1, 0, 2), chunk(1, 2, 2, index=1, end=True), chunk(2, 0, 9, end=True))
    with store.replay() as replay:
        batch = Sampler(replay, UniformSelector(), ActionChunkBuilder(3), 300).sample()
    episode, step = batch.observation["observation.state"][:, 0], batch.observation["observation.state"][:, 1]
    last = np.where(episode == 1, 3, 8)
    wanted = np.minimum(step[:, None] + np.arange(3), last[:, None])
    np.testing.assert_array_equal(batch.action[:, :, 0], wanted)
    np.testing.assert_array_equal(batch.action[:, :, 1], np.broadcast_to(episode[:, None], (300, 3)))
    np.testing.assert_array_equal(batch.mask, step[:, None] + np.arange(3) <= last[:, None])


def test_sequences_have_consecutive_frames(store: Store) -> None:
    for episode in (0, 1):
        frames = {step: raw(100 * episode + 10 * step) for step in range(6)}
        store.put(chunk(episode, 0, 2, frames=frames), chunk(episode, 2, 3, index=1, end=True, frames=frames))
    with store.replay(PICTURES, cache_bytes=20_000) as replay:
        batch = Sampler(replay, UniformSelector(), SequenceBuilder(4), 100).sample()
    state = batch.observation["observation.state"]
    assert state.shape == (100, 4, 3) and batch.observation[CAMERA].shape == (100, 4, 16, 24, 3)
    wanted = np.minimum(state[:, :1, 1] + np.arange(4), 4)
    np.testing.assert_array_equal(state[:, :, 1], wanted)
    np.testing.assert_array_equal(batch.mask, state[:, :1, 1] + np.arange(4) <= 4)
    level = 100 * state[:, :, 0] + 10 * state[:, :, 1]
    np.testing.assert_array_equal(
        batch.observation[CAMERA], np.broadcast_to(level[..., None, None, None], (100, 4, 16, 24, 3))
    )
    np.testing.assert_array_equal(batch.reward, wanted)
    np.testing.assert_array_equal(batch.terminated, wanted == 4)
    np.testing.assert_array_equal(batch.action[:, :, 0], wanted)
