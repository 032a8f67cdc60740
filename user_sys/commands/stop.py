"""``user-sys stop`` and ``user-sys rearm``: the e-stop of this computer's robots, for any program that drives them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import click

from hal.estop import EstopLatch
from hal.lease import MachineLock, driven_robots
from hal.machine_folder import RobotFiles, known_robot_files, machine_folder_problem, require_robot_name, robot_files
from hal.registry import operator_name
from hal.state_database import audit_operator_action
from user_sys.commands.options import by_option, reason_option
from user_sys.commands.output import print_line
from user_sys.edge.local_estop import press_estop
from user_sys.errors import RunError

MAX_PARALLEL = 16
MAX_PERSON_CHARS = 64

log = logging.getLogger(__name__)


@click.command()
@click.argument("robots", nargs=-1, metavar="[ROBOT]...")
@by_option
@reason_option
def stop(robots: Sequence[str], by: str | None, reason: str) -> int:
    """Press the e-stop of each ROBOT, or of every robot that this computer drives, for any program and user.

    It reports which driver acknowledged. Without names it stops the real robots and this user's simulated ones. The
    exit status is 1 if a robot is unknown or did not answer, or no robot is driven. A person re-arms a robot at a run's
    console, or with `user-sys rearm`.
    """
    for name in robots:
        require_robot_name(name)
    driven = driven_robots()
    selected, unknown = _select_robots(robots, driven)
    person = operator_name(by)[:MAX_PERSON_CHARS]
    failed = bool(unknown) or not selected
    with ThreadPoolExecutor(min(len(selected), MAX_PARALLEL) or 1) as pool:
        for files, pending in [(files, pool.submit(press_estop, files, person, reason)) for files in selected]:
            result = pending.result()
            failed |= not result.ok
            print_line(f"{_title(files)}: {result.text}", error=not result.ok)
            audit_operator_action(person, "e-stop", result.text, robot=files.name, reason=reason)
    listed = ", ".join(map(_title, driven)) or "none"
    for name in unknown:
        text = f"NOT STOPPED: no robot of this name is known on this computer. Driven here: {listed}"
        print_line(f"{name}: {text}{_visibility_warning()}", error=True)
        audit_operator_action(person, "e-stop", "refused: not known on this computer", robot=name, reason=reason)
    if not robots and not selected:
        others = f" by this user; driven by others: {listed}" if driven else ""
        text = f"no robot is driven on this computer{others}. Nothing was stopped{_visibility_warning()}"
        print_line(text, error=True)
    return int(failed)


def _select_robots(names: Sequence[str], driven: Sequence[RobotFiles]) -> tuple[list[RobotFiles], list[str]]:
    """The robots with these names, and the unknown names.

    A name selects the real robot and this user's driven simulated robot. If there is neither, it selects another
    user's.
    """
    if not names:
        return [files for files in driven if files.uid in (None, os.getuid())], []
    real = [files for files in known_robot_files() if files.uid is None and files.is_known]
    selected: dict[RobotFiles, None] = {}
    unknown = []
    for name in dict.fromkeys(names):
        found = [files for files in dict.fromkeys([*real, *driven]) if files.name == name]
        found = [files for files in found if files.uid in (None, os.getuid())] or found
        selected.update(dict.fromkeys(found))
        if not found:
            unknown.append(name)
    return list(selected), unknown


@click.command()
@click.argument("robot", metavar="ROBOT")
@by_option
def rearm(robot: str, by: str | None) -> None:
    """Lift the latched e-stop of the real ROBOT. A run re-arms its robots, simulated ones too, at its console."""
    files = robot_files(robot, simulated=False)
    latch = EstopLatch(files.latch_path)
    with MachineLock(files.lock_path, "user-sys rearm", robot):
        if (latched := latch.read()) is None:
            raise RunError(f"{robot}: no e-stop is latched on this computer")
        if not latch.clear(latched):
            raise RunError(f"{robot}: the e-stop was pressed again just now, and stands")
    person = operator_name(by)[:MAX_PERSON_CHARS]
    log.warning("estop.rearmed robot=%s by=%s; it was pressed by %s", robot, person, latched.by)
    audit_operator_action(person, "re-arm", robot=robot)
    print_line(f"{robot}: re-armed by {person}; it was stopped by {latched.by}: {latched.why}")


def _title(files: RobotFiles) -> str:
    return files.name if files.uid is None else f"{files.name} (simulated by user {files.uid})"


def _visibility_warning() -> str:
    """A warning if this user cannot see the real robots."""
    reason = machine_folder_problem()
    return f". Real robots that another user drives cannot be seen: {reason}" if reason else ""
