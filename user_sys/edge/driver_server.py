"""The driver process: ``python -m user_sys.edge.driver_server ROBOT.yaml STATE``.

It owns the robot while it runs, executes the commands of the session with the newest token, and keeps the robot safe
without a session. ``watchdog_periods`` control periods after the last command it holds the robot; ``safe_stop_after_s``
later it stops it safely. A session may be killed, stopped or replaced at any time: the robot holds at most.

- **Robots that follow the clock** hold within ``watchdog_periods`` of the time that the last command was applied. Their
  session has a little less than one control period to send the next command.
- **Simulated robots that run as fast as they can** stand still between commands, so the watchdog counts from the reply,
  and waits for a policy server (`DriverRequest.max_gap_s`). It counts from the reply too while any robot holds, and
  after a reset.
- **A lost robot** ends the process with exit status 4 (`EXIT_ROBOT_LOST`), and its supervisor restarts it. To start is
  to connect: no state of the lost connection remains. The e-stop latch and the fencing token are on disk. A robot
  without a connection is in its own safe state. If a person stopped it at the robot itself, the e-stop latches: it does
  not move by itself once it is connected again. Exit status 2 (`EXIT_FATAL`) means that a restart does not help.
- **A robot that another run of this machine drives** makes the process wait. It logs the owner.
- **An expired lease** holds the robot, with or without another session. Requests that would move the robot are answered
  by a hold until a renewal arrives. The expiry uses a clock that no clock setting changes.

The process imports no torch, opens no network connection, and listens on one socket in a folder of its user. An e-stop
of any user of this computer arrives through the shared latch file, which it reads every `LATCH_POLL_MS`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from hal.driver import RobotSetup
from hal.durable import make_folder_durably
from hal.errors import HalError, HardwareLost, LeaseError, LeaseHeld, SpecError, StaleToken, StoppedAtRobot
from hal.estop import EstopLatch
from hal.lease import Fence, MachineLock, lease_clock_ns, robot_lock
from hal.machine_folder import make_runtime_folder, robot_files
from hal.motion_limits import SafetyReason
from hal.process_supervisor import set_parent_death_signal
from hal.safety import SafetyKernel
from hal.signals import stop_on_signals
from hal.spec import ACTION, Array
from user_sys.codec import decode_packet, encode_packet
from user_sys.compose import RobotConfig, build_robot_setup
from user_sys.config import load
from user_sys.edge.driver_client import (
    LATCH_FILE,
    WAITING_LOG_PREFIX,
    DriverReply,
    DriverRequest,
    driver_endpoint,
    encode_time_step,
)
from user_sys.edge.environment import PeriodGrid, RobotEnvironment
from user_sys.edge.realtime import THREAD_SWITCH_INTERVAL_S, enable_realtime, reset_priority_of_new_threads
from user_sys.errors import UserSysError, WireError
from user_sys.logs import configure_logging

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1 << 20
MAX_QUEUED_REQUESTS = 32  # requests that arrive during a control period
PRECISE_SLEEP_NS = 2_000_000  # the end of a control period is slept through, as polling counts in milliseconds
LATCH_POLL_MS = 10  # how often an idle server reads the shared e-stop latch
LINGER_MS = 200  # for the last reply
LOCK_RETRY_S = 0.5
CLOSE_TIMEOUT_S = 15.0
EXIT_FATAL, EXIT_ROBOT_LOST = 2, 4


class _LeaseDeadline:
    """The newest token, and when its lease expires."""

    def __init__(self, robot: str, clock: Callable[[], int]) -> None:
        self._robot, self._clock = robot, clock
        self._lease = (0, 0)
        self._is_logged = False

    def extend(self, token: int, until_ns: int) -> None:
        """A newer token replaces an older one; of the same token the later time counts."""
        self._lease = max(self._lease, (token, until_ns))

    def is_expired(self) -> bool:
        """Logs each expiry once."""
        token, until_ns = self._lease
        expired = self._clock() >= until_ns
        if expired and not self._is_logged:
            log.warning("lease.expired robot=%s token=%d: holding the robot until a renewal", self._robot, token)
        self._is_logged = expired
        return expired


class _EstopOrder:
    """Orders the e-stops and re-arms of a session: an older one never undoes a newer one."""

    def __init__(self) -> None:
        self._press = self._rearm = ("", 0)  # session and e-stop sequence of the newest

    def accept_press(self, request: DriverRequest) -> bool:
        """False if the session has re-armed since."""
        if _is_superseded(request, self._rearm):
            return False
        self._press = (request.session, request.estop_sequence)
        return True

    def may_rearm(self, request: DriverRequest) -> bool:
        """False if the session has pressed the e-stop since."""
        return not _is_superseded(request, self._press)

    def note_rearm(self, request: DriverRequest) -> None:
        self._rearm = (request.session, request.estop_sequence)


class DriverServer:
    """Serves one robot on its local socket. `run` blocks; `stop` may be set from any thread or signal handler.

    Attributes:
        refused_realtime: the settings that the system refused this process, for the robot's status.
        real_time: control periods follow the clock for every session, and the watchdog counts from commands.
    """

    def __init__(
        self,
        environment: RobotEnvironment,
        setup: RobotSetup,
        fence: Fence,
        address: str,
        clock: Callable[[], int] = time.monotonic_ns,
        owner: str = "",
        latch: str = "",
        lease_clock: Callable[[], int] = lease_clock_ns,
    ) -> None:
        """Args:
        fence: stores the newest session's token.
        address: of the local socket.
        clock: nanoseconds; for control periods and the watchdog.
        owner: the state folder that the robot is driven for; sessions of another folder are refused.
        latch: the e-stop's latch file that the next driver reads.
        lease_clock: nanoseconds; for the expiry of leases.
        """
        self._environment, self._setup, self._fence, self._address = environment, setup, fence, address
        self._owner, self._latch = owner, latch
        self._period = PeriodGrid(int(environment.spec.period_s * 1e9), clock)
        self._lease = _LeaseDeadline(setup.name, lease_clock)
        self._estops = _EstopOrder()
        self._held_periods = 0
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self.refused_realtime = ""
        self.real_time = False
        self.stop = threading.Event()

    def run(self) -> None:
        """Raises HardwareLost when the robot is lost, after the reply to a pending request."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.bind(self._address)
        self._environment.wait_for_period_end = lambda: self._wait_until(self._period.begin())
        self._environment.wait_for_command = lambda: self._period.wait_for_command(self._wait_until)
        self._environment.robot.check_stop = self._check_stop
        self._period.feed_watchdog(self._watchdog_periods)
        try:
            while not self.stop.is_set():
                self._serve()
        finally:
            self._socket.close()

    @property
    def _watchdog_periods(self) -> int:
        return self._environment.spec.limits.watchdog_periods

    def _serve(self) -> None:
        """Answers one request, or runs the watchdog when it is due. Requests without a command do not postpone that."""
        request = self._queue.popleft() if self._queue else self._next_request(self._period.watchdog_ns)
        if request is not None:
            self._answer(*request)
        if self._period.clock() >= self._period.watchdog_ns:
            self._run_watchdog()

    def _next_request(self, until_ns: int) -> tuple[bytes, bytes] | None:
        """The sender and packet of the next request; None if none arrives until then, or a malformed one does."""
        whole_ms, rest_ns = divmod(max(0, until_ns - self._period.clock()), 1_000_000)
        if not self._poll(whole_ms):
            time.sleep(rest_ns / 1e9)  # polling counts in milliseconds
            if not self._socket.poll(0):
                return None
        frames = self._socket.recv_multipart()
        if len(frames) != 3 or frames[1]:
            log.warning("request.malformed robot=%s frames=%d", self._setup.name, len(frames))
            return None
        return frames[0], frames[2]

    def _poll(self, timeout_ms: int) -> bool:
        """Whether a message arrived in time. Meanwhile an e-stop of another program stops the robot."""
        while timeout_ms > LATCH_POLL_MS:
            if self._socket.poll(LATCH_POLL_MS):
                return True
            self._environment.stop_if_latched()
            timeout_ms -= LATCH_POLL_MS
        return bool(self._socket.poll(timeout_ms))

    def _run_watchdog(self) -> None:
        self._environment.run_watchdog()
        if self._held_periods == 0:
            log.info(
                "watchdog.hold robot=%s: no command for %d control periods", self._setup.name, self._watchdog_periods
            )
        self._held_periods += 1
        self._period.feed_watchdog(1)

    def _answer(self, identity: bytes, packet: bytes) -> None:
        """Executes a request and replies. Raises HardwareLost after the reply that reports it."""
        arrays: dict[str, Array] = {}
        lost: HardwareLost | None = None
        try:
            request, received = decode_packet(packet, DriverRequest)
            reply, arrays = self._execute(request, received)
        except (HalError, WireError, OSError) as error:
            log.warning("request.refused %s: %s", type(error).__name__, error)
            reply = DriverReply(error=type(error).__name__, message=str(error))
            lost = error if isinstance(error, HardwareLost) else None
        self._socket.send_multipart([identity, b"", encode_packet(reply, arrays)])
        if lost is not None:
            raise lost

    def _execute(self, request: DriverRequest, arrays: dict[str, Array]) -> tuple[DriverReply, dict[str, Array]]:
        kernel = self._environment.kernel
        if request.order == "e-stop":
            if self._estops.accept_press(request):
                self._environment.emergency_stop(request.person)
            return DriverReply(), {}
        if request.owner and self._owner and request.owner != self._owner:
            raise LeaseHeld(f"{self._setup.name} is driven on this machine for {self._owner}")
        if request.order == "describe":
            return self._description(), {}
        try:
            self._fence.check_token(request.token)
        except StaleToken:
            kernel.count_refusal(SafetyReason.TOKEN)
            raise
        self._lease.extend(request.token, request.lease_until_ns)
        if request.order == "renew":
            return DriverReply(), {}
        if 0 < request.until_ns < time.monotonic_ns():
            raise HalError(f"the request {request.order!r} is too late: its sender no longer waits for the reply")
        if request.order == "re-arm":
            return self._rearm(request), {}
        if request.order == "attach":
            self._environment.load_latch()
            log.info("session.attached robot=%s %s token=%d", self._setup.name, request.session, request.token)
            return self._description(), {}
        return self._step(request, arrays)

    def _rearm(self, request: DriverRequest) -> DriverReply:
        """`DriverReply.stopped`: a newer e-stop stands."""
        if self._estops.may_rearm(request):
            self._environment.kernel.rearm(request.person)
            self._estops.note_rearm(request)
            self._environment.load_latch()  # another program may have pressed meanwhile
        return DriverReply(stopped=self._environment.kernel.latched_estop is not None)

    def _description(self) -> DriverReply:
        return DriverReply(
            spec=self._environment.spec,
            task=self._environment.episode_task,
            refused_realtime=self.refused_realtime,
            newest_token=self._fence.newest,
            latch=self._latch,
        )

    def _step(self, request: DriverRequest, arrays: dict[str, Array]) -> tuple[DriverReply, dict[str, Array]]:
        """Runs the control period, or the reset, that a request asks for."""
        if self._period.clock() >= self._period.watchdog_ns:  # after a stall of this process: the hold comes first
            self._run_watchdog()
        environment = self._environment
        environment.real_time = self.real_time or request.real_time
        environment.kernel.is_speed_reduced = request.reduced
        held, self._held_periods = self._held_periods, 0
        if (expired := self._lease.is_expired()) or request.order == "hold":
            time_step = environment.hold()
            if expired and request.order == "reset":
                raise LeaseError(f"the lease of {self._setup.name} has expired: no reset")
            if request.order == "command":
                time_step = replace(time_step, safety_reasons=time_step.safety_reasons | int(SafetyReason.TOKEN))
        elif request.order == "reset":
            time_step = environment.reset(request.seed)
        else:
            if ACTION not in arrays:
                raise SpecError("a command without an action")
            time_step = environment.step(arrays[ACTION])
        if self.real_time and request.order == "command":
            self._period.watchdog_ns = self._period.command_ns + environment.kernel.hold_after_ns
        else:
            self._period.feed_watchdog(self._watchdog_periods, 0.0 if self.real_time else request.max_gap_s)
        reply, columns = encode_time_step(replace(time_step, held_periods=held))
        if request.order == "reset":
            reply = msgspec.structs.replace(reply, task=environment.episode_task)
        return reply, columns

    def _wait_until(self, end_ns: int) -> None:
        """Sleeps within a control period, and answers e-stops meanwhile."""
        while (left_ns := end_ns - self._period.clock()) > 0 and not self.stop.is_set():
            if left_ns < PRECISE_SLEEP_NS:
                time.sleep(left_ns / 1e9)
            elif (request := self._next_request(end_ns - PRECISE_SLEEP_NS)) is not None:
                self._answer_in_period(*request)

    def _check_stop(self) -> None:
        """See `hal.robot.Robot.check_stop`. Never waits."""
        while (request := self._next_request(self._period.clock())) is not None:
            self._answer_in_period(*request)
        self._environment.check_stop()
        if self._lease.is_expired():
            raise LeaseError(f"the lease of {self._setup.name} expired before the motion was over")
        if self.stop.is_set():
            raise HalError(f"the driver of {self._setup.name} is stopping")

    def _answer_in_period(self, identity: bytes, packet: bytes) -> None:
        """Answers an e-stop or a renewal at once, and queues any other request for the end of the control period."""
        try:
            urgent = decode_packet(packet, DriverRequest)[0].order in ("e-stop", "renew")
        except WireError:
            urgent = True  # its refusal is
        if urgent:
            self._answer(identity, packet)
        elif len(self._queue) < MAX_QUEUED_REQUESTS:
            self._queue.append((identity, packet))
        else:
            busy = DriverReply(error="HalError", message=f"{MAX_QUEUED_REQUESTS} requests are queued; try again")
            self._socket.send_multipart([identity, b"", encode_packet(busy, {})])


def _is_superseded(request: DriverRequest, by: tuple[str, int]) -> bool:
    """Whether a later e-stop or re-arm `by` of the same session, as (session, e-stop sequence), undid the request."""
    session, sequence = by
    if request.session != session or request.estop_sequence >= sequence:
        return False
    log.warning("%s.superseded by=%s", request.order, request.person)
    return True


def main(argv: list[str]) -> int:
    """Runs one robot's driver until SIGTERM. `argv`: the robot's YAML file and its state folder.

    The exit status is 0; `EXIT_ROBOT_LOST` if the robot does not answer or is lost; `EXIT_FATAL` for every other error
    that is logged in one line, such as an invalid configuration.
    """
    configure_logging()
    try:
        _run(load(RobotConfig, Path(argv[0]), []), Path(argv[1]))
    except HardwareLost as error:
        log.error("robot.lost %s", error)
        return EXIT_ROBOT_LOST
    except (UserSysError, HalError, OSError) as error:
        log.error("driver.failed %s: %s", type(error).__name__, error)
        return EXIT_FATAL
    return 0


def _run(config: RobotConfig, state: Path) -> None:
    make_folder_durably(state)
    stop = threading.Event()
    stop_on_signals(stop)
    set_parent_death_signal(signal.SIGTERM)  # not SIGKILL: the process must stop the robot first
    make_runtime_folder()
    files = robot_files(config.name, simulated=config.simulated)
    own_latch = state / LATCH_FILE if config.simulated else None  # a real robot's latch is the computer's
    lock = robot_lock(config.name, f"for {state.resolve()}", simulated=config.simulated)
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        if not _wait_for_lock(lock, stop):
            return
        shared_latch = EstopLatch(files.latch_path)
        shared_latch.prepare()
        if config.simulated:
            shared_latch.clear(shared_latch.read())  # an e-stop of an earlier run does not count; the run's own does
        setup = build_robot_setup(config)
        for camera in setup.cameras:
            camera.real_time = config.follows_clock
        kernel = SafetyKernel(setup.robot.spec, latch_path=own_latch, shared_latch=files.latch_path)
        environment = RobotEnvironment(
            setup.robot,
            setup.task,
            kernel,
            setup.cameras,
            frame_stride=config.picture_stride,
            teleoperators=setup.teleoperators,
            name=config.name,
        )
        server = DriverServer(
            environment,
            setup,
            Fence(files.fence_path),
            driver_endpoint(config.name),
            owner=str(state.resolve()),
            latch=str((own_latch or files.latch_path).resolve()),
        )
        server.stop, server.real_time = stop, config.follows_clock
        try:
            # Before the robot is connected: its threads must keep its watchdog fed, and locking memory halts them all
            sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)
            realtime = config.follows_clock and config.realtime_scheduling == "auto"
            refused = enable_realtime(config.cpus) if realtime else ""
            environment.on_robot_connected = reset_priority_of_new_threads  # for the threads of cameras
            if not connect_unless_stopped(environment, stop):
                return
            if realtime:
                server.refused_realtime = _log_realtime(config, refused)
            server.run()
        except StoppedAtRobot as error:
            environment.latch_own_stop(error)
            raise
        finally:
            counts = {name: count for name, count in kernel.reason_counts.items() if count}
            log.info("safety.counts robot=%s %s", config.name, counts)
            faulthandler.dump_traceback_later(CLOSE_TIMEOUT_S, exit=True)  # no supervisor kills an orphan
            environment.close()


def _wait_for_lock(lock: MachineLock, stop: threading.Event) -> bool:
    """Takes the lock. Waits, and logs the owner, while another run of this machine has it. False: stopped first."""
    last_message = ""
    while not stop.is_set():
        try:
            lock.acquire()
            return True
        except LeaseHeld as error:
            if str(error) != last_message:
                last_message = str(error)
                log.warning("%s%s", WAITING_LOG_PREFIX, last_message)
            stop.wait(LOCK_RETRY_S)
    return False


def connect_unless_stopped(environment: RobotEnvironment, stop: threading.Event) -> bool:
    """False if `stop` is set first, for example during the wait for a camera. Raises as `RobotEnvironment.connect`."""

    def check_stop() -> None:
        environment.stop_if_latched()
        if stop.is_set():
            raise HalError("the driver is stopping")

    environment.robot.check_stop = check_stop
    try:
        environment.connect()
    except HalError:
        if not stop.is_set():
            raise
        return False
    return True


def _log_realtime(config: RobotConfig, refused: str) -> str:
    if refused:
        log.warning("realtime.refused robot=%s: %s; the control rate may vary under load", config.name, refused)
    else:
        log.info("realtime.granted robot=%s", config.name)
    return refused


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
