"""A robot's experience over a faulty network: no acknowledged chunk is lost or stored twice."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from tunnel_kit import CONFIG, QUICK, GatewaySite, chunk, hello, prepare, serving, stored, until

from sim.network_emulator import EmulatedLink, LinkBreak, LinkConfig
from user_sys.edge.outbox import Outbox
from user_sys.gateway import GatewayConfig
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import load_keypair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import TunnelState

HASTY = replace(QUICK, dead_after_s=0.4, stuck_after_s=0.6, handshake_s=1.5, backoff_max_s=0.03)
ALERT = replace(CONFIG, tunnel=replace(QUICK, stuck_after_s=0.6))
CONNECTIONS = 4  # of a session
NEVER = LinkBreak(1 << 40)
HANDSHAKE_BYTES = 1100  # bytes of a connection until its session is open, rounded up
FIRST_BEATS_BYTES = 2000  # by then every connection of an idle session sends heartbeats
MID_FRAME_BYTES = 100_000  # of the chunks, while the other connections carry heartbeats
DRAIN_S = 120.0
MAX_GROWTH_MB = 50
Way = Literal["up", "down"]
OTHER_SILENCES = [pytest.param(*case, marks=pytest.mark.slow) for case in (("silence", "up"), ("mute", "down"))]


class Rehearsal:
    """A gateway, a link to it, and a robot that records into an outbox and sends over the link."""

    def __init__(self, site: GatewaySite, link: EmulatedLink, outbox: Outbox, robot: TunnelClient) -> None:
        self.site, self.link, self.outbox, self.robot = site, link, outbox, robot
        self.recorded = outbox.next_sequence

    def record(self, chunks: int = 1, floats: int = 20) -> None:
        self.outbox.append(*(chunk(self.recorded + each, floats=floats) for each in range(chunks)))
        self.recorded += chunks

    def deliver(self) -> None:
        left = self.robot.drain(DRAIN_S)
        assert left == 0, f"{left} chunks left; {self.robot.state}: {self.robot.reason}"

    def require_all_once(self) -> None:
        """Stops the robot and checks the store."""
        self.deliver()
        counts = Counter(stored(self.site.run))
        assert sorted(counts) == [("episode-0", index) for index in range(self.recorded)], "none lost"
        assert set(counts.values()) <= {1}, "none twice"

    def survive(self, *breaks: LinkBreak, chunks: int = 3) -> None:
        """A new session runs into `breaks`, detects it, and the next session continues."""
        self.robot.wait_open(120)
        before = self.robot.counters["lost"]
        self.link.schedule_breaks(*breaks)
        self.link.reset()
        self.record(chunks, floats=500)
        until(lambda: self.robot.counters["lost"] >= before + 2, "the reset and the silence are noticed")
        self.deliver()


@contextmanager
def rehearsal(
    run: Path, config: LinkConfig | None = None, gateway: GatewayConfig = CONFIG, limits: TunnelLimits = HASTY
) -> Iterator[Rehearsal]:
    prepare(run)
    with (
        serving(run, gateway) as site,
        EmulatedLink(site.address.endpoint, config) as link,
        Outbox.open(run / "outbox") as outbox,
    ):
        keys = load_keypair(run / "keys" / "panda-0.key")
        public = site.address.public_key
        with TunnelClient(link.endpoint, keys, public, hello("panda-0"), outbox=outbox, limits=limits) as robot:
            yield Rehearsal(site, link, outbox, robot)


def cut_at_each(there: Rehearsal, way: Way, how: Literal["reset", "silence"], bytes_: range, floats: int) -> None:
    """One connection of the session breaks at each of `bytes_`, and every recorded chunk arrives."""
    for at_byte in bytes_:
        there.link.schedule_breaks(LinkBreak(at_byte, way, how))
        there.link.reset()
        there.record(floats=floats)
        there.deliver()
    there.require_all_once()


@pytest.mark.parametrize("way", ["up", "down"])
def test_connection_cut_at_some_bytes_recovers(tmp_path: Path, way: Way) -> None:
    with rehearsal(tmp_path) as there:
        cut_at_each(there, way, "reset", range(0, HANDSHAKE_BYTES, 97), floats=20)
        cut_at_each(there, way, "reset", range(HANDSHAKE_BYTES, 6000, 997), floats=300)
        cut_at_each(there, way, "silence", range(3, HANDSHAKE_BYTES, 531), floats=20)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["up", "down"])
def test_connection_cut_at_every_byte_recovers(tmp_path: Path, way: Way) -> None:
    with rehearsal(tmp_path) as there:
        cut_at_each(there, way, "reset", range(HANDSHAKE_BYTES + 1500), floats=20)
        cut_at_each(there, way, "silence", range(0, HANDSHAKE_BYTES + 1500, 7), floats=20)


def fall_silent(run: Path, way: Way, how: Literal["silence", "mute"], bytes_: range) -> None:
    """One connection after another, while the others work and the link acknowledges all bytes."""
    with rehearsal(run, gateway=ALERT) as there:
        for at_byte in bytes_:
            for which in range(CONNECTIONS):
                there.survive(*[NEVER] * which, LinkBreak(at_byte, way, how))
        there.require_all_once()


@pytest.mark.parametrize(("how", "way"), [("silence", "down"), ("mute", "up"), *OTHER_SILENCES])
def test_silence_of_one_connection_ends_the_session(tmp_path: Path, way: Way, how: Literal["silence", "mute"]) -> None:
    fall_silent(tmp_path, way, how, range(FIRST_BEATS_BYTES, FIRST_BEATS_BYTES + 1))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("how", ["silence", "mute"])
def test_silence_in_any_phase_recovers(tmp_path: Path, way: Way, how: Literal["silence", "mute"]) -> None:
    fall_silent(tmp_path, way, how, range(0, FIRST_BEATS_BYTES + 500, 113))


@pytest.mark.parametrize("how", ["silence", "mute"])
def test_chunks_lost_in_mid_frame_are_resent(tmp_path: Path, how: Literal["silence", "mute"]) -> None:
    with rehearsal(tmp_path, gateway=ALERT) as there:
        there.survive(*[LinkBreak(MID_FRAME_BYTES, "up", how)] * CONNECTIONS, chunks=30)
        there.require_all_once()


@pytest.mark.parametrize("way", ["up", "down", "both"])
def test_partition_recovers(tmp_path: Path, way: Literal["up", "down", "both"]) -> None:
    with rehearsal(tmp_path) as there:
        there.record(20)
        there.deliver()
        there.link.partition(way)
        there.record(100)
        until(lambda: there.robot.state is not TunnelState.OPEN, "the robot notices")
        there.record(100)
        there.link.restore()
        there.require_all_once()


def test_chunk_with_a_lost_acknowledgement_is_stored_once(tmp_path: Path) -> None:
    with rehearsal(tmp_path) as there:
        for _ in range(3):
            there.record()
            there.deliver()  # the session is open, and has credit
            there.link.partition("down")
            before = len(stored(tmp_path))
            there.record(30)
            until(lambda before=before: len(stored(tmp_path)) > before, "the gateway has stored some")
            assert there.robot.chunks_pending, "and the robot does not know"
            there.link.reset()
            there.link.restore()
            there.deliver()
        there.require_all_once()


def test_bad_link_delivers_all_chunks(tmp_path: Path) -> None:
    bad = LinkConfig(delay_ms=5, jitter_ms=10, loss=0.02, stall_ms=60, up_mbit_s=8, down_mbit_s=8, seed=3)
    with rehearsal(tmp_path, bad) as there:
        there.record(150, floats=100)
        there.require_all_once()


def storm(run: Path, chunks: int) -> None:
    """A reset after every hundred chunks, while the robot records."""
    with rehearsal(run) as there:
        for count in range(chunks // 20):
            there.record(20, floats=500)
            time.sleep(0.02)
            if count % 5 == 4:
                there.link.reset()
        there.require_all_once()
        assert there.link.traffic.broken > chunks // 200


def test_repeated_resets_lose_no_chunk(tmp_path: Path) -> None:
    storm(tmp_path, 1000)


@pytest.mark.slow
def test_many_resets_lose_no_chunk(tmp_path: Path) -> None:
    storm(tmp_path, 20_000)


def reconnects(run: Path, times: int) -> None:
    with rehearsal(run) as there:
        there.robot.wait_open(120)
        threads, descriptors, before_mb = threading.active_count(), _descriptors(), _resident_mb()
        for count in range(times):
            there.link.reset()
            until(lambda count=count: there.robot.counters["lost"] > count, "the loss is noticed")
            there.robot.wait_open(120)
            there.record()
        there.require_all_once()
        running = [each.name for each in threading.enumerate()]
        assert len(running) <= threads, running
        until(lambda: _descriptors() < descriptors + 20, "descriptors are given back")
        assert _resident_mb() - before_mb < MAX_GROWTH_MB


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def test_forty_reconnects_leak_nothing(tmp_path: Path) -> None:
    reconnects(tmp_path, 40)


@pytest.mark.slow
def test_thousand_reconnects_leak_nothing(tmp_path: Path) -> None:
    reconnects(tmp_path, 1000)


def test_slow_handshakes_are_closed_and_delay_no_peer(tmp_path: Path) -> None:
    strict = replace(CONFIG, tunnel=replace(QUICK, handshake_s=2.0))
    with rehearsal(tmp_path, gateway=strict, limits=QUICK) as there:
        there.robot.wait_open(120)
        host, _, port = there.site.address.endpoint.removeprefix("tcp://").rpartition(":")
        lorises = [socket.create_connection((host, int(port)), 60) for _ in range(50)]
        fed = {loris.fileno(): loris for loris in lorises}
        deadline = time.monotonic() + 120
        while fed:
            assert time.monotonic() < deadline, f"{len(fed)} are still there"
            there.record()
            for descriptor, loris in list(fed.items()):
                try:
                    loris.sendall(b"\xff")
                    loris.settimeout(0.001)
                    ended = _drained(loris)
                except OSError:
                    ended = True
                if ended:
                    del fed[descriptor]
            time.sleep(0.05)
        for loris in lorises:
            loris.close()
        assert there.robot.counters["lost"] == 0
        there.require_all_once()


def _drained(loris: socket.socket) -> bool:
    """Whether the gateway has closed the connection, after its greeting."""
    try:
        while loris.recv(4096):
            pass
    except TimeoutError:
        return False
    return True
