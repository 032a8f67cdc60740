"""The Prometheus metrics that a run's launcher serves, the alerts on them, and the dashboard."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from hal.process_supervisor import ProcessState, ProcessStatus
from user_sys.console.progress import RobotView, RunView
from user_sys.episode import Chunk, ChunkHeader, EpisodeSource, parse_chunk
from user_sys.errors import RunError
from user_sys.gateway.ingest import OFFERED_TO_APPLIED, LatencyHistograms
from user_sys.messages import NO_VERSION, MetricsReport, RobotStatus
from user_sys.run.exporter import RunExporter
from user_sys.run.prepare import free_port
from user_sys.run.status import StatusFile

MONITORING = Path(__file__).parents[2] / "docker" / "monitoring"
REPORT = RobotStatus(
    robot="arm", authority="policy", operator="", phase="policy", episode="e", step=3, policy_version=2,
    real_time=False, outbox_chunks=7, control_hz=20.0, safety_interventions=1,
)  # fmt: skip


def latencies() -> LatencyHistograms:
    """Two steps: 20 and 40 ms from capture to action, 1 ms to the command, durable after 2 s and 1.95 s."""
    times = np.array([0, 50_000_000], np.int64)
    delays = np.array([20_000_000, 40_000_000], np.int64)
    columns = {
        "t_capture_ns": times,
        "t_inference_ns": times + delays,
        "t_command_ns": times + delays + 1_000_000,
        "reward": np.zeros(2, np.float32),
    }
    header = ChunkHeader(
        episode="e", index=0, first_step=0, steps=2, robot="arm", embodiment="x", task="t", sentence="",
        source=EpisodeSource.ONLINE, seed=0, started_unix_ns=1, unix_offset_ns=10**18,
    )  # fmt: skip
    found = LatencyHistograms()
    found.add_chunk(parse_chunk(Chunk(header, columns, {}).encode()), 10**18 + 2_021_000_000)
    found.add("arm", OFFERED_TO_APPLIED, 0.3)
    return found


@pytest.fixture
def page(tmp_path: Path) -> str:
    """The metrics of a run with one robot, a learner and a gateway that was restarted."""
    status = StatusFile(tmp_path)
    metrics = {
        "arm": {"safety_workspace": 4.0, "outbox_bytes": 1000.0, "outbox_dropped_episodes": 0.0, "chunk_stalls": 1.0},
        "gateway": {
            "queued_bytes": 9.0, "store_bytes": 5e6, "peers_refused": 2.0, "chunks_refused": 0.0, "duplicates": 3.0,
            "disk_needed_bytes": 0.0,
        },
        "learner": {
            "training_s": 50.0, "waited_s": 10.0, "step_ms": 33.0, "critic_loss": 0.25, "policy_version": 5.0,
            "cold_share": 0.1, "q": 0.75, "updates_per_step": 2.0,
        },
    }  # fmt: skip
    robot = RobotView("arm", REPORT, False, (), None, 0.1)
    run = RunView(
        run="r", env_steps=900, episodes=30, interventions=2, updates=700, staleness=3, success_20=0.5, success_50=0.4,
        robots=(robot,), metrics=metrics, tasks={"lift": 0.75},
    )  # fmt: skip
    gateway = ProcessStatus(state=ProcessState.RUNNING, pid=os.getpid(), restarts=1, last_exit=-9)
    done = ProcessStatus(state=ProcessState.STOPPED, last_exit=0)
    status.write("training", run, {"gateway": gateway, "learner": done}, {})
    port = free_port("127.0.0.1")
    exporter = RunExporter(port, tmp_path, lambda: status.newest, is_local=True)
    try:
        exporter.add_report(MetricsReport(node="gateway", count=1, scalars={}, histograms=latencies().report()))
        with pytest.raises(RunError, match=f"{port}: Address already in use; choose another"):
            RunExporter(port, tmp_path, lambda: None, is_local=True)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return str(answer.read().decode())
    finally:
        exporter.close()


def test_robots_learners_and_processes_have_metrics(page: str) -> None:
    for line in (
        'user_sys_robot_control_hertz{robot="arm"} 20.0',
        'user_sys_robot_outbox_chunks{robot="arm"} 7.0',
        'user_sys_robot_safety_interventions_total{reason="workspace",robot="arm"} 4.0',
        'user_sys_learner_loss{name="critic_loss",node="learner"} 0.25',
        'user_sys_learner_waited_seconds_total{node="learner"} 10.0',
        'user_sys_learner_value{name="q",node="learner"} 0.75',
        'user_sys_learner_updates_per_step{node="learner"} 2.0',
        'user_sys_task_success_ratio{task="lift"} 0.75',
        'user_sys_process_restarts_total{process="gateway"} 1.0',
        'user_sys_fault{subject="gateway"} 1.0',
        "user_sys_staleness_versions 3.0",
        "user_sys_steps_total 900.0",
    ):
        assert line in page.splitlines(), line
    up = re.findall("^user_sys_process_up.*", page, re.MULTILINE)
    assert up == ['user_sys_process_up{process="gateway"} 1.0'], "the learner is done"
    (resident,) = re.findall(r'user_sys_process_resident_bytes{process="gateway"} (\S+)', page)
    assert float(resident) > 10e6


def test_delays_are_distributions(page: str) -> None:
    def bucket(name: str, bound: str) -> str:
        return re.findall(rf'user_sys_{name}_seconds_bucket{{le="{re.escape(bound)}",robot="arm"}} (\S+)', page)[0]

    assert [bucket("capture_to_inference", b) for b in ("0.01", "0.025", "0.05", "+Inf")] == [
        "0.0",
        "1.0",
        "2.0",
        "2.0",
    ]
    assert bucket("inference_to_command", "0.0025") == "2.0"
    assert (bucket("recorded_to_durable", "1.0"), bucket("recorded_to_durable", "2.5")) == ("0.0", "2.0")
    assert bucket("offered_to_applied", "0.5") == "1.0"
    assert 'user_sys_capture_to_inference_seconds_sum{robot="arm"} 0.06' in page


def names(expressions: str) -> set[str]:
    return set(re.findall(r"user_sys_\w+", expressions))


def test_alerts_and_dashboard_use_metrics_that_exist(page: str) -> None:
    served = set(re.findall(r"^(user_sys_\w+)", page, re.MULTILINE))
    used = names((MONITORING / "alerts.yml").read_text())
    board = json.loads((MONITORING / "dashboard.json").read_text())
    targets = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(targets) >= 12 and used
    assert used | names("\n".join(targets)) <= served


def test_dashboard_is_what_its_program_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    program = Path(__file__).parents[1] / "tools" / "dashboard.py"
    subprocess.run([sys.executable, str(program), "--check"], check=True, timeout=120)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_each_alert_fires_and_clears() -> None:
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=MONITORING, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_pause_of_a_policy_is_no_applied_version() -> None:
    found = LatencyHistograms()
    found.on_applied("arm", NO_VERSION, 0.0)
    assert not found.report()
    found.on_applied("arm", 3, 0.2)
    assert list(found.report()) == [f"{OFFERED_TO_APPLIED}/arm"]


def test_repeated_report_of_a_version_counts_once() -> None:
    found = LatencyHistograms()
    for version in (3, 3, NO_VERSION, 3, 4, 4):
        found.on_applied("arm", version, 0.2)
    assert sum(found.report()[f"{OFFERED_TO_APPLIED}/arm"].counts) == 2
