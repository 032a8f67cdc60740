"""Q-chunking: conformance, its target on cases that can be worked out, and that it improves on random chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from point_kit import POINT, chunks, success_rate

from hal.spec import RobotSpec
from user_sys.algorithms.algorithm import Algorithm, policy_arrays, save_state
from user_sys.algorithms.conformance import AlgorithmConformance, example_windows
from user_sys.algorithms.q_chunking import QChunking, QChunkingSettings
from user_sys.errors import ConfigError
from user_sys.policies.conformance import example_spec
from user_sys.policies.flow import FlowPolicy, FlowSettings
from user_sys.policies.policy import Policy

torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
SMALL = QChunkingSettings(critic_hidden=(32, 32), critics=2, behaviour_steps=4)
PICTURES = FlowSettings(chunk_length=3, flow_steps=1, hidden=(32,), pictures=True, picture_size=8)
FLOW = FlowSettings(chunk_length=3, flow_steps=1, hidden=(32, 32))


def small(spec: RobotSpec, settings: QChunkingSettings = SMALL) -> QChunking:
    return QChunking(settings, FlowPolicy.make_module(spec, settings=FLOW), spec)


class TestQChunking(AlgorithmConformance):
    def make(self, spec: RobotSpec) -> Algorithm:
        return small(spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return FlowPolicy(spec, settings=FLOW)


class TestQChunkingOnPictures(AlgorithmConformance):
    def make(self, spec: RobotSpec) -> Algorithm:
        return QChunking(SMALL, FlowPolicy.make_module(spec, settings=PICTURES), spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return FlowPolicy(spec, settings=PICTURES)


def test_chunks_that_are_cut_off_do_not_train_the_critics() -> None:
    algorithm, batch = small(example_spec()), example_windows(np.random.default_rng(0), 3)
    assert batch.mask is not None
    batch.mask[:, 1:], batch.terminated[:] = False, False
    before = save_state(algorithm)
    algorithm.update(batch, 0)
    after = save_state(algorithm)
    critics = [name for name in before if name.startswith("network.critics.")]
    assert critics and all(np.array_equal(before[name], after[name]) for name in critics)
    assert algorithm.td_errors().isnan().all(), "a sampler ignores them"
    batch.terminated[:] = True
    algorithm.update(batch, 1)
    assert algorithm.scalars()["target"] == pytest.approx(float(batch.reward.mean()))
    assert not all(np.array_equal(before[name], save_state(algorithm)[name]) for name in critics)


def test_error_of_a_cut_chunk_is_the_mean_of_those_that_train() -> None:
    algorithm, batch = small(example_spec()), example_windows(np.random.default_rng(0), 3)
    assert batch.mask is not None
    batch.mask[:] = True
    batch.mask[:8, 1:], batch.terminated[:8] = False, False
    batch.reward[:8] = 30.0
    algorithm.update(batch, 0)
    errors = algorithm.td_errors()
    assert errors[8:].std() > 0
    torch.testing.assert_close(errors[:8], errors[8:].mean().expand(8))


def test_other_policies_are_refused() -> None:
    for steps in (1, 5):
        module = torch.nn.Linear(1, 1) if steps == 1 else FlowPolicy.make_module(example_spec())
        with pytest.raises(ConfigError, match="draws chunks in one step"):
            QChunking(SMALL, module, example_spec())
    with pytest.raises(ConfigError, match="behaviour_steps 0"):
        QChunkingSettings(behaviour_steps=0)


@pytest.mark.slow
def test_algorithm_learns_from_a_sparse_reward() -> None:
    torch.manual_seed(0)
    settings = replace(SMALL, distillation=0.1, learning_rate=2e-3, acting_rate=0.05)
    rng, algorithm, policy = np.random.default_rng(0), small(POINT, settings), FlowPolicy(POINT, settings=FLOW)
    policy.load(policy_arrays(algorithm.policy))
    before = success_rate(policy)
    for number in range(300):
        x = rng.uniform(-1, 1, (128, 1)).astype(np.float32)
        held = rng.uniform(-0.25, 0.25, (128, 1, 1)) + rng.normal(0, 0.05, (128, 3, 1))
        algorithm.update(chunks(x, np.clip(held, -0.2, 0.2).astype(np.float32)), number)
    policy.load(policy_arrays(algorithm.policy))
    assert before < 0.5 and success_rate(policy) > 0.9, algorithm.scalars()
