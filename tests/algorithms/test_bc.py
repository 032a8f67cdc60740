"""Behaviour cloning and HG-DAgger: conformance, which steps they imitate, and that they act like the expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from point_kit import POINT, chunks, expert, success_rate
from torch import Tensor, nn

from hal.spec import STATE, RobotSpec
from user_sys.algorithms.algorithm import Algorithm, policy_arrays
from user_sys.algorithms.bc import Bc, BcSettings
from user_sys.algorithms.conformance import AlgorithmConformance
from user_sys.algorithms.hg_dagger import HgDagger, HgDaggerSettings
from user_sys.episode import EpisodeSource
from user_sys.errors import ConfigError
from user_sys.policies.conformance import example_spec
from user_sys.policies.flow import FlowPolicy, FlowSettings
from user_sys.policies.mlp import MlpPolicy, MlpSettings
from user_sys.policies.policy import Policy

torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
MLP, FLOW = MlpSettings((32, 32)), FlowSettings(chunk_length=3, flow_steps=4, hidden=(32, 32))


class TestBc(AlgorithmConformance):
    def make(self, spec: RobotSpec) -> Algorithm:
        return Bc(BcSettings(), MlpPolicy.make_module(spec, settings=MLP), spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return MlpPolicy(spec)


class TestHgDaggerOnChunks(AlgorithmConformance):
    def make(self, spec: RobotSpec) -> Algorithm:
        return HgDagger(HgDaggerSettings(), FlowPolicy.make_module(spec, settings=FLOW), spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return FlowPolicy(spec, settings=FLOW)


@pytest.mark.parametrize("kind", [MlpPolicy, FlowPolicy])
def test_cloned_policy_acts_like_the_expert(kind: type[MlpPolicy | FlowPolicy]) -> None:
    torch.manual_seed(0)
    rng, length = np.random.default_rng(0), 1 if kind is MlpPolicy else FLOW.chunk_length
    settings = MLP if kind is MlpPolicy else FLOW
    algorithm = Bc(BcSettings(), kind.make_module(POINT, settings=settings), POINT)
    policy = kind(POINT, settings=settings)
    for number in range(400):
        x = rng.uniform(-1, 1, (128, 1)).astype(np.float32)
        batch = chunks(x, expert(x, length))
        algorithm.update(batch if length > 1 else replace(batch, action=batch.action[:, 0], mask=None), number)
    policy.load(policy_arrays(algorithm.policy))
    assert success_rate(policy) > 0.9


@pytest.mark.parametrize("kind", [MlpPolicy, FlowPolicy])
def test_steps_without_an_action_change_no_weights(kind: type[MlpPolicy | FlowPolicy]) -> None:
    settings = MLP if kind is MlpPolicy else FLOW
    algorithm = Bc(BcSettings(), kind.make_module(POINT, settings=settings), POINT)
    before = policy_arrays(algorithm.policy)
    batch = chunks(np.zeros((8, 1), np.float32), np.zeros((8, FLOW.chunk_length, 1), np.float32))
    assert batch.mask is not None
    batch = replace(batch, weight=torch.zeros(8), mask=torch.zeros_like(batch.mask))
    algorithm.update(batch if kind is FlowPolicy else replace(batch, action=batch.action[:, 0], mask=None), 0)
    for name, array in policy_arrays(algorithm.policy).items():
        np.testing.assert_array_equal(array, before[name])


def test_noise_on_the_actions_keeps_the_policy_spread() -> None:
    rng, deviation = np.random.default_rng(0), {}
    for noise in (0.0, 0.2):
        torch.manual_seed(0)
        settings = BcSettings(learning_rate=3e-3, action_noise=noise)
        algorithm = Bc(settings, MlpPolicy.make_module(POINT, settings=MLP), POINT)
        for number in range(300):
            batch = chunks(rng.uniform(-1, 1, (128, 1)).astype(np.float32), np.zeros((128, 1, 1), np.float32))
            algorithm.update(replace(batch, action=batch.action[:, 0], mask=None), number)
        log_std = algorithm.actor(algorithm.actor.encode({STATE: torch.full((1, 1), 0.5)}))[1]
        deviation[noise] = float(log_std.detach().exp())
    assert deviation[0.0] < 0.14 and 0.2 < deviation[0.2] < 0.35


class NormalizedRegression(nn.Module):
    """An `ImitationPolicy` of one action with a batch norm."""

    features, cameras, chunk_length, frozen_from = (STATE,), (), 1, -1

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def batch_loss(
        self, observation: Mapping[str, Tensor], sentences: Sequence[str], action: Tensor, mask: Tensor
    ) -> Tensor:
        found: Tensor = self.layers(observation[STATE])
        return (found - action[:, 0]).square().mean(-1)


def test_published_policy_has_the_statistics_of_its_batch_norms() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    algorithm = Bc(BcSettings(learning_rate=0.01, acting_rate=0.1), NormalizedRegression(), POINT)
    algorithm.double()  # replaces buffers, as a move to a GPU does
    for number in range(200):
        x = torch.from_numpy(5 + rng.uniform(-1, 1, (64, 1)))
        batch = chunks(np.zeros((64, 1), np.float32), np.zeros((64, 1, 1), np.float32))
        algorithm.update(replace(batch, observation={STATE: x}, action=3 * (x - 5)[:, None]), number)
    assert isinstance(algorithm.policy, NormalizedRegression)
    x = torch.linspace(4, 6, 9, dtype=torch.float64)[:, None]
    torch.testing.assert_close(algorithm.policy.eval().layers(x), 3 * (x - 5), rtol=0, atol=0.5)
    saved = policy_arrays(algorithm.policy)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        np.testing.assert_array_equal(saved[f"layers.1.{name}"], algorithm.actor.state_dict()[f"layers.1.{name}"])


def test_settings_select_what_is_imitated() -> None:
    module = MlpPolicy.make_module(example_spec(), settings=MLP)
    (part,) = Bc(BcSettings(steps=("demonstrations", "successes")), module, example_spec()).data.mixture
    assert part.filters[0].sources == (EpisodeSource.DEMO,) and part.filters[1].success
    others, taken_over = HgDagger(HgDaggerSettings(intervention_share=0.3), module, example_spec()).data.mixture
    assert (others.share, taken_over.share) == (0.7, 0.3)
    assert taken_over.filters[0].phases == ("teleop", "correction")


def test_way_back_is_imitated_only_if_the_settings_name_it() -> None:
    module, spec = MlpPolicy.make_module(example_spec(), settings=MLP), example_spec()
    assert set(Bc(BcSettings(), module, spec).data.phases) == {"policy", "teleop", "correction"}
    assert set(HgDagger(HgDaggerSettings(), module, spec).data.phases) == {"policy", "teleop", "correction"}
    assert "recovery" in HgDagger(HgDaggerSettings(phases=("correction", "recovery")), module, spec).data.phases


def test_invalid_settings_are_refused() -> None:
    for wrong in ({"steps": ()}, {"acting_rate": 0.0}, {"learning_rate": 0.0}, {"action_noise": -1.0}):
        with pytest.raises(ConfigError):
            BcSettings(**wrong)  # type: ignore[arg-type]  # wrong on purpose
    for wrong in ({"intervention_share": 1.0}, {"phases": ("policy",)}, {"steps": ("interventions",)}):
        with pytest.raises(ConfigError):
            HgDaggerSettings(**wrong)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigError, match="this policy cannot imitate"):
        Bc(BcSettings(), torch.nn.Linear(3, 2), example_spec())
