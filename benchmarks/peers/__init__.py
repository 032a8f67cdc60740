"""Peers that live in environments of their own, and measure themselves a round at a time when they are asked.

`start` runs ``python -m benchmarks.peers.NAME`` with the interpreter of `.venv-bench` or `.venv-lerobot` (`.ci/set-up
--bench`, `--lerobot`). The peer reports when it is ready, then answers each line with one figure, so that its rounds
fall between ours in time. It answers through a pipe of its own; what its libraries print goes to
``benchmarks/out/peer-NAME.log``.
"""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENTS = {"lerobot_buffer": ".venv-lerobot"}  # others: .venv-bench
DEADLINE_S = 180.0  # to fill a buffer, or for one round


class PeerFailed(Exception):
    """A peer ended or was silent for too long; its log says why."""


class Peer:
    """A peer's process. `round` makes it measure once."""

    def __init__(self, python: Path, name: str, arguments: tuple[str, ...]) -> None:
        """Starts it and waits until it has filled its buffer. Raises PeerFailed."""
        self._log = ROOT / "benchmarks" / "out" / f"peer-{name}.log"
        self._log.parent.mkdir(exist_ok=True)
        answers, theirs = os.pipe()
        self._answers = os.fdopen(answers)
        try:
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    [python, "-m", f"benchmarks.peers.{name}", str(theirs), *arguments],
                    cwd=ROOT,
                    env=os.environ | {"PYTHONPATH": str(ROOT)},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs],
                    text=True,
                    bufsize=1,
                )
        finally:
            os.close(theirs)
        try:
            self._hear()
        except BaseException:
            self.close()
            raise

    def _hear(self, deadline_s: float = DEADLINE_S) -> float:
        ready, _, _ = select.select([self._answers], [], [], deadline_s)
        line = self._answers.readline() if ready else ""
        if not line:
            raise PeerFailed(f"see {self._log}")
        return float(line)

    def round(self, deadline_s: float = DEADLINE_S) -> float:
        """One figure, in the peer's own unit. Blocks for as long as it measures. Raises PeerFailed."""
        assert self._process.stdin is not None
        self._process.stdin.write("round\n")
        return self._hear(deadline_s)

    @property
    def last_line(self) -> str:
        """Of its log; empty if it wrote nothing."""
        return (self._log.read_text().splitlines() or [""])[-1]

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._answers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def start(name: str, *arguments: object) -> Peer | str:
    """The peer, ready to measure; or why it cannot be measured, in words."""
    environment = ENVIRONMENTS.get(name, ".venv-bench")
    python = ROOT / environment / "bin" / "python"
    if not python.exists():
        return f"not installed: .ci/set-up --{environment.removeprefix('.venv-')}"
    try:
        return Peer(python, name, tuple(map(str, arguments)))
    except PeerFailed as error:
        return f"does not run: {error}"
