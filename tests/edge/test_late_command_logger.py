"""The logged cause of a command after a watchdog hold."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

from hal.spec import Array
from hal.task import TaskOutcome
from user_sys.edge.environment import LateCommandLogger, TimeStep

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns


class HeldDriver:
    """A robot that the watchdog held before the second command. A reply takes 2 ms and a command 3."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._held = clock, [0, 1]

    def reset(self, seed: int) -> TimeStep:
        return self._tick(0, 0)

    def hold(self) -> TimeStep:
        return self._tick(0, 0)

    def step(self, action: Array) -> TimeStep:
        self._clock.now_ns += 3 * MS
        return self._tick(self._clock.now_ns, self._held.pop(0))

    def _tick(self, command_ns: int, held: int) -> TimeStep:
        captured = self._clock.now_ns
        self._clock.now_ns += 2 * MS
        return TimeStep({}, {}, captured, np.zeros(1), 0, command_ns, TaskOutcome(0.0, False), held, False)


def test_late_command_is_logged_with_its_parts(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    driver = LateCommandLogger(HeldDriver(clock), "arm-0", clock)
    with caplog.at_level(logging.WARNING):
        driver.reset(0)
        driver.step(np.zeros(1))
        assert caplog.messages == [], "that one was in time"
        clock.now_ns += 40 * MS
        driver.step(np.zeros(1))
    (line,) = caplog.messages
    assert line.startswith("command.late robot=arm-0: 45.0 ms after its observation: 2.0 until the session had it")
    assert line.endswith("3.0 until the driver applied it")
    computing, waiting = map(float, re.findall(r"([\d.]+) (?:computing|waiting)", line))
    assert computing + waiting == pytest.approx(40.0, abs=0.11)
