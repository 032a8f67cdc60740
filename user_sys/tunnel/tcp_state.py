"""What the kernel knows of a TCP connection: what has come, and how long ago."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

GONE = (errno.EBADF, errno.ENOTSOCK, errno.EOPNOTSUPP, errno.ENOPROTOOPT, errno.ENOTCONN, errno.EINVAL)
"""How a descriptor of libzmq's fails that was closed meanwhile, or that is no TCP connection."""
_TCP_INFO_BYTES = 136  # struct tcp_info, linux/tcp.h, since Linux 4.1
_LAST_RECEIVED = struct.Struct("<I")  # tcpi_last_data_recv
_LAST_RECEIVED_AT = 52
_BYTES_RECEIVED = struct.Struct("<Q")  # tcpi_bytes_received
_BYTES_RECEIVED_AT = 128


@dataclass(frozen=True)
class TcpState:
    """`silent_s` counts from the last bytes that came, or from the connection's beginning.

    Of `received_bytes`, this process has still to read `unread_bytes`.
    """

    received_bytes: int
    unread_bytes: int
    silent_s: float


def tcp_state(connection: socket.socket) -> TcpState | None:
    """None for what is no TCP connection, or none any more."""
    unread = array.array("i", [0])
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        fcntl.ioctl(connection, termios.FIONREAD, unread)
    except OSError as error:
        if error.errno in GONE:
            return None
        raise
    if len(info) != _TCP_INFO_BYTES:
        return None
    (received,) = _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)
    (silent_ms,) = _LAST_RECEIVED.unpack_from(info, _LAST_RECEIVED_AT)
    return TcpState(received, unread[0], silent_ms / 1e3)


def duplicate(descriptor: int) -> socket.socket | None:
    """The connection under a descriptor of ours, since libzmq may close its own at any moment; None when it has.

    By then the number may be that of another file: nothing of it is kept, or a lock would stay and a pipe not end.
    """
    own = -1
    try:
        own = os.dup(descriptor)
        return socket.socket(fileno=own)
    except OSError as error:
        if own >= 0:
            os.close(own)
        if error.errno in GONE:
            return None
        raise


@contextmanager
def looked_at(descriptor: int) -> Iterator[tuple[socket.socket, TcpState] | None]:
    """libzmq's TCP connection `descriptor` and its state, while the block lasts; None for anything else."""
    connection = duplicate(descriptor)
    if connection is None:
        yield None
        return
    with connection:
        state = tcp_state(connection)
        yield None if state is None else (connection, state)


def silence_s(descriptor: int) -> float:
    """Seconds since anything came on libzmq's connection `descriptor`, whole messages or not.

    Zero for a Unix socket, between whose ends nothing can be lost, and for what is closed, which libzmq notices.
    """
    with looked_at(descriptor) as found:
        return 0.0 if found is None else found[1].silent_s
