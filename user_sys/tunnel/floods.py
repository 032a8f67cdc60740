"""Ends connections that send on and on without ever completing a message.

libzmq bounds a frame and the messages that wait, but not the frames of one message: it keeps them, unseen, until the
last has come, so that one message of a million empty frames takes 64 MB and an endless one takes everything. The kernel
counts what each TCP connection has received; what came since its last message was handed on is unfinished. Unix sockets
are not counted: they lie in a folder of this user.
"""

from __future__ import annotations

import socket
import time

import zmq

from user_sys.tunnel.tcp_state import GONE, duplicate, tcp_state

CHECK_S = 0.005
"""Between checks: an attacker on this very machine sends 5 MB meanwhile."""
SLACK_BYTES = 1 << 20  # encryption adds 33 bytes to a frame; what the kernel holds counts too


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
        connection = duplicate(descriptor)
        if connection is None:
            del self._handed_on[descriptor]
            return False
        with connection:
            state = tcp_state(connection)
            if state is None:
                del self._handed_on[descriptor]
                return False
            received = state.received_bytes
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
        if error.errno not in GONE:
            raise
