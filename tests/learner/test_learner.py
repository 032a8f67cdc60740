"""The learner as a whole: from a store to published weights, within its bounds, and across stops and crashes."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from episode_kit import chunk_header
from wait_kit import until

from hal.spec import RobotSpec
from user_sys.algorithms.algorithm import (
    NETWORK,
    Algorithm,
    TdErrors,
    TensorBatch,
    TrainingData,
    fits_policy,
    load_policy_state,
    policy_arrays,
    save_state,
)
from user_sys.algorithms.algorithm import POLICY as POLICY_PREFIX
from user_sys.algorithms.bc import Bc, BcSettings
from user_sys.algorithms.conformance import example_batch
from user_sys.codec import Array
from user_sys.compose import PolicyConfig
from user_sys.config import load
from user_sys.episode import APPLIED_ACTION, Chunk, EpisodeEnd, EpisodeSource, Phase, decode_chunk
from user_sys.errors import ConfigError, RunError, WireError
from user_sys.learner.checkpoint import load_latest_checkpoint
from user_sys.learner.config import ComputeConfig, LearnerConfig
from user_sys.learner.learner import VERSIONS_PER_CHECKPOINT, Learner
from user_sys.learner.trainer import Trainer, require_trainable
from user_sys.plugins import ALGORITHMS, POLICIES, load_policy
from user_sys.policies.conformance import example_spec
from user_sys.policies.mlp import MlpPolicy, MlpSettings
from user_sys.replay.batches import BatchSpec
from user_sys.replay.sampler import SamplerConfig, SelectorKind
from user_sys.replay.selectors import MixturePartConfig, StepFilter
from user_sys.run.config import RunConfig
from user_sys.store.backup import back_up, restore
from user_sys.store.labels import DeleteLabel, Label, PhaseLabel, SuccessLabel, TrimLabel, UndoLabel, column_labels
from user_sys.store.maintenance import add_labels, compact_store
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.weights.governor import GovernedBudget, GovernorConfig
from user_sys.weights.gpu_copy import HostCopier, PolicySnapshot
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.state import NotFinite, TensorSet, build_tensor_set

SPEC = example_spec()
VECTORS = [feature.name for feature in SPEC.observation]
STEPS = 12
POLICY = PolicyConfig(options={"hidden": [16]})
CLONED = PolicyConfig(options={"hidden": [16], "pretrain_updates": 3})
TINY_VLA = {"width": 16, "heads": 2, "prefix_layers": 1, "expert_layers": 1, "chunk_length": 2, "flow_steps": 2}
SMALL: dict[str, object] = {"critic_hidden": [16], "critics": 3}
CONFIG = LearnerConfig(
    options=SMALL, batch_size=16, cache_bytes=1 << 20, publish=PublishConfig(every_updates=1), warmup_updates=40
)


def episode(
    name: str,
    source: EpisodeSource,
    seed: int,
    spoil: float = 0.0,
    *,
    robot: str = "r",
    task: str = "t",
    persons: Sequence[int] = (),
    version: int = 0,
    at_s: int = 0,
    without: str = "",
    ends: bool = True,
) -> bytes:
    """`spoil` is added to each reward; a person had the robot in the steps `persons`."""
    rng = np.random.default_rng(seed)
    batch = example_batch(rng, STEPS)
    terminated = np.arange(STEPS) == STEPS - 1
    columns: dict[str, Array] = {
        **{name: batch.observation[name].numpy() for name in VECTORS},
        "action": batch.action.numpy(),
        APPLIED_ACTION: batch.action.numpy(),
        "reward": terminated.astype(np.float32) + np.float32(spoil),
        "terminated": terminated,
        "truncated": np.zeros(STEPS, bool),
        "phase": np.where(np.isin(np.arange(STEPS), persons), Phase.TELEOP, Phase.POLICY).astype(np.uint8),
        "safety": np.zeros(STEPS, np.uint16),
        "policy_version": np.full(STEPS, version, np.int64),
        "log_prob": np.full(STEPS, np.nan if source is EpisodeSource.DEMO else 0, np.float32),
        **{f"t_{what}_ns": np.arange(STEPS) for what in ("capture", "inference", "command")},
    }
    header = chunk_header(
        name,
        STEPS,
        robot=robot,
        embodiment=SPEC.embodiment,
        task=task,
        sentence="",
        source=source,
        seed=seed,
        started_unix_ns=0,
        end=EpisodeEnd(steps=STEPS, success=True) if ends else None,
        unix_offset_ns=at_s * 10**9,
    )
    columns.pop(without, None)
    final = {name: batch.next_observation[name][-1:].numpy() for name in VECTORS if ends}
    return Chunk(header, columns, final).encode()


@dataclass(frozen=True)
class PublishedVersion:
    version: int
    updates: int
    state: TensorSet


@dataclass
class RecordingPublisher:
    """Copies and records versions."""

    versions: list[PublishedVersion]
    versions_ahead: int = 0
    pinned_version: int = -1
    is_busy: bool = False
    before_end: list[int] = field(default_factory=list)

    def publish(self, weights: PolicySnapshot, version: int, updates: int) -> None:
        if not isinstance(weights, Mapping):
            fetched = {name: np.empty(shape, dtype) for name, (dtype, shape) in weights.layout.items()}
            weights.fetch(fetched, GovernedBudget(GovernorConfig(enabled=False), lambda: 1.0))
            weights = fetched
        copies = {name: array.copy() for name, array in weights.items()}
        self.versions.append(PublishedVersion(version, updates, build_tensor_set(copies)))

    def observe(self, seconds: float) -> None:
        assert seconds > 0

    def end_training(self) -> None:
        self.before_end = [each.version for each in self.versions]

    def scalars(self) -> dict[str, float]:
        return {}


@dataclass
class LearnerBench:
    """A store, and the versions and scalars of a learner."""

    folder: Path
    writer: StoreWriter
    published: list[PublishedVersion] = field(default_factory=list)
    reported: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def fill(self, source: EpisodeSource, episodes: int, spoil: float = 0.0) -> None:
        for i in range(episodes):
            self.writer.append(episode(f"{source.value}-{i}", source, i, spoil))
        self.writer.sync()

    def show(self, episodes: int) -> None:
        """A person demonstrates."""
        for i in range(episodes):
            self.writer.append(episode(f"shown-{i}", EpisodeSource.ONLINE, i, persons=range(STEPS)))
        self.writer.sync()

    def learner(
        self,
        config: LearnerConfig,
        checkpoints: str = "a",
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sink: Any = None,
        device: str = "cpu",
        kind: type[Trainer] = Trainer,
        policy: PolicyConfig = POLICY,
    ) -> Learner:
        reader = StoreReader.open(self.folder / "store")
        self.trainer = kind(config, SPEC, reader, policy=policy, seed=seed, device=device)
        return Learner(
            config,
            self.trainer,
            publisher=sink or RecordingPublisher(self.published),
            report=lambda count, scalars: self.reported.append((count, scalars)),
            checkpoint_dir=self.folder / checkpoints,
            clock=clock,
        )

    def run_briefly(self, config: LearnerConfig, **options: Any) -> Learner:
        """Runs a learner for a hundred readings of its clock."""
        stop, readings = threading.Event(), itertools.count()

        def clock() -> float:
            if (reading := next(readings)) > 100:
                stop.set()
            return reading / 100

        learner = self.learner(config, clock=clock, **options)
        learner.run(stop)
        return learner

    def train(self, config: LearnerConfig, checkpoints: str = "a", seed: int = 0) -> Learner:
        learner = self.learner(config, checkpoints, seed)
        learner.run(threading.Event())
        return learner


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LearnerBench]:
    torch.set_num_threads(1)
    with StoreWriter.open(tmp_path / "store") as writer:
        yield LearnerBench(tmp_path, writer)


def test_learner_publishes_weights_that_a_policy_loads(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    learner = bench.train(replace(CONFIG, max_updates=10))
    assert learner.updates == 10 and learner.training_s > 0
    versions = [published.version for published in bench.published]
    assert versions == list(range(1, len(versions) + 1))
    assert bench.published[-1].updates == 10
    MlpPolicy(SPEC).load(bench.published[-1].state.tensors)
    count, scalars = bench.reported[-1]
    assert count == 10 and scalars["demo_transitions"] == 3 * STEPS and np.isfinite(scalars["critic_loss"])


@pytest.mark.gpu
def test_gpu_learner_resumes_on_gpu_and_cpu(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    bench.fill(EpisodeSource.ONLINE, 4)
    for updates, device in ((10, "cuda"), (20, "cuda"), (30, "cpu"), (40, "cuda")):
        learner = bench.learner(replace(CONFIG, max_updates=updates, batches_ahead=2), device=device)
        learner.run(threading.Event())
        assert learner.updates == updates == bench.published[-1].updates
        MlpPolicy(SPEC).load(bench.published[-1].state.tensors)
    assert np.isfinite(bench.reported[-1][1]["critic_loss"])


def test_fetched_weights_equal_those_of_a_cpu_learner(bench: LearnerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    config = replace(CONFIG, publish=PublishConfig(every_s=0.0, every_updates=4), max_updates=22)
    bench.train(config, "here")
    here = [(each.updates, each.state.digest) for each in bench.published]
    bench.published.clear()
    monkeypatch.setattr("user_sys.learner.trainer.make_host_copier", lambda *_: HostCopier(torch.device("cpu")))
    bench.train(config, "there")
    assert [(each.updates, each.state.digest) for each in bench.published] == here and len(here) > 5


def test_resumed_run_continues_time_and_versions(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 2)
    first = bench.train(replace(CONFIG, max_updates=5))
    last_version = bench.published[-1].version
    second = bench.learner(replace(CONFIG, max_updates=9))
    assert second.updates == 5 and second.training_s == first.training_s
    second.run(threading.Event())
    later = [p.version for p in bench.published if p.updates > 5]
    assert min(later) > last_version + VERSIONS_PER_CHECKPOINT - 1 and second.training_s > first.training_s


def test_first_rate_after_a_resumption_is_of_its_own_updates(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 2)
    bench.train(replace(CONFIG, max_updates=5))
    bench.reported.clear()
    bench.train(replace(CONFIG, max_updates=5))
    assert {scalars["updates_per_s"] for _, scalars in bench.reported} == {0.0}


@pytest.mark.parametrize("kind", ["prioritized", "tasks"])
def test_samplers_with_feedback_draw_while_the_policy_is_cloned(bench: LearnerBench, kind: SelectorKind) -> None:
    bench.show(3)
    learner = bench.learner(replace(CONFIG, max_updates=4, sampler=SamplerConfig(kind=kind)), policy=CLONED)
    learner.run(threading.Event())
    assert learner.updates == 4


@pytest.mark.parametrize("needed", [None, 2])
def test_first_update_waits_for_finished_demonstrations(
    bench: LearnerBench, needed: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(CONFIG, min_demonstrations=needed, max_updates=5)
    bench.fill(EpisodeSource.ONLINE, 3)  # such as of a robot that acts at random
    bench.show(shown := (needed or 1) - 1)
    bench.writer.append(episode("begun", EpisodeSource.ONLINE, 7, persons=range(STEPS), ends=False))
    bench.writer.sync()
    learner = bench.run_briefly(config, policy=CLONED)
    count, scalars = bench.reported[-1]
    assert learner.updates == count == 0 and learner.training_s == 0 and not bench.published
    assert (scalars["demonstrations"], scalars["demonstrations_needed"]) == (shown, needed or 1)
    assert scalars["nothing_to_sample"] == 0 and "learner.nothing_to_sample" not in caplog.text
    bench.writer.append(episode("merged", EpisodeSource.DEMO, 8, persons=range(STEPS)))
    bench.writer.sync()
    bench.learner(config, policy=CLONED).run(threading.Event())
    count, scalars = bench.reported[-1]
    assert count == 5 and scalars["imitation_loss"] > 0 and scalars["demonstrations_needed"] == 0


def test_learner_that_has_trained_waits_for_no_demonstrations(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.ONLINE, 3)
    bench.train(replace(CONFIG, max_updates=2))
    assert bench.train(replace(CONFIG, min_demonstrations=9, max_updates=4)).updates == 4


def test_update_without_a_step_to_clone_is_not_made(
    bench: LearnerBench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("user_sys.learner.learner.MAX_SKIPPED", 3)
    bench.fill(EpisodeSource.DEMO, 2)  # nobody acted
    learner = bench.run_briefly(replace(CONFIG, compute=ComputeConfig(parts=2)), policy=CLONED)
    assert learner.updates == 0 and learner.training_s == 0 and bench.reported[-1][1]["nothing_to_sample"] == 1
    (line,) = (each for each in caplog.messages if "learner.nothing_to_sample" in each)
    assert "policy.options.pretrain_updates" in line
    bench.fill(EpisodeSource.ONLINE, 40)
    bench.show(1)
    bench.learner(replace(CONFIG, algorithm="sac", max_updates=3), "b", policy=CLONED).run(threading.Event())
    count, scalars = bench.reported[-1]
    assert count == 3 and scalars["imitation_loss"] > 0 and scalars["nothing_to_sample"] == 0


def test_used_up_version_numbers_trigger_a_checkpoint(bench: LearnerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("user_sys.learner.learner.VERSIONS_PER_CHECKPOINT", 2)
    bench.fill(EpisodeSource.DEMO, 2)
    bench.train(replace(CONFIG, max_updates=30, checkpoint_interval_s=3600.0))
    assert bench.published[-1].updates == 30, "robots get what was learned last"


@contextmanager
def running(learner: Learner) -> Iterator[None]:
    """Trains in a thread within the context."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(learner.run, stop)
        try:
            yield
        finally:
            stop.set()
            trained.result(120)


def test_updates_are_bounded_by_online_steps(bench: LearnerBench) -> None:
    config = replace(CONFIG, warmup_updates=20, utd_max=0.5, report_interval_s=0.0)
    bench.fill(EpisodeSource.DEMO, 2)
    learner = bench.learner(config)
    with running(learner):
        until(lambda: learner.updates == 20 and bool(bench.reported) and bench.reported[-1][1]["waited_s"] > 0.05)
        bench.fill(EpisodeSource.ONLINE, 5)
        until(lambda: learner.updates == 20 + 5 * STEPS // 2)
    assert bench.reported[-1][1]["online_steps"] == 5 * STEPS


def is_reported(bench: LearnerBench, **wanted: int) -> Callable[[], bool]:
    return lambda: bool(bench.reported) and wanted.items() <= bench.reported[-1][1].items()


BY_ANA: dict[str, Any] = {"episode": "online-1", "labeller": "ana"}
TAKEN_AND_BROUGHT_BACK: list[tuple[Label, int]] = [  # and how many of three episodes' steps are left
    (DeleteLabel(at_unix_ns=1, **BY_ANA), 2 * STEPS),
    (UndoLabel(at_unix_ns=2, undone_at_unix_ns=1, **BY_ANA), 3 * STEPS),
    (TrimLabel(at_unix_ns=3, first_step=0, steps=5, **BY_ANA), 2 * STEPS + 5),
    (UndoLabel(at_unix_ns=4, undone_at_unix_ns=3, **BY_ANA), 3 * STEPS),
]


@pytest.mark.parametrize("does_stop", [False, True], ids=["never stopped", "stopped before each label"])
def test_online_steps_that_an_undo_brings_back_count_once(bench: LearnerBench, does_stop: bool) -> None:
    config = replace(CONFIG, warmup_updates=1, utd_max=0.1, report_interval_s=0.0)
    bench.fill(EpisodeSource.ONLINE, 3)
    with ExitStack() as training:
        training.enter_context(running(bench.learner(config)))
        until(is_reported(bench, online_transitions=3 * STEPS))
        for label, left in TAKEN_AND_BROUGHT_BACK:
            if does_stop:
                training.close()
            bench.writer.append_label(label)
            bench.writer.sync()
            if does_stop:
                training.enter_context(running(bench.learner(config)))
            until(is_reported(bench, online_transitions=left))
            assert bench.reported[-1][1]["online_steps"] == 3 * STEPS
        bench.writer.append(episode("new", EpisodeSource.ONLINE, 8))
        bench.writer.sync()
        until(is_reported(bench, online_transitions=4 * STEPS, online_steps=4 * STEPS))


def test_learner_ends_at_its_training_time(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 2)
    readings = itertools.count()  # of a clock on which everything takes a hundredth of a second
    config = replace(CONFIG, warmup_updates=10**9, max_training_s=0.2)
    learner = bench.learner(config, clock=lambda: next(readings) / 100)
    learner.run(threading.Event())
    assert 0.2 <= learner.training_s < 0.3
    assert [scalars["finished"] for _, scalars in bench.reported] == [0.0] * (len(bench.reported) - 1) + [1.0]
    assert bench.learner(CONFIG).training_s == learner.training_s


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (replace(CONFIG, publish=PublishConfig(every_s=0.0, every_updates=1000)), "update 1: critic_loss is (inf|nan)"),
        (CONFIG, "update 1: critic_loss is (inf|nan)"),
        (
            replace(CONFIG, algorithm="steep"),
            "update 2: the gradient of weight is not finite, 'log_prob' of demo-",
        ),
    ],
    ids=["loss", "before publishing", "gradient"],
)
def test_diverged_training_is_named_and_neither_published_nor_saved(
    bench: LearnerBench, config: LearnerConfig, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALGORITHMS, "steep", f"{__name__}:Steep")
    bench.fill(EpisodeSource.DEMO, 2, spoil=3e38)  # finite, as the buffer wants it, and too large for float32 to square
    with pytest.raises(NotFinite, match=problem):
        bench.train(replace(config, max_updates=5))
    kept = load_latest_checkpoint(bench.folder / "a")
    failed = int(problem.split()[1].rstrip(":"))
    assert kept is not None and kept.updates < failed
    floats = [array for array in kept.arrays.values() if array.dtype == np.float32]
    assert floats and all(np.isfinite(array).all() for array in floats)
    assert all(np.isfinite(array).all() for each in bench.published for array in each.state.tensors.values())


class Steep(Algorithm):
    """Has a gradient that is not finite from the second update on, and losses that are."""

    @dataclass(frozen=True)
    class settings:
        critic_hidden: tuple[int, ...] = ()
        critics: int = 1

    def __init__(self, settings: object, policy: torch.nn.Module, spec: RobotSpec) -> None:
        super().__init__(settings, policy, spec)
        self.weight = torch.nn.Parameter(torch.ones(()))

    @property
    def data(self) -> TrainingData:
        return TrainingData(BatchSpec, extras={"log_prob": ()})

    def update(self, batch: TensorBatch, number: int) -> None:
        self.weight.grad = torch.tensor(float(number) and np.inf)

    def scalars(self) -> dict[str, float]:
        return {"loss": 1.0}


def test_missing_columns_are_named(bench: LearnerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "steep", f"{__name__}:Steep")
    bench.writer.append(episode("online-0", EpisodeSource.ONLINE, 0, without="log_prob"))
    bench.writer.sync()
    with pytest.raises(ConfigError, match="^steep trains on 'log_prob', and online-0 lacks it: "):
        bench.learner(replace(CONFIG, algorithm="steep"))
    for label in column_labels("online-0", {"log_prob": np.zeros(STEPS)}, "later"):
        bench.writer.append_label(label)
    bench.writer.sync()
    bench.learner(replace(CONFIG, algorithm="steep")).close()
    with pytest.raises(ConfigError, match="rlpd trains on 'observation.images.front', and online-0 lacks it"):
        bench.learner(CONFIG, policy=PolicyConfig(kind="cnn"))


def test_demonstrations_in_degrees_are_named(bench: LearnerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    in_rad = msgspec.structs.replace(SPEC, action=msgspec.structs.replace(SPEC.action, units=("rad", "m")))
    monkeypatch.setitem(globals(), "SPEC", in_rad)
    bench.fill(EpisodeSource.DEMO, 1)
    bench.learner(CONFIG).close()
    chunk = decode_chunk(episode("imported", EpisodeSource.DEMO, 1))
    applied = np.full_like(chunk.columns[APPLIED_ACTION], -60.0)
    bench.writer.append(Chunk(chunk.header, {**chunk.columns, APPLIED_ACTION: applied}, chunk.final).encode())
    bench.fill(EpisodeSource.ONLINE, 1)
    expected = "^demonstration imported: dx is -60, and its bound -0.05 rad; if .* degrees, .* with --use-degrees"
    with pytest.raises(ConfigError, match=expected):
        bench.learner(CONFIG)


def test_unreadable_checkpoints_are_refused(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    bench.train(replace(CONFIG, max_updates=5, checkpoints_kept=2))
    older, newer = sorted((bench.folder / "a").glob("*.checkpoint"))
    shutil.rmtree(newer)
    newer.mkdir()
    resumed = bench.learner(CONFIG)
    assert resumed.updates < 5
    resumed.close()
    (older / "index.json").write_bytes(b"{}")
    with pytest.raises(RunError, match=f"{newer.name}: .* is missing; .*{older.name}: .*is incomplete or damaged"):
        bench.learner(CONFIG)


def test_training_pauses_while_the_disk_is_full(bench: LearnerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    full = threading.Event()
    sync = os.fsync

    def fsync(fd: int) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(fd)

    def waiting() -> bool:
        return any(scalars["disk_needed_bytes"] > 0 < scalars["disk_free_bytes"] for _, scalars in bench.reported)

    learner = bench.learner(replace(CONFIG, max_updates=CONFIG.warmup_updates, checkpoint_interval_s=0.0))
    monkeypatch.setattr(os, "fsync", fsync)
    full.set()
    ended = threading.Thread(target=learner.run, args=(threading.Event(),), daemon=True)
    ended.start()
    until(waiting)
    assert learner.updates == 0 and not list((bench.folder / "a").glob("*"))
    full.clear()
    ended.join(60)
    kept = load_latest_checkpoint(bench.folder / "a")
    assert kept is not None and kept.updates == learner.updates == CONFIG.warmup_updates
    assert bench.reported[-1][1]["disk_needed_bytes"] == 0


def test_stop_does_not_wait_for_a_full_disk(bench: LearnerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    bench.train(replace(CONFIG, max_updates=5))
    learner, stop = bench.learner(CONFIG), threading.Event()
    stop.set()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    learner.run(stop)
    assert bench.reported[-1][1]["disk_needed_bytes"] > 0
    kept = load_latest_checkpoint(bench.folder / "a")
    assert kept is not None and kept.updates == 5


def test_checkpoint_of_another_algorithm_or_store_is_refused(
    bench: LearnerBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    bench.train(replace(CONFIG, max_updates=5))
    with pytest.raises(WireError, match="does not fit this Rlpd"):
        bench.learner(replace(CONFIG, options={**SMALL, "critics": 4}))
    monkeypatch.setitem(ALGORITHMS, "other", ALGORITHMS["rlpd"])
    with pytest.raises(WireError, match="of update 5 in .* is of the algorithm rlpd, and learner.algorithm is other"):
        bench.learner(replace(CONFIG, algorithm="other"))
    monkeypatch.setitem(POLICIES, "other", POLICIES["mlp"])
    with pytest.raises(WireError, match="of update 5 in .* is of the policy mlp, and policy.kind is other: resume"):
        bench.learner(CONFIG, policy=replace(POLICY, kind="other"))
    monkeypatch.undo()
    (tmp_path / "other").mkdir()
    with StoreWriter.open(tmp_path / "other" / "store") as writer:
        other = LearnerBench(tmp_path / "other", writer)
        (tmp_path / "other" / "a").symlink_to(tmp_path / "a")
        with pytest.raises(ConfigError, match="another store"):
            other.learner(CONFIG)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    "change", [{"compute": ComputeConfig(parts=2)}, {"batch_size": 8}], ids=["parts", "batch_size"]
)
def test_run_resumes_with_smaller_batches(bench: LearnerBench, change: dict[str, Any], ahead: int) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    config = replace(CONFIG, max_updates=5, batches_ahead=ahead)
    bench.train(config)
    assert bench.train(replace(config, max_updates=9, **change)).updates == 9


@pytest.mark.parametrize("grown", [0, 3])
def test_checkpoint_newer_than_a_restored_backup_continues(
    bench: LearnerBench, tmp_path: Path, caplog: pytest.LogCaptureFixture, grown: int
) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    back_up(tmp_path / "store", str(tmp_path / "backup"))
    bench.writer.append(episode("later", EpisodeSource.DEMO, 7))
    bench.writer.sync()
    bench.train(replace(CONFIG, max_updates=5, batches_ahead=2))
    other = tmp_path / "other"
    other.mkdir()
    restore(str(tmp_path / "backup"), other / "store")
    (other / "a").symlink_to(tmp_path / "a")
    with StoreWriter.open(other / "store") as writer:
        restored = LearnerBench(other, writer)
        for number in range(grown):  # robots went on before the learner started
            writer.append(episode(f"new-{number}", EpisodeSource.DEMO, number))
        writer.sync()
        learner = restored.train(replace(CONFIG, max_updates=9, batches_ahead=2))
        assert learner.updates == 9 and "learner.store_is_older" in caplog.text
        assert restored.published[-1].version > bench.published[-1].version
        caplog.clear()
        assert restored.learner(CONFIG).updates == 9 and "store_is_older" not in caplog.text


def test_checkpoint_continues_after_its_last_episode_was_deleted_and_compacted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for updates in (5, 9):
        with StoreWriter.open(tmp_path / "store") as writer:
            bench = LearnerBench(tmp_path, writer)
            bench.fill(EpisodeSource.DEMO, 0 if updates == 9 else 3)
            assert bench.train(replace(CONFIG, max_updates=updates)).updates == updates
        add_labels(tmp_path / "store", [DeleteLabel(episode="demo-2", labeller="ana", at_unix_ns=1)])
        compact_store(tmp_path / "store")
    assert "store_is_older" not in caplog.text


def test_training_starts_from_the_policy_of_another_run(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    bench.train(replace(CONFIG, max_updates=5), "cloned")
    found = load_latest_checkpoint(bench.folder / "cloned")
    assert found is not None
    with StoreReader.open(bench.folder / "store") as reader:
        trainer = Trainer(CONFIG, SPEC, reader, policy=POLICY, seed=1, initial_state=found.arrays)
        for name, value in policy_arrays(trainer.policy).items():
            np.testing.assert_array_equal(value, bench.published[-1].state.tensors[name])
        trainer.close()
        with pytest.raises(WireError, match="learner.initial_policy does not fit policy.kind and policy.options"):
            Trainer(CONFIG, SPEC, reader, policy=PolicyConfig(), initial_state=found.arrays)


@pytest.mark.parametrize(("kind", "options"), [("mlp", {}), ("flow", {}), ("vla", TINY_VLA)])
def test_policy_of_another_robot_is_refused_if_it_has_that_robots_scaling(kind: str, options: dict[str, Any]) -> None:
    policy, settings = load_policy(kind, options)
    other = msgspec.structs.replace(SPEC, action=msgspec.structs.replace(SPEC.action, low=(-3.0, 0.0)))
    first, second = (policy.make_module(spec, settings=settings) for spec in (SPEC, other))
    state = {NETWORK + POLICY_PREFIX + name: tensor for name, tensor in first.state_dict().items()}
    assert fits_policy(first, state) and fits_policy(second, state) == (kind == "vla"), "its weights have no scaling"
    if kind != "vla":
        own = second.action.scale.clone()
        with pytest.raises(WireError, match=r"is of another robot: \['action.centre', 'action.scale'\] differ"):
            load_policy_state(second, state)
        assert torch.equal(second.action.scale, own)


def test_frozen_policy_of_another_robot_is_refused_by_what_differs(bench: LearnerBench) -> None:
    options = {"hidden": [16], "chunk_length": 2, "flow_steps": 2}
    other = msgspec.structs.replace(SPEC, action=msgspec.structs.replace(SPEC.action, low=(-3.0, 0.0)))
    kind, settings = load_policy("flow", options)
    steered = PolicyConfig(kind="steered", options={"base": "flow", "base_options": options, "hidden": [16]})
    dsrl = replace(CONFIG, algorithm="dsrl", options={"critic_hidden": [16]})
    with StoreReader.open(bench.folder / "store") as reader:
        for spec in (SPEC, other):
            state = save_state(Bc(BcSettings(), kind.make_module(spec, settings=settings), spec))
            differs = pytest.raises(WireError, match=r"\['action.centre', 'action.scale'\] differ")
            with differs if spec is other else nullcontext():
                Trainer(dsrl, SPEC, reader, policy=steered, initial_state=state).close()


def test_policy_with_tied_weights_starts_a_later_run() -> None:
    def tied() -> torch.nn.Module:
        module = MlpPolicy.make_module(SPEC, settings=MlpSettings((16,)))
        module.head = module.mean  # as the words that PaliGemma reads and writes
        return module

    first, second = tied(), tied()
    state = save_state(Bc(BcSettings(), first, SPEC))
    assert NETWORK + POLICY_PREFIX + "head.weight" not in state, "each tensor is saved once"
    assert fits_policy(second, state)
    load_policy_state(second, state)
    for name, value in policy_arrays(first).items():
        np.testing.assert_array_equal(policy_arrays(second)[name], value)
    untied = {name: value for name, value in state.items() if "mean.bias" not in name}
    assert not fits_policy(second, untied)


def test_resumed_learner_of_an_initial_policy_publishes_before_its_first_update(bench: LearnerBench) -> None:
    learner, stop = bench.learner(replace(CONFIG, initial_policy="runs/other")), threading.Event()
    stop.set()
    learner.run(stop)
    assert [(each.version, each.updates) for each in bench.published] == [(1, 0)]


class LaggingPublisher:
    """Robots that are four versions behind until it was asked fifty times; remembers when updates were made."""

    def __init__(self) -> None:
        self.asked, self.updated_at, self.is_busy, self.pinned_version = 0, list[int](), False, -1

    @property
    def versions_ahead(self) -> int:
        self.asked += 1
        return 4 if self.asked <= 50 else 0

    def publish(self, arrays: Mapping[str, Array], version: int, updates: int) -> None:
        assert updates and self.asked > 50

    def observe(self, seconds: float) -> None:
        self.updated_at.append(self.asked)

    def end_training(self) -> None:
        return

    def scalars(self) -> dict[str, float]:
        return {}


def test_last_version_follows_the_end_of_training(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    sink, publish = RecordingPublisher(bench.published), PublishConfig(every_s=0.0, every_updates=2)
    bench.learner(replace(CONFIG, publish=publish, max_updates=5), sink=sink).run(threading.Event())
    assert sink.before_end == [1, 2] and [each.version for each in sink.versions] == [1, 2, 3]


def test_learner_saves_its_state_when_the_publisher_process_ends(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    stop = threading.Event()

    class EndedProcess(RecordingPublisher):
        def publish(self, weights: PolicySnapshot, version: int, updates: int) -> None:
            if stop.is_set():
                raise RunError("the publisher process ended")

        def end_training(self) -> None:
            raise RunError("the publisher process ended")

    class LongUpdate(Trainer):
        def update(self, number: int) -> bool:
            if number == 2:
                stop.set()  # as `PublisherClient` does when its process ends
            return super().update(number)

    with pytest.raises(RunError, match="the publisher process ended"):
        bench.learner(CONFIG, sink=EndedProcess([]), kind=LongUpdate).run(stop)
    checkpoint = load_latest_checkpoint(bench.folder / "a")
    assert checkpoint is not None and checkpoint.updates == 3


def test_learner_waits_for_slow_robots(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    behind = LaggingPublisher()
    config = replace(CONFIG, staleness=3, max_updates=5)
    bench.learner(config, sink=behind).run(threading.Event())
    assert len(behind.updated_at) == 5 and min(behind.updated_at) > 50, "no update before the robots had caught up"


# The rows of `scene`: twelve an episode, in this order.
DEMO, OTHER_DEMO, HELPED, NEWEST, EVALUATION = (set(range(at, at + STEPS)) for at in range(0, 5 * STEPS, STEPS))
PERSONS = {2 * STEPS + 3, 2 * STEPS + 4}
PRIORITIZED = SamplerConfig(kind="prioritized", n_step=3)


def scene(bench: LearnerBench) -> None:
    bench.writer.append(episode("a", EpisodeSource.DEMO, 0, version=-1))
    bench.writer.append(episode("b", EpisodeSource.DEMO, 1, task="u", version=-1, at_s=10))
    bench.writer.append(episode("c", EpisodeSource.ONLINE, 2, persons=(3, 4), version=5, at_s=20))
    bench.writer.append(episode("d", EpisodeSource.ONLINE, 3, robot="s", version=9, at_s=30))
    bench.writer.append(episode("e", EpisodeSource.EVALUATION, 4, version=9, at_s=30))
    bench.writer.sync()


class RecordingTrainer(Trainer):
    """Records each batch, and the TD errors after its update."""

    def update(self, number: int) -> bool:
        done = super().update(number)
        assert isinstance(self.algorithm, TdErrors)
        batch = self.batches.drawn
        errors = self.algorithm.td_errors().numpy()
        columns = (batch.row, batch.weight, batch.reward, batch.discount, batch.terminated, errors)
        self.recorded = [*getattr(self, "recorded", []), tuple(np.array(column) for column in columns)]
        return done


def record_batches(bench: LearnerBench, sampler: SamplerConfig, updates: int = 40) -> list[tuple[Array, ...]]:
    """Returns rows, weights, rewards, discounts, terminations and TD errors of `updates` updates of a learner."""
    config = replace(CONFIG, sampler=sampler, max_updates=updates)
    bench.learner(config, kind=RecordingTrainer).run(threading.Event())
    assert isinstance(bench.trainer, RecordingTrainer)
    return bench.trainer.recorded


ONLY: list[tuple[SamplerConfig, set[int]]] = [  # tests/replay has each filter by itself
    (SamplerConfig(kind="prioritized", only=StepFilter(tasks=("u", "unheard-of"))), OTHER_DEMO),
    (SamplerConfig(kind="uniform", only=StepFilter(sources=(EpisodeSource.EVALUATION,))), EVALUATION),
    (SamplerConfig(only=StepFilter(max_age_versions=0)), DEMO | OTHER_DEMO | PERSONS | NEWEST),
    (
        SamplerConfig(mixture=(MixturePartConfig(("interventions",)), MixturePartConfig(tasks=("u",)))),
        PERSONS | OTHER_DEMO,
    ),
    (SamplerConfig(kind="tasks", only=StepFilter(robots=("r",))), DEMO | OTHER_DEMO | HELPED),
]


@pytest.mark.parametrize(("sampler", "rows"), ONLY, ids=range(len(ONLY)))
def test_sampler_filter_selects_rows(bench: LearnerBench, sampler: SamplerConfig, rows: set[int]) -> None:
    scene(bench)
    assert set(np.concatenate([drawn[0] for drawn in record_batches(bench, sampler)]).tolist()) == rows


def test_prioritized_sampler_prefers_large_td_errors(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    bench.writer.append(episode("z", EpisodeSource.ONLINE, 9, spoil=5.0))
    bench.writer.sync()
    drawn = record_batches(bench, SamplerConfig(kind="prioritized"))
    surprising = [float((row >= 3 * STEPS).mean()) for row, *_ in drawn]
    assert surprising[0] == 0.25 and np.mean(surprising[10:]) > 0.5
    row, weight, *_ = drawn[-1]
    assert weight[row >= 3 * STEPS].max() < weight.max() == 1.0
    kept = load_latest_checkpoint(bench.folder / "a")
    assert kept is not None
    expected = {int(row): (float(error) + 1e-6) ** 0.6 for row, error in zip(drawn[-1][0], drawn[-1][-1], strict=True)}
    powers = kept.arrays["sampler.selector.powers"]
    assert [powers[row] for row in expected] == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.parametrize("sampler", [PRIORITIZED, SamplerConfig(kind="tasks")], ids=["prioritized", "tasks"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_samplers_with_feedback_resume_bit_identically(bench: LearnerBench, sampler: SamplerConfig, ahead: int) -> None:
    scene(bench)
    config = replace(CONFIG, sampler=sampler, batches_ahead=ahead, max_updates=20)
    bench.train(config, "straight")
    bench.train(replace(config, max_updates=9), "halves")
    bench.train(config, "halves", seed=99)
    straight, halves = (load_latest_checkpoint(bench.folder / name) for name in ("straight", "halves"))
    assert straight is not None and halves is not None and straight.arrays.keys() == halves.arrays.keys()
    for name, value in straight.arrays.items():
        np.testing.assert_array_equal(value, halves.arrays[name], err_msg=name)


@pytest.mark.parametrize("before", ["mixed", "uniform", "tasks", "prioritized"])
@pytest.mark.parametrize("after", ["mixed", "uniform", "tasks", "prioritized"])
def test_training_goes_on_with_a_sampler_of_another_kind(
    bench: LearnerBench, before: SelectorKind, after: SelectorKind, caplog: pytest.LogCaptureFixture
) -> None:
    scene(bench)
    config = replace(CONFIG, batches_ahead=2, max_updates=4)
    bench.train(replace(config, sampler=SamplerConfig(kind=before)))
    for updates in (6, 8):
        learner = bench.train(replace(config, sampler=SamplerConfig(kind=after), max_updates=updates))
        assert learner.updates == updates
    assert caplog.text.count(f"learner.sampler_changed kind={after}") == (after != before), "at the first resumption"


@pytest.mark.parametrize(
    "config",
    [
        LearnerConfig(sampler=SamplerConfig(kind="uniform", only=StepFilter(robots=("nobody",)))),
        LearnerConfig(algorithm="bc"),
        LearnerConfig(sampler=SamplerConfig(mixture=(MixturePartConfig(tasks=("lift_read",)),))),
    ],
    ids=["filter", "algorithm", "mixture"],
)
def test_lack_of_steps_to_train_on_is_logged_once_and_reported(
    bench: LearnerBench, caplog: pytest.LogCaptureFixture, config: LearnerConfig
) -> None:
    bench.fill(EpisodeSource.ONLINE, 2)
    learner = bench.run_briefly(replace(config, batch_size=16))
    assert learner.updates == 0 and bench.reported[-1][1]["online_steps"] == 2 * STEPS
    (line,) = (each for each in caplog.messages if "learner.nothing_to_sample" in each)
    causes = (f"{config.algorithm} trains on no", "learner.options", "learner.sampler.only", "learner.sampler.mixture")
    assert all(cause in line for cause in causes)
    assert bench.reported[-1][1]["nothing_to_sample"] == 1
    bench.fill(EpisodeSource.DEMO, 1)
    if config.algorithm == "bc":
        bench.train(replace(config, batch_size=16, max_updates=1))
        assert bench.reported[-1][1]["nothing_to_sample"] == 0


def test_bc_trains_on_demonstrations_that_people_give_in_a_run(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.ONLINE, 2)
    bench.fill(EpisodeSource.DEMO, 1)
    bench.show(1)
    bench.train(replace(CONFIG, algorithm="bc", options={}, batch_size=64, max_updates=1))
    index = bench.trainer.batches.replay.index
    drawn = {index.episodes.ids.names[row] for row in index.episode_of(bench.trainer.batches.drawn.row)}
    assert drawn == {"demo-0", "shown-0"}


SHOWN = (MixturePartConfig(("demonstrations", "interventions")),)
PEOPLE_CLONED = {
    "bc": LearnerConfig(algorithm="bc"),
    "hg_dagger": LearnerConfig(algorithm="hg_dagger"),
    "bc-mixture": LearnerConfig(algorithm="bc", sampler=SamplerConfig(mixture=SHOWN)),
    "rlpd": LearnerConfig(options=SMALL),
}


@pytest.mark.parametrize("name", PEOPLE_CLONED)
@pytest.mark.parametrize("source", [EpisodeSource.DEMO, EpisodeSource.ONLINE])
def test_demonstrations_that_people_label_as_failures_are_not_cloned(
    bench: LearnerBench, name: str, source: EpisodeSource
) -> None:
    for number in range(3):
        bench.writer.append(episode(f"shown-{number}", source, number, persons=range(STEPS)))
    bench.writer.append_label(SuccessLabel(episode="shown-0", labeller="ana", at_unix_ns=1, success=False))
    bench.writer.sync()
    config = replace(PEOPLE_CLONED[name], batch_size=64, cache_bytes=1 << 20, max_updates=1)
    bench.learner(config, policy=CLONED if name == "rlpd" else POLICY).run(threading.Event())
    batches = bench.trainer.batches
    failed = batches.replay.index.episode_of(batches.drawn.row) == 0
    assert batches.demonstrations == 2 and (batches.drawn.failed_by_hand == failed).all() and not failed.all()
    assert failed.any() == (name == "rlpd"), "critics learn from failures"


def test_part_of_a_mixture_without_steps_is_logged_once(bench: LearnerBench, caplog: pytest.LogCaptureFixture) -> None:
    scene(bench)
    mixture = (MixturePartConfig(tasks=("t",)), MixturePartConfig(("demonstrations",), ("lift_read",)))
    bench.train(replace(CONFIG, sampler=SamplerConfig(mixture=mixture), max_updates=3))
    (logged,) = [each.getMessage() for each in caplog.records if "learner.mixture_part_empty" in each.getMessage()]
    assert "part=2" in logged and "['lift_read']" in logged and "['demonstrations']" in logged


MIXTURES = [(), (MixturePartConfig(tasks=("t",)),)]


def test_checkpoint_is_read_only_if_the_policy_can_be_built(tmp_path: Path) -> None:
    config, missing = LearnerConfig(algorithm="bc"), tmp_path / "000001-000000000001.checkpoint"
    reads_files = PolicyConfig(kind="vla", options={"text_encoder": str(tmp_path)})
    assert require_trainable(config, reads_files, SPEC, missing) is None
    with pytest.raises(WireError, match="cannot be read"):
        require_trainable(config, POLICY, SPEC, missing)


@pytest.mark.parametrize("mixture", MIXTURES, ids=["its own", "of the settings"])
def test_mixture_of_bc_has_no_way_back(bench: LearnerBench, mixture: tuple[MixturePartConfig, ...]) -> None:
    bench.fill(EpisodeSource.ONLINE, 1)
    bench.writer.append_label(
        PhaseLabel(episode="online-0", labeller="ana", at_unix_ns=1, first_step=0, steps=STEPS, phase=Phase.RECOVERY)
    )
    bench.writer.sync()
    options = {} if mixture else {"steps": ["successes"]}
    config = replace(CONFIG, algorithm="bc", options=options, sampler=SamplerConfig(mixture=mixture))
    bench.learner(config).close()
    assert len(bench.trainer.batches.demo_online.online) == STEPS and not bench.trainer.can_sample


OF_PEOPLE = (MixturePartConfig(("interventions",)),)


@pytest.mark.parametrize("phases", [("correction",), ("teleop", "correction", "recovery")])
def test_role_of_interventions_has_the_phases_of_hg_dagger(bench: LearnerBench, phases: tuple[str, ...]) -> None:
    of_step = [Phase.POLICY, Phase.TELEOP, Phase.CORRECTION, Phase.RECOVERY]
    bench.fill(EpisodeSource.ONLINE, 1)
    for first, phase in enumerate(of_step):
        bench.writer.append_label(
            PhaseLabel(episode="online-0", labeller="ana", at_unix_ns=first, first_step=first, steps=1, phase=phase)
        )
    bench.writer.sync()
    sampler, options = SamplerConfig(mixture=OF_PEOPLE), {"phases": list(phases)}
    bench.train(replace(CONFIG, algorithm="hg_dagger", options=options, sampler=sampler, max_updates=20))
    assert {of_step[row].name.lower() for row in bench.trainer.batches.drawn.row} == {*phases}


@pytest.mark.parametrize(
    ("algorithm", "option"),
    [
        ("bc", {"steps": ["successes"]}),
        ("hg_dagger", {"steps": ["successes"]}),
        ("hg_dagger", {"intervention_share": 0.7}),
    ],
)
@pytest.mark.parametrize(
    ("sampler", "cause"),
    [(SamplerConfig(mixture=OF_PEOPLE), "sampler.mixture"), (SamplerConfig(kind="uniform"), "sampler.kind 'uniform'")],
    ids=["mixture", "kind"],
)
def test_shares_of_an_algorithm_are_refused_where_the_sampler_sets_them(
    algorithm: str, option: dict[str, Any], sampler: SamplerConfig, cause: str
) -> None:
    config = LearnerConfig(algorithm=algorithm, options={"learning_rate": 1e-3, **option}, sampler=sampler)
    (name,) = option
    with pytest.raises(ConfigError, match=f"learner.options.{name} has no effect with {cause}: remove it"):
        require_trainable(config, POLICY, SPEC)
    assert require_trainable(replace(config, options={}), POLICY, SPEC) is not None


@pytest.mark.parametrize("mixture", MIXTURES, ids=["its own", "of the settings"])
def test_mixture_of_recap_has_only_finished_episodes(
    bench: LearnerBench, mixture: tuple[MixturePartConfig, ...]
) -> None:
    bench.writer.append(episode("runs", EpisodeSource.ONLINE, 0, ends=False))
    bench.writer.sync()
    config = replace(CONFIG, algorithm="recap", options={}, sampler=SamplerConfig(mixture=mixture))
    policy = PolicyConfig(kind="flow", options={"hidden": [8], "conditions": 2, "condition": 1})
    bench.learner(config, policy=policy).close()
    assert len(bench.trainer.batches.demo_online.online) == STEPS - 1 and not bench.trainer.can_sample


SAMPLER_ERRORS = {
    "{kind: prioritised}": ["sampler.kind", "did you mean 'prioritized'?"],
    "{kinds: uniform}": ["sampler.kinds", "unknown key; did you mean 'learner.sampler.kind'?"],
    "{only: {robot: a}}": ["only.robot", "did you mean 'learner.sampler.only.robots'?"],
    "{only: {phases: [teleops]}}": ["only.phases.0", "did you mean 'teleop'?"],
    "{only: {sources: demo}}": ["only.sources", "expected a list"],
    "{only: {sources: [evaluation]}}": ["the mixed sampler draws from demo and online"],
    "{only: {max_age_s: .nan}}": ["only.max_age_s: expected a finite number, got nan"],
    "{only: {max_age_versions: -1}}": ["max_age_versions is -1"],
    "{n_step: 0}": ["n_step is 0"],
    "{prioritized: {alpha: 0.5}}": ["prioritized does not apply to kind 'mixed'"],
    "{kind: prioritized, prioritized: {alpha: 1.5}}": ["alpha 1.5", "0..1"],
    "{kind: tasks, tasks: {low: 0.9}}": ["(0.9, 0.8)"],
    "{kind: tasks, only: {tasks: [lift]}}": ["sets tasks and sources itself"],
    "{kind: uniform}, demo_fraction: 0.25": ["demo_fraction has no effect with sampler.kind 'uniform'"],
}


@pytest.mark.parametrize("text", SAMPLER_ERRORS)
def test_invalid_sampler_settings_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"learner: {{sampler: {text}}}")
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, path)
    message = str(caught.value)
    assert [part for part in ("run.yaml: ", *SAMPLER_ERRORS[text]) if part not in message] == [], message
