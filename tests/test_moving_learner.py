"""A learner whose computer is lost: it goes on elsewhere from its checkpoint, and the robots act on meanwhile.

Ray nodes on one machine: the first begins the cluster and has a robot, the second has another one; two declare GPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, call

import pytest
from run_kit import Launch, until, user_sys

from hal.ray_nodes import node_argv, node_environment
from hal.resource import Kind, ResourceRecord
from user_sys.store.store import StoreReader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
WITHIN_S = 600.0
START_TRIES = 4
JOB = """
robots:
  - {{name: left, driver: fake, task: reach, real_time: true}}
  - {{name: right, driver: fake, task: reach, real_time: true}}
resources: [{{kind: gpu, memory_gb: 24}}]
demonstrations: {{episodes: 5}}
learner: {{max_training_s: 3600, batch_size: 32, warmup_updates: 50, checkpoint_interval_s: 2}}
evaluation: {{episodes: 2, video_episodes: 0}}
console: {{port: 0}}
ray: {{address: "127.0.0.1:{port}"}}
logging: {{wandb: {{mode: disabled}}}}
"""
CREW = """
robots: [{{name: left, driver: fake, task: reach, real_time: true}}]
resources: [{{kind: compute, count: 2, cores: {cores}}}]
demonstrations: {{episodes: 5}}
learner: {{processes: 2, max_training_s: 3600, batch_size: 32, warmup_updates: 10000, checkpoint_interval_s: 2}}
evaluation: {{episodes: 2, video_episodes: 0}}
console: {{port: 0}}
ray: {{address: "127.0.0.1:{port}"}}
logging: {{wandb: {{mode: disabled}}}}
"""


class Site:
    """The cluster's nodes and what is run on it; `folder` is the working directory of all."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.port = free_port()
        self.token = folder / "ray-token"
        cores = (os.cpu_count() or 1) // 2 + 1  # a computer has not as many twice
        for name, text in (("job.yaml", JOB), ("crew.yaml", CREW)):
            (folder / name).write_text(text.format(port=self.port, cores=cores))
        head = ("node", "head", "job.yaml", "--robot=left", f"--port={self.port}", "--token=ray-token")
        self.head = stack.enter_context(user_sys(folder, *head))
        until(lambda: "will now block forever" in self.head.err or over(self.head), "the head stands", WITHIN_S)

    @contextlib.contextmanager
    def node(self, number: int, *robots: str, hidden: Path | None = None, site: str = "") -> Iterator[Popen[bytes]]:
        """A node that declares a GPU of 8 GB, one of 24 GB, and `robots`; what is left of it at the end is killed.

        Args:
            hidden: a folder that is another one there.
            site: what it says of where it stands.
        """
        gpus = [gpu(0, "T1000", 8), gpu(1, "L4", 24)]
        arms = [ResourceRecord(kind=Kind.ROBOT, name=name, model="fake", node="") for name in robots]
        labels = {"site": site} if site else {}
        argv = node_argv([*gpus, *arms], labels, address=f"127.0.0.1:{self.port}", ip=f"127.0.0.{number}")
        if hidden:
            other = f"mount -t tmpfs none {shlex.quote(str(hidden))} && exec {shlex.join(argv)}"
            argv = ["unshare", "-m", "sh", "-c", other]
        node = self._standing(argv, self.folder / f"node-{number}.log")
        try:
            yield node
        finally:
            kill_family(node)

    def _standing(self, argv: list[str], log: Path) -> Popen[bytes]:
        """Starts it anew where a busy machine did not let it come up in the time that Ray gives itself."""
        env = {**node_environment(self.token), "USER_SYS_TEST_FOLDER": str(self.head.runtime)}
        for _ in range(START_TRIES):
            with log.open("wb") as out:
                node = Popen(argv, stdout=out, stderr=STDOUT, env=env, start_new_session=True)
            until(lambda n=node: stands(log) or n.poll() is not None, "the node stands or gives up", WITHIN_S)  # type: ignore[misc]
            if stands(log) and node.poll() is None:
                return node
        raise AssertionError(log.read_text())

    def user_sys(self, *argv: object) -> Launch:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}
        return self._stack.enter_context(user_sys(self.folder, *argv, env=token))


def gpu(number: int, model: str, gigabytes: int) -> ResourceRecord:
    return ResourceRecord(
        kind=Kind.GPU,
        name=f"gpu-{number}",
        model=model,
        node="",
        labels={"uuid": f"GPU-{model}"},
        memory_bytes=gigabytes * 10**9,
    )


def may_hide(folder: Path) -> bool:
    """Whether a process of this user may have file systems of its own."""
    mount = ["unshare", "-m", "mount", "-t", "tmpfs", "none", str(folder)]
    return shutil.which("unshare") is not None and call(mount, stdout=DEVNULL, stderr=DEVNULL) == 0


def stands(log: Path) -> bool:
    return b"will now block forever" in log.read_bytes()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def over(launch: Launch) -> bool:
    assert launch.process.poll() is None, launch.out + launch.err
    return False


def kill_family(node: Popen[bytes]) -> None:
    """``kill -9`` of all that a node is: its processes are children of children of the one that began it."""
    if node.poll() is not None:
        return
    for pid in [*children(node.pid), node.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.wait(WITHIN_S)


def children(pid: int) -> list[int]:
    try:
        direct = [int(p) for t in Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]
    except OSError:  # it has ended
        return []
    return [*direct, *(below for child in direct for below in children(child))]


def online(run: Path, robot: str) -> int:
    if not (run / "store").exists():
        return 0
    with StoreReader.open(run / "store") as reader:
        reader.refresh()
        return sum(e.source == "online" and e.complete and e.robot == robot for e in reader.episodes())


def checkpointed(run: Path) -> int:
    return max((int(path.stem.split("-")[1]) for path in (run / "checkpoints").glob("*.checkpoint")), default=0)


def learner_of(node: Popen[bytes], module: bytes = b"user_sys.learner") -> int | None:
    for pid in children(node.pid):
        with contextlib.suppress(OSError):
            if module + b"\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        yield Site(tmp_path, stack)


def explained(site: Site) -> dict[str, object]:
    launch = site.user_sys("hardware", "explain", "job.yaml", "--json")
    launch.wait(WITHIN_S)
    answer: dict[str, object] = json.loads(launch.out)
    return answer


def test_a_learner_whose_node_is_killed_goes_on_elsewhere_from_its_checkpoint(site: Site) -> None:
    refused = site.user_sys("train", "job.yaml", "--name", "none")
    assert refused.wait(WITHIN_S) == 2
    assert "asks for the robot left and one GPU with at least 24 GB. No GPU is known here." in refused.err
    assert not (site.folder / "runs").exists(), "the refusal comes before anything is made"
    run = site.folder / "runs" / "moves"
    with site.node(2, "right") as first:
        launch = site.user_sys("train", "job.yaml", "--name", "moves")
        until(lambda: checkpointed(run) > 60 or over(launch), "the learner has learned", WITHIN_S)
        learner = learner_of(first)
        assert learner and b"CUDA_VISIBLE_DEVICES=GPU-L4\0" in Path(f"/proc/{learner}/environ").read_bytes()
        why = str(explained(site)["why"])
        assert "left is driven by run moves" in why and "127.0.0.2/gpu-1 is used by run moves" in why
        for robot in ("left", "right"):
            until(lambda name=robot: online(run, name) > 0 or over(launch), f"{robot} acts", WITHIN_S)  # type: ignore[misc]
        parts = parts_of_left(site)
        kill_family(first)
        reached, acted = checkpointed(run), online(run, "left")
        until(lambda: "127.0.0.2 is lost, and the learner with it" in said(launch), "it is told", WITHIN_S)
        until(lambda: "the learner waits for a place." in said(launch), "it waits", WITHIN_S)
        assert "127.0.0.2/gpu-1 is not there (its Ray node is gone)" in said(launch)
        until(lambda: online(run, "left") > acted + 2 or over(launch), "the other robot acts on", WITHIN_S)
    with site.node(3) as second:
        until(lambda: learner_of(second) or over(launch), "the learner is on the other node", WITHIN_S)
        until(lambda: checkpointed(run) > reached or over(launch), "it learns on", WITHIN_S)
        words = (run / "logs" / "learner.log").read_text()
        resumed = [int(number) for number in re.findall(r"learner\.resumed updates=(\d+)", words)]
        assert resumed == [reached], "it goes on from the newest checkpoint"
        absent = online(run, "right")
        with site.node(2, "right"):
            until(lambda: online(run, "right") > absent + 1 or over(launch), "the lost robot is back", WITHIN_S)
            assert parts_of_left(site) == parts, "nothing of the other robot's was started anew"
            launch.interrupt()
            assert launch.wait(WITHIN_S) == 130, launch.err
    for log in (run / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log


def test_a_learner_on_two_computers_goes_on_when_one_of_them_is_killed(site: Site) -> None:
    run, follower = site.folder / "runs" / "two", b"user_sys.learner.worker_process"
    with site.node(2) as first:
        launch = site.user_sys("train", "crew.yaml", "--name", "two")
        until(lambda: checkpointed(run) > 60 or over(launch), "the learner has learned", WITHIN_S)
        assert learner_of(first, follower) and not learner_of(first), "the learner's own process is beside the store"
        kill_family(first)
        until(lambda: "127.0.0.2 is lost, and the learner with it" in said(launch), "it is told", WITHIN_S)
        until(lambda: "the learner waits for a place." in said(launch), "it waits", WITHIN_S)
        reached, acted = checkpointed(run), online(run, "left")
        until(lambda: online(run, "left") > acted + 2 or over(launch), "the robot acts on", WITHIN_S)
    with site.node(3) as second:
        until(lambda: learner_of(second, follower) or over(launch), "its second process is on the other node", WITHIN_S)
        until(lambda: checkpointed(run) > reached or over(launch), "it learns on", WITHIN_S)
        words = (run / "logs" / "learner.log").read_text()
        assert re.findall(r"learner\.resumed updates=(\d+)", words) == [str(reached)]
        launch.interrupt()
        assert launch.wait(WITHIN_S) == 130, launch.err
    for log in (run / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log


def said(launch: Launch) -> str:
    """What it printed, on one line; fails where it has ended."""
    over(launch)
    return re.sub(r"\s+", " ", launch.out)


def parts_of_left(site: Site) -> set[int]:
    """The robot's driver and session; they run under the first node."""
    lines = site.head.processes().items()
    return {pid for pid, line in lines if " -m user_sys.edge." in line and "/edge/left" in line}


def test_a_node_that_does_not_see_the_run_folders_is_named_and_gets_no_learner(site: Site) -> None:
    runs = site.folder / "runs"
    runs.mkdir()
    if not may_hide(runs):
        pytest.skip("needs the right to mount, to hide a folder from a node")
    with site.node(2, "right", hidden=runs):
        refused = site.user_sys("train", "job.yaml", "--name", "blind")
        assert refused.wait(WITHIN_S) == 2
    assert f"127.0.0.2 does not see {runs}, which must be on storage that both computers have" in refused.err
    assert not list(runs.iterdir())
