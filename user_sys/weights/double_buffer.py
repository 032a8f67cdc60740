"""Two copies of a policy: one acts while the other loads new weights. The control loop swaps them at a safe point."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from hal.spec import Array
from user_sys.errors import WireError
from user_sys.messages import FOREIGN_RUN, NO_VERSION
from user_sys.policies.policy import Policy

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class _LoadedPolicy:
    policy: Policy
    version: int
    offered_s: float
    run: bytes


class DoubleBufferedPolicy:
    """A policy that loads weights in one thread while another acts.

    The control loop's thread calls `policy`, `version`, `swap_delay_s` and `swap_if_ready`; one other thread calls
    `load`.
    They share no lock. The control loop's thread neither frees nor loads a policy, so a swap costs a few assignments
    for
    any size of policy. `user_sys.weights.receiver` decides which versions follow each other.

    Attributes:
        run: the id of the current run; versions of other runs count as foreign. Any thread may set it.
    """

    def __init__(self, make: Callable[[], Policy]) -> None:
        """`make` returns a policy without weights. It is called twice here, and rarely later."""
        self._make_policy = make
        self._policy = make()
        self._active_version = NO_VERSION, b""  # the version and its run
        self._swap_delay_s = 0.0
        self.run = b""
        self._loaded: deque[_LoadedPolicy] = deque(maxlen=1)
        self._idle: deque[Policy] = deque([make()], maxlen=1)

    @property
    def policy(self) -> Policy:
        """The policy to act with until the next swap."""
        return self._policy

    @property
    def version(self) -> int:
        """The version of the acting weights; -1 before the first, `FOREIGN_RUN` if they are of another run."""
        version, run = self._active_version
        return version if run == self.run or version == NO_VERSION else FOREIGN_RUN

    @property
    def swap_delay_s(self) -> float:
        """Seconds from the announcement of the acting version to its swap."""
        return self._swap_delay_s

    def load(
        self, version: int, weights: Mapping[str, Array], offered_s: float | None = None, run: bytes = b""
    ) -> None:
        """Loads `weights` into the idle copy for the next swap, and replaces a loaded version that waits for it.

        Args:
            offered_s: when this version was announced, on the monotonic clock; None for now.
            run: the run that `version` belongs to.

        Raises:
            WireError: the weights do not fit the policy; the acting and the loaded version stay.
        """
        announced_s = time.monotonic() if offered_s is None else offered_s
        waiting = _pop(self._loaded)
        idle = waiting.policy if waiting is not None else _pop(self._idle) or self._make_policy()
        try:
            idle.load(weights)
        except WireError:
            if waiting is not None:
                self._loaded.append(waiting)
            else:
                self._idle.append(idle)
            raise
        self._loaded.append(_LoadedPolicy(idle, version, announced_s, run))

    def swap_if_ready(self) -> int | None:
        """Swaps to the loaded version, if there is one, and returns its number. Never blocks."""
        ready = _pop(self._loaded)
        if ready is None:
            return None
        self._idle.append(self._policy)
        self._policy, self._active_version = ready.policy, (ready.version, ready.run)
        self._swap_delay_s = time.monotonic() - ready.offered_s
        return ready.version


def _pop(slot: deque[ItemT]) -> ItemT | None:
    """Takes the element of a slot atomically; None if the slot is empty."""
    try:
        return slot.pop()
    except IndexError:
        return None
