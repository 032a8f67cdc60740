"""Cameras on the robot's computer, for any driver: V4L2 devices and network streams (OpenCV), and RealSense.

One thread reads each camera and keeps the newest frame, so `Camera.read` never blocks. A camera without a new frame for
`CameraConfig.stale_after_s` is stale. A camera is lost when its stream ends or its device is unplugged.
`LocalCamera.connect` imports OpenCV (extra ``cameras``) or pyrealsense2 (extra ``realsense``).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Protocol

import numpy as np

from hal.camera import Camera, CameraFrame, default_stale_after_s
from hal.driver import RobotSetupRequest
from hal.errors import HalError, HardwareLost, SpecError, StaleObservation, install_hint
from hal.spec import Array, CameraSpec
from robots.device_lock import DeviceLock, camera_lock_name

CONNECT_TIMEOUT_S = 20.0
STOP_CHECK_INTERVAL_S = 0.1
CLOSE_TIMEOUT_S = 2.0
MAX_PLAUSIBLE_AGE_NS = 1_000_000_000  # an older driver stamp, or one in the future, belongs to another clock

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CameraConfig:
    """Attributes:
    kind: ``opencv`` or ``realsense``.
    device: OpenCV: a device such as ``/dev/video0``, its number, or the URL of a stream. RealSense: the serial number;
    may be empty with a single camera.
    fourcc: pixel format to request from a V4L2 device, e.g. ``MJPG``; empty keeps the device's setting.
    stale_after_s: default: three frame times plus 0.1 s.
    """

    kind: Literal["opencv", "realsense"] = "opencv"
    device: str | int = ""
    width: int = 640
    height: int = 480
    rate_hz: float = 30.0
    fourcc: str = ""
    stale_after_s: float | None = None

    def __post_init__(self) -> None:
        if min(self.width, self.height, self.rate_hz) <= 0 or not self.stale_s > 0:
            raise ValueError("a camera's width, height, rate_hz and stale_after_s must be above 0")
        if len(self.fourcc) not in (0, 4):
            raise ValueError(f"fourcc must have four letters, such as MJPG; it is {self.fourcc!r}")
        if self.kind == "opencv" and self.device == "":
            raise ValueError("an opencv camera needs its device, e.g. /dev/video0")

    @property
    def stale_s(self) -> float:
        return default_stale_after_s(self.rate_hz) if self.stale_after_s is None else self.stale_after_s


def camera_specs(configs: Mapping[str, CameraConfig]) -> tuple[CameraSpec, ...]:
    """The camera specs of a robot's `RobotSpec`, from its options."""
    return tuple(
        CameraSpec(name=name, height=each.height, width=each.width, rate_hz=each.rate_hz)
        for name, each in configs.items()
    )


def make_cameras(configs: Mapping[str, CameraConfig], request: RobotSetupRequest) -> tuple[Camera, ...]:
    """Make the cameras of a robot, not connected; empty if the request excludes cameras."""
    if not request.cameras:
        return ()
    return tuple(LocalCamera(spec, configs[spec.name]) for spec in camera_specs(configs))


class CameraBackend(Protocol):
    """One camera library. One thread calls it. Every method may raise any exception of the library."""

    def open(self) -> None:
        """Raises HardwareLost if the device is missing, SpecError if it does not support the configuration."""

    def read_frame(self) -> tuple[Array, int] | None:
        """Read the next RGB frame and its capture time (``time.monotonic_ns()``); None after a timeout.

        Raises:
            HardwareLost: the stream ended.
        """

    def close(self) -> None: ...


class LocalCamera(Camera):
    """A camera and its reader thread."""

    def __init__(self, spec: CameraSpec, config: CameraConfig) -> None:
        self.spec, self.config = spec, config
        self._device_lock = DeviceLock(camera_lock_name(config.kind, config.device))
        self._reader: _ReaderThread | None = None

    def preload(self) -> None:
        with contextlib.suppress(ImportError):
            import_module(_LIBRARIES[self.config.kind])

    def connect(self) -> None:
        """See `hal.camera.Camera`. Blocks until the first frame.

        Raises:
            SpecError: the library is not installed, or the frame size differs from the config.
        """
        if self._reader is None:
            reader = _ReaderThread(self._name, BACKENDS[self.config.kind](self.config), self.spec.shape)
            self._device_lock.acquire()
            try:
                reader.start(self.check_stop)
            except HalError:
                self._device_lock.release()
                raise
            self._reader = reader

    def read(self) -> CameraFrame:
        if self._reader is None:
            raise HardwareLost(f"{self._name} is not connected")
        frame = self._reader.newest()
        age_s = (time.monotonic_ns() - frame.t_capture_ns) / 1e9
        if age_s > self.config.stale_s:
            raise StaleObservation(f"{self._name}: the newest frame is {age_s:.3f} s old")
        return frame

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.stop()
            self._device_lock.release()

    @property
    def _name(self) -> str:
        return f"camera {self.spec.name} ({self.config.kind} {self.config.device})"


class _ReaderThread:
    """The thread that reads one backend. `stop` abandons a backend that hangs."""

    def __init__(self, name: str, source: CameraBackend, shape: tuple[int, int, int]) -> None:
        self._name, self._source, self._shape = name, source, shape
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
        if (
            isinstance(failure, SpecError) and frame is None
        ):  # after the first frame the camera itself has changed: that is a loss
            raise SpecError(f"{self._name}: {failure}") from failure
        if failure is not None or frame is None:
            raise HardwareLost(f"{self._name}: {failure}") from failure
        return frame

    def stop(self) -> None:
        self._closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("camera.not_closed %s: its library does not return", self._name)

    def _run(self) -> None:
        try:
            self._source.open()
            while not self._closing.is_set():
                if (grabbed := self._source.read_frame()) is not None:
                    self._frame = self._checked(*grabbed)
                    self._first.set()
        except Exception as error:  # any exception of the library; the next `newest` raises it
            self._failure = error
            log.warning("camera.lost %s: %s", self._name, error)
        finally:
            self._first.set()
            self._close()

    def _close(self) -> None:
        try:
            self._source.close()
        except Exception as error:  # any exception of the library, e.g. for an unplugged device
            log.warning("camera.not_closed %s: %s", self._name, error)

    def _checked(self, image: Array, captured_ns: int) -> CameraFrame:
        if image.shape != self._shape or image.dtype != np.uint8:
            raise SpecError(
                f"its frames are {image.dtype} {image.shape}; set width and height so that they match uint8 "
                f"{self._shape}"
            )
        newest_ns = self._frame.t_capture_ns if self._frame else 0
        return CameraFrame(image, max(captured_ns, newest_ns))


class _OpencvBackend:
    def __init__(self, config: CameraConfig) -> None:
        self._config = config
        self._cv2: Any = None
        self._capture: Any = None
        self._stamps: FrameTimestamps | None = None

    def open(self) -> None:
        self._cv2 = cv2 = _import_library("cv2", "cameras")
        config = self._config
        local = isinstance(config.device, int) or config.device.startswith("/dev/")
        self._capture = cv2.VideoCapture(config.device, cv2.CAP_V4L2 if local else cv2.CAP_ANY)
        if not self._capture.isOpened():
            raise HardwareLost(
                "it cannot be opened: check that it is plugged in, that you may open it, and that no other "
                "program uses it"
            )
        if local:
            self._ask_for(config)
        self._stamps = FrameTimestamps() if self._capture.getBackendName() == "V4L2" else None

    def read_frame(self) -> tuple[Array, int] | None:
        """OpenCV waits 10 s for a V4L2 device, then fails as at the end of a stream."""
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

    def _ask_for(self, config: CameraConfig) -> None:
        cv2, capture = self._cv2, self._capture
        if config.fourcc:
            capture.set(cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*config.fourcc))
        capture.set(cv2.CAP_PROP_FRAME_WIDTH, config.width)
        capture.set(cv2.CAP_PROP_FRAME_HEIGHT, config.height)
        capture.set(cv2.CAP_PROP_FPS, config.rate_hz)
        capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)


class _RealsenseBackend:
    """The color stream of a RealSense camera."""

    def __init__(self, config: CameraConfig) -> None:
        self._config = config
        self._pipeline: Any = None

    def open(self) -> None:
        rs, config = _import_library("pyrealsense2", "realsense"), self._config
        stream_config = rs.config()
        if config.device:
            stream_config.enable_device(str(config.device))
        stream_config.enable_stream(rs.stream.color, config.width, config.height, rs.format.rgb8, round(config.rate_hz))
        pipeline = rs.pipeline()
        pipeline.start(stream_config)
        self._pipeline = pipeline

    def read_frame(self) -> tuple[Array, int] | None:
        received, frames = self._pipeline.try_wait_for_frames(round(self._config.stale_s * 1000))
        if not received:
            return None
        colour, now_ns = frames.get_color_frame(), time.monotonic_ns()
        age_ns = time.time_ns() - int(colour.get_timestamp() * 1e6)  # librealsense maps its clock to the system clock
        return np.array(colour.get_data()), plausible_capture_ns(now_ns - age_ns, now_ns)

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.stop()


BACKENDS: dict[str, type[_OpencvBackend] | type[_RealsenseBackend]] = {
    "opencv": _OpencvBackend,
    "realsense": _RealsenseBackend,
}


_LIBRARIES = {"opencv": "cv2", "realsense": "pyrealsense2"}


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


def plausible_capture_ns(stamp_ns: int, now_ns: int) -> int:
    """`stamp_ns` if it can be a time of the monotonic clock, else `now_ns`, the arrival time."""
    return stamp_ns if 0 <= now_ns - stamp_ns <= MAX_PLAUSIBLE_AGE_NS else now_ns


def _import_library(library: str, extra: str) -> Any:
    try:
        return import_module(library)
    except ImportError as error:
        raise SpecError(f"{library} cannot be imported: {error}; install it with: {install_hint(extra)}") from error
