"""A session as the gateway holds it: who the peer is, what waits for it, and what it may send.

What a peer may do, by its key and its role: open a session, send a message, write in a name.

Who is let in: answers libzmq's questions about keys, counts failed handshakes, and logs sparingly.
"""

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
from user_sys.tunnel.flow_control import ChannelMetrics, ReceiveWindow, SendQueue
from user_sys.tunnel.keys import AuthorizedKey, Keyring, Role, fingerprint
from user_sys.tunnel.limits import ChannelLimits, TunnelLimits
from user_sys.tunnel.protocol import (
    ALLOWED_MESSAGES,
    SESSION_BYTES,
    SESSION_TRANSITIONS,
    AnyMessage,
    Channel,
    Envelope,
    Payload,
    SessionState,
    StateMachine,
    encode_envelope,
)
from user_sys.tunnel.receive_quota import ReceiveQuotaGuard
from user_sys.tunnel.sockets import ZAP_DOMAIN, ZmqSocket, silence_s

SendToPeer = Callable[[list[Payload]], bool]


@dataclass(frozen=True)
class Peer:
    """Who is at the other end of a session, as its key says.

    `spec` is what a robot declared in its Hello; `via` names the relay through which it came, if any.
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
    """What the gateway remembers of a peer from one session to the next.

    Attributes:
        stream, durable: a robot's outbox, and the newest chunk of it that was acknowledged; -1 where that is not known.
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
    """One thread calls it, except `offer` and `release`, which any may."""

    def __init__(
        self, peer: Peer, limits: TunnelLimits, memory: ResumeState, gauges: dict[Channel, ChannelMetrics], stream: str
    ) -> None:
        self.peer, self.resume_state, self.stream = peer, memory, stream
        self.last_heartbeat_s = time.monotonic()
        self.state_machine = StateMachine(f"the session of {peer.name}", SessionState.HANDSHAKE, SESSION_TRANSITIONS)
        self.welcomed_channels = {Channel.CONTROL}
        self.ident = threading.get_ident()
        self.send_queues: dict[Channel, SendQueue] = {}
        self.receive_windows: dict[Channel, ReceiveWindow] = {}
        for channel, bounds in channel_limits(limits).items():
            self.send_queues[channel] = SendQueue(bounds, gauges[channel])
            self.receive_windows[channel] = ReceiveWindow(bounds)
        self.bulk_descriptors: dict[Channel, int] = {}  # libzmq's connections for bulk
        self._echo: dict[Channel, Heartbeat] = {}

    @property
    def is_open(self) -> bool:
        return self.state_machine.state is SessionState.OPEN

    def on_heartbeat(self, beat: Heartbeat, unix_ns: int) -> None:
        """The peer lives; the echo goes with the next flush of each channel.

        On all of them, whichever ways its own beats are held up: only silence of a connection itself ends the session.
        """
        self.last_heartbeat_s = time.monotonic()
        echo = Heartbeat(t_client_ns=beat.t_client_ns, t_gateway_unix_ns=unix_ns)
        self._echo = dict.fromkeys(self.welcomed_channels, echo)

    def silence_reason(self, limits: TunnelLimits) -> str:
        """Which connection has brought nothing for too long, in words; empty while all are alive."""
        silent_s = time.monotonic() - self.last_heartbeat_s
        if silent_s > limits.dead_after_s:
            return f"silent for {silent_s:.1f} s"
        for channel, descriptor in self.bulk_descriptors.items():
            if (silent_s := silence_s(descriptor)) > limits.stuck_after_s:
                return f"its {channel.name.lower()} connection was silent for {silent_s:.1f} s"
        return ""

    def flush(self, channel: Channel, send: SendToPeer) -> bool:
        """Sends an echo, a grant, and what is queued on a channel; True when libzmq can take no more."""
        if channel not in self.welcomed_channels:
            return False
        echo = self._echo.get(channel)
        if echo is not None and send(encode_envelope(Envelope(echo))):
            del self._echo[channel]
        window = self.receive_windows[channel]
        grant = window.next_grant()
        if grant is not None and send(encode_envelope(Envelope(grant))):
            window.mark_granted(grant)
        return self.send_queues[channel].flush(send)

    def try_send_now(self, channel: Channel, envelope: Envelope, send: SendToPeer) -> bool:
        """As `SendQueue.send_now`."""
        return self.send_queues[channel].try_send_now(envelope, send)

    def add_credit(self, channel: Channel, grant: CreditGrant) -> None:
        self.send_queues[channel].add_credit(grant)

    def update_resume_state(self, message: AnyMessage) -> None:
        """Notes which chunks the peer need not send again, even if this answer is lost.

        A refusal must not be lost: after one, nothing of the stream is skipped, so that it is given again.
        """
        if isinstance(message, ChunkRefusal):
            self.stream = self.resume_state.stream = ""
            self.resume_state.acked_sequence = -1
        elif isinstance(message, ChunkAck) and self.stream:
            self.resume_state.stream, self.resume_state.acked_sequence = self.stream, message.sequence


def refusal_reason(
    routing_id: bytes, channel: Channel, session: PeerSession | None, hello: Hello, entry: AuthorizedKey | None
) -> str:
    """Why a Hello opens nothing; empty where it does."""
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
        return "this Hello opens no session"
    if session is not None and channel in session.welcomed_channels:
        return "this channel was opened before"
    return ""


def check_allowed(peer: Peer, message: AnyMessage) -> None:
    """Raises WireError unless `peer` may send `message`: its role allows the type, its key the name."""
    if not isinstance(message, ALLOWED_MESSAGES[peer.role]):
        raise WireError(f"a {peer.role} may not send {type(message).__name__}")
    claimed = _claimed_name(peer.role, message)
    if claimed is not None and claimed != peer.name:
        raise WireError(f"{peer.name} wrote in the name of {claimed[:80]!r}")


def version_mismatch_reason(theirs: str) -> str:
    ours = str(PROTOCOL_VERSION) if OLDEST_PROTOCOL == PROTOCOL_VERSION else f"{OLDEST_PROTOCOL} to {PROTOCOL_VERSION}"
    return f"the gateway speaks protocol version {ours}, this peer {theirs}; install the same release"


def _claimed_name(role: Role, message: AnyMessage) -> str | None:
    """Whose name a message is written in, where that must be the sender's own."""
    if role == "console":
        return None
    return getattr(message, "robot", getattr(message, "node", None))


logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 5.0
MAX_TOPICS = 1024
NO_HANDSHAKE = "it completed no handshake: no key, not this protocol, for another gateway's key, or silent"
_CONNECTIONS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class RateLimitedLog:
    """Warnings about what strangers do: at most one each `LOG_INTERVAL_S` and topic, with the number held back."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}

    def warn(self, topic: str, text: str) -> None:
        last, held_back = self._last.get(topic, (-LOG_INTERVAL_S, 0))
        now = time.monotonic()
        if now - last < LOG_INTERVAL_S:
            self._last[topic] = (last, held_back + 1)
            return
        if len(self._last) > MAX_TOPICS:
            self._last.clear()
        self._last[topic] = (now, 0)
        logger.warning("%s%s", text, f" (and {held_back} more like it)" if held_back else "")


class Authenticator:
    """Answers for a ROUTER whether a key may connect (ZAP, https://rfc.zeromq.org/spec/27/).

    Must exist before the port opens: without it libzmq lets any key in. One thread calls it, when `zap` or `monitor`
    have something to be read.
    """

    def __init__(
        self,
        context: zmq.Context[ZmqSocket],
        router: ZmqSocket,
        ring: Keyring,
        counters: Counter[str],
        log: RateLimitedLog,
        audit: AuditSink,
        floods: ReceiveQuotaGuard,
    ) -> None:
        self._told: dict[int, Callable[[int], None]] = {
            zmq.EVENT_LISTENING: floods.on_listening,
            zmq.EVENT_ACCEPTED: floods.on_accepted,
        }
        self._ring, self._counters, self._log, self._router, self._audit = ring, counters, log, router, audit
        self._floods = floods
        self._by_key = Counter[str]()  # connections by address that are about to end, since their key was refused
        self.zap: ZmqSocket = context.socket(zmq.REP)
        self.zap.linger = 0
        self.zap.bind("inproc://zeromq.zap.01")
        self.monitor: ZmqSocket = router.get_monitor_socket(_FAILED_HANDSHAKES | _CONNECTIONS)

    def answer_zap_requests(self) -> None:
        """Answers what libzmq asks. A connection is known to the guard against floods before it is let in."""
        self.process_monitor_events()
        while self.zap.poll(0):
            version, request, domain, address, _, mechanism, *credentials = self.zap.recv_multipart()
            public = z85.encode(credentials[0]).decode() if len(credentials) == 1 and len(credentials[0]) == 32 else ""
            self._ring.refresh()
            known = mechanism == b"CURVE" and domain == ZAP_DOMAIN and self._ring.find(public) is not None
            if not known:
                self._counters["keys_refused"] += 1
                where, why = address.decode(errors="replace"), "this key is not allowed"
                self._keys_refused_at(where)
                self._audit(
                    AuditEntry(event="refused", key=fingerprint(public) if public else "", address=where, reason=why)
                )
                self._log.warn(f"key:{public}", f"tunnel.refused key={public or 'none'} address={where} reason={why}")
            status = (b"200", b"OK") if known else (b"400", b"this key is not allowed")
            self.zap.send_multipart([version, request, *status, public.encode(), b""])

    def process_monitor_events(self) -> None:
        """Takes note of connections that come and go, and counts those that ended before they showed a key: not our
        protocol, or meant for another gateway.
        """
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            what, descriptor = int(event["event"]), int(event["value"])
            if what == zmq.EVENT_DISCONNECTED:
                self._left(descriptor, urlsplit(bytes(event["endpoint"]).decode()))
                continue
            if (tell := self._told.get(what)) is not None:
                tell(descriptor)
                continue
            self._counters["handshakes_failed"] += 1
            self._log.warn("handshake", "tunnel.handshake_failed: not this protocol, or for another gateway's key")

    def check_receive_quotas(self, quiet: Callable[[], bool]) -> None:
        """See `ReceiveQuotaGuard.check`."""
        if broken := self._floods.check(quiet):
            self._counters["floods"] += len(broken)
            self._log.warn("flood", "tunnel.flood: a connection sent more than a message may have; it was broken")
            for address in broken:
                self._audit(AuditEntry(event="refused", address=address, reason="it sent more than a message may have"))

    def _left(self, descriptor: int, here: SplitResult) -> None:
        """A connection is over. One that never completed its handshake is audited, unless its key was.

        libzmq may close what is no handshake before its address could be asked for: from a loopback port it is known.
        """
        address = self._floods.on_disconnected(descriptor)
        if address is None or here.scheme != "tcp":  # Unix sockets lie in a folder of this user
            return
        address = address or (here.hostname if here.hostname in LOOPBACK_HOSTS else None) or "unknown"
        if address not in self._by_key:
            self._audit(AuditEntry(event="refused", address=address, reason=NO_HANDSHAKE))
        elif self._by_key[address] > 1:
            self._by_key[address] -= 1
        else:
            del self._by_key[address]

    def _keys_refused_at(self, address: str) -> None:
        if address not in self._by_key and len(self._by_key) >= MAX_TOPICS:
            self._by_key.clear()
        self._by_key[address] += 1

    def close(self) -> None:
        self._router.disable_monitor()
        self.monitor.close(0)
        self.zap.close(0)
