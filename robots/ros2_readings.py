"""Collect a ROS 2 robot's messages by joint name, with capture times on this computer's clock.

This module does not need ROS. Callbacks write on the node's thread; the driver reads on its own.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hal.spec import Array

StampClock = Literal["shared", "robot", "arrival"]
"""The meaning of a header's stamp.

``shared``: the clocks of the robot and this computer are synchronised, as ROS expects. ``robot``: another clock, such
as that of an unsynchronised computer or a real-time simulation; its offset is that of the fastest recent message.
``arrival``: the stamp is ignored, and the arrival time counts.
"""


MAX_AHEAD_NS = 50_000_000  # how far synchronised clocks may be apart
OFFSET_WINDOW_NS = 10_000_000_000  # clocks that differ by 1e-4 drift by 1 ms in this time


class CaptureTimes:
    """Converts one sender's stamps to times of ``time.monotonic_ns``. One thread calls it.

    Attributes:
        clock_error: the problem with the newest stamp, in words; empty if there is none.
    """

    def __init__(
        self,
        clock: StampClock,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._clock, self._monotonic_ns, self._wall_ns = clock, monotonic_ns, wall_ns
        self._offsets_ns: list[int] = []  # the least of the previous window, then of this one
        self._since_ns = 0
        self._last_ns = -1
        self.clock_error = ""

    def captured_ns(self, stamp_ns: int) -> int | None:
        """The capture time of a message that arrives now; never in the future.

        None for a message to ignore: its stamp is not later than the last one, or is ahead of a shared clock.
        """
        arrival_ns = self._monotonic_ns()
        if self._clock == "arrival":
            return arrival_ns
        if stamp_ns <= self._last_ns:
            return None
        age_ns = self._wall_ns() - stamp_ns if self._clock == "shared" else 0
        if age_ns < -MAX_AHEAD_NS:  # the true age of its readings is unknown
            self.clock_error = f"stamps are {-age_ns / 1e9:.3f} s ahead of this computer's clock"
            return None
        self.clock_error, self._last_ns = "", stamp_ns
        if self._clock == "shared":
            return arrival_ns - max(0, age_ns)
        return stamp_ns + self._least_offset_ns(arrival_ns - stamp_ns, arrival_ns)

    def _least_offset_ns(self, offset_ns: int, now_ns: int) -> int:
        """The least recent offset. Clocks drift apart, and an old offset would make readings seem ever older."""
        if not self._offsets_ns or now_ns - self._since_ns > OFFSET_WINDOW_NS:
            self._since_ns, self._offsets_ns = now_ns, [*self._offsets_ns[-1:], offset_ns]
        self._offsets_ns[-1] = min(self._offsets_ns[-1], offset_ns)
        return min(self._offsets_ns)


@dataclass(frozen=True)
class JointReading:
    """One joint at `t_capture_ns`. The velocity is NaN if the robot does not publish it."""

    position: float
    velocity: float
    t_capture_ns: int


class JointReadings:
    """The newest reading of each joint. Several publishers may share a topic, each with its own joints."""

    def __init__(self, joints: Sequence[str], clock: StampClock) -> None:
        self._joints, self._clock = frozenset(joints), clock
        self._times: dict[tuple[str, ...], CaptureTimes] = {}
        self._newest: dict[str, JointReading] = {}
        self._lock = threading.Lock()

    def update(
        self, names: Sequence[str], positions: Sequence[float], velocities: Sequence[float], stamp_ns: int
    ) -> None:
        """Add one message. Ignores a message whose lists differ in length, and joints whose position is not finite, as
        of hardware that has not measured yet."""
        wanted = [
            index
            for index, (name, position) in enumerate(zip(names, positions, strict=False))
            if name in self._joints and math.isfinite(position)
        ]
        if not wanted or len(positions) != len(names) or len(velocities) not in (0, len(names)):
            return
        with self._lock:
            times = self._times.setdefault(tuple(names[i] for i in wanted), CaptureTimes(self._clock))
            captured_ns = times.captured_ns(stamp_ns)
            if captured_ns is not None:
                speeds = velocities if len(velocities) else (float("nan"),) * len(names)
                for i in wanted:
                    self._newest[names[i]] = JointReading(positions[i], speeds[i], captured_ns)

    @property
    def clock_error(self) -> str:
        """The problems with the newest stamps; empty if there are none."""
        with self._lock:
            return "; ".join(sorted({times.clock_error for times in self._times.values() if times.clock_error}))

    def missing(self, joints: Sequence[str]) -> list[str]:
        """The joints without a reading yet."""
        with self._lock:
            return [name for name in joints if name not in self._newest]

    def latest(self, joints: Sequence[str]) -> tuple[Array, Array, int]:
        """Positions and velocities, float64 (n,), in the given order, and the capture time of the oldest.

        Raises:
            KeyError: a joint has no reading yet; see `missing`.
        """
        with self._lock:
            found = [self._newest[name] for name in joints]
        positions: Array = np.array([each.position for each in found])
        velocities: Array = np.array([each.velocity for each in found])
        return positions, velocities, min(each.t_capture_ns for each in found)


@dataclass(frozen=True)
class ForceReading:
    """float64 (3,) N in the frame of the link `frame`, measured at `t_capture_ns`."""

    force: Array
    frame: str
    t_capture_ns: int


class StopButton:
    """The state of a stop button's topic. A press counts until `take_pressed` has reported it, however short it was.

    Attributes:
        was_received: its topic has delivered a message.
        is_pressed: the newest state.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self.was_received = self.is_pressed = self._unreported_press = False
        self._clock, self._received_s = clock, clock()
        self._lock = threading.Lock()

    def update(self, pressed: bool) -> None:
        """Add a message; repeated messages are allowed."""
        with self._lock:
            self._unreported_press |= pressed and not self.is_pressed
            self.is_pressed, self.was_received, self._received_s = pressed, True, self._clock()

    def take_pressed(self) -> bool:
        """Whether it is pressed, or was since the last call."""
        with self._lock:
            reported, self._unreported_press = self._unreported_press, False
            return reported or self.is_pressed

    @property
    def silence_s(self) -> float:
        """The time since the last message."""
        with self._lock:
            return self._clock() - self._received_s
