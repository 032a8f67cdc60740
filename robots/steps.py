"""Steps that add up: where a robot is to go next, of which an action says how far."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hal.spec import STATE, Array, RobotSpec
from hal.tool_place import ToolPlace

Within = Callable[[Array, Array], Array]
"""What is left of a step (n,) that begins at a target (n,), both float64."""


def advance(
    target: Array | None, measured: Array, step: Array, lead: float | Array, within: Within | None = None
) -> tuple[Array, Array]:
    """The next target, and the step that leads to it: shorter than `step` where the robot does not keep up.

    Args:
        target: what was commanded last; None begins at `measured`.
        measured: where the robot is. Elements beyond those of `step` are kept.
        lead: how far the target may be from there, in each element.
        within: shortens the step where it would lead the target out of where the robot may be.
    """
    n, base = len(step), measured if target is None else target
    allowed = step if within is None else within(base[:n], step)
    following: Array = base.copy()
    following[:n] = np.clip(base[:n] + allowed, measured[:n] - lead, measured[:n] + lead)
    return following, following[:n] - base[:n]


def within_limits(spec: RobotSpec) -> Within:
    """The limits of `spec` on where tool (`tool_delta`) or joints (`joint_delta`) may be, for targets of steps.

    The safety kernel judges a step from where the robot is measured. A target that adds steps up is ahead of that by
    as much as the robot lags behind, and would come to rest so far beyond a limit.
    """
    return _of_tool(spec) if spec.tool_delta else _of_joints(spec)


def _of_tool(spec: RobotSpec) -> Within:
    place, state = ToolPlace(spec), np.zeros(len(spec.feature(STATE).labels))

    def shorten(base: Array, step: Array) -> Array:
        state[list(spec.limits.tool_position)] = base
        left: Array = np.clip(step, *place.interval(state, step))
        return left

    return shorten


def _of_joints(spec: RobotSpec) -> Within:
    low, high = np.array(spec.limits.joint_low), np.array(spec.limits.joint_high)

    def shorten(base: Array, step: Array) -> Array:
        left: Array = np.clip(step, np.minimum(low - base, 0.0), np.maximum(high - base, 0.0))
        return left

    return shorten
