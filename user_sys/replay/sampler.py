"""Samplers: draw batches from a replay buffer, prefetch them, and the configuration of a run's sampler.

Drawing and filling are separate. Drawing happens in the caller's thread, in order, and depends only on the index
and the sampler's state. Filling may happen in any thread at any time and changes only the batch. So equal store
and state give equal draws, regardless of cache and threads.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from hal.context import ClosedAtExit
from user_sys.codec import Array
from user_sys.errors import ConfigError, StoreCorrupt, StoreError, WireError
from user_sys.replay.batches import Allocate, Batch, BatchSpec, ReadPlan
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.selectors import (
    INTERVENTION_PHASES,
    SOURCES,
    DemoOnlineSelector,
    MixturePart,
    MixturePartConfig,
    MixtureSelector,
    PhaseName,
    PrioritizedConfig,
    PrioritizedSelector,
    Selection,
    Selector,
    SelectorState,
    StepFilter,
    StepFilterUnion,
    TaskBalancedSelector,
    TasksConfig,
    UniformSelector,
    state_column,
)
from user_sys.store.index import rows_of

MAX_REDRAWS = 1000  # per batch
SELECTOR_PREFIX = "selector."  # of keys in checkpoints
FILL_DEADLINE_S = 120.0
MAX_N_STEP = 1000
SelectorKind = Literal["mixed", "uniform", "prioritized", "tasks"]
_logger = logging.getLogger(__name__)


@dataclass
class PendingBatch:
    """A drawn batch that is being filled.

    Attributes:
        batch: has the columns known from the index.
        unreadable: after filling, the samples that could not be read.
    """

    batch: Batch
    reads: list[ReadPlan]
    unreadable: Array = field(default_factory=lambda: np.empty(0, np.int64))


class Sampler:
    """Draws batches from a replay buffer. One thread calls it, except `fill`.

    Attributes:
        redrawn: samples that were replaced because they could not be read.
    """

    def __init__(
        self,
        replay: ReplayBuffer,
        selector: Selector,
        spec: BatchSpec,
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
        self.batch_size, self.redrawn = batch_size, 0
        self._replay, self._selector, self._spec = replay, selector, spec
        self._bits = np.random.PCG64(seed).jumped(rank)
        self._rng = np.random.Generator(self._bits)
        self._allocate = _allocator(pin)
        replay.subscribe(selector.update)

    def __len__(self) -> int:
        """Number of steps that can be drawn."""
        return len(self._selector)

    @property
    def is_ready(self) -> bool:
        """Whether a batch can be drawn."""
        return self._selector.is_ready(self.batch_size)

    @property
    def uses_feedback(self) -> bool:
        """Whether `feedback` changes later draws."""
        return self._selector.uses_feedback

    def empty_batch(self) -> Batch:
        """An uninitialised batch to draw into."""
        return self._spec.empty(self._replay.features, self.batch_size, self._allocate)

    def sample(self, out: Batch | None = None) -> Batch:
        """Draws and fills a batch, in `out` if given. Blocks for misses.

        Raises:
            ValueError: there are too few eligible rows (see `is_ready`).
            StoreCorrupt: no selected row can be read.
            StoreError: to replace those that cannot be read takes longer than `FILL_DEADLINE_S`.
        """
        draw = self.draw(self.empty_batch() if out is None else out)
        self.fill(draw)
        return self.finish(draw)

    def draw(self, batch: Batch) -> PendingBatch:
        """Selects the samples of `batch`. Raises ValueError as `sample`."""
        if not self.is_ready:
            raise ValueError(f"the replay buffer has {len(self)} eligible steps, too few for a batch")
        return self._planned(batch, self._selector.select(self.batch_size, self._rng))

    def _planned(self, batch: Batch, selection: Selection) -> PendingBatch:
        batch.row[:], batch.weight[:], batch.group[:] = selection
        return PendingBatch(batch, self._spec.plan_reads(self._replay.index, batch))

    def replan(self, draw: PendingBatch) -> PendingBatch:
        """The same samples as `draw`, to be filled again, after the features of the replay buffer have changed."""
        return self._planned(self.empty_batch(), Selection(draw.batch.row, draw.batch.weight, draw.batch.group))

    def fill(self, draw: PendingBatch) -> None:
        """Reads the observations of `draw`; blocks for misses. Thread-safe."""
        samples = [
            places // (len(plan.numbers) // len(draw.batch))
            for plan, places in zip(draw.reads, self._replay.read(draw.reads), strict=True)
        ]
        draw.unreadable = np.unique(np.concatenate(samples))

    def finish(self, draw: PendingBatch) -> Batch:
        """Replaces unreadable samples; returns the batch. Raises as `sample`."""
        deadline_s = time.monotonic() + FILL_DEADLINE_S
        for _ in range(MAX_REDRAWS):
            if not len(draw.unreadable):
                _mask_missing_actions(draw.batch)
                return draw.batch
            if time.monotonic() > deadline_s:
                raise _too_slow()
            self._redraw(draw, draw.unreadable)
        raise StoreCorrupt(f"of {MAX_REDRAWS} consecutive draws, none is readable; run `user-sys store verify`")

    def _redraw(self, draw: PendingBatch, places: Array) -> None:
        """Draws the samples at `places` again."""
        self.redrawn += len(places)
        _logger.debug("replay.redrawn rows=%s", draw.batch.row[places])
        part = self._spec.empty(self._replay.features, len(places))
        again = self._planned(part, self._selector.select_again(places, self.batch_size, self._rng))
        self.fill(again)
        for array, replacement in zip(draw.batch.arrays(), part.arrays(), strict=True):
            array[places] = replacement
        draw.unreadable = places[again.unreadable]

    def feedback(self, batch: Batch, losses: Array) -> None:
        """Passes TD errors or losses of the samples of `batch`, float (n,), to the selector."""
        self._selector.feedback(batch.row, batch.group, losses)

    # Checkpoints

    def state_dict(self, ahead: tuple[PendingBatch, ...] = ()) -> SelectorState:
        """Copies of all state that determines later draws and is not in the store; `ahead` are pending draws."""
        index = self._replay.index
        state = {SELECTOR_PREFIX + name: value for name, value in self._selector.state_dict(index).items()}
        rows = np.array([draw.batch.row for draw in ahead], np.int64).reshape(len(ahead), self.batch_size)
        chunk = index.steps.chunk[rows]
        return state | {
            "selector": np.frombuffer(type(self._selector).__name__.encode(), np.uint8),
            "generator": np.frombuffer(json.dumps(self._bits.state).encode(), np.uint8),
            "ahead.sequence": index.chunks.sequence[chunk],
            "ahead.step": rows - index.chunks.first_row[chunk],
            "ahead.weight": np.array([draw.batch.weight for draw in ahead], np.float32).reshape(rows.shape),
            "ahead.group": np.array([draw.batch.group for draw in ahead], np.int32).reshape(rows.shape),
        }

    def load_state_dict(self, state: Mapping[str, Array]) -> list[PendingBatch]:
        """Restores a state; the replay buffer must have been refreshed.

        Later draws are bit-identical if the store's content and the batch size are unchanged. Returns the pending
        draws, to be filled. A draw with a row that is no longer stored is left out, with all draws after it.

        Raises:
            WireError: it is the state of another sampler, or has pending draws of another batch size.
        """
        if (saved := state_column(state, "selector").tobytes().decode()) != (own := type(self._selector).__name__):
            raise WireError(f"the state belongs to a {saved}; this sampler has a {own}")
        columns = [state_column(state, f"ahead.{name}") for name in ("sequence", "step", "weight", "group")]
        if columns[0].size and columns[0].shape[1] != self.batch_size:  # e.g. lowered to fit the GPU's memory
            raise WireError(f"its batches have {columns[0].shape[1]} samples; those of this sampler {self.batch_size}")
        generator = state_column(state, "generator")
        inner = {n.removeprefix(SELECTOR_PREFIX): v for n, v in state.items() if n.startswith(SELECTOR_PREFIX)}
        self._selector.load_state_dict(inner, self._replay.index)
        self._bits.state = json.loads(generator.tobytes())
        draws: list[PendingBatch] = []
        for sequence, step, weight, group in zip(*columns, strict=True):
            rows = rows_of(self._replay.index, sequence, step)
            if (rows < 0).any():
                _logger.warning("replay.pending_draws_dropped count=%d", len(columns[0]) - len(draws))
                break
            draws.append(self._planned(self.empty_batch(), Selection(rows, weight, group)))
        return draws


def _too_slow() -> StoreError:
    return StoreError(f"the disk took longer than {FILL_DEADLINE_S:.0f} s to fill a batch")


def _mask_missing_actions(batch: Batch) -> None:
    """Of steps without an action, e.g. of films: `mask` is False and the action 0; `weight` is 0 if it is the first."""
    missing = np.asarray(np.isnan(batch.action).any(-1)).reshape(batch.mask.shape)
    if missing.any():
        batch.mask[missing] = False
        batch.weight[missing[:, 0]] = 0.0
        np.nan_to_num(batch.action, copy=False)


def _allocator(pin: bool) -> Allocate:
    if not pin:
        return np.empty
    import torch  # lazy: only learners on a GPU need torch here

    def allocate_pinned(shape: tuple[int, ...], dtype: str) -> Array:
        return torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=True).numpy()

    return allocate_pinned


class Prefetcher(ClosedAtExit):
    """Returns a sampler's batches; threads fill the next `depth` batches during training. One thread calls it.

    Batches are drawn in the caller's thread and returned in order, so results do not depend on thread timing. With
    depth 0 there are no threads, and each batch is filled on request.

    Attributes:
        sampler: draws the batches.
    """

    def __init__(self, sampler: Sampler, depth: int = 2, threads: int = 1) -> None:
        """Allocates ``depth + 1`` batches on first use."""
        self.sampler, self._depth = sampler, depth
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="replay-batch") if depth else None
        self._ahead: deque[tuple[PendingBatch, Future[None] | None]] = deque()
        self._free: list[Batch] = []
        self._returned: Batch | None = None

    def next(self) -> Batch:
        """The next batch, valid until the next call.

        Raises:
            ValueError: there are too few eligible rows.
            StoreError: no selected row can be read, or filling takes longer than `FILL_DEADLINE_S`.
        """
        if self._returned is not None:
            self._free.append(self._returned)
            self._returned = None
        while len(self._ahead) <= self._depth:
            self._start(self.sampler.draw(self._free.pop() if self._free else self.sampler.empty_batch()))
        draw, filled = self._ahead.popleft()
        if filled is None:
            self.sampler.fill(draw)
        else:
            try:
                filled.result(FILL_DEADLINE_S)
            except TimeoutError:
                raise _too_slow() from None
        self._returned = self.sampler.finish(draw)
        return self._returned

    def replan(self) -> None:
        """Fills the batches drawn ahead again, after the features of the replay buffer have changed."""
        draws, self._free, self._returned = [draw for draw, _ in self._ahead], [], None
        for _, filled in self._ahead:
            if filled is not None:
                wait((filled,), FILL_DEADLINE_S)
        self._ahead.clear()
        for draw in draws:
            self._start(self.sampler.replan(draw))

    def _start(self, draw: PendingBatch) -> None:
        self._ahead.append((draw, None if self._pool is None else self._pool.submit(self.sampler.fill, draw)))

    def state_dict(self) -> SelectorState:
        """The sampler's state, with the batches drawn ahead."""
        return self.sampler.state_dict(tuple(draw for draw, _ in self._ahead))

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restores a state, before the first `next`. Raises as `Sampler.load_state_dict`."""
        for draw in self.sampler.load_state_dict(state):
            self._start(draw)

    def close(self) -> None:
        """Stops the threads after their current fills. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class SamplerConfig:
    """The learner's sampler.

    Attributes:
        kind: mixed (what the algorithm trains on, for rlpd demonstrations with interventions, and online steps, in
            shares by `learner.demo_fraction`); uniform; prioritized (by TD error); tasks (evenly, with online shares
            by TD errors).
        mixture: parts of each batch of `mixed`, in place of what the algorithm trains on; see replay.md.
        n_step: steps of a transition, fewer at an episode's end.
        only: restricts the steps; in `mixed` its age limits apply to the online half. Without sources: demo and
            online. The learner sets the embodiment.
        prioritized, tasks: settings of that kind.
    """

    kind: SelectorKind = "mixed"
    mixture: tuple[MixturePartConfig, ...] = ()
    n_step: int = 1
    only: StepFilter = field(default_factory=StepFilter)
    prioritized: PrioritizedConfig = field(default_factory=PrioritizedConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)

    def __post_init__(self) -> None:
        if not 1 <= self.n_step <= MAX_N_STEP:
            raise ConfigError(f"n_step is {self.n_step}; it must be in 1..{MAX_N_STEP}")
        if self.only.embodiments:
            raise ConfigError("only.embodiments: a learner draws steps of its own embodiment; remove it")
        for name in ("prioritized", "tasks"):
            section = getattr(self, name)
            if name != self.kind and section != type(section)():
                raise ConfigError(f"{name} does not apply to kind {self.kind!r}; remove it")
        if self.mixture and self.kind != "mixed":
            raise ConfigError(f"mixture does not apply to kind {self.kind!r}; remove it, or set kind: mixed")
        if self.kind == "mixed" and self.only.sources and not {*SOURCES} & {*self.only.sources}:
            raise ConfigError("the mixed sampler draws from demo and online: only.sources excludes both")
        try:
            self.make_selector((), 0.5)
        except ConfigError as error:
            raise ConfigError(f"kind {self.kind}: {error}") from None

    @property
    def is_unfiltered_mixture(self) -> bool:
        """Whether it is what the algorithm trains on, without a filter."""
        return self.kind == "mixed" and self.only == StepFilter() and not self.mixture

    @property
    def replaced_by(self) -> str:
        """Which of its settings replaces the algorithm's shares of steps; empty if none does."""
        own_kind = "" if self.kind == "mixed" else f"sampler.kind {self.kind!r}"
        return "sampler.mixture" if self.mixture else own_kind

    @property
    def uses_feedback(self) -> bool:
        """Whether its selector needs the algorithm's TD errors."""
        return self.make_selector((), 0.5).uses_feedback

    def make_selector(
        self,
        embodiments: tuple[str, ...],
        demo_fraction: float,
        mixture: Sequence[MixturePart] = (),
        *,
        finished: bool = False,
        phases: tuple[PhaseName, ...] = (),
        interventions: tuple[PhaseName, ...] = INTERVENTION_PHASES,
    ) -> Selector:
        """The selector of a learner. Raises ConfigError: the selector refuses the settings.

        Args:
            mixture: what `mixed` draws without a mixture of its own; empty for demonstrations and online steps by
                `demo_fraction`.
            finished, phases: of the steps that any kind draws, in addition to `only`; its phases replace `phases`.
            interventions: phases of that role in a mixture of its own.
        """
        total = sum(part.share for part in self.mixture)
        mixture = [part.to_part(total, interventions) for part in self.mixture] or mixture
        only = replace(
            self.only,
            embodiments=embodiments,
            finished=self.only.finished or finished,
            phases=self.only.phases or phases,
        )
        if self.kind == "mixed" and mixture:
            return MixtureSelector(
                [(StepFilterUnion(tuple((only, each) for each in part.filters)), part.share) for part in mixture]
            )
        if self.kind == "mixed":
            return DemoOnlineSelector(embodiments, demo_fraction, only)
        if self.kind == "tasks":
            return TaskBalancedSelector(only, self.tasks)
        only = replace(only, sources=only.sources or SOURCES)
        if self.kind == "prioritized":
            return PrioritizedSelector(only, self.prioritized)
        return UniformSelector(only)
