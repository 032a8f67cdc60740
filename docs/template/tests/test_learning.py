"""The conformance suites of a task, policy, algorithm and reward."""

from __future__ import annotations

import numpy as np
import torch
from point_robot import make_robot_setup
from point_robot.algorithm import Cloning
from point_robot.policy import TanhPolicy
from point_robot.reward import SwiftReward, SwiftSettings
from point_robot.vla import VlaPolicy

from hal.conformance import TaskConformance
from hal.driver import RobotSetup, RobotSetupRequest
from hal.spec import Array, RobotSpec
from user_sys.algorithms.algorithm import Algorithm, policy_arrays
from user_sys.algorithms.conformance import AlgorithmConformance
from user_sys.algorithms.hg_dagger import HgDagger, HgDaggerSettings
from user_sys.policies.conformance import PolicyConformance, example_observation, example_spec
from user_sys.policies.policy import Policy
from user_sys.rewards.conformance import RewardConformance
from user_sys.rewards.reward import Reward


class TestTanhPolicy(PolicyConformance):
    def make(self, spec: RobotSpec) -> Policy:
        return TanhPolicy(spec)

    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        torch.manual_seed(seed)
        return policy_arrays(TanhPolicy.make_module(spec))


class TestCloning(AlgorithmConformance):
    def make(self, spec: RobotSpec) -> Algorithm:
        return Cloning(Cloning.settings(), TanhPolicy.make_module(spec), spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return TanhPolicy(spec)


class TestVlaPolicy(PolicyConformance):
    def make(self, spec: RobotSpec) -> Policy:
        return VlaPolicy(spec)

    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        torch.manual_seed(seed)
        return policy_arrays(VlaPolicy.make_module(spec))


class TestHgDaggerOfVla(AlgorithmConformance):
    def make(self, spec: RobotSpec) -> Algorithm:
        return HgDagger(HgDaggerSettings(), VlaPolicy.make_module(spec), spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return VlaPolicy(spec)


def test_the_sentence_selects_the_actions() -> None:
    spec, observation = example_spec(), example_observation(np.random.default_rng(0))
    policy = VlaPolicy(spec)
    policy.load(policy_arrays(VlaPolicy.make_module(spec)))
    red, blue = (
        policy.act(observation, f"lift the {each} cube", deterministic=True).actions for each in ("red", "blue")
    )
    assert not np.allclose(red, blue)


class TestSwiftReward(RewardConformance):
    def make(self) -> Reward:
        return SwiftReward(SwiftSettings())


class TestUpright(TaskConformance):
    episodes = 2  # a reset moves the robot, in real time

    def make_setup(self) -> RobotSetup:
        return make_robot_setup(RobotSetupRequest("point-0", "upright"))
