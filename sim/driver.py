"""The driver of the simulation: makes robots with their tasks, cameras and scripted experts."""

from __future__ import annotations

from dataclasses import replace

from hal.driver import ExpertPolicy, RobotSetup, RobotSetupRequest, read_options
from hal.errors import SpecError
from hal.robot import Observation
from hal.task import Task
from sim.arms import panda
from sim.arms.arm import ArmModel
from sim.experts import make_expert
from sim.robot import SimRobot, SimRobotConfig
from sim.tasks import LiftTask, SimReachTask

TASK_FROM_NAME: dict[str, type[LiftTask] | type[SimReachTask]] = {"lift": LiftTask, "reach": SimReachTask}
HIGH_RESOLUTION_PIXELS = 256
"""Height and width of high-resolution images, for videos."""


def make_task(name: str, arm: ArmModel = panda.ARM) -> Task:
    """Make the task called `name` for `arm`; it needs the scene of the same name. Raises SpecError."""
    if name not in TASK_FROM_NAME:
        raise SpecError(f"no task {name!r}; choose one of {sorted(TASK_FROM_NAME)}")
    return TASK_FROM_NAME[name](arm)


def make_robot_setup(request: RobotSetupRequest) -> RobotSetup:
    """A `hal.driver.RobotSetupFactory`; options: `sim.robot.SimRobotConfig`. The scene is that of the task."""
    options = read_options(SimRobotConfig, replace(request, options={"scene": request.task, **request.options}))
    if request.high_resolution:
        options = replace(options, image_height=HIGH_RESOLUTION_PIXELS, image_width=HIGH_RESOLUTION_PIXELS)
    robot = SimRobot(options)

    def expert(seed: int, noise: float) -> ExpertPolicy:
        scripted = make_expert(request.task, robot, noise, seed)
        return lambda arrays: scripted(Observation(arrays=arrays, t_capture_ns=0))

    setup = RobotSetup(request.name, robot, make_task(request.task, options.arm), make_expert=expert)
    if not request.cameras:
        return setup
    from sim.rendering import make_cameras  # here, because it needs EGL

    return replace(setup, cameras=tuple(make_cameras(robot).values()))
