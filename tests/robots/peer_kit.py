"""A simulated device in another process, which reads commands on standard input, one per line."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REPLY_S = 60.0
_numbers = itertools.count(64)


def free_host() -> str:
    """A loopback address of its own, for protocols with fixed ports."""
    pid = os.getpid()
    return f"127.{64 + next(_numbers) % 128}.{pid >> 8 & 255}.{pid & 255 or 1}"


def eventually(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + REPLY_S
    while not condition():
        assert time.monotonic() < until_s, what
        time.sleep(0.02)


class PeerProcess:
    """Attributes: `ready` is the rest of the line ``ready ...`` that it prints at its start."""

    def __init__(
        self, program: str, *arguments: str, env: Mapping[str, str] | None = None, python: str = sys.executable
    ) -> None:
        self._command = [python, str(Path(__file__).with_name(program)), *arguments]
        self._env = {**os.environ, **(env or {})}
        self.start()

    def start(self) -> None:
        """Block until it is ready."""
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._env
        )
        while not (line := self.line()).startswith("ready"):
            pass
        self.ready = line.removeprefix("ready").strip()

    def send(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def ask(self, order: str) -> Any:
        """The answer, a line of JSON; other lines are skipped."""
        self.send(order)
        while True:
            with contextlib.suppress(ValueError):
                return json.loads(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], REPLY_S)[0], "the peer sends nothing"
        line = self.process.stdout.readline()
        assert line, f"the peer ended with status {self.process.wait(REPLY_S)}"
        return line.strip()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """May be called twice."""
        self.process.kill()
        self.process.wait(REPLY_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def restart(self) -> None:
        self.kill()
        self.start()
