"""A Robotiq gripper on a UR controller's tool connector, by the text protocol of its URCap (port 63352).

The driver never activates the gripper, because that moves its fingers. A person activates it at the pendant.
"""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from hal.errors import HardwareLost

PORT = 63352
RESPONSE_TIMEOUT_S = 1.0
POLL_INTERVAL_S = 0.03
CLOSED = 255  # register value; 0 is open
ACTIVE = 3  # of the register STA

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RobotiqConfig:
    """Attributes: `stroke_m` is the open width: 0.085 for a 2F-85, 0.140 for a 2F-140. `speed` and `force` are the
    gripper's units, 0 to 255."""

    stroke_m: Annotated[float, Meta(gt=0, lt=1)] = 0.085
    speed: Annotated[int, Meta(ge=0, le=255)] = 128
    force: Annotated[int, Meta(ge=0, le=255)] = 64


class RobotiqGripper:
    """One gripper and the thread that communicates with it. The newest target wins. Readings are about 0.05 s old."""

    def __init__(self, host: str, config: RobotiqConfig) -> None:
        self._host, self._config = host, config
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._position = 0
        self._target: int | None = None
        self._lost = ""

    def connect(self) -> None:
        """Open the connection without motion. Raises HardwareLost, also if the gripper is not activated."""
        self._lost, self._target = "", None
        self._closing.clear()
        try:
            self._socket = socket.create_connection((self._host, PORT), RESPONSE_TIMEOUT_S)
            self._socket.settimeout(RESPONSE_TIMEOUT_S)
            if self._get("STA") != ACTIVE:
                raise HardwareLost(f"{self._name}: it is not activated; a person must activate it at the pendant")
            for name, value in (("SPE", self._config.speed), ("FOR", self._config.force)):
                self._set(name, value)
            self._position = self._get("POS")
        except (OSError, ValueError) as error:
            raise HardwareLost(f"{self._name}: {error}") from error
        self._thread = threading.Thread(target=self._run, name=f"robotiq {self._host}", daemon=True)
        self._thread.start()

    @property
    def width_m(self) -> float:
        """The width at the last reading, m. Raises HardwareLost."""
        if self._lost or self._thread is None:
            raise HardwareLost(f"{self._name}: {self._lost or 'not connected'}")
        return self._config.stroke_m * (1 - self._position / CLOSED)

    def move_to_width(self, width_m: float) -> float:
        """Set the target width; returns it rounded to the gripper's resolution. Never blocks."""
        share = min(max(width_m / self._config.stroke_m, 0.0), 1.0)
        self._target = round(CLOSED * (1 - share))
        return self._config.stroke_m * (1 - self._target / CLOSED)

    def close(self) -> None:
        """Close the connection; the gripper keeps its grip. May be called twice."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(2 * RESPONSE_TIMEOUT_S)
            self._thread = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def _name(self) -> str:
        return f"Robotiq gripper at {self._host}:{PORT}"

    def _run(self) -> None:
        sent: int | None = None
        try:
            while not self._closing.wait(POLL_INTERVAL_S):
                target = self._target
                if target is not None and target != sent:
                    self._set("POS", target)
                    self._set("GTO", 1)
                    sent = target
                self._position = self._get("POS")
                if self._get("STA") != ACTIVE:  # e.g. after a power cut: it accepts commands and does not move
                    raise ValueError("it is no longer activated; a person must activate it at the pendant")
        except (OSError, ValueError) as error:
            self._lost = str(error) or type(error).__name__
            log.warning("robotiq.lost host=%s %s", self._host, self._lost)

    def _set(self, name: str, value: int) -> None:
        response = self._request(f"SET {name} {value}")
        if response != "ack":
            raise ValueError(f"SET {name} {value} was answered by {response!r}")

    def _get(self, name: str) -> int:
        response = self._request(f"GET {name}")
        if not response.startswith(name):
            raise ValueError(f"GET {name} was answered by {response!r}")
        return int(response.removeprefix(name))

    def _request(self, request: str) -> str:
        if self._socket is None:
            raise ConnectionError("not connected")
        self._socket.sendall(request.encode() + b"\n")
        response = ""
        while not response:  # a response is one segment, with or without a line end, depending on the URCap's version
            if not (received := self._socket.recv(64)):
                raise ConnectionError("it closed the connection")
            response = received.decode("ascii").strip()
        return response
