"""The interface that every robot driver implements."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from hal.spec import Array, RobotSpec


class StopLevel(enum.Enum):
    """How firmly a robot is stopped: HOLD actively keeps the pose; SAFE is the safe stop that its spec documents."""

    HOLD = "hold"
    SAFE = "safe"


@dataclass(frozen=True)
class Observation:
    """The sensor readings of one instant.

    Attributes:
        arrays: feature name to array, as in the spec; a camera's feature is present only with a new frame.
        t_capture_ns: ``time.monotonic_ns()`` at capture, on the robot's computer.
    """

    arrays: Mapping[str, Array]
    t_capture_ns: int


def no_op() -> None:
    """Default for a `check_stop`: never interrupts."""


class Robot(ABC):
    """One robot. Only the driver process calls it, from one thread.

    A robot makes no safety decisions: the safety kernel filters each action before `command`. The robot reports the
    action that it applied.

    Attributes:
        spec: known before `connect` and constant afterwards.
        check_stop: the driver process sets it. A motion that takes longer than a control period (homing at a reset)
            calls it in each period, from the thread that called the motion; so does a `connect` or a `command` that
            waits for its device, at last after the wait. It raises EmergencyStopped if the e-stop is pressed (it has
            stopped the robot by then), and HalError if the driver process ends. Either error ends the motion.
    """

    spec: RobotSpec
    check_stop: Callable[[], None] = staticmethod(no_op)

    @abstractmethod
    def connect(self) -> None:
        """Opens the device and holds its present pose. Blocks; calling it twice is harmless.

        Raises:
            HardwareLost: the device does not answer; the message has its address.
            EmergencyStopped, StoppedAtRobot: the robot's own stop button is pressed; nothing moves, the e-stop latches.
        """

    @abstractmethod
    def observe(self) -> Observation:
        """The newest reading, without waiting for a newer one.

        Raises:
            HardwareLost: the connection broke. StoppedAtRobot if a person stopped the robot at the robot itself.
            StaleObservation: the newest reading is older than ``spec.limits.stale_after_s``.
        """

    @abstractmethod
    def command(self, action: Array) -> Array:
        """Starts one control period with `action` and returns the applied action, which the hardware may have clipped.

        A simulated robot advances its world by one period before it returns.

        Raises:
            SpecError: the action does not fit the spec; nothing was commanded.
            EmergencyStopped: the robot's own stop button is pressed, or `check_stop` raised it; nothing was commanded,
                the e-stop latches.
            HardwareLost: the connection broke. StoppedAtRobot if a person stopped the robot at the robot itself.
        """

    @abstractmethod
    def stop(self, level: StopLevel) -> None:
        """Holds or safe-stops for one control period. Allowed at any time after `connect`; may be repeated."""

    @abstractmethod
    def close(self) -> None:
        """Safe-stops and releases the device. Calling it twice is harmless."""

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
