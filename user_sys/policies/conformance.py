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
from hal.spec import ACTION, ENVIRONMENT_STATE, IMAGES, STATE, Array, ArraySpec, CameraSpec, RobotSpec
from user_sys.errors import WireError
from user_sys.policies.policy import AGE_SUFFIX, ActionChunk, ChunkContext, Policy

SENTENCE = "lift the cube"
SENTENCES = (SENTENCE, "", "hebe den W\N{LATIN SMALL LETTER U WITH DIAERESIS}rfel", "open the drawer, " * 50)
EVERY_CALL = [(sentence, deterministic) for sentence in (SENTENCE, "") for deterministic in (True, False)]


def example_spec() -> RobotSpec:
    """Returns a robot with two observation vectors, an unbounded element, asymmetric action bounds, and two cameras."""
    return RobotSpec(
        model="conformance",
        rate_hz=10.0,
        observation=(
            ArraySpec(name=STATE, labels=("x", "v"), units=("m", "m/s"), low=(-0.5, -np.inf), high=(0.5, np.inf)),
            ArraySpec(name=ENVIRONMENT_STATE, labels=("goal",), units=("m",), low=(0.0,), high=(1.0,)),
        ),
        action=ArraySpec(name=ACTION, labels=("dx", "width"), units=("m", "m"), low=(-0.05, 0.0), high=(0.05, 0.08)),
        cameras=(
            CameraSpec(name="front", height=24, width=32, rate_hz=10.0),
            CameraSpec(name="wrist", height=16, width=16, rate_hz=10.0),
        ),
        neutral=(0.0, 0.08),
        gripper=1,
    )


def example_observation(rng: np.random.Generator) -> dict[str, Array]:
    """Draws an observation of `example_spec`, with a new picture of each camera."""
    vectors = {
        STATE: rng.uniform(-0.5, 0.5, 2).astype(np.float32),
        ENVIRONMENT_STATE: rng.uniform(0.0, 1.0, 1).astype(np.float32),
    }
    pictures = {each.feature: rng.integers(0, 256, each.shape, np.uint8) for each in example_spec().cameras}
    ages = {each + AGE_SUFFIX: np.zeros(1, np.float32) for each in pictures}
    return vectors | pictures | ages


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

    def test_every_chunk_has_equally_many_actions(self) -> None:
        spec, rng = example_spec(), np.random.default_rng(6)
        policy = self.make(spec)
        policy.load(self.weights(spec, 0))
        lengths = {len(policy.act(example_observation(rng), s, deterministic=d).actions) for s, d in EVERY_CALL}
        assert len(lengths) == 1

    def test_any_sentence_is_answered(self) -> None:
        spec, observation = example_spec(), example_observation(np.random.default_rng(7))
        policy = self.make(spec)
        policy.load(self.weights(spec, 0))
        for sentence in SENTENCES:
            _check_chunk(policy.act(observation, sentence, deterministic=True), spec)

    def test_a_batch_of_robots_acts_as_each_robot_alone(self) -> None:
        spec, rng = example_spec(), np.random.default_rng(8)
        policy, observations = self.make(spec), [example_observation(rng) for _ in range(3)]
        policy.load(self.weights(spec, 0))
        together = policy.act_batch(observations, [SENTENCE] * 3, deterministic=True)
        for observation, chunk in zip(observations, together, strict=True):
            _check_chunk(chunk, spec)
            alone = policy.act(observation, SENTENCE, deterministic=True)
            np.testing.assert_allclose(chunk.actions, alone.actions, atol=1e-5)

    def test_promised_actions_are_accepted(self) -> None:
        spec, rng = example_spec(), np.random.default_rng(10)
        policy, observation = self.make(spec), example_observation(np.random.default_rng(10))
        policy.load(self.weights(spec, 0))
        centre = np.array([sum(pair) / 2 for pair in zip(spec.action.low, spec.action.high, strict=True)], np.float32)
        for promised, delay in ((0, 1), (2, 1), (1, 3)):
            context = ChunkContext(np.tile(centre, (promised, 1)), delay)
            _check_chunk(policy.act(observation, SENTENCE, deterministic=True, context=context), spec)
            batch = policy.act_batch(
                [observation, example_observation(rng)], [SENTENCE] * 2, deterministic=True, contexts=[None, context]
            )
            assert len(batch) == 2

    def test_reads_the_pictures_of_its_cameras_and_no_others(self) -> None:
        spec, observation = example_spec(), example_observation(np.random.default_rng(9))
        policy = self.make(spec)
        policy.load(self.weights(spec, 0))
        assert {*policy.cameras} <= {camera.name for camera in spec.cameras}
        expected = policy.act(observation, SENTENCE, deterministic=True).actions
        for camera in spec.cameras:
            dark = observation | {camera.feature: np.zeros(camera.shape, np.uint8)}
            actions = policy.act(dark, SENTENCE, deterministic=True).actions
            assert np.array_equal(actions, expected) == (camera.name not in policy.cameras)

    def test_loading_changes_what_it_does_and_keeps_no_reference(self) -> None:
        spec, observation = example_spec(), example_observation(np.random.default_rng(3))
        policy, weights = self.make(spec), self.weights(spec, 0)
        policy.load(weights)
        before = policy.act(observation, SENTENCE, deterministic=True).actions.copy()
        for array in weights.values():
            array[...] = -1 if array.dtype.kind in "iu" else np.nan
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
        for camera in policy.cameras:
            name = IMAGES + camera
            without = {key: value for key, value in observation.items() if key != name}
            for wrong in (without, observation | {name: observation[name][:-1]}):
                assert name in _raises(SpecError, partial(policy.act, wrong, SENTENCE, deterministic=True))


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
