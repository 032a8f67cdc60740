"""Two copies of a policy: one acts, the other takes new weights; the control loop swaps them when it is safe."""

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
    """The control loop's thread calls `policy`, `version`, `swap_delay_s` and `swap_if_ready`; one other calls `load`.

    There is no lock between the two, and the former policy is neither freed nor loaded in the control loop's thread, so
    that a swap costs a few assignments whatever the policy's size. Which versions may follow each other is the
    receiver's business (`user_sys.weights.receiver`).

    Attributes:
        run: the one whose versions count, as far as is known; any thread may set it.
    """

    def __init__(self, make: Callable[[], Policy]) -> None:
        """`make` gives a policy without weights; it is called twice here, and hardly ever again."""
        self._make = make
        self._policy = make()
        self._acting = NO_VERSION, b""  # the version, and its run
        self._applied_s = 0.0
        self.run = b""
        self._ready: deque[_LoadedPolicy] = deque(maxlen=1)
        self._idle: deque[Policy] = deque([make()], maxlen=1)

    @property
    def policy(self) -> Policy:
        """The policy to act with until the next swap; not to be used after it."""
        return self._policy

    @property
    def version(self) -> int:
        """The version of `policy`'s weights; -1 before the first, and `FOREIGN_RUN` where it is not of `run`."""
        version, run = self._acting
        return version if run == self.run or version == NO_VERSION else FOREIGN_RUN

    @property
    def swap_delay_s(self) -> float:
        """Seconds from the first word of the present version to its swap."""
        return self._applied_s

    def load(
        self, version: int, weights: Mapping[str, Array], offered_s: float | None = None, run: bytes = b""
    ) -> None:
        """Takes `weights` into the idle copy, for the next swap; replaces a version that waits for it.

        Args:
            offered_s: monotonic clock when this version was first heard of; None for now.
            run: whose number `version` is.

        Raises:
            WireError: they are not this policy's; what acts and what waits stays as it was.
        """
        heard_s = time.monotonic() if offered_s is None else offered_s
        waiting = _pop(self._ready)
        idle = waiting.policy if waiting is not None else _pop(self._idle) or self._make()
        try:
            idle.load(weights)
        except WireError:
            if waiting is not None:
                self._ready.append(waiting)
            else:
                self._idle.append(idle)
            raise
        self._ready.append(_LoadedPolicy(idle, version, heard_s, run))

    def swap_if_ready(self) -> int | None:
        """Swaps to the version that was loaded last, if there is one, and returns it. Never waits."""
        ready = _pop(self._ready)
        if ready is None:
            return None
        self._idle.append(self._policy)
        self._policy, self._acting = ready.policy, (ready.version, ready.run)
        self._applied_s = time.monotonic() - ready.offered_s
        return ready.version


def _pop(slot: deque[ItemT]) -> ItemT | None:
    """Takes what is in a slot, in one step of the interpreter; None where nothing is."""
    try:
        return slot.pop()
    except IndexError:
        return None
