"""The interface of a camera."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hal.robot import no_op
from hal.spec import Array, CameraSpec

JPEG_QUALITY = 90
CAPTURE_LATENCY_S = 0.1  # from capture to `Camera.read`: exposure, transfer, decoding


def default_stale_after_s(rate_hz: float) -> float:
    """The default of a camera's ``stale_after_s``: two frames may be missing."""
    return 3 / rate_hz + CAPTURE_LATENCY_S


@dataclass(frozen=True)
class CameraFrame:
    """One image: `image` is uint8 (height, width, 3) RGB; `t_capture_ns` is ``time.monotonic_ns()`` at capture."""

    image: Array
    t_capture_ns: int

    @cached_property
    def jpeg(self) -> bytes:
        """The image as a JPEG file. It is encoded once, for the store and for all who watch. Thread-safe."""
        import simplejpeg  # a robot without cameras does not install it

        return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(self.image), quality=JPEG_QUALITY, colorspace="RGB"))


class Camera(ABC):
    """One camera; `spec` is known before `connect`. One thread calls it.

    Attributes:
        real_time: set before `connect` if the caller reads in real time: `read` then takes a small part of a control
            period. A simulated camera then returns an older image while it draws.
        check_stop: `connect` calls it repeatedly while it waits; an error that it raises ends the wait.
    """

    spec: CameraSpec
    real_time: bool = False
    check_stop: Callable[[], None] = staticmethod(no_op)

    def preload(self) -> None:
        """Imports what `connect` requires. Called before the robot is connected, since an import may block all threads
        for longer than a robot's watchdog allows. `connect` reports missing libraries."""
        return None

    @abstractmethod
    def connect(self) -> None:
        """Opens the device. Raises HardwareLost if it does not answer."""

    @abstractmethod
    def read(self) -> CameraFrame:
        """The newest frame, without waiting for the next. Raises HardwareLost or StaleObservation."""

    @abstractmethod
    def close(self) -> None:
        """Releases the device. Calling it twice is harmless."""
