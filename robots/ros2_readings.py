"""What a ROS 2 robot's messages say, put together by joint name, and when it was so on this computer's clock.

Nothing here needs ROS. Callbacks write from the link's thread, the driver reads from its own.
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
"""What a header's stamp means. ``shared``: the robot's clock and this computer's are synchronised, as ROS expects.
``robot``: another clock (an unsynchronised computer, a simulation that keeps up); its offset is taken from the message
that came quickest of late. ``arrival``: stamps mean nothing, and only the time of arrival counts."""


MAX_AHEAD_NS = 50_000_000  # how far clocks that are called synchronised may be apart
OFFSET_WINDOW_NS = 10_000_000_000  # clocks that differ by 1e-4 part by 1 ms meanwhile


class CaptureTimes:
    """Stamps of one sender to times on ``time.monotonic_ns``'s clock. One thread calls it.

    Attributes:
        clock_error: what is wrong with the newest stamp, for a person; empty where nothing is.
    """

    def __init__(
        self,
        clock: StampClock,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._clock, self._monotonic_ns, self._wall_ns = clock, monotonic_ns, wall_ns
        self._offsets_ns: list[int] = []  # the least of this window, after that of the window before
        self._since_ns = 0
        self._last_ns = -1
        self.clock_error = ""

    def captured_ns(self, stamp_ns: int) -> int | None:
        """When a message that arrives now was captured; never in the future. None for one that says nothing new: its
        stamp is not later than the newest one's, or is ahead of a shared clock."""
        arrival_ns = self._monotonic_ns()
        if self._clock == "arrival":
            return arrival_ns
        if stamp_ns <= self._last_ns:
            return None
        age_ns = self._wall_ns() - stamp_ns if self._clock == "shared" else 0
        if age_ns < -MAX_AHEAD_NS:  # by how much its readings are older than they seem cannot be told
            self.clock_error = f"stamps are {-age_ns / 1e9:.3f} s ahead of this computer's clock"
            return None
        self.clock_error, self._last_ns = "", stamp_ns
        if self._clock == "shared":
            return arrival_ns - max(0, age_ns)
        return stamp_ns + self._least_offset_ns(arrival_ns - stamp_ns, arrival_ns)

    def _least_offset_ns(self, offset_ns: int, now_ns: int) -> int:
        """Of late only: two clocks drift apart, and an old offset would make readings older and older."""
        if not self._offsets_ns or now_ns - self._since_ns > OFFSET_WINDOW_NS:
            self._since_ns, self._offsets_ns = now_ns, [*self._offsets_ns[-1:], offset_ns]
        self._offsets_ns[-1] = min(self._offsets_ns[-1], offset_ns)
        return min(self._offsets_ns)


@dataclass(frozen=True)
class JointReading:
    """One joint, as it was at `t_capture_ns`. Velocity is NaN where the robot does not say it."""

    position: float
    velocity: float
    t_capture_ns: int


class JointReadings:
    """The newest reading of each joint. Several publishers may share a topic, each with joints of its own."""

    def __init__(self, joints: Sequence[str], clock: StampClock) -> None:
        self._joints, self._clock = frozenset(joints), clock
        self._times: dict[tuple[str, ...], CaptureTimes] = {}
        self._newest: dict[str, JointReading] = {}
        self._lock = threading.Lock()

    def update(
        self, names: Sequence[str], positions: Sequence[float], velocities: Sequence[float], stamp_ns: int
    ) -> None:
        """Takes in one message; one whose lists differ in length is not a reading and is left out, and so is a joint
        whose position is not a number: hardware that has not begun to measure says that."""
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
        """What is wrong with the newest stamps; empty where nothing is."""
        with self._lock:
            return "; ".join(sorted({times.clock_error for times in self._times.values() if times.clock_error}))

    def missing(self, joints: Sequence[str]) -> list[str]:
        """Those of which nothing was heard yet."""
        with self._lock:
            return [name for name in joints if name not in self._newest]

    def latest(self, joints: Sequence[str]) -> tuple[Array, Array, int]:
        """Positions and velocities, float64 (n,), in the order asked for, and when the oldest of them was captured.

        Raises:
            KeyError: a joint of which nothing was heard; see `missing`.
        """
        with self._lock:
            found = [self._newest[name] for name in joints]
        positions: Array = np.array([each.position for each in found])
        velocities: Array = np.array([each.velocity for each in found])
        return positions, velocities, min(each.t_capture_ns for each in found)


@dataclass(frozen=True)
class ForceReading:
    """float64 (3,) N in the frame of the link `frame`, as measured at `t_capture_ns`."""

    force: Array
    frame: str
    t_capture_ns: int


class StopButton:
    """A stop button of the cell, as its topic shows it. A press counts until it was told, however short it was.

    Attributes:
        was_received: its topic has said something.
        is_pressed: it is pressed now.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self.was_received = self.is_pressed = self._untold = False
        self._clock, self._heard_s = clock, clock()
        self._lock = threading.Lock()

    def update(self, pressed: bool) -> None:
        """What a message says; the same may be said again and again."""
        with self._lock:
            self._untold |= pressed and not self.is_pressed
            self.is_pressed, self.was_received, self._heard_s = pressed, True, self._clock()

    def take_pressed(self) -> bool:
        """Whether it is pressed, or was since this was asked last."""
        with self._lock:
            told, self._untold = self._untold, False
            return told or self.is_pressed

    @property
    def silence_s(self) -> float:
        """For how long its topic has said nothing."""
        with self._lock:
            return self._clock() - self._heard_s
