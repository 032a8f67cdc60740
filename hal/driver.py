"""Drivers: how a package offers a robot to a run.

An installed package adds a driver with an entry point of the group ``user_sys.drivers`` that refers to a
`RobotSetupFactory`. A run's config selects it by ``driver: NAME``; nothing else of the system changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from hal.camera import Camera
from hal.errors import SpecError
from hal.robot import Robot
from hal.spec import Array, RobotSpec
from hal.task import Task
from hal.teleoperator import Teleoperator

DRIVER_GROUP = "user_sys.drivers"

ExpertPolicy = Callable[[Mapping[str, Array]], Array]
"""A scripted expert: maps the observation's arrays to an action."""


@dataclass(frozen=True)
class RobotSetupRequest:
    """The part of a run's config that a driver receives.

    Attributes:
        name: of the robot, unique in the fleet.
        task: one of the driver's tasks.
        options: the driver's own settings; a driver refuses unknown ones.
        cameras: whether the robot gets its cameras.
        high_resolution: simulated cameras draw larger images, for people.
    """

    name: str
    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    cameras: bool = True
    high_resolution: bool = False


@dataclass(frozen=True)
class RobotSetup:
    """A robot with its task, cameras and input devices; nothing is connected yet.

    Attributes:
        make_expert: makes a scripted expert from a seed and a noise (a share of the action's bounds), if there is one.
        teleoperators: input devices that are attached to the robot's computer.
    """

    name: str
    robot: Robot
    task: Task
    cameras: tuple[Camera, ...] = ()
    make_expert: Callable[[int, float], ExpertPolicy] | None = None
    teleoperators: tuple[Teleoperator, ...] = ()


Options = TypeVar("Options")


def read_options(kind: type[Options], request: RobotSetupRequest) -> Options:
    """The request's options as `kind`, a frozen dataclass of plain types.

    Raises:
        SpecError: an unknown option (the message suggests the nearest name), or a value of another type.
    """
    _require_known(kind, request.options, f"robot {request.name}")
    try:
        return msgspec.convert(dict(request.options), kind, strict=True)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise SpecError(f"robot {request.name}: {error}") from None


def _require_known(kind: type, options: Mapping[str, Any], where: str) -> None:
    known = {each.name: each for each in fields(kind)}
    types = get_type_hints(kind)
    for name, value in options.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {sorted(known)}"
            raise SpecError(f"{where}: unknown option {name!r}{hint}")
        for inner, settings, place in _nested(types[name], value, f"{where}.{name}"):
            _require_known(inner, settings, place)


def _nested(annotation: Any, value: Any, where: str) -> Iterator[tuple[type, Mapping[str, Any], str]]:
    """The dataclasses in `annotation`, each with its given settings and its path in the options."""
    if is_dataclass(annotation) and isinstance(annotation, type):
        if isinstance(value, Mapping):
            yield annotation, value, where
    elif get_origin(annotation) is dict and isinstance(value, Mapping):
        for key, each in value.items():
            yield from _nested(get_args(annotation)[1], each, f"{where}.{key}")
    else:
        for choice in get_args(annotation):
            yield from _nested(choice, value, where)


RobotSetupFactory = Callable[[RobotSetupRequest], RobotSetup]
"""Builds a robot setup and connects nothing. Raises SpecError for an unknown option or task."""


TeleoperatorFactory = Callable[[RobotSetupRequest, RobotSpec], Teleoperator]
"""Builds an input device for the robot of that spec and connects nothing. The request's options are the device's own.
Raises SpecError as `RobotSetupFactory` does."""


def installed_drivers() -> list[str]:
    """The names of the drivers that installed packages offer."""
    return sorted({entry.name for entry in entry_points(group=DRIVER_GROUP)})


def load_driver(name: str) -> RobotSetupFactory:
    """The driver `name` of an installed package, imported now.

    Raises:
        SpecError: no package offers it, or its package fails to import; the message names the package.
    """
    found = next(iter(entry_points(group=DRIVER_GROUP, name=name)), None)
    if found is None:
        raise SpecError(f"no driver {name!r} is installed; there are {installed_drivers() or 'none'}")
    try:
        factory: RobotSetupFactory = found.load()
    except Exception as error:  # a foreign package may fail in any way
        raise SpecError(f"driver {name!r} ({found.value}) does not load: {type(error).__name__}: {error}") from error
    return factory
