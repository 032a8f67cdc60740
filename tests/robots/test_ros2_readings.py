from __future__ import annotations

import math

import numpy as np

from robots.ros2_readings import CaptureTimes, JointReadings, StampClock, StopButton

MS = 1_000_000


class Clocks:
    """This computer's monotonic clock, and the wall clock that runs beside it."""

    def __init__(self) -> None:
        self.now_ns, self.wall_offset_ns = 10_000 * MS, 1_700_000_000_000 * MS

    def times(self, clock: StampClock) -> CaptureTimes:
        return CaptureTimes(clock, lambda: self.now_ns, lambda: self.now_ns + self.wall_offset_ns)


def test_on_a_shared_clock_a_reading_is_as_old_as_its_stamp_says() -> None:
    clocks = Clocks()
    times = clocks.times("shared")
    assert times.captured_ns(clocks.now_ns + clocks.wall_offset_ns - 30 * MS) == clocks.now_ns - 30 * MS


def test_a_stamp_a_little_ahead_is_now_and_one_far_ahead_is_told_of() -> None:
    clocks = Clocks()
    times = clocks.times("shared")
    assert times.captured_ns(clocks.now_ns + clocks.wall_offset_ns + 10 * MS) == clocks.now_ns
    assert times.captured_ns(clocks.now_ns + clocks.wall_offset_ns + 400 * MS) is None
    assert "0.400 s ahead" in times.clock_error


def test_on_a_robots_own_clock_the_quickest_message_gives_the_offset() -> None:
    clocks = Clocks()
    times = clocks.times("robot")
    started_ns = clocks.now_ns
    assert times.captured_ns(5 * MS) == started_ns
    clocks.now_ns += 40 * MS
    assert times.captured_ns(15 * MS) == started_ns + 10 * MS, "it was 30 ms longer on its way than the first"
    clocks.now_ns += 2 * MS
    assert times.captured_ns(60 * MS) == clocks.now_ns, "quicker than any before"


def test_a_robots_clock_that_drifts_for_an_hour_does_not_make_its_readings_older() -> None:
    for drift in (-1e-4, 1e-4):
        clocks = Clocks()
        times, started_ns, newest_ns = clocks.times("robot"), clocks.now_ns, 0
        for tenth in range(36_000):
            sent_ns = tenth * 100 * MS
            clocks.now_ns = started_ns + sent_ns + (2 + 5 * (tenth % 3)) * MS  # on its way
            captured_ns = times.captured_ns(1 + round(sent_ns * (1 + drift)))
            assert captured_ns is not None and newest_ns <= captured_ns <= clocks.now_ns
            assert captured_ns > clocks.now_ns - 20 * MS
            newest_ns = captured_ns


def test_a_stamp_that_stands_still_or_goes_back_says_nothing_new() -> None:
    clocks = Clocks()
    for clock in ("shared", "robot"):
        times = clocks.times(clock)  # type: ignore[arg-type]
        stamp_ns = clocks.now_ns + clocks.wall_offset_ns - 5 * MS
        assert times.captured_ns(stamp_ns) is not None
        assert times.captured_ns(stamp_ns) is None and times.captured_ns(stamp_ns - MS) is None
    assert clocks.times("arrival").captured_ns(0) == clocks.now_ns


def readings() -> JointReadings:
    return JointReadings(("a", "b", "grip"), "arrival")


def test_joints_are_told_apart_by_name_whoever_publishes_them_in_whatever_order() -> None:
    known = readings()
    known.update(["b", "other", "a"], [2.0, 9.0, 1.0], [0.2, 0.9, 0.1], 1)
    assert known.missing(("a", "b", "grip")) == ["grip"]
    known.update(["grip"], [0.04], [], 1)
    positions, velocities, _ = known.latest(("a", "b", "grip"))
    np.testing.assert_array_equal(positions, [1.0, 2.0, 0.04])
    np.testing.assert_array_equal(velocities[:2], [0.1, 0.2])
    assert math.isnan(velocities[2])


def test_the_oldest_joint_says_how_old_the_reading_is() -> None:
    known = readings()
    known.update(["a"], [1.0], [], 1)
    first_ns = known.latest(["a"])[2]
    known.update(["b"], [1.0], [], 1)
    assert known.latest(["a", "b"])[2] == first_ns < known.latest(["b"])[2]


def test_a_message_whose_lists_do_not_fit_is_left_out() -> None:
    known = readings()
    known.update(["a", "b"], [1.0], [], 1)
    known.update(["a"], [1.0], [0.0, 0.0], 1)
    assert known.missing(["a", "b"]) == ["a", "b"]


def test_a_joint_that_is_not_measured_yet_is_missing_and_one_that_is_no_more_keeps_its_age() -> None:
    known = readings()
    known.update(["a", "b"], [math.nan, 1.0], [math.nan, 0.0], 1)
    assert known.missing(("a", "b")) == ["a"]
    known.update(["a", "b"], [0.5, 1.0], [0.0, 0.0], 2)
    measured_ns = known.latest(["a"])[2]
    known.update(["a", "b"], [math.inf, 1.0], [0.0, 0.0], 3)
    assert (known.latest(["a"])[0].tolist(), known.latest(["a", "b"])[2]) == ([0.5], measured_ns)


def test_a_press_of_the_stop_button_is_told_though_it_is_over_and_told_once() -> None:
    button = StopButton()
    assert (button.was_received, button.take_pressed()) == (False, False)
    button.update(False)
    assert (button.was_received, button.take_pressed()) == (True, False)
    for pressed in (True, False):  # while the robot holds, and nothing is commanded
        button.update(pressed)
    assert [button.take_pressed(), button.take_pressed()] == [True, False]
    for pressed in (True, True, True):  # its publisher repeats what it says
        button.update(pressed)
        assert button.take_pressed()
    button.update(False)
    assert not button.take_pressed(), "released, and told before"


def test_how_long_the_topic_of_the_stop_button_is_silent_is_known() -> None:
    now_s = 5.0
    button = StopButton(clock=lambda: now_s)
    button.update(False)
    now_s += 0.5
    assert button.silence_s == 0.5
    button.update(False)
    assert button.silence_s == 0.0
