"""The gateway's end of the tunnel: one encrypted TCP port for the keys in its keyring.

One thread owns the sockets. It decodes and checks every message and passes it to a `TunnelHandler`. It sends the
messages that other threads have queued: control and e-stops, then weights, then experience. A message of a peer never
raises out of this thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hal.spec import RobotSpec
from hal.state_database import AuditEntry, AuditEvent, AuditSink, discard_audit_event
from user_sys.errors import RunError, WireError
from user_sys.messages import (
    PREVIOUS_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    ChunkOffer,
    CreditGrant,
    Heartbeat,
    Hello,
    Refusal,
    Welcome,
)
from user_sys.threads import ThreadedService
from user_sys.tunnel.connection import RECEIVE_BURST, request_short_time_slice, silence_s
from user_sys.tunnel.flow_control import ChannelFlow, ChannelMetrics, SendFrames, SendQueue
from user_sys.tunnel.keys import AuthorizedKey, KeyPair, Keyring, Role, fingerprint
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import (
    ALLOWED_MESSAGES,
    CREDIT_EXEMPT,
    SESSION_BYTES,
    AnyMessage,
    Channel,
    Envelope,
    Payload,
    SessionState,
    channel_limits,
    channel_of,
    credit_cost_bytes,
    decode_envelope,
    encode_envelope,
    hello_protocol_version,
)
from user_sys.tunnel.router import GuardedRouter, RoutedMessage

logger = logging.getLogger(__name__)

TICK_S = 0.25
BLOCKED_RETRY_S = 0.005
STOP_TIMEOUT_S = 10.0
MAX_POLICIES = 64  # sessions of one policy server


@dataclass(frozen=True)
class Peer:
    """The authenticated other end of a session.

    Attributes:
        address: of its computer, or of the relay's.
        session: the session id.
        spec: from a robot's Hello.
        via: the relay that opened the session for a robot; empty without a relay.
        protocol: its protocol version.
    """

    name: str
    role: Role
    public_key: str
    address: str
    session: bytes
    spec: RobotSpec | None = None
    via: str = ""
    protocol: int = PROTOCOL_VERSION


class PeerSession:
    """A session with one peer. One thread calls it; any thread may queue messages and release credit."""

    def __init__(self, peer: Peer, limits: TunnelLimits, metrics: dict[Channel, ChannelMetrics]) -> None:
        self.peer = peer
        self.last_control_s = time.monotonic()
        self.state = SessionState.HANDSHAKE
        self.welcomed_channels = {Channel.CONTROL}
        self.flows = {
            channel: ChannelFlow(bounds, SendQueue(bounds, metrics[channel]))
            for channel, bounds in channel_limits(limits).items()
        }
        self.bulk_descriptors: dict[Channel, int] = {}  # libzmq's connections, except that of control

    @property
    def is_open(self) -> bool:
        return self.state is SessionState.OPEN

    def silence_reason(self, limits: TunnelLimits) -> str:
        """Describes the connection that was silent for too long; empty if all are alive."""
        silent_s = time.monotonic() - self.last_control_s
        if silent_s > limits.dead_after_s:
            return f"silent for {silent_s:.1f} s"
        for channel, descriptor in self.bulk_descriptors.items():
            if (silent_s := silence_s(descriptor)) > limits.stuck_after_s:
                return f"its {channel.name.lower()} connection was silent for {silent_s:.1f} s"
        return ""

    def flush(self, channel: Channel, send: SendFrames) -> bool:
        """Sends a due grant and the queue of a channel. Returns True if libzmq accepts no more."""
        return channel in self.welcomed_channels and self.flows[channel].flush(send)


class PeerSessions:
    """The sessions of a server, and the channels of each that have something to send.

    One thread adds and removes sessions; any thread may call the other methods. Each step is one operation of a dict.
    """

    def __init__(self) -> None:
        self._by_id: dict[bytes, PeerSession] = {}
        self._open_by_name: dict[str, PeerSession] = {}
        # For each channel, the sessions to flush, in the order of their first message.
        self._to_flush: dict[Channel, dict[PeerSession, None]] = {channel: {} for channel in Channel}

    def find(self, session_id: bytes) -> PeerSession | None:
        return self._by_id.get(session_id)

    def find_open(self, name: str) -> PeerSession | None:
        """The open session of the peer called `name`."""
        return self._open_by_name.get(name)

    def all(self) -> list[PeerSession]:
        return list(self._by_id.values())

    def peers(self, role: Role | None = None) -> tuple[Peer, ...]:
        """The peers with an open session and this role, sorted by name."""
        peers = [session.peer for session in list(self._open_by_name.values())]
        return tuple(sorted((peer for peer in peers if role in (None, peer.role)), key=lambda peer: peer.name))

    def add(self, session: PeerSession) -> None:
        self._by_id[session.peer.session] = session

    def set_open(self, session: PeerSession) -> None:
        """Makes `session` the open session of its name."""
        self._open_by_name[session.peer.name] = session

    def remove(self, session: PeerSession) -> None:
        self._by_id.pop(session.peer.session, None)
        if self._open_by_name.get(session.peer.name) is session:
            del self._open_by_name[session.peer.name]

    def mark(self, session: PeerSession, channel: Channel) -> None:
        """Marks a channel of `session` for the next flush."""
        self._to_flush[channel][session] = None

    def take_marked(self, channel: Channel) -> list[PeerSession]:
        """The sessions that are marked for a channel; removes the marks."""
        marked = self._to_flush[channel]
        sessions = list(marked)
        for session in sessions:
            del marked[session]
        return [session for session in sessions if session.state is not SessionState.ENDED]


_BulkMessage = tuple[PeerSession, Channel, Envelope, int]  # with its size in bytes


class TunnelHandler(Protocol):
    """The application of a `TunnelServer`. The server's thread calls it, so it must return soon and never block.

    A WireError refuses the peer. Any other exception ends the server.
    """

    def refusal_reason(self, hello: Hello) -> str:
        """The reason to refuse a session of an authenticated peer now; empty to accept it."""

    def on_peer_opened(self, peer: Peer) -> None:
        """`peer` is authenticated and all its channels are open."""

    def on_peer_closed(self, peer: Peer, reason: str) -> None:
        """The session has ended; the same name may open another."""

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        """A message that the role and name of `peer` allow. `payload` stays valid while the handler holds it.

        A `ChunkOffer` uses the peer's credit until `TunnelServer.release`. Any other message returns its credit when
        this method returns.
        """


class TunnelServer(ThreadedService):
    """Listens on `endpoint` from `start` to `close`. Any thread may call its public methods."""

    def __init__(
        self,
        endpoint: str,
        keys: KeyPair,
        keyring: Keyring,
        handler: TunnelHandler,
        limits: TunnelLimits | None = None,
        audit: AuditSink = discard_audit_event,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__("tunnel", STOP_TIMEOUT_S, "its handler blocks")
        self.endpoint = endpoint
        self.counters: Counter[str] = Counter()
        self.metrics = {channel: ChannelMetrics() for channel in Channel}
        self.sessions = PeerSessions()
        self._keys, self._keyring = keys, keyring
        self._handler = handler
        self._limits = limits or TunnelLimits()
        self._audit, self._unix_ns = audit, unix_ns

    # Life cycle

    def start(self) -> None:
        """Listens and serves. If `endpoint` has port 0, `endpoint` holds the selected port afterwards.

        Raises:
            RunError: the port is in use, or the address is not one of this machine.
        """
        router = GuardedRouter(self._keys, self._keyring, self._limits, self.counters, self._audit)
        try:
            self.endpoint = router.bind(self.endpoint, "--gateway.endpoint, or a relay's --endpoint")
        except RunError:
            router.close()
            raise
        self.attach(router)
        super().start()
        logger.info("tunnel.listening endpoint=%s public_key=%s", self.endpoint, self._keys.public)

    def attach(self, router: GuardedRouter) -> None:
        """Uses `router` from now on. `start` calls this; a simulation without a thread calls it instead of `start`."""
        self._router = router

    def _wake(self) -> None:
        self._router.wake()

    # Methods for other threads

    def send(self, name: str, message: AnyMessage, payload: Payload | None = None) -> bool:
        """Queues a message for the peer called `name`; never blocks.

        A state message replaces its queued predecessor (`coalescing_key`). Returns False without such a peer, or if its
        queue is full. Also if the record is longer than `max_record_bytes`: the client would refuse the session.
        """
        session = self.sessions.find_open(name)
        return session is not None and self._send(session, Envelope(message, payload))

    def reply(self, peer: Peer, message: AnyMessage) -> bool:
        """As `send`, but only to the given session of the peer: a later session may use another outbox."""
        session = self.sessions.find(peer.session)
        return session is not None and self._send(session, Envelope(message))

    def _send(self, session: PeerSession, envelope: Envelope) -> bool:
        message, channel = envelope.message, channel_of(envelope.message)
        if not session.is_open:
            return False
        if len(envelope.record) > self._limits.max_record_bytes:
            self.counters["too_large"] += 1
            logger.warning("tunnel.too_large peer=%s message=%s", session.peer.name, type(message).__name__)
            return False
        if not session.flows[channel].send_queue.put(envelope):
            self.counters["queue_full"] += 1
            logger.warning("tunnel.queue_full peer=%s message=%s", session.peer.name, type(message).__name__)
            return False
        self._mark(session, channel)
        return True

    def release(self, peer: Peer, chunks: int, size_bytes: int) -> None:
        """Returns credit to `peer` for processed chunks and the total bytes of their packets."""
        session = self.sessions.find(peer.session)
        if session is not None and session.flows[Channel.EXPERIENCE].window.release(chunks, size_bytes):
            self._mark(session, Channel.EXPERIENCE)

    def _mark(self, session: PeerSession, channel: Channel) -> None:
        self.sessions.mark(session, channel)
        if not self._is_own_thread():
            self._router.wake()

    def _is_own_thread(self) -> bool:
        return self._thread.ident == threading.get_ident()

    def peers(self, role: Role | None = None) -> tuple[Peer, ...]:
        """The peers with an open session, sorted by name."""
        return self.sessions.peers(role)

    def scalars(self) -> dict[str, float]:
        """The counters of each channel, summed over all peers."""
        by_channel = [metrics.scalars(channel.name.lower()) for channel, metrics in self.metrics.items()]
        return {key: value for scalars in by_channel for key, value in scalars.items()}

    # The server's thread

    def _work(self) -> None:
        """Serves until `close`, and then sends the queued messages that libzmq accepts at once."""
        request_short_time_slice()
        router, next_tick = self._router, 0.0
        try:
            while not self._stopping.is_set():
                self.receive()
                retry_s = self.flush()
                if time.monotonic() >= next_tick:
                    self.tick()
                    next_tick = time.monotonic() + TICK_S
                router.wait(retry_s)
            self.flush()
        finally:
            router.close()

    def tick(self) -> None:
        """Ends sessions whose key was revoked or whose peer is silent."""
        keyring_changed = self._keyring.refresh()
        for name in self._keyring.unreadable if keyring_changed else ():
            logger.warning("tunnel.unreadable_key file=%s/%s", self._keyring.folder, name)
        for session in self.sessions.all():
            entry = self._keyring.find(session.peer.public_key)
            if entry is None or not entry.can_act_as(session.peer.name, session.peer.role):
                self._refuse(session, "this key was revoked")
            elif silence := session.silence_reason(self._limits):
                self._end(session, silence)

    # Receiving

    def receive(self) -> None:
        """Delivers received messages, control first. The number is limited, so that sending and ticks continue."""
        bulk: list[_BulkMessage] = []
        for _ in range(RECEIVE_BURST):
            received = self._router.receive()
            if received is None:
                break
            self._dispatch(received, bulk)
        if bulk:
            self.flush()  # bulk does not delay replies on the control channel
        bulk.sort(key=lambda item: item[1] is not Channel.WEIGHTS)
        for item in bulk:
            self._deliver(*item)

    def _dispatch(self, received: RoutedMessage, bulk: list[_BulkMessage]) -> None:
        """Delivers a message of control or stop; appends others to `bulk`."""
        session = self.sessions.find(received.routing_id[1:])
        try:
            channel = Channel(received.routing_id[:1])
        except ValueError:
            self.counters["stray"] += 1
            return
        if session is not None and session.peer.public_key != received.public_key:
            self.counters["stray"] += 1
            return
        try:
            envelope = decode_envelope(channel, received.frames, self._limits)
            if isinstance(envelope.message, Hello):
                self._on_hello(received, channel, session, envelope.message)
            elif session is None or channel not in session.welcomed_channels:
                self.counters["stray"] += 1
            elif channel in (Channel.CONTROL, Channel.STOP):
                self._deliver(session, channel, envelope, credit_cost_bytes(received.frames))
            else:
                bulk.append((session, channel, envelope, credit_cost_bytes(received.frames)))
        except WireError as error:
            self._reject(received, session, str(error))

    def _reject(self, received: RoutedMessage, session: PeerSession | None, reason: str) -> None:
        """Refuses a peer whose bytes violate the protocol."""
        self.counters["malformed"] += 1
        if session is not None:
            self._refuse(session, reason)
            return
        version = hello_protocol_version(received.frames[0]) if len(received.frames) == 1 else None
        if version not in (None, PROTOCOL_VERSION):
            reason = version_mismatch_reason(version)
        entry = self._keyring.find(received.public_key)
        name = entry.name if entry else "?"
        self._send_refusal(received.routing_id, name, received.public_key, received.address, reason)

    def _send_refusal(self, routing_id: bytes, name: str, public: str, address: str, reason: str) -> None:
        self._audit(AuditEntry(event="refused", key=fingerprint(public), peer=name, address=address, reason=reason))
        logger.warning("tunnel.refused peer=%s key=%s reason=%s", name, public, reason)
        self._router.send(routing_id, encode_envelope(Envelope(Refusal(reason=reason))))

    def _deliver(self, session: PeerSession, channel: Channel, envelope: Envelope, size: int) -> None:
        if session.state is SessionState.ENDED:
            return  # an earlier message has ended the session
        message = envelope.message
        metrics = self.metrics[channel]
        metrics.received += 1
        metrics.received_bytes += size
        if channel is Channel.CONTROL:
            session.last_control_s = time.monotonic()
        try:
            if isinstance(message, CREDIT_EXEMPT):
                self._on_session_message(session, channel, message)
                return
            if not session.is_open:
                raise WireError(f"{type(message).__name__} before all channels of the session are open")
            check_allowed(session.peer, message)
            window = session.flows[channel].window
            window.charge(size)
            self._handler.on_message(session.peer, message, envelope.payload)
            if not isinstance(message, ChunkOffer) and window.release(1, size):
                self._mark(session, channel)
        except WireError as error:
            self.counters["malformed"] += 1
            self._refuse(session, str(error))

    def _on_session_message(self, session: PeerSession, channel: Channel, message: AnyMessage) -> None:
        match message:
            case Heartbeat() if channel is Channel.CONTROL:
                echo = Heartbeat(t_client_ns=message.t_client_ns, t_gateway_unix_ns=self._unix_ns())
                for each in Channel:  # also if its own heartbeats are delayed
                    if each in session.welcomed_channels:
                        self._sender(session, each)(encode_envelope(Envelope(echo)))
            case Heartbeat():
                return
            case CreditGrant() as grant:
                session.flows[channel].send_queue.add_credit(grant)
                self._mark(session, channel)
            case _:
                raise WireError(f"{type(message).__name__} is not valid in this state of the session")

    # Sessions

    def _on_hello(self, received: RoutedMessage, channel: Channel, session: PeerSession | None, hello: Hello) -> None:
        if session is None and channel is not Channel.CONTROL:
            self.counters["stray"] += 1  # its session has ended; the client times out and opens another
            return
        routing_id, public, address = received.routing_id, received.public_key, received.address
        entry = self._keyring.find(public)
        reason = refusal_reason(routing_id, channel, session, hello, entry)
        if not reason and hello.role == "policy" and self._keyring.has_name(hello.name):
            reason = f"{hello.name} is the name of another peer"
        if not reason and hello.role == "policy" and self._policies_of_key(public, hello.name) >= MAX_POLICIES:
            reason = f"this key has {MAX_POLICIES} policies already"
        if not reason and channel is Channel.CONTROL:
            reason = self._handler.refusal_reason(hello)
        if reason or entry is None:
            self.counters["hellos_refused"] += 1
            self._send_refusal(routing_id, hello.name[:80], public, address, reason)
            return
        if session is None:
            via = entry.name if entry.role == "relay" and entry.name != hello.name else ""
            peer = Peer(hello.name, hello.role, public, address, routing_id[1:], hello.spec, via, hello.protocol)
            session = self._begin(peer)
        session.welcomed_channels.add(channel)
        self._router.authorize(received.descriptor, session.peer.session)
        if channel is not Channel.CONTROL:
            session.bulk_descriptors[channel] = received.descriptor
        self._router.send(routing_id, encode_envelope(Envelope(Welcome())))
        self._mark(session, channel)
        if len(session.welcomed_channels) == len(Channel) and not session.is_open:
            self._open(session)

    def _policies_of_key(self, public: str, name: str) -> int:
        """The sessions of a policy server, without those of the policy called `name`."""
        return sum(each.peer.public_key == public and each.peer.name != name for each in self.sessions.all())

    def _begin(self, peer: Peer) -> PeerSession:
        """Begins a session, which does not replace the open session of its name until it opens.

        The Hello may be late: its client may have another session by now, which may be the open one.
        """
        for former in [s for s in self.sessions.all() if s.peer.name == peer.name and not s.is_open]:
            self._end(former, "the peer sent another Hello")
        session = PeerSession(peer, self._limits, self.metrics)
        self.sessions.add(session)
        return session

    def _open(self, session: PeerSession) -> None:
        """Opens a session whose client answered every Welcome but the last, and ends the previous one of its name."""
        peer = session.peer
        former = self.sessions.find_open(peer.name)
        if former is not None:
            self._refuse(former, taken_over_reason(peer.name))
        session.state = SessionState.OPEN
        self.sessions.set_open(session)
        logger.info("tunnel.opened peer=%s role=%s address=%s", peer.name, peer.role, peer.address)
        self._audit_peer("opened", peer, f"through {peer.via}" if peer.via else "")
        self._handler.on_peer_opened(peer)

    def _refuse(self, session: PeerSession, reason: str) -> None:
        """Ends a session for good: its client does not reconnect."""
        peer = session.peer
        self._send_refusal(Channel.CONTROL.value + peer.session, peer.name, peer.public_key, peer.address, reason)
        self._end(session, f"refused: {reason}")

    def _end(self, session: PeerSession, reason: str) -> None:
        peer, was_open = session.peer, session.is_open
        self.sessions.remove(session)
        self._router.deauthorize(peer.session)
        session.state = SessionState.ENDED
        logger.info("tunnel.closed peer=%s reason=%s", peer.name, reason)
        if was_open:
            self._audit_peer("closed", peer, reason)
            self._handler.on_peer_closed(peer, reason)

    def _audit_peer(self, event: AuditEvent, peer: Peer, reason: str = "") -> None:
        key = fingerprint(peer.public_key)
        self._audit(
            AuditEntry(event=event, key=key, peer=peer.name, role=peer.role, address=peer.address, reason=reason)
        )

    # Sending

    def flush(self) -> float:
        """Sends queued messages, control of all peers first. Returns the seconds until the next attempt is due."""
        retry_s = TICK_S
        for channel in Channel:
            for session in self.sessions.take_marked(channel):
                blocked = session.flush(channel, self._sender(session, channel))
                wait_s = BLOCKED_RETRY_S if blocked else session.flows[channel].send_queue.bandwidth_wait_s()
                if wait_s < math.inf:
                    self._mark(session, channel)
                    retry_s = min(retry_s, wait_s)
        return retry_s

    def _sender(self, session: PeerSession, channel: Channel) -> SendFrames:
        routing_id = channel.value + session.peer.session
        return lambda frames: self._router.send(routing_id, frames)


def refusal_reason(
    routing_id: bytes, channel: Channel, session: PeerSession | None, hello: Hello, entry: AuthorizedKey | None
) -> str:
    """The reason to refuse a Hello; empty if it may open its channel."""
    oldest = PREVIOUS_PROTOCOL_VERSION if hello.role in ("robot", "relay") else PROTOCOL_VERSION
    if not oldest <= hello.protocol <= PROTOCOL_VERSION:
        return version_mismatch_reason(hello.protocol)
    if entry is None:
        return "this key is not allowed"
    if not entry.can_act_as(hello.name, hello.role):
        return f"this key belongs to the {entry.role} {entry.name!r}, not to the {hello.role} {hello.name[:80]!r}"
    if len(routing_id) != 1 + SESSION_BYTES or (session is None) != (channel is Channel.CONTROL):
        return "this Hello does not open a session"
    if session is not None and channel in session.welcomed_channels:
        return "this channel is open already"
    return ""


def check_allowed(peer: Peer, message: AnyMessage) -> None:
    """Raises WireError unless the role of `peer` allows the type of `message`, and its key allows the sender's name."""
    if not isinstance(message, ALLOWED_MESSAGES[peer.role]):
        raise WireError(f"a {peer.role} may not send {type(message).__name__}")
    claimed = _claimed_name(peer.role, message)
    if claimed is not None and claimed != peer.name:
        raise WireError(f"{peer.name} sent a {type(message).__name__} in the name of {claimed[:80]!r}")


def taken_over_reason(name: str) -> str:
    """The reason that ends a session once a newer one of its name is open."""
    return f"another session of {name} has taken over"


def version_mismatch_reason(peer_version: int) -> str:
    return f"the gateway has protocol version {PROTOCOL_VERSION}, this peer {peer_version}; install the same release"


def _claimed_name(role: Role, message: AnyMessage) -> str | None:
    """The name in a message that must be the sender's own; None if the message needs none."""
    if role == "console":
        return None
    return getattr(message, "robot", getattr(message, "node", None))
