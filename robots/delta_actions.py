"""Steps that add up: where a robot is to go next, of which an action says how far."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hal.motion_limits import ToolLimits
from hal.spec import STATE, Array, RobotSpec

StepLimiter = Callable[[Array, Array], Array]
"""What is left of a step (n,) that begins at a target (n,), both float64."""


def add_step(
    target: Array | None, measured: Array, step: Array, max_lead: float | Array, limiter: StepLimiter | None = None
) -> tuple[Array, Array]:
    """The next target, and the step that leads to it: shorter than `step` where the robot does not keep up.

    Args:
        target: what was commanded last; None begins at `measured`.
        measured: where the robot is. Elements beyond those of `step` are kept.
        lead: how far the target may be from there, in each element.
        within: shortens the step where it would lead the target out of where the robot may be.
    """
    n, base = len(step), measured if target is None else target
    allowed = step if limiter is None else limiter(base[:n], step)
    following: Array = base.copy()
    following[:n] = np.clip(base[:n] + allowed, measured[:n] - max_lead, measured[:n] + max_lead)
    return following, following[:n] - base[:n]


def make_step_limiter(spec: RobotSpec) -> StepLimiter:
    """The limits of `spec` on where tool (`tool_delta`) or joints (`joint_delta`) may be, for targets of steps.

    The safety kernel judges a step from where the robot is measured. A target that adds steps up is ahead of that by
    as much as the robot lags behind, and would come to rest so far beyond a limit.
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
