"""The status of a run: a file that its launcher keeps, and the faults that it shows.

The launcher replaces ``status.json`` in the run's folder every two seconds. `find_faults` describes each
fault and the system's reaction. Metrics, processes and robots are those of the console.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.process_supervisor import ProcessState, ProcessStatus, exit_reason
from hal.registry import OVERRIDDEN
from hal.resource import Health
from user_sys.console.progress import RobotView, RunView
from user_sys.edge.control_authority import ControlState
from user_sys.errors import RunError
from user_sys.inference.protocol import POLICY_NODE
from user_sys.robot_records import is_learner_name
from user_sys.run.topology import REWARD_PROCESS
from user_sys.tunnel.keys import GATEWAY_NAME

STATUS_FILE = "status.json"
SHOWN_RESTART_S = 60.0  # a restarted process counts as a fault for so long
STUCK_S = 10.0  # a launcher that has written nothing for so long is stuck
SILENT_S = 3.0  # gateways and learners report each second
CONNECT_S = 15.0  # time for a process to start, and for a robot to connect
_ENDED = ("ended", "interrupted")
_log = logging.getLogger(__name__)


class ProcessReport(ProcessStatus, frozen=True, kw_only=True):
    """One process of a run.

    Attributes:
        restarted_unix_s: time of its last restart; 0 before the first.
        reported_unix_s: time of its last report of metrics; 0 before the first.
    """

    name: str
    reported_unix_s: float = 0.0
    restarted_unix_s: float = 0.0


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment.

    Attributes:
        stage: ``starting``, ``training``, ``evaluating``, ``ended`` or ``interrupted``.
        host, pid: of the launcher.
        missing: robots that cannot be driven, with the reason.
    """

    written_unix_s: float
    stage: str
    host: str
    pid: int
    run: RunView
    processes: tuple[ProcessReport, ...] = ()
    missing: dict[str, str] = {}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A problem of `subject`, and the system's reaction."""

    subject: str
    problem: str
    reaction: str

    def __str__(self) -> str:
        return f"{self.subject} {self.problem}; {self.reaction}"


class StatusFile:
    """Writes the status of a run. One thread calls it. A file that cannot be written is logged once.

    Attributes:
        newest: the last status; None before the first.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATUS_FILE
        self._restarts: dict[str, tuple[int, float]] = {}  # by process: their number, and the time of the last
        self.newest: RunStatus | None = None
        self._reported_s: dict[str, float] = {}
        self._has_failed = False

    def on_report(self, node: str) -> None:
        """A process has reported its metrics."""
        self._reported_s[node] = time.time()

    def write(
        self, stage: str, run: RunView, processes: Mapping[str, ProcessStatus], missing: Mapping[str, str]
    ) -> None:
        """Replaces the file."""
        now_s = time.time()
        reports = []
        for name, process in processes.items():
            before, at_s = self._restarts.get(name, (0, 0.0))
            if process.restarts > before or process.state is ProcessState.WAITING:
                at_s = now_s
                if name == GATEWAY_NAME:  # all others connect again
                    self._reported_s = dict.fromkeys(self._reported_s, now_s)
            self._restarts[name] = (process.restarts, at_s)
            reports.append(
                ProcessReport(
                    name=name,
                    **msgspec.structs.asdict(process),
                    reported_unix_s=self._reported_s.get(name, 0.0),
                    restarted_unix_s=at_s,
                )
            )
        self._write(
            RunStatus(
                written_unix_s=now_s,
                stage=stage,
                host=socket.gethostname(),
                pid=os.getpid(),
                run=run,
                processes=tuple(reports),
                missing=dict(missing),
            )
        )

    def set_stage(self, stage: str) -> None:
        """Replaces the stage; the rest stays."""
        if self.newest is not None:
            self._write(msgspec.structs.replace(self.newest, stage=stage, written_unix_s=time.time(), processes=()))

    def _write(self, status: RunStatus) -> None:
        self.newest = status
        fresh = self._path.with_suffix(".fresh")
        try:
            fresh.write_bytes(msgspec.json.encode(_finite(msgspec.to_builtins(status))))
            fresh.replace(self._path)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                _log.warning("run.status_failed path=%s: %s", self._path, error)
            self._has_failed = True


def _finite(value: Any) -> Any:
    """Plain values without scalars that JSON has no number for: of a dict it drops them, of a list they become 0."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items() if _is_number(each)}
    if isinstance(value, (list, tuple)):
        return [_finite(each) if _is_number(each) else 0.0 for each in value]
    return value


def _is_number(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def ended_processes(statuses: Mapping[str, ProcessStatus]) -> set[str]:
    """The processes that have ended and are not started again."""
    ended = (ProcessState.STOPPED, ProcessState.FAILED)
    return {name for name, status in statuses.items() if status.state in ended}


def read_status(folder: Path) -> RunStatus:
    """The newest status of the run. Raises RunError: there is none, or another version wrote it."""
    try:
        return msgspec.json.decode((folder / STATUS_FILE).read_bytes(), type=RunStatus)
    except OSError:
        raise RunError(f"{folder} has no {STATUS_FILE}: it is not a run's folder, or the run has not started") from None
    except DECODE_ERRORS as error:
        raise RunError(f"{folder / STATUS_FILE} cannot be read: {error}; another version wrote it") from None


# Faults ---------------------------------------------------------------------------------------------------------------


def find_faults(status: RunStatus, folder: Path, now_unix_s: float | None = None) -> list[Fault]:
    """The faults of a run whose folder is `folder`, the most severe first; none of a run that has ended."""
    if status.stage in _ENDED:
        return []
    now_s = time.time() if now_unix_s is None else now_unix_s
    if fault := launcher_fault(status, folder, now_s):
        return [fault]
    if status.stage == "evaluating":
        return []
    return [
        *_process_faults(status, folder, now_s),
        *(fault for robot in status.run.robots for fault in _robot_faults(robot, status)),
        *_run_faults(status.run, folder),
    ]


def launcher_fault(status: RunStatus, folder: Path, now_unix_s: float | None = None) -> Fault | None:
    """The fault of the program that runs everything else, if it hangs or has ended before its run."""
    if status.stage in _ENDED:
        return None
    now_s = time.time() if now_unix_s is None else now_unix_s
    if status.host == socket.gethostname() and not Path(f"/proc/{status.pid}").exists():
        return Fault(
            subject="the launcher",
            problem=f"(process {status.pid}) has ended before the run was over",
            reaction=f"its processes end and robots hold; `user-sys train --resume {folder}` continues the run",
        )
    if status.stage != "evaluating" and now_s - status.written_unix_s > STUCK_S:
        return Fault(
            subject="the launcher",
            problem=f"(process {status.pid}) has reported nothing for {now_s - status.written_unix_s:.0f} s",
            reaction="robots, gateway and learner continue without it; dead processes are not shown",
        )
    return None


def _reaction(process: str) -> str:
    if process == GATEWAY_NAME:
        return "robots continue and keep their steps in their outboxes"
    if process == POLICY_NODE:
        return "robots hold, and people may drive them"
    if process == REWARD_PROCESS:
        return "episodes wait for their labels"
    if is_learner_name(process):
        return "robots continue with the weights that they have, and it resumes from its checkpoint"
    if process.endswith("-driver"):
        return "the robot stops"
    return "the robot holds, and its recorded steps are kept"


def _process_faults(status: RunStatus, folder: Path, now_s: float) -> Iterator[Fault]:
    for process in status.processes:
        reaction = _reaction(process.name)
        ended = exit_reason(process.last_exit or 0)
        log = folder / "logs" / f"{process.name}.log"
        if process.state is ProcessState.FAILED:
            problem = f"ended {process.restarts + 1} times and is not started again: {process.error}"
            if is_learner_name(process.name):
                reaction = (
                    "the run and its robots continue without new weights from it; mend the cause and continue with "
                    f"`user-sys train --resume {folder}`"
                )
            yield Fault(subject=process.name, problem=problem, reaction=f"{reaction}; its log is {log}")
        elif process.state is ProcessState.WAITING and process.last_exit is None:
            if status.run.elapsed_s > CONNECT_S:
                problem = "has not started yet, or its computer does not answer"
                yield Fault(subject=process.name, problem=problem, reaction=f"meanwhile {reaction}")
        elif process.state is ProcessState.WAITING:
            problem = f"ended {ended} and is being restarted"
            yield Fault(subject=process.name, problem=problem, reaction=f"{reaction}; its log is {log}")
        elif process.restarts and now_s - process.restarted_unix_s < SHOWN_RESTART_S:
            problem = f"ended {ended} and was restarted {max(0.0, now_s - process.restarted_unix_s):.0f} s ago"
            yield Fault(subject=process.name, problem=problem, reaction=f"meanwhile {reaction}; its log is {log}")
        elif silent_s(process, status) > SILENT_S:
            problem = f"runs and has reported nothing for {now_s - process.reported_unix_s:.0f} s"
            yield Fault(subject=process.name, problem=problem, reaction=f"{reaction}; its log is {log}")


def silent_s(process: ProcessReport, status: RunStatus) -> float:
    """How long a running gateway or learner has reported nothing; a learner, until the gateway's last report."""
    is_reporting = process.name == GATEWAY_NAME or is_learner_name(process.name)
    if not is_reporting or not process.reported_unix_s or process.state is not ProcessState.RUNNING:
        return 0.0
    gateway_s = [each.reported_unix_s for each in status.processes if each.name == GATEWAY_NAME]
    until_s = status.written_unix_s if process.name == GATEWAY_NAME else min(gateway_s, default=0.0)
    return max(0.0, until_s - process.reported_unix_s)


def _robot_faults(robot: RobotView, status: RunStatus) -> Iterator[Fault]:
    def fault(problem: str, reaction: str) -> Fault:
        return Fault(subject=robot.name, problem=problem, reaction=reaction)

    if robot.health is not Health.READY and robot.health is not Health.LEASED:
        note = f": {robot.health_note}" if robot.health_note else ""
        yield fault(f"is {robot.health}{note}", "no session drives it until it is ready again")
    if robot.status is None:
        if robot.name in status.missing:
            yield fault(status.missing[robot.name].removeprefix(f"{robot.name} "), "its start is repeated")
        elif robot.silent_s > CONNECT_S:
            yield fault(f"has not connected for {robot.silent_s:.0f} s", "the run continues with the other robots")
        return
    if robot.lost and robot.health in OVERRIDDEN:  # its session waits for its lease and sends no report
        return
    if robot.lost:
        action = "it holds if its session ended; else it continues, and its steps wait in its outbox"
        yield fault(f"has reported nothing for {robot.silent_s:.0f} s", action)
        return
    report = robot.status
    if report.authority == ControlState.STOPPED:
        yield fault("has a pressed e-stop", "it stays stopped until a person re-arms it")
    if report.note:
        holds = report.authority == ControlState.HOLD
        yield fault(f"reports: {report.note}", "it holds meanwhile" if holds else "it retries")
    if report.dropped_episodes:
        yield fault(
            f"has deleted {report.dropped_episodes} episodes, because its outbox was full",
            "it keeps the newest episodes, demonstrations and interventions",
        )
    if report.refused_realtime:
        yield fault(f"has no real-time settings: {report.refused_realtime}", "its control rate may vary")


def _run_faults(run: RunView, folder: Path) -> Iterator[Fault]:
    for warning in filter(None, run.warning.split(" | ")):
        problem, _, reaction = warning.partition("; ")
        yield Fault(subject="the run", problem=f"has a problem: {problem}", reaction=reaction or "the run continues")
    for node, scalars in run.metrics.items():
        for name, (problem, reaction) in _COUNTED.items():
            if count := int(scalars.get(name, 0)):
                yield Fault(subject=node, problem=problem.format(count), reaction=reaction)
        if scalars.get("checkpoints_unreadable", 0):
            yield Fault(
                subject=node,
                problem=f"could not read {int(scalars['checkpoints_unreadable'])} newer checkpoints",
                reaction=f"it continued from an older one; see {folder / 'logs' / node}.log",
            )


_COUNTED = {  # scalar: problem with a count, reaction
    "peers_refused": ("refused {} connections by key, version or format", "these peers can neither read nor write"),
    "chunks_refused": ("refused {} chunks", "their robots set them aside; the gateway's log has the reason of each"),
    "weights_damaged": ("received {} damaged blobs of weights", "it requested them again"),
    "store_shortfall_bytes": ("cannot keep the store in its limit, by {} bytes", "all other episodes are protected"),
    "damaged": ("found {} damaged records in the store", "it skips them; `user-sys store verify` lists them"),
}
