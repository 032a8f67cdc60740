"""Executes action chunks: waits for each, or computes the next one while the robot executes the last.

With `ExecutionConfig.mode` ``async`` the control loop never waits for a policy. The next chunk is requested while
promised actions are left for the predicted delay. When it arrives, its first actions belong to control periods that
have passed; `ExecutionConfig.method` says how the robot passes from the old chunk to the new one, see `Switch` and the
classes after it. One request is on its way at a time, so a chunk needs twice as many actions as the delay has
control periods.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hal.spec import Array, ArraySpec
from user_sys.edge.recorder import SelectedAction
from user_sys.episode import Phase
from user_sys.errors import PolicyUnavailable
from user_sys.messages import NO_VERSION
from user_sys.policies.policy import ActionChunk, ChunkContext, ExecutionConfig, ExecutionMethod, PolicyQuery

DELAYS_KEPT = 50
DELAY_PERCENTILE = 95.0

Observe = Callable[[], Mapping[str, Array]]
"""Returns the present observation, see `Policy.act`; it may raise PolicyUnavailable."""


@dataclass
class RunningChunk:
    """A chunk and its place in time, which counts the actions that the robot has executed in the episode.

    Attributes:
        chunk: as the policy returned it.
        version: of the weights that acted; -1 if it is random, without weights.
        number: of the chunk in the episode.
        first: count of executed actions at which the chunk's first action is due.
        t_observation_ns: monotonic clock of the edge: capture of the observation that the chunk was computed from.
        delay: control periods in which actions were executed from that observation to the chunk's first use.
        assured: see `ChunkContext`; 0 without one.
    """

    chunk: ActionChunk
    version: int
    number: int
    first: int
    t_observation_ns: int
    delay: int
    assured: int

    def __len__(self) -> int:
        return len(self.chunk.actions)

    @property
    def execute(self) -> int:
        """The actions after which the next chunk is used, as in `ActionChunk`; at most all."""
        return min(self.chunk.execute or len(self), len(self))

    def place(self, executed: int) -> int:
        """The place of the action for the next control period; negative if the chunk begins later."""
        return executed - self.first

    def is_used_up(self, executed: int) -> bool:
        return self.place(executed) >= len(self)


def current_chunk(chunks: Sequence[RunningChunk], executed: int) -> RunningChunk | None:
    """The newest chunk that has an action for the next control period."""
    for chunk in reversed(chunks):
        if 0 <= chunk.place(executed) < len(chunk):
            return chunk
    return None


class Switch:
    """Plain switching: a new chunk replaces the old one from the present control period on. The base of other methods.

    Real-time chunking switches in this way too: its policy makes the new chunk begin as the old one goes on
    (`user_sys.policies.rtc`).

    Attributes:
        requests_always: a chunk is requested in each control period, whether or not the last one has enough actions.
        trained_by: the setting of the policy that trains it for a delay; empty if the method needs no training.
    """

    requests_always = False
    trained_by = ""

    def __init__(self, config: ExecutionConfig) -> None:
        self.config = config

    def offset(self, bridged: int) -> int:
        """Executed actions from a chunk's observation to its first action; `bridged`: see `ActionChunk`."""
        return 0

    def take(self, chunks: Sequence[RunningChunk], taken: RunningChunk, executed: int) -> list[RunningChunk]:
        """Returns the chunks that are still needed when `taken` arrives, the newest last."""
        return [taken] if taken.place(executed) >= 0 else [*chunks[-1:], taken]

    def action(
        self, chunks: Sequence[RunningChunk], current: RunningChunk, executed: int, observe: Observe
    ) -> tuple[Array, float]:
        """The action for this control period, float32 (a,), and its log density.

        Args:
            chunks: at least one, the newest last.
            current: the newest one that has an action for this period.
        """
        place = current.place(executed)
        return current.chunk.actions[place], float(current.chunk.log_prob[place])


class Ensemble(Switch):
    """Temporal ensembling: each action is the weighted mean of all chunks that hold one for its control period.

    Zhao et al., "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware", RSS 2023 (arXiv 2304.13705): the
    i-th oldest chunk has the weight exp(-m i), with m the setting `ensemble_decay`.
    """

    requests_always = True

    def take(self, chunks: Sequence[RunningChunk], taken: RunningChunk, executed: int) -> list[RunningChunk]:
        """See `Switch.take`. Random actions from before the first weights are no part of a mean."""
        return [*(each for each in chunks if each.version != NO_VERSION), taken]

    def action(
        self, chunks: Sequence[RunningChunk], current: RunningChunk, executed: int, observe: Observe
    ) -> tuple[Array, float]:
        """See `Switch.action`. The mean has no density."""
        if len(chunks) == 1:
            return super().action(chunks, current, executed, observe)
        weights = np.exp(-self.config.ensemble_decay * np.arange(len(chunks)))
        actions = [each.chunk.actions[each.place(executed)] for each in chunks]
        return np.average(actions, axis=0, weights=weights).astype(np.float32), math.nan


class TrainingRtc(Switch):
    """Training-time RTC: a chunk begins with the promised actions, as learned (`user_sys.policies.rtc`)."""

    trained_by = "prefix_max"


class Vlash(Switch):
    """VLASH: the policy acts from the state in which the robot will be when its chunk is used.

    Tang et al., "VLASH: Real-Time VLAs via Future-State-Aware Asynchronous Inference", 2025 (arXiv 2512.01031). The
    policy rolls the observed state forward by the promised actions (`user_sys.policies.vlash`), so the chunk begins
    when they end. A chunk that arrives before its first period waits for it.
    """

    trained_by = "offset_max"

    def offset(self, bridged: int) -> int:
        return bridged


class A2c2(Switch):
    """A2C2: a small network corrects each action of a chunk with the newest observation.

    Sendai et al., "Leave No Observation Behind: Real-time Correction for VLA Action Chunks", 2025 (arXiv 2509.23224).
    The network comes with the chunk (`user_sys.policies.correction`), so that the robot's computer evaluates it,
    without torch and without waiting for a policy server.
    """

    def action(
        self, chunks: Sequence[RunningChunk], current: RunningChunk, executed: int, observe: Observe
    ) -> tuple[Array, float]:
        """See `Switch.action`. A corrected action has no density; without a new observation nothing is corrected, nor
        if the result is not finite.
        """
        action, log_prob = super().action(chunks, current, executed, observe)
        if current.chunk.correction is None:
            return action, log_prob
        try:
            observation = observe()
        except PolicyUnavailable:
            return action, log_prob
        corrected = current.chunk.correction.correct(action, current.place(executed), observation)
        return (corrected, math.nan) if np.isfinite(corrected).all() else (action, log_prob)


METHODS: dict[ExecutionMethod, type[Switch]] = {
    "switch": Switch,
    "ensemble": Ensemble,
    "rtc": Switch,
    "training_rtc": TrainingRtc,
    "vlash": Vlash,
    "a2c2": A2c2,
}


class ActingPolicy(Protocol):
    """A policy with weights, as an agent uses it."""

    @property
    def version(self) -> int:
        """The version of the weights that acted last; -1 before the first."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """As `Policy.cameras`. A policy server's are known after its first response."""

    def act(self, query: PolicyQuery) -> ActionChunk:
        """As `Policy.act`; it may change the version. Raises PolicyUnavailable: there is no action now, and why."""


class AsyncPolicy(Protocol):
    """A policy that computes a chunk while the robot moves on: one request at a time."""

    def request(self, query: PolicyQuery) -> None:
        """Starts to compute a chunk; an earlier request is given up. Raises PolicyUnavailable."""

    def response(self, *, wait: bool) -> ActionChunk | None:
        """The chunk of the newest request; None while it is computed. Raises PolicyUnavailable: there will be none."""


@dataclass
class _Request:
    """A chunk that is computed.

    Attributes:
        executed, period: actions and control periods of the episode at the observation.
        assured: see `RunningChunk`.
        due: control period in which the chunk is used; None as soon as it is there.
    """

    executed: int
    period: int
    t_observation_ns: int
    assured: int = 0
    due: int | None = None


@dataclass
class ExecutionCounters:
    """Totals of a session.

    Attributes:
        chunks: that were used.
        stalls: control periods without an action because the next chunk had not arrived.
        delays: of the newest chunks but the first, in control periods.
        disagreement: mean difference of the newest chunk from the one before, as a share of the action's range, over
            the control periods that both cover; 0 if there is none, or if the one before was random, without weights.
    """

    chunks: int = 0
    stalls: int = 0
    delays: deque[int] = field(default_factory=lambda: deque(maxlen=DELAYS_KEPT))
    disagreement: float = 0.0

    def predicted_delay(self) -> int:
        """Control periods from an observation to the use of its chunk: the 95th percentile of the newest ones."""
        return math.ceil(np.percentile(self.delays, DELAY_PERCENTILE)) if self.delays else 1

    def scalars(self) -> dict[str, float]:
        """Returns the metrics."""
        return {
            "chunks": float(self.chunks),
            "chunk_stalls": float(self.stalls),
            "chunk_delay_periods": float(self.predicted_delay()),
            "chunk_disagreement": self.disagreement,
        }


class ChunkExecutor:
    """Gives one action for each control period in which the policy drives. One thread calls it.

    Attributes:
        counters: see `ExecutionCounters`.
        deterministic: whether the policy acts without exploration.
    """

    def __init__(
        self,
        policy: ActingPolicy,
        spec: ArraySpec,
        config: ExecutionConfig,
        *,
        deterministic: bool,
        follows_clock: bool = False,
        period_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        spec: of the action.
        follows_clock: a chunk is used as soon as it is there; else as `ExecutionConfig.delay_periods` says.
        period_s: of control, for measured delays; `clock`: monotonic seconds.
        """
        self._spec, self._period_s, self._clock = spec, period_s, clock
        self._policy, self.deterministic = policy, deterministic
        self._delay_periods = None if follows_clock else config.delay_periods
        self._method = METHODS[config.method](config)
        self._requests: AsyncPolicy | None = None
        if config.mode == "async":
            self._requests = policy if hasattr(policy, "request") else _ComputedAtOnce(policy)  # type: ignore[assignment]
        self.counters = ExecutionCounters()
        self._chunks: list[RunningChunk] = []
        self._request: _Request | None = None
        self._computed: ActionChunk | None = None  # that is not due yet
        self._executed = self._period = self._number = 0
        self._length = 0  # of the newest chunk

    def begin_episode(self) -> None:
        """Drops the rest of the episode before."""
        self._executed = self._period = self._number = 0
        self.discard()

    def discard(self) -> None:
        """Drops all promised actions and the chunk that is computed: another source has moved the robot."""
        self._chunks.clear()
        self.counters.disagreement = 0.0
        self._request = self._computed = None

    def next_action(self, observe: Observe, t_observation_ns: int, instruction: str) -> SelectedAction:
        """The action for this control period. `t_observation_ns`: capture of the present observation.

        Raises:
            PolicyUnavailable: there is no action now; the robot holds.
        """
        self._period += 1
        if self._requests is None:
            self._wait_for_chunk(observe, t_observation_ns, instruction)
        else:
            self._advance(self._requests, observe, t_observation_ns, instruction)
        current = current_chunk(self._chunks, self._executed)
        if current is None:
            raise PolicyUnavailable("the next action chunk begins later; the robot holds")
        action, log_prob = self._method.action(self._chunks, current, self._executed, observe)
        place = current.place(self._executed)
        self._executed += 1
        return SelectedAction(
            action=action,
            phase=Phase.POLICY,
            policy_version=current.version,
            log_prob=log_prob,
            chunk=current.number,
            chunk_step=place,
            t_observation_ns=current.t_observation_ns,
            delay=current.delay,
        )

    def _wait_for_chunk(self, observe: Observe, t_observation_ns: int, instruction: str) -> None:
        newest = self._chunks[-1] if self._chunks else None
        if newest is None or newest.place(self._executed) >= newest.execute:
            chunk = self._policy.act(PolicyQuery(observe(), instruction, self.deterministic))
            self._take(chunk, _Request(self._executed, self._period, t_observation_ns))

    def _advance(self, requests: AsyncPolicy, observe: Observe, t_observation_ns: int, instruction: str) -> None:
        unavailable: PolicyUnavailable | None = None
        try:
            self._receive(requests)
            if self._request is None and self._needs_chunk():
                self._send(requests, observe(), t_observation_ns, instruction)
                self._receive(requests)
        except PolicyUnavailable as error:  # promised actions go on
            unavailable, self._request = error, None
        self._chunks = [chunk for chunk in self._chunks if not chunk.is_used_up(self._executed)]
        if not self._chunks:
            self.counters.stalls += self._number > 0
            raise unavailable or self._late()

    def _send(
        self, requests: AsyncPolicy, observation: Mapping[str, Array], t_observation_ns: int, instruction: str
    ) -> None:
        context, started_s = self._context(), self._clock()
        requests.request(PolicyQuery(observation, instruction, self.deterministic, context))
        request = _Request(self._executed, self._period, t_observation_ns, context.assured)
        if self._delay_periods == "measured":
            self._computed = requests.response(wait=True)
            request.due = self._period + math.ceil((self._clock() - started_s) / self._period_s)
        elif self._delay_periods is not None:
            request.due = self._period + self._delay_periods
        self._request = request

    def _receive(self, requests: AsyncPolicy) -> None:
        request = self._request
        if request is None or (request.due is not None and self._period < request.due):
            return
        chunk, self._computed = self._computed, None
        if chunk is None:
            self._request = None  # if it fails
            chunk = requests.response(wait=request.due is not None)
        self._request = request if chunk is None else None
        if chunk is not None:
            self._take(chunk, request)

    def _late(self) -> PolicyUnavailable:
        """Why there is no action."""
        waited, length = 0 if self._request is None else self._period - self._request.period, self._length
        if waited <= length // 2 or not length:
            return PolicyUnavailable("the next action chunk has not arrived; the robot holds")
        if length == 1:
            return PolicyUnavailable(
                f"the next action has not arrived after {waited} control periods, and the policy gives one action at "
                "once: set policy.execution.mode: wait, or choose a policy of longer chunks; the robot holds"
            )
        return PolicyUnavailable(
            f"the next action chunk has not arrived after {waited} control periods, and a chunk of {length} actions "
            f"bridges {length // 2}: set policy.options.chunk_length to {2 * waited} or more (of the kind lerobot "
            "policy.options.config.chunk_size, of its diffusion n_action_steps; an ACT needs a checkpoint with such "
            "chunks; of steered policy.options.execute and base_options.chunk_length, over lerobot "
            "base_options.config.n_action_steps and chunk_size); the robot holds"
        )

    @property
    def delay_note(self) -> str:
        """For operators: the newest chunk's delay is longer than the policy was trained for; empty if it is not."""
        setting, newest = self._method.trained_by, self._chunks[-1] if self._chunks else None
        if not setting or newest is None or newest.chunk.bridged >= newest.assured:
            return ""
        return (
            f"the next action chunk is expected after {newest.assured} control periods, and the policy was trained for "
            f"{newest.chunk.bridged} at most: train with policy.options.{setting} {newest.assured}, or make it faster"
        )

    @property
    def has_acted(self) -> bool:
        """Whether the policy has given an action in this episode."""
        return self._executed > 0

    @property
    def is_idle(self) -> bool:
        """Whether no chunk is computed and none begins later, after `next_action` has raised."""
        return self._request is None and all(chunk.place(self._executed) >= 0 for chunk in self._chunks)

    @property
    def counts_delay(self) -> bool:
        """Whether its next chunk is due in a later control period, by `ExecutionConfig.delay_periods`."""
        return self._request is not None and self._request.due is not None

    @property
    def promised(self) -> Array:
        """The predicted actions (n, a) from the next control period on; n is 0 without a chunk."""
        if (current := current_chunk(self._chunks, self._executed)) is None:
            return np.zeros((0, *self._spec.shape), np.float32)
        return current.chunk.actions[current.place(self._executed) :]

    def _context(self) -> ChunkContext:
        """The actions that are promised now, and the predicted delay."""
        return ChunkContext(self.promised, self._delay(), self._method.config.method)

    def _delay(self) -> int:
        """The predicted delay in control periods."""
        fixed = self._delay_periods
        return fixed if isinstance(fixed, int) else self.counters.predicted_delay()

    def _needs_chunk(self) -> bool:
        """Promised actions are left for the predicted delay only, or enough of the newest chunk was executed."""
        if not self._chunks or self._method.requests_always:
            return True
        newest, lead = self._chunks[-1], self._delay() + 1
        place = newest.place(self._executed)
        if place < 0:  # it has not begun
            return False
        return len(newest) - place <= lead or place + lead > newest.execute

    def _take(self, chunk: ActionChunk, request: _Request) -> None:
        """Raises PolicyUnavailable: an action is not finite."""
        for action in chunk.actions:
            if (found := self._spec.find_not_finite(action)) is not None:
                version = self._policy.version
                raise PolicyUnavailable(
                    f"version {version} of the policy gives an action in which {found}; the robot holds"
                )
        if self.counters.chunks:  # the first chunk of a session may wait for a policy server that starts
            self.counters.delays.append(self._period - request.period)
        self.counters.chunks += 1
        first = request.executed + self._method.offset(min(chunk.bridged, request.assured))
        taken = RunningChunk(
            chunk=chunk,
            version=self._policy.version,
            number=self._number,
            first=first,
            t_observation_ns=request.t_observation_ns,
            delay=max(self._executed, first) - request.executed,
            assured=request.assured,
        )
        self._number += 1
        self._length = len(taken)
        is_learned = bool(self._chunks) and self._chunks[-1].version != NO_VERSION
        self.counters.disagreement = self._disagreement(self._chunks[-1], taken) if is_learned else 0.0
        self._chunks = self._method.take(self._chunks, taken, self._executed)

    def _disagreement(self, before: RunningChunk, after: RunningChunk) -> float:
        """See `ExecutionCounters`."""
        start = max(self._executed, before.first, after.first)
        ahead = [each.chunk.actions[each.place(start) :] for each in (before, after)]
        both = min(map(len, ahead))
        span = np.array(self._spec.high) - np.array(self._spec.low)
        is_bounded = np.isfinite(span) & (span > 0)
        if not both or not is_bounded.any():
            return 0.0
        return float((np.abs(ahead[0][:both] - ahead[1][:both])[:, is_bounded] / span[is_bounded]).mean())


class _ComputedAtOnce:
    """A policy of this process as an `AsyncPolicy`: the request computes the chunk."""

    def __init__(self, policy: ActingPolicy) -> None:
        self._policy = policy
        self._chunk: ActionChunk | None = None

    def request(self, query: PolicyQuery) -> None:
        self._chunk = self._policy.act(query)

    def response(self, *, wait: bool) -> ActionChunk | None:
        chunk, self._chunk = self._chunk, None
        return chunk
