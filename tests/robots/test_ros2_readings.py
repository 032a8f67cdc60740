from __future__ import annotations

import math

import numpy as np

from robots.ros2_readings import CaptureTimes, JointReadings, StampClock, StopButton

MS = 1_000_000


class Clocks:
    """This computer's monotonic clock and wall clock."""

    def __init__(self) -> None:
        self.now_ns, self.wall_offset_ns = 10_000 * MS, 1_700_000_000_000 * MS

    def times(self, clock: StampClock) -> CaptureTimes:
        return CaptureTimes(clock, lambda: self.now_ns, lambda: self.now_ns + self.wall_offset_ns)


def test_shared_clock_uses_the_stamp() -> None:
    clocks = Clocks()
    times = clocks.times("shared")
    assert times.captured_ns(clocks.now_ns + clocks.wall_offset_ns - 30 * MS) == clocks.now_ns - 30 * MS


def test_stamp_far_ahead_is_a_clock_error() -> None:
    clocks = Clocks()
    times = clocks.times("shared")
    assert times.captured_ns(clocks.now_ns + clocks.wall_offset_ns + 10 * MS) == clocks.now_ns
    assert times.captured_ns(clocks.now_ns + clocks.wall_offset_ns + 400 * MS) is None
    assert "0.400 s ahead" in times.clock_error


def test_robot_clock_offset_is_the_least() -> None:
    clocks = Clocks()
    times = clocks.times("robot")
    started_ns = clocks.now_ns
    assert times.captured_ns(5 * MS) == started_ns
    clocks.now_ns += 40 * MS
    assert times.captured_ns(15 * MS) == started_ns + 10 * MS, "it was 30 ms longer on its way than the first"
    clocks.now_ns += 2 * MS
    assert times.captured_ns(60 * MS) == clocks.now_ns, "quicker than any before"


def test_robot_clock_drift_is_followed() -> None:
    for drift in (-1e-4, 1e-4):
        clocks = Clocks()
        times, started_ns, newest_ns = clocks.times("robot"), clocks.now_ns, 0
        for tenth in range(36_000):
            sent_ns = tenth * 100 * MS
            clocks.now_ns = started_ns + sent_ns + (2 + 5 * (tenth % 3)) * MS  # the delay
            captured_ns = times.captured_ns(1 + round(sent_ns * (1 + drift)))
            assert captured_ns is not None and newest_ns <= captured_ns <= clocks.now_ns
            assert captured_ns > clocks.now_ns - 20 * MS
            newest_ns = captured_ns


def test_repeated_stamp_is_ignored() -> None:
    clocks = Clocks()
    for clock in ("shared", "robot"):
        times = clocks.times(clock)  # type: ignore[arg-type]
        stamp_ns = clocks.now_ns + clocks.wall_offset_ns - 5 * MS
        assert times.captured_ns(stamp_ns) is not None
        assert times.captured_ns(stamp_ns) is None and times.captured_ns(stamp_ns - MS) is None
    assert clocks.times("arrival").captured_ns(0) == clocks.now_ns


def readings() -> JointReadings:
    return JointReadings(("a", "b", "grip"), "arrival")


def test_joints_of_several_publishers_are_merged() -> None:
    joints = readings()
    joints.update(["b", "other", "a"], [2.0, 9.0, 1.0], [0.2, 0.9, 0.1], 1)
    assert joints.missing(("a", "b", "grip")) == ["grip"]
    joints.update(["grip"], [0.04], [], 1)
    positions, velocities, _ = joints.latest(("a", "b", "grip"))
    np.testing.assert_array_equal(positions, [1.0, 2.0, 0.04])
    np.testing.assert_array_equal(velocities[:2], [0.1, 0.2])
    assert math.isnan(velocities[2])


def test_capture_time_is_that_of_the_oldest_joint() -> None:
    joints = readings()
    joints.update(["a"], [1.0], [], 1)
    first_ns = joints.latest(["a"])[2]
    joints.update(["b"], [1.0], [], 1)
    assert joints.latest(["a", "b"])[2] == first_ns < joints.latest(["b"])[2]


def test_message_with_uneven_lists_is_ignored() -> None:
    joints = readings()
    joints.update(["a", "b"], [1.0], [], 1)
    joints.update(["a"], [1.0], [0.0, 0.0], 1)
    assert joints.missing(["a", "b"]) == ["a", "b"]


def test_joint_without_finite_position_is_ignored() -> None:
    joints = readings()
    joints.update(["a", "b"], [math.nan, 1.0], [math.nan, 0.0], 1)
    assert joints.missing(("a", "b")) == ["a"]
    joints.update(["a", "b"], [0.5, 1.0], [0.0, 0.0], 2)
    measured_ns = joints.latest(["a"])[2]
    joints.update(["a", "b"], [math.inf, 1.0], [0.0, 0.0], 3)
    assert (joints.latest(["a"])[0].tolist(), joints.latest(["a", "b"])[2]) == ([0.5], measured_ns)


def test_short_press_is_reported_once() -> None:
    button = StopButton()
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


def test_stop_button_silence_is_measured() -> None:
    now_s = 5.0
    button = StopButton(clock=lambda: now_s)
    button.update(False)
    now_s += 0.5
    assert button.silence_s == 0.5
    button.update(False)
    assert button.silence_s == 0.0
