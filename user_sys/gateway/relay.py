"""``user-sys relay``: a gateway for the robots of one site, which fetches weights once for all of them.

For each local robot, the relay opens an upstream session to the cloud's gateway under the robot's name. So leases,
acknowledgements and refusals are the cloud's. The cloud's keyring lists the robots for which the relay's key may open
sessions; the relay's keyring binds each local key to its robot.

A robot gets an acknowledgement when the cloud has stored the chunk. The relay stores only weights, so it may be killed
at any time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from hal.signals import stop_on_signals
from hal.state_database import STATE_FILE, AuditLog
from user_sys.errors import SessionRefused, TunnelError, WireError
from user_sys.gateway.weights import MAX_LEARNERS, WeightsRouter
from user_sys.messages import (
    PROTOCOL_VERSION,
    ChunkAck,
    ChunkOffer,
    ChunkRefusal,
    DevicesReport,
    EpisodeReport,
    Hello,
    LeaseRelease,
    LeaseRequest,
    MetricsReport,
    OperatorReply,
    Preview,
    PreviewAck,
    RobotStatus,
    SignedRecord,
    WeightsApplied,
    WeightsBlobs,
    WeightsGone,
    WeightsOffer,
    WeightsOfferRequest,
    WeightsProgress,
    WeightsReceived,
    WeightsRequest,
)
from user_sys.robot_records import LEARNER, is_learner_name
from user_sys.tunnel.client import REFUSED_PAUSE_S, TunnelClient, TunnelState
from user_sys.tunnel.connection import PendingChunk
from user_sys.tunnel.keys import GATEWAY_NAME, KeyPair, Keyring, load_keypair, load_public_key
from user_sys.tunnel.limits import TunnelLimits, check_connect_endpoint, check_listen_endpoint
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.tunnel.server import Peer, TunnelServer, taken_over_reason

logger = logging.getLogger(__name__)

RECEIVE_TIMEOUT_S = 0.2
TICK_S = 0.05
REPORT_S = 1.0
STATUS_POLL_S = 0.5
UPSTREAM_CLOSE_S = 10.0


class ForwardBuffer:
    """A `ChunkSource` in memory: a robot's chunks that the cloud has not acknowledged yet. Any thread may call it.

    The robot's credit bounds it. The robot keeps each chunk in its outbox until the cloud's acknowledgement arrives, so
    a lost buffer loses no chunk.
    """

    def __init__(self, peer: Peer, server: TunnelServer) -> None:
        self._peer, self._server = peer, server
        self._lock = threading.Lock()
        self._chunks: deque[PendingChunk] = deque()
        self._on_append: Callable[[], None] | None = None

    def put(self, offer: ChunkOffer, packet: Payload) -> None:
        """Appends a chunk; never blocks."""
        with self._lock:
            self._chunks.append(PendingChunk(offer.sequence, packet))
            on_append = self._on_append
        if on_append is not None:
            on_append()

    def __len__(self) -> int:
        return len(self._chunks)

    def pending(self, after_sequence: int) -> Iterator[PendingChunk]:
        while (chunk := self._next(after_sequence)) is not None:
            yield chunk
            after_sequence = chunk.sequence

    def _next(self, after_sequence: int) -> PendingChunk | None:
        with self._lock:
            return next((chunk for chunk in self._chunks if chunk.sequence > after_sequence), None)

    def acknowledge(self, sequence: int) -> None:
        """Passes the cloud's acknowledgement to the robot, and returns its credit."""
        with self._lock:
            done = [chunk for chunk in self._chunks if chunk.sequence <= sequence]
            for _ in done:
                self._chunks.popleft()
        if done:
            self._server.release(self._peer, len(done), sum(len(chunk.packet) for chunk in done))
            self._server.reply(self._peer, ChunkAck(sequence=done[-1].sequence))

    def set_aside(self, sequence: int, reason: str) -> None:
        self._server.reply(self._peer, ChunkRefusal(sequence=sequence, reason=reason))

    def set_on_append(self, on_append: Callable[[], None] | None) -> None:
        with self._lock:
            self._on_append = on_append


class UpstreamSession:
    """The session of one robot with the cloud, for the lifetime of its local session. Any thread may call it."""

    def __init__(
        self, client: TunnelClient, buffer: ForwardBuffer, server: TunnelServer, previous: UpstreamSession | None
    ) -> None:
        """`previous` is the robot's last upstream session: this one connects after it has closed."""
        self.client, self.buffer = client, buffer
        self._server, self._previous = server, previous
        self._weights_applied: WeightsApplied | None = None
        self._stopping = threading.Event()
        name = client.hello.name
        self._thread = threading.Thread(target=self._run, name=f"upstream-{name}", daemon=True)
        self._stop_thread = threading.Thread(target=self._forward_stops, name=f"e-stop-{name}", daemon=True)

    @property
    def refusal_reason(self) -> str:
        """Why the cloud refuses this robot; empty if it does not."""
        return self.client.reason if self.client.state is TunnelState.REFUSED else ""

    def forward_weights_applied(self, message: WeightsApplied) -> None:
        """Forwards the robot's weight version, and repeats it after each reconnect."""
        self._weights_applied = message
        self.client.send(message)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the session soon; does not block."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Blocks until the session has ended."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            if self._previous is not None:
                self._previous.join(2 * RECEIVE_TIMEOUT_S + 5.0)
                self._previous = None
            if self._stopping.is_set():  # a newer one has replaced it
                self.client.close()
                return
            lost = 0
            with self.client:
                self._stop_thread.start()
                while not self._stopping.is_set():
                    message = self.client.receive(RECEIVE_TIMEOUT_S)
                    if self.client.state is TunnelState.OPEN and self.client.counters["lost"] != lost:
                        lost = self.client.counters["lost"]
                        self._resend_weights_applied()
                    if message is not None:
                        self._server.send(self.client.hello.name, message)
        except TunnelError as error:
            logger.error("relay.upstream_failed robot=%s: %s", self.client.hello.name, error)

    def _forward_stops(self) -> None:
        """Forwards e-stops in a thread of their own, so that other messages do not delay them."""
        while not self._stopping.is_set():
            message = self.client.receive_stop(RECEIVE_TIMEOUT_S)
            if message is not None:
                self._server.send(self.client.hello.name, message)

    def _resend_weights_applied(self) -> None:
        if self._weights_applied is not None:
            self.client.send(self._weights_applied)


class RelayedWeights:
    """Fetches the weights of the local robots' learners from the cloud, once, and distributes them to the robots.

    To the `WeightsRouter` of the relay, the cloud stands for every learner. One thread calls the methods, except
    `send`, which the router's threads call.

    Attributes:
        uplink: the relay's own tunnel to the cloud.
        deferred_offers: by learner, the newest offer without a local robot of its embodiment.
    """

    def __init__(self, folder: Path, kept: int, server: TunnelServer, uplink: TunnelClient) -> None:
        """Raises OSError."""
        self.router = WeightsRouter(folder, self.send, kept, self._robots, is_relay=True)
        self.deferred_offers: dict[str, WeightsOffer] = {}
        self._server, self.uplink = server, uplink
        self._pins: dict[str, SignedRecord] = {}  # by learner, the newest pin that is on disk
        self._offering: set[str] = set()  # learners that the cloud has offered since the start

    def _robots(self) -> list[Peer]:
        return [*self._server.peers("robot"), *self._server.peers("policy")]

    def send(self, name: str, message: AnyMessage, payload: Payload | None = None) -> bool:
        """Sends a message of the router: to a local robot, or a request for a learner to the cloud."""
        if isinstance(message, WeightsRequest):
            return self.uplink.send_weights(message)
        if isinstance(message, WeightsOfferRequest | WeightsProgress | WeightsReceived):
            return True  # the cloud offers by itself, and gets the reports of the robots in their upstream sessions
        return self._server.send(name, message, payload)

    def receive(self, timeout_s: float) -> None:
        """Processes the next message of the cloud, and deferred offers for which a robot has connected."""
        envelope = self.uplink.receive_weights(timeout_s)
        match envelope.message if envelope is not None else None:
            case WeightsOffer() as offer:
                self._on_offer(offer.learner or LEARNER, offer)
            case WeightsBlobs() | WeightsGone() as message if learner := self.router.learner_of(message.version):
                self.router.on_message(learner, message, envelope.payload if envelope else None)
        for learner, offer in list(self.deferred_offers.items()):
            if self._has_robots(learner, offer.embodiment):
                self._on_offer(learner, offer)

    def _on_offer(self, learner: str, offer: WeightsOffer) -> None:
        if not is_learner_name(learner):
            logger.error("relay.invalid_learner name=%r", learner)
            return
        if not self._has_robots(learner, offer.embodiment):
            if learner in self.deferred_offers or len(self.deferred_offers) < MAX_LEARNERS:
                self.deferred_offers[learner] = offer
            return
        self.deferred_offers.pop(learner, None)
        is_changed = offer.embodiment not in ("", self.router.embodiment_of(learner))  # by another launch of the run
        # Requests of an earlier connection get no reply.
        if offer.greeting or is_changed or learner not in self._offering:
            self.router.on_learner_opened(learner, offer.embodiment)
        if offer.manifests:  # before the learner has connected, its embodiment is unknown
            self._offering.add(learner)
        if offer.pin is not None and offer.pin != self._pins.get(learner):
            self._set_pin(learner, offer.pin)
        self.router.on_message(learner, offer, None)

    def _has_robots(self, learner: str, embodiment: str) -> bool:
        """Whether a robot of this learner is connected, or was: then the relay has stored its weights."""
        embodiments = {"" if peer.spec is None else peer.spec.embodiment for peer in self._robots()}
        without_spec = learner == LEARNER and "" in embodiments  # robots without a spec belong to the first learner
        has_weights = learner in self.router.learners_with_weights()
        return not embodiment or embodiment in embodiments or without_spec or has_weights

    def _set_pin(self, learner: str, pin: SignedRecord) -> None:
        try:
            self.router.set_pin(learner, pin)
            self._pins[learner] = pin
        except OSError as error:  # the next offer repeats it
            logger.error("relay.pin_write_failed: %s", error)


@dataclass(frozen=True)
class RelayConfig:
    """The relay's settings.

    Attributes:
        name: the relay's name in the cloud's keyring; its key pair is ``NAME.key``, here and upstream.
        endpoint: the address on which it listens for the robots of its site.
        weights_kept: number of weight versions on disk.
    """

    name: str = "relay"
    endpoint: str = "tcp://127.0.0.1:5556"
    weights_kept: int = 8
    tunnel: TunnelLimits = field(default_factory=TunnelLimits)

    def __post_init__(self) -> None:
        check_listen_endpoint(self.endpoint)


class Relay:
    """Serves one site; see `run`."""

    def __init__(
        self, config: RelayConfig, folder: Path, keys: KeyPair, keyring: Keyring, upstream: str, upstream_key: str
    ) -> None:
        """Raises OSError: `folder` cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        self._config, self._keys = config, keys
        self._upstream, self._upstream_key = upstream, upstream_key
        self._audit = AuditLog(folder / STATE_FILE)
        self.server = TunnelServer(
            config.endpoint, keys, keyring, self, config.tunnel, self._audit.write, self._cloud_unix_ns
        )
        self._refused_s = math.inf  # since when the cloud refuses the relay
        self.weights = RelayedWeights(folder / "weights", config.weights_kept, self.server, self._new_uplink())
        self.upstream_sessions: dict[str, UpstreamSession] = {}  # by robot
        self._hellos: dict[str, Hello] = {}

    def run(self, stop: threading.Event) -> None:
        """Serves until `stop` is set. Blocks. While the cloud refuses it, it tries again every `REFUSED_PAUSE_S`.

        Raises:
            RunError: the port is in use.
            SessionRefused: another relay of this name has taken over. Else each would end the other again and again.
            TunnelError: a part of the relay failed.
        """
        next_report = 0.0
        router = self.weights.router
        try:
            self.server.start()
            router.start()
            self.uplink.start()
            while not stop.is_set():
                self.weights.receive(TICK_S)
                self.uplink.receive(0.0)  # dropped: each robot gets messages about the run in its upstream session
                self._renew_refused_uplink()
                for part in (self.server, router):
                    if part.failure is not None:
                        raise part.failure
                if time.monotonic() >= next_report:
                    next_report = time.monotonic() + REPORT_S
                    router.poll_pin()
                    self._audit.flush()
                    self.uplink.send(self._report())
        finally:
            self._close()

    @property
    def uplink(self) -> TunnelClient:
        """See `RelayedWeights`."""
        return self.weights.uplink

    def _new_uplink(self) -> TunnelClient:
        return self._client(Hello(protocol=PROTOCOL_VERSION, role="relay", name=self._config.name))

    def _renew_refused_uplink(self) -> None:
        if self.uplink.reason.endswith(taken_over_reason(self._config.name)):
            raise SessionRefused(self.uplink.reason)
        now_s = time.monotonic()
        self._refused_s = min(self._refused_s, now_s) if self.uplink.state is TunnelState.REFUSED else math.inf
        if now_s >= self._refused_s + REFUSED_PAUSE_S:
            self.uplink.close()
            self.weights.uplink = self._new_uplink()
            self.uplink.start()

    def _cloud_unix_ns(self) -> int:
        """The cloud's clock if it is known: by it, a robot computes the age of an operator's command."""
        clock = self.uplink.clock
        return time.time_ns() if clock is None else clock.gateway_unix_ns(time.monotonic_ns())

    def _close(self) -> None:
        self.server.close()
        sessions = tuple(self.upstream_sessions.values())
        for session in sessions:
            session.stop()
        for session in sessions:
            session.join(UPSTREAM_CLOSE_S)
        self.uplink.close()
        self.weights.router.close()
        self._audit.close()

    def _client(self, hello: Hello, buffer: ForwardBuffer | None = None) -> TunnelClient:
        return TunnelClient(
            self._upstream, self._keys, self._upstream_key, hello, outbox=buffer, limits=self._config.tunnel
        )

    def _report(self) -> MetricsReport:
        scalars = {
            "robots": float(len(self.server.peers("robot"))),
            **self.weights.router.scalars(),
            **self.server.scalars(),
        }
        return MetricsReport(node=self._config.name, scalars=scalars)

    # Methods of TunnelHandler, in the server's thread

    def refusal_reason(self, hello: Hello) -> str:
        if hello.role not in ("robot", "policy"):
            return f"a relay accepts robots and policy servers; connect the {hello.role} to the cloud's gateway"
        if hello.role == "robot":
            if reason := self._rival_reason(hello):
                return reason
            self._hellos[hello.name] = hello
        return ""

    def _rival_reason(self, hello: Hello) -> str:
        """Why a robot's session is refused while another edge has one, whose upstream session the cloud accepts."""
        other = self.upstream_sessions.get(hello.name)
        if other is None or self.server.sessions.find_open(hello.name) is None:
            return ""
        holder = other.client.hello.holder
        is_rival = holder != hello.holder and not other.refusal_reason
        return f"{hello.name} is driven by {holder}" if is_rival else ""

    def on_peer_opened(self, peer: Peer) -> None:
        if peer.role == "policy":  # it takes weights, and its robots report which of them act
            self.weights.router.on_peer_opened(peer)
            return
        hello = self._hellos.pop(peer.name)
        buffer = ForwardBuffer(peer, self.server)
        previous = self.upstream_sessions.get(peer.name)
        session = UpstreamSession(self._client(hello, buffer), buffer, self.server, previous)
        self.upstream_sessions[peer.name] = session
        session.start()
        self.weights.router.on_peer_opened(peer)

    def on_peer_closed(self, peer: Peer, reason: str) -> None:
        if peer.role == "robot":
            self.upstream_sessions[peer.name].stop()
        self.weights.router.on_peer_closed(peer.name)

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        if peer.role == "policy":
            if isinstance(message, WeightsRequest | WeightsApplied):
                self.weights.router.on_message(peer.name, message, None)
            return
        session = self.upstream_sessions[peer.name]
        if session.refusal_reason:
            raise WireError(session.refusal_reason)
        match message:
            case ChunkOffer() if payload is not None:
                session.buffer.put(message, payload)
            case Preview() if payload is not None:
                self.server.send(peer.name, PreviewAck(robot=message.robot, camera=message.camera))
                session.client.send_preview(message, bytes(payload))
            case WeightsRequest():
                self.weights.router.on_message(peer.name, message, None)
            case WeightsApplied():
                self.weights.router.on_message(peer.name, message, None)
                session.forward_weights_applied(message)
            case LeaseRequest() | LeaseRelease() | OperatorReply() | RobotStatus():
                session.client.send(message)
            case EpisodeReport() | MetricsReport() | DevicesReport():
                session.client.send(message)


def run_relay(config: RelayConfig, connect: str, folder: Path, key_folder: Path) -> int:
    """Serves a site on behalf of the gateway at `connect` until SIGTERM or Ctrl-C.

    Raises:
        ConfigError, RunError: a setting or the machine does not allow it.
    """
    check_connect_endpoint(connect)
    keys = load_keypair(key_folder / f"{config.name}.key")
    upstream_key = load_public_key(key_folder / f"{GATEWAY_NAME}.pub")
    relay = Relay(config, folder, keys, Keyring(key_folder), connect, upstream_key)
    stop = threading.Event()
    stop_on_signals(stop)
    console = Console()

    def print_line(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    threading.Thread(
        target=_print_changes, args=(relay, config, connect, print_line, stop), name="status", daemon=True
    ).start()
    relay.run(stop)
    return 0


def _print_changes(
    relay: Relay, config: RelayConfig, upstream: str, print_line: Callable[[str], None], stop: threading.Event
) -> None:
    """Prints changes of the connection and of the connected robots. It does not repeat the same refusal."""
    printed, robots = (TunnelState.IDLE, ""), frozenset[str]()
    print_line(f"{config.name}: listening on {config.endpoint} for the robots of this site")
    while not stop.wait(STATUS_POLL_S):
        uplink, connected = relay.uplink, frozenset(peer.name for peer in relay.server.peers())
        with uplink.queues.changed:  # a transition changes both
            state, why = uplink.state, uplink.reason
        if why.endswith(taken_over_reason(config.name)):
            return  # `Relay.run` raises it
        found = (state, why if state is TunnelState.REFUSED else "")
        if found != printed and state in (TunnelState.OPEN, TunnelState.LOST, TunnelState.REFUSED):
            printed = found
            if state is TunnelState.OPEN:
                text = f"connected to {upstream}"
            elif state is TunnelState.LOST:
                text = f"no connection to {upstream} ({why}); robots continue and record to their outboxes"
            else:
                text = f"{why}; it tries again every {REFUSED_PAUSE_S:g} s"
            print_line(f"{config.name}: {text}")
        for name in sorted(connected ^ robots):
            print_line(f"{config.name}: {name} {'connected' if name in connected else 'disconnected'}")
        robots = connected
