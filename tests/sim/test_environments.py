"""The Gymnasium environments from a user's view."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import sim  # noqa: F401  registers the environments

IDS = [f"user_sim/{model}{task}-v0" for model in ("Panda", "SO101", "UR5e") for task in ("Lift", "Reach")]


@pytest.mark.parametrize("name", IDS)
def test_gymnasium_check_passes_without_warnings(name: str) -> None:
    env = gymnasium.make(name, render_mode="rgb_array", width=64, height=64)
    check_env(env.unwrapped)
    env.close()


@pytest.mark.parametrize("name", IDS)
def test_episodes_end_and_render_has_requested_size(name: str) -> None:
    env = gymnasium.make(f"sim:{name}", render_mode="rgb_array", width=96, height=64)
    env.action_space.seed(0)
    observation, _ = env.reset(seed=3)
    assert env.observation_space.contains(observation)
    for _ in range(50):
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert env.observation_space.contains(observation)
        assert info["is_success"] == (reward == 1.0)
        if terminated or truncated:
            break
    assert terminated or truncated
    assert env.render().shape == (64, 96, 3)
    env.close()


def test_action_spans_the_whole_range() -> None:
    env = gymnasium.make("user_sim/PandaReach-v0")
    before, _ = env.reset(seed=0)
    for _ in range(3):
        after, *_ = env.step(np.array([0, 0, 1, -1], np.float32))
    rise = after["state"][16] - before["state"][16]
    assert 0.05 < rise <= 0.125
    assert after["state"][20] < 0.06, "the gripper closes at -1"
    env.close()
