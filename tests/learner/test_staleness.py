"""The setting `learner.staleness`: which steps an algorithm that uses each step once gets, and when it publishes."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_learner import STEPS, episode
from torch import nn

from hal.spec import RobotSpec
from user_sys.algorithms.algorithm import Algorithm, TensorBatch, TrainingData
from user_sys.algorithms.distributed import TrainingGroup
from user_sys.codec import Array
from user_sys.episode import EpisodeSource, parse_chunk
from user_sys.errors import ConfigError
from user_sys.learner.config import LearnerConfig
from user_sys.learner.learner import Learner
from user_sys.learner.trainer import Trainer
from user_sys.plugins import ALGORITHMS
from user_sys.policies.conformance import example_spec
from user_sys.replay.batches import BatchSpec
from user_sys.replay.sampler import SamplerConfig
from user_sys.replay.selectors import MixturePartConfig
from user_sys.store.backup import back_up, restore
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.weights.gpu_copy import PolicySnapshot

WINDOW = 4
CONFIG = LearnerConfig(algorithm="counting", batch_size=STEPS // WINDOW, cache_bytes=1 << 20, max_updates=6)
TWO = replace(CONFIG, processes=2, batch_size=6)


@dataclass(frozen=True)
class NoSettings:
    pass


class Counting(Algorithm):
    """Adds up what it is trained on, and keeps the versions of each batch."""

    settings = NoSettings

    def __init__(self, settings: NoSettings, policy: nn.Module, spec: RobotSpec) -> None:
        super().__init__(settings, policy, spec)
        self.register_buffer("total", torch.zeros(()))
        self.versions: list[set[int]] = []
        self.starts: list[tuple[float, ...]] = []

    @property
    def data(self) -> TrainingData:
        return TrainingData(
            lambda _: BatchSpec(WINDOW, chunk_length=WINDOW, sequence=True), extras={"log_prob": ()}, once=True
        )

    def update(self, batch: TensorBatch, number: int) -> None:
        assert batch.policy_version is not None
        self.versions.append(set(batch.policy_version[:, 0].tolist()))
        self.starts += [tuple(each.tolist()) for each in batch.action[:, 0]]
        self.total += (number + 1) * batch.action.sum()

    def scalars(self) -> dict[str, float]:
        return {"total": float(self.total)}


class Robots:
    """Robots that record one episode with each version, and `late` more with the version before it."""

    versions_ahead, pinned_version, is_busy = 0, -1, False

    def __init__(self, writer: StoreWriter, late: int = 0, batch: int = 1, count: int = 0) -> None:
        """`count`: of the episodes before, which are different ones."""
        self.versions: list[int] = []
        self._writer, self._late, self._batch, self._count = writer, late, batch, count

    def publish(self, weights: PolicySnapshot, version: int, updates: int) -> None:
        for _ in range(self._late if self.versions else 0):
            self._record(self.versions[-1])
        for _ in range(self._batch):
            self._record(version)
        self._writer.sync()
        self.versions.append(version)

    def _record(self, version: int) -> None:
        self._count += 1
        name = f"online-{version}-{self._count}"
        self._writer.append(episode(name, EpisodeSource.ONLINE, self._count, version=version))

    def observe(self, seconds: float) -> None:
        return

    def end_training(self) -> None:
        return

    def scalars(self) -> dict[str, float]:
        return {}


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "counting", f"{__name__}:Counting")


def make(
    folder: Path, config: LearnerConfig, robots: Robots | None, group: TrainingGroup | None = None
) -> tuple[Learner, Counting, dict[str, float]]:
    reported: dict[str, float] = {}
    trainer = Trainer(config, example_spec(), StoreReader.open(folder / "store"), group=group)
    learner = Learner(
        config,
        trainer,
        publisher=robots,
        report=lambda _, scalars: reported.update(scalars),
        checkpoint_dir=folder / "checkpoints",
    )
    assert isinstance(trainer.algorithm, Counting)
    return learner, trainer.algorithm, reported


@pytest.mark.parametrize(("staleness", "late"), [(0, 0), (0, 2), (1, 2), (None, 1)])
def test_batches_are_of_versions_within_the_bound(tmp_path: Path, staleness: int | None, late: int) -> None:
    with StoreWriter.open(tmp_path / "store") as writer:
        robots = Robots(writer, late)
        learner, algorithm, reported = make(tmp_path, replace(CONFIG, staleness=staleness), robots)
        learner.run(threading.Event())
    assert learner.updates == 6 and robots.versions == list(range(1, 8)), "first the initial weights"
    lag = [newest - min(seen) for newest, seen in enumerate(algorithm.versions, start=1)]
    if staleness is not None:
        assert max(lag) == min(staleness, late)
    stale = {(0, 0): 0, (0, 2): 10, (1, 2): 0, (None, 1): 0}[staleness, late]  # episodes
    assert len(set(algorithm.starts)) == len(algorithm.starts) == reported["windows_used"] == 6 * 3
    assert staleness == 1 or reported["windows_stale"] == stale * STEPS // WINDOW


def test_resumed_training_uses_each_step_once(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "store") as writer:
        robots = Robots(writer)
        _, first, _ = run(make(tmp_path, replace(CONFIG, staleness=0, max_updates=3), robots))
        _, second, reported = run(make(tmp_path, replace(CONFIG, staleness=0), robots))
    used = first.starts + second.starts
    assert len(set(used)) == len(used) == 6 * 3 == reported["windows_used"]
    assert robots.versions[3] == 4 and robots.versions[4] > 2000, "it begins with a version of its own"
    assert reported["windows_stale"] == 3, "of version 4, after which training ended"


def test_resumed_training_uses_steps_within_the_bound(tmp_path: Path) -> None:
    config = replace(CONFIG, staleness=1)
    with StoreWriter.open(tmp_path / "store") as writer:
        robots = Robots(writer)
        run(make(tmp_path, replace(config, max_updates=3), robots))
        robots = Robots(writer, batch=0)
        _, algorithm, reported = run(make(tmp_path, replace(config, max_updates=4), robots))
    assert algorithm.versions == [{4}] and reported["windows_stale"] == 0, "one version behind the first new one"


def test_resumption_is_bit_identical(tmp_path: Path) -> None:
    totals = []
    for name, stops in (("straight", (6,)), ("halves", (1, 4, 6))):
        with StoreWriter.open(tmp_path / name / "store") as writer:
            for number in range(8):
                writer.append(episode(f"online-{number}", EpisodeSource.ONLINE, number, version=number))
            writer.sync()
            for stop in stops:
                _, algorithm, _ = run(make(tmp_path / name, replace(CONFIG, max_updates=stop), Robots(writer, batch=0)))
            totals.append(algorithm.total)
    assert torch.equal(*totals)


def test_learner_without_a_checkpoint_numbers_its_versions_above_the_stored_ones(tmp_path: Path) -> None:
    """Else `ppo` and `max_age_versions` would take steps of a training whose checkpoints are lost for its own."""
    with StoreWriter.open(tmp_path / "store") as writer:
        for version in range(1, 4):
            writer.append(episode(f"before-{version}", EpisodeSource.ONLINE, 50 + version, version=version))
        writer.sync()
        _, found, reported = run(make(tmp_path, replace(CONFIG, staleness=1, max_updates=3), Robots(writer)))
    assert found.versions == [{2004}, {2005}, {2006}] and reported["windows_stale"] == 3 * 3
    assert len(set(found.starts)) == 3 * 3


def test_older_copy_of_a_checkpoint_numbers_its_versions_above_the_stored_ones(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "store") as writer:
        run(make(tmp_path, replace(CONFIG, max_updates=2), Robots(writer)))
        writer.append(episode("lost", EpisodeSource.ONLINE, 50, version=9000))
        writer.sync()
        robots = Robots(writer, count=100)
        run(make(tmp_path, replace(CONFIG, max_updates=4), robots))
    assert robots.versions[0] == 11_001


@pytest.mark.parametrize("grown", [0, 2, 9])
def test_new_steps_of_a_restored_backup_are_used_once_and_old_ones_not_again(tmp_path: Path, grown: int) -> None:
    with StoreWriter.open(tmp_path / "store") as writer:
        robots = Robots(writer)
        _, first, _ = run(make(tmp_path, replace(CONFIG, max_updates=2), robots))
        back_up(tmp_path / "store", str(tmp_path / "backup"))
        _, second, _ = run(make(tmp_path, replace(CONFIG, max_updates=4), robots))
    restored = tmp_path / "restored"
    restored.mkdir()
    restore(str(tmp_path / "backup"), restored / "store")
    (restored / "checkpoints").symlink_to(tmp_path / "checkpoints")
    with StoreWriter.open(restored / "store") as writer:
        for number in range(grown):  # robots went on before the learner started
            writer.append(episode(f"new-{number}", EpisodeSource.ONLINE, 100 + number, version=robots.versions[-1]))
        writer.sync()
        updates = max(1, grown)
        _, third, reported = run(make(restored, replace(CONFIG, max_updates=4 + updates), Robots(writer, count=50)))
    assert not {*first.starts, *second.starts} & {*third.starts}
    assert len(set(third.starts)) == 3 * updates == reported["windows_used"]
    if grown:
        assert third.versions == [{robots.versions[-1]}] * grown


def run(made: tuple[Learner, Counting, dict[str, float]]) -> tuple[Learner, Counting, dict[str, float]]:
    made[0].run(threading.Event())
    return made


class ThreadGroup(TrainingGroup):
    """Two ranks that are threads of this process."""

    shared: list[object] = [None, None]

    def __init__(self, rank: int, barrier: threading.Barrier) -> None:
        super().__init__(rank, 2)
        self._barrier = barrier

    def _exchange(self, value: object) -> list[object]:
        self._barrier.wait(60)
        self.shared[self.rank] = value
        self._barrier.wait(60)
        values = list(self.shared)
        self._barrier.wait(60)
        return values

    def average_gradients(self, module: nn.Module) -> None:
        return

    def broadcast(self, value: int) -> int:
        found = self._exchange(value)[0]
        assert isinstance(found, int)
        return found

    def all_true(self, value: bool) -> bool:
        return all(self._exchange(value))

    def gather(self, arrays: Mapping[str, Array]) -> list[Mapping[str, Array]]:
        return self._exchange(dict(arrays))  # type: ignore[return-value]


def run_two(folder: Path, config: LearnerConfig, robots: Robots) -> list[Counting]:
    """Trains as two ranks, and returns the algorithm of each."""
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(make, folder, config, None, ThreadGroup(1, barrier))
        made = [make(folder, config, robots, ThreadGroup(0, barrier)), other.result(60)]
        for each in [pool.submit(run, one) for one in made]:
            each.result(120)
    return [algorithm for _, algorithm, _ in made]


def test_two_ranks_use_different_steps_of_the_newest_version(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "store") as writer:
        robots = Robots(writer, batch=3)  # of each episode's three windows, a rank gets one at least
        one, other = run_two(tmp_path, replace(TWO, staleness=0), robots)
    used = one.starts + other.starts
    assert len(set(used)) == len(used) == 6 * 6
    assert one.versions == other.versions == [{version} for version in range(1, 7)]


class Replaying(Counting):
    """Draws steps again."""

    @property
    def data(self) -> TrainingData:
        return TrainingData(lambda _: BatchSpec(WINDOW, chunk_length=WINDOW))


def test_two_ranks_resume_with_their_own_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "counting", f"{__name__}:Replaying")
    config, drawn = replace(TWO, sampler=SamplerConfig(kind="uniform")), []
    for name, stops in (("straight", (6,)), ("halves", (1, 4, 6))):
        with StoreWriter.open(tmp_path / name / "store") as writer:
            for number in range(8):
                writer.append(episode(f"online-{number}", EpisodeSource.ONLINE, number))
            writer.sync()
            parts = [
                run_two(tmp_path / name, replace(config, max_updates=stop), Robots(writer, batch=0)) for stop in stops
            ]
        drawn.append([[start for part in parts for start in part[rank].starts] for rank in (0, 1)])
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]


def test_batch_without_a_readable_window_waits_for_more(tmp_path: Path) -> None:
    def record(name: str, state: float) -> None:
        chunk = parse_chunk(episode(name, EpisodeSource.ONLINE, 0)).unpack()
        name = next(name for name in chunk.columns if name.startswith("observation."))
        columns = {**chunk.columns, name: chunk.columns[name] + np.float32(state)}
        writer.append(replace(chunk, columns=columns).encode())
        writer.sync()

    with StoreWriter.open(tmp_path / "store") as writer:
        record("spoilt", math.nan)
        trainer = Trainer(CONFIG, example_spec(), StoreReader.open(tmp_path / "store"))
        trainer.refresh()
        assert trainer.can_sample and not trainer.update(0) and not trainer.can_sample
        record("sound", 0.0)
        trainer.refresh()
        assert trainer.can_sample and trainer.update(0)
        trainer.close()


def test_samplers_of_replayed_steps_are_refused(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "store"):
        for sampler in (SamplerConfig(kind="uniform"), SamplerConfig(mixture=(MixturePartConfig(),))):
            with pytest.raises(ConfigError, match="counting, which uses each step once: remove it"):
                make(tmp_path, replace(CONFIG, sampler=sampler), None)
