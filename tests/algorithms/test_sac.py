"""SAC: conformance, what differs from RLPD, and what it trains on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hal.spec import RobotSpec
from user_sys.algorithms.algorithm import Algorithm, TensorBatch
from user_sys.algorithms.conformance import (
    AlgorithmConformance,
    example_batch,
    example_windows,
    train_together,
    train_with,
)
from user_sys.algorithms.distributed import TrainingGroup
from user_sys.algorithms.rlpd import RlpdSettings
from user_sys.algorithms.sac import Sac, SacSettings, cloned_steps, is_cloned
from user_sys.episode import Phase
from user_sys.policies.conformance import example_spec
from user_sys.policies.mlp import MlpPolicy, MlpSettings
from user_sys.policies.policy import Policy

torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
SMALL = SacSettings(critic_hidden=(32, 32))


def small(spec: RobotSpec, settings: SacSettings = SMALL) -> Sac:
    return Sac(settings, MlpPolicy.make_module(spec, settings=MlpSettings((32, 32))), spec)


class TestSac(AlgorithmConformance):
    def make(self, spec: RobotSpec) -> Algorithm:
        return small(spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return MlpPolicy(spec)


class UnevenCloning(TestSac):
    """Updates that clone; the first process has one step of a person."""

    def make(self, spec: RobotSpec) -> Algorithm:
        return Sac(SMALL, MlpPolicy.make_module(spec, settings=MlpSettings((32, 32), pretrain_updates=9)), spec)

    def batch(self, rng: np.random.Generator) -> TensorBatch:
        batch = super().batch(rng)
        assert batch.phase is not None
        batch.phase[:] = Phase.TELEOP
        batch.phase[1 : len(batch.phase) // 2] = Phase.POLICY
        return batch


def test_processes_with_unequal_shares_of_people_clone_as_one() -> None:
    whole = train_with(UnevenCloning(), TrainingGroup(), 1)
    for name, value in train_together(UnevenCloning, 1)[0].items():
        np.testing.assert_allclose(value, whole[name], atol=2e-5, err_msg=name)


def test_value_of_a_step_includes_the_entropy_of_the_next_action() -> None:
    batch = example_batch(np.random.default_rng(0), 64)
    batch.terminated[:] = False
    batch.reward[:] = 0.0
    values = {}
    for backup_entropy in (False, True):
        torch.manual_seed(0)
        algorithm = small(example_spec(), replace(SMALL, backup_entropy=backup_entropy, initial_temperature=1.0))
        algorithm.update(batch, 0)
        values[backup_entropy] = algorithm.scalars()
    extra = values[True]["target"] - values[False]["target"]
    assert extra == pytest.approx(0.97 * values[True]["entropy"], rel=0.3)


def test_batch_has_demonstrations_and_online_steps_alike() -> None:
    (part,) = small(example_spec()).data.mixture
    assert {source.value for source in part.filters[0].sources} == {"demo", "online"} and part.share == 1.0


def test_rlpd_is_sac_with_other_settings() -> None:
    assert issubclass(RlpdSettings, SacSettings)
    assert RlpdSettings().critics == 10 and RlpdSettings().layer_norm and not RlpdSettings().backup_entropy


def test_people_without_recorded_actions_are_not_cloned() -> None:
    batch = example_batch(np.random.default_rng(0), 8)
    batch = replace(batch, phase=torch.full((8,), int(Phase.TELEOP)))
    batch.weight[:4] = 0.0
    assert is_cloned(batch).tolist() == [False] * 4 + [True] * 4


def test_attempts_by_hand_that_failed_are_not_cloned() -> None:
    batch = example_windows(np.random.default_rng(0), 2, 4)
    phase, failed = torch.full((4, 2), int(Phase.TELEOP)), torch.zeros(4, 2, dtype=torch.bool)
    failed[:2] = True
    batch = replace(batch, phase=phase, mask=torch.ones(4, 2, dtype=torch.bool), failed_by_hand=failed)
    assert is_cloned(batch).tolist() == [False, False, True, True]
    mask = cloned_steps(batch)
    assert mask is not None and mask.all(1).tolist() == [False, False, True, True]


def test_cloning_keeps_the_actor_close_to_the_steps_of_people() -> None:
    spec, batch = example_spec(), example_batch(np.random.default_rng(0), 64)
    batch = replace(batch, phase=torch.full((64,), int(Phase.TELEOP)))
    batch.action[:] = torch.rand(64, 1) * batch.action.abs().amax(0)
    batch.reward[:] = (batch.action[:, 0] > 0.5 * batch.action[:, 0].max()).float()  # the critics want more of it
    distance = {}
    for cloning in (0.0, 5.0):
        torch.manual_seed(0)
        algorithm = small(spec, replace(SMALL, cloning=cloning))
        for number in range(120):
            algorithm.update(batch, number)
        with torch.no_grad():
            mean, _ = algorithm.actor(algorithm.actor.encode(batch.observation))
        distance[cloning] = float((torch.tanh(mean) - algorithm.actor.scale_action(batch.action)).square().mean())
    assert distance[5.0] < 0.5 * distance[0.0]
