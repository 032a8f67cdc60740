"""How old the weights are with which each robot acts: a histogram of the seconds since they were overtaken."""

from __future__ import annotations

import bisect
from collections import deque

BOUNDS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
MAX_VERSIONS = 4096  # of which the time of publication is remembered


class Staleness:
    """Counts one sample a robot at each `sample`. One thread calls it, or its caller locks."""

    def __init__(self) -> None:
        self._offered: deque[tuple[int, float]] = deque(maxlen=MAX_VERSIONS)
        self._acting: dict[str, int] = {}
        self._counts: dict[str, list[int]] = {}
        self._newest_s: dict[str, float] = {}

    def offered(self, version: int, now_s: float) -> None:
        """From now on robots should act with `version`."""
        if not self._offered or self._offered[-1][0] != version:
            self._offered.append((version, now_s))

    def acts(self, robot: str, version: int) -> None:
        self._acting[robot] = version

    def left(self, robot: str) -> None:
        """The robot is not connected; what was counted of it stays."""
        self._acting.pop(robot, None)
        self._newest_s.pop(robot, None)

    @property
    def oldest(self) -> int:
        """The oldest version with which a robot acts; -1 where none does with any."""
        return min(self._acting.values(), default=-1)

    def sample(self, now_s: float) -> None:
        for robot, version in self._acting.items():
            age_s = self._age_s(version, now_s)
            self._newest_s[robot] = age_s
            self._counts.setdefault(robot, [0] * (len(BOUNDS_S) + 1))[bisect.bisect_left(BOUNDS_S, age_s)] += 1

    def scalars(self) -> dict[str, float]:
        """Of each robot: the newest sample, and the share of samples up to each bound."""
        found = {f"staleness_s/{robot}": age_s for robot, age_s in self._newest_s.items()}
        for robot, counts in self._counts.items():
            total, below = sum(counts), 0
            for bound, count in zip(BOUNDS_S, counts, strict=False):
                below += count
                found[f"staleness_s/{robot}/up_to_{bound:g}"] = below / total
        return found

    def _age_s(self, version: int, now_s: float) -> float:
        """Seconds since another version took the place of `version`; 0 while it is the newest offered."""
        overtaken_s = now_s
        for offered, at_s in reversed(self._offered):
            if offered == version:
                return now_s - overtaken_s
            overtaken_s = at_s
        return now_s - overtaken_s
