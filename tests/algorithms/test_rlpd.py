"""RLPD: conformance, its mathematics on cases that can be worked out, and that it learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hal.spec import ACTION, STATE, Array, ArraySpec, RobotSpec
from user_sys.algorithms.algorithm import Algorithm
from user_sys.algorithms.conformance import AlgorithmConformance, ExampleBatch, example_batch
from user_sys.algorithms.rlpd import Rlpd, RlpdConfig, critic_parameters, critics_forward, squash
from user_sys.errors import ConfigError
from user_sys.policies.conformance import example_spec
from user_sys.policies.mlp import MlpPolicy
from user_sys.policies.policy import Policy
from user_sys.weights.gpu_copy import HostCopier

torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
SMALL = RlpdConfig(actor_hidden=(32, 32), critic_hidden=(32, 32), critics=4)


class TestRlpd(AlgorithmConformance):
    def make(self, spec: RobotSpec, seed: int) -> Algorithm:
        return Rlpd(SMALL, spec, seed=seed)

    def policy(self, spec: RobotSpec) -> Policy:
        return MlpPolicy(spec)


class TestRlpdWhoseWeightsAreFetched(TestRlpd):
    """As from a GPU, which the host's memory stands for."""

    def make(self, spec: RobotSpec, seed: int) -> Algorithm:
        return Rlpd(SMALL, spec, seed=seed, copier=HostCopier(torch.device("cpu")))


def test_each_critic_of_the_batch_is_a_network_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    critics = critic_parameters(5, (16, 8), 3, generator)
    x = torch.randn(7, 5, generator=generator)
    together = critics_forward(critics, x)
    assert together.shape == (3, 7)
    for i in range(3):
        h = x
        for layer, width in enumerate((16, 8)):
            h = h @ critics[f"{layer}.weight"][i] + critics[f"{layer}.bias"][i]
            h = torch.relu(torch.nn.functional.layer_norm(h, (width,)))
        alone = (h @ critics["2.weight"][i] + critics["2.bias"][i])[:, 0]
        torch.testing.assert_close(together[i], alone)


def test_the_squashed_density_is_torchs_own() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, log_std, noise = (0.5 * torch.randn(50, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    action, log_prob = squash(mean, log_std, noise)
    normal = torch.distributions.Normal(mean, log_std.exp())
    tanh = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    torch.testing.assert_close(log_prob, tanh.log_prob(action).sum(-1), rtol=1e-4, atol=1e-4)


def test_the_value_of_a_terminal_step_is_its_reward() -> None:
    rng, algorithm = np.random.default_rng(0), Rlpd(SMALL, example_spec(), seed=0)
    for _ in range(400):
        batch = example_batch(rng, 64)
        batch.terminated[:] = True
        batch.reward[:] = 0.7
        algorithm.update(batch)
    assert algorithm.scalars()["q"] == pytest.approx(0.7, abs=0.05)
    assert algorithm.scalars()["target"] == pytest.approx(0.7, abs=1e-6)


class Weightless(ExampleBatch):
    @property
    def weight(self) -> Array:
        return np.zeros(len(self.reward), np.float32)


class Shortsighted(ExampleBatch):
    @property
    def discount(self) -> Array:
        return np.zeros(len(self.reward), np.float32)


def test_a_sample_of_no_weight_teaches_the_critics_nothing() -> None:
    batch, algorithm = example_batch(np.random.default_rng(0), 64), Rlpd(SMALL, example_spec(), seed=0)
    before = algorithm.state_dict()
    algorithm.update(Weightless(**vars(batch)))
    critics = {name for name in before if name.startswith("critics.") and name.endswith(("weight", "bias"))}
    assert critics and all(np.array_equal(before[name], algorithm.state_dict()[name]) for name in critics)
    algorithm.update(batch)
    assert not any(np.array_equal(before[name], algorithm.state_dict()[name]) for name in critics)


def test_the_batch_says_what_the_next_value_counts_and_hears_each_samples_error() -> None:
    batch, algorithm = example_batch(np.random.default_rng(0), 64), Rlpd(SMALL, example_spec(), seed=0)
    batch.terminated[:] = False
    batch.reward[:] = np.linspace(0.0, 1.0, 64)
    for _ in range(200):
        algorithm.update(Shortsighted(**vars(batch)))
    assert algorithm.scalars()["target"] == pytest.approx(0.5, abs=1e-6)
    errors = algorithm.td_errors()
    assert errors.shape == (64,) and errors.dtype == np.float32 and 0 < errors.mean() < 0.2
    batch.reward[7] = 30.0
    algorithm.update(Shortsighted(**vars(batch)))
    assert algorithm.td_errors().argmax() == 7 and algorithm.td_errors()[7] == pytest.approx(30.0, abs=1.5)


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"target_critics": 11}, {"discount": 1.0}, {"critic_hidden": ()}, {"actor_period": 0}):
        with pytest.raises(ConfigError):
            RlpdConfig(**wrong)  # type: ignore[arg-type]  # wrong on purpose


POINT = RobotSpec(
    model="point",
    rate_hz=10.0,
    observation=(ArraySpec(name=STATE, labels=("x",), units=("m",), low=(-1.0,), high=(1.0,)),),
    action=ArraySpec(name=ACTION, labels=("dx",), units=("m",), low=(-0.2,), high=(0.2,)),
)


def step_point(x: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A point on a line is to be brought to the origin: (next x, whether it is there), each (n, 1)."""
    x = np.clip(x + action, -1.0, 1.0)
    return x.astype(np.float32), np.abs(x) < 0.05


def success_rate(policy: MlpPolicy) -> float:
    reached = 0
    for start in np.linspace(-1.0, 1.0, 21, dtype=np.float32):
        x = np.array([start])
        for _ in range(10):
            x, done = step_point(x, policy.act({STATE: x}, "", deterministic=True).actions[0])
            if done[0]:
                reached += 1
                break
    return reached / 21


def test_it_learns_from_a_sparse_reward() -> None:
    rng, config = np.random.default_rng(0), RlpdConfig(actor_hidden=(32, 32), critic_hidden=(32, 32), critics=4)
    algorithm, policy = Rlpd(config, POINT, seed=0), MlpPolicy(POINT)
    policy.load(algorithm.policy_weights())
    before = success_rate(policy)
    x = rng.uniform(-1, 1, (4000, 1)).astype(np.float32)
    action = rng.uniform(-0.2, 0.2, (4000, 1)).astype(np.float32)
    following, there = step_point(x, action)
    for _ in range(1200):
        i = rng.integers(0, len(x), 128)
        done = there[i, 0]
        batch = ExampleBatch({STATE: x[i]}, {STATE: following[i]}, action[i], done.astype(np.float32), done)
        algorithm.update(batch)
    policy.load(algorithm.policy_weights())
    assert before < 0.5 and success_rate(policy) > 0.9
