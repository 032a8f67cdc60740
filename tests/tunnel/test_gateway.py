"""The gateway's behaviour towards its peers."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tunnel_kit import CONFIG, chunk, prepare, serving, status, stored, until

from hal.discovery import DeviceMonitor
from hal.durable import replace_durably
from hal.errors import StateError
from hal.lease import MAX_MIN_TOKEN, LeaseTable
from hal.registry import read_registry
from hal.resource import Kind, ResourceRecord
from hal.spec import ArraySpec, RobotSpec
from hal.state_database import STATE_FILE, AuditEntry, StateDatabase, read_audit_log
from user_sys.edge.outbox import Outbox
from user_sys.episode import Chunk, decode_chunk
from user_sys.errors import RunError, SessionRefused, StoreFull, StoreLocked
from user_sys.gateway import Gateway, GatewayConfig
from user_sys.gateway.__main__ import main, read_gateway_config
from user_sys.gateway.gateway import (
    LEASE_BURST,
    LEASE_REFILL_S,
    MAX_CAMERAS,
    MAX_WAITING_BYTES,
    PreviewForwarder,
    is_loopback,
    read_gateway_address,
)
from user_sys.gateway.ingest import LATE_REPLY_S, REPLY_TIMEOUT_S, OperatorAudit
from user_sys.messages import (
    PREVIOUS_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    DevicesReport,
    EpisodeReport,
    Hello,
    Histogram,
    LeaseGrant,
    LeaseRefusal,
    LeaseRelease,
    LeaseRequest,
    MetricsReport,
    OperatorCommand,
    OperatorReply,
    Preview,
    PreviewAck,
    PreviewRequest,
    ResourceUpdate,
    StopRun,
    WeightsApplied,
)
from user_sys.operator_overrides import overrides_of_run
from user_sys.robot_records import read_robot_records
from user_sys.store.store import StoreWriter
from user_sys.tunnel.client import TunnelClient, TunnelState
from user_sys.tunnel.keys import load_keypair
from user_sys.tunnel.limits import MAX_CHUNK_BYTES


def next_of(client: TunnelClient, kind: type, within_s: float = 120.0) -> object:
    """The next message of a type; skips others."""
    for _ in range(200):
        message = client.receive(within_s)
        if message is None or isinstance(message, kind):
            return message
    return None


def episode_report(number: int) -> EpisodeReport:
    return EpisodeReport(
        robot="panda-0",
        episode=f"e{number}",
        source="online",
        steps=1,
        success=True,
        intervention_steps=0,
        episode_return=1.0,
        policy_version=0,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    prepare(tmp_path / "run")
    return tmp_path / "run"


def test_chunks_become_durable_once_and_leave_the_outbox(run: Path) -> None:
    with serving(run) as site, Outbox.open(run / "outbox") as outbox:
        robot = site.client("panda-0", outbox)
        for index in range(30):
            outbox.append(chunk(index))
        assert robot.drain(120) == 0
        assert stored(run) == [("episode-0", index) for index in range(30)]
        robot.close()
    with serving(run) as site, Outbox.open(run / "outbox") as outbox:
        for index in range(20, 40):  # sent again, as after a lost acknowledgement
            outbox.append(chunk(index))
        assert site.client("panda-0", outbox).drain(120) == 0
        console = site.client("console-0")
        until(lambda: (m := next_of(console, MetricsReport)) and m.scalars["duplicates"] == 10, "counted")  # type: ignore[attr-defined]
        site.clients[0].close()
    assert stored(run) == [("episode-0", index) for index in range(40)]


def test_delays_of_stored_steps_reach_the_console(run: Path) -> None:
    plain = decode_chunk(chunk(0, steps=4))
    captured = time.monotonic_ns() - 3_000_000_000 + np.arange(4) * 1_000_000
    times = {"t_capture_ns": captured, "t_inference_ns": captured + 30_000_000, "t_command_ns": captured + 31_000_000}
    header = msgspec.structs.replace(plain.header, unix_offset_ns=time.time_ns() - time.monotonic_ns())
    with serving(run) as site, Outbox.open(run / "outbox") as outbox:
        outbox.append(Chunk(header, {**plain.columns, **times}, {}).encode())
        assert site.client("panda-0", outbox).drain(120) == 0
        console = site.client("console-0")
        found: dict[str, Histogram] = {}
        until(lambda: (m := next_of(console, MetricsReport)) and found.update(m.histograms) or found, "delays")  # type: ignore[attr-defined]
        site.clients[0].close()
    delays = {name: each.sum_s / sum(each.counts) for name, each in found.items()}
    assert delays["capture_to_inference/panda-0"] == pytest.approx(0.03)
    assert delays["inference_to_command/panda-0"] == pytest.approx(0.001)
    assert 2.9 < delays["recorded_to_durable/panda-0"] < 120


def test_largest_chunk_of_an_outbox_arrives(run: Path) -> None:
    largest = chunk(0, floats=(MAX_CHUNK_BYTES - 2048) // 40)
    assert MAX_CHUNK_BYTES - 2048 < len(largest) <= MAX_CHUNK_BYTES
    with serving(run) as site, Outbox.open(run / "outbox") as outbox:
        outbox.append(largest)
        outbox.append(chunk(1))
        assert site.client("panda-0", outbox).drain(120) == 0
        site.clients[0].close()
    assert stored(run) == [("episode-0", 0), ("episode-0", 1)]


def test_invalid_chunk_is_set_aside_and_later_chunks_are_stored(run: Path) -> None:
    with serving(run) as site, Outbox.open(run / "outbox") as outbox:
        robot = site.client("panda-0", outbox)
        outbox.append(chunk(0))
        outbox.append(chunk(1, robot="panda-1"))
        outbox.append(chunk(2))
        assert robot.drain(120) == 0
        assert robot.state is TunnelState.OPEN
        assert stored(run) == [("episode-0", 0), ("episode-0", 2)]
        assert len(list((run / "outbox").glob("*.refused"))) == 1
        robot.close()


def test_chunk_of_another_robots_episode_is_refused(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(run) as site, Outbox.open(run / "honest") as honest:
        honest.append(chunk(0, episode="mine"))
        assert site.client("panda-0", honest).drain(120) == 0
    with serving(run) as site, Outbox.open(run / "honest") as honest, Outbox.open(run / "rogue") as rogue:
        for index in range(3):  # the first as if sent again, the next one, and one beyond
            rogue.append(chunk(index, robot="panda-1", episode="mine"))
        rogue.append(chunk(0, robot="panda-1", episode="its-own"))
        assert site.client("panda-1", rogue).drain(120) == 0
        honest.append(chunk(1, episode="mine"))
        assert site.client("panda-0", honest).drain(120) == 0
    assert stored(run) == [("mine", 0), ("its-own", 0), ("mine", 1)]
    assert len(list((run / "rogue").glob("*.refused"))) == 3 and not list((run / "honest").glob("*.refused"))
    reasons = [record.getMessage() for record in caplog.records if "outbox.refused" in record.getMessage()]
    assert len(reasons) == 3 and all(
        "mine belongs to panda-0; panda-1 cannot write to it" in reason for reason in reasons
    )


def test_lease_refusal_names_the_holder(run: Path) -> None:
    with serving(run) as site:
        robot = site.client("panda-0")
        robot.send(LeaseRequest(robot="panda-0", holder="session at desk 4"))
        grant = next_of(robot, LeaseGrant)
        assert isinstance(grant, LeaseGrant) and grant.ttl_s == CONFIG.lease_ttl_s
        robot.send(LeaseRequest(robot="panda-0", holder="intruder"))
        refusal = next_of(robot, LeaseRefusal)
        assert isinstance(refusal, LeaseRefusal) and "session at desk 4" in refusal.reason
        robot.send(LeaseRequest(robot="panda-0", holder="session at desk 4", token=grant.token))
        assert next_of(robot, LeaseGrant) == grant
        robot.send(LeaseRelease(robot="panda-0", token=grant.token))
        robot.send(LeaseRequest(robot="panda-0", holder="intruder"))
        newer = next_of(robot, LeaseGrant)
        assert isinstance(newer, LeaseGrant) and newer.token > grant.token
        robot.send(LeaseRequest(robot="panda-0", holder="session at desk 4", token=grant.token))
        assert isinstance(next_of(robot, LeaseRefusal), LeaseRefusal)


def test_repeated_lease_request_gets_the_same_token(run: Path) -> None:
    """A session repeats its request to a slow gateway: the second reply must not end the first lease."""
    with serving(run) as site:
        robot = site.client("panda-0", holder="a")
        for _ in range(2):
            robot.send(LeaseRequest(robot="panda-0", holder="a"))
        first, second = next_of(robot, LeaseGrant), next_of(robot, LeaseGrant)
        assert isinstance(first, LeaseGrant) and first == second
        robot.send(LeaseRequest(robot="panda-0", holder="a", floor=first.token))
        assert next_of(robot, LeaseGrant).token == first.token + 1  # type: ignore[union-attr]
        robot.close()
        again = site.client("panda-0", holder="a")
        again.send(LeaseRequest(robot="panda-0", holder="a"))
        assert next_of(again, LeaseGrant).token == first.token + 2  # type: ignore[union-attr]


def test_robot_is_leased_again_after_a_stolen_key_raised_its_token(run: Path) -> None:
    with serving(run) as site:
        thief = site.client("panda-0", holder="a")
        thief.send(LeaseRequest(robot="panda-0", holder="a", floor=(1 << 53) + 1))
        assert "no session got the token" in next_of(thief, LeaseRefusal).reason  # type: ignore[attr-defined]
        thief.send(LeaseRequest(robot="panda-0", holder="a", floor=MAX_MIN_TOKEN))
        stolen = next_of(thief, LeaseGrant).token  # type: ignore[attr-defined]
        thief.close()
        robot = site.client("panda-0", holder="a")
        robot.send(LeaseRequest(robot="panda-0", holder="a", floor=stolen))
        assert next_of(robot, LeaseGrant).token == stolen + 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("giving_back", [True, False])
def test_flood_of_lease_requests_is_rate_limited(run: Path, giving_back: bool) -> None:
    now = [100.0]
    with serving(run, clock=lambda: now[0]) as site:
        rogue, honest = site.client("panda-0"), site.client("panda-1")
        tokens: list[int] = []

        def ask(times: int) -> list[str]:
            refused = []
            for _ in range(times):
                rogue.send(LeaseRequest(robot="panda-0", holder="h", floor=tokens[-1] if tokens else 0))
                answer = rogue.receive(120)
                if isinstance(answer, LeaseGrant):
                    tokens.append(answer.token)
                    if giving_back:
                        rogue.send(LeaseRelease(robot="panda-0", token=answer.token))
                else:
                    assert isinstance(answer, LeaseRefusal)
                    refused.append(answer.reason)
            return refused

        refused = ask(40)
        assert len(tokens) == LEASE_BURST and refused == ["too many new leases of panda-0; retry in 0.5 s"] * 30
        honest.send(LeaseRequest(robot="panda-1", holder="h"))
        assert isinstance(honest.receive(120), LeaseGrant)
        now[0] += LEASE_REFILL_S
        assert len(ask(3)) == 2 and len(tokens) == LEASE_BURST + 1


def test_lease_survives_a_gateway_restart(run: Path) -> None:
    with serving(run) as site:
        robot = site.client("panda-0")
        robot.send(LeaseRequest(robot="panda-0", holder="a"))
        before = next_of(robot, LeaseGrant)
    with serving(run) as site:
        robot = site.client("panda-0", holder="a")
        robot.send(LeaseRequest(robot="panda-0", holder="a", token=before.token))  # type: ignore[union-attr]
        assert next_of(robot, LeaseGrant) == before
        robot.send(LeaseRequest(robot="panda-0", holder="b"))
        assert isinstance(next_of(robot, LeaseRefusal), LeaseRefusal)
        with pytest.raises(SessionRefused, match="panda-0 is driven by a"):
            site.client("panda-0", holder="b")
        robot.send(LeaseRequest(robot="panda-0", holder="a", token=before.token))  # type: ignore[union-attr]
        assert next_of(robot, LeaseGrant) == before


def test_quarantine_revokes_the_lease_at_once(run: Path) -> None:
    with serving(run) as site:
        robot = site.client("panda-0", holder="a")
        robot.send(LeaseRequest(robot="panda-0", holder="a"))
        grant = next_of(robot, LeaseGrant)
        overrides_of_run(run).set_override("panda-0", "quarantined", "carol", "oil on the floor")
        refusal = next_of(robot, LeaseRefusal)
        assert isinstance(grant, LeaseGrant) and isinstance(refusal, LeaseRefusal)
        assert (refusal.token, refusal.reason) == (grant.token, "panda-0 is quarantined by carol: oil on the floor")


def test_console_that_connects_again_learns_that_a_robot_was_restored(run: Path) -> None:
    overrides = overrides_of_run(run)
    with serving(run) as site:
        site.client("panda-0")
        until(lambda: "panda-0" in health(run), "the robot is known")
        overrides.set_override("panda-0", "quarantined", "carol")
        until(lambda: health(run)["panda-0"] == "quarantined", "the gateway has applied the quarantine")
        console = site.client("console-0")
        news = next_of(console, ResourceUpdate)
        assert isinstance(news, ResourceUpdate) and (news.record.health, news.is_change) == ("quarantined", False)
        console.close()
        overrides.clear_override("panda-0", "carol")
        until(lambda: health(run)["panda-0"] == "ready", "the gateway has applied the restore")
        news = next_of(site.client("console-0"), ResourceUpdate)
        assert isinstance(news, ResourceUpdate) and (news.record.health, news.is_change) == ("ready", False)


def test_commands_reach_the_robot_and_replies_all_consoles(run: Path) -> None:
    with serving(run) as site:
        robot, console = site.client("panda-0"), site.client("console-0")
        order = OperatorCommand(robot="panda-0", operator="alice", order="take-over")
        before_ns = time.time_ns()
        assert console.send(order)
        forwarded = next_of(robot, OperatorCommand)
        assert isinstance(forwarded, OperatorCommand) and before_ns <= forwarded.forwarded_unix_ns <= time.time_ns()
        assert msgspec.structs.replace(forwarded, forwarded_unix_ns=0) == order
        reply = OperatorReply(robot="panda-0", operator="alice", order="take-over", accepted=True)
        robot.send(reply)
        assert next_of(console, OperatorReply) == reply
        watch = PreviewRequest(robot="panda-0", rate_hz=5, ttl_s=2)
        console.send(watch)
        assert next_of(robot, PreviewRequest) == watch
        robot.send(WeightsApplied(robot="panda-0", version=3, seconds=0.01))
        assert next_of(console, WeightsApplied) == WeightsApplied(robot="panda-0", version=3, seconds=0.01)


def test_impossible_reports_of_a_robot_reach_no_one(run: Path) -> None:
    with serving(run) as site:
        robot, console = site.client("panda-0"), site.client("console-0")
        assert site.gateway is not None
        for version, seconds in ((3, float("nan")), (-(2**63), 0.01), (4, 0.02)):
            robot.send(WeightsApplied(robot="panda-0", version=version, seconds=seconds))
            assert robot.flush(60), "sent before a newer one replaces it"
        assert next_of(console, WeightsApplied) == WeightsApplied(robot="panda-0", version=4, seconds=0.02)
        robot.send(OperatorReply(robot="panda-0", operator="x" * 5000, order="reset", accepted=True))
        robot.send(OperatorReply(robot="panda-0", operator="ana", order="reset", accepted=True))
        reply = next_of(console, OperatorReply)
        assert isinstance(reply, OperatorReply) and reply.operator == "ana"
        histogram = site.gateway.store.ingester.latencies.report()["offered_to_applied/panda-0"]
        assert sum(histogram.counts) == 1 and histogram.sum_s == pytest.approx(0.02)


@pytest.mark.parametrize("absent", ["panda-1", "learner", "nobody"])
def test_command_to_an_absent_robot_is_refused(run: Path, absent: str) -> None:
    with serving(run) as site:
        site.client("learner")
        console = site.client("console-0")
        console.send(OperatorCommand(robot=absent, operator="alice", order="e-stop", press=7))
        console.send(OperatorCommand(robot=absent, operator="alice", order="take-over"))
        for reply in (console.receive_stop(120), next_of(console, OperatorReply)):
            assert isinstance(reply, OperatorReply) and not reply.accepted and "not connected" in reply.reason


def test_robot_of_the_previous_protocol_gets_the_orders_that_it_can_decode(run: Path) -> None:
    with serving(run) as site:
        robot, console = site.client("panda-0", protocol=PREVIOUS_PROTOCOL_VERSION), site.client("console-0")
        for order in ("pause", "take-over"):
            console.send(OperatorCommand(robot="panda-0", operator="ana", order=order))  # type: ignore[arg-type]
        reply = next_of(console, OperatorReply)
        assert isinstance(reply, OperatorReply) and not reply.accepted
        assert reply.reason == "panda-0 runs an older release, without 'pause'; upgrade its computer"
        command = next_of(robot, OperatorCommand)
        assert isinstance(command, OperatorCommand) and command.order == "take-over"


def test_e_stop_passes_blocked_commands(run: Path) -> None:
    """The robot reads no commands, until its window and every queue before it are full."""
    with serving(run) as site:
        robot, console = site.client("panda-0"), site.client("console-0")
        order = OperatorCommand(robot="panda-0", operator="eve", order="reset")

        def is_refused() -> bool:
            while console.send(order):
                pass
            return isinstance(console.receive(0), OperatorReply)

        until(is_refused, "the robot's queue is full")
        stop = OperatorCommand(robot="panda-0", operator="alice", order="e-stop", press=7)
        console.send(stop)
        assert robot.receive_stop(120) == stop
        robot.send(OperatorReply(robot="panda-0", operator="alice", order="e-stop", accepted=True, press=7))
        confirmed = console.receive_stop(120)
        assert isinstance(confirmed, OperatorReply) and confirmed.accepted and confirmed.press == 7


def test_e_stop_passes_a_stuck_state_database(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process holds the write lock, as a slow disk does."""
    monkeypatch.setattr("hal.state_database.AUDIT_BUSY_TIMEOUT_S", 300.0)
    monkeypatch.setitem(StateDatabase.__init__.__kwdefaults__, "timeout_s", 300.0)
    with serving(run) as site, contextlib.closing(sqlite3.connect(run / STATE_FILE, isolation_level=None)) as other:
        robot, rival, console = site.client("panda-0"), site.client("panda-1"), site.client("console-0")
        rival.send(LeaseRequest(robot="panda-1", holder="edge"))
        assert isinstance(next_of(rival, LeaseGrant), LeaseGrant)
        other.execute("BEGIN IMMEDIATE")
        rival.send(LeaseRequest(robot="panda-1", holder="another edge"))
        console.send(OperatorCommand(robot="panda-0", operator="ana", order="reset"))
        robot.send(OperatorReply(robot="panda-0", operator="ana", order="reset", accepted=True))
        for press in range(1, 4):
            stop = OperatorCommand(robot="panda-0", operator="ana", order="e-stop", press=press)
            console.send(stop)
            assert robot.receive_stop(60) == stop
            robot.send(OperatorReply(robot="panda-0", operator="ana", order="e-stop", accepted=True, press=press))
            confirmed = console.receive_stop(60)
            assert isinstance(confirmed, OperatorReply) and confirmed.press == press
        other.execute("ROLLBACK")
        assert isinstance(next_of(rival, LeaseRefusal), LeaseRefusal)
    stops = [entry.count for entry in read_audit_log(run / STATE_FILE) if entry.order == "e-stop"]
    assert sum(stops) == 3


def test_e_stop_passes_a_slow_write_of_a_robots_record(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, disk_is_free = list[Path](), threading.Event()

    def slow(path: Path, content: bytes) -> None:
        writes.append(path)
        assert disk_is_free.wait(300)
        replace_durably(path, content)

    monkeypatch.setattr("user_sys.robot_records.replace_durably", slow)
    action = ArraySpec(name="action", labels=("x",), units=("m",), low=(0.0,), high=(1.0,))
    spec = RobotSpec(model="panda", rate_hz=10.0, observation=(), action=action)
    with serving(run) as site:
        robot, console = site.client("panda-0"), site.client("console-0")
        site.client("panda-1", spec=spec)
        until(lambda: writes, "the record is being written")
        stop = OperatorCommand(robot="panda-0", operator="ana", order="e-stop", press=1)
        console.send(stop)
        assert robot.receive_stop(60) == stop
        disk_is_free.set()
    assert [record.robot for record in read_robot_records(run / "robots")] == ["panda-1"]


def test_every_episode_report_reaches_the_console(run: Path) -> None:
    with serving(run) as site:
        robot, console = site.client("panda-0"), site.client("console-0")
        for number in range(300):
            robot.send(episode_report(number))
        assert [next_of(console, EpisodeReport).episode for _ in range(300)] == [f"e{n}" for n in range(300)]  # type: ignore[union-attr]


def test_newest_preview_replaces_a_waiting_one(run: Path) -> None:
    with serving(run) as site:
        robot, console = site.client("panda-0"), site.client("console-0")
        until(lambda: robot.send_preview(Preview(robot="panda-0", camera="front", step=0), b"0"), "sent")
        until(lambda: robot.send_preview(Preview(robot="panda-0", camera="front", step=1), b"1"), "sent")
        until(lambda: robot.send_preview(Preview(robot="panda-0", camera="front", step=2), b"2"), "sent")
        until(lambda: robot.send_preview(Preview(robot="panda-0", camera="front", step=3), b"3"), "sent")
        first = console.receive_preview(120)
        assert first is not None and (first[0].step, bytes(first[1])) == (0, b"0")
        second = console.receive_preview(120)
        assert second is not None and second[0].step >= 2


def test_waiting_pictures_of_a_robot_are_bounded_and_end_with_it() -> None:
    sent = list[tuple[str, str, int]]()

    def send(console: str, message: object, payload: object) -> bool:
        assert isinstance(message, Preview)
        sent.append((message.robot, message.camera, message.step))
        return True

    forwarder = PreviewForwarder(send)
    for step in range(2):
        for number in range(2 * MAX_CAMERAS):
            forwarder.forward("console-0", Preview(robot="bad", camera=f"c{number}", step=step), bytes(1 << 20))
    assert len(sent) == MAX_CAMERAS
    for number in range(2 * MAX_CAMERAS):
        forwarder.on_ack("console-0", PreviewAck(robot="bad", camera=f"c{number}"))
    assert len(sent) == MAX_CAMERAS + (MAX_WAITING_BYTES >> 20)
    for step in (2, 3):
        forwarder.forward("console-0", Preview(robot="good", camera="front", step=step), bytes(1 << 20))
    assert sent[-1] == ("good", "front", 2), "another robot has bytes and cameras of its own"
    forwarder.on_peer_closed("good")
    forwarder.on_ack("console-0", PreviewAck(robot="good", camera="front"))
    assert sent[-1] == ("good", "front", 2)


def test_end_of_a_run_reaches_present_and_later_peers(run: Path) -> None:
    with serving(run) as site:
        robot, console, learner = site.client("panda-0"), site.client("console-0"), site.client("learner")
        console.send(StopRun(reason="done"))
        for client in (robot, learner, console):
            assert next_of(client, StopRun) == StopRun(reason="done")
        assert next_of(site.client("panda-1"), StopRun) == StopRun(reason="done")


def test_robot_spec_is_registered(run: Path) -> None:
    with serving(run) as site:
        action = ArraySpec(name="action", labels=("x",), units=("m",), low=(0.0,), high=(1.0,))
        spec = RobotSpec(model="panda", rate_hz=10.0, observation=(), action=action)
        assert site.gateway is not None
        with TunnelClient(
            site.address.endpoint,
            load_keypair(run / "keys" / "panda-0.key"),
            site.address.public_key,
            Hello(protocol=PROTOCOL_VERSION, role="robot", name="panda-0", spec=spec),
        ) as robot:
            robot.wait_open(120)
            registry = site.gateway.resources.registry
            until(lambda: registry.snapshot() and registry.record("panda-0").embodiment == spec.embodiment, "announced")


def test_full_disk_delays_acknowledgements_and_loses_no_chunk(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = threading.Event()
    with serving(run) as site, Outbox.open(run / "outbox") as outbox:
        robot, console = site.client("panda-0", outbox), site.client("console-0")
        outbox.append(*map(chunk, range(20)))
        assert robot.drain(120) == 0
        full.set()
        monkeypatch.setattr(StoreWriter, "sync", _full_while(full, StoreWriter.sync))
        for index in range(20, 40):
            outbox.append(chunk(index))
        until(lambda: (m := next_of(console, MetricsReport)) and m.scalars["disk_needed_bytes"] > 0, "people see it")  # type: ignore[attr-defined]
        assert robot.chunks_pending == 20 and robot.state is TunnelState.OPEN
        full.clear()
        assert robot.drain(120) == 0
        until(lambda: (m := next_of(console, MetricsReport)) and m.scalars["disk_needed_bytes"] == 0, "people see it")  # type: ignore[attr-defined]
        robot.close()
    assert stored(run) == [("episode-0", index) for index in range(40)]


def _full_while(full: threading.Event, sync):  # type: ignore[no-untyped-def]
    def attempt(writer: StoreWriter) -> object:
        if full.is_set():
            raise StoreFull("no space left on device")
        return sync(writer)

    return attempt


def test_commands_are_audited_with_the_robots_reply(run: Path) -> None:
    with serving(run) as site:
        robot, console = site.client("panda-0"), site.client("console-0")
        for robot_name, order, address in (("panda-0", "e-stop", "10.0.0.9"), ("panda-9", "reset", "")):
            console.send(OperatorCommand(robot=robot_name, operator="ana", order=order, address=address))  # type: ignore[arg-type]
        assert robot.receive_stop(120) is not None
        robot.send(OperatorReply(robot="panda-0", operator="ana", order="e-stop", accepted=True))
        log = run / STATE_FILE

        def is_audited(word: str) -> bool:
            return any(word in (entry.person, entry.order) for entry in read_audit_log(log))

        robot.send(status(authority="stopped", operator="ana"))
        until(lambda: is_audited("stopped"), "the change is audited")
        for _ in range(2):  # as a repeated status
            robot.send(status(authority="human", operator="at the robot"))
        until(lambda: is_audited("at the robot"), "what was reported last is audited")
    told = [(e.event, e.robot, e.person, e.order, e.outcome) for e in read_audit_log(log) if e.robot]
    assert sorted(told) == [
        ("authority", "panda-0", "ana", "stopped", ""),
        ("authority", "panda-0", "at the robot", "human", ""),
        ("order", "panda-0", "ana", "e-stop", "done"),
        ("order", "panda-9", "ana", "reset", "refused: panda-9 is not connected"),
    ]
    assert next(e.address for e in read_audit_log(log) if e.order == "e-stop") == "10.0.0.9"


def test_device_changes_are_reported_to_consoles(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("user_sys.gateway.gateway.DeviceMonitor", partial(DeviceMonitor, interval_s=0.05))
    plugged = [camera("head", "7")]
    with serving(run, probes={"usb": lambda: tuple(plugged)}) as site:
        robot, console = site.client("panda-0"), site.client("console-0")
        robot.send(LeaseRequest(robot="panda-0", holder="edge"))
        assert isinstance(next_of(robot, LeaseGrant), LeaseGrant)
        forged = [camera("head", "1", kind=Kind.ROBOT), camera("elsewhere", "2", name="no-node")]
        robot.send(DevicesReport(records=(camera("cart", "9"), *forged)))
        until(lambda: health(run) == {"cart/camera-9": "ready", "head/camera-7": "ready", "panda-0": "leased"}, "known")
        present = next_of(console, ResourceUpdate)
        assert isinstance(present, ResourceUpdate) and (present.record.name, present.is_change) == ("panda-0", False)
        plugged.clear()
        news = next_of(console, ResourceUpdate)
        assert isinstance(news, ResourceUpdate) and (news.record.name, news.record.health) == ("head/camera-7", "lost")
        until(lambda: health(run)["head/camera-7"] == "lost", "it is written down")
        assert health(run)["panda-0"] == "leased" and health(run)["cart/camera-9"] == "ready"
        plugged.append(camera("head", "7"))
        news = next_of(console, ResourceUpdate)
        assert isinstance(news, ResourceUpdate) and (news.record.name, news.record.health) == ("head/camera-7", "ready")
    told = [(e.event, e.robot) for e in read_audit_log(run / STATE_FILE) if e.event in ("lost", "returned")]
    assert told == [("lost", "head/camera-7"), ("returned", "head/camera-7")]


def camera(node: str, serial: str, kind: Kind = Kind.CAMERA, name: str = "") -> ResourceRecord:
    return ResourceRecord(kind=kind, name=name or f"{node}/camera-{serial}", model="C920", node=node, found_by="usb")


def health(run: Path) -> dict[str, str]:
    return {record.name: record.health.value for record in read_registry(StateDatabase(run / STATE_FILE))}


def test_command_without_a_reply_is_audited_after_the_timeout() -> None:
    now, entries = [0.0], list[AuditEntry]()
    audit = OperatorAudit(entries.append, lambda: now[0])
    audit.on_command(OperatorCommand(robot="panda-0", operator="ana", order="e-stop"), "10.0.0.9")
    audit.on_command(OperatorCommand(robot="panda-0", operator="ana", order="drive"), "10.0.0.9")
    audit.expire()
    assert entries == []
    now[0] = REPLY_TIMEOUT_S + 0.1
    audit.expire()
    (entry,) = entries
    assert entry.event == "order" and entry.outcome == f"no answer within {REPLY_TIMEOUT_S:g} s"
    assert (entry.person, entry.address, entry.order) == ("ana", "10.0.0.9", "e-stop")


def test_reply_is_audited_only_for_a_command_of_the_last_minute() -> None:
    now, entries = [0.0], list[AuditEntry]()
    audit = OperatorAudit(entries.append, lambda: now[0])
    command = OperatorCommand(robot="panda-0", operator="ana", order="e-stop", press=3)
    audit.on_reply(command.reply(accepted=True))
    assert entries == [], "no person gave this order"
    audit.on_command(command, "10.0.0.9")
    for now[0] in (REPLY_TIMEOUT_S + 0.1, 50.0, LATE_REPLY_S + 0.1):
        audit.expire()
        audit.on_reply(command.reply(accepted=True))
    told = [(entry.person, entry.address, entry.outcome) for entry in entries]
    assert told == [("ana", "10.0.0.9", "no answer within 5 s"), *[("ana", "10.0.0.9", "done")] * 2]


def test_port_stays_over_restarts_and_a_second_gateway_is_refused(run: Path) -> None:
    with serving(run) as site:
        first = site.address
        with pytest.raises(StoreLocked):
            Gateway(CONFIG, run)
    with serving(run) as site:
        assert site.address == first


def test_failed_gateway_start_changes_nothing_and_unlocks_the_store(run: Path) -> None:
    LeaseTable(StateDatabase(run / STATE_FILE)).acquire("panda-0", "alice")
    overrides_of_run(run).set_override("panda-0", "quarantined", "ana")
    with StoreWriter.open(run / "store"):
        with pytest.raises(StoreLocked):
            Gateway(CONFIG, run)
        leases, log = LeaseTable(StateDatabase(run / STATE_FILE)), read_audit_log(run / STATE_FILE)
        assert leases.lease("panda-0") is not None and log == []
    for file in run.glob(f"{STATE_FILE}*"):
        file.write_bytes(b"{" * 200)
    with pytest.raises(StateError, match="is damaged"):
        Gateway(CONFIG, run)
    StoreWriter.open(run / "store").close()


def test_gateway_beyond_loopback_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="user-sys keys new gateway"):
        Gateway(GatewayConfig(endpoint="tcp://0.0.0.0:0"), tmp_path)
    assert is_loopback("tcp://127.0.0.1:5") and is_loopback("tcp://[::1]:5") and not is_loopback("tcp://*:5")


def test_gateway_process_reads_the_run_configuration(run: Path) -> None:
    (run / "config.yaml").write_text(
        "seed: 3\ngateway:\n  lease_ttl_s: 7\n  tunnel:\n    experience:\n      window_messages: 5\n"
    )
    config = read_gateway_config(run / "config.yaml")
    assert (config.lease_ttl_s, config.tunnel.experience.window_messages, config.weights_kept) == (7.0, 5, 8)
    (run / "config.yaml").write_text("gateway: [")
    assert main(["--run", str(run)]) == 2
    (run / "gateway.json").write_text("{")
    with pytest.raises(RunError, match="delete it"):
        read_gateway_address(run)
