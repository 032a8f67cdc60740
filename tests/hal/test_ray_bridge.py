from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hal.errors import HalError, PlacementError
from hal.lease import driver_of
from hal.ray_address import require_token
from hal.ray_bridge import NodeState, NodeStatus, RestartPolicy, RobotKeeper
from hal.ray_nodes import node_argv, ray_labels, ray_resources
from hal.resource import Health, Kind, ResourceRecord

# The cluster lives in a process of its own: Ray's settings, warnings and threads stay out of the other tests.
_RUN = [sys.executable, __file__]
_MARK = "USER_SYS_TEST_FAMILY"


def robot(name: str, model: str, health: Health = Health.READY) -> ResourceRecord:
    return ResourceRecord(kind=Kind.ROBOT, name=name, model=model, node="desk", health=health)


def test_records_become_ray_resources() -> None:
    uuid = {"uuid": "GPU-5f"}
    gpu = ResourceRecord(
        kind=Kind.GPU, name="desk/gpu-0", model="NVIDIA H200", node="desk", memory_bytes=141_000_000_000, labels=uuid
    )
    fleet = [robot("a", "panda"), robot("b", "panda"), robot("c", "ur5e"), robot("d", "ur5e", Health.LOST), gpu]
    assert ray_resources(fleet) == {
        "robot:a": 1.0,
        "robot:b": 1.0,
        "robot:c": 1.0,
        "robot:d": 1.0,
        "robot_model:panda": 2.0,
        "robot_model:ur5e": 2.0,
        "card:gpu-0": 1.0,
    }, "a robot that is off is declared too: it can never be added to a node that runs"
    assert ray_labels([gpu], {"site": "lab (2nd floor)"}) == {
        "card-gpu-0-model": "NVIDIA_H200",
        "card-gpu-0-memory-mb": "141000",
        "card-gpu-0-uuid": "GPU-5f",
        "site": "lab-2nd-floor",
    }
    dead = msgspec.structs.replace(gpu, health=Health.LOST)
    assert ray_resources([dead]) == ray_labels([dead], {}) == {}, "a GPU that has failed is there for nobody"
    assert "--num-gpus=0" in node_argv([gpu], {}, address="10.0.0.2:6379"), "Ray would choose among those it counts"


def test_a_keeper_that_is_started_anew_has_its_robots_lock_before_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(tmp_path / "locks"))
    keeper = RobotKeeper("arm-0", "run demo", True)
    assert driver_of("arm-0").endswith(" run demo") and keeper.take() == ""
    assert RobotKeeper("arm-0", "run two", True).take().startswith(f"pid {os.getpid()} of ")


def test_a_node_survives_the_death_of_its_process_and_of_its_actor(tmp_path: Path) -> None:
    done = subprocess.run([*_RUN, str(tmp_path)], timeout=800, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "started",
        "placed",
        "loopback only",
        "a wrong token is told",
        "child restarted",
        "actor restarted",
        "a signal is heard while it waits",
        "stopped",
    ]
    assert done.stderr == ""
    assert (tmp_path / "ray").is_dir() and list((tmp_path / "ray").iterdir())


def eventually(condition: Callable[[], bool], within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def family() -> set[int]:
    """Ray's processes and all that they started: they inherit this process's mark."""
    mark = f"{_MARK}={os.getpid()}".encode()
    return {int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and mark in environment(p)}


def environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return []


def descriptors(process: Path) -> list[Path]:
    try:
        return list((process / "fd").iterdir())
    except OSError:  # it has ended meanwhile
        return []


def listening_addresses() -> set[str]:
    """The local addresses (/proc/net/tcp: hex, in the machine's byte order) on which Ray's processes listen."""
    inodes: set[str] = set()
    for pid in family():
        for descriptor in descriptors(Path(f"/proc/{pid}")):
            try:
                inodes.add(os.readlink(descriptor))
            except OSError:  # closed meanwhile
                continue
    tables = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {row[1].split(":")[0] for row in tables if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def gcs_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def scenario(folder: Path) -> None:
    from hal import ray_bridge
    from hal.ray_bridge import start_local
    from hal.ray_places import Bundle

    os.environ[_MARK] = str(os.getpid())
    logging.getLogger("hal").setLevel(logging.ERROR)
    resources = ray_resources([robot("panda-0", "panda")])
    cluster = start_local(resources, num_cpus=1, object_store_bytes=150_000_000, log_dir=folder / "ray")
    with cluster:
        print("started")
        with pytest.raises(PlacementError, match="asked for 1 x robot:ur-0 on one machine; there is .*robot:panda-0"):
            cluster.start("arm", ["true"], {"robot:ur-0": 1.0})
        argv = [
            sys.executable,
            "-c",
            "import os, time; print(os.environ['RAY_AUTH_TOKEN'], flush=True); time.sleep(600)",
        ]
        quick = RestartPolicy(backoff_s=0.05, stop_after_s=5)
        cluster.start("arm", argv, {"robot:panda-0": 1.0}, folder / "arm.log", restart=quick)

        def arm() -> NodeStatus:
            return cluster.statuses()["arm"]

        eventually(lambda: arm().state is NodeState.RUNNING)
        assert len(family()) > 3
        print("placed")
        addresses = listening_addresses()
        assert addresses and all(address.endswith("0100007F") for address in addresses), addresses
        print("loopback only")
        address = gcs_address()
        require_token(address, {**os.environ, "RAY_AUTH_MODE": "token"})
        with pytest.raises(HalError, match=f"^the Ray cluster at {address} refuses the token: copy the file"):
            require_token(address, {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another"})
        print("a wrong token is told")
        first = arm().pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        eventually(lambda: arm().state is NodeState.RUNNING and arm().restarts == 1)
        second = arm().pid
        assert second not in (None, first)
        print("child restarted")
        os.kill(cluster.actor_pid("arm", 120), signal.SIGKILL)
        eventually(lambda: arm().state is NodeState.RUNNING and arm().pid not in (first, second))
        eventually(lambda: not Path(f"/proc/{second}").exists())
        assert not (folder / "arm.log").read_text().strip(), "a node was told the cluster's token"
        print("actor restarted")
        ray_bridge.RESERVE_TIMEOUT_S = 3600.0  # beyond the test's own
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(2)
        with pytest.raises(KeyboardInterrupt):
            cluster.reserve("demo", [Bundle(node="desk", resources={"robot:panda-0": 2.0})])
        print("a signal is heard while it waits")
    eventually(lambda: not family())
    print("stopped")


if __name__ == "__main__":
    scenario(Path(sys.argv[1]))
