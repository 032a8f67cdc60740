"""An interrupt while the Ray cluster does not answer."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from cluster_kit import WITHIN_S, Cluster, ended, online_episodes
from run_kit import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SINGLE = """
robots: [{{name: left, driver: fake, task: reach, real_time: true}}]
resources: [{{kind: compute, cores: 1}}]
demonstrations: {{episodes: 1}}
learner: {{max_training_s: 3600, batch_size: 32, warmup_updates: 5}}
console: {{port: 0}}
ray: {{address: "127.0.0.1:{port}"}}
logging: {{wandb: {{mode: disabled}}}}
"""
FROZEN_S = 6.0  # the launcher writes its metrics every two


def test_interrupt_reaches_robots_while_ray_does_not_answer(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "single"
    with contextlib.ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        (tmp_path / "single.yaml").write_text(SINGLE.format(port=cluster.port))
        launch = cluster.user_sys("train", "single.yaml", "--name", "single")
        until(lambda: online_episodes(run, "left") > 0 or ended(launch), "the robot acts", WITHIN_S)
        (control,) = [pid for pid, line in cluster.head.processes().items() if "gcs_server" in line.split()[0]]
        os.kill(control, signal.SIGSTOP)
        try:
            written = run / "metrics" / "run.jsonl"
            until(lambda: time.time() - written.stat().st_mtime > FROZEN_S, "the launcher waits for Ray", 60)
            launch.interrupt()
            # It closes its tunnel without the first event if its supervisor's signal comes before the message.
            log = run / "logs" / "left-session.log"
            until(lambda: any(each in log.read_text() for each in ("run.stopped", "tunnel.closed")), "it stops", 30)
        finally:
            os.kill(control, signal.SIGCONT)
        assert launch.wait(WITHIN_S) == 130, launch.err
