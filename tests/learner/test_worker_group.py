"""A learner of several processes: from a store to published weights, and what becomes of it when one of them ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_learner import CONFIG, POLICY, PRIORITIZED, SPEC, STEPS, LearnerBench, RecordingPublisher, bench

from user_sys.algorithms.algorithm import NETWORK, OPTIMIZER
from user_sys.algorithms.algorithm import POLICY as POLICY_PREFIX
from user_sys.algorithms.distributed import TrainingGroup, training_group, whole
from user_sys.codec import Array
from user_sys.compose import PolicyConfig
from user_sys.config import load
from user_sys.episode import EpisodeSource
from user_sys.errors import ConfigError, LinkDown, RunError
from user_sys.learner.checkpoint import Checkpoint, load_latest_checkpoint
from user_sys.learner.config import ComputeConfig, LearnerConfig, require_gpu
from user_sys.learner.learner import Learner, ReportScalars
from user_sys.learner.trainer import Trainer
from user_sys.policies.mlp import MlpPolicy
from user_sys.robot_records import EXIT_ORPHANED, save_robot_record
from user_sys.run import learner_process
from user_sys.run.config import RunConfig, RunFolder, create_run_folder
from user_sys.run.learner_process import RankEnvironment
from user_sys.store.store import StoreReader
from user_sys.weights.publisher import PublishConfig

__all__ = ["bench"]  # pytest finds the fixture here
TWO = replace(CONFIG, processes=2)
HERE = "127.0.0.1"
END_S = 600.0
ENDLESS = replace(TWO, warmup_updates=10**9, max_training_s=1e9)


def environment(rank: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": HERE, "MASTER_PORT": port}
    return {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in place.items()}}


def run_folder(
    bench: LearnerBench, config: LearnerConfig, name: str, seed: int = 0, policy: PolicyConfig = POLICY
) -> RunFolder:
    """A new run of the bench's store, with the checkpoints of `name`."""
    settings = RunConfig(runs=Path(tempfile.mkdtemp(dir=bench.folder)), learner=config, policy=policy, seed=seed)
    folder, _ = create_run_folder(settings, "run", "tcp://127.0.0.1:1")
    (bench.folder / name).mkdir(exist_ok=True)
    folder.store.symlink_to(bench.folder / "store")
    folder.checkpoints.symlink_to(bench.folder / name)
    save_robot_record(folder.robots, "r", SPEC)
    return folder


@contextmanager
def second_process(folder: RunFolder, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The process of rank 1."""
    argv = [sys.executable, "-m", "user_sys.run.learner_process", str(folder.path), "learner", "tcp://127.0.0.1:1"]
    process = subprocess.Popen(argv, env=environment(1, port))
    try:
        yield process
    finally:
        process.kill()
        process.wait(END_S)


def free_port() -> int:
    with socket.create_server((HERE, 0)) as server:
        port: int = server.getsockname()[1]
    return port


def train(
    bench: LearnerBench,
    config: LearnerConfig,
    name: str = "a",
    seed: int = 0,
    report: ReportScalars | None = None,
    device: str = "cpu",
    on_start: list[subprocess.Popen[bytes]] | None = None,
    policy: PolicyConfig = POLICY,
) -> Checkpoint:
    """Trains as rank 0 with a second process, and returns the last checkpoint. `on_start` gets the second process."""
    folder, port = run_folder(bench, config, name, seed, policy), free_port()
    with second_process(folder, port) as other, StoreReader.open(folder.store) as reader:
        if on_start is not None:
            on_start.append(other)
        with training_group(0, 2, HERE, port, device) as group:
            trainer = Trainer(config, SPEC, reader, policy=policy, seed=seed, device=device, group=group)
            learner = Learner(
                config,
                trainer,
                publisher=RecordingPublisher(bench.published),
                report=report or (lambda count, scalars: bench.reported.append((count, scalars))),
                checkpoint_dir=folder.checkpoints,
            )
            learner.run(threading.Event())
            group.barrier()
            assert other.wait(END_S) == 0
    checkpoint = load_latest_checkpoint(folder.checkpoints)
    assert checkpoint is not None and checkpoint.updates == learner.updates == config.max_updates
    return checkpoint


@pytest.mark.slow  # of threads: test_two_ranks_resume_with_their_own_batches
def test_two_processes_resume_bit_identically(bench: LearnerBench, caplog: pytest.LogCaptureFixture) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    bench.fill(EpisodeSource.ONLINE, 4)
    publish = PublishConfig(every_s=0.0, every_updates=10)
    config = replace(TWO, sampler=PRIORITIZED, batches_ahead=2, publish=publish, max_updates=21)
    straight = train(bench, replace(config, checkpoint_interval_s=0.0, checkpoints_kept=100), "straight")
    assert [published.updates for published in bench.published] == [10, 20, 21]
    MlpPolicy(SPEC).load(bench.published[-1].state.tensors)
    count, scalars = bench.reported[-1]
    assert count == 21 and scalars["demo_transitions"] == 3 * STEPS and np.isfinite(scalars["critic_loss"])
    own, others = (straight.arrays[f"{rank}sampler.selector.powers"] for rank in ("", "rank.1."))
    assert not np.array_equal(own, others), "each rank draws its own batches"

    early = sorted((bench.folder / "straight").glob("*.checkpoint"))[1]  # the first has no update
    shutil.copytree(early, bench.folder / "later" / early.name)
    resumed = train(bench, config, "later", seed=99)
    assert straight.arrays.keys() == resumed.arrays.keys()
    for name, value in straight.arrays.items():
        np.testing.assert_array_equal(value, resumed.arrays[name], err_msg=name)
    assert "process_count_changed" not in caplog.text

    alone = bench.learner(replace(config, processes=1, max_updates=24), "later")
    assert alone.updates == 21 and caplog.text.count("learner.process_count_changed before=2 now=1") == 1
    alone.run(threading.Event())
    assert bench.published[-1].updates == 24


@pytest.mark.slow  # of one process: test_update_without_a_step_to_clone_is_not_made
def test_two_processes_skip_together_what_neither_can_clone(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.ONLINE, 40)
    bench.show(1)
    cloned = PolicyConfig(options={"hidden": [16], "pretrain_updates": 8})
    config = replace(TWO, algorithm="sac", batch_size=8, max_updates=8, report_interval_s=0.0)
    train(bench, config, policy=cloned)
    assert any(scalars["imitation_loss"] > 0 for count, scalars in bench.reported if count)


@pytest.mark.slow  # each process imports FSDP2
def test_two_processes_divide_a_policy_publish_it_whole_and_resume_bit_identically(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    policy = PolicyConfig(kind="flow", options={"hidden": [256, 256]})
    config = replace(
        TWO,
        algorithm="bc",
        options={"acting_rate": 1.0},
        compute=ComputeConfig(divide=True, parts=2),
        publish=PublishConfig(every_updates=1),
        max_updates=4,
        checkpoint_interval_s=0.0,
        checkpoints_kept=100,
    )
    whole = train(bench, replace(config, compute=ComputeConfig(parts=2)), "whole", policy=policy).arrays
    divided = train(bench, config, "divided", policy=policy).arrays
    assert {name: each.shape for name, each in divided.items()} == {name: each.shape for name, each in whole.items()}
    for name, value in whole.items():
        if value.size and value.dtype == np.float32:
            assert np.abs(divided[name] - value).mean() <= 1e-5 * np.abs(value).mean(), name
    assert bench.published[-1].updates == 4
    for name, value in bench.published[-1].state.tensors.items():
        np.testing.assert_array_equal(value, divided[NETWORK + POLICY_PREFIX + name], err_msg=name)

    early = sorted((bench.folder / "divided").glob("*.checkpoint"))[2]
    shutil.copytree(early, bench.folder / "later" / early.name)
    resumed = train(bench, config, "later", seed=99, policy=policy).arrays
    for name, value in divided.items():
        np.testing.assert_array_equal(value, resumed[name], err_msg=name)
    alone = replace(config, processes=1, compute=ComputeConfig(), max_updates=5)
    bench.learner(alone, "later", policy=policy).run(threading.Event())
    assert bench.published[-1].updates == 5, "a single process goes on with the whole policy"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")
def test_two_gpus_train_and_a_cpu_goes_on(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    for updates, device in ((10, "cuda"), (20, "cpu")):
        train(bench, replace(TWO, max_updates=updates, device=device), device=device)  # type: ignore[arg-type]
        assert bench.published[-1].updates == updates


@pytest.mark.slow  # its error: test_failed_gathering_tells_own_failures_from_the_end_of_another
def test_killed_second_process_ends_the_first(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    others: list[subprocess.Popen[bytes]] = []

    def kill(count: int, scalars: dict[str, float]) -> None:
        if count > 3:
            others[0].kill()

    with pytest.raises(LinkDown, match="another process of this learner has ended; see its log"):
        train(bench, replace(ENDLESS, report_interval_s=0.0), report=kill, on_start=others)
    assert load_latest_checkpoint(bench.folder / "a") is not None, "there is a checkpoint to go on from"


FIRST = """
import sys, threading
from pathlib import Path
sys.path[:0] = [sys.argv[2], str(Path(sys.argv[2]).parent)]
import test_worker_group; globals().update(vars(test_worker_group))
with training_group(0, 2, HERE, int(sys.argv[3])) as group, StoreReader.open(Path(sys.argv[1]) / "store") as reader:
    trainer = Trainer(ENDLESS, SPEC, reader, policy=POLICY, group=group)
    report, checkpoints = lambda count, scalars: print(count, flush=True), Path(sys.argv[1]) / "checkpoints"
    learner = Learner(ENDLESS, trainer, publisher=RecordingPublisher([]), report=report, checkpoint_dir=checkpoints)
    learner.run(threading.Event())
"""


@pytest.mark.slow  # both processes import torch
def test_killed_first_process_ends_the_second(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    folder, port = run_folder(bench, ENDLESS, "a"), free_port()
    argv = [sys.executable, "-c", FIRST, str(folder.path), str(Path(__file__).parent), str(port)]
    with second_process(folder, port) as second:
        first = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert first.stdout is not None and any(int(line) > 3 for line in first.stdout)
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=END_S)
        assert second.wait(END_S) == EXIT_ORPHANED


class DividedTensor:
    """A divided tensor that cannot be gathered."""

    def __init__(self, error: RuntimeError) -> None:
        self.error = error

    def full_tensor(self) -> torch.Tensor:
        raise self.error


SHARED_MEMORY = """NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details)
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-xyz (size 9637888)"""
FAILURES = {
    "memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), torch.OutOfMemoryError),
    "shared memory": (RuntimeError(SHARED_MEMORY), RunError),
    "memory access": (RuntimeError("CUDA error: an illegal memory access was encountered"), RunError),
    "two on one GPU": (RuntimeError("ncclInvalidUsage: Duplicate GPU detected"), RunError),
    "remote": (RuntimeError("ncclRemoteError: A call failed possibly due to a network error"), LinkDown),
    "gloo": (RuntimeError("Connection closed by peer [127.0.0.1]:1234"), LinkDown),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failed_gathering_tells_own_failures_from_the_end_of_another(failure: str) -> None:
    error, expected = FAILURES[failure]
    with pytest.raises(expected) as caught:
        whole(DividedTensor(error))
    assert type(caught.value) is expected
    assert expected is torch.OutOfMemoryError or "\n" not in str(caught.value)


class OtherRank(TrainingGroup):
    """The process of rank 1, as if that of rank 0 had the same arrays."""

    def all_true(self, value: bool) -> bool:
        return value

    def gather(self, arrays: Mapping[str, Array]) -> list[Mapping[str, Array]]:
        return [arrays, arrays]


def test_other_process_copies_no_networks_for_a_checkpoint(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    with StoreReader.open(bench.folder / "store") as reader:
        trainer = Trainer(TWO, SPEC, reader, policy=POLICY, group=OtherRank(1, 2))
        state = trainer.state_dict()
        trainer.close()
    assert "rank.1.generator.cpu" in state
    assert [name for name in state if name.startswith((NETWORK, OPTIMIZER))] == []


class Deliveries(RecordingPublisher):
    """A gateway that has the last version when it is asked for the third time."""

    version, size_bytes, asked = 1, 0, 0

    def __enter__(self) -> Deliveries:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def report(self, updates: int, scalars: dict[str, float]) -> None:
        return

    def wait_until_stored(self, timeout_s: float) -> bool:
        self.asked += 1
        return self.asked >= 3


def train_in_process(bench: LearnerBench, monkeypatch: pytest.MonkeyPatch, publisher: Deliveries) -> None:
    """Trains as the learner's process does, with a stand-in of the publisher."""
    bench.fill(EpisodeSource.DEMO, 3)
    config = replace(CONFIG, max_updates=2)
    folder = run_folder(bench, config, "a")
    monkeypatch.setattr(learner_process, "PublisherClient", lambda *_: publisher)
    settings: Any = SimpleNamespace(hello=SimpleNamespace(name="learner"))
    run, stops = RunConfig(learner=config, policy=POLICY), (threading.Event(), threading.Event())
    learner_process.train(folder, run, SPEC, "learner", settings, RankEnvironment(), stops)


@pytest.mark.parametrize(("size_bytes", "delivered"), [(0, False), (10**9, True)])
def test_last_version_may_take_the_time_that_its_size_needs(
    bench: LearnerBench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    size_bytes: int,
    delivered: bool,
) -> None:
    monkeypatch.setattr(learner_process, "DELIVERY_TIMEOUT_S", 0.0)
    publisher = Deliveries(bench.published)
    publisher.size_bytes = size_bytes
    train_in_process(bench, monkeypatch, publisher)
    assert ("weights.not_delivered version=1" in caplog.text) is not delivered


def test_too_little_memory_of_a_gpu_is_an_error_of_the_run(
    bench: LearnerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Trainer, "policy_snapshot", fail)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (10**9, 8 * 10**9))
    with pytest.raises(RunError, match=r"too little memory for training: 1\.0 of 8\.0 GB are free"):
        train_in_process(bench, monkeypatch, Deliveries(bench.published))


def test_unreachable_first_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("user_sys.algorithms.distributed.COLLECTIVE_TIMEOUT_S", 1.0)
    port = free_port()
    with (
        pytest.raises(RunError, match=f"the 2 processes of the learner cannot meet at {HERE}:{port}: "),
        training_group(1, 2, HERE, port),
    ):
        pass


ENVIRONMENTS = {
    "must be numbers": {"RANK": "first"},
    "RANK 2 of WORLD_SIZE 2": {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": HERE, "MASTER_PORT": "1"},
    "with MASTER_ADDR '' and MASTER_PORT 0": {"RANK": "1", "WORLD_SIZE": "2"},
}


@pytest.mark.parametrize("problem", ENVIRONMENTS)
def test_invalid_environment_is_refused(problem: str) -> None:
    with pytest.raises(RunError, match=problem):
        RankEnvironment.read(ENVIRONMENTS[problem])
    assert RankEnvironment.read({}) == RankEnvironment()


WRONG = {
    "{processes: 0}": ["learner.processes: expected a whole number >= 1, got 0"],
    "{processes: 3}": ["3 processes do not divide a batch of 256 evenly", "a multiple of processes"],
    "{processes: 2, cache_bytes: 100000}": ["cache_bytes 100000 is divided among 2 processes", "65536"],
}


@pytest.mark.parametrize("text", WRONG)
def test_invalid_process_settings_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(f"learner: {text}")
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, tmp_path / "run.yaml")
    assert [part for part in WRONG[text] if part not in str(caught.value)] == []


def test_each_process_needs_a_gpu_of_its_own() -> None:
    require_gpu(found=2, gpu=1)
    with pytest.raises(ConfigError, match=r"GPU 2 of \S+, but torch finds 2 there: lower learner\.processes"):
        require_gpu(found=2, gpu=2)
