"""The guard against endless messages: the kernel stops a connection at its quota without a check."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
import zmq
from tunnel_kit import until
from zmq.utils.monitor import recv_monitor_message

from user_sys.tunnel.receive_quota import (
    CHECK_INTERVAL_S,
    SEGMENT_BYTES,
    UNENFORCED_CHECK_INTERVAL_S,
    ReceiveQuotaGuard,
    initial_sequence,
    limit_receive_sequence,
    save_syn,
)
from user_sys.tunnel.sockets import open_tcp_state, read_tcp_state, receive_frames

RECORD_BYTES, MESSAGE_BYTES = 100_000, 2_000_000


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A sender, and a receiver with a saved SYN."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert save_syn(listener)
        with socket.create_connection(listener.getsockname()) as sender:
            receiver, _ = listener.accept()
            with receiver:
                sender.setblocking(False)
                yield sender, receiver


def received(connection: socket.socket) -> int:
    state = read_tcp_state(connection)
    assert state is not None
    return state.received_bytes


def test_connection_receives_only_its_quota(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sender, receiver = pair
    first = initial_sequence(receiver)
    assert first is not None
    assert limit_receive_sequence(receiver, first + 300_000)
    sent = sender.send(bytes(1_000_000))
    got = len(receiver.recv(300_000, socket.MSG_WAITALL))
    receiver.sendall(b"answer")
    until(lambda: sender.recv(6, socket.MSG_PEEK) == b"answer", "what is sent the other way is acknowledged")
    assert got == 300_000 and received(receiver) < 300_000 + SEGMENT_BYTES < sent
    assert limit_receive_sequence(receiver, first + sent)
    assert len(receiver.recv(sent - got, socket.MSG_WAITALL)) == sent - got, "what was held back comes after all"


def test_quota_wraps_around_the_sequence_numbers(pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    first = initial_sequence(receiver)
    assert first is not None
    assert limit_receive_sequence(receiver, first + (1 << 32) + 100)
    assert sender.send(b"x") == 1 and receiver.recv(1) == b"x"
    assert initial_sequence(receiver) is None, "the kernel tells it once"


@dataclass
class Port:
    """A guarded ROUTER, as in the gateway, and a connected DEALER."""

    router: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    dealer: zmq.Socket[bytes]
    guard: ReceiveQuotaGuard
    connection: int = -1

    def reported(self) -> int:
        """The descriptor that libzmq reports next."""
        assert self.monitor.poll(60_000), "libzmq reports"
        return int(recv_monitor_message(self.monitor)["value"])

    def receive(self) -> list[zmq.Frame]:
        assert self.router.poll(60_000), "a message comes"
        frames = receive_frames(self.router)
        assert frames is not None
        self.guard.on_message(frames)
        return frames

    def received(self) -> int:
        with open_tcp_state(self.connection) as found:
            return found[1].received_bytes if found else 0


@contextmanager
def connected(held: bool = True) -> Iterator[Port]:
    """The guard has the listener, if the kernel enforces quotas, but not the connection."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    monitor = router.get_monitor_socket(zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED)
    port = Port(router, monitor, dealer, ReceiveQuotaGuard(RECORD_BYTES, MESSAGE_BYTES))
    router.bind("tcp://127.0.0.1:0")
    listener = port.reported()
    if held:
        port.guard.on_listening(listener)
    dealer.connect(router.getsockopt_string(zmq.LAST_ENDPOINT))
    port.connection = port.reported()
    yield port
    router.disable_monitor()
    for each in (monitor, router, dealer):
        each.close(0)
    context.term()


@pytest.fixture
def port() -> Iterator[Port]:
    with connected() as port:
        port.guard.on_accepted(port.connection)
        yield port


def flood(port: Port, parts: int, part: bytes = bytes(1000)) -> None:
    """One message; libzmq sends it only when it is complete."""
    port.dealer.send_multipart([part] * parts)


def break_it(port: Port) -> None:
    """The guard's first check; earlier bytes must be stopped by the kernel."""
    until(lambda: port.guard.check(lambda: True), "the guard breaks the connection")


@pytest.mark.parametrize(("member", "limit"), [(False, RECORD_BYTES + (64 << 10)), (True, MESSAGE_BYTES + (1 << 20))])
def test_kernel_stops_an_endless_message_without_a_check(port: Port, member: bool, limit: int) -> None:
    if member:
        port.guard.authorize(port.connection, b"session")
    flood(port, 10_000)
    until(lambda: port.received() > limit, "it comes as far as it may")
    assert port.received() <= limit + 2 * SEGMENT_BYTES
    break_it(port)
    until(lambda: port.received() == 0, "libzmq closes it")


def test_session_connection_is_never_stopped(port: Port) -> None:
    port.guard.authorize(port.connection, b"session")
    for _ in range(40):
        port.dealer.send_multipart([b"record", bytes(1_000_000)])
        assert len(port.receive()) == 3
        assert port.guard.check(lambda: True) == []
    port.dealer.send(b"still here")
    assert port.receive()[1].bytes == b"still here"


def test_many_small_messages_do_not_raise_the_limit(port: Port) -> None:
    for _ in range(20_000):
        port.dealer.send(b"")
        port.receive()
    flood(port, 1000)
    until(lambda: port.received() > RECORD_BYTES, "and then one without end")
    break_it(port)


def test_ended_session_loses_its_limit(port: Port) -> None:
    port.guard.authorize(port.connection, b"session")
    port.guard.deauthorize(b"session")
    flood(port, 1000)
    break_it(port)


def test_complete_waiting_messages_are_not_counted(port: Port) -> None:
    port.guard.authorize(port.connection, b"session")
    for _ in range(3):
        port.dealer.send(bytes(1_000_000))
    until(lambda: port.received() > 3_000_000, "all have come, and nobody has taken them")
    assert port.guard.check(lambda: not port.router.poll(0)) == []


def test_late_reported_connection_is_guarded() -> None:
    with connected() as port:
        port.guard.authorize(port.connection, b"session")
        port.guard.on_accepted(port.connection)
        port.dealer.send(bytes(MESSAGE_BYTES))
        assert len(port.receive()[1]) == MESSAGE_BYTES, "it is a member still"
        flood(port, 10_000)
        break_it(port)


def test_connection_without_a_filter_is_checked_often() -> None:
    with connected(held=False) as port:
        assert port.guard.check_interval_s == CHECK_INTERVAL_S
        port.guard.on_accepted(port.connection)
        assert port.guard.check_interval_s == UNENFORCED_CHECK_INTERVAL_S
        flood(port, 10_000)
        break_it(port)


def test_connections_without_a_session_share_a_limit() -> None:
    guard = ReceiveQuotaGuard(RECORD_BYTES, MESSAGE_BYTES, unauthenticated_bytes=1_000_000)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        greedy = [_stranger(stack, listener, guard, 90_000) for _ in range(20)]
        modest = [_stranger(stack, listener, guard, 1_000) for _ in range(20)]
        member = _stranger(stack, listener, guard, 90_000)
        guard.authorize(member.fileno(), b"session")
        assert len(guard.check(lambda: False)) == 10, "which leaves 0.92 MB"
        assert sum(not each.recv(1) for each in greedy if _readable(each)) == 10
        assert not any(map(_readable, [*modest, member]))


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
