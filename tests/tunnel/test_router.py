"""The guard against endless messages, and kernel state of libzmq's descriptors."""

from __future__ import annotations

import fcntl
import os
import select
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq
from tunnel_kit import prepare, until

from hal.state_database import AuditEntry
from user_sys.tunnel.connection import duplicate_socket, silence_s
from user_sys.tunnel.keys import Keyring, new_keypair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.router import TOO_MANY_BYTES, TOO_MANY_CONNECTIONS, GuardedRouter, ReceiveQuotaGuard, RoutedMessage

RECORD_BYTES, MESSAGE_BYTES = 100_000, 13_000_000
SESSION = b"session"
UNAUTHENTICATED_FLOOD_BYTES = 20_000_000


@dataclass
class Port:
    """A guarded router, and a DEALER whose key it allows."""

    router: GuardedRouter
    dealer: zmq.Socket[bytes]
    counters: Counter[str]
    audited: list[AuditEntry] = field(default_factory=list)

    def receive(self) -> RoutedMessage:
        received: list[RoutedMessage] = []

        def poll() -> bool:
            self.router.wait(0.01)
            if (message := self.router.receive()) is not None:
                received.append(message)
            return bool(received)

        until(poll, "a message arrives")
        return received[0]

    def open_session(self) -> None:
        """The first message opens a session, as a Hello does."""
        self.dealer.send(b"hello")
        self.router.authorize(self.receive().descriptor, SESSION)

    def flood(self, size_bytes: int) -> None:
        """Sends messages of this size, until one takes longer to arrive than the guard waits between two checks."""

        def is_shut_down() -> bool:
            self.router.wait(0.01)
            if not self.counters["floods"] and self.router.receive() is not None:
                self._send_flood(size_bytes)
            return self.counters["floods"] > 0

        self._send_flood(size_bytes)
        until(is_shut_down, "the guard shuts the connection down")

    def _send_flood(self, size_bytes: int) -> None:
        """One message, which libzmq sends only when it is complete."""
        self.dealer.send_multipart([bytes(1000)] * (size_bytes // 1000))


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    ours, counters, audited = prepare(tmp_path)["panda-0"], Counter[str](), list[AuditEntry]()
    keys, limits = new_keypair(), TunnelLimits(max_record_bytes=RECORD_BYTES, max_message_bytes=MESSAGE_BYTES)
    router = GuardedRouter(keys, Keyring(tmp_path / "keys"), limits, counters, audited.append)
    endpoint = router.bind("tcp://127.0.0.1:0", "the port")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.curve_publickey, dealer.curve_secretkey = ours.public.encode(), ours.secret.encode()
        dealer.curve_serverkey = keys.public.encode()
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.connect(endpoint)
        yield Port(router, dealer, counters, audited)
    router.close()


@pytest.mark.parametrize(("member", "size_bytes"), [(False, UNAUTHENTICATED_FLOOD_BYTES), (True, 200_000_000)])
def test_endless_message_ends_its_connection(port: Port, member: bool, size_bytes: int) -> None:
    if member:
        port.open_session()
    port.flood(size_bytes)
    assert [(entry.event, entry.address, entry.reason) for entry in port.audited] == [
        ("refused", "127.0.0.1", TOO_MANY_BYTES)
    ]


def test_connection_of_a_session_is_never_shut_down(port: Port) -> None:
    port.open_session()
    for _ in range(40):
        port.dealer.send_multipart([b"record", bytes(1_000_000)])
        assert len(port.receive().frames) == 2
    for _ in range(10):
        port.dealer.send(bytes(MESSAGE_BYTES - 100))
    for _ in range(10):  # complete messages that wait count for nothing
        assert len(port.receive().frames[0]) == MESSAGE_BYTES - 100
    assert not port.counters["floods"]


def test_many_small_messages_do_not_raise_the_limit(port: Port) -> None:
    for _ in range(20_000):
        port.dealer.send(b"")
        port.receive()
    port.flood(UNAUTHENTICATED_FLOOD_BYTES)


def test_ended_session_loses_its_limit(port: Port) -> None:
    port.open_session()
    port.router.deauthorize(SESSION)
    port.flood(UNAUTHENTICATED_FLOOD_BYTES)


def test_connections_without_a_session_share_a_limit() -> None:
    guard = ReceiveQuotaGuard(RECORD_BYTES, MESSAGE_BYTES, unauthenticated_bytes=1_000_000)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        greedy = [_stranger(stack, listener, guard, 90_000) for _ in range(20)]
        modest = [_stranger(stack, listener, guard, 1_000) for _ in range(20)]
        member = _stranger(stack, listener, guard, 90_000)
        guard.authorize(member.fileno(), SESSION)
        shut_down: list[tuple[str, str]] = []
        until(lambda: shut_down.extend(guard.check(lambda: False)) or len(shut_down) == 10, "which leaves 0.92 MB")
        assert sum(not each.recv(1) for each in greedy if _readable(each)) == 10
        assert not any(map(_readable, [*modest, member]))


def test_connections_without_a_session_are_few_at_a_time() -> None:
    guard = ReceiveQuotaGuard(RECORD_BYTES, MESSAGE_BYTES, max_unauthenticated=5)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        member = _stranger(stack, listener, guard, 1)
        guard.authorize(member.fileno(), SESSION)
        strangers = [_stranger(stack, listener, guard, 1) for _ in range(8)]
        shut_down: list[tuple[str, str]] = []
        until(lambda: shut_down.extend(guard.check(lambda: True)) or shut_down, "the oldest are shut down")
        assert shut_down == 3 * [("127.0.0.1", TOO_MANY_CONNECTIONS)]
        assert [_readable(each) for each in (*strangers, member)] == 3 * [True] + 6 * [False]


def _stranger(stack: ExitStack, listener: socket.socket, guard: ReceiveQuotaGuard, sent_bytes: int) -> socket.socket:
    """The gateway's end of a connection that has received part of a message."""
    peer = stack.enter_context(socket.create_connection(listener.getsockname()))
    ours = stack.enter_context(listener.accept()[0])
    peer.sendall(bytes(sent_bytes))
    assert len(ours.recv(sent_bytes, socket.MSG_WAITALL)) == sent_bytes
    guard.on_accepted(ours.fileno())
    return ours


def _readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def test_silence_of_a_connection_is_measured() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as edge:
        other, _ = server.accept()
        with other:
            edge.sendall(b"here")
            assert other.recv(4) == b"here"
            assert 0 <= silence_s(other.fileno()) < 60


def test_descriptor_reused_by_a_pipe_is_closed() -> None:
    read, write = os.pipe()
    assert duplicate_socket(write) is None and silence_s(write) == 0.0
    os.close(write)
    os.set_blocking(read, False)
    assert os.read(read, 1) == b"", "its reader sees the end"
    assert duplicate_socket(write) is None, "nothing has the number"
    os.close(read)


def test_descriptor_reused_by_a_lock_is_closed(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert duplicate_socket(first.fileno()) is None
    with (tmp_path / "lock").open("w") as second:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
