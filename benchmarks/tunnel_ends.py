"""The ends that `benchmarks.tunnel` measures between: ours and bare libzmq, each far end in a process of its own.

``python -m benchmarks.tunnel_ends echo|bare`` is such a far end; it prints its address and ends with its input.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from user_sys.messages import (
    PROTOCOL_VERSION,
    ChunkAck,
    ChunkOffer,
    Hello,
    LeaseGrant,
    LeaseRequest,
    MetricsReport,
    WeightsBlobs,
    WeightsReceived,
)
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.connection import PendingChunk
from user_sys.tunnel.keys import KeyPair, Keyring, new_keypair
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.tunnel.server import Peer, TunnelServer

LOAD_PAYLOAD = 1 << 20
HEADER_BYTES = 60
PUSH = "push"


class MemorySource:
    """Chunks from memory: the tunnel's `ChunkSource` without a disk. Ends after `count`, or never."""

    def __init__(self, packet: bytes, count: int) -> None:
        self.packet, self.count = packet, count
        self.acknowledged = -1
        self._appended: Callable[[], None] | None = None

    def __len__(self) -> int:
        return max(0, self.count - 1 - self.acknowledged)

    def pending(self, after_sequence: int) -> Iterator[PendingChunk]:
        for sequence in range(max(after_sequence, self.acknowledged) + 1, self.count):
            yield PendingChunk(sequence, self.packet)

    def acknowledge(self, sequence: int) -> None:
        self.acknowledged = max(self.acknowledged, sequence)

    def set_aside(self, sequence: int, reason: str) -> None:
        raise AssertionError(f"chunk {sequence} refused: {reason}")

    def set_on_append(self, on_append: Callable[[], None] | None) -> None:
        self._appended = on_append

    def stop(self) -> None:
        """Offers no chunk beyond those in flight."""
        self.count = self.acknowledged + 1

    def restart(self, count: int) -> None:
        """Offers `count` chunks more."""
        self.count += count
        if self._appended is not None:
            self._appended()


class Echo:
    """Answers requests and acknowledges chunks at once; on request it sends weights each time they were received."""

    def __init__(self) -> None:
        self.server: TunnelServer
        self._pushing = False
        self._weights = WeightsBlobs(version=bytes(32), parts=())
        self._payload = bytes(LOAD_PAYLOAD)

    def refusal_reason(self, hello: Hello) -> str:
        return ""

    def on_peer_opened(self, peer: Peer) -> None:
        return

    def on_peer_closed(self, peer: Peer, reason: str) -> None:
        return

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        match message:
            case ChunkOffer():
                self.server.send(peer.name, ChunkAck(sequence=message.sequence))
                self.server.release(peer, 1, len(payload or b""))
            case LeaseRequest():
                self.server.send(peer.name, LeaseGrant(robot=peer.name, holder="b", token=1, ttl_s=1.0))
            case MetricsReport():
                self._pushing = bool(message.scalars[PUSH])
        if self._pushing and isinstance(message, MetricsReport | WeightsReceived):
            self.server.send(peer.name, self._weights, self._payload)


def serve_echo(robot_key: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ring, keys, echo = Keyring(Path(folder)), new_keypair(), Echo()
        ring.allow(robot_key, "panda-0", "robot")
        with TunnelServer("tcp://127.0.0.1:0", keys, ring, echo) as server:
            echo.server = server
            announce(server.endpoint, keys.public)


def serve_bare() -> None:
    """ROUTER with CURVE and nothing else. A request states how many of them one answer covers."""
    keys, stopping = new_keypair(), threading.Event()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server, router.curve_secretkey = True, keys.secret.encode()
    router.rcvhwm = 64
    router.bind("tcp://127.0.0.1:0")

    def answer() -> None:
        count = 0
        while not stopping.is_set():
            if not router.poll(100):
                continue
            identity, header, *_ = router.recv_multipart(copy=False)
            count += 1
            if count >= int(header.bytes):
                router.send_multipart([identity, b"x" * HEADER_BYTES], copy=False)
                count = 0

    thread = threading.Thread(target=answer)
    thread.start()
    announce(router.getsockopt_string(zmq.LAST_ENDPOINT), keys.public)
    stopping.set()
    thread.join()
    router.close(0)
    context.term()


def announce(endpoint: str, public_key: str) -> None:
    """Prints the address of this far end, and serves until standard input closes."""
    sys.stdout.write(json.dumps([endpoint, public_key]) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


@contextmanager
def far_end(*argv: str, module: str = "benchmarks.tunnel_ends") -> Iterator[tuple[str, str]]:
    """Starts a far end; yields its endpoint and public key."""
    command = [sys.executable, "-m", module, *argv]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        endpoint, public_key = json.loads(process.stdout.readline())
        try:
            yield endpoint, public_key
        finally:
            process.stdin.close()


def hello() -> Hello:
    return Hello(protocol=PROTOCOL_VERSION, role="robot", name="panda-0")


@contextmanager
def tunnel(source: MemorySource | None) -> Iterator[TunnelClient]:
    """A client of an `Echo`."""
    robot = new_keypair()
    with far_end("echo", robot.public) as (endpoint, public_key):
        with TunnelClient(endpoint, robot, public_key, hello(), outbox=source) as client:
            client.wait_open(10)
            yield client


def push_weights(client: TunnelClient, on: bool) -> None:
    client.send(MetricsReport(node="panda-0", count=0, scalars={PUSH: float(on)}))


class BareCurve:
    """A DEALER with CURVE, and the ROUTER of `serve_bare`."""

    def __init__(self, endpoint: str, public_key: str, keys: KeyPair | None = None) -> None:
        ours = keys or new_keypair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealer = self._context.socket(zmq.DEALER)
        self.dealer.curve_publickey, self.dealer.curve_secretkey = ours.public.encode(), ours.secret.encode()
        self.dealer.curve_serverkey = public_key.encode()
        self.dealer.sndhwm = 64
        self.dealer.connect(endpoint)
        self.round_trip(b"warm")

    def round_trip(self, request: bytes) -> None:
        self.dealer.send_multipart([b"1", request])
        self.dealer.recv()

    def stream(self, packet: bytes, count: int) -> None:
        """Sends `count` packets and waits for one answer to all."""
        header = str(count).encode()
        for _ in range(count):
            self.dealer.send_multipart([header, packet], copy=False)
        self.dealer.recv()

    def close(self) -> None:
        self.dealer.close(0)
        self._context.term()


@contextmanager
def bare_curve() -> Iterator[BareCurve]:
    with far_end("bare") as address:
        bare = BareCurve(*address)
        try:
            yield bare
        finally:
            bare.close()


if __name__ == "__main__":
    serve_echo(sys.argv[2]) if sys.argv[1] == "echo" else serve_bare()
