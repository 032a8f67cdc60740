"""A run by the command line with a policy server that is killed meanwhile."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from run_kit import until, user_sys

from user_sys.episode import decode_chunk
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND

FLEET = """
robots:
  - {name: left, driver: fake, task: reach, options: {rate_hz: 10}}
  - {name: right, driver: fake, task: reach, options: {rate_hz: 10}}
policy: {location: server, device: cpu, timeout_fraction: 0.9}
demonstrations: {episodes: 2}
learner: {max_training_s: 600, batch_size: 64, warmup_updates: 50}
evaluation: {episodes: 2, video_episodes: 0}
console: {port: 0}
logging: {wandb: {mode: disabled}}
"""


def versions(run: Path, robot: str) -> set[int]:
    """The versions of a robot's stored steps."""
    if not any((run / "store").glob("*.seg")):
        return set()
    with LogReader.open(run / "store") as reader:
        chunks = [decode_chunk(bytes(reader.read(ref))) for ref in reader.records() if ref.kind == CHUNK_KIND]
    return {int(v) for chunk in chunks if chunk.header.robot == robot for v in chunk.columns["policy_version"]}


@pytest.mark.long(50)
@pytest.mark.timeout(3600)
def test_run_uses_its_policy_server_and_survives_its_death(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "site"
    (tmp_path / "fleet.yaml").write_text(FLEET)
    logs = {robot: run / "logs" / f"{robot}-session.log" for robot in ("left", "right")}
    with user_sys(tmp_path, "train", "fleet.yaml", "--name", "site") as launch:
        until(lambda: all(log.exists() for log in logs.values()) or launch.process.poll() is not None, "it starts")
        for robot in logs:
            until(lambda name=robot: max(versions(run, name), default=-1) > 0, f"{robot} acts by what was learned")
        first = launch.pid_of("user_sys.inference")
        assert first is not None, launch.err
        newest = {robot: max(versions(run, robot)) for robot in logs}
        os.kill(first, signal.SIGKILL)
        for robot, log in logs.items():
            until(lambda text=log: "session.policy_unavailable" in text.read_text(), f"{robot} holds")
            until(lambda text=log: "session.policy_available" in text.read_text(), f"{robot} has its policy again")
            until(lambda name=robot: max(versions(run, name)) > newest[name], f"{robot} goes on, with newer weights")
        assert launch.pid_of("user_sys.inference") not in (None, first)
        launch.interrupt()
        assert launch.wait() == 130, launch.err
        launch.require_nothing_left()
        assert "user-sys" not in launch.err
    for log in logs.values():
        text = log.read_text()
        assert re.search(r"policy_unavailable robot=\w+ the policy at 127.0.0.1:\d+ .*; the robot holds", text)
        assert "session.policy_available" in text and "token=2" not in text and "Traceback" not in text
