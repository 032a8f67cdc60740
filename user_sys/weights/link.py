"""What publisher and receiver need of a transport."""

from __future__ import annotations

from typing import Protocol

from user_sys.messages import WeightsMessage
from user_sys.tunnel.wire import Envelope, Payload


class WeightsLink(Protocol):
    """A channel for messages about weights. `user_sys.tunnel.client.TunnelClient` is one."""

    def send_weights(self, message: WeightsMessage, payload: Payload | None = None) -> bool:
        """Queues a message and returns at once; False when it cannot be sent now."""

    def receive_weights(self, timeout_s: float) -> Envelope | None:
        """The next message, or None after `timeout_s`."""
