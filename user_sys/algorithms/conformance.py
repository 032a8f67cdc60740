"""The conformance suite of algorithms: a test class inherits `AlgorithmConformance` and defines `make` and `policy`."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context

import numpy as np
import torch
from torch import Tensor

from hal.spec import ACTION, Array, RobotSpec
from user_sys.algorithms.algorithm import (
    NETWORK,
    Algorithm,
    SentenceReader,
    TensorBatch,
    TrainingData,
    load_generators,
    load_state,
    policy_arrays,
    save_state,
)
from user_sys.algorithms.distributed import TrainingGroup, training_group
from user_sys.episode import SCALAR_DTYPES, Phase
from user_sys.errors import WireError
from user_sys.policies.conformance import example_observation, example_spec
from user_sys.policies.policy import Policy

LOOPBACK = "127.0.0.1"
RANKS = 2
EXAMPLE_SENTENCES = ("lift the cube", "reach the green target")


def example_batch(rng: np.random.Generator, n: int = 32) -> TensorBatch:
    """Draws `n` steps of `example_spec` with equal weights; a tenth of them are terminal, with reward 1."""
    spec, terminated = example_spec(), rng.random(n) < 0.1
    now, following = ([example_observation(rng) for _ in range(n)] for _ in range(2))
    action = rng.uniform(spec.action.low, spec.action.high, (n, 2)).astype(np.float32)

    def stacked(observations: list[dict[str, Array]]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.stack([o[name] for o in observations])) for name in observations[0]}

    return TensorBatch(
        observation=stacked(now),
        next_observation=stacked(following),
        action=torch.from_numpy(action),
        reward=torch.from_numpy(terminated.astype(np.float32)),
        terminated=torch.from_numpy(terminated),
        discount=torch.full((n,), 0.97),
        weight=torch.ones(n),
    )


def example_windows(rng: np.random.Generator, length: int, n: int = 32, *, sequence: bool = False) -> TensorBatch:
    """Draws `n` action chunks or, with `sequence`, whole windows of `length` steps: `BatchSpec`. Some end earlier."""
    steps, first = example_batch(rng, n * length), example_batch(rng, n)
    mask = torch.arange(length) < torch.from_numpy(rng.integers(1, length + 1, (n, 1)))

    def windows(value: Tensor) -> Tensor:
        return value.view(n, length, *value.shape[1:])

    reward = windows(steps.reward) * mask
    return TensorBatch(
        observation={k: windows(v) for k, v in steps.observation.items()} if sequence else first.observation,
        next_observation=first.next_observation,
        action=windows(steps.action),
        reward=reward if sequence else reward.sum(1),
        terminated=first.terminated,
        discount=first.discount ** mask.sum(1),
        weight=first.weight,
        mask=mask,
        phase=torch.zeros(n, length, dtype=torch.uint8),
        extras={ACTION: windows(steps.action), "log_prob": torch.zeros(n, length), "safety": torch.zeros(n, length)},
    )


def example_batch_for(data: TrainingData, rng: np.random.Generator, n: int = 32) -> TensorBatch:
    """Draws a batch of the shape that an algorithm asks for, with nothing else: its vectors, pictures and extras.

    It has two sentences, and the versions of several policies.
    """
    spec, shape = example_spec(), data.batches(1)
    length = shape.chunk_length
    batch = example_windows(rng, length, n, sequence=shape.sequence) if length else example_batch(rng, n)
    lead = (n, length) if length else (n,)
    cameras = {camera.name: camera.feature for camera in spec.cameras}
    names = [*(data.features or [each.name for each in spec.observation]), *(cameras[name] for name in data.cameras)]

    def drawn(name: str, *size: int) -> Tensor:
        is_code = SCALAR_DTYPES.get(name, "float32") != "float32"  # such as safety: 0 for none
        return torch.zeros(size) if is_code else torch.from_numpy(rng.standard_normal(size, np.float32))

    return replace(
        batch,
        observation={name: batch.observation[name] for name in names},
        next_observation={name: batch.next_observation[name] for name in names},
        mask=torch.ones(n, 1, dtype=torch.bool) if batch.mask is None else batch.mask,
        phase=torch.from_numpy(rng.choice([Phase.POLICY, Phase.TELEOP], lead).astype(np.uint8)),
        policy_version=torch.from_numpy(rng.integers(0, 3, lead)),
        extras={name: drawn(name, *lead, *each) for name, each in data.extras.items()},
        sentence=torch.from_numpy(rng.integers(0, len(EXAMPLE_SENTENCES), n)),
        sentences=EXAMPLE_SENTENCES,
    )


class AlgorithmConformance(ABC):
    """See the module. The class must be importable, because two processes of their own train with it too."""

    @abstractmethod
    def make(self, spec: RobotSpec) -> Algorithm:
        """Returns a new algorithm for `spec`, on the CPU."""

    @abstractmethod
    def policy(self, spec: RobotSpec) -> Policy:
        """Returns a policy that loads its weights."""

    def batch(self, rng: np.random.Generator) -> TensorBatch:
        """Draws a batch of the shape that the algorithm's `data` states."""
        with torch.random.fork_rng(devices=()):
            algorithm = self.make_seeded(0)
        batch, policy = example_batch_for(algorithm.data, rng), algorithm.policy
        if isinstance(policy, SentenceReader):
            batch = batch.with_sentences(policy.encode_sentences(batch.sentences))
        return batch

    def make_seeded(self, seed: int) -> Algorithm:
        """Returns a new algorithm for `example_spec`; equal seeds give equal algorithms and draws."""
        torch.manual_seed(seed)
        return self.make(example_spec())

    def test_policy_takes_weights_from_the_start(self) -> None:
        spec, rng = example_spec(), np.random.default_rng(0)
        algorithm, policy = self.make_seeded(0), self.policy(spec)
        for number in range(3):
            policy.load(policy_arrays(algorithm.policy))
            spec.action.validate(policy.act(example_observation(rng), "", deterministic=False).actions[0])
            algorithm.update(self.batch(rng), number)

    def test_updates_change_the_policy_and_scalars_are_finite(self) -> None:
        algorithm, rng = self.make_seeded(0), np.random.default_rng(1)
        assert algorithm.scalars() == {}
        before = policy_arrays(algorithm.policy)
        for number in range(4):
            algorithm.update(self.batch(rng), number)
        after = policy_arrays(algorithm.policy)
        assert any(not np.array_equal(before[name], after[name]) for name in before)
        assert algorithm.scalars() and np.isfinite(list(algorithm.scalars().values())).all()

    def test_settings_have_defaults(self) -> None:
        assert self.make_seeded(0).settings() == self.make_seeded(0).settings()

    def test_resuming_is_bit_identical(self) -> None:
        rng = np.random.default_rng(4)
        batches = list(enumerate(self.batch(rng) for _ in range(6)))
        straight = self.make_seeded(0)
        for number, batch in batches:
            straight.update(batch, number)
        expected = save_state(straight)
        saved = save_state(self.make_seeded(0))
        for number, batch in batches:  # it stops after each update
            resumed = self.make_seeded(1 + number)
            load_state(resumed, saved)
            load_generators(saved)
            resumed.update(batch, number)
            saved = save_state(resumed)
        _assert_equal(expected, saved)

    def test_a_value_that_is_not_finite_shows(self) -> None:
        algorithm, batch = self.make_seeded(0), self.batch(np.random.default_rng(5))
        batch.action[:] = batch.reward[:] = np.nan
        algorithm.update(batch, 0)
        state = [*save_state(algorithm).values(), np.array(list(algorithm.scalars().values()))]
        assert not all(np.isfinite(each).all() for each in state), "the learner would publish and save it"

    def test_foreign_state_is_refused_and_changes_nothing(self) -> None:
        algorithm = self.make_seeded(0)
        before = save_state(algorithm)
        name = next(name for name in before if name.startswith(NETWORK))
        for foreign in ({}, {**before, name: np.zeros((1, 2, 3), np.float32)}):
            try:
                load_state(algorithm, foreign)
            except WireError:
                _assert_equal(save_state(algorithm), before)
            else:
                raise AssertionError("a foreign state was taken")

    def test_processes_that_train_together_keep_the_same_weights(self) -> None:
        one, other = train_together(type(self))
        _assert_equal(one, other)


def train_together(suite: type[AlgorithmConformance], updates: int = 3) -> list[Mapping[str, Array]]:
    """Trains in two processes, each with half of every batch; returns the networks of each."""
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    return list(_ranks().map(_train_rank, [suite] * RANKS, range(RANKS), [port] * RANKS, [updates] * RANKS))


@cache
def _ranks() -> ProcessPoolExecutor:
    """The processes that train together; all suites share them, because they import torch for seconds."""
    return ProcessPoolExecutor(RANKS, mp_context=get_context("spawn"))


def _train_rank(suite: type[AlgorithmConformance], rank: int, port: int, updates: int) -> Mapping[str, Array]:
    torch.set_num_threads(1)
    with training_group(rank, RANKS, LOOPBACK, port) as group:
        return train_with(suite(), group, updates)


def train_with(suite: AlgorithmConformance, group: TrainingGroup, updates: int) -> Mapping[str, Array]:
    """Trains as one process of `group`, and returns the networks."""
    algorithm, rng = suite.make_seeded(0), np.random.default_rng(0)
    group.average_gradients(algorithm)
    torch.manual_seed(group.rank)
    for number in range(updates):
        algorithm.update(_part(suite.batch(rng), group), number)
    group.barrier()
    return {name: value for name, value in save_state(algorithm).items() if name.startswith(NETWORK)}


def _part(batch: TensorBatch, group: TrainingGroup) -> TensorBatch:
    """Returns the samples of one process of `group`."""
    each = len(batch.weight) // group.world
    return batch.rows(slice(group.rank * each, (group.rank + 1) * each))


def _assert_equal(one: Mapping[str, Array], other: Mapping[str, Array]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)
