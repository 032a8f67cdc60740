"""A sampler: a chooser, a shape and a generator over a replay buffer; and its state, for checkpoints.

Choosing and filling are apart. Choosing happens in the caller's thread, in order, and looks at the index and the
sampler's state alone. Filling may happen in any thread and at any time: it changes nothing but the batch. So the same
store and the same state give the same draws, whatever the cache holds and however threads run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from user_sys.codec import Array
from user_sys.errors import ConfigError, StoreCorrupt, WireError
from user_sys.replay.batch import Batch
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.choosers import Choice, Chooser, State, column
from user_sys.replay.features import Allocate
from user_sys.replay.shapes import Fetch, Shape

REDRAWS_MAX = 1000  # for one sample; then nothing of the store can be read
CHOOSER = "chooser."
_MASK = (1 << 64) - 1

B = TypeVar("B", bound=Batch)
_logger = logging.getLogger(__name__)


@dataclass
class Draw(Generic[B]):
    """A batch on its way: chosen, to be filled, to be finished.

    Attributes:
        batch: what the index knows is there already.
        spare: seed for what must be drawn anew.
        bad: once filled, the samples that could not be read.
    """

    batch: B
    fetches: list[Fetch]
    spare: int
    bad: Array = field(default_factory=lambda: np.empty(0, np.int64))


class Sampler(Generic[B]):
    """Draws batches from a replay buffer. One thread calls it, but for `fill`.

    Attributes:
        redrawn: samples that were drawn anew because they could not be read.
    """

    def __init__(
        self,
        replay: ReplayBuffer,
        chooser: Chooser,
        shape: Shape[B],
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
        self._replay, self._chooser, self._shape, self.batch_size = replay, chooser, shape, batch_size
        self._allocate = _allocator(pin)
        self._bits = np.random.PCG64(seed).jumped(rank)
        self._rng = np.random.Generator(self._bits)
        self.redrawn = 0
        replay.listen(chooser.update)

    def __len__(self) -> int:
        """How many rows it chooses from now."""
        return len(self._chooser)

    @property
    def hears(self) -> bool:
        """Whether `feedback` changes later draws; where it does not, nobody need work it out."""
        return self._chooser.hears

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

    def draw(self, batch: B) -> Draw[B]:
        """Chooses the samples of `batch`. Raises ValueError as `sample`."""
        if not len(self._chooser):
            raise ValueError("the replay buffer holds nothing to choose from yet")
        choice = self._chooser.choose(self.batch_size, self._rng)
        return self._plan(batch, choice, int(self._rng.integers(0, 1 << 63)))

    def _plan(self, batch: B, choice: Choice, spare: int) -> Draw[B]:
        batch.row[:], batch.weight[:], batch.group[:] = choice
        return Draw(batch, self._shape.plan(self._replay.timeline, batch), spare)

    def fill(self, draw: Draw[B]) -> None:
        """Fetches what `draw` chose; blocks for what is cold. Any thread may call it."""
        samples = [
            places // (len(fetch.numbers) // len(draw.batch))
            for fetch, places in zip(draw.fetches, self._replay.fetch(draw.fetches), strict=True)
            if len(places)
        ]
        if samples:
            draw.bad = np.unique(np.concatenate(samples))

    def finish(self, draw: Draw[B]) -> B:
        """Draws anew what could not be read; returns the batch. Raises StoreCorrupt as `sample`."""
        rng = np.random.Generator(np.random.PCG64(draw.spare)) if len(draw.bad) else None
        for sample in draw.bad.tolist():
            assert rng is not None
            self._mend(draw.batch.part(sample, sample + 1), rng)
        return draw.batch

    def _mend(self, single: B, rng: np.random.Generator) -> None:
        for _ in range(REDRAWS_MAX):
            self.redrawn += 1
            _logger.debug("replay.redrawn row=%d", single.row[0])
            draw = self._plan(single, self._chooser.redraw(int(single.group[0]), rng), 0)
            self.fill(draw)
            if not len(draw.bad):
                return
        raise StoreCorrupt(f"of {REDRAWS_MAX} draws in a row none can be read; verify the store")

    def feedback(self, batch: Batch, losses: Array) -> None:
        """Tells the chooser how the samples of `batch` did: TD errors or losses, float (n,)."""
        self._chooser.feedback(batch.row, batch.group, losses)

    # Checkpoints

    def state_dict(self, ahead: tuple[Draw[B], ...] = ()) -> State:
        """Copies of all that determines later draws and is not in the store; `ahead` are draws not yet handed out."""
        timeline = self._replay.timeline
        chunk = timeline.index.steps.chunk
        state = {CHOOSER + name: value for name, value in self._chooser.state_dict(timeline).items()}
        rows = np.array([draw.batch.row for draw in ahead], np.int64).reshape(len(ahead), self.batch_size)
        return state | {
            "generator": _generator_state(self._bits),
            "ahead.sequence": timeline.index.chunks.sequence[chunk[rows]],
            "ahead.step": rows - timeline.index.chunks.first_row[chunk[rows]],
            "ahead.weight": np.array([draw.batch.weight for draw in ahead], np.float32).reshape(rows.shape),
            "ahead.group": np.array([draw.batch.group for draw in ahead], np.int32).reshape(rows.shape),
            "ahead.spare": np.array([draw.spare for draw in ahead], np.int64),
        }

    def load_state_dict(self, state: Mapping[str, Array]) -> list[Draw[B]]:
        """Takes up where `state` was taken; the replay buffer must have been refreshed.

        Later draws are bit-identical if the store holds what it held then. Returns the draws that were ahead, to be
        filled; one with a row that is no longer stored is left out, and those behind it too.

        Raises:
            WireError: it is the state of another sampler.
        """
        inner = {name.removeprefix(CHOOSER): value for name, value in state.items() if name.startswith(CHOOSER)}
        sequence, step, weight, group, spare = (
            column(state, f"ahead.{name}") for name in ("sequence", "step", "weight", "group", "spare")
        )
        if sequence.shape != (len(spare), self.batch_size):
            raise WireError(f"the sampler's state is of another batch size than {self.batch_size}")
        _set_generator(self._bits, column(state, "generator"))
        self._chooser.load_state_dict(inner, self._replay.timeline)
        draws: list[Draw[B]] = []
        for place in range(len(spare)):
            rows = self._rows(sequence[place], step[place])
            if rows is None:
                _logger.warning("replay.draws_gone count=%d", len(spare) - place)
                break
            choice = Choice(rows, weight[place], group[place])
            draws.append(self._plan(self.empty_batch(), choice, int(spare[place])))
        return draws

    def _rows(self, sequence: Array, step: Array) -> Array | None:
        """The rows of steps of chunks by the sequence number of their records; None where one is gone."""
        chunks = self._replay.timeline.index.chunks
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
    from user_sys.replay.pinned import pinned  # here, because it imports torch

    return pinned


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
