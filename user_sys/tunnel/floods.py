"""Ends connections that send on and on without ever completing a message.

libzmq bounds a frame and the messages that wait, but not the frames of one message: it keeps them, unseen, until the
last has come, so that one message of a million empty frames takes 64 MB and an endless one takes everything. The kernel
counts what each TCP connection has received; what is not of messages that were handed on is unfinished. Each connection
gets a quota from the kernel (`quota`), so that no more can come than it may have unfinished, however late this process
looks; whoever reaches it is ended. All that are not part of a session share a bound as well. Unix sockets are not
counted: they lie in a folder of this user.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from user_sys.tunnel.quota import SEGMENT_BYTES, first_sequence, hold_at, keep_beginnings
from user_sys.tunnel.tcp_state import GONE, duplicate, looked_at

HELD_CHECK_S = 0.1
CHECK_S = 0.005
"""Between looks at connections that the kernel does not hold: an attacker on this very machine sends 5 MB meanwhile."""
SLACK_BYTES = 1 << 20
HELLO_SLACK_BYTES = 64 << 10  # the CURVE handshake takes one
STRANGERS_BYTES = 8 << 20
FRAME_OVERHEAD_BYTES = 64  # ZMTP and CURVE add 35 to 42 to a frame
RENEWED_SHARE = 0.25  # of a limit: when so much of it was handed on, the quota is raised


@dataclass(eq=False)
class _Watched:
    """A connection.

    Attributes:
        first: the TCP sequence number of its first byte; None where the kernel does not hold it.
        limit: how many bytes it may have unfinished.
        complete: how many bytes of those that it has received belonged to messages that were handed on.
        quota: how many bytes the kernel lets it receive in all.
        session: of which it is a part.
        announced: whether libzmq has reported it.
        address: of its peer.
        known: whether a message of it was handed on, or it has been part of a session.
        broken: it was ended here, and libzmq is about to report that.
    """

    first: int | None
    limit: int
    complete: int = 0
    quota: int = 0
    session: bytes = b""
    announced: bool = True
    address: str = ""
    known: bool = False
    broken: bool = False


class FloodGuard:
    """Watches the connections of one ROUTER. One thread calls it.

    Args:
        record_bytes: the most that a connection may have unfinished that is not part of a session.
        message_bytes: the most that one of a session may have unfinished.
        strangers_bytes: the most that all together may have unfinished that are not part of a session.

    Attributes:
        check_every_s: how often to call `check`.
    """

    def __init__(self, record_bytes: int, message_bytes: int, strangers_bytes: int = STRANGERS_BYTES) -> None:
        self._strangers_bytes = strangers_bytes
        self._stranger_bytes, self._member_bytes = record_bytes + HELLO_SLACK_BYTES, message_bytes + SLACK_BYTES
        self._watched: dict[int, _Watched] = {}
        self._next_check_s = 0.0
        self.check_every_s = HELD_CHECK_S

    def listening(self, descriptor: int) -> None:
        """libzmq listens on `descriptor`. A connection that came before this is looked at often, but not held."""
        if (listener := duplicate(descriptor)) is not None:
            with listener:
                keep_beginnings(listener)

    def accepted(self, descriptor: int) -> None:
        """libzmq has a new connection. It may have had the number before."""
        known = self._watched.get(descriptor)
        if known is not None and not known.announced:
            known.announced = True
            return
        self._watch(descriptor)

    def gone(self, descriptor: int) -> str | None:
        """libzmq has given up a connection. Returns the address of one that never sent a whole message, empty if that
        is unknown; None for others."""
        watched = self._watched.pop(descriptor, None)
        if watched is None:
            return ""
        return None if watched.known or watched.broken else watched.address

    def heard(self, frames: Sequence[zmq.Frame]) -> None:
        """A whole message was handed on, its routing id first."""
        descriptor = int(frames[-1].get(zmq.SRCFD))
        watched = self._watched.get(descriptor)
        if watched is None:
            return
        watched.known = True
        watched.complete += sum([len(frame) + FRAME_OVERHEAD_BYTES for frame in frames[1:]])
        if watched.quota - watched.complete < (1 - RENEWED_SHARE) * watched.limit:
            self._renew(descriptor, watched)

    def admit(self, descriptor: int, session: bytes) -> None:
        """A connection has become part of a session."""
        if descriptor not in self._watched:  # libzmq's threads may be late in reporting it
            self._watch(descriptor, announced=False)
        if (watched := self._watched.get(descriptor)) is not None:
            watched.known, watched.session, watched.limit = True, session, self._member_bytes
            self._renew(descriptor, watched)

    def dismiss(self, session: bytes) -> None:
        """A session is over; its connections may live on for a while."""
        for descriptor, watched in list(self._watched.items()):
            if watched.session == session:
                watched.session, watched.limit = b"", self._stranger_bytes
                self._renew(descriptor, watched)

    def check(self, quiet: Callable[[], bool]) -> list[str]:
        """Breaks the connections that exceed their limit; returns their peers' addresses.

        Does nothing if it did something just now.

        `quiet` says whether nothing complete waits to be handed on. What has come is measured before it is asked, so
        that no message counts as unfinished which was completed meanwhile. Where strangers exceed their common bound,
        what waits complete counts too, and those that have most are broken.
        """
        now = time.monotonic()
        if now < self._next_check_s:
            return []
        held = all(watched.first is not None for watched in self._watched.values())
        self.check_every_s = HELD_CHECK_S if held else CHECK_S
        self._next_check_s = now + self.check_every_s
        unfinished = {d: self._unfinished(d, watched) for d, watched in self._watched.items() if not watched.broken}
        endless = [d for d, size in unfinished.items() if size > self._watched[d].limit]
        broken = {*self._greediest(unfinished), *(endless if endless and quiet() else ())}
        for descriptor in broken:
            self._watched[descriptor].broken = True
            _break(descriptor)
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
        with looked_at(descriptor) as found:
            if found is None:
                return
            watched = _Watched(
                first_sequence(found[0]), self._stranger_bytes, announced=announced, address=_address(found[0])
            )
        self._watched[descriptor] = watched
        self._renew(descriptor, watched)
        if watched.first is None:
            self.check_every_s, self._next_check_s = CHECK_S, 0.0

    def _renew(self, descriptor: int, watched: _Watched) -> None:
        """Lets a connection receive its limit beyond what was handed on."""
        with looked_at(descriptor) as found:
            if found is None:  # libzmq is about to report that it is gone
                return
            connection, state = found
            watched.complete = min(watched.complete, state.received_bytes)
            watched.quota = watched.complete + watched.limit + SEGMENT_BYTES
            if watched.first is not None and not hold_at(connection, watched.first + watched.quota):
                watched.first = None

    def _unfinished(self, descriptor: int, watched: _Watched) -> int:
        """How many bytes of a connection libzmq has read and not handed on."""
        with looked_at(descriptor) as found:
            if found is None:
                return 0
            state = found[1]
        if state.received_bytes >= watched.quota:  # it may be held although something was handed on since
            self._renew(descriptor, watched)
        return state.received_bytes - state.unread_bytes - watched.complete


def _address(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError as error:
        if error.errno not in GONE:
            raise
        return ""


def _break(descriptor: int) -> None:
    with looked_at(descriptor) as found:
        if found is None:
            return
        try:
            found[0].shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno not in GONE:
                raise
