"""The gateway's side of a session: authentication of keys, authorization of messages, and the state of each session."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from hal.audit import AuditEntry, AuditSink
from hal.spec import RobotSpec
from user_sys.errors import WireError
from user_sys.messages import OLDEST_PROTOCOL, PROTOCOL_VERSION, ChunkAck, ChunkRefusal, CreditGrant, Heartbeat, Hello
from user_sys.tunnel.endpoint import LOOPBACK_HOSTS
from user_sys.tunnel.flow_control import ChannelMetrics, ReceiveWindow, SendFrames, SendQueue
from user_sys.tunnel.keys import AuthorizedKey, Keyring, Role, fingerprint
from user_sys.tunnel.limits import ChannelLimits, TunnelLimits
from user_sys.tunnel.protocol import (
    ALLOWED_MESSAGES,
    SESSION_BYTES,
    SESSION_TRANSITIONS,
    AnyMessage,
    Channel,
    Envelope,
    SessionState,
    StateMachine,
    encode_envelope,
)
from user_sys.tunnel.receive_quota import ReceiveQuotaGuard
from user_sys.tunnel.sockets import ZAP_DOMAIN, ZmqSocket, silence_s

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 5.0
MAX_TOPICS = 1024
NO_HANDSHAKE = "it completed no handshake: no key, another protocol, another gateway's key, or no bytes"
_CONNECTIONS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


@dataclass(frozen=True)
class Peer:
    """The authenticated other end of a session.

    Attributes:
        address: of its computer, or of the relay's.
        session: the session id.
        spec: from a robot's Hello.
        via: the relay that opened the session for a robot; empty without a relay.
    """

    name: str
    role: Role
    public_key: str
    address: str
    session: bytes
    spec: RobotSpec | None = None
    via: str = ""


@dataclass(eq=False)
class ResumeState:
    """The state of a peer that outlives its session.

    Attributes:
        stream: names the robot's outbox.
        acked_sequence: the newest acknowledged chunk of that outbox; -1 if unknown.
    """

    stream: str = ""
    acked_sequence: int = -1


def channel_limits(limits: TunnelLimits) -> dict[Channel, ChannelLimits]:
    return {
        Channel.CONTROL: limits.control,
        Channel.STOP: limits.stop,
        Channel.WEIGHTS: limits.weights,
        Channel.EXPERIENCE: limits.experience,
    }


class PeerSession:
    """A session with one peer. One thread calls it; any thread may use its send queues and receive windows."""

    def __init__(
        self,
        peer: Peer,
        limits: TunnelLimits,
        resume_state: ResumeState,
        metrics: dict[Channel, ChannelMetrics],
        stream: str,
    ) -> None:
        self.peer, self.resume_state, self.stream = peer, resume_state, stream
        self.last_heartbeat_s = time.monotonic()
        self.state_machine = StateMachine(f"the session of {peer.name}", SessionState.HANDSHAKE, SESSION_TRANSITIONS)
        self.welcomed_channels = {Channel.CONTROL}
        self.send_queues: dict[Channel, SendQueue] = {}
        self.receive_windows: dict[Channel, ReceiveWindow] = {}
        for channel, bounds in channel_limits(limits).items():
            self.send_queues[channel] = SendQueue(bounds, metrics[channel])
            self.receive_windows[channel] = ReceiveWindow(bounds)
        self.bulk_descriptors: dict[Channel, int] = {}  # libzmq's connections, except that of control
        self._heartbeat_echoes: dict[Channel, Heartbeat] = {}

    @property
    def is_open(self) -> bool:
        return self.state_machine.state is SessionState.OPEN

    def on_heartbeat(self, heartbeat: Heartbeat, unix_ns: int) -> None:
        """Takes a heartbeat of the control channel. The next flush of each channel sends its echo.

        Every channel gets an echo, also if its own heartbeats are delayed: the client measures silence on each.
        """
        self.last_heartbeat_s = time.monotonic()
        echo = Heartbeat(t_client_ns=heartbeat.t_client_ns, t_gateway_unix_ns=unix_ns)
        self._heartbeat_echoes = dict.fromkeys(self.welcomed_channels, echo)

    def silence_reason(self, limits: TunnelLimits) -> str:
        """Describes the connection that was silent for too long; empty if all are alive."""
        silent_s = time.monotonic() - self.last_heartbeat_s
        if silent_s > limits.dead_after_s:
            return f"silent for {silent_s:.1f} s"
        for channel, descriptor in self.bulk_descriptors.items():
            if (silent_s := silence_s(descriptor)) > limits.stuck_after_s:
                return f"its {channel.name.lower()} connection was silent for {silent_s:.1f} s"
        return ""

    def flush(self, channel: Channel, send: SendFrames) -> bool:
        """Sends the heartbeat echo, a due grant and the queue of a channel. Returns True if libzmq accepts no more."""
        if channel not in self.welcomed_channels:
            return False
        echo = self._heartbeat_echoes.get(channel)
        if echo is not None and send(encode_envelope(Envelope(echo))):
            del self._heartbeat_echoes[channel]
        window = self.receive_windows[channel]
        grant = window.next_grant()
        if grant is not None and send(encode_envelope(Envelope(grant))):
            window.mark_granted(grant)
        return self.send_queues[channel].flush(send)

    def try_send_now(self, channel: Channel, envelope: Envelope, send: SendFrames) -> bool:
        """As `SendQueue.try_send_now`."""
        return self.send_queues[channel].try_send_now(envelope, send)

    def add_credit(self, channel: Channel, grant: CreditGrant) -> None:
        self.send_queues[channel].add_credit(grant)

    def update_resume_state(self, message: AnyMessage) -> None:
        """Records the chunks that the peer need not resend, even if this acknowledgement is lost.

        A refusal resets the record: the peer then resends the refused chunk, so that a lost refusal is repeated.
        """
        if isinstance(message, ChunkRefusal):
            self.stream = self.resume_state.stream = ""
            self.resume_state.acked_sequence = -1
        elif isinstance(message, ChunkAck) and self.stream:
            self.resume_state.stream, self.resume_state.acked_sequence = self.stream, message.sequence


class PeerSessions:
    """The sessions of a server, and the channels of each that have something to send. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[bytes, PeerSession] = {}
        self._open_by_name: dict[str, PeerSession] = {}
        self._resume_states: dict[str, ResumeState] = {}
        # For each channel, the sessions to flush, in the order of their first message.
        self._to_flush: dict[Channel, dict[PeerSession, None]] = {channel: {} for channel in Channel}

    def find(self, session_id: bytes) -> PeerSession | None:
        with self._lock:
            return self._by_id.get(session_id)

    def find_open(self, name: str) -> PeerSession | None:
        """The open session of the peer called `name`."""
        with self._lock:
            return self._open_by_name.get(name)

    def all(self) -> list[PeerSession]:
        with self._lock:
            return list(self._by_id.values())

    def peers(self, role: Role | None = None) -> tuple[Peer, ...]:
        """The peers with an open session and this role, sorted by name."""
        with self._lock:
            peers = [s.peer for s in self._open_by_name.values() if s.is_open]
        return tuple(sorted((p for p in peers if role in (None, p.role)), key=lambda peer: peer.name))

    def resume_state(self, name: str) -> ResumeState:
        """The resume state of the peer called `name`; a new one before its first session."""
        with self._lock:
            return self._resume_states.setdefault(name, ResumeState())

    def add(self, session: PeerSession) -> None:
        with self._lock:
            self._by_id[session.peer.session] = session

    def set_open(self, session: PeerSession) -> None:
        """Makes `session` the open session of its name."""
        with self._lock:
            self._open_by_name[session.peer.name] = session

    def remove(self, session: PeerSession) -> None:
        peer = session.peer
        with self._lock:
            for sessions in self._to_flush.values():
                sessions.pop(session, None)
            self._by_id.pop(peer.session, None)
            if self._open_by_name.get(peer.name) is session:
                del self._open_by_name[peer.name]

    def mark(self, session: PeerSession, channel: Channel) -> None:
        """Marks a channel of `session` for the next flush, unless the session is removed."""
        with self._lock:
            if self._by_id.get(session.peer.session) is session:
                self._to_flush[channel][session] = None

    def take_marked(self, channel: Channel) -> list[PeerSession]:
        """The sessions that are marked for a channel; removes the marks."""
        marked = self._to_flush[channel]
        if not marked:
            return []
        with self._lock:
            sessions = list(marked)
            marked.clear()
            return sessions


def refusal_reason(
    routing_id: bytes, channel: Channel, session: PeerSession | None, hello: Hello, entry: AuthorizedKey | None
) -> str:
    """The reason to refuse a Hello; empty if it may open its channel."""
    oldest = hello.oldest or hello.protocol
    if hello.protocol < OLDEST_PROTOCOL or oldest > PROTOCOL_VERSION:
        return version_mismatch_reason(
            str(hello.protocol) if oldest >= hello.protocol else f"{oldest} to {hello.protocol}"
        )
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


def version_mismatch_reason(peer_versions: str) -> str:
    ours = str(PROTOCOL_VERSION) if OLDEST_PROTOCOL == PROTOCOL_VERSION else f"{OLDEST_PROTOCOL} to {PROTOCOL_VERSION}"
    return f"the gateway supports protocol version {ours}, this peer {peer_versions}; install the same release"


def _claimed_name(role: Role, message: AnyMessage) -> str | None:
    """The name in a message that must be the sender's own; None if the message needs none."""
    if role == "console":
        return None
    return getattr(message, "robot", getattr(message, "node", None))


class RateLimitedLog:
    """Warnings about peers: at most one each `LOG_INTERVAL_S` and topic, with the number of suppressed ones."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}

    def warn(self, topic: str, text: str) -> None:
        last, suppressed = self._last.get(topic, (-LOG_INTERVAL_S, 0))
        now = time.monotonic()
        if now - last < LOG_INTERVAL_S:
            self._last[topic] = (last, suppressed + 1)
            return
        if len(self._last) > MAX_TOPICS:
            self._last.clear()
        self._last[topic] = (now, 0)
        logger.warning("%s%s", text, f" (and {suppressed} more like it)" if suppressed else "")


class Authenticator:
    """Authenticates the keys of a ROUTER's connections (ZAP, https://rfc.zeromq.org/spec/27/).

    Create it before the port opens: without it libzmq accepts any key. One thread calls it when `zap` or `monitor` is
    readable.
    """

    def __init__(
        self,
        context: zmq.Context[ZmqSocket],
        router: ZmqSocket,
        keyring: Keyring,
        counters: Counter[str],
        log: RateLimitedLog,
        audit: AuditSink,
        quota_guard: ReceiveQuotaGuard,
    ) -> None:
        self._connection_events: dict[int, Callable[[int], None]] = {
            zmq.EVENT_LISTENING: quota_guard.on_listening,
            zmq.EVENT_ACCEPTED: quota_guard.on_accepted,
        }
        self._keyring, self._counters, self._log, self._router, self._audit = keyring, counters, log, router, audit
        self._quota_guard = quota_guard
        self._refused_keys = Counter[str]()  # by address: connections that will end because their key was refused
        self.zap: ZmqSocket = context.socket(zmq.REP)
        self.zap.linger = 0
        self.zap.bind("inproc://zeromq.zap.01")
        self.monitor: ZmqSocket = router.get_monitor_socket(_FAILED_HANDSHAKES | _CONNECTIONS)

    def answer_zap_requests(self) -> None:
        """Answers libzmq's authentication requests. The quota guard watches a connection before it is accepted."""
        self.process_monitor_events()
        while self.zap.poll(0):
            version, request, domain, address, _, mechanism, *credentials = self.zap.recv_multipart()
            public = z85.encode(credentials[0]).decode() if len(credentials) == 1 and len(credentials[0]) == 32 else ""
            self._keyring.refresh()
            is_allowed = mechanism == b"CURVE" and domain == ZAP_DOMAIN and self._keyring.find(public) is not None
            if not is_allowed:
                self._counters["keys_refused"] += 1
                host, reason = address.decode(errors="replace"), "this key is not allowed"
                self._count_refused_key(host)
                self._audit(
                    AuditEntry(event="refused", key=fingerprint(public) if public else "", address=host, reason=reason)
                )
                self._log.warn(f"key:{public}", f"tunnel.refused key={public or 'none'} address={host} reason={reason}")
            status = (b"200", b"OK") if is_allowed else (b"400", b"this key is not allowed")
            self.zap.send_multipart([version, request, *status, public.encode(), b""])

    def process_monitor_events(self) -> None:
        """Passes new connections to the quota guard, and counts and audits connections without a handshake."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            kind, descriptor = int(event["event"]), int(event["value"])
            if kind == zmq.EVENT_DISCONNECTED:
                self._on_disconnected(descriptor, urlsplit(bytes(event["endpoint"]).decode()))
                continue
            if (on_event := self._connection_events.get(kind)) is not None:
                on_event(descriptor)
                continue
            self._counters["handshakes_failed"] += 1
            self._log.warn("handshake", "tunnel.handshake_failed: another protocol, or another gateway's key")

    def check_receive_quotas(self, is_drained: Callable[[], bool]) -> None:
        """See `ReceiveQuotaGuard.check`."""
        if addresses := self._quota_guard.check(is_drained):
            self._counters["floods"] += len(addresses)
            self._log.warn("flood", "tunnel.quota_exceeded: a connection sent too many bytes without a whole message")
            for address in addresses:
                self._audit(
                    AuditEntry(
                        event="refused", address=address, reason="it sent too many bytes without a whole message"
                    )
                )

    def _on_disconnected(self, descriptor: int, local: SplitResult) -> None:
        """Audits a closed connection without a handshake, unless its refused key was audited.

        libzmq may close a connection before the guard could read its address. On a loopback port the host is known.
        """
        address = self._quota_guard.on_disconnected(descriptor)
        if address is None or local.scheme != "tcp":  # Unix sockets are in a private folder of the user
            return
        address = address or (local.hostname if local.hostname in LOOPBACK_HOSTS else None) or "unknown"
        if address not in self._refused_keys:
            self._audit(AuditEntry(event="refused", address=address, reason=NO_HANDSHAKE))
        elif self._refused_keys[address] > 1:
            self._refused_keys[address] -= 1
        else:
            del self._refused_keys[address]

    def _count_refused_key(self, address: str) -> None:
        if address not in self._refused_keys and len(self._refused_keys) >= MAX_TOPICS:
            self._refused_keys.clear()
        self._refused_keys[address] += 1

    def close(self) -> None:
        self._router.disable_monitor()
        self.monitor.close(0)
        self.zap.close(0)
