"""Hostile frames during the work of an honest robot: no crash, no accepted frame, no disturbance."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
from attacker_kit import Attacker, knock, raw_connections
from tunnel_kit import CONFIG, QUICK, GatewaySite, chunk, hello, prepare, serving, start_gateway_process, stored, until

from user_sys.edge.outbox import Outbox
from user_sys.gateway.gateway import GatewayAddress, read_gateway_address
from user_sys.messages import ChunkOffer, CreditGrant, WeightsOffer
from user_sys.tunnel.client import TunnelClient, TunnelState
from user_sys.tunnel.keys import KeyPair, Keyring, load_keypair, new_keypair
from user_sys.tunnel.protocol import Channel, Envelope

FRAMES_PER_SESSION = 20
ROBOT_HZ = 50.0
KEPT_RATE, UNDER_WAY = 0.8, 5  # of a short attack, on a fast machine, the newest chunks are a large share
MAX_GROWTH_MB = 50


@dataclass
class AttackedGateway:
    """A gateway in a process of its own, so that its memory can be seen."""

    run: Path
    process: subprocess.Popen[bytes]
    address: GatewayAddress

    @property
    def peak_mb(self) -> float:
        """The peak resident memory of the gateway."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

    def attacker(self, seed: int) -> Attacker:
        return Attacker(self.address, load_keypair(self.run / "keys" / "panda-1.key"), seed)


@pytest.fixture
def fortress(tmp_path: Path) -> Iterator[AttackedGateway]:
    prepare(tmp_path)
    # Long timeouts: a busy machine must not end a session.
    (tmp_path / "config.yaml").write_text("gateway: {tunnel: {dead_after_s: 60}}\n")
    process = start_gateway_process(tmp_path)
    try:
        until(lambda: read_gateway_address(tmp_path), "the gateway listens")
        address = read_gateway_address(tmp_path)
        assert address is not None
        yield AttackedGateway(tmp_path, process, address)
        assert process.poll() is None, "the gateway still lives"
    finally:
        process.terminate()
        assert process.wait(120) == 0, "and ends in order"


def hostile_hour(fortress: AttackedGateway, frames: int) -> None:
    """An honest robot records `ROBOT_HZ` chunks a second while an allowed and a foreign key attack."""
    address, run = fortress.address, fortress.run
    keys = load_keypair(run / "keys" / "panda-0.key")
    with (
        Outbox.open(run / "outbox") as outbox,
        TunnelClient(
            address.endpoint, keys, address.public_key, hello("panda-0"), outbox=outbox, limits=QUICK
        ) as robot,
    ):
        robot.wait_open(120)
        warm = fortress.attacker(1)
        warm.session(200)
        before_mb, attacker = fortress.peak_mb, fortress.attacker(7)
        attacks = [
            lambda: [attacker.session(FRAMES_PER_SESSION) for _ in range(frames // FRAMES_PER_SESSION)],
            lambda: raw_connections(address.endpoint, frames // 20, 3),
        ]
        threads = [threading.Thread(target=attack) for attack in attacks]
        for thread in threads:
            thread.start()
        began, recorded = time.monotonic(), 0
        while any(thread.is_alive() for thread in threads):
            outbox.append(chunk(recorded))
            recorded += 1
            time.sleep(max(0.0, began + recorded / ROBOT_HZ - time.monotonic()))
        taken_under_attack = recorded - len(outbox)
        assert robot.drain(120) == 0
        for hostile in (warm, attacker):
            hostile.close()
        assert robot.state is TunnelState.OPEN and robot.counters["lost"] == 0
        first = robot.receive_weights(0)
        assert first is not None and first.message == WeightsOffer(manifests=(), signer=b"", greeting=True)
        assert robot.receive_weights(0) is None, "what the attacker called weights was not handed on"
        assert taken_under_attack + UNDER_WAY >= KEPT_RATE * recorded, "the honest robot keeps its rate"
        assert fortress.peak_mb - before_mb < MAX_GROWTH_MB
    assert sorted(stored(run)) == [("episode-0", n) for n in range(recorded)], "and nothing else is in the store"


def test_two_thousand_hostile_frames_do_not_disturb_a_robot(fortress: AttackedGateway) -> None:
    hostile_hour(fortress, 2_000)


@pytest.mark.slow
def test_hundred_thousand_hostile_frames_keep_memory_bounded(fortress: AttackedGateway) -> None:
    hostile_hour(fortress, 100_000)


@pytest.mark.parametrize(("part_bytes", "parts"), [(0, 1_000_000), (40, 500_000), (1 << 20, 64)])
def test_message_of_a_million_parts_is_cut_off(fortress: AttackedGateway, part_bytes: int, parts: int) -> None:
    attacker = fortress.attacker(2)
    attacker.session(200)
    before_mb = fortress.peak_mb
    assert attacker.monster(bytes(part_bytes), parts), "the gateway ends it"
    attacker.close()
    assert fortress.peak_mb - before_mb < MAX_GROWTH_MB


def test_connections_with_one_routing_id_leak_nothing(fortress: AttackedGateway) -> None:
    attacker = fortress.attacker(3)
    attacker.namesakes(100, parts=8000)  # a burst needs memory, which the process retains and reuses
    before_mb = fortress.peak_mb
    attacker.namesakes(100, parts=8000)
    attacker.close()
    assert fortress.peak_mb - before_mb < MAX_GROWTH_MB


def keys_of(kind: str, run: Path) -> KeyPair | None:
    """Unknown credentials; ``revoked`` are those of a formerly allowed robot."""
    if kind == "revoked":
        return load_keypair(run / "keys" / "panda-1.key")
    return new_keypair() if kind == "wrong" else None


def refuses(run: Path, address: GatewayAddress, kind: str, times: int) -> None:
    if kind == "revoked":
        Keyring(run / "keys").revoke("panda-1")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events = [knock(context, address, keys_of(kind, run)) for _ in range(times)]
    context.term()
    expected = {(int(zmq.EVENT_HANDSHAKE_FAILED_AUTH), 400)}
    if kind == "absent":  # libzmq closes connections without CURVE, or replies with a protocol error
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in {event for event, _ in events}
    else:
        assert set(events) == expected


@pytest.mark.parametrize("kind", ["wrong", "revoked", "absent"])
def test_unknown_key_is_refused_forty_times(fortress: AttackedGateway, kind: str) -> None:
    refuses(fortress.run, fortress.address, kind, 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wrong", "revoked", "absent"])
def test_unknown_key_is_refused_a_thousand_times(fortress: AttackedGateway, kind: str) -> None:
    refuses(fortress.run, fortress.address, kind, 1000)


def test_robot_beyond_its_credit_is_refused(tmp_path: Path) -> None:
    prepare(tmp_path)
    with serving(tmp_path) as site:
        flood = site.client("panda-1")
        stop_committing(site)
        no_limit = CreditGrant(messages=1 << 40, size_bytes=1 << 40)  # the gateway has not sent this
        flood.queues.send_queues[Channel.EXPERIENCE].add_credit(no_limit)
        packet = chunk(0, robot="panda-1")
        for sequence in range(CONFIG.tunnel.experience.window_messages + 1):
            flood.queues.send(Envelope(ChunkOffer(sequence=sequence), packet))
        until(lambda: flood.state is TunnelState.REFUSED, "refused")
        assert "window" in flood.reason
        assert stored(tmp_path) == []


def stop_committing(site: GatewaySite) -> None:
    """Ends the ingestion of chunks, while the gateway runs on."""
    assert site.gateway is not None
    site.gateway.store.ingester.close()
