"""The tunnel against bare libzmq CURVE, the way to a durable acknowledgement, and control under load (goals 5 to 7).

``python -m benchmarks.tunnel`` prints a table and writes ``benchmarks/out/tunnel.json``. Everything runs over loopback;
each far end is a process of its own, as in a run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.grpc_ends import grpc_peer
from benchmarks.harness import Row, compare, report, running
from benchmarks.ray_ends import ABSENT, ray_peer
from benchmarks.tunnel_ends import LOAD_PAYLOAD, MemorySource, bare_curve, hello, push_weights, tunnel
from user_sys.edge.outbox import Outbox
from user_sys.episode import Chunk, ChunkHeader, EpisodeSource
from user_sys.gateway.gateway import GatewayAddress, read_gateway_address
from user_sys.messages import LeaseRequest, WeightsReceived
from user_sys.store.store import StoreWriter
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import KeyPair, Keyring, new_keypair, save_keypair

MB = 1 << 20
STREAM_MESSAGES = 200
ROUND_TRIPS = 1000
DURABLE_BYTES = 64 * MB
DEADLINE_S = 60.0
SETTLE_S = 0.3
GRPC, RAY = "LeRobot's way (gRPC, plain)", "Ray (an actor's method, plain)"


# Goal 5 ---------------------------------------------------------------------------------------------------------------


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def drained(client: TunnelClient) -> None:
    left = client.drain(DEADLINE_S)
    assert left == 0, f"{left} chunks left after {DEADLINE_S} s ({client.state.value}: {client.reason})"


def stream_row(size: int, count: int) -> Row:
    packet, source = bytes(size), MemorySource(bytes(size), 0)
    with bare_curve() as bare, tunnel(source) as client, grpc_peer() as grpc, ray_peer() as ray:

        def ours() -> float:
            source.restart(count)
            return count * size / timed(lambda: drained(client)) / 1e9

        def bound() -> float:
            return count * size / timed(lambda: bare.stream(packet, count)) / 1e9

        def lerobot() -> float:
            return count * size / timed(lambda: grpc.stream(packet, count)) / 1e9

        def by_ray() -> float:
            assert ray is not None
            return count * size / timed(lambda: ray.stream(packet, count)) / 1e9

        peers: dict[str, Callable[[], float] | str] = {GRPC: lerobot, RAY: by_ray if ray else ABSENT}
        name = f"encrypted stream, {size >> 10} KiB a message; bound: libzmq CURVE"
        return compare(name, ours, bound, goal=5, unit="GB/s", target=0.9, peers=peers)


def request(client: TunnelClient) -> None:
    assert client.send(LeaseRequest(robot="panda-0", holder="b")), client.reason
    assert client.receive(5.0) is not None


def percentile(work: Callable[[], object], count: int, share: float) -> float:
    times = [timed(work) for _ in range(count)]
    return float(np.percentile(times, 100 * share)) * 1e6


def round_trip_row() -> Row:
    payload = b"x" * 60
    with bare_curve() as bare, tunnel(None) as client, ray_peer() as ray:

        def by_ray() -> float:
            assert ray is not None
            return percentile(lambda: ray.round_trip(payload), ROUND_TRIPS, 0.5)

        return compare(
            "request round trip, median; bound: libzmq CURVE",
            lambda: percentile(lambda: request(client), ROUND_TRIPS, 0.5),
            lambda: percentile(lambda: bare.round_trip(payload), ROUND_TRIPS, 0.5),
            goal=5,
            unit="µs",
            target=1 / 1.5,
            more_is_better=False,
            peers={RAY: by_ray if ray else ABSENT},
        )


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
        source=EpisodeSource.ONLINE,
        seed=0,
        started_unix_ns=0,
    )
    return Chunk(header, columns, {}).encode()


@contextmanager
def gateway_process(run: Path) -> Iterator[tuple[GatewayAddress, KeyPair]]:
    """A gateway's process, and the keys of the robot ``panda-0``."""
    keys = new_keypair()
    save_keypair(keys, run / "keys", "panda-0")
    Keyring(run / "keys").allow(keys.public, "panda-0", "robot")
    argv = [sys.executable, "-m", "user_sys.gateway", "--run", str(run)]
    with running(argv, run / "gateway.log"):
        deadline = time.monotonic() + DEADLINE_S
        while (address := read_gateway_address(run)) is None:
            assert time.monotonic() < deadline, (run / "gateway.log").read_text()
            time.sleep(0.01)
        yield address, keys


def durable_row(size: int) -> Row:
    """Chunks that lie in an outbox, until the gateway has acknowledged them all."""
    count, serial = DURABLE_BYTES // size, iter(range(1000))
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        run, store = Path(folder) / "run", Path(folder) / "bound"
        run.mkdir()
        source = MemorySource(bytes(chunk(0, size, "e")), 0)
        with gateway_process(run) as (address, keys), tunnel(source) as alone, StoreWriter.open(store) as writer:

            def ours() -> float:
                with Outbox.open(run / f"outbox-{next(serial)}") as outbox:
                    episode = f"e-{next(serial)}"
                    outbox.append(*(chunk(number, size, episode) for number in range(count)))
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
    """The work of the gateway's commit thread, without a network: decode and check once, append, one sync a group."""
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
    with tunnel(source) as client:
        stop = threading.Event()

        def take_weights() -> None:
            while not stop.is_set():
                if client.receive_weights(0.1) is not None:
                    client.send_weights(WeightsReceived(version=1))

        taker = threading.Thread(target=take_weights)
        taker.start()

        def loaded() -> float:
            push_weights(client, on=True)
            source.restart(1 << 30)
            time.sleep(SETTLE_S)
            p99 = percentile(lambda: request(client), ROUND_TRIPS, 0.99)
            push_weights(client, on=False)
            source.stop()
            time.sleep(SETTLE_S)
            return p99

        def unloaded() -> float:
            return percentile(lambda: request(client), ROUND_TRIPS, 0.99)

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
