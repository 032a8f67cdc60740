"""The governor: gives a push of weights what it may have of a machine, and no more.

Somewhere on the machine is a *victim*: the learner's training step, or the policy's inference. Its times are measured
all the while, apart for when a push is under way and when none is. While the push makes the victim slower than its
budget, the push's share is cut by a factor; while it does not, the share grows by a step. One number, the share, sets
every knob: how much of the time bulk work may run on its one thread (which bounds its use of processor and memory), and
how fast the link is filled; on a GPU, how many thread blocks a kernel has, and how much the copy engines copy at once.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from user_sys.errors import ConfigError

SAMPLES = 256  # of the victim's newest times, with and without a push
ENOUGH = 16  # samples on both sides before anything is decided
LONGEST_REST_S = 0.25
LARGEST_CHUNK_BYTES = 32 << 20
LEAST_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class GovernorConfig:
    """What a push may cost.

    Attributes:
        enabled: without it a push takes what it can get.
        budget: how much longer the victim may take while a push is under way; 0.03 is three percent.
        quantile: of the victim's times: 0.5 for a learner's step, 0.99 for inference.
        least_share: the push always gets this much, so that weights do arrive.
        cut, grow: the factor and the step by which the share moves.
        decide_s: how often it moves.
        link_bytes_per_s: what the link is filled with at a share of 1; 0 for as much as it takes.
        most_ctas: thread blocks of a kernel on a GPU at a share of 1.
    """

    enabled: bool = True
    budget: float = 0.03
    quantile: float = 0.5
    least_share: float = 0.05
    cut: float = 0.7
    grow: float = 0.05
    decide_s: float = 0.5
    link_bytes_per_s: float = 0.0
    most_ctas: int = 16

    def __post_init__(self) -> None:
        if not (0 < self.least_share <= 1 and 0 < self.cut < 1 and 0 < self.grow <= 1 and 0 < self.quantile < 1):
            raise ConfigError("governor: least_share, cut, grow and quantile lie between 0 and 1")
        if self.budget <= 0 or self.decide_s <= 0 or self.link_bytes_per_s < 0 or self.most_ctas < 1:
            raise ConfigError("governor: budget, decide_s and most_ctas are above 0, link_bytes_per_s is not below 0")


@dataclass(frozen=True)
class Decision:
    """One move: when (seconds of the governor's clock), what was measured (seconds), and the share from then on."""

    at_s: float
    idle_s: float
    pushing_s: float
    share: float


class Governor:
    """Any thread may call it. `observe` costs about a microsecond and never waits for anything but a short lock."""

    def __init__(
        self,
        config: GovernorConfig,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.share = 1.0
        self.decisions: deque[Decision] = deque(maxlen=4096)
        self._config, self._clock, self._sleep = config, clock, sleep
        self._times: tuple[deque[float], deque[float]] = (deque(maxlen=SAMPLES), deque(maxlen=SAMPLES))
        self._pushes = 0
        self._touched = False  # whether a push was under way since the last observation
        self._next_s = clock() + config.decide_s
        self._lock = threading.Lock()
        self._work = threading.local()

    def observe(self, seconds: float) -> None:
        """One time of the victim."""
        with self._lock:
            touched, self._touched = self._touched or self._pushes > 0, self._pushes > 0
            self._times[touched].append(seconds)
            if self._config.enabled and self._clock() >= self._next_s:
                self._next_s = self._clock() + self._config.decide_s
                self._decide()

    @contextmanager
    def push(self) -> Iterator[None]:
        """Whoever works on a push does it inside this."""
        with self._lock:
            self._pushes += 1
            self._touched = True
        self._work.since_s = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._pushes -= 1

    def breathe(self, done_bytes: int) -> None:
        """Called by bulk work after each slice: rests as long as its share says."""
        if not self._config.enabled or self.share >= 1.0:
            return
        now = self._clock()
        worked_s = max(0.0, now - getattr(self._work, "since_s", now))
        self._sleep(min(LONGEST_REST_S, worked_s * (1.0 / self.share - 1.0)))
        self._work.since_s = self._clock()

    def link_limit(self) -> float:
        """Bytes/s that the link may be filled with; infinite where nothing limits it."""
        return self.share * self._config.link_bytes_per_s if self._config.link_bytes_per_s else math.inf

    @property
    def ctas(self) -> int:
        """Thread blocks that a kernel of a push may have now."""
        return max(1, round(self.share * self._config.most_ctas)) if self._config.enabled else self._config.most_ctas

    @property
    def chunk_bytes(self) -> int:
        """What a GPU's copy engines may copy at once now."""
        return max(LEAST_CHUNK_BYTES, int(self.share * LARGEST_CHUNK_BYTES))

    def scalars(self) -> dict[str, float]:
        """The newest decision, for the metrics."""
        found = {"governor/share": self.share, "governor/decisions": float(len(self.decisions))}
        if self.decisions:
            newest = self.decisions[-1]
            found |= {"governor/idle_ms": 1e3 * newest.idle_s, "governor/pushing_ms": 1e3 * newest.pushing_s}
        return found

    def _decide(self) -> None:
        idle, pushing = self._times
        if min(len(idle), len(pushing)) < ENOUGH:
            return
        idle_s, pushing_s = (float(np.quantile(times, self._config.quantile)) for times in (idle, pushing))
        if pushing_s > (1.0 + self._config.budget) * idle_s:
            self.share = max(self._config.least_share, self._config.cut * self.share)
        else:
            self.share = min(1.0, self.share + self._config.grow)
        pushing.clear()  # they were measured under another share
        self.decisions.append(Decision(self._clock(), idle_s, pushing_s, self.share))
