"""A run whose newest versions become useless for a while: its robots act with the best one meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from run_kit import user_sys

ALGORITHM = """
import torch
from user_sys.algorithms.bc import Bc

class Spoiled(Bc):
    def update(self, batch, number):
        super().update(batch, number)
        with torch.no_grad():
            if 900 <= number < 1500:
                self.policy.mean.bias.fill_(3.0)
            elif number == 1500:
                self.policy.load_state_dict(self.actor.state_dict())
"""
RUN = """
robots: [{name: panda-0, driver: sim, task: reach, options: {cameras: []}}]
learner:
  algorithm: spoiled
  max_updates: 2800
  warmup_updates: 300
  utd_max: 0.5
  publish: {on_success_drop: best}
evaluation: {episodes: 4, video_episodes: 0, video_failures: 0}
console: {enabled: false}
logging: {wandb: {mode: disabled}}
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_robots_of_a_run_act_with_the_best_version_while_newer_ones_fail(tmp_path: Path) -> None:
    site = tmp_path / "spoiled-1.0.dist-info"
    site.mkdir()
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: spoiled\nVersion: 1.0\n")
    (site / "entry_points.txt").write_text("[user_sys.algorithms]\nspoiled = spoiled_algorithm:Spoiled\n")
    (tmp_path / "spoiled_algorithm.py").write_text(ALGORITHM)
    (tmp_path / "run.yaml").write_text(RUN)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with user_sys(tmp_path, "train", "run.yaml", env={"PYTHONPATH": path}) as launch:
        assert launch.wait() == 0, launch.err
        out = launch.out
    events = ["the best so far", "robots try the newest version again", "it is as good as the best again"]
    places = [out.find(event) for event in events]
    assert -1 not in places and places == sorted(places), out
