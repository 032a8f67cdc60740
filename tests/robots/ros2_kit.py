"""Starts the simulated ros2_control peer on a separate domain and controls it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PEER = Path(__file__).with_name("ros2_peer.py")
DDS_PEER = Path(__file__).with_name("ros2_dds_peer.py")
REPLY_S = 60.0
DOMAIN = random.SystemRandom().randrange(1, 100)  # so that several test runs on a machine do not interfere
OTHER_DOMAIN = DOMAIN + 1
HERE_ONLY = {"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST", "ROS_DOMAIN_ID": str(DOMAIN)}


class Ros2Peer:
    """The peer's process."""

    def __init__(self, domain: int, program: Path, *arguments: str, python: str = sys.executable) -> None:
        self._command = [python, str(program), str(domain), *arguments]
        self.start()

    def start(self) -> None:
        """Block until it is in the ROS graph."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **HERE_ONLY},
        )
        assert self._line() == "ready"

    def send(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def state(self) -> dict[str, Any]:
        self.send("state")
        found: dict[str, Any] = json.loads(self._line())
        return found

    def await_state(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a state that fulfils the condition."""
        deadline_s = time.monotonic() + REPLY_S
        while not holds(state := self.state()):
            assert time.monotonic() < deadline_s, state
            time.sleep(0.01)
        return state

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(REPLY_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], REPLY_S)[0], "the peer sends nothing"
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def ros2_peer(domain: int = DOMAIN, program: Path = PEER) -> Iterator[Ros2Peer]:
    peer = Ros2Peer(domain, program)
    try:
        yield peer
    finally:
        peer.kill()
