"""Why a command came too late: what the session did in the time from an observation to its command."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

from hal.spec import Array
from user_sys.edge.driver import DriverPort, Tick

log = logging.getLogger(__name__)

_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # of the thread on Linux


@dataclass(frozen=True)
class _Moment:
    """What the calling thread has used until now."""

    at_ns: int
    processor_ns: int
    page_faults: int
    preemptions: int


class LatenessLog:
    """A `DriverPort` that passes orders on to another. One thread uses it.

    After each command before which the watchdog held the robot it logs ``command.late``, with the parts of the time
    from the observation to the command: until the session had the observation, computing, waiting for the processor or
    for others, and until the driver applied the command.
    """

    def __init__(self, driver: DriverPort, robot: str, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._driver, self._robot, self._clock = driver, robot, clock
        self._seen: tuple[Tick, _Moment] | None = None

    def reset(self, seed: int) -> Tick:
        return self._saw(self._driver.reset(seed))

    def hold(self) -> Tick:
        return self._saw(self._driver.hold())

    def command(self, action: Array) -> Tick:
        sent, before = self._now(), self._seen
        after = self._driver.command(action)
        if after.held and before is not None:
            self._tell(*before, sent, after.t_command_ns or self._clock())
        return self._saw(after)

    def _saw(self, tick: Tick) -> Tick:
        self._seen = tick, self._now()
        return tick

    def _now(self) -> _Moment:
        used = resource.getrusage(_THREAD)
        return _Moment(self._clock(), time.thread_time_ns(), used.ru_minflt + used.ru_majflt, used.ru_nivcsw)

    def _tell(self, tick: Tick, seen: _Moment, sent: _Moment, applied_ns: int) -> None:
        computing_ns = sent.processor_ns - seen.processor_ns
        log.warning(
            "command.late robot=%s: %.1f ms after its observation: %.1f until the session had that, %.1f computing, "
            "%.1f waiting (%d page faults, preempted %d times), %.1f until the driver applied it",
            self._robot,
            (applied_ns - tick.t_capture_ns) / 1e6,
            (seen.at_ns - tick.t_capture_ns) / 1e6,
            computing_ns / 1e6,
            (sent.at_ns - seen.at_ns - computing_ns) / 1e6,
            sent.page_faults - seen.page_faults,
            sent.preemptions - seen.preemptions,
            (applied_ns - sent.at_ns) / 1e6,
        )
