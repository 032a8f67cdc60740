"""Hostile frames beside an honest robot: nothing crashes, nothing is believed, the robot keeps working."""

from __future__ import annotations

import random
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq
from tunnel_kit import CONFIG, Site, chunk, hello, prepare, serving, stored, until, weights

from user_sys.edge.outbox import Outbox
from user_sys.messages import ChunkOffer, Grant, Heartbeat, RobotStatus, StopRun
from user_sys.tunnel.client import TunnelState
from user_sys.tunnel.keys import KeyPair, load_keypair, new_keypair
from user_sys.tunnel.wire import Channel, Envelope, encode, new_session

FRAMES_PER_SESSION = 20


class Attacker:
    """Speaks CURVE with a key that is allowed, and otherwise says what it likes."""

    def __init__(self, site: Site, keys: KeyPair, seed: int) -> None:
        self._site, self._keys, self._random = site, keys, random.Random(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def connect(self, routing_id: bytes) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 200
        dealer.sndtimeo = 5000
        dealer.curve_publickey, dealer.curve_secretkey = self._keys.public.encode(), self._keys.secret.encode()
        dealer.curve_serverkey = self._site.address.public_key.encode()
        dealer.setsockopt(zmq.ROUTING_ID, routing_id)
        dealer.connect(self._site.address.endpoint)
        return dealer

    def session(self, frames: int) -> None:
        """Opens one session, sometimes politely, and sends hostile messages on a channel."""
        channel = self._random.choice(list(Channel))
        routing_id = self._random.choice([channel.value + new_session(), self._random.randbytes(17), b"c", b"x" * 200])
        dealer = self.connect(routing_id)
        if self._random.random() < 0.5:
            dealer.send(encode(Envelope(hello("panda-1")))[0])
        for _ in range(frames):
            dealer.send_multipart(self.message())
        dealer.close()

    def message(self) -> list[bytes]:
        return self._random.choice([self._garbage, self._mutated, self._lying, self._forged, self._many_parts])()

    def _garbage(self) -> list[bytes]:
        return [self._random.randbytes(self._random.randrange(300)) for _ in range(self._random.randint(1, 3))]

    def _mutated(self) -> list[bytes]:
        frames = [bytearray(frame) for frame in self._random.choice(self._valid())]
        for _ in range(self._random.randint(1, 4)):
            frame = self._random.choice(frames)
            if frame:
                frame[self._random.randrange(len(frame))] = self._random.randrange(256)
        return [bytes(frame) for frame in frames]

    def _lying(self) -> list[bytes]:
        lengths = [b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
        offer = encode(Envelope(ChunkOffer(sequence=0, episode="x", index=0), b""))[0]
        packet = bytearray(chunk(0, robot="panda-1"))
        packet[4:8] = self._random.randbytes(4)
        return self._random.choice([[self._random.choice(lengths)], [offer, bytes(packet)], [b"\x91" * 60_000]])

    def _forged(self) -> list[bytes]:
        offer = ChunkOffer(sequence=self._random.randrange(9), episode="../../etc/passwd", index=-1)
        status = {"type": "robot-status", "robot": "panda-0"}
        return self._random.choice(
            [
                [bytes(frame) for frame in encode(Envelope(offer, chunk(self._random.randrange(50))))],
                [msgspec.msgpack.encode(status)],
                [msgspec.msgpack.encode({"type": "hello", "protocol": 3, "role": "robot", "name": "panda-1"})],
                [bytes(frame) for frame in encode(Envelope(*weights(999)))],
                [encode(Envelope(StopRun(reason="attack")))[0]],
            ]
        )

    def _many_parts(self) -> list[bytes]:
        return [b"\xc0"] * 1000

    def _valid(self) -> list[list[bytes]]:
        offer = Envelope(ChunkOffer(sequence=1, episode="e", index=0), chunk(0, robot="panda-1"))
        heartbeat = Envelope(Heartbeat(t_client_ns=1))
        return [[bytes(f) for f in encode(e)] for e in (offer, heartbeat, Envelope(hello("panda-1")))]

    def close(self) -> None:
        self._context.term()


def raw_connections(endpoint: str, count: int, seed: int) -> None:
    """TCP connections that never speak our protocol: garbage, half greetings, silence."""
    rng, url = random.Random(seed), urlsplit(endpoint)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)
    kept = []
    for _ in range(count):
        connection = socket.create_connection((url.hostname, url.port), timeout=5)
        sent = rng.choice(
            [rng.randbytes(rng.randrange(1, 400)), greeting[: rng.randrange(64)], greeting + b"\xff" * 90]
        )
        connection.sendall(sent) if sent else None
        kept.append(connection)
    for connection in kept:
        connection.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    prepare(tmp_path)
    with serving(tmp_path) as made:
        yield made


def hostile_hour(site: Site, frames: int) -> None:
    """An honest robot records and reports while an allowed and a foreign key attack."""
    run = site.run
    with Outbox.open(run / "outbox") as outbox:
        robot, console = site.client("panda-0", outbox), site.client("desk")
        attacker = Attacker(site, load_keypair(run / "keys" / "panda-1.key"), seed=7)

        def attack() -> None:
            for _ in range(frames // FRAMES_PER_SESSION):
                attacker.session(FRAMES_PER_SESSION)

        threads = [
            threading.Thread(target=attack),
            threading.Thread(target=raw_connections, args=(site.address.endpoint, frames // 20, 3)),
        ]
        for thread in threads:
            thread.start()
        index = 0
        while any(thread.is_alive() for thread in threads) or index < 50:
            outbox.append(chunk(index))
            index += 1
            assert robot.drain(10) == 0, "the honest robot's chunks are taken all the while"
            robot.send(status(index))
            until(lambda: (m := console.receive(5)) is not None and getattr(m, "robot", "") == "panda-0", "relayed")
        for thread in threads:
            thread.join()
        attacker.close()
        assert robot.state is TunnelState.OPEN and robot.counters["lost"] == 0
        assert console.state is TunnelState.OPEN
        assert robot.receive_weights(0) is None
        robot.close()
    assert site.gateway is not None and site.gateway.server.failure is None
    assert site.gateway.server.counters["malformed"] > frames // FRAMES_PER_SESSION // 4
    mine = [key for key in stored(run) if key[0] == "episode-0"]
    assert sorted(mine) == [("episode-0", n) for n in range(index)]


def status(step: int) -> RobotStatus:
    return RobotStatus(robot="panda-0", authority="policy", operator="", phase="policy", episode="e", step=step,
                       policy_version=0, real_time=False, outbox_chunks=0, control_hz=10,
                       safety_interventions=0)  # fmt: skip


def test_two_thousand_hostile_frames_beside_an_honest_robot(site: Site) -> None:
    hostile_hour(site, 2_000)


@pytest.mark.slow
def test_a_hundred_thousand_hostile_frames_and_memory_stays_bounded(site: Site) -> None:
    hostile_hour(site, 5_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = site.run
    attacker = Attacker(site, load_keypair(run / "keys" / "panda-1.key"), seed=8)
    for _ in range(100_000 // FRAMES_PER_SESSION):
        attacker.session(FRAMES_PER_SESSION)
    attacker.close()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < 50


def test_a_wrong_key_is_refused_a_hundred_times_of_a_hundred(site: Site) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for _ in range(100):
        keys = new_keypair()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.curve_publickey, dealer.curve_secretkey = keys.public.encode(), keys.secret.encode()
        dealer.curve_serverkey = site.address.public_key.encode()
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        dealer.connect(site.address.endpoint)
        assert monitor.poll(5000)
        event = zmq.utils.monitor.recv_monitor_message(monitor)  # type: ignore[attr-defined]
        assert event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH and event["value"] == 400
        dealer.disable_monitor()
        monitor.close(0)
        dealer.close(0)
    context.term()


def test_a_robot_that_ignores_its_window_is_refused(site: Site) -> None:
    run = site.run
    flood = site.client("panda-1")
    assert site.gateway is not None
    committer = site.gateway._committer
    committer._stopping.set()  # a store that takes nothing any more
    until(lambda: not any(thread.is_alive() for thread in committer._threads), "the committer stands still")
    flood._outlets[Channel.EXPERIENCE].grant(Grant(messages=1 << 40, size_bytes=1 << 40))  # by nobody
    packet = chunk(0, robot="panda-1")
    for sequence in range(CONFIG.tunnel.experience.window_messages + 1):
        flood._queue(Envelope(ChunkOffer(sequence=sequence, episode="e", index=sequence), packet))
    until(lambda: flood.state is TunnelState.REFUSED, "refused")
    assert "window" in flood.reason
    assert stored(run) == []
