"""Shared parts of the tunnel's tests: a run folder with keys, chunks, a gateway in a thread, and deadlines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
from msgspec.structs import replace
from wait_kit import until

from hal.discovery import Probe
from hal.spec import RobotSpec
from user_sys.edge.outbox import Outbox
from user_sys.episode import Chunk, ChunkHeader, EpisodeSource, decode_chunk
from user_sys.gateway import Gateway, GatewayConfig
from user_sys.gateway.gateway import GatewayAddress, read_gateway_address
from user_sys.messages import PROTOCOL_VERSION, Hello, RobotStatus
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import KeyPair, Keyring, Role, load_keypair, new_keypair, save_keypair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.tunnel.server import Peer

PEERS: dict[str, Role] = {"panda-0": "robot", "panda-1": "robot", "learner": "learner", "console-0": "console"}
# Long timeouts: a busy machine must not end a session. Tests of silence have their own limits.
QUICK = TunnelLimits(heartbeat_s=0.05, dead_after_s=60.0, handshake_s=60.0, backoff_min_s=0.01, backoff_max_s=0.1)
CONFIG = GatewayConfig(tunnel=QUICK, report_s=0.05, retry_s=0.02)


def hello(name: str, role: Role | None = None, protocol: int = PROTOCOL_VERSION) -> Hello:
    return Hello(protocol=protocol, role=role or PEERS[name], name=name)


def status(step: int = 0, robot: str = "panda-0", authority: str = "policy", operator: str = "") -> RobotStatus:
    return RobotStatus(robot=robot, authority=authority, operator=operator, phase="policy", episode="e", step=step,
                       policy_version=-1, real_time=False, outbox_chunks=0, control_hz=10.0,
                       safety_interventions=0)  # fmt: skip


def chunk(
    index: int, *, robot: str = "panda-0", episode: str = "episode-0", steps: int = 10, floats: int = 20
) -> bytes:
    state = np.full((steps, floats), index, np.float32)
    header = ChunkHeader(
        episode=episode,
        index=index,
        first_step=index * steps,
        steps=steps,
        robot=robot,
        embodiment="fake",
        task="lift",
        sentence="lift the cube",
        source=EpisodeSource.ONLINE,
        seed=0,
        started_unix_ns=0,
    )
    return Chunk(header, {"observation.state": state, "reward": np.zeros(steps, np.float32)}, {}).encode()


def prepare(run: Path) -> dict[str, KeyPair]:
    """Creates a run folder whose keyring allows `PEERS`. Returns their keys."""
    ring, keys = Keyring(run / "keys"), {}
    for name, role in PEERS.items():
        keys[name] = new_keypair()
        save_keypair(keys[name], run / "keys", name)
        ring.allow(keys[name].public, name, role)
    return keys


def stored(run: Path) -> list[tuple[str, int]]:
    """(episode, index) of every chunk in the store's log, with repetitions."""
    with LogReader.open(run / "store") as reader:
        headers = [decode_chunk(reader.read(ref)).header for ref in reader.records() if ref.kind == CHUNK_KIND]
        assert not reader.damaged
    return [(header.episode, header.index) for header in headers]


@dataclass
class GatewaySite:
    """A running gateway, and the clients of a test."""

    run: Path
    address: GatewayAddress
    gateway: Gateway | None = None
    clients: list[TunnelClient] = field(default_factory=list)

    def client(
        self,
        name: str,
        outbox: Outbox | None = None,
        *,
        holder: str = "",
        wait: bool = True,
        protocol: int = PROTOCOL_VERSION,
        spec: RobotSpec | None = None,
    ) -> TunnelClient:
        keys = load_keypair(self.run / "keys" / f"{name}.key")
        client = TunnelClient(
            self.address.endpoint,
            keys,
            self.address.public_key,
            replace(hello(name, protocol=protocol), holder=holder, spec=spec),
            outbox=outbox,
            limits=QUICK,
        )
        self.clients.append(client)
        client.start()
        if wait:
            client.wait_open(120)
        return client


@contextmanager
def serving(
    run: Path,
    config: GatewayConfig = CONFIG,
    probes: Mapping[str, Probe] = MappingProxyType({}),
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[GatewaySite]:
    """A gateway in a thread of this process, with the devices that `probes` find."""
    gateway, stop, failures = Gateway(config, run, probes, clock), threading.Event(), []

    def serve() -> None:
        try:
            gateway.run(stop)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    until(lambda: failures or read_gateway_address(run), "the gateway listens")
    address = read_gateway_address(run)
    assert address is not None, failures
    site = GatewaySite(run, address, gateway)
    try:
        yield site
    finally:
        for client in site.clients:
            client.close()
        stop.set()
        thread.join(120)
        assert not thread.is_alive()
        assert not failures, failures


def start_gateway_process(run: Path) -> subprocess.Popen[bytes]:
    """A gateway in its own process, to be killed; listens on the last port of the run."""
    with (run / "gateway.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "user_sys.gateway", "--run", str(run)],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


class RecordingHandler:
    """A TunnelHandler that records messages and sends no reply."""

    def __init__(self) -> None:
        self.opened: list[Peer] = []
        self.closed: list[tuple[str, str]] = []
        self.messages: list[tuple[str, AnyMessage]] = []
        self.payload_bytes = 0

    def refusal_reason(self, hello: Hello) -> str:
        return ""

    def on_peer_opened(self, peer: Peer) -> None:
        self.opened.append(peer)

    def on_peer_closed(self, peer: Peer, reason: str) -> None:
        self.closed.append((peer.name, reason))

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        self.messages.append((peer.name, message))
        self.payload_bytes += len(payload or b"")
