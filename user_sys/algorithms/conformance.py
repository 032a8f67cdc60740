"""The conformance suite of algorithms: a test class inherits `AlgorithmConformance` and defines `make` and `policy`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hal.spec import Array, RobotSpec
from user_sys.algorithms.algorithm import Algorithm
from user_sys.errors import WireError
from user_sys.policies.conformance import example_observation, example_spec
from user_sys.policies.policy import Policy
from user_sys.weights.snapshot import PolicySnapshot, UnlimitedBudget


@dataclass(frozen=True)
class ExampleBatch:
    """Single steps of `user_sys.policies.conformance.example_spec`, with equal weights."""

    observation: dict[str, Array]
    next_observation: dict[str, Array]
    action: Array
    reward: Array
    terminated: Array

    @property
    def discount(self) -> Array:
        return np.full(len(self.reward), 0.97, np.float32)

    @property
    def weight(self) -> Array:
        return np.ones(len(self.reward), np.float32)


def example_batch(rng: np.random.Generator, n: int = 32) -> ExampleBatch:
    """Draws `n` transitions; a tenth of them are terminal, with reward 1."""
    spec, terminated = example_spec(), rng.random(n) < 0.1
    now, following = ([example_observation(rng) for _ in range(n)] for _ in range(2))
    return ExampleBatch(
        observation={name: np.stack([o[name] for o in now]) for name in now[0]},
        next_observation={name: np.stack([o[name] for o in following]) for name in now[0]},
        action=rng.uniform(spec.action.low, spec.action.high, (n, 2)).astype(np.float32),
        reward=terminated.astype(np.float32),
        terminated=terminated,
    )


def to_host_arrays(snapshot: PolicySnapshot) -> Mapping[str, Array]:
    """Returns the arrays in host memory; blocks while they are fetched from a device."""
    if isinstance(snapshot, Mapping):
        return snapshot
    arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in snapshot.layout.items()}
    snapshot.wait()
    snapshot.fetch(arrays, UnlimitedBudget())
    return arrays


class AlgorithmConformance(ABC):
    """See the module."""

    @abstractmethod
    def make(self, spec: RobotSpec, seed: int) -> Algorithm:
        """Returns a new algorithm for `spec`; equal seeds give equal algorithms."""

    @abstractmethod
    def policy(self, spec: RobotSpec) -> Policy:
        """Returns a policy that loads its weights."""

    def test_the_policy_takes_its_weights_from_the_start(self) -> None:
        spec, rng = example_spec(), np.random.default_rng(0)
        algorithm, policy = self.make(spec, 0), self.policy(spec)
        for _ in range(3):
            policy.load(algorithm.policy_weights())
            spec.action.validate(policy.act(example_observation(rng), "", deterministic=False).actions[0])
            algorithm.update(example_batch(rng))

    def test_updates_change_the_policy_and_scalars_are_finite(self) -> None:
        algorithm, rng = self.make(example_spec(), 0), np.random.default_rng(1)
        assert algorithm.scalars() == {}
        before = algorithm.policy_weights()
        for _ in range(4):
            algorithm.update(example_batch(rng))
        after = algorithm.policy_weights()
        assert any(not np.array_equal(before[name], after[name]) for name in before)
        assert algorithm.scalars() and np.isfinite(list(algorithm.scalars().values())).all()

    def test_weights_and_state_are_copies(self) -> None:
        algorithm, rng = self.make(example_spec(), 0), np.random.default_rng(2)
        for taken in (algorithm.policy_weights(), algorithm.state_dict()):
            kept = {name: value.copy() for name, value in taken.items()}
            algorithm.update(example_batch(rng))
            assert all(np.array_equal(kept[name], taken[name]) for name in kept)

    def test_a_snapshot_holds_what_a_copy_of_the_same_moment_holds(self) -> None:
        algorithm, rng = self.make(example_spec(), 0), np.random.default_rng(2)
        for _ in range(2):
            snapshot, copy = algorithm.policy_snapshot(), algorithm.policy_weights()
            if not isinstance(snapshot, Mapping):  # it is fetched while training continues
                algorithm.update(example_batch(rng))
            found = to_host_arrays(snapshot)
            assert list(found) == list(copy) and all(np.array_equal(found[name], copy[name]) for name in copy)
            algorithm.update(example_batch(rng))

    def test_a_batch_may_be_reused_after_the_call(self) -> None:
        one, other = (self.make(example_spec(), 0) for _ in range(2))
        rng, twin = (np.random.default_rng(3) for _ in range(2))
        for _ in range(3):
            batch = example_batch(rng)
            one.update(batch)
            batch.action[...] = np.nan
            other.update(example_batch(twin))
        _assert_equal(one.state_dict(), other.state_dict())

    def test_resuming_is_bit_identical(self) -> None:
        spec, rng = example_spec(), np.random.default_rng(4)
        batches = [example_batch(rng) for _ in range(10)]
        straight, first, second = self.make(spec, 0), self.make(spec, 0), self.make(spec, 1)
        for batch in batches:
            straight.update(batch)
        for batch in batches[:5]:
            first.update(batch)
        second.load_state_dict(first.state_dict())
        for batch in batches[5:]:
            second.update(batch)
        _assert_equal(straight.state_dict(), second.state_dict())
        _assert_equal(straight.policy_weights(), second.policy_weights())

    def test_a_foreign_state_is_refused_and_changes_nothing(self) -> None:
        algorithm = self.make(example_spec(), 0)
        before = algorithm.state_dict()
        for name in (None, next(iter(before))):
            foreign = {} if name is None else {**before, name: np.zeros((1, 2, 3), np.float32)}
            try:
                algorithm.load_state_dict(foreign)
            except WireError:
                _assert_equal(algorithm.state_dict(), before)
            else:
                raise AssertionError("a foreign state was taken")


def _assert_equal(one: dict[str, Array], other: dict[str, Array]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)
