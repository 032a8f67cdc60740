"""A Ray cluster of several nodes on one machine, for tests of runs whose nodes fail.

The first node starts the cluster and has a robot. Further nodes declare two GPUs, and robots if they are given any.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from subprocess import STDOUT, Popen

from run_kit import Launch, until, user_sys

from hal.process_supervisor import bound_argv
from hal.ray_nodes import node_argv, node_environment
from hal.resource import Kind, ResourceRecord
from user_sys.store.store import StoreReader

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
TWO_PROCESSES = """
robots: [{{name: left, driver: fake, task: reach, real_time: true}}]
resources: [{{kind: compute, count: 2, cores: {cores}}}]
demonstrations: {{episodes: 5}}
learner: {{processes: 2, max_training_s: 3600, batch_size: 32, warmup_updates: 10000, checkpoint_interval_s: 2}}
evaluation: {{episodes: 2, video_episodes: 0}}
console: {{port: 0}}
ray: {{address: "127.0.0.1:{port}"}}
logging: {{wandb: {{mode: disabled}}}}
"""


class Cluster:
    """The cluster's nodes and programs; `folder` is the working directory of all."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.port = free_port()
        self.token = folder / "ray-token"
        cores = (os.cpu_count() or 1) // 2 + 1  # two processes do not fit on one computer
        for name, text in (("job.yaml", JOB), ("two-processes.yaml", TWO_PROCESSES)):
            (folder / name).write_text(text.format(port=self.port, cores=cores))
        head = ("node", "head", "job.yaml", "--robot=left", f"--port={self.port}", "--token=ray-token")
        self.head = stack.enter_context(user_sys(folder, *head))
        until(lambda: "will now block forever" in self.head.err or ended(self.head), "the head node is up", WITHIN_S)

    @contextlib.contextmanager
    def node(self, number: int, *robots: str) -> Iterator[Popen[bytes]]:
        """A node that declares a GPU of 8 GB, one of 24 GB, and `robots`; its processes are killed at the end."""
        gpus = [gpu(0, "T1000", 8), gpu(1, "L4", 24)]
        arms = [ResourceRecord(kind=Kind.ROBOT, name=name, model="fake", node="") for name in robots]
        argv = node_argv([*gpus, *arms], {}, address=f"127.0.0.1:{self.port}", ip=f"127.0.0.{number}")
        node = self._start(argv, self.folder / f"node-{number}.log")
        try:
            yield node
        finally:
            kill_node(node)

    def _start(self, argv: list[str], log: Path) -> Popen[bytes]:
        """Starts the node, again if it does not come up within Ray's own timeout on a busy machine."""
        env = {**node_environment(self.token), "USER_SYS_TEST_FOLDER": str(self.head.runtime)}
        for _ in range(START_TRIES):
            with log.open("wb") as out:
                node = Popen(
                    bound_argv(shutil.which(argv[0]) or "", argv),
                    stdout=out,
                    stderr=STDOUT,
                    env=env,
                    start_new_session=True,
                )
            until(lambda n=node: is_up(log) or n.poll() is not None, "the node is up or has ended", WITHIN_S)  # type: ignore[misc]
            if is_up(log) and node.poll() is None:
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


def is_up(log: Path) -> bool:
    return b"will now block forever" in log.read_bytes()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def ended(launch: Launch) -> bool:
    """False while it runs; fails with its output if it has ended."""
    assert launch.process.poll() is None, launch.out + launch.err
    return False


def kill_node(node: Popen[bytes]) -> None:
    """``kill -9`` of a node with all of its descendants."""
    if node.poll() is not None:
        return
    for pid in [*children(node.pid), node.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.wait(WITHIN_S)


def children(pid: int) -> list[int]:
    try:
        direct = [int(p) for t in Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]
    except OSError:  # the process has ended
        return []
    return [*direct, *(below for child in direct for below in children(child))]


def online_episodes(run: Path, robot: str) -> int:
    if not any((run / "store").glob("*.seg")):  # the folder comes first
        return 0
    with StoreReader.open(run / "store") as reader:
        reader.refresh()
        return sum(e.source == "online" and e.complete and e.robot == robot for e in reader.episodes())


def checkpointed_updates(run: Path) -> int:
    return max((int(path.stem.split("-")[1]) for path in (run / "checkpoints").glob("*.checkpoint")), default=0)


def learner_on(node: Popen[bytes], rank: int = 0) -> int | None:
    for pid in children(node.pid):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            is_learner = b"user_sys.run.learner_process\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
            if is_learner and f"RANK={rank}".encode() in variables:
                return pid
    return None


def output(launch: Launch) -> str:
    """Its output so far, on one line; fails if it has ended."""
    ended(launch)
    return re.sub(r"\s+", " ", launch.out)


def processes_of_left(cluster: Cluster) -> set[int]:
    """Driver and session of the robot `left`, which run on the first node."""
    lines = cluster.head.processes().items()
    return {pid for pid, line in lines if " -m user_sys.edge." in line and "/edge/left" in line}
