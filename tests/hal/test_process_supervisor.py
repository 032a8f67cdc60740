from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from wait_kit import until

import hal.process_supervisor
from hal.errors import SupervisionError
from hal.process_supervisor import EXIT_NOT_STARTED, ProcessState, ProcessStatus, ProcessSupervisor, RestartPolicy

QUICK = RestartPolicy(backoff_s=0.02, backoff_max_s=0.1, max_failures=4, stop_after_s=60)
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "node.log"


Make = Callable[..., ProcessSupervisor]


@pytest.fixture
def make(log: Path) -> Iterator[Make]:
    made: list[ProcessSupervisor] = []

    def build(argv: list[str], restart: RestartPolicy = QUICK, **env: str) -> ProcessSupervisor:
        made.append(ProcessSupervisor(argv, env, log, restart))
        return made[-1]

    yield build
    for supervisor in made:
        supervisor.stop()


def running(supervisor: ProcessSupervisor, log: Path, times: int = 1) -> int:
    """Waits until the process has started that many times; returns its pid."""
    until(lambda: log.exists() and log.read_text().count("up") >= times)
    until(lambda: supervisor.status().state is ProcessState.RUNNING)  # the output may precede the status
    pid = supervisor.status().pid
    assert pid is not None
    return pid


def test_process_gets_environment_and_its_output_is_logged(make: Make, log: Path) -> None:
    supervisor = make([sys.executable, "-c", "import os; print(os.environ['GREETING'])"], GREETING="hello there")
    supervisor.start()
    until(lambda: supervisor.status().state is ProcessState.STOPPED)
    assert log.read_text() == "hello there\n"
    assert supervisor.status() == ProcessStatus(state=ProcessState.STOPPED, last_exit=0)


def test_log_size_is_bounded(log: Path) -> None:
    script = "import sys\nwhile True: sys.stdout.write('x' * 999 + chr(10)); sys.stdout.flush()"
    older = log.with_name("node.log.1")
    supervisor = ProcessSupervisor([sys.executable, "-c", script], log_path=log, max_log_bytes=1_000_000)
    supervisor.start()
    try:
        until(log.with_name("node.log.2").exists)  # the log was full twice
    finally:
        supervisor.stop()
    assert older.stat().st_size == 1_000_000, "however fast it writes"


def test_killed_process_is_restarted(make: Make, log: Path) -> None:
    supervisor = make(SLEEP)
    supervisor.start()
    supervisor.start()
    first = running(supervisor, log)
    os.kill(first, signal.SIGKILL)
    second = running(supervisor, log, times=2)
    assert second != first and not alive(first)
    assert (supervisor.status().restarts, supervisor.status().last_exit) == (1, -signal.SIGKILL)


def test_crash_loop_fails_with_reason(make: Make, log: Path) -> None:
    supervisor = make([sys.executable, "-c", "print('no arm here'); raise SystemExit(7)"])
    supervisor.start()
    until(lambda: supervisor.status().state is ProcessState.FAILED)
    status = supervisor.status()
    assert (status.restarts, status.last_exit, status.pid) == (3, 7, None)
    assert "failed 4 times in a row, last with exit status 7" in status.error and str(log) in status.error
    assert log.read_text().count("no arm here") == 4
    assert supervisor.stop().state is ProcessState.FAILED


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"])
def test_kills_and_tolerated_exits_are_no_failures(make: Make, end: str) -> None:
    supervisor = make([sys.executable, "-c", end], msgspec.structs.replace(QUICK, max_failures=2, tolerated_exits=(3,)))
    supervisor.start()
    until(lambda: supervisor.status().restarts >= 4)
    assert supervisor.status().state is not ProcessState.FAILED


def test_process_that_ran_for_long_does_not_fail(make: Make, log: Path) -> None:
    policy = msgspec.structs.replace(QUICK, max_failures=2, healthy_after_s=0.0)
    supervisor = make([sys.executable, "-c", "raise SystemExit(1)"], policy)
    supervisor.start()
    until(lambda: supervisor.status().restarts >= 4)
    assert supervisor.status().state is not ProcessState.FAILED


def test_stopped_process_can_be_started_again(make: Make, log: Path) -> None:
    supervisor = make(SLEEP)
    supervisor.start()
    pid = running(supervisor, log)
    assert supervisor.stop() == ProcessStatus(state=ProcessState.STOPPED, last_exit=-signal.SIGTERM)
    assert not alive(pid)
    supervisor.stop()
    supervisor.start()
    running(supervisor, log, times=2)


def test_process_that_ignores_sigterm_is_killed(make: Make, log: Path) -> None:
    supervisor = make(STUBBORN, msgspec.structs.replace(QUICK, stop_after_s=0.2))
    supervisor.start()
    pid = running(supervisor, log)
    assert supervisor.stop().last_exit == -signal.SIGKILL
    assert not alive(pid)


def test_stop_ends_backoff_pause(make: Make) -> None:
    supervisor = make([sys.executable, "-c", "raise SystemExit(1)"], RestartPolicy(backoff_s=600))
    supervisor.start()
    until(lambda: supervisor.status().state is ProcessState.WAITING and supervisor.status().last_exit == 1)
    start = time.monotonic()
    assert supervisor.stop().state is ProcessState.STOPPED
    assert time.monotonic() - start < 60


def test_failed_start_is_repeated(make: Make, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, start = list[OSError](), subprocess.Popen

    def start_third(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if len(starts) < 2:
            starts.append(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            raise starts[-1]
        return start(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", start_third)
    supervisor = make(SLEEP)
    supervisor.start()
    running(supervisor, log)
    assert (supervisor.status().restarts, supervisor.status().last_exit) == (2, EXIT_NOT_STARTED)


def test_process_that_can_never_be_started_fails(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **options: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subprocess, "Popen", start)
    supervisor = make(SLEEP)
    supervisor.start()
    until(lambda: supervisor.status().state is ProcessState.FAILED)
    assert "failed 4 times in a row" in supervisor.status().error and "Too many open files" in supervisor.status().error


def test_missing_program_raises_at_start(tmp_path: Path) -> None:
    with pytest.raises(SupervisionError, match="program ./no/such/program. is not installed"):
        ProcessSupervisor(["/no/such/program"]).start()
    with pytest.raises(SupervisionError, match="is not installed"):
        ProcessSupervisor([]).start()
    (tmp_path / "logs").write_text("a file where the folder should be")
    with pytest.raises(SupervisionError, match="cannot be written"):
        ProcessSupervisor(SLEEP, log_path=tmp_path / "logs" / "node.log").start()


_PARENT = """
import sys, time; from pathlib import Path; from hal.process_supervisor import ProcessSupervisor
code = "import time; print('up', flush=True); time.sleep(600)"
ProcessSupervisor([sys.executable, "-c", code], None, Path(sys.argv[1])).start()
time.sleep(600)
"""


def test_process_ends_with_killed_supervisor(log: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT, str(log)]) as parent:
        until(lambda: log.exists() and "up" in log.read_text())
        children = Path(f"/proc/{parent.pid}/task").glob("*/children")
        (child,) = [int(pid) for path in children for pid in path.read_text().split()]
        assert alive(child)
        parent.kill()
    until(lambda: not alive(child))


def test_unkillable_process_is_reported_until_it_ends(make: Make, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = threading.Event()

    class Hanging(subprocess.Popen[bytes]):
        """A process that is blocked in a device and ignores signals until it is freed."""

        def send_signal(self, sig: int) -> None:
            if freed.is_set():
                super().send_signal(sig)

        def wait(self, timeout: float | None = None) -> int:
            if not freed.wait(0.01):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.kill()
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Hanging)
    monkeypatch.setattr(hal.process_supervisor, "KILL_WAIT_S", 0.05)
    supervisor = make(SLEEP, msgspec.structs.replace(QUICK, stop_after_s=0.05))
    try:
        supervisor.start()
        pid = running(supervisor, log)
        for call in (supervisor.stop, supervisor.start, supervisor.stop):
            with pytest.raises(SupervisionError, match=f"process {pid} .* does not end"):
                call()
        assert (supervisor.status().state, supervisor.status().pid, alive(pid)) == (ProcessState.RUNNING, pid, True)
    finally:
        freed.set()
    until(lambda: supervisor.status().state is ProcessState.STOPPED)
    assert not alive(pid)
    monkeypatch.undo()
    supervisor.stop()
    supervisor.start()
    running(supervisor, log, times=2)
