"""Starts a simulated FR3 in a separate process and controls it."""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

PEER = Path(__file__).with_name("franka_peer.py")
DEADLINE_S = 60.0
_numbers = itertools.count(64)


class FrankaSimulator:
    def __init__(self) -> None:
        pid = os.getpid()
        self.host = f"127.{64 + next(_numbers) % 128}.{pid >> 8 & 255}.{pid & 255 or 1}"
        command = [sys.executable, str(PEER), self.host]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.await_line("ready")

    def set(self, name: str, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"set {name} {json.dumps(value)}\n")
        self.process.stdin.flush()
        self.await_line("done")

    def angles(self) -> list[float]:
        """The joint angles (7,) of the arm, rad."""
        assert self.process.stdin is not None
        self.process.stdin.write("angles\n")
        self.process.stdin.flush()
        while not (line := self._line()).startswith("["):
            pass
        found: list[float] = json.loads(line)
        return found

    def await_line(self, wanted: str) -> None:
        while self._line() != wanted:
            pass

    def _line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], DEADLINE_S)[0], "the arm sends nothing"
        line = self.process.stdout.readline()
        assert line, f"the arm ended with status {self.process.wait(DEADLINE_S)}"
        return line.strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
