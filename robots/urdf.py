"""Read a robot description (URDF): the limits of its joints and the poses of its links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

import numpy as np

from hal.errors import SpecError
from hal.spec import Array

MAX_BYTES = 8 << 20
_ROTARY, _LINEAR = ("revolute", "continuous"), ("prismatic",)
_FULL_TURN_RAD = 2 * math.pi  # either way, for a joint without end stops


@dataclass(frozen=True)
class UrdfJoint:
    """One joint. `low`, `high` and `speed_max` are in rad and rad/s, or m and m/s for a prismatic joint. A missing
    limit is NaN.

    Attributes:
        kind: URDF's type: ``revolute``, ``continuous``, ``prismatic``, ``fixed``, ...
        origin: (4, 4), the joint's frame in its parent link's frame.
        axis: (3,), unit vector in the joint's frame.
    """

    name: str
    kind: str
    parent: str
    child: str
    origin: Array
    axis: Array
    low: float
    high: float
    speed_max: float

    @property
    def is_movable(self) -> bool:
        return self.kind in _ROTARY + _LINEAR

    def transform(self, value: float) -> Array:
        """(4, 4): the child link's frame in the parent link's frame, with the joint at `value`."""
        moved = np.eye(4)
        if self.kind in _ROTARY:
            moved[:3, :3] = _rotation(self.axis, value)
        elif self.kind in _LINEAR:
            moved[:3, 3] = self.axis * value
        result: Array = self.origin @ moved
        return result


class Urdf:
    """A parsed description.

    Attributes:
        joints: by name, in the description's order.
        root: the link without a parent joint.
    """

    def __init__(self, text: str) -> None:
        """Raises SpecError: not XML, not a URDF, too long, or with a DOCTYPE (entities are not expanded)."""
        if len(text) > MAX_BYTES:
            raise SpecError(f"the robot's description has {len(text)} characters; at most {MAX_BYTES} are allowed")
        if "<!DOCTYPE" in text:
            raise SpecError("the robot's description has a DOCTYPE; remove it, a URDF has none")
        try:
            robot = ElementTree.fromstring(text)
            self.joints = {joint.name: joint for joint in map(_read_joint, robot.findall("joint"))}
        except (ElementTree.ParseError, ValueError) as error:
            raise SpecError(f"the robot's description is not a URDF: {error}") from None
        if robot.tag != "robot" or not self.joints:
            raise SpecError(f"the robot's description is not a URDF: <{robot.tag}> with {len(self.joints)} joints")
        self._above = {joint.child: joint for joint in self.joints.values()}
        self.root = next((j.parent for j in self.joints.values() if j.parent not in self._above), "")

    def joint(self, name: str) -> UrdfJoint:
        """Raises SpecError for an unknown joint, or one that does not move."""
        if name not in self.joints or not self.joints[name].is_movable:
            movable = [joint.name for joint in self.joints.values() if joint.is_movable]
            raise SpecError(f"the robot's description has no movable joint {name!r}; choose one of {movable}")
        return self.joints[name]

    def chain(self, link: str, base: str = "") -> KinematicChain:
        """The joints between `base` (default: the root) and `link`.

        Raises:
            SpecError: there is no such link, or it is not connected to the base.
        """
        base = base or self.root
        joints: list[UrdfJoint] = []
        at = link
        while at != base:
            if at not in self._above or len(joints) > len(self.joints):
                raise SpecError(f"link {link!r} is not connected to {base!r}; the links are {sorted(self._above)}")
            joints.append(self._above[at])
            at = joints[-1].parent
        return KinematicChain(tuple(reversed(joints)))


@dataclass(frozen=True)
class KinematicChain:
    """The joints from a base to a link, including fixed ones."""

    joints: tuple[UrdfJoint, ...]

    @property
    def movable_joints(self) -> tuple[str, ...]:
        return tuple(joint.name for joint in self.joints if joint.is_movable)

    def pose(self, values: Mapping[str, float]) -> Array:
        """(4, 4) float64: the link's frame in the base's frame. `values` has every movable joint's position, in rad or
        m."""
        pose: Array = np.eye(4)
        for joint in self.joints:
            pose = pose @ joint.transform(values[joint.name] if joint.is_movable else 0.0)
        return pose


def _read_joint(element: ElementTree.Element) -> UrdfJoint:
    kind, limit = element.get("type", ""), element.find("limit")
    origin, axis = element.find("origin"), _read_vector(element.find("axis"), "xyz", (1.0, 0.0, 0.0))
    transform = np.eye(4)
    transform[:3, :3] = _roll_pitch_yaw(*_read_vector(origin, "rpy", (0.0, 0.0, 0.0)))
    transform[:3, 3] = _read_vector(origin, "xyz", (0.0, 0.0, 0.0))
    endless = kind == "continuous"
    return UrdfJoint(
        name=_require_attribute(element, "name"),
        kind=kind,
        parent=_require_attribute(element.find("parent"), "link"),
        child=_require_attribute(element.find("child"), "link"),
        origin=transform,
        axis=axis / max(float(np.linalg.norm(axis)), 1e-12),
        low=-_FULL_TURN_RAD if endless else _read_number(limit, "lower", 0.0),
        high=_FULL_TURN_RAD if endless else _read_number(limit, "upper", 0.0),
        speed_max=_read_number(limit, "velocity", math.nan),
    )


def _require_attribute(element: ElementTree.Element | None, attribute: str) -> str:
    name = None if element is None else element.get(attribute)
    if not name:
        raise ValueError(f"a joint without {attribute}")
    return name


def _read_number(element: ElementTree.Element | None, attribute: str, otherwise: float) -> float:
    """URDF's default for a missing bound of a limit is 0; a joint without a limit gets NaN."""
    return math.nan if element is None else float(element.get(attribute, otherwise))


def _read_vector(element: ElementTree.Element | None, attribute: str, otherwise: tuple[float, float, float]) -> Array:
    text = None if element is None else element.get(attribute)
    values = otherwise if text is None else tuple(map(float, text.split()))
    if len(values) != 3 or not all(map(math.isfinite, values)):
        raise ValueError(f"{attribute}={text!r} is not three numbers")
    return np.array(values)


def _roll_pitch_yaw(roll: float, pitch: float, yaw: float) -> Array:
    """URDF's order: about the fixed x, then y, then z axis."""
    x, y, z = np.eye(3)
    result: Array = _rotation(z, yaw) @ _rotation(y, pitch) @ _rotation(x, roll)
    return result


def _rotation(axis: Array, angle_rad: float) -> Array:
    """Rodrigues' formula."""
    x, y, z = axis
    cross: Array = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    result: Array = np.eye(3) + math.sin(angle_rad) * cross + (1 - math.cos(angle_rad)) * (cross @ cross)
    return result
