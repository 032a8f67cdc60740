"""Each algorithm, stopped at random and resumed by the learner's loop, ends as if it had never been stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_learner import episode

from user_sys.codec import Array
from user_sys.compose import PolicyConfig
from user_sys.episode import EpisodeSource
from user_sys.learner.checkpoint import load_latest_checkpoint
from user_sys.learner.config import LearnerConfig
from user_sys.learner.learner import Learner
from user_sys.learner.trainer import Trainer
from user_sys.plugins import ALGORITHMS
from user_sys.policies.conformance import example_spec
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.weights.gpu_copy import PolicySnapshot
from user_sys.weights.publisher import PublishConfig

EPISODES = 16  # of 12 steps


@dataclass(frozen=True)
class Case:
    """How an algorithm trains here; its policy is `kind`."""

    updates: int = 60
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "mlp"
    policy: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 16


ACTOR_CRITIC: dict[str, Any] = {"critic_hidden": [16], "critics": 3}
CLONED: dict[str, Any] = {"pretrain_updates": 15}
CASES = {
    "bc": Case(options={"action_noise": 0.1}),
    "hg_dagger": Case(),
    "sac": Case(options={**ACTOR_CRITIC, "critics_first": 10}, policy=CLONED),
    "rlpd": Case(options=ACTOR_CRITIC),
    "q_chunking": Case(options=ACTOR_CRITIC, kind="flow", policy={"flow_steps": 1, "chunk_length": 4}),
    "sac_flow": Case(options=ACTOR_CRITIC, kind="gated_flow"),
    "dsrl": Case(options=ACTOR_CRITIC, kind="steered", policy={"base_options": {"hidden": [16], "chunk_length": 4}}),
    "recap": Case(
        options={"value_hidden": [16]}, kind="flow", policy={"conditions": 2, "condition": 1, "chunk_length": 4}
    ),
    "ppo": Case(updates=20, options={"window": 4, "minibatches": 2, "value_hidden": [16]}, batch_size=2),
}


class NoPublisher:
    """Robots are not there; weights go nowhere."""

    versions_ahead, pinned_version, is_busy = 0, -1, False

    def publish(self, weights: PolicySnapshot, version: int, updates: int) -> None:
        return

    def observe(self, seconds: float) -> None:
        return

    def end_training(self) -> None:
        return

    def scalars(self) -> dict[str, float]:
        return {}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Demonstrations, and online episodes of as many versions; in each third of them a person took over."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("store")
    with StoreWriter.open(folder) as writer:
        for number in range(3):
            writer.append(episode(f"demo-{number}", EpisodeSource.DEMO, number))
        for number in range(EPISODES):
            persons = range(6, 12) if number % 3 == 0 else ()
            writer.append(episode(f"online-{number}", EpisodeSource.ONLINE, number, version=number, persons=persons))
        writer.sync()
        yield folder


def train(store: Path, checkpoints: Path, algorithm: str, updates: int, seed: int) -> dict[str, Array]:
    """Trains until so many updates are made in all, and returns the state in the last checkpoint."""
    case = CASES[algorithm]
    config = LearnerConfig(
        algorithm=algorithm,
        options=case.options,
        batch_size=case.batch_size,
        cache_bytes=1 << 20,
        publish=PublishConfig(every_updates=7),
        max_updates=updates,
    )
    policy = PolicyConfig(kind=case.kind, options={"hidden": [16], **case.policy})
    trainer = Trainer(config, example_spec(), StoreReader.open(store), policy=policy, seed=seed)
    learner = Learner(config, trainer, publisher=NoPublisher(), report=lambda *_: None, checkpoint_dir=checkpoints)
    learner.run(threading.Event())
    assert learner.updates == updates
    saved = load_latest_checkpoint(checkpoints)
    assert saved is not None
    return dict(saved.arrays)


def check(store: Path, folder: Path, algorithm: str, stops: int) -> None:
    """Stops `stops` times, after random numbers of updates."""
    updates = CASES[algorithm].updates
    straight = train(store, folder / "straight", algorithm, updates, seed=0)
    at = np.random.default_rng(len(algorithm)).choice(np.arange(1, updates), stops, replace=False)
    for number, stop in enumerate([*sorted(at.tolist()), updates]):
        stopped = train(store, folder / "stopped", algorithm, stop, seed=number)
    assert straight.keys() == stopped.keys()
    for name, value in straight.items():
        np.testing.assert_array_equal(value, stopped[name], err_msg=f"{name}, stopped at {sorted(at.tolist())}")


@pytest.mark.parametrize("algorithm", ["rlpd", "ppo"])
def test_algorithm_stopped_twice_ends_bit_identical(algorithm: str, store: Path, tmp_path: Path) -> None:
    check(store, tmp_path, algorithm, stops=2)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_algorithm_stopped_ten_times_ends_bit_identical(algorithm: str, store: Path, tmp_path: Path) -> None:
    check(store, tmp_path, algorithm, stops=10)
