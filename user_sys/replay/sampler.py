"""A sampler: a chooser, a shape and a generator over a replay buffer; and its state, for checkpoints.

Choosing and filling are apart. Choosing happens in the caller's thread, in order, and looks at the index and the
sampler's state alone. Filling may happen in any thread and at any time: it changes nothing but the batch. So the same
store and the same state give the same draws, whatever the cache holds and however threads run.

Batches that are ready when the learner wants them.

What a run says about its sampler: which steps it draws, how it chooses, and how many make a transition.
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

MAX_REDRAWS = 1000  # for one sample; then nothing of the store can be read
SELECTOR_PREFIX = "chooser."
_MASK = (1 << 64) - 1

B = TypeVar("B", bound=Batch)
_logger = logging.getLogger(__name__)


@dataclass
class PendingBatch(Generic[B]):
    """A batch on its way: chosen, to be filled, to be finished.

    Attributes:
        batch: what the index knows is there already.
        redraw_seed: seed for what must be drawn anew.
        unreadable: once filled, the samples that could not be read.
    """

    batch: B
    reads: list[ReadPlan]
    redraw_seed: int
    unreadable: Array = field(default_factory=lambda: np.empty(0, np.int64))


class Sampler(Generic[B]):
    """Draws batches from a replay buffer. One thread calls it, but for `fill`.

    Attributes:
        redrawn: samples that were drawn anew because they could not be read.
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
        """Follows `replay`; `chooser` is this sampler's own.

        Args:
            rank, world: which of several data-parallel learners this is: each draws from a stretch of its own of the
                one sequence that `seed` gives; the stretches never meet.
            pin: batches in memory that a GPU copies from without a detour.

        Raises:
            ConfigError: an empty batch, or a rank outside its world.
        """
        if batch_size < 1 or not 0 <= rank < world:
            raise ConfigError(f"a batch of {batch_size} for rank {rank} of {world}")
        self._replay, self._chooser, self._shape, self.batch_size = replay, selector, batch_builder, batch_size
        self._allocate = _allocator(pin)
        self._bits = np.random.PCG64(seed).jumped(rank)
        self._rng = np.random.Generator(self._bits)
        self.redrawn = 0
        replay.subscribe(selector.update)

    def __len__(self) -> int:
        """How many rows it chooses from now."""
        return len(self._chooser)

    @property
    def uses_feedback(self) -> bool:
        """Whether `feedback` changes later draws; where it does not, nobody need work it out."""
        return self._chooser.uses_feedback

    def empty_batch(self) -> B:
        """Arrays for a batch, to be handed to `sample` or `draw` again and again."""
        return self._shape.empty(self._replay.features, self.batch_size, self._allocate)

    def sample(self, out: B | None = None) -> B:
        """Draws and fills a batch, `out` where it is given.

        Raises:
            ValueError: there is nothing to choose from yet (see `len`).
            StoreCorrupt: nothing that is chosen can be read.
        """
        draw = self.draw(self.empty_batch() if out is None else out)
        self.fill(draw)
        return self.finish(draw)

    def draw(self, batch: B) -> PendingBatch[B]:
        """Chooses the samples of `batch`. Raises ValueError as `sample`."""
        if not len(self._chooser):
            raise ValueError("the replay buffer holds nothing to choose from yet")
        choice = self._chooser.select(self.batch_size, self._rng)
        return self._plan(batch, choice, int(self._rng.integers(0, 1 << 63)))

    def _plan(self, batch: B, choice: Selection, spare: int) -> PendingBatch[B]:
        batch.row[:], batch.weight[:], batch.group[:] = choice
        return PendingBatch(batch, self._shape.plan_reads(self._replay.observation_index, batch), spare)

    def fill(self, draw: PendingBatch[B]) -> None:
        """Fetches what `draw` chose; blocks for what is cold. Any thread may call it."""
        samples = [
            places // (len(fetch.numbers) // len(draw.batch))
            for fetch, places in zip(draw.reads, self._replay.read(draw.reads), strict=True)
            if len(places)
        ]
        if samples:
            draw.unreadable = np.unique(np.concatenate(samples))

    def finish(self, draw: PendingBatch[B]) -> B:
        """Draws anew what could not be read; returns the batch. Raises StoreCorrupt as `sample`."""
        rng = np.random.Generator(np.random.PCG64(draw.redraw_seed)) if len(draw.unreadable) else None
        for sample in draw.unreadable.tolist():
            assert rng is not None
            self._mend(draw.batch.part(sample, sample + 1), rng)
        return draw.batch

    def _mend(self, single: B, rng: np.random.Generator) -> None:
        for _ in range(MAX_REDRAWS):
            self.redrawn += 1
            _logger.debug("replay.redrawn row=%d", single.row[0])
            draw = self._plan(single, self._chooser.redraw(int(single.group[0]), rng), 0)
            self.fill(draw)
            if not len(draw.unreadable):
                return
        raise StoreCorrupt(f"of {MAX_REDRAWS} draws in a row none can be read; verify the store")

    def feedback(self, batch: Batch, losses: Array) -> None:
        """Tells the chooser how the samples of `batch` did: TD errors or losses, float (n,)."""
        self._chooser.feedback(batch.row, batch.group, losses)

    # Checkpoints

    def state_dict(self, ahead: tuple[PendingBatch[B], ...] = ()) -> SelectorState:
        """Copies of all that determines later draws and is not in the store; `ahead` are draws not yet handed out."""
        timeline = self._replay.observation_index
        chunk = timeline.index.steps.chunk
        state = {SELECTOR_PREFIX + name: value for name, value in self._chooser.state_dict(timeline).items()}
        rows = np.array([draw.batch.row for draw in ahead], np.int64).reshape(len(ahead), self.batch_size)
        return state | {
            "generator": _generator_state(self._bits),
            "ahead.sequence": timeline.index.chunks.sequence[chunk[rows]],
            "ahead.step": rows - timeline.index.chunks.first_row[chunk[rows]],
            "ahead.weight": np.array([draw.batch.weight for draw in ahead], np.float32).reshape(rows.shape),
            "ahead.group": np.array([draw.batch.group for draw in ahead], np.int32).reshape(rows.shape),
            "ahead.spare": np.array([draw.redraw_seed for draw in ahead], np.int64),
        }

    def load_state_dict(self, state: Mapping[str, Array]) -> list[PendingBatch[B]]:
        """Takes up where `state` was taken; the replay buffer must have been refreshed.

        Later draws are bit-identical if the store holds what it held then. Returns the draws that were ahead, to be
        filled; one with a row that is no longer stored is left out, and those behind it too.

        Raises:
            WireError: it is the state of another sampler.
        """
        inner = {
            name.removeprefix(SELECTOR_PREFIX): value
            for name, value in state.items()
            if name.startswith(SELECTOR_PREFIX)
        }
        sequence, step, weight, group, spare = (
            state_column(state, f"ahead.{name}") for name in ("sequence", "step", "weight", "group", "spare")
        )
        if sequence.shape != (len(spare), self.batch_size):
            raise WireError(f"the sampler's state is of another batch size than {self.batch_size}")
        _set_generator(self._bits, state_column(state, "generator"))
        self._chooser.load_state_dict(inner, self._replay.observation_index)
        draws: list[PendingBatch[B]] = []
        for place in range(len(spare)):
            rows = self._rows(sequence[place], step[place])
            if rows is None:
                _logger.warning("replay.draws_gone count=%d", len(spare) - place)
                break
            choice = Selection(rows, weight[place], group[place])
            draws.append(self._plan(self.empty_batch(), choice, int(spare[place])))
        return draws

    def _rows(self, sequence: Array, step: Array) -> Array | None:
        """The rows of steps of chunks by the sequence number of their records; None where one is gone."""
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
    from user_sys.replay.pinned import allocate_pinned  # here, because it imports torch

    return allocate_pinned


def _generator_state(bits: np.random.PCG64) -> Array:
    """uint64 (6,): PCG64's state and increment, each the low half first, and what is left of a 64-bit draw."""
    state = bits.state
    inner = state["state"]
    numbers = [part for name in ("state", "inc") for part in (inner[name] & _MASK, inner[name] >> 64)]
    return np.array([*numbers, state["has_uint32"], state["uinteger"]], np.uint64)


def _set_generator(bits: np.random.PCG64, saved: Array) -> None:
    if saved.shape != (6,):
        raise WireError("the sampler's state holds no generator")
    low, high, inc_low, inc_high, has, rest = map(int, saved)
    state = bits.state
    state["state"] = {"state": low | high << 64, "inc": inc_low | inc_high << 64}
    state["has_uint32"], state["uinteger"] = has, rest
    bits.state = state


FILL_DEADLINE_S = 120.0


class Prefetcher(Generic[B]):
    """Hands out a sampler's batches; while the learner computes, threads fill the next `depth`. One thread calls it.

    Batches come in the order in which they were drawn, and are drawn in the caller's thread: what comes out does not
    depend on how threads run. With depth 0 there are no threads, a batch is filled when it is asked for.
    """

    def __init__(self, sampler: Sampler[B], depth: int = 2, threads: int = 1) -> None:
        """Allocates ``depth + 1`` batches as they are needed."""
        self._sampler, self._depth = sampler, depth
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="replay-batch") if depth else None
        self._ahead: deque[tuple[PendingBatch[B], Future[None] | None]] = deque()
        self._free: list[B] = []
        self._handed: B | None = None

    def next(self) -> B:
        """The next batch, which is the caller's until the next call.

        Raises:
            ValueError: there is nothing to choose from yet.
            StoreError: nothing that is chosen can be read, or a batch takes longer than `FILL_DEADLINE_S` to fill.
        """
        if self._handed is not None:
            self._free.append(self._handed)
            self._handed = None
        while len(self._ahead) <= self._depth:
            self._start(self._sampler.draw(self._free.pop() if self._free else self._sampler.empty_batch()))
        draw, filled = self._ahead.popleft()
        if filled is None:
            self._sampler.fill(draw)
        else:
            try:
                filled.result(FILL_DEADLINE_S)
            except TimeoutError:
                raise StoreError(f"the disk took longer than {FILL_DEADLINE_S:.0f} s to give a batch") from None
        self._handed = self._sampler.finish(draw)
        return self._handed

    def _start(self, draw: PendingBatch[B]) -> None:
        self._ahead.append((draw, None if self._pool is None else self._pool.submit(self._sampler.fill, draw)))

    def state_dict(self) -> SelectorState:
        """The sampler's state such that the next batch is the next again, those drawn ahead included."""
        return self._sampler.state_dict(tuple(draw for draw, _ in self._ahead))

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Takes up where `state` was taken, before the first `next`. Raises as `Sampler.load_state_dict`."""
        for draw in self._sampler.load_state_dict(state):
            self._start(draw)

    def close(self) -> None:
        """Ends the threads; fills that have begun are done first. Calling it twice is harmless."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


MAX_N_STEP = 1000
MAX_AGE_S = 1e9  # thirty years
MAX_AGE_VERSIONS = 1 << 62
TRAINING_SOURCES = frozenset(
    {EpisodeSource.DEMO, EpisodeSource.ONLINE}
)  # evaluations only where `only.sources` names them

SelectorKind = Literal["mixed", "uniform", "prioritized", "interventions", "tasks"]
PhaseName = Literal["policy", "teleop", "correction", "recovery"]


@dataclass(frozen=True)
class StepFilterConfig:
    """Conditions that a step meets to be drawn, all of them; an empty list and null are none.

    Attributes:
        robots, tasks, sources, success: of the episode, as labelled. Without sources: demo and online;
            uniform, prioritized and interventions may draw evaluations.
        phases: of the step.
        max_age_s: captured at most so long before the newest step stored.
        max_age_versions: acted by weights at most so many versions older than the newest that acted. Steps that no
            weights acted do not meet it.
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
            raise ConfigError(f"max_age_s is {self.max_age_s}; it must lie above 0 and up to {MAX_AGE_S:g}")
        if self.max_age_versions is not None and not 0 <= self.max_age_versions <= MAX_AGE_VERSIONS:
            raise ConfigError(f"max_age_versions is {self.max_age_versions}; it must not be negative")

    def step_filter(self, embodiment: str) -> StepFilter:
        """The steps of `embodiment` that meet it."""
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
    """`weight`: how many times as likely a step is that a person controlled."""

    weight: float = 4.0


@dataclass(frozen=True)
class TasksConfig:
    """See `user_sys.replay.task_balanced`; `low` and `high` bound the share of online steps."""

    alpha: float = 1.5
    low: float = 0.2
    high: float = 0.8
    window: int = 200


@dataclass(frozen=True)
class SamplerConfig:
    """How the learner draws.

    Attributes:
        kind: mixed: demonstrations and interventions beside online steps, in shares (`learner.demo_fraction`). The
            others draw from both without shares: uniform; prioritized by TD error; interventions, a person's steps more
            often; tasks, evenly from each, with as much online as its TD errors ask for.
        n_step: steps of a transition, fewer at an episode's end.
        only: what may be drawn; in `mixed` its ages are for the online half.
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
            raise ConfigError(f"n_step is {self.n_step}; it must lie in 1..{MAX_N_STEP}")
        for name in ("prioritized", "interventions", "tasks"):
            section = getattr(self, name)
            if name != self.kind and section != type(section)():
                raise ConfigError(f"{name} means nothing to kind {self.kind!r}: leave it out")
        if self.kind == "mixed" and self.only.sources and not TRAINING_SOURCES & set(self.only.sources):
            raise ConfigError("the mixed sampler draws from demo and online: only.sources leaves it nothing")
        try:
            self.make_selector("", 0.5)
        except ConfigError as error:
            raise ConfigError(f"kind {self.kind}: {error}") from None

    @property
    def is_unfiltered_mixture(self) -> bool:
        """Whether it is RLPD's two halves with nothing left out."""
        return self.kind == "mixed" and self.only == StepFilterConfig()

    def make_selector(self, embodiment: str, demo_fraction: float) -> Selector:
        """What chooses a learner's steps. Raises ConfigError: settings that the chooser refuses."""
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
