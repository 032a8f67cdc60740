"""The conformance suite of rewards: a test class inherits `RewardConformance` and defines `make`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np

from hal.spec import ACTION, ENVIRONMENT_STATE, STATE, Array
from user_sys.episode import APPLIED_ACTION, IMAGE_PREFIX, ChunkHeader, EpisodeEnd, EpisodeSource
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import StoredEpisode
from user_sys.interchange.frames import Frame
from user_sys.rewards.reward import EpisodeReward, Reward

CAMERAS, TASK = ("front", "wrist"), "conformance"


def example_episode(rng: np.random.Generator, steps: int = 12, *, task: str = TASK) -> StoredEpisode:
    """A complete episode with the vectors of `user_sys.policies.conformance.example_spec` and two cameras of 64x64.

    The camera ``wrist`` delivers in every second step, and has no picture after the last one.
    """
    header = ChunkHeader(
        episode="example-0",
        index=0,
        first_step=0,
        steps=steps,
        robot="example",
        embodiment="conformance",
        task=task,
        sentence="lift the cube",
        source=EpisodeSource.ONLINE,
        seed=0,
        started_unix_ns=1_700_000_000_000_000_000,
        end=EpisodeEnd(steps=steps, success=None),
    )
    columns = {name: rng.uniform(0.0, 0.05, (steps, n)).astype(np.float32) for name, n in _SIZES.items()}
    columns |= {"reward": np.zeros(steps, np.float32), "phase": np.zeros(steps, np.uint8)}
    final = {name: rng.uniform(0.0, 0.05, n).astype(np.float32) for name, n in _SIZES.items() if "action" not in name}

    def picture() -> Array:
        return rng.integers(0, 256, (64, 64, 3), np.uint8)

    frames: dict[str, list[Frame | None]] = {
        IMAGE_PREFIX + camera: [picture() if camera == "front" or step % 2 == 0 else None for step in range(steps)]
        for camera in CAMERAS
    }
    captured = {name: np.arange(steps, dtype=np.int64) for name in frames}
    return StoredEpisode(header, (steps,), columns, {**final, IMAGE_PREFIX + "front": picture()}, frames, captured)


_SIZES = {STATE: 2, ENVIRONMENT_STATE: 1, ACTION: 2, APPLIED_ACTION: 2}


class RewardConformance(ABC):
    """See the module."""

    @abstractmethod
    def make(self) -> Reward:
        """Returns a reward that evaluates episodes of `example_episode`."""

    def episode(self, rng: np.random.Generator, steps: int = 12) -> StoredEpisode:
        """Draws an episode; overridden by rewards that read other features."""
        return example_episode(rng, steps)

    def test_settings_have_defaults(self) -> None:
        kind = type(self.make())
        assert kind.settings() == kind.settings()

    def test_results_have_one_finite_reward_a_step(self) -> None:
        reward, rng = self.make(), np.random.default_rng(0)
        for steps in (1, 2, 40):
            found = reward.evaluate(self.episode(rng, steps))
            assert found.success in (True, False, None)
            assert found.probability is None or 0.0 <= found.probability <= 1.0
            if found.rewards is not None:
                assert found.rewards.shape == (steps,) and np.isfinite(found.rewards).all()

    def test_equal_episodes_give_equal_results_and_stay_as_they_are(self) -> None:
        reward = self.make()
        first, second = (self.episode(np.random.default_rng(1)) for _ in range(2))
        other = self.episode(np.random.default_rng(2))
        one = reward.evaluate(first)
        reward.evaluate(other)
        _assert_equal(one, reward.evaluate(first))
        _assert_equal(one, self.make().evaluate(second))
        for name, column in first.columns.items():
            np.testing.assert_array_equal(column, second.columns[name], err_msg=name)

    def test_an_episode_without_observations_is_refused_or_left_as_it_is(self) -> None:
        reward, whole = self.make(), self.episode(np.random.default_rng(3))
        bare = replace(
            whole,
            columns={name: column for name, column in whole.columns.items() if not name.startswith("observation")},
            final={},
            frames={},
            captured_ns={},
        )
        try:
            found = reward.evaluate(bare)
        except DataSetError as error:
            assert str(error)
        else:
            assert found.success is None and found.rewards is None


def _assert_equal(one: EpisodeReward, other: EpisodeReward) -> None:
    assert (one.success, one.probability) == (other.success, other.probability)
    assert (one.rewards is None) == (other.rewards is None)
    if one.rewards is not None:
        np.testing.assert_array_equal(one.rewards, other.rewards)
