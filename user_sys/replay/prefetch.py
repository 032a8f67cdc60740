"""Batches that are ready when the learner wants them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

from user_sys.codec import Array
from user_sys.errors import StoreError
from user_sys.replay.batch import Batch
from user_sys.replay.choosers import State
from user_sys.replay.sampler import Draw, Sampler

FILL_DEADLINE_S = 120.0

B = TypeVar("B", bound=Batch)


class Prefetcher(Generic[B]):
    """Hands out a sampler's batches; while the learner computes, threads fill the next `depth`. One thread calls it.

    Batches come in the order in which they were drawn, and are drawn in the caller's thread: what comes out does not
    depend on how threads run. With depth 0 there are no threads, a batch is filled when it is asked for.
    """

    def __init__(self, sampler: Sampler[B], depth: int = 2, threads: int = 1) -> None:
        """Allocates ``depth + 1`` batches as they are needed."""
        self._sampler, self._depth = sampler, depth
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="replay-batch") if depth else None
        self._ahead: deque[tuple[Draw[B], Future[None] | None]] = deque()
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

    def _start(self, draw: Draw[B]) -> None:
        self._ahead.append((draw, None if self._pool is None else self._pool.submit(self._sampler.fill, draw)))

    def state_dict(self) -> State:
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
