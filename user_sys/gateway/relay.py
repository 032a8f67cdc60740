"""``user-sys relay``: a gateway for the robots of one site, which passes on what they say and fetches weights once.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from hal.audit import AUDIT, AuditLog
from hal.signals import stop_on_signals
from user_sys.config import load
from user_sys.errors import Refused, WireError
from user_sys.gateway.desks import MAX_DESKS, WeightsDesks
from user_sys.gateway.passage import Passage, Transit
from user_sys.learners import LEARNER, is_learner
from user_sys.messages import (
    PROTOCOL_VERSION,
    ChunkOffer,
    EpisodeReport,
    Hello,
    LeaseRelease,
    LeaseRequest,
    MetricsReport,
    OperatorReply,
    Preview,
    PreviewAck,
    RobotStatus,
    WeightsApplied,
    WeightsAsk,
    WeightsGone,
    WeightsGrains,
    WeightsOffer,
    WeightsProgress,
    WeightsReceived,
    WeightsRequest,
)
from user_sys.tunnel.client import TunnelClient, TunnelState
from user_sys.tunnel.keys import KeyPair, Keyring, load_keypair, load_public_key
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.local import require_dialled, require_listening
from user_sys.tunnel.server import Peer, TunnelServer
from user_sys.tunnel.wire import AnyMessage, Envelope, Payload
from user_sys.weights.records import Signed

logger = logging.getLogger(__name__)

TICK_S = 0.05
REPORT_S = 1.0
TELL_S = 0.5
GATEWAY = "gateway"  # the cloud's name among the keys
CLOSE_S = 10.0
MAX_ASKED = 4096  # parcels under way, or that nothing came of


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
        require_listening(self.endpoint)


class Relay:
    """Serves one site; see `run`."""

    def __init__(
        self, config: RelayConfig, folder: Path, keys: KeyPair, ring: Keyring, upstream: str, upstream_key: str
    ) -> None:
        """Raises OSError: `folder` cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        self._config, self._keys = config, keys
        self._upstream, self._upstream_key = upstream, upstream_key
        self._audit = AuditLog(folder / AUDIT)
        self.server = TunnelServer(
            config.endpoint, keys, ring, self, config.tunnel, config.name, self._audit.write, self._cloud_unix_ns
        )
        self._orders: dict[str, Signed] = {}  # of each learner, that were taken down
        self._later: dict[str, WeightsOffer] = {}  # the newest of learners for whose robots none has come yet
        self._asked: dict[bytes, str] = {}  # parcels that were asked for, and for which learner
        self._noting = threading.Lock()  # the desks' threads ask
        self._offered: set[str] = set()  # the learners whose weights the cloud has offered since the start
        self._weights = WeightsDesks(folder / "weights", self._send, config.weights_kept, self._robots)
        self.uplink = self._client(Hello(protocol=PROTOCOL_VERSION, role="relay", name=config.name))
        self._hellos: dict[str, Hello] = {}
        self._passages: dict[str, Passage] = {}

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
                    raise Refused(self.uplink.reason)
                for part in (self.server, self._weights):
                    if part.failure is not None:
                        raise part.failure
                if time.monotonic() >= next_report:
                    next_report = time.monotonic() + REPORT_S
                    self._weights.look_for_order()
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
            passage.end()
        for passage in passages:
            passage.join(CLOSE_S)
        self.uplink.close()
        if self._weights.started:
            self._weights.close()
        self._audit.close()

    def _client(self, hello: Hello, transit: Transit | None = None) -> TunnelClient:
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
        if isinstance(message, WeightsAsk | WeightsProgress | WeightsReceived):
            return False
        return self.server.send(name, message, payload)

    def _note(self, parcel: bytes, learner: str) -> None:
        """Which desk a parcel is for, that was asked for now."""
        with self._noting:
            while len(self._asked) >= MAX_ASKED and parcel not in self._asked:
                del self._asked[next(iter(self._asked))]
            self._asked[parcel] = learner

    def _take_weights(self, envelope: Envelope | None) -> None:
        match envelope.message if envelope is not None else None:
            case WeightsOffer() as offer:
                self._take_offer(offer.learner or LEARNER, offer)
            case WeightsGrains() | WeightsGone() as message if learner := self._asked.get(message.parcel):
                self._weights.received(learner, message, envelope.payload if envelope else None)

    def _take_offer(self, learner: str, offer: WeightsOffer) -> None:
        if not is_learner(learner):
            logger.error("relay.no_learner name=%r", learner)
            return
        if not self._needs(learner, offer.embodiment):
            if learner in self._later or len(self._later) < MAX_DESKS:
                self._later[learner] = offer
            return
        self._later.pop(learner, None)
        if offer.greeting or learner not in self._offered:  # what was asked for over an earlier link will not come
            self._weights.learner_opened(learner, offer.embodiment)
        self._offered.add(learner)
        if offer.order is not None and offer.order != self._orders.get(learner):
            self._take_order(learner, offer.order)
        self._weights.received(learner, offer, None)

    def _needs(self, learner: str, embodiment: str) -> bool:
        """Whether a robot that a learner learns for is here, or was: its weights lie on the disk."""
        here = {"" if peer.spec is None else peer.spec.embodiment for peer in self._robots()}
        unsaid = learner == LEARNER and "" in here  # the first learner's robots need not say what they are
        return not embodiment or embodiment in here or unsaid or learner in self._weights.kept()

    def _take_later(self) -> None:
        """Takes what was offered before the first robot came that it is for."""
        for learner, offer in list(self._later.items()):
            if self._needs(learner, offer.embodiment):
                self._take_offer(learner, offer)

    def _take_order(self, learner: str, order: Signed) -> None:
        try:
            self._weights.give(learner, order)
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

    def objection(self, hello: Hello) -> str:
        if hello.role != "robot":
            return f"a relay lets robots in; a {hello.role} connects to the cloud itself"
        self._hellos[hello.name] = hello
        return ""

    def peer_opened(self, peer: Peer) -> None:
        hello = self._hellos.pop(peer.name)
        transit = Transit(peer, hello.stream, self.server)
        passage = Passage(self._client(hello, transit), transit, self.server, self._passages.get(peer.name))
        self._passages[peer.name] = passage
        passage.start()
        self._weights.opened(peer)

    def peer_closed(self, peer: Peer, reason: str) -> None:
        self._passages[peer.name].end()
        self._weights.closed(peer.name)

    def received(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        passage = self._passages[peer.name]
        if passage.refused:
            raise WireError(passage.refused)
        match message:
            case ChunkOffer() if payload is not None:
                passage.transit.offer(message, payload)
            case Preview() if payload is not None:
                self.server.send(peer.name, PreviewAck(robot=message.robot, camera=message.camera))
                passage.client.offer_preview(message, bytes(payload))
            case WeightsRequest():
                self._weights.received(peer.name, message, None)
            case WeightsApplied():
                self._weights.received(peer.name, message, None)
                passage.acts(message)
            case LeaseRequest() | LeaseRelease() | OperatorReply() | RobotStatus() | EpisodeReport() | MetricsReport():
                passage.client.send(message)


def relay_main(args: Namespace) -> int:
    """``user-sys relay CONFIG --connect tcp://HOST:PORT``: serves a site until SIGTERM or Ctrl-C.

    Raises:
        ConfigError, RunError: what cannot work, in one line.
    """
    config = load(RelayConfig, args.config, args.overrides)
    require_dialled(args.connect)
    keys = load_keypair(args.keys / f"{config.name}.key")
    upstream_key = load_public_key(args.keys / f"{GATEWAY}.pub")
    relay = Relay(config, args.folder, keys, Keyring(args.keys), args.connect, upstream_key)
    stop = threading.Event()
    stop_on_signals(stop)
    console = Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    threading.Thread(target=_tell, args=(relay, config, args.connect, say, stop), name="tell", daemon=True).start()
    relay.run(stop)
    return 0


def _tell(relay: Relay, config: RelayConfig, upstream: str, say: Callable[[str], None], stop: threading.Event) -> None:
    """Says in plain words what changes."""
    link, robots = TunnelState.IDLE, frozenset[str]()
    say(f"{config.name}: listening on {config.endpoint} for the robots of this site")
    while not stop.wait(TELL_S):
        state, now = relay.uplink.state, frozenset(peer.name for peer in relay.server.peers())
        if state is not link and state in (TunnelState.OPEN, TunnelState.LOST):
            link = state
            away = f"{upstream} is out of reach ({relay.uplink.reason}); robots go on and keep what they record"
            say(f"{config.name}: {f'connected to {upstream}' if state is TunnelState.OPEN else away}")
        for name in sorted(now ^ robots):
            say(f"{config.name}: {name} {'came in' if name in now else 'has left'}")
        robots = now
