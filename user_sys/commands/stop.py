"""``user-sys stop`` and ``user-sys rearm``: the e-stop of this computer's robots, whatever program drives them."""

from __future__ import annotations

import logging
import os
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rich.console import Console

from hal.audit import audit_operator_action
from hal.errors import HalError
from hal.estop import EstopLatch, new_emergency_stop
from hal.lease import MachineLock, driven_robots, driver_process_of
from hal.machine_folder import RobotFiles, known_robot_files, machine_folder_problem, require_robot_name, robot_files
from hal.registry import operator_name
from user_sys.errors import RunError
from user_sys.messages import OperatorCommand, OperatorReply, PreviewRequest

ACKNOWLEDGE_TIMEOUT_S = 3.0  # a driver looks at the latch in each control period, and more often while it waits
LATCH_POLL_S = 0.005
MAX_PARALLEL = 16
MAX_CONFIRMED = 256
MAX_NAME_CHARS = 64
USE_HARDWARE_ESTOP = "press the robot's own e-stop"

log = logging.getLogger(__name__)

ConsoleMessage = OperatorCommand | PreviewRequest
Send = Callable[[ConsoleMessage], object]


@dataclass(frozen=True)
class PressResult:
    """What became of a press.

    Attributes:
        ok: the robot is stopped, or is not driven and stays stopped.
        text: that in words.
    """

    ok: bool
    text: str


def press_estop(place: RobotFiles, person: str, reason: str = "") -> PressResult:
    """Presses the e-stop of a robot, whatever program and user of this computer drives it.

    The program that drives it finds the latch within a control period, stops the robot and acknowledges; the next one
    finds the latch too. Blocks until then, for `ACKNOWLEDGE_TIMEOUT_S` at most.
    """
    latch, lock = EstopLatch(place.latch_path), MachineLock(place.lock_path)
    owner = lock.owner()
    try:
        mine = latch.press(new_emergency_stop(person, reason or "pressed beside the program that drove the robot"))
    except (OSError, HalError) as error:
        return PressResult(False, f"THE E-STOP COULD NOT BE PRESSED ({error}): {USE_HARDWARE_ESTOP}")
    until_s = time.monotonic() + ACKNOWLEDGE_TIMEOUT_S
    while owner and time.monotonic() < until_s:
        stands = latch.read()
        if stands is None:
            return PressResult(False, "the e-stop was lifted again by a person at a console")
        if stands.is_same_press(mine) and stands.acknowledged:
            return PressResult(True, f"stopped; its driver acknowledged ({stands.acknowledged}); driven by {owner}")
        if stands.presses > mine.presses:
            mine = stands  # another person pressed too
        time.sleep(LATCH_POLL_S)
    if lock.is_held():
        waited = f"NO ANSWER within {ACKNOWLEDGE_TIMEOUT_S:g} s from {owner or lock.owner()}, which drives it"
        return PressResult(False, f"{waited}: {USE_HARDWARE_ESTOP}. The e-stop is latched for its next start")
    ended = f"{owner} drove it and has ended" if owner else "no program of this computer drives it"
    if place.uid is not None:
        return PressResult(True, f"{ended}; a simulated robot keeps no e-stop for its next start")
    return PressResult(True, f"{ended}; the e-stop is latched for its next start, until a person re-arms it")


def with_local_estop(send: Send, owned: Mapping[str, str], on_reply: Callable[[OperatorReply], object]) -> Send:
    """`send`, which passes on what people order at a console, and presses each e-stop aside where no session hears it:
    where a program of this computer drives the robot that is none of the run's, as an evaluation.

    Args:
        ours: the run's real robots, and who has the lock of one (`hal.lease.MachineLock`) that its own driver drives.
        answer: is told, in another thread, what became of a press aside.
    """
    under_way: set[str] = set()  # robots: the page repeats a press until it is confirmed
    confirmed: deque[tuple[str, int]] = deque(maxlen=MAX_CONFIRMED)

    def press_aside(order: OperatorCommand) -> None:
        pressed = press_estop(robot_files(order.robot, simulated=False), order.operator)
        if pressed.ok and order.press:
            confirmed.append((order.robot, order.press))
        under_way.discard(order.robot)
        on_reply(
            OperatorReply(
                robot=order.robot,
                operator=order.operator,
                order=order.order,
                accepted=pressed.ok,
                reason=pressed.text,
                press=order.press,
            )
        )

    def order(message: ConsoleMessage) -> object:
        sent = send(message)
        if not isinstance(message, OperatorCommand) or message.order != "e-stop" or message.robot not in owned:
            return sent
        robot, key = message.robot, (message.robot, message.press)
        owner = driver_process_of(robot)
        if owner and not owner.endswith(owned[robot]) and robot not in under_way and key not in confirmed:
            under_way.add(robot)
            log.warning("e-stop.aside robot=%s by=%s driven by %s", robot, message.operator, owner)
            threading.Thread(target=press_aside, args=(message,), name=f"e-stop {robot}", daemon=True).start()
        return sent

    return order


def stop_main(args: Namespace) -> int:
    """``user-sys stop [ROBOT ...]``: without names, every real robot that is driven on this computer, and the simulated
    ones of this user.

    Returns:
        0: each robot is stopped, or is not driven and stays stopped. 1: one is not, has not answered, or is unknown;
        or nothing is driven, and no robot is named.
    """
    for name in args.robots:
        require_robot_name(name)
    here, console, errors = driven_robots(), Console(), Console(stderr=True)
    chosen, unknown = _select_robots(args.robots, here)
    by = operator_name(args.by)[:MAX_NAME_CHARS]
    failed = bool(unknown) or not chosen
    with ThreadPoolExecutor(min(len(chosen), MAX_PARALLEL) or 1) as pool:
        for place, answer in [(place, pool.submit(press_estop, place, by, args.reason)) for place in chosen]:
            pressed = answer.result()
            failed |= not pressed.ok
            _print(console if pressed.ok else errors, f"{_title(place)}: {pressed.text}")
            audit_operator_action(by, "e-stop", pressed.text, robot=place.name, reason=args.reason)
    listed = ", ".join(map(_title, here)) or "none"
    for name in unknown:
        text = f"NOT STOPPED: no robot of this name is known on this computer. Driven here: {listed}"
        _print(errors, f"{name}: {text}{_visibility_warning()}")
        audit_operator_action(by, "e-stop", "refused: not known on this computer", robot=name, reason=args.reason)
    if not args.robots and not chosen:
        others = f" by this user; driven by others: {listed}" if here else ""
        _print(errors, f"no robot is driven on this computer{others}. Nothing was stopped{_visibility_warning()}")
    return int(failed)


def _select_robots(names: Sequence[str], here: Sequence[RobotFiles]) -> tuple[list[RobotFiles], list[str]]:
    """The robots that are meant, and the names that are none's.

    A name means the real robot, and this user's simulated one that is driven; only without these another user's.
    """
    if not names:
        return [place for place in here if place.uid in (None, os.getuid())], []
    known = [place for place in known_robot_files() if place.uid is None and place.is_known]
    chosen: dict[RobotFiles, None] = {}
    unknown = []
    for name in dict.fromkeys(names):
        found = [place for place in dict.fromkeys([*known, *here]) if place.name == name]
        found = [place for place in found if place.uid in (None, os.getuid())] or found
        chosen.update(dict.fromkeys(found))
        if not found:
            unknown.append(name)
    return list(chosen), unknown


def rearm_main(args: Namespace) -> int:
    """``user-sys rearm ROBOT``: lifts the e-stop of a real robot that no program drives.

    Raises:
        RunError: it is driven, so that its console re-arms it; or nothing is latched.
        HalError, OSError: the latch cannot be written.
    """
    place = robot_files(args.robot, simulated=False)
    latch = EstopLatch(place.latch_path)
    with MachineLock(place.lock_path, "user-sys rearm", args.robot):
        if (stands := latch.read()) is None:
            raise RunError(f"{args.robot}: no e-stop is latched on this computer")
        if not latch.clear(stands):
            raise RunError(f"{args.robot}: the e-stop was pressed again just now, and stands")
    by = operator_name(args.by)[:MAX_NAME_CHARS]
    log.warning("estop.rearmed robot=%s by=%s; it was pressed by %s", args.robot, by, stands.by)
    audit_operator_action(by, "re-arm", robot=args.robot)
    _print(Console(), f"{args.robot}: re-armed by {by}; it was stopped by {stands.by}: {stands.why}")
    return 0


def _title(place: RobotFiles) -> str:
    return place.name if place.uid is None else f"{place.name} (simulated by user {place.uid})"


def _visibility_warning() -> str:
    """A warning if this user cannot see the real robots."""
    reason = machine_folder_problem()
    return f". Real robots that another user drives cannot be seen: {reason}" if reason else ""


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
