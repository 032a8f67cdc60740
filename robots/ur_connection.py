"""The options of a Universal Robots arm, and the connection to its controller, by ur_rtde (1.6 or later; extra ``ur``).

One thread calls ur_rtde's control interface: it streams the path to the newest target and feeds the controller's
watchdog, so that no library call blocks the driver. Without updates the controller ends the uploaded program, and the
arm brakes.
"""

from __future__ import annotations

import atexit
import enum
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from hal.errors import HardwareLost, StoppedAtRobot
from hal.robot import no_op
from hal.settings import Positive
from hal.spec import Array
from robots.delta_actions import DeltaArmConfig
from robots.device import EXIT_TIMEOUT_S, STOP_CHECK_INTERVAL_S, DeviceClock, age_s, import_library
from robots.robotiq import RobotiqConfig

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
JOINT_RANGE_RAD = 2 * np.pi  # range of every joint, to either side
DASHBOARD_PORT = 29999
RESPONSE_TIMEOUT_S = 2.0
OPEN_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 10.0  # on a broken connection, a call of ur_rtde takes 2 to 5 s, and disconnecting as long
SERVO_DECELERATION = 10.0  # m/s^2, ur_rtde's default
JOINT_DECELERATION = 2.0  # rad/s^2, ur_rtde's default
CONNECTION_BROKEN = "the connection broke"
WATCHDOG_LEAD_S = 0.02  # the controller's watchdog fires this long before `silence_s` ends, at most a twentieth of it
STATE_LAG_PACKAGES = 3  # packages: the library's two connections are not synchronised

# UR's "Real-Time Data Exchange guide": safety_mode and robot_mode
SAFETY_MODES = {
    3: "a protective stop",
    4: "recovery mode",
    5: "a safeguard stop",
    6: "the system's emergency stop",
    7: "the robot's emergency stop",
    8: "a violation of a safety limit",
    9: "a fault",
    10: "unconfirmed joints",
    11: "an undefined safety mode",
    12: "a safeguard stop in automatic mode",
    13: "the three-position switch",
}
NORMAL, REDUCED = 1, 2
STOPPED_BY_PERSON = (6, 7, 13)
ROBOT_MODES = {-1: "not under control", 0: "disconnected", 3: "powered off", 5: "idle, its brakes on"}
RUNNING = 7
RTDE_VARIABLES = (
    "timestamp actual_q actual_qd actual_TCP_pose actual_TCP_force robot_mode safety_mode"  # of the guide
).split()

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UrConfig(DeltaArmConfig):
    """Attributes:
    host: the controller's address. It must be in remote control.
    model: for display and placement, e.g. ``ur5e``.
    joint_low, joint_high: rad; default: the joints' whole range.
    gripper: settings of a Robotiq gripper; None for none.
    home: joint angles, rad: target of a reset, at `home_speed`, rad/s. If empty, a person moves the robot.
    silence_s: without commands for this time, the controller ends the program. Default: two control periods.
    lookahead_s, gain: of the controller's servoj.
    rtde_hz: rate at which state is received and the target is streamed.
    """

    model: str = "ur5e"
    tool_speed: Positive = 0.25
    force_max: float | None = 50.0
    joint_low: tuple[float, ...] = (-JOINT_RANGE_RAD,) * 6
    joint_high: tuple[float, ...] = (JOINT_RANGE_RAD,) * 6
    gripper: RobotiqConfig | None = None
    home: tuple[float, ...] = ()
    home_speed: Positive = 0.3
    silence_s: Positive | None = None
    lookahead_s: Annotated[float, Meta(ge=0.03, le=0.2)] = 0.1
    gain: Annotated[float, Meta(ge=100, le=2000)] = 300.0
    rtde_hz: Positive = 125.0

    @property
    def watchdog_s(self) -> float:
        return self.silence_s or self.two_periods_s


@dataclass(frozen=True)
class UrState:
    """A measurement of the controller, float64; `t_capture_ns` is as in `hal.robot.Observation`.

    Attributes:
        q, qd: (6,), rad and rad/s.
        pose: (6,), of the tool in the base frame: x, y, z in m, and the rotation vector.
        force: (3,), on the tool, in the base frame, N.
    """

    q: Array
    qd: Array
    pose: Array
    force: Array
    t_capture_ns: int


@dataclass(frozen=True)
class ServoCommand:
    """A straight path from `start` to `end`, joint angles or poses, that begins at `begun_s` and takes `lasts_s`."""

    joints: bool
    start: Array
    end: Array
    begun_s: float
    lasts_s: float

    def at(self, now_s: float) -> Array:
        """A pose keeps the rotation of `end`, because two rotation vectors with opposite signs may be equal."""
        share = min(max((now_s - self.begun_s) / self.lasts_s, 0.0), 1.0)
        point, n = self.end.copy(), 6 if self.joints else 3
        point[:n] = self.start[:n] + share * (self.end[:n] - self.start[:n])
        return point


class Rest(enum.Enum):
    """Stand still: with the program, or without it."""

    HOLD = "hold"
    STOP_PROGRAM = "stop program"


_Command = ServoCommand | Rest


class UrConnection:
    """One connection, for a single use. One thread calls it. Only `open`, `restart_program` and `close` block, each
    with a timeout."""

    def __init__(self, config: UrConfig, receive: Any = None) -> None:
        """`receive`: ur_rtde's receive interface; None: `open` makes it."""
        self.config = config
        self._name = f"UR at {config.host}"
        self._clock = DeviceClock()
        self._receive = receive
        self._lock = threading.Lock()
        self._command: _Command = Rest.HOLD
        self._updated_s = 0.0
        self._lost: HardwareLost | None = None
        self._changed, self._opened, self._running = threading.Event(), threading.Event(), threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"ur {config.host}", daemon=True)

    def open(self, check_stop: Callable[[], None] = no_op) -> None:
        """Connect and upload ur_rtde's control program, without motion. Calls `check_stop` periodically; it may raise.

        Raises:
            HardwareLost: the controller does not answer, or its state does not allow it; the message says how to fix
                that.
            SpecError: ur_rtde is not installed.
        """
        import_library("rtde_control", "ur")
        self._require_dashboard()
        self._thread.start()
        self._wait(self._opened, check_stop, f"connecting took longer than {OPEN_TIMEOUT_S:g} s")

    @property
    def is_program_stopped(self) -> bool:
        """Whether the controller runs no program of this connection; `restart_program` uploads it again."""
        return self._command is Rest.STOP_PROGRAM

    def continues_servo(self) -> bool:
        """Whether the arm still follows a target. If so, this extends it by `config.watchdog_s`; without calls for that
        long, the arm has braked on its way."""
        with self._lock:
            self._stop_if_silent()
            self._updated_s = time.monotonic()
            return isinstance(self._command, ServoCommand)

    def read(self) -> UrState:
        """The newest reading, of any age. Raises HardwareLost, with the reason if the arm was stopped."""
        receive = self._receive  # before the check: the thread sets the reason before it clears this
        self._require_open()
        stamp_s, now_ns = receive.getTimestamp(), time.monotonic_ns()  # first: the values are not older than the stamp
        reading = UrState(
            q=np.array(receive.getActualQ()),
            qd=np.array(receive.getActualQd()),
            pose=np.array(receive.getActualTCPPose()),
            force=np.array(receive.getActualTCPForce()[:3]),
            t_capture_ns=self._clock.captured_ns(int(stamp_s * 1e9), now_ns),
        )
        if not receive.isConnected():
            self._lost = self._lost or HardwareLost(CONNECTION_BROKEN)
            self._require_open()
        if stopped := stop_error(receive):
            raise self._named(stopped)
        return reading

    def servo(self, target: Array, lasts_s: float, joints: bool, shift: Array | None = None) -> None:
        """Move straight to `target` in `lasts_s`: joint angles or a pose, (6,). The arm holds at the end, and after
        `config.watchdog_s` without a call.

        Args:
            shift: distance of the new path's start from the present path, (6,); None for 0.

        Raises:
            HardwareLost: the connection broke, or the arm was stopped.
        """
        reading, now_s, command = self.read(), time.monotonic(), self._command
        if isinstance(command, ServoCommand) and command.joints == joints:
            start = command.at(now_s) + (0.0 if shift is None else shift)
        else:
            start = reading.q if joints else reading.pose
        self._set_command(ServoCommand(joints, start, target, now_s, lasts_s))

    def hold(self) -> None:
        """Brake and hold; a stopped program stays stopped. Raises HardwareLost."""
        self._require_open()
        if not self.is_program_stopped:
            self._set_command(Rest.HOLD)

    def stop_program(self) -> None:
        """Brake and end the program on the controller, which holds the arm. Raises HardwareLost."""
        self._require_open()
        self._set_command(Rest.STOP_PROGRAM)

    def restart_program(self, check_stop: Callable[[], None] = no_op) -> None:
        """Upload the program again, after `stop_program`. `check_stop`: as for `open`. Raises HardwareLost."""
        self._running.clear()
        self._set_command(Rest.HOLD)
        self._wait(self._running, check_stop, "the controller does not start the program")

    def close(self) -> None:
        """Stop the program and disconnect, within `CLOSE_TIMEOUT_S`. Sends nothing to a controller without new
        readings: its watchdog has ended the program."""
        self._closing = True
        receive = self._receive
        if receive is not None and not receive.isConnected():
            self._lost = self._lost or HardwareLost(CONNECTION_BROKEN)
        if self._clock.newest_ns is not None and age_s(self._clock.newest_ns) > self.config.watchdog_s:
            self._lost = self._lost or HardwareLost("it sends no readings any more")
        self._set_command(Rest.STOP_PROGRAM)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                log.warning("ur.not_closed host=%s: ur_rtde does not return", self.config.host)
                # a thread that returns from C++ during Python's shutdown would abort the process
                atexit.register(self._thread.join, EXIT_TIMEOUT_S)

    def _wait(self, event: threading.Event, check_stop: Callable[[], None], otherwise: str) -> None:
        """Block until `event`. Calls `check_stop` periodically and after it. Raises HardwareLost, for the reason
        `otherwise` after `OPEN_TIMEOUT_S`."""
        until_s = time.monotonic() + OPEN_TIMEOUT_S
        while not (event.wait(STOP_CHECK_INTERVAL_S) or self._lost):
            check_stop()
            if time.monotonic() >= until_s:
                self._lost = self._lost or HardwareLost(otherwise)
        self._require_open()
        check_stop()

    def _set_command(self, command: _Command) -> None:
        with self._lock:
            self._updated_s, self._command = time.monotonic(), command
        self._changed.set()

    def _require_open(self) -> None:
        if self._lost:
            raise self._named(self._lost)
        if self._closing:
            raise HardwareLost(f"{self._name}: not connected")

    def _named(self, error: HardwareLost) -> HardwareLost:
        return type(error)(f"{self._name}: {error}")

    def _require_dashboard(self) -> None:
        """Check that the dashboard answers: ur_rtde waits long for a controller that is off or frozen."""
        where = (self.config.host, DASHBOARD_PORT)
        try:
            with socket.create_connection(where, RESPONSE_TIMEOUT_S) as dashboard:
                dashboard.settimeout(RESPONSE_TIMEOUT_S)
                if dashboard.recv(64):
                    return
        except OSError as error:
            raise HardwareLost(
                f"{self._name}: no answer on port {DASHBOARD_PORT}: {error}; check its address, and that it is on"
            ) from error
        raise HardwareLost(f"{self._name}: the dashboard closed the connection on port {DASHBOARD_PORT}")

    def _run(self) -> None:
        control = None
        try:
            self._receive, control = self._connect()
            program = _ControlProgram(control, self.config)
            self._opened.set()
            while not (self._lost or (self._closing and program.mode == "rest")):
                program.execute(self.current_command())
                if program.mode != "rest":
                    self._running.set()
                self._changed.wait(1 / self.config.rtde_hz)
                self._changed.clear()
        except Exception as error:  # any exception of the library or of this module; the next call raises it
            lost = error if isinstance(error, HardwareLost) else HardwareLost(str(error))
            self._lost = self._lost or self._reason_of_loss() or lost
            log.warning("ur.lost host=%s %s", self.config.host, self._lost)
        finally:
            self._opened.set()
            self._running.set()
        if self._lost:  # the destructors would block all threads of Python meanwhile
            for end in (control, self._receive):
                if end is not None:
                    end.disconnect()
        self._receive = None

    def _reason_of_loss(self) -> HardwareLost | None:
        """The reason by a controller state that is newer than the end of the program; None if there is none."""
        receive = self._receive
        if receive is None:
            return None
        if not receive.isConnected():
            return HardwareLost(CONNECTION_BROKEN)
        newer_s = receive.getTimestamp() + STATE_LAG_PACKAGES / self.config.rtde_hz
        until_s = time.monotonic() + RESPONSE_TIMEOUT_S
        while receive.isConnected() and receive.getTimestamp() < newer_s and time.monotonic() < until_s:
            time.sleep(1 / self.config.rtde_hz)
        return stop_error(receive)

    def _connect(self) -> tuple[Any, Any]:
        host, hz = self.config.host, self.config.rtde_hz
        receive = import_library("rtde_receive", "ur").RTDEReceiveInterface(host, hz, RTDE_VARIABLES)
        until_s = time.monotonic() + RESPONSE_TIMEOUT_S
        while not receive.isConnected() or not _has_state(receive):
            if time.monotonic() > until_s:
                raise HardwareLost("it sends no state")
            time.sleep(1 / hz)
        if stopped := stop_error(receive):
            raise stopped
        return receive, import_library("rtde_control", "ur").RTDEControlInterface(host, hz)

    def current_command(self) -> _Command:
        with self._lock:
            self._stop_if_silent()
            return self._command

    def _stop_if_silent(self) -> None:
        silent = time.monotonic() - self._updated_s > self.config.watchdog_s
        if silent and self._command is not Rest.STOP_PROGRAM:
            self._command = Rest.HOLD


class _ControlProgram:
    """The control program on the controller.

    Attributes:
        mode: the arm stands in ``idle`` and ``rest``; in ``rest`` there is no program.
    """

    def __init__(self, control: Any, config: UrConfig) -> None:
        self._control, self._config = control, config
        self.mode: Literal["idle", "servo", "rest"] = "idle"
        self._set_watchdog()

    def execute(self, command: _Command) -> None:
        """Send what the command needs now. Raises HardwareLost if the program has ended, or refuses."""
        if command is Rest.STOP_PROGRAM:
            self._rest()
            return
        if self.mode == "rest":
            self._start()
        if isinstance(command, ServoCommand):
            self._servo(command)
        else:
            self._brake()
            self._control.kickWatchdog()
        if not self._control.isProgramRunning():
            raise HardwareLost("the controller ended the program: by its watchdog, or at the pendant")

    def _servo(self, command: ServoCommand) -> None:
        self.mode = "servo"
        point, config = command.at(time.monotonic()).tolist(), self._config
        servo = self._control.servoJ if command.joints else self._control.servoL
        # the controller ignores the speed and the acceleration
        done = servo(point, 0.0, 0.0, 1 / config.rtde_hz, config.lookahead_s, config.gain)
        _require_success(done, "the controller refused a target")

    def _brake(self) -> None:
        if self.mode == "servo":
            _require_success(self._control.servoStop(SERVO_DECELERATION), "the controller refused to brake")
        self.mode = "idle"

    def _rest(self) -> None:
        if self.mode != "rest":
            self._brake()
            self._control.stopJ(JOINT_DECELERATION)
            self._control.stopScript()
            self.mode = "rest"

    def _start(self) -> None:
        _require_success(self._control.reuploadScript(), "the program cannot be uploaded")
        until_s = time.monotonic() + RESPONSE_TIMEOUT_S
        while not self._control.isProgramRunning():
            _require_success(time.monotonic() < until_s, "the controller does not start the program")
            time.sleep(1 / self._config.rtde_hz)
        self.mode = "idle"
        self._set_watchdog()

    def _set_watchdog(self) -> None:
        patience_s = self._config.watchdog_s - min(WATCHDOG_LEAD_S, self._config.watchdog_s / 20)
        _require_success(self._control.setWatchdog(1 / patience_s), "the watchdog cannot be set")


def stop_error(receive: Any) -> HardwareLost | None:
    """Why the arm cannot be driven: StoppedAtRobot if a person stopped it; None if it can be driven."""
    safety, mode = receive.getSafetyMode(), receive.getRobotMode()
    if safety not in (NORMAL, REDUCED):
        kind = StoppedAtRobot if safety in STOPPED_BY_PERSON else HardwareLost
        return kind(f"{SAFETY_MODES.get(safety, f'safety mode {safety}')}; a person must clear it at the pendant")
    if mode != RUNNING:
        return HardwareLost(
            f"it is {ROBOT_MODES.get(mode, f'in robot mode {mode}')}; a person must start it at the pendant"
        )
    return None


def _has_state(receive: Any) -> bool:
    try:
        return bool(receive.getActualQ())
    except RuntimeError:  # from ur_rtde, before the first package
        return False


def _require_success(done: bool, otherwise: str) -> None:
    if not done:
        raise HardwareLost(otherwise)
