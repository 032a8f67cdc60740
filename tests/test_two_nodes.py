"""Runs that select robots near a GPU on two Ray nodes; one waits for the other and prints why."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from cluster_kit import WITHIN_S, Cluster, checkpointed_updates, ended, kill_node, learner_on, online_episodes, output
from run_kit import until

from user_sys.config import load
from user_sys.run.config import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def robots_in(run: Path) -> list[str]:
    return [robot.name for robot in load(RunConfig, run / "config.yaml").robots]


CELL = """
robots:
  - {{name: right, driver: fake, task: reach, real_time: true}}
  - {{name: left, driver: fake, task: reach, real_time: true, labels: {{site: lab}}}}
resources:
  - {{kind: robot, labels: {{site: lab}}, colocate: cell, colocate_by: site}}
  - {{kind: gpu, memory_gb: 24, colocate: cell, colocate_by: site}}
demonstrations: {{episodes: 1}}
learner: {{max_training_s: 3600, batch_size: 32, warmup_updates: 5, checkpoint_interval_s: 2}}
evaluation: {{episodes: 1, video_episodes: 0}}
console: {{port: 0}}
ray: {{address: "127.0.0.1:{port}"}}
logging: {{wandb: {{mode: disabled}}}}
"""


def test_learner_of_lost_node_continues_only_near_the_robots(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "cell"
    with contextlib.ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        (tmp_path / "cell.yaml").write_text(CELL.format(port=cluster.port))
        stack.enter_context(cluster.node(3, site="hall"))
        with cluster.node(2, site="lab") as first:
            launch = cluster.user_sys("train", "cell.yaml", "--name", "cell")
            until(lambda: checkpointed_updates(run) or ended(launch), "the learner has trained", WITHIN_S)
            assert learner_on(first), "at the site of its robot"
            kill_node(first)
            until(
                lambda: "the learner waits for a slot. robot left" in output(launch),
                "the wait is printed",
            )
            assert "127.0.0.3/gpu-1 on hall free" in output(launch)
        with cluster.node(4, site="lab") as second:
            until(lambda: learner_on(second) or ended(launch), "the learner is at the robot's site again", WITHIN_S)
            assert robots_in(run) == ["left"]
            launch.interrupt()
            assert launch.wait(WITHIN_S) == 130, launch.err


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
