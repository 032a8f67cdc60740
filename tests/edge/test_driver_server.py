"""A driver's server by a clock that moves when told: when it holds, what it obeys in the middle of a control period."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from edge_kit import RIGHT, STILL, WatchedRobot, until

from hal.lease import Fence, MachineLock
from hal.robot import StopLevel
from hal.safety import Reason, SafetyKernel
from hal.station import Station
from robots.fake import FakeTask
from user_sys.edge.driver import Driver, Tick
from user_sys.edge.driver_client import RemoteDriver
from user_sys.edge.driver_process import DriverServer
from user_sys.edge.driver_wire import endpoint

PERIOD_NS = 100_000_000


class Site:
    """A served robot of 10 Hz and sessions to it; time stands still until `pass_ns`."""

    def __init__(self) -> None:
        self.now_ns = 10**12
        clock = lambda: self.now_ns  # noqa: E731
        self.robot = WatchedRobot(clock=clock)
        self.driver = Driver(self.robot, FakeTask(), SafetyKernel(self.robot.spec, clock=clock))
        station = Station(name="fake-0", robot=self.robot, cameras=(), task=FakeTask())
        self.server = DriverServer(self.driver, station, Fence(), endpoint("fake-0"), clock)
        self.client, self.anyone = RemoteDriver("fake-0", token=1), RemoteDriver("fake-0")

    def pass_ns(self, ns: int) -> list[StopLevel]:
        """Lets time pass while somebody talks; all stops so far. The second answer comes after the watchdog's look."""
        self.now_ns += ns
        self.anyone.describe()
        self.anyone.describe()
        return self.robot.stops


@pytest.fixture
def site(runtime: Path) -> Iterator[Site]:
    with MachineLock("fake-0"):
        made = Site()
        made.driver.connect()
        serving = threading.Thread(target=made.server.run)
        serving.start()
        try:
            made.client.attach()
            yield made
        finally:
            made.server.stop.set()
            made.now_ns += 10 * PERIOD_NS
            serving.join(60)
            made.client.close()
            made.anyone.close()
            assert not serving.is_alive()


def test_a_silent_session_is_held_at_two_control_periods_whatever_others_say(site: Site) -> None:
    tick = site.client.command(RIGHT)
    assert tick.held == 0 and tick.observation["observation.state"][4] > 0
    for _ in range(9):
        assert site.pass_ns(2 * PERIOD_NS // 10) == []
    assert site.pass_ns(2 * PERIOD_NS // 10 - 1) == []
    assert site.pass_ns(1) == [StopLevel.HOLD]
    assert site.pass_ns(PERIOD_NS - 1) == [StopLevel.HOLD]
    assert site.pass_ns(1) == [StopLevel.HOLD] * 2, "and in each control period from then on"
    tick = site.client.command(STILL)
    assert tick.held == 2 and tick.observation["observation.state"][4:].tolist() == [0, 0, 0]
    assert site.client.command(STILL).held == 0


def during(site: Site, call: Callable[[], Tick]) -> tuple[threading.Thread, list[Tick]]:
    """A control period in real time that has begun, and lasts until time passes."""
    ticks: list[Tick] = []
    site.client.real_time = True
    before = len(site.robot.commands)
    driving = threading.Thread(target=lambda: ticks.append(call()))
    driving.start()
    until(lambda: len(site.robot.commands) > before, "the period has begun")
    return driving, ticks


def test_an_emergency_stop_is_obeyed_in_the_middle_of_a_control_period(site: Site) -> None:
    driving, ticks = during(site, lambda: site.client.command(RIGHT))
    site.anyone.emergency_stop("ada")
    assert not ticks and driving.is_alive()
    assert site.robot.stops and set(site.robot.stops) == {StopLevel.SAFE}
    site.now_ns += PERIOD_NS
    driving.join(60)
    site.client.real_time = False
    tick = site.client.hold()
    assert tick.stopped and tick.reasons == Reason.ESTOP
    tick = site.client.command(RIGHT)
    assert tick.stopped and tick.applied is None and len(site.robot.commands) == 1


def test_whoever_else_speaks_in_a_control_period_waits_for_its_end(site: Site) -> None:
    driving, ticks = during(site, lambda: site.client.command(RIGHT))
    heard: list[Any] = []
    asking = threading.Thread(target=lambda: heard.append(site.anyone.describe()))
    asking.start()
    site.now_ns += PERIOD_NS - 1
    asking.join(0.2)
    assert not ticks and not heard
    site.now_ns += 1
    driving.join(60)
    asking.join(60)
    assert len(ticks) == len(heard) == 1
