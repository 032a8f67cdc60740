"""A learner whose node is lost continues on another node from its checkpoint, while the robots act."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_kit import (
    WITHIN_S,
    Cluster,
    checkpointed_updates,
    ended,
    kill_node,
    learner_on,
    online_episodes,
    output,
    processes_of_left,
)
from run_kit import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield Cluster(tmp_path, stack)


def explain(cluster: Cluster) -> dict[str, object]:
    launch = cluster.user_sys("hardware", "plan", "job.yaml", "--json")
    launch.wait(WITHIN_S)
    answer: dict[str, object] = json.loads(launch.out)
    return answer


def test_learner_of_killed_node_continues_on_another_from_its_checkpoint(cluster: Cluster) -> None:
    refused = cluster.user_sys("train", "job.yaml", "--name", "none")
    assert refused.wait(WITHIN_S) == 2
    assert "gpu, 24 GB: missing (none there)" in refused.err
    assert not (cluster.folder / "runs").exists(), "refused before anything is created"
    run = cluster.folder / "runs" / "moves"
    with cluster.node(2, "right") as first:
        launch = cluster.user_sys("train", "job.yaml", "--name", "moves")
        until(lambda: checkpointed_updates(run) > 60 or ended(launch), "the learner has trained", WITHIN_S)
        learner = learner_on(first)
        assert learner and b"CUDA_VISIBLE_DEVICES=GPU-L4\0" in Path(f"/proc/{learner}/environ").read_bytes()
        rows = str(explain(cluster)["rows"])
        assert "left leased by run moves" in rows and "127.0.0.2/gpu-1 leased by run moves" in rows
        for robot in ("left", "right"):
            until(lambda name=robot: online_episodes(run, name) > 0 or ended(launch), f"{robot} acts", WITHIN_S)  # type: ignore[misc]
        parts = processes_of_left(cluster)
        kill_node(first)
        reached, acted = checkpointed_updates(run), online_episodes(run, "left")
        until(lambda: "127.0.0.2 is lost with the learner" in output(launch), "the loss is printed", WITHIN_S)
        until(lambda: "the learner waits for a slot." in output(launch), "the wait is printed", WITHIN_S)
        assert "127.0.0.2/gpu-1 lost (its Ray node is gone)" in output(launch)
        until(lambda: online_episodes(run, "left") > acted + 2 or ended(launch), "the other robot still acts", WITHIN_S)
    with cluster.node(3) as second:
        until(lambda: learner_on(second) or ended(launch), "the learner is on the other node", WITHIN_S)
        until(lambda: checkpointed_updates(run) > reached or ended(launch), "it continues", WITHIN_S)
        words = (run / "logs" / "learner.log").read_text()
        resumed = [int(number) for number in re.findall(r"learner\.resumed updates=(\d+)", words)]
        assert resumed == [reached], "it continues from the newest checkpoint"
        absent = online_episodes(run, "right")
        with cluster.node(2, "right"):
            until(
                lambda: online_episodes(run, "right") > absent + 1 or ended(launch), "the lost robot is back", WITHIN_S
            )
            assert processes_of_left(cluster) == parts, "the other robot's processes were not restarted"
            launch.interrupt()
            assert launch.wait(WITHIN_S) == 130, launch.err
    for log in (run / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log


def test_learner_on_two_nodes_continues_after_one_is_killed(cluster: Cluster) -> None:
    run = cluster.folder / "runs" / "two"
    with cluster.node(2) as first:
        launch = cluster.user_sys("train", "two-processes.yaml", "--name", "two")
        until(lambda: checkpointed_updates(run) > 60 or ended(launch), "the learner has trained", WITHIN_S)
        assert learner_on(first, rank=1) and not learner_on(first), "rank 0 is on the store's node"
        kill_node(first)
        until(lambda: "127.0.0.2 is lost with the learner" in output(launch), "the loss is printed", WITHIN_S)
        until(lambda: "the learner waits for a slot." in output(launch), "the wait is printed", WITHIN_S)
        reached, acted = checkpointed_updates(run), online_episodes(run, "left")
        until(lambda: online_episodes(run, "left") > acted + 2 or ended(launch), "the robot still acts", WITHIN_S)
    with cluster.node(3) as second:
        until(lambda: learner_on(second, rank=1) or ended(launch), "its second process is on the other node", WITHIN_S)
        until(lambda: checkpointed_updates(run) > reached or ended(launch), "it continues", WITHIN_S)
        words = (run / "logs" / "learner.log").read_text()
        assert re.findall(r"learner\.resumed updates=(\d+)", words) == [str(reached)]
        launch.interrupt()
        assert launch.wait(WITHIN_S) == 130, launch.err
    for log in (run / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log
