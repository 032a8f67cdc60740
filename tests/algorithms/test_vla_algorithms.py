"""Each algorithm on chunks trains the policy `vla`, sentences included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from hal.spec import RobotSpec
from user_sys.algorithms.algorithm import Algorithm, policy_arrays
from user_sys.algorithms.conformance import AlgorithmConformance
from user_sys.algorithms.hg_dagger import HgDagger, HgDaggerSettings
from user_sys.algorithms.q_chunking import QChunking, QChunkingSettings
from user_sys.algorithms.recap import Recap, RecapSettings
from user_sys.algorithms.sac_flow import SacFlow, SacFlowSettings
from user_sys.episode import Phase
from user_sys.policies.policy import Policy
from user_sys.policies.vla import VlaPolicy, VlaSettings

torch.set_num_threads(1)
SMALL = VlaSettings(width=16, heads=2, prefix_layers=1, expert_layers=1, chunk_length=2, flow_steps=2, flow_draws=1)


class TestHgDagger(AlgorithmConformance):
    options = SMALL

    def make(self, spec: RobotSpec) -> Algorithm:
        return HgDagger(HgDaggerSettings(), VlaPolicy.make_module(spec, settings=self.options), spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return VlaPolicy(spec, settings=self.options)


class TestRecap(TestHgDagger):
    options = replace(SMALL, conditions=2, condition=1, guidance=1.5)

    def make(self, spec: RobotSpec) -> Algorithm:
        return Recap(RecapSettings(value_hidden=(16,)), VlaPolicy.make_module(spec, settings=self.options), spec)


class TestSacFlow(TestHgDagger):
    options = replace(SMALL, gated=True)

    def make(self, spec: RobotSpec) -> Algorithm:
        settings = SacFlowSettings(critic_hidden=(16,), critics=2)
        return SacFlow(settings, VlaPolicy.make_module(spec, settings=self.options), spec)


class ClonedSacFlow(TestSacFlow):
    __test__ = False
    options = replace(SMALL, gated=True, pretrain_updates=2)


def test_policy_steps_are_not_imitated() -> None:
    suite = ClonedSacFlow()
    algorithm, batch = suite.make_seeded(0), suite.batch(np.random.default_rng(0))
    assert isinstance(algorithm, SacFlow) and batch.phase is not None
    before, trained = policy_arrays(algorithm.actor), list[set[str]]()
    for number, phase in enumerate((Phase.POLICY, Phase.TELEOP)):
        algorithm.update(replace(batch, phase=torch.full_like(batch.phase, phase)), number)
        after = policy_arrays(algorithm.actor)
        changed = any(not np.array_equal(value, after[name]) for name, value in before.items())
        assert changed is (phase == Phase.TELEOP)
        trained.append({name for name, each in algorithm.actor.named_parameters() if each.grad is not None})
    assert trained[0] == trained[1], "a process without such steps passes the same parameters as the others"


class TestQChunking(TestHgDagger):
    options = replace(SMALL, flow_steps=1)

    def make(self, spec: RobotSpec) -> Algorithm:
        settings = QChunkingSettings(critic_hidden=(16,), critics=2)
        return QChunking(settings, VlaPolicy.make_module(spec, settings=self.options), spec)
