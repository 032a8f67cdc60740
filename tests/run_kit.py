"""Starts the real command line in a process of its own, which ends with the test's, for tests of whole runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from wait_kit import until

from hal.process_supervisor import bound_argv

END_S = 600.0  # long enough on a busy machine
LEAVE_S = 120.0  # what Ray's processes may take to vanish after their driver has left


@dataclass
class Launch:
    """A running ``user-sys``: its output and its processes."""

    process: subprocess.Popen[bytes]
    runtime: Path
    out_path: Path
    err_path: Path

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        """Without the warning that its locks are those of tests."""
        lines = self.err_path.read_text().splitlines(keepends=True)
        return "".join(line for line in lines if " machine.test_folder " not in line)

    def wait(self, within_s: float = END_S) -> int:
        return self.process.wait(within_s)

    def interrupt(self) -> None:
        """Sends SIGINT to the process group, as a terminal does on Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def processes(self) -> dict[int, str]:
        """Command lines of its living descendants, identified by their environment."""
        mark = f"USER_SYS_TEST_FOLDER={self.runtime}".encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it ended meanwhile
                continue
        return found

    def pid_of(self, module: str) -> int | None:
        """The process that runs ``-m module``."""
        return next((pid for pid, line in self.processes().items() if f" -m {module} " in line), None)

    def require_nothing_left(self) -> None:
        until(lambda: not self.processes(), f"all processes are gone, but {self.processes()}", LEAVE_S)


@contextmanager
def user_sys(
    folder: Path,
    *argv: object,
    env: Mapping[str, str] | None = None,
    python: Path | str = sys.executable,
    runtime: Path | None = None,
) -> Iterator[Launch]:
    """``user-sys argv`` in `folder`, by `python`; its processes are killed at the end.

    Args:
        runtime: an existing empty folder for its locks and sockets; it is removed at the end.
    """
    runtime = runtime or Path(tempfile.mkdtemp(prefix="us-", dir="/tmp"))
    out, err = runtime / "out", runtime / "err"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "USER_SYS_TEST_FOLDER": str(runtime), **(env or {})}
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            bound_argv(str(python), [str(python), "-m", "user_sys.commands.main", *map(str, argv)], signal.SIGTERM),
            cwd=folder,
            stdout=stdout,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            env=variables,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
        )
    launch = Launch(process, runtime, out, err)
    try:
        yield launch
    finally:
        for pid in launch.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait(END_S)
        shutil.rmtree(runtime, ignore_errors=True)
