"""The bounds of a tunnel. Each end has its own: what a peer may send is what this end has granted it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from user_sys.errors import ConfigError

MAX_CHUNK_BYTES = 12 << 20
"""No encoded chunk is larger, and each gateway takes one of this size: otherwise it would be sent for ever."""
MESSAGE_OVERHEAD_BYTES = 64 << 10  # of a message beside its payload's own bytes: encryption


def _require_positive(limits: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(limits, name) < math.inf:
            raise ConfigError(f"{name} is {getattr(limits, name):g}; it must be above 0, and finite")


@dataclass(frozen=True)
class ChannelLimits:
    """The bounds of one channel at one end.

    Attributes:
        window_messages, window_bytes: what the other end may have under way to us before we take some of it in. The
            last message may exceed the bytes, so that one larger than the window can pass at all.
        queue_messages: messages that wait here to be sent, for each peer.
        bytes_per_s: how fast this end sends, averaged over a quarter of a second; 0 is as fast as it can.

    ConfigError where nothing could ever be sent.
    """

    window_messages: int = 64
    window_bytes: int = 16 << 20
    queue_messages: int = 4096
    bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        _require_positive(self, "window_messages", "window_bytes", "queue_messages")
        if not 0 <= self.bytes_per_s < math.inf:
            raise ConfigError(f"bytes_per_s is {self.bytes_per_s:g}; 0 is without a limit, anything above is one")


@dataclass(frozen=True)
class TunnelLimits:
    """The bounds of all channels, and the times after which a peer is given up.

    Attributes:
        max_message_bytes: the largest frame, and the most that a peer may send of a message before it is complete; one
            that sends more is disconnected. It bounds what a peer can make this end hold. ConfigError where a chunk of
            `MAX_CHUNK_BYTES` would not fit.
        max_record_bytes: the largest message frame, without its payload.
        pipe_messages: libzmq's high-water mark of each connection and direction.
        heartbeat_s: the client's heartbeat interval.
        dead_after_s: silence on the control channel that ends a session.
        stuck_after_s: a bulk connection on which nothing has come for so long, or whose other end has not acknowledged
            bytes for so long, ends the session.
        handshake_s: from the first byte to the end of the CURVE handshake, and from Hello to Welcome.
        backoff_min_s, backoff_max_s: the pause before a new connection is drawn between zero and a bound that starts
            with the first and doubles up to the second.
    """

    control: ChannelLimits = ChannelLimits(window_messages=1024, window_bytes=4 << 20)
    stop: ChannelLimits = ChannelLimits(window_messages=256, window_bytes=1 << 20, queue_messages=1024)
    weights: ChannelLimits = ChannelLimits(window_bytes=32 << 20)
    experience: ChannelLimits = ChannelLimits()
    max_message_bytes: int = 16 << 20
    max_record_bytes: int = 256 << 10
    pipe_messages: int = 64
    heartbeat_s: float = 1.0
    dead_after_s: float = 5.0
    stuck_after_s: float = 20.0
    handshake_s: float = 5.0
    backoff_min_s: float = 0.1
    backoff_max_s: float = 5.0

    def __post_init__(self) -> None:
        _require_positive(self, "max_record_bytes", "pipe_messages")
        _require_positive(self, "heartbeat_s", "dead_after_s", "stuck_after_s", "handshake_s", "backoff_max_s")
        if not 0 <= self.backoff_min_s <= self.backoff_max_s:
            raise ConfigError(
                f"backoff_min_s is {self.backoff_min_s:g}; it must lie between 0 and backoff_max_s, which is "
                f"{self.backoff_max_s:g}"
            )
        least = MAX_CHUNK_BYTES + MESSAGE_OVERHEAD_BYTES
        if self.max_message_bytes < least:
            raise ConfigError(f"max_message_bytes is {self.max_message_bytes}; chunks need {least} at least")
