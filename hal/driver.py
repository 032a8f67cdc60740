"""Drivers: how a package offers a robot to a run.

An installed package adds a driver with an entry point of the group ``user_sys.drivers`` that refers to a
`RobotSetupFactory`. A run's config selects it by ``driver: NAME``; nothing else of the system changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, TypeVar

from hal.camera import Camera
from hal.errors import SpecError
from hal.robot import Robot
from hal.settings import NAME_PATTERN, load_plugin, read_settings
from hal.spec import RobotSpec
from hal.task import Task, TaskRequest
from hal.teleoperator import Teleoperator

DRIVER_GROUP = "user_sys.drivers"


@dataclass(frozen=True)
class RobotSetupRequest:
    """The part of a run's config that a driver receives.

    Attributes:
        name: of the robot, unique in the fleet.
        task: the name of the task; of the first one if there are several.
        options: the driver's own settings; a driver refuses unknown ones.
        cameras: whether the robot gets its cameras.
        film: whether a simulated robot gets `RobotSetup.film_cameras`.
        tasks: all tasks of the robot (`hal.task.build_task`); empty for `task` alone.
    """

    name: str
    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    cameras: bool = True
    film: bool = False
    tasks: tuple[TaskRequest, ...] = ()

    def __post_init__(self) -> None:
        if not self.tasks:
            object.__setattr__(self, "tasks", (TaskRequest(self.task),))


@dataclass(frozen=True)
class RobotSetup:
    """A robot with its task, cameras and input devices; nothing is connected yet.

    Raises SpecError: a task's name is not of `hal.settings.NAME_PATTERN`, so that no episode of it could be stored.

    Attributes:
        task: the robot's task, or its `hal.task.TaskMix`.
        teleoperators: input devices that are attached to the robot's computer.
        film_cameras: larger views for people, which are no part of the robot's spec.
    """

    name: str
    robot: Robot
    task: Task
    cameras: tuple[Camera, ...] = ()
    teleoperators: tuple[Teleoperator, ...] = ()
    film_cameras: tuple[Camera, ...] = ()

    def __post_init__(self) -> None:
        for name in self.task.names:
            if not NAME_PATTERN.fullmatch(name):
                raise SpecError(
                    f"task: {name[:80]!r} is not a name: use letters, digits, '.', '_' and '-', and start with a "
                    "letter or digit; words belong in its sentence"
                )


Options = TypeVar("Options")


def read_options(kind: type[Options], request: RobotSetupRequest) -> Options:
    """The request's options as `kind`, a frozen dataclass (`hal.settings`).

    Raises:
        SpecError: an unknown option (the message suggests the nearest name), or a value that is not allowed.
    """
    try:
        return read_settings(kind, request.options)
    except SpecError as error:
        raise SpecError(f"robot {request.name}: {error}") from None


RobotSetupFactory = Callable[[RobotSetupRequest], RobotSetup]
"""Builds a robot setup and connects nothing. Raises SpecError for an unknown option or task."""


TeleoperatorFactory = Callable[[RobotSetupRequest, RobotSpec], Teleoperator]
"""Builds an input device for the robot of that spec and connects nothing. The request's options are the device's own.
Raises SpecError as `RobotSetupFactory` does."""


def installed_drivers() -> list[str]:
    """The names of the drivers that installed packages offer."""
    return sorted({entry.name for entry in entry_points(group=DRIVER_GROUP)})


def load_driver(name: str, built_in: Mapping[str, str] | None = None) -> RobotSetupFactory:
    """The driver `name`, imported now: a built-in one, or one of an installed package. Raises as `load_plugin`."""
    factory: RobotSetupFactory = load_plugin(DRIVER_GROUP, name, built_in or {})
    return factory
