"""The e-stop of a robot on this computer, for any program that drives it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hal.errors import HalError
from hal.estop import EstopLatch, new_emergency_stop
from hal.lease import MachineLock, driver_process_of
from hal.machine_folder import RobotFiles, robot_files
from user_sys.messages import OperatorCommand, OperatorReply, PreviewRequest

ACKNOWLEDGE_TIMEOUT_S = 3.0  # a driver reads the latch in each control period, and more often while it is idle
LATCH_POLL_S = 0.005
MAX_CONFIRMED = 256
USE_HARDWARE_ESTOP = "press the robot's own e-stop"

log = logging.getLogger(__name__)

ConsoleMessage = OperatorCommand | PreviewRequest
Send = Callable[[ConsoleMessage], object]


@dataclass(frozen=True)
class PressResult:
    """The result of a press.

    Attributes:
        ok: the robot is stopped, or no program drives it and it stays stopped.
        text: the result for a person.
    """

    ok: bool
    text: str


def press_estop(files: RobotFiles, person: str, reason: str = "") -> PressResult:
    """Presses the e-stop of a robot that any program and user of this computer drives.

    The program that drives it reads the latch within a control period, stops the robot and acknowledges. The next
    program reads the latch too. Blocks for the acknowledgement, `ACKNOWLEDGE_TIMEOUT_S` at most.
    """
    latch, lock = EstopLatch(files.latch_path), MachineLock(files.lock_path)
    owner = lock.owner()
    try:
        pressed = latch.press(new_emergency_stop(person, reason or "pressed by another program than the driver"))
    except (OSError, HalError) as error:
        return PressResult(False, f"THE E-STOP COULD NOT BE PRESSED ({error}): {USE_HARDWARE_ESTOP}")
    until_s = time.monotonic() + ACKNOWLEDGE_TIMEOUT_S
    while owner and time.monotonic() < until_s:
        latched = latch.read()
        if latched is None:
            return PressResult(False, "a person at a console has re-armed the robot since")
        if latched.is_same_press(pressed) and latched.acknowledged:
            return PressResult(True, f"stopped; its driver acknowledged ({latched.acknowledged}); driven by {owner}")
        if latched.presses > pressed.presses:
            pressed = latched  # another person pressed too
        time.sleep(LATCH_POLL_S)
    if lock.is_held():
        waited = f"NO ANSWER within {ACKNOWLEDGE_TIMEOUT_S:g} s from {owner or lock.owner()}, which drives it"
        return PressResult(False, f"{waited}: {USE_HARDWARE_ESTOP}. The e-stop is latched for its next start")
    ended = f"{owner} drove it and has ended" if owner else "no program of this computer drives it"
    if files.uid is not None:
        return PressResult(True, f"{ended}; a simulated robot keeps no e-stop for its next start")
    return PressResult(True, f"{ended}; the e-stop is latched for its next start, until a person re-arms it")


def with_local_estop(send: Send, owned: Mapping[str, str], on_reply: Callable[[OperatorReply], object]) -> Send:
    """Wraps `send`, which sends operators' commands to sessions.

    A program outside the run, such as an evaluation, may drive one of the run's robots on this computer. No session
    receives an e-stop for such a robot, so it is pressed locally too.

    Args:
        owned: the run's real robots, and the end of the lock's owner (`MachineLock.owner`) if the run drives one.
        on_reply: called in another thread with the result of a local press.
    """
    in_progress: set[str] = set()  # robots: the page repeats a press until it is confirmed
    confirmed: deque[tuple[str, int]] = deque(maxlen=MAX_CONFIRMED)

    def press_locally(command: OperatorCommand) -> None:
        result = press_estop(robot_files(command.robot, simulated=False), command.operator)
        if result.ok and command.press:
            confirmed.append((command.robot, command.press))
        in_progress.discard(command.robot)
        on_reply(command.reply(accepted=result.ok, reason=result.text))

    def send_and_press(message: ConsoleMessage) -> object:
        sent = send(message)
        if not isinstance(message, OperatorCommand) or message.order != "e-stop" or message.robot not in owned:
            return sent
        robot, key = message.robot, (message.robot, message.press)
        owner = driver_process_of(robot)
        if owner and not owner.endswith(owned[robot]) and robot not in in_progress and key not in confirmed:
            in_progress.add(robot)
            log.warning("e-stop.local robot=%s by=%s driven by %s", robot, message.operator, owner)
            threading.Thread(target=press_locally, args=(message,), name=f"e-stop {robot}", daemon=True).start()
        return sent

    return send_and_press
