"""The demo reaches its figure although its processes are killed while it runs."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from run_kit import until, user_sys

from user_sys.episode import decode_chunk
from user_sys.run.metrics import read_metrics
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND

DEMO = Path(__file__).parent.parent / "configs" / "demo.yaml"
DEADLINE_S = 600.0


def updates(run: Path) -> float:
    path = run / "metrics" / "learner.jsonl"
    return max((line["count"] or 0 for line in read_metrics(path)), default=0) if path.exists() else 0


@pytest.mark.slow
def test_the_demo_learns_although_learner_session_and_gateway_are_killed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "survivor"
    settings = ["--runs", tmp_path / "runs", "--console.port", "0", "--logging.wandb.mode", "disabled", "--any-result"]
    with user_sys(tmp_path, "train", DEMO, "--name", "survivor", *settings) as launch:
        for module in ("user_sys.run.learner_process", "user_sys.edge.session", "user_sys.gateway"):
            before = updates(run)
            until(lambda before=before: updates(run) > before + 300, "training goes on", DEADLINE_S)
            os.kill(until(lambda module=module: launch.pid_of(module), module, DEADLINE_S), signal.SIGKILL)
        assert launch.wait(DEADLINE_S) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["success"] >= 0.95 and summary["training_s"] <= 310
    with LogReader.open(run / "store") as reader:
        headers = [decode_chunk(bytes(reader.read(ref))).header for ref in reader.records() if ref.kind == CHUNK_KIND]
        assert not reader.damaged
    assert set(Counter((header.episode, header.index) for header in headers).values()) == {1}
