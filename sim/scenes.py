"""What composing a run needs of the simulation: robots, tasks, cameras and experts by name."""

from __future__ import annotations

from hal.errors import SpecError
from hal.task import Task
from sim.experts import Expert, make_expert
from sim.robot import SimRobot, SimRobotConfig
from sim.tasks.lift import Lift
from sim.tasks.reach import Reach

__all__ = ["Expert", "make_expert", "make_robot", "make_task"]

TASKS: dict[str, type[Lift] | type[Reach]] = {"lift": Lift, "reach": Reach}


def make_robot(config: SimRobotConfig | None = None) -> SimRobot:
    """A simulated Panda, not yet connected. Raises SpecError on an unknown scene or camera."""
    return SimRobot(config)


def make_task(name: str) -> Task:
    """The task called `name`, with its defaults; it wants the scene of the same name. Raises SpecError otherwise."""
    if name not in TASKS:
        raise SpecError(f"no task {name!r}; there are {sorted(TASKS)}")
    return TASKS[name]()
