"""A learner's followers: processes that train with it, started and watched by it.

The learner's own process is rank 0. A follower that ends unasked ends the learner, with the reason; whoever looks after
the learner starts it again, from its checkpoint. A follower whose learner ends, by SIGKILL too, ends at once: their
socket closes.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from hal.spec import RobotSpec
from hal.supervision import cause
from user_sys.algorithms.ranks import Ranks
from user_sys.errors import RunError
from user_sys.learner.learner_config import LearnerConfig
from user_sys.learner.share import Turn

log = logging.getLogger(__name__)

CLOSE_S = 30.0
KILL_S = 10.0
NOTICE_S = 5.0
"""A collective fails soon after a process of it has ended; on GPUs it may not. Nobody waits for longer than this."""
LOOK_EVERY_S = 0.1
EXIT_STATUS = 2


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """All that a follower is told: the learner's settings, what it learns for and from, and which process it is.

    Attributes:
        checkpoints: folder of the learner's.
        device: ``cpu`` or ``cuda``.
        meeting: see `Ranks`.
    """

    config: LearnerConfig
    spec: RobotSpec
    store: str
    checkpoints: str
    features: tuple[str, ...] = ()
    seed: int = 0
    device: str = "cpu"
    meeting: str = ""
    rank: int = 0


@dataclass(frozen=True)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    line: socket.socket


class Followers:
    """A learner's followers, from entering to leaving. Entering blocks until all of them have come, and gives this
    process, as rank 0."""

    def __init__(self, assignment: Assignment) -> None:
        """`assignment` is everybody's: a follower gets it with a number of its own."""
        self._assignment = assignment
        self._ranks: Ranks | None = None
        self._meeting = Path()
        self._children: list[_Child] = []
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._why = ""

    def __enter__(self) -> Ranks:
        try:
            self._ranks = self._start()
        except BaseException as error:
            reason = self._reason(error)
            self._close(clean=False)
            if reason is error:
                raise
            raise reason from error
        return self._ranks

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        clean = error is None and self._dismiss()
        reason = error
        if not clean:
            reason = self._reason(error or RunError("the learner's followers did not end as they were told"))
        self._close(clean)
        if reason is not None and reason is not error:
            raise reason from error

    def _start(self) -> Ranks:
        config = self._assignment.config
        self._meeting = Path(tempfile.mkdtemp(prefix="learner-"))  # which nobody else may write to
        told = msgspec.structs.replace(self._assignment, meeting=str(self._meeting / "ranks"))
        for rank in range(1, config.processes):
            child = _launch(msgspec.structs.replace(told, rank=rank))
            self._children.append(child)
            threading.Thread(target=self._watch, args=(child,), name=f"rank-{rank}", daemon=True).start()
        return Ranks(0, config.processes, told.device, Path(told.meeting), config.publish.collective_ctas)

    def _watch(self, child: _Child) -> None:
        """Waits for the end of a follower; ends the learner where that came unasked and is not noticed otherwise."""
        while not self._closing.wait(LOOK_EVERY_S):
            if (status := child.process.poll()) is None:
                continue
            self._why = (
                f"process {child.rank} of the {self._assignment.config.processes} that train together ended "
                f"{cause(status)}; what it said is in the learner's log"
            )
            self._ended.set()
            log.error("learner.follower_ended %s", self._why)
            if not self._closing.wait(NOTICE_S):
                os._exit(EXIT_STATUS)  # the learner waits for one that is no more
            return

    def _dismiss(self) -> bool:
        """Whether all followers have ended as they were told."""
        try:
            assert self._ranks is not None  # it was entered
            self._ranks.tell(Turn.END)
        except RuntimeError:
            log.exception("learner.followers_gone")
            return False
        self._closing.set()
        until = time.monotonic() + CLOSE_S
        try:
            return all(child.process.wait(max(0.0, until - time.monotonic())) == 0 for child in self._children)
        except subprocess.TimeoutExpired:
            return False

    def _reason(self, error: BaseException) -> BaseException:
        """Why training failed with `error`: where a collective did, because a follower has ended."""
        if isinstance(error, RuntimeError | RunError) and self._ended.wait(NOTICE_S / 2):
            return RunError(self._why)
        return error

    def _close(self, clean: bool) -> None:
        self._closing.set()
        for child in self._children:
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait(KILL_S)
            child.line.close()
        if self._ranks is not None and (clean or self._assignment.device == "cpu"):
            self._ranks.leave()  # among GPUs this would wait for those that are gone
        if self._meeting.name:
            shutil.rmtree(self._meeting, ignore_errors=True)


def _launch(assignment: Assignment) -> _Child:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        number = theirs.fileno()
        argv = (sys.executable, "-m", "user_sys.learner.follower_process", str(number))
        process = subprocess.Popen(argv, pass_fds=[number], stdin=subprocess.DEVNULL)
    ours.send(msgspec.msgpack.encode(assignment))
    return _Child(assignment.rank, process, ours)
