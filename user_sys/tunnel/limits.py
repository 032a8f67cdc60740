"""The limits of a tunnel, by which each end grants its peer credit, and checks of endpoints."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from hal.settings import Amount, Count, Positive
from user_sys.errors import ConfigError

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
_TCP = re.compile(r"tcp://(\[[^\s/\[\]]+\]|[^\s/:\[\]]+):(\d{1,5})")

MAX_CHUNK_BYTES = 12 << 20
"""The largest encoded chunk. Every gateway accepts this size; a client would resend a larger chunk for ever."""
MAX_PICTURE_BYTES = 6 << 20
"""The most bytes of the pictures in one observation for a policy server."""
MESSAGE_OVERHEAD_BYTES = 64 << 10  # encryption and framing of a message


def is_loopback(endpoint: str) -> bool:
    """Whether `endpoint` is reachable from this machine only."""
    return urlsplit(endpoint).hostname in LOOPBACK_HOSTS


def check_connect_endpoint(endpoint: str, given_as: str = "--connect") -> None:
    """Raises ConfigError unless a client can connect to `endpoint`."""
    if _port(endpoint) in (None, 0):
        raise ConfigError(
            f"{given_as} {endpoint}: expected tcp://HOST:PORT, {_hint(endpoint) or 'as the run prints at its start'}"
        )


def check_listen_endpoint(endpoint: str) -> None:
    """Raises ConfigError unless a gateway or relay can listen on the configured `endpoint`."""
    if _port(endpoint) is None:
        hint = _hint(endpoint) or "such as tcp://0.0.0.0:5555; port 0 selects a free port"
        raise ConfigError(f"endpoint: {endpoint}: expected tcp://ADDRESS:PORT, {hint}")


def _port(endpoint: str) -> int | None:
    """The port of ``tcp://HOST:PORT``; None for another string."""
    found = _TCP.fullmatch(endpoint)
    if found is None or int(found[2]) >= 1 << 16 or (found[1].startswith("[") and not _is_ipv6(found[1][1:-1])):
        return None
    return int(found[2])


def _hint(endpoint: str) -> str:
    return "an IPv6 address in brackets, such as tcp://[::1]:5555" if endpoint.count(":") > 2 else ""


def _is_ipv6(address: str) -> bool:
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class ChannelLimits:
    """The limits of one channel at one end.

    Attributes:
        window_messages, window_bytes: credit of the peer, for messages that this end has not processed yet. The last
            message may exceed the bytes, so that a message larger than the window can pass.
        queue_messages: capacity of the send queue, for each peer.
        bytes_per_s: send rate of this end, averaged over a quarter of a second; 0 means unlimited.
    """

    window_messages: Count = 64
    window_bytes: Count = 16 << 20
    queue_messages: Count = 4096
    bytes_per_s: Amount = 0.0


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
        handshake_s: from the first byte to the end of the CURVE handshake, and from Hello to Welcome on each channel.
        backoff_min_s, backoff_max_s: upper bound of the random pause before a reconnect: the first value, doubled with
            each failure up to the second.
    """

    control: ChannelLimits = ChannelLimits(window_messages=1024, window_bytes=4 << 20)
    stop: ChannelLimits = ChannelLimits(window_messages=256, window_bytes=1 << 20, queue_messages=1024)
    weights: ChannelLimits = ChannelLimits(window_bytes=32 << 20)
    experience: ChannelLimits = ChannelLimits()
    max_message_bytes: Annotated[int, Meta(ge=MAX_CHUNK_BYTES + MESSAGE_OVERHEAD_BYTES)] = 16 << 20
    max_record_bytes: Count = 256 << 10
    pipe_messages: Count = 64
    heartbeat_s: Positive = 1.0
    dead_after_s: Positive = 5.0
    stuck_after_s: Positive = 20.0
    handshake_s: Positive = 5.0
    backoff_min_s: Amount = 0.1
    backoff_max_s: Positive = 5.0

    def __post_init__(self) -> None:
        if self.backoff_min_s > self.backoff_max_s:
            raise ConfigError(
                f"backoff_min_s is {self.backoff_min_s:g}; it must be at most backoff_max_s, {self.backoff_max_s:g}"
            )
