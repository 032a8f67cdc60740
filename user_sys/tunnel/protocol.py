"""The tunnel's protocol: session states, channels, permissions of each role, and messages as frames.

A client opens one connection (DEALER) for each of four channels to one port (ROUTER). Their routing ids are the
channel's letter and 16 random bytes that the four share: the session id. A message is one msgpack frame; a message in
`WITH_PAYLOAD` has one more frame of bulk bytes. docs/tunnel.md describes a session.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import msgspec

from hal.errors import HalError
from user_sys.errors import WireError
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
    WeightsBlobs,
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
from user_sys.tunnel.limits import ChannelLimits, TunnelLimits


class TunnelState(enum.Enum):
    """State of a client's tunnel."""

    IDLE = "idle"  # not started
    CONNECTING = "connecting"  # connects, authenticates, sends Hello on each channel
    OPEN = "open"  # all channels are welcomed
    LOST = "lost"  # pauses before it connects again
    REFUSED = "refused"  # the gateway refuses this client for good; a person must act
    CLOSED = "closed"


class SessionState(enum.Enum):
    """State of a session at the gateway."""

    HANDSHAKE = "handshake"  # Hello on the control channel was accepted; the other channels follow
    OPEN = "open"
    ENDED = "ended"


AnyMessage: TypeAlias = ControlMessage | WeightsMessage | ExperienceMessage
Payload: TypeAlias = bytes | memoryview

SESSION_BYTES = 16
E_STOP = "e-stop"
MAX_PARTS = 2


class Channel(enum.Enum):
    """The channels in order of priority. The value is the first byte of a connection's routing id."""

    CONTROL = b"c"
    STOP = b"s"  # only e-stops and their confirmations, so that no other message delays them
    WEIGHTS = b"w"
    EXPERIENCE = b"e"


@dataclass(frozen=True, eq=False)
class Envelope:
    """A message and the payload that its type requires."""

    message: AnyMessage
    payload: Payload | None = None

    @cached_property
    def record(self) -> bytes:
        """The encoded message, its first frame."""
        return _ENCODER.encode(self.message)


WITH_PAYLOAD = (ChunkOffer, Preview, WeightsBlobs)
WEIGHTS_TRANSFER = (WeightsOfferRequest, WeightsOffer, WeightsRequest, WeightsBlobs, WeightsGone, WeightsProgress)
"""The transfer of weights; each session starts it again."""
CREDIT_EXEMPT = (Hello, Welcome, Refusal, Heartbeat, CreditGrant)
"""Messages that maintain the session: they need no credit and bypass the queues."""
DROPPED_ON_DISCONNECT = (OperatorCommand, PreviewRequest, LeaseRequest, LeaseRelease, Preview)
"""Messages that are useless or dangerous when late: a lost connection drops them."""

ALLOWED_MESSAGES: dict[Role, tuple[type[Message], ...]] = {
    "robot": (
        *(Hello, Heartbeat, CreditGrant, LeaseRequest, LeaseRelease, OperatorReply, RobotStatus, EpisodeReport),
        *(DevicesReport, MetricsReport, ChunkOffer, Preview, WeightsApplied, WeightsReceived, WeightsRequest),
    ),
    "learner": (
        *(Hello, Heartbeat, CreditGrant, DevicesReport, MetricsReport),
        *(WeightsOffer, WeightsBlobs, WeightsGone),
    ),
    "relay": (Hello, Heartbeat, CreditGrant, MetricsReport, WeightsRequest),
    "policy": (Hello, Heartbeat, CreditGrant, WeightsApplied, WeightsReceived, WeightsRequest),
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


def channel_limits(limits: TunnelLimits) -> dict[Channel, ChannelLimits]:
    return {channel: getattr(limits, channel.name.lower()) for channel in Channel}


def channel_of(message: AnyMessage) -> Channel:
    """The channel of a message. Hello, Welcome, Refusal, Heartbeat and CreditGrant use every channel."""
    if isinstance(message, OperatorCommand | OperatorReply) and message.order == E_STOP:
        return Channel.STOP
    return _CHANNEL_OF.get(type(message), Channel.CONTROL)


_COALESCING_KEYS: dict[type[Message], Callable[[Any], Hashable]] = {
    RobotStatus: lambda status: ("status", status.robot),
    OperatorCommand: lambda order: (
        (order.order, order.robot, order.operator, order.press) if order.order in ("drive", E_STOP) else None
    ),
    PreviewRequest: lambda request: ("watch", request.robot, request.pose),
    Preview: lambda preview: ("preview", preview.robot, preview.camera),
    OperatorReply: lambda reply: ("confirmed", reply.robot) if reply.order == E_STOP else None,  # a press is repeated
    WeightsApplied: lambda report: (WeightsApplied, report.robot),
    WeightsOffer: lambda offer: (WeightsOffer, offer.learner, offer.greeting),  # a later offer lacks the greeting flag
    MetricsReport: lambda report: (MetricsReport, report.node) if not report.count else None,  # a learner's are a curve
    **{kind: type for kind in (WeightsProgress, ChunkAck, DevicesReport)},
}


def coalescing_key(message: AnyMessage) -> Hashable:
    """A key that is equal for messages of which only the newest matters; None if every message matters."""
    key = _COALESCING_KEYS.get(type(message))
    return None if key is None else key(message)


def encode_envelope(envelope: Envelope) -> list[Payload]:
    """The frames of a message."""
    return [envelope.record] if envelope.payload is None else [envelope.record, envelope.payload]


def decode_envelope(channel: Channel, frames: list[Payload], limits: TunnelLimits) -> Envelope:
    """The message in `frames`; the payload shares memory with its frame.

    Raises:
        WireError: not a message of this channel, too long, or a wrong number of frames.
    """
    if not 1 <= len(frames) <= MAX_PARTS:
        raise WireError(f"a message has {len(frames)} frames; the limit is {MAX_PARTS}")
    if len(frames[0]) > limits.max_record_bytes:
        raise WireError(f"a record has {len(frames[0])} bytes; the limit is {limits.max_record_bytes}")
    try:
        message = _DECODERS[channel].decode(frames[0])
    except (msgspec.MsgspecError, RecursionError, UnicodeError, ValueError, HalError) as error:
        raise WireError(f"not a message of the {channel.name.lower()} channel: {str(error)[:200]}") from None
    if not isinstance(message, CREDIT_EXEMPT) and channel_of(message) is not channel:
        raise WireError(f"not a message of the {channel.name.lower()} channel: {type(message).__name__}")
    if isinstance(message, WITH_PAYLOAD) != (len(frames) == MAX_PARTS):
        raise WireError(f"{type(message).__name__} with {len(frames) - 1} payload frames")
    return Envelope(message, frames[1] if len(frames) == MAX_PARTS else None)


def credit_cost_bytes(frames: list[Payload]) -> int:
    """The cost of a message in flow control: the bytes of its payload, or of its record if it has no payload."""
    return len(frames[-1])


def hello_protocol_version(frame: Payload) -> int | None:
    """The protocol version in a Hello of any version, whose other fields may differ; None if it is not a Hello."""
    try:
        return msgspec.msgpack.decode(frame, type=_HelloVersion).protocol
    except (msgspec.MsgspecError, RecursionError, UnicodeError, ValueError):
        return None
