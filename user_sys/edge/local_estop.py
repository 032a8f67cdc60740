"""The e-stop of a robot on this computer, for any program that drives it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping
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
ELSEWHERE = "the run's {} may be on another computer and has not confirmed; the one of that name here"

log = logging.getLogger(__name__)

ConsoleMessage = OperatorCommand | PreviewRequest
Send = Callable[[ConsoleMessage], object]


@dataclass(frozen=True)
class PressResult:
    """The result of a press.

    Attributes:
        ok: the robot is stopped, or no program drives it and it stays stopped.
        text: the result for a person.
        driven: a program of this computer drove the robot at the press.
    """

    ok: bool
    text: str
    driven: bool = True


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
        return PressResult(True, f"{ended}; a simulated robot keeps no e-stop for its next start", bool(owner))
    text = f"{ended}; the e-stop is latched for its next start, until a person re-arms it"
    return PressResult(True, text, bool(owner))


class LocalEstops:
    """Presses the e-stops of robots on this computer, for the pages of a console. One thread calls it; nothing blocks.

    A page repeats a press until it is confirmed. Only a program that drove the robot confirms it. A repeat of a
    confirmed press does not stop the robot again, so one that arrives after a re-arm does nothing.
    """

    def __init__(self, on_reply: Callable[[OperatorReply], object], simulated: Container[str]) -> None:
        """Args:
        on_reply: called with the result of a press, in its own thread.
        simulated: names of the robots that are simulated.
        """
        self._on_reply, self._simulated = on_reply, simulated
        self._in_progress: set[str] = set()  # robots
        self._confirmed: deque[tuple[str, int]] = deque(maxlen=MAX_CONFIRMED)

    def confirms(self, command: OperatorCommand) -> bool:
        """Whether the press was confirmed before. It is then confirmed again."""
        if (command.robot, command.press) not in self._confirmed:
            return False
        self._on_reply(command.reply(accepted=True))
        return True

    def press(self, command: OperatorCommand, caveat: str = "") -> None:
        """Presses the e-stop in a thread, unless a press of the robot is in progress.

        Args:
            caveat: why this press does not confirm the command: the robot may be another one of the name.
        """
        if command.robot not in self._in_progress:
            self._in_progress.add(command.robot)
            log.warning("e-stop.local robot=%s by=%s", command.robot, command.operator)
            threading.Thread(target=self._press, args=(command, caveat), name=f"e-stop {command.robot}").start()

    def _press(self, command: OperatorCommand, caveat: str) -> None:
        try:
            files = robot_files(command.robot, simulated=command.robot in self._simulated)
            result = press_estop(files, command.operator, "pressed at a console of its computer")
            is_confirmed = result.ok and result.driven and not caveat
            if is_confirmed and command.press:
                self._confirmed.append((command.robot, command.press))
        finally:
            self._in_progress.discard(command.robot)
        reason = f"{caveat}: {result.text}" if caveat else result.text
        self._on_reply(command.reply(accepted=is_confirmed, reason=reason))


def with_local_estop(
    send: Send,
    owned: Mapping[str, str],
    on_reply: Callable[[OperatorReply], object],
    simulated: Container[str] = (),
    elsewhere: Container[str] = (),
) -> Send:
    """Wraps `send`, which sends operators' commands to sessions.

    An e-stop is sent until the program that drives the robot has confirmed it. It is pressed locally too if a program
    of this computer drives the robot, and either no gateway takes the e-stop, or the program is outside the run, such
    as an evaluation: then no session receives it.

    Args:
        owned: the run's robots, and the end of the lock's owner (`MachineLock.owner`) if the run drives one.
        on_reply: called with the result of a local press, in another thread.
        simulated: those of `owned` that are simulated. A program outside the run simulates another robot of the name.
        elsewhere: those of `owned` that may be on another computer. A program outside the run may drive another robot
            of the name, so its stop confirms nothing.
    """
    estops = LocalEstops(on_reply, simulated)

    def send_and_press(message: ConsoleMessage) -> object:
        if not isinstance(message, OperatorCommand) or message.order != "e-stop" or message.robot not in owned:
            return send(message)
        if estops.confirms(message):
            return True
        robot, is_simulated = message.robot, message.robot in simulated
        sent, owner = send(message), driver_process_of(robot, simulated=is_simulated)
        is_outside = not owner.endswith(owned[robot])
        if not owner or (is_simulated if is_outside else sent is not False):
            return sent
        estops.press(message, ELSEWHERE.format(robot) if is_outside and robot in elsewhere else "")
        return True

    return send_and_press
