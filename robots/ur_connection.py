"""The connection to one controller of Universal Robots, by ur_rtde (1.6 or later; the extra ``ur``).

A thread alone speaks to ur_rtde's control interface: it streams the way to the newest target to the controller and
feeds the controller's watchdog, so that no call of the library makes anybody wait. When updates stop coming the
controller ends the program that was uploaded, and the arm brakes and stands.
"""

from __future__ import annotations

import atexit
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np

from hal.errors import EmergencyStopped, HardwareLost, SpecError, install_hint
from hal.spec import Array

DASHBOARD_PORT = 29999
RESPONSE_TIMEOUT_S = 2.0
OPEN_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 10.0  # on a broken link a call of ur_rtde's takes 2 to 5 s, and disconnecting as long
EXIT_TIMEOUT_S = 2.0
OFFSET_WINDOW_S = 10.0  # clocks that differ by 1e-4 part by 1 ms meanwhile
SERVO_DECELERATION = 10.0  # m/s^2, ur_rtde's own
JOINT_DECELERATION = 2.0  # rad/s^2, ur_rtde's own
ARRIVED_RAD = 2e-3
CONNECTION_BROKEN = "the connection broke"
WATCHDOG_LEAD_S = 0.02  # the controller's watchdog bites so much before `silence_s` is over; a twentieth of it at most
STATE_LAG_PACKAGES = 3  # packages: the library's two connections are not in step

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
ROBOT_MODES = {-1: "not under control", 0: "disconnected", 3: "powered off", 5: "idle, its brakes on"}
RUNNING = 7
RTDE_VARIABLES = [
    "timestamp",
    "actual_q",
    "actual_qd",
    "actual_TCP_pose",
    "actual_TCP_force",
    "robot_mode",
    "safety_mode",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UrConnectionConfig:
    """Attributes:
    silence_s: the controller has ended the program when it has heard nothing for so long.
    rtde_hz: how often state is received and the target is streamed.
    lookahead_s, gain: of the controller's servoj: 0.03 to 0.2 s, 100 to 2000.
    joint_speed: of a move by itself (`UrConnection.move`), rad/s.
    """

    host: str
    silence_s: float
    rtde_hz: float = 125.0
    lookahead_s: float = 0.1
    gain: float = 300.0
    joint_speed: float = 0.3
    joint_acceleration: float = 0.5


@dataclass(frozen=True)
class UrState:
    """What the controller measured, float64; `t_capture_ns` is as in `hal.robot.Observation`.

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
class _ServoCommand:
    """The straight way from `start` to `end`, joint angles or poses, that begins at `begun_s` and takes `lasts_s`."""

    joints: bool
    start: Array
    end: Array
    begun_s: float
    lasts_s: float

    def at(self, now_s: float) -> Array:
        """A pose keeps the rotation of `end`: two rotation vectors may differ in sign and mean the same."""
        share = min(max((now_s - self.begun_s) / self.lasts_s, 0.0), 1.0)
        point, n = self.end.copy(), 6 if self.joints else 3
        point[:n] = self.start[:n] + share * (self.end[:n] - self.start[:n])
        return point


@dataclass(frozen=True)
class _MoveCommand:
    end: Array


@dataclass(frozen=True)
class _HoldCommand:
    pass


@dataclass(frozen=True)
class _StopProgramCommand:
    pass


_Command = _ServoCommand | _MoveCommand | _HoldCommand | _StopProgramCommand


class ControllerClock:
    """Maps a controller's time stamps to the local monotonic clock; the least delay seen of late counts as none."""

    def __init__(self) -> None:
        self._offset_s = self._earlier_s = np.inf
        self._since_s = -np.inf
        self._stamp_s = -np.inf
        self._local_s = -np.inf

    def age_s(self) -> float:
        """How old the newest reading is that was asked about; 0 before the first."""
        return 0.0 if self._local_s == -np.inf else time.monotonic() - self._local_s

    def local_s(self, stamp_s: float, now_s: float) -> float:
        """When the reading with that stamp was taken; never before an earlier one, nor after now."""
        if stamp_s == self._stamp_s:
            return self._local_s
        if now_s - self._since_s > OFFSET_WINDOW_S:
            self._since_s, self._earlier_s, self._offset_s = now_s, self._offset_s, np.inf
        self._offset_s = min(self._offset_s, now_s - stamp_s)
        self._stamp_s = stamp_s
        self._local_s = max(self._local_s, stamp_s + min(self._offset_s, self._earlier_s))
        return self._local_s


class UrConnection:
    """One connection, once. One thread calls it; only `open`, `restart_program`, `move_joints` and `close` wait, each
    with a deadline.
    """

    def __init__(self, config: UrConnectionConfig) -> None:
        self.config = config
        self._name = f"UR at {config.host}"
        self._clock = ControllerClock()
        self._receive: Any = None
        self._lock = threading.Lock()
        self._order: _Command = _HoldCommand()
        self._fed_s = 0.0
        self._lost = ""
        self._wake, self._opened, self._running = threading.Event(), threading.Event(), threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=f"ur {config.host}", daemon=True)

    def open(self) -> None:
        """Connects and uploads ur_rtde's control program; the arm stands.

        Raises:
            HardwareLost: the controller does not answer, or its state does not allow it; the message says what a person
                should do about it.
            SpecError: ur_rtde is not installed.
        """
        import_rtde("rtde_control")
        self._require_greeting()
        self._thread.start()
        if not self._opened.wait(OPEN_TIMEOUT_S):
            self._lost = f"connecting took longer than {OPEN_TIMEOUT_S:g} s"
        self._require()

    @property
    def is_program_stopped(self) -> bool:
        """No program of ours runs on the controller; `restart_program` comes before the next motion."""
        return isinstance(self._order, _StopProgramCommand)

    def continues_servo(self) -> bool:
        """Whether the arm follows a target, which it then does for `config.silence_s` more; one that nobody spoke to
        for so long has braked, wherever that was."""
        with self._lock:
            self._heed_silence()
            self._fed_s = time.monotonic()
            return isinstance(self._order, _ServoCommand)

    def read(self) -> UrState:
        """The newest reading, of whatever age. Raises HardwareLost, with the reason where the arm was stopped."""
        receive = self._receive  # before the look: whoever takes it away says why first
        self._require()
        stamp_s, now_s = receive.getTimestamp(), time.monotonic()  # first, so that the values are no older
        reading = UrState(
            q=np.array(receive.getActualQ()),
            qd=np.array(receive.getActualQd()),
            pose=np.array(receive.getActualTCPPose()),
            force=np.array(receive.getActualTCPForce()[:3]),
            t_capture_ns=int(self._clock.local_s(stamp_s, now_s) * 1e9),
        )
        if not receive.isConnected():
            self._lost = self._lost or CONNECTION_BROKEN
            self._require()
        if reason := stop_reason(receive):
            raise HardwareLost(f"{self._name}: {reason}")
        return reading

    def servo(self, target: Array, lasts_s: float, joints: bool) -> None:
        """Goes straight to `target` in `lasts_s`: joint angles or a pose, (6,). The arm holds there, and holds where
        nobody calls for `config.silence_s`. Raises HardwareLost."""
        reading, now_s, order = self.read(), time.monotonic(), self._order
        if isinstance(order, _ServoCommand) and order.joints == joints:
            start = order.at(now_s)
        else:
            start = reading.q if joints else reading.pose
        self._give(_ServoCommand(joints, start, target, now_s, lasts_s))

    def hold(self) -> None:
        """Brakes and holds; an arm that is at rest stays so. Raises HardwareLost."""
        self._require()
        if not self.is_program_stopped:
            self._give(_HoldCommand())

    def stop_program(self) -> None:
        """Brakes and ends the program on the controller, which holds the arm. Raises HardwareLost."""
        self._require()
        self._give(_StopProgramCommand())

    def restart_program(self) -> None:
        """Uploads the program again, after `stop_program`. Raises HardwareLost."""
        self._running.clear()
        self._give(_HoldCommand())
        if not self._running.wait(OPEN_TIMEOUT_S):
            self._lost = self._lost or "the controller does not start the program"
        self._require()

    def move_joints(self, q: Array, timeout_s: float, check_stop: Callable[[], None]) -> None:
        """Moves to joint angles by moveJ and holds there, or where `attend`, called all the while, raises. It holds too
        while the newest reading is older than `config.silence_s`.

        Raises:
            HardwareLost: the arm was stopped.
            EmergencyStopped: it is not there in time, and was told to hold: a person is to look at it.
        """
        until_s = time.monotonic() + timeout_s
        order = _MoveCommand(q)
        try:
            while np.abs(self.read().q - q).max() > ARRIVED_RAD:
                check_stop()
                if time.monotonic() > until_s:
                    at = np.round(self.read().q, 3).tolist()
                    raise EmergencyStopped(
                        f"{self._name}: it did not get home within {timeout_s:.3g} s: its joints are at {at}; "
                        "a person must look at it"
                    )
                self._give(order if self._clock.age_s() <= self.config.silence_s else _HoldCommand())
                time.sleep(1 / self.config.rtde_hz)
        finally:
            self.hold()

    def close(self) -> None:
        """Brings the arm to rest and disconnects; gives up on a library that takes longer than `CLOSE_TIMEOUT_S`. A
        controller that has fallen silent is not spoken to: its watchdog has ended the program."""
        self._ending = True
        receive = self._receive
        if receive is not None and not receive.isConnected():
            self._lost = self._lost or CONNECTION_BROKEN
        if self._clock.age_s() > self.config.silence_s:
            self._lost = self._lost or "it fell silent"
        self._give(_StopProgramCommand())
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                log.warning("ur.not_closed host=%s: ur_rtde does not return", self.config.host)
                # a thread that came back from C++ while Python is being torn down would abort the process
                atexit.register(self._thread.join, EXIT_TIMEOUT_S)

    def _give(self, order: _Command) -> None:
        with self._lock:
            self._fed_s, self._order = time.monotonic(), order
        self._wake.set()

    def _require(self) -> None:
        if self._lost:
            raise HardwareLost(f"{self._name}: {self._lost}")
        if self._ending:
            raise HardwareLost(f"{self._name}: not connected")

    def _require_greeting(self) -> None:
        """ur_rtde waits long for a controller that is off or frozen; the dashboard greets whoever connects."""
        where = (self.config.host, DASHBOARD_PORT)
        try:
            with socket.create_connection(where, RESPONSE_TIMEOUT_S) as dashboard:
                dashboard.settimeout(RESPONSE_TIMEOUT_S)
                if dashboard.recv(64):
                    return
        except OSError as error:
            raise HardwareLost(f"{self._name}: no answer on port {DASHBOARD_PORT}: {error}") from error
        raise HardwareLost(f"{self._name}: the dashboard on port {DASHBOARD_PORT} hangs up")

    def _run(self) -> None:
        control = None
        try:
            self._receive, control = self._connect()
            program = _ControlProgram(control, self.config)
            self._opened.set()
            while not (self._lost or (self._ending and program.mode == "rest")):
                program.execute(self._current())
                if program.mode != "rest":
                    self._running.set()
                self._wake.wait(1 / self.config.rtde_hz)
                self._wake.clear()
        except Exception as error:  # the library's, of any kind, and ours: whoever calls next is told
            self._lost = self._lost or self._why_stopped() or str(error)
            log.warning("ur.lost host=%s %s", self.config.host, self._lost)
        finally:
            self._opened.set()
            self._running.set()
        if self._lost:  # the destructors do this too, but let no other thread of Python run meanwhile
            for end in (control, self._receive):
                if end is not None:
                    end.disconnect()
        self._receive = None

    def _why_stopped(self) -> str:
        """What the controller says of it, once its state is newer than the end of the program; empty for nothing."""
        receive = self._receive
        if receive is None:
            return ""
        if not receive.isConnected():
            return CONNECTION_BROKEN
        newer_s = receive.getTimestamp() + STATE_LAG_PACKAGES / self.config.rtde_hz
        until_s = time.monotonic() + RESPONSE_TIMEOUT_S
        while receive.isConnected() and receive.getTimestamp() < newer_s and time.monotonic() < until_s:
            time.sleep(1 / self.config.rtde_hz)
        return stop_reason(receive)

    def _connect(self) -> tuple[Any, Any]:
        host, hz = self.config.host, self.config.rtde_hz
        receive = import_rtde("rtde_receive").RTDEReceiveInterface(host, hz, RTDE_VARIABLES)
        until_s = time.monotonic() + RESPONSE_TIMEOUT_S
        while not receive.isConnected() or not _has_state(receive):
            if time.monotonic() > until_s:
                raise HardwareLost("it sends no state")
            time.sleep(1 / hz)
        if reason := stop_reason(receive):
            raise HardwareLost(reason)
        return receive, import_rtde("rtde_control").RTDEControlInterface(host, hz)

    def _current(self) -> _Command:
        with self._lock:
            self._heed_silence()
            return self._order

    def _heed_silence(self) -> None:
        silent = time.monotonic() - self._fed_s > self.config.silence_s
        if silent and not isinstance(self._order, _StopProgramCommand):
            self._order = _HoldCommand()


class _ControlProgram:
    """The control program on the controller, and what it does.

    Attributes:
        mode: ``idle`` and ``rest`` stand; at rest there is no program.
    """

    def __init__(self, control: Any, config: UrConnectionConfig) -> None:
        self._control, self._config = control, config
        self.mode: Literal["idle", "servo", "move", "rest"] = "idle"
        self._moving: _MoveCommand | None = None
        self._set_watchdog()

    def execute(self, order: _Command) -> None:
        """Does what is due now. Raises HardwareLost where the program does not run any more, or does not obey."""
        if isinstance(order, _StopProgramCommand):
            self._rest()
            return
        if self.mode == "rest":
            self._start()
        if isinstance(order, _ServoCommand):
            self._servo(order)
        elif isinstance(order, _MoveCommand):
            self._move(order)
        else:
            self._brake()
            self._control.kickWatchdog()
        if not self._control.isProgramRunning():
            raise HardwareLost("the controller ended the program: its watchdog did, or somebody at the pendant")

    def _servo(self, order: _ServoCommand) -> None:
        if self.mode == "move":
            self._brake()
        self.mode = "servo"
        point, config = order.at(time.monotonic()).tolist(), self._config
        servo = self._control.servoJ if order.joints else self._control.servoL
        # the first two numbers are speed and acceleration, which the controller does not use
        _require_success(
            servo(point, 0.0, 0.0, 1 / config.rtde_hz, config.lookahead_s, config.gain), "a target was refused"
        )

    def _move(self, order: _MoveCommand) -> None:
        if order is not self._moving:
            self._brake()
            speed, acceleration = self._config.joint_speed, self._config.joint_acceleration
            _require_success(self._control.moveJ(order.end.tolist(), speed, acceleration, True), "a move was refused")
            self._moving, self.mode = order, "move"
        self._control.kickWatchdog()

    def _brake(self) -> None:
        if self.mode == "servo":
            _require_success(self._control.servoStop(SERVO_DECELERATION), "it does not brake")
        elif self.mode == "move":
            self._control.stopJ(JOINT_DECELERATION)
        self._moving, self.mode = None, "idle"

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
        silence_s = self._config.silence_s
        patience_s = silence_s - min(WATCHDOG_LEAD_S, silence_s / 20)
        _require_success(self._control.setWatchdog(1 / patience_s), "the watchdog cannot be set")


def import_rtde(name: str) -> Any:
    """ur_rtde's module of that name. Raises SpecError where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise SpecError(f"ur_rtde cannot be used: {error}; it comes with: {install_hint('ur')}") from error


def stop_reason(receive: Any) -> str:
    """Why the arm cannot be driven, in words; empty where it can."""
    safety, mode = receive.getSafetyMode(), receive.getRobotMode()
    if safety not in (NORMAL, REDUCED):
        return f"{SAFETY_MODES.get(safety, f'safety mode {safety}')}; a person must clear it at the pendant"
    if mode != RUNNING:
        return f"it is {ROBOT_MODES.get(mode, f'in robot mode {mode}')}; a person must start it at the pendant"
    return ""


def _has_state(receive: Any) -> bool:
    try:
        return bool(receive.getActualQ())
    except RuntimeError:  # ur_rtde's, until the first package
        return False


def _require_success(done: bool, otherwise: str) -> None:
    if not done:
        raise HardwareLost(otherwise)
