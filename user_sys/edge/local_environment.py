"""An environment in this process, without a session: for recording demonstrations, and for evaluation.

It has no watchdog: while the program computes between two control periods, for example a policy's inference, it neither
holds the robot nor reads the e-stop latch of ``user-sys stop``. Keep the
robot's own e-stop within reach.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from hal.driver import RobotSetup
from hal.errors import EmergencyStopped, LeaseHeld, StoppedAtRobot
from hal.estop import EstopLatch
from hal.lease import MachineLock, robot_lock
from hal.machine_folder import robot_files
from hal.safety import SafetyKernel
from hal.signals import detach_terminal, ending_signals
from user_sys.compose import RobotConfig
from user_sys.edge.environment import PeriodGrid, RobotEnvironment, TimeStep
from user_sys.edge.recorder import SelectedAction

LOCK_TIMEOUT_S = 10.0  # a stopping driver process of a run may still have the robot
LOCK_POLL_S = 0.1

StopCheck = Callable[[], None]
"""Called in each control period. It raises an error to end the work."""


def never_stop() -> None:
    """A `StopCheck` that never raises."""


@contextmanager
def defer_signals() -> Iterator[StopCheck]:
    """Defers Ctrl-C, SIGTERM and the end of the terminal to the next stop check. For the main thread.

    The stop check raises KeyboardInterrupt after such a signal, and so does the exit of the context. No signal
    interrupts the close of the environment, which stops the robot.
    """
    signalled = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal signalled
        detach_terminal(number)
        signalled = True

    def check_stop() -> None:
        if signalled:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in ending_signals()}
    try:
        for number in before:
            signal.signal(number, on_signal)
        yield check_stop
        check_stop()
    finally:
        for number in before:
            signal.signal(number, before[number])


@contextmanager
def open_local_environment(
    setup: RobotSetup,
    config: RobotConfig,
    *,
    check_stop: StopCheck = never_stop,
) -> Iterator[RobotEnvironment]:
    """Yields a connected environment of `setup`, which was built from `config`; closes it at the end.

    A simulated robot runs as fast as it can, with pictures as often as in a run. A real robot follows the clock, is
    locked on this machine meanwhile, and does not move under an e-stop, including one that is pressed during the work
    (``user-sys stop``).

    Args:
        check_stop: called before and after the connection, and in each control period of a motion by the robot itself;
            its errors pass through.

    Raises:
        LeaseHeld: another process of this machine drives the robot, for longer than `LOCK_TIMEOUT_S`.
        EmergencyStopped: a person must re-arm the robot first.
    """
    with ExitStack() as stack:
        if not config.simulated:
            lock = robot_lock(config.name, "for demonstrations or an evaluation", simulated=False)
            stack.callback(lock.release)
            _wait_for_lock(lock, check_stop)
        check_stop()
        shared = None if config.simulated else robot_files(config.name, simulated=False).latch_path
        if shared is not None:
            EstopLatch(shared).prepare()
        kernel = SafetyKernel(setup.robot.spec, shared_latch=shared)
        _require_armed(config, kernel)
        stride = config.picture_stride
        environment = RobotEnvironment(
            setup.robot, setup.task, kernel, setup.cameras, frame_stride=stride, name=config.name
        )
        stack.callback(environment.close)
        environment.robot.check_stop = lambda: _check_both(environment, check_stop)
        stack.enter_context(_latch_own_stop(environment))
        environment.connect()
        check_stop()
        environment.real_time = config.follows_clock and not config.simulated
        period = PeriodGrid(int(setup.robot.spec.period_s * 1e9))
        environment.wait_for_period_end = lambda: _sleep_until(period.begin())
        environment.wait_for_command = lambda: period.wait_for_command(_sleep_until)
        yield environment


def _sleep_until(end_ns: int) -> None:
    time.sleep(max(0, end_ns - time.monotonic_ns()) / 1e9)


def raise_if_stopped(time_step: TimeStep, selected: SelectedAction | None) -> None:
    """A `loop.StepListener` that ends an episode when the robot is stopped, for example by its own button.

    Raises EmergencyStopped.
    """
    if time_step.stopped:
        why = f": {time_step.stopped_why}" if time_step.stopped_why else ""
        raise EmergencyStopped(f"the robot was stopped, and a person must re-arm it{why}")


@contextmanager
def _latch_own_stop(environment: RobotEnvironment) -> Iterator[None]:
    try:
        yield
    except StoppedAtRobot as error:
        environment.latch_own_stop(error)
        raise


def _check_both(environment: RobotEnvironment, check_stop: StopCheck) -> None:
    environment.check_stop()
    check_stop()


def _wait_for_lock(lock: MachineLock, check_stop: StopCheck) -> None:
    until_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            lock.acquire()
            return
        except LeaseHeld:
            if time.monotonic() > until_s:
                raise
        check_stop()
        time.sleep(LOCK_POLL_S)


def _require_armed(config: RobotConfig, kernel: SafetyKernel) -> None:
    if (stopped := kernel.latched_estop) is not None:
        raise EmergencyStopped(
            f"{config.name} was stopped by {stopped.by}: re-arm it at the console of a run that drives it, or, when "
            f"it is safe, with `user-sys rearm {config.name}`"
        )
