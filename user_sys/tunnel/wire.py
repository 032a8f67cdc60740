"""The tunnel's wire: channels, limits, and messages as frames.

A client opens three connections (DEALER) to one port (ROUTER), one a channel. Their routing ids are the channel's
letter and 16 random bytes that the three share: the session. A message is one msgpack frame; those in `WITH_PAYLOAD`
are followed by exactly one frame of bulk bytes.

A session::

    client                                  gateway
    control:    Hello            ->         key, version, name and role are checked
                                 <-         Welcome, or Refusal: final
    weights:    Hello            ->  <-     Welcome
    experience: Hello            ->  <-     Welcome; the session is open
    control:    Heartbeat each second, echoed; five seconds of silence end the session on either side
"""

from __future__ import annotations

import enum
import errno
import secrets
import socket as sockets
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import zmq

from hal.errors import HalError
from user_sys.errors import WireError
from user_sys.messages import (
    ChunkAck,
    ChunkOffer,
    ChunkRefusal,
    ControlMessage,
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
    RobotStatus,
    StopRun,
    WatchRequest,
    WeightsApplied,
    WeightsManifest,
    WeightsMessage,
    WeightsReceived,
)
from user_sys.tunnel.keys import Role

AnyMessage: TypeAlias = ControlMessage | WeightsMessage | ExperienceMessage
Payload: TypeAlias = bytes | memoryview
Socket: TypeAlias = "zmq.Socket[bytes]"

SESSION_BYTES = 16
MAX_PARTS = 2
ZAP_DOMAIN = b"user-sys"


class Channel(enum.Enum):
    """In the order of their priority; the value is the first byte of a connection's routing id."""

    CONTROL = b"c"
    WEIGHTS = b"w"
    EXPERIENCE = b"e"


@dataclass(frozen=True)
class TunnelLimits:
    """The bounds of a tunnel; both ends use the same.

    Attributes:
        max_message_bytes: the largest frame; a peer that sends a larger one is disconnected by libzmq.
        max_record_bytes: the largest message frame, without its payload.
        window_bytes, window_chunks: experience that a robot may have under way without acknowledgement.
        queue_messages: messages that wait for one peer on one channel.
        pipe_messages: libzmq's high-water mark of each connection and direction.
        heartbeat_s: the client's heartbeat interval.
        dead_after_s: silence on the control channel that ends a session.
        handshake_s: from the first byte to the end of the CURVE handshake, and from Hello to Welcome.
        backoff_min_s, backoff_max_s: pause before a new connection, doubled each time, with a jitter of half.
    """

    max_message_bytes: int = 256 << 20
    max_record_bytes: int = 256 << 10
    window_bytes: int = 16 << 20
    window_chunks: int = 64
    queue_messages: int = 4096
    pipe_messages: int = 64
    heartbeat_s: float = 1.0
    dead_after_s: float = 5.0
    handshake_s: float = 5.0
    backoff_min_s: float = 0.1
    backoff_max_s: float = 5.0


@dataclass(frozen=True, eq=False)
class Envelope:
    """A message and the payload that its type asks for."""

    message: AnyMessage
    payload: Payload | None = None


WITH_PAYLOAD = (ChunkOffer, Preview, WeightsManifest)
PERISHABLE = (OperatorCommand, WatchRequest, LeaseRequest, LeaseRelease, Preview)
"""Worth nothing, or dangerous, when they arrive late: never kept over a lost connection."""

ALLOWED: dict[Role, tuple[type[Message], ...]] = {
    "robot": (
        *(Hello, Heartbeat, LeaseRequest, LeaseRelease, OperatorReply, RobotStatus, EpisodeReport, MetricsReport),
        *(ChunkOffer, Preview, WeightsApplied, WeightsReceived),
    ),
    "learner": (Hello, Heartbeat, MetricsReport, WeightsManifest),
    "console": (Hello, Heartbeat, OperatorCommand, WatchRequest, StopRun, PreviewAck),
}
"""What each role may send to the gateway."""

_DECODERS: dict[Channel, msgspec.msgpack.Decoder[Any]] = {
    Channel.CONTROL: msgspec.msgpack.Decoder(ControlMessage),
    Channel.WEIGHTS: msgspec.msgpack.Decoder(WeightsMessage),
    Channel.EXPERIENCE: msgspec.msgpack.Decoder(ExperienceMessage),
}
_CHANNEL_OF: dict[type[Message], Channel] = {
    **{kind: Channel.WEIGHTS for kind in (WeightsManifest, WeightsApplied, WeightsReceived)},
    **{kind: Channel.EXPERIENCE for kind in (ChunkOffer, ChunkAck, ChunkRefusal, Preview, PreviewAck)},
}


class _AnyHello(msgspec.Struct, frozen=True, tag_field="type", tag="hello"):
    protocol: int


def new_session() -> bytes:
    return secrets.token_bytes(SESSION_BYTES)


def channel_of(message: AnyMessage) -> Channel:
    """The channel that a message travels on. Hello, Welcome and Refusal go on all; their sender says which."""
    return _CHANNEL_OF.get(type(message), Channel.CONTROL)


def coalescing_key(message: AnyMessage) -> Hashable:
    """Equal for messages of which only the newest matters; None where each one does."""
    match message:
        case RobotStatus():
            return ("status", message.robot)
        case OperatorCommand(order="drive"):
            return ("drive", message.robot, message.operator)
        case WatchRequest():
            return ("watch", message.robot)
        case Preview():
            return ("preview", message.robot, message.camera)
        case WeightsManifest() | ChunkAck() | Heartbeat():
            return type(message)
    return None


def encode(envelope: Envelope) -> list[Payload]:
    """The frames of a message."""
    header = msgspec.msgpack.encode(envelope.message)
    return [header] if envelope.payload is None else [header, envelope.payload]


def decode(channel: Channel, frames: list[Payload], limits: TunnelLimits) -> Envelope:
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
    if isinstance(message, WITH_PAYLOAD) != (len(frames) == MAX_PARTS):
        raise WireError(f"{type(message).__name__} came with {len(frames) - 1} payload frames")
    return Envelope(message, frames[1] if len(frames) == MAX_PARTS else None)


def protocol_of_hello(frame: Payload) -> int | None:
    """The version in a Hello that does not decode otherwise, or None: other versions may have other fields."""
    try:
        return msgspec.msgpack.decode(frame, type=_AnyHello).protocol
    except (msgspec.MsgspecError, RecursionError, UnicodeError, ValueError):
        return None


def receive_frames(socket: Socket) -> list[zmq.Frame] | None:
    """The next message's frames without waiting, or None. Frames beyond `MAX_PARTS` + 2 are dropped as they come."""
    try:
        frames = [socket.recv(zmq.DONTWAIT, copy=False)]
    except zmq.Again:
        return None
    more = frames[0].more
    while more:
        frame = socket.recv(zmq.DONTWAIT, copy=False)
        more = frame.more
        if len(frames) < MAX_PARTS + 2:
            frames.append(frame)
    return frames


def send_frames(socket: Socket, frames: list[Payload]) -> bool:
    """Hands a message to libzmq without waiting; False when the peer is gone or its pipe is full."""
    try:
        socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH, errno.EPIPE):
            return False
        raise
    return True


def configure(socket: Socket, limits: TunnelLimits) -> None:
    """Bounds and liveness that both ends share. A half-open TCP connection is found by the kernel within 30 s."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, limits.pipe_messages)
    socket.setsockopt(zmq.RCVHWM, limits.pipe_messages)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(limits.handshake_s * 1e3))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 15)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


class Wakeup:
    """Interrupts another thread's poll: `set` from any thread, poll `fileno` for reading, then `clear`.

    After `close`, `set` does nothing.
    """

    def __init__(self) -> None:
        self._reader, self._writer = sockets.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                self._writer.send(b"\0")
            except BlockingIOError:  # full of wake-ups already: the thread will wake
                return

    def clear(self) -> None:
        try:
            while len(self._reader.recv(4096)) == 4096:
                pass
        except BlockingIOError:  # nobody called: a poll may wake for another reason
            return

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._reader.close()
            self._writer.close()
