"""Steps that add up: where a robot is to go next, of which an action says how far."""

from __future__ import annotations

import numpy as np

from hal.spec import Array


def advance(target: Array | None, measured: Array, step: Array, lead: float | Array) -> tuple[Array, Array]:
    """The next target, and the step that leads to it: shorter than `step` where the robot does not keep up.

    Args:
        target: what was commanded last; None begins at `measured`.
        measured: where the robot is. Elements beyond those of `step` are kept.
        lead: how far the target may be from there, in each element.
    """
    n, base = len(step), measured if target is None else target
    following: Array = base.copy()
    following[:n] = np.clip(base[:n] + step, measured[:n] - lead, measured[:n] + lead)
    return following, following[:n] - base[:n]
