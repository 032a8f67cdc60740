"""A policy of SmolVLA's size (450 million parameters, random weights) learns adapters and acts, on a CPU.

Two robots act by one policy server; learner and policy server are killed; the run is resumed. The figures are printed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from run_kit import Launch, until, user_sys

from user_sys.episode import EpisodeSource, decode_chunk
from user_sys.learner.checkpoint import load_latest_checkpoint, scan_checkpoints
from user_sys.learner.trainer import free_memory_bytes
from user_sys.run.config import RunFolder
from user_sys.run.metrics import read_metrics
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND
from user_sys.weights.catalog import StoredVersion
from user_sys.weights.version_store import VersionStore

pytestmark = pytest.mark.timeout(3000)
LEARNER, SERVER = "user_sys.run.learner_process", "user_sys.inference"
WITHIN_S, POLL_S = 900.0, 0.2
NEEDED_BYTES = 16_000_000_000
SMOLVLA = {"width": 960, "heads": 15, "prefix_layers": 32, "expert_layers": 19, "flow_steps": 2, "flow_draws": 1}
SMALL = {"width": 64, "heads": 2, "prefix_layers": 2, "expert_layers": 2, "flow_steps": 2, "flow_draws": 1}
JOB = """
robots:
  - {{name: left, driver: fake, task: reach, frame_stride: 1, explore: off, options: {{cameras: [front]}}}}
  - {{name: right, driver: fake, task: reach, frame_stride: 1, explore: off, options: {{cameras: [front]}}}}
demonstrations: {{episodes: 2}}
policy:
  kind: vla
  location: server
  patience_s: 60
  options: {options}
learner:
  algorithm: bc
  options: {{acting_rate: 1.0}}
  batch_size: 2
  max_updates: 5
  max_training_s: 3600
  checkpoint_interval_s: 0.5
  report_interval_s: 0.1
  publish: {{every_updates: 1, every_s: 0}}
evaluation: {{episodes: 0}}
console: {{port: 0}}
logging: {{wandb: {{mode: disabled}}}}
"""


def learner_lines(run: Path) -> list[dict[str, float]]:
    path = run / "metrics" / "learner.jsonl"
    return [{name: value or 0.0 for name, value in line.items()} for line in read_metrics(path)]


def updates(run: Path) -> float:
    return max((line["count"] for line in learner_lines(run)), default=0)


def acting_robots(run: Path) -> set[str]:
    """The robots that have recorded a step of trained weights."""
    with LogReader.open(run / "store") as reader:
        chunks = [decode_chunk(bytes(reader.read(ref))) for ref in reader.records() if ref.kind == CHUNK_KIND]
    acted = [each for each in chunks if (each.columns["policy_version"] > 0).any()]
    return {each.header.robot for each in acted if each.header.source is EpisodeSource.ONLINE}


def memory_bytes(pid: int, field: str, file: str = "status") -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


def server_bytes_without_policy() -> int:
    code = "import re, torch, peft, user_sys.inference.__main__; print(open('/proc/self/status').read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = re.search(r"VmRSS:\s+(\d+)", done.stdout)
    assert found is not None
    return int(found[1]) * 1024


def total_memory_bytes(launch: Launch) -> int:
    """Memory of all processes of the run; shared pages count once."""
    return sum(memory_bytes(pid, "Pss", "smaps_rollup") for pid in launch.processes())


def stored_versions(run: Path) -> Iterator[StoredVersion]:
    for folder in sorted({path.parent for path in RunFolder(run).weights.rglob("*.blobs")}):
        yield from VersionStore(folder).load().versions.values()


def push_bytes(versions: list[StoredVersion]) -> tuple[int, int]:
    """Bytes of a whole version, and of the tensors by which the newest differs from the one before it."""
    ordered = sorted(versions, key=lambda each: each.manifest.version)
    sizes = {entry: int(np.prod(entry.shape)) * 4 for entry in ordered[-1].entries}
    changed = set(ordered[-1].entries) - set(ordered[-2].entries)
    return ordered[-1].manifest.size_bytes, sum(sizes[entry] for entry in changed) + ordered[-1].manifest.table_bytes


def kill(launch: Launch, module: str) -> None:
    pid = until(lambda: launch.pid_of(module), f"{module} runs", WITHIN_S)
    os.kill(pid, signal.SIGKILL)
    until(lambda: launch.pid_of(module) not in (None, pid), f"{module} runs again", WITHIN_S)


@pytest.mark.parametrize(
    "size", [pytest.param("small", marks=pytest.mark.slow), pytest.param("smolvla", marks=pytest.mark.slow)]
)
def test_large_policy_survives_kills_and_moves_only_its_adapters(tmp_path: Path, size: str) -> None:
    free = free_memory_bytes()
    if size == "smolvla" and free < NEEDED_BYTES:
        pytest.skip(f"needs {NEEDED_BYTES / 1e9:.0f} GB of free memory; {free / 1e9:.1f} GB are free")
    shape: Mapping[str, object] = SMOLVLA if size == "smolvla" else SMALL
    train = {"mode": "lora", "targets": ["expert"], "rank": 8}
    (tmp_path / "large.yaml").write_text(JOB.format(options=json.dumps({**shape, "chunk_length": 8, "train": train})))
    run, most = tmp_path / "runs" / "large", 0

    def has_learned(count: int) -> bool:
        nonlocal most
        time.sleep(POLL_S)
        most = max(most, total_memory_bytes(launch))
        assert launch.process.poll() is None or updates(run) >= count, launch.err[-2000:]
        return updates(run) >= count

    def both_act(launch: Launch) -> bool:
        nonlocal most
        time.sleep(POLL_S)
        most = max(most, total_memory_bytes(launch))
        assert launch.process.poll() is None, launch.err[-2000:]
        return acting_robots(run) == {"left", "right"}

    with user_sys(tmp_path, "train", "large.yaml", "--name", "large", "--learner.max_updates=1000000") as launch:
        until(lambda: has_learned(2), "two updates", WITHIN_S)
        until(lambda: scan_checkpoints(run / "checkpoints").readable, "a checkpoint is written", WITHIN_S)
        kill(launch, LEARNER)
        until(lambda: both_act(launch), "both robots act with trained weights", WITHIN_S)
        server = launch.pid_of(SERVER)
        assert server is not None
        acting, peak = memory_bytes(server, "VmRSS"), memory_bytes(server, "VmHWM")
        kill(launch, SERVER)
        before = updates(run)
        until(lambda: has_learned(int(before) + 2), "training goes on", WITHIN_S)
        log = (run / "logs" / "policy.log").read_text
        until(lambda: log().count("policy.opened") >= 2, "the new server has the policy", WITHIN_S)
        launch.interrupt()
        assert launch.wait(WITHIN_S) == 130, launch.err[-2000:]
    found = load_latest_checkpoint(run / "checkpoints")
    assert found is not None
    with user_sys(tmp_path, "train", "--resume", run, f"--learner.max_updates={found.updates + 2}") as launch:
        until(lambda: has_learned(found.updates + 2), "two more updates", WITHIN_S)
        assert launch.wait(WITHIN_S) == 0, launch.err[-2000:]
    trained = sum(
        each.nbytes for name, each in found.arrays.items() if ".lora_" in name and name.startswith("network.")
    )
    saved = sum(path.stat().st_size for path in scan_checkpoints(run / "checkpoints").readable.iterdir())
    whole, pushed = push_bytes(list(stored_versions(run)))
    held_up_ms = sorted(line["publish_ms"] for line in learner_lines(run) if line.get("publish_ms"))
    empty = server_bytes_without_policy()
    figures = {
        "parameters": whole // 4,
        "trained MB": trained / 1e6,
        "push / full push": pushed / whole,
        "push, learner's thread, median ms": held_up_ms[len(held_up_ms) // 2],
        "checkpoint / trained": saved / trained,
        "acting memory / weights": (acting - empty) / whole,
        "acting memory at its peak / weights": (peak - empty) / whole,
        "all processes GB": most / 1e9,
    }
    print(json.dumps(figures, indent=1))
    assert held_up_ms, "each push reports for how long it held up training"
    assert len(list((run / "checkpoints").glob("frozen-*.safetensors"))) == 1
    log_text = (run / "logs" / "policy.log").read_text()
    assert log_text.count("policy.opened") == 3, "one policy for both robots, at each start of the server"
    if size == "smolvla":
        assert pushed <= whole / 50
        assert saved <= 4 * trained and acting - empty <= 1.3 * whole and most <= 16e9
