"""Decoding of ROS messages. This test does not need ROS."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import simplejpeg

from hal.errors import HardwareLost
from hal.resource import Kind
from robots.ros2_node import graph_records
from robots.ros2_readings import (
    CaptureTimes,
    JointReadings,
    StopButton,
    decode_jpeg_image,
    decode_raw_image,
    jpeg_image_size,
)
from robots.ros2_spec import StampClock

MS = 1_000_000
NOW_NS, WALL_NS = 10_000 * MS, 1_700_000_000_000 * MS


def times(clock: StampClock) -> CaptureTimes:
    return CaptureTimes(clock, lambda: NOW_NS, lambda: WALL_NS)


def test_shared_clock_uses_the_stamp_unless_it_is_ahead() -> None:
    shared = times("shared")
    assert shared.captured_ns(WALL_NS - 30 * MS) == NOW_NS - 30 * MS
    assert shared.captured_ns(WALL_NS + 10 * MS) == NOW_NS
    assert shared.captured_ns(WALL_NS + 400 * MS) is None
    assert "0.400 s ahead" in shared.clock_error


@pytest.mark.parametrize("clock", ["shared", "robot"])
def test_repeated_stamp_is_ignored(clock: StampClock) -> None:
    of_sender = times(clock)
    assert of_sender.captured_ns(WALL_NS - 5 * MS) is not None
    assert of_sender.captured_ns(WALL_NS - 5 * MS) is None and of_sender.captured_ns(WALL_NS - 6 * MS) is None
    assert times("arrival").captured_ns(0) == NOW_NS


def test_robot_clock_that_begins_anew_is_followed() -> None:
    now_ns, newest_ns = NOW_NS, 0
    robot = CaptureTimes("robot", lambda: now_ns, lambda: WALL_NS)
    for begun_ns in (WALL_NS, 20_000 * MS, 3_000 * MS):  # a computer without a battery begins at the same date
        for sent, delay_ns in enumerate((8 * MS, 2 * MS, 5 * MS)):
            sent_ns = now_ns
            now_ns = sent_ns + delay_ns
            captured_ns = robot.captured_ns(begun_ns + sent * 100 * MS)
            assert captured_ns is not None and newest_ns <= captured_ns <= now_ns <= captured_ns + 8 * MS
            newest_ns, now_ns = captured_ns, sent_ns + 100 * MS
        now_ns += 60_000 * MS


def test_joints_of_several_publishers_are_merged() -> None:
    joints = JointReadings(("a", "b", "grip"), "arrival")
    joints.update(["b", "other", "a"], [2.0, 9.0, 1.0], [0.2, 0.9, 0.1], 1)
    joints.update(["a", "grip"], [1.0], [], 1)  # uneven
    assert joints.missing() == ["grip"]
    joints.update(["grip", "a"], [0.04, math.nan], [], 1)  # hardware that has not measured yet
    positions, velocities, captured_ns = joints.latest()
    np.testing.assert_array_equal(positions, [1.0, 2.0, 0.04])
    np.testing.assert_array_equal(velocities[:2], [0.1, 0.2])
    assert math.isnan(velocities[2])
    joints.update(["grip"], [0.05], [], 2)
    assert joints.latest()[2] == captured_ns, "that of the oldest joint"


def test_short_press_is_reported_once_and_silence_is_measured() -> None:
    now_s = 5.0
    button = StopButton(clock=lambda: now_s)
    assert (button.was_received, button.take_pressed()) == (False, False)
    button.update(False)
    assert (button.was_received, button.take_pressed()) == (True, False)
    for pressed in (True, False):  # while the robot holds without commands
        button.update(pressed)
    assert [button.take_pressed(), button.take_pressed()] == [True, False]
    for pressed in (True, True, True):  # its publisher repeats the message
        button.update(pressed)
        assert button.take_pressed()
    button.update(False)
    assert not button.take_pressed(), "released, and reported before"
    now_s += 0.5
    assert button.silence_s == 0.5


def picture(encoding: str, pixels: np.ndarray, pad: int = 0) -> SimpleNamespace:  # type: ignore[type-arg]
    height, width = pixels.shape[:2]
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (0, pad)))
    return SimpleNamespace(encoding=encoding, height=height, width=width, step=rows.shape[1], data=rows.tobytes())


def test_encodings_decode_to_rgb_without_padding() -> None:
    rgb = np.random.default_rng(0).integers(0, 255, (4, 5, 3), np.uint8)
    opaque = np.full((4, 5, 1), 255, np.uint8)
    for encoding, pixels in {
        "rgb8": rgb,
        "bgr8": rgb[..., ::-1],
        "rgba8": np.concatenate([rgb, opaque], axis=2),
        "bgra8": np.concatenate([rgb[..., ::-1], opaque], axis=2),
    }.items():
        np.testing.assert_array_equal(decode_raw_image(picture(encoding, pixels, pad=3)), rgb)
    grey = decode_raw_image(picture("mono8", rgb[..., :1]))
    np.testing.assert_array_equal(grey, np.repeat(rgb[..., :1], 3, axis=2))


def test_unreadable_image_is_refused() -> None:
    with pytest.raises(HardwareLost, match="yuv422"):
        decode_raw_image(picture("yuv422", np.zeros((2, 2, 2), np.uint8)))
    short = picture("rgb8", np.zeros((2, 2, 3), np.uint8))
    short.data = short.data[:5]
    with pytest.raises(HardwareLost, match="5 bytes"):
        decode_raw_image(short)
    for decode in (decode_jpeg_image, jpeg_image_size):
        with pytest.raises(HardwareLost, match="not a readable JPEG"):
            decode(b"nonsense")
    assert jpeg_image_size(simplejpeg.encode_jpeg(np.zeros((16, 24, 3), np.uint8))) == (16, 24)
    image = decode_jpeg_image(simplejpeg.encode_jpeg(np.full((16, 16, 3), (200, 0, 0), np.uint8), colorspace="RGB"))
    assert image[8, 8, 0] > 180 and image[8, 8, 2] < 30


def test_graph_records_have_controllers_and_cameras() -> None:
    published = {
        "/joint_states": ["sensor_msgs/msg/JointState"],
        "/wrench": ["geometry_msgs/msg/WrenchStamped"],
        "/camera/image_raw": ["sensor_msgs/msg/Image"],
        "/rosout": ["rcl_interfaces/msg/Log"],
    }
    subscribed = {
        "/left/arm/joint_trajectory": ["trajectory_msgs/msg/JointTrajectory"],
        "/forward/commands": ["std_msgs/msg/Float64MultiArray"],
        "/unrelated": ["std_msgs/msg/Float64MultiArray"],
    }
    camera, arm = graph_records(published, subscribed, 7)
    assert (camera.kind, camera.name) == (Kind.CAMERA, "ros2/7/camera/image_raw")
    assert (arm.kind, arm.labels) == (Kind.BUS, {"domain": "7", "topic": "/joint_states"})
    assert arm.capabilities == ("position:/forward", "trajectory:/left/arm", "wrench:/wrench")
