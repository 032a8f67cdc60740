"""One job with unlike robots: each embodiment learns for itself, and a robot that is pulled out comes back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from run_kit import Launch, until, user_sys

from user_sys.robot_records import assign_learners, read_robot_records
from user_sys.run.metrics import read_metrics
from user_sys.store.store import StoreReader

FLEET = """
robots:
  - {name: slow, driver: fake, task: reach, real_time: true}
  - {name: quick, driver: fake, task: reach, real_time: true, options: {rate_hz: 20.0}}
demonstrations: {episodes: 5}
learner: {max_training_s: 3600, batch_size: 32, warmup_updates: 50, checkpoint_interval_s: 5}
evaluation: {episodes: 2, video_episodes: 0}
console: {port: 0}
logging: {wandb: {mode: disabled}}
"""
WITHIN_S = 600.0


def online(run: Path, robot: str) -> int:
    """Finished online episodes of `robot` in the run's store."""
    with StoreReader.open(run / "store") as reader:
        reader.refresh()
        return sum(e.source == "online" and e.robot == robot for e in reader.episodes())


def updates(run: Path, learner: str) -> float:
    return max((row["count"] or 0 for row in read_metrics(run / "metrics" / f"{learner}.jsonl")), default=0)


def driver_of(launch: Launch, robot: str) -> int | None:
    mark = f"/edge/{robot}/robot.yaml"
    return next((p for p, line in launch.processes().items() if "edge.driver_server" in line and mark in line), None)


def over(launch: Launch) -> bool:
    assert launch.process.poll() is None, launch.err
    return False


@pytest.mark.slow
def test_two_embodiments_learn_in_one_run_and_return_after_a_loss(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    run = tmp_path / "runs" / "fleet"
    with user_sys(tmp_path, "train", "fleet.yaml", "--name", "fleet") as launch:
        until(lambda: len(read_robot_records(run / "robots")) == 2 or over(launch), "both robots are known", WITHIN_S)
        learners = list(assign_learners(read_robot_records(run / "robots")))
        assert len(learners) == 2
        for learner in learners:
            until(lambda name=learner: updates(run, name) > 50 or over(launch), f"{learner} learns", WITHIN_S)  # type: ignore[misc]
        for robot in ("slow", "quick"):
            until(lambda name=robot: online(run, name) > 0, f"{robot} acts", WITHIN_S)  # type: ignore[misc]
        pulled, before = until(lambda: driver_of(launch, "slow"), "it is driven", WITHIN_S), online(run, "quick")
        os.kill(pulled, signal.SIGKILL)
        until(lambda: online(run, "quick") > before + 2, "the other one works on", WITHIN_S)
        again = until(lambda: driver_of(launch, "slow"), "its driver starts again", WITHIN_S)
        assert again != pulled
        returned = online(run, "slow")
        until(lambda: online(run, "slow") > returned, "it is taken back into the job", WITHIN_S)
        launch.interrupt()
        assert launch.wait(WITHIN_S) == 130, launch.err
    for log in (run / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log
