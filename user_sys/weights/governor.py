"""The governor: gives a push of weights what it may have of a machine, and no more.

Somewhere on the machine is a *victim*: the learner's training step, or the policy's inference. Its times are measured
all the while, apart for when a push is under way and when none is. From by how much pushes made the victim slower, and
what share they had meanwhile, follows the share with which they keep to their budget, and theirs moves there. One
number, the share, sets every knob: how much of the time bulk work may run on its one thread (which bounds its use of
processor and memory), how soon one push may follow upon another, and how fast the link is filled; on a GPU, how many
thread blocks a kernel has, and how much the copy engines copy at once.

Where one push follows upon the other the victim is never seen alone. So now and then the next one is put off until it
has been.
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

from user_sys.codec import Array
from user_sys.errors import ConfigError

MAX_SAMPLES = 512  # of the victim's newest times, with and without a push
MIN_SAMPLES = 16  # samples on both sides before anything is decided
PUSH_AFTERMATH_S = (
    0.75  # a push's effects go on: the gateway keeps it up to half a second later, and its disk takes a while
)
BASELINE_SAMPLES, BASELINE_INTERVAL_SAMPLES = (
    48,
    384,
)  # so many samples without a push are wanted for so many with one, and half where it is sure
COST_MEMORY_S = 60.0  # how long what was measured counts
MAX_SLOWDOWN = 1.0  # of one moment: what shows to a quantile of few samples may be a single hiccup
MIN_STEP_S = 1e-9
OUTLIER_QUANTILE = 0.9  # quantile of the idle times; the median may lie between two sorts of steps that take turns
OUTLIER_FACTOR = 2.0  # a time counts in a mean as so many usual ones at most: a checkpoint, say, is no push's doing
MAX_REST_S = 0.25
MAX_PAUSE_S = 30.0
MAX_COPY_BYTES = 32 << 20
MIN_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class GovernorConfig:
    """What a push may cost.

    Attributes:
        enabled: without it a push takes what it can get.
        budget: how much longer the victim may take; 0.01 is one percent.
        quantile: of the victim's times while a push is under way: 0.99 for inference. 0 stands for the mean of all its
            times, those between pushes included, for a learner's steps: pushes may be rare instead of light.
        min_share: the push always gets this much, so that weights do arrive.
        cut, grow: the factors by which the share moves at most.
        update_interval_s: how often it moves.
        link_bytes_per_s: what the link is filled with at a share of 1; 0 for as much as it takes.
        max_ctas: thread blocks of a kernel on a GPU at a share of 1.
    """

    enabled: bool = True
    budget: float = 0.01
    quantile: float = 0.0
    min_share: float = 0.01
    cut: float = 0.7
    grow: float = 1.1
    update_interval_s: float = 0.5
    link_bytes_per_s: float = 0.0
    max_ctas: int = 16

    def __post_init__(self) -> None:
        if not (0 < self.min_share <= 1 and 0 < self.cut < 1 < self.grow and 0 <= self.quantile < 1):
            raise ConfigError("governor: min_share, cut and quantile lie between 0 and 1, grow is above 1")
        if self.budget <= 0 or self.update_interval_s <= 0 or self.link_bytes_per_s < 0 or self.max_ctas < 1:
            raise ConfigError(
                "governor: budget, update_interval_s, max_ctas are above 0, link_bytes_per_s is not below 0"
            )


@dataclass(frozen=True)
class GovernorDecision:
    """One move.

    Attributes:
        at_s: when, by the governor's clock.
        idle_s, pushing_s: what was measured, without pushes and with them.
        slowdown: by how much of its time the victim took longer since the move before.
        cost: by how much it would at a share of 1, by all that counts still; its product with the share is what the
            budget bounds.
        share: from then on.
    """

    at_s: float
    idle_s: float
    pushing_s: float
    slowdown: float
    cost: float
    share: float


class _PushCost:
    """What pushes would cost at a share of 1, by what they cost lately: that goes with how often they come.

    A moment shows little: on a shared machine the steps of one second may take 6% longer than those of the next, where
    the budget is 1%. So all of `COST_MEMORY_S` counts, the older the less, by least squares: moments of little share
    say little of the price. It is what these give and one standard error more. (Who cuts and grows by the newest moment
    alone keeps the median of such moments to the budget; their mean, which is what the victim loses, came to thrice
    that.)
    """

    def __init__(self) -> None:
        self._at_s = 0.0
        self._samples = self._scatter = 0.0
        self._products = self._squares = self._errors = 0.0

    def update(self, now_s: float, samples: int, longer: float, share: float) -> float:
        """The price, now that `samples` showed by how much the victim took longer at this `share`."""
        kept, self._at_s = math.exp(-max(0.0, now_s - self._at_s) / COST_MEMORY_S), now_s
        self._products = kept * self._products + samples * share * longer
        self._squares = kept * self._squares + samples * share * share
        price = self._products / self._squares
        self._samples = kept * self._samples + samples
        self._scatter = kept * self._scatter + samples * (longer - price * share) ** 2
        self._errors = kept * kept * self._errors + (samples * share) ** 2
        return price + math.sqrt(self._scatter / self._samples * self._errors) / self._squares


class Governor:
    """Any thread may call it. `observe` costs about a microsecond and never waits for anything but a short lock."""

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
        self._seen = [0, 0]  # samples since the last decision, without and with a push
        self._pushes = 0
        self._worked_s = 0.0  # on pushes, without rests, since the last pause
        self._settled_s = -math.inf  # when the effects of the newest push are over
        self._unseen = 0  # samples of pushes since the victim was seen without
        self._price = _PushCost()
        self.pause_s = 0.0
        self._next_s = clock() + config.update_interval_s
        self._lock = threading.Lock()
        self._work = threading.local()

    def observe(self, seconds: float, ended_s: float | None = None) -> None:
        """One time of the victim, which ended just now or at `ended_s` by the governor's clock; no push began since."""
        now = self._clock()
        ended_s = now if ended_s is None else ended_s
        with self._lock:
            touched = self._pushes > 0 or ended_s - seconds < self._settled_s
            self._times[touched].append(seconds)
            self._seen[touched] += 1
            self._unseen = self._unseen + 1 if touched else max(0, self._unseen - self._look_every // BASELINE_SAMPLES)
            if self._config.enabled and now >= self._next_s:
                self._next_s = now + self._config.update_interval_s
                self._decide()

    @contextmanager
    def push(self) -> Iterator[None]:
        """Whoever works on a push does it inside this."""
        self.begin_push()
        self._work.since_s = self._clock()
        try:
            yield
        finally:
            self.end_push(max(0.0, self._clock() - self._work.since_s))

    def begin_push(self) -> None:
        """Somebody else, whose `GovernedBudget` has this governor's share, works on a push from now on until
        `end_push`.
        """
        with self._lock:
            self._pushes += 1

    def end_push(self, worked_s: float) -> None:
        """... and has worked for so long, without rests."""
        now = self._clock()
        with self._lock:
            self._pushes -= 1
            self._settled_s = now + PUSH_AFTERMATH_S
            self._worked_s += worked_s

    def yield_cpu(self, done_bytes: int) -> None:
        """Called by bulk work after each slice: rests as long as its share says."""
        if not self._config.enabled or self.share >= 1.0:
            return
        now = self._clock()
        worked_s = max(0.0, now - getattr(self._work, "since_s", now))
        with self._lock:
            self._worked_s += worked_s
        self._sleep(rest_s(worked_s, self.share))
        self._work.since_s = self._clock()

    def pause_after_push_s(self) -> float:
        """For how many seconds no other push is to begin now that one has ended.

        As long as leaves pushes their share, one step of the victim counted with the work since the last pause; none at
        a share of 1, and `MAX_PAUSE_S` at most; and now and then as long as the victim takes to be seen without
        pushes.
        """
        with self._lock:
            worked_s, self._worked_s = self._worked_s, 0.0
            idle, pushing = self._times
            if not self._config.enabled or not (idle or pushing):
                return 0.0
            step_s = _quantile(np.array(idle or pushing), 0.5)
            self.pause_s = min(MAX_PAUSE_S, (worked_s + step_s) * (1.0 / self.share - 1.0))
            if self._unseen >= self._look_every:
                self.pause_s = max(self.pause_s, PUSH_AFTERMATH_S + BASELINE_SAMPLES * step_s)
            return self.pause_s

    def link_limit_bytes_per_s(self) -> float:
        """Bytes/s that the link may be filled with; infinite where nothing limits it."""
        return self.share * self._config.link_bytes_per_s if self._config.link_bytes_per_s else math.inf

    def scalars(self) -> dict[str, float]:
        """The newest decision, for the metrics."""
        found = {"governor/share": self.share, "governor/decisions": float(len(self.decisions))}
        if self.decisions:
            newest = self.decisions[-1]
            found |= {"governor/idle_ms": 1e3 * newest.idle_s, "governor/pushing_ms": 1e3 * newest.pushing_s}
            found |= {"governor/longer": newest.slowdown, "governor/price": newest.cost}
            found |= {"governor/pause_ms": 1e3 * self.pause_s}
        return found

    @property
    def _look_every(self) -> int:
        sure = self.decisions and self.decisions[-1].cost <= self._config.budget / 2
        return 2 * BASELINE_INTERVAL_SAMPLES if sure else BASELINE_INTERVAL_SAMPLES

    def _decide(self) -> None:
        idle, pushing = self._times
        if min(len(idle), len(pushing)) < MIN_SAMPLES:
            return
        config, now = self._config, self._clock()
        idle_s, pushing_s, longer = self._compare(np.array(idle), np.array(pushing))
        price = self._price.update(now, sum(self._seen), min(MAX_SLOWDOWN, longer), self.share)
        due = min(1.0, config.budget / max(price, config.budget))
        self.share = max(config.min_share, config.cut * self.share, min(due, config.grow * self.share))
        pushing.clear()  # they were measured under another share
        self._seen = [0, 0]
        self.decisions.append(GovernorDecision(now, idle_s, pushing_s, longer, price, self.share))

    def _compare(self, idle: Array, pushing: Array) -> tuple[float, float, float]:
        """Seconds without a push and with one, and by how much of its time the victim takes longer."""
        if self._config.quantile:
            idle_s, pushing_s = (_quantile(times, self._config.quantile) for times in (idle, pushing))
            return idle_s, pushing_s, pushing_s / max(idle_s, MIN_STEP_S) - 1.0
        most_s = OUTLIER_FACTOR * _quantile(idle, OUTLIER_QUANTILE)
        idle_s, pushing_s = (float(np.minimum(times, most_s).mean()) for times in (idle, pushing))
        return idle_s, pushing_s, (pushing_s / max(idle_s, MIN_STEP_S) - 1.0) * self._seen[1] / sum(self._seen)


class GovernedBudget:
    """What a governor, here or in another process, lets a push have of a GPU. One thread works on it, from the start.

    Attributes:
        worked_s: so far, without rests.

    Args:
        share: the governor's newest that is known here.
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
        """Thread blocks that a kernel of the push may have now; without a governor always the most."""
        most = self._config.max_ctas
        return max(1, round(self._share() * most)) if self._config.enabled else most

    @property
    def chunk_bytes(self) -> int:
        """What the copy engines may copy at once now."""
        return max(MIN_COPY_BYTES, int(self._share() * MAX_COPY_BYTES))

    def yield_cpu(self, done_bytes: int) -> None:
        """See `Governor.breathe`."""
        worked_s, share = max(0.0, self._clock() - self._since_s), self._share()
        self.worked_s += worked_s
        if self._config.enabled and share < 1.0:
            self._sleep(rest_s(worked_s, share))
        self._since_s = self._clock()


def rest_s(worked_s: float, share: float) -> float:
    """For how long bulk work rests after so much of it."""
    return min(MAX_REST_S, worked_s * (1.0 / share - 1.0))


def _quantile(times: Array, share: float) -> float:
    """The least of `times` that a `share` of them do not exceed.

    numpy's own functions import a module when one is first called, which would hold a control loop up for 40 ms.
    """
    return float(np.sort(times)[max(0, math.ceil(share * len(times)) - 1)])
