"""The tunnel against bare libzmq CURVE, the way to a durable acknowledgement, and control under load (goals 5, 6, 7).

``python -m benchmarks.tunnel`` prints a table and writes ``benchmarks/out/tunnel.json``. Everything runs over loopback;
the gateway of goal 6 is a process of its own, as in a run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import zmq

from benchmarks.harness import Row, compare, report
from user_sys.edge.outbox import Outbox
from user_sys.episode import Chunk, ChunkHeader, Source
from user_sys.gateway.service import GatewayAddress, read_address
from user_sys.messages import (
    PROTOCOL_VERSION,
    ChunkAck,
    ChunkOffer,
    Hello,
    LeaseGrant,
    LeaseRequest,
    WeightsManifest,
    WeightsReceived,
)
from user_sys.store.store import StoreWriter
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import KeyPair, Keyring, new_keypair, save_keypair
from user_sys.tunnel.server import Peer, TunnelServer
from user_sys.tunnel.uplink import PendingChunk
from user_sys.tunnel.wire import AnyMessage, Payload

MB = 1 << 20
STREAM_MESSAGES = 200
ROUND_TRIPS = 1000
DURABLE_BYTES = 64 * MB
LOAD_PAYLOAD = 1 * MB
DEADLINE_S = 60.0


class MemorySource:
    """Chunks from memory: the tunnel's `ChunkSource` without a disk. Ends after `count`, or never."""

    stream = "memory"

    def __init__(self, packet: bytes, count: int) -> None:
        self.packet, self.count = packet, count
        self._acknowledged = -1
        self._appended: Callable[[], None] | None = None

    def __len__(self) -> int:
        return max(0, self.count - 1 - self._acknowledged)

    def pending(self, after_sequence: int) -> Iterator[PendingChunk]:
        for sequence in range(max(after_sequence, self._acknowledged) + 1, self.count):
            yield PendingChunk(sequence, "e", sequence, self.packet)

    def acknowledge(self, sequence: int) -> None:
        self._acknowledged = max(self._acknowledged, sequence)

    def set_aside(self, sequence: int, reason: str) -> None:
        raise AssertionError(f"chunk {sequence} refused: {reason}")

    def listen(self, appended: Callable[[], None] | None) -> None:
        self._appended = appended

    def stop(self) -> None:
        """Offers nothing beyond what is under way."""
        self.count = self._acknowledged + 1

    def restart(self, count: int) -> None:
        """Offers `count` chunks more."""
        self.count += count
        if self._appended is not None:
            self._appended()


class Echo:
    """Answers requests and acknowledges chunks at once; while `pushing`, sends weights each time they were received."""

    def __init__(self) -> None:
        self.server: TunnelServer
        self.pushing = False
        self._weights = WeightsManifest(version=1, codec="full", digest="", size_bytes=LOAD_PAYLOAD)
        self._payload = bytes(LOAD_PAYLOAD)

    def objection(self, hello: Hello) -> str:
        return ""

    def peer_opened(self, peer: Peer) -> None:
        return

    def peer_closed(self, peer: Peer, reason: str) -> None:
        return

    def push(self, name: str) -> None:
        self.server.send(name, self._weights, self._payload)

    def received(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        if isinstance(message, ChunkOffer):
            self.server.send(peer.name, ChunkAck(sequence=message.sequence))
            self.server.release(peer, 1, len(payload or b""))
        elif isinstance(message, LeaseRequest):
            self.server.send(peer.name, LeaseGrant(robot=peer.name, holder="b", token=1, ttl_s=1.0))
        elif isinstance(message, WeightsReceived) and self.pushing:
            self.push(peer.name)


def hello() -> Hello:
    return Hello(protocol=PROTOCOL_VERSION, role="robot", name="panda-0")


@contextmanager
def tunnel(source: MemorySource | None) -> Iterator[tuple[TunnelClient, Echo]]:
    """A client and a server that answers at once."""
    with tempfile.TemporaryDirectory() as folder:
        ring, robot, gateway, echo = Keyring(Path(folder)), new_keypair(), new_keypair(), Echo()
        ring.allow(robot.public, "panda-0", "robot")
        with TunnelServer("tcp://127.0.0.1:0", gateway, ring, echo) as server:
            echo.server = server
            with TunnelClient(server.endpoint, robot, gateway.public, hello(), outbox=source) as client:
                client.wait_open(10)
                yield client, echo


# Bare libzmq ----------------------------------------------------------------------------------------------------------


class BareCurve:
    """ROUTER and DEALER with CURVE and nothing else, each with a context of its own, the ROUTER in a thread."""

    def __init__(self) -> None:
        keys, ours = new_keypair(), new_keypair()
        self._contexts: list[zmq.Context[zmq.Socket[bytes]]] = [zmq.Context(), zmq.Context()]
        self._router = self._contexts[0].socket(zmq.ROUTER)
        self._router.curve_server, self._router.curve_secretkey = True, keys.secret.encode()
        self._router.bind("tcp://127.0.0.1:0")
        self.dealer = self._contexts[1].socket(zmq.DEALER)
        self.dealer.curve_publickey, self.dealer.curve_secretkey = ours.public.encode(), ours.secret.encode()
        self.dealer.curve_serverkey = keys.public.encode()
        self.dealer.sndhwm = self._router.rcvhwm = 64
        self.dealer.connect(self._router.getsockopt_string(zmq.LAST_ENDPOINT))
        self._stopping = threading.Event()
        self._expected = 1
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()
        self.round_trip(b"warm")

    def _answer(self) -> None:
        count = 0
        while not self._stopping.is_set():
            if not self._router.poll(100):
                continue
            frames = self._router.recv_multipart(copy=False)
            count += 1
            if count >= self._expected:
                self._router.send_multipart([frames[0], b"x" * 60], copy=False)
                count = 0

    def round_trip(self, request: bytes) -> None:
        self.dealer.send(request)
        self.dealer.recv()

    def stream(self, packet: bytes, count: int) -> None:
        """Sends `count` packets and waits for one answer to all."""
        self._expected = count
        for _ in range(count):
            self.dealer.send_multipart([b"x" * 60, packet], copy=False)
        self.dealer.recv()
        self._expected = 1

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self.dealer.close(0)
        self._router.close(0)
        for context in self._contexts:
            context.term()


# Goal 5 ---------------------------------------------------------------------------------------------------------------


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def drained(client: TunnelClient) -> None:
    left = client.drain(DEADLINE_S)
    assert left == 0, f"{left} chunks left after {DEADLINE_S} s ({client.state.value}: {client.reason})"


def stream_row(size: int, count: int) -> Row:
    packet, bare = bytes(size), BareCurve()
    source = MemorySource(packet, 0)
    with tunnel(source) as (client, _):

        def ours() -> float:
            source.restart(count)
            return count * size / timed(lambda: drained(client)) / 1e9

        def bound() -> float:
            return count * size / timed(lambda: bare.stream(packet, count)) / 1e9

        name = f"encrypted stream, {size >> 10} KiB a message"
        row = compare(name, ours, bound, goal=5, unit="GB/s", target=0.9 if size == MB else None)
    bare.close()
    return row


def request(client: TunnelClient) -> None:
    assert client.send(LeaseRequest(robot="panda-0", holder="b")), client.reason
    assert client.receive(5.0) is not None


def percentile(work: Callable[[], object], count: int, share: float) -> float:
    times = [timed(work) for _ in range(count)]
    return float(np.percentile(times, 100 * share)) * 1e6


def round_trip_row() -> Row:
    bare, payload = BareCurve(), b"x" * 60
    with tunnel(None) as (client, _):
        row = compare(
            "request round trip, median",
            lambda: percentile(lambda: request(client), ROUND_TRIPS, 0.5),
            lambda: percentile(lambda: bare.round_trip(payload), ROUND_TRIPS, 0.5),
            goal=5,
            unit="µs",
            target=1 / 1.5,
            more_is_better=False,
        )
    bare.close()
    return row


# Goal 6 ---------------------------------------------------------------------------------------------------------------


def chunk(number: int, size: int, episode: str) -> bytes:
    columns = {"observation.state": np.full((100, size // 400), number, np.float32)}
    header = ChunkHeader(
        episode=episode,
        index=number,
        first_step=100 * number,
        steps=100,
        robot="panda-0",
        embodiment="fake",
        task="lift",
        sentence="lift the cube",
        source=Source.ONLINE,
        seed=0,
        started_unix_ns=0,
    )
    return Chunk(header, columns, {}).encode()


@contextmanager
def gateway_process(run: Path) -> Iterator[tuple[GatewayAddress, KeyPair]]:
    keys = new_keypair()
    save_keypair(keys, run / "keys", "panda-0")
    Keyring(run / "keys").allow(keys.public, "panda-0", "robot")
    argv = [sys.executable, "-m", "user_sys.gateway", "--run", str(run)]
    with (run / "gateway.log").open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + DEADLINE_S
            while (address := read_address(run)) is None:
                assert time.monotonic() < deadline, (run / "gateway.log").read_text()
                time.sleep(0.01)
            yield address, keys
        finally:
            process.terminate()


def durable_row(size: int) -> Row:
    """Chunks that lie in an outbox, until the gateway has acknowledged them all."""
    count, serial = DURABLE_BYTES // size, iter(range(1000))
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        run, store = Path(folder) / "run", Path(folder) / "bound"
        run.mkdir()
        source = MemorySource(bytes(chunk(0, size, "e")), 0)
        with gateway_process(run) as (address, keys), tunnel(source) as (alone, _), StoreWriter.open(store) as writer:

            def ours() -> float:
                with Outbox.open(run / f"outbox-{next(serial)}") as outbox:
                    episode = f"e-{next(serial)}"
                    for number in range(count):
                        outbox.append(chunk(number, size, episode), sync=False)
                    outbox.sync()
                    with TunnelClient(address.endpoint, keys, address.public_key, hello(), outbox=outbox) as client:
                        client.wait_open(10)
                        return count * size / timed(lambda: drained(client)) / 1e6

            def store_alone() -> float:
                episode = f"e-{next(serial)}"
                packets = [chunk(number, size, episode) for number in range(count)]
                return count * size / timed(lambda: append_in_groups(writer, packets)) / 1e6

            def tunnel_alone() -> float:
                source.restart(count)
                return count * size / timed(lambda: drained(alone)) / 1e6

            name = f"outbox to durable acknowledgement, {size >> 10} KiB chunks; bound: slower stage alone"
            return compare(name, ours, lambda: min(store_alone(), tunnel_alone()), goal=6, unit="MB/s", target=0.6)


def append_in_groups(writer: StoreWriter, packets: list[bytes], group_bytes: int = 8 * MB) -> None:
    """What the gateway's commit thread does, without a network: decode and check once, append, one sync a group."""
    pending = 0
    for packet in packets:
        writer.append(packet)
        pending += len(packet)
        if pending >= group_bytes:
            writer.sync()
            pending = 0
    writer.sync()


# Goal 7 ---------------------------------------------------------------------------------------------------------------


def loaded_row() -> Row:
    """p99 of a request while experience goes up and weights come down as fast as they can."""
    source = MemorySource(bytes(LOAD_PAYLOAD), 0)
    with tunnel(None) as (idle, _), tunnel(source) as (client, echo):
        stop = threading.Event()

        def take_weights() -> None:
            while not stop.is_set():
                if client.take_weights() is None:
                    stop.wait(0.0005)

        taker = threading.Thread(target=take_weights)
        taker.start()

        def loaded() -> float:
            echo.pushing = True
            echo.push("panda-0")
            source.restart(1 << 30)
            p99 = percentile(lambda: request(client), 300, 0.99)
            echo.pushing = False
            source.stop()
            return p99

        def unloaded() -> float:
            return percentile(lambda: request(idle), 300, 0.99)

        name = "control p99 while both bulk channels are saturated; bound: idle p99"
        row = compare(name, loaded, unloaded, goal=7, unit="µs", target=1 / 3, more_is_better=False)
        stop.set()
        taker.join()
    return row


def main() -> None:
    rows = [
        stream_row(MB, STREAM_MESSAGES),
        stream_row(64 << 10, 8 * STREAM_MESSAGES),
        round_trip_row(),
        durable_row(MB),
        durable_row(64 << 10),
        loaded_row(),
    ]
    report("tunnel", rows)


if __name__ == "__main__":
    main()
