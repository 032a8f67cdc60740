"""How a learner computes: parts of a batch, recomputed activations, bfloat16, and too little memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import is_initialized

from hal.spec import RobotSpec
from user_sys.algorithms.algorithm import Algorithm, policy_arrays, save_state
from user_sys.algorithms.bc import Bc, BcSettings
from user_sys.algorithms.conformance import (
    AlgorithmConformance,
    example_batch,
    example_batch_for,
    train_together,
    train_with,
)
from user_sys.algorithms.distributed import TrainingGroup, clip_gradients, divide
from user_sys.algorithms.sac import Sac, SacSettings
from user_sys.codec import Array
from user_sys.compose import PolicyConfig
from user_sys.errors import ConfigError, RunError
from user_sys.learner import trainer
from user_sys.learner.config import ComputeConfig, LearnerConfig
from user_sys.learner.trainer import Trainer, TrainingStep, blocks_of, planned_module, require_memory
from user_sys.plugins import load_policy
from user_sys.policies.conformance import example_spec
from user_sys.policies.policy import Policy
from user_sys.policies.trainable import apply_train_settings
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.weights.gpu_copy import DeviceSnapshot, HostCopier

torch.set_num_threads(1)
HOST = torch.device("cpu")
PARTS, SAMPLES, GRADIENT_NORM_MAX = 4, 16, 0.5
VLA = {"width": 32, "heads": 2, "prefix_layers": 2, "expert_layers": 2, "shift": 0, "flow_draws": 1}


class PlainBc(Bc):
    """Clones without noise and times that are drawn, so that parts of a batch sum up to the whole."""

    def update(self, batch: Any, number: int) -> None:
        context = self.actor.encode(batch.observation)
        x_t = self.actor.scale_action(batch.action)
        velocity = self.actor.velocity(x_t, torch.full((len(x_t),), 0.5), context)
        loss = (velocity - x_t).square().mean((1, 2))
        self.optimizers["actor"].zero_grad()
        loss.mean().backward()
        clip_gradients(self._trained, GRADIENT_NORM_MAX)
        self.optimizers["actor"].step()
        self._loss = loss.detach()


def algorithm(kind: str = "vla", options: dict[str, Any] | None = None, *, divided: bool = False) -> PlainBc:
    torch.manual_seed(0)
    policy, settings = load_policy(kind, VLA if options is None else options)
    module = apply_train_settings(policy.make_module(example_spec(), settings=settings), settings)
    if divided:
        divide(module, HOST.type, least=1)
        with pytest.raises(ConfigError, match=r"second copy of the policy.*acting_rate: 1"):
            PlainBc(BcSettings(), module, example_spec())
    made = PlainBc(BcSettings(acting_rate=1.0), module, example_spec())
    made.optimizers = {"actor": torch.optim.SGD([each for each in module.parameters() if each.requires_grad], 0.1)}
    return made


def trained(config: ComputeConfig, updates: int = 2) -> dict[str, Array]:
    made = algorithm()
    step = TrainingStep(made, config, HOST)
    for number in range(updates):
        batch = example_batch_for(made.data, np.random.default_rng(number), SAMPLES).with_sentences(
            made.actor.encode_sentences(("lift the cube", "reach the green target"))
        )
        each = SAMPLES // config.parts
        for part in range(config.parts):
            step.update(batch.rows(slice(part * each, (part + 1) * each)), number, part)
    return policy_arrays(made.policy)


def test_parts_of_a_batch_count_as_one_batch() -> None:
    whole, parts = trained(ComputeConfig()), trained(ComputeConfig(parts=PARTS))
    for name, value in whole.items():
        np.testing.assert_allclose(parts[name], value, atol=2e-6, err_msg=name)
    assert any(not np.array_equal(value, trained(ComputeConfig(), 1)[name]) for name, value in whole.items())


@pytest.mark.parametrize("parts", [1, PARTS])
def test_slow_copies_follow_once_an_update(parts: int) -> None:
    torch.manual_seed(0)
    policy, settings = load_policy("mlp", {"hidden": [16]})
    module = policy.make_module(example_spec(), settings=settings)
    slow = SacSettings(critic_hidden=(16,), learning_rate=1e-12, target_rate=0.1, acting_rate=0.1)
    made = Sac(slow, module, example_spec())
    pairs = [(made.targets, made.critics), (made.policy, made.actor)]
    with torch.no_grad():
        for copied in (made.targets, made.policy):
            for each in copied.parameters():
                each += 1.0
    step, batch = TrainingStep(made, ComputeConfig(parts=parts), HOST), example_batch(np.random.default_rng(0), SAMPLES)
    for part in range(parts):
        step.update(batch.rows(slice(part * SAMPLES // parts, (part + 1) * SAMPLES // parts)), 0, part)
    for copied, followed in pairs:
        for one, other in zip(copied.parameters(), followed.parameters(), strict=True):
            torch.testing.assert_close(one - other, torch.full_like(one, 0.9))


class _Adapters(AlgorithmConformance):
    train: dict[str, Any] = {"mode": "lora", "targets": ["layers"], "rank": 2}

    def make(self, spec: RobotSpec) -> Algorithm:
        return algorithm("flow", {"hidden": [16, 16], "train": self.train})

    def policy(self, spec: RobotSpec) -> Policy:
        raise NotImplementedError


class _Expert(_Adapters):
    train = {"mode": "modules", "modules": ["layers.3"]}


class _Divided(_Adapters):
    """In two processes, each has a part of the linear layers."""

    def make(self, spec: RobotSpec) -> Algorithm:
        return algorithm("vla", VLA, divided=is_initialized())


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in (_Adapters, _Divided)]  # peft and FSDP2 take seconds


@pytest.mark.parametrize("suite", [_Expert, *SLOW])
def test_two_processes_have_the_gradient_of_one(suite: type[_Adapters]) -> None:
    one, both = train_with(suite(), TrainingGroup(), 3), train_together(suite)
    start = {name: value for name, value in save_state(suite().make_seeded(0)).items() if name in one}
    assert any(not np.array_equal(value, start[name]) for name, value in one.items())
    for network in both:
        for name, value in one.items():
            np.testing.assert_allclose(network[name], value, atol=1e-6, err_msg=name)


def test_recomputed_activations_give_the_same_update() -> None:
    made = algorithm()
    assert len(list(blocks_of(made.actor))) == 4
    plain, recomputed = trained(ComputeConfig()), trained(ComputeConfig(recompute=True))
    for name, value in plain.items():
        np.testing.assert_allclose(recomputed[name], value, atol=1e-6, err_msg=name)


def test_bfloat16_is_close_and_keeps_the_weights_as_they_are() -> None:
    plain, rounded = trained(ComputeConfig()), trained(ComputeConfig(precision="bf16"))
    assert {value.dtype for value in rounded.values()} == {np.dtype(np.float32)}
    assert any(not np.array_equal(rounded[name], value) for name, value in plain.items())
    for name, value in plain.items():
        np.testing.assert_allclose(rounded[name], value, atol=0.02, err_msg=name)


def test_too_little_memory_ends_before_the_policy_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, settings = load_policy("vla", {"width": 2048, "heads": 16, "prefix_layers": 18, "expert_layers": 18})
    monkeypatch.setattr(trainer, "free_memory_bytes", lambda: 16_000_000_000)

    def planned() -> torch.nn.Module:
        found = planned_module(lambda: policy.make_module(example_spec(), settings=settings), settings)
        assert found is not None
        return found

    with pytest.raises(RunError, match=r"needs about 38.0 GB for 6.33 GB of weights that train and 0.00 GB .* 16.0 GB"):
        require_memory(planned(), HOST)
    _, settings = load_policy("vla", VLA)
    require_memory(planned(), HOST)


@pytest.mark.parametrize(("options", "copies"), [({"acting_rate": 1.0}, 5), ({}, 6)])
def test_estimate_for_a_gpu_counts_the_copies_of_publishing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], copies: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (16_000_000_000, 80_000_000_000))
    large = PolicyConfig("vla", {"width": 2048, "heads": 16, "prefix_layers": 18, "expert_layers": 18})
    config = LearnerConfig(algorithm="bc", options=options)
    needed = f"needs about {copies * 6.326:.1f} GB"
    with (
        StoreWriter.open(tmp_path / "store"),
        StoreReader.open(tmp_path / "store") as reader,
        pytest.raises(RunError, match=needed),
    ):
        Trainer(config, example_spec(), reader, policy=large, device="cuda")


@pytest.mark.parametrize("is_first", [True, False])
def test_gathered_policy_is_held_once_and_until_it_is_published(
    monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    module, gathered = torch.nn.Linear(300, 300), list[weakref.ref[torch.Tensor]]()
    monkeypatch.setattr(trainer, "is_divided", lambda tensor: tensor.ndim == 2)

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        gathered.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(trainer, "whole", whole)
    snapshots = trainer.PolicySnapshots({}, HostCopier(HOST))

    def held() -> list[int]:
        return [copy.data_ptr() for each in gathered for copy in (each(),) if copy is not None]

    for _ in range(2):
        snapshots.gather(module, keep=is_first)
        assert len(held()) == is_first
    if is_first:
        place, taken = held(), snapshots.take(module)
        assert isinstance(taken, DeviceSnapshot) and taken.tensors["weight"].data_ptr() == place[0]
        assert taken.tensors["bias"].data_ptr() != module.bias.data_ptr()
        assert held() == [], "the snapshot alone holds it"


def test_parts_must_divide_the_batch() -> None:
    with pytest.raises(ConfigError, match="2 processes in 3 parts .* of 16 .* processes times compute.parts"):
        LearnerConfig(batch_size=16, processes=2, compute=ComputeConfig(parts=3))
