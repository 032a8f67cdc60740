"""The driver process: ``python -m user_sys.edge.driver_server ROBOT.yaml``.

It owns the robot for as long as it lives, obeys the session with the newest token, and keeps the robot safe when
nobody speaks: ``watchdog_periods`` control periods after the last command it holds, ``safe_stop_after_s`` later it
safe-stops. A session may be killed, stopped or replaced at any time without the robot noticing more than a hold. Of a
robot that follows the clock the hold is done by then, counted from when the command was applied: its session has a
little less than one control period to answer in. A simulated one that goes as fast as it can stands still between two
commands, and is given the time from the answer on; so is a robot that holds or was brought to its start.

When the robot itself is lost the process says so and ends with exit status 4: its supervisor starts it again, and
starting is connecting. Nothing of the lost connection lives on in it; e-stop latch and fence are on the disk. What the
robot does while nobody is connected is its own safe state. Exit status 2 says that starting again will not help.

Where another run of this machine drives the robot, it waits for its turn and says for whom.

A lease that runs out has the robot held, whether or not another session comes: what would move the robot is answered by
a hold until a renewal arrives. The deadline is kept here, by a clock that no setting changes.

It imports no torch, opens no network connection, and listens on one socket in a folder that only its user can enter. An
e-stop of any user of this computer comes by the latch that they share, which it looks at every `LATCH_POLL_MS`.
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
from pathlib import Path

import zmq

from hal.driver import RobotSetup
from hal.durable import make_folder_durably
from hal.errors import HalError, HardwareLost, LeaseError, LeaseHeld, SpecError, StaleToken
from hal.estop import EstopLatch
from hal.lease import Fence, MachineLock, lease_clock_ns, robot_lock
from hal.machine_folder import make_runtime_folder, robot_files
from hal.process_supervisor import set_parent_death_signal
from hal.safety import SafetyKernel, SafetyReason
from hal.signals import stop_on_signals
from hal.spec import ACTION, Array
from user_sys.codec import decode_packet, encode_packet
from user_sys.compose import RobotConfig, build_robot_setup
from user_sys.config import load
from user_sys.edge.driver_client import (
    FRAME_PREFIX,
    LATCH_FILE,
    WAITING_LOG_PREFIX,
    DriverReply,
    DriverRequest,
    TaskInfo,
    driver_endpoint,
)
from user_sys.edge.environment import RobotEnvironment, TimeStep
from user_sys.edge.realtime import THREAD_SWITCH_INTERVAL_S, enable_realtime, reset_priority_of_new_threads
from user_sys.errors import UserSysError, WireError
from user_sys.logs import configure_logging

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1 << 20
MAX_QUEUED_REQUESTS = 32  # requests that came in the middle of a control period
PRECISE_SLEEP_NS = 2_000_000  # the end of a control period is slept through: to be on the dot
LATCH_POLL_MS = 10  # how often the shared e-stop latch is looked at while nothing is asked
LINGER_MS = 200  # for the last reply
LOCK_RETRY_S = 0.5
CLOSE_TIMEOUT_S = 15.0
EXIT_FATAL, EXIT_ROBOT_LOST = 2, 4  # exit statuses


class DriverServer:
    """Serves one robot on its local socket. `run` blocks; `stop` may be set from any thread or signal.

    Attributes:
        refused_realtime: what the system refused this process, for those who ask what it drives.
        real_time: control periods follow the clock whatever a session asks for, and the watchdog counts from commands.
    """

    def __init__(
        self,
        driver: RobotEnvironment,
        station: RobotSetup,
        fence: Fence,
        address: str,
        clock: Callable[[], int] = time.monotonic_ns,
        owner: str = "",
        latch: str = "",
        lease_clock: Callable[[], int] = lease_clock_ns,
    ) -> None:
        """Args:
        fence: remembers the newest session's token.
        address: of the local socket.
        clock: nanoseconds; control periods and the watchdog go by it.
        owner: the state folder that the robot is driven for; sessions of another are refused.
        latch: the file of the e-stop's latch that the next driver finds.
        lease_clock: nanoseconds; leases run out by it.
        """
        self._driver, self._station, self._fence, self._address = driver, station, fence, address
        self._clock, self._owner = clock, owner
        self._lease_clock, self._latch = lease_clock, latch
        self._lease = (0, 0)  # the newest token, and when its lease runs out
        self._period_ns = int(driver.spec.period_s * 1e9)
        self._next_ns = self._hold_at_ns = self._told_ns = clock()
        self._held = 0
        self._told_over = False
        self._pressed = self._armed = ("", 0)  # session and turn of the newest e-stop and re-arm
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self.refused_realtime = ""
        self.real_time = False
        self.stop = threading.Event()

    def run(self) -> None:
        """Raises HardwareLost when the robot went away; whoever asked for something then has been told."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.bind(self._address)
        self._feed_watchdog(self._driver.spec.limits.watchdog_periods)
        try:
            while not self.stop.is_set():
                self._serve(socket)
        finally:
            socket.close()

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        """Answers one request, or holds when the watchdog is due. Talk that commands nothing does not put that off."""
        request = self._waiting.popleft() if self._waiting else self._next_request(socket, self._hold_at_ns)
        if request is not None:
            self._answer(*request, socket)
        if self._clock() >= self._hold_at_ns:
            self._guard()

    def _next_request(self, socket: zmq.Socket[bytes], until_ns: int) -> tuple[bytes, bytes] | None:
        """Whose request it is, and its packet; None where nothing that could be one came until then."""
        whole_ms, rest_ns = divmod(max(0, until_ns - self._clock()), 1_000_000)
        if not self._poll(socket, whole_ms):
            time.sleep(rest_ns / 1e9)  # polling counts in milliseconds
            if not socket.poll(0):
                return None
        frames = socket.recv_multipart()
        if len(frames) != 3 or frames[1]:
            log.warning("request.malformed robot=%s frames=%d", self._station.name, len(frames))
            return None
        return frames[0], frames[2]

    def _poll(self, socket: zmq.Socket[bytes], within_ms: int) -> bool:
        """Whether something came within this time. Meanwhile an e-stop of another program stops the robot."""
        while within_ms > LATCH_POLL_MS:
            if socket.poll(LATCH_POLL_MS):
                return True
            self._driver.stop_if_latched()
            within_ms -= LATCH_POLL_MS
        return bool(socket.poll(within_ms))

    def _feed_watchdog(self, periods: int) -> None:
        self._hold_at_ns = self._clock() + periods * self._period_ns

    def _guard(self) -> None:
        self._driver.run_watchdog()
        if self._held == 0:
            periods = self._driver.spec.limits.watchdog_periods
            log.info("watchdog.hold robot=%s: no command for %d control periods", self._station.name, periods)
        self._held += 1
        self._feed_watchdog(1)

    def _answer(self, identity: bytes, packet: bytes, socket: zmq.Socket[bytes]) -> None:
        """Obeys and replies. Raises HardwareLost after the reply that says so."""
        arrays: dict[str, Array] = {}
        lost: HardwareLost | None = None
        try:
            request, received = decode_packet(packet, DriverRequest)
            reply, arrays = self._obey(request, received, socket)
        except (HalError, WireError, OSError) as error:
            log.warning("order.refused %s: %s", type(error).__name__, error)
            reply = DriverReply(error=type(error).__name__, message=str(error))
            lost = error if isinstance(error, HardwareLost) else None
        socket.send_multipart([identity, b"", encode_packet(reply, arrays)])
        if lost is not None:
            raise lost

    def _obey(
        self, request: DriverRequest, arrays: dict[str, Array], socket: zmq.Socket[bytes]
    ) -> tuple[DriverReply, dict[str, Array]]:
        kernel = self._driver.kernel
        if request.order == "e-stop":
            if not _is_superseded(request, self._armed):
                self._pressed = (request.session, request.estop_sequence)
                self._driver.emergency_stop(request.person)
            return DriverReply(), {}
        if request.owner and self._owner and request.owner != self._owner:
            raise LeaseHeld(f"{self._station.name} is driven on this machine for {self._owner}")
        if request.order == "describe":
            return self._card(), {}
        try:
            self._fence.check_token(request.token)
        except StaleToken:
            kernel.count_refusal(SafetyReason.TOKEN)
            raise
        self._lease = max(self._lease, (request.token, request.lease_until_ns))
        if request.order == "renew":
            return DriverReply(), {}
        if 0 < request.until_ns < time.monotonic_ns():
            raise HalError(f"the order {request.order!r} came too late: its sender does not wait for it any more")
        if request.order == "re-arm":
            return self._rearm(request), {}
        if request.order == "attach":
            kernel.load_latched_estop()
            log.info("session.attached robot=%s %s token=%d", self._station.name, request.session, request.token)
            return self._card(), {}
        return self._advance(request, arrays, socket)

    def _rearm(self, request: DriverRequest) -> DriverReply:
        """`Reply.stopped` says that a newer press stands."""
        if not _is_superseded(request, self._pressed):
            self._driver.kernel.rearm(request.person)
            self._armed = (request.session, request.estop_sequence)
        return DriverReply(stopped=self._driver.kernel.latched_estop is not None)

    def _card(self) -> DriverReply:
        task = self._station.task
        card = TaskInfo(name=task.name, sentence=task.instruction, max_steps=task.max_steps)
        return DriverReply(
            spec=self._driver.spec,
            task=card,
            refused_realtime=self.refused_realtime,
            newest_token=self._fence.newest,
            latch=self._latch,
        )

    def _advance(
        self, request: DriverRequest, arrays: dict[str, Array], socket: zmq.Socket[bytes]
    ) -> tuple[DriverReply, dict[str, Array]]:
        self._driver.real_time = self.real_time or request.real_time
        self._driver.kernel.is_speed_reduced = request.reduced
        self._driver.wait_for_period_end = lambda: self._await_period(socket)
        self._driver.robot.check_stop = lambda: self._attend(socket)
        held, self._held = self._held, 0
        if (over := self._lease_is_over()) or request.order == "hold":
            tick = self._driver.hold()
            if over and request.order == "reset":
                raise LeaseError(f"the lease of {self._station.name} has run out: it is not brought to a start")
        elif request.order == "reset":
            tick = self._driver.reset(request.seed)
        else:
            if ACTION not in arrays:
                raise SpecError("a command without an action")
            tick = self._driver.step(arrays[ACTION])
        if self.real_time and request.order == "command":
            self._hold_at_ns = self._told_ns + self._driver.kernel.hold_after_ns
        else:
            self._feed_watchdog(self._driver.spec.limits.watchdog_periods)
        return _reply(tick, held)

    def _lease_is_over(self) -> bool:
        token, until_ns = self._lease
        over = self._lease_clock() >= until_ns
        if over and not self._told_over:
            log.warning(
                "lease.over robot=%s token=%d: the robot is held until it is renewed", self._station.name, token
            )
        self._told_over = over
        return over

    def _await_period(self, socket: zmq.Socket[bytes]) -> None:
        """Sleeps to the end of the control period, on a fixed grid; obeys an e-stop meanwhile. Called once the robot is
        told what to do.

        The grid starts anew when a period was missed, so that lateness is never made up by haste.
        """
        now = self._told_ns = self._clock()
        self._next_ns += self._period_ns
        if not now <= self._next_ns <= now + 2 * self._period_ns:
            self._next_ns = now + self._period_ns
        while (left_ns := self._next_ns - self._clock()) > 0 and not self.stop.is_set():
            if left_ns < PRECISE_SLEEP_NS:
                time.sleep(left_ns / 1e9)
            elif (request := self._next_request(socket, self._next_ns - PRECISE_SLEEP_NS)) is not None:
                self._answer_in_period(*request, socket)

    def _attend(self, socket: zmq.Socket[bytes]) -> None:
        """See `hal.robot.Robot.attend`. Never waits."""
        while (request := self._next_request(socket, self._clock())) is not None:
            self._answer_in_period(*request, socket)
        self._driver.check_stop()
        if self._lease_is_over():
            raise LeaseError(f"the lease of {self._station.name} has run out on the way to a start")
        if self.stop.is_set():
            raise HalError(f"the driver of {self._station.name} ends")

    def _answer_in_period(self, identity: bytes, packet: bytes, socket: zmq.Socket[bytes]) -> None:
        """An e-stop and a renewal are answered at once; everybody else waits for the end of the control period."""
        try:
            urgent = decode_packet(packet, DriverRequest)[0].order in ("e-stop", "renew")
        except WireError:
            urgent = True  # its refusal, that is
        if urgent:
            self._answer(identity, packet, socket)
        elif len(self._waiting) < MAX_QUEUED_REQUESTS:
            self._waiting.append((identity, packet))
        else:
            busy = DriverReply(
                error="HalError", message=f"{MAX_QUEUED_REQUESTS} requests wait for the end of the control period"
            )
            socket.send_multipart([identity, b"", encode_packet(busy, {})])


def _is_superseded(request: DriverRequest, by: tuple[str, int]) -> bool:
    """Whether a person has ordered the opposite since, as session and turn `by`."""
    session, turn = by
    if request.session != session or request.estop_sequence >= turn:
        return False
    log.warning("%s.overtaken by=%s", request.order, request.person)
    return True


def _reply(tick: TimeStep, held: int) -> tuple[DriverReply, dict[str, Array]]:
    outcome = tick.outcome
    reply = DriverReply(
        t_capture_ns=tick.t_capture_ns,
        t_frames_ns={name: frame.t_capture_ns for name, frame in tick.frames.items()},
        t_command_ns=tick.t_command_ns,
        reasons=tick.safety_reasons,
        reward=outcome.reward,
        terminated=outcome.terminated,
        success=outcome.success,
        source=outcome.source,
        held=held,
        stopped=tick.stopped,
        stopped_by=tick.stopped_by,
        hand="" if tick.local_input is None else "twist" if tick.local_input.target is None else "target",
    )
    arrays = {**tick.observation, **{FRAME_PREFIX + name: frame.image for name, frame in tick.frames.items()}}
    if tick.applied is not None:
        arrays["applied"] = tick.applied
    if tick.local_input is not None:
        arrays["hand"] = tick.local_input.twist if tick.local_input.target is None else tick.local_input.target
    return reply, arrays


def main(argv: list[str]) -> int:
    """Runs one robot's driver until SIGTERM. `argv`: the robot's YAML file and its state folder.

    The exit status is 0; `EXIT_ROBOT_LOST` when the robot does not answer or went away; `EXIT_FATAL` for everything
    else that is told in one line, such as a configuration that cannot be used.
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
    set_parent_death_signal(signal.SIGTERM)  # in good order: it has a robot to stop
    make_runtime_folder()
    place = robot_files(config.name, simulated=config.simulated)
    kept = state / LATCH_FILE if config.simulated else None  # that of a real robot is the computer's
    lock = robot_lock(config.name, f"for {state.resolve()}", simulated=config.simulated)
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        if not _wait_for_lock(lock, stop):
            return
        shared = EstopLatch(place.latch_path)
        shared.prepare()
        if config.simulated:
            shared.clear(shared.read())  # each run begins anew; its own is in its folder
        station = build_robot_setup(config)
        for camera in station.cameras:
            camera.real_time = config.follows_clock
        kernel = SafetyKernel(station.robot.spec, latch_path=kept, shared_latch=place.latch_path)
        driver = RobotEnvironment(
            station.robot,
            station.task,
            kernel,
            station.cameras,
            frame_stride=config.frame_stride,
            teleoperators=station.teleoperators,
        )
        server = DriverServer(
            driver,
            station,
            Fence(place.fence_path),
            driver_endpoint(config.name),
            owner=str(state.resolve()),
            latch=str((kept or place.latch_path).resolve()),
        )
        server.stop, server.real_time = stop, config.follows_clock
        try:
            # Before the robot is connected: its threads must keep its watchdog fed, and locking memory halts them all
            sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)
            realtime = config.follows_clock and config.realtime == "auto"
            refused = enable_realtime(config.cpus) if realtime else ""
            driver.on_robot_connected = reset_priority_of_new_threads  # those of cameras
            if not connect_unless_stopped(driver, stop):
                return
            if realtime:
                server.refused_realtime = _log_realtime(config, refused)
            server.run()
        finally:
            log.info(
                "safety.counts robot=%s %s", config.name, {name: n for name, n in kernel.reason_counts.items() if n}
            )
            faulthandler.dump_traceback_later(CLOSE_TIMEOUT_S, exit=True)  # an orphan has no supervisor to kill it
            driver.close()


def _wait_for_lock(lock: MachineLock, stop: threading.Event) -> bool:
    """Takes the lock; waits while another run of this machine drives the robot, and says so. False: stopped first."""
    said = ""
    while not stop.is_set():
        try:
            lock.acquire()
            return True
        except LeaseHeld as error:
            if str(error) != said:
                said = str(error)
                log.warning("%s%s", WAITING_LOG_PREFIX, said)
            stop.wait(LOCK_RETRY_S)
    return False


def connect_unless_stopped(driver: RobotEnvironment, stop: threading.Event) -> bool:
    """False: stopped first, as while a camera is waited for. Raises what `RobotEnvironment.connect` does."""

    def attend() -> None:
        driver.stop_if_latched()
        if stop.is_set():
            raise HalError("the driver is to end")

    driver.robot.check_stop = attend
    try:
        driver.connect()
    except HalError:
        if not stop.is_set():
            raise
        return False
    return True


def _log_realtime(config: RobotConfig, refused: str) -> str:
    if refused:
        log.warning("realtime.refused robot=%s: %s; the control rate may waver under load", config.name, refused)
    else:
        log.info("realtime.granted robot=%s", config.name)
    return refused


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
