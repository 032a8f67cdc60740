"""A learner of several processes: from a store to published weights, and what becomes of it when one of them ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace as replace_record
from test_learner import CONFIG, PRIORITIZED, SPEC, STEPS, LearnerBench, RecordingPublisher, bench

from user_sys.algorithms import distributed as ranks_module
from user_sys.algorithms.distributed import TrainingGroup, create_rendezvous
from user_sys.config import load
from user_sys.episode import EpisodeSource
from user_sys.errors import ConfigError, RunError
from user_sys.learner import workers
from user_sys.learner.checkpoint import Checkpoint, load_latest_checkpoint
from user_sys.learner.config import LearnerConfig, require_gpu
from user_sys.learner.learner import Learner, ReportScalars
from user_sys.learner.trainer import RankCommand, RankTrainer
from user_sys.learner.workers import (
    MAX_EXIT_BYTES,
    RankAddress,
    RendezvousServer,
    TrainingSpec,
    WorkerExit,
    WorkerGroup,
)
from user_sys.policies.mlp import MlpPolicy
from user_sys.robot_records import EXIT_ORPHANED
from user_sys.run.config import RunConfig
from user_sys.store.store import StoreReader
from user_sys.weights.publisher import PublishConfig

__all__ = ["bench"]  # pytest finds the fixture here
TWO = replace(CONFIG, processes=2)
HERE = "127.0.0.1"
END_S = 600.0
ENDLESS = replace(TWO, warmup_updates=10**9, max_training_s=1e9)
ASSIGNMENT = TrainingSpec(config=TWO, spec=SPEC, store="", checkpoints="")
WORKER = ("-m", "user_sys.learner.worker_process")


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may end slowly on a busy machine."""
    monkeypatch.setattr(workers, "EXIT_TIMEOUT_S", END_S)


@contextmanager
def started(
    checkpoints: Path, *ranks: int, address: str = HERE, program: Sequence[str] = WORKER
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts worker processes of the learner that writes to `checkpoints`."""
    argv = (sys.executable, *program, str(checkpoints))
    processes = [subprocess.Popen([*argv, str(rank), address, str(rank)]) for rank in ranks]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
            process.wait(END_S)


def train(
    bench: LearnerBench,
    config: LearnerConfig,
    checkpoints: str = "a",
    seed: int = 0,
    report: ReportScalars | None = None,
    device: str = "cpu",
    alone: bool = False,
) -> Checkpoint:
    """Trains and returns the last checkpoint. With `alone` the caller starts the workers."""
    store, folder = bench.folder / "store", bench.folder / checkpoints
    told = TrainingSpec(config=config, spec=SPEC, store=str(store), checkpoints=str(folder), seed=seed, device=device)
    with (
        started(folder, *range(1, 1 if alone else config.processes)),
        WorkerGroup(told, RankAddress(HERE), threading.Event()) as ranks,
        StoreReader.open(store) as reader,
    ):
        assert ranks is not None
        trainer = RankTrainer(config, SPEC, reader, features=(), seed=seed, device=str(ranks.device), group=ranks)
        learner = Learner(
            config,
            trainer,
            publisher=RecordingPublisher(bench.published),
            report=report or (lambda count, scalars: bench.reported.append((count, scalars))),
            checkpoint_dir=folder,
        )
        learner.run(threading.Event())
    checkpoint = load_latest_checkpoint(folder)
    assert checkpoint is not None and checkpoint.updates == learner.updates == config.max_updates
    return checkpoint


@pytest.mark.long(15)
def test_two_processes_resume_bit_identically(bench: LearnerBench, caplog: pytest.LogCaptureFixture) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    bench.fill(EpisodeSource.ONLINE, 4)
    publish = PublishConfig(every_s=0.0, kl=1e-9)
    config = replace(TWO, sampler=PRIORITIZED, batches_ahead=2, publish=publish, max_updates=21)
    straight = train(bench, replace(config, checkpoint_interval_s=0.0, checkpoints_kept=100), "straight")
    assert [published.updates for published in bench.published] == [10, 20, 21]
    assert bench.published[-1].state.digest.hex() == straight.scalars["policy"]
    MlpPolicy(SPEC).load(bench.published[-1].state.tensors)
    count, scalars = bench.reported[-1]
    assert count == 21 and scalars["demo_transitions"] == 3 * STEPS and np.isfinite(scalars["critic_loss"])
    own, others = (straight.arrays[f"{rank}sampler.chooser.powers"] for rank in ("", "rank.1."))
    assert not np.array_equal(own, others), "each rank draws its own batches"

    early = sorted((bench.folder / "straight").glob("*.checkpoint"))[1]  # the first was there before any update
    (bench.folder / "later").mkdir()
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


@pytest.mark.slow  # two trainings, with a process that imports torch
def test_a_follower_trains_on_with_the_next_learner_and_ends_only_when_the_training_does(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    with started(bench.folder / "a", 1) as (worker,):
        train(bench, replace(TWO, max_updates=5), alone=True)
        assert worker.poll() is None
        config = replace(TWO, max_updates=10, report_interval_s=0.0)
        train(bench, config, alone=True, report=lambda *_: worker.terminate())
        assert worker.wait(END_S) == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")
def test_on_two_gpus_they_train_publish_and_go_on_also_without_any(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    for updates, device in ((10, "cuda"), (20, "cuda"), (30, "cpu")):
        checkpoint = train(bench, replace(TWO, max_updates=updates), device=device)
        assert bench.published[-1].updates == updates
        assert bench.published[-1].state.digest.hex() == checkpoint.scalars["policy"]


def test_a_follower_that_is_killed_ends_the_learner_with_the_reason(
    bench: LearnerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "FAILURE_DETECTION_S", 300.0)  # or a busy machine would end this process
    bench.fill(EpisodeSource.DEMO, 3)
    killed = threading.Event()

    def kill(count: int, scalars: dict[str, float]) -> None:
        if count > 3 and not killed.is_set():
            killed.set()
            os.kill(children(os.getpid())[0], signal.SIGKILL)

    with pytest.raises(RunError, match=r"^process 1 of the 2 that train together is gone \(.*\); see its log$"):
        train(bench, replace(ENDLESS, report_interval_s=0.0), report=kill)
    assert killed.is_set() and not children(os.getpid())
    assert load_latest_checkpoint(bench.folder / "a") is not None, "there is a checkpoint to go on from"


def children(of: int) -> list[int]:
    """Returns the worker processes among the children of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(state[1]) == of and state[0] != "Z" and b"worker_process" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


LEARNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_worker_group import ENDLESS, train
from test_learner import LearnerBench
train(LearnerBench(Path(sys.argv[1]), None), ENDLESS, report=lambda count, scalars: print(count, flush=True))
"""


@pytest.mark.slow  # the learner's process and its worker both import torch
def test_worker_ends_with_a_killed_learner(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    argv = [sys.executable, "-c", LEARNER, str(bench.folder), str(Path(__file__).parent)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and any(int(line) > 3 for line in process.stdout)
    (worker,) = children(process.pid)
    process.kill()
    process.communicate(timeout=END_S)
    wait_until(lambda: not Path(f"/proc/{worker}").exists())


LEAVING_TOGETHER = """
import sys
import torch.distributed as dist
from user_sys.algorithms.distributed import TrainingGroup
from user_sys.learner.worker_process import main
destroy = TrainingGroup.destroy
TrainingGroup.destroy = lambda group: (dist.barrier(), destroy(group))
sys.exit(main(sys.argv[1:]))
"""


def test_a_follower_says_farewell_before_it_leaves_since_nccl_lets_none_go_alone(bench: LearnerBench) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    folder, store = bench.folder / "a", str(bench.folder / "store")
    entrance = RendezvousServer(folder, HERE, [1])
    with started(folder, 1, program=("-c", LEAVING_TOGETHER)), closing(entrance):
        line = entrance.accept_all(END_S, threading.Event())[1]
        meeting = create_rendezvous(HERE, 2)
        line.send(replace_record(ASSIGNMENT, store=store, checkpoints=str(folder), host=HERE, port=meeting.port))
        ranks = TrainingGroup(0, 2, "cpu", meeting, HERE, 1)
        try:
            ranks.broadcast_command(RankCommand.END)
            assert line.receive(WorkerExit, MAX_EXIT_BYTES, time.monotonic() + 60.0).error == ""
            dist.barrier()
        finally:
            ranks.destroy()
            line.close()


def test_they_train_on_the_processor_also_where_only_one_of_their_computers_has_a_gpu(
    bench: LearnerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # here; the worker sees none
    monkeypatch.setattr(ranks_module, "COLLECTIVE_TIMEOUT_S", 30.0)
    bench.fill(EpisodeSource.DEMO, 3)
    assert train(bench, replace(TWO, max_updates=3)).updates == 3


def test_a_follower_whose_learner_is_gone_ends_wherever_it_is(bench: LearnerBench) -> None:
    folder = bench.folder / "a"
    entrance = RendezvousServer(folder, HERE, [1])
    with started(folder, 1) as (worker,), closing(entrance):
        line = entrance.accept_all(END_S, threading.Event())[1]
        meeting = create_rendezvous(HERE, 2)  # where nobody else comes
        line.send(replace_record(ASSIGNMENT, store=str(bench.folder / "store"), host=HERE, port=meeting.port))
        wait_until(lambda: meeting.num_keys() > 1)  # one is the store's own
        assert worker.poll() is None
        line.close()
        assert worker.wait(END_S) == EXIT_ORPHANED


WAITING = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_worker_group import ASSIGNMENT, HERE
from msgspec.structs import replace
from user_sys.learner import workers
workers.FAILURE_DETECTION_S = 0.1
with workers.WorkerGroup(replace(ASSIGNMENT, checkpoints=sys.argv[1]), workers.RankAddress(HERE), threading.Event()):
    raise AssertionError("not all came together")
"""


def test_failing_worker_ends_the_learner_with_its_reason(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", WAITING, str(tmp_path), str(Path(__file__).parent)]
    with started(tmp_path, 1, address="192.0.2.77") as (worker,):
        learner = subprocess.run(argv, stderr=subprocess.PIPE, text=True, timeout=END_S, check=False)
        assert worker.wait(END_S) == 2
    assert learner.returncode == workers.EXIT_STATUS
    why = "process 1 of the 2 that train together failed: RunError: no network interface of "
    assert why in learner.stderr and "has the address 192.0.2.77; it has 127.0.0.1" in learner.stderr


def test_stop_ends_the_wait_for_workers(bench: LearnerBench) -> None:
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    with WorkerGroup(replace_record(ASSIGNMENT, checkpoints=str(bench.folder / "a")), RankAddress(HERE), stop) as ranks:
        assert ranks is None


def test_missing_workers_are_named(bench: LearnerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "JOIN_TIMEOUT_S", 0.0)
    three = replace(TWO, processes=4)
    told = TrainingSpec(config=three, spec=SPEC, store="", checkpoints=str(bench.folder / "a"))
    with pytest.raises(
        RunError, match=r"of the 4 processes .* these ranks did not join within 0 s: 1, 2, 3; see their logs"
    ):
        WorkerGroup(told, RankAddress(HERE), threading.Event()).__enter__()


def wait_until(condition: Callable[[], bool], seconds: float = END_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


WRONG = {
    "{processes: 0}": ["0 processes do not divide a batch of 256"],
    "{processes: 3}": ["3 processes do not divide a batch of 256 evenly", "a multiple of it"],
    "{processes: 2, cache_bytes: 100000}": ["cache_bytes 100000 is divided among 2 processes", "65536"],
    "{processes: 2, publish: {green_sms: 8}}": ["green_sms works with one process only"],
    "{publish: {collective_ctas: 0}}": ["set collective_ctas to 1 or more"],
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
