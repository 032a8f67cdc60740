"""What people order of robots, on its way to the audit log: one entry an order, with the robot's answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hal.audit import Audit
from user_sys.messages import OperatorCommand, OperatorReply, RobotStatus

ANSWER_S = 5.0
MAX_PENDING = 1024
DONE = "done"

MAX_PRESSES = 256

_Key = tuple[str, str, str, int]  # robot, person, order, press of the e-stop


class OrderAudit:
    """Any thread may call it. A person's ``drive`` inputs are no orders here: taking over and handing back are.

    The repeats of one press of the e-stop are one order, with an entry for each new outcome.
    """

    def __init__(self, audit: Audit, clock: Callable[[], float] = time.monotonic) -> None:
        self._audit, self._clock = audit, clock
        self._lock = threading.Lock()
        self._pending: dict[_Key, tuple[float, str]] = {}  # since when, and from which address
        self._presses: dict[_Key, str] = {}  # the last outcome
        self._authority: dict[str, tuple[str, str]] = {}

    def given(self, order: OperatorCommand, address: str) -> None:
        """An order came from a console at `address`, which may name the person's own."""
        if order.order == "drive":
            return
        key, address = (order.robot, order.operator, order.order, order.press), order.address or address
        with self._lock:
            if follows := len(self._pending) < MAX_PENDING:
                self._pending.setdefault(key, (self._clock(), address))
        if not follows:
            self._write(key, address, "passed on")

    def answered(self, reply: OperatorReply) -> None:
        """A robot accepted or refused an order."""
        key = (reply.robot, reply.operator, reply.order, reply.press)
        if reply.order != "drive":
            with self._lock:
                _, address = self._pending.pop(key, (0.0, ""))
            self._write(key, address, DONE if reply.accepted else f"refused: {reply.reason}")

    def reported(self, status: RobotStatus) -> None:
        """Audits a change of who drives a robot, or stopped it, also by a device or program beside the robot."""
        now = (status.authority, status.operator)
        if now == self._authority.get(status.robot, ("policy", "")):
            return
        self._authority[status.robot] = now
        self._audit("authority", robot=status.robot, person=status.operator, order=status.authority)

    def expire(self) -> None:
        """Audits the orders that no robot has answered within `ANSWER_S`."""
        now = self._clock()
        with self._lock:
            late = {key: address for key, (since_s, address) in self._pending.items() if now - since_s > ANSWER_S}
            for key in late:
                del self._pending[key]
        for key, address in late.items():
            self._write(key, address, f"no answer within {ANSWER_S:g} s")

    def _write(self, key: _Key, address: str, outcome: str) -> None:
        robot, person, order, press = key
        if press:
            with self._lock:
                before, self._presses[key] = self._presses.get(key), outcome
                if len(self._presses) > MAX_PRESSES:
                    del self._presses[next(iter(self._presses))]
            if before == outcome:
                return
        self._audit("order", robot=robot, person=person, address=address, order=order, outcome=outcome)
