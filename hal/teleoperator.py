"""The interface of an input device that is attached to the robot's own computer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from hal.robot import no_op
from hal.spec import Array


@dataclass(frozen=True)
class TeleopInput:
    """One reading of an input device.

    Attributes:
        twist: float32 (k,), each element in [-1, 1]: the share of the action's range, one element for each action
            element. Of a motion, the share of its greatest reduced speed, see ``SafetyLimits.reduced_speed``.
        engaged: False if the dead-man switch is released: the robot holds.
        target: float32 (k,), an action in the spec's units, from a device with the robot's own joints (a leader arm);
            replaces `twist`.
        hands_back: the person gives the robot back to the policy; the other fields have no effect.
    """

    twist: Array
    engaged: bool
    target: Array | None = None
    hands_back: bool = False


class Teleoperator(ABC):
    """One input device. One thread calls it.

    Attributes:
        check_stop: a `connect` that waits calls it repeatedly; an error that it raises ends the wait.
        release_s: for so long it is not engaged, in seconds, before a hand has surely let go of it.
    """

    check_stop: Callable[[], None] = staticmethod(no_op)
    release_s: float = 0.0

    @abstractmethod
    def connect(self) -> None:
        """Opens the device, also again after a loss and `close`. Raises HardwareLost if it does not answer."""

    @abstractmethod
    def read(self) -> TeleopInput:
        """The newest input, without waiting. Raises HardwareLost."""

    @abstractmethod
    def close(self) -> None:
        """Releases the device. Calling it twice is harmless."""
