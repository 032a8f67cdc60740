"""The demo reaches its figure although its processes are killed while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from run_kit import Launch, until, user_sys

from user_sys.episode import decode_chunk
from user_sys.run.metrics import read_metrics
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND

DEMO = Path(__file__).parent.parent / "configs" / "demo.yaml"
LEARNER = "user_sys.run.learner_process"
DEADLINE_S = 600.0


def updates(run: Path) -> float:
    path = run / "metrics" / "learner.jsonl"
    return max((line["count"] or 0 for line in read_metrics(path)), default=0) if path.exists() else 0


def pid_of_rank(launch: Launch, rank: int) -> int | None:
    """A process of the learner."""
    for pid, line in launch.processes().items():
        with contextlib.suppress(OSError):
            if LEARNER in line and f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    return None


def train_demo(tmp_path: Path, kills: list[Callable[[Launch], int | None]], *settings: str) -> Path:
    """The folder of a demo in which each of these processes was killed, after 300 more updates each."""
    run = tmp_path / "runs" / "survivor"
    quiet = ["--runs", tmp_path / "runs", "--console.port", "0", "--logging.wandb.mode", "disabled", "--any-result"]
    with user_sys(tmp_path, "train", DEMO, "--name", "survivor", *quiet, *settings) as launch:
        for find in kills:
            before = updates(run)
            until(lambda before=before: updates(run) > before + 300, "training goes on", DEADLINE_S)  # type: ignore[misc]
            pid = until(lambda find=find: find(launch), "the process runs", DEADLINE_S)  # type: ignore[misc]
            os.kill(pid, signal.SIGKILL)
        assert launch.wait(DEADLINE_S) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["success"] >= 0.95 and summary["training_s"] <= 310
    return run


@pytest.mark.slow
def test_demo_learns_although_learner_session_and_gateway_are_killed(tmp_path: Path) -> None:
    modules = (LEARNER, "user_sys.edge.session", "user_sys.gateway")
    run = train_demo(tmp_path, [lambda launch, module=module: launch.pid_of(module) for module in modules])  # type: ignore[misc]
    with LogReader.open(run / "store") as reader:
        headers = [decode_chunk(bytes(reader.read(ref))).header for ref in reader.records() if ref.kind == CHUNK_KIND]
        assert not reader.damaged
    assert set(Counter((header.episode, header.index) for header in headers).values()) == {1}


@pytest.mark.slow
def test_two_learner_processes_train_the_demo_although_each_is_killed(tmp_path: Path) -> None:
    kills = [lambda launch, rank=rank: pid_of_rank(launch, rank) for rank in (1, 0)]  # type: ignore[misc]
    run = train_demo(tmp_path, kills, "--learner.processes=2")
    log = (run / "logs" / "learner.log").read_text()
    assert log.count("learner.resumed") >= 2 and "learner.orphaned" in log
