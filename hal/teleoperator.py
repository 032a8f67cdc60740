"""The interface of an input device that is attached to the robot's own computer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from hal.spec import Array


@dataclass(frozen=True)
class TeleopInput:
    """What a person's hand says now.

    Attributes:
        twist: float32 (k,), each element in [-1, 1]: the share of the action's range, one element an action element. Of
            a joint that is moved by targets, the share of its greatest speed.
        engaged: False while the person's hand is off the device (dead-man switch): the robot holds.
        target: float32 (k,), the action itself in the spec's units, from a device that has the robot's own joints (a
            leader arm); it stands instead of `twist`.
    """

    twist: Array
    engaged: bool
    target: Array | None = None


class Teleoperator(ABC):
    """One input device. One thread calls it."""

    @abstractmethod
    def connect(self) -> None:
        """Opens the device. Raises HardwareLost when it is not there."""

    @abstractmethod
    def read(self) -> TeleopInput:
        """The newest input, without waiting. Raises HardwareLost."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the device. Calling it twice is harmless."""
