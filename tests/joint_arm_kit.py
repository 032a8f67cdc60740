"""Arms whose actions move their joints, for tests of inverse kinematics."""

from __future__ import annotations

from typing import Literal

from hal.spec import ACTION, STATE, ArraySpec, RobotSpec, SafetyLimits
from sim.arms import ARMS


def joint_spec(kind: Literal["joint_delta", "joint_target"], arm: str = "ur5e", unit: str = "rad") -> RobotSpec:
    """The spec of a simulated arm's joints, 20 times a second, with a speed of 1 a second each."""
    names, scale = ARMS[arm].joints, 1.0 if unit == "rad" else 57.29577951308232
    low, high = (tuple(scale * each for each in bound) for bound in (ARMS[arm].joint_low_rad, ARMS[arm].joint_high_rad))
    n, moves_by_steps = len(names), kind == "joint_delta"
    step = (0.05 * scale,) * n
    return RobotSpec(
        model=f"{arm}-joints",
        rate_hz=20.0,
        observation=(
            ArraySpec(name=STATE, labels=tuple(f"{name}.pos" for name in names), units=(unit,) * n, low=low, high=high),
        ),
        action=ArraySpec(
            name=ACTION,
            labels=names,
            units=(unit,) * n,
            low=tuple(-each for each in step) if moves_by_steps else low,
            high=step if moves_by_steps else high,
        ),
        limits=SafetyLimits(
            joint_position=tuple(range(n)),
            joint_low=low,
            joint_high=high,
            joint_velocity_max=(scale,) * n,
        ),
        neutral=(0.0,) * n,
        joint_delta=tuple(range(n)) if moves_by_steps else (),
        joint_target=() if moves_by_steps else tuple(range(n)),
    )
