"""PPO: conformance, its mathematics on cases that can be worked out, and that it learns from fresh and old steps."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from point_kit import POINT, step_point, success_rate, windows

from hal.safety import SafetyKernel, SafetyReason
from hal.spec import ACTION, STATE, Array, RobotSpec
from robots.fake import GRIPPER_M, FakeRobot, FakeTask
from user_sys.algorithms.algorithm import Algorithm, TensorBatch, policy_arrays
from user_sys.algorithms.conformance import AlgorithmConformance, example_windows, train_together, train_with
from user_sys.algorithms.distributed import TrainingGroup
from user_sys.algorithms.ppo import Ppo, PpoSettings, advantages, effective_share, normalized
from user_sys.compose import PolicyConfig, make_policy
from user_sys.edge.agents import LoadedPolicy, PolicyAgent
from user_sys.edge.environment import RobotEnvironment
from user_sys.edge.loop import run_episode
from user_sys.edge.recorder import Recorder
from user_sys.episode import EpisodeSource, Phase
from user_sys.errors import ConfigError
from user_sys.learner.config import LearnerConfig
from user_sys.learner.trainer import Trainer
from user_sys.policies.cnn import CnnPolicy, CnnSettings
from user_sys.policies.conformance import example_spec
from user_sys.policies.mlp import MlpPolicy, MlpSettings
from user_sys.policies.networks import squash
from user_sys.policies.policy import Policy
from user_sys.store.store import StoreReader, StoreWriter

torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
PICTURES = CnnSettings(hidden=(32,), picture_size=8, cameras=("wrist",))
SMALL = PpoSettings(window=6, minibatches=2, value_hidden=(32, 32), value_warmup=0)


def small(spec: RobotSpec, settings: PpoSettings = SMALL) -> Ppo:
    return Ppo(settings, MlpPolicy.make_module(spec, settings=MlpSettings((32, 32))), spec)


class TestPpo(AlgorithmConformance):
    def make(self, spec: RobotSpec) -> Algorithm:
        return small(spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return MlpPolicy(spec)


class TestPpoOnPictures(AlgorithmConformance):
    def make(self, spec: RobotSpec) -> Algorithm:
        return Ppo(SMALL, CnnPolicy.make_module(spec, settings=PICTURES), spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return CnnPolicy(spec, settings=PICTURES)


class UnevenPpo(TestPpo):
    """The first process has few usable steps."""

    def make(self, spec: RobotSpec) -> Algorithm:
        return small(spec, replace(SMALL, epochs=1, minibatches=1))

    def batch(self, rng: np.random.Generator) -> TensorBatch:
        batch = super().batch(rng)
        assert batch.phase is not None
        batch.phase[:] = Phase.POLICY
        batch.phase[1 : len(batch.phase) // 2] = Phase.TELEOP
        return batch


def test_processes_with_unequal_shares_of_usable_steps_train_as_one() -> None:
    whole = train_with(UnevenPpo(), TrainingGroup(), 1)
    for name, value in train_together(UnevenPpo, 1)[0].items():
        np.testing.assert_allclose(value, whole[name], atol=2e-5, err_msg=name)


def test_advantages_are_those_of_the_definition() -> None:
    reward, values = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.5, 0.25, 1.0]])
    gamma, decay = 0.9, 0.8
    last = 2.0 + gamma * 4.0 - 1.0
    middle = 1.0 + gamma * 1.0 - 0.25 + gamma * decay * last
    first = gamma * 0.25 - 0.5 + gamma * decay * middle
    every = torch.ones(1, 3, dtype=torch.bool)
    found = advantages(reward, values, torch.tensor([4.0]), every, gamma, decay)
    torch.testing.assert_close(found, torch.tensor([[first, middle, last]]))
    short = advantages(reward, values, torch.tensor([0.0]), torch.tensor([[True, False, False]]), gamma, decay)
    torch.testing.assert_close(short, torch.tensor([[-0.5, 0.0, 0.0]]))


def test_effective_share_falls_with_the_spread_of_the_weights() -> None:
    every = torch.ones(4, dtype=torch.bool)
    assert float(effective_share(torch.ones(4), every)) == pytest.approx(1.0)
    assert float(effective_share(torch.tensor([1.0, 0.0, 0.0, 0.0]), every)) == pytest.approx(0.25)
    assert float(effective_share(torch.tensor([1.0, 1.0, 9.0, 9.0]), every & torch.tensor([1, 1, 0, 0]))) == 1.0
    scaled = normalized(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]))
    torch.testing.assert_close(scaled[:2], torch.tensor([-1.0, 1.0]))


def test_old_steps_scale_the_step_down_and_their_weights_are_truncated() -> None:
    algorithm, batch = small(example_spec()), example_windows(np.random.default_rng(0), SMALL.window, sequence=True)
    batch.extras["log_prob"][:] = 5.0 * torch.randn(batch.mask.shape)  # type: ignore[union-attr]  # it has a mask
    algorithm.update(batch, 0)
    share = algorithm.scalars()["effective_share"]
    assert 0 < share < 0.5
    assert algorithm.optimizers["actor"].param_groups[0]["lr"] == pytest.approx(SMALL.learning_rate * share**0.5)


def test_steps_of_people_and_changed_actions_do_not_train() -> None:
    batch = example_windows(np.random.default_rng(0), SMALL.window, sequence=True)
    assert batch.phase is not None
    for spoiled in (
        replace(batch, phase=torch.full_like(batch.phase, Phase.TELEOP)),
        replace(batch, extras=batch.extras | {"safety": torch.ones_like(batch.extras["safety"])}),
        replace(batch, extras=batch.extras | {"log_prob": torch.full_like(batch.extras["log_prob"], torch.nan)}),
    ):
        algorithm = small(example_spec())
        before = policy_arrays(algorithm.policy)
        algorithm.update(spoiled, 0)
        after = policy_arrays(algorithm.policy)
        assert algorithm.scalars()["usable_share"] == 0
        assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("start", [1.5, -1.5])
def test_entropy_bonus_trains_a_discrete_gripper(start: float) -> None:
    module = MlpPolicy.make_module(example_spec(), settings=MlpSettings((32, 32), gripper="discrete"))
    algorithm = Ppo(replace(SMALL, entropy_bonus=0.01), module, example_spec())
    torch.nn.init.constant_(algorithm.actor.mean.bias, start)
    torch.nn.init.zeros_(algorithm.actor.mean.weight)
    for parameter in algorithm.value.parameters():
        torch.nn.init.zeros_(parameter)  # without rewards too, all advantages are 0
    batch = example_windows(np.random.default_rng(0), SMALL.window, sequence=True)
    algorithm.update(replace(batch, reward=torch.zeros_like(batch.reward)), 0)
    mean, _ = algorithm.actor(algorithm.actor.encode(batch.next_observation))
    assert (mean[:, 0] == start).all() and (mean[:, 1].abs() < abs(start)).all()


def test_requested_action_that_is_not_finite_spoils_no_weights() -> None:
    algorithm, batch = small(example_spec()), example_windows(np.random.default_rng(0), SMALL.window, sequence=True)
    requested, safety = batch.action.clone(), batch.extras["safety"].clone()
    requested[:, 0], safety[:, 0] = torch.nan, int(SafetyReason.NOT_FINITE)
    algorithm.update(replace(batch, extras=batch.extras | {ACTION: requested, "safety": safety}), 0)
    assert all(np.isfinite(array).all() for array in policy_arrays(algorithm.policy).values())


class RoundingRobot(FakeRobot):
    """Its gripper has five widths."""

    def command(self, action: Array) -> Array:
        rounded = action.copy()
        rounded[3] = GRIPPER_M / 4 * np.round(4 * action[3] / GRIPPER_M)
        return super().command(rounded)


def test_fresh_steps_count_in_full_if_the_robot_rounds_its_actions(tmp_path: Path) -> None:
    robot, policy = RoundingRobot(), PolicyConfig(kind="mlp", options={"hidden": [32, 32]})
    learner = LearnerConfig(algorithm="ppo", batch_size=8, options={"window": 4, "epochs": 1})
    with StoreWriter.open(tmp_path) as store, StoreReader.open(tmp_path) as reader:
        trainer = Trainer(learner, robot.spec, reader, policy=policy)
        acting = LoadedPolicy(make_policy(policy, robot.spec, 0), version=1)
        acting.policy.load(policy_arrays(trainer.policy))
        environment = RobotEnvironment(robot, FakeTask(max_steps=8), SafetyKernel(robot.spec))
        agent = PolicyAgent(acting, robot.spec, deterministic=False)
        recorder = Recorder(robot.spec, "fake-0", store.append)
        environment.connect()
        for seed in range(8):
            run_episode(environment, agent, recorder, source=EpisodeSource.ONLINE, seed=seed)
        store.sync()
        trainer.refresh()
        trainer.update(0)
        scalars = trainer.algorithm.scalars()
        trainer.close()
    assert scalars["usable_share"] > 0.5
    assert scalars["effective_share"] == pytest.approx(1.0, abs=1e-3)


def test_invalid_settings_are_refused() -> None:
    for wrong in ({"window": 0}, {"discount": 1.0}, {"clip": 0.0}, {"importance_max": 0.5}, {"value_hidden": ()}):
        with pytest.raises(ConfigError):
            PpoSettings(**wrong)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigError, match="ppo needs a policy with a squashed Gaussian density"):
        Ppo(SMALL, torch.nn.Linear(3, 2), example_spec())


@torch.no_grad()
def rollout(algorithm: Ppo, rng: np.random.Generator, length: int) -> TensorBatch:
    """Windows of 128 episodes under the current policy, with its log densities."""
    start = rng.uniform(-1, 1, (128, 1)).astype(np.float32)
    x, actions, log_probs = start, [], []
    for _ in range(length):
        mean, log_std = algorithm.actor(algorithm.actor.encode({STATE: torch.from_numpy(x)}))
        action, log_prob = squash(mean, log_std, torch.randn_like(mean))
        actions.append((0.2 * action).numpy())
        log_probs.append(log_prob)
        x, _ = step_point(x, actions[-1])
    batch = windows(start, np.stack(actions, 1))
    return replace(batch, extras=batch.extras | {"log_prob": torch.stack(log_probs, 1)})


def test_algorithm_learns_from_a_sparse_reward_with_stale_rollouts() -> None:
    torch.manual_seed(0)
    algorithm, policy = small(POINT, replace(SMALL, window=12, learning_rate=2e-3)), MlpPolicy(POINT)
    rng, waiting = np.random.default_rng(0), deque[TensorBatch]()
    for number in range(60):
        waiting.append(rollout(algorithm, rng, 12))
        if len(waiting) > 4:
            algorithm.update(waiting.popleft(), number)
    policy.load(policy_arrays(algorithm.policy))
    assert success_rate(policy) > 0.9, algorithm.scalars()
