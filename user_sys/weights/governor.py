"""The governor: limits how much a push of weights slows down the work next to it.

The *victim* is the learner's training step or the policy's inference. The governor measures the time of each step, with
and without a push. From the slowdown and the share that pushes had, it computes the share that keeps them within their
budget. The share sets all limits of a push: the time that its bulk work may run on one thread, the pause before the
next push, the rate of the link, and on a GPU the thread blocks of a kernel and the bytes of one copy.

If each push follows at once upon the one before, no step runs without a push. So the governor sometimes delays a push
until it has measured enough steps without one.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from hal.settings import Amount, Count, Positive
from user_sys.codec import Array

MAX_SAMPLES = 512  # the newest times of the victim, separately with and without a push
MIN_SAMPLES = 16  # required on both sides for a decision
PUSH_AFTERMATH_S = 0.75  # a push has effects for this long: the gateway writes it up to half a second later
BASELINE_SAMPLES, BASELINE_INTERVAL_SAMPLES = (
    48,
    384,
)  # steps without a push for so many with one; twice the interval if pushes are cheap
COST_MEMORY_S = 60.0  # time constant of the measurements
MAX_SLOWDOWN = 1.0  # of one decision: a quantile of few samples may show a single outlier
MIN_STEP_S = 1e-9
OUTLIER_QUANTILE = 0.9  # of the times without a push; the median may lie between two kinds of alternating steps
OUTLIER_FACTOR = 2.0  # caps a time in a mean, for example that of a step next to a checkpoint
MAX_REST_S = 0.25
MAX_PAUSE_S = 30.0
MAX_COPY_BYTES = 32 << 20
MIN_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class GovernorConfig:
    """The budget of pushes.

    Attributes:
        enabled: if false, pushes are not limited.
        budget: accepted slowdown of the victim; 0.01 is one percent.
        quantile: of the victim's times during a push, for example 0.99 for inference. 0 selects the mean of all times,
            including those between pushes, for a learner's steps: pushes may then be rare instead of light.
        min_share: minimum share, so that weights always arrive.
        cut, grow: limits of the factor by which the share changes.
        update_interval_s: interval of decisions.
        link_bytes_per_s: rate of the link at a share of 1; 0 is unlimited.
        max_ctas: thread blocks of a GPU kernel at a share of 1.
    """

    enabled: bool = True
    budget: Positive = 0.01
    quantile: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    min_share: Annotated[float, Meta(gt=0, le=1)] = 0.01
    cut: Annotated[float, Meta(gt=0, lt=1)] = 0.7
    grow: Annotated[float, Meta(gt=1)] = 1.1
    update_interval_s: Positive = 0.5
    link_bytes_per_s: Amount = 0.0
    max_ctas: Count = 16


@dataclass(frozen=True)
class GovernorDecision:
    """One decision of the governor.

    Attributes:
        at_s: time of the decision, by the governor's clock.
        idle_s, pushing_s: measured times of the victim, without pushes and with them.
        slowdown: relative slowdown of the victim since the decision before.
        cost: estimated slowdown at a share of 1. The budget bounds its product with the share.
        share: the new share.
    """

    at_s: float
    idle_s: float
    pushing_s: float
    slowdown: float
    cost: float
    share: float


class _PushCost:
    """Estimates the slowdown at a share of 1, by weighted least squares.

    A single measurement is too noisy: on a shared machine the steps of one second may take 6% longer than those of the
    next, against a budget of 1%. So all measurements count, with weights that decay over `COST_MEMORY_S` and that are
    small
    for small shares. The estimate is the regression plus one standard error. A control by the newest measurement alone
    keeps the median slowdown within the budget, but its mean was three times the budget.
    """

    def __init__(self) -> None:
        self._at_s = 0.0
        self._samples = self._squared_residuals = 0.0
        self._products = self._squares = self._squared_weights = 0.0

    def update(self, now_s: float, samples: int, slowdown: float, share: float) -> float:
        """Adds a measurement of `slowdown` over `samples` at `share`, and returns the estimate."""
        kept, self._at_s = math.exp(-max(0.0, now_s - self._at_s) / COST_MEMORY_S), now_s
        self._products = kept * self._products + samples * share * slowdown
        self._squares = kept * self._squares + samples * share * share
        cost = self._products / self._squares
        self._samples = kept * self._samples + samples
        self._squared_residuals = kept * self._squared_residuals + samples * (slowdown - cost * share) ** 2
        self._squared_weights = kept * kept * self._squared_weights + (samples * share) ** 2
        return cost + math.sqrt(self._squared_residuals / self._samples * self._squared_weights) / self._squares


class Governor:
    """Measures the victim and limits pushes. Any thread may call it. `observe` takes about a microsecond."""

    def __init__(
        self,
        config: GovernorConfig,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.share = 1.0
        self.decisions: deque[GovernorDecision] = deque(maxlen=4096)
        self._config, self._clock, self._sleep = config, clock, sleep
        self._times: tuple[deque[float], deque[float]] = (deque(maxlen=MAX_SAMPLES), deque(maxlen=MAX_SAMPLES))
        self._new_samples = [0, 0]  # since the last decision, without and with a push
        self._pushes = 0
        self._work_since_pause_s = 0.0  # work on pushes, without rests
        self._aftermath_end_s = -math.inf  # when the effects of the newest push end
        self._samples_since_baseline = 0  # samples with a push since the last baseline
        self._push_cost = _PushCost()
        self.pause_s = 0.0
        self._next_decision_s = clock() + config.update_interval_s
        self._lock = threading.Lock()
        self._work = threading.local()

    def observe(self, seconds: float, ended_s: float | None = None) -> None:
        """Adds one time of the victim, which ended now or at `ended_s` by the governor's clock. No push began since."""
        now = self._clock()
        ended_s = now if ended_s is None else ended_s
        with self._lock:
            with_push = self._pushes > 0 or ended_s - seconds < self._aftermath_end_s
            self._times[with_push].append(seconds)
            self._new_samples[with_push] += 1
            self._samples_since_baseline = (
                self._samples_since_baseline + 1
                if with_push
                else max(0, self._samples_since_baseline - self._baseline_interval // BASELINE_SAMPLES)
            )
            if self._config.enabled and now >= self._next_decision_s:
                self._next_decision_s = now + self._config.update_interval_s
                self._decide()

    @contextmanager
    def push(self) -> Iterator[None]:
        """A context for the work of a push."""
        self.begin_push()
        self._work.since_s = self._clock()
        try:
            yield
        finally:
            self.end_push(max(0.0, self._clock() - self._work.since_s))

    def begin_push(self) -> None:
        """Begins a push whose work runs elsewhere, with a `GovernedBudget` of this governor's share."""
        with self._lock:
            self._pushes += 1

    def end_push(self, worked_s: float) -> None:
        """Ends a push begun by `begin_push`, after so much work without rests."""
        now = self._clock()
        with self._lock:
            self._pushes -= 1
            self._aftermath_end_s = now + PUSH_AFTERMATH_S
            self._work_since_pause_s += worked_s

    def yield_cpu(self, done_bytes: int) -> None:
        """Rests after a slice of bulk work, as long as the share requires."""
        if not self._config.enabled or self.share >= 1.0:
            return
        now = self._clock()
        worked_s = max(0.0, now - getattr(self._work, "since_s", now))
        with self._lock:
            self._work_since_pause_s += worked_s
        self._sleep(rest_s(worked_s, self.share))
        self._work.since_s = self._clock()

    def pause_after_push_s(self) -> float:
        """Returns the pause in seconds before the next push may begin.

        The pause gives pushes their share of the time: the work since the last pause and one step of the victim count.
        It
        is 0 at a share of 1 and at most `MAX_PAUSE_S`. Sometimes it is long enough to measure the victim without
        pushes.
        """
        with self._lock:
            worked_s, self._work_since_pause_s = self._work_since_pause_s, 0.0
            idle, pushing = self._times
            if not self._config.enabled or not (idle or pushing):
                return 0.0
            step_s = _quantile(np.array(idle or pushing), 0.5)
            self.pause_s = min(MAX_PAUSE_S, (worked_s + step_s) * (1.0 / self.share - 1.0))
            if self._samples_since_baseline >= self._baseline_interval:
                self.pause_s = max(self.pause_s, PUSH_AFTERMATH_S + BASELINE_SAMPLES * step_s)
            return self.pause_s

    def link_limit_bytes_per_s(self) -> float:
        """Returns the rate that the link may have; infinite if unlimited."""
        return self.share * self._config.link_bytes_per_s if self._config.link_bytes_per_s else math.inf

    def scalars(self) -> dict[str, float]:
        """Returns the newest decision as metrics."""
        found = {"governor/share": self.share, "governor/decisions": float(len(self.decisions))}
        if self.decisions:
            newest = self.decisions[-1]
            found |= {"governor/idle_ms": 1e3 * newest.idle_s, "governor/pushing_ms": 1e3 * newest.pushing_s}
            found |= {"governor/slowdown": newest.slowdown, "governor/cost": newest.cost}
            found |= {"governor/pause_ms": 1e3 * self.pause_s}
        return found

    @property
    def _baseline_interval(self) -> int:
        is_cheap = self.decisions and self.decisions[-1].cost <= self._config.budget / 2
        return 2 * BASELINE_INTERVAL_SAMPLES if is_cheap else BASELINE_INTERVAL_SAMPLES

    def _decide(self) -> None:
        idle, pushing = self._times
        if min(len(idle), len(pushing)) < MIN_SAMPLES:
            return
        config, now = self._config, self._clock()
        idle_s, pushing_s, slowdown = self._compare(np.array(idle), np.array(pushing))
        cost = self._push_cost.update(now, sum(self._new_samples), min(MAX_SLOWDOWN, slowdown), self.share)
        due = min(1.0, config.budget / max(cost, config.budget))
        self.share = max(config.min_share, config.cut * self.share, min(due, config.grow * self.share))
        pushing.clear()  # measured under the previous share
        self._new_samples = [0, 0]
        self.decisions.append(GovernorDecision(now, idle_s, pushing_s, slowdown, cost, self.share))

    def _compare(self, idle: Array, pushing: Array) -> tuple[float, float, float]:
        """Returns the victim's seconds without and with a push, and its relative slowdown."""
        if self._config.quantile:
            idle_s, pushing_s = (_quantile(times, self._config.quantile) for times in (idle, pushing))
            return idle_s, pushing_s, pushing_s / max(idle_s, MIN_STEP_S) - 1.0
        cap_s = OUTLIER_FACTOR * _quantile(idle, OUTLIER_QUANTILE)
        idle_s, pushing_s = (float(np.minimum(times, cap_s).mean()) for times in (idle, pushing))
        return (
            idle_s,
            pushing_s,
            (pushing_s / max(idle_s, MIN_STEP_S) - 1.0) * self._new_samples[1] / sum(self._new_samples),
        )


class GovernedBudget:
    """The limits that a governor, here or in another process, sets for a push on a GPU. One thread works on it.

    Attributes:
        worked_s: work so far, without rests.

    Args:
        share: returns the newest share of the governor.
    """

    def __init__(
        self,
        config: GovernorConfig,
        share: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.worked_s = 0.0
        self._config, self._share, self._clock, self._sleep = config, share, clock, sleep
        self._since_s = clock()

    @property
    def ctas(self) -> int:
        """Thread blocks that a kernel may have now; the maximum if the governor is disabled."""
        most = self._config.max_ctas
        return max(1, round(self._share() * most)) if self._config.enabled else most

    @property
    def chunk_bytes(self) -> int:
        """Bytes that one copy may have now."""
        return max(MIN_COPY_BYTES, int(self._share() * MAX_COPY_BYTES))

    def yield_cpu(self, done_bytes: int) -> None:
        """See `Governor.yield_cpu`."""
        worked_s, share = max(0.0, self._clock() - self._since_s), self._share()
        self.worked_s += worked_s
        if self._config.enabled and share < 1.0:
            self._sleep(rest_s(worked_s, share))
        self._since_s = self._clock()


def rest_s(worked_s: float, share: float) -> float:
    """Returns the rest after so much bulk work."""
    return min(MAX_REST_S, worked_s * (1.0 / share - 1.0))


def _quantile(times: Array, share: float) -> float:
    """Returns the least of `times` that a fraction `share` of them does not exceed.

    numpy's quantile imports a module at its first call, which would block a control loop for 40 ms.
    """
    return float(np.sort(times)[max(0, math.ceil(share * len(times)) - 1)])
