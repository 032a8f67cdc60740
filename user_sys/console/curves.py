"""Curves that never grow: what a run looked like from its start to now, in a bounded number of points."""

from __future__ import annotations

from collections import deque

import msgspec

MAX_POINTS = 240
SUCCESS_WINDOW = 20


class CurveView(msgspec.Struct, frozen=True):
    """A curve at one moment: points in order of x."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


class Curve:
    """Points (x, y), x not falling. When full, neighbours are averaged pairwise and the resolution halves.

    The newest point is always among those shown. One thread calls it at a time.
    """

    def __init__(self, name: str, max_points: int = MAX_POINTS) -> None:
        self.name = name
        self._max_points = max_points
        self._points: list[tuple[float, float]] = []
        self._stride = 1
        self._pending: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        self._pending.append((x, y))
        if len(self._pending) < self._stride:
            return
        self._points.append(_mean(self._pending))
        self._pending.clear()
        if len(self._points) >= self._max_points:
            self._points = [_mean(self._points[i : i + 2]) for i in range(0, len(self._points), 2)]
            self._stride *= 2

    def view(self) -> CurveView:
        points = self._points + self._pending[-1:]
        return CurveView(self.name, tuple(x for x, _ in points), tuple(y for _, y in points))


class Window:
    """The share of True among the newest `size` verdicts; None before the first."""

    def __init__(self, size: int = SUCCESS_WINDOW) -> None:
        self._verdicts: deque[bool] = deque(maxlen=size)

    def add(self, verdict: bool) -> None:
        self._verdicts.append(verdict)

    @property
    def share(self) -> float | None:
        return sum(self._verdicts) / len(self._verdicts) if self._verdicts else None


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    n = len(points)
    return sum(x for x, _ in points) / n, sum(y for _, y in points) / n
