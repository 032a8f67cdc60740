"""The interface of a camera."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from hal.spec import Array, CameraSpec

CAPTURE_LATENCY_S = 0.1  # what a picture may take from its capture until it is here: exposure, transfer, decoding


def default_stale_after_s(rate_hz: float) -> float:
    """How old the newest picture of a camera of this rate may be where nobody says it: two may be missing."""
    return 3 / rate_hz + CAPTURE_LATENCY_S


@dataclass(frozen=True)
class CameraFrame:
    """One picture: `image` is uint8 (height, width, 3) RGB; `t_capture_ns` is ``time.monotonic_ns()`` at capture."""

    image: Array
    t_capture_ns: int


def _no_op() -> None:
    """Nobody wants anything while a camera is waited for."""


class Camera(ABC):
    """One camera; `spec` is known before `connect`. One thread calls it.

    Attributes:
        real_time: set before `connect` by who reads it in real time: `read` is to take little of a control period then.
            Devices take their pictures by themselves anyway; a simulated camera has another thread draw them.
        check_stop: a `connect` that waits calls it all the while; what it raises ends the waiting.
    """

    spec: CameraSpec
    real_time: bool = False
    check_stop: Callable[[], None] = staticmethod(_no_op)

    def preload(self) -> None:
        """Imports what `connect` needs. Called before the robot is connected: an import may keep all threads of the
        process for longer than a robot's watchdog allows. What is missing is told by `connect`."""
        return None

    @abstractmethod
    def connect(self) -> None:
        """Opens the device. Raises HardwareLost when it is not there."""

    @abstractmethod
    def read(self) -> CameraFrame:
        """The newest frame, without waiting for the next. Raises HardwareLost or StaleObservation."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the device. Calling it twice is harmless."""
