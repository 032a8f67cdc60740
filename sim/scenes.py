"""The simulation as a driver: robots, tasks, cameras and experts by name."""

from __future__ import annotations

from dataclasses import replace

from hal.errors import SpecError
from hal.robot import Observation
from hal.station import Expert, Station, StationRequest, read_options
from hal.task import Task
from sim import panda
from sim.arm import Arm
from sim.experts import make_expert
from sim.robot import SimRobot, SimRobotConfig
from sim.tasks.lift import Lift
from sim.tasks.reach import Reach

TASKS: dict[str, type[Lift] | type[Reach]] = {"lift": Lift, "reach": Reach}
FILM_PIXELS = 256
"""Height and width of the cameras' pictures when people are to look at them."""


def make_task(name: str, arm: Arm = panda.ARM) -> Task:
    """The task called `name` for `arm`, with its defaults; it wants the scene of the same name. Raises SpecError."""
    if name not in TASKS:
        raise SpecError(f"no task {name!r}; there are {sorted(TASKS)}")
    return TASKS[name](arm)


def make_station(request: StationRequest) -> Station:
    """A simulated arm in the scene of the task, with `sim.robot.SimRobotConfig` as options."""
    options = read_options(SimRobotConfig, replace(request, options={"scene": request.task, **request.options}))
    if request.film:
        options = replace(options, image_height=FILM_PIXELS, image_width=FILM_PIXELS)
    robot = SimRobot(options)

    def expert(seed: int, noise: float) -> Expert:
        scripted = make_expert(request.task, robot, noise, seed)
        return lambda arrays: scripted(Observation(arrays=arrays, t_capture_ns=0))

    station = Station(request.name, robot, make_task(request.task, options.arm), expert=expert)
    if not request.cameras:
        return station
    from sim.rendering import make_cameras  # here, because it needs EGL

    return replace(station, cameras=tuple(make_cameras(robot).values()))
