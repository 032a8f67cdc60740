"""A compiled scene: the table, an arm and objects, which are placed, parked out of sight, or varied per episode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import mujoco
import numpy as np

from hal.spec import Array
from sim.arms import ArmModel
from sim.objects import DISTRACTORS, SceneObject, make_objects

ASSETS = Path(__file__).parent / "assets"

Pose = tuple[float, float, float, float]
"""Of an upright object: x, y, z of its origin, m, base frame, and its yaw, rad."""

Motion = Callable[[float], Mapping[str, Array]]
"""Maps the time since a reset, s, to the places (3,), m, base frame, of the objects that move by themselves."""

CAMERA_SHIFT_M, WRIST_CAMERA_SHIFT_M = 0.02, 0.005
_PARKED_Z_M, _PARKED_APART_M = -2.0, 0.3  # below the floor, where parked objects do not touch
_DENSITY = 1000.0  # heavy wood
_ROUGH, _SMOOTH = (0.9, 0.005, 0.0001), (0.15, 0.005, 0.0001)
_GAP_EDGES = 1.0  # between a distractor and an object: room for an open finger
_TRIES = 200


class Scene:
    """The table with an arm and objects.

    Attributes:
        model: compiled; the arm's joints come first.
        objects: by name.
    """

    def __init__(self, arm: ArmModel, names: Iterable[str], distractors: int = 0) -> None:
        """Compiles (0.1 s). Raises KeyError on an unknown object."""
        known = make_objects(arm.cube_edge_m)
        self.objects = {name: known[name] for name in (*names, *DISTRACTORS[:distractors])}
        self.model = _compile(arm, self.objects.values())
        self._arm, self._distractors = arm, DISTRACTORS[:distractors]
        self._body_from_name = {name: self.model.body(name).id for name in self.objects}
        self._nominal = {
            name: getattr(self.model, name).copy()
            for name in ("light_diffuse", "mat_rgba", "cam_pos", "body_mass", "body_inertia")
        }

    def arrange(self, data: mujoco.MjData, poses: Mapping[str, Pose]) -> None:
        """Put the objects that have a pose there, and the others out of sight, where they float."""
        for number, (name, thing) in enumerate(self.objects.items()):
            *place, yaw = poses.get(name, (number * _PARKED_APART_M, 0.0, _PARKED_Z_M, 0.0))
            body = self._body_from_name[name]
            if thing.grip_m:
                data.joint(name).qpos[:] = (*place, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2))
                self.model.body_gravcomp[body] = float(name not in poses)
            else:
                data.mocap_pos[self.model.body_mocapid[body]] = place

    def move(self, data: mujoco.MjData, name: str, place: Array) -> None:
        """Move an object that the gripper does not take to (3,) `place`, m, base frame."""
        data.mocap_pos[self.model.body_mocapid[self._body_from_name[name]]] = place

    def positions(self, data: mujoco.MjData) -> dict[str, Array]:
        """The origin of each object, m, base frame: new arrays."""
        return {name: data.xpos[body].copy() for name, body in self._body_from_name.items()}

    def scatter(self, rng: np.random.Generator, poses: Mapping[str, Pose]) -> dict[str, Pose]:
        """Draw poses for the distractors, clear of the objects at `poses`. One that finds no room stays away."""
        found, (low, high) = dict(poses), self._arm.cube_reachable_area
        for name in self._distractors:
            own = self.objects[name]
            for x, y in rng.uniform(low, high, (_TRIES, 2)):
                gaps = (
                    np.hypot(x - pose[0], y - pose[1]) - own.radius_m - self.objects[other].radius_m
                    for other, pose in found.items()
                )
                if min(gaps, default=np.inf) > _GAP_EDGES * self._arm.cube_edge_m:
                    found[name] = (float(x), float(y), own.rest_m, float(rng.uniform(-np.pi, np.pi)))
                    break
        return found

    def randomise(self, rng: np.random.Generator, share: float) -> None:
        """Change lights and the objects' masses by up to half, colours by a quarter, the front camera by 2 cm and
        the wrist's by 5 mm, times `share`. Distractors get any colour. A reset must follow."""
        model, nominal = self.model, self._nominal
        movable = [self._body_from_name[name] for name, thing in self.objects.items() if thing.grip_m]
        weight = 1 + rng.uniform(-0.5, 0.5, len(movable)) * share
        lights = 1 + rng.uniform(-0.5, 0.5, (model.nlight, 1)) * share
        colours = rng.uniform(-0.25, 0.25, (model.nmat, 3)) * share
        model.light_diffuse[:] = nominal["light_diffuse"] * lights
        model.mat_rgba[:, :3] = np.clip(nominal["mat_rgba"][:, :3] + colours, 0, 1)
        for name in self._distractors:
            model.mat(name).rgba[:3] = rng.uniform(0, 1, 3)
        shift = np.where(model.cam_bodyid == 0, CAMERA_SHIFT_M, WRIST_CAMERA_SHIFT_M)[:, None]
        model.cam_pos[:] = nominal["cam_pos"] + rng.uniform(-1, 1, (model.ncam, 3)) * shift * share
        model.body_mass[movable] = nominal["body_mass"][movable] * weight
        model.body_inertia[movable] = nominal["body_inertia"][movable] * weight[:, None]
        extent = model.stat.extent
        mujoco.mj_setConst(model, mujoco.MjData(model))
        model.stat.extent = extent  # mj_setConst measures it again, and cameras cut off everything nearer than 1% of it


def _compile(arm: ArmModel, objects: Iterable[SceneObject]) -> mujoco.MjModel:
    files = ("table.xml", f"{arm.name}.xml")
    xml = "".join(f'<include file="{name}"/>' for name in files)
    spec = mujoco.MjSpec.from_string(
        f'<mujoco model="{arm.name}">{xml}</mujoco>', {name: (ASSETS / name).read_bytes() for name in files}
    )
    for thing in objects:
        _add_object(spec, thing)
    return spec.compile()


def _add_object(spec: mujoco.MjSpec, thing: SceneObject) -> None:
    body = spec.worldbody.add_body(name=thing.name, mocap=not thing.grip_m)
    if thing.grip_m:
        body.add_freejoint(name=thing.name)
    spec.add_material(name=thing.name, rgba=(*thing.rgb, 1.0 if thing.solid else 0.75), specular=0.2, shininess=0.4)
    for part in thing.parts:
        body.add_geom(
            type=getattr(mujoco.mjtGeom, f"mjGEOM_{part.shape.upper()}"),
            size=(*part.size, 0.0, 0.0)[:3],
            pos=part.centre,
            quat=part.turn,
            density=_DENSITY,
            material=thing.name,
            friction=_SMOOTH if thing.slides else _ROUGH,
            condim=4,
            group=0 if thing.solid else 1,
            contype=int(thing.solid),
            conaffinity=int(thing.solid),
        )
