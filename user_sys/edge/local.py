"""A driver in this process, for work that needs no session: recording demonstrations, and evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hal.safety import SafetyKernel
from hal.station import Station
from user_sys.compose import RobotConfig
from user_sys.edge.driver import Driver


class Pace:
    """Called once in a control period: blocks until that is over. Lateness is never made up by haste."""

    def __init__(
        self,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._period_s, self._clock, self._sleep = period_s, clock, sleep
        self._next_s = clock()

    def __call__(self) -> None:
        now_s = self._clock()
        self._next_s += self._period_s
        if self._next_s < now_s:
            self._next_s = now_s + self._period_s
        self._sleep(self._next_s - now_s)


@contextmanager
def local_driver(station: Station, config: RobotConfig, frame_stride: int = 1) -> Iterator[Driver]:
    """A connected driver of `station`, which was built from `config`; closed at the end.

    It follows the clock where the robot does, but for a simulated one: that goes as fast as the machine allows.
    """
    driver = Driver(
        station.robot, station.task, SafetyKernel(station.robot.spec), station.cameras, frame_stride=frame_stride
    )
    try:
        driver.connect()
        driver.real_time = config.real_time and not config.simulated
        driver.pace = Pace(station.robot.spec.period_s)
        yield driver
    finally:
        driver.close()
