"""A session as the gateway holds it: who the peer is, what waits for it, and what it may send."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hal.spec import RobotSpec
from user_sys.messages import ChunkAck, ChunkRefusal, Grant, Heartbeat
from user_sys.tunnel.credit import Window
from user_sys.tunnel.gauges import ChannelGauges
from user_sys.tunnel.keys import Role
from user_sys.tunnel.limits import ChannelLimits, TunnelLimits
from user_sys.tunnel.outlet import Outlet
from user_sys.tunnel.states import SESSION, SessionState, StateMachine
from user_sys.tunnel.tcp_state import silence_s
from user_sys.tunnel.wire import AnyMessage, Channel, Envelope, Payload, encode

SendTo = Callable[[list[Payload]], bool]


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
class Memory:
    """What the gateway remembers of a peer from one session to the next.

    Attributes:
        stream, durable: a robot's outbox, and the newest chunk of it that was acknowledged; -1 where that is not known.
    """

    stream: str = ""
    durable: int = -1


def channel_limits(limits: TunnelLimits) -> dict[Channel, ChannelLimits]:
    return {
        Channel.CONTROL: limits.control,
        Channel.STOP: limits.stop,
        Channel.WEIGHTS: limits.weights,
        Channel.EXPERIENCE: limits.experience,
    }


class Session:
    """One thread calls it, except `offer` and `release`, which any may."""

    def __init__(
        self, peer: Peer, limits: TunnelLimits, memory: Memory, gauges: dict[Channel, ChannelGauges], stream: str
    ) -> None:
        self.peer, self.memory, self.stream = peer, memory, stream
        self.heard_s = time.monotonic()
        self.machine = StateMachine(f"the session of {peer.name}", SessionState.GREETED, SESSION)
        self.greeted = {Channel.CONTROL}
        self.ident = threading.get_ident()
        self.outlets: dict[Channel, Outlet] = {}
        self.windows: dict[Channel, Window] = {}
        for channel, bounds in channel_limits(limits).items():
            self.outlets[channel] = Outlet(bounds, gauges[channel])
            self.windows[channel] = Window(bounds)
        self.descriptors: dict[Channel, int] = {}  # libzmq's connections for bulk
        self._echo: dict[Channel, Heartbeat] = {}

    @property
    def is_open(self) -> bool:
        return self.machine.state is SessionState.OPEN

    def heartbeat(self, beat: Heartbeat, unix_ns: int) -> None:
        """The peer lives; the echo goes with the next flush of each channel.

        On all of them, whichever ways its own beats are held up: only silence of a connection itself ends the session.
        """
        self.heard_s = time.monotonic()
        echo = Heartbeat(t_client_ns=beat.t_client_ns, t_gateway_unix_ns=unix_ns)
        self._echo = dict.fromkeys(self.greeted, echo)

    def fallen_silent(self, limits: TunnelLimits) -> str:
        """Which connection has brought nothing for too long, in words; empty while all are alive."""
        silent_s = time.monotonic() - self.heard_s
        if silent_s > limits.dead_after_s:
            return f"silent for {silent_s:.1f} s"
        for channel, descriptor in self.descriptors.items():
            if (silent_s := silence_s(descriptor)) > limits.stuck_after_s:
                return f"its {channel.name.lower()} connection was silent for {silent_s:.1f} s"
        return ""

    def flush(self, channel: Channel, send: SendTo) -> bool:
        """Sends an echo, a grant, and what is queued on a channel; True when libzmq can take no more."""
        if channel not in self.greeted:
            return False
        echo = self._echo.get(channel)
        if echo is not None and send(encode(Envelope(echo))):
            del self._echo[channel]
        window = self.windows[channel]
        grant = window.due()
        if grant is not None and send(encode(Envelope(grant))):
            window.granted(grant)
        return self.outlets[channel].flush(send)

    def send_now(self, channel: Channel, envelope: Envelope, send: SendTo) -> bool:
        """As `Outlet.send_now`."""
        return self.outlets[channel].send_now(envelope, send)

    def grant(self, channel: Channel, grant: Grant) -> None:
        self.outlets[channel].grant(grant)

    def remember(self, message: AnyMessage) -> None:
        """Notes which chunks the peer need not send again, even if this answer is lost.

        A refusal must not be lost: after one, nothing of the stream is skipped, so that it is given again.
        """
        if isinstance(message, ChunkRefusal):
            self.stream = self.memory.stream = ""
            self.memory.durable = -1
        elif isinstance(message, ChunkAck) and self.stream:
            self.memory.stream, self.memory.durable = self.stream, message.sequence
