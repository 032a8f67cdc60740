"""People's e-stops on their way through a session: from the tunnel to the robot's driver, and its confirmation back."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from hal.errors import HalError
from hal.latch import Latch, press
from user_sys.edge.driver_client import RemoteDriver
from user_sys.messages import OperatorCommand, OperatorReply
from user_sys.tunnel.client import TunnelClient

LISTEN_S = 0.25  # bounds how long `__exit__` waits; an e-stop ends the wait at once
RETRY_S = 0.05
MAX_CONFIRMED = 256
END_S = 10.0  # longer than the driver has to answer

log = logging.getLogger(__name__)


class EmergencyStops:
    """Carries e-stops to the driver in a thread of its own, on a channel and a local socket of their own.

    It runs from `__enter__` to `__exit__` and needs no lease. An e-stop that the driver has not confirmed is sent
    again until it is; a driver that is away finds it on the disk, even if this session has ended by then. A press that
    was confirmed is confirmed again without another stop, so a repeat that comes after a re-arm does nothing.

    Attributes:
        on_press: called with each new press before the driver is asked; must return at once.
    """

    def __init__(self, robot: str, client: TunnelClient, latch: Path) -> None:
        """`latch`: the file in which a driver that is away finds the e-stop at its start."""
        self.on_press: Callable[[OperatorCommand], object] = lambda press: None
        self._robot, self._client, self._latch = robot, client, latch
        self._turns = itertools.count(1)
        self._confirmed: deque[tuple[str, int]] = deque(maxlen=MAX_CONFIRMED)
        self._waiting: tuple[OperatorCommand, int] | None = None  # a press that the driver has not confirmed; its turn
        self._ending = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="e-stop", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ending.set()
        self._thread.join(END_S)

    def next_turn(self) -> int:
        """Numbers e-stops and re-arms in the order in which they came. See `driver_wire.Request`. Any thread."""
        return next(self._turns)

    def raise_failure(self) -> None:
        """Raises what ended the thread: without it no person could stop the robot."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        with RemoteDriver(self._robot) as driver:
            try:
                while not self._ending.is_set():
                    message = self._client.receive_stop(RETRY_S if self._waiting else LISTEN_S)
                    if isinstance(message, OperatorCommand):
                        self._take(driver, message)
                    elif self._waiting is not None:
                        self._stop(driver, *self._waiting)
            except Exception as error:  # of any kind: `raise_failure` tells
                log.exception("e-stop.failed")
                self._failure = error

    def _take(self, driver: RemoteDriver, press: OperatorCommand) -> None:
        if press.press and (press.operator, press.press) in self._confirmed:
            self._reply(press, accepted=True)
            return
        waiting = self._waiting
        repeated = waiting is not None and press.press and _key(waiting[0]) == _key(press)
        if waiting is not None and repeated:
            self._stop(driver, *waiting)
            return
        self.on_press(press)
        self._stop(driver, press, self.next_turn())

    def _stop(self, driver: RemoteDriver, press: OperatorCommand, turn: int) -> None:
        try:
            driver.emergency_stop(press.signed, turn)
        except HalError as error:
            first = self._waiting is None or _key(self._waiting[0]) != _key(press)
            self._waiting = press, turn
            if first:
                log.error("e-stop.undelivered %s; trying again", error)
                self._write_latch(press.signed)
            self._reply(press, accepted=False, reason=str(error))
            return
        self._waiting = None
        self._confirmed.append(_key(press))
        self._reply(press, accepted=True)

    def _write_latch(self, person: str) -> None:
        try:
            Latch(self._latch).press(press(person, "pressed while the robot was away"))
        except (OSError, HalError) as error:  # it is tried on while this session lives
            log.error("e-stop.not_persisted %s", error)

    def _reply(self, press: OperatorCommand, accepted: bool, reason: str = "") -> None:
        self._client.send(
            OperatorReply(
                robot=self._robot,
                operator=press.operator,
                order=press.order,
                accepted=accepted,
                reason=reason,
                press=press.press,
            )
        )


def _key(press: OperatorCommand) -> tuple[str, int]:
    return press.operator, press.press
