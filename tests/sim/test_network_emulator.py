"""The emulated network, as seen by the programs at its ends."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from wait_kit import until

from hal.errors import SpecError
from hal.settings import read_settings
from sim.network_emulator import EmulatedLink, LinkBreak, LinkConfig, LinkEvent

DEADLINE_S = 120.0


def read(end: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes, or fewer if the stream ends."""
    received = bytearray()
    while len(received) < size and (part := end.recv(size - len(received))):
        received += part
    return bytes(received)


class Ends:
    """A link, a gateway that accepts, and edges that connect."""

    def __init__(self, config: LinkConfig) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(DEADLINE_S)
        self.link = EmulatedLink(f"127.0.0.1:{self.listener.getsockname()[1]}", config)
        self.link.start()
        self._sockets: list[socket.socket] = []

    def dial(self) -> socket.socket:
        host, _, port = self.link.address.rpartition(":")
        return self._kept(socket.create_connection((host, int(port)), DEADLINE_S))

    def accept(self) -> socket.socket:
        return self._kept(self.listener.accept()[0])

    def pair(self) -> tuple[socket.socket, socket.socket]:
        edge = self.dial()
        return edge, self.accept()

    def _kept(self, end: socket.socket) -> socket.socket:
        end.settimeout(DEADLINE_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets.append(end)
        return end

    def close(self) -> None:
        self.link.close()
        for end in (*self._sockets, self.listener):
            end.close()


@contextmanager
def linked(config: LinkConfig | None = None) -> Iterator[Ends]:
    ends = Ends(config or LinkConfig())
    try:
        yield ends
    finally:
        ends.close()


def round_trip_s(edge: socket.socket, gateway: socket.socket) -> float:
    began = time.perf_counter()
    edge.sendall(b"?")
    gateway.sendall(read(gateway, 1))
    assert read(edge, 1) == b"?"
    return time.perf_counter() - began


def test_round_trip_takes_twice_the_delay() -> None:
    with linked(LinkConfig(delay_ms=20)) as ends:
        edge, gateway = ends.pair()

        def trip_s() -> float:
            took_s = round_trip_s(edge, gateway)
            assert took_s >= 0.040
            return took_s

        until(lambda: trip_s() < 0.042, "nothing but the delay keeps a byte")


@pytest.mark.parametrize("way", ["up", "down"])
def test_transfer_time_matches_bandwidth(way: str) -> None:
    size, head, mbit_s = 400_000, 50_000, 20.0
    nominal_s = (size - head) * 8 / (mbit_s * 1e6)
    with linked(LinkConfig(**{f"{way}_mbit_s": mbit_s})) as ends:  # type: ignore[arg-type]
        edge, gateway = ends.pair()
        sender, receiver = (edge, gateway) if way == "up" else (gateway, edge)

        def transfer_s() -> float:
            sent = time.perf_counter()
            threading.Thread(target=sender.sendall, args=(bytes(size),), daemon=True).start()
            read(receiver, head)  # from here on the queue is full
            began = time.perf_counter()
            assert len(read(receiver, size - head)) == size - head
            assert time.perf_counter() - sent >= 0.95 * size * 8 / (mbit_s * 1e6)
            return time.perf_counter() - began

        until(lambda: 0.95 * nominal_s <= transfer_s() <= 1.05 * nominal_s, "the bandwidth is as configured")
        until(lambda: round_trip_s(edge, gateway) < 0.1, "the queue before the line is short")


def test_connections_share_bandwidth() -> None:
    size = 150_000
    with linked(LinkConfig(up_mbit_s=20)) as ends:
        pairs = [ends.pair() for _ in range(3)]
        began = time.perf_counter()
        for edge, _ in pairs:
            threading.Thread(target=edge.sendall, args=(bytes(size),), daemon=True).start()
        assert [len(read(gateway, size)) for _, gateway in pairs] == [size] * 3
        assert time.perf_counter() - began >= 0.95 * 3 * size * 8 / 20e6


def test_jitter_and_loss_keep_bytes_in_order() -> None:
    sent = random.Random(3).randbytes(300_000)
    with linked(LinkConfig(jitter_ms=3, loss=0.02, stall_ms=20, up_mbit_s=80)) as ends:
        edge, gateway = ends.pair()
        threading.Thread(target=edge.sendall, args=(sent,), daemon=True).start()
        assert read(gateway, len(sent)) == sent
        until(lambda: ends.link.traffic.up_bytes == len(sent), "counted")


def test_loss_stalls_the_connection() -> None:
    with linked(LinkConfig(loss=0.5, stall_ms=150, seed=1)) as ends:
        edge, gateway = ends.pair()
        until(lambda: round_trip_s(edge, gateway) >= 0.15, "a loss")
        until(lambda: round_trip_s(edge, gateway) < 0.1, "none")


def test_stream_end_closes_one_direction() -> None:
    with linked(LinkConfig(delay_ms=5)) as ends:
        edge, gateway = ends.pair()
        edge.sendall(b"last")
        edge.shutdown(socket.SHUT_WR)
        assert read(gateway, 100) == b"last"
        gateway.sendall(b"answer")
        gateway.close()
        assert read(edge, 100) == b"answer"
        assert ends.link.traffic.broken == 0


@pytest.mark.parametrize("way", ["up", "down"])
def test_one_way_partition_delays_one_direction(way: str) -> None:
    with linked() as ends:
        edge, gateway = ends.pair()
        sender, receiver = (edge, gateway) if way == "up" else (gateway, edge)
        ends.link.partition(way)  # type: ignore[arg-type]
        sender.sendall(b"held")
        receiver.sendall(b"passes")
        assert read(sender, 6) == b"passes"
        receiver.settimeout(0.1)
        with pytest.raises(TimeoutError):
            receiver.recv(1)
        ends.link.restore()
        receiver.settimeout(DEADLINE_S)
        assert read(receiver, 4) == b"held"


def test_partition_delays_close_and_new_connections() -> None:
    with linked() as ends:
        edge, gateway = ends.pair()
        ends.link.partition()
        edge.close()
        late = ends.dial()
        late.sendall(b"late")
        gateway.settimeout(0.1)
        with pytest.raises(TimeoutError):
            gateway.recv(1)
        ends.link.restore()
        gateway.settimeout(DEADLINE_S)
        assert gateway.recv(1) == b""
        assert read(ends.accept(), 4) == b"late"


def test_reset_breaks_both_ends() -> None:
    with linked() as ends:
        edge, gateway = ends.pair()
        ends.link.reset()
        for end in (edge, gateway):
            with pytest.raises(ConnectionResetError):
                end.recv(1)
        round_trip_s(*ends.pair())
        assert ends.link.traffic.broken == 1


def test_peer_reset_is_forwarded() -> None:
    with linked(LinkConfig(delay_ms=5)) as ends:
        edge, gateway = ends.pair()
        round_trip_s(edge, gateway)
        edge.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        edge.close()
        with pytest.raises(ConnectionResetError):
            gateway.recv(1)


@pytest.mark.parametrize("how", ["reset", "silence"])
@pytest.mark.parametrize("at_byte", [1, 64, 9_999])
def test_connection_breaks_after_exact_byte_count(at_byte: int, how: str) -> None:
    with linked(LinkConfig(breaks=(LinkBreak(at_byte, "up", how),))) as ends:  # type: ignore[arg-type]
        edge, gateway = ends.pair()
        edge.sendall(bytes(10_000))
        assert len(read(gateway, at_byte)) == at_byte
        until(lambda: ends.link.traffic.up_bytes == at_byte, "all that may pass has passed")
        if how == "reset":
            with pytest.raises(ConnectionResetError):
                gateway.recv(1)
        else:
            time.sleep(0.2)  # the way back ends a few turns of the link's loop after the last byte
            gateway.sendall(b"no answer reaches the edge")
            gateway.settimeout(0.05)
            edge.settimeout(0.05)
            for end in (edge, gateway):
                with pytest.raises(TimeoutError):
                    end.recv(1)
            edge.close()
            until(lambda: ends.link.traffic.broken == 1, "it ends when the edge gives up")
        round_trip_s(*ends.pair())


def test_connection_can_break_before_first_byte() -> None:
    with linked(LinkConfig(breaks=(LinkBreak(0),))) as ends:
        with pytest.raises(ConnectionResetError):
            ends.dial().recv(1)


def test_events_start_with_first_connection() -> None:
    with linked(LinkConfig(events=(LinkEvent(at_s=0.0, for_s=0.25),))) as ends:
        began = time.monotonic()
        edge, gateway = ends.pair()
        assert time.monotonic() - began >= 0.2, "cut at first"
        round_trip_s(edge, gateway)


def test_closed_target_breaks_the_connection() -> None:
    with linked() as ends:
        ends.listener.close()
        with pytest.raises(ConnectionResetError):
            ends.dial().recv(1)


def test_memory_is_bounded_with_slow_receiver() -> None:
    with linked() as ends:
        edge, gateway = ends.pair()
        edge.settimeout(0.3)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 64 << 20:
                sent += edge.send(bytes(1 << 20))
        assert sent < 32 << 20, "the sender is held back"
        gateway.close()


@pytest.mark.parametrize(
    "bad",
    [
        *({"delay": 50}, {"delay_ms": -1}, {"loss": 1.0}, {"seed": "x"}, {"events": 3}, {"events": [3]}),
        *({"events": [{"at": 1}]}, {"events": [{"at_s": 1, "fro_s": 2}]}, {"breaks": [{"at_byte": 1, "hw": "reset"}]}),
    ],
)
def test_invalid_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        read_settings(LinkConfig, bad)


@pytest.mark.usefixtures("ipv6")
def test_link_connects_to_ipv6() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as gateway:
        gateway.settimeout(DEADLINE_S)
        with EmulatedLink(f"tcp://[::1]:{gateway.getsockname()[1]}") as link:
            host, _, port = link.address.rpartition(":")
            with socket.create_connection((host, int(port)), DEADLINE_S) as edge, gateway.accept()[0] as end:
                edge.sendall(b"?")
                assert read(end, 1) == b"?"


@pytest.mark.parametrize("wrong", ["listen=127.0.0.1:99999", "events=[{at_s: 1", "--config=/dev/null/no", "events=3"])
def test_command_reports_errors_in_one_line(wrong: str) -> None:
    argv = [sys.executable, "-m", "sim.network_emulator", "listen=127.0.0.1:0", "target=127.0.0.1:5", wrong]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2 and " link.failed " in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_command_writes_counts_and_ends_on_sigterm(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gateway, socket.create_server(("127.0.0.1", 0)) as free:
        target, listen = (f"127.0.0.1:{s.getsockname()[1]}" for s in (gateway, free))
        free.close()
        argv = [sys.executable, "-m", "sim.network_emulator", f"listen={listen}", f"target={target}", "delay_ms=1"]
        command = subprocess.Popen([*argv, "--counts", str(tmp_path / "counts")], stderr=subprocess.DEVNULL)
        try:
            until(lambda: _reachable(listen), "it listens")
            with socket.create_connection(listen.split(":"), DEADLINE_S) as edge:
                edge.sendall(bytes(1234))
                until(lambda: _last_count(tmp_path / "counts") == 1234, "it counts")
        finally:
            command.send_signal(signal.SIGTERM)
            assert command.wait(DEADLINE_S) == 0


def _reachable(address: str) -> bool:
    try:
        socket.create_connection(address.split(":"), 1).close()  # type: ignore[arg-type]
    except OSError:
        return False
    return True


def _last_count(path: Path) -> int:
    lines = path.read_text().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["up_bytes"]) if lines else 0
