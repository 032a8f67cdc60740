"""What a TCP connection may receive, enforced by the kernel: nothing of this process need run for it to hold.

A packet filter on the connection (classic BPF, which needs no permission) drops segments that begin at or beyond a
sequence number. Their sender keeps them and sends them again, less and less often, until the bound was raised.

Ends connections that send on and on without ever completing a message.

libzmq bounds a frame and the messages that wait, but not the frames of one message: it keeps them, unseen, until the
last has come, so that one message of a million empty frames takes 64 MB and an endless one takes everything. The kernel
counts what each TCP connection has received; what is not of messages that were handed on is unfinished. Each connection
gets a quota from the kernel (`quota`), so that no more can come than it may have unfinished, however late this process
looks; whoever reaches it is ended. All that are not part of a session share a bound as well. Unix sockets are not
counted: they lie in a folder of this user.
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
"""By so much a connection may exceed its quota: the segment that begins just before it."""
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
_SEQUENCE_AT, _HEADER_LENGTH_AT = 4, 12  # in the TCP header, where the filter's view of a segment begins


def save_syn(listener: socket.socket) -> bool:
    """From now on `initial_sequence` is known of connections to `listener`. False where the kernel cannot do that."""
    try:
        listener.setsockopt(socket.IPPROTO_TCP, _TCP_SAVE_SYN, 1)
    except OSError as error:
        if error.errno in CLOSED_SOCKET_ERRNOS:
            return False
        raise
    return True


def initial_sequence(connection: socket.socket) -> int | None:
    """The TCP sequence number of the first byte that `connection` receives.

    None where its beginning was not kept: its listener did not `save_syn`, it was accepted by a SYN cookie, it
    was asked for already, or it is no TCP connection.
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
    """From now on `connection` receives no bytes in segments that begin at `sequence` or beyond; replaces the former
    bound. False, and then no bound at all, where the kernel does not allow it or the connection is gone.
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
            (_IF_EQUAL, 3, 0, 0),  # acknowledgements and the end carry no bytes: they pass
            (_LOAD_WORD, 0, 0, _SEQUENCE_AT),
            (_SUBTRACT, 0, 0, sequence & _ALL),
            (_IF_AT_LEAST, 0, 1, 1 << 31),  # before it, in the arithmetic of sequence numbers (RFC 9293 §3.4)
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


CHECK_INTERVAL_S = 0.1
UNENFORCED_CHECK_INTERVAL_S = 0.005
"""Between looks at connections that the kernel does not hold: an attacker on this very machine sends 5 MB meanwhile."""
SESSION_SLACK_BYTES = 1 << 20
HELLO_SLACK_BYTES = 64 << 10  # the CURVE handshake takes one
UNAUTHENTICATED_BYTES = 8 << 20
FRAME_OVERHEAD_BYTES = 64  # ZMTP and CURVE add 35 to 42 to a frame
RENEWAL_FRACTION = 0.25  # of a limit: when so much of it was handed on, the quota is raised


@dataclass(eq=False)
class _WatchedConnection:
    """A connection.

    Attributes:
        initial_sequence: the TCP sequence number of its first byte; None where the kernel does not hold it.
        limit_bytes: how many bytes it may have unfinished.
        delivered_bytes: how many bytes of those that it has received belonged to messages that were handed on.
        quota_bytes: how many bytes the kernel lets it receive in all.
        session: of which it is a part.
        announced: whether libzmq has reported it.
        address: of its peer.
        delivered_any: whether a message of it was handed on, or it has been part of a session.
        is_shut_down: it was ended here, and libzmq is about to report that.
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
        record_bytes: the most that a connection may have unfinished that is not part of a session.
        message_bytes: the most that one of a session may have unfinished.
        strangers_bytes: the most that all together may have unfinished that are not part of a session.

    Attributes:
        check_interval_s: how often to call `check`.
    """

    def __init__(
        self, record_bytes: int, message_bytes: int, unauthenticated_bytes: int = UNAUTHENTICATED_BYTES
    ) -> None:
        self._strangers_bytes = unauthenticated_bytes
        self._stranger_bytes, self._member_bytes = record_bytes + HELLO_SLACK_BYTES, message_bytes + SESSION_SLACK_BYTES
        self._watched: dict[int, _WatchedConnection] = {}
        self._next_check_s = 0.0
        self.check_interval_s = CHECK_INTERVAL_S

    def on_listening(self, descriptor: int) -> None:
        """libzmq listens on `descriptor`. A connection that came before this is looked at often, but not held."""
        if (listener := duplicate_socket(descriptor)) is not None:
            with listener:
                save_syn(listener)

    def on_accepted(self, descriptor: int) -> None:
        """libzmq has a new connection. It may have had the number before."""
        known = self._watched.get(descriptor)
        if known is not None and not known.announced:
            known.announced = True
            return
        self._watch(descriptor)

    def on_disconnected(self, descriptor: int) -> str | None:
        """libzmq has given up a connection. Returns the address of one that never sent a whole message, empty if that
        is unknown; None for others."""
        watched = self._watched.pop(descriptor, None)
        if watched is None:
            return ""
        return None if watched.delivered_any or watched.is_shut_down else watched.address

    def on_message(self, frames: Sequence[zmq.Frame]) -> None:
        """A whole message was handed on, its routing id first."""
        descriptor = int(frames[-1].get(zmq.SRCFD))
        watched = self._watched.get(descriptor)
        if watched is None:
            return
        watched.delivered_any = True
        watched.delivered_bytes += sum([len(frame) + FRAME_OVERHEAD_BYTES for frame in frames[1:]])
        if watched.quota_bytes - watched.delivered_bytes < (1 - RENEWAL_FRACTION) * watched.limit_bytes:
            self._renew(descriptor, watched)

    def authorize(self, descriptor: int, session: bytes) -> None:
        """A connection has become part of a session."""
        if descriptor not in self._watched:  # libzmq's threads may be late in reporting it
            self._watch(descriptor, announced=False)
        if (watched := self._watched.get(descriptor)) is not None:
            watched.delivered_any, watched.session, watched.limit_bytes = True, session, self._member_bytes
            self._renew(descriptor, watched)

    def deauthorize(self, session: bytes) -> None:
        """A session is over; its connections may live on for a while."""
        for descriptor, watched in list(self._watched.items()):
            if watched.session == session:
                watched.session, watched.limit_bytes = b"", self._stranger_bytes
                self._renew(descriptor, watched)

    def check(self, is_drained: Callable[[], bool]) -> list[str]:
        """Breaks the connections that exceed their limit; returns their peers' addresses.

        Does nothing if it did something just now.

        `quiet` says whether nothing complete waits to be handed on. What has come is measured before it is asked, so
        that no message counts as unfinished which was completed meanwhile. Where strangers exceed their common bound,
        what waits complete counts too, and those that have most are broken.
        """
        now = time.monotonic()
        if now < self._next_check_s:
            return []
        held = all(watched.initial_sequence is not None for watched in self._watched.values())
        self.check_interval_s = CHECK_INTERVAL_S if held else UNENFORCED_CHECK_INTERVAL_S
        self._next_check_s = now + self.check_interval_s
        unfinished = {
            d: self._unfinished(d, watched) for d, watched in self._watched.items() if not watched.is_shut_down
        }
        endless = [d for d, size in unfinished.items() if size > self._watched[d].limit_bytes]
        broken = {*self._greediest(unfinished), *(endless if endless and is_drained() else ())}
        for descriptor in broken:
            self._watched[descriptor].is_shut_down = True
            _shut_down(descriptor)
        return [self._watched[descriptor].address for descriptor in broken]

    def _greediest(self, unfinished: dict[int, int]) -> list[int]:
        """Of those that are not part of a session, the ones without which they keep their common bound."""
        strangers = sorted((size, d) for d, size in unfinished.items() if not self._watched[d].session)
        excess, found = sum(size for size, _ in strangers) - self._strangers_bytes, list[int]()
        while excess > 0:
            size, descriptor = strangers.pop()
            excess -= size
            found.append(descriptor)
        return found

    def _watch(self, descriptor: int, announced: bool = True) -> None:
        self._watched.pop(descriptor, None)
        with open_tcp_state(descriptor) as found:
            if found is None:
                return
            watched = _WatchedConnection(
                initial_sequence(found[0]), self._stranger_bytes, announced=announced, address=_peer_address(found[0])
            )
        self._watched[descriptor] = watched
        self._renew(descriptor, watched)
        if watched.initial_sequence is None:
            self.check_interval_s, self._next_check_s = UNENFORCED_CHECK_INTERVAL_S, 0.0

    def _renew(self, descriptor: int, watched: _WatchedConnection) -> None:
        """Lets a connection receive its limit beyond what was handed on."""
        with open_tcp_state(descriptor) as found:
            if found is None:  # libzmq is about to report that it is gone
                return
            connection, state = found
            watched.delivered_bytes = min(watched.delivered_bytes, state.received_bytes)
            watched.quota_bytes = watched.delivered_bytes + watched.limit_bytes + SEGMENT_BYTES
            if watched.initial_sequence is not None and not limit_receive_sequence(
                connection, watched.initial_sequence + watched.quota_bytes
            ):
                watched.initial_sequence = None

    def _unfinished(self, descriptor: int, watched: _WatchedConnection) -> int:
        """How many bytes of a connection libzmq has read and not handed on."""
        with open_tcp_state(descriptor) as found:
            if found is None:
                return 0
            state = found[1]
        if state.received_bytes >= watched.quota_bytes:  # it may be held although something was handed on since
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
