"""The gateway's end of the tunnel: one TCP port, CURVE-encrypted, closed to keys that are not in the ring.

One thread owns the sockets. It decodes, checks and hands every message to a `TunnelHandler`, and sends what other
threads have queued: control first, then weights, then experience. Nothing that a peer sends raises out of the loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from hal.spec import RobotSpec
from user_sys.errors import RunError, TunnelError, WireError
from user_sys.messages import PROTOCOL_VERSION, Heartbeat, Hello, Refusal, Welcome
from user_sys.tunnel.keys import KeyPair, Keyring, Role
from user_sys.tunnel.mailbox import Mailbox
from user_sys.tunnel.wire import (
    ALLOWED,
    SESSION_BYTES,
    ZAP_DOMAIN,
    AnyMessage,
    Channel,
    Envelope,
    Payload,
    Socket,
    TunnelLimits,
    Wakeup,
    channel_of,
    coalescing_key,
    configure,
    decode,
    encode,
    protocol_of_hello,
    receive_frames,
    send_frames,
)

logger = logging.getLogger(__name__)

TICK_MS = 250
BLOCKED_RETRY_MS = 5
RECEIVE_BURST = 256
SEND_BURST = 32
BIND_PATIENCE_S = 3.0
LOG_EVERY_S = 5.0
IO_THREADS = 3  # libzmq gives each new connection to the least busy: a robot's channels do not share one
STOP_TIMEOUT_S = 10.0
FAREWELL_MS = 200
_FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


@dataclass(frozen=True)
class Peer:
    """Who is at the other end of a session, as its key says. `spec` is what a robot declared in its Hello."""

    name: str
    role: Role
    public_key: str
    address: str
    session: bytes
    spec: RobotSpec | None = None


class TunnelHandler(Protocol):
    """What the gateway does with a tunnel. Called from the server's thread: return soon, block never.

    An exception other than WireError (which refuses the peer) ends the server.
    """

    def objection(self, hello: Hello) -> str:
        """Why a peer whose key is in order may not open a session now; empty to let it in."""

    def peer_opened(self, peer: Peer) -> None:
        """`peer` is authenticated and all its channels are open."""

    def peer_closed(self, peer: Peer, reason: str) -> None:
        """The session is over; the same name may open another."""

    def received(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        """A message that `peer`'s role may send, in its own name. `payload` stays valid as long as it is held."""


@dataclass(eq=False)
class _Session:
    peer: Peer
    heard_s: float
    queues: dict[Channel, Mailbox[Envelope]]
    open: set[Channel] = field(default_factory=lambda: {Channel.CONTROL})


class TunnelServer:
    """Listens on `endpoint` from `start` to `close`. Any thread may call its public methods."""

    def __init__(
        self,
        endpoint: str,
        keys: KeyPair,
        keyring: Keyring,
        handler: TunnelHandler,
        limits: TunnelLimits | None = None,
        name: str = "gateway",
    ) -> None:
        self.endpoint = endpoint
        self.name = name
        self.counters: Counter[str] = Counter()
        self._keys = keys
        self._keyring = keyring
        self._handler = handler
        self._limits = limits or TunnelLimits()
        self._sessions: dict[bytes, _Session] = {}
        self._by_name: dict[str, _Session] = {}
        self._waiting: set[_Session] = set()  # those with something to be sent
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._logged: dict[str, tuple[float, int]] = {}

    # Life cycle

    def start(self) -> None:
        """Binds and serves; `endpoint` then holds the port that was chosen where it asked for port 0.

        Raises:
            RunError: the port is in use, or the address is not one of this machine.
        """
        self._wakeup = Wakeup()
        self._context = zmq.Context(IO_THREADS)
        self._zap: Socket = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._router: Socket = self._context.socket(zmq.ROUTER)
        self._monitor: Socket = self._router.get_monitor_socket(_FAILED_HANDSHAKES)
        try:
            self._zap.bind("inproc://zeromq.zap.01")  # before the port opens: without it libzmq lets any key in
            self._configure_router()
            self._bind()
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

    def _configure_router(self) -> None:
        configure(self._router, self._limits)
        self._router.curve_server = True
        self._router.curve_publickey = self._keys.public.encode()
        self._router.curve_secretkey = self._keys.secret.encode()
        self._router.zap_domain = ZAP_DOMAIN
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def _bind(self) -> None:
        deadline = time.monotonic() + BIND_PATIENCE_S  # a predecessor that was killed may still be dying
        while True:
            try:
                self._router.bind(self.endpoint)
                self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    reason = error.strerror or str(error)
                    raise RunError(f"cannot listen on {self.endpoint} ({reason}); change --gateway.endpoint") from None
            self._stopping.wait(0.1)

    def _close_sockets(self) -> None:
        self._router.disable_monitor()
        self._router.close(FAREWELL_MS)
        for socket in (self._monitor, self._zap):
            socket.close(0)
        self._context.term()
        self._wakeup.close()

    # What other threads may do

    def send(self, name: str, message: AnyMessage, payload: Payload | None = None) -> bool:
        """Queues a message for the peer called `name`; never blocks.

        Newest wins where messages are states (`coalescing_key`). False when there is no such peer or its queue is full.
        """
        with self._lock:
            session = self._by_name.get(name)
            if session is None or len(session.open) < len(Channel):
                return False
        queue = session.queues[channel_of(message)]
        if not queue.put(Envelope(message, payload), coalescing_key(message)):
            self.counters["queue_full"] += 1
            self._log("queue-full", f"tunnel.queue_full peer={name} message={type(message).__name__}")
            return False
        self._mark(session)
        if threading.current_thread() is not self._thread:
            self._wakeup.set()
        return True

    def _mark(self, session: _Session) -> None:
        with self._lock:
            if self._sessions.get(session.peer.session) is session:
                self._waiting.add(session)

    def peers(self, role: Role | None = None) -> tuple[Peer, ...]:
        """Those whose session is open, by name."""
        with self._lock:
            found = [s.peer for s in self._by_name.values() if len(s.open) == len(Channel)]
        return tuple(sorted((p for p in found if role in (None, p.role)), key=lambda peer: peer.name))

    # The loop

    def _serve(self) -> None:
        poller = zmq.Poller()
        for pollable in (self._router, self._zap, self._monitor, self._wakeup.fileno()):
            poller.register(pollable, zmq.POLLIN)
        next_tick, blocked = 0.0, False
        try:
            while not self._stopping.is_set():
                ready = {item for item, _ in poller.poll(BLOCKED_RETRY_MS if blocked else TICK_MS)}
                if self._wakeup.fileno() in ready:
                    self._wakeup.clear()
                if self._zap in ready:
                    self._authenticate()
                if self._router in ready:
                    self._receive()
                blocked = self._flush()
                if time.monotonic() >= next_tick:
                    self._tick()
                    next_tick = time.monotonic() + TICK_MS / 1e3
            self._flush()
        except Exception as error:
            logger.exception("tunnel.failed")
            self._failure = error
        finally:
            self._close_sockets()

    def _tick(self) -> None:
        self._count_failed_handshakes()
        ring_changed = self._keyring.refresh()
        for name in self._keyring.unreadable if ring_changed else ():
            logger.warning("tunnel.unreadable_key file=%s/%s", self._keyring.folder, name)
        now = time.monotonic()
        for session in list(self._sessions.values()):
            entry = self._keyring.find(session.peer.public_key)
            if entry is None or not entry.may_be(session.peer.name, session.peer.role):
                self._refuse(session, "this key was revoked")
            elif now - session.heard_s > self._limits.dead_after_s:
                self._end(session, f"silent for {now - session.heard_s:.1f} s")

    def _count_failed_handshakes(self) -> None:
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self.counters["handshakes_failed"] += 1
            self._log("handshake", "tunnel.handshake_failed: not this protocol, or for another gateway's key")

    def _log(self, topic: str, text: str) -> None:
        """A warning, at most one each `LOG_EVERY_S` and topic; says how many were held back."""
        last, held_back = self._logged.get(topic, (-LOG_EVERY_S, 0))
        now = time.monotonic()
        if now - last < LOG_EVERY_S:
            self._logged[topic] = (last, held_back + 1)
            return
        if len(self._logged) > 1024:
            self._logged.clear()
        self._logged[topic] = (now, 0)
        logger.warning("%s%s", text, f" (and {held_back} more like it)" if held_back else "")

    # Authentication

    def _authenticate(self) -> None:
        """Answers libzmq's questions whether a key may connect (ZAP, https://rfc.zeromq.org/spec/27/)."""
        while self._zap.poll(0):
            version, request, domain, address, _, mechanism, *credentials = self._zap.recv_multipart()
            public = z85.encode(credentials[0]).decode() if len(credentials) == 1 and len(credentials[0]) == 32 else ""
            self._keyring.refresh()
            known = mechanism == b"CURVE" and domain == ZAP_DOMAIN and self._keyring.find(public) is not None
            if not known:
                self.counters["keys_refused"] += 1
                who = f"key={public or 'none'} address={address.decode(errors='replace')}"
                self._log(f"key:{public}", f"tunnel.refused {who} reason=this key is not allowed")
            status = (b"200", b"OK") if known else (b"400", b"this key is not allowed")
            self._zap.send_multipart([version, request, *status, public.encode(), b""])

    # Receiving

    def _receive(self) -> None:
        """Hands on what has arrived, control first. Bounded, so that sending and ticks have their turn."""
        later: list[tuple[_Session, Envelope]] = []
        for _ in range(RECEIVE_BURST):
            frames = receive_frames(self._router)
            if frames is None:
                break
            self._sort(frames, later)
        later.sort(key=lambda item: channel_of(item[1].message) is not Channel.WEIGHTS)
        for session, envelope in later:
            self._deliver(session, envelope)

    def _sort(self, frames: list[zmq.Frame], later: list[tuple[_Session, Envelope]]) -> None:
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
            envelope = decode(channel, [frame.buffer for frame in frames[1:]], self._limits)
            if isinstance(envelope.message, Hello):
                self._greet(routing_id, channel, session, envelope.message, frames[-1])
            elif session is None or channel not in session.open:
                self.counters["stray"] += 1
            elif channel is Channel.CONTROL:
                self._deliver(session, envelope)
            else:
                later.append((session, envelope))
        except WireError as error:
            self._reject(routing_id, session, public, frames, str(error))

    def _reject(
        self, routing_id: bytes, session: _Session | None, public: str, frames: list[zmq.Frame], why: str
    ) -> None:
        """Refuses a peer whose bytes break the protocol."""
        self.counters["malformed"] += 1
        if session is not None:
            self._refuse(session, why)
            return
        version = protocol_of_hello(frames[1].buffer) if len(frames) == 2 else None
        if version not in (None, PROTOCOL_VERSION):
            why = _other_version(version)
        entry = self._keyring.find(public)
        self._turn_away(routing_id, entry.name if entry else "?", public, why)

    def _turn_away(self, routing_id: bytes, name: str, public: str, why: str) -> None:
        self._log(f"refused:{public}", f"tunnel.refused peer={name} key={public} reason={why}")
        send_frames(self._router, [routing_id, *encode(Envelope(Refusal(reason=why)))])

    def _deliver(self, session: _Session, envelope: Envelope) -> None:
        if self._sessions.get(session.peer.session) is not session:
            return  # refused by a message before this one
        message = envelope.message
        try:
            if isinstance(message, Heartbeat):
                session.heard_s = time.monotonic()
                echo = Heartbeat(t_client_ns=message.t_client_ns, t_gateway_unix_ns=time.time_ns())
                session.queues[Channel.CONTROL].put(Envelope(echo), Heartbeat)
                self._mark(session)
                return
            self._check(session.peer, message)
            self._handler.received(session.peer, message, envelope.payload)
        except WireError as error:
            self.counters["malformed"] += 1
            self._refuse(session, str(error))

    def _check(self, peer: Peer, message: AnyMessage) -> None:
        """Raises WireError unless `peer` may send `message`: its role allows the type, its key the name."""
        if not isinstance(message, ALLOWED[peer.role]):
            raise WireError(f"a {peer.role} may not send {type(message).__name__}")
        claimed = _claimed_name(peer.role, message)
        if claimed is not None and claimed != peer.name:
            raise WireError(f"{peer.name} wrote in the name of {claimed[:80]!r}")

    # Sessions

    def _greet(
        self, routing_id: bytes, channel: Channel, session: _Session | None, hello: Hello, frame: zmq.Frame
    ) -> None:
        public, address = str(frame.get("User-Id")), str(frame.get("Peer-Address"))
        entry = self._keyring.find(public)
        why = ""
        if hello.protocol != PROTOCOL_VERSION:
            why = _other_version(hello.protocol)
        elif entry is None:
            why = "this key is not allowed"
        elif not entry.may_be(hello.name, hello.role):
            why = f"this key belongs to the {entry.role} {entry.name!r}, not to the {hello.role} {hello.name[:80]!r}"
        elif len(routing_id) != 1 + SESSION_BYTES or (session is None) != (channel is Channel.CONTROL):
            why = "this Hello opens no session"
        elif channel is Channel.CONTROL:
            why = self._handler.objection(hello)
        if why or entry is None:
            self.counters["hellos_refused"] += 1
            self._turn_away(routing_id, hello.name[:80], public, why)
            return
        if session is None:
            session = self._begin(Peer(hello.name, hello.role, public, address, routing_id[1:], hello.spec))
        session.open.add(channel)
        welcome = Welcome(protocol=PROTOCOL_VERSION, gateway=self.name)
        send_frames(self._router, [routing_id, *encode(Envelope(welcome))])
        if channel is Channel.EXPERIENCE:
            logger.info("tunnel.opened peer=%s role=%s address=%s", session.peer.name, session.peer.role, address)
            self._handler.peer_opened(session.peer)

    def _begin(self, peer: Peer) -> _Session:
        former = self._by_name.get(peer.name)
        if former is not None:
            self._refuse(former, f"another session of {peer.name} has taken over")
        queues: dict[Channel, Mailbox[Envelope]] = {c: Mailbox(self._limits.queue_messages) for c in Channel}
        session = _Session(peer, time.monotonic(), queues)
        with self._lock:
            self._sessions[peer.session] = session
            self._by_name[peer.name] = session
        return session

    def _refuse(self, session: _Session, why: str) -> None:
        """Ends a session for good: its client will not come back by itself."""
        peer = session.peer
        self._turn_away(Channel.CONTROL.value + peer.session, peer.name, peer.public_key, why)
        self._end(session, f"refused: {why}")

    def _end(self, session: _Session, reason: str) -> None:
        peer = session.peer
        with self._lock:
            self._waiting.discard(session)
            self._sessions.pop(peer.session, None)
            if self._by_name.get(peer.name) is session:
                del self._by_name[peer.name]
        logger.info("tunnel.closed peer=%s reason=%s", peer.name, reason)
        if len(session.open) == len(Channel):
            self._handler.peer_closed(peer, reason)

    # Sending

    def _flush(self) -> bool:
        """Sends what is queued, control of all peers first; True when something could not be sent now."""
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        for channel in Channel:
            for session in waiting:
                if self._flush_queue(session, channel):
                    self._mark(session)
        return bool(self._waiting)

    def _flush_queue(self, session: _Session, channel: Channel) -> bool:
        queue = session.queues[channel]
        routing_id = channel.value + session.peer.session
        for _ in range(SEND_BURST):
            envelope = queue.peek()
            if envelope is None:
                return False
            if not send_frames(self._router, [routing_id, *encode(envelope)]):
                return True
            queue.discard(envelope)
        return True


def _other_version(version: int | None) -> str:
    return f"the gateway speaks protocol version {PROTOCOL_VERSION}, this peer {version}; install the same release"


def _claimed_name(role: Role, message: AnyMessage) -> str | None:
    """Whose name a message is written in, where that must be the sender's own."""
    if role == "console":
        return None
    return getattr(message, "robot", None) or getattr(message, "node", None)
