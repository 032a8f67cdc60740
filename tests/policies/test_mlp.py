"""The numpy policy: conformance, agreement with the module that trains, exploration before the first weights."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hal.errors import SpecError
from hal.spec import ACTION, Array, ArraySpec, RobotSpec
from user_sys.algorithms.algorithm import policy_arrays
from user_sys.algorithms.bc import Bc, BcSettings
from user_sys.algorithms.conformance import example_batch
from user_sys.errors import ConfigError
from user_sys.policies.conformance import PolicyConformance, example_observation, example_spec
from user_sys.policies.mlp import MlpPolicy, MlpSettings
from user_sys.policies.networks import GaussianNetwork
from user_sys.policies.policy import Policy
from user_sys.policies.scaling import Gripper, action_affine, bounds_affine


def trained_like(spec: RobotSpec, seed: int) -> dict[str, Array]:
    """Weights as a learner publishes them."""
    torch.manual_seed(seed)
    return policy_arrays(MlpPolicy.make_module(spec, settings=MlpSettings((32, 32))))


class TestMlpPolicy(PolicyConformance):
    def make(self, spec: RobotSpec) -> Policy:
        return MlpPolicy(spec, seed=0)

    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        return trained_like(spec, seed)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(get_args(Gripper)))
def test_policy_acts_as_its_module_trains(seed: int, gripper: Gripper) -> None:
    spec, observation = example_spec(), example_observation(np.random.default_rng(seed))
    options = MlpSettings(gripper=gripper)
    module = MlpPolicy.make_module(spec, settings=options)
    policy = MlpPolicy(spec, settings=options, seed=seed)
    policy.load(policy_arrays(module))
    drawn = policy.act(observation, "", deterministic=False)
    noise = np.random.default_rng(seed)
    noise.standard_normal(2)  # what the policy's exploration drew when it was made
    with torch.no_grad():
        x = module.encode({name: torch.from_numpy(value)[None] for name, value in observation.items()})
        scaled, log_prob = module.draw(x, torch.from_numpy(noise.standard_normal(2, np.float32))[None])
        actions = torch.from_numpy(drawn.actions)
        torch.testing.assert_close(module.scale_action(actions), scaled, atol=1e-4, rtol=0)
        np.testing.assert_allclose(drawn.log_prob[0], log_prob[0].item(), atol=1e-3, rtol=1e-3)
        deterministic = torch.from_numpy(policy.act(observation, "", deterministic=True).actions)
        most_likely, _ = module.draw(x, torch.zeros(1, 2))
        torch.testing.assert_close(module.scale_action(deterministic), most_likely, atol=1e-4, rtol=0)
        assert gripper == "continuous" or abs(scaled[0, 1]) == abs(most_likely[0, 1]) == 1.0


def discrete_module() -> GaussianNetwork:
    torch.manual_seed(0)
    module = MlpPolicy.make_module(example_spec(), settings=MlpSettings(gripper="discrete"))
    assert isinstance(module, GaussianNetwork)
    return module


@torch.no_grad()
def test_discrete_gripper_opens_and_closes_fully_and_as_often_as_its_density_says() -> None:
    module = discrete_module()
    x = torch.randn(1, module.observation_size).expand(20_000, -1)
    action, log_prob = module.draw(x, torch.randn(20_000, 2))
    assert set(action[:, 1].tolist()) == {-1.0, 1.0}
    torch.testing.assert_close(module.log_prob(x, action), log_prob, atol=1e-3, rtol=1e-3)
    both = torch.tensor([[0.3, 1.0], [0.3, -1.0]])
    opened, closed = module.log_prob(x[:2], both).tolist()
    assert float((action[:, 1] == 1.0).float().mean()) == pytest.approx(1 / (1 + math.exp(closed - opened)), abs=0.02)


@pytest.mark.parametrize("learn", ["by its value", "by imitation"])
def test_discrete_gripper_learns(learn: str) -> None:
    module = discrete_module()
    x, opened = torch.randn(64, module.observation_size), torch.ones(64, 2)
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    for _ in range(100):
        action, _ = module.draw(x, torch.randn(64, 2))
        loss = -action[:, 1] if learn == "by its value" else module.imitation_loss(x, opened)
        optimizer.zero_grad()
        loss.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    action, _ = module.draw(x, torch.randn(64, 2))
    assert (action[:, 1] > 0).float().mean() > 0.95


@pytest.mark.parametrize("start", [2.0, -2.0])
def test_entropy_of_a_discrete_gripper_can_be_maximised(start: float) -> None:
    module = discrete_module()
    torch.nn.init.zeros_(module.mean.weight)
    torch.nn.init.constant_(module.mean.bias, start)
    optimizer, x = torch.optim.Adam([module.mean.bias], 0.05), torch.randn(256, module.observation_size)
    for _ in range(100):
        _, log_prob = module.draw(x, torch.randn(256, 2))
        optimizer.zero_grad()
        log_prob.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float(torch.special.ndtr(module.mean.bias.detach()[1])) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("mean", [0.7, -1.5, 60.0, -60.0])
def test_gradient_of_a_discrete_grippers_entropy_is_exact_in_each_draw(mean: float) -> None:
    module = discrete_module()
    torch.nn.init.zeros_(module.mean.weight)
    torch.nn.init.constant_(module.mean.bias, mean)
    at = torch.tensor(mean, dtype=torch.float64)
    log_odds = torch.special.log_ndtr(at) - torch.special.log_ndtr(-at)
    expected = float(torch.exp(-0.5 * at.square()) / math.sqrt(2 * math.pi) * log_odds)
    for noise in (100.0, -100.0):  # it opens, and it closes
        _, log_prob = module.draw(torch.zeros(1, module.observation_size), torch.tensor([[0.0, noise]]))
        (gradient,) = torch.autograd.grad(log_prob.sum(), module.mean.bias)
        assert float(gradient[1]) == pytest.approx(expected, abs=1e-5)


def test_entropy_is_that_of_the_gaussian_and_of_the_discrete_gripper() -> None:
    module = discrete_module()
    x = torch.randn(8, module.observation_size)
    mean, log_std = module(x)
    gaussian = torch.distributions.Normal(mean[:, 0], log_std[:, 0].exp())
    gripper = torch.distributions.Bernoulli(torch.special.ndtr(mean[:, 1]))
    torch.testing.assert_close(module.entropy(x), gaussian.entropy() + gripper.entropy())


def test_discrete_gripper_trains_in_bfloat16() -> None:
    module = discrete_module()
    x, action = torch.randn(8, module.observation_size), torch.rand(8, 2) * 2 - 1
    with torch.autocast("cpu", torch.bfloat16):
        losses = module.imitation_loss(x, action), -module.log_prob(x, action), *module.draw(x, torch.randn(8, 2))
    sum(each.float().sum() for each in losses).backward()
    assert all(torch.isfinite(each).all() for each in losses)
    assert module.mean.weight.grad is not None and torch.isfinite(module.mean.weight.grad).all()


def test_discrete_gripper_of_a_robot_without_one_is_refused() -> None:
    spec = replace(example_spec(), gripper=-1)
    with pytest.raises(ConfigError, match="policy.options.gripper is discrete, and the action of conformance has no"):
        MlpPolicy(spec, settings=MlpSettings(gripper="discrete"))


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


def test_action_element_with_equal_bounds_trains_and_stays_there() -> None:
    spec, observation = example_spec(), example_observation(np.random.default_rng(0))
    fixed = replace(spec.action, low=(0.5, *spec.action.low[1:]), high=(0.5, *spec.action.high[1:]))
    spec = replace(spec, action=fixed)
    algorithm, policy = Bc(BcSettings(), MlpPolicy.make_module(spec), spec), MlpPolicy(spec)
    batch = example_batch(np.random.default_rng(0), 8)
    batch.action[:, 0] = 0.5
    algorithm.update(batch, 0)
    policy.load(policy_arrays(algorithm.policy))
    action = policy.act(observation, "", deterministic=False).actions[0]
    assert np.isfinite(action).all() and action[0] == 0.5


def test_unbounded_action_and_an_empty_network_are_refused() -> None:
    with pytest.raises(SpecError, match="finite bounds"):
        action_affine(ArraySpec(name=ACTION, labels=("x",), units=("m",), low=(-np.inf,), high=(1.0,)))
    with pytest.raises(ConfigError, match="one or more widths above 0"):
        MlpSettings(hidden=())


def test_robots_computer_needs_no_torch() -> None:
    code = (
        "import sys, user_sys.compose as c, user_sys.weights.receiver; from user_sys.policies.conformance "
        "import example_spec; c.make_policy(c.PolicyConfig(), example_spec(), 0); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
