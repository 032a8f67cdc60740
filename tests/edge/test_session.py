"""Sessions, gateways and drivers may be killed: no acknowledged chunk is lost or stored twice."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from edge_kit import END_S, NodeProcess, error_lines, node, until

from user_sys.algorithms.rlpd import Rlpd, RlpdConfig
from user_sys.compose import PolicyConfig, RobotConfig, robot_spec
from user_sys.config import load, save
from user_sys.edge.outbox import Outbox
from user_sys.edge.recorder import RecorderConfig
from user_sys.edge.session import SessionConfig
from user_sys.edge.status import read_session_report
from user_sys.episode import Chunk, EpisodeSource, Phase, decode_chunk
from user_sys.gateway.config import GatewayConfig
from user_sys.messages import PROTOCOL_VERSION, Hello, OperatorCommand, OperatorReply, RobotStatus, StopRun
from user_sys.robot_records import LEARNER
from user_sys.run.config import RunConfig, create_run_folder
from user_sys.run.prepare import CONSOLE, free_endpoint, prepare_run_folder
from user_sys.run.topology import LOOPBACK, policy_process
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.flow_control import MIN_BURST_BYTES
from user_sys.tunnel.keys import GATEWAY_NAME, load_keypair, load_public_key
from user_sys.tunnel.limits import ChannelLimits, TunnelLimits
from user_sys.weights.publisher import PublishConfig, Publisher
from user_sys.weights.signing import new_signer

pytestmark = pytest.mark.usefixtures("runtime")

ROBOT = RobotConfig(name="fake-0", driver="fake")


class FollowedLog:
    """Every chunk that was ever in a log, as often as it was there. Each is read once."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path, self._stack = path, stack
        self._reader: LogReader | None = None
        self._found: list[Chunk] = []

    def chunks(self) -> list[Chunk]:
        if self._reader is None:
            if not any(self._path.glob("*.seg")):
                return []
            self._reader = self._stack.enter_context(LogReader.open(self._path))
        refs = self._reader.records()
        self._found += [decode_chunk(bytes(self._reader.read(ref))) for ref in refs if ref.kind == CHUNK_KIND]
        return self._found


class Site:
    """A run folder, and the processes that a test starts and kills in it."""

    def __init__(self, folder: Path, stack: ExitStack, **settings: Any) -> None:
        self._stack = stack
        config = RunConfig(**{"robots": (ROBOT,), "runs": folder, **settings})
        self.folder, self.card = create_run_folder(config, "run", free_endpoint("tcp://127.0.0.1:0"))
        prepare_run_folder(config, self.folder, self.card)
        self.state = self.folder.edge(ROBOT.name)
        self._logs = 0
        self._store, self._outbox = FollowedLog(self.folder.store, stack), FollowedLog(self.state / "outbox", stack)

    def start(self, *argv: object) -> NodeProcess:
        self._logs += 1
        log = self.folder.path / "logs" / f"{self._logs}-{argv[0]}.log"
        return self._stack.enter_context(node(argv, log))

    def gateway(self) -> NodeProcess:
        return self.start("user_sys.gateway", "--run", self.folder.path)

    def driver(self) -> NodeProcess:
        return self.start("user_sys.edge.driver_server", self.state / "robot.yaml", self.state)

    def session(self) -> NodeProcess:
        return self.start("user_sys.edge.session", self.state / "session.yaml")

    def policy(self) -> NodeProcess:
        node = policy_process(self.folder, "cpu", {}, LOOPBACK)
        return self.start(*node.argv[2:])

    def client(self, name: str) -> TunnelClient:
        hello = Hello(protocol=PROTOCOL_VERSION, role="learner" if name == LEARNER else "console", name=name)
        keys = load_keypair(self.folder.keys / f"{name}.key")
        gateway_key = load_public_key(self.folder.keys / f"{GATEWAY_NAME}.pub")
        client = self._stack.enter_context(TunnelClient(self.card.endpoint, keys, gateway_key, hello))
        client.wait_open(END_S)
        return client

    def chunks(self) -> list[Chunk]:
        """Every chunk in the store, as often as it is there."""
        return self._store.chunks()

    def recorded(self) -> set[tuple[str, int]]:
        """Every chunk that was ever in the outbox."""
        return {key(chunk) for chunk in self._outbox.chunks()}

    def recorded_bytes(self) -> int:
        return sum(len(chunk.encode()) for chunk in self._outbox.chunks())

    def stored(self) -> Counter[tuple[str, int]]:
        return Counter(key(chunk) for chunk in self.chunks())

    def unsent(self) -> int:
        with Outbox.open(self.state / "outbox") as outbox:
            return len(outbox)


def key(chunk: Chunk) -> tuple[str, int]:
    return chunk.header.episode, chunk.header.index


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, stack)


def threads(session: NodeProcess) -> list[tuple[str, int]]:
    """Name and scheduling policy of each thread; the main thread is the control loop."""
    pid = session.process.pid
    tasks = [(int(task.name), (task / "comm").read_text().strip()) for task in Path(f"/proc/{pid}/task").iterdir()]
    return [("loop" if task == pid else name, os.sched_getscheduler(task)) for task, name in tasks]


def require_whole(site: Site) -> None:
    """The store has each recorded chunk exactly once, and no episode has a gap."""
    with LogReader.open(site.folder.store) as reader:
        refs = [ref for ref in reader.records() if ref.kind == CHUNK_KIND]
        stored = Counter(key(decode_chunk(bytes(reader.read(ref)))) for ref in refs)
    assert stored == site.stored() and set(stored.values()) == {1}
    assert set(stored) == site.recorded()
    assert site.unsent() == 0
    steps: Counter[str] = Counter()
    for chunk in sorted(site.chunks(), key=key):
        assert chunk.header.first_step == steps[chunk.header.episode]
        steps[chunk.header.episode] += chunk.header.steps


def test_session_delivers_its_steps_and_ends_with_the_run(site: Site) -> None:
    site.gateway()
    driver, session = site.driver(), site.session()
    console, learner = site.client(CONSOLE), site.client(LEARNER)
    until(lambda: len(site.stored()) >= 10, "experience arrives")

    spec = robot_spec(ROBOT)
    weights = Rlpd(RlpdConfig(), spec, seed=0).policy_weights()
    with Publisher(learner, new_signer(), PublishConfig()) as publisher:
        publisher.publish(weights, 7, updates=100)
        until(lambda: any((c.columns["policy_version"] == 7).any() for c in site.chunks()), "version 7 acts")

    console.send(StopRun(reason="the test is over"))
    assert session.process.wait(END_S) == 0
    assert error_lines(session.log) == []
    assert driver.log.count("session.attached") == 1
    require_whole(site)
    for chunk in site.chunks():
        columns, header = chunk.columns, chunk.header
        assert (header.source, header.robot, header.embodiment) == (EpisodeSource.ONLINE, "fake-0", spec.embodiment)
        assert (columns["phase"] == Phase.POLICY).all() and set(columns["policy_version"].tolist()) <= {-1, 7}
        assert (columns["t_capture_ns"] <= columns["t_inference_ns"]).all()
        assert (columns["t_inference_ns"] <= columns["t_command_ns"]).all()
        assert (np.isfinite(columns["log_prob"]) == (columns["policy_version"] == 7)).all()
    assert len({chunk.header.seed for chunk in site.chunks()}) == len({c.header.episode for c in site.chunks()})


@pytest.fixture
def small_disk(site: Site) -> Iterator[Path]:
    """The outbox's disk, of 20 MB."""
    disk = site.state / "outbox"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", disk]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("space_again", [False, True])
def test_full_disk_holds_the_robot_and_loses_no_step(site: Site, small_disk: Path, space_again: bool) -> None:
    site.gateway()
    site.driver()
    session = site.session()
    console = site.client(CONSOLE)
    until(lambda: site.stored(), "experience arrives")
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass

    def holds() -> bool:
        status: RobotStatus | None = None
        while (message := console.receive(0.5)) is not None:
            status = message if isinstance(message, RobotStatus) else status
        return status is not None and f"waiting for disk space in {small_disk}: needs" in status.note

    until(holds, "the robot says that it waits")
    assert "recording.paused robot=fake-0 waiting for disk space in" in session.log
    if space_again:
        session.end(signal.SIGKILL)
        session = site.session()
        session.wait_for_log("No space left on device")
        assert "session.waiting" in session.log and session.process.poll() is None
        before = len(site.stored())
        filler.unlink()
        until(lambda: len(site.stored()) > before, "experience arrives again")
    console.send(StopRun(reason="the test is over"))
    assert session.process.wait(END_S) == 0
    assert "unwritten" not in session.log
    require_whole(site)


def test_control_loop_and_its_socket_thread_get_realtime(tmp_path: Path) -> None:
    """If libzmq's thread of the driver's socket waits for a CPU, so does the robot."""
    with ExitStack() as stack:
        site = Site(tmp_path, stack, robots=(replace(ROBOT, real_time=True),))
        site.gateway()
        site.driver()
        session = site.session()
        until(lambda: site.stored(), "experience arrives")
        found = threads(session)
        first = Counter(name for name, policy in found if policy & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO)
        granted = Counter({"loop": 1, "ZMQbg/IO/0": 1, "ZMQbg/Reaper": 1})
        assert first == (Counter() if "realtime.refused" in session.log else granted)
        assert sum(name == "ZMQbg/IO/0" for name, _ in found) > 1, "the tunnel has its own"


def test_session_of_another_run_waits_for_the_robot(site: Site) -> None:
    site.gateway()
    driver, session = site.driver(), site.session()
    console = site.client(CONSOLE)
    until(lambda: site.stored(), "experience arrives")
    other = replace(load(SessionConfig, site.state / "session.yaml"), holder="run beta", state=site.state / "beta")
    save(other, site.state / "beta.yaml")
    rival = site.start("user_sys.edge.session", site.state / "beta.yaml")
    rival.wait_for_log(f"session.waiting fake-0 is driven on this machine for {site.state}", within_s=60)
    before = len(site.stored())
    until(lambda: len(site.stored()) > before, "the first session goes on")
    assert driver.wait_for_log("session.attached").count("session.attached") == 1
    console.send(StopRun(reason="the test is over"))
    assert session.process.wait(END_S) == 0
    assert rival.process.poll() is None and rival.end() == 0
    require_whole(site)


def test_successor_of_a_killed_session_takes_over(site: Site) -> None:
    site.gateway()
    driver, session = site.driver(), site.session()
    console = site.client(CONSOLE)
    session.wait_for_log("lease.granted robot=fake-0 token=1")
    until(lambda: len(site.stored()) >= 5, "experience arrives")
    held = driver.log.count("watchdog.hold")
    session.end(signal.SIGKILL)
    acknowledged = set(site.stored())
    driver.wait_for_log("watchdog.hold", times=held + 1)

    successor = site.session()
    successor.wait_for_log("lease.granted robot=fake-0 token=2")
    driver.wait_for_log("token=2")
    until(lambda: len(site.stored()) >= len(acknowledged) + 5, "experience goes on")
    console.send(StopRun(reason="the test is over"))
    assert successor.process.wait(END_S) == 0
    assert acknowledged <= set(site.stored())
    require_whole(site)


def test_session_continues_without_its_gateway(site: Site) -> None:
    gateway = site.gateway()
    site.driver()
    session = site.session()
    until(lambda: len(site.stored()) >= 5, "experience arrives")
    gateway.end(signal.SIGKILL)
    acknowledged, recorded = set(site.stored()), len(site.recorded())
    until(lambda: len(site.recorded()) >= recorded + 20, "the robot goes on acting")
    assert set(site.stored()) == acknowledged

    site.gateway()
    console = site.client(CONSOLE)
    until(lambda: site.recorded() - set(site.stored()) == set() or len(site.stored()) > recorded + 20, "it delivers")
    console.send(StopRun(reason="the test is over"))
    assert session.process.wait(END_S) == 0
    assert acknowledged <= set(site.stored())
    require_whole(site)
    assert "lease.granted robot=fake-0 token=1" in session.log and "token=2" not in session.log


def test_expired_lease_holds_the_robot_until_its_renewal(tmp_path: Path) -> None:
    with ExitStack() as stack:
        site = Site(tmp_path, stack, gateway=GatewayConfig(lease_ttl_s=2.0))
        gateway, driver, session = site.gateway(), site.driver(), site.session()

        def does(what: str) -> bool:
            report = read_session_report(ROBOT.name, session.process.pid)
            return report is not None and report.doing == what

        until(lambda: len(site.recorded()) > 3, "steps are recorded")
        gateway.end(signal.SIGKILL)
        driver.wait_for_log("lease.expired robot=fake-0")
        until(lambda: does("held without a lease"), "the session reports it")
        site.gateway()
        until(lambda: does("driving"), "the lease is renewed")
        stored = len(site.recorded())
        until(lambda: len(site.recorded()) > stored + 2, "the robot is driven again")
        assert session.process.poll() is None and "driver.lost" not in session.log


def test_session_keeps_its_bandwidth_limit(tmp_path: Path) -> None:
    """At a byte a second only the burst passes; the other chunks wait in the outbox."""
    filmed = replace(ROBOT, options={"cameras": ["front"]})
    raw, slow = RecorderConfig(raw_cameras=("front",)), TunnelLimits(experience=ChannelLimits(bytes_per_s=1.0))
    with ExitStack() as stack:
        site = Site(tmp_path, stack, robots=(filmed,), recorder=raw, tunnel=slow)
        for start in (site.gateway, site.driver, site.session):
            start()
        until(lambda: site.recorded_bytes() > 4 * MIN_BURST_BYTES and site.stored(), "it records, and delivers some")
        sizes = [len(chunk.encode()) for chunk in site.chunks()]
        assert sum(sizes) <= MIN_BURST_BYTES + max(sizes)


def test_e_stop_reaches_a_driver_after_its_restart(site: Site) -> None:
    site.gateway()
    driver, session = site.driver(), site.session()
    console = site.client(CONSOLE)
    until(lambda: site.stored(), "experience arrives")
    driver.end(signal.SIGKILL)
    console.send(OperatorCommand(robot="fake-0", operator="ada", order="e-stop", sequence=1))
    session.wait_for_log("e-stop.undelivered")

    again = site.driver()
    again.wait_for_log("estop.latched by=ada")
    again.wait_for_log("session.attached")
    stopped = len(site.recorded())
    console.send(OperatorCommand(robot="fake-0", operator="ada", order="re-arm", sequence=2))
    again.wait_for_log("estop.rearmed by=ada")
    until(lambda: _authority(console) == "hold", "nobody drives after a re-arm")
    assert len(site.recorded()) == stopped
    console.send(OperatorCommand(robot="fake-0", operator="ada", order="hand-back", sequence=3))
    until(lambda: len(site.recorded()) >= stopped + 5, "the policy drives again")
    console.send(StopRun(reason="the test is over"))
    assert session.process.wait(END_S) == 0
    require_whole(site)


def test_repeats_of_a_confirmed_e_stop_do_nothing(site: Site) -> None:
    site.gateway()
    driver, session = site.driver(), site.session()
    console = site.client(CONSOLE)
    until(lambda: site.stored(), "experience arrives")
    press = OperatorCommand(robot="fake-0", operator="ada", order="e-stop", sequence=2, press=7)
    assert _confirmed(console, press)
    assert driver.log.count("estop.latched by=ada") == 1
    console.send(OperatorCommand(robot="fake-0", operator="bob", order="re-arm", sequence=1))
    until(
        lambda: _refused(console, "the e-stop was pressed again since"), "an older re-arm that comes later is refused"
    )
    console.send(OperatorCommand(robot="fake-0", operator="bob", order="re-arm", sequence=3))
    until(lambda: _authority(console) == "hold", "nobody drives after a re-arm")
    console.send(OperatorCommand(robot="fake-0", operator="bob", order="hand-back", sequence=4))
    until(lambda: _authority(console) == "policy", "the policy drives again")
    recorded = len(site.recorded())
    assert _confirmed(console, msgspec.structs.replace(press, sequence=5)), "a repeat that comes late"
    until(lambda: len(site.recorded()) > recorded + 3, "the policy drives on")
    assert driver.log.count("estop.latched") == 1
    assert _confirmed(console, msgspec.structs.replace(press, sequence=6, press=8))
    assert driver.log.count("estop.latched by=ada") == 2
    console.send(StopRun(reason="the test is over"))
    assert session.process.wait(END_S) == 0


def _confirmed(console: TunnelClient, press: OperatorCommand) -> bool:
    console.send(press)
    reply = console.receive_stop(END_S)
    assert isinstance(reply, OperatorReply) and reply.press == press.press
    return reply.accepted


def _refused(console: TunnelClient, reason: str) -> bool:
    message = console.receive(1.0)
    return isinstance(message, OperatorReply) and not message.accepted and message.reason == reason


def _authority(console: TunnelClient) -> str:
    message = console.receive(1.0)
    return message.authority if isinstance(message, RobotStatus) else ""


def test_invalid_setting_is_logged_in_one_line(site: Site) -> None:
    (site.state / "session.yaml").write_text("robott: fake-0\n")
    session = site.session()
    assert session.process.wait(END_S) == 2
    (line,) = error_lines(session.log)
    assert "robott: unknown key; did you mean 'robot'?" in line


def test_robot_without_exploration_holds_until_its_first_weights(tmp_path: Path) -> None:
    with ExitStack() as stack:
        site = Site(tmp_path, stack, robots=(replace(ROBOT, explore="off"),))
        site.gateway()
        site.driver()
        session = site.session()
        console, learner = site.client(CONSOLE), site.client(LEARNER)
        until(lambda: _note(console).startswith("waiting for weights"), "the console shows the note")
        session.wait_for_log("session.awaits_weights robot=fake-0")
        until(lambda: _doing(session) == "waiting for weights", "the session report shows it")
        assert site.recorded() == set(), "nothing was done that could be recorded"
        with Publisher(learner, new_signer(), PublishConfig()) as publisher:
            publisher.publish(Rlpd(RlpdConfig(), robot_spec(ROBOT), seed=0).policy_weights(), 7, updates=100)
            until(lambda: site.stored(), "it acts")
        session.wait_for_log("session.has_weights robot=fake-0")
        console.send(StopRun(reason="the test is over"))
        assert session.process.wait(END_S) == 0
        require_whole(site)
        assert all((chunk.columns["policy_version"][:-1] == 7).all() for chunk in site.chunks())


def test_killed_policy_server_holds_the_robot_and_operators_may_drive(tmp_path: Path) -> None:
    """The timeout is long enough for a busy machine."""
    slow = replace(ROBOT, options={"rate_hz": 5.0})
    with ExitStack() as stack:
        site = Site(tmp_path, stack, robots=(slow,), policy=PolicyConfig(location="server", timeout_fraction=0.9))
        site.gateway()
        driver, session = site.driver(), site.session()
        console, learner = site.client(CONSOLE), site.client(LEARNER)
        until(lambda: "is not found yet; the robot holds" in _note(console), "the console shows the note")
        policy = site.policy()
        until(lambda: site.stored(), "it explores")
        with Publisher(learner, new_signer(), PublishConfig()) as publisher:
            publisher.publish(Rlpd(RlpdConfig(), robot_spec(slow), seed=0).policy_weights(), 7, updates=100)
            until(lambda: any((c.columns["policy_version"] == 7).any() for c in site.chunks()), "version 7 acts")
        policy.end(signal.SIGKILL)
        until(lambda: "does not answer; the robot holds" in _note(console), "the console shows the note")
        session.wait_for_log("session.policy_unavailable robot=fake-0")
        console.send(OperatorCommand(robot="fake-0", operator="ada", order="take-over", sequence=1))
        until(lambda: _authority(console) == "human", "a person drives")
        console.send(OperatorCommand(robot="fake-0", operator="ada", order="e-stop", sequence=2))
        driver.wait_for_log("estop.latched by=ada")
        console.send(OperatorCommand(robot="fake-0", operator="ada", order="re-arm", sequence=3))
        until(lambda: _authority(console) == "hold", "nobody drives after a re-arm")
        console.send(OperatorCommand(robot="fake-0", operator="ada", order="hand-back", sequence=4))
        until(lambda: "does not answer; the robot holds" in _note(console), "it holds again")
        recorded = site.recorded()
        site.policy()
        until(lambda: len(site.recorded()) > len(recorded), "it goes on")
        console.send(StopRun(reason="the test is over"))
        assert session.process.wait(END_S) == 0
        require_whole(site)
        later = [chunk.columns for chunk in site.chunks() if key(chunk) not in recorded]
    assert "token=2" not in session.log
    assert {int(v) for columns in later for v in columns["policy_version"]} <= {7, -1}
    assert any((columns["policy_version"] == 7).any() for columns in later)


def _doing(session: NodeProcess) -> str:
    report = read_session_report(ROBOT.name, session.process.pid)
    return report.doing if report else ""


def _note(console: TunnelClient) -> str:
    message = console.receive(1.0)
    return message.note if isinstance(message, RobotStatus) else ""
