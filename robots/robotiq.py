"""A Robotiq gripper on the controller's tool connector, by the text protocol of its URCap (port 63352).

The gripper is never activated here: that moves its fingers. The URCap does it at the pendant.
"""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import dataclass

from hal.errors import HardwareLost

PORT = 63352
RESPONSE_TIMEOUT_S = 1.0
POLL_INTERVAL_S = 0.03
CLOSED = 255  # the register's value; 0 is open
ACTIVE = 3  # of the register STA

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RobotiqConfig:
    """Attributes: `stroke_m` is the width when open: 0.085 of a 2F-85, 0.140 of a 2F-140. `speed` and `force` are 0 to
    255, the gripper's own."""

    stroke_m: float = 0.085
    speed: int = 128
    force: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.stroke_m < 1:
            raise ValueError(f"a gripper that is {self.stroke_m:g} m wide when open is none")
        if not (0 <= self.speed <= 255 and 0 <= self.force <= 255):
            raise ValueError(f"a gripper's speed and force are 0 to 255, not {self.speed} and {self.force}")


class RobotiqGripper:
    """One gripper. A thread talks to it; the newest target wins. Readings are a few hundredths of a second old."""

    def __init__(self, host: str, config: RobotiqConfig) -> None:
        self._host, self._config = host, config
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._position = 0
        self._target: int | None = None
        self._lost = ""

    def connect(self) -> None:
        """Opens the connection; nothing moves. Raises HardwareLost, also where the gripper is not activated."""
        self._lost, self._target = "", None
        self._ending.clear()
        try:
            self._socket = socket.create_connection((self._host, PORT), RESPONSE_TIMEOUT_S)
            self._socket.settimeout(RESPONSE_TIMEOUT_S)
            if self._get("STA") != ACTIVE:
                raise HardwareLost(f"{self._where}: it is not activated; a person does that at the pendant")
            for name, value in (("SPE", self._config.speed), ("FOR", self._config.force)):
                self._set(name, value)
            self._position = self._get("POS")
        except (OSError, ValueError) as error:
            raise HardwareLost(f"{self._where}: {error}") from error
        self._thread = threading.Thread(target=self._run, name=f"robotiq {self._host}", daemon=True)
        self._thread.start()

    @property
    def width_m(self) -> float:
        """How far it was open at the last reading, m. Raises HardwareLost."""
        if self._lost or self._thread is None:
            raise HardwareLost(f"{self._where}: {self._lost or 'not connected'}")
        return self._config.stroke_m * (1 - self._position / CLOSED)

    def move_to_width(self, width_m: float) -> float:
        """Sends the fingers to a width; returns the one that was meant, as the gripper counts. Never waits."""
        share = min(max(width_m / self._config.stroke_m, 0.0), 1.0)
        self._target = round(CLOSED * (1 - share))
        return self._config.stroke_m * (1 - self._target / CLOSED)

    def close(self) -> None:
        """Lets go of the connection; the gripper keeps its grip. Calling it twice is harmless."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(2 * RESPONSE_TIMEOUT_S)
            self._thread = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def _where(self) -> str:
        return f"Robotiq gripper at {self._host}:{PORT}"

    def _run(self) -> None:
        sent: int | None = None
        try:
            while not self._ending.wait(POLL_INTERVAL_S):
                target = self._target
                if target is not None and target != sent:
                    self._set("POS", target)
                    self._set("GTO", 1)
                    sent = target
                self._position = self._get("POS")
                if self._get("STA") != ACTIVE:  # as after its power was cut: it takes orders, and does not move
                    raise ValueError("it is not activated any more; a person does that at the pendant")
        except (OSError, ValueError) as error:
            self._lost = str(error) or type(error).__name__
            log.warning("robotiq.lost host=%s %s", self._host, self._lost)

    def _set(self, name: str, value: int) -> None:
        answer = self._ask(f"SET {name} {value}")
        if answer != "ack":
            raise ValueError(f"SET {name} {value} was answered by {answer!r}")

    def _get(self, name: str) -> int:
        answer = self._ask(f"GET {name}")
        if not answer.startswith(name):
            raise ValueError(f"GET {name} was answered by {answer!r}")
        return int(answer.removeprefix(name))

    def _ask(self, request: str) -> str:
        if self._socket is None:
            raise ConnectionError("not connected")
        self._socket.sendall(request.encode() + b"\n")
        answer = ""
        while (
            not answer
        ):  # an answer is one segment, with an end of line or without: that depends on the URCap's version
            if not (received := self._socket.recv(64)):
                raise ConnectionError("it hung up")
            answer = received.decode("ascii").strip()
        return answer
