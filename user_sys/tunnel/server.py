"""The gateway's end of the tunnel: one encrypted TCP port for the keys in its keyring.

One thread owns the sockets. It decodes and checks every message and passes it to a `TunnelHandler`. It sends the
messages that other threads have queued: control and e-stops, then weights, then experience. A message of a peer never
raises out of this thread.
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
from user_sys.tunnel.flow_control import ChannelMetrics, SendFrames
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
    PeerSessions,
    RateLimitedLog,
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

__all__ = ["Peer", "ServerSockets", "TunnelHandler", "TunnelServer"]

logger = logging.getLogger(__name__)

TICK_S = 0.25
BLOCKED_RETRY_S = 0.005
RECEIVE_BURST = 64
IO_THREADS = 4  # libzmq gives a new connection to the least busy thread, so the channels of a robot use several
STOP_TIMEOUT_S = 10.0
CLOSE_LINGER_MS = 200

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


class ServerSockets:
    """The listening socket of a `TunnelServer`, with authentication, receive quotas and a wake-up.

    One thread calls it, except `wake`, which any thread may call.
    """

    def __init__(
        self, router: ZmqSocket, authenticator: Authenticator, quota_guard: ReceiveQuotaGuard, wakeup: Wakeup
    ) -> None:
        self._router, self._authenticator, self._quota_guard, self._wakeup = router, authenticator, quota_guard, wakeup
        self._poll = select.poll()
        self._ready: set[int] = set()

    def register(self) -> None:
        """Registers all descriptors for `wait`."""
        self._zap_fd, self._monitor_fd = (
            int(socket.getsockopt(zmq.FD)) for socket in (self._authenticator.zap, self._authenticator.monitor)
        )
        router_fd = int(self._router.getsockopt(zmq.FD))
        for fd in (router_fd, self._zap_fd, self._monitor_fd, self._wakeup.fileno()):
            self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Blocks until a message, an event or a wake-up arrives, or the timeout ends."""
        timeout_s = 0.0 if self.has_message() else min(timeout_s, self._quota_guard.check_interval_s)
        self._ready = {fd for fd, _ in self._poll.poll(1e3 * timeout_s)}
        if self._wakeup.fileno() in self._ready:
            self._wakeup.clear()

    def process_ready_events(self) -> None:
        """Answers authentication requests and processes connection events that `wait` has found."""
        if self._zap_fd in self._ready:
            self._authenticator.answer_zap_requests()
        if self._monitor_fd in self._ready:
            self._authenticator.process_monitor_events()

    def process_all_events(self) -> None:
        self._authenticator.answer_zap_requests()
        self._authenticator.process_monitor_events()

    def check_receive_quotas(self) -> None:
        self._authenticator.check_receive_quotas(lambda: not self.has_message())

    def has_message(self) -> bool:
        return has_message(self._router)

    def receive(self) -> list[zmq.Frame] | None:
        """The frames of the next message, its routing id first, or None; does not block."""
        frames = receive_frames(self._router)
        if frames is not None:
            self._quota_guard.on_message(frames)
        return frames

    def send(self, frames: list[Payload]) -> bool:
        """Sends a message, its routing id first. Returns False if the peer is gone or its pipe is full."""
        return send_frames(self._router, frames)

    def authorize(self, descriptor: int, session: bytes) -> None:
        """See `ReceiveQuotaGuard.authorize`."""
        self._quota_guard.authorize(descriptor, session)

    def deauthorize(self, session: bytes) -> None:
        """See `ReceiveQuotaGuard.deauthorize`."""
        self._quota_guard.deauthorize(session)

    def wake(self) -> None:
        """Ends `wait` in another thread."""
        self._wakeup.set()

    def close(self) -> None:
        self._authenticator.close()
        self._router.close(CLOSE_LINGER_MS)
        self._router.context.term()
        self._wakeup.close()


class TunnelServer:
    """Listens on `endpoint` from `start` to `close`. Any thread may call its public methods.

    With a TCP port on loopback it also listens on a Unix socket, which peers on the same machine prefer.
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
        self.endpoint, self.name = endpoint, name
        self.counters: Counter[str] = Counter()
        self.metrics = {channel: ChannelMetrics() for channel in Channel}
        self.sessions = PeerSessions()
        self._keys, self._keyring = keys, keyring
        self._handler = handler
        self._limits = limits or TunnelLimits()
        self._audit, self._unix_ns = audit, unix_ns
        self._log = RateLimitedLog()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    # Life cycle

    def start(self) -> None:
        """Listens and serves. If `endpoint` has port 0, `endpoint` holds the selected port afterwards.

        Raises:
            RunError: the port is in use, or the address is not one of this machine.
        """
        sockets = self._open_sockets()
        self._keyring.refresh()
        self.attach(sockets)
        self._thread = threading.Thread(target=self._serve, name="tunnel-server", daemon=True)
        self._thread.start()
        logger.info("tunnel.listening endpoint=%s public_key=%s", self.endpoint, self._keys.public)

    def _open_sockets(self) -> ServerSockets:
        context: zmq.Context[ZmqSocket] = zmq.Context(IO_THREADS)
        router: ZmqSocket = context.socket(zmq.ROUTER)
        quota_guard = ReceiveQuotaGuard(self._limits.max_record_bytes, self._limits.max_message_bytes)
        authenticator = Authenticator(
            context, router, self._keyring, self.counters, self._log, self._audit, quota_guard
        )
        sockets = ServerSockets(router, authenticator, quota_guard, Wakeup())
        try:
            configure_router(router, self._keys, self._limits)
            self.endpoint = bind_endpoint(router, self.endpoint, self._keys.public)
            authenticator.process_monitor_events()
        except RunError:
            sockets.close()
            raise
        return sockets

    def attach(self, sockets: ServerSockets) -> None:
        """Uses `sockets` from now on. `start` calls this; a simulation without a thread calls it instead of `start`."""
        self._sockets = sockets

    def close(self) -> None:
        """Sends queued messages that libzmq accepts at once, and closes the port. Repeated calls have no effect."""
        self._stopping.set()
        if self._thread is None:
            return
        self._sockets.wake()
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
        """The exception that ended the server, or None."""
        return self._failure

    # Methods for other threads

    def send(self, name: str, message: AnyMessage, payload: Payload | None = None) -> bool:
        """Queues a message for the peer called `name`; never blocks.

        A state message replaces its queued predecessor (`coalescing_key`). Returns False without such a peer, or if its
        queue is full.
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
        if self._is_own_thread() and session.try_send_now(channel, envelope, self._sender(session, channel)):
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
        """Returns credit to `peer` for processed chunks and the total bytes of their packets."""
        session = self.sessions.find(peer.session)
        if session is not None and session.receive_windows[Channel.EXPERIENCE].release(chunks, size_bytes):
            self._mark(session, Channel.EXPERIENCE)

    def _mark(self, session: PeerSession, channel: Channel) -> None:
        self.sessions.mark(session, channel)
        if not self._is_own_thread():
            self._sockets.wake()

    def _is_own_thread(self) -> bool:
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def peers(self, role: Role | None = None) -> tuple[Peer, ...]:
        """The peers with an open session, sorted by name."""
        return self.sessions.peers(role)

    def scalars(self) -> dict[str, float]:
        """The counters and latencies of each channel, summed over all peers."""
        by_channel = [metrics.scalars(channel.name.lower()) for channel, metrics in self.metrics.items()]
        return {key: value for scalars in by_channel for key, value in scalars.items()}

    # The server's thread

    def _serve(self) -> None:
        request_short_time_slice()
        sockets, next_tick = self._sockets, 0.0
        try:
            sockets.register()
            while not self._stopping.is_set():
                sockets.process_ready_events()
                self.receive()
                sockets.check_receive_quotas()
                retry_s = self.flush()
                if time.monotonic() >= next_tick:
                    self.tick()
                    next_tick = time.monotonic() + TICK_S
                sockets.wait(retry_s)
            self.flush()
        except Exception as error:
            logger.exception("tunnel.failed")
            self._failure = error
        finally:
            remove_unix_socket(self.endpoint, self._keys.public)
            sockets.close()

    def tick(self) -> None:
        """Processes events, and ends sessions whose key was revoked or whose peer is silent."""
        self._sockets.process_all_events()
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
            frames = self._sockets.receive()
            if frames is None:
                break
            self._dispatch(frames, bulk)
        if bulk:
            self.flush()  # bulk does not delay replies on the control channel
        bulk.sort(key=lambda item: item[1] is not Channel.WEIGHTS)
        for item in bulk:
            self._deliver(*item)

    def _dispatch(self, frames: list[zmq.Frame], bulk: list[_BulkMessage]) -> None:
        """Delivers a message of control or stop; appends others to `bulk`."""
        routing_id = frames[0].bytes
        public = str(frames[-1].get("User-Id"))
        try:
            channel = Channel(routing_id[:1])
        except ValueError:
            self.counters["stray"] += 1
            return
        session = self.sessions.find(routing_id[1:])
        if session is not None and session.peer.public_key != public:
            self.counters["stray"] += 1
            return
        try:
            parts: list[Payload] = [frame.buffer for frame in frames[1:]]
            envelope = decode_envelope(channel, parts, self._limits)
            if isinstance(envelope.message, Hello):
                self._on_hello(routing_id, channel, session, envelope.message, frames[-1])
            elif session is None or channel not in session.welcomed_channels:
                self.counters["stray"] += 1
            elif channel in (Channel.CONTROL, Channel.STOP):
                self._deliver(session, channel, envelope, credit_cost_bytes(parts))
            else:
                bulk.append((session, channel, envelope, credit_cost_bytes(parts)))
        except WireError as error:
            self._reject(routing_id, session, public, frames, str(error))

    def _reject(
        self, routing_id: bytes, session: PeerSession | None, public: str, frames: list[zmq.Frame], reason: str
    ) -> None:
        """Refuses a peer whose bytes violate the protocol."""
        self.counters["malformed"] += 1
        if session is not None:
            self._refuse(session, reason)
            return
        version = hello_protocol_version(frames[1].buffer) if len(frames) == 2 else None
        if version is not None and not OLDEST_PROTOCOL <= version <= PROTOCOL_VERSION:
            reason = version_mismatch_reason(str(version))
        entry = self._keyring.find(public)
        address = str(frames[-1].get("Peer-Address"))
        self._send_refusal(routing_id, entry.name if entry else "?", public, address, reason)

    def _send_refusal(self, routing_id: bytes, name: str, public: str, address: str, reason: str) -> None:
        self._audit(AuditEntry(event="refused", key=fingerprint(public), peer=name, address=address, reason=reason))
        self._log.warn(f"refused:{public}", f"tunnel.refused peer={name} key={public} reason={reason}")
        self._sockets.send([routing_id, *encode_envelope(Envelope(Refusal(reason=reason)))])

    def _deliver(self, session: PeerSession, channel: Channel, envelope: Envelope, size: int) -> None:
        if session.state_machine.state is SessionState.ENDED:
            return  # an earlier message has ended the session
        message = envelope.message
        metrics = self.metrics[channel]
        metrics.received += 1
        metrics.received_bytes += size
        try:
            if isinstance(message, CREDIT_EXEMPT):
                self._on_session_message(session, channel, envelope)
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

    def _on_session_message(self, session: PeerSession, channel: Channel, envelope: Envelope) -> None:
        match envelope.message:
            case Heartbeat() as heartbeat:
                if channel is not Channel.CONTROL:
                    return
                session.on_heartbeat(heartbeat, self._unix_ns())
                for welcomed in session.welcomed_channels:
                    self._mark(session, welcomed)
            case CreditGrant() as grant:
                session.add_credit(channel, grant)
            case message:
                raise WireError(f"{type(message).__name__} is not valid in this state of the session")
        self._mark(session, channel)

    # Sessions

    def _on_hello(
        self, routing_id: bytes, channel: Channel, session: PeerSession | None, hello: Hello, frame: zmq.Frame
    ) -> None:
        if session is None and channel is not Channel.CONTROL:
            self.counters["stray"] += 1  # its session has ended; the client times out and opens another
            return
        public, address = str(frame.get("User-Id")), str(frame.get("Peer-Address"))
        entry = self._keyring.find(public)
        reason = refusal_reason(routing_id, channel, session, hello, entry)
        if not reason and channel is Channel.CONTROL:
            reason = self._handler.refusal_reason(hello)
        if reason or entry is None:
            self.counters["hellos_refused"] += 1
            self._send_refusal(routing_id, hello.name[:80], public, address, reason)
            return
        if session is None:
            via = "" if entry.name == hello.name else entry.name
            peer = Peer(hello.name, hello.role, public, address, routing_id[1:], hello.spec, via)
            session = self._begin(peer, hello.stream)
        session.welcomed_channels.add(channel)
        descriptor = int(frame.get(zmq.SRCFD))
        self._sockets.authorize(descriptor, session.peer.session)
        if channel is not Channel.CONTROL:
            session.bulk_descriptors[channel] = descriptor
            enlarge_send_buffer(descriptor)
        resume_state = session.resume_state
        resumes = channel is Channel.EXPERIENCE and resume_state.stream == hello.stream
        welcome = Welcome(
            protocol=min(hello.protocol, PROTOCOL_VERSION),
            gateway=self.name,
            resume_after=resume_state.acked_sequence if resumes else -1,
        )
        self._sockets.send([routing_id, *encode_envelope(Envelope(welcome))])
        self._mark(session, channel)
        if len(session.welcomed_channels) == len(Channel) and not session.is_open:
            self._open(session)

    def _begin(self, peer: Peer, stream: str) -> PeerSession:
        """Begins a session, which does not replace the open session of its name until it opens.

        The Hello may be late: its client may have another session by now, which may be the open one.
        """
        for former in [s for s in self.sessions.all() if s.peer.name == peer.name and not s.is_open]:
            self._end(former, "the peer sent another Hello")
        session = PeerSession(peer, self._limits, self.sessions.resume_state(peer.name), self.metrics, stream)
        self.sessions.add(session)
        return session

    def _open(self, session: PeerSession) -> None:
        """Opens a session whose client answered every Welcome but the last, and ends the previous one of its name."""
        peer = session.peer
        former = self.sessions.find_open(peer.name)
        if former is not None:
            self._refuse(former, f"another session of {peer.name} has taken over")
        session.state_machine.transition_to(SessionState.OPEN)
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
        self._sockets.deauthorize(peer.session)
        session.state_machine.transition_to(SessionState.ENDED)
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
                wait_s = BLOCKED_RETRY_S if blocked else session.send_queues[channel].bandwidth_wait_s()
                if wait_s < math.inf:
                    self._mark(session, channel)
                    retry_s = min(retry_s, wait_s)
        return retry_s

    def _sender(self, session: PeerSession, channel: Channel) -> SendFrames:
        routing_id = channel.value + session.peer.session
        return lambda frames: self._sockets.send([routing_id, *frames])
