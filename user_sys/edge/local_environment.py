"""A driver in this process, for work that needs no session: recording demonstrations, and evaluation."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from hal.driver import RobotSetup
from hal.errors import EmergencyStopped, LeaseHeld
from hal.estop import EstopLatch
from hal.lease import MachineLock, robot_lock
from hal.machine_folder import robot_files
from hal.safety import SafetyKernel
from hal.signals import detach_terminal, ending_signals
from user_sys.compose import RobotConfig
from user_sys.edge.environment import RobotEnvironment, TimeStep
from user_sys.edge.recorder import SelectedAction

LOCK_TIMEOUT_S = 10.0  # a run's driver process, which has just been told to end, may have the robot still
LOCK_POLL_S = 0.1

StopCheck = Callable[[], None]


def never_stop() -> None:
    """An `StopCheck` that lets everything go on."""


class RateKeeper:
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
def defer_signals() -> Iterator[StopCheck]:
    """Keeps Ctrl-C, SIGTERM and the end of the terminal from breaking into what a robot is being told.

    What is given, and called in each control period, raises KeyboardInterrupt once one of them has come, and leaving
    does so too. Closing the robot's driver, which stops the robot, is interrupted by none of them. The main thread
    alone enters it.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        detach_terminal(number)
        asked = True

    def attend() -> None:
        if asked:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in ending_signals()}
    try:
        for number in before:
            signal.signal(number, ask)
        yield attend
        attend()
    finally:
        for number in before:
            signal.signal(number, before[number])


@contextmanager
def open_local_environment(
    station: RobotSetup,
    config: RobotConfig,
    frame_stride: int = 1,
    *,
    check_stop: StopCheck = never_stop,
    locked: bool = False,
) -> Iterator[RobotEnvironment]:
    """A connected driver of `station`, which was built from `config`; closed at the end.

    It follows the clock where the robot does, but for a simulated one: that goes as fast as the machine allows. Any
    other is locked on this machine meanwhile (`locked`: the caller has seen to that), and is not moved under an e-stop
    that somebody has pressed on it, be it now (``user-sys stop``).

    Args:
        attend: called before and after connecting, and in each period of a motion that the robot makes by itself; what
            it raises passes through.

    Raises:
        LeaseHeld: another process of this machine drives the robot, and has not let go of it within `LOCK_TIMEOUT_S`.
        EmergencyStopped: a person must re-arm the robot first.
    """
    with ExitStack() as stack:
        if not config.simulated and not locked:
            lock = robot_lock(config.name, "for demonstrations or an evaluation", simulated=False)
            stack.callback(lock.release)
            _wait_for_lock(lock, check_stop)
        check_stop()
        shared = None if config.simulated else robot_files(config.name, simulated=False).latch_path
        if shared is not None:
            EstopLatch(shared).prepare()
        kernel = SafetyKernel(station.robot.spec, shared_latch=shared)
        _require_armed(config, kernel)
        driver = RobotEnvironment(station.robot, station.task, kernel, station.cameras, frame_stride=frame_stride)
        stack.callback(driver.close)
        driver.robot.check_stop = lambda: _check_stop(driver, check_stop)
        driver.connect()
        check_stop()
        driver.real_time = config.follows_clock and not config.simulated
        driver.wait_for_period_end = RateKeeper(station.robot.spec.period_s)
        yield driver


def raise_if_stopped(tick: TimeStep, decision: SelectedAction | None) -> None:
    """A `loop.StepListener` that ends an episode once the robot is stopped, as by a button of its own.

    Raises EmergencyStopped.
    """
    if tick.stopped:
        raise EmergencyStopped("the robot was stopped, and a person must re-arm it")


def _check_stop(driver: RobotEnvironment, attend: StopCheck) -> None:
    driver.check_stop()
    attend()


def _wait_for_lock(lock: MachineLock, attend: StopCheck) -> None:
    until_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            lock.acquire()
            return
        except LeaseHeld:
            if time.monotonic() > until_s:
                raise
        attend()
        time.sleep(LOCK_POLL_S)


def _require_armed(config: RobotConfig, kernel: SafetyKernel) -> None:
    if (stopped := kernel.latched_estop) is not None:
        raise EmergencyStopped(
            f"{config.name} was stopped by {stopped.by}: re-arm it at the console of a run that drives it, or, once "
            f"nobody can come to harm, with `user-sys rearm {config.name}`"
        )
