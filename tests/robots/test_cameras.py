"""Cameras by OpenCV on a stream from another process, which can be frozen, ended and killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from peer_kit import REPLY_S, PeerProcess, eventually

from hal.camera import Camera
from hal.conformance import CameraConformance
from hal.driver import RobotSetupRequest
from hal.errors import HalError, HardwareLost, SpecError, StaleObservation
from hal.settings import read_settings
from hal.spec import Array
from robots import cameras
from robots.cameras import CameraConfig, FrameTimestamps, LocalCamera, camera_specs, make_cameras

cv2 = pytest.importorskip("cv2")
WIDTH, HEIGHT = 64, 48
COLOURS = ((250, 10, 10), (10, 10, 250))  # RGB


class NetworkCamera(PeerProcess):
    def __init__(self, folder: Path, edges: int = 0) -> None:
        """Two pictures of one colour in turn; or with `edges`, one of red between two blue edges of that width."""
        colours = COLOURS[:1] if edges else COLOURS
        paths = [folder / f"{number}.png.jpg" for number in range(len(colours))]
        for path, colour in zip(paths, colours, strict=True):
            picture = np.full((HEIGHT, WIDTH, 3), colour[::-1], np.uint8)
            if edges:
                picture[:, :edges] = picture[:, -edges:] = COLOURS[1][::-1]
            path.write_bytes(cv2.imencode(".jpg", picture)[1].tobytes())
        super().__init__("mjpeg_camera.py", *map(str, paths))
        self.address = f"http://127.0.0.1:{self.ready}/stream.mjpg"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkCamera]:
    server = NetworkCamera(tmp_path_factory.mktemp("pictures"))
    yield server
    server.kill()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[NetworkCamera]:
    server = NetworkCamera(tmp_path)
    yield server
    server.kill()


def camera(address: str, stale_after_s: float = 60.0, width: int = WIDTH, square: int | None = None) -> LocalCamera:
    """Make a camera with long timeouts by default: a busy machine is late by seconds."""
    config = CameraConfig(device=address, width=width, height=HEIGHT, stale_after_s=stale_after_s, square=square)
    return LocalCamera(camera_specs({"front": config})[0], config)


class TestStream(CameraConformance):
    @pytest.fixture(autouse=True)
    def _server(self, shared: NetworkCamera) -> None:
        self.address = shared.address

    def make_camera(self) -> Camera:
        return camera(self.address)


def test_stream_delivers_rgb_frames_in_order(shared: NetworkCamera) -> None:
    device = camera(shared.address)
    device.connect()
    seen: set[int] = set()

    def both() -> bool:
        pixel = device.read().image[0, 0]
        seen.add(next(i for i, colour in enumerate(COLOURS) if np.abs(pixel - np.array(colour)).max() < 40))
        return len(seen) == 2

    try:
        eventually(both, "only one picture came")
    finally:
        device.close()


def test_square_pictures_are_the_middle_of_frames(tmp_path: Path) -> None:
    """The left eighth and the right eighth of the frames are blue, and left out; the rest is red."""
    server = NetworkCamera(tmp_path, edges=WIDTH // 8)
    device = camera(server.address, square=16)
    try:
        device.connect()
        image = device.read().image
    finally:
        device.close()
        server.kill()
    assert image.shape == device.spec.shape == (16, 16, 3)
    assert np.abs(image.astype(int) - COLOURS[0]).max() < 60


def test_frozen_camera_is_stale(mortal: NetworkCamera) -> None:
    device = camera(mortal.address, stale_after_s=1.0)
    device.connect()
    mortal.freeze()
    try:
        with pytest.raises(StaleObservation, match=r"camera front .*: the newest reading is \d"):
            eventually(lambda: device.read() is None, "nothing was reported")
    finally:
        mortal.thaw()
        device.close()


@pytest.mark.parametrize(("rate_hz", "stale_s"), [(30.0, 0.2), (1.0, 3.1)])
def test_stale_limit_defaults_to_three_frame_times(rate_hz: float, stale_s: float) -> None:
    assert CameraConfig(device=0, rate_hz=rate_hz).stale_s == pytest.approx(stale_s)
    assert CameraConfig(device=0, rate_hz=rate_hz, stale_after_s=0.5).stale_s == 0.5


@pytest.mark.parametrize("fate", ["ends", "is killed"])
def test_ended_stream_is_lost(mortal: NetworkCamera, fate: str) -> None:
    device = camera(mortal.address)
    device.connect()
    mortal.send("end") if fate == "ends" else mortal.kill()
    with pytest.raises(HardwareLost, match="its stream ended"):
        eventually(lambda: device.read() is None, "no loss was reported")
    device.close()


class Hanging:
    """A library that blocks until the test releases it."""

    let_go = threading.Event()

    def __init__(self, config: CameraConfig) -> None:
        pass

    def open(self) -> None:
        self.let_go.wait(REPLY_S)

    def read_frame(self) -> None:
        """Never called."""

    def close(self) -> None:
        """Nothing is open."""


def test_check_stop_aborts_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up() -> None:
        raise HalError("the driver is to end")

    monkeypatch.setattr(cameras, "OpencvSource", Hanging)
    device, other = camera("/dev/video63"), camera("/dev/video63")
    device.check_stop = other.check_stop = give_up
    for each in (device, other):  # a failed connect releases the device
        with pytest.raises(HalError, match="the driver is to end"):
            each.connect()
    Hanging.let_go.set()


def test_missing_device_is_lost() -> None:
    with pytest.raises(HardwareLost, match="/dev/video63.*cannot be opened"):
        camera("/dev/video63").connect()


def test_wrong_frame_size_is_refused(shared: NetworkCamera) -> None:
    device = camera(shared.address, width=320)
    with pytest.raises(
        SpecError, match=r"frames are uint8 \(48, 64, 3\); set width and height so that they match uint8 \(48, 320, 3\)"
    ):
        device.connect()


class Growing:
    """A source whose frames become larger on demand, and whose close then fails."""

    def __init__(self, config: CameraConfig) -> None:
        self._height = config.height
        self.grow = threading.Event()

    def open(self) -> None:
        pass

    def read_frame(self) -> tuple[Array, int]:
        height = 2 * self._height if self.grow.wait(0.01) else self._height
        return np.zeros((height, WIDTH, 3), np.uint8), time.monotonic_ns()

    def close(self) -> None:
        raise RuntimeError("no such device")


def test_changed_frame_size_loses_camera_until_reconnect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Growing] = []

    def source(config: CameraConfig) -> Growing:
        made.append(Growing(config))
        return made[-1]

    monkeypatch.setattr(cameras, "OpencvSource", source)
    device = camera("/dev/video4")
    device.connect()
    device.read()
    made[0].grow.set()
    with pytest.raises(
        HardwareLost,
        match=r"frames are uint8 \(96, 64, 3\); set width and height so that they match uint8 \(48, 64, 3\)",
    ):
        eventually(lambda: device.read() is None, "no change was reported")
    device.close()
    assert "camera.not_closed" in caplog.text
    device.connect()
    device.read()
    device.close()


def test_setup_has_configured_cameras() -> None:
    configs = {"front": CameraConfig(device=0), "wrist": CameraConfig(device="/dev/video4", width=424, height=240)}
    made = make_cameras(configs, RobotSetupRequest("arm", "free"))
    assert [each.spec for each in made] == list(camera_specs(configs))
    assert make_cameras(configs, RobotSetupRequest("arm", "free", cameras=False)) == ()
    for wrong in ({"fourcc": "MJPEG"}, {"stale_after_s": 0.0}, {"width": 0}):
        with pytest.raises(SpecError, match=next(iter(wrong))):
            read_settings(CameraConfig, {"device": 0, **wrong})


def test_buffered_frame_keeps_its_capture_time() -> None:
    stamps, second = FrameTimestamps(), 1_000_000_000
    assert stamps.captured_ns(33_000_000, 900 * second) == 900 * second, "another clock's"
    assert stamps.captured_ns(901 * second - 30_000_000, 901 * second) == 901 * second - 30_000_000
    assert stamps.captured_ns(901 * second, 930 * second) == 901 * second, "the process was stopped meanwhile"
    assert stamps.captured_ns(932 * second, 931 * second) == 931 * second
