"""``user-sys stop`` and ``user-sys rearm``: the e-stop of this computer's robots, for any program that drives them."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from hal.audit import audit_operator_action
from hal.estop import EstopLatch
from hal.lease import MachineLock, driven_robots
from hal.machine_folder import RobotFiles, known_robot_files, machine_folder_problem, require_robot_name, robot_files
from hal.registry import operator_name
from user_sys.edge.local_estop import press_estop
from user_sys.errors import RunError

MAX_PARALLEL = 16
MAX_PERSON_CHARS = 64

log = logging.getLogger(__name__)


def stop_main(args: Namespace) -> int:
    """``user-sys stop [ROBOT ...]``. Without names it stops every real robot that is driven on this computer, and this
    user's simulated robots.

    Returns:
        0 if each robot is stopped, or is not driven and stays stopped. 1 if a robot is not stopped, does not answer or
        is unknown; or if no robot is named and none is driven.
    """
    for name in args.robots:
        require_robot_name(name)
    driven, console, errors = driven_robots(), Console(), Console(stderr=True)
    selected, unknown = _select_robots(args.robots, driven)
    by = operator_name(args.by)[:MAX_PERSON_CHARS]
    failed = bool(unknown) or not selected
    with ThreadPoolExecutor(min(len(selected), MAX_PARALLEL) or 1) as pool:
        for files, pending in [(files, pool.submit(press_estop, files, by, args.reason)) for files in selected]:
            result = pending.result()
            failed |= not result.ok
            _print(console if result.ok else errors, f"{_title(files)}: {result.text}")
            audit_operator_action(by, "e-stop", result.text, robot=files.name, reason=args.reason)
    listed = ", ".join(map(_title, driven)) or "none"
    for name in unknown:
        text = f"NOT STOPPED: no robot of this name is known on this computer. Driven here: {listed}"
        _print(errors, f"{name}: {text}{_visibility_warning()}")
        audit_operator_action(by, "e-stop", "refused: not known on this computer", robot=name, reason=args.reason)
    if not args.robots and not selected:
        others = f" by this user; driven by others: {listed}" if driven else ""
        _print(errors, f"no robot is driven on this computer{others}. Nothing was stopped{_visibility_warning()}")
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


def rearm_main(args: Namespace) -> int:
    """``user-sys rearm ROBOT``: releases the e-stop of a real robot that no program drives.

    Raises:
        RunError: a program drives it, so its console re-arms it; or no e-stop is latched.
        HalError, OSError: the latch cannot be written.
    """
    files = robot_files(args.robot, simulated=False)
    latch = EstopLatch(files.latch_path)
    with MachineLock(files.lock_path, "user-sys rearm", args.robot):
        if (latched := latch.read()) is None:
            raise RunError(f"{args.robot}: no e-stop is latched on this computer")
        if not latch.clear(latched):
            raise RunError(f"{args.robot}: the e-stop was pressed again just now, and stands")
    by = operator_name(args.by)[:MAX_PERSON_CHARS]
    log.warning("estop.rearmed robot=%s by=%s; it was pressed by %s", args.robot, by, latched.by)
    audit_operator_action(by, "re-arm", robot=args.robot)
    _print(Console(), f"{args.robot}: re-armed by {by}; it was stopped by {latched.by}: {latched.why}")
    return 0


def _title(files: RobotFiles) -> str:
    return files.name if files.uid is None else f"{files.name} (simulated by user {files.uid})"


def _visibility_warning() -> str:
    """A warning if this user cannot see the real robots."""
    reason = machine_folder_problem()
    return f". Real robots that another user drives cannot be seen: {reason}" if reason else ""


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
