"""The objects of the simulated tasks: their shapes, and which task needs which. It needs no MuJoCo.

Sizes follow the edge of the arm's cube; the clearance of what fits into something else does not. The gripper grips an
object at its origin; the origin of an object that is not gripped lies on the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal

import numpy as np

from hal.errors import SpecError
from hal.settings import suggest
from hal.spec import Array

CLEARANCE_M = 0.001
"""The width of a hole less the width of what goes into it."""

BIN_HALF_EDGES, BIN_HEIGHT_EDGES = 1.5, 0.6
"""Half the inner width and the height of the bin, in edges of the cube."""

CUBE_COLOURS = {
    "red": (0.80, 0.08, 0.10),
    "green": (0.12, 0.60, 0.18),
    "blue": (0.12, 0.25, 0.85),
    "yellow": (0.95, 0.80, 0.10),
}
"""Colours of the cubes that lie together in one scene."""


def coloured_cubes(first: str) -> tuple[str, ...]:
    """Names of all coloured cubes; that of the colour `first` leads."""
    return tuple(f"{colour}_cube" for colour in (first, *(other for other in CUBE_COLOURS if other != first)))


TASK_OBJECTS = {
    "lift": ("cube",),
    "reach": ("target",),
    "follow": ("target",),
    "place": ("cube", "bin"),
    "tidy": ("cube", "can", "block", "bin"),
    "peg": ("peg", "hole"),
    "plug": ("plug", "socket"),
    "cap": ("cap", "bottle"),
    **{f"lift_{colour}": coloured_cubes(colour) for colour in CUBE_COLOURS},
}
"""The objects of each task, in the order of a scene's tracker."""

DISTRACTORS = ("distractor_0", "distractor_1")
"""Objects that no task needs."""

_WALL_M = 0.004
_UPRIGHT = (1.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Part:
    """One convex shape of an object, in the object's frame.

    Attributes:
        shape: of MuJoCo; a cylinder's or a capsule's axis is z.
        size: half edges, or radius and half length, or radius, m.
        centre: m.
        turn: unit quaternion, w first.
    """

    shape: Literal["box", "capsule", "cylinder", "sphere"]
    size: tuple[float, ...]
    centre: tuple[float, float, float] = (0.0, 0.0, 0.0)
    turn: tuple[float, float, float, float] = _UPRIGHT

    @property
    def extent(self) -> tuple[float, float, float]:
        """Half the edges of a box around it, without its turn, m."""
        if self.shape == "box":
            return (self.size[0], self.size[1], self.size[2])
        length = 0.0 if self.shape == "sphere" else self.size[1]
        return (self.size[0], self.size[0], length + (0.0 if self.shape == "cylinder" else self.size[0]))


@dataclass(frozen=True)
class SceneObject:
    """One object.

    Attributes:
        rgb: its colour, each in 0 to 1.
        grip_m: its width between the fingers; 0 for an object that a task places and that does not move.
        seat_m: height of its origin above the table at the end of its insertion.
        slides: its surface has little friction.
        solid: whether it touches other objects.
    """

    name: str
    parts: tuple[Part, ...]
    rgb: tuple[float, float, float]
    grip_m: float = 0.0
    seat_m: float = 0.0
    slides: bool = False
    solid: bool = True

    @property
    def rest_m(self) -> float:
        """Height of its origin above its lowest point."""
        return -min(part.centre[2] - part.extent[2] for part in self.parts)

    @property
    def top_m(self) -> float:
        """Height of its highest point above its origin."""
        return max(part.centre[2] + part.extent[2] for part in self.parts)

    @property
    def radius_m(self) -> float:
        """Of an upright cylinder around it."""
        return max(
            math.hypot(abs(part.centre[0]) + part.extent[0], abs(part.centre[1]) + part.extent[1])
            for part in self.parts
        )


@cache
def make_objects(edge_m: float) -> Mapping[str, SceneObject]:
    """All objects by name, for an arm whose cube has this edge."""
    e, gap = edge_m, CLEARANCE_M / 2
    made = (
        SceneObject("cube", (Part("box", (e / 2, e / 2, e / 2)),), (0.93, 0.36, 0.16), grip_m=e),
        *(
            SceneObject(f"{colour}_cube", (Part("box", (e / 2, e / 2, e / 2)),), rgb, grip_m=e)
            for colour, rgb in CUBE_COLOURS.items()
        ),
        SceneObject("target", (Part("sphere", (0.02,)),), (0.20, 0.75, 0.35), solid=False),
        SceneObject("can", (Part("cylinder", (0.4 * e, 0.45 * e)),), (0.75, 0.12, 0.22), grip_m=0.8 * e),
        SceneObject("block", (Part("box", (0.5 * e, 0.35 * e, 0.4 * e)),), (0.20, 0.62, 0.30), grip_m=0.7 * e),
        SceneObject("bin", _bin(e), (0.24, 0.44, 0.72)),
        SceneObject(
            "peg",
            (Part("box", (0.25 * e, 0.25 * e, e), (0.0, 0.0, -0.5 * e)),),
            (0.95, 0.75, 0.15),
            grip_m=0.5 * e,
            seat_m=1.5 * e,
            slides=True,
        ),
        SceneObject(
            "hole",
            _slots(e, (0.0,), (0.25 * e + gap, 0.25 * e + gap), (0.8 * e, 0.8 * e), e),
            (0.35, 0.38, 0.62),
            slides=True,
        ),
        SceneObject(
            "plug",
            (
                Part("box", (0.5 * e, 0.3 * e, 0.35 * e)),
                *(Part("box", (0.1 * e, 0.22 * e, 0.3 * e), (x * e, 0.0, -0.65 * e)) for x in (-0.3, 0.3)),
            ),
            (0.92, 0.92, 0.88),
            grip_m=0.6 * e,
            seat_m=0.95 * e,
            slides=True,
        ),
        SceneObject(
            "socket",
            _slots(e, (-0.3 * e, 0.3 * e), (0.1 * e + gap, 0.22 * e + gap), (0.8 * e, 0.7 * e), 0.55 * e),
            (0.30, 0.30, 0.34),
            slides=True,
        ),
        SceneObject("cap", _cup(e), (0.85, 0.20, 0.55), grip_m=e, seat_m=1.4 * e, slides=True),
        SceneObject(
            "bottle",
            (
                Part("cylinder", (0.7 * e, 0.5 * e), (0.0, 0.0, 0.5 * e)),
                Part("capsule", (0.4 * e - gap, 0.14 * e), (0.0, 0.0, 1.14 * e)),
            ),
            (0.25, 0.60, 0.62),
            slides=True,
        ),
        SceneObject(DISTRACTORS[0], (Part("cylinder", (0.5 * e, 0.3 * e)),), (0.5, 0.5, 0.5), grip_m=e),
        SceneObject(DISTRACTORS[1], (Part("box", (0.6 * e, 0.4 * e, 0.35 * e)),), (0.5, 0.5, 0.5), grip_m=0.8 * e),
    )
    return MappingProxyType({each.name: each for each in made})


def is_in_bin(place: Array, goal: Array, edge_m: float) -> bool:
    """Whether an object at `place` (3,) is in the bin at `goal` (3,), m, be it on top of another."""
    return bool((np.abs(place - goal)[:2] < BIN_HALF_EDGES * edge_m).all() and place[2] < 1.8 * edge_m)


def scene_objects(scene: Iterable[str]) -> tuple[str, ...]:
    """The objects of a scene: of its tasks, or named themselves. Raises SpecError on an unknown name."""
    order = tuple(dict.fromkeys(name for names in TASK_OBJECTS.values() for name in names))
    found = set[str]()
    for name in scene:
        if name not in TASK_OBJECTS and name not in order:
            raise SpecError(f"no scene {name!r}; {suggest(name, TASK_OBJECTS)}")
        found |= set(TASK_OBJECTS.get(name, (name,)))
    return tuple(name for name in order if name in found)


def _bin(e: float) -> tuple[Part, ...]:
    wide, wall, high = BIN_HALF_EDGES * e, _WALL_M / 2, BIN_HEIGHT_EDGES * e / 2
    return (
        Part("box", (wide, wide, wall), (0.0, 0.0, wall)),
        *(Part("box", (wide, wall, high), (0.0, y, high)) for y in (wide, -wide)),
        *(Part("box", (wall, wide, high), (x, 0.0, high)) for x in (-wide, wide)),
    )


def _cup(e: float) -> tuple[Part, ...]:
    """A square cap, open below: 0.8 edges high, with walls of a tenth of an edge."""
    wall, high = 0.05 * e, 0.35 * e
    return (
        Part("box", (0.5 * e, 0.5 * e, wall), (0.0, 0.0, 0.35 * e)),
        *(Part("box", (0.5 * e, wall, high), (0.0, y * e, -0.05 * e)) for y in (-0.45, 0.45)),
        *(Part("box", (wall, 0.4 * e, high), (x * e, 0.0, -0.05 * e)) for x in (-0.45, 0.45)),
    )


def _slots(
    e: float, places: tuple[float, ...], slot: tuple[float, float], outer: tuple[float, float], high: float
) -> tuple[Part, ...]:
    """A block with rectangular slots at these x, each with a bevelled rim; `slot` and `outer` are half widths, m."""
    (a, b), (wide, deep), bevel = slot, outer, 0.15 * e
    low = (high - bevel) / 2
    starts, ends = (-wide, *(x + a for x in places)), (*(x - a for x in places), wide)
    walls = [
        Part("box", ((x1 - x0) / 2, b, low), ((x0 + x1) / 2, 0.0, low)) for x0, x1 in zip(starts, ends, strict=True)
    ]
    for side in (-1, 1):
        walls.append(Part("box", (wide, (deep - b) / 2, low), (0.0, side * (deep + b) / 2, low)))
        centre, half, turn = _bevel(b, high, bevel, side)
        walls.append(Part("box", (wide, *half), (0.0, *centre), (turn[0], turn[1], 0.0, 0.0)))
        centre, half, turn = _bevel(a, high, bevel, side)
        for x in places:
            walls.append(
                Part("box", (half[0], b, half[1]), (x + centre[0], 0.0, centre[1]), (turn[0], 0.0, -turn[1], 0.0))
            )
    return tuple(walls)


def _bevel(
    inner: float, high: float, bevel: float, side: int
) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
    """A thin plate from the slot's edge (`inner`, `high` - `bevel`) up and out at 45 degrees: its centre (across,
    up), its half size, and cosine and sine of half its turn."""
    thick = bevel / 4
    out, up = inner + bevel / 2 + thick / math.sqrt(2), high - bevel / 2 - thick / math.sqrt(2)
    half_turn = side * math.pi / 8
    return (side * out, up), (bevel / math.sqrt(2), thick), (math.cos(half_turn), math.sin(half_turn))
