"""Each algorithm on chunks trains the policy `vla`, sentences included."""

from __future__ import annotations

from dataclasses import replace

import torch

from hal.spec import RobotSpec
from user_sys.algorithms.algorithm import Algorithm
from user_sys.algorithms.conformance import AlgorithmConformance
from user_sys.algorithms.hg_dagger import HgDagger, HgDaggerSettings
from user_sys.algorithms.q_chunking import QChunking, QChunkingSettings
from user_sys.algorithms.recap import Recap, RecapSettings
from user_sys.algorithms.sac_flow import SacFlow, SacFlowSettings
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


class TestQChunking(TestHgDagger):
    options = replace(SMALL, flow_steps=1)

    def make(self, spec: RobotSpec) -> Algorithm:
        settings = QChunkingSettings(critic_hidden=(16,), critics=2)
        return QChunking(settings, VlaPolicy.make_module(spec, settings=self.options), spec)
