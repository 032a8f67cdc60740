"""Selection for on-policy algorithms: each online step once, in order, unless its policy version is too old.

A batch starts at *windows*: steps 0, H, 2H, ... of an episode, with H steps each, fewer at the episode's end. If
windows end where the source of control changes, the count starts again there. A window is ready when its steps and the
observation after them are stored. It is dropped, and counted, if the policy version of its first step is none of the
newest ones. Windows that no policy of this run began are left out: those of people, of exploration before the first
weights, and of another run's weights.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping

import numpy as np

from user_sys.codec import Array
from user_sys.errors import StoreCorrupt
from user_sys.replay.selectors import AnyStepFilter, Selection, Selector, SelectorState, state_column
from user_sys.store.index import Index, IndexChange, rows_of, spans

NO_ROWS = np.empty(0, np.int64)


class OnceSelector(Selector):
    """See the module. Data-parallel learners take the windows of an episode in turn, so that none waits for long.

    Attributes:
        used, stale: windows that were selected, and that were dropped; of this process, over all resumptions.
        newest_version: the newest one that was added in this process; -1 before the first.
    """

    def __init__(
        self,
        step_filter: AnyStepFilter,
        staleness: int | None,
        length: int = 1,
        rank: int = 0,
        world: int = 1,
        *,
        within_phase: bool = False,
    ) -> None:
        """Selects windows of `length` steps.

        Args:
            step_filter: that the first step of a window must match when it arrives.
            staleness: by how many versions a window may be behind the newest; None for any number.
            within_phase: as `BatchSpec.within_phase`.
        """
        self.used = self.stale = 0
        self.newest_version = -1
        self._filter, self._length, self._rank, self._world = step_filter, length, rank, world
        self._within_phase = within_phase
        self._versions = None if staleness is None else deque[int](maxlen=staleness + 1)
        self._waiting = self._ready = NO_ROWS  # first steps, ascending
        self._examined = 0  # all rows below
        self._newest = NO_ROWS  # rows of the newest selection

    def __len__(self) -> int:
        return len(self._ready)

    def is_ready(self, n: int) -> bool:
        """See `Selector.is_ready`: a batch is never filled up with used windows."""
        return len(self._ready) >= n

    def add_version(self, version: int, index: Index) -> None:
        """Makes `version` the newest; a known version drops nothing."""
        self.newest_version = version
        if self._versions is not None and version not in self._versions:
            self._versions.append(version)
            self._drop_stale(index)

    def update(self, index: Index, change: IndexChange) -> None:
        """See `Selector.update`."""
        self._examine(index, np.arange(self._examined, len(index.steps)))

    def _examine(self, index: Index, rows: Array) -> None:
        """Takes the windows that begin in `rows`, and finds which windows are ready."""
        self._examined = len(index.steps)
        if len(rows):
            low = int(rows[0])
            begins = self._filter.matches(index, low)[rows - low] & (index.steps.policy_version[rows] >= 0)
            steps = _steps_in_phase(index, rows) if self._within_phase else index.step_of(rows)
            begins &= steps % self._length == 0
            self._waiting = np.concatenate([self._waiting, self._own(index, rows[begins])])
        rows = np.sort(np.concatenate([self._waiting, self._ready]))
        rows = rows[index.steps.alive[rows]]
        complete = _is_complete(index, rows, self._length)
        self._waiting, self._ready = rows[~complete], rows[complete]
        self._drop_stale(index)

    def _own(self, index: Index, rows: Array) -> Array:
        """Those of the windows from `rows` on that are this process's. The episode's id says whose its first one is."""
        if self._world == 1:
            return rows
        episodes, which = np.unique(index.episode_of(rows), return_inverse=True)
        first = np.array([zlib.crc32(index.episodes.ids.names[each].encode()) for each in episodes.tolist()], np.int64)
        own: Array = rows[(first[which] + index.step_of(rows) // self._length) % self._world == self._rank]
        return own

    def _drop_stale(self, index: Index) -> None:
        if not self._versions:  # any version counts, or none is published yet
            return
        newest = list(self._versions)
        for name in ("_waiting", "_ready"):
            rows = getattr(self, name)
            kept = np.isin(index.steps.policy_version[rows], newest)
            self.stale += int((~kept).sum())
            setattr(self, name, rows[kept])

    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.select`: the first `n` windows that are ready."""
        self._newest, self._ready = self._ready[:n].copy(), self._ready[n:]
        self.used += len(self._newest)
        return Selection.unweighted(self._newest)

    def select_again(self, places: Array, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.select_again`. If too few windows are ready, it repeats readable ones of the newest selection.

        Raises StoreCorrupt: there is none.
        """
        rows, self._ready = self._ready[: len(places)], self._ready[len(places) :]
        self.used += len(rows)
        found = np.concatenate([rows, np.delete(self._newest, places)])
        if not len(found):
            raise StoreCorrupt(f"none of {n} windows can be read; run `user-sys store verify`")
        self._newest[places] = np.resize(found, len(places))
        return Selection.unweighted(self._newest[places])

    def state_dict(self, index: Index) -> SelectorState:
        """See `Selector.state_dict`."""
        state: SelectorState = {
            "counts": np.array([self.used, self.stale], np.int64),
            "versions": np.array(self._versions or (), np.int64),
            "examined": np.array([_last_sequence(index, self._examined)], np.int64),
        }
        for name, rows in (("waiting", self._waiting), ("ready", self._ready)):
            chunk = index.steps.chunk[rows]
            state[f"{name}.sequence"] = index.chunks.sequence[chunk]
            state[f"{name}.step"] = rows - index.chunks.first_row[chunk]
        return state

    def load_state_dict(self, state: Mapping[str, Array], index: Index) -> None:
        """See `Selector.load_state_dict`. Windows that are no longer stored are left out."""
        self.used, self.stale = state_column(state, "counts").tolist()
        if self._versions is not None:
            known = state_column(state, "versions").tolist()
            known += [version for version in self._versions if version not in known]  # added before
            self._versions = deque(known, self._versions.maxlen)
        for name in ("waiting", "ready"):
            rows = rows_of(index, *(state_column(state, f"{name}.{part}") for part in ("sequence", "step")))
            setattr(self, f"_{name}", rows[rows >= 0])
        self._examine(index, _rows_after(index, int(state_column(state, "examined")[0])))

    def skip(self, sequence: int, index: Index) -> None:
        """Leaves out all windows up to the record `sequence`: another number of processes may have used them."""
        self._waiting = self._ready = NO_ROWS
        self._examine(index, _rows_after(index, sequence))

    def skip_versions(self, before: int, index: Index) -> None:
        """Leaves out all windows of versions `before` this one: in a restored backup, new records have old numbers."""
        self._waiting = self._ready = NO_ROWS
        self._examine(index, np.flatnonzero(index.steps.policy_version >= before))


def _steps_in_phase(index: Index, rows: Array) -> Array:
    """How many steps before each of `rows`, which ascend, the source of control last changed, or the episode began."""
    with_rows = np.zeros(len(index.episodes), bool)
    with_rows[index.episode_of(rows)] = True
    chunks = np.flatnonzero(with_rows[index.chunks.episode])
    found = spans(index.chunks.first_row[chunks], index.chunks.steps[chunks])
    found = found[np.lexsort((index.step_of(found), index.episode_of(found)))]
    episode, step, phase = index.episode_of(found), index.step_of(found), index.steps.phase[found]
    is_first = np.append(True, episode[1:] != episode[:-1])
    changes = is_first | np.append(True, phase[1:] != phase[:-1])
    newest_change = np.maximum.accumulate(np.where(changes, np.arange(len(found)), 0))
    since = step - np.where(is_first, 0, step)[newest_change]
    in_order = np.argsort(found)
    asked: Array = since[in_order[np.searchsorted(found[in_order], rows)]]
    return asked


def _is_complete(index: Index, rows: Array, length: int) -> Array:
    """Whether the windows of `length` steps from `rows` on are stored, with the observation after them; bool.

    The last stored step of a shorter window has one only at the episode's end.
    """
    last = rows
    for _ in range(length - 1):
        after = index.successor(last)
        last = np.where(after >= 0, after, last)
    complete: Array = index.observation_after(last) >= 0
    return complete


def _last_sequence(index: Index, examined: int) -> int:
    return int(index.chunks.sequence[index.steps.chunk[:examined]].max(initial=-1))


def _rows_after(index: Index, sequence: int) -> Array:
    return np.flatnonzero(index.chunks.sequence[index.steps.chunk] > sequence)
