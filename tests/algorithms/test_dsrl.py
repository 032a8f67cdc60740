"""DSRL and the policy that it trains: conformance, what stays frozen, and that it improves a mediocre policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from point_kit import POINT, chunks, expert, success_rate

from hal.spec import STATE, Array, RobotSpec
from user_sys.algorithms.algorithm import Algorithm, load_policy_state, policy_arrays, save_state
from user_sys.algorithms.bc import Bc, BcSettings
from user_sys.algorithms.conformance import AlgorithmConformance, example_batch_for
from user_sys.algorithms.dsrl import Dsrl, DsrlSettings
from user_sys.config import build
from user_sys.errors import ConfigError
from user_sys.policies.conformance import PolicyConformance, example_observation, example_spec
from user_sys.policies.flow import FlowPolicy, FlowSettings
from user_sys.policies.mlp import MlpPolicy
from user_sys.policies.policy import SENTENCE, Policy
from user_sys.policies.steered import SteeredNetwork, SteeredPolicy, SteeredSettings
from user_sys.policies.trainable import apply_train_settings
from user_sys.policies.vla import VlaPolicy, VlaSettings

torch.set_num_threads(1)
SMALL = DsrlSettings(critic_hidden=(32, 32), critics=3, critics_first=0)
FLOW: dict[str, Any] = {"chunk_length": 2, "flow_steps": 3, "hidden": [32, 32]}
STEERED = SteeredSettings(base_options=FLOW, hidden=(32,))


class TestDsrl(AlgorithmConformance):
    options = STEERED

    def make(self, spec: RobotSpec) -> Algorithm:
        return Dsrl(SMALL, SteeredPolicy.make_module(spec, settings=self.options), spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return SteeredPolicy(spec, settings=self.options)


class TestDsrlOnPictures(TestDsrl):
    base = FLOW | {"pictures": True, "cameras": ["front"], "picture_size": 8}
    options = replace(STEERED, base_options=base, pictures=True, cameras=("wrist",), picture_size=8)


class TestDsrlOnSentences(TestDsrl):
    base: dict[str, Any] = {
        "width": 16,
        "heads": 2,
        "prefix_layers": 1,
        "expert_layers": 1,
        "chunk_length": 2,
        "flow_steps": 2,
    }
    options = SteeredSettings(base="vla", base_options=base, reads_base=True, hidden=(32,))


def test_frozen_policy_takes_the_weights_of_a_run_that_trained_adapters() -> None:
    options = FLOW | {"train": {"mode": "lora", "targets": ["layers"], "rank": 2}}
    settings = build(FlowSettings, options, "policy.options")
    module = apply_train_settings(FlowPolicy.make_module(POINT, settings=settings), settings)
    state = save_state(Bc(BcSettings(), module, POINT))
    steered = SteeredPolicy.make_module(POINT, settings=replace(STEERED, base_options=options))
    load_policy_state(steered.base, state)
    assert any("lora_A" in name for name in steered.base.state_dict())
    assert not any(each.requires_grad for each in steered.base.parameters())
    for name, value in steered.base.state_dict().items():
        torch.testing.assert_close(value, module.state_dict()[name], rtol=0, atol=0)


class TestSteeredPolicy(PolicyConformance):
    def make(self, spec: RobotSpec) -> Policy:
        return SteeredPolicy(spec, settings=STEERED)

    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        torch.manual_seed(seed)
        return policy_arrays(SteeredPolicy.make_module(spec, settings=STEERED))


def test_frozen_policy_stays_and_the_noise_is_bounded() -> None:
    torch.manual_seed(0)
    algorithm = Dsrl(SMALL, SteeredPolicy.make_module(example_spec(), settings=STEERED), example_spec())
    before = policy_arrays(algorithm.policy)
    batch = example_batch_for(algorithm.data, np.random.default_rng(0))
    for number in range(4):
        algorithm.update(batch, number)
    after = policy_arrays(algorithm.policy)
    changed = {name.partition(".")[0] for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"hidden", "mean", "log_std"}
    assert algorithm.policy.base.layers[0].weight is algorithm.actor.base.layers[0].weight, "one copy in memory"


def test_policy_that_cannot_be_steered_is_refused() -> None:
    with pytest.raises(ConfigError, match="dsrl needs the policy steered"):
        Dsrl(SMALL, MlpPolicy.make_module(example_spec()), example_spec())
    with pytest.raises(ConfigError, match="no policy 'mlp'; known are flow, lerobot, vla"):
        SteeredPolicy.make_module(example_spec(), settings=SteeredSettings(base="mlp"))
    with pytest.raises(ConfigError, match="execute is 3"):
        SteeredPolicy.make_module(example_spec(), settings=replace(STEERED, execute=3))
    with pytest.raises(ConfigError, match="noise_actions is 2; the robot executes 1"):
        SteeredPolicy.make_module(example_spec(), settings=replace(STEERED, execute=1, noise_actions=2))
    with pytest.raises(ConfigError, match="pretrain_updates is 9 and encoder is trained: .* leave out both"):
        SteeredSettings(pretrain_updates=9)
    with pytest.raises(ConfigError, match="pretrain_updates is 0 and encoder is frozen: .* leave out both"):
        SteeredSettings(encoder="frozen")


def test_frozen_policy_that_draws_more_than_its_noise_is_refused() -> None:
    base = FlowPolicy.make_module(POINT, settings=FlowSettings(chunk_length=2, hidden=(8,)))
    base.draws_between_steps = True  # type: ignore[assignment]  # as a diffusion of LeRobot by DDPM
    with pytest.raises(ConfigError, match=r"base_options.config: \{noise_scheduler_type: DDIM\}"):
        SteeredNetwork(POINT, (), STEERED, (), base)


def test_steered_policy_starts_as_the_frozen_vla_and_reads_its_sentence() -> None:
    torch.manual_seed(0)
    spec, options = example_spec(), TestDsrlOnSentences.options
    module = SteeredPolicy.make_module(spec, settings=options)
    steered, frozen = (
        SteeredPolicy(spec, settings=options),
        VlaPolicy(spec, settings=VlaSettings(**options.base_options)),
    )
    steered.load(policy_arrays(module))
    frozen.load(policy_arrays(module.base))
    observation = example_observation(np.random.default_rng(0))
    first, same = (each.act(observation, "lift", deterministic=True).actions for each in (steered, frozen))
    np.testing.assert_allclose(first, same[: len(first)], atol=0.02)
    tensors = {name: torch.from_numpy(value)[None] for name, value in observation.items()}
    red, blue = (
        module(module.encode({**tensors, SENTENCE: module.encode_sentences([sentence])}))[0]
        for sentence in ("lift the red cube", "lift the blue cube")
    )
    assert not torch.allclose(red, blue)
    with pytest.raises(ConfigError, match=r"reads_base: .* encodes nothing"):
        SteeredNetwork(spec, (), options, (), torch.nn.Linear(1, 1))


@pytest.mark.parametrize(("noise_actions", "chosen"), [(0, 2), (1, 1)])
def test_the_noise_of_executed_actions_is_chosen_and_starts_as_the_frozen_policy_draws_it(
    noise_actions: int, chosen: int
) -> None:
    torch.manual_seed(0)
    spec, base = example_spec(), FLOW | {"chunk_length": 6}
    options = replace(STEERED, base_options=base, execute=2, noise_actions=noise_actions)
    module = SteeredPolicy.make_module(spec, settings=options)
    elements = spec.action.shape[0]
    assert module.action_size == chosen * elements
    observation = {
        name: torch.from_numpy(np.stack([value] * 4000))
        for name, value in example_observation(np.random.default_rng(0)).items()
        if name in module.features
    }
    x = module.encode(observation)
    mean, log_std = module(x)
    noise = options.noise_max * torch.tanh(mean + log_std.exp() * torch.randn_like(mean))
    assert 0.8 < noise.std() < 1.0 and noise.mean().abs() < 0.05

    given: list[torch.Tensor] = []
    sample = module.base.sample
    module.base.sample = lambda context, noise, **steering: given.append(noise) or sample(context, noise)
    module.chunks({name: value[:3] for name, value in observation.items()}, [], noise[:3] / options.noise_max, x[:3])
    chunk = noise[:3].view(3, chosen, elements)
    torch.testing.assert_close(given[0], torch.cat([chunk, chunk[:, -1:].expand(-1, 6 - chosen, -1)], 1))


def test_only_critics_train_at_first() -> None:
    torch.manual_seed(0)
    settings = replace(SMALL, critics_first=2)
    algorithm = Dsrl(settings, SteeredPolicy.make_module(example_spec(), settings=STEERED), example_spec())
    for number in range(3):
        before = policy_arrays(algorithm.actor)
        algorithm.update(example_batch_for(algorithm.data, np.random.default_rng(number)), number)
        changes = any(not np.array_equal(value, before[name]) for name, value in policy_arrays(algorithm.actor).items())
        assert changes is (number == 2)


def test_each_part_of_a_batch_fits_the_noise_critics_at_noise_of_both_kinds() -> None:
    """The parts of a batch, such as demonstrations and online steps, are contiguous."""
    torch.manual_seed(0)
    module = SteeredPolicy.make_module(POINT, settings=STEERED)
    assert isinstance(module, SteeredNetwork)
    algorithm, inputs = Dsrl(replace(SMALL, critics_first=1), module, POINT), list[torch.Tensor]()
    for layer, value in ((module.mean, 3.0), (module.log_std, -9.0)):  # the policy's noise is about at its bound
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.constant_(layer.bias, value)
    algorithm.noise_critics.register_forward_hook(lambda _, given, found: inputs.append(given[0]))
    algorithm.update(chunks(np.zeros((64, 1), np.float32), np.zeros((64, 2, 1), np.float32)), 0)
    (found,) = inputs
    by_policy = (found[:, -module.action_size :] > 0.99).all(1)
    assert by_policy[:32].sum() == by_policy[32:].sum() == 16


@pytest.mark.slow
def test_dsrl_improves_a_mediocre_flow() -> None:
    """The frozen flow moves the point to the origin or away from it, as the noise would have it."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    flow = FlowPolicy.make_module(POINT, settings=FlowSettings(chunk_length=2, flow_steps=3, hidden=(32, 32)))
    cloning = Bc(BcSettings(learning_rate=3e-3, acting_rate=0.05), flow, POINT)
    for number in range(200):
        x = rng.uniform(-1, 1, (128, 1)).astype(np.float32)
        side = np.where(rng.random((128, 1, 1)) < 0.5, -1.0, 1.0)
        cloning.update(chunks(x, (side * expert(x, 2)).astype(np.float32)), number)
    module = SteeredPolicy.make_module(POINT, settings=STEERED)
    module.base.load_state_dict(cloning.policy.state_dict())
    settings = DsrlSettings(critic_hidden=(64, 64), critics=4, critics_first=50, acting_rate=0.05)
    algorithm = Dsrl(settings, module, POINT)
    policy = SteeredPolicy(POINT, settings=STEERED)
    policy.load(policy_arrays(algorithm.policy))
    before = success_rate(policy)
    for number in range(200):
        x = rng.uniform(-1, 1, (128, 1)).astype(np.float32)
        noise = torch.from_numpy(rng.uniform(-1, 1, (128, 2)).astype(np.float32))
        observation = {STATE: torch.from_numpy(x)}
        actions = module.chunks(observation, [], noise, module.encode(observation)).numpy()
        algorithm.update(chunks(x, actions), number)
    policy.load(policy_arrays(algorithm.policy))
    assert before < 0.8 and success_rate(policy) > 0.9


@pytest.mark.parametrize("reads_base", [False, True])
def test_frozen_policy_acts_under_its_condition(reads_base: bool) -> None:
    base = FLOW | {"conditions": 1, "condition": 1, "guidance": 3.0}
    settings = replace(STEERED, base_options=base, reads_base=reads_base)
    torch.manual_seed(0)
    module = SteeredPolicy.make_module(POINT, settings=settings)
    assert isinstance(module, SteeredNetwork)
    torch.nn.init.normal_(module.base.conditions.weight[1:])
    observation, noise = {STATE: torch.zeros(1, 1)}, torch.full((1, 2), 0.3)
    found = module.chunks(observation, [""], noise, module.encode(observation))
    drawn = module.unscale_action(noise).view(1, 2, 1)
    encoded, condition = module.base.encode(observation), torch.ones(1, dtype=torch.int64)
    steered, free = (
        module.base.unscale_action(module.base.sample(encoded, drawn, condition=each, guidance=3.0))
        for each in (condition, None)
    )
    torch.testing.assert_close(found, steered)
    assert not torch.allclose(steered, free)


@pytest.mark.parametrize(("execute", "of_base", "bound"), [(0, 0, 5), (0, 4, 2), (8, 0, 4)])
def test_steered_policy_over_lerobot_bridges_half_of_its_action_steps(execute: int, of_base: int, bound: int) -> None:
    base = {"type": "smolvla", "config": {"chunk_size": 50, "n_action_steps": 10}, "execute": of_base}
    settings = SteeredSettings(base="lerobot", base_options=base, execute=execute)
    assert SteeredPolicy.execution_delays(settings) == {"switch": bound, "ensemble": bound}


@pytest.mark.parametrize(("options", "bound"), [({}, 4), ({"execute": 4}, 2)])
def test_steered_policy_bridges_half_of_the_executed_actions(options: dict[str, Any], bound: int) -> None:
    settings = SteeredSettings(base_options={"chunk_length": 8}, **options)
    assert SteeredPolicy.execution_delays(settings) == {"switch": bound, "ensemble": bound}
