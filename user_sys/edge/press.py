"""``user-sys stop``: the e-stop, pressed beside whatever program of this computer drives a robot."""

from __future__ import annotations

import logging
import socket
import threading
from argparse import Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from hal.errors import HalError
from hal.lease import MachineLock, driven, runtime_folder
from hal.safety import latch_emergency
from hal.standing import who_orders
from user_sys.edge.driver_client import RemoteDriver
from user_sys.edge.driver_wire import endpoint, shared_latch
from user_sys.errors import RunError
from user_sys.messages import OperatorCommand, WatchRequest

MAX_AT_ONCE = 16
MAX_NAME_CHARS = 64

log = logging.getLogger(__name__)

Ordered = OperatorCommand | WatchRequest
Send = Callable[[Ordered], object]


def press(robot: str, person: str, why: str = "") -> None:
    """Presses the e-stop of `robot`, whatever program of this computer drives it.

    A driver process hears of it over its socket and has stopped the robot when this returns. Any other program that
    drives a real robot finds the latch within a control period, as does whoever drives it next. It blocks for some
    seconds where a driver process hangs.

    Raises:
        OSError: the latch cannot be written.
    """
    if _listens(robot):
        try:
            with RemoteDriver(robot) as driver:
                driver.emergency_stop(person)
                return
        except HalError as error:  # it has just ended, or hangs: the latch is for its successor
            log.warning("e-stop.undelivered %s", error)
    latch = shared_latch(robot, simulated=False)
    assert latch is not None  # a real robot has one
    if not latch.exists():
        runtime_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        latch_emergency(latch, person, why or "pressed beside the program that drove the robot")


def pressing_aside(send: Send, ours: Mapping[str, str]) -> Send:
    """`send`, which passes on what people order at a console, and presses each e-stop aside where no session hears it:
    where a program of this computer drives the robot that is none of the run's, as an evaluation.

    Args:
        ours: the run's real robots, and who has the lock of one (`hal.lease.MachineLock`) that its own driver drives.
    """

    def order(message: Ordered) -> object:
        sent = send(message)
        if isinstance(message, OperatorCommand) and message.order == "e-stop" and message.robot in ours:
            _press_aside(message.robot, message.operator, ours[message.robot])
        return sent

    return order


def _press_aside(robot: str, person: str, ours: str) -> None:
    owner = MachineLock(robot).owner()
    if owner and not owner.endswith(ours):
        log.warning("e-stop.aside robot=%s by=%s driven by %s", robot, person, owner)
        threading.Thread(target=press, args=(robot, person), name=f"e-stop {robot}", daemon=True).start()


def stop_main(args: Namespace) -> int:
    """``user-sys stop [ROBOT ...]``: without names, every robot that is driven on this computer.

    Raises:
        RunError: nothing is driven here, and no robot is named.
    """
    robots = sorted(set(args.robots) or driven())
    if not robots:
        raise RunError(
            f"no robot is driven by a program of this computer that has its locks in {runtime_folder()}; "
            "to keep the next one from driving a robot, name that"
        )
    others = f"; driven here: {', '.join(here)}" if (here := sorted(driven())) else ""
    owners = {robot: MachineLock(robot).owner() or f"nobody on this computer{others}" for robot in robots}
    by = who_orders(args.by)[:MAX_NAME_CHARS]
    console = Console()
    with ThreadPoolExecutor(min(len(robots), MAX_AT_ONCE)) as pool:
        for robot, done in [(robot, pool.submit(press, robot, by, args.reason)) for robot in robots]:
            done.result()
            line = f"{robot}: the e-stop is pressed; driven by {owners[robot]}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def _listens(robot: str) -> bool:
    """Whether a driver process has its socket open; one that was killed leaves the file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(1.0)
        try:
            caller.connect(endpoint(robot).removeprefix("ipc://"))
        except OSError:
            return False
    return True
