"""The fleet of configs/fleet-of-four.yaml on one machine with simulated arms: ``make test-fleet``.

Two Ray nodes have a simulated Panda and the robot of an external package. A UR5e behind ROS 2 and an SO-101 behind
LeRobot connect through tunnels, each from its own environment. The simulated devices are separate processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from lerobot_kit import FeetechArmSimulator, feetech_arm_simulator
from ros2_kit import DOMAIN, HERE_ONLY, Ros2Peer
from run_kit import Launch, until, user_sys
from template_kit import install_template

from user_sys.episode import EpisodeSource
from user_sys.robot_records import assign_learners, read_robot_records
from user_sys.store.index import EpisodeSummary
from user_sys.store.store import StoreReader
from user_sys.tunnel.keys import Keyring, new_keypair, save_keypair

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(3600)]
ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "fleet-of-four.yaml"
ROBOTS = ("panda-0", "point-0", "ur5e-0", "so101-0")
WITHIN_S = 900.0
NEWEST, LEARNED = 10, 8  # this share of the newest autonomous episodes succeeds
# On a busy computer, simulated arms respond later than arms on a wire.
UR5E = (
    "--robots.0.options.controller=arm_controller",
    f"--robots.0.options.domain={DOMAIN}",
    "--robots.0.options.connect_s=60",
    "--robots.0.options.stale_after_s=1",
    "--robots.0.options.lost_after_s=3",
)
SO101 = ("--robots.0.options.answer_within_s=2",)
RUN = ("--learner.max_training_s=3600", "--console.port=0", "--logging.wandb.mode=disabled")
# torchvision's CUDA build does not import with a torch without CUDA unless two operators are registered. This hook
# registers them in every process of LeRobot's environment, at the first import of torchvision.
LET_TORCHVISION_IN = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            from lerobot_kit import allow_torchvision_import
            allow_torchvision_import()

sys.meta_path.insert(0, Finder())
"""


class Fleet:
    """The four robots, their two Ray nodes and their two computers; `launch` is the run."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self.run = folder, folder / "runs" / "four"
        self._stack = stack
        self._site, self._keys = folder / "site", folder / "keys"
        self._port = free_port()
        self._gateway = f"tcp://127.0.0.1:{free_port()}"
        self._allow("ur5e-0", "so101-0")
        install_template(folder / "package", self._site)
        self.peer = Ros2Peer(DOMAIN, "ur5e", python=environment("ros2"))
        stack.callback(self.peer.kill)
        self.arm: FeetechArmSimulator = stack.enter_context(feetech_arm_simulator(folder))
        token = f"--token={folder / 'ray-token'}"
        head = ("head", CONFIG, "--robot=panda-0", f"--port={self._port}", "--ip=127.0.0.1", token)
        self._homes = {"panda-0": self._start("head", "node", *head)}
        until(lambda: stands(self._homes["panda-0"]), "the first Ray node stands", WITHIN_S)
        self._join = ("node", "join", f"127.0.0.1:{self._port}", CONFIG, "--robot=point-0", "--ip=127.0.0.2", token)
        self._homes["point-0"] = self._start("join", *self._join)
        until(lambda: stands(self._homes["point-0"]), "the second Ray node stands", WITHIN_S)

    def train(self) -> Launch:
        address = (f"--gateway.endpoint={self._gateway}", f"--ray.address=127.0.0.1:{self._port}")
        env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.folder / "ray-token")}
        argv = ("train", CONFIG, "--name", "four", "--keys", self._keys, *address, *RUN)
        self.launch = self._start("train", *argv, env=env)
        until(lambda: (self._keys / "gateway.pub").exists() or over(self.launch), "the gateway has a key", WITHIN_S)
        port = (f"--robots.0.options.settings.{key}={value}" for key, value in self.arm.settings.items())
        self._homes |= {
            "ur5e-0": self._edge("ur5e-0", "ros2", *UR5E, env=HERE_ONLY),
            "so101-0": self._edge("so101-0", "lerobot", *SO101, *port),
        }
        return self.launch

    def over(self) -> bool:
        """False; fails if a command of the fleet has ended."""
        return any(map(over, (self.launch, *self._homes.values())))

    def parts(self, robot: str) -> dict[str, int]:
        """Process ids of the robot's driver and session, if they run."""
        lines = self._homes[robot].processes().items()
        state = f"/edge/{robot}/"
        modules = ("user_sys.edge.driver_server", "user_sys.edge.session")
        return {module: pid for module in modules for pid, line in lines if f"-m {module} " in line and state in line}

    @contextlib.contextmanager
    def without(self, robot: str) -> Iterator[None]:
        """Disconnect the robot meanwhile: its plug, its ROS 2, its driver, or its whole computer."""
        if robot == "so101-0":
            self.arm.unplug()
            yield
            self.arm.plug_in()
        elif robot == "ur5e-0":
            self.peer.kill()
            yield
            self.peer.start()
        elif robot == "point-0":
            computer = self._homes.pop(robot)
            computer.process.terminate()
            computer.wait(WITHIN_S)
            yield
            self._homes[robot] = self._start("join", *self._join)
        else:
            os.kill(self.parts(robot)["user_sys.edge.driver_server"], signal.SIGKILL)
            yield

    def _edge(self, robot: str, tier: str, *overrides: str, env: Mapping[str, str] | None = None) -> Launch:
        argv = ("edge", CONFIG, "--robot", robot, "--connect", self._gateway, "--keys", self._keys)
        return self._start(robot, *argv, *overrides, env=env, python=environment(tier))

    def _start(
        self, name: str, *argv: object, env: Mapping[str, str] | None = None, python: str = sys.executable
    ) -> Launch:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        if python == environment("lerobot"):
            (folder / "sitecustomize.py").write_text(LET_TORCHVISION_IN)
        path = [str(folder), str(ROOT), str(Path(__file__).parent), str(self._site)]
        variables = {"PYTHONPATH": os.pathsep.join(path), **(env or {})}
        where = self.folder if name == "train" else folder
        return self._stack.enter_context(user_sys(where, *argv, env=variables, python=python))

    def _allow(self, *robots: str) -> None:
        """As on one machine: robots and gateway share a folder of keys."""
        for robot in robots:
            pair = new_keypair()
            save_keypair(pair, self._keys, robot)
            Keyring(self._keys).allow(pair.public, robot, "robot")


def online(run: Path, robot: str) -> list[EpisodeSummary]:
    """Finished online episodes of `robot` in the run's store."""
    with StoreReader.open(run / "store") as reader:
        reader.refresh()
        found = [e for e in reader.episodes() if e.source is EpisodeSource.ONLINE and e.robot == robot and e.complete]
    return sorted(found, key=lambda episode: episode.started_unix_ns)


def has_learned(run: Path, robot: str) -> bool:
    newest = online(run, robot)[-NEWEST:]
    return sum(e.success is True and min(e.policy_versions) > 0 for e in newest) >= LEARNED


def environment(tier: str) -> str:
    return str(ROOT / f".venv-{tier}" / "bin" / "python")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def stands(node: Launch) -> bool:
    return "will now block forever" in node.err or over(node)


def over(launch: Launch) -> bool:
    assert launch.process.poll() is None, launch.out + launch.err
    return False


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(tmp_path, stack)


def pull_out(fleet: Fleet, robot: str) -> None:
    """The other robots continue meanwhile, and the robot rejoins the run."""
    others = [other for other in ROBOTS if other != robot]
    untouched = {other: fleet.parts(other) for other in others}
    before = {other: len(online(fleet.run, other)) for other in others}
    with fleet.without(robot):
        for other in others:
            until(
                lambda name=other: len(online(fleet.run, name)) > before[name] or fleet.over(),  # type: ignore[misc]
                f"{other} works on without {robot}",
                WITHIN_S,
            )
        assert {other: fleet.parts(other) for other in others} == untouched, "their processes did not restart"
        absent = len(online(fleet.run, robot))
    until(lambda: len(online(fleet.run, robot)) > absent + 1 or fleet.over(), f"{robot} is back", WITHIN_S)


def test_four_embodiments_learn_in_one_run_and_rejoin_after_loss(fleet: Fleet) -> None:
    launch, run = fleet.train(), fleet.run
    until(
        lambda: len(read_robot_records(run / "robots")) == len(ROBOTS) or fleet.over(),
        "all robots are registered",
        WITHIN_S,
    )
    assert len(assign_learners(read_robot_records(run / "robots"))) == len(ROBOTS)
    for robot in ROBOTS:
        until(lambda name=robot: online(run, name) or fleet.over(), f"{robot} acts", WITHIN_S)  # type: ignore[misc]
    for robot in ROBOTS:
        pull_out(fleet, robot)
    for robot in ROBOTS:
        # type: ignore[misc]
        until(lambda name=robot: has_learned(run, name) or fleet.over(), f"{robot} has learned to reach", WITHIN_S)
    launch.interrupt()
    assert launch.wait(WITHIN_S) == 130, launch.err
    for log in (run / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log
