"""The socket of a gateway, relay or policy server: CURVE for the keys of a keyring, with guards against floods.

libzmq limits the size of a frame and the number of queued messages, but not the frames of one message. It holds them
until the last one arrives: a message of a million empty frames takes 64 MB, and an endless one takes all memory. So
`ReceiveQuotaGuard` compares the bytes that the kernel has received with those of delivered messages.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from hal.state_database import AuditEntry, AuditSink
from user_sys.errors import RunError
from user_sys.tunnel.connection import (
    CLOSED_SOCKET_ERRNOS,
    Wakeup,
    ZmqSocket,
    configure_socket,
    duplicate_socket,
    enable_ipv6,
    has_message,
    raise_descriptor_limit,
    read_tcp_state,
    receive_frames,
    send_frames,
)
from user_sys.tunnel.keys import KeyPair, Keyring, fingerprint
from user_sys.tunnel.limits import LOOPBACK_HOSTS, TunnelLimits
from user_sys.tunnel.protocol import Payload

logger = logging.getLogger(__name__)

IO_THREADS = 4  # libzmq gives a new connection to the least busy thread, so the channels of a robot use several
BIND_TIMEOUT_S = 3.0
BIND_RETRY_S = 0.1
CLOSE_LINGER_MS = 200
MAX_REFUSED_ADDRESSES = 1024
ZAP_DOMAIN = b"user-sys"
NOT_ALLOWED = "this key is not allowed"
NO_HANDSHAKE = "it completed no handshake: no key, another protocol, another gateway's key, a slow link, or no bytes"
TOO_MANY_BYTES = "it sent too many bytes without a whole message"
TOO_MANY_CONNECTIONS = "too many connections without a session, of which it was among the oldest"

CHECK_INTERVAL_S = 0.1
UNAUTHENTICATED_CHECK_INTERVAL_S = 0.005  # an attacker on the same machine sends 5 MB in this time
SESSION_SLACK_BYTES = 1 << 20
HELLO_SLACK_BYTES = 64 << 10  # the CURVE handshake needs one
UNAUTHENTICATED_BYTES = 8 << 20
MAX_UNAUTHENTICATED, MAX_UNAUTHENTICATED_SHARE = 1024, 4
"""The most connections without a session: so many, or this part of the process's open files if that is less."""
FRAME_OVERHEAD_BYTES = 64  # ZMTP and CURVE add 35 to 42 bytes to a frame

_FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_MONITORED_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKES


@dataclass(eq=False)
class _WatchedConnection:
    """A TCP connection.

    Attributes:
        address: of its peer; empty if it was closed before.
        delivered_bytes: of its delivered messages.
        session: the id of its session, or empty.
        has_delivered: whether it has delivered a message.
        is_shut_down: the guard has shut it down, and libzmq will report that.
    """

    address: str
    delivered_bytes: int = 0
    session: bytes = b""
    has_delivered: bool = False
    is_shut_down: bool = False


class ReceiveQuotaGuard:
    """Shuts down connections with too many bytes beyond their delivered messages. One thread calls it.

    Args:
        record_bytes: the most bytes of incomplete messages of a connection without a session.
        message_bytes: the same of a connection in a session.
        unauthenticated_bytes: the same of all connections without a session together.
        max_unauthenticated: the most connections without a session. Each is an open file of this process.
    """

    def __init__(
        self,
        record_bytes: int,
        message_bytes: int,
        unauthenticated_bytes: int = UNAUTHENTICATED_BYTES,
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
    ) -> None:
        self._total_unauthenticated_bytes = unauthenticated_bytes
        self._max_unauthenticated = max_unauthenticated
        self._unauthenticated_bytes = record_bytes + HELLO_SLACK_BYTES
        self._session_bytes = message_bytes + SESSION_SLACK_BYTES
        self._watched: dict[int, _WatchedConnection] = {}
        self._next_check_s = 0.0

    @property
    def check_interval_s(self) -> float:
        """How often to call `check`: more often while a connection is in no session."""
        has_sessions = all(watched.session for watched in self._watched.values())
        return CHECK_INTERVAL_S if has_sessions else UNAUTHENTICATED_CHECK_INTERVAL_S

    def on_accepted(self, descriptor: int) -> None:
        """libzmq has a new connection, possibly with the descriptor of an earlier one."""
        self._watched.pop(descriptor, None)
        if read_tcp_state(descriptor) is not None:
            self._watched[descriptor] = _WatchedConnection(_peer_address(descriptor))
            self._next_check_s = min(self._next_check_s, time.monotonic() + UNAUTHENTICATED_CHECK_INTERVAL_S)

    def on_disconnected(self, descriptor: int) -> str | None:
        """libzmq has closed a connection.

        Returns the address of a connection that never delivered a message, empty if the address is unknown; None for
        other connections.
        """
        watched = self._watched.pop(descriptor, None)
        if watched is None:
            return ""
        return None if watched.has_delivered or watched.is_shut_down else watched.address

    def on_message(self, descriptor: int, frame_bytes: list[int]) -> None:
        """Counts a complete message."""
        if (watched := self._watched.get(descriptor)) is not None:
            watched.has_delivered = True
            watched.delivered_bytes += sum(frame_bytes) + FRAME_OVERHEAD_BYTES * len(frame_bytes)

    def authorize(self, descriptor: int, session: bytes) -> None:
        """Gives a connection the limit of a session."""
        if (watched := self._watched.get(descriptor)) is not None:
            watched.session = session

    def deauthorize(self, session: bytes) -> None:
        """Ends the limit of a session, whose connections may stay open for a while."""
        for watched in self._watched.values():
            if watched.session == session:
                watched.session = b""

    def check(self, is_drained: Callable[[], bool]) -> list[tuple[str, str]]:
        """Shuts down the connections that exceed their limit. Returns the addresses of their peers, and the reasons.

        Has no effect within `check_interval_s` of the last check. If connections without a session exceed their common
        limit, the largest are shut down, and complete messages that wait for delivery count too. If there are too many,
        the oldest are shut down.

        Args:
            is_drained: whether no complete message waits for delivery. It is called after the bytes are measured, so
                that a message that completes in between does not count as incomplete.
        """
        now = time.monotonic()
        if now < self._next_check_s:
            return []
        self._next_check_s = now + self.check_interval_s
        incomplete = {d: self._incomplete_bytes(d, w) for d, w in self._watched.items() if not w.is_shut_down}
        over_limit = [
            descriptor
            for descriptor, size in incomplete.items()
            if size > (self._session_bytes if self._watched[descriptor].session else self._unauthenticated_bytes)
        ]
        unauthenticated = [descriptor for descriptor in incomplete if not self._watched[descriptor].session]
        reasons = dict.fromkeys(unauthenticated[: -self._max_unauthenticated], TOO_MANY_CONNECTIONS)
        reasons |= dict.fromkeys(self._largest_unauthenticated(incomplete), TOO_MANY_BYTES)
        reasons |= dict.fromkeys(over_limit if over_limit and is_drained() else (), TOO_MANY_BYTES)
        for descriptor in reasons:
            self._watched[descriptor].is_shut_down = True
            _shut_down(descriptor)
        return [(self._watched[descriptor].address, reason) for descriptor, reason in reasons.items()]

    def _largest_unauthenticated(self, incomplete: dict[int, int]) -> list[int]:
        """The largest connections without a session; the others together are within the common limit."""
        sizes = sorted((size, d) for d, size in incomplete.items() if not self._watched[d].session)
        excess, largest = sum(size for size, _ in sizes) - self._total_unauthenticated_bytes, list[int]()
        while excess > 0:
            size, descriptor = sizes.pop()
            excess -= size
            largest.append(descriptor)
        return largest

    def _incomplete_bytes(self, descriptor: int, watched: _WatchedConnection) -> int:
        """The bytes of a connection that libzmq has read and not delivered."""
        state = read_tcp_state(descriptor)
        if state is None:  # closed; libzmq will report it
            return 0
        watched.delivered_bytes = min(watched.delivered_bytes, state.received_bytes)
        return state.received_bytes - state.unread_bytes - watched.delivered_bytes


def _peer_address(descriptor: int) -> str:
    connection = duplicate_socket(descriptor)
    if connection is None:
        return ""
    with connection:
        try:
            return str(connection.getpeername()[0])
        except OSError as error:
            if error.errno not in CLOSED_SOCKET_ERRNOS:
                raise
            return ""


def _shut_down(descriptor: int) -> None:
    connection = duplicate_socket(descriptor)
    if connection is not None:
        with connection, contextlib.suppress(OSError):  # it may be closed by now
            connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, eq=False)
class RoutedMessage:
    """A message, and the connection that it came by. `public_key` is authenticated."""

    routing_id: bytes
    frames: list[Payload]
    public_key: str
    address: str
    descriptor: int


def require_free_endpoint(endpoint: str, remedy: str) -> None:
    """Blocks for at most `BIND_TIMEOUT_S`. Raises RunError, which ends with `remedy`: no gateway could listen there."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        _bind(router, endpoint, remedy)


def _bind(router: ZmqSocket, endpoint: str, remedy: str) -> None:
    enable_ipv6(router, endpoint)
    deadline = time.monotonic() + BIND_TIMEOUT_S  # a killed predecessor may hold the port a little longer
    while True:
        try:
            router.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                reason = error.strerror or str(error)
                raise RunError(f"cannot listen on {endpoint} ({reason}); {remedy}") from None
        time.sleep(BIND_RETRY_S)


class GuardedRouter:
    """A CURVE server that authenticates every key with ZAP (https://rfc.zeromq.org/spec/27/), and guards its memory.

    One thread calls it, except `wake`, which any thread may call.

    Args:
        counters: gets the numbers of refused keys, failed handshakes and floods.
        audit: gets an entry for each refused connection.
    """

    def __init__(
        self, keys: KeyPair, keyring: Keyring, limits: TunnelLimits, counters: Counter[str], audit: AuditSink
    ) -> None:
        self._keys, self._keyring, self._counters, self._audit = keys, keyring, counters, audit
        max_unauthenticated = min(MAX_UNAUTHENTICATED, raise_descriptor_limit() // MAX_UNAUTHENTICATED_SHARE)
        self._quota_guard = ReceiveQuotaGuard(
            limits.max_record_bytes, limits.max_message_bytes, max_unauthenticated=max_unauthenticated
        )
        self._refused_keys = Counter[str]()  # by address: connections that will end because their key was refused
        self._wakeup = Wakeup()
        context: zmq.Context[ZmqSocket] = zmq.Context(IO_THREADS)
        self._zap: ZmqSocket = context.socket(zmq.REP)  # before the port opens: without it libzmq accepts any key
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self._router: ZmqSocket = context.socket(zmq.ROUTER)
        self._monitor: ZmqSocket = self._router.get_monitor_socket(_MONITORED_EVENTS)
        configure_socket(self._router, limits)
        self._router.curve_server = True
        self._router.curve_publickey = keys.public.encode()
        self._router.curve_secretkey = keys.secret.encode()
        self._router.zap_domain = ZAP_DOMAIN
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A new connection with the routing id of a live one replaces it; otherwise libzmq never reads the new one and
        # never frees its bytes. A peer cannot replace a session this way: session ids are 16 random bytes.
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._poll = select.poll()
        for source in (self._router, self._zap, self._monitor):
            self._poll.register(int(source.getsockopt(zmq.FD)), select.POLLIN)
        self._poll.register(self._wakeup.fileno(), select.POLLIN)

    def bind(self, endpoint: str, setting: str) -> str:
        """Listens on `endpoint` and returns it with the selected port. Blocks for at most `BIND_TIMEOUT_S`.

        Args:
            setting: names the setting in an error.

        Raises:
            RunError: the port is in use, or the address is not one of this machine.
        """
        self._keyring.refresh()
        _bind(self._router, endpoint, f"change {setting}")
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    # The loop

    def wait(self, timeout_s: float) -> None:
        """Blocks until a message, an event or a wake-up arrives, or the timeout ends. Processes the events."""
        timeout_s = 0.0 if self.has_message() else min(timeout_s, self._quota_guard.check_interval_s)
        ready = {descriptor for descriptor, _ in self._poll.poll(1e3 * timeout_s)}
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
        self.process_events()

    def wake(self) -> None:
        """Ends `wait` in another thread."""
        self._wakeup.set()

    def process_events(self) -> None:
        """Answers authentication requests, processes connection events, and checks the receive quotas."""
        self._process_monitor_events()
        while has_message(self._zap):
            self._answer_zap_request()
        for address, reason in self._quota_guard.check(lambda: not self.has_message()):
            self._counters["floods"] += 1
            logger.warning("tunnel.quota_exceeded address=%s: %s", address, reason)
            self._audit(AuditEntry(event="refused", address=address, reason=reason))

    def has_message(self) -> bool:
        return has_message(self._router)

    def receive(self) -> RoutedMessage | None:
        """The next message, or None; does not block."""
        frames = receive_frames(self._router)
        if frames is None:
            return None
        self._process_monitor_events()  # so that the guard knows the connection
        last = frames[-1]
        descriptor = int(last.get(zmq.SRCFD))
        self._quota_guard.on_message(descriptor, [len(frame) for frame in frames[1:]])
        return RoutedMessage(
            frames[0].bytes,
            [frame.buffer for frame in frames[1:]],
            str(last.get("User-Id")),
            str(last.get("Peer-Address")),
            descriptor,
        )

    def send(self, routing_id: bytes, frames: list[Payload]) -> bool:
        """Sends a message. Returns False if the peer is gone or its pipe is full."""
        return send_frames(self._router, [routing_id, *frames])

    def authorize(self, descriptor: int, session: bytes) -> None:
        """See `ReceiveQuotaGuard.authorize`."""
        self._quota_guard.authorize(descriptor, session)

    def deauthorize(self, session: bytes) -> None:
        """See `ReceiveQuotaGuard.deauthorize`."""
        self._quota_guard.deauthorize(session)

    def close(self) -> None:
        """Closes the port."""
        self._router.disable_monitor()
        self._monitor.close(0)
        self._zap.close(0)
        self._router.close(CLOSE_LINGER_MS)
        self._router.context.term()
        self._wakeup.close()

    # Authentication

    def _answer_zap_request(self) -> None:
        version, request, domain, address, _, mechanism, *credentials = self._zap.recv_multipart()
        public = z85.encode(credentials[0]).decode() if len(credentials) == 1 and len(credentials[0]) == 32 else ""
        self._keyring.refresh()
        is_allowed = mechanism == b"CURVE" and domain == ZAP_DOMAIN and self._keyring.find(public) is not None
        if not is_allowed:
            self._counters["keys_refused"] += 1
            host = address.decode(errors="replace")
            if len(self._refused_keys) >= MAX_REFUSED_ADDRESSES:
                self._refused_keys.clear()
            self._refused_keys[host] += 1
            key = fingerprint(public) if public else ""
            self._audit(AuditEntry(event="refused", key=key, address=host, reason=NOT_ALLOWED))
            logger.warning("tunnel.refused key=%s address=%s reason=%s", public or "none", host, NOT_ALLOWED)
        status = (b"200", b"OK") if is_allowed else (b"400", NOT_ALLOWED.encode())
        self._zap.send_multipart([version, request, *status, public.encode(), b""])

    def _process_monitor_events(self) -> None:
        while has_message(self._monitor):
            event = recv_monitor_message(self._monitor)
            kind, descriptor = int(event["event"]), int(event["value"])
            if kind == zmq.EVENT_ACCEPTED:
                self._quota_guard.on_accepted(descriptor)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._on_disconnected(descriptor, bytes(event["endpoint"]).decode())
            else:
                self._counters["handshakes_failed"] += 1
                logger.warning("tunnel.handshake_failed: another protocol, another gateway's key, or a slow link")

    def _on_disconnected(self, descriptor: int, endpoint: str) -> None:
        """Audits a closed connection without a handshake, unless its refused key was audited.

        libzmq may close a connection before the guard could read its address. On a loopback port the host is known.
        """
        address, local = self._quota_guard.on_disconnected(descriptor), urlsplit(endpoint)
        if address is None:
            return
        address = address or (local.hostname if local.hostname in LOOPBACK_HOSTS else None) or "unknown"
        if self._refused_keys[address] > 0:
            self._refused_keys[address] -= 1
        else:
            self._audit(AuditEntry(event="refused", address=address, reason=NO_HANDSHAKE))
