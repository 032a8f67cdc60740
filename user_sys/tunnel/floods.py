"""Ends connections that send on and on without ever completing a message.

libzmq bounds a frame and the messages that wait, but not the frames of one message: it keeps them, unseen, until the
last has come, so that one message of a million empty frames takes 64 MB and an endless one takes everything. The kernel
counts what each TCP connection has received; what came since its last message was handed on is unfinished. Unix sockets
are not counted: they lie in a folder of this user.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time

import zmq

CHECK_S = 0.02
"""Between checks: an attacker on this very machine sends 20 MB meanwhile."""
SLACK_BYTES = 1 << 20  # encryption adds 33 bytes to a frame; what the kernel holds counts too
_TCP_INFO_BYTES = 136
_BYTES_RECEIVED = struct.Struct("<Q")  # tcpi_bytes_received of struct tcp_info, linux/tcp.h, since Linux 4.1
_BYTES_RECEIVED_AT = 128
_GONE = (errno.EBADF, errno.ENOTSOCK, errno.EOPNOTSUPP, errno.ENOPROTOOPT, errno.ENOTCONN, errno.EINVAL)


class FloodGuard:
    """Watches the connections of one ROUTER. One thread calls it.

    Args:
        record_bytes: the most that a connection may send before its first message is complete.
        message_bytes: the most that it may have unfinished afterwards.
    """

    def __init__(self, record_bytes: int, message_bytes: int) -> None:
        self._limits = (record_bytes + SLACK_BYTES, message_bytes + SLACK_BYTES)
        self._handed_on: dict[int, int] = {}  # descriptor: bytes that it had received at its last message
        self._heard: set[int] = set()
        self._known: set[int] = set()
        self._next_check_s = 0.0

    def accepted(self, descriptor: int) -> None:
        """libzmq has a new connection. It may have had the number before."""
        self._handed_on[descriptor] = 0
        self._known.discard(descriptor)
        self._heard.discard(descriptor)

    def heard(self, frame: zmq.Frame) -> None:
        """A whole message, of which `frame` is a part, was handed on."""
        self._heard.add(int(frame.get(zmq.SRCFD)))

    def check(self) -> int:
        """Breaks the connections that exceed their limit; says how many. Does nothing within `CHECK_S` of the last.

        Call it when nothing complete waits to be handed on.
        """
        now = time.monotonic()
        if now < self._next_check_s:
            return 0
        self._next_check_s = now + CHECK_S
        broken = sum([self._exceeds(descriptor) for descriptor in list(self._handed_on)])
        self._heard.clear()
        return broken

    def _exceeds(self, descriptor: int) -> bool:
        try:  # a duplicate, because libzmq may close its own at any moment
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError as error:
            if error.errno not in _GONE:
                raise
            del self._handed_on[descriptor]
            return False
        with connection:
            received = _received_bytes(connection)
            if received is None:
                del self._handed_on[descriptor]
                return False
            if descriptor in self._heard:
                self._handed_on[descriptor] = received
                self._known.add(descriptor)
            if received - self._handed_on[descriptor] <= self._limits[descriptor in self._known]:
                return False
            del self._handed_on[descriptor]
            _break(connection)
            return True


def _break(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _received_bytes(connection: socket.socket) -> int | None:
    """What the kernel has received for a TCP connection; None for anything else."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0]) if len(info) == _TCP_INFO_BYTES else None
