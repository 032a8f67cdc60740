"""Differential inverse kinematics of an arm from a MuJoCo model: of a simulated arm, or of an MJCF or URDF file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import mujoco
import numpy as np

from hal.errors import SpecError
from hal.spec import STATE, Array, RobotSpec
from sim.arms import ARMS
from sim.scene import Scene

TOOL = "tool"
"""Name of the site or body that is the tool centre point; without one it is the model's last body."""

DAMPING_M = 0.02
"""Limits the joints' speeds near a singularity, at the cost of a slower tool."""

ROTATION_DAMPING = 0.05
FEW_JOINTS_ROTATION_DAMPING = 0.6
"""Of an arm with fewer than six joints, whose tool cannot keep both position and rotation: the position counts."""

_RAD_FROM_UNIT = {"rad": 1.0, "m": 1.0, "deg": np.pi / 180}
_LEAST_INERTIA = 1e-6  # for links without one; the kinematics do not depend on it
FIRST_HIDDEN_GROUP = 3  # MuJoCo's convention: higher groups of geoms are for collisions
SHAPE_MAX_M = 2.0  # half of a geom's length: longer ones are floor and walls
ShapeKind = Literal["sphere", "capsule", "ellipsoid", "cylinder", "box", "mesh"]
KINDS = {getattr(mujoco.mjtGeom, f"mjGEOM_{kind.upper()}"): kind for kind in get_args(ShapeKind)}
GRIPPER_WIDTH = "gripper.width"  # label of a simulated arm's state


def damped_step(jacobian: Array, error: Array, regulariser: Array) -> Array:
    """The joints' step (n,) that reduces `error` (m,): damped least squares, ``J^T (J J^T + R)^-1 e``.

    Source: Wampler, 1986, "Manipulator inverse kinematic solutions based on vector formulations and damped
    least-squares methods", IEEE Transactions on Systems, Man, and Cybernetics 16(1).

    Args:
        jacobian: (m, n).
        regulariser: (m, m), positive definite: the squares of the damping factors on its diagonal.
    """
    step: Array = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + regulariser, error)
    return step


class ArmKinematics:
    """The joints' velocities that move an arm's tool along the axes of the model's world. One thread uses it."""

    def __init__(self, description: str, spec: RobotSpec, *, with_shapes: bool = False) -> None:
        """Args:
        description: a simulated arm's name, or the path of an MJCF or URDF file. Its joints have the names of the
            state's labels without endings such as ``.pos``; else those from the base to the tool are the robot's.
        with_shapes: keep the model's shapes, whose files must exist.

        Raises:
            SpecError: the file cannot be read, or its joints do not fit the robot's.
        """
        self._model = _load(description, with_shapes)
        self._data = mujoco.MjData(self._model)
        state, elements = spec.feature(STATE), list(spec.limits.joint_position)
        if unknown := {state.units[each] for each in elements} - set(_RAD_FROM_UNIT):
            raise SpecError(f"{spec.model} gives joint positions in {min(unknown)!r}, not in rad, deg or m")
        self._factors = np.array([_RAD_FROM_UNIT[state.units[each]] for each in elements])
        self._site = mujoco.mj_name2id(self._model, mujoco.mjtObj.mjOBJ_SITE, TOOL)
        body = mujoco.mj_name2id(self._model, mujoco.mjtObj.mjOBJ_BODY, TOOL)
        self._body = self._model.site_bodyid[self._site] if self._site >= 0 else body % self._model.nbody
        joints = _find_joints(self._model, description, [state.labels[each] for each in elements], self._body)
        self._positions, self._velocities = self._model.jnt_qposadr[joints], self._model.jnt_dofadr[joints]
        rotation = ROTATION_DAMPING if len(joints) >= 6 else FEW_JOINTS_ROTATION_DAMPING
        self._regulariser = np.diag([DAMPING_M**2] * 3 + [rotation**2] * 3)

    def joint_velocities(self, positions: Array, tool_velocity: Array) -> Array:
        """The joints' velocities (n,) for the tool's velocity (3,), m/s, at joint positions (n,); the tool keeps its
        rotation if the arm can. Positions and velocities are in the units of the robot's state.
        """
        model, data = self._model, self._data
        data.qpos[self._positions] = positions * self._factors
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        jacobian = np.zeros((6, model.nv))
        if self._site >= 0:
            mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], self._site)
        else:
            mujoco.mj_jacBody(model, data, jacobian[:3], jacobian[3:], self._body)
        wanted = np.concatenate([tool_velocity, np.zeros(3)])
        speeds: Array = damped_step(jacobian[:, self._velocities], wanted, self._regulariser) / self._factors
        return speeds


def _load(description: str, with_shapes: bool) -> mujoco.MjModel:
    if description in ARMS:
        return Scene(ARMS[description], ()).model
    try:
        spec = mujoco.MjSpec.from_file(description)
        for shape in [] if with_shapes else [*spec.geoms, *spec.meshes]:  # their files may be missing
            spec.delete(shape)
        spec.compiler.fusestatic = False  # a URDF's tool is on a fixed joint
        spec.compiler.boundmass = spec.compiler.boundinertia = _LEAST_INERTIA
        return spec.compile()
    except ValueError as error:  # MuJoCo's only one
        first = str(error).strip().splitlines()[0]
        raise SpecError(
            f"description {description}: {first}; name an MJCF or URDF file, or one of {sorted(ARMS)}"
        ) from None


def _find_joints(model: mujoco.MjModel, description: str, labels: list[str], tool_body: int) -> list[int]:
    chain: list[int] = []
    body = tool_body
    while body > 0:
        first = int(model.body_jntadr[body])
        chain = [*range(first, first + int(model.body_jntnum[body])), *chain]
        body = int(model.body_parentid[body])
    number_from_name = {model.joint(joint).name: joint for joint in chain}
    names = [label.rpartition(".")[0] or label for label in labels]
    if set(names) <= set(number_from_name):
        return [number_from_name[name] for name in names]
    if len(chain) != len(names):
        raise SpecError(
            f"description {description} has {len(chain)} joints from the base to the tool, "
            f"and the robot has {len(names)}"
        )
    return chain


@dataclass(frozen=True)
class Shape:
    """One geom.

    Attributes:
        body: index of the body that it moves with.
        size: (3,) as in MJCF.
        position, wxyz: (3,) and (4,), in the body's frame.
        rgba: (4,) in [0, 1].
        vertices, faces: (v, 3) and (f, 3) of a mesh, else empty.
    """

    body: int
    kind: ShapeKind
    size: Array
    position: Array
    wxyz: Array
    rgba: Array
    vertices: Array
    faces: Array


class ArmDrawing(ArmKinematics):
    """An arm that follows a robot's state.

    Attributes:
        bodies: the number of bodies, the world included.
    """

    def __init__(self, description: str, spec: RobotSpec) -> None:
        """See `ArmKinematics`. Raises SpecError also if the file of a shape is missing."""
        super().__init__(description, spec, with_shapes=True)
        self._spec, self._elements = spec, list(spec.limits.joint_position)
        self.bodies: int = self._model.nbody
        labels = spec.feature(STATE).labels
        self._arm = ARMS.get(description)
        self._width = labels.index(GRIPPER_WIDTH) if GRIPPER_WIDTH in labels else -1

    def shapes(self) -> Iterator[Shape]:
        """The visible geoms."""
        model = self._model
        for geom in range(model.ngeom):
            rgba = model.geom_rgba[geom] if model.geom_matid[geom] < 0 else model.mat_rgba[model.geom_matid[geom]]
            is_hidden = model.geom_group[geom] >= FIRST_HIDDEN_GROUP or rgba[3] == 0
            if is_hidden or model.geom_type[geom] not in KINDS or max(model.geom_size[geom]) > SHAPE_MAX_M:
                continue
            yield Shape(
                body=int(model.geom_bodyid[geom]),
                kind=KINDS[model.geom_type[geom]],
                size=model.geom_size[geom].copy(),
                position=model.geom_pos[geom].copy(),
                wxyz=model.geom_quat[geom].copy(),
                rgba=rgba.copy(),
                **_mesh(model, geom),
            )

    def move(self, state: Array) -> tuple[Array, Array]:
        """The bodies' positions (b, 3) and orientations (b, 4), wxyz, at ``observation.state`` (s,).

        Raises:
            SpecError: the state has another length than the spec's.
        """
        if len(state) <= max(self._elements):
            raise SpecError(f"a state of {len(state)} elements has no element {max(self._elements)}")
        if self._arm is not None and self._width >= 0:
            drive = self._arm.gripper.drive_from_width(float(state[self._width]))
            for name, share in self._arm.gripper.joints:
                self._data.qpos[self._model.joint(name).qposadr[0]] = share * drive
        self._set_joints(state[self._elements])
        return self._data.xpos.copy(), self._data.xquat.copy()

    def path(self, state: Array, actions: Array) -> Array:
        """The tool's positions (n + 1, 3) at `state` and after each of the `actions` (n, a); (1, 3) if they cannot be
        derived from the actions. Another call of `move` must follow.
        """
        spec, joints = self._spec, state[self._elements]
        self._set_joints(joints)
        points = [self._tool()]
        if spec.tool_delta:
            points.extend(points[0] + np.cumsum(actions[:, list(spec.tool_delta)], axis=0))
        elif moves := spec.joint_target or spec.joint_delta:
            moved = actions[:, list(moves)]
            for each in moved if spec.joint_target else joints + np.cumsum(moved, axis=0):
                self._set_joints(each)
                points.append(self._tool())
        return np.array(points)

    def _set_joints(self, joints: Array) -> None:
        self._data.qpos[self._positions] = joints * self._factors
        mujoco.mj_kinematics(self._model, self._data)

    def _tool(self) -> Array:
        place = self._data.site_xpos[self._site] if self._site >= 0 else self._data.xpos[self._body]
        return np.array(place)


def _mesh(model: mujoco.MjModel, geom: int) -> dict[str, Array]:
    mesh = model.geom_dataid[geom]
    if model.geom_type[geom] != mujoco.mjtGeom.mjGEOM_MESH:
        return {"vertices": np.zeros((0, 3)), "faces": np.zeros((0, 3), int)}
    first, count = model.mesh_vertadr[mesh], model.mesh_vertnum[mesh]
    first_face, faces = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
    return {
        "vertices": model.mesh_vert[first : first + count].copy(),
        "faces": model.mesh_face[first_face : first_face + faces].copy(),
    }
