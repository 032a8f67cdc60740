"""Which parameters train: settings and their errors, frozen parameters that are shared, and their file."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hal.spec import Array, RobotSpec
from user_sys.algorithms.algorithm import Algorithm, ChunkPolicy, policy_arrays
from user_sys.algorithms.bc import Bc, BcSettings
from user_sys.algorithms.conformance import AlgorithmConformance
from user_sys.codec import BF16
from user_sys.errors import ConfigError, RunError
from user_sys.learner.frozen_weights import frozen_digest, frozen_path, restore_frozen, save_frozen
from user_sys.plugins import load_policy
from user_sys.policies.conformance import PolicyConformance, example_observation, example_spec
from user_sys.policies.flow import FlowNetwork, FlowPolicy, FlowSettings
from user_sys.policies.mlp import MlpPolicy
from user_sys.policies.policy import Policy, TrainablePolicy
from user_sys.policies.trainable import (
    TrainSettings,
    apply_train_settings,
    frozen_parameters,
    shared_copy,
)
from user_sys.weights.state import to_bf16

torch.set_num_threads(1)
SMALL = FlowSettings(hidden=(64, 64), chunk_length=4)
EXPERT = replace(SMALL, train=TrainSettings(mode="modules", modules=("layers.6",)))
LORA = replace(SMALL, train=TrainSettings(mode="lora", targets=("layers",), modules=("layers.6",), rank=2))


def module_of(settings: FlowSettings, seed: int = 0) -> FlowNetwork:
    torch.manual_seed(seed)
    module = apply_train_settings(FlowPolicy.make_module(example_spec(), settings=settings), settings)
    assert isinstance(module, FlowNetwork)
    return module


def test_module_is_recognised_without_getattr() -> None:
    """As `isinstance` looks for them from Python 3.12 on: a submodule of a torch module is not among them."""
    module = module_of(SMALL)
    for name in {name for each in ChunkPolicy.__mro__ for name in vars(each).get("__annotations__", {})}:
        inspect.getattr_static(module, name)


class TestPolicyWithAdapters(PolicyConformance):
    def make(self, spec: RobotSpec) -> Policy:
        return FlowPolicy(spec, settings=LORA)

    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        return policy_arrays(module_of(LORA, seed))


class TestCloningByAdapters(AlgorithmConformance):
    def make(self, spec: RobotSpec) -> Algorithm:
        return Bc(BcSettings(), module_of(LORA, torch.initial_seed()), spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return FlowPolicy(spec, settings=LORA)

    @pytest.mark.slow  # each process imports peft; with `EXPERT` it is quick
    def test_processes_that_train_together_keep_the_same_weights(self) -> None:
        super().test_processes_that_train_together_keep_the_same_weights()

    def test_frozen_parameters_keep_their_values_and_are_held_once(self) -> None:
        algorithm, rng = self.make_seeded(0), np.random.default_rng(0)
        assert isinstance(algorithm, Bc)
        frozen, before = frozen_parameters(algorithm.actor), policy_arrays(algorithm.actor)
        for number in range(3):
            algorithm.update(self.batch(rng), number)
        after = policy_arrays(algorithm.actor)
        assert {name for name in before if np.array_equal(before[name], after[name])} >= frozen.keys()
        assert any(not np.array_equal(before[name], after[name]) for name in before)
        assert frozen_parameters(algorithm.policy).keys() > frozen.keys()
        assert all(algorithm.policy.state_dict()[n].data_ptr() == each.data_ptr() for n, each in frozen.items())


class TestCloningByAnExpert(AlgorithmConformance):
    def make(self, spec: RobotSpec) -> Algorithm:
        return Bc(BcSettings(acting_rate=1.0), module_of(EXPERT, torch.initial_seed()), spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return FlowPolicy(spec, settings=EXPERT)


def test_settings_select_what_trains() -> None:
    full, expert, lora = (module_of(each) for each in (SMALL, EXPERT, LORA))
    assert not frozen_parameters(full)
    assert {n for n, p in expert.named_parameters() if p.requires_grad} == {"layers.6.weight", "layers.6.bias"}
    trained = {name: each for name, each in lora.named_parameters() if each.requires_grad}
    assert {name.rpartition("lora_")[2][0] for name in trained if "lora_" in name} == {"A", "B"}
    assert "layers.6.base_layer.bias" in trained and "layers.0.base_layer.weight" in frozen_parameters(lora)
    trained_bytes, frozen_bytes = (sum(p.nbytes for p in each.values()) for each in (trained, frozen_parameters(lora)))
    assert trained_bytes < frozen_bytes


def test_new_adapters_change_no_action() -> None:
    context, noise = torch.randn(3, module_of(SMALL).observation_size), torch.randn(3, 4, 2)
    plain, lora = (module_of(each).sample(context, noise) for each in (SMALL, LORA))
    torch.testing.assert_close(plain, lora)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"mode": "lora", "targets": ["layer"]},
            "train.targets: the policy has no module 'layer'; did you mean 'layers'",
        ),
        ({"mode": "modules", "modules": ["expert"]}, "train.modules: the policy has no module 'expert'; known are"),
        ({"mode": "lora", "targets": ["layers.1"]}, "train.targets: layers.1 hold no linear layer for adapters"),
        ({"mode": "modules", "modules": ["layers.2"]}, "train.modules: layers.2 have no parameters"),
        ({"mode": "lora"}, "train.mode is lora: name the targets in train.targets"),
        ({"modules": ["layers"]}, "train.modules has no effect with train.mode full"),
        ({"mode": "lora", "target": ["q"]}, "train.target: unknown key; did you mean 'train.targets'"),
    ],
)
def test_unusable_settings_are_refused_in_one_line(train: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        _, settings = load_policy("flow", {"hidden": [16, 16], "train": train})
        module_of(settings)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_copies_share_frozen_parameters_only() -> None:
    module = module_of(LORA)
    copied = shared_copy(module)
    for copy, original in zip(copied.parameters(), module.parameters(), strict=True):
        assert (copy is original) is not original.requires_grad


@pytest.mark.parametrize("rounded", [False, True])
def test_two_copies_of_an_acting_policy_share_read_only_arrays(rounded: bool) -> None:
    first = FlowPolicy(example_spec(), settings=LORA)
    policies, weights = (first.copy(), first.copy()), policy_arrays(module_of(LORA))
    if rounded:
        weights = {name: to_bf16(each) for name, each in weights.items()}
    for name, array in weights.items():
        array.flags.writeable = "lora" in name
    for policy in policies:
        policy.load(weights)
    one, other = (policy.module.state_dict() for policy in policies)
    shared = {name for name in one if one[name].data_ptr() == other[name].data_ptr()}
    assert shared == {name for name in weights if "lora" not in name}
    if not rounded:
        assert one["layers.0.base_layer.weight"].data_ptr() == weights["layers.0.base_layer.weight"].ctypes.data
    observation = example_observation(np.random.default_rng(0))
    a, b = (policy.act(observation, "", deterministic=True).actions for policy in policies)
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("kind", [FlowPolicy, MlpPolicy])
def test_copies_of_an_acting_policy_explore_with_their_own_numbers(kind: type[TrainablePolicy], loaded: bool) -> None:
    first, observation = kind(example_spec()), example_observation(np.random.default_rng(0))
    policies = first.copy(), first.copy()
    weights = policy_arrays(kind.make_module(example_spec()))
    for policy in policies if loaded else ():
        policy.load(weights)
    a, b = (policy.act(observation, "", deterministic=False).actions for policy in policies)
    assert not np.array_equal(a, b)


def test_policy_in_bfloat16_loads_exact_bits() -> None:
    policy, module = FlowPolicy(example_spec(), settings=SMALL), module_of(SMALL).bfloat16()
    policy.module.bfloat16()
    weights = policy_arrays(module)
    assert {each.dtype for each in weights.values()} == {BF16}
    policy.load(weights)
    assert all(torch.equal(each, policy.module.state_dict()[name]) for name, each in module.state_dict().items())


def test_frozen_weights_are_stored_once_and_verified(tmp_path: Path) -> None:
    tensors = frozen_parameters(module_of(LORA))
    digest = frozen_digest(tensors)
    for _ in range(2):
        save_frozen(tmp_path, tensors, digest)
    (path,) = tmp_path.iterdir()
    assert path == frozen_path(tmp_path, digest)
    other = frozen_parameters(module_of(LORA, seed=1))
    assert frozen_digest(other) != digest
    restore_frozen(tmp_path, other, digest)
    assert frozen_digest(other) == digest
    with pytest.raises(RunError, match="do not fit this policy: resume with the same policy.kind"):
        restore_frozen(tmp_path, frozen_parameters(module_of(EXPERT)), digest)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="damaged: its digest differs; restore a copy of it"):
        restore_frozen(tmp_path, frozen_parameters(module_of(LORA, seed=1)), digest)
    path.unlink()
    with pytest.raises(RunError, match="frozen-.*safetensors, which is missing: restore it"):
        restore_frozen(tmp_path, frozen_parameters(module_of(LORA, seed=1)), digest)
