"""The gateway's end of the tunnel: one TCP port, CURVE-encrypted, closed to keys that are not in the ring.

One thread owns the sockets. It decodes, checks and hands every message to a `TunnelHandler`, and sends what other
threads have queued: control and e-stops, then weights, then experience. Nothing that a peer sends raises out of it.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import zmq

from hal.audit import AuditEntry, AuditEvent, AuditSink, discard_audit_event
from user_sys.errors import RunError, TunnelError, WireError
from user_sys.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    ChunkOffer,
    CreditGrant,
    Heartbeat,
    Hello,
    Refusal,
    Welcome,
)
from user_sys.tunnel.endpoint import bind_endpoint, configure_router, enlarge_send_buffer, remove_unix_socket
from user_sys.tunnel.flow_control import ChannelMetrics
from user_sys.tunnel.keys import KeyPair, Keyring, Role, fingerprint
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import (
    CREDIT_EXEMPT,
    AnyMessage,
    Channel,
    Envelope,
    Payload,
    SessionState,
    channel_of,
    credit_cost_bytes,
    decode_envelope,
    encode_envelope,
    hello_protocol_version,
)
from user_sys.tunnel.receive_quota import ReceiveQuotaGuard
from user_sys.tunnel.session import (
    Authenticator,
    Peer,
    PeerSession,
    RateLimitedLog,
    ResumeState,
    check_allowed,
    refusal_reason,
    version_mismatch_reason,
)
from user_sys.tunnel.sockets import (
    Wakeup,
    ZmqSocket,
    has_message,
    receive_frames,
    request_short_time_slice,
    send_frames,
)

__all__ = ["Peer", "TunnelHandler", "TunnelServer"]

logger = logging.getLogger(__name__)

TICK_S = 0.25
BLOCKED_RETRY_S = 0.005
RECEIVE_BURST = 64
IO_THREADS = 4  # libzmq gives each new connection to the least busy: a robot's channels do not share one
STOP_TIMEOUT_S = 10.0
CLOSE_LINGER_MS = 200


class TunnelHandler(Protocol):
    """What the gateway does with a tunnel. Called from the server's thread: return soon, block never.

    An exception other than WireError (which refuses the peer) ends the server.
    """

    def refusal_reason(self, hello: Hello) -> str:
        """Why a peer whose key is in order may not open a session now; empty to let it in."""

    def on_peer_opened(self, peer: Peer) -> None:
        """`peer` is authenticated and all its channels are open."""

    def on_peer_closed(self, peer: Peer, reason: str) -> None:
        """The session is over; the same name may open another."""

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        """A message that `peer`'s role may send, in its own name. `payload` stays valid as long as it is held.

        A `ChunkOffer` stays charged to the peer's window until `TunnelServer.release`; everything else is taken in when
        this returns.
        """


class TunnelServer:
    """Listens on `endpoint` from `start` to `close`. Any thread may call its public methods.

    Beside a TCP port on loopback it listens on a Unix socket, which peers on the same machine take by themselves.
    """

    def __init__(
        self,
        endpoint: str,
        keys: KeyPair,
        keyring: Keyring,
        handler: TunnelHandler,
        limits: TunnelLimits | None = None,
        name: str = "gateway",
        audit: AuditSink = discard_audit_event,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.endpoint = endpoint
        self._audit, self._unix_ns = audit, unix_ns
        self.name = name
        self.counters: Counter[str] = Counter()
        self.metrics = {channel: ChannelMetrics() for channel in Channel}
        self._keys = keys
        self._keyring = keyring
        self._handler = handler
        self._limits = limits or TunnelLimits()
        self._sessions: dict[bytes, PeerSession] = {}
        self._by_name: dict[str, PeerSession] = {}
        self._memory: dict[str, ResumeState] = {}
        # Who has something to be sent, in the order in which it came.
        self._waiting: dict[Channel, dict[PeerSession, None]] = {channel: {} for channel in Channel}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._ident = 0
        self._log = RateLimitedLog()

    # Life cycle

    def start(self) -> None:
        """Binds and serves; `endpoint` then holds the port that was chosen where it asked for port 0.

        Raises:
            RunError: the port is in use, or the address is not one of this machine.
        """
        self._wakeup = Wakeup()
        self._context: zmq.Context[ZmqSocket] = zmq.Context(IO_THREADS)
        self._router: ZmqSocket = self._context.socket(zmq.ROUTER)
        floods = self._floods = ReceiveQuotaGuard(self._limits.max_record_bytes, self._limits.max_message_bytes)
        gate = (self._context, self._router, self._keyring, self.counters, self._log, self._audit, floods)
        self._gate = Authenticator(*gate)
        try:
            configure_router(self._router, self._keys, self._limits)
            self.endpoint = bind_endpoint(self._router, self.endpoint, self._keys.public)
            self._gate.process_monitor_events()
        except RunError:
            self._close_sockets()
            raise
        self._keyring.refresh()
        self._thread = threading.Thread(target=self._serve, name="tunnel-server", daemon=True)
        self._thread.start()
        logger.info("tunnel.listening endpoint=%s public_key=%s", self.endpoint, self._keys.public)

    def close(self) -> None:
        """Sends what is queued if that can be done at once, and closes the port. Calling it twice is harmless."""
        self._stopping.set()
        if not hasattr(self, "_thread"):
            return
        self._wakeup.set()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise TunnelError(f"the tunnel's thread did not end within {STOP_TIMEOUT_S} s; its handler blocks")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def failure(self) -> BaseException | None:
        """The handler's exception that ended the server, or None."""
        return self._failure

    def _close_sockets(self) -> None:
        self._gate.close()
        self._router.close(CLOSE_LINGER_MS)
        self._context.term()
        self._wakeup.close()

    # What other threads may do

    def send(self, name: str, message: AnyMessage, payload: Payload | None = None) -> bool:
        """Queues a message for the peer called `name`; never blocks.

        Newest wins where messages are states (`coalescing_key`). False when there is no such peer or its queue is full.
        """
        with self._lock:
            session = self._by_name.get(name)
        return session is not None and self._send(session, Envelope(message, payload))

    def reply(self, peer: Peer, message: AnyMessage) -> bool:
        """As `send`, but to that session of the peer's alone: a later one may be about another outbox."""
        with self._lock:
            session = self._sessions.get(peer.session)
        return session is not None and self._send(session, Envelope(message))

    def _send(self, session: PeerSession, envelope: Envelope) -> bool:
        message, channel = envelope.message, channel_of(envelope.message)
        if not session.is_open:
            return False
        if threading.get_ident() == self._ident and session.try_send_now(
            channel, envelope, self._sender(session, channel)
        ):
            session.update_resume_state(message)
            return True
        if not session.send_queues[channel].put(envelope):
            self.counters["queue_full"] += 1
            self._log.warn("queue-full", f"tunnel.queue_full peer={session.peer.name} message={type(message).__name__}")
            return False
        session.update_resume_state(message)
        self._mark(session, channel)
        return True

    def release(self, peer: Peer, chunks: int, size_bytes: int) -> None:
        """So many chunks of `peer` were taken in, their packets of so many bytes in sum: it may send as much again."""
        with self._lock:
            session = self._sessions.get(peer.session)
        if session is not None and session.receive_windows[Channel.EXPERIENCE].release(chunks, size_bytes):
            self._mark(session, Channel.EXPERIENCE)

    def _mark(self, session: PeerSession, channel: Channel) -> None:
        with self._lock:
            if self._sessions.get(session.peer.session) is session:
                self._waiting[channel][session] = None
        if threading.get_ident() != self._ident:
            self._wakeup.set()

    def peers(self, role: Role | None = None) -> tuple[Peer, ...]:
        """Those whose session is open, by name."""
        with self._lock:
            found = [s.peer for s in self._by_name.values() if s.is_open]
        return tuple(sorted((p for p in found if role in (None, p.role)), key=lambda peer: peer.name))

    def scalars(self) -> dict[str, float]:
        """Counters and latencies of each channel, all peers together, for metrics."""
        found = [gauges.scalars(channel.name.lower()) for channel, gauges in self.metrics.items()]
        return {key: value for scalars in found for key, value in scalars.items()}

    # The loop

    def _serve(self) -> None:
        request_short_time_slice()
        self._ident = threading.get_ident()
        next_tick = 0.0
        poll = select.poll()
        router, zap, monitor = (int(s.getsockopt(zmq.FD)) for s in (self._router, self._gate.zap, self._gate.monitor))
        for fd in (router, zap, monitor, self._wakeup.fileno()):
            poll.register(fd, select.POLLIN)
        ready: dict[int, int] = {}
        try:
            while not self._stopping.is_set():
                if zap in ready:
                    self._gate.answer_zap_requests()
                if monitor in ready:
                    self._gate.process_monitor_events()
                self._receive()
                self._gate.check_receive_quotas(lambda: not has_message(self._router))
                retry_s = self._flush()
                if time.monotonic() >= next_tick:
                    self._tick()
                    next_tick = time.monotonic() + TICK_S
                ready = dict(
                    poll.poll(0 if has_message(self._router) else 1e3 * min(retry_s, self._floods.check_interval_s))
                )
                if self._wakeup.fileno() in ready:
                    self._wakeup.clear()
            self._flush()
        except Exception as error:
            logger.exception("tunnel.failed")
            self._failure = error
        finally:
            remove_unix_socket(self.endpoint, self._keys.public)
            self._close_sockets()

    def _tick(self) -> None:
        self._gate.answer_zap_requests()
        self._gate.process_monitor_events()
        ring_changed = self._keyring.refresh()
        for name in self._keyring.unreadable if ring_changed else ():
            logger.warning("tunnel.unreadable_key file=%s/%s", self._keyring.folder, name)
        for session in list(self._sessions.values()):
            entry = self._keyring.find(session.peer.public_key)
            if entry is None or not entry.can_act_as(session.peer.name, session.peer.role):
                self._refuse(session, "this key was revoked")
            elif silence := session.silence_reason(self._limits):
                self._end(session, silence)

    # Receiving

    def _receive(self) -> None:
        """Hands on what has arrived, control first. Bounded, so that sending and ticks have their turn."""
        later: list[tuple[PeerSession, Channel, Envelope, int]] = []
        for _ in range(RECEIVE_BURST):
            frames = receive_frames(self._router)
            if frames is None:
                break
            self._sort(frames, later)
        if later:
            self._flush()  # answers on the control channel do not wait for bulk
        later.sort(key=lambda item: item[1] is not Channel.WEIGHTS)
        for arrived in later:
            self._deliver(*arrived)

    def _sort(self, frames: list[zmq.Frame], later: list[tuple[PeerSession, Channel, Envelope, int]]) -> None:
        self._floods.on_message(frames)
        routing_id = frames[0].bytes
        public = str(frames[-1].get("User-Id"))
        try:
            channel = Channel(routing_id[:1])
        except ValueError:
            self.counters["stray"] += 1
            return
        session = self._sessions.get(routing_id[1:])
        if session is not None and session.peer.public_key != public:
            self.counters["stray"] += 1
            return
        try:
            parts: list[Payload] = [frame.buffer for frame in frames[1:]]
            envelope = decode_envelope(channel, parts, self._limits)
            if isinstance(envelope.message, Hello):
                self._greet(routing_id, channel, session, envelope.message, frames[-1])
            elif session is None or channel not in session.welcomed_channels:
                self.counters["stray"] += 1
            elif channel in (Channel.CONTROL, Channel.STOP):
                self._deliver(session, channel, envelope, credit_cost_bytes(parts))
            else:
                later.append((session, channel, envelope, credit_cost_bytes(parts)))
        except WireError as error:
            self._reject(routing_id, session, public, frames, str(error))

    def _reject(
        self, routing_id: bytes, session: PeerSession | None, public: str, frames: list[zmq.Frame], why: str
    ) -> None:
        """Refuses a peer whose bytes break the protocol."""
        self.counters["malformed"] += 1
        if session is not None:
            self._refuse(session, why)
            return
        version = hello_protocol_version(frames[1].buffer) if len(frames) == 2 else None
        if version is not None and not OLDEST_PROTOCOL <= version <= PROTOCOL_VERSION:
            why = version_mismatch_reason(str(version))
        entry = self._keyring.find(public)
        self._turn_away(routing_id, entry.name if entry else "?", public, str(frames[-1].get("Peer-Address")), why)

    def _turn_away(self, routing_id: bytes, name: str, public: str, address: str, why: str) -> None:
        self._audit(AuditEntry(event="refused", key=fingerprint(public), peer=name, address=address, reason=why))
        self._log.warn(f"refused:{public}", f"tunnel.refused peer={name} key={public} reason={why}")
        send_frames(self._router, [routing_id, *encode_envelope(Envelope(Refusal(reason=why)))])

    def _deliver(self, session: PeerSession, channel: Channel, envelope: Envelope, size: int) -> None:
        if session.state_machine.state is SessionState.ENDED:
            return  # refused by a message before this one
        message = envelope.message
        gauges = self.metrics[channel]
        gauges.received += 1
        gauges.received_bytes += size
        try:
            if isinstance(message, CREDIT_EXEMPT):
                self._take_signal(session, channel, envelope)
                return
            check_allowed(session.peer, message)
            window = session.receive_windows[channel]
            window.charge(size)
            self._handler.on_message(session.peer, message, envelope.payload)
            if not isinstance(message, ChunkOffer) and window.release(1, size):
                self._mark(session, channel)
        except WireError as error:
            self.counters["malformed"] += 1
            self._refuse(session, str(error))

    def _take_signal(self, session: PeerSession, channel: Channel, envelope: Envelope) -> None:
        match envelope.message:
            case Heartbeat() as beat:
                if channel is not Channel.CONTROL:
                    return
                session.on_heartbeat(beat, self._unix_ns())
                for greeted in session.welcomed_channels:
                    self._mark(session, greeted)
            case CreditGrant() as grant:
                session.add_credit(channel, grant)
            case message:
                raise WireError(f"{type(message).__name__} out of turn")
        self._mark(session, channel)

    # Sessions

    def _greet(
        self, routing_id: bytes, channel: Channel, session: PeerSession | None, hello: Hello, frame: zmq.Frame
    ) -> None:
        if session is None and channel is not Channel.CONTROL:
            self.counters["stray"] += 1  # its session is over; the client gives up waiting and opens another
            return
        public, address = str(frame.get("User-Id")), str(frame.get("Peer-Address"))
        entry = self._keyring.find(public)
        why = refusal_reason(routing_id, channel, session, hello, entry)
        if not why and channel is Channel.CONTROL:
            why = self._handler.refusal_reason(hello)
        if why or entry is None:
            self.counters["hellos_refused"] += 1
            self._turn_away(routing_id, hello.name[:80], public, address, why)
            return
        if session is None:
            via = "" if entry.name == hello.name else entry.name
            peer = Peer(hello.name, hello.role, public, address, routing_id[1:], hello.spec, via)
            session = self._begin(peer, hello.stream)
        session.welcomed_channels.add(channel)
        descriptor = int(frame.get(zmq.SRCFD))
        self._floods.authorize(descriptor, session.peer.session)
        if channel is not Channel.CONTROL:
            session.bulk_descriptors[channel] = descriptor
            enlarge_send_buffer(descriptor)
        known = channel is Channel.EXPERIENCE and session.resume_state.stream == hello.stream
        welcome = Welcome(
            protocol=min(hello.protocol, PROTOCOL_VERSION),
            gateway=self.name,
            resume_after=session.resume_state.acked_sequence if known else -1,
        )
        send_frames(self._router, [routing_id, *encode_envelope(Envelope(welcome))])
        self._mark(session, channel)
        if len(session.welcomed_channels) == len(Channel) and not session.is_open:
            self._open(session)

    def _begin(self, peer: Peer, stream: str) -> PeerSession:
        """A session that is not open yet leaves the open one of that name alone.

        Its Hello may have been under way for long, and its client be another session by now, even the open one's.
        """
        unfinished = [s for s in self._sessions.values() if s.peer.name == peer.name and not s.is_open]
        for former in unfinished:
            self._end(former, "greeted again")
        memory = self._memory.setdefault(peer.name, ResumeState())
        session = PeerSession(peer, self._limits, memory, self.metrics, stream)
        with self._lock:
            self._sessions[peer.session] = session
        return session

    def _open(self, session: PeerSession) -> None:
        """Its client has heard each Welcome but the last: it lives, and takes over from its former session."""
        peer = session.peer
        former = self._by_name.get(peer.name)
        if former is not None:
            self._refuse(former, f"another session of {peer.name} has taken over")
        session.state_machine.transition_to(SessionState.OPEN)
        with self._lock:
            self._by_name[peer.name] = session
        logger.info("tunnel.opened peer=%s role=%s address=%s", peer.name, peer.role, peer.address)
        self._tell_audit("opened", peer, f"through {peer.via}" if peer.via else "")
        self._handler.on_peer_opened(peer)

    def _refuse(self, session: PeerSession, why: str) -> None:
        """Ends a session for good: its client will not come back by itself."""
        peer = session.peer
        self._turn_away(Channel.CONTROL.value + peer.session, peer.name, peer.public_key, peer.address, why)
        self._end(session, f"refused: {why}")

    def _end(self, session: PeerSession, reason: str) -> None:
        peer, was_open = session.peer, session.is_open
        with self._lock:
            for waiting in self._waiting.values():
                waiting.pop(session, None)
            self._sessions.pop(peer.session, None)
            if self._by_name.get(peer.name) is session:
                del self._by_name[peer.name]
        self._floods.deauthorize(peer.session)
        session.state_machine.transition_to(SessionState.ENDED)
        logger.info("tunnel.closed peer=%s reason=%s", peer.name, reason)
        if was_open:
            self._tell_audit("closed", peer, reason)
            self._handler.on_peer_closed(peer, reason)

    def _tell_audit(self, event: AuditEvent, peer: Peer, reason: str = "") -> None:
        key = fingerprint(peer.public_key)
        self._audit(
            AuditEntry(event=event, key=key, peer=peer.name, role=peer.role, address=peer.address, reason=reason)
        )

    # Sending

    def _flush(self) -> float:
        """Sends what is queued, control of all peers first; returns the seconds until it should be tried again."""
        retry_s = TICK_S
        for channel, waiting in self._waiting.items():
            if not waiting:
                continue
            with self._lock:
                sessions = list(waiting)
                waiting.clear()
            for session in sessions:
                blocked = session.flush(channel, self._sender(session, channel))
                wait_s = BLOCKED_RETRY_S if blocked else session.send_queues[channel].bandwidth_wait_s()
                if wait_s < math.inf:
                    self._mark(session, channel)
                    retry_s = min(retry_s, wait_s)
        return retry_s

    def _sender(self, session: PeerSession, channel: Channel) -> Callable[[list[Payload]], bool]:
        routing_id = channel.value + session.peer.session
        return lambda frames: send_frames(self._router, [routing_id, *frames])
