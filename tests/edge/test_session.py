"""Sessions, gateways and drivers may be killed: no acknowledged chunk is lost or stored twice."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from edge_kit import END_S, NodeProcess, error_lines, until
from session_kit import ROBOT, Site, key

from hal.spec import STATE
from user_sys.algorithms.algorithm import policy_arrays
from user_sys.compose import PolicyConfig, RobotConfig, TaskConfig, robot_spec
from user_sys.config import load, save
from user_sys.edge.help_requests import HelpConfig, InterventionConfig
from user_sys.edge.session import EpisodeStarts, HoldRecord, SessionConfig
from user_sys.edge.status import read_session_report
from user_sys.episode import EpisodeSource, Phase, decode_chunk
from user_sys.gateway.config import GatewayConfig
from user_sys.messages import OperatorCommand, OperatorReply, PreviewRequest, RobotStatus, StopRun
from user_sys.policies.mlp import MlpPolicy
from user_sys.rewards.networks import save_network
from user_sys.rewards.progress import ProgressNet
from user_sys.rewards.reward import FORMAT, RewardMetadata
from user_sys.robot_records import LEARNER
from user_sys.run.prepare import CONSOLE
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND
from user_sys.tunnel.client import TunnelClient
from user_sys.weights.publisher import PublishConfig, Publisher
from user_sys.weights.signing import new_signer

pytestmark = pytest.mark.usefixtures("runtime")


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
    assert set(stored) == site.recorded()  # of which some were seen in the outbox only
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
    console.send(PreviewRequest(robot=ROBOT.name, rate_hz=1.0, ttl_s=60.0, pose=True))
    poses = iter(lambda: console.receive(1.0), StopIteration)
    pose = next(each.state for each in poses if isinstance(each, RobotStatus) and each.state)
    assert len(pose) == len(spec.feature(STATE).labels)
    weights = policy_arrays(MlpPolicy.make_module(spec))
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


def test_robot_requests_help_if_a_model_sees_no_progress(tmp_path: Path) -> None:
    model = tmp_path / "progress.safetensors"
    seen = {"cameras": ("front",), "tasks": ("reach",), "temperature": 1.0, "successes": 5, "failures": 0}
    save_network(model, ProgressNet(1), RewardMetadata(format=FORMAT, **seen))  # untrained: all pictures look alike
    robot = replace(ROBOT, real_time=True, options={"rate_hz": 20, "cameras": ["front"]})
    help_config = HelpConfig(progress=str(model), progress_steps=8)
    with ExitStack() as stack:
        site = Site(tmp_path, stack, robots=(robot,), intervention=InterventionConfig(help=help_config))
        site.gateway(), site.driver(), site.session()
        console = site.client(CONSOLE)

        def request() -> str:
            message = console.receive(1.0)
            return message.help if isinstance(message, RobotStatus) and message.authority == "requesting" else ""

        assert until(request, "it requests help") == "no progress over 8 steps"


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

    def holds() -> bool:
        """While delivered chunks leave space, it is filled again."""
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        message = console.receive(0.5)
        wanted = f"waiting for disk space in {small_disk}: needs"
        return isinstance(message, RobotStatus) and wanted in message.note

    until(holds, "the robot says that it waits")
    assert "waiting for disk space in" in session.log
    if space_again:
        session.end(signal.SIGKILL)
        session = site.session()
        session.wait_for_log("lease.granted")
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


def _pause(site: Site) -> TunnelClient:
    """A console that has paused the robot."""
    console = site.client(CONSOLE)
    until(lambda: site.stored(), "experience arrives")
    console.send(OperatorCommand(robot="fake-0", operator="ada", order="pause", sequence=1))
    until(lambda: _authority(console) == "hold", "the robot holds")
    return console


def _hand_back(site: Site, console: TunnelClient, session: NodeProcess) -> None:
    """The status says that a person has the robot, which is not driven until the hand-back. Ends the run."""
    until(lambda: "holds until a person hands back" in _hold_note(console), "the status says why it holds")
    recorded = len(site.recorded())
    console.send(OperatorCommand(robot="fake-0", operator="ada", order="hand-back", sequence=2))
    until(lambda: len(site.recorded()) >= recorded + 3, "the policy drives again")
    until(lambda: isinstance(found := console.receive(1.0), RobotStatus) and not found.note, "the error is over")
    console.send(StopRun(reason="the test is over"))
    assert session.process.wait(END_S) == 0


def test_paused_robot_is_not_reset_after_an_error(site: Site) -> None:
    site.gateway()
    driver, session = site.driver(), site.session()
    console = _pause(site)
    driver.end(signal.SIGKILL)
    session.wait_for_log("driver.lost")
    console.send(OperatorCommand(robot="fake-0", operator="ada", order="hand-back", sequence=2))
    until(lambda: "the robot is lost" in _refusal(console), "a hand-back is refused while there is no robot")
    for _ in range(2):
        until(lambda: "the robot is lost" in _note(console), "the status goes on", 60.0)
    site.driver().wait_for_log("session.attached")
    _hand_back(site, console, session)


def test_paused_robot_is_not_reset_after_the_loss_of_lease_and_driver(tmp_path: Path) -> None:
    with ExitStack() as stack:
        site = Site(tmp_path, stack, gateway=GatewayConfig(lease_ttl_s=2.0))
        gateway, driver, session = site.gateway(), site.driver(), site.session()
        console = _pause(site)
        gateway.end(signal.SIGKILL)
        driver.wait_for_log("lease.expired")
        driver.end(signal.SIGKILL)
        session.wait_for_log("driver.lost")
        site.driver(), site.gateway()
        _hand_back(site, console, session)


def test_paused_robot_is_not_reset_by_the_next_session(site: Site) -> None:
    site.gateway(), site.driver()
    first = site.session()
    console = _pause(site)
    first.end(signal.SIGKILL)
    _hand_back(site, console, site.session())


def test_hold_ends_with_its_run(site: Site) -> None:
    site.gateway(), site.driver()
    session = site.session()
    console = _pause(site)
    assert (site.state / "held").exists()
    console.send(StopRun(reason="the test is over"))
    assert session.process.wait(END_S) == 0
    assert not (site.state / "held").exists(), "the next run drives the robot"


def test_hold_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = list[tuple[int, bool]](), os.fsync

    def note(handle: int) -> None:
        synced.append((os.fstat(handle).st_ino, (tmp_path / "held").exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    with HoldRecord(tmp_path / "held") as record:
        record.set(True)
        until(lambda: record.is_set)
        assert (tmp_path.stat().st_ino, True) in synced
        assert HoldRecord(tmp_path / "held").is_set
        record.set(False)
    assert not HoldRecord(tmp_path / "held").is_set
    assert synced[-1] == (tmp_path.stat().st_ino, False)


def test_hold_that_could_not_be_written_is_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "state"
    folder.write_text("no folder")
    with HoldRecord(folder / "held") as record:
        record.set(True)
        until(lambda: "hold_not_recorded" in caplog.text)
        assert not record.is_set
        folder.unlink()
        folder.mkdir()
        until(lambda: record.is_set)
    assert (folder / "held").exists()


@pytest.mark.parametrize("is_held", [True, False])
def test_hold_that_changes_back_after_a_half_failed_write_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_held: bool
) -> None:
    """The file has changed, and its folder was not synced."""

    def fail(_: int) -> None:
        raise OSError("the disk is gone")

    path = tmp_path / "held"
    if is_held:
        path.touch()
    with HoldRecord(path) as record:
        with monkeypatch.context() as disk:
            disk.setattr(os, "fsync", fail)
            record.set(not is_held)
            until(lambda: "hold_not_recorded" in caplog.text)
            record.set(is_held)
        until(lambda: record.is_set is is_held)
        assert path.exists() is is_held


def test_scripted_operator_leaves_no_hold_for_the_next_session(tmp_path: Path) -> None:
    """It drives in episodes only, and would never hand back."""
    operator = {"kind": "scripted", "after_steps": 2}
    with ExitStack() as stack:
        site = Site(tmp_path, stack, robots=(replace(ROBOT, teleoperators=(operator,)),))
        site.gateway(), site.driver(), site.session()

        def is_corrected() -> bool:
            assert not (site.state / "held").exists()
            return any((chunk.columns["phase"] == Phase.CORRECTION).any() for chunk in site.chunks())

        until(is_corrected, "it drives")


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
    renamed = msgspec.structs.replace(press, sequence=5, operator="ada 2")
    assert _confirmed(console, renamed), "of a page that has another name since it connected again"
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
    return _refusal(console) == reason


def _refusal(console: TunnelClient) -> str:
    message = console.receive(1.0)
    return message.reason if isinstance(message, OperatorReply) and not message.accepted else ""


def _hold_note(console: TunnelClient) -> str:
    message = console.receive(1.0)
    return message.note if isinstance(message, RobotStatus) and message.authority == "hold" else ""


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
        session.wait_for_log("session.policy_unavailable robot=fake-0 waiting for weights")
        until(lambda: _doing(session) == "waiting for weights", "the session report shows it")
        assert site.recorded() == set(), "nothing was done that could be recorded"
        with Publisher(learner, new_signer(), PublishConfig()) as publisher:
            publisher.publish(policy_arrays(MlpPolicy.make_module(robot_spec(ROBOT))), 7, updates=100)
            until(lambda: site.stored(), "it acts")
        session.wait_for_log("session.policy_available robot=fake-0")
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
            publisher.publish(policy_arrays(MlpPolicy.make_module(robot_spec(slow))), 7, updates=100)
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


def test_old_tasks_are_evaluated_without_exploration_and_not_practised(tmp_path: Path) -> None:
    tasks: tuple[str | TaskConfig, ...] = (
        "reach",
        TaskConfig("lift", evaluated=True),
        TaskConfig("place", evaluated=True),
    )
    robot = RobotConfig(name=ROBOT.name, driver="sim", task=tasks, evaluate_every=2, options={"cameras": []})
    with ExitStack() as stack:
        site = Site(tmp_path, stack, robots=(replace(robot, explore="off"),))
        site.gateway()
        site.driver()
        session = site.session()
        console, learner = site.client(CONSOLE), site.client(LEARNER)
        with Publisher(learner, new_signer(), PublishConfig()) as publisher:
            publisher.publish(policy_arrays(MlpPolicy.make_module(robot_spec(robot))), 7, updates=100)
            found = lambda: {(c.header.source, c.header.task) for c in site.chunks()}  # noqa: E731
            until(lambda: len(found()) >= 3, "both old tasks were evaluated")
        console.send(StopRun(reason="the test is over"))
        assert session.process.wait(END_S) == 0
    online, evaluation = EpisodeSource.ONLINE, EpisodeSource.EVALUATION
    assert found() == {(online, "reach"), (evaluation, "lift"), (evaluation, "place")}
    for chunk in site.chunks():
        assert np.isfinite(chunk.columns["log_prob"][:-1]).all() == (chunk.header.source is online)
    order = list(dict.fromkeys((c.header.started_unix_ns, c.header.source) for c in site.chunks()))
    assert [source for _, source in sorted(order)[:4]] == [online, evaluation, online, evaluation]


def test_robots_and_sessions_explore_with_their_own_numbers() -> None:
    seeds = {
        seed
        for robot in ("left", "right")
        for sessions in (0, 1)
        for seed in itertools.islice(EpisodeStarts().exploration_seeds(robot, sessions), 2)
    }
    assert len(seeds) == 8
