"""Cameras render the world; without EGL the error says what to install."""

from __future__ import annotations

import itertools
import sys
import threading
import time

import mujoco
import numpy as np
import pytest

from hal.conformance import CameraConformance
from hal.errors import HardwareLost, SpecError
from hal.spec import CameraSpec
from sim.arms import ARMS
from sim.rendering import SimCamera, make_cameras
from sim.robot import SimRobot, SimRobotConfig
from sim.tasks import make_task


def _robot(**options: object) -> SimRobot:
    robot = SimRobot(SimRobotConfig(**options))  # type: ignore[arg-type]
    robot.connect()
    return robot


class TestSimCamera(CameraConformance):
    def make_camera(self) -> SimCamera:
        robot = _robot()
        return SimCamera(robot, robot.spec.cameras[0])


def _orange(image: np.ndarray) -> int:
    red, green, blue = (image[..., i].astype(int) for i in range(3))
    return int(((red > 120) & (red > 2 * blue) & (red > 1.6 * green)).sum())


@pytest.mark.parametrize("model", ARMS)
def test_both_cameras_show_the_cube(model: str) -> None:
    robot = _robot(model=model)
    make_task("lift", ARMS[model]).reset(robot, np.random.default_rng(3))
    for camera in make_cameras(robot).values():
        camera.connect()
        assert _orange(camera.read().image) > 20, camera.spec.name
        camera.close()


def test_cameras_follow_the_moving_cube() -> None:
    robot = _robot()
    cameras = make_cameras(robot)
    assert list(cameras) == ["front", "wrist"]
    for camera in cameras.values():
        camera.connect()
    robot.world.reset(np.array([0.48, 0.0, 0.2]), {"cube": (0.52, 0.0, 0.02, 0.0)})
    pictures = {name: camera.read().image for name, camera in cameras.items()}
    robot.world.reset(np.array([0.48, 0.0, 0.2]), {"cube": (0.42, 0.09, 0.02, 0.0)})
    assert (cameras["front"].read().image != pictures["front"]).any()
    cameras["front"].close()
    assert _orange(cameras["wrist"].read().image) >= 0
    cameras["wrist"].close()


def test_robots_render_independently() -> None:
    robots = [_robot(), _robot(scene=("reach",), image_height=96, image_width=160)]
    cameras = [SimCamera(robot, robot.spec.cameras[0]) for robot in robots]
    for camera in cameras:
        camera.connect()
    first = [camera.read().image for camera in cameras]
    assert [image.shape for image in first] == [(128, 128, 3), (96, 160, 3)]
    assert all((camera.read().image == image).all() for camera, image in zip(cameras, first, strict=True))
    cameras[0].close()
    assert (cameras[1].read().image == first[1]).all()
    cameras[1].close()


def test_images_follow_camera_rate_and_reset() -> None:
    robot = _robot(rate_hz=100.0, camera_hz=30.0)
    camera = SimCamera(robot, robot.spec.cameras[0])
    assert camera.spec.rate_hz == 30.0
    camera.connect()
    stamps = []
    for _ in range(9):
        stamps.append(camera.read().t_capture_ns)
        robot.command(np.array(robot.spec.neutral, np.float32))
    assert [a < b for a, b in itertools.pairwise(stamps)] == [False, False, False, True] * 2
    robot.world.reset(np.array([0.48, 0.0, 0.2]), {"cube": (0.52, 0.0, 0.02, 0.0)})
    robot.command(np.array(robot.spec.neutral, np.float32))
    assert camera.read().t_capture_ns > stamps[-1]
    camera.close()


def test_real_time_camera_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    cameras = {}
    for live in (True, False):
        robot = _robot(rate_hz=100.0)
        cameras[live] = robot, SimCamera(robot, robot.spec.cameras[0])
        cameras[live][1].real_time = live
        cameras[live][1].connect()
    (robot, camera), (twin, other) = cameras[True], cameras[False]
    first, render, gate = camera.read(), mujoco.mjr_render, threading.Event()
    monkeypatch.setattr(mujoco, "mjr_render", lambda *args: gate.wait(60) and render(*args))
    for moved in (robot, twin):
        for _ in range(5):
            moved.command(np.array([0.01, 0, 0, 0], np.float32))
    asked_ns = time.monotonic_ns()
    assert camera.read() is first
    robot.command(np.array([0.01, 0, 0, 0], np.float32))
    assert camera.read() is first
    late_ns = time.monotonic_ns()
    gate.set()
    while (newest := camera.read()) is first:
        assert time.monotonic_ns() < late_ns + 60 * 10**9
        time.sleep(0.001)
    assert asked_ns < newest.t_capture_ns < late_ns
    assert (newest.image == other.read().image).all()  # of the world at the time of the request
    robot.world.reset(np.array([0.48, 0.0, 0.2]), {"cube": (0.52, 0.0, 0.02, 0.0)})
    twin.world.reset(np.array([0.48, 0.0, 0.2]), {"cube": (0.52, 0.0, 0.02, 0.0)})
    assert (camera.read().image == other.read().image).all()
    camera.close()
    other.close()


def test_same_start_gives_same_image() -> None:
    pictures = []
    for _ in range(2):
        robot = _robot()
        make_task("lift").reset(robot, np.random.default_rng(5))
        camera = SimCamera(robot, robot.spec.cameras[0])
        camera.connect()
        pictures.append(camera.read().image)
        camera.close()
    assert (pictures[0] == pictures[1]).all()


def test_randomised_scenes_differ_in_pictures_and_mass() -> None:
    pictures, masses = [], []
    robot = _robot(scene=("place",), randomise=1.0)
    camera = SimCamera(robot, robot.spec.cameras[0])
    camera.connect()
    for seed in (1, 2, 1):
        make_task("place").reset(robot, np.random.default_rng(seed))
        pictures.append(camera.read().image.mean(axis=(0, 1)))
        masses.append(float(robot.world.model.body("cube").mass[0]))
    camera.close()
    assert np.abs(pictures[0] - pictures[1]).max() > 3 and masses[0] != masses[1]
    assert np.array_equal(pictures[0], pictures[2]) and masses[0] == masses[2], "by the seed"


def test_randomised_wrist_camera_still_shows_the_gripper() -> None:
    shares = []
    for randomise in (0.0, 1e-6):
        robot = _robot(randomise=randomise)
        camera = SimCamera(robot, robot.spec.cameras[1])
        camera.connect()
        make_task("lift").reset(robot, np.random.default_rng(1))
        shares.append(float((camera.read().image.max(axis=-1) < 60).mean()))
        camera.close()
    assert shares[0] > 0.02 and shares[1] == pytest.approx(shares[0], rel=0.2), "nothing near the camera is cut off"


def test_unknown_camera_and_oversized_image_are_refused() -> None:
    robot = _robot()
    for spec, words in (
        (CameraSpec(name="ceiling", height=64, width=64, rate_hz=10), "no camera 'ceiling'"),
        (CameraSpec(name="front", height=4000, width=64, rate_hz=10), "is too large"),
    ):
        camera = SimCamera(robot, spec)
        with pytest.raises(SpecError, match=words):
            camera.connect()
        camera.close()


def test_missing_egl_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    robot = _robot()
    camera = SimCamera(robot, robot.spec.cameras[0])
    monkeypatch.setitem(sys.modules, "mujoco.egl", None)  # as if its import failed
    with pytest.raises(HardwareLost, match="libegl1 libegl-mesa0"):
        camera.connect()
    camera.close()
