"""The numpy policy: conformance, agreement with the learner's torch twin, exploration before the first weights."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.errors import SpecError
from hal.spec import ACTION, Array, ArraySpec, RobotSpec
from user_sys.algorithms.rlpd import Rlpd, RlpdConfig, actor_forward, squash
from user_sys.policies.conformance import PolicyConformance, example_observation, example_spec
from user_sys.policies.mlp import MlpPolicy, action_affine, bounds_affine
from user_sys.policies.mlp_torch import TorchMlpPolicy, warm_up_gpu
from user_sys.policies.policy import Policy

SMALL = RlpdConfig(actor_hidden=(32, 32), critic_hidden=(8,), critics=2)


def trained_like(spec: RobotSpec, seed: int) -> dict[str, Array]:
    """Weights as a learner publishes them, with heads large enough to reach the bounds."""
    return Rlpd(SMALL, spec, seed=seed).policy_weights()


class TestMlpPolicy(PolicyConformance):
    def make(self, spec: RobotSpec) -> Policy:
        return MlpPolicy(spec, seed=0)

    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        return trained_like(spec, seed)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_numpy_and_torch_agree(seed: int) -> None:
    spec, rng = example_spec(), np.random.default_rng(seed)
    weights = trained_like(spec, seed % 5)
    observation = example_observation(rng)
    policy = MlpPolicy(spec, seed=seed)
    policy.load(weights)
    drawn = policy.act(observation, "", deterministic=False)
    noise = np.random.default_rng(seed)
    noise.standard_normal(2)  # what the policy's exploration drew when it was made
    w = {name: torch.from_numpy(value) for name, value in weights.items()}
    x = torch.from_numpy(np.concatenate(list(observation.values())))
    x = ((x - w["input.offset"]) * w["input.scale"]).clamp(-5, 5)[None]
    actor = {k: v for k, v in w.items() if k.split(".")[0] not in ("input", "action")}
    mean, log_std = actor_forward(actor, x)
    squashed, log_prob = squash(mean, log_std, torch.from_numpy(noise.standard_normal(2, np.float32))[None])
    action = w["action.centre"] + w["action.scale"] * squashed[0]
    np.testing.assert_allclose(drawn.actions[0], action.numpy(), atol=1e-5)
    np.testing.assert_allclose(drawn.log_prob[0], log_prob[0].item(), atol=1e-3, rtol=1e-3)
    deterministic = policy.act(observation, "", deterministic=True).actions[0]
    expected = w["action.centre"] + w["action.scale"] * torch.tanh(mean[0])
    np.testing.assert_allclose(deterministic, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_torch_twin_acts_as_the_numpy_policy_but_for_rounding(device: str) -> None:
    """What a float32 network of three layers rounds away, and what that makes of a density."""
    spec, rng = example_spec(), np.random.default_rng(0)
    here, there = MlpPolicy(spec, seed=4), TorchMlpPolicy(spec, device, seed=4)
    for seed in range(3):
        for _ in range(50):
            observation = example_observation(rng)
            for deterministic in (True, False):
                one, other = (p.act(observation, "", deterministic=deterministic) for p in (here, there))
                np.testing.assert_allclose(one.actions, other.actions, atol=1e-6)
                np.testing.assert_allclose(one.log_prob, other.log_prob, atol=1e-3, rtol=1e-4)
        for policy in (here, there):
            policy.load(trained_like(spec, seed))


@pytest.mark.gpu
def test_all_policies_of_a_process_act_on_one_urgent_stream_and_load_on_another() -> None:
    assert warm_up_gpu()
    streams = {TorchMlpPolicy(example_spec(), "cuda", seed=seed)._streams for seed in range(3)}
    ((acting, loading),) = streams
    assert acting is not None and loading is not None and acting.priority < loading.priority


class TestTorchMlpPolicy(PolicyConformance):
    def make(self, spec: RobotSpec) -> Policy:
        return TorchMlpPolicy(spec, "cpu", seed=0)

    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        return trained_like(spec, seed)


def test_before_weights_it_explores_the_whole_box_smoothly() -> None:
    spec, rng = example_spec(), np.random.default_rng(0)
    policy = MlpPolicy(spec, seed=3)
    actions = np.stack([policy.act(example_observation(rng), "", deterministic=False).actions[0] for _ in range(20000)])
    scaled = (actions - np.array([0.0, 0.04])) / np.array([0.05, 0.04])
    share, _ = np.histogram(scaled[:, 0], bins=10, range=(-1, 1), density=False)
    np.testing.assert_allclose(share / len(scaled), 0.1, atol=0.02)  # uniform
    assert np.corrcoef(scaled[1:, 0], scaled[:-1, 0])[0, 1] > 0.5  # and it keeps its direction for a while


def test_bounds_map_to_the_unit_box_and_unbounded_elements_stay() -> None:
    spec = example_spec()
    offset, scale = bounds_affine(spec.observation)
    np.testing.assert_allclose((np.array([0.5, 7.0, 0.0]) - offset) * scale, [1.0, 7.0, -1.0])


def test_an_unbounded_action_is_refused() -> None:
    with pytest.raises(SpecError, match="finite bounds"):
        action_affine(ArraySpec(name=ACTION, labels=("x",), units=("m",), low=(-np.inf,), high=(1.0,)))


def test_the_robots_computer_needs_no_torch() -> None:
    code = "import sys, user_sys.policies.mlp, user_sys.weights.double_buffer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
