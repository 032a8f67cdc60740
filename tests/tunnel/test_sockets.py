"""Kernel state of libzmq's descriptors, which another file may have reused."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from user_sys.tunnel.endpoint import enlarge_send_buffer
from user_sys.tunnel.sockets import duplicate_socket, silence_s


def test_silence_of_a_connection_is_measured() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as edge:
        other, _ = server.accept()
        with other:
            edge.sendall(b"here")
            assert other.recv(4) == b"here"
            assert 0 <= silence_s(other.fileno()) < 60


def held_bytes(connection: socket.socket) -> int:
    """The bytes that it accepts while its other end does not read."""
    connection.setblocking(False)
    held = 0
    try:
        while True:
            held += connection.send(bytes(4096))
    except BlockingIOError:
        return held


def test_only_a_unix_socket_gets_a_larger_buffer() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    enlarge_send_buffer(pairs[1][0].fileno())
    narrow, wide = (held_bytes(near) for near, _ in pairs)
    assert wide > 1.5 * narrow
    for end in (end for pair in pairs for end in pair):
        end.close()
    enlarge_send_buffer(pairs[1][0].fileno())  # closed: no effect
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as edge:
        before = edge.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        enlarge_send_buffer(edge.fileno())
        assert edge.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before


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
