"""Quarantines and drains of robots in the runs of one folder. One of a real robot counts in all of these runs.

Each run keeps its own in its state (`hal.registry.OperatorOverrides`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.errors import RegistryError, StateError
from hal.registry import OperatorOverrides, Override
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


class OverridesOfRuns:
    """Operators' overrides in the run folders of one folder. A run's state is read again only after a change.

    Attributes:
        unreadable: why the overrides of runs cannot be read, by the run's name.
    """

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self.unreadable: dict[str, str] = {}
        self._read: dict[Path, tuple[object, dict[str, Override]]] = {}  # the times of the files, and overrides

    def read(self, but: str = "") -> dict[str, tuple[Override, str]]:
        """Those that can be read, by robot, each with its run's name; the most severe counts. `but`: a run to skip.

        Those of robots that their run simulates do not count: another run has other robots of these names.
        """
        found: dict[str, tuple[Override, str]] = {}
        self.unreadable = {}
        for path in sorted(self._runs.glob(f"*/{STATE_FILE}")):
            run = path.parent
            if run.is_symlink() or run.name == but or not (run / CONFIG_FILE).exists():
                continue
            try:
                overrides = self._of_run(path)
            except StateError as error:
                self.unreadable[run.name] = str(error)
                continue
            for name, override in overrides.items():
                if name not in found or override.health is Health.QUARANTINED:
                    found[name] = (override, run.name)
        return found

    def _of_run(self, path: Path) -> dict[str, Override]:
        changed = _changed_ns(path), _changed_ns(path.with_name(f"{STATE_FILE}-wal"))
        if self._read.get(path, (None, {}))[0] != changed:
            with StateDatabase(path) as database:
                overrides = OperatorOverrides(database).read()
            simulated = _simulated_robots(path.parent) if overrides else set()
            self._read[path] = changed, {name: each for name, each in overrides.items() if name not in simulated}
        return self._read[path][1]


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def operator_overrides(runs: Path) -> dict[str, tuple[Override, str]]:
    """See `OverridesOfRuns.read`. Raises StateError: the overrides of a run cannot be read."""
    overrides = OverridesOfRuns(runs)
    found = overrides.read()
    if overrides.unreadable:
        raise StateError(f"{min(overrides.unreadable.values())}; or move this run out of {runs}")
    return found


def override_elsewhere(robot: str, run: Path, overrides: OverridesOfRuns) -> Override | None:
    """The override of a real robot of the run folder `run` in another run beside it."""
    if robot in _simulated_robots(run):
        return None
    override, other = overrides.read(but=run.name).get(robot, (None, ""))
    if override is None:
        return None
    where = f"in run {other}, where `user-sys hardware restore` ends it"
    return msgspec.structs.replace(override, why=f"{override.why} ({where})" if override.why else where)


def restore_robot(robot: str, run: Path, person: str) -> str:
    """Ends the override of `robot` in the run folder `run`; a running gateway applies it at once. Blocks for a sync.

    Returns:
        The robot's state, for people.

    Raises:
        RegistryError: it has no override there; one in another run is named.
        StateError: the run's state cannot be written.
    """
    left = override_elsewhere(robot, run, OverridesOfRuns(run.parent))
    state = f"out of use: {left.what} {left.note}" if left else "in use again"
    with StateDatabase(run / STATE_FILE) as database:
        try:
            override = OperatorOverrides(database).clear_override(robot, person)
        except RegistryError as error:
            raise RegistryError(f"{robot} is {state}") if left else error from None
    return f"{robot} is {state}; it was {override.what} {override.note}"


def _simulated_robots(run: Path) -> set[str]:
    """Names of those that the run in this folder simulates; none if its configuration cannot be read."""
    try:
        file = msgspec.yaml.decode((run / CONFIG_FILE).read_bytes(), type=_RunFile)
    except (OSError, *DECODE_ERRORS):
        return set()
    return {robot.name for robot in (*file.robots, *file.remote_robots) if robot.driver in SIMULATED_DRIVERS}
