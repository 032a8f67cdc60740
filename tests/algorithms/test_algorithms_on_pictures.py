"""Actor-critics on pictures: conformance, which loss trains the encoder, and pictures that are encoded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from hal.spec import IMAGES, Array, RobotSpec
from user_sys.algorithms.algorithm import Algorithm, TensorBatch, load_state, save_state
from user_sys.algorithms.bc import Bc, BcSettings
from user_sys.algorithms.conformance import AlgorithmConformance, example_batch, example_batch_for
from user_sys.algorithms.q_chunking import QChunking, QChunkingSettings
from user_sys.algorithms.recap import Recap, RecapSettings
from user_sys.algorithms.rlpd import Rlpd, RlpdSettings
from user_sys.algorithms.sac_flow import SacFlow, SacFlowSettings
from user_sys.episode import Phase
from user_sys.policies.cnn import CnnPolicy, CnnSettings
from user_sys.policies.conformance import example_spec
from user_sys.policies.flow import FlowPolicy, FlowSettings
from user_sys.policies.gated_flow import GatedFlowPolicy, GatedFlowSettings
from user_sys.policies.policy import Policy
from user_sys.policies.scaling import encoded_feature

torch.set_num_threads(1)
SMALL = RlpdSettings(critic_hidden=(32, 32), critics=3, critics_first=2)
TRAINED = CnnSettings(hidden=(32,), picture_size=8, pretrain_updates=2)
FROZEN = replace(TRAINED, encoder="frozen")


def rlpd(options: CnnSettings, settings: RlpdSettings = SMALL) -> Rlpd:
    torch.manual_seed(0)
    return Rlpd(settings, CnnPolicy.make_module(example_spec(), settings=options), example_spec())


def sac_flow() -> SacFlow:
    torch.manual_seed(0)
    options = GatedFlowSettings(pictures=True, picture_size=8, hidden=(32,))
    settings = SacFlowSettings(critic_hidden=(32,), critics=2)
    return SacFlow(settings, GatedFlowPolicy.make_module(example_spec(), settings=options), example_spec())


class TestRlpdFromPictures(AlgorithmConformance):
    """It clones demonstrations first, then trains only critics, so a resumption crosses from one to the other."""

    def make(self, spec: RobotSpec) -> Algorithm:
        return Rlpd(SMALL, CnnPolicy.make_module(spec, settings=TRAINED), spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return CnnPolicy(spec, settings=TRAINED)


def changed(before: dict[str, Array], after: dict[str, Array], prefix: str) -> set[bool]:
    return {not np.array_equal(value, after[name]) for name, value in before.items() if name.startswith(prefix)}


def test_encoder_is_trained_by_the_critics_or_frozen_after_imitation() -> None:
    batch = example_batch(np.random.default_rng(0))
    for options, moves in ((TRAINED, True), (FROZEN, False)):
        algorithm = rlpd(options, replace(SMALL, critics_first=0))
        states = [save_state(algorithm)]
        for number in range(4):
            algorithm.update(batch, number)
            states.append(save_state(algorithm))
        assert changed(states[0], states[1], "network.actor.encoder.") == {True}, "imitation trains it"
        assert changed(states[0], states[2], "network.critics.") == {False}
        assert changed(states[2], states[4], "network.actor.encoder.") == {moves}
        assert True in changed(states[2], states[4], "network.critics.")
        assert np.array_equal(
            states[2]["network.actor.encoder.front.project.weight"],
            states[2]["network.policy.encoder.front.project.weight"],
        )


@pytest.mark.parametrize("options", [TRAINED, FROZEN], ids=["trained", "frozen"])
def test_cloned_actor_stays_until_the_critics_have_learned(options: CnnSettings) -> None:
    batch, algorithm = example_batch(np.random.default_rng(0)), rlpd(options)
    states = []
    for number in range(5):
        states.append(save_state(algorithm))
        algorithm.update(batch, number)
    assert changed(states[2], states[4], "network.actor.") == {False}
    assert True in changed(states[4], save_state(algorithm), "network.actor.")


def test_policy_steps_are_not_imitated() -> None:
    batch, algorithm = example_batch(np.random.default_rng(0)), rlpd(FROZEN)
    before = save_state(algorithm)
    algorithm.update(replace(batch, phase=torch.full((32,), int(Phase.POLICY))), 0)
    assert changed(before, save_state(algorithm), "network.actor.") == {False}
    algorithm.update(replace(batch, phase=torch.full((32,), int(Phase.TELEOP))), 1)
    assert True in changed(before, save_state(algorithm), "network.actor.")


def test_update_with_encoded_pictures_is_that_with_pictures() -> None:
    batch, states = example_batch(np.random.default_rng(0)), []
    for encoded in (False, True):
        algorithm = rlpd(replace(FROZEN, shift=0))
        for number in range(4):
            torch.manual_seed(number)
            algorithm.update(with_encoded_pictures(algorithm, batch) if encoded and number > 1 else batch, number)
        states.append(save_state(algorithm))
    for name, value in states[0].items():
        np.testing.assert_allclose(value, states[1][name], rtol=1e-4, atol=1e-6, err_msg=name)


FLOW = FlowSettings(pictures=True, picture_size=8, hidden=(32,), chunk_length=2, flow_steps=1)
WITH_SLOW_COPIES: dict[str, Callable[[Literal["trained", "frozen"]], Algorithm]] = {
    "rlpd": lambda encoder: rlpd(replace(TRAINED, pretrain_updates=1, encoder=encoder), FOLLOWING),
    "bc": lambda encoder: of_flow(Bc, BcSettings(), encoder),
    "q_chunking": lambda encoder: of_flow(QChunking, QChunkingSettings(critic_hidden=(32,), critics=2), encoder),
    "recap": lambda encoder: of_flow(Recap, RecapSettings(value_hidden=(32,)), encoder, conditions=2, condition=1),
}
FOLLOWING = replace(SMALL, critics_first=0, acting_rate=0.01)


def of_flow(kind: type[Algorithm], settings: Any, encoder: Literal["trained", "frozen"], **options: Any) -> Algorithm:
    torch.manual_seed(0)
    chosen = replace(FLOW, encoder=encoder, pretrain_updates=int(encoder == "frozen"), **options)
    return kind(settings, FlowPolicy.make_module(example_spec(), settings=chosen), example_spec())


@pytest.mark.parametrize("make", WITH_SLOW_COPIES.values(), ids=WITH_SLOW_COPIES.keys())
def test_published_encoder_stays_if_a_resumption_freezes_it(
    make: Callable[[Literal["trained", "frozen"]], Algorithm],
) -> None:
    trained, frozen = make("trained"), make("frozen")
    batch = example_batch_for(trained.data, np.random.default_rng(0))
    for number in range(3):
        trained.update(batch, number)
    before = save_state(trained)
    slow, fast = (before[f"network.{which}.encoder.front.project.weight"] for which in ("policy", "actor"))
    assert not np.array_equal(slow, fast)
    load_state(frozen, before)
    encoded = with_encoded_pictures(frozen, batch)
    for number in range(3, 6):
        frozen.update(encoded, number)
    after = save_state(frozen)
    assert changed(before, after, "network.policy.encoder.") == {False}
    assert True in changed(before, after, "network.policy.")


def with_encoded_pictures(algorithm: Algorithm, batch: TensorBatch) -> TensorBatch:
    """As the learner's batches are from the update `frozen_from` on."""
    columns = []
    for observation in (batch.observation, batch.next_observation):
        vectors = {name: value for name, value in observation.items() if not name.startswith(IMAGES)}
        encode = algorithm.policy.encode_images
        assert callable(encode)
        columns.append(
            vectors | {encoded_feature(c): encode(c, observation[IMAGES + c]) for c in algorithm.data.cameras}
        )
    return replace(batch, observation=columns[0], next_observation=columns[1])
