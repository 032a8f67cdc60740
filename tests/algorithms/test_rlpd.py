"""RLPD: conformance, its mathematics on cases that can be worked out, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from point_kit import POINT, step_point, success_rate
from torch import Tensor

from hal.spec import STATE, RobotSpec
from user_sys.algorithms.actor_critic import CriticEnsemble
from user_sys.algorithms.algorithm import Algorithm, TensorBatch, policy_arrays, save_state
from user_sys.algorithms.conformance import (
    AlgorithmConformance,
    example_batch,
    train_together,
    train_with,
)
from user_sys.algorithms.distributed import TrainingGroup
from user_sys.algorithms.rlpd import Rlpd, RlpdSettings
from user_sys.errors import ConfigError
from user_sys.policies.conformance import example_spec
from user_sys.policies.mlp import MlpPolicy, MlpSettings
from user_sys.policies.networks import squash
from user_sys.policies.policy import Policy

torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
SMALL = RlpdSettings(critic_hidden=(32, 32), critics=4)


def small(spec: RobotSpec, settings: RlpdSettings = SMALL, kind: type[Rlpd] = Rlpd) -> Rlpd:
    return kind(settings, MlpPolicy.make_module(spec, settings=MlpSettings((32, 32))), spec)


class TestRlpd(AlgorithmConformance):
    def make(self, spec: RobotSpec) -> Algorithm:
        return small(spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return MlpPolicy(spec)


class NoiselessRlpd(Rlpd):
    """Draws nothing, so that each sample's part of the gradient does not depend on the process."""

    def _draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(x)
        return squash(mean, log_std, torch.zeros_like(mean))


class Noiseless(TestRlpd):
    __test__ = False

    def make(self, spec: RobotSpec) -> Algorithm:
        return small(spec, replace(SMALL, critics=2, target_critics=2, backup_entropy=True), NoiselessRlpd)


def test_two_processes_with_half_the_batch_each_learn_what_one_does() -> None:
    together, alone = train_together(Noiseless, 6)[0], train_with(Noiseless(), TrainingGroup(), 6)
    start = train_with(Noiseless(), TrainingGroup(), 0)
    for name, value in alone.items():
        np.testing.assert_allclose(together[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    name = "network.actor.mean.weight"
    assert np.abs(alone[name] - start[name]).max() > 1e-3, "they moved further than apart"


def test_each_critic_of_the_batch_is_a_network_of_its_own() -> None:
    critics, x = CriticEnsemble(5, (16, 8), 3), torch.randn(7, 5)
    together = critics(x)
    assert together.shape == (3, 7)
    for i in range(3):
        h = x
        for layer, width in enumerate((16, 8)):
            h = h @ critics.weights[layer][i] + critics.biases[layer][i]
            h = torch.relu(torch.nn.functional.layer_norm(h, (width,)))
        alone = (h @ critics.weights[2][i] + critics.biases[2][i])[:, 0]
        torch.testing.assert_close(together[i], alone)


def test_squashed_density_is_torchs_own() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, log_std, noise = (0.5 * torch.randn(50, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    action, log_prob = squash(mean, log_std, noise)
    normal = torch.distributions.Normal(mean, log_std.exp())
    tanh = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    torch.testing.assert_close(log_prob, tanh.log_prob(action).sum(-1), rtol=1e-4, atol=1e-4)


def test_value_of_a_terminal_step_is_its_reward() -> None:
    rng, algorithm = np.random.default_rng(0), small(example_spec())
    for number in range(160):
        batch = example_batch(rng, 64)
        batch.terminated[:] = True
        batch.reward[:] = 0.7
        algorithm.update(batch, number)
    assert algorithm.scalars()["q"] == pytest.approx(0.7, abs=0.05)
    assert algorithm.scalars()["target"] == pytest.approx(0.7, abs=1e-6)


def test_sample_without_weight_does_not_train_the_critics() -> None:
    batch, algorithm = example_batch(np.random.default_rng(0), 64), small(example_spec())
    before = save_state(algorithm)
    algorithm.update(replace(batch, weight=torch.zeros(64)), 0)
    critics = {name for name in before if name.startswith("network.critics.")}
    assert critics and all(np.array_equal(before[name], save_state(algorithm)[name]) for name in critics)
    algorithm.update(batch, 1)
    assert not any(np.array_equal(before[name], save_state(algorithm)[name]) for name in critics)


def test_batch_gives_the_discount_and_gets_each_samples_error() -> None:
    batch, algorithm = example_batch(np.random.default_rng(0), 64), small(example_spec())
    batch.terminated[:] = False
    batch.reward[:] = torch.linspace(0.0, 1.0, 64)
    batch.discount[:] = 0.0
    for number in range(200):
        algorithm.update(batch, number)
    assert algorithm.scalars()["target"] == pytest.approx(0.5, abs=1e-6)
    errors = algorithm.td_errors()
    assert errors.shape == (64,) and errors.dtype == torch.float32 and 0 < errors.mean() < 0.2
    batch.reward[7] = 30.0
    algorithm.update(batch, 200)
    assert algorithm.td_errors().argmax() == 7 and algorithm.td_errors()[7].item() == pytest.approx(30.0, abs=1.5)
    batch.weight[7] = 0.0  # such as a step of a film
    algorithm.update(batch, 201)
    errors = algorithm.td_errors()
    assert errors[7].item() == pytest.approx(float(errors[batch.weight > 0].mean()))


def test_invalid_settings_are_refused() -> None:
    for wrong in ({"target_critics": 11}, {"discount": 1.0}, {"critic_hidden": ()}, {"actor_period": 0}):
        with pytest.raises(ConfigError):
            RlpdSettings(**wrong)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigError, match="rlpd needs a policy with a squashed Gaussian density"):
        Rlpd(SMALL, torch.nn.Linear(3, 2), example_spec())


def test_algorithm_learns_from_a_sparse_reward() -> None:
    torch.manual_seed(0)
    rng, algorithm, policy = np.random.default_rng(0), small(POINT), MlpPolicy(POINT)
    policy.load(policy_arrays(algorithm.policy))
    before = success_rate(policy)
    x = rng.uniform(-1, 1, (4000, 1)).astype(np.float32)
    action = rng.uniform(-0.2, 0.2, (4000, 1)).astype(np.float32)
    following, there = step_point(x, action)
    x, action, following, there = map(torch.from_numpy, (x, action, following, there))
    for number in range(700):
        i = torch.from_numpy(rng.integers(0, len(x), 128))
        done = there[i, 0]
        discount, weight = torch.full((128,), 0.97), torch.ones(128)
        now, then = {STATE: x[i]}, {STATE: following[i]}
        algorithm.update(TensorBatch(now, then, action[i], done.float(), discount, done, weight), number)
    policy.load(policy_arrays(algorithm.policy))
    assert before < 0.5 and success_rate(policy) > 0.9
