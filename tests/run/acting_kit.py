"""A policy for tests of evaluations."""

from __future__ import annotations

from typing import Any

import numpy as np

from user_sys.policies.policy import ActionChunk


class CountingPolicy:
    """A policy of one action, each element of which is `value`, that counts its actions."""

    cameras: tuple[str, ...] = ()

    def __init__(self, value: float = 0.0) -> None:
        self._value, self.actions = value, 0

    def load(self, weights: Any) -> None:
        pass

    def act(self, *args: Any, **settings: Any) -> ActionChunk:
        self.actions += 1
        return ActionChunk(np.full((1, 4), self._value, np.float32), np.zeros(1, np.float32))
