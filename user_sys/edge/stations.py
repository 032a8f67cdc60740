"""The two processes that every robot has, and the files that they read."""

from __future__ import annotations

import sys
from pathlib import Path

from hal.durable import make_folder_durably
from user_sys.compose import RobotConfig
from user_sys.config import save
from user_sys.edge.session import SessionConfig

ROBOT, SESSION = "robot.yaml", "session.yaml"


def station_argv(robot: str, state: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Name and command line of a robot's driver process and of its session process, in the order of their starts."""
    driver = module_argv("user_sys.edge.driver_process", state / ROBOT, state)
    return (f"{robot}-driver", driver), (f"{robot}-session", module_argv("user_sys.edge.session", state / SESSION))


def write_station(state: Path, robot: RobotConfig, session: SessionConfig) -> None:
    """Writes what both processes read into `state`, which is made when missing."""
    make_folder_durably(state)
    save(robot, state / ROBOT)
    save(session, state / SESSION)


def module_argv(name: str, *args: object) -> tuple[str, ...]:
    """The command line that runs a module with the Python of this process."""
    return (sys.executable, "-m", name, *map(str, args))
