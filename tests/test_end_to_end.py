"""Whole runs by the real command line, with robots that need no hardware and no simulation."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_kit import Launch, until, user_sys

from user_sys.episode import Chunk, decode_chunk
from user_sys.robot_records import LEARNER
from user_sys.run.metrics import read_metrics
from user_sys.run.status import Fault, find_faults, read_status
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND, StoreReader

NAMED_S = 5.0  # from a fault to its sentence in `user-sys status`
ROBOT = """
robots:
  - {name: left, driver: fake, task: reach, real_time: true, options: {rate_hz: 50, cameras: [front]}}
"""
FLEET = (
    ROBOT
    + """  - {name: right, driver: fake, task: reach, real_time: true, options: {rate_hz: 50}}
"""
)  # of two embodiments, so there are two learners
RUN = """
demonstrations: {episodes: 5}
learner: {max_training_s: SECONDS, batch_size: 64, checkpoint_interval_s: 2, warmup_updates: 50}
evaluation: {episodes: 5, video_episodes: 1}
console: {port: 0}
logging: {wandb: {mode: disabled}}
"""


@contextmanager
def train(folder: Path, *argv: object, robots: str = ROBOT, seconds: float = 600.0) -> Iterator[Launch]:
    (folder / "run.yaml").write_text(robots + RUN.replace("SECONDS", str(seconds)))
    with user_sys(folder, "train", *argv) as launch:
        yield launch


def chunks(store: Path) -> list[Chunk]:
    if not store.exists():
        return []
    with LogReader.open(store) as reader:
        return [decode_chunk(bytes(reader.read(ref))) for ref in reader.records() if ref.kind == CHUNK_KIND]


def keys(log: Path) -> Counter[tuple[str, int]]:
    return Counter((chunk.header.episode, chunk.header.index) for chunk in chunks(log))


def updates(run: Path) -> int:
    """Of all learners."""
    files = (run / "metrics").glob("learner*.jsonl")
    return sum(max((int(line["count"] or 0) for line in read_metrics(file)), default=0) for file in files)


def trained_s(run: Path) -> float:
    return max((line["training_s"] or 0.0 for line in read_metrics(run / "metrics" / "learner.jsonl")), default=0.0)


def require_delivered(run: Path) -> None:
    """The store holds every chunk that a robot recorded, and each once: no episode has a gap."""
    stored = keys(run / "store")
    assert set(stored.values()) == {1}
    assert all((episode, index - 1) in stored for episode, index in stored if index)
    assert not [file for robot in ("left", "right") for file in (run / "edge" / robot / "outbox").glob("*.chunk")]


def require_trace(path: Path) -> None:
    """Each process of the run shows what it did."""
    events = json.loads(path.read_text())["traceEvents"]
    process = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    seen = {(process[event["pid"]], event["name"]) for event in events if event["ph"] == "X"}
    learner = {
        (LEARNER, name) for name in ("refresh", "sample", "update", "publish", "copy checkpoint", "write checkpoint")
    }
    robot = {("left-session", name) for name in ("act", "step", "load weights")}
    assert learner | robot | {("gateway", "ingest"), ("gateway", "sync"), (f"{LEARNER}-publisher", "encode")} <= seen
    assert not path.with_name("trace").exists()


def require_private(run: Path) -> None:
    """Only the user who started the run may look into it."""
    open_to_others = [path for path in (run, *run.rglob("*")) if not path.is_symlink() and path.stat().st_mode & 0o077]
    assert not open_to_others


def faults(run: Path) -> list[Fault]:
    return find_faults(read_status(run), run)


def require_summary(run: Path) -> dict[str, object]:
    summary: dict[str, object] = json.loads((run / "summary.json").read_text())
    with StoreReader.open(run / "store") as reader:
        reader.refresh()
        online = [episode for episode in reader.episodes() if episode.source == "online"]
    assert summary["run"] == run.name and summary["episodes"] == 5 and 0 <= summary["success"] <= 1  # type: ignore[operator]
    low, high = summary["ci95"]  # type: ignore[misc]
    assert 0 <= low <= summary["success"] <= high <= 1
    assert 0 < summary["env_steps"] <= sum(episode.steps for episode in online)  # type: ignore[operator]
    assert summary["updates"] == updates(run) > 0
    assert (run / "success.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "evaluation.mp4").stat().st_size > 0
    assert (run / "failures.mp4").exists() == (summary["successes"] < summary["episodes"])
    return summary


def require_curves(run: Path) -> None:
    """The curves of robots and gateway never go back, over episodes and resumptions."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    steps: dict[str, list[int]] = {}
    for file in sorted((run / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                steps.setdefault(value.tag.split("/")[0], []).append(event.step)
    for node, found in steps.items():
        if not node.startswith(LEARNER):
            assert found == sorted(found) and found[-1] > 0, node


@pytest.mark.long(60)
@pytest.mark.timeout(3600)
def test_run_trains_resumes_and_reports(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "fleet"
    with train(tmp_path, "run.yaml", "--name", "fleet") as launch:
        until(lambda: updates(run) > 50 or launch.process.poll() is not None, "it trains")
        launch.interrupt()
        assert launch.wait() == 130, launch.err
        assert re.search(r"stopped; continue with: user-sys train --resume runs/fleet", launch.out.replace("\n", " "))
        assert launch.err == ""
        launch.require_nothing_left()
    require_delivered(run)
    require_private(run)
    before, trained, before_s = set(keys(run / "store")), updates(run), trained_s(run)
    budget_s, resumed_s = math.ceil(before_s) + 3, time.monotonic()
    assert not (run / "summary.json").exists() and (tmp_path / "runs" / "latest").resolve() == run

    with train(tmp_path, "--resume", "runs/fleet", "--profile", f"--learner.max_training_s={budget_s}") as launch:
        assert launch.wait() == 0, launch.err
        assert "the files of this run are in" in launch.out and "success" in launch.out
        assert launch.err == ""
        launch.require_nothing_left()
    require_delivered(run)
    require_trace(run / "trace.json")
    assert before <= set(keys(run / "store")) and updates(run) > trained
    summary = require_summary(run)
    assert budget_s <= summary["training_s"] <= before_s + time.monotonic() - resumed_s  # type: ignore[operator]
    assert list(read_metrics(run / "metrics" / "run.jsonl"))[-1]["env_steps"]
    require_curves(run)
    for log in (run / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log


@pytest.mark.slow
def test_run_survives_a_kill_of_each_process(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "hurt"
    with train(tmp_path, "run.yaml", "--name", "hurt", robots=FLEET, seconds=25.0) as launch:
        until(lambda: updates(run) > 50, "it trains")
        acknowledged: set[tuple[str, int]] = set()
        for module, name in (
            ("user_sys.run.learner_process", "learner"),
            ("user_sys.edge.session", "-session"),
            ("user_sys.gateway", "gateway"),
            ("user_sys.edge.driver_server", "-driver"),
        ):
            pid = until(lambda module=module: launch.pid_of(module), f"{module} runs")  # type: ignore[misc]
            acknowledged |= set(keys(run / "store"))
            os.kill(pid, signal.SIGKILL)
            until(lambda n=name: any(n in f.subject for f in faults(run)), f"the status names {name}", NAMED_S)  # type: ignore[misc]
            until(lambda m=module, p=pid: launch.pid_of(m) not in (None, p), f"{module} runs again")  # type: ignore[misc]
            stored = len(keys(run / "store"))
            until(lambda n=stored: len(keys(run / "store")) > n + 20, f"experience after {module} died")  # type: ignore[misc]
        assert launch.wait() == 0, launch.err
        launch.require_nothing_left()
    require_delivered(run)
    assert acknowledged <= set(keys(run / "store"))
    require_summary(run)
