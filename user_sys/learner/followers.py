"""A learner's followers: processes that train with it, on its computer or others of the cluster.

The learner's own process is rank 0. The others are started by whoever starts that one, come in to it over a `line`, and
are told what to train. A follower that ends unasked ends the learner, with the reason; whoever looks after them
starts them all again, from the learner's checkpoint. A follower whose learner ends, by SIGKILL too, ends at once, and
within `line.SILENT_S` where the learner's computer vanishes.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from hal.spec import RobotSpec
from user_sys.algorithms.ranks import COLLECTIVE_S, Ranks, open_meeting
from user_sys.errors import LinkDown, RunError, WireError
from user_sys.learner.learner_config import LearnerConfig
from user_sys.learner.line import Entrance, Line
from user_sys.learner.share import Turn

log = logging.getLogger(__name__)

COME_S = COLLECTIVE_S
"""From the learner's start until all of its followers have come: their computers may be slow to start a process."""
CLOSE_S = 30.0
NOTICE_S = 5.0
"""A collective fails soon after a process of it has ended; on GPUs it may not. Nobody waits for longer than this."""
EXIT_STATUS = 2
MAX_ASSIGNMENT_BYTES = 200 << 10
MAX_FAREWELL_BYTES = 8 << 10


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """All that a follower is told: the learner's settings, what it learns for and from, and where all of them meet.

    Attributes:
        checkpoints: folder of the learner's.
        device: ``cpu`` or ``cuda``.
        host, port: see `ranks.find_meeting`.
    """

    config: LearnerConfig
    spec: RobotSpec
    store: str
    checkpoints: str
    features: tuple[str, ...] = ()
    seed: int = 0
    device: str = "cpu"
    host: str = ""
    port: int = 0


@dataclass(frozen=True)
class Place:
    """Of a process among the learner's.

    Attributes:
        address: where the others find it; of its computer.
        card: which of the GPUs that it sees is its own, where it trains on one.
    """

    address: str
    card: int = 0


class Farewell(msgspec.Struct, frozen=True):
    """A follower's last word: it has ended the training because of `error`, or as it was told, and will now leave."""

    error: str = ""


class Followers:
    """A learner's followers, from entering to leaving. Entering blocks until all of them have come, and gives this
    process, as rank 0; None where it was told to stop before."""

    def __init__(self, assignment: Assignment, place: Place, stop: threading.Event) -> None:
        """`stop` ends the wait for the followers."""
        self._assignment, self._place, self._stop = assignment, place, stop
        self._ranks: Ranks | None = None
        self._lines: dict[int, Line] = {}
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._left: set[int] = set()
        self._changed = threading.Condition()
        self._why = ""

    def __enter__(self) -> Ranks | None:
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
        if self._ranks is None:
            return
        clean = error is None and self._dismiss(self._ranks)
        reason = error
        if not clean:
            reason = self._reason(error or RunError("the learner's followers did not end as they were told"))
        self._close(clean)
        if reason is not None and reason is not error:
            raise reason from error

    def _start(self) -> Ranks | None:
        told = self._assignment
        processes = told.config.processes
        log.info("learner.awaits_followers count=%d address=%s", processes - 1, self._place.address)
        entrance = Entrance(Path(told.checkpoints), self._place.address, range(1, processes))
        try:
            self._lines = entrance.await_all(COME_S, self._stop)
        finally:
            entrance.close()
        if not self._lines:
            return None
        meeting = open_meeting(self._place.address, processes)
        told = msgspec.structs.replace(told, host=self._place.address, port=meeting.port)
        for rank, line in self._lines.items():
            threading.Thread(target=self._watch, args=(rank, line), name=f"rank-{rank}", daemon=True).start()
            line.send(told)
        device = f"cuda:{self._place.card}" if told.device == "cuda" else told.device
        return Ranks(0, processes, device, meeting, self._place.address, told.config.publish.collective_ctas)

    def _watch(self, rank: int, line: Line) -> None:
        """Waits for the end of a follower; ends the learner where that came unasked and is not noticed otherwise."""
        try:
            error = line.receive(Farewell, MAX_FAREWELL_BYTES).error
            if not error:
                with self._changed:
                    self._left.add(rank)
                    self._changed.notify_all()
                return
            how = f"failed: {error}"
        except (LinkDown, WireError) as gone:
            how = f"is gone ({gone}); its own log may say why"
        if self._closing.is_set():
            return
        self._gone_because(f"process {rank} of the {self._assignment.config.processes} that train together {how}")
        if not self._closing.wait(NOTICE_S):
            os._exit(EXIT_STATUS)  # the learner waits for one that is no more

    def _gone_because(self, why: str) -> None:
        with self._changed:
            if not self._ended.is_set():  # else this one failed because of the first that did
                self._why = why
                self._ended.set()
                log.error("learner.follower_ended %s", why)
            self._changed.notify_all()

    def _dismiss(self, ranks: Ranks) -> bool:
        """Whether all followers have ended as they were told."""
        try:
            ranks.tell(Turn.END)
        except RuntimeError:
            log.exception("learner.followers_gone")
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._left == self._lines.keys() or self._ended.is_set(), CLOSE_S)
            return self._left == self._lines.keys()

    def _reason(self, error: BaseException) -> BaseException:
        """Why training failed with `error`: where a collective did, because a follower has ended."""
        if isinstance(error, RuntimeError | RunError | LinkDown) and self._lines and self._ended.wait(NOTICE_S / 2):
            return RunError(self._why)
        return error

    def _close(self, clean: bool) -> None:
        self._closing.set()
        for line in self._lines.values():
            line.close()
        if self._ranks is not None and (clean or self._assignment.device == "cpu"):
            self._ranks.leave()  # as its followers do now; among GPUs this would wait for those that are gone
