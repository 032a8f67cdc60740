"""A stand-in for your device's library: two joints that reach their targets at once."""

from __future__ import annotations

from collections.abc import Sequence


class Controller:
    def __init__(self, address: str) -> None:
        self.address = address
        self._angles = [0.5, -0.5]

    def angles(self) -> list[float]:
        return list(self._angles)

    def go_to(self, angles: Sequence[float]) -> None:
        self._angles = list(angles)
