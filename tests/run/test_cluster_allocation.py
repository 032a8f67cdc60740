"""Robots and compute of a run on a real Ray cluster: both or neither, and nothing stays reserved."""

from __future__ import annotations

import getpass
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

# The cluster lives in a process of its own: Ray's settings, warnings and threads stay out of the other tests.
_RUN = [sys.executable, __file__]
STAGES = [
    "both",
    "one waits for the other",
    "impossible is refused",
    "a simulated robot runs on the store's node",
    "a killed launcher holds nothing",
]


@pytest.mark.slow
def test_run_gets_robots_and_compute_or_neither(tmp_path: Path) -> None:
    env = {**os.environ, "USER_SYS_TEST_FOLDER": str(tmp_path)}
    done = subprocess.run([*_RUN, str(tmp_path)], timeout=800, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == STAGES
    assert done.stderr == ""


class Waits(Exception):
    """Raised instead of waiting, with the printed reason."""


def print_line(text: str) -> None:
    raise Waits(text)


def eventually(condition: Callable[[], bool], within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def scenario(folder: Path) -> None:
    from hal.errors import PlacementError
    from hal.ray_cluster import start_local_cluster
    from hal.resource import Health, local_node
    from user_sys.compose import RobotConfig
    from user_sys.run.cluster_allocation import ClusterAllocation
    from user_sys.run.config import ResourceRequestConfig, RunConfig

    logging.getLogger("hal").setLevel(logging.ERROR)  # no warning that the locks are those of tests

    def job(cores: int) -> RunConfig:
        return RunConfig(
            robots=(RobotConfig(name="panda-0", driver="fake"),),
            resources=(ResourceRequestConfig(kind="compute", cores=cores),),
        )

    def slot_nodes(allocation: ClusterAllocation) -> list[str]:
        return [slot.placement.node for slot in allocation.learner_slots(0, 1) if slot.placement]

    arms = {f"robot:panda-{number}": 1.0 for number in range(3)}
    with start_local_cluster(arms, num_cpus=2, object_store_bytes=150_000_000) as cluster:

        def free() -> bool:
            records = {record.name: record for record in cluster.records()}
            unused = all(records[name.removeprefix("robot:")].health is Health.READY for name in arms)
            return unused and records[local_node()].cores == 2

        first, second = (
            ClusterAllocation(cluster, job(2), "one", folder),
            ClusterAllocation(cluster, job(2), "two", folder),
        )
        first.acquire(print_line)
        assert list(first.slot_from_robot) == ["panda-0"] and slot_nodes(first) == [local_node()]
        print(STAGES[0])
        with pytest.raises(Waits) as waits:
            second.acquire(print_line)
        assert str(waits.value) == (
            "run two waits, and holds nothing meanwhile. robot panda-0: missing (panda-0 leased by run one) | "
            f"compute, 2 processors: missing ({local_node()} has 0 processors free, run one uses 2 of its 2)"
        )
        assert not second.slot_from_robot and not second.learner_slots(0, 1)
        print(STAGES[1])
        with pytest.raises(PlacementError, match=r"9999 processors: missing \(.* has 2 processors\)"):
            ClusterAllocation(cluster, job(9999), "three", folder).acquire(print_line)
        print(STAGES[2])
        first.release()
        eventually(free)
        names = ("panda-0", "panda-1", "panda-2", "lone")
        lab = RunConfig(
            robots=tuple(RobotConfig(name=name, driver="fake") for name in names),
            resources=(
                ResourceRequestConfig(kind="robot", count=2),
                ResourceRequestConfig(kind="robot", name="lone"),
                ResourceRequestConfig(kind="compute"),
            ),
        )
        chooser, other = (
            ClusterAllocation(cluster, lab, "four", folder),
            ClusterAllocation(cluster, lab, "five", folder),
        )
        chooser.acquire(print_line)
        assert [robot.name for robot in chooser.config.robots] == ["panda-0", "panda-1", "lone"]
        assert list(chooser.slot_from_robot) == ["panda-0", "panda-1"]
        with pytest.raises(Waits) as waits:
            other.acquire(print_line)
        assert f"lone leased by pid {os.getpid()} of {getpass.getuser()} run four" in str(waits.value)
        chooser.release()
        eventually(free)
        other.acquire(print_line)
        assert [robot.name for robot in other.config.robots] == ["panda-0", "panda-1", "lone"]
        assert list(other.slot_from_robot) == ["panda-0", "panda-1"]
        other.release()
        eventually(free)
        print(STAGES[3])
        import ray  # it has taken in its settings by now

        address = ray.get_runtime_context().gcs_address
        with subprocess.Popen([*_RUN, str(folder), address], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None and other.stdout.readline() == b"has both\n"
            assert not free()
            os.kill(other.pid, signal.SIGKILL)
        eventually(free)
        print(STAGES[4])


def launcher(folder: Path, address: str) -> None:
    """Takes both halves and holds them until it is killed."""
    from hal.ray_cluster import connect_cluster
    from user_sys.compose import RobotConfig
    from user_sys.run.cluster_allocation import ClusterAllocation
    from user_sys.run.config import ResourceRequestConfig, RunConfig

    config = RunConfig(
        robots=(RobotConfig(name="panda-0", driver="fake"),),
        resources=(ResourceRequestConfig(kind="compute", cores=1),),
    )
    ClusterAllocation(connect_cluster(address), config, "killed", folder).acquire(print_line)
    print("has both", flush=True)
    signal.pause()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        launcher(Path(sys.argv[1]), sys.argv[2])
    else:
        scenario(Path(sys.argv[1]))
