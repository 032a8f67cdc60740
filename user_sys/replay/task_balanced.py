"""SOP's adaptive sampler, after Pan et al., "SOP: A Scalable Online Post-Training System for Vision-Language-Action
Models", 2026 (arXiv 2601.03044): tasks are drawn evenly, and within a task the share of online experience follows
the recent losses on either side,

    w_on = exp(alpha l_on) / (exp(alpha l_on) + exp(l_off)),     clipped to [0.2, 0.8]

l_on and l_off are means over the last 200 learner steps of the losses of the task's online and offline samples;
alpha > 1 favours the online side. Not from the paper: the value of alpha, and that a side without losses counts as
equal to the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from user_sys.codec import Array
from user_sys.episode import EpisodeSource
from user_sys.errors import ConfigError, WireError
from user_sys.replay.batches import ObservationIndex
from user_sys.replay.selectors import (
    EligibleSteps,
    Selection,
    Selector,
    SelectorState,
    StepFilter,
    state_column,
    unweighted_selection,
)
from user_sys.store.index import Index, IndexChange

OFFLINE, ONLINE = 0, 1
MAX_WINDOW = 1_000_000


class _TaskLosses:
    """One task's rows and their losses, offline first."""

    def __init__(self, name: str, step_filter: StepFilter, window: int) -> None:
        self.name = name
        of_task = dataclasses.replace(step_filter, tasks=frozenset({name}))
        self.sides = tuple(
            EligibleSteps(dataclasses.replace(of_task, sources=frozenset({source})))
            for source in (EpisodeSource.DEMO, EpisodeSource.ONLINE)
        )
        self.losses = np.zeros((2, window))
        self.loss_counts = np.zeros(2, np.int64)

    def __len__(self) -> int:
        return sum(map(len, self.sides))

    def record_loss(self, side: int, loss: float) -> None:
        self.losses[side, self.loss_counts[side] % self.losses.shape[1]] = loss
        self.loss_counts[side] += 1

    def mean_loss(self, side: int) -> float | None:
        count = min(int(self.loss_counts[side]), self.losses.shape[1])
        return float(self.losses[side, :count].mean()) if count else None


class TaskBalancedSelector(Selector):
    """See the module. A sample's group is 2 x (its task's place) + (1 if it is online)."""

    uses_feedback = True

    def __init__(
        self,
        step_filter: StepFilter = StepFilter(),  # noqa: B008  # frozen
        *,
        alpha: float = 1.5,
        bounds: tuple[float, float] = (0.2, 0.8),
        window: int = 200,
    ) -> None:
        """`step_filter` must not restrict tasks or sources. Raises ConfigError: it does, or the bounds are invalid."""
        if step_filter.tasks is not None or step_filter.sources is not None:
            raise ConfigError("a task-balanced sampler sets tasks and sources itself; remove them from the filter")
        if not 0.0 <= bounds[0] <= bounds[1] <= 1.0 or not 1 <= window <= MAX_WINDOW or not 0 < alpha < math.inf:
            raise ConfigError(
                f"bounds {bounds}, window {window} and alpha {alpha}: the bounds must be within 0 and 1,"
                f" window lie in 1..{MAX_WINDOW} and alpha be above 0"
            )
        self._where, self._alpha, self._bounds, self._window = step_filter, alpha, bounds, window
        self._tasks: list[_TaskLosses] = []

    def __len__(self) -> int:
        return sum(map(len, self._tasks))

    def update(self, observations: ObservationIndex, change: IndexChange) -> None:
        """See `Selector.update`. Tasks are in the order of their first episodes in the store."""
        nothing = np.empty(0, np.int64)
        everything = IndexChange(
            range(len(observations.index.steps)), range(len(observations.index.chunks)), nothing, nothing, nothing
        )
        followed = len(self._tasks)
        self._find_tasks(observations.index)
        for place, task in enumerate(self._tasks):
            for side in task.sides:
                side.update(observations, change if place < followed else everything)

    def _find_tasks(self, index: Index) -> None:
        for name in index.episodes.tasks.names[len(self._tasks) :]:
            self._tasks.append(_TaskLosses(name, self._where, self._window))

    def online_share(self, task: str) -> float:
        """Current share of online samples of `task`. Raises KeyError: there is no such task."""
        for each in self._tasks:
            if each.name == task:
                return self._share(each)
        raise KeyError(task)

    def _share(self, task: _TaskLosses) -> float:
        if not len(task.sides[OFFLINE]) or not len(task.sides[ONLINE]):
            return float(len(task.sides[ONLINE]) > 0)
        online, offline = task.mean_loss(ONLINE), task.mean_loss(OFFLINE)
        online, offline = (offline if online is None else online), (online if offline is None else offline)
        if online is None or offline is None:
            return min(max(0.5, self._bounds[0]), self._bounds[1])
        exponent = min(max(offline - self._alpha * online, -700.0), 700.0)
        return min(max(1.0 / (1.0 + math.exp(exponent)), self._bounds[0]), self._bounds[1])

    def select(self, n: int, rng: np.random.Generator) -> Selection:
        """See `Selector.select`."""
        nonempty = [place for place, task in enumerate(self._tasks) if len(task)]
        counts = np.full(len(nonempty), n // len(nonempty))
        counts[rng.permutation(len(nonempty))[: n % len(nonempty)]] += 1
        rows, groups = [], []
        for place, count in zip(nonempty, counts.tolist(), strict=True):
            online = int(count * self._share(self._tasks[place]) + rng.random())
            for side, of_side in ((OFFLINE, count - online), (ONLINE, online)):
                if of_side:
                    rows.append(_draw(self._tasks[place].sides[side], of_side, rng))
                    groups.append(np.full(of_side, 2 * place + side, np.int32))
        return unweighted_selection(np.concatenate(rows))._replace(groups=np.concatenate(groups))

    def redraw(self, group: int, rng: np.random.Generator) -> Selection:
        """See `Selector.redraw`: of the same task and side."""
        rows = _draw(self._tasks[group // 2].sides[group % 2], 1, rng)
        return unweighted_selection(rows)._replace(groups=np.array([group], np.int32))

    def feedback(self, rows: Array, groups: Array, losses: Array) -> None:
        """See `Selector.feedback`: the losses of one learner step; non-finite ones are ignored."""
        losses = np.asarray(losses, np.float64)
        for group in np.unique(groups).tolist():
            of_group = losses[(groups == group) & np.isfinite(losses)]
            if len(of_group):
                self._tasks[group // 2].record_loss(group % 2, float(of_group.mean()))

    def state_dict(self, observations: ObservationIndex) -> SelectorState:
        """See `Selector.state_dict`."""
        state: SelectorState = {}
        for task in self._tasks:
            state |= {f"losses.{task.name}": task.losses.copy(), f"heard.{task.name}": task.loss_counts.copy()}
        return state

    def load_state_dict(self, state: Mapping[str, Array], observations: ObservationIndex) -> None:
        """See `Selector.load_state_dict`. Tasks that the state lacks have no losses yet."""
        for task in self._tasks:
            if f"losses.{task.name}" not in state:
                continue
            losses, counts = state_column(state, f"losses.{task.name}"), state_column(state, f"heard.{task.name}")
            if losses.shape != task.losses.shape or counts.shape != task.loss_counts.shape:
                raise WireError(f"the losses of {task.name!r} have another window size")
            task.losses[:], task.loss_counts[:] = losses, counts


def _draw(candidates: EligibleSteps, n: int, rng: np.random.Generator) -> Array:
    rows: Array = candidates.rows[rng.integers(0, len(candidates), n)]
    return rows
