"""A learner that trains adapters: what it publishes and saves, and how it resumes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_learner import SPEC, LearnerBench

from user_sys.algorithms.algorithm import NETWORK
from user_sys.compose import PolicyConfig
from user_sys.episode import EpisodeSource
from user_sys.errors import RunError
from user_sys.learner.checkpoint import load_latest_checkpoint
from user_sys.learner.config import LearnerConfig
from user_sys.learner.frozen_weights import FROZEN_KEY
from user_sys.learner.learner import Learner
from user_sys.plugins import load_policy
from user_sys.policies.flow import FlowPolicy
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.weights.publisher import PublishConfig

TRAIN = {"mode": "lora", "targets": ["layers"], "rank": 2}
POLICY = PolicyConfig(kind="flow", options={"hidden": [512, 512], "train": TRAIN})
CONFIG = LearnerConfig(
    algorithm="bc",
    batch_size=16,
    cache_bytes=1 << 20,
    publish=PublishConfig(every_updates=1),
    max_updates=4,
)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LearnerBench]:
    torch.set_num_threads(1)
    with StoreWriter.open(tmp_path / "store") as writer:
        bench = LearnerBench(tmp_path, writer)
        bench.fill(EpisodeSource.DEMO, 3)
        yield bench


def train(bench: LearnerBench, updates: int, seed: int = 0, checkpoints: str = "a") -> Learner:
    learner = bench.learner(replace(CONFIG, max_updates=updates), checkpoints, seed, policy=POLICY)
    learner.run(threading.Event())
    return learner


def test_only_what_trains_is_published_and_saved(bench: LearnerBench) -> None:
    train(bench, 4)
    frozen = bench.trainer.frozen
    trained_bytes = sum(each.nbytes for each in bench.trainer.algorithm.parameters() if each.requires_grad)
    versions = [each.state for each in bench.published]
    same = {n for n in versions[0].tensors if np.array_equal(versions[0].tensors[n], versions[-1].tensors[n])}
    assert len(versions) > 2 and same >= frozen.keys()
    assert any("lora_B" in name for name in versions[0].tensors.keys() - same)
    FlowPolicy(SPEC, settings=load_policy(POLICY.kind, POLICY.options)[1]).load(versions[-1].tensors)
    found = load_latest_checkpoint(bench.folder / "a")
    assert found is not None and found.scalars[FROZEN_KEY]
    networks = sum(each.nbytes for name, each in found.arrays.items() if not name.startswith(("rank.", "generator.")))
    assert networks <= 4.1 * trained_bytes and not any("base_layer" in name for name in found.arrays)
    (base,) = (bench.folder / "a").glob("frozen-*.safetensors")
    assert base.stat().st_size > sum(each.nbytes for each in frozen.values()) > 4 * networks


def test_frozen_arrays_are_the_same_objects_in_each_version(bench: LearnerBench) -> None:
    train(bench, 1)
    bench.learner(CONFIG, policy=POLICY)
    first, second = (bench.trainer.policy_snapshot() for _ in range(2))
    for name in first:
        assert (first[name] is second[name]) == (name in bench.trainer.frozen) == (not first[name].flags.writeable)


def test_resumed_run_restores_and_verifies_the_frozen_weights(bench: LearnerBench) -> None:
    train(bench, 6, checkpoints="straight")
    train(bench, 3, checkpoints="halves")
    train(bench, 6, seed=99, checkpoints="halves")
    straight, halves = (load_latest_checkpoint(bench.folder / name) for name in ("straight", "halves"))
    assert straight is not None and halves is not None and straight.scalars[FROZEN_KEY] == halves.scalars[FROZEN_KEY]
    for name, value in straight.arrays.items():
        np.testing.assert_array_equal(value, halves.arrays[name], err_msg=name)
    (base,) = (bench.folder / "halves").glob("frozen-*.safetensors")
    base.unlink()
    with pytest.raises(RunError, match="need the frozen weights frozen-.* which is missing: restore it"):
        train(bench, 7, seed=98, checkpoints="halves")


def test_adapters_start_from_a_policy_that_was_trained_as_a_whole(bench: LearnerBench) -> None:
    plain = PolicyConfig(kind="flow", options={"hidden": [512, 512]})
    bench.learner(CONFIG, "plain", policy=plain).run(threading.Event())
    found = load_latest_checkpoint(bench.folder / "plain")
    assert found is not None
    with StoreReader.open(bench.folder / "store") as reader:
        trainer = type(bench.trainer)(CONFIG, SPEC, reader, policy=POLICY, seed=1, initial_state=found.arrays)
        weight = trainer.frozen["layers.0.base_layer.weight"].detach().numpy()
        np.testing.assert_array_equal(weight, found.arrays[f"{NETWORK}policy.layers.0.weight"])
        trainer.close()
