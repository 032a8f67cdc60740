"""The offset between a client's monotonic clock and the gateway's, from heartbeats that are echoed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from user_sys.messages import Heartbeat

WINDOW = 16


@dataclass(frozen=True)
class ClockEstimate:
    """Gateway's Unix time = our monotonic time + `offset_ns`, wrong by at most half of `rtt_ns`."""

    offset_ns: int
    rtt_ns: int

    def gateway_unix_ns(self, t_monotonic_ns: int) -> int:
        return t_monotonic_ns + self.offset_ns


class ClockEstimator:
    """Trusts the quickest of the last `WINDOW` round trips: it waited least (NTP's clock filter, RFC 5905 §10)."""

    def __init__(self) -> None:
        self._samples: deque[ClockEstimate] = deque(maxlen=WINDOW)
        self.estimate: ClockEstimate | None = None

    def add(self, echo: Heartbeat, now_ns: int) -> None:
        """Takes an echoed heartbeat that arrived at `now_ns` on our monotonic clock; one from the future is ignored."""
        rtt_ns = now_ns - echo.t_client_ns
        if rtt_ns < 0:
            return
        self._samples.append(ClockEstimate(echo.t_gateway_unix_ns - echo.t_client_ns - rtt_ns // 2, rtt_ns))
        self.estimate = min(self._samples, key=lambda sample: sample.rtt_ns)
