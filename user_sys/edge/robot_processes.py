"""A robot's driver and session processes on its own computer: command lines, config files, supervision and status."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.durable import make_folder_durably
from hal.process_supervisor import (
    ProcessState,
    ProcessStatus,
    ProcessSupervisor,
    RestartPolicy,
)
from user_sys.compose import RobotConfig
from user_sys.config import save
from user_sys.edge.driver_client import WAITING_LOG_PREFIX
from user_sys.edge.session import SessionConfig
from user_sys.edge.status import SessionActivity, SessionReport, read_session_report
from user_sys.errors import RunError, SessionRefused
from user_sys.logs import last_log_message, log_environment
from user_sys.tunnel.client import TunnelState

ROBOT_FILE, SESSION_FILE = "robot.yaml", "session.yaml"
REMINDER_PERIOD_S = 60.0
PROCESS_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
# It restarts for ever, as the computer may be unattended. A session has time to deliver its outbox before SIGKILL.
RESTART_POLICY = RestartPolicy(backoff_s=0.5, backoff_max_s=15.0, stop_after_s=7.0)
UNREACHABLE, HELD, STARTING = "away", "held", "starting"
_FAULTS = (UNREACHABLE, HELD, "unreachable", "held without a lease")
REFUSED_LOG_PREFIX = f"session.failed {SessionRefused.__name__}: "
"""Prefix of the last log line of a session that the gateway refuses."""
_ACTIVITY_TEXT: dict[SessionActivity, str] = {
    "waiting for its lease": "waiting until the robot is free",
    "waiting for weights": "waiting for learned weights; until then only an operator moves the robot",
    "driving": "the run drives the robot",
    "held without a lease": "its lease has expired, and the robot is held until it is renewed",
    "delivering": "delivering the recorded chunks",
}
EDGE_STATUS_FILE = "edge-status.json"
EDGE_IDENTITY_FILE = "identity"  # in the folder of `user-sys edge`, also while that does not run
PERIOD_S = 2.0
STUCK_S = 30.0  # a session may take seconds to restart, and meanwhile nothing is written
_log = logging.getLogger(__name__)


def robot_process_argv(robot: str, state: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Name and command line of a robot's driver process and of its session process, in the order of their starts."""
    driver = module_argv("user_sys.edge.driver_server", state / ROBOT_FILE, state)
    return (f"{robot}-driver", driver), (f"{robot}-session", module_argv("user_sys.edge.session", state / SESSION_FILE))


def write_process_configs(state: Path, robot: RobotConfig, session: SessionConfig) -> None:
    """Writes both processes' config files into the folder `state`, which is created if it is missing."""
    make_folder_durably(state)
    save(robot, state / ROBOT_FILE)
    save(session, state / SESSION_FILE)


def module_argv(name: str, *args: object) -> tuple[str, ...]:
    """The command line that runs a module with the Python of this process."""
    return (sys.executable, "-m", name, *map(str, args))


@dataclass(frozen=True)
class RobotHealth:
    """A robot's condition. A change of `kind` is reported; `text` describes it."""

    kind: str
    text: str

    @property
    def is_fault(self) -> bool:
        """Whether the robot cannot work with its run."""
        return self.kind in _FAULTS or self.kind.startswith(("driver ", "session ", WAITING_LOG_PREFIX))


RUN_FINISHED = RobotHealth("over", "the run is over")


def robot_health(
    gateway: str,
    driver: ProcessStatus,
    session: ProcessStatus,
    report: SessionReport | None,
    last_log_lines: Mapping[str, str],
) -> RobotHealth:
    """Args:
    report: of the running session; None before its first.
    last_log_lines: of ``driver`` and ``session``; they contain the error that ended the process.
    """
    if session.state is ProcessState.STOPPED and session.last_exit == 0:
        return RUN_FINISHED
    for name, status in (("driver", driver), ("session", session)):
        if status.state is not ProcessState.RUNNING:
            return _process_health(name, status, last_log_lines[name])
    if last_log_lines["driver"].startswith(WAITING_LOG_PREFIX):
        text = last_log_lines["driver"].removeprefix(WAITING_LOG_PREFIX)
        return RobotHealth(last_log_lines["driver"], f"waits: {text}")
    if report is None:
        return RobotHealth(STARTING, "its processes start")
    if report.link == TunnelState.OPEN.value:
        return RobotHealth(report.doing, f"connected to {gateway}: {_ACTIVITY_TEXT[report.doing]}")
    if not report.reason:
        return RobotHealth(STARTING, f"connects to {gateway}")
    if report.doing == "driving":
        text = "the robot continues, and its outbox keeps the recorded chunks"
        return RobotHealth(UNREACHABLE, f"{gateway} is unreachable ({report.reason}): {text}")
    if report.doing == "held without a lease":
        return RobotHealth(HELD, f"{gateway} is unreachable ({report.reason}): {_ACTIVITY_TEXT[report.doing]}")
    return RobotHealth("unreachable", f"cannot reach {gateway} ({report.reason}): trying again; the robot is held")


def _process_health(name: str, status: ProcessStatus, last_log_line: str) -> RobotHealth:
    """The health of a robot whose process `name` does not run."""
    code = status.last_exit or 0
    why = f"killed by signal {-code}" if code < 0 else status.error or last_log_line or "its log is empty"
    if name == "session" and why.startswith(REFUSED_LOG_PREFIX):
        text = f"{why.removeprefix(REFUSED_LOG_PREFIX)}; it tries again, and the robot is held"
    else:
        text = f"its {name} process has ended and is restarted: {why}"
    return RobotHealth(f"{name} {why}", text)


def is_expected_restart(now: RobotHealth, reported: RobotHealth) -> bool:
    """Whether `now` is the start of a process whose restart was reported already."""
    return now.kind == STARTING and reported.kind.startswith(("driver ", "session "))


class RobotProcesses:
    """Starts a robot's driver and session, restarts them, and prints each change. One thread calls it.

    Attributes:
        health: the robot's condition at the last `poll`.
    """

    def __init__(self, robot: str, state: Path, logs: Path, gateway: str, print_line: Callable[[str], None]) -> None:
        """`state`: folder of the two config files."""
        self.robot = robot
        self._gateway, self._print_line = gateway, print_line
        self._logs: dict[str, Path] = {}
        supervisors = []
        for part, (name, argv) in zip(("driver", "session"), robot_process_argv(robot, state), strict=True):
            self._logs[part] = logs / f"{name}.log"
            environment = PROCESS_ENVIRONMENT | log_environment(process=name, robot=robot)
            supervisors.append(ProcessSupervisor(argv, environment, self._logs[part], RESTART_POLICY))
        self._driver, self._session = supervisors
        self.health = RobotHealth("", "")
        self._since_s = self._remind_at_s = 0.0
        self._unsent = (0, 0, 0)  # chunks, bytes, dropped episodes
        self._pid: int | None = None

    @property
    def is_finished(self) -> bool:
        """The run has ended and the session has exited."""
        return self.health is RUN_FINISHED

    def start(self) -> None:
        """Raises SupervisionError: a process cannot be started, or its log cannot be written."""
        self._driver.start()
        self._session.start()

    def restart_session(self, why: str) -> None:
        """Restarts the session; the driver holds the robot meanwhile. Blocks until the old session has exited."""
        self._print(f"{why}: its session restarts")
        self._session.stop()
        self._session.start()

    def poll(self) -> None:
        """Prints changes since the last call."""
        session = self._session.status()
        report = self._read_report(session.pid)
        last_lines = {part: last_log_message(path) for part, path in self._logs.items()}
        now = robot_health(self._gateway, self._driver.status(), session, report, last_lines)
        if is_expected_restart(now, self.health):
            return
        last, offline = self.health, (UNREACHABLE, HELD)
        if now.kind != last.kind:
            if last.kind in offline and now.kind not in offline and report is not None:
                offline_s = time.monotonic() - self._since_s
                self._print(f"reachable again after {_duration(offline_s)}; {self._outbox_text()}")
            self._print(now.text)
            if (last.kind, now.kind) != (UNREACHABLE, HELD):
                self._since_s = time.monotonic()
            self._remind_at_s = time.monotonic() + REMINDER_PERIOD_S
        elif now.kind in offline and time.monotonic() >= self._remind_at_s:
            self._remind_at_s += REMINDER_PERIOD_S
            offline_s = time.monotonic() - self._since_s
            self._print(f"still unreachable, for {_duration(offline_s)}; {self._outbox_text()}")
        self.health = now

    def request_stop(self) -> None:
        """Asks the session to end: it truncates its episode, delivers chunks, and releases the lease."""
        self._session.request_stop()

    def stop(self) -> None:
        """Stops the driver, so that the robot stops safely, also during a reset. Then stops the session. Blocks."""
        try:
            self._driver.stop()
        finally:
            self._session.stop()
        self._read_report(None)
        self._print(f"stopped; {self._outbox_text()}")

    def _read_report(self, pid: int | None) -> SessionReport | None:
        """The report of the session that runs as `pid`. Its chunk counts are kept after the session has exited."""
        self._pid = pid or self._pid
        report = read_session_report(self.robot, self._pid)
        if report is not None:
            self._unsent = (report.waiting_chunks, report.waiting_bytes, report.dropped_episodes)
        return report if pid is not None else None

    def _outbox_text(self) -> str:
        chunks, size, dropped = self._unsent
        lost = f"; {dropped:,} autonomous episodes were dropped, as it was full" if dropped else ""
        if not chunks:
            return f"its outbox is empty{lost}"
        return f"{chunks:,} {'chunk waits' if chunks == 1 else 'chunks wait'} in its outbox ({size / 1e6:.1f} MB){lost}"

    def _print(self, text: str) -> None:
        self._print_line(f"{self.robot}: {text}")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


class EdgeRobot(msgspec.Struct, frozen=True):
    """A robot of this computer. `text` is the line that `user-sys edge` has printed."""

    name: str
    text: str
    is_fault: bool


class EdgeStatus(msgspec.Struct, frozen=True):
    """The robots of `user-sys edge` at one moment; `host` and `pid` are its own."""

    written_unix_s: float
    host: str
    pid: int
    robots: tuple[EdgeRobot, ...]

    @property
    def is_alive(self) -> bool:
        """Whether the program runs and is not stuck."""
        is_gone = self.host == socket.gethostname() and not Path(f"/proc/{self.pid}").exists()
        return not is_gone and time.time() - self.written_unix_s < STUCK_S


class EdgeStatusFile:
    """Writes the status. One thread calls it. A file that cannot be written is logged; the robots continue."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EDGE_STATUS_FILE
        self._next_s = 0.0

    def write(self, robots: Iterable[RobotProcesses]) -> None:
        """Replaces the file, at most once in `PERIOD_S`."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + PERIOD_S
        shown = tuple(EdgeRobot(each.robot, each.health.text, each.health.is_fault) for each in robots)
        status = EdgeStatus(time.time(), socket.gethostname(), os.getpid(), shown)
        try:
            fresh = self._path.with_suffix(".fresh")
            fresh.write_bytes(msgspec.json.encode(status))
            fresh.replace(self._path)
        except OSError as error:
            _log.warning("edge.status_failed %s", error)

    def remove(self) -> None:
        """The program ends."""
        self._path.unlink(missing_ok=True)


def read_edge_status(folder: Path) -> EdgeStatus:
    """Raises RunError: `user-sys edge` does not run here, or another version wrote the file."""
    try:
        return msgspec.json.decode((folder / EDGE_STATUS_FILE).read_bytes(), type=EdgeStatus)
    except FileNotFoundError:
        raise RunError(f"`user-sys edge` does not run in {folder}, or has not started its robots yet") from None
    except DECODE_ERRORS as error:
        raise RunError(f"{folder / EDGE_STATUS_FILE} cannot be read: {error}; another version wrote it") from None
