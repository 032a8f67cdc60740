"""The Ray cluster: the check of its address and token, its private folder, and its processes."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from hal import ray_cluster
from hal.errors import HalError
from hal.ray_cluster import (
    ProcessState,
    ProcessStatus,
    RayFolder,
    RestartPolicy,
    connect_cluster,
    init_ray,
)
from hal.ray_nodes import node_argv, ray_labels, ray_resources
from hal.resource import Health, Kind, ResourceRecord


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", f"{'a' * 70}.example:1", "a\0b:1"])
def test_missing_server_is_reported(address: str) -> None:
    with pytest.raises(HalError, match="no Ray cluster answers at "):
        connect_cluster(address)


HOLDS = """
import sys, time
from pathlib import Path
from hal import ray_cluster
ray_cluster.TEMP_BASE = Path(sys.argv[1])
folder = ray_cluster.RayFolder()
(folder.path / "file").write_text("x")
print(folder.path, flush=True)
time.sleep(600)
"""


def test_next_start_removes_folders_of_killed_programs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "TEMP_BASE", tmp_path)
    foreign = tmp_path / f"{ray_cluster.TEMP_PREFIX}link"
    foreign.symlink_to(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        path = Path(program.stdout.readline().strip())
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        RayFolder().remove()
        assert (path / "file").exists(), "its program is alive"
        program.send_signal(signal.SIGKILL)
        program.wait(60)
        ours = RayFolder()
    assert not path.exists() and foreign.is_symlink() and ours.path.exists()
    ours.remove()
    ours.remove()
    assert not ours.path.exists()


# The cluster runs in its own process, so that Ray's settings, warnings and threads do not affect other tests.
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
        "card:gpu-0": 1.0,
    }, "a robot that is off is declared too: a running node cannot add resources"
    assert ray_labels([gpu], {"site": "lab (2nd floor)"}) == {
        "card-gpu-0-model": "NVIDIA_H200",
        "card-gpu-0-memory-mb": "141000",
        "card-gpu-0-uuid": "GPU-5f",
        "site": "lab-2nd-floor",
    }
    dead = msgspec.structs.replace(gpu, health=Health.LOST)
    assert ray_resources([dead]) == ray_labels([dead], {}) == {}, "a failed GPU is not declared"
    assert "--num-gpus=0" in node_argv([gpu], {}, address="10.0.0.2:6379"), (
        "Ray allocates any of the GPUs that it counts"
    )


class Ended:
    """A node of Ray that does not start; its processes must be ended."""

    count = 0

    def start(self) -> None:
        raise Exception("The current node timed out during startup")

    def kill_all_processes(self, **_: object) -> None:
        Ended.count += 1


class SlowRay:
    """Ray whose first `slow` nodes do not answer in time, as on a busy machine."""

    _private = SimpleNamespace(node=SimpleNamespace(Node=Ended))

    def __init__(self, slow: int) -> None:
        self.slow, self.starts, self.shutdowns = slow, 0, 0

    def init(self, **settings: object) -> None:
        self.starts += 1
        if self.starts <= self.slow:
            Ended().start()

    def shutdown(self) -> None:
        self.shutdowns += 1


@pytest.mark.parametrize("slow", [1, 2])
def test_slow_first_start_is_repeated(slow: int) -> None:
    Ended.count = 0
    ray = SlowRay(slow)
    init_ray(ray, 3, address="local")
    assert (ray.starts, ray.shutdowns, Ended.count) == (slow + 1, slow, slow)


def test_node_that_never_starts_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="^2 times, The current node timed out during startup$"):
        init_ray(SlowRay(9), 2)


@pytest.mark.slow  # tests/test_end_to_end.py has actors in the default tests
@pytest.mark.parametrize("start", ["quick", "repeated"])
def test_process_survives_death_of_child_and_of_actor(start: str, tmp_path: Path) -> None:
    argv = [*_RUN, str(tmp_path), start]
    done = subprocess.run(argv, timeout=800, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "started",
        "placed",
        "loopback only",
        "a wrong token is refused",
        "child restarted",
        "actor restarted",
        "a signal interrupts the wait",
        "stopped",
    ]
    assert done.stderr == ""
    assert (tmp_path / "ray").is_dir() and list((tmp_path / "ray").iterdir())


def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"still waiting after {within_s:g} s"
        time.sleep(0.05)


def family() -> set[int]:
    """Ray's processes and their children: they inherit this process's mark."""
    mark = f"{_MARK}={os.getpid()}".encode()
    return {int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and mark in environment(p)}


def environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # the process has ended, or belongs to another user
        return []


def descriptors(process: Path) -> list[Path]:
    try:
        return list((process / "fd").iterdir())
    except OSError:  # the process has ended meanwhile
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


def parent_of(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def gcs_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def join_refusal(address: str, token: dict[str, str]) -> str:
    """What a program with this token writes that cannot join the cluster."""
    others = {name: value for name, value in os.environ.items() if name not in ("RAY_AUTH_TOKEN", _MARK)}
    code = f"from hal.ray_cluster import connect_cluster; connect_cluster({address!r})"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env={**others, **token}, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return done.stderr


def exceed_first_start() -> None:
    """Ray's first node does not answer in time, as on a busy machine."""
    services = ray_cluster.import_ray(token="the cluster's own")._private.services
    get_node = services.get_node

    def too_late(*args: object) -> None:
        services.get_node = get_node
        raise Exception("The current node timed out during startup")

    services.get_node = too_late


def scenario(folder: Path, start: str) -> None:
    from hal import ray_cluster
    from hal.ray_cluster import start_local_cluster
    from hal.ray_nodes import Bundle

    os.environ[_MARK] = str(os.getpid())
    logging.getLogger("hal").setLevel(logging.ERROR)
    resources = ray_resources([robot("panda-0", "panda")])
    if start == "repeated":
        exceed_first_start()
    cluster = start_local_cluster(resources, num_cpus=1, object_store_bytes=150_000_000, log_dir=folder / "ray")
    with cluster:
        print("started")
        argv = [
            sys.executable,
            "-c",
            "import os, time; print(os.environ['RAY_AUTH_TOKEN'], flush=True); time.sleep(600)",
        ]
        quick = RestartPolicy(backoff_s=0.05, stop_after_s=5)
        cluster.start("arm", argv, {"robot:panda-0": 1.0}, folder / "arm.log", restart=quick)

        def arm() -> ProcessStatus:
            return cluster.statuses()["arm"]

        eventually(lambda: arm().state is ProcessState.RUNNING)
        assert len(family()) > 3
        print("placed")
        addresses = listening_addresses()
        assert addresses and all(address.endswith("0100007F") for address in addresses), addresses
        print("loopback only")
        for token in ({"RAY_AUTH_TOKEN": "another"}, {"RAY_AUTH_TOKEN_PATH": "/nowhere"}, {"HOME": "/nowhere"}):
            assert join_refusal(gcs_address(), token).count("check that RAY_AUTH_TOKEN_PATH names a copy of") == 1
        print("a wrong token is refused")
        first = arm().pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        eventually(lambda: arm().state is ProcessState.RUNNING and arm().restarts == 1)
        second = arm().pid
        assert second not in (None, first)
        print("child restarted")
        os.kill(parent_of(second), signal.SIGKILL)
        eventually(lambda: arm().state is ProcessState.RUNNING and arm().pid not in (first, second))
        eventually(lambda: not Path(f"/proc/{second}").exists())
        assert not (folder / "arm.log").read_text().strip(), "the process received the cluster's token"
        print("actor restarted")
        ray_cluster.RESERVE_TIMEOUT_S = 3600.0  # beyond the test's own
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(2)
        with pytest.raises(KeyboardInterrupt):
            cluster.reserve("demo", [Bundle(node="desk", resources={"robot:panda-0": 2.0})])
        print("a signal interrupts the wait")
    try:
        eventually(lambda: not family())
    except AssertionError:
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:300] for pid in family()]
        raise AssertionError(f"processes that remain: {commands}") from None
    assert not list(Path("/tmp").glob(f"{ray_cluster.TEMP_PREFIX}*/r/session_*{os.getpid()}")), "its folder is removed"
    print("stopped")


if __name__ == "__main__":
    scenario(Path(sys.argv[1]), sys.argv[2])
