"""SAC-Flow and the policy that it trains: conformance, the density of a path, and that it learns."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from point_kit import POINT, chunks, success_rate

from hal.spec import Array, RobotSpec
from user_sys.algorithms.algorithm import Algorithm, policy_arrays
from user_sys.algorithms.conformance import AlgorithmConformance
from user_sys.algorithms.sac_flow import SacFlow, SacFlowSettings
from user_sys.episode import Phase
from user_sys.errors import ConfigError
from user_sys.policies.conformance import PolicyConformance, example_spec
from user_sys.policies.gated_flow import GatedFlowNetwork, GatedFlowPolicy, GatedFlowSettings
from user_sys.policies.policy import Policy

torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
SMALL = SacFlowSettings(critic_hidden=(32, 32), critics=3)
FLOW = GatedFlowSettings(chunk_length=2, flow_steps=3, hidden=(32, 32))


def network(spec: RobotSpec, settings: GatedFlowSettings = FLOW) -> GatedFlowNetwork:
    module = GatedFlowPolicy.make_module(spec, settings=settings)
    assert isinstance(module, GatedFlowNetwork)
    return module


class TestSacFlow(AlgorithmConformance):
    def make(self, spec: RobotSpec) -> Algorithm:
        cloned = network(spec, replace(FLOW, pretrain_updates=1))
        return SacFlow(replace(SMALL, cloning=0.1, critics_first=0), cloned, spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return GatedFlowPolicy(spec, settings=FLOW)


class TestGatedFlowPolicy(PolicyConformance):
    def make(self, spec: RobotSpec) -> Policy:
        return GatedFlowPolicy(spec, settings=FLOW)

    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        torch.manual_seed(seed)
        return policy_arrays(network(spec))


def test_rollout_has_the_density_of_its_path() -> None:
    torch.manual_seed(0)
    module, steps = network(example_spec()), FLOW.flow_steps
    context, noise = torch.randn(5, module.observation_size), torch.randn(steps + 1, 5, 2, 2)
    chunk, log_prob = module.rollout(context, noise)
    log_std = module.deviation(context)
    x, std = noise[0], log_std.exp() / math.sqrt(steps)
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(x).sum((1, 2))
    for step in range(steps):
        mean = module.transition(x, step, context, log_std)
        x = mean + std * noise[step + 1]
        expected += torch.distributions.Normal(mean, std).log_prob(x).sum((1, 2))
    expected -= torch.log(1 - torch.tanh(x).square()).sum((1, 2))
    torch.testing.assert_close(chunk, torch.tanh(x))
    torch.testing.assert_close(log_prob, expected, rtol=1e-4, atol=1e-3)


def test_noise_between_the_steps_keeps_the_distribution() -> None:
    """For x_1 ~ N(0.5, 0.5^2) the velocity is known, and so is the deviation at each time."""
    torch.manual_seed(0)
    module = network(POINT, GatedFlowSettings(flow_steps=100, hidden=(8,)))
    mean, std = 0.5, 0.5

    def velocity(x: torch.Tensor, t: torch.Tensor, *_: object) -> torch.Tensor:
        at = t[:, None, None]
        variance = (1 - at).square() + (at * std).square()
        return mean + (at * std**2 - (1 - at)) / variance * (x - at * mean)

    module.velocity = velocity  # type: ignore[method-assign]  # that of a known distribution
    module.log_std.bias.data.fill_(math.log(0.5))
    with torch.no_grad():
        chunk, _ = module.rollout(torch.zeros(20_000, 1), torch.randn(101, 20_000, 1, 1))
    x = torch.atanh(chunk)
    assert float(x.mean()) == pytest.approx(mean, abs=0.02) and float(x.std()) == pytest.approx(std, abs=0.02)


def test_chunk_that_is_cut_off_trains_no_critic() -> None:
    found = []
    for reward in (0.0, 1.0):
        torch.manual_seed(0)
        algorithm = SacFlow(SMALL, network(POINT), POINT)
        batch = chunks(np.zeros((8, 1), np.float32), np.zeros((8, 2, 1), np.float32))
        assert batch.mask is not None
        batch.mask[:, 1], batch.terminated[:], batch.reward[:] = False, False, reward
        algorithm.update(batch, 0)
        found.append(policy_arrays(algorithm.critics))
    for name, value in found[0].items():
        np.testing.assert_array_equal(value, found[1][name])


def test_other_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="set policy.kind: gated_flow"):
        SacFlow(SMALL, torch.nn.Linear(1, 1), example_spec())


@pytest.mark.slow
def test_algorithm_learns_from_a_sparse_reward() -> None:
    torch.manual_seed(0)
    settings = GatedFlowSettings(flow_steps=2, hidden=(32, 32))
    quick = replace(SMALL, critics=2, learning_rate=1e-3, acting_rate=0.05)
    algorithm, policy = SacFlow(quick, network(POINT, settings), POINT), GatedFlowPolicy(POINT, settings=settings)
    rng = np.random.default_rng(0)
    policy.load(policy_arrays(algorithm.policy))
    before = success_rate(policy)
    for number in range(650):
        x = rng.uniform(-1, 1, (128, 1)).astype(np.float32)
        algorithm.update(chunks(x, rng.uniform(-0.2, 0.2, (128, 1, 1)).astype(np.float32)), number)
    policy.load(policy_arrays(algorithm.policy))
    assert before < 0.5 and success_rate(policy) > 0.9, algorithm.scalars()


def test_only_the_steps_of_a_person_are_cloned() -> None:
    """A chunk that begins in a correction may go on with steps of the policy or of the robot."""
    module = network(POINT, replace(FLOW, pretrain_updates=1))
    algorithm = SacFlow(replace(SMALL, cloning=1.0, critics_first=0), module, POINT)
    masks: list[list[list[bool]]] = []
    original = module.imitation_loss

    def imitation_loss(x: torch.Tensor, action: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        masks.append(mask.tolist())
        return original(x, action, mask)

    module.imitation_loss = imitation_loss  # type: ignore[method-assign, assignment]
    phase = torch.tensor([[Phase.CORRECTION, Phase.POLICY], [Phase.POLICY, Phase.CORRECTION]])
    batch = replace(chunks(np.ones((2, 1), np.float32), np.full((2, 2, 1), 0.1, np.float32)), phase=phase)
    for number in (0, 2):  # which clones only, and which trains the critics too
        algorithm.update(batch, number)
    assert masks == [[[True, False]], [[True, False], [False, False]]]
