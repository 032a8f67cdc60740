"""A driver in this process, for work that needs no session: recording demonstrations, and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hal.safety import SafetyKernel
from hal.station import Station
from user_sys.edge.driver import Driver


@contextmanager
def local_driver(station: Station, frame_stride: int = 1) -> Iterator[Driver]:
    """A connected driver of `station`; closed at the end."""
    driver = Driver(
        station.robot, station.task, SafetyKernel(station.robot.spec), station.cameras, frame_stride=frame_stride
    )
    try:
        driver.connect()
        yield driver
    finally:
        driver.close()
