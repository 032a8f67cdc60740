"""Tells a process that cannot do its work, however often it is started, from one that was ended at its work."""

from __future__ import annotations

from hal.supervision import NodeStatus

STARTS = 3


class Starts:
    """What is known of the starts of a run's processes, by their names. One thread calls it."""

    def __init__(self) -> None:
        self._heard: set[str] = set()
        self._restarts: dict[str, int] = {}  # of a process when it last was at work
        self._told: dict[str, int] = {}  # restarts, by `anew`

    def at_work(self, name: str) -> None:
        """It has just shown that it works."""
        self._heard.add(name)

    def in_vain(self, name: str, status: NodeStatus) -> bool:
        """Whether it ended `STARTS` times or more since it was last at work, the last time with an error of its own.

        One that a signal ended may do better next time.
        """
        if name in self._heard or status.restarts < self._restarts.get(name, 0):  # in the latter case it was moved
            self._heard.discard(name)
            self._restarts[name] = status.restarts
        return status.restarts - self._restarts.get(name, 0) >= STARTS and (status.last_exit or 0) > 0

    def anew(self, name: str, status: NodeStatus) -> bool:
        """Whether it was started again since this was last asked."""
        before, self._told[name] = self._told.get(name, 0), status.restarts
        return status.restarts > before
