"""Integrate delta actions into targets, within the robot's limits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hal.motion_limits import ToolLimits
from hal.spec import STATE, Array, RobotSpec

StepLimiter = Callable[[Array, Array], Array]
"""Maps a target (n,) and a step (n,) from there, both float64, to the part of the step that is allowed."""


def add_step(
    target: Array | None, measured: Array, step: Array, max_lead: float | Array, limiter: StepLimiter | None = None
) -> tuple[Array, Array]:
    """Return the next target and the step to it, which is shorter than `step` if the robot does not keep up.

    Args:
        target: the last commanded target; None starts at `measured`.
        measured: the measured position. Elements beyond the length of `step` keep their value.
        max_lead: the greatest distance between target and measured position, for each element.
        limiter: shortens a step that would lead the target out of the robot's limits.
    """
    n, base = len(step), measured if target is None else target
    allowed = step if limiter is None else limiter(base[:n], step)
    following: Array = base.copy()
    following[:n] = np.clip(base[:n] + allowed, measured[:n] - max_lead, measured[:n] + max_lead)
    return following, following[:n] - base[:n]


def make_step_limiter(spec: RobotSpec) -> StepLimiter:
    """Make a limiter from the position limits of `spec`: of the tool (`tool_delta`) or the joints (`joint_delta`).

    The safety kernel checks a step from the measured position. An integrated target is ahead of that position by the
    robot's lag, so without this limiter the robot would stop beyond a limit by that lag.
    """
    return _tool_step_limiter(spec) if spec.tool_delta else _joint_step_limiter(spec)


def _tool_step_limiter(spec: RobotSpec) -> StepLimiter:
    place, state = ToolLimits(spec), np.zeros(len(spec.feature(STATE).labels))

    def shorten(base: Array, step: Array) -> Array:
        state[list(spec.limits.tool_position)] = base
        left: Array = np.clip(step, *place.step_interval(state, step))
        return left

    return shorten


def _joint_step_limiter(spec: RobotSpec) -> StepLimiter:
    low, high = np.array(spec.limits.joint_low), np.array(spec.limits.joint_high)

    def shorten(base: Array, step: Array) -> Array:
        left: Array = np.clip(step, np.minimum(low - base, 0.0), np.maximum(high - base, 0.0))
        return left

    return shorten
