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
    """How firmly a robot is stopped: HOLD keeps the pose actively; SAFE is the safe stop that its spec documents."""

    HOLD = "hold"
    SAFE = "safe"


@dataclass(frozen=True)
class Observation:
    """What was sensed at one instant.

    Attributes:
        arrays: feature name to array, as the spec says; a camera's frame is there only when it is a new one.
        t_capture_ns: ``time.monotonic_ns()`` at capture, on the robot's computer.
    """

    arrays: Mapping[str, Array]
    t_capture_ns: int


def _no_op() -> None:
    """Nobody wants anything of a robot that moves by itself."""


class Robot(ABC):
    """One robot. The driver process alone calls it, from one thread.

    A robot makes no safety decisions: the safety kernel stands before `command`. It reports what it did.

    Attributes:
        spec: known before `connect` and constant afterwards.
        check_stop: the driver process sets it. A motion that takes longer than a control period, such as the way home
            at a reset, calls it in each one, from the thread that it was called in. It raises EmergencyStopped once the
            e-stop was pressed (the robot has been told to stop then), and HalError where the driver process is to end:
            the motion is then given up. So does a `connect` that waits for its device.
    """

    spec: RobotSpec
    check_stop: Callable[[], None] = staticmethod(_no_op)

    @abstractmethod
    def connect(self) -> None:
        """Opens the device and holds its present pose. Blocks; calling it twice is harmless.

        Raises:
            HardwareLost: the device does not answer; the message says where it was sought.
            EmergencyStopped: a stop button of the robot's own is pressed; nothing moves, the e-stop latches.
        """

    @abstractmethod
    def observe(self) -> Observation:
        """The newest reading, without waiting for a newer one.

        Raises:
            HardwareLost: the link broke.
            StaleObservation: the newest reading is older than ``spec.limits.stale_after_s``.
        """

    @abstractmethod
    def command(self, action: Array) -> Array:
        """Starts one control period with `action` and returns the action that was applied (the hardware may clip).

        A simulated robot advances its world by one period before it returns.

        Raises:
            SpecError: the action does not fit the spec; nothing was commanded.
            EmergencyStopped: a stop button of the robot's own is pressed; nothing was commanded, the e-stop latches.
            HardwareLost: the link broke.
        """

    @abstractmethod
    def stop(self, level: StopLevel) -> None:
        """Holds or safe-stops for one control period. Allowed at any time after `connect`; may be repeated."""

    @abstractmethod
    def close(self) -> None:
        """Safe-stops and lets go of the device. Calling it twice is harmless."""

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
