"""Whole runs that learn from pictures: the demo in its short form, and a policy server with robots that are fakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_kit import until, user_sys

from user_sys.store.store import StoreReader

DEMO = Path(__file__).parent.parent / "configs" / "demo-pixels-smoke.yaml"
DEADLINE_S = 1500.0
RUN = """
robots:
  - {name: left, driver: fake, task: reach, frame_stride: 1, options: {cameras: [front, top], image_size: 16}}
  - {name: right, driver: fake, task: reach, frame_stride: 1, options: {cameras: [front, top], image_size: 16}}
policy: {kind: cnn, device: cpu, options: {cameras: [front], hidden: [16], picture_size: 8, shift: 0}}
demonstrations: {episodes: 4}
learner: {max_training_s: 15, batch_size: 16, warmup_updates: 5}
evaluation: {episodes: 2, video_episodes: 1}
console: {port: 0}
logging: {wandb: {mode: disabled}}
"""


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_arm_learns_from_its_cameras_and_needs_them(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "seeing"
    quiet = ["--runs", tmp_path / "runs", "--logging.wandb.mode", "disabled"]
    with user_sys(tmp_path, "train", DEMO, "--name", "seeing", *quiet) as launch:
        assert launch.wait(DEADLINE_S) == 0, launch.err
    assert json.loads((run / "summary.json").read_text())["success"] >= 0.6
    control = ["--other-pictures", "--episodes", "30", "--json"]
    with user_sys(tmp_path, "evaluate", run, *control) as launch:
        assert launch.wait(DEADLINE_S) == 0, launch.err
        assert json.loads(launch.out)["success"] <= 0.2


def libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_run_with_a_camera_policy(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "seeing"
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "strided.yaml").write_text(RUN.replace("frame_stride: 1, ", "", 1))
    with user_sys(tmp_path, "train", "strided.yaml") as launch:
        assert launch.wait() == 2
        assert "robot left: frame_stride is 5, but the policy cnn reads pictures in each control period" in launch.err
    with user_sys(tmp_path, "train", "run.yaml", "--name", "seeing") as launch:
        policy = until(lambda: launch.pid_of("user_sys.inference") or launch.process.poll(), "the server starts")
        session = until(lambda: launch.pid_of("user_sys.edge.session") or launch.process.poll(), "sessions start")
        until(lambda: "libtorch" in libraries(policy), "the server acts")
        assert "libtorch" not in libraries(session)
        assert launch.wait() == 0, launch.err
        launch.require_nothing_left()
    assert "kind=cnn" in (run / "logs" / "policy.log").read_text()
    with StoreReader.open(run / "store") as reader:
        reader.refresh()
        online = reader.episodes()
        newest = {name: max(e.policy_versions[1] for e in online if e.robot == name) for name in ("left", "right")}
    assert min(newest.values()) > 0, "both robots act with what was learned"
    assert json.loads((run / "summary.json").read_text())["episodes"] == 2
    assert (run / "evaluation.mp4").stat().st_size > 0
