"""Limits the bytes of incomplete messages that a TCP connection can make libzmq hold.

libzmq limits the size of a frame and the number of queued messages, but not the frames of one message. It holds them
until the last one arrives: a message of a million empty frames takes 64 MB, and an endless one takes all memory.

So each connection has a quota of bytes that it may receive beyond its delivered messages. A packet filter on the socket
(classic BPF, no permission needed) enforces it in the kernel, also while this process does not run: the filter drops
segments that begin at or beyond a sequence number, and their sender retransmits them until the quota is raised. A
connection that reaches its quota is shut down. All connections without a session share one more limit. Unix sockets are
not counted: they are in a private folder of the user.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from user_sys.tunnel.sockets import CLOSED_SOCKET_ERRNOS, duplicate_socket, open_tcp_state

SEGMENT_BYTES = 64 << 10
"""The most that a connection can exceed its quota: the last segment begins just before the limit."""
_TCP_SAVE_SYN, _TCP_SAVED_SYN = 27, 28  # linux/tcp.h, since Linux 4.3
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h
_SYN_BYTES = 256
_IPV6_HEADER_BYTES = 40
_INSTRUCTION = struct.Struct("HBBI")  # struct sock_filter, linux/filter.h: code, jump if true, if false, operand
_PROGRAM = struct.Struct("HP")  # struct sock_fprog: instructions, their address
_LOAD_BYTE, _LOAD_WORD, _LOAD_LENGTH, _TO_INDEX = 0x30, 0x20, 0x80, 0x07  # linux/bpf_common.h
_AND, _SHIFT_RIGHT, _SUBTRACT, _SUBTRACT_INDEX = 0x54, 0x74, 0x14, 0x1C
_IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x15, 0x35, 0x06
_ALL, _NONE = 0xFFFFFFFF, 0
_SEQUENCE_AT, _HEADER_LENGTH_AT = 4, 12  # in the TCP header, at which the filter's view of a segment begins

CHECK_INTERVAL_S = 0.1
UNENFORCED_CHECK_INTERVAL_S = 0.005
"""Interval for connections without a packet filter: an attacker on the same machine sends 5 MB in this time."""
SESSION_SLACK_BYTES = 1 << 20
HELLO_SLACK_BYTES = 64 << 10  # the CURVE handshake needs one
UNAUTHENTICATED_BYTES = 8 << 20
FRAME_OVERHEAD_BYTES = 64  # ZMTP and CURVE add 35 to 42 bytes to a frame
RENEWAL_FRACTION = 0.25  # of a limit: after so many delivered bytes, the quota is raised


def save_syn(listener: socket.socket) -> bool:
    """Makes `initial_sequence` available for later connections to `listener`. Returns False if the kernel cannot."""
    try:
        listener.setsockopt(socket.IPPROTO_TCP, _TCP_SAVE_SYN, 1)
    except OSError as error:
        if error.errno in CLOSED_SOCKET_ERRNOS:
            return False
        raise
    return True


def initial_sequence(connection: socket.socket) -> int | None:
    """The TCP sequence number of the first byte that `connection` receives.

    None if the kernel has no saved SYN: the listener has no `save_syn`, a SYN cookie accepted the connection, the SYN
    was read before, or it is not a TCP connection.
    """
    try:
        syn = connection.getsockopt(socket.IPPROTO_TCP, _TCP_SAVED_SYN, _SYN_BYTES)
    except OSError as error:
        if error.errno in CLOSED_SOCKET_ERRNOS:
            return None
        raise
    if not syn:
        return None
    header_bytes = 4 * (syn[0] & 0xF) if syn[0] >> 4 == 4 else _IPV6_HEADER_BYTES
    if len(syn) < header_bytes + 8:
        return None
    (number,) = struct.unpack_from(">I", syn, header_bytes + _SEQUENCE_AT)
    return (int(number) + 1) & _ALL


def limit_receive_sequence(connection: socket.socket, sequence: int) -> bool:
    """Drops received segments that begin at `sequence` or beyond; replaces the previous limit.

    Returns False, and removes every limit, if the kernel does not allow it or the connection is closed.
    """
    program = b"".join(
        _INSTRUCTION.pack(*instruction)
        for instruction in (
            (_LOAD_BYTE, 0, 0, _HEADER_LENGTH_AT),
            (_AND, 0, 0, 0xF0),
            (_SHIFT_RIGHT, 0, 0, 2),
            (_TO_INDEX, 0, 0, 0),
            (_LOAD_LENGTH, 0, 0, 0),
            (_SUBTRACT_INDEX, 0, 0, 0),
            (_IF_EQUAL, 3, 0, 0),  # segments without data pass: acknowledgements and the end of the stream
            (_LOAD_WORD, 0, 0, _SEQUENCE_AT),
            (_SUBTRACT, 0, 0, sequence & _ALL),
            (_IF_AT_LEAST, 0, 1, 1 << 31),  # before the limit, in sequence number arithmetic (RFC 9293 §3.4)
            (_RETURN, 0, 0, _ALL),
            (_RETURN, 0, 0, _NONE),
        )
    )
    code = ctypes.create_string_buffer(program, len(program))
    fprog = _PROGRAM.pack(len(program) // _INSTRUCTION.size, ctypes.addressof(code))
    if _set_socket_option(connection, _SO_ATTACH_FILTER, fprog):
        return True
    _set_socket_option(connection, _SO_DETACH_FILTER, bytes(4))
    return False


def _set_socket_option(connection: socket.socket, option: int, operand: bytes) -> bool:
    try:
        connection.setsockopt(socket.SOL_SOCKET, option, operand)
    except OSError as error:
        if error.errno in (*CLOSED_SOCKET_ERRNOS, errno.EPERM, errno.ENOMEM, errno.ENOENT):
            return False
        raise
    return True


@dataclass(eq=False)
class _WatchedConnection:
    """A connection.

    Attributes:
        initial_sequence: the TCP sequence number of its first byte; None without a packet filter.
        limit_bytes: the most bytes of incomplete messages.
        delivered_bytes: the received bytes of delivered messages.
        quota_bytes: the total that the kernel lets it receive.
        session: the id of its session, or empty.
        announced: whether libzmq has reported it.
        address: of its peer.
        delivered_any: whether it has delivered a message or has been part of a session.
        is_shut_down: the guard has shut it down, and libzmq will report that.
    """

    initial_sequence: int | None
    limit_bytes: int
    delivered_bytes: int = 0
    quota_bytes: int = 0
    session: bytes = b""
    announced: bool = True
    address: str = ""
    delivered_any: bool = False
    is_shut_down: bool = False


class ReceiveQuotaGuard:
    """Watches the connections of one ROUTER. One thread calls it.

    Args:
        record_bytes: the most bytes of incomplete messages of a connection without a session.
        message_bytes: the same of a connection in a session.
        unauthenticated_bytes: the same of all connections without a session together.

    Attributes:
        check_interval_s: how often to call `check`.
    """

    def __init__(
        self, record_bytes: int, message_bytes: int, unauthenticated_bytes: int = UNAUTHENTICATED_BYTES
    ) -> None:
        self._total_unauthenticated_bytes = unauthenticated_bytes
        self._unauthenticated_bytes = record_bytes + HELLO_SLACK_BYTES
        self._session_bytes = message_bytes + SESSION_SLACK_BYTES
        self._watched: dict[int, _WatchedConnection] = {}
        self._next_check_s = 0.0
        self.check_interval_s = CHECK_INTERVAL_S

    def on_listening(self, descriptor: int) -> None:
        """libzmq listens on `descriptor`. Earlier connections have no packet filter and are checked more often."""
        if (listener := duplicate_socket(descriptor)) is not None:
            with listener:
                save_syn(listener)

    def on_accepted(self, descriptor: int) -> None:
        """libzmq has a new connection, possibly with the descriptor of an earlier one."""
        watched = self._watched.get(descriptor)
        if watched is not None and not watched.announced:
            watched.announced = True
            return
        self._watch(descriptor)

    def on_disconnected(self, descriptor: int) -> str | None:
        """libzmq has closed a connection.

        Returns the address of a connection that never delivered a message, empty if the address is unknown; None for
        other connections.
        """
        watched = self._watched.pop(descriptor, None)
        if watched is None:
            return ""
        return None if watched.delivered_any or watched.is_shut_down else watched.address

    def on_message(self, frames: Sequence[zmq.Frame]) -> None:
        """Counts a complete message, whose first frame is its routing id."""
        descriptor = int(frames[-1].get(zmq.SRCFD))
        watched = self._watched.get(descriptor)
        if watched is None:
            return
        watched.delivered_any = True
        watched.delivered_bytes += sum([len(frame) + FRAME_OVERHEAD_BYTES for frame in frames[1:]])
        if watched.quota_bytes - watched.delivered_bytes < (1 - RENEWAL_FRACTION) * watched.limit_bytes:
            self._renew(descriptor, watched)

    def authorize(self, descriptor: int, session: bytes) -> None:
        """Gives a connection the limit of a session."""
        if descriptor not in self._watched:  # libzmq's threads may report it later
            self._watch(descriptor, announced=False)
        if (watched := self._watched.get(descriptor)) is not None:
            watched.delivered_any, watched.session, watched.limit_bytes = True, session, self._session_bytes
            self._renew(descriptor, watched)

    def deauthorize(self, session: bytes) -> None:
        """Ends the limit of a session, whose connections may stay open for a while."""
        for descriptor, watched in list(self._watched.items()):
            if watched.session == session:
                watched.session, watched.limit_bytes = b"", self._unauthenticated_bytes
                self._renew(descriptor, watched)

    def check(self, is_drained: Callable[[], bool]) -> list[str]:
        """Shuts down the connections that exceed their limit. Returns the addresses of their peers.

        Has no effect within `check_interval_s` of the last check. If connections without a session exceed their common
        limit, the largest are shut down, and complete messages that wait for delivery count too.

        Args:
            is_drained: whether no complete message waits for delivery. It is called after the bytes are measured, so
                that a message that completes in between does not count as incomplete.
        """
        now = time.monotonic()
        if now < self._next_check_s:
            return []
        enforced = all(watched.initial_sequence is not None for watched in self._watched.values())
        self.check_interval_s = CHECK_INTERVAL_S if enforced else UNENFORCED_CHECK_INTERVAL_S
        self._next_check_s = now + self.check_interval_s
        incomplete = {
            d: self._incomplete_bytes(d, watched) for d, watched in self._watched.items() if not watched.is_shut_down
        }
        over_limit = [d for d, size in incomplete.items() if size > self._watched[d].limit_bytes]
        descriptors = {*self._largest_unauthenticated(incomplete), *(over_limit if over_limit and is_drained() else ())}
        for descriptor in descriptors:
            self._watched[descriptor].is_shut_down = True
            _shut_down(descriptor)
        return [self._watched[descriptor].address for descriptor in descriptors]

    def _largest_unauthenticated(self, incomplete: dict[int, int]) -> list[int]:
        """The largest connections without a session; the others together are within the common limit."""
        sizes = sorted((size, d) for d, size in incomplete.items() if not self._watched[d].session)
        excess, largest = sum(size for size, _ in sizes) - self._total_unauthenticated_bytes, list[int]()
        while excess > 0:
            size, descriptor = sizes.pop()
            excess -= size
            largest.append(descriptor)
        return largest

    def _watch(self, descriptor: int, announced: bool = True) -> None:
        self._watched.pop(descriptor, None)
        with open_tcp_state(descriptor) as found:
            if found is None:
                return
            connection = found[0]
            watched = _WatchedConnection(
                initial_sequence(connection),
                self._unauthenticated_bytes,
                announced=announced,
                address=_peer_address(connection),
            )
        self._watched[descriptor] = watched
        self._renew(descriptor, watched)
        if watched.initial_sequence is None:
            self.check_interval_s, self._next_check_s = UNENFORCED_CHECK_INTERVAL_S, 0.0

    def _renew(self, descriptor: int, watched: _WatchedConnection) -> None:
        """Raises the quota of a connection to its limit beyond the delivered bytes."""
        with open_tcp_state(descriptor) as found:
            if found is None:  # closed; libzmq will report it
                return
            connection, state = found
            watched.delivered_bytes = min(watched.delivered_bytes, state.received_bytes)
            watched.quota_bytes = watched.delivered_bytes + watched.limit_bytes + SEGMENT_BYTES
            if watched.initial_sequence is not None and not limit_receive_sequence(
                connection, watched.initial_sequence + watched.quota_bytes
            ):
                watched.initial_sequence = None

    def _incomplete_bytes(self, descriptor: int, watched: _WatchedConnection) -> int:
        """The bytes of a connection that libzmq has read and not delivered."""
        with open_tcp_state(descriptor) as found:
            if found is None:
                return 0
            state = found[1]
        if state.received_bytes >= watched.quota_bytes:  # the filter may stop it although messages were delivered since
            self._renew(descriptor, watched)
        return state.received_bytes - state.unread_bytes - watched.delivered_bytes


def _peer_address(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError as error:
        if error.errno not in CLOSED_SOCKET_ERRNOS:
            raise
        return ""


def _shut_down(descriptor: int) -> None:
    with open_tcp_state(descriptor) as found:
        if found is None:
            return
        try:
            found[0].shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno not in CLOSED_SOCKET_ERRNOS:
                raise
