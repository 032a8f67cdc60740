"""One compiled scene and its physics: the arm follows a Cartesian target, one control period at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np

from hal.errors import HardwareLost, SpecError
from hal.spec import Array
from sim import panda

ASSETS = Path(__file__).parent / "assets"

DOWN = np.array([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, -1.0]])
"""Rotation of the held gripper in the base frame: it points down and opens along y."""

LEAD_MAX_M = 0.03
"""The target runs ahead of the tool by at most this much, so that pushing against a thing does not wind it up."""

SQUEEZE_MAX_M = 0.02
"""The gripper's set width stays above its true width less this: a firm grip that still lets go within two periods."""

SPEED_SHARE = 0.8
"""Joint targets move at this share of the maker's limits at most: all joints slow down together, so the path stays."""

_DAMPING = 0.01
_POSTURE_GAIN = 0.5
_STEP_MAX_RAD = 0.3
_CONVERGED_RAD = 1e-4
_ITERATIONS_PER_PERIOD = 3
_ITERATIONS_AT_RESET = 100


@dataclass(frozen=True)
class Readings:
    """What the sensors say, in SI units and the base frame; arrays are float64 copies.

    Attributes:
        joint_position, joint_velocity: (7,), rad and rad/s.
        tool_position, tool_velocity: (3,), of the point between the fingertips, m and m/s.
        gripper_width, gripper_set_width: the fingers' distance, and the one that the gripper is driven towards, m.
        object_position: (3,), centre of the cube or of the target, m.
    """

    joint_position: Array
    joint_velocity: Array
    tool_position: Array
    tool_velocity: Array
    gripper_width: float
    gripper_set_width: float
    object_position: Array


class World:
    """A scene with one Panda. One thread uses it.

    Time moves in `advance` only, so that the same calls after the same `reset` give the same numbers.
    """

    def __init__(self, scene: str, period_s: float) -> None:
        """Compiles the scene called `scene` (0.1 s).

        Raises:
            SpecError: there is no such scene, or the period is not a whole number of physics steps.
        """
        path = ASSETS / f"{scene}.xml"
        if not path.is_file():
            raise SpecError(f"no scene {scene!r}; there are 'lift' and 'reach'")
        self.model = mujoco.MjModel.from_xml_path(str(path))
        self.data = mujoco.MjData(self.model)
        self._ghost = mujoco.MjData(self.model)
        self._period_s = period_s
        self._substeps = round(period_s / self.model.opt.timestep)
        if self._substeps < 1 or abs(self._substeps * self.model.opt.timestep - period_s) > 1e-9:
            raise SpecError(f"a period of {period_s} s is no whole number of steps of {self.model.opt.timestep} s")
        self._tool = self.model.site("tool").id
        self._cube = scene == "lift"
        self._object = self.model.body("cube" if self._cube else "target").id
        self._jacobian = np.zeros((6, self.model.nv))
        self._joint_target = np.array(panda.HOME_RAD)
        self._target = np.zeros(3)
        self.reset(np.array([0.45, 0.0, 0.2]), np.array([0.5, 0.0, 0.02]))

    def reset(self, tool_position: Array, object_position: Array, object_yaw_rad: float = 0.0) -> None:
        """Puts the arm at rest with the tool at (3,) `tool_position` and the gripper open, and the object in place."""
        mujoco.mj_resetData(self.model, self.data)
        self._joint_target = self._solve(np.array(panda.HOME_RAD), tool_position, _ITERATIONS_AT_RESET)
        data = self.data
        data.qpos[:7] = data.act[:7] = self._joint_target
        data.qpos[7:9] = 0.5 * panda.GRIPPER_WIDTH_MAX_M
        data.act[7] = panda.GRIPPER_WIDTH_MAX_M
        if self._cube:
            data.qpos[9:12] = object_position
            data.qpos[12:16] = (np.cos(object_yaw_rad / 2), 0.0, 0.0, np.sin(object_yaw_rad / 2))
        else:
            data.mocap_pos[0] = object_position
        mujoco.mj_forward(self.model, data)
        self._target = data.site_xpos[self._tool].copy()

    def advance(self, delta: Array, width_m: float | None, low: Array, high: Array) -> tuple[Array, float]:
        """Moves the tool's target by `delta` (3,), m, within the box from `low` to `high`, and time by one period.

        `width_m` is the gripper's opening; None leaves it as it is set, so that a hold keeps its grip.

        Returns:
            the step that the target took (3,), shorter than `delta` at the box's walls, and the gripper's commanded
            opening, both in m.

        Raises:
            HardwareLost: the simulation diverged.
        """
        held = self._leashed_target()
        self._target = np.clip(held + delta, np.minimum(low, held), np.maximum(high, held))
        goal = self._solve(self._joint_target, self._target, _ITERATIONS_PER_PERIOD)
        ctrl = self.data.ctrl
        ctrl[:7] = _slowed((goal - self._joint_target) / self._period_s)
        self._joint_target = self._joint_target + ctrl[:7] * self._period_s
        ctrl[7] = 0.0 if width_m is None else self._gripper_speed(width_m)
        self._step()
        return self._target - held, float(self.data.act[7]) if width_m is None else width_m

    def freeze(self) -> None:
        """Takes the pose that the arm has now as its target and moves time by one period; the gripper keeps its grip.

        Raises:
            HardwareLost: the simulation diverged.
        """
        self._target = self.data.site_xpos[self._tool].copy()
        self._joint_target = self.data.qpos[:7].copy()
        self.data.act[:7] = self._joint_target
        self.data.ctrl[:] = 0.0
        self._step()

    def readings(self) -> Readings:
        """The present state."""
        data = self.data
        mujoco.mj_jacSite(self.model, data, self._jacobian[:3], None, self._tool)
        return Readings(
            joint_position=data.qpos[:7].copy(),
            joint_velocity=data.qvel[:7].copy(),
            tool_position=data.site_xpos[self._tool].copy(),
            tool_velocity=self._jacobian[:3, :7] @ data.qvel[:7],
            gripper_width=self._width(),
            gripper_set_width=float(data.act[7]),
            object_position=data.xpos[self._object].copy(),
        )

    def _width(self) -> float:
        return float(self.data.qpos[7] + self.data.qpos[8])

    def _leashed_target(self) -> Array:
        tool = self.data.site_xpos[self._tool]
        return np.clip(self._target, tool - LEAD_MAX_M, tool + LEAD_MAX_M)

    def _gripper_speed(self, width_m: float) -> float:
        goal = max(width_m, self._width() - SQUEEZE_MAX_M)
        speed = (goal - self.data.act[7]) / self._period_s
        return float(np.clip(speed, -panda.GRIPPER_SPEED_MAX_M_S, panda.GRIPPER_SPEED_MAX_M_S))

    def _step(self) -> None:
        mujoco.mj_step(self.model, self.data, nstep=self._substeps)
        mujoco.mj_fwdPosition(self.model, self.data)  # mj_step leaves the poses one physics step behind
        if self.data.warning.number[_DIVERGED].any():  # MuJoCo has put the world back to its start by itself
            raise HardwareLost("the simulation diverged; reset the task")

    def _solve(self, joints: Array, position: Array, iterations: int) -> Array:
        """Joint angles (7,) near `joints` that bring the tool to `position`, pointing down: damped least squares.

        The spare degree of freedom is drawn towards the home pose, so that the elbow is a function of the position.
        """
        model, ghost, jacobian = self.model, self._ghost, self._jacobian
        joints = joints.copy()
        for _ in range(iterations):
            ghost.qpos[:7] = joints
            mujoco.mj_kinematics(model, ghost)
            mujoco.mj_comPos(model, ghost)
            mujoco.mj_jacSite(model, ghost, jacobian[:3], jacobian[3:], self._tool)
            error = self._pose_error(ghost, position)
            j = jacobian[:, :7]
            posture = _POSTURE_GAIN * (_HOME - joints)
            step = j.T @ np.linalg.solve(j @ j.T + _REGULARISER, error - j @ posture) + posture
            largest = float(np.abs(step).max())
            joints = joints + step * min(1.0, _STEP_MAX_RAD / max(largest, 1e-9))
            joints = np.minimum(np.maximum(joints, _JOINT_LOW), _JOINT_HIGH)
            if largest < _CONVERGED_RAD:
                break
        return joints

    def _pose_error(self, ghost: mujoco.MjData, position: Array) -> Array:
        """Way to `position`, m, and small rotation to `DOWN`, rad: half the sum of the axes' cross products."""
        _, xy, xz, yx, _, yz, zx, zy, _ = ghost.site_xmat[self._tool].tolist()
        turn = (0.5 * (zy - yz), 0.5 * (zx + xz), -0.5 * (yx + xy))
        return np.concatenate((position - ghost.site_xpos[self._tool], turn))


_DIVERGED = [int(getattr(mujoco.mjtWarning, f"mjWARN_{name}")) for name in ("BADQPOS", "BADQVEL", "BADQACC", "BADCTRL")]
_REGULARISER = _DAMPING**2 * np.eye(6)
_HOME = np.array(panda.HOME_RAD)
_JOINT_LOW = np.array(panda.JOINT_LOW_RAD)
_JOINT_HIGH = np.array(panda.JOINT_HIGH_RAD)
_SPEED_MAX = SPEED_SHARE * np.array(panda.JOINT_SPEED_MAX_RAD_S)


def _slowed(speeds: Array) -> Array:
    return speeds / max(1.0, float(np.max(np.abs(speeds) / _SPEED_MAX)))
