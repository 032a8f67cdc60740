"""Samplers: draw batches from a replay buffer, prefetch them, and the configuration of a run's sampler.

Drawing and filling are separate. Drawing happens in the caller's thread, in order, and depends only on the index
and the sampler's state. Filling may happen in any thread at any time and changes only the batch. So equal store
and state give equal draws, regardless of cache and threads.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Generic, Literal, Self, TypeVar

import numpy as np

from user_sys.codec import Array
from user_sys.episode import EpisodeSource, Phase
from user_sys.errors import ConfigError, StoreCorrupt, StoreError, WireError
from user_sys.replay.batches import Allocate, Batch, BatchBuilder, ReadPlan
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.prioritized import PrioritizedSelector
from user_sys.replay.selectors import (
    DemoOnlineSelector,
    InterventionWeightedSelector,
    Selection,
    Selector,
    SelectorState,
    StepFilter,
    UniformSelector,
    state_column,
)
from user_sys.replay.task_balanced import TaskBalancedSelector

MAX_REDRAWS = 1000  # per sample
SELECTOR_PREFIX = "chooser."  # of keys in checkpoints
_MASK = (1 << 64) - 1

B = TypeVar("B", bound=Batch)
_logger = logging.getLogger(__name__)
FILL_DEADLINE_S = 120.0
MAX_N_STEP = 1000
MAX_AGE_S = 1e9  # thirty years
MAX_AGE_VERSIONS = 1 << 62
TRAINING_SOURCES = frozenset(
    {EpisodeSource.DEMO, EpisodeSource.ONLINE}
)  # evaluations only if `only.sources` lists them
SelectorKind = Literal["mixed", "uniform", "prioritized", "interventions", "tasks"]
PhaseName = Literal["policy", "teleop", "correction", "recovery"]


@dataclass
class PendingBatch(Generic[B]):
    """A drawn batch that is being filled.

    Attributes:
        batch: has the columns known from the index.
        redraw_seed: seed for replacements.
        unreadable: after filling, the samples that could not be read.
    """

    batch: B
    reads: list[ReadPlan]
    redraw_seed: int
    unreadable: Array = field(default_factory=lambda: np.empty(0, np.int64))


class Sampler(Generic[B]):
    """Draws batches from a replay buffer. One thread calls it, except `fill`.

    Attributes:
        redrawn: samples that were replaced because they could not be read.
    """

    def __init__(
        self,
        replay: ReplayBuffer,
        selector: Selector,
        batch_builder: BatchBuilder[B],
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        pin: bool = False,
    ) -> None:
        """Follows `replay`; `selector` must not be shared.

        Args:
            rank, world: rank among data-parallel learners. Each draws from its own stretch of the sequence of `seed`.
            pin: allocate batches in page-locked memory.

        Raises:
            ConfigError: the batch is empty, or the rank is outside the world.
        """
        if batch_size < 1 or not 0 <= rank < world:
            raise ConfigError(f"a batch of {batch_size} for rank {rank} of {world}")
        self._replay, self._selector, self._batch_builder, self.batch_size = replay, selector, batch_builder, batch_size
        self._allocate = _allocator(pin)
        self._bit_generator = np.random.PCG64(seed).jumped(rank)
        self._rng = np.random.Generator(self._bit_generator)
        self.redrawn = 0
        replay.subscribe(selector.update)

    def __len__(self) -> int:
        """Number of eligible rows."""
        return len(self._selector)

    @property
    def uses_feedback(self) -> bool:
        """Whether `feedback` changes later draws; otherwise it need not be computed."""
        return self._selector.uses_feedback

    def empty_batch(self) -> B:
        """Arrays of a batch, reusable by `sample` and `draw`."""
        return self._batch_builder.empty(self._replay.features, self.batch_size, self._allocate)

    def sample(self, out: B | None = None) -> B:
        """Draws and fills a batch, `out` if given.

        Raises:
            ValueError: no row is eligible yet (see `len`).
            StoreCorrupt: no selected row can be read.
        """
        draw = self.draw(self.empty_batch() if out is None else out)
        self.fill(draw)
        return self.finish(draw)

    def draw(self, batch: B) -> PendingBatch[B]:
        """Selects the samples of `batch`. Raises ValueError as `sample`."""
        if not len(self._selector):
            raise ValueError("the replay buffer has no eligible step yet")
        selection = self._selector.select(self.batch_size, self._rng)
        return self._plan(batch, selection, int(self._rng.integers(0, 1 << 63)))

    def _plan(self, batch: B, selection: Selection, redraw_seed: int) -> PendingBatch[B]:
        batch.row[:], batch.weight[:], batch.group[:] = selection
        return PendingBatch(batch, self._batch_builder.plan_reads(self._replay.observation_index, batch), redraw_seed)

    def fill(self, draw: PendingBatch[B]) -> None:
        """Reads the observations of `draw`; blocks for misses. Thread-safe."""
        samples = [
            places // (len(plan.numbers) // len(draw.batch))
            for plan, places in zip(draw.reads, self._replay.read(draw.reads), strict=True)
            if len(places)
        ]
        if samples:
            draw.unreadable = np.unique(np.concatenate(samples))

    def finish(self, draw: PendingBatch[B]) -> B:
        """Replaces unreadable samples; returns the batch. Raises StoreCorrupt as `sample`."""
        rng = np.random.Generator(np.random.PCG64(draw.redraw_seed)) if len(draw.unreadable) else None
        for sample in draw.unreadable.tolist():
            assert rng is not None
            self._replace_unreadable(draw.batch.part(sample, sample + 1), rng)
        return draw.batch

    def _replace_unreadable(self, single: B, rng: np.random.Generator) -> None:
        for _ in range(MAX_REDRAWS):
            self.redrawn += 1
            _logger.debug("replay.redrawn row=%d", single.row[0])
            draw = self._plan(single, self._selector.redraw(int(single.group[0]), rng), 0)
            self.fill(draw)
            if not len(draw.unreadable):
                return
        raise StoreCorrupt(f"of {MAX_REDRAWS} consecutive draws, none is readable; run `user-sys store verify`")

    def feedback(self, batch: Batch, losses: Array) -> None:
        """Passes TD errors or losses of the samples of `batch`, float (n,), to the selector."""
        self._selector.feedback(batch.row, batch.group, losses)

    # Checkpoints

    def state_dict(self, ahead: tuple[PendingBatch[B], ...] = ()) -> SelectorState:
        """Copies of all state that determines later draws and is not in the store; `ahead` are pending draws."""
        observations = self._replay.observation_index
        chunk = observations.index.steps.chunk
        state = {SELECTOR_PREFIX + name: value for name, value in self._selector.state_dict(observations).items()}
        rows = np.array([draw.batch.row for draw in ahead], np.int64).reshape(len(ahead), self.batch_size)
        return state | {
            "generator": _generator_state(self._bit_generator),
            "ahead.sequence": observations.index.chunks.sequence[chunk[rows]],
            "ahead.step": rows - observations.index.chunks.first_row[chunk[rows]],
            "ahead.weight": np.array([draw.batch.weight for draw in ahead], np.float32).reshape(rows.shape),
            "ahead.group": np.array([draw.batch.group for draw in ahead], np.int32).reshape(rows.shape),
            "ahead.spare": np.array([draw.redraw_seed for draw in ahead], np.int64),
        }

    def load_state_dict(self, state: Mapping[str, Array]) -> list[PendingBatch[B]]:
        """Restores a state; the replay buffer must have been refreshed.

        Later draws are bit-identical if the store's content is unchanged. Returns the pending draws, to be filled. A
        draw with a row that is no longer stored is left out, with all draws after it.

        Raises:
            WireError: it is the state of another sampler.
        """
        inner = {
            name.removeprefix(SELECTOR_PREFIX): value
            for name, value in state.items()
            if name.startswith(SELECTOR_PREFIX)
        }
        sequence, step, weight, group, redraw_seed = (
            state_column(state, f"ahead.{name}") for name in ("sequence", "step", "weight", "group", "spare")
        )
        if sequence.shape != (len(redraw_seed), self.batch_size):
            raise WireError(f"the sampler's state has another batch size than {self.batch_size}")
        _set_generator(self._bit_generator, state_column(state, "generator"))
        self._selector.load_state_dict(inner, self._replay.observation_index)
        draws: list[PendingBatch[B]] = []
        for place in range(len(redraw_seed)):
            rows = self._rows(sequence[place], step[place])
            if rows is None:
                _logger.warning("replay.pending_draws_dropped count=%d", len(redraw_seed) - place)
                break
            selection = Selection(rows, weight[place], group[place])
            draws.append(self._plan(self.empty_batch(), selection, int(redraw_seed[place])))
        return draws

    def _rows(self, sequence: Array, step: Array) -> Array | None:
        """Rows of steps by the sequence numbers of their chunks' records; None if one is gone."""
        chunks = self._replay.observation_index.index.chunks
        order = np.argsort(chunks.sequence)
        at = np.searchsorted(chunks.sequence, sequence, sorter=order)
        if not len(order) or (at >= len(order)).any():
            return None
        chunk = order[at]
        if (chunks.sequence[chunk] != sequence).any() or not chunks.alive[chunk].all():
            return None
        rows: Array = chunks.first_row[chunk] + step
        return rows


def _allocator(pin: bool) -> Allocate:
    if not pin:
        return np.empty
    import torch  # lazy: only learners on a GPU need torch here

    def allocate_pinned(shape: tuple[int, ...], dtype: str) -> Array:
        return torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=True).numpy()

    return allocate_pinned


def _generator_state(bits: np.random.PCG64) -> Array:
    """uint64 (6,): PCG64's state and increment, low half first, and the rest of a 64-bit draw."""
    state = bits.state
    inner = state["state"]
    numbers = [part for name in ("state", "inc") for part in (inner[name] & _MASK, inner[name] >> 64)]
    return np.array([*numbers, state["has_uint32"], state["uinteger"]], np.uint64)


def _set_generator(bits: np.random.PCG64, saved: Array) -> None:
    if saved.shape != (6,):
        raise WireError("the sampler's state has no generator")
    low, high, inc_low, inc_high, has, rest = map(int, saved)
    state = bits.state
    state["state"] = {"state": low | high << 64, "inc": inc_low | inc_high << 64}
    state["has_uint32"], state["uinteger"] = has, rest
    bits.state = state


class Prefetcher(Generic[B]):
    """Returns a sampler's batches; threads fill the next `depth` batches during training. One thread calls it.

    Batches are drawn in the caller's thread and returned in order, so results do not depend on thread timing. With
    depth 0 there are no threads, and each batch is filled on request.
    """

    def __init__(self, sampler: Sampler[B], depth: int = 2, threads: int = 1) -> None:
        """Allocates ``depth + 1`` batches on first use."""
        self._sampler, self._depth = sampler, depth
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="replay-batch") if depth else None
        self._ahead: deque[tuple[PendingBatch[B], Future[None] | None]] = deque()
        self._free: list[B] = []
        self._returned: B | None = None

    def next(self) -> B:
        """The next batch, valid until the next call.

        Raises:
            ValueError: no row is eligible yet.
            StoreError: no selected row can be read, or filling takes longer than `FILL_DEADLINE_S`.
        """
        if self._returned is not None:
            self._free.append(self._returned)
            self._returned = None
        while len(self._ahead) <= self._depth:
            self._start(self._sampler.draw(self._free.pop() if self._free else self._sampler.empty_batch()))
        draw, filled = self._ahead.popleft()
        if filled is None:
            self._sampler.fill(draw)
        else:
            try:
                filled.result(FILL_DEADLINE_S)
            except TimeoutError:
                raise StoreError(f"the disk took longer than {FILL_DEADLINE_S:.0f} s to fill a batch") from None
        self._returned = self._sampler.finish(draw)
        return self._returned

    def _start(self, draw: PendingBatch[B]) -> None:
        self._ahead.append((draw, None if self._pool is None else self._pool.submit(self._sampler.fill, draw)))

    def state_dict(self) -> SelectorState:
        """The sampler's state, with the batches drawn ahead."""
        return self._sampler.state_dict(tuple(draw for draw, _ in self._ahead))

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restores a state, before the first `next`. Raises as `Sampler.load_state_dict`."""
        for draw in self._sampler.load_state_dict(state):
            self._start(draw)

    def close(self) -> None:
        """Stops the threads after their current fills. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class StepFilterConfig:
    """Conditions that a drawn step must meet, all of them; an empty list and null do not restrict.

    Attributes:
        robots, tasks, sources, success: of the episode, with labels applied. Without sources: demo and online;
            uniform, prioritized and interventions can draw evaluations.
        phases: of the step.
        max_age_s: captured at most so long before the newest stored step.
        max_age_versions: acted by a policy at most so many versions older than the newest that acted. Steps that no
            policy acted do not match.
    """

    robots: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    sources: tuple[EpisodeSource, ...] = ()
    phases: tuple[PhaseName, ...] = ()
    success: bool | None = None
    max_age_s: float | None = None
    max_age_versions: int | None = None

    def __post_init__(self) -> None:
        if self.max_age_s is not None and not 0 < self.max_age_s <= MAX_AGE_S:
            raise ConfigError(f"max_age_s is {self.max_age_s}; it must be above 0 and at most {MAX_AGE_S:g}")
        if self.max_age_versions is not None and not 0 <= self.max_age_versions <= MAX_AGE_VERSIONS:
            raise ConfigError(f"max_age_versions is {self.max_age_versions}; it must not be negative")

    def step_filter(self, embodiment: str) -> StepFilter:
        """The filter for steps of `embodiment`."""
        return StepFilter(
            robots=frozenset(self.robots) or None,
            embodiments=frozenset({embodiment}),
            tasks=frozenset(self.tasks) or None,
            phases=frozenset(Phase[name.upper()] for name in self.phases) or None,
            sources=frozenset(self.sources) or None,
            max_age_s=self.max_age_s,
            max_age_versions=self.max_age_versions,
            success=self.success,
        )


@dataclass(frozen=True)
class PrioritizedConfig:
    """See `user_sys.replay.prioritized`."""

    alpha: float = 0.6
    beta: float = 0.4
    beta_draws: int = 100_000


@dataclass(frozen=True)
class InterventionsConfig:
    """`weight`: how many times as likely a step under a person's control is."""

    weight: float = 4.0


@dataclass(frozen=True)
class TasksConfig:
    """See `user_sys.replay.task_balanced`; `low` and `high` limit the share of online steps."""

    alpha: float = 1.5
    low: float = 0.2
    high: float = 0.8
    window: int = 200


@dataclass(frozen=True)
class SamplerConfig:
    """The learner's sampler.

    Attributes:
        kind: mixed (demonstrations with interventions, and online steps, in shares by `learner.demo_fraction`);
            uniform; prioritized (by TD error); interventions (a person's steps more often); tasks (evenly, with online
            shares by TD errors).
        n_step: steps of a transition, fewer at an episode's end.
        only: restricts the steps; in `mixed` its age limits apply to the online half.
        prioritized, interventions, tasks: settings of that kind.
    """

    kind: SelectorKind = "mixed"
    n_step: int = 1
    only: StepFilterConfig = field(default_factory=StepFilterConfig)
    prioritized: PrioritizedConfig = field(default_factory=PrioritizedConfig)
    interventions: InterventionsConfig = field(default_factory=InterventionsConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)

    def __post_init__(self) -> None:
        if not 1 <= self.n_step <= MAX_N_STEP:
            raise ConfigError(f"n_step is {self.n_step}; it must be in 1..{MAX_N_STEP}")
        for name in ("prioritized", "interventions", "tasks"):
            section = getattr(self, name)
            if name != self.kind and section != type(section)():
                raise ConfigError(f"{name} does not apply to kind {self.kind!r}; remove it")
        if self.kind == "mixed" and self.only.sources and not TRAINING_SOURCES & set(self.only.sources):
            raise ConfigError("the mixed sampler draws from demo and online: only.sources excludes both")
        try:
            self.make_selector("", 0.5)
        except ConfigError as error:
            raise ConfigError(f"kind {self.kind}: {error}") from None

    @property
    def is_unfiltered_mixture(self) -> bool:
        """Whether it is RLPD's two halves without a filter."""
        return self.kind == "mixed" and self.only == StepFilterConfig()

    def make_selector(self, embodiment: str, demo_fraction: float) -> Selector:
        """The selector of a learner. Raises ConfigError: the selector refuses the settings."""
        only = self.only.step_filter(embodiment)
        if self.kind == "mixed":
            return DemoOnlineSelector(embodiment, demo_fraction, only)
        if self.kind == "tasks":
            return TaskBalancedSelector(
                only, alpha=self.tasks.alpha, bounds=(self.tasks.low, self.tasks.high), window=self.tasks.window
            )
        only = only if self.only.sources else only.narrowed(TRAINING_SOURCES)
        if self.kind == "prioritized":
            return PrioritizedSelector(only, **asdict(self.prioritized))
        if self.kind == "interventions":
            return InterventionWeightedSelector(only, self.interventions.weight)
        return UniformSelector(only)
