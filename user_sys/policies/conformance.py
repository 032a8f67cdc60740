"""The conformance suite of policies: a test class inherits `PolicyConformance` and defines `make` and `weights`.

Example::

    class TestMyPolicy(PolicyConformance):
        def make(self, spec: RobotSpec) -> Policy:
            return MyPolicy(spec)

        def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
            return ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import numpy as np

from hal.errors import SpecError
from hal.spec import ACTION, ENVIRONMENT_STATE, STATE, Array, ArraySpec, RobotSpec
from user_sys.errors import WireError
from user_sys.policies.policy import ActionChunk, Policy

SENTENCE = "lift the cube"


def example_spec() -> RobotSpec:
    """Returns a robot with two observation vectors, an unbounded element, and asymmetric action bounds."""
    return RobotSpec(
        model="conformance",
        rate_hz=10.0,
        observation=(
            ArraySpec(name=STATE, labels=("x", "v"), units=("m", "m/s"), low=(-0.5, -np.inf), high=(0.5, np.inf)),
            ArraySpec(name=ENVIRONMENT_STATE, labels=("goal",), units=("m",), low=(0.0,), high=(1.0,)),
        ),
        action=ArraySpec(name=ACTION, labels=("dx", "width"), units=("m", "m"), low=(-0.05, 0.0), high=(0.05, 0.08)),
        neutral=(0.0, 0.08),
        gripper=1,
    )


def example_observation(rng: np.random.Generator) -> dict[str, Array]:
    return {
        STATE: rng.uniform(-0.5, 0.5, 2).astype(np.float32),
        ENVIRONMENT_STATE: rng.uniform(0.0, 1.0, 1).astype(np.float32),
    }


class PolicyConformance(ABC):
    """See the module."""

    @abstractmethod
    def make(self, spec: RobotSpec) -> Policy:
        """Returns a new policy for `spec`; two calls give policies that draw equally."""

    @abstractmethod
    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        """Returns weights for `load`; different seeds act differently."""

    def test_acts_within_the_bounds_before_and_after_weights(self) -> None:
        spec, rng = example_spec(), np.random.default_rng(0)
        policy = self.make(spec)
        for loaded in (False, True):
            if loaded:
                policy.load(self.weights(spec, 0))
            for deterministic in (False, True):
                for _ in range(50):
                    chunk = policy.act(example_observation(rng), SENTENCE, deterministic=deterministic)
                    _check_chunk(chunk, spec)

    def test_a_deterministic_action_is_repeatable(self) -> None:
        spec, observation = example_spec(), example_observation(np.random.default_rng(1))
        policy = self.make(spec)
        policy.load(self.weights(spec, 0))
        first, second = (policy.act(observation, SENTENCE, deterministic=True).actions for _ in range(2))
        np.testing.assert_array_equal(first, second)

    def test_equal_policies_draw_equal_actions(self) -> None:
        spec, observation = example_spec(), example_observation(np.random.default_rng(2))
        one, other = self.make(spec), self.make(spec)
        for policy in (one, other):
            policy.load(self.weights(spec, 0))
        for _ in range(5):
            a, b = (p.act(observation, SENTENCE, deterministic=False) for p in (one, other))
            np.testing.assert_array_equal(a.actions, b.actions)

    def test_loading_changes_what_it_does_and_keeps_no_reference(self) -> None:
        spec, observation = example_spec(), example_observation(np.random.default_rng(3))
        policy, weights = self.make(spec), self.weights(spec, 0)
        policy.load(weights)
        before = policy.act(observation, SENTENCE, deterministic=True).actions.copy()
        for array in weights.values():
            array[...] = np.nan
        np.testing.assert_array_equal(policy.act(observation, SENTENCE, deterministic=True).actions, before)
        policy.load(self.weights(spec, 1))
        assert not np.array_equal(policy.act(observation, SENTENCE, deterministic=True).actions, before)

    def test_foreign_weights_are_refused_and_the_former_stay(self) -> None:
        spec, observation = example_spec(), example_observation(np.random.default_rng(4))
        policy = self.make(spec)
        policy.load(self.weights(spec, 0))
        before = policy.act(observation, SENTENCE, deterministic=True).actions.copy()
        for foreign in _spoiled(self.weights(spec, 1)):
            _raises(WireError, partial(policy.load, foreign))
        np.testing.assert_array_equal(policy.act(observation, SENTENCE, deterministic=True).actions, before)

    def test_a_missing_or_misshapen_feature_is_named(self) -> None:
        spec, observation = example_spec(), example_observation(np.random.default_rng(5))
        policy = self.make(spec)
        for wrong in (
            {ENVIRONMENT_STATE: observation[ENVIRONMENT_STATE]},
            observation | {STATE: np.zeros(9, np.float32)},
        ):
            message = _raises(SpecError, partial(policy.act, wrong, SENTENCE, deterministic=True))
            assert STATE in message


def _check_chunk(chunk: ActionChunk, spec: RobotSpec) -> None:
    assert chunk.actions.dtype == np.float32 and chunk.actions.ndim == 2
    assert chunk.log_prob.dtype == np.float32 and chunk.log_prob.shape == chunk.actions.shape[:1]
    for action in chunk.actions:
        spec.action.validate(action)
    assert (chunk.actions >= np.asarray(spec.action.low, np.float32)).all()
    assert (chunk.actions <= np.asarray(spec.action.high, np.float32)).all()


def _spoiled(weights: dict[str, Array]) -> list[dict[str, Array]]:
    name = next(iter(weights))
    without = {k: v for k, v in weights.items() if k != name}
    return [{}, without, weights | {"surplus": np.zeros(1, np.float32)}, weights | {name: weights[name][..., :0]}]


def _raises(kind: type[Exception], call: Callable[[], object]) -> str:
    """Returns the message of the `kind` that `call` raises. The suite does not import pytest."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")
