"""Hostile peers: one with a robot's key that sends arbitrary messages, and others without a key."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
import zmq
from tunnel_kit import chunk, hello
from zmq.utils.monitor import recv_monitor_message

from user_sys.gateway.gateway import GatewayAddress
from user_sys.messages import (
    PROTOCOL_VERSION,
    BlobPart,
    ChunkOffer,
    CreditGrant,
    Heartbeat,
    Preview,
    StopRun,
    WeightsBlobs,
)
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.protocol import Channel, Envelope, encode_envelope, new_session_id

Dealer = zmq.Socket[bytes]
HANDSHAKE_MS = 5000
PATIENCE_MS = 120_000
LENGTHS = (b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff")
BOMB = b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff\x03\x01\x11\x00\x02\x11\x00\x03\x11\x00\xff\xd9"  # 65535 x 65535


class Attacker:
    """Speaks CURVE as `panda-1`, whose key is allowed."""

    def __init__(self, address: GatewayAddress, keys: KeyPair, seed: int) -> None:
        self._address, self._keys, self._random = address, keys, random.Random(seed)
        self._context: zmq.Context[Dealer] = zmq.Context()
        offer = Envelope(ChunkOffer(sequence=1), chunk(0, robot="panda-1"))
        valid = (offer, Envelope(Heartbeat(t_client_ns=1)), Envelope(CreditGrant(messages=1, size_bytes=1)))
        self._valid = [[bytes(f) for f in encode_envelope(e)] for e in (*valid, Envelope(hello("panda-1")))]
        self._kinds: list[Callable[[], list[bytes]]] = [
            *(self._garbage, self._mutated, self._lying, self._forged, self._bomb, self._traversal, self._many_parts)
        ]

    def connect(self, routing_id: bytes) -> Dealer:
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger, dealer.sndtimeo = 200, HANDSHAKE_MS
        dealer.curve_publickey, dealer.curve_secretkey = self._keys.public.encode(), self._keys.secret.encode()
        dealer.curve_serverkey = self._address.public_key.encode()
        dealer.setsockopt(zmq.ROUTING_ID, routing_id)
        dealer.connect(self._address.endpoint)
        return dealer

    def session(self, frames: int) -> None:
        """Opens connections, some with a valid Hello, and sends hostile messages."""
        if self._random.random() < 0.5:
            session, greeting = new_session_id(), encode_envelope(Envelope(hello("panda-1")))[0]
            dealers = [self.connect(channel.value + session) for channel in Channel]
            for dealer in dealers:
                dealer.send(greeting)
                dealer.poll(HANDSHAKE_MS)
        else:
            ids = [
                self._random.choice(list(Channel)).value + new_session_id(),
                self._random.randbytes(17),
                b"c",
                b"x" * 200,
            ]
            dealers = [self.connect(self._random.choice(ids))]
        for _ in range(frames):
            self._random.choice(dealers).send_multipart(self.message())
        for dealer in dealers:
            dealer.close()

    def message(self) -> list[bytes]:
        return self._random.choice(self._kinds)()

    def _garbage(self) -> list[bytes]:
        return [self._random.randbytes(self._random.randrange(300)) for _ in range(self._random.randint(1, 3))]

    def _mutated(self) -> list[bytes]:
        """A valid message, its record damaged; its payload stays as it is: a valid payload is no attack."""
        record, *payload = self._random.choice(self._valid)
        damaged = bytearray(record)
        for _ in range(self._random.randint(1, 4)):
            damaged[self._random.randrange(len(damaged))] = self._random.randrange(256)
        return [bytes(damaged), *(b"not a packet" for _ in payload)]

    def _lying(self) -> list[bytes]:
        packet = bytearray(chunk(0, robot="panda-1"))
        packet[4:8] = b"\xff" + self._random.randbytes(3)
        grains = self._encoded(
            WeightsBlobs(version=bytes(32), parts=(BlobPart(bytes(32), b"", "raw", 1, 1 << 62, 0, 0, 1),)), b"x"
        )
        return self._random.choice(
            [
                [self._random.choice(LENGTHS)],
                self._offer(bytes(packet)),
                [b"\x91" * 60_000],
                self._encoded(grains, b"x"),
            ]
        )

    def _forged(self) -> list[bytes]:
        """Messages in another name: replays of an honest robot, and operator commands."""
        return self._random.choice(
            [
                self._offer(chunk(self._random.randrange(50))),
                [msgspec.msgpack.encode({"type": "robot-status", "robot": "panda-0"})],
                [msgspec.msgpack.encode({"type": "hello", "protocol": 99, "role": "robot", "name": "panda-1"})],
                self._encoded(hello("panda-0")),
                self._encoded(hello("panda-1", "learner")),
                self._encoded(WeightsBlobs(version=bytes(32), parts=()), b"x"),
                self._encoded(StopRun(reason="attack")),
            ]
        )

    def _bomb(self) -> list[bytes]:
        name = self._random.choice(["panda-0", "../panda-1"])
        return self._encoded(Preview(robot=name, camera="front", step=1), BOMB)

    def _traversal(self) -> list[bytes]:
        name = self._random.choice(["../../etc/passwd", "/etc/passwd", "a/b", "..", "a\0b", "~root", "x" * 4096])
        hostile = {"type": "hello", "protocol": PROTOCOL_VERSION, "role": "robot", "name": name}
        return self._random.choice(
            [
                self._offer(chunk(0, robot="panda-1", episode=name)),
                self._offer(chunk(0, robot=name)),
                [msgspec.msgpack.encode(hostile)],
            ]
        )

    def _many_parts(self) -> list[bytes]:
        return [b"\xc0"] * 1000

    def _offer(self, packet: bytes) -> list[bytes]:
        return self._encoded(ChunkOffer(sequence=self._random.randrange(9)), packet)

    def _encoded(self, message: object, payload: bytes | None = None) -> list[bytes]:
        return [bytes(frame) for frame in encode_envelope(Envelope(message, payload))]  # type: ignore[arg-type]

    def monster(self, part: bytes, parts: int) -> bool:
        """Sends one message of many parts. Returns whether the gateway closed the connection."""
        dealer = self.connect(Channel.EXPERIENCE.value + new_session_id())
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for _ in range(parts - 1):
            dealer.send(part, zmq.SNDMORE)
        dealer.send(part)
        broken = bool(monitor.poll(PATIENCE_MS))
        dealer.disable_monitor()
        monitor.close(0)
        dealer.close(0)
        return broken

    def namesakes(self, count: int, parts: int) -> None:
        """Overlapping connections with one routing id that each send many parts."""
        kept: list[Dealer] = []
        for _ in range(count):
            dealer = self.connect(b"c")
            dealer.setsockopt(zmq.RECONNECT_IVL, -1)
            dealer.send_multipart([b"\xc0"] * parts)
            kept.append(dealer)
            if len(kept) > 2:
                kept.pop(0).close(PATIENCE_MS)
        for dealer in kept:
            dealer.close(PATIENCE_MS)

    def close(self) -> None:
        self._context.term()


def raw_connections(endpoint: str, count: int, seed: int) -> None:
    """TCP connections without our protocol: garbage, half handshakes, silence."""
    rng, url = random.Random(seed), urlsplit(endpoint)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)
    kept: list[socket.socket] = []
    for _ in range(count):
        connection = socket.create_connection((url.hostname, url.port), timeout=5)
        sent = rng.choice(
            [rng.randbytes(rng.randrange(1, 400)), greeting[: rng.randrange(64)], greeting + b"\xff" * 90]
        )
        connection.sendall(sent) if sent else None
        kept.append(connection)
        if len(kept) == 200:
            kept.pop(0).close()
    for connection in kept:
        connection.close()


def knock(context: zmq.Context[Dealer], address: GatewayAddress, keys: KeyPair | None) -> tuple[int, int]:
    """The event and value with which a handshake ends, under `keys` or without any."""
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.setsockopt(zmq.RECONNECT_IVL, -1)
    if keys is not None:
        dealer.curve_publickey, dealer.curve_secretkey = keys.public.encode(), keys.secret.encode()
        dealer.curve_serverkey = address.public_key.encode()
    failures = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    monitor = dealer.get_monitor_socket(
        sum(failures) | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    )
    dealer.connect(address.endpoint)
    assert monitor.poll(HANDSHAKE_MS), "the gateway answers"
    event = recv_monitor_message(monitor)
    dealer.disable_monitor()
    monitor.close(0)
    dealer.close(0)
    return int(event["event"]), int(event["value"])
