"""Accepted and refused sessions, and reconnects."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
from tunnel_kit import QUICK, RecordingHandler, chunk, hello, prepare, status, until

from sim.network_emulator import EmulatedLink, LinkConfig
from user_sys.edge.outbox import Outbox
from user_sys.errors import LinkDown, RunError, SessionRefused, TunnelError
from user_sys.messages import (
    PREVIOUS_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    ChunkAck,
    ChunkOffer,
    CreditGrant,
    Heartbeat,
    LeaseRequest,
    MetricsReport,
    OperatorCommand,
    Preview,
    RobotStatus,
    StopRun,
    WeightsBlobs,
    Welcome,
)
from user_sys.tunnel.client import ClientQueues, ClientSession, ClockEstimator, TunnelClient, TunnelState
from user_sys.tunnel.keys import AuthorizedKey, KeyPair, Keyring, new_keypair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import (
    AnyMessage,
    Channel,
    Envelope,
    Payload,
    decode_envelope,
    encode_envelope,
    new_session_id,
)
from user_sys.tunnel.server import Peer, TunnelServer


class SessionBench:
    """One server with a recording handler, and clients that are closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.keys = prepare(folder)
        self.ring = Keyring(folder / "keys")
        self.server_keys = new_keypair()
        self.handler = RecordingHandler()
        self.clients: list[TunnelClient] = []
        self.server = self.serve()

    def serve(self, endpoint: str = "tcp://127.0.0.1:0", limits: TunnelLimits = QUICK) -> TunnelServer:
        server = TunnelServer(endpoint, self.server_keys, self.ring, self.handler, limits)
        server.start()
        return server

    def dial(self, name: str, keys: KeyPair | None = None, server_key: str = "", **claims: object) -> TunnelClient:
        outbox, limits = claims.pop("outbox", None), claims.pop("limits", QUICK)
        greeting = hello(name, **claims)  # type: ignore[arg-type]
        server_key = server_key or self.server_keys.public
        client = TunnelClient(
            self.server.endpoint, keys or self.keys[name], server_key, greeting, outbox=outbox, limits=limits  # type: ignore[arg-type]
        )  # fmt: skip
        self.clients.append(client)
        client.start()
        return client

    def open(self, name: str, **claims: object) -> TunnelClient:
        client = self.dial(name, **claims)  # type: ignore[arg-type]
        client.wait_open(120)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[SessionBench]:
    made = SessionBench(tmp_path)
    yield made
    made.close()
    assert made.server.failure is None


def test_allowed_key_opens_a_session_with_a_clock_offset(bench: SessionBench) -> None:
    client = bench.open("panda-0")
    assert client.state is TunnelState.OPEN and client.reason == ""
    until(lambda: bench.server.peers("robot"), "the server knows the robot")
    assert [peer.name for peer in bench.server.peers()] == ["panda-0"]
    until(lambda: client.clock is not None, "a heartbeat came back")


def test_unknown_key_is_refused_and_logged(bench: SessionBench, caplog: pytest.LogCaptureFixture) -> None:
    stranger = new_keypair()
    with caplog.at_level(logging.WARNING), pytest.raises(SessionRefused, match="does not allow this key"):
        bench.dial("panda-0", stranger).wait_open(120)
    until(lambda: stranger.public in caplog.text, "the log names the key")
    assert "address=127.0.0.1" in caplog.text
    assert bench.handler.opened == [] and bench.handler.messages == []


def test_revoked_key_loses_its_session(bench: SessionBench, caplog: pytest.LogCaptureFixture) -> None:
    client = bench.open("panda-0")
    bench.ring.revoke("panda-0")
    until(lambda: client.state is TunnelState.REFUSED, "the session ends")
    assert "revoked" in client.reason
    assert "revoked" in caplog.text and bench.keys["panda-0"].public in caplog.text
    with pytest.raises(SessionRefused):
        bench.dial("panda-0").wait_open(120)
    assert [name for name, _ in bench.handler.closed] == ["panda-0"]


def test_key_added_at_run_time_is_accepted(bench: SessionBench) -> None:
    keys = new_keypair()
    with pytest.raises(SessionRefused):
        bench.dial("panda-9", keys, role="robot").wait_open(120)
    bench.ring.allow(keys.public, "panda-9", "robot")
    bench.dial("panda-9", keys, role="robot").wait_open(120)


def test_wrong_gateway_key_fails_the_handshake(bench: SessionBench) -> None:
    client = bench.dial("panda-0", server_key=new_keypair().public)
    until(lambda: "public key" in client.reason, "it says what may be wrong")
    with pytest.raises(LinkDown):
        client.wait_open(0.3)
    assert bench.handler.opened == []


def test_version_mismatch_names_both_versions(bench: SessionBench) -> None:
    with pytest.raises(SessionRefused, match=rf"version {PROTOCOL_VERSION}, this peer 99"):
        bench.dial("panda-0", protocol=99).wait_open(120)
    two_behind = PREVIOUS_PROTOCOL_VERSION - 1
    with pytest.raises(SessionRefused, match=rf"version {PROTOCOL_VERSION}, this peer {two_behind};"):
        bench.dial("panda-0", protocol=two_behind).wait_open(120)


def test_previous_protocol_is_accepted_from_robots_only(bench: SessionBench) -> None:
    bench.dial("panda-0", protocol=PREVIOUS_PROTOCOL_VERSION).wait_open(120)
    with pytest.raises(SessionRefused, match=f"version {PROTOCOL_VERSION}, this peer {PREVIOUS_PROTOCOL_VERSION};"):
        bench.dial("learner", protocol=PREVIOUS_PROTOCOL_VERSION).wait_open(120)


@pytest.mark.parametrize(("name", "role"), [("panda-1", "robot"), ("panda-0", "console"), ("panda-0", "learner")])
def test_key_cannot_claim_another_name_or_role(bench: SessionBench, name: str, role: str) -> None:
    with pytest.raises(SessionRefused, match="belongs to the robot 'panda-0'"):
        bench.dial(name, bench.keys["panda-0"], role=role).wait_open(120)


def test_policy_server_cannot_take_over_a_robot_of_an_older_keyring(bench: SessionBench) -> None:
    keys, robot = new_keypair(), bench.open("panda-0")
    entry = AuthorizedKey(public=keys.public, name="panda", role="policy")
    (bench.ring.folder / "panda.json").write_bytes(msgspec.json.encode(entry))
    bench.ring.refresh()
    with pytest.raises(SessionRefused, match="panda-0 is the name of another peer"):
        bench.dial("panda-0", keys, role="policy").wait_open(120)
    bench.dial("panda-0af3", keys, role="policy").wait_open(120)
    assert robot.state is TunnelState.OPEN


def test_policies_of_one_key_are_limited(bench: SessionBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("user_sys.tunnel.server.MAX_POLICIES", 2)
    keys = new_keypair()
    bench.ring.allow(keys.public, "policy", "policy")
    for name in ("policy-0", "policy-1", "policy-1"):
        bench.dial(name, keys, role="policy").wait_open(120)
    with pytest.raises(SessionRefused, match="this key has 2 policies already"):
        bench.dial("policy-2", keys, role="policy").wait_open(120)


@pytest.mark.parametrize("name", ["panda-1", ""])
def test_message_in_another_name_is_refused(bench: SessionBench, name: str) -> None:
    client = bench.open("panda-0")
    client.send(status(1))
    client.send(status(1, robot=name))
    until(lambda: client.state is TunnelState.REFUSED, "the forger is refused")
    assert f"in the name of {name!r}" in client.reason
    assert [message.robot for _, message in bench.handler.messages if isinstance(message, RobotStatus)] == ["panda-0"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("panda-0", OperatorCommand(robot="panda-1", operator="x", order="drive")),
        ("panda-0", StopRun(reason="x")),
        ("learner", OperatorCommand(robot="panda-0", operator="x", order="drive")),
        ("console-0", LeaseRequest(robot="panda-0", holder="x")),
        ("console-0", status(1)),
    ],
)
def test_message_of_another_role_is_refused(bench: SessionBench, name: str, message: object) -> None:
    client = bench.open(name)
    assert client.send(message)  # type: ignore[arg-type]
    until(lambda: client.state is TunnelState.REFUSED, "refused")
    assert "may not send" in client.reason
    assert bench.handler.messages == []


def test_newer_session_replaces_the_older(bench: SessionBench) -> None:
    first = bench.open("panda-0")
    second = bench.open("panda-0")
    until(lambda: first.state is TunnelState.REFUSED, "the first session ends")
    assert "taken over" in first.reason
    assert second.state is TunnelState.OPEN


@contextmanager
def dealer(bench: SessionBench, routing_id: bytes) -> Iterator[zmq.Socket[bytes]]:
    """A raw connection with panda-0's key."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 120_000
        keys = bench.keys["panda-0"]
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        socket.curve_serverkey = bench.server_keys.public.encode()
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
        socket.connect(bench.server.endpoint)
        yield socket


def test_late_hello_keeps_the_open_session(bench: SessionBench) -> None:
    client = bench.open("panda-0")
    with dealer(bench, Channel.CONTROL.value + new_session_id()) as late:
        late.send_multipart(encode_envelope(Envelope(hello("panda-0"))))
        frames: list[Payload] = [*late.recv_multipart()]
        assert isinstance(decode_envelope(Channel.CONTROL, frames, QUICK).message, Welcome)
        assert client.send(status(1))
        until(lambda: bench.handler.messages, "the open session still has the gateway's ear")
    assert client.state is TunnelState.OPEN


def test_hello_for_an_ended_session_is_not_refused(bench: SessionBench) -> None:
    with dealer(bench, Channel.WEIGHTS.value + new_session_id()) as late:
        late.send_multipart(encode_envelope(Envelope(hello("panda-0"))))
        until(lambda: bench.server.counters["stray"], "it arrives")
        assert not late.poll(200), "and gets no answer"
    assert not bench.server.counters["hellos_refused"]


def test_message_before_the_session_is_open_is_refused(bench: SessionBench) -> None:
    with dealer(bench, Channel.CONTROL.value + new_session_id()) as hasty:
        hasty.send_multipart(encode_envelope(Envelope(hello("panda-0"))))
        hasty.send_multipart(encode_envelope(Envelope(status(1))))
        until(lambda: bench.server.counters["malformed"], "it is refused")
    assert bench.handler.messages == []


def test_client_reconnects_and_sends_queued_messages(bench: SessionBench) -> None:
    client = bench.open("panda-0")
    bench.server.close()
    until(lambda: client.state is not TunnelState.OPEN, "the loss is seen")
    assert client.send(MetricsReport(node="panda-0", count=1, scalars={}))
    assert not client.send(LeaseRequest(robot="panda-0", holder="x")), "an order that would come too late is not kept"
    for step in range(100):
        assert client.send(status(step))
    bench.server = bench.serve(bench.server.endpoint)
    until(lambda: len(bench.handler.messages) == 2, "both arrive")
    states = [message for _, message in bench.handler.messages if isinstance(message, RobotStatus)]
    assert [message.step for message in states] == [99], "of a state only the newest matters"


def test_silent_client_is_disconnected(bench: SessionBench) -> None:
    bench.server.close()
    bench.server = bench.serve(limits=replace(QUICK, dead_after_s=1.0))
    bench.open("panda-0", limits=replace(QUICK, heartbeat_s=600.0))
    until(lambda: bench.handler.closed, "the session is closed")
    assert "silent" in bench.handler.closed[0][1]


def test_busy_control_channel_is_not_silent(bench: SessionBench) -> None:
    bench.server.close()
    bench.server = bench.serve(limits=replace(QUICK, dead_after_s=1.0))
    client = bench.open("panda-0", limits=replace(QUICK, heartbeat_s=600.0))
    ends_s = time.monotonic() + 1.6
    while time.monotonic() < ends_s:
        client.send(status(1))
        time.sleep(0.02)
    assert not bench.handler.closed


class FullPipe:
    """A `Connection` whose control pipe has room for so many messages."""

    endpoint = "tcp://gateway"

    def __init__(self) -> None:
        self.room, self.sent = 99, list[AnyMessage]()
        replies = (Welcome(), CreditGrant(messages=99, size_bytes=1 << 20))
        self._replies = {channel: [encode_envelope(Envelope(reply)) for reply in replies] for channel in Channel}

    def send(self, channel: Channel, frames: list[Payload]) -> bool:
        if channel is Channel.CONTROL and not self.room:
            return False
        if channel is Channel.CONTROL:
            self.room -= 1
            self.sent.append(decode_envelope(channel, frames, QUICK).message)
        return True

    def receive(self, channel: Channel) -> list[Payload] | None:
        return self._replies[channel].pop(0) if self._replies[channel] else None

    def silence_s(self, channel: Channel) -> float:
        return 0.0

    def wait(self, timeout_s: float) -> None:
        time.sleep(min(max(0.0, timeout_s), 0.005))


def test_heartbeat_passes_waiting_messages_when_the_pipe_has_room_again() -> None:
    queues, pipe = ClientQueues("panda-0", QUICK), FullPipe()
    for _ in range(4):
        queues.send(Envelope(MetricsReport(node="panda-0", count=1, scalars={})))
    limits = replace(QUICK, heartbeat_s=600.0)
    session = ClientSession(pipe, hello("panda-0"), limits, queues, None, ClockEstimator())  # type: ignore[arg-type]
    session.open(threading.Event())
    for pipe.room in (0, 1, 1):
        session.exchange()
    assert [type(message) for message in pipe.sent[-2:]] == [Heartbeat, MetricsReport]


def test_session_opens_over_a_long_round_trip(bench: SessionBench) -> None:
    """It takes eight round trips, of which five pass before the first Welcome."""
    with EmulatedLink(bench.server.endpoint.removeprefix("tcp://"), LinkConfig(delay_ms=100)) as link:
        keys, limits = bench.keys["panda-0"], replace(QUICK, handshake_s=1.3)
        with TunnelClient(link.endpoint, keys, bench.server_keys.public, hello("panda-0"), limits=limits) as client:
            client.wait_open(120)


class AcknowledgingHandler(RecordingHandler):
    """Acknowledges chunks at once."""

    server: TunnelServer

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        super().on_message(peer, message, payload)
        if isinstance(message, ChunkOffer):
            self.server.release(peer, 1, len(payload or b""))
            self.server.reply(peer, ChunkAck(sequence=message.sequence))


def test_picture_waits_for_few_chunks_on_a_slow_link(tmp_path: Path) -> None:
    keys, pair, handler = prepare(tmp_path), new_keypair(), AcknowledgingHandler()
    server = handler.server = TunnelServer("tcp://127.0.0.1:0", pair, Keyring(tmp_path / "keys"), handler, QUICK)
    with Outbox.open(tmp_path / "outbox") as outbox, server:
        outbox.append(*(chunk(index, floats=5000) for index in range(20)))  # 200 kB
        config = LinkConfig(delay_ms=10, up_mbit_s=8, down_mbit_s=8)
        with (
            EmulatedLink(server.endpoint.removeprefix("tcp://"), config) as link,
            TunnelClient(link.endpoint, keys["panda-0"], pair.public, hello("panda-0"), outbox=outbox) as client,
        ):
            until(lambda: len(outbox) < 20, "a chunk is acknowledged")
            assert client.send_preview(Preview(robot="panda-0", camera="front", step=0), b"jpeg")
            until(lambda: any(isinstance(m, Preview) for _, m in handler.messages), "the picture arrives")
            before = [type(m) for _, m in handler.messages]
            assert before[: before.index(Preview)].count(ChunkOffer) < 15


def test_full_window_delays_only_chunks(bench: SessionBench, tmp_path: Path) -> None:
    with Outbox.open(tmp_path / "outbox") as outbox:
        outbox.append(*map(chunk, range(2 * QUICK.experience.window_messages)))
        client = bench.open("panda-0", outbox=outbox)
        until(lambda: len(bench.handler.messages) == QUICK.experience.window_messages, "a window of chunks arrives")
        for step in range(20):
            client.send(status(step))
            until(lambda step=step: any(getattr(m, "step", -1) == step for _, m in bench.handler.messages), "control")
        assert sum(isinstance(m, RobotStatus) for _, m in bench.handler.messages) == 20
        assert len(bench.handler.messages) == QUICK.experience.window_messages + 20, (
            "nothing beyond the window was sent"
        )
        assert client.drain(0.01) == client.chunks_pending == 2 * QUICK.experience.window_messages
        client.close()


def test_record_beyond_the_limit_is_not_sent(bench: SessionBench) -> None:
    """The console would refuse it and lose its session, and with it the way of its e-stops."""
    console = bench.open("console-0")
    until(lambda: bench.server.peers("console"), "open")
    long = MetricsReport(node="gateway", count=0, scalars={"x" * QUICK.max_record_bytes: 1.0})
    assert not bench.server.send("console-0", long) and bench.server.counters["too_large"] == 1
    assert bench.server.send("console-0", status(7))
    received = console.receive(120)
    assert isinstance(received, RobotStatus) and received.step == 7 and not console.counters["lost"]


def test_preview_is_dropped_while_one_is_in_flight(bench: SessionBench) -> None:
    client = bench.open("panda-0")
    picture = Preview(robot="panda-0", camera="front", step=0)
    assert client.send_preview(picture, b"jpeg")
    assert not client.send_preview(picture, b"jpeg")
    assert client.send_preview(Preview(robot="panda-0", camera="wrist", step=0), b"jpeg")


def test_port_in_use_names_the_option(bench: SessionBench) -> None:
    with pytest.raises(RunError, match=r"--gateway\.endpoint"):
        TunnelServer(bench.server.endpoint, bench.server_keys, bench.ring, bench.handler).start()


def test_absent_gateway_raises_link_down_at_the_deadline(bench: SessionBench) -> None:
    endpoint = bench.server.endpoint
    bench.server.close()
    client = TunnelClient(endpoint, bench.keys["panda-0"], bench.server_keys.public, hello("panda-0"), limits=QUICK)
    with client:
        until(lambda: "no gateway listens there" in client.reason, "it says what is wrong")
        with pytest.raises(LinkDown, match="no gateway listens there"):
            client.wait_open(0.2)
    assert client.state is TunnelState.CLOSED
    client.close()
    with pytest.raises(TunnelError):
        client.start()


def test_close_sends_queued_messages(bench: SessionBench) -> None:
    client = bench.open("panda-0")
    for count in range(50):
        client.send(MetricsReport(node="panda-0", count=count, scalars={}))
    client.close()
    until(lambda: len(bench.handler.messages) == 50, "all fifty arrive")
    assert not any(isinstance(message, Heartbeat) for _, message in bench.handler.messages)


@pytest.mark.usefixtures("ipv6")
def test_session_over_ipv6(bench: SessionBench) -> None:
    bench.server.close()
    bench.server = bench.serve("tcp://[::1]:0")
    assert re.fullmatch(r"tcp://\[::1\]:[1-9]\d+", bench.server.endpoint)
    bench.open("panda-0")
    until(lambda: bench.server.peers(), "open")
    assert bench.server.peers()[0].address == "::1"


def test_reply_reaches_only_its_session(bench: SessionBench, tmp_path: Path) -> None:
    bench.open("panda-0").close()
    until(lambda: bench.handler.closed or bench.handler.opened, "the first session")
    with Outbox.open(tmp_path / "another") as outbox:
        outbox.append(chunk(0))
        bench.open("panda-0", outbox=outbox)
        until(lambda: bench.handler.messages, "its chunk is under way")
        former, present = bench.handler.opened
        assert not bench.server.reply(former, ChunkAck(sequence=100))
        assert len(outbox) == 1
        assert bench.server.reply(present, ChunkAck(sequence=0))
        until(lambda: not len(outbox), "acknowledged")
        bench.clients[-1].close()


def test_waiting_thread_gets_weights_of_the_next_session(bench: SessionBench) -> None:
    client, received = bench.open("panda-0"), list[object]()
    waiting = threading.Thread(target=lambda: received.append(client.receive_weights(120)))
    waiting.start()
    bench.server.close()
    bench.server = bench.serve(bench.server.endpoint)
    until(lambda: bench.server.send("panda-0", WeightsBlobs(version=bytes(32), parts=()), b"bytes"), "another session")
    waiting.join(120)
    assert received != [None]


def test_weights_beyond_a_window_arrive_in_order(bench: SessionBench) -> None:
    client, count = bench.open("panda-0"), 3 * QUICK.weights.window_messages
    until(lambda: bench.server.peers(), "open")
    for number in range(count):
        assert bench.server.send("panda-0", WeightsBlobs(version=number.to_bytes(32), parts=()), bytes(1000))
    envelopes = [client.receive_weights(120) for _ in range(count)]
    found = [e.message.version for e in envelopes if e is not None and isinstance(e.message, WeightsBlobs)]
    assert [int.from_bytes(version) for version in found] == list(range(count))
