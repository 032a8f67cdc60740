"""What goes over a channel, counted, and how long it took: bounded in memory whatever passes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

STEPS_PER_OCTAVE = 2
FIRST_S = 1e-6
BUCKETS = 56  # from a microsecond to three minutes in steps of 41%; the last one takes all that is longer


class Histogram:
    """Durations in buckets of logarithmic width. One thread adds; any may read, and sees a recent state."""

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.max_s = 0.0

    def add(self, seconds: float) -> None:
        at = math.ceil(STEPS_PER_OCTAVE * math.log2(seconds / FIRST_S)) if seconds > FIRST_S else 0
        self.counts[min(at, BUCKETS - 1)] += 1
        self.max_s = max(self.max_s, seconds)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile_s(self, share: float) -> float:
        """The least bucket bound that `share` of all durations do not exceed; 0 where there are none."""
        left = share * self.count
        for at, count in enumerate(self.counts):
            left -= count
            if left <= 0 and count:
                return min(FIRST_S * 2 ** (at / STEPS_PER_OCTAVE), self.max_s)
        return 0.0


@dataclass
class ChannelGauges:
    """One channel at one end. `wait`: from the order to send until libzmq has it; `settle`: from then to the answer."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    refused: int = 0
    wait: Histogram = field(default_factory=Histogram)
    settle: Histogram = field(default_factory=Histogram)

    def scalars(self, channel: str) -> dict[str, float]:
        """For metrics: ``<channel>/sent`` and so on; durations in milliseconds, where there were any."""
        found: dict[str, float] = {
            f"{channel}/sent": self.sent,
            f"{channel}/sent_bytes": self.sent_bytes,
            f"{channel}/received": self.received,
            f"{channel}/received_bytes": self.received_bytes,
            f"{channel}/refused": self.refused,
        }
        for name, histogram in (("wait", self.wait), ("settle", self.settle)):
            if histogram.count:
                found[f"{channel}/{name}_p50_ms"] = 1e3 * histogram.quantile_s(0.5)
                found[f"{channel}/{name}_p99_ms"] = 1e3 * histogram.quantile_s(0.99)
        return found
