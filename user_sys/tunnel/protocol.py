"""The states of a tunnel at both of its ends, and every transition that is allowed; docs/tunnel.md draws them.

The tunnel's wire: channels, who may say what, and messages as frames.

A client opens four connections (DEALER) to one port (ROUTER), one a channel. Their routing ids are the channel's
letter and 16 random bytes that the four share: the session. A message is one msgpack frame; those in `WITH_PAYLOAD`
are followed by exactly one frame of bulk bytes. docs/tunnel.md describes a session from its first byte to its last.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from hal.errors import HalError
from user_sys.errors import TunnelError, WireError
from user_sys.messages import (
    ChunkAck,
    ChunkOffer,
    ChunkRefusal,
    ControlMessage,
    CreditGrant,
    DevicesReport,
    EpisodeReport,
    ExperienceMessage,
    Heartbeat,
    Hello,
    LeaseRelease,
    LeaseRequest,
    Message,
    MetricsReport,
    OperatorCommand,
    OperatorReply,
    Preview,
    PreviewAck,
    PreviewRequest,
    Refusal,
    RobotStatus,
    StopMessage,
    StopRun,
    WeightsApplied,
    WeightsBlocks,
    WeightsGone,
    WeightsMessage,
    WeightsOffer,
    WeightsOfferRequest,
    WeightsProgress,
    WeightsReceived,
    WeightsRequest,
    Welcome,
)
from user_sys.tunnel.keys import Role
from user_sys.tunnel.limits import TunnelLimits


class TunnelState(enum.Enum):
    """A client's tunnel."""

    IDLE = "idle"  # not started
    CONNECTING = "connecting"  # dials, shows its key, says Hello on each channel
    OPEN = "open"  # welcome on all channels
    LOST = "lost"  # waits before it dials again
    REFUSED = "refused"  # the gateway will never have us; a person must act
    CLOSED = "closed"


class SessionState(enum.Enum):
    """A session as the gateway sees it."""

    HANDSHAKE = "greeted"  # Hello on the control channel was accepted; the other channels are awaited
    OPEN = "open"
    ENDED = "ended"


TUNNEL_TRANSITIONS: Mapping[TunnelState, frozenset[TunnelState]] = {
    TunnelState.IDLE: frozenset({TunnelState.CONNECTING, TunnelState.CLOSED}),
    TunnelState.CONNECTING: frozenset({TunnelState.OPEN, TunnelState.LOST, TunnelState.REFUSED, TunnelState.CLOSED}),
    TunnelState.OPEN: frozenset({TunnelState.LOST, TunnelState.REFUSED, TunnelState.CLOSED}),
    TunnelState.LOST: frozenset({TunnelState.CONNECTING, TunnelState.CLOSED}),
    TunnelState.REFUSED: frozenset({TunnelState.CLOSED}),
    TunnelState.CLOSED: frozenset(),
}
SESSION_TRANSITIONS: Mapping[SessionState, frozenset[SessionState]] = {
    SessionState.HANDSHAKE: frozenset({SessionState.OPEN, SessionState.ENDED}),
    SessionState.OPEN: frozenset({SessionState.ENDED}),
    SessionState.ENDED: frozenset(),
}

StateT = TypeVar("StateT", bound=enum.Enum)


class StateMachine(Generic[StateT]):
    """Holds a state and lets it change only as its table says. The caller sees to locking."""

    def __init__(self, name: str, initial: StateT, table: Mapping[StateT, frozenset[StateT]]) -> None:
        self.state = initial
        self._name, self._table = name, table

    def transition_to(self, state: StateT) -> None:
        """Raises TunnelError when the table knows no way from the present state to `state`."""
        if state not in self._table[self.state]:
            raise TunnelError(f"{self._name} cannot go from {self.state.value} to {state.value}")
        self.state = state


AnyMessage: TypeAlias = ControlMessage | WeightsMessage | ExperienceMessage
Payload: TypeAlias = bytes | memoryview

SESSION_BYTES = 16
E_STOP = "e-stop"
MAX_PARTS = 2


class Channel(enum.Enum):
    """In the order of their priority; the value is the first byte of a connection's routing id."""

    CONTROL = b"c"
    STOP = b"s"  # e-stops and their confirmations, behind nothing else
    WEIGHTS = b"w"
    EXPERIENCE = b"e"


@dataclass(frozen=True, eq=False)
class Envelope:
    """A message and the payload that its type asks for."""

    message: AnyMessage
    payload: Payload | None = None


WITH_PAYLOAD = (ChunkOffer, Preview, WeightsBlocks)
WEIGHTS_TRANSFER = (WeightsOfferRequest, WeightsOffer, WeightsRequest, WeightsBlocks, WeightsGone, WeightsProgress)
"""Offers, requests and parcels of weights; said anew in each session."""
CREDIT_EXEMPT = (Hello, Welcome, Refusal, Heartbeat, CreditGrant)
"""Needs no credit: the session lives by them, and none of them waits in a queue."""
DROPPED_ON_DISCONNECT = (OperatorCommand, PreviewRequest, LeaseRequest, LeaseRelease, Preview)
"""Worth nothing, or dangerous, when they arrive late: never kept over a lost connection."""

ALLOWED_MESSAGES: dict[Role, tuple[type[Message], ...]] = {
    "robot": (
        *(Hello, Heartbeat, CreditGrant, LeaseRequest, LeaseRelease, OperatorReply, RobotStatus, EpisodeReport),
        *(DevicesReport, MetricsReport, ChunkOffer, Preview, WeightsApplied, WeightsReceived, WeightsRequest),
    ),
    "learner": (
        *(Hello, Heartbeat, CreditGrant, DevicesReport, MetricsReport),
        *(WeightsOffer, WeightsBlocks, WeightsGone),
    ),
    "relay": (Hello, Heartbeat, CreditGrant, MetricsReport, WeightsRequest),
    "console": (Hello, Heartbeat, CreditGrant, OperatorCommand, PreviewRequest, StopRun, PreviewAck),
}
"""What each role may send to the gateway."""

_DECODERS: dict[Channel, msgspec.msgpack.Decoder[Any]] = {
    Channel.CONTROL: msgspec.msgpack.Decoder(ControlMessage),
    Channel.STOP: msgspec.msgpack.Decoder(StopMessage),
    Channel.WEIGHTS: msgspec.msgpack.Decoder(WeightsMessage),
    Channel.EXPERIENCE: msgspec.msgpack.Decoder(ExperienceMessage),
}
_ENCODER = msgspec.msgpack.Encoder()
_CHANNEL_OF: dict[type[Message], Channel] = {
    **dict.fromkeys((WeightsApplied, WeightsReceived), Channel.WEIGHTS),
    **dict.fromkeys(WEIGHTS_TRANSFER, Channel.WEIGHTS),
    **dict.fromkeys((ChunkOffer, ChunkAck, ChunkRefusal, Preview, PreviewAck), Channel.EXPERIENCE),
}


class _HelloVersion(msgspec.Struct, frozen=True, tag_field="type", tag="hello"):
    protocol: int


def new_session_id() -> bytes:
    return secrets.token_bytes(SESSION_BYTES)


def channel_of(message: AnyMessage) -> Channel:
    """The channel that a message travels on. Hello, Welcome, Refusal and Grant go on all; their sender says which."""
    if isinstance(message, OperatorCommand | OperatorReply) and message.order == E_STOP:
        return Channel.STOP
    return _CHANNEL_OF.get(type(message), Channel.CONTROL)


_COALESCING_KEYS: dict[type[Message], Callable[[Any], Hashable]] = {
    RobotStatus: lambda status: ("status", status.robot),
    OperatorCommand: lambda order: (
        (order.order, order.robot, order.operator, order.press) if order.order in ("drive", E_STOP) else None
    ),
    PreviewRequest: lambda request: ("watch", request.robot),
    Preview: lambda preview: ("preview", preview.robot, preview.camera),
    WeightsOffer: lambda offer: (WeightsOffer, offer.learner, offer.greeting),  # a greeting says more than the newest
    **{kind: type for kind in (WeightsProgress, ChunkAck)},
}


def coalescing_key(message: AnyMessage) -> Hashable:
    """Equal for messages of which only the newest matters; None where each one does."""
    key = _COALESCING_KEYS.get(type(message))
    return None if key is None else key(message)


def encode_envelope(envelope: Envelope) -> list[Payload]:
    """The frames of a message."""
    header = _ENCODER.encode(envelope.message)
    return [header] if envelope.payload is None else [header, envelope.payload]


def decode_envelope(channel: Channel, frames: list[Payload], limits: TunnelLimits) -> Envelope:
    """The message in `frames`; the payload shares memory with its frame.

    Raises:
        WireError: no message of this channel, too long, or with a wrong number of frames.
    """
    if not 1 <= len(frames) <= MAX_PARTS:
        raise WireError(f"a message of {len(frames)} frames; allowed are 1 to {MAX_PARTS}")
    if len(frames[0]) > limits.max_record_bytes:
        raise WireError(f"a record of {len(frames[0])} bytes; the limit is {limits.max_record_bytes}")
    try:
        message = _DECODERS[channel].decode(frames[0])
    except (msgspec.MsgspecError, RecursionError, UnicodeError, ValueError, HalError) as error:
        raise WireError(f"not a message of the {channel.name.lower()} channel: {str(error)[:200]}") from None
    if not isinstance(message, CREDIT_EXEMPT) and channel_of(message) is not channel:
        raise WireError(f"not a message of the {channel.name.lower()} channel: {type(message).__name__}")
    if isinstance(message, WITH_PAYLOAD) != (len(frames) == MAX_PARTS):
        raise WireError(f"{type(message).__name__} came with {len(frames) - 1} payload frames")
    return Envelope(message, frames[1] if len(frames) == MAX_PARTS else None)


def credit_cost_bytes(frames: list[Payload]) -> int:
    """What a message costs in flow control: the bytes of its payload, or where it has none, of its record."""
    return len(frames[-1])


def hello_protocol_version(frame: Payload) -> int | None:
    """The version in a Hello that does not decode otherwise, or None: other versions may have other fields."""
    try:
        return msgspec.msgpack.decode(frame, type=_HelloVersion).protocol
    except (msgspec.MsgspecError, RecursionError, UnicodeError, ValueError):
        return None
