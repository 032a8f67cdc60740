"""One robot's way through a relay: a session of its own with the cloud, and the chunks that are on their way.

``user-sys relay``: a gateway for the robots of one site, which passes on what they say and fetches weights once.

Each robot that comes in has a session of its own upstream, under its own name, so that leases, acknowledgements and
refusals are the cloud's. The cloud's ring says for which robots the relay's key may speak; the relay's ring, which key
belongs to which of them: a neighbour cannot write as another, and a relay not for another site's robots.

An acknowledgement reaches a robot when the cloud has the chunk on its disk. The relay keeps nothing but weights: it may
be killed at any time.
"""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rich.console import Console

from hal.audit import AUDIT_FILE, AuditLog
from hal.signals import stop_on_signals
from user_sys.config import load
from user_sys.errors import SessionRefused, TunnelError, WireError
from user_sys.gateway.weights_router import MAX_LEARNERS, WeightsRouter
from user_sys.messages import (
    PROTOCOL_VERSION,
    ChunkAck,
    ChunkOffer,
    ChunkRefusal,
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
    WeightsBlocks,
    WeightsGone,
    WeightsOffer,
    WeightsOfferRequest,
    WeightsProgress,
    WeightsReceived,
    WeightsRequest,
)
from user_sys.robot_records import LEARNER, is_learner_name
from user_sys.tunnel.client import TunnelClient, TunnelState
from user_sys.tunnel.connection import PendingChunk
from user_sys.tunnel.endpoint import check_connect_endpoint, check_listen_endpoint
from user_sys.tunnel.keys import KeyPair, Keyring, load_keypair, load_public_key
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import AnyMessage, Envelope, Payload
from user_sys.tunnel.server import TunnelServer
from user_sys.tunnel.session import Peer

logger = logging.getLogger(__name__)

RECEIVE_TIMEOUT_S = 0.2


class LocalServer(Protocol):
    """The relay's own server, as far as a passage needs it. Any thread may call it."""

    def send(self, name: str, message: AnyMessage, payload: Payload | None = None) -> bool:
        """See `TunnelServer.send`."""

    def reply(self, peer: Peer, message: AnyMessage) -> bool:
        """See `TunnelServer.answer`."""

    def release(self, peer: Peer, chunks: int, size_bytes: int) -> None:
        """See `TunnelServer.release`."""


class ForwardBuffer:
    """A `ChunkSource` in memory: what a robot has sent and the cloud has not acknowledged yet.

    It holds no more than the robot's window lets through, and nothing is lost with it: the robot keeps every chunk in
    its own outbox until the acknowledgement, which comes from the cloud's disk, has reached it. Any thread may call it.
    """

    def __init__(self, peer: Peer, stream: str, server: LocalServer) -> None:
        self.stream = stream
        self._peer, self._server = peer, server
        self._lock = threading.Lock()
        self._chunks: deque[PendingChunk] = deque()
        self._appended: Callable[[], None] | None = None

    def put(self, offer: ChunkOffer, packet: Payload) -> None:
        """Takes a chunk over from the robot; never blocks."""
        with self._lock:
            self._chunks.append(PendingChunk(offer.sequence, offer.episode, offer.index, packet))
            appended = self._appended
        if appended is not None:
            appended()

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
        """The cloud has them on its disk: the robot is told, and may send as much again."""
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
            self._appended = on_append


class UpstreamSession:
    """Speaks upstream for one robot from its session's start here to its end. Any thread may call it."""

    def __init__(
        self, client: TunnelClient, buffer: ForwardBuffer, server: LocalServer, previous: UpstreamSession | None
    ) -> None:
        """`before` is the robot's former passage: this one dials when that one has hung up."""
        self.client, self.buffer = client, buffer
        self._server, self._before = server, previous
        self._acts: WeightsApplied | None = None
        self._over = threading.Event()
        name = client.hello.name
        self._thread = threading.Thread(target=self._run, name=f"passage-{name}", daemon=True)
        self._stops = threading.Thread(target=self._pass_stops, name=f"e-stop-{name}", daemon=True)

    @property
    def refusal_reason(self) -> str:
        """Why the cloud will not have this robot; empty while it may yet, or does."""
        return self.client.reason if self.client.state is TunnelState.REFUSED else ""

    def forward_weights_applied(self, message: WeightsApplied) -> None:
        """Passes on with which version the robot acts; again whenever the session upstream has begun anew."""
        self._acts = message
        self.client.send(message)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Has the session upstream end soon; does not wait for that."""
        self._over.set()

    def join(self, timeout_s: float) -> None:
        """Waits for the end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            if self._before is not None:
                self._before.join(2 * RECEIVE_TIMEOUT_S + 5.0)
                self._before = None
            lost = 0
            with self.client:
                self._stops.start()
                while not self._over.is_set():
                    message = self.client.receive(RECEIVE_TIMEOUT_S)
                    if self.client.state is TunnelState.OPEN and self.client.counters["lost"] != lost:
                        lost = self.client.counters["lost"]
                        self._say_again()
                    if message is not None:
                        self._server.send(self.client.hello.name, message)
        except TunnelError as error:
            logger.error("passage.failed robot=%s: %s", self.client.hello.name, error)

    def _pass_stops(self) -> None:
        """E-stops wait for nothing else that comes down."""
        while not self._over.is_set():
            message = self.client.receive_stop(RECEIVE_TIMEOUT_S)
            if message is not None:
                self._server.send(self.client.hello.name, message)

    def _say_again(self) -> None:
        if self._acts is not None:
            self.client.send(self._acts)


TICK_S = 0.05
REPORT_S = 1.0
STATUS_POLL_S = 0.5
GATEWAY_KEY_NAME = "gateway"  # the cloud's name among the keys
UPSTREAM_CLOSE_S = 10.0
MAX_PENDING_REQUESTS = 4096  # parcels under way, or that nothing came of


@dataclass(frozen=True)
class RelayConfig:
    """Attributes:
    name: the relay's in the cloud's ring; its key pair is ``NAME.key``, here and upstream.
    endpoint: where it listens for the robots of its site.
    weights_kept: versions kept on disk.
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
        self, config: RelayConfig, folder: Path, keys: KeyPair, ring: Keyring, upstream: str, upstream_key: str
    ) -> None:
        """Raises OSError: `folder` cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        self._config, self._keys = config, keys
        self._upstream, self._upstream_key = upstream, upstream_key
        self._audit = AuditLog(folder / AUDIT_FILE)
        self.server = TunnelServer(
            config.endpoint, keys, ring, self, config.tunnel, config.name, self._audit.write, self._cloud_unix_ns
        )
        self._orders: dict[str, SignedRecord] = {}  # of each learner, that were taken down
        self._later: dict[str, WeightsOffer] = {}  # the newest of learners for whose robots none has come yet
        self._asked: dict[bytes, str] = {}  # parcels that were asked for, and for which learner
        self._noting = threading.Lock()  # the desks' threads ask
        self._offered: set[str] = set()  # the learners whose weights the cloud has offered since the start
        self._weights = WeightsRouter(folder / "weights", self._send, config.weights_kept, self._robots)
        self.uplink = self._client(Hello(protocol=PROTOCOL_VERSION, role="relay", name=config.name))
        self._hellos: dict[str, Hello] = {}
        self._passages: dict[str, UpstreamSession] = {}

    def run(self, stop: threading.Event) -> None:
        """Serves until `stop` is set. Blocks.

        Raises:
            RunError: the port is in use.
            Refused: the cloud does not let this relay in.
            TunnelError: a part of it broke down.
        """
        next_report = 0.0
        try:
            self.server.start()
            self._weights.start()
            self.uplink.start()
            while not stop.is_set():
                self._take_weights(self.uplink.receive_weights(TICK_S))
                self._take_later()
                self.uplink.receive(0.0)  # what concerns the run reaches each robot by a session of its own
                if self.uplink.state is TunnelState.REFUSED:
                    raise SessionRefused(self.uplink.reason)
                for part in (self.server, self._weights):
                    if part.failure is not None:
                        raise part.failure
                if time.monotonic() >= next_report:
                    next_report = time.monotonic() + REPORT_S
                    self._weights.poll_pin()
                    self._audit.flush()
                    self.uplink.send(self._report())
        finally:
            self._close()

    def _cloud_unix_ns(self) -> int:
        """The cloud's clock, as far as it is known, is the one by which this site's robots date what they record."""
        clock = self.uplink.clock
        return time.time_ns() if clock is None else clock.gateway_unix_ns(time.monotonic_ns())

    def _close(self) -> None:
        self.server.close()
        passages = tuple(self._passages.values())
        for passage in passages:
            passage.stop()
        for passage in passages:
            passage.join(UPSTREAM_CLOSE_S)
        self.uplink.close()
        if self._weights.started:
            self._weights.close()
        self._audit.close()

    def _client(self, hello: Hello, transit: ForwardBuffer | None = None) -> TunnelClient:
        return TunnelClient(
            self._upstream, self._keys, self._upstream_key, hello, outbox=transit, limits=self._config.tunnel
        )

    def _robots(self) -> list[Peer]:
        return list(self.server.peers("robot"))

    def _send(self, name: str, message: AnyMessage, payload: Payload | None = None) -> bool:
        """To a robot of this site; or what a desk asks of its learner, in whose place the cloud's gateway is here."""
        if isinstance(message, WeightsRequest):
            self._note(message.parcel, name)
            return self.uplink.send_weights(message)
        if isinstance(message, WeightsOfferRequest | WeightsProgress | WeightsReceived):
            return False
        return self.server.send(name, message, payload)

    def _note(self, parcel: bytes, learner: str) -> None:
        """Which desk a parcel is for, that was asked for now."""
        with self._noting:
            while len(self._asked) >= MAX_PENDING_REQUESTS and parcel not in self._asked:
                del self._asked[next(iter(self._asked))]
            self._asked[parcel] = learner

    def _take_weights(self, envelope: Envelope | None) -> None:
        match envelope.message if envelope is not None else None:
            case WeightsOffer() as offer:
                self._take_offer(offer.learner or LEARNER, offer)
            case WeightsBlocks() | WeightsGone() as message if learner := self._asked.get(message.parcel):
                self._weights.on_message(learner, message, envelope.payload if envelope else None)

    def _take_offer(self, learner: str, offer: WeightsOffer) -> None:
        if not is_learner_name(learner):
            logger.error("relay.no_learner name=%r", learner)
            return
        if not self._needs(learner, offer.embodiment):
            if learner in self._later or len(self._later) < MAX_LEARNERS:
                self._later[learner] = offer
            return
        self._later.pop(learner, None)
        if offer.greeting or learner not in self._offered:  # what was asked for over an earlier link will not come
            self._weights.on_learner_opened(learner, offer.embodiment)
        self._offered.add(learner)
        if offer.order is not None and offer.order != self._orders.get(learner):
            self._take_order(learner, offer.order)
        self._weights.on_message(learner, offer, None)

    def _needs(self, learner: str, embodiment: str) -> bool:
        """Whether a robot that a learner learns for is here, or was: its weights lie on the disk."""
        here = {"" if peer.spec is None else peer.spec.embodiment for peer in self._robots()}
        unsaid = learner == LEARNER and "" in here  # the first learner's robots need not say what they are
        return not embodiment or embodiment in here or unsaid or learner in self._weights.learners_with_weights()

    def _take_later(self) -> None:
        """Takes what was offered before the first robot came that it is for."""
        for learner, offer in list(self._later.items()):
            if self._needs(learner, offer.embodiment):
                self._take_offer(learner, offer)

    def _take_order(self, learner: str, order: SignedRecord) -> None:
        try:
            self._weights.set_pin(learner, order)
            self._orders[learner] = order
        except OSError as error:  # it comes again with the next offer
            logger.error("relay.order_not_kept: %s", error)

    def _report(self) -> MetricsReport:
        scalars = {
            "robots": float(len(self.server.peers("robot"))),
            **self._weights.scalars(),
            **self.server.scalars(),
        }
        return MetricsReport(node=self._config.name, count=0, scalars=scalars)

    # What the tunnel hands over (its thread; see TunnelHandler)

    def refusal_reason(self, hello: Hello) -> str:
        if hello.role != "robot":
            return f"a relay lets robots in; a {hello.role} connects to the cloud itself"
        self._hellos[hello.name] = hello
        return ""

    def on_peer_opened(self, peer: Peer) -> None:
        hello = self._hellos.pop(peer.name)
        transit = ForwardBuffer(peer, hello.stream, self.server)
        passage = UpstreamSession(self._client(hello, transit), transit, self.server, self._passages.get(peer.name))
        self._passages[peer.name] = passage
        passage.start()
        self._weights.on_peer_opened(peer)

    def on_peer_closed(self, peer: Peer, reason: str) -> None:
        self._passages[peer.name].stop()
        self._weights.on_peer_closed(peer.name)

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        passage = self._passages[peer.name]
        if passage.refusal_reason:
            raise WireError(passage.refusal_reason)
        match message:
            case ChunkOffer() if payload is not None:
                passage.buffer.put(message, payload)
            case Preview() if payload is not None:
                self.server.send(peer.name, PreviewAck(robot=message.robot, camera=message.camera))
                passage.client.send_preview(message, bytes(payload))
            case WeightsRequest():
                self._weights.on_message(peer.name, message, None)
            case WeightsApplied():
                self._weights.on_message(peer.name, message, None)
                passage.forward_weights_applied(message)
            case LeaseRequest() | LeaseRelease() | OperatorReply() | RobotStatus() | EpisodeReport() | MetricsReport():
                passage.client.send(message)


def relay_main(args: Namespace) -> int:
    """``user-sys relay CONFIG --connect tcp://HOST:PORT``: serves a site until SIGTERM or Ctrl-C.

    Raises:
        ConfigError, RunError: what cannot work, in one line.
    """
    config = load(RelayConfig, args.config, args.overrides)
    check_connect_endpoint(args.connect)
    keys = load_keypair(args.keys / f"{config.name}.key")
    upstream_key = load_public_key(args.keys / f"{GATEWAY_KEY_NAME}.pub")
    relay = Relay(config, args.folder, keys, Keyring(args.keys), args.connect, upstream_key)
    stop = threading.Event()
    stop_on_signals(stop)
    console = Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    threading.Thread(
        target=_print_changes, args=(relay, config, args.connect, say, stop), name="tell", daemon=True
    ).start()
    relay.run(stop)
    return 0


def _print_changes(
    relay: Relay, config: RelayConfig, upstream: str, say: Callable[[str], None], stop: threading.Event
) -> None:
    """Says in plain words what changes."""
    link, robots = TunnelState.IDLE, frozenset[str]()
    say(f"{config.name}: listening on {config.endpoint} for the robots of this site")
    while not stop.wait(STATUS_POLL_S):
        state, now = relay.uplink.state, frozenset(peer.name for peer in relay.server.peers())
        if state is not link and state in (TunnelState.OPEN, TunnelState.LOST):
            link = state
            away = f"{upstream} is out of reach ({relay.uplink.reason}); robots go on and keep what they record"
            say(f"{config.name}: {f'connected to {upstream}' if state is TunnelState.OPEN else away}")
        for name in sorted(now ^ robots):
            say(f"{config.name}: {name} {'came in' if name in now else 'has left'}")
        robots = now
