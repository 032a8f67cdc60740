"""Helpers of the edge's tests: recording robots, driver processes and deadlines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from wait_kit import until

from hal.robot import StopLevel
from hal.spec import Array
from robots.fake import GRIPPER_M, FakeRobot, FakeRobotConfig
from user_sys.compose import RobotConfig
from user_sys.config import save

END_S = 120.0  # longer than any wait on a busy machine

STILL = np.array([0, 0, 0, GRIPPER_M], np.float32)
RIGHT = np.array([0.05, 0, 0, GRIPPER_M], np.float32)


class RecordingRobot(FakeRobot):
    """A fake robot that records its commands and stops."""

    def __init__(self, config: FakeRobotConfig | None = None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        super().__init__(config, clock)
        self.commands: list[Array] = []
        self.stops: list[StopLevel] = []

    def command(self, action: Array) -> Array:
        self.commands.append(action.copy())
        return super().command(action)

    def stop(self, level: StopLevel) -> None:
        self.stops.append(level)
        super().stop(level)


@dataclass
class NodeProcess:
    """A process of the system and its log."""

    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_for_log(self, text: str, times: int = 1, within_s: float = END_S) -> str:
        """Waits until the log holds `text` `times` times."""
        until(lambda: self.log.count(text) >= times, f"{text!r} in:\n{self.log}", within_s)
        return self.log

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends the signal, waits, and returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(END_S)


@contextmanager
def node(argv: Sequence[object], log_path: Path) -> Iterator[NodeProcess]:
    """``python -m argv``, killed at the end if it still runs."""
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *map(str, argv)],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        yield NodeProcess(process, log_path)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(END_S)


@contextmanager
def driver_process(folder: Path, config: RobotConfig, log: str = "driver.log") -> Iterator[NodeProcess]:
    """A driver process of `config` with its state in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save(config, folder / "robot.yaml")
    with node(["user_sys.edge.driver_server", folder / "robot.yaml", folder], folder / log) as running:
        yield running


def error_lines(log: str) -> list[str]:
    """The log's error lines, without tracebacks."""
    assert "Traceback" not in log, log
    return re.findall(r"^\S+ \S+ E .*$", log, re.MULTILINE)
