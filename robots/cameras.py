"""Cameras on the robot's computer, for any driver: V4L2 devices and network streams, by OpenCV (extra ``cameras``).

One thread reads each camera and keeps the newest frame, so `Camera.read` never blocks. A camera without a new frame for
`FrameConfig.stale_after_s` is stale. A camera is lost when its stream ends or its device is unplugged.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from hal.camera import Camera, CameraFrame, default_stale_after_s
from hal.driver import RobotSetupRequest
from hal.errors import HalError, HardwareLost, SpecError
from hal.settings import Count, Positive
from hal.spec import Array, CameraSpec
from robots.device import STOP_CHECK_INTERVAL_S, DeviceLock, import_library, require_fresh

CONNECT_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 2.0
MAX_PLAUSIBLE_AGE_NS = 1_000_000_000  # an older driver stamp, or one in the future, belongs to another clock

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FrameConfig:
    """Size and rate of a camera's frames. `stale_after_s` defaults to three frame times plus 0.1 s."""

    width: Count = 640
    height: Count = 480
    rate_hz: Positive = 30.0
    stale_after_s: Positive | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the pictures that the robot gives, in pixels."""
        return self.width, self.height

    @property
    def stale_s(self) -> float:
        return default_stale_after_s(self.rate_hz) if self.stale_after_s is None else self.stale_after_s


@dataclass(frozen=True, kw_only=True)
class CameraConfig(FrameConfig):
    """Attributes:
    device: such as ``/dev/video0``, its number, or the URL of a stream.
    fourcc: pixel format to request from a V4L2 device, e.g. ``MJPG``; empty keeps the device's setting.
    square: side of the pictures in pixels: the middle of each frame, scaled. Null keeps whole frames.
    """

    device: str | int
    fourcc: Annotated[str, Meta(pattern="^(.{4})?$")] = ""
    square: Count | None = None

    @property
    def size(self) -> tuple[int, int]:
        return (self.width, self.height) if self.square is None else (self.square, self.square)

    @property
    def path(self) -> str:
        """The device's path; empty for a stream, which several processes may read."""
        device = f"/dev/video{self.device}" if isinstance(self.device, int) else self.device
        return device if device.startswith("/dev/") else ""


def camera_specs(configs: Mapping[str, FrameConfig]) -> tuple[CameraSpec, ...]:
    """The camera specs of a robot's `RobotSpec`, from its options."""
    return tuple(
        CameraSpec(name=name, height=each.size[1], width=each.size[0], rate_hz=each.rate_hz)
        for name, each in configs.items()
    )


def make_cameras(configs: Mapping[str, CameraConfig], request: RobotSetupRequest) -> tuple[Camera, ...]:
    """Make the cameras of a robot, not connected; empty if the request excludes cameras."""
    if not request.cameras:
        return ()
    return tuple(LocalCamera(spec, configs[spec.name]) for spec in camera_specs(configs))


class LocalCamera(Camera):
    """A camera and its reader thread."""

    def __init__(self, spec: CameraSpec, config: CameraConfig) -> None:
        self.spec, self.config = spec, config
        self._name = f"camera {spec.name} ({config.device})"
        self._device_lock = DeviceLock(config.path)
        self._reader: _ReaderThread | None = None

    def preload(self) -> None:
        with contextlib.suppress(ImportError):
            import_module("cv2")

    def connect(self) -> None:
        """See `hal.camera.Camera`. Blocks until the first frame.

        Raises:
            SpecError: OpenCV is not installed, or the frame size differs from the config.
        """
        if self._reader is not None:
            return
        self._device_lock.acquire()
        try:
            reader = _ReaderThread(self._name, OpencvSource(self.config), self.config)
            reader.start(self.check_stop)
        except HalError:
            self._device_lock.release()
            raise
        self._reader = reader

    def read(self) -> CameraFrame:
        if self._reader is None:
            raise HardwareLost(f"{self._name} is not connected")
        frame = self._reader.newest()
        require_fresh(self._name, frame.t_capture_ns, self.config.stale_s)
        return frame

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.stop()
            self._device_lock.release()


class OpencvSource:
    """One device or stream, by OpenCV. One thread calls it. Every method may raise any exception of OpenCV."""

    def __init__(self, config: CameraConfig) -> None:
        self._config = config
        self._cv2: Any = None
        self._capture: Any = None
        self._stamps: FrameTimestamps | None = None

    def open(self) -> None:
        """Raises HardwareLost if the device is missing, SpecError without OpenCV."""
        self._cv2 = cv2 = import_library("cv2", "cameras")
        config, capture = self._config, cv2.VideoCapture()
        capture.open(config.device, cv2.CAP_V4L2 if config.path else cv2.CAP_ANY)
        self._capture = capture
        if not capture.isOpened():
            raise HardwareLost(
                "it cannot be opened: check that it is plugged in, that you may open it, and that no other "
                "program uses it"
            )
        if config.path:
            if config.fourcc:
                capture.set(cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*config.fourcc))
            capture.set(cv2.CAP_PROP_FRAME_WIDTH, config.width)
            capture.set(cv2.CAP_PROP_FRAME_HEIGHT, config.height)
            capture.set(cv2.CAP_PROP_FPS, config.rate_hz)
            capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)
        self._stamps = FrameTimestamps() if capture.getBackendName() == "V4L2" else None

    def read_frame(self) -> tuple[Array, int]:
        """Read the next RGB frame and its capture time (``time.monotonic_ns()``).

        Raises:
            HardwareLost: the stream ended. OpenCV waits 10 s for a V4L2 device, then fails in the same way.
        """
        received, image = self._capture.read()
        now_ns = time.monotonic_ns()
        if not received:
            raise HardwareLost("its stream ended, or no frame came for 10 s")
        if self._stamps is not None:
            # V4L2 stamps buffers with the monotonic clock; OpenCV returns the stamp as a position in ms
            stamp_ns = int(self._capture.get(self._cv2.CAP_PROP_POS_MSEC) * 1e6)
            now_ns = self._stamps.captured_ns(stamp_ns, now_ns)
        return self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB), now_ns

    def close(self) -> None:
        if self._capture is not None:
            self._capture.release()


def _middle_square(image: Array, side: int) -> Array:
    """The largest square in the middle of `image` (h, w, 3), scaled to (side, side, 3)."""
    cv2 = import_library("cv2", "cameras")
    height, width = image.shape[:2]
    edge = min(height, width)
    top, left = (height - edge) // 2, (width - edge) // 2
    scaled: Array = cv2.resize(image[top : top + edge, left : left + edge], (side, side), interpolation=cv2.INTER_AREA)
    return scaled


class _ReaderThread:
    """The thread that reads one source. `stop` abandons a source that hangs."""

    def __init__(self, name: str, source: OpencvSource, config: CameraConfig) -> None:
        self._name, self._source, self._square = name, source, config.square
        self._shape = (config.height, config.width, 3)
        self._frame: CameraFrame | None = None
        self._failure: Exception | None = None
        self._first, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, check_stop: Callable[[], None]) -> None:
        """Block until the first frame. Calls `check_stop` every `STOP_CHECK_INTERVAL_S`; it may raise."""
        self._thread.start()
        until_s = time.monotonic() + CONNECT_TIMEOUT_S
        try:
            while not self._first.wait(STOP_CHECK_INTERVAL_S):
                check_stop()
                if time.monotonic() > until_s:
                    raise HardwareLost(f"{self._name}: no frame within {CONNECT_TIMEOUT_S:g} s")
        except HalError:
            self._closing.set()
            raise
        self.newest()

    def newest(self) -> CameraFrame:
        failure, frame = self._failure, self._frame
        if failure is None and frame is not None:
            return frame
        # a camera that has changed after its first frame is lost
        kind = SpecError if isinstance(failure, SpecError) and frame is None else HardwareLost
        raise kind(f"{self._name}: {failure}") from failure

    def stop(self) -> None:
        self._closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("camera.not_closed %s: its library does not return", self._name)

    def _run(self) -> None:
        try:
            self._source.open()
            while not self._closing.is_set():
                image, captured_ns = self._source.read_frame()
                if image.shape != self._shape or image.dtype != np.uint8:
                    raise SpecError(
                        f"its frames are {image.dtype} {image.shape}; set width and height so that they match uint8 "
                        f"{self._shape}"
                    )
                if self._square is not None:
                    image = _middle_square(image, self._square)
                self._frame = CameraFrame(image, max(captured_ns, self._frame.t_capture_ns if self._frame else 0))
                self._first.set()
        except Exception as error:  # any exception of the library; the next `newest` raises it
            self._failure = error
            log.warning("camera.lost %s: %s", self._name, error)
        finally:
            self._first.set()
            try:
                self._source.close()
            except Exception as error:  # any exception of the library, e.g. for an unplugged device
                log.warning("camera.not_closed %s: %s", self._name, error)


class FrameTimestamps:
    """Capture times from a driver's stamps.

    Until the first plausible stamp, the capture time is the arrival time. After it, the stamp counts, also for frames
    that waited in a buffer while this process was stopped.
    """

    def __init__(self) -> None:
        self._ours = False

    def captured_ns(self, stamp_ns: int, now_ns: int) -> int:
        self._ours = self._ours or 0 <= now_ns - stamp_ns <= MAX_PLAUSIBLE_AGE_NS
        return min(stamp_ns, now_ns) if self._ours else now_ns
