"""A policy process whose computer is lost: the robots hold, it is started on another, and they go on by themselves.

Ray nodes on one machine, as in `test_moving_learner`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
from run_kit import until
from test_moving_learner import WITHIN_S, Site, checkpointed, children, kill_family, online, over, parts_of_left, said

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
JOB = """
robots:
  - {{name: left, driver: fake, task: reach, real_time: true}}
policy: {{location: server, timeout_fraction: 0.9}}
resources: [{{kind: gpu, memory_gb: 24, use: policy}}]
demonstrations: {{episodes: 5}}
learner: {{max_training_s: 3600, batch_size: 32, warmup_updates: 50, checkpoint_interval_s: 2}}
evaluation: {{episodes: 2, video_episodes: 0}}
console: {{port: 0}}
ray: {{address: "127.0.0.1:{port}"}}
logging: {{wandb: {{mode: disabled}}}}
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        found = Site(tmp_path, stack)
        (tmp_path / "policies.yaml").write_text(JOB.format(port=found.port))
        yield found


def policy_of(node: Popen[bytes]) -> int | None:
    """The policy process that runs under a Ray node."""
    for pid in children(node.pid):
        with contextlib.suppress(OSError):
            if b"user_sys.inference\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


def test_policies_whose_node_is_killed_act_on_another_and_nothing_else_is_started_anew(site: Site) -> None:
    run = site.folder / "runs" / "moves"
    with site.node(2) as first:
        launch = site.user_sys("train", "policies.yaml", "--name", "moves")
        until(lambda: checkpointed(run) > 0 or over(launch), "the learner has learned, beside the store", WITHIN_S)
        until(lambda: online(run, "left") > 0 or over(launch), "the robot acts", WITHIN_S)
        policy = policy_of(first)
        assert policy and b"CUDA_VISIBLE_DEVICES=GPU-L4\0" in Path(f"/proc/{policy}/environ").read_bytes()
        parts = parts_of_left(site)
        kill_family(first)
        session = run / "logs" / "left-session.log"
        until(lambda: "session.policy_away" in session.read_text() or over(launch), "the robot holds", WITHIN_S)
        until(lambda: "127.0.0.2 is lost, and the robots' policies with it" in said(launch), "it is told", WITHIN_S)
        until(lambda: "the policies wait for a place." in said(launch), "it waits", WITHIN_S)
        assert "127.0.0.2/gpu-1 is not there (its Ray node is gone)" in said(launch)
        acted = online(run, "left")
    with site.node(3) as second:
        until(lambda: policy_of(second) or over(launch), "the policies are on the other node", WITHIN_S)
        until(lambda: "session.policy_back" in session.read_text() or over(launch), "it has its policy", WITHIN_S)
        until(lambda: online(run, "left") > acted + 1 or over(launch), "the robot goes on", WITHIN_S)
        assert "the policies act again, on 127.0.0.3" in said(launch)
        assert parts_of_left(site) == parts, "the robot's processes are those that they were"
        assert len(re.findall(r"learner\.started", (run / "logs" / "learner.log").read_text())) == 1
        launch.interrupt()
        assert launch.wait(WITHIN_S) == 130, launch.err
    for log in (run / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log
