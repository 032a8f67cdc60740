"""Where a tool may go, and against what force."""

from __future__ import annotations

import math

import numpy as np

from hal.braking import ROUNDED, Motion
from hal.errors import SpecError
from hal.spec import STATE, Array, RobotSpec

UNLIMITED = 1e6  # m or rad in a period


class ToolPlace:
    """The steps of the tool that its limits of place and force allow."""

    def __init__(self, spec: RobotSpec) -> None:
        """Raises SpecError if the limits contradict the specs."""
        limits, state, axes = spec.limits, state_size(spec), len(spec.tool_delta)
        self._tool = indices(limits.tool_position, state, "tool_position")
        self._force = indices(limits.tool_force, state, "tool_force")
        if axes and len(self._tool) not in (0, axes):
            raise SpecError(f"{spec.model}: tool_position and tool_delta differ in length")
        self._box_low, self._box_high = tool_box(spec)
        self._bars_low: Array = np.array([box.low for box in limits.keep_out], np.float64).reshape(-1, 3)
        self._bars_high: Array = np.array([box.high for box in limits.keep_out], np.float64).reshape(-1, 3)
        if len(self._bars_low) and len(self._tool) != 3:
            raise SpecError(f"{spec.model}: keep_out needs the three indices of the tool in tool_position")
        if not (self._bars_low + ROUNDED < self._bars_high).all():
            raise SpecError(f"{spec.model}: a keep_out box is empty")
        if len(self._force) not in (0, 3) or (limits.tool_force_max is not None and len(self._force) != 3):
            raise SpecError(f"{spec.model}: tool_force_max needs three indices in tool_force")
        self._push = np.inf if limits.tool_force_max is None else limits.tool_force_max
        if not self._push > 0:
            raise SpecError(f"{spec.model}: tool_force_max is {limits.tool_force_max}; it is above 0")
        self._presses = axes > 0 and len(self._force) == axes and bool(np.isfinite(self._push))
        self.needs_state = len(self._tool) > 0 or self._presses

    def interval(self, state: Array, wish: Array, motion: Motion | None = None) -> tuple[Array, Array]:
        """The lowest and the highest step of each of the tool's axes; 0 is always between them.

        Args:
            wish: the step (3,) that is wished.
            motion: its first axes are those of the tool; None for a tool that can stop at once.
        """
        if not len(self._tool):
            return np.full(len(wish), -UNLIMITED), np.full(len(wish), UNLIMITED)
        tool = state[self._tool]
        low = np.maximum(np.minimum(self._box_low - tool, 0.0), -UNLIMITED)
        high = np.minimum(np.maximum(self._box_high - tool, 0.0), UNLIMITED)
        if len(self._bars_low):
            gaps = np.concatenate([self._bars_low - tool, tool - self._bars_high], axis=1)  # (boxes, 6): going up, down
            near = gaps.max(axis=1) < (UNLIMITED if motion is None else motion.reach[:3].max())
            if near.any():
                self._avoid(gaps[near], wish, 0.0 if motion is None else motion.ways()[:, :3].ravel(), low, high)
        return low, high

    def _avoid(self, gaps: Array, wish: Array, ways: Array | float, low: Array, high: Array) -> None:
        """Narrows `low` and `high`, in place, by one face of each forbidden box: the tool stays on its outer side.

        Of the faces before which the tool can come to rest, the one that limits the wish the least. A tool that is in a
        box may not go farther away from its nearest face.
        """
        slack = gaps - np.maximum(ways, 0.0)
        left = gaps - np.maximum(np.concatenate([wish, -wish]), 0.0)
        avoidable = slack >= -ROUNDED
        worse = np.where(gaps.max(axis=1, keepdims=True) < 0, gaps, slack)
        score = np.where(avoidable.any(axis=1, keepdims=True), np.where(avoidable, left, -np.inf), worse)
        for gap, face in zip(gaps, score.argmax(axis=1), strict=True):
            way, axis = max(0.0, gap[face]), face % 3
            if face < 3:
                high[axis] = min(high[axis], way)
            else:
                low[axis] = max(low[axis], -way)

    def blocked_directions(self, state: Array) -> tuple[Array, Array] | None:
        """The axes on which a step down, and those on which a step up, goes against a force above the limit, (3,) bool
        each; None without such a force."""
        if not self._presses:
            return None
        force = state[self._force]
        if math.hypot(*force.tolist()) <= self._push:
            return None
        return force > 0, force < 0


def tool_box(spec: RobotSpec) -> tuple[Array, Array]:
    """The workspace's lowest and highest corner, m in the base frame; infinite where there is none."""
    limits, axes = spec.limits, len(spec.limits.tool_position)
    low = vector(limits.workspace_low or (-np.inf,) * axes, axes, "workspace_low")
    high = vector(limits.workspace_high or (np.inf,) * axes, axes, "workspace_high")
    if not (low <= high).all():
        raise SpecError(f"{spec.model}: the workspace is empty: {low.tolist()} to {high.tolist()}")
    return low, high


def state_size(spec: RobotSpec) -> int:
    return next((len(s.labels) for s in spec.observation if s.name == STATE), 0)


def vector(values: tuple[float, ...], size: int, name: str) -> Array:
    if len(values) != size:
        raise SpecError(f"{name} has {len(values)} elements; it must have {size}")
    return np.array(values, dtype=np.float64)


def indices(values: tuple[int, ...], size: int, name: str) -> Array:
    if not all(0 <= i < size for i in values):
        raise SpecError(f"{name} is {values}; the vector that it points into has {size} elements")
    return np.array(values, dtype=np.intp)
