"""The limits of a tunnel. Each end has its own and grants its peer credit by them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from user_sys.errors import ConfigError

MAX_CHUNK_BYTES = 12 << 20
"""The largest encoded chunk. Every gateway accepts this size; a client would resend a larger chunk for ever."""
MESSAGE_OVERHEAD_BYTES = 64 << 10  # encryption and framing of a message


def _require_positive(limits: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(limits, name) < math.inf:
            raise ConfigError(f"{name} is {getattr(limits, name):g}; it must be finite and above 0")


@dataclass(frozen=True)
class ChannelLimits:
    """The limits of one channel at one end. Raises ConfigError if they allow no message.

    Attributes:
        window_messages, window_bytes: credit of the peer, for messages that this end has not processed yet. The last
            message may exceed the bytes, so that a message larger than the window can pass.
        queue_messages: capacity of the send queue, for each peer.
        bytes_per_s: send rate of this end, averaged over a quarter of a second; 0 means unlimited.
    """

    window_messages: int = 64
    window_bytes: int = 16 << 20
    queue_messages: int = 4096
    bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        _require_positive(self, "window_messages", "window_bytes", "queue_messages")
        if not 0 <= self.bytes_per_s < math.inf:
            raise ConfigError(f"bytes_per_s is {self.bytes_per_s:g}; it must be finite and at least 0 (0: unlimited)")


@dataclass(frozen=True)
class TunnelLimits:
    """The limits of all channels, and the timeouts of a session.

    Attributes:
        max_message_bytes: the largest frame, and the most bytes of an incomplete message; a peer that sends more is
            disconnected. Must hold a chunk of `MAX_CHUNK_BYTES`.
        max_record_bytes: the largest record frame, without its payload.
        pipe_messages: libzmq's high-water mark of each connection and direction.
        heartbeat_s: the client's heartbeat interval.
        dead_after_s: silence on the control channel that ends a session.
        stuck_after_s: time without received bytes, or without TCP acknowledgements, on another channel that ends a
            session.
        handshake_s: from the first byte to the end of the CURVE handshake, and from Hello to Welcome.
        backoff_min_s, backoff_max_s: upper bound of the random pause before a reconnect: the first value, doubled with
            each failure up to the second.
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
                f"backoff_min_s is {self.backoff_min_s:g}; it must be between 0 and backoff_max_s, "
                f"{self.backoff_max_s:g}"
            )
        required = MAX_CHUNK_BYTES + MESSAGE_OVERHEAD_BYTES
        if self.max_message_bytes < required:
            raise ConfigError(f"max_message_bytes is {self.max_message_bytes}; chunks need at least {required}")
