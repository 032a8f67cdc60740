"""A topic of pictures as a camera: raw or compressed, best effort, the newest one counts."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from hal.camera import Camera, Frame
from hal.errors import HalError, HardwareLost, StaleObservation
from hal.spec import Array, CameraSpec
from robots.ros2_link import RosLink
from robots.ros2_readings import CaptureTimes
from robots.ros2_spec import Ros2Config, RosCameraConfig

CHANNELS = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1, "8UC1": 1, "8UC3": 3}
"""Encodings of sensor_msgs/msg/Image that are understood, and their bytes a pixel."""


class RosCamera(Camera):
    """One camera on a node of its own, so that its pictures keep nobody else's messages waiting."""

    def __init__(self, node: str, spec: CameraSpec, topic: RosCameraConfig, config: Ros2Config) -> None:
        """`node`: the name of its node."""
        self.spec, self._topic, self._config = spec, topic, config
        self._link = RosLink(node, config.domain)
        self._newest: tuple[Any, int] | None = None
        self._decoded: Frame | None = None
        self._times = CaptureTimes(config.clock)

    def connect(self) -> None:
        """Blocks until the first picture. Raises HardwareLost where none comes, or one that the config does not fit."""
        if self._link.connected:
            return
        kind = "Image" if self._topic.kind == "raw" else "CompressedImage"
        self._times = CaptureTimes(self._config.clock)
        self._link.open()
        try:
            self._link.sense(f"sensor_msgs/msg/{kind}", self._topic.topic, self._take)
            silent = f"no picture came on {self._topic.topic}"
            self._link.wait(lambda: self._newest is not None, self._config.connect_s, silent, self.attend)
            if (newest := self._newest) is not None:
                self._decode(newest[0])
        except HalError:
            self.close()
            raise

    def read(self) -> Frame:
        """Raises StaleObservation where the newest picture is older than `RosCameraConfig.stale_s`."""
        newest = self._newest
        if not self._link.connected or newest is None:
            raise HardwareLost(f"camera {self.spec.name} is not connected")
        message, captured_ns = newest
        age_s = (time.monotonic_ns() - captured_ns) / 1e9
        if age_s > self._topic.stale_s:
            raise StaleObservation(f"camera {self.spec.name}: the newest picture is {age_s:.3f} s old")
        if self._decoded is None or self._decoded.t_capture_ns != captured_ns:
            self._decoded = Frame(self._decode(message), captured_ns)
        return self._decoded

    def close(self) -> None:
        self._link.close()
        self._newest = self._decoded = None

    def _take(self, message: Any) -> None:
        captured_ns = self._times.of(stamp_ns(message.header))
        if captured_ns is not None:
            self._newest = message, captured_ns

    def _decode(self, message: Any) -> Array:
        raw = self._topic.kind == "raw"
        content = b"" if raw else bytes(message.data)
        height, width = (int(message.height), int(message.width)) if raw else compressed_size(content)
        if (height, width) != self.spec.shape[:2]:
            raise HardwareLost(
                f"camera {self.spec.name} gives pictures of {width}x{height}; "
                f"the config says {self.spec.width}x{self.spec.height}"
            )
        return decode_raw(message) if raw else decode_compressed(content)


def stamp_ns(header: Any) -> int:
    """A header's stamp in nanoseconds."""
    return int(header.stamp.sec) * 1_000_000_000 + int(header.stamp.nanosec)


def decode_raw(message: Any) -> Array:
    """uint8 (height, width, 3) RGB of a sensor_msgs/msg/Image.

    Raises:
        HardwareLost: an encoding that is not understood, or fewer bytes than the picture needs.
    """
    channels = CHANNELS.get(message.encoding)
    if channels is None:
        raise HardwareLost(f"pictures are encoded as {message.encoding!r}; understood are {sorted(CHANNELS)}")
    height, row = int(message.height), int(message.width) * channels
    if message.step < row or len(message.data) < height * message.step:
        raise HardwareLost(f"a picture of {message.width}x{height} {message.encoding} has {len(message.data)} bytes")
    rows = np.frombuffer(message.data, np.uint8, count=height * message.step).reshape(height, message.step)
    pixels = rows[:, :row].reshape(height, message.width, channels)
    if channels == 1:
        return np.repeat(pixels, 3, axis=2)
    first = pixels[..., 2::-1] if message.encoding.startswith(("bgr", "8UC3")) else pixels[..., :3]
    return np.ascontiguousarray(first)


def compressed_size(content: bytes) -> tuple[int, int]:
    """Height and width that a JPEG claims, which may be gigabytes; nothing is decoded. Raises HardwareLost."""
    import simplejpeg

    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(content)
    except (ValueError, KeyError) as error:  # KeyError: colours at a resolution that it has no name for
        raise HardwareLost(f"a compressed picture is no JPEG that can be read: {error!r}") from error
    return int(height), int(width)


def decode_compressed(content: bytes) -> Array:
    """uint8 (height, width, 3) RGB of a JPEG. Raises HardwareLost for anything else."""
    import simplejpeg

    try:
        image: Array = simplejpeg.decode_jpeg(content, colorspace="RGB")
    except ValueError as error:
        raise HardwareLost(f"a compressed picture is no JPEG: {error}") from error
    return image
