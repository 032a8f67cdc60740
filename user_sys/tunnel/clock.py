"""Estimates the offset and drift between a client's monotonic clock and the gateway's clock from echoed heartbeats."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from user_sys.messages import Heartbeat

WINDOW_HEARTBEATS = 16
MAX_WINDOWS = 64  # 17 minutes at one heartbeat a second
MIN_DRIFT_SPAN_NS = 60 * 1_000_000_000  # noise hides the drift over a shorter time
MAX_DRIFT = 500e-6  # a quartz clock drifts less; a larger slope is noise


@dataclass(frozen=True)
class ClockEstimate:
    """Gateway's Unix time = our monotonic time + `offset_ns`, with an error of at most half of `rtt_ns`."""

    offset_ns: int
    rtt_ns: int
    drift_ppm: float = 0.0

    def gateway_unix_ns(self, t_monotonic_ns: int) -> int:
        return t_monotonic_ns + self.offset_ns


@dataclass(frozen=True)
class _ClockSample:
    at_ns: int
    offset_ns: int
    rtt_ns: int


class ClockEstimator:
    """Uses the fastest of the last `WINDOW_HEARTBEATS` round trips (NTP's clock filter, RFC 5905 §10).

    The drift is the slope through the fastest sample of each window; the offset follows it between two samples.
    """

    def __init__(self) -> None:
        self._samples: deque[_ClockSample] = deque(maxlen=WINDOW_HEARTBEATS)
        self._window_samples: deque[_ClockSample] = deque(maxlen=MAX_WINDOWS)
        self._drift = 0.0
        self._count = 0

    def add(self, echo: Heartbeat, now_ns: int) -> None:
        """Adds an echoed heartbeat that arrived at `now_ns` on our monotonic clock. Ignores one from the future."""
        rtt_ns = now_ns - echo.t_client_ns
        if rtt_ns < 0:
            return
        self._samples.append(_ClockSample(now_ns, echo.t_gateway_unix_ns - echo.t_client_ns - rtt_ns // 2, rtt_ns))
        self._count += 1
        if self._count % WINDOW_HEARTBEATS == 0:
            self._window_samples.append(self._fastest())
            self._drift = self._slope()

    def estimate(self, now_ns: int) -> ClockEstimate | None:
        """The offset at `now_ns` on our monotonic clock; None before the first heartbeat."""
        if not self._samples:
            return None
        best = self._fastest()
        return ClockEstimate(
            best.offset_ns + round(self._drift * (now_ns - best.at_ns)), best.rtt_ns, 1e6 * self._drift
        )

    def _fastest(self) -> _ClockSample:
        return min(self._samples, key=lambda sample: sample.rtt_ns)

    def _slope(self) -> float:
        """The drift in nanoseconds a nanosecond; 0 until the samples span `MIN_DRIFT_SPAN_NS`."""
        first = self._window_samples[0]
        if self._window_samples[-1].at_ns - first.at_ns < MIN_DRIFT_SPAN_NS:
            return 0.0
        at = np.array([sample.at_ns - first.at_ns for sample in self._window_samples], np.float64)
        offsets = np.array([sample.offset_ns - first.offset_ns for sample in self._window_samples], np.float64)
        weights = 1.0 / np.array([sample.rtt_ns + 1 for sample in self._window_samples], np.float64)
        slope = float(np.polyfit(at, offsets, 1, w=weights)[0])
        return slope if abs(slope) < MAX_DRIFT else 0.0
