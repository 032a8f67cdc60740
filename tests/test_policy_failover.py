"""A policy server whose node is lost runs on another node; the robots hold meanwhile."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
from cluster_kit import (
    WITHIN_S,
    Cluster,
    checkpointed_updates,
    children,
    ended,
    kill_node,
    online_episodes,
    output,
    processes_of_left,
)
from run_kit import until

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
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        found = Cluster(tmp_path, stack)
        (tmp_path / "policy-server.yaml").write_text(JOB.format(port=found.port))
        yield found


def policy_server_on(node: Popen[bytes]) -> int | None:
    """The policy server that runs on a Ray node."""
    for pid in children(node.pid):
        with contextlib.suppress(OSError):
            if b"user_sys.inference\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


def test_policy_server_of_killed_node_runs_on_another_and_nothing_else_restarts(cluster: Cluster) -> None:
    run = cluster.folder / "runs" / "moves"
    with cluster.node(2) as first:
        launch = cluster.user_sys("train", "policy-server.yaml", "--name", "moves")
        until(lambda: checkpointed_updates(run) > 0 or ended(launch), "the learner has learned", WITHIN_S)
        until(lambda: online_episodes(run, "left") > 0 or ended(launch), "the robot acts", WITHIN_S)
        policy = policy_server_on(first)
        assert policy and b"CUDA_VISIBLE_DEVICES=GPU-L4\0" in Path(f"/proc/{policy}/environ").read_bytes()
        parts = processes_of_left(cluster)
        kill_node(first)
        session = run / "logs" / "left-session.log"
        until(lambda: "session.policy_unavailable" in session.read_text() or ended(launch), "the robot holds", WITHIN_S)
        until(lambda: "127.0.0.2 is lost with the policy server" in output(launch), "the loss is printed", WITHIN_S)
        until(lambda: "the policy server waits for a slot." in output(launch), "the wait is printed", WITHIN_S)
        assert "127.0.0.2/gpu-1 lost (its Ray node is gone)" in output(launch)
        acted = online_episodes(run, "left")
    with cluster.node(3) as second:
        until(lambda: policy_server_on(second) or ended(launch), "the server is on the other node", WITHIN_S)
        until(lambda: "session.policy_available" in session.read_text() or ended(launch), "it has its policy", WITHIN_S)
        until(lambda: online_episodes(run, "left") > acted + 1 or ended(launch), "the robot acts again", WITHIN_S)
        assert "the policy server runs again, on 127.0.0.3" in output(launch)
        assert processes_of_left(cluster) == parts, "the robot's processes were not restarted"
        assert len(re.findall(r"learner\.started", (run / "logs" / "learner.log").read_text())) == 1
        launch.interrupt()
        assert launch.wait(WITHIN_S) == 130, launch.err
    for log in (run / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log
