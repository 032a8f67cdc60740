"""Decode a ROS 2 robot's messages: joints by name, capture times on this computer's clock, a stop button, images.

This module does not need ROS. Callbacks write on the node's thread; the driver reads on its own.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hal.errors import HardwareLost
from hal.spec import Array
from robots.device import DeviceClock
from robots.ros2_spec import StampClock

MAX_AHEAD_NS = 50_000_000  # how far synchronised clocks may be apart
RESTARTED_CLOCK_NS = 1_000_000_000  # a stamp that is earlier than the last one by more is of a clock that began anew
CHANNELS_FROM_ENCODING = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1, "8UC1": 1, "8UC3": 3}
"""The supported encodings of sensor_msgs/msg/Image, with their bytes per pixel."""


class DamagedImage(HardwareLost):
    """An image that cannot be decoded; the next one may be whole."""


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
        self._kind, self._monotonic_ns, self._wall_ns = clock, monotonic_ns, wall_ns
        self._clock = DeviceClock()
        self._last_ns = -1
        self.clock_error = ""

    def captured_ns(self, stamp_ns: int) -> int | None:
        """The capture time of a message that arrives now; never in the future.

        None for a message to ignore: its stamp is not later than the last one, or is ahead of a shared clock. A robot's
        clock may begin anew, as after a restart of its computer.
        """
        arrival_ns = self._monotonic_ns()
        if self._kind == "arrival":
            return arrival_ns
        if self._kind == "robot" and stamp_ns < self._last_ns - RESTARTED_CLOCK_NS:
            self._clock, self._last_ns = DeviceClock(), -1
        if stamp_ns <= self._last_ns:
            return None
        if self._kind == "robot":
            self._last_ns = stamp_ns
            return self._clock.captured_ns(stamp_ns, arrival_ns)
        age_ns = self._wall_ns() - stamp_ns
        if age_ns < -MAX_AHEAD_NS:  # the true age of its readings is unknown
            self.clock_error = f"stamps are {-age_ns / 1e9:.3f} s ahead of this computer's clock"
            return None
        self.clock_error, self._last_ns = "", stamp_ns
        return arrival_ns - max(0, age_ns)


class JointReadings:
    """The newest reading of each of some joints. Several publishers may share a topic, each with its own joints."""

    def __init__(self, joints: Sequence[str], clock: StampClock) -> None:
        self._joints, self._clock = tuple(joints), clock
        self._times: dict[tuple[str, ...], CaptureTimes] = {}
        self._newest: dict[str, tuple[float, float, int]] = {}  # position, velocity or NaN, capture time
        self._lock = threading.Lock()

    def update(
        self, names: Sequence[str], positions: Sequence[float], velocities: Sequence[float], stamp_ns: int
    ) -> None:
        """Add one message. Ignores a message whose lists differ in length, and joints whose position is not finite, as
        of hardware that has not measured yet."""
        if len(positions) != len(names) or len(velocities) not in (0, len(names)):
            return
        speeds = velocities if len(velocities) else (math.nan,) * len(names)
        measured = {
            name: (position, speed)
            for name, position, speed in zip(names, positions, speeds, strict=True)
            if name in self._joints and math.isfinite(position)
        }
        if not measured:
            return
        with self._lock:
            captured_ns = self._times.setdefault(tuple(measured), CaptureTimes(self._clock)).captured_ns(stamp_ns)
            if captured_ns is not None:
                self._newest.update({name: (*reading, captured_ns) for name, reading in measured.items()})

    @property
    def clock_error(self) -> str:
        """The problems with the newest stamps; empty if there are none."""
        with self._lock:
            return "; ".join(sorted({times.clock_error for times in self._times.values() if times.clock_error}))

    def missing(self) -> list[str]:
        """The joints without a reading yet."""
        with self._lock:
            return [name for name in self._joints if name not in self._newest]

    def latest(self) -> tuple[Array, Array, int]:
        """Positions and velocities, float64 (n,), in the joints' order, and the capture time of the oldest.

        Raises:
            KeyError: a joint has no reading yet; see `missing`.
        """
        with self._lock:
            found = [self._newest[name] for name in self._joints]
        positions, velocities, captured_ns = zip(*found, strict=True)
        return np.array(positions), np.array(velocities), min(captured_ns)


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


def header_stamp_ns(header: Any) -> int:
    """A header's stamp in nanoseconds."""
    return int(header.stamp.sec) * 1_000_000_000 + int(header.stamp.nanosec)


def decode_raw_image(message: Any) -> Array:
    """Decode a sensor_msgs/msg/Image to uint8 (height, width, 3) RGB.

    Raises:
        DamagedImage: bytes are missing.
        HardwareLost: the encoding is not supported.
    """
    channels = CHANNELS_FROM_ENCODING.get(message.encoding)
    if channels is None:
        raise HardwareLost(
            f"the image encoding {message.encoding!r} is not supported; use one of {sorted(CHANNELS_FROM_ENCODING)}"
        )
    height, row = int(message.height), int(message.width) * channels
    if message.step < row or len(message.data) < height * message.step:
        raise DamagedImage(
            f"an image of {message.width}x{height} {message.encoding} has only {len(message.data)} bytes"
        )
    rows = np.frombuffer(message.data, np.uint8, count=height * message.step).reshape(height, message.step)
    pixels = rows[:, :row].reshape(height, message.width, channels)
    if channels == 1:
        return np.repeat(pixels, 3, axis=2)
    first = pixels[..., 2::-1] if message.encoding.startswith(("bgr", "8UC3")) else pixels[..., :3]
    return np.ascontiguousarray(first)


def jpeg_image_size(content: bytes) -> tuple[int, int]:
    """Read height and width from a JPEG's header without decoding: they may claim gigabytes. Raises DamagedImage."""
    import simplejpeg

    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(content)
    except (ValueError, KeyError) as error:  # KeyError: an unknown chroma subsampling
        raise DamagedImage(f"a compressed image is not a readable JPEG: {error!r}") from error
    return int(height), int(width)


def decode_jpeg_image(content: bytes) -> Array:
    """Decode a JPEG to uint8 (height, width, 3) RGB. Raises DamagedImage for anything else."""
    import simplejpeg

    try:
        image: Array = simplejpeg.decode_jpeg(content, colorspace="RGB")
    except ValueError as error:
        raise DamagedImage(f"a compressed image is not a readable JPEG: {error}") from error
    return image
