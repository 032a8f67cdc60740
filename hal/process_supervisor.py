"""Supervision of one child process: start it, restart it when it exits by itself, stop it within a deadline.

A supervised process is STOPPED, RUNNING, WAITING (for its restart) or FAILED::

    STOPPED -start-> RUNNING -exit status not 0, or a signal-> WAITING -pause over-> RUNNING
    RUNNING -exit status 0-> STOPPED          RUNNING -too many failures-> FAILED
    RUNNING, WAITING -stop-> STOPPED          STOPPED, FAILED -start-> RUNNING

The process is killed when its supervisor's process ends, also after a kill (PR_SET_PDEATHSIG), so that no orphan drives
a robot. A process that must stop a robot first requests another signal (`set_parent_death_signal`).
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hal.errors import SupervisionError
from hal.pacing import Backoff

logger = logging.getLogger(__name__)

_POLL_S = 0.05
EXIT_NOT_STARTED = os.EX_OSERR  # takes the place of an exit status if the process could not be started
KILL_WAIT_S = 5.0  # from SIGKILL to the end of the process
MAX_LOG_BYTES, LOG_COPIES = 8 << 20, 9  # of a log and of each older copy; the number of older copies

# Runs in the new process before the program: no Python code of a process with threads runs between fork and exec.
# 1 is PR_SET_PDEATHSIG (linux/prctl.h). It also detects a parent that died before the call.
_BIND_TO_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[1]));"
    "os.getppid() == int(sys.argv[2]) or os._exit(1); os.execv(sys.argv[3], sys.argv[4:])"
)


def bound_argv(program: str, argv: Sequence[str], number: int = signal.SIGKILL) -> list[str]:
    """The command line of a process that gets the signal `number` when the thread that starts it ends, also by a kill.

    Args:
        program: the path of its program.
    """
    return [sys.executable, "-ISc", _BIND_TO_PARENT, str(int(number)), str(os.getpid()), program, *argv]


def set_parent_death_signal(number: int) -> None:
    """Replaces SIGKILL by the signal `number`, if a supervisor has bound this process to itself."""
    libc, bound = ctypes.CDLL(None), ctypes.c_int(0)
    libc.prctl(2, ctypes.byref(bound))  # PR_GET_PDEATHSIG
    if bound.value:
        libc.prctl(1, number)


def shift_copies(log: Path) -> None:
    """Renames ``.1`` to ``.2`` and so on, so that the name ``.1`` is free; the oldest copy is replaced."""
    for number in range(LOG_COPIES, 1, -1):
        with contextlib.suppress(FileNotFoundError):
            log.with_name(f"{log.name}.{number - 1}").replace(log.with_name(f"{log.name}.{number}"))


class ProcessState(enum.StrEnum):
    """The state of a supervised process; see the module's docstring."""

    STOPPED = "stopped"
    RUNNING = "running"
    WAITING = "waiting"
    FAILED = "failed"


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How a process that exits by itself is restarted.

    Attributes:
        backoff_s, backoff_max_s: the first and the longest pause; each pause is twice the one before.
        max_failures: so many ends in a row with an error status lead to FAILED; 0 sets no limit. A process that a
            signal ended may succeed at its next start, so that end does not count.
        healthy_after_s: a process that ran for so long is healthy: its pauses and failures start over.
        tolerated_exits: error statuses that do not count.
        stop_after_s: the time from SIGTERM to SIGKILL.
    """

    backoff_s: float = 0.2
    backoff_max_s: float = 5.0
    max_failures: int = 0
    healthy_after_s: float = 120.0
    tolerated_exits: tuple[int, ...] = ()
    stop_after_s: float = 10.0


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The present status of a supervised process.

    Attributes:
        pid: of the running process, else None.
        restarts: the number of restarts since `start`.
        last_exit: the last exit status, or minus the signal that killed the process; None before the first end.
        error: the reason of FAILED, or why the last start was not possible; else empty.
    """

    state: ProcessState
    pid: int | None = None
    restarts: int = 0
    last_exit: int | None = None
    error: str = ""


class ProcessSupervisor:
    """One process and the thread that supervises it. Any thread may call it."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        restart: RestartPolicy | None = None,
        max_log_bytes: int = MAX_LOG_BYTES,
    ) -> None:
        """Args:
        argv: program and arguments.
        env: variables in addition to this process's own.
        log_path: the file that its output is appended to; None discards it. Beyond `max_log_bytes` the log replaces
            ``NAME.1``.
        restart: the restart policy.
        """
        self._argv = tuple(argv)
        self._env = {**os.environ, **(env or {})}
        self._log_path, self._max_log_bytes = log_path, max_log_bytes
        self._policy = restart or RestartPolicy()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._status = ProcessStatus(state=ProcessState.STOPPED)

    def start(self) -> None:
        """Starts the process and its supervision; harmless while it is RUNNING or WAITING.

        Raises:
            SupervisionError: the program is missing, its log cannot be written, or a process that `stop` could not end
                is still running.
        """
        with self._lock:
            if self._thread is not None:
                if self._stopping.is_set() and self._thread.is_alive():
                    raise self._unending()
                if self._status.state in (ProcessState.RUNNING, ProcessState.WAITING):
                    return
                self._thread.join(KILL_WAIT_S)  # its status is final, and the thread is about to end
            program = self._require_program()
            self._stopping.clear()
            self._status = ProcessStatus(state=ProcessState.WAITING)
            self._thread = threading.Thread(target=self._watch, args=(program,), name="supervisor", daemon=True)
            self._thread.start()

    def request_stop(self) -> None:
        """Begins `stop` without waiting; harmless if no process is running."""
        self._stopping.set()

    def stop(self) -> ProcessStatus:
        """Ends the process: SIGTERM, and SIGKILL after the policy's deadline. Blocks until it has ended.

        Raises:
            SupervisionError: SIGKILL did not end it, e.g. because it is blocked in a device.
        """
        with self._lock:
            self._stopping.set()
            if self._thread is not None:
                self._thread.join(self._policy.stop_after_s + 2 * KILL_WAIT_S)
                if self._thread.is_alive():
                    raise self._unending()
        return self._status

    def _unending(self) -> SupervisionError:
        return SupervisionError(f"process {self._status.pid} ({self._argv[0]}) does not end, not even by SIGKILL")

    def status(self) -> ProcessStatus:
        """The present status; never blocks."""
        return self._status

    def _require_program(self) -> str:
        program = shutil.which(self._argv[0]) if self._argv else None
        if program is None:
            raise SupervisionError(f"the program {self._argv[0] if self._argv else ''!r} is not installed")
        if self._log_path is not None:
            try:
                self._log_path.parent.mkdir(parents=True, exist_ok=True)
                self._log_path.open("ab").close()
            except OSError as error:
                raise SupervisionError(f"the log {self._log_path} cannot be written: {error}") from error
        return program

    def _watch(self, program: str) -> None:
        """Runs in the supervisor's thread, which starts every process: PR_SET_PDEATHSIG follows the forking thread."""
        policy, failures = self._policy, 0
        backoff = Backoff(policy.backoff_s, policy.backoff_max_s, jitter=False)
        while True:
            started_s = time.monotonic()
            code = self._run_once(program)
            if code is None:
                return
            if time.monotonic() - started_s >= policy.healthy_after_s:
                backoff.reset()
                failures = 0
            failures = failures + 1 if code > 0 and code not in policy.tolerated_exits else 0
            if policy.max_failures and failures >= policy.max_failures:
                self._give_up(failures, code)
                return
            if self._stopping.wait(backoff.next_s()):
                self._set(state=ProcessState.STOPPED, pid=None)
                return
            self._set(restarts=self._status.restarts + 1)

    def _run_once(self, program: str) -> int | None:
        """Runs the process to its end. Returns its exit code, or None if it must not be restarted.

        A start that the system refuses counts as a failure: it may lack memory or file descriptors for a moment.
        """
        try:
            child = self._launch(program)
        except OSError as error:
            reason = f"{self._argv[0]} cannot be started: {error}"
            self._set(state=ProcessState.WAITING, pid=None, last_exit=EXIT_NOT_STARTED, error=reason)
            logger.error("process.not_started %s", reason)
            return EXIT_NOT_STARTED
        while child.poll() is None:
            self._bound_log()
            if self._stopping.wait(_POLL_S):
                self._end(child)
                break
        stopped = self._stopping.is_set() or child.returncode == 0
        self._set(state=ProcessState.STOPPED if stopped else ProcessState.WAITING, pid=None, last_exit=child.returncode)
        logger.log(
            logging.INFO if stopped else logging.WARNING,
            "process.ended pid=%d exit=%s argv=%s",
            child.pid,
            child.returncode,
            self._argv,
        )
        return None if stopped else child.returncode

    def _launch(self, program: str) -> subprocess.Popen[bytes]:
        with open(self._log_path or os.devnull, "ab") as output:
            child = subprocess.Popen(
                bound_argv(program, self._argv),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the terminal reaches the launcher only
            )
        self._set(state=ProcessState.RUNNING, pid=child.pid, error="")
        logger.info("process.started pid=%d argv=%s", child.pid, self._argv)
        return child

    def _bound_log(self) -> None:
        """Copies a full log and truncates it, since the process keeps its file open for appending.

        What a process writes meanwhile is lost, and of a log that grew far beyond the bound the older part. A copy of
        the whole file would not end while the process writes as fast as it is read.
        """
        try:
            if self._log_path is not None and self._log_path.stat().st_size > self._max_log_bytes:
                with contextlib.suppress(OSError):  # a full disk: the older half of the log is lost
                    shift_copies(self._log_path)
                    copy = self._log_path.with_name(f"{self._log_path.name}.1")
                    with self._log_path.open("rb") as log, copy.open("wb") as newest:
                        log.seek(-self._max_log_bytes, os.SEEK_END)
                        newest.write(log.read(self._max_log_bytes))
                    shutil.copymode(self._log_path, copy)
                os.truncate(self._log_path, 0)
        except OSError as error:
            logger.debug("process.log_not_bounded path=%s error=%s", self._log_path, error)

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        """Returns when the process has ended. A process that is blocked in a device survives SIGKILL: `stop` raises
        then, and this thread keeps waiting."""
        child.terminate()
        if _has_exited(child, self._policy.stop_after_s):
            return
        logger.warning("process.killed pid=%d: SIGTERM did not end it in %g s", child.pid, self._policy.stop_after_s)
        child.kill()
        if not _has_exited(child, KILL_WAIT_S):
            logger.error("process.unending pid=%d: SIGKILL did not end it in %g s", child.pid, KILL_WAIT_S)
        while not _has_exited(child, KILL_WAIT_S):
            pass

    def _give_up(self, failures: int, code: int) -> None:
        last = self._status.error or exit_reason(code)
        error = f"{' '.join(self._argv)} failed {failures} times in a row, last {last}"
        if self._log_path is not None:
            error += f"; see {self._log_path}"
        self._set(state=ProcessState.FAILED, pid=None, error=error)
        logger.error("process.failed %s", error)

    def _set(self, **changes: object) -> None:
        self._status = msgspec.structs.replace(self._status, **changes)


def _has_exited(child: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        child.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def exit_reason(code: int) -> str:
    """`ProcessStatus.last_exit` for people, to follow "it ended"."""
    return f"by signal {-code}" if code < 0 else f"with exit status {code}"
