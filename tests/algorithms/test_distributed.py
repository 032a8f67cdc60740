"""RLPD trained by several processes: conformance, and that they are as good as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from distributed_kit import (
    RankProcesses,
    ScriptedRlpd,
    numbered,
    rank_processes,
    run_all_true,
    run_gather_bytes,
    shard_and_gather,
)

from hal.spec import RobotSpec
from user_sys.algorithms.algorithm import Algorithm
from user_sys.algorithms.conformance import AlgorithmConformance, example_batch
from user_sys.algorithms.distributed import BUCKET_BYTES
from user_sys.algorithms.rlpd import GENERATOR, NOISE
from user_sys.algorithms.rlpd_config import RlpdConfig
from user_sys.policies.conformance import example_spec
from user_sys.policies.mlp import MlpPolicy
from user_sys.policies.policy import Policy

pytestmark = pytest.mark.long(20)
torch.set_num_threads(1)
SMALL = RlpdConfig(actor_hidden=(17, 16), critic_hidden=(16, 15), critics=3)


@pytest.fixture(scope="module")
def both() -> Iterator[RankProcesses]:
    with rank_processes() as members:
        yield members


class TestRlpdOfTwoProcesses(AlgorithmConformance):
    @pytest.fixture(autouse=True)
    def _members(self, both: RankProcesses) -> None:
        self._both = both

    def make(self, spec: RobotSpec, seed: int) -> Algorithm:
        return self._both.make(SMALL, spec, seed)

    def policy(self, spec: RobotSpec) -> Policy:
        return MlpPolicy(spec)


class TestRlpdOfTwoProcessesWhoseWeightsAreFetched(TestRlpdOfTwoProcesses):
    def make(self, spec: RobotSpec, seed: int) -> Algorithm:
        return self._both.make(SMALL, spec, seed, fetched=True)


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, critics=1, target_critics=1, backup_entropy=True)])
def test_two_processes_with_half_the_batch_each_learn_what_one_does(both: RankProcesses, config: RlpdConfig) -> None:
    rng, spec = np.random.default_rng(0), example_spec()
    alone, together = ScriptedRlpd(config, spec, seed=3), both.make(config, spec, 3, ScriptedRlpd)
    start = alone.state_dict()
    for _ in range(6):
        batch = example_batch(rng, 32)
        alone.update(batch)
        together.update(batch)
    one, two = alone.state_dict(), together.state_dict()
    assert one.keys() == two.keys() - {NOISE}
    for name in one.keys() - {GENERATOR}:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert np.abs(one["actor.mean.weight"] - start["actor.mean.weight"]).max() > 1e-3, "they moved further than apart"
    weights = together.policy_weights()
    for name, value in alone.policy_weights().items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_what_two_processes_learned_one_takes_up_and_the_other_way_round(both: RankProcesses) -> None:
    rng, spec = np.random.default_rng(0), example_spec()
    together, alone = both.make(SMALL, spec, 0), ScriptedRlpd(SMALL, spec, seed=1)
    together.update(example_batch(rng, 32))
    state = together.state_dict()
    alone.load_state_dict(state)
    taken = alone.state_dict()
    assert all(np.array_equal(taken[name], state[name]) for name in taken) and state.keys() - taken.keys() == {NOISE}
    alone.update(example_batch(rng, 32))
    again = both.make(SMALL, spec, 5)
    again.load_state_dict(alone.state_dict())
    for name, value in alone.policy_weights().items():
        np.testing.assert_array_equal(again.policy_weights()[name], value, err_msg=name)
    again.update(example_batch(rng, 32))


def test_each_keeps_its_rows_and_rank_0_gathers_them_whole(both: RankProcesses) -> None:
    large = (5, BUCKET_BYTES // 4 + 7)  # a row is more than a bucket
    shapes = {"even": (4, 3), "uneven": (5, 2), "one": (1, 3), "large": large}
    kept, whole = both.run(shard_and_gather, shapes)
    assert kept == {"even": 2, "uneven": 3, "one": 1, "large": 3}
    assert all(np.array_equal(whole[name], numbered(shape).numpy()) for name, shape in shapes.items())


def test_what_is_said_and_collected_among_them(both: RankProcesses) -> None:
    assert both.run(run_all_true, (True, True)) is True
    assert both.run(run_all_true, (True, False)) is both.run(run_all_true, (False, True)) is False
    for contents in ((b"", b""), (b"here", b"there and more"), (b"here", b"")):
        assert both.run(run_gather_bytes, contents) == list(contents)
