"""Runs that choose their robots on two Ray nodes, as processes: near the GPU, one waiting for the other, told alike."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from run_kit import Launch, until
from test_moving_learner import WITHIN_S, Site, checkpointed, kill_family, learner_of, online, over, said

from user_sys.config import load
from user_sys.run.config import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

LAB = """
robots:
  - {{name: left, driver: fake, task: reach, real_time: true}}
  - {{name: right, driver: fake, task: reach, real_time: true, options: {{rate_hz: 20.0}}}}
  - {{name: third, driver: fake, task: reach, real_time: true, options: {{rate_hz: 20.0}}}}
resources:
  - {{kind: robot, count: 2, colocate: cell}}
  - {{kind: gpu, memory_gb: 24, colocate: cell}}
demonstrations: {{episodes: 1}}
learner: {{max_training_s: 3600, batch_size: 32, warmup_updates: 5}}
evaluation: {{episodes: 1, video_episodes: 0}}
console: {{port: 0}}
ray: {{address: "127.0.0.1:{port}"}}
logging: {{wandb: {{mode: disabled}}}}
"""
WHY = (
    "The job asks for two robots and one GPU with at least 24 GB, the robots and GPU on one computer. Only one is "
    "free, left: right is driven by run first and third is driven by run first. One would do, but none is free: "
    "127.0.0.2/gpu-1 is used by run first."
)


def robots_of(run: Path) -> list[str]:
    return [robot.name for robot in load(RunConfig, run / "config.yaml").robots]


def at_work(launch: Launch, run: Path) -> None:
    """Both robots of the run act, and no other does."""
    for robot in ("right", "third"):
        until(lambda name=robot: online(run, name) > 0 or over(launch), f"{robot} acts", WITHIN_S)  # type: ignore[misc]
    assert robots_of(run) == ["right", "third"] and online(run, "left") == 0


def test_two_runs_take_the_robots_near_a_gpu_in_turns_and_one_goes_on_with_its_own(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with contextlib.ExitStack() as stack:
        site = Site(tmp_path, stack)
        (tmp_path / "lab.yaml").write_text(LAB.format(port=site.port))
        stack.enter_context(site.node(2, "right", "third"))
        first = site.user_sys("train", "lab.yaml", "--name", "first")
        until(lambda: (runs / "first" / "config.yaml").exists() or over(first), "the first has its robots", WITHIN_S)
        second = site.user_sys("train", "lab.yaml", "--name", "second")
        waits = f"run second waits, and holds nothing meanwhile. {WHY}"
        until(lambda: waits in said(second), "the second waits and says why", WITHIN_S)
        explain = site.user_sys("hardware", "explain", "lab.yaml", "--json")
        assert explain.wait(WITHIN_S) == 1
        assert json.loads(explain.out)["why"] == WHY
        at_work(first, runs / "first")
        first.interrupt()
        assert first.wait(WITHIN_S) == 130, first.err
        at_work(second, runs / "second")
        second.interrupt()
        assert second.wait(WITHIN_S) == 130, second.err
        again = site.user_sys("train", "--resume", "runs/first")
        acted = online(runs / "first", "third")
        until(lambda: online(runs / "first", "third") > acted or over(again), "it goes on", WITHIN_S)
        assert robots_of(runs / "first") == ["right", "third"]
        again.interrupt()
        assert again.wait(WITHIN_S) == 130, again.err


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


def test_a_learner_whose_node_is_lost_goes_on_near_the_runs_robots_and_nowhere_else(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "cell"
    with contextlib.ExitStack() as stack:
        site = Site(tmp_path, stack)
        (tmp_path / "cell.yaml").write_text(CELL.format(port=site.port))
        stack.enter_context(site.node(3, site="hall"))
        with site.node(2, site="lab") as first:
            launch = site.user_sys("train", "cell.yaml", "--name", "cell")
            until(lambda: checkpointed(run) or over(launch), "the learner has learned", WITHIN_S)
            assert learner_of(first), "at the site of its robot, and not on the other node"
            kill_family(first)
            until(
                lambda: "the learner waits for a place. The job asks for the robot left and" in said(launch), "it waits"
            )
            assert "GPUs with at least 24 GB: 127.0.0.3/gpu-1 on hall" in said(launch)
        with site.node(4, site="lab") as second:
            until(lambda: learner_of(second) or over(launch), "the learner is at the robot's site again", WITHIN_S)
            assert robots_of(run) == ["left"]
            launch.interrupt()
            assert launch.wait(WITHIN_S) == 130, launch.err


DESK = """
robots: [{{name: left, driver: fake, task: reach, real_time: true}}]
resources: [{{kind: compute, cores: 1}}]
demonstrations: {{episodes: 1}}
learner: {{max_training_s: 3600, batch_size: 32, warmup_updates: 5}}
console: {{port: 0}}
ray: {{address: "127.0.0.1:{port}"}}
logging: {{wandb: {{mode: disabled}}}}
"""
STANDS_S = 6.0  # the launcher writes its metrics every two


def test_a_stop_reaches_the_robots_while_ray_does_not_answer(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "desk"
    with contextlib.ExitStack() as stack:
        site = Site(tmp_path, stack)
        (tmp_path / "desk.yaml").write_text(DESK.format(port=site.port))
        launch = site.user_sys("train", "desk.yaml", "--name", "desk")
        until(lambda: online(run, "left") > 0 or over(launch), "the robot acts", WITHIN_S)
        (control,) = [pid for pid, line in site.head.processes().items() if "gcs_server" in line.split()[0]]
        os.kill(control, signal.SIGSTOP)
        try:
            written = run / "metrics" / "run.jsonl"
            until(lambda: time.time() - written.stat().st_mtime > STANDS_S, "the launcher waits for Ray", 60)
            launch.interrupt()
            until(lambda: "run.stopped" in (run / "logs" / "left-session.log").read_text(), "the robot hears it", 30)
        finally:
            os.kill(control, signal.SIGCONT)
        assert launch.wait(WITHIN_S) == 130, launch.err
