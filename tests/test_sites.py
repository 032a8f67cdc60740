"""``user-sys edge`` and ``user-sys cloud``: what people read, and what becomes of robots and experience."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from run_kit import END_S, Launch, until, user_sys
from site_kit import allow, gateway, headers, require_delivered, waiting
from websockets.sync.client import connect

from hal.process_supervisor import ProcessState, ProcessStatus
from user_sys.commands.edge import load_edge_config
from user_sys.commands.main import main
from user_sys.compose import RobotConfig
from user_sys.config import load
from user_sys.edge.robot_processes import RUN_FINISHED, is_expected_restart, robot_health
from user_sys.edge.session import SessionConfig
from user_sys.edge.status import SessionActivity, SessionReport
from user_sys.errors import ConfigError, RunError
from user_sys.gateway.gateway import GatewayAddress
from user_sys.robot_records import read_robot_records
from user_sys.run.config import RunConfig
from user_sys.run.prepare import free_endpoint, require_allowed
from user_sys.tunnel.keys import Keyring, load_public_key, new_keypair, save_keypair

LEFT = """
robots: [{name: left, driver: fake, task: reach, real_time: true, options: {rate_hz: 50}}]
demonstrations: {episodes: 1}
tunnel: {experience: {bytes_per_s: 10000000}}
"""
CLOUD = """
learner: {max_training_s: 8, batch_size: 64, checkpoint_interval_s: 2, warmup_updates: 50}
console: {port: 0}
logging: {wandb: {mode: disabled}}
"""


@contextmanager
def edge(folder: Path, address: GatewayAddress, *options: str, config: str = LEFT) -> Iterator[Launch]:
    (folder / "robots.yaml").write_text(config)
    (folder / "keys" / "gateway.pub").write_text(address.public_key)
    with user_sys(folder, "edge", "robots.yaml", "--connect", address.endpoint, *options) as launch:
        yield launch


@pytest.fixture
def robot(tmp_path: Path) -> Path:
    folder = tmp_path / "robot"
    allow(tmp_path / "run", folder / "keys", "left")
    return folder


@pytest.mark.long(20)
@pytest.mark.timeout(3600)
def test_edge_survives_loss_of_cloud_processes_and_key_rotation(
    robot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def status(*options: str) -> int:
        return main(["status", str(robot / "edge"), *options])

    with ExitStack() as stack:
        with gateway(run) as address:
            launch = stack.enter_context(edge(robot, address))
            until(lambda: len(headers(run / "store")) > 5, "it records and delivers")
            assert headers(run / "store")[0].source == "demo"
            session = load(SessionConfig, robot / "edge" / "left" / "session.yaml")
            assert session.tunnel.experience.bytes_per_s == 10e6
            assert [record.robot for record in read_robot_records(run / "robots")] == ["left"]
            until(lambda: not status() and "the run drives the robot" in capsys.readouterr().out, "the status is good")
        stored = len(headers(run / "store"))
        until(lambda: f"left: {address.endpoint} is unreachable" in launch.out, "the loss of the link is printed")
        until(lambda: status() == 1 and "FAULT: left: " in capsys.readouterr().out, "the status names it")
        assert status("--alive") == 0, "the program itself is well"
        until(lambda: len(waiting(robot / "edge" / "left" / "outbox")) > 2, "it works on alone")
        with gateway(run):
            until(lambda: "left: reachable again" in launch.out, "the return of the link is printed")
            until(lambda: len(headers(run / "store")) > stored + 5, "it delivers again")
            for module in ("user_sys.edge.session", "user_sys.edge.driver_server"):
                pid = until(lambda m=module: launch.pid_of(m), f"{module} runs")  # type: ignore[misc]
                os.kill(pid, signal.SIGKILL)
                until(lambda m=module, p=pid: launch.pid_of(m) not in (None, p), f"{module} runs again")  # type: ignore[misc]
            allow(run, robot / "keys", "left")
            until(lambda: "left: it has a new key" in launch.out, "it notices its new key")
            stored = len(headers(run / "store"))
            until(lambda: len(headers(run / "store")) > stored + 3, "it delivers under its new key")
            os.kill(launch.process.pid, signal.SIGTERM)
            assert launch.wait() == 0, launch.err
            launch.require_nothing_left()
        assert launch.out.rstrip().endswith("left: stopped; its outbox is empty") and launch.err == "", launch.out
    assert status() == 2, "it has ended"
    require_delivered(run, robot / "edge" / "left" / "outbox")


STALE_S = 0.75  # a page drives no robot of a server that has been silent for so long


class LocalPage:
    """A program in place of a page of ``edge --console``."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        parts = urlsplit(url)
        self.socket = stack.enter_context(connect(f"ws://{parts.netloc}/ws?{parts.query}", proxy=None))
        self.stops = stack.enter_context(connect(f"ws://{parts.netloc}/stop?{parts.query}", proxy=None))
        self.status: dict[str, Any] = {}
        self.pictures = 0
        self.heard_s = time.monotonic()
        self.replies = list[dict[str, Any]]()
        self.send(type="hello", operator="ana")

    def send(self, **message: Any) -> None:
        self.socket.send(json.dumps(message))

    def shows(self, **wanted: Any) -> bool:
        """Reads what has arrived, and whether the newest status has these values."""
        with suppress(TimeoutError):
            while True:
                self._take(self.socket.recv(timeout=0.01))
        return wanted.items() <= self.status.items()

    def _take(self, frame: str | bytes) -> None:
        self.heard_s = time.monotonic()
        if isinstance(frame, bytes):
            self.pictures += 1
            return self.send(type="seen", pictures=[["left", "front"]])
        message = json.loads(frame)
        if message["type"] == "reply":
            self.replies.append(message)
        if message["type"] == "state":
            self.status = message["view"]["robots"][0]["status"] or {}


@pytest.mark.timeout(600)
def test_edge_console_works_without_the_cloud(robot: Path, tmp_path: Path) -> None:
    config = LEFT.replace("rate_hz: 50", "rate_hz: 20, cameras: [front], image_size: 32")
    with ExitStack() as stack:
        with gateway(tmp_path / "run") as address:
            launch = stack.enter_context(edge(robot, address, "--console", "--console.port=0", config=config))
            address_file = robot / "edge" / "console.address"
            until(address_file.exists, "the console listens")
            url = address_file.read_text()
            until(lambda: "the run drives the robot" in launch.out, "it has its lease")
        page = LocalPage(url, stack)
        until(lambda: page.shows(authority="policy") and page.pictures > 2, "its status and pictures arrive")
        page.send(type="order", robot="left", order="take-over")
        until(lambda: page.shows(authority="human", operator="ana"), "a person has the robot")
        step = page.status["step"]

        def drives() -> bool:
            if time.monotonic() - page.heard_s < STALE_S:
                page.send(type="drive", robot="left", move=[0.5, 0, 0], gripper=0)
            return page.shows(phase="correction") and page.status["step"] > step

        until(drives, "a person drives it")
        page.send(type="override", robot="left", order="quarantine", reason="")
        until(lambda: page.shows() or any(not each["accepted"] for each in page.replies), "only a run's console may")
        page.stops.send(json.dumps({"type": "stop", "operator": "ana", "presses": {"left": 7}}))
        until(lambda: json.loads(page.stops.recv(timeout=END_S)).get("confirmed"), "the e-stop is confirmed")
        until(lambda: page.shows(authority="stopped"), "the robot is stopped")
        page.send(type="order", robot="left", order="re-arm")
        until(lambda: page.shows(authority="hold"), "it is armed again, and holds")
        page.send(type="order", robot="left", order="hand-back")
        until(lambda: page.shows(authority="policy"), "the policy has it again")
        pid = until(lambda: launch.pid_of("user_sys.run.edge_console"), "the console's process")
        os.kill(pid, signal.SIGKILL)
        until(lambda: launch.pid_of("user_sys.run.edge_console") not in (None, pid), "the console runs again")
        again = until(lambda: _connected(url, stack), "the page connects again at its address")
        until(lambda: again.shows(authority="policy"), "the robot went on")
        os.kill(launch.process.pid, signal.SIGTERM)
        assert launch.wait() == 0, launch.err
        assert "watch and take over: http://127.0.0.1" in launch.out
        launch.require_nothing_left()


def _connected(url: str, stack: ExitStack) -> LocalPage | None:
    try:
        return LocalPage(url, stack)
    except OSError:
        return None


@pytest.mark.slow
def test_second_edge_of_the_same_robot_waits(robot: Path, tmp_path: Path) -> None:
    run, double = tmp_path / "run", tmp_path / "double"
    shutil.copytree(robot, double)
    with gateway(run) as address, edge(robot, address) as first:
        until(lambda: "the run drives the robot" in first.out, "the first drives")
        with edge(double, address) as second:
            until(lambda: "left is driven by edge on" in second.out, "the second names the first")
            assert "the run drives the robot" not in second.out and first.out.count("its processes start") <= 1


NO_ROBOTS = "robots: []\n"
AT_SITE = "robots: [{name: left, driver: fake, task: reach}]\npolicy: {location: server}\n"
TORCH = "robots: [{name: left, driver: fake, task: reach}]\npolicy: {kind: cnn}\n"
STRANGER = "robots: [{name: right, driver: fake, task: reach}]\n"
MISTAKES = {
    "no public key at keys/gateway.pub": (LEFT, "tcp://localhost:5555"),
    "--connect 10.0.0.2:5555: expected tcp://HOST:PORT": (LEFT, "10.0.0.2:5555"),
    "--connect tcp://10.0.0.2:99999: expected tcp://HOST:PORT": (LEFT, "tcp://10.0.0.2:99999"),
    "robots: the list is empty; add the robots of this computer": (NO_ROBOTS, "tcp://localhost:5555"),
    "policy: mlp acts in a policy server, and this computer cannot read": (AT_SITE, "tcp://localhost:5555"),
    "policy: cnn acts in a policy server, and this computer cannot read": (TORCH, "tcp://localhost:5555"),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_impossible_edge_config_is_refused(said: str, robot: Path) -> None:
    config, endpoint = MISTAKES[said]
    (robot / "robots.yaml").write_text(config)
    with user_sys(robot, "edge", "robots.yaml", "--connect", endpoint) as launch:
        assert launch.wait() == 2
        assert launch.err.startswith("user-sys: error: ") and said in launch.err and launch.err.count("\n") == 1


RUN = """
robots: [{name: left, driver: fake, task: reach}]
remote_robots: [{name: right, driver: fake, task: reach, real_time: true}, {name: other, driver: fake, task: reach}]
learner: {max_training_s: 8}
"""


def test_edge_reads_a_remote_robot_from_the_runs_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    mine = load_edge_config(path, ["right"], ["--robots.0.options.rate_hz=20"])
    (robot,) = mine.robots
    assert (robot.name, robot.real_time, robot.options) == ("right", True, {"rate_hz": 20})
    assert mine.demonstrations == RunConfig().demonstrations, "as many as the run's own robots show"
    with pytest.raises(ConfigError, match=r"--robot left: .*run.yaml names \['other', 'right'\] under remote_robots"):
        load_edge_config(path, ["left"], [])


def test_remote_robot_without_allowed_key_is_refused(tmp_path: Path) -> None:
    remote_robots = (RobotConfig(name="right"), RobotConfig(name="other"))
    with pytest.raises(RunError, match="remote_robots: the key of right is not allowed"):
        require_allowed(remote_robots, None)
    Keyring(tmp_path).allow(new_keypair().public, "right", "robot")
    with pytest.raises(RunError, match="keys allow other --role robot"):
        require_allowed(remote_robots, tmp_path)
    require_allowed(remote_robots[:1], tmp_path)


def test_public_gateway_without_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cloud.yaml").write_text(CLOUD)
    with user_sys(tmp_path, "cloud", "cloud.yaml", "--gateway.endpoint=tcp://0.0.0.0:0") as launch:
        assert launch.wait() == 2
        assert "the gateway has no key there: make one with `user-sys keys new gateway --folder keys`" in launch.err
    assert not (tmp_path / "runs").exists()


RUNNING = ProcessStatus(state=ProcessState.RUNNING, pid=7)
WAITING = ProcessStatus(state=ProcessState.WAITING, restarts=3, last_exit=4)
KILLED = ProcessStatus(state=ProcessState.WAITING, restarts=3, last_exit=-9)
LEFT_FOR_GOOD = ProcessStatus(state=ProcessState.STOPPED, last_exit=0)


def report(link: str, doing: SessionActivity, reason: str = "") -> SessionReport:
    return SessionReport(
        pid=7, link=link, reason=reason, doing=doing, waiting_chunks=0, waiting_bytes=0, dropped_episodes=0
    )


@pytest.mark.parametrize(
    ("driver", "session", "said", "text"),
    [
        (RUNNING, RUNNING, None, "its processes start"),
        (RUNNING, RUNNING, report("connecting", "waiting for its lease"), "connects to tcp://desk:1"),
        (RUNNING, RUNNING, report("open", "waiting for its lease"), "waiting until the robot is free"),
        (
            RUNNING,
            RUNNING,
            report("open", "waiting for weights"),
            "until then only an operator moves the robot",
        ),
        (RUNNING, RUNNING, report("open", "driving"), "the run drives the robot"),
        (RUNNING, RUNNING, report("lost", "driving", "silent"), "unreachable (silent): the robot continues"),
        (RUNNING, RUNNING, report("lost", "held without a lease", "silent"), "expired, and the robot is held until"),
        (RUNNING, RUNNING, report("lost", "waiting for its lease", "closed"), "trying again; the robot is held"),
        (WAITING, RUNNING, None, "its driver process has ended and is restarted: no such device"),
        (RUNNING, KILLED, None, "its session process has ended and is restarted: killed by signal 9"),
        (RUNNING, WAITING, None, "its session process has ended and is restarted: this key is not allowed"),
    ],
)
def test_robot_health_text(
    driver: ProcessStatus, session: ProcessStatus, said: SessionReport | None, text: str
) -> None:
    words = {"driver": "no such device", "session": "this key is not allowed"}
    assert text in robot_health("tcp://desk:1", driver, session, said, words).text
    assert robot_health("tcp://desk:1", driver, LEFT_FOR_GOOD, said, words) is RUN_FINISHED


def test_refused_robot_prints_the_reason_once() -> None:
    words = {"driver": "", "session": "session.failed SessionRefused: left is driven by edge on desk"}
    refused = robot_health("tcp://desk:1", RUNNING, WAITING, None, words)
    assert refused.text == "left is driven by edge on desk; it tries again, and the robot is held"
    again = robot_health("tcp://desk:1", RUNNING, RUNNING, None, words)
    assert is_expected_restart(again, refused) and not is_expected_restart(refused, again)
    came_in = robot_health("tcp://desk:1", RUNNING, RUNNING, report("open", "driving"), words)
    assert not is_expected_restart(came_in, refused) and not is_expected_restart(again, came_in)


@pytest.mark.slow
def test_site_trains_through_a_relay(robot: Path, tmp_path: Path) -> None:
    """The whole way with ``user-sys relay`` in between, which is killed once."""
    run, lab = tmp_path / "run", tmp_path / "lab"
    pair = new_keypair()
    save_keypair(pair, lab / "keys", "lab")
    Keyring(run / "keys").revoke("left")
    Keyring(lab / "keys").allow(load_public_key(robot / "keys" / "left.pub"), "left", "robot")
    endpoint = free_endpoint("tcp://127.0.0.1:0")
    (lab / "relay.yaml").write_text(f"name: lab\nendpoint: {endpoint}\n")
    near = GatewayAddress(endpoint=endpoint, public_key=pair.public)
    with gateway(run) as address, ExitStack() as stack:
        (lab / "keys" / "gateway.pub").write_text(address.public_key)
        relay = stack.enter_context(user_sys(lab, "relay", "relay.yaml", "--connect", address.endpoint))
        until(lambda: relay.out.count("does not allow this key") == 1, "it prints that the gateway refuses it")
        Keyring(run / "keys").allow(pair.public, "lab", "relay", robots=("left",))
        far = stack.enter_context(edge(robot, near))
        until(lambda: len(headers(run / "store")) > 5, "it delivers through the relay")
        os.kill(relay.process.pid, signal.SIGKILL)
        until(lambda: "is unreachable" in far.out, "the loss of the link is printed")
        stored = len(headers(run / "store"))
        again = stack.enter_context(user_sys(lab, "relay", "relay.yaml", "--connect", address.endpoint))
        until(lambda: len(headers(run / "store")) > stored + 5, "it delivers again")
        os.kill(far.process.pid, signal.SIGTERM)
        assert far.wait() == 0, far.err
        os.kill(again.process.pid, signal.SIGTERM)
        assert again.wait() == 0, again.err
        assert "lab: left connected" in again.out
    require_delivered(run, robot / "edge" / "left" / "outbox")


@pytest.mark.slow
def test_two_sites_train_one_run(robot: Path, tmp_path: Path) -> None:
    """The whole way: keys made and exchanged by command, cloud in one folder, robot in another."""
    cloud = tmp_path / "cloud"
    cloud.mkdir()
    (cloud / "cloud.yaml").write_text(CLOUD)
    for argv in (["keys", "new", "gateway"], ["keys", "allow", "left", "--role", "robot", "--public"]):
        public = [(robot / "keys" / "left.pub").read_text().strip()] if argv[1] == "allow" else []
        with user_sys(cloud, *argv, *public) as launch:
            assert launch.wait() == 0, launch.err
    with user_sys(cloud, "cloud", "cloud.yaml", "--name=pair", "--gateway.endpoint=tcp://0.0.0.0:0") as launch:
        until(lambda: "on a robot's computer" in launch.out, "it invites robots")
        endpoint = next(line.split()[-1] for line in launch.out.splitlines() if "--connect" in line)
        local = f"tcp://127.0.0.1:{endpoint.rpartition(':')[2]}"
        public_key = (cloud / "keys" / "gateway.pub").read_text()
        with edge(robot, GatewayAddress(endpoint=local, public_key=public_key)) as far:
            assert launch.wait() == 0, launch.err
            assert far.wait() == 0, far.err
            assert "left: the run is over" in far.out
            far.require_nothing_left()
        assert "the files of this run are in runs/pair" in launch.out and launch.err == ""
        launch.require_nothing_left()
    require_delivered(cloud / "runs" / "pair", robot / "edge" / "left" / "outbox")
