"""Arms that move by steps of their tool or their joints (`ur`, `franka`): their options, their spec, their targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hal.motion_limits import MAX_TARGET_LEAD_S, ToolLimits
from hal.settings import Positive
from hal.spec import ACTION, STATE, Array, ArraySpec, Box, RobotSpec, SafetyLimits
from robots.cameras import CameraConfig, camera_specs

StepLimiter = Callable[[Array, Array], Array]
"""Maps a target (n,) and a step (n,) from there, both float64, to the part of the step that is allowed."""


@dataclass(frozen=True)
class DeltaArmConfig:
    """Attributes:
    host: the arm's address.
    action: ``tool_delta`` (x, y, z in the base frame; the tool keeps its rotation) or ``joint_delta``.
    tool_speed: m/s, for a tool_delta.
    joint_speed: rad/s: of a joint_delta; with a tool_delta, the measured speed above which the arm holds, e.g. near a
    singularity.
    workspace_low, workspace_high: box for the tool, m in the base frame; keep_out: boxes that it may not enter.
    force_max: N; above it the tool does not move further against the force. None for no limit.
    stale_after_s: default: two control periods.
    reduced_speed: share of the speed while a person teleoperates or is near.
    sentence: the instruction for the policy.
    """

    host: str
    action: Literal["tool_delta", "joint_delta"] = "tool_delta"
    rate_hz: Positive = 20.0
    tool_speed: Positive = 0.2
    joint_speed: Positive = 1.0
    workspace_low: tuple[float, ...] = ()
    workspace_high: tuple[float, ...] = ()
    keep_out: tuple[Box, ...] = ()
    force_max: float | None = 20.0
    cameras: dict[str, CameraConfig] = field(default_factory=dict)
    stale_after_s: Positive | None = None
    reduced_speed: float = 0.25
    sentence: str = ""
    max_steps: int = 3000

    @property
    def two_periods_s(self) -> float:
        return 2 / self.rate_hz

    @property
    def moves_joints(self) -> bool:
        return self.action == "joint_delta"


@dataclass(frozen=True)
class DeltaArm:
    """What distinguishes one arm's spec from another's, in rad, rad/s, m and N.

    Attributes:
        joints: their names; `low` and `high` bound their positions.
        speed, reach, force: bounds of the state's elements, not limits.
        stroke: the open width of a gripper; None without one.
    """

    model: str
    joints: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    speed: float
    reach: float
    force: float
    safe_stop: str
    stroke: float | None = None

    def spec(self, config: DeltaArmConfig, low: tuple[float, ...] = (), high: tuple[float, ...] = ()) -> RobotSpec:
        """The spec of the configured arm. The state has positions and speeds of the joints, the tool's position, the
        directions of its x and y axes, the force, and the gripper's width.

        `low` and `high` limit the joints' positions; default: the arm's.
        """
        n, moves_joints, grip = len(self.joints), config.moves_joints, () if self.stroke is None else (self.stroke,)
        moves = tuple(f"d_{name}" for name in self.joints) if moves_joints else ("dx", "dy", "dz")
        unit, speed = ("rad", config.joint_speed) if moves_joints else ("m", config.tool_speed)
        step = speed / config.rate_hz
        rows = [*((move, unit, -step, step) for move in moves), *(("width", "m", 0.0, stroke) for stroke in grip)]
        limits = SafetyLimits(
            workspace_low=config.workspace_low,
            workspace_high=config.workspace_high,
            keep_out=config.keep_out,
            tool_position=tuple(range(2 * n, 2 * n + 3)),
            tool_speed_max=None if moves_joints else config.tool_speed,
            tool_force=tuple(range(2 * n + 9, 2 * n + 12)),
            tool_force_max=config.force_max,
            joint_position=tuple(range(n)),
            joint_low=low or self.low,
            joint_high=high or self.high,
            joint_velocity=() if moves_joints else tuple(range(n, 2 * n)),
            joint_velocity_max=(config.joint_speed,) * n,
            reduced_speed=config.reduced_speed,
            stale_after_s=config.stale_after_s or config.two_periods_s,
        )
        return RobotSpec(
            model=self.model,
            rate_hz=config.rate_hz,
            observation=(self._state(),),
            action=ArraySpec.from_rows(ACTION, rows),
            cameras=camera_specs(config.cameras),
            limits=limits,
            neutral=(*(0.0 for _ in moves), *grip),
            tool_delta=() if moves_joints else (0, 1, 2),
            joint_delta=tuple(range(n)) if moves_joints else (),
            gripper=len(moves) if grip else -1,
            safe_stop=self.safe_stop,
        )

    def _state(self) -> ArraySpec:
        rows = (
            *((f"{n}.pos", "rad", low, high) for n, low, high in zip(self.joints, self.low, self.high, strict=True)),
            *((f"{name}.vel", "rad/s", -self.speed, self.speed) for name in self.joints),
            *((f"tool_{axis}", "m", -self.reach, self.reach) for axis in "xyz"),
            *((f"tool_{of}{axis}", "1", -1.0, 1.0) for of in "xy" for axis in "xyz"),
            *((f"force_{axis}", "N", -self.force, self.force) for axis in "xyz"),
            *(() if self.stroke is None else (("width", "m", 0.0, self.stroke),)),
        )
        return ArraySpec.from_rows(STATE, rows)


def add_step(
    target: Array | None, measured: Array, step: Array, max_lead: float | Array, limiter: StepLimiter | None = None
) -> tuple[Array, Array]:
    """Return the next target and the step to it, which is shorter than `step` if the robot does not keep up.

    The target of a robot that already lags by more, such as a servo that sags under its load, stays where it is.

    Args:
        target: the last commanded target; None starts at `measured`.
        measured: the measured position. Elements beyond the length of `step` keep their value.
        max_lead: the greatest distance to which a step may lead the target away from the measured position, for each
            element.
        limiter: shortens a step that would lead the target out of the robot's limits.
    """
    n, base = len(step), measured if target is None else target
    allowed = step if limiter is None else limiter(base[:n], step)
    following: Array = base.copy()
    start, low, high = base[:n], measured[:n] - max_lead, measured[:n] + max_lead
    following[:n] = np.clip(start + allowed, np.minimum(start, low), np.maximum(start, high))
    return following, following[:n] - start


def make_step_limiter(spec: RobotSpec) -> StepLimiter:
    """Make a limiter from the position limits of `spec`: of the tool (`tool_delta`) or the joints (`joint_delta`).

    The safety kernel checks a step from the measured position. An integrated target is ahead of that position by the
    robot's lag, so without this limiter the robot would stop beyond a limit by that lag.
    """
    place, state = ToolLimits(spec), np.zeros(len(spec.feature(STATE).labels))
    low, high = np.array(spec.limits.joint_low), np.array(spec.limits.joint_high)

    def shorten(base: Array, step: Array) -> Array:
        if spec.tool_delta:
            state[list(spec.limits.tool_position)] = base
            interval = place.step_interval(state, step)
        else:
            interval = np.minimum(low - base, 0.0), np.maximum(high - base, 0.0)
        left: Array = np.clip(step, *interval)
        return left

    return shorten


class DeltaTarget:
    """Integrates the steps of an arm into its target.

    Attributes:
        value: the last target: joint angles, or the tool's position or pose; None while the arm is stopped.
    """

    def __init__(self, spec: RobotSpec, config: DeltaArmConfig) -> None:
        self.value: Array | None = None
        self._size = len(spec.joint_delta or spec.tool_delta)
        self._max_lead = MAX_TARGET_LEAD_S * (config.joint_speed if config.moves_joints else config.tool_speed)
        self._limiter = make_step_limiter(spec)
        self._tool_limits, self._force_indices = ToolLimits(spec), list(spec.limits.tool_force)
        self._state = np.zeros(len(spec.feature(STATE).labels))
        self._low, self._high = (np.array(each, np.float32) for each in (spec.action.low, spec.action.high))

    def withdraw(self, measured: Array, force: Array) -> Array:
        """Move the target back to the tool on the axes on which it leads the tool against a force above the limit.

        Steps against such a force are blocked, but the target is ahead of the tool by the robot's lag, and the tool
        would press on. Call it before `next`.

        Args:
            measured: as for `next`.
            force: (3,), on the tool, in the base frame, N.

        Returns:
            The change of the target, with the shape of `measured`.
        """
        change = np.zeros(len(measured))
        self._state[self._force_indices] = force
        blocked = self._tool_limits.blocked_directions(self._state)
        if self.value is not None and blocked is not None:
            (down, up), back = blocked, (measured - self.value)[: self._size]
            change[: self._size] = np.where(down, np.maximum(back, 0.0), 0.0) + np.where(up, np.minimum(back, 0.0), 0.0)
            self.value = self.value + change
        return change

    def next(self, action: Array, measured: Array) -> tuple[Array, Array]:
        """The target after `action`, and the applied action, float32. The caller sets `value` once it is commanded."""
        applied = np.clip(action, self._low, self._high)
        target, step = add_step(self.value, measured, applied[: self._size], self._max_lead, self._limiter)
        applied[: self._size] = step
        within: Array = np.clip(applied, self._low, self._high)
        return target, within
