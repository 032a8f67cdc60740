"""Quarantines and drains of robots in the runs of one folder. One of a real robot counts in all of these runs.

Those of real robots are in one database of this folder, those of robots that a run simulates in the run's own.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.registry import OVERRIDDEN, OperatorOverrides, OverrideKind, read_registry
from hal.resource import Health
from hal.state_database import STATE_FILE, StateDatabase
from user_sys.robot_records import CONFIG_FILE, SIMULATED_DRIVERS


class _RobotOfFile(msgspec.Struct, frozen=True):
    name: str
    driver: str


class _RunFile(msgspec.Struct, frozen=True):
    """The robots in a run's ``config.yaml``."""

    robots: tuple[_RobotOfFile, ...] = ()
    remote_robots: tuple[_RobotOfFile, ...] = ()


def overrides_of_real_robots(runs: Path) -> OperatorOverrides:
    """Those that count in all runs in the folder `runs`."""
    return OperatorOverrides(StateDatabase(runs / STATE_FILE))


def overrides_of_run(run: Path) -> OperatorOverrides:
    """Those that count in the run in the folder `run`. Its running gateway applies a change at once."""
    run = run.resolve()  # the folder of a link such as `latest`
    simulated = dict.fromkeys(_simulated_robots(run), StateDatabase(run / STATE_FILE))
    return OperatorOverrides(StateDatabase(run.parent / STATE_FILE), simulated)


def adopt_overrides(run: Path) -> None:
    """Has those of real robots count that the run in the folder `run` has applied, and of which the folder of runs
    knows nothing: the run was moved there. Raises StateError: a database is damaged or cannot be written.
    """
    if not os.access(run / STATE_FILE, os.R_OK):
        return
    overrides = overrides_of_run(run)
    for record in read_registry(StateDatabase(run / STATE_FILE)):
        if record.health in OVERRIDDEN and not overrides.has_record(record.name):
            kind: OverrideKind = "quarantined" if record.health is Health.QUARANTINED else "draining"
            overrides.set_override(record.name, kind, by=f"run {run.resolve().name}", why=record.note)


def _simulated_robots(run: Path) -> set[str]:
    """Names of those that the run in this folder simulates; none if its configuration cannot be read."""
    try:
        file = msgspec.yaml.decode((run / CONFIG_FILE).read_bytes(), type=_RunFile)
    except (OSError, *DECODE_ERRORS):
        return set()
    return {robot.name for robot in (*file.robots, *file.remote_robots) if robot.driver in SIMULATED_DRIVERS}
