"""When versions of weights that came are written to the disk, which takes time from whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable

PERSIST_S = 0.5  # after the last version, and after the last write at the earliest
PERSIST_LATEST_S = 5.0  # while one follows upon the other, so long after the first that is not there
PERSIST_BYTES = 8 << 20  # where so much waits, as soon as the last write allows
PERSIST_AGAIN_S = 5.0  # after the disk was full


class WritePace:
    """One thread calls it, but for `lost`.

    Attributes:
        waits: something is not on the disk.
        waiting_bytes: so many, of what came.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.waits, self.waiting_bytes = False, 0
        self._clock = clock
        self._since_s = self._last_s = self._earliest_s = 0.0

    def came(self, size_bytes: int) -> None:
        self._last_s = self._clock()
        self._since_s = self._since_s if self.waits else self._last_s
        self.waiting_bytes += size_bytes
        self.waits = True

    def lost(self) -> None:
        """What was on the disk is there no more."""
        self.waits = True

    def begun(self) -> None:
        """What has come so far is being written."""
        self.waits, self.waiting_bytes = False, 0

    def written(self) -> None:
        self._earliest_s = self._clock() + PERSIST_S

    def failed(self) -> None:
        self.waits, self._earliest_s = True, self._clock() + PERSIST_AGAIN_S

    def due_s(self, idle_s: float) -> float:
        """In how many seconds it is to be written; `idle_s` where nothing waits."""
        if not self.waits:
            return idle_s
        soon_s = min(self._last_s + PERSIST_S, self._since_s + PERSIST_LATEST_S)
        at_s = self._earliest_s if self.waiting_bytes >= PERSIST_BYTES else max(self._earliest_s, soon_s)
        return at_s - self._clock()
