"""Starts the simulated controller, each on a separate loopback address, because the protocol fixes the ports."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PEER = Path(__file__).with_name("ur_peer.py")
REPLY_S = 60.0
_numbers = itertools.count(64)


def free_host() -> str:
    pid = os.getpid()
    return f"127.{64 + next(_numbers) % 128}.{pid >> 8 & 255}.{pid & 255 or 1}"


class SimulatedController:
    """The peer process."""

    def __init__(self) -> None:
        self.host = free_host()
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PEER), self.host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready"

    @property
    def state(self) -> dict[str, Any]:
        self._say("state")
        found: dict[str, Any] = json.loads(self._line())
        return found

    def begun(self, command: int) -> int:
        """The number of times that the control program received that command."""
        count: int = self.state["commands"].get(str(command), 0)
        return count

    def set(self, name: str, value: Any) -> None:
        self._say(f"set {name} {json.dumps(value)}")
        assert self._line() == "done"

    def reset(self) -> None:
        self._say("reset")
        assert self._line() == "done"

    def unplug(self) -> None:
        self._say("unplug")
        self._process.wait(REPLY_S)

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(REPLY_S)

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _say(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], REPLY_S)[0], "the controller sends nothing"
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def simulated_controller() -> Iterator[SimulatedController]:
    controller = SimulatedController()
    try:
        yield controller
    finally:
        controller.close()
