"""The two processes that every robot has, and the files that they read.

One robot on its own computer: its two processes, and what is said of them in plain words.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hal.durable import make_folder_durably
from hal.process_supervisor import ProcessState, ProcessStatus, ProcessSupervisor, RestartPolicy
from user_sys.compose import RobotConfig
from user_sys.config import save
from user_sys.edge.driver_client import WAITING_LOG_PREFIX
from user_sys.edge.session import SessionConfig
from user_sys.edge.status import SessionActivity, SessionReport, read_session_report
from user_sys.logs import last_log_message
from user_sys.tunnel.client import TunnelState

ROBOT_FILE, SESSION_FILE = "robot.yaml", "session.yaml"


def robot_process_argv(robot: str, state: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Name and command line of a robot's driver process and of its session process, in the order of their starts."""
    driver = module_argv("user_sys.edge.driver_server", state / ROBOT_FILE, state)
    return (f"{robot}-driver", driver), (f"{robot}-session", module_argv("user_sys.edge.session", state / SESSION_FILE))


def write_process_configs(state: Path, robot: RobotConfig, session: SessionConfig) -> None:
    """Writes what both processes read into `state`, which is made when missing."""
    make_folder_durably(state)
    save(robot, state / ROBOT_FILE)
    save(session, state / SESSION_FILE)


def module_argv(name: str, *args: object) -> tuple[str, ...]:
    """The command line that runs a module with the Python of this process."""
    return (sys.executable, "-m", name, *map(str, args))


REMINDER_PERIOD_S = 60.0
MAX_LOG_BYTES = 16 << 20
PROCESS_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
# Nobody may be near: it never gives up. A session has time to deliver its outbox before it is killed.
RESTART_POLICY = RestartPolicy(backoff_s=0.5, backoff_max_s=15.0, max_restarts=1000, window_s=60.0, stop_after_s=7.0)


@dataclass(frozen=True)
class RobotHealth:
    """How a robot fares. `kind` changes where that is news to a person; `text` says it."""

    kind: str
    text: str


UNREACHABLE, HELD, STARTING = "away", "held", "starting"
REFUSED_LOG_PREFIX = "session.failed Refused: "  # what the log of a session ends with that the gateway does not let in
_ACTIVITY_TEXT: dict[SessionActivity, str] = {
    "waiting for its lease": "waiting until the robot is free",
    "waiting for weights": "waiting for weights, and only a person moves the robot until something was learned",
    "driving": "the run drives the robot",
    "held without a lease": "its lease has run out, and the robot is held until it is renewed",
    "delivering": "what was recorded is delivered",
}
RUN_FINISHED = RobotHealth("over", "the run is over")


def robot_health(
    gateway: str,
    driver: ProcessStatus,
    session: ProcessStatus,
    report: SessionReport | None,
    last_log_lines: Mapping[str, str],
) -> RobotHealth:
    """Args:
    report: the running session's, None where it has said nothing yet.
    words: the last ones of ``driver`` and ``session``, which tell why they ended.
    """
    if session.state is ProcessState.STOPPED and session.last_exit == 0:
        return RUN_FINISHED
    for name, status in (("driver", driver), ("session", session)):
        if status.state is not ProcessState.RUNNING:
            code = status.last_exit or 0
            why = f"killed by signal {-code}" if code < 0 else last_log_lines[name] or "it said nothing"
            if name == "session" and why.startswith(REFUSED_LOG_PREFIX):
                return RobotHealth(
                    f"{name} {why}", f"{why.removeprefix(REFUSED_LOG_PREFIX)}; it asks again, and the robot is held"
                )
            return RobotHealth(f"{name} {why}", f"its {name} process has ended and is started again: {why}")
    if last_log_lines["driver"].startswith(WAITING_LOG_PREFIX):
        return RobotHealth(
            last_log_lines["driver"], f"waits: {last_log_lines['driver'].removeprefix(WAITING_LOG_PREFIX)}"
        )
    if report is None:
        return RobotHealth(STARTING, "its processes start")
    if report.link == TunnelState.OPEN.value:
        return RobotHealth(report.doing, f"connected to {gateway}: {_ACTIVITY_TEXT[report.doing]}")
    if not report.reason:
        return RobotHealth(STARTING, f"connects to {gateway}")
    if report.doing == "driving":
        text = "the robot works on, and what it records is kept in its outbox"
        return RobotHealth(UNREACHABLE, f"{gateway} is out of reach ({report.reason}): {text}")
    if report.doing == "held without a lease":
        return RobotHealth(HELD, f"{gateway} is out of reach ({report.reason}): {_ACTIVITY_TEXT[report.doing]}")
    return RobotHealth("unreachable", f"cannot reach {gateway} ({report.reason}): trying again; the robot is held")


def is_expected_restart(now: RobotHealth, reported: RobotHealth) -> bool:
    """Whether `told` said that a process is started again, and so it is `now`: news is only what comes of it."""
    return now.kind == STARTING and reported.kind.startswith(("driver ", "session "))


class RobotProcesses:
    """Starts a robot's driver and session, keeps them running, and tells `say` what a person would want to know.

    One thread calls it.
    """

    def __init__(self, robot: str, state: Path, logs: Path, gateway: str, print_line: Callable[[str], None]) -> None:
        self.robot = robot
        self._gateway, self._say = gateway, print_line
        self._logs: dict[str, Path] = {}
        supervisors = []
        for part, (name, argv) in zip(("driver", "session"), robot_process_argv(robot, state), strict=True):
            self._logs[part] = _rotate_log(logs / f"{name}.log")
            supervisors.append(ProcessSupervisor(argv, PROCESS_ENVIRONMENT, self._logs[part], RESTART_POLICY))
        self._driver, self._session = supervisors
        self._told = RobotHealth("", "")
        self._since_s = self._remind_at_s = 0.0
        self._waiting = (0, 0, 0)
        self._pid: int | None = None

    @property
    def is_finished(self) -> bool:
        """The run has ended and the session has left."""
        return self._told is RUN_FINISHED

    def start(self) -> None:
        """Raises SupervisionError: a process cannot be started at all, or its log cannot be written."""
        self._driver.start()
        self._session.start()

    def restart_session(self, why: str) -> None:
        """Has the session start again; the driver holds the robot meanwhile. Blocks until the old one has left."""
        self._tell(f"{why}: its session starts again")
        self._session.stop()
        self._session.start()

    def poll(self) -> None:
        """Says what has changed since the last look."""
        session = self._session.status()
        report = self._read(session.pid)
        words = {part: last_log_message(path) for part, path in self._logs.items()}
        now = robot_health(self._gateway, self._driver.status(), session, report, words)
        if is_expected_restart(now, self._told):
            return
        if now.kind != self._told.kind:
            if self._told.kind in (UNREACHABLE, HELD) and now.kind not in (UNREACHABLE, HELD) and report is not None:
                self._tell(f"within reach again after {_duration(self._now() - self._since_s)}; {self._kept()}")
            self._tell(now.text)
            if (self._told.kind, now.kind) != (UNREACHABLE, HELD):
                self._since_s = self._now()
            self._remind_at_s = self._now() + REMINDER_PERIOD_S
        elif now.kind in (UNREACHABLE, HELD) and self._now() >= self._remind_at_s:
            self._remind_at_s += REMINDER_PERIOD_S
            self._tell(f"still out of reach, for {_duration(self._now() - self._since_s)}; {self._kept()}")
        self._told = now

    def request_stop(self) -> None:
        """Begins to end the session: it cuts its episode off, delivers what it can, and gives the lease back."""
        self._session.request_stop()

    def stop(self) -> None:
        """Ends the driver, by which the robot does its documented safe stop, also on its way to a start; and the
        session. Blocks."""
        try:
            self._driver.stop()
        finally:
            self._session.stop()
        self._read(None)
        self._tell(f"stopped; {self._kept()}")

    def _read(self, pid: int | None) -> SessionReport | None:
        """The report of the session that runs as `pid`; its count of what waits is kept beyond its end."""
        self._pid = pid or self._pid
        report = read_session_report(self.robot, self._pid)
        if report is not None:
            self._waiting = (report.waiting_chunks, report.waiting_bytes, report.dropped_episodes)
        return report if pid is not None else None

    def _kept(self) -> str:
        chunks, size, dropped = self._waiting
        lost = f"; {dropped:,} autonomous episodes were dropped, as it was full" if dropped else ""
        if not chunks:
            return f"its outbox is empty{lost}"
        return f"{chunks:,} {'chunk waits' if chunks == 1 else 'chunks wait'} in its outbox ({size / 1e6:.1f} MB){lost}"

    def _tell(self, text: str) -> None:
        self._say(f"{self.robot}: {text}")

    @staticmethod
    def _now() -> float:
        return time.monotonic()


def _rotate_log(log: Path) -> Path:
    """`log`, with what an earlier start wrote into it out of the way where that had grown large."""
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    return log


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
