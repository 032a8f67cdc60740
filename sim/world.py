"""A compiled scene and its physics: the arm follows a Cartesian target, one control period at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mujoco
import numpy as np

from hal.errors import HardwareLost, SpecError
from hal.spec import Array
from sim.arms import ArmModel
from sim.kinematics import damped_step
from sim.scene import Motion, Pose, Scene

DOWN = np.array([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, -1.0]])
"""Rotation of the gripper in the base frame: it points down and opens along y."""

LEAD_MAX_M = 0.03
"""Greatest distance between target and tool, so that contact does not wind the target up."""

SQUEEZE_MAX_M = 0.02
"""The gripper's set width is at least its width less this: a firm grip that still opens within two periods."""

JOINT_MARGIN_RAD = 0.04
"""Distance of joint targets from the ends of the joints' ranges, which the arm may overshoot."""

_DAMPING = 0.01
_POSTURE_GAIN = 0.5
_STEP_MAX_RAD = 0.3
_CONVERGED_RAD = 1e-4
_ITERATIONS_PER_PERIOD = 3
_ITERATIONS_AT_RESET = 100


@dataclass(frozen=True)
class SimReadings:
    """The sensors' values, in SI units and the base frame; arrays are float64 copies.

    Attributes:
        joint_position, joint_velocity: (n,) for an arm of n joints, rad and rad/s.
        tool_position, tool_velocity: (3,), of the point between the fingertips, m and m/s.
        gripper_width, gripper_set_width: the fingers' distance, and its target, m.
        object_position: (3,) of each object's origin, m.
        wrench: (6,) force, N, and torque about the tool, N m, on the gripper by all that it touches. A real sensor at
            the wrist reads the same once the gripper's own weight and inertia are compensated.
    """

    joint_position: Array
    joint_velocity: Array
    tool_position: Array
    tool_velocity: Array
    gripper_width: float
    gripper_set_width: float
    object_position: Mapping[str, Array]
    wrench: Array


class _InverseKinematics:
    """Computes joint angles for tool positions, on a copy of the world's data.

    Attributes:
        home: the arm's home pose (n,), rad.
    """

    def __init__(self, model: mujoco.MjModel, arm: ArmModel) -> None:
        self._model, self._data = model, mujoco.MjData(model)
        self._joints, self._tool = len(arm.joints), model.site("tool").id
        self.home = np.array(arm.home_rad)
        self._low = np.array(arm.joint_low_rad) + JOINT_MARGIN_RAD
        self._high = np.array(arm.joint_high_rad) - JOINT_MARGIN_RAD
        self._posture_gain = _POSTURE_GAIN if self._joints > 6 else 0.0
        self._regulariser = np.diag([_DAMPING**2] * 3 + [arm.rotation_damping**2] * 3)
        self._jacobian = np.zeros((6, model.nv))

    def solve(self, joints: Array, position: Array, iterations: int) -> Array:
        """Joint angles (n,) near `joints` that bring the tool to `position`, pointing down: damped least squares.

        The home pose attracts a redundant degree of freedom, so that the elbow is a function of the position. An arm
        with too few degrees of freedom misses the direction, not the position.
        """
        model, data, jacobian, n = self._model, self._data, self._jacobian, self._joints
        joints = joints.copy()
        for _ in range(iterations):
            data.qpos[:n] = joints
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)
            mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], self._tool)
            error, j = self._pose_error(data, position), jacobian[:, :n]
            step = self._step_towards(error, j, joints)
            stuck = ((joints <= self._low) & (step < 0.0)) | ((joints >= self._high) & (step > 0.0))
            if stuck.any():
                step = np.where(stuck, 0.0, self._step_towards(error, np.where(stuck, 0.0, j), joints))
            largest = float(np.abs(step).max())
            joints = joints + step * min(1.0, _STEP_MAX_RAD / max(largest, 1e-9))
            joints = np.minimum(np.maximum(joints, self._low), self._high)
            if largest < _CONVERGED_RAD:
                break
        return joints

    def _step_towards(self, error: Array, j: Array, joints: Array) -> Array:
        posture = self._posture_gain * (self.home - joints)
        return damped_step(j, error - j @ posture, self._regulariser) + posture

    def _pose_error(self, data: mujoco.MjData, position: Array) -> Array:
        """The vector to `position`, m, and small rotation to `DOWN`, rad: half the sum of the axes' cross products."""
        _, xy, xz, yx, _, yz, zx, zy, _ = data.site_xmat[self._tool].tolist()
        turn = (0.5 * (zy - yz), 0.5 * (zx + xz), -0.5 * (yx + xy))
        return np.concatenate((position - data.site_xpos[self._tool], turn))


class MujocoWorld:
    """A scene with one arm. One thread uses it.

    Time moves only in `move_tool` and `hold_pose`, so the same calls after the same `reset` give the same numbers.

    Attributes:
        reset_count: the number of resets; each sets the time to 0.
    """

    def __init__(self, arm: ArmModel, scene: Scene, period_s: float) -> None:
        """The arm starts at rest, the objects out of sight.

        Raises:
            SpecError: the period is not a whole number of physics steps.
        """
        self.arm, self.scene = arm, scene
        self.model = scene.model
        self.data = mujoco.MjData(self.model)
        self._period_s = period_s
        self._substeps = round(period_s / self.model.opt.timestep)
        if self._substeps < 1 or abs(self._substeps * self.model.opt.timestep - period_s) > 1e-9:
            raise SpecError(f"a period of {period_s} s is not a whole number of steps of {self.model.opt.timestep} s")
        self._joints = len(arm.joints)
        self._fingers = [(self.model.joint(name).qposadr[0], share) for name, share in arm.gripper.joints]
        self._tool = self.model.site("tool").id
        self._gripper_bodies = _subtree(self.model, int(self.model.site_bodyid[self._tool]))
        self._speed_max = arm.speed_share * np.array(arm.joint_speed_max_rad_s)
        self._kinematics = _InverseKinematics(self.model, arm)
        self._joint_target = self._kinematics.home
        self._target = np.zeros(3)
        self.reset_count = 0
        self._motion: Motion | None = None
        self.reset(np.mean((arm.tool_start_box.low, arm.tool_start_box.high), axis=0), {})

    def reset(self, tool_position: Array, poses: Mapping[str, Pose], motion: Motion | None = None) -> None:
        """Set the arm at rest with the tool at (3,) `tool_position` and an open gripper, and the objects at `poses`.
        An object without a pose is out of sight; `motion` moves others until the next reset."""
        mujoco.mj_resetData(self.model, self.data)
        self.reset_count += 1
        self._motion = motion
        n, data = self._joints, self.data
        self._joint_target = self._kinematics.solve(self._kinematics.home, tool_position, _ITERATIONS_AT_RESET)
        data.qpos[:n] = data.act[:n] = self._joint_target
        data.act[n] = self.arm.gripper.drive_from_width(self.arm.gripper.width_max_m)
        for address, share in self._fingers:
            data.qpos[address] = share * data.act[n]
        self.scene.arrange(data, poses)
        mujoco.mj_forward(self.model, data)
        mujoco.mj_rnePostConstraint(self.model, data)
        self._target = data.site_xpos[self._tool].copy()

    def move_tool(self, delta: Array, width_m: float | None, low: Array, high: Array) -> tuple[Array, float]:
        """Move the tool's target by `delta` (3,), m, within the box from `low` to `high`, and time by one period.

        `width_m` is the gripper's opening; None keeps its target, so that a hold keeps its grip.

        Returns:
            The target's step (3,), shorter than `delta` at the box's walls, and the gripper's commanded opening, both
            in m.

        Raises:
            HardwareLost: the simulation diverged.
        """
        held = self._limited_target()
        self._target = np.clip(held + delta, np.minimum(low, held), np.maximum(high, held))
        goal = self._kinematics.solve(self._joint_target, self._target, _ITERATIONS_PER_PERIOD)
        n, ctrl = self._joints, self.data.ctrl
        ctrl[:n] = self._limit_speeds((goal - self._joint_target) / self._period_s)
        self._joint_target = self._joint_target + ctrl[:n] * self._period_s
        ctrl[n] = 0.0 if width_m is None else self._gripper_speed(width_m)
        self._step()
        return self._target - held, self._set_width() if width_m is None else width_m

    def hold_pose(self) -> None:
        """Make the current pose the target and move time by one period; the gripper keeps its grip.

        Raises:
            HardwareLost: the simulation diverged.
        """
        n = self._joints
        self._target = self.data.site_xpos[self._tool].copy()
        self._joint_target = self.data.qpos[:n].copy()
        self.data.act[:n] = self._joint_target
        self.data.ctrl[:] = 0.0
        self._step()

    def read_sensors(self) -> SimReadings:
        """The current state."""
        n, data, tool = self._joints, self.data, self.data.site_xpos[self._tool]
        jacobian = np.zeros((3, self.model.nv))
        mujoco.mj_jacSite(self.model, data, jacobian, None, self._tool)
        return SimReadings(
            joint_position=data.qpos[:n].copy(),
            joint_velocity=data.qvel[:n].copy(),
            tool_position=tool.copy(),
            tool_velocity=jacobian[:, :n] @ data.qvel[:n],
            gripper_width=self._width(),
            gripper_set_width=self._set_width(),
            object_position=self.scene.positions(data),
            wrench=self._wrench(tool),
        )

    def _wrench(self, tool: Array) -> Array:
        """MuJoCo gives torque and force about the centre of mass of the arm with its base."""
        torque, force = np.split(self.data.cfrc_ext[self._gripper_bodies].sum(axis=0), 2)
        root = self.model.body_rootid[self._gripper_bodies[0]]
        return np.concatenate((force, torque + np.cross(self.data.subtree_com[root] - tool, force)))

    def _width(self) -> float:
        return self.arm.gripper.width_from_drive(float(self.data.actuator_length[self._joints]))

    def _set_width(self) -> float:
        return self.arm.gripper.width_from_drive(float(self.data.act[self._joints]))

    def _limited_target(self) -> Array:
        tool = self.data.site_xpos[self._tool]
        return np.clip(self._target, tool - LEAD_MAX_M, tool + LEAD_MAX_M)

    def _gripper_speed(self, width_m: float) -> float:
        gripper = self.arm.gripper
        goal = gripper.drive_from_width(max(width_m, self._width() - SQUEEZE_MAX_M))
        speed = (goal - float(self.data.act[self._joints])) / self._period_s
        return min(gripper.speed_max, max(-gripper.speed_max, speed))

    def _limit_speeds(self, speeds: Array) -> Array:
        """Scale all joint speeds alike, so that the path stays."""
        return speeds / max(1.0, float(np.max(np.abs(speeds) / self._speed_max)))

    def _step(self) -> None:
        for name, place in self._motion(self.data.time + self._period_s).items() if self._motion else ():
            self.scene.move(self.data, name, place)
        mujoco.mj_step(self.model, self.data, nstep=self._substeps)
        mujoco.mj_rnePostConstraint(self.model, self.data)  # the contacts' forces on each body
        mujoco.mj_fwdPosition(self.model, self.data)  # mj_step leaves the poses one physics step behind
        if self.data.warning.number[_DIVERGED].any():  # MuJoCo has reset the world by itself
            raise HardwareLost("the simulation diverged; reset the task")


_DIVERGED = [int(getattr(mujoco.mjtWarning, f"mjWARN_{name}")) for name in ("BADQPOS", "BADQVEL", "BADQACC", "BADCTRL")]


def _subtree(model: mujoco.MjModel, root: int) -> list[int]:
    """The body `root` and all that it carries."""
    found = [root]
    for body in range(root + 1, model.nbody):
        if model.body_parentid[body] in found:
            found.append(body)
    return found
